"""tasks/survival/data.py: tables, folds, clinical columns, volumes and the smart cache; the sample data."""

import gzip
import math
import re
from pathlib import Path

import nibabel
import numpy as np
import pandas as pd
import pytest
import torch

import distributed_utils as du
from tasks.survival import data, sample_data
from tasks.survival.data import MultiGPUSurvivalDataset, Volumes, choose_fold, encode_columns, fit_columns, read_cohort
from utils.cli import InputError


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Sample data of 24 patients."""
    folder = tmp_path_factory.mktemp("data") / "survival"
    sample_data.write_sample_data(folder, 24, event_rate=0.5, matrix=16, seed=0)
    return folder


@pytest.fixture
def table(made) -> pd.DataFrame:
    """Its table, as text."""
    return pd.read_csv(made / "dataset.csv", dtype=str, keep_default_na=False)


@pytest.fixture
def read(made, tmp_path):
    """read(table, ...): the cohort of a table, written beside nothing else."""

    def write(table: pd.DataFrame, name: str = "dataset.csv", sep: str = ",", **options) -> data.Cohort:
        table.to_csv(tmp_path / name, index=False, sep=sep)
        return read_cohort(tmp_path / name, str(made), **options)

    return write


def save_volume(path: Path, values: np.ndarray, affine: np.ndarray | None = None) -> str:
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine), path)
    return str(path)


# --- the table --------------------------------------------------------------------------------------------------------


def test_names_units_separators_and_blanks(read, table):
    days = read(table)
    assert len(days) == 24
    assert np.allclose(days.time, table["time"].astype(float) / 365.25, rtol=1e-12)
    other = table.rename(columns={"case_num": "MRN", "NIFTI Path": "Image_Path", "time": "Months", "event": "dead"})
    other["Months"] = (table["time"].astype(float) / 365.25 * 12).astype(str)
    months = read(other, sep=";", time_unit="months", time_column="months", event_column="Dead")
    assert np.allclose(months.time, days.time)
    assert months.case.tolist() == days.case.tolist()
    assert months.path == days.path
    assert np.array_equal(months.event, days.event)
    new = table.assign(time="NA", event="")
    unknown = read(new, outcome=False)
    assert np.isnan(unknown.time).all()
    assert not unknown.event.any()


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("time", "", "time '' days"),
        ("time", "-3", "time '-3' days"),
        ("time", "inf", "time 'inf' days"),
        ("time", "99999", "must be 0 to 120 years, .* see --time_unit"),
        ("event", "2", "event '2': must be"),
        ("event", "yes", "event 'yes': must be"),
        ("NIFTI Path", "", "no path in column 'nifti path'"),
        ("NIFTI Path", "../../etc/x.nii", "lies outside .*; give the folder that holds it with --data_dir"),
    ],
)
def test_a_bad_row_is_named(read, table, tmp_path, column, value, message):
    table.loc[2, column] = value
    with pytest.raises(InputError, match=rf"{re.escape(str(tmp_path))}/dataset.csv:4: .*{message}"):
        read(table)


def test_missing_columns_are_named(read, table):
    with pytest.raises(InputError, match="dataset.csv:1: no column 'NIFTI Path' or .*; add or rename it"):
        read(table.rename(columns={"NIFTI Path": "file"}))
    with pytest.raises(InputError, match="no column 'scan'"):
        read(table, path_column="scan")
    with pytest.raises(InputError, match=r"no column 'heart_mas' \(did you mean 'heart_mask'"):
        read(table, mask_column="heart_mas")


def test_absolute_paths_of_the_users_own_table(read, table, made):
    table["NIFTI Path"] = str(made) + "/" + table["NIFTI Path"]
    assert read(table).path[0] == str(made / "scans/case_00001.nii.gz")


# --- folds ------------------------------------------------------------------------------------------------------------


def test_made_folds_are_disjoint_cover_all_and_spread_the_events(read, table):
    table["case_num"] = [str(row // 2) for row in range(24)]
    cohort = read(table)
    seen = []
    for fold in "123":
        train, val = choose_fold(cohort, "Fold_1", "train", fold, 3, seed=5)
        assert not set(cohort.case[train]) & set(cohort.case[val])
        assert len(train) + len(val) == 24
        seen += val.tolist()
        events = pd.Series(cohort.event[val]).groupby(cohort.case[val]).any().sum()
        assert abs(events - pd.Series(cohort.event).groupby(cohort.case).any().sum() / 3) < 1
    assert sorted(seen) == list(range(24))


def test_made_folds_leave_out_what_a_column_holds_out(read, table):
    table["Fold_1"] = ["test"] * 6 + ["train"] * 18
    seen = [choose_fold(read(table), "Fold_1", "train", fold, 3, 0) for fold in "123"]
    assert sorted(row for _, val in seen for row in val) == list(range(6, 24))
    assert all(min(train) >= 6 for train, _ in seen)


def test_labels_of_a_fold_column(read, table):
    train, val = choose_fold(read(table), "Fold_2", "train", None, 0, 0)
    assert val.tolist() == np.flatnonzero(table["Fold_2"] == "val").tolist()
    assert len(train) == 24 - len(val)
    # numbers, as spreadsheets write them; what is held out does not train
    table["fold"] = ["1.0", "2.0", "2.0", "3.0", "test", ""] * 4
    train, val = choose_fold(read(table), "fold", "train", "1", 0, 0)
    assert val.tolist() == list(range(0, 24, 6))
    assert set(table["fold"][train]) == {"2.0", "3.0"}


def test_folds_that_cannot_be_learned_on(read, table):
    with pytest.raises(InputError, match="0 rows in the validation fold.*check --fold_column"):
        choose_fold(read(table), "Fold_1", "train", "test", 0, 0)
    with pytest.raises(InputError, match=r"no column 'Fold_9' \(did you mean"):
        choose_fold(read(table), "Fold_9", "train", "val", 0, 0)
    twice = table.copy()
    twice.loc[0, "case_num"], twice.loc[1, "case_num"] = "77", "77"
    twice.loc[0, "Fold_1"], twice.loc[1, "Fold_1"] = "train", "val"
    with pytest.raises(InputError, match="case 77 is in the training and the validation fold"):
        choose_fold(read(twice), "Fold_1", "train", "val", 0, 0)
    twice.loc[1, "case_num"], twice.loc[1, "NIFTI Path"] = "78", twice.loc[0, "NIFTI Path"]
    with pytest.raises(InputError, match="volume .* is in the training and the validation fold"):
        choose_fold(read(twice), "Fold_1", "train", "val", 0, 0)
    with pytest.raises(InputError, match="no event before the last"):
        choose_fold(read(table.assign(event="0")), "Fold_1", "train", "val", 0, 0)


# --- clinical columns -------------------------------------------------------------------------------------------------


def test_columns_by_hand(read, table):
    table = table.iloc[:6].assign(age=["50", "60", "", "70", "1000", "x"], stage=["I", "II", "NA", "I", "III", "II"])
    rows = np.arange(4)
    cohort = read(table.iloc[:5])
    columns = fit_columns(cohort, ["Age", "stage"], rows)
    sd = math.sqrt(200 / 3)
    expected = [
        [-10 / sd, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 1, 0, 0, 0, 1],
        [10 / sd, 0, 1, 0, 0, 0],
        [940 / sd, 0, 0, 0, 1, 0],
    ]
    assert np.allclose(encode_columns(cohort, columns), expected, atol=1e-6)
    with pytest.raises(InputError, match=r"dataset.csv:7: age 'x' is no number, as it is in training"):
        encode_columns(read(table), columns)
    with pytest.raises(InputError, match="no column 'stage'; the model needs it"):
        encode_columns(read(table.iloc[:5].drop(columns="stage")), columns)
    with pytest.raises(InputError, match=r"dataset.csv:7: age 'x' is no number, as most are; correct it"):
        fit_columns(read(table), ["age"], np.arange(6))
    assert fit_columns(read(table.assign(age="0.1")), ["age"], np.arange(6))[0]["sd"] == 1
    with pytest.raises(InputError, match="--clinical_columns age: blank in all training rows"):
        fit_columns(cohort, ["age"], np.array([2]))


def test_validation_rows_leak_nothing(read, table):
    """Whatever they hold, the scaler, the levels and the numbers of the training rows stay the same to the bit."""
    cohort = read(table)
    train, val = choose_fold(cohort, "Fold_1", "train", "val", 0, 0)
    columns = fit_columns(cohort, ["Age", "Sex"], train)
    table.loc[val, "Age"], table.loc[val, "Sex"] = "1e6", "other"
    table.loc[val, "time"], table.loc[val, "event"] = [str(day) for day in range(1, len(val) + 1)], "1"
    changed = read(table)
    assert fit_columns(changed, ["Age", "Sex"], train) == columns
    before, after = encode_columns(cohort, columns), encode_columns(changed, columns)
    assert np.array_equal(before[train], after[train])
    assert not np.array_equal(before[val], after[val])


# --- volumes ----------------------------------------------------------------------------------------------------------


def test_window_order_spacing_and_orientation(tmp_path):
    noise = np.random.default_rng(0)
    values = noise.integers(-1200, 1200, (8, 10, 12)).astype(np.int16)
    path = save_volume(tmp_path / "a.nii.gz", values, np.diag([-2.0, 1, 3, 1]))
    plain = Volumes(image_size=(8, 10, 12)).load(path)
    assert plain.dtype == torch.float16
    assert np.allclose(plain[0], np.clip((values + 1000) / 2000, 0, 1), atol=1e-3)
    window = Volumes(image_size=(8, 10, 12), hu_window=(0, 100)).load(path)
    assert np.allclose(window[0], np.clip(values / 100, 0, 1), atol=1e-3)
    turned = Volumes(image_size=(8, 10, 12), orientation="RAS").load(path)
    assert torch.equal(turned, plain.flip(1))
    # from the first voxel's centre to the last's: 9 mm along y by steps of 2, 33 mm along z by steps of 1
    volume = Volumes(spacing=(2.0, 2.0, 1.0))._open(path, "bilinear")
    assert tuple(volume.shape) == (1, 8, 6, 34)
    assert volume.pixdim.tolist() == pytest.approx([2, 2, 1])


def test_means_where_an_axis_shrinks_and_lines_where_it_grows():
    volume = torch.arange(4.0).expand(1, 2, 2, 4)
    assert torch.equal(data.resize(volume, (2, 2, 2))[0, 0, 0], torch.tensor([0.5, 2.5]))
    grown = data.resize(volume, (2, 2, 8))[0, 0, 0]
    assert torch.allclose(grown, torch.tensor([0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]))


def test_a_last_axis_of_one_and_volumes_that_are_none(tmp_path):
    values = np.arange(96, dtype=np.float32).reshape(4, 4, 6)
    volumes = Volumes(image_size=(4, 4, 6), hu_window=(0, 100))
    flat, four = (
        volumes.load(save_volume(tmp_path / f"{values.ndim}.nii.gz", values)) for values in (values, values[..., None])
    )
    assert torch.equal(flat, four)
    bad = {
        "flat": (np.ones((4, 4)), r"has shape \(4, 4\), not one volume"),
        "series": (np.random.default_rng(0).random((4, 4, 6, 2)), "has shape .*, not one volume"),
        "constant": (np.zeros((4, 4, 6)), "one value everywhere"),
        "nan": (np.full((4, 4, 6), np.nan), "not finite"),
    }
    for name, (wrong, message) in bad.items():
        path = save_volume(tmp_path / f"{name}.nii.gz", wrong.astype(np.float32))
        with pytest.raises(ValueError, match=message):
            volumes.load(path)


def test_a_dicom_series(tmp_path):
    """By MONAI's reader: HU by slope and intercept, slices in their order in space."""
    import pydicom
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    values = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    series, study = generate_uid(), generate_uid()
    # the files' names say nothing
    for z, name in zip(range(3), "bca", strict=True):
        file = pydicom.Dataset()
        file.SOPClassUID, file.SOPInstanceUID = CTImageStorage, generate_uid()
        file.SeriesInstanceUID, file.StudyInstanceUID, file.Modality = series, study, "CT"
        file.Rows, file.Columns, file.InstanceNumber = 4, 5, z + 1
        file.ImagePositionPatient, file.ImageOrientationPatient = [0, 0, 2.5 * z], [1, 0, 0, 0, 1, 0]
        file.PixelSpacing, file.SliceThickness = [0.5, 0.5], 2.5
        file.RescaleSlope, file.RescaleIntercept = 2, -1000
        file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
        file.BitsAllocated = file.BitsStored = 16
        file.HighBit, file.PixelRepresentation = 15, 1
        file.PixelData = values[z].tobytes()
        file.file_meta = pydicom.dataset.FileMetaDataset()
        file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        file.save_as(tmp_path / f"{name}.dcm", enforce_file_format=True)
    volume = Volumes()._open(str(tmp_path), "bilinear")
    assert sorted(volume.shape) == [1, 3, 4, 5]
    assert volume.pixdim.tolist() == pytest.approx([0.5, 0.5, 2.5])
    assert np.array_equal(volume.numpy()[0], 2.0 * values.transpose(2, 1, 0) - 1000)


