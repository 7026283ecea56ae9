"""train_survival_distributed.py: the same answer from any number of processes, and from a run that was killed."""

import csv
import hashlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from background import Run, interrupt
from conftest import ROOT, kill_then_stop, torchrun

from tasks.survival import metrics as sm

SURVIVAL = str(ROOT / "train_survival_distributed.py")
TINY = ["--resnet", "resnet10", "--base_channels", "8", "--image_size", "12", "12", "8", "--lr", "1e-3"]
TINY += ["--batch_size", "6", "--epochs", "2", "--log_every", "1", "--num_workers", "0", "--eval_years", "1", "3", "9"]


@pytest.fixture(scope="session")
def flags(survival_data, tmp_path_factory):
    """flags(out, *more): the arguments of a small run in fp32 that logs every step."""
    cache = tmp_path_factory.mktemp("cache")

    def make(out: Path, *more) -> list[str]:
        words = ["--csv_path", survival_data / "dataset.csv", "--cache_dir", cache, *TINY, "--log_dir", out, *more]
        return [str(word) for word in words]

    return make


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[tuple]:
    """(step, loss, events, gradient norm) of training lines, (step, loss, C) of evaluations, in file order."""
    names = [("train/loss", "train/events", "train/grad_norm"), ("val/loss", "val/c_index", "val/auc")]
    return [(line["step"], *(line.get(n) for n in group)) for line in lines(out) for group in names if group[0] in line]


def training(out: Path) -> list[tuple]:
    return [row for row, line in zip(curve(out), lines(out), strict=True) if "train/loss" in line]


def off(a: list[tuple], b: list[tuple]) -> float:
    """Largest difference of the losses, relative where above 1; events are equal, gradient norms nearly so (AdamW's
    first steps blow the rounding of vanishing gradients up)."""
    assert [row[:1] + row[2:3] for row in a] == [row[:1] + row[2:3] for row in b]
    assert all(abs(x[3] - y[3]) < 1e-3 * max(1.0, y[3]) for x, y in zip(a, b, strict=True))
    return max(abs(x[1] - y[1]) / max(1.0, abs(y[1])) for x, y in zip(a, b, strict=True))


def go(zygote, words: list[str], ranks: int = 1, figures: bool = False):
    done = zygote(SURVIVAL, *words, ranks=ranks, figures=figures)
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="session")
def one(flags, zygote, tmp_path_factory) -> Path:
    """The run of one process: 34 cases, 6 a step, the last step of an epoch has 4."""
    out = tmp_path_factory.mktemp("one") / "run"
    go(zygote, flags(out), figures=True)
    return out


@pytest.mark.parametrize(
    ("ranks", "more"), [(2, []), (3, []), (2, ["--batch_size", "2", "--gradient_accumulation_steps", "3"])]
)
def test_curves_at_other_world_sizes(flags, zygote, one, tmp_path, ranks, more):
    """Also with accumulation, where the risk set is still that of the whole step, and the end of an epoch uneven."""
    out = tmp_path / "run"
    go(zygote, flags(out, *more), ranks)
    assert len(training(one)) == 12
    assert off(training(out), training(one)) < 1e-5


@pytest.mark.parametrize(
    "more",
    [
        ["--event_balanced", "--ties", "breslow", "--cox_memory", "10"],
        ["--task", "pretrain", "--freeze_epochs", "1"],
        ["--folds", "4", "--val_fold", "3", "--scheduler", "constant", "--warmup_steps", "3", "--orientation", "RAS"],
    ],
)
def test_other_settings_at_two_processes(flags, zygote, tmp_path, more):
    for ranks in (1, 2):
        go(zygote, flags(tmp_path / str(ranks), "--optimizer", "sgd", *more), ranks)
    one, two = (training(tmp_path / name) for name in ("1", "2"))
    assert len(one) >= 10
    assert off(two, one) < 1e-5
    rates = [[line.get("train/lr") for line in lines(tmp_path / name)] for name in ("1", "2")]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("name", ["plain", *(pytest.param(n, marks=pytest.mark.soak) for n in ("launcher", "nodes"))])
