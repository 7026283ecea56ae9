"""All folds of a cross-validation together: their folder, their predictions on one scale, and what these score."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from old.checkpoint_utils import (
    RunLock,
    begin_afresh,
    check_run_folder,
    finish_deleting,
    load_checkpoint,
    lock_run_folder,
)
from old.cli_utils import InputError, save_args
from old.distributed_utils import agree_on_errors, print_main, world
from old.logging_utils import print_table, save_figure, write_result
from tasks.survival.batch import asked_batch
from tasks.survival.cohort import Outcome
from tasks.survival.figures import draw_survival
from tasks.survival.flags import adopt_settings
from tasks.survival.folds import Fold
from tasks.survival.metrics import Evaluation, concordance, log_cumulative_hazard, repeat_curve, score
from tasks.survival.metrics import score_true_risk, survival_at
from tasks.survival.report import FoldResult, PredictedCases, or_undefined, predictions_table
from tasks.survival.report import print_metrics, write_json
from tasks.survival.settings import Setup


def begin_cross_validation(
    run_folder: Path, may_exist: bool, overwrite: bool, write_args: Callable[[], None]
) -> RunLock | None:
    """All ranks: lock the folder of all folds and write args.yaml; with overwrite it is emptied. Returns the lock."""
    with agree_on_errors():
        if (run_folder / "last.pt").exists():
            raise InputError(f"{run_folder}: holds a single run; choose another --log_dir")
    lock = lock_run_folder(run_folder, may_exist, overwrite=overwrite)
    with agree_on_errors():
        try:
            if world()[0] == 0:
                # all folds at once: a killed run must find none of the old one
                if overwrite:
                    folds = sorted(run_folder.glob("fold_*"))
                    for folder in [run_folder, *folds]:
                        check_run_folder(folder, True, True)
                    begin_afresh(run_folder, tuple(folds))
                # folds of an old run that a kill left while --overwrite deleted them
                finish_deleting(run_folder)
                write_args()
        except OSError as error:
            raise InputError(f"{run_folder}: cannot write here ({error.strerror}); choose another --log_dir") from None
    return lock


def cross_validate(
    fit: Callable[..., tuple[int, FoldResult | None]],
    folds: list[Fold],
    run_folder: Path,
    format: str,
    setup: Setup,
    args: argparse.Namespace,
) -> int:
    """Each fold in a folder of its own, then the metrics of all predictions together; returns the exit code.

    fit(fold, run_folder, checkpoint, setup, args): trains one, and returns (exit code, results). format: of the
    checkpoints.

    Predictions, baseline hazards and metrics are of the last epoch's weights: each fold's best.pt was chosen by its
    score on that same fold. What best.pt would have reached stands beside, as `c_index_best`.
    """
    begun = time.time()
    may_exist = bool(args.resume_from) or args.overwrite
    write_args = partial(save_args, run_folder / "args.yaml", args)
    lock = begin_cross_validation(run_folder, may_exist, args.overwrite, write_args)
    results = []
    for k, fold in enumerate(folds, start=1):
        print_main(f"fold {k} of {len(folds)}: {fold.name}")
        fold_folder = run_folder / f"fold_{k}"
        fold_lock = lock_run_folder(fold_folder, may_exist, overwrite=args.overwrite)

        # begin the fold, or resume where it stands
        checkpoint = load_checkpoint(args.resume_from, fold_folder, format, resume=True)
        if checkpoint:
            adopt_settings(args, checkpoint, str(fold_folder))
        code, result = fit(fold, fold_folder, checkpoint, setup, args)
        del fold_lock
        if code:
            return code
        if result.signal and k < len(folds):
            return result.signal
        results.append(result)

    if setup.ranks.is_main:
        facts = {
            "steps": sum(result.steps for result in results),
            "epochs": args.epochs,
            "folds": len(folds),
            "world_size": setup.ranks.world_size,
            "effective_batch_size": asked_batch(args, setup.ranks.world_size).effective_batch_size,
            "precision": setup.precision,
            "seconds": round(time.time() - begun, 1),
        }
        report_folds(results, facts, run_folder, args.eval_years)
    print_main(f"pooled: {run_folder}/predictions.csv, {run_folder}/summary.json; each fold: {run_folder}/fold_*")
    del lock
    return 0


# --- one scale for all folds ------------------------------------------------------------------------------------------


def common_follow_up(results: list[FoldResult]) -> float:
    """The last time, in years, that the training cases of all folds know."""
    return min(result.last.baseline["until"] for result in results)


def pooled_risk(results: list[Evaluation], until: float) -> np.ndarray:
    """The risks of all folds' validation cases on one scale.

    The models of different folds have log-hazards with different constants. Each fold's baseline hazard makes them
    comparable: taken is the log of the cumulative hazard at `until`, the last time that all folds know.
    """
    return np.concatenate(
        [log_cumulative_hazard(result.baseline, result.log_hazard, [until])[:, 0] for result in results]
    )


def survival_of_folds(results: list[FoldResult], at) -> np.ndarray:
    """(cases, times) probabilities of survival of all folds' validation cases."""
    return np.concatenate([survival_at(result.last.baseline, result.last.log_hazard, at) for result in results])


