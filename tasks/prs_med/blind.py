"""What looking adds: the scores of the same model kept from the image or the question, and of the commonest answer."""

import math
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader

from old.blind_utils import MOST_BLIND_ROWS, Asked, choose_rows, commonest_answers, other_cases
from old.distributed_utils import world
from old.logging_utils import print_table
from tasks.prs_med.data import PositionData, Row, case_of, evaluation_loader, some_rows
from tasks.prs_med.evaluation import with_interval
from tasks.prs_med.metrics import Scores, position_in
from tasks.prs_med.reader import Reader
from tasks.prs_med.report import COLUMNS, Results, cell_of

# a blind row by the name of its metrics, and as the table has it
MODEL = "model"
NO_IMAGE = "no_image"
OTHER_IMAGE = "other_image"
NO_QUESTION = "no_question"
COMMONEST = "commonest_answer"
LABELS = {
    MODEL: "the model",
    NO_IMAGE: "without the image",
    OTHER_IMAGE: "another case's image",
    NO_QUESTION: "without the question",
    COMMONEST: "commonest training answer",
}
COMPARED = ("dice", "position_accuracy", "position_accuracy_mask")


class OtherImages(PositionData):
    """The rows of a data set with other images under their questions; masks and positions stay.

    images_of: the row whose image each row is shown; None: all are shown the mean colour.
    """

    def __init__(self, data: PositionData, images_of: list[int] | None):
        super().__init__(data.rows, data.reader, data.keep)
        self.kept = data.kept
        self.images_of = images_of
        self.colour = mean_colour(data.reader)

    def _row(self, index: int) -> dict:
        """A row as a batch has it, with the other image in place of its own."""
        item = super()._row(index)
        shown = self.colour
        if self.images_of:
            shown = super()._row(self.images_of[index])
        error = item["error"] or shown["error"]
        return item | {"sam": shown["sam"], "vlm": shown["vlm"], "error": error}


def mean_colour(reader: Reader) -> dict:
    """An image of one colour for both encoders: the mean that each one's normalisation takes away."""
    blank = reader.blank()
    colour = {"error": ""}
    for name in ("sam", "vlm"):
        mean = torch.tensor(reader.statistics[name].mean)
        levels = (255 * mean).round()
        levels = levels.clamp(0, 255).to(torch.uint8)
        colour[name] = levels.view(3, 1, 1).expand_as(blank[name]).contiguous()
    return colour


def blind_sets(data: PositionData, seed: int) -> dict[str, PositionData]:
    """The data sets of the blind evaluations by name, of the same rows."""
    rows = data.rows
    unasked = [row._replace(question="") for row in rows]
    sets = {NO_IMAGE: OtherImages(data, None)}
    cases = [case_of(row) for row in rows]
    modalities = [row.modality for row in rows]
    others = other_cases(cases, modalities, seed)
    if others:
        sets[OTHER_IMAGE] = OtherImages(data, others)
    sets[NO_QUESTION] = PositionData(unasked, data.reader, data.keep)
    return sets


def commonest_positions(training: list[Row], rows: list[Row]) -> list[str | None]:
    """The position that most training answers to each row's question name."""
    known = [(Asked(row.question, row.modality), position_in(row.answer)) for row in training]
    asked = [Asked(row.question, row.modality) for row in rows]
    return commonest_answers(known, asked)


def commonest_scores(scores: list[Scores], positions: list[str | None]) -> list[Scores]:
    """The rows as the commonest answers score; there is no mask, and no row counts where no answer is known."""
    answered = []
    for row in scores:
        named = positions[row.index]
        known = row.position and named
        right = named == row.position if known else None
        answered.append(row._replace(dice=None, position_accuracy=right, position_accuracy_mask=None, answer=named))
    return answered


