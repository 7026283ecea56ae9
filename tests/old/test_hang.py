"""A rank that hangs is named, with the place in the code, and every rank ends; see docs/hangs.md and hang_trial.py."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT
from hang_trial import PLANTED, SHORT_EPOCHS

from old.hang_utils import Watch, oldest_pending, verdict
from old.stack_utils import wait_for_ends

TIMEOUT = 12


@pytest.mark.parametrize("kind", ["SIGSTOP of a rank", "endless loop in a loader"])
def test_the_rank_and_the_place_are_named(zygote, compressed_ad_flags, tmp_path, kind):
    fault, file, function, in_loader, pattern = PLANTED[kind]
    out = tmp_path / "run"
    facts = {"kind": fault, "rank": 1, "file": file, "function": function, "call": 2, "in_loader": in_loader}
    facts |= {"told": str(tmp_path / "told"), "after": str(out / "metrics.jsonl")}

    # a place in the planting script is none of the project's
    planter = shutil.copy(ROOT / "tests/old/plant_fault.py", tmp_path)
    flags = compressed_ad_flags(out, *SHORT_EPOCHS.split(), "--dist_timeout", TIMEOUT)
    done = zygote(planter, ROOT / "train.py", flags, ranks=2, FAULT=json.dumps(facts))
    assert (tmp_path / "told").exists(), done.stdout[-2000:] + done.stderr[-2000:]
    seconds = time.time() - float((tmp_path / "told").read_text())

    # one line; torch warns where the planter's timer interrupts it
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "Traceback" not in done.stderr
    assert len(errors) == 1, done.stderr
    assert re.search(pattern.format(rank=1), errors[0])
    assert "rank 0 waits in" in errors[0]

    # the stacks of both ranks, and in time
    text = next(out.glob("hang_*.txt")).read_text()
    assert "rank 0 on" in text
    assert re.search(rf'{file}", line \d+,? in {function}', text)
    # hang_trial.py holds it to 5 s, on a machine with nothing else to do
    assert seconds < TIMEOUT + 12


def sign(rank: int, **facts) -> dict:
    """A rank that waits for the others."""
    usual = {
        "rank": rank,
        "host": "a",
        "pid": 1,
        "number": 7,
        "step": 3,
        "wait": "ranks",
        "still": 60,
        "in": "all_reduce",
        # where it stands, and its loading process
        "place": "x.py:1 f",
        "state": "",
        "doing": "",
        "worker": 0,
        "worker_state": "",
        "worker_text": "",
    }
    return usual | facts


def test_a_rank_that_works_or_is_silent_is_the_cause():
    """Of ranks on other machines, too; where all wait for each other nobody is accused."""
    before = {rank: sign(rank, number=5) for rank in range(3)}
    waiting = {rank: sign(rank) for rank in range(3)}
    assert verdict(waiting, before, 60) == ""

    busy = waiting | {2: sign(2, wait="", still=1, place="index.py:9 build", doing="reading the table", host="b")}
    line = verdict(busy, before, 60)
    assert line.startswith("rank 2 on b keeps the others waiting after step 3 in index.py:9 build, reading the table")
    assert "ranks 0, 1 wait in all_reduce (x.py:1 f)" in line

    silent = waiting | {1: sign(1, number=5, host="b")}
    assert verdict(silent, before, 60).startswith("rank 1 on b gives no sign of life after step 3")


OWN_ERROR = """
import sys
sys.path.insert(0, sys.argv[1])
from old.hang_utils import Watch

watch = Watch(0, 2, 600, False)
watch.share(sys.argv[2])
try:
    raise OSError(110, "Connection timed out", "image_77.png")
except OSError as error:
    watch.end_crashed(error)
