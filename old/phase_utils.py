"""What a run is busy with: a phase that takes long says so on a line, and whoever asks learns what is under way.

Training itself speaks by its log. Compiling, reading a table, an evaluation, a checkpoint or a lock that is held do
not: with `doing("reading the table"):` around them, rank 0 says after 5 s what it does and for how long.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from old.cli_utils import is_first_process

# Seconds into a phase at which it is told; then every minute.
FIRST_LINES = (5.0, 30.0, 60.0)
EVERY = 60.0

# How often the watching thread looks, in seconds.
INTERVAL = 0.5


@dataclass(eq=False)
class Phase:
    """What is under way inside a `with` block, since `begun` (time.monotonic).

    next_line: seconds into the phase at which it speaks next. must_finish: a stop signal waits for it. said: it has
    spoken, and so tells its end, too. has_bar: a progress bar tells of it where someone looks.
    """

    what: str
    next_line: float = FIRST_LINES[0]
    must_finish: bool = False
    has_bar: bool = False
    said: bool = False
    begun: float = 0.0

    def __enter__(self) -> "Phase":
        self.begun = time.monotonic()
        _WATCH.add(self)
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(ValueError):
            _WATCH.phases.remove(self)
        self._end()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def turn_to(self, what: str, after: float = FIRST_LINES[0]) -> None:
        """What was under way is done, and this begins: for a loop, at less cost than a phase each."""
        self._end()
        # in this order, as the watching thread may look at any time
        self.next_line = math.inf
        self.what = what
        self.begun = time.monotonic()
        self.next_line = after

    def tell(self, ending: str) -> None:
        """Rank 0: a line above a progress bar, where there is one."""
        self.said = True
        if not is_first_process() or (self.has_bar and sys.stderr.isatty()):
            return
        from tqdm import tqdm

        # a closed pipe is nothing that a run ends by
        with contextlib.suppress(OSError, ValueError):
            tqdm.write(f"{self.what}: {self.seconds:.0f} s {ending}")
            print(end="", flush=True)

    def _end(self) -> None:
        if self.said:
            self.tell("in all")
        self.said = False


@dataclass(eq=False)
class StepPhase(Phase):
    """The steps of a training: one speaks where it takes much longer than the one before it.

    steps: begun in this process. usual: seconds that one takes, 0 before that is known. computing: the samples of a
    step are there.
    """

    what: str = "training"
    next_line: float = math.inf
    steps: int = 0
    usual: float = 0.0
    step_begun: float = 0.0
    computing: bool = False

    def fetch(self) -> None:
        """A step is over, if there was one, and the next one's samples are waited for."""
        self._measure()
        self.step_begun = time.monotonic()
        what = "waiting for data" if self.steps else "loading the first batch"
        self.turn_to(what, after=self._long())

    def compute(self, number: int, compiles: bool) -> None:
        """The samples are there, and step `number` begins. compiles: the first one compiles the model."""
        self.steps += 1
        self.computing = True
        what = f"step {number}"
        if self.steps == 1 and compiles:
            what = "compiling the model"
        self.turn_to(what, after=self._long())

    def rest(self) -> None:
        """The steps are over for now."""
        self._measure()
        self.turn_to("training", after=math.inf)

    @property
    def due(self) -> float:
        """Until when (time.monotonic) the step that was begun takes no longer than usual."""
        return time.monotonic() + 2 * self.usual

    def _long(self) -> float:
        return max(FIRST_LINES[0], 3 * self.usual)

    def _measure(self) -> None:
        """Note how long a step took. The first is no measure, and one that compiles again is one with care."""
        computed = self.computing
        self.computing = False
        if not computed or self.steps < 2:
            return
        seconds = time.monotonic() - self.step_begun
        self.usual = min(seconds, 2 * self.usual) if self.usual else seconds


class _Watch:
    """The phases under way, of all threads, and the one thread that makes them speak."""

    def __init__(self):
        self.phases: list[Phase] = []
        self.busy = threading.Event()
        self.thread: threading.Thread | None = None

    def add(self, phase: Phase) -> None:
        self.phases.append(phase)
        if not self.busy.is_set():
            self.busy.set()
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="phases", daemon=True)
            # Where the system has no thread to give, the phases stay silent.
            with contextlib.suppress(RuntimeError):
                self.thread.start()

    def _run(self) -> None:
        while True:
            self.busy.wait()
            time.sleep(INTERVAL)
            phase = self._due()
            if phase:
                phase.tell("so far ...")
            if not self.phases:
                self.busy.clear()
                # one may have begun in between
                if self.phases:
                    self.busy.set()

    def _due(self) -> Phase | None:
        """The phase that is to speak now: the innermost one that has taken long."""
        for phase in reversed(self.phases.copy()):
            seconds = phase.seconds
            if seconds >= phase.next_line:
                later = [line for line in FIRST_LINES if line > seconds]
                phase.next_line = later[0] if later else (seconds // EVERY + 1) * EVERY
                return phase
            if phase.said:
                return None
        return None


_WATCH = _Watch()


def _forget_in_child() -> None:
    """A forked process has neither the thread nor the phases."""
    _WATCH.__init__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def doing(
    what: str, after: float = FIRST_LINES[0], must_finish: bool = False, has_bar: bool = False
) -> Iterator[Phase]:
    """Around a phase of a run: rank 0 says `what` and how long, once that is more than `after` seconds.

    May be nested, used in any thread, and as a decorator. must_finish: a stop signal waits for the end of this phase.
    has_bar: there is a progress bar on a terminal, so that nothing is said there.
    """
    with Phase(what, after, must_finish, has_bar) as phase:
        yield phase


def current() -> list[tuple[str, float]]:
    """(what, seconds so far) of each phase under way, the innermost last."""
    return [(phase.what, phase.seconds) for phase in _WATCH.phases.copy()]


def must_finish() -> bool:
    """Whether a phase is under way that a stop signal waits for."""
    return any(phase.must_finish for phase in _WATCH.phases.copy())
