"""train_accelerate.py: what a user can get wrong ends with exit code 2 and one line, nothing written."""

import json
import re
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL_STAGES, tree
from PIL import Image

from cli_utils import InputError

CASCADE = str(ROOT / "train_accelerate.py")


@pytest.fixture
def small(cascade_data, tmp_path) -> Path:
    """A set that a test may spoil."""
    shutil.copytree(cascade_data, tmp_path / "set")
    return tmp_path / "set"


def kept(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in tree(folder).items() if not name.startswith("cache/")}


def fails(zygote, folder: Path, *flags, expect: str, ranks: int = 1, alone: bool = False) -> None:
    """Runs, and checks code, the one line, and that no file but a cache appears or changes."""
    words = [
        "--dataset_path",
        folder,
        "--checkpoint_dir",
        folder.parent / "run",
        "--cache_dir",
        folder.parent / "cache",
    ]
    words += ["--stage_configs", json.dumps(SMALL_STAGES), "--img_size", "32", "--encoder_dim", "16"]
    words += ["--num_timesteps", "20", "--ddim_steps", "2", "--num_workers", "0", "--max_steps", "1"]
    before = kept(folder.parent)
    done = zygote(CASCADE, *([] if alone else words), *flags, ranks=ranks)
    assert done.code == 2, (done.code, done.stdout[-500:], done.stderr[-1500:])
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(errors) == 1, done.stderr[-1500:]
    assert errors[0].startswith("error: ")
    assert re.search(expect, errors[0]), errors[0]
    assert kept(folder.parent) == before


def ct(folder: Path, number: int = 3) -> Path:
    return folder / f"patient_{number:04d}" / f"patient_{number:04d}.nii.gz"


def drr(folder: Path, view: str, number: int = 3) -> Path:
    return folder / f"patient_{number:04d}" / f"patient_{number:04d}_{view}_drr.png"


def save(path: Path, values: np.ndarray, affine=None) -> None:
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4) * 10 if affine is None else affine), path)


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
    a, b, spare = drr(folder, "lat", 3), drr(folder, "lat", 7), folder / "spare"
    a.rename(spare), b.rename(a), spare.rename(b)


def views_exchanged(folder):
    a, b, spare = drr(folder, "lat"), drr(folder, "pa"), folder / "spare"
    a.rename(spare), b.rename(a), spare.rename(b)


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
    for path in sorted(folder.iterdir())[2:]:
        shutil.rmtree(path)


FILES = [
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
    (no_picture, r"patient_0003_lat_drr.png: not a readable picture"),
    (colour, r"patient_0003_pa_drr.npy: a picture of shape \(8, 8, 3\)"),
    (black, r"patient_0003_pa_drr.png: one grey value everywhere"),
    (odd_values, r"patient_0003_pa_drr.npy: grey values from -500 to 700"),
    (nan_picture, r"patient_0003_lat_drr.npy: holds values that are NaN"),
    (without_lateral, r"patient_0003: no lat picture \(patient_0003_lat_drr.png\); .*--make_drrs .*--num_views 1"),
    (without_frontal, r"patient_0003: no pa picture \(patient_0003_pa_drr.png\); add it, render it with --make_drrs"),
    (without_ct, r"patient_0003: no CT \(patient_0003.nii.gz\) beside patient_0003_lat_drr.png"),
    (two_cts, r"patient_0003.nii(.gz)? and patient_0003.nii(.gz)?; keep one CT per patient"),
    (two_laterals, r"patient_0003_lat_drr.png and patient_0003_lateral.png; keep one lat picture"),
    (somebody_else_s, r"patient_0003_pa_drr.png: not a pa picture of .*; it fits the CT of patient_0007 \((0.9|1.0)"),
    (swapped, r"patient_0003_lat_drr.png: not a lat .*patient_0007 .*\(2 patients: patient_0003, patient_0007\)"),
    (views_exchanged, r"patient_0003_pa_drr.png: not a pa picture of .*; it looks like the lat view"),
    (upside_down, r"the (pa|lat) pictures do not lie as the CTs do .*; give --flip_drrs_vertical the other way$"),
    (mirrored, r"the pa pictures do not lie as the CTs do .*; give --flip_drrs_horizontal pa"),
    (empty, r"set: holds no patients \(<id>/<id>.nii.gz\); check --dataset_path"),
    (gone, r"set: no such folder; check --dataset_path"),
    (two_patients, r"2 patients; training, validation and test need at least 3"),
]


@pytest.mark.parametrize(("spoil", "message"), FILES, ids=[spoil.__name__ for spoil, _ in FILES])
def test_bad_files(small, zygote, spoil, message):
    spoil(small)
    fails(zygote, small, expect=message)


