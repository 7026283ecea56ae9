"""train_mimic_cxr.py beside its promise: model, batches, loss, scores and rivals, settings, prediction, error lines."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import distributed_utils as du
import train_mimic_cxr as script
from tasks.mimic_cxr import report, zero
from tasks.mimic_cxr.answers import CHEXPERT, HEADS
from tasks.mimic_cxr.prepare import open_prepared
from tasks.mimic_cxr.sample_data import write_sample_data
from tools.prepare_data import parse_args as prepare_args
from utils import checkpoint, tables
from utils.cli import InputError
from utils.sampler import Index

ROOT = Path(__file__).resolve().parents[1]
ALONE = du.Ranks(0, 1, torch.device("cpu"), "python", None)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
CONVOLUTIONS = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sample data, prepared at 32 pixels."""
    root = tmp_path_factory.mktemp("mimic")
    write_sample_data(root, num_train=40, num_val=8, num_test=12, image_size=64, seed=0)
    words = [str(root / name) for name in ("mimic-cxr-jpg", "mimic-ext-cxr-qba", "prepared")]
    module, args = prepare_args(["mimic_cxr", *words, "--image_size", "32", "--workers", "1"])
    module.prepare(args)
    return root


@pytest.fixture(scope="module")
def parse(folder):
    """parse(words...): the script's arguments on the sample data."""

    def make(*words) -> script.Namespace:
        encoders = ["--image_encoder", folder / "convnext_tiny", "--text_encoder", folder / "bert_tiny"]
        known = ["--data_path", folder / "prepared", *encoders, "--num_workers", "0", "--dropout", "0"]
        return script.parse_args([str(word) for word in (*known, *words)])

    return make


@pytest.fixture(scope="module")
def trained(folder, parse, tmp_path_factory):
    """The folder of a run of a few steps, with its predictions."""
    out = tmp_path_factory.mktemp("trained") / "run"
    words = [
        "--max_steps",
        "6",
        "--eval_every_steps",
        "6",
        "--batch_size",
        "16",
        "--warmup_steps",
        "0",
        "--lr",
        "1e-3",
        "--save_predictions",
    ]
    assert script.run_task(parse("--output_dir", out, *words, "--gradient_accumulation_steps", "1"), ALONE) == 0
    return out


def small_model(parse, *words):
    args = parse("--image_size", "32", "--max_question_length", "16", *words)
    torch.manual_seed(0)
    return script.build_model(args, "no", torch.device("cpu")), args


# --- model ------------------------------------------------------------------------------------------------------------


def convnext_v2(**more):
    return transformers.ConvNextV2Model(transformers.ConvNextV2Config(**CONVOLUTIONS, **more))


def clip(**more):
    vision, text = SMALL | {"image_size": 32, "patch_size": 16}, SMALL | {"vocab_size": 99}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def of(name: str, **options):
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}Model")(config)


