"""train.py: the same answer from any number of processes, from a run that was killed, and agents that are measured."""

import itertools
import json
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from background import interrupt
from conftest import ROOT, at_step, kill_then_stop, torchrun

from manifest_utils import read_manifest
from sampler_utils import TrainBatchSampler
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


def load(path: Path) -> dict:
    """A checkpoint."""
    return torch.load(path, weights_only=True)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def lines(out: Path) -> list[dict]:
    text = (out / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def curve(out: Path) -> list[tuple]:
    """(step, epoch, numbers) of every line, in file order, without times and memory."""
    rows = []
    for line in lines(out):
        numbers = {name: line[name] for name in (*TRAINED, *EVALUATED) if name in line}
        rows.append((line["step"], line["epoch"], numbers))
    return rows


def training(out: Path) -> list[tuple]:
    return [row for row in curve(out) if "train/loss" in row[2]]


def off(a: list[tuple], b: list[tuple]) -> float:
    """Largest relative difference of the losses; steps and learning rates are equal, counts and gradients nearly so."""
    assert [row[:2] for row in a] == [row[:2] for row in b]
    most = 0.0
    for (*_, x), (*_, y) in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        assert x.get("train/lr") == y.get("train/lr")
        for name in x:
            if name.endswith("loss"):
                difference = abs(x[name] - y[name])
                most = max(most, difference / abs(y[name]))
            elif name == "train/grad_norm":
                assert x[name] == pytest.approx(y[name], rel=1e-3)
            elif name.startswith("train/"):
                # one action of some 200
                assert x[name] == pytest.approx(y[name], abs=2e-3)
    return most


def go(zygote, words: list[str], ranks: int = 1, code: int = 0, **environment):
    done = zygote(TRAIN, *words, ranks=ranks, **environment)
    assert done.code == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def one(compressed_ad_flags, zygote, tmp_path_factory) -> Path:
    """A whole run in one process, 12 segments a step."""
    out = tmp_path_factory.mktemp("one") / "run"
    done = go(zygote, compressed_ad_flags(out), figures=True)
    assert (
        "Distributed training: NO\nNumber of processes: 1\nMixed precision: no\nProcess 0 using device: cpu"
        in done.stdout
    )
    assert re.search(
        r"segments +2190 an epoch: \d+ of depth 0, \d+ of depth 1, \d+ of depth 2, \d+ of depth 3", done.stdout
    )
    assert re.search(r"test, best.pt: episode +return +low +high +source +random +optimum", done.stdout)
    return out


# --- the same answer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ["--train_batch_size", "6"]),
        (3, ["--train_batch_size", "4", "--no-cache_in_memory"]),
        (1, ["--train_batch_size", "4", "--gradient_accumulation_steps", "3", "--num_workers", "2"]),
        (2, ["--train_batch_size", "2", "--gradient_accumulation_steps", "3"]),
    ],
    ids=["2x6", "3x4-mapped", "1x4x3-workers", "2x2x3"],
)
def test_same_curve(compressed_ad_flags, zygote, one, tmp_path, ranks, more):
    """Loss of every step, learning rate and evaluations of N processes are those of one with N times the batch."""
    out = tmp_path / "run"
    done = go(zygote, compressed_ad_flags(out, *more), ranks)
    assert len(training(out)) == 8
    assert len(curve(one)) == 8 + 2 + 1
    assert off(curve(out), curve(one)) < 1e-5
    rates = [row[2]["train/lr"] for row in training(out)]

    # warm-up of 2, then cosine over 8, one step a step
    assert rates[:3] == pytest.approx([5e-3, 1e-2, 1e-2])
    assert rates[5] == pytest.approx(5e-3)
    cosine = np.cos(np.pi * 5 / 6)
    assert rates[-1] == pytest.approx(1e-2 * (1 + cosine) / 2)
    assert f"Number of processes: {ranks}" in done.stdout
    assert done.stdout.count("using device: cpu") == ranks


def test_plain_ad(compressed_ad_flags, zygote, tmp_path):
    a = tmp_path / "one"
    b = tmp_path / "two"
    go(zygote, compressed_ad_flags(a, latents=0))
    go(zygote, compressed_ad_flags(b, "--train_batch_size", "6", latents=0), 2)
    assert off(curve(b), curve(a)) < 1e-5
    names = load(a / "last.pt")["net"]
    assert not any("encoder" in name for name in names)


