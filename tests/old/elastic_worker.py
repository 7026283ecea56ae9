"""A small training for test_elastic.py: counts steps, and writes down who was there at each.

python elastic_worker.py FOLDER LAST_STEP [--resume_from auto]
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from old.cli_utils import InputError, run_main
from old.distributed_utils import StopSignal, reduce_max, setup_distributed


def train(folder: Path, last_step: int) -> int:
    """Steps of 50 ms, each with an all-reduce; saves every tenth one and when it is told to stop."""
    saved = folder / "saved"
    with setup_distributed(timeout=60) as ranks, StopSignal() as stop:
        if last_step == 0:
            raise InputError("nothing to do; give a last step")
        step = int(saved.read_text()) if saved.exists() else 0
        while step < last_step and not reduce_max([stop.code])[0]:
            time.sleep(0.05)
            step += 1

            # the sum of the ranks' numbers stands for what is computed
            total = torch.tensor([float(ranks.rank)])
            if ranks.world_size > 1:
                dist.all_reduce(total)
            if ranks.is_main:
                with open(folder / "steps", "a") as file:
                    print(step, ranks.world_size, int(total), time.time(), file=file)
            if ranks.is_main and (step % 10 == 0 or stop.code):
                saved.write_text(str(step))
        if step < last_step and ranks.is_main:
            saved.write_text(str(step))
        return 143 if step < last_step else 0


if __name__ == "__main__":
    run_main(lambda _: train(Path(sys.argv[1]), int(sys.argv[2])), None)
