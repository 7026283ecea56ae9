"""train_mimic_cxr.py's evaluations: intervals, calibration, thresholds, blind scores, and how often they are made."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, at_step
from test_mimic_cxr import STUDIES, metrics_of, open_index, read_sets, write_release

from old.interval_utils import interval
from tasks.mimic_cxr import blind, calibration
from tasks.mimic_cxr.answers import CHEXPERT, HEADS
from tasks.mimic_cxr.data import note_trained_labels
from tasks.mimic_cxr.metrics import Judged, area, auroc_intervals
from tasks.mimic_cxr.report import BLIND, write_predictions

MIMIC = str(ROOT / "train_mimic_cxr.py")
SHORT = "--max_samples 60 --batch_size 8 --learning_rate 1e-2 --warmup_steps 0 --dropout 0 --log_every 1".split()


@pytest.fixture
def run_mimic(zygote):
    """run_mimic(flags, ...): the script with these flags, which must end well."""

    def run(flags: list, **options):
        done = zygote(MIMIC, flags, **options)
        assert done.code == 0, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> tuple[Path, Path]:
    return write_release(tmp_path_factory.mktemp("release"), STUDIES)


def summary_of(run_folder: Path) -> dict:
    return json.loads((run_folder / "summary.json").read_text())


def evaluated(run_folder: Path) -> dict:
    """The summary's metrics of validation and test."""
    summary = summary_of(run_folder)
    return {name: value for name, value in summary.items() if name.startswith(("val/", "test/"))}


# --- against independent references -----------------------------------------------------------------------------------


def expected_error(probability: np.ndarray, right: np.ndarray) -> float:
    """The expected calibration error by its definition, bin after bin."""
    total = 0.0
    for number in range(15):
        inside = (probability >= number / 15) & (probability < (number + 1) / 15)
        if number == 14:
            inside |= probability == 1
        if inside.any():
            distance = abs(probability[inside].mean() - right[inside].mean())
            total += distance * inside.mean()
    return total


def made_up_answers(count: int) -> dict[str, np.ndarray]:
    """Answers of two heads with random probabilities, the likeliest being given."""
    rng = np.random.default_rng(0)
    head = rng.choice([0, 3], count)
    p = np.zeros((count, 26), np.float32)
    for place in range(count):
        classes = len(HEADS[list(HEADS)[head[place]]])
        p[place, :classes] = rng.dirichlet(np.ones(classes))
    target = rng.integers(0, 2, count)
    return {"head": head, "p": p, "predicted": p.argmax(1), "target": target}


def judged(scores: np.ndarray, truth: np.ndarray) -> Judged:
    """A label of as many studies."""
    return Judged(
        torch.from_numpy(scores),
        torch.from_numpy(truth),
        np.arange(len(truth)),
    )


def test_calibration_errors_are_those_of_their_definition():
    rows = made_up_answers(500)
    rng = np.random.default_rng(1)
    scores = rng.random(80).astype(np.float32)
    truth = (rng.random(80) < scores).astype(np.int64)
    labels = {
        "Edema": judged(scores, truth),
        "Fracture": judged(scores[:0], truth[:0]),
    }
    got = calibration.calibration_metrics("test", rows, labels)

    # the answers, in all and of a head
    confidence = rows["p"].max(1)
    right = rows["predicted"] == rows["target"]
    assert got["test/vqa_ece"] == pytest.approx(expected_error(confidence, right), abs=1e-6)
    some = rows["head"] == 3
    assert got["test/vqa_ece/severity"] == pytest.approx(expected_error(confidence[some], right[some]), abs=1e-6)
    assert "test/vqa_ece/region" not in got

    # the labels
    assert got["test/chexpert_ece/Edema"] == pytest.approx(expected_error(scores, truth), abs=1e-6)
    assert got["test/chexpert_ece/Fracture"] is None
    assert got["test/chexpert_ece"] == got["test/chexpert_ece/Edema"]

    # the figure's bins are the same
    bins = calibration.reliability(confidence, right)
    distance = np.abs(bins.probability - bins.share)
    error = np.average(distance, weights=bins.count)
    assert error == pytest.approx(got["test/vqa_ece"], abs=1e-6)
    # the last one holds what is certain, too
    bins = calibration.reliability(np.array([0.9, 0.95, 1.0]), np.array([1, 1, 0]))
    assert bins.count.tolist() == [1, 2]


