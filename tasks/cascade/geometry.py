"""Geometry of X-ray to CT reconstruction: projection of volumes, correction to match X-rays, and ridge regression.

Axes: a volume (..., X, Y, Z) is in RAS+ orientation: x increases to the patient's right, y to the front, z to the head.
Its values are HU clipped to -1000..3000 and scaled to -1..1. The voxel grid spans the CT's whole field of view, with
any number of voxels.

Views: rays are parallel and cross the whole field of view, along y in the frontal view ("pa") and along x in the
lateral view ("lat"). An image (..., rows, columns) shows the head at the top; its left edge is the patient's right side
in the frontal view and the patient's front in the lateral view. A plane contains the same values as an image, but in
the order of the volume's axes: (..., X or Y, Z).

Values: the line integral along a ray is the sum of mu * path length over the voxels that it crosses, where mu =
MU_WATER * (1 + HU / 1000) is the attenuation per mm. Line integrals are therefore linear in the volume. DRR files
(X-rays simulated from CTs) store line integrals of 0..P_MAX as grey values of 0..255, so that bone is white.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

HU_MIN, HU_MAX = -1000.0, 3000.0
HU_PER_UNIT = (HU_MAX - HU_MIN) / 2
# attenuation coefficient of water per mm, at a photon energy of about 70 keV
MU_WATER = 0.0193
MU_PER_UNIT = MU_WATER * HU_PER_UNIT / 1000
P_MAX = 10.0
VIEWS = ("pa", "lat")
# axis of a volume (B, C, X, Y, Z) along which the rays run, for each view in VIEWS
RAYS = (3, 2)
# lower limit for the standard deviation of the noise in line integrals, to allow for fp32 rounding errors
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

    When shrinking, each new voxel is the mean of the old voxels, weighted by overlap. When enlarging, new voxels are
    interpolated linearly.
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
    """Resize an image to the voxel grid `size` and repeat it along the rays of its view.

    image: (B, C, rows, columns). size: (X, Y, Z). Returns (B, C, X, Y, Z).
    """
    axis = RAYS[view]
    plane = as_plane(resize(image, (size[2], size[3 - axis])))
    return plane.unsqueeze(axis).expand(*image.shape[:2], *size)


def project(volume: Tensor, extent: Tensor, view: int) -> Tensor:
    """Return the line integrals (B, C, rows, columns) of one view through volumes (B, C, X, Y, Z) with values in -1..1.

    extent: field of view (B, 3) in mm. view: 0 for frontal, 1 for lateral. Differentiable.
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


# --- agreement of volumes with X-rays ---------------------------------------------------------------------------------


class Grey(NamedTuple):
    """Linear relation of one view's grey values (-1..1) to line integrals: grey value = slope * line integral + offset.

    noise: standard deviation of the X-ray's noise, in units of line integrals.
    """

    slope: float
    offset: float
    noise: float


class RaySums(NamedTuple):
    """X-rays converted to sums of voxel values (-1..1) along the rays through a voxel grid.

    sums: for each view, a plane (B, 1, X or Y, Z) of sums. noise: for each view, the variance (B, 1, 1, 1) of the noise
    in the sums.
    """

    sums: list[Tensor]
    noise: list[Tensor]


def ray_sums(xrays: Tensor, extent: Tensor, greys: list[Grey], size: tuple | list) -> RaySums:
    """Convert X-rays (B, views, H, W) in -1..1 to sums of voxel values along the rays through a voxel grid.

    extent: field of view (B, 3) in mm. greys: relation of grey values to line integrals in each view. size: number of
    voxels (X, Y, Z).
    """
    sums, noise = [], []
    for view, grey in enumerate(greys):
        axis = RAYS[view]
        count = size[axis - 2]
        # increase of the line integral when the value of one voxel increases by 1
        unit = extent[:, axis - 2, None, None, None] * (MU_PER_UNIT / count)
        integral = resize((xrays[:, view : view + 1] - grey.offset) / grey.slope, (size[2], size[3 - axis]))
        sums.append(as_plane(integral) / unit - count)
        noise.append((max(grey.noise, LEAST_NOISE) / unit) ** 2)
    return RaySums(sums, noise)