def test_a_bad_file_on_two_ranks_and_several_at_once(small, zygote):
    torn(small)
    ct(small, 5).write_bytes(b"")
    fails(zygote, small, expect=r"patient_000[35].nii.gz: .*\(and 1 more patients with bad files\)", ranks=2)


@pytest.mark.soak
def test_what_the_messages_say_works(small, zygote, tmp_path):
    """Flipped pictures with the flag; a missing lateral view with one view, or rendered; a mismatch let pass."""
    words = [
        "--stage_configs",
        json.dumps(SMALL_STAGES[:1]),
        "--img_size",
        "32",
        "--encoder_dim",
        "16",
        "--max_steps",
        "1",
    ]
    words += ["--num_timesteps", "20", "--ddim_steps", "2", "--num_workers", "0", "--dataset_path", str(small)]

    def run(name: str, *more):
        done = zygote(CASCADE, *words, "--checkpoint_dir", tmp_path / name, "--cache_dir", tmp_path / "cache", *more)
        assert done.code == 0, done.stderr[-2000:]
        return json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]).get("train/loss")

    whole = {path: path.read_bytes() for path in small.glob("*/*")}
    right = run("right", "--log_every", "1")
    upside_down(small)
    assert run("flipped", "--no-flip_drrs_vertical", "--log_every", "1") == right
    for path, content in whole.items():
        path.write_bytes(content)
    mirrored(small)
    assert run("mirrored", "--flip_drrs_horizontal", "pa", "--log_every", "1") == right
    for path, content in whole.items():
        path.write_bytes(content)
    lateral = drr(small, "lat").read_bytes()
    without_lateral(small)
    run("single", "--num_views", "1")
    done = zygote(CASCADE, "--make_drrs", small, ranks=2)
    assert "1 pictures rendered" in done.stdout, done.stderr
    assert drr(small, "lat").read_bytes() == lateral
    somebody_else_s(small)
    run("skipped", "--skip_alignment_check")


# --- flags and config -------------------------------------------------------------------------------------------------


def stages(**changes) -> str:
    return json.dumps([SMALL_STAGES[0], SMALL_STAGES[1] | changes])


FLAGS = [
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
    (["--stage", "3"], r"--stage 3: there are 1 to 2 \(stage1, stage2\)"),
    (["--stage", "1", "--eval_only"], r"--stage is for training; name the stage's checkpoint with --resume_from"),
    (["--make_drrs", "nowhere"], r"nowhere: no such folder; check --make_drrs"),
    (["--ddim_steps", "3"], r"--ddim_steps 3: must divide --num_timesteps 20; nearest 2"),
    (["--num_views", "3"], r"invalid choice: '?3'?"),
    (["--img_size", "100"], r"--img_size 100: must be a multiple of 8"),
    (["--encoder_dim", "20"], r"--encoder_dim 20: must be a multiple of 16"),
    (["--mixed_precision", "fp16"], r"--mixed_precision fp16: needs a GPU"),
    (["--lerning_rate", "1"], r"unknown argument '--lerning_rate', nearest is --learning_rate"),
    (["--resume_from", "none.pt"], r"none.pt: no such checkpoint"),
    (["--eval_only"], r"run/best.pt: no such checkpoint"),
    (["--eval_only", "--sample", "x"], r"--eval_only and --sample exclude each other"),
    (["--overwrite", "--resume_from", "auto"], r"--overwrite starts afresh and excludes"),
    (["--split_files", "a", "b", "c"], r"a: cannot be read"),
    (["--config", "none.json"], r"none.json: cannot read the config"),
]


@pytest.mark.parametrize(("flags", "message"), FLAGS, ids=[" ".join(flags)[-60:] for flags, _ in FLAGS])
def test_bad_flags(cascade_data, zygote, tmp_path, flags, message):
    (tmp_path / "set").symlink_to(cascade_data)
    fails(zygote, tmp_path / "set", *flags, expect=message)


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
def test_bad_configs(cascade_data, zygote, tmp_path, config, message):
    path = tmp_path / "c.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    (tmp_path / "set").symlink_to(cascade_data)
    fails(zygote, tmp_path / "set", "--config", path, expect=rf"c.json:? ?.*{message}", alone=True)


def test_split_files(cascade_data, zygote, tmp_path):
    (tmp_path / "set").symlink_to(cascade_data)
    names = sorted(path.name for path in cascade_data.iterdir())
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.txt")]

    def write(*parts):
        for path, part in zip(files, parts, strict=True):
            Path(path).write_text("\n".join(part) + "\n")

    write(names[:9], ["nobody"], names[11:])
    fails(zygote, tmp_path / "set", "--split_files", *files, expect=r"b.txt:1: no patient 'nobody' in the data folder")
    write(names[:9], [names[9], names[2]], names[11:])
    fails(zygote, tmp_path / "set", "--split_files", *files, expect=r"b.txt:2: patient \w+ is in .*a.txt:3 already")
    write(names[:9], [], names[11:])
    fails(zygote, tmp_path / "set", "--split_files", *files, expect=r"b.txt: names no patient")


