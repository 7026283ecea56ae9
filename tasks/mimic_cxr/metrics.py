"""Guide 1's metrics: plain arithmetic on the predictions of a split, one row a question, see train_mimic_cxr.py."""

import math

import numpy as np
import pyarrow as pa
import torch

from distributed_utils import gather_objects
from tasks.mimic_cxr.answers import CHEXPERT, HEADS

Metrics = dict[str, float | None]
Predictions = dict[str, np.ndarray]


def split_losses(split: str, predictions: Predictions, head_weight: dict, chexpert_weight: float) -> Metrics:
    """The training loss of a split and its two parts. None where one is not finite."""
    vqa = 0.0
    for place, head in enumerate(HEADS):
        rows = predictions["head"] == place
        if rows.any():
            vqa += head_weight[head] * float(predictions["entropy"][rows].mean())
    labels = float(predictions["bce"].sum() / max(1.0, predictions["known"].sum()))
    values = {"loss": vqa + chexpert_weight * labels, "loss_vqa": vqa, "loss_chexpert": labels}
    return {f"{split}/{name}": value if math.isfinite(value) else None for name, value in values.items()}


def answer_metrics(split: str, predictions: Predictions, classes: dict[str, list[int]]) -> Metrics:
    """Accuracy in all, per head and per question type, beside that of the type's most frequent training answer.

    Each head has its macro F1, too. classes: how often each answer of a question type occurs in training.
    """
    from torchmetrics.functional.classification import multiclass_f1_score

    # a type that training does not have is answered wrongly
    kinds, place_of_kind = np.unique(predictions["type"], return_inverse=True)
    usual_answers = [int(np.argmax(classes[kind])) if kind in classes else -1 for kind in kinds]
    right = predictions["predicted"] == predictions["target"]
    usual = np.array(usual_answers)[place_of_kind] == predictions["target"]
    metrics = {
        f"{split}/vqa_accuracy": float(right.mean()),
        f"{split}/vqa_majority": float(usual.mean()),
    }

    # each head, and each question type
    for place, (head, names) in enumerate(HEADS.items()):
        rows = predictions["head"] == place
        if rows.any():
            predicted = torch.from_numpy(predictions["predicted"][rows])
            target = torch.from_numpy(predictions["target"][rows])
            f1 = multiclass_f1_score(predicted, target, len(names), average="macro")
            metrics[f"{split}/vqa_accuracy/{head}"] = float(right[rows].mean())
            metrics[f"{split}/vqa_majority/{head}"] = float(usual[rows].mean())
            metrics[f"{split}/vqa_f1/{head}"] = float(f1)
    for place, kind in enumerate(kinds):
        rows = place_of_kind == place
        metrics[f"{split}/vqa_accuracy/{kind}"] = float(right[rows].mean())
        metrics[f"{split}/vqa_majority/{kind}"] = float(usual[rows].mean())
    return metrics


def chexpert_metrics(split: str, predictions: Predictions, studies: pa.RecordBatch) -> Metrics:
    """AUROC and average precision, macro and per label, each study once, without uncertain and blank labels.

    None where a metric is undefined, as for a label of one class only.
    """
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision

    metrics: Metrics = {}
    labels = judged_labels(predictions, studies)
    for name, metric in (("chexpert_auroc", binary_auroc), ("chexpert_ap", binary_average_precision)):
        values = {}
        for label, (scores, target) in labels.items():
            both = len(target.unique()) == 2
            values[label] = float(metric(scores, target)) if both else None
        defined = [value for value in values.values() if value is not None]
        metrics[f"{split}/{name}"] = sum(defined) / len(defined) if defined else None
        metrics |= {f"{split}/{name}/{label}": value for label, value in values.items()}
    return metrics


def judged_labels(predictions: Predictions, studies: pa.RecordBatch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """{CheXpert label: (probabilities, truth of 0 and 1)} of the studies in which it is neither uncertain nor blank."""
    chosen, first = np.unique(predictions["study"], return_index=True)
    truth = chexpert_truth(studies, chosen)
    scores = predictions["chexpert"][first]
    labels = {}
    for i, label in enumerate(CHEXPERT):
        rows = truth[:, i] >= 0
        target = truth[rows, i].astype(np.int64)
        labels[label] = (torch.from_numpy(scores[rows, i]), torch.from_numpy(target))
    return labels


def chexpert_truth(studies: pa.RecordBatch, chosen: np.ndarray) -> np.ndarray:
    """int8 (n, 14) of the chosen studies: 1, 0, or -1 where blank or uncertain."""
    truth = np.stack([studies[name].to_numpy()[chosen] for name in CHEXPERT], 1)
    return np.where(truth >= 0, truth, -1)


def group_sizes(predictions: Predictions, studies: pa.RecordBatch) -> dict[str, int]:
    """How many questions each row of the answers' table stands for, and how many studies each of the labels'."""
    kinds, counts = np.unique(predictions["type"], return_counts=True)
    sizes = {"all": len(predictions["index"])}
    sizes |= dict(zip(kinds.tolist(), counts.tolist(), strict=True))
    for place, head in enumerate(HEADS):
        sizes[head] = int((predictions["head"] == place).sum())

    chosen = np.unique(predictions["study"])
    known = (chexpert_truth(studies, chosen) >= 0).sum(0)
    sizes["macro"] = len(chosen)
    return sizes | dict(zip(CHEXPERT, known.tolist(), strict=True))


def gather_predictions(local: list[Predictions]) -> Predictions:
    """All ranks: the rows of every rank's batches as one table, by index. local: this rank's, which may be none."""
    tables = [table for table in gather_objects(join_tables(local)) if table]
    rows = join_tables(tables)
    order = np.argsort(rows["index"], kind="stable")
    return {name: values[order] for name, values in rows.items()}


def join_tables(tables: list[Predictions]) -> Predictions:
    """Tables of the same columns, one below the other; no columns where there are none."""
    names = tables[0] if tables else ()
    return {name: np.concatenate([table[name] for table in tables]) for name in names}
