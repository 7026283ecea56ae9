"""The cascade's other formats: the HDF5 files of X2CT-GAN, a CT as a DICOM series, and the literature's own metrics."""

import json
import re
import shutil
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest
import torch
from conftest import ROOT, at_step, make_sample_data, records
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image

from old.cli_utils import InputError
from tasks.cascade.data import FLIPS, Decoded, Source, split_patients
from tasks.cascade.files import Patient, find_patients, read_ct, read_xray
from tasks.cascade.metrics import field_scores
from tasks.cascade.views import DEFAULT_VIEWS, LAT, PA

CASCADE = str(ROOT / "train_accelerate.py")
GRID = (8, 8, 8)
# What differs between two runs that compute the same.
TIMES = ("samples_per_s", "data_wait", "memory", "seconds", "mfu", "flops", "eta", "tflop")


@pytest.fixture(scope="session")
def lidc_data(zygote, tmp_path_factory) -> Path:
    """13 patients of 16^3 voxels in X2CT-GAN's layout: 10 train, 2 validate and 1 tests, by the two lists."""
    return make_sample_data(zygote, tmp_path_factory, "cascade", "--layout lidc --num_patients 13 --matrix 16")


@pytest.fixture
def small(lidc_data, tmp_path) -> Path:
    """A set that a test may spoil."""
    shutil.copytree(lidc_data, tmp_path / "set")
    return tmp_path / "set"


def on(folder: Path) -> list:
    """The flags of a set, and of the two lists that lie in it."""
    return ["--dataset_path", folder, "--split_files", folder / "train.txt", folder / "test.txt"]


def file_of(folder: Path, number: int = 3) -> Path:
    return folder / f"patient_{number:04d}" / "ct_xray_data.h5"


def datasets(file: Path) -> dict[str, np.ndarray]:
    """Everything that a file holds."""
    with h5py.File(file) as stored:
        return {name: stored[name][()] for name in stored}


def rewrite(file: Path, **changes) -> None:
    """Write a file anew with some datasets replaced, or left out where None."""
    contents = datasets(file) | changes
    file.unlink()
    with h5py.File(file, "w") as stored:
        for name, values in contents.items():
            if values is None:
                continue
            stored[name] = values


def load_source(folder: Path, cache: Path | None = None, **changes):
    """What a run makes of a set before its first step: files read, and X-rays compared with CTs."""
    values = {
        "dataset_path": str(folder),
        "views": DEFAULT_VIEWS,
        "split_seed": 42,
        "split_files": None,
        "skip_alignment_check": False,
        "img_size": 32,
        "flip_drrs_vertical": True,
        "flip_drrs_horizontal": "none",
        "cache_dir": str(cache) if cache else None,
        "cache_in_memory": False,
        "num_workers": 0,
    }
    return Source(**(values | changes)).load([GRID])


def computed(out: Path) -> list[dict]:
    """Every line of metrics.jsonl without times and memory."""
    lines = []
    for record in records(out):
        kept = {}
        for name, value in record.items():
            if not any(word in name for word in TIMES):
                kept[name] = value
        lines.append(kept)
    return lines


def same(one: list[dict], other: list[dict], within: float) -> None:
    """Whether two runs computed the same."""
    assert len(one) == len(other)
    for line, twin in zip(one, other, strict=True):
        assert line.keys() == twin.keys()
        steps = line.pop("steps", {})
        twin_steps = twin.pop("steps", {})
        assert steps.get("batch") == twin_steps.get("batch")
        for name, value in line.items():
            # the norm of a gradient near 0 is the least exact
            bound = 1e-3 if name == "train/grad_norm" and within else within
            assert value == pytest.approx(twin[name], rel=bound, abs=bound), (name, line["step"])


# --- the layout -------------------------------------------------------------------------------------------------------


def test_sample_data_has_the_layout(lidc_data):
    """Keys, types, ranges and lists; and each image is the sum of `ct` along an axis, as both lie in the file."""
    contents = datasets(file_of(lidc_data))
    assert contents["ct"].shape == (16, 16, 16)
    assert contents["ct"].dtype == np.int16
    assert contents["ct"].min() == 0
    assert 1200 < contents["ct"].max() <= 2500
    assert contents["ori_size"] * contents["spacing"] == pytest.approx([320] * 3)
    for name, axis in (("xray1", 1), ("xray2", 2)):
        image = contents[name]
        assert image.shape == (128, 128)
        assert image.max() == 255
        projection = contents["ct"].sum(axis)
        coarse = image.reshape(16, 8, 16, 8).mean((1, 3))
        agreement = np.corrcoef(projection.ravel(), coarse.ravel())[0, 1]
        mirrored = np.corrcoef(projection.ravel(), coarse[:, ::-1].ravel())[0, 1]
        assert agreement > max(0.985, mirrored)

    names = {split: (lidc_data / f"{split}.txt").read_text().split() for split in ("train", "test")}
    assert len(names["train"]) == 11
    assert sorted(names["train"] + names["test"]) == sorted(path.name for path in lidc_data.glob("patient_*"))


