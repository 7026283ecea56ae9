"""Geometry of X-ray to CT reconstruction.

Volumes (..., X, Y, Z): x increases to the patient's right, y to the front, z to the head (RAS+). Values are HU clipped
to -1000..3000 and scaled to -1..1.

Rays are parallel, along y in the frontal view ("pa") and along x in the lateral view ("lat"). An image (..., rows,
columns) shows the head at the top, and the patient's right side (frontal) or front (lateral) on the left. A plane (...,
X or Y, Z) is the same image in the axis order of volumes.

Line integrals are sums of mu * path length, where mu = MU_WATER * (1 + HU / 1000) is the attenuation per mm. DRR files
(X-rays simulated from CTs) store line integrals of 0..P_MAX as grey values of 0..255.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

HU_MIN, HU_MAX = -1000.0, 3000.0
HU_PER_UNIT = (HU_MAX - HU_MIN) / 2
# attenuation coefficient of water per mm at about 70 keV
MU_WATER = 0.0193
MU_PER_UNIT = MU_WATER * HU_PER_UNIT / 1000
P_MAX = 10.0
VIEWS = ("pa", "lat")
# axis of a volume (B, C, X, Y, Z) along which the rays of each view run
RAYS = (3, 2)
# minimum standard deviation of the noise in line integrals, to allow for fp32 rounding errors
LEAST_NOISE = 1e-4
PRIOR_RANK = 64


def normalise(hu: Tensor) -> Tensor:
    return (hu.clamp(HU_MIN, HU_MAX) - HU_MIN) / HU_PER_UNIT - 1


def as_image(plane: Tensor) -> Tensor:
    return plane.transpose(-1, -2).flip(-1, -2)


def as_plane(image: Tensor) -> Tensor:
    return image.flip(-1, -2).transpose(-1, -2)


@functools.lru_cache(maxsize=64)
def axis_weights(before: int, after: int, device: str) -> Tensor:
    """Return the matrix (after, before) that resamples an axis from `before` to `after` voxels.

    Shrinking averages the old voxels, weighted by overlap; enlarging interpolates linearly.
    """
    old = torch.arange(before, dtype=torch.float64)
    if after <= before:
        edges = torch.arange(after + 1, dtype=torch.float64) * before / after
        covered = torch.minimum(edges[1:, None], old + 1) - torch.maximum(edges[:-1, None], old)
        return (covered.clamp(min=0) * after / before).float().to(device)
    centre = ((torch.arange(after, dtype=torch.float64) + 0.5) * before / after - 0.5).clamp(0, before - 1)
    return (1 - (centre[:, None] - old).abs()).clamp(min=0).float().to(device)


def resize(x: Tensor, size: tuple | list) -> Tensor:
    """Resample the last len(size) axes of x to `size`, in fp32.

    Shrinking a volume and projecting it gives the same image as projecting the volume and shrinking the image.
    """
    with torch.autocast(x.device.type, enabled=False):
        x = x.float()
        for axis, after in enumerate(size, start=-len(size)):
            if x.shape[axis] != after:
                x = (x.movedim(axis, -1) @ axis_weights(x.shape[axis], after, str(x.device)).T).movedim(-1, axis)
    return x


def lift(image: Tensor, view: int, size: tuple | list) -> Tensor:
    """Resize a view's image (B, C, rows, columns) and repeat it along the view's rays: (B, C, X, Y, Z)."""
    axis = RAYS[view]
    plane = as_plane(resize(image, (size[2], size[3 - axis])))
    return plane.unsqueeze(axis).expand(*image.shape[:2], *size)


def project(volume: Tensor, extent: Tensor, view: int) -> Tensor:
    """Return the line integrals (B, C, rows, columns) of one view through volumes (B, C, X, Y, Z) with values in [-1,
    1].

    extent: (B, 3), field of view in mm. Differentiable.
    """
    axis = RAYS[view]
    length = extent[:, axis - 2, None, None, None] * MU_PER_UNIT
    return as_image((volume.mean(axis) + 1) * length)


def render_drr(hu: np.ndarray, spacing: np.ndarray, view: int) -> np.ndarray:
    mm = np.array(hu.shape) * spacing
    volume = normalise(torch.from_numpy(np.ascontiguousarray(hu, dtype=np.float32)))[None, None]
    integral = project(volume, torch.from_numpy(mm).float()[None], view)
    sides = np.array([mm[2], mm[3 - RAYS[view]]])
    rows, columns = (max(1, round(float(side))) for side in sides * 512 / sides.max())
    grey = (resize(integral, (rows, columns)) / P_MAX).clamp(0, 1) * 255
    return grey[0, 0].round().to(torch.uint8).numpy()


# --- consistency with the X-rays --------------------------------------------------------------------------------------


class Grey(NamedTuple):
    """Linear map from line integrals to one view's grey values (-1..1): grey value = slope * line integral + offset.

    noise: standard deviation of the X-ray's noise, in units of line integrals.
    """

    slope: float
    offset: float
    noise: float


class RaySums(NamedTuple):
    """X-rays converted to sums of voxel values (-1..1) along the rays through a voxel grid.

    sums: a plane (B, 1, X or Y, Z) for each view. noise: variance (B, 1, 1, 1) of the noise in the sums, for each view.
    """

    sums: list[Tensor]
    noise: list[Tensor]


def ray_sums(xrays: Tensor, extent: Tensor, greys: list[Grey], size: tuple | list) -> RaySums:
    """Convert X-rays (B, views, H, W) in [-1, 1] to sums of voxel values along the rays through a voxel grid.

    extent: (B, 3), field of view in mm. size: number of voxels (X, Y, Z).
    """
    sums, noise = [], []
    for view, grey in enumerate(greys):
        axis = RAYS[view]
        count = size[axis - 2]
        # change in the line integral per unit change in one voxel
        unit = extent[:, axis - 2, None, None, None] * (MU_PER_UNIT / count)
        integral = resize((xrays[:, view : view + 1] - grey.offset) / grey.slope, (size[2], size[3 - axis]))
        sums.append(as_plane(integral) / unit - count)
        noise.append((max(grey.noise, LEAST_NOISE) / unit) ** 2)
    return RaySums(sums, noise)


@torch.no_grad()
def make_consistent(volume: Tensor, xrays: RaySums, variance: float, corrections: int) -> Tensor:
    """Correct volumes (B, 1, X, Y, Z) in [-1, 1] so that they agree with the X-rays within the X-rays' noise.

    variance: expected squared error of a voxel before correction. corrections: number of iterations. Gradients are not
    tracked.

    Let A be the matrix that sums a volume V along the rays, and A' its transpose. If each voxel has an independent
    error of variance c and the ray sums y have noise of variance N, the best linear correction is

        V + c A' z, where z = (c A A' + N)^-1 (y - A V)

    For two views, z requires solving a 2 x 2 system in each axial slice. Clipping the volume to -1..1 changes its ray
    sums, so each further iteration corrects the remaining difference y - A V - N z, with V the current volume and z the
    sum so far.
    """
    with torch.autocast(volume.device.type, enabled=False):
        volume, c = volume.float(), max(variance, 1e-12)
        explained = [torch.zeros_like(plane) for plane in xrays.sums]
        pivots = [c * volume.shape[axis] + noise for axis, noise in zip(RAYS, xrays.noise, strict=False)]
        for _ in range(corrections):
            views = zip(RAYS, xrays.sums, xrays.noise, explained, strict=False)
            residuals = [sums - volume.sum(axis) - noise * z for axis, sums, noise, z in views]
            if len(residuals) == 1:
                parts = [residuals[0] / pivots[0]]
            else:
                (n1, n2), (nx, ny) = xrays.noise, volume.shape[2:4]
                r1, r2 = (plane.sum(2, keepdim=True) for plane in residuals)
                # expand the 2 x 2 determinants by hand to avoid cancellation
                det = c * (ny * n2 + nx * n1) + n1 * n2
                sum1 = (c * nx * (r1 - r2) + n2 * r1) / det
                sum2 = (c * ny * (r2 - r1) + n1 * r2) / det
                parts = [(residuals[0] - c * sum2) / pivots[0], (residuals[1] - c * sum1) / pivots[1]]
            explained = [z + part for z, part in zip(explained, parts, strict=True)]
            volume = volume + c * sum(part.unsqueeze(axis) for axis, part in zip(RAYS, parts, strict=False))
            volume = volume.clamp(-1, 1)
        return volume


def back_projection(xrays: Tensor, extent: Tensor, greys: list[Grey], size: tuple | list) -> Tensor:
    sums = ray_sums(xrays, extent, greys, size).sums
    spread = [(s / size[a - 2]).unsqueeze(a).expand(-1, -1, *size) for a, s in zip(RAYS, sums, strict=False)]
    return torch.stack(spread).mean(0).clamp(-1, 1)


# --- linear posterior (a ridge regression) ----------------------------------------------------------------------------


class Prior(NamedTuple):
    """Ridge regression that predicts a volume from X-rays, fitted to N training patients.

    penalty: ridge penalty relative to the mean squared norm of the centred ray means (see rays_of()). variance:
    variance of a voxel across patients. error: leave-one-out mean squared error of a voxel. mean: (1, 1, X, Y, Z), the
    mean volume. basis: (R, X, Y, Z), principal directions of the training volumes, not normalized. centre: (P,), ray
    means of the mean volume. gain: (R, P), maps centred ray means to coefficients of the basis.

    coordinates (N, R), weights (N, P) and kernel (N, N) are needed only to predict a training patient from the other
    patients. Checkpoints omit them, because they reveal individual CTs.
    """

    grid: list[int]
    greys: list[Grey]
    penalty: float
    variance: float
    error: float
    mean: Tensor
    basis: Tensor
    centre: Tensor
    gain: Tensor
    coordinates: Tensor | None = None
    weights: Tensor | None = None
    kernel: Tensor | None = None

    def to(self, device: torch.device, size: list[int]) -> "Prior":
        least = [min(own, other) for own, other in zip(self.grid, size, strict=True)]
        coarse = self._replace(mean=resize(self.mean, least), basis=resize(self.basis, least))
        return Prior(*(value.to(device) if isinstance(value, Tensor) else value for value in coarse))

    def state(self) -> dict:
        return self._asdict() | {"greys": [list(grey) for grey in self.greys]} | dict.fromkeys(self._fields[-3:])

    @classmethod
    def of(cls, state: dict) -> "Prior":
        return cls(**state | {"greys": [Grey(*grey) for grey in state["greys"]]})

    def volume(self, xrays: Tensor, extent: Tensor, rows: Tensor, size: tuple | list) -> Tensor:
        """Predict volumes (B, 1, *size) in [-1, 1] from X-rays (B, views, H, W) in [-1, 1].

        extent: (B, 3), field of view in mm. rows: (B,), index of the training patient to leave out of each prediction,
        or -1. A regression loaded from a checkpoint ignores `rows`.
        """
        rays = rays_of(xrays, extent, self.greys, self.grid) - self.centre
        coefficients = rays @ self.gain.T
        if self.kernel is not None:
            own = rows.clamp(min=0)
            part = (rays * self.weights[own]).sum(1) + 1 / len(self.kernel)
            part = part / self.kernel.diagonal()[own] * (rows >= 0)
            coefficients = coefficients - part[:, None] * (self.kernel[own] @ self.coordinates)
        deviation = coefficients @ self.basis.flatten(1)
        return resize((self.mean + deviation.view(-1, *self.mean.shape[1:])).clamp(-1, 1), size)


def rays_of(xrays: Tensor, extent: Tensor, greys: list[Grey], grid: list[int]) -> Tensor:
    """Convert X-rays (B, views, H, W) in [-1, 1] to ray means (B, P), the mean voxel values along P rays.

    extent: (B, 3), field of view in mm. grid: number of voxels (X, Y, Z).
    """
    sums = ray_sums(xrays, extent, greys, grid).sums
    return torch.cat([(plane / grid[axis - 2]).flatten(1) for axis, plane in zip(RAYS, sums, strict=False)], 1)


def learn_prior(volumes: Tensor, rays: Tensor, greys: list[Grey]) -> Prior:
    """Fit the linear posterior, a ridge regression from X-rays to volumes, to N training patients.

    volumes: (N, X, Y, Z) in [-1, 1]. rays: (N, P) from rays_of(). The penalty minimizes the leave-one-out error, which
    has a closed form.
    """
    count, mean = len(volumes), volumes.mean(0)
    deviations = (volumes - mean).flatten(1)
    centre, true_rays = (
        torch.cat([x.mean(axis - 1).flatten(1) for axis in RAYS[: len(greys)]], 1) for x in (mean[None], volumes)
    )
    centred_rays = (true_rays - centre).double()
    gram, inner = centred_rays @ centred_rays.T, (deviations @ deviations.T).double()
    cross = centred_rays @ (rays.double() - centre).T
    mean_norm = float(gram.trace()) / count
    fits = []
    for penalty in (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0):
        kernel = torch.linalg.inv(gram + penalty * mean_norm * torch.eye(count, dtype=torch.float64))
        # column i of w: weights of the training patients in the prediction for patient i
        w = kernel @ cross
        kernel = kernel - 1 / (penalty * mean_norm * count)
        # leave patient i out of the fit and out of the mean volume
        w = w - kernel * ((w.diagonal() + 1 / count) / kernel.diagonal())
        error = float((inner.diagonal() - 2 * (inner * w).sum(0) + (w * (inner @ w)).sum(0)).mean())
        fits.append((error, penalty, kernel))
    error, penalty, kernel = min(fits, key=lambda fit: fit[0])
    coordinates = torch.linalg.eigh(inner).eigenvectors.flip(1)[:, : min(PRIOR_RANK, count - 1)].float()
    # each column of centred_rays sums to zero, so the constant subtracted from the kernel cancels
    weights = (kernel @ centred_rays).float()
    return Prior(
        grid=list(mean.shape),
        greys=greys,
        penalty=penalty,
        variance=float(inner.trace()) / deviations.numel(),
        error=error / deviations.shape[1],
        mean=mean[None, None],
        basis=(coordinates.T @ deviations).view(-1, *mean.shape),
        centre=centre[0],
        gain=coordinates.T @ weights,
        coordinates=coordinates,
        weights=weights,
        kernel=kernel.float(),
    )
