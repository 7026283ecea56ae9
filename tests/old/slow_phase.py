"""slow_phase.py PHASE HOW RANKS SCRIPT FLAGS...: runs it, and sends SIGTERM while a phase does not come to its end.

PHASE: how the phase's name begins. HOW: "hangs" in a call of C, as a compiler may, in which Python's handlers do not
run; "lasts" longer than the patience of stop_utils, and goes on. RANKS: in which that happens, such as 0,1; the others
are told nothing. SHORT_PATIENCE=1 in the environment: stop_utils waits for less than it does for users.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

from old import phase_utils, stop_utils


def hang() -> None:
    """Lock a mutex twice, which no signal ends."""
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def main() -> None:
    name, how, ranks = sys.argv[1:4]
    chosen = os.environ.get("RANK", "0") in ranks.split(",")
    real_enter = phase_utils.Phase.__enter__
    real_turn_to = phase_utils.Phase.turn_to
    if "SHORT_PATIENCE" in os.environ:
        stop_utils.PATIENCE = 0.5
        stop_utils.PATIENCE_WITH_STEPS = 1.0

    def strike(phase: phase_utils.Phase) -> None:
        nonlocal chosen
        if not chosen or not phase.what.startswith(name):
            return
        chosen = False
        print(f"struck: {phase.what} at {time.time():.1f}", flush=True)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if how == "hangs":
            hang()
        time.sleep(1 + stop_utils.PATIENCE)

    def enter(phase: phase_utils.Phase) -> phase_utils.Phase:
        real_enter(phase)
        strike(phase)
        return phase

    def turn_to(phase: phase_utils.Phase, *more, **options) -> None:
        real_turn_to(phase, *more, **options)
        strike(phase)

    phase_utils.Phase.__enter__ = enter
    phase_utils.Phase.turn_to = turn_to
    sys.argv = sys.argv[4:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
