"""train_prs_med.py: model, losses and scores against independent references; what a run leaves; --predict."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import train_prs_med as script
from tasks.prs_med import report
from tasks.prs_med.annotations import Row, position_of
from tasks.prs_med.sam_attention import fold_relative_positions, look_up_in_order
from utils.sampler import Index

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = "--num_workers 0 --batch_size 4 --max_new_tokens 4 --log_every 1".split()


@pytest.fixture(scope="module")
def data_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data") / "prs_med"
    sizes = "--num_train 6 --num_val 3 --num_test 6 --image_size 48".split()
    subprocess.run([sys.executable, "-m", "tools.sample_data", "prs_med", root, *sizes], cwd=ROOT, check=True)
    return root


@pytest.fixture(scope="module")
def args(data_root):
    return script.parse_args(["--data_root", str(data_root), "--lora_dropout", "0", *SETTINGS])


@pytest.fixture(scope="module")
def model(args):
    model = script.build_model(args, "no", torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # LoRA begins at 0, which would hide half of it
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model.eval()


@pytest.fixture(scope="module")
def sets(args, model):
    return script.make_sets(script.read_data(args, "train"), model.reader, args)


@pytest.fixture(scope="module")
def batch(model, sets):
    return script.collate(model.reader, [sets["train"][index] for index in range(5)])


def run(*words, code: int = 0) -> str:
    """The script from start to end; returns what it said."""
    command = [sys.executable, str(ROOT / "train_prs_med.py"), *SETTINGS, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(data_root, tmp_path_factory) -> Path:
    """A run of one epoch."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run("--data_root", data_root, "--output_dir", folder, "--num_epochs", 1, "--generate_every", 1, "--lora_rank", 3)
    return folder


# --- model ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_text_loss_is_that_of_the_language_model(model, batch):
    """transformers' own loss over the answers' tokens, from ids, pixels and labels, one row at a time."""
    _, losses = model(batch)
    for k in range(5):
        prompt, answer = (batch[name][k][batch[name][k] >= 0] for name in ("prompt", "answer"))
        ids = torch.cat([prompt, answer])[None]
        labels = torch.cat([torch.full_like(prompt, -100), answer])[None]
        pixels = (batch["vlm"][batch["image_of"][k]][None] / 255 - model.vlm_mean) / model.vlm_std
        expected = model.vlm(input_ids=ids, pixel_values=pixels, labels=labels).loss * len(answer)
        assert losses[k].item() == pytest.approx(expected.item(), rel=1e-5)


@torch.no_grad()
def test_the_mask_knows_nothing_of_the_answer(model, batch):
    logits, losses = model(batch)
    other = batch["ids"].clone()
    for k, places in enumerate(batch["answer_at"]):
        other[k, places[places > 0] + 1] = 7
    changed, other_losses = model(batch | {"ids": other})
    assert torch.equal(logits, changed)
    assert not torch.equal(losses, other_losses)
    # but of the question
    for k, places in enumerate(batch["words"]):
        other[k, places[places >= 0][-5]] = 9
    assert not torch.equal(logits, model(batch | {"ids": other})[0])


@torch.no_grad()
def test_an_image_is_encoded_once(model, sets):
    """Rows 0 and 1 ask about copies of one image; the results are those of a row alone."""
    rows = [sets["train"][index] for index in range(2)]
    together = script.collate(model.reader, rows)
    assert (len(together["sam"]), len(together["vlm"]), together["image_of"].tolist()) == (1, 1, [0, 0])
    logits, losses = model(together)
    for k in range(2):
        alone = model(script.collate(model.reader, [rows[k]]))
        assert torch.allclose(logits[k], alone[0][0], atol=1e-4)
        assert losses[k].item() == pytest.approx(alone[1].item(), rel=1e-5)


@torch.no_grad()
def test_answers_are_what_the_language_model_generates(model, batch):
    answers = model.answer(batch, 4)
    for k, answer in enumerate(answers):
        prompt = batch["prompt"][k][batch["prompt"][k] >= 0][None]
        pixels = (batch["vlm"][batch["image_of"][k]][None] / 255 - model.vlm_mean) / model.vlm_std
        options = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": model.reader.pad}
        tokens = model.vlm.generate(input_ids=prompt, pixel_values=pixels, **options)[0, prompt.shape[1] :]
        assert answer == model.reader.tokenizer.decode(tokens, skip_special_tokens=True).strip()


