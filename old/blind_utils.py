"""What guides 0 and 1 share of evaluations that do not look: which rows, whose image instead, what is usually answered.

A number says little about looking as long as nobody knows what the same model scores without the image, with another
patient's, or without the question, and what the commonest answer scores, for which no model is needed. All choices are
drawn from a seed and from the cases' names, so that they are the same on all ranks and at any number of them.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

# rows of each blind evaluation, unless --eval_max_samples says fewer
MOST_BLIND_ROWS = 300


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


class Asked(NamedTuple):
    """What is known of a row without its image; kind: its modality, or the kind of the question."""

    question: str
    kind: str


def commonest_answers(
    training: Iterable[tuple[Asked, Hashable]],
    rows: Iterable[Asked],
) -> list:
    """For each row the commonest training answer to its question, to one never seen that of its kind, else of all.

    training: each training row and its answer, None for one that does not count. Of equally many the first in the
    alphabet is taken; None where nothing is known.
    """
    of_question: dict[str, Counter] = {}
    of_kind: dict[str, Counter] = {}
    of_all = Counter()
    for asked, answer in training:
        if answer is None:
            continue
        of_question.setdefault(asked.question, Counter())[answer] += 1
        of_kind.setdefault(asked.kind, Counter())[answer] += 1
        of_all[answer] += 1

    answers = []
    for asked in rows:
        counts = of_question.get(asked.question) or of_kind.get(asked.kind) or of_all
        ranked = sorted(counts, key=lambda answer: (-counts[answer], str(answer)))
        answers.append(ranked[0] if ranked else None)
    return answers