def test_axes_values_and_lengths(tmp_path):
    """The corner at the head, the front and the right is the last in RAS; HU + 1000; 320 mm unless the file says."""
    stored = np.arange(4 * 5 * 6).reshape(4, 5, 6).astype(np.int16) * 20
    file = tmp_path / "p" / "ct_xray_data.h5"
    file.parent.mkdir()
    with h5py.File(file, "w") as writing:
        writing["ct"] = stored
        writing["xray1"] = np.eye(8)
        writing["xray2"] = np.tri(8)

    hu, affine = read_ct(file / "ct")
    assert hu.shape == (6, 5, 4)
    for x, y, z in ((5, 4, 3), (0, 0, 0), (1, 2, 3)):
        assert hu[x, y, z] == stored[3 - z, 4 - y, 5 - x] - 1000
    assert np.diag(affine)[:3] == pytest.approx([320 / 6, 320 / 5, 320 / 4])
    middle = affine @ [2.5, 2, 1.5, 1]
    assert middle[:3] == pytest.approx([0, 0, 0])

    # of the voxels of `ct`, in the order of its axes; of those of another volume; as an attribute
    rewrite(file, spacing=[3.0, 2.0, 1.0])
    assert np.diag(read_ct(file / "ct")[1])[:3] == pytest.approx([1, 2, 3])
    rewrite(file, spacing=[1.0, 1.0, 1.0], ori_size=300)
    assert np.diag(read_ct(file / "ct")[1])[:3] == pytest.approx([50, 60, 75])
    rewrite(file, spacing=None, ori_size=None)
    with h5py.File(file, "a") as writing:
        writing["ct"].attrs["spacing"] = 2.0
    assert np.diag(read_ct(file / "ct")[1])[:3] == pytest.approx([2, 2, 2])

    # an image lies as a PNG does
    Image.fromarray((np.tri(8) * 255).astype(np.uint8)).save(tmp_path / "p_lat.png")
    expected = read_xray(tmp_path / "p_lat.png", 8, True, False)
    assert torch.equal(read_xray(file / "xray2", 8, True, False), expected)
    patient = find_patients(tmp_path, (PA, LAT))[0]
    assert patient.ct == file / "ct"
    assert patient.xrays[0] == file / "xray1"


def test_patients_side_by_side_and_single_view(lidc_data, tmp_path):
    for number in (1, 2):
        shutil.copy(file_of(lidc_data, number), tmp_path / f"case{number}_ct_xray_data.h5")
    patients = find_patients(tmp_path, (PA,))
    assert [patient.id for patient in patients] == ["case1", "case2"]
    rewrite(tmp_path / "case1_ct_xray_data.h5", xray2=None)
    decoded = Decoded(32, (PA,), FLIPS["none"])
    assert decoded.xrays(patients[0]).shape == (1, 32, 32)


def to_nifti(lidc: Path, out: Path) -> None:
    """The same patients as <id>.nii.gz and two PNGs, by what the layout is said to be."""
    for file in lidc.glob("*/*.h5"):
        name = file.parent.name
        folder = out / name
        folder.mkdir(parents=True)
        contents = datasets(file)
        # an affine that says how the axes run in the file: down, back and left
        affine = np.zeros((4, 4))
        affine[2, 0] = -320 / contents["ct"].shape[0]
        affine[1, 1] = -320 / contents["ct"].shape[1]
        affine[0, 2] = -320 / contents["ct"].shape[2]
        affine[3, 3] = 1
        nibabel.save(nibabel.Nifti1Image(contents["ct"] - 1000, affine), folder / f"{name}.nii.gz")
        Image.fromarray(contents["xray1"]).save(folder / f"{name}_pa.png")
        Image.fromarray(contents["xray2"]).save(folder / f"{name}_lat.png")


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(zygote, cascade_flags, lidc_data):
    """run(out, flags, ranks, code, ...): a small run on the HDF5 files, which must end with this exit code."""

    def run(out: Path, flags: list | tuple = (), ranks: int = 1, code: int = 0, **options):
        words = [*cascade_flags(out), *on(lidc_data), *flags]
        done = zygote(CASCADE, words, ranks=ranks, **options)
        assert done.code == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run


