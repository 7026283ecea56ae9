"""train_survival_distributed.py and tasks/survival: loss and scores against other libraries, the data, whole runs."""

import json
import math
import re
from pathlib import Path

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
from utils.stats import RESAMPLES

YEARS = [1.0, 2.0, 3.0, 4.0, 5.0]
CPU = torch.device("cpu")
FLAGS = (
    "--resnet resnet10 --base_channels 8 --image_size 12 12 8 --hu_window 0 400 --batch_size 6 --epochs 2 --lr 1e-3 "
    "--log_every 1 --num_workers 0 --eval_years 1 3 --inner_folds 0 --cache_dir="
).split()


def parse(*words) -> script.Namespace:
    return script.parse_args([*FLAGS, *map(str, words)])


def go(*words) -> None:
    """The script in this process."""
    assert script.run_task(parse(*words), du.Ranks(0, 1, CPU, "python", None)) == 0


def load_json(path: Path) -> dict:
    return json.loads(path.read_text())


def read_log(folder: Path) -> list[dict]:
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def fold(time, event) -> MultiGPUSurvivalDataset:
    """A data set that is outcomes alone."""
    names = [f"t.csv:{row}" for row in range(len(time))]
    blank = [""] * len(names)
    table = pd.DataFrame(index=range(len(names)))
    cohort = Cohort(names, np.array(names), blank, blank, np.asarray(time), np.asarray(event), table)
    return MultiGPUSurvivalDataset(cohort, rows=np.arange(len(names)))


