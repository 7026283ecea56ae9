"""One command for the day a GPU is there: measures and checks what a GPU changes, what tells most first.

    make gpu                                              # set up, then this
    python benchmarks/gpu.py                              # every part without a result, or with one that failed
    python benchmarks/gpu.py --list                       # the parts and how long each should take
    python benchmarks/gpu.py --minutes 9                  # the parts that fit; none is begun that should take longer
    python benchmarks/gpu.py --parts machine,survival     # these alone
    python benchmarks/gpu.py --fresh                      # forget earlier results and measure anew

    machine        versions, speed of matrix products, of memory and of an all-reduce over the GPUs
    a task's name  its script at published size: samples/s, wait for data, peak memory beside tools.rehearse, MFU
    guides         the guides' times beside what the measured rates give, as arithmetic
    same_answer    --deterministic, dropout included, by 1, 2 (with shares 2:1) and 3 processes: equal to the bit
    resume         --deterministic, begun by 3 processes, killed and ended by 2: equal to the bit
    operations     each operation of some steps made three times: which give other bits, with --deterministic none
    waits          how often the host waits for the GPU: never in a step
    deepspeed      MIMIC-CXR by ZeRO-2, by ZeRO-2 with its optimizer on the CPU, and by ZeRO-3, beside --use_ddp
    overhead       our loops over a bare loop, Accelerate, Fabric, HF Trainer and MONAI, in turns
    variants       fp32, fp16, compiled and recomputed activations over plain bf16

On a GPU it writes benchmarks/gpu/<device>.json after each line and the tables in benchmarks/RESULTS.md after each
part, so that an interrupted run goes on where it was. Without one, or with --tiny, the same code runs at tiny sizes and
writes into --folder alone. Where there are more processes than GPUs they share the first. Weights and data are made up;
nothing is downloaded. Exit code 0: nothing failed.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import psutil

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
        "prs_med": """
            --data_root {data} --vlm_path {data}/llava_tiny --sam_path {data}/sam_tiny
            --batch_size 4 --num_workers 0 --lr_scaling none --max_new_tokens 2 --unet_steps 2
        """,
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
            --data_root {data} --max_new_tokens 2 --unet_steps 2
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
# The nearest rate of training that somebody has published. Of the cascade's kind there is none.
PUBLISHED = {
    "prs_med": """
        LISA-7B (LoRA, SAM-H at 1024) 0.8 a GPU on 8 RTX 3090 (its issue 17, 10,000 steps of 160 in 3 days);
        LLaVA-1.5-7B, all weights, 2.3 a GPU on 8 A100 40 GB (its README, 665 K in 10 hours)
    """,
    "mimic_cxr": "ConvNeXt-base alone at 224, 339 on an RTX 3090 (timm, results/benchmark-train-amp-nhwc-pt112-cu113)",
    "survival": """
        nnU-Net's 3D U-Net, patches of 128^3, 9.5 on an A100 80 GB (NVIDIA DeepLearningExamples, nnUNet), by voxels
        4.8 of ours
    """,
    "compressed_ad": "nanoGPT, 6 layers of 384, 256 tokens, 1780 on an A100 (its README, 5000 x 64 in 3 minutes)",
}
# The speed of our loops over others' that is wanted.
LEAST_SPEED = 0.97
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


def find_gpus() -> list[tuple[str, float]]:
    """Names and GiB of the GPUs that torch can use, asked by a process that then gives them back."""
    code = "import json, torch; cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count())); "
    code += "print(json.dumps([(card.name, card.total_memory / 2**30) for card in cards]))"
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


def kill(pid: int, itself: bool = True) -> None:
    """SIGKILL to a process and to all that it has started, or to these alone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [process] * itself + process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def start(command: list, log: Path, gpus: int) -> subprocess.Popen:
    """A command with its output in `log`, on so many GPUs."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        return subprocess.Popen([*map(str, command)], cwd=ROOT, env=environment(gpus), stdout=file, stderr=file)


def run_command(options, command: list, log: Path, gpus: int, limit: float = 500) -> dict:
    """Run a command to its end; returns the last JSON object that it printed, {} without one.

    Raises Failed where it does not end well, or takes more than `limit` seconds or than --minutes leaves.
    """
    limit = min(limit, options.deadline - time.monotonic())
    if limit <= 0:
        raise Failed("no time left")
    process = start(command, log, gpus)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        raise Failed(f"took more than {limit:.0f} s and was killed; see {log}") from None
    finally:
        if process.poll() is None:
            kill(process.pid)
            process.wait()
    if code:
        raise Failed(f"exit code {code}: {error_in(log)}")
    return last_object(log)


def lines_of(log: Path) -> list[str]:
    return [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]


def error_in(log: Path) -> str:
    """What a log says of why its command failed."""
    lines = lines_of(log)
    return ([line for line in lines if re.match(r"error:|\w*(Error|Exception)\b", line)] or lines)[-1][:300]


def last_object(log: Path) -> dict:
    """The last JSON object in a log, {} without one."""
    return json.loads(next((line for line in reversed(lines_of(log)) if line.startswith("{")), "{}"))


def make_data(options: argparse.Namespace, task: str, size: str) -> Path:
    """Write a task's sample data where they are not there; returns their folder."""
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
            run_command(options, [sys.executable, "-m", *f"tools.{words}".split()], log, 0)
        made.touch()
    return data


