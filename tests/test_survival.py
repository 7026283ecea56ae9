"""train_survival_distributed.py: loss, scores and model against independent references; runs as users start them."""

import csv
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import distributed_utils as du
import train_survival_distributed as script
from tasks.survival import report, sample_data
from tasks.survival.data import Cohort, MultiGPUSurvivalDataset
from utils import loop
from utils.cli import InputError

ROOT = Path(__file__).resolve().parents[1]
YEARS = [1.0, 2.0, 3.0, 4.0, 5.0]
SETTINGS = (
    "--resnet resnet10 --base_channels 8 --image_size 12 12 8 --hu_window 0 400 --batch_size 6 --epochs 2 --lr 1e-3 "
    "--log_every 1 --num_workers 0 --eval_years 1 3"
).split()


def parse(*words) -> script.Namespace:
    return script.parse_args([*SETTINGS, *map(str, words)])


def fold(time, event, **columns) -> MultiGPUSurvivalDataset:
    """A data set that is outcomes alone."""
    names = [f"t.csv:{row}" for row in range(len(time))]
    blank = [""] * len(names)
    cohort = Cohort(names, np.array(names), blank, blank, np.asarray(time), np.asarray(event), pd.DataFrame(columns))
    return MultiGPUSurvivalDataset(cohort, rows=np.arange(len(names)))


def make_cases(seed: int, count: int, latest: float, ties: bool = False) -> tuple:
    """(log-hazards, times, events): times depend on the log-hazards, and are censored at random and at the latest."""
    noise = np.random.default_rng(seed)
    log_hazard = noise.normal(size=count).round(2)
    time = noise.exponential(6 * np.exp(-0.7 * log_hazard))
    censored = np.minimum(noise.uniform(0.5, 12, count), latest)
    event, time = time < censored, np.minimum(time, censored)
    return log_hazard, np.ceil(time * 4) / 4 if ties else time, event


# --- loss -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whas500() -> tuple:
    """(features (500, 4) scaled, months with many ties, events) of the Worcester heart attack study."""
    from sksurv.datasets import load_whas500

    table, outcome = load_whas500()
    x = table[["age", "bmi", "hr", "sysbp"]].to_numpy(float)
    return (x - x.mean(0)) / x.std(0, ddof=1), np.ceil(outcome["lenfol"] / 30), outcome["fstat"].astype(bool)


@pytest.mark.parametrize("penalty", [0.0, 50.0])
def test_cox_models_are_those_of_lifelines(whas500, penalty):
    from lifelines import CoxPHFitter

    x, time, event = whas500
    frame = pd.DataFrame(x, columns=list("abcd")).assign(time=time, event=event)
    # lifelines weighs the penalty by the cases
    other = CoxPHFitter(penalizer=penalty / len(x)).fit(frame, "time", "event", fit_options={"precision": 1e-12})
    beta = script.fit_cox(x, time, event, penalty)
    assert np.allclose(beta, other.params_, atol=1e-5)
    if not penalty:
        loss = script.cox_loss(torch.from_numpy(x) @ beta, torch.from_numpy(time), torch.from_numpy(event))
        assert -float(loss) * event.sum() == pytest.approx(other.log_likelihood_, rel=1e-9)