def make_cases(seed: int, count: int, latest: float, ties: bool = False) -> tuple:
    """(log-hazards, times, events): times depend on the log-hazards, and are censored at random and at the latest."""
    noise = np.random.default_rng(seed)
    log_hazard = noise.normal(size=count).round(2)
    time = noise.exponential(6 * np.exp(-0.7 * log_hazard))
    censored = np.minimum(noise.uniform(0.5, 12, count), latest)
    event, time = time < censored, np.minimum(time, censored)
    return log_hazard, np.ceil(time * 4) / 4 if ties else time, event


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Sample data of 40 patients."""
    folder = tmp_path_factory.mktemp("data") / "survival"
    sample_data.write_sample_data(folder, 40, event_rate=0.5, matrix=16, seed=0)
    return folder


@pytest.fixture
def table(made) -> pd.DataFrame:
    """Their table, as text, with paths that hold anywhere."""
    table = pd.read_csv(made / "dataset.csv", dtype=str, keep_default_na=False)
    return table.assign(**{name: str(made) + "/" + table[name] for name in ("NIFTI Path", "heart_mask")})


@pytest.fixture
def read(tmp_path):
    """read(table, ...): its cohort."""

    def write(table: pd.DataFrame, sep: str = ",", **options) -> Cohort:
        table.to_csv(tmp_path / "d.csv", index=False, sep=sep)
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
    """As lifelines takes it."""
    return pd.DataFrame(x, columns=list("abcdefg")[: x.shape[1]]).assign(time=time, event=event)


def test_cox_models_and_their_loss_are_those_of_lifelines(heart_attacks):
    from lifelines import CoxPHFitter

    x, time, event = heart_attacks
    frame = frame_of(x, time, event)
    for penalty in (50.0, 0.0):
        # lifelines weighs the penalty by the cases
        theirs = CoxPHFitter(penalizer=penalty / len(x)).fit(frame, "time", "event", fit_options={"precision": 1e-12})
        beta = script.fit_cox(x, time, event, penalty)
        assert np.allclose(beta, theirs.params_, atol=1e-5)
    assert script.log_likelihood(x @ beta, time, event) == pytest.approx(theirs.log_likelihood_, rel=1e-9)
    x, time, event, beta = map(torch.from_numpy, (x, time, event, beta))
    # log-hazards of any size, and no event at all
    for size, events in ((1e4, event), (1, torch.zeros_like(event))):
        log_hazard = (size * (x @ beta)).float().requires_grad_()
        script.cox_loss(log_hazard, time, events).backward()
        assert log_hazard.grad.isfinite().all()
        assert log_hazard.grad.any() == events.any()


def test_the_penalty_is_that_of_the_best_likelihood_by_folds(heart_attacks, monkeypatch):
    """Of one informative column and three of noise, by lifelines."""
    from lifelines import CoxPHFitter

    x, time, event = (values[:120] for values in heart_attacks)
    x = np.column_stack([x[:, 0], np.random.default_rng(0).normal(size=(120, 3))])
    monkeypatch.setattr(script, "PENALTIES", [300.0, 30.0, 3.0, 0.3])
    cases = fold(time, event)
    part = data.deal(cases.cohort.case, event, np.ones(120, bool), 5, seed=0)
    likelihoods = []
    for penalty in script.PENALTIES:
        total = 0.0
        for left_out in range(1, 6):
            known = frame_of(x, time, event)[part != left_out]
            model = CoxPHFitter(penalizer=penalty / len(known)).fit(known, "time", "event")
            model.penalizer = 0.0
            total += model.score(frame_of(x, time, event), "log_likelihood") * 120
            total -= model.score(known, "log_likelihood") * len(known)
        likelihoods.append(total)
    beta, penalty, likelihood = script.fit_ridge(x, cases, 0)
    assert penalty == script.PENALTIES[int(np.argmax(likelihoods))] not in (300.0, 0.3)
    # lifelines penalises coefficients of columns whose SD in the fold is 1
    assert likelihood == pytest.approx(max(likelihoods), abs=0.05)
    assert beta == pytest.approx(script.fit_cox(x, time, event, penalty))


def test_the_image_part_weighs_what_lifelines_gives_it(heart_attacks):
    """Shrunk by its chi2; nothing where it is noise, or points the wrong way."""
    from lifelines import CoxPHFitter

    x, time, event = heart_attacks
    columns, image = x[:, 1:], 0.3 * x[:, 0]
    cases, linear = fold(time, event), script.fit_cox(columns, time, event, 0.0)
    found, weight, chi2 = script.weigh_image(columns, image, cases, linear, 0.0)
    both = CoxPHFitter().fit(frame_of(np.column_stack([columns, image]), time, event), "time", "event")
    alone = CoxPHFitter().fit(frame_of(columns, time, event), "time", "event")
    assert chi2 == pytest.approx(2 * (both.log_likelihood_ - alone.log_likelihood_), rel=1e-5)
    expected = np.append(alone.params_, 0) + (1 - 1 / chi2) * (both.params_ - np.append(alone.params_, 0))
    assert [*found, weight] == pytest.approx([*expected], abs=1e-5)
    for other in (-image, np.random.default_rng(0).normal(size=len(image)), 0 * image):
        found, weight, _ = script.weigh_image(columns, other, cases, linear, 0.0)
        assert weight == 0
        assert (found == linear).all()
    # a column that the linear part does not see stays out
    linear = np.append(linear[:2], 0.0)
    assert script.weigh_image(columns, image, cases, linear, 0.0)[0][2] == 0


def test_the_forest_is_as_good_as_a_random_survival_forest(heart_attacks):
    from sksurv.ensemble import RandomSurvivalForest
    from sksurv.util import Surv

    x, time, event = heart_attacks
    sets = {name: fold(time[rows], event[rows]) for name, rows in (("all", slice(250)), ("val", slice(250, None)))}
    sets["all"].columns, sets["val"].columns = x[:250], x[250:]
    forest = RandomSurvivalForest(500, min_samples_leaf=10, max_features="sqrt", random_state=0)
    theirs = forest.fit(x[:250], Surv.from_arrays(event[:250], time[:250])).predict(x[250:])
    ours, _ = script.fit_rivals(sets, {})["forest"]
    scores = [report.concordance(risk, time[250:], event[250:]) for risk in (ours, theirs, x[250:, 0])]
    assert scores[0] == pytest.approx(scores[1], abs=0.02)
    assert scores[0] > 0.65


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
    c_index = theirs.concordance_index_censored(outcome[1], outcome[0], log_hazard)[0]
    assert scores["val/c_index"] == pytest.approx(c_index)
    assert report.concordance(log_hazard, *outcome) == pytest.approx(c_index)
    end = min(outcome[0].max(), known[0].max())
    assert scores["val/c_index_uno"] == pytest.approx(theirs.concordance_index_ipcw(*pair, log_hazard, tau=end)[0])
    auc = theirs.cumulative_dynamic_auc(*pair, log_hazard, YEARS)[0]
    assert [scores[f"val/auc/{year:g}y"] for year in YEARS] == pytest.approx(auc)
    assert scores["val/auc"] == pytest.approx(auc.mean())

    curves = BreslowEstimator().fit(known_risk, known[1], known[0]).get_survival_function(log_hazard)
    expected = np.array([curve(YEARS) for curve in curves])
    assert np.isnan(report.survival(baseline, log_hazard, [8.5])).all()
    brier = theirs.brier_score(*pair, expected, YEARS)[1]
    assert [scores[f"val/brier/{year:g}y"] for year in YEARS] == pytest.approx(brier)
    grid = np.union1d(np.linspace(outcome[0].min(), 5, 100), YEARS)
    ibs = theirs.integrated_brier_score(*pair, np.array([curve(grid) for curve in curves]), grid)
    assert scores["val/ibs"] == pytest.approx(ibs, rel=1e-6)
    # what lies beyond the follow-up is left out
    log_hazard, *outcome = make_cases(2, 40, 2.5)
    found = report.score(log_hazard, fold(*outcome), fold(*outcome), YEARS)
    assert set(found) == {f"val/{name}" for name in ("c_index", "c_index_uno", "auc", "auc/1y", "auc/2y")}


def test_intervals_and_the_paired_test_are_those_of_drawing_patients_again(capsys):
    """Two rows of each patient are drawn together, and both models are scored on the same draws."""
    risk, time, event = (np.repeat(values, 2) for values in make_cases(3, 40, 8.0, ties=True))
    other = risk + np.random.default_rng(0).normal(0, 0.7, 80)
    val = fold(time, event)
    val.cohort.case = np.repeat(np.arange(40), 2)
    models = {"network": (risk, None), "other": (other, None)}
    found = report.print_table("", models, {"val": val, "all": val}, [], None)
    draws = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), RESAMPLES).repeat(2, axis=1)
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


def test_the_deterministic_maximum_is_torchs():
    for shape in ((7, 8, 9), (1, 2, 3)):
        x = torch.randn(2, 3, *shape, requires_grad=True)
        ours, theirs = script.MaxPool3d()(x), nn.MaxPool3d(3, 2, 1)(x)
        assert torch.equal(ours, theirs)
        weights = torch.randn_like(ours)
        assert torch.allclose(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (ours, theirs)))


def test_as_many_risks_as_cases_in_bf16():
    """The head stands outside autocast; inside, some hundred values would have to do for all."""
    model = script.build_model(parse(), "bf16", CPU)
    with torch.no_grad():
        model.head.weight.normal_()
        risks = model({"image": torch.rand(96, 1, 12, 12, 8)})
    assert len(risks.unique()) == 96


@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_medicalnet_weights(tmp_path, shortcut):
    """By the names and shapes of MedicalNet's files; all of them learn."""
    from monai.networks.nets import resnet10

    net = resnet10(
        spatial_dims=3, n_input_channels=1, feed_forward=False, bias_downsample=False, shortcut_type=shortcut,
        widen_factor=8 / 64, conv1_t_stride=2,
    )  # fmt: skip
    saved = {f"module.{name}": value for name, value in net.state_dict().items()}
    path = tmp_path / "resnet_10.pth"
    torch.save({"state_dict": saved}, path)
    words = ["--init", "pretrained", "--pretrained_path", path, "--stem_stride", 2]
    model = script.build_model(parse(*words, "--norm", "batch"), "no", CPU)
    assert all(torch.equal(value, saved[f"module.{name}"]) for name, value in model.backbone.state_dict().items())
    nn.init.ones_(model.head.weight)
    model({"image": torch.rand(2, 1, 12, 12, 8)}).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.backbone.parameters() if parameter.dim() > 1)
    with pytest.raises(InputError, match="weights of another net .*check --resnet"):
        script.build_model(parse(*words, "--norm", "batch", "--base_channels", "16"), "no", CPU)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory) -> Path:
    """A run with clinical columns."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    go("--csv_path", made / "dataset.csv", "--clinical_columns", "Age", "Sex", "--output_dir", folder)
    return folder


@pytest.fixture(scope="module")
def tuned(made, trained, tmp_path_factory) -> Path:
    """A run from its weights by a smart cache; its backbone is frozen in the first epoch."""
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    words = ["--init", "pretrained", "--pretrained_path", trained / "model.safetensors", "--freeze_epochs", 1]
    words += ["--lr", 0.5, "--epochs", 4, "--save_every", 1, "--keep_last", 99, "--use_smart_cache"]
    go("--csv_path", made / "dataset.csv", *words, "--output_dir", folder)
    return folder


def test_a_step_is_one_pass_over_all_its_cases(trained, made, tmp_path):
    """In one micro-batch or in three: the loss of the step's risk sets and its gradient, beside the linear part."""
    start = ["--init", "pretrained", "--pretrained_path", trained / "model.safetensors"]
    cohort = read_cohort(made / "dataset.csv")
    train, val = choose_fold(cohort, "Fold_1", "train", "val", 0, 0)
    cases = script.read_inputs(cohort, [], np.append(train, val), parse(), train).sets({"all": train}, parse())["all"]
    batch = default_collate([cases[row] for row in permute(np.arange(6), 32, 0, 0).tolist()])
    model = script.build_model(parse(*start), "no", CPU, columns=6)
    model.linear.copy_(torch.tensor(script.fit_cox_models(cases, 0, 0)["image_numbers"]["beta"]))
    loss = script.cox_loss(model(batch), batch["time"], batch["event"])
    norm = torch.stack([part.norm() for part in torch.autograd.grad(loss, list(model.parameters()))]).norm()
    for leaf in (6, 2):
        words = [
            "--effective_batch_size",
            6,
            "--batch_size",
            leaf,
            "--no-augment",
            "--max_steps",
            1,
            "--lr",
            0.01,
            *start,
        ]
        go("--csv_path", made / "dataset.csv", *words, "--output_dir", tmp_path / str(leaf))
        logged = read_log(tmp_path / str(leaf))[0]
        assert (logged["train/lr"], logged["train/events"]) == (0.01, batch["event"].sum())
        assert (logged["train/loss"], logged["train/grad_norm"]) == pytest.approx((loss.item(), norm.item()), rel=1e-4)


