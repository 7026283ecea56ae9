"""A watch in each process: who keeps the others waiting, at which step and where in the code, before all end.

Every rank writes a sign of life with the stack of its main thread into a folder that all ranks of the machine share
(of all machines, once the run folder is known). A rank that waits for the others, or for its loader, for as long as
--dist_timeout reads the signs of all: the one that does not wait for others, or gives no sign, is the cause. One line
says so on each machine, hang_<time>.txt in the run folder holds all stacks, and every rank ends.

Nothing else is watched: whatever makes others wait no longer than --dist_timeout may take as long as it likes.
"""

import contextlib
import faulthandler
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from old import stack_utils
from old.async_save_utils import WRITER
from old.cli_utils import record_failure
from old.elastic_utils import crash_code
from old.phase_utils import current
from old.stack_utils import DIED, Place, Stack, as_text, ask_stack, cpu_seconds, created, describe, end_children
from old.stack_utils import main_stack, read_stack, state_of
from old.stop_utils import StopWatch, only_note_stop_signals

# Seconds that a collective of gloo or NCCL has beyond --dist_timeout: the watch comes first.
GRACE = 3.0

# A main thread that uses less than this share of a core waits.
IDLE = 0.02

# What gloo, NCCL and the store say where the cause is another rank's.
ECHOES = re.compile(
    r"[Cc]onnection (was )?(closed|reset|refused|aborted)|Broken pipe|[Tt]imed out|[Tt]imeout|peer|ncclRemoteError"
    r"|NCCL communicator was aborted|recvValue|sendBytes|Failed to recv|failed to send|Socket closed"
)

# Entries of NCCL's flight recorder that are kept for each process, unless the user says otherwise.
NCCL_ENTRIES = "2000"


# Of these the connections are still there.
TIMED_OUT = re.compile(r"[Tt]ime(d )?out")

# What the sign of a rank says that left by a stop signal, before the exit code.
STOPPED = "stopped by a signal: "

# How long a checkpoint that is being written is waited for, in seconds.
SAVE_SECONDS = 60


def is_saving() -> bool:
    """Whether a thread of this process writes a checkpoint."""
    return WRITER.thread is not None and WRITER.thread.is_alive()


def record_collectives() -> None:
    """Before NCCL starts: let it keep a record of its collectives. torch warns of the name that is not its own."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    name = "TORCH_NCCL_TRACE_BUFFER_SIZE" if version < (2, 9) else "TORCH_FR_BUFFER_SIZE"
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault(name, NCCL_ENTRIES)


def pending_collective() -> str:
    """The oldest collective that this process has given to NCCL and that is not done; "" for none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None or not dist.is_initialized() or not torch.cuda.is_initialized():
        return ""
    try:
        return oldest_pending(json.loads(dump(includeCollectives=True, onlyActive=False)))
    except (RuntimeError, TypeError, ValueError):
        return ""


def oldest_pending(record: dict) -> str:
    """`all_reduce (NCCL collective 41 of default_pg)` for the oldest entry of a record that is not completed."""
    waiting = [entry for entry in record.get("entries", []) if entry.get("state") != "completed"]
    if not waiting:
        return ""
    oldest = min(waiting, key=lambda entry: entry.get("time_created_ns", 0))
    name = oldest.get("profiling_name", "collective").removeprefix("nccl:")
    number = oldest.get("collective_seq_id", "?")
    group = (oldest.get("process_group") or ["", "?"])[-1]
    return f"{name} (NCCL collective {number} of {group})"


def current_phase() -> str:
    """What the run is busy with, "" for nothing."""
    phases = current()
    return phases[-1][0] if phases else ""


# --- the watch of one process -----------------------------------------------------------------------------------------


