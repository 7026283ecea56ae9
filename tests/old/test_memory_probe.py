"""The trial step that fits a batch to memory, on a CPU that is told it were a GPU; test_contract.py has real runs."""

import gc

import pytest
import torch
from torch import nn

from old import memory_utils
from old.cli_utils import RunError
from old.memory_utils import BatchSize, auto_batch_advice, batch_flags, fit_batch_to_memory, fits_by_itself

GIB = 2**30
CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.fixture
def model(monkeypatch) -> nn.Module:
    """1000 trained parameters, 9 frozen ones, running statistics, and dropout."""
    # release_memory takes half a second in a process that has seen as much as this one
    monkeypatch.setattr(memory_utils, "release_memory", lambda: None)
    linear = nn.Linear(10, 100, bias=False)
    statistics = nn.BatchNorm1d(100, affine=False)
    model = nn.Sequential(linear, statistics, nn.Dropout(0.5))
    model.frozen = nn.Parameter(torch.ones(9), requires_grad=False)
    return model


@pytest.fixture
def reserve(monkeypatch):
    """reserve(*peaks): a GPU of 22 GiB on which each trial reserves the next of these peaks, in GiB."""

    def set_peaks(*peaks: float) -> None:
        left = list(peaks)

        def gpu_memory(device: torch.device) -> tuple[int, int]:
            return int(left.pop(0) * GIB), 22 * GIB

        monkeypatch.setattr(memory_utils, "gpu_memory", gpu_memory)

    return set_peaks


def default_batch(size: int, accumulation: int) -> BatchSize:
    """The batch that the flags ask for."""
    return BatchSize(size, accumulation, "default")


def fit(try_once, model, wanted: BatchSize | None = None, **options) -> BatchSize:
    """fit_batch_to_memory of a batch of 8 or of another one."""
    wanted = wanted or default_batch(8, 1)
    return fit_batch_to_memory(try_once, model, wanted, batch_flags, "buy memory", **options)


def fits_at_once(size: int) -> None:
    """A trial step that takes no memory of its own."""


def run_out(size: int) -> None:
    """A trial step that has no memory for any batch."""
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(("peak", "fits"), [(19.6, True), (19.7, False)])
def test_a_gpu_keeps_a_margin(model, reserve, peak, fits):
    """1.05 x 19.6 GiB + 1.5 GB are 21.98 GiB of 22; 19.7 are 22.08."""
    reserve(peak)
    trial = memory_utils.try_step(lambda: None, model, 2)
    assert trial.fits is fits
    assert trial.error == ""
    assert trial.room == 22 * GIB


def test_the_batch_is_halved_until_it_fits_with_its_margin(model, reserve, capsys):
    sizes = []
    reserve(30, 21, 15)
    fitted = fit(sizes.append, model)
    reason = "fitted: 8 did not fit into 22.0 GiB"
    assert fitted == BatchSize(2, 4, reason, asked=(8, 1), peak_gib=15)
    assert sizes == [8, 8, 4, 4, 2, 2]
    assert capsys.readouterr().out.splitlines() == [
        "out of memory: going on with --batch_size 4 --gradient_accumulation_steps 2",
        "out of memory: going on with --batch_size 2 --gradient_accumulation_steps 4",
    ]


def test_nothing_is_changed_where_the_batch_fits(model, reserve):
    reserve(10)
    fitted = fit(fits_at_once, model, default_batch(8, 3))
    assert fitted == BatchSize(8, 3, "default", asked=(8, 3), peak_gib=10)


def test_what_never_fits_is_an_error(model, reserve):
    reserve(22, 22, 22)
    with pytest.raises(RunError, match=r"--grad\S+ 8 \(CUDA out of memory.\); buy memory"):
        fit(run_out, model, default_batch(4, 2))


def test_a_step_that_only_lacks_its_margin_is_made(model, reserve, capsys):
    """With a warning: the same run was made before there was a margin."""
    reserve(21.9, 21.8, 21.5)
    fitted = fit(fits_at_once, model, default_batch(4, 2))
    assert fitted.size == 1
    assert fitted.accumulation == 8
    assert "warning: a step takes 21.5 of 22.0 GiB" in capsys.readouterr().out


BEGUN = BatchSize(2, 4, "", asked=(8, 1))


def test_a_resumed_run_starts_at_the_split_it_was_begun_with(model, reserve):
    """Also where more would fit by now."""
    reserve(10)
    fitted = fit(fits_at_once, model, checkpoint={"split": BEGUN.record()})
    assert fitted == BatchSize(2, 4, "as the run was begun", asked=(8, 1), peak_gib=10)


@pytest.mark.parametrize(("wanted", "processes"), [(default_batch(4, 2), 1), (default_batch(8, 1), 2)])
def test_a_resumed_run_is_fitted_anew_where_it_is_another_one(model, reserve, wanted, processes):
    """Where another batch is asked for, and at another number of processes."""
    reserve(10)
    checkpoint = {"split": BEGUN.record() | {"world_size": processes}}
    fitted = fit(fits_at_once, model, wanted, checkpoint=checkpoint)
    assert fitted == wanted._replace(asked=(wanted.size, wanted.accumulation), peak_gib=10)


def test_a_resumed_run_that_no_longer_fits_is_fitted_further(model, reserve):
    reserve(30, 10)
    fitted = fit(fits_at_once, model, checkpoint={"split": BEGUN.record()})
    assert fitted == BatchSize(1, 8, "fitted: 8 did not fit into 22.0 GiB", asked=(8, 1), peak_gib=10)


def room_for_two(size: int) -> None:
    """Run out of memory with more than two samples."""
    if size > 2:
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(("processes", "copies"), [(1, 2), (4, 3)])
def test_moments_and_buckets_are_held_beside(model, monkeypatch, processes, copies):
    """Of what learns, 4000 bytes here: twice, and once more for the gradients that processes exchange."""
    monkeypatch.setattr(memory_utils, "world", lambda: (0, processes))
    held = []

    def try_once(size: int) -> None:
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
        sizes = [tensor.numel() for tensor in tensors if tensor.dtype == torch.uint8]
        held.append(copies * 4000 in sizes)
        room_for_two(size)

    fitted = fit(try_once, model)
    assert fitted.size == 2
    assert fitted.accumulation == 4
    assert held == [True] * 4


def test_a_trial_leaves_no_trace(model):
    """Random numbers, running statistics and gradients are those of a run without one, also after a failure."""
    before = [torch.get_rng_state(), *(buffer.clone() for buffer in model.buffers())]

    def try_once(size: int) -> None:
        output = model.train()(torch.randn(size, 10))
        output.square().sum().backward()
        room_for_two(size)

    fitted = fit(try_once, model)
    assert fitted.size == 2
    assert fitted.accumulation == 4
    after = [torch.get_rng_state(), *model.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_not_a_lack_of_memory_is_raised(model):
    def try_once(size: int) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        fit(try_once, model)


@pytest.mark.parametrize(
    ("auto_batch", "device", "fitted", "advice"),
    [
        (None, GPU, True, ""),
        (True, GPU, True, ""),
        (False, GPU, False, ", or leave out --no-auto_batch, which keeps the batch as given"),
        (None, CPU, False, ", or --auto_batch, which tries by itself"),
        (True, CPU, True, ""),
        (False, CPU, False, ", or leave out --no-auto_batch, which keeps the batch as given"),
    ],
)
def test_when_a_batch_is_fitted_and_what_is_advised_else(auto_batch, device, fitted, advice):
    assert fits_by_itself(auto_batch, device) is fitted
    assert auto_batch_advice(auto_batch, device) == advice
