"""PRS-Med's data: annotation CSVs and their files, positions, the check, and raw images made into a data set."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter
from test_images_and_tables import save_dicom

import tasks.prs_med.sample_data
from tasks.prs_med.annotations import (
    check_data,
    is_label_map,
    name_position,
    open_mask,
    position_in,
    position_of,
    read_rows,
)
from tasks.prs_med.prepare import prepare
from tools.prepare_data import parse_args
from utils.cli import InputError

SIDE = 40
HEADER = "image_path,image_name,split,description,position,question,answer,patient"


def square(top: int, left: int, side: int = 12) -> np.ndarray:
    """(40, 40) bool."""
    mask = np.zeros((SIDE, SIDE), bool)
    mask[top : top + side, left : left + side] = True
    return mask


TWO_LABELS = square(2, 2) + np.uint8(2) * square(25, 25, 9)


def save(path: Path, values) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.asarray(values)
    Image.fromarray(values.astype(np.uint8) * 255 if values.dtype == bool else values).save(path)


def picture(number: int) -> np.ndarray:
    """(40, 40) uint8, another one for each number."""
    return np.random.default_rng(number).integers(0, 256, (SIDE, SIDE)).astype(np.uint8)


def row(number: int, split: str, **changes: str) -> str:
    """A line of the CSV, about the mask <number>.png."""
    fields = {"image_path": f"ct/{split}_masks/{number}.png", "image_name": f"{number}.png", "split": split}
    fields |= {"description": "", "position": "", "question": "Where is the liver?"}
    fields |= {"answer": "The liver is in the top left.", "patient": f"p{number}", **changes}
    return ",".join(fields[name] for name in HEADER.split(","))


def write_set(root: Path, *more: str) -> Path:
    """Three images of three patients, in train, train and test; further lines of the CSV. Returns root."""
    lines = [HEADER, row(0, "train"), row(1, "train"), row(2, "test"), *more]
    for number, split in enumerate(("train", "train", "test")):
        save(root / f"ct/{split}_images/{number}.png", picture(number))
        save(root / f"ct/{split}_masks/{number}.png", square(4, 4))
    (root / "annotations").mkdir()
    (root / "annotations/ct.csv").write_text("\n".join(lines))
    return root


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "mask", "path"),
    [
        ("ct/val_images/9.png", "ct/val_masks/9.png", "ct/val_masks/9.png"),
        ("ct/val_images/9.png", "ct/val_masks/9.png", r"ct\\val_masks\\9.png"),
        ("ct/val_images/9.png", "ct/val_masks/9.png", "ct/val_images/9.png"),
        ("ct/val_images/9.png", "ct/val_masks/9.png", "images_and_masks/ct/val_masks/9.png"),
        ("images_and_masks/ct/val_images/9.png", "images_and_masks/ct/val_masks/9.png", "ct/val_masks/9.png"),
        ("data/ct/val_images/9.png", "data/ct/val_masks/9.png", "ct/val_masks/9.png"),
        ("skin/val_images/I_9.jpg", "skin/val_masks/I_9_Segmentation.png", "skin/val_masks/I_9_Segmentation.png"),
        ("skin/val_images/I_9.jpg", "skin/val_masks/I_9_Segmentation.png", "skin/val_images/I_9.jpg"),
        ("ct/val_images/9.tif", "ct/val_masks/9.png", "ct/val_masks/9.png"),
        ("ct/val_images/a.1.dcm", "ct/val_masks/a.1.png", "ct/val_masks/a.1.png"),
        ("ct/val_images/shared.png", "ct/val_masks/9_liver.png", "ct/val_masks/9_liver.png"),
    ],
)
@pytest.mark.parametrize("folder", ["annotations", "annotations/qa"])
def test_the_files_of_a_row(tmp_path, image, mask, path, folder):
    for name in (image, mask):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / folder).mkdir(parents=True)
    line = row(9, "val", image_path=path, image_name="shared.png")
    (tmp_path / folder / "ct.csv").write_text(f"{HEADER}\n{line}")
    (found,) = read_rows(tmp_path)
    assert (found.image, found.mask) == (str(tmp_path / image), str(tmp_path / mask))
    assert found[3:6] == ("val", "Where is the liver?", "The liver is in the top left.")
    assert found.source == f"{tmp_path / folder / 'ct.csv'}:2"


def test_all_bad_rows_are_listed_at_once(tmp_path, capsys):
    absent, outside = row(0, "train", image_path="ct/train_masks/7.png"), row(0, "train", image_path="../a_masks/0.png")
    write_set(tmp_path, absent, row(1, "dev"), row(1, "train", answer=" "), outside, row(8, "test"))
    save(tmp_path / "ct/test_masks/8.png", square(4, 4))
    with pytest.raises(InputError, match=r"ct.csv:5, .*ct.csv:6, .*ct.csv:7, ...: 5 rows cannot be used"):
        read_rows(tmp_path)
    reasons = ["mask ct/train_masks/7.png does not exist", "split 'dev'", "empty 'answer'", "'../a_masks", "no image 8"]
    for line, number, reason in zip(capsys.readouterr().out.splitlines(), range(5, 10), reasons, strict=True):
        assert line.startswith(f"{tmp_path}/annotations/ct.csv:{number}: ")
        assert reason in line
        assert "; " in line
    assert [r.image[-5:] for r in read_rows(tmp_path, skip_bad_rows=True)] == ["0.png", "1.png", "2.png"]
    assert "5 rows dropped, 3 left" in capsys.readouterr().out


def test_annotations_and_patients_are_chosen(tmp_path):
    write_set(tmp_path)
    table = tmp_path / "annotations/ct.csv"
    table.with_name("mr.csv").write_text(table.read_text())
    assert [(r.modality, r.patient) for r in read_rows(tmp_path, ["mr"])] == [("mr", f"p{n}") for n in range(3)]
    assert len(read_rows(tmp_path)) == 6
    assert [r.patient for r in read_rows(tmp_path, ["ct"], "image_name")] == ["0.png", "1.png", "2.png"]
    assert [r.patient for r in read_rows(tmp_path, ["ct"], None, r"(\d)\.png")] == ["0", "1", "2"]
    for names, column, message in ((["us"], None, "no us.csv, there are ct, mr"), (None, "who", "no column 'who'")):
        with pytest.raises(InputError, match=message):
            read_rows(tmp_path, names, column)


# --- masks and positions ----------------------------------------------------------------------------------------------


def test_positions_by_the_bounding_box():
    """Against the box as the list of its pixels gives it, on random sparse masks of odd and even sizes."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(400):
        mask = rng.random(rng.integers(3, 12, 2)) < 0.06
        if not mask.any():
            assert position_of(mask) is None
            continue
        low, high = np.argwhere(mask).min(0), np.argwhere(mask).max(0) + 1
        middle = np.array(mask.shape) / 2
        expected = "center"
        if not ((low < middle) & (middle < high)).all():
            y, x = (low + high) / 2 < middle
            expected = f"{'top' if y else 'bottom'} {'left' if x else 'right'}"
        assert position_of(mask) == expected
        seen.add(expected)
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("sentence", "position"),
    [
        ("The left kidney is in the bottom right of the image.", "bottom right"),
        ("The upper-left lobe, in the Lower Left part.", "bottom left"),
        ("It lies at the centre.", "center"),
        ("In the middle, not the top right", "top right"),
        ("On the left, at the top.", None),
    ],
)
def test_the_position_that_a_sentence_names(sentence, position):
    assert position_in(sentence) == position
    moved = name_position(sentence, position, "top left")
    assert position_in(moved) == (position and "top left")
    assert name_position(sentence, "bottom center", "top left") == sentence