def test_a_mask_crops_with_its_margin_or_becomes_a_channel(tmp_path):
    noise = np.random.default_rng(0)
    values = noise.integers(-900, 900, (20, 20, 20)).astype(np.int16)
    mask = np.zeros((20, 20, 20), np.uint8)
    mask[8:11, 9:12, 4:6] = 1
    affine = np.diag([1.0, 2, 1, 1])
    path, name = (save_volume(tmp_path / f"{i}.nii.gz", array, affine) for i, array in enumerate((values, mask)))
    # 3 mm are 3, 2 and 3 voxels; the box ends at the volume's
    cropped = Volumes(image_size=(9, 7, 9), mask_mode="crop", mask_margin=3).load(path, name)
    expected = np.clip((values[5:14, 7:14, 1:9] + 1000) / 2000, 0, 1)
    whole = torch.from_numpy(expected)[None].float()
    assert torch.allclose(cropped.float(), data.resize(whole, (9, 7, 9)), atol=1e-3)
    channel = Volumes(image_size=(20, 20, 20), mask_mode="channel").load(path, name)
    assert np.array_equal(channel[1], mask)
    # an empty mask crops nothing, and neither does a case without one
    empty = save_volume(tmp_path / "e.nii.gz", 0 * mask, affine)
    volumes = Volumes(image_size=(20, 20, 20), mask_mode="crop")
    assert torch.equal(volumes.load(path, empty), channel[:1])
    assert torch.equal(volumes.load(path), channel[:1])
    with pytest.raises(ValueError, match="its mask lies elsewhere"):
        volumes.load(path, save_volume(tmp_path / "f.nii.gz", mask, np.diag([-1.0, 2, 1, 1])))
    with pytest.raises(ValueError, match=r"its mask has \(20, 20, 10\) voxels"):
        volumes.load(path, save_volume(tmp_path / "m.nii.gz", mask[..., :10], affine))


