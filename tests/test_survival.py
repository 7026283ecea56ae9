"""Tests of train_survival_distributed.py and tasks/survival: loss and scores against other libraries, data, runs."""

import json
import math
import re
from pathlib import Path
from unittest.mock import Mock

import nibabel
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from test_volumes import write_series
from torch import nn
from torch.utils.data import default_collate

import distributed_utils as du
import train_survival_distributed as script
from tasks.survival import data, report, sample_data
from tasks.survival.data import (
    Cohort,
    MultiGPUSurvivalDataset,
    Volumes,
    choose_fold,
    encode_columns,
    fit_columns,
    read_cohort,
)
from utils.cli import InputError
from utils.sampler import permute
from utils.stats import RESAMPLES, resample_cases

YEARS = [1.0, 2.0, 3.0, 4.0, 5.0]
CPU = torch.device("cpu")
RANKS = du.Ranks(0, 1, CPU, "python", None)
FLAGS = (
    "--resnet resnet10 --base_channels 8 --image_size 12 12 8 --hu_window 0 400 --batch_size 6 --epochs 2 --lr 1e-3 "
    "--log_every 1 --num_workers 0 --eval_years 1 3 --inner_folds 0 --cache_dir="
).split()


def parse(*words) -> script.Namespace:
    return script.parse_args([*FLAGS, *map(str, words)])


def go(*words) -> None:
    """Run the script in this process."""
    assert script.run_task(parse(*words), RANKS) == 0


def load_json(path: Path) -> dict:
    return json.loads(path.read_text())


def read_log(folder: Path) -> list[dict]:
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def fold(time, event) -> MultiGPUSurvivalDataset:
    """A data set with outcomes only."""
    rows = np.arange(len(time))
    names = rows.astype(str)
    cohort = Cohort(names, names, names, names, np.asarray(time), np.asarray(event), pd.DataFrame(index=rows))
    return MultiGPUSurvivalDataset(cohort, rows=rows)


def make_cases(seed: int, count: int, latest: float) -> tuple:
    """(log-hazards, times, events) with tied times, which depend on the log-hazards and are censored by `latest`."""
    noise = np.random.default_rng(seed)
    log_hazard = noise.normal(size=count).round(2)
    time = noise.exponential(6 * np.exp(-0.7 * log_hazard))
    censored = np.minimum(noise.uniform(0.5, 12, count), latest)
    return log_hazard, np.ceil(np.minimum(time, censored) * 4) / 4, time < censored


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Synthetic data of 40 patients."""
    folder = tmp_path_factory.mktemp("data") / "survival"
    sample_data.write_sample_data(folder, 40, event_rate=0.5, matrix=16, seed=0)
    return folder


@pytest.fixture
def table(made) -> pd.DataFrame:
    """Their table as text, with absolute paths."""
    table = pd.read_csv(made / "dataset.csv", dtype=str, keep_default_na=False)
    return table.assign(**{name: str(made) + "/" + table[name] for name in ("NIFTI Path", "heart_mask")})


@pytest.fixture
def read(tmp_path):
    """read(table, ...) returns the table's cohort."""

    def write(table: pd.DataFrame, **options) -> Cohort:
        table.to_csv(tmp_path / "d.csv", index=False)
        return read_cohort(tmp_path / "d.csv", **options)

    return write


# --- loss and scores --------------------------------------------------------------------------------------------------


@pytest.fixture
def heart_attacks() -> tuple:
    """(x, times, events) of the Worcester heart attack study, in months with many ties."""
    from sksurv.datasets import load_whas500

    table, outcome = load_whas500()
    x = table[["age", "bmi", "hr", "sysbp"]].to_numpy(float)
    return (x - x.mean(0)) / x.std(0, ddof=1), np.ceil(outcome["lenfol"] / 30), outcome["fstat"].astype(bool)


def frame_of(x: np.ndarray, time: np.ndarray, event: np.ndarray) -> pd.DataFrame:
    """The data frame that lifelines expects."""
    return pd.DataFrame(x).add_prefix("x").assign(time=time, event=event)


def test_cox_fit_and_loss_match_lifelines(heart_attacks):
    from lifelines import CoxPHFitter

    x, time, event = heart_attacks
    frame = frame_of(x, time, event)
    for penalty in (50.0, 0.0):
        # lifelines multiplies the penalty by the number of cases
        theirs = CoxPHFitter(penalizer=penalty / len(x)).fit(frame, "time", "event", fit_options={"precision": 1e-12})
        beta = script.fit_cox(x, time, event, penalty)
        assert np.allclose(beta, theirs.params_, atol=1e-5)
    assert script.log_likelihood(x @ beta, time, event) == pytest.approx(theirs.log_likelihood_, rel=1e-9)
    x, time, event, beta = map(torch.from_numpy, (x, time, event, beta))
    # large log-hazards, and a batch without events
    for size, events in ((1e4, event), (1, torch.zeros_like(event))):
        log_hazard = (size * (x @ beta)).float().requires_grad_()
        script.cox_loss(log_hazard, time, events).backward()
        assert log_hazard.grad.isfinite().all()
        assert log_hazard.grad.any() == events.any()


