"""Oblique rays and cone beams of guide 3: which pixel sees which voxel, sums along the rays, and their transpose.

Axes, units and views: projector.py and views.py. The library nanodrr casts the rays (trilinear interpolation, zero
outside the grid); its conventions stay in this file. Its camera looks from the source along the rays, its x runs with
an image's columns and its y with its rows, its world is in mm with the isocentre at 0, and it takes one volume at a
time.

It is linear in the volume and differentiable once. RaySums and RaySpread are each other's derivative, so gradients of
any order pass, and neither keeps the points along the rays for the backward pass: they are cast again.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from old.cli_utils import InputError
from tasks.cascade.views import LIBRARY, View, needs_library

# Points along the part of a ray that lies within the grid, per voxel of its longest side. With 2 the images of a real
# CT come nearer to finer ones (difference 2e-4 instead of 6e-4) in twice the time.
POINTS_PER_VOXEL = 1
# So many points are held at a time on a CPU; on a GPU the library holds none.
MOST_POINTS = 2**22
# The ends of parallel rays, and how far those of a cone go on behind the detector, in mm; both outside any patient.
BEYOND = 5000.0


class Block(NamedTuple):
    """Some rows of an image: the first, and how many."""

    first: int
    rows: int


# --- the library ------------------------------------------------------------------------------------------------------


def load_library():
    """(Subject, render) of the library. Raises InputError where it is not installed."""
    try:
        from nanodrr.data import Subject
        from nanodrr.drr import render
    except ImportError as error:
        reason = f"cone beams and oblique rays need nanodrr ({error.name or 'it'} is not installed)"
        raise InputError(f"--views: {reason}; pip install {LIBRARY}") from None
    return Subject, render


def check_views(views: tuple[View, ...], on_gpu: bool) -> None:
    """Raises InputError where a view cannot be projected here."""
    names = [view.name for view in views if needs_library(view)]
    if not names:
        return
    load_library()
    if on_gpu and torch.are_deterministic_algorithms_enabled():
        reason = "gradients of cone beams and oblique rays add up in varying order on a GPU"
        raise InputError(f"--deterministic: {reason} (view {names[0]}); leave it out, or take parallel pa and lat")


def scale_and_shift(scale: Tensor, shift: Tensor) -> Tensor:
    """(4, 4): the affine map x -> scale * x + shift of points; scale and shift (3,)."""
    matrix = torch.eye(4, device=scale.device)
    matrix[:3, :3] = torch.diag(scale)
    matrix[:3, 3] = shift
    return matrix


def place_grid(volume: Tensor, spacing: Tensor):
    """The library's Subject of one volume (X, Y, Z) with spacing (3,) in mm, the isocentre in its middle."""
    subject, _ = load_library()
    image = volume.permute(2, 1, 0)
    image = image[None, None].contiguous()
    size = numbers(tuple(volume.shape), str(spacing.device))
    middle = (size - 1) / 2

    # grid_sample counts from -1 to 1, from edge to edge
    return subject(
        imagedata=image,
        labeldata=image.new_zeros(1, 1, 1, 1, 1),
        voxel_to_world=scale_and_shift(spacing, -middle * spacing),
        world_to_voxel=scale_and_shift(1 / spacing, middle),
        voxel_to_grid=scale_and_shift(2 / size, 1 / size - 1),
        isocenter=torch.zeros_like(spacing),
        max_label=0,
        convert_to_mu=False,
    )


@functools.lru_cache(maxsize=256)
def numbers(values: tuple[float, ...], device: str) -> Tensor:
    """A few numbers on a device, float32; a copy that waits for a GPU is made once."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=64)
def camera(view: View, device: str) -> Tensor:
    """(1, 4, 4): from the library's camera, which stands at the source, to its world."""
    cosine, sine = view.turn
    distance = BEYOND if view.parallel else view.source_distance
    along_columns = [-cosine, -sine, 0.0, 0.0]
    along_rows = [0.0, 0.0, -1.0, 0.0]
    along_rays = [-sine, cosine, 0.0, 0.0]
    source = [sine * distance, -cosine * distance, 0.0, 1.0]
    axes = torch.tensor([along_columns, along_rows, along_rays, source], device=device)
    return axes.T[None]


def ray_of_pixel(
    view: View,
    extent: Tensor,
    shape: tuple[int, int],
    first: int,
) -> Tensor:
    """(1, 3, 3): from (column, row, 1) to a place in the library's camera, at distance 1 from it for a cone.

    extent: (3,) mm of the field of view. shape: of the image in pixels. first: the row that counts as 0.
    """
    rows, columns = shape
    half = half_detector(view, extent[None])[0]
    if not view.parallel:
        half = half / (view.source_distance + view.detector_distance)
    pixels = numbers((columns, rows), str(half.device))
    pixel = 2 * half / pixels

    matrix = torch.eye(3, device=half.device)
    matrix[0, 0] = pixel[0]
    matrix[1, 1] = pixel[1]
    matrix[0, 2] = -half[0]
    matrix[1, 2] = first * pixel[1] - half[1]
    return matrix[None]


