"""What --rehearse predicts for a step, against the bytes of real tensors that the same step makes on a CPU.

    python benchmarks/rehearsal_check.py              # both models of train.py

The prediction is the script's own command on fake CUDA tensors, in fp32. The count runs the same functions on real
tensors of the CPU, and adds up what is alive. Exits with 1 when one is further than 10 % from the other, or when a
rehearsal takes longer than 30 s.
"""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# The script and its flags, by the name of the setting.
SETTINGS = {
    "CompressedAD, batch 16": "train.py --mixed_precision no --train_batch_size 16",
    "AD, batch 32": "train.py --mixed_precision no --model ad --train_batch_size 32",
}


@contextlib.contextmanager
def real_cpu(trace) -> Iterator:
    """In place of rehearsal_utils.imaginary_gpu: the same step on real tensors of the CPU."""
    import torch

    from old.distributed_utils import Ranks

    trace.device_type = "cpu"
    yield Ranks(0, 0, 1, torch.device("cpu"), "rehearsal")


def count(words: list[str]) -> None:
    """Run a script's rehearsal on real tensors; its last line is what they took."""
    from old import fake_cuda_utils, rehearsal_utils

    fake_cuda_utils.load_before_torch = lambda: None
    rehearsal_utils.imaginary_gpu = real_cpu
    sys.argv = [str(ROOT / words[0]), *words[1:], "--rehearse"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def last_line(words: list[str]) -> tuple[dict, float]:
    """(the JSON object that a command ends with, its seconds)."""
    begun = time.time()
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout}{done.stderr}")
    *_, last = done.stdout.splitlines()
    return json.loads(last), time.time() - begun


def megabytes(found: dict) -> str:
    """The peak memory of a rehearsal's result."""
    return f"{1024 * found['peak_gib']:>6.1f} MiB"


def main() -> int:
    if sys.argv[1:2] == ["--count"]:
        count(sys.argv[2:])
        return 0

    wrong = 0
    print(f"{'setting':<48} {'predicted':>10} {'counted':>10} {'ratio':>7} {'seconds':>8}")
    for name, flags in SETTINGS.items():
        words = flags.split()
        predicted, seconds = last_line([*words, "--rehearse", "--gpu_memory", "80"])
        counted, _ = last_line([__file__, "--count", *words])
        ratio = predicted["peak_gib"] / counted["peak_gib"]
        good = 0.9 <= ratio <= 1.1 and seconds <= 30
        wrong += not good
        row = f"{name:<48} {megabytes(predicted):>10} {megabytes(counted):>10}"
        print(f"{row} {ratio:>7.3f} {seconds:>8.1f}", flush=True)
    print(f"{wrong} of {len(SETTINGS)} off by more than 10 %, or slower than 30 s")
    return bool(wrong)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
