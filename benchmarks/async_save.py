"""How long a save of 1.6 GB holds training up while a slow disk takes it, and what training loses meanwhile.

    python benchmarks/async_save.py            # on CPU about 3 minutes, 5 GB of RAM, 3.3 GB of disk

The state is that of a model of 133 million parameters with AdamW (weights and two moments, fp32, in 150 tensors). The
disk is slowed to --disk_mb_per_s by sleeping. "Held up" is the time that CheckpointWriter.save takes. The loop makes
small training steps; its speed with saves is compared with its speed without, in turns.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Timing(NamedTuple):
    """Speed of a loop, and the wall and CPU seconds that the save at its start took."""

    steps_per_s: float
    save_seconds: float
    save_cpu_seconds: float


def slow_down(megabytes_per_s: float) -> None:
    """Make every write to a checkpoint sleep as long as a disk of this speed would take."""
    from utils import checkpoint

    real = checkpoint.Hashing.write

    def write(self, data) -> int:
        time.sleep(len(data) / (megabytes_per_s * 1e6))
        return real(self, data)

    checkpoint.Hashing.write = write


def make_state(gigabytes: float) -> dict:
    """Weights and two moments of 50 parameters, which together take this many GB."""
    import torch

    size = int(gigabytes * 1e9 / 4 / 150)
    parts = ("weights", "exp_avg", "exp_avg_sq")
    return {part: {f"layer{i}": torch.randn(size) for i in range(50)} for part in parts}


def make_step() -> Callable[[], None]:
    """A function that makes one small training step."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(64, 256)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def run(step: Callable[[], None], seconds: float, save: Callable[[], object] | None = None) -> Timing:
    """Train for this many seconds, with one save at the start where one is given."""
    begun = time.perf_counter()
    cpu_begun = time.thread_time()
    save_seconds = 0.0
    save_cpu_seconds = 0.0
    if save:
        save()
        save_seconds = time.perf_counter() - begun
        save_cpu_seconds = time.thread_time() - cpu_begun

    steps = 0
    while time.perf_counter() - begun < seconds:
        step()
        steps += 1
    return Timing(steps / (time.perf_counter() - begun), save_seconds, save_cpu_seconds)


def compare(options: argparse.Namespace, folder: Path, contents: dict) -> list[float]:
    """Print one line for each save; returns the speed with a save over the speed without."""
    from utils.checkpoint import CheckpointWriter

    step = make_step()
    writer = CheckpointWriter(folder, keep_last=1)
    ratios = []
    for number in range(1, options.saves + 1):
        plain = run(step, options.seconds)
        saving = run(step, options.seconds, lambda number=number: writer.save(contents | {"step": number}))
        ratio = saving.steps_per_s / plain.steps_per_s
        ratios.append(ratio)

        # What the disk has not taken by now is not part of the comparison.
        begun = time.perf_counter()
        writer.wait()
        late = time.perf_counter() - begun

        held_up = f"held up {saving.save_seconds:.3f} s ({saving.save_cpu_seconds:.3f} s of the CPU)"
        print(f"save {number}: {held_up}, loop with over without {ratio:.3f}, {late:.1f} s late", flush=True)
    return ratios


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.6)
    parser.add_argument("--disk_mb_per_s", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=20, help="of training for each save; its write must fit")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of the training process")
    parser.add_argument("--folder", default=None, help="where to write; default: the system's temporary folder")
    return parser.parse_args()


def main() -> None:
    options = parse_args()
    import torch

    from utils.checkpoint import write_checkpoint

    torch.set_num_threads(options.threads)
    slow_down(options.disk_mb_per_s)
    contents = {"format": "benchmark", "model": make_state(options.gigabytes)}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ratios = compare(options, Path(folder), contents)

        # The same state is written once more while the loop waits.
        begun = time.perf_counter()
        write_checkpoint(Path(folder) / "step_00000099.pt", contents | {"step": 99}, "")
        print(f"the same written in place: {time.perf_counter() - begun:.1f} s")
    print(f"loop with a save every {options.seconds:.0f} s over the loop without: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
