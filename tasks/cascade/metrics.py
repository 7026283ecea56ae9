"""What guide 3 is judged by: the projection error, the scores of a sampled volume, and the baselines beside them."""

import math

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from tasks.cascade.agreement import line_integrals
from tasks.cascade.alignment import GreyFit
from tasks.cascade.projector import back_project, hu_difference, project, resize
from tasks.cascade.projector import spacing_of, to_hu

# -900 HU in -1..1; what lies lower counts as air.
AIR = -0.95
# The scores of a volume; then come those of its projections, one for each view.
SCORES = ("psnr", "ssim", "mae_hu", "gradient_error")
# Those of the LIDC literature, of the cascade's own answers alone: a figure of a rival is not published.
FIELD_SCORES = ("psnr_0_2500", "ssim_0_2500")
OWN_KINDS = ("", "_mean_of_samples", "_one_step")
# What follows a score's name for a volume that is judged, and what its row is called.
CASCADE = {"": "cascade"}
REGRESSED = {"": "regression"}
BASELINES = {
    "_mean_volume": "mean volume",
    "_backprojection": "back-projection",
}
RIVALS = {
    "_mean_consistent": "mean volume, made to agree",
    "_backprojection_consistent": "back-projection, made to agree",
}
START = {"_start": "stage 1's start, on the last grid"}
ONE_STEP = {"_one_step": "cascade, in one step a stage"}
FREE = {"_free": "held at each start alone"}
REGRESSION = {"_regression": "regression"}
# The end of the range of HU + 1000 in which published figures on LIDC are taken.
FIELD_MAX = 2500
# The scores of --check_conditioning.
CHECKS = {
    "psnr_other_patient": "X-rays of another patient",
    "psnr_previous_zeroed": "stage before zeroed",
}
# The share of the true voxels of the body that an interval of the samples holds, and that it is made to hold.
COVERAGES = {"coverage_50": 0.5, "coverage_70": 0.7, "coverage_90": 0.9, "coverage_95": 0.95}


def mean_of_samples(num_samples: int) -> dict[str, str]:
    """The name and the row of the mean of several samples; empty for one."""
    if num_samples == 1:
        return {}
    return {"_mean_of_samples": f"mean of {num_samples} samples"}


def earlier_stages(names: list[str]) -> dict[str, str]:
    """The names and rows of the stages before the last, on its grid."""
    return {f"_of_{name}": f"{name}, on the last grid" for name in names[:-1]}


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
    for k, fit in enumerate(greys):
        projection = fit.slope * project(volume, spacing, fit.view) + fit.offset
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
    spacing = spacing_of(batch["extent"], size)
    integrals = line_integrals(batch["xrays"], greys)
    return back_project(integrals, spacing, size, tuple(fit.view for fit in greys))


def gradient_magnitude(volume: Tensor) -> Tensor:
    """(B,): the mean length of the gradient, by differences of neighbours, of volumes (B, 1, X, Y, Z)."""
    sides = volume.shape[2:]
    squares = []
    for axis in (2, 3, 4):
        steps = volume.diff(dim=axis)
        # as many as along the other axes
        for other, length in enumerate(sides, start=2):
            if other != axis:
                steps = steps.narrow(other, 0, length - 1)
        squares.append(steps.square())
    lengths = torch.stack(squares).sum(0).sqrt()
    return lengths.mean((1, 2, 3, 4))


