"""The Cox loss and its gradient: against other programs, at the edges, and over processes."""

import math

import numpy as np
import pytest
import torch
from conftest import ROOT

import train_survival_distributed as tsd


def brute_force(log_hazard, time, event, ties: str) -> float:
    """The textbook formula, one event after the other, in double precision."""
    total, hazard = 0.0, np.exp(log_hazard)
    for t in np.unique(time[event]):
        tied, at_risk = event & (time == t), time >= t
        for k in range(tied.sum()):
            left = hazard[at_risk].sum() - (k / tied.sum() * hazard[tied].sum() if ties == "efron" else 0)
            total += math.log(left)
        total -= log_hazard[tied].sum()
    return total / max(1, event.sum())


@pytest.fixture(scope="module")
def whas500():
    """(features (500, 4) scaled, time in days with ties, event) of the Worcester heart attack study."""
    from sksurv.datasets import load_whas500

    table, outcome = load_whas500()
    x = table[["age", "bmi", "hr", "sysbp"]].to_numpy(float)
    time = np.ceil(outcome["lenfol"] / 30) * 30  # more ties
    return (x - x.mean(0)) / x.std(0), time, outcome["fstat"].astype(bool)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_against_scikit_survival_and_lifelines(whas500, ties):
    """Where the other program's fit ends, our gradient vanishes; the likelihood there is lifelines'."""
    from lifelines import CoxPHFitter
    from pandas import DataFrame
    from sksurv.linear_model import CoxPHSurvivalAnalysis
    from sksurv.util import Surv

    x, time, event = whas500
    fitted = CoxPHSurvivalAnalysis(ties=ties, tol=1e-12, n_iter=200).fit(x, Surv.from_arrays(event, time))
    beta = torch.tensor(fitted.coef_, requires_grad=True)
    loss = tsd.cox_loss(torch.from_numpy(x) @ beta, torch.from_numpy(time), torch.from_numpy(event), ties)
    loss.backward()
    assert beta.grad.abs().max() < 1e-6
    if ties == "efron":
        frame = DataFrame(x, columns=list("abcd")).assign(time=time, event=event)
        other = CoxPHFitter().fit(frame, "time", "event", fit_options={"precision": 1e-12})
        assert np.allclose(other.params_.to_numpy(), fitted.coef_, atol=1e-6)
        assert -float(loss.detach()) * event.sum() == pytest.approx(other.log_likelihood_, rel=1e-9)
    assert float(loss.detach()) == pytest.approx(brute_force(x @ fitted.coef_, time, event, ties), rel=1e-12)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_gradient_in_single_precision(whas500, ties):
    """Away from the optimum, in fp32, against finite differences of the textbook formula in fp64."""
    _, time, event = whas500
    time, event = time[:60], event[:60]
    log_hazard = np.random.default_rng(0).normal(size=60)
    leaf = torch.tensor(log_hazard, dtype=torch.float32, requires_grad=True)
    loss = tsd.cox_loss(leaf, torch.from_numpy(time), torch.from_numpy(event), ties)
    loss.backward()
    assert loss.dtype == torch.float32
    start = log_hazard.astype(np.float32).astype(float)
    assert float(loss.detach()) == pytest.approx(brute_force(start, time, event, ties), rel=1e-6)
    for i in range(60):
        step = np.zeros(60)
        step[i] = 1e-5
        slope = (brute_force(start + step, time, event, ties) - brute_force(start - step, time, event, ties)) / 2e-5
        assert float(leaf.grad[i]) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_huge_log_hazards(ties, scale):
    """Finite up to 1e4 in fp32, and right: at such distances the sum is its largest term."""
    noise = np.random.default_rng(1)
    log_hazard = noise.uniform(-scale, scale, 40).astype(np.float32)
    time, event = noise.integers(1, 15, 40) / 2.0, noise.random(40) < 0.5
    leaf = torch.tensor(log_hazard, requires_grad=True)
    loss = tsd.cox_loss(leaf, torch.from_numpy(time), torch.from_numpy(event), ties)
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad.isfinite().all()
    exact = tsd.cox_loss(leaf.detach().double(), torch.from_numpy(time), torch.from_numpy(event), ties)
    assert float(loss.detach()) == pytest.approx(float(exact), rel=1e-5)


