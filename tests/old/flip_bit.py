"""flip_bit.py STEP RANK SEED SCRIPT FLAGS...: runs it; after this step one bit of one rank's weights is another.

The rank prints the name of the tensor. Which one it is follows from the seed; for seed "nan" it is the first
trained one, all NaN.
"""

import random
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from old import loop_utils
from old.distributed_utils import world
from old.drift_utils import shared_tensors


def flip_bit(tensor: torch.Tensor, octet: int, bit: int) -> None:
    """Another value for one bit of an octet of a tensor."""
    content = tensor.detach().clone(memory_format=torch.contiguous_format)
    octets = content.view(-1).view(torch.uint8)
    octets[octet] ^= 1 << bit
    with torch.no_grad():
        tensor.copy_(content)


def spoil(model: torch.nn.Module, seed: str) -> str:
    """Flip one of an element's highest bits, which no step rounds away, or write NaN; the tensor's name."""
    chance = random.Random(seed)
    name, tensor = chance.choice(list(shared_tensors(model).items()))
    if seed == "nan":
        trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        name, tensor = trained[0]
        tensor.data.fill_(torch.nan)
        return name
    size = tensor.element_size()
    flip_bit(tensor, chance.randrange(tensor.numel()) * size + size - 1, chance.randrange(4, 8))
    return name


def main() -> None:
    step, rank, seed = sys.argv[1:4]
    real = loop_utils.end_step

    def end_step(training, *more) -> None:
        real(training, *more)
        if training.progress.step == int(step) and world()[0] == int(rank):
            print(f"spoiled {spoil(training.model, seed)}", flush=True)

    loop_utils.end_step = end_step
    sys.argv = sys.argv[4:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
