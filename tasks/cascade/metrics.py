"""What guide 3 is judged by: the projection error, the scores of a sampled volume, and the baselines beside them."""

import torch
from torch import Tensor

from tasks.cascade.alignment import GreyFit
from tasks.cascade.projector import HU_MAX, HU_MIN, VIEWS, back_project, project, resize, spacing_of

# What follows a score's name for the cascade and for its two baselines.
KINDS = {
    "": "cascade",
    "_mean_volume": "mean volume",
    "_backprojection": "back-projection",
}
# The scores of --check_conditioning.
CHECKS = {
    "psnr_other_patient": "X-rays of another patient",
    "psnr_previous_zeroed": "stage before zeroed",
}


def projection_error(
    volume: Tensor,
    extent: Tensor,
    xrays: Tensor,
    greys: list[GreyFit],
) -> Tensor:
    """(B, views) mean square difference, in grey values of -1..1, between a volume's projections and the X-rays.

    volume (B, 1, X, Y, Z); extent (B, 3) mm; xrays (B, views, H, W); greys: of the data, so that both sides are in the
    X-ray's units.
    """
    spacing = spacing_of(extent, volume.shape[2:])
    errors = []
    for k, (view, fit) in enumerate(zip(VIEWS, greys, strict=False)):
        projection = fit.slope * project(volume, spacing, view) + fit.offset
        image = resize(xrays[:, k : k + 1], projection.shape[-2:])
        squares = (projection - image).square()
        errors.append(squares.mean((1, 2, 3)))
    return torch.stack(errors, 1)


def back_projection(
    batch: dict,
    greys: list[GreyFit],
    size: tuple[int, ...],
) -> Tensor:
    """(B, 1, X, Y, Z): the X-rays of a batch smeared back along their rays, the second baseline."""
    integrals = []
    for k, fit in enumerate(greys):
        image = batch["xrays"][:, k : k + 1]
        integrals.append((image - fit.offset) / fit.slope)
    spacing = spacing_of(batch["extent"], size)
    return back_project(integrals, spacing, size)


def measure(
    volume: Tensor,
    batch: dict,
    greys: list[GreyFit],
) -> Tensor:
    """(B, 3 + views) float64: PSNR (dB, range -1..1), SSIM, MAE (HU), and each view's projection error.

    The last is the root mean square of the difference to the X-ray, in line integrals.
    """
    from monai.metrics import PSNRMetric, SSIMMetric

    true = batch["volume"]
    psnr = PSNRMetric(max_val=2.0)

    # a window of odd size that fits into the volume
    odd_sides = [side - 1 + side % 2 for side in true.shape[2:]]
    ssim = SSIMMetric(
        spatial_dims=3,
        data_range=2.0,
        kernel_type="uniform",
        win_size=min(7, min(odd_sides)),
    )
    difference = (volume - true).abs().mean((1, 2, 3, 4))
    mae = difference * ((HU_MAX - HU_MIN) / 2)
    columns = [psnr(volume, true)[:, 0], ssim(volume, true)[:, 0], mae]

    # from grey values to line integrals
    errors = projection_error(volume, batch["extent"], batch["xrays"], greys)
    for k, fit in enumerate(greys[: errors.shape[1]]):
        columns.append(errors[:, k].sqrt() / abs(fit.slope))
    columns = [column.double().cpu() for column in columns]
    return torch.stack(columns, 1)


def score_names(
    split: str,
    num_views: int,
    checks: bool,
    first_stage: bool,
) -> list[str]:
    """The names of a patient's scores: those of `measure` for each of KINDS, and with `checks` those of CHECKS.

    The first stage has none before it that could be zeroed.
    """
    scores = ["psnr", "ssim", "mae_hu"]
    scores += [f"projection_error_{view}" for view in VIEWS[:num_views]]
    names = [f"{score}{kind}" for kind in KINDS for score in scores]
    if checks:
        names += list(CHECKS)[: 1 if first_stage else 2]
    return [f"{split}/{name}" for name in names]
