"""What this machine has, the settings that follow, numeric precision, and what running out of memory looks like.

python -m hardware_utils                                   the report
python -m hardware_utils --json                            the same for programs
python -m hardware_utils --shell                           what launch_distributed_training.sh needs of it
python -m hardware_utils --plan --gpus 4 --gpu_memory 24   the settings for a machine one does not have
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

from cli_utils import InputError, Parser, number, whole


def choose_precision(wanted: str, device: torch.device) -> tuple[str, str]:
    """(precision, why) for --mixed_precision: `auto` is bf16 from compute capability 8.0, fp16 below, fp32 on CPU.

    Raises InputError for fp16 on CPU, which would silently train in fp32 without a scaler.
    """
    if device.type == "cpu":
        if wanted == "fp16":
            raise InputError("--mixed_precision fp16: needs a GPU; use no or bf16")
        return ("no", "fp32 on CPU") if wanted == "auto" else (wanted, "as asked")
    major, minor = torch.cuda.get_device_capability(device)
    if wanted == "bf16" and major < 8:
        raise InputError(f"--mixed_precision bf16: this GPU (compute capability {major}.{minor}) has none; use fp16")
    automatic = "bf16" if major >= 8 else "fp16"
    return (automatic, f"compute capability {major}.{minor}") if wanted == "auto" else (wanted, "as asked")


def set_numerics(device: torch.device, precision: str, why: str, deterministic: bool) -> str:
    """What --mixed_precision `no` and --deterministic ask of torch; once, before the model is built.

    Returns `why` with what holds now, for the banner. The environment's part is cli_utils.ask_for_fixed_order.
    """
    holds = [why]
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
        # the gradients of flash and memory-efficient attention have a fixed order then, those of cuDNN's do not
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
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return torch.nn.functional.group_norm(x, self.num_groups, weight, bias, self.eps)


def peak_memory_gb(device: torch.device) -> float:
    """Most memory this process has held, GiB: of the GPU, or resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    if os.name == "posix":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    import psutil

    return psutil.Process().memory_info().peak_wset / 2**30


# CUDA's and torch's own words (AcceleratorError, NCCL's `Cuda failure 2 'out of memory'`, the driver's); cuBLAS, cuDNN,
# cuSOLVER and cuFFT; the host's allocators, C++'s, NumPy's (whose class a loading process loses), and oneDNN's when it
# is refused memory for the code it writes
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
# the limit on locked memory (ulimit -l), which no smaller batch helps
LOCKED_MEMORY = re.compile(r"ibv_\w+.{0,20} failed", re.IGNORECASE)


