"""Measures and checks all that a GPU changes, in parts that can be run one by one.

    make gpu                                              # set up, then this
    python benchmarks/gpu.py                              # every part that has no result yet, or failed
    python benchmarks/gpu.py --parts versions,survival    # these alone
    python benchmarks/gpu.py --list                       # what there is
    python benchmarks/gpu.py --fresh                      # forget the results, start anew

Each part is a process of its own with a time limit of at most 10 minutes, and its lines are kept once it ends: run it
again after an interruption and it continues. On a GPU it writes benchmarks/gpu/<device>.json and the table in
benchmarks/RESULTS.md. Without one, the same code runs on the CPU at tiny sizes and writes runs/gpu/cpu.json. Weights
and data are made up; nothing is downloaded. Exit code 0: nothing failed.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gpu_sizes import BATCH, FLAGS, LEAST_MFU, OUT_FLAG, ROOT, SCRIPTS, STEPS, make_data

KEYS = ("part", "name", "value", "low", "high", "result", "reason")
BEGIN = "<!-- benchmarks/gpu.py writes from here -->"
END = "<!-- to here -->"


class Setting(NamedTuple):
    """Where the parts run: size "full" or "tiny", how many GPUs there are, and the folder for data and runs."""

    size: str
    gpus: int
    folder: Path


class Failed(Exception):
    """A run that did not end as it should; the message says how."""


class Run(NamedTuple):
    """A script's run: lines of metrics.jsonl, what gpu_process.py saw, exit code, seconds, processes left behind."""

    records: list[dict]
    seen: dict
    code: int
    seconds: float
    left_behind: int

    def training(self) -> list[dict]:
        return [record for record in self.records if "train/loss" in record]

    def losses(self) -> list[tuple]:
        return [(record["step"], record["train/loss"], record["train/grad_norm"]) for record in self.training()]


# --- lines of the report ----------------------------------------------------------------------------------------------


def measured(name: str, value: float | str | None, low=None, high=None, reason: str = "") -> dict:
    """A line with a value: it passes inside low..high, where None is no bound."""
    missing = value is None
    outside = not missing and ((low is not None and not value >= low) or (high is not None and not value <= high))
    if missing and not reason:
        reason = "no value was measured"
    line = {"name": name, "value": value, "low": low, "high": high}
    return line | {"result": "fail" if missing or outside else "pass", "reason": reason}


def skipped(name: str, reason: str) -> dict:
    return {"name": name, "value": None, "low": None, "high": None, "result": "skipped", "reason": reason}


def failed(name: str, reason: str) -> dict:
    return skipped(name, reason) | {"result": "fail"}


# --- running a script -------------------------------------------------------------------------------------------------