@pytest.fixture(scope="module")
def one(run, tmp_path_factory) -> Path:
    """A whole run in one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    done = run(out)
    # banner and table
    assert re.search(r"patients +10 train, 1 val, 2 test \(split files\)", done.stdout)
    assert re.search(r"psnr_0_2500 +ssim_0_2500", done.stdout)
    return out


def test_two_processes_compute_the_same(run, one, tmp_path):
    run(tmp_path / "run", ["--batch_size", "2"], ranks=2)
    same(computed(tmp_path / "run"), computed(one), within=1e-5)


def test_same_patients_as_nifti_and_png(run, one, lidc_data, tmp_path):
    to_nifti(lidc_data, tmp_path / "set")
    run(tmp_path / "run", ["--dataset_path", tmp_path / "set"])
    same(computed(tmp_path / "run"), computed(one), within=0)


def test_stop_and_resume_and_evaluate(run, one, tmp_path):
    out = tmp_path / "run"
    stopped = run(out, ["--save_every", "1"], code=143, interrupt=at_step(out, 4, "all", 15))
    assert "signal: saved at step" in stopped.stdout
    assert len(computed(out)) < len(computed(one))
    run(out, ["--save_every", "1", "--resume_from", "auto"])
    same(computed(out), computed(one), within=0)

    run(out, ["--eval_only"])
    results = json.loads((out / "eval_test.json").read_text())
    test = computed(one)[-1]
    for name in ("psnr", "psnr_0_2500", "ssim_0_2500", "psnr_mean_volume"):
        assert results[f"test/{name}"] == pytest.approx(test[f"test/{name}"], abs=1e-6)


def test_samples_of_files_without_a_ct(run, one, small):
    """--sample takes files with X-rays alone, and gives them the training patients' field of view."""
    for file in small.glob("*/*.h5"):
        if file.parent.name not in ("patient_0001", "patient_0002"):
            shutil.rmtree(file.parent)
    rewrite(file_of(small, 1), ct=None)
    run(one, ["--sample", small])
    for number in (1, 2):
        image = nibabel.load(one / "samples" / f"patient_{number:04d}.nii.gz")
        assert image.shape == (16, 16, 16)
        assert image.header.get_zooms() == pytest.approx([20] * 3)


# --- what is wrong ----------------------------------------------------------------------------------------------------


# What may be wrong with a dataset: its name, what becomes of its values (None: it is left out), what is said of it.
VALUES = {
    # which datasets there are
    "no ct": ("ct", lambda ct: None, r"no dataset 'ct' beside ori_size, .*xray1, xray2; add it"),
    "no xray1": ("xray1", lambda image: None, r"no dataset 'xray1' beside ct, .*; add it$"),
    "no xray2": ("xray2", lambda image: None, r"no dataset 'xray2' .*; add it, or .*--num_views 1$"),
    # the shape of a CT
    "flat ct": ("ct", lambda ct: ct[0], r"/ct: has the shape \(16, 16\), not that of a volume such as"),
    "four axes": ("ct", lambda ct: ct[None], r"/ct: has the shape \(1, 16, 16, 16\)"),
    "no voxels": ("ct", lambda ct: ct[:0], r"/ct: has the shape \(0, 16, 16\)"),
    "two slices": ("ct", lambda ct: ct[:2], r"/ct: only 16 x 16 x 2 voxels"),
    # its values
    "strings": ("ct", lambda ct: ct.astype("S5"), r"/ct: holds \|S5, not numbers; replace it"),
    "NaN": ("ct", lambda ct: np.where(ct == ct.max(), np.nan, ct), r"/ct: \d+ voxels are NaN or infinite; replace it"),
    "zeros": ("ct", np.zeros_like, r"/ct: holds one value everywhere; replace it"),
    "HU": ("ct", lambda ct: ct - 1000, r"/ct: its lowest value is -1000, and air should be 0; add 1000 to its HU"),
    "0 to 1": ("ct", lambda ct: ct / 2500, r"/ct: its highest value is 0\.\d+, .*; scale it to HU \+ 1000"),
    "65535": ("ct", lambda ct: ct * 26.0, r"/ct: its highest value is \d+; scale it to HU \+ 1000"),
    "no air": ("ct", lambda ct: ct + 900, r"/ct: its lowest value is -100, so it is not in HU"),
    # its lengths
    "length": ("spacing", lambda mm: -mm, r"data.h5: its spacing is \[.*\]; give one or three positive numbers"),
    "word": ("spacing", lambda mm: "one", r"data.h5/spacing: holds object, not numbers; replace it"),
    # the X-rays
    "even": ("xray1", np.ones_like, r"/xray1: one grey value everywhere; replace it"),
    "wide": ("xray2", lambda image: image[:64], r"/xray2: a picture of shape \(64, 128\); give a square one"),
    "colour": ("xray2", lambda image: image[..., None] + np.ones(3), r"/xray2: a picture of shape \(128, 128, 3\)"),
    "small": ("xray1", lambda image: image[:2, :2], r"/xray1: a picture of shape \(2, 2\) .*; give grey values in 2D"),
    "grey": ("xray1", lambda image: image * 9.0 - 300, r"/xray1: grey values from -300 to \d+; give 8 or 16 bits"),
    "NaN grey": ("xray2", lambda image: image * np.nan, r"/xray2: holds values that are NaN or infinite"),
}
# What may be wrong with a whole file: what becomes of its bytes, and what is said of it.
BYTES = {
    "truncated": (lambda data: data[:-3000], r"/ct: not a readable volume, truncated perhaps \(.*\); replace it"),
    "empty": (lambda data: b"", r"/ct: not a readable volume, truncated perhaps"),
    "text": (lambda data: b"ct" * 9000, r"/ct: not a readable volume, .*signature not found"),
}


