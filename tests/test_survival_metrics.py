"""tasks/survival/metrics.py against scikit-survival, lifelines and textbook formulas."""

import itertools
import warnings

import numpy as np
import pytest

from tasks.survival import metrics as sm
from tasks.survival.cohort import Outcome
from tasks.survival.figures import draw_volumes

YEARS = [1.0, 2.0, 3.0, 4.0, 5.0]


def fold(seed: int, n: int, ties: bool, latest: float):
    noise = np.random.default_rng(seed)
    log_hazard = noise.normal(size=n).round(2)
    time, event = noise.exponential(6 * np.exp(-0.7 * log_hazard)), noise.random(n) < 0.7
    censored = noise.uniform(0.5, 9, n)
    time, event = np.minimum(time, censored), event & (time <= censored)
    time, event = np.minimum(time, latest), event & (time < latest)
    return log_hazard, event, np.ceil(time * 4) / 4 if ties else time


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
def test_against_scikit_survival(seed, ties):
    from sksurv.metrics import (
        brier_score,
        concordance_index_censored,
        concordance_index_ipcw,
        cumulative_dynamic_auc,
        integrated_brier_score,
    )
    from sksurv.util import Surv

    log_hazard, event, time = fold(seed, 150, ties, 7.9)
    _, train_event, train_time = fold(seed + 50, 300, ties, 8.0)
    train, val = Surv.from_arrays(train_event, train_time), Surv.from_arrays(event, time)

    def survival(at) -> np.ndarray:
        return np.exp(-np.outer(np.exp(log_hazard), np.asarray(at) * 0.1))

    found = sm.score(log_hazard, Outcome(event, time), Outcome(train_event, train_time), YEARS, survival, final=True)
    assert found["c_index"] == pytest.approx(concordance_index_censored(event, time, log_hazard)[0], abs=1e-6)
    end = min(time.max(), train_time.max())
    assert found["c_index_uno"] == pytest.approx(concordance_index_ipcw(train, val, log_hazard, tau=end)[0], abs=1e-6)
    auc, _ = cumulative_dynamic_auc(train, val, log_hazard, YEARS)
    assert [found[f"auc/{year:g}y"] for year in YEARS] == pytest.approx(auc.tolist(), abs=1e-6)
    assert found["auc"] == pytest.approx(auc.mean(), abs=1e-6)
    _, brier = brier_score(train, val, survival(YEARS), YEARS)
    assert [found[f"brier/{year:g}y"] for year in YEARS] == pytest.approx(brier.tolist(), abs=1e-6)
    grid = np.linspace(time.min(), 5, 100)
    assert found["ibs"] == pytest.approx(integrated_brier_score(train, val, survival(grid), grid), abs=1e-6)
    reference = np.tile(sm.kaplan_meier(train_event, train_time, grid), (len(time), 1))
    assert found["ibs_km"] == pytest.approx(integrated_brier_score(train, val, reference, grid), abs=1e-6)
    assert found["c_index_low"] < found["c_index"] < found["c_index_high"]


def test_kaplan_meier_and_logrank_against_lifelines():
    from lifelines import KaplanMeierFitter
    from lifelines.statistics import multivariate_logrank_test

    log_hazard, event, time = fold(1, 200, True, 8.0)
    at = np.linspace(0, 9, 60)
    expected = KaplanMeierFitter().fit(time, event).survival_function_at_times(at).to_numpy()
    assert np.allclose(sm.kaplan_meier(event, time, at), expected, atol=1e-12)
    group = np.digitize(log_hazard, [-0.4, 0.4])
    assert sm.logrank_p(group, event, time) == pytest.approx(
        multivariate_logrank_test(time, group, event).p_value, rel=1e-6
    )
    assert sm.logrank_p(np.zeros(200), event, time) == 1.0


