"""What the evaluations share: 95 % intervals by case (patient, study), and images of another case.

Rows of one case are alike, so cases are what the jackknife leaves out. For a number in 0..1 its variance is turned into
the number of independent rows that would vary as much, and the interval is the exact binomial one for that many (Korn
and Graubard, Survey Methodology 24, 1998): it stays in 0..1 and has a width even where every row is right. Nothing is
drawn at random without a fixed seed, so all ranks get the same. An unknown interval is (nan, nan).
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle

import numpy as np

RESAMPLES = 1000


def interval_of_mean(values: Sequence[float], cases: Sequence, bounded: bool = True) -> tuple[float, float]:
    """(low, high) of the mean over rows; cases: each row's.

    bounded: the values lie in 0..1; give False for others, such as the paired differences of two models. Unknown for
    fewer than two cases, and for unbounded values that are the same in all cases.
    """
    from scipy.stats import beta, norm, t

    values = np.asarray(values, float)
    names, case = np.unique(np.asarray(cases), return_inverse=True)
    if len(names) < 2:
        return np.nan, np.nan
    rows, sums = np.bincount(case), np.bincount(case, weights=values)
    mean, without = values.mean(), (sums.sum() - sums) / (len(values) - rows)
    variance = (len(names) - 1) * without.var()
    # what rounding leaves of a variance of 0 does not count
    varies = variance > 1e-15
    # Student's t: the variance is itself an estimate
    quantile = t.ppf(0.975, len(names) - 1)
    if bounded:
        # Clopper and Pearson's interval; where nothing varies, each case counts as one row
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
    """(1000, rows) float32: how often each row is in resamples of the cases within strata; always the same draws."""
    names, first, place = np.unique(cases, return_index=True, return_inverse=True)
    counts = np.zeros((RESAMPLES, len(names)), np.float32)
    random = np.random.default_rng(0)
    for value in np.unique(strata[first]):
        chosen = np.flatnonzero(strata[first] == value)
        counts[:, chosen] = random.multinomial(len(chosen), np.full(len(chosen), 1 / len(chosen)), RESAMPLES)
    return counts[:, place]


def interval_of_resamples(values: np.ndarray) -> tuple[float, float]:
    """(low, high): 2.5 and 97.5 % of a score in resamples of the data; unknown if fewer than half define it."""
    defined = values[np.isfinite(values)]
    if len(defined) <= len(values) / 2:
        return np.nan, np.nan
    return tuple(np.quantile(defined, [0.025, 0.975]).tolist())


def shown(mean: float, low: float, high: float, sign: str = "", digits: int = 3) -> str:
    """A number and its interval as all tables have them, "0.814 (0.792, 0.834)"; the number alone if that is unknown.

    sign: "+" for a difference.
    """
    form = f"{sign}.{digits}f"
    return f"{mean:{form}}" + (f" ({low:{form}}, {high:{form}})" if np.isfinite(low) else "")


def other_cases(cases: Sequence[str], kinds: Sequence[str], seed: int) -> list[int] | None:
    """For each row the index of a row of another case, of the same kind (modality) where there is one.

    The cases, and then those of each kind, are put in a ring in random order; each takes the rows of the one before.
    None if all rows are of one case.
    """
    # rows_of[kind][case]; the kind None, which comes first, holds all rows
    rows_of = defaultdict(lambda: defaultdict(list))
    for row, (case, kind) in enumerate(zip(cases, kinds, strict=True)):
        rows_of[None][case].append(row)
        rows_of[kind][case].append(row)
    rng = np.random.default_rng(seed % 2**63)
    others = {}
    for of_case in rows_of.values():
        ring = [of_case[case] for case in rng.permutation(sorted(of_case))]
        if len(ring) > 1:
            for place, rows in enumerate(ring):
                others.update(zip(rows, cycle(ring[place - 1]), strict=False))
    return [others[row] for row in range(len(cases))] if others else None
