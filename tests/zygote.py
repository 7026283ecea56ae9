"""Runs scripts in forks of one process that has the heavy libraries imported: a real run of the script's main guard in
0.3 s.

Reads one JSON object a line and answers with one: {"code", "stdout", "stderr", "seconds"}. What a request holds:

argv, cwd, environment: of the script.
address_space: bytes that it may take beside what is there already; 0 for no limit.
ranks: how many processes it is the launcher of. As torchrun does, it tells the others to stop when one fails.
figures: whether the pictures of a training run are drawn. That is half the time of a small run.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def run(request: dict) -> dict:
    begun = time.time()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        ranks = request.get("ranks", 1)
        port = free_port()
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                if ranks > 1:
                    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                    os.environ |= {name: str(value) for name, value in (places | {"MASTER_PORT": port}).items()}
                    os.environ["MASTER_ADDR"] = "127.0.0.1"
                os._exit(become(request))
            children.append(child)
        code = max(wait_for_all(children, request["interrupt"]), key=abs)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return {"code": code, "stdout": texts[0], "stderr": texts[1], "seconds": time.time() - begun}


def wait_for_all(children: list[int], interrupt: dict | None) -> list[int]:
    """The exit codes of processes that may be sent a signal meanwhile."""
    running, codes = list(children), []
    told, patience = False, None
    while running:
        child, status = os.waitpid(-1, os.WNOHANG if interrupt or patience else 0)
        if child:
            running.remove(child)
            codes.append(os.waitstatus_to_exitcode(status))
            # the others may be about to end by themselves, for the same reason
            if codes[-1] and not told:
                patience = patience or time.time() + 0.5
        elif patience and time.time() > patience:
            told, patience = True, None
            for other in running:
                os.kill(other, signal.SIGTERM)
        elif interrupt and any(int(p.stem[5:]) >= interrupt["step"] for p in Path(interrupt["out"]).glob("step_*.pt")):
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


def become(request: dict) -> int:
    os.chdir(request["cwd"])
    os.environ |= request.get("environment", {})
    sys.argv = request["argv"]
    if request.get("address_space"):
        import ctypes
        import resource

        libc = ctypes.CDLL(None)  # large blocks go back to the system when freed: no chance in what is free
        libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
        libc.mallopt(-8, 2)  # M_ARENA_MAX
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + request["address_space"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if not request["figures"]:
        import logging_utils

        logging_utils.RunLog.figures = lambda log, draw, step, seconds_apart=0: None
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
    """Half the time of a fork: it copies an entry for each page. Nothing happens where the kernel cannot."""
    import ctypes

    libc, collapse = ctypes.CDLL(None), 25  # MADV_COLLAPSE, since Linux 6.1
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *_ = line.split()
        first, end = (int(address, 16) for address in place.split("-"))
        if rights == "rw-p" and inode == "0":
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), collapse)


def main() -> None:
    import importlib

    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # its own allocator reserves GiB of address space at times

    for name in (
        "torch.utils.tensorboard",
        "accelerate",
        "h5py",
        "monai.metrics",
        "monai.networks.schedulers",
        "peft",
        "contourpy",
        "matplotlib.figure",
        "transformers.image_processing_base",
        "deepspeed",
        "deepspeed.runtime.zero.muon.muon_optimizer",  # and so torch's compiler
        "pyarrow.parquet",
        "monai.data",
        "monai.networks.nets",
        "monai.transforms",
        "nibabel",
        "openpyxl",
        "torchsurv.metrics.auc",
        "torchsurv.metrics.brier_score",
        "torchsurv.metrics.cindex",
        "torchmetrics.functional.classification",
    ):
        importlib.import_module(name)
    transformers = importlib.import_module("transformers")
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llava")
    for name in (
        "AutoModel",
        "AutoTokenizer",
        "BertModel",
        "ConvNextModel",
        "LlavaForConditionalGeneration",
        "SamModel",
        "SamVisionModel",
    ):
        getattr(transformers, name)
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("tasks/*/*.py")]):
        # each fork would compile them anew; train_*.py and sample_data.py it runs, and does not import
        if not path.stem.startswith(("train", "sample_data", "launch_utils")):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    gc.collect()
    gc.freeze()  # what is there already need not be looked through in each fork
    keep_memory_in_large_pages()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
