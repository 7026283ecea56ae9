"""The releases are read once, all ranks sharing the work; what comes out are the Arrow files of an index.

`studies.arrow` has a row for each study (image, split, CheXpert labels), `part-<n>-<split>.arrow` a row for each
question. A part is finished when its `part-<n>.json` exists; a build that was killed goes on with the parts that lack
one.
"""

import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from old.cli_utils import InputError
from old.distributed_utils import agree_on_errors, broadcast_object, gather_objects, print_main, world
from tasks.mimic_cxr.answers import HEAD_NUMBER, HEADS, head_of, target_of
from tasks.mimic_cxr.index_files import check_seen, is_finished, map_table, part_path, read_facts, shared_work
from tasks.mimic_cxr.index_files import stop_others, write_facts, write_file, write_table, write_tables
from tasks.mimic_cxr.releases import GRADES, SPLITS, QuestionFiles, grade_rank, has_image, image_name, read_studies

# A row for each question.
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
# A row for each question of the wanted grade.
GRADED = pa.schema([("study", pa.int64()), ("id", pa.string())])
RATING = "question.quality.rating"
GRADE_COLUMNS = ["study_id", "question_id", RATING]
STUDY_COLUMNS = ["study_id", "subject_id", "split", "dicom_id"]
NOT_ASKED = "question type without a head"
NO_IMAGE = "picture file missing"
# Rows of the parquet file that are in memory at once.
BATCH_ROWS = 1 << 20


class Source(NamedTuple):
    """What an index is made of: where both releases lie, and what is chosen of them.

    limit: so many studies of each split only, evenly spaced (for a trial); 0: all.
    """

    cxr: Path
    release: Path
    grade: str
    view: str
    limit: int = 0


