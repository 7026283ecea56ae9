"""Operations whose gradient torch adds up in varying order on a GPU, and refuses with --deterministic, in a fixed one.

Without --deterministic, and on CPU, each is torch's own operation and gives the same bits.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
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


class MaxPool3d(nn.MaxPool3d):
    """nn.MaxPool3d whose gradient has a fixed order of summation; kernel, stride and padding are one number each."""

    def forward(self, x: Tensor) -> Tensor:
        if in_fixed_order(x):
            return FixedMaxPool3d.apply(x, self.kernel_size, self.stride, self.padding)
        return super().forward(x)


def voxel_steps(volume: Tensor) -> list[int]:
    """How far the next voxel along each axis lies behind, in a flattened volume of (B, C, X, Y, Z)."""
    _, _, _, height, depth = volume.shape
    return [height * depth, depth, 1]


class FixedMaxPool3d(torch.autograd.Function):
    """Max pooling that remembers which voxel of its window each output took.

    The gradient is given back window place by window place, in the order of torch's CPU code: the same bits, also where
    values are equal.
    """

    @staticmethod
    def forward(ctx, x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
        """(B, C, X, Y, Z) -> (B, C, X', Y', Z')."""
        max_pool = torch.ops.aten.max_pool3d_with_indices
        out, taken = max_pool(x, kernel, stride, padding)
        ctx.kernel = kernel
        ctx.stride = stride
        ctx.padding = padding
        ctx.steps = voxel_steps(x)
        ctx.input_shape = x.shape

        # How far the voxel that was taken lies behind the window's first one, in the flattened volume.
        taken = taken.int()
        first = taken.new_zeros(1)
        for axis in range(3):
            count = out.shape[2 + axis]
            step = ctx.steps[axis]
            along = torch.arange(count, device=x.device)
            along = along.int() * stride
            along = along - padding
            first = first.unsqueeze(-1)
            first = first + along * step
        first = first.squeeze(0)
        ctx.save_for_backward(taken - first)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        """(B, C, X', Y', Z') -> (B, C, X, Y, Z), and nothing for the three numbers."""
        (behind,) = ctx.saved_tensors
        kernel = ctx.kernel
        stride = ctx.stride
        padding = ctx.padding
        batch, channels, *sides = ctx.input_shape
        padded_sides = [side + 2 * padding for side in sides]
        padded = grad.new_zeros(batch, channels, *padded_sides)

        # From the last place on: then each voxel adds up its outputs from the first one on.
        for place in reversed(range(kernel**3)):
            row, z = divmod(place, kernel)
            x, y = divmod(row, kernel)

            # The voxels at this place of all windows.
            corner = [x, y, z]
            every = [slice(None), slice(None)]
            distance = 0
            for axis in range(3):
                start = corner[axis]
                count = grad.shape[2 + axis]
                last = start + stride * (count - 1)
                voxels = slice(start, last + 1, stride)
                every.append(voxels)
                distance += start * ctx.steps[axis]

            # A place in the padding may lie as far behind as a voxel: what it is given is cut off below.
            taken_here = behind == distance
            given = torch.where(taken_here, grad, 0)
            padded[tuple(every)] += given

        for axis, side in enumerate(sides, start=2):
            padded = padded.narrow(axis, padding, side)
        return padded, None, None, None
