"""train.py: the same answer from any number of processes, from a run that was killed, and agents that are measured."""

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
from tasks.compressed_ad.data import SegmentDataset

TRAIN = str(ROOT / "train.py")
TRAINED = ("train/loss", "train/accuracy", "train/lr", "train/grad_norm", "train/skipped")
EVALUATED = ("val/return_first", "val/return_last", "test/return_first", "test/return_last", "test/return_last_low",
             "test/loss", "test/accuracy", "unseen/return_last", "unseen/loss", "val/loss", "best_step")  # fmt: skip


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[tuple]:
    """(step, epoch, numbers) of every line, in file order, without times and memory."""
    names = (*TRAINED, *EVALUATED)
    return [(line["step"], line["epoch"], {n: line[n] for n in names if n in line}) for line in lines(out)]


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
                most = max(most, abs(x[name] - y[name]) / abs(y[name]))
            elif name == "train/grad_norm":
                assert x[name] == pytest.approx(y[name], rel=1e-3)
            elif name.startswith("train/"):
                assert x[name] == pytest.approx(y[name], abs=2e-3)  # one action of some 200
    return most


def go(zygote, words: list[str], ranks: int = 1, code: int = 0, **environment):
    done = zygote(TRAIN, *words, ranks=ranks, **environment)
    assert done.code == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def one(in_context, zygote, tmp_path_factory) -> Path:
    """A whole run in one process, 12 segments a step."""
    out = tmp_path_factory.mktemp("one") / "run"
    done = go(zygote, in_context(out), figures=True)
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
def test_same_curve(in_context, zygote, one, tmp_path, ranks, more):
    """Loss of every step, learning rate and evaluations of N processes are those of one with N times the batch."""
    out = tmp_path / "run"
    done = go(zygote, in_context(out, *more), ranks)
    assert len(training(out)) == 8
    assert len(curve(one)) == 8 + 2 + 1
    assert off(curve(out), curve(one)) < 1e-5
    rates = [row[2]["train/lr"] for row in training(out)]
    assert rates[:3] == pytest.approx([5e-3, 1e-2, 1e-2])  # warm-up of 2, then cosine over 8, one step a step
    assert rates[5] == pytest.approx(5e-3)
    assert rates[-1] == pytest.approx(1e-2 * (1 + np.cos(np.pi * 5 / 6)) / 2)
    assert f"Number of processes: {ranks}" in done.stdout
    assert done.stdout.count("using device: cpu") == ranks


def test_plain_ad(in_context, zygote, tmp_path):
    a, b = tmp_path / "one", tmp_path / "two"
    go(zygote, in_context(a, latents=0))
    go(zygote, in_context(b, "--train_batch_size", "6", latents=0), 2)
    assert off(curve(b), curve(a)) < 1e-5
    assert not any("encoder" in name for name in torch.load(a / "last.pt", weights_only=True)["net"])


PROBE = """
import json, os, sys
sys.path.insert(0, {root!r})
import train
import distributed_utils as du
args = train.parse_args({words!r})
args.mixed_precision = "no"
with du.setup_distributed() as ranks:
    data = train.read_data(args)
    loader = du.create_distributed_dataloader(data.segments, args.train_batch_size, seed=args.seed, drop_last=False,
                                              collate_fn=train.as_it_is)
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
def test_ranks_get_different_samples_of_the_same_global_batch(in_context, zygote, tmp_path, launcher):
    """The original's ranks all trained on the same batches. (That accelerate's two do as these is shown below.)"""
    from distributed_utils import TrainBatchSampler

    script = tmp_path / "probe.py"
    words = in_context(tmp_path, "--train_batch_size", "6")
    script.write_text(PROBE.format(root=str(ROOT), words=words, out=str(tmp_path)))
    if launcher == "none":
        assert zygote(script, ranks=2).code == 0
    else:
        subprocess.run([*LAUNCHERS[launcher], script], check=True, cwd=ROOT, timeout=120, capture_output=True)
    alone = [sorted(ids) for _, ids in zip(range(20), TrainBatchSampler(2190, 12, 0, 1), strict=False)]
    first, second = (json.loads((tmp_path / f"2_{rank}.json").read_text()) for rank in (0, 1))
    assert len(first) == len(second) == len(alone) == 20
    for a, b, whole in zip(first, second, alone, strict=True):
        assert not set(a) & set(b)
        assert sorted(a + b) == whole
    assert len({sample for batch in first + second for sample in batch}) == 240  # none twice


def test_accelerate_launch_with_the_config_file(in_context, zygote, tmp_path):
    """The guide's first command for real: two processes, the curve of two that no launcher started, fp16 as fp32."""
    out, bare = tmp_path / "run", tmp_path / "bare"
    go(zygote, in_context(bare, "--train_batch_size", "6"), 2)
    command = ["accelerate", "launch", "--config_file", "configs/accelerate_config.yaml", "train.py"]
    words = in_context(out, "--train_batch_size", "6")
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "Distributed training: MULTI_CPU\nNumber of processes: 2\nMixed precision: no\nProcess 0 using" in done.stdout
    )
    assert "fp32: the fp16 of accelerate launch needs a GPU" in done.stdout
    assert curve(out) == curve(bare)


