"""The table of a survival cohort, CSV or xlsx: its columns are found, and every row is checked."""

import csv
import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from old.cli_utils import InputError

YEARS = {"days": 1 / 365.25, "months": 1 / 12, "years": 1.0}
# what each flag without _column looks for; case, spaces and underscores do not matter
COLUMNS = {
    "path": ("NIFTI Path", "image_path", "path"),
    "time": ("time", "survival_time"),
    "event": ("event",),
    "id": ("case_num", "patient_id", "case_id", "case", "subject_id", "patient", "patient_nr", "mrn"),
}
# the column that sample_data.py adds
TRUE_RISK = "true_log_hazard"
BLANK = {"", "na", "nan", "n/a", "null", "none"}


class Outcome(NamedTuple):
    """What is known of some cases: whether they had an event, and the time of it or of the censoring, in years."""

    event: np.ndarray
    time: np.ndarray


@dataclass(frozen=True)
class Cohort:
    """The rows of a table, each a case.

    row: its number in the file. path: of its volume. time: in years. id_name: the patient's column. folds: the labels
    of any column. features: the numeric columns, NaN where blank.
    """

    source: str
    row: list[int]
    case: list[str]
    path: list[str]
    time: np.ndarray
    event: np.ndarray
    id_name: str | None
    folds: dict[str, list[str]]
    features: dict[str, np.ndarray]
    true_risk: np.ndarray | None

    def __len__(self) -> int:
        return len(self.row)

    def where(self, i: int) -> str:
        """`dataset.csv:12`, for an error message."""
        return f"{self.source}:{self.row[i]}"

    def outcome(self, rows: np.ndarray) -> Outcome:
        """Events and times of some rows."""
        return Outcome(self.event[rows], self.time[rows])

    def cases_of(self, rows: np.ndarray) -> list[str]:
        """Whose the rows are, each once and in order."""
        return sorted({self.case[i] for i in rows})

    def find_fold_column(self, wanted: str) -> str | None:
        """The name of a column as it stands in the table; None without it."""
        return next((name for name in self.folds if plain(name) == plain(wanted)), None)

    def digest(self, rows: np.ndarray) -> str:
        """Names a set of cases with their outcomes, in whatever order."""
        cases = sorted((self.case[i], float(self.time[i]), bool(self.event[i])) for i in rows)
        return hashlib.sha256(repr(cases).encode()).hexdigest()[:12]


class Row(NamedTuple):
    """A row of the table as it stands there."""

    number: int
    cells: list[str]


def plain(name: str) -> str:
    """A column's name as it is compared."""
    return "".join(name.lower().replace("_", " ").split())


def first_line(error: Exception, most: int, path: str = "") -> str:
    """What a user is told of a library's error: its first line, or its class. path: is called "file" there."""
    message = str(error)
    if path:
        message = message.replace(path, "file")
    message = message.strip()
    return message.splitlines()[0][:most] if message else type(error).__name__


# --- the file ---------------------------------------------------------------------------------------------------------


