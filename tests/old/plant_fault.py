"""Runs a training script in which one process meets a fault at a place of its own code, planted from outside.

python plant_fault.py SCRIPT FLAGS..., with FAULT = {"kind", "rank", "file", "function", "call", "in_loader", "told",
"after"} in the environment, as JSON: at so many calls of a function, counted in each process, of a file whose path
ends so. after: a file that is there when counting begins. told: one that is written just before the fault.
"""

import fcntl
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop_for_ever() -> None:
    while True:
        pass


def read_slowly() -> None:
    """Read from a disk that gives nothing: a pipe that nobody writes into."""
    pipe = f"{FAULT['told']}.pipe"
    os.mkfifo(pipe)
    with open(pipe, "rb") as file:
        file.read()


def crash() -> None:
    raise ValueError("planted")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash_in_c() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def wait_for_lock() -> None:
    """Wait for a lock that another opening of the file has for ever."""
    path = f"{FAULT['told']}.lock"
    held = open(path, "w")  # noqa: SIM115 - held for ever
    fcntl.flock(held, fcntl.LOCK_EX)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def fill_disk() -> None:
    raise OSError(28, "No space left on device")


KINDS = {
    "stop": stop_here,
    "loop": loop_for_ever,
    "slow": read_slowly,
    "crash": crash,
    "kill": be_killed,
    "segfault": crash_in_c,
    "lock": wait_for_lock,
    "full": fill_disk,
}

FAULT = json.loads(os.environ.get("FAULT", "{}"))
MAIN = os.getpid()
calls = 0


def count_calls(frame, event: str, _) -> None:
    """The profile function of each process: plants the fault inside the call whose turn it is."""
    global calls
    code = frame.f_code
    here = event == "call" and code.co_name == FAULT["function"] and code.co_filename.endswith(FAULT["file"])
    if not here or FAULT["in_loader"] != (os.getpid() != MAIN):
        return
    calls += 1
    if calls == FAULT["call"]:
        sys.setprofile(None)
        Path(FAULT["told"]).write_text(str(time.time()))
        KINDS[FAULT["kind"]]()


def begin_counting(*_) -> None:
    """Each tenth of a second until the training has begun, as counting is slow: count from then on."""
    if Path(FAULT["after"]).exists():
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setprofile(count_calls)
        # a checkpoint is written by a thread
        threading.setprofile(count_calls)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    if FAULT and int(os.environ.get("RANK", "0")) == FAULT["rank"]:
        signal.signal(signal.SIGALRM, begin_counting)
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    runpy.run_path(sys.argv[0], run_name="__main__")
