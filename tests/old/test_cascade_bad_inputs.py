"""train_accelerate.py: what a user can get wrong ends with exit code 2 and one line, nothing written."""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL_STAGES, tree
from PIL import Image

from old.cli_utils import InputError
from tasks.cascade.alignment import check_alignment
from tasks.cascade.data import FLIPS, Decoded
from tasks.cascade.files import Patient, find_patients, read_ct
from tasks.cascade.projector import VIEWS, grey_values, normalise, project, resize
from tasks.cascade.views import LAT, PA

CASCADE = str(ROOT / "train_accelerate.py")


SMALL_MODEL = ["--img_size", "32", "--encoder_dim", "16", "--num_timesteps", "20", "--ddim_steps", "2"]


def words_of(folder: Path, run_folder: Path, cache: Path, stages: list[dict]) -> list:
    """The arguments of one step of a small run."""
    words = ["--dataset_path", folder, "--checkpoint_dir", run_folder, "--cache_dir", cache]
    words += ["--stage_configs", json.dumps(stages), "--num_workers", "0", "--max_steps", "1"]
    return words + SMALL_MODEL


@pytest.fixture
def small(cascade_data, tmp_path) -> Path:
    """A set that a test may spoil."""
    shutil.copytree(cascade_data, tmp_path / "set")
    return tmp_path / "set"


@pytest.fixture
def linked(cascade_data, tmp_path) -> Path:
    """A set that no test may spoil."""
    (tmp_path / "set").symlink_to(cascade_data)
    return tmp_path / "set"


def kept(folder: Path) -> dict[str, str]:
    """Every file but those of the cache."""
    return {name: digest for name, digest in tree(folder).items() if not name.startswith("cache/")}


@pytest.fixture(scope="session")
def start(zygote):
    """start(words, ranks, NAME=value ...): the script with these arguments."""
    return lambda words, ranks=1, **environment: zygote(CASCADE, *words, ranks=ranks, **environment)


@pytest.fixture(scope="session")
def fails(start):
    """fails(folder, flags, expect, ranks): checks code, the one line, and that no file but a cache changes."""

    def run(folder: Path, flags=(), expect: str = "", ranks: int = 1, alone: bool = False) -> None:
        root = folder.parent
        words = [] if alone else words_of(folder, root / "run", root / "cache", SMALL_STAGES)
        before = kept(root)
        done = start([*words, *flags], ranks)
        assert done.code == 2, (done.code, done.stdout[-500:], done.stderr[-1500:])
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        assert len(errors) == 1, done.stderr[-1500:]
        assert errors[0].startswith("error: ")
        assert re.search(expect, errors[0]), errors[0]
        assert kept(root) == before

    return run


def ct(folder: Path, number: int = 3) -> Path:
    return folder / f"patient_{number:04d}" / f"patient_{number:04d}.nii.gz"


def drr(folder: Path, view: str, number: int = 3) -> Path:
    return folder / f"patient_{number:04d}" / f"patient_{number:04d}_{view}_drr.png"


def save(path: Path, values: np.ndarray, affine=None) -> None:
    if affine is None:
        affine = np.eye(4) * 10
    nibabel.save(nibabel.Nifti1Image(values, affine), path)


def exchange(one: Path, other: Path) -> None:
    """Let two files change places."""
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


# --- files ------------------------------------------------------------------------------------------------------------


def torn(folder):
    path = ct(folder)
    path.write_bytes(path.read_bytes()[:-200])


def without_voxels(folder):
    save(ct(folder), np.zeros((16, 0, 14), np.int16))


def two_dimensional(folder):
    save(ct(folder), np.zeros((16, 16), np.int16))


def four_dimensional(folder):
    save(ct(folder), np.zeros((8, 8, 8, 2), np.int16))


def not_a_number(folder):
    values = nibabel.load(ct(folder)).get_fdata().astype(np.float32)
    values[2, 2, 2] = np.nan
    save(ct(folder), values)


def not_hu(folder):
    save(ct(folder), (nibabel.load(ct(folder)).get_fdata() + 1024).astype(np.int16))


def uniform(folder):
    save(ct(folder), np.full((9, 9, 9), -1000, np.int16))


