"""The trial step that fits a batch to memory, on a CPU that is told it were a GPU; test_contract.py has real runs."""

import gc

import pytest
import torch
from torch import nn

import memory_utils
from cli_utils import RunError
from memory_utils import BatchSize, fit_batch_to_memory

GIB = 2**30


@pytest.fixture
def model(monkeypatch) -> nn.Module:
    """1000 trained parameters, 9 frozen ones, running statistics, and dropout."""
    # it takes half a second in a process that has seen as much as this one
    monkeypatch.setattr(memory_utils, "release_memory", lambda: None)
    parts = nn.Sequential(nn.Linear(10, 100, bias=False), nn.BatchNorm1d(100, affine=False), nn.Dropout(0.5))
    parts.frozen = nn.Parameter(torch.ones(9), requires_grad=False)
    return parts


def meter(monkeypatch, peaks, room: float) -> None:
    """A GPU of `room` GiB on which a trial reserves what the next of `peaks` says, GiB."""
    peaks = iter(peaks)
    monkeypatch.setattr(memory_utils, "gpu_memory", lambda device: (int(next(peaks) * GIB), int(room * GIB)))


def fit(try_once, model, wanted=(8, 1), **options) -> BatchSize:
    asked = BatchSize(*wanted, "default")
    return fit_batch_to_memory(try_once, model, asked, memory_utils.batch_flags, "buy memory", **options)


@pytest.mark.parametrize(("peak", "fits"), [(19.6, True), (19.7, False)])
def test_a_gpu_keeps_a_margin(model, monkeypatch, peak, fits):
    """1.05 x 19.6 GiB + 1.5 GB are 21.98 GiB of 22; 19.7 are 22.08."""
    meter(monkeypatch, [peak], 22)
    trial = memory_utils.try_step(lambda: None, model, 2)
    assert (trial.fits, trial.error, trial.room) == (fits, "", 22 * GIB)


def test_the_batch_is_halved_until_it_fits_with_its_margin(model, monkeypatch, capsys):
    sizes = []
    meter(monkeypatch, [30, 21, 15], 22)
    fitted = fit(sizes.append, model)
    assert fitted == (2, 4, "fitted: 8 did not fit into 22.0 GiB", False, (8, 1), 15)
    assert sizes == [8, 8, 4, 4, 2, 2]
    said = ["--batch_size 4 --gradient_accumulation_steps 2", "--batch_size 2 --gradient_accumulation_steps 4"]
    assert capsys.readouterr().out.splitlines() == [f"out of memory: going on with {flags}" for flags in said]


def test_nothing_is_changed_where_the_batch_fits(model, monkeypatch):
    meter(monkeypatch, [10], 22)
    assert fit(lambda size: None, model, (8, 3)) == (8, 3, "default", False, (8, 3), 10)


def test_recomputation_comes_after_the_smallest_batch(model, monkeypatch):
    """And begins with the whole batch again. Where it was forbidden, the advice is what is left."""
    turned_on = []
    meter(monkeypatch, [90, 50, 30, 40, 19], 22)
    fitted = fit(lambda size: None, model, (4, 2), recompute=lambda: turned_on.append(True))
    assert fitted == (2, 4, "fitted: 4 did not fit into 22.0 GiB", True, (4, 2), 19)
    assert turned_on == [True]


def run_out(size: int) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_what_never_fits_is_an_error(model, monkeypatch):
    """Where recomputation was forbidden, or does not help, the advice is what is left."""
    meter(monkeypatch, [22] * 3, 22)
    with pytest.raises(RunError, match=r"--grad\S+ 8 \(CUDA out of memory.\); buy memory"):
        fit(run_out, model, (4, 2))
    meter(monkeypatch, [22] * 2, 22)
    with pytest.raises(RunError, match="buy memory"):
        fit(run_out, model, (1, 2), recompute=lambda: None)


def test_a_step_that_only_lacks_its_margin_is_made(model, monkeypatch, capsys):
    """With a warning: the same run was made before there was a margin."""
    meter(monkeypatch, [21.9, 21.8, 21.5], 22)
    assert fit(lambda size: None, model, (4, 2))[:2] == (1, 8)
    assert "warning: a step takes 21.5 of 22.0 GiB" in capsys.readouterr().out


def test_a_resumed_run_starts_at_the_split_it_was_begun_with(model, monkeypatch):
    """Also where more would fit by now; not at another number of processes, nor where another batch is asked for."""
    checkpoint = {"split": BatchSize(2, 4, "", recomputed=True, asked=(8, 1)).record()}
    by_two = {"split": checkpoint["split"] | {"world_size": 2}}
    turned_on = []
    meter(monkeypatch, [10] * 3, 22)
    options = {"recompute": lambda: turned_on.append(True)}
    fitted = fit(lambda size: None, model, checkpoint=checkpoint, **options)
    assert fitted == (2, 4, "as the run was begun", True, (8, 1), 10)
    assert turned_on == [True]
    assert fit(lambda size: None, model, (4, 2), checkpoint=checkpoint, **options)[:2] == (4, 2)
    assert fit(lambda size: None, model, checkpoint=by_two, **options)[:2] == (8, 1)
    meter(monkeypatch, [30, 10], 22)
    assert fit(lambda size: None, model, checkpoint=checkpoint)[:3] == (1, 8, "fitted: 8 did not fit into 22.0 GiB")


@pytest.mark.parametrize(("processes", "copies"), [(1, 2), (4, 3)])
def test_moments_and_buckets_are_held_beside(model, monkeypatch, processes, copies):
    """Of what learns, 4000 bytes here: twice, and once more for the gradients that processes exchange."""
    monkeypatch.setattr(memory_utils, "world", lambda: (0, processes))
    held = []

    def try_once(size: int) -> None:
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.dtype == torch.uint8]
        held.append(copies * 4000 in [tensor.numel() for tensor in tensors])
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    assert fit(try_once, model)[:2] == (2, 4)
    assert held == [True] * 4


def test_a_trial_leaves_no_trace(model):
    """Random numbers, running statistics and gradients are those of a run without one, also after a failure."""
    before = [torch.get_rng_state(), *(buffer.clone() for buffer in model.buffers())]

    def try_once(size: int) -> None:
        model.train()(torch.randn(size, 10)).square().sum().backward()
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    assert fit(try_once, model)[:2] == (2, 4)
    after = [torch.get_rng_state(), *model.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_not_a_lack_of_memory_is_raised(model):
    def try_once(size: int) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        fit(try_once, model)


def test_when_a_batch_is_fitted_and_what_is_advised_else():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [memory_utils.fits_by_itself(flag, gpu) for flag in (None, True, False)] == [True, True, False]
    assert [memory_utils.fits_by_itself(flag, cpu) for flag in (None, True, False)] == [False, True, False]
    assert "--auto_batch, which tries by itself" in memory_utils.auto_batch_advice(None, cpu)
    assert "leave out --no-auto_batch" in memory_utils.auto_batch_advice(False, gpu)
    assert memory_utils.auto_batch_advice(None, gpu) == ""
