"""The figure of a run's curves, which the scripts on old/ draw at their end."""

import json
import math

import pytest

from old.figure_utils import plot_curves


def draw(folder, records, chosen=None):
    """{title: axes} of the figure of these log lines."""
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    figure = plot_curves(path, chosen)
    figure.canvas.draw()
    return {axes.get_title(): axes for axes in figure.axes}


def test_a_loss_that_falls_a_thousandfold_is_readable(tmp_path):
    steps = range(10, 1000, 10)
    losses = [32 * math.exp(-step / 140) + 0.03 for step in steps]
    records = [{"step": step, "train/loss": loss, "train/lr": 1e-3} for step, loss in zip(steps, losses, strict=True)]
    records += [{"step": 500, "val/loss": 1.0, "val/dice": 0.5, "val/dice/lung_CT": 0.4}]
    panels = draw(tmp_path, records)
    assert list(panels) == ["loss, on a logarithmic axis", "learning rate", "validation"]

    # the loss
    loss, lr, validation = panels.values()
    assert loss.get_yscale() == "log"
    labels = {label.get_text() for label in loss.get_yticklabels()}
    assert {"0.1", "1", "10"} <= labels
    assert [line.get_label() for line in loss.lines] == ["train/loss", "val/loss"]

    # the others: what a metric is made of has no line
    assert len(lr.lines) == 1
    assert [line.get_label() for line in validation.lines] == ["val/dice"]


@pytest.mark.parametrize(
    ("records", "titles"),
    [
        ([{"step": 1, "train/loss": -3.0, "train/lr": 1e-4}], ["loss", "learning rate"]),
        ([{"step": 1, "train/loss": 0.69, "val/c_index": None}], ["loss, on a logarithmic axis"]),
        ([{"step": 1, "val/c_index": 0.6}], ["validation"]),
        ([{"step": 1, "test/dice": 0.6}], []),
    ],
)
def test_no_empty_panels(tmp_path, records, titles):
    assert list(draw(tmp_path, records)) == titles
