"""One command for the day a GPU is there: measures and checks what a GPU changes, part by part.

    make gpu                                              # set up, then this
    python benchmarks/gpu.py                              # every part without a result, or with one that failed
    python benchmarks/gpu.py --parts machine,survival     # these alone
    python benchmarks/gpu.py --fresh                      # forget earlier results and measure anew

    machine        versions, speed of matrix products, of memory and of an all-reduce over the GPUs
    a task's name  its script at published size: samples/s, wait for data, peak memory beside tools.rehearse, MFU
    same_answer    --deterministic by one process and by several: equal to the bit
    resume         --deterministic, killed and resumed: equal to the bit
    variants       fp32, fp16, compiled and recomputed activations over plain bf16
    frameworks     the survival script over a bare loop, Accelerate, Fabric, HF Trainer and MONAI

On a GPU it writes benchmarks/gpu/<device>.json and the table in benchmarks/RESULTS.md after each part, so that an
interrupted run goes on where it was. Without one, or with --tiny, the same code runs at tiny sizes, of the checks one
task, and writes into --folder alone. Weights and data are made up; nothing is downloaded. Exit code 0: nothing failed.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
BEGIN = "<!-- benchmarks/gpu.py writes from here -->"
END = "<!-- to here -->"

SCRIPTS = {
    "prs_med": "train_prs_med.py",
    "mimic_cxr": "train_mimic_cxr.py",
    "survival": "train_survival_distributed.py",
    "cascade": "train_accelerate.py",
    "compressed_ad": "train.py",
}
PARTS = ("machine", *SCRIPTS, "same_answer", "resume", "variants", "frameworks")

# The sample data. At full size a model's input is as large as published, whatever the size of the file.
SAMPLES = {
    "tiny": {
        "prs_med": "--num_train 16 --num_val 1 --num_test 1 --image_size 48",
        "mimic_cxr": "--num_train 6 --num_val 2 --num_test 2 --image_size 80",
        "survival": "--num_patients 150 --matrix 14 --event_rate 0.5",
        "cascade": "--num_patients 24 --matrix 16",
        "compressed_ad": "--streams 2 --steps 100",
    },
    "full": {
        "prs_med": "--num_train 130 --num_val 1 --num_test 1 --image_size 512",
        "mimic_cxr": "--num_train 200 --num_val 2 --num_test 2 --image_size 256",
        "survival": "--num_patients 300 --matrix 64 --event_rate 0.5",
        "cascade": "--num_patients 40 --matrix 128",
        "compressed_ad": "--streams 10 --steps 1000",
    },
}
# Flags of a run at each size. At full size batches are each script's own, and models are those of the papers with
# random weights. {data}: the folder of the sample data.
STAGE = '{"name":"stage1","volume_size":[8,8,8],"voxel_dim":16,"vit_depth":1,"num_heads":2,"token_grid":4}'
STAGE_EPOCHS = 6
FLAGS = {
    "tiny": {
        "prs_med": "--data_root {data} --batch_size 4 --num_workers 0 --lr_scaling none --max_new_tokens 2",
        "mimic_cxr": """
            --data_path {data}/prepared --image_encoder {data}/convnext_tiny --text_encoder {data}/bert_tiny
            --batch_size 8 --num_workers 0 --no_auto_optimize --warmup_steps 2
        """,
        "survival": """
            --csv_path {data}/dataset.csv --cache_dir {data}/cache --batch_size 8 --num_workers 0
            --resnet resnet10 --base_channels 8 --image_size 16 16 8
        """,
        "cascade": """
            --dataset_path {data} --cache_dir {data}_cache --batch_size 4 --num_workers 0 --img_size 32
            --encoder_dim 16 --num_timesteps 20 --ddim_steps 2 --num_epochs_per_stage 40 --stage_configs {stage}
        """,
        "compressed_ad": """
            --data {data} --batch_size 8 --num_warmup_steps 2 --train_timesteps 40 --tf_n_embd 16 --tf_n_layer 2
            --tf_n_head 2 --encoder_n_layer 1 --tf_dim_feedforward 32 --n_transit 20 --n_latent 4
            --eval_interval 0 --eval_episodes 2 --val_episodes 2 --eval_seeds 1
        """,
    },
    "full": {
        "prs_med": """
            --data_root {data} --max_new_tokens 2
            --vlm_path configs/models/llava_med_v1.5_mistral_7b --sam_path configs/models/sam_vit_base
        """,
        "mimic_cxr": """
            --data_path {data}/prepared
            --image_encoder configs/models/convnext_base --text_encoder configs/models/bio_clinicalbert
        """,
        "survival": "--csv_path {data}/dataset.csv --cache_dir {data}/cache --batch_size 6",
        "cascade": f"""
            --config configs/multi_view_config.json --dataset_path {{data}} --cache_dir {{data}}_cache
            --num_epochs_per_stage {STAGE_EPOCHS} --ddim_steps 2 --skip_alignment_check
        """,
        "compressed_ad": """
            --data {data} --mixed_precision fp16 --eval_interval 0 --eval_episodes 20 --val_episodes 20 --eval_seeds 2
        """,
    },
}
# Model FLOPs utilisation that a script should reach; CompressedAD's small layers are bound by kernel launches.
LEAST_MFU = {"prs_med": 0.2, "mimic_cxr": 0.1, "survival": 0.2, "cascade": 0.1, "compressed_ad": 0.0}


class Failed(Exception):
    """A command that did not end as it should; the message says how."""


def row(what: str, value: float | str, least=None, most=None, equal=None, note: str = "") -> dict:
    """A line of the report, with what is wanted of the value; NaN meets no bound."""
    ok = (least is None or value >= least) and (most is None or value <= most) and equal in (None, value)
    wanted = f">= {least}" * (least is not None) + f" <= {most}" * (most is not None) + (equal or "")
    return {"what": what, "value": value, "ok": ok, "wanted": wanted.strip(), "note": note}


# --- running a script -------------------------------------------------------------------------------------------------


def find_gpus() -> list[str]:
    """Names of the GPUs that torch can use, asked by a process that then gives them back."""
    code = "import json, torch; n = torch.cuda.device_count(); "
    code += "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: torch does not start ({done.stderr.strip().splitlines()[-1]}); run `make setup`")
    return json.loads(done.stdout.splitlines()[-1])


def environment(gpus: int) -> dict[str, str]:
    """The variables of a command that may use so many GPUs, the first of those that this process may use."""
    variables = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = visible.split(",") if visible else map(str, range(gpus))
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(list(numbers)[:gpus])
    if not gpus:
        variables["OMP_NUM_THREADS"] = "1"
    return variables


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a process and to all that it has started."""
    import psutil

    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def run_command(command: list, log: Path, variables: dict[str, str], limit: float = 500) -> str:
    """Run a command with its output in `log`; returns the last JSON object that it printed, "" without one.

    Raises Failed where it does not end well, or takes more than `limit` seconds, after which it is killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        process = subprocess.Popen([*map(str, command)], cwd=ROOT, env=variables, stdout=file, stderr=file)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise Failed(f"took more than {limit:.0f} s and was killed; see {log}") from None
        finally:
            if process.poll() is None:
                kill(process)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
    if code:
        errors = [line for line in lines if re.match(r"error:|\w*(Error|Exception)\b", line)]
        raise Failed(f"exit code {code}: {(errors or lines)[-1][:300]}")
    return next((line for line in reversed(lines) if line.startswith("{")), "")


def flags_of(options: argparse.Namespace, task: str, size: str) -> list[str]:
    """The flags of a task at its full or tiny size; its sample data are written where they are not there."""
    data = options.folder / "data" / size / task
    made = data.with_name(f"{task}.made")
    if not made.exists():
        shutil.rmtree(data, ignore_errors=True)
        commands = [f"sample_data {task} {data} {SAMPLES[size][task]}"]
        if task == "mimic_cxr":
            side = 224 if size == "full" else 64
            releases = f"{data}/mimic-cxr-jpg {data}/mimic-ext-cxr-qba"
            commands += [f"prepare_data mimic_cxr {releases} {data}/prepared --image_size {side}"]
        for words in commands:
            log = options.folder / "data" / f"{task}.log"
            run_command([sys.executable, "-m", *f"tools.{words}".split()], log, environment(0))
        made.touch()
    return [word.replace("{data}", str(data)).replace("{stage}", STAGE) for word in FLAGS[size][task].split()]


def command_of(options, task: str, size: str, flags: list, out: Path, processes: int = 1) -> list:
    """The command of a run, by torchrun for several processes, which may have to share one GPU."""
    command = [sys.executable]
    if processes > 1:
        command += ["utils/torchrun.py", "--standalone", f"--nproc_per_node={processes}"]
    command += ["benchmarks/gpu.py", "run_script", *["share_gpu"] * (0 < options.gpus < processes), SCRIPTS[task]]
    return [*command, *flags_of(options, task, size), "--output_dir", out, *flags]


def train(options, task: str, name: str, size: str, flags: list, processes: int = 1) -> Path:
    """A run of a task's script, from its start or resumed as the flags say; returns its folder. Raises Failed."""
    out = options.folder / "runs" / f"{task}_{name}"
    if "--resume_from" not in flags:
        shutil.rmtree(out, ignore_errors=True)
    command = command_of(options, task, size, flags, out, processes)
    run_command(command, out.with_suffix(".log"), environment(min(processes, options.gpus)))
    return out


