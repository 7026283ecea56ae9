"""95 % intervals of an evaluation's numbers, for rows that come in cases (patients, studies) and are alike within one.

What is drawn at random is the case, so a case is what is left out: the jackknife gives the variance of a number. For
numbers in 0..1 it is turned into the count of independent rows that would vary as much, and the interval is the exact
binomial one of that many (Korn and Graubard, Survey Methodology 24, 1998). It never leaves 0..1, is lopsided near the
ends as it should be, and still has a width where every row is right. Nothing is drawn, so all ranks and all repeats
give the same. tests/old/test_intervals.py counts how often it holds the truth.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# the share of test sets whose interval holds the truth, and what is left at each end
CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
# of a costly statistic no more values than these are computed: cases are then left out in so many groups
MOST_GROUPS = 200
# what rounding leaves of a variance of 0
NO_VARIANCE = 1e-15


class Interval(NamedTuple):
    """Between these two lies the value over all possible cases, in 95 of 100 such test sets; nan where unknown."""

    low: float
    high: float


UNKNOWN = Interval(math.nan, math.nan)


def interval_of_mean(
    values: Sequence[float],
    cases: Sequence,
    bounded: bool = True,
) -> Interval:
    """The interval of the mean over rows; cases: of each row. Rows whose value is nan are left out.

    bounded: the values lie in 0..1. Fewer than two cases tell nothing: nan; nor do cases that are all the same, unless
    they are bounded.
    """
    values = np.asarray(values, np.float64)
    known = ~np.isnan(values)
    values = values[known]
    cases = np.asarray(cases)[known]
    names, case = np.unique(cases, return_inverse=True)
    if len(names) < 2:
        return UNKNOWN

    # the mean without each case, from the sums of all
    rows = np.bincount(case)
    sums = np.bincount(case, weights=values)
    total = sums.sum()
    without = (total - sums) / (len(values) - rows)
    mean = float(total / len(values))
    return from_jackknife(mean, without, len(names), bounded)


def interval(
    statistic: Callable[[np.ndarray], float],
    cases: Sequence,
    bounded: bool = True,
) -> Interval:
    """The interval of any number computed from rows, such as an AUROC; cases: of each row.

    statistic: gives the number for the indices of some rows, nan where these have none (an AUROC of one class). It is
    called up to 201 times. bounded: it lies in 0..1. Where nothing is told, as in interval_of_mean, and for a statistic
    without a value: nan.
    """
    names, case = np.unique(np.asarray(cases), return_inverse=True)
    if len(names) < 2:
        return UNKNOWN
    everything = np.arange(len(case))
    estimate = float(statistic(everything))
    if math.isnan(estimate):
        return UNKNOWN

    # which cases are left out together has nothing to do with their names, and is the same each time
    groups = min(len(names), MOST_GROUPS)
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(len(names))
    group = shuffled[case] % groups
    without = []
    for number in range(groups):
        others = everything[group != number]
        without.append(statistic(others))
    return from_jackknife(estimate, np.array(without), len(names), bounded)


def from_jackknife(
    estimate: float,
    without: np.ndarray,
    cases: int,
    bounded: bool,
) -> Interval:
    """The interval around an estimate, from its values without each group of cases; cases: how many there are."""
    from scipy.stats import t as student_t

    without = without[~np.isnan(without)]
    groups = len(without)
    if groups < 2:
        return UNKNOWN

    # the jackknife's variance, and how unsure that is itself
    squares = (without - without.mean()) ** 2
    variance = (groups - 1) / groups * float(squares.sum())
    quantile = float(student_t.ppf(1 - TAIL, groups - 1))
    if bounded:
        return binomial(estimate, variance, quantile, cases)
    # all cases are alike, which tells nothing of others
    if variance <= NO_VARIANCE:
        return UNKNOWN
    half = quantile * math.sqrt(variance)
    return Interval(estimate - half, estimate + half)


def binomial(
    estimate: float,
    variance: float,
    quantile: float,
    cases: int,
) -> Interval:
    """Clopper and Pearson's interval of as many rows as vary by this variance.

    quantile: of Student's t. Without any variance (all rows are right), a case counts as one row.
    """
    from scipy.stats import beta, norm

    rows = cases
    of_one_row = estimate * (1 - estimate)
    if variance > NO_VARIANCE and of_one_row > 0:
        normal = norm.ppf(1 - TAIL)
        rows = of_one_row / variance * (normal / quantile) ** 2

    right = rows * estimate
    wrong = rows * (1 - estimate)
    low = beta.ppf(TAIL, right, wrong + 1) if right > 0 else 0.0
    high = beta.ppf(1 - TAIL, right + 1, wrong) if wrong > 0 else 1.0
    return Interval(float(low), float(high))