class Watch(threading.Thread):
    """Looks at the main thread of this process, and gives signs of life once `share` has said where.

    step: tells how many steps are done, None outside of a training. run_folder: where the stacks go, once
    it is known.
    """

    def __init__(self, rank: int, world_size: int, timeout: float, several_nodes: bool):
        super().__init__(name="watch", daemon=True)
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.several_nodes = several_nodes
        self.on_gpu = torch.cuda.is_available()
        self.step: Callable[[], int | None] = lambda: None
        self.run_folder: Path | None = None

        # how often to look, to give a sign; how long without one before a rank counts as silent
        self.tick = min(1.0 if several_nodes else 0.5, timeout / 20)
        self.interval = min(10.0, max(0.5, timeout / 20))
        self.silence = min(timeout / 2, max(2.0, 3 * self.interval))

        # the folder of this machine's ranks, and of all ranks
        self.local: Path | None = None
        self.folder: Path | None = None
        self.leaving = threading.Event()
        self.lock = threading.Lock()
        self.number = 0
        self.crash = ""
        self.frozen = False
        self.ending = False
        self.born = created(os.getpid())

        # what the main thread was last seen in, for how long, and how much of that without using a core
        self.stack = Stack([])
        self.same = 0.0
        self.idle = 0.0
        self.cpu = 0.0
        self.nccl = ""
        self.worker_text = ""
        self.before: dict[int, dict] | None = None

    # --- what it sees -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look, give signs, and end this process where there is a verdict."""
        looked = time.monotonic()
        written = -self.interval
        while not self.leaving.wait(self.tick):
            # a process that was suspended has not waited meanwhile
            now = time.monotonic()
            self.look(min(now - looked, 2 * self.tick))
            looked = now
            if self.folder is None:
                self.end_unmet()
                continue
            if now - written >= self.interval:
                written = now
                self.give_sign()
            self.decide()

    def look(self, seconds: float) -> None:
        """Compare the main thread with how it was so many seconds ago."""
        if self.frozen:
            return
        stack = main_stack()
        cpu = cpu_seconds()

        # another place in the code begins anew
        if stack.key() != self.stack.key():
            self.same = 0.0
            self.idle = 0.0
            self.nccl = ""
            self.worker_text = ""
            self.before = None
        else:
            self.same += seconds
            self.idle += seconds
            if cpu - self.cpu > IDLE * seconds + 0.005:
                self.idle = 0.0

        # what the next look compares with
        self.stack = stack
        self.cpu = cpu

        # a GPU's collective holds up the host wherever that needs a result, often without leaving its core free
        if self.on_gpu and self.world_size > 1 and self.same >= self.timeout / 2:
            pending = pending_collective()
            if pending != self.nccl:
                self.same = self.timeout / 2 if self.nccl else self.same
                self.nccl = pending

    def waits_for(self) -> tuple[str, float]:
        """("ranks", seconds), ("data", seconds), or ("", seconds) where the main thread is in code of its own."""
        if self.world_size > 1:
            if self.nccl:
                return "ranks", self.same
            # on a GPU, a backward pass runs in threads of its own
            if self.stack.is_collective() or (self.stack.is_backward() and not self.on_gpu and self.idle):
                return "ranks", self.idle
        if self.stack.fetched >= 0:
            return "data", self.same
        return "", self.same

    def sign(self) -> dict:
        """What the others need to know about this rank."""
        wait, still = self.waits_for()

        # the name of what it waits in
        inner = self.stack.places[0].function if self.stack.places else ""
        name = "the exchange of gradients" if self.stack.is_backward() else inner

        # who it is, and how far it has come
        sign = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "born": self.born,
            "number": self.number,
            # where the run stands, and the main thread
            "step": self.step(),
            "doing": current_phase(),
            "saving": is_saving(),
            "crash": self.crash,
            "error_file": os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
        }

        # where it stands, and the process that loads for it
        return sign | {
            "wait": wait,
            "still": still,
            "in": self.nccl or name,
            "place": describe(self.stack.places),
            "stack": as_text(self.stack.places),
            "worker": self.stack.worker,
            "worker_state": state_of(self.stack.worker) if self.stack.worker else "",
            "worker_text": self.worker_text,
        }

    def give_sign(self) -> None:
        """Write the sign of this rank. A full disk is no reason to end here."""
        with self.lock, contextlib.suppress(OSError):
            self.number += 1
            path = self.folder / f"sign_{self.rank}"
            temporary = self.folder / f".sign_{self.rank}"
            temporary.write_text(json.dumps(self.sign()), encoding="utf-8")
            os.replace(temporary, path)

    def read_signs(self) -> dict[int, dict]:
        """{rank: its last sign} of the ranks that have given one here."""
        signs = {}
        for rank in range(self.world_size):
            with contextlib.suppress(OSError, ValueError):
                signs[rank] = json.loads((self.folder / f"sign_{rank}").read_text(encoding="utf-8"))

        # what can be seen from this machine
        for sign in signs.values():
            sign["state"] = ""
            if sign["host"] == socket.gethostname():
                sign["state"] = state_of(sign["pid"], sign["born"])
                with contextlib.suppress(OSError):
                    sign["fault"] = (self.local / f"fault_{sign['pid']}").read_text(errors="replace")
        return signs

    # --- what it decides ----------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """End with the others where there is a verdict; find one where this rank has waited too long."""
        told = self.read_verdict()
        if told:
            self.end(told)
        wait, still = self.waits_for()
        if not wait or still < self.timeout - self.silence:
            return

        # two looks at the signs of all, some time apart, tell who is silent
        if self.before is None:
            self.before = self.read_signs()
            if wait == "data":
                self.worker_text = ask_stack(self.stack.worker, self.local) if self.stack.worker else ""
            self.give_sign()
        # of each machine one rank asks: a stopped one that is woken twice would go on meanwhile
        if still >= self.timeout and self.is_first("asking"):
            self.give_sign()
            signs = self.read_signs()
            self.ask_silent(signs)
            line = verdict(signs, self.before, self.timeout)
            if line:
                self.pronounce(line, signs)
            with contextlib.suppress(OSError):
                (self.local / "asking").unlink()

    def ask_silent(self, signs: dict[int, dict]) -> None:
        """Add the stacks of this machine's ranks that give no sign: stopped ones, and ones deep in C code."""
        for rank, sign in signs.items():
            here = sign["host"] == socket.gethostname() and sign["state"] != DIED
            if here and is_silent(sign, self.before.get(rank)):
                sign["fault"] = ask_stack(sign["pid"], self.local)

    def end_unmet(self) -> None:
        """End where the ranks have not found each other in time: a port may belong to a program that never answers."""
        wait, still = self.waits_for()
        if self.local is None and wait == "ranks" and still >= self.timeout + GRACE:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            line = f"error: rank {self.rank} on {socket.gethostname()}: no answer from rank 0 at {place}"
            line += "; see its log, and the address and port (MASTER_ADDR, MASTER_PORT)"
            print(line, file=sys.stderr, flush=True)
            record_failure(line)
            os._exit(2)

    def pronounce(self, line: str, signs: dict[int, dict]) -> None:
        """Write the stacks and the verdict, unless another rank was faster, and end."""
        path = (self.run_folder or Path(tempfile.gettempdir())) / f"hang_{datetime.now():%Y%m%d-%H%M%S}.txt"
        draft = self.folder / f".verdict_{self.rank}"
        facts = {"line": f"error: {line}; stacks: {path}", "signs": signs}
        try:
            draft.write_text(json.dumps(facts), encoding="utf-8")
            os.link(draft, self.folder / "verdict")
        except FileExistsError:
            draft.unlink(missing_ok=True)
            self.end(self.read_verdict() or facts)
        except OSError:
            # a full disk: each rank says what it knows
            self.end(facts)
        draft.unlink(missing_ok=True)
        try:
            path.write_text(stacks_of(facts["line"], signs), encoding="utf-8")
        except OSError as error:
            print(f"warning: {path}: not written ({error.strerror})", file=sys.stderr, flush=True)
        self.end(facts)

    def read_verdict(self) -> dict | None:
        """What a rank has found, None for nothing."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "verdict").read_text(encoding="utf-8"))
        return None

    def end(self, facts: dict) -> None:
        """End this process; of each machine one rank says why, and ends those that cannot do so by themselves."""
        self.frozen = True
        self.ending = True
        record_failure(facts["line"])
        self.give_sign()
        if self.is_first("told"):
            print(facts["line"], file=sys.stderr, flush=True)
            self.end_silent(facts)

        # a checkpoint that is being written is completed
        if is_saving():
            WRITER.thread.join(SAVE_SECONDS)
        end_children(os.getpid())
        self.leave_folders()
        os._exit(crash_code())

    def is_first(self, name: str) -> bool:
        """Whether no other rank of this machine has asked for this name yet."""
        try:
            (self.local / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def end_silent(self, facts: dict) -> None:
        """Kill the ranks of this machine that do not follow the verdict: stopped ones, and ones deep in C code."""
        others = []
        for sign in facts["signs"].values():
            own = sign["host"] == socket.gethostname() and sign["pid"] != os.getpid()
            if own and sign["state"]:
                # torchrun hears the cause of an end that this rank cannot tell itself
                record_failure(facts["line"], path=sign["error_file"])
            with contextlib.suppress(psutil.Error):
                if own and abs(created(sign["pid"]) - sign["born"]) < 1:
                    others.append(psutil.Process(sign["pid"]))

        # stopped ones cannot follow at all; the others need a moment
        stopped = [process for process in others if "stopped" in state_of(process.pid)]
        patience = 0.0 if len(stopped) == len(others) else self.tick + 1.5
        alive = stack_utils.wait_for_ends(others, patience)

        # and longer where a checkpoint is being written
        saving = {sign["pid"] for sign in self.read_signs().values() if sign["saving"] and not sign["state"]}
        if any(process.pid in saving for process in alive):
            alive = stack_utils.wait_for_ends(alive, SAVE_SECONDS)
        for process in alive:
            end_children(process.pid)
        stack_utils.end_processes(alive)
        stack_utils.wait_for_ends(alive, 1)

    # --- when it begins and ends --------------------------------------------------------------------------------------

    def share(self, name: str) -> None:
        """Give signs from here on, in a folder that the ranks of this machine know by this name."""
        base = Path("/dev/shm")
        if not os.access(base, os.W_OK):
            base = Path(tempfile.gettempdir())
        sweep(base)
        with contextlib.suppress(OSError):
            folder = base / f"ranks-{name}"
            folder.mkdir(mode=0o700, exist_ok=True)
            stack_utils.answer_for_stack(folder)
            fault = open(folder / f"fault_{os.getpid()}", "w")  # noqa: SIM115 - faulthandler keeps it
            if self.world_size > 1:
                # the other ranks read it when this one is gone
                faulthandler.enable(fault, all_threads=True)
            self.local = folder
            self.folder = folder
            self.give_sign()

    @contextlib.contextmanager
    def of_run(self, run_folder: Path, step: Callable[[], int]) -> Iterator[None]:
        """All ranks, around a training: the stacks go to its folder, and several machines give signs there."""
        self.run_folder = run_folder
        self.step = step
        if self.several_nodes and self.local is not None:
            with contextlib.suppress(OSError):
                folder = run_folder / ".watch" / self.local.name
                if self.rank == 0:
                    sweep_run(folder)
                folder.mkdir(parents=True, exist_ok=True)
                self.folder = folder
                self.give_sign()
        try:
            yield
        finally:
            self.leave_shared()
            self.folder = self.local

    def stop(self) -> None:
        """At the end of this process: no signs any more."""
        self.leaving.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout=5)
        if self.local is not None:
            stack_utils.answer_no_more()
            self.leave_folders()

    def leave_shared(self) -> None:
        """Take this rank's sign back from the run folder; the last rank clears up."""
        if self.folder == self.local:
            return
        with contextlib.suppress(OSError):
            (self.folder / f"sign_{self.rank}").unlink(missing_ok=True)
            if not any(self.folder.glob("sign_*")):
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.parent.rmdir()

    def leave_folders(self, keep_sign: bool = False) -> None:
        """Take this rank's sign back, unless the others are to read it; the last rank of this machine clears up."""
        if self.local is None:
            return
        if not keep_sign:
            self.leave_shared()
            (self.local / f"sign_{self.rank}").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.local / f"fault_{os.getpid()}").unlink(missing_ok=True)
            (self.local / f"stack_{os.getpid()}").unlink(missing_ok=True)
            if not is_in_use(self.local):
                shutil.rmtree(self.local, ignore_errors=True)

    # --- when a rank crashes ------------------------------------------------------------------------------------------

    def is_echo(self, error: BaseException) -> bool:
        """Whether an error may be the effect of another rank's end: gloo's and NCCL's are RuntimeErrors."""
        return isinstance(error, RuntimeError) and bool(ECHOES.search(str(error)))

    def end_crashed(self, error: BaseException) -> None:
        """End this process, whose main thread got an error: with its traceback, or with the cause in another rank.

        To be called in the main thread.
        """
        only_note_stop_signals()
        while self.ending:
            # it is an effect of the end that the watch has begun
            time.sleep(1)
        self.frozen = True
        if self.is_echo(error):
            facts = self.find_cause(timed_out=bool(TIMED_OUT.search(str(error)))) if self.folder else None
            if facts:
                self.end(facts)
            if StopWatch.code:
                # all ranks were told to stop, and others were faster
                os._exit(StopWatch.code)

        # the place and the message of its own error
        calls = traceback.extract_tb(error.__traceback__)
        places = [Place(call.filename, call.lineno or 0, call.name) for call in reversed(calls)]
        places = self.stack_of_worker(str(error)) or places
        reason = traceback.format_exception_only(error)[-1].strip()
        host = socket.gethostname()
        line = f"rank {self.rank} on {host} crashed{at_step(self.step())} in {describe(places)}: {reason}"
        self.say_last(line)
        text = "".join(traceback.format_exception(error))
        print(f"{text}error: {line}", file=sys.stderr, flush=True)
        record_failure(line, text)
        self.ending = True
        end_children(os.getpid())
        self.leave_folders(keep_sign=True)
        os._exit(crash_code())

    def say_last(self, line: str) -> None:
        """Tell the other ranks why this one ends, so that they do not look for a cause."""
        self.crash = line
        if self.folder is not None:
            self.give_sign()

    def stack_of_worker(self, reason: str) -> list[Place]:
        """Where a loading process crashed whose number torch's message has; empty where it did not say."""
        found = re.search(r"DataLoader worker \(pid\(?s?\)? (\d+)", reason)
        if found and self.local is not None:
            with contextlib.suppress(OSError):
                return read_stack((self.local / f"stack_{found[1]}").read_text(errors="replace"))
        return []

    def find_cause(self, timed_out: bool) -> dict | None:
        """What ended another rank, or holds it up; None where nothing is found in time.

        timed_out: the connections are there, but nothing came.
        """
        # the others' signs are some seconds old; the step of this one is that of all
        self.give_sign()
        before = self.read_signs()
        look_long = timed_out or self.folder != self.local
        begun = time.monotonic()
        deadline = begun + (self.silence + 1 if look_long else 3.0)
        while time.monotonic() < deadline:
            told = self.read_verdict() or self.told_by_other(before)
            if told:
                return told
            if StopWatch.code and time.monotonic() > begun + 1:
                return None
            time.sleep(0.2)

        # someone hangs, or all wait for each other; this rank does not
        if not look_long:
            return None
        signs = self.read_signs()
        others = {rank: sign for rank, sign in signs.items() if rank != self.rank}
        line = verdict(others, before, self.timeout)
        if not line and len(signs) == self.world_size:
            line = all_wait(others)
        if line:
            self.pronounce(line, signs)
        return None

    def told_by_other(self, before: dict[int, dict]) -> dict | None:
        """What a rank has said before it ended; a rank that has died without a word is the verdict."""
        signs = self.read_signs()
        for rank, sign in signs.items():
            if rank == self.rank:
                continue
            if sign["crash"].startswith(STOPPED):
                # it has left as it was told, and so do the others
                os._exit(int(sign["crash"].removeprefix(STOPPED)))
            if sign["crash"]:
                # it has said so itself on its machine
                if sign["host"] == socket.gethostname():
                    self.is_first("told")
                return {"line": f"error: {sign['crash']}", "signs": {}}
            if sign["state"] == DIED:
                self.pronounce(verdict(signs, before, self.timeout), signs)
        return None