def data_of(options: argparse.Namespace, task: str, size: str) -> Future:
    """A task's sample data, which a thread makes."""
    if (task, size) not in options.data:
        options.data[task, size] = options.data_maker.submit(make_data, options, task, size)
    return options.data[task, size]


def flags_of(options: argparse.Namespace, task: str, size: str) -> list[str]:
    """The flags of a task at its full or tiny size."""
    data = options.folder / "data" / size / task
    return [word.replace("{data}", str(data)).replace("{stage}", STAGE) for word in FLAGS[size][task].split()]


def command_of(options, task: str, size: str, flags: list, out: Path, processes: int = 1, watch: str = "") -> list:
    """The command of a run, by torchrun for several processes, which may have to share one GPU."""
    data_of(options, task, size).result()
    command = [sys.executable]
    if processes > 1:
        command += ["utils/torchrun.py", "--standalone", f"--nproc_per_node={processes}"]
    command += ["benchmarks/watched.py", *["share_gpu"] * (0 < options.gpus < processes), *watch.split()]
    return [*command, SCRIPTS[task], *flags_of(options, task, size), "--output_dir", out, *flags]


def train(options, task: str, name: str, size: str, flags: list, processes: int = 1, watch: str = "") -> Path:
    """A run of a task's script, from its start or resumed as the flags say; returns its folder. Raises Failed."""
    out = options.folder / "runs" / f"{task}_{name}"
    if "--resume_from" not in flags:
        shutil.rmtree(out, ignore_errors=True)
    command = command_of(options, task, size, flags, out, processes, watch)
    run_command(options, command, log_of(out), min(processes, options.gpus))
    return out


def log_of(out: Path) -> Path:
    return out.with_suffix(".log")


