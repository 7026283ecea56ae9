"""Read user-supplied tables (CSV or parquet) and assign patients to the train, val and test splits."""

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

SPLITS = {"train": "train", "training": "train", "val": "val", "validation": "val", "valid": "val", "test": "test"}

BLANK = ("", "na", "nan", "n/a", "null", "none")
# DECIMAL: a number such as "12" or "1,5". THOUSANDS: a number such as "1,234".
DECIMAL, THOUSANDS = r"[+-]?\d*,?\d+(e[+-]?\d+)?", r"[+-]?\d{1,3},\d{3}"

# for each row of a table: ("file:row number", {lower-case column name: cell text})
Rows = list[tuple[str, dict[str, str]]]


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, UTF-16 (with a byte order mark) or Windows-1252.

    Raises OSError if the file cannot be read, and ValueError if it has another encoding.
    """
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
    """Return the rows of a parquet file, or of a CSV file separated by commas, semicolons or tabs.

    Decimal commas become points. In a comma-separated file, a column of numbers like "1,234" stays unchanged, because
    the commas may separate thousands. Raises InputError for an unusable table.
    """
    delimiter = ","
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
    # spreadsheet programs may append lines that contain only delimiters
    rows = [(source, record) for source, record in rows if any(record.values())]
    if not rows:
        raise InputError(f"{path}: holds no rows; the first line names the columns, each other line is a row")
    names = [str(name).strip().lower() for name in names]
    twice = [name for index, name in enumerate(names) if name and name in names[:index]]
    if twice:
        raise InputError(f"{path}:1: two columns are named {twice[0]!r} (capitals do not count); rename or remove one")
    too_long = [source for source, record in rows if None in record]
    if too_long:
        sources = ", ".join(too_long[:9])
        raise InputError(f"{sources}: more fields than the header ({len(too_long)} rows); quote texts that hold commas")
    rows = [(source, {name.strip().lower(): text.strip() for name, text in row.items()}) for source, row in rows]

    decimals = []
    for name in names:
        cells = [row[name].lower() for _, row in rows if row[name].lower() not in BLANK]
        with_comma = [cell for cell in cells if "," in cell]
        thousands = delimiter == "," and all(re.fullmatch(THOUSANDS, cell) for cell in with_comma)
        if with_comma and not thousands and all(re.fullmatch(DECIMAL, cell) for cell in cells):
            decimals.append(name)
            for _, row in rows:
                row[name] = row[name].replace(",", ".")
    if decimals and is_first_process():
        print(f"{path}: decimal commas in {', '.join(decimals)}", flush=True)
    return rows


def find_column(rows: Rows, *names: str) -> str:
    source, columns = rows[0]
    for name in names:
        if name.lower() in columns:
            return name.lower()
    near = difflib.get_close_matches(names[0].lower(), columns, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    reason = f"no column {' or '.join(map(repr, names))}{hint}, there are {', '.join(columns)}"
    raise InputError(f"{source.rpartition(':')[0]}:1: {reason}; add or rename it")


def list_questions(predict: str, question: str | None) -> list[tuple[Path, str]]:
    """Return the (image path, question) pairs to predict.

    predict: an image, a folder of images, or a CSV file with image paths relative to its folder. question: default for
    images without a question in the CSV file. Raises InputError if there are no images, or if a CSV row has no question
    and there is no default.
    """
    path = Path(predict)
    if path.suffix.lower() == ".csv":
        table = read_table(path)
        image = find_column(table, "image")
        for source, row in table:
            if not (row.get("question") or question):
                raise InputError(f"{source}: no question; complete the row or give --question")
        return [(path.parent / row[image], row.get("question") or question) for _, row in table]
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    # skip figures written by training runs
    found = [file for file in found if not (file.parent.name == "figures" and (file.parents[1] / "run_id").exists())]
    found = [file for file in found if file == path or file.suffix.lower() in IMAGE_ENDINGS]
    if not found:
        raise InputError(f"{path}: no image there; check --predict")
    return [(file, question) for file in found]


def patient_in(pattern: str, name: str) -> str:
    """Find the patient in a file name with the regular expression --patient_pattern; return "" if it does not match.

    The patient is the first group, or the whole match if the expression has no groups. Raises InputError for an invalid
    expression.
    """
    try:
        found = re.search(pattern, name)
    except re.error as error:
        raise InputError(f"--patient_pattern {pattern}: not a regular expression ({error}); correct it") from None
    return (found[1 if found.re.groups else 0] or "") if found else ""


def parse_shares(text: str) -> tuple[float, float, float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 3 or not all(0 <= value < math.inf for value in values) or not values[0]:
        raise argparse.ArgumentTypeError(f"must be the shares of train, val and test, as 0.8,0.1,0.1, not {text!r}")
    return tuple(value / sum(values) for value in values)


def split_of(patient: str, seed: int, shares: tuple[float, float, float]) -> str:
    """Assign a patient to train, val or test by a hash of seed and patient, independently of all other patients."""
    digest = hashlib.blake2b(f"{seed}/{patient}".encode(), digest_size=8).digest()
    draw = int.from_bytes(digest, "big") / 2**64
    return "train" if draw < shares[0] else "val" if draw < shares[0] + shares[1] else "test"


def in_two_splits(rows: Iterable[tuple]) -> list[str]:
    """Return the sources of all rows whose split differs from that of the first row with the same key.

    rows: tuples (key, split, source), such as ("patient 12", "train", "patients.csv:7").
    """
    first: dict = {}
    return [source for key, split, source in rows if first.setdefault(key, split) != split]


def check_one_split(rows: Iterable[tuple[str, str, str]]) -> None:
    """Raise InputError if a patient is in two splits. rows: tuples (patient, split, source)."""
    sources = in_two_splits(rows)
    if sources:
        reason = f"this patient is in another split in an earlier row ({len(sources)} such rows)"
        raise InputError(f"{sources[0]}: {reason}; keep each patient in one split")