def test_the_gradient_of_the_loss(whas500):
    """In single precision against numbers in double; log-hazards of any size stay finite."""
    x, time, event = (torch.from_numpy(values[:60]) for values in whas500)
    log_hazard = (x @ torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda risk: script.cox_loss(risk, time, event), log_hazard)
    (expected,) = torch.autograd.grad(script.cox_loss(log_hazard, time, event), log_hazard)
    single = log_hazard.detach().float().requires_grad_()
    (gradient,) = torch.autograd.grad(script.cox_loss(single, time, event), single)
    assert torch.allclose(gradient.double(), expected, atol=1e-6)
    huge = (1000 * single.detach()).requires_grad_()
    script.cox_loss(huge, time, event).backward()
    assert huge.grad.isfinite().all()
    none = torch.ones(3, requires_grad=True)
    script.cox_loss(none, time[:3], torch.zeros(3, dtype=torch.bool)).backward()
    assert none.grad.tolist() == [0, 0, 0]


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_scores_are_those_of_scikit_survival(ties):
    from sksurv import metrics as theirs
    from sksurv.linear_model.coxph import BreslowEstimator
    from sksurv.util import Surv

    log_hazard, *outcome = make_cases(0, 150, 7.9, ties)
    known_risk, *known = make_cases(50, 300, 8.0, ties)
    val, train = fold(*outcome), fold(*known)
    pair = [Surv.from_arrays(event, time) for time, event in (known, outcome)]
    # also with log-hazards whose exponentials overflow
    baseline = report.fit_baseline(known_risk + 900, train)
    scores = report.score(log_hazard + 900, val, train, YEARS, baseline)
    assert scores["val/c_index"] == pytest.approx(
        theirs.concordance_index_censored(outcome[1], outcome[0], log_hazard)[0]
    )
    assert scores["val/c_index"] == pytest.approx(report.concordance(log_hazard, *outcome))
    end = min(outcome[0].max(), known[0].max())
    assert scores["val/c_index_uno"] == pytest.approx(theirs.concordance_index_ipcw(*pair, log_hazard, tau=end)[0])
    auc = theirs.cumulative_dynamic_auc(*pair, log_hazard, YEARS)[0]
    assert [scores[f"val/auc/{year:g}y"] for year in YEARS] == pytest.approx(auc)
    assert scores["val/auc"] == pytest.approx(auc.mean())

    curves = BreslowEstimator().fit(known_risk, known[1], known[0]).get_survival_function(log_hazard)
    at = np.array(YEARS)
    expected = np.array([curve(at) for curve in curves])
    assert np.allclose(report.survival(baseline, log_hazard + 900, at), expected, atol=1e-9)
    brier = theirs.brier_score(*pair, expected, at)[1]
    assert [scores[f"val/brier/{year:g}y"] for year in YEARS] == pytest.approx(brier)
    grid = np.union1d(np.linspace(outcome[0].min(), 5, 100), YEARS)
    ibs = theirs.integrated_brier_score(*pair, np.array([curve(grid) for curve in curves]), grid)
    assert scores["val/ibs"] == pytest.approx(ibs, rel=1e-6)
    assert np.isnan(report.survival(baseline, log_hazard, [8.5])).all()


def test_kaplan_meier_is_that_of_lifelines():
    from lifelines import KaplanMeierFitter

    _, time, event = make_cases(1, 200, 8.0, ties=True)
    at = np.linspace(0, 7.9, 60)
    expected = KaplanMeierFitter().fit(time, event).survival_function_at_times(at)
    assert np.allclose(report.kaplan_meier(time, event, at), expected, atol=1e-12)


def test_what_is_undefined_is_left_out():
    log_hazard, time, event = make_cases(2, 40, 2.5)
    scores = report.score(log_hazard, fold(time, event), fold(time, event), YEARS)
    assert set(scores) == {"val/c_index", "val/c_index_uno", "val/auc", "val/auc/1y", "val/auc/2y"}


def test_resampling_is_that_of_drawing_cases():
    """The matrix form against drawing the cases and counting anew, with the same draws."""
    cases = make_cases(3, 60, 8.0, ties=True)
    counts = np.random.default_rng(0).multinomial(60, np.full(60, 1 / 60), report.RESAMPLES)
    expected = [report.concordance(*(np.repeat(values, count) for values in cases)) for count in counts]
    assert np.allclose(report.resampled_c(*cases, np.arange(60)), expected, atol=1e-6)
    # three rows of each patient tell no more than one
    thrice = [np.repeat(values, 3) for values in (*cases, np.arange(60))]
    one, three = (np.ptp(report.interval(report.resampled_c(*rows))) for rows in ([*cases, np.arange(60)], thrice))
    assert three == pytest.approx(one, rel=0.05)