def test_numbers_of_a_volume(tmp_path):
    """Two parts of calcium by 26 neighbours, on voxels of 2 mm3."""
    values = np.zeros((8, 8, 8), np.int16)
    values[1, 1, 1] = values[2, 2, 2] = values[6, 6, 6] = 400
    path = save_volume(tmp_path / "a.nii.gz", values, np.diag([1.0, 2, 1, 1]))
    mask = save_volume(tmp_path / "m.nii.gz", (values > 0).astype(np.uint8), np.diag([1.0, 2, 1, 1]))
    numbers = Volumes(image_size=(8, 8, 8)).load(path, mask, numbers=True)
    assert numbers.tolist() == pytest.approx([math.log1p(6), math.log1p(2), 1200 / 512, math.log1p(6)])


def test_the_disk_cache_is_read_once_and_notices_changes(tmp_path, monkeypatch):
    values = np.random.default_rng(0).integers(-900, 900, (8, 8, 8)).astype(np.int16)
    path = save_volume(tmp_path / "a.nii.gz", values)
    volumes = Volumes(image_size=(8, 8, 8), cache_dir=str(tmp_path / "cache"))
    first, numbers = volumes.load(path), volumes.load(path, numbers=True)
    opened = []
    real = Volumes._open
    monkeypatch.setattr(Volumes, "_open", lambda self, *words: opened.append(words) or real(self, *words))
    assert torch.equal(volumes.load(path), first)
    assert torch.equal(volumes.load(path, numbers=True), numbers)
    assert not opened
    save_volume(tmp_path / "a.nii.gz", -values)
    assert not torch.equal(volumes.load(path), first)
    other = Volumes(image_size=(8, 8, 8), hu_window=(0, 9), cache_dir=str(tmp_path / "cache"))
    assert not torch.equal(other.load(path), volumes.load(path))
    assert len(opened) == 2


