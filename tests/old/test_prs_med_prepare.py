"""prepare_data.py prs_med: raw images and masks become what train_prs_med.py reads."""

import csv
import json
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np
import pytest
from conftest import PRS_MED, ROOT, tree, words_of
from PIL import Image
from raw_images import SIDE, drawn_on_nothing, gray, palette_image, save_dicom, save_turned, square, write_raw_set

from old import prepare_data
from old.cli_utils import InputError
from old.image_utils import open_upright
from old.table_utils import Shares, split_of
from tasks.prs_med.data import open_mask, read_annotations
from tasks.prs_med.pairs import find_pairs

PREPARE = str(ROOT / "old/prepare_data.py")
LESION = ["--structure", "lesion"]


def prepare(folder: Path, *flags, out: str = "out") -> list[dict]:
    """Run the command on scans/ and masks/ of a folder, in this process; the rows of its table.

    A list among the flags stands for its items.
    """
    words = words_of(["prs_med", folder / "scans", folder / "masks", folder / out, words_of(flags)])
    args = prepare_data.parse_args(words)
    name = args.name or "scans"
    prepare_data.main(args)
    with open(folder / out / "annotations" / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def folders(folder: Path) -> tuple[Path, Path]:
    scans = folder / "scans"
    masks = folder / "masks"
    scans.mkdir()
    masks.mkdir()
    return scans, masks


def save(path: Path, values: np.ndarray) -> None:
    Image.fromarray(values).save(path)


def another(number: int) -> np.ndarray:
    """An image that is not like the others."""
    values = gray(square())
    values[-1, -1] = 50 + number
    return values


def small_set(folder: Path, count: int = 3) -> None:
    """p0_1 ... of the plainest kind."""
    scans, masks = folders(folder)
    for number in range(count):
        mask = square()
        save(scans / f"p{number}_1.png", another(number))
        save(masks / f"p{number}_1.png", mask.astype(np.uint8) * 255)


# --- formats ----------------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """How an image is written, and how far its grey may be from the original."""

    name: str
    write: Callable
    tolerance: int = 1


IMAGE_FORMATS = [
    Format("8bit.png", save),
    Format("16bit.png", lambda path, values: save(path, values.astype(np.uint16) * 200 + 31)),
    Format("16bit.tif", lambda path, values: save(path, values.astype(np.uint16) * 9)),
    Format("float.tiff", lambda path, values: save(path, values.astype(np.float32) / 1000 - 3)),
    Format("rgba.png", lambda path, values: Image.fromarray(values).convert("RGBA").save(path)),
    Format("palette.png", lambda path, values: Image.fromarray(values).convert("P").save(path)),
    Format("bitmap.bmp", save),
    Format("jpeg.jpeg", lambda path, values: Image.fromarray(values).save(path, quality=98), 12),
    Format("turned.jpg", lambda path, values: save_turned(path, values), 60),
    Format("plain.dcm", save_dicom),
    Format("no_ending", save_dicom),
    Format("inverse.dcm", lambda path, values: save_dicom(path, 255 - values, PhotometricInterpretation="MONOCHROME1")),
    Format("hu.dcm", lambda p, v: save_dicom(p, v * 4, RescaleSlope="0.25", RescaleIntercept="-100")),
]


@pytest.mark.parametrize("kind", IMAGE_FORMATS, ids=lambda kind: kind.name)
def test_images_of_every_format(tmp_path, kind):
    mask = square((3, 5))
    path = tmp_path / kind.name
    values = gray(mask)
    kind.write(path, values if "dcm" not in kind.name and kind.name != "no_ending" else values.astype(np.uint16))
    image, _ = open_upright(str(path))
    difference = np.asarray(image.convert("L")).astype(int) - values
    assert np.abs(difference).max() <= kind.tolerance
    assert np.abs(difference).mean() < 2


def test_a_dicom_window(tmp_path):
    """HU below the window are black and above it white, by the file's own window and by one that is given."""
    hu = np.linspace(-1000, 1000, SIDE * SIDE).reshape(SIDE, SIDE).round()
    tags = {"RescaleSlope": "1", "RescaleIntercept": "-1000", "WindowCenter": "40", "WindowWidth": "400"}
    save_dicom(tmp_path / "a.dcm", (hu + 1000).astype(np.uint16), **tags)
    image, _ = open_upright(str(tmp_path / "a.dcm"))
    expected = (255 * (hu - -160) / 400).clip(0, 255)
    assert np.abs(np.asarray(image) - expected).max() <= 1

    scans, masks = folders(tmp_path)
    shutil.copy(tmp_path / "a.dcm", scans / "a.dcm")
    save(masks / "a.png", square().astype(np.uint8))
    prepare(tmp_path, LESION, "--window", "0,2000", "--split", "100,0,0")
    written = np.asarray(Image.open(tmp_path / "out" / "scans" / "train_images" / "a.png"))
    assert np.abs(written - (255 * (hu + 1000) / 2000)).max() <= 1


def smooth(mask: np.ndarray) -> Image.Image:
    """A mask with soft edges, as resizing leaves them."""
    small = Image.fromarray(mask.astype(np.uint8) * 255).resize((80, 80), Image.Resampling.BICUBIC)
    return small.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


MASK_FORMATS = {
    "of_1.png": lambda mask: Image.fromarray(mask.astype(np.uint8)),
    "of_255.png": lambda mask: Image.fromarray(mask.astype(np.uint8) * 255),
    "of_1_bit.png": Image.fromarray,
    "16bit.png": lambda mask: Image.fromarray(mask.astype(np.uint16) * 65535),
    "float.tif": lambda mask: Image.fromarray(mask.astype(np.float32)),
    "jpeg.jpg": lambda mask: Image.fromarray(mask.astype(np.uint8) * 255),
    "smooth.png": smooth,
    "palette.png": palette_image,
    "red_on_nothing.png": lambda mask: drawn_on_nothing(mask, (255, 0, 0)),
    "black_on_nothing.png": lambda mask: drawn_on_nothing(mask, (0, 0, 0)),
    "white_on_black.png": lambda mask: Image.fromarray(mask.astype(np.uint8) * 255).convert("RGBA"),
}


@pytest.mark.parametrize("name", MASK_FORMATS)
def test_masks_of_every_format(tmp_path, name):
    mask = square((22, 4))
    scans, masks = folders(tmp_path)
    save(scans / f"{Path(name).stem}.png", gray(mask))
    MASK_FORMATS[name](mask).save(masks / name)
    (row,) = prepare(tmp_path, LESION, "--split", "100,0,0")
    assert row["position"] == "bottom left"
    written = open_mask(str(tmp_path / "out" / row["image_path"]))
    assert np.array_equal(written, mask)


def test_image_and_mask_are_turned_alike(tmp_path):
    """A photograph with its EXIF tag, and a mask that was drawn on it as it is seen."""
    mask = np.zeros((30, 50), bool)
    mask[2:12, 3:20] = True
    scans, masks = folders(tmp_path)
    save_turned(scans / "a.png", gray(mask))
    save(masks / "a.png", mask.astype(np.uint8))
    (row,) = prepare(tmp_path, LESION, "--split", "100,0,0")
    image = Image.open(tmp_path / "out" / "scans" / "train_images" / "a.png")
    assert np.array_equal(np.asarray(image), gray(mask))
    assert not image.getexif()
    assert row["position"] == "top left"


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("case 1.png", "case 1_mask.png"),
        ("v1.2 final.tif", "v1.2 final-seg.png"),
        ("Müller.jpg", unicodedata.normalize("NFD", "müller_Segmentation.PNG")),
        ("A_label.png", "a_label.png"),
        ("x_0000.png", "x.png"),
        ("x_image.png", "x_gt.png"),
        ("p1/scan.png", "p1/scan.png"),
        ("case_1.png", "case_1_left_kidney_mask.png"),
        ("case_1.png", "case_1 left kidney.png"),
    ],
)
def test_names_that_belong_together(tmp_path, image, mask):
    scans, masks = folders(tmp_path)
    for path in (scans / image, masks / mask):
        path.parent.mkdir(exist_ok=True)
        save(path, gray(square()))
    found = find_pairs(scans, masks, ["left kidney"])
    assert [(pair.image, pair.mask) for pair in found.pairs] == [(scans / image, masks / mask)]
    assert found.pairs[0].structure == ("left kidney" if "kidney" in mask else "")
    assert found.unpaired == []


