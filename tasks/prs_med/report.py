"""Guide 0's tables and figures."""

import io
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from checkpoint_utils import write_atomically
from logging_utils import print_table
from tasks.prs_med.data import PositionData

PANEL_INCHES = 4
PANEL_CHARACTERS = 62  # of 8 points, in a panel's width


def print_data_check(rows: int, findings: dict[str, dict]) -> None:
    """What the check of all images and masks found: one line for each finding, with its first row."""
    if findings:
        print_table(f"data check, {rows} rows", findings)
    else:
        print(f"data check: {rows} rows, every mask fits its image; none is empty or full", flush=True)


def print_metrics(title: str, metrics: dict[str, float], rows: dict[str, int]) -> None:
    """The table of a split: all rows, then each modality, with the number of `rows` of each."""
    table: dict[str, dict] = {}
    for name, value in metrics.items():
        _, metric, *modality = name.split("/")
        # it has two names
        if metric == "loss_txt":
            continue
        group = modality[0] if modality else "all"
        column = metric.replace("position_accuracy", "position")
        table.setdefault(group, {"n": rows[group]})[column] = value
    print_table(title, table)


class Panel(NamedTuple):
    """One image of a figure: (3, H, W) uint8, its true mask, a predicted one, and the sentences above it."""

    image: np.ndarray
    target: np.ndarray
    predicted: np.ndarray | None
    sentences: list[str]


def wrap(sentence: str) -> list[str]:
    """A sentence as up to 4 lines as wide as a panel; of a longer one, the middle is left out."""
    lines = textwrap.wrap(printable(sentence), PANEL_CHARACTERS, subsequent_indent="    ")
    if len(lines) <= 4:
        return lines
    return [*lines[:2], "    ...", lines[-1]]


def printable(text: str) -> str:
    """The text with a question mark for each character that matplotlib's font cannot draw."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    return "".join(letter if ord(letter) in known or letter.isspace() else "?" for letter in text)


def draw_panels(panels: list[Panel]):
    """A matplotlib figure: each image under its sentences, true outline green, predicted mask red."""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    texts = [[line for sentence in panel.sentences for line in wrap(sentence)] for panel in panels]
    # each line of panels is as high as its longest text wants, in inches
    firsts = range(0, len(panels), columns)
    text_heights = [0.17 * max(map(len, texts[first : first + columns])) + 0.1 for first in firsts]
    heights = [height for text_height in text_heights for height in (text_height, PANEL_INCHES)]
    figure = Figure(figsize=(PANEL_INCHES * columns, sum(heights)))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.995, wspace=0.03, hspace=0.03)
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for k, (panel, lines) in enumerate(zip(panels, texts, strict=True)):
        line, column = divmod(k, columns)
        axes = figure.add_subplot(grid[2 * line, column])
        axes.axis("off")
        text = axes.text(0, 0, "\n".join(lines), fontsize=8, fontfamily="DejaVu Sans", verticalalignment="bottom")
        text.set_parse_math(False)
        text.set_clip_on(True)
        axes = figure.add_subplot(grid[2 * line + 1, column])
        axes.axis("off")
        axes.imshow(panel.image.transpose(1, 2, 0))
        if panel.predicted is not None:
            axes.imshow(np.where(panel.predicted[..., None], [1.0, 0.1, 0.1, 0.4], 0.0))
        # an empty mask and a full one have no outline
        if panel.target.any() and not panel.target.all():
            axes.contour(panel.target, [0.5], colors="lime", linewidths=1.5)
    return figure


def draw_predictions(shown: list[tuple]):
    """A matplotlib figure: image, true outline (green), predicted mask (red), question, generated and true answer."""
    panels = []
    for row, image, predicted, target, answer, dice in shown:
        sentences = [f"{Path(row.source).name}, Dice {dice:.2f}", row.question]
        sentences += [f"says: {answer or '(nothing)'}", f"true: {row.answer}"]
        panels.append(Panel(image, target, predicted, sentences))
    return draw_panels(panels)


def draw_inputs(data: PositionData):
    """A matplotlib figure: up to nine rows as the model is given them, from the first to the last; None without any."""
    panels = []
    for i in sorted({n * (len(data) - 1) // 8 for n in range(9)}):
        item, row = data[i], data.rows[i]
        # an image that cannot be used ends the run at its step, on all ranks
        if item["error"]:
            continue
        position = item["position"] or "none, the mask is empty"
        sentences = [f"{Path(row.source).name}, position: {position}", row.question, row.answer]
        panels.append(Panel(item["sam"].numpy(), item["mask"].numpy(), None, sentences))
    return draw_panels(panels) if panels else None


def write_prediction(stem: Path, image: Image.Image, mask: np.ndarray, text: str) -> None:
    """<stem>_mask.png with 0 and 255, <stem>_overlay.png with the mask in red, <stem>.txt. Raises OSError."""
    red = Image.new("RGB", image.size, (255, 40, 40))
    opacity = Image.fromarray(np.where(mask, 110, 0).astype(np.uint8))
    pictures = {
        "mask": Image.fromarray(np.where(mask, 255, 0).astype(np.uint8)),
        "overlay": Image.composite(red, image, opacity),
    }
    stem.parent.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        content = io.BytesIO()
        picture.save(content, "PNG")
        write_atomically(Path(f"{stem}_{name}.png"), lambda file, content=content: file.write(content.getvalue()))
    write_atomically(Path(f"{stem}.txt"), lambda file: file.write(text.encode()))
