"""A user's own table of images (CSV), and which of its patients train, validate and test. No torch."""

import argparse
import csv
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from old.cli_utils import InputError

SPLITS = ("train", "val", "test")
# What tables call the splits.
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validate": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


class Record(NamedTuple):
    """A row of a table: `source` is `file:row`, `values` the text of each column, named in small letters."""

    source: str
    values: dict[str, str]


class Table(NamedTuple):
    """A CSV with its columns, named in small letters."""

    path: Path
    columns: list[str]
    records: list[Record]


class Shares(NamedTuple):
    """How many of 100 patients train, validate and test."""

    train: float
    val: float
    test: float


# --- reading ----------------------------------------------------------------------------------------------------------


def read_table(path: Path) -> Table:
    """A CSV with commas, semicolons or tabs, whichever its header has most of. Raises InputError naming the row."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            delimiter = max(",;\t", key=header.count)
            file.seek(0)
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            columns = column_names(path, reader.fieldnames)
            reader.fieldnames = columns
            records = [make_record(path, reader.line_num, values) for values in reader]
    except FileNotFoundError:
        raise InputError(f"{path}: no such table; check its name") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a readable UTF-8 CSV ({error}); save it as CSV (UTF-8)") from None
    if not records:
        raise InputError(f"{path}: holds no rows; a row for each question is needed")
    return Table(path, columns, records)


def column_names(path: Path, header: list[str] | None) -> list[str]:
    """The names of the header in small letters. Raises InputError for one that is there twice."""
    if not header:
        raise InputError(f"{path}: is empty; its first row must name the columns")
    columns = [name.strip().lower() for name in header]
    for name in columns:
        if name and columns.count(name) > 1:
            raise InputError(f"{path}:1: column {name!r} is there twice; rename one")
    return columns


def make_record(path: Path, row: int, values: dict) -> Record:
    """A row of the CSV, what it lacks being empty. Raises InputError for one of too many fields."""
    source = f"{path}:{row}"
    if None in values:
        raise InputError(f"{source}: more fields than the header has columns; quote texts that hold the separator")
    return Record(source, {name: (value or "").strip() for name, value in values.items()})


def find_column(table: Table, names: Iterable[str], purpose: str) -> str:
    """The first of these names that is a column. Raises InputError naming those that there are."""
    for name in names:
        if name.lower() in table.columns:
            return name.lower()
    wanted = " or ".join(repr(name) for name in names)
    there = ", ".join(table.columns)
    raise InputError(f"{table.path}:1: no column {wanted} ({purpose}), there are {there}; add it")


def split_name(record: Record) -> str:
    """The split of a row: train, val or test. Raises InputError."""
    text = record.values["split"]
    if text.lower() not in SPLIT_NAMES:
        raise InputError(f"{record.source}: split {text!r} is not train, val or test; correct the row")
    return SPLIT_NAMES[text.lower()]


# --- splits -----------------------------------------------------------------------------------------------------------


def parse_shares(text: str) -> Shares:
    """argparse type: three numbers that add up to 100."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 3 or min(values) < 0 or values[0] == 0 or abs(sum(values) - 100) > 1e-6:
        reason = f"must be three shares that add up to 100, such as 70,15,15, not {text!r}"
        raise argparse.ArgumentTypeError(reason)
    return Shares._make(values)


def shares_text(text: str) -> str:
    """argparse type: shares as text, which args.yaml can hold; see parse_shares."""
    parse_shares(text)
    return text


def split_of(patient: str, seed: int, shares: Shares) -> str:
    """Where a patient belongs by seed and name alone, so that another patient moves none."""
    digest = hashlib.blake2b(f"{seed}/{patient}".encode(), digest_size=8)
    place = int.from_bytes(digest.digest(), "big") / 2**64 * 100
    if place < shares.train:
        return "train"
    return "val" if place < shares.train + shares.val else "test"


def empty_splits(patients: Iterable[str], seed: int, shares: Shares, flag: str) -> str:
    """What to say of splits that should have patients and have none, with a seed that gives them some; else ""."""
    names = set(patients)
    wanted = {split for split, share in zip(SPLITS, shares, strict=True) if share}
    there = {split_of(name, seed, shares) for name in names}
    lacking = sorted(wanted - there)
    if not lacking:
        return ""
    for other in range(1000):
        if wanted <= {split_of(name, other, shares) for name in names}:
            return f"no patient falls into {' and '.join(lacking)}; {flag} {other} gives every split some"
    return f"no patient falls into {' and '.join(lacking)}, as there are {len(names)} in all; name the splits by hand"


def check_one_split(rows: Iterable[tuple[str, str, str]]) -> None:
    """InputError where a patient is in two splits; rows: (patient, split, source)."""
    seen: dict[str, tuple[str, str]] = {}
    for patient, split, source in rows:
        before, first = seen.setdefault(patient, (split, source))
        if before != split:
            reason = f"patient {patient!r} is in split {split!r} and, at {first}, in {before!r}"
            raise InputError(f"{source}: {reason}; keep a patient in one split")
