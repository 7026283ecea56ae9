"""train_accelerate.py: the same answer from any number of processes, from a run that was killed, and a cascade that
is one."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from background import interrupt
from conftest import ROOT, SMALL_STAGES, kill_then_stop, torchrun
from scipy.ndimage import uniform_filter

CASCADE = str(ROOT / "train_accelerate.py")


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[tuple]:
    """(step, stage, epoch, numbers) of every line, in file order, without times and memory."""
    names = ("train/loss", "train/diffusion_loss", "train/physics_loss", "train/grad_norm", "train/lr", "train/skipped")
    names += (
        "val/loss",
        "val/physics_loss",
        "val/psnr",
        "val/ssim",
        "val/psnr_mean_volume",
        "test/psnr",
        "test/mae_hu",
    )
    return [
        (line["step"], line["stage"], line["epoch"], {name: line[name] for name in names if name in line})
        for line in lines(out)
    ]


def second_loss(out: Path) -> float:
    """Of step 2: in the first the net's output is 0 whatever the settings."""
    return [line["train/loss"] for line in lines(out) if "train/loss" in line][1]


def off(a: list[tuple], b: list[tuple]) -> float:
    """Largest relative difference of all losses and metrics; steps, stages, epochs and learning rates are equal."""
    assert [row[:3] for row in a] == [row[:3] for row in b]
    most = 0.0
    for (*_, x), (*_, y) in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        assert x.get("train/lr") == y.get("train/lr")
        most = max([most, *(abs(x[n] - y[n]) / max(1.0, abs(y[n])) for n in x if n != "train/grad_norm")])
        if "train/grad_norm" in x:
            assert x["train/grad_norm"] == pytest.approx(y["train/grad_norm"], rel=1e-3)
    return most


def go(zygote, words: list[str], ranks: int = 1, code: int = 0, figures: bool = False):
    done = zygote(CASCADE, *words, ranks=ranks, figures=figures)
    assert done.code == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def one(cascade_flags, zygote, tmp_path_factory) -> Path:
    """A whole run in one process, 6 patients a step: 2 steps an epoch, the second with the 5 that are left."""
    out = tmp_path_factory.mktemp("one") / "run"
    done = go(zygote, cascade_flags(out, "--batch_size", "6", "--check_conditioning"), figures=True)
    assert "stage1  " in done.stdout  # the table of stages
    assert re.search(r"cascade +\d", done.stdout)
    return out


# --- the same answer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ["--batch_size", "3"]),
        (3, ["--batch_size", "2", "--cache_in_memory"]),
        (1, ["--batch_size", "3", "--gradient_accumulation_steps", "2", "--num_workers", "2"]),
        (2, ["--batch_size", "1", "--gradient_accumulation_steps", "3", "--gradient_checkpointing"]),
    ],
    ids=["2x3", "3x2-in-memory", "1x3x2-workers", "2x1x3-checkpointing"],
)
def test_same_curve_and_metrics(cascade_flags, zygote, one, tmp_path, ranks, more):
    """An uneven last step, 1 validation and 1 test patient, of which one rank at most has any."""
    out = tmp_path / "run"
    go(zygote, cascade_flags(out, *more, "--check_conditioning"), ranks)
    assert len(curve(one)) == 8 + 4 + 2 + 1
    assert off(curve(out), curve(one)) < 1e-5
    a, b = (json.loads((folder / "summary.json").read_text()) for folder in (out, one))
    for name in ("psnr_other_patient", "psnr_previous_zeroed", "psnr_backprojection", "projection_error_lat"):
        assert a[f"test/{name}"] == pytest.approx(b[f"test/{name}"], rel=1e-5)
    assert (a["world_size"], a["effective_batch_size"], a["stages"]) == (ranks, 6, 2)