def training_lines(out: Path) -> list[dict]:
    """The lines of metrics.jsonl about training."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def run_script(words: list[str]) -> None:
    """In the process of a run: the script as it is, but that models of full size get random weights."""
    import torch
    import torch.distributed as dist
    import transformers

    if words[0] == "share_gpu":
        # NCCL refuses two ranks on one GPU
        words = words[1:]
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        dist.is_nccl_available = lambda: False
    load = transformers.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls, path, *args, **options):
        if any(Path(path).glob("*.safetensors")):
            return load(cls, path, *args, **options)
        torch.manual_seed(0)
        config = options.get("config") or cls.config_class.from_pretrained(path)
        with torch.device((options.get("device_map") or {}).get("", "cpu")):
            model = cls._from_config(config, dtype=options.get("dtype") or torch.float32).eval()
        return (model, {"missing_keys": []}) if options.get("output_loading_info") else model

    transformers.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    sys.argv = words
    sys.path.insert(0, str(ROOT))
    runpy.run_path(words[0], run_name="__main__")


# --- parts ------------------------------------------------------------------------------------------------------------


def machine(options: argparse.Namespace) -> Iterator[dict]:
    """What this machine is and does."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    yield row("date", datetime.date.today().isoformat())
    yield row("commit", commit.stdout.strip() or "unknown")
    yield row("device", options.device)
    for name in ("torch", "transformers", "accelerate", "deepspeed", "monai"):
        if importlib.util.find_spec(name):
            yield row(name, importlib.metadata.version(name))
    processes = options.gpus or 2
    command = [sys.executable, "utils/torchrun.py", "--standalone", f"--nproc_per_node={processes}"]
    command += ["benchmarks/gpu.py", "measure_machine"]
    facts = run_command(command, options.folder / "machine.log", environment(options.gpus), 200)
    for name, value in json.loads(facts).items():
        yield row(name, value)


