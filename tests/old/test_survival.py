"""train_survival_distributed.py: the same answer from any number of processes, and from a run that was killed."""

import csv
import hashlib
import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from background import Run, interrupt
from conftest import ROOT, kill_then_stop, torchrun

from tasks.survival.metrics import concordance

SURVIVAL = str(ROOT / "train_survival_distributed.py")
TINY = ["--resnet", "resnet10", "--base_channels", "8", "--image_size", "12", "12", "8", "--lr", "1e-3"]
TINY += ["--batch_size", "6", "--epochs", "2", "--log_every", "1", "--num_workers", "0", "--eval_years", "1", "3", "9"]


@pytest.fixture(scope="session")
def flags(survival_data, tmp_path_factory):
    """flags(out, more): the arguments of a small run in fp32 that logs every step."""
    cache = tmp_path_factory.mktemp("cache")

    def make(out: Path, more: list = ()) -> list[str]:
        words = ["--csv_path", survival_data / "dataset.csv", "--cache_dir", cache]
        words += [*TINY, "--log_dir", out, *more]
        return [str(word) for word in words]

    return make


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def read_rows(path: Path) -> list[dict]:
    """The rows of a CSV file by the names of its header."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read_table(path: Path) -> list[list[str]]:
    """Header and rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.reader(file))


def write_table(path: Path, rows: list[list[str]]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["model"]


def column(rows: list[dict], name: str) -> np.ndarray:
    """The numbers of a column."""
    return np.array([float(row[name]) for row in rows])


def lines(out: Path) -> list[dict]:
    text = (out / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def curve(out: Path) -> list[tuple]:
    """(step, loss, events, gradient norm) of training lines, (step, loss, C) of evaluations, in file order."""
    training_names = ("train/loss", "train/events", "train/grad_norm")
    val_names = ("val/loss", "val/c_index", "val/auc")
    points = []
    for line in lines(out):
        for names in (training_names, val_names):
            if names[0] in line:
                values = [line.get(name) for name in names]
                points.append((line["step"], *values))
    return points


def training(out: Path) -> list[tuple]:
    return [row for row, line in zip(curve(out), lines(out), strict=True) if "train/loss" in line]


def off(a: list[tuple], b: list[tuple]) -> float:
    """Largest difference of the losses, relative where above 1; events are equal, gradient norms nearly so (AdamW's
    first steps blow the rounding of vanishing gradients up)."""
    assert len(a) == len(b)
    differences = []
    for (step, loss, events, norm), expected in zip(a, b, strict=True):
        expected_step, expected_loss, expected_events, expected_norm = expected
        assert (step, events) == (expected_step, expected_events)
        assert abs(norm - expected_norm) < 1e-3 * max(1.0, expected_norm)
        differences.append(abs(loss - expected_loss) / max(1.0, abs(expected_loss)))
    return max(differences)


def run(zygote, words: list[str], ranks: int = 1, **options):
    """The script with these arguments, whatever becomes of it."""
    return zygote(SURVIVAL, *words, ranks=ranks, **options)


def go(zygote, words: list[str], ranks: int = 1, figures: bool = False):
    """A run that ends well."""
    done = run(zygote, words, ranks, figures=figures)
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="session")
def one(flags, zygote, tmp_path_factory) -> Path:
    """The run of one process: 34 cases, 6 a step, the last step of an epoch has 4."""
    out = tmp_path_factory.mktemp("one") / "run"
    go(zygote, flags(out), figures=True)
    return out


ACCUMULATION = ["--batch_size", "2", "--gradient_accumulation_steps", "3"]


@pytest.mark.parametrize(("ranks", "more"), [(2, []), (3, []), (2, ACCUMULATION)])
def test_curves_at_other_world_sizes(flags, zygote, one, tmp_path, ranks, more):
    """Also with accumulation, where the risk set is still that of the whole step, and the end of an epoch uneven."""
    out = tmp_path / "run"
    go(zygote, flags(out, more), ranks)
    assert len(training(one)) == 12
    assert off(training(out), training(one)) < 1e-5


@pytest.mark.parametrize(
    "more",
    [
        "--event_balanced --ties breslow --cox_memory 10",
        "--task pretrain --freeze_epochs 1",
        "--folds 4 --val_fold 3 --scheduler constant --warmup_steps 3 --orientation RAS",
    ],
)
def test_other_settings_at_two_processes(flags, zygote, tmp_path, more):
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        go(zygote, flags(out, ["--optimizer", "sgd", *more.split()]), ranks)

    # the same losses and the same learning rates
    one = training(tmp_path / "1")
    two = training(tmp_path / "2")
    assert len(one) >= 10
    assert off(two, one) < 1e-5
    rates = [[line.get("train/lr") for line in lines(tmp_path / name)] for name in ("1", "2")]
    assert rates[0] == rates[1]


def guide_commands(flags, name: str, out: Path) -> list[list]:
    """The command lines of the quick start, of the launcher, or of two agents of torch.distributed.launch."""
    words = flags(out, ["--epochs", "1"])
    if name == "plain":
        return [[sys.executable, SURVIVAL, *words, "--world_size", "2"]]
    if name == "launcher":
        launcher = [ROOT / "launch_distributed_training.sh", "--script", "train_survival_distributed.py"]
        return [[*launcher, "--num_gpus", "2", *words, "--amp"]]

    agent = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=1", "--nnodes=2"]
    agent += ["--master_addr=127.0.0.1", "--master_port=12355"]
    return [[*agent, f"--node_rank={node}", SURVIVAL, *words] for node in (0, 1)]


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        pytest.param("launcher", marks=pytest.mark.soak),
        pytest.param("nodes", marks=pytest.mark.soak),
    ],
)
def test_guide_commands_end_in_the_same_curve(flags, zygote, tmp_path, name):
    """Quick start, basic, and the multi-node recipe by two agents of torch.distributed.launch, all for real."""
    reference = tmp_path / "reference"
    go(zygote, flags(reference, ["--epochs", "1"]), 2)

    # all commands of the guide's recipe at once
    running = []
    for command in guide_commands(flags, name, tmp_path / name):
        words = [str(word) for word in command]
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        running.append(process)
    for process in running:
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0, text[-3000:]
    assert curve(tmp_path / name) == curve(reference)


