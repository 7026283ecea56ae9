"""train_prs_med.py and tasks/prs_med: data, model, losses, scores, baselines, --predict, bad inputs, preparation."""

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np
import pandas as pd
import pytest
import torch
from monai.losses import DiceLoss
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.metrics import f1_score, jaccard_score, log_loss
from test_images_and_tables import save_dicom
from test_volumes import AFFINE, HU, save_nifti, write_series

import distributed_utils as du
import train_prs_med as script
from tasks.prs_med import annotations, report, rivals, sample_data, wordings
from tasks.prs_med.annotations import Row, check_data, open_mask, position_in, position_of, read_rows
from tasks.prs_med.prepare import prepare
from tasks.prs_med.sam_attention import fold_relative_positions, make_relative_positions_deterministic
from tasks.prs_med.unet import unet_scores
from tools.prepare_data import parse_args as prepare_args
from utils.cli import InputError, RunError
from utils.sampler import Index
from utils.stats import interval_of_mean

ALONE = du.Ranks(0, 1, torch.device("cpu"), "python", None)
SETTINGS = "--num_workers 0 --batch_size 4 --max_new_tokens 4 --log_every 1 --unet_steps 2".split()


@pytest.fixture(scope="module", autouse=True)
def short_pretraining():
    """Pretraining the tiny language model takes 10 s, and no test here needs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_data, "PRETRAINING_STEPS", 2)
        yield


@pytest.fixture(scope="module")
def data_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data") / "prs_med"
    sample_data.write_sample_data(root, num_train=6, num_val=3, num_test=6, image_size=48, seed=0)
    return root


@pytest.fixture(scope="module")
def args(data_root):
    return script.parse_args(["--data_root", str(data_root), "--lora_dropout", "0", "--reword", "0", *SETTINGS])


@pytest.fixture(scope="module")
def model(args):
    model = script.build_model(args, "no", torch.device("cpu"))
    for name, parameter in model.named_parameters():
        # LoRA's second matrix starts at 0, which would hide errors in the first
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.1)
    return model.eval()


@pytest.fixture(scope="module")
def sets(args, model):
    return script.make_sets(script.read_data(args, "train"), model.processor, args)


@pytest.fixture(scope="module")
def batch(model, sets):
    return script.collate(model.processor, [sets["train"][index] for index in range(5)])


@pytest.fixture(scope="module")
def run(data_root):
    """run(words...): run the script in this process."""

    def start(*words) -> None:
        known = ["--data_root", data_root, *SETTINGS, *words]
        assert script.run_task(script.parse_args([str(word) for word in known]), ALONE) == 0

    return start


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory) -> Path:
    """The folder of a run of 4 steps of two micro-batches each, the second of which is small."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    flags = "--effective_batch_size 8 --num_epochs 2 --generate_every 2 --lora_rank 3 --questions_per_image 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "MOST_ABLATED", 5)
        run("--output_dir", folder, *flags.split(), "--warmup_steps", 1, "--lr_schedule", "cosine")
    return folder


def read_csv(path: Path) -> list[dict[str, str]]:
    return pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")


def in_epoch(number: int, epoch: int) -> Index:
    index = Index(number)
    index.epoch = epoch
    return index


# --- model ------------------------------------------------------------------------------------------------------------


def test_trained_parameters(model):
    """LoRA in all projections of the language model, SAM's encoder and the decoder; nothing of the image tower."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    lora = {name for name in trained if name.startswith("vlm.")}
    assert trained - lora == {name for name, _ in model.named_parameters() if name.startswith(("sam.", "decoder."))}
    assert len(lora) == 2 * 7 * model.vlm.config.text_config.num_hidden_layers


@torch.no_grad()
def test_text_loss_and_answers_match_transformers(model, batch):
    """transformers' own loss over the answers' tokens and its own generation, one row at a time."""
    _, losses = model(batch)
    answers = model.answer(batch, 4)
    for k in range(5):
        prompt, answer = (batch[name][k][batch[name][k] >= 0] for name in ("prompt", "answer"))
        labels = torch.cat([torch.full_like(prompt, -100), answer])[None]
        pixels = (batch["vlm"][batch["image_of"][k]][None] / 255 - model.vlm_mean) / model.vlm_std
        inputs = {"input_ids": torch.cat([prompt, answer])[None], "pixel_values": pixels, "labels": labels}
        assert losses[k].item() == pytest.approx(model.vlm(**inputs).loss.item() * len(answer), rel=1e-5)
        options = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": model.processor.pad}
        tokens = model.vlm.generate(input_ids=prompt[None], pixel_values=pixels, **options)[0, len(prompt) :]
        assert answers[k] == model.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()


@torch.no_grad()
def test_mask_depends_on_question_not_answer(model, batch):
    logits, losses = model(batch)
    other = batch["ids"].clone()
    for k, indices in enumerate(batch["answer_at"]):
        other[k, indices[indices > 0] + 1] = 7
    changed, other_losses = model(batch | {"ids": other})
    assert torch.equal(logits, changed)
    assert not torch.equal(losses, other_losses)
    for k, indices in enumerate(batch["words"]):
        other[k, indices[indices >= 0][-5]] = 9
    assert not torch.equal(logits, model(batch | {"ids": other})[0])


@torch.no_grad()
def test_each_image_is_encoded_once(model, sets, data_root):
    """Rows 0 and 1 ask about copies of one image; results equal those of each row alone. SAM has its own statistics."""
    rows, seen = [sets["train"][index] for index in (0, 2, 1, 3)], []
    together = script.collate(model.processor, rows)
    assert (len(together["sam"]), len(together["vlm"]), together["image_of"].tolist()) == (2, 2, [0, 1, 0, 1])
    hook = model.sam.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    found = model(together)
    hook.remove()
    for row, *results in zip(rows, *found, strict=True):
        for result, alone in zip(results, model(script.collate(model.processor, [row])), strict=True):
            assert torch.allclose(result, alone[0], atol=1e-4)
    settings = json.loads((data_root / "sam_tiny/preprocessor_config.json").read_text())
    mean, std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    assert torch.allclose(seen[0] * std + mean, together["sam"] / 255, atol=1e-6)


@pytest.mark.parametrize("side", [48, 32])
def test_sam_attention_matches_transformers(data_root, side):
    """Outputs and gradients of both replacements, at SAM's own size and at an interpolated one."""
    words = ["--data_root", str(data_root), "--image_size", str(side)]
    images, results = torch.randn(2, 3, side, side), []
    for change in (lambda sam: None, fold_relative_positions, make_relative_positions_deterministic):
        sam = script.build_model(script.parse_args(words), "no", torch.device("cpu")).sam
        change(sam)
        out = sam(images).last_hidden_state
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out, *(parameter.grad for parameter in sam.parameters() if parameter.grad is not None)])
    assert len(results[0]) > 10
    for plain, *others in zip(*results, strict=True):
        assert all((plain - other).norm() <= 1e-4 * plain.norm() for other in others)


