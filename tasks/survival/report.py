"""Results of a survival run: scores with confidence intervals, tables, predictions and a figure."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy import ndarray
from torch import Tensor

from tasks.survival.data import MultiGPUSurvivalDataset
from utils.cli import InputError
from utils.stats import RESAMPLES, interval_of_resamples, resample_cases, shown


def outcome(data: MultiGPUSurvivalDataset) -> tuple[ndarray, ndarray]:
    return data.cohort.time[data.rows], data.cohort.event[data.rows]


def cases_of(data: MultiGPUSurvivalDataset, stratum_column: str | None) -> pd.DataFrame:
    time, event = outcome(data)
    cases = pd.DataFrame({"row": data.rows, "case": data.cohort.case[data.rows], "time": time, "event": event})
    if stratum_column:
        # number the strata over the whole cohort, so that a stratum has the same number in all folds
        strata = np.unique(data.cohort.column(stratum_column), return_inverse=True)[1]
        cases["stratum"] = strata[data.rows]
    return cases


# --- survival curves --------------------------------------------------------------------------------------------------


def kaplan_meier(time: ndarray, event: ndarray, at, censoring: bool = False) -> ndarray:
    """Return the Kaplan-Meier estimate of P(T > t) at the times t in `at`, where T is the time of the event.

    censoring=True: T is the time of censoring. torchsurv's estimate is not used, because it rejects groups without an
    event.
    """
    times, place = np.unique(time, return_inverse=True)
    events, counts = np.bincount(place, weights=event), np.bincount(place)
    at_risk = counts[::-1].cumsum()[::-1]
    share = (counts - events) / np.maximum(at_risk - events, 1) if censoring else events / at_risk
    return np.concatenate([[1.0], np.cumprod(1 - share)])[np.searchsorted(times, at, side="right")]


def fit_baseline_hazard(log_hazard: ndarray, data: MultiGPUSurvivalDataset) -> dict:
    """Estimate the cumulative baseline hazard of a Cox model (Breslow 1974).

    log_hazard: (n,), predicted log-hazards of the cases in `data`. Returns {"time": event times in years, "log_hazard":
    log of the cumulative hazard at these times, "until": end of follow-up in years}.
    """
    time, event = outcome(data)
    times, events = np.unique(time[event], return_counts=True)
    order = np.argsort(-time, kind="stable")
    total = np.concatenate([[-np.inf], np.logaddexp.accumulate(log_hazard[order])])
    at_risk = total[np.searchsorted(-time[order], -times, side="right")]
    cumulative = np.logaddexp.accumulate(np.log(events) - at_risk)
    return {
        "time": times.tolist(),
        "log_hazard": cumulative.tolist(),
        "until": float(time.max()),
    }


def fit_reference(parts: ndarray, unseen: ndarray, train: MultiGPUSurvivalDataset) -> dict:
    """Return fit_baseline_hazard() of the training patients, plus "percentiles" (0 to 100) and "centres" of
    log-hazards.

    parts: (n, 2), the tabular and image terms of the log-hazards; "centres" are their means. unseen: (n, 2), the same
    terms, predicted where possible by networks not trained on the patient. The means of `unseen` are subtracted before
    the baseline hazard and the percentiles of the log-hazards are computed.
    """
    log_hazard = (unseen - unseen.mean(0)).sum(1)
    percentiles = np.quantile(log_hazard, np.linspace(0, 1, 101))
    baseline_hazard = fit_baseline_hazard(log_hazard, train)
    return baseline_hazard | {"percentiles": percentiles.tolist(), "centres": parts.mean(0).tolist()}


def survival_curves(baseline_hazard: dict, log_hazard: ndarray, at) -> ndarray:
    """Return survival probabilities (n, len(at)) at the times `at` in years; NaN after the end of follow-up.

    baseline_hazard: result of fit_baseline_hazard().
    """
    steps = np.concatenate([[-np.inf], baseline_hazard["log_hazard"]])
    hazard = steps[np.searchsorted(baseline_hazard["time"], at, side="right")] + log_hazard[:, None]
    with np.errstate(over="ignore"):
        return np.where(np.asarray(at) <= baseline_hazard["until"], np.exp(-np.exp(hazard)), np.nan)


# --- scores -----------------------------------------------------------------------------------------------------------


def resampled_c(log_hazard: ndarray, time: ndarray, event: ndarray, counts: ndarray, group: ndarray) -> ndarray:
    """Return Harrell's C of each bootstrap resample, over pairs of rows from the same group.

    counts: (resamples, rows), result of resample_cases(). C is NaN in resamples without a comparable pair.
    """
    first, comes_first, in_order = compare_pairs(log_hazard, time, event, group)
    pairs, right = (
        (counts[:, first] * (counts @ table.astype(np.float32).T)).sum(1, dtype=float)
        for table in (comes_first, comes_first * in_order)
    )
    return np.divide(right, pairs, out=np.full(RESAMPLES, np.nan), where=pairs > 0)


def concordance(log_hazard: ndarray, time: ndarray, event: ndarray, group: ndarray | None = None) -> float:
    """Return Harrell's C over the comparable pairs of rows from the same group; ties in log-hazard count half.

    C is NaN if no pair is comparable.
    """
    _, comes_first, in_order = compare_pairs(log_hazard, time, event, np.zeros(len(time)) if group is None else group)
    return float((comes_first * in_order).sum() / comes_first.sum()) if comes_first.any() else np.nan


def compare_pairs(
    log_hazard: ndarray, time: ndarray, event: ndarray, group: ndarray
) -> tuple[ndarray, ndarray, ndarray]:
    """Compare each row that has an event with all rows; return (first, comes_first, in_order).

    first: (events,), indices of the rows with an event. comes_first: (events, rows), True for comparable pairs: both
    rows are in the same group, and the other row was still event-free at the time of the event. in_order: (events,
    rows), 1 if the row with the event has the higher log-hazard, 0.5 if both are equal, otherwise 0.
    """
    first = np.flatnonzero(event)
    comes_first = (time[first, None] < time) | ((time[first, None] == time) & ~event)
    in_order = (log_hazard[first, None] > log_hazard) + 0.5 * (log_hazard[first, None] == log_hazard)
    return first, comes_first & (group[first, None] == group), in_order


def score(
    log_hazard: ndarray,
    val: MultiGPUSurvivalDataset,
    train: MultiGPUSurvivalDataset,
    years: list[float],
    baseline_hazard: dict | None = None,
) -> dict[str, float]:
    """Score any model's log-hazards on the set `val`: Harrell's and Uno's C, AUC and, given a baseline hazard, Brier
    scores. evaluate() in the training script adds the network's own loss.

    years: horizons for AUC and Brier score. Censoring weights are estimated on `train`. Undefined scores are left out.
    """
    from torchsurv.metrics.auc import Auc
    from torchsurv.metrics.brier_score import BrierScore
    from torchsurv.metrics.cindex import ConcordanceIndex

    (time, event), (train_time, train_event) = outcome(val), outcome(train)
    end = min(time.max(), train_time.max())

    def weight(at) -> Tensor:
        left = kaplan_meier(train_time, train_event, np.asarray(at), censoring=True)
        return torch.from_numpy(np.divide(1.0, left, out=np.zeros_like(left), where=left > 0))

    cases = torch.from_numpy(log_hazard), torch.from_numpy(event), torch.from_numpy(time)
    uno = torch.where(cases[2] < end, weight(time), 0.0)
    metrics = {"c_index": float(ConcordanceIndex()(*cases))}
    metrics["c_index_uno"] = float(ConcordanceIndex()(*cases, weight=uno))

    # leave out horizons before the first event or after the end of follow-up, because AUC is undefined there
    years = [year for year in years if year < end and (event & (time <= year)).any()]
    if years:
        at = torch.tensor(years, dtype=torch.float64)
        values = Auc()(*cases, new_time=at, weight=weight(time), weight_new_time=weight(at)).reshape(-1).tolist()
        metrics |= {"auc": sum(values) / len(values)}
        metrics |= {f"auc/{year:g}y": value for year, value in zip(years, values, strict=True)}
    if years and baseline_hazard:
        at = np.union1d(np.linspace(time.min(), years[-1], 100), years)
        curves = torch.from_numpy(survival_curves(baseline_hazard, log_hazard, at))
        brier = BrierScore()
        values = brier(curves, *cases[1:], torch.from_numpy(at), weight(time), weight(at)).numpy()
        metrics["ibs"] = float(brier.integral())
        metrics |= {f"brier/{year:g}y": float(values[at == year][0]) for year in years}
    return metrics


# --- tables ---------------------------------------------------------------------------------------------------------


def compare_models(risks: dict[str, ndarray], cases: pd.DataFrame) -> tuple[dict[str, dict], pd.DataFrame]:
    """Compute each model's C-index over pairs within folds; compare the first model with the rest by paired bootstrap.

    risks: {model: log-hazards, one for each row of `cases`}. cases: result of cases_of() with a column `fold`. Returns
    ({model: {score: value}}, table to print).
    """
    time, event, case, fold = (cases[name].to_numpy() for name in ("time", "event", "case", "fold"))
    counts = resample_cases(case, fold)
    scores, rows = {}, {}
    for name, risk in risks.items():
        c_index = concordance(risk, time, event, fold)
        resampled = resampled_c(risk, time, event, counts, fold)
        low, high = interval_of_resamples(resampled)
        found = {"c_index": c_index, "c_index_low": low, "c_index_high": high}
        row = {"C": shown(c_index, low, high)}
        if "stratum" in cases:
            stratum = cases["stratum"].to_numpy()
            within = concordance(risk, time, event, fold * (stratum.max() + 1) + stratum)
            found["c_index_within_strata"] = within
            row["C within"] = f"{within:.3f}"
        if not scores:
            network_resampled, network_c_index = resampled, c_index
        else:
            above = network_resampled - resampled
            above = above[np.isfinite(above)]
            low, high = interval_of_resamples(above)
            p = float(min(1.0, 2 * min(np.mean(above <= 0), np.mean(above >= 0)) + 1 / RESAMPLES))
            row |= {"network above": shown(network_c_index - c_index, low, high, "+"), "p": f"{p:.3f}"}
            found |= {"above_low": low, "above_high": high, "p": p}
        scores[name], rows[name.replace("_and_", " + ").replace("_", " ")] = found, row
    return scores, pd.DataFrame(rows).T


def key_of(model: str) -> str:
    return "val" if model == "network" else f"val/rival/{model}"


def print_table(
    title: str, models: dict[str, tuple], cases: pd.DataFrame, sets: dict, years: list[float]
) -> dict[str, float]:
    """Rank 0: print the validation scores of the network and the baseline models; return them as {name: value}.

    models: {model: (log-hazards, baseline hazard or None)}, the network first. cases: result of cases_of(). years:
    horizons for AUC and Brier score.
    """
    scores, table = compare_models({name: risk for name, (risk, _) in models.items()}, cases.assign(fold=0))
    for name, (risk, baseline_hazard) in models.items():
        scores[name] = score(risk, sets["val"], sets["train"], years, baseline_hazard) | scores[name]
    columns = {"Uno C": "c_index_uno", "AUC": "auc", "IBS": "ibs"}
    for label, metric in columns.items():
        table[label] = [f"{found[metric]:.3f}" if metric in found else "" for found in scores.values()]
    order = [name for name in ("C", "C within", *columns, "network above", "p") if name in table]
    print(f"\n{title}: {len(cases)} cases, {cases['event'].sum()} events")
    print(table[order].fillna("").to_string())
    network = scores["network"]
    horizons = {f"{y:g} y": [network.get(f"{key}/{y:g}y", np.nan) for key in ("auc", "brier")] for y in years}
    print(pd.DataFrame(horizons, ["AUC", "Brier"]).T.dropna().round(3).to_string(), flush=True)
    return {f"{key_of(name)}/{metric}": value for name, found in scores.items() for metric, value in found.items()}


def folds_of(folder: Path) -> list[Path]:
    """Return the run folders of all folds if `folder` contains a finished cross-validation, otherwise []."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    repeats, folds = (range(1, 1 + summary.get(name, 0)) for name in ("repeats", "folds"))
    return [folder / f"repeat_{repeat}" / f"fold_{fold}" for repeat in repeats for fold in folds]