def training_lines(out: Path) -> list[dict]:
    """The lines of metrics.jsonl about training."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def each_task(options: argparse.Namespace, check: Callable[[argparse.Namespace, str], Iterator[dict]]):
    """The lines that check(options, task) yields of all tasks, as many at once as the cores allow, as they come."""
    lines: queue.SimpleQueue[dict | None] = queue.SimpleQueue()

    def work(task: str) -> None:
        try:
            for line in check(options, task):
                lines.put(line | {"what": f"{task}: {line['what']}"})
        except Exception as error:
            lines.put(row(task, describe(error), equal="to end well"))
        lines.put(None)

    with ThreadPoolExecutor(options.at_once) as pool:
        for task in options.tasks:
            pool.submit(work, task)
        for _ in options.tasks:
            yield from iter(lines.get, None)


def describe(error: Exception) -> str:
    return str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"


# --- speed ------------------------------------------------------------------------------------------------------------


def machine(options: argparse.Namespace, _) -> Iterator[dict]:
    """What this machine is and does."""
    yield row("device", options.device)
    for name in ("torch", "transformers", "accelerate", "deepspeed", "monai"):
        if importlib.util.find_spec(name):
            yield row(name, importlib.metadata.version(name))
    yield row("Python", sys.version.split()[0])
    processes = options.gpus or 2
    command = [sys.executable, "utils/torchrun.py", "--standalone", f"--nproc_per_node={processes}"]
    command += ["benchmarks/gpu.py", "measure_machine"]
    for name, value in run_command(options, command, options.folder / "machine.log", options.gpus, 200).items():
        yield row(name, value)


def measure_machine() -> None:
    """In each process that torchrun has started: the last line on rank 0 is a JSON object of what was measured."""
    import torch
    import torch.distributed as dist
    from watched import product, seconds

    on_gpu = torch.cuda.is_available()
    facts = {}
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
        facts |= {"CUDA": torch.version.cuda, "cuDNN": str(torch.backends.cudnn.version())}
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["bf16 product TFLOP/s"] = product()
        values = torch.rand(2**26, device="cuda", dtype=torch.bfloat16)
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


def one_task(options: argparse.Namespace, _, task: str) -> Iterator[dict]:
    """A script at its published size, beside what tools.rehearse predicts."""
    size, full = options.size, options.size == "full"
    rehearsed_log = options.folder / "runs" / f"{task}_rehearsed.log"
    command = [sys.executable, "-m", "tools.rehearse", SCRIPTS[task], "--gpu_memory", options.memory]
    command += flags_of(options, task, size)
    data = data_of(options, task, size)
    if not full:
        # among which the tiny models are
        data.result()
    rehearsed = run_command(options, command, rehearsed_log, min(1, options.gpus))
    out = train(options, task, "speed", size, speed_flags(task, size), watch="speed")

    stages = measured_lines(task, size, out)
    for stage, lines in stages.items():
        yield row(f"{stage}samples/s", samples_per_s(lines), note=" ".join(PUBLISHED.get(task, "").split()))
        # the made-up data come from a cache: the GPU should not wait, but at the start of an epoch, which fills a large
        # part of the cascade's first stages
        most = (0.05 if full else 0.5) if stage == list(stages)[-1] else None
        waited = statistics.median(line["train/data_wait"] for line in lines)
        yield row(f"{stage}wait for data, share of time", waited, most=most)
    # of the cascade the last stage, which is the one that is rehearsed
    batch = json.loads((out / "summary.json").read_text())["effective_batch_size"]
    yield row("ms a step", 1000 * batch / samples_per_s(lines), note=f"{batch} samples")
    yield row("peak GiB", peak_gib(lines))
    yield row("peak GiB, rehearsed", rehearsed["peak_gib"])
    if full:
        # questions and segments of a real batch are shorter than the longest, which are rehearsed
        least = 0.0 if task in ("mimic_cxr", "compressed_ad") else 0.85
        # the margin that tools.rehearse adds: 5 % and 1.5 GB
        most = 1.05 + 1.4 / rehearsed["peak_gib"]
        yield row("peak over the rehearsed one", peak_gib(lines) / rehearsed["peak_gib"], least, round(most, 2))
    yield row("samples that fit at once, rehearsed", rehearsed["largest_batch"], note=f"in {options.memory:.0f} GiB")
    found = last_object(log_of(out))
    yield row("TFLOP a step", found["tflop"][-1], note="counted in two real steps")
    yield row("matrix product TFLOP/s, before this run", found["product"])
    mfu = samples_per_s(lines) / batch * found["tflop"][-1] / found["product"]
    yield row("MFU, of that matrix product", mfu, LEAST_MFU[task] if full else None)


def guides(options: argparse.Namespace, results: dict) -> Iterator[dict]:
    """The times that guides 1 and 3 give, beside those that follow from the measured rates; the others give none."""

    def rates(task: str) -> list[float]:
        lines = results.get(task, {"lines": []})["lines"]
        return [line["value"] for line in lines if line["what"].endswith("samples/s")]

    for rate in rates("mimic_cxr"):
        days = 31.2e6 / rate / 86400
        note = f"31.2 M / {rate:.4g} a second; the guide: 2.5 to 3 days for 3 to 5 epochs on 4 L4"
        yield row("guide 1: days an epoch of 31.2 M samples, one such GPU", days, note=note)
        note = f"{days:.4g} x 3 / 4 and x 5 / 4, were 4 GPUs 4 times as fast"
        yield row("guide 1: days of 3 to 5 epochs, 4 such GPUs", f"{days * 3 / 4:.3g} to {days * 5 / 4:.3g}", note=note)
    for number, (rate, minutes) in enumerate(zip(rates("cascade"), (2, 8, 25), strict=False), start=1):
        note = f"1000 / {rate:.4g} / 60 / 4, were 4 GPUs 4 times as fast; the guide: {minutes} minutes on 4 A100"
        yield row(f"guide 3: minutes an epoch of 1000 patients, stage {number}", 1000 / rate / 240, note=note)


def deepspeed(options: argparse.Namespace, _) -> Iterator[dict]:
    """MIMIC-CXR by each of DeepSpeed's ZeRO engines beside torch's own, one process."""
    engines = {
        "--use_ddp": "--use_ddp",
        "ZeRO-2": "--use_deepspeed --stage 2",
        "ZeRO-2, optimizer on the CPU": "--deepspeed_config configs/deepspeed_config.json",
        "ZeRO-3": "--use_deepspeed --stage 3",
    }
    plain = None
    for name, engine in engines.items():
        try:
            flags = [*speed_flags("mimic_cxr", options.size), "--no-gradient_checkpointing", *engine.split()]
            lines = training_lines(train(options, "mimic_cxr", name.replace(" ", "_"), options.size, flags))
        except Failed as error:
            yield row(name, str(error), equal="to end well")
            continue
        plain = plain or lines
        speed = samples_per_s(lines[1:])
        yield row(f"{name}: samples/s", speed, note=f"{speed / samples_per_s(plain[1:]):.2f} of --use_ddp's")
        yield row(f"{name}: peak GiB", peak_gib(lines))
        losses = [(line["train/loss"], other["train/loss"]) for line, other in zip(lines, plain, strict=True)]
        # it rounds weights to bf16 where torch's autocast rounds products
        apart = max(abs(one / other - 1) for one, other in losses)
        yield row(f"{name}: losses apart from --use_ddp's, relative", apart, most=0.05)


def overhead(options: argparse.Namespace, _) -> Iterator[dict]:
    """The speed of our loops over others', the same models in turns; trainers as far as they are installed."""
    gpus, full = min(1, options.gpus), options.size == "full"
    data_of(options, "survival", options.size).result()
    published = flags_of(options, "survival", options.size)
    small = "--batch_size 6 --image_size 32 32 16" if full else "--batch_size 2"
    for name, flags in {"survival, short steps": small.split(), "survival, published size": []}.items():
        flags = [*published, "--mixed_precision", "bf16" if gpus else "no", *flags]
        log = options.folder / "overhead.log"
        times = run_command(options, [sys.executable, "benchmarks/frameworks.py", *flags], log, gpus)
        ours = times.pop("this project")
        yield row(f"{name}: ms a step", ours)
        for other, milliseconds in times.items():
            yield row(f"{name}: speed over {other}", milliseconds / ours, LEAST_SPEED if full else None)
    # short steps of the others, on data that it makes
    for task in (task for task in options.tasks if task != "survival"):
        command = [sys.executable, "benchmarks/step_overhead.py", task]
        found = run_command(options, command, options.folder / f"overhead_{task}.log", gpus)
        yield row(f"{task}: speed over a bare loop", found["speed"], note=f"{found['ms']:.3g} ms a step")


