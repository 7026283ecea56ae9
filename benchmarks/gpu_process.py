"""Runs a training script in this process and notes what it does to the GPU; a part of benchmarks/gpu.py.

    python benchmarks/gpu_process.py --report FILE [--memory SHARE] [--kill_at STEP] SCRIPT flags...

The script is the user's own, unchanged. Rank 0 writes FILE: host waits of each step and where they were, how often
memory was refused, and the GPU's size.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# How many samples at once a CPU has memory for when memory is made short.
CPU_SAMPLES = 2


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--report", type=Path, required=True, help="JSON file for what was seen")
    parser.add_argument(
        "--random_weights", action="store_true", help="build Hugging Face models from config.json alone"
    )
    parser.add_argument("--share_gpu", action="store_true", help="several gloo ranks on the first GPU, without NCCL")
    parser.add_argument("--no_tf32", action="store_true", help="fp32 matrix products and convolutions without TF32")
    parser.add_argument("--memory", type=float, default=0, help="share of the GPU to allow; 0: all of it")
    parser.add_argument("--kill_at", type=int, default=0, help="SIGKILL the last rank after so many steps; 0: never")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its flags")
    return parser.parse_args()


def share_first_gpu() -> None:
    """Let every rank take GPU 0 and talk over gloo, as NCCL refuses two ranks on one GPU."""
    import torch.distributed as dist

    import distributed_utils

    read = distributed_utils.read_environment

    def on_first_gpu() -> tuple[int, int, int, str]:
        rank, _, world_size, launcher = read()
        return rank, 0, world_size, launcher

    distributed_utils.read_environment = on_first_gpu
    dist.is_nccl_available = lambda: False


def make_memory_short(share: float) -> dict:
    """Allow this share of the GPU, or CPU_SAMPLES samples at once on a CPU.

    Returns {"count": refusals so far}, which stays 0 on a GPU, where torch counts them.
    """
    import torch

    refused = {"count": 0}
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)
        return refused

    # A CPU's real lack of memory breaks oneDNN for the rest of the process.
    for layer in (torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Embedding):

        def forward(self, samples, real=layer.forward):
            if len(samples) > CPU_SAMPLES and torch.is_grad_enabled():
                refused["count"] += 1
                raise torch.OutOfMemoryError("out of memory, made up by benchmarks/gpu_process.py")
            return real(self, samples)

        layer.forward = forward
    return refused


@contextlib.contextmanager
def random_weights() -> Iterator[None]:
    """Inside, transformers' from_pretrained builds a model from its config.json, without the file of weights."""
    import torch
    import transformers

    def build(cls, path, *_, config=None, dtype=None, device_map=None, output_loading_info=False, **__):
        config = config or cls.config_class.from_pretrained(path)
        # The weights are the same on every rank.
        torch.manual_seed(0)
        with torch.device((device_map or {}).get("", "cpu")):
            model = cls._from_config(config, dtype=dtype or torch.float32).eval()
        return (model, {"missing_keys": []}) if output_loading_info else model

    with mock.patch.object(transformers.PreTrainedModel, "from_pretrained", classmethod(build)):
        yield


class HostWaits:
    """Counts the warnings of torch.cuda.set_sync_debug_mode between the steps of a run."""

    def __init__(self):
        self.count = 0
        self.at_step: list[int] = []
        self.places: collections.Counter = collections.Counter()
        self.show = warnings.showwarning

    def note(self, message, category, filename, lineno, file=None, line=None) -> None:
        """Count a wait; this stands in place of warnings.showwarning."""
        if "synchronizing CUDA operation" not in str(message):
            self.show(message, category, filename, lineno, file, line)
            return
        self.count += 1
        self.places[f"{Path(filename).name}:{lineno}"] += 1

    def start(self) -> None:
        """Let torch warn of each wait from now on."""
        import torch

        if torch.cuda.is_available():
            warnings.filterwarnings("always", message=".*synchronizing CUDA operation.*")
            warnings.showwarning = self.note
            torch.cuda.set_sync_debug_mode("warn")

    def of_each_step(self) -> list[int]:
        """Waits between one step's end and the next one's."""
        return [later - earlier for earlier, later in itertools.pairwise(self.at_step)]


def watch_steps(waits: HostWaits, kill_at: int) -> None:
    """Note the waits at the end of each optimizer step; SIGKILL the last rank at the end of step kill_at."""
    from utils.log import RunLog

    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    is_last = rank == world_size - 1

    real = RunLog.step

    def step(log, *values, **options) -> None:
        real(log, *values, **options)
        # The first step prepares kernels and memory, so waits count from its end.
        if not waits.at_step:
            waits.start()
        waits.at_step.append(waits.count)
        if is_last and len(waits.at_step) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    RunLog.step = step


def write_report(path: Path, waits: HostWaits, refused: dict) -> None:
    """On rank 0, write what was seen as one JSON object."""
    import torch

    if os.environ.get("RANK", "0") != "0":
        return
    places = waits.places.most_common(5)
    seen = {
        "host_waits": waits.of_each_step(),
        "places": dict(places),
        "refused": refused["count"],
        "total_gib": None,
    }
    if torch.cuda.is_available():
        seen["refused"] = torch.cuda.memory_stats().get("num_ooms", 0)
        seen["total_gib"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    path.write_text(json.dumps(seen))


def main() -> None:
    options = parse_args()
    waits = HostWaits()
    refused = {"count": 0}
    watch_steps(waits, options.kill_at)
    if options.share_gpu:
        share_first_gpu()
    if options.memory:
        refused = make_memory_short(options.memory)
    if options.no_tf32:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

    weights = contextlib.nullcontext()
    if options.random_weights:
        weights = random_weights()

    # The script itself runs as python would run it.
    sys.argv = options.command
    try:
        with weights:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        write_report(options.report, waits, refused)


if __name__ == "__main__":
    main()
