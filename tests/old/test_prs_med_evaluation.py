"""Guide 0's evaluations: when they are made, of which rows, their intervals, and what is scored without looking."""

import csv
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PRS_MED, SAME, kill_then_stop, losses, records
from PIL import Image
from scipy.spatial.distance import cdist

from old.blind_utils import Asked, choose_rows, commonest_answers, other_cases
from old.interval_utils import interval_of_mean
from tasks.prs_med.metrics import Scores, hausdorff_95

# 34 rows: an epoch of 6 steps
FLAGS = [*SAME, "--gradient_accumulation_steps", "1", "--resume_from", "auto"]


@pytest.fixture(scope="module")
def run_prs_med(zygote, prs_med_data):
    """run_prs_med(run_folder, flags, ranks): the script to its end, on the small data set."""

    def run(run_folder: Path, flags: list, ranks: int = 1) -> SimpleNamespace:
        start = [PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", run_folder]
        done = zygote(start + flags, ranks=ranks)
        assert done.code == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run


@pytest.fixture(scope="module")
def by_steps(run_prs_med, tmp_path_factory) -> Path:
    """The folder of an uninterrupted run of two processes with an evaluation after every 4th step."""
    run_folder = tmp_path_factory.mktemp("by_steps") / "run"
    run_prs_med(run_folder, [*FLAGS, "--batch_size", 3, "--num_epochs", 2, "--eval_every", "4steps"], ranks=2)
    return run_folder


def evaluated_steps(run_folder: Path) -> list[int]:
    """The steps of the validations in the log."""
    return [record["step"] for record in records(run_folder) if "val/loss" in record]


def summary_of(run_folder: Path) -> dict:
    return json.loads((run_folder / "summary.json").read_text())


# --- when -------------------------------------------------------------------------------------------------------------


def test_an_evaluation_after_so_many_steps_survives_a_kill(zygote, prs_med_data, by_steps, tmp_path):
    """Killed in the evaluation of step 4, which its checkpoint is older than, then stopped: the same to the bit."""
    assert evaluated_steps(by_steps) == [4, 8, 12]
    run_folder = tmp_path / "run"
    flags = [*FLAGS, "--batch_size", "3", "--num_epochs", "2", "--eval_every", "4steps"]
    command = [PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", run_folder, *flags]
    kill_then_stop(zygote, command, run_folder, kill_at=4, stop_at=8)
    assert zygote(command, ranks=2).code == 0

    assert losses(run_folder) == losses(by_steps)
    best = torch.load(run_folder / "best.pt", weights_only=True)
    expected = torch.load(by_steps / "best.pt", weights_only=True)
    assert best["step"] == expected["step"]
    assert all(torch.equal(best["model"][name], value) for name, value in expected["model"].items())
    for name, value in summary_of(by_steps).items():
        if name.startswith(("val/", "test/")):
            assert summary_of(run_folder)[name] == value


def test_evaluations_change_no_step(run_prs_med, by_steps, tmp_path):
    """Every second epoch and at the end, instead of every 4th step: other evaluations, the same training."""
    flags = [*FLAGS, "--batch_size", "6", "--num_epochs", "3", "--eval_every", "2", "--max_steps", "0"]
    run_prs_med(tmp_path, [*flags, "--no-blind_scores"])
    assert evaluated_steps(tmp_path) == [12, 18]
    trained = {record["step"]: record["train/loss"] for record in records(tmp_path) if "train/loss" in record}
    for record in records(by_steps):
        if "train/loss" in record:
            assert trained[record["step"]] == pytest.approx(record["train/loss"], rel=1e-5)


def test_a_run_cut_short_is_evaluated_where_it_ends(run_prs_med, by_steps, tmp_path):
    """By --max_steps; the longer run that it is resumed to knows nothing of that evaluation."""
    flags = [*FLAGS, "--batch_size", "3", "--num_epochs", "2", "--eval_every", "4steps", "--no-blind_scores"]
    run_prs_med(tmp_path, [*flags, "--max_steps", "6"], ranks=2)
    assert evaluated_steps(tmp_path) == [4, 6]
    run_prs_med(tmp_path, flags, ranks=2)
    assert losses(tmp_path) == losses(by_steps)


def test_what_is_no_interval_between_evaluations(zygote, tmp_path):
    for value in ("0", "steps", "3 steps", "1.5", "-1", "3epochs"):
        done = zygote(PRS_MED, "--data_root", tmp_path, "--eval_every", value)
        assert done.code == 2
        assert "500steps" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


# --- what -------------------------------------------------------------------------------------------------------------


def test_intervals_cases_and_blind_scores_at_any_world_size(run_prs_med, by_steps, tmp_path):
    """--eval_only of 7 of 10 rows: the same table, JSON and CSV at 1, 2 and 3 processes."""
    flags = ["--eval_only", "--resume_from", by_steps / "best.pt", "--max_new_tokens", "3", "--eval_max_samples", "7"]
    tables = []
    results = []
    cases = []
    for ranks in (1, 2, 3):
        done = run_prs_med(tmp_path / str(ranks), [*flags, "--batch_size", 4], ranks)
        tables.append(done.stdout.partition("\ntest: ")[2])
        results.append((tmp_path / str(ranks) / "eval_test.json").read_text())
        cases.append((tmp_path / str(ranks) / "eval_test_cases.csv").read_text())
    for found in (tables, results, cases):
        assert found[0] == found[1] == found[2]
    assert "7 of 10" in tables[0]
    assert "without the image" in tables[0]

    # the mean and the interval are those of the rows in the CSV
    metrics = json.loads(results[0])
    rows = list(csv.DictReader(cases[0].splitlines()))
    assert metrics["test/rows"] == metrics["test/blind/rows"] == len(rows) == 7
    assert metrics["test/of_rows"] == 10
    assert metrics["test/cases"] == len({row["case"] for row in rows})
    for name in ("dice", "iou", "position_accuracy_mask"):
        values = [float(row[name]) for row in rows]
        patients = [row["case"] for row in rows]
        assert metrics[f"test/{name}"] == pytest.approx(np.mean(values))
        ends = metrics[f"test/{name}_low"], metrics[f"test/{name}_high"]
        assert ends == pytest.approx(interval_of_mean(values, patients))
    assert metrics["test/blind/model/dice"] == metrics["test/dice"]


def test_a_training_ends_with_intervals_cases_and_blind_scores(by_steps):
    summary = summary_of(by_steps)
    for name in ("dice", "iou", "position_accuracy", "position_accuracy_mask"):
        for start in (f"val/{name}", f"test/{name}"):
            low = summary[f"{start}_low"]
            high = summary[f"{start}_high"]
            assert 0 <= low <= summary[start] <= high <= 1
    for name in ("model", "no_image", "other_image", "no_question", "commonest_answer"):
        assert 0 <= summary[f"test/blind/{name}/position_accuracy"] <= 1
    assert summary["test/blind/no_image/dice"] != summary["test/blind/model/dice"]

    rows = list(csv.DictReader((by_steps / "test_cases.csv").open(newline="")))
    assert len(rows) == summary["test/rows"] == 10
    assert all(Path(row["image"]).is_file() for row in rows)
    assert all(row["question"] and row["answer"] and row["position"] for row in rows)
    assert np.mean([float(row["hd95"]) for row in rows]) == pytest.approx(summary["test/hd95"])


def test_no_generate_asks_for_no_answers(run_prs_med, by_steps, tmp_path):
    done = run_prs_med(tmp_path, ["--eval_only", "--resume_from", by_steps / "best.pt", "--no_generate"])
    assert "--no_generate" in done.stdout
    metrics = json.loads((tmp_path / "eval_test.json").read_text())
    assert "test/position_accuracy" not in metrics
    assert metrics["test/dice"] == pytest.approx(summary_of(by_steps)["test/dice"])
    rows = list(csv.DictReader((tmp_path / "eval_test_cases.csv").open(newline="")))
    assert {row["generated"] for row in rows} == {""}
    # by the mask, what looking adds is said all the same
    assert "test/blind/no_image/position_accuracy_mask_gain" in metrics
    assert "model's position_mask above" in done.stdout
    assert "model's position above" not in done.stdout


def brute_hausdorff(predicted: np.ndarray, target: np.ndarray) -> float:
    """The 95th percentile of all distances between outlines, found one pixel at a time."""
    outlines = []
    for mask in (predicted, target):
        padded = np.pad(mask, 1)
        above = padded[:-2, 1:-1]
        below = padded[2:, 1:-1]
        left = padded[1:-1, :-2]
        right = padded[1:-1, 2:]
        inside = above & below & left & right
        outlines.append(np.argwhere(mask & ~inside))
    first, second = outlines
    distances = cdist(first, second)
    there = np.percentile(distances.min(axis=1), 95)
    back = np.percentile(distances.min(axis=0), 95)
    return max(there, back)


def draw_masks(count: int) -> list[np.ndarray]:
    """Bool masks of a few overlapping rectangles, some at the image's edge."""
    rng = np.random.default_rng(0)
    masks = []
    for _ in range(count):
        mask = np.zeros((40, 30), bool)
        for _ in range(3):
            top, left = rng.integers(0, 28, 2)
            height, width = rng.integers(1, 12, 2)
            mask[top : top + height, left : left + width] = True
        masks.append(mask)
    return masks


def test_hausdorff_distance():
    masks = draw_masks(20)
    for predicted, target in pairwise(masks):
        assert hausdorff_95(predicted, target) == pytest.approx(brute_hausdorff(predicted, target))
    empty = np.zeros((30, 40), bool)
    assert hausdorff_95(empty, empty) == 0
    assert hausdorff_95(empty, ~empty) == hausdorff_95(~empty, empty) == 50


@pytest.mark.soak
def test_hausdorff_distance_is_monais():
    from monai.metrics import compute_hausdorff_distance

    masks = draw_masks(40)
    for predicted, target in pairwise(masks):
        first = torch.from_numpy(predicted)[None, None]
        second = torch.from_numpy(target)[None, None]
        expected = compute_hausdorff_distance(first, second, include_background=True, percentile=95)
        assert hausdorff_95(predicted, target) == pytest.approx(float(expected), abs=1e-4)


# --- without looking --------------------------------------------------------------------------------------------------


def test_rows_are_chosen_evenly_and_each_has_the_same_chance():
    # 30 cases of 1 to 6 rows
    rng = np.random.default_rng(0)
    cases = np.repeat(np.arange(30), rng.integers(1, 7, 30)).astype(str)
    assert choose_rows(cases, 0, 0) == choose_rows(cases, 1000, 0) == list(range(len(cases)))
    chosen = choose_rows(cases, 40, 3)
    assert chosen == choose_rows(cases, 40, 3) == sorted(set(chosen))
    assert chosen != choose_rows(cases, 40, 4)
    assert len(chosen) == 40

    # a case has its share of the rows, rounded up or down
    for case in set(cases):
        share = 40 * (cases == case).sum() / len(cases)
        assert abs((cases[chosen] == case).sum() - share) < 1

    drawn = np.zeros(len(cases))
    for seed in range(2000):
        drawn[choose_rows(cases, 40, seed)] += 1
    assert abs(drawn / 2000 - 40 / len(cases)).max() < 0.05


def test_another_case_is_of_the_same_kind_where_there_is_one():
    cases = list("aabbcddde")
    kinds = ["ct"] * 5 + ["mr"] * 3 + ["us"]
    others = other_cases(cases, kinds, 0)
    assert others == other_cases(cases, kinds, 0)
    for row, other in enumerate(others):
        assert cases[other] != cases[row]
        # d and e are alone in their kinds
        assert kinds[other] == kinds[row] or cases[row] in "de"
    # nobody's image is shown to all
    assert len({cases[other] for other in others[:5]}) == 3
    assert other_cases(["a", "a"], ["ct", "mr"], 0) is None


def test_the_commonest_answer_of_a_question_else_of_its_kind_else_of_all():
    training = [(Asked("liver?", "ct"), "left")] * 2 + [(Asked("liver?", "mr"), "right")] * 3
    training += [(Asked("lung?", "ct"), "top")] * 3 + [(Asked("cyst?", "us"), None)]
    asked = [Asked("liver?", "ct"), Asked("lung?", "mr"), Asked("heart?", "ct"), Asked("heart?", "us")]
    # of all, right and top are as common, and right is first in the alphabet
    assert commonest_answers(training, asked) == ["right", "top", "top", "right"]
    assert commonest_answers([], asked) == [None] * 4


@pytest.fixture
def bright_squares(tmp_path):
    """A data set of 12 images with a bright square, its mask, whose answers name where; no model is needed."""
    from tasks.prs_med.data import PositionData, Row
    from tasks.prs_med.reader import PixelStatistics, Reader

    def tokenizer(text: str, add_special_tokens: bool) -> dict:
        return {"input_ids": list(text.encode())}

    tokenizer.eos_token_id = tokenizer.pad_token_id = 0
    tokenizer.bos_token_id = None
    statistics = dict.fromkeys(("sam", "vlm"), PixelStatistics([0.25] * 3, [0.25] * 3))
    reader = Reader(tokenizer, 256, 1, 16, 16, statistics)

    rows = []
    for number in range(12):
        # three in four at the top left
        place = 10 if number % 4 == 0 else 2
        mask = np.zeros((16, 16), np.uint8)
        mask[place : place + 4, place : place + 4] = 255
        names = [str(tmp_path / f"{kind}{number}.png") for kind in ("image", "mask")]
        for name in names:
            Image.fromarray(mask).save(name)
        answer = f"It is in the {'bottom right' if number % 4 == 0 else 'top left'}."
        rows.append(Row("ct", names[0], names[1], "test", "Where is it?", answer, f"ct.csv:{number + 2}"))
    return PositionData(rows, reader, True)


def look_at_squares(loader):
    """The results of a model that finds the bright square of the image that it is given."""
    from tasks.prs_med.metrics import RowSums, position_of, score_row
    from tasks.prs_med.report import Results

    scores = []
    for batch in loader:
        for k, index in enumerate(batch["index"]):
            image = batch["sam"][k, 0].numpy()
            target = batch["mask"][k].numpy()
            seen = image > 127
            both = seen & target
            either = seen | target
            sums = RowSums(both.sum(), either.sum(), mask_loss=0.0, text_loss=0.0, tokens=1.0)
            answer = f"It is in the {position_of(seen)}."
            scores.append(score_row(index, sums, seen, target, answer, batch["position"][k]))
    return Results({}, [], scores)


def test_a_model_that_looks_is_told_from_one_that_guesses(bright_squares, capsys):
    """It is right in all rows with the image, in none without; the commonest answer in three of four."""
    from tasks.prs_med.blind import look_away
    from tasks.prs_med.data import evaluation_loader

    loader = evaluation_loader(bright_squares, 4, 0)
    results = look_at_squares(loader)
    assert isinstance(results.scores[0], Scores)
    metrics = look_away(look_at_squares, loader, results, bright_squares.rows, "test", 0)
    named = {name.split("/")[2]: metrics[name] for name in metrics if name.endswith("/position_accuracy")}
    assert named["model"] == named["no_question"] == 1
    assert named["no_image"] == 0
    assert named["commonest_answer"] == 0.75
    assert named["other_image"] < 1
    assert metrics["test/blind/model/dice"] == 1
    assert metrics["test/blind/no_image/dice"] == 0
    assert metrics["test/blind/commonest_answer/position_accuracy_gain"] == 0.25
    assert "test/blind/commonest_answer/dice" not in metrics

    printed = capsys.readouterr().out
    assert "commonest training answer" in printed
    # right in all rows either way: that the next one is so, too, nothing tells
    (line,) = [line for line in printed.splitlines() if line.startswith("without the question")]
    assert line.endswith("+0.000 (-)")
    assert "test/blind/no_question/position_accuracy_gain_low" not in metrics
    # without the image: of the colour that the normalisation takes away
    from tasks.prs_med.blind import NO_IMAGE, OTHER_IMAGE, blind_sets

    sets = blind_sets(bright_squares, 0)
    assert sets[NO_IMAGE][3]["sam"].unique().tolist() == [64]

    # every row is shown the image of another case
    blind = sets[OTHER_IMAGE]
    assert sorted(blind.images_of) == list(range(12))
    for index in range(12):
        item = blind[index]
        assert torch.equal(item["sam"], bright_squares[blind.images_of[index]]["sam"])
        assert torch.equal(item["mask"], bright_squares[index]["mask"])
        assert blind.images_of[index] != index
