"""Guide 1's metrics: plain arithmetic on the predictions of a split, one row a question, see train_mimic_cxr.py."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from old.distributed_utils import gather_objects
from old.interval_utils import Interval, interval, interval_of_mean
from tasks.mimic_cxr.answers import CHEXPERT, HEADS

Metrics = dict[str, float | None]
Predictions = dict[str, np.ndarray]


class Judged(NamedTuple):
    """The studies in which a CheXpert label is neither uncertain nor blank: its probabilities, and 0 or 1.

    None for a label that was never trained, which has no probability.
    """

    scores: torch.Tensor
    truth: torch.Tensor
    study: np.ndarray

    @property
    def has_both(self) -> bool:
        """Whether there are both classes, without which no curve is defined."""
        return len(self.truth.unique()) == 2


def most_classes() -> int:
    """The classes of the answer head that has the most."""
    return max(len(names) for names in HEADS.values())


# --- losses and answers -----------------------------------------------------------------------------------------------


def split_losses(
    split: str,
    predictions: Predictions,
    head_weight: dict,
    chexpert_weight: float,
) -> Metrics:
    """The training loss of a split and its two parts. None where one is not finite."""
    vqa = 0.0
    for place, head in enumerate(HEADS):
        rows = predictions["head"] == place
        if rows.any():
            entropy = predictions["entropy"][rows]
            vqa += head_weight[head] * float(entropy.mean())
    known = max(1.0, predictions["known"].sum())
    labels = float(predictions["bce"].sum() / known)

    # under the names of the log
    loss = vqa + chexpert_weight * labels
    metrics = {
        f"{split}/loss": loss,
        f"{split}/loss_vqa": vqa,
        f"{split}/loss_chexpert": labels,
    }
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def answer_metrics(
    split: str,
    predictions: Predictions,
    classes: dict[str, list[int]],
) -> Metrics:
    """Accuracy in all, per head and per question type, beside that of the type's most frequent training answer.

    Each head has its macro F1, too. classes: how often each answer of a question type occurs in training.
    """
    target = predictions["target"]
    right = predictions["predicted"] == target
    usual = usual_answers(predictions["type"], classes) == target
    metrics: Metrics = {}

    def add(rows: np.ndarray, group: str = "") -> None:
        metrics[f"{split}/vqa_accuracy{group}"] = float(right[rows].mean())
        metrics[f"{split}/vqa_majority{group}"] = float(usual[rows].mean())

    add(np.ones(len(target), bool))
    for place, head in enumerate(HEADS):
        rows = predictions["head"] == place
        if rows.any():
            add(rows, f"/{head}")
            metrics[f"{split}/vqa_f1/{head}"] = macro_f1(predictions, rows, len(HEADS[head]))
    for kind in np.unique(predictions["type"]):
        add(predictions["type"] == kind, f"/{kind}")
    return metrics


def usual_answers(
    kinds: np.ndarray,
    classes: dict[str, list[int]],
) -> np.ndarray:
    """The most frequent training answer of each question's type; -1 for a type that training does not have."""
    names, place = np.unique(kinds, return_inverse=True)
    usual = np.full(len(names), -1)
    for i, name in enumerate(names):
        if name in classes:
            usual[i] = np.argmax(classes[name])
    return usual[place]


def macro_f1(
    predictions: Predictions,
    rows: np.ndarray,
    classes: int,
) -> float:
    """The mean of the F1 of each class."""
    from torchmetrics.functional.classification import multiclass_f1_score

    predicted = torch.from_numpy(predictions["predicted"][rows])
    target = torch.from_numpy(predictions["target"][rows])
    return float(multiclass_f1_score(predicted, target, classes, average="macro"))


# --- CheXpert ---------------------------------------------------------------------------------------------------------


def chexpert_metrics(
    split: str,
    predictions: Predictions,
    studies: pa.RecordBatch,
) -> Metrics:
    """AUROC and average precision, macro and per label, each study once, without uncertain and blank labels.

    None where a metric is undefined, as for a label of one class only.
    """
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision

    labels = judge_labels(predictions, studies)
    metrics = label_metrics(f"{split}/chexpert_auroc", labels, binary_auroc)
    return metrics | label_metrics(f"{split}/chexpert_ap", labels, binary_average_precision)