def test_outcomes_are_those_of_the_cases_in_the_smart_cache(tuned, made):
    smart = MultiGPUSurvivalDataset(made / "dataset.csv", use_smart_cache=True, volumes=Volumes((12, 12, 8)))
    expected = []
    for epoch in range(4):
        events = smart.cohort.event[smart.rows_of(permute(np.arange(16), 16, 0, epoch), epoch)]
        expected += [events[:6].sum(), events[6:12].sum(), events[12:].sum()]
    assert [line["train/events"] for line in read_log(tuned) if "train/events" in line] == expected


def test_learning_rate_and_weight_decay_are_the_guides(trained):
    rates = [line["train/lr"] for line in read_log(trained) if "train/lr" in line]
    assert rates == pytest.approx([1e-7 + (1e-3 - 1e-7) * (1 + math.cos(math.pi * k / 12)) / 2 for k in range(12)])
    assert torch.load(trained / "best.pt", weights_only=True)["optimizer"]["param_groups"][0]["weight_decay"] == 1e-5


def test_only_the_head_learns_at_first(trained, tuned):
    start, frozen, thawed = (
        torch.load(path, weights_only=True)["model"]
        for path in (trained / "best.pt", tuned / "step_00000003.pt", tuned / "step_00000004.pt")
    )
    names = [name for name in frozen if name.startswith("backbone.")]
    assert all(torch.equal(start[name], frozen[name]) for name in names)
    assert not any(torch.equal(frozen[name], thawed[name]) for name in names)
    assert not torch.equal(start["head.weight"], frozen["head.weight"])


def test_the_table_holds_the_rivals(trained, made, table, tmp_path, capsys):
    """Each with its interval and the paired test; another run becomes a row; summary.json has the numbers."""
    summary = load_json(trained / "summary.json")
    for name in ("kaplan_meier", "clinical", "image_numbers", "clinical_and_image_numbers"):
        for key in ("c_index", "c_index_low", "c_index_high", "above_low", "above_high", "p", "ibs"):
            assert f"val/rival/{name}/{key}" in summary
    assert summary["val/rival/kaplan_meier/c_index"] == 0.5
    words = ["--csv_path", made / "dataset.csv", "--rival_run", trained]
    mask = ["--mask_column", "heart_mask", "--mask_mode", "channel"]
    go(*words, *mask, "--epochs", 1, "--output_dir", tmp_path / "run")
    other = load_json(tmp_path / "run/summary.json")
    assert other["val/rival/other_run/c_index"] == pytest.approx(summary["val/c_index"])
    assert f"network {other['val/c_index']:.3f} (" in re.sub(" +", " ", capsys.readouterr().out)
    with pytest.raises(InputError, match="other validation cases than this run; give both the same fold"):
        go(*words, "--output_dir", tmp_path / "x", "--fold_column", "Fold_2")
    # the columns are standardised by the training fold alone
    train = pd.to_numeric(table["Age"][table["Fold_1"] == "train"])
    saved = torch.load(trained / "best.pt", weights_only=True)
    assert saved["columns"][0]["mean"] == pytest.approx(train.mean())
    assert sorted(saved["trained_cases"]) == sorted(table["case_num"][table["Fold_1"] == "train"])


def test_what_is_not_trained_is_the_cox_model(made, table, tmp_path):
    """Without an epoch the network is the Cox model of the best likelihood; --image none opens no volume."""
    columns = ["--clinical_columns", "Age", "Sex"]
    words = ["--csv_path", made / "dataset.csv", "--mask_column", "heart_mask", *columns]
    go(*words, "--epochs", 0, "--output_dir", tmp_path / "run")
    table.assign(**{"NIFTI Path": "none.nii.gz"}).to_csv(tmp_path / "d.csv", index=False)
    go("--csv_path", tmp_path / "d.csv", *columns, "--image", "none", "--output_dir", tmp_path / "none")
    for folder in ("run", "none"):
        summary = load_json(tmp_path / folder / "summary.json")
        models = torch.load(tmp_path / folder / "best.pt", weights_only=True)["cox_models"]
        row = max(models, key=lambda name: models[name]["likelihood"])
        assert len(models) == (3 if folder == "run" else 1)
        for name in ("c_index", "c_index_uno", "auc", "ibs"):
            assert summary[f"val/{name}"] == pytest.approx(summary[f"val/rival/{row}/{name}"], abs=1e-9)
        assert summary[f"val/rival/{row}/above_low"] == summary[f"val/rival/{row}/above_high"] == 0
    assert "val/rival/image_numbers/c_index" not in summary
    go("--predict", tmp_path / "d.csv", "--output_dir", tmp_path / "none")
    assert len(pd.read_csv(tmp_path / "none/predictions_d.csv")["S(3y)"]) == 40


