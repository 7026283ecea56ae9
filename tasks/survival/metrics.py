"""How good a log-hazard is: concordance, time-dependent AUC, Brier scores, baseline hazard, and their figures.

The whole fold at once, in float64, times in years. The weights against censoring come from the TRAINING fold, as does
the baseline hazard. torchsurv computes the scores; its Kaplan-Meier estimate is float32 and loses the sixth digit, so
that one is here.
"""

import math

import numpy as np
import torch

RESAMPLES = 1000


def kaplan_meier(event: np.ndarray, time: np.ndarray, at, censoring: bool = False) -> np.ndarray:
    """P(T > t) at the times `at`; with censoring that of the censoring time, events going first where both tie."""
    order = np.argsort(time, kind="stable")
    times, first, counts = np.unique(time[order], return_index=True, return_counts=True)
    events = np.add.reduceat(event[order].astype(float), first)
    at_risk = len(time) - first.astype(float)
    share = (counts - events) / np.maximum(at_risk - events, 1) if censoring else events / at_risk
    return np.concatenate([[1.0], np.cumprod(1 - share)])[np.searchsorted(times, at, side="right")]


def censoring_weights(event: np.ndarray, time: np.ndarray, at) -> np.ndarray:
    """1 / P(censored after `at`), 0 where that probability is 0."""
    left = kaplan_meier(event, time, at, censoring=True)
    return np.divide(1.0, left, out=np.zeros_like(left), where=left > 0)


def breslow_baseline(log_hazard: np.ndarray, event: np.ndarray, time: np.ndarray) -> dict:
    """{"time", "log_hazard"}: event times and log of the cumulative baseline hazard after each, by Breslow (1974).

    Sums of exponentials are kept as logarithms: none overflows.
    """
    times, events = np.unique(time[event], return_counts=True)
    order = np.argsort(-time, kind="stable")
    total = np.concatenate([[-np.inf], np.logaddexp.accumulate(log_hazard[order])])
    at_risk = total[np.searchsorted(-time[order], -times, side="right")]
    return {"time": times.tolist(), "log_hazard": np.logaddexp.accumulate(np.log(events) - at_risk).tolist()}


def log_cumulative_hazard(baseline: dict, log_hazard: np.ndarray, at) -> np.ndarray:
    """(n, len(at)): log H(t|x), -inf before the first event."""
    steps = np.concatenate([[-np.inf], baseline["log_hazard"]])
    return (
        steps[np.searchsorted(baseline["time"], np.asarray(at, float), side="right")] + np.asarray(log_hazard)[:, None]
    )


def survival_at(baseline: dict, log_hazard: np.ndarray, at) -> np.ndarray:
    """(n, len(at)): S(t|x) = exp(-H(t|x)), the probability of no event until each time."""
    with np.errstate(over="ignore"):
        return np.exp(-np.exp(log_cumulative_hazard(baseline, log_hazard, at)))


def concordance(log_hazard: np.ndarray, event: np.ndarray, time: np.ndarray, weight=None) -> float | None:
    """Harrell's C-index, or Uno's with censoring weights; None without a comparable pair."""
    from torchsurv.metrics.cindex import ConcordanceIndex

    one = (event[:, None] & ((time[:, None] < time) | ((time[:, None] == time) & ~event))).any(1)
    if not (one if weight is None else one & (weight > 0)).any():
        return None
    weight = None if weight is None else torch.from_numpy(weight)
    tensors = (torch.from_numpy(np.ascontiguousarray(a)) for a in (log_hazard, event, time))
    return float(ConcordanceIndex()(*tensors, weight=weight))


