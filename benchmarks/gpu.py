"""Measure speed and memory on a GPU and check that results are bit-identical; the most informative parts run first.

    make gpu                                              # set up, then run this script
    python benchmarks/gpu.py                              # all parts that are incomplete or contain failures
    python benchmarks/gpu.py --minutes 9                  # stop after 9 minutes; the next call continues from there
    python benchmarks/gpu.py --parts machine survival     # only these parts

    machine        package versions, and the speed of a matrix product
    <task name>    the task's script at published model size: samples/s, MFU (model FLOPs utilization), time waiting
                   for data, and peak memory compared with the prediction of tools.rehearse
    same_answer    --deterministic with dropout: 1, 2 (sharing the work 2:1) and 3 processes give the same bits
    resume         --deterministic: a run started by 3 processes, killed, and resumed by 2 gives the same bits
    frameworks     speed of this project's training loop relative to a bare loop, Accelerate, Fabric, HF Trainer, MONAI
    variants       bf16, fp32, fp16, --compile, activation checkpointing, ZeRO-2: samples/s and memory
    scaling        samples/s by the number of GPUs, compared with the speed-ups in the published training guides

Results are written to benchmarks/gpu/<device>.json and benchmarks/RESULTS.md. To repeat a complete part, delete its
entry from the JSON file. With --tiny or without a GPU, the same code runs at tiny sizes and writes only to --folder.
The exit code is 0 if the JSON file contains no failure.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import joblib
import psutil

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- benchmarks/gpu.py writes from here -->", "<!-- to here -->"

SCRIPTS = {
    "survival": "train_survival_distributed.py",
    "prs_med": "train_prs_med.py",
    "mimic_cxr": "train_mimic_cxr.py",
    "compressed_ad": "train.py",
    "cascade": "train_accelerate.py",
}
# flags for the sample data; at "full" size, the scripts resize images to the published input size
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
# flags for the training scripts; at "full" size, the models are the published ones with random weights
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
            --encoder_dim 16 --num_timesteps 20 --ddim_steps 2 --num_epochs_per_stage 40 --stage_configs
            {"name":"stage1","volume_size":[8,8,8],"voxel_dim":16,"vit_depth":1,"num_heads":2,"token_grid":4}
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
        "cascade": """
            --config configs/multi_view_config.json --dataset_path {data} --cache_dir {data}_cache
            --num_epochs_per_stage 6 --ddim_steps 2 --skip_alignment_check
        """,
        "compressed_ad": """
            --data {data} --mixed_precision fp16 --eval_interval 0 --eval_episodes 20 --val_episodes 20 --eval_seeds 2
        """,
    },
}
# published training speeds of the most similar models, in samples/s
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
VARIANTS = {
    "bf16": ("--mixed_precision bf16", SCRIPTS),
    "fp32": ("--mixed_precision no", SCRIPTS),
    "fp16": ("--mixed_precision fp16", SCRIPTS),
    "bf16 compiled": ("--mixed_precision bf16 --compile", SCRIPTS),
    "bf16 checkpointed": ("--mixed_precision bf16 --gradient_checkpointing", ("prs_med", "mimic_cxr", "cascade")),
    "bf16 ZeRO-2": ("--mixed_precision bf16 --use_deepspeed --stage 2", ("mimic_cxr",)),
}
# speed-ups on 1, 2, 4 and 8 GPUs in the published training guides
GUIDES = {"survival": "1, 1.8, 3.5, 6.5", "mimic_cxr": "1, 1.9, 3.5, 6.5", "compressed_ad": "1, 1.85, 3.6, 6.5"}
# 1, 2 or 3 processes can share six micro-batches equally; callers append the value of --save_every
CHECKED = "--max_steps 20 --log_every 1 --deterministic --effective_batch_size 6 --batch_size 1 --save_every".split()


def row(what: str, value: float | str, note: str = "", ok: bool = True) -> dict:
    return {"what": what, "value": value, "note": note, "ok": ok}


def attempt(what: str, rows: Iterator[dict]) -> Iterator[dict]:
    try:
        yield from rows
    except Exception as error:
        yield row(what, f"{type(error).__name__}: {error}", ok=False)


# --- training runs ----------------------------------------------------------------------------------------------------


def make_samples(task: str, data: Path, flags: str, image_size: int = 64) -> None:
    commands = [f"sample_data {task} {data} {flags}"]
    if task == "mimic_cxr":
        releases = f"{data}/mimic-cxr-jpg {data}/mimic-ext-cxr-qba"
        commands += [f"prepare_data mimic_cxr {releases} {data}/prepared --image_size {image_size}"]
    for words in commands:
        command = [sys.executable, "-m", *f"tools.{words}".split()]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def flags_of(options: Namespace, task: str, size: str) -> list[str]:
    data = options.folder / "data" / size / task
    made = data.with_suffix(".made")
    if not made.exists():
        shutil.rmtree(data, ignore_errors=True)
        make_samples(task, data, SAMPLES[size][task], 224 if size == "full" else 64)
        made.touch()
    return FLAGS[size][task].replace("{data}", str(data)).split()


def run_command(options: Namespace, command: list, log: Path, stop: Callable[[], bool] = bool) -> dict:
    """Run a command, or kill it when stop() returns true; return the last JSON object in its output, or {}.

    Raises RuntimeError if the command fails or takes more than 500 s. Exits when the time in --minutes is over.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        process = psutil.Popen([*map(str, command)], cwd=ROOT, stdout=file, stderr=file)
    deadline = min(options.deadline, time.monotonic() + 500)
    while process.poll() is None and not stop() and time.monotonic() < deadline:
        time.sleep(0.01)
    killed = process.poll() is None
    for one in [process, *process.children(recursive=True)] if killed else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    code = process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if time.monotonic() > options.deadline:
        sys.exit("out of time; the next call continues from here")
    if killed and not stop():
        raise RuntimeError(f"killed after 500 s; see {log}")
    if code and not killed:
        raise RuntimeError(f"exit code {code}: {' '.join(lines[-1:])[:300]}; see {log}")
    return json.loads(next((line for line in reversed(lines) if line.startswith("{")), "{}"))


