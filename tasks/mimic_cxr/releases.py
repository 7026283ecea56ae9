"""MIMIC-CXR-JPG and MIMIC-Ext-CXR-QBA as they are downloaded: their tables, and the questions of each study."""

import json
import re
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from old.cli_utils import InputError
from tasks.mimic_cxr.answers import CHEXPERT

SPLITS = ("train", "validate", "test")
# Worst first; `4_A`, `6_A++` in the parquet file.
GRADES = ("D", "C", "B", "A", "A+", "A++")
VIEWS = {
    "frontal": ("PA", "AP"),
    "PA": ("PA",),
    "AP": ("AP",),
    "lateral": ("LATERAL", "LL"),
}
VIEW_OF_CODE = {
    "postero-anterior": "PA",
    "antero-posterior": "AP",
    "lateral": "LATERAL",
    "left lateral": "LL",
}
# Where a blank ViewPosition is looked up.
VIEW_CODE = "ViewCodeSequence_CodeMeaning"
# A CheXpert label that is not there; others are 1, 0 and -1 (uncertain).
BLANK = -128
PLAIN_NAME = "^[0-9A-Za-z][0-9A-Za-z._-]*$"
LABEL_TEXTS = ("1", "1.0", "0", "0.0", "-1", "-1.0")
# What a damaged file or archive member raises, deep nesting and encryption included.
UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error)


def grade_rank(rating: str | None) -> int:
    """Place of a rating such as `5_A+` in GRADES; -1 for unrated."""
    letter = re.sub(r"^\d+_", "", rating or "")
    return GRADES.index(letter) if letter in GRADES else -1


# --- tables -----------------------------------------------------------------------------------------------------------


