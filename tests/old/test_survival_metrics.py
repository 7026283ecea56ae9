"""tasks/survival/metrics.py against scikit-survival, lifelines and textbook formulas."""

import itertools
import warnings
from typing import NamedTuple

import numpy as np
import pytest

from tasks.survival import metrics
from tasks.survival.cohort import Outcome
from tasks.survival.figures import draw_volumes

YEARS = [1.0, 2.0, 3.0, 4.0, 5.0]


class Cases(NamedTuple):
    """A made-up fold: predictions, and what became of the cases."""

    log_hazard: np.ndarray
    event: np.ndarray
    time: np.ndarray

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.event, self.time)


def make_cases(seed: int, count: int, ties: bool, latest: float) -> Cases:
    """Exponential times that depend on the log-hazards; censored at random, and all at the latest time."""
    noise = np.random.default_rng(seed)
    log_hazard = noise.normal(size=count).round(2)
    time = noise.exponential(6 * np.exp(-0.7 * log_hazard))
    event = noise.random(count) < 0.7
    censored = noise.uniform(0.5, 9, count)
    event = event & (time <= censored)
    time = np.minimum(time, censored)
    event = event & (time < latest)
    time = np.minimum(time, latest)
    if ties:
        time = np.ceil(time * 4) / 4
    return Cases(log_hazard, event, time)


def horizons(scores: dict, name: str) -> list[float | None]:
    """A score at each horizon."""
    return [scores[f"{name}/{year:g}y"] for year in YEARS]


def near(value):
    return pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
def test_against_scikit_survival(seed, ties):
    from sksurv import metrics as theirs
    from sksurv.util import Surv

    log_hazard, event, time = make_cases(seed, 150, ties, 7.9)
    train_outcome = make_cases(seed + 50, 300, ties, 8.0).outcome
    train = Surv.from_arrays(train_outcome.event, train_outcome.time)
    val = Surv.from_arrays(event, time)

    def survival(at) -> np.ndarray:
        baseline = np.asarray(at) * 0.1
        return np.exp(-np.outer(np.exp(log_hazard), baseline))

    # the order of the cases
    outcome = Outcome(event, time)
    scores = metrics.score(log_hazard, outcome, train_outcome, YEARS, survival, final=True)
    c_index = theirs.concordance_index_censored(event, time, log_hazard)[0]
    assert scores["c_index"] == near(c_index)
    assert scores["c_index_low"] < scores["c_index"] < scores["c_index_high"]
    end = min(time.max(), train_outcome.time.max())
    c_index_uno = theirs.concordance_index_ipcw(train, val, log_hazard, tau=end)[0]
    assert scores["c_index_uno"] == near(c_index_uno)
    auc, _ = theirs.cumulative_dynamic_auc(train, val, log_hazard, YEARS)
    assert horizons(scores, "auc") == near(auc.tolist())
    assert scores["auc"] == near(auc.mean())

    # the probabilities
    _, brier = theirs.brier_score(train, val, survival(YEARS), YEARS)
    assert horizons(scores, "brier") == near(brier.tolist())
    grid = np.linspace(time.min(), 5, 100)
    ibs = theirs.integrated_brier_score(train, val, survival(grid), grid)
    assert scores["ibs"] == near(ibs)
    curve = metrics.kaplan_meier(train_outcome.event, train_outcome.time, grid)
    reference = np.tile(curve, (len(time), 1))
    ibs = theirs.integrated_brier_score(train, val, reference, grid)
    assert scores["ibs_km"] == near(ibs)


def test_kaplan_meier_and_logrank_against_lifelines():
    from lifelines import KaplanMeierFitter
    from lifelines.statistics import multivariate_logrank_test

    log_hazard, event, time = make_cases(1, 200, True, 8.0)
    at = np.linspace(0, 9, 60)
    fitted = KaplanMeierFitter().fit(time, event)
    expected = fitted.survival_function_at_times(at).to_numpy()
    assert np.allclose(metrics.kaplan_meier(event, time, at), expected, atol=1e-12)

    # three groups, and one
    group = np.digitize(log_hazard, [-0.4, 0.4])
    expected = multivariate_logrank_test(time, group, event).p_value
    assert metrics.logrank_p(group, event, time) == pytest.approx(expected, rel=1e-6)
    assert metrics.logrank_p(np.zeros(200), event, time) == 1.0


