"""Weights that are no longer the same on all ranks: found at the next check, and told with tensor, ranks and step."""

import pytest
import torch
from conftest import ROOT
from torch import nn

from drift_utils import checksum, shared_tensors


def test_what_a_checksum_tells_apart():
    """Every bit, places that two values change, and nothing of the memory format or of what the values are."""
    tensor = torch.randn(3, 5, 4, 4)
    expected = checksum(tensor)
    assert checksum(tensor.to(memory_format=torch.channels_last)) == expected
    assert checksum(tensor + 0) == expected

    # two values that change places, also such as differ by their highest bit alone
    values = torch.tensor([1.0, -1.0, 2.0, 0.0, 5.0])
    assert len({int(checksum(values.roll(k))) for k in range(5)}) == 5
    assert checksum(values[[1, 0, 2, 3, 4]]) != checksum(values)

    # more than a block of a device, and two blocks that change places
    long = torch.arange(200_000)
    blocks = [int(checksum(part)) for part in (long, long.roll(1 << 15), long.roll(1 << 16), long[:-1])]
    assert len(set(blocks)) == 4

    # each bit of values of each size
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64):
        small = torch.ones(3, dtype=dtype)
        sums = {int(checksum(small))}
        octets = small.view(torch.uint8)
        for bit in range(8 * len(octets)):
            octets[bit // 8] ^= 1 << bit % 8
            sums.add(int(checksum(small)))
            octets[bit // 8] ^= 1 << bit % 8
        assert len(sums) == 8 * len(octets) + 1


def test_which_tensors_are_compared():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("made", torch.ones(1), persistent=False)
    assert list(shared_tensors(model)) == ["0.weight", "0.bias", "1.weight", "1.bias", "kept"]


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_a_hundred_flipped_bits(processes, zygote):
    """One at a time, in fp32, bf16 and whole numbers: 100 found, the right tensor and ranks named; 0 false alarms."""
    done = zygote(ROOT / "tests" / "drift.py", ranks=processes)
    assert done.code == 0, done.stderr[-3000:]
    assert "100 of 100 found, 0 false alarms" in done.stdout
