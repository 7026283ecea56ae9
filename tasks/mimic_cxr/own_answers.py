"""From the answers of a user's own table to heads and classes.

All answers to one question go to one head: the first of binary, severity, region and category that has a class for each
of them. Where none has, the table's own answers become classes of the category head, beside CheXpert's names where some
question needs these. Classes that the user named are not added to: an answer outside is an error.
"""

import difflib
from collections import Counter
from typing import NamedTuple

from old.cli_utils import InputError, counted
from tasks.mimic_cxr.answers import CHEXPERT, HEADS

# In this order a head is looked for; yes and no are told by it from a class of that name.
FIXED_HEADS = ("binary", "severity", "region")
CHEXPERT_CLASSES = tuple(name.lower() for name in CHEXPERT)
# More different answers are free text, which no head can give.
MOST_CLASSES = 100
# Names at least so alike may be one name, once misspelt.
ALIKE = 0.85


class Asked(NamedTuple):
    """A question and its answer as the table has them; source: `file:row`."""

    question: str
    answer: str
    source: str


class Routing(NamedTuple):
    """The head and the class of each question, and the classes of the category head."""

    heads: list[str]
    targets: list[int]
    categories: list[str]


def simplify(text: str) -> str:
    """An answer as classes are written: small letters, single blanks, no full stop."""
    return " ".join(text.casefold().split()).removesuffix(".")


def route(asked: list[Asked], categories: list[str] | None) -> Routing:
    """Heads and classes of a table's questions. categories: those of the category head, None to find them.

    Raises InputError for an answer outside classes that were given, and for too many different ones.
    """
    answers_of: dict[str, set[str]] = {}
    for row in asked:
        answers_of.setdefault(simplify(row.question), set()).add(simplify(row.answer))
    classes = [simplify(name) for name in categories or ()]
    if categories is None:
        classes = find_categories(asked, answers_of)

    # the classes of each head, by name
    names = {head: HEADS[head] for head in FIXED_HEADS} | {"category": tuple(classes)}
    head_of = {question: find_head(answers, names) for question, answers in answers_of.items()}
    heads = []
    targets = []
    for row in asked:
        head = head_of[simplify(row.question)] or find_head({simplify(row.answer)}, names)
        if head is None:
            raise unknown_answer(row, names)
        heads.append(head)
        targets.append(names[head].index(simplify(row.answer)))
    return Routing(heads, targets, classes)


def find_head(answers: set[str], names: dict[str, tuple[str, ...]]) -> str | None:
    """The first head that has a class for each of these answers, None where none has."""
    for head, classes in names.items():
        if answers <= set(classes):
            return head
    return None


def find_categories(asked: list[Asked], answers_of: dict[str, set[str]]) -> list[str]:
    """The classes that the category head needs: CheXpert's, the table's own, or both. Raises InputError."""
    fixed = {head: HEADS[head] for head in FIXED_HEADS}
    own: set[str] = set()
    needs_chexpert = False
    for answers in answers_of.values():
        if find_head(answers, fixed):
            continue
        if answers <= set(CHEXPERT_CLASSES):
            needs_chexpert = True
        else:
            own |= answers
    if not own:
        return list(CHEXPERT_CLASSES)

    # what is too much to choose from
    if len(own) > MOST_CLASSES:
        row = next(row for row in asked if simplify(row.answer) in own)
        reason = f"{len(own)} different answers such as {row.answer[:60]!r} are free text, and this model chooses"
        raise InputError(f"{row.source}: {reason} among classes; write at most {MOST_CLASSES} different ones")
    known = list(CHEXPERT_CLASSES) if needs_chexpert else []
    return known + sorted(own - set(known))


def unknown_answer(row: Asked, names: dict[str, tuple[str, ...]]) -> InputError:
    """The error of an answer that no head has, with the names nearest to it."""
    classes = [name for head in names.values() for name in head]
    near = difflib.get_close_matches(simplify(row.answer), classes, n=3, cutoff=0.4)
    shown = f", nearest are {', '.join(near)}" if near else ""
    return InputError(f"{row.source}: answer {row.answer!r} is no class{shown}; correct it or add it to --categories")


def notes_on_classes(routing: Routing, in_training: list[bool]) -> list[str]:
    """What is odd about classes of the category head: without training rows, or nearly named as another."""
    counts: Counter = Counter()
    for head, target, trains in zip(routing.heads, routing.targets, in_training, strict=True):
        if head == "category":
            name = routing.categories[target]
            counts[name] += trains

    notes = []
    told: set[frozenset] = set()
    for name in sorted(counts):
        others = [other for other in routing.categories if other != name]
        near = difflib.get_close_matches(name, others, n=1, cutoff=ALIKE)
        # each is the other's neighbour
        pair = frozenset([name, *near])
        if near and pair not in told:
            told.add(pair)
            notes.append(f"answers {name!r} and {near[0]!r} are two classes; make them one if one is misspelt")
        if not counts[name]:
            notes.append(f"answer {name!r} has no training row, so that it cannot be learned")
    return notes


def notes_on_repeats(places: list[int], asked: list[Asked]) -> list[str]:
    """How many rows are there twice; places: of their images. Raises InputError where one has another answer."""
    firsts: dict[tuple[int, str], Asked] = {}
    contradictions = []
    copies = 0
    for place, row in zip(places, asked, strict=True):
        first = firsts.setdefault((place, simplify(row.question)), row)
        if simplify(row.answer) != simplify(first.answer):
            contradictions.append((row, first))
        elif row is not first:
            copies += 1

    if contradictions:
        row, first = contradictions[0]
        more = len(contradictions) - 1
        others = f" ({counted(more, 'more row')} like it)" if more else ""
        reason = f"answer {row.answer!r}, and {first.answer!r} in {first.source} about the same image and question"
        raise InputError(f"{row.source}: {reason}{others}; keep one, or ask about each by itself")
    return [f"{counted(copies, 'row')} there twice or more; each counts"] if copies else []