def thin(folder):
    save(ct(folder), nibabel.load(ct(folder)).get_fdata()[:, :, :2].astype(np.int16))


def flat_affine(folder):
    image = nibabel.load(ct(folder))
    image.header["pixdim"][1:4] = 1
    save(ct(folder), image.get_fdata().astype(np.int16), np.diag([1e-6, 1, 1, 1]))


def pickled(folder):
    np.save(ct(folder).with_name("patient_0003.npy"), np.array([{"a": 1}], dtype=object), allow_pickle=True)
    ct(folder).unlink()


def no_picture(folder):
    drr(folder, "lat").write_text("not a picture")


def colour(folder):
    np.save(drr(folder, "pa").with_suffix(".npy"), np.zeros((8, 8, 3)))
    drr(folder, "pa").unlink()


def black(folder):
    Image.fromarray(np.zeros((64, 64), np.uint8)).save(drr(folder, "pa"))


def odd_values(folder):
    np.save(drr(folder, "pa").with_suffix(".npy"), np.linspace(-500, 700, 64).reshape(8, 8))
    drr(folder, "pa").unlink()


def nan_picture(folder):
    np.save(drr(folder, "lat").with_suffix(".npy"), np.full((8, 8), np.nan))
    drr(folder, "lat").unlink()


def without_lateral(folder):
    drr(folder, "lat").unlink()


def without_frontal(folder):
    drr(folder, "pa").unlink()


def without_ct(folder):
    ct(folder).unlink()


def two_cts(folder):
    shutil.copy(ct(folder, 4), ct(folder).with_name("patient_0003.nii"))


def two_laterals(folder):
    shutil.copy(drr(folder, "lat"), drr(folder, "lat").with_name("patient_0003_lateral.png"))


def somebody_else_s(folder):
    shutil.copy(drr(folder, "pa", 7), drr(folder, "pa"))


def swapped(folder):
    exchange(drr(folder, "lat", 3), drr(folder, "lat", 7))


def views_exchanged(folder):
    exchange(drr(folder, "lat"), drr(folder, "pa"))


def upside_down(folder):
    for path in folder.glob("*/*_drr.png"):
        Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)


def mirrored(folder):
    for path in folder.glob("*/*_pa_drr.png"):
        Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def gone(folder):
    shutil.rmtree(folder)


def two_patients(folder):
    for path in sorted(folder.glob("patient_*"))[2:]:
        shutil.rmtree(path)


FILES = [
    # the CT
    (torn, r"patient_0003.nii.gz: not a readable volume, truncated perhaps \(.*\); replace it"),
    (two_dimensional, r"patient_0003.nii.gz: has 2 dimensions \(16, 16\), not three; replace it"),
    (four_dimensional, r"patient_0003.nii.gz: has 4 dimensions"),
    (not_a_number, r"patient_0003.nii.gz: 1 voxels are NaN or infinite"),
    (not_hu, r"patient_0003.nii.gz: its lowest value is -?\d+, so it is not in HU \(air is -1000\); convert it"),
    (without_voxels, r"patient_0003.nii.gz: has no voxels: its shape is \(16, 0, 14\); replace it"),
    (uniform, r"patient_0003.nii.gz: holds one value everywhere"),
    (thin, r"patient_0003.nii.gz: only .* x 2 voxels"),
    (flat_affine, r"patient_0003.nii.gz: voxels of \[.*\] mm; correct its affine"),
    (pickled, r"patient_0003.npy: not a readable volume"),
    # the X-rays
    (no_picture, r"patient_0003_lat_drr.png: not a readable picture"),
    (colour, r"patient_0003_pa_drr.npy: a picture of shape \(8, 8, 3\)"),
    (black, r"patient_0003_pa_drr.png: one grey value everywhere"),
    (odd_values, r"patient_0003_pa_drr.npy: grey values from -500 to 700"),
    (nan_picture, r"patient_0003_lat_drr.npy: holds values that are NaN"),
    # which files there are
    (without_lateral, r"patient_0003: no lat picture \(patient_0003_lat_drr.png\); .*--make_drrs .*--num_views 1"),
    (without_frontal, r"patient_0003: no pa picture \(patient_0003_pa_drr.png\); add it, render it with --make_drrs"),
    (without_ct, r"patient_0003: no CT \(patient_0003.nii.gz\) beside patient_0003_lat_drr.png"),
    (two_cts, r"patient_0003.nii(.gz)? and patient_0003.nii(.gz)?; keep one CT per patient"),
    (two_laterals, r"patient_0003_lat_drr.png and patient_0003_lateral.png; keep one lat picture"),
    # whose they are, and how they lie
    (somebody_else_s, r"patient_0003_pa_drr.png: not a pa picture of .*; it fits the CT of patient_0007 \((0.9|1.0)"),
    (swapped, r"patient_0003_lat_drr.png: not a lat .*patient_0007 .*\(2 patients: patient_0003, patient_0007\)"),
    (views_exchanged, r"patient_0003_pa_drr.png: not a pa picture of .*; it looks like the lat view"),
    (upside_down, r"the (pa|lat) pictures do not lie as the CTs do .*; give --flip_drrs_vertical the other way$"),
    (mirrored, r"the pa pictures do not lie as the CTs do .*; give --flip_drrs_horizontal pa"),
    # the whole set
    (empty, r"set: holds no patients \(<id>/<id>.nii.gz\); check --dataset_path"),
    (gone, r"set: no such folder; check --dataset_path"),
    (two_patients, r"2 patients; training, validation and test need at least 3"),
]


