"""What a survival run tells: rows of the banner, warnings, tables of metrics, predictions and baseline hazards."""

import csv
import io
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import nn
from torch.utils.data import DataLoader

from old.cli_utils import InputError, counted
from old.distributed_utils import print_main, world
from old.hardware_utils import available_ram_gb
from old.logging_utils import print_table, save_figure, write_result
from old.loop_utils import TrainingRun, finish_run, say_where
from old.manifest_utils import file_sha256, write_atomically
from tasks.survival.cohort import Cohort
from tasks.survival.data import MultiGPUSurvivalDataset
from tasks.survival.figures import draw_results
from tasks.survival.folds import Fold
from tasks.survival.metrics import Evaluation, survival_at

# after a checkpoint's name: its score is optimistic
CHOSEN = "(chosen on this fold)"

# --- the banner -------------------------------------------------------------------------------------------------------


def describe_cases(fold: Fold) -> dict[str, str]:
    """Rows of the banner: whom is learned of."""
    cohort = fold.cohort
    train = fold.train_outcome
    training = f"{len(fold.train)} training ({int(train.event.sum())} events)"
    validation = f"{len(fold.val)} validation ({int(fold.val_outcome.event.sum())} events)"
    left_out = len(cohort) - len(fold.train) - len(fold.val)
    patients = "no column for them (--id_column): each row counts as one"
    if cohort.id_name:
        patients = f"{len(set(cohort.case))} by column {cohort.id_name!r}"
    return {
        "cases": f"{training}, {validation}, {fold.name}, {left_out} rows left out",
        "patients": patients,
        "follow-up": f"{train.time.min():.2f} to {train.time.max():.2f} years in the training fold",
    }


