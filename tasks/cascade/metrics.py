"""What guide 3 is judged by: the projection error, the scores of a sampled volume, their table, and the figures."""

import numpy as np
import torch

from figure_utils import figure_text
from logging_utils import print_table
from tasks.cascade import projector as drr


def projection_error(
    volume: torch.Tensor, extent: torch.Tensor, xrays: torch.Tensor, greys: list[tuple[float, float, float]]
) -> torch.Tensor:
    """(B, views) mean square difference, in grey values of -1..1, between a volume's projections and the X-rays.

    volume (B, 1, X, Y, Z); extent (B, 3) mm; xrays (B, views, H, W); greys: the set's (a, b, r) with grey = a * line
    integral + b, so that both sides are in the X-ray's units.
    """
    spacing = drr.spacing_of(extent, volume.shape[2:])
    errors = []
    for k, (view, (a, b, _)) in enumerate(zip(drr.VIEWS, greys, strict=False)):
        shadow = a * drr.project(volume, spacing, view) + b
        errors.append((shadow - drr.resize(xrays[:, k : k + 1], shadow.shape[-2:])).square().mean((1, 2, 3)))
    return torch.stack(errors, 1)


def measure(volume: torch.Tensor, batch: dict, greys) -> torch.Tensor:
    """(B, 3 + views) float64: PSNR (dB, range -1..1), SSIM, MAE (HU), and each view's projection error: the root mean
    square of the difference to the X-ray, in line integrals."""
    from monai.metrics import PSNRMetric, SSIMMetric

    true = batch["volume"]
    window = min(7, *(n - 1 + n % 2 for n in true.shape[2:]))
    ssim = SSIMMetric(spatial_dims=3, data_range=2.0, kernel_type="uniform", win_size=window)
    columns = [PSNRMetric(max_val=2.0)(volume, true)[:, 0], ssim(volume, true)[:, 0]]
    columns.append((volume - true).abs().mean((1, 2, 3, 4)) * ((drr.HU_MAX - drr.HU_MIN) / 2))
    errors = projection_error(volume, batch["extent"], batch["xrays"], greys).sqrt()
    columns += [errors[:, v] / abs(greys[v][0]) for v in range(errors.shape[1])]
    return torch.stack([column.double().cpu() for column in columns], 1)


def print_metrics(title: str, split: str, metrics: dict[str, float]) -> None:
    """Rank 0: the scores of the cascade beside those of the two baselines."""
    rows: dict[str, dict[str, float]] = {}
    for kind, name in (("", "cascade"), ("_mean_volume", "mean volume"), ("_backprojection", "back-projection")):
        cells = {}
        for column in ("psnr", "ssim", "mae_hu", "projection_error_pa", "projection_error_lat"):
            if f"{split}/{column}{kind}" in metrics:
                cells[column.replace("projection_error", "projection")] = metrics[f"{split}/{column}{kind}"]
        rows[name] = cells
    for name, text in (("other_patient", "X-rays of another patient"), ("previous_zeroed", "stage before zeroed")):
        if f"{split}/psnr_{name}" in metrics:
            rows[text] = {"psnr": metrics[f"{split}/psnr_{name}"]}
    print_table(title, rows)


def middle_slices(volume: torch.Tensor) -> list[np.ndarray]:
    """Axial, coronal and sagittal slices through the middle of (X, Y, Z), as one looks at them (front up, head up)."""
    volume = volume.float().cpu()
    x, y, z = (n // 2 for n in volume.shape)
    axial = volume[:, :, z].transpose(0, 1).flip(0, 1)
    return [axial.numpy(), drr.as_picture(volume[:, y]).numpy(), drr.as_picture(volume[x]).numpy()]


SLICES = ("axial slice", "coronal slice", "sagittal slice")
PLACES = {"pa": "frontal", "lat": "lateral"}


def draw_rows(heading: str, columns: list[str], rows: list[tuple[str, list]]):
    """A matplotlib figure: one row of images per name, below the columns' titles; None leaves a place free.

    The first three columns are slices, shown from -1000 to 1000 HU. A row whose name begins with "input" shows grey
    values; other projections of one column are on the scale of its first.
    """
    from matplotlib.figure import Figure

    width, height = 2.2 * len(columns) + 1, 2.3 * len(rows) + 0.8
    figure = Figure(figsize=(width, height))
    figure.suptitle(heading, fontsize=11, y=1 - 0.12 / height)
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    scales: list = [(-1.0, 0.0)] * 3 + [None] * 2
    for k, (name, images) in enumerate(rows):
        axes[k, 0].set_ylabel(name, fontsize=9)
        for place, cell in enumerate(axes[k]):
            cell.set(xticks=[], yticks=[])
            if k == 0:
                cell.set_title(columns[place], fontsize=9)
            image = images[place] if place < len(images) else None
            if image is None:
                for side in cell.spines.values():
                    side.set_visible(False)
                continue
            grey_values = place >= 3 and name.startswith("input")
            if scales[place] is None and not grey_values:
                scales[place] = float(image.min()), float(image.max())
            low, high = (-1.0, float(image.max())) if grey_values else scales[place]
            cell.imshow(image, cmap="gray", vmin=low, vmax=high, aspect="auto")
    figure.subplots_adjust(left=0.6 / width, right=0.99, bottom=0.01, top=1 - 0.75 / height, wspace=0.03, hspace=0.05)
    return figure


def draw_result(shown: dict, args):
    """X-rays, true and sampled volume of one patient, of every stage, and the projections of each volume."""
    batch, views = shown["batch"], drr.VIEWS[: args.num_views]
    extent, true = batch["extent"][:1], batch["volume"][:1]

    def row(volume: torch.Tensor) -> list[np.ndarray]:
        spacing = drr.spacing_of(extent, volume.shape[2:])
        shadows = [drr.project(volume, spacing, view)[0, 0].cpu().numpy() for view in views]
        return middle_slices(volume[0, 0]) + shadows

    rows = [("input X-rays", [None, None, None, *(image.cpu().numpy() for image in batch["xrays"][0])])]
    rows.append(("true CT", row(true)))
    for stage, volume in reversed(list(zip(args.stage_configs, shown["volumes"], strict=False))):
        size = " x ".join(map(str, volume.shape[2:]))
        rows.append((f"sample of {figure_text(stage['name'], 16)}\n{size}", row(volume)))
    rows += [("mean of the training CTs", row(shown["mean"])), ("back-projected X-rays", row(shown["back"]))]
    columns = [*SLICES, *(f"{PLACES[view]} projection" for view in views)]
    return draw_rows("one patient: middle slices, and the projections beside the X-rays", columns, rows)