def test_the_image_counts_what_it_says_of_cases_it_was_not_trained_on(made, tmp_path):
    """By the weights of the inner networks; --eval_only and --predict weigh it alike."""
    words = ["--csv_path", made / "dataset.csv", "--output_dir", tmp_path / "run", "--clinical_columns", "Age"]
    go(*words, "--inner_folds", 2, "--lr", 0.02)
    run = tmp_path / "run"
    saved, summary, baseline = (
        torch.load(run / "best.pt"),
        load_json(run / "summary.json"),
        load_json(run / "baseline.json"),
    )
    cohort = read_cohort(made / "dataset.csv")
    train, val = choose_fold(cohort, "Fold_1", "train", "val", 0, 0)
    inputs = script.read_inputs(cohort, saved["columns"], np.arange(40), parse())
    cases = inputs.sets({"all": np.arange(40)}, parse())["all"]
    batch = default_collate([cases[row] for row in range(40)])
    image, unseen = np.zeros(40), []
    for folder in (run / "inner_1_of_2", run / "inner_2_of_2"):
        inner = torch.load(max(folder.glob("step_*.pt")))
        left_out = [row for row in train if cohort.case[row] not in inner["trained_cases"]]
        network = script.build_model(parse(), "no", CPU, inputs.columns.shape[1], inner["model"]).eval()
        network.linear.zero_()
        with torch.no_grad():
            found = network(batch).numpy()[left_out]
        image[left_out] = found - found.mean()
        unseen += left_out
    assert sorted(unseen) == sorted(train)
    cases.rows = train
    linear, weight, chi2 = script.weigh_image(
        inputs.columns[train].astype(float), image[train], cases, *script.strongest(saved["cox_models"])[1:]
    )
    assert (summary["val/image_weight"], summary["val/image_chi2"]) == pytest.approx((weight, chi2), rel=1e-4)
    assert baseline["linear"] == pytest.approx(linear, rel=1e-4)
    weights = load_file(run / "model.safetensors")
    assert weights["image_weight"] == baseline["image_weight"]
    assert weights["linear"].tolist() == baseline["linear"]
    go(*words, "--eval_only")
    again = load_json(run / "eval_val.json")
    assert {name: summary[name] for name in again} == pytest.approx(again, abs=1e-9)
    go("--predict", made / "dataset.csv", "--output_dir", run)
    own = pd.read_csv(run / "predictions.csv").set_index("case")
    written = pd.read_csv(run / "predictions_dataset.csv").set_index("case").loc[own.index]
    for name in ("log_hazard", "of_columns", "of_image", "percentile", "S(3y)"):
        assert np.allclose(written[name], own[name], atol=1e-5)
    # risks of the training cases by networks that have not seen them are the hundred parts
    risk = inputs.columns[train] @ linear + weight * image[train]
    assert np.median(risk - risk.mean()) == pytest.approx(baseline["percentiles"][50], abs=1e-4)


def test_nothing_of_the_validation_fold_reaches_the_model(made, tmp_path, table):
    """Other outcomes, columns and volumes of all but one validation case: its risk stays the same in every model."""
    words = ["--clinical_columns", "Age", "NumLesion", "--inner_folds", 2, "--output_dir"]
    go("--csv_path", made / "dataset.csv", *words, tmp_path / "a", "--folds", 2, "--val_fold", 1)
    first = pd.read_csv(tmp_path / "a/predictions.csv").set_index("case")
    changed = first.index[first["fold"] == "val"][1:].astype(str)
    rows = table["case_num"].isin(changed)
    table.loc[rows, "time"] = np.arange(300, 300 + rows.sum()).astype(str)
    table.loc[rows, ["Age", "NumLesion"]] = ["99", "77"]
    for row in np.flatnonzero(rows):
        volume = nibabel.load(table["NIFTI Path"][row])
        nibabel.save(nibabel.Nifti1Image(volume.get_fdata() + 500, volume.affine), tmp_path / f"{row}.nii.gz")
        table.loc[row, "NIFTI Path"] = str(tmp_path / f"{row}.nii.gz")
    table.to_csv(tmp_path / "d.csv", index=False)
    go("--csv_path", tmp_path / "d.csv", *words, tmp_path / "b", "--folds", 2, "--val_fold", 1)
    second = pd.read_csv(tmp_path / "b/predictions.csv").set_index("case")
    assert first.drop(changed.astype(int)).equals(second.drop(changed.astype(int)))
    assert not first["log_hazard"].equals(second["log_hazard"])
    assert load_json(tmp_path / "a/baseline.json") == load_json(tmp_path / "b/baseline.json")
    saved = [torch.load(max((tmp_path / name).glob("step_*.pt"))) for name in "ab"]
    assert all(saved[0][name] == saved[1][name] for name in ("columns", "cox_models"))


def test_another_hospital(trained, table, tmp_path, capsys):
    """Rows with outcomes are scored as the run's own table was; rows without get risks all the same."""
    val = table[table["Fold_1"] == "val"]
    val.to_csv(tmp_path / "other.csv", index=False)
    go("--predict", tmp_path / "other.csv", "--output_dir", trained)
    shown = capsys.readouterr().out
    summary = load_json(trained / "summary.json")
    written = pd.read_csv(trained / "predictions_other.csv")
    own = pd.read_csv(trained / "predictions.csv").query("fold == 'val'")
    assert np.allclose(written["log_hazard"], own["log_hazard"])
    assert np.allclose(written["log_hazard"], written["of_columns"] + written["of_image"])
    assert np.allclose(written[["S(3y)", "percentile"]], own[["S(3y)", "percentile"]])
    assert f"{len(val)} with outcomes, {(val['event'] == '1').sum()} events: C {summary['val/c_index']:.3f} (" in shown
    free = report.kaplan_meier(*own[["time_years", "event"]].to_numpy().T, 3)
    assert re.search(rf"^3 y +{1 - own['S(3y)'].mean():.3f} +{1 - free:.3f}$", shown, re.M)
    val.drop(columns=["time", "event"]).to_csv(tmp_path / "new.csv", index=False)
    go("--predict", tmp_path / "new.csv", "--output_dir", trained)
    assert "with outcomes" not in capsys.readouterr().out
    assert np.allclose(pd.read_csv(trained / "predictions_new.csv")["S(3y)"], own["S(3y)"])


def test_the_baseline_is_of_the_weights_that_are_used(tuned, made, capsys):
    """best.pt has its S(t), whichever step it is of; other weights of the run have none, and that is said."""
    best = torch.load(tuned / "best.pt", weights_only=True)
    scores = {line["step"]: line["val/c_index"] for line in read_log(tuned) if "val/c_index" in line}
    assert load_json(tuned / "baseline.json")["step"] == best["step"]
    assert best["position"]["best"] == scores[best["step"]] == max(scores.values())
    before = (tuned / "baseline.json").read_bytes(), (tuned / "predictions.csv").read_bytes()
    go("--predict", made / "dataset.csv", "--output_dir", tuned)
    both = pd.read_csv(tuned / "predictions_dataset.csv").merge(pd.read_csv(tuned / "predictions.csv"), on="case")
    assert np.allclose(both["S(3y)_x"], both["S(3y)_y"])
    assert "warning: 32 of these cases have names that were trained on" in capsys.readouterr().out
    other = next(path for path in sorted(tuned.glob("step_*.pt")) if int(path.stem[5:]) != best["step"])
    go("--predict", made / "dataset.csv", "--output_dir", tuned, "--resume_from", other)
    assert "no S(t)" in capsys.readouterr().out
    # --eval_only says what the run said, and leaves its results as they are
    words = ["--csv_path", made / "dataset.csv", "--output_dir", tuned]
    go(*words, "--eval_only")
    summary, again = load_json(tuned / "summary.json"), load_json(tuned / "eval_val.json")
    assert {name: summary[name] for name in again} == pytest.approx(again, abs=1e-9)
    assert before == ((tuned / "baseline.json").read_bytes(), (tuned / "predictions.csv").read_bytes())
    with pytest.raises(InputError, match="the model was trained on .* more of its cases"):
        go(*words, "--eval_only", "--fold_column", "Fold_2")
    with pytest.raises(InputError, match="a run with training cases 32, digest .* give the same again"):
        go(*words, "--resume_from", "auto", "--fold_column", "Fold_2")
    with pytest.raises(InputError, match="holds a single run; choose another folder for --folds"):
        go(*words, "--folds", "2")