@dataclass
class Part:
    """What some studies come to: the columns of each split, and what part-<n>.json says of them."""

    columns: dict[str, dict[str, list]] = field(default_factory=dict)
    left_out: Counter = field(default_factory=Counter)
    classes: dict[str, list[int]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def build(folder: Path, source: Source) -> None:
    """All ranks: read both releases into `folder`; index.json is written last."""
    begun = time.time()
    turn = broadcast_object(f"{folder.name}-{begun}")
    if (folder / "index.json").exists():
        reason = "damaged, or of an earlier version without checksums"
        print_main(f"{folder}/index.json: {reason}; it is built again")
    counts: dict[str, int] = {}
    files: dict[str, str] = {}
    with agree_on_errors():
        if world()[0] == 0:
            table, counts = read_studies(source.cxr, source.view)
            table = thin_out(table, source.limit) if source.limit else table
            files["studies.arrow"] = write_table(folder / "studies.arrow", table)
    studies = None
    with agree_on_errors():
        check_seen(folder / "studies.arrow")
        studies = map_table(folder / "studies.arrow")

    # the studies of a part, whatever the number of ranks
    size = min(1024, max(8, -(-len(studies) // 32)))
    parts = -(-len(studies) // size)
    print_main(f"building the index of questions in {folder} ({len(studies)} studies, {parts} parts)")
    ratings: Counter = Counter()
    graded = None
    with stop_others(f"{turn}-grades"):
        if source.grade != "all":
            ratings = sort_grades(folder, source, f"{turn}-grades")
    if source.grade != "all":
        graded = sorted(folder.glob("grades-*.arrow"))
    with stop_others(f"{turn}-parts"):
        build_parts(folder, source, studies, graded, size, f"{turn}-parts")

    ratings = sum(gather_objects(ratings), Counter())
    with agree_on_errors():
        if world()[0] == 0:
            facts = join_parts(folder, parts, source)
            facts |= {"studies": counts, "ratings": dict(ratings)}
            facts["files"] = files | facts["files"]
            facts["seconds"] = round(time.time() - begun, 1)
            write_facts(folder / "index.json", facts)
            for file in graded or ():
                file.unlink()


def thin_out(
    studies: pa.Table,
    limit: int,
) -> pa.Table:
    """Up to `limit` studies of each split, evenly spaced."""
    split_of = studies["split"].to_numpy()
    chosen = [np.zeros(0, int)]
    for split in range(len(SPLITS)):
        rows = np.flatnonzero(split_of == split)
        if len(rows):
            places = np.linspace(0, len(rows) - 1, limit).astype(int)
            chosen.append(rows[np.unique(places)])
    return studies.take(pa.array(np.sort(np.concatenate(chosen))))


def build_parts(
    folder: Path, source: Source, studies: pa.RecordBatch, graded: list[Path] | None, size: int, turn: str
) -> None:
    """This rank's share of the parts, each of `size` studies. graded: see accepted_ids; None: all questions."""
    from tqdm import tqdm

    question_files = QuestionFiles(source.release)
    parts = -(-len(studies) // size)
    quiet = not (world()[0] == 0 and sys.stderr.isatty())
    bar = tqdm(total=parts, desc="indexing questions", unit="part", disable=quiet)

    # parsed JSON has no cycles, and looking for some takes more than half of the time
    gc.disable()
    try:
        for part in shared_work(turn, parts):
            if not is_finished(folder, part):
                end = min((part + 1) * size, len(studies))
                rows = range(part * size, end)
                build_part(folder, part, rows, studies, question_files, graded, source.cxr)
            bar.update(part + 1 - bar.n)
    finally:
        gc.enable()
    bar.close()


# --- the questions of the wanted grade --------------------------------------------------------------------------------


def sort_grades(
    folder: Path,
    source: Source,
    turn: str,
) -> Counter:
    """Write grades-<row group>.arrow: the questions of the wanted grade or better, sorted by study in each batch.

    Returns how often each rating occurs in the row groups that this rank read.
    """
    path = source.release / "metadata" / "question_metadata.parquet"
    least = GRADES.index(source.grade)
    ratings: Counter = Counter()
    try:
        file = pq.ParquetFile(path, memory_map=True)
        for name in GRADE_COLUMNS:
            if name not in file.schema_arrow.names:
                raise InputError(f"{path}: no column {name!r}; it must hold {', '.join(GRADE_COLUMNS)}")
        for group in shared_work(turn, file.num_row_groups):
            batches = file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=GRADE_COLUMNS)
            tables = [good_questions(batch, least, ratings) for batch in batches]
            write_tables(folder / f"grades-{group:05d}.arrow", tables, GRADED)
    except (OSError, pa.ArrowException, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0][:150]
        raise InputError(f"{path}: not a readable table of questions ({reason}); download it again") from None
    return ratings


def good_questions(
    batch: pa.RecordBatch,
    least: int,
    ratings: Counter,
) -> pa.Table:
    """The questions of a batch whose grade_rank is at least this, sorted by study; all ratings are counted."""
    rating = pc.dictionary_encode(batch[RATING].cast(pa.string()))
    values = [*rating.dictionary.to_pylist(), None]
    codes = rating.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)
    ranks = [grade_rank(value) for value in values]
    rank_of_code = np.array(ranks)
    counts = np.bincount(codes, minlength=len(values))
    for rank, count in zip(rank_of_code, counts, strict=True):
        if count:
            ratings[GRADES[rank] if rank >= 0 else "unrated"] += int(count)

    # s50414267 is study 50414267
    names = pc.dictionary_encode(batch["study_id"].cast(pa.string()))
    numbers = [int(name[1:]) for name in names.dictionary.to_pylist()]
    study_of_code = np.array(numbers)
    study = study_of_code[names.indices.to_numpy()]
    order = np.argsort(study, kind="stable")
    is_good = rank_of_code[codes] >= least
    order = order[is_good[order]]
    names = batch["question_id"].take(pa.array(order))
    table = pa.table({"study": study[order], "id": names})
    return table.cast(GRADED)


def accepted_ids(
    graded: list[Path],
    low: int,
    high: int,
) -> dict[int, set[str]]:
    """{study_id: question ids of the wanted grade} of the studies low <= study_id <= high.

    graded: the files of sort_grades.
    """
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


# --- a part -----------------------------------------------------------------------------------------------------------


def build_part(
    folder: Path,
    number: int,
    rows: range,
    studies: pa.RecordBatch,
    files: QuestionFiles,
    graded: list[Path] | None,
    cxr: Path,
) -> None:
    """Write part-<n>-<split>.arrow for the studies in `rows` and, last, part-<n>.json with the counts."""
    wanted = studies.select(STUDY_COLUMNS).slice(rows.start, len(rows)).to_pylist()
    accepted = None
    if graded is not None:
        accepted = accepted_ids(graded, wanted[0]["study_id"], wanted[-1]["study_id"])

    # the questions of one study after another
    part = Part()
    for split in SPLITS:
        part.columns[split] = {name: [] for name in ROW.names}
    for row, study in zip(rows, wanted, strict=True):
        questions = files.questions(study["subject_id"], study["study_id"])
        if questions is None:
            part.left_out["study without a question file (studies)"] += 1
            continue

        names = None if accepted is None else accepted.get(study["study_id"], ())
        try:
            add_questions(part, row, study, questions, names, cxr)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            place = files.place(study["subject_id"], study["study_id"])
            reason = f"no key {error}" if isinstance(error, KeyError) else error
            raise InputError(f"{place}: question not in the release's format ({reason}); download it again") from None
    write_part(folder, number, part)


def add_questions(
    part: Part, row: int, study: dict, questions: list[dict], accepted: Iterable[str] | None, cxr: Path
) -> None:
    """Add a study's questions to a part, or count why one is left out. accepted: ids of the wanted grade, or None."""
    split = SPLITS[study["split"]]
    columns = part.columns[split].values()
    image = None
    for question in questions:
        name = question["question_id"]
        kind = question["question_type"]
        text = question["question"]
        is_question = isinstance(text, str) and text.strip()
        if not is_question or not isinstance(name, str):
            raise TypeError("question and question_id must be texts")
        if accepted is not None and name not in accepted:
            part.left_out["below the grade, or unrated"] += 1
            continue

        # what can be answered by name
        head = head_of(kind)
        if head is None:
            part.left_out[f"{kind}: {NOT_ASKED}"] += 1
            continue
        target, reason = target_of(question, head)
        if target is None:
            part.left_out[f"{kind}: {reason}"] += 1
            continue

        # an image is looked for once a question needs it
        if image is None:
            file = image_name(study["subject_id"], study["study_id"], study["dicom_id"])
            image = has_image(cxr / file)
            part.missing += [] if image else [file]
        if not image:
            part.left_out[NO_IMAGE] += 1
            continue
        values = (row, HEAD_NUMBER[head], target, kind, name, text)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        if split == "train":
            part.classes.setdefault(kind, [0] * len(HEADS[head]))[target] += 1


def write_part(folder: Path, number: int, part: Part) -> None:
    """Write the files of a part, the JSON last."""
    files = {}
    rows = {}
    for split, columns in part.columns.items():
        if columns["study"]:
            types = pc.dictionary_encode(pa.array(columns["type"], pa.string()))
            types = types.cast(ROW.field("type").type)
            path = part_path(folder, number, split)
            files[path.name] = write_table(path, pa.table(columns | {"type": types}, schema=ROW))
        rows[split] = len(columns["study"])

    # the part is finished when this is there
    facts = {
        "rows": rows,
        "left_out": dict(part.left_out),
        "classes": part.classes,
        "missing": part.missing,
        "files": files,
    }
    write_facts(part_path(folder, number), facts)


def read_part(folder: Path, number: int) -> dict:
    """The facts of a part that some rank has just finished. Raises InputError where they are not to be read."""
    path = part_path(folder, number)
    check_seen(path)
    facts = read_facts(path)
    if facts is None:
        raise InputError(f"{path}: damaged since it was written; start again, or check the disk")
    return facts


def join_parts(folder: Path, parts: int, source: Source) -> dict:
    """Rank 0: the facts of all parts together; missing.txt is written. Raises InputError where no question is left."""
    facts = {"rows": [], "left_out": Counter(), "classes": {}, "missing": [], "files": {}}
    for number in range(parts):
        part = read_part(folder, number)
        facts["rows"].append(part["rows"])
        facts["left_out"] += Counter(part["left_out"])
        facts["missing"] += part["missing"]
        facts["files"] |= part["files"]
        for kind, counts in part["classes"].items():
            before = facts["classes"].get(kind, [0] * len(counts))
            pairs = zip(before, counts, strict=True)
            facts["classes"][kind] = [sum(pair) for pair in pairs]

    # a table of no questions is no index
    kept = [sum(rows.values()) for rows in facts["rows"]]
    if not any(kept):
        raise nothing_left(facts, source)
    facts["left_out"] = dict(facts["left_out"])
    facts["missing"].sort()
    lines = [f"{name}\n" for name in facts["missing"]]
    write_file(folder / "missing.txt", "".join(lines).encode())
    return facts


def nothing_left(facts: dict, source: Source) -> InputError:
    """The error of an index without any question."""
    left_out = facts["left_out"]
    if facts["missing"]:
        names = f"{left_out[NO_IMAGE]} lack their pictures, such as {facts['missing'][0]}"
        return InputError(f"{source.cxr}: no question is left, {names}; check --mimic_cxr_path")
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common(3)) or "no studies"
    advice = "choose another --quality_grade or --view"
    return InputError(f"{source.release}: no question is left ({reasons}); {advice}")
