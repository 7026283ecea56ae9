"""Guide 0's tables and figures, what its banner says, and the files of an evaluation."""

import csv
import io
import json
import textwrap
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import nn

from old.cli_utils import counted
from old.distributed_utils import scale_learning_rate, world
from old.figure_utils import drawable_characters
from old.logging_utils import print_table, save_figure, write_result
from old.memory_utils import BatchSize
from old.question_utils import describe_sharing
from tasks.prs_med.augmentation import augment
from tasks.prs_med.data import PositionData, Row, case_of
from tasks.prs_med.findings import ADVICE
from tasks.prs_med.metrics import Scores

PANEL_INCHES = 4
# of 8 points, in a panel's width
PANEL_CHARACTERS = 62
LINE_INCHES = 0.17

# a table's columns, and the metrics in them
COLUMNS = {
    "dice": "dice",
    "iou": "iou",
    "position": "position_accuracy",
    "position_mask": "position_accuracy_mask",
}
# what stands in a line of the table of cases beside the row itself
CASE_SCORES = ("dice", "iou", "hd95", "position_accuracy", "position_accuracy_mask")


# --- tables and the banner --------------------------------------------------------------------------------------------


def print_data_check(rows: int, findings: dict[str, tuple[dict, str]]) -> None:
    """What the check of all images and masks found: the rows of each finding and the first; then what to do."""
    if not findings:
        print(f"data check: {counted(rows, 'row')}, every mask fits its image; nothing is odd", flush=True)
        return
    print_table(f"data check, {counted(rows, 'row')}", {name: table for name, (table, _) in findings.items()})
    for name, (_, advice) in findings.items():
        print(f"  {name}: {advice}", flush=True)


def print_metrics(title: str, metrics: dict[str, float]) -> None:
    """Rank 0: the table of a split: all rows, then each modality, with 95 % intervals; the losses above it.

    n: rows. cases: patients, or images where these are not known.
    """
    if world()[0] > 0:
        return
    split, _ = next(iter(metrics)).split("/")
    losses = [f"{name} {metrics[f'{split}/{name}']:.4f}" for name in ("loss", "loss_seg", "loss_txt")]
    print(f"{title}: {', '.join(losses)}", flush=True)

    groups = {name.split("/")[2] for name in metrics if name.startswith(f"{split}/dice/")}
    table = {"all": metrics_row(metrics, split, "")}
    for group in sorted(groups):
        table[group] = metrics_row(metrics, split, f"/{group}")
    print_table(title, table)
    if f"{split}/position_accuracy" not in metrics:
        print("position, of the generated answers, is not in the table: --no_generate, or all masks are empty")


def metrics_row(
    metrics: dict[str, float],
    split: str,
    ending: str,
) -> dict[str, str | float]:
    """The line of a split's table for the metrics with this ending."""
    rows = metrics.get(f"{split}/rows{ending}", "-")
    chosen_of = metrics.get(f"{split}/of_rows{ending}")
    line = {
        "n": f"{rows} of {chosen_of}" if chosen_of else rows,
        "cases": metrics.get(f"{split}/cases{ending}", "-"),
    }
    for column, name in COLUMNS.items():
        if any(known.startswith(f"{split}/{name}") for known in metrics):
            line[column] = cell_of(metrics, f"{split}/{name}", ending)
    # pixels need no interval to be read
    line["hd95"] = metrics.get(f"{split}/hd95{ending}", "-")
    return line


def cell_of(
    metrics: dict[str, float],
    name: str,
    ending: str = "",
    sign: str = "",
) -> str:
    """A metric's value with its 95 % interval where it has one; sign: `+` for one that tells a difference.

    (-) stands behind a difference that has none: of one case, or the same in all.
    """
    value = metrics.get(f"{name}{ending}")
    if value is None:
        return "-"
    low = metrics.get(f"{name}_low{ending}")
    high = metrics.get(f"{name}_high{ending}")
    text = format(value, f"{sign}.3f")
    if low is None:
        return f"{text} (-)" if sign else text
    return f"{text} ({low:{sign}.3f} to {high:{sign}.3f})"


def describe_recomputation(recomputed: bool, flag: bool | None, source: str) -> str:
    """Whether activations are recomputed, and who decided it; flag: --gradient_checkpointing, from this source."""
    if recomputed and not flag:
        return "on (one image did not fit without)"
    return f"{'on' if recomputed else 'off'} ({source})"


def describe_batch(batch: BatchSize, world_size: int) -> str:
    """What makes up the effective batch."""
    if batch.total:
        return batch.describe()
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
    lr = scale_learning_rate(args.learning_rate, batch.scale, args.lr_scaling)
    scaling = f"{args.lr_scaling}: effective batch / {batch.base}" if batch.total else args.lr_scaling
    source = args.source
    vlm = describe_source(args.vlm_path, source["vlm_path"])
    sam = describe_source(args.sam_path, source["sam_path"])
    flag = args.gradient_checkpointing
    training = sets["train"].rows
    images = len({row.identity for row in training})
    keep = sets["train"].keep

    return {
        "batch": describe_batch(batch, world_size),
        "recomputation": describe_recomputation(batch.recomputed, flag, source["gradient_checkpointing"]),
        "learning rate": f"{args.learning_rate:g} -> {lr:g} ({scaling}), {args.lr_schedule}",
        "precision": reason,
        "rows": ", ".join(f"{len(data)} {split}" for split, data in sets.items()),
        "images": describe_sharing(len(training), images, args.questions_per_image),
        "models": f"{vlm}, {sam}",
        "loading": "images kept in memory" if keep else f"{args.num_workers} workers per GPU",
        "trained": describe_parameters(model),
    }