PATCHES = SMALL | {"image_size": 32, "patch_size": 16}
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
# (encoder, tokens of an image of 32 pixels, whether sine positions are added)
ENCODERS = {
    "convnext_v2": (convnext_v2, 1, True),
    "resnet": (lambda: of("ResNet", embedding_size=8, **CONVOLUTIONS), 1, True),
    "dinov3_convnext": (lambda: of("DINOv3ConvNext", **CONVOLUTIONS), 1, True),
    "dinov3_vit": (lambda: of("DINOv3ViT", **PATCHES), 5, False),
    "dinov2": (lambda: of("Dinov2", **PATCHES), 5, False),
    "vit": (lambda: of("ViT", **PATCHES | {"image_size": 64}), 5, False),
    "mae": (lambda: of("ViTMAE", **PATCHES), 5, False),
    "swin": (lambda: of("Swin", **WINDOWS), 16, False),
    "siglip": (lambda: of("SiglipVision", **PATCHES), 4, False),
    "clip": (clip, 5, False),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_any_vision_encoder(name, parse, tmp_path):
    """Tokens in the width of the text, all weights but the unused ones trained, activations recomputed if asked."""
    make, tokens, has_positions = ENCODERS[name]
    make().save_pretrained(tmp_path / name)
    model, args = small_model(parse, "--image_encoder", tmp_path / name)
    batch = script.largest_batch(model, 2)
    found = model.image_tokens(batch["image"])
    assert found.shape == (2, tokens, model.text.config.hidden_size)
    plain = model.project(model.image_features(batch["image"]))
    assert torch.equal(found, plain) is not has_positions

    script.trial_step(model, batch, args)
    gradients = {key: value.grad.clone() for key, value in model.named_parameters() if value.requires_grad}
    recomputed, args = small_model(parse, "--image_encoder", tmp_path / name, "--gradient_checkpointing")
    recomputed.load_state_dict(model.state_dict())
    script.trial_step(recomputed, batch, args)
    for key, value in recomputed.named_parameters():
        assert value.grad is None if key not in gradients else torch.allclose(value.grad, gradients[key], atol=1e-7), (
            key
        )


def test_the_convnexts_last_norm_is_applied(parse):
    model, _ = small_model(parse)
    image = torch.randint(0, 255, (2, 1, 32, 32), dtype=torch.uint8)
    pixels = (image / 255 - model.mean) / model.std
    last = model.image(pixel_values=pixels).last_hidden_state
    width = last.shape[1]
    expected = F.layer_norm(
        last.permute(0, 2, 3, 1), (width,), model.image.layernorm.weight, model.image.layernorm.bias
    )
    assert torch.allclose(model.image_features(image), expected.flatten(1, 2), atol=1e-5)
    assert "image.layernorm.weight" in dict(model.named_parameters())
    assert model.image.layernorm.weight.requires_grad


def test_padding_and_neighbours_change_no_answer(parse):
    """A question alone, and beside a longer one about another image."""
    model, _ = small_model(parse)
    model.eval()
    images = torch.randint(0, 255, (2, 1, 32, 32), dtype=torch.uint8)
    batch = script.tokenize(model.tokenizer, 16, ["is there pneumonia?", "where is the support device in this image?"])
    alone = script.tokenize(model.tokenizer, 16, ["is there pneumonia?"])
    with torch.no_grad():
        both = model(images, batch["ids"], batch["mask"], torch.tensor([1, 0]))
        one = model(images[1:], alone["ids"], alone["mask"], torch.tensor([0]))
    for together, single in zip(both, one, strict=True):
        assert torch.allclose(together[:1], single, atol=1e-5)


def test_norms_and_biases_do_not_decay(parse):
    model, args = small_model(parse, "--weight_decay", "0.3")
    decayed, kept = script.make_optimizer(model, args).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert all(names[p].endswith(("weight", "in_proj_weight")) and p.dim() > 1 for p in decayed["params"])
    assert {"project.1.weight", "project.0.bias", "norm.weight"} <= {names[p] for p in kept["params"]}


# --- batches and loss -------------------------------------------------------------------------------------------------


@pytest.fixture
def questions(folder, parse):
    """The training questions, with a tokenizer."""
    args = parse("--augmentation", "--chexpert_uncertain", "soft")
    data = script.Questions(open_prepared(folder / "prepared"), "train", args)
    data.tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bert_tiny"), 128
    return data


def indices(*numbers: int, epoch: int = 0) -> list[Index]:
    made = [Index(number) for number in numbers]
    for index in made:
        index.epoch = epoch
    return made


def test_a_batch_holds_each_image_once_and_its_own_labels(questions):
    data, chosen = questions.data, [5, 0, 1, len(questions) - 1]
    batch = questions.batch(indices(*chosen))
    studies = data.study[questions.first + np.array(chosen)]
    assert len(batch["image"]) == len(set(studies))
    for place, (study, row) in enumerate(zip(studies, questions.first + np.array(chosen), strict=True)):
        assert np.array_equal(batch["image"][batch["image_of"][place], 0].numpy(), data.images[study])
        text = questions.tokenizer[0].decode(batch["ids"][place], skip_special_tokens=True)
        assert text.replace(" ", "") == data.texts[int(data.question[row])].as_py().lower().replace(" ", "")
        truth = data.labels[study]
        assert np.array_equal(batch["known"][place].numpy(), np.isfinite(truth))
        expected = np.where(truth == -1, 0.5, np.nan_to_num(truth))
        assert np.array_equal(batch["label"][place].numpy(), expected)


def test_evenly_spaced_samples(questions, parse):
    some = script.Questions(questions.data, "train", parse(), limit=7)
    places = some.rows(range(7))
    assert len(some) == 7
    assert np.ptp(np.diff(places)) <= 1
    assert places[0] == questions.first
    assert places[-1] < questions.first + len(questions)
    assert np.array_equal(some.column("study"), questions.data.study[places])


def test_augmentation_is_a_function_of_seed_epoch_and_study(questions):
    one, two = questions.batch(indices(0, 1)), questions.batch(indices(0, len(questions) - 1))
    assert torch.equal(one["changes"][one["image_of"][0]], two["changes"][two["image_of"][0]])
    assert not torch.equal(one["changes"], questions.batch(indices(0, 1, epoch=1))["changes"])
    assert (one["changes"].abs() <= torch.tensor(script.STRENGTH)).all()


def test_augmentation_moves_and_changes_contrast():
    image = torch.randint(0, 255, (2, 1, 32, 32), dtype=torch.uint8)
    same = script.augment(image, torch.zeros(2, 6))
    assert torch.allclose(same, image.float(), atol=1e-3)
    # a shift by one pixel, of the second image alone
    changes = torch.zeros(2, 6)
    changes[1, 0] = 1 / 32
    moved = script.augment(image, changes)
    assert torch.allclose(moved[0], image[0].float(), atol=1e-3)
    assert torch.allclose(moved[1, 0, :, :-1], image[1, 0, :, 1:].float(), atol=0.1)
    # brighter by the factor e^0.15, gamma e^0.2
    changes = torch.tensor([[0.0, 0, 0, 0, 0.15, 0.2]])
    grey = torch.full((1, 1, 32, 32), 128, dtype=torch.uint8)
    expected = 255 * math.exp(0.15) * (128 / 255) ** math.exp(0.2)
    assert script.augment(grey, changes)[0, 0, 16, 16] == pytest.approx(expected, rel=1e-4)


def test_leaves_add_up_to_means_over_the_global_batch(questions, parse):
    """Each head's cross-entropy over its own questions, the labels' over those that are known, whatever the cut."""
    model, args = small_model(parse)
    model.eval()
    questions.augmented_by = None
    whole = questions.batch(indices(*range(40)))
    counts = script.count_targets([whole])
    *answers, chexpert = model(whole["image"], whole["ids"], whole["mask"], whole["image_of"])
    expected = 0.0
    for place, (head, weight) in enumerate(script.HEAD_WEIGHT.items()):
        asked = whole["head"] == place
        assert counts[place] == asked.sum()
        if asked.any():
            expected += weight * F.cross_entropy(answers[place][asked], whole["target"][asked])
        assert answers[place].shape[1] == len(HEADS[head])
    known = whole["known"]
    labels = F.binary_cross_entropy_with_logits(chexpert[known], whole["label"][known])
    parts = [questions.batch(indices(*range(begin, min(begin + 7, 40)))) for begin in range(0, 40, 7)]
    losses = sum(torch.stack(script.batch_loss(model, part, counts, 0.3)) for part in parts)
    assert torch.allclose(losses, torch.stack([expected + 0.3 * labels, expected, labels]), rtol=1e-5)


# --- scores and rivals ------------------------------------------------------------------------------------------------


def test_areas_are_scikit_learns_and_counts_repeat_studies():
    rng = np.random.default_rng(0)
    scores, truth = rng.integers(0, 9, (60, 3)) / 8, rng.choice([0, 1, -1, np.nan], (60, 3))
    truth[:, 2] = 0
    counts = np.stack([np.ones(60), rng.integers(0, 4, 60)])
    areas = report.aurocs(scores, truth, counts)
    for label in range(2):
        sure = np.isin(truth[:, label], (0, 1))
        for row in range(2):
            expected = roc_auc_score(truth[sure, label], scores[sure, label], sample_weight=counts[row, sure])
            assert areas[row, label] == pytest.approx(expected)
    assert np.isnan(areas[:, 2]).all()
    assert report.macro(areas)[0] == pytest.approx(areas[0, :2].mean())


def test_intervals_of_areas_cover():
    """200 sets of 40 patients with two like studies each: the true area lies in about 95 % of the intervals."""
    rng, covered = np.random.default_rng(1), 0
    patients = np.repeat(np.arange(40), 2)
    for _ in range(200):
        truth = np.repeat(rng.permutation(np.arange(40) % 2), 2).astype(float)
        scores = truth + np.repeat(rng.normal(size=40), 2)
        areas = report.aurocs(scores[:, None], truth[:, None], report.resample(patients)[:400])
        low, high = np.nanquantile(areas[1:], [0.025, 0.975])
        covered += low <= 0.7602 <= high
    # normal scores one standard deviation apart: Phi(1 / sqrt(2))
    assert 178 <= covered <= 198


def test_calibration_error():
    probability, right = np.array([0.95, 0.95, 0.95, 0.95, 0.55, 0.55]), np.array([1.0, 1, 1, 0, 1, 0])
    assert report.calibration_error(probability, right) == pytest.approx((4 * 0.2 + 2 * 0.05) / 6, abs=1e-6)


def test_logistic_regression_is_scikit_learns():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5))
    y = (x[:, 0] + rng.normal(size=200) > 0).astype(float)
    known = np.arange(200) < 150
    columns = torch.from_numpy(np.stack([y, 1 - y], 1))
    beta = report.fit_logistic(torch.from_numpy(x), columns, torch.from_numpy(known.astype(float))[:, None], 0.05)
    theirs = LogisticRegression(C=1 / (0.05 * 150), tol=1e-9, max_iter=1000).fit(x[known], y[known])
    assert beta[:, 0].numpy() == pytest.approx(np.append(theirs.intercept_, theirs.coef_), abs=1e-4)
    assert beta[:, 1].numpy() == pytest.approx(-beta[:, 0].numpy(), abs=1e-4)


