"""Where a process stands in the code: the main thread of this one, and processes that do not answer.

A loading process writes its stack when it is sent a signal, in whatever loop or read it is stuck. Windows has no such
signal: there, the state of the process is all that is known of it.
"""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[1]

# The signal that asks for a stack; None on Windows.
ASK = getattr(signal, "SIGUSR2", None)

# Files whose innermost call is a wait for the other ranks.
COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")

# Helpers that only pass a call on: the place is that of their caller.
PASSING_ON = ("distributed_utils.py", "startup_utils.py", "stack_utils.py", "hang_utils.py")

DIED = "has died"

# What a state of a process means for one that does not go on.
STATES = {
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "is stopped (by a debugger)",
    psutil.STATUS_ZOMBIE: DIED,
    psutil.STATUS_DEAD: DIED,
    psutil.STATUS_DISK_SLEEP: "waits for a disk",
}


class Place(NamedTuple):
    """One call of a stack. instruction: the place within the function's code, -1 where it is not known."""

    file: str
    line: int
    function: str
    instruction: int = -1


class Stack(NamedTuple):
    """The calls of the main thread, innermost first.

    fetched: how many batches the loader gave that it waits for, -1 where it waits for none. worker: the process that
    is to load the next one, 0 where that is this process itself or unknown.
    """

    places: list[Place]
    fetched: int = -1
    worker: int = 0

    def key(self) -> tuple:
        """What changes when the main thread goes on."""
        if self.fetched >= 0:
            return ("batch", self.fetched)
        return tuple((place.file, place.instruction) for place in self.places)

    def is_collective(self) -> bool:
        """Whether the innermost call waits for other ranks."""
        if not self.places:
            return False
        innermost = self.places[0].file.replace("\\", "/")
        return any(part in innermost for part in COLLECTIVES)

    def is_backward(self) -> bool:
        """Whether the innermost call is a backward pass, in which DDP waits for the gradients of the others."""
        return bool(self.places) and self.places[0].function == "_engine_run_backward"


def main_stack() -> Stack:
    """Where the main thread of this process stands, asked by another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    places = []
    iterator = None
    while frame is not None:
        code = frame.f_code
        places.append(Place(code.co_filename, frame.f_lineno or 0, code.co_name, frame.f_lasti))
        if code.co_name == "__next__" and code.co_filename.endswith("dataloader.py"):
            iterator = frame.f_locals.get("self")
        frame = frame.f_back

    # a loader counts what it has given, and knows which process has the next batch
    fetched = getattr(iterator, "_num_yielded", -1)
    worker = 0
    with contextlib.suppress(AttributeError, KeyError, IndexError):
        number = iterator._task_info[iterator._rcvd_idx][0]
        worker = iterator._workers[number].pid
    return Stack(places, fetched, worker)


def cpu_seconds() -> float:
    """Processor time that the main thread has used."""
    main = threading.main_thread()
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(main.ident))
    for thread in psutil.Process().threads():
        if thread.id == main.native_id:
            return thread.user_time + thread.system_time
    return 0.0


# --- in words ---------------------------------------------------------------------------------------------------------


def own_place(places: list[Place]) -> Place | None:
    """The innermost call in the project's own code; of another's where there is none."""
    passing = None
    for place in places:
        path = Path(place.file).absolute()
        if ROOT in path.parents and "site-packages" not in path.parts:
            if path.name not in PASSING_ON:
                return place
            passing = passing or place
    return passing or (places[0] if places else None)


def describe(places: list[Place]) -> str:
    """`tasks/x/data.py:120 read_image` for the place in the project where these calls begin."""
    place = own_place(places)
    if place is None:
        return "an unknown place"
    path = Path(place.file).absolute()
    name = path.relative_to(ROOT) if ROOT in path.parents else Path(*path.parts[-2:])
    return f"{name.as_posix()}:{place.line} {place.function}"


def as_text(places: list[Place]) -> str:
    """One line a call, innermost first."""
    return "\n".join(f'  File "{place.file}", line {place.line} in {place.function}' for place in places)


# --- other processes --------------------------------------------------------------------------------------------------


_folders: list[Path] = []


def answer_for_stack(folder: Path) -> None:
    """Write the stacks of all threads of this process into `folder` whenever ASK comes, without ending."""
    _folders[:] = [folder]
    if ASK is not None:
        file = open(folder / f"stack_{os.getpid()}", "w")  # noqa: SIM115 - faulthandler keeps it
        faulthandler.register(ASK, file=file, all_threads=True)


def answer_in_worker() -> None:
    """A loading process: answer as its rank does; a crash in C code leaves its stack there, too."""
    for folder in _folders:
        with contextlib.suppress(OSError):
            answer_for_stack(folder)
            if ASK is not None:
                faulthandler.enable(open(folder / f"stack_{os.getpid()}", "a"))  # noqa: SIM115


def answer_no_more() -> None:
    """The end of what answer_for_stack began, and of crashes that are written into a file."""
    _folders.clear()
    if ASK is not None:
        faulthandler.unregister(ASK)
    faulthandler.disable()
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.enable()


def ask_stack(pid: int, folder: Path, patience: float = 1.0) -> str:
    """What a process answers, the stacks of its threads; "" if it does not. A stopped one is woken for the answer."""
    path = folder / f"stack_{pid}"
    if ASK is None or not path.exists():
        # The signal would end a process that does not listen to it.
        return ""
    before = path.stat().st_size
    stopped = "stopped" in state_of(pid)
    with contextlib.suppress(OSError):
        os.kill(pid, ASK)
        if stopped:
            # the signal that waits comes before the next line of its code
            os.kill(pid, signal.SIGCONT)

    # complete once it grows no more
    deadline = time.monotonic() + patience
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if path.stat().st_size == size > before:
            break
        size = path.stat().st_size
    with contextlib.suppress(OSError):
        if stopped:
            os.kill(pid, signal.SIGSTOP)
    return path.read_bytes()[before:].decode(errors="replace")


def read_stack(text: str) -> list[Place]:
    """The calls of the main thread in what faulthandler wrote: it comes last."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    if text.startswith("Fatal Python error"):
        # of a crash, the thread that it is in
        threads = re.split(r"^Current thread .*$|^Thread .*$", text.partition("Current thread")[2], flags=re.MULTILINE)[
            :1
        ]
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', threads[-1], re.MULTILINE)
    return [Place(file, int(line), function) for file, line, function in found]


def created(pid: int) -> float:
    """When a process began, 0 where there is none: another process may get its number."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def state_of(pid: int, begun: float = 0.0) -> str:
    """`has died`, `is stopped (SIGSTOP)` and the like; "" for a process that runs or waits."""
    try:
        process = psutil.Process(pid)
        if begun and abs(process.create_time() - begun) > 1:
            return DIED
        return STATES.get(process.status(), "")
    except psutil.NoSuchProcess:
        return DIED
    except psutil.Error:
        return ""


def wait_for_ends(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run after so many seconds. One counts as ended whose parent has not asked for its code yet."""
    deadline = time.monotonic() + seconds
    alive = processes
    while True:
        alive = [process for process in alive if process.is_running() and state_of(process.pid) != DIED]
        if not alive or time.monotonic() >= deadline:
            return alive
        time.sleep(0.05)


def end_processes(processes: list[psutil.Process]) -> None:
    """Kill processes, also those that are stopped."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def end_children(pid: int) -> None:
    """Kill all that a process has started."""
    with contextlib.suppress(psutil.Error):
        end_processes(psutil.Process(pid).children(recursive=True))