@pytest.mark.parametrize(("spoil", "message"), FILES, ids=[spoil.__name__ for spoil, _ in FILES])
def test_bad_files(small, fails, spoil, message):
    spoil(small)
    fails(small, expect=message)


def test_a_bad_file_on_two_ranks_and_several_at_once(small, fails):
    torn(small)
    ct(small, 5).write_bytes(b"")
    fails(small, expect=r"patient_000[35].nii.gz: .*\(and 1 more patients with bad files\)", ranks=2)


@pytest.mark.soak
def test_what_the_messages_say_works(small, start, tmp_path):
    """Flipped images with the flag; a missing lateral view with one view, or rendered; a mismatch let pass."""

    def run(name: str, flags: list[str]) -> float | None:
        words = words_of(small, tmp_path / name, tmp_path / "cache", SMALL_STAGES[:1])
        done = start([*words, *flags])
        assert done.code == 0, done.stderr[-2000:]
        return json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]).get("train/loss")

    def restore() -> None:
        for path, content in whole.items():
            path.write_bytes(content)

    # images that lie otherwise
    whole = {path: path.read_bytes() for path in small.glob("*/*")}
    log = ["--log_every", "1"]
    right = run("right", log)
    upside_down(small)
    assert run("flipped", ["--no-flip_drrs_vertical", *log]) == right
    restore()
    mirrored(small)
    assert run("mirrored", ["--flip_drrs_horizontal", "pa", *log]) == right
    restore()

    # a missing image
    lateral = drr(small, "lat").read_bytes()
    without_lateral(small)
    run("single", ["--num_views", "1"])
    done = start(["--make_drrs", small], ranks=2)
    assert "1 pictures rendered" in done.stdout, done.stderr
    assert drr(small, "lat").read_bytes() == lateral

    # another's image
    somebody_else_s(small)
    run("skipped", ["--skip_alignment_check"])


# --- flags and config -------------------------------------------------------------------------------------------------


def stages(**changes) -> str:
    return json.dumps([SMALL_STAGES[0], SMALL_STAGES[1] | changes])