def spoil_values(folder: Path, name: str, change, number: int = 3) -> None:
    file = file_of(folder, number)
    rewrite(file, **{name: change(datasets(file)[name])})


def spoil_bytes(folder: Path, change, number: int = 3) -> None:
    file = file_of(folder, number)
    file.write_bytes(change(file.read_bytes()))


def message_of(folder: Path) -> str:
    """What a run says of a set before its first step; empty where it goes on."""
    try:
        load_source(folder)
    except InputError as error:
        return str(error)
    return ""


def told(folder: Path, expected: str) -> None:
    """Whether a run ends with one line that names the third patient's file, and what is expected."""
    message = message_of(folder)
    assert "\n" not in message
    assert message.startswith(str(file_of(folder)))
    assert re.search(expected, message), message


@pytest.mark.parametrize(("name", "change", "expected"), VALUES.values(), ids=VALUES)
def test_bad_datasets(small, name, change, expected):
    spoil_values(small, name, change)
    told(small, expected)


@pytest.mark.parametrize(("change", "expected"), BYTES.values(), ids=BYTES)
def test_bad_files(small, change, expected):
    spoil_bytes(small, change)
    told(small, expected)


def test_a_file_that_is_not_there(small):
    """A link that leads nowhere, and a folder with the file's name: the patient is not left out in silence."""
    file = file_of(small)
    file.unlink()
    file.symlink_to(small / "moved.h5")
    told(small, r"/ct: not a readable volume")
    file.unlink()
    file.mkdir()
    told(small, r"/ct: not a readable volume")


def test_group_for_a_dataset(small):
    rewrite(file_of(small), xray1=None)
    with h5py.File(file_of(small), "a") as file:
        file.create_group("xray1")["x"] = np.zeros(3)
    told(small, r"/xray1: a group, not a dataset of numbers; replace it")


def spoil_two(folder: Path) -> None:
    spoil_bytes(folder, lambda data: b"")
    rewrite(file_of(folder, 5), xray2=None)


def spoil_list(folder: Path) -> None:
    (folder / "train.txt").write_text("patient_0004\npatient_0005\nLIDC-IDRI-0001.1\n")


SCRIPT = [
    (lambda f: rewrite(file_of(f), xray2=None), 1, r"data.h5: no dataset 'xray2' beside ct, .*; add it, or train on"),
    (spoil_two, 2, r"patient_000[35]/ct_xray_data.h5.*\(and 1 more patients with bad files\)$"),
    (spoil_list, 1, r"train.txt:3: no patient 'LIDC-IDRI-0001.1' in the data folder; remove the line"),
]


@pytest.mark.parametrize(("spoil", "ranks", "expected"), SCRIPT, ids=["one file", "two files", "list"])
def test_bad_files_end_the_script(zygote, cascade_flags, small, tmp_path, spoil, ranks, expected):
    """Exit code 2, one line, nothing written."""
    spoil(small)
    done = zygote(CASCADE, cascade_flags(tmp_path / "run"), on(small), ranks=ranks)
    assert done.code == 2, done.stderr[-2000:]
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(errors) == 1, done.stderr[-2000:]
    assert errors[0].startswith("error: ")
    assert re.search(expected, errors[0]), errors[0]
    assert not list((tmp_path / "run").glob("*.pt"))


def exchange_views(folder: Path) -> None:
    for file in folder.glob("*/*.h5"):
        contents = datasets(file)
        rewrite(file, xray1=contents["xray2"], xray2=contents["xray1"])


def turn(folder: Path, name: str, up: int, along: int) -> None:
    for file in folder.glob("*/*.h5"):
        rewrite(file, **{name: datasets(file)[name][::up, ::along]})


def another_s(folder: Path) -> None:
    rewrite(file_of(folder), xray1=datasets(file_of(folder, 5))["xray1"])