def measure_machine() -> None:
    """In each process that torchrun has started: the last line on rank 0 is a JSON object of what was measured."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    facts = {}

    def seconds(call: Callable[[], object]) -> float:
        """The mean of 10 calls, after one that warms up."""
        call()
        if on_gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(10):
            call()
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / 10

    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
        facts |= {"CUDA": torch.version.cuda, "cuDNN": str(torch.backends.cudnn.version())}
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        values = torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16)
        facts["bf16 product TFLOP/s"] = 2 * 8192**3 / seconds(lambda: values @ values) / 1e12
        facts["memory copy GB/s"] = 2 * values.nbytes / seconds(values.clone) / 1e9
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world_size = dist.get_world_size()
    if world_size > 1:
        values = torch.ones(2**24, device="cuda" if on_gpu else "cpu")
        rate = values.nbytes / seconds(lambda: dist.all_reduce(values)) / 1e9
        # of each link, as NCCL's own tests count it
        facts[f"all-reduce of 64 MiB, {world_size} processes, GB/s"] = rate * 2 * (world_size - 1) / world_size
    if dist.get_rank() == 0:
        print(json.dumps(facts), flush=True)
    dist.destroy_process_group()


def speed_flags(task: str, size: str) -> list:
    """Of a run whose log lines tell its speed, where the first line warms up."""
    if size == "tiny":
        return ["--max_steps", 6, "--log_every", 2, "--save_every", 0]
    # the cascade's three stages end by their epochs; 32 patients make 2, 4 and 8 steps of them
    steps = ["--log_every", 2] if task == "cascade" else ["--log_every", 10, "--max_steps", 30]
    return [*steps, "--save_every", 0]


def measured_lines(task: str, size: str, out: Path) -> dict[str, list[dict]]:
    """The log lines that tell a run's speed, by the name of the cascade's stage, "" elsewhere."""
    if task != "cascade" or size == "tiny":
        return {"": training_lines(out)[1:]}
    stages: dict[str, list[dict]] = {}
    for line in training_lines(out):
        stage, epoch = divmod(line["epoch"] - 1, STAGE_EPOCHS)
        if epoch:
            stages.setdefault(f"stage {stage + 1}: ", []).append(line)
    return stages


def samples_per_s(lines: list[dict]) -> float:
    return statistics.median(line["train/samples_per_s"] for line in lines)


def peak_gib(lines: list[dict]) -> float:
    """GiB that torch reserved; on a CPU the process's resident memory."""
    return max(line["train/peak_memory_gb"] for line in lines)


