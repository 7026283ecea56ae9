"""The survival cohort of guide 2: its table (CSV or xlsx), its CT volumes (NIfTI), and what is cached of them.

MultiGPUSurvivalDataset can be used in any training loop:

    from distributed_utils import create_distributed_dataloader, setup_distributed
    from tasks.survival.data import MultiGPUSurvivalDataset

    dataset = MultiGPUSurvivalDataset(csv_path, use_smart_cache=True)
    loader = create_distributed_dataloader(dataset, batch_size=8)
    for epoch in range(epochs):
        loader.batch_sampler.set_position(epoch)  # new order; with SmartCache: new cases come into the cache
        for batch in loader: ...
    dataset.shutdown()
"""

import contextlib
import csv
import json
import math
import os
import sys
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

import distributed_utils as du
from cache_utils import DiskCache, identity
from checkpoint_utils import write_atomically
from cli_utils import InputError
from sampler_utils import TrainBatchSampler, permute

YEARS = {"days": 1 / 365.25, "months": 1 / 12, "years": 1.0}
COLUMNS = {  # flag without _column -> names the column goes by; case, spaces and underscores do not matter
    "path": ("NIFTI Path", "image_path", "path"),
    "time": ("time", "survival_time"),
    "event": ("event",),
    "id": ("case_num", "patient_id", "case_id", "case", "subject_id", "patient", "patient_nr", "mrn"),
}
TRUE_RISK = "true_log_hazard"  # the column that sample_data.py adds
HELD_OUT = {"test", "holdout", "hold-out"}  # labels of a fold column that are neither trained nor validated on
BLANK = {"", "na", "nan", "n/a", "null", "none"}


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cohort:
    """One line per row of the table: row number in the file, case, path of its volume, time (years), event, folds."""

    source: str
    row: list[int]
    case: list[str]
    path: list[str]
    time: np.ndarray
    event: np.ndarray
    id_name: str | None  # the patient's column
    folds: dict[str, list[str]]  # any column -> label of each row
    features: dict[str, np.ndarray]  # numeric columns, NaN where blank
    true_risk: np.ndarray | None

    def __len__(self) -> int:
        return len(self.row)

    def where(self, i: int) -> str:
        """`dataset.csv:12`, for an error message."""
        return f"{self.source}:{self.row[i]}"


def plain(name: str) -> str:
    return "".join(name.lower().replace("_", " ").split())


def read_table(path: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """(header, [(row number, cells)]) of a CSV (comma, semicolon or tab) or xlsx file. Raises InputError."""
    try:
        if path.lower().endswith(".xlsx"):
            import openpyxl

            book = openpyxl.load_workbook(path, read_only=True, data_only=True)
            lines = [["" if cell is None else str(cell).strip() for cell in row] for row in book.active.values]
            rows = list(enumerate(lines, start=1))
        else:
            with open(path, encoding="utf-8-sig", newline="") as file:
                first = file.readline()
                file.seek(0)
                reader = csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True)
                rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check --csv_path") from None
    except Exception as error:  # openpyxl has no common class of errors
        text = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise InputError(f"{path}: not a readable table ({text}); give a CSV in UTF-8, or an xlsx file") from None
    rows = [(number, cells) for number, cells in rows if any(cells)]
    if not rows:
        raise InputError(f"{path}: is empty; give a table with a header")
    header = rows[0][1]
    while header and not header[-1]:
        header = header[:-1]
    for number, cells in rows[1:]:
        if len(cells) < len(header) and not path.lower().endswith(".xlsx"):
            raise InputError(f"{path}:{number}: {len(cells)} cells under {len(header)} columns; correct the row")
        if any(cells[len(header) :]):
            raise InputError(f"{path}:{number}: more cells than the {len(header)} columns; correct the row")
    return header, [(number, cells + [""] * (len(header) - len(cells))) for number, cells in rows[1:]]