def test_each_file_without_a_partner_is_named(tmp_path, capsys):
    small_set(tmp_path)
    save(tmp_path / "scans" / "lonely.png", gray(square()))
    save(tmp_path / "masks" / "astray_mask.png", gray(square()))
    (tmp_path / "scans" / "notes.txt").write_text("no image")
    assert len(prepare(tmp_path, LESION)) == 3
    printed = capsys.readouterr().out
    assert f"no partner: {tmp_path}/scans/lonely.png\n" in printed
    assert f"no partner: {tmp_path}/masks/astray_mask.png\n" in printed
    assert "2 files without a partner" in printed


def test_masks_beside_their_images(tmp_path):
    scans, _ = folders(tmp_path)
    for name in ("a.png", "a_mask.png", "b.png", "b_mask.png"):
        save(scans / name, square().astype(np.uint8) * 255)
    found = find_pairs(scans, scans, [])
    assert [(pair.image.name, pair.mask.name) for pair in found.pairs] == [
        ("a.png", "a_mask.png"),
        ("b.png", "b_mask.png"),
    ]


# --- splits -----------------------------------------------------------------------------------------------------------


def test_the_split_depends_on_seed_and_patient_alone():
    shares = Shares(70, 15, 15)
    few = {name: split_of(name, 3, shares) for name in map(str, range(50))}
    many = {name: split_of(name, 3, shares) for name in map(str, range(20_000))}
    assert few.items() <= many.items()
    assert many != {name: split_of(name, 4, shares) for name in many}
    counts = Counter(many.values())
    assert counts["train"] / len(many) == pytest.approx(0.70, abs=0.015)
    assert counts["val"] / len(many) == pytest.approx(0.15, abs=0.015)