def test_the_paired_test_and_the_intervals_are_calibrated(capsys):
    """200 pairs of equally good models: seldom "better"; intervals hold the true C, which 200,000 cases give."""
    from torchsurv.metrics.cindex import ConcordanceIndex

    better, theirs, covered = 0, 0, 0
    log_hazard, time, event = make_cases(9, 4000, 8.0)
    noise = np.random.default_rng(0)
    truth = report.concordance(log_hazard + noise.normal(0, 0.7, 4000), time, event)
    for seed in range(200):
        log_hazard, time, event = make_cases(100 + seed, 150, 8.0)
        one, two = (log_hazard + noise.normal(0, 0.7, 150) for _ in range(2))
        val = fold(time, event)
        metrics = report.print_table("", {"network": (one, None), "other": (two, None)}, val, val, [])
        better += metrics["val/rival/other/p"] < 0.05 and metrics["val/c_index"] > metrics["val/rival/other/c_index"]
        covered += metrics["val/c_index_low"] <= truth <= metrics["val/c_index_high"]
        indices = [ConcordanceIndex() for _ in range(2)]
        for index, risk in zip(indices, (one, two), strict=True):
            index(torch.from_numpy(risk), torch.from_numpy(event), torch.from_numpy(time))
        theirs += float(indices[0].compare(indices[1])) < 0.025
    assert better <= 14
    # torchsurv's own test, whose p is of one side, is the more cautious one
    assert theirs <= better
    assert 184 <= covered <= 196


def test_a_better_model_is_found_better(capsys):
    """In the same resamples, though the two intervals overlap."""
    log_hazard, time, event = make_cases(5, 200, 8.0)
    worse = log_hazard + np.random.default_rng(0).normal(0, 0.5, 200)
    val = fold(time, event)
    metrics = report.print_table("", {"network": (log_hazard, None), "other": (worse, None)}, val, val, [])
    assert metrics["val/c_index_low"] < metrics["val/rival/other/c_index_high"]
    assert metrics["val/rival/other/above_low"] > 0
    assert metrics["val/rival/other/p"] < 0.05


def test_censoring_weights_are_the_training_folds(monkeypatch):
    """Whatever the validation fold holds, they are computed of the training fold's outcomes alone."""
    seen, estimate = [], report.kaplan_meier

    def noted(time, event, at, censoring=False):
        if censoring:
            seen.append((time.tolist(), event.tolist()))
        return estimate(time, event, at, censoring)

    monkeypatch.setattr(report, "kaplan_meier", noted)
    train = fold(*make_cases(7, 100, 8.0)[1:])
    for seed in (6, 8):
        risk, time, event = make_cases(seed, 80, 8.0)
        report.score(risk, fold(time, event), train, YEARS, report.fit_baseline(make_cases(7, 100, 8.0)[0], train))
    known = report.outcome(train)
    assert len(seen) >= 8
    assert all(outcome == (known[0].tolist(), known[1].tolist()) for outcome in seen)


# --- model ------------------------------------------------------------------------------------------------------------


def build(*words, weights=None):
    torch.manual_seed(0)
    return script.build_model(parse("--csv_path", "x", *words), "no", torch.device("cpu"), 0, weights)


def test_group_norm_is_everywhere_and_in_the_precision_of_its_input():
    model = build()
    kinds = [type(module) for module in model.modules()]
    assert script.GroupNorm in kinds
    assert nn.BatchNorm3d not in kinds
    x = torch.randn(2, 8, 4, 4, 4, dtype=torch.bfloat16)
    norm = script.GroupNorm(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        low = norm(x)
    assert low.dtype == torch.bfloat16
    assert torch.allclose(low.float(), norm(x.float()), atol=0.05)


@pytest.mark.parametrize("shape", [(7, 8, 9), (1, 2, 3)])
def test_the_deterministic_maximum_is_torchs(shape):
    x = torch.randn(2, 3, *shape, requires_grad=True)
    ours, theirs = script.MaxPool3d()(x), nn.MaxPool3d(3, 2, 1)(x)
    assert torch.equal(ours, theirs)
    weights = torch.randn_like(ours)
    gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (ours, theirs)]
    assert torch.allclose(*gradients)


def test_as_many_risks_as_cases_in_bf16(monkeypatch):
    """The head stands outside autocast; inside, some hundred values would have to do for all."""
    model = build()
    model.precision = "bf16"
    with torch.no_grad():
        model.head.weight.mul_(100)
        risks = model({"image": torch.rand(96, 1, 12, 12, 8)})
    assert risks.dtype == torch.float32
    assert len(risks.unique()) == 96


