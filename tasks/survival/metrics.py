"""How good predictions are: concordance, time-dependent AUC, Brier scores, and the baseline hazard they need.

The whole fold at once, in float64, times in years. The weights against censoring come from the TRAINING fold, as does
the baseline hazard. torchsurv computes the scores; its Kaplan-Meier estimate is float32 and loses the sixth digit, so
that one is here.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray

from old.cli_utils import RunError
from tasks.survival.cohort import Cohort, Outcome
from tasks.survival.folds import Fold

RESAMPLES = 1000
# points of the integral over the Brier scores
GRID = 100


class Evaluation(NamedTuple):
    """What an evaluation of a fold gives, the same on all ranks.

    metrics: of the validation cases. val, train: outputs (cases, outputs) in float64; train is None where it was not
    asked for. baseline: see breslow_baseline, of the training cases; None where no survival probabilities were asked
    for.
    """

    metrics: dict[str, float | None]
    val: ndarray
    train: ndarray | None
    baseline: dict | None

    @property
    def log_hazard(self) -> ndarray:
        """Of the validation cases."""
        return self.val[:, 0]


def check_finite(outputs: ndarray) -> None:
    """Raise RunError when a case's outputs are not finite."""
    finite = np.isfinite(outputs).all(axis=1)
    if not finite.all():
        raise RunError(f"{int((~finite).sum())} predictions are not finite; lower --lr")


# --- survival curves --------------------------------------------------------------------------------------------------


def kaplan_meier(
    event: ndarray,
    time: ndarray,
    at,
    censoring: bool = False,
) -> ndarray:
    """P(T > t) at the times `at`; with censoring that of the censoring time, events going first where both tie."""
    order = np.argsort(time, kind="stable")
    times, first, counts = np.unique(time[order], return_index=True, return_counts=True)
    events = np.add.reduceat(event[order].astype(float), first)
    at_risk = len(time) - first.astype(float)
    share = events / at_risk
    if censoring:
        share = (counts - events) / np.maximum(at_risk - events, 1)
    curve = np.concatenate([[1.0], np.cumprod(1 - share)])
    return curve[np.searchsorted(times, at, side="right")]


def censoring_weights(train: Outcome, at) -> ndarray:
    """1 / P(censored after `at`), 0 where that probability is 0."""
    left = kaplan_meier(train.event, train.time, at, censoring=True)
    return np.divide(1.0, left, out=np.zeros_like(left), where=left > 0)


def breslow_baseline(
    log_hazard: ndarray,
    event: ndarray,
    time: ndarray,
) -> dict:
    """The cumulative baseline hazard by Breslow (1974): {"time", "log_hazard", "until"}.

    time: of the events. log_hazard: log of the cumulative hazard after each; sums of exponentials are kept as
    logarithms, so that none overflows. until: the last time of any case.
    """
    times, events = np.unique(time[event], return_counts=True)

    # the hazard of all who are at risk at each time, summed from the last case on
    order = np.argsort(-time, kind="stable")
    summed = np.logaddexp.accumulate(log_hazard[order])
    total = np.concatenate([[-np.inf], summed])
    places = np.searchsorted(-time[order], -times, side="right")
    cumulative = np.logaddexp.accumulate(np.log(events) - total[places])
    return {
        "time": times.tolist(),
        "log_hazard": cumulative.tolist(),
        "until": float(time.max()),
    }


def log_cumulative_hazard(baseline: dict, log_hazard: ndarray, at) -> ndarray:
    """(n, len(at)): log H(t|x), -inf before the first event."""
    steps = np.concatenate([[-np.inf], baseline["log_hazard"]])
    places = np.searchsorted(baseline["time"], np.asarray(at, float), side="right")
    return steps[places] + np.asarray(log_hazard)[:, None]


def survival_at(baseline: dict, log_hazard: ndarray, at) -> ndarray:
    """(n, len(at)): S(t|x) = exp(-H(t|x)), the probability of no event until each time."""
    with np.errstate(over="ignore"):
        return np.exp(-np.exp(log_cumulative_hazard(baseline, log_hazard, at)))