def patients_of(rows: list[dict]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["patient"], set()).add(row["split"])
    return found


def many_images(folder: Path) -> list[str]:
    """Six patients of three images each."""
    scans, masks = folders(folder)
    names = [f"P{patient}_{image}" for patient in range(6) for image in range(3)]
    for number, name in enumerate(names):
        save(scans / f"{name}.png", another(number))
        save(masks / f"{name}.png", square().astype(np.uint8))
    return names


def test_patients_by_pattern_and_by_column(tmp_path, capsys):
    names = many_images(tmp_path)
    flags = [*LESION, "--seed", "2", "--split", "50,25,25"]
    by_pattern = prepare(tmp_path, flags, "--patient_pattern", r"^(P\d)", out="a")
    assert set(patients_of(by_pattern)) == {f"P{number}" for number in range(6)}
    assert all(len(splits) == 1 for splits in patients_of(by_pattern).values())

    # the same patients in a table, under another name and with semicolons
    lines = ["Datei;File;Who", *(f"x;{name}.PNG;{name[:2]}" for name in names)]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(lines))
    by_column = prepare(tmp_path, flags, "--table", table, "--patient_column", "who", out="b")
    assert by_column == by_pattern
    assert "split by patient (column 'who'), 50, 25 and 25 %, seed 2" in capsys.readouterr().out

    # without patients each image is one, which is said
    by_image = prepare(tmp_path, flags, out="c")
    assert len(patients_of(by_image)) == 18
    assert "split by image, as no patients are known" in capsys.readouterr().out


def test_a_table_with_splits_questions_and_structures(tmp_path, capsys):
    names = many_images(tmp_path)
    table = tmp_path / "t.csv"
    lines = ["file,patient,split,structure,question,answer"]
    for name in names:
        split = "test" if name.startswith("P5") else "training"
        lines.append(f"{name},{name[:2]},{split},cyst,Where is it?,")
        lines.append(f'scans/{name}.png,{name[:2]},{split},cyst,"Left, or right?",It is left.')
    table.write_text("\n".join(lines))

    rows = prepare(tmp_path, "--table", table)
    assert "note: " not in capsys.readouterr().out
    assert len(rows) == 36
    assert {row["split"] for row in rows if row["patient"] == "P5"} == {"test"}
    assert {row["split"] for row in rows if row["patient"] != "P5"} == {"train"}
    assert Counter((row["question"], "cyst" in row["answer"]) for row in rows) == {
        ("Where is it?", True): 18,
        ("Left, or right?", False): 18,
    }

    # a row twice, and a question with two answers
    lines += [lines[1], lines[2].replace("It is left.", "It is right.")]
    table.write_text("\n".join(lines))
    prepare(tmp_path, "--table", table, out="again")
    answers, copies = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert "1 answer to a question that a row before answers otherwise, such as 'It is right.'" in answers
    assert copies == "note: 1 row there twice or more; each counts"