def test_cross_validation(made, tmp_path, capsys):
    """2 folds twice, each at its last epoch, no case scored by a model that saw it; an ensemble answers --predict."""
    words = ["--csv_path", made / "dataset.csv", "--output_dir", tmp_path / "cv", "--clinical_columns", "Age"]
    words += ["--inner_folds", 0, "--lr", 0.02, "--folds", 2, "--repeats", 2, "--stratum_column", "Sex"]
    go(*words)
    shown = capsys.readouterr().out
    summary = load_json(tmp_path / "cv/summary.json")
    folders = [tmp_path / f"cv/repeat_{repeat}/fold_{fold}" for repeat in (1, 2) for fold in (1, 2)]
    scores = [load_json(folder / "summary.json")["val/c_index"] for folder in folders]
    logs = [[line["val/c_index"] for line in read_log(folder) if "val/c_index" in line] for folder in folders]
    assert scores == pytest.approx([log[-1] for log in logs])
    assert scores[:2] != scores[2:]
    assert summary["val/c_index"] == pytest.approx(np.mean(scores))
    assert summary["val/c_index_sd"] == pytest.approx(np.std(scores, ddof=1))
    cases = pd.read_csv(tmp_path / "cv/cross_validation.csv")
    assert sorted(cases["case"].tolist()) == sorted([*range(1, 41)] * 2)

    # the table by hand: all pairs within folds, and the mean of both repeats over the same pairs
    cases["mean"] = cases.groupby("case")["log_hazard"].transform("mean")
    cases["sex"] = pd.read_csv(made / "dataset.csv").set_index("case_num")["Sex"][cases["case"]].to_numpy()

    def by_hand(risk: str, groups: list[str]) -> float:
        right = pairs = 0
        for _, part in cases.groupby(groups):
            for one in part[part["event"]].itertuples():
                later = part[(part["time"] > one.time) | ((part["time"] == one.time) & ~part["event"])]
                pairs += len(later)
                difference = getattr(one, risk) - later[risk]
                right += (difference > 0).sum() + 0.5 * (difference == 0).sum()
        return right / pairs

    for key, risk in (("val", "log_hazard"), ("val/rival/mean_of_repeats", "mean"), ("val/rival/clinical", "clinical")):
        assert summary[f"{key}/c_index_pooled"] == pytest.approx(by_hand(risk, ["repeat", "fold"]))
        within = by_hand(risk, ["repeat", "fold", "sex"])
        assert summary[f"{key}/c_index_pooled_within_strata"] == pytest.approx(within)
        assert f"{summary[f'{key}/c_index_pooled']:.3f} ({summary[f'{key}/c_index_pooled_low']:.3f}, " in shown
    assert f"{summary['val/rival/clinical/above_low']:+.3f}, {summary['val/rival/clinical/above_high']:+.3f}" in shown

    go("--predict", made / "dataset.csv", "--output_dir", tmp_path / "cv")
    assert "40 cases, 4 models" in capsys.readouterr().out
    own = sum(pd.read_csv(folder / "predictions.csv").set_index("case").drop(columns="fold") for folder in folders)
    written = pd.read_csv(tmp_path / "cv/predictions_dataset.csv").set_index("case")
    for name in ("log_hazard", "of_columns", "of_image", "percentile", "S(1y)"):
        assert np.allclose(4 * written[name], own[name][written.index], atol=1e-5)


def test_flags(capsys):
    args = parse("--amp", "--pin_memory", "--backend", "nccl", "--max_grad_norm", "2", "--output", "b")
    assert (args.grad_clip, args.output_dir, parse("--log_dir", "a").output_dir) == (2, "b", "a")
    bad = {
        "--image_size 4 64 64": "argument --image_size: must be a whole number of at least 8",
        "--eta_min 1": "--eta_min at most --lr",
        "--init pretrained": "--init pretrained and --pretrained_path go together",
        "--image none": "--image none: needs --clinical_columns",
        "--inner_folds 1": "--inner_folds: 0, or at least 2",
        "--folds 3 --resume_from x.pt": "--folds: each has checkpoints of its own",
        "--image none --clinical_columns age --use_smart_cache": "--image none: goes without --use_smart_cache",
    }
    for words, message in bad.items():
        with pytest.raises(SystemExit, match="2"):
            parse(*words.split())
        assert message in capsys.readouterr().err
    with pytest.raises(InputError, match="3D convolutions compute wrong gradients on a CPU"):
        go("--mixed_precision", "bf16")


# --- the table, folds and columns -------------------------------------------------------------------------------------


def test_names_units_separators_and_blanks(read, table):
    days = read(table)
    assert np.allclose(days.time, table["time"].astype(float) / 365.25, rtol=1e-12)
    assert days.event.tolist() == (table["event"] == "1").tolist()
    other = table.assign(time=table["time"].astype(float) / 30, event="1", dead=table["event"])
    other = other.rename(columns={"case_num": "MRN", "NIFTI Path": "Image_Path", "time": "Months"})
    months = read(other, sep=";", time_unit="months", time_column="months", event_column="Dead")
    assert np.allclose(months.time / days.time, 365.25 / 12 / 30)
    assert months.event.tolist() == days.event.tolist()
    assert months.case.tolist() == table["case_num"].tolist()
    assert months.path == table["NIFTI Path"].tolist()
    assert np.isnan(read(table.assign(time="NA", event=""), outcome=False).time).all()


@pytest.mark.parametrize(
    ("rows", "column", "value", "message"),
    [
        ([2], "time", "", "d.csv:4: time '' days"),
        ([2], "time", "-3", "d.csv:4: time '-3' days"),
        ([2], "time", "99999", "d.csv:4: .*must be 0 to 120 years, .* see --time_unit"),
        ([2], "event", "2", "d.csv:4: .*event '2': must be"),
        ([2], "NIFTI Path", "", "d.csv:4: no path in column 'nifti path'"),
        ([2], "NIFTI Path", "../../x.nii", "d.csv:4: .*lies outside .*; give the folder that holds it with --data_dir"),
        (range(40), "Fold_1", "test", "0 rows in the training fold.*check --fold_column"),
        (range(40), "event", "0", "no event before the last"),
        ([0, 2], "case_num", "1", "case 1 is in the training and the validation fold"),
        ([0, 2], "NIFTI Path", "scans/a", "volume .*scans/a is in the training and the validation fold"),
    ],
)
def test_a_table_that_cannot_be_learned_from(read, table, rows, column, value, message):
    table.loc[0, "Fold_1"], table.loc[2, "Fold_1"] = "train", "val"
    table.loc[rows, column] = value
    with pytest.raises(InputError, match=message):
        choose_fold(read(table), "Fold_1", "train", "val", 0, 0)


