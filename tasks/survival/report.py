"""Results of a survival run: scores with intervals, compared with baseline models, predictions.csv and a figure."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy import ndarray
from torch import Tensor

from tasks.survival.data import Cohort, MultiGPUSurvivalDataset
from utils.cli import InputError
from utils.stats import RESAMPLES, interval_of_resamples, resample_cases, shown
from utils.tables import find_column


def outcome(data: MultiGPUSurvivalDataset) -> tuple[ndarray, ndarray]:
    """(times in years, events) of a data set's cases."""
    return data.cohort.time[data.rows], data.cohort.event[data.rows]


# --- survival curves --------------------------------------------------------------------------------------------------


def kaplan_meier(time: ndarray, event: ndarray, at, censoring: bool = False) -> ndarray:
    """Kaplan-Meier estimate of P(T > t) at the times `at`. torchsurv's version refuses groups without an event.

    censoring: estimate the distribution of censoring times instead; at ties, events come before censoring.
    """
    times, place = np.unique(time, return_inverse=True)
    events, counts = np.bincount(place, weights=event), np.bincount(place)
    at_risk = counts[::-1].cumsum()[::-1]
    share = (counts - events) / np.maximum(at_risk - events, 1) if censoring else events / at_risk
    return np.concatenate([[1.0], np.cumprod(1 - share)])[np.searchsorted(times, at, side="right")]


def fit_baseline(log_hazard: ndarray, data: MultiGPUSurvivalDataset) -> dict:
    """Breslow's (1974) cumulative baseline hazard, in logarithms to avoid overflow. until: end of follow-up."""
    time, event = outcome(data)
    times, events = np.unique(time[event], return_counts=True)
    # log of the summed hazard of the cases at risk at each time, accumulated from the latest time backwards
    order = np.argsort(-time, kind="stable")
    total = np.concatenate([[-np.inf], np.logaddexp.accumulate(log_hazard[order])])
    at_risk = total[np.searchsorted(-time[order], -times, side="right")]
    cumulative = np.logaddexp.accumulate(np.log(events) - at_risk)
    return {
        "time": times.tolist(),
        "log_hazard": cumulative.tolist(),
        "until": float(time.max()),
    }


def fit_reference(parts: ndarray, data: MultiGPUSurvivalDataset) -> dict:
    """Fit the baseline hazard and the percentiles 0 to 100 of the risk to the training patients' centred log-hazards.

    parts: (n, 2) parts of the log-hazards, from columns and image.
    """
    log_hazard = (parts - parts.mean(0)).sum(1)
    percentiles = np.quantile(log_hazard, np.linspace(0, 1, 101))
    return fit_baseline(log_hazard, data) | {"percentiles": percentiles.tolist()}


def survival(baseline: dict, log_hazard: ndarray, at) -> ndarray:
    """Survival probabilities S(t|x) = exp(-H0(t) exp(log_hazard)), (n, len(at)); NaN beyond the follow-up."""
    steps = np.concatenate([[-np.inf], baseline["log_hazard"]])
    hazard = steps[np.searchsorted(baseline["time"], at, side="right")] + log_hazard[:, None]
    with np.errstate(over="ignore"):
        return np.where(np.asarray(at) <= baseline["until"], np.exp(-np.exp(hazard)), np.nan)


# --- scores -----------------------------------------------------------------------------------------------------------


def resampled_c(log_hazard: ndarray, time: ndarray, event: ndarray, counts: ndarray, group: ndarray) -> ndarray:
    """Harrell's C within groups for each resample of resample_cases(); NaN without a comparable pair."""
    first, comes_first, in_order = compare(log_hazard, time, event, group)
    pairs, right = (
        (counts[:, first] * (counts @ table.astype(np.float32).T)).sum(1, dtype=float)
        for table in (comes_first, comes_first * in_order)
    )
    return np.divide(right, pairs, out=np.full(RESAMPLES, np.nan), where=pairs > 0)


def concordance(log_hazard: ndarray, time: ndarray, event: ndarray, group: ndarray | None = None) -> float:
    """Harrell's C over the comparable pairs within groups; ties of log-hazards count half. NaN without such pairs."""
    _, comes_first, in_order = compare(log_hazard, time, event, np.zeros(len(time)) if group is None else group)
    return float((comes_first * in_order).sum() / comes_first.sum()) if comes_first.any() else np.nan


