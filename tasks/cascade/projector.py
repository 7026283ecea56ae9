"""Geometry of guide 3, in one place: CT volumes, attenuation, projections (DRRs), and the way back.

Axes. A volume is (..., X, Y, Z) in canonical RAS+ orientation: x runs to the patient's right, y to the front, z to the
head. It holds HU clipped to -1000..3000 and scaled to -1..1, on a grid that spans the
CT's field of view, whatever its voxel size; `spacing` (mm per voxel along x, y, z) keeps the real lengths.

Views. "pa" (frontal) rays run along y, "lat" (lateral) rays along x, all parallel, from edge to edge of the field of
view. An image is (..., rows, columns) as one looks at it: the head is up (rows run against z); the frontal image
begins at the patient's right side as seen from the front (columns run against x); the lateral one begins at the front
(columns run against y). Other views, oblique or of a cone beam, are a View (views.py); their rays are in rays.py. All
functions here take either.

Values. Beer-Lambert: a ray's line integral is the sum of mu * length, mu = MU_WATER * (1 + HU / 1000) per mm. It is
linear in the volume, so a gradient reaches every voxel. A DRR file is the line integral in grey values,
0..P_MAX -> 0..255, so bone is white.
"""

import functools

import numpy as np
import torch
from torch import Tensor, float64

from tasks.cascade.rays import detector_shape, image_shape, path_lengths, ray_spread, ray_sums, sample_along_rays
from tasks.cascade.views import View, as_view

HU_MIN = -1000.0
HU_MAX = 3000.0
# Attenuation per mm, at about 70 keV.
MU_WATER = 0.0193
# What one unit of a volume in -1..1 adds to the attenuation per mm.
MU_PER_UNIT = MU_WATER * (HU_MAX - HU_MIN) / 2 / 1000
# The line integral of a white pixel: 520 mm of water.
P_MAX = 10.0
VIEWS = ("pa", "lat")


def normalise(hu: Tensor) -> Tensor:
    """HU -> -1..1, clipped to HU_MIN..HU_MAX."""
    scale = 2 / (HU_MAX - HU_MIN)
    above = hu.clamp(HU_MIN, HU_MAX) - HU_MIN
    return above * scale - 1


def to_hu(volume: Tensor) -> Tensor:
    """-1..1 -> HU."""
    half_range = (HU_MAX - HU_MIN) / 2
    return (volume + 1) * half_range + HU_MIN


def hu_difference(difference: Tensor) -> Tensor:
    """A difference of volumes in -1..1 -> HU."""
    half_range = (HU_MAX - HU_MIN) / 2
    return difference * half_range


def attenuation(volume: Tensor) -> Tensor:
    """-1..1 -> mu per mm; 0 in air."""
    relative = to_hu(volume) / 1000
    return MU_WATER * (1 + relative)


def spacing_of(extent: Tensor, size: tuple[int, ...]) -> Tensor:
    """(B, 3) mm per voxel of a field of view (B, 3) in mm on a grid."""
    spacings = [extent[:, axis] / count for axis, count in enumerate(size)]
    return torch.stack(spacings, 1)


def as_image(plane: Tensor) -> Tensor:
    """(..., across, Z) in the order of the volume's indices -> (..., rows, columns) as one looks at it."""
    return plane.transpose(-1, -2).flip(-1, -2)


def as_plane(image: Tensor) -> Tensor:
    """The inverse of as_image."""
    return image.flip(-1, -2).transpose(-1, -2)


def project(
    volume: Tensor,
    spacing: Tensor,
    view: str | View,
) -> Tensor:
    """Line integrals (B, C, rows, columns) of a volume (B, C, X, Y, Z) in -1..1; spacing (B, 3) in mm; differentiable.

    Of pa and lat there are Z rows, and columns as there are voxels across; of others, see image_shape.
    """
    view = as_view(view)
    axis = view.ray_axis
    if axis is None:
        return ray_sums(attenuation(volume), spacing, view, image_shape(view, volume.shape[-3:]))
    # attenuation is 0 at -1 and linear, so it can be taken of the sums, which are far smaller
    total = volume.sum(axis - 3) + volume.shape[axis - 3]
    length = spacing[:, axis, None, None, None]
    return as_image(total * (length * MU_PER_UNIT))