def train(
    options: Namespace, task: str, name: str, flags: list, processes: int = 1, size: str = "tiny", watch: str = ""
) -> tuple[Path, dict]:
    """Run a task's training script; return the run folder and the measurements from benchmarks/watched.py.

    watch: "speed" also measures the FLOPs of a step and the speed of a matrix product; "killed" kills the run after its
    first checkpoint.
    """
    out = options.folder / "runs" / f"{task}_{name}".replace(" ", "_")
    if "--resume_from" not in flags:
        shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable]
    if processes > 1:
        command += ["utils/torchrun.py", "--standalone", f"--nproc_per_node={processes}"]
    command += [
        "benchmarks/watched.py",
        *["share_gpu"] * (0 < options.gpus < processes),
        *["speed"] * (watch == "speed"),
    ]
    # without --world_size, the survival script would start one process per GPU
    flags = [*flags_of(options, task, size), "--output_dir", out, "--world_size", processes, *flags]
    log = out.with_suffix(".log")
    return out, run_command(
        options, [*command, SCRIPTS[task], *flags], log, lambda: watch == "killed" and any(out.glob("step_*.pt"))
    )


def training_lines(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


# --- speed ------------------------------------------------------------------------------------------------------------


def measure_speed(options: Namespace, task: str, name: str, flags: list, processes: int = 1, watch: str = "") -> dict:
    """Train for a few steps; return samples/s ("rate"), the share of time waiting for data, peak GiB and batch size.

    samples/s is the mean of the last two log lines, because earlier lines may be from warmup or from earlier stages.
    """
    steps = "--max_steps 6 --log_every 2"
    if options.size == "full":
        # --max_steps could end the cascade before its last stage; an epoch of the last stage gives two log lines
        steps = "--log_every 4" if task == "cascade" else "--max_steps 30 --log_every 10"
    flags = [*steps.split(), "--save_every", 0, *flags]
    out, measured = train(options, task, name, flags, processes, options.size, watch)
    first, last = training_lines(out)[-2:]
    return measured | {
        "rate": (first["train/samples_per_s"] + last["train/samples_per_s"]) / 2,
        "wait": last["train/data_wait"],
        "peak": last["train/peak_memory_gb"],
        "batch": json.loads((out / "summary.json").read_text())["effective_batch_size"],
    }


def speed_row(
    options: Namespace, task: str, name: str, flags: str, processes: int = 1, note: str = ""
) -> Iterator[dict]:
    measured = measure_speed(options, task, name, flags.split(), processes)
    yield row(f"{task}, {name}: samples/s", measured["rate"], f"{measured['peak']:.4g} GiB {note}")


def published_size(options: Namespace, task: str) -> Iterator[dict]:
    measured = measure_speed(options, task, "speed", [], watch="speed")
    rate, peak, tflop, product = (measured[name] for name in ("rate", "peak", "tflop", "product"))
    yield row("samples/s", rate, f"{measured['batch']} samples per step. {PUBLISHED.get(task, '')}")
    note = f"{tflop:.4g} TFLOP per step; a matrix product before it reached {product:.4g} TFLOP/s"
    yield row("MFU", rate / measured["batch"] * tflop / product, note)
    yield row("share of time waiting for data", measured["wait"])
    yield row("peak GiB", peak)

    command = [sys.executable, "-m", "tools.rehearse", SCRIPTS[task], *flags_of(options, task, options.size)]
    command += ["--gpu_memory", options.machine.get("memory GiB", 80)]
    rehearsed = run_command(options, command, options.folder / f"{task}_rehearsed.log")
    # the margin of tools.rehearse: 5 % plus 1.4 GiB
    most = 1.05 + 1.4 / rehearsed["peak_gib"]
    note = f"tools.rehearse predicts {rehearsed['peak_gib']:.4g} GiB; its margin allows a ratio of up to {most:.2f}"
    yield row("peak over the rehearsed one", peak / rehearsed["peak_gib"], note)


def frameworks(options: Namespace) -> Iterator[dict]:
    short = "--batch_size 6 --image_size 32 32 16" if options.size == "full" else "--batch_size 2"
    precision = f"--mixed_precision {'bf16' if options.gpus else 'no'}"
    for name, own in {"survival, short steps": short, "survival, published size": ""}.items():
        flags = [*flags_of(options, "survival", options.size), *f"{own} {precision}".split()]
        command = [sys.executable, "benchmarks/frameworks.py", *flags]
        times = run_command(options, command, options.folder / "frameworks.log")
        ours = times.pop("this project")
        for other, milliseconds in times.items():
            yield row(f"{name}: speed over {other}", milliseconds / ours, f"{ours:.4g} ms a step")
    command = [sys.executable, "benchmarks/step_overhead.py"]
    for task in ("mimic_cxr", "compressed_ad"):
        found = run_command(options, [*command, task], options.folder / f"overhead_{task}.log")
        yield row(f"{task}: speed over a bare loop", found["speed"], f"{found['ms']:.4g} ms a step")


def variants(options: Namespace) -> Iterator[dict]:
    for task in SCRIPTS if options.gpus else ["mimic_cxr"]:
        for name, (flags, tasks) in VARIANTS.items():
            # fp16 training needs a GPU, and --compile takes minutes on a CPU
            if task in tasks and (options.gpus or name not in ("fp16", "bf16 compiled")):
                yield from attempt(f"{task}, {name}", speed_row(options, task, name, flags))


def scaling(options: Namespace) -> Iterator[dict]:
    for task, guide in GUIDES.items():
        for processes in (1, 2, 4, 8):
            if processes <= (options.gpus or 2):
                name, note = f"{processes} processes", f"; speed-ups in the guide: {guide}"
                # the survival script's --batch_size is the total over all GPUs
                flags = f"--batch_size {6 * processes}" if task == "survival" else ""
                yield from attempt(f"{task}, {name}", speed_row(options, task, name, flags, processes, note))


# --- bit-identical results --------------------------------------------------------------------------------------------


def difference(one: Path, other: Path) -> str:
    names = ("step", "train/loss", "train/grad_norm")
    rows = ([[line[name] for name in names] for line in training_lines(out)] for out in (one, other))
    for left, right in itertools.zip_longest(*rows):
        if left != right:
            return f"{left} and {right}"
    same = (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    return "none" if same else "final weights"


def same_answer(options: Namespace, task: str) -> Iterator[dict]:
    alone, _ = train(options, task, "alone", [*CHECKED, 0])
    for processes, shares in {options.gpus: "equal", 2: "2,1", 3: "equal"}.items():
        if processes > 1:
            out, _ = train(options, task, f"by_{processes}", [*CHECKED, 0, "--gpu_shares", shares], processes)
            found = difference(alone, out)
            yield row(f"{task}: difference, 1 and {processes} processes, shares {shares}", found, ok=found == "none")


def resume(options: Namespace, task: str) -> Iterator[dict]:
    whole, _ = train(options, task, "whole", [*CHECKED, 0])
    out, _ = train(options, task, "resumed", [*CHECKED, 2], 3, watch="killed")
    done = len(training_lines(out))
    train(options, task, "resumed", [*CHECKED, 2, "--resume_from", "auto"], 2)
    found, note = difference(whole, out), f"killed after {done} of 20 steps"
    yield row(f"{task}: difference, 1 process and 3, killed, then 2", found, note, found == "none" and done < 20)


def each_task(options: Namespace, check: Callable[[Namespace, str], Iterator[dict]]) -> Iterator[dict]:
    # on a CPU, each check starts up to three processes
    with ThreadPoolExecutor(max(1, joblib.cpu_count() // 3)) as pool:
        for rows in pool.map(lambda task: list(attempt(task, check(options, task))), SCRIPTS):
            yield from rows


# --- results ----------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Namespace], Iterator[dict]]] = {
    "machine": lambda options: (row(name, value) for name, value in options.machine.items()),
    **{task: functools.partial(published_size, task=task) for task in SCRIPTS},
    "same_answer": functools.partial(each_task, check=same_answer),
    "resume": functools.partial(each_task, check=resume),
    "frameworks": frameworks,
    "variants": variants,
    "scaling": scaling,
}


def measure(options: Namespace, name: str, results: dict[str, dict]) -> None:
    """Run one benchmark part; save the results after each measurement, because a rented machine may disappear."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    entry = results[name] = {"commit": commit.strip(), "lines": []}
    for line in attempt("the whole part", PARTS[name](options)):
        print(" | ".join(cells(line)), flush=True)
        entry["lines"].append(line)
        write(options, results)
    entry["complete"] = True
    write(options, results)


def write(options: Namespace, results: dict[str, dict]) -> None:
    new = options.report.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(options.report)
    if options.size == "full":
        write_table(ROOT / "benchmarks" / "RESULTS.md", results)


def cells(line: dict) -> tuple[str, str, str]:
    value = f"{line['value']:.4g}" if isinstance(line["value"], float) else str(line["value"])
    note = " ".join(line["note"].split())
    return line["what"], value, note if line["ok"] else f"FAILED {note}"


def write_table(page: Path, results: dict[str, dict]) -> None:
    rows = [("part", "what", "value", "note"), ("---",) * 4]
    for part in filter(results.get, PARTS):
        rows += [(part, *cells(line)) for line in results[part]["lines"]]
    table = ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in rows]
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text("\n".join([before + BEGIN, *table, END + rest.partition(END)[2]]), encoding="utf-8")


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure; default: all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--tiny", action="store_true", help="use tiny sizes on a GPU too, for a trial of a few minutes")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs/gpu", help="folder for data, runs and trial results"
    )
    options = parser.parse_args()
    options.deadline = math.inf
    options.folder = options.folder.resolve()
    log = options.folder / "machine.log"
    options.machine = run_command(options, [sys.executable, "benchmarks/watched.py", "machine"], log)
    options.deadline = time.monotonic() + 60 * options.minutes
    options.gpus = options.machine["GPUs"]
    options.size = "full" if options.gpus and not options.tiny else "tiny"
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not options.gpus:
        os.environ["OMP_NUM_THREADS"] = "1"
    folder = ROOT / "benchmarks" / "gpu" if options.size == "full" else options.folder
    folder.mkdir(exist_ok=True)
    options.report = folder / (re.sub(r"\W+", "_", options.machine["device"]) + ".json")
    results = json.loads(options.report.read_text()) if options.report.exists() else {}
    for name in options.parts:
        old = results.get(name, {})
        if old.get("complete") and all(line["ok"] for line in old["lines"]):
            print(f"== {name}: has a good result already", flush=True)
        else:
            print(f"== {name}", flush=True)
            measure(options, name, results)
    failed = sum(not line["ok"] for entry in results.values() for line in entry["lines"])
    print(f"{options.report}: {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