def test_a_mask_is_binary_whatever_its_values(tmp_path):
    save(tmp_path / "of_1.png", square(4, 4).astype(np.uint8))
    save(tmp_path / "of_255.png", np.dstack([square(4, 4)] * 3))
    save(tmp_path / "soft.jpg", square(4, 4))
    for path in tmp_path.iterdir():
        assert np.array_equal(open_mask(path), square(4, 4))


def test_label_maps_are_told_from_soft_edges(tmp_path):
    for radius in (2, 9, 70):
        disc = np.hypot(*(np.mgrid[:200, :200] - 100)) < radius
        save(tmp_path / "a.jpg", disc)
        assert not is_label_map(np.asarray(Image.open(tmp_path / "a.jpg")))
        assert not is_label_map((gaussian_filter(255.0 * disc, 0.8)).astype(np.uint8))
    assert all(is_label_map(values) for values in (TWO_LABELS, 100 * TWO_LABELS, TWO_LABELS + np.uint8(1)))
    # an image given as a mask
    assert is_label_map(np.tile(np.arange(200), (200, 1)))


# --- the check --------------------------------------------------------------------------------------------------------


def change_image(root):
    shutil.copy(root / "ct/train_images/0.png", root / "ct/test_images/2.png")


SPLEEN = {"question": "Where is the spleen?", "answer": "The spleen is in the top left."}
LONGER = {"question": "What is the position of the whole liver?", "answer": "The whole liver has a top left position."}
WARNINGS = {
    "the same image": (change_image, ":4"),
    "the same patient": (lambda root: None, ":5", row(2, "test", patient="p1")),
    "aspect ratio": (lambda root: save(root / "ct/train_masks/1.png", square(4, 4)[:30]), ":3"),
    "two structures": (lambda root: None, ":5", row(0, "train", **SPLEEN), row(1, "train", **LONGER)),
    "label map": (lambda root: save(root / "ct/train_masks/0.png", TWO_LABELS), ":2"),
    "empty": (lambda root: save(root / "ct/train_masks/0.png", square(4, 4) & False), ":2"),
    "fewer than 25 pixels": (lambda root: save(root / "ct/train_masks/0.png", square(4, 4, 9)), ":2"),
}


