"""95 % confidence intervals clustered by case, and pairing of rows from different cases.

A row is one evaluated sample, such as a question; its case is the patient or the study. Random draws are seeded, so all
ranks get the same results.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle

import numpy as np

RESAMPLES = 1000


def interval_of_mean(values: Sequence[float], cases: Sequence, bounded: bool = True) -> tuple[float, float]:
    """Return the 95 % confidence interval (low, high) of the mean of `values`, clustered by case.

    cases: case of each value. bounded: whether all values lie in 0..1. The variance is a jackknife estimate over cases.
    Bounded values get a binomial interval for the effective number of independent rows (Korn and Graubard, Survey
    Methodology 24, 1998). Returns (nan, nan) if the interval is undefined.
    """
    from scipy.stats import beta, norm, t

    values = np.asarray(values, float)
    names, case = np.unique(np.asarray(cases), return_inverse=True)
    if len(names) < 2:
        return np.nan, np.nan
    rows, sums = np.bincount(case), np.bincount(case, weights=values)
    mean, without = values.mean(), (sums.sum() - sums) / (len(values) - rows)
    variance = (len(names) - 1) * without.var()
    # rounding errors can turn a variance of 0 into a tiny number
    varies = variance > 1e-15
    quantile = t.ppf(0.975, len(names) - 1)
    if bounded:
        # Clopper-Pearson interval; if the variance is 0, each case counts as one row
        count = len(names)
        if varies and 0 < mean < 1:
            count = mean * (1 - mean) / variance * (norm.ppf(0.975) / quantile) ** 2
        right, wrong = count * mean, count * (1 - mean)
        low = beta.ppf(0.025, right, wrong + 1) if right > 0 else 0
        high = beta.ppf(0.975, right + 1, wrong) if wrong > 0 else 1
        return float(low), float(high)
    half = quantile * variance**0.5 if varies else np.nan
    return float(mean - half), float(mean + half)


def resample_cases(cases: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """Draw 1000 bootstrap samples of the cases within strata; every call draws the same samples.

    cases, strata: case and stratum of each row. Returns the number of times each sample contains each row: (1000, rows)
    float32.
    """
    names, first, case = np.unique(cases, return_index=True, return_inverse=True)
    counts = np.zeros((RESAMPLES, len(names)), np.float32)
    random = np.random.default_rng(0)
    for value in np.unique(strata[first]):
        chosen = np.flatnonzero(strata[first] == value)
        counts[:, chosen] = random.multinomial(len(chosen), np.full(len(chosen), 1 / len(chosen)), RESAMPLES)
    return counts[:, case]


def interval_of_resamples(values: np.ndarray) -> tuple[float, float]:
    defined = values[np.isfinite(values)]
    if len(defined) <= len(values) / 2:
        return np.nan, np.nan
    return tuple(np.quantile(defined, [0.025, 0.975]).tolist())


def shown(mean: float, low: float, high: float, sign: str = "", digits: int = 3) -> str:
    """Format a mean and its interval as "0.814 (0.792, 0.834)", or as "0.814" if the interval is undefined."""
    form = f"{sign}.{digits}f"
    return f"{mean:{form}}" + (f" ({low:{form}}, {high:{form}})" if np.isfinite(low) else "")


def other_cases(cases: Sequence[str], kinds: Sequence[str], seed: int) -> list[int] | None:
    """For each row, return the index of a row from a different case, of the same kind if possible.

    cases, kinds: case and kind (imaging modality) of each row. Returns None if all rows belong to one case.
    """
    # rows_of[kind][case]: row indices. rows_of[None] holds all rows and comes first, so that pairs of the same kind
    # overwrite its pairs.
    rows_of = defaultdict(lambda: defaultdict(list))
    for row, (case, kind) in enumerate(zip(cases, kinds, strict=True)):
        rows_of[None][case].append(row)
        rows_of[kind][case].append(row)
    rng = np.random.default_rng(seed % 2**63)
    others = {}
    for of_case in rows_of.values():
        ring = [of_case[case] for case in rng.permutation(sorted(of_case))]
        if len(ring) > 1:
            for index, rows in enumerate(ring):
                others.update(zip(rows, cycle(ring[index - 1]), strict=False))
    return [others[row] for row in range(len(cases))] if others else None