"""


def test_an_error_of_a_rank_is_told_though_it_speaks_of_a_connection():
    """A file server's, say; it is not taken for the echo of another rank's end."""
    command = [sys.executable, "-c", OWN_ERROR, ROOT, f"test-{os.getpid()}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.search(r"error: rank 0 on \S+ crashed in .*: TimeoutError: .*image_77.png", last)


ENDS_ANOTHER = """
import subprocess, sys, threading
sys.path.insert(0, sys.argv[1])
from old.hang_utils import Watch
from old.stack_utils import created

watch = Watch(0, 2, 600, False)
watch.share(sys.argv[2])
loader, other = (subprocess.Popen(["sleep", "60"], stdout=2) for _ in range(2))
facts = watch.sign() | {"rank": 1, "pid": other.pid, "born": created(other.pid), "state": ""}
threading.Thread(target=watch.end, args=[{"line": "error: rank 1 hangs", "signs": {1: facts}}]).start()
print("ending", flush=True)
watch.end_crashed(RuntimeError("Connection closed by peer"))
"""


def test_the_launchers_signal_does_not_cut_the_end_off():
    """torchrun sends SIGTERM once a rank has ended; a rank that ends others completes that, and leaves none behind."""
    command = [sys.executable, "-c", ENDS_ANOTHER, ROOT, f"test-{os.getpid()}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ending:
        assert ending.stdout.readline() == "ending\n"
        time.sleep(0.5)
        ending.terminate()

        # both children hold the stream, so that it ends with the last of them
        begun = time.monotonic()
        errors = ending.communicate()[1]
    assert ending.returncode == 1
    assert errors.splitlines()[-1] == "error: rank 1 hangs"
    assert time.monotonic() - begun < 20


NOTES_A_SIGNAL = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from old.distributed_utils import StopSignal
from old.stop_utils import StopWatch

try:
    with StopSignal():
        raise ValueError
except ValueError:
    os.kill(os.getpid(), signal.SIGTERM)
    print(StopWatch.code)
"""


def test_a_stop_signal_after_an_error_is_noted():
    """From the end of the training loop on, until the error is told."""
    done = subprocess.run([sys.executable, "-c", NOTES_A_SIGNAL, ROOT], capture_output=True, text=True)
    assert done.stdout == "143\n", done.stderr


def test_a_dead_ranks_step_is_that_of_the_others(tmp_path, monkeypatch):
    """Its last sign, and theirs, are of some seconds before."""
    watch = Watch(0, 2, 600, False)
    watch.local = watch.folder = tmp_path
    watch.step = lambda: 60

    # what is pronounced ends the process
    def pronounce(line: str, _) -> None:
        raise SystemExit(line)

    monkeypatch.setattr(watch, "pronounce", pronounce)
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    for rank in range(2):
        facts = sign(rank, step=29, pid=dead.pid, born=1.0, crash="", doing="step 30", host=socket.gethostname())
        (tmp_path / f"sign_{rank}").write_text(json.dumps(facts))
    with pytest.raises(SystemExit, match=r"after step 60 in x.py:1 f \(where it was last seen\)$"):
        watch.find_cause(timed_out=False)


def test_a_process_that_has_ended_is_not_waited_for():
    """torchrun asks for the code of the first rank before those of the others, which are zombies until then."""
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as ended:
        ended.stdout.read()
        begun = time.monotonic()
        assert wait_for_ends([psutil.Process(ended.pid)], 20) == []
        assert time.monotonic() - begun < 10


def test_the_oldest_collective_of_nccl():
    """In the form of torch's flight recorder."""
    entries = [
        {"state": "completed", "time_created_ns": 1, "profiling_name": "nccl:all_gather", "collective_seq_id": 6},
        {"state": "started", "time_created_ns": 3, "profiling_name": "nccl:broadcast", "collective_seq_id": 8},
        {"state": "started", "time_created_ns": 2, "profiling_name": "nccl:all_reduce", "collective_seq_id": 7},
    ]
    entries[2]["process_group"] = ["0", "default_pg"]
    assert oldest_pending({"entries": entries}) == "all_reduce (NCCL collective 7 of default_pg)"
    assert oldest_pending({"entries": entries[:1]}) == ""
