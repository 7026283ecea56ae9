"""Volumes that agree with their X-rays: corrected until their projections are what was measured.

A volume V is an estimate whose error has the variance C, a number for each voxel or for all. The X-rays measure
y = A V, A being the line integrals of all views, with noise of the variance N. The best linear correction is then
V + C A' z with z = (A C A' + N)^-1 (y - A V). This system is solved by a few rounds of conjugate gradients, as in
decomposed diffusion sampling (Chung et al. 2024). Nothing is thinner than air, so the result is clipped and corrected
again: by the z that is still lacking, as N z of what is measured is noise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from old.fixed_order_utils import interpolate
from tasks.cascade.alignment import GreyFit
from tasks.cascade.projector import project, project_back, resize, spacing_of, sum_of_rays_back, sum_rays
from tasks.cascade.rays import image_shape
from tasks.cascade.views import View

# Rounds of conjugate gradients in a correction, and how often a volume is corrected and clipped.
ROUNDS = 6
CORRECTIONS = 2
# Of a volume that is not refined any more.
LAST_CORRECTIONS = 4
# The same of the rivals, which nobody trains: many short corrections, until little changes.
RIVAL_ROUNDS = 2
RIVAL_CORRECTIONS = 30
RIVAL_VARIANCE = 0.1**2
# No line integral is known better, as fp32 rounds sums: what two views contradict each other by is noise, at least.
LEAST_NOISE = 1e-4


class Prior(NamedTuple):
    """What a cascade knows before it sees a patient: from the training patients, kept in its checkpoints.

    greys: how each view's grey values follow from line integrals. mean, variance: of a volume, (1, 1, X, Y, Z) on the
    first stage's grid. std: how far what the first stage starts from is from the true volume, root mean square.
    """

    greys: list[GreyFit]
    mean: Tensor
    variance: Tensor
    std: float


def prior_state(prior: Prior) -> dict:
    """What a checkpoint holds of it."""
    greys = [(tuple(fit.view), *fit[1:]) for fit in prior.greys]
    return prior._replace(greys=greys, mean=prior.mean.cpu(), variance=prior.variance.cpu())._asdict()


def prior_of(checkpoint: dict) -> Prior:
    """The prior that a cascade was trained with, on the CPU."""
    state = checkpoint["prior"]
    greys = [GreyFit(View(*view), *numbers) for view, *numbers in state["greys"]]
    return Prior(greys, state["mean"], state["variance"], state["std"])


class Measured(NamedTuple):
    """What the X-rays of some patients say of volumes on one grid.

    Of each of the views: integrals (B, 1, rows, columns), and noise, the standard deviation of a line integral.
    spacing: (B, 3) mm per voxel.
    """

    views: list[View]
    integrals: list[Tensor]
    noise: list[float]
    spacing: Tensor


def line_integrals(xrays: Tensor, greys: list[GreyFit]) -> list[Tensor]:
    """Of each view (B, 1, H, W), what the grey values of X-rays (B, views, H, W) in -1..1 stand for."""
    integrals = []
    for k, fit in enumerate(greys):
        image = xrays[:, k : k + 1]
        integrals.append((image - fit.offset) / fit.slope)
    return integrals


def measure_xrays(
    xrays: Tensor,
    extent: Tensor,
    greys: list[GreyFit],
    size: tuple[int, ...],
) -> Measured:
    """What X-rays (B, views, H, W) in -1..1 say of volumes of a size. extent: (B, 3), the field of view in mm."""
    integrals = []
    for fit, integral in zip(greys, line_integrals(xrays, greys), strict=True):
        integrals.append(resize(integral, image_shape(fit.view, size)))
    return Measured(
        views=[fit.view for fit in greys],
        integrals=integrals,
        noise=[max(fit.noise, LEAST_NOISE) for fit in greys],
        spacing=spacing_of(extent, size),
    )


def inner(first: list[Tensor], second: list[Tensor]) -> Tensor:
    """(B, 1, 1, 1): the inner product of each patient's images of all views."""
    total = 0
    for x, y in zip(first, second, strict=True):
        total = total + (x * y).sum((1, 2, 3), keepdim=True)
    return total


