"""Intervals by case: how often they hold the truth, against formulas that are known, and what they cost."""

import math
import time
from functools import partial

import numpy as np
import pytest
from scipy.stats import beta, norm, rankdata
from scipy.stats import t as student_t

from old.interval_utils import interval, interval_of_mean

SIMULATIONS = 500


def draw_cases(rng, patients: int) -> np.ndarray:
    """1 to 8 rows of each patient."""
    return np.repeat(np.arange(patients), rng.integers(1, 9, patients))


def draw_right(rng, patients: int, share: float, alike: float) -> tuple[np.ndarray, np.ndarray]:
    """Answers right in this share; alike: the correlation of a patient's rows."""
    cases = draw_cases(rng, patients)
    strength = 1 / alike - 1
    right = share * strength
    wrong = strength - right
    level = rng.beta(right, wrong, patients)
    drawn = rng.random(len(cases))
    right = drawn < level[cases]
    return right.astype(float), cases


def draw_dice(rng, patients: int, missed: float) -> tuple[np.ndarray, np.ndarray]:
    """Dice with a mode at 0 (this share of the masks is missed) and one around 0.8, which differs by patient."""
    cases = draw_cases(rng, patients)
    level = rng.beta(12, 3, patients)[cases]
    dice = rng.beta(20 * level, 20 * (1 - level))
    lost = rng.beta(2 * missed, 2 * (1 - missed), patients)
    drawn = rng.random(len(cases))
    dice[drawn < lost[cases]] = 0
    return dice, cases


def auroc(scores: np.ndarray, positive: np.ndarray, rows: np.ndarray) -> float:
    """The area under the ROC curve of some rows, by ranks; nan without both classes."""
    positive = positive[rows]
    above = positive.sum()
    below = len(positive) - above
    if not above or not below:
        return math.nan
    ranks = rankdata(scores[rows])
    least = above * (above + 1) / 2
    return (ranks[positive].sum() - least) / (above * below)


# how a test set is drawn, and the mean over all possible patients
MEANS = {
    "right in 0.97, 60 patients": (draw_right, {"patients": 60, "share": 0.97, "alike": 0.1}, 0.97),
    "right in 0.97, 300 patients": (draw_right, {"patients": 300, "share": 0.97, "alike": 0.2}, 0.97),
    "right in 0.9, 20 patients": (draw_right, {"patients": 20, "share": 0.9, "alike": 0.1}, 0.9),
    "right in 0.8, 60 patients": (draw_right, {"patients": 60, "share": 0.8, "alike": 0.1}, 0.8),
    "Dice, a third missed, 20 patients": (draw_dice, {"patients": 20, "missed": 0.3}, 0.56),
    "Dice, a third missed, 60 patients": (draw_dice, {"patients": 60, "missed": 0.3}, 0.56),
    "Dice, a third missed, 300 patients": (draw_dice, {"patients": 300, "missed": 0.3}, 0.56),
    "Dice, few missed, 60 patients": (draw_dice, {"patients": 60, "missed": 0.05}, 0.76),
}


@pytest.mark.parametrize("name", MEANS)
def test_the_interval_of_a_mean_holds_the_truth_in_95_of_100_test_sets(name):
    draw, kind, truth = MEANS[name]
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(SIMULATIONS):
        values, cases = draw(rng, **kind)
        low, high = interval_of_mean(values, cases)
        held += low <= truth <= high
    share = held / SIMULATIONS
    print(f"{name}: {share:.3f}")
    assert 0.93 <= share <= 0.97


@pytest.mark.soak
@pytest.mark.parametrize(("studies", "positive_share"), [(100, 0.3), (100, 0.5), (300, 0.2)])
def test_the_interval_of_an_auroc_holds_the_truth_in_95_of_100_test_sets(studies, positive_share):
    rng = np.random.default_rng(0)
    truth = 0.94
    apart = math.sqrt(2) * norm.ppf(truth)
    held = 0
    for _ in range(SIMULATIONS):
        # up to two studies of a patient, alike
        cases = rng.integers(0, studies, studies)
        ill = rng.random(studies) < positive_share
        positive = ill[cases]
        own = rng.standard_normal(studies)
        noise = own[cases] + rng.standard_normal(studies)
        scores = apart * positive + math.sqrt(0.5) * noise
        low, high = interval(partial(auroc, scores, positive), cases)
        held += low <= truth <= high
    share = held / SIMULATIONS
    print(f"AUROC {truth}, {studies} studies, {positive_share} positive: {share:.3f}")
    assert 0.93 <= share <= 0.97


