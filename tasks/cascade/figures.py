"""Guide 3's figures: what the model of a stage is given, what the cascade samples, and how sure it may be."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from old.figure_utils import figure_text
from tasks.cascade.agreement import line_integrals
from tasks.cascade.alignment import GreyFit
from tasks.cascade.data import Data
from tasks.cascade.diffusion import Diffusion, Draw, diffused
from tasks.cascade.metrics import COVERAGES
from tasks.cascade.plan import StagePlan
from tasks.cascade.projector import as_image, hu_difference, project, resize, spacing_of

# How two views are called; others by their own name.
VIEW_NAMES = {"pa": "PA", "lat": "lateral"}
# What differs by so much in line integrals, a tenth of a chest, is black or white.
DIFFERENCE = 0.5


class Example(NamedTuple):
    """The patient that is drawn; all tensors are on the CPU, with a batch of 1.

    volumes: (1, 1, X, Y, Z) of each of `kinds`, {end of a score's name: row}. samples: (K, 1, 1, X, Y, Z) of the last
    stage. extent: (1, 3) mm. greys: how each view's grey values follow from line integrals.
    """

    volumes: dict[str, Tensor]
    samples: Tensor
    true: Tensor
    xrays: Tensor
    extent: Tensor
    greys: list[GreyFit]
    kinds: dict[str, str]


def example_of(
    volumes: dict[str, Tensor],
    samples: Tensor,
    batch: dict,
    greys: list[GreyFit],
    kinds: dict[str, str],
) -> Example:
    """The first patient of a batch."""
    return Example(
        volumes={kind: volumes[kind][:1].cpu() for kind in kinds},
        samples=samples[:, :1].cpu(),
        true=batch["volume"][:1].cpu(),
        xrays=batch["xrays"][:1].cpu(),
        extent=batch["extent"][:1].cpu(),
        greys=greys,
        kinds=kinds,
    )


class Column(NamedTuple):
    """A column of a figure: its title, and the values that are shown black and white."""

    title: str
    black: float
    white: float


class Row(NamedTuple):
    """A row of a figure: its name, and an image for each column, None for a place that stays free."""

    name: str
    images: list[np.ndarray | None]


# Slices are shown from -1000 to 1000 HU.
SLICES = [
    Column("axial", -1.0, 0.0),
    Column("coronal", -1.0, 0.0),
    Column("sagittal", -1.0, 0.0),
]


def title_of(fit: GreyFit) -> str:
    """What a view is called in a column's title."""
    return VIEW_NAMES.get(fit.view.name, fit.view.name)


def middle_slices(volume: Tensor) -> list[np.ndarray]:
    """Axial, coronal and sagittal slices through the middle of (X, Y, Z), as one looks at them (front up, head up)."""
    volume = volume.float().cpu()
    x, y, z = (side // 2 for side in volume.shape)
    slices = [
        volume[:, :, z].T.flip(0, 1),
        as_image(volume[:, y]),
        as_image(volume[x]),
    ]
    return [image.numpy() for image in slices]


def draw_rows(
    heading: str,
    columns: list[Column],
    rows: list[Row],
):
    """A matplotlib figure: one row of images per name, below the columns' titles."""
    from matplotlib.figure import Figure

    width = 1.9 * len(columns) + 1
    height = 2.0 * len(rows) + 0.8
    figure = Figure(figsize=(width, height))
    figure.suptitle(heading, fontsize=11, y=1 - 0.12 / height)
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for cell, column in zip(axes[0], columns, strict=True):
        cell.set_title(column.title, fontsize=9)

    for cells, row in zip(axes, rows, strict=True):
        cells[0].set_ylabel(row.name, fontsize=9)
        missing = [None] * (len(columns) - len(row.images))
        images = row.images + missing
        for cell, column, image in zip(cells, columns, images, strict=True):
            draw_cell(cell, column, image)

    # little room between the images
    figure.subplots_adjust(
        left=0.6 / width,
        right=0.99,
        bottom=0.01,
        top=1 - 0.75 / height,
        wspace=0.03,
        hspace=0.05,
    )
    return figure


def draw_cell(cell, column: Column, image: np.ndarray | None) -> None:
    """An image in its place of a figure; a place without one stays blank."""
    cell.set(xticks=[], yticks=[])
    if image is None:
        for side in cell.spines.values():
            side.set_visible(False)
        return
    cell.imshow(
        image,
        cmap="gray",
        vmin=column.black,
        vmax=column.white,
        aspect="auto",
    )


def draw_inputs(
    stage: StagePlan,
    data: Data,
    diffusion: Diffusion,
    make_batch: Callable[[dict], tuple[dict, Draw]],
) -> dict:
    """A figure, by name, of what the model of a stage is given in training, and what is to come out.

    make_batch(items): a batch of the first epoch, and what is drawn for it.
    """
    batch, draw = make_batch(data.first_items("train", stage.config["volume_size"]))
    noisy, _ = diffused(batch["volume"], draw, diffusion)
    rows = []
    for i, place in enumerate(batch["index"]):
        name = figure_text(data.patients[place].id, 16)
        xrays = list(batch["seen"][i].cpu().numpy())
        # from standard deviations, 3 to either side, to the window of the slices
        timestep = int(draw.timestep[i])
        slices = middle_slices(noisy[i, 0] / 6 - 0.5)
        rows.append(Row(f"input: noisy residual\nt = {timestep}", slices + xrays))
        level = float(draw.start.level[i])
        slices = middle_slices(draw.start.volume[i, 0])
        rows.append(Row(f"input: start\nnoise {level:.2f}", slices))
        slices = middle_slices(batch["volume"][i, 0])
        rows.append(Row(f"target: CT of\n{name}", slices))

    columns = list(SLICES)
    for fit in data.greys:
        columns.append(Column(f"input X-ray, {title_of(fit)}", -1.0, 1.0))
    num_timesteps = diffusion.scheduler.num_train_timesteps
    heading = f"{figure_text(stage.name)}: what the model is given in training (t of {num_timesteps})"
    return {f"{stage.name}_inputs": draw_rows(heading, columns, rows)}


def draw_evaluation(name: str, example: Example, metrics: dict[str, float]) -> dict:
    """The figures of an evaluation, by name: of its first patient, and of several samples' coverage."""
    figures = {name: draw_result(example)}
    if len(example.samples) > 1:
        figures[f"{name}_coverage"] = draw_coverage(metrics)
    return figures


def draw_result(example: Example):
    """The first patient: true and estimated volumes, their projections, and how these differ from the X-rays."""
    extent = example.extent
    integrals = line_integrals(example.xrays, example.greys)
    xrays = [integral[0, 0] for integral in integrals]
    columns = list(SLICES)
    first_images: list[np.ndarray | None] = [None, None, None]
    for fit, xray in zip(example.greys, xrays, strict=True):
        name = title_of(fit)
        columns.append(Column(f"{name} projection", 0.0, float(xray.max())))
        columns.append(Column(f"{name}: less X-ray", -DIFFERENCE, DIFFERENCE))
        first_images += [xray.cpu().numpy(), None]

    def volume_row(name: str, volume: Tensor) -> Row:
        images = middle_slices(volume[0, 0])
        spacing = spacing_of(extent, volume.shape[2:])
        for fit, xray in zip(example.greys, xrays, strict=True):
            projection = project(volume[:1], spacing, fit.view)[0, 0]
            measured = resize(xray[None, None], projection.shape)[0, 0]
            difference = projection - measured
            images.append(projection.cpu().numpy())
            images.append(difference.cpu().numpy())
        return Row(name, images)

    rows = [Row("X-rays", first_images), volume_row("true CT", example.true)]
    for kind, name in example.kinds.items():
        label = figure_text(name, 48).replace(", ", "\n")
        rows.append(volume_row(label, example.volumes[kind]))
    if len(example.samples) > 1:
        rows.append(deviation_row(example.samples))
    differences = f"their differences to the X-rays (black: -{DIFFERENCE}, white: +{DIFFERENCE})"
    return draw_rows(f"the first patient: middle slices, projections, and {differences}", columns, rows)


def deviation_row(samples: Tensor) -> Row:
    """How much samples (K, B, 1, X, Y, Z) of the first patient differ, in the window of the slices."""
    deviation = samples[:, 0, 0].std(0)
    most = max(float(deviation.max()), 1e-6)
    hu = float(hu_difference(deviation).max())
    name = f"standard deviation\nof {len(samples)} samples\n(white: {hu:.0f} HU)"
    return Row(name, middle_slices(deviation / most - 1))


def draw_coverage(metrics: dict[str, float]):
    """How many of the test patients' voxels lie within the samples' intervals, beside how many should."""
    from matplotlib.figure import Figure

    asked = [100 * share for share in COVERAGES.values()]
    held = [100 * metrics[f"test/{name}"] for name in COVERAGES]
    figure = Figure(figsize=(4.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 100], [0, 100], color="0.7", label="as it should be")
    axes.plot(asked, held, "o-", label="samples")
    axes.set(
        title="do the samples' intervals hold the truth?",
        xlabel="interval made to hold (% of the voxels)",
        ylabel="true voxels inside (%)",
        xlim=(0, 100),
        ylim=(0, 100),
    )
    axes.legend()
    return figure
