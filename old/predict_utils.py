"""--predict of guides 0 and 1: questions about images, from a file, a folder or a table, answered in batches.

A batch is made of the same questions at any number of processes, and each process takes whole ones: so the files are
the same, too. A call that was killed leaves whole files without predictions.csv; the next one makes all of them anew.
"""

import csv
import io
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from tqdm import tqdm

from old.checkpoint_utils import write_atomically
from old.cli_utils import InputError, counted
from old.distributed_utils import agree_on_errors, broadcast_object, gather_objects, print_main, world
from old.image_utils import DICOM_ENDINGS

# Files of a folder that are taken for images.
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", *DICOM_ENDINGS)
# Seconds between two lines of progress where no bar is drawn.
SECONDS_APART = 20
# Images that cannot be read, named one by one.
MOST_NAMED = 10
PATH_ADVICE = "paths are relative to the CSV's folder"


class Asked(NamedTuple):
    """A question about an image.

    image: as the table names it, or relative to the folder. stem: of the files to be written, another for each
    question. source: file:row of the table, empty without one. others: the further columns of the table.
    """

    image: str
    path: Path
    question: str
    stem: str
    source: str
    others: dict[str, str]


# --- what is asked ----------------------------------------------------------------------------------------------------


def list_questions(predict: str | None, question: str | None) -> list[Asked]:
    """All ranks: what --predict and --question ask, the same on every rank; nothing without --predict.

    Raises InputError for what cannot be there, naming the rows of a table.
    """
    asked: list[Asked] = []
    with agree_on_errors():
        if predict and world()[0] == 0:
            asked = find_questions(Path(predict), question)
    return broadcast_object(asked)


def find_questions(path: Path, question: str | None) -> list[Asked]:
    """The questions about an image, about all images of a folder, or of a CSV. Raises InputError."""
    try:
        if path.is_dir():
            return give_stems(ask_of_folder(path, question))
        if not path.is_file():
            raise InputError(f"{path}: no such file or folder; check --predict")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check --predict") from None
    if path.suffix.lower() == ".csv":
        return give_stems(ask_of_table(path, question))
    return [Asked(str(path), path, question, path.stem, "", {})]


def ask_of_folder(folder: Path, question: str) -> list[Asked]:
    """One question about each image in a folder and in those below it, by name. Raises InputError without one."""
    asked = []
    others = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if hidden or not path.is_file():
            continue
        if path.suffix.lower() in IMAGE_ENDINGS:
            asked.append(Asked(str(name), path, question, path.stem, "", {}))
        else:
            others += 1

    # what was found, and what not
    if not asked:
        raise InputError(f"{folder}: holds no image ({' '.join(IMAGE_ENDINGS)}); check --predict")
    if others:
        images = counted(len(asked), "image")
        print_main(f"{folder}: {images}; {counted(others, 'file')} with other endings left alone")
    return asked


def ask_of_table(file: Path, question: str | None) -> list[Asked]:
    """The rows of a CSV with the columns image and question, images relative to its folder. Raises InputError.

    question: for the rows that have none.
    """
    asked = []
    problems = []
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines, strict=True)
            columns = reader.fieldnames or ()
            check_columns(file, columns, question)
            for record in reader:
                row = f"{file}:{reader.line_num}"
                problem = find_problem(record, question)
                if problem:
                    problems.append(f"{row}: {problem}")
                else:
                    asked.append(ask_of_row(record, file, row, question))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}: not a readable UTF-8 CSV ({error}); repair the file") from None

    # nothing is answered before the table is as it should be
    if problems:
        more = f" (and {counted(len(problems) - 1, 'more row')}, the last {problems[-1]})" if problems[1:] else ""
        raise InputError(f"{problems[0]}{more}; correct the table")
    if not asked:
        raise InputError(f"{file}: holds no rows; check --predict")
    if not any(one.path.is_file() for one in asked):
        raise InputError(f"{asked[0].source}: no file {asked[0].path}, nor those of other rows; {PATH_ADVICE}")
    return asked