# --- what a run leaves behind -----------------------------------------------------------------------------------------


def test_metrics_at_1_2_3_processes_and_against_scikit_survival(flags, zygote, one, survival_data, tmp_path):
    """10 validation cases: uneven, and with 3 ranks some have a batch less. The files are equal to the byte."""
    from sksurv.metrics import concordance_index_censored, cumulative_dynamic_auc
    from sksurv.util import Surv

    results = []
    for ranks in (1, 2, 3):
        out = tmp_path / str(ranks)
        done = go(zygote, flags(out, ["--eval_only", "--resume_from", one / "best.pt"]), ranks)
        # 9 years are beyond the follow-up
        assert "undefined" in done.stdout
        results.append([(out / name).read_text() for name in ("eval_val.json", "predictions.csv")])
    assert results[0] == results[1] == results[2]

    # the table of predictions has both folds
    metrics = json.loads(results[0][0])
    rows = read_rows(tmp_path / "1" / "predictions.csv")
    val = [row for row in rows if row["fold"] == "val"]
    train = [row for row in rows if row["fold"] == "train"]
    assert len(val) == 10
    assert len(train) == 34
    assert len(rows) == 44

    # the scores are those of scikit-survival
    event = column(val, "event") == 1
    years = column(val, "time_years")
    risk = column(val, "log_hazard")
    c_index = concordance_index_censored(event, years, risk)[0]
    assert metrics["val/c_index"] == pytest.approx(c_index, abs=1e-6)
    train_outcome = Surv.from_arrays(column(train, "event") == 1, column(train, "time_years"))
    val_outcome = Surv.from_arrays(event, years)
    auc, _ = cumulative_dynamic_auc(train_outcome, val_outcome, risk, [3.0])
    assert metrics["val/auc/3y"] == pytest.approx(auc[0], abs=1e-6)
    assert metrics["val/auc/9y"] is None

    # probabilities fall with time, and are blank beyond the follow-up
    for row in rows:
        assert row["S(9y)"] == ""
        assert 0 < float(row["S(3y)"]) < float(row["S(1y)"]) <= 1

    # folds and the true risk are those of the table
    table = {row["case_num"]: row for row in read_rows(survival_data / "dataset.csv")}
    for row in rows:
        assert table[row["case"]]["Fold_1"] == row["fold"]
    true = column([table[row["case"]] for row in val], "true_log_hazard")
    c_index = concordance_index_censored(event, years, true)[0]
    assert metrics["val/c_index_true"] == pytest.approx(c_index, abs=1e-6)


