"""MIMIC-CXR-JPG + MIMIC-Ext-CXR-QBA on disk -> a memory-mapped table of questions with targets (guide 1, facts 1).

The tables of both releases are read once, all ranks sharing the work; what comes out are Arrow files that every later
run maps into memory at once: `studies.arrow` (one row a study: picture, split, CheXpert labels) and
`part-<n>-<split>.arrow` (one row a question). Nothing holds a Python object per question, so 31 million or 300 million
questions take the same memory. A part is finished when its `part-<n>.json` exists; a build that was killed goes on
with the parts that lack one.

Each part's JSON names the sha256 of the part's Arrow files, index.json that of all of them, and each JSON holds one of
its own. All are checked whenever the index is opened, and what is damaged is built again. Nothing remembers an earlier
check, as a disk that rots keeps size and time of a file. The ranks share the work: the 3 GB of all 31 million questions
took 3.8 s on one core and 2.4 s on two (sha256 1.3 GB/s; crc32 does 3.5, but sha256 is what writing a file gives).
An index of an earlier version, without checksums, is built again in its place.
"""

import contextlib
import gc
import hashlib
import itertools
import json
import os
import platform
import re
import sys
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch.distributed as dist

import distributed_utils as du
from checkpoint_utils import RunLock, file_sha256, write_atomically
from cli_utils import InputError, RunError

VERSION = 1  # of the index files: another number is another folder
SPLITS = ("train", "validate", "test")
CHEXPERT = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Enlarged Cardiomediastinum", "Fracture", "Lung Lesion",
    "Lung Opacity", "No Finding", "Pleural Effusion", "Pleural Other", "Pneumonia", "Pneumothorax", "Support Devices",
)  # fmt: skip
SIDED = ("lung", "upper lung zone", "mid lung zone", "lower lung zone", "lung apex", "lung base", "hilum")
SIDED += ("costophrenic angle", "hemidiaphragm")
REGIONS = ("lungs", *(f"{side} {name}" for name in SIDED for side in ("left", "right")))
REGIONS += ("mediastinum", "upper mediastinum", "heart", "aorta", "trachea", "spine", "abdomen")
HEADS = {
    "binary": ("no", "yes"),
    "category": tuple(name.lower() for name in CHEXPERT),
    "region": REGIONS,
    "severity": ("none", "mild", "moderate", "severe"),
}
HEAD_OF_CODE = dict.fromkeys(("B10", "B11", "B13", "C03", "C04", "C08", "D02", "D06"), "binary")
HEAD_OF_CODE |= dict.fromkeys(("C01", "C02", "D03", "D07"), "region") | {"D04": "severity"}
HEAD_OF_CODE |= dict.fromkeys(("A", "B08", "B09", "B12", "C07", "D01", "D05"), "category")
CODE_OF_NAME = {
    "indication": "A", "describe_subcat": "B08", "describe_abnormal_subcat": "B09", "describe_device": "B12",
    "has_devices": "B13", "describe_region": "C01", "describe_abnormal_region": "C02", "describe_region_device": "C07",
    "has_region_device": "C08", "describe_finding": "D01", "has_finding": "D02", "where_is_finding": "D03",
    "how_severe_is_finding": "D04", "has_device": "D06", "where_is_device": "D07",
}  # fmt: skip
GRADES = ("D", "C", "B", "A", "A+", "A++")  # worst first; `4_A`, `6_A++` in the parquet file
VIEWS = {"frontal": ("PA", "AP"), "PA": ("PA",), "AP": ("AP",), "lateral": ("LATERAL", "LL")}
VIEW_OF_CODE = {"postero-anterior": "PA", "antero-posterior": "AP", "lateral": "LATERAL", "left lateral": "LL"}
BLANK = -128  # a CheXpert label that is not there; others are 1, 0 and -1 (uncertain)
NOT_ASKED = "question type without a head"
ROW = pa.schema(
    [
        ("study", pa.int32()),
        ("head", pa.int8()),
        ("target", pa.int8()),
        ("type", pa.dictionary(pa.int16(), pa.string())),
        ("id", pa.string()),
        ("question", pa.string()),
    ]
)
GRADED = pa.schema([("study", pa.int64()), ("id", pa.string())])


# --- from a question to a head and a target ---------------------------------------------------------------------------


def head_of(question_type: str) -> str | None:
    """The answer head of a question type by its code (`D02_has_finding`), by its name alone (`has_finding`, as the
    release's own description has it), or by `is_...`; None without one."""
    code, _, name = question_type.partition("_")
    if question_type.startswith("is_") or name.startswith("is_"):
        return "binary"
    return HEAD_OF_CODE.get(code) or HEAD_OF_CODE.get(CODE_OF_NAME.get(question_type))


