"""train.py: the same answer from any number of processes, from a run that was killed, and agents that are measured."""

import errno
import itertools
import json
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
from background import interrupt
from conftest import ROOT, at_step, kill_then_stop, torchrun

import train
from old import manifest_utils
from old.manifest_utils import read_manifest
from old.sampler_utils import TrainBatchSampler
from tasks.compressed_ad import report
from tasks.compressed_ad.darkroom import optimal_return, random_return, split_goals
from tasks.compressed_ad.data import SegmentDataset

TRAIN = str(ROOT / "train.py")
TRAINED = ("train/loss", "train/accuracy", "train/lr", "train/grad_norm", "train/skipped")
EVALUATED = (
    "val/return_first",
    "val/return_last",
    "val/loss",
    "unseen/return_last",
    "unseen/loss",
    "test/return_first",
    "test/return_last",
    "test/return_last_low",
    "test/loss",
    "test/accuracy",
    "best_step",
)


class Row(NamedTuple):
    """A line of metrics.jsonl without times and memory."""

    step: int
    epoch: int
    numbers: dict


def load(path: Path) -> dict:
    """A checkpoint."""
    return torch.load(path, weights_only=True)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def read_lines(out: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    text = (out / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def curve(out: Path) -> list[Row]:
    """Every line, in file order."""
    rows = []
    for line in read_lines(out):
        numbers = {name: line[name] for name in (*TRAINED, *EVALUATED) if name in line}
        rows.append(Row(line["step"], line["epoch"], numbers))
    return rows


def training(out: Path) -> list[Row]:
    """The lines of training steps."""
    return [row for row in curve(out) if "train/loss" in row.numbers]


def lr_of_second_step(out: Path) -> float:
    """The learning rate after the warm-up."""
    return training(out)[1].numbers["train/lr"]


def loss_difference(rows: list[Row], expected: list[Row]) -> float:
    """Largest relative difference of the losses; steps and learning rates are equal, counts and gradients nearly so."""
    assert [row[:2] for row in rows] == [row[:2] for row in expected]
    most = 0.0
    for row, other in zip(rows, expected, strict=True):
        assert row.numbers.keys() == other.numbers.keys()
        assert row.numbers.get("train/lr") == other.numbers.get("train/lr")
        for name, wanted in other.numbers.items():
            value = row.numbers[name]
            if name.endswith("loss"):
                difference = abs(value - wanted) / abs(wanted)
                most = max(most, difference)
            elif name == "train/grad_norm":
                assert value == pytest.approx(wanted, rel=1e-3)
            elif name.startswith("train/"):
                # one action of some 200
                assert value == pytest.approx(wanted, abs=2e-3)
    return most


def trained_model(args, run_folder: Path):
    """The model of best.pt."""
    model = train.build_model(args, torch.device("cpu"))
    model.load_state_dict(load(run_folder / "best.pt")["net"])
    return model


def first_batch(data, args) -> dict:
    """The first global batch of a run in one process."""
    sampler = TrainBatchSampler(len(data.segments), args.train_batch_size, 0, 1, seed=args.seed)
    return data.segments.__getitems__(next(iter(sampler)))


@pytest.fixture(scope="module")
def run_train(zygote):
    """run_train(flags): runs train.py, and checks its exit code."""

    def run(flags: list, ranks: int = 1, code: int = 0, **environment):
        done = zygote(TRAIN, *flags, ranks=ranks, **environment)
        assert done.code == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run


@pytest.fixture(scope="module")
def one(compressed_ad_flags, run_train, tmp_path_factory) -> Path:
    """A whole run in one process, 12 segments a step."""
    out = tmp_path_factory.mktemp("one") / "run"
    done = run_train(compressed_ad_flags(out), figures=True)
    processes = "Distributed training: NO\nNumber of processes: 1\n"
    assert f"{processes}Mixed precision: no\nProcess 0 using device: cpu" in done.stdout
    depths = ", ".join(rf"\d+ of depth {depth}" for depth in range(4))
    assert re.search(f"segments +2190 an epoch: {depths}", done.stdout)
    assert re.search(r"test, best.pt: episode +return +low +high +source +random +optimum", done.stdout)
    return out


# --- the same answer --------------------------------------------------------------------------------------------------


WAYS = {
    "2x6": (2, ["--train_batch_size", "6"]),
    "3x4-mapped": (3, ["--train_batch_size", "4", "--no-cache_in_memory"]),
    "1x4x3-workers": (1, ["--train_batch_size", "4", "--gradient_accumulation_steps", "3", "--num_workers", "2"]),
    "2x2x3": (2, ["--train_batch_size", "2", "--gradient_accumulation_steps", "3"]),
}


@pytest.mark.parametrize(("ranks", "more"), WAYS.values(), ids=WAYS)
def test_same_curve(compressed_ad_flags, run_train, one, tmp_path, ranks, more):
    """Loss of every step, learning rate and evaluations of N processes are those of one with N times the batch."""
    out = tmp_path / "run"
    done = run_train([*compressed_ad_flags(out), *more], ranks)
    assert len(training(out)) == 8
    assert len(curve(one)) == 8 + 2 + 1
    assert loss_difference(curve(out), curve(one)) < 1e-5
    assert f"Number of processes: {ranks}" in done.stdout
    assert done.stdout.count("using device: cpu") == ranks

    # warm-up of 2, then cosine over 8, one step a step
    lrs = [row.numbers["train/lr"] for row in training(out)]
    assert lrs[:3] == pytest.approx([5e-3, 1e-2, 1e-2])
    assert lrs[5] == pytest.approx(5e-3)
    cosine = np.cos(np.pi * 5 / 6)
    assert lrs[-1] == pytest.approx(1e-2 * (1 + cosine) / 2)


def test_plain_ad(compressed_ad_flags, run_train, tmp_path):
    by_one = tmp_path / "one"
    by_two = tmp_path / "two"
    run_train(compressed_ad_flags(by_one, latents=0))
    run_train(compressed_ad_flags(by_two, "--train_batch_size", "6", latents=0), 2)
    assert loss_difference(curve(by_two), curve(by_one)) < 1e-5
    names = load(by_one / "last.pt")["net"]
    assert not any("encoder" in name for name in names)


PROBE = """
import json, os, sys
sys.path.insert(0, {root!r})

import train
from old.distributed_utils import create_distributed_dataloader, setup_distributed
from tasks.compressed_ad.data import as_it_is

args = train.parse_args({words!r})
args.mixed_precision = "no"
with setup_distributed() as ranks:
    data = train.read_data(args)
    loader = create_distributed_dataloader(
        data.segments, args.train_batch_size, seed=args.seed, drop_last=False, collate_fn=as_it_is
    )

    # the samples of the first 20 batches of this rank
    loader.batch_sampler.set_position(0)
    ids = [sorted(batch["sample"].tolist()) for _, batch in zip(range(20), loader)]
    where = os.path.join({out!r}, f"{{ranks.world_size}}_{{ranks.rank}}.json")
    json.dump(ids, open(where, "w"))
"""


LAUNCHERS = {
    "torchrun": torchrun(2),
    "accelerate": ["accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    + ["--dynamo_backend=no", "--mixed_precision=fp16"],
}


SOAKED = [pytest.param(name, marks=pytest.mark.soak) for name in LAUNCHERS]


@pytest.mark.parametrize("launcher", ["none", *SOAKED])
def test_ranks_get_different_samples_of_the_same_global_batch(compressed_ad_flags, zygote, tmp_path, launcher):
    """The original's ranks all trained on the same batches. (That accelerate's two do as these is shown below.)"""
    script = tmp_path / "probe.py"
    words = compressed_ad_flags(tmp_path, "--train_batch_size", "6")
    text = PROBE.format(root=str(ROOT), words=words, out=str(tmp_path))
    script.write_text(text)
    if launcher == "none":
        assert zygote(script, ranks=2).code == 0
    else:
        command = [*LAUNCHERS[launcher], script]
        subprocess.run(command, check=True, cwd=ROOT, timeout=120, capture_output=True)

    # the two ranks' samples make up the batch of one process
    batches = itertools.islice(TrainBatchSampler(2190, 12, 0, 1), 20)
    alone = [sorted(ids) for ids in batches]
    first = read_json(tmp_path / "2_0.json")
    second = read_json(tmp_path / "2_1.json")
    assert len(first) == len(second) == len(alone) == 20
    for a, b, whole in zip(first, second, alone, strict=True):
        assert not set(a) & set(b)
        assert sorted(a + b) == whole

    # none twice
    samples = {sample for batch in first + second for sample in batch}
    assert len(samples) == 240


def test_accelerate_launch_with_the_config_file(compressed_ad_flags, run_train, tmp_path):
    """The guide's first command for real: two processes, the curve of two that no launcher started, fp16 as fp32."""
    out = tmp_path / "run"
    bare = tmp_path / "bare"
    run_train(compressed_ad_flags(bare, "--train_batch_size", "6"), 2)

    command = ["accelerate", "launch", "--config_file", "configs/accelerate_config.yaml", "train.py"]
    command += compressed_ad_flags(out, "--train_batch_size", "6")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    processes = "Distributed training: MULTI_CPU\nNumber of processes: 2\n"
    assert f"{processes}Mixed precision: no\nProcess 0 using" in done.stdout
    assert "fp32: the fp16 of accelerate launch needs a GPU" in done.stdout
    assert curve(out) == curve(bare)


@pytest.mark.soak
def test_rates_follow_the_effective_batch_and_nothing_else(compressed_ad_flags, run_train, one, tmp_path):
    """--lr_scaling sqrt: doubling the batch multiplies the lr by the square root of 2, however it is made up."""
    lrs = {}
    for name, ranks, more in (
        ("one", 1, ["--train_batch_size", "12"]),
        ("two", 2, ["--train_batch_size", "12"]),
        ("accumulated", 1, ["--train_batch_size", "12", "--gradient_accumulation_steps", "2"]),
        ("linear", 1, ["--batch_size", "24", "--lr_scaling", "linear"]),
    ):
        flags = compressed_ad_flags(tmp_path / name, "--lr_scaling", "sqrt", "--max_steps", "2", "--eval_seeds", "1")
        done = run_train([*flags, *more], ranks)
        lrs[name] = lr_of_second_step(tmp_path / name)
        assert f"{lrs[name]:g} (--lr_scaling" in done.stdout

    assert lrs["one"] == pytest.approx(1e-2 * (12 / 128) ** 0.5)
    assert lrs["two"] == lrs["accumulated"] == pytest.approx(2**0.5 * lrs["one"])
    assert lrs["linear"] == pytest.approx(1e-2 * 24 / 128)
    assert lr_of_second_step(one) == pytest.approx(1e-2)


def test_gradient_is_that_of_all_actions_of_all_ranks(compressed_ad_flags, run_train, tmp_path):
    """Against one backward pass by hand over the whole global batch: the mean over its actions, not of ranks' means."""
    out = tmp_path / "run"
    run_train(compressed_ad_flags(out, "--train_batch_size", "4", "--max_steps", "1", "--grad_clip", "0"), 3)

    # by hand
    args = train.parse_args(compressed_ad_flags(out))
    model = train.build_model(args, torch.device("cpu"))
    batch = first_batch(train.read_data(args), args)
    assert len(batch["sample"]) == 12
    losses, right = train.action_losses(model, batch)
    actions = (batch["action"] >= 0).sum()
    assert actions == batch["length"].sum()
    loss = losses.sum() / actions
    loss.backward()
    accuracy = right.sum() / actions
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    norm = torch.stack(norms).norm()

    line = read_lines(out)[0]
    assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["train/accuracy"] == pytest.approx(accuracy.item(), rel=1e-5)
    assert line["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


# --- killed and resumed -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed_flags(compressed_ad_flags):
    """killed_flags(out): two processes, 40 steps, a checkpoint every 3."""
    more = ["--train_batch_size", "6", "--save_every", "3", "--resume_from", "auto"]
    more += ["--train_timesteps", "40", "--eval_interval", "20"]
    return lambda out: compressed_ad_flags(out) + more


@pytest.fixture(scope="module")
def whole(killed_flags, run_train, tmp_path_factory) -> Path:
    """The unbroken run of two processes."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run_train(killed_flags(out), 2)
    assert len(training(out)) == 40
    return out


def same_end(out: Path, whole: Path) -> None:
    """The same metrics, weights, state and evaluations."""
    assert curve(out) == curve(whole)
    checkpoint = load(out / "last.pt")
    expected = load(whole / "last.pt")
    for name, value in checkpoint["net"].items():
        assert torch.equal(value, expected["net"][name]), name

    # these are unknown after a kill right after best.pt was written, until it is written anew
    unknown = {"best": None, "best_sha256": None}
    assert checkpoint["state"] | unknown == expected["state"] | unknown
    assert load(out / "best.pt")["step"] == load(whole / "best.pt")["step"]
    assert read_json(out / "eval_test.json") == read_json(whole / "eval_test.json")


def test_kill_and_resume(killed_flags, run_train, zygote, whole, tmp_path):
    """A worker killed, then SIGTERM to both: the rest is the unbroken run's, bit for bit."""
    out = tmp_path / "run"
    kill_then_stop(zygote, [TRAIN, *killed_flags(out)], out, 6, 12)
    run_train(killed_flags(out), 2)
    same_end(out, whole)


@pytest.mark.soak
def test_ten_kills(killed_flags, run_train, whole, tmp_path):
    """Ten runs, each killed at a random moment and resumed; half of them around the evaluation."""
    chance = random.Random(6)
    for k in range(10):
        out = tmp_path / str(k)
        step = chance.choice([18, 20]) if k % 2 else chance.randrange(36)
        who = chance.choice(["worker", "rank0", "all"])
        delay = chance.uniform(0, 0.4)
        interrupt([TRAIN, *killed_flags(out)], out, who, step, delay)
        saved = sorted(path.name for path in out.glob("step*"))
        print(f"kill {k}: {who}, {delay:.2f} s after step {step}: {saved}")
        run_train(killed_flags(out), 2)
        same_end(out, whole)


def test_resume_at_another_world_size(compressed_ad_flags, run_train, one, tmp_path):
    """A single process's checkpoint is resumed on 2 processes, on 3, and back on one."""
    out = tmp_path / "run"
    for ranks, until in ((1, 2), (2, 4), (3, 6), (1, 0)):
        size = 12 // ranks
        flags = compressed_ad_flags(out, "--train_batch_size", size, "--max_steps", until, "--resume_from", "auto")
        run_train(flags, ranks)
    assert loss_difference(training(out), training(one)) < 1e-5


@pytest.mark.soak
def test_resumed_after_a_stop_the_best_is_the_same(compressed_ad_flags, run_train, tmp_path):
    """--max_steps ends with an evaluation that the unbroken run has not: it chooses nothing, and leaves no line."""
    out = tmp_path / "run"
    whole = tmp_path / "whole"
    more = ["--train_timesteps", "12", "--eval_interval", "2", "--seed", "2", "--eval_seeds", "1"]
    run_train(compressed_ad_flags(whole) + more)
    for until in (1, 3, 7, 0):
        flags = compressed_ad_flags(out, "--max_steps", until, "--resume_from", "auto")
        done = run_train(flags + more)
        assert "test, best.pt" in done.stdout

    trained = [row for row in curve(out) if "test/return_last" not in row.numbers]
    assert trained == curve(whole)[:-1]
    assert curve(out)[-1] == curve(whole)[-1]

    # the best step is that of the lowest validation loss
    records = read_lines(whole)
    evaluated = {line["step"]: line["val/loss"] for line in records if "val/loss" in line}
    assert list(evaluated) == [2, 4, 6, 8, 10, 12]
    best = min(evaluated, key=evaluated.get)
    assert records[-1]["best_step"] == best
    assert load(whole / "best.pt")["step"] == best


def test_unseen_goals_choose_nothing(compressed_ad_flags, one):
    """best.pt is chosen by the loss on training goals, the brief evaluations and the test are of the right goals."""
    train_goals, unseen = split_goals()
    watched = train_goals[:8]
    watched_optimum = optimal_return(watched).mean()
    unseen_optimum = optimal_return(unseen).mean()
    assert watched_optimum != unseen_optimum

    # the returns are of these goals
    records = read_lines(one)
    for line in records:
        if "val/return_last" in line:
            assert line["val/return_optimal"] == pytest.approx(watched_optimum)
            assert line["unseen/return_optimal"] == pytest.approx(unseen_optimum)
            assert "test/return_last" not in line
    random_policy = random_return(unseen).mean()
    assert records[-1]["test/return_random"] == pytest.approx(random_policy)

    # and so are the losses
    args = train.parse_args(compressed_ad_flags(one))
    model = trained_model(args, one)
    experiment = train.Experiment(model, train.read_data(args), "no", args)
    best_step = records[-1]["best_step"]
    best = next(line for line in records if "val/loss" in line and line["step"] == best_step)
    for split, goals in (("val", watched), ("unseen", unseen)):
        metrics, _ = train.action_accuracy(split, goals, experiment)
        expected = {name: best[name] for name in metrics}
        assert metrics == pytest.approx(expected, rel=1e-5)


def weight_decay(checkpoint: dict) -> float:
    """That of the optimizer."""
    return checkpoint["optimizer"]["param_groups"][0]["weight_decay"]


def test_what_a_run_goes_on_with(compressed_ad_flags, run_train, darkroom_data, tmp_path):
    """Model, schedule and data are the checkpoint's where no flag says otherwise; what differs is said."""
    out = tmp_path / "run"
    begun = compressed_ad_flags(out, "--max_steps", "2", "--eval_seeds", "1", latents=0)
    run_train([*begun, "--weight_decay", "0.5", "--lr_scaling", "sqrt", "--train_batch_size", "12"])

    # AD's own batch is 512
    lr = lr_of_second_step(out)
    assert lr == pytest.approx(1e-2 * (12 / 512) ** 0.5)

    # the third step is at the cosine's top
    few = ["--output_dir", str(out), "--resume_from", "auto", "--batch_size", "12", "--val_episodes", "2"]
    few += ["--eval_episodes", "3", "--eval_seeds", "1", "--log_every", "1"]
    run_train([*few, "--max_steps", "3"])
    assert training(out)[2].numbers["train/lr"] == pytest.approx(lr)
    checkpoint = load(out / "last.pt")
    assert checkpoint["settings"]["model"] == "ad"
    assert weight_decay(checkpoint) == 0.5

    # another weight decay is taken
    done = run_train([*few, "--weight_decay", "0.1"])
    assert "warning: begun with --weight_decay 0.5, going on with 0.1: another run from here on" in done.stdout
    checkpoint = load(out / "last.pt")
    assert checkpoint["step"] == 8
    assert weight_decay(checkpoint) == 0.1

    # the file's name is not what counts
    other = tmp_path / "renamed.h5"
    shutil.copy(next(darkroom_data.glob("datasets/*.hdf5")), other)
    done = run_train([*few, "--data", other])
    assert "nothing left to train" in done.stdout


def test_epochs_are_counted_as_they_begin(compressed_ad_flags, run_train, tmp_path):
    """2190 samples in steps of 1095: two steps an epoch."""
    out = tmp_path / "run"
    flags = compressed_ad_flags(out, "--train_batch_size", "1095", "--eval_seeds", "1", "--num_warmup_steps", "0")
    run_train([*flags, "--train_timesteps", "3", "--log_every", "2", "--eval_interval", "2"])
    records = read_lines(out)
    assert [line["step"] for line in records] == [2, 2, 3, 3, 3]
    assert [line["epoch"] for line in records] == [1, 1, 2, 2, 2]
    trained = ["train/loss" in line for line in records]
    assert trained == [True, False, True, False, False]
    assert read_json(out / "summary.json")["epochs"] == 2


def test_uneven_last_step_and_a_resume_at_the_epoch_s_end(compressed_ad_flags, run_train, tmp_path):
    """2190 samples in steps of 400: the sixth of an epoch has 190. Stopped there, and in it, the rest is the same."""
    by_one = tmp_path / "one"
    by_two = tmp_path / "two"
    resumed = tmp_path / "resumed"
    more = ["--train_timesteps", "8", "--eval_interval", "0", "--eval_seeds", "1", "--save_every", "1"]
    run_train([*compressed_ad_flags(by_one), *more, "--train_batch_size", "400"])
    run_train([*compressed_ad_flags(by_two), *more, "--train_batch_size", "200"], 2)
    assert loss_difference(curve(by_two), curve(by_one)) < 1e-5
    epochs = [row.epoch for row in training(by_one)]
    assert epochs == [1] * 6 + [2] * 2

    for until in (5, 6, 0):
        flags = compressed_ad_flags(resumed, "--train_batch_size", "200", "--resume_from", "auto")
        run_train([*flags, *more, "--max_steps", until], 2)
    assert training(resumed) == training(by_two)


def test_nothing_to_compress_is_no_hang(compressed_ad_flags, run_train, tmp_path):
    """--max_compression_depth 0 on two ranks: DDP has its gradients."""
    out = tmp_path / "run"
    flags = compressed_ad_flags(out, "--train_batch_size", "6", "--max_steps", "2", "--eval_seeds", "1")
    run_train([*flags, "--max_compression_depth", "0"], 2)
    assert len(training(out)) == 2


@pytest.mark.soak
def test_full_disk(compressed_ad_flags, run_train, zygote, tmp_path):
    """One line, and the checkpoint before is intact, on disks of several sizes; histories that do not fit, likewise."""
    for kilobytes in (300, 700, 1100):
        disk = tmp_path / f"{kilobytes}"
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", disk]).returncode:
            pytest.skip("mounting a tmpfs needs root")
        try:
            out = disk / "run"
            flags = compressed_ad_flags(out, "--save_every", "1", "--keep_last", "99", "--eval_interval", "0")
            done = run_train(flags, code=1)
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1
            assert re.search(r"not written \(No space left on device\), the checkpoint before is intact", errors[0])
            assert "Traceback" not in done.stderr

            # without a checkpoint the manifest has no line that sha256sum reads
            manifest = read_manifest(out)
            assert sorted(path.name for path in out.glob("step_*.pt")) == manifest.steps()
            if manifest.checkpoints:
                subprocess.run(["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=out, check=True)

            # histories on the same disk
            done = zygote(str(ROOT / "tools/sample_data.py"), "compressed_ad", disk / "data", "--streams", "9")
            assert done.code == 1
            assert re.search(r"TD_alg-seed42.hdf5: not written \(.*\); make room\n$", done.stderr)
            assert not list((disk / "data").rglob("*.*"))
        finally:
            subprocess.run(["umount", disk], check=True)


def test_a_disk_that_fills_at_any_byte_is_an_os_error(tmp_path, monkeypatch):
    """torch.save turns some of them into a RuntimeError of its own."""
    written = manifest_utils._HashingFile.write
    contents = {"a": torch.zeros(3000), "b": torch.zeros(100)}
    room = 0

    def write(self, data) -> int:
        if self.raw.tell() + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(self, data)

    monkeypatch.setattr(manifest_utils._HashingFile, "write", write)
    while room < 14000:
        room += 250
        with pytest.raises(OSError, match="No space left"):
            manifest_utils.write_atomically(tmp_path / "x.pt", lambda file: torch.save(contents, file))
        assert not list(tmp_path.iterdir())


def test_signal_while_agents_act(compressed_ad_flags, run_train, one, tmp_path):
    """SIGTERM in a long evaluation ends it at once; the run goes on with that evaluation, and ends as if unbroken."""
    out = tmp_path / "run"
    flags = compressed_ad_flags(out, "--resume_from", "auto")
    sigterm = at_step(out, 4, "all", signal.SIGTERM, delay=0.3)
    done = run_train([*flags, "--val_episodes", "5000"], code=143, interrupt=sigterm)
    assert "signal: saved at step 4" in done.stdout

    # the evaluation as a whole takes minutes
    assert done.seconds < 40
    run_train(flags)
    assert curve(out) == curve(one)


def test_a_net_that_diverges_is_stopped_together(compressed_ad_flags, run_train, tmp_path):
    words = compressed_ad_flags(tmp_path / "run", "--lr", "1e30", "--max_bad_steps", "2", "--grad_clip", "0")
    done = run_train(words, 2, code=1)
    assert "2 steps in a row had a non-finite loss or gradient" in done.stderr
    assert done.stderr.count("error:") == 1


def test_out_of_memory_names_the_flags_to_change(compressed_ad_flags, zygote, tmp_path):
    little = ROOT / "tests/old/little_memory.py"
    words = compressed_ad_flags(tmp_path / "run", "--test_batch_size", "6")
    done = zygote(str(little), "6", TRAIN, *words)
    assert done.code == 1
    assert "error: out of memory at --train_batch_size 12; try --train_batch_size 6 --gradient_acc" in done.stderr


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_is_exact_at_any_world_size(compressed_ad_flags, run_train, one, tmp_path):
    """Every return of every agent is the same, whoever computes it and beside whom."""
    evaluations = []
    for ranks, batch in ((1, 256), (1, 3), (2, 5), (3, 256)):
        out = tmp_path / f"{ranks}x{batch}"
        flags = compressed_ad_flags(out, "--eval_only", "--resume_from", one / "best.pt", "--test_batch_size", batch)
        done = run_train([*flags, "--eval_episodes", "12"], ranks)
        evaluations.append(read_json(out / "eval_test.json"))
        figures = {path.name for path in (out / "figures").iterdir()}
        assert figures == {"returns.png", "trajectories.png", "accuracy.png"}
        assert "unseen goals" in done.stdout

    # all numbers are equal, but for the rounding of the loss
    first, *others = evaluations
    loss = first.pop("test/loss")
    for other in others:
        assert other.pop("test/loss") == pytest.approx(loss, rel=1e-6)
        assert other == first
    assert len(first["return_by_episode"]["mean"]) == 12
    _, unseen = split_goals()
    assert first["goals"] == [list(divmod(goal, 9)) for goal in unseen]


def test_eval_only_writes_where_it_belongs(compressed_ad_flags, run_train, tmp_path):
    """Beside the checkpoint, whatever model it is of; what is not best.pt does not replace the run's own test."""
    ad = tmp_path / "ad"
    run_train(compressed_ad_flags(ad, "--max_steps", "2", latents=0))
    before = (ad / "eval_test.json").read_text()
    evaluate = ["--eval_only", "--eval_episodes", "2", "--eval_seeds", "1"]

    # the last checkpoint, then the best of the run folder
    run_train([*evaluate, "--resume_from", ad / "last.pt"])
    assert (ad / "eval_test.json").read_text() == before
    of_last = read_json(ad / "eval_last.json")
    assert of_last["model"] == "ad"
    assert of_last["step"] == 2
    assert of_last["eval_episodes"] == 2
    assert (ad / "figures" / "last_returns.png").exists()
    run_train([*evaluate, "--resume_from", ad])
    assert read_json(ad / "eval_test.json")["eval_episodes"] == 2

    # those of a run that is overwritten go
    diverging = ["--overwrite", "--lr", "1e30", "--max_bad_steps", "1", "--grad_clip", "0"]
    run_train(compressed_ad_flags(ad, latents=0) + diverging, code=1)
    assert not list(ad.glob("eval_*.json"))


def test_eval_only_repeats_the_test(compressed_ad_flags, run_train, one, tmp_path):
    summary = read_json(one / "summary.json")
    run_train(compressed_ad_flags(tmp_path / "run", "--eval_only", "--resume_from", one / "best.pt"), 2)
    repeated = read_json(tmp_path / "run" / "eval_test.json")
    names = [name for name in repeated if name.startswith("test/")]
    assert len(names) == 10
    for name in names:
        assert repeated[name] == pytest.approx(summary[name], rel=1e-5), name
    assert repeated["test/return_optimal"] == 17.25


# (down, right) of each action; the last one stays
MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))


def step_by_hand(cell: int, action: int) -> int:
    """The cell to which an action leads."""
    row, column = divmod(cell, 9)
    down, right = MOVES[action]
    row = min(8, max(0, row + down))
    column = min(8, max(0, column + right))
    return 9 * row + column


def logits_after(model, past: list[tuple], cell: int) -> torch.Tensor:
    """Logits in a cell after (cell, action, next cell, reward) of each step before, through the training path."""
    blocks, length = divmod(len(past), 20)
    cells = torch.zeros(1, 4, 20, 3, dtype=torch.uint8)
    rewards = torch.zeros(1, 4, 20)
    for step, (*transition, reward) in enumerate(past):
        block, place = divmod(step, 20)

        # the context is last
        if block == blocks:
            block = 3
        cells[0, block, place] = torch.tensor(transition)
        rewards[0, block, place] = reward
    cells[0, 3, length, 0] = cell
    batch = {
        "cells": cells,
        "rewards": rewards,
        "depth": torch.tensor([blocks]),
        "length": torch.tensor([length]),
        "compressed": [int(block < blocks) for block in range(3)],
    }
    return model(batch)[0, length]


class Agent:
    """An agent and its environment, written out anew; it starts each episode in cell 40."""

    def __init__(self, model, goal: int, rng: np.random.Generator) -> None:
        self.model = model
        self.goal = goal
        self.rng = rng
        self.past: list[tuple] = []

    @torch.no_grad()
    def walk(self) -> tuple[float, list[int]]:
        """The return and the cells of the next episode."""
        uniform = self.rng.random((20, 5))
        noise = -np.log(-np.log(uniform))
        cell = 40
        total = 0.0
        walked = [cell]
        for t in range(20):
            logits = logits_after(self.model, self.past, cell).numpy()
            action = int((logits + noise[t]).argmax())
            next_cell = step_by_hand(cell, action)
            reward = float(next_cell == self.goal)
            self.past.append((cell, action, next_cell, reward))
            total += reward
            cell = next_cell
            walked.append(cell)
        return total, walked


def test_returns_against_a_simulation_step_by_step(compressed_ad_flags, one):
    """One agent after the other, through the training path, in an environment written out anew."""
    args = train.parse_args(compressed_ad_flags(one))
    model = trained_model(args, one)
    returns, paths = train.act_in_context(model, [38, 45], 2, 4, args.seed, 256)
    assert returns.shape == (2, 2, 4)

    model = model.double().eval()
    for g, goal in enumerate((38, 45)):
        for k in range(2):
            rng = np.random.default_rng([args.seed, 5, goal, k])
            agent = Agent(model, goal, rng)
            for episode in range(4):
                total, walked = agent.walk()
                assert returns[g, k, episode] == total
                if k == 0 and episode in (0, 3):
                    assert paths[g, int(episode > 0)].tolist() == walked


def test_numbers_of_the_table():
    # 8 goals, 10 agents, 40 episodes; the goals differ by far more than the agents
    rng = np.random.default_rng(1)
    returns = rng.normal(5, 1, (8, 10, 40))
    returns += rng.normal(0, 3, (8, 1, 1))
    metrics = report.return_metrics("test", returns, list(range(8)))
    first = returns[:, :, 0].mean()
    assert metrics["test/return_first"] == pytest.approx(first)
    by_goal = returns[:, :, 36:].mean((1, 2))
    assert metrics["test/return_last"] == pytest.approx(by_goal.mean())

    # the interval is that of the goals
    wide = 1.96 * by_goal.std(ddof=1) / 8**0.5
    width = metrics["test/return_last_high"] - metrics["test/return_last_low"]
    assert width == pytest.approx(2 * wide, rel=0.25)
    constant = np.full((8, 3), 2.0)
    assert report.interval(constant) == (2.0, 2.0, 2.0)


def test_action_accuracy_against_a_loop(compressed_ad_flags, one):
    """Accuracy and loss on unseen goals' histories, and by place, one segment at a time."""
    args = train.parse_args(compressed_ad_flags(one))
    model = trained_model(args, one)
    data = train.read_data(args)
    experiment = train.Experiment(model, data, "no", args)
    metrics, by_place = train.action_accuracy("test", data.unseen_goals, experiment)

    # one segment of each depth of each history: 8 goals, 3 streams
    segments = SegmentDataset(data.histories, data.unseen_goals, 20, 3, 0)
    loss = 0.0
    hits = np.zeros((4, 20))
    counts = np.zeros((4, 20))
    for depth, history in itertools.product(range(4), range(24)):
        share = (history * 0.618034) % 1
        end = 20 * depth + 1 + int(share * (200 - 20 * depth))
        batch = segments.batch(np.array([history]), np.array([depth]), np.array([end]))
        with torch.no_grad():
            logits = model(batch)[0].double()

        for place in range(int(batch["length"][0])):
            target = int(batch["cells"][0, 3, place, 1])
            loss -= float(logits[place].log_softmax(-1)[target])
            hits[depth, place] += int(logits[place].argmax()) == target
            counts[depth, place] += 1

    assert metrics["test/loss"] == pytest.approx(loss / counts.sum(), rel=1e-5)
    assert metrics["test/accuracy"] == pytest.approx(hits.sum() / counts.sum(), rel=1e-6)
    with np.errstate(invalid="ignore"):
        expected = hits / counts
    assert np.allclose(by_place, expected, equal_nan=True)


def test_beside_a_baseline(compressed_ad_flags, run_train, tmp_path):
    ad = tmp_path / "ad"
    out = tmp_path / "run"
    run_train(compressed_ad_flags(ad, "--max_steps", "2", latents=0))
    done = run_train(compressed_ad_flags(out, "--max_steps", "2", "--ad_run", ad))
    assert re.search(r"test, best.pt: episode +return +low +high +AD +source +random +optimum", done.stdout)
    summary = read_json(out / "summary.json")
    assert summary["test/return_ad_last"] == read_json(ad / "summary.json")["test/return_last"]


# --- what is written --------------------------------------------------------------------------------------------------


def test_run_folder(one):
    from safetensors.torch import load_file
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # files and figures
    names = {path.name for path in one.iterdir()}
    assert {"args.yaml", "metrics.jsonl", "summary.json", "last.pt", "best.pt", "manifest.sha256", "logs"} <= names
    figures = list((one / "figures").iterdir())
    wanted = {f"{name}.png" for name in ("inputs", "returns", "trajectories", "accuracy", "curves")}
    assert {path.name for path in figures} == wanted
    assert all(path.stat().st_size > 5000 for path in figures)

    # the summary's keys
    summary = read_json(one / "summary.json")
    wanted = {f"test/return_{part}" for part in ("first", "last", "random", "optimal")}
    wanted |= {"train/loss", "train/samples_per_s", "train/data_wait", "train/peak_memory_gb", "test/accuracy"}
    wanted |= {"steps", "epochs", "world_size", "effective_batch_size", "precision", "seconds"}
    assert wanted <= summary.keys()

    # the weights are the best checkpoint's
    weights = load_file(one / "model.safetensors")
    for name, value in load(one / "best.pt")["net"].items():
        assert torch.equal(weights[name], value), name

    # TensorBoard
    logged = EventAccumulator(str(one / "logs")).Reload()
    steps = [event.step for event in logged.Scalars("train/samples_per_s")]
    assert steps == list(range(1, 9))
    assert "returns" in logged.Tags()["images"]


def test_defaults_are_those_of_the_config():
    path = ROOT / "configs" / "compressed_ad_darkroom.yaml"
    config = yaml.safe_load(path.read_text())
    facts = {"tf_n_embd": 128, "tf_n_layer": 4, "tf_n_head": 8, "n_latent": 40, "max_compression_depth": 3}
    facts |= {"n_transit": 240, "lr": 1e-4, "train_batch_size": 128, "test_batch_size": 256, "train_timesteps": 150000}
    facts |= {"num_warmup_steps": 5000, "grad_clip_norm": 1.0, "summary_interval": 100, "eval_interval": 1000}
    facts |= {"ckpt_interval": 1000, "mixed_precision": "auto"}
    assert facts.items() <= config.items()

    # with and without the config the flags are the same
    silent = vars(train.parse_args([]))
    told = vars(train.parse_args(["--config", str(path)]))
    for name in silent.keys() - {"config", "source"}:
        assert told[name] == silent[name], name
    flags = {"grad_clip_norm": "grad_clip", "summary_interval": "log_every", "ckpt_interval": "save_every"}
    for name, value in config.items():
        assert silent[flags.get(name, name)] == value, name

    baseline = train.parse_args(["--model", "ad"])
    assert baseline.tf_n_embd == 64
    assert baseline.lr == 3e-4
    assert baseline.train_batch_size == 512
    assert baseline.train_timesteps == 50000
    assert baseline.output_dir == "runs/ad"


# The guide's keys, with the model, data and steps of compressed_ad_flags.
CONFIG = {
    "tf_n_embd": 16,
    "tf_n_layer": 2,
    "tf_n_head": 2,
    "tf_dim_feedforward": 32,
    "encoder_n_layer": 1,
    # context
    "n_transit": 20,
    "n_latent": 4,
    "max_compression_depth": 3,
    # steps
    "train_batch_size": 12,
    "train_timesteps": 8,
    "num_warmup_steps": 2,
    "lr": 1e-2,
    "grad_clip_norm": 1.0,
    # how often, and how much is evaluated
    "summary_interval": 1,
    "eval_interval": 4,
    "ckpt_interval": 2,
    "val_episodes": 2,
    "eval_episodes": 2,
    "eval_seeds": 1,
}

# Keys that change the loss of the first step.
SEEN_AT_ONCE = [
    {"tf_n_embd": 32},
    {"tf_n_layer": 1},
    {"tf_n_head": 4},
    {"tf_dim_feedforward": 64},
    {"encoder_n_layer": 2},
    {"n_latent": 5},
    {"n_transit": 19},
    {"max_compression_depth": 1},
    # data and draws
    {"train_batch_size": 11},
    {"split_seed": 1},
    {"seed": 1},
    {"model": "ad", "n_latent": 0},
]

# Keys that change the loss of the third step.
SEEN_LATER = [
    {"lr": 2e-2},
    {"num_warmup_steps": 1},
    {"grad_clip_norm": 0.1},
    {"weight_decay": 1.0},
]


@pytest.mark.soak
def test_config_keys_have_an_effect(run_train, darkroom_data, one, tmp_path):
    """Each of the guide's keys arrives, by its own name: in the model, in the data, in the run."""

    def config(name: str, changes: dict) -> list[str]:
        path = tmp_path / f"{name}.yaml"
        keys = CONFIG | changes | {"data": str(darkroom_data)}
        path.write_text(json.dumps(keys))
        return ["--config", str(path), "--output_dir", str(tmp_path / name)]

    def first_loss(changes: dict) -> float:
        args = train.parse_args(config("inside", changes))
        model = train.build_model(args, torch.device("cpu"))
        batch = first_batch(train.read_data(args), args)
        with torch.no_grad():
            losses, _ = train.action_losses(model, batch)
        return float(losses.sum() / batch["length"].sum())

    def third_loss(name: str, changes: dict) -> float:
        run_train([*config(name, changes | {"eval_interval": 0}), "--max_steps", "3"])
        return training(tmp_path / name)[2].numbers["train/loss"]

    # the loss before the first update
    rows = training(one)
    first = first_loss({})
    assert first == pytest.approx(rows[0].numbers["train/loss"], rel=1e-6)
    for changes in SEEN_AT_ONCE:
        assert abs(first_loss(changes) - first) > 1e-4, changes

    # the loss after two updates, and the checkpoints of every second step
    third = third_loss("same", {})
    assert third == rows[2].numbers["train/loss"]
    saved = sorted(path.name for path in (tmp_path / "same").glob("step_*"))
    assert saved == ["step_00000002.pt", "step_00000003.pt"]
    for k, changes in enumerate(SEEN_LATER):
        assert third_loss(f"changed_{k}", changes) != third, changes

    # how often is logged and evaluated, and in which precision
    out = tmp_path / "often"
    often = {"eval_interval": 1, "summary_interval": 3, "mixed_precision": "bf16"}
    run_train([*config("often", often), "--max_steps", "3"])
    assert read_json(out / "summary.json")["precision"] == "bf16"
    evaluated = [line["step"] for line in read_lines(out) if "val/return_last" in line]
    assert evaluated == [1, 2, 3]
    assert [row.step for row in training(out)] == [3]


@pytest.mark.soak
def test_compiled(compressed_ad_flags, one, tmp_path):
    out = tmp_path / "run"
    command = ["python", TRAIN, *compressed_ad_flags(out, "--compile")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert loss_difference(training(out), training(one)) < 1e-4


def test_each_epoch_cuts_other_segments_out_of_the_histories(compressed_ad_flags, zygote, tmp_path):
    """A model that learns nothing has the same loss on the same segments; an epoch is one step here."""
    out = tmp_path / "run"
    still = ["--lr", "1e-12", "--num_warmup_steps", "0", "--train_timesteps", "2", "--train_batch_size", "2190"]
    done = zygote(TRAIN, compressed_ad_flags(out), still, "--eval_interval", "0")
    assert done.code == 0, done.stderr
    first, second = training(out)
    assert (first.epoch, second.epoch) == (1, 2)
    assert abs(first.numbers["train/loss"] - second.numbers["train/loss"]) > 1e-5
