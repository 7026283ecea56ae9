"""Phases that take long say so: what, for how long, on rank 0, and once."""

import re
import sys
import time

import pytest

from old import phase_utils
from old.phase_utils import StepPhase, current, doing


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Lines after 0.1, 0.2 and 0.4 s, and every 0.4 s from there."""
    monkeypatch.setattr(phase_utils, "INTERVAL", 0.02)
    monkeypatch.setattr(phase_utils, "FIRST_LINES", (0.1, 0.2, 0.4))
    monkeypatch.setattr(phase_utils, "EVERY", 0.4)
    # the watching thread may be asleep for as long as the usual interval
    time.sleep(0.5)


def spoken(capsys) -> list[str]:
    """The lines without the seconds, each once."""
    lines = [re.sub(r"\d+ s", "N s", line) for line in capsys.readouterr().out.splitlines()]
    return list(dict.fromkeys(lines))


def test_a_long_phase_speaks_and_a_short_one_does_not(capsys):
    with doing("quick", after=0.1):
        time.sleep(0.01)
    with doing("slow", after=0.1):
        time.sleep(0.25)
    assert spoken(capsys) == ["slow: N s so far ...", "slow: N s in all"]


def test_the_innermost_long_phase_speaks(capsys):
    with doing("outer", after=0.3):
        with doing("inner", after=0.1):
            assert [what for what, _ in current()] == ["outer", "inner"]
            time.sleep(0.15)
        time.sleep(0.25)
    assert current() == []
    assert spoken(capsys) == [
        "inner: N s so far ...",
        "inner: N s in all",
        "outer: N s so far ...",
        "outer: N s in all",
    ]


def test_other_ranks_and_bars_on_a_terminal_are_silent(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        with doing("other rank", after=0.05):
            time.sleep(0.15)

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with doing("with a bar", after=0.05, has_bar=True):
        time.sleep(0.15)
    assert spoken(capsys) == []


def test_steps_speak_where_they_take_longer_than_usual(capsys):
    with StepPhase() as phase:
        for number, seconds in enumerate([0.15, 0.15, 0.15, 0.7, 0.15], start=1):
            phase.fetch()
            phase.compute(number, compiles=True)
            time.sleep(seconds)
        phase.rest()
        time.sleep(0.15)
    lines = [line for line in spoken(capsys) if line.endswith("in all")]

    # the first step compiles; the second one's time is not known before; the fourth is longer than three usual ones
    assert lines == ["compiling the model: N s in all", "step 2: N s in all", "step 4: N s in all"]
