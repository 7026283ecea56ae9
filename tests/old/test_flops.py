"""What flops_utils.py counts and measures; test_contract.py has it in the scripts."""

import weakref
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from old.distributed_utils import Ranks
from old.flops_utils import FlopCount, matmul_rate
from old.logging_utils import RunLog

CPU = torch.device("cpu")


def parameter(*shape: int) -> nn.Parameter:
    """A parameter of this shape, with values from -1 to 1."""
    values = torch.linspace(-1, 1, torch.Size(shape).numel())
    return nn.Parameter(values.view(shape))


def test_products_and_attention_counted_by_hand():
    """Forward, then two products of that size in the backward pass; attention's backward repeats one of its two."""
    with FlopCount() as count:
        (parameter(3, 5) @ parameter(5, 7)).sum().backward()
    assert count.total == 3 * (2 * 3 * 5 * 7)

    query = parameter(2, 3, 11, 8)
    key = parameter(2, 3, 11, 8)
    value = parameter(2, 3, 11, 8)
    with FlopCount() as count:
        functional.scaled_dot_product_attention(query, key, value).sum().backward()
    assert count.total == (2 + 5) * (2 * 2 * 3 * 11 * 11 * 8)

    # composite operations arrive whole in inference mode
    with torch.inference_mode(), FlopCount() as count:
        functional.linear(torch.ones(4, 6), torch.ones(9, 6))
    assert count.total == 2 * 4 * 6 * 9


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_counted_by_hand(groups, transposed):
    """The gradient of the images and that of the weight take what the forward pass takes, in groups too."""
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(8, 12, 3, stride=2, groups=groups)
    images = parameter(2, 8, 9, 9)
    with FlopCounterMode(display=False) as by_torch, FlopCount() as count:
        output = layer(images)
        output.sum().backward()
    positions = 9 * 9 if transposed else 4 * 4
    assert count.total == 3 * (2 * 2 * positions * 8 * 12 * 3 * 3 // groups)
    assert groups > 1 or count.total == by_torch.get_total_flops()


def test_fake_tensors_of_a_gpu_are_counted():
    with FakeTensorMode(), FlopCount() as count:
        torch.empty(3, 5, device="cuda") @ torch.empty(5, 7, device="cuda")
    assert count.total == 2 * 3 * 5 * 7


def test_counting_changes_no_bit():
    """torch's counter takes silu's gradient apart, which rounds differently."""

    def gradient(context) -> torch.Tensor:
        weight = parameter(64, 64)
        with context:
            functional.silu(weight @ weight).square().sum().backward()
        return weight.grad

    with FlopCount() as outer:
        pass
    assert torch.equal(gradient(outer), gradient(torch.enable_grad()))


class Block(nn.Module):
    """Two linear layers; counts how many outputs of the first are in memory at once."""

    now = 0
    most = 0

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, values):
        output = self.first(values)
        Block.now += 1
        Block.most = max(Block.most, Block.now)
        weakref.finalize(output.untyped_storage(), Block.freed)
        return self.last(output.square()).tanh()

    @classmethod
    def freed(cls) -> None:
        Block.now -= 1


def test_recomputed_activations_are_not_kept_alive():
    """As torch's own counter does; and the repeated forward passes are counted."""

    def most_alive(context) -> int:
        blocks = [Block() for _ in range(6)]
        Block.now = 0
        Block.most = 0
        with context:
            values = parameter(2, 4)
            for block in blocks:
                values = checkpoint(block, values, use_reentrant=False)
            values.sum().backward()
        return Block.most

    count = FlopCount()
    assert most_alive(count) == most_alive(torch.enable_grad()) == 1
    assert count.total == 6 * 2 * 4 * (2 * 2 * 4 * 4)


def test_matmul_rate_draws_no_random_number():
    before = torch.get_rng_state()
    assert matmul_rate(CPU, "no") > 1e8
    assert torch.equal(torch.get_rng_state(), before)


def make_log(folder: Path, compiled: bool = False) -> RunLog:
    """The log of a new run."""
    folder.mkdir()
    log = RunLog(folder, Ranks(0, 0, 1, CPU, "python"), ["loss", "skipped"], 9, 1, "no", compiled)
    log.open(Namespace(wandb=False))
    return log


def test_which_steps_are_counted(tmp_path):
    """The first one and a larger one after it; all parts of it together."""
    log = make_log(tmp_path / "run")
    matrix = torch.ones(8, 8)
    counted = []
    for samples, parts in ((2, 1), (4, 2), (4, 1), (2, 1)):
        for _ in range(parts):
            with log.count_flops(samples):
                matrix @ matrix
        log.step(torch.zeros(2), samples, 1e-3)
        counted.append((log.flops, log.counted_samples))
    assert counted == [(1024, 2), (2048, 4), (2048, 4), (2048, 4)]

    log.write_interval(4, 1)

    # what is logged of it
    values = log.last
    assert values["train/tflops"] == pytest.approx(values["train/samples_per_s"] * 512 / 1e12)
    assert values["train/mfu"] == pytest.approx(values["train/tflops"] * 1e12 / log.matmul_rate)
    assert "TFLOP/s in fp32" in log.speed_facts()["matmul"]

    # steps of an earlier call alone were not timed by this one
    log.rows = [[1.0, 0.0]]
    log.write_rest(6, 1)
    assert log.last["train/loss"] == 1.0
    assert len(log.rates) == 1
    log.close()


def test_a_compiled_run_is_not_counted(tmp_path):
    """torch would run the counted step uncompiled: other rounding, and aborts in DDP."""
    log = make_log(tmp_path / "run", compiled=True)
    with log.count_flops(2) as count:
        torch.ones(8, 8) @ torch.ones(8, 8)
    log.step(torch.zeros(2), 2, 1e-3)
    log.write_interval(1, 1)
    log.close()
    assert count is None
    assert "train/samples_per_s" in log.last
    assert not {"train/tflops", "train/mfu"} & log.last.keys()