# --- items and batches ------------------------------------------------------------------------------------------------


def test_tokens_match_the_whole_text(model):
    """The ids are those of the whole text with its image token repeated, as the VLM's own processor makes them."""
    processor = model.processor
    prompt, answer = processor.tokens("Where is it?", "There.")
    image = processor.tokenizer.convert_ids_to_tokens(processor.image_token)
    text = f"USER: {image * processor.image_tokens}\nWhere is it?\nASSISTANT: There."
    assert prompt + answer == [*processor.tokenizer(text)["input_ids"], processor.end]


def test_image_and_mask_are_padded_to_a_square(model, sets, tmp_path):
    white = Image.new("L", (40, 20), 255)
    white.save(tmp_path / "mask.png")
    mask = sets["train"].decode_mask(tmp_path / "mask.png")[:-1].reshape(48, 48)
    assert mask.sum(1).tolist() == [0] * 12 + [48] * 24 + [0] * 12
    assert (model.processor.pixels(white.convert("RGB"))[0] == 255 * mask).all()


def test_file_damaged_after_the_check_is_reported(sets, model, args, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    row = sets["train"].rows[0]._replace(image=str(tmp_path / "a.png"), digest="")
    item = script.make_sets([row], model.processor, args)["train"][0]
    assert item["error"].startswith(f"{row.source}: {tmp_path}/a.png is not a readable image")


def test_augmentation_moves_images_and_mask_together():
    """With a white lesion on black, the moved mask is where both images are white."""
    mask = np.zeros((64, 64), bool)
    mask[20:30, 36:50] = True
    image = np.repeat(255 * mask[None].astype(np.uint8), 3, axis=0)
    seen = set()
    for seed in range(20):
        sam, vlm, moved, _ = script.augment(image, image[:, ::2, ::2], mask, np.random.default_rng(seed))
        assert (np.logical_xor(sam[0] > 100, moved)).sum() <= 0.25 * moved.sum()
        assert (np.logical_xor(vlm[0] > 100, moved[::2, ::2])).sum() <= 0.35 * moved.sum() / 4
        seen.add(moved.tobytes())
    assert len(seen) > 15


def test_reworded_questions_name_their_structure(sets):
    """Some also name another that they exclude; the answer stays the same."""
    data = sets["train"]
    reworded = script.PositionData(data.rows, data.processor, data.caches, 3, reword=1.0)
    names, questions, excluded = [list(row.names) for row in data.rows], [], 0
    for number, row in enumerate(data.rows):
        for epoch in range(30):
            item = reworded[in_epoch(number, epoch)]
            assert item["answer"] == data[number]["answer"]
            questions.append(data.processor.tokenizer.decode(item["prompt"]))
            found = wordings.named_in(questions[-1], names)
            assert row.names[0] in found
            excluded += len(found) == 2
    assert len({*questions}) > 0.9 * len(questions)
    assert 0.2 < excluded / len(questions) < 0.5


def test_questions_about_absent_structures(sets):
    """The mask is empty and the answer says so; a name that may mean a structure of the modality is never absent."""
    data = sets["train"]
    asked = script.PositionData(data.rows, data.processor, data.caches, 3, absent=1.0)
    for number, row in enumerate(data.rows):
        item = asked[in_epoch(number, 5)]
        assert torch.equal(item["sam"], data[number]["sam"])
        assert (item["mask"].any(), item["position"]) == (False, None)
        answer = data.processor.tokenizer.decode(item["answer"], skip_special_tokens=True).strip()
        name = answer.removeprefix("there is no ").removesuffix(" in this image.")
        assert name in {other.names[0] for other in data.rows if other.modality != row.modality}
        question = data.processor.tokenizer.decode(item["prompt"])
        assert name in wordings.named_in(question, [list(row.names) for row in data.rows])

    structures = [("xr", ["left lung"]), ("ct", ["Lung"]), ("us", ["lump", "cyst"]), ("ct", ["nodule", "cyst"])]
    rows = [Row(kind, "", "", "train", "", "", "", names=tuple(names)) for kind, names in [*structures, ("mr", [])]]
    expected = {"xr": ["lump", "nodule"], "ct": [], "us": ["Lung", "left lung"], "mr": []}
    assert wordings.absent_names(rows) == expected


def test_augmented_rows_are_a_function_of_epoch_and_image(args, model, sets, monkeypatch):
    flags = argparse.Namespace(**vars(args) | {"augmentation": True, "seed": 3})
    made = script.make_sets(sets["train"].rows + sets["val"].rows, model.processor, flags)
    data = made["train"]
    assert (data.augmented, made["val"].augmented) == (True, False)
    # two questions about one image see the same change
    first = data[in_epoch(0, 1)]["sam"]
    assert torch.equal(first, data[in_epoch(1, 1)]["sam"])
    assert not torch.equal(first, data[in_epoch(0, 2)]["sam"])
    # the answer names where the lesion is now
    assert position_in(data.rows[0].answer) == "bottom right"
    moved = np.zeros((48, 48), bool)
    moved[40:, :8] = True
    monkeypatch.setattr(script, "augment", lambda sam, vlm, mask, rng: (sam, vlm, moved, False))
    row = data[in_epoch(0, 1)]
    words = model.processor.tokenizer.decode(row["answer"], skip_special_tokens=True)
    assert row["position"] == position_in(words) == "bottom left"


def test_augmented_questions_about_one_image_get_pixels_that_fit_their_masks(args, model, sets, tmp_path):
    """An absent structure's image moves like the others'; one whose mask would leave the image stays in place."""
    corner = np.zeros((48, 48), np.uint8)
    corner[0, 0] = 255
    Image.fromarray(corner).save(tmp_path / "corner.png")
    lesion = sets["train"].rows[0]
    rows = [lesion._replace(mask=""), lesion._replace(mask=str(tmp_path / "corner.png")), lesion]
    flags = argparse.Namespace(**vars(args) | {"augmentation": True, "seed": 3})
    data = script.make_sets(rows, model.processor, flags)["train"]
    stayed = 0
    for epoch in range(8):
        items = [data[in_epoch(number, epoch)] for number in range(3)]
        batch = script.collate(model.processor, items)
        for item, image in zip(items, batch["image_of"], strict=True):
            assert torch.equal(batch["sam"][image], item["sam"])
            assert torch.equal(batch["vlm"][image], item["vlm"])
        assert torch.equal(items[0]["sam"], items[2]["sam"])
        assert items[1]["mask"].any()
        stayed += len(batch["sam"]) == 2
    assert 0 < stayed < 8


# --- losses, scores, tables -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_micro_batch_losses_sum_to_the_global_mean(model, sets, args):
    """BCE and Dice for each row, by scikit-learn and MONAI; cross-entropy for each token."""
    rows = [sets["train"][index] for index in range(7)]
    micro_batches = [script.collate(model.processor, part) for part in (rows[:3], rows[3:])]
    [tokens] = script.count_answer_tokens(micro_batches)
    assert tokens == sum(len(row["answer"]) for row in rows)
    logits, entropy = model(script.collate(model.processor, rows))
    masks = torch.stack([row["mask"] for row in rows])
    dice = DiceLoss(sigmoid=True, smooth_nr=1, smooth_dr=1)(logits[:, None], masks[:, None])
    seg = log_loss(masks.flatten(), logits.double().sigmoid().flatten()) + dice.item()
    txt = entropy.sum().item() / tokens
    losses = sum(torch.stack(script.batch_loss(model, part, 7, tokens, args)) for part in micro_batches)
    assert losses.tolist() == pytest.approx([seg + 0.5 * txt, seg, txt], rel=1e-5)


def test_hausdorff_of_empty_and_shifted_masks():
    masks = torch.zeros(4, 32, 24, dtype=torch.bool)
    masks[0, 5:15, 5:15] = masks[1, 5:15, 8:18] = True
    assert report.hausdorff_95(masks[[0, 0, 2, 2]], masks[[0, 1, 0, 3]]) == [0, 3, 40, 0]


@torch.no_grad()
def test_scores_match_scikit_learn(model, sets, args):
    """Dice, IoU and positions of each row's mask."""
    scores, _ = script.evaluate(model, script.make_loader(sets["test"], args, 5), SimpleNamespace(batches=iter))
    assert [row["index"] for row in scores] == list(range(12))
    for row, item in zip(scores, sets["test"], strict=False):
        true, predicted = item["mask"].numpy(), model(script.collate(model.processor, [item]))[0][0].numpy() > 0
        expected = [score(true.ravel(), predicted.ravel()) for score in (f1_score, jaccard_score)]
        assert [row["dice"], row["iou"]] == pytest.approx(expected, abs=0.02)
        assert row["position"] == position_of(true)
        assert row["position_accuracy_mask"] == (position_of(predicted) == position_of(true))


def test_table_shows_paired_gains_with_intervals():
    rows = [Row("ct", f"{k}.png", "", "test", "", "", "", patient=str(k // 2)) for k in range(20)]
    dice, other = 0.9 + 0.004 * (np.arange(20) % 3), 0.5 + 0.004 * (np.arange(20) % 5)
    scores = [{"index": k, "dice": x, "hd95": 40.0 * (k == 7), "position_accuracy": 1.0} for k, x in enumerate(dice)]
    rival = [{"index": k, "dice": x} for k, x in enumerate(other)]
    often = [{"index": k, "position_accuracy": float(k < 5)} for k in range(20)]
    answers = ("There is no cyst in this image.", "The cyst is in the top left.", "There is no cyst.")
    absent = [{"index": k, "dice": float(k == 1), "generated": answer} for k, answer in enumerate(answers)]
    others = {"rival/grey_threshold": rival, "rival/frequent_position": often, "absent": absent}
    metrics = report.print_table("test", scores, others, rows)
    gains, patients = dice - other, [row.patient for row in rows]
    expected = gains.mean(), *interval_of_mean(gains, patients, bounded=False)
    found = [metrics[f"test/rival/grey_threshold/dice_gain{end}"] for end in ("", "_low", "_high")]
    assert found == pytest.approx(expected)
    assert (metrics["test/dice_low"], metrics["test/dice_high"]) == pytest.approx(interval_of_mean(dice, patients))
    assert metrics["test/rival/frequent_position/position_accuracy_gain"] == 0.75
    # a distance is not negative, whatever its variance
    assert (metrics["test/hd95"], metrics["test/hd95_low"]) == (2.0, 0.0)
    found = [metrics[f"test/absent/{name}"] for name in ("empty_mask", "place_named")]
    assert found == pytest.approx([1 / 3, 1 / 3])


def test_ablations_take_the_image_away_or_from_another_case():
    rows = [Row("ct", f"{k}.png", "", "test", "", "", "", patient=str(k // 2)) for k in range(8)]
    changed = report.ablations(rows, [2, 3, 6], seed=0)
    found = [(index, row.image) for _, index, row in changed]
    assert found == [(2, ""), (3, ""), (6, ""), (2, "6.png"), (3, "6.png"), (6, "2.png")]


# --- a run and what it writes -----------------------------------------------------------------------------------------


def test_run_and_its_test(trained, run, monkeypatch):
    """Learning rates, the summary computed from the cases, and the same summary from --eval_only."""
    log = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    rates = [line["train/lr"] for line in log if "train/lr" in line]
    assert rates == pytest.approx([2e-4, 2e-4, 1.5e-4, 0.5e-4])
    assert ["val/position_accuracy" in line for line in log if "val/dice" in line] == [False, True]

    summary = json.loads((trained / "summary.json").read_text())
    cases = pd.read_csv(trained / "test_cases.csv", keep_default_na=False)
    loss = cases["loss_seg"].mean() + 0.5 * cases["loss_txt"].sum() / cases["tokens"].sum()
    assert summary["test/loss"] == pytest.approx(loss)
    right = [position_in(case.generated) == case.position for case in cases.itertuples()]
    assert summary["test/position_accuracy"] == np.mean(right)
    assert summary["test/worst_wording/dice"] <= summary["test/in_other_words/dice"]
    dice = cases["dice"]
    compared = {"rival/unet": dice, "ablation/blank_image": dice[[0, 2, 5, 8, 11]]}
    for name, own in compared.items():
        assert summary[f"test/{name}/dice_gain"] == pytest.approx(own.mean() - summary[f"test/{name}/dice"])

    monkeypatch.setattr(report, "MOST_ABLATED", 5)
    run("--output_dir", trained, "--eval_only")
    again = json.loads((trained / "eval_test.json").read_text())
    assert "test/absent/empty_mask" in again
    assert {name: summary[name] for name in again if name.startswith("test/")} == again
    (trained / "test_cases.csv").unlink()
    (trained / "test_cases.csv").mkdir()
    with pytest.raises(RunError, match=r"results not written \(.*; make room, then --eval_only"):
        run("--output_dir", trained, "--eval_only")


def test_predict(trained, run, data_root, tmp_path, capsys):
    """Masks have their images' sizes, unreadable images are left out, and a second call keeps the first one's files."""
    source = next((data_root / "lung_CT" / "test_images").iterdir())
    Image.open(source).resize((60, 33)).save(tmp_path / "wide.png")
    shutil.copy(source, tmp_path / "case.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    named = {"THE TUMOUR?": "tumour", "tumour, not the fibrosis": "fibrosis|tumour", "the tumours": ""}
    asked = [*zip(("wide", "case", "case"), named, strict=True), ("broken", "Why?")]
    (tmp_path / "ask.csv").write_text("\n".join(["image,question", *(f'{name}.png,"{text}"' for name, text in asked)]))
    run("--output_dir", trained, "--predict", tmp_path / "ask.csv")
    out = capsys.readouterr().out
    assert "broken.png: cannot be read" in out
    assert "2 of 3 questions name none of the training's structures, or several" in out
    assert "names fibrosis and tumour; known are fibrosis, glioma, keratosis, meningioma, naevus, tumour" in out
    folder = trained / "predictions"
    rows = read_csv(folder / "predictions.csv")
    assert [(Path(row["image"]).stem, row["question"]) for row in rows] == asked[:3]
    assert [row["named"] for row in rows] == [*named.values()]
    assert [Image.open(folder / row["mask"]).size for row in rows] == [(60, 33), (48, 48), (48, 48)]
    for row in rows:
        mask = np.asarray(Image.open(folder / row["mask"])) > 0
        assert row["mask_position"] == (position_of(mask) or "")
        assert row["agree"] == str(position_in(row["answer"]) == position_of(mask))
    run("--output_dir", trained, "--predict", tmp_path / "case.png", "--question", "Where?")
    assert read_csv(folder / "predictions.csv") == rows
    assert (trained / "predictions_2" / "predictions.csv").exists()


BAD_INPUTS = {
    "--image_size 50": "not a multiple of SAM's patch; try 48",
    "--vlm_path {root}/sam_tiny": "is a sam model, not llava",
    "--annotations lung_CT --absent 0.1": "all structures are of one modality; leave it out",
    "--data_root {tmp}/other": "lung_CT.csv:2, .*: 4 files cannot be opened",
    "--vlm_path {tmp}/other/llava_tiny --resume_from {trained}/best.pt": "not the base that the checkpoint",
}


@pytest.mark.parametrize("words", BAD_INPUTS)
def test_bad_inputs(words, trained, run, data_root, tmp_path):
    """In `other` the base model has other weights, and the training images of one modality are damaged."""
    if "other" in words:
        shutil.copytree(data_root, tmp_path / "other")
        path = tmp_path / "other/llava_tiny/model.safetensors"
        save_file({name: value + 0.01 for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
        for image in (tmp_path / "other/lung_CT/train_images").iterdir():
            os.truncate(image, 100)
    paths = {"tmp": tmp_path, "trained": trained, "root": data_root}
    with pytest.raises(InputError, match=BAD_INPUTS[words]):
        run("--output_dir", tmp_path / "run", *words.format(**paths).split())


# --- annotations ------------------------------------------------------------------------------------------------------

SIDE = 40
HEADER = "image_path,image_name,split,description,position,question,answer,patient"


def square(top: int, left: int, side: int = 12) -> np.ndarray:
    """(40, 40) bool."""
    mask = np.zeros((SIDE, SIDE), bool)
    mask[top : top + side, left : left + side] = True
    return mask


TWO_LABELS = square(2, 2) + np.uint8(2) * square(25, 25, 9)


def save(path: Path, values) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.asarray(values)
    Image.fromarray(values.astype(np.uint8) * 255 if values.dtype == bool else values).save(path)


def picture(number: int) -> np.ndarray:
    """(40, 40) uint8, a different one for each number."""
    return np.random.default_rng(number).integers(0, 256, (SIDE, SIDE)).astype(np.uint8)


def line(number: int, split: str, **changes: str) -> str:
    """A line of the CSV, about the mask <number>.png."""
    fields = {"image_path": f"ct/{split}_masks/{number}.png", "image_name": f"{number}.png", "split": split}
    fields |= {"question": "Where is the liver?", "answer": "The liver is in the top left.", "patient": f"p{number}"}
    return ",".join((fields | changes).get(name, "") for name in HEADER.split(","))


def write_set(root: Path, *more: str) -> Path:
    """Write images of three patients, in train, train and test, and `more` lines of the CSV. Returns root."""
    for number, split in enumerate(("train", "train", "test")):
        save(root / f"ct/{split}_images/{number}.png", picture(number))
        save(root / f"ct/{split}_masks/{number}.png", square(4, 4))
    (root / "annotations").mkdir(exist_ok=True)
    lines = [HEADER, line(0, "train"), line(1, "train"), line(2, "test"), *more]
    (root / "annotations/ct.csv").write_text("\n".join(lines))
    return root


@pytest.mark.parametrize(
    ("image", "mask", "path"),
    [
        ("ct/val_images/9.png", "ct/val_masks/9.png", r"ct\\val_masks\\9.png"),
        ("images_and_masks/ct/val_images/9.png", "images_and_masks/ct/val_masks/9.png", "ct/val_masks/9.png"),
        ("skin/val_images/I_9.jpg", "skin/val_masks/I_9_Segmentation.png", "skin/val_masks/I_9_Segmentation.png"),
        ("ct/val_images/a.1.dcm", "ct/val_masks/a.1.png", "ct/val_masks/a.1.png"),
        ("ct/val_images/shared.png", "ct/val_masks/9_liver.png", "ct/val_masks/9_liver.png"),
    ],
)
def test_row_finds_its_image_and_mask(tmp_path, image, mask, path):
    for name in (image, mask, "annotations/qa/ct.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    table = tmp_path / "annotations/qa/ct.csv"
    table.write_text(f"{HEADER}\n{line(9, 'val', image_path=path, image_name='shared.png')}")
    texts = "val", "Where is the liver?", "The liver is in the top left."
    files = str(tmp_path / image), str(tmp_path / mask)
    assert read_rows(tmp_path) == [Row("ct", *files, *texts, f"{table}:2", "p9", names=("liver",))]


def test_all_bad_rows_are_listed(tmp_path, capsys):
    absent = line(0, "train", image_path="ct/train_masks/7.png")
    outside = line(0, "train", image_path="../a_masks/0.png")
    write_set(tmp_path, absent, line(1, "dev"), line(1, "train", answer=" "), outside, line(8, "test"))
    save(tmp_path / "ct/test_masks/8.png", square(4, 4))
    with pytest.raises(InputError, match=r"ct.csv:5, .*ct.csv:6, .*ct.csv:7, ...: 5 rows cannot be used"):
        read_rows(tmp_path)
    reasons = ["mask ct/train_masks/7.png does not exist", "split 'dev'", "empty 'answer'", "'../a_masks", "no image 8"]
    for printed, number, reason in zip(capsys.readouterr().out.splitlines(), range(5, 10), reasons, strict=True):
        assert printed.startswith(f"{tmp_path}/annotations/ct.csv:{number}: ")
        assert reason in printed
    assert [row.patient for row in read_rows(tmp_path, skip_bad_rows=True)] == ["p0", "p1", "p2"]
    assert "5 rows dropped, 3 left" in capsys.readouterr().out


def test_patients_by_column_or_pattern(tmp_path):
    write_set(tmp_path)
    for options, patient in (({"patient_column": "image_name"}, "0.png"), ({"patient_pattern": r"(\d)\.png"}, "0")):
        assert read_rows(tmp_path, **options)[0].patient == patient


def test_position_follows_the_bounding_box():
    """Against the box from the list of foreground pixels, on random sparse masks of odd and even sizes."""
    rng, seen = np.random.default_rng(0), set()
    for _ in range(400):
        mask = rng.random(rng.integers(3, 12, 2)) < 0.06
        expected = None
        if mask.any():
            low, high = np.argwhere(mask).min(0), np.argwhere(mask).max(0) + 1
            middle = np.array(mask.shape) / 2
            y, x = (low + high) / 2 < middle
            expected = f"{'top' if y else 'bottom'} {'left' if x else 'right'}"
            if ((low < middle) & (middle < high)).all():
                expected = "center"
        assert position_of(mask) == expected
        seen.add(expected)
    assert len(seen) == 6


SENTENCES = {
    "The left kidney is in the bottom right of the image.": "bottom right",
    "The upper-left lobe, in the Lower Left part.": "bottom left",
    "It lies at the centre.": "center",
    "In the middle, not the top right": "top right",
    "On the left, at the top.": None,
}


def test_position_named_in_a_sentence():
    for sentence, position in SENTENCES.items():
        assert position_in(sentence) == position
        moved = annotations.name_position(sentence, position, "top left")
        assert position_in(moved) == (position and "top left")
        assert annotations.name_position(sentence, "bottom center", "top left") == sentence


def test_structure_named_in_a_question():
    kidney = "Where is the left kidney located in this CT?", "The Left kidney is located in the top left."
    assert wordings.name_structure(*kidney) == "left kidney"
    lungs = "In which part of the image are the lungs?", "They are in the center."
    assert wordings.name_structure(*lungs) == ""
    structures = [["kidney"], ["left kidney", "sinister kidney"], ["lung"]]
    assert wordings.named_in("The LEFT KIDNEY, please", structures) == ["left kidney"]
    assert wordings.named_in("lung and sinister kidney; kidney", structures) == ["kidney", "left kidney", "lung"]
    assert wordings.named_in("lungs", structures) == []


def test_other_wordings_exclude_other_structures():
    rows = [Row("ct", "", "", "", "", "", "", names=(name,)) for name in ("Liver", "liver", "kidney", "left kidney")]
    others = wordings.other_names(rows)
    assert (others["ct", "liver"], others["ct", "kidney"]) == (["kidney", "left kidney"], ["Liver", "liver"])
    rows = [Row("ct", "", "", "", "", "", "", names=names) for names in (("cyst",), ("node",), ())]
    changed = wordings.in_other_words(rows, [0, 1, 2])
    assert [index for _, index, _ in changed] == [0, 1] * len(wordings.OTHER_WORDS)
    for name, _, row in changed[::2]:
        assert "cyst" in row.question.lower()
        assert ("node" in row.question) == ("{other}" in name)


def test_masks_and_label_maps_are_distinguished(tmp_path):
    save(tmp_path / "of_1.png", square(4, 4).astype(np.uint8))
    save(tmp_path / "of_255.png", np.dstack([square(4, 4)] * 3))
    save(tmp_path / "soft.jpg", square(4, 4))
    for path in tmp_path.iterdir():
        assert np.array_equal(open_mask(path), square(4, 4))
    for radius in (2, 9, 70):
        save(tmp_path / "a.jpg", np.hypot(*(np.mgrid[:200, :200] - 100)) < radius)
        assert not annotations.is_label_map(np.asarray(Image.open(tmp_path / "a.jpg")))
    # the last is an image given as a mask
    for values in (TWO_LABELS, 100 * TWO_LABELS, TWO_LABELS + np.uint8(1), np.tile(np.arange(200), (200, 1))):
        assert annotations.is_label_map(values)


SPLEEN = {"question": "Where is the spleen?", "answer": "The spleen is in the top left."}
LONGER = {"question": "What is the position of the whole liver?", "answer": "The whole liver has a top left position."}
# kind of warning: (row that it names, a file that causes it, further rows)
WARNINGS = {
    "the same image": (4, ("test_images/2.png", picture(0))),
    "the same patient": (5, (), line(2, "test", patient="p1")),
    "aspect ratio": (3, ("train_masks/1.png", square(4, 4)[:30])),
    "two structures": (5, (), line(0, "train", **SPLEEN), line(1, "train", **LONGER)),
    "label map": (2, ("train_masks/0.png", TWO_LABELS)),
    "empty": (2, ("train_masks/0.png", square(4, 4, 0))),
    "fewer than 25 pixels": (2, ("train_masks/0.png", square(4, 4, 9))),
}


@pytest.mark.parametrize("kind", WARNINGS)
def test_data_check_warnings_name_their_rows(tmp_path, kind):
    number, file, *more = WARNINGS[kind]
    cache = tmp_path / "cache.json"
    assert check_data(read_rows(write_set(tmp_path)), 20, cache)[1] == []
    write_set(tmp_path, *more)
    if file:
        save(tmp_path / "ct" / file[0], file[1])
    _, [warning] = check_data(read_rows(tmp_path), 20, cache)
    assert warning.startswith(f"1 rows ({tmp_path}/annotations/ct.csv:{number}): ")
    assert kind in warning


def test_second_data_check_reads_only_changed_files(tmp_path):
    rows = read_rows(write_set(tmp_path))
    cache, image = tmp_path / "cache.json", tmp_path / "ct/train_images/0.png"
    # the cache of another version is replaced
    cache.write_text('{"image a": [1]}')
    check_data(rows, None, cache)
    stat = image.stat()
    image.write_bytes(bytes(stat.st_size))
    with pytest.raises(InputError, match="0.png cannot be opened"):
        check_data(rows, None, cache)
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert check_data(rows, None, cache)[1] == []


# --- preparation ------------------------------------------------------------------------------------------------------


def prepared(folder: Path, *flags: str, masks: str = "masks", split: str = "1,0,0") -> list[dict[str, str]]:
    """Prepare folder/scans and folder/<masks> into folder/out; return the rows of its CSV."""
    paths = [str(folder / name) for name in ("scans", masks, "out")]
    prepare(prepare_args(["prs_med", *paths, "--split", split, *flags])[1])
    return read_csv(folder / "out/annotations/scans.csv")


NAMES = {
    (2, 2): ("a_1.2 final.png", "a_1.2 final_mask.PNG"),
    (2, 26): ("Über+x-y.tif", "über+x-y.seg.png"),
    (26, 2): ("p/1.png", "p/1_Segmentation.png"),
    (26, 26): ("p_1.jpg", "p_1_gt.bmp"),
    (14, 14): ("q?", "q?.tif"),
}


def test_images_of_many_names_and_formats(tmp_path, capsys):
    for number, (corner, (image, mask)) in enumerate(NAMES.items()):
        save(tmp_path / "masks" / mask, square(*corner))
        write = save_dicom if image == "q?" else save
        write(tmp_path / "scans" / image, picture(number))
    save(tmp_path / "scans/lonely.png", picture(9))
    save(tmp_path / "masks/astray.png", square(2, 2))
    table = prepared(tmp_path, "--structure", "lesion")
    out = capsys.readouterr().out
    assert f"left out, no mask of this name (1): {tmp_path}/scans/lonely.png\n" in out
    assert f"left out, no image of this name (1): {tmp_path}/masks/astray.png\n" in out
    rows = read_rows(tmp_path / "out")
    assert len(rows) == 5
    for entry, row in zip(table, rows, strict=True):
        mask, pixels = open_mask(row.mask), np.asarray(Image.open(row.image).convert("L"))
        assert position_in(row.answer) == entry["position"] == position_of(mask)
        # each mask has its own image, but for JPEG's edges
        [number] = [k for k, corner in enumerate(NAMES) if np.array_equal(mask, square(*corner))]
        assert np.corrcoef(pixels.ravel(), picture(number).ravel())[0, 1] > 0.9


def test_masks_beside_their_image_name_their_structures(tmp_path):
    save(tmp_path / "scans/a_1.png", picture(0))
    for name, corner in (("left_kidney_mask", (2, 2)), ("kidney", (26, 26))):
        save(tmp_path / f"scans/a_1_{name}.png", square(*corner))
    table = prepared(tmp_path, "--structure", "kidney", "left kidney", masks="scans")
    left = {entry["position"]: "left kidney" in entry["question"] for entry in table}
    assert left == {"top left": True, "bottom right": False}


def test_label_map_becomes_masks(tmp_path):
    save(tmp_path / "scans/a_0000.png", picture(0))
    save(tmp_path / "masks/a.png", TWO_LABELS + np.uint8(3) * square(15, 2, 5) + np.uint8(4) * square(30, 2, 3))
    names = {"background": 0, "liver": 1, "cysts": 2, "-": 3, "speck": 4}
    (tmp_path / "new.json").write_text(json.dumps({"labels": names}))
    (tmp_path / "old.json").write_text(json.dumps({"labels": {str(value): name for name, value in names.items()}}))
    for labels in ("1=liver, 2 = cysts,3=-,4=speck", f"{tmp_path}/old.json", f"{tmp_path}/new.json"):
        table = prepared(tmp_path, "--labels", labels, "--overwrite")
        for entry, name, value in zip(table, ("cysts", "liver"), (2, 1), strict=True):
            assert entry["structure"] == name
            assert np.array_equal(open_mask(tmp_path / "out" / entry["image_path"]), value == TWO_LABELS)


@pytest.mark.parametrize(
    ("kind", "flags", "window"),
    [("nifti", [], np.percentile(HU, [0.5, 99.5])), ("dicom", ["--window", "0", "2000"], (-1000, 1000))],
)
def test_volume_slices_are_upright(tmp_path, kind, flags, window):
    """The volume is a file, or a folder of slices, with the mask's name; the mask orders its axes differently."""
    for folder in ("scans", "masks"):
        (tmp_path / folder).mkdir()
    if kind == "nifti":
        save_nifti(tmp_path / "scans/case.nii.gz", "PIR")
    else:
        write_series(tmp_path / "scans/case", HU)
    labels = np.zeros(HU.shape, np.uint8)
    labels[1:5, 1:5, 2:7] = 1
    turned = nibabel.Nifti1Image(labels, AFFINE).as_reoriented(np.array([[1, -1], [0, 1], [2, 1]]))
    nibabel.save(turned, tmp_path / "masks/case.nii.gz")
    table = prepared(tmp_path, "--structure", "lesion", "--slice_spacing", "4", *flags)
    assert [entry["image_name"] for entry in table] == [f"case_s{n:03d}.png" for n in (2, 4, 6)]
    row = read_rows(tmp_path / "out")[0]
    # the patient's right is on the left, the front at the top
    pixels, mask = (array[::-1, ::-1, 2].T for array in (HU, labels))
    assert np.abs(np.asarray(Image.open(row.image)) - np.interp(pixels, window, [0, 255])).max() <= 1
    assert np.array_equal(open_mask(row.mask), mask > 0)


def write_patients(folder: Path, count: int) -> None:
    for number in range(2 * count):
        save(folder / f"scans/P{number // 2}_{number}.png", picture(number))
        save(folder / f"masks/P{number // 2}_{number}.png", square(2, 2))


def test_each_patient_is_in_one_split(tmp_path):
    write_patients(tmp_path, 6)
    flags = ["--structure", "lungs", "--seed", "2"]
    table = prepared(tmp_path, *flags, "--patient_pattern", r"P\d", split="50,25,25")
    found = {(entry["patient"], entry["split"]) for entry in table}
    assert len(found) == 6
    assert len({split for _, split in found}) == 3
    with pytest.raises(InputError, match="is there already"):
        prepared(tmp_path, *flags)

    # --table decides; images without a row are left out
    lines = [f"P{n // 2}_{n}.png,Q{n // 2},{'test' if n < 4 else 'training'}" for n in range(10)]
    (tmp_path / "t.csv").write_text("\n".join(["file,who,split", *lines]))
    flags += ["--overwrite", "--table", str(tmp_path / "t.csv")]
    table = prepared(tmp_path, *flags, "--patient_column", "who")
    found = {(entry["patient"], entry["split"]) for entry in table}
    assert found == {(f"Q{n}", "test" if n < 2 else "train") for n in range(5)}


def test_all_bad_files_are_listed_and_nothing_is_written(tmp_path, capsys):
    write_patients(tmp_path, 3)
    (tmp_path / "scans/P0_1.png").write_bytes(b"\x89PNG")
    save(tmp_path / "masks/P1_2.png", TWO_LABELS)
    save(tmp_path / "masks/P1_3.png", square(2, 2)[:30])
    save(tmp_path / "masks/P2_4_seg.png", square(2, 2))
    reasons = {"scans/P0_1": "cannot identify", "P1_2": "a label map", "P1_3": "do not fit", "P2_4_seg": "already"}
    unnamed = {"masks/P0_0": "its name does not end with a --structure"}
    trials = {"--structure lesion": reasons, "--structure x y": unnamed, "--labels 255=x": {"P1_2": "holds label 1"}}
    for flags, expected in trials.items():
        with pytest.raises(InputError, match=f"^{tmp_path}/.*: . files cannot be used, all listed above"):
            prepared(tmp_path, *flags.split())
        out = capsys.readouterr().out
        for name, reason in expected.items():
            assert re.search(f"{name}.*{reason}.*; ", out)
    assert not any((tmp_path / "out").rglob("*"))


# --- synthetic data and baselines -------------------------------------------------------------------------------------


def test_synthetic_answers_name_the_position_of_their_lesion(sets):
    for data in sets.values():
        for row, item in zip(data.rows, data, strict=False):
            assert position_in(row.answer) == item["position"] == position_of(item["mask"].numpy())


def test_tiny_models_see_training_texts_alone(tmp_path, monkeypatch):
    """With test answers, ignoring the image would seem to work."""
    given = []
    monkeypatch.setattr(sample_data, "write_small_models", lambda out, pairs, *_: given.extend(pairs))
    sample_data.write_sample_data(tmp_path, num_train=6, num_val=3, num_test=6, image_size=48, seed=0)
    rows = pd.concat(map(pd.read_csv, (tmp_path / "annotations").glob("*.csv")))
    rows = rows[rows["split"] == "train"]
    assert sorted(given) == sorted(zip(rows["question"], rows["answer"], strict=True))


class Squares(list):
    """Rows about a square at the top left, grey 150 for a "cyst" and 90 for others; two more squares distract."""

    def __init__(self, count: int, seed: int, structures: tuple[str, ...] = ("cyst", "node")):
        self.rows, self.processor = [], SimpleNamespace(image_size=SIDE)
        rng = np.random.default_rng(seed)
        for k in range(count):
            name, gray = structures[k % len(structures)], rng.integers(0, 40, (SIDE, SIDE))
            own, other = (150, 90) if name == "cyst" else (90, 150)
            for corner, grey in (((24, 4), 250), ((4, 24), other), ((4, 4), own)):
                mask = square(*(corner + rng.integers(-2, 3, 2)))
                gray[mask] = grey + rng.integers(-5, 6)
            answer = f"The {name} is in the top left."
            self.rows.append(Row("ct", f"{k}.png", "", "train", "Where?", answer, "", names=(name,)))
            pixels = torch.from_numpy(gray.astype(np.uint8)).expand(3, -1, -1)
            self.append({"sam": pixels, "mask": torch.from_numpy(mask), "position": "top left"})


def test_baselines_find_each_structure():
    """A grey band and a forest find the structure; the mean mask overlaps by its position alone."""
    scores = rivals.rival_scores(Squares(40, 0), Squares(10, 1))
    assert sorted(row["index"] for row in scores["grey_threshold"]) == list(range(10))
    mean = {name: {key: np.mean([row[key] for row in rows]) for key in rows[0]} for name, rows in scores.items()}
    assert mean["grey_threshold"]["dice"] > 0.99
    assert mean["grey_threshold"]["position_accuracy"] == mean["pixel_forest"]["position_accuracy"] == 1
    assert mean["pixel_forest"]["dice"] > 0.9
    assert 0.4 < mean["mean_mask"]["iou"] < mean["mean_mask"]["dice"] < 0.9
    assert mean["frequent_position"] == {"index": 4.5, "position_accuracy": 1}


def test_baselines_use_the_modality_of_an_untrained_structure():
    scores = rivals.rival_scores(Squares(10, 0, ("node",)), Squares(4, 1, ("wart",)))
    assert np.mean([row["dice"] for row in scores["grey_threshold"]]) > 0.99


def test_unet_learns_each_structure():
    """Structures that were not trained get no score, and torch's generator stays unchanged."""
    train, held_out = Squares(40, 0), Squares(6, 1)
    held_out.rows[5] = held_out.rows[5]._replace(names=("wart",))
    state = torch.get_rng_state()
    scores = unet_scores(train, held_out, held_out, 40, 0, torch.device("cpu"), "no", lambda: None)
    assert torch.equal(state, torch.get_rng_state())
    assert [row["index"] for row in scores] == [0, 1, 2, 3, 4]
    assert np.mean([row["dice"] for row in scores]) > 0.8
