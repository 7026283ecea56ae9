"""How much arithmetic a step is, and how fast this device can do it: the two numbers behind `train/mfu`."""

import math
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convolution_backward_flops(gradient, images, weight, *options, **_) -> int:
    """FLOPs of a convolution's gradients: as many as its forward pass for the images', and again for the weight's.

    options: bias, stride, padding, dilation, transposed, output padding, groups, and which gradients are wanted.
    torch's own formula counts each group's weight against the channels of all groups, which is hundreds of times too
    much for a depthwise convolution.
    """
    _, _, _, _, transposed, _, _, wanted = options
    for_images, for_weight, _ = wanted
    small = images if transposed else gradient
    positions = math.prod(small.shape[2:])
    forward = 2 * len(images) * positions * weight.numel()
    return forward * (for_images + for_weight)


# torch's formulas, mended, and the CPU's attention, which is missing there.
FORMULAS = flop_registry | {
    aten.convolution_backward: convolution_backward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


class FlopCount(TorchDispatchMode):
    """Adds up the FLOPs of the matrix products, convolutions and attention that run inside it, as `total`.

    A multiplication and its addition are 2 FLOPs. What runs is counted: also a forward pass that is repeated for
    gradient checkpointing, and padding. It keeps no tensor alive, changes no result, may be entered again to count on,
    and works on fake tensors too. Not for compiled models: torch.compile compiles nothing inside of it.
    """

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        def call(function, **more):
            return function(*args, **(kwargs or {}), **more)

        # In inference mode a composite operation arrives whole. One with a kernel of its own must stay whole, or its
        # result would change.
        own = operation.namespace != "aten" or torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CPU")
        if not own:
            with self:
                result = call(operation.decompose)
            if result is not NotImplemented:
                return result

        result = call(operation)
        formula = FORMULAS.get(operation.overloadpacket)
        if formula:
            self.total += call(formula, out_val=result)
        return result


def matmul_rate(device: torch.device, precision: str) -> float:
    """FLOP/s of a large square matrix product on this device in a precision ("no" is fp32), measured now.

    Products grow until one takes long enough to be timed: below 0.1 s in all on a CPU, 0.5 s on a GPU. No random
    number is drawn.
    """
    on_gpu = device.type == "cuda"
    side = 1024 if on_gpu else 256
    largest = 8192 if on_gpu else 2048
    enough = 0.01 if on_gpu else 0.001
    best = 0.0
    while True:
        # The numbers have varied bits: a GPU computes faster on equal ones, as it takes less power.
        values = torch.arange(side * side, dtype=torch.float32, device=device).sin_()
        matrix = values.view(side, side).to(DTYPES[precision])
        seconds = min(_time_product(matrix) for _ in range(5))
        best = max(best, 2 * side**3 / seconds)
        if side == largest or seconds > enough:
            break
        side *= 2

    # The memory goes back, and is no part of the peak that the run reports.
    del values, matrix
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


def _time_product(matrix: torch.Tensor) -> float:
    """Seconds of one product of the matrix with itself."""
    _wait(matrix.device)
    begun = time.perf_counter()
    torch.mm(matrix, matrix)
    _wait(matrix.device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