def describe_model(fold: Fold, model: nn.Module, name: str, image_size: list[int], ties: str) -> dict[str, str]:
    """Rows of the banner: what learns, and what."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    loss = f"Cox, {ties} ties"
    if fold.features:
        loss = f"mean square of {fold.outputs} features: {', '.join(fold.features.names)}"
    size = " x ".join(map(str, image_size))
    return {"model": f"{name}, {parameters:,} parameters, input {size}", "loss": loss}


def describe_cache(data: MultiGPUSurvivalDataset, cases: int) -> str:
    """A row of the banner: what share is cached, what that takes, and after how many epochs all was seen."""
    gib = data.volumes.bytes() / 2**30
    folder = data.volumes.cache.folder
    smart = data.smart_cache
    if smart:
        share = f"{smart.cached} of {len(smart.rows)} cases of each rank ({smart.cached / len(smart.rows):.0%})"
        memory = f"{smart.cached * gib:.2f} GB of memory a rank"
        epochs = smart.epochs_until_all_seen()
        return f"SmartCache: {share}, {memory}, {smart.replaced} replaced an epoch, all seen after {epochs} epochs"
    if folder is None:
        return "none: each volume is read anew in each epoch"
    return f"100% on disk in {folder}, {cases * gib:.2f} GB, no memory; filled in the first epoch, which sees all"


def print_warnings(fold: Fold, loader: DataLoader, years: list[float]) -> None:
    """Rank 0: what will probably go wrong, or was not meant so. loader: of the training. years: the horizons."""
    data = loader.dataset
    steps = loader.batch_sampler.steps_per_epoch()
    if data.smart_cache:
        needed = data.smart_cache.cached * data.volumes.bytes() / 2**30
        available = available_ram_gb()
        if needed > available:
            reason = f"the smart cache takes {needed:.1f} GB for each process, {available:.1f} GB are available"
            print_main(f"warning: {reason}; lower --cache_rate")

    train = fold.train_outcome
    if years[0] >= min(train.time.max(), fold.val_outcome.time.max()):
        print_main("warning: all --eval_years lie beyond the follow-up; is --time_unit right?")

    events = int(train.event.sum())
    if data.event_balanced and events < steps:
        least = math.ceil(len(fold.train) / events)
        print_main(f"{events} events for {steps} steps: some have none; all have from --batch_size {least} on")


# --- metrics ----------------------------------------------------------------------------------------------------------


def or_undefined(value: float | None) -> float | str:
    """A metric as a table shows it."""
    return "undefined" if value is None else value


def print_epoch(epoch: int, headline: str, metrics: dict[str, float | None]) -> None:
    """Rank 0: one line after the validation of an epoch (from 0)."""
    value = metrics[f"val/{headline}"]
    told = "undefined" if value is None else f"{value:.4f}"
    print_main(f"epoch {epoch + 1}: val {headline} {told}, loss {metrics['val/loss']:.4f}")


def print_metrics(title: str, metrics: dict[str, float | None], years: list[float]) -> None:
    """Two tables: the scores of the whole fold, and those of each horizon."""
    fold_rows = {}
    for name, value in metrics.items():
        if name.count("/") == 1 and name != "val/best_step":
            fold_rows[name.removeprefix("val/")] = {"value": or_undefined(value)}
    print_table(title, fold_rows)
    if "val/c_index" not in metrics:
        return

    horizons = {}
    names = [name for name in ("auc", "brier", "brier_km") if f"val/{name}/{years[0]:g}y" in metrics]
    for year in years:
        horizons[f"{year:g} years"] = {name: or_undefined(metrics[f"val/{name}/{year:g}y"]) for name in names}
    print_table(f"{title}: horizons", horizons)


def write_json(path: Path, facts: dict) -> None:
    """Rank 0: metrics as a file."""
    write_result(path, (json.dumps(facts, indent=2) + "\n").encode())


# --- predictions ------------------------------------------------------------------------------------------------------


class PredictedCases(NamedTuple):
    """Rows of the cohort under one name in the table of predictions. baseline: None where S(t) stays blank."""

    fold: str
    rows: np.ndarray
    log_hazard: np.ndarray
    baseline: dict | None


def predictions_table(cohort: Cohort, parts: list[PredictedCases], years: list[float]) -> bytes:
    """CSV: case, fold, time and event where known, log_hazard, S(t) at each horizon (blank beyond the follow-up)."""
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    horizons = [f"S({year:g}y)" for year in years]
    table.writerow(["case", "fold", "time_years", "event", "log_hazard", *horizons])
    for part in parts:
        survival = np.zeros((len(part.rows), len(years)))
        until = -math.inf
        if part.baseline:
            survival = survival_at(part.baseline, part.log_hazard, years)
            until = part.baseline["until"]

        # new cases have no outcome yet
        for i, log_hazard, chances in zip(part.rows, part.log_hazard, survival, strict=True):
            outcome = ["", ""]
            if len(cohort.time):
                outcome = [f"{cohort.time[i]:.6f}", int(cohort.event[i])]
            cells = [f"{chance:.6f}" if year <= until else "" for year, chance in zip(years, chances, strict=True)]
            table.writerow([cohort.case[i], part.fold, *outcome, f"{log_hazard:.9g}", *cells])
    return text.getvalue().encode()


def read_baselines(path: Path) -> dict:
    """{sha256 of a checkpoint: its baseline hazard}; empty without a readable file."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        kept = None
    return kept if isinstance(kept, dict) else {}


def add_baseline(path: Path, baseline: dict) -> None:
    """Rank 0: keep a checkpoint's baseline hazard for --predict: baseline.json beside it, under its sha256."""
    file = path.parent / "baseline.json"
    kept = read_baselines(file) | {file_sha256(path): baseline}
    write_result(file, (json.dumps(kept) + "\n").encode())


def write_results(
    fold: Fold, result: Evaluation, trained_on: str, checkpoint: Path, run_folder: Path, years: list[float]
) -> None:
    """Rank 0: predictions.csv of both sides of the fold, and the baseline hazard of the checkpoint.

    trained_on: digest of the cases that the checkpoint was trained on.
    """
    cohort = fold.cohort
    if trained_on == cohort.digest(fold.train):
        add_baseline(checkpoint, result.baseline)
    else:
        doubt = "some may be among those evaluated"
        print(f"warning: {checkpoint} was trained on other cases than {cohort.source} has; {doubt}")
    val = PredictedCases("val", fold.val, result.log_hazard, result.baseline)
    train = PredictedCases("train", fold.train, result.train[:, 0], result.baseline)
    write_result(run_folder / "predictions.csv", predictions_table(cohort, [val, train], years))


