"""Which head answers a question that is in no release: that of the training question whose wording is nearest."""

import itertools
import re
from typing import NamedTuple

import numpy as np

from old.cli_utils import InputError
from old.predict_utils import Asked
from tasks.mimic_cxr.answers import CODE_OF_NAME, HEADS, head_of
from tasks.mimic_cxr.data import QuestionData

# Training questions that are looked at for their wordings, and how many of each type are kept.
LOOKED_AT = 4096
KEPT = 64
# Below this the wordings have little in common.
NEAR = 0.5


class ChosenHead(NamedTuple):
    """The head that answers a question, and how it was chosen, in words. near: whether that can be relied on."""

    head: str
    reason: str
    near: bool = True


def describe_training(data: QuestionData) -> dict:
    """What a checkpoint tells of its training questions: {"wordings": {type: {question: head}}, "labels": names}.

    wordings: different ones of each question type, of questions that are evenly spaced. labels: the CheXpert labels
    that were trained, see note_trained_labels.
    """
    heads = list(HEADS)
    wordings: dict[str, dict[str, str]] = {}
    for place in np.linspace(0, len(data) - 1, min(LOOKED_AT, len(data))).astype(int).tolist():
        row = data.row(place)
        known = wordings.setdefault(row["type"], {})
        if len(known) < KEPT:
            known[row["question"]] = heads[row["head"]]
    return {"wordings": wordings, "labels": list(data.trained)}


# --- choosing ---------------------------------------------------------------------------------------------------------


def features_of(question: str) -> dict[str, float]:
    """The words of a question and its pairs of words; how it begins tells most of its kind, and counts threefold."""
    words = re.findall(r"[a-z0-9]+", question.lower())
    features = dict.fromkeys(words, 1.0)
    for pair in itertools.pairwise(words):
        features[" ".join(pair)] = 1.0
    for count in (1, 2):
        features[f"^{' '.join(words[:count])}"] = 3.0
    return features


class Wordings:
    """The training questions' wordings, by which the nearest to another question is found."""

    def __init__(self, wordings: dict[str, dict[str, str]]):
        """wordings: of each question type, as describe_training gives them."""
        self.kinds = []
        self.questions = []
        self.heads = []
        for kind, questions in wordings.items():
            self.kinds += [kind] * len(questions)
            self.questions += questions.keys()
            self.heads += questions.values()

        # a row for each question, a column for each feature
        features = [features_of(question) for question in self.questions]
        names = sorted({name for one in features for name in one})
        self.column = {name: number for number, name in enumerate(names)}
        self.rows = np.zeros((len(features), len(names)), np.float32)
        for row, one in zip(self.rows, features, strict=True):
            for name, weight in one.items():
                row[self.column[name]] = weight
        self.totals = self.rows.sum(1)

    def likeness(self, question: str) -> np.ndarray:
        """(n,) in 0 .. 1: how much of its features each training question shares with this one."""
        asked = features_of(question)
        columns = [self.column[name] for name in asked if name in self.column]
        shared = self.rows[:, columns].sum(1)
        return 2 * shared / (self.totals + sum(asked.values()))

    def nearest(self, question: str) -> ChosenHead:
        """The head of the training question that is nearest to this one, and which others are as near."""
        likeness = self.likeness(question)
        best = float(likeness.max())
        place = int(likeness.argmax())
        kind = self.kinds[place]
        head = self.heads[place]
        near = best >= NEAR
        words = "the nearest training question" if near else "the nearest training question, which is NOT near"
        reason = f"{words}: {self.questions[place]!r} ({kind}, {best:.0%} alike)"

        # another head may answer one with the same wording
        rivals = {self.heads[other] for other in np.flatnonzero(likeness == likeness.max()).tolist()}
        rivals.discard(head)
        if rivals:
            reason += f"; {' and '.join(sorted(rivals))} answers one that is as near"
        return ChosenHead(head, reason, near)


def named_head(head: str | None, question_type: str | None, wordings: dict) -> ChosenHead | None:
    """The head that a name of a head, or of a question type, stands for; None without either.

    wordings: of the training, whose types a user's table may have named. Raises InputError for a name that is none.
    """
    if head:
        if head not in HEADS:
            raise InputError(f"head {head!r} is not one of {', '.join(HEADS)}")
        return ChosenHead(head, "named")
    if question_type:
        found = head_of(question_type)
        if question_type in wordings:
            found = next(iter(wordings[question_type].values()))
        if found is None:
            examples = [f"{code}_{name}" for name, code in CODE_OF_NAME.items()]
            raise InputError(f"no head answers question type {question_type!r}; it is one such as {examples[-2]}")
        return ChosenHead(found, f"of question type {question_type}")
    return None


def choose_heads(
    asked: list[Asked],
    head: str | None,
    question_type: str | None,
    wordings: dict[str, dict[str, str]] | None,
) -> list[ChosenHead]:
    """The head of each question: what its row names, what the flags name, else that of the nearest wording.

    wordings: of the training, None where the checkpoint does not tell. Raises InputError, naming the row.
    """
    types = wordings or {}
    named = named_head(head, question_type, types)
    known: dict[str, ChosenHead] = {}
    nearest = Wordings(wordings) if wordings else None
    chosen = []

    # a wording that is asked of many images is looked up once
    for one in asked:
        row = f"{one.source}: " if one.source else ""
        try:
            own = named_head(one.others.get("head"), one.others.get("question_type"), types) or named
        except InputError as error:
            raise InputError(f"{row}{error}; correct the table") from None
        if own is None and nearest is None:
            reason = "the checkpoint does not tell what was asked in training (an older version wrote it)"
            raise InputError(f"{row}{reason}; name the head by --head {'|'.join(HEADS)}")
        if own is None and one.question not in known:
            known[one.question] = nearest.nearest(one.question)
        chosen.append(own or known[one.question])
    return chosen
