"""Read annotation CSVs, check the images and masks that they list, and compute the position of a mask.

Does not import torch.
"""

import contextlib
import hashlib
import json
import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.ndimage import maximum_filter, minimum_filter
from tqdm import tqdm

from tasks.prs_med.wordings import name_structure
from utils.cli import InputError, is_first_process, refuse
from utils.images import IMAGE_ENDINGS, open_upright
from utils.tables import SPLITS, find_column, in_two_splits, patient_in, read_table

NEEDED = ("image_path", "split", "question", "answer")
# PositionData.decode_mask() stores an index into this tuple
POSITIONS = (None, "top left", "top right", "bottom left", "bottom right", "center")
PLACE = r"\b(?:(top|upper|bottom|lower)[\s-]+(left|right)|center|centre|middle)\b"


class Row(NamedTuple):
    """One row of an annotation CSV: a question about an image.

    source: the CSV file and the row number, as `file:row`. digest: hash of the image's pixels, set by check_data().
    names: name and synonyms of the structure; () if unknown.
    """

    modality: str
    image: str
    mask: str
    split: str
    question: str
    answer: str
    source: str
    patient: str = ""
    digest: str = ""
    names: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """Key of the image: its digest or, if the digest is unknown, its path."""
        return self.digest or self.image


# --- reading the CSVs -------------------------------------------------------------------------------------------------


def read_rows(
    root: Path,
    names: list[str] | None = None,
    patient_column: str | None = None,
    patient_pattern: str | None = None,
    skip_bad_rows: bool = False,
) -> list[Row]:
    """Read the rows of root/annotations/*.csv or, if there are none, of root/annotations/qa/*.csv.

    names: CSV files to read, without .csv. patient_pattern: regular expression that finds the patient id in the image's
    file name. Raises InputError for a missing CSV or column and, unless skip_bad_rows is True, for unusable rows.
    """
    folder = root / "annotations"
    files = {file.stem: file for file in sorted(folder.glob("*.csv")) or sorted(folder.glob("qa/*.csv"))}
    if not files:
        raise InputError(f"{folder}: holds no CSV; check --data_root, or see tools.sample_data and tools.prepare_data")

    rows, problems, listings = [], [], {}
    for name in names or files:
        if name not in files:
            raise InputError(f"{folder}: no {name}.csv, there are {', '.join(files)}; check --annotations")
        table = read_table(files[name])
        needed = [find_column(table, column) for column in (*NEEDED, patient_column) if column]
        for source, record in table:
            try:
                empty = [column for column in needed if not record[column]]
                if empty:
                    raise ValueError(f"empty {empty[0]!r}; complete the row")
                split = SPLITS.get(record["split"].lower())
                if split is None:
                    raise ValueError(f"split {record['split']!r} is not train, val or test; correct it")
                image, mask = find_pair(root, record["image_path"], record.get("image_name", ""), listings)
                patient = record.get((patient_column or "patient").lower(), "")
                if patient_pattern:
                    patient = patient_in(patient_pattern, Path(image).name)
            except ValueError as error:
                problems.append(f"{source}: {error}")
            else:
                question, answer = record["question"], record["answer"]
                named = record.get("structure", "") or name_structure(question, answer)
                names = tuple(filter(None, re.split(r"\s*[|]\s*", named.strip())))
                rows.append(Row(name, image, mask, split, question, answer, source, patient, names=names))

    if not skip_bad_rows:
        refuse(problems, "rows cannot be used; correct them or pass --skip_bad_rows")
    elif problems and is_first_process():
        print(f"--skip_bad_rows: {len(problems)} rows dropped, {len(rows)} left; the first: {problems[0]}", flush=True)
    return rows