def read_table(path: str) -> tuple[list[str], list[Row]]:
    """Header and rows of a CSV or xlsx file; blank rows are left out. Raises InputError."""
    is_xlsx = path.lower().endswith(".xlsx")
    try:
        rows = read_xlsx(path) if is_xlsx else read_csv(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check --csv_path") from None
    except Exception as error:
        # openpyxl has no common class of errors
        reason = first_line(error, 120)
        raise InputError(f"{path}: not a readable table ({reason}); give a CSV in UTF-8, or an xlsx file") from None
    rows = [row for row in rows if any(row.cells)]
    if not rows:
        raise InputError(f"{path}: is empty; give a table with a header")

    # columns without a name at the end are none
    header = rows[0].cells
    while header and not header[-1]:
        header = header[:-1]
    width = len(header)
    for number, cells in rows[1:]:
        if len(cells) < width and not is_xlsx:
            raise InputError(f"{path}:{number}: {len(cells)} cells under {width} columns; correct the row")
        if any(cells[width:]):
            raise InputError(f"{path}:{number}: more cells than the {width} columns; correct the row")

    # xlsx leaves blank cells at the end of a row out
    return header, [Row(number, cells + [""] * (width - len(cells))) for number, cells in rows[1:]]


def read_csv(path: str) -> list[Row]:
    """All rows; the separator is the one of comma, semicolon and tab that the first line has most of."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        reader = csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True)
        return [Row(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]


def read_xlsx(path: str) -> list[Row]:
    """All rows of the active sheet, numbers as text."""
    import openpyxl

    book = openpyxl.load_workbook(path, read_only=True, data_only=True)
    rows = []
    for number, values in enumerate(book.active.values, start=1):
        cells = ["" if value is None else str(value).strip() for value in values]
        rows.append(Row(number, cells))
    return rows


def find_column(
    header: list[str],
    kind: str,
    given: str | None,
    source: str,
) -> int | None:
    """Place of the column that `kind` (or the name given by flag) means; None without one. Raises InputError."""
    wanted = [given] if given else COLUMNS[kind]
    for name in wanted:
        places = [i for i, column in enumerate(header) if plain(column) == plain(name)]
        if len(places) > 1:
            names = " and ".join(repr(header[i]) for i in places)
            raise InputError(f"{source}: two columns for {kind} ({names}); remove one, or rename it")
        if places:
            return places[0]
    if given:
        raise InputError(f"{source}: no column {given!r}; there are {', '.join(header)}; check --{kind}_column")
    return None


# --- the cases --------------------------------------------------------------------------------------------------------


def read_cohort(
    csv_path: str,
    data_dir: str | None = None,
    time_unit: str = "days",
    outcome: bool = True,
    path_column: str | None = None,
    time_column: str | None = None,
    event_column: str | None = None,
    id_column: str | None = None,
) -> Cohort:
    """The table, every row checked. Raises InputError naming the file and the first wrong row.

    Paths are relative to data_dir, or to the table's folder. outcome False (new patients): time and event may be
    missing. Times become years.
    """
    source = str(csv_path)
    header, rows = read_table(source)
    if not rows:
        raise InputError(f"{source}: has a header and no rows; add cases")
    given = {"path": path_column, "time": time_column, "event": event_column, "id": id_column}
    places = {kind: find_column(header, kind, name, source) for kind, name in given.items()}
    for kind in ("path", "time", "event") if outcome else ("path",):
        if places[kind] is None:
            reason = f"no column for {kind} ({' or '.join(COLUMNS[kind])}); there are {', '.join(header)}"
            raise InputError(f"{source}: {reason}; name it with --{kind}_column")

    names = {kind: header[place] for kind, place in places.items() if place is not None}
    data_root = os.path.abspath(data_dir or Path(source).parent)
    cases = []
    paths = []
    times = []
    events = []

    # row by row, so that the first wrong one is told
    for row in rows:
        where = f"{source}:{row.number}"
        cell = {kind: row.cells[places[kind]] for kind in names}
        path = cell["path"].replace("\\", "/")
        if not path:
            raise InputError(f"{where}: no path in column {names['path']!r}; fill it in or remove the row")
        paths.append(resolve_path(path, data_root, where))
        cases.append(cell.get("id") or path)
        if outcome:
            times.append(read_time(cell["time"], names["time"], time_unit, where))
            events.append(read_event(cell["event"], names["event"], where))

    folds, features, true_risk = read_other_columns(header, rows, set(places.values()))
    return Cohort(
        source=source,
        row=[row.number for row in rows],
        case=cases,
        path=paths,
        time=np.array(times),
        event=np.array(events, bool),
        id_name=names.get("id"),
        folds=folds,
        features=features,
        true_risk=true_risk,
    )


def resolve_path(name: str, data_root: str, where: str) -> str:
    """The full path of a volume. Raises InputError for one that leaves the data's folder."""
    path = os.path.normpath(os.path.join(data_root, name))
    if not name.isprintable():
        raise InputError(f"{where}: the path {name!r} holds a control character; correct it")
    if os.path.commonpath([data_root, path]) == data_root:
        return path

    # the folder itself may have been reached by a link
    real_root = os.path.realpath(data_root)
    if os.path.commonpath([real_root, os.path.realpath(path)]) != real_root:
        raise InputError(f"{where}: {name} lies outside {data_root}; give the folder that holds it with --data_dir")
    return path


def as_number(text: str) -> float:
    """The number that a text is, NaN for another text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def read_time(
    cell: str,
    column: str,
    unit: str,
    where: str,
) -> float:
    """Years. Raises InputError."""
    years = as_number(cell) * YEARS[unit]
    if not 0 <= years < math.inf:
        reason = f"{cell!r} is not a number of at least 0" if cell else "is missing"
        raise InputError(f"{where}: {column} {reason}; correct or remove the row")
    if years > 120:
        raise InputError(f"{where}: {column} {cell} {unit} are {years:.0f} years; see --time_unit")
    return years


def read_event(cell: str, column: str, where: str) -> bool:
    """Whether a case had an event. Raises InputError."""
    value = as_number(cell)
    if value not in (0, 1):
        reason = f"{cell!r} is neither 0 (censored) nor 1" if cell else "is missing"
        raise InputError(f"{where}: {column} {reason}; correct or remove the row")
    return value == 1


def read_other_columns(
    header: list[str],
    rows: list[Row],
    taken: set[int | None],
) -> tuple[dict[str, list[str]], dict[str, np.ndarray], np.ndarray | None]:
    """(labels of any column, numeric columns, true risk): see Cohort. taken: places of columns with a meaning."""
    folds = {}
    features = {}
    true_risk = None
    reserved = {plain(name) for names in COLUMNS.values() for name in names}
    for place, name in enumerate(header):
        cells = [row.cells[place] for row in rows]
        folds[name] = [as_label(cell) for cell in cells]
        values = np.array([as_number(cell) for cell in cells])
        if plain(name) == plain(TRUE_RISK):
            true_risk = values
            continue

        # numbers alone, or blanks, and no other meaning
        has_meaning = place in taken or plain(name) in reserved or plain(name).startswith("fold")
        is_blank = np.array([cell.lower() in BLANK for cell in cells])
        if not has_meaning and (is_blank | np.isfinite(values)).all():
            features[name] = values
    return folds, features, true_risk


def as_label(cell: str) -> str:
    """A cell as the label of a fold: Excel writes 1 as 1.0."""
    number = cell.removesuffix(".0")
    return number if number.isdigit() else cell