def look_away(
    evaluate: Callable[[DataLoader], Results],
    loader: DataLoader,
    results: Results,
    training: list[Row],
    split: str,
    seed: int,
) -> dict[str, float]:
    """All ranks: the metrics of all blind evaluations, and of the model's own on the same rows, see blind_metrics.

    evaluate: the model's results on a loader. loader, results: of the evaluation that looks; of many rows some hundreds
    are drawn. training: the training rows. Rank 0 prints their table.
    """
    data = loader.dataset
    cases = [case_of(row) for row in data.rows]
    chosen = choose_rows(cases, MOST_BLIND_ROWS, seed)
    few = some_rows(data, chosen)
    own = []
    for place, index in enumerate(chosen):
        score = results.scores[index]
        own.append(score._replace(index=place))

    compared = {MODEL: own}
    for name, blind in blind_sets(few, seed).items():
        blind_loader = evaluation_loader(blind, loader.batch_sampler.batch_size, loader.num_workers)
        compared[name] = evaluate(blind_loader).scores
    compared[COMMONEST] = commonest_scores(own, commonest_positions(training, few.rows))
    metrics = blind_metrics(compared, few.rows, split)
    print_blind(f"{split}, what looking adds", metrics, split)
    return metrics


def blind_metrics(compared: dict[str, list[Scores]], rows: list[Row], split: str) -> dict[str, float]:
    """<split>/blind/<name>/<metric> with its interval, and how far the model's own is above it: <metric>_gain.

    The gain is a mean over the rows that both have, so its interval is narrower than those of the two would say.
    rows: of the data set that was compared on.
    """
    own = compared[MODEL]
    of_rows = [case_of(row) for row in rows]
    metrics = {f"{split}/blind/rows": len(own), f"{split}/blind/cases": len(set(of_rows))}
    for name, scores in compared.items():
        for metric in COMPARED:
            metrics |= compare(own, scores, of_rows, metric, f"{split}/blind/{name}/{metric}")
    return metrics


def compare(
    own: list[Scores],
    scores: list[Scores],
    cases: list[str],
    metric: str,
    name: str,
) -> dict[str, float]:
    """A metric of blind scores under its name, and how far the model's own is above it; {} where no row has it."""
    values = []
    gains = []
    of_rows = []
    for seeing, blind in zip(own, scores, strict=True):
        seen = getattr(seeing, metric)
        value = getattr(blind, metric)
        if value is None:
            continue
        values.append(float(value))
        gains.append(float(seen) - value if seen is not None else math.nan)
        of_rows.append(cases[blind.index])
    if not values:
        return {}

    mean = sum(values) / len(values)
    metrics = with_interval(name, "", mean, values, of_rows, bounded=True)
    gain = sum(gains) / len(gains)
    # nothing is above itself, and without generated answers the model has no position
    if own is not scores and not math.isnan(gain):
        gained = with_interval(f"{name}_gain", "", gain, gains, of_rows, bounded=False)
        # Student's t knows no ends; a difference of two numbers in 0..1 has them
        metrics |= {key: min(max(value, -1.0), 1.0) for key, value in gained.items()}
    return metrics


def print_blind(title: str, metrics: dict[str, float], split: str) -> None:
    """Rank 0: the table of blind_metrics: the model, then the same rows without looking, and how far it is above."""
    if world()[0] > 0:
        return
    start = f"{split}/blind"
    table = {}

    # without generated answers, the masks' positions are compared
    compared = "position"
    if f"{start}/{MODEL}/position_accuracy" not in metrics:
        compared = "position_mask"
    for name, label in LABELS.items():
        line = {"n": metrics[f"{start}/rows"], "cases": metrics[f"{start}/cases"]}
        for column, metric in COLUMNS.items():
            if metric in COMPARED:
                line[column] = cell_of(metrics, f"{start}/{name}/{metric}")
        gain = f"{start}/{name}/{COLUMNS[compared]}_gain"
        line[f"model's {compared} above"] = cell_of(metrics, gain, sign="+")
        table[label] = line
    print_table(title, table)
