"""utils/loop.py, utils/engine.py and utils/log.py: updates, log lines, curves, noise, gpu_shares, the best score."""

import copy
import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import distributed_utils as du
from examples import minimal
from utils import checkpoint
from utils.cli import InputError, RunError
from utils.engine import make_engine
from utils.log import RunLog, draw_curves
from utils.loop import BatchPlan, Plan, Run, Training, gpu_shares_from, seed_dropout

CPU = du.Ranks(0, 1, torch.device("cpu"), "python", None)


def begin(folder: Path, *words: str, steps: int = 20) -> Training:
    """A Training of a model with two weights. words: further flags of examples/minimal.py."""
    args = minimal.parse_args(["--output_dir", str(folder), *words])
    model = nn.Linear(2, 1, bias=False)
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=9.0, fused=True), "no", args, CPU.device)
    return Training(Run("test/1", args, CPU), args, engine, Plan(BatchPlan(4, 4, 1.0, [1]), steps, ["loss"], {}))


@pytest.mark.parametrize(("clip", "scale"), [("0.5", 0.5 / 5), ("0", 1)])
def test_update_clips_gradients_and_skips_non_finite_ones(tmp_path, clip, scale):
    """update() returns the norm before clipping. --grad_clip 0 does not clip."""
    with begin(tmp_path, "--grad_clip", clip) as training:
        engine = training.engine
    layer = engine.model
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    expected = layer.weight - 0.1 * scale * layer.weight.grad
    assert engine.update(0.1) == 5
    assert torch.allclose(layer.weight, expected)
    assert layer.weight.grad is None
    before = layer.weight.clone()
    layer.weight.grad = torch.tensor([[3.0, float("inf")]])
    assert engine.update(0.1) == torch.inf
    assert torch.equal(layer.weight, before)


def test_log_line_is_the_mean_of_the_finite_values_of_its_interval(tmp_path, capsys):
    """A resumed run continues its checkpoint's interval and count of skipped steps, and prints flags that changed."""
    args = SimpleNamespace(log_every=10, max_bad_steps=3, wandb=None, learning_rate=0.1)
    log = RunLog(tmp_path, CPU, ["loss"], args, None, 0)
    for step, loss in enumerate((1.0, float("nan")), start=1):
        log.step(list(torch.tensor([loss, 2.0 if step == 1 else float("inf")])), step, 4, 0.1)
    saved = copy.deepcopy(log.state())
    log.write(2, 1, {"val/loss": 7.0})
    log.close()
    args.learning_rate, args.num_workers = 0.2, 4
    log = RunLog(tmp_path, CPU, ["loss"], args, saved, 2)
    assert "other flags than at the run's last start: learning_rate 0.1 -> 0.2\n" in capsys.readouterr().out
    # the losses of two micro-batches, then the gradient norm
    log.step(list(torch.tensor([1.0, 2.0, float("nan")])), 3, 4, 0.2)
    capsys.readouterr()
    log.write_interval(3, 1, 9)
    assert capsys.readouterr().out.startswith("epoch 1 step 3/9 | loss 2.0000 | ")
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    shown = {"step": 3, "epoch": 1, "train/lr": 0.2, "train/loss": 2, "train/grad_norm": 2, "train/skipped": 2 / 3}
    assert line == pytest.approx(line | shown)
    with pytest.raises(RunError, match="3 steps in a row had a non-finite loss"):
        log.step(list(torch.tensor([0.0, float("nan")])), 6, 4, 0.2)
    log.close()


def test_checkpoint_is_written_after_its_log_lines_are_on_disk(tmp_path, monkeypatch):
    """A power cut never leaves a checkpoint without its log lines. Metrics may be NumPy numbers."""
    sizes, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size) or sync(file))
    with begin(tmp_path) as training:
        sizes.clear()
        training.evaluation_due = True
        training.record({"val/loss": np.float64(7)}, "val/loss")
        # a stop signal can close the log while the checkpoint is being written
        training.log.close()
        training.flush()
        saved = checkpoint.load_checkpoint("auto", tmp_path, "test/1")
    assert sizes == [saved["log"]["bytes"], (tmp_path / "step_00000000.pt").stat().st_size]


def test_second_run_in_a_folder_is_refused(tmp_path):
    with begin(tmp_path), pytest.raises(InputError, match="another run is writing here"):
        begin(tmp_path)


def test_only_a_loader_that_forks_waits_for_the_checkpoint_thread(tmp_path):
    alone, forked = (DataLoader(range(4), num_workers=n, persistent_workers=n > 0) for n in (0, 1))
    with begin(tmp_path) as training:
        run, waits = training.run, []
        for loader in (alone, forked, forked):
            run.writer.thread = Mock()
            assert len([*run.start_loader(loader)]) == 4
            waits.append(run.writer.thread.join.called)
        run.writer.thread = None
    assert waits == [False, True, False]


def test_curves_show_the_log(tmp_path):
    """The training loss is on the left, validation metrics are on the right; missing values are left out."""
    lines = [{"step": 1, "train/loss": 3.0, "val/loss": 2.0}, {"step": 4, "train/loss": 1.0, "val/loss": None}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    axes = draw_curves(tmp_path / "metrics.jsonl").axes
    left, right = ({line.get_label(): line.get_xydata().tolist() for line in each.lines} for each in axes)
    assert left == {"train/loss": [[1, 3], [4, 1]]}
    assert right == {"val/loss": [[1, 2]]}


def test_run_of_days_and_a_profile_of_no_step_are_announced(tmp_path, capsys):
    with begin(tmp_path, "--profile", "21:25") as training:
        assert "warning: --profile 21:25: no trace, as this start makes steps 1 to 20\n" in capsys.readouterr().out
        log, shown = training.log, []
        for seconds in (50, 50, 0):
            capsys.readouterr()
            log.opened -= seconds
            log.warn_if_long(20_000)
            shown.append(capsys.readouterr().out)
    assert "at the speed of its first steps the training takes 11.6 days more" in shown.pop(1)
    assert shown == ["", ""]


@pytest.mark.parametrize("sign", [1, -1])
def test_best_is_the_highest_or_lowest_finite_score(tmp_path, monkeypatch, sign):
    """The later of two equal scores is the best."""
    saved = []
    with begin(tmp_path) as training:
        monkeypatch.setattr(training, "save", saved.append)
        training.evaluation_due, position = True, training.position
        for value in (float("nan"), 0.5, 0.7, 0.6, 0.7):
            position.step += 1
            training.record({"val/score": sign * value, "val/step": position.step}, "val/score", lower=sign < 0)
        assert saved == [True] * 3
        assert position.best_metrics == {"val/score": sign * 0.7, "val/step": 5}


def test_noise_is_a_function_of_seed_step_and_micro_batch():
    """Checkpoints hold no random state, so the seed below must never change."""
    seed_dropout(CPU.device, 5, 7, 2)
    assert torch.initial_seed() == 12151908989600622437
    drawn = set()
    for position in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (0, 0, 0)):
        seed_dropout(CPU.device, *position)
        drawn.add(torch.rand(1).item())
    assert len(drawn) == 5


@pytest.mark.parametrize(
    ("seconds", "shares"),
    [
        ([1.0, 1.5, 99.0], [10, 7, 1]),
        # two kinds of GPU with noisy timings
        ([2.1, 1.0, 2.0, 1.1], [5, 10, 5, 10]),
    ],
)
def test_timing_noise_does_not_change_gpu_shares(seconds, shares):
    assert gpu_shares_from(seconds) == shares