def find_column(header: list[str], kind: str, given: str | None, source: str) -> int | None:
    """Place of the column that `kind` (or the name given by flag) means; None if there is none."""
    for name in map(plain, [given] if given else COLUMNS[kind]):
        places = [i for i, column in enumerate(header) if plain(column) == name]
        if len(places) > 1:
            names = " and ".join(repr(header[i]) for i in places)
            raise InputError(f"{source}: two columns for {kind} ({names}); remove one, or rename it")
        if places:
            return places[0]
    if given:
        raise InputError(f"{source}: no column {given!r}; there are {', '.join(header)}; check --{kind}_column")
    return None


def as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def read_cohort(
    csv_path: str, data_dir: str | None = None, time_unit: str = "days", outcome: bool = True,
    path_column: str | None = None, time_column: str | None = None, event_column: str | None = None,
    id_column: str | None = None,
) -> Cohort:  # fmt: skip
    """The table, every row checked. Raises InputError naming the file and the first wrong row.

    Paths are relative to data_dir, or to the table's folder. outcome False (new patients): time and event may be
    missing. Times become years.
    """
    source = str(csv_path)
    header, lines = read_table(source)
    if not lines:
        raise InputError(f"{source}: has a header and no rows; add cases")
    given = {"path": path_column, "time": time_column, "event": event_column, "id": id_column}
    at = {kind: find_column(header, kind, name, source) for kind, name in given.items()}
    for kind in ("path", "time", "event") if outcome else ("path",):
        if at[kind] is None:
            text = f"no column for {kind} ({' or '.join(COLUMNS[kind])}); there are {', '.join(header)}"
            raise InputError(f"{source}: {text}; name it with --{kind}_column")
    root = os.path.abspath(data_dir or Path(source).parent)
    real = os.path.realpath(root)
    row, case, path, time, event = [], [], [], [], []
    for number, cells in lines:
        where, name = f"{source}:{number}", cells[at["path"]].replace("\\", "/")
        if not name:
            raise InputError(f"{where}: no path in column {header[at['path']]!r}; fill it in or remove the row")
        full = os.path.normpath(os.path.join(root, name))
        if not name.isprintable():
            raise InputError(f"{where}: the path {name!r} holds a control character; correct it")
        if os.path.commonpath([root, full]) != root and os.path.commonpath([real, os.path.realpath(full)]) != real:
            raise InputError(f"{where}: {name} lies outside {root}; give the folder that holds it with --data_dir")
        case.append(cells[at["id"]] if at["id"] is not None and cells[at["id"]] else name)
        if outcome:
            cell = cells[at["time"]]
            years = as_number(cell) * YEARS[time_unit]
            if not (0 <= years < math.inf):
                reason = "is missing" if not cell else f"{cell!r} is not a number of at least 0"
                raise InputError(f"{where}: {header[at['time']]} {reason}; correct or remove the row")
            if years > 120:
                raise InputError(
                    f"{where}: {header[at['time']]} {cell} {time_unit} are {years:.0f} years; see --time_unit"
                )
            cell = cells[at["event"]]
            if as_number(cell) not in (0, 1):
                reason = "is missing" if not cell else f"{cell!r} is neither 0 (censored) nor 1"
                raise InputError(f"{where}: {header[at['event']]} {reason}; correct or remove the row")
            time.append(years)
            event.append(as_number(cell) == 1)
        row.append(number)
        path.append(full)
    folds, features, true_risk = {}, {}, None
    reserved = {plain(name) for names in COLUMNS.values() for name in names}
    for place, name in enumerate(header):
        cells = [cells[place] for _, cells in lines]
        values = np.array([as_number(cell) for cell in cells])
        folds[name] = [c.removesuffix(".0") if c.removesuffix(".0").isdigit() else c for c in cells]  # Excel's 1.0
        if plain(name) == plain(TRUE_RISK):
            true_risk = values
        elif place in at.values() or plain(name) in reserved or plain(name).startswith("fold"):
            continue
        elif all(cell.lower() in BLANK or math.isfinite(v) for cell, v in zip(cells, values, strict=True)):
            features[name] = values
    id_name = header[at["id"]] if at["id"] is not None else None
    outcomes = np.array(time), np.array(event, bool)
    return Cohort(source, row, case, path, *outcomes, id_name, folds, features, true_risk)


