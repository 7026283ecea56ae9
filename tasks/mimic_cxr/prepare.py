"""Convert chest X-rays and questions to memory-mapped files for train_mimic_cxr.py.

OUT/studies.parquet       image path, patient, split, view, sex, age and 14 CheXpert labels of each study
                          (1 present, 0 absent, -1 uncertain, NaN unknown)
OUT/questions.arrow       study, answer head, target class, type and text of each question, sorted by split and study
OUT/images_<side>.u8      decoded images, (studies, side, side) uint8
OUT/prepared.json         sources, settings, and counts of used and excluded data
"""

import argparse
import functools
import gc
import hashlib
import json
import os
import re
import shutil
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image
from tqdm import tqdm

from tasks.mimic_cxr.answers import CHEXPERT, CLASS_OF, HEAD_NUMBER, HEADS, head_of, target_of
from utils import images, tables
from utils.cli import InputError, RunError, refuse, whole

# increase only if folders in the old format become unusable
FORMAT = 1
# optional columns by which the test's table is grouped
GROUPING = ("view", "sex", "age")
SPLITS = ("train", "val", "test")
VIEWS = {"frontal": ("PA", "AP"), "PA": ("PA",), "AP": ("AP",), "lateral": ("LATERAL", "LL")}
VIEW_OF_CODE = {"postero-anterior": "PA", "antero-posterior": "AP", "lateral": "LATERAL", "left lateral": "LL"}
GRADES = ("D", "C", "B", "A", "A+", "A++")
RATING = "question.quality.rating"
TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema({"study": pa.int32(), "head": pa.int8(), "target": pa.int8(), "type": TEXT, "question": TEXT})
UNREADABLE = (OSError, ValueError, EOFError, zlib.error)
# studies per job when reading questions; images per job when decoding
STUDIES, IMAGES = 256, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "CXR_JPG QA_RELEASE: the folders of MIMIC-CXR-JPG and MIMIC-Ext-CXR-QBA; or TABLE: a table of your X-rays"
    add("source", nargs="+", metavar="SOURCE", help=text)
    add("out", metavar="OUT", help="output folder, for --data_path; must not exist yet")
    add("--grade", choices=(*GRADES, "all"), default="B", help="minimum grade; all: any grade, and unrated questions")
    add("--view", choices=VIEWS, default="frontal", help="view to take from each study; frontal: PA, else AP")
    add("--patients", metavar="FILE", help="MIMIC-IV's patients.csv.gz, for scores by sex and age")
    add("--image_size", type=whole(32), default=224, help="side of the decoded images in pixels")
    add(
        "--split",
        type=tables.parse_shares,
        default="0.7,0.15,0.15",
        help="shares of patients in train, val and test, for a table without a split column",
    )
    add("--seed", type=int, default=0, help="seed of --split; with it, a patient's name determines the split")
    # on Windows, joblib.cpu_count() returns at most 61, the limit of a process pool
    add("--workers", type=whole(1), default=joblib.cpu_count(), help="number of processes")


def map_lazily(pool: Executor, function: Callable, jobs: Iterable, ahead: int) -> Iterator:
    """Like pool.map(), but with at most `ahead` jobs in memory."""
    waiting = deque()
    for job in jobs:
        waiting.append(pool.submit(function, job))
        if len(waiting) == ahead:
            yield waiting.popleft().result()
    yield from (future.result() for future in waiting)