def test_made_folds_are_disjoint_cover_all_and_spread_the_events(read, table):
    """Two rows of each case, which stay together; what the fold column holds out is in none."""
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
    assert seen[: len(val)] != choose_fold(cohort, "Fold_1", "train", "1", 3, seed=6)[1].tolist()


def test_labels_of_a_fold_column(read, table):
    train, val = choose_fold(read(table), "Fold_2", "train", None, 0, 0)
    assert val.tolist() == np.flatnonzero(table["Fold_2"] == "val").tolist()
    assert len(train) == 40 - len(val)
    # numbers, as spreadsheets write them; what is held out does not train
    table["fold"] = ["1.0", "2.0", "3.0", "test", ""] * 8
    train, val = choose_fold(read(table), "fold", "train", "1", 0, 0)
    assert val.tolist() == list(range(0, 40, 5))
    assert set(table["fold"][train]) == {"2.0", "3.0"}
    with pytest.raises(InputError, match=r"d.csv:1: no column 'Fold_9' \(did you mean"):
        choose_fold(read(table), "Fold_9", "train", "val", 0, 0)


def test_columns_by_hand(read, table):
    table = table.iloc[:6].assign(age=["50", "60", "", "70", "1000", "x"], stage=["I", "II", "NA", "I", "III", "II"])
    table = table.drop(columns="Age")
    cohort = read(table.iloc[:5])
    columns = fit_columns(cohort, ["Age", "stage"], np.arange(4))
    sd = math.sqrt(200 / 3)
    expected = [
        [-10 / sd, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 1, 0, 0, 0, 1],
        [10 / sd, 0, 1, 0, 0, 0],
        [940 / sd, 0, 0, 0, 1, 0],
    ]
    assert np.allclose(encode_columns(cohort, columns), expected, atol=1e-6)
    with pytest.raises(InputError, match=r"d.csv:7: age 'x' is no number, as it is in training"):
        encode_columns(read(table), columns)
    with pytest.raises(InputError, match="--clinical_columns age: blank in all training rows"):
        fit_columns(cohort, ["age"], np.array([2]))
    with pytest.raises(InputError, match="no column 'stage'; the model needs it"):
        encode_columns(read(table.drop(columns="stage").iloc[:5]), columns)


def test_a_column_of_too_many_levels_is_asked_about(read, table, capsys):
    """Numbers that are written oddly, or an id, among them; all wrong cells of the others are listed."""
    table = table.assign(age_de=[f"{40 + n} J." for n in range(40)], stage=["I", "II", "III", "IV", "X"] * 8)
    table.loc[table.index[[3, 7]], "Age"] = ["x", "y"]
    cohort = read(table)
    line = r"age_de has 40 levels in 40 rows: an id, or numbers\? \('40 J.'\); correct it, join levels"
    with pytest.raises(InputError, match=line):
        fit_columns(cohort, ["stage", "age_de"], np.arange(40))
    with pytest.raises(InputError, match=r"d.csv:5, .*d.csv:9, --clinical_columns, ...: 3 cells or columns cannot"):
        fit_columns(cohort, ["Age", "age_de", "stage"], np.arange(40))
    assert "d.csv:9: age 'y' is no number, as most are" in capsys.readouterr().out
    columns = [{"name": "age", "mean": 60, "sd": 10}]
    with pytest.raises(InputError, match=r"d.csv:5, .*d.csv:9, ...: 2 cells cannot be used"):
        encode_columns(cohort, columns)


def test_all_rows_that_cannot_be_used_are_listed(read, table, capsys):
    table["event"] = table["event"].astype(str)
    table.loc[table.index[[2, 5]], "event"] = ["dead", "2"]
    table.loc[table.index[6], "NIFTI Path"] = ""
    with pytest.raises(
        InputError, match=r"d.csv:4, .*d.csv:7, .*d.csv:8, ...: 3 rows cannot be used, all listed above"
    ):
        read(table)
    assert "d.csv:8: no path in column 'nifti path'; fill it in" in capsys.readouterr().out


def test_a_german_spreadsheet(tmp_path):
    """Semicolons, decimal commas, Windows-1252: numbers are numbers."""
    lines = ["Path;Time;Event;Größe", "a.nii;365,25;1;1,75", "b.nii;730,5;0;1,65"]
    (tmp_path / "d.csv").write_bytes("\r\n".join(lines).encode("cp1252"))
    cohort = read_cohort(tmp_path / "d.csv")
    assert cohort.time.tolist() == [1.0, 2.0]
    (column,) = fit_columns(cohort, ["größe"], np.arange(2))
    assert (column["mean"], column["sd"]) == pytest.approx((1.7, 0.05))


# --- volumes ----------------------------------------------------------------------------------------------------------


def save_volume(path: Path, values: np.ndarray, affine: np.ndarray | None = None) -> str:
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine), path)
    return str(path)


def test_window_order_spacing_and_orientation(tmp_path):
    values = np.random.default_rng(0).integers(-1200, 1200, (8, 10, 12)).astype(np.int16)
    path = save_volume(tmp_path / "a.nii.gz", values[..., None], np.diag([-2.0, 1, 3, 1]))
    plain = Volumes(image_size=(8, 10, 12), orientation=None).load(path)
    assert plain.dtype == torch.float16
    assert np.allclose(plain[0], np.clip((values + 1000) / 2000, 0, 1), atol=1e-3)
    window = Volumes(image_size=(8, 10, 12), hu_window=(0, 100), orientation="LAS").load(path)
    assert np.allclose(window[0], np.clip(values / 100, 0, 1), atol=1e-3)
    assert torch.equal(Volumes(image_size=(8, 10, 12)).load(path), plain.flip(1))
    # from the first voxel's centre to the last's: 9 mm along y by steps of 2, 33 mm along z by steps of 1
    volume, _ = Volumes(spacing=(2.0, 2.0, 1.0))._open(path, "bilinear")
    assert tuple(volume.shape) == (1, 8, 6, 34)
    flags = parse("--spacing", 2, 2, 1, "--orientation", "LPS", "--mask_margin", 3)
    cohort = fold([1.0], [True]).cohort
    cohort.path = [path]
    assert script.read_inputs(cohort, [], [0], flags).volumes == Volumes(
        [12, 12, 8], [0, 400], [2, 2, 1], "LPS", None, 3, ""
    )
    # means where an axis shrinks, lines where it grows
    volume = torch.arange(4.0).expand(1, 2, 2, 4)
    assert data.resize(volume, (2, 2, 2))[0, 0, 0].tolist() == [0.5, 2.5]
    assert data.resize(volume, (2, 2, 8))[0, 0, 0].tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]