def test_sixty_numbers_of_an_image():
    """The left half grey 0.5, the right half black: means, no deviation but at the edge, two levels, one edge."""
    image = torch.zeros(1, 1, 32, 32)
    image[..., :16] = 0.5
    numbers = report.image_numbers(image)[0]
    assert numbers[:16].reshape(4, 4)[2].tolist() == [0.5, 0.5, 0, 0]
    assert not numbers[16:32].any()
    grey, gradient = numbers[32:48], numbers[48:]
    assert grey.nonzero().flatten().tolist() == [0, 8]
    assert grey[8] == pytest.approx(0.5)
    assert gradient.nonzero().flatten().tolist() == [0, 11]
    assert gradient[11] == pytest.approx(1 / 31)


def as_rows(**columns) -> report.Rows:
    return {name: np.array(values) for name, values in columns.items()}


def test_rivals_without_the_image():
    """The type's most frequent answer, and the text's, which falls back on the type's for a new text."""
    train = as_rows(type=[0, 0, 0, 1, 1], head=[0, 0, 0, 2, 2], question=[7, 7, 8, 9, 9], target=[1, 1, 0, 5, 5])
    asked = as_rows(type=[0, 0, 1, 3], head=[0, 0, 2, 1], question=[8, 99, 99, 99], target=[0, 0, 0, 0])
    guesses = report.answers_without_image(train, asked)
    assert guesses["majority"].tolist() == [1, 1, 5, -1]
    assert guesses["question_only"].tolist() == [0, 1, 5, -1]


