"""Writes the gradient of one training step for several batches, at the world size it is launched with.

argv: output file, micro-batches per step, float32 or float64.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from old.distributed_utils import Ranks, setup_distributed
from old.loop_utils import LossScaler, Step
from tasks.survival.cohort import Cohort
from tasks.survival.folds import Fold
from train_survival_distributed import Learner, build_model, parse_args, step_loss, train_step, wrap_model

CASES = 24
# name -> which cases of the step have an event; the first 12 are those of rank 0 of 2
EVENTS = {
    "mixed": lambda i: i % 3 == 0,
    "none in the first half": lambda i: i >= 12,
    "none": lambda i: i < 0,
    "one, the last": lambda i: i == 11,
}


def noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_fold(rule: Callable[[int], bool]) -> Fold:
    """Cases with ties in pairs; rule: which of them have an event."""
    rows = np.arange(CASES)
    time = rows[::-1] // 2 / 4.0
    event = np.array([rule(i) for i in range(CASES)])
    cohort = Cohort("x", [], [], [], time, event, None, {}, {}, None)
    return Fold(cohort, "all", rows, rows, {})


def main() -> None:
    args = parse_args(["--csv_path", "x", "--resnet", "resnet10", "--base_channels", "8"])
    volumes = torch.rand(CASES, 1, 12, 12, 6, generator=noise(0)).half()
    results = {}
    with setup_distributed() as ranks:
        for size in (12, 5, 1):
            for name, rule in EVENTS.items():
                results[f"{size} {name}"] = gradients(args, ranks, volumes, make_fold(rule), size)
        if ranks.is_main:
            torch.save(results, sys.argv[1])


def share_of_step(volumes: torch.Tensor, size: int, parts: int, ranks: Ranks) -> Step:
    """This rank's share of a step of so many cases, in so many micro-batches."""
    first = size * ranks.rank // ranks.world_size
    end = size * (ranks.rank + 1) // ranks.world_size
    # a rank without a share passes one case of no weight
    local = list(range(first, end)) or [0]
    micro_batches = np.array_split(local, min(parts, len(local)))
    batches = [{"image": volumes[part]} for part in micro_batches]
    return Step(samples=size, local=end - first, first=first, batches=batches)


def gradients(
    args: Namespace,
    ranks: Ranks,
    volumes: torch.Tensor,
    fold: Fold,
    size: int,
) -> tuple:
    """(loss, gradient of all weights) of one step of so many cases."""
    _, _, parts, kind = sys.argv
    model = build_model(args, "no", 1, None, ranks)
    model = model.to(getattr(torch, kind))
    with torch.no_grad():
        weight = torch.randn(1, 64, generator=noise(1)) / 2
        model.head.weight.copy_(weight)
    scaler = LossScaler(ranks.device, "no")
    learner = Learner(model, None, scaler, None, wrap_model(model, frozen=False))

    # one step, without an update
    step = share_of_step(volumes, size, int(parts), ranks)
    images = [batch["image"] for batch in step.batches]
    loss_of = partial(step_loss, rows=np.arange(size), fold=fold, ties=args.ties)
    loss, _ = train_step(learner, step, images, loss_of)
    return loss, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


if __name__ == "__main__":
    main()
