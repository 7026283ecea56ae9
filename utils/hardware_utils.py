"""Report this machine's hardware and suggest training settings according to the published MIMIC-CXR guide.

python -m utils.hardware_utils
"""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import torch

from hardware_utils import GIB, usable_cores
from utils.cli import Parser, whole


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _numbers(path: Path) -> list[int]:
    """Return the integers in a cgroup file, without -1 and `max`, which mean no limit."""
    return [int(word) for word in _read(path).split() if word.isdigit()]


def _memory_groups(root: Path) -> list[Path]:
    """Return the folders of this process's memory cgroups (v1 and v2) and of their parents, whose limits also apply."""
    folders = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers:
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            # in a container, /proc/self/cgroup may give the host's path, which does not exist here; only the mount
            # point `top` does
            own = top / path.strip("/")
            folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return folders


def available_ram_gb(root: Path = Path("/")) -> float:
    import psutil

    free = psutil.virtual_memory().available
    for folder in _memory_groups(root):
        limit = _numbers(folder / "memory.max") or _numbers(folder / "memory.limit_in_bytes")
        used = _numbers(folder / "memory.current") or _numbers(folder / "memory.usage_in_bytes")
        if limit and used:
            # the page cache counts as used memory, but the kernel evicts it when memory runs short
            cached = re.findall(r"inactive_file (\d+)", _read(folder / "memory.stat"))
            free = min(free, limit[0] - used[0] + max(map(int, cached), default=0))
    return max(0.0, free / GIB)


def detect_gpus() -> tuple[list[dict], list[str]]:
    """Return the GPUs that torch can use, with memory in GiB, and notes for the user."""
    # asking torch for the free memory would allocate a CUDA context on each GPU
    query = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        answer = ""
    # lines of the form "GPU-<uuid>, <free MiB or [N/A]>", including GPUs hidden from torch
    listed = dict(re.findall(r"^GPU-(\S+), (.+)$", answer, re.MULTILINE))

    gpus = []
    # torch.cuda.device_count() can be above 0 even if CUDA fails to initialize
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        # some torch versions omit "GPU-" from the UUID
        free = listed.get(str(card.uuid).removeprefix("GPU-"), "")
        gpu = {
            "name": card.name,
            "memory_total_gb": round(card.total_memory / GIB, 2),
            "memory_free_gb": round(int(free) / 1024, 2) if free.isdigit() else None,
            "compute": float(f"{card.major}.{card.minor}"),
        }
        gpus.append(gpu)

    notes = []
    if len({gpu["name"] for gpu in gpus}) > 1:
        notes.append("the GPUs differ: settings follow the smallest, and the slowest sets the pace")
    if len(gpus) < len(listed):
        reason = f"is the driver new enough for CUDA {torch.version.cuda}?"
        if torch.version.cuda is None:
            reason = f"torch {torch.__version__} is built without CUDA"
        elif "CUDA_VISIBLE_DEVICES" in os.environ:
            reason = f"CUDA_VISIBLE_DEVICES='{os.environ['CUDA_VISIBLE_DEVICES']}'"
        notes.append(f"torch can use {len(gpus)} of the {len(listed)} GPUs that nvidia-smi lists: {reason}")
    return gpus, notes


def detect_hardware() -> dict:
    gpus, notes = detect_gpus()
    return {
        "gpus": gpus,
        "cpu_cores": usable_cores(),
        "ram_available_gb": round(available_ram_gb(), 1),
        # importing deepspeed would take seconds
        "deepspeed_installed": importlib.util.find_spec("deepspeed") is not None,
        "notes": notes,
    }


# (nominal GPU memory in GB, batch size per GPU, target global batch size); rows above 20 GB are not in the MIMIC-CXR
# guide
GPU_TABLE = (
    (141, 128, 256),
    (80, 64, 256),
    (40, 32, 256),
    (20, 16, 256),
    (14, 12, 240),
    (10, 8, 256),
    (6, 4, 256),
    (0, 2, 256),
)