def test_the_label_that_tells_most_of_a_question_answers_it():
    """Question 3 is label 1's, whichever is told; question 4 is the other way round of label 0."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (400, len(CHEXPERT))).astype(float)
    labels[::7, 1] = np.nan
    study, question = np.repeat(np.arange(400), 2), np.tile([3, 4], 400)
    target = np.where(question == 3, np.nan_to_num(labels[study, 1], nan=0), 1 - labels[study, 0]).astype(int)
    train = as_rows(study=study, question=question, type=question * 0, head=question * 0, target=target)
    predicted = np.zeros((4, len(CHEXPERT)))
    predicted[[1, 3]] = 0.9
    asked = as_rows(question=[3, 3, 4, 4], type=[0] * 4, head=[0] * 4, chexpert=predicted)
    assert report.answers_from_labels(train, asked, labels, np.full(4, -1)).tolist() == [0, 1, 1, 0]


def test_the_validation_chooses_the_penalties_of_a_rival(monkeypatch):
    """Without one it is the middle; with one that whose scores and answers are best there."""
    rng = np.random.default_rng(0)
    labels = np.full((90, len(CHEXPERT)), np.nan)
    labels[:, 0] = rng.integers(0, 2, 90)
    features = rng.normal(size=(90, 8)) + labels[:, :1]
    images = [np.arange(60), np.arange(60, 75), np.arange(75, 90)]
    parts = [
        as_rows(
            study=studies,
            question=studies * 0,
            head=studies * 0,
            type=studies * 0,
            target=labels[studies, 0].astype(int),
        )
        for studies in images
    ]
    real, penalties = report.fit_logistic, []

    def fit(x, y, known, penalty):
        penalties.append(penalty)
        beta = real(x, y, known, penalty)
        return beta if penalty == 0.1 else -beta

    monkeypatch.setattr(report, "fit_logistic", fit)
    answers, scores = report.classical(features, images, labels, parts, np.full(15, -1))
    assert set(penalties) == {0.1, 0.01, 0.001}
    assert (answers == parts[2]["target"]).mean() > 0.6
    assert report.aurocs(scores, labels[images[2]], np.ones((1, 15)))[0, 0] > 0.6
    none = [images[0], images[1][:0], images[2]]
    parts[1] = as_rows(**{name: values[:0] for name, values in parts[1].items()})
    _, scores = report.classical(features[np.r_[:60, 75:90]], none, labels, parts, np.full(15, -1))
    assert report.aurocs(scores, labels[images[2]], np.ones((1, 15)))[0, 0] < 0.4


def test_the_tables_hold_the_rivals_and_the_intervals(trained, folder):
    summary = json.loads((trained / "summary.json").read_text())
    table = pd.read_parquet(trained / "predictions_test.parquet")
    assert summary["test/vqa_accuracy"] == pytest.approx((table["truth"] == table["answer"]).mean())
    assert summary["test/vqa_accuracy_low"] < summary["test/vqa_accuracy"] < summary["test/vqa_accuracy_high"]
    for name in ("majority", "question_only", "label_lookup", "pixels", "numbers", "encoder"):
        gain = summary["test/vqa_accuracy"] - summary[f"test/rival/{name}/vqa_accuracy"]
        assert summary[f"test/rival/{name}/vqa_accuracy_gain"] == pytest.approx(gain)
    assert {f"test/ablation/{name}/vqa_accuracy" for name in ("blank_image", "shuffled_image")} <= summary.keys()
    for name in ("pixels", "numbers", "encoder"):
        gain = summary["test/chexpert_auroc"] - summary[f"test/rival/{name}/chexpert_auroc"]
        assert summary[f"test/rival/{name}/chexpert_auroc_gain"] == pytest.approx(gain)
    assert 0 <= summary["test/vqa_ece"] <= 1
    assert (trained / "figures" / "test_answers.png").stat().st_size > 10_000

    # majority, by pandas
    data = open_prepared(folder / "prepared")
    train = slice(0, data.bounds[1])
    frame = pd.DataFrame({"type": data.type[train], "head": data.head[train], "target": data.target[train]})
    common = frame.groupby(["type", "head"])["target"].agg(lambda values: values.value_counts().index[0])
    heads = [list(HEADS).index(head) for head in table["head"]]
    kinds = [data.types.index(kind) for kind in table["type"]]
    guess = [common.get((kind, head), -1) for kind, head in zip(kinds, heads, strict=True)]
    truth = [HEADS[head].index(name) for head, name in zip(table["head"], table["truth"], strict=True)]
    assert summary["test/rival/majority/vqa_accuracy"] == pytest.approx(np.mean(np.array(guess) == truth), abs=0.03)


def test_saved_predictions(trained, folder):
    table = pd.read_parquet(trained / "predictions_test.parquet")
    data = open_prepared(folder / "prepared")
    assert len(table) == data.bounds[3] - data.bounds[2]
    for row in table.itertuples():
        assert len(row.probability) == len(HEADS[row.head])
        assert sum(row.probability) == pytest.approx(1, abs=1e-5)
        assert HEADS[row.head][int(np.argmax(row.probability))] == row.answer
    # a label that is not both present and absent in training has no column
    labels = data.labels[data.study[: data.bounds[1]]]
    both = (labels == 0).any(0) & (labels == 1).any(0)
    assert {label for label in CHEXPERT if label in table} == set(np.array(CHEXPERT)[both])
    assert 0 < both.sum() < len(CHEXPERT)


def test_an_uncertain_label_counts_in_training_alone(questions, parse):
    data = questions.data
    data.labels[:] = -1
    for split, known in (("train", True), ("val", False)):
        some = script.Questions(data, split, parse("--chexpert_uncertain", "soft"))
        some.tokenizer = questions.tokenizer
        assert bool(some.batch([0])["known"].all()) is known


def test_an_external_test_set_has_no_rivals(trained, parse, folder, tmp_path):
    """All rows of a table are of the split test: the network's numbers, and no rival's."""
    source = next((folder / "mimic-cxr-jpg").rglob("*.jpg"))
    lines = [f"{source},P{k},Is there pneumothorax?,{('no', 'yes')[k % 2]},test" for k in range(1)]
    (tmp_path / "other.csv").write_text("image,patient,question,answer,split\n" + "\n".join(lines))
    module, args = prepare_args(["mimic_cxr", str(tmp_path / "other.csv"), str(tmp_path / "out"), "--image_size", "32"])
    module.prepare(args)
    args = parse("--output_dir", trained, "--eval_only", "--data_path", tmp_path / "out")
    assert script.run_task(args, ALONE) == 0
    metrics = json.loads((trained / "eval_test.json").read_text())
    assert "test/vqa_accuracy" in metrics
    assert not [name for name in metrics if "rival" in name]


def test_a_blank_image_is_black_and_a_shuffled_one_another_studys(questions):
    data = questions.data
    blank = script.Questions(data, "test", script.Namespace(chexpert_uncertain="ignore", augmentation=False))
    blank.tokenizer, blank.shown = questions.tokenizer, np.full(len(data.studies), -1)
    batch = blank.batch(indices(0, 1, 2))
    assert batch["image"].shape[0] == 1
    assert not batch["image"].any()
    blank.shown = np.arange(len(data.studies))[::-1]
    batch = blank.batch(indices(0))
    assert np.array_equal(batch["image"][0, 0].numpy(), data.images[len(data.studies) - 1 - data.study[blank.first]])


def test_eval_only_gives_the_tests_numbers(trained, parse):
    assert script.run_task(parse("--output_dir", trained, "--eval_only"), ALONE) == 0
    again, summary = (json.loads((trained / name).read_text()) for name in ("eval_test.json", "summary.json"))
    for name, value in again.items():
        assert summary[name] == pytest.approx(value, abs=1e-9), name


# --- prediction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "head"),
    [("Is there an effusion?", "binary"), ("Where is the effusion?", "region"), ("In which zone is it?", "region"),
     ("How severe is the edema?", "severity"), ("What is the finding?", "category"), ("Describe it.", "category")],
)  # fmt: skip
def test_which_head_answers(question, head):
    assert script.head_for(question) == head


def test_prediction_equals_the_test(trained, folder, parse, tmp_path, capsys):
    """A CSV of test images, one of them damaged: the saved probabilities, and the others are answered."""
    table = pd.read_parquet(trained / "predictions_test.parquet").drop_duplicates("image").head(3)
    jpg = folder / "mimic-cxr-jpg"
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8\xff")
    paths = [str(jpg / name) for name in table["image"]]
    asked = pd.DataFrame({"image": [*paths, "bad.jpg"], "question": [*table["question"], "Is it?"]})
    asked.to_csv(tmp_path / "ask.csv", index=False)
    for head in set(table["head"]):
        assert (
            script.run_task(parse("--output_dir", trained, "--predict", tmp_path / "ask.csv", "--head", head), ALONE)
            == 0
        )
        answers = pd.read_csv(trained / "predictions.csv").set_index("image")
        for row in table[table["head"] == head].itertuples():
            assert answers.loc[str(jpg / row.image), "probability"] == pytest.approx(max(row.probability), abs=1e-3)
            assert answers.loc[str(jpg / row.image), "answer"] == row.answer
    text = capsys.readouterr().out
    assert "bad.jpg: cannot be read" in text
    assert "3 of 4 questions answered" in text


def test_three_commands_from_a_table_to_predictions(folder, tmp_path):
    """As a user types them: prepare a table of X-rays, train a trial, ask about a folder of others."""
    rng = np.random.default_rng(0)
    lines = ["image,patient,question,answer,labels"]
    (tmp_path / "scans").mkdir()
    for number in range(40):
        sick = number % 2
        pixels = rng.integers(0, 80, (50, 40))
        pixels[10:30, 5:20] += 120 * sick
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "scans" / f"{number}.png")
        labels = "Pneumonia" if sick else "No Finding"
        lines.append(f"scans/{number}.png,P{number // 2},Is there pneumonia?,{('no', 'yes')[sick]},{labels}")
    (tmp_path / "xrays.csv").write_text("\n".join(lines))
    encoders = f"--image_encoder {folder}/convnext_tiny --text_encoder {folder}/bert_tiny"
    run = f"train_mimic_cxr.py --config configs/mimic_cxr_small.yaml --output_dir {tmp_path}/run {encoders}"
    commands = [
        f"-m tools.prepare_data mimic_cxr {tmp_path}/xrays.csv {tmp_path}/mine --image_size 64",
        f"{run} --data_path {tmp_path}/mine --epochs 30",
    ]
    for command in commands:
        subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True, capture_output=True)
    question = ["--predict", str(tmp_path / "scans"), "--question", "Is there pneumonia?"]
    subprocess.run([sys.executable, *run.split(), *question], cwd=ROOT, check=True, capture_output=True)
    answers = pd.read_csv(tmp_path / "run" / "predictions.csv")
    sick = answers["image"].map(lambda name: int(Path(name).stem) % 2)
    assert len(answers) == 40
    assert ((answers["answer"] == "yes") == sick).mean() > 0.9
    assert roc_auc_score(sick, answers["Pneumonia"]) > 0.9


# --- settings ---------------------------------------------------------------------------------------------------------

GUIDE = """
training:
  batch_size_per_gpu: 16
  gradient_accumulation_steps: 4
  # Effective batch: 16 * 4 * 4 = 256
  fp16: true
  gradient_checkpointing: true
  dataloader_num_workers: 12  # 3 per GPU