def test_guide_commands_end_in_the_same_curve(flags, zygote, tmp_path, name):
    """Quick start, basic, and the multi-node recipe by two agents of torch.distributed.launch, all for real."""
    reference = tmp_path / "reference"
    go(zygote, flags(reference, "--epochs", "1"), 2)
    plain = [sys.executable, SURVIVAL, *flags(tmp_path / "plain", "--epochs", "1", "--world_size", "2")]
    launcher = [ROOT / "launch_distributed_training.sh", "--script", "train_survival_distributed.py", "--num_gpus", "2"]
    launcher += flags(tmp_path / "launcher", "--epochs", "1", "--amp")
    commands: dict[str, list] = {"plain": [plain], "launcher": [launcher], "nodes": []}
    agent = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=1", "--nnodes=2"]
    agent += ["--master_addr=127.0.0.1", "--master_port=12355"]
    for node in (0, 1):
        commands["nodes"].append([*agent, f"--node_rank={node}", SURVIVAL, *flags(tmp_path / "nodes", "--epochs", "1")])
    running = [
        subprocess.Popen(
            [str(w) for w in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands[name]
    ]
    for process in running:
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0, text[-3000:]
    assert curve(tmp_path / name) == curve(reference)


# --- what a run leaves behind -----------------------------------------------------------------------------------------


def test_metrics_at_1_2_3_processes_and_against_scikit_survival(flags, zygote, one, survival_data, tmp_path):
    """10 validation cases: uneven, and with 3 ranks some have a batch less. The files are equal to the byte."""
    from sksurv.metrics import concordance_index_censored, cumulative_dynamic_auc
    from sksurv.util import Surv

    found = []
    for ranks in (1, 2, 3):
        out = tmp_path / str(ranks)
        done = go(zygote, flags(out, "--eval_only", "--resume_from", one / "best.pt"), ranks)
        assert "undefined" in done.stdout  # 9 years are beyond the follow-up
        found.append([(out / name).read_text() for name in ("eval_val.json", "predictions.csv")])
    assert found[0] == found[1] == found[2]
    metrics = json.loads(found[0][0])
    with open(tmp_path / "1" / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    parts = {name: [row for row in rows if row["fold"] == name] for name in ("val", "train")}
    assert {name: len(part) for name, part in parts.items()} == {"val": 10, "train": 34}
    value = {
        n: [np.array([float(r[c]) for r in part]) for c in ("event", "time_years", "log_hazard")]
        for n, part in parts.items()
    }
    event, when, risk = value["val"]
    assert metrics["val/c_index"] == pytest.approx(concordance_index_censored(event == 1, when, risk)[0], abs=1e-6)
    surv = {n: Surv.from_arrays(v[0] == 1, v[1]) for n, v in value.items()}
    auc, _ = cumulative_dynamic_auc(surv["train"], surv["val"], risk, [3.0])
    assert metrics["val/auc/3y"] == pytest.approx(auc[0], abs=1e-6)
    assert metrics["val/auc/9y"] is None
    assert all(row["S(9y)"] == "" and 0 < float(row["S(3y)"]) < float(row["S(1y)"]) <= 1 for row in rows)
    with open(survival_data / "dataset.csv", newline="") as file:
        table = {row["case_num"]: row for row in csv.DictReader(file)}
    assert all(table[row["case"]]["Fold_1"] == row["fold"] for row in rows)
    true = np.array([float(table[row["case"]]["true_log_hazard"]) for row in parts["val"]])
    assert metrics["val/c_index_true"] == pytest.approx(concordance_index_censored(event == 1, when, true)[0], abs=1e-6)


def test_files_of_a_run(one):
    names = {path.name for path in one.iterdir()}
    assert {"args.yaml", "metrics.jsonl", "logs", "last.pt", "best.pt", "manifest.sha256", "summary.json"} <= names
    assert {"model.safetensors", "predictions.csv", "baseline.json"} <= names
    pictures = {path.stem for path in (one / "figures").glob("*.png")}
    assert pictures == {"train_inputs", "val_survival", "val_cases", "curves"}
    summary = json.loads((one / "summary.json").read_text())
    assert {"val/c_index", "val/c_index_true", "val/ibs", "val/ibs_km", "val/c_index_low", "val/c_index_uno"} <= set(
        summary
    )
    assert (summary["steps"], summary["world_size"], summary["effective_batch_size"]) == (12, 1, 6)
    assert all(not isinstance(value, dict | list) for value in summary.values())


def test_predict_scores_new_patients(flags, zygote, one, survival_data, tmp_path):
    """Without outcomes in the table; the same numbers as in the run; a foreign baseline is not used."""
    with open(survival_data / "dataset.csv", newline="") as file:
        rows = list(csv.DictReader(file))[:7]
    with open(tmp_path / "new.csv", "w", newline="") as file:
        csv.writer(file).writerows([["patient_id", "path"], *([f"P{r['case_num']}", r["NIFTI Path"]] for r in rows)])
    run = tmp_path / "run"
    shutil.copytree(one, run)
    words = [
        "--predict",
        tmp_path / "new.csv",
        "--data_dir",
        survival_data,
        "--cache_dir",
        tmp_path / "cache",
        "--log_dir",
        run,
    ]
    words += ["--eval_years", "1", "3", "9"]
    for ranks in (1, 2):
        go(zygote, [str(word) for word in words], ranks)
        with open(run / "predictions_new.csv", newline="") as file:
            new = {row["case"]: row for row in csv.DictReader(file)}
        with open(one / "predictions.csv", newline="") as file:
            old = {row["case"]: row for row in csv.DictReader(file)}
        for row in rows:
            case = row["case_num"]
            assert float(new[f"P{case}"]["log_hazard"]) == pytest.approx(float(old[case]["log_hazard"]), abs=1e-5)
            assert float(new[f"P{case}"]["S(3y)"]) == pytest.approx(float(old[case]["S(3y)"]), abs=1e-5)
            assert new[f"P{case}"]["event"] == new[f"P{case}"]["S(9y)"] == ""
    baseline = json.loads((run / "baseline.json").read_text())
    assert len(baseline) == 1
    (run / "baseline.json").write_text(json.dumps({"0" * 64: next(iter(baseline.values()))}))
    assert "no baseline hazard" in go(zygote, [str(word) for word in words]).stdout
    with open(run / "predictions_new.csv", newline="") as file:
        assert all(row["S(1y)"] == "" for row in csv.DictReader(file))


def checkpoint_predictions(table: Path, path: Path) -> dict[str, dict[str, tuple]]:
    """{fold: {case: (log-hazard, event, years)}} of a checkpoint of a --folds 3 run, without the script's evaluation.

    fold: "val" or "train".
    """
    import train_survival_distributed as tsd
    from tasks.survival import data as sd

    words = ["--csv_path", str(table), *TINY, "--folds", "3", "--cross_validate"]
    args = tsd.parse_args(words)
    checkpoint = torch.load(path, weights_only=True)
    model = tsd.RiskNet(args, "no", 1)
    model.load_state_dict(checkpoint["model"])
    model.eval()
    cohort = sd.read_cohort(str(table))
    volumes = sd.Volumes(args.image_size, tuple(args.hu_window))
    trained = set(checkpoint["trained_cases"])
    found: dict[str, dict[str, tuple]] = {"val": {}, "train": {}}
    for i, case in enumerate(cohort.case):
        with torch.no_grad():
            value = float(model(volumes.get(cohort.path[i])[None].float())[0, 0])
        found["train" if case in trained else "val"][case] = value, bool(cohort.event[i]), float(cohort.time[i])
    return found


def pooled_c_index(folds: list[dict]) -> float:
    """Harrell's C over all folds by scikit-survival: its Breslow baselines bring the log-hazards on one scale."""
    from sksurv.linear_model.coxph import BreslowEstimator
    from sksurv.metrics import concordance_index_censored

    trained = [[np.array(column) for column in zip(*fold["train"].values(), strict=True)] for fold in folds]
    until = min(years.max() for _, _, years in trained)
    risks, events, times = [], [], []
    for fold, (log_hazard, event, years) in zip(folds, trained, strict=True):
        baseline = BreslowEstimator().fit(log_hazard, event, years).cum_baseline_hazard_(until)
        risk, event, years = (np.array(column) for column in zip(*fold["val"].values(), strict=True))
        risks.append(risk + np.log(baseline))
        events.append(event)
        times.append(years)
    return concordance_index_censored(np.concatenate(events), np.concatenate(times), np.concatenate(risks))[0]


def test_cross_validation_is_scored_by_the_last_epoch(flags, zygote, survival_data, tmp_path):
    """best.pt is chosen on the very fold that is scored; its score stands beside the last epoch's, and says so.

    Stopped in the second fold and resumed, all numbers are the same.
    """
    out, stopped = tmp_path / "run", tmp_path / "stopped"
    more = ["--folds", "3", "--cross_validate", "--epochs", "4", "--lr", "1e-2", "--seed", "1"]
    done = go(zygote, flags(out, *more))
    summary = json.loads((out / "summary.json").read_text())
    value = {}
    for name in ("last", "best"):
        folds = [
            checkpoint_predictions(survival_data / "dataset.csv", out / f"fold_{k}" / f"{name}.pt") for k in (1, 2, 3)
        ]
        value[name] = pooled_c_index(folds)
        if name == "last":
            last = folds
    assert summary["val/c_index"] == pytest.approx(value["last"], abs=1e-6)
    assert summary["val/c_index_best"] == pytest.approx(value["best"], abs=1e-6)
    assert value["best"] > value["last"] + 0.005  # otherwise this test says nothing
    assert "3 folds pooled, last epoch" in done.stdout
    assert "c_index_best: of each fold's best.pt, chosen on the same fold and therefore optimistic" in done.stdout

    # predictions and baseline hazards are those of the scored weights
    with open(out / "predictions.csv", newline="") as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    for k, fold in enumerate(last, start=1):
        digest = hashlib.sha256((out / f"fold_{k}" / "last.pt").read_bytes()).hexdigest()
        assert digest in json.loads((out / f"fold_{k}" / "baseline.json").read_text())
        with open(out / f"fold_{k}" / "predictions.csv", newline="") as file:
            own = {row["case"]: row for row in csv.DictReader(file)}
        for case, (log_hazard, *_) in fold["val"].items():
            assert float(rows[case]["log_hazard"]) == pytest.approx(log_hazard, abs=1e-5)
            assert own[case]["log_hazard"] == rows[case]["log_hazard"]
            assert own[case]["S(3y)"] == rows[case]["S(3y)"]
        own_summary = json.loads((out / f"fold_{k}" / "summary.json").read_text())
        assert own_summary["val/c_index"] == summary[f"val/c_index/fold_{k}"]
        assert own_summary["val/c_index_best"] == summary[f"val/c_index_best/fold_{k}"]
        assert own_summary["val/c_index_best"] >= own_summary["val/c_index"]

    # the second fold ends after its first epoch, then the whole goes on
    shutil.copytree(out, stopped)
    shutil.rmtree(stopped / "fold_3")
    for path in (stopped / "fold_2").glob("*.pt"):
        if path.name not in ("step_00000015.pt", "best.pt"):
            path.unlink()
    (stopped / "summary.json").unlink()
    go(zygote, flags(stopped, *more, "--resume_from", "auto"))
    again = json.loads((stopped / "summary.json").read_text())
    assert {name: v for name, v in again.items() if name != "seconds"} == {
        name: v for name, v in summary.items() if name != "seconds"
    }
    assert (stopped / "predictions.csv").read_text() == (out / "predictions.csv").read_text()


@pytest.mark.soak
def test_cross_validation_pools_all_folds(flags, zygote, tmp_path):
    """Each case is predicted once by a net that has not seen it; killed after a fold, the rest goes on."""
    out = tmp_path / "run"
    more = ["--folds", "3", "--cross_validate", "--epochs", "1", "--resume_from", "auto"]
    go(zygote, flags(out, *more), 2)
    with open(out / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len({row["case"] for row in rows}) == 44
    assert {row["fold"] for row in rows} == {f"fold {k} of 3" for k in (1, 2, 3)}
    event, when, risk = (np.array([float(row[c]) for row in rows]) for c in ("event", "time_years", "log_hazard"))
    summary = json.loads((out / "summary.json").read_text())
    baselines = {}
    for k in (1, 2, 3):
        digest = hashlib.sha256((out / f"fold_{k}" / "last.pt").read_bytes()).hexdigest()
        baselines[f"fold {k} of 3"] = json.loads((out / f"fold_{k}" / "baseline.json").read_text())[digest]
    last = min(baseline["until"] for baseline in baselines.values())
    scale = {
        name: max(h for t, h in zip(b["time"], b["log_hazard"], strict=True) if t <= last)
        for name, b in baselines.items()
    }
    risk = risk + np.array([scale[row["fold"]] for row in rows])  # nets of different folds, brought on one scale
    assert summary["val/c_index"] == pytest.approx(sm.concordance(risk, event == 1, when), abs=1e-6)
    assert summary["val/ibs_km"] is not None
    each = [json.loads((out / f"fold_{k}" / "summary.json").read_text())["val/c_index"] for k in (1, 2, 3)]
    assert summary["val/c_index_mean"] == pytest.approx(np.mean(each))
    before = summary["val/c_index"]
    shutil.rmtree(out / "fold_3")
    (out / "summary.json").unlink()
    done = go(zygote, flags(out, *more), 2)
    assert done.stdout.count("nothing left to train") == 2
    assert json.loads((out / "summary.json").read_text())["val/c_index"] == before
    # --overwrite, ended in the first fold, leaves nothing of the old folds for a resume to find
    ended = zygote(
        SURVIVAL,
        *flags(out, "--folds", "3", "--cross_validate", "--overwrite", "--lr", "1e30", "--grad_clip", "0"),
        "--max_bad_steps",
        "1",
    )
    assert ended.code == 1
    assert not list(out.glob("fold_[23]/*.pt"))
    assert not (out / "summary.json").exists()
    columns = tmp_path / "columns"
    done = go(zygote, flags(columns, "--cross_validate", "--max_steps", "1"))
    assert "fold 5 of 5: Fold_5" in done.stdout


def test_a_fold_without_a_comparable_pair(flags, zygote, survival_data, tmp_path):
    """One validation case, or the only event last: metrics are undefined, and the run ends well all the same."""
    with open(survival_data / "dataset.csv", newline="") as file:
        header, *rows = csv.reader(file)
    train, val = ([row for row in rows if row[4] == name] for name in ("train", "val"))
    alone = next(row for row in val if row[3] == "1")
    last = [*alone[:2], "2440", *alone[3:]]
    for name, few in (("one", [alone]), ("late", [last, *(row for row in val if row[3] == "0")])):
        table = tmp_path / f"{name}.csv"
        with open(table, "w", newline="") as file:
            csv.writer(file).writerows([header, *train, *few])
        out = tmp_path / name
        go(zygote, flags(out, "--csv_path", table, "--data_dir", survival_data, "--epochs", "1"), 2)
        summary = json.loads((out / "summary.json").read_text())
        assert summary["val/c_index"] is None
        assert (out / "model.safetensors").exists()


def test_eval_only_keeps_each_checkpoints_own_baseline(flags, zygote, one, survival_data, tmp_path):
    """Of another checkpoint: beside the best one's. On other training cases: none, and a warning."""
    run = tmp_path / "run"
    shutil.copytree(one, run)
    before = json.loads((run / "baseline.json").read_text())
    other = ["--eval_only", "--resume_from", run / "last.pt"]
    go(zygote, flags(run, *other))
    after = json.loads((run / "baseline.json").read_text())
    assert before.items() <= after.items()
    with open(survival_data / "dataset.csv", newline="") as file:
        header, *rows = csv.reader(file)
    table = tmp_path / "new.csv"
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([header, *([f"new {row[0]}", *row[1:]] for row in rows)])
    done = go(zygote, flags(tmp_path / "else", *other, "--csv_path", table, "--data_dir", survival_data))
    assert "was trained on other cases" in done.stdout
    assert json.loads((run / "baseline.json").read_text()) == after
    # without fold flags a fold's checkpoint is evaluated on its own fold
    go(zygote, flags(tmp_path / "folds", "--folds", "4", "--val_fold", "2", "--max_steps", "1"))
    before = (tmp_path / "folds" / "predictions.csv").read_text()
    go(zygote, flags(tmp_path / "folds", "--eval_only"))
    assert (tmp_path / "folds" / "predictions.csv").read_text() == before


# --- weights to start from --------------------------------------------------------------------------------------------


def test_pretraining_then_survival(flags, zygote, tmp_path):
    """The backbone is kept, the head of another shape is new; while frozen only the head learns; then all does."""
    first = tmp_path / "first"
    done = go(zygote, flags(first, "--task", "pretrain"), 2)
    assert "mean square of 12 features" in done.stdout
    assert json.loads((first / "summary.json").read_text())["val/r2"] is not None
    start = ["--init", "pretrained", "--pretrained_path", first / "model.safetensors", "--freeze_epochs", "1"]
    second = tmp_path / "second"
    done = go(zygote, flags(second, *start, "--keep_last", "9"), 2)
    assert "the head is new" in done.stdout
    before = torch.load(first / "best.pt", weights_only=True)["model"]
    frozen = torch.load(second / "step_00000006.pt", weights_only=True)["model"]
    after = torch.load(second / "step_00000012.pt", weights_only=True)["model"]
    backbone = [name for name in frozen if name.startswith("backbone.")]
    assert all(torch.equal(before[name], frozen[name]) for name in backbone)
    assert not torch.equal(frozen["backbone.conv1.weight"], after["backbone.conv1.weight"])
    third = tmp_path / "third"
    again = ["--init", "pretrained", "--pretrained_path", second / "best.pt", "--max_steps", "1"]
    assert "the head is kept" in go(zygote, flags(third, *again)).stdout


@pytest.mark.parametrize("net", ["resnet10", pytest.param("resnet18", marks=pytest.mark.soak), "resnet50"])
def test_medicalnet_weights(flags, zygote, tmp_path, net):
    """Names and shapes as in MedicalNet's files: type A shortcuts below resnet50, `module.`, no head, batch norm."""
    from monai.networks import nets

    kind = "B" if net == "resnet50" else "A"
    whole = getattr(nets, net)(
        spatial_dims=3,
        n_input_channels=1,
        feed_forward=False,
        shortcut_type=kind,
        bias_downsample=False,
        widen_factor=1 / 8,
    )
    weights = {
        f"module.{name}": torch.rand_like(value.float()).to(value.dtype) for name, value in whole.state_dict().items()
    }
    torch.save({"state_dict": weights}, tmp_path / "medicalnet.pth")
    more = [
        "--resnet",
        net,
        "--init",
        "pretrained",
        "--pretrained_path",
        tmp_path / "medicalnet.pth",
        "--freeze_epochs",
        "1",
    ]
    out = tmp_path / "run"
    go(zygote, flags(out, *more, "--max_steps", "1"))
    got = torch.load(out / "last.pt", weights_only=True)["model"]
    assert torch.equal(got["backbone.layer4.0.conv2.weight"], weights["module.layer4.0.conv2.weight"])
    assert torch.equal(got["backbone.bn1.weight"], weights["module.bn1.weight"])
    assert ("backbone.layer2.0.downsample.0.weight" in got) == (kind == "B")
    go(zygote, flags(out, *more, "--max_steps", "2", "--resume_from", "auto"))


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

    for norm, kind in (("group", torch.nn.GroupNorm), ("batch", torch.nn.BatchNorm3d)):
        args = tsd.parse_args(["--csv_path", "x", "--resnet", "resnet50", "--base_channels", "8", "--norm", norm])
        model = tsd.RiskNet(args, "no", 1)
        other = {torch.nn.GroupNorm, torch.nn.BatchNorm3d} - {kind}
        assert sum(isinstance(module, kind) for module in model.modules()) == 53
        assert not any(isinstance(module, tuple(other)) for module in model.modules())


# --- killed, stopped, full --------------------------------------------------------------------------------------------

KILLED = ["--use_smart_cache", "--cache_rate", "0.5", "--replace_rate", "0.4", "--save_every", "2", "--epochs", "6"]
KILLED += ["--cox_memory", "9", "--resume_from", "auto", "--batch_size", "4", "--log_every", "3"]
STEPS = 30  # 17 cases a rank, 8 in its cache, 2 a step: 4 steps, and with drop_last off no rest


@pytest.fixture(scope="module")
def whole(flags, zygote, tmp_path_factory) -> Path:
    """The uninterrupted run of two processes with SmartCache."""
    out = tmp_path_factory.mktemp("whole") / "run"
    go(zygote, flags(out, *KILLED), 2)
    return out


def test_kill_and_resume_with_smart_cache(flags, zygote, whole, tmp_path):
    """A worker killed, then both told to stop: the rest is that of the unbroken run, bit for bit."""
    out = tmp_path / "run"
    words = flags(out, *KILLED)
    kill_then_stop(zygote, [SURVIVAL, *words], out, 6, 12)
    go(zygote, words, 2)
    assert curve(out) == curve(whole)
    a, b = (torch.load(folder / "last.pt", weights_only=True) for folder in (out, whole))
    assert all(torch.equal(value, b["model"][name]) for name, value in a["model"].items())
    assert a["memory"]["rows"] == b["memory"]["rows"]
    assert (out / "predictions.csv").read_text() == (whole / "predictions.csv").read_text()


def test_resume_at_another_world_size(flags, zygote, one, tmp_path):
    """Begun on 2 processes, gone on with 3, ended by 1: the curve of one process throughout."""
    out, alone = tmp_path / "run", tmp_path / "alone"
    flat = ["--scheduler", "constant", "--resume_from", "auto"]
    go(zygote, flags(alone, *flat))
    for ranks, until in ((2, "3"), (3, "8"), (1, "0")):
        go(zygote, flags(out, *flat, "--max_steps", until), ranks)
    assert off(training(out), training(alone)) < 1e-5


@pytest.mark.soak
def test_signal_exit_codes_in_one_process(flags, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, SURVIVAL, *flags(out, "--epochs", "500", "--save_every", "1")]
    run = Run(command, SURVIVAL, out)
    run.wait_for_step(2)
    run.kill("launcher", signal.SIGTERM)
    assert run.end() == 143
    assert torch.load(out / "last.pt", weights_only=True)["step"] == lines(out)[-1]["step"]


def test_a_diverging_run_stops(flags, zygote, tmp_path):
    done = zygote(
        SURVIVAL, *flags(tmp_path / "run", "--lr", "1e30", "--grad_clip", "0", "--max_bad_steps", "3", "--epochs", "9")
    )
    assert done.code == 1
    assert re.fullmatch(r"error: 3 steps in a row had a non-finite loss.*\n", done.stderr)


def test_a_full_disk_for_the_cache_is_no_error(flags, zygote, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        go(zygote, [*flags(tmp_path / "run", "--max_steps", "2"), "--cache_dir", str(folder)])
    finally:
        subprocess.run(["umount", folder], check=True)


def test_out_of_memory_names_the_flags_to_change(flags, zygote, tmp_path):
    """Of a really limited memory: the volumes of a step do not fit."""
    big = ["--image_size", "256", "256", "128", "--batch_size", "16", "--max_steps", "1", "--cache", "none"]
    done = zygote(SURVIVAL, *flags(tmp_path / "run", *big), address_space=int(0.4 * 2**30))
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
        step, delay = chance.randrange(0, 22), chance.uniform(0, 0.4)
        interrupt([SURVIVAL, *flags(out, *KILLED)], out, who, step, delay + (6 if step < 2 else 0))
        reached = sorted(path.name for path in out.glob("step_*.pt"))
        words = [*torchrun(2), SURVIVAL, *flags(out, *KILLED)]
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=200)
        same = curve(out) == curve(whole)
        print(f"kill -9 of {who} after step {step} + {delay:.2f} s ({reached[-1:] or 'no checkpoint'}): same {same}")
        assert same