def environment(processes: int, on_cpu: bool) -> dict[str, str]:
    """The environment of a run: as many GPUs as processes, none when it is to run on the CPU."""
    values = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        values.pop(name, None)
    if on_cpu:
        values |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    else:
        # a number above those of this machine is ignored by CUDA
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(processes))))
        values["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:processes])
    return values


def last_words(log: Path) -> str:
    """The line of a log that says best what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:") or re.match(r"\w*(Error|Exception)\b", line)]
    return (errors or lines or ["no output"])[-1][:300]


def run_process(
    command: list, log: Path, limit: float, variables: dict[str, str], folder: Path = ROOT
) -> tuple[int, float, int]:
    """Run a command to its end; returns (exit code, seconds, how many of its processes outlived it by 10 seconds).

    After `limit` seconds it is killed, with all that it has started, and TimeoutError is raised.
    """
    import psutil

    begun = time.monotonic()
    started: set = set()
    words = [str(word) for word in command]
    with open(log, "w") as file:
        process = psutil.Popen(words, cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() - begun < limit:
                with contextlib.suppress(psutil.NoSuchProcess):
                    started |= set(process.children(recursive=True))
                time.sleep(0.1)
            seconds = time.monotonic() - begun
            late = process.poll() is None
            _, alive = psutil.wait_procs(started, timeout=0 if late else 10)
            alive = [child for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        finally:
            for child in [*started, process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        code = process.wait()
    if late:
        raise TimeoutError(f"took more than {limit:.0f} s and was killed")
    return code, seconds, len(alive)


def has_flag(task: str, flag: str) -> bool:
    """Whether the task's script has this flag."""
    done = subprocess.run([sys.executable, SCRIPTS[task], "--help"], cwd=ROOT, capture_output=True, text=True)
    return f"{flag} " in done.stdout or f"{flag}]" in done.stdout or f"{flag}\n" in done.stdout


def flags_of(setting: Setting, task: str, size: str) -> list[str]:
    """The task's flags for its published or its tiny size, with the data made where it is not there."""
    data = make_data(setting.folder / "data" / size, task, size)
    return [word.replace("{data}", str(data)) for word in FLAGS[task][size]]


def run_script(
    setting: Setting, task: str, name: str, flags: list, size: str = "tiny", processes: int = 1, observe: tuple = (),
    on_cpu: bool = False, resume: bool = False, expect: tuple[int, ...] = (0,), limit: float = 400,
) -> Run:  # fmt: skip
    """One run of the task's script into runs/<task>_<name>. Raises Failed when it ends with another code than expected.

    observe: options of gpu_process.py; resume: from the checkpoint in that folder, which is else deleted first.
    """
    out = setting.folder / "runs" / f"{task}_{name}"
    report = out.with_name(out.name + ".json")
    log = out.with_name(out.name + ".log")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not resume:
        shutil.rmtree(out, ignore_errors=True)
    report.unlink(missing_ok=True)

    # random weights of the published size are built in place: none are read
    watched = ["benchmarks/gpu_process.py", "--report", report, *observe, *(["--random_weights"] * (size == "full"))]
    words = [*watched, SCRIPTS[task], *flags_of(setting, task, size), OUT_FLAG[task], out, *flags]
    if resume:
        words += ["--resume_from", "auto"]
    launcher = ["launch_utils.py", "torchrun", "--standalone", f"--nproc_per_node={processes}"] * (processes > 1)
    on_cpu = on_cpu or not setting.gpus
    variables = environment(processes, on_cpu) | {"HF_HUB_OFFLINE": "1"}
    code, seconds, left = run_process([sys.executable, *launcher, *words], log, limit, variables)
    if code not in expect:
        raise Failed(f"exit code {code}: {last_words(log)}")

    # what it has written
    metrics = out / "metrics.jsonl"
    records = [json.loads(text) for text in metrics.read_text().splitlines()] if metrics.exists() else []
    seen = json.loads(report.read_text()) if report.exists() else {}
    return Run(records, seen, code, seconds, left)


def sharing(setting: Setting, processes: int) -> tuple[str, ...]:
    """Options of gpu_process.py for several processes on a machine with one GPU."""
    return ("--share_gpu",) if setting.gpus and processes > setting.gpus else ()


# --- parts ------------------------------------------------------------------------------------------------------------


def versions(setting: Setting) -> Iterator[dict]:
    """What this machine is, and how fast its processes talk."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    yield measured("date", datetime.date.today().isoformat())
    yield measured("commit", git.stdout.strip() or "unknown")
    yield measured("python", platform.python_version())
    for name in ("torch", "transformers", "accelerate", "deepspeed", "monai"):
        try:
            yield measured(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield skipped(name, "not installed")
    if setting.gpus:
        yield from gpu_versions(setting)
    else:
        for name in ("device", "driver", "CUDA", "cuDNN", "NCCL", "bf16 product TFLOP/s", "memory copy GB/s"):
            yield skipped(name, "no GPU")

    # NCCL refuses two ranks on one GPU
    processes = max(2, setting.gpus)
    backend = "nccl" if setting.gpus > 1 else "gloo"
    log = setting.folder / "bandwidth.log"
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *words, "benchmarks/gpu_frameworks.py", "bandwidth", "--backend", backend]
    code, _, _ = run_process(command, log, 120, environment(processes, not setting.gpus))
    answer = [text for text in log.read_text().splitlines() if text.startswith("{")]
    if code or not answer:
        yield failed(f"{backend} all-reduce GB/s", last_words(log))
    else:
        yield measured(
            f"{backend} all-reduce GB/s", json.loads(answer[-1])["gb_per_s"], reason=f"{processes} processes"
        )
    if setting.gpus < 2:
        yield skipped("nccl all-reduce GB/s", "needs two GPUs")


def gpu_versions(setting: Setting) -> Iterator[dict]:
    """Driver, libraries and the plain speed of the first GPU."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    yield measured("device", f"{setting.gpus} x {torch.cuda.get_device_name()}")
    yield measured("driver", driver.strip() or "unknown")
    yield measured("CUDA", torch.version.cuda)
    yield measured("cuDNN", str(torch.backends.cudnn.version()))
    yield measured("NCCL", ".".join(map(str, torch.cuda.nccl.version())))

    def seconds(call: Callable[[], object]) -> float:
        call()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(10):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / 10

    one = torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16)
    yield measured("bf16 product TFLOP/s", 2 * 8192**3 / seconds(lambda: one @ one) / 1e12)
    yield measured("memory copy GB/s", 2 * one.nbytes / seconds(one.clone) / 1e9)


