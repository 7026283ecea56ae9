"""What this machine has, numeric precision, and what running out of memory looks like."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import psutil
import torch

from old.cli_utils import InputError

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