@pytest.mark.soak
def test_rates_follow_the_effective_batch_and_nothing_else(in_context, zygote, one, tmp_path):
    """--lr_scaling sqrt: doubling the batch multiplies the rate by the square root of 2, however it is made up."""
    rates = {}
    for name, ranks, more in (
        ("one", 1, ["--train_batch_size", "12"]),
        ("two", 2, ["--train_batch_size", "12"]),
        ("accumulated", 1, ["--train_batch_size", "12", "--gradient_accumulation_steps", "2"]),
        ("linear", 1, ["--batch_size", "24", "--lr_scaling", "linear"]),
    ):
        words = in_context(tmp_path / name, "--lr_scaling", "sqrt", "--max_steps", "2", "--eval_seeds", "1", *more)
        done = go(zygote, words, ranks)
        rates[name] = training(tmp_path / name)[1][2]["train/lr"]
        assert f"{rates[name]:g} (--lr_scaling" in done.stdout
    assert rates["one"] == pytest.approx(1e-2 * (12 / 128) ** 0.5)
    assert rates["two"] == rates["accumulated"] == pytest.approx(2**0.5 * rates["one"])
    assert rates["linear"] == pytest.approx(1e-2 * 24 / 128)
    assert training(one)[1][2]["train/lr"] == pytest.approx(1e-2)