def one_script(setting: Setting, task: str) -> Iterator[dict]:
    """A script at its published size: speed, memory beside the predicted one, waits for data and for the GPU."""
    steps, log_every = STEPS[setting.size]
    flags = ["--log_every", log_every, "--save_every", "0"]
    # the cascade's three stages have their own numbers of steps
    if task != "cascade" or setting.size == "tiny":
        flags += ["--max_steps", steps]
    run = run_script(setting, task, f"{setting.size}_steps", flags, setting.size)
    stages = sorted({record.get("stage", 0) for record in run.training()})
    for stage in stages:
        prefix = f"stage {stage}: " if stage else ""
        records = [record for record in run.training() if record.get("stage", 0) == stage]
        # the first interval warms up
        yield from speed_lines(setting, task, prefix, records[1:] or records)
    yield host_wait_line(setting, run, log_every)
    yield from memory_lines(setting, task, run)


def mean_rate(records: list[dict]) -> float:
    """Samples/s over some log lines of equally many samples."""
    return statistics.harmonic_mean([record["train/samples_per_s"] for record in records])


def speed_lines(setting: Setting, task: str, prefix: str, records: list[dict]) -> Iterator[dict]:
    """Samples/s, share of the peak and share of time waiting for data, of some lines of metrics.jsonl."""
    full = setting.size == "full"
    steps = f"{len(records)} log lines after the first"
    yield measured(
        f"{prefix}samples/s", statistics.harmonic_mean([r["train/samples_per_s"] for r in records]), reason=steps
    )

    shares = [record["train/mfu"] for record in records if record.get("train/mfu") is not None]
    low = LEAST_MFU[task] if full else None
    if shares:
        reason = "share of a measured matmul rate; "
        reason += "launch-bound, nothing is expected" if low is None else "lower: the GPU waits for launches or memory"
        yield measured(f"{prefix}MFU", statistics.median(shares), low, reason=reason)
    else:
        yield skipped(f"{prefix}MFU", "no train/mfu in metrics.jsonl")

    wait = statistics.mean(record["train/data_wait"] for record in records)
    # the made-up data comes from a cache: the GPU should not wait
    yield measured(f"{prefix}data wait", wait, None, 0.05 if full else None, "share of time")


def host_wait_line(setting: Setting, run: Run, log_every: int) -> dict:
    """Host waits for the GPU in a step that is not logged."""
    if not setting.gpus:
        return skipped("host waits a step", "no GPU")
    counts = run.seen.get("host_waits", [])
    between = [count for i, count in enumerate(counts) if i and (i + 1) % log_every]
    if not between:
        return failed("host waits a step", "no steps between two log lines")
    places = ", ".join(f"{place} {count}" for place, count in run.seen["places"].items())
    reason = f"median of {len(between)} steps without logging, most {max(between)}; in all at: {places or 'none'}"
    return measured("host waits a step", statistics.median(between), None, 0, reason)


def memory_lines(setting: Setting, task: str, run: Run) -> Iterator[dict]:
    """Peak memory that torch has reserved, what --rehearse predicts, and their ratio, which is to be within 15 %."""
    peak = max(record["train/peak_memory_gb"] for record in run.training())
    yield measured("peak GiB", peak, reason="reserved on the GPU" if setting.gpus else "resident memory of the process")
    if not has_flag(task, "--rehearse"):
        yield skipped("predicted GiB", f"{SCRIPTS[task]} has no --rehearse")
        return
    # at tiny sizes one script shows that this code works; it takes as long as a run
    if setting.size == "tiny" and task != "compressed_ad":
        yield skipped("predicted GiB", "tiny sizes: only compressed_ad is rehearsed here")
        return
    predicted = rehearse(setting, task, run)
    yield measured("predicted GiB", predicted["peak_gib"], reason=f"advice: {predicted['advice']}")
    if not setting.gpus:
        yield skipped("peak over predicted", "no GPU: resident memory is no counterpart")
        return
    # questions and segments of a real batch are shorter than the largest, which is predicted
    least = None if task in ("mimic_cxr", "compressed_ad") else 0.85
    yield measured("peak over predicted", peak / predicted["peak_gib"], least, 1.15, "predicted within 15 %")


