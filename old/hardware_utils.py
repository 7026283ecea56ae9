"""What this machine has, the settings that follow, numeric precision, and what running out of memory looks like.

python -m old.hardware_utils                                   the report
python -m old.hardware_utils --json                            the same for programs
python -m old.hardware_utils --shell                           what launch_distributed_training.sh needs of it
python -m old.hardware_utils --plan --gpus 4 --gpu_memory 24   the settings for a machine one does not have
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import psutil
import torch

from old.cli_utils import InputError, Parser, number, whole

GIB = 2**30


def choose_precision(wanted: str, device: torch.device) -> tuple[str, str]:
    """(precision, reason) for --mixed_precision: `auto` is bf16 from compute capability 8.0, fp16 below, fp32 on CPU.

    Raises InputError for fp16 on CPU, which would silently train in fp32 without a scaler.
    """
    if device.type == "cpu":
        if wanted == "fp16":
            raise InputError("--mixed_precision fp16: needs a GPU; use no or bf16")
        if wanted == "auto":
            return "no", "fp32 on CPU"
        return wanted, "as asked"

    major, minor = torch.cuda.get_device_capability(device)
    capability = f"compute capability {major}.{minor}"
    if wanted == "bf16" and major < 8:
        raise InputError(f"--mixed_precision bf16: this GPU ({capability}) has none; use fp16")
    if wanted == "auto":
        return "bf16" if major >= 8 else "fp16", capability
    return wanted, "as asked"


def set_numerics(device: torch.device, precision: str, reason: str, deterministic: bool) -> str:
    """Set what --mixed_precision `no` and --deterministic ask of torch; once, before the model is built.

    Returns `reason` with what holds now, for the banner. The environment's part is cli_utils.ask_for_fixed_order.
    """
    holds = [reason]
    if device.type == "cuda" and precision == "no":
        # torch's default computes convolutions with 10 bits of mantissa on Ampere and later. These are the older
        # names of the settings: torch.compile reads them, and raises where the newer ones were used.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        holds.append("fp32 (TF32 off)")

    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        # The gradients of flash and memory-efficient attention have a fixed order then, those of cuDNN's do not.
        torch.backends.cuda.enable_cudnn_sdp(False)
        holds.append("deterministic")
    return "; ".join(holds)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context for a forward pass in `no`, `bf16` or `fp16`."""
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, half, enabled=precision != "no")


class GroupNorm(torch.nn.GroupNorm):
    """GroupNorm in the precision of its input; sums are in fp32 all the same.

    Autocast would raise it to fp32, which at full resolution is most of a network's memory.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight = self.weight.to(x.dtype)
            bias = self.bias.to(x.dtype)
            return torch.nn.functional.group_norm(x, self.num_groups, weight, bias, self.eps)


def peak_memory_gb(device: torch.device) -> float:
    """Most memory this process has held, GiB: of the GPU, or resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    if os.name != "posix":
        return psutil.Process().memory_info().peak_wset / GIB

    import resource

    # Linux counts in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (GIB if sys.platform == "darwin" else 2**20)


# --- running out of memory --------------------------------------------------------------------------------------------

# CUDA's and torch's own words (AcceleratorError, NCCL's `Cuda failure 2 'out of memory'`, the driver's); cuBLAS, cuDNN,
# cuSOLVER and cuFFT; the host's allocators, C++'s, NumPy's (whose class a loading process loses), and oneDNN's when it
# is refused memory for the code it writes.
OUT_OF_MEMORY = re.compile(
    r"out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|ALLOC_FAILED|ALLOCATION_FAILED"
    r"|can't allocate memory|not enough memory|cannot allocate memory|Failed to CUDA (?:calloc|malloc|host alloc)"
    r"|std::bad_alloc|bad allocation|could not create a (?:primitive|memory object)|Unable to allocate .* for an array",
    re.IGNORECASE,
)
# Nearly always memory: cuBLAS has none for its handle (the other cause is an index out of range before it, which no
# made-up batch has), and torch hides each cuDNN engine's lack of a workspace until no engine is left.
PROBABLY_OUT_OF_MEMORY = re.compile(
    r"CUBLAS_STATUS_NOT_INITIALIZED when calling `?cublasCreate|unable to find an engine to execute this computation"
    r"|unable to find a valid cuDNN algorithm",
    re.IGNORECASE,
)
# The limit on locked memory (ulimit -l), which no smaller batch helps.
LOCKED_MEMORY = re.compile(r"ibv_\w+.{0,20} failed", re.IGNORECASE)


