"""Guide 0's tables and figures."""

import io
import math
from pathlib import Path

import numpy as np
from PIL import Image

from checkpoint_utils import write_atomically
from logging_utils import print_table


def print_data_check(rows: int, findings: dict[str, dict]) -> None:
    """What the check of all images and masks found: one line for each finding, with its first row."""
    if findings:
        print_table(f"data check, {rows} rows", findings)
    else:
        print(f"data check: {rows} rows, every mask fits its image; none is empty or full", flush=True)


def print_metrics(title: str, metrics: dict[str, float]) -> None:
    """The table of a split: all rows, then each modality."""
    table: dict[str, dict] = {}
    for name, value in metrics.items():
        _, metric, *modality = name.split("/")
        table.setdefault(modality[0] if modality else "all", {})[metric.replace("position_accuracy", "position")] = (
            value
        )
    print_table(title, table)


def draw_predictions(shown: list[tuple]):
    """A matplotlib figure: picture, true outline (green), predicted mask (red), question, generated and true answer."""
    from matplotlib.figure import Figure

    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(4 * columns, 4.7 * lines))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=1 - 0.17 / lines, wspace=0.03, hspace=0.22)
    for axes in figure.subplots(lines, columns, squeeze=False).flat:
        axes.axis("off")
    for axes, (row, picture, predicted, target, answer, dice) in zip(figure.axes, shown, strict=False):
        axes.imshow(picture.transpose(1, 2, 0))
        axes.imshow(np.where(predicted[..., None], [1.0, 0.1, 0.1, 0.4], 0.0))
        if target.any():
            axes.contour(target, [0.5], colors="lime", linewidths=1.5)
        lines = [row.question, f"says: {answer or '(nothing)'}", f"true: {row.answer}"]
        axes.set_title("\n".join(line[:64] for line in lines) + f"\nDice {dice:.2f}", fontsize=8)
    return figure


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