def test_half_precision_is_raised():
    time, event = torch.tensor([2.0, 1.0]), torch.tensor([True, True])
    assert tsd.cox_loss(torch.zeros(2, dtype=torch.bfloat16), time, event).dtype == torch.float32


def test_no_event_and_a_single_case():
    """A connected zero, not a constant: the backward pass of DDP must reach every weight."""
    for event in ([False, False, False], [True]):
        leaf = torch.ones(len(event), requires_grad=True)
        loss = tsd.cox_loss(leaf, torch.arange(len(event)).double(), torch.tensor(event))
        loss.backward()
        assert float(loss.detach()) == 0
        assert (leaf.grad == 0).all()


def test_extra_risk_set():
    """--cox_memory: kept cases count in the denominators of earlier events alone."""
    time, event = torch.tensor([1.0, 3.0]).double(), torch.tensor([True, True])
    values = torch.tensor([0.5, -0.5]).double()
    kept = torch.tensor([2.0, 1.0]).double(), torch.tensor([2.0, 9.0]).double()
    loss = tsd.cox_loss(values, time, event, extra=kept)
    first = np.log(np.exp([0.5, -0.5, 2.0, 1.0]).sum()) - 0.5
    second = np.log(np.exp([-0.5, 1.0]).sum()) + 0.5
    assert float(loss) == pytest.approx((first + second) / 2, rel=1e-12)


def test_memory_keeps_the_last_and_never_the_same_case_twice():
    memory = tsd.CoxMemory(3, torch.device("cpu"))
    times = np.arange(10.0)
    assert memory.others(np.array([1]), times) is None
    memory.add(np.array([1, 2]), torch.tensor([0.1, 0.2]))
    memory.add(np.array([3, 1]), torch.tensor([0.3, torch.nan]))
    assert memory.rows.tolist() == [2, 3, 1]
    values, when = memory.others(np.array([3, 7]), times)
    assert when.tolist() == [2, 1]
    assert values.tolist() == pytest.approx([0.2, -math.inf])
    again = tsd.CoxMemory(3, torch.device("cpu"))
    again.restore(memory.state())
    assert again.rows.tolist() == memory.rows.tolist()


PLACES = ((2, 1), (3, 1), (4, 1), (1, 3), (2, 2), (3, 3))  # processes, micro-batches


@pytest.mark.parametrize(("kind", "most"), [pytest.param("float64", 1e-12, marks=pytest.mark.soak), ("float32", 5e-6)])
def test_gradient_at_1_to_4_processes(zygote, tmp_path, kind, most):
    """Of every weight; also where one rank has no events, or none has, with fewer cases than ranks, in micro-batches.

    In fp32 the convolutions themselves round differently for another batch size.
    """
    found = {}
    for ranks, parts in ((1, 1), *(PLACES if kind == "float64" else PLACES[:3])):
        path = tmp_path / f"{ranks}_{parts}.pt"
        done = zygote(ROOT / "tests" / "cox_ranks.py", path, parts, kind, ranks=ranks)
        assert done.code == 0, done.stderr[-2000:]
        found[ranks, parts] = torch.load(path)
    alone = found.pop((1, 1))
    assert len(alone) == 12
    for place, values in found.items():
        for name, (loss, gradient) in values.items():
            assert gradient.isfinite().all()
            assert float(loss) == pytest.approx(float(alone[name][0]), rel=1e-6, abs=1e-12), (place, name)
            away = float((gradient - alone[name][1]).norm())
            assert away <= most * float(alone[name][1].norm()), (place, name, away)
    assert alone["12 mixed"][1].norm() > 1e-3
    assert not alone["12 none"][1].any()
    assert not alone["1 mixed"][1].any()  # a single case: its risk set is itself
