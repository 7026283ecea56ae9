"""What a survival run tells: scores with intervals, the rivals' beside them, predictions.csv, and one figure."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy import ndarray
from torch import Tensor

from tasks.survival.data import MultiGPUSurvivalDataset
from utils.cli import InputError

RESAMPLES = 1000


def outcome(data: MultiGPUSurvivalDataset) -> tuple[ndarray, ndarray]:
    """(times in years, events) of a data set's cases."""
    return data.cohort.time[data.rows], data.cohort.event[data.rows]


# --- survival curves --------------------------------------------------------------------------------------------------


def kaplan_meier(time: ndarray, event: ndarray, at, censoring: bool = False) -> ndarray:
    """P(T > t) at the times `at`; with censoring that of the censoring time, events going first where both tie.

    torchsurv's refuses a group without an event, such as the third of the patients with the lowest risk.
    """
    times, place = np.unique(time, return_inverse=True)
    events, counts = np.bincount(place, weights=event), np.bincount(place)
    at_risk = counts[::-1].cumsum()[::-1]
    share = (counts - events) / np.maximum(at_risk - events, 1) if censoring else events / at_risk
    return np.concatenate([[1.0], np.cumprod(1 - share)])[np.searchsorted(times, at, side="right")]


def fit_baseline(log_hazard: ndarray, data: MultiGPUSurvivalDataset) -> dict:
    """The cumulative baseline hazard of the training fold by Breslow (1974), as logarithms, which never overflow.

    centre: the mean log-hazard, which is 0 for an ensemble. until: the end of the follow-up.
    """
    time, event = outcome(data)
    times, events = np.unique(time[event], return_counts=True)
    # the hazard of all who are at risk at each time, summed from the last case on
    order = np.argsort(-time, kind="stable")
    total = np.concatenate([[-np.inf], np.logaddexp.accumulate(log_hazard[order])])
    at_risk = total[np.searchsorted(-time[order], -times, side="right")]
    cumulative = np.logaddexp.accumulate(np.log(events) - at_risk)
    return {
        "time": times.tolist(),
        "log_hazard": cumulative.tolist(),
        "until": float(time.max()),
        "centre": float(log_hazard.mean()),
    }


def survival(baseline: dict, log_hazard: ndarray, at) -> ndarray:
    """(n, len(at)): S(t|x) = exp(-H0(t) exp(log_hazard)); NaN beyond the follow-up."""
    steps = np.concatenate([[-np.inf], baseline["log_hazard"]])
    hazard = steps[np.searchsorted(baseline["time"], at, side="right")] + log_hazard[:, None]
    with np.errstate(over="ignore"):
        return np.where(np.asarray(at) <= baseline["until"], np.exp(-np.exp(hazard)), np.nan)


# --- scores -----------------------------------------------------------------------------------------------------------


def resampled_c(log_hazard: ndarray, time: ndarray, event: ndarray, case: ndarray) -> ndarray:
    """Harrell's C of 1000 resamples of the patients, the same resamples at each call; NaN without a comparable pair."""
    names, place = np.unique(case, return_inverse=True)
    counts = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), RESAMPLES)
    counts = counts[:, place].astype(np.float32)
    first = np.flatnonzero(event)
    comes_first = (time[first, None] < time) | ((time[first, None] == time) & ~event)
    in_order = (log_hazard[first, None] > log_hazard) + 0.5 * (log_hazard[first, None] == log_hazard)
    # how often each pair is in a resample
    pairs, right = (
        (counts[:, first] * (counts @ table.astype(np.float32).T)).sum(1, dtype=float)
        for table in (comes_first, comes_first * in_order)
    )
    return np.divide(right, pairs, out=np.full(RESAMPLES, np.nan), where=pairs > 0)


def concordance(log_hazard: ndarray, time: ndarray, event: ndarray) -> float:
    """Harrell's C of all pairs of which one is known to come first."""
    right, pairs = concordant_pairs(log_hazard, time, event)
    return right / pairs


def concordant_pairs(log_hazard: ndarray, time: ndarray, event: ndarray) -> tuple[float, int]:
    """(pairs in the right order, pairs of which one is known to come first); equal log-hazards count half."""
    comes_first = event[:, None] & ((time[:, None] < time) | ((time[:, None] == time) & ~event))
    right = (log_hazard[:, None] > log_hazard) + 0.5 * (log_hazard[:, None] == log_hazard)
    return float((comes_first * right).sum()), int(comes_first.sum())