def test_bf16_on_a_cpu_is_refused(made):
    with pytest.raises(InputError, match="3D convolutions compute wrong gradients on a CPU"):
        go("--csv_path", made / "dataset.csv", "--mixed_precision", "bf16")


def medicalnet(path: Path, shortcut: str, wrap) -> None:
    """Weights by the names and shapes of MedicalNet's files."""
    from monai.networks.nets import resnet10

    net = resnet10(
        spatial_dims=3, n_input_channels=1, feed_forward=False, bias_downsample=False, shortcut_type=shortcut,
        widen_factor=8 / 64, conv1_t_stride=2,
    )  # fmt: skip
    torch.save(wrap({f"module.{name}": value for name, value in net.state_dict().items()}), path)


@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_medicalnet_weights(tmp_path, shortcut):
    path = tmp_path / "resnet_10.pth"
    medicalnet(path, shortcut, lambda state: {"state_dict": state})
    words = ["--init", "pretrained", "--pretrained_path", path]
    model = build(*words, "--norm", "batch", "--stem_stride", "2")
    saved = torch.load(path, weights_only=True)["state_dict"]
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, saved[f"module.{name}"])
    model({"image": torch.rand(2, 1, 12, 12, 8)}).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.backbone.parameters() if parameter.dim() > 1)
    for wrong in ([], ["--norm", "batch"], ["--stem_stride", "2"]):
        with pytest.raises(InputError, match="belong to --norm batch --stem_stride 2; give both"):
            build(*words, *wrong)
    with pytest.raises(InputError, match="weights of another net .*check --resnet"):
        build(*words, "--norm", "batch", "--stem_stride", "2", "--base_channels", "16")


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Sample data of 40 patients."""
    folder = tmp_path_factory.mktemp("data") / "survival"
    sample_data.write_sample_data(folder, 40, event_rate=0.5, matrix=16, seed=0)
    return folder


def go(*words, code: int = 0) -> None:
    """The script in this process."""
    args = parse("--cache_dir", "", *words)
    assert script.run_task(args, du.Ranks(0, 1, torch.device("cpu"), "python", None)) == code


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory) -> Path:
    """A run with clinical columns."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    go("--csv_path", made / "dataset.csv", "--clinical_columns", "Age", "Sex", "--output_dir", folder)
    return folder