def variants(options: argparse.Namespace, _) -> Iterator[dict]:
    """Each script in other precisions, compiled, and with recomputed activations."""
    chosen = {"fp32": ["--mixed_precision", "no"], "checkpointing": ["--gradient_checkpointing"]}
    if options.gpus:
        # on a CPU there is no fp16, and compiling takes minutes
        chosen |= {"fp16": ["--mixed_precision", "fp16"], "compile": ["--compile"]}
    least = {"fp16": 0.9, "compile": 0.97, "checkpointing": 0.6} if options.size == "full" else {}
    for task in options.tasks if options.gpus else ["mimic_cxr"]:
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
            speed = samples_per_s(lines) / samples_per_s(plain)
            yield row(f"{task}: speed of {name} over bf16", speed, least.get(name))
            yield row(f"{task}: memory of {name} over bf16", peak_gib(lines) / peak_gib(plain))


# --- the promise, of one task -----------------------------------------------------------------------------------------

CHECKED = ["--max_steps", 20, "--log_every", 1, "--save_every", 0, "--deterministic"]
CHECKED += ["--effective_batch_size", 6, "--batch_size", 1]


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


def alone(options: argparse.Namespace, task: str) -> Path:
    """The run that others are compared with: one process, never stopped."""
    if task not in options.alone:
        options.alone[task] = train(options, task, "alone", "tiny", CHECKED)
    return options.alone[task]


