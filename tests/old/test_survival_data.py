"""tasks/survival/data.py: the table, the folds, the volumes, and what SmartCache and the samplers let a run see."""

import csv
import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np
import pytest
import torch
from conftest import ROOT

from old.cli_utils import InputError
from old.distributed_utils import create_distributed_dataloader
from tasks.survival.cohort import Cohort, read_cohort
from tasks.survival.data import MultiGPUSurvivalDataset
from tasks.survival.folds import choose_folds, make_folds
from tasks.survival.samplers import EventBalancedSampler
from tasks.survival.volumes import Volumes, augment, check_volumes


def write_csv(path: Path, header: list[str], rows: list[list]) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture
def table(survival_data) -> str:
    """The file of the 44 made-up patients."""
    return str(survival_data / "dataset.csv")


@pytest.fixture
def cohort(table) -> Cohort:
    return read_cohort(table)


# --- SmartCache -------------------------------------------------------------------------------------------------------


class Configuration(NamedTuple):
    """What smart_cache.py is asked for."""

    cases: int
    cache_rate: float
    replace_rate: float
    workers: int
    epochs: int
    first_epoch: int = 0


CONFIGURATIONS = [
    Configuration(11, 0.5, 0.5, 0, 9),
    Configuration(11, 0.5, 0.25, 2, 9),
    Configuration(7, 0.3, 1, 0, 8),
    Configuration(12, 1, 0.5, 0, 3),
    Configuration(13, 0.9, 0.1, 2, 6),
    Configuration(6, 0.1, 0.1, 0, 8),
]


def look(zygote, table: str, configurations: list[Configuration], ranks: int) -> list[list[dict]]:
    """What each rank sees of each configuration: see smart_cache.py."""
    words = [",".join(str(value) for value in configuration) for configuration in configurations]
    done = zygote(ROOT / "tests/old/smart_cache.py", table, *words, ranks=ranks)
    assert done.code == 0, done.stderr[-2000:]
    every = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(every) == len(configurations)
    return every


def check_rank(rank: dict, configuration: Configuration, cached: int) -> None:
    """Each epoch goes once through what the window formula says."""
    part = rank["part"]
    count = len(part)
    replaced = min(math.ceil(cached * configuration.replace_rate), count - cached)
    assert rank["cached"] == cached
    assert rank["replaced"] == replaced
    windows = []
    for epoch, seen in enumerate(rank["seen"]):
        window = [part[(epoch * replaced + i) % count] for i in range(cached)]
        assert sorted(seen) == sorted(window)
        windows += window

    # so that each case is seen as often as the rates imply
    times = Counter(case for seen in rank["seen"] for case in seen)
    assert times == Counter(windows)
    expected = Counter()
    for epoch in range(configuration.epochs):
        for place, case in enumerate(part):
            if (place - epoch * replaced) % count < cached:
                expected[case] += 1
    assert times == expected


