"""Writes the gradient of one training step for several batches, at the world size it is launched with.

argv: output file, micro-batches per step, float32 or float64.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import train_survival_distributed as tsd
from survival_data import Cohort

CASES = 24
# name -> which cases of the step have an event; the first 12 are those of rank 0 of 2
EVENTS = {
    "mixed": lambda i: i % 3 == 0,
    "none in the first half": lambda i: i >= 12,
    "none": lambda i: i < 0,
    "one, the last": lambda i: i == 11,
}


def main() -> None:
    args = tsd.parse_args(["--csv_path", "x", "--resnet", "resnet10", "--base_channels", "8"])
    args.mixed_precision, results = "no", {}
    volumes = torch.rand(CASES, 1, 12, 12, 6, generator=torch.Generator().manual_seed(0)).half()
    time = np.arange(CASES)[::-1] // 2 / 4.0  # ties in pairs
    with tsd.du.setup_distributed() as ranks:
        for size in (12, 5, 1):
            for name, rule in EVENTS.items():
                event = np.array([rule(i) for i in range(CASES)])
                results[f"{size} {name}"] = gradients(args, ranks, volumes, time, event, size, int(sys.argv[2]))
        if ranks.is_main:
            torch.save(results, sys.argv[1])


def gradients(args, ranks, volumes, time, event, size: int, parts: int) -> tuple:
    cohort = Cohort("x", [], [], [], time, event, None, {}, {}, None)
    target = tsd.Target(cohort, np.arange(CASES), args)
    model = tsd.build_model(args, 1, None, ranks).to(getattr(torch, sys.argv[3]))
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(1, 64, generator=torch.Generator().manual_seed(1)) / 2)
    net = tsd.wrap(model, False, ranks)
    rows = np.arange(size)
    low, high = (size * (ranks.rank + k) // ranks.world_size for k in (0, 1))
    mine = list(range(low, high)) or [0]  # a rank without a share passes one case of no weight
    cuts = [list(map(int, part)) for part in np.array_split(mine, min(parts, len(mine)))]
    window = [{"image": volumes[part]} for part in cuts]
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    place, loss_of = (low, high, size), partial(target.loss, rows=rows)
    loss, _ = tsd.train_step(net, model, window, place, loss_of, lambda batch: batch["image"], scaler)
    return loss, torch.cat([p.grad.flatten() for p in model.parameters()])


if __name__ == "__main__":
    main()
