"""A run that one of our launchers started ends with the script's exit code and without a traceback of torchrun."""

import os
import sys

import pytest
from conftest import ROOT
from test_hostile_values import DETECT, Stubs

LAUNCHER = ROOT / "old/launch_utils.py"

# A worker that does what the word for its rank says. It does not import torch, to be quick.
WORKER = """
import os, signal, sys, time

what = sys.argv[1 + int(os.environ.get("RANK", 0))]
ready = __file__ + ".ready"

if what.isdigit():
    sys.exit(int(what))
if what.startswith("signal "):
    os.kill(os.getpid(), int(what.split()[1]))

if what in ("saves", "stops the launcher"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if what == "cannot save":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
if what == "stops the launcher":
    while not os.path.exists(ready):
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
open(ready, "w").close()
time.sleep(60)
"""

TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node=2"]
SEGMENTATION_FAULT = "error: rank 0 ended with signal 11 (SIGSEGV)"


# The launcher, a word for each rank's worker, the exit code, and the launcher's last line.
ENDS = [
    (TORCHRUN, ["2", "2"], 2, ""),
    (TORCHRUN, ["waits", "1"], 1, ""),
    (TORCHRUN, ["waits", "signal 9"], 137, "error: rank 1 ended with signal 9 (SIGKILL)"),
    pytest.param(TORCHRUN, ["signal 11", "waits"], 139, SEGMENTATION_FAULT, marks=pytest.mark.soak),
    (TORCHRUN, ["77", "waits"], 77, "error: rank 0 ended with exit code 77"),
    # a launcher that is told to stop
    (TORCHRUN, ["saves", "stops the launcher"], 143, ""),
    (TORCHRUN, ["waits", "stops the launcher"], 143, ""),
    (TORCHRUN, ["cannot save", "stops the launcher"], 1, ""),
]


@pytest.mark.parametrize(("launcher", "ranks", "code", "line"), ENDS)
def test_how_workers_end(zygote, tmp_path, launcher, ranks, code, line):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    done = zygote(LAUNCHER, *launcher, worker, *ranks)
    assert done.code == code, done.stderr

    # the reason is the last line, where a script has not said it already
    if line:
        assert done.stderr.splitlines()[-1] == line
        assert "Traceback" not in done.stderr
    else:
        assert done.stderr == ""


def test_the_launcher_starts_the_python_beside_torchrun(tmp_path):
    """The command of before, behind `python old/launch_utils.py`; a torchrun that is not torch's own runs as it is."""
    stubs = Stubs(tmp_path)

    def started() -> list[str]:
        return stubs.run(DETECT, "--script", "train.py")[1].splitlines()

    before = started()
    assert before[0] == "torchrun"

    # a command of torch's own, and a python that says how it was started
    stubs.write("torchrun", "exit 9\nfrom torch.distributed.run import main")
    answer = f'[ "$2" = utils.hardware_utils ] && exec cat "{tmp_path}/facts"'
    stubs.write("python", f'{answer}\nprintf "%s\\n" "$@" >"{stubs.started}"')
    assert started() == [str(LAUNCHER), *before]


def test_world_size_starts_workers_through_it(monkeypatch):
    from old import distributed_utils

    started = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append((program, words)))
    monkeypatch.setattr(sys, "argv", ["train.py", "--world_size", "3"])
    distributed_utils.launch_workers(3)
    words = [sys.executable, str(LAUNCHER), "torchrun", "--standalone", "--nproc_per_node=3", *sys.argv]
    assert started == [(sys.executable, words)]