def out_of_memory(error: BaseException) -> bool:
    """Whether this is the GPU's or the host's allocator giving up, under any of the names that libraries give it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error)
    if LOCKED_MEMORY.search(message):
        return False
    return bool(OUT_OF_MEMORY.search(message) or PROBABLY_OUT_OF_MEMORY.search(message))


def split_batch(batch_size: int, accumulation: int | None) -> tuple[int, int | None]:
    """The next smaller batch, and the accumulation that keeps the effective one: (8, 1) -> (4, 2), (3, 1) -> (1, 3).

    accumulation: None where it follows by itself, so that a batch is just halved.
    """
    if accumulation is None:
        return max(1, batch_size // 2), None
    for factor in range(2, batch_size + 1):
        if batch_size % factor == 0:
            return batch_size // factor, accumulation * factor
    return batch_size, accumulation


def smaller_batch(batch_size: int, accumulation: int | None, most: int) -> tuple[int, int | None]:
    """The largest batch of at most `most` that split_batch comes to, and its accumulation."""
    while batch_size > max(1, most):
        batch_size, accumulation = split_batch(batch_size, accumulation)
    return batch_size, accumulation


# --- what this machine has --------------------------------------------------------------------------------------------


def _cgroups(controller: str, root: Path) -> list[Path]:
    """Folders of this process's control groups (v1 and v2) and of those above them, whose limits hold as well."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        # This system is not Linux.
        return []

    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup"
        if controllers:
            top /= controller

        # In a container the path may be the host's; then only `top` is there.
        own = top / path.strip("/")
        folders.append(own)
        folders += [folder for folder in own.parents if folder.is_relative_to(top)]
    return folders


