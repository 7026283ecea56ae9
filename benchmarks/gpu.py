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

from gpu_sizes import BATCH, LEAST_MFU, OUT_FLAG, ROOT, SCRIPTS, STEPS, filled_flags, make_data, stage_of

KEYS = ("part", "name", "value", "low", "high", "result", "reason")
BEGIN = "<!-- benchmarks/gpu.py writes from here -->"
END = "<!-- to here -->"

# Flags of a run of which every step counts, and nothing is saved on the way.
EVERY_STEP = ["--log_every", "1", "--save_every", "0"]

# The lines of a part, each as soon as it is known.
Lines = Iterator[dict]


class Setting(NamedTuple):
    """Where the parts run: size "full" or "tiny", how many GPUs there are, and the folder for data and runs."""

    size: str
    gpus: int
    folder: Path


class Failed(Exception):
    """A run that did not end as it should; the message says how."""


class Job(NamedTuple):
    """A run of a task's script, into runs/<task>_<name>.

    observe: options of gpu_process.py. resume: from the checkpoint in that folder, which is else deleted first.
    expect: the exit codes with which it may end. limit: seconds after which it is killed.
    """

    task: str
    name: str
    flags: list
    size: str = "tiny"
    processes: int = 1
    observe: tuple = ()
    on_cpu: bool = False
    resume: bool = False
    expect: tuple[int, ...] = (0,)
    limit: float = 400


class Ended(NamedTuple):
    """How a command ended; left_behind: how many of its processes outlived it by 10 seconds."""

    code: int
    seconds: float
    left_behind: int


class LoggedStep(NamedTuple):
    """A line of metrics.jsonl about a training step."""

    step: int
    loss: float
    grad_norm: float


class Run(NamedTuple):
    """A script's run: lines of metrics.jsonl, what gpu_process.py saw, exit code, seconds, processes left behind.

    summary: what summary.json holds, nothing where the run did not come to its end.
    """

    records: list[dict]
    seen: dict
    code: int
    seconds: float
    left_behind: int
    summary: dict = {}

    def training(self) -> list[dict]:
        """The lines of metrics.jsonl about training."""
        return [record for record in self.records if "train/loss" in record]

    def losses(self) -> list[LoggedStep]:
        """Loss and gradient norm of each logged step."""
        steps = []
        for record in self.training():
            steps.append(LoggedStep(record["step"], record["train/loss"], record["train/grad_norm"]))
        return steps

    def peak_memory(self) -> float:
        """The most GiB of any line."""
        return max(record["train/peak_memory_gb"] for record in self.training())


# --- lines of the report ----------------------------------------------------------------------------------------------


def outside(value: float | str, low: float | None, high: float | None) -> bool:
    """Whether a value is beyond a bound; NaN is beyond any."""
    too_low = low is not None and not value >= low
    too_high = high is not None and not value <= high
    return too_low or too_high


def measured(name: str, value: float | str | None, low=None, high=None, reason: str = "") -> dict:
    """A line with a value: it passes inside low..high, where None is no bound."""
    line = {"name": name, "value": value, "low": low, "high": high}
    if value is None:
        return line | {"result": "fail", "reason": reason or "no value was measured"}
    result = "fail" if outside(value, low, high) else "pass"
    return line | {"result": result, "reason": reason}


def skipped(name: str, reason: str) -> dict:
    """A line about what this machine cannot measure."""
    return measured(name, None, reason=reason) | {"result": "skipped"}


def failed(name: str, reason: str) -> dict:
    """A line about what did not work."""
    return skipped(name, reason) | {"result": "fail"}


# --- running a script -------------------------------------------------------------------------------------------------


