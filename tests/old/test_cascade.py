"""train_accelerate.py: the same answer from any number of processes, and from a run that was killed; a true cascade."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np
import pytest
import torch
from background import interrupt
from conftest import ROOT, SMALL_STAGES, kill_then_stop, records, torchrun
from scipy.ndimage import uniform_filter
from torch.utils.data import default_collate

from tasks.cascade.views import LAT, PA

CASCADE = str(ROOT / "train_accelerate.py")
CPU = torch.device("cpu")
TRAIN_NAMES = ("loss", "diffusion_loss", "physics_loss", "grad_norm", "lr", "skipped")
VAL_NAMES = ("loss", "physics_loss", "psnr", "ssim", "psnr_mean_volume")
NAMES = [f"train/{name}" for name in TRAIN_NAMES]
NAMES += [f"val/{name}" for name in VAL_NAMES]
NAMES += ["test/psnr", "test/mae_hu"]


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


class Line(NamedTuple):
    """A line of metrics.jsonl, without times and memory."""

    step: int
    stage: int
    epoch: int
    values: dict[str, float]


def curve(out: Path) -> list[Line]:
    """Every line, in file order."""
    rows = []
    for line in records(out):
        values = {name: line[name] for name in NAMES if name in line}
        rows.append(Line(line["step"], line["stage"], line["epoch"], values))
    return rows


def training_lines(out: Path) -> list[Line]:
    return [line for line in curve(out) if "train/loss" in line.values]


def second_loss(out: Path) -> float:
    """Of step 2: in the first the model's output is 0 whatever the settings."""
    return training_lines(out)[1].values["train/loss"]


def off(first: list[Line], second: list[Line]) -> float:
    """Largest relative difference of all losses and metrics; steps, stages, epochs and learning rates are equal."""
    assert [line[:3] for line in first] == [line[:3] for line in second]
    most = 0.0
    for one, other in zip(first, second, strict=True):
        assert one.values.keys() == other.values.keys()
        assert one.values.get("train/lr") == other.values.get("train/lr")
        for name, value in one.values.items():
            expected = other.values[name]
            if name == "train/grad_norm":
                assert value == pytest.approx(expected, rel=1e-3)
            else:
                most = max(most, abs(value - expected) / max(1.0, abs(expected)))
    return most


def load(path: Path) -> dict:
    """A checkpoint."""
    return torch.load(path, weights_only=True)


def same_weights(one: dict, other: dict) -> bool:
    differing = [name for name, value in one.items() if not torch.equal(value, other[name])]
    return not differing


@pytest.fixture(scope="module")
def words_of(cascade_flags):
    """words_of(out, flags): the arguments of a small run into a folder."""
    return lambda out, flags=(): cascade_flags(out, *flags)


@pytest.fixture(scope="module")
def start(zygote):
    """start(words, ranks=n, ...): a command line, without python."""
    return lambda words, **options: zygote(*words, **options)


@pytest.fixture(scope="module")
def run(words_of, start):
    """run(out, flags, ranks, code, figures, NAME=value ...): a small run, which must end with this exit code."""

    def run(
        out: Path,
        flags: list | tuple = (),
        ranks: int = 1,
        code: int = 0,
        figures: bool = False,
        **environment,
    ):
        words = [CASCADE, *words_of(out, flags)]
        done = start(words, ranks=ranks, figures=figures, **environment)
        assert done.code == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run


def launch(command: list, seconds: int = 200) -> str:
    """Run a command line to its end; what it printed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def one(run, tmp_path_factory) -> Path:
    """A whole run in one process, 6 patients a step: 2 steps an epoch, the second with the 5 that are left."""
    out = tmp_path_factory.mktemp("one") / "run"
    done = run(out, ["--batch_size", "6", "--check_conditioning", "--num_samples", "3"], figures=True)
    # the table of stages, and that of the scores
    assert "stage1  " in done.stdout
    assert re.search(r"cascade +\d", done.stdout)
    return out


# --- the same answer --------------------------------------------------------------------------------------------------

IN_MEMORY = ["--batch_size", "2", "--cache_in_memory"]
WORKERS = ["--batch_size", "3", "--gradient_accumulation_steps", "2", "--num_workers", "2"]
RECOMPUTED = ["--batch_size", "1", "--gradient_accumulation_steps", "3", "--gradient_checkpointing"]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(2, ["--batch_size", "3"], id="2x3"),
        pytest.param(3, IN_MEMORY, id="3x2-in-memory"),
        pytest.param(1, WORKERS, id="1x3x2-workers"),
        pytest.param(2, RECOMPUTED, id="2x1x3-checkpointing"),
    ],
)
def test_same_curve_and_metrics(run, one, tmp_path, ranks, more):
    """An uneven last step, 1 validation and 1 test patient, of which one rank at most has any."""
    out = tmp_path / "run"
    run(out, [*more, "--check_conditioning", "--num_samples", "3"], ranks)
    assert len(curve(one)) == 8 + 4 + 2 + 1
    assert off(curve(out), curve(one)) < 1e-5

    summary = read_json(out / "summary.json")
    expected = read_json(one / "summary.json")
    judged = {name: value for name, value in expected.items() if name.startswith("test/")}
    assert len(judged) == 10 * 6 + 3 * 2 + 4 + 2
    for name, value in judged.items():
        # a voxel at an interval's end is in or out by the last bit
        least = 1e-3 if "coverage" in name else 1e-6
        assert summary[name] == pytest.approx(value, rel=1e-5, abs=least), name
    assert summary["world_size"] == ranks
    assert summary["effective_batch_size"] == 6
    assert summary["stages"] == 2


@pytest.mark.soak
def test_torchrun_gives_the_very_same_curve(run, words_of, tmp_path):
    """In the quick suite the runs that are killed are torchrun's."""
    flags = ["--batch_size", "3", "--num_epochs_per_stage", "1"]
    run(tmp_path / "bare", flags, 2)
    stdout = launch([*torchrun(2), CASCADE, *words_of(tmp_path / "run", flags)])
    assert "torchrun, world size 2" in stdout
    assert curve(tmp_path / "run") == curve(tmp_path / "bare")


