"""Prepare chest X-rays and questions once, for train_mimic_cxr.py to map into memory.

OUT/studies.parquet       a row a study: image, patient, split, view, sex, age, 14 CheXpert labels (1, 0, -1, blank)
OUT/questions.arrow       a row a question: study, head, target, type, question; sorted by split and study
OUT/images_<side>.u8      (studies, side, side) uint8, decoded once
OUT/prepared.json         from what and how they were made, and what was left out

The folder appears by one rename when all of it is written.
"""

import argparse
import functools
import gc
import json
import os
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image
from tqdm import tqdm

from tasks.mimic_cxr.answers import CHEXPERT, CLASS_OF, HEAD_NUMBER, HEADS, head_of, target_of
from utils import images, tables
from utils.cli import InputError, whole

FORMAT = 1
SPLITS = ("train", "val", "test")
VIEWS = {"frontal": ("PA", "AP"), "PA": ("PA",), "AP": ("AP",), "lateral": ("LATERAL", "LL")}
VIEW_OF_CODE = {"postero-anterior": "PA", "antero-posterior": "AP", "lateral": "LATERAL", "left lateral": "LL"}
GRADES = ("D", "C", "B", "A", "A+", "A++")
RATING = "question.quality.rating"
# texts are few and repeat, so each is kept once
TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema({"study": pa.int32(), "head": pa.int8(), "target": pa.int8(), "type": TEXT, "question": TEXT})
# studies that a process reads at a time, and images that it decodes
STUDIES, IMAGES = 256, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this data set's flags."""
    add = parser.add_argument
    text = "CXR_JPG QA_RELEASE: the folders of MIMIC-CXR-JPG and MIMIC-Ext-CXR-QBA; or TABLE: your own"
    add("source", nargs="+", metavar="SOURCE", help=text)
    add("out", metavar="OUT", help="folder to write, for --data_path; must not exist yet")
    add("--grade", choices=(*GRADES, "all"), default="B", help="questions of this grade or better; all: unrated, too")
    add("--view", choices=VIEWS, default="frontal", help="the image of a study; frontal: PA, else AP")
    add("--patients", metavar="FILE", help="MIMIC-IV's patients.csv.gz, for scores by sex and age")
    add("--image_size", type=whole(32), default=224, help="side of the decoded images, pixels")
    add(
        "--split",
        type=tables.parse_shares,
        default="0.7,0.15,0.15",
        help="shares of a table's patients, where it has none",
    )
    add("--seed", type=int, default=0, help="decides, with a patient's name, the split")
    add("--workers", type=whole(1), default=os.cpu_count(), help="processes")


# --- the releases -----------------------------------------------------------------------------------------------------


def read_csv(path: Path, columns: list[str]) -> pd.DataFrame:
    """Some columns of a release's table, as text. Raises InputError."""
    try:
        return pd.read_csv(path, dtype=str, usecols=columns)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: cannot be read ({error}); download it again") from None


def read_studies(jpg: Path, view: str, patients: str | None) -> pd.DataFrame:
    """A row for each study with an image of this view: PA before AP, of several the first by name."""
    names = ["dicom_id", "subject_id", "study_id", "ViewPosition", "ViewCodeSequence_CodeMeaning"]
    table = read_csv(jpg / "mimic-cxr-2.0.0-metadata.csv.gz", names)
    # a blank view is looked up in the code, and never guessed
    codes = table["ViewCodeSequence_CodeMeaning"].str.lower().map(VIEW_OF_CODE)
    table["view"] = table["ViewPosition"].replace("", None).fillna(codes)
    table["rank"] = table["view"].map({name: rank for rank, name in enumerate(VIEWS[view])})
    table = table.dropna(subset="rank").sort_values(["study_id", "rank", "dicom_id"]).drop_duplicates("study_id")

    splits = read_csv(jpg / "mimic-cxr-2.0.0-split.csv.gz", ["dicom_id", "split"])
    labels = read_csv(jpg / "mimic-cxr-2.0.0-chexpert.csv.gz", ["study_id", *CHEXPERT]).drop_duplicates("study_id")
    table = table.merge(splits, on="dicom_id").merge(labels, on="study_id", how="left")
    table["split"] = table["split"].replace("validate", "val")
    subject, study = table["subject_id"], table["study_id"]
    table["image"] = "files/p" + subject.str[:2] + "/p" + subject + "/s" + study + "/" + table["dicom_id"] + ".jpg"
    table["patient"], table["sex"], table["age"] = subject, None, None
    if patients:
        known = read_csv(Path(patients), ["subject_id", "gender", "anchor_age"]).set_index("subject_id")
        table["sex"], table["age"] = subject.map(known["gender"]), subject.map(known["anchor_age"])
    return table