def rehearse(setting: Setting, task: str, run: Run) -> dict:
    """The JSON object that the script's --rehearse ends with, for this GPU's memory."""
    memory = ["--gpu_memory", f"{run.seen['total_gib']:.1f}"] if setting.gpus else []
    out = setting.folder / "runs" / f"{task}_rehearsed"
    log = out.with_suffix(".log")
    words = [SCRIPTS[task], *flags_of(setting, task, setting.size), OUT_FLAG[task], out, "--rehearse", *memory]
    code, _, _ = run_process([sys.executable, *words], log, 120, environment(1, not setting.gpus))
    lines = [text for text in log.read_text().splitlines() if text.startswith("{")]
    if code or not lines:
        raise Failed(f"--rehearse: exit code {code}: {last_words(log)}")
    return json.loads(lines[-1])


def for_each_task(setting: Setting, name: str, check: Callable[[str], dict]) -> Iterator[dict]:
    """The lines of check(task) for all tasks at once: a tiny run is mostly its start, on one core.

    On a GPU all five; on a CPU the quickest one, as the tests hold them all there.
    """

    def guarded(task: str) -> dict:
        try:
            return check(task)
        except (Failed, TimeoutError) as error:
            return failed(f"{task}: {name}", str(error))

    tasks = list(SCRIPTS) if setting.gpus else ["compressed_ad"]
    with ThreadPoolExecutor(len(tasks)) as pool:
        yield from pool.map(guarded, tasks)


def same_answer(setting: Setting) -> Iterator[dict]:
    """The losses of 3 steps on 1 process and on several, in fp32 without TF32, with the same global batch."""
    processes = max(2, setting.gpus)
    while any(batch % processes for batch in BATCH.values()):
        processes -= 1
    name = f"largest relative difference, 1 x N to {processes} x N/{processes}"
    fp32 = ["--mixed_precision", "no", "--max_steps", "3", "--log_every", "1", "--save_every", "0"]
    observe = ("--no_tf32",)

    def check(task: str) -> dict:
        one = run_script(setting, task, "same_1", fp32, observe=observe)
        # survival's batch is that of all processes
        share = BATCH[task] if task == "survival" else BATCH[task] // processes
        several = (*observe, *sharing(setting, processes))
        many = run_script(setting, task, "same_N", [*fp32, "--batch_size", share], processes=processes, observe=several)
        reason = "loss of 3 steps and first gradient norm, fp32"
        return measured(f"{task}: {name}", largest_difference(one, many), None, 1e-5, reason)

    yield from for_each_task(setting, name, check)


def largest_difference(one: Run, other: Run) -> float:
    """The largest relative difference of two runs' losses and first gradient norms. Raises Failed for other steps.

    Later gradient norms are left out: AdamW turns rounding in a small gradient into a step of full size.
    """
    steps = [[row[0] for row in run.losses()] for run in (one, other)]
    if steps[0] != steps[1] or not steps[0]:
        raise Failed(f"steps {steps[0]} and {steps[1]} were logged")
    pairs = [(left[1], right[1]) for left, right in zip(one.losses(), other.losses(), strict=True)]
    pairs.append((one.losses()[0][2], other.losses()[0][2]))
    return max(abs(left - right) / max(abs(left), 1e-12) for left, right in pairs)


def kill_and_resume(setting: Setting) -> Iterator[dict]:
    """A run killed after 3 of 5 steps and resumed, against an uninterrupted one, bit for bit."""
    name = "steps that differ after a kill"

    def check(task: str) -> dict:
        flags = ["--max_steps", "5", "--log_every", "1", "--save_every", "2"]
        if has_flag(task, "--deterministic"):
            flags.append("--deterministic")
        elif setting.gpus:
            return skipped(f"{task}: {name}", f"{SCRIPTS[task]} has no --deterministic")
        whole = run_script(setting, task, "whole", flags)
        run_script(setting, task, "killed", flags, observe=("--kill_at", "3"), expect=(-signal.SIGKILL,))
        resumed = run_script(setting, task, "killed", flags, resume=True)
        differ = len(set(whole.losses()) ^ set(resumed.losses()))
        reason = f"loss and gradient norm of {len(whole.losses())} steps, SIGKILL after 3"
        return measured(f"{task}: {name}", differ, None, 0, reason)

    yield from for_each_task(setting, name, check)