# --- the verdict ------------------------------------------------------------------------------------------------------


def find_culprits(signs: dict[int, dict], before: dict[int, dict]) -> list[int]:
    """The ranks that keep the others waiting, the likeliest first.

    They have died, or given no sign since `before`, or do not wait for others, the one that stands longest first.
    """
    dead = [rank for rank, sign in signs.items() if sign["state"] == DIED]
    silent = [rank for rank, sign in signs.items() if is_silent(sign, before.get(rank)) and rank not in dead]
    rest = [rank for rank, sign in signs.items() if sign["wait"] != "ranks" and rank not in (*dead, *silent)]
    rest.sort(key=lambda rank: -signs[rank]["still"])
    return dead + silent + rest


def is_silent(sign: dict, before: dict | None) -> bool:
    """Whether a rank has given no sign since an earlier look."""
    return bool(before) and sign["number"] == before["number"]


def verdict(signs: dict[int, dict], before: dict[int, dict], timeout: float) -> str:
    """One line about the rank that keeps the others waiting; "" where all wait for each other.

    signs, before: of each rank, now and at an earlier look.
    """
    culprits = find_culprits(signs, before)
    if not culprits:
        return ""
    rank = culprits[0]
    sign = signs[rank]
    if sign["step"] is not None:
        # a rank that died or was stopped gave its last sign some steps ago, and all make each step together
        sign["step"] = max(other["step"] or 0 for other in signs.values())
    parts = [describe_culprit(sign, before.get(rank), timeout)]
    waiting = describe_waiting([sign for rank, sign in signs.items() if rank not in culprits])
    if waiting:
        parts.append(waiting)
    return "; ".join(parts)


