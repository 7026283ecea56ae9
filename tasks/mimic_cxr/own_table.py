"""A user's own table of X-rays with questions (CSV) instead of both releases.

Columns: image, question, answer; if wanted patient, split, type (of question), and CheXpert labels: `labels` with the
names of those present, or a column for each with 1, 0, -1 or blank. Images lie relative to the table's folder.
"""

import difflib
import re
from pathlib import Path
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from old.cli_utils import InputError
from old.image_utils import is_dicom, unknown_format
from old.table_utils import SPLITS, Record, Shares, Table, check_one_split, empty_splits, find_column, read_table
from old.table_utils import split_name, split_of
from tasks.mimic_cxr.answers import CHEXPERT
from tasks.mimic_cxr.own_answers import Asked, Routing, notes_on_classes, notes_on_repeats, route, simplify
from tasks.mimic_cxr.releases import BLANK

LABELS = {simplify(name): place for place, name in enumerate(CHEXPERT)}
LABEL_VALUES = {"": BLANK, "1": 1, "1.0": 1, "0": 0, "0.0": 0, "-1": -1, "-1.0": -1}
# So many different questions are types of their own, by which answers are counted.
MOST_TYPES = 30
LONGEST_TYPE = 48


class OwnImage(NamedTuple):
    """An image of the table: its path in the table's folder, and its CheXpert labels (14)."""

    name: str
    patient: str
    split: str
    labels: list[int]


class OwnTable(NamedTuple):
    """What a table comes to.

    places: of each question's image in `images`. types: of each question. rule: how it was split. notes: what is odd.
    """

    images: list[OwnImage]
    places: list[int]
    asked: list[Asked]
    types: list[str]
    routing: Routing
    rule: str
    notes: list[str]


def read_own_table(path: Path, categories: list[str] | None, shares: Shares, seed: int) -> OwnTable:
    """The images and questions of a table. categories: see route; shares, seed: of the split, where it has none.

    Raises InputError naming the row.
    """
    table = read_table(path)
    find_column(table, ("image",), "the image's path")
    find_column(table, ("question",), "what is asked")
    find_column(table, ("answer",), "the right answer")
    label_columns = find_labels(table)

    # images in the order of their first rows
    rows_of: dict[str, list[Record]] = {}
    place_of: dict[str, int] = {}
    asked = []
    places = []
    for record in table.records:
        name = image_name(record)
        rows_of.setdefault(name, []).append(record)
        places.append(place_of.setdefault(name, len(place_of)))
        asked.append(question_of(record))
    patients = {name: patient_of(table, records) for name, records in rows_of.items()}
    splits, rule, notes = find_splits(table, rows_of, patients, shares, seed)
    images = []
    for name, records in rows_of.items():
        labels = labels_of(records, label_columns)
        images.append(OwnImage(name, patients[name], splits[name], labels))

    routing = route(asked, categories)
    trains = [images[place].split == "train" for place in places]
    notes += notes_on_repeats(places, asked)
    notes += notes_on_classes(routing, trains)
    types = types_of(table, asked, routing)
    return OwnTable(images, places, asked, types, routing, rule, notes)


# --- a row ------------------------------------------------------------------------------------------------------------


def image_name(record: Record) -> str:
    """The path of a row's image, with slashes. Raises InputError for one outside the table's folder."""
    name = record.values["image"].replace("\\", "/")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts:
        raise InputError(f"{record.source}: empty 'image'; complete the row")
    if ".." in parts or name.startswith("/") or ":" in parts[0]:
        raise InputError(f"{record.source}: image {name!r} leaves the table's folder; use a path relative to it")
    return "/".join(parts)


def question_of(record: Record) -> Asked:
    """A row's question and answer. Raises InputError where one is empty."""
    for name in ("question", "answer"):
        if not record.values[name]:
            raise InputError(f"{record.source}: empty {name!r}; complete or remove the row")
    return Asked(record.values["question"], record.values["answer"], record.source)


def check_image(path: Path, source: str) -> bool:
    """Whether an image is there. Raises InputError where it is none; its pixels are not decoded."""
    if not path.is_file():
        return False
    try:
        with Image.open(path):
            return True
    except UnidentifiedImageError:
        if is_dicom(path):
            return True
        reason = str(unknown_format(path))
    except Exception as error:
        reason = str(error).replace(str(path), "file").splitlines()[0]
    raise InputError(f"{source}: {path} is not a readable image ({reason}); replace it")


# --- patients and splits ----------------------------------------------------------------------------------------------


def patient_of(table: Table, records: list[Record]) -> str:
    """The patient of an image's rows; the image itself where the table has no such column. Raises InputError."""
    if "patient" not in table.columns:
        return image_name(records[0])
    first = records[0]
    for record in records:
        patient = record.values["patient"]
        if not patient:
            raise InputError(f"{record.source}: empty 'patient'; complete the row")
        if patient != first.values["patient"]:
            raise InputError(f"{record.source}: another patient than in {first.source}; correct one of them")
    return first.values["patient"]


