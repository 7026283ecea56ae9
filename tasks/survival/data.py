"""The survival cohort of guide 2 as a data set: its table (CSV or xlsx) and its CT volumes (NIfTI).

MultiGPUSurvivalDataset can be used in any training loop:

    from old.distributed_utils import create_distributed_dataloader
    from tasks.survival.data import MultiGPUSurvivalDataset

    dataset = MultiGPUSurvivalDataset(csv_path, use_smart_cache=True)
    loader = create_distributed_dataloader(dataset, batch_size=8)
    for epoch in range(epochs):
        loader.batch_sampler.set_position(epoch)  # new order; with SmartCache: new cases come into the cache
        for batch in loader: ...
    dataset.shutdown()
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.utils.data import Dataset

from old.cli_utils import InputError
from old.distributed_utils import limit_workers, world
from old.sampler_utils import TrainBatchSampler
from tasks.survival.cohort import Cohort, first_line, read_cohort
from tasks.survival.samplers import EventBalancedSampler, PartitionSampler
from tasks.survival.smart_cache import SmartCache
from tasks.survival.volumes import Volumes

# what each part takes of the data set's options
VOLUME_OPTIONS = ("image_size", "window", "spacing", "orientation", "cache_dir")
SMART_CACHE_OPTIONS = ("cache_rate", "replace_rate", "seed")


def take_options(options: dict, names: tuple[str, ...]) -> dict:
    """Those of these names, which are removed."""
    return {name: options.pop(name) for name in names if name in options}


class MultiGPUSurvivalDataset(Dataset):
    """Cases of one fold: image (1, X, Y, Z) float16, index (row of the cohort), time (years), event, error.

    With use_smart_cache each rank owns a part of the fold and keeps some of it in memory, see SmartCache.
    """

    def __init__(
        self,
        csv_path: str | Cohort,
        fold: str = "train",
        fold_column: str = "Fold_1",
        rows: np.ndarray | None = None,
        use_smart_cache: bool = False,
        num_workers: int = 2,
        event_balanced: bool = False,
        raise_errors: bool = True,
        **options,
    ):
        """csv_path: the table, or a Cohort that was read, of which `rows` are taken. Raises InputError.

        num_workers: threads that fill the smart cache. event_balanced: see EventBalancedSampler. raise_errors False
        puts an unreadable volume into the item as `error`, for a loop that ends all ranks together. options:
        image_size, window, spacing, orientation and cache_dir as in Volumes; cache_rate, replace_rate and seed as in
        SmartCache; all others as in read_cohort.
        """
        volume_options = take_options(options, VOLUME_OPTIONS)
        smart_cache_options = take_options(options, SMART_CACHE_OPTIONS)
        self.cohort = csv_path if isinstance(csv_path, Cohort) else read_cohort(csv_path, **options)
        self.rows = self._rows_with(fold, fold_column) if rows is None else rows
        self.volumes = Volumes(**volume_options)
        self.event_balanced = event_balanced
        self.raise_errors = raise_errors
        self.threads = max(1, limit_workers(num_workers))
        self.smart_cache = None
        if use_smart_cache:
            self.smart_cache = SmartCache(self.rows, self.load, threads=self.threads, **smart_cache_options)

    def _rows_with(self, label: str, fold_column: str) -> np.ndarray:
        """The rows with this label. Raises InputError."""
        cohort = self.cohort
        column = cohort.find_fold_column(fold_column)
        if column is None:
            raise InputError(f"{cohort.source}: no fold column {fold_column!r}; pass fold_column or rows")
        rows = np.flatnonzero(np.array(cohort.folds[column]) == label)
        if not len(rows):
            raise InputError(f"{cohort.source}: no rows with {label!r} in {fold_column}; pass another fold")
        return rows

    @property
    def changes(self) -> bool:
        """Whether items change from epoch to epoch, so that loading processes must not outlive one."""
        return self.smart_cache is not None

    def shutdown(self) -> None:
        """Stop the thread that reads replacements for the smart cache."""
        if self.smart_cache:
            self.smart_cache.shutdown()

    close = shutdown

    def load(self, row: int) -> dict:
        """One case.

        An unreadable volume is told in `error`: MONAI's thread would die of it, and its queue wait for ever.
        """
        cohort = self.cohort
        path = cohort.path[row]
        error = ""
        try:
            image = self.volumes.get(path)
        except Exception as reason:
            # MONAI wraps what happened in the names of its transforms
            while reason.__cause__ is not None:
                reason = reason.__cause__
            image = torch.zeros(self.volumes.shape, dtype=torch.float16)
            advice = "replace it or remove the row"
            error = f"{cohort.where(row)}: {path} cannot be used ({first_line(reason, 150, path)}); {advice}"

        item = {"image": image, "index": row, "error": error}
        if len(cohort.time):
            item |= {"time": float(cohort.time[row]), "event": bool(cohort.event[row])}
        return item

    def read_ahead(self) -> None:
        """Bring this rank's share of the cases into the disk cache, by threads."""
        rank, world_size = world()
        if self.volumes.cache.folder:
            with ThreadPoolExecutor(self.threads) as pool:
                list(pool.map(self.load, self.rows[rank::world_size].tolist()))

    def __len__(self) -> int:
        """Cases of an epoch of this rank with SmartCache, of all ranks without."""
        return self.smart_cache.cached if self.smart_cache else len(self.rows)

    def __getitem__(self, i: int) -> dict:
        item = self.smart_cache[i] if self.smart_cache else self.load(int(self.rows[i]))
        if item["error"] and self.raise_errors:
            raise InputError(item["error"])
        return item

    def train_sampler(self, batch_size: int, seed: int, accumulation: int, drop_last: bool) -> TrainBatchSampler:
        """What create_distributed_dataloader deals this data set out with."""
        rank, world_size = world()
        if self.smart_cache:
            return PartitionSampler(self.smart_cache, batch_size, rank, world_size, seed, accumulation, drop_last)
        if self.event_balanced:
            events = self.cohort.event[self.rows]
            return EventBalancedSampler(events, batch_size, rank, world_size, seed, accumulation, drop_last)
        return TrainBatchSampler(len(self), batch_size, rank, world_size, seed, accumulation, drop_last)