@pytest.mark.parametrize("kind", WARNINGS)
def test_each_warning_counts_its_rows(tmp_path, kind):
    change, place, *more = WARNINGS[kind]
    rows = read_rows(write_set(tmp_path))
    assert check_data(rows, 20, None)[1] == []
    shutil.rmtree(tmp_path / "annotations")
    write_set(tmp_path, *more)
    change(tmp_path)
    _, (line,) = check_data(read_rows(tmp_path), 20, None)
    assert line.startswith(f"1 rows ({tmp_path}/annotations/ct.csv{place}): ")
    assert kind in line


def test_all_unreadable_files_are_listed_at_once(tmp_path, capsys):
    rows = read_rows(write_set(tmp_path))
    for name in ("train_images/1.png", "test_masks/2.png"):
        (tmp_path / "ct" / name).write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match=r"ct.csv:3, .*ct.csv:4, ...: 2 files cannot be opened"):
        check_data(rows, None, tmp_path / "cache.json")
    assert [line.split(" ")[1][-5:] for line in capsys.readouterr().out.splitlines()] == ["1.png", "2.png"]


def test_a_second_check_reads_only_what_has_changed(tmp_path):
    rows = read_rows(write_set(tmp_path))
    cache, image = tmp_path / "cache.json", tmp_path / "ct/train_images/0.png"
    assert check_data(rows, None, cache)[1] == []
    stat = image.stat()
    image.write_bytes(bytes(stat.st_size))
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert check_data(rows, None, cache)[1] == []
    os.utime(image)
    with pytest.raises(InputError, match="0.png cannot be opened"):
        check_data(rows, None, cache)
    # a damaged cache is written anew
    save(image, picture(0))
    for damaged in ("{", "[1]", '{"image a": [1]}'):
        cache.write_text(damaged)
        assert check_data(rows, None, cache)[1] == []
        assert len(json.loads(cache.read_text())) == 6


# --- raw images -------------------------------------------------------------------------------------------------------

NAMES = {
    "top left": ("a_1.2 final.png", "a_1.2 final_mask.PNG"),
    "top right": ("Über+x-y.tif", "über+x-y.seg.png"),
    "bottom left": ("p/1.png", "p/1_Segmentation.png"),
    "bottom right": ("p_1.jpg", "p_1_gt.bmp"),
    "center": ("q?", "q?.tif"),
}
CORNERS = dict(zip(NAMES, [(2, 2), (2, 26), (26, 2), (26, 26), (14, 14)], strict=True))