def test_volumes_and_masks_lie_one_way_whatever_their_files_say(tmp_path, capsys):
    """NIfTI with three kinds of axes, the same volume each time: the same inputs, and a line about what was found."""
    values = np.random.default_rng(0).integers(-900, 900, (8, 8, 8)).astype(np.int16)
    mask = np.zeros((8, 8, 8), np.uint8)
    mask[1:4, 2:6, 5:7] = 1
    cohort = fold([1.0, 2.0, 3.0, 4.0], [True] * 4).cohort
    cohort.path, cohort.mask = [], []
    for name, codes, size in (("a", "RAS", 1), ("b", "LPS", 1), ("c", "PIR", 1), ("d", "LPS", 2)):
        for kind, array, of_cohort in (("", values, cohort.path), ("_mask", mask, cohort.mask)):
            image = nibabel.Nifti1Image(array, np.diag([size, 1.0, 1, 1]))
            turn = nibabel.orientations.ornt_transform(*map(nibabel.orientations.axcodes2ornt, ("RAS", codes)))
            nibabel.save(image.as_reoriented(turn), tmp_path / f"{name}{kind}.nii.gz")
            of_cohort.append(str(tmp_path / f"{name}{kind}.nii.gz"))
    flags = parse("--image_size", 8, 8, 8, "--mask_column", "m", "--mask_mode", "channel")
    cases = script.read_inputs(cohort, [], np.arange(4), flags).sets({"val": np.arange(4)}, flags)["val"]
    images = [cases[row]["image"] for row in range(4)]
    assert np.array_equal(images[0][1], mask)
    assert all(torch.equal(image, images[0]) for image in images)
    told = capsys.readouterr().out
    assert "volumes: 2 LPS, 1 RAS, 1 PIR, turned to RAS; voxels 1 to 2 x 1 x 1 mm\n" in told
    assert "warning: voxel sizes vary by more than 10 %" in told
    flags.orientation, flags.spacing = "as-is", [1.0, 1.0, 1.0]
    script.read_inputs(cohort, [], np.arange(4), flags)
    assert capsys.readouterr().out == "volumes: 2 LPS, 1 RAS, 1 PIR; voxels 1 to 2 x 1 x 1 mm\n"


def test_a_dicom_series_is_a_volume_and_is_read_anew_once_a_slice_changes(tmp_path):
    hu = np.random.default_rng(0).integers(-900, 900, (8, 8, 8)).astype(np.int16)
    write_series(tmp_path / "scan", hu, (0.5, 0.5, 2.5))
    volumes = Volumes(image_size=(8, 8, 8), cache_dir=str(tmp_path / "cache"))
    first = volumes.load(str(tmp_path / "scan"))
    assert np.allclose(first[0], (hu + 1000) / 2000, atol=1e-3)
    # in the same folder and files
    write_series(tmp_path / "scan", -hu, (0.5, 0.5, 2.5))
    assert np.allclose(volumes.load(str(tmp_path / "scan"))[0], (1000 - hu) / 2000, atol=1e-3)


def test_a_mask_crops_with_its_margin_or_becomes_a_channel(tmp_path):
    values = np.random.default_rng(0).integers(-900, 900, (20, 20, 20)).astype(np.int16)
    mask = np.zeros((20, 20, 20), np.uint8)
    mask[8:11, 9:12, 4:6] = 1
    affine = np.diag([1.0, 2, 1, 1])
    path, name = (save_volume(tmp_path / f"{i}.nii.gz", array, affine) for i, array in enumerate((values, mask)))
    # 3 mm are 3, 2 and 3 voxels; the box ends at the volume's
    cropped = Volumes(image_size=(9, 7, 8), mask_mode="crop", mask_margin=3).load(path, name)
    assert np.allclose(cropped[0], np.clip((values[5:14, 7:14, 1:9] + 1000) / 2000, 0, 1), atol=1e-3)
    channel = Volumes(image_size=(20, 20, 20), mask_mode="channel").load(path, name)
    assert np.array_equal(channel[1], mask)
    # an empty mask crops nothing, and neither does a case without one
    volumes = Volumes(image_size=(20, 20, 20), mask_mode="crop")
    assert torch.equal(volumes.load(path, save_volume(tmp_path / "e.nii.gz", 0 * mask, affine)), channel[:1])
    assert torch.equal(volumes.load(path), channel[:1])
    with pytest.raises(ValueError, match="its mask lies elsewhere"):
        volumes.load(path, save_volume(tmp_path / "f.nii.gz", mask, np.diag([-1.0, 2, 1, 1])))


def test_numbers_of_a_volume(tmp_path):
    """Two parts of calcium by 26 neighbours, on voxels of 2 mm3."""
    values = np.zeros((8, 8, 8), np.int16)
    values[1, 1, 1] = values[2, 2, 2] = values[6, 6, 6] = 131
    values[4, 4, 4] = 130
    path = save_volume(tmp_path / "a.nii.gz", values, np.diag([1.0, 2, 1, 1]))
    mask = save_volume(tmp_path / "m.nii.gz", (values > 0).astype(np.uint8), np.diag([1.0, 2, 1, 1]))
    numbers = Volumes(image_size=(8, 8, 8)).load(path, mask, numbers=True)
    assert numbers[:4].tolist() == pytest.approx([math.log1p(6), math.log1p(2), 523 / 512, math.log(8)])
    assert numbers[6:8].tolist() == pytest.approx([523 / 4, math.sqrt(3) / 4])
    # from corner to corner
    assert numbers[5].exp() == pytest.approx(math.hypot(6, 12, 6))
    assert Volumes(image_size=(8, 8, 8)).load(path, numbers=True)[3:8].isnan().all()


def test_surface_and_diameter_of_a_ball():
    """Within what voxels allow, on voxels of another size along each axis."""
    voxel = np.array([0.5, 1.0, 0.8])
    axes = [np.arange(count) * size for count, size in zip((60, 30, 40), voxel, strict=True)]
    inside = sum((axis - 14) ** 2 for axis in np.meshgrid(*axes, indexing="ij")) < 10**2
    volume, surface, diameter, *_ = data.measure_mask(torch.zeros(inside.shape), torch.from_numpy(inside), voxel)
    assert math.exp(volume) == pytest.approx(4 / 3 * math.pi * 10**3, rel=0.02)
    assert math.exp(surface) == pytest.approx(4 * math.pi * 10**2, rel=0.1)
    assert math.exp(diameter) == pytest.approx(20, rel=0.07)
    # a line of voxels
    flat = torch.zeros(5, 5, 5, dtype=torch.bool)
    flat[2, 2, 1:4] = True
    assert math.exp(data.measure_mask(torch.zeros(5, 5, 5), flat, voxel)[2]) == pytest.approx(math.hypot(0.5, 1, 2.4))