def _numbers(path: Path) -> list[int]:
    """The numbers that a control group's file starts with; none for "max" (no limit) or a missing file."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def usable_cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use: its affinity and its container's quota, not the host's count."""
    cores = len(core_numbers())
    for folder in _cgroups("cpu", root):
        limit = _numbers(folder / "cpu.max")
        if not limit:
            limit = _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        if len(limit) != 2:
            continue

        # A quota of -1 is no limit.
        quota, period = limit
        if quota > 0:
            cores = min(cores, quota // period)
    return max(1, cores)


def core_numbers() -> set[int]:
    """The numbers of the cores that this process may run on; all of them on systems without affinities."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def available_ram_gb(root: Path = Path("/")) -> float:
    """Memory that can be taken without swapping, GiB: the host's, or what the container's limit leaves of it."""
    free = psutil.virtual_memory().available
    for folder in _cgroups("memory", root):
        limit = _numbers(folder / "memory.max") or _numbers(folder / "memory.limit_in_bytes")
        used = _numbers(folder / "memory.current") or _numbers(folder / "memory.usage_in_bytes")
        if limit and used:
            free = min(free, limit[0] - used[0] + _cached_bytes(folder))
    return max(0.0, free / GIB)


def _cached_bytes(folder: Path) -> int:
    """Bytes of cached files in a control group: they count as used, but are given back when memory runs short."""
    try:
        words = (folder / "memory.stat").read_text().split()
    except OSError:
        return 0
    figures = dict(zip(words[::2], words[1::2], strict=False))
    return int(figures.get("total_inactive_file", figures.get("inactive_file", 0)))


def _nvidia_smi() -> dict[str, float | None]:
    """{UUID: free GiB} of every GPU that the driver lists, whether torch may use it or not."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}

    listed = {}
    for line in answer.splitlines():
        uuid, _, free = line.partition(",")
        # The driver may answer [N/A].
        free_gb = int(free) / 1024 if free.strip().isdigit() else None
        listed[uuid.strip().removeprefix("GPU-")] = free_gb
    return listed


def cuda_starts() -> bool:
    """Whether torch can use a GPU. It counts GPUs by asking the driver, also where CUDA then fails to start."""
    with warnings.catch_warnings():
        # torch gives the reason in several lines, startup_utils.check_gpus in one.
        warnings.filterwarnings("ignore", message="CUDA initialization")
        return torch.cuda.is_available()


def detect_gpus() -> tuple[list[dict], list[str]]:
    """(GPUs that this torch can use, notes on those that it cannot).

    torch decides, since it is what trains; it knows every form of CUDA_VISIBLE_DEVICES. Free memory is nvidia-smi's:
    torch would have to take several hundred MB on each GPU to tell.
    """
    listed = _nvidia_smi()
    gpus = []
    for index in range(torch.cuda.device_count() if cuda_starts() else 0):
        card = torch.cuda.get_device_properties(index)
        free_gb = listed.get(str(card.uuid).removeprefix("GPU-"))
        gpu = {
            "name": card.name,
            "memory_total_gb": round(card.total_memory / GIB, 2),
            "memory_free_gb": free_gb and round(free_gb, 2),
            "compute": float(f"{card.major}.{card.minor}"),
        }
        gpus.append(gpu)

    notes = []
    if len({gpu["name"] for gpu in gpus}) > 1:
        notes.append("the GPUs differ: settings follow the smallest, and the slowest sets the pace")
    if len(gpus) < len(listed):
        plural = "s" if len(listed) > 1 else ""
        notes.append(f"nvidia-smi lists {len(listed)} GPU{plural}, {_reason_for_fewer(len(gpus))}")
    return gpus, notes


def _reason_for_fewer(usable: int) -> str:
    """Why torch uses fewer GPUs than the driver lists, as the end of a sentence."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        return f"but this torch ({torch.__version__}) is built without CUDA; install a CUDA build to use them"
    if visible is not None:
        return f"of which CUDA_VISIBLE_DEVICES='{visible}' leaves {usable}"
    return f"but torch sees {usable}; is the driver new enough for CUDA {torch.version.cuda}?"


def detect_hardware() -> dict:
    """Facts about this machine, as --json prints them (memory and disk in GiB)."""
    gpus, notes = detect_gpus()
    # DeepSpeed is looked for only: to import it takes seconds.
    return {
        "gpu_count": len(gpus),
        "gpus": gpus,
        "cpu_cores": usable_cores(),
        "ram_available_gb": round(available_ram_gb(), 1),
        "disk_free_gb": round(shutil.disk_usage(".").free / GIB, 1),
        "deepspeed_installed": importlib.util.find_spec("deepspeed") is not None,
        "notes": notes,
    }


def imagine_hardware(
    gpus: int, gpu_memory_gb: float | None, compute: float = 8.0, cores: int | None = None, ram_gb: float = 128,
    deepspeed: bool = True,
) -> dict:  # fmt: skip
    """detect_hardware's facts for a machine one does not have; without gpu_memory_gb one without GPUs."""
    cards = []
    for _ in range(gpus if gpu_memory_gb else 0):
        card = {
            "name": "planned GPU",
            "memory_total_gb": gpu_memory_gb,
            "memory_free_gb": gpu_memory_gb,
            "compute": compute,
        }
        cards.append(card)

    return {
        "gpu_count": len(cards),
        "gpus": cards,
        "cpu_cores": cores or 3 * gpus + 2,
        "ram_available_gb": ram_gb,
        "disk_free_gb": None,
        "deepspeed_installed": deepspeed,
        "notes": ["planned, not detected"],
    }


# --- the settings that follow -----------------------------------------------------------------------------------------

# The settings by GPU memory in GB as sold. The effective batch is what comes out on 4 GPUs, kept for any number.
# From 20 GB down this is the guide's table. Above it: a traced step of guide 1 in bf16 takes 5.7 GiB at batch 16, and
# as many kernels are launched as at any other batch, so a larger one spreads them over more samples.
GPU_TABLE = (
    {"from_gb": 141, "batch": 128, "effective": 256, "zero_stage": 2},
    {"from_gb": 80, "batch": 64, "effective": 256, "zero_stage": 2},
    {"from_gb": 40, "batch": 32, "effective": 256, "zero_stage": 2},
    {"from_gb": 20, "batch": 16, "effective": 256, "zero_stage": 2},
    {"from_gb": 14, "batch": 12, "effective": 240, "zero_stage": 2},
    {"from_gb": 10, "batch": 8, "effective": 256, "zero_stage": 2},
    {"from_gb": 6, "batch": 4, "effective": 256, "zero_stage": 2},
    {"from_gb": 0, "batch": 2, "effective": 256, "zero_stage": 3},
)
CPU_ROW = {"batch": 8, "effective": 256, "zero_stage": 2}
# The largest batch of the guide's own rows: its accumulation there gives the effective batch of the rows above.
GUIDE_BATCH = 16
# The driver and error correction keep a part: cards report 22.0-23.7 GiB of 24 GB, 14.6-15.8 of 16, 19.5-20.0 of 20,
# 9.5-10.0 of 10, 5.8-6.0 of 6; and 39.4-39.6 of 40, 79.1-79.3 of 80, 139.7-139.8 of 141. So a row begins this much, or
# this share, below its number, which no smaller card reaches.
KEPT_GB = 0.7
KEPT_SHARE = 0.03
# Cards sold with 16 GB and more are those of the row from 14: all activations and the optimizer stay on them.
ROOMY_FROM_GB = 14


def begins_at(from_gb: float) -> float:
    """The memory in GiB, as a card reports it, from which a row of the table holds."""
    return from_gb - max(KEPT_GB, KEPT_SHARE * from_gb)


def is_roomy(gpu_memory_gb: float | None) -> bool:
    """Whether guide 1 needs neither recomputed activations nor an optimizer on the CPU: GPUs of 16 GB and more."""
    return gpu_memory_gb is not None and gpu_memory_gb >= begins_at(ROOMY_FROM_GB)


def nearest_accumulation(batch: int, processes: int, effective: int) -> int:
    """The micro-batches a step, at least 1, that come nearest to the effective batch; a half is rounded up."""
    together = batch * processes
    return max(1, (2 * effective + together) // (2 * together))


def fitting_batch(row: dict, processes: int) -> int:
    """The row's batch per GPU, lowered until the effective batch is what the guide's largest batch gives.

    4 processes at 64: 64 x 1 x 4 = 256; 8: 32 x 1 x 8; 3: 40 x 2 x 3 = 240, as 16 x 5 x 3. Never below GUIDE_BATCH.
    """
    if row["batch"] <= GUIDE_BATCH:
        return row["batch"]
    share = GUIDE_BATCH * nearest_accumulation(GUIDE_BATCH, processes, row["effective"])
    return max(batch for batch in range(GUIDE_BATCH, row["batch"] + 1) if share % batch == 0)


def settings_for(
    num_processes: int, gpu_memory_gb: float | None, compute: float | None, cores: int, ram_gb: float, deepspeed: bool,
    batch_size: int | None = None, processes_per_node: int | None = None,
) -> dict:  # fmt: skip
    """The settings for num_processes processes in all, one per GPU (or CPU processes without gpu_memory_gb).

    gpu_memory_gb and compute (capability) are those of the smallest GPU, cores and ram_gb of one node; batch_size
    replaces the table's, and accumulation follows. dataloader_num_workers is the total of a node's processes
    (processes_per_node, default all); prefetch_factor is per loading worker. offload_optimizer: ours of DeepSpeed's
    files keep the optimizer on the CPU; False drops that.
    """
    on_gpu = gpu_memory_gb is not None
    row = CPU_ROW
    if on_gpu:
        row = next(row for row in GPU_TABLE if gpu_memory_gb >= begins_at(row["from_gb"]))
    batch = batch_size or fitting_batch(row, num_processes)
    accumulation = nearest_accumulation(batch, num_processes, row["effective"])
    roomy = is_roomy(gpu_memory_gb)

    engine = "torchrun"
    if num_processes == 1:
        engine = "python"
    elif deepspeed:
        engine = "deepspeed"

    precision = "no"
    if on_gpu:
        precision = "bf16" if (compute or 0) >= 8 else "fp16"

    # Two cores are left to the training processes themselves.
    workers = 3 * (processes_per_node or num_processes)
    workers = max(1, min(workers, cores - 2))

    prefetch = 2
    if ram_gb > 64:
        prefetch = 4
    elif ram_gb > 32:
        prefetch = 3

    return {
        "batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulation,
        "effective_batch_size": batch * num_processes * accumulation,
        "dataloader_num_workers": workers,
        "prefetch_factor": prefetch,
        "mixed_precision": precision,
        "gradient_checkpointing": on_gpu and not roomy,
        "zero_stage": row["zero_stage"] if engine == "deepspeed" else 0,
        "offload_optimizer": engine == "deepspeed" and not roomy,
        "engine": engine,
    }


def settings_on(facts: dict, processes_per_node: int, nodes: int = 1, deepspeed: bool = True, **options) -> dict:
    """settings_for on `nodes` machines like that of detect_hardware's facts; deepspeed False: not even if installed."""
    gpus = facts["gpus"]
    return settings_for(
        num_processes=processes_per_node * nodes,
        gpu_memory_gb=min((gpu["memory_total_gb"] for gpu in gpus), default=None),
        compute=min((gpu["compute"] for gpu in gpus), default=None),
        cores=facts["cpu_cores"],
        ram_gb=facts["ram_available_gb"],
        deepspeed=deepspeed and facts["deepspeed_installed"],
        processes_per_node=processes_per_node,
        **options,
    )


# --- how it is told ---------------------------------------------------------------------------------------------------


def report(facts: dict, settings: dict) -> str:
    """The guide's report of facts and settings, and where the optimizer is."""
    lines = ["=" * 70, "HARDWARE DETECTION RESULTS", "=" * 70]
    lines += _report_gpus(facts["gpus"])

    lines += _heading("CPU, MEMORY, DISK")
    lines.append(_row("CPU cores", facts["cpu_cores"]))
    lines.append(_row("RAM available", f"{facts['ram_available_gb']:.1f} GB"))
    if facts["disk_free_gb"] is not None:
        lines.append(_row("Disk free here", f"{facts['disk_free_gb']:.1f} GB"))

    lines += _report_settings(settings, bool(facts["gpus"]))
    if facts["notes"]:
        lines.append("")
        lines += [f"  Note: {note}" for note in facts["notes"]]
    lines.append("=" * 70)
    return "\n".join(lines)


def _heading(title: str) -> list[str]:
    return ["", title.center(70).rstrip(), "-" * 70]


def _row(label: str, value) -> str:
    return f"  {label + ':':<22} {value}"


def _enabled(value: bool) -> str:
    return "Enabled" if value else "Disabled"


def _report_gpus(gpus: list[dict]) -> list[str]:
    """The report's lines about the GPUs, together and each."""
    lines = _heading("GPU CONFIGURATION")
    if not gpus:
        return [*lines, _row("Number of GPUs", "none; CPU only")]

    totals = [gpu["memory_total_gb"] for gpu in gpus]
    lines.append(_row("Number of GPUs", len(gpus)))
    lines.append(_row("Total GPU Memory", f"{sum(totals):.1f} GB"))
    lines.append(_row("Min GPU Memory", f"{min(totals):.1f} GB"))
    for index, gpu in enumerate(gpus):
        free = "unknown"
        if gpu["memory_free_gb"] is not None:
            free = f"{gpu['memory_free_gb']:.1f} GB"
        lines.append("")
        lines.append(f"  GPU {index}: {gpu['name']}")
        lines.append(f"       Memory: {gpu['memory_total_gb']:.1f} GB (Free: {free})")
        lines.append(f"       Compute: {gpu['compute']}")
    return lines


def _report_settings(settings: dict, on_gpu: bool) -> list[str]:
    """The report's lines about the settings."""
    precision = "Mixed precision"
    if on_gpu:
        precision += f" ({settings['mixed_precision'].upper()})"

    return [
        *_heading("OPTIMAL TRAINING SETTINGS"),
        _row("Batch size per GPU" if on_gpu else "Batch per process", settings["batch_size_per_gpu"]),
        _row("Gradient accumulation", settings["gradient_accumulation_steps"]),
        _row("Effective batch size", settings["effective_batch_size"]),
        _row("DataLoader workers", settings["dataloader_num_workers"]),
        _row(precision, _enabled(on_gpu)),
        _row("Gradient checkpointing", _enabled(settings["gradient_checkpointing"])),
        _row("DeepSpeed ZeRO stage", settings["zero_stage"] or "none"),
        _row("Optimizer on the CPU", _enabled(settings["offload_optimizer"])),
        _row("Prefetch factor", settings["prefetch_factor"]),
        _row("Engine", settings["engine"]),
    ]


def summary(facts: dict, settings: dict) -> list[str]:
    """What the launcher prints: one line of facts, the notes, one line of settings."""
    gpus = "no GPU"
    if facts["gpus"]:
        cards = sorted({f"{gpu['name']}, {gpu['memory_total_gb']:.1f} GB" for gpu in facts["gpus"]})
        plural = "s" if len(facts["gpus"]) > 1 else ""
        gpus = f"{facts['gpu_count']} GPU{plural} ({'; '.join(cards)})"

    batch = settings["batch_size_per_gpu"]
    accumulation = settings["gradient_accumulation_steps"]
    effective = settings["effective_batch_size"]
    processes = effective // (batch * accumulation)

    parts = [f"batch {batch} x accumulation {accumulation} x {processes} processes = {effective}"]
    parts.append(f"{settings['dataloader_num_workers']} loading workers")
    if settings["gradient_checkpointing"]:
        parts.append("recomputed activations")
    if settings["offload_optimizer"]:
        parts.append("optimizer on the CPU")
    parts.append(f"precision {settings['mixed_precision']} (where no flag says otherwise)")

    machine = f"{gpus}, {facts['cpu_cores']} CPU cores, {facts['ram_available_gb']:.1f} GB RAM available"
    notes = [f"Note:     {note}" for note in facts["notes"]]
    return [f"Detected: {machine}", *notes, f"Settings: {', '.join(parts)}"]


def shell_assignments(facts: dict) -> str:
    """Lines `name=value` for a shell, quoted so that nothing in a value is run or replaced there."""
    *detected, settings = facts["summary"]
    values = {
        "gpu_count": facts["gpu_count"],
        "cpu_cores": facts["cpu_cores"],
        "processes_per_node": facts["processes_per_node"],
        "engine": facts["settings"]["engine"],
        "deepspeed_installed": str(facts["deepspeed_installed"]).lower(),
        "detected": "\n".join(detected),
        "settings": settings,
    }
    return "\n".join(f"{name}={shlex.quote(str(value))}" for name, value in values.items())


def main(argv: list[str] | None = None) -> None:
    """Print the report, or with --json or --shell the facts with the settings for programs."""
    parser = Parser(prog="hardware_utils", description="What this machine has, and the settings that follow.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object instead of the report")
    form.add_argument("--shell", action="store_true", help="shell assignments instead of the report")

    add = parser.add_argument
    add("--gpus", type=whole(1), help="processes per node to plan for; default one per GPU, or one without GPUs")
    add("--nodes", type=whole(1), default=1, help="machines like this one")
    add("--no_deepspeed", action="store_true", help="DDP even if DeepSpeed is installed")
    add("--plan", action="store_true", help="for the hardware given by --gpus and these, not for this machine's")
    planned = [
        add("--gpu_memory", type=number(0, above=True), help="with --plan: GB per GPU; left out: CPU processes"),
        add("--compute", type=number(0), help="with --plan: compute capability, left out: 8.0"),
        add("--cores", type=whole(1), help="with --plan: CPU cores per node; left out: enough"),
        add("--ram", type=number(0), help="with --plan: available GB per node; left out: 128"),
    ]
    args = parser.parse_args(argv)

    # Either the machine that was described, or this one.
    if args.plan:
        if args.gpus is None:
            parser.error("--plan needs --gpus")
        compute = 8.0 if args.compute is None else args.compute
        ram = 128 if args.ram is None else args.ram
        facts = imagine_hardware(args.gpus, args.gpu_memory, compute, args.cores, ram)
    else:
        for action in planned:
            if getattr(args, action.dest) is not None:
                parser.error(f"{action.option_strings[0]} goes with --plan only")
        facts = detect_hardware()

    # The settings follow from the facts.
    processes = args.gpus or facts["gpu_count"] or 1
    settings = settings_on(facts, processes, args.nodes, not args.no_deepspeed)
    facts["processes_per_node"] = processes
    facts["summary"] = summary(facts, settings)
    facts["settings"] = settings

    if args.json:
        print(json.dumps(facts, indent=2))
    elif args.shell:
        print(shell_assignments(facts))
    else:
        print(report(facts, settings))


if __name__ == "__main__":
    main()