@pytest.mark.soak
def test_accelerate_launch_gives_the_very_same_curve(run, words_of, tmp_path):
    """By train_4gpu.sh, for real: the curve of two processes that no launcher started."""
    out = tmp_path / "run"
    bare = tmp_path / "bare"
    flags = ["--batch_size", "3", "--num_epochs_per_stage", "1"]
    run(bare, flags, 2)
    launcher = ["bash", "train_4gpu.sh", "--method", "accelerate", "--cpu", "--num_gpus", "2"]
    stdout = launch([*launcher, *words_of(out, flags)])
    assert "2 CPU processes by accelerate: accelerate launch" in stdout
    assert "accelerate, world size 2" in stdout
    assert curve(out) == curve(bare)


def test_precision_of_accelerate_launch(run, tmp_path):
    """ACCELERATE_MIXED_PRECISION is what `accelerate launch --mixed_precision` sets; a flag of the script wins."""

    def first_steps(name: str, launched: str, flags: list[str]) -> tuple[str, float]:
        out = tmp_path / name
        done = run(out, ["--max_steps", "2", "--stage", "1", *flags], ACCELERATE_MIXED_PRECISION=launched)
        return done.stdout, second_loss(out)

    without_gpu, exact = first_steps("fp16", "fp16", [])
    launched, half = first_steps("bf16", "bf16", [])
    by_flag, exact_by_flag = first_steps("flag", "bf16", ["--mixed_precision", "no"])
    assert "precision      no (fp32: the fp16 of accelerate launch needs a GPU)" in without_gpu
    assert "precision      bf16 (accelerate launch)" in launched
    assert "precision      no (command line)" in by_flag
    assert exact_by_flag == exact
    assert 1e-6 < abs(half / exact - 1) < 0.02


def test_gradients_are_those_of_one_process(run, tmp_path):
    """Five steps, as the first reach few layers (outputs and gates begin at zero): AdamW's averaged gradients agree."""
    moments = []
    for ranks, batch in ((1, 4), (2, 2)):
        out = tmp_path / str(ranks)
        flags = ["--batch_size", batch, "--max_steps", "5", "--stage", "1", "--learning_rate", "1e-4"]
        run(out, flags, ranks)
        moments.append(load(out / "last.pt")["optimizer"]["state"])

    moved = 0
    for key, value in moments[0].items():
        expected = value["exp_avg"]
        scale = float(expected.abs().max())
        moved += scale > 1e-12
        difference = moments[1][key]["exp_avg"] - expected
        assert float(difference.abs().max()) < 1e-3 * scale + 1e-9
    assert moved > 0.9 * len(moments[0])


def test_a_stage_begins_with_the_encoder_of_the_one_before(run, tmp_path):
    """And with nothing else of it; the checkpoint at the end of stage 1 is that of the beginning of stage 2."""
    out = tmp_path / "run"
    run(out, ["--max_steps", "7", "--save_every", "1", "--keep_last", "20"])
    begun = load(out / "step_00000006.pt")
    assert begun["state"]["stage"] == 1
    before = load(out / "stage1_best.pt")["ema"]
    for name, value in begun["net"].items():
        if name.startswith("encoder."):
            assert torch.equal(value, before[name]), name
    assert not torch.equal(begun["net"]["to_tokens.weight"], before["to_tokens.weight"])


def test_averaged_weights(run, tmp_path):
    """`ema` of each checkpoint is the running mean of the models of all steps, with the decay's warm-up."""
    out = tmp_path / "run"
    flags = ["--stage", "1", "--save_every", "1", "--keep_last", "20"]
    run(out, [*flags, "--ema_decay", "0.3", "--max_steps", "5"])
    steps = [load(out / f"step_{k:08d}.pt") for k in range(1, 6)]

    expected = steps[0]["ema"]
    for n, step in enumerate(steps[1:], start=2):
        decay = min(0.3, (1 + n) / (10 + n))
        for name, value in step["net"].items():
            mean = decay * expected[name] + (1 - decay) * value
            assert torch.allclose(step["ema"][name], mean, atol=1e-6), (n, name)
            expected[name] = mean
    assert not same_weights(steps[-1]["ema"], steps[-1]["net"])


# --- killed, stopped, resumed -----------------------------------------------------------------------------------------

KILLED = ["--batch_size", "2", "--save_every", "2", "--resume_from", "auto", "--num_epochs_per_stage", "2"]
KILLED += ["--warmup_steps", "3"]
# 11 patients, 4 a step
STAGE_STEPS = 6


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory) -> Path:
    """The unbroken run of two processes."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(out, KILLED, 2)
    assert [line["step"] for line in records(out) if "test/psnr" in line] == [2 * STAGE_STEPS]
    return out


def same_end(out: Path, whole: Path) -> None:
    """Whether a run has become the unbroken one."""
    assert curve(out) == curve(whole)
    last = load(out / "last.pt")
    expected = load(whole / "last.pt")
    assert same_weights(last["net"], expected["net"])
    assert same_weights(last["ema"], expected["ema"])
    assert same_weights(last["earlier"][0], expected["earlier"][0])

    # after a kill right after best.pt was written, its value is unknown until it is written anew
    unknown = {"best": None, "best_sha256": None}
    assert last["state"] | unknown == expected["state"] | unknown
    assert load(out / "best.pt")["step"] == load(whole / "best.pt")["step"]


def test_kill_and_resume_across_the_stages(run, words_of, zygote, whole, tmp_path):
    """A worker killed in stage 1, SIGTERM to both in stage 2: the rest is the unbroken run's, bit for bit."""
    out = tmp_path / "run"
    kill_then_stop(zygote, [CASCADE, *words_of(out, KILLED)], out, 4, STAGE_STEPS + 3)
    run(out, KILLED, 2)
    same_end(out, whole)