# --- concordance ------------------------------------------------------------------------------------------------------


def known_to_come_first(
    event: ndarray,
    time: ndarray,
    rows=slice(None),
) -> ndarray:
    """(rows, n): whether the event of one case is known to come before that of another, so that both compare."""
    first = time[rows][:, None]
    is_earlier = first < time
    ties_with_censored = (first == time) & ~event
    return event[rows][:, None] & (is_earlier | ties_with_censored)


def in_right_order(log_hazard: ndarray, rows=slice(None)) -> ndarray:
    """(rows, n): 1 where the first of two cases has the higher log-hazard, 0.5 where both have the same."""
    first = log_hazard[rows][:, None]
    return (first > log_hazard) + 0.5 * (first == log_hazard)


def concordance(
    log_hazard: ndarray,
    event: ndarray,
    time: ndarray,
    weight=None,
) -> float | None:
    """Harrell's C-index, or Uno's with censoring weights; None without a comparable pair."""
    from torchsurv.metrics.cindex import ConcordanceIndex

    comparable = known_to_come_first(event, time).any(axis=1)
    if weight is not None:
        comparable = comparable & (weight > 0)
        weight = torch.from_numpy(weight)
    if not comparable.any():
        return None
    index = ConcordanceIndex()
    value = index(
        as_tensor(log_hazard),
        as_tensor(event),
        as_tensor(time),
        weight=weight,
    )
    return float(value)


def as_tensor(array: ndarray) -> torch.Tensor:
    """A tensor of any array: torchsurv wants contiguous ones."""
    return torch.from_numpy(np.ascontiguousarray(array))