def write_new_predictions(
    cohort: Cohort, log_hazard: np.ndarray, checkpoint: str, path: Path, years: list[float]
) -> None:
    """Rank 0: the table of --predict; S(t) where the run's baseline hazard belongs to this checkpoint.

    Raises InputError where it cannot be written.
    """
    baseline = read_baselines(Path(checkpoint).parent / "baseline.json").get(file_sha256(Path(checkpoint)))
    if baseline is None:
        print(f"no baseline hazard of {checkpoint}: S(t) stays blank; --eval_only with this checkpoint writes one")
    cases = PredictedCases("new", np.arange(len(cohort)), log_hazard, baseline)
    table = predictions_table(cohort, [cases], years)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(table))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another --log_dir") from None
    print(f"{counted(len(cohort), 'case')}: {path}", flush=True)


# --- the end of a fold ------------------------------------------------------------------------------------------------


class FoldResult(NamedTuple):
    """What is left of a fold that was trained: what its best.pt reaches and, in a cross-validation, its last weights.

    signal: exit code of a stop signal that came too late for the fold to heed it, else 0.
    """

    fold: Fold
    steps: int
    signal: int
    last: Evaluation | None
    best: Evaluation

    @property
    def c_index(self) -> float | None:
        """Of the last weights."""
        return self.last.metrics["val/c_index"]

    @property
    def c_index_best(self) -> float | None:
        """Of best.pt."""
        return self.best.metrics["val/c_index"]


def end_fold(
    result: FoldResult,
    training: TrainingRun,
    checkpoint: dict,
    headline: str,
    last_score: float | None,
    begun: float,
    years: list[float],
) -> None:
    """All ranks: the end of the log, the summary, tables, predictions and figures of a fold that was trained.

    A cross-validation is scored by the weights of the last epoch, another run by best.pt. checkpoint: what best.pt
    holds. headline: the score's name. last_score: of the last epoch. begun: time.time() at the start.
    """
    fold = result.fold
    run_folder = training.run_folder
    if result.last:
        scored = result.last
        used = run_folder / "last.pt"
        title = "val, last epoch"
        metrics = scored.metrics | {f"{headline}_best": result.best.metrics[headline]}
    else:
        scored = result.best
        used = run_folder / "best.pt"
        title = f"val, best.pt {CHOSEN}"
        metrics = scored.metrics | {f"{headline}_last": last_score}

    # the log and the summary
    epoch = training.progress.epoch + 1
    training.log.write(result.steps, epoch, metrics | {"best_step": checkpoint["step"]})
    finish_run(training, begun, {})
    is_main = world()[0] == 0
    if is_main:
        print_metrics(title, metrics, years)

    # a pre-trained model has no log-hazards
    if is_main and not fold.features:
        if result.last:
            add_baseline(run_folder / "best.pt", result.best.baseline)
        write_results(fold, scored, checkpoint["run"]["training_data"], used, run_folder, years)
        training.log.figures(lambda: draw_results(fold, scored, years), result.steps)
    say_where(run_folder)


def write_evaluation(
    fold: Fold, result: Evaluation, checkpoint: dict, used: str, run_folder: Path, years: list[float]
) -> None:
    """Rank 0, --eval_only: eval_val.json, and what else a run ends with. used: the checkpoint's file."""
    used = Path(used)
    # of the fold that best.pt was chosen on, the score is optimistic
    same_fold = fold.flags.items() <= checkpoint["settings"].items()
    chosen = f" {CHOSEN}" if same_fold and used.name == "best.pt" else ""
    print_metrics(f"val, {used.name}{chosen}", result.metrics, years)
    write_json(run_folder / "eval_val.json", result.metrics | {"step": checkpoint["step"]})

    # a pre-trained model has no log-hazards
    if not fold.features:
        write_results(fold, result, checkpoint["run"]["training_data"], used, run_folder, years)
        for name, figure in draw_results(fold, result, years).items():
            save_figure(run_folder / "figures" / f"{name}.png", figure)
    print(f"{counted(len(fold.val), 'case')}; written: {run_folder}/eval_val.json, {run_folder}/figures", flush=True)