def same_answer(options: argparse.Namespace, task: str) -> Iterator[dict]:
    """Steps of six leaves by several processes, and by one."""
    for processes, shares in {options.gpus: "equal", 2: "2,1", 3: "equal"}.items():
        if processes > 1:
            flags = [*CHECKED, "--gpu_shares", shares]
            together = train(options, task, f"by_{processes}", "tiny", flags, processes)
            found = difference(alone(options, task), together)
            yield row(f"difference, 1 and {processes} processes, shares {shares}", found, equal="none")


def resume(options: argparse.Namespace, task: str) -> Iterator[dict]:
    """A run that three processes begin, that is killed after its first checkpoint, and that two processes end."""
    whole = alone(options, task)
    out = options.folder / "runs" / f"{task}_killed"
    shutil.rmtree(out, ignore_errors=True)
    flags = [*CHECKED, "--save_every", 2]
    process = start(command_of(options, task, "tiny", flags, out, 3), log_of(out), min(3, options.gpus))
    try:
        while not any(out.glob("step_*.pt")):
            if process.poll() is not None or time.monotonic() > options.deadline:
                raise Failed(f"no checkpoint: {error_in(log_of(out))}")
            time.sleep(0.002)
    finally:
        kill(process.pid)
        process.wait()
    done = len(training_lines(out))
    if done == 20:
        raise Failed("ended before the kill")
    found = difference(whole, train(options, task, "killed", "tiny", [*flags, "--resume_from", "auto"], 2))
    yield row(
        "difference, 1 process and 3, killed, then 2", found, equal="none", note=f"killed after {done} of 20 steps"
    )


def operations(options: argparse.Namespace, task: str) -> Iterator[dict]:
    """Which operations of two steps give other bits when they are repeated on the same tensors."""
    for mode, flags in {"plain": [], "--deterministic": ["--deterministic"]}.items():
        flags = ["--max_steps", 2, "--save_every", 0, *flags]
        found = last_object(log_of(train(options, task, "repeats", "tiny", flags, watch="repeats")))
        names = ", ".join(f"{name} ({count} x)" for name, count in sorted(found["differ"].items())) or "none"
        equal = None if mode == "plain" else "none"
        yield row(f"operations with other bits, {mode}", names, equal=equal, note=f"of {found['operations']} calls")


def waits(options: argparse.Namespace, task: str) -> Iterator[dict]:
    """How often the host waits for the GPU in steps that neither log nor save."""
    flags = ["--max_steps", 6, "--log_every", 100, "--save_every", 0]
    found = last_object(log_of(train(options, task, "waits", "tiny", flags, watch="waits")))
    for part, per in (("in_steps", found["steps"]), ("apart", 1)):
        places = "; ".join(f"{count} x {where}" for where, count in found[part].items())
        name = "waits a step" if part == "in_steps" else "waits apart from steps, evaluation included"
        most = 0 if part == "in_steps" else None
        yield row(name, sum(found[part].values()) / per, most=most, note=places[:300])