def concordance_interval(log_hazard, event, time) -> tuple[float | None, float | None]:
    """2.5 and 97.5 % of Harrell's C over 1000 resamples of the cases (bootstrap), the same numbers each time."""
    noise = np.random.default_rng(0)
    cases = len(time)
    chances = np.full(cases, 1 / cases)
    counts = noise.multinomial(cases, chances, RESAMPLES).astype(np.float32)

    # in parts, so that no matrix of all pairs is needed
    right = np.zeros(RESAMPLES)
    pairs = np.zeros(RESAMPLES)
    events = np.flatnonzero(event)
    parts = max(1, len(events) * cases // 10**7)
    for rows in np.array_split(events, parts):
        comparable = known_to_come_first(event, time, rows)
        ordered = comparable * in_right_order(log_hazard, rows)
        right += count_pairs(counts, rows, ordered)
        pairs += count_pairs(counts, rows, comparable)

    values = right[pairs > 0] / pairs[pairs > 0]
    if not len(values):
        return None, None
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def count_pairs(
    counts: ndarray,
    rows: ndarray,
    pairs: ndarray,
) -> ndarray:
    """How often some pairs (rows, n) are in each resample, of which counts (resamples, n) says how often a case is."""
    partners = counts @ pairs.astype(np.float32).T
    return (counts[:, rows] * partners).sum(1, dtype=float)


def pairs_in_order(
    log_hazard: ndarray,
    event: ndarray,
    time: ndarray,
) -> tuple[ndarray, ndarray]:
    """(share in the right order, number) of the comparable pairs that each case belongs to."""
    comparable = known_to_come_first(event, time)
    ordered = comparable * in_right_order(log_hazard)
    pairs = comparable.sum(1) + comparable.sum(0)
    right = ordered.sum(1) + ordered.sum(0)
    return right / np.maximum(pairs, 1), pairs


def easiest_and_hardest(
    log_hazard,
    event,
    time,
    most: int = 3,
) -> tuple[list[int], list[int]]:
    """Places of the cases whose comparable pairs are most and least often in the right order."""
    share, pairs = pairs_in_order(log_hazard, event, time)
    order = [int(i) for i in np.argsort(share, kind="stable") if pairs[i]]
    return order[::-1][:most], order[:most]


# --- the scores of a fold ---------------------------------------------------------------------------------------------


def score(
    log_hazard: ndarray,
    outcome: Outcome,
    train: Outcome,
    years: list[float],
    survival: Callable | None = None,
    final: bool = False,
    reference: Callable | None = None,
    until: float = math.inf,
) -> dict[str, float | None]:
    """Metrics of one fold, named without its prefix; None where one is undefined, as at horizons beyond follow-up.

    survival: function of times giving (n, len(times)), for the Brier scores; reference: the same for what they are
    compared with, if not the training fold's Kaplan-Meier curve; until: last time at which both are known; final: with
    the bootstrap interval.
    """
    event, time = outcome
    end = min(time.max(), train.time.max(), until)
    metrics = {"c_index": concordance(log_hazard, event, time)}
    if final:
        low, high = concordance_interval(log_hazard, event, time)
        metrics |= {"c_index_low": low, "c_index_high": high}

    # Uno's index counts no case beyond the follow-up
    weight = np.where(time < end, censoring_weights(train, time), 0.0)
    metrics["c_index_uno"] = concordance(log_hazard, event, time, weight)
    metrics |= score_auc(log_hazard, outcome, train, years, end)
    if survival is None:
        return metrics
    reference = reference or partial(repeat_curve, train, len(time))
    return metrics | score_brier({"": survival, "_km": reference}, outcome, train, years, end)


def repeat_curve(
    train: Outcome,
    cases: int,
    at: ndarray,
) -> ndarray:
    """(cases, len(at)): the Kaplan-Meier curve of the training fold, for each case."""
    return np.tile(kaplan_meier(train.event, train.time, at), (cases, 1))


def score_auc(
    log_hazard: ndarray,
    outcome: Outcome,
    train: Outcome,
    years: list[float],
    end: float,
) -> dict:
    """AUC of an event before each horizon, and their mean; None where a horizon has no cases or no controls."""
    from torchsurv.metrics.auc import Auc

    event, time = outcome
    weight = censoring_weights(train, time)
    metrics = {}
    for year in years:
        horizon = np.array([year], float)
        weight_then = censoring_weights(train, horizon)
        has_cases = (event & (time <= year) & (weight > 0)).any()
        has_controls = (time > year).any()
        is_known = year < end and weight_then[0] > 0

        # weighted against censoring, as Uno's index is
        value = None
        if is_known and has_cases and has_controls:
            auc = Auc()(
                torch.from_numpy(log_hazard),
                as_tensor(event),
                as_tensor(time),
                new_time=torch.from_numpy(horizon),
                weight=torch.from_numpy(weight),
                weight_new_time=torch.from_numpy(weight_then),
            )
            value = float(auc[0])
        metrics[f"auc/{year:g}y"] = value

    known = [value for value in metrics.values() if value is not None]
    metrics["auc"] = sum(known) / len(known) if known else None
    return metrics


def score_brier(
    estimates: dict[str, Callable], outcome: Outcome, train: Outcome, years: list[float], end: float
) -> dict:
    """Brier score at each horizon and integrated over time, of each estimate; its key ends the names."""
    # torchsurv fails on a single case
    several = len(outcome.time) > 1
    metrics = {}
    for name, estimate in estimates.items():
        for year in years:
            value = None
            if year < end and several:
                value = float(brier_scores(estimate, np.array([year]), outcome, train))
            metrics[f"brier{name}/{year:g}y"] = value

    # from the first time to the last horizon that is defined
    first = outcome.time.min()
    last = max((year for year in years if year < end), default=-math.inf)
    for name, estimate in estimates.items():
        value = None
        if first < last and several:
            grid = np.linspace(first, last, GRID)
            scores = brier_scores(estimate, grid, outcome, train)
            area = torch.trapezoid(scores, torch.from_numpy(grid))
            value = float(area / (last - first))
        metrics[f"ibs{name}"] = value
    return metrics


def brier_scores(
    estimate: Callable,
    times: ndarray,
    outcome: Outcome,
    train: Outcome,
) -> torch.Tensor:
    """The Brier score of an estimate of survival at some times."""
    from torchsurv.metrics.brier_score import BrierScore

    return BrierScore()(
        torch.from_numpy(estimate(times)),
        as_tensor(outcome.event),
        as_tensor(outcome.time),
        torch.from_numpy(times),
        torch.from_numpy(censoring_weights(train, outcome.time)),
        torch.from_numpy(censoring_weights(train, times)),
    )


def score_fold(
    fold: Fold,
    val: ndarray,
    train: ndarray | None,
    loss: float,
    years: list[float],
) -> tuple[dict[str, float | None], dict | None]:
    """(metrics, baseline hazard) of a model's outputs; train: see Evaluation. loss: of the validation cases."""
    metrics = {"val/loss": loss}
    if fold.features:
        return metrics | score_features(fold, val), None
    if train is None:
        return metrics | score_survival(fold, val[:, 0], None, years), None
    event, time = fold.train_outcome
    baseline = breslow_baseline(train[:, 0], event, time)
    metrics |= score_survival(fold, val[:, 0], baseline, years)
    return metrics | score_true_risk(fold.cohort, fold.val), baseline


def score_survival(
    fold: Fold, log_hazard: ndarray, baseline: dict | None, years: list[float]
) -> dict[str, float | None]:
    """Metrics of the validation cases' log-hazards; with a baseline those of probabilities and the interval, too."""
    survival = partial(survival_at, baseline, log_hazard) if baseline else None
    final = baseline is not None
    scores = score(log_hazard, fold.val_outcome, fold.train_outcome, years, survival, final)
    return {f"val/{name}": value for name, value in scores.items()}


def score_true_risk(cohort: Cohort, rows: ndarray) -> dict[str, float | None]:
    """What the risk that made-up data were drawn with would reach on these rows; empty for other data."""
    if cohort.true_risk is None or not np.isfinite(cohort.true_risk[rows]).all():
        return {}
    event, time = cohort.outcome(rows)
    return {"val/c_index_true": concordance(cohort.true_risk[rows], event, time)}


def score_features(fold: Fold, outputs: ndarray) -> dict[str, float | None]:
    """--task pretrain: R2 of each feature over the cases that have it, and their mean; None where undefined."""
    scores = fold.features.scores[fold.val].double().numpy()
    metrics = {}
    for name, value, output in zip(fold.features.names, scores.T, outputs.T, strict=True):
        known = np.isfinite(value)
        value = value[known]
        spread = np.square(value - value.mean()).sum() if known.any() else 0.0
        left = np.square(value - output[known]).sum()
        metrics[f"val/r2/{name}"] = float(1 - left / spread) if spread > 0 else None

    defined = [value for value in metrics.values() if value is not None]
    metrics["val/r2"] = sum(defined) / len(defined) if defined else None
    return metrics


def logrank_p(
    group: ndarray,
    event: ndarray,
    time: ndarray,
) -> float:
    """p value of the log-rank test that all groups have one hazard (chi-squared, groups - 1 degrees of freedom)."""
    labels = np.unique(group)
    excess = np.zeros(len(labels))
    variance = np.zeros((len(labels), len(labels)))
    for t in np.unique(time[event]):
        at_risk = count_in_groups(group[time >= t], labels)
        observed = count_in_groups(group[event & (time == t)], labels)
        events = observed.sum()
        cases = at_risk.sum()
        share = at_risk / cases
        excess += observed - events * share

        # of the hypergeometric distribution
        if cases > 1:
            factor = events * (cases - events) / (cases - 1)
            variance += factor * (np.diag(share) - np.outer(share, share))

    freedom = len(labels) - 1
    if freedom < 1 or not variance.any():
        return 1.0
    statistic = excess[:-1] @ np.linalg.pinv(variance[:-1, :-1]) @ excess[:-1]
    p = torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2))
    return float(p)


def count_in_groups(group: ndarray, labels: ndarray) -> ndarray:
    """How many of some cases are in each group."""
    return np.array([np.sum(group == label) for label in labels], float)
