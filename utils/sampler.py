"""Which sample goes where: the order of an epoch, the micro-batches of a step, each rank's share of a step and an
evaluation.

The order is a function of (seed, epoch). A step's samples are cut into micro-batches of fixed size and content,
and ranks take whole micro-batches: how many ranks there are changes who computes a micro-batch, never what is in it.
"""

import math
from collections.abc import Iterator
from itertools import accumulate, islice, pairwise

import numpy as np

# how many samples one call of order() is for: for 1000 it takes about four times as long as for 8
AT_ONCE = 2048


class Index(int):
    """A training sample's index that knows its epoch, for augmentation as a function of (seed, epoch, sample)."""

    epoch: int = 0


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The samples at some positions of an epoch's shuffle of range(size); int64 in and out, of one shape.

    A keyed bijection (Feistel network of 8 rounds with cycle walking): any part of the order is computed alone, so
    shuffling 300 million samples takes no memory.
    """
    # the shuffle's keys, and a range of 4**bits numbers that holds all samples
    keys = np.random.SeedSequence([seed % 2**63, epoch]).generate_state(8, np.uint64)
    bits = math.ceil(math.log2(max(size, 2)) / 2)
    values = positions.astype(np.uint64)

    # values that fall in [size, 4**bits) walk on until they land inside
    outside = np.ones(values.shape, bool)
    while outside.any():
        values[outside] = _feistel(values[outside], keys, bits)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """One pass through the network: a permutation of range(4**bits)."""
    shift, mask = np.uint64(bits), np.uint64(2**bits - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = mixed ^ (mixed >> np.uint64(32))
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right


class ImageGroups:
    """Questions of one image together: an order of an epoch in which a step encodes an image once for all of them.

    By (seed, epoch) an image's questions are shuffled and cut into groups of at most `size`, and then all groups are
    shuffled. In memory are 8 bytes for each group, and for each question where an image's are not side by side.
    """

    def __init__(self, image_of: np.ndarray, size: int):
        """image_of: integers (N,), which image each question is about."""
        self.size, self.sorted = size, None
        starts = self._starts(image_of)
        if len(np.unique(image_of[starts])) < len(starts):
            self.sorted = np.argsort(image_of, kind="stable")
            starts = self._starts(image_of[self.sorted])
        # of each image: its first question, how many there are, and the groups up to its last
        self.first, self.questions = starts, np.diff(starts, append=len(image_of))
        self.last_group = np.cumsum(-(-self.questions // size))
        self.epoch: tuple[int, int] | None = None

    @staticmethod
    def _starts(image_of: np.ndarray) -> np.ndarray:
        return np.append(0, np.flatnonzero(image_of[1:] != image_of[:-1]) + 1)

    def _describe(self, groups: np.ndarray) -> tuple[np.ndarray, ...]:
        """(image, questions of it in earlier groups, questions in this group) of each group."""
        image = np.searchsorted(self.last_group, groups, "right")
        before = (groups - self.last_group[image]) * self.size - (-self.questions[image] // self.size) * self.size
        return image, before, np.minimum(self.questions[image] - before, self.size)

    def order(self, places: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """The questions at some places of the epoch; int64 in and out."""
        count = self.last_group[-1]
        if self.epoch != (seed, epoch):
            # where each of the shuffled groups ends
            self.ends, self.epoch = np.empty(count, np.int64), (seed, epoch)
            for begin in range(0, count, 2**20):
                part = np.arange(begin, min(begin + 2**20, count))
                self.ends[part] = self._describe(permute(part, count, seed, epoch))[2]
            np.cumsum(self.ends, out=self.ends)
        shuffled, group_of = np.unique(np.searchsorted(self.ends, places, "right"), return_inverse=True)
        images, before, size = self._describe(permute(shuffled, count, seed, epoch))
        within = places - (self.ends[shuffled] - size - before)[group_of]
        questions, image_of = np.empty_like(places), images[group_of]
        by_image = np.argsort(image_of, kind="stable")
        for part in np.split(by_image, np.flatnonzero(np.diff(image_of[by_image])) + 1):
            image = image_of[part[0]]
            own = np.random.default_rng([seed % 2**63, epoch, image]).permutation(self.questions[image])
            questions[part] = self.first[image] + own[within[part]]
        return questions if self.sorted is None else self.sorted[questions]


class TrainBatchSampler:
    """This rank's leaves of an epoch, one batch each.

    Optimizer step k takes the samples k * effective_batch_size ... of the epoch's order, the last step what is left.
    Its micro-batches hold micro_batch_size samples each, the last one what is left. gpu_shares: how many micro-batches
    of a step each rank gets,
    in proportion; None: equally many. groups: which samples stay together in the epoch's order.
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
        # rank r's micro-batches lie between ends[r] and ends[r + 1], in parts of ends[-1]
        self.ends = [0, *accumulate(gpu_shares or [1] * world_size)]
        self.set_position(0)

    def set_position(self, epoch: int, samples: int = 0) -> None:
        """The next iteration is epoch `epoch`, from the step that follows `samples` samples (of all ranks)."""
        self.epoch = epoch
        self.start = samples
        self.whole: np.ndarray | None = None

    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return math.ceil(self.num_samples / self.effective_batch_size)

    def share(self, first: int) -> tuple[int, range]:
        """(samples of all ranks, numbers of this rank's micro-batches) of the step that begins after `first`
        samples."""
        samples = min(self.effective_batch_size, self.num_samples - first)
        micro_batches = math.ceil(samples / self.micro_batch_size)
        begin, end = (micro_batches * end // self.ends[-1] for end in self.ends[self.rank : self.rank + 2])
        return samples, range(begin, end)

    def most_micro_batches(self, first: int) -> int:
        """The micro-batches of the rank that has most of them in the step that begins after `first` samples."""
        micro_batches = math.ceil(min(self.effective_batch_size, self.num_samples - first) / self.micro_batch_size)
        ends = [micro_batches * end // self.ends[-1] for end in self.ends]
        return max(end - begin for begin, end in pairwise(ends))

    def order(self, positions: np.ndarray) -> np.ndarray:
        """The samples at some positions of the epoch; int64 in and out."""
        if self.groups:
            return self.groups.order(positions, self.seed, self.epoch)
        return permute(positions, self.num_samples, self.seed, self.epoch)

    def global_batch(self, first: int) -> np.ndarray:
        """What all ranks take in the step after `first` samples; int64. Keeps the epoch's order, 8 bytes a sample."""
        if self.whole is None:
            self.whole = self.order(np.arange(self.num_samples))
        return self.whole[first : first + self.effective_batch_size]

    def __len__(self) -> int:
        firsts = range(self.start, self.num_samples, self.effective_batch_size)
        return sum(max(1, len(self.share(first)[1])) for first in firsts)

    def __iter__(self) -> Iterator[list[int]]:
        positions: list[np.ndarray] = []
        for first in range(self.start, self.num_samples, self.effective_batch_size):
            samples, micro_batches = self.share(first)
            # DDP needs a pass of each rank: one without a micro-batch computes the step's first, which counts nothing
            for micro_batch in micro_batches or [0]:
                begin = first + micro_batch * self.micro_batch_size
                positions.append(np.arange(begin, min(begin + self.micro_batch_size, first + samples)))
            if len(positions) * self.micro_batch_size >= AT_ONCE or first + samples == self.num_samples:
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
    """This rank's batches of an evaluation: every sample once, none repeated, none left out.

    The batches are cut without regard to the world size and dealt out in turn, so that a sample is always computed
    beside the same neighbours and its result is the same to the bit. Small sets are cut finer, so that up to 8 ranks
    have work.
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