PROBE = """
import json, os, sys
sys.path.insert(0, {root!r})
import train
import distributed_utils as du
from tasks.compressed_ad.data import as_it_is
args = train.parse_args({words!r})
args.mixed_precision = "no"
with du.setup_distributed() as ranks:
    data = train.read_data(args)
    loader = du.create_distributed_dataloader(data.segments, args.train_batch_size, seed=args.seed, drop_last=False,
                                              collate_fn=as_it_is)
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


@pytest.mark.parametrize("launcher", ["none", *(pytest.param(name, marks=pytest.mark.soak) for name in LAUNCHERS)])
def test_ranks_get_different_samples_of_the_same_global_batch(compressed_ad_flags, zygote, tmp_path, launcher):
    """The original's ranks all trained on the same batches. (That accelerate's two do as these is shown below.)"""
    from distributed_utils import TrainBatchSampler

    script = tmp_path / "probe.py"
    words = compressed_ad_flags(tmp_path, "--train_batch_size", "6")
    text = PROBE.format(root=str(ROOT), words=words, out=str(tmp_path))
    script.write_text(text)
    if launcher == "none":
        assert zygote(script, ranks=2).code == 0
    else:
        command = [*LAUNCHERS[launcher], script]
        subprocess.run(command, check=True, cwd=ROOT, timeout=120, capture_output=True)
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


def test_accelerate_launch_with_the_config_file(compressed_ad_flags, zygote, tmp_path):
    """The guide's first command for real: two processes, the curve of two that no launcher started, fp16 as fp32."""
    out, bare = tmp_path / "run", tmp_path / "bare"
    go(zygote, compressed_ad_flags(bare, "--train_batch_size", "6"), 2)
    command = ["accelerate", "launch", "--config_file", "configs/accelerate_config.yaml", "train.py"]
    words = compressed_ad_flags(out, "--train_batch_size", "6")
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "Distributed training: MULTI_CPU\nNumber of processes: 2\nMixed precision: no\nProcess 0 using" in done.stdout
    )
    assert "fp32: the fp16 of accelerate launch needs a GPU" in done.stdout
    assert curve(out) == curve(bare)


@pytest.mark.soak
def test_rates_follow_the_effective_batch_and_nothing_else(compressed_ad_flags, zygote, one, tmp_path):
    """--lr_scaling sqrt: doubling the batch multiplies the rate by the square root of 2, however it is made up."""
    rates = {}
    for name, ranks, more in (
        ("one", 1, ["--train_batch_size", "12"]),
        ("two", 2, ["--train_batch_size", "12"]),
        ("accumulated", 1, ["--train_batch_size", "12", "--gradient_accumulation_steps", "2"]),
        ("linear", 1, ["--batch_size", "24", "--lr_scaling", "linear"]),
    ):
        words = compressed_ad_flags(
            tmp_path / name, "--lr_scaling", "sqrt", "--max_steps", "2", "--eval_seeds", "1", *more
        )
        done = go(zygote, words, ranks)
        rates[name] = training(tmp_path / name)[1][2]["train/lr"]
        assert f"{rates[name]:g} (--lr_scaling" in done.stdout
    assert rates["one"] == pytest.approx(1e-2 * (12 / 128) ** 0.5)
    assert rates["two"] == rates["accumulated"] == pytest.approx(2**0.5 * rates["one"])
    assert rates["linear"] == pytest.approx(1e-2 * 24 / 128)
    assert training(one)[1][2]["train/lr"] == pytest.approx(1e-2)