def test_files_of_a_run(one):
    names = {path.name for path in one.iterdir()}
    assert {"args.yaml", "metrics.jsonl", "logs", "last.pt", "best.pt", "manifest.sha256", "summary.json"} <= names
    assert {"model.safetensors", "predictions.csv", "baseline.json"} <= names
    figures = {path.stem for path in (one / "figures").glob("*.png")}
    assert figures == {"train_inputs", "val_survival", "val_cases", "curves"}

    summary = read_json(one / "summary.json")
    scores = {"c_index", "c_index_true", "ibs", "ibs_km", "c_index_low", "c_index_uno"}
    assert {f"val/{name}" for name in scores} <= set(summary)
    assert summary["steps"] == 12
    assert summary["world_size"] == 1
    assert summary["effective_batch_size"] == 6
    assert all(not isinstance(value, dict | list) for value in summary.values())


def test_predict_scores_new_patients(flags, zygote, one, survival_data, tmp_path):
    """Without outcomes in the table; the same numbers as in the run; a foreign baseline is not used."""
    rows = read_rows(survival_data / "dataset.csv")[:7]
    cases = [[f"P{row['case_num']}", row["NIFTI Path"]] for row in rows]
    write_table(tmp_path / "new.csv", [["patient_id", "path"], *cases])
    out = tmp_path / "run"
    shutil.copytree(one, out)
    words = ["--predict", tmp_path / "new.csv", "--data_dir", survival_data]
    words += ["--cache_dir", tmp_path / "cache", "--log_dir", out, "--eval_years", "1", "3", "9"]
    words = [str(word) for word in words]

    # the new patients are cases of the run, so that their numbers are known
    known = {row["case"]: row for row in read_rows(one / "predictions.csv")}
    for ranks in (1, 2):
        go(zygote, words, ranks)
        new = {row["case"]: row for row in read_rows(out / "predictions_new.csv")}
        for row in rows:
            case = row["case_num"]
            predicted = new[f"P{case}"]
            for name in ("log_hazard", "S(3y)"):
                assert float(predicted[name]) == pytest.approx(float(known[case][name]), abs=1e-5)
            assert predicted["event"] == ""
            assert predicted["S(9y)"] == ""

    # the baseline hazard of another checkpoint
    baseline = read_json(out / "baseline.json")
    assert len(baseline) == 1
    foreign = {"0" * 64: next(iter(baseline.values()))}
    (out / "baseline.json").write_text(json.dumps(foreign))
    assert "no baseline hazard" in go(zygote, words).stdout
    assert all(row["S(1y)"] == "" for row in read_rows(out / "predictions_new.csv"))


class Case(NamedTuple):
    """What a checkpoint predicts for a case, and its outcome."""

    log_hazard: float
    event: bool
    years: float


def checkpoint_predictions(table: Path, path: Path) -> dict[str, dict[str, Case]]:
    """{fold: {name of a case: Case}} of a checkpoint of a --folds 3 run, without the script's evaluation.

    fold: "val" or "train".
    """
    import train_survival_distributed as tsd
    from tasks.survival.cohort import read_cohort
    from tasks.survival.volumes import Volumes

    words = ["--csv_path", str(table), *TINY, "--folds", "3", "--cross_validate"]
    args = tsd.parse_args(words)
    checkpoint = torch.load(path, weights_only=True)
    model = tsd.RiskNet(args, "no", 1)
    model.load_state_dict(checkpoint["model"])
    model.eval()

    # each case by itself
    cohort = read_cohort(str(table))
    volumes = Volumes(args.image_size, tuple(args.hu_window))
    trained = set(checkpoint["trained_cases"])
    cases = {"val": {}, "train": {}}
    for i, name in enumerate(cohort.case):
        image = volumes.get(cohort.path[i])[None].float()
        with torch.no_grad():
            log_hazard = float(model(image)[0, 0])
        fold = "train" if name in trained else "val"
        cases[fold][name] = Case(log_hazard, bool(cohort.event[i]), float(cohort.time[i]))
    return cases


