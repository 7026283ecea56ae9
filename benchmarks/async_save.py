"""How long a save of 1.6 GB holds training up while a slow disk takes it, and what training loses meanwhile.

    python benchmarks/async_save.py            # on CPU about 3 minutes, 5 GB of RAM, 3.3 GB of disk

The state is that of a model of 133 million parameters with AdamW (weights and two moments, fp32, in 150 tensors), the
disk is slowed to --disk_mb_per_s by sleeping. Held up: the seconds that save_checkpoint takes. The loop makes small
training steps; its time with saves is compared with its time without, alternating.
"""

import argparse
import functools
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def slow_down(megabytes_per_s: float) -> None:
    """Every write to a checkpoint sleeps as long as a disk of this speed would take."""
    import manifest_utils

    real = manifest_utils._HashingFile.write

    def write(self, data) -> int:
        time.sleep(len(data) / (megabytes_per_s * 1e6))
        return real(self, data)

    manifest_utils._HashingFile.write = write


def make_state(gigabytes: float) -> dict:
    """Weights and two moments of 50 parameters, which together have so many bytes."""
    import torch

    size = int(gigabytes * 1e9 / 4 / 150)
    parts = ("weights", "exp_avg", "exp_avg_sq")
    return {part: {f"layer{i}": torch.randn(size) for i in range(50)} for part in parts}


def make_step():
    """One small training step, as a function."""
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    batch = torch.randn(64, 256)

    def step() -> None:
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def run(step, seconds: float, save=None) -> tuple[float, float, float]:
    """(steps/s, seconds that save() took, its CPU seconds) of a loop that lasts so long, with one save at its start."""
    begun, cpu, held = time.perf_counter(), time.thread_time(), (0.0, 0.0)
    if save:
        save()
        held = time.perf_counter() - begun, time.thread_time() - cpu
    steps = 0
    while time.perf_counter() - begun < seconds:
        step()
        steps += 1
    return steps / (time.perf_counter() - begun), *held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.6)
    parser.add_argument("--disk_mb_per_s", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=20, help="of training for each save; its write must fit")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of the training process")
    parser.add_argument("--folder", default=None, help="where to write; default: the system's temporary folder")
    options = parser.parse_args()

    import torch

    import checkpoint_utils as ckpt
    from async_save_utils import WRITER

    torch.set_num_threads(options.threads)
    slow_down(options.disk_mb_per_s)
    state, step = make_state(options.gigabytes), make_step()
    # as at the start of a run
    WRITER.prepare(int(options.gigabytes * 1e9), on_gpu=False)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run_folder = Path(folder) / "run"
        contents = {"format": "benchmark", "model": state}
        ratios = []
        for number in range(1, options.saves + 1):
            save = functools.partial(ckpt.save_checkpoint, run_folder, contents, number, keep_last=1)
            without, *_ = run(step, options.seconds)
            with_save, wall, cpu = run(step, options.seconds, save)
            ratios.append(with_save / without)

            # whatever the disk has not taken by now is not part of the comparison
            begun = time.perf_counter()
            ckpt.settle_checkpoint()
            late = time.perf_counter() - begun
            text = f"held up {wall:.3f} s ({cpu:.3f} s of the CPU), loop with over without {ratios[-1]:.3f}"
            print(f"save {number}: {text}, {late:.1f} s late", flush=True)
        begun = time.perf_counter()
        ckpt._write(run_folder, run_folder / "step_00000099.pt", {**contents, "step": 99, "rng": []}, 1)
        print(f"the same written in place: {time.perf_counter() - begun:.1f} s")
    print(f"loop with a save every {options.seconds:.0f} s over the loop without: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
