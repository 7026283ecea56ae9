"""How training cases are dealt out where each rank holds its own, and where every step shall have events."""

from collections.abc import Iterator

import numpy as np

from old.cli_utils import InputError
from old.sampler_utils import TrainBatchSampler, permute
from tasks.survival.smart_cache import SmartCache


class PartitionSampler(TrainBatchSampler):
    """Batches of cases of which each rank holds a part of its own, of the same length: places are the rank's.

    `samples` and `window` count all ranks, as in TrainBatchSampler; each step takes the same share from every rank.
    """

    def __init__(
        self,
        smart_cache: SmartCache,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        accumulation: int,
        drop_last: bool,
    ):
        cases = smart_cache.cached * world_size
        super().__init__(cases, batch_size, rank, world_size, seed, accumulation, drop_last)
        self.smart_cache = smart_cache

    def set_effective_batch(self, samples: int) -> None:
        # a rank has no more cases than the others
        if samples % self.world_size:
            reason = f"with --use_smart_cache each of the {self.world_size} processes has as many cases of a step"
            raise InputError(f"--effective_batch_size {samples}: {reason}; take a multiple of their number")
        super().set_effective_batch(samples)

    def set_position(self, epoch: int, samples: int = 0) -> None:
        self.smart_cache.set_epoch(epoch)
        super().set_position(epoch, samples)

    def __iter__(self) -> Iterator[list[int]]:
        # here, not in the generator: before any loading process is started
        self.smart_cache.set_epoch(self.epoch)
        return super().__iter__()

    def order(self, places: np.ndarray) -> np.ndarray:
        """The places in this rank's cache of some places of the epoch."""
        first = places[0] - places[0] % self.effective_batch_size
        samples, _ = self.step_sizes(first)
        rank_begin = first + samples * self.rank // self.world_size
        local = first // self.world_size + places - rank_begin
        return self.cached_places(local, self.rank)

    def cached_places(self, local: np.ndarray, rank: int) -> np.ndarray:
        """The places in a rank's cache of some places of its share of the epoch."""
        return permute(local, self.smart_cache.cached, self.seed * 1000003 + rank, self.epoch)

    def samples_of_all(self, begin: int, end: int) -> np.ndarray:
        """The cases, not the places, that all ranks have from one place of the epoch to another."""
        cases = []
        for first in range(begin, end, self.effective_batch_size):
            samples, _ = self.step_sizes(first)
            for rank in range(self.world_size):
                size = self._place(samples, rank + 1) - self._place(samples, rank)
                local = np.arange(size)
                local += first // self.world_size
                places = self.cached_places(local, rank)
                rows = self.smart_cache.rows_in_cache(places, rank, self.epoch)
                cases.append(rows)
        return np.concatenate(cases)


class EventBalancedSampler(TrainBatchSampler):
    """--event_balanced: every step gets its share of the events, and at least one while there are as many as steps.

    Otherwise TrainBatchSampler: each case once an epoch, the same steps at any world size.
    """

    def __init__(
        self,
        events: np.ndarray,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        accumulation: int = 1,
        drop_last: bool = False,
    ):
        super().__init__(len(events), batch_size, rank, world_size, seed, accumulation, drop_last)
        self.with_event = np.flatnonzero(events)
        self.without_event = np.flatnonzero(~events)
        self.known_epoch = None

    def order(self, places: np.ndarray) -> np.ndarray:
        """The cases at some places of the epoch."""
        if self.known_epoch != self.epoch:
            self.known_epoch = self.epoch
            self.epoch_order = self.order_epoch()
        return self.epoch_order[places]

    def order_epoch(self) -> np.ndarray:
        """The whole epoch: of each step first the cases with an event, then the others."""
        steps = self.steps_per_epoch()
        step_numbers = np.arange(steps + 1)
        case_ends = np.minimum(step_numbers * self.effective_batch_size, self.used)
        events = len(self.with_event)

        # so many events have been dealt out before each step
        if events >= steps:
            more = (events - steps) * (case_ends - step_numbers) // max(1, self.num_samples - steps)
            event_ends = step_numbers + more
        else:
            event_ends = events * step_numbers // steps
        other_ends = case_ends - event_ends

        with_event = self.shuffle(self.with_event, self.seed)
        without_event = self.shuffle(self.without_event, self.seed + 1)
        parts = []
        for k in range(steps):
            parts.append(with_event[event_ends[k] : event_ends[k + 1]])
            parts.append(without_event[other_ends[k] : other_ends[k + 1]])

        # what drop_last leaves out
        parts.append(with_event[event_ends[-1] :])
        parts.append(without_event[other_ends[-1] :])
        return np.concatenate(parts)

    def shuffle(self, cases: np.ndarray, seed: int) -> np.ndarray:
        """Some cases in a random order, a function of (seed, epoch)."""
        if not len(cases):
            return cases
        return cases[permute(np.arange(len(cases)), len(cases), seed, self.epoch)]