def sum_rays(
    volume: Tensor,
    spacing: Tensor,
    view: str | View,
) -> Tensor:
    """The linear part of project: what a change (B, C, X, Y, Z) of a volume adds to its line integrals.

    project(volume + change) = project(volume) + sum_rays(change), and project(volume) = sum_rays(volume + 1).
    """
    view = as_view(view)
    axis = view.ray_axis
    if axis is None:
        return ray_sums(volume * MU_PER_UNIT, spacing, view, image_shape(view, volume.shape[-3:]))
    length = spacing[:, axis, None, None, None]
    return as_image(volume.sum(axis - 3) * (length * MU_PER_UNIT))


def project_back(
    image: Tensor,
    spacing: Tensor,
    view: str | View,
    size: tuple[int, int, int],
) -> Tensor:
    """The transpose (adjoint) of sum_rays: (B, C, X, Y, Z) of an image (B, C, rows, columns) as large as a projection.

    Of pa and lat all voxels of a ray share their memory: do not write into it.
    """
    view = as_view(view)
    axis = view.ray_axis
    if axis is None:
        return ray_spread(image, spacing, view, size) * MU_PER_UNIT
    length = spacing[:, axis, None, None, None]
    plane = as_plane(image * (length * MU_PER_UNIT))
    return plane.unsqueeze(axis - 3).expand(*image.shape[:2], *size)


def sum_of_rays_back(
    image: Tensor,
    spacing: Tensor,
    view: View,
    other: View,
    size: tuple[int, int, int],
) -> Tensor:
    """sum_rays, along the rays of another view, of project_back(image): without the volume that lies between.

    Of views whose rays run along an axis alone, where what is spread along a ray is the same in all its voxels.
    """
    axis = view.ray_axis
    other_axis = other.ray_axis
    if axis == other_axis:
        total = image * size[axis]
    else:
        columns = size[1 - other_axis]
        total = image.sum(-1, keepdim=True).expand(-1, -1, -1, columns)
    lengths = spacing[:, axis] * spacing[:, other_axis]
    weight = lengths[:, None, None, None] * MU_PER_UNIT**2
    return total * weight


@functools.lru_cache(maxsize=64)
def axis_weights(
    before: int,
    after: int,
    device: str,
) -> Tensor:
    """(after, before) matrix that resamples one axis: exact averages where it shrinks, linear where it grows."""
    if after <= before:
        # the share of each old cell that a new cell covers
        edges = torch.arange(after + 1, dtype=float64) * before / after
        cell = torch.arange(before, dtype=float64)
        end = torch.minimum(edges[1:, None], cell + 1)
        begin = torch.maximum(edges[:-1, None], cell)
        covered = (end - begin).clamp(min=0)
        weights = covered * after / before
    else:
        # the nearness of each old cell's centre to a new cell's
        place = torch.arange(after, dtype=float64) + 0.5
        centre = place * before / after - 0.5
        centre = centre.clamp(0, before - 1)
        distance = (centre[:, None] - torch.arange(before)).abs()
        weights = (1 - distance).clamp(min=0)
    return weights.float().to(device, non_blocking=True)