def find_splits(
    table: Table,
    rows_of: dict[str, list[Record]],
    patients: dict[str, str],
    shares: Shares,
    seed: int,
) -> tuple[dict[str, str], str, list[str]]:
    """({image: split}, by what, notes). Raises InputError where a patient is in two splits."""
    by = "by patient" if "patient" in table.columns else "by image, as the table has no column 'patient'"
    if "split" in table.columns:
        named = []
        splits = {}
        for name, records in rows_of.items():
            for record in records:
                splits[name] = split_name(record)
                named.append((patients[name], splits[name], record.source))
        check_one_split(named)
        return splits, "as the table's column 'split' says", []
    splits = {name: split_of(patient, seed, shares) for name, patient in patients.items()}
    note = empty_splits(patients.values(), seed, shares, "--split_seed")
    rule = f"{by}, {shares.train:g}, {shares.val:g} and {shares.test:g} %, seed {seed}"
    return splits, rule, [note] if note else []


# --- CheXpert ---------------------------------------------------------------------------------------------------------


def find_labels(table: Table) -> dict[str, int]:
    """{column: place in CHEXPERT} of the columns that are named as labels. Raises InputError for both ways at once."""
    columns = {name: LABELS[simplify(name)] for name in table.columns if simplify(name) in LABELS}
    if columns and "labels" in table.columns:
        name = next(iter(columns))
        raise InputError(f"{table.path}:1: has a column 'labels' and one {name!r}; keep one way of naming them")
    return columns


def labels_of(records: list[Record], columns: dict[str, int]) -> list[int]:
    """The 14 labels of an image, whose rows must not contradict each other: 1, 0, -1 or BLANK. Raises InputError."""
    labels = [BLANK] * len(CHEXPERT)
    for record in records:
        found = [BLANK] * len(CHEXPERT)
        for column, place in columns.items():
            found[place] = label_value(record, column)
        if record.values.get("labels"):
            found = listed_labels(record)
        for place, value in enumerate(found):
            if BLANK not in (value, labels[place]) and value != labels[place]:
                reason = f"{CHEXPERT[place]} is {value}, and {labels[place]} in another row of the image"
                raise InputError(f"{record.source}: {reason}; correct one of them")
            if value != BLANK:
                labels[place] = value
    return labels


def label_value(record: Record, column: str) -> int:
    """A label of its own column. Raises InputError."""
    text = record.values[column]
    if text not in LABEL_VALUES:
        raise InputError(f"{record.source}: {column} {text!r} is not 1, 0, -1 or blank; correct the row")
    return LABEL_VALUES[text]


def listed_labels(record: Record) -> list[int]:
    """The labels of a cell such as "Edema;Pleural Effusion": these are 1, the others 0. Raises InputError."""
    labels = [0] * len(CHEXPERT)
    for part in re.split(r"[;|]", record.values["labels"]):
        name = simplify(part)
        if not name:
            continue
        if name not in LABELS:
            near = difflib.get_close_matches(name, LABELS, n=1, cutoff=0.4)
            shown = f", nearest is {CHEXPERT[LABELS[near[0]]]}" if near else ""
            raise InputError(f"{record.source}: label {part.strip()!r} is none of CheXpert's 14{shown}; correct it")
        labels[LABELS[name]] = 1
    return labels


# --- types ------------------------------------------------------------------------------------------------------------


def types_of(table: Table, asked: list[Asked], routing: Routing) -> list[str]:
    """The type of each question, of one head each: the table's, the question itself where there are few, or the head's.

    Answers are counted by type, and what guessing would reach.
    """
    if "type" in table.columns:
        types = [record.values["type"] or "other" for record in table.records]
    elif len({row.question for row in asked}) <= MOST_TYPES:
        types = [row.question for row in asked]
    else:
        types = ["any question"] * len(asked)

    # a type whose questions have several heads becomes several
    short = LONGEST_TYPE - len(" (category)")
    types = [name[:short].replace("/", " ") for name in types]
    heads_of: dict[str, set[str]] = {}
    for name, head in zip(types, routing.heads, strict=True):
        heads_of.setdefault(name, set()).add(head)
    named = []
    for name, head in zip(types, routing.heads, strict=True):
        ending = f" ({head})" if len(heads_of[name]) > 1 else ""
        named.append(name + ending)
    return named


def describe_splits(own: OwnTable) -> dict[str, dict[str, int]]:
    """The rows of a table: images, questions and patients of each split."""
    table = {}
    for split in SPLITS:
        images = [image for image in own.images if image.split == split]
        questions = [place for place in own.places if own.images[place].split == split]
        patients = {image.patient for image in images}
        table[split] = {"images": len(images), "questions": len(questions), "patients": len(patients)}
    return table
