"""A survival cohort: its table, folds, clinical columns, and CT volumes as a PyTorch data set.

dataset = MultiGPUSurvivalDataset("data/dataset.csv", use_smart_cache=True)
loader = create_distributed_dataloader(dataset, batch_size=8)
for epoch in range(epochs):
    loader.batch_sampler.set_position(epoch)  # a new order and, with the smart cache, other cases
    for batch in loader: ...                  # image (B, 1, X, Y, Z) float16 in 0..1, time in years, event, error
"""

import contextlib
import hashlib
import math
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy.ndimage import label
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

import distributed_utils as du
from utils import tables
from utils.cli import InputError, first_line, refuse
from utils.volumes import files_of, read_volume, stamp

YEARS = {"days": 1 / 365.25, "months": 1 / 12, "years": 1.0}
# accepted column names, case-insensitive
COLUMNS = {
    "path": ("NIFTI Path", "nifti_path", "image_path", "path"),
    "time": ("time", "survival_time"),
    "event": ("event",),
    "id": ("case_num", "patient_id", "case_id", "case", "subject_id", "patient", "mrn"),
    "mask": (),
}
HELD_OUT = ("test", "holdout", "hold-out", "")
MEASUREMENTS = (
    "image: log mm3 above 130 hu", "image: log parts above 130 hu", "image: mean hu", "image: log mask mm3",
    "image: log mask mm2", "image: log mask diameter mm", "image: mean hu in mask", "image: sd of hu in mask",
)  # fmt: skip

# --- the table --------------------------------------------------------------------------------------------------------


@dataclass
class Cohort:
    """The rows of a table. source: `file:row`. path, mask: "" if there is none. time: years, NaN if unknown.

    table: the text of all columns, by lower-case name.
    """

    source: list[str]
    case: np.ndarray
    path: list[str]
    mask: list[str]
    time: np.ndarray
    event: np.ndarray
    table: pd.DataFrame

    def __len__(self) -> int:
        return len(self.source)

    def column(self, name: str) -> pd.Series:
        """Text of a column, named in lower case. Raises InputError if the table has no such column."""
        return self.table[tables.find_column([(self.source[0], dict(self.table))], name)]


def read_cohort(
    csv_path: str | Path,
    data_dir: str | None = None,
    time_unit: str = "days",
    outcome: bool = True,
    image: bool = True,
    **given: str | None,
) -> Cohort:
    """Read and check all rows of a table. Raises InputError naming the bad rows.

    outcome False: rows may lack time and event. image False: rows need no volume. given: column names that are not in
    COLUMNS, such as path_column="scan" or mask_column="heart".
    """
    rows = tables.read_table(Path(csv_path))

    def find(kind: str, needed: bool) -> str | None:
        name = given.get(f"{kind}_column")
        if name or needed:
            return tables.find_column(rows, *([name] if name else COLUMNS[kind]))
        return next((name.lower() for name in COLUMNS[kind] if name.lower() in rows[0][1]), None)

    names = {"path": find("path", True) if image else None, "id": find("id", False)}
    names |= {"time": find("time", outcome), "event": find("event", outcome), "mask": find("mask", False)}
    root = os.path.abspath(data_dir or Path(csv_path).parent)

    def cell(kind: str, row: dict) -> str:
        text = row[names[kind]] if names[kind] else ""
        return "" if text.lower() in tables.BLANK else text

    found, problems = [], []
    for source, row in rows:
        try:
            path, mask = (_resolve(cell(kind, row), root, source) for kind in ("path", "mask"))
        except InputError as error:
            problems.append(str(error))
            continue
        if image and not path:
            problems.append(f"{source}: no path in column {names['path']!r}; fill it in or remove the row")
        time, event = cell("time", row), cell("event", row)
        years = _number(time) * YEARS[time_unit]
        unknown = not outcome and not (time and event)
        if not unknown and (not 0 <= years <= 120 or _number(event) not in (0, 1)):
            reason = f"time {time!r} {time_unit}, event {event!r}: must be 0 to 120 years, and 1 or 0 (censored)"
            problems.append(f"{source}: {reason}; correct or remove the row, or see --time_unit")
        case = cell("id", row) or path or source
        found.append((source, case, path, mask, math.nan if unknown else years, _number(event) == 1))
    refuse(problems, "rows cannot be used")
    sources, cases, paths, masks, times, events = map(list, zip(*found, strict=True))
    table = pd.DataFrame([row for _, row in rows])
    return Cohort(sources, np.array(cases), paths, masks, np.array(times), np.array(events), table)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _resolve(name: str, root: str, source: str) -> str:
    path = os.path.normpath(os.path.join(root, name.replace("\\", "/"))) if name else ""
    if name and not os.path.isabs(name) and os.path.commonpath([root, path]) != root:
        raise InputError(f"{source}: {name} lies outside {root}; give the folder that holds it with --data_dir")
    return path