def field_scores(volume: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """(PSNR in dB, SSIM), each (B,), of volumes (B, 1, X, Y, Z) in -1..1, as the LIDC literature counts.

    CTs are HU + 1000, clipped to 0..2500. The PSNR is of the whole volume, with 2500 as the peak. The SSIM is that of
    2D slices, with sample covariances in uniform windows of 7^2 inside the slice; its mean over the slices of an axis,
    and then over the three axes.
    """
    psnrs = []
    ssims = []
    for one, other in zip(volume, true, strict=True):
        x = field_range(one[0])
        y = field_range(other[0])
        error = (x - y).square().mean().clamp(min=1e-10)
        psnrs.append(-10 * error.log10())

        # slices along each axis
        by_axis = []
        for axis in range(3):
            slices = x.movedim(axis, 0)
            by_axis.append(slice_ssim(slices, y.movedim(axis, 0)))
        ssims.append(torch.stack(by_axis).mean())
    return torch.stack(psnrs), torch.stack(ssims)


def field_range(volume: Tensor) -> Tensor:
    """-1..1 -> HU + 1000 clipped to 0..2500, as 0..1."""
    above_air = to_hu(volume.float()) + 1000
    return (above_air / FIELD_MAX).clamp(0, 1)


def slice_ssim(x: Tensor, y: Tensor) -> Tensor:
    """The mean SSIM (Wang et al. 2004) of slices (count, rows, columns) in 0..1."""
    # a window of odd size that fits into a slice
    shortest = min(x.shape[1:])
    window = min(7, shortest - 1 + shortest % 2)
    pixels = window**2

    def mean(values: Tensor) -> Tensor:
        return avg_pool2d(values[:, None], window, stride=1)[:, 0]

    # moments within each window
    mean_x = mean(x)
    mean_y = mean(y)
    sample = pixels / (pixels - 1)
    square_x = mean_x.square()
    square_y = mean_y.square()
    product = mean_x * mean_y
    variance_x = sample * (mean(x.square()) - square_x)
    variance_y = sample * (mean(y.square()) - square_y)
    covariance = sample * (mean(x * y) - product)

    # the two constants of the paper
    first = 0.01**2
    second = 0.03**2
    luminance = (2 * product + first) / (square_x + square_y + first)
    structure = (2 * covariance + second) / (variance_x + variance_y + second)
    return (luminance * structure).mean()


def measure(
    volume: Tensor,
    batch: dict,
    greys: list[GreyFit],
    field: bool = False,
) -> Tensor:
    """(B, len(SCORES) + views) float64: SCORES and each view's projection error; with `field` FIELD_SCORES, too.

    PSNR (dB, range -1..1), SSIM, MAE (HU), and by which share the mean gradient is longer than the true volume's: below
    0 the volume is too soft, above 0 too grainy. A projection error is the root mean square of the difference to the
    X-ray, in line integrals.
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
    gradient = gradient_magnitude(volume)
    columns = [
        psnr(volume, true)[:, 0],
        ssim(volume, true)[:, 0],
        hu_difference(difference),
        gradient / gradient_magnitude(true) - 1,
    ]

    # from grey values to line integrals
    errors = projection_error(volume, batch["extent"], batch["xrays"], greys)
    for k, fit in enumerate(greys[: errors.shape[1]]):
        columns.append(errors[:, k].sqrt() / abs(fit.slope))
    if field:
        columns += field_scores(volume, true)
    columns = [column.double().cpu() for column in columns]
    return torch.stack(columns, 1)


def half_interval(samples: Tensor, nominal: float) -> Tensor:
    """(B, 1, X, Y, Z): half of the width of the interval around the mean of samples (K, B, 1, X, Y, Z).

    It is to hold another sample, and so the truth, with the nominal probability: Student's t with K - 1 degrees of
    freedom, widened as the mean is uncertain, too.
    """
    from scipy.stats import t as student_t

    count = len(samples)
    quantile = float(student_t.ppf((1 + nominal) / 2, count - 1))
    widened = math.sqrt(1 + 1 / count)
    return quantile * widened * samples.std(0)


def coverage(samples: Tensor, true: Tensor, nominal: float) -> Tensor:
    """(B,) float64: the share of the true voxels, but for those of air, within the samples' interval.

    Air is clipped, in the samples and in the truth, and would count for most voxels.
    """
    inside = (samples.mean(0) - true).abs() <= half_interval(samples, nominal)
    body = true > AIR
    within = (inside & body).double().sum((1, 2, 3, 4))
    voxels = body.double().sum((1, 2, 3, 4))
    share = within / voxels.clamp(min=1)
    return share.cpu()


def score_names(
    split: str,
    views: list[str],
    kinds: dict[str, str],
    more: list[str],
) -> list[str]:
    """The names of a patient's scores: those of `measure` for each of some kinds of volumes, and more."""
    scores = [*SCORES, *(f"projection_error_{view}" for view in views)]
    names = []
    for kind in kinds:
        field = FIELD_SCORES if kind in OWN_KINDS else ()
        names += [f"{score}{kind}" for score in (*scores, *field)]
    return [f"{split}/{name}" for name in (*names, *more)]