def read_csv(
    path: Path,
    needed: tuple[str, ...],
    optional: tuple[str, ...] = (),
) -> dict[str, pa.Array]:
    """{column: strings} of a .csv.gz: those needed, and optional ones that are there. Raises InputError."""
    if not path.is_file():
        plain = path.with_suffix("")
        advice = f"pack {plain.name} again (gzip)" if plain.is_file() else "check --mimic_cxr_path"
        raise InputError(f"{path}: does not exist; {advice}")
    wanted = (*needed, *optional)
    types = dict.fromkeys(wanted, pa.string())
    options = pa.csv.ConvertOptions(column_types=types, strings_can_be_null=True)
    try:
        table = pa.csv.read_csv(path, convert_options=options)
    except (OSError, EOFError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: not a readable CSV ({reason}); download it again") from None

    # the header
    for name in needed:
        if name not in table.column_names:
            raise InputError(f"{path}:1: no column {name!r}; the header must hold {', '.join(needed)}")
    for name in wanted:
        if table.column_names.count(name) > 1:
            raise InputError(f"{path}:1: column {name!r} is there twice; repair the header")
    there = [name for name in wanted if name in table.column_names]
    return {name: table[name].combine_chunks() for name in there}


def parse_numbers(
    path: Path,
    name: str,
    column: pa.Array,
) -> np.ndarray:
    """A column of identifiers as int64. Raises InputError naming the row."""
    try:
        return pc.cast(column, pa.int64()).to_numpy()
    except (pa.ArrowException, ValueError):
        texts = [text or "" for text in column.to_pylist()]
        bad = [i for i, text in enumerate(texts) if not re.fullmatch("[0-9]{1,18}", text)]
        row = bad[0]
        raise InputError(f"{path}:{row + 2}: {name} {texts[row]!r} is not a number; repair the row") from None


class Images(NamedTuple):
    """A row for each image of mimic-cxr-2.0.0-metadata.csv.gz; view: empty where it is not known."""

    study: np.ndarray
    subject: np.ndarray
    dicom: np.ndarray
    view: list[str]


def read_images(path: Path) -> Images:
    """The table of all images. Raises InputError."""
    columns = read_csv(path, ("dicom_id", "subject_id", "study_id", "ViewPosition"), (VIEW_CODE,))
    study = parse_numbers(path, "study_id", columns["study_id"])
    subject = parse_numbers(path, "subject_id", columns["subject_id"])

    # a name becomes a part of a path
    names = columns["dicom_id"].fill_null("")
    is_name = pc.match_substring_regex(names, PLAIN_NAME).to_pylist()
    if False in is_name:
        row = is_name.index(False)
        name = columns["dicom_id"][row].as_py()
        raise InputError(f"{path}:{row + 2}: dicom_id {name!r} is not a file's name; repair the row")

    # a blank view is looked up, and never guessed
    views = [view or "" for view in columns["ViewPosition"].to_pylist()]
    if VIEW_CODE in columns:
        for i, meaning in enumerate(columns[VIEW_CODE].to_pylist()):
            code = (meaning or "").strip().lower()
            views[i] = views[i] or VIEW_OF_CODE.get(code, "")
    dicom = np.array(columns["dicom_id"].to_pylist(), dtype="U")
    return Images(study, subject, dicom, views)


def read_splits(path: Path) -> dict[str, int]:
    """{dicom_id: place in SPLITS}. Raises InputError, also when a patient is in two splits."""
    columns = read_csv(path, ("dicom_id", "subject_id", "split"))
    patients = parse_numbers(path, "subject_id", columns["subject_id"])
    names = columns["split"].to_pylist()
    for row, name in enumerate(names):
        if name not in SPLITS:
            allowed = ", ".join(SPLITS)
            raise InputError(f"{path}:{row + 2}: split {name or ''!r} is not one of {allowed}; repair the row")
    codes = np.array([SPLITS.index(name) for name in names])

    # beside each other once they are sorted, the rows of a patient must agree
    order = np.lexsort((codes, patients))
    same_patient = patients[order][1:] == patients[order][:-1]
    other_split = codes[order][1:] != codes[order][:-1]
    wrong = np.flatnonzero(same_patient & other_split)
    if len(wrong):
        row = order[wrong[0] + 1]
        raise InputError(f"{path}:{row + 2}: patient {patients[row]} is in two splits; use the release's own file")
    images = columns["dicom_id"].to_pylist()
    return dict(zip(images, codes.tolist(), strict=True))


def read_studies(
    root: Path,
    view: str,
) -> tuple[pa.Table, dict[str, int]]:
    """One row a study that has an image of the wanted view, ordered by study_id, and counts of what was left out.

    Rule for the image: the first view of VIEWS[view] that the study has (PA before AP), of several the first dicom_id.
    A blank ViewPosition is taken from ViewCodeSequence_CodeMeaning where that tells, and otherwise the image is not
    used. Raises InputError.
    """
    images = read_images(root / "mimic-cxr-2.0.0-metadata.csv.gz")
    wanted = VIEWS[view]
    place_of_view = {name: place for place, name in enumerate(wanted)}
    place = np.array([place_of_view.get(name, len(wanted)) for name in images.view])
    counts = {
        "pictures without a view": sum(not name for name in images.view),
        "studies": len(np.unique(images.study)),
    }

    # sorted by study, view and name, the first row of each study is its image
    order = np.lexsort((images.dicom, place, images.study))
    _, first = np.unique(images.study[order], return_index=True)
    chosen = order[first]
    chosen = chosen[place[chosen] < len(wanted)]
    counts["studies without such a picture"] = counts["studies"] - len(chosen)

    split_of = read_splits(root / "mimic-cxr-2.0.0-split.csv.gz")
    splits = np.array([split_of.get(name, -1) for name in images.dicom[chosen]])
    counts["studies without a split"] = int((splits < 0).sum())
    chosen = chosen[splits >= 0]
    splits = splits[splits >= 0]

    # an image for each study, and its labels
    study = images.study[chosen]
    labels = read_chexpert(root / "mimic-cxr-2.0.0-chexpert.csv.gz", study)
    table = {
        "study_id": study,
        "subject_id": images.subject[chosen],
        "split": splits.astype(np.int8),
        "dicom_id": images.dicom[chosen].tolist(),
    }
    table |= {name: labels[:, i] for i, name in enumerate(CHEXPERT)}
    return pa.table(table), counts


def read_chexpert(path: Path, studies: np.ndarray) -> np.ndarray:
    """int8 (len(studies), 14): 1, 0, -1 or BLANK, columns found by name; studies must be sorted. Raises InputError."""
    columns = read_csv(path, ("study_id", *CHEXPERT))
    listed = parse_numbers(path, "study_id", columns["study_id"])
    values = np.full((len(listed), len(CHEXPERT)), BLANK, np.int8)
    for i, name in enumerate(CHEXPERT):
        for text in pc.unique(columns[name]).to_pylist():
            if text is None or not text.strip():
                continue
            if text not in LABEL_TEXTS:
                row = columns[name].to_pylist().index(text)
                raise InputError(f"{path}:{row + 2}: {name} {text!r} is not 1.0, 0.0, -1.0 or blank; repair the row")
            rows = pc.equal(columns[name], text).fill_null(False)
            values[rows.to_numpy(zero_copy_only=False), i] = int(float(text))

    # the rows of our studies
    labels = np.full((len(studies), len(CHEXPERT)), BLANK, np.int8)
    if len(studies):
        place = np.searchsorted(studies, listed).clip(max=len(studies) - 1)
        known = studies[place] == listed
        labels[place[known]] = values[known]
    return labels


# --- files ------------------------------------------------------------------------------------------------------------


def find_release(root: Path, grade: str) -> Path:
    """The folder with metadata/question_metadata.parquet and qa/ or qa.zip: root, or one in exports/ with the grade.

    A_frontal holds A or better, B_frontal B or better. Raises InputError.
    """
    folders = [root]
    if grade[0] == "A":
        folders.append(root / "exports" / "A_frontal")
    if grade[0] in "AB":
        folders.append(root / "exports" / "B_frontal")
    for folder in folders:
        if (folder / "qa").is_dir() or (folder / "qa.zip").is_file():
            if not (folder / "metadata" / "question_metadata.parquet").is_file():
                raise InputError(f"{folder}: holds no metadata/question_metadata.parquet, which has the grades; add it")
            return folder
    if (root / "exports").is_dir():
        names = sorted(path.name for path in (root / "exports").iterdir())
        holds = ", ".join(names) or "nothing"
        raise InputError(f"{root}/exports: holds {holds}, not grade {grade}; choose another --quality_grade")
    raise InputError(f"{root}: holds neither qa/ nor qa.zip; check --mimic_qa_path")


class QuestionFiles:
    """The JSON of each study, out of the folder qa/ or out of qa.zip, whose members have the same paths."""

    def __init__(self, release: Path):
        self.folder = release / "qa"
        self.path = release / "qa.zip"
        self.zip = None
        self.members: dict[str, str] = {}
        if self.folder.is_dir():
            return
        try:
            self.zip = zipfile.ZipFile(self.path)
            names = self.zip.namelist()
        except (OSError, zipfile.BadZipFile) as error:
            raise InputError(f"{self.path}: not a readable zip file ({error}); download it again") from None

        # {study_id: member}
        for name in names:
            parts = re.split(r"[/\\]", name)
            if parts[0] == "" or ".." in parts:
                raise InputError(f"{self.path}: member {name!r} points outside the archive; download it again")
            if found := re.search(r"(?:^|/)s(\d+)\.qa\.json$", name):
                self.members[found[1]] = name

    def questions(
        self,
        subject: int,
        study: int,
    ) -> list[dict] | None:
        """The questions of a study; None when it has no file. Raises InputError naming the file."""
        try:
            content = self._read(subject, study)
            if content is None:
                return None
            questions = json.loads(content)["questions"]
            if not isinstance(questions, list):
                raise TypeError("`questions` is not a list")
            return questions
        except FileNotFoundError:
            return None
        except UNREADABLE as error:
            # the message may be long, or empty
            message = " ".join(str(error).split())
            reason = message[:150] or type(error).__name__
            if isinstance(error, KeyError):
                reason = f"no key {error}"
            path = self.place(subject, study)
            raise InputError(f"{path}: not a question file ({reason}); download it again") from None

    def _read(self, subject: int, study: int) -> bytes | None:
        if self.zip is None:
            return Path(self.place(subject, study)).read_bytes()
        name = self.members.get(str(study))
        return self.zip.read(name) if name else None

    def place(self, subject: int, study: int) -> str:
        """Where the questions of a study are: a path, or archive:member."""
        if self.zip is not None:
            return f"{self.path}:{self.members.get(str(study))}"
        return f"{self.folder}/p{str(subject)[:2]}/p{subject}/s{study}.qa.json"


def image_name(subject: int, study: int, dicom: str) -> str:
    """files/p10/p10000032/s50414267/<dicom_id>.jpg"""
    return f"files/p{str(subject)[:2]}/p{subject}/s{study}/{dicom}.jpg"


def has_image(path: Path) -> bool:
    """Whether the file is there. Raises InputError when it is no JPEG."""
    try:
        with open(path, "rb") as file:
            start = file.read(3)
    except OSError:
        return False
    if start != b"\xff\xd8\xff":
        raise InputError(f"{path}: not a JPEG file; download it again")
    return True


def largest_first(
    counts: dict[str, int],
    most: int,
) -> dict[str, int]:
    """The largest counts, and the sum of the others."""
    counter = Counter(counts)
    shown = dict(counter.most_common(most))
    rest = counter.total() - sum(shown.values())
    return shown | {"other reasons": rest} if rest else shown