def table_of(rows: list[tuple]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return pa.table(arrays, SCHEMA)


# --- MIMIC-CXR-JPG and MIMIC-Ext-CXR-QBA ------------------------------------------------------------------------------


def read_csv(path: Path, columns: list[str]) -> pd.DataFrame:
    try:
        return pd.read_csv(path, dtype=str, usecols=columns)
    except UNREADABLE as error:
        raise InputError(f"{path}: cannot be read ({error}); download it again") from None


def read_studies(jpg: Path, view: str, patients: str | None) -> tuple[pd.DataFrame, Counter]:
    """Return one row per study that has an image in the selected view, and {reason: number of excluded studies}.

    The rows are sorted by split.
    """
    names = ["dicom_id", "subject_id", "study_id", "ViewPosition", "ViewCodeSequence_CodeMeaning"]
    table = read_csv(jpg / "mimic-cxr-2.0.0-metadata.csv.gz", names)
    count, left_out = table["study_id"].nunique(), Counter()
    codes = table["ViewCodeSequence_CodeMeaning"].str.lower().map(VIEW_OF_CODE)
    table["view"] = table["ViewPosition"].fillna(codes)
    table["rank"] = table["view"].map({name: rank for rank, name in enumerate(VIEWS[view])})
    table = table.dropna(subset="rank").sort_values(["study_id", "rank", "dicom_id"]).drop_duplicates("study_id")
    left_out[f"studies without a {view} image"] = count - len(table)

    path = jpg / "mimic-cxr-2.0.0-split.csv.gz"
    splits = read_csv(path, ["dicom_id", "split"]).set_index("dicom_id")["split"].replace("validate", "val")
    table["split"] = table["dicom_id"].map(splits)
    known = table["split"].isin(SPLITS)
    left_out["studies without a split"] = int((~known).sum())
    table = table[known].sort_values("split", key=lambda names: names.map(SPLITS.index), kind="stable")
    in_two = tables.in_two_splits(table[["subject_id", "split", "subject_id"]].itertuples(index=False))
    if in_two:
        raise InputError(f"{path}: patient {in_two[0]!r} is in two splits; keep each patient in one")

    subject, study = table["subject_id"], table["study_id"]
    table["image"] = "files/p" + subject.str[:2] + "/p" + subject + "/s" + study + "/" + table["dicom_id"] + ".jpg"
    there = np.fromiter(((jpg / name).is_file() for name in table["image"]), bool, len(table))
    left_out["studies without an image file"] = int((~there).sum())
    if not there.any():
        raise InputError(f"{jpg}: none of {len(there):,} {view} images is there; check the path of MIMIC-CXR-JPG")
    labels = read_csv(jpg / "mimic-cxr-2.0.0-chexpert.csv.gz", ["study_id", *CHEXPERT]).drop_duplicates("study_id")
    table = table[there].merge(labels, on="study_id", how="left").assign(sex=None, age=None)
    if patients:
        people = read_csv(Path(patients), ["subject_id", "gender", "anchor_age"]).set_index("subject_id")
        table["sex"], table["age"] = (table["subject_id"].map(people[name]) for name in ("gender", "anchor_age"))
    return table.assign(patient=table["subject_id"]), left_out


def find_release(root: Path, grade: str) -> Path:
    for folder in (root, root / "exports" / f"{grade.rstrip('+')}_frontal"):
        if (folder / "qa").is_dir() or (folder / "qa.zip").is_file():
            return folder
    raise InputError(f"{root}: holds neither qa/ nor qa.zip; check the path of MIMIC-Ext-CXR-QBA")


def read_grades(release: Path, grade: str) -> Callable[[str], list[str]]:
    """Return a function that maps a study_id to the ids of its questions with at least the given quality grade."""
    path = release / "metadata" / "question_metadata.parquet"
    good = GRADES[GRADES.index(grade) :]
    studies, ids = [np.empty(0, np.int64)], []
    try:
        file = pq.ParquetFile(path, read_dictionary=[RATING])
        for batch in file.iter_batches(columns=["study_id", "question_id", RATING]):
            rating = batch[RATING].dictionary.to_pylist()
            kept = [rank for rank, name in enumerate(rating) if name and re.sub(r"^\d+_", "", name) in good]
            batch = batch.filter(pc.is_in(batch[RATING].indices, pa.array(kept, pa.int32())))
            studies.append(pc.cast(pc.utf8_slice_codeunits(batch["study_id"], 1), pa.int64()).to_numpy())
            # large_string, because a pyarrow string array is limited to 2 GB
            ids.append(pc.cast(batch["question_id"], pa.large_string()))
    except (OSError, KeyError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read ({error}); download it again, or --grade all") from None
    study, names = np.concatenate(studies), pa.chunked_array(ids, pa.large_string())
    if (np.diff(study) < 0).any():
        order = np.argsort(study, kind="stable")
        study, names = study[order], names.take(pa.array(order))

    def of_study(name: str) -> list[str]:
        begin, end = np.searchsorted(study, [int(name), int(name) + 1])
        return names.slice(begin, end - begin).to_pylist()

    return of_study


@functools.cache
def open_release(release: Path) -> Path | zipfile.Path:
    """Return `release` or, if it has no folder qa, its opened qa.zip. Cached, because opening is slow."""
    return release if (release / "qa").is_dir() else zipfile.Path(release / "qa.zip")


def read_part(job: tuple) -> tuple[pa.Table, Counter]:
    """Read the questions of one job's studies; return (table, {reason: number of excluded studies or questions}).

    job: (release folder, index of the first study, [(subject_id, study_id), ...], question ids to keep). The question
    ids are one set per study, or None to keep all questions.
    """
    release, first, studies, good = job
    rows, left_out = [], Counter()
    for number, (subject, study) in enumerate(studies):
        name = f"qa/p{subject[:2]}/p{subject}/s{study}.qa.json"
        try:
            content = (open_release(release) / name).read_bytes()
            for question in json.loads(content)["questions"]:
                kind, asked = question["question_type"], question["question"]
                head = head_of(kind)
                if good and question["question_id"] not in good[number]:
                    left_out["questions below the grade, or unrated"] += 1
                elif head is None:
                    left_out[f"questions {kind}: a type without a head"] += 1
                elif not isinstance(asked, str) or not asked.strip():
                    left_out[f"questions {kind}: no text"] += 1
                else:
                    target, reason = target_of(question, head)
                    if target is None:
                        left_out[f"questions {kind}: {reason}"] += 1
                    else:
                        rows.append((first + number, HEAD_NUMBER[head], target, kind, asked))
        except FileNotFoundError:
            left_out["studies without a question file"] += 1
        except (*UNREADABLE, zipfile.BadZipFile, KeyError, TypeError, AttributeError) as error:
            print(f"warning: {name}: damaged ({error!r})", flush=True)
            left_out["studies with a damaged question file"] += 1
    return table_of(rows), left_out


def read_releases(args: argparse.Namespace, pool: Executor) -> tuple[pd.DataFrame, pa.Table, Counter]:
    release = find_release(Path(args.source[1]), args.grade)
    studies, left_out = read_studies(Path(args.source[0]), args.view, args.patients)
    good = None if args.grade == "all" else read_grades(release, args.grade)

    def jobs() -> Iterator[tuple]:
        names = list(zip(studies["subject_id"], studies["study_id"], strict=True))
        for first in range(0, len(names), STUDIES):
            part = names[first : first + STUDIES]
            yield release, first, part, good and [set(good(study)) for _, study in part]

    parts = []
    found = map_lazily(pool, read_part, jobs(), ahead=4 * args.workers)
    for table, reasons in tqdm(found, "questions", -(-len(studies) // STUDIES)):
        parts.append(table)
        left_out += reasons
    return studies, pa.concat_tables(parts), left_out


# --- user-supplied table ----------------------------------------------------------------------------------------------


def labels_of(source: str, row: dict[str, str]) -> dict[str, float]:
    """Return {CheXpert label: 1, 0 or -1} for a row with a column "labels" or one column per label."""
    present = [name.strip().lower() for name in row.get("labels", "").split(";") if name.strip()]
    present = ["no finding" if name == "none" else name for name in present]
    for name in present:
        if name not in CLASS_OF["category"]:
            known = f"{', '.join(CHEXPERT)} and none"
            raise InputError(f"{source}: label {name!r} is none of {known}; correct it, and put ; between labels")
    if present:
        return {label: float(label.lower() in present) for label in CHEXPERT}
    cells = {label: row[label.lower()] for label in CHEXPERT if row.get(label.lower())}
    for label, cell in cells.items():
        if cell not in ("0", "1", "-1", "0.0", "1.0", "-1.0"):
            raise InputError(f"{source}: {label} {cell!r} is none of 1, 0, -1 and blank; correct it")
    return {label: float(cell) for label, cell in cells.items()}


def study_of(source: str, row: dict[str, str], folder: Path, args: argparse.Namespace) -> dict:
    """Return {column: value} for the study in a row of the user's table.

    Without a patient column, each image counts as a separate patient.
    """
    image, split = row["image"], row.get("split", "")
    if ".." in Path(image).parts and not Path(image).is_absolute():
        raise InputError(f"{source}: {image} leads out of the table's folder; give an absolute path")
    if not (folder / image).is_file():
        raise InputError(f"{source}: no such image ({folder / image}); paths start from the table's folder")
    if split and split.lower() not in tables.SPLITS:
        raise InputError(f"{source}: split {split!r} is none of train, val and test; correct it")
    patient = row.get("patient") or image
    split = tables.SPLITS[split.lower()] if split else tables.split_of(patient, args.seed, args.split)
    given = {name: row[name] for name in GROUPING if row.get(name)}
    if "age" in given and not re.fullmatch(r"\d+(\.\d+)?", given["age"]):
        raise InputError(f"{source}: age {given['age']!r} is no number; correct it, or leave it blank")
    return {"image": image, "patient": patient, "split": split} | given | labels_of(source, row)


def question_of(source: str, row: dict[str, str]) -> tuple[int, int, str, str]:
    """Return (index of the answer head, index of the class, question type, text) for a row of the user's table."""
    answer, text = row.get("answer", "").lower(), row["question"]
    head = row.get("head", "").lower() or next((name for name in HEADS if answer in CLASS_OF[name]), None)
    if not text:
        raise InputError(f"{source}: no question; complete the row or remove it")
    if head and head not in HEADS:
        raise InputError(f"{source}: head {head!r} is none of {', '.join(HEADS)}; correct it, or leave it blank")
    if not head or answer not in CLASS_OF[head]:
        known = ", ".join(HEADS[head]) if head else f"the answers of {', '.join(HEADS)}"
        raise InputError(f"{source}: answer {answer!r} is none of {known}; correct it")
    return HEAD_NUMBER[head], CLASS_OF[head][answer], row.get("type") or head, text


def read_own(args: argparse.Namespace) -> tuple[pd.DataFrame, pa.Table, Counter]:
    """Read the user's table; return (studies, questions, Counter), like read_releases(); the Counter is empty.

    Without a "question" column, each CheXpert label of 0 or 1 becomes a yes-or-no question. Lists all
    invalid rows and raises InputError.
    """
    path = Path(args.source[0])
    table = tables.read_table(path)
    tables.find_column(table, "image")
    studies, questions, problems, binary = {}, {}, [], HEAD_NUMBER["binary"]
    for source, row in table:
        try:
            row_study = study_of(source, row, path.parent, args)
            study = studies.setdefault(row["image"], row_study | {"source": source})
            for name, value in row_study.items():
                if study.setdefault(name, value) != value:
                    other = f"{study[name]!r} in {study['source']}"
                    raise InputError(f"{source}: {name} {value!r} of this image is {other}; make them agree")
            if "question" in row:
                questions.setdefault(row["image"], []).append(question_of(source, row))
        except InputError as error:
            problems.append(str(error))
    refuse(problems, "rows cannot be used")
    tables.check_one_split((study["patient"], study["split"], study["source"]) for study in studies.values())

    frame = pd.DataFrame(sorted(studies.values(), key=lambda study: SPLITS.index(study["split"])))
    if not questions:
        for name, study in studies.items():
            known = [label for label in CHEXPERT if study.get(label) in (0, 1)]
            questions[name] = [(binary, int(study[x]), f"is_{x}", f"Is there {x.lower()}?") for x in known]
    rows = [(number, *question) for number, name in enumerate(frame["image"]) for question in questions[name]]
    return frame, table_of(rows), Counter()


# --- writing ----------------------------------------------------------------------------------------------------------


def decode(path: str | Path, side: int) -> np.ndarray:
    """Read an image file as a grayscale uint8 array (side, side), scaled to fit and padded with black.

    Raises OSError or ValueError if the file is not a readable image.
    """
    image = images.open_upright(path, side=2 * side).convert("L")
    return np.asarray(images.square(image, side, Image.Resampling.BICUBIC))


def decode_part(job: tuple) -> list[tuple[int, str]]:
    """Decode images into the output file; return [(index of the study, error message)] for unreadable images.

    job: (output file, side in pixels, index of the first study, image paths).
    """
    file, side, first, paths = job
    pixels, problems = np.zeros((len(paths), side, side), np.uint8), []
    for number, path in enumerate(paths):
        try:
            pixels[number] = decode(path, side)
        except (OSError, ValueError) as error:
            problems.append((first + number, f"{path}: not a readable image ({error})"))
    # not a memory map: on a full disk, writing to a memory map kills the process instead of raising OSError
    with open(file, "r+b") as target:
        target.seek(first * side**2)
        target.write(pixels)
    return problems


def write(args: argparse.Namespace, folder: Path) -> None:
    own = len(args.source) == 1
    # without gc.disable, the workers would spend half their time on garbage collection
    with ProcessPoolExecutor(args.workers, initializer=gc.disable) as pool:
        studies, rows, left_out = read_own(args) if own else read_releases(args, pool)
        if not len(rows):
            found = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common(3) if count)
            reasons = found or "neither questions nor labels of 0 or 1"
            raise InputError(f"{args.source[-1]}: no question is left ({reasons}); check {'it' if own else '--grade'}")
        root = Path(args.source[0]).parent if own else Path(args.source[0])
        paths = [str(root / name) for name in studies["image"]]
        side = args.image_size
        file = folder / f"images_{side}.u8"
        file.touch()
        jobs = [(file, side, first, paths[first : first + IMAGES]) for first in range(0, len(paths), IMAGES)]
        problems = [problem for found in tqdm(pool.map(decode_part, jobs), "images", len(jobs)) for problem in found]

    if problems:
        damaged, reasons = zip(*problems, strict=True)
        rows = rows.filter(pc.invert(pc.is_in(rows["study"], pa.array(damaged, pa.int32()))))
        if own:
            refuse([f"{studies['source'][k]}: {reason}; replace it" for k, reason in problems], "images cannot be used")
        if not len(rows):
            raise InputError(f"{reasons[0]} ({len(problems):,} such images); replace what is damaged")
        left_out["studies with a damaged image"] = len(problems)
        print("\n".join(f"warning: {reason}" for reason in reasons[:5]), flush=True)
    counts = dict(zip(SPLITS, np.diff(split_bounds(studies, rows["study"].to_numpy())).tolist(), strict=True))

    studies = studies.reindex(columns=["image", "patient", "split", *GROUPING, *CHEXPERT])
    studies[["age", *CHEXPERT]] = studies[["age", *CHEXPERT]].apply(pd.to_numeric, errors="coerce").astype("float32")
    studies.to_parquet(folder / "studies.parquet")
    rows = rows.unify_dictionaries().combine_chunks()
    with pa.OSFile(str(folder / "questions.arrow"), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(rows)
    metadata = {"format": FORMAT, "source": args.source}
    metadata |= {name: getattr(args, name) for name in (("split", "seed") if own else ("grade", "view", "patients"))}
    metadata |= {"image_size": side, "questions": counts, "studies": len(studies), "left_out": dict(left_out)}
    with open(folder / "questions.arrow", "rb") as written:
        # a resumed run compares this digest with its checkpoint, to detect changed questions
        metadata["digest"] = hashlib.file_digest(written, "sha256").hexdigest()[:16]
    (folder / "prepared.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")

    for reason, count in left_out.most_common(20):
        if count:
            print(f"left out: {count:>9,} {reason}")
    questions = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    print(f"{args.out}: {len(studies):,} studies; questions: {questions}")


def prepare(args: argparse.Namespace) -> None:
    """Convert the data in args.source and write the folder args.out.

    Raises InputError if the folder exists or a source is unusable, RunError if writing fails or a process is killed.
    """
    if len(args.source) > 2 or (len(args.source) == 1 and Path(args.source[0]).is_dir()):
        raise InputError("give CXR_JPG QA_RELEASE OUT, or TABLE OUT")
    out = Path(args.out)
    if os.path.lexists(out):
        raise InputError(f"{out}: exists already; choose another folder or delete it")
    partial_out = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial_out, ignore_errors=True)
        partial_out.mkdir(parents=True)
        write(args, partial_out)
        os.replace(partial_out, out)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error}); check space and permissions") from None
    except BrokenProcessPool:
        raise RunError("a process was killed, often for want of memory; start again with fewer --workers") from None
    finally:
        shutil.rmtree(partial_out, ignore_errors=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def split_bounds(studies: pd.DataFrame, study: np.ndarray) -> list[int]:
    """Return [0, end of train, end of val, end of test]: row numbers in the table of questions."""
    sizes = studies["split"].value_counts().reindex(SPLITS, fill_value=0)
    # np.searchsorted would copy `study` if the dtypes differed
    return [0, *np.searchsorted(study, sizes.cumsum().to_numpy(study.dtype)).tolist()]


@dataclass
class Prepared:
    """Contents of a folder that prepare() wrote; images and questions are memory-mapped.

    images: (studies, side, side) uint8. studies: rows of studies.parquet, with NaN or None for unknown values. labels:
    (studies, 14) CheXpert labels 1, 0, -1 (uncertain) or NaN. study, head, target: (questions,) indices of the study,
    answer head and target class. type, question: (questions,) indices into `types` and `texts`. bounds: result of
    split_bounds().
    """

    folder: Path
    images: np.ndarray
    studies: pd.DataFrame
    labels: np.ndarray
    study: np.ndarray
    head: np.ndarray
    target: np.ndarray
    type: np.ndarray
    question: np.ndarray
    types: list[str]
    texts: pa.Array
    bounds: list[int]
    metadata: dict

    def __reduce__(self):
        # pickle only the path, so that spawned DataLoader workers map the files instead of receiving copies
        return open_prepared, (self.folder,)


def open_prepared(folder: Path) -> Prepared:
    """Open a folder that prepare() wrote. Raises InputError if files are missing, damaged or in another format."""
    try:
        metadata = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
        if metadata["format"] != FORMAT:
            raise ValueError(f"written by another version of this program, format {metadata['format']}")
        side = metadata["image_size"]
        studies = pd.read_parquet(folder / "studies.parquet")
        images_file = np.memmap(folder / f"images_{side}.u8", np.uint8, "r").reshape(len(studies), side, side)
        rows = pa.ipc.open_file(pa.memory_map(str(folder / "questions.arrow"))).read_all()
    except FileNotFoundError:
        raise InputError(
            f"{folder}: no data; give --data_path. None yet? `make demo TASK=mimic_cxr` makes some up and trains; "
            "`python -m tools.prepare_data mimic_cxr --help` shows how to prepare the published data or your own"
        ) from None
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(f"{folder}: cannot be used ({error}); prepare the data again") from None
    columns = {name: rows[name].chunk(0) for name in SCHEMA.names}
    plain = {name: columns[name].to_numpy() for name in ("study", "head", "target")}
    coded = {name: columns[name].indices.to_numpy() for name in ("type", "question")}
    return Prepared(
        folder,
        images_file,
        studies,
        studies[list(CHEXPERT)].to_numpy(np.float32),
        **plain,
        **coded,
        types=columns["type"].dictionary.to_pylist(),
        texts=columns["question"].dictionary,
        bounds=split_bounds(studies, plain["study"]),
        metadata=metadata,
    )