def cast(
    volume: Tensor,
    spacing: Tensor,
    view: View,
    shape: tuple[int, int],
    block: Block,
) -> Tensor:
    """Integrals (block.rows, columns) of one volume (X, Y, Z) along the rays of some rows of an image."""
    _, render = load_library()
    counts = numbers(tuple(volume.shape), str(spacing.device))
    extent = spacing * counts
    to_ray = ray_of_pixel(view, extent, shape, block.first)

    # the library multiplies by the distance at which the rays end, also where they are parallel
    if view.parallel:
        end = 2 * BEYOND
        to_ray[:, :2] /= end
    else:
        end = view.source_distance + BEYOND
    integral = render(
        place_grid(volume, spacing),
        k_inv=to_ray,
        rt_inv=camera(view, str(spacing.device)),
        sdd=spacing.new_full((1,), end),
        height=block.rows,
        width=shape[1],
        n_samples=points_per_ray(volume.shape),
        orthographic=view.parallel,
    )
    return integral[0, 0]


def points_per_ray(size: tuple[int, ...]) -> int:
    """At how many points of a grid a ray's sum is taken."""
    return POINTS_PER_VOXEL * (max(size) + 1)


def row_blocks(size: tuple[int, ...], shape: tuple[int, int], on_gpu: bool) -> list[Block]:
    """The rows of an image in blocks that are cast one after another, so that memory suffices."""
    rows, columns = shape
    if on_gpu:
        return [Block(0, rows)]
    points = columns * points_per_ray(size)
    most = max(1, MOST_POINTS // points)
    return [Block(first, min(most, rows - first)) for first in range(0, rows, most)]


# --- sums along the rays, and their transpose -------------------------------------------------------------------------


def cast_one(
    volume: Tensor,
    spacing: Tensor,
    view: View,
    shape: tuple[int, int],
) -> Tensor:
    """Integrals (rows, columns) of one volume (X, Y, Z); spacing (3,)."""
    blocks = row_blocks(volume.shape, shape, volume.is_cuda)
    parts = [cast(volume, spacing, view, shape, block) for block in blocks]
    return torch.cat(parts)


def spread_one(
    image: Tensor,
    spacing: Tensor,
    view: View,
    size: tuple[int, int, int],
) -> Tensor:
    """The transpose of cast_one, (X, Y, Z) of an image (rows, columns): its vector-Jacobian product."""
    shape = image.shape
    volume = torch.zeros(size, device=image.device)
    for block in row_blocks(size, shape, image.is_cuda):
        zero = torch.zeros(size, device=image.device, requires_grad=True)
        with torch.enable_grad():
            part = cast(zero, spacing, view, shape, block)
        rows = image.narrow(0, block.first, block.rows)
        (share,) = torch.autograd.grad(part, zero, rows)
        volume += share
    return volume


def for_each(
    one: Callable,
    batch: Tensor,
    spacing: Tensor,
    view: View,
    shape: tuple[int, ...],
) -> Tensor:
    """one(entry, spacing, view, shape) of every entry of a batch (B, C, ...), stacked alike; spacing (B, 3)."""
    results = []
    for entry, mm in zip(batch, spacing, strict=True):
        channels = [one(channel, mm, view, shape) for channel in entry]
        results.append(torch.stack(channels))
    return torch.stack(results)


class RaySums(torch.autograd.Function):
    """cast_one of a batch, whose derivative is RaySpread."""

    @staticmethod
    def forward(context, volume, spacing, view, shape):
        context.save_for_backward(spacing)
        context.view = view
        context.size = tuple(volume.shape[-3:])
        return for_each(cast_one, volume, spacing, view, shape)

    @staticmethod
    def backward(context, gradient):
        (spacing,) = context.saved_tensors
        spread = RaySpread.apply(gradient, spacing, context.view, context.size)
        return spread, None, None, None


class RaySpread(torch.autograd.Function):
    """spread_one of a batch, whose derivative is RaySums."""

    @staticmethod
    def forward(context, image, spacing, view, size):
        context.save_for_backward(spacing)
        context.view = view
        context.shape = tuple(image.shape[-2:])
        return for_each(spread_one, image, spacing, view, size)

    @staticmethod
    def backward(context, gradient):
        (spacing,) = context.saved_tensors
        sums = RaySums.apply(gradient, spacing, context.view, context.shape)
        return sums, None, None, None


def ray_sums(
    volume: Tensor,
    spacing: Tensor,
    view: View,
    shape: tuple[int, int],
) -> Tensor:
    """Integrals (B, C, rows, columns), fp32, of a volume (B, C, X, Y, Z); spacing (B, 3) in mm. Raises InputError."""
    spacing = spacing.detach().float().expand(len(volume), 3)
    with torch.autocast(volume.device.type, enabled=False):
        return RaySums.apply(volume.float(), spacing, view, shape)


def ray_spread(
    image: Tensor,
    spacing: Tensor,
    view: View,
    size: tuple[int, int, int],
) -> Tensor:
    """The transpose of ray_sums: (B, C, X, Y, Z), fp32, of an image (B, C, rows, columns). Raises InputError."""
    spacing = spacing.detach().float().expand(len(image), 3)
    with torch.autocast(image.device.type, enabled=False):
        return RaySpread.apply(image.float(), spacing, view, size)


# --- which pixel sees which voxel -------------------------------------------------------------------------------------


def image_shape(view: View, size: tuple[int, int, int]) -> tuple[int, int]:
    """(rows, columns) of the projection of a grid (X, Y, Z).

    Parallel: a pixel per voxel of the shadow. A cone's detector: as many pixels on its longer side as the grid's
    longest side has voxels, and not more than it has itself.
    """
    if view.parallel:
        cosine, sine = view.turn
        across = abs(cosine) * size[0] + abs(sine) * size[1]
        return size[2], max(1, round(across))
    return detector_shape(view, max(size))


def detector_shape(view: View, longest: int) -> tuple[int, int]:
    """(rows, columns) of a cone's detector with at most `longest` pixels on its longer side."""
    scale = min(1.0, longest / max(view.rows, view.columns))
    return max(1, round(view.rows * scale)), max(1, round(view.columns * scale))


def half_detector(view: View, extent: Tensor) -> Tensor:
    """(B, 2) half the width and height, in mm, of the image of a field of view (B, 3) in mm."""
    if not view.parallel:
        sides = numbers((view.columns, view.rows), str(extent.device))
        half = sides * view.spacing / 2
        return half.expand(len(extent), 2)
    cosine, sine = view.turn
    width = abs(cosine) * extent[:, 0] + abs(sine) * extent[:, 1]
    return torch.stack([width, extent[:, 2]], 1) / 2


def centres(extent: Tensor, size: tuple[int, int, int], axis: int) -> Tensor:
    """mm from the isocentre of the voxels' centres along one axis, as (B, X or 1, Y or 1, Z or 1); extent (B, 3)."""
    count = size[axis]
    steps = torch.arange(count, dtype=extent.dtype, device=extent.device)
    places = (steps + 0.5) / count - 0.5
    shape = [1, 1, 1]
    shape[axis] = count
    return extent[:, axis, None, None, None] * places.reshape(shape)


def pixels_of_voxels(
    view: View,
    extent: Tensor,
    size: tuple[int, int, int],
) -> Tensor:
    """(B, X, Y, Z, 2): where each voxel's ray meets the image, (column, row) from -1 to 1 between its edges."""
    cosine, sine = view.turn
    x, y, z = (centres(extent, size, axis) for axis in range(3))
    across = -cosine * x - sine * y

    # a cone's shadow is larger than the body
    larger = torch.ones_like(across)
    if not view.parallel:
        # no voxel lies behind the source: see wrong_extent
        from_source = view.source_distance - sine * x + cosine * y
        larger = (view.source_distance + view.detector_distance) / from_source.clamp(min=1)
    half = half_detector(view, extent)[:, :, None, None, None]
    column = across * larger / half[:, 0]
    row = -z * larger / half[:, 1]
    return torch.stack([column.expand_as(row), row], -1)


def sample_along_rays(
    image: Tensor,
    view: View,
    extent: Tensor,
    size: tuple[int, int, int],
) -> Tensor:
    """(B, C, X, Y, Z): the value of an image (B, C, rows, columns) where each voxel's ray meets it.

    Bilinear; beyond the image's edge the value at the edge. Differentiable with respect to the image.
    """
    extent = extent.detach().float().expand(len(image), 3)
    with torch.autocast(image.device.type, enabled=False):
        places = pixels_of_voxels(view, extent, size).flatten(1, 2)
        values = grid_sample(image.float(), places, padding_mode="border", align_corners=False)
    return values.unflatten(2, size[:2])


def path_lengths(view: View, spacing: Tensor, size: tuple[int, int, int]) -> Tensor:
    """(B, 1, rows, columns) mm of each ray within the field of view."""
    ones = torch.ones((len(spacing), 1, *size), device=spacing.device)
    return ray_sums(ones, spacing, view, image_shape(view, size))
