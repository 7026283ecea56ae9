"""The data check against planted faults: each is found and named, and nothing else is."""

import csv
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from old.cli_utils import InputError
from old.distributed_utils import Ranks
from tasks.prs_med.data import NO_PATIENTS, Patients, Row, case_of, read_annotations
from tasks.prs_med.data_check import read_rows
from tasks.prs_med.metrics import position_of
from tasks.prs_med.report import draw_inputs
from tasks.prs_med.sample_data import LUNG, MODALITIES, Case, write_annotations, write_case

ALONE = Ranks(0, 0, 1, torch.device("cpu"), "python")
ORIENTATION = 0x0112


def write_data(root: Path, size: int, seed: int) -> None:
    """20 images of each modality in three splits, with two questions each."""
    rows = {modality: [] for modality in MODALITIES}
    for number in range(60):
        split = ("train", "train", "train", "val", "test")[number // 3 % 5]
        modality = list(MODALITIES)[number % 3]
        rng = np.random.default_rng([seed, number])
        rows[modality] += write_case(rng, root, Case(number, split, modality), size)
    write_annotations(root / "annotations", rows)


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("clean") / "data"
    write_data(root, 96, 0)
    return root


def check(root: Path, patients: Patients = NO_PATIENTS, limit: float = 0.25) -> list[Row]:
    return read_rows(root, None, False, "train", True, ALONE, patients, limit)


@pytest.mark.parametrize(("size", "seed"), [(96, 1), (64, 2), (160, 3)])
def test_clean_data_has_no_findings(tmp_path, size, seed):
    write_data(tmp_path, size, seed)
    assert [row.findings for row in check(tmp_path) if row.findings] == []


# --- the faults -------------------------------------------------------------------------------------------------------


def rows_of(root: Path, split: str = "train") -> list[Row]:
    return [row for row in read_annotations(root, [LUNG], False) if row.split == split]


def edit_csv(root: Path, change: Callable[[int, dict], dict]) -> None:
    """Give the CSV of lungs other rows; change: (index, row) -> row."""
    path = root / "annotations" / f"{LUNG}.csv"
    with open(path, newline="") as file:
        records = [change(index, record) for index, record in enumerate(csv.DictReader(file))]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, records[0])
        table.writeheader()
        table.writerows(records)


def on_image(change: Callable, split: str = "train"):
    """Change the first lung image of a split."""

    def plant(root: Path) -> None:
        path = rows_of(root, split)[0].image
        change(Image.open(path)).save(path)

    return plant


def on_mask(change: Callable, position: str = ""):
    """Change the first lung mask, or the first at a position."""

    def plant(root: Path) -> None:
        row = next(row for row in rows_of(root) if position in row.answer)
        change(Image.open(row.mask)).save(row.mask)

    return plant


def on_values(change: Callable):
    """The same of the (H, W) values of a mask."""
    return lambda mask: Image.fromarray(change(np.asarray(mask)))


def filled(value: int):
    return lambda image: Image.new(image.mode, image.size, value)


def two_labels(one: int, other: int):
    """The mask's lower half becomes another label."""

    def change(mask: np.ndarray) -> np.ndarray:
        below = np.cumsum(mask > 0, axis=0) > 8
        return np.where(mask > 0, np.where(below, other, one), 0).astype(np.uint8)

    return on_values(change)


def two_colours(mask: Image.Image) -> Image.Image:
    values = np.asarray(mask)
    red = two_labels(255, 0)(mask)
    green = two_labels(0, 255)(mask)
    return Image.merge("RGB", [red, green, Image.fromarray(0 * values)])


def landscape_transposed(root: Path) -> None:
    row = rows_of(root)[0]
    for path in (row.image, row.mask):
        Image.open(path).crop((0, 0, 96, 80)).save(path)
    on_mask(lambda mask: mask.transpose(Image.Transpose.TRANSPOSE))(root)


def all_transposed(root: Path) -> None:
    """All masks of a CSV, with answers that were made from them."""
    rows = read_annotations(root, [LUNG], False)
    for row in rows:
        Image.open(row.mask).transpose(Image.Transpose.TRANSPOSE).save(row.mask)

    def restate(index: int, record: dict) -> dict:
        position = position_of(np.asarray(Image.open(rows[index].mask)) > 0)
        return record | {"position": position, "answer": f"It is in the {position} of the image."}

    edit_csv(root, restate)


def tagged(name: str):
    """Write an image or mask with an EXIF tag that turns it upside down."""

    def plant(root: Path) -> None:
        path = getattr(rows_of(root)[0], name)
        exif = Image.Exif()
        exif[ORIENTATION] = 3
        image = Image.open(path)
        image.load()
        image.rotate(180).save(path, exif=exif)

    return plant