def test_gradient_is_that_of_all_actions_of_all_ranks(in_context, zygote, tmp_path):
    """Against one backward pass by hand over the whole global batch: the mean over its actions, not of ranks' means."""
    import train

    out = tmp_path / "run"
    go(zygote, in_context(out, "--train_batch_size", "4", "--max_steps", "1", "--grad_clip", "0"), 3)
    args = train.parse_args(in_context(out))
    data, net = train.read_data(args), train.build_model(args, torch.device("cpu"))
    ids = TrainBatchSampler(len(data.segments), 12, 0, 1, seed=args.seed)
    batch = data.segments.__getitems__(next(iter(ids)))
    losses, right = train.action_losses(net, batch)
    actions = (batch["action"] >= 0).sum()
    assert actions == batch["length"].sum()
    (losses.sum() / actions).backward()
    norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
    line = lines(out)[0]
    assert line["train/loss"] == pytest.approx(float(losses.detach().sum() / actions), rel=1e-5)
    assert line["train/accuracy"] == pytest.approx(float(right.sum() / actions), rel=1e-5)
    assert line["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


# --- killed and gone on with ------------------------------------------------------------------------------------------

KILLED = ["--train_batch_size", "6", "--save_every", "3", "--resume_from", "auto", "--train_timesteps", "40"]
KILLED += ["--eval_interval", "20"]


@pytest.fixture(scope="module")
def whole(in_context, zygote, tmp_path_factory) -> Path:
    """The unbroken run of two processes."""
    out = tmp_path_factory.mktemp("whole") / "run"
    go(zygote, in_context(out, *KILLED), 2)
    assert len(training(out)) == 40
    return out


def same_end(out: Path, whole: Path) -> None:
    assert curve(out) == curve(whole)
    a, b = (torch.load(folder / "last.pt", weights_only=True) for folder in (out, whole))
    assert all(torch.equal(value, b["net"][name]) for name, value in a["net"].items())
    unknown = {
        "best": None,
        "best_sha256": None,
    }  # after a kill right after best.pt was written, until it is written anew
    assert a["state"] | unknown == b["state"] | unknown
    best = [torch.load(folder / "best.pt", weights_only=True) for folder in (out, whole)]
    assert best[0]["step"] == best[1]["step"]
    one, other = (json.loads((folder / "eval_test.json").read_text()) for folder in (out, whole))
    assert one == other


def test_kill_and_resume(in_context, zygote, whole, tmp_path):
    """A worker killed, then SIGTERM to both: the rest is the unbroken run's, bit for bit."""
    out = tmp_path / "run"
    words = in_context(out, *KILLED)
    kill_then_stop(zygote, [TRAIN, *words], out, 6, 12)
    go(zygote, words, 2)
    same_end(out, whole)


@pytest.mark.soak
def test_ten_kills(in_context, zygote, whole, tmp_path):
    """Ten runs, each killed at a random moment and gone on with; half of them around the evaluation."""
    chance = random.Random(6)
    for k in range(10):
        out = tmp_path / str(k)
        step = chance.choice([18, 20]) if k % 2 else chance.randrange(36)
        who = chance.choice(["worker", "rank0", "all"])
        delay = chance.uniform(0, 0.4)
        interrupt([TRAIN, *in_context(out, *KILLED)], out, who, step, delay)
        print(f"kill {k}: {who}, {delay:.2f} s after step {step}: {sorted(p.name for p in out.glob('step*'))}")
        go(zygote, in_context(out, *KILLED), 2)
        same_end(out, whole)


def test_resume_at_another_world_size(in_context, zygote, one, tmp_path):
    """A single process's checkpoint goes on on 2 processes, on 3, and back on one."""
    out = tmp_path / "run"
    for ranks, batch, until in ((1, 12, 2), (2, 6, 4), (3, 4, 6), (1, 12, 0)):
        go(zygote, in_context(out, "--train_batch_size", batch, "--max_steps", until, "--resume_from", "auto"), ranks)
    assert off(training(out), training(one)) < 1e-5


@pytest.mark.soak
def test_resumed_after_a_stop_the_best_is_the_same(in_context, zygote, tmp_path):
    """--max_steps ends with an evaluation that the unbroken run has not: it chooses nothing, and leaves no line."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    words = ["--train_timesteps", "12", "--eval_interval", "2", "--seed", "2", "--eval_seeds", "1"]
    go(zygote, in_context(whole, *words))
    for until in (1, 3, 7, 0):
        done = go(zygote, in_context(out, *words, "--max_steps", until, "--resume_from", "auto"))
        assert "test, best.pt" in done.stdout
    assert [row for row in curve(out) if "test/return_last" not in row[2]] == curve(whole)[:-1]
    assert curve(out)[-1] == curve(whole)[-1]
    evaluated = {row[0]: row[2]["val/loss"] for row in curve(whole) if "val/loss" in row[2]}
    assert list(evaluated) == [2, 4, 6, 8, 10, 12]
    best = min(evaluated, key=evaluated.get)
    assert curve(whole)[-1][2]["best_step"] == best
    assert torch.load(whole / "best.pt", weights_only=True)["step"] == best


def test_unseen_goals_choose_nothing(in_context, one):
    """best.pt is chosen by the loss on training goals, the brief evaluations and the test are of the right goals."""
    from tasks.compressed_ad import darkroom as dr

    train, unseen = dr.split_goals()
    for line in lines(one):
        if "val/return_last" in line:
            assert line["val/return_optimal"] == pytest.approx(dr.optimal_return(train[:8]).mean())
            assert line["unseen/return_optimal"] == pytest.approx(dr.optimal_return(unseen).mean())
            assert "test/return_last" not in line
    assert lines(one)[-1]["test/return_random"] == pytest.approx(dr.random_return(unseen).mean())
    assert dr.optimal_return(train[:8]).mean() != dr.optimal_return(unseen).mean()
    import train as script

    args = script.parse_args(in_context(one))
    model = script.build_model(args, torch.device("cpu"))
    model.load_state_dict(torch.load(one / "best.pt", weights_only=True)["net"])
    data = script.read_data(args)
    best = next(line for line in lines(one) if "val/loss" in line and line["step"] == lines(one)[-1]["best_step"])
    for split, goals in (("val", train[:8]), ("unseen", unseen)):
        metrics = script.action_accuracy(split, goals, script.Experiment(model, data, "no", args))[0]
        assert metrics == pytest.approx({name: best[name] for name in metrics}, rel=1e-5)


def test_what_a_run_goes_on_with(in_context, zygote, rooms, tmp_path):
    """Model, schedule and data are the checkpoint's where no flag says otherwise; what differs is said."""
    out = tmp_path / "run"
    words = ["--weight_decay", "0.5", "--lr_scaling", "sqrt", "--train_batch_size", "12", "--eval_seeds", "1"]
    go(zygote, in_context(out, *words, "--max_steps", "2", latents=0))
    rate = training(out)[1][2]["train/lr"]
    assert rate == pytest.approx(1e-2 * (12 / 512) ** 0.5)  # AD's own batch is 512
    few = ["--output_dir", str(out), "--resume_from", "auto", "--batch_size", "12", "--val_episodes", "2"]
    few += ["--eval_episodes", "3", "--eval_seeds", "1", "--log_every", "1"]
    go(zygote, [*few, "--max_steps", "3"])
    assert training(out)[2][2]["train/lr"] == pytest.approx(rate)  # the cosine's top
    contents = torch.load(out / "last.pt", weights_only=True)
    assert contents["settings"]["model"] == "ad"
    assert contents["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    done = go(zygote, [*few, "--weight_decay", "0.1"])
    assert "warning: begun with --weight_decay 0.5, going on with 0.1: another run from here on" in done.stdout
    contents = torch.load(out / "last.pt", weights_only=True)
    assert (contents["step"], contents["optimizer"]["param_groups"][0]["weight_decay"]) == (8, 0.1)
    # the file's name is not what counts
    other = tmp_path / "renamed.h5"
    shutil.copy(next(rooms.glob("datasets/*.hdf5")), other)
    assert "nothing left to train" in go(zygote, [*few, "--data", str(other)]).stdout


def test_epochs_are_counted_as_they_begin(in_context, zygote, tmp_path):
    """2190 samples in steps of 1095: two steps an epoch."""
    out = tmp_path / "run"
    words = ["--train_batch_size", "1095", "--train_timesteps", "3", "--log_every", "2", "--eval_interval", "2"]
    go(zygote, in_context(out, *words, "--eval_seeds", "1", "--num_warmup_steps", "0"))
    found = [(line["step"], line["epoch"], "train/loss" in line) for line in lines(out)]
    assert found == [(2, 1, True), (2, 1, False), (3, 2, True), (3, 2, False), (3, 2, False)]
    assert json.loads((out / "summary.json").read_text())["epochs"] == 2


def test_uneven_last_step_and_a_resume_at_the_epoch_s_end(in_context, zygote, tmp_path):
    """2190 samples in steps of 400: the sixth of an epoch has 190. Stopped there, and in it, the rest is the same."""
    words = ["--train_timesteps", "8", "--eval_interval", "0", "--eval_seeds", "1", "--save_every", "1"]
    for name, ranks, batch in (("one", 1, 400), ("two", 2, 200)):
        go(zygote, in_context(tmp_path / name, *words, "--train_batch_size", batch), ranks)
    assert off(curve(tmp_path / "two"), curve(tmp_path / "one")) < 1e-5
    assert [row[1] for row in training(tmp_path / "one")] == [1] * 6 + [2] * 2
    out = tmp_path / "again"
    for until in (5, 6, 0):
        more = ["--train_batch_size", "200", "--max_steps", until, "--resume_from", "auto"]
        go(zygote, in_context(out, *words, *more), 2)
    assert training(out) == training(tmp_path / "two")


def test_nothing_to_compress_is_no_hang(in_context, zygote, tmp_path):
    """--max_compression_depth 0 on two ranks: DDP has its gradients."""
    words = ["--max_compression_depth", "0", "--train_batch_size", "6", "--max_steps", "2", "--eval_seeds", "1"]
    go(zygote, in_context(tmp_path / "run", *words), 2)
    assert len(training(tmp_path / "run")) == 2


@pytest.mark.soak
def test_full_disk(in_context, zygote, rooms, tmp_path):
    """One line, and the checkpoint before is intact, on disks of several sizes; histories that do not fit, likewise."""
    for kilobytes in (300, 700, 1100):
        disk = tmp_path / f"{kilobytes}"
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", disk]).returncode:
            pytest.skip("mounting a tmpfs needs root")
        try:
            out = disk / "run"
            words = in_context(out, "--save_every", "1", "--keep_last", "99", "--eval_interval", "0")
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
    contents, room = {"a": torch.zeros(3000), "b": torch.zeros(100)}, 0

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


def test_signal_while_agents_act(in_context, zygote, one, tmp_path):
    """SIGTERM in a long evaluation ends it at once; the run goes on with that evaluation, and ends as if unbroken."""
    out = tmp_path / "run"
    words = in_context(out, "--resume_from", "auto", "--val_episodes", "5000")
    done = zygote(TRAIN, *words, interrupt=at_step(out, 4, "all", signal.SIGTERM, delay=0.3))
    assert done.code == 143
    # the evaluation as a whole takes minutes
    assert done.seconds < 40
    assert "signal: saved at step 4" in done.stdout
    go(zygote, in_context(out, "--resume_from", "auto"))
    assert curve(out) == curve(one)


def test_a_net_that_diverges_is_stopped_together(in_context, zygote, tmp_path):
    words = in_context(tmp_path / "run", "--lr", "1e30", "--max_bad_steps", "2", "--grad_clip", "0")
    done = go(zygote, words, 2, code=1)
    assert "2 steps in a row had a non-finite loss or gradient" in done.stderr
    assert done.stderr.count("error:") == 1


def test_out_of_memory_names_the_flags_to_change(in_context, zygote, tmp_path):
    little, out = str(ROOT / "tests" / "little_memory.py"), tmp_path / "run"
    words = in_context(out, "--test_batch_size", "6")
    done = zygote(little, "6", TRAIN, *words)
    assert done.code == 1
    assert "error: out of memory at --train_batch_size 12; try --train_batch_size 6 --gradient_acc" in done.stderr


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_is_exact_at_any_world_size(in_context, zygote, one, tmp_path):
    """Every return of every agent is the same, whoever computes it and beside whom."""
    found = []
    for ranks, batch in ((1, 256), (1, 3), (2, 5), (3, 256)):
        out = tmp_path / f"{ranks}x{batch}"
        words = in_context(out, "--eval_only", "--resume_from", one / "best.pt", "--test_batch_size", batch)
        done = go(zygote, [*words, "--eval_episodes", "12"], ranks)
        found.append(json.loads((out / "eval_test.json").read_text()))
        assert {path.name for path in (out / "figures").iterdir()} == {
            "returns.png",
            "trajectories.png",
            "accuracy.png",
        }
        assert "unseen goals" in done.stdout
    for other in found[1:]:
        for name, value in found[0].items():
            assert other[name] == (pytest.approx(value, rel=1e-6) if name == "test/loss" else value), name
    assert len(found[0]["return_by_episode"]["mean"]) == 12
    assert found[0]["goals"] == [[4, 2], [5, 6], [6, 8], [7, 2], [3, 6], [0, 5], [5, 8], [5, 4]]


def test_eval_only_writes_where_it_belongs(in_context, zygote, tmp_path):
    """Beside the checkpoint, whatever model it is of; what is not best.pt does not replace the run's own test."""
    ad = tmp_path / "ad"
    go(zygote, in_context(ad, "--max_steps", "2", latents=0))
    before = (ad / "eval_test.json").read_text()
    few = ["--eval_episodes", "2", "--eval_seeds", "1"]
    go(zygote, ["--eval_only", "--resume_from", str(ad / "last.pt"), *few])
    assert (ad / "eval_test.json").read_text() == before
    found = json.loads((ad / "eval_last.json").read_text())
    assert (found["model"], found["step"], found["eval_episodes"]) == ("ad", 2, 2)
    assert (ad / "figures" / "last_returns.png").exists()
    go(zygote, ["--eval_only", "--resume_from", str(ad), *few])
    assert json.loads((ad / "eval_test.json").read_text())["eval_episodes"] == 2
    go(
        zygote,
        in_context(ad, "--overwrite", "--lr", "1e30", "--max_bad_steps", "1", "--grad_clip", "0", latents=0),
        code=1,
    )
    assert not list(ad.glob("eval_*.json"))  # of the run that was overwritten


def test_eval_only_repeats_the_test(in_context, zygote, one, tmp_path):
    summary = json.loads((one / "summary.json").read_text())
    go(zygote, in_context(tmp_path / "run", "--eval_only", "--resume_from", one / "best.pt"), 2)
    found = json.loads((tmp_path / "run" / "eval_test.json").read_text())
    names = [name for name in found if name.startswith("test/")]
    assert len(names) == 10
    for name in names:
        assert found[name] == pytest.approx(summary[name], rel=1e-5), name
    assert found["test/return_optimal"] == 17.25


def test_returns_against_a_simulation_step_by_step(in_context, one, rooms):
    """One agent after the other, through the training path, in an environment written out anew."""
    import train

    args = train.parse_args(in_context(one))
    contents = torch.load(one / "best.pt", weights_only=True)
    net = train.build_model(args, torch.device("cpu"))
    net.load_state_dict(contents["net"])
    returns, paths = train.act_in_context(net, [38, 45], 2, 4, args.seed, 256)
    assert returns.shape == (2, 2, 4)
    net = net.double().eval()
    for g, goal in enumerate((38, 45)):
        for k in range(2):
            rng = np.random.default_rng([args.seed, 5, goal, k])
            past: list[tuple] = []
            for episode in range(4):
                noise = -np.log(-np.log(rng.random((20, 5))))
                i, j, total, walked = 4, 4, 0.0, [40]
                for t in range(20):
                    blocks, length = divmod(len(past), 20)
                    batch = {"cells": torch.zeros(1, 4, 20, 3, dtype=torch.uint8), "rewards": torch.zeros(1, 4, 20)}
                    for place, (before, action, after, reward) in enumerate(past):
                        at = place // 20 if place // 20 < blocks else 3
                        batch["cells"][0, at, place % 20] = torch.tensor([before, action, after])
                        batch["rewards"][0, at, place % 20] = reward
                    batch["cells"][0, 3, length, 0] = 9 * i + j
                    batch |= {"depth": torch.tensor([blocks]), "length": torch.tensor([length])}
                    with torch.no_grad():
                        logits = net(batch | {"compressed": [int(blocks > b) for b in range(3)]})[0, length]
                    action = int((logits.numpy() + noise[t]).argmax())
                    di, dj = [(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)][action]
                    after = (min(8, max(0, i + di)), min(8, max(0, j + dj)))
                    reward = float(after == divmod(goal, 9))
                    past.append((9 * i + j, action, 9 * after[0] + after[1], reward))
                    (i, j), total = after, total + reward
                    walked.append(9 * i + j)
                assert returns[g, k, episode] == total
                if k == 0 and episode in (0, 3):
                    assert paths[g, int(episode > 0)].tolist() == walked


def test_numbers_of_the_table():
    from tasks.compressed_ad import report as report

    rng = np.random.default_rng(1)
    returns = rng.normal(5, 1, (8, 10, 40)) + rng.normal(0, 3, (8, 1, 1))
    metrics = report.return_metrics("test", returns, list(range(8)))
    assert metrics["test/return_first"] == pytest.approx(returns[:, :, 0].mean())
    assert metrics["test/return_last"] == pytest.approx(returns[:, :, 36:].mean())
    last = returns[:, :, 36:].mean((1, 2))
    wide = 1.96 * last.std(ddof=1) / 8**0.5  # the goals differ by far more than the agents
    assert metrics["test/return_last_high"] - metrics["test/return_last_low"] == pytest.approx(2 * wide, rel=0.25)
    assert report.interval(np.full((8, 3), 2.0)) == (2.0, 2.0, 2.0)


def test_action_accuracy_against_a_loop(in_context, one):
    """Accuracy and loss on unseen goals' histories, and by place, one segment at a time."""
    import train

    args = train.parse_args(in_context(one))
    net = train.build_model(args, torch.device("cpu"))
    net.load_state_dict(torch.load(one / "best.pt", weights_only=True)["net"])
    data = train.read_data(args)
    metrics, by_place = train.action_accuracy("test", data.unseen_goals, train.Experiment(net, data, "no", args))
    segments = SegmentDataset(data.histories, data.unseen_goals, 20, 3, 0)
    loss, right, number, places = 0.0, 0, 0, np.zeros((4, 20, 2))
    for depth in range(4):
        for history in range(24):  # 8 goals, 3 streams
            k = history
            end = 20 * depth + 1 + int((k * 0.618034) % 1 * (200 - 20 * depth))
            batch = segments.batch(np.array([history]), np.array([depth]), np.array([end]))
            with torch.no_grad():
                logits = net(batch)[0].double()
            for p in range(int(batch["length"][0])):
                target = int(batch["cells"][0, 3, p, 1])
                loss -= float(logits[p].log_softmax(-1)[target])
                hit = int(logits[p].argmax()) == target
                right, number = right + hit, number + 1
                places[depth, p] += hit, 1
    assert metrics["test/loss"] == pytest.approx(loss / number, rel=1e-5)
    assert metrics["test/accuracy"] == pytest.approx(right / number, rel=1e-6)
    with np.errstate(invalid="ignore"):
        assert np.allclose(by_place, places[..., 0] / places[..., 1], equal_nan=True)


def test_beside_a_baseline(in_context, zygote, tmp_path):
    ad, out = tmp_path / "ad", tmp_path / "run"
    go(zygote, in_context(ad, "--max_steps", "2", latents=0))
    done = go(zygote, in_context(out, "--max_steps", "2", "--ad_run", ad))
    assert re.search(r"test, best.pt: episode +return +low +high +AD +source +random +optimum", done.stdout)
    summary, other = (json.loads((folder / "summary.json").read_text()) for folder in (out, ad))
    assert summary["test/return_ad_last"] == other["test/return_last"]


# --- what is written --------------------------------------------------------------------------------------------------


def test_run_folder(one):
    names = {path.name for path in one.iterdir()}
    assert {"args.yaml", "metrics.jsonl", "summary.json", "last.pt", "best.pt", "manifest.sha256", "logs"} <= names
    figures = {path.name for path in (one / "figures").iterdir()}
    assert figures == {f"{name}.png" for name in ("inputs", "returns", "trajectories", "accuracy", "curves")}
    assert all((one / "figures" / name).stat().st_size > 5000 for name in figures)
    summary = json.loads((one / "summary.json").read_text())
    wanted = {f"test/return_{part}" for part in ("first", "last", "random", "optimal")}
    wanted |= {"train/loss", "train/samples_per_s", "train/data_wait", "train/peak_memory_gb", "test/accuracy"}
    assert wanted | {"steps", "epochs", "world_size", "effective_batch_size", "precision", "seconds"} <= summary.keys()
    from safetensors.torch import load_file
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    weights, best = load_file(one / "model.safetensors"), torch.load(one / "best.pt", weights_only=True)
    assert all(torch.equal(weights[name], value) for name, value in best["net"].items())
    logged = EventAccumulator(str(one / "logs")).Reload()
    assert [event.step for event in logged.Scalars("train/samples_per_s")] == list(range(1, 9))
    assert "returns" in logged.Tags()["images"]


def test_defaults_are_those_of_the_config(in_context):
    import yaml

    import train

    config = yaml.safe_load((ROOT / "configs" / "compressed_ad_darkroom.yaml").read_text())
    facts = {"tf_n_embd": 128, "tf_n_layer": 4, "tf_n_head": 8, "n_latent": 40, "max_compression_depth": 3}
    facts |= {"n_transit": 240, "lr": 1e-4, "train_batch_size": 128, "test_batch_size": 256, "train_timesteps": 150000}
    facts |= {"num_warmup_steps": 5000, "grad_clip_norm": 1.0, "summary_interval": 100, "eval_interval": 1000}
    facts |= {"ckpt_interval": 1000, "mixed_precision": "auto"}
    assert facts.items() <= config.items()
    silent, told = (
        vars(train.parse_args([])),
        vars(train.parse_args(["--config", "configs/compressed_ad_darkroom.yaml"])),
    )
    assert {k: v for k, v in silent.items() if k not in ("config", "source")} == {
        k: v for k, v in told.items() if k not in ("config", "source")
    }
    names = {"grad_clip_norm": "grad_clip", "summary_interval": "log_every", "ckpt_interval": "save_every"}
    for name, value in config.items():
        assert silent[names.get(name, name)] == value, name
    baseline = train.parse_args(["--model", "ad"])
    assert (baseline.tf_n_embd, baseline.lr, baseline.train_batch_size, baseline.train_timesteps) == (
        64,
        3e-4,
        512,
        50000,
    )
    assert baseline.output_dir == "runs/ad"


@pytest.mark.soak
def test_config_keys_have_an_effect(zygote, rooms, one, tmp_path):
    """Each of the facts' keys arrives, by its own name: in the net, in the data, in the run."""
    import train

    keys = {"data": str(rooms), "tf_n_embd": 16, "tf_n_layer": 2, "tf_n_head": 2, "encoder_n_layer": 1}
    keys |= {"tf_dim_feedforward": 32, "n_transit": 20, "n_latent": 4, "train_batch_size": 12, "lr": 1e-2}
    keys |= {"train_timesteps": 8, "num_warmup_steps": 2, "summary_interval": 1, "eval_interval": 4, "ckpt_interval": 2}
    keys |= {"grad_clip_norm": 1.0, "val_episodes": 2, "eval_episodes": 2, "eval_seeds": 1, "max_compression_depth": 3}

    def config(name: str, changes: dict) -> list[str]:
        (tmp_path / f"{name}.yaml").write_text(json.dumps(keys | changes))
        return ["--config", str(tmp_path / f"{name}.yaml"), "--output_dir", str(tmp_path / name)]

    def first_loss(changes: dict) -> float:
        args = train.parse_args(config("inside", changes))
        data, net = train.read_data(args), train.build_model(args, torch.device("cpu"))
        ids = TrainBatchSampler(len(data.segments), args.train_batch_size, 0, 1, seed=args.seed)
        batch = data.segments.__getitems__(next(iter(ids)))
        with torch.no_grad():
            return float(train.action_losses(net, batch)[0].sum() / batch["length"].sum())

    assert first_loss({}) == pytest.approx(training(one)[0][2]["train/loss"], rel=1e-6)
    changes = {"tf_n_embd": 32, "tf_n_layer": 1, "tf_n_head": 4, "tf_dim_feedforward": 64, "encoder_n_layer": 2}
    changes |= {"n_latent": 5, "n_transit": 19, "max_compression_depth": 1, "train_batch_size": 11, "split_seed": 1}
    for name, value in (changes | {"seed": 1, "model": "ad"}).items():
        more = {"n_latent": 0} if name == "model" else {}
        assert abs(first_loss({name: value} | more) - first_loss({})) > 1e-4, name

    def third_loss(name: str, **changes) -> float:
        go(zygote, [*config(name, changes | {"eval_interval": 0}), "--max_steps", "3"])
        return training(tmp_path / name)[2][2]["train/loss"]

    first = third_loss("same")
    assert first == training(one)[2][2]["train/loss"]
    assert {path.name for path in (tmp_path / "same").glob("step_*")} == {"step_00000002.pt", "step_00000003.pt"}
    changes = {"lr": 2e-2, "num_warmup_steps": 1, "grad_clip_norm": 0.1, "weight_decay": 1.0}
    for name, value in changes.items():
        assert third_loss(name, **{name: value}) != first, name
    often = {"eval_interval": 1, "summary_interval": 3, "mixed_precision": "bf16"}
    go(zygote, [*config("often", often), "--max_steps", "3"])
    assert json.loads((tmp_path / "often" / "summary.json").read_text())["precision"] == "bf16"
    assert [row[0] for row in curve(tmp_path / "often") if "val/return_last" in row[2]] == [1, 2, 3]
    assert [row[0] for row in training(tmp_path / "often")] == [3]


@pytest.mark.soak
def test_compiled(in_context, one, tmp_path):
    out = tmp_path / "run"
    words = in_context(out, "--compile")
    done = subprocess.run(["python", TRAIN, *words], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert off(training(out), training(one)) < 1e-4