def find_pair(root: Path, path: str, image_name: str, listings: dict[Path, dict[str, str]]) -> tuple[str, str]:
    """Return the paths (image, mask) of the files that a CSV row refers to.

    path: the row's image_path, which is the path of the MASK. listings: cache of folder contents, filled here. Raises
    ValueError if a file is missing.
    """
    parts = PurePosixPath(path.replace("\\", "/")).parts
    if ".." in parts or len(parts) < 2 or not re.search("_(masks|images)$", parts[-2]):
        raise ValueError(f"image_path {path!r} is not <modality>/<split>_masks/<name> in the data root; correct it")
    above, split, name = PurePosixPath(*parts[:-2]), parts[-2].rpartition("_")[0], parts[-1]
    stem = Path(name).stem.removesuffix("_Segmentation")

    def find(folder: Path, *names: str) -> str | None:
        if folder not in listings:
            files = os.listdir(folder) if folder.is_dir() else []
            images = [file for file in sorted(files, reverse=True) if file.lower().endswith(IMAGE_ENDINGS)]
            listings[folder] = {Path(file).stem.removesuffix("_Segmentation"): file for file in images}
            listings[folder] |= {file: file for file in files}
        found = [listings[folder][name] for name in names if name in listings[folder]]
        return str(folder / found[0]) if found else None

    for base in (root / above, root / "images_and_masks" / above, root / above.name, root / "data" / above.name):
        mask = find(base / f"{split}_masks", name, stem)
        if mask:
            image = find(base / f"{split}_images", name, stem, image_name)
            if image:
                return image, mask
            raise ValueError(f"no image {stem}.png, .jpg, ... in {base}/{split}_images; add it or remove the row")
    raise ValueError(f"mask {path} does not exist in {root}; correct the row or --data_root")


# --- masks and positions ----------------------------------------------------------------------------------------------


def foreground(image: Image.Image) -> np.ndarray:
    """Convert an 8-bit mask to bool (H, W).

    The threshold is 127, because JPEG compression blurs edges; it is 0 if no value is above 127.
    """
    values = np.asarray(image)
    values = values if values.ndim == 2 else values.max(axis=2)
    return values > (127 if values.max() > 127 else 0)


def open_mask(path: str | Path) -> np.ndarray:
    return foreground(open_upright(path))


def is_label_map(values: np.ndarray) -> bool:
    """Return whether a mask (H, W) contains several different labels above 0.

    Intermediate values at soft edges are ignored.
    """
    levels = np.unique(values)
    if len(levels) <= 2 and levels[0] == 0:
        return False
    # more than 16 values suggest JPEG compression, so allow for its noise
    least, noise = (levels[-1] / 8, levels[-1] / 64) if len(levels) > 16 else (0, 0)
    areas = values[(maximum_filter(values, 3) - minimum_filter(values, 3) <= noise) & (values > least)]
    return len(areas) > 0 and bool(areas.max() > areas.min() + least)


def is_misfit(image: tuple[int, int], mask: tuple[int, int]) -> bool:
    return abs(image[0] * mask[1] / (image[1] * mask[0]) - 1) > 0.02


def position_of(mask: np.ndarray) -> str | None:
    """Return the position of the foreground in a bool mask (H, W), such as "top left"; None for an empty mask.

    The position is "center" if the foreground's bounding box contains the image centre, and otherwise the quadrant that
    contains the centre of the bounding box.
    """
    ys, xs = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(ys):
        return None
    height, width = mask.shape
    top, bottom, left, right = ys[0], ys[-1] + 1, xs[0], xs[-1] + 1
    if top < height / 2 < bottom and left < width / 2 < right:
        return "center"
    return f"{'top' if top + bottom < height else 'bottom'} {'left' if left + right < width else 'right'}"


def position_in(sentence: str) -> str | None:
    """Return the last position named in a sentence, such as "bottom left", or None."""
    named = re.findall(PLACE, sentence.lower())
    if not named:
        return None
    vertical, side = named[-1]
    return f"{'top' if vertical in ('top', 'upper') else 'bottom'} {side}" if side else "center"


def is_right(found: str | None, true: str | None) -> float | None:
    """Return 1.0 if the two positions are equal, otherwise 0.0; None if `true` is None."""
    return true and float(found == true)


def name_position(sentence: str, before: str | None, after: str | None) -> str:
    """Replace the last position named in a sentence with `after` if that position is `before`."""
    named = [*re.finditer(PLACE, sentence, re.IGNORECASE)]
    if not named or not after or before == after or position_in(sentence) != before:
        return sentence
    start, end = named[-1].span()
    return sentence[:start] + after + sentence[end:]


# --- data check -------------------------------------------------------------------------------------------------------