def saved_again(change: Callable):
    """A test image becomes a training image that went through `change`."""

    def plant(root: Path) -> None:
        source, target = rows_of(root)[0], rows_of(root, "test")[0]
        change(Image.open(source.image)).save(target.image)
        mask = Image.open(source.mask)
        mask = mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if change is ImageOps.mirror else mask
        # drawn anew
        values = np.array(mask)
        values[np.nonzero(values)[0][0]] = 0
        Image.fromarray(values).save(target.mask)
        position = position_of(values > 0)

        def restate(_: int, record: dict) -> dict:
            if not target.mask.endswith(record["image_path"]):
                return record
            return record | {"position": position, "answer": f"In the {position} of the image."}

        edit_csv(root, restate)

    return plant


def through_jpeg(image: Image.Image) -> Image.Image:
    content = io.BytesIO()
    image.save(content, "JPEG", quality=40)
    return Image.open(content)


def copy_file(root: Path) -> None:
    shutil.copy(rows_of(root)[0].image, rows_of(root, "test")[0].image)


def exchange(root: Path) -> None:
    row = rows_of(root)[0]
    image, mask = Path(row.image).read_bytes(), Path(row.mask).read_bytes()
    Path(row.image).write_bytes(mask)
    Path(row.mask).write_bytes(image)


def image_as_mask(root: Path) -> None:
    row = rows_of(root)[0]
    shutil.copy(row.image, row.mask)


def shared_mask(root: Path) -> None:
    """The mask of an image becomes that of another one with an answer of its own."""
    rows = rows_of(root)
    target = next(row for row in rows if row.position == rows[0].position and row.image[-20:] > rows[2].image[-20:])
    shutil.copy(rows[0].mask, target.mask)


def cut(root: Path) -> None:
    path = Path(rows_of(root)[0].image)
    path.write_bytes(path.read_bytes()[:800])


def on_row(**fields):
    """Other fields of the first row; a function makes them of the row."""

    def change(index: int, record: dict) -> dict:
        return record | {name: value(record) for name, value in fields.items()} if index == 0 else record

    return lambda root: edit_csv(root, change)


def opposite(record: dict) -> str:
    return "center" if record["position"] != "center" else "top left"


def mirrored_answers(root: Path) -> None:
    """All answers of a CSV name the patient's side."""
    sides = {"left": "right", "right": "left"}

    def swap(text: str) -> str:
        return re.sub(r"\b(left|right)\b", lambda match: sides[match[0]], text)

    edit_csv(root, lambda _, record: record | {"answer": swap(record["answer"])})


def asked_twice(root: Path) -> None:
    """Two files of one image are asked the same."""
    first = {}

    def change(index: int, record: dict) -> dict:
        if index == 0:
            first.update(record)
        return record | {"question": first["question"]} if index == 1 else record

    edit_csv(root, change)


def answered_in_two_ways(root: Path) -> None:
    """Each image is asked the same twice, with another answer."""

    def change(index: int, record: dict) -> dict:
        return record | {"question": "Is there a mass?", "answer": "No." if index % 2 else "Yes."}

    edit_csv(root, change)


def row_twice(root: Path) -> None:
    path = root / "annotations" / f"{LUNG}.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[1]]))


class Fault(NamedTuple):
    """How a fault is planted, the finding that names it, and in how many rows; `rows` 0: an error that holds it."""

    plant: Callable[[Path], None]
    name: str
    rows: int = 1
    patients: Patients = NO_PATIENTS