def run(folder: Path, *flags: str, masks: str = "masks", split: str = "1,0,0") -> list[dict[str, str]]:
    """Prepare folder/scans and folder/<masks> into folder/out; the rows of its CSV."""
    paths = [str(folder / name) for name in ("scans", masks, "out")]
    prepare(parse_args(["prs_med", *paths, "--split", split, *flags])[1])
    with open(folder / "out/annotations/scans.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_raw_images_of_many_names_and_formats(tmp_path, capsys):
    for number, (position, (image, mask)) in enumerate(NAMES.items()):
        pixels, inside = picture(number), square(*CORNERS[position])
        save(tmp_path / "masks" / mask, inside.astype(np.uint16) if mask.endswith("tif") else inside)
        if image == "q?":
            save_dicom(tmp_path / "scans" / image, pixels)
        else:
            save(tmp_path / "scans" / image, pixels.astype(np.uint16) * 100 if image.endswith("tif") else pixels)
    save(tmp_path / "scans/lonely.png", picture(9))
    save(tmp_path / "masks/astray.png", square(2, 2))
    table = run(tmp_path, "--structure", "lesion")
    assert "left out: 2 files" in capsys.readouterr().out
    rows = read_rows(tmp_path / "out")
    for entry, read in zip(table, rows, strict=True):
        assert position_in(read.answer) == entry["position"]
        assert "lesion" in read.question
        assert np.array_equal(open_mask(read.mask), square(*CORNERS[entry["position"]]))
    assert {entry["position"] for entry in table} == set(NAMES)
    assert check_data(rows, None, None)[1] == []


@pytest.mark.parametrize("masks", ["masks", "scans"])
def test_masks_of_several_structures_by_name(tmp_path, masks):
    save(tmp_path / "scans/a_1.png", picture(0))
    for name, corner in (("left_kidney_mask", (2, 2)), ("kidney", (26, 26))):
        save(tmp_path / masks / f"a_1_{name}.png", square(*corner))
    table = run(tmp_path, "--structure", "kidney", "left kidney", masks=masks)
    assert {entry["position"]: "left kidney" in entry["question"] for entry in table} == {
        "top left": True,
        "bottom right": False,
    }
    assert len({read.image for read in read_rows(tmp_path / "out")}) == 1


@pytest.mark.parametrize("labels", ["1=liver, 2 = cysts,3=-,4=speck", "old.json", "new.json"])
def test_a_label_map_becomes_masks(tmp_path, labels):
    save(tmp_path / "scans/a_0000.png", picture(0))
    save(tmp_path / "masks/a.png", TWO_LABELS + np.uint8(3) * square(15, 2, 5) + np.uint8(4) * square(30, 2, 3))
    names = {"background": 0, "liver": 1, "cysts": 2, "-": 3, "speck": 4}
    (tmp_path / "new.json").write_text(json.dumps({"labels": names}))
    (tmp_path / "old.json").write_text(json.dumps({"labels": {str(value): name for name, value in names.items()}}))
    table = run(tmp_path, "--labels", str(tmp_path / labels) if "json" in labels else labels)
    assert [entry["position"] for entry in table] == ["bottom right", "top left"]
    assert "cysts" in table[0]["question"]
    masks = [open_mask(read.mask) for read in read_rows(tmp_path / "out")]
    assert np.array_equal(masks[0], TWO_LABELS == 2)
    assert np.array_equal(masks[1], TWO_LABELS == 1)


@pytest.mark.parametrize(
    ("values", "flags", "reason"),
    [
        (TWO_LABELS, ["--labels", "1=x"], "holds label 2; name it"),
        (np.dstack([TWO_LABELS, TWO_LABELS, TWO_LABELS // 2]), ["--labels", "1=x"], "labels in colours"),
        (TWO_LABELS, ["--structure", "x", "y"], "a label map; name its values"),
        (square(2, 2), ["--structure", "x", "y"], "its name does not end with a --structure"),
    ],
)
def test_a_mask_of_unknown_meaning_is_refused(tmp_path, values, flags, reason):
    save(tmp_path / "scans/a.png", picture(0))
    save(tmp_path / "masks/a.png", values)
    with pytest.raises(InputError, match=f"masks/a.png: cannot be used .{reason}"):
        run(tmp_path, *flags)


@pytest.mark.parametrize("codes", ["RAS", "LPS", "PIR"])
def test_a_volume_is_cut_and_seen_from_below(tmp_path, codes):
    """A lesion at the patient's right and front, in 12 of 20 slices 2.5 mm apart."""
    labels = np.zeros((30, 36, 20), np.uint8)
    labels[20:28, 24:34, 4:16] = 1
    turn = nibabel.orientations.ornt_transform(*map(nibabel.orientations.axcodes2ornt, ("RAS", codes)))
    for name, values in (("scans", labels * 50.0 + np.arange(36)[:, None]), ("masks", labels)):
        (tmp_path / name).mkdir()
        volume = nibabel.Nifti1Image(values, np.diag([1, 1, 2.5, 1])).as_reoriented(turn)
        nibabel.save(volume, tmp_path / name / "case.nii.gz")
    table = run(tmp_path, "--structure", "lesion", "--slice_spacing", "5")
    assert [entry["image_name"] for entry in table] == [f"case_s{n:03d}.png" for n in range(4, 16, 2)]
    read = read_rows(tmp_path / "out")[0]
    mask, pixels = np.asarray(Image.open(read.mask)) > 0, np.asarray(Image.open(read.image))
    expected = np.zeros((36, 30), bool)
    expected[2:12, 2:10] = True
    assert np.array_equal(mask, expected)
    assert pixels[mask].min() > pixels[~mask].max()
    assert pixels[0, -1] > pixels[-1, -1]
    # two labels, each in slices of its own
    labels[..., 9:] *= 2
    nibabel.save(nibabel.Nifti1Image(labels, np.diag([1, 1, 2.5, 1])).as_reoriented(turn), tmp_path / "masks/case.nii")
    (tmp_path / "masks/case.nii.gz").unlink()
    with pytest.raises(InputError, match="masks/case.nii: cannot be used .a label map"):
        run(tmp_path, "--structure", "lesion", "--overwrite")


def patients(folder: Path, count: int = 6) -> None:
    for number in range(2 * count):
        save(folder / f"scans/P{number // 2}_{number}.png", picture(number))
        save(folder / f"masks/P{number // 2}_{number}.png", square(2, 2))


def test_a_patient_is_in_one_split(tmp_path, capsys):
    patients(tmp_path)
    flags = ["--structure", "lungs", "--seed", "2"]
    table = run(tmp_path, *flags, "--patient_pattern", r"P\d", split="50,25,25")
    found = {(entry["patient"], entry["split"]) for entry in table}
    assert len(found) == 6
    assert len({split for _, split in found}) == 3
    assert "are the lungs" in str(table)
    assert "is the lungs" not in str(table)

    # a table decides; a patient without images is counted, an image without a row left out
    lines = [f"P{n // 2}_{n}.png,Q{n // 2},{'test' if n < 4 else 'training'}" for n in range(10)]
    (tmp_path / "t.csv").write_text("\n".join(["file,who,split", *lines, "x.png,Q9,val"]))
    table = run(tmp_path, *flags, "--overwrite", "--table", str(tmp_path / "t.csv"), "--patient_column", "who")
    assert {(entry["patient"], entry["split"]) for entry in table} == {
        (f"Q{n}", "test" if n < 2 else "train") for n in range(5)
    }
    assert "1 of its patients have no image" in capsys.readouterr().out
    (tmp_path / "t.csv").write_text("file,patient,split\nP0_0,Q0,train\nP0_1,Q0,test")
    with pytest.raises(InputError, match="t.csv:3: this patient is in another split"):
        run(tmp_path, *flags, "--overwrite", "--table", str(tmp_path / "t.csv"))


def test_all_bad_files_are_listed_and_nothing_is_written(tmp_path):
    """As a user starts it: exit code 2, one line on stderr beside the progress, the list above it."""
    patients(tmp_path, 3)
    (tmp_path / "scans/P0_1.png").write_bytes(b"\x89PNG")
    save(tmp_path / "masks/P1_2.png", TWO_LABELS)
    save(tmp_path / "masks/P1_3.png", square(2, 2)[:30])
    save(tmp_path / "masks/P2_4_seg.png", square(2, 2))
    command = [
        sys.executable,
        "-m",
        "tools.prepare_data",
        "prs_med",
        *(str(tmp_path / d) for d in ("scans", "masks", "o")),
    ]
    done = subprocess.run([*command, "--structure", "lesion"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/scans/P0_1.png, ")
    reasons = {"scans/P0_1.": "cannot identify", "P1_2.": "a label map", "P1_3.": "do not fit", "P2_4_seg.": "already"}
    for name, reason in reasons.items():
        assert any(name in line and reason in line and "; " in line for line in done.stdout.splitlines())
    assert not any((tmp_path / "o").rglob("*"))


def test_a_set_is_replaced_only_when_asked(tmp_path, monkeypatch):
    patients(tmp_path, 1)
    flags = ["--structure", "lesion"]
    table = run(tmp_path, *flags)
    with pytest.raises(InputError, match="is there already"):
        run(tmp_path, *flags)
    (tmp_path / "masks/P0_0.png").unlink()
    written = []
    monkeypatch.setattr(tasks.prs_med.sample_data, "write_small_models", lambda *values: written.append(values))
    assert run(tmp_path, *flags, "--overwrite", "--small_models", "--seed", "0") == table[1:]
    assert len(list((tmp_path / "out").rglob("*.png"))) == 2
    assert written == [(tmp_path / "out", [table[1]["question"], table[1]["answer"]], 96, 0)]