def spread(
    images: list[Tensor],
    measured: Measured,
    variance: Tensor | float,
    size: tuple[int, ...],
) -> Tensor:
    """C A' of images (B, 1, rows, columns) of all views: (B, 1, X, Y, Z)."""
    pairs = zip(images, measured.views, strict=True)
    first, *others = [project_back(image, measured.spacing, view, size) for image, view in pairs]
    return variance * sum(others, first)


def seen_again(
    images: list[Tensor],
    measured: Measured,
    variance: Tensor | float,
    size: tuple[int, ...],
) -> list[Tensor]:
    """A C A' of images (B, 1, rows, columns) of all views: images like them."""
    views = measured.views
    spacing = measured.spacing
    along_axes = all(view.ray_axis is not None for view in views)
    if not (along_axes and isinstance(variance, float)):
        added = spread(images, measured, variance, size)
        return [sum_rays(added, spacing, view) for view in views]

    # with one variance for all voxels, rays along the axes need no volume
    out = []
    for view in views:
        pairs = zip(images, views, strict=True)
        parts = [sum_of_rays_back(image, spacing, other, view, size) for image, other in pairs]
        out.append(variance * sum(parts))
    return out


def correct(
    volume: Tensor,
    measured: Measured,
    variance: Tensor | float,
    rounds: int,
    explained: list[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """(volumes (B, 1, X, Y, Z) corrected once, not clipped; z of each view, (B, 1, rows, columns)).

    variance: of the volumes' error, for all voxels or for each. explained: z of the corrections before.
    """
    spacing = measured.spacing
    size = volume.shape[2:]
    noise_variance = [noise**2 for noise in measured.noise]

    # what the volume's projections lack, but for noise
    residual = []
    for view, integral, noise, z in zip(measured.views, measured.integrals, noise_variance, explained, strict=True):
        residual.append(integral - project(volume, spacing, view) - noise * z)
    direction = residual
    solution = [torch.zeros_like(image) for image in residual]
    square = inner(residual, residual)
    # where nothing is lacking, nothing is added
    least = 1e-10 * square + 1e-20

    # conjugate gradients
    for _ in range(rounds):
        image = seen_again(direction, measured, variance, size)
        image = [seen + noise * x for seen, noise, x in zip(image, noise_variance, direction, strict=True)]
        step = square / (inner(direction, image) + least)
        solution = [x + step * y for x, y in zip(solution, direction, strict=True)]
        residual = [x - step * y for x, y in zip(residual, image, strict=True)]
        before = square
        square = inner(residual, residual)
        share = square / (before + least)
        direction = [x + share * y for x, y in zip(residual, direction, strict=True)]
    explained = [z + more for z, more in zip(explained, solution, strict=True)]
    return volume + spread(solution, measured, variance, size), explained


@torch.no_grad()
def agree(
    volume: Tensor,
    measured: Measured,
    variance: Tensor | float,
    rounds: int = ROUNDS,
    corrections: int = CORRECTIONS,
) -> Tensor:
    """The volumes (B, 1, X, Y, Z) in -1..1, fp32, that agree with the X-rays and are near to some others.

    variance: of the others' error, for all voxels or for each. No gradient passes.
    """
    with torch.autocast(volume.device.type, enabled=False):
        volume = volume.float()
        explained = [torch.zeros_like(integral) for integral in measured.integrals]
        for _ in range(corrections):
            volume, explained = correct(volume, measured, variance, rounds, explained)
            volume = volume.clamp(-1, 1)
        return volume


def made_consistent(volume: Tensor, measured: Measured) -> Tensor:
    """A rival without training: volumes that are corrected evenly along each ray until they agree with the X-rays."""
    exact = measured._replace(noise=[LEAST_NOISE] * len(measured.noise))
    return agree(volume, exact, RIVAL_VARIANCE, RIVAL_ROUNDS, RIVAL_CORRECTIONS)


def start_volume(
    prior: Prior,
    batch: dict,
    size: tuple[int, ...],
    agreement: bool,
) -> Tensor:
    """(B, 1, X, Y, Z): the mean of the training patients, made to agree with a batch's X-rays if that is asked.

    Corrected most where the training patients differ most from each other.
    """
    extent = batch["extent"]
    mean = interpolate(prior.mean, size).expand(len(extent), -1, -1, -1, -1)
    if not agreement:
        return mean
    measured = measure_xrays(batch["xrays"], extent, prior.greys, size)
    variance = interpolate(prior.variance, size)
    return agree(mean, measured, variance)