def interval(values: ndarray) -> tuple[float, float]:
    """2.5 and 97.5 % of the resamples that are defined."""
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)


def score(
    log_hazard: ndarray,
    val: MultiGPUSurvivalDataset,
    train: MultiGPUSurvivalDataset,
    years: list[float],
    baseline: dict | None = None,
    name: str = "val",
) -> dict[str, float]:
    """The whole fold at once, in float64: C (Harrell, Uno), AUC and, with a baseline, Brier scores; by torchsurv.

    The weights against censoring are the training fold's. What is undefined, as beyond the follow-up, is left out.
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

    # horizons within the follow-up, each with cases and controls
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


def print_table(
    title: str,
    models: dict[str, tuple],
    val: MultiGPUSurvivalDataset,
    train: MultiGPUSurvivalDataset,
    years: list[float],
) -> dict[str, float]:
    """Rank 0: print the scores of the network, which is the first of `models`, and of its rivals; returns all by name.

    models: {name: (log-hazards, baseline)}. The last columns are the network's C above that of each rival, with its
    interval in resamples of the same cases, and the two-sided p value of no difference.
    """
    truth = val.cohort.table.get("true_log_hazard")
    if truth is not None:
        # of made-up data: what the outcomes were drawn with
        models = models | {"true_risk": (pd.to_numeric(truth).to_numpy(float)[val.rows], None)}
    metrics, rows, own = {}, {}, None
    for model, (risk, baseline) in models.items():
        resampled = resampled_c(risk, *outcome(val), val.cohort.case[val.rows])
        scores = score(risk, val, train, years, baseline, "of")
        scores["of/c_index_low"], scores["of/c_index_high"] = interval(resampled)
        row = {"C": "{of/c_index:.3f} ({of/c_index_low:.3f}, {of/c_index_high:.3f})".format(**scores)}
        columns = (("Uno C", "of/c_index_uno"), ("AUC", "of/auc"), ("IBS", "of/ibs"))
        row |= {label: f"{scores[key]:.3f}" for label, key in columns if key in scores}
        if own is None:
            own, prefix = resampled, "val"
        else:
            above, prefix = own - resampled, f"val/rival/{model}"
            above = above[np.isfinite(above)]
            low, high = interval(above)
            p = min(1.0, 2 * min(np.mean(above <= 0), np.mean(above >= 0)) + 1 / RESAMPLES)
            lead = metrics["val/c_index"] - scores["of/c_index"]
            row |= {"network above": f"{lead:+.3f} ({low:+.3f}, {high:+.3f})", "p": f"{p:.3f}"}
            scores |= {"of/above_low": low, "of/above_high": high, "of/p": float(p)}
        metrics |= {key.replace("of", prefix, 1): value for key, value in scores.items()}
        rows[model.replace("_and_", " + ").replace("_", " ")] = row
    print(f"\n{title}: {len(val.rows)} cases, {outcome(val)[1].sum()} events")
    print(pd.DataFrame(rows).T.fillna("").to_string())
    horizons = {f"{y:g} y": [metrics.get(f"val/{key}/{y:g}y", np.nan) for key in ("auc", "brier")] for y in years}
    print(pd.DataFrame(horizons, ["AUC", "Brier"]).T.dropna().round(3).to_string(), flush=True)
    return metrics


def folds_of(folder: Path) -> list[Path]:
    """The run folders of a finished cross-validation, none of anything else."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    repeats, folds = (range(1, 1 + summary.get(name, 0)) for name in ("repeats", "folds"))
    return [folder / f"repeat_{repeat}" / f"fold_{fold}" for repeat in repeats for fold in folds]