@pytest.mark.soak
def test_ten_kills(run, words_of, whole, tmp_path):
    """Ten runs, each killed at a random moment and resumed; half of them around the stage boundary."""
    chance = random.Random(5)
    for k in range(10):
        out = tmp_path / str(k)
        steps = range(2 * STAGE_STEPS - 1)
        if k % 2:
            steps = [STAGE_STEPS - 1, STAGE_STEPS]
        step = chance.choice(steps)
        who = chance.choice(["worker", "rank0", "all"])
        delay = chance.uniform(0, 0.8)
        command = [CASCADE, *words_of(out, KILLED)]
        interrupt(command, out, who, step, delay)
        saved = sorted(path.name for path in out.glob("step*"))
        print(f"kill {k}: {who}, {delay:.2f} s after step {step}: {saved}")
        run(out, KILLED, 2)
        same_end(out, whole)


def test_resume_at_another_world_size_and_from_any_best(run, one, tmp_path):
    """Begun on 2 processes, resumed with 3, ended by 1; then again from stage1_best.pt in another folder."""
    out = tmp_path / "run"
    for ranks, batch, until in ((2, 3, 2), (3, 2, 5), (1, 6, 0)):
        flags = ["--batch_size", batch, "--max_steps", until, "--resume_from", "auto"]
        run(out, [*flags, "--check_conditioning"], ranks)
    expected = training_lines(one)
    assert off(training_lines(out), expected) < 1e-5

    # from the best checkpoint of the first stage
    best = load(out / "stage1_best.pt")
    assert best["state"]["stage"] == 0
    other = tmp_path / "other"
    run(other, ["--batch_size", "6", "--resume_from", out / "stage1_best.pt"])
    rest = [line for line in expected if line.step > best["step"]]
    assert off(training_lines(other), rest) < 1e-5
    assert (other / "stage2_best.pt").exists()


def test_stages_one_at_a_time(run, one, tmp_path):
    """--stage 1, then --stage 2, is the whole; out of order is refused."""
    out = tmp_path / "run"
    flags = ["--batch_size", "6", "--check_conditioning"]
    done = run(out, [*flags, "--stage", "2"], code=2)
    assert "error: --stage 2: the stages before it are not there" in done.stderr
    run(out, [*flags, "--stage", "1"])
    assert read_json(out / "summary.json")["stages"] == 1
    done = run(out, [*flags, "--stage", "stage2", "--resume_from", "auto"])
    training = training_lines(out)

    # the speed of a stage is told by the call that trained it
    speeds = done.stdout.partition("\nspeed ")[2].splitlines()
    first, second = (line.split()[1] for line in speeds[1:3])
    assert first == "-"
    assert float(second) > 0

    # the same as in one call
    assert training == training_lines(one)
    assert curve(out)[-1] == curve(one)[-1]

    # back to the first is refused
    done = run(out, [*flags, "--stage", "1", "--resume_from", "auto"], code=2)
    assert "the checkpoint is at stage 2" in done.stderr

    # the second stage alone, in another folder, from the best checkpoint of the first
    alone = tmp_path / "alone"
    run(alone, [*flags, "--stage", "2", "--resume_from", out / "stage1_best.pt"])
    second_stage = [line for line in training if line.stage == 2]
    expected = [(line[1:], line.values["train/loss"]) for line in second_stage]
    losses = [(line[1:], line.values["train/loss"]) for line in training_lines(alone)]
    assert losses == expected

    # the second stage after an unfinished first
    unfinished = tmp_path / "unfinished"
    run(unfinished, [*flags, "--stage", "1", "--max_steps", "1"])
    done = run(unfinished, [*flags, "--stage", "2", "--resume_from", "auto"], code=2)
    assert "stage1 has done 1 of 4 steps" in done.stderr


def test_going_on_with_fewer_epochs_cuts_no_later_stage(run, tmp_path):
    """Stage 1 was begun with more epochs than are asked for now: it ends where it is, stage 2 is whole."""
    out = tmp_path / "run"
    run(out, ["--num_epochs_per_stage", "4", "--max_steps", "9"])
    run(out, ["--num_epochs_per_stage", "2", "--resume_from", "auto"])
    steps = [(line.stage, line.step) for line in training_lines(out)]
    first = [(1, step) for step in range(1, 10)]
    second = [(2, step) for step in range(10, 16)]
    assert steps == first + second


def test_what_the_checkpoint_knows(run, zygote, cascade_data, one, tmp_path):
    """No test patient was trained on; the precision stays; --stage counts the checkpoint's own stages."""
    names = sorted(path.name for path in cascade_data.glob("patient_*"))
    files = [tmp_path / f"{k}.txt" for k in range(3)]
    parts = [names[4:], names[:2], names[2:4]]
    for path, part in zip(files, parts, strict=True):
        path.write_text("\n".join(part))
    flags = ["--eval_only", "--resume_from", one / "last.pt", "--split_files", *files]
    done = run(tmp_path / "x", flags, code=2)
    seen = r"error: --dataset_path: .*last.pt was trained on patient_\d+ and \d more of the 2 test pat"
    assert re.search(seen, done.stderr)

    # the precision
    out = tmp_path / "run"
    flags = ["--batch_size", "6", "--max_steps"]
    resumed = ["--resume_from", "auto"]
    run(out, [*flags, "2", "--mixed_precision", "bf16"])
    done = run(out, [*flags, "3", *resumed])
    assert "precision      bf16 (as the run was begun)" in done.stdout
    done = run(out, [*flags, "4", *resumed, "--mixed_precision", "no"])
    assert "warning: begun in bf16, going on in no" in done.stdout

    # the stages
    done = zygote(CASCADE, "--dataset_path", cascade_data, "--checkpoint_dir", out, "--resume_from=auto", "--stage=3")
    assert done.code == 2
    assert "error: --stage 3: there are 1 to 2 (stage1, stage2)" in done.stderr