def checkpoint_across(setting: Setting) -> Iterator[dict]:
    """A checkpoint of the GPU is resumed on the CPU, and that one on the GPU, against a run that stayed there."""
    name = "largest relative difference after GPU, CPU, GPU"
    flags = ["--mixed_precision", "no", "--log_every", "1", "--save_every", "0", "--max_steps"]

    def check(task: str) -> dict:
        whole = run_script(setting, task, "stayed", [*flags, "6"])
        run_script(setting, task, "moved", [*flags, "2"])
        run_script(setting, task, "moved", [*flags, "4"], on_cpu=True, resume=True)
        moved = run_script(setting, task, "moved", [*flags, "6"], resume=True)
        reason = "loss of 6 steps, fp32" if setting.gpus else "loss of 6 steps, fp32; no GPU: all on the CPU"
        return measured(f"{task}: {name}", largest_difference(whole, moved), None, 1e-3, reason)

    yield from for_each_task(setting, name, check)


def out_of_memory(setting: Setting) -> Iterator[dict]:
    """A batch that does not fit is made smaller before the first step, and the steps are then made."""
    shares = (0.5,)
    if setting.gpus:
        import torch

        # 20 and 10 GiB, of which survival's 6 cases need 35
        shares = [gib * 2**30 / torch.cuda.get_device_properties(0).total_memory for gib in (20, 10)]
    for share in shares:
        name = f"steps made with {share:.0%} of the memory"
        flags = ["--auto_batch", "--max_steps", "3", "--log_every", "1", "--save_every", "0"]
        try:
            run = run_script(
                setting, "survival", "short", flags, setting.size, observe=("--memory", str(share)), limit=200
            )
        except (Failed, TimeoutError) as error:
            yield failed(name, str(error))
            continue
        refused = run.seen["refused"]
        if not refused:
            yield failed(name, "no allocation was refused: nothing was tried")
            continue
        where = "of the GPU" if setting.gpus else "made up on the CPU: at most 2 samples at once"
        yield measured(name, len(run.training()), 3, 3, f"survival, {where}; {refused} allocations refused")


