"""utils/loop.py and utils/log.py: what an update does to the weights, and what a line of the log is the mean of."""

import copy
import json
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import distributed_utils as du
from utils.cli import RunError
from utils.log import RunLog
from utils.loop import Position, Run, _try, seed_noise
from utils.sampler import TrainBatchSampler

CPU = du.Ranks(0, 1, torch.device("cpu"), "python", None)


@pytest.mark.parametrize(("clip", "scale"), [(0.5, 0.5 / 5), (0, 1), (100, 1)])
def test_an_update_by_clipped_gradients(clip, scale):
    """The norm is that before; 0 leaves them as they are."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    expected = layer.weight - 0.1 * scale * layer.weight.grad
    optimizer = torch.optim.SGD(layer.parameters(), lr=9.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run = SimpleNamespace(exact=None, scaler=scaler, optimizer=optimizer, args=SimpleNamespace(grad_clip=clip))
    assert [float(value) for value in Run.update_weights(run, 0.1)] == [5, 0]
    assert torch.allclose(layer.weight, expected)
    assert layer.weight.grad is None
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.tensor([[3.0, float("inf")]])
    assert Run.update_weights(run, 0.1)[1] == 1
    assert torch.equal(layer.weight, before)


def test_a_line_of_the_log_is_the_mean_of_its_steps(tmp_path, capsys):
    """Of the finite ones; an interval goes on where a checkpoint cut it, and so does the row of skipped steps.

    A flag that is another than before is named.
    """
    args = SimpleNamespace(log_every=10, max_bad_steps=3, wandb=None, learning_rate=0.1)
    names = ["loss", "grad_norm", "skipped"]
    log = RunLog(tmp_path, CPU, names, args, None, 0)
    for step, loss in enumerate((1.0, float("nan")), start=1):
        log.step(torch.tensor([loss, 2.0 * step, float(step == 2)]), step, 4, 0.1)
    saved = copy.deepcopy(log.state())
    log.write(2, 1, {"val/loss": 7.0})
    log.close()
    args.learning_rate, args.num_workers = 0.2, 4
    log = RunLog(tmp_path, CPU, names, args, saved, 2)
    assert "other flags than at the run's last start: learning_rate 0.1 -> 0.2\n" in capsys.readouterr().out
    # args.yaml cut short by a kill stops nobody
    for rest in ("", "a: ["):
        (tmp_path / "args.yaml").write_text(rest)
        log.close()
        log = RunLog(tmp_path, CPU, names, args, copy.deepcopy(saved), 2)
    log.step(torch.tensor([3.0, 3.0, 1.0]), 3, 4, 0.2)
    log.write_interval(3, 1, 9)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    shown = {"step": 3, "epoch": 1, "train/lr": 0.2, "train/loss": 2, "train/grad_norm": 3, "train/skipped": 2 / 3}
    assert line == pytest.approx(line | shown)
    with pytest.raises(RunError, match="3 steps in a row had a non-finite loss"):
        log.step(torch.tensor([0.0, 0.0, 1.0]), 6, 4, 0.2)
    log.close()


def test_what_is_shown(tmp_path, capsys):
    """A run of days says so, once; TensorBoard has no details."""
    log = RunLog(tmp_path, CPU, ["loss", "skipped"], SimpleNamespace(log_every=1, max_bad_steps=1, wandb=None), None, 0)
    log.opened -= 50
    log.warn_of_days(20_000)
    log.opened -= 50
    assert not capsys.readouterr().out
    log.warn_of_days(20_000)
    assert "at the speed of its first steps the training takes 11.6 days more" in capsys.readouterr().out
    log.warn_of_days(20_000)
    assert not capsys.readouterr().out
    log.writer = Mock()
    log.write(
        1, 1, {"val/auc": 0.5, "val/auc/3y": 0.5, "val/auc_low": 0.4, "val/return_optimal": 1.0, "val/loss": None}
    )
    log.writer.add_scalar.assert_called_once_with("val/auc", 0.5, 1)
    assert len(json.loads((tmp_path / "metrics.jsonl").read_text())) == 7
    log.close()


def test_the_ranks_agree_about_the_next_step_while_this_one_computes(monkeypatch):
    """Not past an evaluation. A signal that comes while a step computes ends the run after the next."""
    told, run = [], Run.__new__(Run)
    monkeypatch.setattr(
        du, "begin_sum", lambda facts: told.append("begun") or (lambda: told.append("awaited") or facts)
    )
    run.args = SimpleNamespace(profile=None, eval_every_steps=3, save_every=0)
    run.log = SimpleNamespace(restart_clock=Mock(), waited=0.0)
    run.position, run.stop, run.ranks, run.last_step, run.stopped = Position(), SimpleNamespace(code=0), CPU, 20, 0
    run.stream, run.read, run.trains, run.profiler = None, 0, False, None
    loader = DataLoader([{"x": number} for number in range(28)], batch_sampler=TrainBatchSampler(28, 4, 4))
    expected = [
        "begun awaited begun step awaited begun step awaited step",
        "begun awaited begun step awaited begun step awaited",
    ]
    for times, order in enumerate(expected):
        for step in run.steps(loader):
            told.append("step")
            run.position.step, run.position.samples = run.position.step + 1, run.position.samples + step.samples
            run.stop.code = 143 * times
        assert " ".join(told) == order
        told.clear()
    assert (run.stopped, run.position.step) == (143, 5)


def test_without_save_every_a_checkpoint_a_minute():
    for save_every, age, due in ((None, 59, False), (None, 61, True), (7, 0, True)):
        run = SimpleNamespace(args=SimpleNamespace(save_every=save_every), saved_at=time.monotonic() - age)
        assert Run._save_is_due(run) is due


@pytest.mark.parametrize("sign", [1, -1])
def test_best_is_the_highest_or_the_lowest_that_is_finite(sign):
    """The later of two that are equal."""
    saved = []
    run = SimpleNamespace(
        position=Position(), planned_steps=9, last_step=9, epoch_over=False, evaluation_due=True, log=Mock(),
        args=SimpleNamespace(save_every=None), is_over=lambda: False, _save_is_due=lambda: False, save=saved.append,
    )  # fmt: skip
    for value in (float("nan"), 0.5, 0.7, 0.6, 0.7):
        run.position.step += 1
        Run.keep(run, {"val/score": sign * value, "val/step": run.position.step}, "val/score", lower=sign < 0)
    assert saved == [True] * 3
    assert run.position.best_metrics == {"val/score": sign * 0.7, "val/step": 5}


def test_noise_is_a_function_of_seed_step_and_leaf():
    drawn = set()
    for position in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (0, 0, 0)):
        seed_noise(CPU.device, *position)
        drawn.add(torch.rand(1).item())
    assert len(drawn) == 5


def test_trying_a_batch_leaves_neither_gradients_nor_other_buffers():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = copy.deepcopy(model.state_dict())
    assert 0 < _try(lambda size: model(torch.rand(size, 3)).sum().backward(), model, 4) < 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