def print_cross_validation(folder: Path, metrics: list[dict], cases: pd.DataFrame, args) -> None:
    """Rank 0: print each model's C-index in cross-validation; write summary.json and cross_validation.csv.

    metrics: the scores of each fold. cases: result of cases_of() for all validation sets, plus the columns `repeat` and
    `fold` and one column of log-hazards per model (the network first).
    """
    scores = pd.DataFrame(metrics)
    # leave out interval bounds and p values, because their means over folds are meaningless
    scores = scores[[name for name in scores if not name.endswith(("_low", "_high", "/p"))]]
    summary = scores.mean().to_dict() | {f"{name}_sd": value for name, value in scores.std().items()}

    risks = {name: cases[name].to_numpy() for name in cases.loc[:, "network":]}
    if args.repeats > 1:
        mean = cases.groupby("row")["network"].transform("mean").to_numpy()
        risks = {"network": risks["network"], "mean_of_repeats": mean} | risks
    compared, table = compare_models(risks, cases.assign(fold=cases["repeat"] * args.folds + cases["fold"]))
    summary |= {
        f"{key_of(model)}/{key.replace('c_index', 'c_index_pooled')}": value
        for model, found in compared.items()
        for key, value in found.items()
    }
    by_fold = [scores.get(f"{key_of(model)}/c_index") for model in compared]
    table["mean of folds"] = ["" if c is None else f"{c.mean():.3f} +- {c.std():.3f}" for c in by_fold]
    summary |= {"folds": args.folds, "repeats": args.repeats}
    cases = cases.rename(columns={"network": "log_hazard"}).drop(columns=["row", "stratum"], errors="ignore")
    cases.to_csv(folder / "cross_validation.csv", index=False)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(f"\n{len(metrics)} folds, last epochs; C over pairs within folds, with patients resampled within folds")
    print(table.fillna("").to_string(), flush=True)