# --- the report -------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """What main() does for a name: run(options, results) yields its lines.

    tasks: whose data it reads, None for options.tasks. size: of these data, "" for options.size. seconds: that it
    should take at tiny size on two cores without a GPU, and at full size on an H100.
    """

    run: Callable[[argparse.Namespace, dict], Iterator[dict]]
    seconds: tuple[float, float]
    tasks: tuple[str, ...] | None = None
    size: str = ""


def of_each(check: Callable) -> Callable[[argparse.Namespace, dict], Iterator[dict]]:
    return lambda options, _: each_task(options, check)


def of_task(task: str, tiny: float, full: float) -> Part:
    return Part(functools.partial(one_task, task=task), (tiny, full), (task,))


PARTS = {
    "machine": Part(machine, (8, 25), ()),
    "survival": of_task("survival", 25, 60),
    "prs_med": of_task("prs_med", 30, 90),
    "mimic_cxr": of_task("mimic_cxr", 22, 50),
    "compressed_ad": of_task("compressed_ad", 16, 40),
    "cascade": of_task("cascade", 18, 80),
    "guides": Part(guides, (1, 1), ()),
    "same_answer": Part(of_each(same_answer), (250, 80), None, "tiny"),
    "resume": Part(of_each(resume), (170, 75), None, "tiny"),
    "waits": Part(of_each(waits), (60, 30), None, "tiny"),
    "operations": Part(of_each(operations), (120, 60), None, "tiny"),
    "deepspeed": Part(deepspeed, (60, 100), ("mimic_cxr",)),
    "overhead": Part(overhead, (190, 300), ("survival",)),
    "variants": Part(variants, (40, 300)),
}


def shown(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table; the first row is its head."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return ["| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |" for cells in rows]


def write_tables(path: Path, results: dict[str, dict]) -> None:
    """Replace what stands between the two marks of RESULTS.md."""
    facts = [f"{line['what']} {shown(line['value'])}" for line in results.get("machine", {"lines": ()})["lines"]]
    names = ("samples/s", "ms a step", "peak GiB", "samples that fit at once, rehearsed", "MFU, of that matrix product")
    rows = [["", "samples/s", "ms a step", "peak GiB", "samples that fit", "MFU", "samples/s before", "published"]]
    for task in (name for name in results if name in SCRIPTS):
        # of the cascade the last stage
        lines = {line["what"].split(": ")[-1]: line for line in results[task]["lines"]}
        cells = [shown(lines[name]["value"]) if name in lines else "-" for name in names]
        speed = lines.get(names[0], {"note": ""})
        rows.append([task, *cells, speed.get("before", "-"), speed["note"] or "-"])
    page = [f"`python benchmarks/gpu.py`: {'; '.join(facts)}.", "", *table(rows), ""]

    rows = [["part", "what", "value", "wanted", "before", "note"]]
    for part, entry in results.items():
        for line in entry["lines"] if part != "machine" else ():
            note = line["note"] if line["ok"] else f"FAILED {line['note']}"
            cells = [shown(line["value"]), line["wanted"], line.get("before", ""), note.strip()]
            rows.append([part, line["what"], *cells])
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text("\n".join([before + BEGIN, *page, *table(rows), END + after]), encoding="utf-8")


class Report:
    """The results by part, each with its lines, its commit and how long it took, in a file that is always whole."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.results = json.loads(path.read_text()) if path.exists() else {}
        commit = ""
        with contextlib.suppress(OSError):
            command = ["git", "rev-parse", "--short", "HEAD"]
            commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        self.origin = {"date": datetime.date.today().isoformat(), "commit": commit or "unknown"}

    def seconds_of(self, name: str, options: argparse.Namespace) -> float:
        """That a part should take: what it took here before, or the estimate."""
        if self.has(name, options):
            return self.results[name]["seconds"]
        share = 1 if PARTS[name].tasks is not None else len(options.tasks) / len(SCRIPTS)
        return share * PARTS[name].seconds[options.size == "full"]

    def has(self, name: str, options: argparse.Namespace) -> bool:
        """Whether a part has ended, with all tasks that are wanted, and nothing in it failed."""
        if name == "guides":
            # arithmetic on other parts, which may have been measured anew
            return False
        entry = self.results.get(name, {})
        wanted = options.tasks if PARTS[name].tasks is None else ()
        ended = "seconds" in entry and all(line["ok"] for line in entry["lines"])
        return ended and set(wanted) <= set(entry.get("tasks", ()))

    def measure(self, name: str, options: argparse.Namespace) -> None:
        """Run a part; the file is written after each line, as a lent machine may end at any time."""
        old = self.results.get(name, {"lines": []})
        before = {line["what"]: f"{shown(line['value'])} ({old['commit']})" for line in old["lines"]}
        # of a part that was broken off, what came before that
        before = old.get("before", {}) | before
        broken_off = row("whole part", "broken off", equal="to end")
        lines, begun = [], time.monotonic()
        self.write(name, {"lines": [broken_off], "before": before})
        try:
            for line in PARTS[name].run(options, self.results):
                lines.append(line | {"before": before[line["what"]]} if line["what"] in before else line)
                show(line)
                self.write(name, {"lines": [*lines, broken_off], "before": before})
        except Exception as error:
            lines.append(row("whole part", describe(error), equal="to end well"))
            show(lines[-1])
        seconds = round(time.monotonic() - begun, 1)
        self.write(name, {"lines": lines, "seconds": seconds, "tasks": options.tasks})
        print(f"   [{name}: {seconds} s]", flush=True)

    def write(self, name: str, entry: dict) -> None:
        results = self.results | {name: self.origin | entry}
        self.results = {part: results[part] for part in PARTS if part in results}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.results, indent=1) + "\n")
        new.replace(self.path)