@pytest.mark.soak
def test_torchrun_gives_the_very_same_curve(cascade_flags, zygote, tmp_path):
    """(In the quick suite the runs that are killed are torchrun's.)"""
    words = ["--batch_size", "3", "--num_epochs_per_stage", "1"]
    go(zygote, cascade_flags(tmp_path / "bare", *words), 2)
    command = [*torchrun(2), CASCADE, *cascade_flags(tmp_path / "run", *words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torchrun, world size 2" in done.stdout
    assert curve(tmp_path / "run") == curve(tmp_path / "bare")


@pytest.mark.soak
def test_accelerate_launch_gives_the_very_same_curve(cascade_flags, zygote, tmp_path):
    """By train_4gpu.sh, for real: the curve of two processes that no launcher started."""
    out, bare = tmp_path / "run", tmp_path / "bare"
    go(zygote, cascade_flags(bare, "--batch_size", "3", "--num_epochs_per_stage", "1"), 2)
    words = cascade_flags(out, "--batch_size", "3", "--num_epochs_per_stage", "1")
    command = ["bash", "train_4gpu.sh", "--method", "accelerate", "--cpu", "--num_gpus", "2", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 CPU processes by accelerate: accelerate launch" in done.stdout
    assert "accelerate, world size 2" in done.stdout
    assert curve(out) == curve(bare)


def test_precision_of_accelerate_launch(cascade_flags, zygote, tmp_path):
    """ACCELERATE_MIXED_PRECISION is what `accelerate launch --mixed_precision` sets; a flag of the script wins."""
    found = {}
    for wanted, flag in (("fp16", []), ("bf16", []), ("bf16", ["--mixed_precision", "no"])):
        out = tmp_path / f"{wanted}{len(flag)}"
        words = cascade_flags(out, "--max_steps", "2", "--stage", "1", *flag)
        done = zygote(CASCADE, *words, ACCELERATE_MIXED_PRECISION=wanted)
        assert done.code == 0, done.stderr[-2000:]
        found[wanted, len(flag)] = done.stdout, second_loss(out)
    assert "precision      no (fp32: the fp16 of accelerate launch needs a GPU)" in found["fp16", 0][0]
    assert "precision      bf16 (accelerate launch)" in found["bf16", 0][0]
    assert "precision      no (command line)" in found["bf16", 2][0]
    exact, half = found["fp16", 0][1], found["bf16", 0][1]
    assert found["bf16", 2][1] == exact
    assert 1e-6 < abs(half / exact - 1) < 0.02


def test_gradients_are_those_of_one_process(cascade_flags, zygote, tmp_path):
    """Five steps, as the first reach few layers (outputs and gates begin at zero): AdamW's averaged gradients agree."""
    moments = []
    for ranks, batch in ((1, 4), (2, 2)):
        out = tmp_path / str(ranks)
        words = cascade_flags(out, "--batch_size", batch, "--max_steps", "5", "--stage", "1", "--learning_rate", "1e-4")
        go(zygote, words, ranks)
        moments.append(torch.load(out / "last.pt", weights_only=True)["optimizer"]["state"])
    moved = 0
    for key, value in moments[0].items():
        scale = float(value["exp_avg"].abs().max())
        moved += scale > 1e-12
        assert float((moments[1][key]["exp_avg"] - value["exp_avg"]).abs().max()) < 1e-3 * scale + 1e-9
    assert moved > 0.9 * len(moments[0])


def test_averaged_weights(cascade_flags, zygote, tmp_path):
    """`ema` of each checkpoint is the running mean of the nets of all steps, with the decay's warm-up."""
    out = tmp_path / "run"
    words = cascade_flags(
        out, "--stage", "1", "--save_every", "1", "--keep_last", "20", "--ema_decay", "0.3", "--max_steps", "5"
    )
    go(zygote, words)
    steps = [torch.load(out / f"step_{k:08d}.pt", weights_only=True) for k in range(1, 6)]
    expected = None
    for n, step in enumerate(steps, start=1):
        net = step["net"]
        decay = min(0.3, (1 + n) / (10 + n))
        if expected is not None:
            expected = {name: decay * value + (1 - decay) * net[name] for name, value in expected.items()}
            for name, value in expected.items():
                assert torch.allclose(step["ema"][name], value, atol=1e-6), (n, name)
        else:
            expected = step["ema"]
    assert any(not torch.equal(value, steps[-1]["net"][name]) for name, value in steps[-1]["ema"].items())


# --- killed, stopped, gone on -----------------------------------------------------------------------------------------

KILLED = ["--batch_size", "2", "--save_every", "2", "--resume_from", "auto", "--num_epochs_per_stage", "2"]
KILLED += ["--warmup_steps", "3"]
STAGE_STEPS = 6  # 11 patients, 4 a step


@pytest.fixture(scope="module")
def whole(cascade_flags, zygote, tmp_path_factory) -> Path:
    """The unbroken run of two processes."""
    out = tmp_path_factory.mktemp("whole") / "run"
    go(zygote, cascade_flags(out, *KILLED), 2)
    assert [line["step"] for line in lines(out) if "test/psnr" in line] == [2 * STAGE_STEPS]
    return out


def same_end(out: Path, whole: Path) -> None:
    assert curve(out) == curve(whole)
    a, b = (torch.load(folder / "last.pt", weights_only=True) for folder in (out, whole))
    for part in ("net", "ema"):
        assert all(torch.equal(value, b[part][name]) for name, value in a[part].items())
    unknown = {
        "best": None,
        "best_sha256": None,
    }  # after a kill right after best.pt was written, until it is written anew
    assert a["state"] | unknown == b["state"] | unknown
    best = [torch.load(folder / "best.pt", weights_only=True) for folder in (out, whole)]
    assert best[0]["step"] == best[1]["step"]
    assert all(torch.equal(value, b["earlier"][0][name]) for name, value in a["earlier"][0].items())


def test_kill_and_resume_across_the_stages(cascade_flags, zygote, whole, tmp_path):
    """A worker killed in stage 1, SIGTERM to both in stage 2: the rest is the unbroken run's, bit for bit."""
    out = tmp_path / "run"
    words = cascade_flags(out, *KILLED)
    kill_then_stop(zygote, [CASCADE, *words], out, 4, STAGE_STEPS + 3)
    go(zygote, words, 2)
    same_end(out, whole)


@pytest.mark.soak
def test_ten_kills(cascade_flags, zygote, whole, tmp_path):
    """Ten runs, each killed at a random moment and gone on with; half of them around the stage boundary."""
    chance = random.Random(5)
    for k in range(10):
        out = tmp_path / str(k)
        step = chance.choice([STAGE_STEPS - 1, STAGE_STEPS]) if k % 2 else chance.randrange(2 * STAGE_STEPS - 1)
        who = chance.choice(["worker", "rank0", "all"])
        delay = chance.uniform(0, 0.8)
        interrupt([CASCADE, *cascade_flags(out, *KILLED)], out, who, step, delay)
        print(f"kill {k}: {who}, {delay:.2f} s after step {step}: {sorted(p.name for p in out.glob('step*'))}")
        go(zygote, cascade_flags(out, *KILLED), 2)
        same_end(out, whole)


def test_resume_at_another_world_size_and_from_any_best(cascade_flags, zygote, one, tmp_path):
    """Begun on 2 processes, gone on with 3, ended by 1; then again from stage1_best.pt in another folder."""
    out = tmp_path / "run"
    for ranks, batch, until in ((2, 3, 2), (3, 2, 5), (1, 6, 0)):
        words = cascade_flags(
            out, "--batch_size", batch, "--max_steps", until, "--resume_from", "auto", "--check_conditioning"
        )
        go(zygote, words, ranks)
    reference = [row for row in curve(one) if "train/loss" in row[3]]
    assert off([row for row in curve(out) if "train/loss" in row[3]], reference) < 1e-5
    best = torch.load(out / "stage1_best.pt", weights_only=True)
    assert best["state"]["stage"] == 0
    other = tmp_path / "other"
    go(zygote, cascade_flags(other, "--batch_size", "6", "--resume_from", out / "stage1_best.pt"))
    found = [row for row in curve(other) if "train/loss" in row[3]]
    assert off(found, [row for row in reference if row[0] > best["step"]]) < 1e-5
    assert (other / "stage2_best.pt").exists()


def test_stages_one_at_a_time(cascade_flags, zygote, one, tmp_path):
    """--stage 1, then --stage 2, is the whole; out of order is refused."""
    out = tmp_path / "run"
    flags = ["--batch_size", "6", "--check_conditioning"]
    done = zygote(CASCADE, *cascade_flags(out, *flags, "--stage", "2"))
    assert done.code == 2
    assert "error: --stage 2: the stages before it are not there" in done.stderr
    go(zygote, cascade_flags(out, *flags, "--stage", "1"))
    assert json.loads((out / "summary.json").read_text())["stages"] == 1
    go(zygote, cascade_flags(out, *flags, "--stage", "stage2", "--resume_from", "auto"))
    training = [row for row in curve(out) if "train/loss" in row[3]]
    assert training == [row for row in curve(one) if "train/loss" in row[3]]
    assert curve(out)[-1] == curve(one)[-1]
    done = zygote(CASCADE, *cascade_flags(out, *flags, "--stage", "1", "--resume_from", "auto"))
    assert (done.code, "the checkpoint is at stage 2" in done.stderr) == (2, True)
    alone = tmp_path / "alone"
    go(zygote, cascade_flags(alone, *flags, "--stage", "2", "--resume_from", out / "stage1_best.pt"))
    found = [(row[1:], row[3]["train/loss"]) for row in curve(alone) if "train/loss" in row[3]]
    assert found == [(row[1:], row[3]["train/loss"]) for row in training if row[1] == 2]
    unfinished = tmp_path / "unfinished"
    go(zygote, cascade_flags(unfinished, *flags, "--stage", "1", "--max_steps", "1"))
    done = zygote(CASCADE, *cascade_flags(unfinished, *flags, "--stage", "2", "--resume_from", "auto"))
    assert (done.code, "stage1 has done 1 of 4 steps" in done.stderr) == (2, True)


def test_going_on_with_fewer_epochs_cuts_no_later_stage(cascade_flags, zygote, tmp_path):
    """Stage 1 was begun with more epochs than are asked for now: it ends where it is, stage 2 is whole."""
    out = tmp_path / "run"
    go(zygote, cascade_flags(out, "--num_epochs_per_stage", "4", "--max_steps", "9"))
    go(zygote, cascade_flags(out, "--num_epochs_per_stage", "2", "--resume_from", "auto"))
    steps = [(line["stage"], line["step"]) for line in lines(out) if "train/loss" in line]
    assert steps == [(1, k) for k in range(1, 10)] + [(2, k) for k in range(10, 16)]


def test_what_the_checkpoint_knows(cascade_flags, cascade_data, zygote, one, tmp_path):
    """No test patient was trained on; the precision stays; --stage counts the checkpoint's own stages."""
    names = sorted(path.name for path in cascade_data.iterdir())
    files = [tmp_path / f"{k}.txt" for k in range(3)]
    for path, part in zip(files, (names[4:], names[:2], names[2:4]), strict=True):
        path.write_text("\n".join(part))
    done = zygote(
        CASCADE,
        *cascade_flags(tmp_path / "x", "--eval_only", "--resume_from", one / "last.pt", "--split_files", *files),
    )
    assert done.code == 2
    assert re.search(
        r"error: --dataset_path: .*last.pt was trained on patient_\d+ and \d more of the 2 test pat", done.stderr
    )
    run = tmp_path / "run"
    go(zygote, cascade_flags(run, "--batch_size", "6", "--mixed_precision", "bf16", "--max_steps", "2"))
    done = go(zygote, cascade_flags(run, "--batch_size", "6", "--resume_from", "auto", "--max_steps", "3"))
    assert "precision      bf16 (as the run was begun)" in done.stdout
    done = go(
        zygote,
        cascade_flags(run, "--batch_size", "6", "--resume_from", "auto", "--max_steps", "4", "--mixed_precision", "no"),
    )
    assert "warning: begun in bf16, going on in no" in done.stdout
    few = ["--dataset_path", cascade_data, "--checkpoint_dir", run, "--resume_from", "auto", "--stage", "3"]
    done = zygote(CASCADE, *map(str, few))
    assert (done.code, "error: --stage 3: there are 1 to 2 (stage1, stage2)" in done.stderr) == (2, True)


@pytest.mark.soak
def test_compiled(cascade_flags, one, tmp_path):
    """--compile on two processes: the same curve."""
    out = tmp_path / "run"
    words = cascade_flags(out, "--batch_size", "3", "--compile", "--check_conditioning")
    done = subprocess.run([*torchrun(2), CASCADE, *words], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert off(curve(out), curve(one)) < 1e-4


def test_plateau_halves_the_rate(cascade_flags, zygote, tmp_path):
    """As torch's ReduceLROnPlateau: half after 6 epochs without a lower loss; also across a resume."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    out = tmp_path / "run"
    flags = ["--batch_size", "11", "--num_epochs_per_stage", "16", "--stage", "1", "--learning_rate", "1e-7"]
    go(zygote, cascade_flags(out, *flags, "--max_steps", "9"))
    go(zygote, cascade_flags(out, *flags, "--resume_from", "auto"))
    rates = [line["train/lr"] for line in lines(out) if "train/lr" in line]
    losses = [line["val/loss"] for line in lines(out) if "val/loss" in line]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-7)
    scheduler, expected = ReduceLROnPlateau(optimizer, factor=0.5, patience=5), []
    for loss in losses:
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step(loss)
    assert rates == expected
    assert min(rates) < 1e-7


def test_a_net_that_diverges_is_stopped_together(cascade_flags, zygote, cascade_data, tmp_path):
    """Non-finite losses: the steps are skipped on all ranks, the weights stay, the run ends with code 1."""
    out = tmp_path / "run"
    words = cascade_flags(out, "--batch_size", "2", "--physics_weight", "1e38", "--max_bad_steps", "2", "--stage", "1")
    done = go(zygote, words, 2, code=1)
    assert "2 steps in a row had a non-finite loss or gradient" in done.stderr
    assert done.stderr.count("error:") == 1


def test_out_of_memory_names_what_to_change(cascade_flags, zygote, tmp_path):
    """Convolutions with memory for 6 pictures or volumes, at the measurement before the first step."""
    little = str(ROOT / "tests" / "little_memory.py")
    out = tmp_path / "run"
    done = zygote(little, "6", CASCADE, *cascade_flags(out, "--batch_size", "6"))
    assert done.code == 1
    assert (
        "error: out of memory in stage1 at batch_size 6 per GPU; try batch_size 3 and accumulation_steps 2"
        in done.stderr
    )
    assert not out.exists() or not any(out.glob("*.pt"))


# --- what it computes -------------------------------------------------------------------------------------------------


def test_metrics_against_numpy(cascade_flags, cascade_data, zygote, one, tmp_path):
    """PSNR, SSIM (scikit-image's definition), MAE and the projection error of what --sample writes, from the files."""
    from tasks.cascade.data import split_patients
    from tasks.cascade.files import find_patients, read_ct, read_xray
    from tasks.cascade.projector import normalise, resize

    out = tmp_path / "run"
    shutil.copytree(one, out)
    summary = json.loads((out / "summary.json").read_text())
    patients = find_patients(cascade_data, 2)
    split = split_patients(patients, 42)
    (test,) = split["test"]
    size = (16, 16, 16)
    grid = lambda i: resize(torch.from_numpy(read_ct(patients[i].ct)[0]).clamp(-1000, 3000), size).round()  # noqa: E731
    true = normalise(grid(test)).numpy().astype(np.float64)
    mean = np.mean([normalise(grid(i)).numpy().astype(np.float64) for i in split["train"]], 0)
    mse = np.square(mean - true).mean()
    assert summary["test/psnr_mean_volume"] == pytest.approx(10 * np.log10(4 / mse), abs=1e-4)
    assert summary["test/mae_hu_mean_volume"] == pytest.approx(np.abs(mean - true).mean() * 2000, abs=1e-2)

    def smooth(x):
        return uniform_filter(x, 7)[3:-3, 3:-3, 3:-3]

    mx, my = smooth(mean), smooth(true)
    vx, vy = smooth(mean**2) - mx**2, smooth(true**2) - my**2
    cov, c1, c2 = smooth(mean * true) - mx * my, (0.01 * 2) ** 2, (0.03 * 2) ** 2
    ssim = ((2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean()
    assert summary["test/ssim_mean_volume"] == pytest.approx(ssim, abs=1e-4)
    contents = torch.load(out / "last.pt", weights_only=True)
    hu, affine = read_ct(patients[test].ct)
    spacing = np.sqrt((affine[:3, :3] ** 2).sum(0)) * hu.shape / 16
    integral = (0.0193 * (1 + ((mean + 1) * 2000 - 1000) / 1000)).sum(0) * spacing[0]
    slope, offset, _ = contents["greys"][1]
    picture = read_xray(patients[test].xrays[1], 32, True, False)
    picture = resize(picture * 2 - 1, (16, 16)).numpy()
    error = np.sqrt(np.square((integral.T[::-1, ::-1] * slope + offset) - picture).mean()) / abs(slope)
    assert summary["test/projection_error_lat_mean_volume"] == pytest.approx(error, rel=1e-3)
    assert 0.19 < slope < 0.21  # 0..10 of a line integral are 0..255, -1..1
    assert -1.02 < offset < -0.98


def test_sampled_volumes_lie_where_the_ct_does(cascade_flags, cascade_data, zygote, one, tmp_path):
    """--sample: HU, RAS+, the field of view of the CT beside the X-rays; without a CT the mean one, centred."""
    from tasks.cascade.files import read_ct

    folder = tmp_path / "new"
    for name in ("patient_0001", "patient_0002"):
        shutil.copytree(cascade_data / name, folder / name)
    (folder / "patient_0002" / "patient_0002.nii.gz").unlink()
    out = tmp_path / "run"
    words = cascade_flags(out, "--sample", folder, "--resume_from", one / "stage2_best.pt")
    done = go(zygote, words, 2)
    assert "2 volumes of 16 x 16 x 16" in done.stdout
    image = nibabel.load(out / "samples" / "patient_0001.nii.gz")
    assert nibabel.aff2axcodes(image.affine) == ("R", "A", "S")
    hu, affine = read_ct(cascade_data / "patient_0001" / "patient_0001.nii.gz")
    corner = lambda a, at: a @ np.array([*at, 1.0])  # noqa: E731
    assert np.allclose(corner(image.affine, (-0.5, -0.5, -0.5)), corner(affine, (-0.5, -0.5, -0.5)), atol=1e-3)
    end = [n - 0.5 for n in hu.shape]
    assert np.allclose(corner(image.affine, (15.5, 15.5, 15.5)), corner(affine, end), atol=1e-3)
    values = np.asarray(image.dataobj)
    assert values.dtype == np.int16
    assert values.min() >= -1000
    lone = nibabel.load(out / "samples" / "patient_0002.nii.gz")
    assert np.allclose(corner(lone.affine, (7.5, 7.5, 7.5)), [0, 0, 0, 1], atol=1e-3)
    extent = torch.load(one / "last.pt", weights_only=True)["extent"]
    assert np.allclose(np.diag(lone.affine)[:3] * 16, extent, rtol=1e-5)
    first = values.copy()
    go(zygote, cascade_flags(tmp_path / "again", "--sample", folder, "--resume_from", one / "stage2_best.pt"))
    assert np.abs(nibabel.load(tmp_path / "again" / "samples" / "patient_0001.nii.gz").get_fdata() - first).max() <= 1


def test_eval_only_repeats_the_test_metrics(cascade_flags, zygote, one, tmp_path):
    out = tmp_path / "run"
    summary = json.loads((one / "summary.json").read_text())
    go(zygote, cascade_flags(out, "--eval_only", "--resume_from", one / "stage2_best.pt", "--check_conditioning"), 2)
    found = json.loads((out / "eval_test.json").read_text())
    assert len([name for name in found if name.startswith("test/")]) == 17
    for name, value in found.items():
        if name.startswith("test/"):
            assert value == pytest.approx(summary[name], rel=1e-5), name
    assert (out / "figures" / "eval_test.png").stat().st_size > 5000
    go(zygote, cascade_flags(out, "--eval_only", "--resume_from", one / "stage1_best.pt"))  # the first stage alone
    assert json.loads((out / "eval_test.json").read_text())["stage"] == 1


def test_run_folder(one):
    names = {path.name for path in one.iterdir()}
    assert {"args.yaml", "metrics.jsonl", "summary.json", "last.pt", "best.pt", "manifest.sha256"} <= names
    assert {"stage1_best.pt", "stage2_best.pt", "model.safetensors", "logs"} <= names
    figures = {path.name for path in (one / "figures").iterdir()}
    assert figures == {
        f"{n}.png" for n in ("stage1_inputs", "stage2_inputs", "stage1_val", "stage2_val", "test", "curves")
    }
    from safetensors.torch import load_file

    weights = load_file(one / "model.safetensors")
    best = torch.load(one / "stage2_best.pt", weights_only=True)
    assert all(torch.equal(weights[f"stage2.{name}"], value) for name, value in best["ema"].items())
    assert all(torch.equal(weights[f"stage1.{name}"], value) for name, value in best["earlier"][0].items())
    summary = json.loads((one / "summary.json").read_text())
    assert {"test/psnr", "test/ssim", "test/psnr_mean_volume", "test/psnr_backprojection"} <= summary.keys()


def small_args(cascade_data: Path, *more):
    import train_accelerate as ta

    words = ["--stage_configs", json.dumps(SMALL_STAGES), "--img_size", "32", "--encoder_dim", "16"]
    args = ta.parse_args(
        [*words, "--num_timesteps", "20", "--ddim_steps", "2", "--dataset_path", str(cascade_data), *more]
    )
    args.mixed_precision = "no"
    return ta, args


def test_every_weight_learns_and_no_earlier_stage(cascade_data):
    """Each parameter of a stage's net has a gradient once the zero-initialised ones have moved; both views and the
    volume before reach the output; the optimizer holds this stage's parameters alone."""
    ta, args = small_args(cascade_data)
    net = ta.build_model(1, args, torch.device("cpu"))
    optimizer = ta.make_optimizer(net, args)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in net.parameters()}
    torch.manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p += 0.05 * torch.randn_like(p)
    noisy, xrays = torch.randn(2, 1, 16, 16, 16), torch.randn(2, 2, 32, 32, requires_grad=True)
    before = torch.randn(2, 1, 16, 16, 16, requires_grad=True)
    net(noisy, torch.tensor([0.2, 0.7]), xrays, before, torch.tensor([0.05, 0.1])).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())
    assert (xrays.grad.abs().sum((0, 2, 3)) > 0).all()
    assert before.grad.abs().sum() > 0


def test_scheduler_goes_from_noise_to_the_clean_volume(cascade_data):
    """MONAI's DDIM with a perfect net ends at the volume exactly, in v and in noise prediction; its times end at 0 of
    the noise, and v is what Salimans and Ho say."""
    for more in ([], ["--no-v_parameterization"]):
        ta, args = small_args(cascade_data, "--ddim_steps", "5", *more)
        scheduler = ta.make_diffusion(args).scheduler
        assert scheduler.timesteps.tolist() == [19, 15, 11, 7, 3]
        torch.manual_seed(0)
        clean, x = torch.rand(1, 1, 4, 4, 4) * 2 - 1, torch.randn(1, 1, 4, 4, 4)
        for time_ in scheduler.timesteps.tolist():
            alpha = scheduler.alphas_cumprod[time_]
            noise = (x - alpha.sqrt() * clean) / (1 - alpha).sqrt()
            v = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
            x, _ = scheduler.step(noise if more else v, time_, x)
        assert torch.allclose(x, clean, atol=1e-4)


def test_prediction_of_v_and_noise_agree(cascade_data):
    """denoise() of any net: the clean volume it names and the v or noise it returns are the same statement."""
    from tasks.cascade.diffusion import Previous

    for more in ([], ["--no-v_parameterization"]):
        ta, args = small_args(cascade_data, *more)
        scheduler = ta.make_diffusion(args).scheduler
        net = lambda x, *_: torch.sin(3 * x)  # noqa: E731
        torch.manual_seed(0)
        volume, noise = torch.rand(3, 1, 8, 8, 8) - 1, torch.randn(3, 1, 8, 8, 8)
        times = torch.tensor([1, 9, 18])
        noisy = scheduler.add_noise(volume, noise, times)
        before = Previous(torch.rand(3, 1, 4, 4, 4) - 1, torch.full((3,), 0.05))
        for previous in (None, before):
            output, clean = ta.denoise(net, scheduler, noisy, times, torch.zeros(3, 2, 8, 8), previous)
            for i, time_ in enumerate(times.tolist()):
                _, named = scheduler.step(output[i], time_, noisy[i])
                assert torch.allclose(named, clean[i].clamp(-1, 1), atol=1e-3)


def test_projection_loss_is_in_the_x_ray_s_units_and_weighs_by_signal(cascade_data):
    """The true volume fits its X-rays; a moved one does not; the same error counts less where there is more noise."""
    ta, args = small_args(cascade_data)
    data = ta.load_data([[8, 8, 8], [16, 16, 16]], args, torch.device("cpu"))
    items = torch.utils.data.default_collate([data.set("train", [16, 16, 16])[i] for i in range(4)])
    batch = ta.prepare(items, torch.device("cpu"))
    right = ta.projection_error(batch["volume"], batch["extent"], batch["xrays"], data.greys)
    wrong = ta.projection_error(batch["volume"].roll(3, 2), batch["extent"], batch["xrays"], data.greys)
    assert right.shape == (4, 2)
    assert right.max() < 3e-3
    assert (wrong[:, 0] > 20 * right[:, 0]).all()  # a move along x shows in the frontal view,
    assert (wrong[:, 1] < 2 * right[:, 1] + 1e-4).all()  # and not in the lateral one, whose rays run along x
    scheduler = ta.make_diffusion(args).scheduler
    for time_ in (2, 17):
        times, noise = torch.full((4,), time_), torch.randn_like(batch["volume"])
        net = lambda x, *_: torch.ones_like(x)  # noqa: E731
        _, physics = ta.sample_losses(net, batch, ta.Draw(times, noise, None), scheduler, data.greys)
        noisy = scheduler.add_noise(batch["volume"], noise, times)
        _, clean = ta.denoise(net, scheduler, noisy, times, batch["xrays"], None)
        error = ta.projection_error(clean, batch["extent"], batch["xrays"], data.greys).mean(1)
        assert torch.allclose(physics, scheduler.alphas_cumprod[time_] * error)
    assert scheduler.alphas_cumprod[2] > 10 * scheduler.alphas_cumprod[17]


def test_gradient_checkpointing_keeps_less(cascade_data):
    kept = []
    for more in ([], ["--gradient_checkpointing"]):
        ta, args = small_args(cascade_data, "--batch_size", "4", *more)
        stage = ta.plan_as_asked(1, args.stage_configs[1], args.gradient_checkpointing)
        setup = ta.Setup(args, torch.device("cpu"), "no")
        kept.append(ta.try_stage(stage, None, setup).memory)
    assert kept[1] < 0.6 * kept[0]


def test_augmentation(cascade_data):
    """A function of (seed, epoch, patient); volume and pictures move together; none in evaluations."""
    ta, args = small_args(cascade_data)
    from tasks.cascade.data import augment
    from tasks.cascade.projector import project, resize

    stages = [[40, 40, 40]]
    data = ta.load_data(stages, args, torch.device("cpu"))
    items = torch.utils.data.default_collate([data.set("train", stages[0])[i] for i in range(4)])
    plain = ta.prepare(items, torch.device("cpu"))
    assert torch.equal(plain["seen"], plain["xrays"])
    moved = [augment(plain["volume"], plain["xrays"], plain["index"], 3, epoch) for epoch in (0, 0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(moved[0], moved[1], strict=True))
    assert not torch.equal(moved[0][2], moved[2][2])
    backwards = augment(plain["volume"].flip(0), plain["xrays"].flip(0), plain["index"][::-1], 3, 0)
    assert all(torch.equal(a.flip(0), b) for a, b in zip(moved[0], backwards, strict=True))  # whatever the batch
    volume, xrays, seen = moved[0]
    assert not torch.equal(volume, plain["volume"])
    assert not torch.equal(seen, xrays)
    spacing = plain["extent"] / 40
    for k, view in enumerate(("pa", "lat")):
        a, b, _ = data.greys[k]
        inner = slice(4, -4)  # rows at the edge repeat
        shadow = (a * project(volume, spacing, view) + b)[:, 0, inner]
        picture = resize(xrays[:, k : k + 1], (40, 40))[:, 0, inner]
        unmoved = resize(plain["xrays"][:, k : k + 1], (40, 40))[:, 0, inner]
        assert (shadow - picture).abs().mean() < 0.02
        assert (shadow - picture).abs().mean() < 0.7 * (shadow - unmoved).abs().mean()


@pytest.mark.soak
def test_config_keys_have_an_effect(cascade_flags, zygote, cascade_data, one, tmp_path):
    """The guide's nested JSON with // comments; each key arrives."""
    first = second_loss(one)
    sections = {
        "xray_config": {"img_size": 32, "num_views": 2, "encoder_dim": 16},
        "stage_configs": SMALL_STAGES,
        "training": {"batch_size": 6, "num_timesteps": 20, "learning_rate": 1e-3, "num_epochs_per_stage": 2},
        "data": {"dataset_path": str(cascade_data), "cache_dir": str(tmp_path / "cache"), "num_workers": 0},
    }

    def loss(section: str, key: str, value) -> float:
        changed = json.loads(json.dumps(sections))
        changed[section][key] = value
        text = json.dumps(changed, indent=1).replace("{\n", '{ // a comment with "quotes" and http://x\n', 1)
        (tmp_path / "config.json").write_text(text)
        out = tmp_path / f"{key}"
        words = ["--config", tmp_path / "config.json", "--checkpoint_dir", out, "--ddim_steps", "2", "--log_every", "1"]
        go(zygote, [*map(str, words), "--stage", "1", "--max_steps", "2"])
        return second_loss(out)

    assert loss("training", "batch_size", 6) == first
    assert loss("training", "v_parameterization", False) != first
    assert loss("training", "mixed_precision", "bf16") != first
    assert loss("training", "accumulation_steps", 2) != first  # 12 a step: all 11
    assert loss("training", "physics_weight", 0.0) < first
    assert loss("data", "augmentation", False) != first
    assert loss("xray_config", "num_views", 1) != first
    assert loss("training", "gradient_checkpointing", True) == pytest.approx(first, rel=1e-6)


@pytest.mark.soak
def test_overfits_one_volume(cascade_data, tmp_path):
    """v-prediction at 32^3 on one volume: loss below 0.05, and PSNR above 30 dB by sampling."""
    from distributed_utils import schedule

    stage = {"name": "stage1", "volume_size": [32, 32, 32], "voxel_dim": 64, "vit_depth": 2, "num_heads": 4}
    flags = ["--num_timesteps", "1000", "--ddim_steps", "50", "--no-augmentation"]
    stages = json.dumps([stage | {"token_grid": 8}])
    ta, args = small_args(cascade_data, "--stage_configs", stages, *flags)
    device = torch.device("cpu")
    torch.set_num_threads(2)
    data = ta.load_data([[32, 32, 32]], args, torch.device("cpu"))
    item = torch.utils.data.default_collate([data.set("train", [32, 32, 32])[0]] * 4)
    batch = ta.prepare(item, device)
    net, diffusion = ta.build_model(0, args, device), ta.make_diffusion(args)
    ema = ta.Ema(net, 0.99)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, fused=True)
    kept = []
    for step in range(500):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * schedule(step, 500, 10, "cosine")
        times = torch.randint(1000, (4,), generator=torch.Generator().manual_seed(step))
        noise = torch.randn(batch["volume"].shape, generator=torch.Generator().manual_seed(step))
        parts = ta.sample_losses(net, batch, ta.Draw(times, noise, None), diffusion.scheduler, data.greys)
        (parts[0] + 0.3 * parts[1]).mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(net, step + 1)
        kept.append(float(parts[0].detach().mean()))
    volume = ta.sample_cascade([ema.model], batch["xrays"][:1], [0], diffusion, "no")[0]
    psnr = float(10 * torch.log10(4 / (volume - batch["volume"][:1]).square().mean()))
    print(
        f"v-prediction on one 32^3 volume: mean loss of the last 50 steps {np.mean(kept[-50:]):.4f}, PSNR {psnr:.2f} dB"
    )
    assert np.mean(kept[-50:]) < 0.05
    assert psnr > 30