@torch.no_grad()
def make_consistent(volume: Tensor, xrays: RaySums, variance: float, corrections: int) -> Tensor:
    """Correct volumes (B, 1, X, Y, Z) in -1..1 so that they agree with the X-rays within the X-rays' noise.

    xrays: sums of voxel values along rays, from ray_sums(). variance: expected squared error of a voxel before
    correction. corrections: number of iterations. Gradients are not tracked.

    Let A be the matrix that sums a volume V along the rays, and A' its transpose. If each voxel of V has an independent
    error of variance c and the ray sums y of the X-rays have noise of variance N, the best linear correction is

        V + c A' z, where z = (c A A' + N)^-1 (y - A V)

    For two views, z is computed exactly: in each axial slice, the two sums of z, one over the rays of each view, solve
    a 2 x 2 system. The corrected volume is clipped to -1..1, because nothing is less dense than air, so it no longer
    satisfies y - A V = N z exactly. Each further iteration therefore corrects the remaining difference y - A V - N z,
    where z is accumulated over the iterations and N z is the part of y that is attributed to noise.
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
                # the determinants of the 2 x 2 systems are expanded by hand: subtracting the products numerically would
                # lose precision
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


# --- linear posterior: ridge regression from X-rays to volumes --------------------------------------------------------


class Prior(NamedTuple):
    """Linear posterior: a ridge regression that predicts a volume from X-rays, fitted to N training patients.

    The prediction is mean + sum over training patients i of w_i * (volume_i - mean), where the weights w_i are linear
    in the X-rays. The X-rays enter as P ray means: the mean voxel value along each ray of all views, see rays_of().

    grid: number of voxels (X, Y, Z). greys: relation of grey values to line integrals in each view. penalty: ridge
    penalty relative to the mean squared norm of the centred ray means. variance: variance of a voxel across the
    patients. error: leave-one-out mean squared error of a voxel. mean (1, 1, X, Y, Z): mean training volume. basis (R,
    X, Y, Z): principal directions of the training volumes, not normalized. centre (P,): ray means of the mean volume.
    gain (R, P): matrix that maps centred ray means to coefficients of the basis.

    Three more tensors, described below, are needed only to leave a training patient out when predicting that patient's
    own volume. Checkpoints store None instead, because these tensors reveal the CTs of individual patients.
    coordinates (N, R): coordinates of the training patients in the basis. weights (N, P): matrix that maps centred ray
    means to w. kernel (N, N): inverse of the penalized Gram matrix of the centred ray means, minus a constant.
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
        """Predict volumes (B, 1, *size) in -1..1 from X-rays (B, views, H, W) in -1..1.

        extent: field of view (B, 3) in mm. rows (B,): index of the training patient to leave out of each prediction, or
        -1 for none. A regression loaded from a checkpoint ignores `rows`.
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
    """Convert X-rays (B, views, H, W) in -1..1 to ray means (B, P).

    A ray mean is the mean voxel value (-1..1) along a ray; P is the number of rays in all views together. greys:
    relation of grey values to line integrals in each view. extent: field of view (B, 3) in mm. grid: number of voxels
    (X, Y, Z).
    """
    sums = ray_sums(xrays, extent, greys, grid).sums
    return torch.cat([(plane / grid[axis - 2]).flatten(1) for axis, plane in zip(RAYS, sums, strict=False)], 1)


def learn_prior(volumes: Tensor, rays: Tensor, greys: list[Grey]) -> Prior:
    """Fit the linear posterior, a ridge regression from X-rays to volumes, to N training patients.

    volumes: (N, X, Y, Z) in -1..1. rays: (N, P), mean voxel values along rays, from rays_of().

    The penalty is chosen to minimize the leave-one-out error, which has a closed form. A patient who is left out must
    also be removed from the mean volume. The patients' weights sum to 0, so a weight of -1 / N for the left-out patient
    cancels that patient's share of the mean, 1 / N.
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
    # subtracting a constant from every element of the kernel does not change this product: centred_rays has zero column
    # sums
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