def test_ridge_penalty_maximizes_cross_validated_likelihood_of_lifelines(heart_attacks, monkeypatch):
    """The data have one informative column and three columns of noise."""
    from lifelines import CoxPHFitter

    x, time, event = (values[:120] for values in heart_attacks)
    x = np.column_stack([x[:, 0], np.random.default_rng(0).normal(size=(120, 3))])
    monkeypatch.setattr(script, "PENALTIES", [300.0, 30.0, 3.0, 0.3])
    cases = fold(time, event)
    part = data.assign_folds(cases.cohort.case, event, np.ones(120, bool), 5, seed=0)
    frame, likelihoods = frame_of(x, time, event), []
    for penalty in script.PENALTIES:
        total = 0.0
        for left_out in range(1, 6):
            known = frame[part != left_out]
            model = CoxPHFitter(penalizer=penalty / len(known)).fit(known, "time", "event")
            model.penalizer = 0.0
            total += model.score(frame, "log_likelihood") * 120
            total -= model.score(known, "log_likelihood") * len(known)
        likelihoods.append(total)
    beta, penalty, likelihood = script.select_ridge(x, cases, 0)
    assert penalty == script.PENALTIES[int(np.argmax(likelihoods))] not in (300.0, 0.3)
    # lifelines standardizes the columns within each fold before it penalizes them
    assert likelihood == pytest.approx(max(likelihoods), abs=0.05)
    assert beta == pytest.approx(script.fit_cox(x, time, event, penalty))


def test_image_weight_matches_lifelines(heart_attacks):
    """It is shrunk by chi2, and 0 if the image term is noise or has the wrong sign."""
    from lifelines import CoxPHFitter

    x, time, event = heart_attacks
    columns, image = x[:, 1:], 0.3 * x[:, 0]
    cases, linear = fold(time, event), script.fit_cox(columns, time, event, 0.0)
    model = {"beta": linear, "penalty": 0.0}
    found, weight, chi2 = script.estimate_image_weight(columns, image, cases, model).values()
    both = CoxPHFitter().fit(frame_of(np.column_stack([columns, image]), time, event), "time", "event")
    alone = CoxPHFitter().fit(frame_of(columns, time, event), "time", "event")
    assert chi2 == pytest.approx(2 * (both.log_likelihood_ - alone.log_likelihood_), rel=1e-5)
    expected = np.append(alone.params_, 0) + (1 - 1 / chi2) * (both.params_ - np.append(alone.params_, 0))
    assert [*found, weight] == pytest.approx([*expected], abs=1e-5)
    for other in (-image, np.random.default_rng(0).normal(size=len(image)), 0 * image):
        found = script.estimate_image_weight(columns, other, cases, model)
        assert found["image_weight"] == 0
        assert found["linear"] == linear.tolist()


def test_forest_ranks_cases_better_than_the_best_column(heart_attacks):
    x, time, event = heart_attacks
    train, val = fold(time[:250], event[:250]), fold(time[250:], event[250:])
    train.columns, val.columns = x[:250], x[250:]
    risk, _ = script.fit_baseline_models({"train": train, "val": val}, {})["forest"]
    c_index, of_age = (report.concordance(values, time[250:], event[250:]) for values in (risk, x[250:, 0]))
    assert c_index > of_age > 0.65


def test_scores_match_scikit_survival():
    from sksurv import metrics as theirs
    from sksurv.linear_model.coxph import BreslowEstimator
    from sksurv.util import Surv

    log_hazard, *outcome = make_cases(0, 150, 7.9)
    known_risk, *known = make_cases(50, 300, 8.0)
    val, train = fold(*outcome), fold(*known)
    pair = [Surv.from_arrays(event, time) for time, event in (known, outcome)]
    # + 900: the exponentials of these log-hazards overflow
    baseline_hazard = report.fit_baseline_hazard(known_risk + 900, train)
    scores = report.score(log_hazard + 900, val, train, YEARS, baseline_hazard)
    c_index = theirs.concordance_index_censored(outcome[1], outcome[0], log_hazard)[0]
    assert scores["c_index"] == pytest.approx(c_index)
    assert report.concordance(log_hazard, *outcome) == pytest.approx(c_index)
    end = min(outcome[0].max(), known[0].max())
    assert scores["c_index_uno"] == pytest.approx(theirs.concordance_index_ipcw(*pair, log_hazard, tau=end)[0])
    auc = theirs.cumulative_dynamic_auc(*pair, log_hazard, YEARS)[0]
    assert [scores[f"auc/{year:g}y"] for year in YEARS] == pytest.approx(auc)
    assert scores["auc"] == pytest.approx(auc.mean())

    curves = BreslowEstimator().fit(known_risk, known[1], known[0]).get_survival_function(log_hazard)
    expected = np.array([curve(YEARS) for curve in curves])
    assert np.isnan(report.survival_curves(baseline_hazard, log_hazard, [8.5])).all()
    brier = theirs.brier_score(*pair, expected, YEARS)[1]
    assert [scores[f"brier/{year:g}y"] for year in YEARS] == pytest.approx(brier)
    grid = np.union1d(np.linspace(outcome[0].min(), 5, 100), YEARS)
    ibs = theirs.integrated_brier_score(*pair, np.array([curve(grid) for curve in curves]), grid)
    assert scores["ibs"] == pytest.approx(ibs, rel=1e-6)
    # horizons beyond the follow-up are left out
    log_hazard, *outcome = make_cases(2, 40, 2.5)
    found = report.score(log_hazard, fold(*outcome), fold(*outcome), YEARS)
    assert set(found) == {"c_index", "c_index_uno", "auc", "auc/1y", "auc/2y"}