LIKE = "nearly the same image in another split"
FAULTS = {
    # sizes
    "aspect ratio": Fault(on_mask(lambda mask: mask.resize((96, 99))), "96 x 99 pixels does not fit its image", 0),
    "stretched a little": Fault(on_mask(lambda mask: mask.resize((192, 195))), "mask's proportions up to 2 % off"),
    "transposed": Fault(landscape_transposed, "(width and height swapped)", 0),
    # orientations
    "transposed square": Fault(
        on_mask(lambda mask: mask.transpose(Image.Transpose.TRANSPOSE), "top right"),
        "answer names another position than the mask",
    ),
    "all transposed": Fault(all_transposed, "mask fits its image only when turned", 40),
    "EXIF of the image": Fault(tagged("image"), "only one of image and mask turned as EXIF says"),
    "EXIF of the mask": Fault(tagged("mask"), "only one of image and mask turned as EXIF says"),
    # masks
    "empty": Fault(on_mask(filled(0)), "mask empty"),
    "full": Fault(on_mask(filled(255)), "mask all foreground"),
    "label map, 85 lost": Fault(on_mask(two_labels(255, 85)), "a label map: its value 85", 0),
    "label map, 0 1 2": Fault(on_mask(two_labels(1, 2)), "several labels or colours in one mask"),
    "label map, 0 128 255": Fault(on_mask(two_labels(128, 255)), "several labels or colours in one mask"),
    "colours": Fault(on_mask(two_colours), "several labels or colours in one mask"),
    "inverted": Fault(on_mask(ImageOps.invert), "mask covers the border: inverted?"),
    "shared mask": Fault(shared_mask, "one mask for several images", 2),
    "image as mask": Fault(image_as_mask, "the mask is a copy of its image", 0),
    "swapped": Fault(exchange, "they are swapped", 0),
    # images
    "blank": Fault(on_image(filled(70)), "image of one value"),
    "two values": Fault(
        on_image(lambda image: image.point(lambda v: 255 * (v > 99))), "image of two values, as a mask"
    ),
    "truncated": Fault(cut, "is not a readable image", 0),
    # texts
    "answer": Fault(
        on_row(answer=lambda record: f"In the {opposite(record)}."), "answer names another position than the mask"
    ),
    "answers mirrored": Fault(mirrored_answers, "(they fit the masks mirrored left to right)", 0),
    "position": Fault(on_row(position=opposite), "`position` column contradicts the mask"),
    "no position": Fault(on_row(answer=lambda _: "It is there."), "answer names no position"),
    "asked twice": Fault(asked_twice, "question repeated with another answer"),
    "two answers": Fault(answered_in_two_ways, "20 of 40 rows answer a question about an image otherwise than", 0),
    "row twice": Fault(row_twice, "row there twice"),
    # splits
    "copy": Fault(copy_file, "keep its rows in one split", 0),
    "JPEG": Fault(saved_again(through_jpeg), LIKE),
    "resized": Fault(saved_again(lambda image: image.resize((72, 72))), LIKE),
    "brightened": Fault(saved_again(lambda image: ImageEnhance.Brightness(image).enhance(1.25)), LIKE),
    "mirrored": Fault(saved_again(ImageOps.mirror), LIKE),
    "patient": Fault(lambda _: None, "patient 'LUNG' is in split", 0, Patients(column="image_name")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(clean, tmp_path, fault):
    """It is an error of one line, or the finding of so many rows."""
    plant, name, count, patients = FAULTS[fault]
    root = tmp_path / "data"
    shutil.copytree(clean, root)
    if patients.column:
        edit_csv(root, lambda _, record: record | {"image_name": "LUNG"})
    plant(root)

    if count == 0:
        with pytest.raises(InputError, match=re.escape(name)) as caught:
            check(root, patients)
        assert "\n" not in str(caught.value)
        assert ";" in str(caught.value)
        return
    rows = check(root, patients)
    found = [[finding.name for finding in row.findings] for row in rows]
    assert sum(name in names for names in found) == count
    # a fault may show in several ways, but only where it is
    assert sum(bool(names) for names in found) == count


def test_patients(clean):
    """A pattern's first group, or all that it matches; a row without a patient is a case by its image."""
    rows = read_annotations(clean, [LUNG], False, Patients(pattern=r"case(\d+)"))
    assert [case_of(row) for row in rows[:4]] == ["00001", "00001", "00004", "00004"]
    rows = read_annotations(clean, [LUNG], False, Patients(pattern=r"case\d+"))
    assert case_of(rows[0]) == "case00001"
    rows = read_annotations(clean, [LUNG], False)
    assert case_of(rows[0]) == rows[0].image
    # that of two files with the same bytes is one
    first, second = check(clean)[:2]
    assert first.image != second.image
    assert case_of(first) == case_of(second)


def test_the_worst_is_shown_first(clean, tmp_path):
    """The figure of the inputs begins with a row of each finding, of any split, named above it."""
    root = tmp_path / "data"
    shutil.copytree(clean, root)
    saved_again(through_jpeg)(root)
    on_mask(filled(0))(root)

    class Shown:
        """What PositionData gives, without a model."""

        augmented = False

        def __init__(self, rows: list[Row]):
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict:
            image = torch.zeros(3, 8, 8, dtype=torch.uint8)
            return {"error": "", "position": None, "mask": torch.zeros(8, 8, dtype=torch.bool), "sam": image}

    rows = check(root, limit=1.0)
    splits = [Shown([row for row in rows if row.split == split]) for split in ("train", "val", "test")]
    figure = draw_inputs(splits)
    captions = [axes.texts[0].get_text() for axes in figure.axes if axes.texts]
    texts = [" ".join(caption.split()) for caption in captions]
    assert len(texts) == 9
    assert texts[0].startswith("ODD: nearly the same image in another split (case00001_mass.png of train)")
    assert "test" in texts[0]
    assert "ODD: mask empty" in texts[1]
    assert not any("ODD" in text for text in texts[2:])
