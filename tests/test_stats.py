"""utils/stats.py: coverage of the intervals, closed forms, resamples, and pairing with other cases."""

import numpy as np
import pytest
from scipy import stats

from utils.stats import interval_of_mean, interval_of_resamples, other_cases, resample_cases, shown


def draw_dice(rng, patients: int, found: float):
    """(values, cases): 1 to 8 correlated Dice scores around 0.8 per patient; 0 where a mask is not found."""
    cases = np.repeat(np.arange(patients), rng.integers(1, 9, patients))
    seen, level = (rng.beta(a, b, patients)[cases] for a, b in ((9 * found, 9 * (1 - found)), (12, 3)))
    return (rng.random(len(cases)) < seen) * rng.beta(20 * level, 20 * (1 - level)), cases


@pytest.mark.parametrize(("patients", "found"), [(20, 0.7), (60, 0.95)])
def test_95_of_100_intervals_contain_the_true_mean(patients, found):
    rng = np.random.default_rng(0)
    intervals = [interval_of_mean(*draw_dice(rng, patients, found)) for _ in range(500)]
    assert 0.93 <= np.mean([low <= 0.8 * found <= high for low, high in intervals]) <= 0.97


def test_interval_of_mean_matches_closed_forms():
    # each row is a case: the Clopper-Pearson interval, except that the variance is estimated
    right = np.repeat([1.0, 0.0], [90, 10])
    exact = stats.binomtest(90, 100).proportion_ci()
    assert interval_of_mean(right, np.arange(100)) == pytest.approx(exact, abs=2e-3)
    # copies of a row carry no information
    copies = np.repeat(right, 10), np.repeat(np.arange(100), 10)
    assert interval_of_mean(*copies) == pytest.approx(interval_of_mean(right, np.arange(100)))
    # paired differences: Student's t
    differences = np.random.default_rng(0).normal(size=40)
    expected = stats.ttest_1samp(differences, 0).confidence_interval()
    assert interval_of_mean(differences, np.arange(40), bounded=False) == pytest.approx(expected)
    # no variance: the exact interval of ten successes in ten
    cases = np.repeat(np.arange(10), 3)
    assert interval_of_mean(np.ones(30), cases) == pytest.approx(stats.binomtest(10, 10).proportion_ci())
    undefined = [([0.5, 0.7], ["a", "a"]), ([], []), (np.full(30, 0.1), cases, False)]
    assert np.isnan([interval_of_mean(*values) for values in undefined]).all()


def test_resamples_draw_cases_within_strata():
    """The rows of a case stay together, and each stratum keeps its number of cases."""
    case = np.array([5, 5, 7, 8, 9, 9, 4])
    stratum = np.array([0, 0, 0, 0, 1, 1, 1])
    counts = resample_cases(case, stratum)
    assert (counts[:, [0, 4]] == counts[:, [1, 5]]).all()
    assert (counts[:, [0, 2, 3]].sum(1) == 3).all()
    assert (counts[:, [4, 6]].sum(1) == 2).all()
    assert counts[:, 4].mean() == pytest.approx(1, abs=0.1)
    assert set(counts[:, 4]) == {0, 1, 2}


def test_interval_of_resamples_and_its_text():
    """Undefined unless more than half of the resamples are finite."""
    values = np.append(np.arange(1001.0), np.full(1000, np.nan))
    assert interval_of_resamples(values) == (25, 975)
    assert shown(500, *interval_of_resamples(values), digits=1) == "500.0 (25.0, 975.0)"
    assert shown(0.5, *interval_of_resamples(np.append(values, np.nan)), "+") == "+0.500"


def test_other_cases():
    """A ring of the cases of each kind: a row gets a row of exactly one other case, in an order drawn from the seed."""
    cases = np.random.default_rng(0).integers(0, 40, 300).tolist()
    kinds = ["CT" if case < 20 else "MRI" for case in cases]
    others = other_cases(cases, kinds, seed=1)
    pairs = {(cases[row], cases[other]) for row, other in enumerate(others)}
    assert [kinds[other] for other in others] == kinds
    assert all(one != other for one, other in pairs)
    assert len(pairs) == len(set(cases))
    assert others == other_cases(cases, kinds, seed=1) != other_cases(cases, kinds, seed=2)
    # a case that is alone of its kind gets one of another kind
    assert other_cases(["a", "b", "c"], ["CT", "CT", "MRI"], seed=0)[2] in (0, 1)
    assert other_cases(["a", "a"], ["CT", "MRI"], seed=0) is None