class Split(NamedTuple):
    """Lines of the cohort to train and to validate on, and the flags that ask for just this split."""

    name: str
    train: np.ndarray
    val: np.ndarray
    flags: dict


def check_split(cohort: Cohort, train: np.ndarray, val: np.ndarray, what: str) -> None:
    """InputError for an empty fold, one without events, or a case or volume in both folds (or twice in one)."""
    for name, rows in (("training", train), ("validation", val)):
        if not len(rows):
            raise InputError(f"{cohort.source}: no rows in the {name} fold of {what}; check --train_fold, --val_fold")
        if not cohort.event[rows].any():
            first, last = cohort.row[rows[0]], cohort.row[rows[-1]]
            text = f"the {name} fold of {what} ({len(rows)} rows from {first} to {last}) has no event"
            raise InputError(f"{cohort.source}: {text}; a Cox model needs some")
    inside = set(val.tolist())
    for column, of in (("case", cohort.case), ("volume", cohort.path)):
        seen: dict[str, int] = {}
        for i in (*train.tolist(), *val.tolist()):
            j = seen.setdefault(of[i], i)
            if (i in inside) != (j in inside):
                text = f"{column} {of[i]} is in the training and, in row {cohort.row[i]}, in the validation fold"
                raise InputError(f"{cohort.where(j)}: {text}; keep a patient in one fold")
            if i != j and column == "volume":
                raise InputError(f"{cohort.where(i)}: the same volume as row {cohort.row[j]}; remove one of them")


def make_folds(cohort: Cohort, count: int, seed: int) -> np.ndarray:
    """Fold (0..count-1) of each row: cases stay whole, events are dealt out evenly, a function of the seed alone.

    Raises InputError when there are fewer cases with events than folds.
    """
    cases = {name: i for i, name in enumerate(dict.fromkeys(cohort.case))}
    of = np.array([cases[name] for name in cohort.case])
    event = np.zeros(len(cases), bool)
    np.logical_or.at(event, of, cohort.event)
    if event.sum() < count:
        raise InputError(f"{cohort.source}: {event.sum()} cases with events for --folds {count}; ask for fewer folds")
    fold, dealt = np.zeros(len(cases), int), 0
    for group in (np.flatnonzero(event), np.flatnonzero(~event)):
        order = permute(np.arange(len(group)), len(group), seed, 0) if len(group) else group
        fold[group[order]] = (dealt + np.arange(len(group))) % count
        dealt += len(group)
    return fold[of]