FLAGS = [
    # the stages
    (["--stage_configs", "[1"], r"--stage_configs: not valid JSON"),
    (["--stage_configs", "[]"], r"--stage_configs: must be a list of at least one stage"),
    (["--stage_configs", stages(volume_size=[8, 8, 8])], r"stage 2: volume_size \[8, 8, 8\] must be larger than the"),
    (["--stage_configs", stages(volume_size=[16, 16])], r"volume_size \[16, 16\] must be three whole numbers"),
    (["--stage_configs", stages(volume_size=[18] * 3)], r"must be multiples of 8 \(token_grid 4\), 18 is not; take 16"),
    (["--stage_configs", stages(voxel_dims=8)], r"stage 2: unknown key 'voxel_dims', did you mean 'voxel_dim'"),
    (["--stage_configs", stages(num_heads=3)], r"voxel_dim 16 must be a multiple of 8 and of twice num_heads"),
    (["--stage_configs", stages(batch_size=0)], r"stage 2: batch_size 0 must be a whole number of at least 1"),
    (["--stage_configs", stages(vit_depth="4")], r"stage 2: vit_depth '4' must be a whole number"),
    (["--stage_configs", stages(physics_weight=-1)], r"stage 2: physics_weight -1 must be a number of at least 0"),
    (["--stage_configs", stages(name="stage1")], r"stage 2: the name 'stage1' is taken"),
    (["--stage_configs", stages(name="../x")], r"stage 2: name '../x' must be of letters"),
    # what does not go together, or is not there
    (["--stage", "3"], r"--stage 3: there are 1 to 2 \(stage1, stage2\)"),
    (["--stage", "1", "--eval_only"], r"--stage is for training; name the stage's checkpoint with --resume_from"),
    (["--make_drrs", "nowhere"], r"nowhere: no such folder; check --make_drrs"),
    (["--ddim_steps", "3"], r"--ddim_steps 3: must divide --num_timesteps 20; nearest 2"),
    (["--num_samples", "0"], r"--num_samples: .*at least 1"),
    (["--regression", "--num_samples", "2"], r"--num_samples: a regression gives one volume; leave it out"),
    (["--regression", "--no-v_parameterization"], r"--regression: the noise of one step is not predicted; leave out"),
    (["--regression", "--physics_weight", "1"], r"--physics_weight: counts by the share of signal"),
    (["--regression", "--regression_run", "x"], r"--regression_run: stands beside a cascade's test; leave it out"),
    (["--num_views", "1", "--flip_drrs_horizontal", "lat"], r"--flip_drrs_horizontal lat: there is no such view"),
    (
        ["--regression_run", "nowhere"],
        r"nowhere/summary.json: not read \(No such file or directory\); --regression_run",
    ),
    # a value that a flag does not take, and a flag that does not exist
    (["--num_views", "3"], r"invalid choice: '?3'?"),
    (["--img_size", "100"], r"--img_size 100: must be a multiple of 8"),
    (["--encoder_dim", "20"], r"--encoder_dim 20: must be a multiple of 16"),
    (["--mixed_precision", "fp16"], r"--mixed_precision fp16: needs a GPU"),
    (["--lerning_rate", "1"], r"unknown argument '--lerning_rate', nearest is --learning_rate"),
    # checkpoints, run folders and files
    (["--resume_from", "none.pt"], r"none.pt: no such checkpoint"),
    (["--eval_only"], r"run/best.pt: no such checkpoint"),
    (["--eval_only", "--sample", "x"], r"--eval_only and --sample exclude each other"),
    (["--overwrite", "--resume_from", "auto"], r"--overwrite starts afresh and excludes"),
    (["--split_files", "a", "b", "c"], r"a: cannot be read"),
    (["--config", "none.json"], r"none.json: cannot read the config"),
]


@pytest.mark.parametrize(("flags", "message"), FLAGS, ids=[" ".join(flags)[-60:] for flags, _ in FLAGS])
def test_bad_flags(linked, fails, flags, message):
    fails(linked, flags, message)


