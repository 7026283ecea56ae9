"""SIGTERM and Ctrl-C are served within ten seconds, whatever the process is doing.

The training loop heeds a stop signal at its next step (StopSignal). While a model is compiled, an evaluation runs or
another rank is waited for, that may be minutes away, and Python's handlers do not even run inside a long C call. So a
thread hears of each signal, too, and ends the process where the loop does not come to it: without the step under way,
as after kill -9, but never in the middle of a checkpoint.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from old.cli_utils import is_first_process
from old.phase_utils import current, must_finish

# Seconds that the main thread has to end the run in order; the second where steps would be lost.
PATIENCE = 3.0
PATIENCE_WITH_STEPS = 7.0

# How often the thread looks, in seconds.
INTERVAL = 0.1

STOP_SIGNALS = {getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGBREAK") if hasattr(signal, name)}


class StopWatch:
    """Inside, a stop signal with a handler in Python ends this process in time, if need be from a thread.

    A signal without one ends the process at once, as the system does. code: the exit code of the first signal to any
    watch of this process, else 0.
    """

    code = 0

    def __init__(self, stop=None, steps: Callable[[], tuple[int, int]] = lambda: (0, 0)):
        """stop: the StopSignal that the training loop heeds, None outside of a training.

        steps: (optimizer steps done, those of the newest checkpoint).
        """
        self.stop = stop
        self.steps = steps
        self.over = threading.Event()

    def __enter__(self) -> "StopWatch":
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.previous = None
        # A thread other than the main one may not ask for signals, and gets none.
        with contextlib.suppress(ValueError):
            self.previous = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="stop", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        if self.previous is not None:
            signal.set_wakeup_fd(self.previous)
        # The thread reads the end of the stream, and ends.
        self.writer.close()

    def _run(self) -> None:
        """In the thread, which ends with the stream."""
        with self.reader:
            self._wait()

    def _wait(self) -> None:
        """Wait for a signal, then for the main thread, then leave."""
        # The stream stays open: signals that come later are written into it, too.
        number = self._next_signal()
        if not number:
            return
        code = 130 if number == signal.SIGINT else 143
        StopWatch.code = StopWatch.code or code
        told = time.monotonic()
        while not self.over.wait(INTERVAL):
            # A save that ends gives the main thread a new chance to come to its next step.
            if must_finish():
                told = time.monotonic()
            if self._may_leave(time.monotonic() - told):
                self._leave(code)

    def _next_signal(self) -> int:
        """The next stop signal, 0 when the watch is over."""
        while numbers := self.reader.recv(64):
            for number in numbers:
                if number in STOP_SIGNALS:
                    return number
        return 0

    def _may_leave(self, seconds: float) -> bool:
        """Whether the main thread has had its time, so many seconds after the signal."""
        if self.stop is None:
            return seconds > PATIENCE
        if self.stop.agreed:
            # All ranks are at the same step: they save and end in order.
            return False
        # Where nothing would be lost, a step that takes its usual time is waited for all the same, but not for long.
        done, saved = self.steps()
        takes_long = time.monotonic() > self.stop.step_due
        if done == saved:
            return seconds > PATIENCE_WITH_STEPS or (seconds > PATIENCE and takes_long)
        return seconds > PATIENCE_WITH_STEPS and takes_long

    def _leave(self, code: int) -> None:
        """End this process now, with its loading processes, which heed no SIGTERM."""
        if is_first_process():
            # Whoever holds the stream, it is waited for no longer than this.
            line = threading.Thread(target=print, args=[self._describe()], kwargs={"flush": True}, daemon=True)
            line.start()
            line.join(1)
        for child in multiprocessing.active_children():
            child.kill()

        # so that the others, who see a broken connection, do not look for a crash
        if "old.hang_utils" in sys.modules:
            sys.modules["old.hang_utils"].say_stopped(code)
        os._exit(code)

    def _describe(self) -> str:
        """The line for the user."""
        phases = current()
        what = f"signal: ended while {phases[-1][0]}" if phases else "signal: ended"
        if self.stop is None:
            return what
        done, saved = self.steps()
        lost = f", without the {done - saved} steps since" if done > saved else ""
        return f"{what}; --resume_from auto goes on from step {saved}{lost}"


def _forget_in_child() -> None:
    """A signal to a forked process is none to this one."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def only_note_stop_signals() -> None:
    """In the main thread, which ends the process by itself, with an error: a stop signal does not cut that off."""

    def note(number: int, _frame) -> None:
        StopWatch.code = StopWatch.code or (130 if number == signal.SIGINT else 143)

    for number in STOP_SIGNALS:
        signal.signal(number, note)


def leave_if_interrupted(error: BaseException) -> None:
    """End this process after Ctrl-C before the training."""
    if isinstance(error, KeyboardInterrupt):
        if is_first_process():
            print("interrupted", file=sys.stderr, flush=True)
        os._exit(StopWatch.code or 130)