def test_intervals_and_paired_test_match_resampling_by_hand():
    """Two rows of each patient are drawn together, and both models are scored on the same draws."""
    risk, time, event = (np.repeat(values, 2) for values in make_cases(3, 40, 8.0))
    other = risk + np.random.default_rng(0).normal(0, 0.7, 80)
    val = fold(time, event)
    val.cohort.case = np.repeat(np.arange(40), 2)
    models = {"network": (risk, None), "other": (other, None)}
    found = report.print_table("", models, report.cases_of(val, None), {"val": val, "train": val}, [])
    draws = resample_cases(val.cohort.case, np.zeros(80)).astype(int)
    one, two = (
        np.array([report.concordance(*(np.repeat(v, draw) for v in (values, time, event))) for draw in draws])
        for values in (risk, other)
    )
    for name, values in (("val/c_index", one), ("val/rival/other/c_index", two), ("val/rival/other/above", one - two)):
        low, high = np.quantile(values, [0.025, 0.975])
        assert (found[f"{name}_low"], found[f"{name}_high"]) == pytest.approx((low, high), abs=1e-6)
    p = 2 * min((one <= two).mean(), (one >= two).mean()) + 1 / RESAMPLES
    assert found["val/rival/other/p"] == pytest.approx(p, abs=0.002)


# --- model ------------------------------------------------------------------------------------------------------------


def test_deterministic_max_pooling_matches_torch():
    x = torch.randn(2, 3, 7, 8, 9, requires_grad=True)
    pooled = script.MaxPool3d()(x), nn.MaxPool3d(3, 2, 1)(x)
    assert torch.equal(*pooled)
    assert torch.allclose(*(torch.autograd.grad((values**2).sum(), x)[0] for values in pooled))


def test_log_hazards_are_distinct_in_bf16():
    """The head is outside autocast: bf16 has too few values to rank the cases."""
    model = script.build_model(parse(), "bf16", CPU)
    with torch.no_grad():
        model.head.weight.normal_()
        risks = model({"image": torch.rand(96, 1, 12, 12, 8)})
    assert len(risks.unique()) == 96


def test_medicalnet_weights_are_loaded_and_trained(tmp_path):
    """Also through type A shortcuts."""
    from monai.networks.nets import resnet10

    net = resnet10(
        spatial_dims=3, n_input_channels=1, feed_forward=False, bias_downsample=False, shortcut_type="A",
        widen_factor=8 / 64, conv1_t_stride=2,
    )  # fmt: skip
    saved = {f"module.{name}": value for name, value in net.state_dict().items()}
    path = tmp_path / "resnet_10.pth"
    torch.save({"state_dict": saved}, path)
    args = parse("--init", "pretrained", "--pretrained_path", path, "--stem_stride", 2, "--norm", "batch")
    model = script.build_model(args, "no", CPU)
    assert all(torch.equal(value, saved[f"module.{name}"]) for name, value in model.backbone.state_dict().items())
    nn.init.ones_(model.head.weight)
    model({"image": torch.rand(2, 1, 12, 12, 8)}).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.backbone.parameters() if parameter.dim() > 1)
    args.base_channels = 16
    with pytest.raises(InputError, match="weights of another net .*check --resnet"):
        script.build_model(args, "no", CPU)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory) -> Path:
    """A run with clinical columns."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    go("--csv_path", made / "dataset.csv", "--clinical_columns", "Age", "Sex", "--output_dir", folder)
    return folder


@pytest.fixture(scope="module")
def tuned(made, trained, tmp_path_factory) -> Path:
    """A run that starts from these weights, with a smart cache and a backbone that is frozen in the first epoch."""
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    words = ["--init", "pretrained", "--pretrained_path", trained / "model.safetensors", "--freeze_epochs", 1]
    words += ["--lr", 0.5, "--epochs", 4, "--save_every", 1, "--keep_last", 99, "--use_smart_cache"]
    words += ["--rival_run", trained]
    go("--csv_path", made / "dataset.csv", *words, "--output_dir", folder)
    return folder


def test_step_equals_one_pass_over_the_global_batch(trained, made, tmp_path, monkeypatch):
    """With three micro-batches, loss and gradient are those of the whole batch's risk sets."""
    begin = Mock(wraps=script.begin_training)
    monkeypatch.setattr(script, "begin_training", begin)
    words = ["--init", "pretrained", "--pretrained_path", trained / "model.safetensors", "--no-augment"]
    words += ["--effective_batch_size", 6, "--batch_size", 2, "--max_steps", 1]
    args = parse("--csv_path", made / "dataset.csv", *words, "--output_dir", tmp_path)
    script.run_task(args, RANKS)
    _, after_step, _, sets, *_ = begin.call_args.args
    batch = default_collate([sets["train"][row] for row in permute(np.arange(6), 32, 0, 0).tolist()])
    model = script.build_model(args, "no", CPU, columns=6)
    model.linear.copy_(after_step.linear)
    loss = script.cox_loss(model(batch), batch["time"], batch["event"])
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
    logged = read_log(tmp_path)[0]
    assert logged["train/events"] == batch["event"].sum()
    assert (logged["train/loss"], logged["train/grad_norm"]) == pytest.approx((loss.item(), norm.item()), rel=1e-4)


def test_events_are_those_of_the_cases_in_the_smart_cache(tuned, made):
    smart = MultiGPUSurvivalDataset(made / "dataset.csv", use_smart_cache=True, volumes=Volumes((12, 12, 8)))
    expected = []
    for epoch in range(4):
        events = smart.cohort.event[smart.rows_of(permute(np.arange(16), 16, 0, epoch), epoch)]
        expected += [events[:6].sum(), events[6:12].sum(), events[12:].sum()]
    assert [line["train/events"] for line in read_log(tuned) if "train/events" in line] == expected


def test_learning_rate_and_weight_decay_follow_the_guide(trained):
    rates = [line["train/lr"] for line in read_log(trained) if "train/lr" in line]
    assert rates == pytest.approx([1e-7 + (1e-3 - 1e-7) * (1 + math.cos(math.pi * k / 12)) / 2 for k in range(12)])
    assert torch.load(trained / "best.pt", weights_only=True)["optimizer"]["param_groups"][0]["weight_decay"] == 1e-5