def test_rows_of_their_own_give_the_binomial_interval():
    """Each row its own case: Clopper and Pearson's, but for the freedom that the variance takes."""
    values = np.repeat([1.0, 0.0], [90, 10])
    low, high = interval_of_mean(values, np.arange(100))
    # that of 90 of 100, as tables have it, is 0.8238 to 0.9510
    assert low == pytest.approx(0.8238, abs=0.002)
    assert high == pytest.approx(0.9510, abs=0.002)

    quantile = student_t.ppf(0.975, 99)
    rows = 99 * (norm.ppf(0.975) / quantile) ** 2
    assert low == pytest.approx(beta.ppf(0.025, 0.9 * rows, 0.1 * rows + 1))
    assert high == pytest.approx(beta.ppf(0.975, 0.9 * rows + 1, 0.1 * rows))


def test_copies_of_a_row_tell_nothing_new():
    """Ten rows a patient, all alike: as wide as one row a patient; as ten patients, a third of that."""
    rng = np.random.default_rng(0)
    values = rng.random(50)
    patients = np.arange(50)
    copies = np.repeat(values, 10)
    one = interval_of_mean(values, patients)
    ten = interval_of_mean(copies, np.repeat(patients, 10))
    assert ten == pytest.approx(one)

    low, high = interval_of_mean(copies, np.arange(500))
    wider = (one.high - one.low) / (high - low)
    assert wider == pytest.approx(math.sqrt(10), rel=0.1)


def test_both_ways_to_a_mean_agree():
    rng = np.random.default_rng(0)
    values, cases = draw_dice(rng, 60, 0.3)
    by_rows = interval(lambda rows: values[rows].mean(), cases)
    assert by_rows == pytest.approx(interval_of_mean(values, cases))


def test_a_number_beyond_0_to_1_has_the_interval_of_students_t():
    rng = np.random.default_rng(0)
    values = 100 * rng.standard_normal(40)
    low, high = interval_of_mean(values, np.arange(40), bounded=False)
    error = values.std(ddof=1) / math.sqrt(40)
    half = student_t.ppf(0.975, 39) * error
    assert (high - low) / 2 == pytest.approx(half)
    assert (high + low) / 2 == pytest.approx(values.mean())


def test_what_has_no_interval():
    one_case = interval_of_mean([0.5, 0.7], ["a", "a"])
    no_row = interval_of_mean([], [])
    no_value = interval(lambda rows: math.nan, ["a", "b"])
    # a difference that is the same in all cases
    no_width = interval_of_mean([0.1] * 30, np.repeat(np.arange(10), 3), bounded=False)
    for low, high in (one_case, no_row, no_value, no_width):
        assert math.isnan(low)
        assert math.isnan(high)

    # all ten patients are right, of which a third might be wrong all the same
    low, high = interval_of_mean(np.ones(30), np.repeat(np.arange(10), 3))
    assert high == 1.0
    assert 0.6 < low < 0.75

    # a row without a value does not count
    with_gap = interval_of_mean([1.0, 0.0, math.nan, 1.0], list("abcd"))
    assert with_gap == interval_of_mean([1.0, 0.0, 1.0], list("abd"))


def test_large_test_sets_take_seconds():
    rng = np.random.default_rng(0)
    begun = time.process_time()
    drawn = rng.integers(0, 30000, 100000)
    names = [f"p{case:06}" for case in drawn]
    interval_of_mean(rng.random(100000), names)
    assert time.process_time() - begun < 3

    begun = time.process_time()
    positive = rng.random(10000) < 0.2
    scores = positive + rng.standard_normal(10000)
    low, high = interval(partial(auroc, scores, positive), np.arange(10000))
    assert time.process_time() - begun < 5
    assert 0.015 < high - low < 0.03