def test_an_empty_split_is_said_with_a_seed_that_fills_it(tmp_path, capsys):
    small_set(tmp_path, count=4)
    seed = next(
        seed for seed in range(99) if {split_of(f"p{n}_1", seed, Shares(70, 15, 15)) for n in range(4)} == {"train"}
    )
    prepare(tmp_path, LESION, "--seed", seed, out="a")
    note = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("note: "))
    assert note.startswith("note: no patient falls into test and val; --seed ")
    better = note.split("--seed ")[1].split(" ")[0]
    rows = prepare(tmp_path, LESION, "--seed", better, out="b")
    assert {row["split"] for row in rows} == {"train", "val", "test"}


# --- label maps and volumes -------------------------------------------------------------------------------------------


def test_a_label_map_becomes_a_mask_and_a_row_a_label(tmp_path):
    liver = square((3, 3))
    kidney = square((26, 26), 8)
    speck = square((30, 5), 2)
    scans, masks = folders(tmp_path)
    save(scans / "a.png", gray(liver))
    save(masks / "a_label.png", (liver + 2 * kidney + 3 * speck + 4 * square((3, 30), 4)).astype(np.uint8))
    labels = "1=liver,2=left kidneys,3=cyst,4=-"
    rows = prepare(tmp_path, "--labels", labels, "--split", "100,0,0")
    assert [(row["position"], row["image_name"]) for row in rows] == [("top left", "a.png"), ("bottom right", "a.png")]
    assert not any(f" {word}" in rows[0]["question"] for word in ("are", "they"))
    assert not any(f" {word} the" in rows[1]["question"] for word in ("is", "it"))
    assert all(row["position"] in row["answer"] for row in rows)

    # the training finds the image, which is there once
    assert len(list((tmp_path / "out").rglob("train_images/*"))) == 1
    read = read_annotations(tmp_path / "out", None, False)
    assert [Path(row.image).name for row in read] == ["a.png", "a.png"]
    for row, mask in zip(read, (liver, kidney), strict=True):
        assert np.array_equal(open_mask(row.mask), mask)


def volume(folder: Path, codes: str, sizes: tuple[float, float, float]) -> None:
    """A Decathlon folder with a volume of 30 x 36 x 20 voxels, stored in the orientation that the codes say.

    In it are a liver at the patient's right and front, in slices 4 to 15, and a tumour at the left behind, in 8 to 10.
    """
    values = np.zeros((30, 36, 20), np.float32)
    labels = np.zeros((30, 36, 20), np.uint8)
    labels[20:28, 24:34, 4:16] = 1
    labels[2:8, 3:9, 8:11] = 2
    values[:] = np.arange(36)[None, :, None]
    values[labels > 0] += 100
    start = nibabel.orientations.io_orientation(np.eye(4))
    end = nibabel.orientations.axcodes2ornt(codes)
    for name, array in (("imagesTr", values), ("labelsTr", labels)):
        (folder / name).mkdir(parents=True)
        image = nibabel.Nifti1Image(array, np.diag([*sizes, 1.0]))
        turned = image.as_reoriented(nibabel.orientations.ornt_transform(start, end))
        nibabel.save(turned, folder / name / "liver_1.nii.gz")


@pytest.mark.parametrize("codes", ["RAS", "LPS", "PIR"])
def test_volumes_of_the_decathlon(tmp_path, capsys, codes):
    folder = tmp_path / "Task03"
    volume(folder, codes, (1.0, 1.0, 2.5))
    case = {"image": "./imagesTr/liver_1.nii.gz", "label": "./labelsTr/liver_1.nii.gz"}
    facts = {"labels": {"0": "background", "1": "liver", "2": "tumour"}, "training": [case]}
    (folder / "dataset.json").write_text(json.dumps(facts))

    # the folder itself, or those of images and labels: 12 slices of 2.5 mm with something in them, of which each second
    tables = []
    for number, (images, masks) in enumerate([(folder, folder), (folder / "imagesTr", folder / "labelsTr")]):
        words = ["prs_med", images, masks, tmp_path / f"out{number}", "--slice_spacing", "5", "--split", "100,0,0"]
        prepare_data.main(prepare_data.parse_args([*map(str, words), "--name", "ct"]))
        tables.append((tmp_path / f"out{number}" / "annotations" / "ct.csv").read_text())
    assert tables[0] == tables[1]
    assert "6 slices of 1 volume, 5 mm apart" in capsys.readouterr().out

    # as radiologists look at it: the patient's right is at the left, the front at the top
    rows = read_annotations(tmp_path / "out0", None, False)
    liver = [row for row in rows if "liver" in row.question]
    tumour = [row for row in rows if "tumour" in row.question]
    assert len(liver) == 6
    assert len(tumour) == 2
    assert all("top left" in row.answer for row in liver)
    assert all("bottom right" in row.answer for row in tumour)
    mask = open_mask(liver[0].mask)
    assert mask.shape == (36, 30)
    assert mask[2:12, 2:10].all()
    assert mask.sum() == 80
    pixels = np.asarray(Image.open(liver[0].image)).astype(int)
    assert pixels[mask].min() > pixels[~mask].max()