def choose_splits(cohort: Cohort, args) -> list[Split]:
    """One split, or with --cross_validate all of them. Raises InputError.

    From --folds K; else from --fold_column: rows of --train_fold against those of --val_fold or, where no row has that
    training label, all other labels (but `test`) against it. For cross-validation from the column's sisters (Fold_1,
    Fold_2 ...), or one label after the other.
    """
    splits = []
    if args.folds:
        fold = make_folds(cohort, args.folds, args.seed)
        labels = [str(k + 1) for k in range(args.folds)]
        chosen = args.val_fold or "1"
        if chosen not in labels:
            raise InputError(f"--val_fold {chosen}: with --folds {args.folds} it is one of 1 to {args.folds}")
        for k in labels if args.cross_validate else [chosen]:
            flags = {"folds": args.folds, "val_fold": k}
            splits.append(Split(f"fold {k} of {args.folds}", fold != int(k) - 1, fold == int(k) - 1, flags))
    else:
        column = next((name for name in cohort.folds if plain(name) == plain(args.fold_column)), None)
        if column is None:
            text = f"no fold column {args.fold_column!r}"
            raise InputError(f"{cohort.source}: {text}; name it with --fold_column, or make folds with --folds 5")
        val_fold, labels = args.val_fold or "val", set(cohort.folds[column])
        columns, chosen = [column], [val_fold]
        if args.cross_validate and {args.train_fold, val_fold} & labels:
            stem = column.rstrip("0123456789")
            columns = [name for name in cohort.folds if name.rstrip("0123456789") == stem]
            if len(columns) < 2:
                raise InputError(f"{cohort.source}: {column} is one split; for --cross_validate give --folds 5")
        elif args.cross_validate:
            chosen = [text for text in dict.fromkeys(cohort.folds[column]) if text and text.lower() not in HELD_OUT]
        for name in columns:
            label = np.array(cohort.folds[name])
            rest = ~np.isin(np.char.lower(label), [*HELD_OUT, ""])
            for text in chosen:
                train = label == args.train_fold if args.train_fold in label else rest & (label != text)
                if not (label == text).any():
                    known = ", ".join(repr(str(value)) for value in np.unique(label)[:9])
                    raise InputError(f"{cohort.source}: no row has {text!r} in {name} ({known}); check --val_fold")
                flags = {"fold_column": name, "train_fold": args.train_fold, "val_fold": text, "folds": 0}
                splits.append(Split(f"{name} {text!r}", train, label == text, flags))
    splits = [Split(s.name, np.flatnonzero(s.train), np.flatnonzero(s.val), s.flags) for s in splits]
    held: dict[int, str] = {}
    for split in splits:
        check_split(cohort, split.train, split.val, split.name)
        for i in split.val.tolist():
            if i in held:
                text = f"validated in {held[i]} and in {split.name}, so the predictions cannot be pooled"
                raise InputError(f"{cohort.where(i)}: {text}; give folds that do not overlap, or --folds 5")
            held[i] = split.name
    return splits


# --- volumes ----------------------------------------------------------------------------------------------------------


def examine(path: str, geometry: bool) -> str:
    """What is wrong with a NIfTI file, read to its end; "" if nothing. geometry: its affine must be usable too."""
    import nibabel

    try:
        volume = nibabel.load(path)
        if len(volume.shape) != 3:
            return f"has {len(volume.shape)} dimensions {volume.shape}, not three"
        if 0 in volume.shape:
            return f"has no voxels: its shape is {volume.shape}"
        values = np.asanyarray(volume.dataobj.get_unscaled())
        if values.dtype.kind not in "fiu":
            return f"holds {values.dtype}, not numbers"
        scaling = np.array([volume.dataobj.slope, volume.dataobj.inter])
        bad = int((~np.isfinite(values)).sum()) if values.dtype.kind == "f" else 0
        if bad or not np.isfinite(scaling).all():
            return f"holds {bad or values.size} values that are NaN or infinite"
        if values.size and values.min() == values.max():
            return "holds one value everywhere"
        if geometry and not (np.isfinite(volume.affine).all() and abs(np.linalg.det(volume.affine[:3, :3])) > 1e-9):
            return "has no usable affine, which --spacing and --orientation need"
    except FileNotFoundError:
        return "does not exist"
    except Exception as error:  # nibabel, zlib and numpy each have their own
        text = str(error).replace(path, "file").splitlines()[0][:100] if str(error) else type(error).__name__
        return f"is not a readable NIfTI file, truncated perhaps ({text})"
    return ""


