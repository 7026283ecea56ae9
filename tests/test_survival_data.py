"""tasks/survival/data.py: the table, the folds, the volumes, and what SmartCache and the samplers let a run see."""

import csv
import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from conftest import ROOT

from cli_utils import InputError
from distributed_utils import create_distributed_dataloader
from tasks.survival import data as sd
from tasks.survival.folds import choose_folds, make_folds
from tasks.survival.volumes import augment, check_volumes


def write_csv(path: Path, header: list[str], rows: list[list]) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


# --- SmartCache -------------------------------------------------------------------------------------------------------

CONFIGURATIONS = ["11,0.5,0.5,0,9", "11,0.5,0.25,2,9", "7,0.3,1,0,8", "12,1,0.5,0,3", "13,0.9,0.1,2,6", "6,0.1,0.1,0,8"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak), 3])
def test_every_case_is_seen_as_often_as_the_rates_imply(survival_data, zygote, ranks):
    """Ranks are disjoint, each epoch goes once through what the window formula says, and all is seen in time."""
    done = zygote(ROOT / "tests" / "smart_cache.py", survival_data / "dataset.csv", *CONFIGURATIONS, ranks=ranks)
    assert done.code == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(CONFIGURATIONS)
    for text, every in zip(CONFIGURATIONS, lines, strict=True):
        cases, cache_rate, replace_rate, _, epochs = map(float, text.split(","))
        parts = [set(rank["part"]) for rank in every]
        assert sum(map(len, parts)) == cases
        assert set.union(*parts) == set(range(int(cases)))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        cached = max(1, int(cache_rate * (cases // ranks)))
        for rank in every:
            n, part = len(rank["part"]), rank["part"]
            replaced = min(math.ceil(cached * replace_rate), n - cached)
            assert (rank["cached"], rank["replaced"]) == (cached, replaced)
            for epoch, seen in enumerate(rank["seen"]):
                assert sorted(seen) == sorted(part[(epoch * replaced + i) % n] for i in range(cached))
            times = Counter(i for seen in rank["seen"] for i in seen)
            expected = Counter(part[p] for e in range(int(epochs)) for p in range(n) if (p - e * replaced) % n < cached)
            assert times == expected
            seen_by_then = {i for seen in rank["seen"][: rank["all_seen_after"]] for i in seen}
            assert seen_by_then == set(part) or rank["all_seen_after"] > epochs
            if n == max(map(len, parts)) and 1 < rank["all_seen_after"] <= epochs:
                assert {i for seen in rank["seen"][: rank["all_seen_after"] - 1] for i in seen} != set(part)
        orders = [tuple(seen) for seen in every[0]["seen"]]
        assert len(orders) < 4 or cached < 4 or len(set(orders)) == len(orders)  # shuffled anew each epoch


def test_an_epoch_begun_elsewhere_sees_the_same(survival_data, zygote):
    """A resumed run's first epoch: the cache of that epoch, in the same order, as if it had been there from the
    start."""
    flags = ["23,0.5,0.4,0,7", "23,0.5,0.4,0,7,4"]
    done = zygote(ROOT / "tests" / "smart_cache.py", survival_data / "dataset.csv", *flags, ranks=2)
    whole, late = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    for a, b in zip(whole, late, strict=True):
        assert a["seen"][4:] == b["seen"]


def test_monai_replaces_as_many_as_we_count():
    """It takes ceil(cached * rate) in floats: 29 * (15 / 29) is above 15. The rate given is half a case lower."""
    for cached in range(1, 500):
        for replaced in {math.ceil(cached * rate) for rate in (0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 1)}:
            assert math.ceil(cached * ((replaced - 0.5) / cached)) == replaced


def test_a_part_cannot_be_evaluated_as_the_whole(survival_data):
    dataset = sd.MultiGPUSurvivalDataset(str(survival_data / "dataset.csv"), image_size=(4, 4, 4), use_smart_cache=True)
    with pytest.raises(InputError, match="each rank's own part"):
        create_distributed_dataloader(dataset, batch_size=2, train=False)


def test_persistent_workers_are_refused_and_the_reason_given(survival_data):
    dataset = sd.MultiGPUSurvivalDataset(str(survival_data / "dataset.csv"), image_size=(4, 4, 4), use_smart_cache=True)
    with pytest.raises(InputError, match=r"persistent_workers: would keep the first epoch's cache"):
        create_distributed_dataloader(dataset, batch_size=2, num_workers=1, persistent_workers=True)
    plain = sd.MultiGPUSurvivalDataset(str(survival_data / "dataset.csv"), image_size=(4, 4, 4))
    create_distributed_dataloader(plain, batch_size=2, num_workers=1, persistent_workers=True)


def test_the_guides_own_loop_ends_without_shutdown(survival_data, tmp_path):
    """As a script, where the interpreter's end would meet a thread that still reads."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from distributed_utils import create_distributed_dataloader
from tasks.survival.data import MultiGPUSurvivalDataset
dataset = MultiGPUSurvivalDataset({str(survival_data / "dataset.csv")!r}, use_smart_cache=True, image_size=(96, 96, 64))
print(len([batch for batch in create_distributed_dataloader(dataset, batch_size=8)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr[-1000:]


def test_the_guides_own_loop(survival_data):
    """Guide 2's snippet as it stands: no start, no shutdown; also without set_position the cache is filled."""
    dataset = sd.MultiGPUSurvivalDataset(str(survival_data / "dataset.csv"), use_smart_cache=True, image_size=(8, 6, 4))
    loader = create_distributed_dataloader(dataset, batch_size=8)
    batch = next(iter(loader))
    assert batch["image"].shape == (8, 1, 8, 6, 4)
    assert set(batch) == {"image", "index", "time", "event", "error"}
    dataset.shutdown()


def test_an_unreadable_volume_does_not_hang_the_replacements(survival_data, tmp_path):
    """MONAI's replacement thread would die of the error, and update_cache() wait for ever."""
    shutil.copytree(survival_data, tmp_path / "set")
    cohort = sd.read_cohort(str(tmp_path / "set" / "dataset.csv"))
    dataset = sd.MultiGPUSurvivalDataset(
        cohort, rows=np.arange(8), image_size=(4, 4, 4), use_smart_cache=True, raise_errors=False
    )
    broken = Path(cohort.path[dataset.smart_cache.rows[-1]])
    broken.write_bytes(broken.read_bytes()[:200])
    errors = []
    for epoch in range(4):
        dataset.smart_cache.set_epoch(epoch)
        errors += [dataset[i]["error"] for i in range(len(dataset))]
    dataset.shutdown()
    assert any(str(broken) in text for text in errors)


# --- event-balanced steps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cases", "events", "batch", "ranks"), [(40, 10, 8, 2), (41, 6, 4, 1), (30, 3, 6, 3), (25, 24, 6, 2)]
)
def test_event_balanced_steps(cases, events, batch, ranks):
    """Each case once; an event in every step while there are enough; the same steps at any world size."""
    has_event = np.random.default_rng(0).permutation(np.arange(cases) < events)

    def steps(world_size: int) -> list[set[int]]:
        samplers = [
            sd.EventBalancedSampler(has_event, batch // world_size, rank, world_size, 3) for rank in range(world_size)
        ]
        found = []
        for sampler in samplers:
            sampler.set_position(2)
            batches, position = iter(sampler), 0
            for k in range(sampler.steps_per_epoch()):
                count, mine = sampler.window(position)
                position += count
                chosen = next(batches)[: mine or 0]
                if len(found) <= k:
                    found.append([])
                found[k] += chosen
        return [sorted(step) for step in found]

    alone = steps(1)
    assert sorted(i for step in alone for i in step) == list(range(cases))
    per_step = [int(has_event[step].sum()) for step in alone]
    full = per_step if cases % batch == 0 else per_step[:-1]
    if events >= len(alone):
        assert min(per_step) >= 1
    assert max(full) - min(full) <= 2
    assert steps(ranks) == alone


# --- the table and the folds ------------------------------------------------------------------------------------------


def test_column_names_units_and_separators(tmp_path):
    rows = [["a", "scans/a.nii", "365.25", "1"], ["b", "scans\\b.nii", "730.5", "0.0"]]
    for header in (["case_num", "NIFTI Path", "time", "event"], ["Patient ID", "nifti_path", "Survival Time", "EVENT"]):
        cohort = sd.read_cohort(str(write_csv(tmp_path / "t.csv", header, rows)))
        assert cohort.case == ["a", "b"]
        assert cohort.time.tolist() == pytest.approx([1.0, 2.0])
        assert cohort.event.tolist() == [True, False]
        assert cohort.path == [str(tmp_path / "scans" / name) for name in ("a.nii", "b.nii")]
    (tmp_path / "t.csv").write_text("patient_id;path;survival_time;event\n1;x.nii;24;1\n\n2;y.nii;12;0\n")
    cohort = sd.read_cohort(str(tmp_path / "t.csv"), time_unit="months")
    assert cohort.time.tolist() == [2.0, 1.0]
    assert cohort.row == [2, 4]  # the empty line counts, as an editor shows it
    table = write_csv(tmp_path / "u.csv", ["who", "file", "years", "dead"], [["1", "x.nii", "2", "1"]])
    names = {"path_column": "File", "time_column": "years", "event_column": "dead", "id_column": "WHO"}
    cohort = sd.read_cohort(str(table), str(tmp_path), "years", **names)
    assert (cohort.case, cohort.time.tolist()) == (["1"], [2.0])


def test_xlsx_is_the_same_as_csv(survival_data, tmp_path):
    import openpyxl

    with open(survival_data / "dataset.csv", newline="") as file:
        lines = list(csv.reader(file))
    book = openpyxl.Workbook()
    for i, line in enumerate(lines):
        book.active.append(
            [
                cell if i == 0 or k == 1 or not cell.replace(".", "").isdigit() else float(cell)
                for k, cell in enumerate(line)
            ]
        )
    book.save(tmp_path / "dataset.xlsx")
    a = sd.read_cohort(str(survival_data / "dataset.csv"))
    b = sd.read_cohort(str(tmp_path / "dataset.xlsx"), str(survival_data))
    assert a.path == b.path
    assert (a.time == b.time).all()
    assert (a.event == b.event).all()
    assert a.folds["Fold_1"] == b.folds["Fold_1"]
    assert list(a.features) == list(b.features)
    assert "true_log_hazard" not in a.features
    assert "time" not in a.features
    assert {"Age", "AgatstonScore2D", "LAD_Agatston"} <= set(a.features)


def test_made_folds_are_stratified_and_keep_patients_whole(survival_data):
    cohort = sd.read_cohort(str(survival_data / "dataset.csv"))
    fold = make_folds(cohort, 5, seed=3)
    assert np.bincount(fold).tolist() == [9, 9, 9, 9, 8]
    events = [int(cohort.event[fold == k].sum()) for k in range(5)]
    assert max(events) - min(events) <= 1
    assert (make_folds(cohort, 5, seed=3) == fold).all()
    assert (make_folds(cohort, 5, seed=4) != fold).any()
    several = sd.Cohort(**{**cohort.__dict__, "case": [f"patient {i % 11}" for i in range(44)]})
    fold = make_folds(several, 3, seed=0)
    assert all(len(set(fold[k::11])) == 1 for k in range(11))


# --- volumes ----------------------------------------------------------------------------------------------------------


def test_volume_in_its_own_order_window_spacing_and_orientation(tmp_path):
    """Values by hand: X, Y, Z as in the file; HU -1000..1000 -> 0..1; orientation and spacing where asked."""
    values = np.arange(4 * 6 * 2, dtype=np.int16).reshape(4, 6, 2) * 10 - 1200
    affine = np.diag([-2.0, 1.0, 4.0, 1.0])
    nibabel.save(nibabel.Nifti1Image(values, affine), tmp_path / "v.nii.gz")
    path = str(tmp_path / "v.nii.gz")
    expected = np.clip((values + 1000) / 2000, 0, 1).astype(np.float16)
    got = sd.Volumes((4, 6, 2)).get(path)
    assert got.dtype == torch.float16
    assert np.array_equal(got[0].numpy(), expected)
    half = sd.Volumes((2, 3, 1)).get(path)[0].numpy()
    means = np.clip((values + 1000) / 2000, 0, 1).reshape(2, 2, 3, 2, 1, 2).mean((1, 3, 5))
    assert np.allclose(half, means, atol=1e-3)
    turned = sd.Volumes((4, 6, 2), orientation="RAS").get(path)[0].numpy()
    assert np.array_equal(turned, expected[::-1])
    narrow = sd.Volumes((4, 6, 2), window=(0.0, 100.0)).get(path)[0].numpy()
    assert np.allclose(narrow, np.clip(values / 100, 0, 1), atol=1e-3)
    spaced = sd.Volumes((4, 6, 2), spacing=[4.0, 1.0, 4.0]).get(path)[0].numpy()
    assert np.array_equal(spaced[::2], spaced[1::2])  # two voxels of 4 mm, each twice


def test_the_disk_cache_notices_changes_and_damage(tmp_path):
    path, folder = tmp_path / "v.nii", tmp_path / "cache"

    def put(value: int) -> None:
        nibabel.save(nibabel.Nifti1Image(np.full((4, 4, 4), value, np.int16), np.eye(4)), path)

    put(0)
    volumes = sd.Volumes((4, 4, 4), cache_dir=str(folder))
    assert (volumes.get(str(path)) == 0.5).all()
    kept = list(folder.iterdir())
    assert len(kept) == 1
    content = bytearray(kept[0].read_bytes())
    content[0] ^= 255
    kept[0].write_bytes(content)  # one flipped byte
    assert (volumes.get(str(path)) == 0.5).all()
    kept[0].write_bytes(content[:50])
    assert (volumes.get(str(path)) == 0.5).all()
    path.unlink()
    put(1000)  # another file under the same name
    assert (volumes.get(str(path)) == 1.0).all()
    assert (sd.Volumes((4, 4, 4), window=(0.0, 2000.0), cache_dir=str(folder)).get(str(path)) == 0.5).all()


def test_augmentation_is_a_function_of_seed_epoch_and_case():
    images = torch.rand(3, 1, 4, 4, 3)
    a = augment(images, [5, 6, 7], 1, 2)
    b = augment(images[[2, 0]], [7, 5], 1, 2)
    assert torch.equal(a[[2, 0]], b)
    assert all(torch.equal(x.flatten().sort()[0], y.flatten().sort()[0]) for x, y in zip(a, images, strict=True))
    kinds = {augment(images[:1], [i], 1, 2).numpy().tobytes() for i in range(200)}
    assert len(kinds) == 16  # 8 flips and 4 turns; two turns are two flips
    assert augment(torch.rand(1, 1, 4, 5, 3), [0], 0, 0).shape == (1, 1, 4, 5, 3)


def test_checked_volumes_are_remembered(survival_data, tmp_path):
    cohort = sd.read_cohort(str(survival_data / "dataset.csv"))
    rows = np.arange(4)
    check_volumes(cohort, rows, tmp_path, False, 2)
    known = json.loads((tmp_path / "checked.json").read_text())["good"]
    assert len(known) == 4
    (tmp_path / "checked.json").write_text("{broken")
    check_volumes(cohort, rows, tmp_path, False, 2)
    assert json.loads((tmp_path / "checked.json").read_text())["good"] == known


def test_blanks_text_and_any_column_as_folds(tmp_path):
    header = ["case", "path", "time", "event", "split", "Agatston", "note", "Patient ID"]
    rows = [["1", "a.nii", "3", "1", "1", "NA", "x", "7"], ["2", "b.nii", "4", "0", "2", "2.5", "", "8"]]
    cohort = sd.read_cohort(str(write_csv(tmp_path / "t.csv", header, rows)))
    assert list(cohort.features) == ["split", "Agatston"]
    assert np.isnan(cohort.features["Agatston"][0])
    assert cohort.folds["split"] == ["1", "2"]


def test_labels_of_a_fold_column(survival_data):
    """One label against all others, but never trained on what is held out; Excel's 1.0 is 1."""
    cohort = sd.read_cohort(str(survival_data / "dataset.csv"))
    cohort.folds["Fold_1"] = ["Test" if i % 11 == 0 else str(i % 3) for i in range(44)]
    options = {"count": 0, "train_label": "train", "seed": 0}
    one = choose_folds(cohort, fold_column="fold 1", val_label="2", every=False, **options)[0]
    assert one.val.tolist() == [i for i in range(44) if i % 3 == 2 and i % 11]
    assert one.train.tolist() == [i for i in range(44) if i % 3 != 2 and i % 11]
    folds = choose_folds(cohort, fold_column="fold 1", val_label=None, every=True, **options)
    assert [fold.flags["val_fold"] for fold in folds] == ["1", "2", "0"]
    for fold in folds:
        column = fold.flags["fold_column"]
        label = fold.flags["val_fold"]
        again = choose_folds(cohort, fold_column=column, val_label=label, every=False, **options)[0]
        assert again.val.tolist() == fold.val.tolist()
        assert again.train.tolist() == fold.train.tolist()


def test_a_table_reached_by_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_csv(tmp_path / "real" / "t.csv", ["path", "time", "event"], [[str(tmp_path / "real" / "a.nii"), "3", "1"]])
    assert sd.read_cohort(str(tmp_path / "link" / "t.csv")).path == [str(tmp_path / "real" / "a.nii")]


def test_the_readmes_rule_for_a_missing_case_column(tmp_path):
    cohort = sd.read_cohort(str(write_csv(tmp_path / "t.csv", ["path", "time", "event"], [["a/b.nii", "3", "1"]])))
    assert cohort.case == ["a/b.nii"]
