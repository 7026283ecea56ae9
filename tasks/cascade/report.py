"""Test results of X-ray to CT reconstruction: the table of scores, the figure, and volumes as NIfTI files."""

import gzip
import json
import math
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import distributed_utils as du
from tasks.cascade.geometry import HU_MIN, HU_PER_UNIT, VIEWS, Grey, project
from utils import stats
from utils.checkpoint import write_atomically
from utils.cli import InputError, RunError

BASELINES = ("linear posterior", "mean volume", "back-projection", "nearest patient")
# display windows, scaled like volumes (-1..1): -1000 to 400 HU for slices, -300 to 300 HU for differences
WINDOW, DIFFERENCE = (-1.0, -0.3), 0.15


def name_of(row: str) -> str:
    """Return the prefix of a row's metric names: "" for the main result, "rival/<method>/" for a baseline, "<method>/"
    for other variants of the cascade.
    """
    name = re.sub("[, -]+", "_", row.replace("'s", ""))
    if row.startswith(BASELINES):
        return f"rival/{name}/"
    return "" if row in ("one step", "regression") else f"{name}/"


def print_test(
    table: dict[str, dict[str, np.ndarray]], grid: str, rival_run: str | None, digest: str
) -> dict[str, float]:
    """Print the table of test scores on rank 0; return {metric name: value}.

    table: {row label: {column name: scores (patients,)}}. grid: voxel grid, for the title. rival_run: folder of another
    run to add as a row, or None. digest: hash of this run's patient split. Raises InputError if rival_run cannot be
    used.
    """
    rows, metrics = {}, {}
    for row, columns in table.items():
        rows[row] = {column: float(np.nanmean(values)) for column, values in columns.items()}
        metrics |= {f"test/{name_of(row)}{column}": mean for column, mean in rows[row].items()}
        if row == "one sample":
            # a sample from the exact posterior has twice the mean squared error of the posterior mean, because the
            # sample and the true volume both vary around the mean
            perfect = metrics["test/perfect_sample/psnr"] = metrics["test/psnr"] - 10 * math.log10(2)
            rows["one perfect sample"] = {"psnr": perfect}
    header = list(next(iter(rows.values())))
    if rival_run:
        rows |= read_rival(Path(rival_run), digest, header)

    psnr = {row: columns["psnr"] for row, columns in table.items()}
    patients = range(len(next(iter(psnr.values()))))
    title = f"test, {len(patients)} patient{'s' * (len(patients) > 1)}, {grid}"
    lines = [f"{title:<28}" + "".join(f"{column:>9}" for column in header)]
    digits = {column: 0 if column.endswith("hu") else 2 if column == "psnr" else 3 for column in header}
    for row, means in rows.items():
        cells = [f"{means[column]:9.{digits[column]}f}" if column in means else f"{'-':>9}" for column in header]
        lines.append(f"{row:<28}" + "".join(cells))

    strongest = max((row for row in psnr if row.startswith(BASELINES)), key=lambda row: psnr[row].mean())
    baselines = {"strongest_rival": strongest, "another_patient": "another patient's X-rays"}
    for own in ("regression", "one step", "one sample"):
        for name, other in baselines.items() if own in psnr else ():
            lead = psnr[own] - psnr[other]
            low, high = stats.interval_of_mean(lead, patients, bounded=False)
            key = f"test/{name_of(own)}psnr_above_{name}"
            metrics |= {key: float(lead.mean()), f"{key}_low": low, f"{key}_high": high}
            if own != "one sample" or other == strongest:
                lines.append(f"{own}: {stats.shown(lead.mean(), low, high, '+', digits=2)} dB above {other}")
    coverage = metrics.get("test/one_sample/coverage_90")
    if coverage is not None:
        lines.append(f"the 90 % interval of the samples holds {coverage:.1%} of the true voxels of the body")
    du.print_main("\n".join(lines))
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def read_rival(folder: Path, digest: str, columns: list[str]) -> dict[str, dict[str, float]]:
    """Read another run's test scores from its folder (--rival_run) as {row label: {column name: mean score}}.

    digest: hash of this run's patient split. Raises InputError if there is no readable summary.json or if the other run
    has a different patient split.
    """
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{folder}: no summary.json of a finished run; check --rival_run") from None
    if digest not in found.get("training patients", ""):
        raise InputError(f"{folder}: a run on other patients; check --rival_run")
    return {f"{folder.name} (--rival_run)": {c: found[f"test/{c}"] for c in columns if f"test/{c}" in found}}


