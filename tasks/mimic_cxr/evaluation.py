"""Guide 1's evaluations: all that is said of a split's predictions, and what becomes of it in a run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from old.distributed_utils import agree_on_errors, broadcast_object, print_main, world
from old.loop_utils import TrainingRun
from tasks.mimic_cxr.answers import CHEXPERT
from tasks.mimic_cxr.blind import blind_metrics
from tasks.mimic_cxr.calibration import calibration_metrics, chosen_thresholds, decision_metrics, thresholds_in
from tasks.mimic_cxr.calibration import read_thresholds, write_thresholds
from tasks.mimic_cxr.data import QuestionData
from tasks.mimic_cxr.metrics import Metrics, Predictions, answer_intervals, answer_metrics, auroc_intervals
from tasks.mimic_cxr.metrics import chexpert_metrics, group_sizes, judge_labels, split_losses
from tasks.mimic_cxr.report import draw_split, make_results_folder, print_metrics, write_evaluation, write_predictions


class Evaluation(NamedTuple):
    """What evaluate gives, the same on every rank and at any number of ranks. sizes: see group_sizes."""

    metrics: Metrics
    sizes: dict[str, int]
    predictions: Predictions


def judge(
    data: QuestionData,
    predictions: Predictions,
    head_weight: dict[str, float],
    chexpert_weight: float,
) -> Evaluation:
    """The metrics of a split's predictions with their intervals; a label never trained has no probability in them."""
    untrained = [i for i, label in enumerate(CHEXPERT) if label not in data.trained]
    predictions["chexpert"][:, untrained] = np.nan

    # losses, answers and labels
    split = data.split
    studies = data.index.studies
    metrics = split_losses(split, predictions, head_weight, chexpert_weight)
    metrics |= answer_metrics(split, predictions, data.index.facts["classes"])
    metrics |= answer_intervals(split, predictions, studies)
    metrics |= chexpert_metrics(split, predictions, studies)
    labels = judge_labels(predictions, studies)
    metrics |= auroc_intervals(split, labels, studies)

    # what the probabilities are worth
    metrics |= calibration_metrics(split, predictions, labels)
    if split == "val":
        metrics |= chosen_thresholds(split, predictions, labels)
    metrics |= {f"{split}/questions": len(data), f"{split}/questions_in_all": data.drawn_from or len(data)}
    return Evaluation(metrics, group_sizes(predictions, studies), predictions)


def judge_further(
    result: Evaluation,
    data: QuestionData,
    training: QuestionData,
    thresholds: dict[str, float],
    answer: Callable[[QuestionData], Predictions] | None,
    seed: int,
) -> Evaluation:
    """All ranks: what the last test says besides: decisions at the thresholds of the validation, scores unseen.

    answer: what the model says to some questions; None leaves the blind scores out.
    """
    metrics = dict(result.metrics)
    if data.split != "val":
        labels = judge_labels(result.predictions, data.index.studies)
        metrics |= decision_metrics(data.split, result.predictions, labels, thresholds)
    if answer:
        metrics |= blind_metrics(answer, data, training, result.predictions, seed)
    return result._replace(metrics=metrics)


def name_split(data: QuestionData, name: str) -> str:
    """The title of a split's tables; name: of the weights."""
    if data.drawn_from:
        return f"{data.split}, {name}, {len(data):,} of {data.drawn_from:,} questions"
    return f"{data.split}, {name}"


def log_evaluation(data: QuestionData, result: Evaluation, training: TrainingRun) -> None:
    """An evaluation in the log; its figures, too, but not those of every short epoch."""
    log = training.log
    progress = training.progress
    log.write(progress.step, progress.epoch + 1, result.metrics)
    draw = partial(draw_split, data, result.predictions)
    seconds_apart = 0 if data.split == "test" else 60
    log.figures(draw, progress.step, seconds_apart)


def keep_predictions(
    run_folder: Path,
    data: QuestionData,
    result: Evaluation,
    thresholds: dict[str, float],
) -> bool:
    """--save_predictions: rank 0 writes them; False where the disk does not take them."""
    rank, _ = world()
    return rank > 0 or write_predictions(run_folder, data, result.predictions, thresholds)


def log_validation(data: QuestionData, result: Evaluation, training: TrainingRun) -> None:
    """A validation in the log, and its headline on the screen."""
    log_evaluation(data, result, training)
    progress = training.progress
    accuracy = result.metrics["val/vqa_accuracy"]
    auroc = result.metrics["val/chexpert_auroc"]
    shown = "undefined" if auroc is None else f"{auroc:.4f}"
    where = f"epoch {progress.epoch + 1}" if training.eval_epochs else f"step {progress.step}"
    print_main(f"{where}: val accuracy {accuracy:.4f}, CheXpert AUROC {shown}")


def keep_validation(
    data: QuestionData,
    result: Evaluation,
    training: TrainingRun,
    save_predictions: bool,
) -> None:
    """All ranks: what belongs to the validation that chose best.pt: its metrics, its thresholds, its predictions."""
    rank, _ = world()
    training.progress.best_metrics = result.metrics
    if rank == 0:
        write_thresholds(training.run_folder, result.metrics, training.progress.step)
    if save_predictions:
        keep_predictions(training.run_folder, data, result, thresholds_in(result.metrics))


def evaluate_only(
    test: Callable[[dict[str, float]], Evaluation],
    data: QuestionData,
    run_folder: Path,
    checkpoint: str | None,
    step: int,
    save_predictions: bool,
) -> None:
    """--eval_only: the metrics of one split, printed and written where the disk takes them.

    test: the evaluation at some thresholds. checkpoint: --resume_from, which is of this step.
    """
    with agree_on_errors():
        make_results_folder(run_folder)
    thresholds = read_thresholds(run_folder, checkpoint, step) if data.split == "test" else {}
    thresholds = broadcast_object(thresholds)
    result = test(thresholds)
    rank, _ = world()
    if rank > 0:
        return
    print_metrics(name_split(data, f"step {step}"), result.metrics, result.sizes)
    metrics = result.metrics | {"step": step}
    written = write_evaluation(run_folder, metrics, data, result.predictions)
    if save_predictions:
        written = keep_predictions(run_folder, data, result, thresholds) and written
    if written:
        report = run_folder / f"eval_{data.split}.json"
        print(f"{len(data):,} questions; written: {report}, {run_folder}/figures", flush=True)


def thresholds_of(best_metrics: Metrics | None, validated: bool) -> dict[str, float]:
    """The thresholds of the best validation; where there are none, rank 0 says so."""
    found = thresholds_in(best_metrics)
    if not found:
        reason = "has no decision with both answers" if validated else "has no questions"
        print_main(f"the validation {reason}: no threshold is chosen, and none is judged")
    return found