def compare(log_hazard: ndarray, time: ndarray, event: ndarray, group: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """Compare each row that has an event with all rows. Returns (rows with an event, comes_first, in_order).

    comes_first (events, rows): whether the event is known to precede a row of its group. in_order (events, rows):
    whether the log-hazards predict this order, 0.5 if they are equal.
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
    baseline: dict | None = None,
    name: str = "val",
) -> dict[str, float]:
    """C (Harrell, Uno), AUC and, with a baseline hazard, Brier scores of a fold, by torchsurv in float64.

    The inverse probability of censoring weights come from the training fold. Undefined scores, such as those beyond the
    follow-up, are left out.
    """
    from torchsurv.metrics.auc import Auc
    from torchsurv.metrics.brier_score import BrierScore
    from torchsurv.metrics.cindex import ConcordanceIndex

    (time, event), known = outcome(val), outcome(train)
    end = min(time.max(), known[0].max())

    def weight(at) -> Tensor:
        left = kaplan_meier(*known, np.asarray(at), censoring=True)
        return torch.from_numpy(np.divide(1.0, left, out=np.zeros_like(left), where=left > 0))

    cases = torch.from_numpy(log_hazard), torch.from_numpy(event), torch.from_numpy(time)
    uno = torch.where(cases[2] < end, weight(time), 0.0)
    metrics = {"c_index": float(ConcordanceIndex()(*cases))}
    metrics["c_index_uno"] = float(ConcordanceIndex()(*cases, weight=uno))

    # AUC needs cases and controls at each horizon
    years = [year for year in years if year < end and (event & (time <= year)).any()]
    if years:
        at = torch.tensor(years, dtype=torch.float64)
        values = Auc()(*cases, new_time=at, weight=weight(time), weight_new_time=weight(at)).reshape(-1).tolist()
        metrics |= {"auc": sum(values) / len(values)}
        metrics |= {f"auc/{year:g}y": value for year, value in zip(years, values, strict=True)}
    if years and baseline:
        at = np.union1d(np.linspace(time.min(), years[-1], 100), years)
        curves = torch.from_numpy(survival(baseline, log_hazard, at))
        brier = BrierScore()
        values = brier(curves, *cases[1:], torch.from_numpy(at), weight(time), weight(at)).numpy()
        metrics["ibs"] = float(brier.integral())
        metrics |= {f"brier/{year:g}y": float(values[at == year][0]) for year in years}
    return {f"{name}/{key}": value for key, value in metrics.items()}


# --- tables ---------------------------------------------------------------------------------------------------------


def true_risk(val: MultiGPUSurvivalDataset) -> dict[str, tuple]:
    """Return {"true_risk": ...} for synthetic data: the log-hazards that outcomes were drawn from; otherwise {}."""
    truth = val.cohort.table.get("true_log_hazard")
    return {} if truth is None else {"true_risk": (pd.to_numeric(truth).to_numpy(float)[val.rows], None)}


def strata(cohort: Cohort, column: str | None, rows: ndarray) -> ndarray | None:
    """Values of --stratum_column in these rows, as integers; None without the flag. Raises InputError."""
    if not column:
        return None
    everything = list(zip(cohort.source, cohort.table.to_dict("records"), strict=True))
    return np.unique(cohort.table[find_column(everything, column)], return_inverse=True)[1][rows]


def compare_models(
    risks: dict[str, ndarray], time: ndarray, event: ndarray, case: ndarray, fold: ndarray, stratum: ndarray | None
) -> tuple[dict[str, dict], pd.DataFrame]:
    """C of each model over the pairs within folds, and a paired test of the first model against every other.

    Arrays have one row per case and repeat. Cases are resampled within the first fold in which they occur. Returns
    ({name: scores}, table).
    """
    counts = resample_cases(case, fold)
    scores, rows, own = {}, {}, None
    for name, risk in risks.items():
        resampled = resampled_c(risk, time, event, counts, fold)
        low, high = interval_of_resamples(resampled)
        found = {"c_index": concordance(risk, time, event, fold), "c_index_low": low, "c_index_high": high}
        row = {"C": shown(found["c_index"], low, high)}
        if stratum is not None:
            within = fold * (stratum.max() + 1) + stratum
            found["c_index_within_strata"] = concordance(risk, time, event, within)
            row["C within"] = f"{found['c_index_within_strata']:.3f}"
        if own is None:
            own, lead = resampled, found["c_index"]
        else:
            above = own - resampled
            above = above[np.isfinite(above)]
            low, high = interval_of_resamples(above)
            p = float(min(1.0, 2 * min(np.mean(above <= 0), np.mean(above >= 0)) + 1 / RESAMPLES))
            row |= {"network above": shown(lead - found["c_index"], low, high, "+"), "p": f"{p:.3f}"}
            found |= {"above_low": low, "above_high": high, "p": p}
        scores[name], rows[name.replace("_and_", " + ").replace("_", " ")] = found, row
    return scores, pd.DataFrame(rows).T


def key_of(model: str) -> str:
    """Prefix of a model's scores in summary.json."""
    return "val" if model == "network" else f"val/rival/{model}"


def print_table(
    title: str, models: dict[str, tuple], sets: dict, years: list[float], stratum_column: str | None
) -> dict[str, float]:
    """Rank 0: print the scores of the network and the baseline models; returns all scores by name.

    models: {name: (log-hazards, baseline hazard)}, the network first. The test is paired and two-sided.
    """
    val = sets["val"]
    risks = {name: risk for name, (risk, _) in models.items()}
    together, stratum = np.zeros(len(val.rows), int), strata(val.cohort, stratum_column, val.rows)
    compared, table = compare_models(risks, *outcome(val), val.cohort.case[val.rows], together, stratum)
    metrics, columns = {}, {"Uno C": "c_index_uno", "AUC": "auc", "IBS": "ibs"}
    for place, (name, (risk, baseline)) in enumerate(models.items()):
        key = key_of(name)
        metrics |= score(risk, val, sets["all"], years, baseline, key)
        metrics |= {f"{key}/{metric}": value for metric, value in compared[name].items()}
        for label, metric in columns.items():
            value = metrics.get(f"{key}/{metric}")
            table.loc[table.index[place], label] = "" if value is None else f"{value:.3f}"
    order = [name for name in ("C", "C within", *columns, "network above", "p") if name in table]
    print(f"\n{title}: {len(val.rows)} cases, {outcome(val)[1].sum()} events")
    print(table[order].fillna("").to_string())
    horizons = {f"{y:g} y": [metrics.get(f"val/{key}/{y:g}y", np.nan) for key in ("auc", "brier")] for y in years}
    print(pd.DataFrame(horizons, ["AUC", "Brier"]).T.dropna().round(3).to_string(), flush=True)
    return metrics


def folds_of(folder: Path) -> list[Path]:
    """Run folders of a finished cross-validation; [] for any other folder."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    repeats, folds = (range(1, 1 + summary.get(name, 0)) for name in ("repeats", "folds"))
    return [folder / f"repeat_{repeat}" / f"fold_{fold}" for repeat in repeats for fold in folds]


def print_cross_validation(folder: Path, results: list[tuple], args) -> None:
    """Rank 0: print each model's C, pooled over pairs within folds and by fold; with repeats, also of the mean risk.

    results: (repeat, fold, metrics, validation set, {model: log-hazards}) of each training. Writes summary.json and
    cross_validation.csv.
    """
    scores = pd.DataFrame([metrics for _, _, metrics, _, _ in results])
    # means of interval bounds or p values are meaningless
    scores = scores[[name for name in scores if not name.endswith(("_low", "_high", "/p"))]]
    summary = scores.mean().to_dict() | {f"{name}_sd": value for name, value in scores.std().items()}

    cases = []
    for repeat, fold, _, val, risks in results:
        own = {"repeat": repeat, "fold": fold, "row": val.rows, "case": val.cohort.case[val.rows]}
        own |= dict(zip(("time", "event"), outcome(val), strict=True))
        cases.append(pd.DataFrame(own | risks))
    cases = pd.concat(cases, ignore_index=True)
    models = {name: cases[name].to_numpy() for name in results[0][4]}
    if args.repeats > 1:
        mean = cases.groupby("row")["network"].transform("mean").to_numpy()
        models = {"network": models["network"], "mean_of_repeats": mean} | models
    stratum = strata(val.cohort, args.stratum_column, cases["row"])
    columns = [cases[name].to_numpy() for name in ("time", "event", "case")]
    number = (cases["repeat"] * args.folds + cases["fold"]).to_numpy()
    compared, table = compare_models(models, *columns, number, stratum)
    summary |= {
        f"{key_of(model)}/{key.replace('c_index', 'c_index_pooled')}": value
        for model, found in compared.items()
        for key, value in found.items()
    }
    for place, model in enumerate(models):
        own = scores.get(f"{key_of(model)}/c_index")
        table.loc[table.index[place], "mean of folds"] = "" if own is None else f"{own.mean():.3f} +- {own.std():.3f}"
    summary |= {"folds": args.folds, "repeats": args.repeats}
    cases = cases.rename(columns={"network": "log_hazard"}).drop(columns="row")
    cases.to_csv(folder / "cross_validation.csv", index=False)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(f"\n{len(results)} folds, last epochs; C over pairs within folds, with patients resampled within folds")
    print(table.fillna("").to_string(), flush=True)


# --- files and figure -------------------------------------------------------------------------------------------------


def predictions(
    data: MultiGPUSurvivalDataset, models: list[tuple[ndarray, dict | None]], years: list[float]
) -> pd.DataFrame:
    """Table of cases: outcome, log-hazard and its parts, its percentile among the training patients, and S(t).

    models: [((n, 2) parts of the log-hazards, reference)]; predictions are the models' means. Log-hazards are relative
    to the mean training patient. Percentiles and S(t) need a reference for every model.
    """
    time, event = outcome(data)
    known = np.isfinite(time)
    frame = {"case": data.cohort.case[data.rows], "time_years": time, "event": np.where(known, event, np.nan)}
    centred = [parts - (reference["centres"] if reference else 0) for parts, reference in models]
    risks = [parts.sum(1) for parts in centred]
    frame["log_hazard"] = np.mean(risks, 0)
    frame |= dict(zip(("of_columns", "of_image"), np.mean(centred, 0).T, strict=True))
    references = [reference for _, reference in models]
    if all(references):
        both = list(zip(references, risks, strict=True))
        frame["percentile"] = np.mean([np.interp(risk, of["percentiles"], np.arange(101)) for of, risk in both], 0)
        frame |= {
            f"S({year:g}y)": np.mean([survival(of, risk, [year])[:, 0] for of, risk in both], 0) for year in years
        }
    return pd.DataFrame(frame)


def read_rival(folder: str | None, val: MultiGPUSurvivalDataset) -> dict[str, tuple]:
    """Read another run's results on this validation fold as {"other_run": (log-hazards, baseline hazard)}.

    {} if folder is None. Raises InputError.
    """
    if not folder:
        return {}
    path = Path(folder, "predictions.csv")
    try:
        table = pd.read_csv(path, dtype={"case": str})
        baseline = json.loads(Path(folder, "baseline.json").read_text(encoding="utf-8"))
        table = table[table["fold"] == "val"]
        cases, log_hazard = table["case"].tolist(), table["log_hazard"].to_numpy(float)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: not a finished run's predictions ({error}); check --rival_run") from None
    if cases != val.cohort.case[val.rows].tolist():
        raise InputError(f"{path}: has other validation cases than this run; give both the same fold")
    return {"other_run": (log_hazard, baseline)}


def read_baseline(folder: Path, step: int) -> dict | None:
    """Read baseline.json; None if it does not exist or belongs to another step's checkpoint."""
    path = folder / "baseline.json"
    baseline = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return baseline if baseline.get("step") == step else None


def predict(folder: Path, data: MultiGPUSurvivalDataset, models: list[tuple], args, trained: set[str]) -> None:
    """Rank 0: write predictions_<table>.csv; for rows with outcomes, print C with its interval and the calibration."""
    frame = predictions(data, models, args.eval_years)
    path = folder / f"predictions_{Path(args.predict).stem}.csv"
    frame.to_csv(path, index=False)
    print(f"{len(frame)} cases, {len(models)} models: {path}")
    if seen := frame["case"].isin(trained).sum():
        print(f"warning: {seen} of these cases have names that were trained on; their risks look better than they are")
    if "percentile" not in frame:
        print("no percentile and no S(t): they are known of the weights alone that a run ended with")
    known = frame[frame["time_years"].notna()]
    columns = [known[name].to_numpy() for name in ("log_hazard", "time_years", "event", "case")]
    columns[2] = columns[2] == 1
    if np.isfinite(concordance(*columns[:3])):
        _, table = compare_models({"network": columns[0]}, *columns[1:], np.zeros(len(known), int), None)
        print(f"{len(known)} with outcomes, {columns[2].sum()} events: C {table.loc['network', 'C']}")
        rows = {
            f"{year:g} y": {
                "predicted risk": 1 - known[f"S({year:g}y)"].mean(),
                "observed": 1 - kaplan_meier(*columns[1:3], year),
            }
            for year in args.eval_years
            if f"S({year:g}y)" in known and year <= columns[1].max()
        }
        print(pd.DataFrame(rows).T.round(3).to_string() if rows else "", flush=True)


def draw(log_hazard: ndarray, val: MultiGPUSurvivalDataset, years: list[float], baseline: dict, metrics: dict):
    """Figure of Kaplan-Meier curves for thirds by predicted risk, and of calibration in fifths at each horizon."""
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
            risk = 1 - survival(baseline, log_hazard, [year])[:, 0]
            fifths = np.array_split(np.argsort(risk), 5)
            observed = [1 - kaplan_meier(time[rows], event[rows], year) for rows in fifths]
            right.plot([risk[rows].mean() for rows in fifths], observed, "o-", label=f"{year:g} y, AUC {auc:.3f}")
    right.set(title="risk in fifths", xlabel="predicted", ylabel="observed")
    for axes in (left, right):
        axes.legend(fontsize=8)
    return figure
