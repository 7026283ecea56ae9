"""Guide 1's probabilities: whether they can be believed, and from which one on an answer is `yes`.

A probability is calibrated where of all answers given with 0.8 four in five are right. A threshold is chosen on the
validation, never on the split that it is judged on.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from old.distributed_utils import print_main
from old.logging_utils import write_result
from tasks.mimic_cxr.answers import HEADS
from tasks.mimic_cxr.metrics import Judged, Metrics, Predictions

# Of the probabilities from 0 to 1, as most papers have it.
BINS = 15
FILE = "thresholds.json"
BINARY = list(HEADS).index("binary")


class Bins(NamedTuple):
    """Equal ranges of probability that hold any rows: their mean probability, the share that is true, and how many."""

    probability: np.ndarray
    share: np.ndarray
    count: np.ndarray


def given_probability(predictions: Predictions) -> np.ndarray:
    """(N,) the probability of each answer that was given."""
    given = predictions["predicted"][:, None]
    probability = np.take_along_axis(predictions["p"], given, 1)
    return probability[:, 0]


def reliability(probability: np.ndarray, true: np.ndarray) -> Bins:
    """How often what is given a probability is true, in equal ranges of it."""
    place = (probability * BINS).astype(np.int64)
    place = np.minimum(place, BINS - 1)
    _, place = np.unique(place, return_inverse=True)
    count = np.bincount(place)
    sums = np.bincount(place, probability)
    trues = np.bincount(place, true)
    return Bins(sums / count, trues / count, count)


def calibration_error(probability: torch.Tensor, true: torch.Tensor) -> float | None:
    """Expected calibration error: the mean distance of probability and share over the bins; None without rows."""
    from torchmetrics.functional.classification import binary_calibration_error

    if not len(true):
        return None
    error = binary_calibration_error(
        probability.double(),
        true.long(),
        n_bins=BINS,
        norm="l1",
    )
    return float(error)


def calibration_metrics(
    split: str,
    predictions: Predictions,
    labels: dict[str, Judged],
) -> Metrics:
    """The calibration error of the answers given, in all and per head, and of the CheXpert labels, each study once."""
    probability = torch.from_numpy(given_probability(predictions))
    right = torch.from_numpy(predictions["predicted"] == predictions["target"])
    metrics = {f"{split}/vqa_ece": calibration_error(probability, right)}
    for place, head in enumerate(HEADS):
        rows = torch.from_numpy(predictions["head"] == place)
        if rows.any():
            metrics[f"{split}/vqa_ece/{head}"] = calibration_error(probability[rows], right[rows])

    # a mean over the labels that have any study
    name = f"{split}/chexpert_ece"
    errors = {}
    for label, judged in labels.items():
        errors[f"{name}/{label}"] = calibration_error(judged.scores, judged.truth)
    defined = [error for error in errors.values() if error is not None]
    metrics[name] = sum(defined) / len(defined) if defined else None
    return metrics | errors


# --- thresholds -------------------------------------------------------------------------------------------------------


class Decision(NamedTuple):
    """A question of yes or no: the probabilities of yes, and 0 or 1."""

    scores: np.ndarray
    truth: np.ndarray


def decisions(predictions: Predictions, labels: dict[str, Judged]) -> dict[str, Decision]:
    """What has a threshold: the binary answers, and each CheXpert label; only those with both truths."""
    rows = predictions["head"] == BINARY
    scores = predictions["p"][rows, 1].astype(np.float64)
    found = {}
    if len(np.unique(predictions["target"][rows])) == 2:
        found["binary"] = Decision(scores, predictions["target"][rows])
    for label, judged in labels.items():
        if judged.has_both:
            scores = judged.scores.double().numpy()
            found[label] = Decision(scores, judged.truth.numpy())
    return found


def best_threshold(decision: Decision) -> float:
    """The probability from which on `yes` gives the highest balanced accuracy; of equal ones that nearest to 0.5.

    Balanced, as it does not depend on how many are ill: accuracy would say `no` to what is rare, and F1 has other
    values once yes and no change places.
    """
    order = np.argsort(decision.scores, kind="stable")
    scores = decision.scores[order]
    truth = decision.truth[order]

    # what is missed below each place, and what is rightly denied
    missed = np.append(0, np.cumsum(truth))
    denied = np.append(0, np.cumsum(1 - truth))
    sensitivity = 1 - missed / missed[-1]
    specificity = denied / denied[-1]
    balanced = (sensitivity + specificity) / 2

    # halfway between neighbours; no place lies between equal scores
    edges = np.concatenate([[0.0], scores, [1.0]])
    middles = (edges[:-1] + edges[1:]) / 2
    possible = np.ones(len(middles), bool)
    possible[1:-1] = scores[1:] > scores[:-1]
    best = balanced[possible].max()
    possible &= balanced >= best - 1e-12
    candidates = middles[possible]
    nearest = np.abs(candidates - 0.5).argmin()
    return float(candidates[nearest])


def chosen_thresholds(
    split: str,
    predictions: Predictions,
    labels: dict[str, Judged],
) -> Metrics:
    """The threshold that suits a split best, of each decision, among its metrics."""
    metrics: Metrics = {}
    for name, decision in decisions(predictions, labels).items():
        metrics[f"{split}/threshold/{name}"] = best_threshold(decision)
    return metrics


def thresholds_in(metrics: Metrics | None) -> dict[str, float]:
    """{decision: threshold} among the metrics of a validation."""
    found = {}
    for name, value in (metrics or {}).items():
        if name.startswith("val/threshold/"):
            found[name.removeprefix("val/threshold/")] = value
    return found


def decision_metrics(
    split: str,
    predictions: Predictions,
    labels: dict[str, Judged],
    thresholds: dict[str, float],
) -> Metrics:
    """Each decision at 0.5, as the answers are given, and at its threshold from the validation."""
    metrics: Metrics = {}
    for name, decision in decisions(predictions, labels).items():
        if name not in thresholds:
            continue
        as_given = judge_decision(decision, 0.5)
        tuned = judge_decision(decision, thresholds[name])
        for measure, value in as_given.items():
            metrics[f"{split}/decision_{measure}/{name}"] = value
        for measure, value in tuned.items():
            metrics[f"{split}/decision_{measure}/{name} tuned"] = value
    return metrics


def judge_decision(decision: Decision, threshold: float) -> dict[str, float]:
    """What comes of saying yes from a threshold on."""
    # the answer of two equal probabilities is no
    said = decision.scores > threshold if threshold == 0.5 else decision.scores >= threshold
    true = decision.truth == 1
    sensitivity = float(said[true].mean())
    specificity = float((~said[~true]).mean())
    return {
        "threshold": threshold,
        "accuracy": float((said == true).mean()),
        "balanced": (sensitivity + specificity) / 2,
        "sensitivity": sensitivity,
        "specificity": specificity,
    }


# --- the file of the run ----------------------------------------------------------------------------------------------


def write_thresholds(run_folder: Path, metrics: Metrics, step: int) -> bool:
    """Rank 0: thresholds.json of the validation that chose best.pt, which is of this step; whether the disk took it."""
    content = {"step": step, "chosen_by": "balanced accuracy on val", "thresholds": thresholds_in(metrics)}
    text = json.dumps(content, indent=2) + "\n"
    return write_result(run_folder / FILE, text.encode())


def read_thresholds(run_folder: Path, checkpoint: str | None, step: int) -> dict[str, float]:
    """{decision: threshold} of the checkpoint of this step; where there is none, rank 0 says why.

    checkpoint: --resume_from, a file or a run folder, beside or in which the file lies; None for the run folder's.
    """
    if checkpoint and checkpoint != "auto":
        path = Path(checkpoint)
        run_folder = path if path.is_dir() else path.parent
    path = run_folder / FILE
    advice = "no threshold is judged"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        of_step = content["step"]
        thresholds = {name: float(value) for name, value in content["thresholds"].items()}
    except FileNotFoundError:
        print_main(f"{path}: not there, as in a run without validation; {advice}")
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        print_main(f"{path}: not readable; {advice}")
        return {}

    if of_step != step:
        print_main(f"{path}: of step {of_step}, not of step {step}; {advice}")
        return {}
    return thresholds