def test_checkpoint_of_another_run(cascade_data, zygote, tmp_path, one_small):
    (tmp_path / "set").symlink_to(cascade_data)
    run = one_small
    again = ["--resume_from", run / "last.pt"]
    fails(zygote, tmp_path / "set", *again, "--batch_size", "3", expect=r"a run with effective batch size 8, now 3")
    fails(zygote, tmp_path / "set", *again, "--seed", "5", expect=r"a run with seed 0, now 5; give the same again")
    fails(zygote, tmp_path / "set", *again, "--num_views", "1", expect=r"a run with --num_views 2, now 1; leave it out")
    other = json.dumps([SMALL_STAGES[0] | {"voxel_dim": 32}, SMALL_STAGES[1]])
    fails(zygote, tmp_path / "set", *again, "--stage_configs", other, expect=r"stage 1 was trained with voxel_dim 16")
    fails(zygote, tmp_path / "set", *again, "--split_seed", "1", expect=r"a run with --split_seed 42, now 1")
    names = sorted(path.name for path in cascade_data.iterdir())
    for k, part in enumerate((names[:8], names[8:10], names[10:])):
        (tmp_path / f"{k}.txt").write_text("\n".join(part))
    split = [tmp_path / f"{k}.txt" for k in range(3)]
    fails(zygote, tmp_path / "set", *again, "--split_files", *split, expect=r"a run with training data \w+, now")
    (tmp_path / "other.pt").write_bytes(b"x")
    fails(zygote, tmp_path / "set", "--resume_from", tmp_path / "other.pt", expect=r"not a readable checkpoint")
    torch.save({"format": "prs_med/1", "step": 1, "rng": []}, tmp_path / "foreign.pt")
    fails(zygote, tmp_path / "set", "--resume_from", tmp_path / "foreign.pt", expect=r"checkpoint of prs_med/1")
    fails(
        zygote, tmp_path / "set", "--checkpoint_dir", run, expect=r"holds a run already; go on with --resume_from auto"
    )


