"""Precision, determinism and memory of the device that a script runs on, and the cores that it may use.

`python -m hardware_utils` reports what this machine has: utils/hardware_utils.py.
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
    """CPU cores that this process may use: bounded by its affinity and its container's quota, unlike os.cpu_count()."""
    return joblib.cpu_count()


def keep_freed_memory() -> None:
    """For training on a CPU: make glibc reuse freed memory instead of returning it to the system.

    Otherwise each step has its large tensors' pages mapped anew, which takes up to a tenth of its time.
    """
    # other C libraries have no mallopt
    with contextlib.suppress(AttributeError, TypeError):
        # M_MMAP_THRESHOLD, 32 MiB at most, and M_TRIM_THRESHOLD
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 * 2**20)
        mallopt(-1, 2**31 - 1)


def choose_precision(wanted: str, device: torch.device) -> tuple[str, str]:
    """(precision, reason) for --mixed_precision: `auto` is bf16 from compute capability 8.0, fp16 below, fp32 on CPU.

    `accelerate launch --mixed_precision` counts where the flag says auto. Raises InputError for a precision that the
    device does not have.
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
    """Choose the precision and apply it and --deterministic to torch; (precision, what the banner says of it).

    convolves_3d: whether the model has 3D convolutions, whose gradients are wrong in bf16 on a CPU.
    """
    precision, reason = choose_precision(wanted, device)
    if convolves_3d and precision == "bf16" and device.type == "cpu":
        raise InputError("--mixed_precision bf16: torch's 3D convolutions compute wrong gradients on a CPU; use no")
    remark = set_numerics(device, precision, deterministic)
    return precision, f"{precision} ({reason}) {remark}".strip()


def check_accelerate(accumulation: int) -> None:
    """Raises InputError for what `accelerate launch` or its config file asks for and no script here reads."""
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise InputError(f"accelerate config: {name} is not supported here; choose multi-GPU, or give --multi_gpu")
    launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if launched not in ("1", "auto", str(accumulation)):
        advice = f"give --gradient_accumulation_steps {launched} to the script, after its name"
        raise InputError(f"accelerate launch --gradient_accumulation_steps {launched}: not read; {advice}")


def set_numerics(device: torch.device, precision: str, deterministic: bool) -> str:
    """Apply --mixed_precision no and --deterministic to torch; returns a remark for the banner, "" for none.

    The parser has set cuBLAS's workspace in the environment by then, which is read before anything runs on a GPU.
    """
    remarks = []
    # Inputs have a fixed size, so it pays to let cuDNN time its algorithms once. It may choose another one each time.
    torch.backends.cudnn.benchmark = not deterministic
    if device.type == "cuda" and precision == "no":
        # Ampere and later round the inputs of fp32 convolutions to 10 bits by default (TF32). torch.compile reads these
        # names of the settings and fails where the newer ones were set.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        remarks.append("TF32 off")
    if deterministic:
        if device.type == "cuda":
            torch.use_deterministic_algorithms(True)
        else:
            # the same, but for settings of torch.compile, whose import takes a second
            torch.set_deterministic_debug_mode("error")
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.deterministic = True
        # The gradients of cuDNN's attention have no fixed order, those of the flash and memory-efficient kernels do.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if device.type == "cpu":
            # The bits depend on the number of threads, which launchers derive from the number of processes.
            torch.set_num_threads(1)
        remarks.append("deterministic")
    return "; ".join(remarks)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context for a forward pass in `no`, `bf16` or `fp16`."""
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, half, enabled=precision != "no")


class GroupNorm(nn.GroupNorm):
    """GroupNorm in the precision of its input: autocast would raise it to fp32, which is most of a network's memory."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory of this process in GiB: on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    if os.name == "nt":
        import psutil

        return psutil.Process().memory_info().peak_wset / GIB
    import resource

    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (GIB if sys.platform == "darwin" else 2**20)


# In the words of CUDA and NCCL, of cuBLAS and cuDNN (which hide it behind a handle or an engine that they cannot get),
# and of the allocators of torch, oneDNN, C++ and NumPy on the host.
OUT_OF_MEMORY = re.compile(
    r"out of memory|_ALLOC_FAILED|ALLOCATION_FAILED|cublasCreate|Failed to CUDA \w*alloc|nable to find an engine"
    r"|nable to find a valid cuDNN|can't allocate memory|not enough memory|could not create a (primitive|memory object)"
    r"|bad.alloc|Unable to allocate .* for an array"
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the GPU or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))