def test_thresholds_are_those_of_the_roc_curve():
    """The best balanced accuracy of 30 random decisions is the best of scikit-learn's curve."""
    from sklearn.metrics import balanced_accuracy_score, roc_curve

    rng = np.random.default_rng(0)
    for _ in range(30):
        positives = rng.integers(1, 39)
        truth = np.where(rng.permutation(40) < positives, 1, 0)
        scores = truth * 0.2 + rng.random(40) * 0.8
        decision = calibration.Decision(scores.round(1), truth)
        scores = decision.scores
        threshold = calibration.best_threshold(decision)
        false_rate, true_rate, _ = roc_curve(truth, scores, drop_intermediate=False)
        best = ((1 + true_rate - false_rate) / 2).max()
        got = balanced_accuracy_score(truth, scores >= threshold)
        assert got == pytest.approx(best)
        measures = calibration.judge_decision(decision, threshold)
        assert measures["balanced"] == pytest.approx(got)

    # of equally good ones the one nearest to a half
    scores = np.array([0.1, 0.3, 0.6, 0.9])
    equal = calibration.Decision(scores, np.array([0, 1, 0, 1]))
    assert calibration.best_threshold(equal) == pytest.approx(0.75)


def test_intervals_of_an_auroc():
    """By patient: those of scikit-learn's AUROC, and of their mean over the labels that have one."""
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    count = 90
    studies = pa.record_batch({"subject_id": np.repeat(np.arange(count // 2), 2)})
    patient = studies["subject_id"].to_numpy()
    truth = rng.integers(0, 2, (count, 2))
    scores = truth * 0.3 + rng.random((count, 2)) * 0.7
    scores = scores.astype(np.float32)
    labels = {}
    for i, label in enumerate(("Edema", "Fracture")):
        labels[label] = judged(scores[:, i], truth[:, i])
    labels["Pneumonia"] = judged(scores[:, 0], np.ones(count, np.int64))
    got = auroc_intervals("test", labels, studies)

    def mean_area(rows: np.ndarray) -> float:
        areas = [roc_auc_score(truth[rows, i], scores[rows, i]) for i in range(2)]
        return np.mean(areas)

    # each label and the mean
    edema = interval(lambda rows: roc_auc_score(truth[rows, 0], scores[rows, 0]), patient)
    assert got["test/chexpert_auroc_low/Edema"] == pytest.approx(edema.low, abs=1e-9)
    assert got["test/chexpert_auroc_high/Edema"] == pytest.approx(edema.high, abs=1e-9)
    assert got["test/chexpert_auroc_low/Pneumonia"] is None
    macro = interval(mean_area, patient)
    assert got["test/chexpert_auroc_low"] == pytest.approx(macro.low, abs=1e-9)
    assert got["test/chexpert_auroc_high"] == pytest.approx(macro.high, abs=1e-9)

    # ties count half
    tied = np.array([0.2, 0.5, 0.5, 0.7])
    assert area(tied, np.array([0, 0, 1, 1])) == 0.875


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process(mimic_cxr_flags, zygote, tmp_path_factory) -> Path:
    """A run of 6 steps with evaluations after 2, 4 and 6 of them, on 30 of the 60 questions of a split."""
    out = tmp_path_factory.mktemp("one") / "run"
    done = zygote(MIMIC, flags_of(mimic_cxr_flags, out), figures=True)
    assert done.code == 0, done.stderr
    (out / "said").write_text(done.stdout)
    return out


def flags_of(data_flags: list[str], run_folder: Path, *more) -> list:
    """Eight steps an epoch: evaluations lie inside of it."""
    chosen = "--max_steps 6 --eval_every 2steps --eval_max_samples 30 --save_predictions".split()
    flags = data_flags + SHORT + chosen
    return [*flags, "--output_dir", run_folder, *more]


def test_what_a_run_says(one_process):
    """Intervals around their numbers, n beside each, blind rows, thresholds; the same numbers in the summary."""
    said = (one_process / "said").read_text()
    summary = summary_of(one_process)
    assert [line["step"] for line in metrics_of(one_process) if "val/loss" in line] == [2, 4, 6]
    assert summary["test/questions"] == 30
    assert summary["test/questions_in_all"] == 60

    # an interval around its number
    title = r"test, best\.pt, 30 of 60 questions: "
    accuracy = re.search(title + r"answers +n +accuracy .*\nall +30 +([\d.]+) \(([\d.]+) to ([\d.]+)\)", said)
    value, low, high = map(float, accuracy.groups())
    assert value == pytest.approx(summary["test/vqa_accuracy"], abs=1e-4)
    assert 0 <= low < value < high <= 1

    # without looking
    rows = re.search(title + r"what looking adds .*\n((?:.+ 30 .+\n)+)", said).group(1)
    names = [re.split(r"  +", line)[0] for line in rows.splitlines()]
    assert names == list(BLIND.values())

    # what the summary has of it
    unseen = {name.removeprefix("test/blind/"): value for name, value in summary.items() if "/blind/" in name}
    assert unseen["model/accuracy"] == summary["test/vqa_accuracy"]
    assert unseen["majority/accuracy"] == pytest.approx(summary["test/vqa_majority"])
    gain = unseen["commonest_answer/accuracy_gain"]
    assert gain == pytest.approx(summary["test/vqa_accuracy"] - unseen["commonest_answer/accuracy"])
    assert unseen["commonest_answer/accuracy_gain_low"] < gain < unseen["commonest_answer/accuracy_gain_high"]

    # the threshold of the best validation, beside the answers as given
    kept = json.loads((one_process / "thresholds.json").read_text())
    assert kept["step"] == summary["best_step"]
    assert kept["thresholds"]["binary"] == summary["val/threshold/binary"]
    assert summary["test/decision_threshold/binary tuned"] == kept["thresholds"]["binary"]
    binary = summary["test/vqa_accuracy/binary"]
    assert summary["test/decision_accuracy/binary"] == pytest.approx(binary)
    assert (one_process / "figures" / "test_reliability.png").stat().st_size > 5000


def test_predictions_hold_every_probability(one_process):
    """Of the classes of the question's own head, of each label, and what the threshold makes of them."""
    rows = pq.read_table(one_process / "predictions_test.parquet").to_pylist()
    summary = summary_of(one_process)
    threshold = summary["val/threshold/binary"]
    heads = set()
    for row in rows:
        heads.add(row["head"])
        for head, names in HEADS.items():
            values = [row[f"p({head}: {name})"] for name in names]
            if head != row["head"]:
                assert values == [None] * len(names)
                continue
            assert sum(values) == pytest.approx(1, abs=1e-5)
            assert names[int(np.argmax(values))] == row["answer"]
            assert max(values) == row["p(answer)"]

        # the answer at the threshold
        expected = None
        if row["head"] == "binary":
            expected = "yes" if row["p(binary: yes)"] >= threshold else "no"
        assert row["answer at threshold"] == expected
        assert re.fullmatch(r"p1\d{7}", row["subject_id"])
    assert len(heads) > 1

    # the calibration error of the summary follows from them
    probability = np.array([row["p(answer)"] for row in rows])
    right = np.array([row["answer"] == row["truth"] for row in rows])
    assert summary["test/vqa_ece"] == pytest.approx(expected_error(probability, right), abs=1e-6)


# --- one table --------------------------------------------------------------------------------------------------------


def check_same(got: dict, expected: dict, tolerance: float) -> None:
    """The metrics of two evaluations are the same, and there are intervals, decisions and blind scores among them."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == (value if value is None else pytest.approx(value, abs=tolerance)), name
    for some in ("vqa_accuracy_low", "decision_balanced/binary tuned", "blind/other_image/accuracy", "vqa_ece"):
        assert f"test/{some}" in got


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.soak)])
def test_a_table_at_another_world_size(run_mimic, mimic_cxr_flags, one_process, tmp_path, ranks):
    """best.pt by --eval_only, with the thresholds that lie beside it and the questions of its args.yaml."""
    out = tmp_path / "run"
    shutil.copytree(one_process, out)
    flags = [*mimic_cxr_flags, "--batch_size", "8", "--eval_only", "--output_dir", out]
    run_mimic(flags, ranks=ranks)
    got = json.loads((out / "eval_test.json").read_text())
    del got["step"]
    expected = {name: value for name, value in evaluated(one_process).items() if name.startswith("test/")}
    check_same(got, expected, 1e-6)


STAGES = [0]
STAGES += [pytest.param(stage, marks=pytest.mark.soak) for stage in (2, 3)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_table_from_another_engine(run_mimic, mimic_cxr_flags, one_process, tmp_path, stage):
    """Trained by two processes with DDP (stage 0) or ZeRO: weights that differ in the last digits."""
    out = tmp_path / "run"
    engine = ["--use_ddp"]
    if stage:
        file = tmp_path / "zero.json"
        file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        engine = ["--use_deepspeed", "--deepspeed_config", file]
    flags = flags_of(mimic_cxr_flags, out, "--batch_size", "4")
    run_mimic(flags + engine, ranks=2)
    check_same(evaluated(out), evaluated(one_process), 1e-4)


def without_speed(run_folder: Path) -> list[dict]:
    """The lines of the log without what depends on the machine."""
    measured = ("train/samples_per_s", "train/data_wait", "train/peak_memory_gb", "train/tflops", "train/mfu")
    lines = []
    for line in metrics_of(run_folder):
        lines.append({name: value for name, value in line.items() if name not in measured})
    return lines


def test_a_run_killed_before_an_evaluation_within_an_epoch(zygote, run_mimic, mimic_cxr_flags, one_process, tmp_path):
    """Its checkpoint of step 4 is older than the evaluation there; resumed, all lines are those of an unbroken run."""
    out = tmp_path / "run"
    flags = flags_of(mimic_cxr_flags, out)
    killed = zygote(MIMIC, flags, interrupt=at_step(out, 4, "worker"))
    assert killed.code != 0
    run_mimic([*flags, "--resume_from", "auto"])
    assert without_speed(out) == without_speed(one_process)
    assert evaluated(out) == evaluated(one_process)
    assert (out / "thresholds.json").read_text() == (one_process / "thresholds.json").read_text()


def test_evaluations_every_other_epoch(run_mimic, mimic_cxr_flags, tmp_path):
    """And after the last one; the blind scores are left out."""
    out = tmp_path / "run"
    flags = mimic_cxr_flags + SHORT
    flags += "--max_samples 8 --epochs 3 --eval_every 2 --no-blind_scores".split()
    run_mimic([*flags, "--output_dir", out])
    assert [line["epoch"] for line in metrics_of(out) if "val/loss" in line] == [2, 3]
    assert not any("/blind/" in name for name in summary_of(out))


# --- what is hidden ---------------------------------------------------------------------------------------------------


@pytest.fixture
def sets(mimic_cxr_flags, tmp_path):
    """The questions of each split, as the script reads them, 200 of training."""
    import train_mimic_cxr as script

    args = script.parse_args([*mimic_cxr_flags, "--cache_gb", "0", "--max_samples", "200"])
    release = (Path(args.mimic_cxr_path), Path(args.mimic_qa_path))
    return read_sets(open_index(tmp_path, release), args, None)


def test_commonest_answers_are_those_of_the_training_questions(sets):
    """Counted one by one; a question that training does not have keeps the other answer."""
    training = sets["train"]
    counts = {}
    for i in range(len(training)):
        row = training.row(i)
        classes = counts.setdefault((row["question"], row["head"]), Counter())
        classes[row["target"]] += 1

    asked = [blind.Asked("never asked?", 0)]
    expected = [25]
    for (text, head), classes in counts.items():
        asked.append(blind.Asked(text, head))
        expected.append(min(classes, key=lambda number: (-classes[number], number)))
    found = blind.answers_by_text(training, asked, np.full(len(asked), 25))
    assert found.tolist() == expected
    assert len(set(expected)) > 3


def test_what_is_hidden_is_hidden(sets):
    """Black images, images of other patients, no question: of the same questions, with the same targets."""
    data = sets["test"]
    seen = {}

    def answer(questions: blind.QuestionData) -> dict[str, np.ndarray]:
        """Notes what is seen, and gives the true answers."""
        items = [questions[i] for i in range(len(questions))]
        seen[len(seen)] = items
        return {"predicted": np.array([item["target"] for item in items])}

    rows = [data.row(i) for i in range(len(data))]
    predictions = {}
    for name in ("target", "head", "type", "study"):
        predictions[name] = np.array([row[name] for row in rows])
    predictions["predicted"] = predictions["target"]
    metrics = blind.blind_metrics(answer, data, sets["train"], predictions, 0)

    # what the model saw
    black, other, silent = seen.values()
    patients = data.index.studies["subject_id"].to_numpy()
    assert not any(item["image"].any() for item in black)
    for item, row in zip(other, rows, strict=True):
        assert patients[item["study"]] != patients[row["study"]]
        assert item["question"] == row["question"]
        assert item["image"].any()
    assert {item["question"] for item in silent} == {""}
    assert all(item["image"].any() for item in silent)
    assert metrics["test/blind/no_image/accuracy"] == 1
    assert metrics["test/blind/majority/accuracy_gain"] > 0


def test_labels_that_training_does_not_know(release, tmp_path):
    """Only those that are known in a training study, by the policy for uncertain ones; a checkpoint's list stands."""
    import train_mimic_cxr as script

    cxr, qba = release
    flags = ["--mimic_cxr_path", str(cxr), "--mimic_qa_path", str(qba), "--cache_gb", "0"]
    index = open_index(tmp_path, release)
    for policy, known in (("ignore", {"Edema", "Pneumonia"}), ("positive", {"Edema", "Pneumonia", "Fracture"})):
        args = script.parse_args([*flags, "--chexpert_uncertain", policy])
        sets = read_sets(index, args, None)
        note_trained_labels(sets, None)
        assert set(sets["test"].trained) == known
    note_trained_labels(sets, {"training": {"labels": ["Edema"]}})
    assert sets["test"].trained == ("Edema",)


def test_a_label_never_trained_has_no_probability(mimic_cxr_flags, tmp_path):
    """No AUROC, no threshold, and null in the file; the others keep theirs."""
    import train_mimic_cxr as script

    args = script.parse_args([*mimic_cxr_flags, "--cache_gb", "0", "--max_samples", "120"])
    release = (Path(args.mimic_cxr_path), Path(args.mimic_qa_path))
    index = open_index(tmp_path, release)
    model, tokenizer = script.build_model(args, "no", torch.device("cpu"))
    sets = read_sets(index, args, tokenizer)
    whole = script.evaluate(model, sets["val"], 8, args).metrics
    label = next(name for name in CHEXPERT if whole[f"val/chexpert_auroc/{name}"] is not None)

    sets["val"].trained = tuple(name for name in CHEXPERT if name != label)
    result = script.evaluate(model, sets["val"], 8, args)
    assert result.metrics[f"val/chexpert_auroc/{label}"] is None
    assert f"val/threshold/{label}" not in result.metrics
    assert f"val/threshold/{label}" in whole
    areas = [result.metrics[f"val/chexpert_auroc/{name}"] for name in CHEXPERT]
    assert result.metrics["val/chexpert_auroc"] == pytest.approx(
        np.mean([value for value in areas if value is not None])
    )

    assert write_predictions(tmp_path, sets["val"], result.predictions, {})
    table = pq.read_table(tmp_path / "predictions_val.parquet")
    assert table[f"p({label})"].null_count == len(table)
    assert sum(table[f"p({name})"].null_count for name in CHEXPERT) == len(table)
    assert table["answer at threshold"].null_count == len(table)


def test_thresholds_of_another_checkpoint_are_not_used(tmp_path, capsys):
    assert calibration.read_thresholds(tmp_path, None, 5) == {}
    assert "not there, as in a run without validation" in capsys.readouterr().out
    calibration.write_thresholds(tmp_path, {"val/threshold/Edema": 0.3, "val/loss": 1.0}, 5)
    assert calibration.read_thresholds(tmp_path, None, 5) == {"Edema": 0.3}
    assert calibration.read_thresholds(Path("elsewhere"), str(tmp_path / "best.pt"), 5) == {"Edema": 0.3}
    assert calibration.read_thresholds(tmp_path, None, 6) == {}
    assert "of step 5, not of step 6" in capsys.readouterr().out
    (tmp_path / "thresholds.json").write_text("[1]")
    assert calibration.read_thresholds(tmp_path, None, 5) == {}


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "500 steps", "0steps", "epochs", "1e3"])
def test_how_often_to_evaluate_is_checked(mimic_cxr_flags, capsys, value):
    import train_mimic_cxr as script

    with pytest.raises(SystemExit):
        script.parse_args([*mimic_cxr_flags, f"--eval_every={value}"])
    assert "must be epochs, such as 2, or steps, such as 500steps" in capsys.readouterr().err
