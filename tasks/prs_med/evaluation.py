"""What an evaluation comes to: the ranks' scores put together, and their means with 95 % intervals by case."""

import math

from old.cli_utils import InputError
from old.distributed_utils import agree_on_errors, gather_objects
from old.interval_utils import interval_of_mean
from old.loop_utils import TrainingRun
from tasks.prs_med.data import PositionData, case_of
from tasks.prs_med.metrics import Scores
from tasks.prs_med.report import Example, Results, draw_predictions

# means over rows; those that lie in 0..1
SHARES = ("dice", "iou", "position_accuracy", "position_accuracy_mask")
MEANS = (*SHARES, "hd95")


def gather_scores(scores: list[Scores], error: str) -> list[Scores]:
    """All ranks: the scores of all, in row order, so that sums do not depend on the ranks.

    error: why a row of this rank cannot be used. Raises InputError on all ranks.
    """
    with agree_on_errors():
        if error:
            raise InputError(error)
    return sorted(row for part in gather_objects(scores) for row in part)


def gather_examples(examples: dict[int, Example]) -> list[Example]:
    """All ranks: the rows of all that a figure shows, in order."""
    together = {}
    for part in gather_objects(examples):
        together |= part
    return [together[index] for index in sorted(together)]


def log_results(results: Results, split: str, training: TrainingRun) -> None:
    """An evaluation in the log; its figure, too, but not that of every short epoch."""
    log = training.log
    step = training.progress.step
    log.write(step, training.progress.epoch + 1, results.metrics)
    seconds_apart = 0 if split == "test" else 60
    log.figures(lambda: {f"{split}_predictions": draw_predictions(results.examples)}, step, seconds_apart)


def mean_metrics(
    scores: list[Scores],
    data: PositionData,
    split: str,
    lambda_seg: float,
    lambda_txt: float,
) -> dict[str, float]:
    """The metrics of a split by name: the losses of training, then means over all rows and over each modality's.

    The mask's loss is a mean over rows, the text's over tokens. of_rows: of how many rows these were chosen.
    """
    cases = [case_of(row) for row in data.rows]
    seg = sum(row.mask_loss for row in scores) / len(scores)
    txt = sum(row.text_loss for row in scores) / sum(row.tokens for row in scores)
    metrics = {
        f"{split}/loss": lambda_seg * seg + lambda_txt * txt,
        f"{split}/loss_seg": seg,
        f"{split}/loss_txt": txt,
        f"{split}/text_loss": txt,
    }
    metrics |= mean_scores(scores, cases, split, "")
    if data.of_rows > len(data):
        metrics[f"{split}/of_rows"] = data.of_rows
    for modality in sorted({row.modality for row in data.rows}):
        of_modality = [row for row in scores if data.rows[row.index].modality == modality]
        metrics |= mean_scores(of_modality, cases, split, f"/{modality}")
    return metrics


def mean_scores(
    scores: list[Scores],
    cases: list[str],
    split: str,
    ending: str,
) -> dict[str, float]:
    """The means of some rows with their 95 % intervals by case, by the metric's name with this ending.

    What no row has is left out. rows, cases: how many there are.
    """
    of_cases = {cases[row.index] for row in scores}
    means = {f"{split}/rows{ending}": len(scores), f"{split}/cases{ending}": len(of_cases)}
    for name in MEANS:
        known = [row for row in scores if getattr(row, name) is not None]
        if not known:
            continue
        values = [float(getattr(row, name)) for row in known]
        of_rows = [cases[row.index] for row in known]
        mean = sum(values) / len(values)
        means |= with_interval(f"{split}/{name}", ending, mean, values, of_rows, name in SHARES)
    return means


def with_interval(
    name: str,
    ending: str,
    mean: float,
    values: list[float],
    cases: list[str],
    bounded: bool,
) -> dict[str, float]:
    """A mean over rows under its name, and the ends of its interval, which one case alone does not have."""
    low, high = interval_of_mean(values, cases, bounded)
    if math.isnan(low):
        return {f"{name}{ending}": mean}
    return {f"{name}{ending}": mean, f"{name}_low{ending}": low, f"{name}_high{ending}": high}
