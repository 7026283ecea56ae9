"""loop_utils around a loop of a few lines: what is logged and saved when, the learning rate, and what is best."""

import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import records
from torch.utils.data import Dataset

from old.checkpoint_utils import lock_run_folder, settle_checkpoint
from old.distributed_utils import Ranks, create_distributed_dataloader, schedule
from old.logging_utils import RunLog
from old.loop_utils import LossScaler, Progress, TrainingRun, clip_and_step, end_step
from old.loop_utils import keep_best, optimizer_steps, resume

ONE = Ranks(0, 0, 1, torch.device("cpu"), "python")
# 28 samples, 4 a step: an epoch has 7 steps
SAMPLES = 28
BATCH = 4
STEPS = 7


class Numbers(Dataset):
    """Sample k is the number k."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict:
        return {"x": torch.tensor([float(index)]), "error": ""}


def fit(run_folder: Path, log_every: int, save_every: int = 0) -> TrainingRun:
    """One epoch of a model with one weight; returns the finished run."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = LossScaler(ONE.device, "no")
    loader = create_distributed_dataloader(Numbers(), BATCH, seed=3, num_workers=0, drop_last=False)

    # the run folder and its log
    args = Namespace(log_every=log_every, wandb=False, mixed_precision="no", compile=False)
    lock = lock_run_folder(run_folder, may_exist=False)
    log = RunLog(run_folder, ONE, ["loss", "grad_norm", "skipped"], STEPS, log_every, "no")
    log.open(args)
    training = TrainingRun(
        run_folder=run_folder,
        progress=Progress(),
        last_step=STEPS,
        planned_steps=STEPS,
        effective_batch_size=BATCH,
        precision="no",
        log=log,
        contents=lambda: {"format": "toy", "run": {}, "model": model.state_dict()},
        save_every=save_every,
        keep_last=9,
    )

    # the loop; the weight changes the loss a little at each step
    for step in optimizer_steps(loader, training):
        losses = torch.zeros(1)
        for batch, _ in step.micro_batches():
            loss = model(batch["x"]).square().sum() / step.samples
            scaler.scale(loss).backward()
            losses += loss.detach()
        grad_norm = clip_and_step(optimizer, scaler, grad_clip=0, lr=1e-4)
        end_step(training, step, losses, grad_norm, lr=1e-4)
    training.save()
    log.write_rest(STEPS, 1)
    settle_checkpoint()
    log.close()
    del lock
    return training


def means(values: list[float], size: int) -> list[float]:
    """The mean of every so many values, and of what is left."""
    parts = [values[first : first + size] for first in range(0, len(values), size)]
    return [sum(part) / len(part) for part in parts]


def test_a_line_of_the_log_is_the_mean_of_its_interval(tmp_path):
    fit(tmp_path / "each", log_every=1)
    fit(tmp_path / "third", log_every=3)
    each = records(tmp_path / "each")
    third = records(tmp_path / "third")
    assert [line["step"] for line in each] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in third] == [3, 6, 7]
    for name in ("train/loss", "train/grad_norm"):
        values = [line[name] for line in each]
        assert len(set(values)) == STEPS
        assert [line[name] for line in third] == pytest.approx(means(values, 3), rel=1e-6)


def test_a_checkpoint_every_so_many_steps_and_at_the_end(tmp_path):
    training = fit(tmp_path / "run", log_every=1, save_every=2)
    names = sorted(path.name for path in (tmp_path / "run").glob("step_*.pt"))
    assert names == [f"step_{step:08d}.pt" for step in (2, 4, 6, 7)]
    assert training.progress.saved == [7, 0]


def test_the_learning_rate_rises_then_falls_by_a_cosine_or_stays():
    """Warm-up over 4 steps, of which the first learns already; then 10 steps to the end."""
    cosine = [schedule(step, 14, 4, "cosine") for step in range(15)]
    assert cosine[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert cosine[9] == pytest.approx(0.5)
    assert cosine[6] == pytest.approx((1 + math.cos(0.2 * math.pi)) / 2)
    assert cosine[14] == pytest.approx(0.0)
    constant = [schedule(step, 14, 4, "constant") for step in range(15)]
    assert constant[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert set(constant[4:]) == {1.0}


def test_an_epoch_that_max_steps_cut_leaves_no_trace_in_what_is_best(tmp_path):
    """It may give best.pt its first checkpoint, and no later one."""
    training = fit(tmp_path / "run", log_every=1, save_every=3)
    progress = training.progress
    assert keep_best(training, 5.0, planned=False)
    assert progress.best is None
    assert keep_best(training, 3.0, planned=True)
    assert progress.best == 3.0
    assert not keep_best(training, 9.0, planned=False)
    assert progress.best == 3.0

    # lower is better for a loss; what is not finite is never the best
    assert not keep_best(training, 4.0, planned=True, lower=True)
    assert keep_best(training, 2.0, planned=True, lower=True)
    assert not keep_best(training, math.nan, planned=True, lower=True)
    assert progress.best == 2.0


def test_the_best_so_far_counts_where_its_checkpoint_is(tmp_path):
    """A folder without best.pt, or with that of another run, begins with no best."""
    training = fit(tmp_path / "run", log_every=1)
    keep_best(training, 3.0, planned=True)
    training.progress.step += 1
    training.save()
    settle_checkpoint()
    saved = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert saved["state"]["best"] == 3.0

    def best_in(folder: Path) -> float | None:
        progress = Progress()
        resume(progress, saved, {}, folder)
        assert progress.step == STEPS + 1
        return progress.best

    assert best_in(tmp_path / "run") == 3.0
    assert best_in(tmp_path / "nowhere") is None
    other = fit(tmp_path / "other", log_every=1, save_every=2)
    keep_best(other, 3.0, planned=True)
    assert best_in(tmp_path / "other") is None
