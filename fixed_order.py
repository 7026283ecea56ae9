"""Operations whose gradient torch adds up in varying order on a GPU, and refuses with --deterministic, in a fixed one.

Without --deterministic, and on CPU, each is torch's own operation and gives the same bits.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

# interpolate's name for a tensor of so many axes
LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


def in_fixed_order(x: torch.Tensor) -> bool:
    """Whether torch's own operation would not do: on a GPU under --deterministic."""
    return x.is_cuda and torch.are_deterministic_algorithms_enabled()


@functools.lru_cache(maxsize=64)
def linear_weights(before: int, after: int, device: str) -> torch.Tensor:
    """(after, before) matrix of linear interpolation along one axis, as torch's with align_corners=False."""
    centre = (torch.arange(after, dtype=torch.float64) + 0.5) * before / after - 0.5
    distance = centre.clamp(0, before - 1)[:, None] - torch.arange(before)
    return (1 - distance.abs()).clamp(min=0).float().to(device)


@functools.lru_cache(maxsize=64)
def window_weights(before: int, after: int, device: str) -> torch.Tensor:
    """(after, before) matrix of adaptive average pooling along one axis."""
    place, output = torch.arange(before), torch.arange(after)[:, None]
    first = output * before // after
    end = ((output + 1) * before + after - 1) // after
    inside = (place >= first) & (place < end)
    return (inside / (end - first)).float().to(device)


def by_axes(x: torch.Tensor, size: tuple[int, ...], weights: Callable) -> torch.Tensor:
    """x with its last axes multiplied by a matrix each, in fp32: a matrix product has a fixed order of summation."""
    with torch.autocast(x.device.type, enabled=False):
        out = x.float()
        for axis, after in zip(range(-len(size), 0), size, strict=True):
            matrix = weights(out.shape[axis], after, str(x.device))
            out = (out.movedim(axis, -1) @ matrix.T).movedim(-1, axis)
    return out.to(x.dtype)


def interpolate(x: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """(B, C, ...) -> (B, C, *size), linear along each axis."""
    if in_fixed_order(x):
        return by_axes(x, size, linear_weights)
    return F.interpolate(x, size, mode=LINEAR[x.dim()], align_corners=False)


def adaptive_avg_pool2d(x: torch.Tensor, side: int) -> torch.Tensor:
    """(B, C, H, W) -> (B, C, side, side), means of windows that cover the picture."""
    if in_fixed_order(x):
        return by_axes(x, (side, side), window_weights)
    return F.adaptive_avg_pool2d(x, side)


class MaxPool3d(nn.MaxPool3d):
    """nn.MaxPool3d whose gradient has a fixed order of summation; kernel, stride and padding are one number each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if in_fixed_order(x):
            return FixedMaxPool3d.apply(x, self.kernel_size, self.stride, self.padding)
        return super().forward(x)


class FixedMaxPool3d(torch.autograd.Function):
    """Max pooling that remembers which voxel of its window each output took.

    The gradient is given back window place by window place, in the order of torch's CPU code: the same bits, also where
    values are equal.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, kernel: int, stride: int, padding: int) -> torch.Tensor:
        """(B, C, X, Y, Z) -> (B, C, X', Y', Z')."""
        out, taken = torch.ops.aten.max_pool3d_with_indices(x, [kernel] * 3, [stride] * 3, [padding] * 3)
        steps = x.shape[3] * x.shape[4], x.shape[4], 1
        # how far the voxel that was taken lies behind the window's first one, in the flattened volume
        first = torch.zeros(1, dtype=torch.int32, device=x.device)
        for step, count in zip(steps, out.shape[2:], strict=True):
            along = torch.arange(count, dtype=torch.int32, device=x.device) * stride - padding
            first = first[..., None] + along * step
        ctx.save_for_backward(taken.int() - first[0])
        ctx.sizes = kernel, stride, padding, steps, x.shape
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (behind,) = ctx.saved_tensors
        kernel, stride, padding, steps, shape = ctx.sizes
        padded = grad.new_zeros(*shape[:2], *(n + 2 * padding for n in shape[2:]))
        # from the last place on: then each voxel adds up its outputs from the first one on
        for place in reversed(range(kernel**3)):
            corner = place // kernel**2, place // kernel % kernel, place % kernel
            ends = (a + stride * (n - 1) + 1 for a, n in zip(corner, grad.shape[2:], strict=True))
            where = tuple(slice(a, end, stride) for a, end in zip(corner, ends, strict=True))
            # a place in the padding may lie as far behind as a voxel: what it is given is cut off below
            distance = sum(a * step for a, step in zip(corner, steps, strict=True))
            padded[(..., *where)] += torch.where(behind == distance, grad, 0)
        inside = tuple(slice(padding, padding + n) for n in shape[2:])
        return padded[(..., *inside)], None, None, None
