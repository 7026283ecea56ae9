"""What is looked at before the first step: every image and mask decodes, fits its partner and is of one split."""

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from cli_utils import InputError
from distributed_utils import Ranks, agree_on_errors, gather_objects
from tasks.prs_med.data import NO_PATIENTS, Patients, Row, foreground, misfit, open_upright, read_annotations
from tasks.prs_med.report import print_data_check

# mask values below this, beside values above 127, can be what JPEG made of 0
NOISE = 32


class FileFacts(NamedTuple):
    """What one look at a file tells.

    digest: of an image's content, empty for a mask. foreground, lost: of a mask, its share and its lost_levels.
    """

    size: tuple[int, int]
    turned: bool
    digest: str
    foreground: float
    lost: list[int]


def read_rows(
    root: Path,
    names: list[str] | None,
    skip_bad_rows: bool,
    needed_split: str,
    check: bool,
    ranks: Ranks,
    patients: Patients = NO_PATIENTS,
    max_contradictions: float = 1.0,
) -> list[Row]:
    """All ranks: the annotations' rows; with `check`, each with the digest of its image's content.

    Raises InputError for a needed split without rows, an unreadable image, or one image in two splits.
    """
    rows: list[Row] = []
    with agree_on_errors():
        rows = read_annotations(root, names, skip_bad_rows, patients)
        if not any(row.split == needed_split for row in rows):
            problem = f"no rows in split {needed_split!r}"
            raise InputError(f"{root}: {problem}; correct the CSVs or choose another --eval_split")
    if check:
        files = inspect_files(rows, ranks)
        findings = check_pairs(rows, files)
        rows = [row._replace(digest=files[row.image].digest) for row in rows]
        if ranks.is_main:
            print_data_check(len(rows), findings)
    check_splits(rows)
    return rows


def inspect_files(rows: list[Row], ranks: Ranks) -> dict[str, FileFacts]:
    """{path: facts} of every image and mask, each decoded once (the ranks share the work).

    Raises InputError on all ranks for an unreadable file.
    """
    sources = {}
    for row in reversed(rows):
        sources[row.image] = row.source
        sources[row.mask] = row.source
    images = {row.image for row in rows}

    def inspect(path: str) -> tuple[str, FileFacts]:
        try:
            return path, inspect_file(path, path in images)
        except Exception as error:
            reason = str(error).replace(path, "file")
            raise InputError(f"{sources[path]}: {path} is not a readable image ({reason}); replace it") from None

    paths = sorted(sources)
    local = paths[ranks.rank :: ranks.world_size]
    local_facts: dict[str, FileFacts] = {}
    quiet = not (ranks.is_main and sys.stderr.isatty())
    with agree_on_errors(), ThreadPoolExecutor(max_workers=8) as pool:
        inspected = pool.map(inspect, local)
        local_facts = dict(tqdm(inspected, "checking images", len(local), disable=quiet))

    facts = {}
    for part in gather_objects(local_facts):
        facts |= part
    return facts


def inspect_file(path: str, is_image: bool) -> FileFacts:
    """Decode an image or a mask."""
    image, turned = open_upright(path)
    if is_image:
        content = Path(path).read_bytes()
        digest = hashlib.blake2b(content, digest_size=16)
        return FileFacts(image.size, turned, digest.hexdigest(), foreground=0.0, lost=[])
    values = np.asarray(image).max(axis=2)
    share = float(foreground(values).mean())
    lost = lost_levels(values)
    return FileFacts(image.size, turned, "", share, lost)


def lost_levels(values: np.ndarray) -> list[int]:
    """Values 1..127 of solid areas in a 0..255 mask, which `foreground` takes for background: a label map has them.

    JPEG, resizing and smoothing leave such values at edges and as noise near 0, but no solid areas of more than a few
    pixels. A pixel counts as solid when its 3 x 3 neighbourhood has one value. A solid area is a label when it is not
    near 0 and not small beside the foreground, or when the mask has few values, 0 among them, as a lossless file has.
    """
    above = values > 127
    count = int(above.sum())
    between = (values > 0) & ~above
    if not count or not between.any():
        return []

    # the pixels whose neighbours all have their value
    height, width = values.shape
    inner = values[1:-1, 1:-1]
    solid = np.ones(inner.shape, bool)
    for y in range(3):
        for x in range(3):
            neighbours = values[y : y + height - 2, x : x + width - 2]
            solid &= neighbours == inner
    pixels = np.bincount(inner[solid], minlength=256)

    few_values = len(np.unique(values)) <= 16
    few_values = few_values and pixels[0] > 0
    smallest = 1 if few_values else 0.05 * count
    lowest = 1 if few_values else NOISE
    return [level for level in range(lowest, 128) if pixels[level] >= smallest]


def check_pairs(rows: list[Row], files: dict[str, FileFacts]) -> dict[str, dict]:
    """{finding: number of rows and the first} for what may be meant; raises InputError for what cannot be right."""
    for row in rows:
        mask = files[row.mask]
        problem = misfit(mask.size, files[row.image].size)
        if any(level >= NOISE for level in mask.lost) and not problem:
            levels = ", ".join(map(str, mask.lost[:5]))
            problem = f"a label map: its value {levels} would count as background beside values above 127"
            problem += "; write foreground as 255, the rest as 0"
        if problem:
            raise InputError(f"{row.source}: {row.mask}: {problem}")

    findings: dict[str, dict] = {}
    for row in rows:
        for name in odd_facts(files[row.mask], files[row.image]):
            finding = findings.setdefault(name, {"rows": 0, "first": row.source})
            finding["rows"] += 1
    return findings


def odd_facts(mask: FileFacts, image: FileFacts) -> list[str]:
    """What is unusual about a pair, but may be meant."""
    facts = {
        "turned as EXIF says": image.turned or mask.turned,
        "mask empty": mask.foreground == 0,
        "mask all foreground": mask.foreground == 1,
        "mask's width and height swapped": mask.size != image.size and mask.size == image.size[::-1],
        f"mask values below {NOISE} left out": bool(mask.lost),
    }
    return [name for name, holds in facts.items() if holds]


def check_splits(rows: list[Row]) -> None:
    """InputError naming an image, also where it is a copy under another name, or a patient that lies in two splits.

    A patient of two CSVs may be two people: numbers are given anew in each data set.
    """
    seen: dict[str, Row] = {}
    for row in rows:
        first = seen.setdefault(row.identity, row)
        if first.split != row.split:
            splits = f"{row.split!r} and, at {first.source}, in {first.split!r}"
            raise InputError(f"{row.source}: picture {row.image} is in split {splits}; keep its rows in one split")

    patients: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row.modality, row.patient)
        first = patients.setdefault(key, row)
        if row.patient and first.split != row.split:
            splits = f"{row.split!r} and, at {first.source}, in {first.split!r}"
            raise InputError(f"{row.source}: patient {row.patient!r} is in split {splits}; keep a patient in one split")