def choose_fold(
    cohort: Cohort, fold_column: str, train: str, val: str | None, count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (training rows, validation rows), from a column's labels, or from `count` folds made by assign_folds().

    If no row has the label `train`, every row that is neither in the validation fold nor held out is used for training.
    Raises InputError if a fold has no event before the end of follow-up, or if both folds share a case or volume.
    """
    place = cohort.source[0].rpartition(":")[0]
    if count:
        marks = cohort.table.get(fold_column.lower())
        held = np.zeros(len(cohort), bool) if marks is None else marks.str.lower().isin(HELD_OUT[:-1]).to_numpy()
        number = assign_folds(cohort.case, cohort.event, ~held, count, seed)
        labels, is_train = np.where(held, HELD_OUT[0], number.astype(str)), np.zeros(len(cohort), bool)
    else:
        # spreadsheets write 1 as 1.0
        labels, val = cohort.column(fold_column).str.removesuffix(".0").to_numpy(), val or "val"
        is_train = labels == train
    is_val = labels == val
    if not is_train.any():
        is_train = ~is_val & ~np.isin([label.lower() for label in labels], HELD_OUT)
    for name, side in (("training", is_train), ("validation", is_val)):
        time = cohort.time[side]
        if not (time[cohort.event[side]] < time.max(initial=0)).any():
            reason = f"{side.sum()} rows in the {name} fold, and no event before the last of them"
            raise InputError(f"{place}: {reason}; check --fold_column, --train_fold and --val_fold")
    for kind, keys in (("case", cohort.case), ("volume", np.array(cohort.path))):
        both = set(keys[is_train]) & set(keys[is_val]) - {""}
        if both:
            where = cohort.source[np.flatnonzero(keys == min(both))[0]]
            raise InputError(f"{where}: {kind} {min(both)} is in the training and the validation fold; keep it in one")
    return np.flatnonzero(is_train), np.flatnonzero(is_val)


def assign_folds(case: np.ndarray, event: np.ndarray, used: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Assign folds 1 to count to rows. Rows of a case stay together; events of used rows are spread evenly."""
    names, place = np.unique(case, return_inverse=True)
    has_event, is_used = (np.bincount(place, weights=rows) > 0 for rows in (event & used, used))
    order = np.random.default_rng(seed % 2**63).permutation(len(names))
    # cases with events first, unused cases last
    order = order[np.lexsort((~has_event[order], ~is_used[order]))]
    number = np.empty(len(names), int)
    number[order] = np.arange(len(names)) % count + 1
    return number[place]


# --- clinical columns -------------------------------------------------------------------------------------------------


def fit_columns(cohort: Cohort, names: list[str], rows: np.ndarray) -> list[dict]:
    """Fit each column's encoding to these (training) rows: mean and SD if it holds numbers, otherwise its levels.

    Raises InputError for columns that are blank, mix numbers with text, or have too many levels.
    """
    columns, problems = [], []
    for name in names:
        cells = cohort.column(name).iloc[rows]
        known = cells[~cells.str.lower().isin(tables.BLANK)]
        values = pd.to_numeric(known, errors="coerce")
        if known.empty:
            raise InputError(f"--clinical_columns {name}: blank in all training rows; leave it out")
        wrong = known[~np.isfinite(values)]
        if wrong.empty:
            mean, sd = float(values.mean()), float(values.std(ddof=0))
            columns.append({"name": cells.name, "mean": mean, "sd": sd if sd > 1e-9 * (1 + abs(mean)) else 1.0})
        elif len(wrong) < len(known) / 2:
            problems += [
                f"{cohort.source[row]}: {cells.name} {cell!r} is no number, as most are; correct it or leave it blank"
                for row, cell in wrong.items()
            ]
        else:
            levels = sorted(set(known))
            columns.append({"name": cells.name, "levels": levels})
            if len(levels) > max(5, len(cells) / 10):
                reason = f"{cells.name} has {len(levels)} levels in {len(cells)} rows: an id, or numbers?"
                advice = "correct it, join levels, or leave it out"
                problems.append(f"--clinical_columns: {reason} ({levels[0]!r}); {advice}")
    refuse(problems, "cells or columns cannot be used")
    return columns


def encode_columns(cohort: Cohort, columns: list[dict]) -> np.ndarray:
    """Encode columns with the result of fit_columns(), as (rows, n) float32.

    Raises InputError for text among numbers and for missing columns.
    """
    parts = [np.zeros((len(cohort), 0))]
    for column in columns:
        cells = cohort.column(column["name"])
        blank = cells.str.lower().isin(tables.BLANK).to_numpy()
        if "mean" in column:
            values = pd.to_numeric(cells, errors="coerce").to_numpy(float)
            reason = f"{column['name']} {{!r}} is no number, as it is in training; correct it or leave it blank"
            wrong = np.flatnonzero(~blank & ~np.isfinite(values))
            refuse([f"{cohort.source[row]}: {reason.format(cells.iloc[row])}" for row in wrong], "cells cannot be used")
            parts.append(np.where(blank, 0, (values - column["mean"]) / column["sd"])[:, None])
        else:
            levels = cells.to_numpy()[:, None] == np.array(column["levels"])
            unknown = ~levels.any(1) & ~blank
            if unknown.any():
                known = ", ".join(column["levels"][:9])
                du.print_main(
                    f"{column['name']}: {unknown.sum()} of {len(cohort)} rows have none of the training levels: {known}"
                )
            parts += [levels, unknown[:, None]]
        parts.append(blank[:, None])
    return np.concatenate(parts, axis=1).astype(np.float32)


# --- the volumes ------------------------------------------------------------------------------------------------------


@dataclass
class Volumes:
    """Reader of volumes as (C, X, Y, Z) float16, HU windowed to 0..1, with a disk cache of the resized volumes.

    orientation: None keeps the axes of the file. spacing: voxel size in mm to resample to. mask_mode: "crop" crops to
    the mask's bounding box plus mask_margin mm, unless the mask is empty; "channel" adds the mask as a second channel.
    """

    image_size: Sequence[int] = (256, 256, 64)
    hu_window: Sequence[float] = (-1000, 1000)
    spacing: Sequence[float] | None = None
    orientation: str | None = "RAS"
    mask_mode: str | None = None
    mask_margin: float = 10
    cache_dir: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return 1 + (self.mask_mode == "channel"), *self.image_size

    def load(self, path: str, mask: str = "", measurements: bool = False) -> Tensor:
        """Load a volume or its measurements, see read(), through the disk cache. Raises InputError and ValueError."""
        wanted, cached_files = int(not measurements), []
        if self.cache_dir:
            # the key covers the files, their modification times, all settings, and the version of read(), 3
            files = [file for name in (path, mask) if name for file in files_of(name)]
            key = hashlib.sha256(f"{stamp(files)}{self}3".encode()).hexdigest()
            cached_files = [Path(self.cache_dir, f"{key}.{kind}.npy") for kind in ("numbers", "volume")]
            # the volume is written last
            if cached_files[1].exists():
                return torch.from_numpy(np.load(cached_files[wanted]))
        found = self.read(path, mask)
        for file, values in zip(cached_files, found, strict=False):
            temporary = file.with_suffix(f".{du.world()[0]}.{os.getpid()}.npy")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                np.save(temporary, values.numpy())
                temporary.replace(file)
            except OSError as error:
                warnings.warn(
                    f"{self.cache_dir}: cannot be written ({error.strerror}); volumes are not cached", stacklevel=1
                )
                with contextlib.suppress(OSError):
                    temporary.unlink()
                break
        return found[wanted]

    def read(self, path: str, mask: str = "") -> tuple[Tensor, Tensor]:
        """Return (measurements, volume). measurements: MEASUREMENTS, then the file's Volume.summary()."""
        volume, summary = self._open(path, "bilinear")
        if volume.min() == volume.max():
            raise ValueError("holds one value everywhere")
        hu, voxel = volume.as_tensor(), volume.pixdim.numpy()
        inside = torch.zeros_like(hu)
        if mask:
            found, _ = self._open(mask, "nearest")
            inside = (found.as_tensor() > 0.5).float()
            if inside.shape != hu.shape:
                raise ValueError(f"its mask has {tuple(inside.shape[1:])} voxels, not {tuple(hu.shape[1:])}")
            if not torch.allclose(found.affine, volume.affine, atol=0.1):
                raise ValueError("its mask lies elsewhere: another origin or direction of axes")
        if self.mask_mode == "crop" and inside.any():
            places = inside[0].nonzero().numpy()
            margin = np.ceil(self.mask_margin / voxel).astype(int)
            first, last = np.maximum(places.min(0) - margin, 0), places.max(0) + margin + 1
            box = (slice(None), *(slice(*ends) for ends in zip(first, last, strict=True)))
            hu, inside = hu[box], inside[box]

        calcium = hu[0].numpy() > 130
        parts = label(calcium, np.ones((3, 3, 3)))[1]
        sizes = np.log1p([calcium.sum() * voxel.prod(), parts])
        measurements = torch.tensor([*sizes, float(hu.mean()), *measure_mask(hu[0], inside[0] > 0, voxel), *summary])
        low, high = self.hu_window
        channels = [((hu - low) / (high - low)).clip(0, 1)]
        if self.mask_mode == "channel":
            channels.append(inside)
        return measurements, torch.cat([resize(channel, self.image_size) for channel in channels]).to(torch.float16)

    def _open(self, path: str, mode: str) -> tuple[Tensor, np.ndarray]:
        from monai.data import MetaTensor
        from monai.transforms import Spacing

        found = read_volume(path, self.orientation)
        volume = MetaTensor(torch.from_numpy(found.values)[None], affine=torch.as_tensor(found.affine))
        if self.spacing:
            volume = Spacing(pixdim=self.spacing, mode=mode, padding_mode="border")(volume)
        return volume, found.summary()


def measure_mask(hu: Tensor, inside: Tensor, voxel: np.ndarray) -> list[float]:
    """Measure a mask (X, Y, Z): log volume (mm3), log surface (mm2), log diameter (mm), mean and SD of HU inside it.

    NaN if the mask is empty. The surface is that of MONAI's mesh, the diameter the longest distance between voxel
    corners. Sphericity is left out, because its logarithm is a linear function of the first two.
    """
    from monai.metrics.utils import get_mask_edges
    from scipy.spatial import ConvexHull
    from scipy.spatial.distance import pdist

    if not inside.any():
        return [math.nan] * 5
    corner, _, surface, _ = get_mask_edges(inside, inside, spacing=tuple(voxel.tolist()))
    corners = corner.nonzero().numpy() * voxel
    diameter = pdist(corners[ConvexHull(corners).vertices]).max()
    values = hu[inside].double()
    sizes = np.log([len(values) * voxel.prod(), float(surface.sum()), diameter])
    return [*sizes, float(values.mean()), float(values.std(correction=0))]


def resize(volume: Tensor, size: tuple[int, int, int]) -> Tensor:
    """Resize (1, X, Y, Z) to (1, *size): average along axes that shrink, interpolate linearly along axes that grow."""
    smaller = [min(old, new) for old, new in zip(volume.shape[1:], size, strict=True)]
    volume = F.interpolate(volume[None], smaller, mode="area")
    if smaller != [*size]:
        volume = F.interpolate(volume, [*size], mode="trilinear", align_corners=False)
    return volume[0]


def augment(images: Tensor, indices: list[int], seed: int, epoch: int) -> Tensor:
    """Flip images (B, C, X, Y, Z) along random axes and, if X equals Y, rotate them in-plane by quarter turns.

    Flips and rotations depend only on (seed, epoch, index), so they are the same for any number of GPUs and after a
    resume. indices: rows of the cohort.
    """
    changed = []
    for image, index in zip(images, indices, strict=True):
        noise = np.random.default_rng([seed % 2**63, epoch, int(index)])
        flips, turns = noise.integers(0, 2, 3), int(noise.integers(0, 4))
        image = image.flip([axis + 1 for axis in range(3) if flips[axis]])
        changed.append(torch.rot90(image, turns, (1, 2)) if image.shape[1] == image.shape[2] else image)
    return torch.stack(changed)


# --- the data set -----------------------------------------------------------------------------------------------------


class MultiGPUSurvivalDataset(Dataset):
    """Cases as dicts of index (row of the cohort), time (years), event, error ("" if usable), image and columns.

    With use_smart_cache, an epoch covers a share `cache_rate` of the cases, in memory shared by all processes of a
    machine; a share `replace_rate` of them is replaced after each epoch, oldest first. The cases of an epoch depend
    only on (seed, epoch), so neither the number of GPUs nor a resume changes them. MONAI's SmartCacheDataset keeps a
    copy in each process and cannot resume.
    """

    def __init__(
        self,
        csv_path: str | Path | Cohort,
        fold: str = "train",
        fold_column: str = "Fold_1",
        rows: np.ndarray | None = None,
        columns: np.ndarray | None = None,
        volumes: Volumes | None = None,
        use_smart_cache: bool = False,
        cache_rate: float = 0.5,
        replace_rate: float = 0.5,
        seed: int = 0,
        **options,
    ):
        """All ranks. columns: result of encode_columns(), for all rows of the table."""
        self.cohort = csv_path if isinstance(csv_path, Cohort) else read_cohort(csv_path, **options)
        if rows is None:
            rows = np.flatnonzero(self.cohort.table[fold_column.lower()] == fold)
        self.rows, self.columns, self.volumes = np.asarray(rows), columns, volumes or Volumes()
        self.epoch_size, self.replaced_per_epoch = len(self.rows), 0
        self.memory = None
        if use_smart_cache:
            size = self.epoch_size = max(1, int(cache_rate * len(self.rows)))
            self.replaced_per_epoch = min(math.ceil(replace_rate * size), len(self.rows) - size)
            self.rows = self.rows[np.random.default_rng(seed % 2**63).permutation(len(self.rows))]
            shape = size, *self.volumes.shape
            shared = du.share_bytes(8 * size + 2 * math.prod(shape))
            if shared is None:
                du.print_main("warning: no room for the smart cache; volumes are loaded again in each epoch")
            else:
                # for each slot: 1 + the number of its case (0 if empty), and the volume of its case
                known, volumes = np.split(shared, [8 * size])
                self.memory = known.view(np.int64), volumes.view(np.float16).reshape(shape)

    def __len__(self) -> int:
        return self.epoch_size

    def running_index(self, indices, epoch: int) -> np.ndarray:
        """Map indices of an epoch to running indices over all epochs; modulo len(rows) they are positions in rows."""
        return np.asarray(indices) + epoch * self.replaced_per_epoch

    def rows_of(self, indices, epoch: int) -> np.ndarray:
        return self.rows[self.running_index(indices, epoch) % len(self.rows)]

    def __getitem__(self, index: int) -> dict:
        number = int(self.running_index(index, getattr(index, "epoch", 0)))
        row = int(self.rows[number % len(self.rows)])
        cohort, error = self.cohort, ""
        item = {"index": row, "time": float(cohort.time[row]), "event": bool(cohort.event[row])}
        if self.columns is not None:
            item["columns"] = self.columns[row]
        if cohort.path[row]:
            try:
                item["image"] = self._volume(row, number)
            except Exception as reason:
                # NaN, so that a loop that ignores `error` cannot train on an unusable image
                item["image"] = torch.full(self.volumes.shape, math.nan, dtype=torch.float16)
                error = fault_of(cohort, row, reason)
        return item | {"error": error}

    def _volume(self, row: int, number: int) -> Tensor:
        if not self.memory:
            return self.volumes.load(self.cohort.path[row], self.cohort.mask[row])
        known, volumes = self.memory
        place = number % self.epoch_size
        if known[place] != number + 1:
            volumes[place] = self.volumes.load(self.cohort.path[row], self.cohort.mask[row]).numpy()
            known[place] = number + 1
        return torch.from_numpy(volumes[place].copy())

    def measure_volumes(self, threads: int) -> np.ndarray:
        """All ranks: read every volume once, into the disk cache, and set MEASUREMENTS in the cohort's table.

        Returns (cases, 6), see Volume.summary(). Raises InputError if a volume is unusable.
        """
        rank, world_size = du.world()
        cohort = self.cohort

        def measure(row: int) -> tuple[str, list[float]]:
            try:
                return "", self.volumes.load(cohort.path[row], cohort.mask[row], measurements=True).tolist()
            except Exception as reason:
                return fault_of(cohort, row, reason), []

        with ThreadPoolExecutor(max(1, threads)) as pool:
            own = self.rows[rank::world_size].tolist()
            done = pool.map(measure, own)
            own = list(tqdm(done, "reading volumes", len(own), delay=3, mininterval=2, disable=rank > 0))
        found = [None] * len(self.rows)
        for first, part in enumerate(du.gather_objects(own)):
            found[first::world_size] = part
        refuse([fault for fault, _ in found if fault], "volumes cannot be used")
        measured, summaries = np.split(np.array([values for _, values in found]), [len(MEASUREMENTS)], axis=1)
        for name, values in zip(MEASUREMENTS, measured.T, strict=True):
            cohort.table[name] = ""
            cohort.table.loc[self.rows, name] = values.astype(str)
        empty = np.isnan(measured[:, -1]).sum()
        if self.volumes.mask_mode and empty:
            effect = "are taken whole" if self.volumes.mask_mode == "crop" else "have zeros for it"
            du.print_main(f"{empty} of {len(found)} cases have no mask, or an empty one, and {effect}")
        return summaries


def fault_of(cohort: Cohort, row: int, error: BaseException) -> str:
    if isinstance(error, InputError):
        return f"{cohort.source[row]}: {error}"
    advice = f"cannot be used ({first_line(error)}); replace it or remove the row"
    return f"{cohort.source[row]}: {cohort.path[row]} {advice}"