def print_cross_validation(folder: Path, results: list[tuple], args) -> None:
    """Rank 0: mean and spread of the folds' scores, and C over the pairs within folds; summary.json and all cases."""
    table = pd.DataFrame([metrics for _, metrics, _, _ in results])
    # a mean of interval's ends or of p values says nothing
    table = table[[name for name in table if not name.endswith(("_low", "_high", "/p"))]]
    summary = table.mean().to_dict() | {f"{name}_sd": value for name, value in table.std().items()}
    pairs = np.zeros(2)
    cases = []
    for repeat, _, val, log_hazard in results:
        pairs += concordant_pairs(log_hazard, *outcome(val))
        cases.append(pd.DataFrame({"repeat": repeat + 1, "case": val.cohort.case[val.rows], "log_hazard": log_hazard}))
    summary |= {"val/c_index_pooled": pairs[0] / pairs[1], "folds": args.folds, "repeats": args.repeats}
    pd.concat(cases).to_csv(folder / "cross_validation.csv", index=False)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    shown = [name for name in table if name.endswith("c_index")]
    print(f"\n{len(results)} folds, last epochs; C of all pairs within folds {summary['val/c_index_pooled']:.3f}")
    print(table[shown].agg(["mean", "std", "min", "max"]).T.round(3).to_string(), flush=True)


# --- files and figure -------------------------------------------------------------------------------------------------


def predictions(
    data: MultiGPUSurvivalDataset, log_hazard: ndarray, years: list[float], baseline: dict | None
) -> pd.DataFrame:
    """A row a case: case, outcome, log-hazard, S(t) at each horizon."""
    time, event = outcome(data)
    known = np.isfinite(time)
    frame = {"case": data.cohort.case[data.rows], "time_years": time, "event": np.where(known, event, np.nan)}
    frame["log_hazard"] = log_hazard
    if baseline:
        frame |= {f"S({year:g}y)": survival(baseline, log_hazard, [year])[:, 0] for year in years}
    return pd.DataFrame(frame)


def read_rival(folder: str | None, val: MultiGPUSurvivalDataset) -> dict[str, tuple]:
    """{"other_run": (log-hazards, baseline)} of another run on this validation fold, {} for None. Raises InputError."""
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
    """baseline.json of the checkpoint of this step, None without it."""
    path = folder / "baseline.json"
    baseline = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return baseline if baseline.get("step") == step else None


def predict(folder: Path, data: MultiGPUSurvivalDataset, risks: list[tuple], args, trained: set[str]) -> None:
    """Rank 0: predictions_<table>.csv; where rows have outcomes, C with its interval and the calibration.

    trained: the cases that a model was trained on.
    """
    # each model's own constant says nothing
    log_hazard = np.mean([risk - (baseline["centre"] if baseline else 0) for risk, baseline in risks], axis=0)
    frame = predictions(data, log_hazard, args.eval_years, None)
    curves = [survival(baseline, risk, args.eval_years) for risk, baseline in risks if baseline]
    for k, year in enumerate(args.eval_years if curves else []):
        frame[f"S({year:g}y)"] = np.mean([curve[:, k] for curve in curves], axis=0)
    path = folder / f"predictions_{Path(args.predict).stem}.csv"
    frame.to_csv(path, index=False)
    print(f"{len(frame)} cases, {len(risks)} models: {path}")
    if seen := frame["case"].isin(trained).sum():
        print(f"warning: {seen} of these cases have names that were trained on; their risks look better than they are")
    if not curves:
        print("no S(t): the baseline hazard is known of the weights alone that a run ended with")
    known = frame[frame["time_years"].notna()]
    log_hazard, time = known["log_hazard"].to_numpy(), known["time_years"].to_numpy()
    event = known["event"].to_numpy() == 1
    if concordant_pairs(log_hazard, time, event)[1]:
        low, high = interval(resampled_c(log_hazard, time, event, known["case"].to_numpy()))
        c_index = f"{concordance(log_hazard, time, event):.3f} ({low:.3f}, {high:.3f})"
        print(f"{len(known)} with outcomes, {event.sum()} events: C {c_index}")
        rows = {
            f"{year:g} y": {
                "predicted risk": 1 - known[f"S({year:g}y)"].mean(),
                "observed": 1 - kaplan_meier(time, event, year),
            }
            for year in args.eval_years
            if curves and year <= time.max()
        }
        print(pd.DataFrame(rows).T.round(3).to_string() if rows else "", flush=True)


def draw(log_hazard: ndarray, val: MultiGPUSurvivalDataset, years: list[float], baseline: dict, metrics: dict):
    """Kaplan-Meier curves of the thirds by predicted risk; calibration in fifths and AUC at each horizon."""
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
