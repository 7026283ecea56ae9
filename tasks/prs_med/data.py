"""Guide 0: annotation CSVs, images and masks on the disk, and how they become a dataset."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from old.blind_utils import choose_rows
from old.cli_utils import InputError, counted
from old.distributed_utils import create_distributed_dataloader, print_main
from old.image_order_utils import ImageGroups
from old.image_utils import open_image, open_upright
from old.memory_utils import BatchSize
from old.phase_utils import doing
from tasks.prs_med.augmentation import Extent, extent_of
from tasks.prs_med.metrics import position_of
from tasks.prs_med.reader import Reader

SPLITS = ("train", "val", "test")
NEEDED = ("image_path", "split", "question", "answer")


class Finding(NamedTuple):
    """Something odd about a row, by its index; name: see findings.py; how: what it is like."""

    index: int
    name: str
    how: str = ""


class Row(NamedTuple):
    """One question: `image` and `mask` are existing files, `source` is `file:row` of the CSV.

    digest: of the image's content, empty where that was not read. patient: as Patients finds it, else empty. position:
    the column of that name, which only the data check reads. findings: what the data check noticed.
    """

    modality: str
    image: str
    mask: str
    split: str
    question: str
    answer: str
    source: str
    digest: str = ""
    patient: str = ""
    position: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def identity(self) -> str:
        """What rows of one image share, also where copies of it have other names; without a digest, its path."""
        return self.digest or self.image


class Patients(NamedTuple):
    """Where a row's patient stands: a column of the CSV, or a pattern found in the image's file name; or nowhere."""

    column: str | None = None
    pattern: str | None = None

    def find(self, record: dict, image: str, source: str) -> str:
        """The patient of a line of a CSV: the pattern's first group, or all that it matches. Raises InputError."""
        if self.column:
            patient = (record.get(self.column) or "").strip()
            if not patient:
                raise InputError(f"{source}: empty {self.column!r}; complete the row or correct --patient_column")
            return patient
        if self.pattern:
            name = Path(image).name
            match = re.search(self.pattern, name)
            patient = match[match.re.groups and 1] if match else ""
            if not patient:
                raise InputError(f"{source}: --patient_pattern finds nothing in {name}; correct the pattern")
            return patient
        return ""


NO_PATIENTS = Patients()


def case_of(row: Row) -> str:
    """What rows that are not independent share: their patient where that is known, else their image."""
    return row.patient or row.identity


# --- annotations ------------------------------------------------------------------------------------------------------


@doing("reading the annotations")
def read_annotations(
    root: Path, names: list[str] | None, skip_bad_rows: bool, patients: Patients = NO_PATIENTS
) -> list[Row]:
    """All rows of the annotation CSVs, or of those with these names, in file order.

    Raises InputError naming file and row.
    """
    folder = root / "annotations"
    # the newer release has its questions one level deeper, beside those of another kind
    files = sorted(folder.glob("*.csv")) or sorted(folder.glob("qa/*.csv"))
    if not files:
        raise InputError(f"{folder}: holds no CSV file; check --data_root")
    present = [file.stem for file in files]
    wanted = {name.removesuffix(".csv") for name in names or present}
    missing = sorted(wanted.difference(present))
    if missing:
        raise InputError(f"{folder}: no {missing[0]}.csv, there are {', '.join(present)}; check --annotations")

    rows = []
    for file in files:
        if file.stem in wanted:
            rows += read_csv(file, root, skip_bad_rows, patients)
    dropped = rows.count(None)
    if dropped:
        print_main(f"{counted(dropped, 'row')} with a missing field dropped")
    return [row for row in rows if row is not None]


def read_csv(file: Path, root: Path, skip_bad_rows: bool, patients: Patients) -> Iterator[Row | None]:
    """The rows of one annotation CSV, None for one to be dropped. Raises InputError."""
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines, strict=True)
            columns = reader.fieldnames or ()
            lacking = [name for name in NEEDED if name not in columns]
            if lacking:
                raise InputError(f"{file}:1: no column {lacking[0]!r}; the header must hold {', '.join(NEEDED)}")
            if patients.column and patients.column not in columns:
                there = ", ".join(columns)
                raise InputError(f"{file}:1: no column {patients.column!r} but {there}; correct --patient_column")
            for record in reader:
                source = f"{file}:{reader.line_num}"
                row = parse_record(record, file.stem, source, root, skip_bad_rows)
                yield row and row._replace(patient=patients.find(record, row.image, source))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}: not a readable UTF-8 CSV ({error}); repair the file") from None