# --- files and figure -------------------------------------------------------------------------------------------------


def predictions(
    data: MultiGPUSurvivalDataset, models: list[tuple[ndarray, dict | None]], years: list[float]
) -> pd.DataFrame:
    """Return a table with each case's outcome and predictions, averaged over the models.

    models: for each model, the two parts (n, 2) of the log-hazards and the result of fit_reference() or None.
    A model's log-hazards are relative to the mean of the training patients, or unchanged if its result is None.
    Percentiles and survival probabilities require fit_reference() results for all models.
    """
    time, event = outcome(data)
    event = np.where(np.isfinite(time), event, np.nan)
    frame = {"case": data.cohort.case[data.rows], "time_years": time, "event": event}
    centred = [parts - (reference["centres"] if reference else 0) for parts, reference in models]
    risks = [parts.sum(1) for parts in centred]
    frame["log_hazard"] = np.mean(risks, 0)
    frame["of_columns"], frame["of_image"] = np.mean(centred, 0).T
    references = [reference for _, reference in models]
    if all(references):
        pairs = list(zip(references, risks, strict=True))
        percentiles = [np.interp(risk, reference["percentiles"], np.arange(101)) for reference, risk in pairs]
        frame["percentile"] = np.mean(percentiles, 0)
        curves = [survival_curves(reference, risk, years) for reference, risk in pairs]
        frame |= {f"S({year:g}y)": curve for year, curve in zip(years, np.mean(curves, 0).T, strict=True)}
    return pd.DataFrame(frame)


