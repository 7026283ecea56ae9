"""utils/sampler.py: an epoch's order, a step's micro-batches and the ranks' shares, compared with plain enumeration."""

import pickle

import numpy as np
import pytest
from scipy import stats

from utils.sampler import EvalBatchSampler, ImageGroups, Index, TrainBatchSampler, permute

# the image of each of 53 questions
IMAGES = np.repeat(np.arange(9), [1, 2, 3, 4, 5, 6, 7, 8, 17])


def epoch_of(world_size: int, shares=None, groups=None, start: int = 0) -> list[list]:
    """The micro-batches of each step of an epoch of 53 samples, collected from all ranks."""
    steps: dict[int, dict[int, list]] = {}
    for rank in range(world_size):
        sampler = TrainBatchSampler(53, 3, 14, rank, world_size, seed=7, gpu_shares=shares, groups=groups)
        sampler.set_position(3, start)
        batches = iter(sampler)
        assert len(sampler) == len(list(sampler))
        for first in range(start, 53, 14):
            samples, numbers = sampler.share(first)
            assert samples == min(14, 53 - first)
            assert len(numbers) <= sampler.most_micro_batches(first)
            for number in numbers or [None]:
                batch = next(batches)
                assert all(index.epoch == 3 for index in batch)
                if number is not None:
                    steps.setdefault(first, {})[number] = batch
    return [[step[number] for number in sorted(step)] for _, step in sorted(steps.items())]


@pytest.mark.parametrize(("world_size", "shares"), [(2, None), (8, None), (3, [7, 0, 2])])
def test_micro_batches_do_not_depend_on_ranks_shares_or_resuming(world_size, shares):
    expected = epoch_of(1)
    assert epoch_of(world_size, shares) == expected
    assert epoch_of(world_size, shares, start=28) == expected[2:]
    assert [len(step) for step in expected] == [5, 5, 5, 4]
    assert sorted(index for step in expected for batch in step for index in batch) == list(range(53))


def test_ranks_get_micro_batches_in_proportion_to_their_shares():
    samplers = [TrainBatchSampler(600, 1, 600, rank, 3, gpu_shares=[7, 3, 2]) for rank in range(3)]
    assert [len(sampler.share(0)[1]) for sampler in samplers] == [350, 150, 100]
    assert samplers[2].most_micro_batches(0) == 350


@pytest.mark.parametrize("size", [1, 2, 17, 1000])
def test_permute_is_a_permutation_for_each_seed_and_epoch(size):
    orders = {tuple(permute(np.arange(size), size, seed, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0), (-1, 0))}
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert size < 4 or len(orders) == 4


def test_permute_keeps_the_order_of_older_versions():
    """Checkpoints do not save the order, so these numbers must never change."""
    assert permute(np.arange(5), 12, 5, 3).tolist() == [3, 11, 6, 7, 9]
    assert permute(np.arange(3), 3 * 10**8, 5, 3).tolist() == [104838487, 173449666, 281620227]


def test_permute_is_uniform():
    """Each of 5 samples is at each of 5 positions about equally often."""
    orders = np.array([permute(np.arange(5), 5, seed, 0) for seed in range(2000)])
    counts = [(orders == sample).sum(0) for sample in range(5)]
    # the distances have 16 degrees of freedom instead of 24
    assert stats.chisquare(np.ravel(counts), ddof=8).pvalue > 0.001


@pytest.mark.parametrize("image_of", [IMAGES, np.random.default_rng(0).permutation(IMAGES)])
def test_questions_about_an_image_stay_together(image_of):
    """Whether or not an image's questions are adjacent in the data set."""
    groups = ImageGroups(image_of, 4)
    order = np.concatenate([groups.order(np.arange(first, min(first + 3, 53)), 7, 3) for first in range(0, 53, 3)])
    assert sorted(order) == list(range(53))
    # the image changes at most once per group of 4, and less often where two groups of one image are adjacent
    changes = 1 + int((np.diff(image_of[order]) != 0).sum())
    assert 9 < changes <= sum(-(-count // 4) for count in np.bincount(image_of))
    assert list(groups.order(np.arange(53), 7, 4)) != list(order)
    assert epoch_of(3, groups=ImageGroups(image_of, 4)) == epoch_of(1, groups=ImageGroups(image_of, 4))


@pytest.mark.parametrize("size", [0, 8, 30])
def test_evaluation_batches_cover_each_sample_once_on_any_number_of_ranks(size):
    expected = [tuple(batch) for batch in EvalBatchSampler(size, 4)]
    for world_size in (2, 3, 5):
        parts = [list(map(tuple, EvalBatchSampler(size, 4, rank, world_size))) for rank in range(world_size)]
        assert sorted(batch for part in parts for batch in part) == expected
    assert [index for batch in expected for index in batch] == list(range(size))
    assert len(EvalBatchSampler(size, 4)) == len(expected)


def test_pickled_index_keeps_its_epoch():
    """DataLoader sends indices to its workers by pickle."""
    index = Index(5)
    index.epoch = 2
    copy = pickle.loads(pickle.dumps(index))
    assert (copy, copy.epoch, [10, 11, 12, 13, 14, 15][copy]) == (5, 2, 15)