def label_metrics(
    name: str,
    labels: dict[str, Judged],
    metric: Callable,
) -> Metrics:
    """A metric's mean over the labels that have one, and that of each label."""
    values: Metrics = {}
    for label, judged in labels.items():
        value = None
        if judged.has_both:
            value = float(metric(judged.scores, judged.truth))
        values[f"{name}/{label}"] = value
    defined = [value for value in values.values() if value is not None]
    mean = sum(defined) / len(defined) if defined else None
    return {name: mean} | values


def judge_labels(
    predictions: Predictions,
    studies: pa.RecordBatch,
) -> dict[str, Judged]:
    """{CheXpert label: the studies in which it is known}."""
    chosen, first = np.unique(predictions["study"], return_index=True)
    truth = chexpert_truth(studies, chosen)
    probability = predictions["chexpert"][first]
    labels = {}
    for i, label in enumerate(CHEXPERT):
        known = (truth[:, i] >= 0) & ~np.isnan(probability[:, i])
        scores = torch.from_numpy(probability[known, i])
        target = truth[known, i].astype(np.int64)
        labels[label] = Judged(scores, torch.from_numpy(target), chosen[known])
    return labels


def chexpert_truth(
    studies: pa.RecordBatch,
    chosen: np.ndarray,
) -> np.ndarray:
    """int8 (n, 14) of the chosen studies: 1, 0, or -1 where blank or uncertain."""
    columns = [studies[name].to_numpy()[chosen] for name in CHEXPERT]
    truth = np.stack(columns, 1)
    return np.where(truth >= 0, truth, -1)


# --- intervals --------------------------------------------------------------------------------------------------------


def patients_of(studies: pa.RecordBatch, chosen: np.ndarray) -> np.ndarray:
    """The patient of each of some studies."""
    return studies["subject_id"].to_numpy()[chosen]


def add_interval(metrics: Metrics, name: str, found: Interval, group: str = "") -> None:
    """Put the ends of a metric's 95 % interval beside it: None where it is unknown."""
    for end, value in found._asdict().items():
        metrics[f"{name}_{end}{group}"] = value if math.isfinite(value) else None


def answer_intervals(
    split: str,
    predictions: Predictions,
    studies: pa.RecordBatch,
) -> Metrics:
    """The 95 % interval of the accuracy by patient: in all, per head and per question type."""
    right = (predictions["predicted"] == predictions["target"]).astype(np.float64)
    patient = patients_of(studies, predictions["study"])
    groups = {"": np.ones(len(right), bool)}
    for place, head in enumerate(HEADS):
        groups[f"/{head}"] = predictions["head"] == place
    for kind in np.unique(predictions["type"]):
        groups[f"/{kind}"] = predictions["type"] == kind

    metrics: Metrics = {}
    for group, rows in groups.items():
        if rows.any():
            found = interval_of_mean(right[rows], patient[rows])
            add_interval(metrics, f"{split}/vqa_accuracy", found, group)
    return metrics


def auroc_intervals(
    split: str,
    labels: dict[str, Judged],
    studies: pa.RecordBatch,
) -> Metrics:
    """The 95 % interval by patient of the AUROC: of the mean over the labels that have one, and of each label."""
    defined = {label: judged for label, judged in labels.items() if judged.has_both}
    name = f"{split}/chexpert_auroc"
    metrics: Metrics = {}
    for label, judged in labels.items():
        found = Interval(math.nan, math.nan)
        if label in defined:
            found = label_interval(judged, studies)
        add_interval(metrics, name, found, f"/{label}")

    # rows of the mean are studies, whose patient is left out of all labels together
    chosen = np.unique(np.concatenate([judged.study for judged in labels.values()]))

    def mean_area(rows: np.ndarray) -> float:
        kept = chosen[rows]
        areas = []
        for judged in defined.values():
            inside = np.isin(judged.study, kept)
            areas.append(area(judged.scores.numpy()[inside], judged.truth.numpy()[inside]))
        return float(np.mean(areas)) if areas else math.nan

    add_interval(metrics, name, interval(mean_area, patients_of(studies, chosen)))
    return metrics