def read_other_run(folder: str | None, val: MultiGPUSurvivalDataset) -> dict[str, tuple]:
    """Read another run's predictions for the validation set `val` (--rival_run).

    Returns {"other_run": (log-hazards, baseline hazard)}, or {} if `folder` is None. Raises InputError if the folder
    has no predictions for the same validation cases.
    """
    if not folder:
        return {}
    path = Path(folder, "predictions.csv")
    try:
        table = pd.read_csv(path, dtype={"case": str})
        reference = json.loads(Path(folder, "baseline.json").read_text(encoding="utf-8"))
        table = table[table["fold"] == "val"]
        cases, log_hazard = table["case"].tolist(), table["log_hazard"].to_numpy(float)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: not a finished run's predictions ({error}); check --rival_run") from None
    if cases != val.cohort.case[val.rows].tolist():
        raise InputError(f"{path}: has other validation cases than this run; give both the same fold")
    return {"other_run": (log_hazard, reference)}


def read_reference(folder: Path, step: int) -> dict | None:
    path = folder / "baseline.json"
    reference = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return reference if reference.get("step") == step else None


def predict(folder: Path, data: MultiGPUSurvivalDataset, models: list[tuple], args, trained: set[str]) -> None:
    frame = predictions(data, models, args.eval_years)
    path = folder / f"predictions_{Path(args.predict).stem}.csv"
    frame.to_csv(path, index=False)
    print(f"{len(frame)} cases, {len(models)} models: {path}")
    if seen := frame["case"].isin(trained).sum():
        print(f"warning: {seen} of these cases have names that were trained on; their risks look better than they are")
    if "percentile" not in frame:
        print("no percentile and no S(t): they are known of the weights alone that a run ended with")
    known = frame[frame["time_years"].notna()]
    known = known.rename(columns={"time_years": "time"}).assign(event=known["event"] == 1, fold=0)
    scores, table = compare_models({"network": known["log_hazard"].to_numpy()}, known)
    if np.isfinite(scores["network"]["c_index"]):
        print(f"{len(known)} with outcomes, {known['event'].sum()} events: C {table.loc['network', 'C']}")
        time, event = known["time"].to_numpy(), known["event"].to_numpy()
        rows = {
            f"{year:g} y": {
                "predicted risk": 1 - known[f"S({year:g}y)"].mean(),
                "observed": 1 - kaplan_meier(time, event, year),
            }
            for year in args.eval_years
            if f"S({year:g}y)" in known and year <= time.max()
        }
        print(pd.DataFrame(rows).T.round(3).to_string() if rows else "", flush=True)


