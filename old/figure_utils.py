"""Figures: how a figure becomes a PNG, and the curves of a run."""

import contextlib
import io
import json
import warnings
from pathlib import Path
from typing import NamedTuple


def figure_png(figure) -> bytes:
    """A matplotlib figure as a PNG; a character that the font lacks is a box in it, and no warning."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


class Point(NamedTuple):
    """A metric's value at an optimizer step."""

    step: int
    value: float


class Panel(NamedTuple):
    """One part of the curves' figure: title, curves by name, and its rows and column in a grid of 4 x 2."""

    title: str
    curves: dict[str, list[Point]]
    rows: slice
    column: int


def plot_curves(metrics: Path, chosen: list[str] | None = None):
    """A matplotlib figure of a metrics.jsonl: losses, learning rate, and the validation metrics (or those chosen).

    A panel that would be empty is left out; losses have a logarithmic axis when all are positive.
    """
    from matplotlib.figure import Figure

    records = read_records(metrics)
    names = chosen or validation_names(records)
    losses = ["train/loss", *(name for name in names if "loss" in name)]
    others = [name for name in names if "loss" not in name]

    # the panels that have something to show
    panels = [
        Panel("loss", read_curves(records, losses), slice(0, 3), 0),
        Panel("learning rate", read_curves(records, ["train/lr"]), slice(3, 4), 0),
        Panel("validation", read_curves(records, others), slice(0, 4), 1),
    ]
    panels = [panel for panel in panels if panel.curves]

    # one column of them, or two
    columns = 1 + any(panel.column == 1 for panel in panels)
    figure = Figure(figsize=(11 if columns == 2 else 6, 5))
    grid = figure.add_gridspec(
        4,
        columns,
        left=0.06 if columns == 2 else 0.11,
        right=0.98,
        bottom=0.1,
        top=0.94,
        hspace=1.4,
        wspace=0.15,
    )
    for panel in panels:
        draw_panel(figure.add_subplot(grid[panel.rows, panel.column]), panel)
    return figure


def read_records(metrics: Path) -> list[dict]:
    """The lines of a metrics.jsonl; one that a full disk cut short is no point of a curve."""
    records = []
    for line in metrics.read_text().splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def validation_names(records: list[dict]) -> list[str]:
    """The validation metrics of some records, without those of parts such as `val/dice/ct`."""
    names = dict.fromkeys(name for record in records for name in record)
    return [name for name in names if name.startswith("val/") and name.count("/") == 1]


def read_curves(records: list[dict], names: list[str]) -> dict[str, list[Point]]:
    """{name: points} of the metrics that have any."""
    curves = {name: [] for name in names}
    for record in records:
        for name in names:
            if record.get(name) is not None:
                curves[name].append(Point(record["step"], record[name]))
    return {name: points for name, points in curves.items() if points}


def draw_panel(axes, panel: Panel) -> None:
    """Draw one panel of the curves."""
    for name, points in panel.curves.items():
        steps = [point.step for point in points]
        values = [point.value for point in points]
        axes.plot(steps, values, label=name, marker="." if len(points) < 40 else None)

    # losses spread over powers of ten
    title = panel.title
    lowest = min(point.value for points in panel.curves.values() for point in points)
    if title == "loss" and lowest > 0:
        use_log_axis(axes)
        title = "loss, on a logarithmic axis"
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel("optimizer step")
    axes.xaxis.get_major_locator().set_params(integer=True)

    # the learning rate is one curve, which its title names
    if title == "learning rate":
        axes.set_ylim(bottom=0, top=1.1 * axes.dataLim.y1 or 1)
    else:
        axes.legend(fontsize="small")


def use_log_axis(axes) -> None:
    """A logarithmic y axis whose ticks are plain numbers, also where it spans less than a power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
