"""What guide 3 is judged by: the projection error, the scores of a sampled volume, their table, and the figures."""

import numpy as np
import torch

import drr_projector as drr
from logging_utils import print_table


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


COLUMNS = ("axial", "coronal", "sagittal", "pa", "lat")


def draw_rows(rows: list[tuple[str, list]]):
    """A matplotlib figure: one row of pictures per name, the columns as in COLUMNS; None leaves a place free. Slices
    are shown from -1000 to 1000 HU, projections of one column on the scale of its first."""
    from matplotlib.figure import Figure

    columns = max(len(pictures) for _, pictures in rows)
    figure = Figure(figsize=(2.2 * columns + 1, 2.3 * len(rows) + 0.3))
    axes = figure.subplots(len(rows), columns, squeeze=False)
    scales: list = [(-1.0, 0.0)] * 3 + [None] * 2
    for line, (name, pictures) in zip(axes, rows, strict=True):
        line[0].set_ylabel(name, fontsize=9)
        for place, cell in enumerate(line):
            cell.set_xticks([])
            cell.set_yticks([])
            picture = pictures[place] if place < len(pictures) else None
            if line is axes[0]:
                cell.set_title(COLUMNS[place], fontsize=9)
            if picture is None:
                for side in cell.spines.values():
                    side.set_visible(False)
                continue
            xray = name.startswith("X-ray")  # grey values, on their own scale
            if scales[place] is None:
                scales[place] = float(picture.min()), float(picture.max())
            low, high = (-1.0, 1.0) if xray else scales[place]
            high = high if not xray else float(picture.max())
            cell.imshow(picture, cmap="gray", vmin=low, vmax=high, aspect="auto")
    figure.subplots_adjust(
        left=0.08, right=0.99, bottom=0.01, top=1 - 0.3 / (2.3 * len(rows) + 0.3), wspace=0.03, hspace=0.05
    )
    return figure


def xray_row(pictures: torch.Tensor) -> tuple[str, list]:
    """The X-rays (views, H, W) under the columns of their views."""
    return "X-rays", [None, None, None, *(picture.cpu().numpy() for picture in pictures)]


def draw_result(shown: dict, args):
    """True and sampled volume of one patient, of every stage, and the projections of each above the X-rays."""
    batch, views = shown["batch"], drr.VIEWS[: args.num_views]
    extent, true = batch["extent"][:1], batch["volume"][:1]

    def row(volume: torch.Tensor) -> list[np.ndarray]:
        spacing = drr.spacing_of(extent, volume.shape[2:])
        shadows = [drr.project(volume, spacing, view)[0, 0].cpu().numpy() for view in views]
        return middle_slices(volume[0, 0]) + shadows

    rows = [("true CT, its DRRs", row(true))]
    for stage, volume in reversed(list(zip(args.stage_configs, shown["volumes"], strict=False))):
        rows.append((f"sampled, {stage['name']}", row(volume)))
    rows += [("mean volume", row(shown["mean"])), ("back-projection", row(shown["back"]))]
    return draw_rows([*rows, xray_row(batch["xrays"][0])])
