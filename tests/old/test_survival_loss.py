"""The Cox loss and its gradient: against other programs, at the edges, and over processes."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT

from tasks.survival.targets import CoxMemory
from train_survival_distributed import cox_loss

BOTH_TIES = pytest.mark.parametrize("ties", ["efron", "breslow"])


def brute_force(log_hazard, time, event, ties: str) -> float:
    """The textbook formula, one event after the other, in double precision."""
    total = 0.0
    hazard = np.exp(log_hazard)
    for t in np.unique(time[event]):
        tied = event & (time == t)
        at_risk = hazard[time >= t].sum()
        for k in range(tied.sum()):
            gone = k / tied.sum() if ties == "efron" else 0.0
            total += math.log(at_risk - gone * hazard[tied].sum())
        total -= log_hazard[tied].sum()
    return total / max(1, event.sum())


def loss_of(log_hazard: torch.Tensor, time, event, ties: str) -> torch.Tensor:
    """The loss of arrays of times and events."""
    time = torch.from_numpy(time)
    event = torch.from_numpy(event)
    return cox_loss(log_hazard, time, event, ties)


@pytest.fixture(scope="module")
def whas500():
    """(features (500, 4) scaled, time in days with ties, event) of the Worcester heart attack study."""
    from sksurv.datasets import load_whas500

    table, outcome = load_whas500()
    x = table[["age", "bmi", "hr", "sysbp"]].to_numpy(float)
    x = (x - x.mean(0)) / x.std(0)
    # days as months, for more ties
    time = np.ceil(outcome["lenfol"] / 30) * 30
    return x, time, outcome["fstat"].astype(bool)


@BOTH_TIES
def test_against_scikit_survival_and_lifelines(whas500, ties):
    """Where the other program's fit ends, our gradient vanishes; the likelihood there is lifelines'."""
    from lifelines import CoxPHFitter
    from pandas import DataFrame
    from sksurv.linear_model import CoxPHSurvivalAnalysis
    from sksurv.util import Surv

    x, time, event = whas500
    model = CoxPHSurvivalAnalysis(ties=ties, tol=1e-12, n_iter=200)
    fitted = model.fit(x, Surv.from_arrays(event, time)).coef_
    beta = torch.tensor(fitted, requires_grad=True)
    loss = loss_of(torch.from_numpy(x) @ beta, time, event, ties)
    loss.backward()
    value = float(loss.detach())
    assert beta.grad.abs().max() < 1e-6
    expected = brute_force(x @ fitted, time, event, ties)
    assert value == pytest.approx(expected, rel=1e-12)

    # lifelines knows Efron's ties only
    if ties == "efron":
        frame = DataFrame(x, columns=list("abcd")).assign(time=time, event=event)
        other = CoxPHFitter().fit(frame, "time", "event", fit_options={"precision": 1e-12})
        assert np.allclose(other.params_.to_numpy(), fitted, atol=1e-6)
        assert -value * event.sum() == pytest.approx(other.log_likelihood_, rel=1e-9)


@BOTH_TIES
def test_gradient_in_single_precision(whas500, ties):
    """Away from the optimum, in fp32, against finite differences of the textbook formula in fp64."""
    _, time, event = whas500
    time = time[:60]
    event = event[:60]
    log_hazard = np.random.default_rng(0).normal(size=60)
    leaf = torch.tensor(log_hazard, dtype=torch.float32, requires_grad=True)
    loss = loss_of(leaf, time, event, ties)
    loss.backward()
    assert loss.dtype == torch.float32
    start = log_hazard.astype(np.float32).astype(float)
    expected = brute_force(start, time, event, ties)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)

    # the slope along each case's log-hazard
    for i in range(60):
        step = np.zeros(60)
        step[i] = 1e-5
        after = brute_force(start + step, time, event, ties)
        before = brute_force(start - step, time, event, ties)
        slope = (after - before) / 2e-5
        assert float(leaf.grad[i]) == pytest.approx(slope, abs=1e-6)


@BOTH_TIES
@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_huge_log_hazards(ties, scale):
    """Finite up to 1e4 in fp32, and right: at such distances the sum is its largest term."""
    noise = np.random.default_rng(1)
    log_hazard = noise.uniform(-scale, scale, 40).astype(np.float32)
    time = noise.integers(1, 15, 40) / 2.0
    event = noise.random(40) < 0.5
    leaf = torch.tensor(log_hazard, requires_grad=True)
    loss = loss_of(leaf, time, event, ties)
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad.isfinite().all()

    # the same in double precision
    exact = loss_of(leaf.detach().double(), time, event, ties)
    assert float(loss.detach()) == pytest.approx(float(exact), rel=1e-5)


def test_half_precision_is_raised():
    time = torch.tensor([2.0, 1.0])
    event = torch.tensor([True, True])
    loss = cox_loss(torch.zeros(2, dtype=torch.bfloat16), time, event)
    assert loss.dtype == torch.float32


def test_no_event_and_a_single_case():
    """A connected zero, not a constant: the backward pass of DDP must reach every weight."""
    for event in ([False, False, False], [True]):
        leaf = torch.ones(len(event), requires_grad=True)
        time = torch.arange(len(event)).double()
        loss = cox_loss(leaf, time, torch.tensor(event))
        loss.backward()
        assert float(loss.detach()) == 0
        assert (leaf.grad == 0).all()


def test_extra_risk_set():
    """--cox_memory: kept cases count in the denominators of earlier events alone."""
    time = torch.tensor([1.0, 3.0]).double()
    event = torch.tensor([True, True])
    log_hazard = torch.tensor([0.5, -0.5]).double()
    kept = torch.tensor([2.0, 1.0]).double()
    kept_time = torch.tensor([2.0, 9.0]).double()
    loss = cox_loss(log_hazard, time, event, extra=(kept, kept_time))

    # by hand: the first event sees all, the second one the last of the kept
    first = np.log(np.exp([0.5, -0.5, 2.0, 1.0]).sum()) - 0.5
    second = np.log(np.exp([-0.5, 1.0]).sum()) + 0.5
    assert float(loss) == pytest.approx((first + second) / 2, rel=1e-12)


def test_memory_keeps_the_last_and_never_the_same_case_twice():
    cpu = torch.device("cpu")
    memory = CoxMemory(3, cpu)
    times = np.arange(10.0)
    assert memory.others(np.array([1]), times) is None

    # the case of the first step comes again, with a value that counts nowhere
    memory.add(np.array([1, 2]), torch.tensor([0.1, 0.2]))
    memory.add(np.array([3, 1]), torch.tensor([0.3, torch.nan]))
    assert memory.rows.tolist() == [2, 3, 1]
    log_hazard, years = memory.others(np.array([3, 7]), times)
    assert years.tolist() == [2, 1]
    assert log_hazard.tolist() == pytest.approx([0.2, -math.inf])

    # from a checkpoint
    again = CoxMemory(3, cpu)
    again.restore(memory.state())
    assert again.rows.tolist() == memory.rows.tolist()


class Place(NamedTuple):
    """How a step is spread: over processes, and over micro-batches of each."""

    ranks: int
    parts: int


ALONE = Place(1, 1)
# those of fp32, then those of fp64 alone
PLACES = [Place(2, 1), Place(3, 1), Place(4, 1)]
MORE_PLACES = [Place(1, 3), Place(2, 2), Place(3, 3)]


def gradients_at(zygote, place: Place, kind: str, path: Path) -> dict[str, tuple]:
    """{case of cox_ranks.py: (loss, gradient of all weights)}. kind: the weights' dtype."""
    script = ROOT / "tests/old/cox_ranks.py"
    done = zygote(script, path, place.parts, kind, ranks=place.ranks)
    assert done.code == 0, done.stderr[-2000:]
    return torch.load(path)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        pytest.param("float64", 1e-12, marks=pytest.mark.soak),
        ("float32", 5e-6),
    ],
)
def test_gradient_at_1_to_4_processes(zygote, tmp_path, kind, most):
    """Of every weight; also where one rank has no events, or none has, with fewer cases than ranks, in micro-batches.

    In fp32 the convolutions themselves round differently for another batch size.
    """
    alone = gradients_at(zygote, ALONE, kind, tmp_path / "alone.pt")
    assert len(alone) == 12
    places = PLACES + (MORE_PLACES if kind == "float64" else [])
    for place in places:
        spread = gradients_at(zygote, place, kind, tmp_path / "spread.pt")
        assert spread.keys() == alone.keys()
        for name, (loss, gradient) in spread.items():
            expected_loss, expected = alone[name]
            assert gradient.isfinite().all()
            assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6, abs=1e-12), (place, name)
            away = float((gradient - expected).norm())
            assert away <= most * float(expected.norm()), (place, name, away)

    # without an event there is no gradient, nor of a single case, whose risk set is itself
    gradients = {name: gradient for name, (_, gradient) in alone.items()}
    assert gradients["12 mixed"].norm() > 1e-3
    assert not gradients["12 none"].any()
    assert not gradients["1 mixed"].any()