def target_of(question: dict, head: str) -> tuple[int | None, str]:
    """(class of the head, "") of a question's main answers, or (None, why there is none). Names must match exactly.

    yes or no: the first main answer's positiveness. The other heads: the first name of the vocabulary in a main answer
    that is not negative, as descriptions also list what is absent ("no effusion", `obs_entities` effusion, `neg`).
    Where all are negative, the category is "no finding", and what is not there has no location.
    """
    mains = [answer for answer in question["answers"] if answer["answer_type"] == "main_answer"]
    if not mains:
        return None, "no main answer"
    if head == "binary":
        if (sign := mains[0].get("positiveness")) not in ("pos", "neg"):
            return None, f"positiveness {sign!r}"
        return int((sign == "pos") != ("is_normal" in question["question_type"])), ""
    mains.sort(key=lambda answer: answer.get("positiveness") == "neg")  # a stable sort: negative ones last
    unknown = ""
    for main in mains:
        if head == "severity":
            names = [value for kind, value, *_ in main.get("modifiers") or () if kind == "severity"]
        else:
            names = main.get("regions" if head == "region" else "obs_entities") or ()
        absent = main.get("positiveness") == "neg"
        for name in (str(name).strip().lower() for name in names):
            if name not in CLASS_OF[head]:
                unknown = unknown or f"{head} {name!r} not in the vocabulary"
            elif absent and "where_is" in question["question_type"]:
                unknown = unknown or "the finding is absent"
            else:
                return CLASS_OF[head]["no finding" if absent and head == "category" else name], ""
    return None, unknown or f"no {head} given"


CLASS_OF = {head: {name: i for i, name in enumerate(names)} for head, names in HEADS.items()}
HEAD_NUMBER = {head: i for i, head in enumerate(HEADS)}


def grade_rank(rating: str | None) -> int:
    """Place of a rating such as `5_A+` in GRADES; -1 for unrated."""
    letter = re.sub(r"^\d+_", "", rating or "")
    return GRADES.index(letter) if letter in GRADES else -1


# --- the releases' tables ---------------------------------------------------------------------------------------------


def read_csv(path: Path, columns: tuple[str, ...], more: tuple[str, ...] = ()) -> dict[str, pa.Array]:
    """Columns (needed ones, and `more` where present) of a .csv.gz by name, as strings. Raises InputError."""
    if not path.is_file():
        plain = path.with_suffix("")
        advice = f"pack {plain.name} again (gzip)" if plain.is_file() else "check --mimic_cxr_path"
        raise InputError(f"{path}: does not exist; {advice}")
    options = pa.csv.ConvertOptions(
        column_types=dict.fromkeys((*columns, *more), pa.string()), strings_can_be_null=True
    )
    try:
        table = pa.csv.read_csv(path, convert_options=options)
    except (OSError, EOFError, pa.ArrowException) as error:
        raise InputError(f"{path}: not a readable CSV ({str(error).splitlines()[0]}); download it again") from None
    if lacking := [name for name in columns if name not in table.column_names]:
        raise InputError(f"{path}:1: no column {lacking[0]!r}; the header must hold {', '.join(columns)}")
    if twice := [name for name in (*columns, *more) if table.column_names.count(name) > 1]:
        raise InputError(f"{path}:1: column {twice[0]!r} is there twice; repair the header")
    return {name: table[name].combine_chunks() for name in (*columns, *more) if name in table.column_names}


def numbers(path: Path, name: str, column: pa.Array) -> np.ndarray:
    """A column of identifiers as int64. Raises InputError naming the row."""
    try:
        return pc.cast(column, pa.int64()).to_numpy()
    except (pa.ArrowException, ValueError):
        texts = [text or "" for text in column.to_pylist()]
        row = next(i for i, text in enumerate(texts) if not re.fullmatch("[0-9]{1,18}", text))
        raise InputError(f"{path}:{row + 2}: {name} {texts[row]!r} is not a number; repair the row") from None