def parse_record(record: dict, modality: str, source: str, root: Path, skip_bad_rows: bool) -> Row | None:
    """A line of a CSV, None where a needed field is empty and such rows are skipped. Raises InputError."""
    empty = [name for name in NEEDED if not (record[name] or "").strip()]
    if empty:
        if skip_bad_rows:
            return None
        raise InputError(f"{source}: empty {empty[0]!r}; complete the row or pass --skip_bad_rows")
    if None in record:
        raise InputError(f"{source}: more fields than the header has columns; quote texts with commas")
    split = record["split"].strip().lower()
    if split not in SPLITS:
        raise InputError(f"{source}: split {split!r} is not train, val or test; correct the row")

    image, mask = find_pair(root, record["image_path"], source, record.get("image_name") or "")
    return Row(
        modality=modality,
        image=image,
        mask=mask,
        split=split,
        question=record["question"].strip(),
        answer=record["answer"].strip(),
        source=source,
        position=(record.get("position") or "").strip(),
    )


def find_pair(root: Path, path: str, source: str, image_name: str = "") -> tuple[str, str]:
    """(image, mask) files of a CSV's image_path, which is the path of the mask. Raises InputError.

    The path may hold backslashes, and ISIC's names of masks differ from those of their images. image_name: of an image
    that has several masks, and so another name than they.
    """
    slashed = path.strip().replace("\\", "/")
    parts = [part for part in slashed.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or slashed.startswith("/") or ":" in parts[0]:
        raise InputError(f"{source}: image_path {path!r} leaves the data root; use a path relative to it")
    if len(parts) < 2 or not re.search(r"_(masks|images)$", parts[-2]):
        raise InputError(f"{source}: image_path {path!r} is not <modality>/<split>_masks/<name>; correct the row")

    # the names that the files of the pair may have
    *folders, mask_folder, name = parts
    mask_folder = re.sub(r"_images$", "_masks", mask_folder)
    image_folder = mask_folder.replace("_masks", "_images")
    stem = Path(name).stem.removesuffix("_Segmentation")
    mask_names = [name, f"{stem}_Segmentation.png", f"{stem}.png", f"{stem}.jpg"]
    image_names = [name, f"{stem}.jpg", f"{stem}.png", f"{stem}.jpeg", f"{stem}.JPG"]
    image_names = [candidate for candidate in image_names if "_Segmentation" not in candidate]
    if image_name and not re.search(r"[/\\]", image_name):
        image_names.append(image_name)

    # the folder as it is written, as a fork and the newer release have it one level deeper, or without the levels
    # above the modality
    written = "/".join(folders)
    modality = "/".join(folders[-1:])
    for above in (written, f"images_and_masks/{written}", f"data/{written}", modality, f"data/{modality}"):
        mask = first_file(root / above / mask_folder, mask_names)
        if mask:
            image = first_file(root / above / image_folder, image_names)
            if image:
                return image, mask
            images = root / above / image_folder
            raise InputError(f"{source}: no picture {stem}.png or .jpg in {images}; add it or remove the row")
    raise InputError(f"{source}: mask {'/'.join(parts)} does not exist under {root}; correct the row or --data_root")


def first_file(folder: Path, names: list[str]) -> str | None:
    """The first of these files that a folder holds."""
    for name in names:
        if (folder / name).is_file():
            return str(folder / name)
    return None


def swap_questions(rows: list[Row]) -> tuple[list[Row], int]:
    """Give each row the question of the next row of the same image; also counts the rows whose question changed."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.identity, []).append(index)

    swapped = list(rows)
    changed = 0
    for group in groups.values():
        following = group[1:] + group[:1]
        for index, other in zip(group, following, strict=True):
            question = rows[other].question
            changed += question != rows[index].question
            swapped[index] = rows[index]._replace(question=question)
    return swapped, changed


# --- images and masks -------------------------------------------------------------------------------------------------


def mask_values(mask: Image.Image) -> np.ndarray:
    """(H, W) uint8 values of a mask with 1 or 3 channels."""
    values = np.asarray(mask)
    return values if values.ndim == 2 else values.max(axis=2)


def foreground(values: np.ndarray) -> np.ndarray:
    """(H, W) bool: foreground > 0; in 0..255 masks, whose edges JPEG may have smeared, > 127."""
    return values > (127 if values.max() > 127 else 0)


def open_mask(path: str) -> np.ndarray:
    """(H, W) bool mask of a file with 1 or 3 channels."""
    mask, _ = open_upright(path)
    return foreground(mask_values(mask))


def misfit(mask: tuple[int, int], image: tuple[int, int]) -> str:
    """Why a mask of one (width, height) cannot belong to an image of another; empty when it can."""
    mask_width, mask_height = mask
    image_width, image_height = image
    ratio = (mask_width * image_height) / (mask_height * image_width)
    if abs(ratio - 1) <= 0.02:
        return ""
    swapped = " (width and height swapped)" if mask == image[::-1] else ""
    sizes = f"mask of {mask_width} x {mask_height} pixels does not fit its image of {image_width} x {image_height}"
    return f"{sizes}{swapped}; replace the mask or remove the row"


# --- the dataset ------------------------------------------------------------------------------------------------------


class PositionData(Dataset):
    """Rows as uint8 images at the two encoders' sizes, bool mask, token ids and true position.

    keep: what was decoded stays in memory. of_rows: how many rows they were chosen from. augmented: a row also tells
    where all masks of its image lie.
    """

    def __init__(self, rows: list[Row], reader: Reader, keep: bool, augmented: bool = False):
        self.rows = rows
        self.of_rows = len(rows)
        self.reader = reader
        self.keep = keep
        self.augmented = augmented
        self.kept: dict[str, tuple] = {}
        self.extents: dict[str, Extent] = {}

        # the rows of each image; the first one's index is the image's number
        self.rows_of: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            self.rows_of.setdefault(row.identity, []).append(index)

    def __len__(self) -> int:
        return len(self.rows)

    def image_of(self) -> np.ndarray:
        """int64 (N,): a number for the image of each row, in the order in which they are first met."""
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(row.identity, len(numbers)) for row in self.rows])

    def _decode(self, key: str, path: str, source: str, decode) -> tuple:
        """What a file decodes to, or what another one with the same key did."""
        try:
            value = self.kept.get(key) or decode(path)
        except MemoryError:
            raise
        except Exception as error:
            # the file changed after the check, or --skip_data_check
            reason = str(error).replace(path, "file")
            line = f"{source}: {path} is not a readable image ({reason}); replace it and resume"
            raise InputError(line) from None
        self.kept[key] = value
        return value

    def _image(self, path: str) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
        image = open_image(path)
        sam, vlm = self.reader.pixels(image)
        return sam, vlm, image.size

    def _mask(self, path: str) -> tuple[torch.Tensor, str | None, tuple[int, int]]:
        native = open_mask(path)
        height, width = native.shape
        side = self.reader.image_size
        small = Image.fromarray(native).resize((side, side), Image.Resampling.NEAREST)
        return torch.from_numpy(np.array(small)), position_of(native), (width, height)

    def _pair(self, row: Row) -> dict:
        sam, vlm, image_size = self._decode(row.identity, row.image, row.source, self._image)
        mask, position, mask_size = self._decode(row.mask, row.mask, row.source, self._mask)
        problem = misfit(mask_size, image_size)
        if problem:
            raise InputError(f"{row.source}: {row.mask}: {problem}")
        extents = self._extents(row) if self.augmented else []
        return {"sam": sam, "vlm": vlm, "mask": mask, "position": position, "extents": extents, "error": ""}

    def _extents(self, row: Row) -> list[Extent]:
        """Where each mask of a row's image lies; each is decoded once for it."""
        extents = {}
        for index in self.rows_of[row.identity]:
            other = self.rows[index]
            if other.mask not in self.extents:
                mask, position, _ = self._decode(other.mask, other.mask, other.source, self._mask)
                self.extents[other.mask] = extent_of(mask.numpy(), position)
            extents[other.mask] = self.extents[other.mask]
        return list(extents.values())

    def __getitem__(self, index: int) -> dict:
        """A row's tensors, see __getitems__."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict]:
        """The rows of a batch, in which each image is decoded once: its rows hold the same tensors.

        A pair that cannot be used is blank and its `error` says why. The error is told to all ranks at the step's
        exchange, and they end together.
        """
        items = [self._row(index) for index in indices]
        if not self.keep:
            self.kept.clear()
        return items

    def _row(self, index: int) -> dict:
        row = self.rows[index]
        prompt, answer = self.reader.tokens(row.question, row.answer)
        try:
            pair = self._pair(row)
        except InputError as error:
            pair = self.reader.blank(str(error))
        key = self.rows_of[row.identity][0]
        return {**pair, "index": index, "key": key, "prompt": prompt, "answer": answer}

    def augmentation_facts(self) -> dict:
        """What a resumed run must share. The number of images: which are copies, a check tells that may be skipped."""
        if self.augmented:
            return {"augmentation": True, "augmented_images": len(self.rows_of)}
        return {"augmentation": False}


def make_datasets(rows: list[Row], reader: Reader, cache_gb: float, augmentation: bool) -> dict[str, PositionData]:
    """The dataset of each split; what they decode stays in memory where all of it fits into cache_gb GiB.

    augmentation: of the training split.
    """
    mask_bytes = reader.image_size**2
    image_bytes = 3 * (mask_bytes + reader.vlm_size**2)
    images = {row.identity for row in rows}
    masks = {row.mask for row in rows}
    needed = len(images) * image_bytes + len(masks) * mask_bytes
    keep = needed <= cache_gb * 2**30
    datasets = {}
    for split in SPLITS:
        of_split = [row for row in rows if row.split == split]
        augmented = augmentation and split == "train"
        datasets[split] = PositionData(of_split, reader, keep, augmented)
    return datasets


def some_rows(data: PositionData, indices: list[int]) -> PositionData:
    """The data set of some rows of another one, with what that keeps in memory."""
    some = PositionData([data.rows[index] for index in indices], data.reader, data.keep)
    some.kept = data.kept
    some.of_rows = len(data)
    return some


def limit_rows(data: PositionData, most: int, seed: int) -> PositionData:
    """--eval_max_samples: up to `most` rows for an evaluation, spread evenly over the cases; 0: all."""
    cases = [case_of(row) for row in data.rows]
    chosen = choose_rows(cases, most, seed)
    return some_rows(data, chosen)


def training_loader(
    data: PositionData, batch: BatchSize, seed: int, num_workers: int, questions_per_image: int
) -> DataLoader:
    """This rank's share of each global batch of a shuffled epoch; its last step is uneven.

    questions_per_image: up to so many rows of an image follow each other.
    """
    loader = create_distributed_dataloader(
        data,
        batch.size,
        seed=seed,
        num_workers=0 if data.keep else num_workers,
        accumulation=batch.accumulation,
        effective_batch_size=batch.total,
        drop_last=False,
        collate_fn=data.reader.collate,
    )
    if questions_per_image > 1:
        loader.batch_sampler.groups = ImageGroups(data.image_of(), questions_per_image)
    return loader


def evaluation_loader(data: PositionData, batch_size: int, num_workers: int) -> DataLoader:
    """This rank's share of all rows, in order, none repeated or left out."""
    return create_distributed_dataloader(
        data,
        batch_size,
        train=False,
        num_workers=0 if data.keep else num_workers,
        collate_fn=data.reader.collate,
    )


def evaluation_loaders(
    sets: dict[str, PositionData],
    batch_size: int,
    most: int,
    seed: int,
    num_workers: int,
) -> dict[str, DataLoader]:
    """The loaders of the validation and the test where there are rows, of up to `most` of them; 0: of all."""
    loaders = {}
    for split in ("val", "test"):
        data = limit_rows(sets[split], most, seed)
        if len(data):
            loaders[split] = evaluation_loader(data, batch_size, num_workers)
    return loaders