def check_volumes(cohort: Cohort, rows: np.ndarray, cache_dir: Path, geometry: bool, threads: int) -> None:
    """All ranks: read each volume once, in parallel, and raise InputError for those that cannot be used.

    What was found good is remembered in cache_dir/checked.json; only new and changed files are read again.
    """
    memory = Path(cache_dir) / "checked.json"
    known: set[str] = set()
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        known = set(json.loads(memory.read_text()).get("good", []))
    known = du.broadcast_object(known)
    kind = "|affine" if geometry else ""

    def look(i: int) -> tuple[int, str, str]:
        key = ""
        with contextlib.suppress(OSError):
            key = identity(cohort.path[i]) + kind
        return i, key, "" if key in known else examine(cohort.path[i], geometry)

    rank, world_size = du.world()
    share = rows[rank::world_size].tolist()
    with ThreadPoolExecutor(max(1, threads)) as pool:
        shown = {"desc": "checking volumes", "disable": rank != 0 or not sys.stderr.isatty(), "leave": False}
        mine = list(tqdm(pool.map(look, share), total=len(share), **shown))
    found = sorted(answer for part in du.gather_objects(mine) for answer in part)
    if bad := [(i, reason) for i, _, reason in found if reason]:
        text = "; ".join(f"row {cohort.row[i]}: {cohort.path[i]} {reason}" for i, reason in bad[1:4])
        more = f" (and {len(bad) - 1} more: {text}{' ...' if len(bad) > 4 else ''})" if text else ""
        i, reason = bad[0]
        advice = "replace it or remove the row" + (", or check --data_dir" if "does not exist" in reason else "")
        raise InputError(f"{cohort.where(i)}: {cohort.path[i]} {reason}{more}; {advice}")
    if rank == 0 and (new := {key for _, key, _ in found} - known):
        good = sorted(known | new)
        with contextlib.suppress(OSError):  # a folder one may only read: checked again next time
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(memory, lambda file: file.write(json.dumps({"good": good}).encode()))


class Volumes:
    """Reads volumes: (1, X, Y, Z) float16 in 0..1, axes as in the file, or in `orientation` ("RAS") if given.

    Spacing (mm) if given, then the HU window to 0..1, then averaging to image_size. With a folder, what was read is
    kept there, each file with a checksum; ranks that write the same file write the same bytes, and a torn one is
    read anew.
    """

    def __init__(self, image_size, window=(-1000, 1000), spacing=None, orientation=None, cache_dir: str | None = None):
        from monai.transforms import Compose, LoadImage, Orientation, Resize, ScaleIntensityRange, Spacing

        steps = [LoadImage(reader="NibabelReader", image_only=True, ensure_channel_first=True, dtype=np.float32)]
        if orientation:
            steps.append(Orientation(axcodes=orientation, labels=None))
        if spacing:
            steps.append(Spacing(pixdim=spacing, mode="bilinear", padding_mode="border"))
        steps.append(ScaleIntensityRange(*window, 0.0, 1.0, clip=True))
        steps.append(Resize(image_size, mode="area"))
        self.read, self.shape = Compose(steps), (1, *image_size)
        self.settings = f"{tuple(image_size)}|{tuple(window)}|{spacing}|{orientation}|1"
        self.cache = DiskCache(cache_dir, ".f16")

    def bytes(self) -> int:
        return 2 * math.prod(self.shape)

    def get(self, path: str) -> torch.Tensor:
        """Raises what MONAI raises for an unreadable file, ValueError for values that are not finite."""
        key = f"{identity(path)}|{self.settings}" if self.cache.folder else ""
        if data := self.cache.get(key, self.bytes()):
            return torch.frombuffer(bytearray(data), dtype=torch.float16).view(self.shape)
        volume = self.read(path).as_tensor().to(torch.float16).contiguous()
        if tuple(volume.shape) != self.shape:
            raise ValueError(f"has {len(volume.shape) - 1} dimensions and channels {volume.shape[0]}, not one volume")
        if not volume.isfinite().all():
            raise ValueError("holds values that are NaN or infinite")
        self.cache.put(key, volume.numpy().tobytes())
        return volume


# --- the data set -----------------------------------------------------------------------------------------------------