@pytest.mark.soak
def test_compiled(words_of, one, tmp_path):
    """--compile on two processes: the same curve."""
    out = tmp_path / "run"
    words = words_of(out, ["--batch_size", "3", "--compile", "--check_conditioning"])
    launch([*torchrun(2), CASCADE, *words], seconds=900)
    assert off(curve(out), curve(one)) < 1e-4


def test_plateau_halves_the_rate(run, tmp_path):
    """As torch's ReduceLROnPlateau: half after 6 epochs without a lower loss; also across a resume."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    out = tmp_path / "run"
    flags = ["--batch_size", "11", "--num_epochs_per_stage", "16", "--stage", "1", "--learning_rate", "1e-7"]
    run(out, [*flags, "--max_steps", "9"])
    run(out, [*flags, "--resume_from", "auto"])
    rates = [line["train/lr"] for line in records(out) if "train/lr" in line]
    losses = [line["val/loss"] for line in records(out) if "val/loss" in line]

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-7)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=5)
    expected = []
    for loss in losses:
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step(loss)
    assert rates == expected
    assert min(rates) < 1e-7


def test_a_net_that_diverges_is_stopped_together(run, tmp_path):
    """Non-finite losses: the steps are skipped on all ranks, the weights stay, the run ends with code 1."""
    flags = ["--batch_size", "2", "--physics_weight", "1e38", "--max_bad_steps", "2", "--stage", "1"]
    done = run(tmp_path / "run", flags, 2, code=1)
    assert "2 steps in a row had a non-finite loss or gradient" in done.stderr
    assert done.stderr.count("error:") == 1


def test_out_of_memory_names_what_to_change(words_of, start, tmp_path):
    """Convolutions with memory for 6 images or volumes, at the measurement before the first step."""
    little = str(ROOT / "tests/old/little_memory.py")
    out = tmp_path / "run"
    done = start([little, "6", CASCADE, *words_of(out, ["--batch_size", "6"])])
    assert done.code == 1
    advice = "try batch_size 3 and accumulation_steps 2"
    assert f"error: out of memory in stage1 at batch_size 6 per GPU; {advice}" in done.stderr
    assert not out.exists() or not any(out.glob("*.pt"))


# --- what it computes -------------------------------------------------------------------------------------------------


def smooth(x: np.ndarray) -> np.ndarray:
    """Means over windows of 7^3, where they fit."""
    return uniform_filter(x, 7)[3:-3, 3:-3, 3:-3]


def numpy_ssim(x: np.ndarray, y: np.ndarray) -> float:
    """The structural similarity of two volumes in -1..1, as scikit-image defines it."""
    mean_x = smooth(x)
    mean_y = smooth(y)
    variance_x = smooth(x**2) - mean_x**2
    variance_y = smooth(y**2) - mean_y**2
    covariance = smooth(x * y) - mean_x * mean_y
    c1 = (0.01 * 2) ** 2
    c2 = (0.03 * 2) ** 2
    above = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    below = (mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2)
    return float((above / below).mean())


def volume_of(patient) -> np.ndarray:
    """A patient's CT in -1..1 on the second stage's grid."""
    from tasks.cascade.files import read_ct
    from tasks.cascade.projector import normalise, resize

    hu, _ = read_ct(patient.ct)
    hu = torch.from_numpy(hu).clamp(-1000, 3000)
    hu = resize(hu, (16, 16, 16)).round()
    return normalise(hu).numpy().astype(np.float64)


def test_metrics_against_numpy(cascade_data, one):
    """PSNR, SSIM (scikit-image's definition), MAE and the projection error of the mean volume, from the files."""
    from tasks.cascade.data import split_patients
    from tasks.cascade.files import find_patients, read_ct, read_xray
    from tasks.cascade.projector import resize

    summary = read_json(one / "summary.json")
    patients = find_patients(cascade_data, (PA, LAT))
    split = split_patients(patients, 42)
    (test,) = split["test"]
    true = volume_of(patients[test])
    mean = np.mean([volume_of(patients[i]) for i in split["train"]], 0)
    mse = np.square(mean - true).mean()
    psnr = 10 * np.log10(4 / mse)
    mae = np.abs(mean - true).mean() * 2000
    assert summary["test/psnr_mean_volume"] == pytest.approx(psnr, abs=1e-4)
    assert summary["test/mae_hu_mean_volume"] == pytest.approx(mae, abs=1e-2)
    assert summary["test/ssim_mean_volume"] == pytest.approx(numpy_ssim(mean, true), abs=1e-4)

    # line integrals of the lateral view, along x
    hu, affine = read_ct(patients[test].ct)
    squares = affine[:3, :3] ** 2
    spacing = np.sqrt(squares.sum(0)) * hu.shape / 16
    mean_hu = (mean + 1) * 2000 - 1000
    mu = 0.0193 * (1 + mean_hu / 1000)
    integral = mu.sum(0) * spacing[0]

    # in the X-ray's grey values: 0..10 of a line integral are 0..255, -1..1
    view, slope, offset, _, noise = load(one / "last.pt")["prior"]["greys"][1]
    assert view[:2] == ("lat", 90.0)
    assert 0 < noise < 0.1
    assert 0.19 < slope < 0.21
    assert -1.02 < offset < -0.98
    xray = read_xray(patients[test].xrays[1], 32, True, False)
    xray = resize(xray * 2 - 1, (16, 16)).numpy()
    projection = integral.T[::-1, ::-1] * slope + offset
    squares = np.square(projection - xray)
    error = np.sqrt(squares.mean()) / abs(slope)
    assert summary["test/projection_error_lat_mean_volume"] == pytest.approx(error, rel=1e-3)


def world_point(affine: np.ndarray, index: list[float]) -> np.ndarray:
    """Where a place in a volume lies, in mm."""
    return affine @ np.array([*index, 1.0])


def test_sampled_volumes_lie_where_the_ct_does(run, cascade_data, one, tmp_path):
    """--sample: HU, RAS+, the field of view of the CT beside the X-rays; without a CT the mean one, centred."""
    from tasks.cascade.files import read_ct

    folder = tmp_path / "new"
    for name in ("patient_0001", "patient_0002"):
        shutil.copytree(cascade_data / name, folder / name)
    (folder / "patient_0002" / "patient_0002.nii.gz").unlink()
    out = tmp_path / "run"
    flags = ["--sample", folder, "--resume_from", one / "stage2_best.pt"]
    done = run(out, flags, 2)
    assert "2 volumes of 16 x 16 x 16" in done.stdout

    # both corners of the field of view
    image = nibabel.load(out / "samples" / "patient_0001.nii.gz")
    assert nibabel.aff2axcodes(image.affine) == ("R", "A", "S")
    hu, affine = read_ct(cascade_data / "patient_0001" / "patient_0001.nii.gz")
    corners = {
        (-0.5, -0.5, -0.5): [-0.5, -0.5, -0.5],
        (15.5, 15.5, 15.5): [side - 0.5 for side in hu.shape],
    }
    for sampled, stored in corners.items():
        assert np.allclose(world_point(image.affine, sampled), world_point(affine, stored), atol=1e-3)
    values = np.asarray(image.dataobj)
    assert values.dtype == np.int16
    assert values.min() >= -1000

    # without a CT
    lone = nibabel.load(out / "samples" / "patient_0002.nii.gz")
    centre = world_point(lone.affine, (7.5, 7.5, 7.5))
    assert np.allclose(centre, [0, 0, 0, 1], atol=1e-3)
    extent = load(one / "last.pt")["extent"]
    assert np.allclose(np.diag(lone.affine)[:3] * 16, extent, rtol=1e-5)

    # the same from one process
    run(tmp_path / "again", flags)
    again = nibabel.load(tmp_path / "again" / "samples" / "patient_0001.nii.gz")
    assert np.abs(again.get_fdata() - values).max() <= 1


def test_eval_only_repeats_the_test_metrics(run, start, cascade_data, one, tmp_path):
    out = tmp_path / "run"
    summary = read_json(one / "summary.json")
    flags = ["--eval_only", "--resume_from", one / "stage2_best.pt", "--check_conditioning", "--num_samples", "3"]
    run(out, flags, 2)
    results = read_json(out / "eval_test.json")
    metrics = {name: value for name, value in results.items() if name.startswith("test/")}
    assert len(metrics) == 10 * 6 + 3 * 2 + 4 + 2
    for name, value in metrics.items():
        least = 1e-3 if "coverage" in name else 1e-6
        assert value == pytest.approx(summary[name], rel=1e-5, abs=least), name
    for figure in ("eval_test", "eval_test_coverage"):
        assert (out / "figures" / f"{figure}.png").stat().st_size > 5000

    # as many steps of sampling as in the run, where no flag says how many
    copy = shutil.copytree(one, tmp_path / "copy")
    plain = [CASCADE, "--eval_only", "--checkpoint_dir", copy, "--dataset_path", cascade_data]
    done = start([*plain, "--resume_from", copy / "stage2_best.pt", "--mixed_precision", "no"])
    assert done.code == 0, done.stderr
    again = read_json(copy / "eval_test.json")
    assert again["test/psnr"] == pytest.approx(summary["test/psnr"], rel=1e-5)

    # the first stage alone
    run(out, ["--eval_only", "--resume_from", one / "stage1_best.pt"])
    assert read_json(out / "eval_test.json")["stage"] == 1


def change_checkpoint(path: Path, changed: Path, **values) -> None:
    """Write a checkpoint with other values to another path."""
    checkpoint = torch.load(path, weights_only=True)
    torch.save(checkpoint | values, changed)


def test_several_samples_of_x_rays_alone(run, one, cascade_data, tmp_path):
    """--num_samples: mean and standard deviation, each patient's own, by one process and by two; held to the X-rays."""
    from tasks.cascade.files import read_xray
    from tasks.cascade.projector import normalise, project, resize

    folder = tmp_path / "new"
    folder.mkdir()
    for name in ("patient_0001", "patient_0002", "patient_0003"):
        for view in ("pa", "lat"):
            shutil.copy(cascade_data / name / f"{name}_{view}_drr.png", folder)

    # {(samples, processes): {file: volume}}
    flags = ["--sample", folder, "--resume_from", one / "stage2_best.pt"]
    volumes = {}
    for count, ranks in ((1, 1), (3, 1), (3, 2)):
        out = tmp_path / f"{count}-{ranks}"
        done = run(out, [*flags, "--num_samples", str(count)], ranks)
        if count > 1:
            assert "3 means and standard deviations of 3 samples of 16 x 16 x 16" in done.stdout
        files = sorted((out / "samples").iterdir())
        assert len(files) == 3 * (2 if count > 1 else 1)
        volumes[count, ranks] = {path.name: nibabel.load(path).get_fdata() for path in files}

    # two processes give what one gives, to 1 HU
    for name, volume in volumes[3, 1].items():
        difference = volumes[3, 2][name] - volume
        assert np.abs(difference).max() <= 1
    std = volumes[3, 1]["patient_0001_std.nii.gz"]
    assert 5 < std.mean() < 500
    assert not np.array_equal(std, volumes[3, 1]["patient_0002_std.nii.gz"])

    # the projections of what is written are the X-rays, which another patient's are not
    checkpoint = load(one / "last.pt")
    spacing = torch.tensor([checkpoint["extent"]]) / 16

    def error(written: str, shown: str) -> float:
        volume = torch.from_numpy(volumes[1, 1][f"{written}.nii.gz"]).float()
        errors = []
        for (view, *_), slope, offset, *_ in checkpoint["prior"]["greys"]:
            image = read_xray(folder / f"{shown}_{view}_drr.png", 32, True, False) * 2 - 1
            integral = (resize(image[None, None], (16, 16)) - offset) / slope
            difference = project(normalise(volume)[None, None], spacing, view) - integral
            errors.append(float(difference.square().mean().sqrt()))
        return max(errors)

    assert error("patient_0001", "patient_0001") < 0.1
    assert error("patient_0001", "patient_0002") > 0.3


def test_a_regression_stands_beside(run, one, tmp_path):
    """--regression is trained at one timestep and gives one volume; its row is in the other run's table."""
    out = tmp_path / "regression"
    run(out, ["--batch_size", "6", "--regression"])
    summary = read_json(out / "summary.json")
    assert summary["regression"] is True
    beside = ["--eval_only", "--resume_from", one / "stage2_best.pt", "--regression_run", out]
    done = run(tmp_path / "eval", beside)
    results = read_json(tmp_path / "eval" / "eval_test.json")
    for score in ("psnr", "gradient_error", "projection_error_lat"):
        assert results[f"test/{score}_regression"] == summary[f"test/{score}"]
    assert re.search(rf"\nregression +{summary['test/psnr']:.4f}", done.stdout)
    assert "\nregression" not in run(tmp_path / "alone", beside[:3]).stdout

    # which stands beside a cascade, not beside itself
    itself = ["--eval_only", "--resume_from", out / "best.pt", "--regression_run", out]
    refused = run(tmp_path / "itself", itself, code=2)
    assert "--regression_run: stands beside a cascade's test; leave it out" in refused.stderr

    # whatever --ddim_steps says, a regression is one step
    again = ["--eval_only", "--resume_from", out / "best.pt", "--ddim_steps", "5"]
    run(tmp_path / "again", again)
    repeated = read_json(tmp_path / "again" / "eval_test.json")
    assert repeated["test/psnr"] == pytest.approx(summary["test/psnr"], rel=1e-6)

    # a run that is none, one on other patients, and another last grid
    beside[-1] = one
    assert "of a run by diffusion" in run(tmp_path / "bad", beside, code=2).stderr
    for fact in ("patients", "views", "volume_size"):
        changed = tmp_path / fact
        changed.mkdir()
        (changed / "summary.json").write_text(json.dumps(summary | {fact: "other"}))
        refused = run(tmp_path / "bad", [*beside[:-1], changed], code=2)
        assert "of other patients, views or another last stage" in refused.stderr


def test_a_cascade_without_agreement(run, one, tmp_path):
    """--no-xray_agreement is the run's own: kept in its checkpoints, with nothing to compare in the table."""
    out = tmp_path / "run"
    run(out, ["--batch_size", "6", "--no-xray_agreement"])
    summary = read_json(out / "summary.json")
    assert "test/psnr_free" not in summary
    assert "test/psnr_start" not in summary
    whole = read_json(one / "summary.json")
    assert summary["test/psnr_mean_consistent"] == pytest.approx(whole["test/psnr_mean_consistent"], rel=1e-6)
    assert summary["test/projection_error_pa"] > 3 * whole["test/projection_error_pa"]
    assert load(out / "best.pt")["settings"]["xray_agreement"] is False
    refused = run(tmp_path / "eval", ["--eval_only", "--resume_from", out / "best.pt", "--xray_agreement"], code=2)
    assert "a run with --xray_agreement False, now True; leave it out" in refused.stderr


def test_a_checkpoint_of_the_format_before_is_refused(run, one, tmp_path):
    change_checkpoint(one / "last.pt", tmp_path / "old.pt", format="cascade/1")
    refused = run(tmp_path / "run", ["--eval_only", "--resume_from", tmp_path / "old.pt"], code=2)
    assert re.search(r"^error: .*old.pt: .*cascade/1", refused.stderr)
    assert len(refused.stderr.strip().splitlines()) == 1


def test_run_folder(one):
    names = {path.name for path in one.iterdir()}
    assert {"args.yaml", "metrics.jsonl", "summary.json", "last.pt", "best.pt", "manifest.sha256"} <= names
    assert {"stage1_best.pt", "stage2_best.pt", "model.safetensors", "logs"} <= names
    figures = {path.stem for path in (one / "figures").iterdir() if path.suffix == ".png"}
    assert figures == {"stage1_inputs", "stage2_inputs", "stage1_val", "stage2_val", "test", "test_coverage", "curves"}
    assert len(list((one / "figures").iterdir())) == len(figures)

    # the weights of both stages are those of the best checkpoint
    from safetensors.torch import load_file

    weights = load_file(one / "model.safetensors")
    best = load(one / "stage2_best.pt")
    states = {"stage1": best["earlier"][0], "stage2": best["ema"]}
    for stage, state in states.items():
        exported = {name: weights[f"{stage}.{name}"] for name in state}
        assert same_weights(state, exported)
    summary = read_json(one / "summary.json")
    assert {"test/psnr", "test/ssim", "test/psnr_mean_volume", "test/psnr_backprojection"} <= summary.keys()


def small_setup(cascade_data: Path, flags: list | tuple = ()):
    """The script, and a setup of a small cascade on the CPU without data."""
    import train_accelerate as script

    words = ["--stage_configs", json.dumps(SMALL_STAGES), "--img_size", "32", "--encoder_dim", "16"]
    words += ["--num_timesteps", "20", "--ddim_steps", "2"]
    words += ["--dataset_path", str(cascade_data)]
    args = script.parse_args([*words, *flags])
    return script, script.Setup(args, CPU, "no")


def load_data(script, setup, sizes: list[list[int]]):
    return script.source_of_flags(vars(setup.args), setup.args.source, CPU).load(sizes)


def prepared_batch(data, size: list[int], places) -> dict:
    """Training patients as an evaluation gets them."""
    from tasks.cascade.data import prepare

    dataset = data.set("train", size)
    return prepare(default_collate([dataset[place] for place in places]), CPU)


def test_every_weight_learns_and_no_earlier_stage(cascade_data):
    """Each parameter of a stage's model has a gradient once the zero-initialised ones have moved.

    Both views and the volume before reach the output; the optimizer holds this stage's parameters alone.
    """
    script, setup = small_setup(cascade_data)
    model = script.build_model(1, setup.args, CPU)
    optimizer = script.make_optimizer(model, setup.args)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()}

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    noisy = torch.randn(2, 1, 16, 16, 16)
    xrays = torch.randn(2, 2, 32, 32, requires_grad=True)
    previous = torch.randn(2, 1, 16, 16, 16, requires_grad=True)
    time = torch.tensor([0.2, 0.7])
    level = torch.tensor([0.05, 0.1])
    output = model(noisy, time, xrays, previous, level, torch.full((2, 3), 300.0))
    output.square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0
    assert (xrays.grad.abs().sum((0, 2, 3)) > 0).all()
    assert previous.grad.abs().sum() > 0