MISALIGNED = {
    "exchanged": (exchange_views, r"xray1: not a pa picture of .*/ct \(.*; it looks like the lat view|do not lie as"),
    "mirrored pa": (
        lambda f: turn(f, "xray1", 1, -1),
        r"the pa pictures do not lie .*; give --flip_drrs_horizontal pa$",
    ),
    "mirrored lat": (
        lambda f: turn(f, "xray2", 1, -1),
        r"the lat pictures do not .*; give --flip_drrs_horizontal lat$",
    ),
    "upside down": (lambda f: turn(f, "xray1", -1, 1), r"do not lie as .*; give --flip_drrs_vertical the other way$"),
    "another's": (
        another_s,
        r"patient_0003/ct_xray_data.h5/xray1: not a pa picture of .*patient_0003/ct_xray_data.h5/ct \(",
    ),
}


@pytest.mark.parametrize(("spoil", "expected"), MISALIGNED.values(), ids=MISALIGNED)
def test_misaligned_views_are_named(small, spoil, expected):
    assert message_of(small) == ""
    spoil(small)
    assert re.search(expected, message_of(small)), message_of(small)


# --- the cache, and the lists -----------------------------------------------------------------------------------------


def test_cache_tells_the_parts_of_a_file_apart(small, tmp_path):
    patient = find_patients(small, (PA, LAT))[2]
    fresh = Decoded(32, (PA, LAT), FLIPS["none"])
    for _ in range(2):
        decoded = Decoded(32, (PA, LAT), FLIPS["none"], str(tmp_path / "cache"))
        assert torch.equal(decoded.xrays(patient), fresh.xrays(patient))
        assert torch.equal(decoded.volume(patient.ct, GRID)[0], fresh.volume(patient.ct, GRID)[0])
    images = decoded.xrays(patient)
    assert not torch.equal(images[0], images[1])
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 3

    # a file that changes is read anew
    before = decoded.xrays(patient)
    rewrite(file_of(small), xray1=datasets(file_of(small))["xray1"] // 2)
    after = decoded.xrays(patient)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def made_up_patients(count: int) -> list[Patient]:
    return [Patient(f"p{number:02d}", None, ()) for number in range(count)]


def test_two_lists(tmp_path):
    """A tenth of the training list validates, whatever the order of its lines; the test list is as it stands."""
    patients = made_up_patients(30)
    names = [patient.id for patient in patients]
    train = tmp_path / "train.txt"
    test = tmp_path / "test.txt"
    test.write_text("\n".join(names[:5]))
    parts = []
    for order in (names[5:], names[:4:-1]):
        train.write_text("\n".join(order) + "\n")
        parts.append(split_patients(patients, 42, [str(train), str(test)]))
    assert parts[0] == parts[1]
    assert parts[0]["test"] == [0, 1, 2, 3, 4]
    assert len(parts[0]["val"]) == 2
    assert sorted(parts[0]["train"] + parts[0]["val"]) == list(range(5, 30))
    assert split_patients(patients, 43, [str(train), str(test)]) != parts[0]

    train.write_text("p20")
    with pytest.raises(InputError, match=r"train\.txt: names one patient; training and validation need at least 2"):
        split_patients(patients, 42, [str(train), str(test)])


@pytest.mark.parametrize("count", [1, 4])
def test_another_number_of_lists(zygote, cascade_flags, lidc_data, tmp_path, count):
    flags = ["--dataset_path", lidc_data, "--split_files", *["a.txt"] * count]
    done = zygote(CASCADE, cascade_flags(tmp_path / "run"), flags)
    assert done.code == 2
    assert f"--split_files: {count} files; give TRAIN VAL TEST, or TRAIN TEST" in done.stderr


# --- metrics ----------------------------------------------------------------------------------------------------------


def windows(image: np.ndarray) -> np.ndarray:
    """(number, 49): the pixels of each window of 7 x 7."""
    return sliding_window_view(image, (7, 7)).reshape(-1, 49)


def numpy_scores(volume: np.ndarray, true: np.ndarray) -> tuple[float, float]:
    """PSNR and slice-wise SSIM of two volumes (X, Y, Z) in HU, by the text of the documentation."""
    x = np.clip(volume.astype(np.float64) + 1000, 0, 2500)
    y = np.clip(true.astype(np.float64) + 1000, 0, 2500)
    psnr = 20 * np.log10(2500 / np.sqrt(((x - y) ** 2).mean()))

    # each slice along each axis
    means = []
    for axis in range(3):
        values = []
        for place in range(x.shape[axis]):
            a = windows(x.take(place, axis))
            b = windows(y.take(place, axis))
            mean_a = a.mean(1, keepdims=True)
            mean_b = b.mean(1, keepdims=True)
            covariance = ((a - mean_a) * (b - mean_b)).sum(1) / 48
            contrast = a.var(1, ddof=1) + b.var(1, ddof=1)
            luminance = (2 * mean_a * mean_b + 25**2) / (mean_a**2 + mean_b**2 + 25**2)
            structure = (2 * covariance + 75**2) / (contrast + 75**2)
            values.append((luminance[:, 0] * structure).mean())
        means.append(np.mean(values))
    return psnr, float(np.mean(means))


def test_field_scores_against_numpy():
    """Of volumes with three different sides; values beyond 0..2500 count as its ends."""
    generator = np.random.default_rng(4)
    true = generator.uniform(-1000, 3000, (2, 9, 12, 10))
    volume = true + generator.normal(0, 300, true.shape)
    volume = volume.clip(-1000, 3000)
    scaled = [torch.from_numpy((values + 1000) / 2000 - 1).float()[:, None] for values in (volume, true)]
    psnr, ssim = field_scores(scaled[0], scaled[1])
    for k in range(2):
        expected = numpy_scores(volume[k], true[k])
        assert float(psnr[k]) == pytest.approx(expected[0], abs=1e-4)
        assert float(ssim[k]) == pytest.approx(expected[1], abs=1e-5)

    # X2CT-GAN's evaluation has 4095 for the peak
    error = np.clip(volume[0] + 1000, 0, 2500) - np.clip(true[0] + 1000, 0, 2500)
    theirs = 20 * np.log10(4095 / np.sqrt((error**2).mean()))
    assert theirs - float(psnr[0]) == pytest.approx(4.286, abs=1e-3)

    # the same volume; and a grid too small for the window
    assert float(field_scores(scaled[1], scaled[1])[1][0]) == pytest.approx(1)
    tiny = [values[..., :4, :4, :4] for values in scaled]
    assert torch.isfinite(torch.stack(field_scores(tiny[0], tiny[1]))).all()


# --- DICOM ------------------------------------------------------------------------------------------------------------

# How the rows and columns of slices may run, as ImageOrientationPatient has it: axial, from both sides; coronal; and
# sagittal.
ORIENTATIONS = {
    "axial": [1, 0, 0, 0, 1, 0],
    "axial, prone": [-1, 0, 0, 0, -1, 0],
    "coronal": [1, 0, 0, 0, 0, -1],
    "sagittal": [0, 1, 0, 0, 0, -1],
}


def write_series(
    folder: Path,
    hu: np.ndarray,
    spacing: list[float],
    orientation: list[int],
    slope: float = 1.0,
) -> list[Path]:
    """A CT (X, Y, Z) in RAS with its first voxel at 5, -7, 11 mm, as slices named and numbered in the wrong order."""
    pydicom = pytest.importorskip("pydicom")
    row = np.array(orientation[:3])
    column = np.array(orientation[3:])
    normal = np.cross(row, column)
    signs = row + column + normal
    axes = []
    for direction in (normal, column, row):
        axes.append(int(np.abs(direction).argmax()))

    # DICOM's x and y run to the left and to the back
    turned = hu
    first = np.array([-5.0, 7.0, 11.0])
    for axis, ras in enumerate((-1, -1, 1)):
        if signs[axis] != ras:
            turned = np.flip(turned, axis)
            first[axis] += ras * spacing[axis] * (hu.shape[axis] - 1)
    slices = turned.transpose(axes)

    # one file each, the names in another order than the slices
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    series = pydicom.uid.generate_uid()
    for place, values in enumerate(slices):
        one = make_slice(values, slope, series)
        one.InstanceNumber = len(slices) - (place * 3) % len(slices)
        one.ImageOrientationPatient = orientation
        position = first + place * spacing[axes[0]] * normal
        one.ImagePositionPatient = position.round(6).tolist()
        one.PixelSpacing = [spacing[axes[1]], spacing[axes[2]]]
        number = (place * 7 + 3) % 101
        path = folder / f"{number:03d}.dcm"
        one.save_as(path, enforce_file_format=True)
        files.append(path)
    return files


def make_slice(values: np.ndarray, slope: float, series: str):
    """A slice (rows, columns) in HU without a place. What is stored times the slope, less 1024, are HU."""
    pydicom = pytest.importorskip("pydicom")
    one = pydicom.Dataset()
    one.file_meta = pydicom.dataset.FileMetaDataset()
    one.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    one.SOPClassUID = pydicom.uid.CTImageStorage
    one.SOPInstanceUID = pydicom.uid.generate_uid()
    one.SeriesInstanceUID = series
    one.Modality = "CT"

    # the pixels
    one.RescaleSlope = slope
    one.RescaleIntercept = -1024
    one.Rows = values.shape[0]
    one.Columns = values.shape[1]
    one.SamplesPerPixel = 1
    one.PhotometricInterpretation = "MONOCHROME2"
    one.BitsAllocated = 16
    one.BitsStored = 16
    one.HighBit = 15
    one.PixelRepresentation = 0
    stored = (values + 1024) / slope
    one.PixelData = stored.round().astype(np.uint16).tobytes()
    return one


def torso() -> np.ndarray:
    """Even HU, so that half of them can be stored."""
    hu = np.random.default_rng(2).integers(-512, 500, (6, 7, 8)) * 2
    hu[0, 0, 0] = -1024
    return hu.astype(np.float32)


SPACING = [2.5, 3.0, 4.0]


@pytest.mark.parametrize("orientation", ORIENTATIONS.values(), ids=ORIENTATIONS)
def test_dicom_is_the_same_as_nifti(tmp_path, orientation):
    """Whatever the order of files and numbers: HU by slope and intercept, axes, place and lengths."""
    hu = torso()
    write_series(tmp_path / "p" / "CT", hu, SPACING, orientation, slope=2.0)
    affine = np.diag([*SPACING, 1.0])
    affine[:3, 3] = [5, -7, 11]
    nibabel.save(nibabel.Nifti1Image(hu, affine), tmp_path / "same.nii.gz")

    patient = find_patients(tmp_path, ())[0]
    assert patient.ct == tmp_path / "p" / "CT"
    values, grid = read_ct(patient.ct)
    expected, expected_grid = read_ct(tmp_path / "same.nii.gz")
    assert np.array_equal(values, expected)
    assert np.array_equal(values, hu)
    assert grid == pytest.approx(expected_grid)


def test_tilted_axes_are_resampled_along_the_patient_s(tmp_path):
    """The same body scanned with axes turned by 12 degrees lies where it lies; by less than 1 nothing is changed."""

    def body(places: np.ndarray) -> np.ndarray:
        distance = np.linalg.norm(places, axis=-1)
        bump = np.exp(-((distance / 30) ** 2))
        slope = places[..., 0]
        return 500 * bump + slope - 1000

    def scan(degrees: float) -> tuple[np.ndarray, np.ndarray]:
        """(HU, affine) of the body in voxels of 2.5 mm, around the origin."""
        cosine = np.cos(np.radians(degrees))
        sine = np.sin(np.radians(degrees))
        affine = np.eye(4)
        affine[1, 1:3] = cosine, -sine
        affine[2, 1:3] = sine, cosine
        affine[:3] *= 2.5
        affine[:3, 3] = affine[:3, :3] @ np.full(3, -19.5)
        voxels = np.moveaxis(np.indices((40, 40, 40)), 0, -1)
        places = voxels @ affine[:3, :3].T + affine[:3, 3]

        hu = body(places).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(hu, affine), tmp_path / "p.nii")
        return hu, affine

    # a tilt that nobody sees
    hu, _ = scan(0.5)
    values, _ = read_ct(tmp_path / "p.nii")
    assert np.array_equal(values, hu)

    # each voxel holds what is at its place
    hu, affine = scan(12)
    values, grid = read_ct(tmp_path / "p.nii")
    assert grid[:3, :3] == pytest.approx(2.5 * np.eye(3))
    voxels = np.moveaxis(np.indices(values.shape), 0, -1)
    places = voxels @ grid[:3, :3].T + grid[:3, 3]
    in_the_scan = places @ affine[:3, :3] / 2.5
    inside = np.abs(in_the_scan).max(-1) < 45
    assert inside.sum() > 40_000
    errors = np.abs(values - body(places))
    assert errors[inside].max() < 3
    assert values[0, 0, 0] == -1000