def label_interval(judged: Judged, studies: pa.RecordBatch) -> Interval:
    """The interval of one label's AUROC."""
    scores = judged.scores.numpy()
    truth = judged.truth.numpy()
    return interval(lambda rows: area(scores[rows], truth[rows]), patients_of(studies, judged.study))


def area(scores: np.ndarray, truth: np.ndarray) -> float:
    """The AUROC by ranks, as it is computed hundreds of times; nan of one class only."""
    from scipy.stats import rankdata

    positive = truth == 1
    count = int(positive.sum())
    others = len(truth) - count
    if not count or not others:
        return math.nan
    rank_sum = rankdata(scores)[positive].sum()
    return float((rank_sum - count * (count + 1) / 2) / (count * others))


# --- rows -------------------------------------------------------------------------------------------------------------


def batch_predictions(
    batch: dict,
    answers: list[torch.Tensor],
    chexpert: torch.Tensor,
    entropy: torch.Tensor,
    bce: torch.Tensor,
) -> Predictions:
    """A row for each question of a batch: its class, its study's probabilities, and its part of the losses.

    answers, chexpert: logits of each head and of the labels. entropy, bce: the losses of each question and label. `p`
    holds the probabilities (B, 26) of the classes of the question's own head, and zeros behind them.
    """
    classes = torch.stack([logits.argmax(1) for logits in answers], 1)
    predicted = classes.gather(1, batch["head"][:, None])
    probability = torch.zeros(len(chexpert), most_classes(), device=chexpert.device)
    for place, logits in enumerate(answers):
        asked = batch["head"] == place
        probability[asked, : logits.shape[1]] = logits[asked].softmax(1)

    # what it is of
    rows = {
        "index": batch["index"],
        "head": batch["head"],
        "target": batch["target"],
        "study": batch["study"],
        # what the model says
        "predicted": predicted[:, 0],
        "p": probability,
        "chexpert": chexpert.sigmoid(),
        "entropy": entropy.double(),
        "bce": bce.sum(1).double(),
        "known": batch["known"].sum(1).double(),
    }
    predictions = {name: values.cpu().numpy() for name, values in rows.items()}
    predictions["type"] = np.array(batch["type"], dtype="U48")
    return predictions


def group_sizes(
    predictions: Predictions,
    studies: pa.RecordBatch,
) -> dict[str, int]:
    """How many questions each row of the answers' table stands for, and how many studies each of the labels'."""
    sizes = {"all": len(predictions["index"])}
    kinds, counts = np.unique(predictions["type"], return_counts=True)
    for kind, count in zip(kinds, counts, strict=True):
        sizes[str(kind)] = int(count)
    for place, head in enumerate(HEADS):
        rows = predictions["head"] == place
        sizes[head] = int(rows.sum())

    # a study has many questions
    chosen = np.unique(predictions["study"])
    truth = chexpert_truth(studies, chosen)
    known = (truth >= 0).sum(0)
    sizes["macro"] = len(chosen)
    for label, count in zip(CHEXPERT, known, strict=True):
        sizes[label] = int(count)
    return sizes


def gather_predictions(local: list[Predictions]) -> Predictions:
    """All ranks: the rows of every rank's batches as one table, by index. local: this rank's, which may be none."""
    tables = [table for table in gather_objects(join_tables(local)) if table]
    rows = join_tables(tables)
    order = np.argsort(rows["index"], kind="stable")
    return {name: values[order] for name, values in rows.items()}


def join_tables(tables: list[Predictions]) -> Predictions:
    """Tables of the same columns, one below the other; no columns where there are none."""
    joined = {}
    for name in tables[0] if tables else ():
        columns = [table[name] for table in tables]
        joined[name] = np.concatenate(columns)
    return joined
