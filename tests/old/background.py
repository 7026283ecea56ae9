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

    def __init__(self, command: list, script: str, out: Path, cwd: Path = ROOT):
        self.script = Path(script).name
        self.out = out
        self.everyone: list[psutil.Process] = []
        words = [str(word) for word in command]
        with open(out.parent / f"{out.name}.log", "a") as log:
            self.launcher = psutil.Popen(words, cwd=cwd, stdout=log, stderr=subprocess.STDOUT)

    def workers(self) -> list[psutil.Process]:
        """The processes that run the script, without the launcher."""
        workers = []
        for process in self.launcher.children(recursive=True):
            # it may have just ended, or be a zombie
            with contextlib.suppress(psutil.NoSuchProcess):
                if self.script in " ".join(process.cmdline()):
                    workers.append(process)
        return workers

    def wait_for_step(self, step: int) -> None:
        """Until a checkpoint of this step or a later one exists, or the run is over."""
        deadline = time.time() + 90
        while self.launcher.poll() is None and time.time() < deadline:
            if any(int(path.stem[5:]) >= step for path in self.out.glob("step_*.pt")):
                return
            time.sleep(0.02)

    def end(self, seconds: float = 60) -> int:
        """Wait for the launcher and every worker; a worker left behind fails the test."""
        code = self.launcher.wait(timeout=seconds)
        _, alive = psutil.wait_procs(self.everyone, timeout=30)
        assert not alive, f"left behind: {alive}"
        return code

    def kill(self, who: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the last "worker", to "rank0", to the "launcher" or to "all"."""
        self.everyone = [self.launcher, *self.launcher.children(recursive=True)]
        workers = self.workers()
        chosen = {
            "worker": workers[-1:],
            "rank0": workers[:1],
            "all": self.everyone,
            "launcher": [self.launcher],
        }
        for process in chosen[who]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def interrupt(words: list, out: Path, who: str, step: int, delay: float, number: int = signal.SIGKILL) -> int:
    """Run a script and its flags by torchrun; two processes get a signal so long after a checkpoint of this step."""
    run = Run([*torchrun(2), *words], str(words[0]), out)
    run.wait_for_step(step)
    time.sleep(delay)
    run.kill(who, number)
    return run.end()
