"""verify.py as the zygote runs it: the repetition is a fork of this process, too, and may be planted with a change.

    verify_in_fork.py RUN [flags of verify.py]

PLANT in the environment names what is changed in the repetition alone: "linear:N" lets torch's linear layers round
another way from the N-th optimizer step of the repetition on, as another version of a library may.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from old import loop_utils
from old import replay_utils
from zygote import ROOT, free_port


class Fork:
    """The part of subprocess.Popen that replay_utils uses, for one or more ranks that are forks."""

    def __init__(self, command: list[str], folder: str | None, environment: dict[str, str], output):
        processes = world_size_of(command)
        port = free_port()
        self.returncode = None
        self.running = {}
        for rank in range(processes):
            child = os.fork()
            if not child:
                for descriptor in (1, 2):
                    os.dup2(output.fileno(), descriptor)
                if processes > 1:
                    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
                    environment |= {"LOCAL_WORLD_SIZE": str(processes)}
                    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                os._exit(become(command, environment))
            self.running[child] = None
        self.pid = child

    def poll(self) -> int | None:
        for child, code in self.running.items():
            if code is None:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    self.running[child] = os.waitstatus_to_exitcode(status)

        # the code farthest from 0 tells most
        codes = list(self.running.values())
        if self.returncode is None and None not in codes:
            self.returncode = max(codes, key=abs)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while self.poll() is None:
            time.sleep(0.02)
        return self.returncode

    def kill(self) -> None:
        for child, code in self.running.items():
            if code is None:
                os.kill(child, signal.SIGKILL)


def world_size_of(command: list[str]) -> int:
    """How many processes the flags of a repetition ask for."""
    import yaml

    config = Path(command[command.index("--config") + 1])
    return yaml.safe_load(config.read_text())["world_size"]


def become(command: list[str], environment: dict[str, str]) -> int:
    """Run the script in this fork; returns its exit code."""
    os.environ |= environment
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    sys.argv = command[1:]
    plant(os.environ.get("PLANT", ""))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        return error.code or 0
    except BaseException as error:
        print(f"error: {error!r}", flush=True)
        return 1
    return 0


def plant(change: str) -> None:
    """Change what PLANT says in this process."""
    if not change:
        return
    first = int(change.partition(":")[2])
    linear = torch.nn.functional.linear
    done = 0

    def other_linear(*args, **kwargs):
        output = linear(*args, **kwargs)
        return output * (1 + 2**-18) if done + 1 >= first else output

    # steps are counted where they end
    end_step = loop_utils.end_step

    def counted(*args, **kwargs):
        nonlocal done
        end_step(*args, **kwargs)
        done += 1

    torch.nn.functional.linear = other_linear
    loop_utils.end_step = counted


replay_utils.start = Fork
sys.argv[0] = str(ROOT / "old/verify.py")
runpy.run_path(sys.argv[0], run_name="__main__")