def describe_culprit(sign: dict, before: dict | None, timeout: float) -> str:
    """`rank 2 on node7 hangs after step 40 in tasks/x/data.py:120 read_image (loading process 1234)`."""
    name = f"rank {sign['rank']} on {sign['host']}"
    place = sign["place"]
    what = "hangs"
    advice = ""

    # a stopped rank has given its stack when it was woken, one that crashed in C code when it died
    fault = sign.get("fault", "")
    if read_stack(fault):
        place = describe(read_stack(fault))
    if sign["state"] == DIED:
        what = "has died (killed from outside, or out of memory)"
        if not fault:
            place += " (where it was last seen)"
        if fault.startswith("Fatal"):
            what = f"has died ({fault.splitlines()[0].removeprefix('Fatal Python error: ')})"
    elif sign["state"]:
        name += f" (process {sign['pid']})"
        what = sign["state"]

    # one that lives
    elif is_silent(sign, before):
        what = "gives no sign of life"
    elif sign["wait"] == "data":
        stack = read_stack(sign["worker_text"])
        if stack:
            place = describe(stack)
        if sign["worker"]:
            place += f" (loading process {sign['worker']} {sign['worker_state']}".rstrip() + ")"
    elif sign["still"] < timeout / 2:
        what = "keeps the others waiting"
        advice = "; raise --dist_timeout if it needs longer"
    # what the last sign says may be over, where the rank has gone on from there or the stack is newer
    if sign["doing"] and sign["state"] != DIED and not read_stack(fault):
        place += f", {sign['doing']}"
    return f"{name} {what}{at_step(sign['step'])} in {place}{advice}"