def test_freeze_epochs_trains_only_the_head(trained, tuned):
    start, frozen, thawed = (
        torch.load(path, weights_only=True)["model"]
        for path in (trained / "best.pt", tuned / "step_00000003.pt", tuned / "step_00000004.pt")
    )
    names = [name for name in frozen if name.startswith("backbone.")]
    assert all(torch.equal(start[name], frozen[name]) for name in names)
    assert not any(torch.equal(frozen[name], thawed[name]) for name in names)
    assert not torch.equal(start["head.weight"], frozen["head.weight"])


def test_other_run_is_compared_on_the_same_cases(trained, tuned, made, tmp_path):
    summary, other = load_json(trained / "summary.json"), load_json(tuned / "summary.json")
    assert other["val/rival/other_run/c_index"] == pytest.approx(summary["val/c_index"])
    words = ["--rival_run", trained, "--fold_column", "Fold_2", "--output_dir", tmp_path]
    with pytest.raises(InputError, match="other validation cases than this run; give both the same fold"):
        go("--csv_path", made / "dataset.csv", *words)


def test_untrained_model_is_the_best_cox_model(made, table, tmp_path):
    """Without an epoch, or without images, the network equals the Cox model of the best likelihood."""
    columns = ["--clinical_columns", "Age", "Sex"]
    mask = ["--mask_column", "heart_mask", "--mask_mode", "channel"]
    go("--csv_path", made / "dataset.csv", *columns, *mask, "--epochs", 0, "--output_dir", tmp_path / "run")
    # --image none opens no volume
    table.assign(**{"NIFTI Path": "none.nii.gz"}).to_csv(tmp_path / "d.csv", index=False)
    go("--csv_path", tmp_path / "d.csv", *columns, "--image", "none", "--output_dir", tmp_path / "none")
    for folder, count in (("run", 3), ("none", 1)):
        summary = load_json(tmp_path / folder / "summary.json")
        models = torch.load(tmp_path / folder / "best.pt", weights_only=True)["cox_models"]
        assert len(models) == count
        best = max(models, key=lambda name: models[name]["likelihood"])
        for name in ("c_index", "c_index_uno", "auc", "ibs"):
            assert summary[f"val/{name}"] == pytest.approx(summary[f"val/rival/{best}/{name}"], abs=1e-9)
    go("--predict", tmp_path / "d.csv", "--output_dir", tmp_path / "none")
    assert len(pd.read_csv(tmp_path / "none/predictions_d.csv")["S(3y)"]) == 40


def test_image_weight_comes_from_unseen_cases(made, tmp_path, monkeypatch):
    """The inner folds' networks predict it; --eval_only and --predict use the same weight."""
    estimate = Mock(wraps=script.estimate_image_weight)
    monkeypatch.setattr(script, "estimate_image_weight", estimate)
    words = ["--csv_path", made / "dataset.csv", "--output_dir", tmp_path, "--clinical_columns", "Age"]
    go(*words, "--inner_folds", 2, "--lr", 0.02)
    x, image, cases, cox_model = estimate.call_args.args
    batch = default_collate([cases[number] for number in range(32)])
    for folder in tmp_path.glob("inner_*_of_2"):
        inner = torch.load(max(folder.glob("step_*.pt")))
        left_out = ~np.isin(cases.cohort.case[cases.rows], list(inner["trained_cases"]))
        network = script.build_model(parse(), "no", CPU, x.shape[1], inner).eval()
        network.linear.zero_()
        with torch.no_grad():
            found = network(batch).numpy()[left_out]
        assert len(found) == 16
        assert image[left_out] == pytest.approx(found - found.mean(), abs=1e-6)
    linear, weight, chi2 = estimate(x, image, cases, cox_model).values()
    summary, baseline = load_json(tmp_path / "summary.json"), load_json(tmp_path / "baseline.json")
    assert (summary["val/image_weight"], summary["val/image_chi2"]) == (weight, chi2)
    assert (baseline["image_weight"], baseline["linear"]) == (weight, linear)
    assert load_file(tmp_path / "model.safetensors")["image_weight"] == weight
    go(*words, "--eval_only")
    again = load_json(tmp_path / "eval_val.json")
    assert {name: summary[name] for name in again} == pytest.approx(again, abs=1e-9)
    go("--predict", made / "dataset.csv", "--output_dir", tmp_path)
    own, written = (pd.read_csv(tmp_path / f"predictions{end}.csv").set_index("case") for end in ("", "_dataset"))
    assert np.allclose(written["log_hazard"][own.index], own["log_hazard"], atol=1e-5)
    # percentiles come from the unseen predictions of the training cases
    risk = x @ linear + weight * image
    assert np.median(risk - risk.mean()) == pytest.approx(baseline["percentiles"][50], abs=1e-4)


