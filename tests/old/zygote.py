"""Runs scripts in forks of one process that has the heavy libraries imported: a real run of a main guard in 0.3 s.

Reads one JSON object a line and answers with one: {"code", "stdout", "stderr", "seconds"}. What a request holds:

argv, cwd, environment: of the script.
address_space: bytes that it may take beside what is there already; 0 for no limit.
ranks: how many processes it is the launcher of. As torchrun does, it tells the others to stop when one fails.
figures: whether the images of a training run are drawn. That is half the time of a small run.
interrupt: {"who", "number", "out", "step", "delay"} sends a signal to the last rank ("worker") or to all of them
    ("all"), so many seconds after there is a checkpoint of this step; null for none.
"""

import gc
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Seconds that the other ranks have to end by themselves when one has failed, as they may for the same reason.
PATIENCE = 0.5

# mallopt's names of its settings, and madvise's of large pages (since Linux 6.1).
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MADV_COLLAPSE = 25

# What the scripts import sooner or later; muon_optimizer brings torch's compiler.
HEAVY_MODULES = """
torch.utils.tensorboard accelerate h5py peft
contourpy matplotlib.figure
monai.metrics monai.data
deepspeed deepspeed.runtime.zero.muon.muon_optimizer
pyarrow.parquet nibabel
torchmetrics.functional.classification
transformers transformers.conversion_mapping transformers.image_processing_base
"""
# What transformers imports when it is asked for.
TRANSFORMERS_CLASSES = """
AutoModel AutoTokenizer BertModel ConvNextModel LlavaForConditionalGeneration SamModel SamVisionModel
"""


def run(request: dict) -> dict:
    """Run a script in as many processes as the request says, and answer with what became of it."""
    begun = time.time()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        # start all ranks
        port = free_port()
        ranks = [start_rank(request, rank, port, stdout, stderr) for rank in range(request.get("ranks", 1))]
        codes = wait_for_all(ranks, request["interrupt"])

        # the code farthest from 0 tells most
        return {
            "code": max(codes, key=abs),
            "stdout": read_from_start(stdout),
            "stderr": read_from_start(stderr),
            "seconds": time.time() - begun,
        }


def read_from_start(file) -> str:
    """All that was written into a file."""
    file.seek(0)
    return file.read().decode(errors="replace")


def start_rank(request: dict, rank: int, port: int, stdout, stderr) -> int:
    """Fork a process that becomes one rank of the script; returns its id."""
    child = os.fork()
    if child:
        return child

    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    ranks = request.get("ranks", 1)
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    os._exit(become(request))


def has_reached(run_folder: str, step: int) -> bool:
    """Whether a run folder holds a checkpoint of this step or a later one."""
    return any(int(path.stem.removeprefix("step_")) >= step for path in Path(run_folder).glob("step_*.pt"))


def wait_for_all(children: list[int], interrupt: dict | None) -> list[int]:
    """The exit codes of processes that may be sent a signal meanwhile."""
    running = list(children)
    codes = []
    told = False
    deadline = None
    while running:
        # without anything to watch for, waitpid itself waits
        child, status = os.waitpid(-1, os.WNOHANG if interrupt or deadline else 0)
        if child:
            running.remove(child)
            codes.append(os.waitstatus_to_exitcode(status))
            if codes[-1] and not told:
                deadline = deadline or time.time() + PATIENCE

        # a rank has failed, and the others did not follow: they are told to stop
        elif deadline and time.time() > deadline:
            told = True
            deadline = None
            for other in running:
                os.kill(other, signal.SIGTERM)

        # the signal that was asked for
        elif interrupt and has_reached(interrupt["out"], interrupt["step"]):
            time.sleep(interrupt["delay"])
            chosen = children if interrupt["who"] == "all" else children[-1:]
            for process in set(chosen) & set(running):
                os.kill(process, interrupt["number"])
            interrupt = None
        else:
            time.sleep(0.01)
    return codes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def limit_memory(more: int) -> None:
    """Let this process take so many bytes of address space beside what it has."""
    import ctypes
    import resource

    # large blocks go back to the system when freed: what is free is then no matter of chance
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
    libc.mallopt(M_ARENA_MAX, 2)

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def become(request: dict) -> int:
    """Run the script as if this process had been started for it; returns its exit code."""
    os.chdir(request["cwd"])
    os.environ |= request.get("environment", {})
    sys.argv = request["argv"]
    if request.get("address_space"):
        limit_memory(request["address_space"])
    if not request["figures"]:
        from old import logging_utils

        logging_utils.RunLog.figures = lambda log, draw, step: None

    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def keep_memory_in_large_pages() -> None:
    """Halve the time of a fork, which copies an entry for each page. Nothing happens where the kernel cannot."""
    import ctypes

    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        first, end = (int(address, 16) for address in addresses.split("-"))
        if rights == "rw-p" and inode == "0":
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_COLLAPSE)


def import_everything() -> None:
    """Import the heavy libraries and this project's own modules, which each fork would compile anew."""
    import importlib

    # its own allocator reserves GiB of address space at times
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"

    for name in HEAVY_MODULES.split():
        importlib.import_module(name)
    transformers = sys.modules["transformers"]
    for name in TRANSFORMERS_CLASSES.split():
        getattr(transformers, name)
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("llava")

    # sample_data.py is run, and not imported
    for path in sorted([*ROOT.glob("old/*.py"), *ROOT.glob("tasks/*/*.py")]):
        if not path.stem.startswith(("__init__", "sample_data", "launch_utils")):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def main() -> None:
    import_everything()

    # what is there already need not be looked through in each fork
    gc.collect()
    gc.freeze()
    keep_memory_in_large_pages()

    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