CONFIGS = [
    ({"training": {"batch_siz": 8}}, r"unknown key 'batch_siz' in training; did you mean 'batch_size'\?"),
    ({"trainin": {"batch_size": 8}}, r"unknown key 'trainin'; did you mean 'training'\?"),
    ({"training": 8}, r"training: must be a section of keys, not 8"),
    ({"training": {"batch_size": "8x"}}, r"batch_size: must be a whole number of at least 1, not '8x'"),
    ({"training": {"v_parameterization": "yes"}}, r"v_parameterization: must be true or false, not 'yes'"),
    ({"training": {"mixed_precision": "fp8"}}, r"mixed_precision: 'fp8' is not one of auto, no, bf16, fp16"),
    ({"training": {"seed": 1}, "seed": 2}, r"seed is given twice; remove one"),
    ({"data": {"num_views": 2}}, r"unknown key 'num_views' in data"),
    ({"stage_configs": {"name": "x"}}, r"stage_configs: must be a list of at least one stage"),
    ({"stage_configs": [{"volume_size": [8, 8, 8], "voxel_dimm": 8}]}, r"stage_configs: stage 1: unknown key"),
    ('{"training": {"batch_size": 8,}}', r":1: not valid JSON"),
    ('{\n// so\n"training": {"batch_size" 8}}', r":3: not valid JSON"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=[str(config)[:50] for config, _ in CONFIGS])
def test_bad_configs(linked, fails, tmp_path, config, message):
    path = tmp_path / "c.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    fails(linked, ["--config", path], rf"c.json:? ?.*{message}", alone=True)


def write_split(folder: Path, parts: list[list[str]]) -> list[Path]:
    """Three text files of patient ids."""
    files = [folder / name for name in ("a.txt", "b.txt", "c.txt")]
    for path, part in zip(files, parts, strict=True):
        path.write_text("\n".join(part) + "\n")
    return files


def test_split_files(linked, fails, tmp_path):
    names = sorted(path.name for path in linked.glob("patient_*"))
    cases = [
        (["nobody"], r"b.txt:1: no patient 'nobody' in the data folder"),
        ([names[9], names[2]], r"b.txt:2: patient \w+ is in .*a.txt:3 already"),
        ([], r"b.txt: names no patient"),
    ]
    for second, message in cases:
        files = write_split(tmp_path, [names[:9], second, names[11:]])
        fails(linked, ["--split_files", *files], message)


@pytest.fixture(scope="module")
def one_small(cascade_data, start, tmp_path_factory) -> Path:
    """A run of one step."""
    out = tmp_path_factory.mktemp("one") / "run"
    done = start(words_of(cascade_data, out, out.parent / "cache", SMALL_STAGES))
    assert done.code == 0, done.stderr[-2000:]
    return out


def test_checkpoint_of_another_run(linked, fails, tmp_path, one_small):
    names = sorted(path.name for path in linked.glob("patient_*"))
    files = write_split(tmp_path, [names[:8], names[8:10], names[10:]])
    other = json.dumps([SMALL_STAGES[0] | {"voxel_dim": 32}, SMALL_STAGES[1]])
    cases = [
        (["--batch_size", "3"], r"a run with effective batch size 8, now 3"),
        (["--seed", "5"], r"a run with seed 0, now 5; give the same again"),
        (["--num_views", "1"], r"a run with --num_views 2, now 1; leave it out"),
        (["--stage_configs", other], r"stage 1 was trained with voxel_dim 16"),
        (["--split_seed", "1"], r"a run with --split_seed 42, now 1"),
        (["--split_files", *files], r"a run with training data \w+, now"),
    ]
    for flags, message in cases:
        fails(linked, ["--resume_from", one_small / "last.pt", *flags], message)

    # files that are no checkpoints of this script
    (tmp_path / "other.pt").write_bytes(b"x")
    fails(linked, ["--resume_from", tmp_path / "other.pt"], r"not a readable checkpoint")
    torch.save({"format": "prs_med/1", "step": 1, "rng": []}, tmp_path / "foreign.pt")
    fails(linked, ["--resume_from", tmp_path / "foreign.pt"], r"checkpoint of prs_med/1")
    fails(linked, ["--checkpoint_dir", one_small], r"holds a run already; go on with --resume_from auto")


def test_accelerate_config_of_another_kind(cascade_data, start, tmp_path):
    words = ["--dataset_path", cascade_data, "--checkpoint_dir", tmp_path / "run"]
    done = start(words, ACCELERATE_USE_DEEPSPEED="true")
    assert done.code == 2
    assert done.stderr.startswith("error: accelerate config: DEEPSPEED is not supported here; choose multi-GPU")


class Crops(NamedTuple):
    """Patients, and (count, views, 32, 32) line integrals and grey values -1..1 of their X-rays."""

    patients: list[Patient]
    integrals: np.ndarray
    images: np.ndarray


def asymmetric_crops(count: int) -> Crops:
    """Crops of one side of a chest: dense on one side, air on the other. A mirrored image is like a negative."""
    noise = np.random.default_rng(5)
    slope = np.linspace(-900, 300, 20)
    integrals = []
    for _ in range(count):
        hu = slope[:, None, None] + 0.8 * slope[None, :, None] + 0.3 * slope[None, None]
        grain = torch.from_numpy(noise.standard_normal((5, 5, 5)))
        hu = hu + 250 * resize(grain, (20, 20, 20)).numpy()
        volume = normalise(torch.from_numpy(hu))[None, None]
        spacing = torch.full((1, 3), 5.0)
        projections = [resize(project(volume, spacing, view), (32, 32))[0, 0] for view in VIEWS]
        integrals.append(torch.stack(projections).numpy())

    patients = []
    for k in range(count):
        xrays = (Path(f"p{k}_pa.png"), Path(f"p{k}_lat.png"))
        patients.append(Patient(f"p{k}", Path(f"p{k}.nii.gz"), xrays))
    integrals = np.stack(integrals)
    images = grey_values(torch.from_numpy(integrals)).numpy() * 2 - 1
    return Crops(patients, integrals, images)


def alignment_error(crops: Crops, images: np.ndarray) -> str:
    """What the check says of these images, empty where they fit."""
    try:
        check_alignment(crops.patients, crops.integrals, images, (PA, LAT))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("count", [3, 12])
def test_mirrored_and_negative_pictures_of_asymmetric_crops(count):
    """Sign and turn are chosen together, so that each combination is told by the flag that mends it."""
    crops = asymmetric_crops(count)
    for k, view in enumerate(VIEWS):
        mirrored = f"--flip_drrs_horizontal {view}"
        flags = {
            (1, 1): "",
            (1, -1): mirrored,
            (-1, 1): "--flip_drrs_vertical the other way",
            (-1, -1): f"--flip_drrs_vertical the other way and {mirrored}",
        }

        for sign, (turn, flag) in itertools.product((1, -1), flags.items()):
            up, along = turn
            turned = crops.images.copy()
            turned[:, k] = turned[:, k, ::up, ::along]
            message = alignment_error(crops, sign * turned)
            case = f"{count} patients, {view}, sign {sign}, turn {turn}: {message}"
            assert message.endswith(f"; give {flag}" if flag else ""), case
            assert f"the {view} pictures do not lie" in message if flag else not message, case


def test_a_single_mirrored_picture_of_an_asymmetric_crop():
    crops = asymmetric_crops(12)
    crops.images[4, 0] = crops.images[4, 0, :, ::-1]
    expected = r"p4_pa\.png: not a pa picture of p4\.nii\.gz .*; mirrored it fits \(1\.00\)"
    assert re.search(expected, alignment_error(crops, crops.images))


def nearly_symmetric(count: int) -> Crops:
    """Patients that look much the same upside down and mirrored."""
    crops = asymmetric_crops(count)
    mean = crops.integrals.mean(0)
    symmetric = (mean + mean[:, ::-1] + mean[:, :, ::-1] + mean[:, ::-1, ::-1]) / 4
    integrals = symmetric + 0.15 * (crops.integrals - mean)
    images = grey_values(torch.from_numpy(integrals)).numpy() * 2 - 1
    return Crops(crops.patients, integrals, images)


def test_all_pictures_of_nearly_symmetric_patients_upside_down():
    crops = nearly_symmetric(12)
    assert alignment_error(crops, crops.images) == ""
    turned = crops.images[:, :, ::-1].copy()
    assert alignment_error(crops, turned).endswith("; give --flip_drrs_vertical the other way")


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda image: image[::-1], r"upside down it fits \(1\.00\)"),
        (lambda image: image[:, ::-1], r"mirrored it fits \(1\.00\)"),
        (lambda image: image[::-1, ::-1], r"turned by 180 degrees it fits \(1\.00\)"),
        (lambda image: -image, r"\(correlation -1\.00\); as a negative it fits \(1\.00\)"),
    ],
    ids=["upside-down", "mirrored", "by-180", "negative"],
)
def test_one_picture_of_nearly_symmetric_patients(change, expected, count):
    """What is wrong with it is said, though it looks much like what it should be."""
    crops = nearly_symmetric(count)
    changed = crops.images.copy()
    changed[1, 1] = change(changed[1, 1])
    assert re.search(r"p1_lat\.png: not a lat picture of p1\.nii\.gz .*" + expected, alignment_error(crops, changed))