def test_gradient_is_that_of_all_actions_of_all_ranks(compressed_ad_flags, zygote, tmp_path):
    """Against one backward pass by hand over the whole global batch: the mean over its actions, not of ranks' means."""
    import train

    out = tmp_path / "run"
    go(zygote, compressed_ad_flags(out, "--train_batch_size", "4", "--max_steps", "1", "--grad_clip", "0"), 3)
    args = train.parse_args(compressed_ad_flags(out))
    data = train.read_data(args)
    model = train.build_model(args, torch.device("cpu"))
    sampler = TrainBatchSampler(len(data.segments), 12, 0, 1, seed=args.seed)
    batch = data.segments.__getitems__(next(iter(sampler)))
    losses, right = train.action_losses(model, batch)
    actions = (batch["action"] >= 0).sum()
    assert actions == batch["length"].sum()
    loss = losses.sum() / actions
    loss.backward()
    accuracy = right.sum() / actions
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    norm = torch.stack(norms).norm()
    line = lines(out)[0]
    assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["train/accuracy"] == pytest.approx(accuracy.item(), rel=1e-5)
    assert line["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


# --- killed and gone on with ------------------------------------------------------------------------------------------

KILLED = ["--train_batch_size", "6", "--save_every", "3", "--resume_from", "auto", "--train_timesteps", "40"]
KILLED += ["--eval_interval", "20"]


@pytest.fixture(scope="module")
def whole(compressed_ad_flags, zygote, tmp_path_factory) -> Path:
    """The unbroken run of two processes."""
    out = tmp_path_factory.mktemp("whole") / "run"
    go(zygote, compressed_ad_flags(out, *KILLED), 2)
    assert len(training(out)) == 40
    return out


def same_end(out: Path, whole: Path) -> None:
    assert curve(out) == curve(whole)
    a = load(out / "last.pt")
    b = load(whole / "last.pt")
    for name, value in a["net"].items():
        assert torch.equal(value, b["net"][name]), name

    # these are unknown after a kill right after best.pt was written, until it is written anew
    unknown = {"best": None, "best_sha256": None}
    assert a["state"] | unknown == b["state"] | unknown
    assert load(out / "best.pt")["step"] == load(whole / "best.pt")["step"]
    assert read_json(out / "eval_test.json") == read_json(whole / "eval_test.json")


def test_kill_and_resume(compressed_ad_flags, zygote, whole, tmp_path):
    """A worker killed, then SIGTERM to both: the rest is the unbroken run's, bit for bit."""
    out = tmp_path / "run"
    words = compressed_ad_flags(out, *KILLED)
    kill_then_stop(zygote, [TRAIN, *words], out, 6, 12)
    go(zygote, words, 2)
    same_end(out, whole)


@pytest.mark.soak
def test_ten_kills(compressed_ad_flags, zygote, whole, tmp_path):
    """Ten runs, each killed at a random moment and gone on with; half of them around the evaluation."""
    chance = random.Random(6)
    for k in range(10):
        out = tmp_path / str(k)
        step = chance.choice([18, 20]) if k % 2 else chance.randrange(36)
        who = chance.choice(["worker", "rank0", "all"])
        delay = chance.uniform(0, 0.4)
        interrupt([TRAIN, *compressed_ad_flags(out, *KILLED)], out, who, step, delay)
        print(f"kill {k}: {who}, {delay:.2f} s after step {step}: {sorted(p.name for p in out.glob('step*'))}")
        go(zygote, compressed_ad_flags(out, *KILLED), 2)
        same_end(out, whole)


def test_resume_at_another_world_size(compressed_ad_flags, zygote, one, tmp_path):
    """A single process's checkpoint goes on on 2 processes, on 3, and back on one."""
    out = tmp_path / "run"
    for ranks, until in ((1, 2), (2, 4), (3, 6), (1, 0)):
        words = ["--train_batch_size", 12 // ranks, "--max_steps", until, "--resume_from", "auto"]
        go(zygote, compressed_ad_flags(out, *words), ranks)
    assert off(training(out), training(one)) < 1e-5


@pytest.mark.soak
def test_resumed_after_a_stop_the_best_is_the_same(compressed_ad_flags, zygote, tmp_path):
    """--max_steps ends with an evaluation that the unbroken run has not: it chooses nothing, and leaves no line."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    words = ["--train_timesteps", "12", "--eval_interval", "2", "--seed", "2", "--eval_seeds", "1"]
    go(zygote, compressed_ad_flags(whole, *words))
    for until in (1, 3, 7, 0):
        done = go(zygote, compressed_ad_flags(out, *words, "--max_steps", until, "--resume_from", "auto"))
        assert "test, best.pt" in done.stdout
    trained = [row for row in curve(out) if "test/return_last" not in row[2]]
    assert trained == curve(whole)[:-1]
    assert curve(out)[-1] == curve(whole)[-1]
    evaluated = {line["step"]: line["val/loss"] for line in lines(whole) if "val/loss" in line}
    assert list(evaluated) == [2, 4, 6, 8, 10, 12]
    best = min(evaluated, key=evaluated.get)
    assert lines(whole)[-1]["best_step"] == best
    assert load(whole / "best.pt")["step"] == best


def test_unseen_goals_choose_nothing(compressed_ad_flags, one):
    """best.pt is chosen by the loss on training goals, the brief evaluations and the test are of the right goals."""
    import train as script

    train_goals, unseen = split_goals()
    watched = train_goals[:8]
    watched_optimum = optimal_return(watched).mean()
    unseen_optimum = optimal_return(unseen).mean()
    assert watched_optimum != unseen_optimum
    records = lines(one)
    for line in records:
        if "val/return_last" in line:
            assert line["val/return_optimal"] == pytest.approx(watched_optimum)
            assert line["unseen/return_optimal"] == pytest.approx(unseen_optimum)
            assert "test/return_last" not in line
    random_policy = random_return(unseen).mean()
    assert records[-1]["test/return_random"] == pytest.approx(random_policy)

    args = script.parse_args(compressed_ad_flags(one))
    model = script.build_model(args, torch.device("cpu"))
    model.load_state_dict(load(one / "best.pt")["net"])
    data = script.read_data(args)
    experiment = script.Experiment(model, data, "no", args)
    best_step = records[-1]["best_step"]
    best = next(line for line in records if "val/loss" in line and line["step"] == best_step)
    for split, goals in (("val", watched), ("unseen", unseen)):
        metrics, _ = script.action_accuracy(split, goals, experiment)
        expected = {name: best[name] for name in metrics}
        assert metrics == pytest.approx(expected, rel=1e-5)


def weight_decay(checkpoint: dict) -> float:
    """That of the optimizer."""
    return checkpoint["optimizer"]["param_groups"][0]["weight_decay"]


def test_what_a_run_goes_on_with(compressed_ad_flags, zygote, darkroom_data, tmp_path):
    """Model, schedule and data are the checkpoint's where no flag says otherwise; what differs is said."""
    out = tmp_path / "run"
    words = ["--weight_decay", "0.5", "--lr_scaling", "sqrt", "--train_batch_size", "12", "--eval_seeds", "1"]
    go(zygote, compressed_ad_flags(out, *words, "--max_steps", "2", latents=0))

    # AD's own batch is 512
    rate = training(out)[1][2]["train/lr"]
    assert rate == pytest.approx(1e-2 * (12 / 512) ** 0.5)
    few = ["--output_dir", str(out), "--resume_from", "auto", "--batch_size", "12", "--val_episodes", "2"]
    few += ["--eval_episodes", "3", "--eval_seeds", "1", "--log_every", "1"]
    go(zygote, [*few, "--max_steps", "3"])
    assert training(out)[2][2]["train/lr"] == pytest.approx(rate)  # the cosine's top
    checkpoint = load(out / "last.pt")
    assert checkpoint["settings"]["model"] == "ad"
    assert weight_decay(checkpoint) == 0.5
    done = go(zygote, [*few, "--weight_decay", "0.1"])
    assert "warning: begun with --weight_decay 0.5, going on with 0.1: another run from here on" in done.stdout
    checkpoint = load(out / "last.pt")
    assert checkpoint["step"] == 8
    assert weight_decay(checkpoint) == 0.1

    # the file's name is not what counts
    other = tmp_path / "renamed.h5"
    shutil.copy(next(darkroom_data.glob("datasets/*.hdf5")), other)
    assert "nothing left to train" in go(zygote, [*few, "--data", str(other)]).stdout


def test_epochs_are_counted_as_they_begin(compressed_ad_flags, zygote, tmp_path):
    """2190 samples in steps of 1095: two steps an epoch."""
    out = tmp_path / "run"
    words = ["--train_batch_size", "1095", "--train_timesteps", "3", "--log_every", "2", "--eval_interval", "2"]
    go(zygote, compressed_ad_flags(out, *words, "--eval_seeds", "1", "--num_warmup_steps", "0"))
    records = lines(out)
    assert [line["step"] for line in records] == [2, 2, 3, 3, 3]
    assert [line["epoch"] for line in records] == [1, 1, 2, 2, 2]
    assert ["train/loss" in line for line in records] == [True, False, True, False, False]
    assert read_json(out / "summary.json")["epochs"] == 2


def test_uneven_last_step_and_a_resume_at_the_epoch_s_end(compressed_ad_flags, zygote, tmp_path):
    """2190 samples in steps of 400: the sixth of an epoch has 190. Stopped there, and in it, the rest is the same."""
    words = ["--train_timesteps", "8", "--eval_interval", "0", "--eval_seeds", "1", "--save_every", "1"]
    go(zygote, compressed_ad_flags(tmp_path / "one", *words, "--train_batch_size", "400"))
    go(zygote, compressed_ad_flags(tmp_path / "two", *words, "--train_batch_size", "200"), 2)
    assert off(curve(tmp_path / "two"), curve(tmp_path / "one")) < 1e-5
    assert [row[1] for row in training(tmp_path / "one")] == [1] * 6 + [2] * 2
    out = tmp_path / "again"
    for until in (5, 6, 0):
        more = ["--train_batch_size", "200", "--max_steps", until, "--resume_from", "auto"]
        go(zygote, compressed_ad_flags(out, *words, *more), 2)
    assert training(out) == training(tmp_path / "two")


def test_nothing_to_compress_is_no_hang(compressed_ad_flags, zygote, tmp_path):
    """--max_compression_depth 0 on two ranks: DDP has its gradients."""
    words = ["--max_compression_depth", "0", "--train_batch_size", "6", "--max_steps", "2", "--eval_seeds", "1"]
    go(zygote, compressed_ad_flags(tmp_path / "run", *words), 2)
    assert len(training(tmp_path / "run")) == 2


@pytest.mark.soak
def test_full_disk(compressed_ad_flags, zygote, darkroom_data, tmp_path):
    """One line, and the checkpoint before is intact, on disks of several sizes; histories that do not fit, likewise."""
    for kilobytes in (300, 700, 1100):
        disk = tmp_path / f"{kilobytes}"
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", disk]).returncode:
            pytest.skip("mounting a tmpfs needs root")
        try:
            out = disk / "run"
            words = compressed_ad_flags(out, "--save_every", "1", "--keep_last", "99", "--eval_interval", "0")
            done = go(zygote, words, code=1)
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1
            assert re.search(r"not written \(No space left on device\), the checkpoint before is intact", errors[0])
            assert "Traceback" not in done.stderr
            # without a checkpoint the manifest has no line that sha256sum reads
            assert sorted(path.name for path in out.glob("step_*.pt")) == read_manifest(out).steps()
            if read_manifest(out).checkpoints:
                subprocess.run(["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=out, check=True)
            done = zygote(str(ROOT / "sample_data.py"), "compressed_ad", disk / "data", "--streams", "9")
            assert done.code == 1
            assert re.fullmatch(r"error: .*TD_alg-seed42.hdf5: not written \(.*\); make room\n", done.stderr)
            assert not list((disk / "data").rglob("*.*"))
        finally:
            subprocess.run(["umount", disk], check=True)


def test_a_disk_that_fills_at_any_byte_is_an_os_error(tmp_path, monkeypatch):
    """torch.save turns some of them into a RuntimeError of its own."""
    import errno

    import manifest_utils

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


def test_signal_while_agents_act(compressed_ad_flags, zygote, one, tmp_path):
    """SIGTERM in a long evaluation ends it at once; the run goes on with that evaluation, and ends as if unbroken."""
    out = tmp_path / "run"
    words = compressed_ad_flags(out, "--resume_from", "auto", "--val_episodes", "5000")
    done = zygote(TRAIN, *words, interrupt=at_step(out, 4, "all", signal.SIGTERM, delay=0.3))
    assert done.code == 143
    # the evaluation as a whole takes minutes
    assert done.seconds < 40
    assert "signal: saved at step 4" in done.stdout
    go(zygote, compressed_ad_flags(out, "--resume_from", "auto"))
    assert curve(out) == curve(one)


def test_a_net_that_diverges_is_stopped_together(compressed_ad_flags, zygote, tmp_path):
    words = compressed_ad_flags(tmp_path / "run", "--lr", "1e30", "--max_bad_steps", "2", "--grad_clip", "0")
    done = go(zygote, words, 2, code=1)
    assert "2 steps in a row had a non-finite loss or gradient" in done.stderr
    assert done.stderr.count("error:") == 1


def test_out_of_memory_names_the_flags_to_change(compressed_ad_flags, zygote, tmp_path):
    little = ROOT / "tests" / "little_memory.py"
    words = compressed_ad_flags(tmp_path / "run", "--test_batch_size", "6")
    done = zygote(str(little), "6", TRAIN, *words)
    assert done.code == 1
    assert "error: out of memory at --train_batch_size 12; try --train_batch_size 6 --gradient_acc" in done.stderr


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_is_exact_at_any_world_size(compressed_ad_flags, zygote, one, tmp_path):
    """Every return of every agent is the same, whoever computes it and beside whom."""
    found = []
    for ranks, batch in ((1, 256), (1, 3), (2, 5), (3, 256)):
        out = tmp_path / f"{ranks}x{batch}"
        words = compressed_ad_flags(out, "--eval_only", "--resume_from", one / "best.pt", "--test_batch_size", batch)
        done = go(zygote, [*words, "--eval_episodes", "12"], ranks)
        found.append(read_json(out / "eval_test.json"))
        figures = {path.name for path in (out / "figures").iterdir()}
        assert figures == {"returns.png", "trajectories.png", "accuracy.png"}
        assert "unseen goals" in done.stdout
    first, *others = found
    for other in others:
        assert other.pop("test/loss") == pytest.approx(first["test/loss"], rel=1e-6)
        assert other == {name: value for name, value in first.items() if name != "test/loss"}
    assert len(first["return_by_episode"]["mean"]) == 12
    _, unseen = split_goals()
    assert first["goals"] == [list(divmod(goal, 9)) for goal in unseen]


def test_eval_only_writes_where_it_belongs(compressed_ad_flags, zygote, tmp_path):
    """Beside the checkpoint, whatever model it is of; what is not best.pt does not replace the run's own test."""
    ad = tmp_path / "ad"
    go(zygote, compressed_ad_flags(ad, "--max_steps", "2", latents=0))
    before = (ad / "eval_test.json").read_text()
    few = ["--eval_episodes", "2", "--eval_seeds", "1"]
    go(zygote, ["--eval_only", "--resume_from", str(ad / "last.pt"), *few])
    assert (ad / "eval_test.json").read_text() == before
    found = read_json(ad / "eval_last.json")
    assert found["model"] == "ad"
    assert found["step"] == 2
    assert found["eval_episodes"] == 2
    assert (ad / "figures" / "last_returns.png").exists()
    go(zygote, ["--eval_only", "--resume_from", str(ad), *few])
    assert read_json(ad / "eval_test.json")["eval_episodes"] == 2

    # those of a run that is overwritten go
    diverging = ["--overwrite", "--lr", "1e30", "--max_bad_steps", "1", "--grad_clip", "0"]
    go(zygote, compressed_ad_flags(ad, *diverging, latents=0), code=1)
    assert not list(ad.glob("eval_*.json"))


def test_eval_only_repeats_the_test(compressed_ad_flags, zygote, one, tmp_path):
    summary = read_json(one / "summary.json")
    go(zygote, compressed_ad_flags(tmp_path / "run", "--eval_only", "--resume_from", one / "best.pt"), 2)
    found = read_json(tmp_path / "run" / "eval_test.json")
    names = [name for name in found if name.startswith("test/")]
    assert len(names) == 10
    for name in names:
        assert found[name] == pytest.approx(summary[name], rel=1e-5), name
    assert found["test/return_optimal"] == 17.25


def step_by_hand(cell: int, action: int) -> int:
    """The cell to which an action leads."""
    i, j = divmod(cell, 9)
    down, right = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))[action]
    i = min(8, max(0, i + down))
    j = min(8, max(0, j + right))
    return 9 * i + j


def logits_after(net, past: list[tuple], cell: int) -> torch.Tensor:
    """Logits in a cell after (cell, action, next cell, reward) of each step before, through the training path."""
    blocks, length = divmod(len(past), 20)
    cells = torch.zeros(1, 4, 20, 3, dtype=torch.uint8)
    rewards = torch.zeros(1, 4, 20)
    for step, (*transition, reward) in enumerate(past):
        block, place = divmod(step, 20)
        if block == blocks:
            # the context is last
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
    return net(batch)[0, length]


def test_returns_against_a_simulation_step_by_step(compressed_ad_flags, one, darkroom_data):
    """One agent after the other, through the training path, in an environment written out anew."""
    import train

    args = train.parse_args(compressed_ad_flags(one))
    net = train.build_model(args, torch.device("cpu"))
    net.load_state_dict(load(one / "best.pt")["net"])
    returns, paths = train.act_in_context(net, [38, 45], 2, 4, args.seed, 256)
    assert returns.shape == (2, 2, 4)
    net = net.double().eval()
    for g, goal in enumerate((38, 45)):
        for k in range(2):
            rng = np.random.default_rng([args.seed, 5, goal, k])
            past: list[tuple] = []
            for episode in range(4):
                noise = -np.log(-np.log(rng.random((20, 5))))
                cell = 40
                total = 0.0
                walked = [cell]
                for t in range(20):
                    with torch.no_grad():
                        logits = logits_after(net, past, cell).numpy()
                    action = int((logits + noise[t]).argmax())
                    next_cell = step_by_hand(cell, action)
                    reward = float(next_cell == goal)
                    past.append((cell, action, next_cell, reward))
                    total += reward
                    cell = next_cell
                    walked.append(cell)
                assert returns[g, k, episode] == total
                if k == 0 and episode in (0, 3):
                    assert paths[g, int(episode > 0)].tolist() == walked


def test_numbers_of_the_table():
    from tasks.compressed_ad import report

    rng = np.random.default_rng(1)
    returns = rng.normal(5, 1, (8, 10, 40))
    returns += rng.normal(0, 3, (8, 1, 1))
    metrics = report.return_metrics("test", returns, list(range(8)))
    assert metrics["test/return_first"] == pytest.approx(returns[:, :, 0].mean())
    by_goal = returns[:, :, 36:].mean((1, 2))
    assert metrics["test/return_last"] == pytest.approx(by_goal.mean())

    # the goals differ by far more than the agents
    wide = 1.96 * by_goal.std(ddof=1) / 8**0.5
    width = metrics["test/return_last_high"] - metrics["test/return_last_low"]
    assert width == pytest.approx(2 * wide, rel=0.25)
    assert report.interval(np.full((8, 3), 2.0)) == (2.0, 2.0, 2.0)


def test_action_accuracy_against_a_loop(compressed_ad_flags, one):
    """Accuracy and loss on unseen goals' histories, and by place, one segment at a time."""
    import train

    args = train.parse_args(compressed_ad_flags(one))
    net = train.build_model(args, torch.device("cpu"))
    net.load_state_dict(load(one / "best.pt")["net"])
    data = train.read_data(args)
    experiment = train.Experiment(net, data, "no", args)
    metrics, by_place = train.action_accuracy("test", data.unseen_goals, experiment)
    segments = SegmentDataset(data.histories, data.unseen_goals, 20, 3, 0)
    loss = 0.0
    right = 0
    number = 0
    places = np.zeros((4, 20, 2))
    for depth in range(4):
        # 8 goals, 3 streams
        for history in range(24):
            share = (history * 0.618034) % 1
            end = 20 * depth + 1 + int(share * (200 - 20 * depth))
            facts = [np.array([fact]) for fact in (history, depth, end)]
            batch = segments.batch(*facts)
            with torch.no_grad():
                logits = net(batch)[0].double()
            for p in range(int(batch["length"][0])):
                target = int(batch["cells"][0, 3, p, 1])
                loss -= float(logits[p].log_softmax(-1)[target])
                hit = int(logits[p].argmax()) == target
                right += hit
                number += 1
                places[depth, p] += hit, 1
    assert metrics["test/loss"] == pytest.approx(loss / number, rel=1e-5)
    assert metrics["test/accuracy"] == pytest.approx(right / number, rel=1e-6)
    with np.errstate(invalid="ignore"):
        expected = places[..., 0] / places[..., 1]
    assert np.allclose(by_place, expected, equal_nan=True)


def test_beside_a_baseline(compressed_ad_flags, zygote, tmp_path):
    ad = tmp_path / "ad"
    out = tmp_path / "run"
    go(zygote, compressed_ad_flags(ad, "--max_steps", "2", latents=0))
    done = go(zygote, compressed_ad_flags(out, "--max_steps", "2", "--ad_run", ad))
    assert re.search(r"test, best.pt: episode +return +low +high +AD +source +random +optimum", done.stdout)
    summary = read_json(out / "summary.json")
    assert summary["test/return_ad_last"] == read_json(ad / "summary.json")["test/return_last"]


# --- what is written --------------------------------------------------------------------------------------------------


def test_run_folder(one):
    names = {path.name for path in one.iterdir()}
    assert {"args.yaml", "metrics.jsonl", "summary.json", "last.pt", "best.pt", "manifest.sha256", "logs"} <= names
    figures = {path.name for path in (one / "figures").iterdir()}
    assert figures == {f"{name}.png" for name in ("inputs", "returns", "trajectories", "accuracy", "curves")}
    assert all((one / "figures" / name).stat().st_size > 5000 for name in figures)
    summary = read_json(one / "summary.json")
    wanted = {f"test/return_{part}" for part in ("first", "last", "random", "optimal")}
    wanted |= {"train/loss", "train/samples_per_s", "train/data_wait", "train/peak_memory_gb", "test/accuracy"}
    assert wanted | {"steps", "epochs", "world_size", "effective_batch_size", "precision", "seconds"} <= summary.keys()
    from safetensors.torch import load_file
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    weights = load_file(one / "model.safetensors")
    for name, value in load(one / "best.pt")["net"].items():
        assert torch.equal(weights[name], value), name
    logged = EventAccumulator(str(one / "logs")).Reload()
    steps = [event.step for event in logged.Scalars("train/samples_per_s")]
    assert steps == list(range(1, 9))
    assert "returns" in logged.Tags()["images"]


def test_defaults_are_those_of_the_config(compressed_ad_flags):
    import yaml

    import train

    config = yaml.safe_load((ROOT / "configs" / "compressed_ad_darkroom.yaml").read_text())
    facts = {"tf_n_embd": 128, "tf_n_layer": 4, "tf_n_head": 8, "n_latent": 40, "max_compression_depth": 3}
    facts |= {"n_transit": 240, "lr": 1e-4, "train_batch_size": 128, "test_batch_size": 256, "train_timesteps": 150000}
    facts |= {"num_warmup_steps": 5000, "grad_clip_norm": 1.0, "summary_interval": 100, "eval_interval": 1000}
    facts |= {"ckpt_interval": 1000, "mixed_precision": "auto"}
    assert facts.items() <= config.items()
    silent = vars(train.parse_args([]))
    told = vars(train.parse_args(["--config", "configs/compressed_ad_darkroom.yaml"]))
    for name in silent.keys() - {"config", "source"}:
        assert told[name] == silent[name], name
    names = {"grad_clip_norm": "grad_clip", "summary_interval": "log_every", "ckpt_interval": "save_every"}
    for name, value in config.items():
        assert silent[names.get(name, name)] == value, name
    baseline = train.parse_args(["--model", "ad"])
    assert baseline.tf_n_embd == 64
    assert baseline.lr == 3e-4
    assert baseline.train_batch_size == 512
    assert baseline.train_timesteps == 50000
    assert baseline.output_dir == "runs/ad"


@pytest.mark.soak
def test_config_keys_have_an_effect(zygote, darkroom_data, one, tmp_path):
    """Each of the facts' keys arrives, by its own name: in the net, in the data, in the run."""
    import train

    keys = {"data": str(darkroom_data), "tf_n_embd": 16, "tf_n_layer": 2, "tf_n_head": 2, "encoder_n_layer": 1}
    keys |= {"tf_dim_feedforward": 32, "n_transit": 20, "n_latent": 4, "train_batch_size": 12, "lr": 1e-2}
    keys |= {"train_timesteps": 8, "num_warmup_steps": 2, "summary_interval": 1, "eval_interval": 4, "ckpt_interval": 2}
    keys |= {"grad_clip_norm": 1.0, "val_episodes": 2, "eval_episodes": 2, "eval_seeds": 1, "max_compression_depth": 3}

    def config(name: str, changes: dict) -> list[str]:
        (tmp_path / f"{name}.yaml").write_text(json.dumps(keys | changes))
        return ["--config", str(tmp_path / f"{name}.yaml"), "--output_dir", str(tmp_path / name)]

    def first_loss(changes: dict) -> float:
        args = train.parse_args(config("inside", changes))
        data = train.read_data(args)
        model = train.build_model(args, torch.device("cpu"))
        sampler = TrainBatchSampler(len(data.segments), args.train_batch_size, 0, 1, seed=args.seed)
        batch = data.segments.__getitems__(next(iter(sampler)))
        with torch.no_grad():
            losses, _ = train.action_losses(model, batch)
        return float(losses.sum() / batch["length"].sum())

    assert first_loss({}) == pytest.approx(training(one)[0][2]["train/loss"], rel=1e-6)
    changes = {"tf_n_embd": 32, "tf_n_layer": 1, "tf_n_head": 4, "tf_dim_feedforward": 64, "encoder_n_layer": 2}
    changes |= {"n_latent": 5, "n_transit": 19, "max_compression_depth": 1, "train_batch_size": 11, "split_seed": 1}
    for name, value in (changes | {"seed": 1, "model": "ad"}).items():
        more = {"n_latent": 0} if name == "model" else {}
        changed = first_loss({name: value} | more)
        assert abs(changed - first_loss({})) > 1e-4, name

    def third_loss(name: str, **changes) -> float:
        go(zygote, [*config(name, changes | {"eval_interval": 0}), "--max_steps", "3"])
        return training(tmp_path / name)[2][2]["train/loss"]

    first = third_loss("same")
    assert first == training(one)[2][2]["train/loss"]
    saved = sorted(path.name for path in (tmp_path / "same").glob("step_*"))
    assert saved == ["step_00000002.pt", "step_00000003.pt"]
    changes = {"lr": 2e-2, "num_warmup_steps": 1, "grad_clip_norm": 0.1, "weight_decay": 1.0}
    for name, value in changes.items():
        assert third_loss(name, **{name: value}) != first, name
    often = {"eval_interval": 1, "summary_interval": 3, "mixed_precision": "bf16"}
    go(zygote, [*config("often", often), "--max_steps", "3"])
    assert read_json(tmp_path / "often" / "summary.json")["precision"] == "bf16"
    evaluated = [line["step"] for line in lines(tmp_path / "often") if "val/return_last" in line]
    assert evaluated == [1, 2, 3]
    assert [row[0] for row in training(tmp_path / "often")] == [3]


@pytest.mark.soak
def test_compiled(compressed_ad_flags, one, tmp_path):
    out = tmp_path / "run"
    words = compressed_ad_flags(out, "--compile")
    done = subprocess.run(["python", TRAIN, *words], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert off(training(out), training(one)) < 1e-4