def test_dicom_trains(zygote, cascade_flags, cascade_data, tmp_path):
    """Slices beside the X-rays, or in a folder of their own; X-rays rendered where missing; a changed slice is read."""
    folder = tmp_path / "set"
    shutil.copytree(cascade_data, folder)
    slices = {}
    for number in (1, 2):
        path = folder / f"patient_{number:04d}" / f"patient_{number:04d}.nii.gz"
        hu, affine = read_ct(path)
        path.unlink()
        series = path.parent / "series" if number == 2 else path.parent
        spacing = np.diag(affine)[:3].tolist()
        slices[number] = write_series(series, hu.clip(-1024), spacing, ORIENTATIONS["axial"])

    # two ranks render the missing image into the patient's own folder
    for number in (1, 2):
        (folder / f"patient_{number:04d}" / f"patient_{number:04d}_lat_drr.png").unlink()
    done = zygote(CASCADE, "--make_drrs", folder, ranks=2)
    assert "2 pictures rendered" in done.stdout, done.stderr
    for number in (1, 2):
        name = f"patient_{number:04d}/patient_{number:04d}_lat_drr.png"
        difference = np.asarray(Image.open(folder / name)).astype(int) - np.asarray(Image.open(cascade_data / name))
        assert np.abs(difference).max() <= 1

    done = zygote(CASCADE, cascade_flags(tmp_path / "run", "--dataset_path", folder, "--max_steps", "1"))
    assert done.code == 0, done.stderr[-2000:]

    # a changed slice
    decoded = Decoded(32, (PA, LAT), FLIPS["none"], str(tmp_path / "cache"))
    patient = find_patients(folder, (PA, LAT))[1]
    before = decoded.volume(patient.ct, GRID)[0].clone()
    content = bytearray(slices[2][3].read_bytes())
    content[-64:] = bytes(64)
    slices[2][3].write_bytes(content)
    assert not torch.equal(decoded.volume(patient.ct, GRID)[0], before)