def settings_for(
    num_processes: int,
    gpu_memory_gb: float | None,
    compute: float | None,
    cores: int,
    ram_gb: float,
    deepspeed: bool,
    batch_size: int | None = None,
    processes_per_node: int | None = None,
) -> dict:
    """Return training settings according to the published MIMIC-CXR guide.

    num_processes: total over all nodes. gpu_memory_gb (GiB), compute: minimum memory and compute capability over all
    GPUs; both are None without GPUs. cores, ram_gb (GiB): per node. batch_size: batch size per GPU, if already fixed.
    In the result, dataloader_num_workers is the total per node.
    """
    on_gpu = gpu_memory_gb is not None
    largest_batch, global_batch = 8, 256
    if on_gpu:
        # the driver and ECC reserve up to 0.7 GiB or 3 % of the nominal memory, whichever is more
        rows = (row for row in GPU_TABLE if gpu_memory_gb >= row[0] - max(0.7, 0.03 * row[0]))
        _, largest_batch, global_batch = next(rows)
    # GPUs of 14 GB or more need neither activation checkpointing nor optimizer offloading
    fits_everything = largest_batch >= 12

    def accumulation(batch: int) -> int:
        return max(1, int(global_batch / (batch * num_processes) + 0.5))

    # above the guide's maximum of 16 per GPU, choose only batch sizes that leave the global batch size unchanged
    smallest = min(largest_batch, 16)
    per_gpu = smallest * accumulation(smallest)
    batch = batch_size or max(size for size in range(smallest, largest_batch + 1) if per_gpu % size == 0)

    engine = "python" if num_processes == 1 else "deepspeed" if deepspeed else "torchrun"
    precision = "bf16" if (compute or 0) >= 8 else "fp16"
    return {
        "batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulation(batch),
        "effective_batch_size": batch * num_processes * accumulation(batch),
        # leave two CPU cores for the training processes
        "dataloader_num_workers": max(1, min(3 * (processes_per_node or num_processes), cores - 2)),
        "prefetch_factor": 2 + (ram_gb > 32) + (ram_gb > 64),
        "mixed_precision": precision if on_gpu else "no",
        "gradient_checkpointing": on_gpu and not fits_everything,
        "zero_stage": 0 if engine != "deepspeed" else 3 if largest_batch == 2 else 2,
        "offload_optimizer": engine == "deepspeed" and not fits_everything,
        "engine": engine,
    }


def report(hardware: dict, settings: dict) -> str:
    """Format the report like the output in the published MIMIC-CXR guide."""

    def heading(title: str) -> list[str]:
        return ["", title.center(70).rstrip(), "-" * 70]

    def row(label: str, value) -> str:
        return f"  {label + ':':<22} {value}"

    gpus = hardware["gpus"]
    lines = ["=" * 70, "HARDWARE DETECTION RESULTS", "=" * 70, *heading("GPU CONFIGURATION")]
    lines.append(row("Number of GPUs", len(gpus) or "none; CPU only"))
    if gpus:
        totals = [gpu["memory_total_gb"] for gpu in gpus]
        lines.append(row("Total GPU Memory", f"{sum(totals):.1f} GB"))
        lines.append(row("Min GPU Memory", f"{min(totals):.1f} GB"))
    for index, gpu in enumerate(gpus):
        free = gpu["memory_free_gb"]
        free = "unknown" if free is None else f"{free:.1f} GB"
        lines += ["", f"  GPU {index}: {gpu['name']}"]
        lines.append(f"       Memory: {gpu['memory_total_gb']:.1f} GB (Free: {free})")
        lines.append(f"       Compute: {gpu['compute']}")
    lines += heading("CPU AND MEMORY")
    lines.append(row("CPU cores", hardware["cpu_cores"]))
    lines.append(row("RAM available", f"{hardware['ram_available_gb']:.1f} GB"))
    lines += [f"  Note: {note}" for note in hardware["notes"]]

    switch = ("Disabled", "Enabled")
    precision = settings["mixed_precision"]
    rows = {
        "Batch size per GPU" if gpus else "Batch per process": settings["batch_size_per_gpu"],
        "Gradient accumulation": settings["gradient_accumulation_steps"],
        "Effective batch size": settings["effective_batch_size"],
        "DataLoader workers": settings["dataloader_num_workers"],
        f"Mixed precision ({precision.upper()})" if gpus else "Mixed precision": switch[precision != "no"],
        "Gradient checkpointing": switch[settings["gradient_checkpointing"]],
        "DeepSpeed ZeRO stage": settings["zero_stage"] or "none",
        "Optimizer on the CPU": switch[settings["offload_optimizer"]],
        "Prefetch factor": settings["prefetch_factor"],
        "Engine": settings["engine"],
    }
    lines += [*heading("OPTIMAL TRAINING SETTINGS"), *(row(*item) for item in rows.items()), "=" * 70]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--gpus", type=whole(1), help="processes per node; default: one per GPU, or one without GPUs")
    add("--nodes", type=whole(1), default=1, help="number of machines like this one")
    add("--no_deepspeed", action="store_true", help="use DDP even if DeepSpeed is installed")
    args = parser.parse(argv)

    hardware = detect_hardware()
    processes = args.gpus or len(hardware["gpus"]) or 1
    settings = settings_for(
        num_processes=processes * args.nodes,
        gpu_memory_gb=min((gpu["memory_total_gb"] for gpu in hardware["gpus"]), default=None),
        compute=min((gpu["compute"] for gpu in hardware["gpus"]), default=None),
        cores=hardware["cpu_cores"],
        ram_gb=hardware["ram_available_gb"],
        deepspeed=hardware["deepspeed_installed"] and not args.no_deepspeed,
        processes_per_node=processes,
    )
    print(report(hardware, settings))


if __name__ == "__main__":
    main()