def test_validation_fold_does_not_leak_into_the_model(table, tmp_path):
    """Predictions of one validation case stay the same if all others get new outcomes, columns and volumes."""
    words = ["--clinical_columns", "Age", "NumLesion", "--inner_folds", 2, "--epochs", 1, "--folds", 2, "--val_fold", 1]
    words.append("--output_dir")
    table.to_csv(tmp_path / "c.csv", index=False)
    go("--csv_path", tmp_path / "c.csv", *words, tmp_path / "a")
    first = pd.read_csv(tmp_path / "a/predictions.csv").set_index("case")
    changed = first.index[first["fold"] == "val"][1:].astype(str)
    rows = table["case_num"].isin(changed)
    table.loc[rows, "time"] = np.arange(300, 300 + rows.sum()).astype(str)
    table.loc[rows, ["Age", "NumLesion"]] = ["99", "77"]
    table.loc[rows, "NIFTI Path"] = table["NIFTI Path"][rows].iloc[0]
    table.to_csv(tmp_path / "d.csv", index=False)
    go("--csv_path", tmp_path / "d.csv", *words, tmp_path / "b")
    second = pd.read_csv(tmp_path / "b/predictions.csv").set_index("case")
    assert first.drop(changed.astype(int)).equals(second.drop(changed.astype(int)))
    assert not first["log_hazard"].equals(second["log_hazard"])
    assert load_json(tmp_path / "a/baseline.json") == load_json(tmp_path / "b/baseline.json")
    saved = [torch.load(max((tmp_path / name).glob("step_*.pt"))) for name in "ab"]
    assert all(saved[0][name] == saved[1][name] for name in ("columns", "cox_models"))


def test_prediction_of_a_table(trained, table, tmp_path, capsys):
    """Rows with outcomes get the scores of the run itself; rows without outcomes get risks."""
    val = table[table["Fold_1"] == "val"]
    val.to_csv(tmp_path / "other.csv", index=False)
    val.drop(columns=["time", "event"]).to_csv(tmp_path / "new.csv", index=False)
    own = pd.read_csv(trained / "predictions.csv")
    # log-hazards are relative to the mean training patient
    assert own.query("fold == 'train'")["log_hazard"].mean() == pytest.approx(0, abs=1e-9)
    own = own.query("fold == 'val'")
    for name in ("new", "other"):
        go("--predict", tmp_path / f"{name}.csv", "--output_dir", trained)
        written = pd.read_csv(trained / f"predictions_{name}.csv")
        for column in ("log_hazard", "S(3y)", "percentile"):
            assert np.allclose(written[column], own[column])
    output = capsys.readouterr().out
    c_index = load_json(trained / "summary.json")["val/c_index"]
    assert f"8 with outcomes, {(val['event'] == '1').sum()} events: C {c_index:.3f} (" in output
    survived = report.kaplan_meier(*own[["time_years", "event"]].to_numpy().T, 3)
    assert re.search(rf"^3 y +{1 - own['S(3y)'].mean():.3f} +{1 - survived:.3f}$", output, re.M)
    assert "warning: voxel sizes vary by more than 10 %" in output


def test_survival_curves_belong_to_the_weights_used(tuned, made, capsys):
    """Only the weights that the run ended with, best.pt, have S(t)."""
    best = torch.load(tuned / "best.pt", weights_only=True)["step"]
    assert load_json(tuned / "baseline.json")["step"] == best
    other = next(path for path in sorted(tuned.glob("step_*.pt")) if int(path.stem[5:]) != best)
    go("--predict", made / "dataset.csv", "--output_dir", tuned, "--resume_from", other)
    output = capsys.readouterr().out
    assert "warning: 32 of these cases have names that were trained on" in output
    assert "no S(t)" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--eval_only --fold_column Fold_2", "the model was trained on .* more of its cases"),
        ("--resume_from auto --fold_column Fold_2", "a run with training cases 32, digest .* give the same again"),
        ("--folds 2", "holds a single run; choose another folder for --folds"),
    ],
)
def test_run_folder_of_other_data(trained, made, flags, message):
    with pytest.raises(InputError, match=message):
        go("--csv_path", made / "dataset.csv", "--output_dir", trained, *flags.split())


def test_cross_validation(made, tmp_path, capsys):
    """2 folds, repeated twice: last epochs, pooled scores, and the mean prediction of all models."""
    from sksurv.metrics import concordance_index_censored

    words = ["--csv_path", made / "dataset.csv", "--output_dir", tmp_path / "cv", "--clinical_columns", "Age"]
    go(*words, "--lr", 0.02, "--folds", 2, "--repeats", 2, "--stratum_column", "Sex")
    summary = load_json(tmp_path / "cv/summary.json")
    folders = [tmp_path / f"cv/repeat_{repeat}/fold_{fold}" for repeat in (1, 2) for fold in (1, 2)]
    scores = [load_json(folder / "summary.json")["val/c_index"] for folder in folders]
    logs = [[line["val/c_index"] for line in read_log(folder) if "val/c_index" in line] for folder in folders]
    assert scores == pytest.approx([log[-1] for log in logs])
    assert summary["val/c_index"] == pytest.approx(np.mean(scores))
    cases = pd.read_csv(tmp_path / "cv/cross_validation.csv")
    # the mean of both repeats is scored over the same pairs within folds
    cases["mean"] = cases.groupby("case")["log_hazard"].transform("mean")
    cases["sex"] = pd.read_csv(made / "dataset.csv").set_index("case_num")["Sex"][cases["case"]].to_numpy()

    def pooled(risk: str, groups: list[str]) -> float:
        found = [
            concordance_index_censored(part["event"], part["time"], part[risk]) for _, part in cases.groupby(groups)
        ]
        _, concordant, discordant, tied, _ = np.sum(found, 0)
        return (concordant + tied / 2) / (concordant + discordant + tied)

    for key, risk in (("val", "log_hazard"), ("val/rival/mean_of_repeats", "mean"), ("val/rival/clinical", "clinical")):
        assert summary[f"{key}/c_index_pooled"] == pytest.approx(pooled(risk, ["repeat", "fold"]))
        within = pooled(risk, ["repeat", "fold", "sex"])
        assert summary[f"{key}/c_index_pooled_within_strata"] == pytest.approx(within)

    go("--predict", made / "dataset.csv", "--output_dir", tmp_path / "cv")
    assert "40 cases, 4 models" in capsys.readouterr().out
    own = sum(pd.read_csv(folder / "predictions.csv").set_index("case").drop(columns="fold") for folder in folders)
    written = pd.read_csv(tmp_path / "cv/predictions_dataset.csv").set_index("case")
    for name in ("log_hazard", "of_columns", "of_image", "percentile", "S(1y)"):
        assert np.allclose(4 * written[name], own[name][written.index], atol=1e-5)