@pytest.mark.parametrize("change", [fold_relative_positions, look_up_in_order])
@pytest.mark.parametrize("side", [48, 32])
def test_sam_attends_the_same(args, data_root, change, side):
    """Outputs and gradients of folded positions, and of those looked up in order, are those of transformers."""
    words = ["--data_root", str(data_root), "--image_size", str(side)]
    plain, changed = (script.build_model(script.parse_args(words), "no", torch.device("cpu")).sam for _ in range(2))
    change(changed)
    images, results = torch.randn(2, 3, side, side), []
    weights = torch.randn_like(plain(images).last_hidden_state)
    for encoder in (plain, changed):
        out = encoder(images).last_hidden_state
        (out * weights).sum().backward()
        results.append([out, *(parameter.grad for parameter in encoder.parameters() if parameter.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-4 * one.norm()


def test_merged_lora_gives_the_same_answers(args, batch, model):
    merged = script.build_model(args, "no", torch.device("cpu")).eval()
    merged.load_state_dict(model.state_dict())
    script.merge_lora(merged)
    with torch.no_grad():
        assert torch.allclose(merged(batch)[1], model(batch)[1], rtol=1e-4)
    assert merged.answer(batch, 4) == model.answer(batch, 4)


def test_upsample_is_bilinear():
    masks = torch.randn(2, 1, 7, 5)
    expected = torch.nn.functional.interpolate(masks, (20, 20), mode="bilinear", align_corners=False)
    assert torch.allclose(script.upsample(masks, 20), expected, atol=1e-6)


# --- data -------------------------------------------------------------------------------------------------------------


def test_prompt_and_answer_are_tokenized_together(model):
    """The ids are those of the whole text with its image token repeated, as the VLM's own processor makes them."""
    reader = model.reader
    prompt, answer = reader.tokens("Where is it?", "There.")
    image = reader.tokenizer.convert_ids_to_tokens(reader.image_token)
    text = f"USER: {image * reader.image_tokens}\nWhere is it?\nASSISTANT: There."
    assert prompt + answer == [*reader.tokenizer(text)["input_ids"], reader.end]
    assert prompt.count(reader.image_token) == reader.image_tokens
    assert reader.tokenizer.decode(answer, skip_special_tokens=True).strip() == "There."


def test_an_image_is_padded_not_stretched(model):
    wide = Image.fromarray(np.full((20, 40, 3), 200, np.uint8))
    sam, _ = model.reader.pixels(wide)
    assert sam.shape == (3, 48, 48)
    assert (sam[:, 12:36] == 200).all()
    assert sam[:, :12].max() == sam[:, 36:].max() == 0


def test_augmentation_moves_image_mask_and_answer_together():
    """A white lesion on black: the moved mask is where the image is white; it is another at each epoch and sample."""
    mask = np.zeros((64, 64), bool)
    mask[20:30, 36:50] = True
    image = np.repeat(255 * mask[None].astype(np.uint8), 3, axis=0)
    seen = set()
    for epoch in range(20):
        sam, vlm, moved = script.augment(image, image[:, ::2, ::2], mask, np.random.default_rng(epoch))
        assert (np.logical_xor(sam[0] > 100, moved)).sum() <= 0.25 * moved.sum()
        assert (np.logical_xor(vlm[0] > 100, moved[::2, ::2])).sum() <= 0.35 * moved.sum() / 4
        assert 0.7 < moved.sum() / mask.sum() < 1.4
        seen.add(moved.tobytes())
    assert len(seen) > 15


def test_augmented_rows_are_a_function_of_epoch_and_image(args, model, sets):
    data = script.PositionData(sets["train"].rows, model.reader, (sets["train"].images, sets["train"].masks), 3)

    def item(index: int, epoch: int) -> dict:
        place = Index(index)
        place.epoch = epoch
        return data[place]

    assert torch.equal(item(0, 1)["sam"], item(0, 1)["sam"])
    # two questions about one image see the same change
    assert torch.equal(item(0, 1)["sam"], item(1, 1)["sam"])
    assert not torch.equal(item(0, 1)["sam"], item(0, 2)["sam"])
    assert not torch.equal(item(0, 1)["sam"], sets["train"][0]["sam"])
    for epoch in range(6):
        row = item(0, epoch)
        assert row["position"] == position_of(row["mask"].numpy())
        words = model.reader.tokenizer.decode(row["answer"], skip_special_tokens=True)
        assert script.position_in(words) == row["position"]


# --- losses and scores ------------------------------------------------------------------------------------------------


def test_mask_loss_against_numpy_and_monai():
    from monai.losses import DiceLoss

    torch.manual_seed(0)
    logits, masks = torch.randn(3, 9, 9), torch.rand(3, 9, 9) > 0.7
    probability, target = 1 / (1 + np.exp(-logits.numpy())), masks.numpy()
    bce = -np.where(target, np.log(probability), np.log(1 - probability)).mean((1, 2))
    dice = DiceLoss(sigmoid=True, smooth_nr=1, smooth_dr=1, reduction="none")(logits[:, None], masks[:, None].float())
    assert np.allclose(script.mask_loss(logits, masks), bce + dice.numpy().ravel(), atol=1e-6)


def test_hausdorff_of_empty_and_shifted_masks():
    masks = torch.zeros(4, 32, 24, dtype=torch.bool)
    masks[0, 5:15, 5:15] = masks[1, 5:15, 8:18] = True
    distances = report.hausdorff_95(masks[[0, 0, 2, 2]], masks[[0, 1, 0, 3]])
    assert distances == [0, 3, 40, 0]


def test_every_row_is_scored_by_its_own_mask(model, sets, args, tmp_path):
    """Dice, IoU and positions against plain NumPy on the model's masks."""

    class Plain:
        ranks, leaf = None, 4

        @staticmethod
        def batches(loader):
            return iter(loader)

    scores, examples = script.evaluate(model, script.make_loader(sets["test"], args, 5), Plain, hausdorff=True)
    assert [row["index"] for row in scores] == list(range(12))
    for row in scores:
        item = sets["test"][row["index"]]
        with torch.no_grad():
            predicted = model(script.collate(model.reader, [item]))[0][0].numpy() > 0
        true = item["mask"].numpy()
        both, either = (predicted & true).sum(), (predicted | true).sum()
        assert row["dice"] == pytest.approx(2 * both / (predicted.sum() + true.sum()), abs=0.02)
        assert row["iou"] == pytest.approx(both / either, abs=0.02)
        assert row["position"] == position_of(true)
    assert len(examples) == report.EXAMPLES


def test_the_table_leads_by_pairs(capsys):
    """Gains are mean paired differences with their intervals; the summary has every number of the table."""
    rows = [Row("ct", f"{k}.png", "", "test", "", "", "", patient=str(k)) for k in range(20)]
    scores = [
        {"index": k, "dice": 0.9 + 0.004 * (k % 3), "iou": 0.8, "hd95": 40.0 * (k == 7), "position_accuracy": 1.0}
        for k in range(20)
    ]
    rival = [{"index": k, "dice": 0.5 + 0.004 * (k % 5)} for k in range(20)]
    often = [{"index": k, "position_accuracy": float(k < 5)} for k in range(20)]
    others = {"rival/grey_threshold": rival, "rival/frequent_position": often}
    metrics = report.print_table("test", scores, others, rows)
    table = capsys.readouterr().out
    gain = np.mean([a["dice"] - b["dice"] for a, b in zip(scores, rival, strict=True)])
    assert metrics["test/rival/grey_threshold/dice_gain"] == pytest.approx(gain)
    assert (
        metrics["test/rival/grey_threshold/dice_gain_low"] < gain < metrics["test/rival/grey_threshold/dice_gain_high"]
    )
    assert metrics["test/rival/frequent_position/position_accuracy"] == 0.25
    assert metrics["test/rival/frequent_position/position_accuracy_gain"] == 0.75
    assert "grey threshold" in table
    assert f"{gain:+.3f} (" in table
    assert metrics["test/dice"] == pytest.approx(0.9 + 0.004 * 19 / 20)
    assert metrics["test/dice_low"] < metrics["test/dice"] < metrics["test/dice_high"]
    # a distance is not negative, whatever its variance
    assert (metrics["test/hd95"], metrics["test/hd95_low"]) == (2.0, 0.0)


# --- a run and what it leaves -----------------------------------------------------------------------------------------


def test_summary_cases_and_figures(trained):
    summary = json.loads((trained / "summary.json").read_text())
    with open(trained / "test_cases.csv") as file:
        cases = list(csv.DictReader(file))
    assert len(cases) == 12
    assert summary["test/dice"] == pytest.approx(np.mean([float(case["dice"]) for case in cases]))
    assert summary["test/dice_low"] <= summary["test/dice"] <= summary["test/dice_high"]
    for name in ("rival/grey_threshold/dice", "rival/mean_mask/dice", "rival/frequent_position/position_accuracy"):
        assert 0 <= summary[f"test/{name}"] <= 1
    for name in ("blank_image", "shuffled_image"):
        assert 0 <= summary[f"test/ablation/{name}/dice"] <= 1
    assert {path.name for path in (trained / "figures").iterdir()} == {
        "curves.png",
        "test_predictions.png",
        "val_predictions.png",
    }
    log = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert "val/position_accuracy" in log[-1]


def test_eval_only_repeats_the_test(trained, data_root):
    run("--data_root", data_root, "--output_dir", trained, "--eval_only")
    again = json.loads((trained / "eval_test.json").read_text())
    summary = json.loads((trained / "summary.json").read_text())
    assert {name: summary[name] for name in again if name.startswith("test/")} == again


def test_results_that_rank_0_cannot_write_end_all_ranks_with_one_line(trained, data_root, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / "test_cases.csv").unlink()
    (folder / "test_cases.csv").mkdir()
    text = run("--data_root", data_root, "--output_dir", folder, "--eval_only", "--world_size", 2, code=1)
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {folder}: results not written ([Errno 21] Is a directory")
    assert line.endswith("; make room, then --eval_only")
    assert "Traceback" not in text


def test_predict(trained, data_root, tmp_path):
    """Images of any shape, one unreadable; masks at their sizes; a second call keeps the first one's files."""
    source = next((data_root / "lung_CT" / "test_images").iterdir())
    Image.open(source).resize((60, 33)).save(tmp_path / "wide.png")
    shutil.copy(source, tmp_path / "case.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "ask.csv").write_text(
        "image,question\nwide.png,Where?\ncase.png,Where?\ncase.png,What?\nbroken.png,Why?\n"
    )
    words = ["--data_root", data_root, "--output_dir", trained, "--predict", tmp_path / "ask.csv"]
    text = run(*words)
    assert "broken.png: cannot be read" in text
    folder = trained / "predictions"
    with open(folder / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["question"] for row in rows] == ["Where?", "Where?", "What?"]
    assert Image.open(folder / rows[0]["mask"]).size == (60, 33)
    assert len({row["mask"] for row in rows}) == 3
    for row in rows:
        mask = np.asarray(Image.open(folder / row["mask"])) > 0
        assert row["mask_position"] == (position_of(mask) or "")
        assert row["agree"] == str(script.position_in(row["answer"]) == position_of(mask))
    before = (folder / "predictions.csv").read_bytes()
    run("--data_root", data_root, "--output_dir", trained, "--predict", tmp_path / "case.png", "--question", "Where?")
    assert (folder / "predictions.csv").read_bytes() == before
    assert (trained / "predictions_2" / "predictions.csv").exists()


def test_questions_about_an_image_in_a_row(trained, data_root, tmp_path):
    """--questions_per_image is a fact of a run, and resumes to the bit."""
    words = ["--data_root", data_root, "--questions_per_image", 2, "--num_epochs", 2, "--deterministic"]
    run(*words, "--output_dir", tmp_path / "whole")
    run(*words, "--output_dir", tmp_path / "run", "--max_steps", 2)
    run(*words, "--output_dir", tmp_path / "run", "--resume_from", "auto")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "run")]
    assert weights[0] == weights[1]
    words[3] = 1
    text = run(*words, "--output_dir", tmp_path / "run", "--resume_from", "auto", code=2)
    assert "a run with questions per image 2, now 1" in text


# --- the user's mistakes ----------------------------------------------------------------------------------------------


def test_mistakes_are_one_line(trained, data_root, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(data_root, other)
    config = other / "llava_tiny" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    weights = {name: value + 0.01 for name, value in load_file(config).items()}
    save_file(weights, config, metadata={"format": "pt"})
    image = next((other / "lung_CT" / "train_images").iterdir())
    image.write_bytes(image.read_bytes()[:100])
    trials = {
        ("--data_root", tmp_path / "nowhere"): "no such folder; give --data_root, or make data up",
        ("--data_root", data_root, "--image_size", 50): "not a multiple of SAM's patch; try 48",
        ("--data_root", data_root, "--vlm_path", data_root / "sam_tiny"): "is a sam model, not llava",
        ("--data_root", data_root, "--annotations", "lung"): "no lung.csv, there are",
        ("--data_root", data_root, "--predict", "x.png"): "needs --question",
        ("--data_root", other): "cannot be opened as an image",
        ("--data_root", other, "--skip_data_check"): "is not a readable image",
        (
            "--data_root",
            other,
            "--skip_data_check",
            "--resume_from",
            trained / "best.pt",
        ): "not the base that the checkpoint",
    }
    for words, line in trials.items():
        text = run(*words, "--output_dir", tmp_path / "run", "--overwrite", code=2)
        errors = [told for told in text.splitlines() if told.startswith("error: ")]
        assert len(errors) == 1, text
        assert line in errors[0]
        assert "Traceback" not in text


# what the script adds to the flags that all share: a new one is a decision
FLAGS = """
    data_root annotations skip_bad_rows skip_data_check patient_column patient_pattern questions_per_image cache_gb
    augmentation vlm_path sam_path image_size lora_rank lora_alpha lora_dropout gradient_checkpointing lambda_seg
    lambda_txt lr_scaling lr_schedule warmup_steps weight_decay eval_split generate_every max_new_tokens predict
    question
""".split()
COMMON_FLAGS = """
    config output_dir num_epochs seed max_steps resume_from overwrite eval_only eval_every_steps save_every keep_last
    batch_size gradient_accumulation_steps effective_batch_size learning_rate grad_clip max_bad_steps mixed_precision
    auto_batch gpu_shares num_workers compile deterministic profile log_every wandb world_size dist_timeout local_rank
""".split()


def test_the_flags_are_these(args):
    assert sorted(vars(args)) == sorted(FLAGS + COMMON_FLAGS)