def test_the_disk_cache_is_read_once_and_notices_changes(tmp_path, monkeypatch):
    values = np.random.default_rng(0).integers(-900, 900, (8, 8, 8)).astype(np.int16)
    path = save_volume(tmp_path / "a.nii.gz", values)
    volumes = Volumes(image_size=(8, 8, 8), cache_dir=str(tmp_path / "cache"))
    first, numbers = volumes.load(path), volumes.load(path, numbers=True)
    with monkeypatch.context() as unread:
        unread.delattr(Volumes, "_open")
        assert torch.equal(volumes.load(path), first)
        assert torch.equal(volumes.load(path, numbers=True).nan_to_num(), numbers.nan_to_num())
    save_volume(tmp_path / "a.nii.gz", -values)
    assert not torch.equal(volumes.load(path), first)
    volumes.hu_window = (0, 9)
    assert volumes.load(path).max() == 1


def test_unusable_volumes_are_named_with_their_rows(read, table, tmp_path, capsys):
    """Cut short, empty, or not one volume; masks that are empty are counted."""
    noise = np.random.default_rng(0).random((4, 4, 6, 2))
    for row, values in ((3, None), (7, noise), (8, 0 * noise[..., 0]), (9, np.nan * noise[..., 0])):
        bad = tmp_path / f"{row}.nii.gz"
        if values is None:
            bad.write_bytes(Path(table["NIFTI Path"][row]).read_bytes()[:200])
        else:
            save_volume(bad, values)
        table.loc[row, "NIFTI Path"] = str(bad)
    table.loc[0, "heart_mask"] = ""
    cohort = read(table, mask_column="heart_mask")
    flags = parse("--image_size", 8, 8, 8, "--mask_column", "heart_mask", "--cache_dir", "")
    with pytest.raises(InputError, match=r"d.csv:9, .*d.csv:10, .*d.csv:11, ...: 4 volumes cannot be used, all listed"):
        script.read_inputs(cohort, [], np.roll(np.arange(40), -4), flags)
    listed = capsys.readouterr().out.splitlines()
    assert re.search(rf"d.csv:5: {tmp_path}/3.nii.gz: cannot be used \(.+\); correct or replace it$", listed[3])
    assert listed[1].endswith("8.nii.gz cannot be used (holds one value everywhere); replace it or remove the row")
    dataset = MultiGPUSurvivalDataset(cohort, rows=np.arange(40), volumes=Volumes((8, 8, 8), mask_mode="crop"))
    # met later, the case says so, and is no image
    assert dataset[3]["error"].startswith(f"{tmp_path}/d.csv:5: ")
    assert dataset[3]["image"].isnan().all()
    for row, reason in ((7, "not one volume"), (8, "one value everywhere"), (9, "not finite"), (2, "")):
        assert reason in dataset[row]["error"]
    dataset.rows = np.arange(3)
    dataset.check(threads=2)
    assert "1 of 3 cases have no mask, or an empty one, and are taken whole" in capsys.readouterr().out


def test_augmentation_is_a_function_of_seed_epoch_and_case():
    images = torch.arange(2 * 4 * 4 * 3.0).reshape(2, 1, 4, 4, 3)
    both = data.augment(images, [5, 9], seed=1, epoch=2)
    assert torch.equal(both[1:], data.augment(images[1:], [9], seed=1, epoch=2))
    # 4 quarter turns, each mirrored or not, and upside down or not
    seen = {str(data.augment(images[:1], [5], seed=1, epoch=epoch).tolist()) for epoch in range(60)}
    assert len(seen) == 16
    assert not torch.equal(*(data.augment(images[:1].repeat(2, 1, 1, 1, 1), [5, 9], 1, 2)))
    assert data.augment(images[..., :2, :], [5, 9], 1, 2).shape == (2, 1, 4, 2, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_its_part_and_all_cases_come_equally_often(made, workers, monkeypatch):
    """The guide's own loop: 10 of 32 in memory, 4 replaced after each epoch; cached volumes are those of the files."""
    volumes = Volumes(image_size=(8, 8, 8))
    options = {"use_smart_cache": True, "cache_rate": 0.32, "replace_rate": 0.4, "seed": 3}
    smart = MultiGPUSurvivalDataset(made / "dataset.csv", volumes=volumes, **options)
    assert (len(smart), smart.replaced) == (10, 4)
    loader = du.create_distributed_dataloader(smart, batch_size=4, num_workers=workers)
    load, loaded, windows = Volumes.load, [], []
    monkeypatch.setattr(Volumes, "load", lambda self, *words: loaded.append(words) or load(self, *words))
    for epoch in range(8):
        loader.batch_sampler.set_position(epoch)
        batches = list(loader)
        rows = [row for batch in batches for row in batch["index"].tolist()]
        windows.append(set(smart.rows_of(range(10), epoch).tolist()))
        assert sorted(rows) == sorted(windows[-1])
        if epoch in (0, 7):
            images = torch.cat([batch["image"] for batch in batches])
            assert all(torch.equal(i, load(volumes, smart.cohort.path[r])) for r, i in zip(rows, images, strict=True))
    # the window moves on by 4 of 32: over 8 epochs all come in once, each for 2 or 3 of them
    assert {sum(row in window for window in windows) for row in smart.rows} == {2, 3}
    # each volume once for each time it comes in, not once an epoch
    assert workers or len(loaded) == 10 + 7 * 4


def test_sample_data_hides_the_risk_in_the_shape_of_the_lesions(tmp_path, capsys):
    """Number, volume and Agatston score tell little, the true risk much; the CT holds the table's lesions."""
    sample_data.write_sample_data(tmp_path, 60, event_rate=0.4, matrix=32, seed=0)
    line = capsys.readouterr().out.partition("patients of")[2]
    scores = {name: float(value) for name, value in re.findall(r"([a-zA-Z][a-zA-Z ]+) (0\.\d+)", line)}
    assert scores.pop("the true risk") > 0.8
    assert 0.6 < scores.pop("age") < 0.75
    assert len(scores) == 3
    assert max(scores.values()) < 0.7
    cohort = read_cohort(tmp_path / "dataset.csv", mask_column="heart_mask")
    assert cohort.event.mean() == pytest.approx(0.4, abs=0.02)
    numbers = Volumes().load(cohort.path[0], cohort.mask[0], numbers=True)[:1].expm1()
    # noise may lift a voxel
    assert numbers[0].item() == pytest.approx(float(cohort.table["volumescore"][0]), rel=0.05)