def columns_of(cases: dict[str, Case]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(log-hazards, events, years)."""
    values = list(cases.values())
    log_hazard = np.array([case.log_hazard for case in values])
    event = np.array([case.event for case in values])
    return log_hazard, event, np.array([case.years for case in values])


def pooled_c_index(folds: list[dict]) -> float:
    """Harrell's C over all folds by scikit-survival: its Breslow baselines bring the log-hazards on one scale."""
    from sksurv.linear_model.coxph import BreslowEstimator
    from sksurv.metrics import concordance_index_censored

    trained = [columns_of(fold["train"]) for fold in folds]
    until = min(years.max() for _, _, years in trained)
    risks = []
    events = []
    times = []
    for fold, (log_hazard, event, years) in zip(folds, trained, strict=True):
        fitted = BreslowEstimator().fit(log_hazard, event, years)
        baseline = fitted.cum_baseline_hazard_(until)
        risk, event, years = columns_of(fold["val"])
        risks.append(risk + np.log(baseline))
        events.append(event)
        times.append(years)
    event = np.concatenate(events)
    return concordance_index_censored(event, np.concatenate(times), np.concatenate(risks))[0]


def read_baseline(fold_folder: Path) -> dict:
    """The baseline hazard of a fold's last.pt, which stands under the file's digest."""
    digest = hashlib.sha256((fold_folder / "last.pt").read_bytes()).hexdigest()
    return read_json(fold_folder / "baseline.json")[digest]


def without_seconds(summary: dict) -> dict:
    return {name: value for name, value in summary.items() if name != "seconds"}


def test_cross_validation_is_scored_by_the_last_epoch(flags, zygote, survival_data, tmp_path):
    """best.pt is chosen on the very fold that is scored; its score stands beside the last epoch's, and says so.

    Stopped in the second fold and resumed, all numbers are the same.
    """
    out = tmp_path / "run"
    more = ["--folds", "3", "--cross_validate", "--epochs", "4", "--lr", "1e-2", "--seed", "1"]
    done = go(zygote, flags(out, more))
    summary = read_json(out / "summary.json")
    table = survival_data / "dataset.csv"
    last = [checkpoint_predictions(table, out / f"fold_{k}" / "last.pt") for k in (1, 2, 3)]
    best = [checkpoint_predictions(table, out / f"fold_{k}" / "best.pt") for k in (1, 2, 3)]
    c_index = pooled_c_index(last)
    c_index_best = pooled_c_index(best)
    assert summary["val/c_index"] == pytest.approx(c_index, abs=1e-6)
    assert summary["val/c_index_best"] == pytest.approx(c_index_best, abs=1e-6)

    # otherwise this test says nothing
    assert c_index_best > c_index + 0.005
    assert "3 folds pooled, last epoch" in done.stdout
    assert "c_index_best: of each fold's best.pt, chosen on the same fold and therefore optimistic" in done.stdout

    # predictions and baseline hazards are those of the scored weights
    rows = {row["case"]: row for row in read_rows(out / "predictions.csv")}
    for k, fold in enumerate(last, start=1):
        fold_folder = out / f"fold_{k}"
        assert read_baseline(fold_folder)
        own = {row["case"]: row for row in read_rows(fold_folder / "predictions.csv")}
        for name, case in fold["val"].items():
            assert float(rows[name]["log_hazard"]) == pytest.approx(case.log_hazard, abs=1e-5)
            assert own[name]["log_hazard"] == rows[name]["log_hazard"]
            assert own[name]["S(3y)"] == rows[name]["S(3y)"]

        # the fold's own summary
        own_summary = read_json(fold_folder / "summary.json")
        assert own_summary["val/c_index"] == summary[f"val/c_index/fold_{k}"]
        assert own_summary["val/c_index_best"] == summary[f"val/c_index_best/fold_{k}"]
        assert own_summary["val/c_index_best"] >= own_summary["val/c_index"]

    # the second fold ends after its first epoch, then the whole goes on
    stopped = tmp_path / "stopped"
    shutil.copytree(out, stopped)
    shutil.rmtree(stopped / "fold_3")
    for path in (stopped / "fold_2").glob("*.pt"):
        if path.name not in ("step_00000015.pt", "best.pt"):
            path.unlink()
    (stopped / "summary.json").unlink()
    go(zygote, flags(stopped, [*more, "--resume_from", "auto"]))
    again = read_json(stopped / "summary.json")
    assert without_seconds(again) == without_seconds(summary)
    assert (stopped / "predictions.csv").read_text() == (out / "predictions.csv").read_text()


def test_the_memory_keeps_the_last_cases_and_joins_their_risk_sets(flags, zygote, tmp_path):
    """--cox_memory: from the second step on the loss is another; the checkpoint knows whose log-hazards are kept."""
    stop = ["--max_steps", "3", "--lr", "1e-9", "--eta_min", "0"]
    go(zygote, flags(tmp_path / "without", stop))
    go(zygote, flags(tmp_path / "with", [*stop, "--cox_memory", "9"]))
    without = [line["train/loss"] for line in lines(tmp_path / "without") if "train/loss" in line]
    remembered = [line["train/loss"] for line in lines(tmp_path / "with") if "train/loss" in line]
    assert remembered[0] == without[0]
    assert abs(remembered[1] - without[1]) > 0.01
    assert abs(remembered[2] - without[2]) > 0.01

    # of the 18 cases of three steps
    memory = torch.load(tmp_path / "with" / "last.pt", weights_only=True)["memory"]
    assert len(set(memory["rows"])) == 9
    assert len(memory["values"]) == 9


def test_the_learning_rate_falls_by_a_cosine_to_eta_min(flags, zygote, tmp_path):
    """From the first step, at which it is --lr; with warm-up steps before, which rise from 0."""
    cosine = ["--scheduler", "cosine", "--lr", "1e-3", "--eta_min", "4e-4", "--warmup_steps", "2", "--eval_years", "3"]
    go(zygote, flags(tmp_path / "run", cosine))
    lrs = [line["train/lr"] for line in lines(tmp_path / "run") if "train/lr" in line]
    assert lrs[:3] == pytest.approx([5e-4, 1e-3, 1e-3])
    falling = len(lrs) - 2
    assert falling >= 8
    for step, lr in enumerate(lrs[2:]):
        share = (1 + math.cos(math.pi * step / falling)) / 2
        assert lr == pytest.approx(4e-4 + 6e-4 * share)


# train_survival_distributed.py, told to stop in the moment in which a fold has its results
TOLD_AFTER_A_FOLD = """
import os
import signal
import sys

import tasks.survival.report as report
import train_survival_distributed as script
from old.cli_utils import run_main

say_where = report.say_where


def and_stop(run_folder):
    say_where(run_folder)
    os.kill(os.getpid(), signal.SIGTERM)


report.say_where = and_stop
run_main(script.main, script.parse_args(sys.argv[1:]))
"""


def test_a_signal_between_two_folds_ends_the_cross_validation(flags, zygote, tmp_path):
    (tmp_path / "told.py").write_text(TOLD_AFTER_A_FOLD)
    out = tmp_path / "run"
    done = zygote(tmp_path / "told.py", flags(out, ["--folds", "2", "--cross_validate", "--epochs", "1"]))
    assert done.code == 143, done.stdout[-2000:] + done.stderr[-2000:]
    assert (out / "fold_1" / "summary.json").is_file()
    assert not (out / "fold_2").exists()


@pytest.mark.soak
def test_cross_validation_pools_all_folds(flags, zygote, tmp_path):
    """Each case is predicted once by a net that has not seen it; killed after a fold, the rest goes on."""
    out = tmp_path / "run"
    more = ["--folds", "3", "--cross_validate", "--epochs", "1", "--resume_from", "auto"]
    go(zygote, flags(out, more), 2)
    rows = read_rows(out / "predictions.csv")
    assert len(rows) == len({row["case"] for row in rows}) == 44
    assert {row["fold"] for row in rows} == {f"fold {k} of 3" for k in (1, 2, 3)}

    # the models of different folds are brought on one scale by their baseline hazards
    baselines = {f"fold {k} of 3": read_baseline(out / f"fold_{k}") for k in (1, 2, 3)}
    until = min(baseline["until"] for baseline in baselines.values())
    scale = {}
    for name, baseline in baselines.items():
        points = zip(baseline["time"], baseline["log_hazard"], strict=True)
        scale[name] = max(log_hazard for years, log_hazard in points if years <= until)
    risk = column(rows, "log_hazard") + np.array([scale[row["fold"]] for row in rows])

    # the scores are those of the pooled predictions
    summary = read_json(out / "summary.json")
    c_index = concordance(risk, column(rows, "event") == 1, column(rows, "time_years"))
    assert summary["val/c_index"] == pytest.approx(c_index, abs=1e-6)
    assert summary["val/ibs_km"] is not None
    each = [read_json(out / f"fold_{k}" / "summary.json")["val/c_index"] for k in (1, 2, 3)]
    assert summary["val/c_index_mean"] == pytest.approx(np.mean(each))

    # killed after two folds
    shutil.rmtree(out / "fold_3")
    (out / "summary.json").unlink()
    done = go(zygote, flags(out, more), 2)
    assert done.stdout.count("nothing left to train") == 2
    assert read_json(out / "summary.json")["val/c_index"] == summary["val/c_index"]

    # --overwrite, ended in the first fold, leaves nothing of the old folds for a resume to find
    ended = ["--folds", "3", "--cross_validate", "--overwrite", "--lr", "1e30", "--grad_clip", "0"]
    done = run(zygote, flags(out, [*ended, "--max_bad_steps", "1"]))
    assert done.code == 1
    assert not list(out.glob("fold_[23]/*.pt"))
    assert not (out / "summary.json").exists()

    # the folds of the table's columns
    columns = tmp_path / "columns"
    done = go(zygote, flags(columns, ["--cross_validate", "--max_steps", "1"]))
    assert "fold 5 of 5: Fold_5" in done.stdout


def test_a_fold_without_a_comparable_pair(flags, zygote, survival_data, tmp_path):
    """One validation case, or the only event last: metrics are undefined, and the run ends well all the same."""
    header, *rows = read_table(survival_data / "dataset.csv")
    train = [row for row in rows if row[4] == "train"]
    val = [row for row in rows if row[4] == "val"]
    alone = next(row for row in val if row[3] == "1")
    last = [*alone[:2], "2440", *alone[3:]]
    censored = [row for row in val if row[3] == "0"]

    for name, few in (("one", [alone]), ("late", [last, *censored])):
        table = tmp_path / f"{name}.csv"
        write_table(table, [header, *train, *few])
        out = tmp_path / name
        go(zygote, flags(out, ["--csv_path", table, "--data_dir", survival_data, "--epochs", "1"]), 2)
        assert read_json(out / "summary.json")["val/c_index"] is None
        assert (out / "model.safetensors").exists()


def test_eval_only_keeps_each_checkpoints_own_baseline(flags, zygote, one, survival_data, tmp_path):
    """Of another checkpoint: beside the best one's. On other training cases: none, and a warning."""
    out = tmp_path / "run"
    shutil.copytree(one, out)
    before = read_json(out / "baseline.json")
    other = ["--eval_only", "--resume_from", out / "last.pt"]
    go(zygote, flags(out, other))
    after = read_json(out / "baseline.json")
    assert before.items() <= after.items()

    # the same patients under other names
    header, *rows = read_table(survival_data / "dataset.csv")
    renamed = [[f"new {row[0]}", *row[1:]] for row in rows]
    table = tmp_path / "new.csv"
    write_table(table, [header, *renamed])
    elsewhere = [*other, "--csv_path", table, "--data_dir", survival_data]
    done = go(zygote, flags(tmp_path / "else", elsewhere))
    assert "was trained on other cases" in done.stdout
    assert read_json(out / "baseline.json") == after

    # without fold flags a fold's checkpoint is evaluated on its own fold
    folds = tmp_path / "folds"
    go(zygote, flags(folds, ["--folds", "4", "--val_fold", "2", "--max_steps", "1"]))
    before = (folds / "predictions.csv").read_text()
    go(zygote, flags(folds, ["--eval_only"]))
    assert (folds / "predictions.csv").read_text() == before


# --- weights to start from --------------------------------------------------------------------------------------------


def test_pretraining_then_survival(flags, zygote, tmp_path):
    """The backbone is kept, the head of another shape is new; while frozen only the head learns; then all does."""
    first = tmp_path / "first"
    done = go(zygote, flags(first, ["--task", "pretrain"]), 2)
    assert "mean square of 12 features" in done.stdout
    assert read_json(first / "summary.json")["val/r2"] is not None

    # survival, with the backbone frozen in the first epoch
    second = tmp_path / "second"
    start = ["--init", "pretrained", "--pretrained_path", first / "model.safetensors"]
    done = go(zygote, flags(second, [*start, "--freeze_epochs", "1", "--keep_last", "9"]), 2)
    assert "the head is new" in done.stdout
    before = read_weights(first / "best.pt")
    frozen = read_weights(second / "step_00000006.pt")
    after = read_weights(second / "step_00000012.pt")
    backbone = [name for name in frozen if name.startswith("backbone.")]
    assert all(torch.equal(before[name], frozen[name]) for name in backbone)
    assert not torch.equal(frozen["backbone.conv1.weight"], after["backbone.conv1.weight"])

    # from a checkpoint of the same kind, whose head fits
    third = tmp_path / "third"
    again = ["--init", "pretrained", "--pretrained_path", second / "best.pt", "--max_steps", "1"]
    assert "the head is kept" in go(zygote, flags(third, again)).stdout


@pytest.mark.parametrize("name", ["resnet10", pytest.param("resnet18", marks=pytest.mark.soak), "resnet50"])
def test_medicalnet_weights(flags, zygote, tmp_path, name):
    """Names and shapes as in MedicalNet's files: type A shortcuts below resnet50, `module.`, no head, batch norm."""
    from monai.networks import nets

    kind = "B" if name == "resnet50" else "A"
    published = getattr(nets, name)(
        spatial_dims=3,
        n_input_channels=1,
        feed_forward=False,
        shortcut_type=kind,
        bias_downsample=False,
        widen_factor=1 / 8,
    )
    weights = {}
    for part, value in published.state_dict().items():
        weights[f"module.{part}"] = torch.rand_like(value.float()).to(value.dtype)
    path = tmp_path / "medicalnet.pth"
    torch.save({"state_dict": weights}, path)

    # while the backbone is frozen, it stays as it was loaded
    more = ["--resnet", name, "--init", "pretrained", "--pretrained_path", path, "--freeze_epochs", "1"]
    out = tmp_path / "run"
    go(zygote, flags(out, [*more, "--max_steps", "1"]))
    trained = read_weights(out / "last.pt")
    for part in ("layer4.0.conv2.weight", "bn1.weight"):
        assert torch.equal(trained[f"backbone.{part}"], weights[f"module.{part}"])
    assert ("backbone.layer2.0.downsample.0.weight" in trained) == (kind == "B")
    go(zygote, flags(out, [*more, "--max_steps", "2", "--resume_from", "auto"]))


def test_shortcut_a_has_a_gradient():
    """MONAI's cuts it (`out.data`); the values are the same."""
    from tasks.survival.resnet import PaddedShortcut

    x = torch.rand(2, 3, 5, 4, 6, requires_grad=True)
    out = PaddedShortcut(8, 2)(x)
    assert out.shape == (2, 8, 3, 2, 3)
    assert torch.equal(out[:, :3], torch.nn.functional.avg_pool3d(x, 1, 2))
    out.sum().backward()
    assert x.grad.sum() == 2 * 3 * 3 * 2 * 3


def test_group_norm_is_everywhere():
    """MONAI's own `norm` argument reaches the first layer only."""
    import train_survival_distributed as tsd

    kinds = {"group": torch.nn.GroupNorm, "batch": torch.nn.BatchNorm3d}
    for norm, kind in kinds.items():
        words = ["--csv_path", "x", "--resnet", "resnet50", "--base_channels", "8", "--norm", norm]
        model = tsd.RiskNet(tsd.parse_args(words), "no", 1)
        layers = [type(module) for module in model.modules() if isinstance(module, tuple(kinds.values()))]
        assert len(layers) == 53
        assert all(issubclass(layer, kind) for layer in layers)


# --- killed, stopped, full --------------------------------------------------------------------------------------------

KILLED = ["--use_smart_cache", "--cache_rate", "0.5", "--replace_rate", "0.4", "--save_every", "2", "--epochs", "6"]
KILLED += ["--cox_memory", "9", "--resume_from", "auto", "--batch_size", "4", "--log_every", "3"]


@pytest.fixture(scope="module")
def whole(flags, zygote, tmp_path_factory) -> Path:
    """The uninterrupted run of two processes with SmartCache."""
    out = tmp_path_factory.mktemp("whole") / "run"
    go(zygote, flags(out, KILLED), 2)
    return out


def test_kill_and_resume_with_smart_cache(flags, zygote, whole, tmp_path):
    """A worker killed, then both told to stop: the rest is that of the unbroken run, bit for bit."""
    out = tmp_path / "run"
    words = flags(out, KILLED)
    kill_then_stop(zygote, [SURVIVAL, *words], out, 6, 12)
    go(zygote, words, 2)
    assert curve(out) == curve(whole)

    # the weights, the memory of log-hazards and the predictions
    resumed = torch.load(out / "last.pt", weights_only=True)
    unbroken = torch.load(whole / "last.pt", weights_only=True)
    for name, value in resumed["model"].items():
        assert torch.equal(value, unbroken["model"][name])
    assert resumed["memory"]["rows"] == unbroken["memory"]["rows"]
    assert (out / "predictions.csv").read_text() == (whole / "predictions.csv").read_text()


def test_resume_at_another_world_size(flags, zygote, one, tmp_path):
    """Begun on 2 processes, gone on with 3, ended by 1: the curve of one process throughout."""
    out = tmp_path / "run"
    alone = tmp_path / "alone"
    flat = ["--scheduler", "constant", "--resume_from", "auto"]
    go(zygote, flags(alone, flat))
    for ranks, until in ((2, "3"), (3, "8"), (1, "0")):
        go(zygote, flags(out, [*flat, "--max_steps", until]), ranks)
    assert off(training(out), training(alone)) < 1e-5


@pytest.mark.soak
def test_signal_exit_codes_in_one_process(flags, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, SURVIVAL, *flags(out, ["--epochs", "500", "--save_every", "1"])]
    process = Run(command, SURVIVAL, out)
    process.wait_for_step(2)
    process.kill("launcher", signal.SIGTERM)
    assert process.end() == 143
    assert torch.load(out / "last.pt", weights_only=True)["step"] == lines(out)[-1]["step"]


def test_a_diverging_run_stops(flags, zygote, tmp_path):
    more = ["--lr", "1e30", "--grad_clip", "0", "--max_bad_steps", "3", "--epochs", "9"]
    done = run(zygote, flags(tmp_path / "run", more))
    assert done.code == 1
    assert re.fullmatch(r"error: 3 steps in a row had a non-finite loss.*\n", done.stderr)


def test_a_full_disk_for_the_cache_is_no_error(flags, zygote, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        go(zygote, flags(tmp_path / "run", ["--max_steps", "2", "--cache_dir", folder]))
    finally:
        subprocess.run(["umount", folder], check=True)


def test_out_of_memory_names_the_flags_to_change(flags, zygote, tmp_path):
    """Of a really limited memory: the volumes of a step do not fit."""
    big = ["--image_size", "256", "256", "128", "--batch_size", "16", "--max_steps", "1", "--cache", "none"]
    done = run(zygote, flags(tmp_path / "run", big), address_space=int(0.4 * 2**30))
    assert done.code == 1
    advice = r"try --batch_size 8 --gradient_accumulation_steps 2 \(the same result\), a smaller --image_size"
    assert re.fullmatch(rf"error: out of memory at --batch_size 16 over 1 processes; {advice}.*\n", done.stderr)


@pytest.mark.soak
def test_ten_kills_with_smart_cache(flags, whole, tmp_path):
    """Ten kill -9 at random moments, of a worker, rank 0, all, the launcher; each resumed to the end."""
    chance = random.Random(4)
    for k in range(10):
        out = tmp_path / f"run{k}"
        who = ("worker", "rank0", "all", "launcher")[k % 4]
        step = chance.randrange(0, 22)
        delay = chance.uniform(0, 0.4)
        # before the second step there is the start of the processes to wait for
        patience = 6 if step < 2 else 0
        interrupt([SURVIVAL, *flags(out, KILLED)], out, who, step, delay + patience)
        reached = sorted(path.name for path in out.glob("step_*.pt"))

        # resumed to the end
        words = [*torchrun(2), SURVIVAL, *flags(out, KILLED)]
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=200)
        same = curve(out) == curve(whole)
        print(f"kill -9 of {who} after step {step} + {delay:.2f} s ({reached[-1:] or 'no checkpoint'}): same {same}")
        assert same