def test_baseline_hazard_against_scikit_survival():
    """Breslow on the training fold, also with log-hazards whose exponentials would overflow."""
    from sksurv.linear_model.coxph import BreslowEstimator

    log_hazard, event, time = make_cases(2, 200, True, 8.0)
    at = [0.5, 2.0, 5.0]
    reference = BreslowEstimator().fit(log_hazard, event, time)
    expected = [curve(at) for curve in reference.get_survival_function(log_hazard)]
    for offset in (0, 900):
        shifted = log_hazard + offset
        baseline = metrics.breslow_baseline(shifted, event, time)
        curves = metrics.survival_at(baseline, shifted, at)
        assert np.allclose(curves, expected, atol=1e-9)
    assert (metrics.survival_at(baseline, log_hazard, [0.0]) == 1).all()


def test_bootstrap_interval_is_that_of_resampling():
    """The matrix form against drawing cases and taking scikit-survival's index, with the same draws."""
    from sksurv.metrics import concordance_index_censored

    log_hazard, event, time = make_cases(3, 60, True, 8.0)
    chances = np.full(60, 1 / 60)
    counts = np.random.default_rng(0).multinomial(60, chances, metrics.RESAMPLES)
    values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for count in counts:
            rows = np.repeat(np.arange(60), count)
            c_index = concordance_index_censored(event[rows], time[rows], log_hazard[rows])[0]
            values.append(c_index)

    expected = np.quantile(values, [0.025, 0.975])
    interval = metrics.concordance_interval(log_hazard, event, time)
    assert np.allclose(interval, expected, atol=1e-6)


def nobody_dies(at) -> np.ndarray:
    """A probability of survival of 1 for 80 cases."""
    return np.ones((80, len(at)))


def test_what_is_undefined():
    """Horizons beyond the follow-up of either fold, before the first event, or without controls; no comparable pair."""
    cases = make_cases(5, 80, False, 3.5)
    train = make_cases(6, 80, False, 8.0).outcome
    scores = metrics.score(cases.log_hazard, cases.outcome, train, YEARS, nobody_dies)
    beyond = [False, False, False, True, True]
    assert [value is None for value in horizons(scores, "auc")] == beyond
    assert [value is None for value in horizons(scores, "brier")] == beyond
    assert scores["ibs"] is not None

    # a training fold that ends early
    early = Outcome(train.event, train.time.clip(max=1.5))
    scores = metrics.score(cases.log_hazard, cases.outcome, early, YEARS, nobody_dies)
    beyond = [False, True, True, True, True]
    assert [value is None for value in horizons(scores, "brier")] == beyond

    # no horizon within the follow-up
    scores = metrics.score(cases.log_hazard, cases.outcome, train, [20.0], nobody_dies)
    for name in ("auc", "ibs", "auc/20y"):
        assert scores[name] is None

    # a single case
    log_hazard = np.array([0.0])
    event = np.array([True])
    time = np.array([2.0])
    assert metrics.concordance(log_hazard, event, time) is None
    assert metrics.concordance_interval(log_hazard, event, time) == (None, None)

    # the only event comes last
    event = np.array([False, False, True])
    time = np.array([1.0, 2.0, 3.0])
    outcome = Outcome(event, time)
    scores = metrics.score(np.zeros(3), outcome, train, YEARS)
    assert scores["c_index"] is None
    assert scores["auc/1y"] is None


def test_best_and_worst_cases():
    log_hazard = np.array([5.0, 1.0, 2.0, 0.0])
    event = np.array([True, True, True, False])
    time = np.array([1.0, 2.0, 3.0, 4.0])
    best, worst = metrics.easiest_and_hardest(log_hazard, event, time, 1)
    assert best[0] in (0, 3)
    assert worst[0] in (1, 2)


def test_figures_take_any_name_and_explain_themselves(recwarn):
    """No glyph is missing, no dollar sign begins a formula, no title runs into the next one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from old.figure_utils import figure_text

    names = ["\u60a3\u8005 7", "a$b$c", "x\ty\nz", "long" * 40, "$", "7"]
    shown = [figure_text(name) for name in names]
    assert shown[0] == "?? 7"
    assert shown[2] == "x y z"
    assert len(shown[3]) == 32

    # drawn without a warning
    titles = [f"best: {name}\n50% of 12 pairs right" for name in shown]
    volumes = [np.zeros((6, 5, 4))] * 6
    figure = draw_volumes(volumes, titles, "what best means\nand worst")
    figure.canvas = FigureCanvasAgg(figure)
    figure.canvas.draw()
    assert not recwarn.list

    # titles beside each other, and below the heading
    boxes = [axes.title.get_window_extent() for axes in figure.axes[:6]]
    heading = figure._suptitle.get_window_extent()
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert all(box.y1 < heading.y0 for box in boxes)
    labels = [axes.get_ylabel() for axes in figure.axes[::6]]
    assert labels == [f"{name} plane, middle" for name in ("X-Y", "X-Z", "Y-Z")]
