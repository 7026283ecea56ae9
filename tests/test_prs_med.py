"""What train_prs_med.py offers beside training, and the files it leaves."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PRS_MED, ROOT, losses, records
from PIL import Image

FLAGS = ["--batch_size", "4", "--max_steps", "2", "--max_new_tokens", "3", "--log_every", "1"]


@pytest.fixture(scope="module")
def trained(prs_med_data, tmp_path_factory, zygote):
    out = tmp_path_factory.mktemp("prs") / "run"
    done = zygote(PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", out, *FLAGS, figures=True)
    assert done.code == 0, done.stderr
    return out


def test_run_folder(trained):
    for name in ("args.yaml", "metrics.jsonl", "last.pt", "best.pt", "manifest.sha256", "model.safetensors"):
        assert (trained / name).is_file()
    assert list((trained / "logs").glob("events.*"))
    for name in ("inputs", "val_predictions", "test_predictions", "curves"):
        assert np.asarray(Image.open(trained / "figures" / f"{name}.png")).std() > 10
    summary = json.loads((trained / "summary.json").read_text())
    wanted = {
        "test/dice",
        "test/iou",
        "test/position_accuracy",
        "val/dice",
        "train/loss",
        "train/lr",
        "train/grad_norm",
    }
    wanted |= {
        "train/samples_per_s",
        "train/data_wait",
        "train/peak_memory_gb",
        "train/tflops",
        "train/mfu",
        "steps",
        "epochs",
        "world_size",
        "seconds",
    }
    wanted |= {"effective_batch_size", "precision", "test/dice/lung_CT", "test/position_accuracy_mask"}
    assert wanted <= summary.keys()
    assert (summary["steps"], summary["world_size"], summary["precision"]) == (2, 1, "no")
    assert all(isinstance(value, int | float | str) for value in summary.values())
    # two steps, the validation of best.pt once, and the test
    assert [record["step"] for record in records(trained)] == [1, 2, 2, 2]
    assert {
        f"{split}/{name}" for split in ("val", "test") for name in ("loss", "loss_seg", "loss_txt")
    } <= summary.keys()


def test_figures_show_whole_sentences():
    """The position stands at a sentence's end, so it is never cut off; odd characters and masks give no warning."""
    import warnings

    from tasks.prs_med import report as prs_med_report
    from tasks.prs_med.data import Row

    ending = "is located in the top left of the image."
    sentence = "The irregularly shaped hypodense tumour in the upper lobe of the lung " + ending
    rng = np.random.default_rng(0)
    masks = np.zeros((3, 16, 16), bool)
    masks[1, 4:9, 3:8] = masks[2] = True
    rows = [Row("lung_CT", "", "", "test", text, sentence, "lung_CT.csv:2") for text in (sentence, "$x_1^{", "肺?")]
    shown = [
        prs_med_report.Example(row, rng.integers(0, 255, (3, 16, 16), dtype=np.uint8), mask, mask, answer, 0.5)
        for row, mask, answer in zip(rows, masks, (sentence, "", "word " * 300 + ending), strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = prs_med_report.draw_predictions(shown)
        figure.canvas.draw()
    texts = [" ".join(text.get_text().split()) for axes in figure.axes for text in axes.texts]
    assert texts[0].count(ending) == 3
    assert texts[2].count("top left of the image.") == 2
    for axes in figure.axes:
        for text in axes.texts:
            assert text.get_window_extent().height <= axes.get_window_extent().height


def test_rows_of_each_group_are_printed(prs_med_data, trained, tmp_path, zygote):
    flags = ["--eval_only", "--resume_from", trained, "--eval_split", "val", "--max_new_tokens", "2"]
    done = zygote(PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", tmp_path, *flags)
    assert done.code == 0, done.stderr
    table = [line.split() for line in done.stdout.partition("\nval ")[2].splitlines()]
    assert table[0][0] == "n"
    counts = {cells[0]: int(cells[1]) for cells in table[1:5]}
    assert counts.pop("all") == sum(counts.values()) == 10


def test_best_is_evaluated_once(prs_med_data, tmp_path, zygote):
    """One val line an epoch; the summary holds that of best.pt's epoch, also after a resume that chooses no other."""
    flags = ["--data_root", prs_med_data, "--checkpoint_dir", tmp_path, *FLAGS, "--num_epochs", "2", "--max_steps", "0"]
    flags += ["--annotations", "lung_CT", "--save_every", "1", "--keep_last", "99"]
    # the second epoch spoils the weights: the first is the best
    flags += ["--learning_rate", "0.03", "--grad_clip", "0", "--seed", "1"]

    def results() -> dict:
        summary = json.loads((tmp_path / "summary.json").read_text())
        return {name: value for name, value in summary.items() if name.startswith(("val/", "test/"))}

    done = zygote(PRS_MED, *flags)
    assert done.code == 0, done.stderr
    lines = [record for record in records(tmp_path) if "val/loss" in record]
    assert [record["epoch"] for record in lines] == [1, 2]
    assert lines[0]["val/dice"] > lines[1]["val/dice"]
    first = results()
    assert {name: first[name] for name in lines[0] if name.startswith("val/")} == {
        name: value for name, value in lines[0].items() if name.startswith("val/")
    }
    done = zygote(PRS_MED, *flags, "--resume_from", tmp_path / f"step_{lines[1]['step'] - 1:08d}.pt")
    assert done.code == 0, done.stderr
    assert results() == first


def test_checkpoints_without_the_metrics_of_best_resume(prs_med_data, trained, tmp_path, zygote):
    """As they were written before those were kept: best.pt is then evaluated again."""
    contents = torch.load(trained / "last.pt", weights_only=True)
    del contents["state"]["best_metrics"]
    torch.save(contents, tmp_path / "old.pt")
    flags = [
        "--data_root",
        prs_med_data,
        "--checkpoint_dir",
        tmp_path / "new",
        *FLAGS,
        "--resume_from",
        tmp_path / "old.pt",
    ]
    done = zygote(PRS_MED, *flags)
    assert done.code == 0, done.stderr
    summary = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert summary["val/loss"] == json.loads((trained / "summary.json").read_text())["val/loss"]


def test_eval_only_of_any_split(prs_med_data, trained, tmp_path, zygote):
    """Equal to what the run itself reported; the run's files stay as they are."""
    for split in ("val", "test"):
        flags = ["--eval_only", "--resume_from", trained / "best.pt", "--eval_split", split, "--max_new_tokens", "3"]
        done = zygote(PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", tmp_path, "--batch_size", "4", *flags)
        assert done.code == 0, done.stderr
        result = json.loads((tmp_path / f"eval_{split}.json").read_text())
        summary = json.loads((trained / "summary.json").read_text())
        assert result[f"{split}/dice"] == summary[f"{split}/dice"]


def test_shuffled_questions(prs_med_data, trained, tmp_path, zygote):
    flags = ["--eval_only", "--shuffle_questions", "--resume_from", trained, "--max_new_tokens", "3"]
    done = zygote(PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", tmp_path, *flags)
    assert done.code == 0, done.stderr
    # copies of an image are known as one
    assert "10 of 10 rows ask another question about their image" in done.stdout
    assert json.loads((tmp_path / "eval_test_shuffled.json").read_text())["rows_with_another_question"] == 10


def test_predict(prs_med_data, trained, zygote):
    picture = next(iter((prs_med_data / "skin_rgbimage" / "test_images").iterdir()))
    flags = ["--predict", picture, "--question", "Where is the mole located in this image?", "--max_new_tokens", "3"]
    done = zygote(PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", trained, *flags)
    assert done.code == 0, done.stderr
    stem = trained / "predictions" / picture.stem
    mask = np.asarray(Image.open(f"{stem}_mask.png"))
    assert mask.shape == (32, 32)
    assert set(np.unique(mask)) <= {0, 255}
    assert Image.open(f"{stem}_overlay.png").size == (32, 32)
    assert "Where is the mole" in (stem.parent / f"{stem.name}.txt").read_text()


def test_predict_turns_an_image_as_its_exif_tag_says(prs_med_data, trained, tmp_path, zygote):
    """The mask and the overlay are of the upright image."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30), (90, 80, 70)).save(tmp_path / "turned.jpg", exif=exif)
    flags = ["--predict", tmp_path / "turned.jpg", "--question", "Where is it?", "--max_new_tokens", "2"]
    flags += ["--resume_from", trained / "best.pt", "--checkpoint_dir", tmp_path]
    done = zygote(PRS_MED, "--data_root", prs_med_data, *flags)
    assert done.code == 0, done.stderr
    for name in ("mask", "overlay"):
        assert Image.open(tmp_path / "predictions" / f"turned_{name}.png").size == (30, 40)


@pytest.mark.parametrize(
    "flags",
    [
        ["--mixed_precision", "bf16", "--gradient_checkpointing"],
        ["--cache_gb", "0", "--num_workers", "2", "--image_size", "48", "--grad_clip", "0", "--skip_data_check"],
        ["--save_full_state", "--lr_schedule", "cosine", "--warmup_steps", "1", "--annotations", "lung_CT"],
        pytest.param(["--compile"], marks=pytest.mark.soak),
        ["--wandb"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_settings(prs_med_data, tmp_path, zygote, flags):
    """Each runs to its end with finite losses; what they promise to change is looked at."""
    done = zygote(PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", tmp_path, *FLAGS, *flags)
    assert done.code == 0, done.stderr
    assert np.isfinite(losses(tmp_path)).all()
    contents = torch.load(tmp_path / "last.pt", weights_only=True)
    assert any("vlm.model.vision_tower" in name for name in contents["model"]) == ("--save_full_state" in flags)
    assert not any(name.startswith("module.") or "_orig_mod" in name for name in contents["model"])
    if "--num_workers" in flags:
        assert "2 workers per GPU" in done.stdout
    if "--wandb" in flags:
        assert list((tmp_path / "wandb").glob("offline-run-*"))


@pytest.mark.soak
def test_full_state_resumes(prs_med_data, tmp_path, zygote):
    flags = ["--data_root", prs_med_data, "--checkpoint_dir", tmp_path, *FLAGS, "--save_full_state", "--lora_rank", "4"]
    assert zygote(PRS_MED, *flags).code == 0
    done = zygote(PRS_MED, *flags, "--resume_from", "auto", "--max_steps", "3")
    assert done.code == 0, done.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3


def test_sam_vision_checkpoint(prs_med_data, trained, tmp_path, zygote):
    """A SamVisionModel checkpoint loads to the same encoder as the SamModel it was cut from."""
    from transformers import SamModel, SamVisionModel

    sam = SamModel.from_pretrained(prs_med_data / "sam_tiny")
    vision = SamVisionModel(sam.config.vision_config)
    vision.vision_encoder.load_state_dict(sam.vision_encoder.state_dict())
    vision.save_pretrained(tmp_path / "vision")
    settings = (prs_med_data / "sam_tiny" / "preprocessor_config.json").read_text()
    (tmp_path / "vision" / "preprocessor_config.json").write_text(settings)
    flags = ["--sam_path", tmp_path / "vision", "--checkpoint_dir", tmp_path / "run", *FLAGS]
    done = zygote(PRS_MED, "--data_root", prs_med_data, *flags)
    assert done.code == 0, done.stderr
    assert losses(tmp_path / "run") == losses(trained)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("The tumour is located in the top left of the image.", "top left"),
        ("The right kidney lies in the lower-left part.", "bottom left"),
        ("It is in the upper right quadrant", "top right"),
        ("The mass is in the centre.", "center"),
        ("left", None),
        ("", None),
    ],
)
def test_position_in_a_sentence(text, position):
    from tasks.prs_med.metrics import position_in

    assert position_in(text) == position


@pytest.mark.parametrize(
    ("box", "position"),
    [
        ((0, 4, 0, 4), "top left"),
        ((0, 4, 6, 9), "top right"),
        ((6, 9, 1, 8), "bottom left"),  # spans the middle column only; its centre is left of it
        ((4, 6, 4, 6), "center"),
        ((5, 9, 5, 9), "bottom right"),
        ((4, 9, 4, 9), "center"),
    ],
)
def test_position_of_a_box(box, position):
    from tasks.prs_med.metrics import position_of

    mask = np.zeros((10, 10), bool)
    mask[box[0] : box[1], box[2] : box[3]] = True
    assert position_of(mask) == position
    assert position_of(np.zeros((10, 10), bool)) is None


def test_sample_data(prs_med_data):
    """Columns, positions that follow the rule, two masks for each picture that do not overlap."""
    from tasks.prs_med import data as prs
    from tasks.prs_med.metrics import position_in, position_of

    rows = prs.read_annotations(prs_med_data, None, False)
    assert len(rows) == 54
    assert len({row.modality for row in rows}) == 3
    assert all(position_of(prs.open_mask(row.mask)) == position_in(row.answer) for row in rows)
    first = (prs_med_data / "annotations" / "skin_rgbimage.csv").read_text().splitlines()[0]
    assert first == "image_path,image_name,split,description,position,question,answer"
    assert any(row.image.endswith(".jpg") and row.mask.endswith("_Segmentation.png") for row in rows)
    by_picture = {}
    for row in rows:
        by_picture.setdefault(Path(row.image).read_bytes(), []).append(prs.open_mask(row.mask))
    assert all(len(masks) == 2 and not (masks[0] & masks[1]).any() for masks in by_picture.values())


def test_help_and_mistakes_are_quick():
    for words, code in ((["--help"], 0), (["--data_root", ".", "--batch_size", "no"], 2)):
        begun = time.time()
        done = subprocess.run([sys.executable, PRS_MED, *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code
        assert time.time() - begun < 3
    text = subprocess.run([sys.executable, PRS_MED, "--help"], capture_output=True, text=True).stdout
    assert "PER GPU" in text
    assert " ".join(text.split("\n\n")[1].split()).endswith(" out.")


def test_precedence_of_values(prs_med_data, tmp_path, zygote):
    """defaults < file < command line, and args.yaml holds what came out."""
    import yaml

    (tmp_path / "c.yaml").write_text("batch_size: 5\nlearning_rate: 1e-3\nmax_steps: 1\nannotations: [lung_CT]\n")
    flags = ["--config", tmp_path / "c.yaml", "--batch_size", "3", "--max_new_tokens", "2"]
    done = zygote(PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", tmp_path / "run", *flags)
    assert done.code == 0, done.stderr
    args = yaml.safe_load((tmp_path / "run" / "args.yaml").read_text())
    assert (args["batch_size"], args["learning_rate"], args["num_epochs"]) == (3, 0.001, 20)
    assert args["annotations"] == ["lung_CT"]