def rank_killed(setting: Setting) -> Iterator[dict]:
    """A rank is killed: the job ends within the timeout, and leaves no process behind."""
    timeout = 20
    task = "compressed_ad"
    flags = ["--max_steps", "200", "--log_every", "1", "--save_every", "0", "--dist_timeout", timeout]
    flags += ["--batch_size", BATCH[task] // 2]
    observe = ("--kill_at", "3", *sharing(setting, 2))
    codes = tuple(range(1, 256))
    run = run_script(setting, task, "orphan", flags, processes=2, observe=observe, expect=codes, limit=200)
    # starting takes up to a minute on a busy machine
    yield measured("seconds from start to end", run.seconds, None, 60 + timeout, f"--dist_timeout {timeout}")
    yield measured("processes left behind", run.left_behind, None, 0)


def deepspeed(setting: Setting) -> Iterator[dict]:
    """ZeRO-2 and ZeRO-3 in bf16, and in fp16 with a loss scale that overflows in the first steps."""
    cases = [(stage, precision) for stage in (2, 3) for precision in ("bf16", "fp16")]
    for stage, precision in cases:
        name = f"ZeRO-{stage} {precision}: last loss"
        if importlib.util.find_spec("deepspeed") is None:
            yield skipped(name, "deepspeed is not installed")
            continue
        if precision == "fp16" and not setting.gpus:
            yield skipped(name, "fp16 needs a GPU")
            continue
        config = setting.folder / f"zero{stage}_{precision}.json"
        config.write_text(json.dumps(zero_config(stage, precision)))
        flags = ["--deepspeed_config", config, "--mixed_precision", precision, "--max_steps", "12", "--log_every", "1"]
        processes = setting.gpus or 1
        flags += ["--save_every", "0", "--max_bad_steps", "10", "--no-gradient_checkpointing"]
        try:
            run = run_script(setting, "mimic_cxr", f"zero{stage}_{precision}", flags, processes=processes)
        except (Failed, TimeoutError) as error:
            yield failed(name, str(error))
            continue
        yield from overflow_lines(stage, precision, run)


def zero_config(stage: int, precision: str) -> dict:
    """A DeepSpeed file; fp16 begins at a loss scale of 2^28, at which gradients overflow."""
    blocks = {"fp16": {"enabled": "auto"}}
    if precision == "fp16":
        blocks["fp16"] |= {"initial_scale_power": 22, "hysteresis": 1}
    return {"zero_optimization": {"stage": stage, "contiguous_gradients": True}} | blocks


def overflow_lines(stage: int, precision: str, run: Run) -> Iterator[dict]:
    """The last loss is finite, and in fp16 some steps were skipped."""
    records = run.training()
    bad = sum(bool(record["train/skipped"]) for record in records)
    last = records[-1]["train/loss"]
    yield measured(f"ZeRO-{stage} {precision}: last loss", last, 0, None, f"{len(records)} steps, {bad} skipped")
    if precision == "fp16":
        name = f"ZeRO-{stage} fp16: steps skipped after an overflow"
        yield measured(name, bad, 1, len(records) - 1, "the loss scale starts at 2^28")


def variants(setting: Setting) -> Iterator[dict]:
    """One model in fp32, bf16, fp16, compiled and with gradient checkpointing: speed and memory over plain bf16."""
    steps, log_every = STEPS[setting.size]
    flags = ["--max_steps", steps, "--log_every", log_every, "--save_every", "0", "--no_auto_optimize"]
    flags += ["--batch_size", 16] if setting.size == "full" else []
    chosen = {"bf16": ["bf16"], "fp32": ["no"], "fp16": ["fp16"], "compile": ["bf16", "--compile"]}
    chosen["checkpointing"] = ["bf16", "--gradient_checkpointing"]
    plain = None
    for name, words in chosen.items():
        if name == "fp16" and not setting.gpus:
            yield skipped(f"{name}: samples/s", "fp16 needs a GPU")
            continue
        if name == "compile" and not setting.gpus:
            yield skipped(f"{name}: samples/s", "compiling takes minutes on a CPU; tests/ does it")
            continue
        try:
            run = run_script(setting, "mimic_cxr", name, [*flags, "--mixed_precision", *words], setting.size)
        except (Failed, TimeoutError) as error:
            yield failed(f"{name}: samples/s", str(error))
            continue
        rate = mean_rate(run.training()[1:])
        memory = max(record["train/peak_memory_gb"] for record in run.training())
        yield measured(f"{name}: samples/s", rate, reason="mimic_cxr")
        yield measured(f"{name}: peak GiB", memory)
        if name == "bf16":
            plain = rate, memory
        elif plain:
            yield from variant_ratios(setting, name, rate / plain[0], memory / plain[1])


def variant_ratios(setting: Setting, name: str, speed: float, memory: float) -> Iterator[dict]:
    """Speed and memory over plain bf16, with what is expected of them on a GPU."""
    slowest = {"compile": 0.97, "fp16": 0.9, "checkpointing": 0.6}.get(name) if setting.gpus else None
    most = {"checkpointing": 1.0}.get(name) if setting.gpus else None
    yield measured(f"{name}: speed over bf16", speed, slowest)
    yield measured(f"{name}: memory over bf16", memory, None, most)


def frameworks(setting: Setting) -> Iterator[dict]:
    """The survival script against the same model, batch and data under four other trainers."""
    steps, log_every = STEPS[setting.size]
    precision = "bf16" if setting.gpus else "no"
    same = ["--mixed_precision", precision, "--no-augment", "--num_workers", "0"]
    flags = [*same, "--max_steps", steps, "--log_every", log_every, "--save_every", "0"]
    ours = run_script(setting, "survival", "framework", flags, setting.size)
    rate = mean_rate(ours.training()[1:])
    yield measured("script: samples/s", rate, reason=f"survival, {precision}")

    packages = {"bare loop": "torch", "Accelerate": "accelerate", "MONAI SupervisedTrainer": "ignite"}
    packages |= {"HF Trainer": "transformers", "Fabric": "lightning"}
    for name, package in packages.items():
        found = importlib.util.find_spec(package)
        if package == "lightning":
            found = found or importlib.util.find_spec("lightning_fabric")
        if found is None:
            yield skipped(f"script over {name}", f"{package} is not installed")
            continue
        log = setting.folder / "runs" / f"framework_{package}.log"
        words = ["benchmarks/gpu_frameworks.py", "train", "--trainer", name, "--steps", steps, "--warm_up", log_every]
        words += ["--", *flags_of(setting, "survival", setting.size), *same]
        code, _, _ = run_process([sys.executable, *words], log, 120, environment(1, not setting.gpus))
        answer = [text for text in log.read_text().splitlines() if text.startswith("{")]
        if code or not answer:
            yield failed(f"script over {name}", last_words(log))
            continue
        theirs = json.loads(answer[-1])["samples_per_s"]
        low = 0.97 if setting.gpus else None
        yield measured(f"script over {name}", rate / theirs, low, reason=f"{theirs:.2f} samples/s there")


# In the order of their worth, each with its limit in seconds. A lent machine may end at any time.
PARTS: dict[str, tuple[Callable[[Setting], Iterator[dict]], int]] = {
    "versions": (versions, 180),
    "compressed_ad": (lambda setting: one_script(setting, "compressed_ad"), 300),
    "survival": (lambda setting: one_script(setting, "survival"), 420),
    "mimic_cxr": (lambda setting: one_script(setting, "mimic_cxr"), 420),
    "prs_med": (lambda setting: one_script(setting, "prs_med"), 540),
    "cascade": (lambda setting: one_script(setting, "cascade"), 540),
    "same_answer": (same_answer, 420),
    "kill_and_resume": (kill_and_resume, 540),
    "checkpoint_across": (checkpoint_across, 540),
    "out_of_memory": (out_of_memory, 300),
    "rank_killed": (rank_killed, 240),
    "variants": (variants, 540),
    "deepspeed": (deepspeed, 420),
    "frameworks": (frameworks, 420),
}


# --- all parts --------------------------------------------------------------------------------------------------------


def run_part(command: list, lines_file: Path, log: Path, limit: float) -> list[dict]:
    """The lines that a part's process wrote into lines_file; one more when it crashed or took longer than limit."""
    lines_file.unlink(missing_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    reason = ""
    try:
        code, _, _ = run_process(command, log, limit, dict(os.environ))
        if code:
            reason = f"exit code {code}: {last_words(log)}"
    except TimeoutError as error:
        reason = str(error)
    lines = [json.loads(text) for text in lines_file.read_text().splitlines()] if lines_file.exists() else []
    if not lines and not reason:
        reason = "ended without a result"
    return lines + [failed("whole part", reason)] * bool(reason)


def part_process(name: str, setting: Setting, lines_file: Path) -> None:
    """In the part's own process: write each line as soon as it is known."""
    setting.folder.mkdir(parents=True, exist_ok=True)
    with open(lines_file, "w") as file:

        def write(line: dict) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            for line in PARTS[name][0](setting):
                write(line)
        except (Failed, TimeoutError) as error:
            write(failed("whole part", str(error)))


def read_report(path: Path) -> list[dict]:
    """The lines of an earlier call; none without one."""
    return json.loads(path.read_text()) if path.exists() else []


def write_report(path: Path, lines: list[dict]) -> None:
    """The lines in the order of PARTS, as a JSON list; an interrupted write leaves the old file."""
    order = list(PARTS)
    lines = sorted(lines, key=lambda line: order.index(line["part"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps([{key: line[key] for key in KEYS} for line in lines], indent=1) + "\n")
    unfinished.replace(path)


def shown(value) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def results_table(lines: list[dict]) -> str:
    """The GPU section of RESULTS.md."""
    facts = {line["name"]: line["value"] for line in lines if line["part"] == "versions"}
    names = ("driver", "CUDA", "cuDNN", "NCCL", "python", "torch", "transformers", "accelerate", "deepspeed", "monai")
    known = ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name))
    text = f"{facts.get('device')}; {known}; `python benchmarks/gpu.py`, {facts.get('date')}, "
    rows = [text + f"commit {facts.get('commit')}.", "", "| part | what | value | expected | result | reason |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for line in lines:
        low, high = shown(line["low"]), shown(line["high"])
        expected = f"{low} to {high}" if low and high else f">= {low}" if low else f"<= {high}" if high else ""
        cells = [line["part"], line["name"], shown(line["value"]), expected, line["result"], line["reason"]]
        rows.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(rows)


def write_results(path: Path, lines: list[dict]) -> None:
    """Replace what stands between the two marker lines of RESULTS.md."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{results_table(lines)}\n{END}{after}", encoding="utf-8")


def find_gpus() -> list[str]:
    """Names of the GPUs that torch can use, asked by a process that then gives them back."""
    code = "import json, torch; n = torch.cuda.device_count(); "
    code += "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: torch: does not start ({done.stderr.strip().splitlines()[-1]}); run `make setup`")
    return json.loads(done.stdout.splitlines()[-1])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--parts", help="comma-separated; default: all")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results of the parts")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes on a GPU too, a trial of minutes; no RESULTS.md"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs/gpu", help="data, runs, cpu.json (default runs/gpu)"
    )
    parser.add_argument("--part_process", help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.chosen = args.parts.split(",") if args.parts else list(PARTS)
    if unknown := [name for name in args.chosen if name not in PARTS]:
        parser.error(f"--parts {unknown[0]}: no such part; there are {', '.join(PARTS)}")
    return args


def run_parts(todo: list[str], setting: Setting) -> Iterator[tuple[str, list[dict]]]:
    """(part, its lines) of one part after the other; without GPUs two at a time, as no speed counts there."""
    tiny = ["--tiny"] * (setting.size == "tiny")

    def run(name: str) -> tuple[str, list[dict]]:
        command = [sys.executable, __file__, "--part_process", name, "--gpus", setting.gpus, "--folder", setting.folder]
        log = setting.folder / f"{name}.log"
        begun = time.monotonic()
        lines = run_part([*command, *tiny], setting.folder / f"{name}.jsonl", log, PARTS[name][1])
        print(f"== {name}: {time.monotonic() - begun:.0f} s", flush=True)
        return name, lines

    together = 1 if setting.gpus or len(todo) == 1 else 2
    with ThreadPoolExecutor(together) as pool:
        if together > 1:
            # parts share data: two of them must not write the same; what fails here is said by the part that needs it
            with contextlib.suppress(RuntimeError):
                list(pool.map(lambda task: make_data(setting.folder / "data" / setting.size, task, "tiny"), SCRIPTS))
        yield from pool.map(run, todo)


def main() -> int:
    args = parse_args()
    if args.list:
        for name, (part, limit) in PARTS.items():
            about = "" if name in SCRIPTS else (part.__doc__ or "").split("\n")[0]
            print(f"{name:<18} {limit:>4} s  {about or one_script.__doc__}")
        return 0
    if args.part_process:
        setting = Setting("tiny" if args.tiny else "full", args.gpus, args.folder)
        part_process(args.part_process, setting, args.folder / f"{args.part_process}.jsonl")
        return 0

    # where the results go
    gpus = find_gpus()
    setting = Setting("tiny" if args.tiny or not gpus else "full", len(gpus), args.folder)
    device = re.sub(r"\W+", "_", gpus[0]) if gpus else "cpu"
    published = setting.size == "full" and args.folder == (ROOT / "runs/gpu").resolve()
    report = (ROOT / "benchmarks/gpu" if published else args.folder) / f"{device}.json"
    args.folder.mkdir(parents=True, exist_ok=True)
    lines = [line for line in read_report(report) if not (args.fresh and line["part"] in args.chosen)]

    # a part with a result that did not fail is not run again
    bad = {line["part"] for line in lines if line["result"] == "fail"}
    done = {line["part"] for line in lines} - bad
    for name in args.chosen:
        if name in done:
            print(f"{name}: has its result; --fresh measures it anew", flush=True)
    for name, new in run_parts([name for name in args.chosen if name not in done], setting):
        for line in new:
            print(f"{line['result']:<8} {line['name']:<60} {shown(line['value']):>12}  {line['reason']}", flush=True)
        lines = [line for line in lines if line["part"] != name] + [{"part": name, **line} for line in new]
        write_report(report, lines)
        if published:
            write_results(ROOT / "benchmarks/RESULTS.md", read_report(report))
    count = sum(line["result"] == "fail" for line in lines)
    print(f"{report}: {len(lines)} lines, {count} failed", flush=True)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