deepspeed:
  enabled: true
  stage: 2
"""
NODE = (32, 100.0, 4)


def settings(parse, tmp_path, text: str = "", *words: str) -> script.Namespace:
    (tmp_path / "config.yaml").write_text(text)
    args = script.parse_args(["--config", str(tmp_path / "config.yaml"), *words])
    script.fill_settings(args, 4, 24.0, 8.9, NODE)
    return args


def test_the_guides_yaml_as_printed(parse, tmp_path):
    args = settings(parse, tmp_path, GUIDE)
    assert (args.batch_size, args.gradient_accumulation_steps, args.num_workers) == (16, 4, 3)
    assert (args.gradient_checkpointing, args.fp16, args.enabled, args.stage) == (True, True, True, 2)
    assert script.choose_engine(args, ALONE) == (True, "as asked")
    assert script.read_engine(args)["zero_optimization"]["stage"] == 2
    text = GUIDE.replace("stage: 2", "stage: 3")
    config = script.read_engine(settings(parse, tmp_path, text))
    assert config["zero_optimization"]["stage"] == 3


def test_command_line_over_file_over_hardware_over_default(parse, tmp_path):
    """A file with batch 16 and accumulation 1 once trained as 8 x 32."""
    text = "batch_size: 16\ngradient_accumulation_steps: 1\nnum_workers: 0\n"
    args = settings(parse, tmp_path, text)
    assert (args.batch_size, args.gradient_accumulation_steps, args.num_workers) == (16, 1, 0)
    assert settings(parse, tmp_path, text, "--batch_size", "3").batch_size == 3
    # the hardware: the guide's row of 20 GB and more; accumulation goes with a batch that is given
    args = settings(parse, tmp_path)
    assert (args.batch_size, args.gradient_accumulation_steps, args.num_workers) == (16, 4, 3)
    assert settings(parse, tmp_path, "batch_size: 8").gradient_accumulation_steps == 8
    # the defaults
    args = settings(parse, tmp_path, "", "--no_auto_optimize")
    assert (args.batch_size, args.gradient_accumulation_steps, args.num_workers) == (16, 1, 4)
    assert (args.prefetch_factor, args.gradient_checkpointing) == (2, False)


def test_the_engine_follows_the_guides_diagram(parse, monkeypatch):
    pair = du.Ranks(0, 2, torch.device("cpu"), "torchrun", None)
    for ranks, words, expected in (
        (ALONE, [], False), (pair, [], True), (pair, ["--use_ddp"], False), (ALONE, ["--use_deepspeed"], True),
        (pair, ["--no_auto_optimize"], False), (pair, ["--eval_only"], False), (pair, ["--deterministic"], False),
    ):  # fmt: skip
        assert script.choose_engine(parse(*words), ranks)[0] is expected, words
    with pytest.raises(InputError, match="--deterministic: DeepSpeed adds gradients"):
        script.choose_engine(parse("--deterministic", "--use_deepspeed"), pair)
    monkeypatch.setattr(zero, "is_installed", lambda: False)
    assert script.choose_engine(parse(), pair) == (False, "DeepSpeed is not installed")
    with pytest.raises(InputError, match="DeepSpeed is not installed"):
        script.choose_engine(parse("--use_deepspeed"), pair)


def test_published_configs(parse):
    for name in ("default", "pretrain", "finetune"):
        path = ROOT / "configs" / f"{name}_config.yaml"
        args = script.parse_args(["--config", str(path)])
        assert args.questions_per_image == 8
        assert args.eval_every_steps
        # left to the hardware
        assert (
            not {"batch_size", "gradient_accumulation_steps", "num_workers"} & yaml.safe_load(path.read_text()).keys()
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"zero_optimization": {"stage": 7}}', "zero_optimization.stage"),
     ('{"zero_optimization": {"stagee": 2}}', "zero_optimization"),
     ('{"zero_optimization": {"stage": 2}, "bf16": {"enabledd": true}}', "bf16.enabledd"),
     ('{"zero_optimization": {"stage": 2}, "fp16": "yes"}', "fp16: must be a block"),
     ('{"fp16": {"enabled": "auto"}}', "zero_optimization.stage: must be 1, 2 or 3"),
     ('{"zero_optimization": {"stage": 2}, "train_batch_size": 8}', "train_batch_size: is set by the script's flags"),
     ('{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}', "optimizer: is set by the script's flags")],
)  # fmt: skip
def test_a_wrong_deepspeed_config_is_one_line(tmp_path, content, message):
    path = tmp_path / "zero.json"
    path.write_text(content)
    with pytest.raises(InputError) as error:
        zero.read_zero_config(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def fails(args, message: str) -> None:
    with pytest.raises(InputError, match=message):
        script.run_task(args, ALONE)


def test_error_lines(parse, folder, tmp_path):
    out = ["--output_dir", tmp_path / "run"]
    fails(parse(*out, "--data_path", tmp_path / "nothing"), "no prepared data; make it once")
    fails(parse(*out, "--image_size", "64"), "has images of 32 pixels, not of 64")
    fails(parse(*out, "--image_encoder", tmp_path), f"{tmp_path}: cannot be loaded")
    fails(parse(*out, "--image_encoder", folder / "bert_tiny"), "bert is not an encoder for --image_encoder")
    fails(parse(*out, "--max_question_length", "4000"), "do not go together")
    fails(parse(*out, "--pretrained_weights", tmp_path / "no.safetensors"), "not readable as safetensors")
    fails(parse(*out, "--predict", folder, "--question", "Is it?"), "no such checkpoint")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_the_checkpoint_was_not_trained_for(trained, parse, folder, tmp_path):
    words = [str(folder / name) for name in ("mimic-cxr-jpg", "mimic-ext-cxr-qba")]
    module, args = prepare_args(["mimic_cxr", *words, str(tmp_path / "64"), "--image_size", "64", "--workers", "1"])
    module.prepare(args)
    args = parse("--output_dir", trained, "--eval_only", "--data_path", tmp_path / "64")
    fails(args, "has images of 64 pixels, not of 32")
    for words in (["--chexpert_uncertain", "soft"], ["--chexpert_weight", "2"], ["--questions_per_image", "3"]):
        fails(parse("--output_dir", trained, "--resume_from", "auto", *words), "give the same again")


def test_a_head_without_training_answers_nothing(trained, parse, folder, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / "best.pt"
    saved = torch.load(path, weights_only=True) | {"trained_heads": ["binary"]}
    path.unlink()
    checkpoint.write_checkpoint(path, saved, checkpoint.read_run_id(tmp_path / "run"))
    image = next((folder / "mimic-cxr-jpg").rglob("*.jpg"))
    args = parse("--output_dir", tmp_path / "run", "--predict", image, "--question", "Where is the effusion?")
    fails(args, "no training question had a region answer; --head may be binary")


def test_the_runs_own_figures_are_no_images_to_predict(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    Image.new("L", (20, 20)).save(tmp_path / "scan.png")
    assert [file.name for file, _ in tables.list_questions(str(tmp_path), "Is it?")] == ["scan.png"]


def test_damaged_encoder(folder, parse, tmp_path):
    """Weights that are not in the file would be random without a word."""
    from safetensors.torch import load_file, save_file

    for file in (folder / "convnext_tiny").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights[max(weights)]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fails(parse("--output_dir", tmp_path / "run", "--image_encoder", tmp_path), "1 weights are not in the file")


def test_pretrained_weights_start_a_new_run(trained, parse, tmp_path):
    from safetensors.torch import load_file

    args = parse(
        "--output_dir", tmp_path / "run", "--pretrained_weights", trained / "model.safetensors", "--lr", "1e-30"
    )
    args.max_steps, args.batch_size, args.gradient_accumulation_steps, args.weight_decay = 1, 8, 1, 0.0
    assert script.run_task(args, ALONE) == 0
    before, after = (load_file(path / "model.safetensors") for path in (trained, tmp_path / "run"))
    assert all(torch.equal(before[name], after[name]) for name in before)