def describe_waiting(signs: list[dict]) -> str:
    """`ranks 0, 1, 3 wait in all_reduce (old/loop_utils.py:209 optimizer_steps)` of some ranks' signs."""
    groups: dict[str, list[str]] = {}
    for sign in signs:
        groups.setdefault(f"{sign['in']} ({sign['place']})", []).append(str(sign["rank"]))
    parts = []
    for place, ranks in groups.items():
        many = f", and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        who = f"ranks {', '.join(ranks[:8])}{many} wait" if len(ranks) > 1 else f"rank {ranks[0]} waits"
        parts.append(f"{who} in {place}")
    return ", ".join(parts)


def all_wait(signs: dict[int, dict]) -> str:
    """One line where every rank waits for others: in different places, or for a network that stands still."""
    waiting = describe_waiting(list(signs.values()))
    if len({(sign["in"], sign["place"]) for sign in signs.values()}) > 1:
        return f"the ranks wait for each other: {waiting}"
    return f"all ranks wait and none holds them up: {waiting}; look at the network between them"


def at_step(step: int | None) -> str:
    """` after step 40`, nothing before there is a training."""
    return "" if step is None else f" after step {step}"


def stacks_of(line: str, signs: dict[int, dict]) -> str:
    """The text of hang_<time>.txt: the verdict, and each rank's stacks."""
    parts = [line]
    for rank, sign in sorted(signs.items()):
        wait = {"ranks": "waits for other ranks", "data": "waits for its loader"}.get(sign["wait"], "does not wait")
        head = f"rank {rank} on {sign['host']}, process {sign['pid']}{at_step(sign['step'])}: {wait}"
        parts.append(f"{head} for {sign['still']:.0f} s, {sign['state'] or 'alive'}; {sign['doing']}".rstrip("; "))
        parts.append(f"main thread, innermost call first, in {sign['in']}:\n{sign['stack']}")
        if sign["worker"]:
            text = sign["worker_text"] or "  gave no stack"
            parts.append(f"loading process {sign['worker']} {sign['worker_state']}:\n{text}")
        if sign.get("fault"):
            parts.append(sign["fault"])
    return "\n\n".join(parts) + "\n"