# --- what is written --------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten_and_an_error_leaves_nothing(tmp_path):
    small_set(tmp_path)
    prepare(tmp_path, LESION)
    before = tree(tmp_path / "out")
    with pytest.raises(InputError, match="is there already; choose another --name or folder, or pass --overwrite"):
        prepare(tmp_path, LESION)

    # a second set beside it, one that cannot be read, and the first anew
    prepare(tmp_path, LESION, "--name", "second")
    (tmp_path / "scans" / "p2_1.png").write_bytes(b"no image")
    for flags in (["--name", "third"], ["--overwrite"]):
        with pytest.raises(InputError, match="not a readable image"):
            prepare(tmp_path, LESION, *flags)
    assert before.items() <= tree(tmp_path / "out").items()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["annotations", "scans", "second"]
    (tmp_path / "scans" / "p2_1.png").unlink()
    assert len(prepare(tmp_path, LESION, "--overwrite")) == 2
    assert len(list((tmp_path / "out" / "scans").rglob("*_images/*"))) == 2


def test_the_same_bytes_each_time(tmp_path):
    write_raw_set(tmp_path, 8)
    prepare(tmp_path, LESION, out="a")
    prepare(tmp_path, LESION, out="b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_from_raw_images_to_a_trained_model(tmp_path, zygote):
    """20 images of four kinds: prepared, then trained on without a flag but the data's, and asked."""
    write_raw_set(tmp_path)
    paths = [tmp_path / name for name in ("scans", "masks", "out")]
    seed = next(seed for seed in range(99) if all_filled(tmp_path, seed))
    done = zygote(PREPARE, "prs_med", paths, LESION, "--small_models", "--small_size", "32", "--seed", seed)
    assert done.code == 0, done.stderr
    assert len(list((tmp_path / "out" / "scans").rglob("*_images/*.png"))) == 20
    assert "0 files without a partner" in done.stdout

    run = ["--checkpoint_dir", tmp_path / "run", "--max_new_tokens", "2"]
    done = zygote(PRS_MED, "--data_root", tmp_path / "out", run, "--max_steps", "1", "--num_workers", "0")
    assert done.code == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()

    # a new image in DICOM, as it is
    asked = ["--predict", tmp_path / "scans" / "d03.dcm", "--question", "Where is the lesion located in this image?"]
    done = zygote(PRS_MED, asked, run)
    assert done.code == 0, done.stderr
    assert (tmp_path / "run" / "predictions" / "d03_mask.png").is_file()


def all_filled(folder: Path, seed: int) -> bool:
    names = [path.stem for path in (folder / "scans").iterdir()]
    return len({split_of(name, seed, Shares(70, 15, 15)) for name in names}) == 3


def test_the_newer_public_layout(tmp_path, prs_med_data):
    """annotations/qa/ holds the tables, and data/ the folders of each modality; both are read alike."""
    root = tmp_path / "newer"
    (root / "annotations").mkdir(parents=True)
    shutil.copytree(prs_med_data / "annotations", root / "annotations" / "qa")
    for table in (prs_med_data / "annotations").glob("*.csv"):
        shutil.copytree(prs_med_data / table.stem, root / "data" / table.stem)

    def contents(folder: Path) -> list[tuple]:
        rows = read_annotations(folder, None, False)
        return [(row.question, row.split, Path(row.image).read_bytes(), Path(row.mask).read_bytes()) for row in rows]

    assert contents(root) == contents(prs_med_data)
    assert len(contents(root)) == 54


# --- bad inputs -------------------------------------------------------------------------------------------------------


class Bad(NamedTuple):
    """What is done to a small set, the flags, and a part of the one line that tells it."""

    change: Callable
    flags: str
    message: str


def nothing(folder: Path) -> None:
    """The flags alone are wrong."""


def put(name: str, values: np.ndarray | bytes | str):
    """Write a file of these pixels, bytes or text."""

    def change(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if isinstance(values, np.ndarray):
            save(path, values)
        else:
            path.write_bytes(values.encode() if isinstance(values, str) else values)

    return change


def remove(name: str):
    return lambda folder: shutil.rmtree(folder / name)


def pages(folder: Path) -> None:
    image = Image.fromarray(gray(square()))
    (folder / "scans" / "p0_1.png").unlink()
    image.save(folder / "scans" / "p0_1.tif", save_all=True, append_images=[image])


def frames(folder: Path) -> None:
    (folder / "scans" / "p0_1.png").unlink()
    save_dicom(folder / "scans" / "p0_1.dcm", gray(square()), NumberOfFrames=2)


def flat_and_volume(folder: Path) -> None:
    (folder / "masks" / "p0_1.png").unlink()
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 4), np.uint8), np.eye(4)), folder / "masks" / "p0_1.nii")