def test_the_table_holds_the_rivals(trained, made, tmp_path, capsys):
    """Each with its interval and the paired test; another run becomes a row; summary.json has the numbers."""
    summary = json.loads((trained / "summary.json").read_text())
    rivals = ("kaplan_meier", "clinical", "image_numbers", "clinical_and_image_numbers")
    for name in rivals:
        for key in ("c_index", "c_index_low", "c_index_high", "above_low", "above_high", "p", "ibs"):
            assert f"val/rival/{name}/{key}" in summary
    assert summary["val/rival/kaplan_meier/c_index"] == 0.5
    go("--csv_path", made / "dataset.csv", "--output_dir", tmp_path / "run", "--rival_run", trained)
    shown = capsys.readouterr().out
    rows = re.findall(r"^(network|other run|kaplan meier|image numbers|true risk) +0\.\d{3} \(", shown, re.M)
    assert rows == ["network", "other run", "kaplan meier", "image numbers", "true risk"]
    other = json.loads((tmp_path / "run/summary.json").read_text())
    assert other["val/rival/other_run/c_index"] == pytest.approx(summary["val/c_index"])
    with pytest.raises(InputError, match="other validation cases than this run; give both the same fold"):
        go(
            "--csv_path", made / "dataset.csv", "--output_dir", tmp_path / "x", "--rival_run", trained,
            "--fold_column", "Fold_2",
        )  # fmt: skip
    assert (trained / "figures/val_survival.png").stat().st_size > 5000
    with open(trained / "predictions.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 40
    assert {"case", "time_years", "event", "log_hazard", "S(1y)", "S(3y)", "fold"} == set(lines[0])


def test_columns_alone_begin_where_their_cox_model_ends(made, tmp_path):
    """--image none opens no volume, and without a step it is the rival of the same columns."""
    table = pd.read_csv(made / "dataset.csv").assign(**{"NIFTI Path": "none.nii.gz"})
    table.to_csv(tmp_path / "d.csv", index=False)
    words = ["--csv_path", tmp_path / "d.csv", "--image", "none", "--clinical_columns", "Age", "Sex"]
    go(*words, "--output_dir", tmp_path / "run", "--lr", "1e-12", "--eta_min", "0", "--epochs", "1")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["val/c_index"] == pytest.approx(summary["val/rival/clinical/c_index"])
    assert summary["val/ibs"] == pytest.approx(summary["val/rival/clinical/ibs"], abs=1e-6)
    assert "val/rival/image_numbers/c_index" not in summary


def test_another_hospital(trained, made, tmp_path, capsys):
    """Rows with outcomes are scored as the run's own table was; rows without get risks all the same."""
    table = pd.read_csv(made / "dataset.csv")
    table["NIFTI Path"] = str(made) + "/" + table["NIFTI Path"]
    val = table[table["Fold_1"] == "val"]
    val.to_csv(tmp_path / "other.csv", index=False)
    go("--predict", tmp_path / "other.csv", "--output_dir", trained)
    shown = capsys.readouterr().out
    summary = json.loads((trained / "summary.json").read_text())
    assert f"{len(val)} with outcomes, {val['event'].sum()} events: C " in shown
    assert "predicted risk" in shown
    assert "observed" in shown
    written = pd.read_csv(trained / "predictions_other.csv")
    own = pd.read_csv(trained / "predictions.csv").query("fold == 'val'")
    assert np.allclose(
        written["log_hazard"] - written["log_hazard"].mean(), own["log_hazard"] - own["log_hazard"].mean()
    )
    assert np.allclose(written["S(3y)"], own["S(3y)"])
    c_index = float(re.search(r"events: C (0\.\d+) \(", shown)[1])
    assert c_index == pytest.approx(summary["val/c_index"], abs=5e-4)
    new = val.drop(columns=["time", "event"])
    new.to_csv(tmp_path / "new.csv", index=False)
    go("--predict", tmp_path / "new.csv", "--output_dir", trained)
    assert "with outcomes" not in capsys.readouterr().out
    assert np.allclose(pd.read_csv(trained / "predictions_new.csv")["S(3y)"], own["S(3y)"])
    new.drop(columns="Sex").to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(InputError, match="no column 'sex'; the model needs it"):
        go("--predict", tmp_path / "new.csv", "--output_dir", trained)


def test_eval_only_scores_a_fold_and_refuses_trained_cases(trained, made, capsys):
    before = json.loads((trained / "summary.json").read_text())
    go("--csv_path", made / "dataset.csv", "--eval_only", "--output_dir", trained)
    after = json.loads((trained / "eval_val.json").read_text())
    assert all(before[name] == pytest.approx(value, abs=1e-9) for name, value in after.items())
    with pytest.raises(InputError, match="the model was trained on .* more of its cases"):
        go("--csv_path", made / "dataset.csv", "--eval_only", "--output_dir", trained, "--fold_column", "Fold_2")


def test_the_baseline_is_of_the_weights_that_are_used(made, tmp_path, capsys):
    """best.pt of an earlier step has its S(t); other weights of the run have none, and that is said."""
    folder = tmp_path / "run"
    words = ["--csv_path", made / "dataset.csv", "--output_dir", folder, "--keep_last", "9", "--save_every", "1"]
    go(*words, "--lr", "0.5", "--epochs", "4")
    best = torch.load(folder / "best.pt", weights_only=True)["step"]
    last = torch.load(max(folder.glob("step_*.pt")), weights_only=True)["step"]
    assert best < last
    go("--predict", made / "dataset.csv", "--output_dir", folder)
    written, own = pd.read_csv(folder / "predictions_dataset.csv"), pd.read_csv(folder / "predictions.csv")
    together = written.merge(own, on="case")
    assert np.allclose(together["S(3y)_x"], together["S(3y)_y"])
    shown = capsys.readouterr().out
    trained_on = (own["fold"] == "train").sum()
    assert f"warning: {trained_on} of these cases have names that were trained on" in shown
    go("--predict", made / "dataset.csv", "--output_dir", folder, "--resume_from", "auto")
    assert "no S(t)" in capsys.readouterr().out
    # results of the run stay as they are
    before = (folder / "baseline.json").read_bytes(), (folder / "predictions.csv").read_bytes()
    go(*words[:4], "--eval_only")
    assert before == ((folder / "baseline.json").read_bytes(), (folder / "predictions.csv").read_bytes())
    assert (folder / "eval_predictions.csv").exists()


def test_a_run_does_not_go_on_with_other_cases(trained, made):
    words = ["--csv_path", made / "dataset.csv", "--clinical_columns", "Age", "Sex", "--output_dir", trained]
    with pytest.raises(InputError, match="a run with training cases 32, digest .* give the same again"):
        go(*words, "--resume_from", "auto", "--fold_column", "Fold_2")
    with pytest.raises(InputError, match="holds a single run; choose another folder for --folds"):
        go(*words, "--folds", "2")


def test_cross_validation(made, tmp_path, capsys):
    """2 folds twice, each at its last epoch, no case scored by a model that saw it; an ensemble answers --predict."""
    words = ["--csv_path", made / "dataset.csv", "--output_dir", tmp_path / "cv", "--image", "none"]
    words += ["--clinical_columns", "Age", "NumLesion", "--epochs", "1"]
    go(*words, "--folds", "2", "--repeats", "2")
    summary = json.loads((tmp_path / "cv/summary.json").read_text())
    every = [
        json.loads((tmp_path / f"cv/repeat_{r}/fold_{k}/summary.json").read_text()) for r in (1, 2) for k in (1, 2)
    ]
    scores = [fold["val/c_index"] for fold in every]
    assert summary["val/c_index"] == pytest.approx(np.mean(scores))
    assert summary["val/c_index_sd"] == pytest.approx(np.std(scores, ddof=1))
    cases = pd.read_csv(tmp_path / "cv/cross_validation.csv")
    assert sorted(cases["case"].tolist()) == sorted([*range(1, 41)] * 2)
    table = pd.read_csv(made / "dataset.csv").set_index("case_num")
    pairs = np.zeros(2)
    for r in (1, 2):
        for k in (1, 2):
            own = pd.read_csv(tmp_path / f"cv/repeat_{r}/fold_{k}/predictions.csv").query("fold == 'val'")
            rows = table.loc[own["case"]]
            risk, time, event = own["log_hazard"].to_numpy(), rows["time"].to_numpy(), rows["event"].to_numpy() == 1
            pairs += report.concordant_pairs(risk, time, event)
    assert summary["val/c_index_pooled"] == pytest.approx(pairs[0] / pairs[1])
    capsys.readouterr()
    go("--predict", made / "dataset.csv", "--output_dir", tmp_path / "cv")
    assert "40 cases, 4 models" in capsys.readouterr().out
    # resumed at the fold where it stopped: nothing is trained again
    go(*words, "--folds", "2", "--repeats", "2", "--resume_from", "auto")
    assert json.loads((tmp_path / "cv/summary.json").read_text()) == summary


def test_a_checkpoint_a_minute(made, tmp_path, monkeypatch):
    """Where the clock says that a minute has gone by at each look, every epoch is saved, best or not."""
    clock = itertools.count(0, 61)
    fake = SimpleNamespace(monotonic=lambda: next(clock), time=time.time, perf_counter=time.perf_counter)
    monkeypatch.setattr(loop, "time", fake)
    words = ["--csv_path", made / "dataset.csv", "--lr", "0.5", "--epochs", "4", "--keep_last", "9"]
    go(*words, "--output_dir", tmp_path / "run")
    assert len(list((tmp_path / "run").glob("step_*.pt"))) == 4


def test_a_signal_after_the_last_step_of_a_fold_ends_the_cross_validation(made, tmp_path, monkeypatch):
    finish = script.finish

    def interrupted(model, sets, run, *words):
        run.stop.code = 143
        return finish(model, sets, run, *words)

    monkeypatch.setattr(script, "finish", interrupted)
    words = ["--csv_path", made / "dataset.csv", "--image", "none", "--clinical_columns", "Age", "--epochs", "1"]
    go(*words, "--folds", "2", "--output_dir", tmp_path / "cv", code=143)
    assert (tmp_path / "cv/repeat_1/fold_1/summary.json").exists()
    assert not (tmp_path / "cv/repeat_1/fold_2").exists()
    go(*words, "--output_dir", tmp_path / "run")


def test_a_mask_helps_where_the_signal_lies_in_it(tmp_path):
    """The HU of one box of seven is the risk. Cropping to it beats the whole volume by the paired interval."""
    noise = np.random.default_rng(0)
    rows = []
    for case in range(160):
        hu = noise.normal(0, 20, (24, 24, 24))
        mask = np.zeros((24, 24, 24), np.uint8)
        values = noise.uniform(0, 400, 7)
        for number, value in enumerate(values):
            x, y, z = noise.integers(0, 18, 3)
            box = slice(x, x + 6), slice(y, y + 6), slice(z, z + 6)
            hu[box] = value
            mask[box] = number == 6
        for name, volume in (("ct", hu.astype(np.int16)), ("mask", mask)):
            nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / f"{name}{case}.nii")
        time = noise.exponential(3 * np.exp(-(values[6] - 200) / 60))
        fold = "val" if case % 3 == 0 else "train"
        rows.append((case, f"ct{case}.nii", f"mask{case}.nii", min(time, 5), int(time < 5), fold))
    table = pd.DataFrame(rows, columns=["case", "path", "mask", "time", "event", "Fold_1"])
    table.to_csv(tmp_path / "d.csv", index=False)
    words = ["--csv_path", tmp_path / "d.csv", "--time_unit", "years", "--image_size", "8", "8", "8"]
    words += ["--batch_size", "12", "--epochs", "5", "--lr", "3e-3", "--log_every", "50"]
    go(*words, "--output_dir", tmp_path / "whole")
    go(*words, "--mask_column", "mask", "--mask_margin", "0", "--output_dir", tmp_path / "crop",
       "--rival_run", tmp_path / "whole")  # fmt: skip
    summary = json.loads((tmp_path / "crop/summary.json").read_text())
    assert summary["val/rival/other_run/above_low"] > 0.05