def reference_of_folds(results: list[FoldResult], at) -> np.ndarray:
    """What survival_of_folds is compared with: for each case the Kaplan-Meier curve of its fold's training cases."""
    return np.concatenate([repeat_curve(result.fold.train_outcome, len(result.fold.val), at) for result in results])


def pooled_outcome(results: list[FoldResult]) -> Outcome:
    """Events and times of all folds' validation cases."""
    return results[0].fold.cohort.outcome(pooled_rows(results))


def pooled_rows(results: list[FoldResult]) -> np.ndarray:
    """The rows of all folds' validation cases."""
    return np.concatenate([result.fold.val for result in results])


# --- results ----------------------------------------------------------------------------------------------------------


def score_folds(results: list[FoldResult], years: list[float]) -> dict[str, float | None]:
    """Metrics of all folds' validation cases together, and the scores of each fold."""
    until = common_follow_up(results)
    outcome = pooled_outcome(results)

    # each case is validated once, so that the folds' validation cases are a cohort of their own
    scores = score(
        pooled_risk([result.last for result in results], until),
        outcome,
        train=outcome,
        years=years,
        survival=partial(survival_of_folds, results),
        final=True,
        reference=partial(reference_of_folds, results),
        until=until,
    )
    metrics = {f"val/{name}": value for name, value in scores.items()}
    metrics |= score_true_risk(results[0].fold.cohort, pooled_rows(results))

    # the folds one by one, and what best.pt would have reached
    known = [result.c_index for result in results if result.c_index is not None]
    if known:
        metrics["val/c_index_mean"] = float(np.mean(known))
        metrics["val/c_index_sd"] = float(np.std(known))
    for k, result in enumerate(results, start=1):
        metrics[f"val/c_index/fold_{k}"] = result.c_index
    best_risk = pooled_risk([result.best for result in results], until)
    metrics["val/c_index_best"] = concordance(best_risk, outcome.event, outcome.time)
    for k, result in enumerate(results, start=1):
        metrics[f"val/c_index_best/fold_{k}"] = result.c_index_best
    return metrics


def report_folds(
    results: list[FoldResult],
    facts: dict,
    run_folder: Path,
    years: list[float],
) -> None:
    """Rank 0: the table, predictions.csv, the figure and summary.json of all folds. facts: what the summary adds."""
    metrics = score_folds(results, years)
    print_folds(metrics, results, years)
    parts = [
        PredictedCases(result.fold.name, result.fold.val, result.last.log_hazard, result.last.baseline)
        for result in results
    ]
    table = predictions_table(results[0].fold.cohort, parts, years)
    write_result(run_folder / "predictions.csv", table)
    save_figure(run_folder / "figures" / "survival.png", draw_folds(results, years))
    write_json(run_folder / "summary.json", metrics | facts)


def print_folds(
    metrics: dict[str, float | None],
    results: list[FoldResult],
    years: list[float],
) -> None:
    """Rank 0: the pooled metrics, and the scores of each fold."""
    print_metrics(f"{len(results)} folds pooled, last epoch", metrics, years)
    rows = {}
    for result in results:
        row = {"c_index": result.c_index, "c_index_best": result.c_index_best}
        rows[result.fold.name] = {name: or_undefined(value) for name, value in row.items()}
    print_table("fold", rows)
    print("c_index_best: of each fold's best.pt, chosen on the same fold and therefore optimistic", flush=True)


def draw_folds(results: list[FoldResult], years: list[float]):
    """A matplotlib figure of all folds' validation cases."""
    until = common_follow_up(results)
    outcome = pooled_outcome(results)
    risk = pooled_risk([result.last for result in results], until)
    known = [year for year in years if year < until]
    survival = partial(survival_of_folds, results)
    heading = f"{len(results)} folds pooled, last epoch"
    return draw_survival(risk, outcome, outcome, known, survival, heading)
