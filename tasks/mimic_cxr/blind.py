"""Guide 1 without looking: which questions are judged, and what is right without the image or without the question.

A data set whose rows or images are replaced is answered like any other, by all ranks, and each of its questions is the
same at any number of them.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from old.blind_utils import choose_rows, other_cases
from old.distributed_utils import reduce_sum, world
from old.interval_utils import Interval, interval_of_mean
from tasks.mimic_cxr.answers import HEADS
from tasks.mimic_cxr.data import QuestionData
from tasks.mimic_cxr.index_files import map_table
from tasks.mimic_cxr.metrics import Metrics, Predictions, add_interval, most_classes, patients_of, usual_answers

# Of a split so many are answered blind, three times over.
MOST_QUESTIONS = 1000


class ChosenRows:
    """Some rows of a data set, which stand for those of the index in another one.

    chosen: their places. shown: of each the study whose image is shown instead of its own. silent: nothing is asked.
    """

    def __init__(
        self,
        data: QuestionData,
        chosen: np.ndarray,
        shown: np.ndarray | None = None,
        silent: bool = False,
    ):
        self.data = data
        self.chosen = chosen
        self.shown = shown
        self.silent = silent

    def __len__(self) -> int:
        return len(self.chosen)

    def take(self, place: int) -> dict:
        """One row as Questions.take gives it."""
        own = int(self.chosen[place])
        row = self.data.row(own)
        if self.shown is not None:
            row |= {"study": int(self.shown[place])}
        if self.silent:
            row |= {"question": ""}
        return row

    def studies(self) -> Iterator[np.ndarray]:
        """The study of each row, as Questions.studies gives it."""
        studies = self.shown
        if studies is None:
            studies = self.data.image_of()[self.chosen]
        yield studies


class BlankImages:
    """Stands for the cache of images: all are black, as what lies beside an image is."""

    def __init__(self, size: int):
        self.size = size

    def get(self, number: int, path: str) -> np.ndarray:
        return np.zeros((self.size, self.size), np.uint8)


def with_rows(data: QuestionData, rows: ChosenRows) -> QuestionData:
    """A data set of other rows of the same split."""
    other = copy.copy(data)
    other.rows = rows
    other.count = len(rows)
    return other


def limit_questions(
    sets: dict[str, QuestionData],
    most: int,
    seed: int,
) -> None:
    """--eval_max_samples: so many questions of validation and test, the same at any number of ranks; 0 for all."""
    for split in ("val", "test"):
        data = sets[split]
        if most and len(data) > most:
            patients = patients_of(data.index.studies, data.image_of())
            chosen = choose_rows(patients, most, seed)
            limited = with_rows(data, ChosenRows(data, np.array(chosen)))
            limited.drawn_from = len(data)
            sets[split] = limited


# --- what is right without looking ------------------------------------------------------------------------------------


def blind_metrics(
    answer: Callable[[QuestionData], Predictions],
    data: QuestionData,
    training: QuestionData,
    predictions: Predictions,
    seed: int,
) -> Metrics:
    """All ranks: the metrics of a split's answers without looking, <split>/blind/<way to answer>/<metric>.

    answer: what the model says, by index. predictions: of the whole split. Each has its accuracy, and what looking
    gains over it, question by question; both with their intervals by patient.
    """
    studies = data.image_of()
    patient = patients_of(data.index.studies, studies)
    chosen = np.array(choose_rows(patient, MOST_QUESTIONS, seed))
    patient = patient[chosen]
    target = predictions["target"][chosen]
    right = {"model": predictions["predicted"][chosen] == target}

    # the model without the one or the other
    blank = with_rows(data, ChosenRows(data, chosen))
    blank.cache = BlankImages(data.cache.size)
    hidden = {"no_image": blank}
    others = other_cases(patient, [""] * len(chosen), seed)
    if others is not None:
        shown = studies[chosen[others]]
        rows = ChosenRows(data, chosen, shown=shown)
        hidden["other_image"] = with_rows(data, rows)
    rows = ChosenRows(data, chosen, silent=True)
    hidden["no_question"] = with_rows(data, rows)
    for name, questions in hidden.items():
        right[name] = answer(questions)["predicted"] == target

    # no model at all
    kinds = predictions["type"][chosen]
    usual = usual_answers(kinds, data.index.facts["classes"])
    asked = []
    for place in chosen.tolist():
        row = data.row(place)
        asked.append(Asked(row["question"], row["head"]))
    right["commonest_answer"] = answers_by_text(training, asked, usual) == target
    right["majority"] = usual == target
    return compare(data.split, right, patient)


def compare(
    split: str,
    right: dict[str, np.ndarray],
    patient: np.ndarray,
) -> Metrics:
    """The accuracy of each way to answer, and what the model gains over it. right: of each question."""
    metrics: Metrics = {
        f"{split}/blind/rows": len(patient),
        f"{split}/blind/cases": len(np.unique(patient)),
    }
    for way, values in right.items():
        name = f"{split}/blind/{way}/accuracy"
        metrics[name] = float(values.mean())
        add_interval(metrics, name, interval_of_mean(values, patient))
        if way == "model":
            continue
        gained = right["model"].astype(np.float64) - values
        metrics[f"{name}_gain"] = float(gained.mean())
        low, high = interval_of_mean(gained, patient, bounded=False)
        # Student's t knows no ends; a difference of two shares has them
        found = Interval(max(low, -1.0), min(high, 1.0)) if math.isfinite(low) else Interval(low, high)
        add_interval(metrics, f"{name}_gain", found)
    return metrics


class Asked(NamedTuple):
    """A question, word for word, and the number of the head that answers it."""

    text: str
    head: int


def answers_by_text(
    training: QuestionData,
    asked: list[Asked],
    otherwise: np.ndarray,
) -> np.ndarray:
    """All ranks: the answer that each question has most often in training; otherwise: of those that it does not have.

    Of equally many the first class is taken.
    """
    wanted = sorted({question.text for question in asked})
    counts = count_answers(training, wanted)
    counts = reduce_sum(torch.from_numpy(counts)).numpy()
    place_of = {text: place for place, text in enumerate(wanted)}
    found = otherwise.copy()
    for place, question in enumerate(asked):
        classes = counts[place_of[question.text], question.head]
        if classes.any():
            found[place] = np.argmax(classes)
    return found


def count_answers(training: QuestionData, wanted: list[str]) -> np.ndarray:
    """(texts, heads, classes): how often each class is the answer to some questions, of this rank's share of training.

    A share is every so many parts of the index; no Python object is made of a row.
    """
    rank, world_size = world()
    questions = training.rows
    texts = pa.array(wanted, pa.string())
    shape = (len(wanted), len(HEADS), most_classes())
    counts = np.zeros(shape, np.int64)

    # which rows are trained on: all, or some evenly spaced
    used = np.arange(training.count) * len(questions) // max(1, training.count)
    ends = questions.ends.tolist()
    begins = [0, *ends[:-1]]
    for number in range(rank, len(ends), world_size):
        first, last = np.searchsorted(used, [begins[number], ends[number]])
        rows = used[first:last] - begins[number]
        batch = map_table(questions.path(questions.parts[number]))

        # which of the texts it is, -1 for another one
        text = pc.index_in(batch.column("question"), value_set=texts)
        text = text.fill_null(-1).to_numpy()[rows]
        rows = rows[text >= 0]
        head = batch.column("head").to_numpy()[rows]
        target = batch.column("target").to_numpy()[rows]
        np.add.at(counts, (text[text >= 0], head, target), 1)
    return counts