# --- figure of one test patient ---------------------------------------------------------------------------------------


def slices_of(volume: Tensor) -> list[Tensor]:
    """Return the middle slices of a volume (X, Y, Z) as [frontal, lateral, axial].

    The frontal slice is seen from the patient's front, the lateral slice from the left and the axial slice from the
    feet.
    """
    x, y, z = (side // 2 for side in volume.shape)
    return [volume[:, y].T.flip(0, 1), volume[x].T.flip(0, 1), volume[:, :, z].T.flip(0, 1)]


def draw(rows: dict[str, Tensor], batch: dict, true: Tensor, greys: list[Grey]):
    from matplotlib.figure import Figure

    own = [row for row in ("regression", "one step", "one sample") if row in rows]
    volumes = {"true CT": true} | {row: rows[row] for row in (*own, "linear posterior, consistent")}
    views = range(len(greys))
    greys_shown = [(float(image.min()), float(image.max())) for image in batch["xrays"][0]]
    titles = [f"X-ray, {VIEWS[view]}" for view in views] + ["frontal slice", "lateral slice", "axial slice", "error"]
    figure = Figure(figsize=(1.9 * len(titles), 2.0 * len(volumes) + 0.4), layout="constrained")
    axes = figure.subplots(len(volumes), len(titles), squeeze=False)
    for line, (name, volume) in zip(axes, volumes.items(), strict=True):
        first = volume[:1].float()
        images = [batch["xrays"][0, view] for view in views]
        if name != "true CT":
            images = [
                grey.slope * project(first, batch["extent"][:1], view)[0, 0] + grey.offset
                for view, grey in enumerate(greys)
            ]
        pictures = [(image, *greys_shown[view]) for view, image in zip(views, images, strict=True)]
        pictures += [(part, *WINDOW) for part in slices_of(first[0, 0])]
        pictures.append((slices_of((first - true[:1])[0, 0])[0], -DIFFERENCE, DIFFERENCE))
        for ax, title, (picture, low, high) in zip(line, titles, pictures, strict=True):
            is_error = title == "error"
            ax.imshow(picture.cpu().numpy(), cmap="RdBu_r" if is_error else "gray", vmin=low, vmax=high)
            ax.set(xticks=[], yticks=[])
            if name == "true CT":
                ax.set_title(f"error, ±{DIFFERENCE * HU_PER_UNIT:.0f} HU" if is_error else title, fontsize=9)
        line[0].set_ylabel(name.replace(", ", "\n"), fontsize=9)
    return figure


# --- NIfTI files ------------------------------------------------------------------------------------------------------


def write_volume(path: Path, volume: Tensor, extent: list[float], is_difference: bool = False) -> None:
    """Write a volume (X, Y, Z) with values in [-1, 1] to a NIfTI file in integer HU, centred at 0 mm.

    extent: (3,), field of view in mm. is_difference: whether to scale without an offset, for differences and standard
    deviations of volumes. Raises RunError if the file cannot be written.
    """
    import nibabel

    hu = volume * HU_PER_UNIT if is_difference else (volume + 1) * HU_PER_UNIT + HU_MIN
    values = hu.round().to(torch.int16).cpu().numpy()
    voxel = np.array(extent) / values.shape
    affine = np.diag([*voxel, 1.0])
    affine[:3, 3] = -voxel * (np.array(values.shape) - 1) / 2
    image = nibabel.Nifti1Image(values, affine)
    image.header.set_xyzt_units("mm")
    try:
        write_atomically(path, lambda file: file.write(gzip.compress(image.to_bytes())))
    except OSError as error:
        raise RunError(f"{path}: not written ({error.strerror}); make room") from None