def test_a_cache_that_cannot_be_written_is_no_error_of_the_volume(tmp_path):
    path = save_volume(tmp_path / "a.nii.gz", np.random.default_rng(0).integers(0, 9, (8, 8, 8)).astype(np.int16))
    (tmp_path / "file").write_text("")
    volumes = Volumes(image_size=(8, 8, 8), cache_dir=str(tmp_path / "file/cache"))
    with pytest.warns(UserWarning, match=r"file/cache: cannot be written \(Not a directory\)"):
        assert volumes.load(path).shape == (1, 8, 8, 8)


def test_empty_masks_are_counted(read, table, made, tmp_path, capsys):
    empty = nibabel.load(made / table["heart_mask"][4])
    table["heart_mask"] = [str(made / name) for name in table["heart_mask"]]
    table.loc[4, "heart_mask"] = save_volume(tmp_path / "e.nii.gz", np.zeros(empty.shape, np.uint8), empty.affine)
    table.loc[5, "heart_mask"] = ""
    cohort = read(table, mask_column="heart_mask")
    volumes = Volumes(image_size=(8, 8, 8), mask_mode="crop")
    MultiGPUSurvivalDataset(cohort, rows=np.arange(24), volumes=volumes).check(threads=2)
    assert "2 of 24 cases have no mask, or an empty one, and are taken whole" in capsys.readouterr().out