def one_task(options: argparse.Namespace, task: str, results: dict) -> Iterator[dict]:
    """A script at its published size, beside what tools.rehearse predicts."""
    size, full = options.size, options.size == "full"
    out = train(options, task, "speed", size, speed_flags(task, size))
    for stage, lines in measured_lines(task, size, out).items():
        yield row(f"{stage}samples/s", samples_per_s(lines))
        # the made-up data come from a cache: the GPU should not wait
        wait = statistics.mean(line["train/data_wait"] for line in lines)
        yield row(f"{stage}wait for data, share of time", wait, most=0.05 if full else None)
    # of the cascade the last stage, which is the one that is rehearsed
    yield row("peak GiB", peak_gib(lines))
    command = [sys.executable, "-m", "tools.rehearse", SCRIPTS[task], *flags_of(options, task, size)]
    log = options.folder / "runs" / f"{task}_rehearsed.log"
    rehearsed = json.loads(run_command(command, log, environment(min(1, options.gpus))))
    yield row("peak GiB, rehearsed", rehearsed["peak_gib"])
    if full:
        # questions and segments of a real batch are shorter than the longest, which are rehearsed
        least = 0.0 if task in ("mimic_cxr", "compressed_ad") else 0.85
        yield row("peak over the rehearsed one", peak_gib(lines) / rehearsed["peak_gib"], least, 1.15)
        steps_per_s = samples_per_s(lines) / json.loads((out / "summary.json").read_text())["effective_batch_size"]
        product = next(line["value"] for line in results["machine"] if line["what"] == "bf16 product TFLOP/s")
        mfu = steps_per_s * rehearsed["tflop_per_step"] / product
        yield row("MFU, of the measured matrix product", mfu, LEAST_MFU[task])