def resize(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """The last axes of x (an image's or a volume's) at another size, fp32.

    Averages are kept exactly, so that the projection of a coarser volume is the coarser projection.
    """
    with torch.autocast(x.device.type, enabled=False):
        x = x.float()
        for axis, after in enumerate(size, start=-len(size)):
            before = x.shape[axis]
            if before == after:
                continue
            weights = axis_weights(before, after, str(x.device))
            along = x.movedim(axis, -1) @ weights.T
            x = along.movedim(-1, axis)
    return x


def lift(
    image: Tensor,
    view: str | View,
    size: tuple[int, int, int],
    extent: Tensor | None = None,
) -> Tensor:
    """Depth lifting: (B, C, rows, columns) -> (B, C, X, Y, Z), the image repeated along the view's own rays.

    The image, of any size in pixels, spans the view's detector or shadow from edge to edge. extent: (B, 3) mm of the
    field of view; pa and lat do without. Voxels whose rays miss the image take the value at its edge.
    """
    view = as_view(view)
    axis = view.ray_axis
    if axis is None:
        # a pixel for each ray first, so that what is between the rays counts too
        return sample_along_rays(resize(image, image_shape(view, size)), view, extent, size)
    rows = size[2]
    columns = size[1 - axis]
    plane = as_plane(resize(image, (rows, columns)))
    batch, channels = image.shape[:2]
    return plane.unsqueeze(axis - 3).expand(batch, channels, *size)


def back_project(
    integrals: list[Tensor],
    spacing: Tensor,
    size: tuple[int, int, int],
    views: tuple[str | View, ...] = VIEWS,
) -> Tensor:
    """The simplest reconstruction, (B, 1, X, Y, Z) in -1..1, of one (B, 1, rows, columns) for each of the first views.

    Each ray's attenuation is spread evenly along it; then the mean is taken over the views.
    """
    volumes = []
    for view, image in zip(views, integrals, strict=False):
        view = as_view(view)
        axis = view.ray_axis
        if axis is None:
            volumes.append(lift_density(image, spacing, view, size))
            continue
        length = spacing[:, axis] * size[axis]
        volumes.append(lift(image, view, size) / length[:, None, None, None, None])
    mu = torch.stack(volumes).mean(0)
    hu = (mu / MU_WATER - 1) * 1000
    return normalise(hu)


def lift_density(
    image: Tensor,
    spacing: Tensor,
    view: View,
    size: tuple[int, int, int],
) -> Tensor:
    """Each ray's mean attenuation per mm within the field of view, lifted; 0 where a ray hardly touches it."""
    path = path_lengths(view, spacing, size)
    voxel = spacing.amin(1)[:, None, None, None]
    density = resize(image, path.shape[-2:]) / path.clamp(min=1e-6)
    sides = [spacing[:, axis] * count for axis, count in enumerate(size)]
    extent = torch.stack(sides, 1)
    return lift(density.where(path > voxel, 0), view, size, extent)


def grey_values(integral: Tensor) -> Tensor:
    """Line integrals -> grey values 0..1 of a DRR file."""
    return (integral / P_MAX).clamp(0, 1)


def render_drr(
    hu: np.ndarray,
    spacing: np.ndarray,
    view: str | View,
    longest: int = 512,
) -> np.ndarray:
    """uint8 image of a CT (X, Y, Z) in HU, square pixels, `longest` of them on its longer side.

    A cone beam's image has its detector's pixels, or `longest` where there are more.
    """
    view = as_view(view)
    values = np.ascontiguousarray(hu, dtype=np.float32)
    volume = normalise(torch.from_numpy(values))
    volume = volume[None, None]
    mm = torch.tensor([list(spacing)], dtype=torch.float32)
    if view.parallel:
        integral = project(volume, mm, view)
        integral = resize(integral, square_pixels(hu.shape, spacing, view, longest))
    else:
        integral = ray_sums(attenuation(volume), mm, view, detector_shape(view, longest))
    grey = grey_values(integral)[0, 0] * 255
    return grey.round().to(torch.uint8).numpy()


def square_pixels(
    size: tuple[int, int, int],
    spacing: np.ndarray,
    view: View,
    longest: int,
) -> tuple[int, int]:
    """(rows, columns) of a parallel image of a grid (X, Y, Z), spacing (3,) in mm, `longest` on its longer side."""
    cosine, sine = view.turn
    height = size[2] * spacing[2]
    width = abs(cosine) * (size[0] * spacing[0]) + abs(sine) * (size[1] * spacing[1])
    sides = np.array([height, width])
    pixels = sides * longest / sides.max()
    rows, columns = (max(1, round(float(count))) for count in pixels)
    return rows, columns