def test_unusable_volumes_are_named_with_their_rows(read, table, tmp_path):
    scans = tmp_path / "scans"
    scans.mkdir()
    cohort = read(table)
    for row in (3, 7):
        content = gzip.decompress(Path(cohort.path[row]).read_bytes())
        bad = scans / f"{row}.nii.gz"
        bad.write_bytes(gzip.compress(content)[:200])
        table.loc[row, "NIFTI Path"] = str(bad)
    cohort = read(table)
    dataset = MultiGPUSurvivalDataset(cohort, rows=np.arange(24), volumes=Volumes(image_size=(8, 8, 8)))
    line = rf"dataset.csv:5: {scans}/3.nii.gz cannot be used \(.+\); replace it or remove the row \(2 such rows\)"
    with pytest.raises(InputError, match=line):
        dataset.check(threads=2)
    # met later, the case says so, and is no image
    item = dataset[3]
    assert item["error"].startswith(str(tmp_path / "dataset.csv:5: "))
    assert item["image"].isnan().all()
    assert dataset[2]["error"] == ""


def test_augmentation_is_a_function_of_seed_epoch_and_case():
    images = torch.arange(2 * 4 * 4 * 3.0).reshape(2, 1, 4, 4, 3)
    both = data.augment(images, [5, 9], seed=1, epoch=2)
    assert torch.equal(both[1:], data.augment(images[1:], [9], seed=1, epoch=2))
    seen = {tuple(data.augment(images[:1], [5], seed=1, epoch=epoch).flatten().tolist()) for epoch in range(60)}
    # 4 quarter turns, each mirrored or not, and upside down or not
    assert len(seen) == 16
    assert data.augment(images[..., :2, :], [5, 9], 1, 2).shape == (2, 1, 4, 2, 3)