def change(path: Path, **tags) -> None:
    """Write other values of some tags into a slice; None removes one."""
    pydicom = pytest.importorskip("pydicom")
    one = pydicom.dcmread(path)
    for tag, value in tags.items():
        if value is None:
            del one[tag]
        else:
            setattr(one, tag, value)
    one.save_as(path)


def tilt(files: list[Path]) -> None:
    for place, path in enumerate(files):
        change(path, ImagePositionPatient=[0, place * 1.5, place * 4.0])


# What may be wrong with tags of a slice, and what is said of it.
TAGS = {
    "uneven": ({"ImagePositionPatient": [-5, 7, 24]}, r"p: 5 mm between 017.dcm and 024.dcm, elsewhere 4; add the mis"),
    "two series": ({"SeriesInstanceUID": "1.2"}, r"p: slices of more than one series; give each a folder of its own"),
    "other size": ({"PixelSpacing": [2, 2]}, r"024.dcm: its PixelSpacing is not that of the other slices; remove it"),
    "no place": ({"ImagePositionPatient": None}, r"024.dcm: has no ImagePositionPatient; export the series anew"),
    "no pixels": ({"PixelData": None}, r"024.dcm: has no PixelData; export the series anew"),
    "frames": ({"NumberOfFrames": 3}, r"024.dcm: has several frames; convert it to NIfTI"),
    "an X-ray": ({"Modality": "DX"}, r"024.dcm: its modality is DX, not CT; move it elsewhere"),
}


