"""What tools.rehearse predicts for a step, against the bytes of real tensors that the same step makes on a CPU.

    python benchmarks/rehearsal_check.py              # both models of train.py

The prediction is the tool's own command on fake CUDA tensors, in fp32. The count runs the same functions on real
tensors of the CPU, and adds up what is alive. Exits with 1 when one is further than 10 % from the other, or when a
rehearsal takes longer than 30 s.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# The script and its flags, by the name of the setting.
SETTINGS = {
    "CompressedAD, batch 16": "train.py --mixed_precision no --batch_size 16",
    "AD, batch 32": "train.py --mixed_precision no --model ad --batch_size 32",
}


def count(words: list[str]) -> None:
    """The step of a script on real tensors; its last line is what they took."""
    import torch

    from tools import rehearse

    class Count(rehearse.Trace):
        """Counts what is done on the CPU."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            for tensor in rehearse.find_tensors((out,)):
                self.hold(tensor.untyped_storage())
            return out

    rehearse.WORDS = words[1:]
    rehearse.Trace = Count
    rehearse.FakeTensorMode = lambda **_: contextlib.nullcontext()
    rehearse.pretend_a_gpu = lambda: torch.device("cpu")
    rehearse.main(argparse.Namespace(script=words[0], gpu_memory=80.0))


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
        predicted, seconds = last_line(["-m", "tools.rehearse", *words])
        counted, _ = last_line([__file__, "--count", *words])
        ratio = predicted["peak_gib"] / counted["peak_gib"]
        good = 0.9 <= ratio <= 1.1 and seconds <= 30
        wrong += not good
        row = f"{name:<48} {megabytes(predicted):>10} {megabytes(counted):>10}"
        print(f"{row} {ratio:>7.3f} {seconds:>8.1f}", flush=True)
    print(f"{wrong} of {len(SETTINGS)} off by more than 10 %, or slower than 30 s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