def read_studies(root: Path, view: str) -> tuple[pa.Table, dict[str, int]]:
    """One row a study that has a picture of the wanted view, ordered by study_id, and counts of what was left out.

    Rule for the picture: the first view of VIEWS[view] that the study has (PA before AP), of several the first
    dicom_id. A blank ViewPosition is taken from ViewCodeSequence_CodeMeaning where that tells, and otherwise the
    picture is not used. Raises InputError, also when a patient is in two splits.
    """
    path = root / "mimic-cxr-2.0.0-metadata.csv.gz"
    meaning = "ViewCodeSequence_CodeMeaning"
    columns = read_csv(path, ("dicom_id", "subject_id", "study_id", "ViewPosition"), (meaning,))
    study, subject = (numbers(path, name, columns[name]) for name in ("study_id", "subject_id"))
    plain = pc.match_substring_regex(columns["dicom_id"].fill_null(""), "^[0-9A-Za-z][0-9A-Za-z._-]*$")
    if not pc.all(plain).as_py() and len(plain):
        row = plain.to_pylist().index(False)
        name = columns["dicom_id"][row].as_py()
        raise InputError(f"{path}:{row + 2}: dicom_id {name!r} is not a file's name; repair the row")
    views = columns["ViewPosition"].to_pylist()
    told = columns[meaning].to_pylist() if meaning in columns else [None] * len(views)
    views = [v or VIEW_OF_CODE.get((m or "").strip().lower(), "") for v, m in zip(views, told, strict=True)]
    wanted = {name: place for place, name in enumerate(VIEWS[view])}
    place = np.array([wanted.get(name, len(wanted)) for name in views])
    dicom = np.array(columns["dicom_id"].to_pylist(), dtype="U")
    counts = {"pictures without a view": sum(not name for name in views), "studies": len(np.unique(study))}

    order = np.lexsort((dicom, place, study))
    first = np.r_[True, study[order][1:] != study[order][:-1]] if len(order) else np.zeros(0, bool)
    chosen = order[first]
    chosen = chosen[place[chosen] < len(wanted)]
    counts["studies without such a picture"] = counts["studies"] - len(chosen)

    path = root / "mimic-cxr-2.0.0-split.csv.gz"
    columns = read_csv(path, ("dicom_id", "subject_id", "split"))
    patients, names = numbers(path, "subject_id", columns["subject_id"]), columns["split"].to_pylist()
    if (row := next((i for i, name in enumerate(names) if name not in SPLITS), None)) is not None:
        split = names[row] or ""
        raise InputError(f"{path}:{row + 2}: split {split!r} is not one of {', '.join(SPLITS)}; repair the row")
    codes = np.array([SPLITS.index(name) for name in names])
    order = np.lexsort((codes, patients))
    same = (patients[order][1:] == patients[order][:-1]) & (codes[order][1:] != codes[order][:-1])
    if same.any():
        row = order[1:][same][0]
        raise InputError(f"{path}:{row + 2}: patient {patients[row]} is in two splits; use the release's own file")
    split_of = dict(zip(columns["dicom_id"].to_pylist(), codes.tolist(), strict=True))
    splits = np.array([split_of.get(name, -1) for name in dicom[chosen]])
    counts["studies without a split"] = int((splits < 0).sum())
    chosen, splits = chosen[splits >= 0], splits[splits >= 0]

    labels = read_chexpert(root / "mimic-cxr-2.0.0-chexpert.csv.gz", study[chosen])
    table = {"study_id": study[chosen], "subject_id": subject[chosen], "split": splits.astype(np.int8)}
    table |= {"dicom_id": dicom[chosen].tolist()}
    return pa.table(table | {name: labels[:, i] for i, name in enumerate(CHEXPERT)}), counts


def read_chexpert(path: Path, studies: np.ndarray) -> np.ndarray:
    """int8 (len(studies), 14): 1, 0, -1 or BLANK, columns found by name; studies must be sorted. Raises InputError."""
    columns = read_csv(path, ("study_id", *CHEXPERT))
    theirs = numbers(path, "study_id", columns["study_id"])
    values = np.full((len(theirs), len(CHEXPERT)), BLANK, np.int8)
    for i, name in enumerate(CHEXPERT):
        for text in pc.unique(columns[name]).to_pylist():
            if text is None or not text.strip():
                continue
            if text not in ("1", "1.0", "0", "0.0", "-1", "-1.0"):
                row = columns[name].to_pylist().index(text)
                raise InputError(f"{path}:{row + 2}: {name} {text!r} is not 1.0, 0.0, -1.0 or blank; repair the row")
            values[pc.equal(columns[name], text).fill_null(False).to_numpy(zero_copy_only=False), i] = int(float(text))
    found = np.full((len(studies), len(CHEXPERT)), BLANK, np.int8)
    if len(studies):
        at = np.searchsorted(studies, theirs).clip(max=len(studies) - 1)
        mine = studies[at] == theirs
        found[at[mine]] = values[mine]
    return found


def find_release(root: Path, grade: str) -> Path:
    """The folder with metadata/question_metadata.parquet and qa/ or qa.zip: root, or one in exports/ that has the grade
    (A_frontal holds A or better, B_frontal B or better)."""
    inside = {"A": ("A_frontal", "B_frontal"), "B": ("B_frontal",)}.get(grade[0], ())
    for folder in (root, *(root / "exports" / name for name in inside)):
        if (folder / "qa").is_dir() or (folder / "qa.zip").is_file():
            if not (folder / "metadata" / "question_metadata.parquet").is_file():
                raise InputError(f"{folder}: holds no metadata/question_metadata.parquet, which has the grades; add it")
            return folder
    if (root / "exports").is_dir():
        holds = ", ".join(sorted(path.name for path in (root / "exports").iterdir())) or "nothing"
        raise InputError(f"{root}/exports: holds {holds}, not grade {grade}; choose another --quality_grade")
    raise InputError(f"{root}: holds neither qa/ nor qa.zip; check --mimic_qa_path")


