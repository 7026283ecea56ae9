"""Operations whose gradient torch adds up in varying order on a GPU, and refuses with --deterministic, in a fixed one.

Without --deterministic, and on CPU, each is torch's own operation and gives the same bits.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# interpolate's mode for a tensor of so many axes.
LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


def in_fixed_order(x: Tensor) -> bool:
    """Whether torch's own operation would not do: on a GPU under --deterministic."""
    return x.is_cuda and torch.are_deterministic_algorithms_enabled()


@functools.lru_cache(maxsize=64)
def linear_weights(before: int, after: int, device: str) -> Tensor:
    """(after, before) matrix of linear interpolation along one axis, as torch's with align_corners=False."""
    # Where each output lies among the inputs, which it does not leave at the ends.
    outputs = torch.arange(after).double()
    centre = (outputs + 0.5) * before
    centre = centre / after
    centre = centre - 0.5
    centre = centre.clamp(0, before - 1)

    inputs = torch.arange(before)
    distance = centre.unsqueeze(1) - inputs
    distance = distance.abs()
    weights = (1 - distance).clamp(min=0)
    return weights.float().to(device)


@functools.lru_cache(maxsize=64)
def window_weights(before: int, after: int, device: str) -> Tensor:
    """(after, before) matrix of adaptive average pooling along one axis."""
    inputs = torch.arange(before)
    outputs = torch.arange(after).unsqueeze(1)

    # The window of an output: from its first input on, up to the one before its end.
    first = outputs * before
    first = first // after
    end = (outputs + 1) * before
    end = end + after - 1
    end = end // after
    inside = torch.logical_and(inputs >= first, inputs < end)
    weights = inside / (end - first)
    return weights.float().to(device)


def by_axes(x: Tensor, size: tuple[int, ...], weights: Callable) -> Tensor:
    """x with its last axes multiplied by a matrix each, in fp32: a matrix product has a fixed order of summation."""
    device = str(x.device)
    with torch.autocast(x.device.type, enabled=False):
        out = x.float()
        first_axis = x.dim() - len(size)
        for axis, after in enumerate(size, start=first_axis):
            before = out.shape[axis]
            matrix = weights(before, after, device)
            out = out.movedim(axis, -1)
            out = out @ matrix.T
            out = out.movedim(-1, axis)
    return out.to(x.dtype)


def interpolate(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """(B, C, ...) -> (B, C, *size), linear along each axis."""
    if in_fixed_order(x):
        return by_axes(x, size, linear_weights)
    mode = LINEAR[x.dim()]
    return F.interpolate(x, size, mode=mode, align_corners=False)


def adaptive_avg_pool2d(x: Tensor, side: int) -> Tensor:
    """(B, C, H, W) -> (B, C, side, side), means of windows that cover the image."""
    if in_fixed_order(x):
        size = (side, side)
        return by_axes(x, size, window_weights)
    return F.adaptive_avg_pool2d(x, side)