def volumes(labels: np.ndarray, shift: float = 0.0, image: tuple = (6, 6, 6)):
    def change(folder: Path) -> None:
        remove("scans")(folder)
        remove("masks")(folder)
        scans, masks = folders(folder)
        affine = np.eye(4)
        nibabel.save(nibabel.Nifti1Image(np.ones(image, np.float32), affine), scans / "v.nii.gz")
        affine[0, 3] = shift
        nibabel.save(nibabel.Nifti1Image(labels, affine), masks / "v.nii.gz")

    return change


def cut_volume(folder: Path) -> None:
    volumes(np.ones((6, 6, 6), np.uint8))(folder)
    path = folder / "scans" / "v.nii.gz"
    path.write_bytes(path.read_bytes()[:60])


TWO_LABELS = np.ones((6, 6, 6), np.uint8)
TWO_LABELS[0] = 2
MAP = (square() + 2 * square((24, 24))).astype(np.uint8)
COLORED = np.dstack([MAP * 50, MAP * 20, MAP])
TABLE = "file,patient\np0_1,a\np1_1,b\np2_1,c\n"
SPLIT_TABLE = "file,split\np0_1,train\np1_1,test\np2_1,val\n"
HOLED = np.where(square(), np.nan, 1).astype(np.float32)
ALL_TRAIN = "--structure x --split 100,0,0"
BY_TABLE = "--structure x --table {folder}/t.csv"