def test_flags(capsys):
    args = parse("--amp", "--pin_memory", "--backend", "nccl", "--max_grad_norm", "2", "--output", "b")
    assert (args.grad_clip, args.output_dir) == (2, "b")
    bad = {
        "--image_size 4 64 64": "argument --image_size: must be a whole number of at least 8",
        "--init pretrained": "--init pretrained and --pretrained_path go together",
        "--image none": "--image none: needs --clinical_columns",
        "--folds 3 --resume_from x.pt": "--folds: each has checkpoints of its own",
    }
    for words, message in bad.items():
        with pytest.raises(SystemExit, match="2"):
            parse(*words.split())
        assert message in capsys.readouterr().err
    with pytest.raises(InputError, match="3D convolutions compute wrong gradients on a CPU"):
        go("--mixed_precision", "bf16")


# --- the table, folds and columns -------------------------------------------------------------------------------------


def test_column_names_time_units_and_missing_outcomes(read, table):
    days = read(table)
    assert np.allclose(days.time, table["time"].astype(float) / 365.25, rtol=1e-12)
    other = table.assign(time=table["time"].astype(float) / 30, event="1", dead=table["event"])
    other = other.rename(columns={"case_num": "MRN", "NIFTI Path": "Image_Path", "time": "Months"})
    months = read(other, time_unit="months", time_column="months", event_column="Dead")
    assert np.allclose(months.time / days.time, 365.25 / 12 / 30)
    assert months.event.tolist() == (table["event"] == "1").tolist()
    assert (months.case.tolist(), months.path) == (table["case_num"].tolist(), table["NIFTI Path"].tolist())
    assert np.isnan(read(table.assign(time="NA", event=""), outcome=False).time).all()


@pytest.mark.parametrize(
    ("rows", "column", "value", "message"),
    [
        ([2], "NIFTI Path", "../../x.nii", "d.csv:4: .*lies outside .*; give the folder that holds it with --data_dir"),
        (range(40), "Fold_1", "test", "0 rows in the training fold.*check --fold_column"),
        ([0, 2], "case_num", "1", "case 1 is in the training and the validation fold"),
        ([0, 2], "NIFTI Path", "scans/a", "volume .*scans/a is in the training and the validation fold"),
    ],
)
def test_unusable_table(read, table, rows, column, value, message):
    table.loc[0, "Fold_1"], table.loc[2, "Fold_1"] = "train", "val"
    table.loc[rows, column] = value
    with pytest.raises(InputError, match=message):
        choose_fold(read(table), "Fold_1", "train", "val", 0, 0)


def test_folds_are_disjoint_complete_and_balanced_by_events(read, table):
    """The two rows of each case stay together; rows that the fold column holds out are in no fold."""
    table["case_num"] = [f"{row // 2:02}" for row in range(40)]
    table["event"] = ["01"[row // 2 % 3 != 2] for row in range(40)]
    table["Fold_1"] = ["Test"] * 8 + ["train"] * 32
    cohort = read(table)
    seen, sizes, events = [], [], []
    for number in "123":
        train, val = choose_fold(cohort, "Fold_1", "train", number, 3, seed=5)
        assert not set(cohort.case[train]) & set(cohort.case[val])
        assert sorted([*train, *val]) == list(range(8, 40))
        seen += val.tolist()
        sizes.append(len(set(cohort.case[val])))
        events.append(len(set(cohort.case[val][cohort.event[val]])))
    assert sorted(seen) == list(range(8, 40))
    assert sorted(sizes) == [5, 5, 6]
    assert sorted(events) == [3, 4, 4]


def test_labels_of_a_fold_column(read, table):
    train, val = choose_fold(read(table), "Fold_2", "train", None, 0, 0)
    assert val.tolist() == np.flatnonzero(table["Fold_2"] == "val").tolist()
    assert len(train) == 40 - len(val)
    # numbers, as spreadsheets write them; held-out rows are not used for training
    table["fold"] = ["1.0", "2.0", "3.0", "test", ""] * 8
    train, val = choose_fold(read(table), "fold", "train", "1", 0, 0)
    assert val.tolist() == list(range(0, 40, 5))
    assert set(table["fold"][train]) == {"2.0", "3.0"}
    with pytest.raises(InputError, match=r"d.csv:1: no column 'Fold_9' \(did you mean"):
        choose_fold(read(table), "Fold_9", "train", "val", 0, 0)


def test_encoding_of_columns_matches_values_by_hand(read, table):
    table = table.iloc[:6].assign(years=["50", "60", "", "70", "1000", "x"], stage=["I", "II", "NA", "I", "III", "II"])
    cohort = read(table.iloc[:5])
    columns = fit_columns(cohort, ["Years", "stage"], np.arange(4))
    sd = math.sqrt(200 / 3)
    expected = [
        [-10 / sd, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 1, 0, 0, 0, 1],
        [10 / sd, 0, 1, 0, 0, 0],
        [940 / sd, 0, 0, 0, 1, 0],
    ]
    assert np.allclose(encode_columns(cohort, columns), expected, atol=1e-6)
    with pytest.raises(InputError, match=r"d.csv:7: years 'x' is no number, as it is in training"):
        encode_columns(read(table), columns)


def test_columns_with_too_many_levels_or_wrong_cells(read, table, capsys):
    table = table.assign(age_de=[f"{40 + n} J." for n in range(40)], stage=["I", "II", "III", "IV", "X"] * 8)
    table.loc[[3, 7], "Age"] = ["x", "y"]
    cohort = read(table)
    with pytest.raises(InputError, match=r"d.csv:5, .*d.csv:9, --clinical_columns, ...: 3 cells or columns cannot"):
        fit_columns(cohort, ["Age", "age_de", "stage"], np.arange(40))
    output = capsys.readouterr().out
    assert "d.csv:9: age 'y' is no number, as most are" in output
    assert "age_de has 40 levels in 40 rows: an id, or numbers? ('40 J.'); correct it, join levels" in output


def test_all_unusable_rows_are_listed(read, table, capsys):
    table.loc[2, "event"] = "dead"
    table.loc[5, "time"] = ""
    table.loc[6, "NIFTI Path"] = ""
    with pytest.raises(InputError, match=r"d.csv:4, .*d.csv:7, .*d.csv:8, ...: 3 rows cannot be used, all listed"):
        read(table)
    output = capsys.readouterr().out
    assert re.search("d.csv:7: time '' days, .*must be 0 to 120 years, .* see --time_unit", output)
    assert "d.csv:8: no path in column 'nifti path'; fill it in" in output


# --- volumes ----------------------------------------------------------------------------------------------------------


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-900, 900, shape).astype(np.int16)


def save_volume(path: Path, values: np.ndarray, affine: np.ndarray | None = None) -> str:
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine), path)
    return str(path)


