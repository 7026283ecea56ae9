"""Weights that are no longer the same on all ranks: found at the next check, and told with tensor, ranks and step."""

import pytest
import torch
from conftest import ROOT
from flip_bit import flip_bit
from torch import nn

from old.drift_utils import checksum, shared_tensors


def checksums(tensors) -> set[int]:
    """The different checksums of some tensors."""
    return {int(checksum(tensor)) for tensor in tensors}


def test_a_checksum_knows_the_values_and_their_places():
    """It does not depend on the memory format; two values that differ by their highest bit alone have places, too."""
    tensor = torch.randn(3, 5, 4, 4)
    other = tensor.to(memory_format=torch.channels_last)
    assert len(checksums([tensor, other, tensor + 0])) == 1

    values = torch.tensor([1.0, -1.0, 2.0, 0.0, 5.0])
    swapped = values[[1, 0, 2, 3, 4]]
    turned = [values.roll(places) for places in range(5)]
    assert len(checksums([swapped, *turned])) == 6

    # several blocks, which change places
    long = torch.arange(200_000)
    half = long.roll(1 << 15)
    whole = long.roll(1 << 16)
    assert len(checksums([long, half, whole, long[:-1]])) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_each_bit_changes_the_checksum(dtype):
    tensor = torch.ones(3, dtype=dtype)
    flipped = [tensor]
    for octet in range(tensor.nbytes):
        for bit in range(8):
            other = tensor.clone()
            flip_bit(other, octet, bit)
            flipped.append(other)
    assert len(checksums(flipped)) == len(flipped)


def test_which_tensors_are_compared():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("made", torch.ones(1), persistent=False)
    assert list(shared_tensors(model)) == ["0.weight", "0.bias", "1.weight", "1.bias", "kept"]


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_a_hundred_flipped_bits(processes, zygote):
    """One at a time, in fp32, bf16 and whole numbers: 100 found, the right tensor and ranks named; 0 false alarms."""
    done = zygote(ROOT / "tests/old/drift.py", ranks=processes)
    assert done.code == 0, done.stderr[-3000:]
    assert "100 of 100 found, 0 false alarms" in done.stdout