def show(line: dict) -> None:
    mark = "" if line["ok"] else "FAILED "
    print(f"{mark}{line['what']}: {shown(line['value'])} {line['note']}".rstrip(), flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument("--tasks", default=",".join(SCRIPTS), help="of the parts that take all tasks; default: all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin only parts that should end within these")
    parser.add_argument("--list", action="store_true", help="the parts and their expected seconds; nothing runs")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results of these parts")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a GPU too: a trial of minutes")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/gpu", help="data, runs, the report of tiny sizes")
    options = parser.parse_args()
    for flag, known in (("parts", PARTS), ("tasks", SCRIPTS)):
        # the name that overhead had before
        names = getattr(options, flag).replace("frameworks", "overhead").split(",")
        setattr(options, flag, names)
        for name in names:
            if name not in known:
                parser.error(f"--{flag} {name}: there are {', '.join(known)}")
    return options


def main() -> int:
    options = parse_args()
    # the last seconds are for ending what runs
    options.deadline = time.monotonic() + 60 * options.minutes - 3
    options.folder = options.folder.resolve()
    gpus = find_gpus()
    options.gpus = len(gpus)
    options.device, options.memory = f"{len(gpus)} x {gpus[0][0]}" if gpus else "CPU", gpus[0][1] if gpus else 80.0
    options.size = "tiny" if options.tiny or not gpus else "full"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # a task's check has three processes
    options.at_once = min(len(options.tasks), max(1, cores // 3))
    options.data, options.alone = {}, {}
    folder = ROOT / "benchmarks" / "gpu" if options.size == "full" else options.folder
    report = Report(folder / (re.sub(r"\W+", "_", gpus[0][0] if gpus else "cpu") + ".json"))
    if options.list:
        for name in options.parts:
            has = "has its result" if report.has(name, options) else ""
            print(f"{name:<14}{report.seconds_of(name, options):5.0f} s   {has}".rstrip())
        return 0

    def give_up(*_) -> None:
        options.deadline = -math.inf
        kill(os.getpid(), itself=False)
        sys.exit(143)

    signal.signal(signal.SIGTERM, give_up)
    names = [name for name in options.parts if options.fresh or not report.has(name, options)]
    for name in options.parts:
        if name not in names:
            print(f"== {name}: has its result; --fresh measures it anew", flush=True)
    with ThreadPoolExecutor(max(1, cores // 2)) as options.data_maker:
        for part in (PARTS[name] for name in names):
            for task in options.tasks if part.tasks is None else part.tasks:
                data_of(options, task, part.size or options.size)
        for name in names:
            if name != "machine":
                # or the making of data would disturb what is measured
                wait(options.data.values())
            expected, left = report.seconds_of(name, options), options.deadline - time.monotonic()
            fits = expected <= left
            rest = "" if math.isinf(left) else f" of {max(left, 0):.0f} s left{', so left out' * (not fits)}"
            print(f"== {name}: should take {expected:.0f} s{rest}", flush=True)
            if fits:
                try:
                    report.measure(name, options)
                finally:
                    if options.size == "full":
                        write_tables(RESULTS, report.results)
        # data of parts that were left out are still being made
        options.deadline = -math.inf
        kill(os.getpid(), itself=False)
    count = sum(not line["ok"] for entry in report.results.values() for line in entry["lines"])
    print(f"{report.path}: {count} failed", flush=True)
    return 1 if count else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure_machine"]:
        measure_machine()
    else:
        sys.exit(main())