def test_scheduler_goes_from_noise_to_the_clean_volume(cascade_data):
    """MONAI's DDIM with a perfect model ends at the volume exactly, in v and in noise prediction.

    Its times end at 0 of the noise, and v is what Salimans and Ho say.
    """
    for more in ([], ["--no-v_parameterization"]):
        _, setup = small_setup(cascade_data, ["--ddim_steps", "5", *more])
        scheduler = setup.diffusion.scheduler
        assert scheduler.timesteps.tolist() == [19, 15, 11, 7, 3]
        torch.manual_seed(0)
        clean = torch.rand(1, 1, 4, 4, 4) * 2 - 1
        x = torch.randn(1, 1, 4, 4, 4)
        for timestep in scheduler.timesteps.tolist():
            alpha = scheduler.alphas_cumprod[timestep]
            noise = (x - alpha.sqrt() * clean) / (1 - alpha).sqrt()
            output = noise
            if not more:
                output = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
            x, _ = scheduler.step(output, timestep, x)
        assert torch.allclose(x, clean, atol=1e-4)


def model_of_ones(x, time, xrays, start, level, extent):
    return torch.ones_like(x)


def test_projection_loss_is_in_the_x_ray_s_units_and_weighs_by_signal(cascade_data):
    """The true volume fits its X-rays; a moved one does not; the same error counts less where there is more noise."""
    from tasks.cascade.diffusion import denoise, diffused, training_draw
    from tasks.cascade.metrics import projection_error

    script, setup = small_setup(cascade_data)
    data = load_data(script, setup, [[8, 8, 8], [16, 16, 16]])
    batch = prepared_batch(data, [16, 16, 16], range(4))
    volume = batch["volume"]

    def error_of(x: torch.Tensor) -> torch.Tensor:
        return projection_error(x, batch["extent"], batch["xrays"], data.greys)

    def mean_square(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean((1, 2, 3, 4))

    # a move along x shows in the frontal view, and not in the lateral one, whose rays run along x
    right = error_of(volume)
    wrong = error_of(volume.roll(3, 2))
    assert right.shape == (4, 2)
    assert right.max() < 3e-3
    assert (wrong[:, 0] > 20 * right[:, 0]).all()
    assert (wrong[:, 1] < 2 * right[:, 1] + 1e-4).all()

    # at little and at much noise
    setup.data = data
    setup.take_prior(None)
    diffusion = setup.diffusion
    alphas = diffusion.scheduler.alphas_cumprod
    drawn = training_draw(1, batch, None, 0, diffusion)
    for timestep in (2, 17):
        draw = drawn._replace(timestep=torch.full((4,), timestep), noise=torch.randn_like(volume))
        loss, physics = script.sample_losses(model_of_ones, batch, draw, setup)
        noisy, v = diffused(volume, draw, diffusion)
        _, clean = denoise(model_of_ones, noisy, draw.timestep, batch, draw.start, diffusion)
        assert torch.allclose(physics, alphas[timestep] * error_of(clean).mean(1))
        assert torch.allclose(loss, mean_square(1 - v))

        # in noise prediction the noise's own error counts
        setup.args.v_parameterization = False
        of_noise, _ = script.sample_losses(model_of_ones, batch, draw, setup)
        setup.args.v_parameterization = True
        signal = alphas[timestep].sqrt()
        noise = signal * 1 + (1 - alphas[timestep]).sqrt() * noisy
        expected = mean_square(noise - draw.noise)
        assert torch.allclose(of_noise, expected, rtol=1e-4)
    assert alphas[2] > 10 * alphas[17]


def test_gradient_checkpointing_keeps_less(cascade_data):
    from tasks.cascade.plan import plan_as_asked

    kept = []
    for more in ([], ["--gradient_checkpointing"]):
        script, setup = small_setup(cascade_data, ["--batch_size", "4", *more])
        stage = plan_as_asked(1, setup.args.stage_configs[1], setup.args.gradient_checkpointing)
        kept.append(script.try_stage(setup, stage, None).memory)
    assert kept[1] < 0.6 * kept[0]


def all_equal(one: tuple, other: tuple) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


def test_augmentation(cascade_data):
    """A function of (seed, epoch, patient); volume and images move together; none in evaluations."""
    from tasks.cascade.data import augment
    from tasks.cascade.projector import project, resize

    script, setup = small_setup(cascade_data)
    size = [40, 40, 40]
    data = load_data(script, setup, [size])
    plain = prepared_batch(data, size, range(4))
    index = plain["index"]
    assert torch.equal(plain["seen"], plain["xrays"])
    whole = plain["volume"]
    images = plain["xrays"]
    moved = [augment(whole, images, index, 3, epoch) for epoch in (0, 0, 1)]
    assert all_equal(moved[0], moved[1])
    assert not torch.equal(moved[0][2], moved[2][2])

    # whatever the batch
    backwards = augment(whole.flip(0), images.flip(0), index[::-1], 3, 0)
    forwards = tuple(part.flip(0) for part in backwards)
    assert all_equal(moved[0], forwards)
    volume, xrays, seen = moved[0]
    assert not torch.equal(volume, plain["volume"])
    assert not torch.equal(seen, xrays)

    # rows at the edge repeat
    inner = slice(4, -4)
    spacing = plain["extent"] / 40
    for k, view in enumerate(("pa", "lat")):
        fit = data.greys[k]
        shadow = fit.slope * project(volume, spacing, view) + fit.offset
        shadow = shadow[:, 0, inner]
        image = resize(xrays[:, k : k + 1], (40, 40))
        unmoved = resize(plain["xrays"][:, k : k + 1], (40, 40))
        error = (shadow - image[:, 0, inner]).abs().mean()
        error_unmoved = (shadow - unmoved[:, 0, inner]).abs().mean()
        assert error < 0.02
        assert error < 0.7 * error_unmoved


@pytest.mark.soak
def test_config_keys_have_an_effect(start, cascade_data, one, tmp_path):
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
        config = tmp_path / "config.json"
        config.write_text(text)
        out = tmp_path / key
        flags = ["--ddim_steps", "2", "--log_every", "1", "--stage", "1", "--max_steps", "2"]
        done = start([CASCADE, "--config", config, "--checkpoint_dir", out, *flags])
        assert done.code == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return second_loss(out)

    assert loss("training", "batch_size", 6) == first
    assert loss("training", "v_parameterization", False) != first
    assert loss("training", "mixed_precision", "bf16") != first
    # 12 a step: all 11
    assert loss("training", "accumulation_steps", 2) != first
    # by agreement, projections differ little from the X-rays from the first step on
    assert loss("training", "physics_weight", 1e4) > first
    assert loss("data", "augmentation", False) != first
    assert loss("xray_config", "num_views", 1) != first
    assert loss("training", "gradient_checkpointing", True) == pytest.approx(first, rel=1e-6)


@pytest.mark.soak
def test_overfits_one_volume(cascade_data):
    """v-prediction at 32^3 on one volume: loss below 0.05, and PSNR above 30 dB by sampling."""
    from old.distributed_utils import schedule
    from tasks.cascade.diffusion import training_draw
    from tasks.cascade.model import Ema
    from tasks.cascade.sampling import Sampling, Trained, sample_cascade

    stage = {
        "name": "stage1",
        "volume_size": [32, 32, 32],
        "voxel_dim": 64,
        "vit_depth": 2,
        "num_heads": 4,
        "token_grid": 8,
    }
    flags = ["--num_timesteps", "1000", "--ddim_steps", "50", "--no-augmentation"]
    flags += ["--no-xray_agreement", "--stage_configs", json.dumps([stage])]

    script, setup = small_setup(cascade_data, flags)
    torch.set_num_threads(2)
    data = load_data(script, setup, [[32, 32, 32]])
    setup.data = data
    setup.take_prior(None)
    batch = prepared_batch(data, [32, 32, 32], [0] * 4)

    model = script.build_model(0, setup.args, CPU)
    averaged = Ema(model, 0.99)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)

    # the same four copies of the volume in each step, at other noise
    kept = []
    for step in range(500):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * schedule(step, 500, 10, "cosine")
        draw = training_draw(0, batch | {"index": [0, 1, 2, 3]}, None, step, setup.diffusion)
        diffusion_loss, physics_loss = script.sample_losses(model, batch, draw, setup)
        (diffusion_loss + 0.3 * physics_loss).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        averaged.update(model, step + 1)
        kept.append(float(diffusion_loss.detach().mean()))

    cascade = Trained([averaged.model], ["stage1"], setup.diffusion, "no")
    patient = prepared_batch(data, [32, 32, 32], [0])
    volume = sample_cascade(cascade, patient, Sampling())[0]
    mse = (volume - batch["volume"][:1]).square().mean()
    psnr = float(10 * torch.log10(4 / mse))
    loss = np.mean(kept[-50:])
    print(f"v-prediction on one 32^3 volume: mean loss of the last 50 steps {loss:.4f}, PSNR {psnr:.2f} dB")
    assert loss < 0.05
    assert psnr > 30
