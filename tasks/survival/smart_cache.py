"""A part of the training cases in memory, which changes from epoch to epoch (MONAI's SmartCacheDataset)."""

import math
import warnings
import weakref
from collections.abc import Callable

import numpy as np

from old.cli_utils import InputError
from old.distributed_utils import world
from old.phase_utils import doing


class SmartCache:
    """This rank's own part of some cases, of which it keeps cache_rate in memory.

    Each epoch goes through what is cached, and then replace_rate of it gives way to cases not seen for longest, read in
    the background. The same epoch always finds the same cases in the cache: so a resumed run sees what it would have
    seen.
    """

    def __init__(
        self,
        rows: np.ndarray,
        load: Callable[[int], dict],
        cache_rate: float = 0.5,
        replace_rate: float = 0.5,
        threads: int = 2,
        seed: int = 0,
    ):
        """rows: of all ranks. load: the item of a row. threads: so many load. Raises InputError."""
        from monai.data import partition_dataset

        rank, world_size = world()
        if not (0 < cache_rate <= 1 and 0 < replace_rate <= 1):
            raise InputError(f"--cache_rate {cache_rate}, --replace_rate {replace_rate}: must be above 0 and at most 1")
        if len(rows) < world_size:
            reason = f"{len(rows)} training cases for {world_size} processes"
            raise InputError(f"--use_smart_cache: {reason}; use fewer")
        shuffle_seed = seed % 2**32
        parts = partition_dataset(
            rows.tolist(), num_partitions=world_size, shuffle=True, seed=shuffle_seed, even_divisible=False
        )
        self.parts = parts
        self.rows = parts[rank]
        self.load = load
        self.threads = threads

        # as many are cached on every rank, though some have one case more
        self.cached = max(1, int(cache_rate * (len(rows) // world_size)))
        self.replaced = min(math.ceil(self.cached * replace_rate), len(self.rows) - self.cached)
        self.replace_rate = replace_rate
        self.longest_part = math.ceil(len(rows) / world_size)
        self.epoch = None
        self.items = None

    def epochs_until_all_seen(self) -> int:
        """Epochs after which each case of each rank was in the cache."""
        left = self.longest_part - self.cached
        step = min(self.replaced or self.cached, left)
        return 1 + (math.ceil(left / step) if step else 0)

    @doing("filling the cache")
    def set_epoch(self, epoch: int) -> None:
        """Bring the cache to an epoch: the next one by MONAI's replacement, another by filling it anew."""
        if epoch == self.epoch:
            return
        if self.epoch is not None and epoch == self.epoch + 1:
            if self.replaced:
                self.items.update_cache()
        elif self.items is None or self.replaced:
            self.shutdown()
            self.fill(epoch)
        self.epoch = epoch

    def rows_in_cache(self, places: np.ndarray, rank: int, epoch: int) -> np.ndarray:
        """The rows at some places of a rank's cache in an epoch."""
        part = np.array(self.parts[rank])
        replaced = min(math.ceil(self.cached * self.replace_rate), len(part) - self.cached)
        return part[(epoch * replaced + places) % len(part)]

    def fill(self, epoch: int) -> None:
        """Load the cases of an epoch, and start the thread that reads replacements."""
        from monai.data import SmartCacheDataset

        # half a case less than asked: MONAI rounds up what floats leave of the product
        replace_rate = (max(self.replaced, 1) - 0.5) / self.cached
        start = epoch * self.replaced % len(self.rows)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="cache_num is greater or equal")
            self.items = SmartCacheDataset(
                data=self.rows[start:] + self.rows[:start],
                transform=as_transform(self.load),
                progress=False,
                shuffle=False,
                cache_num=self.cached,
                replace_rate=replace_rate,
                copy_cache=False,
                num_init_workers=self.threads,
                num_replace_workers=self.threads,
            )

        # at the exit too: the thread would abort it
        if self.replaced:
            assert self.items._replace_num == self.replaced
            self.items.start()
            self.stop = weakref.finalize(self, self.items.shutdown)

    def __getitem__(self, i: int) -> dict:
        if self.items is None:
            self.set_epoch(0)
        return self.items[i]

    def shutdown(self) -> None:
        """Stop the thread that reads replacements."""
        if self.items is not None and self.replaced:
            self.stop()
        self.items = None
        self.epoch = None


def as_transform(load: Callable[[int], dict]):
    """The function as MONAI's Transform: it caches the output of that class only."""
    from monai.transforms import Transform

    class Load(Transform):
        def __call__(self, row: int) -> dict:
            return load(row)

    return Load()