@pytest.fixture(scope="module")
def one_small(cascade_data, zygote, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    words = [
        "--dataset_path",
        cascade_data,
        "--checkpoint_dir",
        out,
        "--cache_dir",
        out.parent / "cache",
        "--max_steps",
        "1",
    ]
    words += ["--stage_configs", json.dumps(SMALL_STAGES), "--img_size", "32", "--encoder_dim", "16"]
    words += ["--num_timesteps", "20", "--ddim_steps", "2", "--num_workers", "0"]
    done = zygote(CASCADE, *words)
    assert done.code == 0, done.stderr[-2000:]
    return out


def test_accelerate_config_of_another_kind(cascade_data, zygote, tmp_path):
    words = ["--dataset_path", cascade_data, "--checkpoint_dir", tmp_path / "run"]
    done = zygote(CASCADE, *words, ACCELERATE_USE_DEEPSPEED="true")
    assert done.code == 2
    assert done.stderr.startswith("error: accelerate config: DEEPSPEED is not supported here; choose multi-GPU")


def asymmetric_crops(count: int):
    """(patients, line integrals, grey values -1..1), the last two (count, views, 32, 32): crops of one side of a chest.

    Dense on one side, air on the other, so that a mirrored picture looks like a negative.
    """
    from tasks.cascade import projector as drr
    from tasks.cascade.files import Patient

    noise = np.random.default_rng(5)
    slope = np.linspace(-900, 300, 20)
    integrals = []
    for _ in range(count):
        hu = slope[:, None, None] + 0.8 * slope[None, :, None] + 0.3 * slope[None, None]
        hu = hu + 250 * drr.resize(torch.from_numpy(noise.standard_normal((5, 5, 5))), (20, 20, 20)).numpy()
        volume = drr.normalise(torch.from_numpy(hu))[None, None]
        spacing = torch.full((1, 3), 5.0)
        projections = [drr.resize(drr.project(volume, spacing, view), (32, 32))[0, 0] for view in drr.VIEWS]
        integrals.append(torch.stack(projections).numpy())
    integrals = np.stack(integrals)
    patients = []
    for k in range(count):
        xrays = Path(f"p{k}_pa.png"), Path(f"p{k}_lat.png")
        patients.append(Patient(f"p{k}", Path(f"p{k}.nii.gz"), xrays))
    return patients, integrals, drr.grey_values(torch.from_numpy(integrals)).numpy() * 2 - 1


@pytest.mark.parametrize("count", [3, 12])
def test_mirrored_and_negative_pictures_of_asymmetric_crops(count):
    """Sign and turn are chosen together, so that each combination is told by the flag that mends it."""
    from tasks.cascade.alignment import check_alignment
    from tasks.cascade.projector import VIEWS

    patients, integrals, pictures = asymmetric_crops(count)
    for k, view in enumerate(VIEWS):
        mirrored = f"--flip_drrs_horizontal {view}"
        flags = {(1, 1): "", (1, -1): mirrored, (-1, 1): "--flip_drrs_vertical the other way"}
        flags[-1, -1] = f"--flip_drrs_vertical the other way and {mirrored}"
        for sign in (1, -1):
            for (up, along), flag in flags.items():
                turned = pictures.copy()
                turned[:, k] = turned[:, k, ::up, ::along]
                try:
                    check_alignment(patients, integrals, sign * turned)
                    message = ""
                except InputError as error:
                    message = str(error)
                case = f"{count} patients, {view}, sign {sign}, turn {up} {along}: {message}"
                assert message.endswith(f"; give {flag}" if flag else ""), case
                assert f"the {view} pictures do not lie" in message if flag else not message, case


def test_a_single_mirrored_picture_of_an_asymmetric_crop():
    from tasks.cascade.alignment import check_alignment

    patients, integrals, pictures = asymmetric_crops(12)
    pictures[4, 0] = pictures[4, 0, :, ::-1]
    with pytest.raises(InputError, match=r"p4_pa\.png: not a pa picture of p4\.nii\.gz .*; mirrored it fits \(1\.00\)"):
        check_alignment(patients, integrals, pictures)


def test_layout_with_every_alias(cascade_data, tmp_path):
    """.nii, .npy and files without folders; _pa, _frontal, _lat, _lateral; 16-bit and float pictures: the same set."""
    from tasks.cascade.data import FLIPS, Decoded
    from tasks.cascade.files import find_patients, read_ct

    (tmp_path / "set").mkdir()
    names = ["patient_0001", "patient_0002", "patient_0003", "patient_0004"]
    for k, name in enumerate(names):
        folder = tmp_path / "set" / name if k < 3 else tmp_path / "set"
        folder.mkdir(exist_ok=True)
        hu, affine = read_ct(cascade_data / name / f"{name}.nii.gz")
        pictures = [np.asarray(Image.open(cascade_data / name / f"{name}_{view}_drr.png")) for view in ("pa", "lat")]
        if k == 0:
            save(folder / f"{name}.nii", hu.astype(np.int16), affine)
            for picture, alias in zip(pictures, ("pa", "lat"), strict=True):
                Image.fromarray(picture.astype(np.uint16) * 257).save(folder / f"{name}_{alias}.png")
        elif k == 1:
            np.save(folder / f"{name}.npy", hu)
            for picture, alias in zip(pictures, ("frontal", "lateral"), strict=True):
                np.save(folder / f"{name}_{alias}.npy", picture.astype(np.float32) / 127.5 - 1)
        elif k == 2:
            save(folder / "scan.nii.gz", hu.astype(np.int16), affine)
            for picture, alias in zip(pictures, ("pa_drr", "lat_drr"), strict=True):
                np.save(folder / f"{name}_{alias}.npy", picture)
        else:
            save(folder / f"{name}.nii.gz", hu.astype(np.int16), affine)
            for picture, alias in zip(pictures, ("Frontal", "LATERAL"), strict=True):
                Image.fromarray(picture).save(folder / f"{name}_{alias}.png")
    found, expected = find_patients(tmp_path / "set", 2), find_patients(cascade_data, 2)[:4]
    assert [patient.id for patient in found] == names
    decoded = Decoded(32, FLIPS["none"], None)
    for a, b in zip(found, expected, strict=True):
        assert (decoded.xrays(a).int() - decoded.xrays(b).int()).abs().max() <= 1
        volume, extent = decoded.volume(a.ct, (8, 8, 8))
        other, other_extent = decoded.volume(b.ct, (8, 8, 8))
        assert torch.equal(volume, other)
        if a.id != "patient_0002":  # a .npy has no affine
            assert torch.allclose(extent, other_extent)


def test_a_damaged_cache_is_read_anew(cascade_data, tmp_path):
    from tasks.cascade.data import FLIPS, Decoded
    from tasks.cascade.files import find_patients

    patient = find_patients(cascade_data, 2)[0]
    decoded = Decoded(32, FLIPS["none"], str(tmp_path / "cache"))
    expected = decoded.volume(patient.ct, (16, 16, 16))[0].clone()
    path = max((tmp_path / "cache").glob("*.bin"), key=lambda kept: kept.stat().st_size)
    assert path.stat().st_size == 12 + 2 * 16**3 + 4
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    assert torch.equal(decoded.volume(patient.ct, (16, 16, 16))[0], expected)
    path.write_bytes(content[:30])
    assert torch.equal(decoded.volume(patient.ct, (16, 16, 16))[0], expected)