def test_real_x_rays_that_fit_only_roughly_are_taken():
    """Scatter, another posture, and grey values that do not follow a straight line."""
    crops = nearly_symmetric(12)
    noise = np.random.default_rng(3).standard_normal(crops.images.shape)
    rough = np.tanh(2 * crops.images) + 0.3 * crops.images.std() * noise
    assert alignment_error(crops, rough) == ""


def as_nifti(folder: Path, name: str, hu: np.ndarray, affine: np.ndarray, images: dict) -> None:
    """.nii, and 16-bit images named _pa and _lat."""
    save(folder / f"{name}.nii", hu.astype(np.int16), affine)
    for view, image in images.items():
        Image.fromarray(image.astype(np.uint16) * 257).save(folder / f"{name}_{view}.png")


def as_numpy(folder: Path, name: str, hu: np.ndarray, affine: np.ndarray, images: dict) -> None:
    """.npy without an affine, and images of floats named _frontal and _lateral."""
    np.save(folder / f"{name}.npy", hu)
    for view, alias in (("pa", "frontal"), ("lat", "lateral")):
        np.save(folder / f"{name}_{alias}.npy", images[view].astype(np.float32) / 127.5 - 1)


def as_scan(folder: Path, name: str, hu: np.ndarray, affine: np.ndarray, images: dict) -> None:
    """A CT of another name, and images as .npy."""
    save(folder / "scan.nii.gz", hu.astype(np.int16), affine)
    for view, image in images.items():
        np.save(folder / f"{name}_{view}_drr.npy", image)


