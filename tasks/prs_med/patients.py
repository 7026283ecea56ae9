"""Whose image is whose, and which split a patient is in: from a table, from the names, or by image."""

import re
from pathlib import Path
from typing import NamedTuple

from old.cli_utils import InputError
from old.table_utils import (
    Record,
    Shares,
    Table,
    check_one_split,
    empty_splits,
    find_column,
    read_table,
    split_name,
    split_of,
)
from tasks.prs_med.pairs import Pair, simplify, without_ending

# What a table may call the column with the image's name.
FILE_COLUMNS = ("file", "image", "file_name", "filename", "image_name", "name")


class Images(NamedTuple):
    """What is known of each image, by the simplified name of its pair.

    rows: of the table, none without one. rule: how patients and splits were found.
    """

    rows: dict[str, list[Record]]
    patients: dict[str, str]
    splits: dict[str, str]
    rule: str


def describe_images(
    pairs: list[Pair],
    table_path: Path | None,
    column: str | None,
    pattern: re.Pattern | None,
    shares: Shares,
    seed: int,
) -> Images:
    """Patient and split of each image. Raises InputError for an image or a row without a partner, and more.

    column: the table's, with the patient. pattern: group 1 is the patient in an image's name.
    """
    if column and not table_path:
        raise InputError(f"--patient_column {column}: is that of a table; give the CSV by --table")
    if column and pattern:
        raise InputError("--patient_column and --patient_pattern exclude each other; give one")
    table = None
    rows: dict[str, list[Record]] = {}
    if table_path:
        table = read_table(table_path)
        rows = rows_of_images(table, pairs)

    # by what patients are known
    names = {simplify(pair.name): pair.name for pair in pairs}
    if pattern:
        patients = {key: patient_in(pattern, name) for key, name in names.items()}
        rule = "by patient (--patient_pattern)"
    elif column or (table and "patient" in table.columns):
        column = find_column(table, (column or "patient",), "the patient")
        patients = {key: patient_of_rows(rows[key], column) for key in names}
        rule = f"by patient (column {column!r})"
    else:
        patients = names
        rule = "by image, as no patients are known (--patient_column or --patient_pattern where one has several)"

    if table and "split" in table.columns:
        splits = named_splits(table, rows, patients)
        return Images(rows, patients, splits, f"{rule}, as the table says")
    splits = drawn_splits(patients, shares, seed)
    share = f"{shares.train:g}, {shares.val:g} and {shares.test:g} %"
    return Images(rows, patients, splits, f"{rule}, {share}, seed {seed}")


# --- the table --------------------------------------------------------------------------------------------------------


def rows_of_images(table: Table, pairs: list[Pair]) -> dict[str, list[Record]]:
    """{key: the table's rows} of each image, named with or without folder and ending. Raises InputError."""
    column = find_column(table, FILE_COLUMNS, "the image's file name")
    keys = {}
    for pair in pairs:
        key = simplify(pair.name)
        file_name = simplify(without_ending(pair.image.name))
        keys.setdefault(file_name, key)
    keys |= {simplify(pair.name): simplify(pair.name) for pair in pairs}

    rows: dict[str, list[Record]] = {}
    for record in table.records:
        name = record.values[column]
        key = keys.get(table_key(name)) or keys.get(table_key(name.rsplit("/", 1)[-1]))
        if key is None:
            raise InputError(f"{record.source}: no image with a mask is named {name!r}; correct or remove the row")
        rows.setdefault(key, []).append(record)
    for pair in pairs:
        if simplify(pair.name) not in rows:
            raise InputError(f"{pair.image}: has no row in {table.path}; add one, or move the image elsewhere")
    return rows


def table_key(name: str) -> str:
    """The key of an image that a table names by its path or its name."""
    flat = re.sub(r"[/\\:]", "_", name)
    return simplify(without_ending(flat))


def patient_of_rows(records: list[Record], column: str) -> str:
    """The patient of an image's rows. Raises InputError where there is none, or another."""
    first = records[0]
    for record in records:
        patient = record.values[column]
        if not patient:
            raise InputError(f"{record.source}: empty {column!r}; complete the row")
        if patient != first.values[column]:
            raise InputError(f"{record.source}: another {column} than in {first.source}; correct one of them")
    return first.values[column]


def named_splits(table: Table, rows: dict[str, list[Record]], patients: dict[str, str]) -> dict[str, str]:
    """{key: split} as the table says. Raises InputError where a patient is in two, or none trains."""
    named = []
    splits = {}
    for key, records in rows.items():
        for record in records:
            splits[key] = split_name(record)
            named.append((patients[key], splits[key], record.source))
    check_one_split(named)
    if "train" not in splits.values():
        raise InputError(f"{table.path}: no row in split 'train'; correct the table")
    return splits


# --- without a table --------------------------------------------------------------------------------------------------


def patient_in(pattern: re.Pattern, name: str) -> str:
    """Group 1 of the pattern in an image's name. Raises InputError."""
    found = pattern.search(name)
    if found is None or not found[1]:
        raise InputError(f"--patient_pattern {pattern.pattern}: does not fit the name {name!r}; correct it")
    return found[1]


def drawn_splits(patients: dict[str, str], shares: Shares, seed: int) -> dict[str, str]:
    """{key: split} by seed and patient. Raises InputError where none trains; other empty splits are said."""
    splits = {key: split_of(patient, seed, shares) for key, patient in patients.items()}
    note = empty_splits(patients.values(), seed, shares, "--seed")
    if "train" not in splits.values():
        raise InputError(f"--split: {note}")
    if note:
        print(f"note: {note}")
    return splits