# --- figures ----------------------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """One row of an evaluation to be shown: (3, H, W) uint8 image, predicted and true mask, generated answer if any."""

    row: Row
    image: np.ndarray
    predicted: np.ndarray
    target: np.ndarray
    answer: str | None
    dice: float


class Results(NamedTuple):
    """An evaluation's metrics by name, a few rows to show, and what every row comes to, in their order."""

    metrics: dict[str, float]
    examples: list[Example]
    scores: list[Scores]


class ImagePanel(NamedTuple):
    """One image of a figure: (3, H, W) uint8, its true mask, a predicted one, and the sentences above it."""

    image: np.ndarray
    target: np.ndarray
    predicted: np.ndarray | None
    sentences: list[str]


def take_examples(
    rows: list[Row],
    batch: dict,
    masks: np.ndarray,
    scores: list[Scores],
) -> dict[int, Example]:
    """Those of a batch's rows that the figure shows, by index; rows: of the whole data set."""
    shown = spread(len(rows))
    examples = {}
    for k, score in enumerate(scores):
        if score.index in shown:
            examples[score.index] = Example(
                row=rows[score.index],
                image=batch["sam"][batch["image_of"][k]].cpu().numpy(),
                predicted=masks[k],
                target=batch["mask"][k].cpu().numpy(),
                answer=score.answer,
                dice=score.dice,
            )
    return examples


def spread(count: int) -> list[int]:
    """Up to nine of so many rows, from the first to the last."""
    return sorted({ninth * (count - 1) // 8 for ninth in range(9)})


def draw_predictions(examples: list[Example]):
    """A matplotlib figure: image, true outline (green), predicted mask (red), question, generated and true answer."""
    panels = []
    for example in examples:
        row = example.row
        says = example.answer or "(nothing)"
        if example.answer is None:
            says = "(not asked, --no_generate)"
        sentences = [
            f"{Path(row.source).name}, Dice {example.dice:.2f}",
            row.question,
            f"says: {says}",
            f"true: {row.answer}",
        ]
        panels.append(ImagePanel(example.image, example.target, example.predicted, sentences))
    return draw_panels(panels)


def draw_inputs(sets: list[PositionData], seed: int = 0):
    """A matplotlib figure: up to nine rows as the model is given them; None without any that can be used.

    The first of each finding of the data check comes first, the worst in front; the other rows are of the first set.
    seed: of the augmentation, whose first epoch is shown where a set is augmented.
    """
    odd: dict[str, tuple[PositionData, int]] = {}
    for data in sets:
        for index, row in enumerate(data.rows):
            for finding in row.findings:
                odd.setdefault(finding.name, (data, index))
    order = list(ADVICE)
    shown = list(dict.fromkeys(odd[name] for name in sorted(odd, key=order.index)))
    plain = [(sets[0], index) for index in spread(len(sets[0]))]
    shown += [place for place in plain if place not in shown]

    panels = [input_panel(data, index, seed) for data, index in shown[:9]]
    # an image that cannot be used ends the run at its step, on all ranks
    panels = [panel for panel in panels if panel]
    return draw_panels(panels) if panels else None


def input_panel(data: PositionData, index: int, seed: int) -> ImagePanel | None:
    """A row as the model is given it, under its findings, question and answer; None where it cannot be used."""
    item = data[index]
    if item["error"]:
        return None
    row = data.rows[index]
    position = item["position"] or "none, the mask is empty"
    sentences = []
    for finding in row.findings:
        how = f" ({finding.how})" if finding.how else ""
        sentences.append(f"ODD: {finding.name}{how}")
    sentences += [f"{Path(row.source).name}, {row.split}, position: {position}", row.question, row.answer]
    image = item["sam"]
    mask = item["mask"]
    # what was found is shown as it is in the files
    if data.augmented and not row.findings:
        batch = data.reader.collate([item])
        batch = augment(batch, seed, epoch=0)
        image = batch["sam"][0]
        mask = batch["mask"][0]
    return ImagePanel(image.numpy(), mask.numpy(), None, sentences)


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


def write_evaluation(
    run_folder: Path,
    name: str,
    metrics: dict,
    results: Results,
    rows: list[Row],
) -> None:
    """Rank 0: eval_<name>.json, eval_<name>_cases.csv and the figure; a full disk is said, and ends nothing."""
    if world()[0] > 0:
        return
    text = json.dumps(metrics, indent=2) + "\n"
    write_result(run_folder / f"eval_{name}.json", text.encode())
    write_cases(run_folder / f"eval_{name}_cases.csv", rows, results.scores)
    save_figure(run_folder / "figures" / f"{name}_predictions.png", draw_predictions(results.examples))


def write_cases(path: Path, rows: list[Row], scores: list[Scores]) -> None:
    """Rank 0: a CSV of one line a row: image, case, question, true and generated answer, all scores.

    case: the patient, or what the image is told from others by. loss_txt: a mean over the answer's tokens.
    """
    if world()[0] > 0:
        return
    text = io.StringIO()
    table = csv.writer(text)
    start = ["image", "mask", "case", "modality", "question", "answer", "generated", "position"]
    table.writerow(start + list(CASE_SCORES) + ["loss_seg", "loss_txt"])
    for score in scores:
        row = rows[score.index]
        cells = [row.image, row.mask, case_of(row), row.modality, row.question, row.answer, score.answer]
        cells.append(score.position)
        for name in CASE_SCORES:
            value = getattr(score, name)
            cells.append(int(value) if isinstance(value, bool) else value)
        cells += [score.mask_loss, score.text_loss / score.tokens]
        table.writerow(cells)
    write_result(path, text.getvalue().encode())
