"""Runs scripts in forks of one process that has the heavy libraries imported: a real run of the script's main guard in
0.3 s.

Reads one JSON object a line ({"argv", "cwd", "address_space", "ranks", "environment"}) and answers with one ({"code",
"stdout", "stderr", "seconds"}). With ranks > 1 it is the launcher of so many processes.
"""

import gc
import json
import os
import runpy
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
        code = max((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), key=abs)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return {"code": code, "stdout": texts[0], "stderr": texts[1], "seconds": time.time() - begun}


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
    gc.collect()
    gc.freeze()  # what is there already need not be looked through in each fork
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