def find_release(root: Path, grade: str) -> Path:
    """The folder with metadata/ and qa/ or qa.zip: root itself, or its export of this grade."""
    for folder in (root, root / "exports" / f"{grade[0]}_frontal"):
        if (folder / "qa").is_dir() or (folder / "qa.zip").is_file():
            return folder
    raise InputError(f"{root}: holds neither qa/ nor qa.zip; check the path of MIMIC-Ext-CXR-QBA")


def read_grades(release: Path, grade: str) -> Callable[[str], list[str]]:
    """A function from a study to the ids of its questions of this grade or better: the parquet file alone has them."""
    path = release / "metadata" / "question_metadata.parquet"
    good = GRADES[GRADES.index(grade) :]
    studies, ids = [], []
    try:
        file = pq.ParquetFile(path, read_dictionary=[RATING])
        for batch in file.iter_batches(columns=["study_id", "question_id", RATING]):
            rating = batch[RATING].dictionary.to_pylist()
            kept = [rank for rank, name in enumerate(rating) if name and re.sub(r"^\d+_", "", name) in good]
            batch = batch.filter(pc.is_in(batch[RATING].indices, pa.array(kept, pa.int32())))
            studies.append(pc.cast(pc.utf8_slice_codeunits(batch["study_id"], 1), pa.int64()).to_numpy())
            ids.append(batch["question_id"])
    except (OSError, KeyError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read ({error}); download it again, or --grade all") from None
    study, names = np.concatenate(studies), pa.chunked_array(ids, pa.string())
    if (np.diff(study) < 0).any():
        order = np.argsort(study, kind="stable")
        study, names = study[order], names.take(pa.array(order))

    def of_study(name: str) -> list[str]:
        begin, end = np.searchsorted(study, [int(name), int(name) + 1])
        return names.slice(begin, end - begin).to_pylist()

    return of_study


@functools.cache
def open_zip(path: Path) -> zipfile.ZipFile:
    """qa.zip, whose list of 227,827 members a process reads once."""
    return zipfile.ZipFile(path)


def read_part(job: tuple) -> tuple[pa.Table, Counter]:
    """(rows of some studies' questions, how many are left out and why).

    job: (release, number of the first study, [(subject, study)], their good questions' ids or None for all).
    """
    release, first, studies, good = job
    rows, left_out = [], Counter()
    for number, (subject, study) in enumerate(studies):
        name = f"qa/p{subject[:2]}/p{subject}/s{study}.qa.json"
        try:
            if (release / "qa").is_dir():
                text = (release / name).read_bytes()
            else:
                text = open_zip(release / "qa.zip").read(name)
        except (FileNotFoundError, KeyError):
            left_out["studies without a question file"] += 1
            continue
        except (OSError, zipfile.BadZipFile) as error:
            raise InputError(f"{release}: {name} cannot be read ({error}); download it again") from None
        try:
            for question in json.loads(text)["questions"]:
                kind = question["question_type"]
                head = head_of(kind)
                if good and question["question_id"] not in good[number]:
                    left_out["questions below the grade, or unrated"] += 1
                elif head is None:
                    left_out[f"questions {kind}: a type without a head"] += 1
                else:
                    target, reason = target_of(question, head)
                    if target is None:
                        left_out[f"questions {kind}: {reason}"] += 1
                    else:
                        rows.append((first + number, HEAD_NUMBER[head], target, kind, question["question"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{release / name}: not a question file ({error!r}); download it again") from None
    columns = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return pa.table(arrays, SCHEMA), left_out


def read_releases(args: argparse.Namespace, pool: ProcessPoolExecutor) -> tuple[pd.DataFrame, pa.Table, Counter]:
    """(studies, questions, what is left out) of both releases. A partial download gives what is there."""
    jpg, left_out = Path(args.source[0]), Counter()
    release = find_release(Path(args.source[1]), args.grade)
    studies = read_studies(jpg, args.view, args.patients)
    there = np.fromiter(((jpg / name).is_file() for name in studies["image"]), bool, len(studies))
    left_out["studies without an image file"] = int((~there).sum())
    studies = studies[there].sort_values("split", key=lambda name: name.map(SPLITS.index), kind="stable")
    studies = studies.reset_index(drop=True)
    if studies.empty:
        raise InputError(f"{jpg}: none of its {len(there)} images is there; check the path of MIMIC-CXR-JPG")
    good = None if args.grade == "all" else read_grades(release, args.grade)

    def jobs() -> Iterator[tuple]:
        names = list(zip(studies["subject_id"], studies["study_id"], strict=True))
        for first in range(0, len(names), STUDIES):
            part = names[first : first + STUDIES]
            yield release, first, part, good and [set(good(study)) for _, study in part]

    parts = []
    for table, reasons in tqdm(pool.map(read_part, jobs()), "questions", -(-len(studies) // STUDIES)):
        parts.append(table)
        left_out += reasons
    return studies, pa.concat_tables(parts), left_out


# --- a table of one's own ---------------------------------------------------------------------------------------------


def labels_of(source: str, row: dict[str, str]) -> dict[str, float]:
    """CheXpert's labels in a row: the column `labels` names those that are present, or each has a column of its own."""
    known = {}
    present = [name.strip().lower() for name in row.get("labels", "").split(";") if name.strip()]
    for name in present:
        if name not in CLASS_OF["category"] and name != "none":
            raise InputError(f"{source}: label {name!r} is none of {', '.join(CHEXPERT)}")
    for label in CHEXPERT:
        cell = row.get(label.lower(), "")
        if present:
            known[label] = float(label.lower() in present)
        elif cell:
            if cell not in ("0", "1", "-1", "0.0", "1.0", "-1.0"):
                raise InputError(f"{source}: {label} {cell!r} is none of 1, 0, -1 and blank")
            known[label] = float(cell)
    return known


def read_own(args: argparse.Namespace) -> tuple[pd.DataFrame, pa.Table, Counter]:
    """(studies, questions, {}) of a table with image, question, answer and, if wanted, head, labels, patient, split.

    Without questions, each label that is known becomes one. Raises InputError with the row.
    """
    path = Path(args.source[0])
    rows = tables.read_table(path)
    image, columns = tables.find_column(rows, "image"), rows[0][1]
    studies, asked = {}, []
    for source, row in rows:
        name = row[image]
        if not (path.parent / name).is_file():
            raise InputError(f"{source}: no such image ({path.parent / name}); paths start from the table's folder")
        patient = row.get("patient") or name
        split = tables.SPLITS.get(row.get("split", "").lower()) or tables.split_of(patient, args.seed, args.split)
        if row.get("split") and row["split"].lower() not in tables.SPLITS:
            raise InputError(f"{source}: split {row['split']!r} is none of train, val and test")
        study = studies.setdefault(name, {"image": name, "patient": patient, "split": split, "source": source})
        if (study["patient"], study["split"]) != (patient, split):
            raise InputError(f"{source}: this image has another patient or split in {study['source']}")
        known = labels_of(source, row)
        study |= known | {name: row[name] for name in ("view", "sex", "age") if row.get(name)}
        if "question" not in columns:
            asked += [
                (name, "binary", value, f"is_{x}", f"Is there {x.lower()}?") for x, value in known.items() if value >= 0
            ]
            continue
        answer, head = row.get("answer", "").lower(), row.get("head") or None
        found = [one for one in ([head] if head else HEADS) if answer in CLASS_OF.get(one, ())]
        if not found:
            classes = ", ".join(HEADS[head]) if head in HEADS else f"the answers of {', '.join(HEADS)}"
            raise InputError(f"{source}: answer {answer!r} is none of {classes}")
        asked.append((name, found[0], CLASS_OF[found[0]][answer], row.get("type") or found[0], row["question"]))
    tables.check_one_split((study["patient"], study["split"], study["source"]) for study in studies.values())

    frame = pd.DataFrame(sorted(studies.values(), key=lambda study: SPLITS.index(study["split"])))
    number = {name: place for place, name in enumerate(frame["image"])}
    asked.sort(key=lambda row: number[row[0]])
    columns = [[number[name] for name, *_ in asked], [HEAD_NUMBER[head] for _, head, *_ in asked]]
    columns += [[int(row[2]) for row in asked], [row[3] for row in asked], [row[4] for row in asked]]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return (
        frame.reindex(columns=list({"view": 0, "sex": 0, "age": 0} | dict.fromkeys(frame))),
        pa.table(arrays, SCHEMA),
        Counter(),
    )


# --- writing ----------------------------------------------------------------------------------------------------------


def decode(path: str | Path, side: int) -> np.ndarray:
    """(side, side) uint8: the whole image in proportion, black beside it. Raises OSError and ValueError."""
    image = images.open_upright(path, side=2 * side).convert("L")
    return np.asarray(images.square(image, side, Image.Resampling.BICUBIC))


def decode_part(job: tuple) -> list[tuple[int, str]]:
    """Decode some studies' images into their places of the file; [(study, what is wrong)].

    job: (file, side, number of the first study, paths).
    """
    file, side, first, paths = job
    target = np.memmap(file, np.uint8, "r+", offset=first * side**2, shape=(len(paths), side, side))
    problems = []
    for place, path in enumerate(paths):
        try:
            target[place] = decode(path, side)
        except (OSError, ValueError) as error:
            problems.append((first + place, f"{path}: not a readable image ({error})"))
    return problems


def prepare(args: argparse.Namespace) -> None:
    """Write OUT. Raises InputError for a folder that exists, an unusable source, and a patient in two splits."""
    out = Path(args.out)
    if out.exists():
        raise InputError(f"{out}: exists already; choose another folder or delete it")
    if len(args.source) > 2:
        raise InputError("give CXR_JPG QA_RELEASE OUT, or TABLE OUT")
    partial_out = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial_out, ignore_errors=True)
    partial_out.mkdir(parents=True)
    own = len(args.source) == 1
    # what a process makes is not garbage, and to look for some takes half of the time
    with ProcessPoolExecutor(args.workers, initializer=gc.disable) as pool:
        studies, rows, left_out = read_own(args) if own else read_releases(args, pool)
        root = Path(args.source[0]).parent if own else Path(args.source[0])
        paths = [str(root / name) for name in studies["image"]]
        side = args.image_size
        file = partial_out / f"images_{side}.u8"
        with open(file, "wb") as empty:
            empty.truncate(len(paths) * side**2)
        jobs = [(file, side, first, paths[first : first + IMAGES]) for first in range(0, len(paths), IMAGES)]
        problems = [problem for found in tqdm(pool.map(decode_part, jobs), "images", len(jobs)) for problem in found]

    # a study whose image is damaged has no questions
    if problems:
        if own:
            raise InputError(f"{problems[0][1]} ({len(problems)} such images); replace it")
        left_out["studies with a damaged image"] = len(problems)
        print("\n".join(f"warning: {reason}" for _, reason in problems[:5]), flush=True)
        damaged = pa.array([study for study, _ in problems], pa.int32())
        rows = rows.filter(pc.invert(pc.is_in(rows["study"], damaged)))
    in_two = studies.groupby("patient")["split"].nunique()
    if (in_two > 1).any():
        raise InputError(f"patient {in_two.idxmax()!r} is in two splits; keep each patient in one")
    counts = dict(zip(SPLITS, np.diff(bounds_of(studies, rows["study"].to_numpy())).tolist(), strict=True))
    if not len(rows):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common(3))
        raise InputError(f"{args.source[-1]}: no question is left ({reasons}); check the sources and --grade")

    studies = studies.reindex(columns=["image", "patient", "split", "view", "sex", "age", *CHEXPERT])
    studies[["age", *CHEXPERT]] = studies[["age", *CHEXPERT]].apply(pd.to_numeric, errors="coerce").astype("float32")
    studies.to_parquet(partial_out / "studies.parquet")
    rows = rows.unify_dictionaries().combine_chunks()
    with pa.OSFile(str(partial_out / "questions.arrow"), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(rows)
    facts = {"format": FORMAT, "source": args.source, "grade": None if own else args.grade, "view": args.view}
    facts |= {"image_size": side, "questions": counts, "studies": len(studies), "left_out": dict(left_out)}
    (partial_out / "prepared.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    os.replace(partial_out, out)

    for reason, count in left_out.most_common(20):
        if count:
            print(f"left out: {count:>9,} {reason}")
    print(f"{out}: {len(studies):,} studies; questions: " + ", ".join(f"{n:,} {name}" for name, n in counts.items()))


# --- reading ----------------------------------------------------------------------------------------------------------


def bounds_of(studies: pd.DataFrame, study: np.ndarray) -> list[int]:
    """[0, ...]: at which of the sorted questions, whose studies these are, each split ends."""
    last = [int((studies["split"].map(SPLITS.index) <= place).sum()) for place in range(len(SPLITS))]
    return [0, *np.searchsorted(study, last).tolist()]


@dataclass
class Prepared:
    """A prepared folder: what is large is mapped, and shared by all processes of a machine.

    images: (studies, side, side) uint8. labels: (studies, 14) of 1, 0, -1, NaN. study, head, target: (questions,).
    type, question: (questions,), numbers of the texts in `types` and `texts`. bounds: where each split ends.
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
    facts: dict

    def __reduce__(self):
        # a loading process that is not forked maps the files itself
        return open_prepared, (self.folder,)


def open_prepared(folder: Path) -> Prepared:
    """Open what prepare() wrote. Raises InputError for a folder that it did not."""
    try:
        facts = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            raise ValueError(f"written by another version of this program, format {facts['format']}")
        side = facts["image_size"]
        images_file = np.memmap(folder / f"images_{side}.u8", np.uint8, "r").reshape(-1, side, side)
        studies = pd.read_parquet(folder / "studies.parquet")
        rows = pa.ipc.open_file(pa.memory_map(str(folder / "questions.arrow"))).read_all()
    except FileNotFoundError:
        command = "python -m tools.prepare_data mimic_cxr CXR_JPG QA_RELEASE OUT"
        raise InputError(f"{folder}: no prepared data; make it once: {command}, or make demo TASK=mimic_cxr") from None
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(f"{folder}: damaged ({error}); prepare the data again") from None
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
        bounds=bounds_of(studies, plain["study"]),
        facts=facts,
    )
