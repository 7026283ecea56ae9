"""Precision, determinism, peak memory and CPU cores.

`python -m hardware_utils` reports this machine's hardware and suggests settings.
"""

if __name__ == "__main__":
    import runpy

    runpy.run_module("utils.hardware_utils", run_name="__main__")
    raise SystemExit

import contextlib
import ctypes
import os
import re
import sys

import joblib
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.cli import InputError

GIB = 2**30


def usable_cores() -> int:
    """Return the number of CPU cores allowed by this process's CPU affinity and its container's CPU quota."""
    return joblib.cpu_count()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse, which saves up to 10 % of the training time on a CPU."""
    with contextlib.suppress(AttributeError, TypeError):
        # -3 is M_MMAP_THRESHOLD, at most 32 MiB; -1 is M_TRIM_THRESHOLD
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 * 2**20)
        mallopt(-1, 2**31 - 1)


def choose_precision(wanted: str, device: torch.device) -> tuple[str, str]:
    """Return (precision, reason) for a value of --mixed_precision; precision is "no", "bf16" or "fp16".

    Raises InputError if the device does not support the precision.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if wanted == "auto" and launched in ("bf16", "fp16"):
        if device.type == "cpu":
            return "no", f"accelerate's {launched} is for GPUs"
        wanted = launched
    if device.type == "cpu":
        if wanted == "fp16":
            raise InputError("--mixed_precision fp16: needs a GPU; use no or bf16")
        return ("no", "fp32 on CPU") if wanted == "auto" else (wanted, "as asked")
    major, minor = torch.cuda.get_device_capability(device)
    capability = f"compute capability {major}.{minor}"
    if wanted == "bf16" and major < 8:
        raise InputError(f"--mixed_precision bf16: this GPU ({capability}) does not support it; use fp16")
    return ("bf16" if major >= 8 else "fp16", capability) if wanted == "auto" else (wanted, "as asked")


def set_precision(
    wanted: str, device: torch.device, deterministic: bool, convolves_3d: bool = False
) -> tuple[str, str]:
    """Choose the precision and configure torch for it and for --deterministic; return (precision, banner text).

    Raises InputError for an unsupported precision. convolves_3d: whether the model contains 3D convolutions.
    """
    precision, reason = choose_precision(wanted, device)
    if convolves_3d and precision == "bf16" and device.type == "cpu":
        raise InputError("--mixed_precision bf16: torch's 3D convolutions compute wrong gradients on a CPU; use no")
    remarks = []
    # --deterministic turns the benchmark off, because cuDNN's choice of algorithm can differ between runs.
    torch.backends.cudnn.benchmark = not deterministic
    if device.type == "cuda" and precision == "no":
        # torch.compile fails with the newer settings that replace allow_tf32.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        remarks.append("TF32 off")
    if deterministic:
        # Parser.parse() sets CUBLAS_WORKSPACE_CONFIG, which deterministic cuBLAS also needs.
        if device.type == "cuda":
            torch.use_deterministic_algorithms(True)
        else:
            # same effect as use_deterministic_algorithms(True), without its slow import of torch.compile
            torch.set_deterministic_debug_mode("error")
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.deterministic = True
        # cuDNN's attention kernel sums gradients in no fixed order.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if device.type == "cpu":
            # Results on a CPU depend on the number of threads.
            torch.set_num_threads(1)
        remarks.append("deterministic")
    return precision, f"{precision} ({reason}) {'; '.join(remarks)}".strip()


def check_accelerate(accumulation: int) -> None:
    """Raise InputError if `accelerate launch` or its config file has settings that this project does not support."""
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise InputError(f"accelerate config: {name} is not supported here; choose multi-GPU, or give --multi_gpu")
    launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if launched not in ("1", "auto", str(accumulation)):
        advice = f"give --gradient_accumulation_steps {launched} to the script, after its name"
        raise InputError(f"accelerate launch --gradient_accumulation_steps {launched}: not read; {advice}")


def autocast(device: torch.device, precision: str) -> torch.autocast:
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, half, enabled=precision != "no")


class GroupNorm(nn.GroupNorm):
    """Group normalization in the precision of its input; torch's would return larger fp32 tensors under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def peak_memory_gb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    if os.name == "nt":
        import psutil

        return psutil.Process().memory_info().peak_wset / GIB
    import resource

    # Linux reports ru_maxrss in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (GIB if sys.platform == "darwin" else 2**20)


# Matches the out-of-memory messages of CUDA, NCCL, cuBLAS, cuDNN, torch, oneDNN, C++ and NumPy.
OUT_OF_MEMORY = re.compile(
    r"out of memory|_ALLOC_FAILED|ALLOCATION_FAILED|cublasCreate|Failed to CUDA \w*alloc|nable to find an engine"
    r"|nable to find a valid cuDNN|can't allocate memory|not enough memory|could not create a (primitive|memory object)"
    r"|bad.alloc|Unable to allocate .* for an array"
)


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))