def difference(one: Path, other: Path) -> str:
    """Where the losses, gradient norms or final weights of two runs differ; "none" if they do not."""
    names = ("step", "train/loss", "train/grad_norm")
    ours, theirs = ([[line[name] for name in names] for line in training_lines(out)] for out in (one, other))
    for left, right in zip(ours, theirs, strict=False):
        if left != right:
            return f"{left} and {right}"
    if len(ours) != len(theirs):
        return f"{len(ours)} and {len(theirs)} steps"
    same = (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    return "none" if same else "final weights"


def checked_tasks(options: argparse.Namespace) -> list[str]:
    """On a CPU the tests check all five."""
    return list(SCRIPTS) if options.gpus else ["compressed_ad"]


def same_answer(options: argparse.Namespace) -> Iterator[dict]:
    """Three steps of four leaves by one process, and by several."""
    processes = min(4, max(2, options.gpus))
    flags = ["--max_steps", 3, "--log_every", 1, "--save_every", 0, "--deterministic"]
    flags += ["--effective_batch_size", 4, "--batch_size", 1]
    for task in checked_tasks(options):
        try:
            alone = train(options, task, "alone", "tiny", flags)
            together = train(options, task, "together", "tiny", flags, processes)
            found = difference(alone, together)
        except Failed as error:
            found = str(error)
        yield row(f"{task}: difference, 1 and {processes} processes", found, equal="none")


def resume(options: argparse.Namespace) -> Iterator[dict]:
    """A run that is killed after its first checkpoint and resumed, against one that was not."""
    flags = ["--max_steps", 30, "--log_every", 1, "--save_every", 2, "--deterministic"]
    for task in checked_tasks(options):
        out = options.folder / "runs" / f"{task}_killed"
        shutil.rmtree(out, ignore_errors=True)
        try:
            whole = train(options, task, "whole", "tiny", flags)
            with open(out.with_suffix(".log"), "w") as log:
                command = map(str, command_of(options, task, "tiny", flags, out))
                variables = environment(min(1, options.gpus))
                process = subprocess.Popen([*command], cwd=ROOT, env=variables, stdout=log, stderr=log)
            while not any(out.glob("step_*.pt")):
                if process.poll() is not None:
                    raise Failed(f"ended before its first checkpoint; see {out.with_suffix('.log')}")
                time.sleep(0.002)
            kill(process)
            note = f"killed after {len(training_lines(out))} of 30 steps"
            train(options, task, "killed", "tiny", [*flags, "--resume_from", "auto"])
            found = difference(whole, out)
        except Failed as error:
            found, note = str(error), ""
        yield row(f"{task}: difference after a kill", found, equal="none", note=note)


def variants(options: argparse.Namespace) -> Iterator[dict]:
    """Each script in other precisions, compiled, and with recomputed activations."""
    chosen = {"fp32": ["--mixed_precision", "no"], "checkpointing": ["--gradient_checkpointing"]}
    if options.gpus:
        # on a CPU there is no fp16, and compiling takes minutes
        chosen |= {"fp16": ["--mixed_precision", "fp16"], "compile": ["--compile"]}
    least = {"fp16": 0.9, "compile": 0.97, "checkpointing": 0.6} if options.size == "full" else {}
    for task in SCRIPTS if options.gpus else ["mimic_cxr"]:
        bf16 = [*speed_flags(task, options.size), "--mixed_precision", "bf16"]
        plain = list(measured_lines(task, options.size, train(options, task, "bf16", options.size, bf16)).values())[-1]
        for name, flags in chosen.items():
            if name == "checkpointing" and task in ("survival", "compressed_ad"):
                # which have no such flag
                continue
            try:
                out = train(options, task, name, options.size, [*bf16, *flags])
            except Failed as error:
                yield row(f"{task}: {name}", str(error), equal="to end well")
                continue
            lines = list(measured_lines(task, options.size, out).values())[-1]
            yield row(
                f"{task}: speed of {name} over bf16", samples_per_s(lines) / samples_per_s(plain), least.get(name)
            )
            yield row(f"{task}: memory of {name} over bf16", peak_gib(lines) / peak_gib(plain))


def frameworks(options: argparse.Namespace) -> Iterator[dict]:
    """The survival script's loop over others' of the same model, as far as they are installed."""
    flags = [*flags_of(options, "survival", options.size), "--mixed_precision", "bf16" if options.gpus else "no"]
    command = [sys.executable, "benchmarks/frameworks.py", *flags]
    rates = json.loads(run_command(command, options.folder / "frameworks.log", environment(min(1, options.gpus))))
    ours = rates.pop("this project")
    for name, rate in rates.items():
        yield row(f"speed of this project over {name}", ours / rate, 0.97 if options.size == "full" else None)


# --- the report -------------------------------------------------------------------------------------------------------


def shown(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_table(path: Path, results: dict[str, list[dict]]) -> None:
    """Replace what stands between the two marks of RESULTS.md."""
    facts = [f"{line['what']} {shown(line['value'])}" for line in results.get("machine", ())]
    rows = [f"`python benchmarks/gpu.py`: {'; '.join(facts)}.", ""]
    rows += ["| part | what | value | wanted | note |", "| --- | --- | --- | --- | --- |"]
    for part, lines in results.items():
        for line in lines if part != "machine" else ():
            note = line["note"] if line["ok"] else f"FAILED {line['note']}"
            cells = [part, line["what"], shown(line["value"]), line["wanted"], note.strip()]
            rows.append("| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |")
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text("\n".join([before + BEGIN, *rows, END + after]), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results of these parts")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a GPU too: a trial of minutes")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/gpu", help="data, runs, the report of tiny sizes")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    names = options.parts.split(",")
    for name in names:
        if name not in PARTS:
            parser.error(f"--parts {name}: no such part; there are {', '.join(PARTS)}")

    gpus = find_gpus()
    options.gpus = len(gpus)
    options.device = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU"
    options.size = "tiny" if options.tiny or not gpus else "full"
    report_folder = ROOT / "benchmarks" / "gpu" if options.size == "full" else options.folder
    report = report_folder / (re.sub(r"\W+", "_", gpus[0] if gpus else "cpu") + ".json")
    report_folder.mkdir(parents=True, exist_ok=True)
    results = json.loads(report.read_text()) if report.exists() else {}
    if gpus and "machine" not in results and "machine" not in names:
        # whose matrix product the MFU is a share of
        names = ["machine", *names]
    others = {part.__name__: part for part in (machine, same_answer, resume, variants, frameworks)}
    for name in names:
        if name in results and not options.fresh and all(line["ok"] for line in results[name]):
            print(f"== {name}: has its result; --fresh measures it anew", flush=True)
            continue
        print(f"== {name}", flush=True)
        lines = []
        try:
            for line in others[name](options) if name in others else one_task(options, name, results):
                lines.append(line)
        except Exception as error:
            lines.append(row("whole part", f"{type(error).__name__}: {error}", equal="to end well"))
        for line in lines:
            mark = "" if line["ok"] else "FAILED "
            print(f"{mark}{line['what']}: {shown(line['value'])} {line['note']}", flush=True)

        # after each part, as a lent machine may end at any time
        results = {part: lines if part == name else results[part] for part in PARTS if part in {*results, name}}
        report.write_text(json.dumps(results, indent=1) + "\n")
        if options.size == "full":
            write_table(RESULTS, results)
    count = sum(not line["ok"] for lines in results.values() for line in lines)
    print(f"{report}: {count} failed", flush=True)
    return 1 if count else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["run_script"]:
        run_script(sys.argv[2:])
    elif sys.argv[1:2] == ["measure_machine"]:
        measure_machine()
    else:
        sys.exit(main())
