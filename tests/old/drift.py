"""Flips a hundred bits, one at a time, in one rank's weights, and checks what is told; test_drift.py runs it."""

import random
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from flip_bit import flip_bit
from torch import nn

from old.cli_utils import RunError
from old.distributed_utils import print_main, setup_distributed
from old.drift_utils import check_drift, shared_tensors

TRIALS = 100


def make_model() -> nn.Module:
    """Weights in fp32, bf16 and whole numbers, some frozen, some in another memory format."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(300, 300).bfloat16(), nn.Embedding(7, 5), nn.LayerNorm(5))
    model[0].to(memory_format=torch.channels_last)
    model[2].requires_grad_(False)
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("codes", torch.arange(11, dtype=torch.uint8))
    return model


def main() -> None:
    run_folder = Path(tempfile.gettempdir()) / "no_such_run"
    with setup_distributed(timeout=60) as ranks:
        model = make_model()
        chance = random.Random(7)
        found = alarms = 0
        for _ in range(TRIALS):
            # all ranks draw the same
            name, tensor = chance.choice(list(shared_tensors(model).items()))
            odd = chance.randrange(ranks.world_size)
            before = tensor.detach().clone()
            octet = chance.randrange(tensor.nbytes)
            bit = chance.randrange(8)
            if ranks.rank == odd:
                flip_bit(tensor, octet, bit)
            try:
                check_drift(model, 12, run_folder)
            except RunError as error:
                told = re.fullmatch(r"step 12: the ranks' weights differ in (\S+): (.*); (.*)", str(error))
                named = [int(rank) for rank in re.findall(r"rank (\d+) ", told[2])]
                blamed = [odd] if ranks.world_size > 2 else [0, 1]
                found += told[1] == name and named == blamed

            # as they were
            tensor.data.copy_(before)
            try:
                check_drift(model, 12, run_folder)
            except RunError:
                alarms += 1
        print_main(f"{found} of {TRIALS} found, {alarms} false alarms")


if __name__ == "__main__":
    main()
