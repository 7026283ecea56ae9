"""Guide 0's tables and figures, what its banner says, and the files of an evaluation."""

import json
import textwrap
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import nn

from distributed_utils import scale_learning_rate, world
from figure_utils import drawable_characters
from logging_utils import print_table, save_figure, write_result
from memory_utils import BatchSize
from tasks.prs_med.augmentation import augment
from tasks.prs_med.data import PositionData, Row, count_rows

PANEL_INCHES = 4
# of 8 points, in a panel's width
PANEL_CHARACTERS = 62
LINE_INCHES = 0.17


# --- tables and the banner --------------------------------------------------------------------------------------------


def print_data_check(rows: int, findings: dict[str, dict]) -> None:
    """What the check of all images and masks found: one line for each finding, with its first row."""
    if findings:
        print_table(f"data check, {rows} rows", findings)
    else:
        print(f"data check: {rows} rows, every mask fits its image; none is empty or full", flush=True)


def print_metrics(title: str, metrics: dict[str, float], rows: list[Row]) -> None:
    """Rank 0: the table of a split: all rows, then each modality, with the number of rows of each."""
    if world()[0] > 0:
        return
    counts = count_rows(rows)
    table: dict[str, dict] = {}
    for name, value in metrics.items():
        _, metric, *modality = name.split("/")
        # it has two names
        if metric == "loss_txt":
            continue
        group = modality[0] if modality else "all"
        column = metric.replace("position_accuracy", "position")
        table.setdefault(group, {"n": counts[group]})[column] = value
    print_table(title, table)


def describe_recomputation(recomputed: bool, flag: bool | None, source: str) -> str:
    """Whether activations are recomputed, and who decided it; flag: --gradient_checkpointing, from this source."""
    if recomputed and not flag:
        return "on (one image did not fit without)"
    return f"{'on' if recomputed else 'off'} ({source})"


def describe_batch(batch: BatchSize, world_size: int) -> str:
    """What makes up the effective batch."""
    effective = batch.size * batch.accumulation * world_size
    return f"{batch.size} per GPU x {batch.accumulation} accumulation x {world_size} = {effective} ({batch.source})"


def describe_source(path: str, source: str) -> str:
    """A pretrained checkpoint, and where its path comes from."""
    return f"{path} ({'found by itself' if source == 'default' else source})"


def describe_parameters(model: nn.Module) -> str:
    """How many of a model's parameters are trained."""
    trained = 0
    everything = 0
    for parameter in model.parameters():
        everything += parameter.numel()
        if parameter.requires_grad:
            trained += parameter.numel()
    return f"{trained:,} of {everything:,} parameters"


def describe_run(
    model: nn.Module,
    sets: dict[str, PositionData],
    batch: BatchSize,
    reason: str,
    args: Namespace,
) -> dict[str, str]:
    """The banner's rows of this script; reason: of the precision."""
    _, world_size = world()
    lr = scale_learning_rate(args.learning_rate, world_size, args.lr_scaling)
    source = args.source
    vlm = describe_source(args.vlm_path, source["vlm_path"])
    sam = describe_source(args.sam_path, source["sam_path"])
    flag = args.gradient_checkpointing
    keep = sets["train"].keep

    return {
        "batch": describe_batch(batch, world_size),
        "recomputation": describe_recomputation(batch.recomputed, flag, source["gradient_checkpointing"]),
        "learning rate": f"{args.learning_rate:g} -> {lr:g} ({args.lr_scaling}), {args.lr_schedule}",
        "precision": reason,
        "rows": ", ".join(f"{len(data)} {split}" for split, data in sets.items()),
        "models": f"{vlm}, {sam}",
        "loading": "images kept in memory" if keep else f"{args.num_workers} workers per GPU",
        "trained": describe_parameters(model),
    }


# --- figures ----------------------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """One row of an evaluation to be shown: (3, H, W) uint8 image, predicted and true mask, generated answer."""

    row: Row
    image: np.ndarray
    predicted: np.ndarray
    target: np.ndarray
    answer: str
    dice: float


class ImagePanel(NamedTuple):
    """One image of a figure: (3, H, W) uint8, its true mask, a predicted one, and the sentences above it."""

    image: np.ndarray
    target: np.ndarray
    predicted: np.ndarray | None
    sentences: list[str]