class MultiGPUSurvivalDataset(Dataset):
    """Cases of one fold: image (1, X, Y, Z) float16, index (line of the cohort), time (years), event, error.

    With use_smart_cache each rank owns a part of the fold, of which it keeps cache_rate in memory; each epoch goes
    through what is cached, and then replace_rate of it gives way to cases not seen for longest, read in the background
    (MONAI's SmartCacheDataset). The same epoch always finds the same cases in the cache: that is how a resumed run goes
    on. raise_errors False puts an unreadable volume into the item as `error`, for a loop that ends all ranks together.
    """

    def __init__(
        self, csv_path, fold: str = "train", fold_column: str = "Fold_1", rows: np.ndarray | None = None,
        image_size=(256, 256, 64), window=(-1000, 1000), spacing=None, orientation: str | None = None,
        cache_dir: str | None = None, use_smart_cache: bool = False, cache_rate: float = 0.5, replace_rate: float = 0.5,
        num_workers: int = 2, event_balanced: bool = False, seed: int = 0, raise_errors: bool = True, **table_options,
    ):  # fmt: skip
        """csv_path: the table, or a Cohort that was read (then `rows` are its lines to take). num_workers: threads that
        fill the smart cache. event_balanced: see EventBalancedSampler. table_options: see read_cohort. Raises
        InputError."""
        self.cohort = csv_path if isinstance(csv_path, Cohort) else read_cohort(csv_path, **table_options)
        if rows is None:
            columns = {plain(name): cells for name, cells in self.cohort.folds.items()}
            if plain(fold_column) not in columns:
                raise InputError(f"{self.cohort.source}: no fold column {fold_column!r}; pass fold_column or rows")
            rows = np.flatnonzero(np.array(columns[plain(fold_column)]) == fold)
            if not len(rows):
                raise InputError(f"{self.cohort.source}: no rows with {fold!r} in {fold_column}; pass another fold")
        self.rows, self.raise_errors = rows, raise_errors
        self.threads = max(1, du.limit_workers(num_workers))
        self.volumes = Volumes(image_size, window, spacing, orientation, cache_dir)
        self.mine = self.cache = self.epoch = None
        self.event_balanced = event_balanced
        if use_smart_cache:
            self._plan_smart_cache(cache_rate, replace_rate, seed)

    def _plan_smart_cache(self, cache_rate: float, replace_rate: float, seed: int) -> None:
        from monai.data import partition_dataset

        rank, self.ranks = du.world()
        if not (0 < cache_rate <= 1 and 0 < replace_rate <= 1):
            raise InputError(f"--cache_rate {cache_rate}, --replace_rate {replace_rate}: must be above 0 and at most 1")
        if len(self.rows) < self.ranks:
            raise InputError(
                f"--use_smart_cache: {len(self.rows)} training cases for {self.ranks} processes; use fewer"
            )
        parts = partition_dataset(
            self.rows.tolist(), num_partitions=self.ranks, shuffle=True, seed=seed % 2**32, even_divisible=False
        )
        self.mine = parts[rank]
        self.cached = max(1, int(cache_rate * (len(self.rows) // self.ranks)))  # the same on all ranks
        self.replaced = min(math.ceil(self.cached * replace_rate), len(self.mine) - self.cached)

    @property
    def changes(self) -> bool:
        """Whether items change from epoch to epoch, so that loading processes must not outlive one."""
        return self.mine is not None

    def epochs_until_all_seen(self) -> int:
        """Epochs after which each case of each rank was in the cache."""
        longest = math.ceil(len(self.rows) / self.ranks)
        step = min(self.cached if self.replaced == 0 else self.replaced, longest - self.cached)
        return 1 + (math.ceil((longest - self.cached) / step) if step else 0)

    def window(self, epoch: int) -> list[int]:
        """Lines of the cohort that this rank's cache holds in an epoch, in cache order."""
        start = epoch * self.replaced
        return [self.mine[(start + i) % len(self.mine)] for i in range(self.cached)]

    def set_epoch(self, epoch: int) -> None:
        """Bring the cache to an epoch: the next one by MONAI's replacement, another by filling it anew."""
        if self.mine is None or epoch == self.epoch:
            return
        if self.epoch is not None and epoch == self.epoch + 1:
            if self.replaced:
                self.cache.update_cache()
        elif self.cache is None or self.replaced:
            from monai.data import SmartCacheDataset

            self.shutdown()
            start = epoch * self.replaced % len(self.mine)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="cache_num is greater or equal")
                self.cache = SmartCacheDataset(
                    data=self.mine[start:] + self.mine[:start], transform=_loader(self), progress=False, shuffle=False,
                    cache_num=self.cached, replace_rate=(max(self.replaced, 1) - 0.5) / self.cached, copy_cache=False,
                    num_init_workers=self.threads, num_replace_workers=self.threads,
                )  # fmt: skip
            if self.replaced:  # half a case less than asked: MONAI rounds up what floats leave of the product
                assert self.cache._replace_num == self.replaced
                self.cache.start()
                self.stop = weakref.finalize(self, self.cache.shutdown)  # at the exit too: the thread would abort it
        self.epoch = epoch

    def shutdown(self) -> None:
        """Stop the thread that reads replacements."""
        if self.cache is not None and self.replaced:
            self.stop()
        self.cache = self.epoch = None

    close = shutdown

    def load(self, row: int) -> dict:
        """One case. An unreadable volume is told in `error`: MONAI's thread would die of it and its queue wait for
        ever."""
        cohort, error = self.cohort, ""
        try:
            image = self.volumes.get(cohort.path[row])
        except Exception as reason:
            while reason.__cause__ is not None:  # MONAI wraps what happened in the names of its transforms
                reason = reason.__cause__
            text = str(reason).replace(cohort.path[row], "file").strip()
            text = text.splitlines()[0][:150] if text else type(reason).__name__
            image, error = torch.zeros(self.volumes.shape, dtype=torch.float16), text
            error = f"{cohort.where(row)}: {cohort.path[row]} cannot be used ({text}); replace it or remove the row"
        item = {"image": image, "index": row, "error": error}
        if len(cohort.time):
            item |= {"time": float(cohort.time[row]), "event": bool(cohort.event[row])}
        return item

    def read_ahead(self) -> None:
        """Bring this rank's share of the cases into the disk cache, by threads."""
        rank, world_size = du.world()
        if self.volumes.cache.folder:
            with ThreadPoolExecutor(self.threads) as pool:
                list(pool.map(self.load, self.rows[rank::world_size].tolist()))

    def __len__(self) -> int:
        """Cases of an epoch of this rank with SmartCache, of all ranks without."""
        return len(self.rows) if self.mine is None else self.cached

    def __getitem__(self, i: int) -> dict:
        if self.mine is None:
            item = self.load(int(self.rows[i]))
        else:
            if self.cache is None:
                self.set_epoch(0)
            item = self.cache[i]
        if item["error"] and self.raise_errors:
            raise InputError(item["error"])
        return item

    def train_sampler(self, batch_size: int, seed: int, accumulation: int, drop_last: bool) -> TrainBatchSampler:
        """What create_distributed_dataloader deals this data set out with."""
        rank, world_size = du.world()
        if self.mine is not None:
            return PartitionSampler(self, batch_size, rank, world_size, seed, accumulation, drop_last)
        if self.event_balanced:
            events = self.cohort.event[self.rows]
            return EventBalancedSampler(events, batch_size, rank, world_size, seed, accumulation, drop_last)
        return TrainBatchSampler(len(self), batch_size, rank, world_size, seed, accumulation, drop_last)


def _loader(dataset: MultiGPUSurvivalDataset):
    from monai.transforms import Transform

    class Load(Transform):  # MONAI caches the output of its own Transform class only
        def __call__(self, row: int) -> dict:
            return dataset.load(row)

    return Load()


class PartitionSampler(TrainBatchSampler):
    """Batches of a data set of which each rank holds a part of its own, of the same length: places are the rank's.

    `samples` and `window` count all ranks, as in TrainBatchSampler; each step takes the same share from every rank.
    """

    def __init__(
        self, dataset, batch_size: int, rank: int, world_size: int, seed: int, accumulation: int, drop_last: bool
    ):
        cases = len(dataset) * world_size
        super().__init__(cases, batch_size, rank, world_size, seed, accumulation, drop_last)
        self.dataset, self.local = dataset, len(dataset)

    def set_position(self, epoch: int, samples: int = 0) -> None:
        self.dataset.set_epoch(epoch)
        super().set_position(epoch, samples)

    def __iter__(self) -> Iterator[list[int]]:
        self.dataset.set_epoch(self.epoch)  # here, not in the generator: before any loading process is started
        return super().__iter__()

    def order(self, places: np.ndarray) -> np.ndarray:
        first = places[0] - places[0] % self.effective_batch_size
        count, _ = self.window(first)
        local = first // self.world_size + places - first - count * self.rank // self.world_size
        return permute(local, self.local, self.seed * 1000003 + self.rank, self.epoch)


class EventBalancedSampler(TrainBatchSampler):
    """--event_balanced: every step gets its share of the events, and at least one while there are as many as steps.

    Otherwise TrainBatchSampler: each case once an epoch, the same steps at any world size.
    """

    def __init__(self, events: np.ndarray, *options, **more):
        super().__init__(len(events), *options, **more)
        self.with_event, self.without = np.flatnonzero(events), np.flatnonzero(~events)
        self.known_epoch = None

    def order(self, places: np.ndarray) -> np.ndarray:
        if self.known_epoch != self.epoch:
            self.known_epoch, self.whole = self.epoch, self._order()
        return self.whole[places]

    def _order(self) -> np.ndarray:
        steps, count, events = self.steps_per_epoch(), self.num_samples, len(self.with_event)
        ends = np.minimum(np.arange(steps + 1) * self.effective_batch_size, self.used)
        if events >= steps:
            until = np.arange(steps + 1) + (events - steps) * (ends - np.arange(steps + 1)) // max(1, count - steps)
        else:
            until = events * np.arange(steps + 1) // steps
        shuffled = [
            group[permute(np.arange(len(group)), len(group), self.seed + salt, self.epoch)] if len(group) else group
            for salt, group in enumerate((self.with_event, self.without))
        ]
        parts = []
        for k in range(steps):
            parts += [
                shuffled[0][until[k] : until[k + 1]],
                shuffled[1][ends[k] - until[k] : ends[k + 1] - until[k + 1]],
            ]
        parts += [shuffled[0][until[-1] :], shuffled[1][ends[-1] - until[-1] :]]
        return np.concatenate(parts)


def case_noise(seed: int, epoch: int, indices: list[int]) -> Iterator[np.random.Generator]:
    """A generator of random numbers per case: the same at any world size, also after a resume."""
    for index in indices:
        yield np.random.default_rng([seed % 2**63, epoch, int(index)])


def augment(images: torch.Tensor, indices: list[int], seed: int, epoch: int) -> torch.Tensor:
    """(B, 1, X, Y, Z) -> the same: each case flipped along each axis, and turned by quarters where X equals Y.

    On the device of the images; a function of (seed, epoch, case).
    """
    changed = []
    for image, noise in zip(images, case_noise(seed, epoch, indices), strict=True):
        flips, turns = noise.integers(0, 2, 3), int(noise.integers(0, 4))
        image = image.flip([axis + 1 for axis in range(3) if flips[axis]])
        changed.append(torch.rot90(image, turns, (1, 2)) if image.shape[1] == image.shape[2] else image)
    return torch.stack(changed)
