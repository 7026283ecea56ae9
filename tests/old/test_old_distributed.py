"""distributed_utils: the collectives, the memory of the sampler, learning rates."""

import subprocess
import tracemalloc

import pytest
from conftest import ROOT, torchrun

from old.distributed_utils import scale_learning_rate
from old.sampler_utils import TrainBatchSampler


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_collectives(processes):
    command = [*torchrun(processes), "tests/old/collectives.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"all well at {processes}" in done.stdout


def test_shuffle_takes_no_memory():
    """An epoch over 300 million samples starts at once and holds no list of them."""
    tracemalloc.start()
    sampler = TrainBatchSampler(300_000_000, 64, 3, 8, seed=1)
    sampler.set_position(2, samples=512 * 1000)
    batches = [batch for _, batch in zip(range(50), sampler, strict=False)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len({i for batch in batches for i in batch}) == 50 * 64
    assert peak < 2e6


def test_learning_rate_rules():
    assert scale_learning_rate(1e-4, 4, "linear") == pytest.approx(4e-4)
    assert scale_learning_rate(1e-4, 4, "sqrt") == pytest.approx(2e-4)
    assert scale_learning_rate(1e-4, 4, "none") == pytest.approx(1e-4)