def spread(count: int) -> list[int]:
    """Up to nine of so many rows, from the first to the last."""
    return sorted({ninth * (count - 1) // 8 for ninth in range(9)})


def draw_predictions(examples: list[Example]):
    """A matplotlib figure: image, true outline (green), predicted mask (red), question, generated and true answer."""
    panels = []
    for example in examples:
        row = example.row
        sentences = [
            f"{Path(row.source).name}, Dice {example.dice:.2f}",
            row.question,
            f"says: {example.answer or '(nothing)'}",
            f"true: {row.answer}",
        ]
        panels.append(ImagePanel(example.image, example.target, example.predicted, sentences))
    return draw_panels(panels)


def draw_inputs(data: PositionData, seed: int = 0):
    """A matplotlib figure: up to nine rows as the model is given them; None without any that can be used.

    seed: of the augmentation, whose first epoch is shown where the data are augmented.
    """
    panels = []
    for index in spread(len(data)):
        item = data[index]
        row = data.rows[index]
        # an image that cannot be used ends the run at its step, on all ranks
        if item["error"]:
            continue
        position = item["position"] or "none, the mask is empty"
        batch = data.reader.collate([item])
        if data.augmented:
            batch = augment(batch, seed, epoch=0)
        image = batch["sam"][0].numpy()
        mask = batch["mask"][0].numpy()
        sentences = [f"{Path(row.source).name}, position: {position}", row.question, row.answer]
        panels.append(ImagePanel(image, mask, None, sentences))
    return draw_panels(panels) if panels else None


def draw_panels(panels: list[ImagePanel]):
    """A matplotlib figure: each image under its sentences, true outline green, predicted mask red."""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    captions = [caption(panel.sentences) for panel in panels]

    # each line of panels is as high as its longest caption wants, in inches
    heights = []
    for first in range(0, len(panels), columns):
        longest = max(map(len, captions[first : first + columns]))
        heights += [LINE_INCHES * longest + 0.1, PANEL_INCHES]
    figure = Figure(figsize=(PANEL_INCHES * columns, sum(heights)))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.995, wspace=0.03, hspace=0.03)
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)

    for place, panel in enumerate(panels):
        line, column = divmod(place, columns)
        draw_caption(figure.add_subplot(grid[2 * line, column]), captions[place])
        draw_image(figure.add_subplot(grid[2 * line + 1, column]), panel)
    return figure


def caption(sentences: list[str]) -> list[str]:
    """The lines above an image: each sentence in up to 4 of a panel's width; of a longer one the middle is left out."""
    known = drawable_characters()
    lines = []
    for sentence in sentences:
        letters = [letter if ord(letter) in known or letter.isspace() else "?" for letter in sentence]
        wrapped = textwrap.wrap("".join(letters), PANEL_CHARACTERS, subsequent_indent="    ")
        if len(wrapped) > 4:
            wrapped = [*wrapped[:2], "    ...", wrapped[-1]]
        lines += wrapped
    return lines


def draw_caption(axes, lines: list[str]) -> None:
    """Draw the lines above an image; a dollar sign begins no formula."""
    axes.axis("off")
    text = axes.text(0, 0, "\n".join(lines), fontsize=8, verticalalignment="bottom")
    text.set_parse_math(False)
    text.set_clip_on(True)


def draw_image(axes, panel: ImagePanel) -> None:
    """Draw an image with its masks."""
    axes.axis("off")
    axes.imshow(panel.image.transpose(1, 2, 0))
    if panel.predicted is not None:
        red = [1.0, 0.1, 0.1, 0.4]
        axes.imshow(np.where(panel.predicted[..., None], red, 0.0))
    # an empty mask and a full one have no outline
    if panel.target.any() and not panel.target.all():
        axes.contour(panel.target, [0.5], colors="lime", linewidths=1.5)


# --- files ------------------------------------------------------------------------------------------------------------


def write_evaluation(run_folder: Path, name: str, results: dict, examples: list[Example]) -> None:
    """Rank 0: eval_<name>.json and its figure; a full disk is said, and ends nothing."""
    if world()[0] > 0:
        return
    text = json.dumps(results, indent=2) + "\n"
    write_result(run_folder / f"eval_{name}.json", text.encode())
    save_figure(run_folder / "figures" / f"{name}_predictions.png", draw_predictions(examples))