# what a damaged file or archive member raises, deep nesting and encryption included
UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error)


class QuestionFiles:
    """The JSON of each study, out of the folder qa/ or out of qa.zip, whose members have the same paths."""

    def __init__(self, release: Path):
        self.folder, self.path, self.zip = release / "qa", release / "qa.zip", None
        if self.folder.is_dir():
            return
        try:
            self.zip = zipfile.ZipFile(self.path)
            names = self.zip.namelist()
        except (OSError, zipfile.BadZipFile) as error:
            raise InputError(f"{self.path}: not a readable zip file ({error}); download it again") from None
        if bad := next((n for n in names if n.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", n)), None):
            raise InputError(f"{self.path}: member {bad!r} points outside the archive; download it again")
        self.members = {m[1]: n for n in names if (m := re.search(r"(?:^|/)s(\d+)\.qa\.json$", n))}

    def questions(self, subject: int, study: int) -> list[dict] | None:
        """The questions of a study; None when it has no file. Raises InputError naming the file."""
        try:
            if self.zip is None:
                with open(self.place(subject, study), "rb") as file:
                    text = file.read()
            elif name := self.members.get(str(study)):
                text = self.zip.read(name)
            else:
                return None
            questions = json.loads(text)["questions"]
            if not isinstance(questions, list):
                raise TypeError("`questions` is not a list")
            return questions
        except FileNotFoundError:
            return None
        except UNREADABLE as error:
            reason = (
                f"no key {error}"
                if isinstance(error, KeyError)
                else " ".join(str(error).split())[:150] or type(error).__name__
            )
            path = self.place(subject, study)
            raise InputError(f"{path}: not a question file ({reason}); download it again") from None

    def place(self, subject: int, study: int) -> str:
        """Where the questions of a study are: a path, or archive:member."""
        if self.zip is not None:
            return f"{self.path}:{self.members.get(str(study))}"
        return f"{self.folder}/p{str(subject)[:2]}/p{subject}/s{study}.qa.json"


# --- the index --------------------------------------------------------------------------------------------------------


@dataclass
class Index:
    """An opened index: `facts` is its index.json, `studies` the memory-mapped table of studies."""

    folder: Path
    facts: dict
    studies: pa.Table

    def questions(self, split: str, copies: int = 1) -> "Questions":
        """The rows of a split; `copies` > 1 repeats them (for measurements at sizes one does not have)."""
        counts = [(part, rows[split]) for part, rows in enumerate(self.facts["rows"]) if rows[split]] * copies
        return Questions(self.folder, split, [part for part, _ in counts], [count for _, count in counts])


class Questions:
    """All questions of a split, memory-mapped; `take` reads single rows.

    A page once read stays mapped and counts as this process's memory (it is the page cache's, shared by all ranks, but
    a SLURM limit may count it to each). So the maps are dropped after every KEEP rows and made anew where needed.
    """

    KEEP = 512

    def __init__(self, folder: Path, split: str, parts: list[int], counts: list[int]):
        self.folder, self.split, self.parts = folder, split, parts
        self.ends = np.cumsum(counts, dtype=np.int64)
        self.maps: dict[int, pa.RecordBatch] = {}
        self.taken = 0
        for part in dict.fromkeys(parts):  # a damaged file is found now, not in the middle of an epoch
            map_table(self.path(part))

    def path(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}-{self.split}.arrow"

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def take(self, row: int) -> dict:
        """One row as {column: value} (see ROW)."""
        self.taken += 1
        if self.taken % self.KEEP == 0:
            self.maps.clear()
        place = int(np.searchsorted(self.ends, row, side="right"))
        part = self.parts[place]
        if part not in self.maps:
            self.maps[part] = map_table(self.path(part))
        at = row - (int(self.ends[place - 1]) if place else 0)
        return {name: self.maps[part].column(i)[at].as_py() for i, name in enumerate(ROW.names)}


def map_table(path: Path) -> pa.RecordBatch:
    """The one record batch of an Arrow file, mapped into memory. Raises InputError."""
    try:
        with pa.memory_map(str(path)) as file:
            return pa.ipc.open_file(file).get_batch(0)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: damaged index file ({error}); start again, it will be built again") from None


def write_table(path: Path, table: pa.Table) -> str:
    """Write an Arrow file of one record batch; returns its sha256."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(table.combine_chunks().to_batches()[0] if len(table) else empty(table.schema))
    return write(path, sink.getvalue())


def write(path: Path, content) -> str:
    """Write bytes atomically; returns their sha256. Raises RunError when they cannot be written."""
    try:
        return write_atomically(path, lambda file: file.write(content))
    except OSError as error:
        advice = "free space and start again, the build goes on with what is lacking"
        raise RunError(f"{path}: not written ({error.strerror}); {advice}") from None


def facts_sha256(path: Path, facts: dict) -> str:
    """The checksum of a JSON file of the index; of one that was put in another's place it is another."""
    return hashlib.sha256(f"{path.parent.name}/{path.name} {json.dumps(facts)}".encode()).hexdigest()


def write_facts(path: Path, facts: dict) -> None:
    write(path, json.dumps(facts | {"sha256": facts_sha256(path, facts)}).encode())


def read_facts(path: Path) -> dict | None:
    """What write_facts wrote; None where that is missing, damaged, or has no checksum."""
    try:
        facts = json.loads(path.read_bytes())
        written = facts.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return facts if written == facts_sha256(path, facts) else None


def is_intact(path: Path, sha256: str) -> bool:
    """Whether a file can be read and has this checksum."""
    try:
        return file_sha256(path) == sha256
    except OSError:
        return False


def empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema)


def index_folder(parent: Path, cxr: Path, release: Path, grade: str, view: str, limit: int = 0) -> Path:
    """A folder whose name tells these files and settings from others (by path, size and time of change)."""
    files = [cxr / f"mimic-cxr-2.0.0-{name}.csv.gz" for name in ("metadata", "split", "chexpert")]
    files += [release / "metadata" / "question_metadata.parquet", release / "qa.zip"]
    facts = [VERSION, str(cxr.resolve()), str(release.resolve()), grade, view, limit, HEADS, HEAD_OF_CODE]
    facts += [[f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.is_file()]
    return parent / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def open_index(
    parent: Path, cxr: Path, qba: Path, grade: str = "B", view: str = "frontal", max_missing: int = 0, limit: int = 0
) -> Index:
    """All ranks call it: build the index of these settings in a folder of `parent`, or go on building it, or open it.

    limit: so many studies of each split only, evenly spaced (for a trial); 0: all. What is damaged is built again.
    Raises InputError on all ranks for anything unreadable, and when more than max_missing pictures are not there.
    """
    folder, release = parent, qba
    with du.agree_on_errors():
        release = find_release(qba, grade)
        try:
            folder = index_folder(parent, cxr, release, grade, view, limit)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_written(parent, error) from None
    complete_index(folder, cxr, release, grade, view, limit)
    if damaged := find_damaged(folder):
        with du.agree_on_errors():
            if du.world()[0] == 0:
                forget(folder, damaged)
        complete_index(folder, cxr, release, grade, view, limit)
        if damaged := find_damaged(folder):
            text = "damaged again after it was written; check the disk, or choose another --index_dir"
            raise InputError(f"{damaged[0]}: {text}")
    index = None
    with du.agree_on_errors():
        facts = read_index(folder)
        index = Index(folder, facts, map_table(folder / "studies.arrow"))
        if len(facts["missing"]) > max_missing:
            list_file = folder / "missing.txt"
            count = f"{len(facts['missing'])} picture files do not exist, such as {facts['missing'][0]}"
            raise InputError(f"{cxr}: {count} (all in {list_file}); download them, or allow so many by --max_missing")
    return index


def complete_index(folder: Path, cxr: Path, release: Path, grade: str, view: str, limit: int) -> None:
    """All ranks: build what is lacking in `folder`, or wait for another run that does."""
    state, lock, told = "waiting", None, False
    while state == "waiting":
        with du.agree_on_errors():
            if du.world()[0] == 0:
                state, lock = begin(folder, cxr)
        state = du.broadcast_object(state)
        if state == "waiting" and not told:
            du.print_main(f"another run builds the index in {folder}; waiting for it")
            told = True
    if state == "ours":
        build(folder, cxr, release, grade, view, limit)
    del lock


def read_index(folder: Path) -> dict:
    """The facts of index.json. Raises InputError where they are not to be read, as on another node."""
    see(folder / "index.json")
    facts = read_facts(folder / "index.json")
    if facts is None:
        raise InputError(f"{folder}/index.json: damaged since it was checked; start again, or check the disk")
    return facts


def find_damaged(folder: Path) -> list[Path]:
    """All ranks: the Arrow files that have not the checksum of index.json, the same on every rank."""
    files = {}
    with du.agree_on_errors():
        files = read_index(folder)["files"]
    files = du.broadcast_object(files)
    size = size_on_disk(folder)
    if size > 2**30:
        du.print_main(f"checking the checksums of the index ({size / 2**30:.1f} GiB)")
    names = sorted(files)
    turn = du.broadcast_object(f"{folder.name}-{time.time()}-checksums")
    damaged = [names[i] for i in shared_work(turn, len(names)) if not is_intact(folder / names[i], files[names[i]])]
    return [folder / name for name in sorted(itertools.chain.from_iterable(du.gather_objects(damaged)))]


def forget(folder: Path, damaged: list[Path]) -> None:
    """Rank 0: what holds damaged files no longer counts as finished, and is built again."""
    for path in damaged:
        reason = "damaged (its sha256 is not the one written down)" if path.exists() else "missing"
        du.print_main(f"warning: {path}: {reason}; it is built again", file=sys.stderr)
    try:
        for path in damaged:
            if part := re.match(r"part-\d+", path.name):
                (folder / f"{part[0]}.json").unlink(missing_ok=True)
        (folder / "index.json").unlink(missing_ok=True)
    except OSError as error:
        raise not_written(folder, error) from None


def begin(folder: Path, cxr: Path) -> tuple[str, RunLock | None]:
    """("complete", None), ("ours" to build, the lock), or ("waiting", None): another job is building."""
    try:
        if is_complete(folder, cxr):
            return "complete", None
        try:
            lock = RunLock(folder / ".lock", wait=2)
        except InputError:
            return "waiting", None
        return ("complete", None) if is_complete(folder, cxr) else ("ours", lock)
    except OSError as error:
        raise not_written(folder, error) from None


def see(path: Path) -> None:
    """Raises InputError where a file that rank 0 wrote is not to be seen: on another node with a disk of its own."""
    if not path.exists():
        raise InputError(f"{path}: written, but not seen on {platform.node()}; --index_dir must be shared by all nodes")


def is_complete(folder: Path, cxr: Path) -> bool:
    """Whether index.json is there; parts of which missing pictures have come since are marked to be built again."""
    facts = read_facts(folder / "index.json")
    if facts is None:
        return False
    if not any((cxr / name).is_file() for name in facts["missing"]):
        return True
    for file in folder.glob("part-*.json"):
        part = read_facts(file)
        if part is None or any((cxr / name).is_file() for name in part["missing"]):
            file.unlink()
    (folder / "index.json").unlink()
    return False


def is_finished(folder: Path, part: int) -> bool:
    """Whether the files of a part are there and have their checksums."""
    facts = read_facts(folder / f"part-{part:05d}.json")
    return facts is not None and all(is_intact(folder / name, sha256) for name, sha256 in facts["files"].items())


def not_written(folder: Path, error: OSError) -> InputError:
    return InputError(f"{folder}: cannot write here ({error.strerror}); choose another --index_dir")


def shared_work(name: str, count: int) -> Iterator[int]:
    """0 .. count - 1, dealt out to the ranks as they come: a slow rank gets less, and none waits long for another."""
    if not dist.is_initialized():
        yield from range(count)
        return
    store = dist.distributed_c10d._get_default_store()
    while (number := store.add(name, 1) - 1) < count:
        yield number


@contextlib.contextmanager
def stop_others(name: str) -> Iterator[None]:
    """agree_on_errors around shared_work(name): an error of one rank ends the others' work at their next piece."""
    with du.agree_on_errors():
        try:
            yield
        except (InputError, RunError):
            if dist.is_initialized():
                dist.distributed_c10d._get_default_store().add(name, 1 << 40)
            raise


def build(folder: Path, cxr: Path, release: Path, grade: str, view: str, limit: int = 0) -> None:
    """Read both releases into `folder`, all ranks sharing the parts; index.json is written last."""
    from tqdm import tqdm

    begun, turn = time.time(), f"{folder.name}-{time.time()}"
    turn = du.broadcast_object(turn)
    if (folder / "index.json").exists():
        reason = "damaged, or of an earlier version without checksums"
        du.print_main(f"{folder}/index.json: {reason}; it is built again")
    counts: dict[str, int] = {}
    files: dict[str, str] = {}
    with du.agree_on_errors():
        if du.world()[0] == 0:
            table, counts = read_studies(cxr, view)
            if limit:
                rows = [np.flatnonzero(table["split"].to_numpy() == split) for split in range(len(SPLITS))]
                few = [part[np.unique(np.linspace(0, len(part) - 1, limit).astype(int))] for part in rows if len(part)]
                table = table.take(pa.array(np.sort(np.concatenate(few)))) if few else table
            files["studies.arrow"] = write_table(folder / "studies.arrow", table)
    studies = None
    with du.agree_on_errors():
        see(folder / "studies.arrow")
        studies = map_table(folder / "studies.arrow")
    size = min(1024, max(8, -(-len(studies) // 32)))  # studies a part, whatever the number of ranks
    parts = -(-len(studies) // size)
    quiet = not (du.world()[0] == 0 and sys.stderr.isatty())
    du.print_main(f"building the index of questions in {folder} ({len(studies)} studies, {parts} parts)")

    ratings: Counter = Counter()
    with stop_others(f"{turn}-grades"):
        if grade != "all":
            ratings = sort_grades(folder, release, grade, f"{turn}-grades")
    graded = sorted(folder.glob("grades-*.arrow")) if grade != "all" else None
    with stop_others(f"{turn}-parts"):
        question_files = QuestionFiles(release)
        bar = tqdm(total=parts, desc="indexing questions", unit="part", disable=quiet)
        gc.disable()  # parsed JSON has no cycles, and looking for some takes more than half of the time
        try:
            for part in shared_work(f"{turn}-parts", parts):
                if not is_finished(folder, part):
                    rows = range(part * size, min((part + 1) * size, len(studies)))
                    build_part(folder, part, rows, studies, question_files, graded, cxr)
                bar.update(part + 1 - bar.n)
        finally:
            gc.enable()
        bar.close()
    ratings = sum(du.gather_objects(ratings), Counter())
    with du.agree_on_errors():
        if du.world()[0] == 0:
            every = [read_part(folder, part) for part in range(parts)]
            files |= {name: sha256 for part in every for name, sha256 in part["files"].items()}
            left_out = sum((Counter(part["left_out"]) for part in every), Counter())
            classes: dict[str, list[int]] = {}
            for kind, values in itertools.chain.from_iterable(part["classes"].items() for part in every):
                classes[kind] = [a + b for a, b in zip(classes.get(kind, [0] * len(values)), values, strict=True)]
            if not any(part["rows"]["train"] + part["rows"]["validate"] + part["rows"]["test"] for part in every):
                if gone := next((name for part in every for name in part["missing"]), None):
                    names = f"{left_out['picture file missing']} lack their pictures, such as {gone}"
                    raise InputError(f"{cxr}: no question is left, {names}; check --mimic_cxr_path")
                why = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common(3)) or "no studies"
                raise InputError(f"{release}: no question is left ({why}); choose another --quality_grade or --view")
            missing = sorted(name for part in every for name in part["missing"])
            write(folder / "missing.txt", "".join(f"{name}\n" for name in missing).encode())
            facts = {"rows": [part["rows"] for part in every], "studies": counts, "ratings": dict(ratings)}
            facts |= {"left_out": dict(left_out), "classes": classes, "missing": missing}
            facts |= {"files": files, "seconds": round(time.time() - begun, 1)}
            write_facts(folder / "index.json", facts)
            for file in graded or ():
                file.unlink()


def read_part(folder: Path, part: int) -> dict:
    """The facts of a part that some rank has just finished. Raises InputError where they are not to be read."""
    path = folder / f"part-{part:05d}.json"
    see(path)
    facts = read_facts(path)
    if facts is None:
        raise InputError(f"{path}: damaged since it was written; start again, or check the disk")
    return facts


def sort_grades(folder: Path, release: Path, grade: str, turn: str) -> Counter:
    """Write grades-<row group>.arrow: (study, id) of the questions of that grade or better, sorted by study in each
    batch; returns how often each rating occurs in the row groups that this rank read."""
    path, least, ratings = release / "metadata" / "question_metadata.parquet", GRADES.index(grade), Counter()
    names = ["study_id", "question_id", "question.quality.rating"]
    try:
        file = pq.ParquetFile(path, memory_map=True)
        if lacking := [name for name in names if name not in file.schema_arrow.names]:
            raise InputError(f"{path}: no column {lacking[0]!r}; it must hold {', '.join(names)}")
        for group in shared_work(turn, file.num_row_groups):
            kept = []
            for batch in file.iter_batches(batch_size=1 << 20, row_groups=[group], columns=names):
                rating = pc.dictionary_encode(batch["question.quality.rating"].cast(pa.string()))
                codes = rating.indices.fill_null(len(rating.dictionary)).to_numpy(zero_copy_only=False)
                values = [*rating.dictionary.to_pylist(), None]
                for code, count in zip(*np.unique(codes, return_counts=True), strict=True):
                    place = grade_rank(values[code])
                    ratings[GRADES[place] if place >= 0 else "unrated"] += int(count)
                good = np.array([grade_rank(value) >= least for value in values])[codes]
                studies = pc.dictionary_encode(batch["study_id"].cast(pa.string()))
                study = np.array([int(name[1:]) for name in studies.dictionary.to_pylist()])[studies.indices.to_numpy()]
                order = np.argsort(study, kind="stable")
                order = order[good[order]]
                kept.append(pa.table({"study": study[order], "id": batch["question_id"].take(pa.array(order))}))
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, GRADED) as writer:
                for table in kept:
                    writer.write_table(table.cast(GRADED))
            write(folder / f"grades-{group:05d}.arrow", sink.getvalue())
    except (OSError, pa.ArrowException, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0][:150]
        raise InputError(f"{path}: not a readable table of questions ({reason}); download it again") from None
    return ratings


def accepted_ids(graded: list[Path], low: int, high: int) -> dict[int, set[str]]:
    """{study_id: question ids of the wanted grade} of the studies low <= study_id <= high."""
    accepted: dict[int, set[str]] = {}
    for path in graded:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                study = batch["study"].to_numpy()
                first, last = np.searchsorted(study, [low, high + 1])
                names = batch["id"].slice(first, last - first).to_pylist()
                for key, name in zip(study[first:last].tolist(), names, strict=True):
                    accepted.setdefault(key, set()).add(name)
    return accepted


def build_part(
    folder: Path, part: int, rows: range, studies: pa.RecordBatch, files: QuestionFiles, graded: list[Path] | None,
    cxr: Path,
) -> None:  # fmt: skip
    """Write part-<n>-<split>.arrow for the studies in `rows` and, last, part-<n>.json with the counts."""
    wanted = {name: studies[name].slice(rows.start, len(rows)).to_pylist() for name in studies.schema.names[:4]}
    low, high = wanted["study_id"][0], wanted["study_id"][-1]
    accepted = None if graded is None else accepted_ids(graded, low, high)
    kept = {split: {name: [] for name in ROW.names} for split in SPLITS}
    left_out, classes, missing = Counter(), {}, []
    heads: dict[str, str | None] = {}
    for row, study, subject, split, dicom in zip(rows, *wanted.values(), strict=True):
        questions = files.questions(subject, study)
        if questions is None:
            left_out["study without a question file (studies)"] += 1
            continue
        out, before, good = kept[SPLITS[split]], None, accepted.get(study, ()) if accepted is not None else None
        try:
            for question in questions:
                name, kind, text = question["question_id"], question["question_type"], question["question"]
                if not (isinstance(name, str) and isinstance(text, str) and text.strip()):
                    raise TypeError("question and question_id must be texts")
                if good is not None and name not in good:
                    left_out["below the grade, or unrated"] += 1
                    continue
                if kind not in heads:
                    heads[kind] = head_of(kind)
                if (head := heads[kind]) is None:
                    left_out[f"{kind}: {NOT_ASKED}"] += 1
                    continue
                target, why = target_of(question, head)
                if target is None:
                    left_out[f"{kind}: {why}"] += 1
                    continue
                if before is None:
                    before = has_image(cxr, subject, study, dicom, missing)
                if not before:
                    left_out["picture file missing"] += 1
                    continue
                for column, value in zip(out.values(), (row, HEAD_NUMBER[head], target, kind, name, text), strict=True):
                    column.append(value)
                if split == 0:
                    classes.setdefault(kind, [0] * len(HEADS[head]))[target] += 1
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            where, reason = files.place(subject, study), f"no key {error}" if isinstance(error, KeyError) else error
            raise InputError(f"{where}: question not in the release's format ({reason}); download it again") from None
    sums = {}
    for split, columns in kept.items():
        if columns["study"]:
            arrays = [pa.array(columns[f.name], pa.string() if f.name == "type" else f.type) for f in ROW]
            arrays[ROW.get_field_index("type")] = pc.dictionary_encode(arrays[3]).cast(ROW.field("type").type)
            name = f"part-{part:05d}-{split}.arrow"
            sums[name] = write_table(folder / name, pa.Table.from_arrays(arrays, schema=ROW))
    facts = {"rows": {split: len(columns["study"]) for split, columns in kept.items()}, "left_out": dict(left_out)}
    facts |= {"classes": classes, "missing": missing, "files": sums}
    write_facts(folder / f"part-{part:05d}.json", facts)


def image_name(subject: int, study: int, dicom: str) -> str:
    """files/p10/p10000032/s50414267/<dicom_id>.jpg"""
    return f"files/p{str(subject)[:2]}/p{subject}/s{study}/{dicom}.jpg"


def has_image(cxr: Path, subject: int, study: int, dicom: str, missing: list[str]) -> bool:
    """Whether the file is there (if not, it is added to `missing`). Raises InputError when it is no JPEG."""
    name = image_name(subject, study, dicom)
    try:
        with open(cxr / name, "rb") as file:
            start = file.read(3)
    except OSError:
        missing.append(name)
        return False
    if start != b"\xff\xd8\xff":
        raise InputError(f"{cxr / name}: not a JPEG file; download it again")
    return True


def left_out_table(facts: dict) -> dict[str, dict[str, int]]:
    """{reason: {"questions": count}} of an index.json, largest first, for print_table."""
    reasons = Counter(facts["left_out"])
    short = dict(reasons.most_common(25))
    if rest := sum(reasons.values()) - sum(short.values()):
        short["other reasons"] = rest
    return {reason: {"questions": count} for reason, count in short.items()}


def size_on_disk(folder: Path) -> int:
    """Bytes of the index files."""
    return sum(os.path.getsize(path) for path in folder.glob("*.arrow"))
