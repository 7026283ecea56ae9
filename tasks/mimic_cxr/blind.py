"""Guide 1 without looking: which questions are judged, and what is right without the image or without the question.

A data set whose rows or images are replaced is answered like any other, by all ranks, and each of its questions is the
same at any number of them.
"""

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from blind_utils import choose_rows, other_cases
from distributed_utils import gather_objects, world
from interval_utils import interval_of_mean
from tasks.mimic_cxr.data import QuestionData
from tasks.mimic_cxr.index_files import map_table
from tasks.mimic_cxr.metrics import Metrics, Predictions, add_interval, patients_of, usual_answers

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
        row = self.data.row(int(self.chosen[place]))
        if self.shown is not None:
            row |= {"study": int(self.shown[place])}
        if self.silent:
            row |= {"question": ""}
        return row

    def studies(self) -> Iterator[np.ndarray]:
        """The study of each row, as Questions.studies gives it."""
        yield self.data.image_of()[self.chosen] if self.shown is None else self.shown


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


def limit_questions(sets: dict[str, QuestionData], most: int, seed: int) -> None:
    """--eval_max_samples: so many questions of validation and test, the same at any number of ranks; 0 for all."""
    for split in ("val", "test"):
        data = sets[split]
        if most and len(data) > most:
            patients = patients_of(data.index.studies, data.image_of())
            chosen = np.array(choose_rows(patients, most, seed))
            sets[split] = with_rows(data, ChosenRows(data, chosen))
            sets[split].drawn_from = len(data)


# --- what is right without looking ------------------------------------------------------------------------------------


def blind_metrics(
    answer: Callable[[QuestionData], Predictions],
    data: QuestionData,
    training: QuestionData,
    predictions: Predictions,
    seed: int,
) -> tuple[Metrics, int]:
    """All ranks: ({metric: value} of a split's answers without looking, of how many questions).

    answer: what the model says, by index. predictions: of the whole split. Each has its accuracy, and what looking
    gains over it, question by question; both with their intervals by patient.
    """
    studies = data.image_of()
    patient = patients_of(data.index.studies, studies)
    chosen = np.array(choose_rows(patient, MOST_QUESTIONS, seed))
    target = predictions["target"][chosen]
    right = {"model": predictions["predicted"][chosen] == target}

    # the model without the one or the other
    blank = with_rows(data, ChosenRows(data, chosen))
    blank.cache = BlankImages(data.cache.size)
    hidden = {"no_image": blank}
    others = other_cases(patient[chosen], [""] * len(chosen), seed)
    if others is not None:
        shown = studies[chosen[others]]
        hidden["other_image"] = with_rows(data, ChosenRows(data, chosen, shown=shown))
    hidden["no_question"] = with_rows(data, ChosenRows(data, chosen, silent=True))
    for name, questions in hidden.items():
        right[name] = answer(questions)["predicted"] == target

    # no model at all
    usual = usual_answers(predictions["type"][chosen], data.index.facts["classes"])
    texts = [data.row(int(i))["question"] for i in chosen]
    heads = predictions["head"][chosen]
    right["commonest"] = answers_by_text(training, texts, heads, usual) == target
    right["majority"] = usual == target
    return compare(data.split, right, patient[chosen]), len(chosen)


def compare(split: str, right: dict[str, np.ndarray], patient: np.ndarray) -> Metrics:
    """The accuracy of each way to answer, and what the model gains over it. right: of each question."""
    metrics: Metrics = {}
    for name, values in right.items():
        metrics[f"{split}/blind_accuracy/{name}"] = float(values.mean())
        add_interval(metrics, f"{split}/blind_accuracy", interval_of_mean(values, patient), f"/{name}")
        if name == "model":
            continue
        gained = right["model"].astype(np.float64) - values
        metrics[f"{split}/blind_gain/{name}"] = float(gained.mean())
        found = interval_of_mean(gained, patient, bounded=False)
        add_interval(metrics, f"{split}/blind_gain", found, f"/{name}")
    return metrics


def answers_by_text(
    training: QuestionData,
    texts: list[str],
    heads: np.ndarray,
    otherwise: np.ndarray,
) -> np.ndarray:
    """All ranks: the answer that each question has most often in training; otherwise: of those that it does not have.

    texts: the questions, word for word.
    """
    counts: dict[tuple, int] = {}
    for local in gather_objects(count_answers(training, texts)):
        for key, count in local.items():
            counts[key] = counts.get(key, 0) + count

    # of equally many the first class
    best: dict[tuple, tuple] = {}
    for (text, head, target), count in sorted(counts.items()):
        if count > best.get((text, head), (0, 0))[0]:
            best[text, head] = (count, target)
    found = otherwise.copy()
    for place, (text, head) in enumerate(zip(texts, heads.tolist(), strict=True)):
        if (text, head) in best:
            found[place] = best[text, head][1]
    return found


def count_answers(training: QuestionData, texts: list[str]) -> dict[tuple, int]:
    """{(question, head, target): how often} in this rank's share of the parts of the index, of some questions."""
    rank, world_size = world()
    wanted = pa.array(sorted(set(texts)), pa.string())
    questions = training.rows
    used = np.arange(training.count) * len(questions) // max(1, training.count)
    counts: dict[tuple, int] = {}
    begin = 0
    for number, (part, end) in enumerate(zip(questions.parts, questions.ends.tolist(), strict=True)):
        if number % world_size == rank:
            first, last = np.searchsorted(used, [begin, end])
            table = pa.Table.from_batches([map_table(questions.path(part))]).select(["question", "head", "target"])
            if last - first < end - begin:
                table = table.take(used[first:last] - begin)
            table = table.filter(pc.is_in(table["question"], value_set=wanted))
            grouped = table.group_by(["question", "head", "target"]).aggregate([([], "count_all")])
            for row in grouped.to_pylist():
                key = (row["question"], row["head"], row["target"])
                counts[key] = counts.get(key, 0) + row["count_all"]
        begin = end
    return counts