def test_bad_volumes_end_all_ranks_with_one_line(made, tmp_path):
    """By torchrun on 2 ranks, before the first step; nothing is written."""
    table = pd.read_csv(made / "dataset.csv")
    table["NIFTI Path"] = str(made) + "/" + table["NIFTI Path"]
    table.loc[4, "NIFTI Path"] = bad = str(tmp_path / "none.nii.gz")
    table.to_csv(tmp_path / "d.csv", index=False)
    command = [sys.executable, ROOT / "utils/torchrun.py", "--standalone", "--nproc_per_node=2"]
    command += [ROOT / "train_survival_distributed.py", *SETTINGS, "--csv_path", tmp_path / "d.csv", "--cache_dir", ""]
    command += ["--output_dir", tmp_path / "run"]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {tmp_path}/d.csv:6: {bad} cannot be used (")
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--image_size 4 64 64", "argument --image_size: must be a whole number of at least 8"),
        ("--resnet resnet17", "invalid choice: 'resnet17'"),
        ("--base_channels 12", "--base_channels a multiple of 8"),
        ("--hu_window 100 100", "--hu_window LOW < HIGH"),
        ("--eta_min 1", "--eta_min at most --lr"),
        ("--init pretrained", "--init pretrained and --pretrained_path go together"),
        ("--image none", "--image none: needs --clinical_columns"),
        ("--folds 3 --resume_from x.pt", "--folds: each has checkpoints of its own"),
        ("--use_smart_cash", "--use_smart_cache"),
        ("--repeats 3", "--repeats: of all --folds"),
        ("--image none --clinical_columns age --use_smart_cache", "--image none: goes without --use_smart_cache"),
    ],
)
def test_bad_flags(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse("--csv_path", "x.csv", *words.split())
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ")
    assert message in line


def test_the_guides_flags_are_understood():
    args = parse("--csv_path", "d.csv", "--amp", "--pin_memory", "--backend", "nccl", "--max_grad_norm", "2")
    assert args.grad_clip == 2
    assert parse("--csv_path", "d.csv", "--log_dir", "a").output_dir == "a"
    assert parse("--csv_path", "d.csv", "--output", "b").output_dir == "b"