def draw_figure(
    log_hazard: ndarray, val: MultiGPUSurvivalDataset, years: list[float], baseline_hazard: dict, metrics: dict
):
    from matplotlib.figure import Figure

    time, event = outcome(val)
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    grid = np.linspace(0, time.max(), 300)
    for rows, name in zip(np.array_split(np.argsort(log_hazard), 3), ("low", "middle", "high"), strict=True):
        left.step(grid, kaplan_meier(time[rows], event[rows], grid), where="post", label=f"{name} risk ({len(rows)})")
    left.set(title="thirds by predicted risk", xlabel="years", ylabel="without event", ylim=(0, 1.02))
    right.axline((0, 0), slope=1, color="grey", linewidth=0.8)
    for year in years:
        auc = metrics.get(f"val/auc/{year:g}y")
        if auc is not None:
            risk = 1 - survival_curves(baseline_hazard, log_hazard, [year])[:, 0]
            fifths = np.array_split(np.argsort(risk), 5)
            observed = [1 - kaplan_meier(time[rows], event[rows], year) for rows in fifths]
            right.plot([risk[rows].mean() for rows in fifths], observed, "o-", label=f"{year:g} y, AUC {auc:.3f}")
    right.set(title="risk in fifths", xlabel="predicted", ylabel="observed")
    for axes in (left, right):
        axes.legend(fontsize=8)
    return figure