def test_baseline_hazard_against_scikit_survival():
    """Breslow on the training fold, also with log-hazards whose exponentials would overflow."""
    from sksurv.linear_model.coxph import BreslowEstimator

    log_hazard, event, time = fold(2, 200, True, 8.0)
    reference = BreslowEstimator().fit(log_hazard, event, time)
    for offset in (0, 900):
        baseline = sm.breslow_baseline(log_hazard + offset, event, time)
        curves = np.array([curve([0.5, 2.0, 5.0]) for curve in reference.get_survival_function(log_hazard)])
        assert np.allclose(sm.survival_at(baseline, log_hazard + offset, [0.5, 2.0, 5.0]), curves, atol=1e-9)
    assert (sm.survival_at(baseline, log_hazard, [0.0]) == 1).all()


def test_bootstrap_interval_is_that_of_resampling():
    """The matrix form against drawing cases and taking scikit-survival's index, with the same draws."""
    from sksurv.metrics import concordance_index_censored

    log_hazard, event, time = fold(3, 60, True, 8.0)
    counts = np.random.default_rng(0).multinomial(60, np.full(60, 1 / 60), sm.RESAMPLES)
    values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in counts:
            take = np.repeat(np.arange(60), row)
            values.append(concordance_index_censored(event[take], time[take], log_hazard[take])[0])
    expected = np.quantile(values, [0.025, 0.975])
    assert np.allclose(sm.concordance_interval(log_hazard, event, time), expected, atol=1e-6)


def test_what_is_undefined():
    """Horizons beyond the follow-up of either fold, before the first event, or without controls; no comparable pair."""
    log_hazard, event, time = fold(5, 80, False, 3.5)
    _, train_event, train_time = fold(6, 80, False, 8.0)
    found = sm.score(
        log_hazard, Outcome(event, time), Outcome(train_event, train_time), YEARS, lambda at: np.ones((80, len(at)))
    )
    assert [found[f"auc/{year:g}y"] is None for year in YEARS] == [False, False, False, True, True]
    assert [found[f"brier/{year:g}y"] is None for year in YEARS] == [False, False, False, True, True]
    assert found["ibs"] is not None
    short = sm.score(
        log_hazard,
        Outcome(event, time),
        Outcome(train_event, train_time.clip(max=1.5)),
        YEARS,
        lambda at: np.ones((80, len(at))),
    )
    assert [short[f"brier/{year:g}y"] is None for year in YEARS] == [False, True, True, True, True]
    none = sm.score(
        log_hazard, Outcome(event, time), Outcome(train_event, train_time), [20.0], lambda at: np.ones((80, len(at)))
    )
    assert none["auc"] is none["ibs"] is none["auc/20y"] is None
    alone = np.array([0.0]), np.array([True]), np.array([2.0])
    assert sm.concordance(*alone) is None
    assert sm.concordance_interval(*alone) == (None, None)
    censored = sm.score(
        np.zeros(3),
        Outcome(np.array([False, False, True]), np.array([1.0, 2.0, 3.0])),
        Outcome(train_event, train_time),
        YEARS,
    )
    assert censored["c_index"] is None
    assert censored["auc/1y"] is None


def test_best_and_worst_cases():
    time, event = np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, True, True, False])
    best, worst = sm.easiest_and_hardest(np.array([5.0, 1.0, 2.0, 0.0]), event, time, 1)
    assert best[0] in (0, 3)
    assert worst[0] in (1, 2)


def test_figures_take_any_name_and_explain_themselves(recwarn):
    """No glyph is missing, no dollar sign begins a formula, no title runs into the next one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from figure_utils import figure_text

    names = ["\u60a3\u8005 7", "a$b$c", "x\ty\nz", "long" * 40, "$", "7"]
    assert figure_text(names[0]) == "?? 7"
    assert figure_text(names[2]) == "x y z"
    assert len(figure_text(names[3])) == 32
    titles = [f"best: {figure_text(name)}\n50% of 12 pairs right" for name in names]
    figure = draw_volumes([np.zeros((6, 5, 4))] * 6, titles, "what best means\nand worst")
    figure.canvas = FigureCanvasAgg(figure)
    figure.canvas.draw()
    assert not recwarn.list
    boxes = [axes.title.get_window_extent() for axes in figure.axes[:6]]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert all(box.y1 < figure._suptitle.get_window_extent().y0 for box in boxes)
    assert [axes.get_ylabel() for axes in figure.axes[::6]] == [f"{n} plane, middle" for n in ("X-Y", "X-Z", "Y-Z")]