def check_all_seen(rank: dict, epochs: int, is_longest: bool) -> None:
    """All cases are seen after as many epochs as is told and, on a rank with the longest part, not before."""
    needed = rank["all_seen_after"]
    part = set(rank["part"])
    seen_then = {case for seen in rank["seen"][:needed] for case in seen}
    seen_before = {case for seen in rank["seen"][: needed - 1] for case in seen}
    assert seen_then == part or needed > epochs
    if is_longest and 1 < needed <= epochs:
        assert seen_before != part


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak), 3])
def test_every_case_is_seen_as_often_as_the_rates_imply(table, zygote, ranks):
    """Ranks are disjoint, each epoch goes once through what the window formula says, and all is seen in time."""
    every = look(zygote, table, CONFIGURATIONS, ranks)
    for configuration, parts in zip(CONFIGURATIONS, every, strict=True):
        # the parts are disjoint, and of one size where they can be
        cases = [case for rank in parts for case in rank["part"]]
        sizes = [len(rank["part"]) for rank in parts]
        assert sorted(cases) == list(range(configuration.cases))
        assert max(sizes) - min(sizes) <= 1

        # what each rank sees
        cached = max(1, int(configuration.cache_rate * (configuration.cases // ranks)))
        for rank in parts:
            check_rank(rank, configuration, cached)
            check_all_seen(rank, configuration.epochs, len(rank["part"]) == max(sizes))

        # shuffled anew in each epoch
        orders = [tuple(seen) for seen in parts[0]["seen"]]
        assert len(orders) < 4 or cached < 4 or len(set(orders)) == len(orders)


def test_an_epoch_begun_elsewhere_sees_the_same(table, zygote):
    """A resumed run's first epoch: the cache of that epoch, in the same order, as if it had been there from the
    start."""
    whole = Configuration(23, 0.5, 0.4, 0, 7)
    late = whole._replace(first_epoch=4)
    every_whole, every_late = look(zygote, table, [whole, late], 2)
    for a, b in zip(every_whole, every_late, strict=True):
        assert a["seen"][4:] == b["seen"]


def test_monai_replaces_as_many_as_we_count():
    """It takes ceil(cached * rate) in floats: 29 * (15 / 29) is above 15. The rate given is half a case lower."""
    rates = (0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 1)
    for cached in range(1, 500):
        for replaced in {math.ceil(cached * rate) for rate in rates}:
            rate = (replaced - 0.5) / cached
            assert math.ceil(cached * rate) == replaced


def test_a_part_cannot_be_evaluated_as_the_whole(table):
    dataset = MultiGPUSurvivalDataset(table, image_size=(4, 4, 4), use_smart_cache=True)
    with pytest.raises(InputError, match="each rank's own part"):
        create_distributed_dataloader(dataset, batch_size=2, train=False)


def test_persistent_workers_are_refused_and_the_reason_given(table):
    workers = {"batch_size": 2, "num_workers": 1, "persistent_workers": True}
    dataset = MultiGPUSurvivalDataset(table, image_size=(4, 4, 4), use_smart_cache=True)
    with pytest.raises(InputError, match=r"persistent_workers: would keep the first epoch's cache"):
        create_distributed_dataloader(dataset, **workers)
    plain = MultiGPUSurvivalDataset(table, image_size=(4, 4, 4))
    create_distributed_dataloader(plain, **workers)


def test_the_guides_own_loop_ends_without_shutdown(table):
    """As a script, where the interpreter's end would meet a thread that still reads."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from old.distributed_utils import create_distributed_dataloader
from tasks.survival.data import MultiGPUSurvivalDataset
dataset = MultiGPUSurvivalDataset({table!r}, use_smart_cache=True, image_size=(96, 96, 64))
print(len([batch for batch in create_distributed_dataloader(dataset, batch_size=8)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout == "2\n", done.stderr[-1000:]


def test_the_guides_own_loop(table):
    """Guide 2's snippet as it stands: no start, no shutdown; also without set_position the cache is filled."""
    dataset = MultiGPUSurvivalDataset(table, use_smart_cache=True, image_size=(8, 6, 4))
    loader = create_distributed_dataloader(dataset, batch_size=8)
    batch = next(iter(loader))
    assert batch["image"].shape == (8, 1, 8, 6, 4)
    assert set(batch) == {"image", "index", "time", "event", "error"}
    dataset.shutdown()


def test_an_unreadable_volume_does_not_hang_the_replacements(survival_data, tmp_path):
    """MONAI's replacement thread would die of the error, and update_cache() wait for ever."""
    shutil.copytree(survival_data, tmp_path / "set")
    cohort = read_cohort(str(tmp_path / "set" / "dataset.csv"))
    dataset = MultiGPUSurvivalDataset(
        cohort,
        rows=np.arange(8),
        image_size=(4, 4, 4),
        use_smart_cache=True,
        raise_errors=False,
    )

    # a case that is not in the cache at first
    broken = Path(cohort.path[dataset.smart_cache.rows[-1]])
    broken.write_bytes(broken.read_bytes()[:200])
    errors = []
    for epoch in range(4):
        dataset.smart_cache.set_epoch(epoch)
        errors += [dataset[i]["error"] for i in range(len(dataset))]
    dataset.shutdown()
    assert any(str(broken) in error for error in errors)


# --- event-balanced steps ---------------------------------------------------------------------------------------------


def balanced_steps(has_event: np.ndarray, batch: int, world_size: int) -> list[list[int]]:
    """The cases of each step of an epoch, over all ranks."""
    steps = []
    for rank in range(world_size):
        sampler = EventBalancedSampler(has_event, batch // world_size, rank, world_size, 3)
        sampler.set_position(2)
        batches = iter(sampler)
        position = 0
        for k in range(sampler.steps_per_epoch()):
            count, local = sampler.step_sizes(position)
            position += count
            if len(steps) <= k:
                steps.append([])
            steps[k] += next(batches)[:local]
    return [sorted(step) for step in steps]


@pytest.mark.parametrize(
    ("cases", "events", "batch", "ranks"),
    [
        (40, 10, 8, 2),
        (41, 6, 4, 1),
        (30, 3, 6, 3),
        (25, 24, 6, 2),
    ],
)
def test_event_balanced_steps(cases, events, batch, ranks):
    """Each case once; an event in every step while there are enough; the same steps at any world size."""
    has_event = np.random.default_rng(0).permutation(np.arange(cases) < events)
    alone = balanced_steps(has_event, batch, 1)
    assert sorted(i for step in alone for i in step) == list(range(cases))
    assert balanced_steps(has_event, batch, ranks) == alone

    # the last step may be smaller
    per_step = [int(has_event[step].sum()) for step in alone]
    full = per_step if cases % batch == 0 else per_step[:-1]
    assert max(full) - min(full) <= 2
    if events >= len(alone):
        assert min(per_step) >= 1


# --- the table and the folds ------------------------------------------------------------------------------------------


def test_column_names_units_and_separators(tmp_path):
    rows = [["a", "scans/a.nii", "365.25", "1"], ["b", "scans\\b.nii", "730.5", "0.0"]]
    guide = ["case_num", "NIFTI Path", "time", "event"]
    other = ["Patient ID", "nifti_path", "Survival Time", "EVENT"]
    for header in (guide, other):
        cohort = read_cohort(str(write_csv(tmp_path / "t.csv", header, rows)))
        assert cohort.case == ["a", "b"]
        assert cohort.time.tolist() == pytest.approx([1.0, 2.0])
        assert cohort.event.tolist() == [True, False]
        assert cohort.path == [str(tmp_path / "scans" / name) for name in ("a.nii", "b.nii")]

    # the empty line counts, as an editor shows it
    (tmp_path / "t.csv").write_text("patient_id;path;survival_time;event\n1;x.nii;24;1\n\n2;y.nii;12;0\n")
    cohort = read_cohort(str(tmp_path / "t.csv"), time_unit="months")
    assert cohort.time.tolist() == [2.0, 1.0]
    assert cohort.row == [2, 4]

    # columns by name
    table = write_csv(tmp_path / "u.csv", ["who", "file", "years", "dead"], [["1", "x.nii", "2", "1"]])
    names = {"path_column": "File", "time_column": "years", "event_column": "dead", "id_column": "WHO"}
    cohort = read_cohort(str(table), str(tmp_path), "years", **names)
    assert cohort.case == ["1"]
    assert cohort.time.tolist() == [2.0]


def as_in_excel(cell: str) -> str | float:
    """A number, where a cell holds one."""
    return float(cell) if cell.replace(".", "").isdigit() else cell


def test_xlsx_is_the_same_as_csv(cohort, table, survival_data, tmp_path):
    import openpyxl

    with open(table, newline="") as file:
        header, *rows = csv.reader(file)
    book = openpyxl.Workbook()
    book.active.append(header)
    for row in rows:
        # the path is no number, whatever it is called
        case, path, *others = row
        book.active.append([as_in_excel(case), path, *(as_in_excel(cell) for cell in others)])
    book.save(tmp_path / "dataset.xlsx")

    # all that is read
    same = read_cohort(str(tmp_path / "dataset.xlsx"), str(survival_data))
    assert cohort.path == same.path
    assert (cohort.time == same.time).all()
    assert (cohort.event == same.event).all()
    assert cohort.folds["Fold_1"] == same.folds["Fold_1"]
    assert list(cohort.features) == list(same.features)

    # the features are the numeric columns without another meaning
    assert "true_log_hazard" not in cohort.features
    assert "time" not in cohort.features
    assert {"Age", "AgatstonScore2D", "LAD_Agatston"} <= set(cohort.features)


def test_made_folds_are_stratified_and_keep_patients_whole(cohort):
    fold = make_folds(cohort, 5, seed=3)
    assert np.bincount(fold).tolist() == [9, 9, 9, 9, 8]
    events = [int(cohort.event[fold == k].sum()) for k in range(5)]
    assert max(events) - min(events) <= 1
    assert (make_folds(cohort, 5, seed=3) == fold).all()
    assert (make_folds(cohort, 5, seed=4) != fold).any()

    # four rows of each patient
    several = replace(cohort, case=[f"patient {i % 11}" for i in range(44)])
    fold = make_folds(several, 3, seed=0)
    assert all(len(set(fold[k::11])) == 1 for k in range(11))


# --- volumes ----------------------------------------------------------------------------------------------------------


def save_volume(values: np.ndarray, affine: np.ndarray, path: Path) -> None:
    volume = nibabel.Nifti1Image(values, affine)
    nibabel.save(volume, path)


def test_volume_in_its_own_order_window_spacing_and_orientation(tmp_path):
    """Values by hand: X, Y, Z as in the file; HU -1000..1000 -> 0..1; orientation and spacing where asked."""
    values = np.arange(4 * 6 * 2, dtype=np.int16).reshape(4, 6, 2) * 10 - 1200
    path = str(tmp_path / "v.nii.gz")
    save_volume(values, np.diag([-2.0, 1.0, 4.0, 1.0]), path)

    def read(size=(4, 6, 2), **options) -> np.ndarray:
        volume = Volumes(size, **options).get(path)
        assert volume.dtype == torch.float16
        return volume[0].numpy()

    # as it is, and averaged to half the size
    expected = np.clip((values + 1000) / 2000, 0, 1)
    half = expected.astype(np.float16)
    assert np.array_equal(read(), half)
    means = expected.reshape(2, 2, 3, 2, 1, 2).mean((1, 3, 5))
    assert np.allclose(read((2, 3, 1)), means, atol=1e-3)

    # other axes, another window, and two voxels of 4 mm, each twice
    assert np.array_equal(read(orientation="RAS"), half[::-1])
    narrow = np.clip(values / 100, 0, 1)
    assert np.allclose(read(window=(0.0, 100.0)), narrow, atol=1e-3)
    spaced = read(spacing=[4.0, 1.0, 4.0])
    assert np.array_equal(spaced[::2], spaced[1::2])


def test_the_disk_cache_notices_changes_and_damage(tmp_path):
    path = tmp_path / "v.nii"
    folder = tmp_path / "cache"
    size = (4, 4, 4)
    save_volume(np.full(size, 0, np.int16), np.eye(4), path)
    volumes = Volumes(size, cache_dir=str(folder))

    def holds(value: float) -> bool:
        return bool((volumes.get(str(path)) == value).all())

    assert holds(0.5)
    kept = list(folder.iterdir())
    assert len(kept) == 1

    # one flipped byte, and a torn file
    content = bytearray(kept[0].read_bytes())
    content[0] ^= 255
    kept[0].write_bytes(content)
    assert holds(0.5)
    kept[0].write_bytes(content[:50])
    assert holds(0.5)

    # another file under the same name, and other settings
    path.unlink()
    save_volume(np.full(size, 1000, np.int16), np.eye(4), path)
    assert holds(1.0)
    volumes = Volumes(size, window=(0.0, 2000.0), cache_dir=str(folder))
    assert holds(0.5)


def test_augmentation_is_a_function_of_seed_epoch_and_case():
    images = torch.rand(3, 1, 4, 4, 3)
    all_three = augment(images, [5, 6, 7], 1, 2)
    two = augment(images[[2, 0]], [7, 5], 1, 2)
    assert torch.equal(all_three[[2, 0]], two)

    # the same voxels in other places
    for before, after in zip(images, all_three, strict=True):
        assert torch.equal(before.flatten().sort()[0], after.flatten().sort()[0])

    # 8 flips and 4 turns, of which two turns are two flips; no turns where X is not Y
    kinds = {augment(images[:1], [i], 1, 2).numpy().tobytes() for i in range(200)}
    assert len(kinds) == 16
    assert augment(torch.rand(1, 1, 4, 5, 3), [0], 0, 0).shape == (1, 1, 4, 5, 3)


def test_checked_volumes_are_remembered(cohort, tmp_path):
    rows = np.arange(4)
    memory = tmp_path / "checked.json"
    check_volumes(cohort, rows, tmp_path, False, 2)
    known = json.loads(memory.read_text())["good"]
    assert len(known) == 4

    # a broken file is written anew
    memory.write_text("{broken")
    check_volumes(cohort, rows, tmp_path, False, 2)
    assert json.loads(memory.read_text())["good"] == known


def test_blanks_text_and_any_column_as_folds(tmp_path):
    header = ["case", "path", "time", "event", "split", "Agatston", "note", "Patient ID"]
    first = ["1", "a.nii", "3", "1", "1", "NA", "x", "7"]
    second = ["2", "b.nii", "4", "0", "2", "2.5", "", "8"]
    path = write_csv(tmp_path / "t.csv", header, [first, second])
    cohort = read_cohort(str(path))
    assert list(cohort.features) == ["split", "Agatston"]
    assert np.isnan(cohort.features["Agatston"][0])
    assert cohort.folds["split"] == ["1", "2"]


def test_labels_of_a_fold_column(cohort):
    """One label against all others, but never trained on what is held out; Excel's 1.0 is 1."""
    cohort.folds["Fold_1"] = ["Test" if i % 11 == 0 else str(i % 3) for i in range(44)]
    options = {"count": 0, "train_label": "train", "seed": 0}
    one = choose_folds(cohort, fold_column="fold 1", val_label="2", every=False, **options)[0]
    known = [i for i in range(44) if i % 11]
    assert one.val.tolist() == [i for i in known if i % 3 == 2]
    assert one.train.tolist() == [i for i in known if i % 3 != 2]

    # each fold of a cross-validation can be asked for by its flags
    folds = choose_folds(cohort, fold_column="fold 1", val_label=None, every=True, **options)
    assert [fold.flags["val_fold"] for fold in folds] == ["1", "2", "0"]
    for fold in folds:
        column = fold.flags["fold_column"]
        label = fold.flags["val_fold"]
        again = choose_folds(cohort, fold_column=column, val_label=label, every=False, **options)[0]
        assert again.val.tolist() == fold.val.tolist()
        assert again.train.tolist() == fold.train.tolist()


def test_a_table_reached_by_a_link(tmp_path):
    real = tmp_path / "real"
    link = tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    volume = str(real / "a.nii")
    write_csv(real / "t.csv", ["path", "time", "event"], [[volume, "3", "1"]])
    assert read_cohort(str(link / "t.csv")).path == [volume]


def test_the_readmes_rule_for_a_missing_case_column(tmp_path):
    path = write_csv(tmp_path / "t.csv", ["path", "time", "event"], [["a/b.nii", "3", "1"]])
    assert read_cohort(str(path)).case == ["a/b.nii"]