def test_volume_settings(tmp_path):
    values = noise(8, 10, 12)
    path = save_volume(tmp_path / "a.nii.gz", values, np.diag([2.0, 1, 3, 1]))
    window = Volumes(image_size=(8, 10, 12), hu_window=(0, 100)).load(path)
    assert np.allclose(window[0], np.clip(values / 100, 0, 1), atol=1e-3)
    # voxel centres span 9 mm along y, in steps of 2 mm, and 33 mm along z, in steps of 1 mm
    volume, _ = Volumes(spacing=(2.0, 2.0, 1.0))._open(path, "bilinear")
    assert tuple(volume.shape) == (1, 8, 6, 34)
    # means where an axis shrinks, linear interpolation where it grows
    volume = torch.arange(4.0).expand(1, 2, 2, 4)
    assert data.resize(volume, (2, 2, 2))[0, 0, 0].tolist() == [0.5, 2.5]
    assert data.resize(volume, (2, 2, 8))[0, 0, 0].tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]


def test_disk_cache_notices_changes(tmp_path, monkeypatch):
    """Cached volumes are not read again, unless a slice of a DICOM series or a setting changes."""
    path, hu = str(tmp_path / "scan"), noise(8, 8, 8)
    write_series(tmp_path / "scan", hu, (0.5, 0.5, 2.5))
    volumes = Volumes(image_size=(8, 8, 8), cache_dir=str(tmp_path / "cache"))
    first = volumes.load(path)
    assert np.allclose(first[0], (hu + 1000) / 2000, atol=1e-3)
    with monkeypatch.context() as unread:
        unread.delattr(Volumes, "_open")
        assert torch.equal(volumes.load(path), first)
        assert volumes.load(path, measurements=True)[8:11].tolist() == pytest.approx([0.5, 0.5, 2.5])
    write_series(tmp_path / "scan", -hu, (0.5, 0.5, 2.5))
    assert np.allclose(volumes.load(path)[0], (1000 - hu) / 2000, atol=1e-3)
    volumes.hu_window = (0, 9)
    assert volumes.load(path).max() == 1


def test_mask_crops_or_becomes_a_channel(tmp_path):
    values = noise(20, 20, 20)
    mask = np.zeros((20, 20, 20), np.uint8)
    mask[8:11, 9:12, 4:6] = 1
    affine = np.diag([1.0, 2, 1, 1])
    path, name = save_volume(tmp_path / "a.nii.gz", values, affine), str(tmp_path / "turned.nii.gz")
    # the mask's file has other axes
    turn = nibabel.orientations.ornt_transform(*map(nibabel.orientations.axcodes2ornt, ("RAS", "PIR")))
    nibabel.save(nibabel.Nifti1Image(mask, affine).as_reoriented(turn), name)
    # 3 mm are 3, 2 and 3 voxels; the box is cut off at the edge of the volume
    cropped = Volumes(image_size=(9, 7, 8), mask_mode="crop", mask_margin=3).load(path, name)
    assert np.allclose(cropped[0], np.clip((values[5:14, 7:14, 1:9] + 1000) / 2000, 0, 1), atol=1e-3)
    channels = Volumes(image_size=(20, 20, 20), mask_mode="channel").load(path, name)
    assert np.array_equal(channels[1], mask)
    # an empty or missing mask crops nothing
    volumes = Volumes(image_size=(20, 20, 20), mask_mode="crop")
    assert torch.equal(volumes.load(path, save_volume(tmp_path / "e.nii.gz", 0 * mask, affine)), channels[:1])
    assert torch.equal(volumes.load(path), channels[:1])
    with pytest.raises(ValueError, match="its mask lies elsewhere"):
        volumes.load(path, save_volume(tmp_path / "f.nii.gz", mask, np.diag([-1.0, 2, 1, 1])))


