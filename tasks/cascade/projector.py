"""Geometry of guide 3, in one place: CT volumes, attenuation, parallel projections (DRRs), and the way back.

Axes. A volume is (..., X, Y, Z) in canonical RAS+ orientation: x runs to the patient's right, y to the front, z to the
head. It holds HU clipped to -1000..3000 and scaled to -1..1, on a grid that spans the
CT's field of view, whatever its voxel size; `spacing` (mm per voxel along x, y, z) keeps the real lengths.

Views. "pa" (frontal) rays run along y, "lat" (lateral) rays along x, all parallel, from edge to edge of the field of
view. A picture is (..., rows, columns) as one looks at it: the head is up (rows run against z); the frontal picture
begins at the patient's right side as seen from the front (columns run against x); the lateral one begins at the front
(columns run against y).

Values. Beer-Lambert: a ray's line integral is the sum of mu * length, mu = MU_WATER * (1 + HU / 1000) per mm. It is
linear in the volume, so a gradient reaches every voxel. A DRR file is the line integral in grey values,
0..P_MAX -> 0..255, so bone is white.
"""

import functools

import numpy as np
import torch

HU_MIN, HU_MAX = -1000.0, 3000.0
MU_WATER = 0.0193  # per mm, at about 70 keV
P_MAX = 10.0  # line integral of a white pixel: 520 mm of water
VIEWS = ("pa", "lat")
RAY_AXIS = {"pa": 1, "lat": 0}  # of X, Y, Z


def normalise(hu: torch.Tensor) -> torch.Tensor:
    """HU -> -1..1, clipped to HU_MIN..HU_MAX."""
    return (hu.clamp(HU_MIN, HU_MAX) - HU_MIN) * (2 / (HU_MAX - HU_MIN)) - 1


def to_hu(volume: torch.Tensor) -> torch.Tensor:
    """-1..1 -> HU."""
    return (volume + 1) * ((HU_MAX - HU_MIN) / 2) + HU_MIN


def attenuation(volume: torch.Tensor) -> torch.Tensor:
    """-1..1 -> mu per mm; 0 in air."""
    return MU_WATER * (1 + to_hu(volume) / 1000)


def spacing_of(extent: torch.Tensor, size) -> torch.Tensor:
    """(B, 3) mm per voxel of a field of view (B, 3) in mm on a grid."""
    return torch.stack([extent[:, axis] / count for axis, count in enumerate(size)], 1)


def as_picture(plane: torch.Tensor) -> torch.Tensor:
    """(..., across, Z) in the order of the volume's indices -> (..., rows, columns) as one looks at it."""
    return plane.transpose(-1, -2).flip(-1, -2)


def as_plane(picture: torch.Tensor) -> torch.Tensor:
    """The inverse of as_picture."""
    return picture.flip(-1, -2).transpose(-1, -2)


def project(volume: torch.Tensor, spacing: torch.Tensor, view: str) -> torch.Tensor:
    """Line integrals (B, C, Z, across) of a volume (B, C, X, Y, Z) in -1..1; spacing (B, 3) in mm; differentiable."""
    axis = RAY_AXIS[view]
    total = attenuation(volume).sum(axis - 3)
    return as_picture(total * spacing[:, axis, None, None, None])


@functools.lru_cache(maxsize=64)
def axis_weights(before: int, after: int, device: str) -> torch.Tensor:
    """(after, before) matrix that resamples one axis: exact averages where it shrinks, linear where it grows."""
    if after <= before:
        edges = torch.arange(after + 1, dtype=torch.float64) * before / after
        cell = torch.arange(before, dtype=torch.float64)
        covered = torch.minimum(edges[1:, None], cell + 1) - torch.maximum(edges[:-1, None], cell)
        weights = covered.clamp(min=0) * after / before
    else:
        centre = ((torch.arange(after, dtype=torch.float64) + 0.5) * before / after - 0.5).clamp(0, before - 1)
        weights = (1 - (centre[:, None] - torch.arange(before)).abs()).clamp(min=0)
    return weights.float().to(device, non_blocking=True)


def resize(x: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """The last axes of x (a picture's or a volume's) at another size, fp32. Averages are kept exactly, so that the
    projection of a coarser volume is the coarser projection."""
    with torch.autocast(x.device.type, enabled=False):
        x = x.float()
        for axis, after in zip(range(-len(size), 0), size, strict=True):
            if x.shape[axis] != after:
                weights = axis_weights(x.shape[axis], after, str(x.device))
                x = (x.movedim(axis, -1) @ weights.T).movedim(-1, axis)
    return x


def lift(picture: torch.Tensor, view: str, size: tuple[int, int, int]) -> torch.Tensor:
    """Depth lifting: (B, C, rows, columns) -> (B, C, X, Y, Z), the picture repeated along the view's own rays."""
    axis = RAY_AXIS[view]
    across = size[1 - axis]
    plane = as_plane(resize(picture, (size[2], across)))
    return plane.unsqueeze(axis - 3).expand(*picture.shape[:2], *size)


def back_project(integrals: list[torch.Tensor], spacing: torch.Tensor, size: tuple[int, int, int]) -> torch.Tensor:
    """The simplest reconstruction, (B, 1, X, Y, Z) in -1..1: each ray's attenuation spread evenly along it, then the
    mean over the views. integrals: one (B, 1, rows, columns) per view, in the order of VIEWS."""
    parts = []
    for view, picture in zip(VIEWS, integrals, strict=False):
        axis = RAY_AXIS[view]
        length = (spacing[:, axis] * size[axis])[:, None, None, None, None]
        parts.append(lift(picture, view, size) / length)
    mu = torch.stack(parts).mean(0)
    return normalise((mu / MU_WATER - 1) * 1000)


def grey_values(integral: torch.Tensor) -> torch.Tensor:
    """Line integrals -> grey values 0..1 of a DRR file."""
    return (integral / P_MAX).clamp(0, 1)


def render_drr(hu: np.ndarray, spacing, view: str, longest: int = 512) -> np.ndarray:
    """uint8 picture of a CT (X, Y, Z) in HU, square pixels, `longest` of them on its longer side."""
    volume = normalise(torch.from_numpy(np.ascontiguousarray(hu, dtype=np.float32)))[None, None]
    integral = project(volume, torch.tensor([list(spacing)], dtype=torch.float32), view)
    across = 1 - RAY_AXIS[view]
    sides = np.array([hu.shape[2] * spacing[2], hu.shape[across] * spacing[across]])
    rows, columns = (max(1, round(float(side))) for side in sides * longest / sides.max())
    grey = grey_values(resize(integral, (rows, columns)))
    return (grey[0, 0] * 255).round().to(torch.uint8).numpy()