# --- smart cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_its_part_and_all_cases_come_equally_often(made, workers, monkeypatch):
    """10 of 24 in memory, 4 replaced after each epoch; the cached volumes are those of the files."""
    cohort = read_cohort(made / "dataset.csv")
    volumes = Volumes(image_size=(8, 8, 8))
    plain = MultiGPUSurvivalDataset(cohort, rows=np.arange(24), volumes=volumes)
    smart = MultiGPUSurvivalDataset(
        cohort, rows=np.arange(24), volumes=volumes, use_smart_cache=True, cache_rate=0.45, replace_rate=0.4, seed=3
    )
    assert (len(smart), smart.replaced) == (10, 4)
    loader = du.create_distributed_dataloader(smart, 4, num_workers=workers)
    loaded = []
    load = Volumes.load
    monkeypatch.setattr(Volumes, "load", lambda self, *words: loaded.append(words) or load(self, *words))
    epochs = []
    for epoch in range(12):
        loader.batch_sampler.set_position(epoch)
        batches = list(loader)
        epochs.append([row for batch in batches for row in batch["index"].tolist()])
        if epoch in (0, 7):
            for batch in batches:
                for row, image in zip(batch["index"].tolist(), batch["image"], strict=True):
                    assert torch.equal(image, load(volumes, cohort.path[row]))
    windows = [set(smart.rows_of(range(10), epoch).tolist()) for epoch in range(12)]
    assert all(len(a & b) == 6 for a, b in zip(windows, windows[1:], strict=False))
    assert all(sorted(rows) == sorted(window) for rows, window in zip(epochs, windows, strict=True))
    # the window moves on by 4 of 24: over 6 epochs all come in once, each for 2 or 3 of them
    counts = np.bincount([row for window in windows[:6] for row in window], minlength=24)
    assert set(counts.tolist()) == {2, 3}
    if not workers:
        # each volume once for each time it comes in, not once an epoch
        assert len(loaded) == 10 + 11 * 4
    assert len(plain) == 24


def test_the_guides_own_loop(made):
    dataset = MultiGPUSurvivalDataset(
        made / "dataset.csv", data_dir=str(made), volumes=Volumes(image_size=(8, 8, 8)), use_smart_cache=True
    )
    loader = du.create_distributed_dataloader(dataset, batch_size=4)
    for epoch in range(2):
        loader.batch_sampler.set_position(epoch)
        for batch in loader:
            assert batch["image"].shape == (len(batch["time"]), 1, 8, 8, 8)


# --- sample data ------------------------------------------------------------------------------------------------------


def test_sample_data_hides_the_risk_in_the_shape_of_the_lesions(tmp_path, capsys):
    """Number, volume and Agatston score tell little, the true risk much, and the CT holds what the table says."""
    sample_data.write_sample_data(tmp_path / "set", 60, event_rate=0.4, matrix=32, seed=0)
    line = capsys.readouterr().out
    found = re.findall(r"([a-zA-Z][a-zA-Z ]+) (0\.\d+)", line.partition("patients of")[2])
    scores = {name: float(value) for name, value in found}
    cohort = read_cohort(tmp_path / "set/dataset.csv", mask_column="heart_mask")
    assert cohort.event.mean() == pytest.approx(0.4, abs=0.02)
    table = cohort.table.apply(pd.to_numeric, errors="coerce")
    for row in range(3):
        numbers = Volumes().load(cohort.path[row], cohort.mask[row], numbers=True)
        # a lesion or two may touch, and noise may lift a voxel
        assert numbers[1].expm1().round() == pytest.approx(table["numlesion"][row], abs=1)
        assert numbers[0].expm1().item() == pytest.approx(table["volumescore"][row], rel=0.05)
    assert scores.pop("the true risk") > 0.8
    assert 0.6 < scores.pop("age") < 0.75
    assert max(scores.values()) < 0.7
    assert len(scores) == 3
    with pytest.raises(InputError, match="holds a data set already"):
        sample_data.write_sample_data(tmp_path / "set", 60, event_rate=0.4, matrix=32, seed=0)
