"""The order of an epoch in which questions about one image come together, so that a step encodes it once for all."""

from typing import NamedTuple

import numpy as np

from old.sampler_utils import TrainBatchSampler, feistel, permute

# Groups whose sizes are looked up at once.
GROUPS_AT_ONCE = 1 << 20


class Groups(NamedTuple):
    """Some groups: the image of each, how many of its questions come in groups before, and how many in this one."""

    image: np.ndarray
    before: np.ndarray
    size: np.ndarray


class ImageGroups:
    """The questions of each image in groups of at most `size`, which an epoch keeps together.

    An image's questions are shuffled by (seed, epoch, image) and cut into groups, and all groups are shuffled by (seed,
    epoch). Kept in memory are 8 bytes for each group, and for each question where those of an image are no neighbours.
    """

    def __init__(
        self,
        image_of: np.ndarray,
        size: int,
    ):
        """image_of: integers (N,), which image each question is about."""
        self.size = size
        self.sorted = None
        self.first = begins_of_runs(image_of)

        # the questions of an image one after another
        images = image_of[self.first]
        different = np.unique(images)
        if len(different) < len(images):
            self.sorted = np.argsort(image_of, kind="stable")
            self.first = begins_of_runs(image_of[self.sorted])

        # how many they are, and each image's groups among those of all
        ends = np.append(self.first[1:], len(image_of))
        self.questions = ends - self.first
        groups = -(-self.questions // size)
        self.end = np.cumsum(groups)
        self.begin = self.end - groups
        self.count = int(self.end[-1])

        # the epoch that `ends` is of, which is made when it is needed
        self.epoch = None
        self.ends = None

    def describe(self, numbers: np.ndarray) -> Groups:
        """Which questions some groups hold."""
        image = np.searchsorted(self.end, numbers, "right")
        before = numbers - self.begin[image]
        before *= self.size
        size = self.questions[image] - before
        return Groups(image, before, size.clip(max=self.size))

    def shuffle(
        self,
        seed: int,
        epoch: int,
    ) -> None:
        """Let `ends` say at which place of the epoch each of its shuffled groups ends."""
        if self.epoch == (seed, epoch):
            return
        sizes = np.empty(self.count, np.int64)
        for begin in range(0, self.count, GROUPS_AT_ONCE):
            end = min(begin + GROUPS_AT_ONCE, self.count)
            places = np.arange(begin, end)
            numbers = permute(places, self.count, seed, epoch)
            sizes[begin:end] = self.describe(numbers).size
        self.ends = np.cumsum(sizes, out=sizes)
        self.epoch = (seed, epoch)

    def order(
        self,
        places: np.ndarray,
        seed: int,
        epoch: int,
    ) -> np.ndarray:
        """The questions at some places of the epoch; int64 in and out."""
        self.shuffle(seed, epoch)
        group_places = np.searchsorted(self.ends, places, "right")
        different, group_of = np.unique(group_places, return_inverse=True)
        numbers = permute(different, self.count, seed, epoch)
        groups = self.describe(numbers)

        # each place as one of its image's questions
        begins = self.ends[different] - groups.size
        within = places - begins[group_of]
        within += groups.before[group_of]

        # which are shuffled
        image = groups.image[group_of]
        shuffled = permute_each(within, self.questions[image], image, seed, epoch)
        questions = self.first[image] + shuffled
        if self.sorted is None:
            return questions
        return self.sorted[questions]


def permute_each(
    positions: np.ndarray,
    sizes: np.ndarray,
    images: np.ndarray,
    seed: int,
    epoch: int,
) -> np.ndarray:
    """Each position's place in a shuffle of range(size) that its image has for itself; all int64 of one shape."""
    # not the keys of the groups' shuffle, and for each image others
    sequence = np.random.SeedSequence([seed % 2**63, epoch, 1])
    keys = sequence.generate_state(8, np.uint64)
    keys = keys[:, None] ^ (images.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9))
    keys ^= keys >> np.uint64(31)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(29)

    # values that fall in [size, 4**bits) walk on until they land inside
    bits = np.ceil(np.log2(np.maximum(sizes, 2)) / 2)
    bits = bits.astype(np.uint64)
    values = positions.astype(np.uint64)
    outside = np.flatnonzero(sizes > 0)
    while len(outside):
        values[outside] = feistel(values[outside], keys[:, outside], bits[outside])
        landed = values[outside] < sizes[outside]
        outside = outside[~landed]
    return values.astype(np.int64)


def begins_of_runs(values: np.ndarray) -> np.ndarray:
    """Where equal values begin; int64."""
    changed = values[1:] != values[:-1]
    places = np.flatnonzero(changed)
    return np.append(0, places + 1)


def order_facts(
    sampler: TrainBatchSampler,
    questions_per_image: int,
) -> dict:
    """What an epoch's order depends on beside its samples and the batch, which a resumed run must share.

    Where questions come together, also the number of images: which are copies, a check tells that may be skipped.
    """
    facts = {"seed": sampler.seed}
    facts["questions_per_image"] = questions_per_image
    if sampler.groups is not None:
        facts["training_images"] = len(sampler.groups.first)
    return facts
