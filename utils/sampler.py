"""Batch samplers for training and evaluation.

The samples of a micro-batch depend on the seed and the epoch, but not on the number of ranks.
"""

import math
from collections.abc import Iterator
from itertools import accumulate, islice, pairwise

import numpy as np

# minimum number of samples per call of order(), because a smaller call is mostly overhead
POSITIONS_PER_CALL = 2048


class Index(int):
    """A sample index that also holds the epoch, so that augmentation can depend on (seed, epoch, index)."""

    epoch: int = 0


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the sample indices at `positions` in the shuffled order of an epoch; both are int64 arrays.

    A keyed bijection (Feistel network of 8 rounds with cycle walking) can compute any part of the order without storing
    the rest.
    """
    # the Feistel network permutes range(4**bits), which contains range(size)
    keys = np.random.SeedSequence([seed % 2**63, epoch]).generate_state(8, np.uint64)
    bits = math.ceil(math.log2(max(size, 2)) / 2)
    values = positions.astype(np.uint64)

    outside = np.ones(values.shape, bool)
    while outside.any():
        values[outside] = _feistel(values[outside], keys, bits)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    shift, mask = np.uint64(bits), np.uint64(2**bits - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = mixed ^ (mixed >> np.uint64(32))
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right


class ImageGroups:
    """Shuffles questions in groups that share an image, so that each step encodes fewer images.

    The questions about each image are shuffled and cut into groups of at most `size`; then the groups are shuffled.
    """

    def __init__(self, image_of: np.ndarray, size: int):
        """image_of: (N,) integers, the image index of each question. size: maximum number of questions in a group."""
        self.size, self.sorted = size, None
        starts = self._starts(image_of)
        if len(np.unique(image_of[starts])) < len(starts):
            self.sorted = np.argsort(image_of, kind="stable")
            starts = self._starts(image_of[self.sorted])
        # per image: index of the first question, number of questions, and cumulative number of question groups
        self.first, self.questions = starts, np.diff(starts, append=len(image_of))
        self.last_group = np.cumsum(-(-self.questions // size))
        self.epoch: tuple[int, int] | None = None

    @staticmethod
    def _starts(image_of: np.ndarray) -> np.ndarray:
        return np.append(0, np.flatnonzero(image_of[1:] != image_of[:-1]) + 1)

    def _describe(self, groups: np.ndarray) -> tuple[np.ndarray, ...]:
        """For each group, return its image, how many of the image's questions precede it, and how many it has."""
        image = np.searchsorted(self.last_group, groups, "right")
        before = (groups - self.last_group[image]) * self.size - (-self.questions[image] // self.size) * self.size
        return image, before, np.minimum(self.questions[image] - before, self.size)

    def order(self, positions: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        count = self.last_group[-1]
        if self.epoch != (seed, epoch):
            self.ends, self.epoch = np.empty(count, np.int64), (seed, epoch)
            for begin in range(0, count, 2**20):
                part = np.arange(begin, min(begin + 2**20, count))
                self.ends[part] = self._describe(permute(part, count, seed, epoch))[2]
            np.cumsum(self.ends, out=self.ends)
        shuffled, group_of = np.unique(np.searchsorted(self.ends, positions, "right"), return_inverse=True)
        images, before, size = self._describe(permute(shuffled, count, seed, epoch))
        within = positions - (self.ends[shuffled] - size - before)[group_of]
        questions, image_of = np.empty_like(positions), images[group_of]
        by_image = np.argsort(image_of, kind="stable")
        for part in np.split(by_image, np.flatnonzero(np.diff(image_of[by_image])) + 1):
            image = image_of[part[0]]
            own = np.random.default_rng([seed % 2**63, epoch, image]).permutation(self.questions[image])
            questions[part] = self.first[image] + own[within[part]]
        return questions if self.sorted is None else self.sorted[questions]


class TrainBatchSampler:
    """Yields this rank's micro-batches in an epoch as lists of indices.

    Each optimizer step takes the next effective_batch_size samples of the epoch and cuts them into micro-batches. The
    last step of an epoch and the last micro-batch of a step may be smaller.
    """

    def __init__(
        self,
        num_samples: int,
        micro_batch_size: int,
        effective_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        gpu_shares: list[int] | None = None,
        groups: ImageGroups | None = None,
    ):
        self.num_samples = num_samples
        self.micro_batch_size = micro_batch_size
        self.effective_batch_size = effective_batch_size
        self.rank = rank
        self.seed = seed
        self.groups = groups
        # rank r computes the part of a step's micro-batches from fraction ends[r] / ends[-1] to ends[r + 1] / ends[-1]
        self.ends = [0, *accumulate(gpu_shares or [1] * world_size)]
        self.set_position(0)

    def set_position(self, epoch: int, samples: int = 0) -> None:
        """Make the next iteration start in epoch `epoch`, after `samples` samples over all ranks."""
        self.epoch = epoch
        self.start = samples
        self.epoch_order: np.ndarray | None = None

    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_samples / self.effective_batch_size)

    def share(self, first: int) -> tuple[int, range]:
        """Return a step's number of samples over all ranks and the numbers of this rank's micro-batches.

        first: number of samples in the epoch before the step.
        """
        samples = min(self.effective_batch_size, self.num_samples - first)
        micro_batches = math.ceil(samples / self.micro_batch_size)
        begin, end = (micro_batches * end // self.ends[-1] for end in self.ends[self.rank : self.rank + 2])
        return samples, range(begin, end)

    def most_micro_batches(self, first: int) -> int:
        micro_batches = math.ceil(min(self.effective_batch_size, self.num_samples - first) / self.micro_batch_size)
        ends = [micro_batches * end // self.ends[-1] for end in self.ends]
        return max(end - begin for begin, end in pairwise(ends))

    def order(self, positions: np.ndarray) -> np.ndarray:
        if self.groups:
            return self.groups.order(positions, self.seed, self.epoch)
        return permute(positions, self.num_samples, self.seed, self.epoch)

    def global_batch(self, first: int) -> np.ndarray:
        """Return the sample indices (int64) of a step over all ranks. first: number of samples before the step."""
        if self.epoch_order is None:
            self.epoch_order = self.order(np.arange(self.num_samples))
        return self.epoch_order[first : first + self.effective_batch_size]

    def __len__(self) -> int:
        firsts = range(self.start, self.num_samples, self.effective_batch_size)
        return sum(max(1, len(self.share(first)[1])) for first in firsts)

    def __iter__(self) -> Iterator[list[int]]:
        positions: list[np.ndarray] = []
        for first in range(self.start, self.num_samples, self.effective_batch_size):
            samples, micro_batches = self.share(first)
            # DDP needs a pass on every rank, so ranks without micro-batches compute the first micro-batch with weight 0
            for micro_batch in micro_batches or [0]:
                begin = first + micro_batch * self.micro_batch_size
                positions.append(np.arange(begin, min(begin + self.micro_batch_size, first + samples)))
            if len(positions) * self.micro_batch_size >= POSITIONS_PER_CALL or first + samples == self.num_samples:
                yield from self._batches(positions)
                positions = []

    def _batches(self, positions: list[np.ndarray]) -> Iterator[list[int]]:
        samples = iter(self.order(np.concatenate(positions)).tolist())
        for part in positions:
            batch = [Index(index) for index in islice(samples, len(part))]
            for index in batch:
                index.epoch = self.epoch
            yield batch


class EvalBatchSampler:
    """Yields this rank's evaluation batches; over all ranks, every sample occurs exactly once.

    Batches are the same for any number of ranks, so the results are bit-identical. Small data sets get smaller batches,
    so that up to 8 ranks have work.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1):
        self.num_samples = num_samples
        self.batch_size = max(1, min(batch_size, num_samples // 8))
        self.firsts = range(rank * self.batch_size, num_samples, world_size * self.batch_size)

    def __len__(self) -> int:
        return len(self.firsts)

    def __iter__(self) -> Iterator[list[int]]:
        for first in self.firsts:
            yield list(range(first, min(first + self.batch_size, self.num_samples)))
