"""Survival data: table of cases, fold assignment, encoded clinical columns, and CT volumes as a PyTorch dataset.

dataset = MultiGPUSurvivalDataset("data/dataset.csv", use_smart_cache=True)
loader = create_distributed_dataloader(dataset, batch_size=8)
for epoch in range(epochs):
    loader.batch_sampler.set_position(epoch)  # reshuffles; with use_smart_cache, also replaces some of the cases
    for batch in loader: ...                  # image (B, 1, X, Y, Z) float16 in [0, 1], time in years, event, error
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
# accepted column names in the table of cases, case-insensitive
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

# --- table of cases ---------------------------------------------------------------------------------------------------


@dataclass
class Cohort:
    """A checked table of cases; every field has one entry per row.

    source: file and row number as "file:row". case: patient id or, if missing, the volume's path or the source. path,
    mask: absolute paths of the CT volume and its mask, or "". time: years to event or censoring, NaN if unknown. event:
    False if censored or unknown. table: all columns as text, with lower-case names.
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
        """Return a column's cells as text; `name` is case-insensitive. Raises InputError if there is no such column."""
        return self.table[tables.find_column([(self.source[0], dict(self.table))], name)]


def read_cohort(
    csv_path: str | Path,
    data_dir: str | None = None,
    time_unit: str = "days",
    outcome: bool = True,
    image: bool = True,
    **given: str | None,
) -> Cohort:
    """Read a table of cases (CSV or parquet) and check every row. Raises InputError naming the unusable rows.

    data_dir: folder that relative paths start from; default: the table's folder. outcome=False: rows may lack time and
    event. image=False: ignore the path column. given: column names that override the accepted ones, such as
    mask_column="heart".
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
    """Return the row numbers of the training cases and of the validation cases.

    count=0: fold_column labels rows as `train` or `val` (default "val"). count>0: assign_folds() makes `count` folds,
    and fold number `val` is the validation set. With count>0, or if no row is labelled `train`, the training set
    consists of all other rows, except those labelled as in HELD_OUT (with count>0, blank labels are not held out).

    Raises InputError if either set has no event before the end of its longest follow-up, or if the sets share a patient
    or volume.
    """
    place = cohort.source[0].rpartition(":")[0]
    if count:
        marks = cohort.table.get(fold_column.lower())
        held = np.zeros(len(cohort), bool) if marks is None else marks.str.lower().isin(HELD_OUT[:-1]).to_numpy()
        number = assign_folds(cohort.case, cohort.event, ~held, count, seed)
        labels, is_train = np.where(held, HELD_OUT[0], number.astype(str)), np.zeros(len(cohort), bool)
    else:
        # spreadsheets may save the fold label 1 as 1.0
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
    """Return each row's fold number, 1 to `count`; all rows of a patient get the same fold.

    case: (rows,), patient ids. event: (rows,), True for an event. used: (rows,), False for rows held out of
    cross-validation. Patients with an event are spread evenly over the folds, and so are the others.
    """
    names, place = np.unique(case, return_inverse=True)
    has_event, is_used = (np.bincount(place, weights=rows) > 0 for rows in (event & used, used))
    order = np.random.default_rng(seed % 2**63).permutation(len(names))
    # sort patients with events first and unused patients last, to spread each group evenly over the folds
    order = order[np.lexsort((~has_event[order], ~is_used[order]))]
    number = np.empty(len(names), int)
    number[order] = np.arange(len(names)) % count + 1
    return number[place]


# --- clinical columns -------------------------------------------------------------------------------------------------


def fit_columns(cohort: Cohort, names: list[str], rows: np.ndarray) -> list[dict]:
    """Fit the encodings of the named columns to the training `rows`; return one dict per column, for encode_columns().

    Raises InputError for columns that are blank, mostly numbers but also text, or have too many distinct text values.
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
    """Encode all rows of the cohort as float32 (rows, n), with the encodings from fit_columns().

    Numbers are standardized and text values are one-hot encoded; indicators mark blank cells and unknown text values.
    Raises InputError if a numeric column contains text or a column is missing.
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


# --- volumes ----------------------------------------------------------------------------------------------------------


@dataclass
class Volumes:
    """Reads CT volumes as (C, X, Y, Z) float16 with HU windowed to [0, 1]; caches them in cache_dir unless it is empty.

    orientation: axis codes to reorient volumes to, such as RAS; None: keep the file's axes. spacing: voxel size in mm
    to resample volumes to; None: no resampling. mask_mode: "crop" crops to the mask's bounding box plus mask_margin mm,
    unless the mask is empty; "channel" adds the mask as a second channel.
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
        """Return the volume or, if `measurements` is True, its measurements, using a disk cache. See read()."""
        wanted, cached_files = int(not measurements), []
        if self.cache_dir:
            # the 3 in the key is the version of read(): increase it when read() changes
            files = [file for name in (path, mask) if name for file in files_of(name)]
            key = hashlib.sha256(f"{stamp(files)}{self}3".encode()).hexdigest()
            cached_files = [Path(self.cache_dir, f"{key}.{kind}.npy") for kind in ("numbers", "volume")]
            # the volume is written after the measurements, so if its file exists, both do
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
        """Read a CT volume and its mask; return (measurements, volume).

        measurements: (14,), the eight MEASUREMENTS and the six values of Volume.summary(). volume: (C, X, Y, Z)
        float16. Raises InputError or ValueError if the volume or its mask is unusable.
        """
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
    """Return a mask's log volume (mm3), log surface area (mm2) and log diameter (mm), and the mean and SD of the HU in
    it.

    hu, inside: (X, Y, Z), the CT and the boolean mask. voxel: (3,), voxel size in mm. All values are NaN if the mask is
    empty.
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
    """Resize a volume (1, X, Y, Z) to (1, *size): average along shrinking axes, interpolate along growing axes."""
    smaller = [min(old, new) for old, new in zip(volume.shape[1:], size, strict=True)]
    volume = F.interpolate(volume[None], smaller, mode="area")
    if smaller != [*size]:
        volume = F.interpolate(volume, [*size], mode="trilinear", align_corners=False)
    return volume[0]


def augment(images: Tensor, indices: list[int], seed: int, epoch: int) -> Tensor:
    """Flip images (B, C, X, Y, Z) along random axes; if X equals Y, also rotate them in-plane by random quarter turns.

    indices: row number of each image's case in the cohort. The flips and turns depend only on (seed, epoch, row
    number), so neither resuming nor the number of GPUs changes them.
    """
    changed = []
    for image, index in zip(images, indices, strict=True):
        noise = np.random.default_rng([seed % 2**63, epoch, int(index)])
        flips, turns = noise.integers(0, 2, 3), int(noise.integers(0, 4))
        image = image.flip([axis + 1 for axis in range(3) if flips[axis]])
        changed.append(torch.rot90(image, turns, (1, 2)) if image.shape[1] == image.shape[2] else image)
    return torch.stack(changed)


# --- dataset ----------------------------------------------------------------------------------------------------------


class MultiGPUSurvivalDataset(Dataset):
    """Dataset of a cohort's cases.

    Each item is a dict: index (row number in the cohort), time (years), event, error ("" if the image is usable), image
    (C, X, Y, Z) if the row has a volume, and columns (n,) if the constructor got columns.

    With use_smart_cache, each epoch uses only a fraction `cache_rate` of the cases, held in shared memory. After each
    epoch, a fraction `replace_rate` of these is replaced, oldest first. Unlike MONAI's SmartCacheDataset, the selection
    depends only on (seed, epoch), so that a run can resume on any number of GPUs.
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
        """Call on all ranks. Raises InputError if the table is unusable.

        csv_path: a Cohort, or a table that read_cohort() reads with `options`. rows: row numbers of the cases; default:
        rows with label `fold` in fold_column. columns: result of encode_columns() for the whole table.
        """
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
                # known: 1 + running_index() of the case in each cache slot, or 0 if the slot is empty
                known, volumes = np.split(shared, [8 * size])
                self.memory = known.view(np.int64), volumes.view(np.float16).reshape(shape)

    def __len__(self) -> int:
        return self.epoch_size

    def running_index(self, indices, epoch: int) -> np.ndarray:
        """Map an epoch's dataset indices to positions in `rows` repeated indefinitely.

        The smart cache is a window on this sequence that advances by replaced_per_epoch positions per epoch.
        """
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
                # fill unusable images with NaN, so that a training loop that ignores `error` gets a NaN loss
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
        """All ranks: measure each volume in the dataset, splitting the work among the ranks; fill the disk cache.

        The measurements become the MEASUREMENTS columns of cohort.table. Returns Volume.summary() of each case as
        (cases, 6). Raises InputError naming the unusable volumes.
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
