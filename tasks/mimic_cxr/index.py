"""An index of MIMIC-CXR's questions: a memory-mapped table with targets, built once and checked at each start.

Every later run maps the Arrow files of the build (index_build.py) into memory. Nothing holds a Python object per
question, so 31 million or 300 million questions take the same memory.

Each part's JSON names the sha256 of the part's Arrow files, index.json that of all of them, and each JSON holds one of
its own. All are checked whenever the index is opened, and what is damaged is built again. Nothing remembers an earlier
check, as a disk that rots keeps size and time of a file. The ranks share the work: the 3 GB of all 31 million questions
took 3.8 s on one core and 2.4 s on two. An index of an earlier version, without checksums, is built again in its place.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from old.checkpoint_utils import RunLock
from old.cli_utils import InputError, counted
from old.distributed_utils import agree_on_errors, broadcast_object, gather_objects, print_main, world
from old.phase_utils import doing
from tasks.mimic_cxr.answers import HEAD_OF_CODE, HEADS
from tasks.mimic_cxr.index_build import ROW, Source, build
from tasks.mimic_cxr.index_files import check_seen, is_intact, map_table, not_written, part_path, read_facts
from tasks.mimic_cxr.index_files import shared_work
from tasks.mimic_cxr.releases import find_release

# Of the index files: another number is another folder.
VERSION = 1
# A page once read stays mapped and counts as this process's memory; so many rows are read between two fresh maps.
ROWS_OF_A_MAP = 512
GIB = 2**30


@dataclass
class Index:
    """An opened index: `facts` is its index.json, `studies` the memory-mapped table of studies."""

    folder: Path
    facts: dict
    studies: pa.RecordBatch

    def questions(self, split: str, copies: int = 1) -> "Questions":
        """The rows of a split; `copies` > 1 repeats them (for measurements at sizes one does not have)."""
        counts = {part: rows[split] for part, rows in enumerate(self.facts["rows"]) if rows[split]}
        return Questions(self.folder, split, list(counts) * copies, list(counts.values()) * copies)


class Questions:
    """All questions of a split, memory-mapped; `take` reads single rows.

    What is mapped is the page cache's, shared by all ranks, but a SLURM limit may count it to each. So the maps are
    dropped now and then, and made anew where needed.
    """

    def __init__(self, folder: Path, split: str, parts: list[int], counts: list[int]):
        self.folder = folder
        self.split = split
        self.parts = parts
        self.ends = np.cumsum(counts, dtype=np.int64)
        self.maps: dict[int, pa.RecordBatch] = {}
        self.taken = 0

        # a damaged file is found now, not in the middle of an epoch
        for part in set(parts):
            map_table(self.path(part))

    def path(self, part: int) -> Path:
        """The Arrow file of a part."""
        return part_path(self.folder, part, self.split)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def studies(self) -> Iterator[np.ndarray]:
        """int32: the study of each question, part after part, which stay mapped as long as they are held."""
        for part in self.parts:
            yield map_table(self.path(part)).column(ROW.get_field_index("study")).to_numpy()

    def take(self, row: int) -> dict:
        """One row as {column: value} (see ROW)."""
        self.taken += 1
        if self.taken % ROWS_OF_A_MAP == 0:
            self.maps.clear()
        place = int(np.searchsorted(self.ends, row, side="right"))
        part = self.parts[place]
        if part not in self.maps:
            self.maps[part] = map_table(self.path(part))

        # the row's place in its part
        begin = int(self.ends[place - 1]) if place else 0
        table = self.maps[part]
        return {name: table.column(i)[row - begin].as_py() for i, name in enumerate(ROW.names)}


def index_folder(parent: Path, source: Source) -> Path:
    """A folder whose name tells these files and settings from others (by path, size and modification time)."""
    files = [source.cxr / f"mimic-cxr-2.0.0-{name}.csv.gz" for name in ("metadata", "split", "chexpert")]
    files += [source.release / "metadata" / "question_metadata.parquet", source.release / "qa.zip"]
    facts = [VERSION, str(source.cxr.resolve()), str(source.release.resolve())]
    facts += [source.grade, source.view, source.limit, HEADS, HEAD_OF_CODE]
    for file in files:
        if file.is_file():
            status = file.stat()
            facts.append([status.st_size, status.st_mtime_ns])
    return parent / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def open_index(
    parent: Path, cxr: Path, qba: Path, grade: str = "B", view: str = "frontal", max_missing: int = 0, limit: int = 0
) -> Index:
    """All ranks: build the index of these settings in a folder of `parent`, or go on building it, or open it.

    limit: see Source. What is damaged is built again. Raises InputError on all ranks for anything unreadable, and when
    more than max_missing images are not there.
    """
    folder = parent
    source = None
    with agree_on_errors():
        source = Source(cxr, find_release(qba, grade), grade, view, limit)
        try:
            folder = index_folder(parent, source)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_written(parent, error) from None
    return open_folder(folder, cxr, partial(build, folder, source), max_missing)


def open_folder(folder: Path, cxr: Path, build_index: Callable[[], None], max_missing: int) -> Index:
    """All ranks: the index in a folder, built by build_index where it is not complete. cxr: where its images lie.

    Raises as open_index does.
    """
    complete_index(folder, cxr, build_index)

    # what is damaged is built again, once
    damaged = find_damaged(folder)
    if damaged:
        with agree_on_errors():
            if world()[0] == 0:
                forget(folder, damaged)
        complete_index(folder, cxr, build_index)
        damaged = find_damaged(folder)
    if damaged:
        reason = "damaged again after it was written; check the disk, or choose another --index_dir"
        raise InputError(f"{damaged[0]}: {reason}")

    index = None
    with agree_on_errors():
        index = Index(folder, read_index(folder), map_table(folder / "studies.arrow"))
        missing = index.facts["missing"]
        if len(missing) > max_missing:
            count = f"{counted(len(missing), 'picture file')} not found, such as {missing[0]}"
            advice = "download them, or allow so many by --max_missing"
            raise InputError(f"{cxr}: {count} (all in {folder / 'missing.txt'}); {advice}")
    return index


def complete_index(folder: Path, cxr: Path, build_index: Callable[[], None]) -> None:
    """All ranks: build what is lacking in `folder`, or wait for another run that does."""
    state = "waiting"
    lock = None
    told = False
    with doing("waiting for the index that another run builds"):
        while state == "waiting":
            with agree_on_errors():
                if world()[0] == 0:
                    state, lock = begin_build(folder, cxr)
            state = broadcast_object(state)
            if state == "waiting" and not told:
                print_main(f"another run builds the index in {folder}; waiting for it")
                told = True
    if state == "ours":
        with doing("building the index", has_bar=True):
            build_index()
    del lock


def begin_build(folder: Path, cxr: Path) -> tuple[str, RunLock | None]:
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


def is_complete(folder: Path, cxr: Path) -> bool:
    """Whether index.json is there; parts of which missing images have come since are marked to be built again."""
    facts = read_facts(folder / "index.json")
    if facts is None:
        return False
    if not has_any(cxr, facts["missing"]):
        return True
    for file in folder.glob("part-*.json"):
        part = read_facts(file)
        if part is None or has_any(cxr, part["missing"]):
            file.unlink()
    (folder / "index.json").unlink()
    return False


def has_any(folder: Path, names: list[str]) -> bool:
    """Whether one of these files is there."""
    return any((folder / name).is_file() for name in names)


def read_index(folder: Path) -> dict:
    """The facts of index.json. Raises InputError where they are not to be read, as on another node."""
    path = folder / "index.json"
    check_seen(path)
    facts = read_facts(path)
    if facts is None:
        raise InputError(f"{path}: damaged since it was checked; start again, or check the disk")
    return facts


@doing("checking the index")
def find_damaged(folder: Path) -> list[Path]:
    """All ranks: the Arrow files that have not the checksum of index.json, the same on every rank."""
    files = {}
    with agree_on_errors():
        files = read_index(folder)["files"]
    files = broadcast_object(files)
    size = size_on_disk(folder)
    if size > GIB:
        print_main(f"checking the checksums of the index ({size / GIB:.1f} GiB)")

    # each rank looks at some
    names = sorted(files)
    turn = broadcast_object(f"{folder.name}-{time.time()}-checksums")
    local = [names[i] for i in shared_work(turn, len(names)) if not is_intact(folder / names[i], files[names[i]])]
    damaged = sorted(name for found in gather_objects(local) for name in found)
    return [folder / name for name in damaged]


def forget(folder: Path, damaged: list[Path]) -> None:
    """Rank 0: what holds damaged files no longer counts as finished, and is built again."""
    for path in damaged:
        reason = "damaged (its sha256 is not the one written down)" if path.exists() else "missing"
        print_main(f"warning: {path}: {reason}; it is built again", file=sys.stderr)
    try:
        for path in damaged:
            if part := re.match(r"part-\d+", path.name):
                (folder / f"{part[0]}.json").unlink(missing_ok=True)
        (folder / "index.json").unlink(missing_ok=True)
    except OSError as error:
        raise not_written(folder, error) from None


def size_on_disk(folder: Path) -> int:
    """Bytes of the index files."""
    return sum(os.path.getsize(path) for path in folder.glob("*.arrow"))