BAD = {
    "no folder": Bad(remove("scans"), "--structure x", "scans: no such folder; check its name"),
    "no images": Bad(
        lambda f: (remove("masks")(f), (f / "masks").mkdir()), "--structure x", "masks: holds no image; its"
    ),
    "no names fit": Bad(
        lambda f: [path.rename(path.with_name(f"z{path.name}")) for path in (f / "masks").iterdir()],
        "--structure x",
        "masks: no mask is named as an image of {folder}/scans (p0_1.png and zp0_1.png); name both alike",
    ),
    "one name twice": Bad(
        put("scans/P0_1.bmp", gray(square())), "--structure x", "has the same name; keep one of them"
    ),
    "two masks": Bad(
        put("masks/p0_1_seg.png", MAP), "--structure x", "p0_1_seg.png: p0_1.png is a mask of p0_1.png too"
    ),
    # what masks show
    "no structure": Bad(
        nothing, "", 'masks/p0_1.png: what it shows is not known; give --structure liver, or --labels "1='
    ),
    "which structure": Bad(
        nothing, "--structure x y", "p0_1.png: its name does not say which of x, y it shows; name it"
    ),
    "structure twice": Bad(nothing, "--structure x X", "--structure x X: a name is there twice; remove one"),
    "both ways": Bad(nothing, "--structure x --labels 1=x", "--structure and --labels exclude each other"),
    # label maps
    "label map": Bad(put("masks/p0_1.png", MAP), "--structure x", "p0_1.png: a label map (values 0, 1, 2); name them"),
    "label without name": Bad(
        put("masks/p0_1.png", MAP), "--labels 1=x,255=z", "holds label 2, which has no name (1=x, 255=z)"
    ),
    "one label each": Bad(
        lambda f: (put("masks/p0_1.png", MAP // 2)(f), put("masks/p1_1.png", MAP // 2 * 2)(f)),
        "--structure x",
        "p1_1.png: marks with 2, and p0_1.png with 1, as label maps do; name the values",
    ),
    "no background": Bad(
        put("masks/p0_1.png", MAP // 2 + 1), "--structure x", "holds 1 and 2, and no 0 for the background"
    ),
    # their values
    "coloured labels": Bad(
        put("masks/p0_1.png", COLORED), "--labels 1=x", "coloured, so that its labels have no numbers"
    ),
    "half a label": Bad(
        lambda f: ((f / "masks" / "p0_1.png").unlink(), put("masks/p0_1.tif", MAP.astype(np.float32) / 2)(f)),
        "--labels 1=x",
        "p0_1.tif: holds 0.5, and a label is a whole number; write the labels without smoothing",
    ),
    # files
    "broken image": Bad(put("scans/p1_1.png", b"\x89PNG"), "--structure x", "scans/p1_1.png: not a readable image ("),
    # named as DICOM
    "no DICOM": Bad(
        lambda f: ((f / "scans" / "p1_1.png").unlink(), put("scans/p1_1.dcm", bytes(500))(f)),
        "--structure x",
        "scans/p1_1.dcm: not a readable image (not a DICOM file, though it is named as one; export it",
    ),
    "no DICOM mask": Bad(
        lambda f: ((f / "masks" / "p1_1.png").unlink(), put("masks/p1_1.dcm", bytes(500))(f)),
        "--structure x",
        "masks/p1_1.dcm: not a readable mask (not a DICOM file,",
    ),
    # other files
    "broken mask": Bad(put("masks/p1_1.png", b"GIF89a"), "--structure x", "masks/p1_1.png: not a readable mask ("),
    "not a number": Bad(
        lambda f: ((f / "scans" / "p0_1.png").unlink(), put("scans/p0_1.tif", HOLED)(f)),
        "--structure x",
        "p0_1.tif: not a readable image (holds values that are not finite numbers); replace it",
    ),
    # several images in one
    "two pages": Bad(
        pages, "--structure x", "p0_1.tif: not a readable image (2 pages; write each as a file); replace it"
    ),
    "two frames": Bad(
        frames, "--structure x", "p0_1.dcm: not a readable image (DICOM of 2 frames; export each as a file)"
    ),
    # what fits nothing
    "another shape": Bad(
        put("masks/p0_1.png", np.eye(30, 60, dtype=np.uint8)),
        "--structure x",
        "masks/p0_1.png: mask of 60 x 30 pixels does not fit its image of 40 x 40; replace the mask",
    ),
    "all empty": Bad(
        lambda f: [put(f"masks/p{n}_1.png", np.zeros((SIDE, SIDE), np.uint8))(f) for n in range(3)],
        "--structure x",
        "masks: no mask of a training image shows anything; check the masks",
    ),
    # copies
    "a copy": Bad(
        lambda f: (put("t.csv", SPLIT_TABLE)(f), shutil.copy(f / "scans" / "p0_1.png", f / "scans" / "p1_1.png")),
        BY_TABLE,
        "scans/p1_1.png: shows what {folder}/scans/p0_1.png does, which is in split 'train', and this in 'test'",
    ),
    # tables
    "no table": Bad(nothing, BY_TABLE, "t.csv: no such table; check its name"),
    "no file column": Bad(put("t.csv", "who\na\n"), BY_TABLE, "t.csv:1: no column 'file' or 'image' or"),
    "no such column": Bad(
        put("t.csv", TABLE), f"{BY_TABLE} --patient_column id", "t.csv:1: no column 'id' (the patient)"
    ),
    "no row": Bad(put("t.csv", "file,patient\np0_1,a\n"), BY_TABLE, "p1_1.png: has no row in {folder}/t.csv; add one"),
    "unknown file": Bad(put("t.csv", TABLE + "q,a\n"), BY_TABLE, "t.csv:5: no image with a mask is named 'q'; correct"),
    # patients and splits of tables
    "empty patient": Bad(
        put("t.csv", TABLE.replace(",b", ",")), BY_TABLE, "t.csv:3: empty 'patient'; complete the row"
    ),
    "two patients": Bad(
        put("t.csv", TABLE + "p0_1,z\n"), BY_TABLE, "t.csv:5: another patient than in {folder}/t.csv:2"
    ),
    "too many fields": Bad(put("t.csv", TABLE + "p0_1,a,b\n"), BY_TABLE, "t.csv:5: more fields than the header has"),
    # not a table
    "latin table": Bad(put("t.csv", "file,patient\nä,b\n".encode("latin-1")), BY_TABLE, "not a readable UTF-8 CSV ("),
    "empty table": Bad(put("t.csv", "file,patient\n"), BY_TABLE, "t.csv: holds no rows; a row for each question"),
    # splits
    "a patient in two splits": Bad(
        put("t.csv", "file,patient,split\np0_1,a,train\np1_1,a,test\np2_1,c,val\n"),
        BY_TABLE,
        "t.csv:3: patient 'a' is in split 'test' and, at {folder}/t.csv:2, in 'train'; keep a patient in one split",
    ),
    "odd split": Bad(
        put("t.csv", "file,split\np0_1,dev\np1_1,test\np2_1,val\n"), BY_TABLE, "t.csv:2: split 'dev' is not"
    ),
    # flags
    "column without table": Bad(
        nothing, "--structure x --patient_column a", "--patient_column a: is that of a table; give the CSV by --table"
    ),
    "pattern that misses": Bad(
        nothing, r"--structure x --patient_pattern ^(q\d)", "does not fit the name 'p0_1'; correct"
    ),
    # volumes
    "flat and volume": Bad(
        flat_and_volume, "--structure x", "p0_1.nii: a volume and a flat image (p0_1.png) are no pair"
    ),
    "grids": Bad(volumes(np.ones((6, 6, 5), np.uint8)), ALL_TRAIN, "v.nii.gz: has 6 x 6 x 5 voxels, and v.nii.gz 6"),
    # where volumes lie
    "places": Bad(volumes(np.ones((6, 6, 6), np.uint8), 3.0), ALL_TRAIN, "v.nii.gz: lies elsewhere in space than"),
    "several labels": Bad(volumes(TWO_LABELS), ALL_TRAIN, "v.nii.gz: holds several labels; name them, such as"),
    "channel": Bad(
        volumes(np.ones((6, 6, 6), np.uint8), image=(6, 6, 6, 2)),
        f"{ALL_TRAIN} --channel 2",
        "v.nii.gz: has 2 channels; lower --channel",
    ),
    "cut volume": Bad(cut_volume, ALL_TRAIN, "scans/v.nii.gz: not a readable NIfTI volume ("),
    # the rest
    "bad dataset.json": Bad(
        put("dataset.json", "{}"), "", "dataset.json: holds no labels (no key 'labels'); give them"
    ),
    "file in the way": Bad(put("out", "x"), "--structure x", "out: is a file; choose another folder to write"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, name):
    case = BAD[name]
    small_set(tmp_path)
    case.change(tmp_path)
    before = tree(tmp_path)
    flags = [flag.format(folder=tmp_path) for flag in case.flags.split(" ") if flag]
    with pytest.raises(InputError) as raised:
        prepare(tmp_path, flags)
    line = str(raised.value)
    assert "\n" not in line
    assert case.message.format(folder=tmp_path) in line
    assert "; " in line
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--labels", "liver"], "--labels: must be such as"),
        (["--labels", "0=x"], "label 0 is the background"),
        (["--labels", "1=x,1=y"], "label 1 is there twice"),
        (["--split", "70,20"], "--split: must be three shares that add up to 100"),
        (["--split", "0,50,50"], "--split: must be three shares that add up to 100"),
        (["--window", "40"], "--window: must be centre and width"),
        (["--patient_pattern", "P[0-9]"], "--patient_pattern: must hold the patient in brackets"),
        (["--patient_pattern", "(P"], "--patient_pattern: not a regular expression"),
        (["--name", "a/b"], "--name: must be a plain name"),
        (["--slice_spacing", "0"], "--slice_spacing: must be a number above 0"),
        (["--structur", "x"], "unknown argument '--structur'"),
    ],
)
def test_a_bad_flag_is_one_line(capsys, flags, message):
    with pytest.raises(SystemExit) as ended:
        prepare_data.parse_args(["prs_med", "a", "b", "c", *flags])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