def miss(files: list[Path]) -> None:
    files[3].unlink()


def keep_three(files: list[Path]) -> None:
    for path in files[3:]:
        path.unlink()


def double(files: list[Path]) -> None:
    shutil.copy(files[3], files[3].with_name("x.dcm"))


def write_text(files: list[Path]) -> None:
    files[3].write_text("x" * 500)


def truncate(files: list[Path]) -> None:
    files[3].write_bytes(files[3].read_bytes()[:-40])


def empty(files: list[Path]) -> None:
    files[3].write_bytes(b"")


def store_no_hu(files: list[Path]) -> None:
    for path in files:
        change(path, RescaleIntercept=1000)


SERIES = [
    (miss, r"p: 8 mm between 017.dcm and 031.dcm, elsewhere 4; add the missing slices, or resample it"),
    (double, r"p: 024.dcm and x.dcm lie at the same place; remove one"),
    (tilt, r"p: its slices are not above each other \(a tilted gantry\); resample it as NIfTI"),
    (keep_three, r"p: only 3 slices; a volume is needed"),
    (write_text, r"024.dcm: not a readable DICOM slice \(File is missing DICOM .*\); replace it"),
    (truncate, r"024.dcm: not a readable DICOM slice \(.*\); replace it"),
    (empty, r"024.dcm: not a readable DICOM slice \(.*\); replace it"),
    (store_no_hu, r"p: its lowest value is \d+, so it is not in HU"),
]


@pytest.fixture
def series(tmp_path) -> list[Path]:
    """The slices of a CT that can be read."""
    files = write_series(tmp_path / "p", torso(), SPACING, ORIENTATIONS["axial"])
    assert read_ct(find_patients(tmp_path, ())[0].ct)[0].shape == (6, 7, 8)
    return files


def told_of_series(folder: Path, expected: str) -> None:
    """Whether reading ends with one line that names folder or slice, and what is expected."""
    patient = find_patients(folder, ())[0]
    with pytest.raises(InputError) as error:
        read_ct(patient.ct)
    assert "\n" not in str(error.value)
    assert re.search(expected, str(error.value)), str(error.value)


@pytest.mark.parametrize(("tags", "expected"), TAGS.values(), ids=TAGS)
def test_bad_tags(series, tmp_path, tags, expected):
    change(series[3], **tags)
    told_of_series(tmp_path, expected)


@pytest.mark.parametrize(("spoil", "expected"), SERIES, ids=[spoil.__name__ for spoil, _ in SERIES])
def test_bad_series(series, tmp_path, spoil, expected):
    spoil(series)
    told_of_series(tmp_path, expected)


def test_two_series_are_told(tmp_path):
    write_series(tmp_path / "p" / "study" / "a", torso(), SPACING, ORIENTATIONS["axial"])
    write_series(tmp_path / "p" / "study" / "b", torso(), SPACING, ORIENTATIONS["axial"])
    with pytest.raises(InputError, match=r"study: a and b; keep one CT per patient"):
        find_patients(tmp_path, ())