def out_of_memory(error: BaseException) -> bool:
    """Whether this is the GPU's or the host's allocator giving up, under any of the names that libraries give it."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if LOCKED_MEMORY.search(text):
        return False
    return bool(OUT_OF_MEMORY.search(text) or PROBABLY_OUT_OF_MEMORY.search(text))


def split_batch(batch_size: int, accumulation: int) -> tuple[int, int]:
    """The next smaller batch, and the accumulation that keeps the effective one: (8, 1) -> (4, 2), (3, 1) -> (1, 3)."""
    factor = next((n for n in range(2, batch_size + 1) if batch_size % n == 0), 1)
    return batch_size // factor, accumulation * factor


def smaller_batch(batch_size: int, accumulation: int, most: int) -> tuple[int, int]:
    """split_batch until the batch is at most `most`."""
    while batch_size > max(1, most):
        batch_size, accumulation = split_batch(batch_size, accumulation)
    return batch_size, accumulation


# --- what this machine has --------------------------------------------------------------------------------------------


def _cgroups(controller: str, root: Path) -> list[Path]:
    """Folders of this process's control groups (v1 and v2) and of those above them, whose limits hold as well."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    folders = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if names else "")
        own = top / path.strip("/")  # in a container the path may be the host's; then only `top` is there
        folders += [own, *(folder for folder in own.parents if folder.is_relative_to(top))]
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
        v1 = _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        quota = _numbers(folder / "cpu.max") or v1
        if len(quota) == 2 and quota[0] > 0:  # -1: no limit
            cores = min(cores, quota[0] // quota[1])
    return max(1, cores)


def core_numbers() -> set[int]:
    """The cores of usable_cores' affinity; the same set of all on systems without affinities."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def available_ram_gb(root: Path = Path("/")) -> float:
    """Memory that can be taken without swapping, GiB: the host's, or what the container's limit leaves of it."""
    free = psutil.virtual_memory().available
    for folder in _cgroups("memory", root):
        limit = _numbers(folder / "memory.max") or _numbers(folder / "memory.limit_in_bytes")
        used = _numbers(folder / "memory.current") or _numbers(folder / "memory.usage_in_bytes")
        if limit and used:
            try:  # cached files count as used, but are given back when memory runs short
                words = (folder / "memory.stat").read_text().split()
            except OSError:
                words = []
            cached = dict(zip(words[::2], words[1::2], strict=False))
            used[0] -= int(cached.get("total_inactive_file", cached.get("inactive_file", 0)))
            free = min(free, limit[0] - used[0])
    return max(0.0, free / 2**30)


def _nvidia_smi() -> dict[str, float | None]:
    """{UUID: free GiB} of every GPU that the driver lists, whether torch may use it or not."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    listed = {}
    for line in text.splitlines():
        uuid, _, free = line.partition(",")
        listed[uuid.strip().removeprefix("GPU-")] = int(free) / 1024 if free.strip().isdigit() else None  # or [N/A]
    return listed


def cuda_starts() -> bool:
    """Whether torch can use a GPU. It counts GPUs by asking the driver, also where CUDA then fails to start."""
    with warnings.catch_warnings():
        # torch's reason, in several lines; startup_utils.check_gpus gives it in one
        warnings.filterwarnings("ignore", message="CUDA initialization")
        return torch.cuda.is_available()


def detect_gpus() -> tuple[list[dict], list[str]]:
    """(GPUs that this torch can use, notes on those that it cannot).

    torch decides, since it is what trains; it knows every form of CUDA_VISIBLE_DEVICES. Free memory is nvidia-smi's:
    torch would have to take several hundred MB on each GPU to tell.
    """
    listed, gpus, notes = _nvidia_smi(), [], []
    for index in range(torch.cuda.device_count() if cuda_starts() else 0):
        card = torch.cuda.get_device_properties(index)
        free = listed.get(str(card.uuid).removeprefix("GPU-"))
        gpu = {"name": card.name, "memory_total_gb": round(card.total_memory / 2**30, 2)}
        gpus.append(gpu | {"memory_free_gb": free and round(free, 2), "compute": float(f"{card.major}.{card.minor}")})
    if len({gpu["name"] for gpu in gpus}) > 1:
        notes.append("the GPUs differ: settings follow the smallest, and the slowest sets the pace")
    if len(gpus) < len(listed):
        count, visible = len(listed), os.environ.get("CUDA_VISIBLE_DEVICES")
        if torch.version.cuda is None:
            why = f"but this torch ({torch.__version__}) is built without CUDA; install a CUDA build to use them"
        elif visible is not None:
            why = f"of which CUDA_VISIBLE_DEVICES='{visible}' leaves {len(gpus)}"
        else:
            why = f"but torch sees {len(gpus)}; is the driver new enough for CUDA {torch.version.cuda}?"
        notes.append(f"nvidia-smi lists {count} GPU{'s' * (count > 1)}, {why}")
    return gpus, notes


def detect_hardware() -> dict:
    """Facts about this machine, as --json prints them (memory and disk in GiB)."""
    gpus, notes = detect_gpus()
    return {
        "gpu_count": len(gpus),
        "gpus": gpus,
        "cpu_cores": usable_cores(),
        "ram_available_gb": round(available_ram_gb(), 1),
        "disk_free_gb": round(shutil.disk_usage(".").free / 2**30, 1),
        "deepspeed_installed": importlib.util.find_spec("deepspeed") is not None,  # importing it takes seconds
        "notes": notes,
    }


def imagine_hardware(
    gpus: int, gpu_memory_gb: float | None, compute: float = 8.0, cores: int | None = None, ram_gb: float = 128,
    deepspeed: bool = True,
) -> dict:  # fmt: skip
    """detect_hardware's facts for a machine one does not have; without gpu_memory_gb one without GPUs."""
    gpu = {"name": "planned GPU", "memory_total_gb": gpu_memory_gb, "memory_free_gb": gpu_memory_gb, "compute": compute}
    cards = [dict(gpu) for _ in range(gpus)] if gpu_memory_gb else []
    facts = {"gpu_count": len(cards), "gpus": cards, "cpu_cores": cores or 3 * gpus + 2, "ram_available_gb": ram_gb}
    return facts | {"disk_free_gb": None, "deepspeed_installed": deepspeed, "notes": ["planned, not detected"]}


# --- the settings that follow -----------------------------------------------------------------------------------------

# GPU memory in GB as sold; effective batch as it comes out on 4 GPUs, kept for any number of them. From 20 GB down this
# is the guide's table. Above it: a traced step of guide 1 in bf16 takes 5.7 GiB at batch 16, and as many kernels
# are launched as at any other batch, so a larger one spreads them over more samples.
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
    """Micro-batches a step, at least 1, that come nearest to the effective batch; a half upwards."""
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
    row = next(row for row in GPU_TABLE if gpu_memory_gb >= begins_at(row["from_gb"])) if on_gpu else CPU_ROW
    batch = batch_size or fitting_batch(row, num_processes)
    accumulation = nearest_accumulation(batch, num_processes, row["effective"])
    roomy = is_roomy(gpu_memory_gb)
    engine = "python" if num_processes == 1 else "deepspeed" if deepspeed else "torchrun"
    return {
        "batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulation,
        "effective_batch_size": batch * num_processes * accumulation,
        "dataloader_num_workers": max(1, min(3 * (processes_per_node or num_processes), cores - 2)),
        "prefetch_factor": 4 if ram_gb > 64 else 3 if ram_gb > 32 else 2,
        "mixed_precision": "no" if not on_gpu else "bf16" if (compute or 0) >= 8 else "fp16",
        "gradient_checkpointing": on_gpu and not roomy,
        "zero_stage": row["zero_stage"] if engine == "deepspeed" else 0,
        "offload_optimizer": engine == "deepspeed" and not roomy,
        "engine": engine,
    }


def settings_on(facts: dict, processes_per_node: int, nodes: int = 1, deepspeed: bool = True, **options) -> dict:
    """settings_for on `nodes` machines like that of detect_hardware's facts; deepspeed False: not even if installed."""
    memory = min((gpu["memory_total_gb"] for gpu in facts["gpus"]), default=None)
    compute = min((gpu["compute"] for gpu in facts["gpus"]), default=None)
    machine = (
        memory,
        compute,
        facts["cpu_cores"],
        facts["ram_available_gb"],
        deepspeed and facts["deepspeed_installed"],
    )
    return settings_for(processes_per_node * nodes, *machine, processes_per_node=processes_per_node, **options)


def report(facts: dict, settings: dict) -> str:
    """The guide's report of facts and settings, and where the optimizer is."""
    gpus, precision = facts["gpus"], settings["mixed_precision"]

    def line(label: str, value) -> str:
        return f"  {label + ':':<22} {value}"

    def heading(text: str) -> list[str]:
        return ["", text.center(70).rstrip(), "-" * 70]

    lines = ["=" * 70, "HARDWARE DETECTION RESULTS", "=" * 70, *heading("GPU CONFIGURATION")]
    lines.append(line("Number of GPUs", len(gpus) or "none; CPU only"))
    if gpus:
        totals = [gpu["memory_total_gb"] for gpu in gpus]
        lines += [line("Total GPU Memory", f"{sum(totals):.1f} GB"), line("Min GPU Memory", f"{min(totals):.1f} GB")]
    for index, gpu in enumerate(gpus):
        free = "unknown" if gpu["memory_free_gb"] is None else f"{gpu['memory_free_gb']:.1f} GB"
        lines += ["", f"  GPU {index}: {gpu['name']}", f"       Memory: {gpu['memory_total_gb']:.1f} GB (Free: {free})"]
        lines.append(f"       Compute: {gpu['compute']}")
    lines += [*heading("CPU, MEMORY, DISK"), line("CPU cores", facts["cpu_cores"])]
    lines.append(line("RAM available", f"{facts['ram_available_gb']:.1f} GB"))
    if facts["disk_free_gb"] is not None:
        lines.append(line("Disk free here", f"{facts['disk_free_gb']:.1f} GB"))
    lines += [
        *heading("OPTIMAL TRAINING SETTINGS"),
        line("Batch size per GPU" if gpus else "Batch per process", settings["batch_size_per_gpu"]),
        line("Gradient accumulation", settings["gradient_accumulation_steps"]),
        line("Effective batch size", settings["effective_batch_size"]),
        line("DataLoader workers", settings["dataloader_num_workers"]),
        line("Mixed precision" + f" ({precision.upper()})" * bool(gpus), "Enabled" if gpus else "Disabled"),
        line("Gradient checkpointing", "Enabled" if settings["gradient_checkpointing"] else "Disabled"),
        line("DeepSpeed ZeRO stage", settings["zero_stage"] or "none"),
        line("Optimizer on the CPU", "Enabled" if settings["offload_optimizer"] else "Disabled"),
        line("Prefetch factor", settings["prefetch_factor"]),
        line("Engine", settings["engine"]),
        *([""] + [f"  Note: {note}" for note in facts["notes"]] if facts["notes"] else []),
    ]
    return "\n".join([*lines, "=" * 70])


def summary(facts: dict, settings: dict) -> list[str]:
    """What the launcher prints: one line of facts, the notes, one line of settings."""
    cards = sorted({f"{gpu['name']}, {gpu['memory_total_gb']:.1f} GB" for gpu in facts["gpus"]})
    gpus = f"{facts['gpu_count']} GPU{'s' * (len(facts['gpus']) > 1)} ({'; '.join(cards)})" if cards else "no GPU"
    batch, accumulation, effective, workers, _, precision, *_ = settings.values()
    extras = " recomputed activations," * settings["gradient_checkpointing"]
    extras += " optimizer on the CPU," * settings["offload_optimizer"]
    return [
        f"Detected: {gpus}, {facts['cpu_cores']} CPU cores, {facts['ram_available_gb']:.1f} GB RAM available",
        *(f"Note:     {note}" for note in facts["notes"]),
        f"Settings: batch {batch} x accumulation {accumulation} x {effective // (batch * accumulation)} processes ="
        f" {effective}, {workers} loading workers,{extras} precision {precision} (where no flag says otherwise)",
    ]


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
    if args.plan:
        if args.gpus is None:
            parser.error("--plan needs --gpus")
        compute, ram = (
            default if value is None else value for value, default in ((args.compute, 8.0), (args.ram, 128))
        )
        facts = imagine_hardware(args.gpus, args.gpu_memory, compute, args.cores, ram)
    else:
        if given := [action.option_strings[0] for action in planned if getattr(args, action.dest) is not None]:
            parser.error(f"{given[0]} goes with --plan only")
        facts = detect_hardware()
    processes = args.gpus or facts["gpu_count"] or 1
    settings = settings_on(facts, processes, args.nodes, not args.no_deepspeed)
    facts |= {"processes_per_node": processes, "summary": summary(facts, settings), "settings": settings}
    if args.json:
        print(json.dumps(facts, indent=2))
    elif args.shell:
        print(shell_assignments(facts))
    else:
        print(report(facts, settings))


if __name__ == "__main__":
    main()
