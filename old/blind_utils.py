"""Evaluations that do not look: which rows, and whose image instead.

All choices are drawn from a seed and from the cases' names, so that they are the same at any number of ranks.
"""

from collections.abc import Sequence

import numpy as np


def choose_rows(
    cases: Sequence,
    most: int,
    seed: int,
) -> list[int]:
    """Up to `most` rows, in order, spread evenly over the cases; 0: all.

    cases: of each row. Every row has the same chance, and a case with twice the rows gets twice as many.
    """
    count = len(cases)
    if not most or count <= most:
        return list(range(count))

    # the cases in a drawn order, the rows of each in a drawn order: of these, rows equally far apart
    rng = np.random.default_rng(seed % 2**63)
    names, case = np.unique(np.asarray(cases), return_inverse=True)
    place = rng.permutation(len(names))
    order = np.lexsort((rng.random(count), place[case]))
    start = rng.random()
    chosen = (np.arange(most) + start) * count / most
    rows = order[chosen.astype(np.int64)]
    return sorted(rows.tolist())


def other_cases(
    cases: Sequence,
    kinds: Sequence,
    seed: int,
) -> list[int] | None:
    """For each row the index of a row of another case, of the same kind (modality) where there is one.

    The cases of a kind are put in a ring in a drawn order, and each is given the rows of the next one. None where all
    rows are of one case.
    """
    kinds = [str(kind) for kind in kinds]
    cases = [str(case) for case in cases]
    rng = np.random.default_rng(seed % 2**63)
    of_all = next_rows(cases, rng)
    if of_all is None:
        return None

    # within each kind that has two cases, instead
    others = of_all
    for kind in sorted(set(kinds)):
        rows = [row for row, own in enumerate(kinds) if own == kind]
        within = next_rows([cases[row] for row in rows], rng)
        if within is not None:
            for row, place in zip(rows, within, strict=True):
                others[row] = rows[place]
    return others


def next_rows(cases: list[str], rng: np.random.Generator) -> list[int] | None:
    """For each row a row of the next case of a ring in a drawn order, None where there is one case only."""
    rows_of: dict[str, list[int]] = {}
    for row, case in enumerate(cases):
        rows_of.setdefault(case, []).append(row)
    names = sorted(rows_of)
    if len(names) < 2:
        return None

    ring = [names[place] for place in rng.permutation(len(names))]
    others = [0] * len(cases)
    for place, case in enumerate(ring):
        following = rows_of[ring[(place + 1) % len(ring)]]
        for number, row in enumerate(rows_of[case]):
            others[row] = following[number % len(following)]
    return others