def check_columns(file: Path, columns: list[str], question: str | None) -> None:
    """InputError where a table lacks a column, or has one twice."""
    needed = ("image",) if question else ("image", "question")
    lacking = [name for name in needed if name not in columns]
    if lacking:
        other = ", or pass --question" if lacking == ["question"] else ""
        advice = f"the first line must hold image,question{other}"
        raise InputError(f"{file}:1: no column {lacking[0]!r}; {advice}")
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise InputError(f"{file}:1: column {twice[0]!r} is there twice; rename one")


def find_problem(record: dict, question: str | None) -> str:
    """What is wrong with a row of a table; empty where nothing is."""
    if None in record:
        return "more fields than the header has columns (quote texts with commas)"
    if None in record.values():
        return "fewer fields than the header has columns"
    if not record["image"].strip():
        return "empty 'image'"
    if not (record.get("question", "").strip() or question):
        return "empty 'question'"
    return ""


def ask_of_row(record: dict, file: Path, row: str, question: str | None) -> Asked:
    """The question of a row of a table."""
    image = record["image"].strip()
    path = file.parent / image.replace("\\", "/")
    text = record.get("question", "").strip() or question
    others = {name: value for name, value in record.items() if name not in ("image", "question")}
    return Asked(image, path, text, path.stem, row, others)


def give_stems(asked: list[Asked]) -> list[Asked]:
    """Each question gets a stem of its own: the second of one name ends with _2, and so on."""
    taken = set()
    named = []
    for one in asked:
        stem = one.stem
        number = 1
        # some file systems know no capitals
        while stem.lower() in taken:
            number += 1
            stem = f"{one.stem}_{number}"
        taken.add(stem.lower())
        named.append(one._replace(stem=stem))
    return named


# --- answering --------------------------------------------------------------------------------------------------------


class Progress:
    """On rank 0 a bar, where there is a terminal, else a line now and then."""

    def __init__(self, total: int):
        self.total = total
        self.done = 0
        self.begun = time.time()
        self.told = self.begun
        rank, _ = world()
        self.bar = None
        if rank == 0 and total > 1 and sys.stderr.isatty():
            self.bar = tqdm(total=total, desc="answering", unit="question")

    def advance(self, count: int) -> None:
        """All ranks together have answered so many more."""
        count = min(count, self.total - self.done)
        self.done += count
        if self.bar is not None:
            self.bar.update(count)
            return
        now = time.time()
        if now - self.told > SECONDS_APART and self.done < self.total:
            speed = self.done / (now - self.begun)
            print_main(f"{self.done} of {self.total} questions answered, {speed:.1f} a second")
            self.told = now

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def answer_questions(
    asked: list[Asked],
    batch_size: int,
    open_image: Callable[[str], object],
    answer_batch: Callable[[list[Asked], list], list[dict]],
    folder: Path,
) -> list[dict]:
    """All ranks: a record for each question, in order, the same on every rank; the ranks share the batches.

    The folder gets predictions.csv, last of all: while it is not there, files of an earlier call may be among the new.
    open_image: what a path holds; whatever it raises makes the image one that cannot be read. answer_batch: the
    records of questions whose images are these, their files written. The record of an image that cannot be read holds
    its `error` alone. Raises InputError on all ranks, as where no image can be read.
    """
    rank, world_size = world()
    batches = [asked[first : first + batch_size] for first in range(0, len(asked), batch_size)]
    rounds = -(-len(batches) // world_size)
    local = {}
    with ThreadPoolExecutor(max_workers=8) as pool, closing(Progress(len(asked))) as progress:
        for number in range(rounds):
            own = number * world_size + rank
            # the ranks stay together, so that none waits for long and all end at an error of one
            with agree_on_errors():
                if own < len(batches):
                    local[own] = answer_readable(batches[own], open_image, answer_batch, folder, pool)
            progress.advance(batch_size * world_size)

    # in the order of the questions
    merged = {}
    for part in gather_objects(local):
        merged |= part
    records = [record for number in sorted(merged) for record in merged[number]]
    finish(asked, records, folder)
    return records


def answer_readable(
    batch: list[Asked],
    open_image: Callable,
    answer_batch: Callable,
    folder: Path,
    pool: ThreadPoolExecutor,
) -> list[dict]:
    """The records of a batch. Its images are opened by the threads of a pool, each once."""
    paths = list(dict.fromkeys(str(one.path) for one in batch))
    opened = dict(zip(paths, pool.map(lambda path: try_to_open(path, open_image), paths), strict=True))
    readable = [one for one in batch if not isinstance(opened[str(one.path)], Unreadable)]
    images = [opened[str(one.path)] for one in readable]
    answers = iter(())
    if readable:
        remove_table(folder)
        answers = iter(answer_batch(readable, images))

    # what was read and what was not, in the order of the questions
    records = []
    for one in batch:
        image = opened[str(one.path)]
        records.append({"error": image.reason} if isinstance(image, Unreadable) else next(answers))
    return records


class Unreadable(NamedTuple):
    """Stands for an image that cannot be read."""

    reason: str


def try_to_open(path: str, open_image: Callable):
    """What open_image gives, or why it cannot."""
    try:
        return open_image(path)
    except MemoryError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, FileNotFoundError):
            reason = "no such file"
        return Unreadable(reason.replace(path, "file")[:200])


