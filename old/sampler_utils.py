"""Which sample goes where: the order of an epoch, and each rank's share of a step and of an evaluation.

The order is a function of (seed, epoch) and the effective batch, so that the number of processes changes nothing.
"""

import hashlib
import math
from collections.abc import Iterator

import numpy as np

# Places of an epoch whose samples are looked up at once for their digests.
PLACES_AT_ONCE = 4096


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The samples at some positions of an epoch's shuffle of range(size); int64 in and out, of one shape.

    A keyed bijection (Feistel network of 8 rounds with cycle walking): any part of the order is computed alone, so
    shuffling 300 million samples takes no memory.
    """
    bits = math.ceil(math.log2(max(size, 2)) / 2)
    # the shuffle's keys, and a range of 4**bits numbers that holds all samples
    sequence = np.random.SeedSequence([seed % 2**63, epoch])
    keys = sequence.generate_state(8, np.uint64)
    values = positions.astype(np.uint64)

    # values that fall in [size, 4**bits) walk on until they land inside
    outside = np.ones(values.shape, bool)
    while outside.any():
        values[outside] = feistel(values[outside], keys, bits)
        outside = values >= size
    return values.astype(np.int64)


def feistel(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """One pass through the network: a permutation of range(4**bits)."""
    shift = np.uint64(bits)
    mask = np.uint64(2**bits - 1)
    left = values >> shift
    right = values & mask
    for key in keys:
        mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed ^ (mixed >> np.uint64(29))
        mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
        mixed = mixed ^ (mixed >> np.uint64(32))
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right


class TrainBatchSampler:
    """This rank's batches of an epoch, a function of (seed, epoch) and of the effective batch, not of the world size.

    Optimizer step k sees the samples k * effective_batch ... of the epoch's order, however batch_size x accumulation x
    world_size make up the effective batch. The ranks' shares are disjoint and contiguous. The last step holds what is
    left (a rank without a share of it is given one sample to compute, for which `step_sizes` says 0). With drop_last
    every batch is full, and what is left below one batch of all ranks is left out: that does depend on the world size.
    After `set_effective_batch` the shares need not be equal, nor the batches of the ranks equally many.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        accumulation: int = 1,
        drop_last: bool = False,
    ):
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.effective_batch_size = batch_size * world_size * accumulation

        # samples of an epoch that are used, and where in which epoch the next iteration begins
        self.drop_last = drop_last
        remainder = num_samples % (batch_size * world_size) if drop_last else 0
        self.used = num_samples - remainder
        self.epoch = 0
        self.start = 0

    def set_effective_batch(self, samples: int) -> None:
        """Let an optimizer step have so many samples of all ranks, a batch still at most batch_size."""
        self.effective_batch_size = samples
        if self.drop_last:
            self.used = self.num_samples - self.num_samples % samples

    def set_position(self, epoch: int, samples: int = 0) -> None:
        """The next iteration is epoch `epoch`, from the step that follows `samples` samples (of all ranks)."""
        self.epoch = epoch
        self.start = samples

    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return math.ceil(self.used / self.effective_batch_size)

    def step_sizes(self, first: int) -> tuple[int, int]:
        """(samples of all ranks, samples of this rank) of the optimizer step that starts after `first` samples."""
        samples = min(self.effective_batch_size, self.used - first)
        begin = self._place(samples, self.rank)
        end = self._place(samples, self.rank + 1)
        return samples, end - begin

    def step_digests(self, first: int) -> Iterator[str]:
        """Of each optimizer step from the one that starts after `first` samples on: eight letters of its samples.

        They tell a step's samples, of all ranks and in their order, from any others, and do not depend on the ranks.
        """
        # the order of many steps at once costs about as much as that of one
        size = self.effective_batch_size
        steps = max(1, PLACES_AT_ONCE // size)
        for begin in range(first, self.used, steps * size):
            end = min(begin + steps * size, self.used)
            samples = self.order(np.arange(begin, end))
            for place in range(0, len(samples), size):
                step = samples[place : place + size]
                content = step.astype("<i8").tobytes()
                yield hashlib.blake2b(content, digest_size=4).hexdigest()

    def _place(self, samples: int, rank: int) -> int:
        """Where a rank's share begins among the samples of a step."""
        return samples * rank // self.world_size

    def __len__(self) -> int:
        samples = self.used - self.start
        full_steps, rest = divmod(samples, self.effective_batch_size)
        last = self._batches(rest) if rest else 0
        return full_steps * self._batches(self.effective_batch_size) + last

    def _batches(self, samples: int) -> int:
        """This rank's batches of a step of so many samples; one for a rank without a share."""
        begin = self._place(samples, self.rank)
        end = self._place(samples, self.rank + 1)
        local = end - begin
        return max(1, math.ceil(local / self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.start, self.used, self.effective_batch_size):
            samples, local = self.step_sizes(first)

            # a rank without a share computes the step's first sample
            begin = first
            if local:
                begin += self._place(samples, self.rank)
            end = begin + max(1, local)
            for place in range(begin, end, self.batch_size):
                batch_end = min(place + self.batch_size, end)
                places = np.arange(place, batch_end)
                yield self.order(places).tolist()

    def order(self, places: np.ndarray) -> np.ndarray:
        """The samples at some consecutive places of the epoch."""
        return permute(places, self.num_samples, self.seed, self.epoch)


class EvalBatchSampler:
    """This rank's batches of an evaluation: every sample once, none repeated, none left out.

    The batches are cut without regard to the world size and dealt out in turn, so that a sample is always computed
    beside the same neighbours and its result is the same to the bit. Small sets are cut finer, so that up to 8 ranks
    have work.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
    ):
        self.num_samples = num_samples
        self.batch_size = max(1, min(batch_size, num_samples // 8))
        begin = rank * self.batch_size
        stride = world_size * self.batch_size
        self.firsts = range(begin, num_samples, stride)

    def __len__(self) -> int:
        return len(self.firsts)

    def __iter__(self) -> Iterator[list[int]]:
        for first in self.firsts:
            end = min(first + self.batch_size, self.num_samples)
            yield list(range(first, end))
