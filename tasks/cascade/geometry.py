"""Guide 3 without a network: projections, correction of volumes to agree with X-rays, the linear posterior.

Axes: a volume is (..., X, Y, Z) in RAS+ order: x to the patient's right, y to the front, z to the head. It holds HU
clipped to -1000..3000 and scaled to -1..1, on a grid that spans the CT's field of view at any voxel size.

Views: parallel rays run from edge to edge, for "pa" (frontal) along y, for "lat" (lateral) along x. An image is (...,
rows, columns) with the head at the top; its left edge is the patient's right (frontal) or front (lateral). A plane is
an image in the order of the volume's axes, (..., X or Y, Z).

Values: a line integral is the sum of mu * length along a ray, mu = MU_WATER * (1 + HU / 1000) per mm, so it is linear
in the volume. A DRR file stores line integrals 0..P_MAX as grey values 0..255, so bone is white.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

HU_MIN, HU_MAX = -1000.0, 3000.0
HU_PER_UNIT = (HU_MAX - HU_MIN) / 2
# attenuation of water per mm, at about 70 keV
MU_WATER = 0.0193
MU_PER_UNIT = MU_WATER * HU_PER_UNIT / 1000
P_MAX = 10.0
VIEWS = ("pa", "lat")
# axis of (B, C, X, Y, Z) along which each view's rays run
RAYS = (3, 2)
# lower bound of a line integral's noise, set by fp32 rounding
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
    """Matrix (after, before) that shrinks an axis by exact averages or enlarges it by linear interpolation."""
    old = torch.arange(before, dtype=torch.float64)
    if after <= before:
        edges = torch.arange(after + 1, dtype=torch.float64) * before / after
        covered = torch.minimum(edges[1:, None], old + 1) - torch.maximum(edges[:-1, None], old)
        return (covered.clamp(min=0) * after / before).float().to(device)
    centre = ((torch.arange(after, dtype=torch.float64) + 0.5) * before / after - 0.5).clamp(0, before - 1)
    return (1 - (centre[:, None] - old).abs()).clamp(min=0).float().to(device)


def resize(x: Tensor, size: tuple | list) -> Tensor:
    """Resample the last axes of x to this size, in fp32. Shrinking commutes with projection."""
    with torch.autocast(x.device.type, enabled=False):
        x = x.float()
        for axis, after in enumerate(size, start=-len(size)):
            if x.shape[axis] != after:
                x = (x.movedim(axis, -1) @ axis_weights(x.shape[axis], after, str(x.device)).T).movedim(-1, axis)
    return x


def lift(image: Tensor, view: int, size: tuple | list) -> Tensor:
    """Repeat an image along its view's rays: (B, C, rows, columns) -> (B, C, X, Y, Z)."""
    axis = RAYS[view]
    plane = as_plane(resize(image, (size[2], size[3 - axis])))
    return plane.unsqueeze(axis).expand(*image.shape[:2], *size)


def project(volume: Tensor, extent: Tensor, view: int) -> Tensor:
    """Line integrals (B, C, rows, columns) of volumes (B, C, X, Y, Z) in -1..1, differentiable. extent: (B, 3) mm."""
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


# --- agreement with X-rays --------------------------------------------------------------------------------------------


class Grey(NamedTuple):
    """A view's grey values (-1..1) = slope * line integral + offset. noise: standard deviation of a line integral."""

    slope: float
    offset: float
    noise: float


class RaySums(NamedTuple):
    """X-rays as sums of voxels in -1..1 along the rays of a grid: each view's plane (B, 1, X or Y, Z) of sums and the
    variance (B, 1, 1, 1) of their noise."""

    sums: list[Tensor]
    noise: list[Tensor]


def ray_sums(xrays: Tensor, extent: Tensor, greys: list[Grey], size: tuple | list) -> RaySums:
    """Convert X-rays (B, views, H, W) in -1..1 to sums along the rays of a grid. extent: (B, 3) mm."""
    sums, noise = [], []
    for view, grey in enumerate(greys):
        axis = RAYS[view]
        count = size[axis - 2]
        # contribution of a voxel to the line integral, per unit of its value
        unit = extent[:, axis - 2, None, None, None] * (MU_PER_UNIT / count)
        integral = resize((xrays[:, view : view + 1] - grey.offset) / grey.slope, (size[2], size[3 - axis]))
        sums.append(as_plane(integral) / unit - count)
        noise.append((max(grey.noise, LEAST_NOISE) / unit) ** 2)
    return RaySums(sums, noise)


@torch.no_grad()
def make_consistent(volume: Tensor, xrays: RaySums, variance: float, corrections: int) -> Tensor:
    """Correct volumes (B, 1, X, Y, Z) in -1..1 to agree with the X-rays within their noise, without gradients.

    If each voxel of V has an error of variance c, and the sums y = A V have noise of variance N, the best linear
    correction is V + c A' z with z = (c A A' + N)^-1 (y - A V). For two views this is solved exactly: in each slice,
    the sums of z over each view's rays follow from a 2 x 2 system. The result is clipped, because nothing is less dense
    than air, and corrected again by the rest of z (the part N z of y is attributed to noise).
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
                # determinants expanded symbolically, because their differences would be lost in rounding
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


# --- the linear posterior ---------------------------------------------------------------------------------------------


class Prior(NamedTuple):
    """The linear posterior of a volume given its X-rays: ridge regression in the span of N training patients.

    A volume is modelled as mean + sum of w_i (patient_i - mean), with w linear in the X-rays, on the prior's own grid.
    penalty: relative to the mean squared norm of the centred rays. variance: of a voxel over the patients. error:
    leave-one-out mean square error of a voxel. mean: (1, 1, X, Y, Z). basis: (R, X, Y, Z), principal directions of the
    span. centre (P,): the mean's rays. gain (R, P): from rays to coefficients of the basis.

    coordinates (N, R) of the patients in the basis, weights (N, P) from rays to w, and kernel (N, N) serve to leave a
    training patient out of its own prediction. They reveal single patients' CTs, so checkpoints hold None instead.
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
        """Linear posterior (B, 1, X, Y, Z). rows (B,): index of the training patient to leave out, or -1."""
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
    """Convert X-rays to the mean (B, P) of a volume in -1..1 along each ray of all views."""
    sums = ray_sums(xrays, extent, greys, grid).sums
    return torch.cat([(plane / grid[axis - 2]).flatten(1) for axis, plane in zip(RAYS, sums, strict=False)], 1)


def learn_prior(volumes: Tensor, rays: Tensor, greys: list[Grey]) -> Prior:
    """Fit the linear posterior to training patients. volumes: (N, X, Y, Z); rays: (N, P), from rays_of().

    The penalty minimizes the leave-one-out error, which has a closed form. The mean must exclude the left-out patient
    too: deviations from a mean sum to 0, so the other patients' deviations add up to minus that of the left-out one.
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
        # column i: weights for patient i; the last line removes the patient from the fit and from the mean
        w = kernel @ cross
        kernel = kernel - 1 / (penalty * mean_norm * count)
        w = w - kernel * ((w.diagonal() + 1 / count) / kernel.diagonal())
        error = float((inner.diagonal() - 2 * (inner * w).sum(0) + (w * (inner @ w)).sum(0)).mean())
        fits.append((error, penalty, kernel))
    error, penalty, kernel = min(fits, key=lambda fit: fit[0])
    coordinates = torch.linalg.eigh(inner).eigenvectors.flip(1)[:, : min(PRIOR_RANK, count - 1)].float()
    # the constant subtracted from the kernel cancels here, because the columns of centred_rays sum to 0
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