# --- folders that ranks of this machine share -------------------------------------------------------------------------


def is_in_use(folder: Path) -> bool:
    """Whether a rank lives that gives signs in this folder."""
    return any(state_of(int(path.name.removeprefix("fault_"))) != DIED for path in folder.glob("fault_*"))


def sweep(base: Path) -> None:
    """Delete the folders of this user whose ranks were all killed."""
    for folder in base.glob("ranks-*"):
        with contextlib.suppress(OSError, ValueError):
            facts = folder.stat()
            own = not hasattr(os, "getuid") or facts.st_uid == os.getuid()
            if own and time.time() - facts.st_mtime > 60 and not is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


def sweep_run(own: Path) -> None:
    """Delete what starts before the last day have left beside this folder; a lock keeps other runs out."""
    for folder in own.parent.glob("ranks-*"):
        with contextlib.suppress(OSError):
            if folder != own and time.time() - folder.stat().st_mtime > 24 * 3600:
                shutil.rmtree(folder, ignore_errors=True)


# --- the watch of this process ----------------------------------------------------------------------------------------

_watches: list[Watch] = []


def start_watch(rank: int, world_size: int, timeout: float, several_nodes: bool) -> Watch:
    """Watch this process's main thread from here on; a crash in C code tells its place."""
    if not faulthandler.is_enabled():
        # a standard error without a file, as under a test, has no place for it
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            faulthandler.enable()
    record_collectives()
    watch = Watch(rank, world_size, timeout, several_nodes)
    _watches.append(watch)
    watch.start()
    return watch


def stop_watch(watch: Watch) -> None:
    """The end of setup_distributed."""
    _watches.remove(watch)
    watch.stop()


def watch_run(run_folder: Path, step: Callable[[], int]) -> contextlib.AbstractContextManager:
    """Around a training: see Watch.of_run. Without a watch, as in a test of a part, nothing."""
    return _watches[-1].of_run(run_folder, step) if _watches else contextlib.nullcontext()


def say_stopped(code: int) -> None:
    """Before a process leaves by a stop signal: tell the other ranks."""
    for watch in _watches:
        watch.say_last(f"{STOPPED}{code}")


def say_last(line: str) -> None:
    """Before a process ends with a line of its own: tell the other ranks, and torchrun."""
    record_failure(line)
    for watch in _watches:
        watch.say_last(f"rank {watch.rank} on {socket.gethostname()}: {line}")
    end_children(os.getpid())