# --- what is left -----------------------------------------------------------------------------------------------------


def remove_table(folder: Path) -> None:
    """Take away predictions.csv of an earlier call. Raises InputError."""
    try:
        (folder / "predictions.csv").unlink(missing_ok=True)
    except OSError as error:
        raise not_written(folder / "predictions.csv", error) from None


def not_written(path: Path, error: OSError) -> InputError:
    """The error of a file that the disk does not take."""
    advice = "free space, or name another run folder and the checkpoint by --resume_from"
    return InputError(f"{path}: not written ({error.strerror or error}); {advice}")


def finish(asked: list[Asked], records: list[dict], folder: Path) -> None:
    """All ranks: predictions.csv in a folder, and what could not be read named. Raises InputError where nothing was."""
    failed = [(one, record["error"]) for one, record in zip(asked, records, strict=True) if "error" in record]
    with agree_on_errors():
        if len(failed) == len(asked):
            one, reason = failed[0]
            others = f"; nor can {counted(len(asked) - 1, 'other')}" if asked[1:] else ""
            raise InputError(f"{one.path}: not a readable image ({reason}){others}; check --predict")
        if world()[0] == 0:
            write_table(asked, records, folder)

    # rank 0 tells
    for one, reason in failed[:MOST_NAMED]:
        row = f"{one.source}: " if one.source else ""
        print_main(f"warning: {row}{one.path}: not a readable image ({reason})", file=sys.stderr)
    if failed[MOST_NAMED:]:
        print_main(f"warning: {len(failed) - MOST_NAMED} more, see the column error", file=sys.stderr)

    # of several, how many were answered
    if asked[1:]:
        unread = f", {len(failed)} not, as their images cannot be read" if failed else ""
        count = len(asked) - len(failed)
        answered = f"{counted(count, 'question')} answered{unread}"
        print_main(f"{answered}; written: {folder / 'predictions.csv'} and the files it names")


def write_table(asked: list[Asked], records: list[dict], folder: Path) -> None:
    """predictions.csv: image, question, what a record holds, error, and the columns of the table that was given.

    Of these a column that has the name of one of ours is now given_<name>. Raises InputError.
    """
    answered = {name: None for record in records for name in record if name != "error"}
    own = ["image", "question", *answered, "error"]
    others = {}
    for name in asked[0].others:
        kept = name
        while kept in own or kept in others.values():
            kept = f"given_{kept}"
        others[name] = kept

    text = io.StringIO()
    writer = csv.DictWriter(text, [*own, *others.values()], lineterminator="\n", restval="")
    writer.writeheader()
    for one, record in zip(asked, records, strict=True):
        given = {others[name]: value for name, value in one.others.items()}
        writer.writerow({"image": one.image, "question": one.question} | record | given)
    write_files(folder, {"predictions.csv": text.getvalue().encode()})


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Each {name: content} in a folder, whole or not at all. Raises InputError."""
    for name, content in files.items():
        try:
            os.makedirs(folder, exist_ok=True)
            write_atomically(folder / name, lambda file, content=content: file.write(content))
        except OSError as error:
            raise not_written(folder / name, error) from None


def png(image: Image.Image) -> bytes:
    """The image as a PNG file."""
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