def environment(processes: int, on_cpu: bool) -> dict[str, str]:
    """The environment of a run: as many GPUs as processes, none when it is to run on the CPU."""
    values = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        values.pop(name, None)
    if on_cpu:
        return values | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    # CUDA ignores a number above those of this machine.
    numbers = [str(number) for number in range(processes)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        numbers = visible.split(",")[:processes]
    values["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)
    return values


def last_words(log: Path) -> str:
    """The line of a log that says best what went wrong."""
    lines = log.read_text(errors="replace").splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if re.match(r"error:|\w*(Error|Exception)\b", line)]
    chosen = errors or lines or ["no output"]
    return chosen[-1][:300]


def read_records(path: Path) -> list[dict]:
    """The JSON objects of a file with one on each line; none without the file."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines]


def last_object(log: Path) -> dict | None:
    """The last JSON object that a command printed as a line of its log."""
    lines = log.read_text().splitlines()
    objects = [line for line in lines if line.startswith("{")]
    return json.loads(objects[-1]) if objects else None


def captured(command: list) -> subprocess.CompletedProcess:
    """Run a command whose output is short."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def run_process(command: list, log: Path, limit: float, variables: dict[str, str], folder: Path = ROOT) -> Ended:
    """Run a command to its end, with its output in `log`.

    After `limit` seconds it is killed, with all that it has started, and TimeoutError is raised.
    """
    import psutil

    def still_runs(child: psutil.Process) -> bool:
        return child.is_running() and child.status() != psutil.STATUS_ZOMBIE

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

            # What it has started has 10 seconds to end too.
            late = process.poll() is None
            _, alive = psutil.wait_procs(started, timeout=0 if late else 10)
            alive = [child for child in alive if still_runs(child)]
        finally:
            for child in [*started, process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        code = process.wait()
    if late:
        raise TimeoutError(f"took more than {limit:.0f} s and was killed")
    return Ended(code, seconds, len(alive))


def flags_of(setting: Setting, task: str, size: str) -> list[str]:
    """The task's flags for its published or its tiny size, with the data made where it is not there."""
    data = make_data(setting.folder / "data" / size, task, size)
    return filled_flags(task, size, data)


def command_of(setting: Setting, job: Job, report: Path, out: Path) -> list:
    """The command of a job, under torchrun for several processes."""
    command = [sys.executable]
    if job.processes > 1:
        command += ["utils/torchrun.py", "--standalone", f"--nproc_per_node={job.processes}"]
    command += ["benchmarks/gpu_process.py", "--report", report, *job.observe]

    # Random weights of the published size are built in place: none are read.
    if job.size == "full":
        command.append("--random_weights")
    command += [SCRIPTS[job.task], *flags_of(setting, job.task, job.size)]
    command += [OUT_FLAG[job.task], out, *job.flags]
    if job.resume:
        command += ["--resume_from", "auto"]
    return command


def run_script(setting: Setting, job: Job) -> Run:
    """One run of a task's script. Raises Failed when it ends with another code than expected, and TimeoutError."""
    out = setting.folder / "runs" / f"{job.task}_{job.name}"
    report = out.with_name(out.name + ".json")
    log = out.with_name(out.name + ".log")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not job.resume:
        shutil.rmtree(out, ignore_errors=True)
    report.unlink(missing_ok=True)

    command = command_of(setting, job, report, out)
    variables = environment(job.processes, job.on_cpu or not setting.gpus)
    variables["HF_HUB_OFFLINE"] = "1"
    ended = run_process(command, log, job.limit, variables)
    if ended.code not in job.expect:
        raise Failed(f"exit code {ended.code}: {last_words(log)}")

    records = read_records(out / "metrics.jsonl")
    seen = json.loads(report.read_text()) if report.exists() else {}
    summary = out / "summary.json"
    facts = json.loads(summary.read_text()) if summary.exists() else {}
    return Run(records, seen, ended.code, ended.seconds, ended.left_behind, facts)


def sharing(setting: Setting, processes: int) -> tuple[str, ...]:
    """Options of gpu_process.py for several processes on a machine with one GPU."""
    return ("--share_gpu",) if setting.gpus and processes > setting.gpus else ()


# --- parts ------------------------------------------------------------------------------------------------------------


def versions(setting: Setting) -> Lines:
    """What this machine is, and how fast its processes talk."""
    git = captured(["git", "rev-parse", "--short", "HEAD"])
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

    yield bandwidth_line(setting)
    if setting.gpus < 2:
        yield skipped("nccl all-reduce GB/s", "needs two GPUs")


def bandwidth_line(setting: Setting) -> dict:
    """The speed of an all-reduce over this machine's GPUs, or over two processes."""
    # NCCL refuses two ranks on one GPU.
    processes = max(2, setting.gpus)
    backend = "nccl" if setting.gpus > 1 else "gloo"
    log = setting.folder / "bandwidth.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["benchmarks/gpu_frameworks.py", "bandwidth", "--backend", backend]
    ended = run_process(command, log, 120, environment(processes, not setting.gpus))
    answer = None if ended.code else last_object(log)
    name = f"{backend} all-reduce GB/s"
    if not answer:
        return failed(name, last_words(log))
    return measured(name, answer["gb_per_s"], reason=f"{processes} processes")


def gpu_versions(setting: Setting) -> Lines:
    """Driver, libraries and the plain speed of the first GPU."""
    import torch

    query = captured(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    driver = query.stdout.split("\n")[0]
    yield measured("device", f"{setting.gpus} x {torch.cuda.get_device_name()}")
    yield measured("driver", driver.strip() or "unknown")
    yield measured("CUDA", torch.version.cuda)
    yield measured("cuDNN", str(torch.backends.cudnn.version()))
    nccl = ".".join(str(number) for number in torch.cuda.nccl.version())
    yield measured("NCCL", nccl)

    yield measured("bf16 product TFLOP/s", product_tflops())
    values = torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16)
    yield measured("memory copy GB/s", 2 * values.nbytes / seconds_on_gpu(values.clone) / 1e9)


def product_tflops() -> float:
    """TFLOP/s of the first GPU in a large bf16 matrix product."""
    import torch

    factor = torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / seconds_on_gpu(lambda: factor @ factor) / 1e12


def seconds_on_gpu(call: Callable[[], object]) -> float:
    """The mean of 10 calls, after one that warms up."""
    import torch

    call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / 10


def one_script(setting: Setting, task: str) -> Lines:
    """A script at its published size: speed, memory beside the predicted one, waits for data and for the GPU."""
    steps, log_every = STEPS[setting.size]
    flags = ["--log_every", log_every, "--save_every", "0"]
    # The cascade's three stages have their own numbers of steps.
    if task != "cascade" or setting.size == "tiny":
        flags += ["--max_steps", steps]
    job = Job(task, f"{setting.size}_steps", flags, setting.size)
    run = run_script(setting, job)
    stages: dict[int, list[dict]] = {}
    for record in run.training():
        stages.setdefault(stage_of(task, setting.size, record["epoch"]), []).append(record)
    for stage, records in stages.items():
        prefix = f"stage {stage}: " if stage else ""
        # The first interval warms up.
        yield from speed_lines(setting, prefix, records[1:] or records)
    yield host_wait_line(setting, run, log_every)
    yield from memory_lines(setting, task, run, records[1:] or records)


def mean_rate(records: list[dict]) -> float:
    """Samples/s over some log lines of equally many samples."""
    return statistics.harmonic_mean([record["train/samples_per_s"] for record in records])


def speed_lines(setting: Setting, prefix: str, records: list[dict]) -> Lines:
    """Samples/s and share of time waiting for data, of some lines of metrics.jsonl."""
    full = setting.size == "full"
    steps = f"{len(records)} log lines after the first"
    yield measured(f"{prefix}samples/s", mean_rate(records), reason=steps)

    # The made-up data comes from a cache: the GPU should not wait.
    wait = statistics.mean(record["train/data_wait"] for record in records)
    most = 0.05 if full else None
    yield measured(f"{prefix}data wait", wait, None, most, "share of time")


def host_wait_line(setting: Setting, run: Run, log_every: int) -> dict:
    """Host waits for the GPU in a step that is not logged."""
    if not setting.gpus:
        return skipped("host waits a step", "no GPU")
    # Counting begins at the second step; those that end a log interval may wait.
    counts = run.seen.get("host_waits", [])
    between = [count for i, count in enumerate(counts) if i and (i + 1) % log_every]
    if not between:
        return failed("host waits a step", "no steps between two log lines")
    middle = statistics.median(between)
    places = [f"{place} {count}" for place, count in run.seen["places"].items()]
    reason = f"median of {len(between)} steps without logging, most {max(between)}; "
    reason += f"in all at: {', '.join(places) or 'none'}"
    return measured("host waits a step", middle, None, 0, reason)


def memory_lines(setting: Setting, task: str, run: Run, records: list[dict]) -> Lines:
    """Peak memory that torch has reserved, what tools.rehearse predicts, and their ratio, which is to be within 15 %.

    records: the log lines of the steps that are rehearsed, a cascade's last stage.
    """
    peak = run.peak_memory()
    kind = "reserved on the GPU" if setting.gpus else "resident memory of the process"
    yield measured("peak GiB", peak, reason=kind)
    # At tiny sizes one script shows that this code works; it takes as long as a run.
    if setting.size == "tiny" and task != "compressed_ad":
        yield skipped("predicted GiB", "tiny sizes: only compressed_ad is rehearsed here")
        return
    predicted = rehearse(setting, task, run)
    yield measured("predicted GiB", predicted["peak_gib"], reason=f"fits: {predicted['fits']}")
    if not setting.gpus:
        yield skipped("peak over predicted", "no GPU: resident memory is no counterpart")
        return

    steps_per_s = mean_rate(records) / run.summary["effective_batch_size"]
    mfu = steps_per_s * predicted["tflop_per_step"] / product_tflops()
    yield measured("MFU of the rehearsed step", mfu, LEAST_MFU[task], reason="share of a measured matmul rate")

    # Questions and segments of a real batch are shorter than the largest, which is predicted.
    least = None if task in ("mimic_cxr", "compressed_ad") else 0.85
    ratio = peak / predicted["peak_gib"]
    yield measured("peak over predicted", ratio, least, 1.15, "predicted within 15 %")


def rehearse(setting: Setting, task: str, run: Run) -> dict:
    """The JSON object that tools.rehearse ends with, for this GPU's memory."""
    log = setting.folder / "runs" / f"{task}_rehearsed.log"
    command = [sys.executable, "-m", "tools.rehearse", SCRIPTS[task], *flags_of(setting, task, setting.size)]
    if setting.gpus:
        command += ["--gpu_memory", f"{run.seen['total_gib']:.1f}"]
    ended = run_process(command, log, 120, environment(1, not setting.gpus))
    answer = None if ended.code else last_object(log)
    if not answer:
        raise Failed(f"rehearsal: exit code {ended.code}: {last_words(log)}")
    return answer


def for_each_task(setting: Setting, name: str, check: Callable[[str], dict]) -> Lines:
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


def same_answer(setting: Setting) -> Lines:
    """The losses of 3 steps on 1 process and on several, in fp32 without TF32, with the same global batch."""
    processes = max(2, setting.gpus)
    while any(batch % processes for batch in BATCH.values()):
        processes -= 1
    name = f"largest relative difference, 1 x N to {processes} x N/{processes}"
    fp32 = ["--mixed_precision", "no", "--max_steps", "3", *EVERY_STEP]
    observe = ("--no_tf32",)

    def check(task: str) -> dict:
        # Survival's batch is that of all processes.
        share = BATCH[task] if task == "survival" else BATCH[task] // processes
        alone = Job(task, "same_1", fp32, observe=observe)
        together = Job(
            task,
            "same_N",
            [*fp32, "--batch_size", share],
            processes=processes,
            observe=(*observe, *sharing(setting, processes)),
        )
        one = run_script(setting, alone)
        many = run_script(setting, together)
        reason = "loss of 3 steps and first gradient norm, fp32"
        return measured(f"{task}: {name}", largest_difference(one, many), None, 1e-5, reason)

    yield from for_each_task(setting, name, check)


def largest_difference(one: Run, other: Run) -> float:
    """The largest relative difference of two runs' losses and first gradient norms. Raises Failed for other steps.

    Later gradient norms are left out: AdamW turns rounding in a small gradient into a step of full size.
    """
    ours = one.losses()
    theirs = other.losses()
    our_steps = [logged.step for logged in ours]
    their_steps = [logged.step for logged in theirs]
    if our_steps != their_steps or not our_steps:
        raise Failed(f"steps {our_steps} and {their_steps} were logged")

    def difference(left: float, right: float) -> float:
        return abs(left - right) / max(abs(left), 1e-12)

    differences = [difference(ours[0].grad_norm, theirs[0].grad_norm)]
    for left, right in zip(ours, theirs, strict=True):
        differences.append(difference(left.loss, right.loss))
    return max(differences)


def kill_and_resume(setting: Setting) -> Lines:
    """A run killed after 3 of 5 steps and resumed, against an uninterrupted one, bit for bit."""
    name = "steps that differ after a kill"

    def check(task: str) -> dict:
        flags = ["--max_steps", "5", "--log_every", "1", "--save_every", "2", "--deterministic"]
        begin = Job(task, "killed", flags)
        kill = begin._replace(observe=("--kill_at", "3"), expect=(-signal.SIGKILL,))
        resume = begin._replace(resume=True)
        whole = run_script(setting, Job(task, "whole", flags))
        run_script(setting, kill)
        resumed = run_script(setting, resume)
        differ = len(set(whole.losses()) ^ set(resumed.losses()))
        reason = f"loss and gradient norm of {len(whole.losses())} steps, SIGKILL after 3"
        return measured(f"{task}: {name}", differ, None, 0, reason)

    yield from for_each_task(setting, name, check)


def checkpoint_across(setting: Setting) -> Lines:
    """A checkpoint of the GPU is resumed on the CPU, and that one on the GPU, against a run that stayed there."""
    name = "largest relative difference after GPU, CPU, GPU"
    flags = ["--mixed_precision", "no", *EVERY_STEP, "--max_steps"]

    def check(task: str) -> dict:
        stay = Job(task, "stayed", [*flags, "6"])
        begin = Job(task, "moved", [*flags, "2"])
        move = begin._replace(flags=[*flags, "4"], on_cpu=True, resume=True)
        move_back = begin._replace(flags=[*flags, "6"], resume=True)
        whole = run_script(setting, stay)
        run_script(setting, begin)
        run_script(setting, move)
        moved = run_script(setting, move_back)
        reason = "loss of 6 steps, fp32"
        reason += "" if setting.gpus else "; no GPU: all on the CPU"
        return measured(f"{task}: {name}", largest_difference(whole, moved), None, 1e-3, reason)

    yield from for_each_task(setting, name, check)


def out_of_memory(setting: Setting) -> Lines:
    """A batch that does not fit is made smaller before the first step, and the steps are then made."""
    shares = [0.5]
    if setting.gpus:
        import torch

        # 20 and 10 GiB, of which survival's 6 cases need 35.
        total = torch.cuda.get_device_properties(0).total_memory
        shares = [gib * 2**30 / total for gib in (20, 10)]
    flags = ["--auto_batch", "--max_steps", "3", *EVERY_STEP]
    for share in shares:
        name = f"steps made with {share:.0%} of the memory"
        observe = ("--memory", str(share))
        job = Job("survival", "short", flags, setting.size, observe=observe, limit=200)
        try:
            run = run_script(setting, job)
        except (Failed, TimeoutError) as error:
            yield failed(name, str(error))
            continue

        # Without a refusal nothing was made smaller.
        refused = run.seen["refused"]
        if not refused:
            yield failed(name, "no allocation was refused: nothing was tried")
            continue
        place = "of the GPU" if setting.gpus else "made up on the CPU: at most 2 samples at once"
        reason = f"survival, {place}; {refused} allocations refused"
        yield measured(name, len(run.training()), 3, 3, reason)


def rank_killed(setting: Setting) -> Lines:
    """A rank is killed: the job ends within the timeout, and leaves no process behind."""
    timeout = 20
    task = "compressed_ad"
    flags = ["--max_steps", "200", *EVERY_STEP, "--dist_timeout", timeout]
    flags += ["--batch_size", BATCH[task] // 2]
    job = Job(
        task,
        "orphan",
        flags,
        processes=2,
        observe=("--kill_at", "3", *sharing(setting, 2)),
        expect=tuple(range(1, 256)),
        limit=200,
    )
    run = run_script(setting, job)
    # Starting takes up to a minute on a busy machine.
    yield measured("seconds from start to end", run.seconds, None, 60 + timeout, f"--dist_timeout {timeout}")
    yield measured("processes left behind", run.left_behind, None, 0)


def deepspeed(setting: Setting) -> Lines:
    """ZeRO-2 and ZeRO-3 in bf16, and in fp16 with a loss scale that overflows in the first steps."""
    cases = [(2, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp16")]
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
        flags = ["--deepspeed_config", config, "--mixed_precision", precision]
        flags += ["--max_steps", "12", *EVERY_STEP]
        flags += ["--max_bad_steps", "10", "--no-gradient_checkpointing"]
        job = Job("mimic_cxr", f"zero{stage}_{precision}", flags, processes=setting.gpus or 1)
        try:
            run = run_script(setting, job)
        except (Failed, TimeoutError) as error:
            yield failed(name, str(error))
            continue
        yield from overflow_lines(stage, precision, run)


def zero_config(stage: int, precision: str) -> dict:
    """A DeepSpeed file; fp16 begins at a loss scale of 2^28, at which gradients overflow."""
    fp16 = {"enabled": "auto"}
    if precision == "fp16":
        fp16["initial_scale_power"] = 22
        fp16["hysteresis"] = 1
    return {"zero_optimization": {"stage": stage, "contiguous_gradients": True}, "fp16": fp16}


def overflow_lines(stage: int, precision: str, run: Run) -> Lines:
    """The last loss is finite, and in fp16 some steps were skipped."""
    records = run.training()
    count = sum(bool(record["train/skipped"]) for record in records)
    last = records[-1]["train/loss"]
    yield measured(f"ZeRO-{stage} {precision}: last loss", last, 0, None, f"{len(records)} steps, {count} skipped")
    if precision == "fp16":
        name = f"ZeRO-{stage} fp16: steps skipped after an overflow"
        yield measured(name, count, 1, len(records) - 1, "the loss scale starts at 2^28")


class Cost(NamedTuple):
    """Samples/s and peak GiB of a run."""

    speed: float
    memory: float


def variants(setting: Setting) -> Lines:
    """One model in fp32, bf16, fp16, compiled and with gradient checkpointing: speed and memory over plain bf16."""
    steps, log_every = STEPS[setting.size]
    flags = ["--max_steps", steps, "--log_every", log_every, "--save_every", "0", "--no_auto_optimize"]
    if setting.size == "full":
        flags += ["--batch_size", 16]
    chosen = {
        "bf16": ["bf16"],
        "fp32": ["no"],
        "fp16": ["fp16"],
        "compile": ["bf16", "--compile"],
        "checkpointing": ["bf16", "--gradient_checkpointing"],
    }
    needs_gpu = {
        "fp16": "fp16 needs a GPU",
        "compile": "compiling takes minutes on a CPU; tests/ does it",
    }

    plain = None
    for name, words in chosen.items():
        if name in needs_gpu and not setting.gpus:
            yield skipped(f"{name}: samples/s", needs_gpu[name])
            continue
        precision = ["--mixed_precision", *words]
        job = Job("mimic_cxr", name, flags + precision, setting.size)
        try:
            run = run_script(setting, job)
        except (Failed, TimeoutError) as error:
            yield failed(f"{name}: samples/s", str(error))
            continue

        speed = mean_rate(run.training()[1:])
        memory = run.peak_memory()
        yield measured(f"{name}: samples/s", speed, reason="mimic_cxr")
        yield measured(f"{name}: peak GiB", memory)
        if name == "bf16":
            plain = Cost(speed, memory)
        elif plain:
            yield from variant_ratios(setting, name, speed / plain.speed, memory / plain.memory)


def variant_ratios(setting: Setting, name: str, speed: float, memory: float) -> Lines:
    """Speed and memory over plain bf16, with what is expected of them on a GPU."""
    slowest = {"compile": 0.97, "fp16": 0.9, "checkpointing": 0.6}
    most = {"checkpointing": 1.0}
    if not setting.gpus:
        slowest = {}
        most = {}
    yield measured(f"{name}: speed over bf16", speed, slowest.get(name))
    yield measured(f"{name}: memory over bf16", memory, None, most.get(name))


def frameworks(setting: Setting) -> Lines:
    """The survival script against the same model, batch and data under four other trainers."""
    steps, log_every = STEPS[setting.size]
    precision = "bf16" if setting.gpus else "no"
    same = ["--mixed_precision", precision, "--no-augment", "--num_workers", "0"]
    flags = [*same, "--max_steps", steps, "--log_every", log_every, "--save_every", "0"]
    job = Job("survival", "framework", flags, setting.size)
    speed = mean_rate(run_script(setting, job).training()[1:])
    yield measured("script: samples/s", speed, reason=f"survival, {precision}")

    packages = {
        "bare loop": ["torch"],
        "Accelerate": ["accelerate"],
        "MONAI SupervisedTrainer": ["ignite"],
        "HF Trainer": ["transformers"],
        "Fabric": ["lightning", "lightning_fabric"],
    }
    for name, alternatives in packages.items():
        package = alternatives[0]
        if not any(importlib.util.find_spec(other) for other in alternatives):
            yield skipped(f"script over {name}", f"{package} is not installed")
            continue

        log = setting.folder / "runs" / f"framework_{package}.log"
        command = [sys.executable, "benchmarks/gpu_frameworks.py", "train", "--trainer", name]
        command += ["--steps", steps, "--warm_up", log_every]
        command += ["--", *flags_of(setting, "survival", setting.size), *same]
        ended = run_process(command, log, 120, environment(1, not setting.gpus))
        answer = None if ended.code else last_object(log)
        if not answer:
            yield failed(f"script over {name}", last_words(log))
            continue
        theirs = answer["samples_per_s"]
        least = 0.97 if setting.gpus else None
        yield measured(f"script over {name}", speed / theirs, least, reason=f"{theirs:.2f} samples/s there")


def part_of_script(task: str) -> Callable[[Setting], Lines]:
    """The part that measures one script."""

    def part(setting: Setting) -> Lines:
        return one_script(setting, task)

    part.__doc__ = one_script.__doc__
    return part


class Part(NamedTuple):
    """What a part runs, and its limit in seconds."""

    run: Callable[[Setting], Lines]
    limit: int


# In the order of their worth, each with its limit in seconds. A lent machine may end at any time.
PARTS = {
    "versions": Part(versions, 180),
    "compressed_ad": Part(part_of_script("compressed_ad"), 300),
    "survival": Part(part_of_script("survival"), 420),
    "mimic_cxr": Part(part_of_script("mimic_cxr"), 420),
    "prs_med": Part(part_of_script("prs_med"), 540),
    "cascade": Part(part_of_script("cascade"), 540),
    "same_answer": Part(same_answer, 420),
    "kill_and_resume": Part(kill_and_resume, 540),
    "checkpoint_across": Part(checkpoint_across, 540),
    "out_of_memory": Part(out_of_memory, 300),
    "rank_killed": Part(rank_killed, 240),
    "variants": Part(variants, 540),
    "deepspeed": Part(deepspeed, 420),
    "frameworks": Part(frameworks, 420),
}


# --- all parts --------------------------------------------------------------------------------------------------------


def run_part(command: list, lines_file: Path, log: Path, limit: float) -> list[dict]:
    """The lines that a part's process wrote into lines_file, and one more when it crashed or took too long."""
    lines_file.unlink(missing_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    reason = ""
    try:
        ended = run_process(command, log, limit, dict(os.environ))
        if ended.code:
            reason = f"exit code {ended.code}: {last_words(log)}"
    except TimeoutError as error:
        reason = str(error)
    lines = read_records(lines_file)
    if not lines and not reason:
        reason = "ended without a result"
    if reason:
        lines.append(failed("whole part", reason))
    return lines


def part_process(name: str, setting: Setting, lines_file: Path) -> None:
    """In the part's own process: write each line as soon as it is known."""
    setting.folder.mkdir(parents=True, exist_ok=True)
    with open(lines_file, "w") as file:

        def write(line: dict) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            for line in PARTS[name].run(setting):
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
    rows = [{key: line[key] for key in KEYS} for line in lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(rows, indent=1) + "\n")
    unfinished.replace(path)


def shown(value: float | str | None) -> str:
    """A value as it stands in a table; empty for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shown_range(line: dict) -> str:
    """What is expected of a line's value; empty without a bound."""
    low = shown(line["low"])
    high = shown(line["high"])
    if low and high:
        return f"{low} to {high}"
    if low:
        return f">= {low}"
    return f"<= {high}" if high else ""


def results_table(lines: list[dict]) -> str:
    """The GPU section of RESULTS.md."""
    machine = [line for line in lines if line["part"] == "versions"]
    facts = {line["name"]: line["value"] for line in machine}
    names = ("driver", "CUDA", "cuDNN", "NCCL", "python", "torch", "transformers", "accelerate", "deepspeed", "monai")
    known = ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name))

    measured_by = f"`python benchmarks/gpu.py`, {facts.get('date')}, commit {facts.get('commit')}."
    rows = [
        f"{facts.get('device')}; {known}; {measured_by}",
        "",
        "| part | what | value | expected | result | reason |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        value = shown(line["value"])
        cells = [line["part"], line["name"], value, shown_range(line)]
        cells += [line["result"], line["reason"]]
        row = " | ".join(cell.replace("|", "/") for cell in cells)
        rows.append(f"| {row} |")
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
    done = captured([sys.executable, "-c", code])
    if done.returncode:
        sys.exit(f"error: torch: does not start ({done.stderr.strip().splitlines()[-1]}); run `make setup`")
    return json.loads(done.stdout.splitlines()[-1])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--parts", help="comma-separated; default: all")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results of the parts")
    text = "tiny sizes on a GPU too, a trial of minutes; no RESULTS.md"
    parser.add_argument("--tiny", action="store_true", help=text)
    text = "data, runs, cpu.json (default runs/gpu)"
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/gpu", help=text)

    # These two are for the parts' own processes.
    parser.add_argument("--part_process", help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.chosen = args.parts.split(",") if args.parts else list(PARTS)
    for name in args.chosen:
        if name not in PARTS:
            parser.error(f"--parts {name}: no such part; there are {', '.join(PARTS)}")
    return args


def run_parts(names: list[str], setting: Setting) -> Iterator[tuple[str, list[dict]]]:
    """(part, its lines) of one part after the other; without GPUs two at a time, as no speed counts there."""

    def run(name: str) -> tuple[str, list[dict]]:
        command = [sys.executable, __file__, "--part_process", name]
        command += ["--gpus", setting.gpus, "--folder", setting.folder]
        if setting.size == "tiny":
            command.append("--tiny")
        log = setting.folder / f"{name}.log"
        lines_file = setting.folder / f"{name}.jsonl"
        begun = time.monotonic()
        lines = run_part(command, lines_file, log, PARTS[name].limit)
        print(f"== {name}: {time.monotonic() - begun:.0f} s", flush=True)
        return name, lines

    def make(task: str) -> None:
        make_data(setting.folder / "data" / setting.size, task, "tiny")

    together = 1 if setting.gpus or len(names) == 1 else 2
    with ThreadPoolExecutor(together) as pool:
        # Parts share data, and two of them must not write the same. What fails here, the part that needs it says.
        if together > 1:
            with contextlib.suppress(RuntimeError):
                list(pool.map(make, SCRIPTS))
        yield from pool.map(run, names)


def print_parts() -> None:
    """Print each part with its limit and what it does."""
    for name, part in PARTS.items():
        about = (part.run.__doc__ or "").split("\n")[0]
        print(f"{name:<18} {part.limit:>4} s  {about}")


def main() -> int:
    args = parse_args()
    if args.list:
        print_parts()
        return 0
    if args.part_process:
        size = "tiny" if args.tiny else "full"
        setting = Setting(size, args.gpus, args.folder)
        part_process(args.part_process, setting, args.folder / f"{args.part_process}.jsonl")
        return 0

    # The results of a GPU at its published sizes are kept in the tree, others beside the runs.
    gpus = find_gpus()
    size = "tiny" if args.tiny or not gpus else "full"
    setting = Setting(size, len(gpus), args.folder)
    device = re.sub(r"\W+", "_", gpus[0]) if gpus else "cpu"
    usual_folder = (ROOT / "runs/gpu").resolve()
    published = size == "full" and args.folder == usual_folder
    report_folder = ROOT / "benchmarks/gpu" if published else args.folder
    report = report_folder / f"{device}.json"
    args.folder.mkdir(parents=True, exist_ok=True)
    lines = read_report(report)
    if args.fresh:
        lines = [line for line in lines if line["part"] not in args.chosen]

    # A part with a result that did not fail is not run again.
    bad = {line["part"] for line in lines if line["result"] == "fail"}
    done = {line["part"] for line in lines} - bad
    for name in args.chosen:
        if name in done:
            print(f"{name}: has its result; --fresh measures it anew", flush=True)
    names = [name for name in args.chosen if name not in done]

    # The report is written after each part, as a lent machine may end at any time.
    for name, new in run_parts(names, setting):
        for line in new:
            print(f"{line['result']:<8} {line['name']:<60} {shown(line['value']):>12}  {line['reason']}", flush=True)
        others = [line for line in lines if line["part"] != name]
        lines = others + [{"part": name, **line} for line in new]
        write_report(report, lines)
        if published:
            write_results(ROOT / "benchmarks/RESULTS.md", read_report(report))

    count = sum(line["result"] == "fail" for line in lines)
    print(f"{report}: {len(lines)} lines, {count} failed", flush=True)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
