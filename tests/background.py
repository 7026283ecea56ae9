"""A training in the background, to be killed."""

import contextlib
import signal
import subprocess
import time
from pathlib import Path

import psutil
from conftest import ROOT, torchrun


class Run:
    """A training in the background, with ways to find and kill its processes."""

    def __init__(self, command: list, script: str, out: Path):
        self.script, self.out, self.log = Path(script).name, out, open(out.parent / f"{out.name}.log", "a")  # noqa: SIM115
        self.launcher = psutil.Popen([str(w) for w in command], cwd=ROOT, stdout=self.log, stderr=subprocess.STDOUT)

    def workers(self) -> list[psutil.Process]:
        found = []
        for process in self.launcher.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended; a zombie is one of these
                if self.script in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def wait_for_step(self, step: int) -> None:
        """Until a checkpoint of this step or a later one exists, or the run is over."""
        deadline = time.time() + 90
        while self.launcher.poll() is None and time.time() < deadline:
            if any(int(path.stem[5:]) >= step for path in self.out.glob("step_*.pt")):
                return
            time.sleep(0.02)

    def end(self, seconds: float = 60) -> int:
        """Wait for the launcher and every worker; a worker left behind fails the test."""
        known = self.everyone
        code = self.launcher.wait(timeout=seconds)
        _, alive = psutil.wait_procs(known, timeout=30)
        assert not alive, f"left behind: {alive}"
        return code

    def kill(self, who: str, number: int = signal.SIGKILL) -> None:
        self.everyone = [self.launcher, *self.launcher.children(recursive=True)]
        workers = self.workers()
        chosen = {"worker": workers[-1:], "rank0": workers[:1], "all": self.everyone, "launcher": [self.launcher]}[who]
        for process in chosen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def interrupt(words: list, out: Path, who: str, step: int, delay: float, number: int = signal.SIGKILL) -> int:
    """A script and its flags on two processes of torchrun, and a signal so long after a checkpoint of this step."""
    run = Run([*torchrun(2), *words], str(words[0]), out)
    run.wait_for_step(step)
    time.sleep(delay)
    run.kill(who, number)
    return run.end()