def test_measurements_of_a_volume(tmp_path):
    """A ball with two calcified parts (26 neighbours), on voxels with a different size along each axis."""
    affine = np.diag([0.5, 1.0, 0.8, 1.0])
    points = np.moveaxis(np.indices((60, 30, 40)), 0, -1) @ affine[:3, :3]
    ball = np.linalg.norm(points - 14, axis=-1) < 10
    values = np.zeros(ball.shape, np.int16)
    values[28, 14, 17] = values[29, 15, 18] = values[20, 10, 20] = 131
    values[24, 10, 20] = 130
    path = save_volume(tmp_path / "a.nii.gz", values, affine)
    mask = save_volume(tmp_path / "m.nii.gz", ball.astype(np.uint8), affine)
    volumes = Volumes(image_size=(8, 8, 8))
    found = volumes.load(path, mask, measurements=True)
    assert found[:3].tolist() == pytest.approx([math.log1p(3 * 0.4), math.log1p(2), values.mean()])
    # the tolerances are those of voxels
    volume, surface, diameter = found[3:6].exp()
    assert volume == pytest.approx(4 / 3 * math.pi * 10**3, rel=0.02)
    assert surface == pytest.approx(4 * math.pi * 10**2, rel=0.1)
    assert diameter == pytest.approx(20, rel=0.07)
    assert found[6:8].tolist() == pytest.approx([values[ball].mean(), values[ball].std()])
    assert volumes.load(path, measurements=True)[3:8].isnan().all()


def test_unusable_volumes_are_named_with_their_rows(read, table, tmp_path, capsys):
    """Constant and truncated files are listed; empty masks are counted."""
    table.loc[7, "NIFTI Path"] = save_volume(tmp_path / "const.nii.gz", np.zeros((4, 4, 6)))
    truncated = tmp_path / "truncated.nii.gz"
    truncated.write_bytes(Path(table["NIFTI Path"][9]).read_bytes()[:200])
    table.loc[9, "NIFTI Path"] = str(truncated)
    table.loc[0, "heart_mask"] = ""
    cohort = read(table, mask_column="heart_mask")
    flags = parse("--image_size", 8, 8, 8, "--mask_column", "heart_mask")
    with pytest.raises(InputError, match=r"d.csv:9, .*d.csv:11, ...: 2 volumes cannot be used, all listed"):
        script.read_inputs(cohort, [], np.arange(40), flags)
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].endswith("const.nii.gz cannot be used (holds one value everywhere); replace it or remove the row")
    assert re.search(rf"d.csv:11: {truncated}: cannot be used \(.+\); correct or replace it$", listed[1])
    dataset = MultiGPUSurvivalDataset(cohort, rows=np.arange(40), volumes=Volumes((8, 8, 8), mask_mode="crop"))
    # in a batch, the case has an error and no image
    assert "d.csv:11: " in dataset[9]["error"]
    assert dataset[9]["image"].isnan().all()
    dataset.rows = np.arange(3)
    dataset.measure_volumes(threads=2)
    assert "1 of 3 cases have no mask, or an empty one, and are taken whole" in capsys.readouterr().out


def test_augmentation_varies_with_epoch_and_case():
    """4 quarter turns, each with or without a mirror image and an upside-down one."""
    image = torch.arange(4 * 4 * 3.0).reshape(1, 1, 4, 4, 3)
    of_epochs = [data.augment(image, [5], seed=1, epoch=epoch)[0] for epoch in range(99)]
    of_cases = data.augment(image.repeat(200, 1, 1, 1, 1), range(200), seed=1, epoch=2)
    for seen in (of_epochs, of_cases):
        assert len({str(turned.tolist()) for turned in seen}) == 16
    # no quarter turns if X differs from Y
    assert data.augment(image[..., :2, :], [5], 1, 2).shape == (1, 1, 4, 2, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_smart_cache_loads_each_case_equally_often(made, workers, monkeypatch):
    """The guide's own loop, with 10 of 32 cases in memory, of which 4 are replaced after each epoch."""
    volumes = Volumes(image_size=(8, 8, 8))
    options = {"use_smart_cache": True, "cache_rate": 0.32, "replace_rate": 0.4, "seed": 3}
    smart = MultiGPUSurvivalDataset(made / "dataset.csv", volumes=volumes, **options)
    assert (len(smart), smart.replaced_per_epoch) == (10, 4)
    loader = du.create_distributed_dataloader(smart, batch_size=4, num_workers=workers)
    load, loaded, cached = Volumes.load, [], []
    monkeypatch.setattr(Volumes, "load", lambda self, *words: loaded.append(words) or load(self, *words))
    for epoch in range(8):
        loader.batch_sampler.set_position(epoch)
        batches = list(loader)
        rows = [row for batch in batches for row in batch["index"].tolist()]
        images = torch.cat([batch["image"] for batch in batches])
        assert all(torch.equal(i, load(volumes, smart.cohort.path[r])) for r, i in zip(rows, images, strict=True))
        cached += rows
    # the window moves by 4 of 32 cases, so in 8 epochs every case is cached for 2 or 3 epochs
    assert len(cached) == 8 * 10
    assert {cached.count(row) for row in smart.rows} == {2, 3}
    # a volume is loaded only when it enters the cache
    assert workers or len(loaded) == 10 + 7 * 4


def test_sample_data_has_its_risk_in_the_shape_of_the_lesions(tmp_path, capsys):
    """Number, volume and Agatston score predict little."""
    sample_data.write_sample_data(tmp_path, 60, event_rate=0.4, matrix=16, seed=0)
    line = capsys.readouterr().out.partition("patients of")[2]
    true_risk, age, *of_lesions = map(float, re.findall(r"0\.\d+", line))
    assert true_risk > 0.8 > 0.75 > age > 0.6
    assert len(of_lesions) == 3
    assert max(of_lesions) < 0.7
    assert read_cohort(tmp_path / "dataset.csv").event.mean() == pytest.approx(0.4, abs=0.02)
