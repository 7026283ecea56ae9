"""What this machine can do: numeric precision, memory in use, and what running out of it looks like."""

import os
import sys

import torch

from cli_utils import InputError


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


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context for a forward pass in `no`, `bf16` or `fp16`."""
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, half, enabled=precision != "no")


def peak_memory_gb(device: torch.device) -> float:
    """Most memory this process has held, GiB: of the GPU, or resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    if os.name == "posix":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    import psutil

    return psutil.Process().memory_info().peak_wset / 2**30


def out_of_memory(error: BaseException) -> bool:
    """Whether this is the GPU's or the host's allocator giving up."""
    texts = ("can't allocate memory", "ALLOC_FAILED", "could not create a primitive")  # host, cuBLAS and cuDNN, oneDNN
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts)


def split_batch(batch_size: int, accumulation: int) -> tuple[int, int]:
    """The next smaller batch, and the accumulation that keeps the effective one: (8, 1) -> (4, 2), (3, 1) -> (1, 3)."""
    factor = next((n for n in range(2, batch_size + 1) if batch_size % n == 0), 1)
    return batch_size // factor, accumulation * factor