def concordance_interval(log_hazard, event, time) -> tuple[float | None, float | None]:
    """2.5 and 97.5 % of Harrell's C over 1000 resamples of the cases (bootstrap), the same numbers each time."""
    noise, n = np.random.default_rng(0), len(time)
    counts = noise.multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(np.float32)
    above, pairs = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    events = np.flatnonzero(event)
    for part in np.array_split(events, max(1, len(events) * n // 10**7)):
        comparable = (time[part, None] < time) | ((time[part, None] == time) & ~event)
        right = (log_hazard[part, None] > log_hazard) + 0.5 * (log_hazard[part, None] == log_hazard)
        above += (counts[:, part] * (counts @ (comparable * right).astype(np.float32).T)).sum(1, dtype=float)
        pairs += (counts[:, part] * (counts @ comparable.astype(np.float32).T)).sum(1, dtype=float)
    values = above[pairs > 0] / pairs[pairs > 0]
    if not len(values):
        return None, None
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def score(
    log_hazard: np.ndarray, event: np.ndarray, time: np.ndarray, train_event: np.ndarray, train_time: np.ndarray,
    years: list[float], survival=None, final: bool = False, reference=None, until: float = math.inf,
) -> dict[str, float | None]:  # fmt: skip
    """Metrics of one fold, named without its prefix; None where one is undefined, as at horizons beyond follow-up.

    survival: function of times giving (n, len(times)), for the Brier scores; reference: the same for what they are
    compared with, if not the training fold's Kaplan-Meier curve; until: last time at which both are known; final: with
    the bootstrap interval.
    """
    from torchsurv.metrics.auc import Auc
    from torchsurv.metrics.brier_score import BrierScore

    end = min(time.max(), train_time.max(), until)
    weight = censoring_weights(train_event, train_time, time)
    metrics = {"c_index": concordance(log_hazard, event, time)}
    if final:
        metrics["c_index_low"], metrics["c_index_high"] = concordance_interval(log_hazard, event, time)
    metrics["c_index_uno"] = concordance(log_hazard, event, time, np.where(time < end, weight, 0.0))
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in (event, time)]
    known, case_weight = [], torch.from_numpy(weight)
    for year in years:
        at = censoring_weights(train_event, train_time, np.array([year]))
        cases = event & (time <= year) & (weight > 0)
        defined = year < end and at[0] > 0 and cases.any() and (time > year).any()
        value = None
        if defined:
            known.append(year)
            new = torch.tensor([year], dtype=torch.float64)
            given = {"new_time": new, "weight": case_weight, "weight_new_time": torch.from_numpy(at)}
            value = float(Auc()(torch.from_numpy(log_hazard), *tensors, **given)[0])
        metrics[f"auc/{year:g}y"] = value
    values = [metrics[f"auc/{year:g}y"] for year in known]
    metrics["auc"] = sum(values) / len(values) if values else None
    if survival is None:
        return metrics

    def brier(estimate: np.ndarray, times: np.ndarray) -> torch.Tensor:
        at = torch.from_numpy(censoring_weights(train_event, train_time, times))
        return BrierScore()(torch.from_numpy(estimate), *tensors, torch.from_numpy(times), case_weight, at)

    def kaplan_meier_curve(times: np.ndarray) -> np.ndarray:
        return np.tile(kaplan_meier(train_event, train_time, times), (len(time), 1))

    several, reference = len(time) > 1, reference or kaplan_meier_curve  # torchsurv fails on a single case
    for name, estimate in (("brier", survival), ("brier_km", reference)):
        for year in years:
            inside = year < end and several
            metrics[f"{name}/{year:g}y"] = (
                float(brier(estimate(np.array([year])), np.array([year]))) if inside else None
            )
    first, last = time.min(), max((year for year in years if year < end), default=-math.inf)
    for name, estimate in (("ibs", survival), ("ibs_km", reference)):
        metrics[name] = None
        if first < last and several:
            grid = np.linspace(first, last, 100)
            metrics[name] = float(torch.trapezoid(brier(estimate(grid), grid), torch.from_numpy(grid)) / (last - first))
    return metrics


def logrank_p(group: np.ndarray, event: np.ndarray, time: np.ndarray) -> float:
    """p value of the log-rank test that all groups have one hazard (chi-squared, groups - 1 degrees of freedom)."""
    labels = np.unique(group)
    excess, variance = np.zeros(len(labels)), np.zeros((len(labels), len(labels)))
    for t in np.unique(time[event]):
        at_risk = np.array([np.sum((time >= t) & (group == g)) for g in labels], float)
        events, n = np.sum(event & (time == t)), at_risk.sum()
        share = at_risk / n
        excess += [np.sum(event & (time == t) & (group == g)) for g in labels] - events * share
        if n > 1:
            variance += events * (n - events) / (n - 1) * (np.diag(share) - np.outer(share, share))
    free = len(labels) - 1
    if free < 1 or not variance.any():
        return 1.0
    value = excess[:-1] @ np.linalg.pinv(variance[:-1, :-1]) @ excess[:-1]
    return float(torch.special.gammaincc(torch.tensor(free / 2.0), torch.tensor(value / 2)))


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_survival(log_hazard, event, time, years: list[float], survival, train: tuple, heading: str = ""):
    """A matplotlib figure: Kaplan-Meier by risk tertile with log-rank p, AUC over time, calibration at each horizon.

    heading: what was scored by what, beside which the number of cases stands.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5))
    figure.subplots_adjust(left=0.06, right=0.98, bottom=0.08, top=0.88, hspace=0.4, wspace=0.25)
    figure.suptitle(f"{heading}: {count(len(time), 'case')}, {count(int(event.sum()), 'event')}", fontsize=13)
    left, right = figure.add_subplot(2, 2, 1), figure.add_subplot(2, 2, 2)
    rank = np.argsort(np.argsort(log_hazard, kind="stable"), kind="stable")
    third = np.minimum(3 * rank // max(1, len(rank)), 2)
    grid = np.linspace(0, time.max(), 300)
    for k, name in enumerate(("low", "middle", "high")):
        rows = third == k
        if rows.any():
            curve = kaplan_meier(event[rows], time[rows], grid)
            left.step(
                grid,
                curve,
                where="post",
                color=f"C{k}",
                label=f"{name} risk ({count(rows.sum(), 'case')}, {count(event[rows].sum(), 'event')})",
            )
    left.set(title=f"tertiles of predicted risk, log-rank p = {logrank_p(third, event, time):.2g}", ylim=(0, 1.02))
    left.set(xlabel="years", ylabel="without event")
    left.legend(fontsize=8)
    points = np.quantile(time[event], np.linspace(0.1, 0.9, 15)) if event.any() else []
    curve = score(log_hazard, event, time, *train, sorted(set(points)))
    values = [
        (float(name[4:-1]), value) for name, value in curve.items() if name.startswith("auc/") and value is not None
    ]
    if values:
        right.plot(*zip(*values, strict=True), marker=".")
    right.axhline(0.5, color="grey", linewidth=0.8, label="chance")
    right.set(title="AUC of an event before each time", xlabel="years", ylim=(0, 1.02))
    right.legend(fontsize=8, loc="lower right")
    for place, year in enumerate(years):
        axes = figure.add_subplot(2, max(1, len(years)), max(1, len(years)) + place + 1)
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, label="perfectly calibrated")
        axes.set(title=f"risk within {year:g} y", xlabel="predicted, mean of a fifth")
        if year >= time.max():
            axes.text(0.5, 0.5, "beyond\nfollow-up", ha="center", va="center", transform=axes.transAxes)
            continue
        risk = 1 - survival(np.array([year]))[:, 0]
        groups = np.array_split(np.argsort(risk, kind="stable"), min(5, len(risk)))
        seen = [1 - kaplan_meier(event[rows], time[rows], year) for rows in groups]
        axes.plot([risk[rows].mean() for rows in groups], seen, marker="o")
        edge = max(0.05, *(1.1 * value for value in seen), 1.1 * risk[groups[-1]].mean())
        axes.set(xlim=(0, edge), ylim=(0, edge))
        if place == 0:
            axes.set_ylabel("observed (Kaplan-Meier)")
            axes.legend(fontsize=7, loc="upper left")
    return figure


def count(number: int, name: str) -> str:
    """1 case, 2 cases."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def pairs_in_order(log_hazard, event, time) -> tuple[np.ndarray, np.ndarray]:
    """(share in the right order, number) of the comparable pairs that each case belongs to."""
    before = event[:, None] & ((time[:, None] < time) | ((time[:, None] == time) & ~event))
    right = (log_hazard[:, None] > log_hazard) + 0.5 * (log_hazard[:, None] == log_hazard)
    pairs = before.sum(1) + before.sum(0)
    return ((before * right).sum(1) + (before * right).sum(0)) / np.maximum(pairs, 1), pairs


def easiest_and_hardest(log_hazard, event, time, most: int = 3) -> tuple[list[int], list[int]]:
    """Places of the cases whose comparable pairs are most and least often in the right order."""
    share, pairs = pairs_in_order(log_hazard, event, time)
    order = [int(i) for i in np.argsort(share, kind="stable") if pairs[i]]
    return order[::-1][:most], order[:most]


def draw_volumes(volumes: list[np.ndarray], titles: list[str], heading: str):
    """A matplotlib figure: three orthogonal slices of each (X, Y, Z) volume, one column a volume."""
    from matplotlib.figure import Figure

    width = 2.3 * max(3, len(volumes)) + 0.3
    # inches for the lines of the heading and of the columns' titles
    above = 0.4 + 0.18 * (1 + heading.count("\n")) + 0.16 * (1 + max(title.count("\n") for title in titles))
    height = 6.4 + above
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left=0.3 / width, right=0.99, bottom=0.01, top=1 - above / height, wspace=0.05, hspace=0.05)
    figure.suptitle(heading, fontsize=10 if len(volumes) > 3 else 8, y=1 - 0.12 / height)
    planes = ("X-Y", "X-Z", "Y-Z")
    for row, axes in enumerate(figure.subplots(3, len(volumes), squeeze=False)):
        for place, volume, title in zip(axes, volumes, titles, strict=True):
            middle = [n // 2 for n in volume.shape]
            cut = (volume[:, :, middle[2]], volume[:, middle[1], :], volume[middle[0], :, :])[row]
            place.imshow(cut.T, cmap="gray", vmin=0, vmax=1, origin="lower", aspect="auto")
            place.set(xticks=[], yticks=[])
            if row == 0:
                place.set_title(title, fontsize=8)
            if place is axes[0]:
                place.set_ylabel(f"{planes[row]} plane, middle", fontsize=8)
    return figure