class FileCheck(NamedTuple):
    """Result of check_data() for one image or mask file.

    bytes, mtime_ns: size and modification time, which show whether the file has changed. digest: hash of the image's
    pixels or of the mask's foreground. pixels: number of foreground pixels of a mask; 0 for an image.
    """

    bytes: int
    mtime_ns: int
    width: int
    height: int
    digest: str
    pixels: int
    is_label_map: bool


def check_data(rows: list[Row], image_size: int | None, cache: Path) -> tuple[list[Row], list[str]]:
    """Decode each image and mask once; return the rows with their digests, and the warnings.

    image_size: side of the model's input in pixels, for the warning about small masks. cache: JSON file of earlier
    results; only files that have changed are decoded again. Raises one InputError for all unreadable files.
    """
    try:
        known = {key: FileCheck(*values) for key, values in json.loads(cache.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        known = {}

    def check(key: str) -> FileCheck | str:
        kind, _, path = key.partition(" ")
        try:
            stat = os.stat(path)
            stamp = (stat.st_size, stat.st_mtime_ns)
            if key in known and known[key][:2] == stamp:
                return known[key]
            image = open_upright(path)
            content = foreground(image) if kind == "mask" else np.asarray(image.convert("RGB"))
            digest = hashlib.sha256(repr(image.size).encode() + content.tobytes()).hexdigest()
            if kind == "image":
                return FileCheck(*stamp, *image.size, digest, 0, False)
            # the labels of a coloured label map usually stay distinct in greyscale
            label_map = is_label_map(np.asarray(image.convert("L")))
            return FileCheck(*stamp, *image.size, digest, int(content.sum()), label_map)
        except Exception as error:
            return f"{sources[key]}: {path} cannot be opened as an image ({error}); replace it"

    sources: dict[str, str] = {}
    for row in rows:
        sources.setdefault(f"image {row.image}", row.source)
        sources.setdefault(f"mask {row.mask}", row.source)
    with ThreadPoolExecutor() as pool:
        results = pool.map(check, sources)
        results = tqdm(results, "checking data", len(sources), delay=3, mininterval=2, disable=not is_first_process())
        checks = dict(zip(sources, results, strict=True))
    problems = [result for result in checks.values() if isinstance(result, str)]
    known |= {key: result for key, result in checks.items() if isinstance(result, FileCheck)}
    partial = cache.with_name(f"{cache.name}.{os.getpid()}")
    # a read-only data folder cannot store the cache; the next run then checks all files again
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(known))
        os.replace(partial, cache)
    refuse(problems, "files cannot be opened; replace them")

    found: dict[str, list[str]] = defaultdict(list)
    structures: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        image, mask = checks[f"image {row.image}"], checks[f"mask {row.mask}"]
        if is_misfit((image.width, image.height), (mask.width, mask.height)):
            found["image and mask differ in aspect ratio; crop or pad the mask as its image"] += [row.source]
        if mask.is_label_map:
            found["a label map or grey image as mask, taken for one structure; write 0 and 255"] += [row.source]
        if mask.pixels == 0:
            found["the mask is empty; right where nothing is to be found, else replace it"] += [row.source]
            continue
        side = max(mask.width, mask.height)
        if mask.pixels * ((image_size or side) / side) ** 2 < 25:
            found["the mask has fewer than 25 pixels at the model's size; raise --image_size"] += [row.source]
        # "kidney" and "left kidney" may mean the same structure
        named = set(" ".join(row.names[:1]).casefold().split())
        first = structures.setdefault((image.digest, mask.digest), named)
        if not (first <= named or named <= first):
            found["one mask for two structures of an image; give each its own mask"] += [row.source]

    rows = [row._replace(digest=checks[f"image {row.image}"].digest) for row in rows]
    images = [(row.digest, row.split, row.source) for row in rows]
    patients = [((row.modality, row.patient), row.split, row.source) for row in rows if row.patient]
    found["the same image is in another split, maybe under another name; keep one of them"] = in_two_splits(images)
    found["the same patient is in another split; keep each patient in one split"] = in_two_splits(patients)
    warnings = [f"{len(named)} rows ({', '.join(named[:3])}): {kind}" for kind, named in found.items() if named]
    return rows, warnings