def as_capitals(folder: Path, name: str, hu: np.ndarray, affine: np.ndarray, images: dict) -> None:
    """Images named _Frontal and _LATERAL."""
    save(folder / f"{name}.nii.gz", hu.astype(np.int16), affine)
    for view, alias in (("pa", "Frontal"), ("lat", "LATERAL")):
        Image.fromarray(images[view]).save(folder / f"{name}_{alias}.png")


def test_layout_with_every_alias(cascade_data, tmp_path):
    """.nii, .npy and files without folders; _pa, _frontal, _lat, _lateral; 16-bit and float images: the same set."""
    root = tmp_path / "set"
    root.mkdir()
    expected = find_patients(cascade_data, (PA, LAT))[:4]
    names = [patient.id for patient in expected]
    assert names == ["patient_0001", "patient_0002", "patient_0003", "patient_0004"]
    for patient, write in zip(expected, (as_nifti, as_numpy, as_scan, as_capitals), strict=True):
        # the last one's files lie beside the others' folders
        folder = root if write is as_capitals else root / patient.id
        folder.mkdir(exist_ok=True)
        hu, affine = read_ct(patient.ct)
        images = {view: np.asarray(Image.open(path)) for view, path in zip(VIEWS, patient.xrays, strict=True)}
        write(folder, patient.id, hu, affine, images)

    aliased = find_patients(root, (PA, LAT))
    assert [patient.id for patient in aliased] == names
    decoded = Decoded(32, (PA, LAT), FLIPS["none"], None)
    for patient, original in zip(aliased, expected, strict=True):
        assert (decoded.xrays(patient).int() - decoded.xrays(original).int()).abs().max() <= 1
        volume, extent = decoded.volume(patient.ct, (8, 8, 8))
        original_volume, original_extent = decoded.volume(original.ct, (8, 8, 8))
        assert torch.equal(volume, original_volume)
        # a .npy has no affine
        if patient.id != "patient_0002":
            assert torch.allclose(extent, original_extent)


def test_a_damaged_cache_is_read_anew(cascade_data, tmp_path):
    patient = find_patients(cascade_data, (PA, LAT))[0]
    decoded = Decoded(32, (PA, LAT), FLIPS["none"], str(tmp_path / "cache"))
    expected = decoded.volume(patient.ct, (16, 16, 16))[0].clone()
    path = max((tmp_path / "cache").glob("*.bin"), key=lambda kept: kept.stat().st_size)
    assert path.stat().st_size == 12 + 2 * 16**3 + 4

    # a flipped bit, and a truncated file
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    assert torch.equal(decoded.volume(patient.ct, (16, 16, 16))[0], expected)
    path.write_bytes(content[:30])
    assert torch.equal(decoded.volume(patient.ct, (16, 16, 16))[0], expected)
