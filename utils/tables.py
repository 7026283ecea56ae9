"""A user's own table (CSV or parquet): its rows, its columns, and splits by patient. No torch."""

import argparse
import csv
import difflib
import hashlib
import io
import math
import re
from collections.abc import Iterable
from pathlib import Path

from utils.cli import InputError, is_first_process
from utils.images import IMAGE_ENDINGS

# what tables call the splits
SPLITS = {"train": "train", "training": "train", "val": "val", "validation": "val", "valid": "val", "test": "test"}

# cells that say nothing, in small letters
BLANK = ("", "na", "nan", "n/a", "null", "none")
# a number with a decimal comma or without; and thousands as English has them
DECIMAL, THOUSANDS = r"[+-]?\d*,?\d+(e[+-]?\d+)?", r"[+-]?\d{1,3},\d{3}"

# (`file:row`, {column in small letters: its text}) of each row
Rows = list[tuple[str, dict[str, str]]]


def read_text(path: Path) -> str:
    """A text in UTF-8, in UTF-16 with its mark, or else in Windows-1252, which is said. Raises OSError, ValueError."""
    data = path.read_bytes()
    encoding = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "UTF-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        encoding = "Windows-1252"
        text = data.decode(encoding)
    if "\0" in text:
        raise ValueError("zero bytes: a spreadsheet's own format, or UTF-16 without its mark")
    if encoding != "UTF-8-sig" and is_first_process():
        print(f"{path}: read as {encoding}", flush=True)
    return text


def read_table(path: Path) -> Rows:
    """The rows of a CSV (commas, semicolons or tabs; see read_text) or parquet file; the header is row 1.

    A column whose cells are all numbers, some with a decimal comma, gets points, which is said; "1,234" between commas
    may be thousands and stays. Raises InputError for a file that is no table, for two columns of one name, and for rows
    with more fields than the header.
    """
    delimiter, decimals = ",", []
    try:
        if path.suffix == ".parquet":
            import pandas as pd

            frame = pd.read_parquet(path)
            names = list(frame.columns)
            records = frame.astype(str).where(frame.notna(), "").to_dict("records")
            rows = [(f"{path}:{number}", record) for number, record in enumerate(records, 2)]
        else:
            text = read_text(path)
            delimiter = max(",;\t", key=text.partition("\n")[0].count)
            reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, restval="", strict=True)
            rows = [(f"{path}:{reader.line_num}", record) for record in reader]
            names = reader.fieldnames or []
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check its name") from None
    except Exception as error:
        raise InputError(f"{path}: not a readable table ({error}); save it as CSV in UTF-8") from None
    # spreadsheets may leave lines of delimiters at the end
    rows = [(source, record) for source, record in rows if any(record.values())]
    if not rows:
        raise InputError(f"{path}: holds no rows; the first line names the columns, each other line is a row")
    names = [str(name).strip().lower() for name in names]
    twice = [name for place, name in enumerate(names) if name and name in names[:place]]
    if twice:
        raise InputError(f"{path}:1: two columns are named {twice[0]!r} (capitals do not count); rename or remove one")
    too_long = [source for source, record in rows if None in record]
    if too_long:
        places = ", ".join(too_long[:9])
        raise InputError(f"{places}: more fields than the header ({len(too_long)} rows); quote texts that hold commas")
    rows = [(source, {name.strip().lower(): text.strip() for name, text in row.items()}) for source, row in rows]

    for name in names:
        cells = [row[name].lower() for _, row in rows if row[name].lower() not in BLANK]
        split = [cell for cell in cells if "," in cell]
        thousands = delimiter == "," and all(re.fullmatch(THOUSANDS, cell) for cell in split)
        if split and not thousands and all(re.fullmatch(DECIMAL, cell) for cell in cells):
            decimals.append(name)
            for _, row in rows:
                row[name] = row[name].replace(",", ".")
    if decimals and is_first_process():
        print(f"{path}: decimal commas in {', '.join(decimals)}", flush=True)
    return rows


def find_column(rows: Rows, *names: str) -> str:
    """The first of these names that is a column, in small letters. Raises InputError with the nearest one there is."""
    source, columns = rows[0]
    for name in names:
        if name.lower() in columns:
            return name.lower()
    near = difflib.get_close_matches(names[0].lower(), columns, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    reason = f"no column {' or '.join(map(repr, names))}{hint}, there are {', '.join(columns)}"
    raise InputError(f"{source.rpartition(':')[0]}:1: {reason}; add or rename it")


def list_questions(predict: str, question: str | None) -> list[tuple[Path, str]]:
    """(image, question) of --predict: one image, all images of a folder, or a CSV's rows with paths from its folder."""
    path = Path(predict)
    if path.suffix.lower() == ".csv":
        table = read_table(path)
        image = find_column(table, "image")
        for source, row in table:
            if not (row.get("question") or question):
                raise InputError(f"{source}: no question; complete the row or give --question")
        return [(path.parent / row[image], row.get("question") or question) for _, row in table]
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    # not the figures of a run in that folder
    found = [file for file in found if not (file.parent.name == "figures" and (file.parents[1] / "run_id").exists())]
    found = [file for file in found if file == path or file.suffix.lower() in IMAGE_ENDINGS]
    if not found:
        raise InputError(f"{path}: no image there; check --predict")
    return [(file, question) for file in found]


# --- patients and splits ----------------------------------------------------------------------------------------------


def patient_in(pattern: str, name: str) -> str:
    """What --patient_pattern finds in a file's name: its first group, else all that it matches; "" for nothing."""
    try:
        found = re.search(pattern, name)
    except re.error as error:
        raise InputError(f"--patient_pattern {pattern}: not a regular expression ({error}); correct it") from None
    return (found[1 if found.re.groups else 0] or "") if found else ""


def parse_shares(text: str) -> tuple[float, float, float]:
    """argparse type: "0.8,0.1,0.1" or "80,10,10", the shares of the patients that train, validate and test."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 3 or not all(0 <= value < math.inf for value in values) or not values[0]:
        raise argparse.ArgumentTypeError(f"must be the shares of train, val and test, as 0.8,0.1,0.1, not {text!r}")
    return tuple(value / sum(values) for value in values)


def split_of(patient: str, seed: int, shares: tuple[float, float, float]) -> str:
    """train, val or test, a function of seed and patient alone: a new patient moves none of the others."""
    digest = hashlib.blake2b(f"{seed}/{patient}".encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    return "train" if place < shares[0] else "val" if place < shares[0] + shares[1] else "test"


def in_two_splits(rows: Iterable[tuple]) -> list[str]:
    """The sources of those rows (patient or other key, split, source) whose key an earlier row has in another split."""
    first: dict = {}
    return [source for key, split, source in rows if first.setdefault(key, split) != split]


def check_one_split(rows: Iterable[tuple[str, str, str]]) -> None:
    """Raises InputError where a patient is in two splits; rows: (patient, split, source)."""
    sources = in_two_splits(rows)
    if sources:
        reason = f"this patient is in another split in an earlier row ({len(sources)} such rows)"
        raise InputError(f"{sources[0]}: {reason}; keep each patient in one split")
