"""The index of a user's own table, in the files that index_build.py makes of the releases: all after it is alike."""

import hashlib
import json
import time
from functools import partial
from pathlib import Path

import pyarrow as pa

from old.cli_utils import InputError
from old.distributed_utils import agree_on_errors, broadcast_object, print_main, world
from old.table_utils import SPLITS, Shares
from tasks.mimic_cxr.answers import CHEXPERT, HEAD_NUMBER, HEADS
from tasks.mimic_cxr.index import Index, open_folder
from tasks.mimic_cxr.index_build import NO_IMAGE, ROW, Part, read_part, write_part
from tasks.mimic_cxr.index_files import not_written, write_facts, write_file, write_table
from tasks.mimic_cxr.own_table import OwnTable, check_image, describe_splits, read_own_table
from tasks.mimic_cxr.releases import SPLITS as RELEASE_SPLITS

# Of the index files: another number is another folder.
VERSION = 1


def open_own_index(
    parent: Path,
    path: Path,
    categories: list[str] | None,
    shares: Shares,
    seed: int,
    max_missing: int,
) -> Index:
    """All ranks: the index of a table in a folder of `parent`, built where the table or an image is another.

    categories: of the category head, None to find them (see own_answers.py). Raises InputError on all ranks.
    """
    own = None
    folder = parent
    rank, _ = world()
    with agree_on_errors():
        if rank == 0:
            own = read_own_table(path, categories, shares, seed)
            folder = own_folder(parent, path, own)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise not_written(parent, error) from None
    folder = broadcast_object(folder)
    build = partial(build_own, folder, path, own)
    return open_folder(folder, path.parent, build, max_missing)


def own_folder(parent: Path, path: Path, own: OwnTable) -> Path:
    """A folder whose name tells this table and its images (by size and modification time) from others."""
    content = hashlib.sha256(path.read_bytes())
    facts = [VERSION, str(path.resolve()), content.hexdigest(), own.rule, own.routing.categories]
    for image in own.images:
        try:
            status = (path.parent / image.name).stat()
            facts.append([status.st_size, status.st_mtime_ns])
        except OSError:
            facts.append(None)
    name = hashlib.sha256(json.dumps(facts).encode())
    return parent / name.hexdigest()[:16]


def build_own(folder: Path, path: Path, own: OwnTable | None) -> None:
    """All ranks, of which rank 0 has the table: write its index into `folder`, index.json last."""
    print_main(f"building the index of {path} in {folder}")
    with agree_on_errors():
        if own is not None:
            write_own(folder, path, own)


def write_own(folder: Path, path: Path, own: OwnTable) -> None:
    """Rank 0: the files of a table's index. Raises InputError where no image is there."""
    begun = time.time()
    studies = studies_of(own)
    files = {"studies.arrow": write_table(folder / "studies.arrow", studies)}
    part = fill_part(path, own)
    write_part(folder, 0, part)
    facts = read_part(folder, 0)
    if not any(facts["rows"].values()):
        raise InputError(f"{path}: none of its images is there, such as {part.missing[0]}; they lie in its folder")

    # what index.json says of the releases, and what is the table's own
    facts["rows"] = [facts["rows"]]
    facts["files"] = files | facts["files"]
    facts["missing"].sort()
    lines = [f"{name}\n" for name in facts["missing"]]
    text = "".join(lines)
    write_file(folder / "missing.txt", text.encode())

    # what is printed at each start
    facts |= {
        "ratings": {},
        "studies": {},
        "table": str(path),
        "splits": describe_splits(own),
        "rule": own.rule,
        "notes": own.notes,
        "categories": own.routing.categories,
        "seconds": round(time.time() - begun, 1),
    }
    write_facts(folder / "index.json", facts)


def studies_of(own: OwnTable) -> pa.Table:
    """The table of studies: each image is one, numbered as in the table, as are its patients."""
    patients = [image.patient for image in own.images]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(patients), start=1)}
    names = [image.name for image in own.images]
    splits = [SPLITS.index(image.split) for image in own.images]

    # the columns of the releases' index, and two more
    study_ids = range(1, len(names) + 1)
    subject_ids = [numbers[name] for name in patients]
    columns = {
        "study_id": pa.array(study_ids, pa.int64()),
        "subject_id": pa.array(subject_ids, pa.int64()),
        "split": pa.array(splits, pa.int8()),
        "dicom_id": names,
        "image": names,
        "patient": patients,
    }
    for place, label in enumerate(CHEXPERT):
        # one label of each image
        values = [image.labels[place] for image in own.images]
        columns[label] = pa.array(values, pa.int8())
    return pa.table(columns)


def fill_part(path: Path, own: OwnTable) -> Part:
    """The questions whose images are there, as rows of an index. Raises InputError for a file that is no image."""
    part = Part()
    for split in RELEASE_SPLITS:
        part.columns[split] = {name: [] for name in ROW.names}
    sizes = {head: len(names) for head, names in HEADS.items()}
    sizes["category"] = len(own.routing.categories)
    there: dict[int, bool] = {}
    routed = zip(own.places, own.asked, own.types, own.routing.heads, own.routing.targets, strict=True)
    for number, (place, row, kind, head, target) in enumerate(routed, start=1):
        image = own.images[place]

        # an image is looked at once
        if place not in there:
            file = path.parent / image.name
            there[place] = check_image(file, row.source)
            part.missing += [] if there[place] else [image.name]
        if not there[place]:
            part.left_out[NO_IMAGE] += 1
            continue

        # a question is named by its place in the table
        values = (place, HEAD_NUMBER[head], target, kind, f"row {number}", row.question)
        split = RELEASE_SPLITS[SPLITS.index(image.split)]

        # a row of its split
        columns = part.columns[split].values()
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        if image.split == "train":
            part.classes.setdefault(kind, [0] * sizes[head])[target] += 1
    return part
