"""What train_prs_med.py offers beside training, and the files it leaves."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PRS_MED, ROOT, losses, records
from PIL import Image

FLAGS = ["--batch_size", "4", "--max_steps", "2", "--max_new_tokens", "3", "--log_every", "1"]


# what summary.json holds
SUMMARY = {
    "test/dice",
    "test/iou",
    "test/position_accuracy",
    "test/dice/lung_CT",
    "test/position_accuracy_mask",
    "val/dice",
    # of the last step
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "train/samples_per_s",
    "train/data_wait",
    "train/peak_memory_gb",
    "train/tflops",
    "train/mfu",
    # of the run
    "steps",
    "epochs",
    "world_size",
    "seconds",
    "effective_batch_size",
    "precision",
}


@pytest.fixture(scope="module")
def run_prs_med(zygote):
    """run_prs_med(data, run_folder, flags, ranks=..., ...): what the script ends with."""

    def run(data: Path, run_folder: Path, flags: list, **options) -> SimpleNamespace:
        return zygote(PRS_MED, "--data_root", data, "--checkpoint_dir", run_folder, *flags, **options)

    return run


def summary_of(run_folder: Path) -> dict:
    return json.loads((run_folder / "summary.json").read_text())


def of_splits(values: dict) -> dict:
    """The metrics of evaluations."""
    return {name: value for name, value in values.items() if name.startswith(("val/", "test/"))}


@pytest.fixture(scope="module")
def trained(prs_med_data, tmp_path_factory, run_prs_med):
    out = tmp_path_factory.mktemp("prs") / "run"
    done = run_prs_med(prs_med_data, out, FLAGS, figures=True)
    assert done.code == 0, done.stderr
    return out


def test_run_folder(trained):
    for name in ("args.yaml", "metrics.jsonl", "last.pt", "best.pt", "manifest.sha256", "model.safetensors"):
        assert (trained / name).is_file()
    assert list((trained / "logs").glob("events.*"))
    for name in ("inputs", "val_predictions", "test_predictions", "curves"):
        image = Image.open(trained / "figures" / f"{name}.png")
        assert np.asarray(image).std() > 10

    summary = summary_of(trained)
    assert summary.keys() >= SUMMARY
    assert summary["steps"] == 2
    assert summary["world_size"] == 1
    assert summary["precision"] == "no"
    assert all(isinstance(value, int | float | str) for value in summary.values())
    for name in ("loss", "loss_seg", "loss_txt"):
        assert f"val/{name}" in summary
        assert f"test/{name}" in summary

    # two steps, the validation of best.pt once, and the test
    assert [record["step"] for record in records(trained)] == [1, 2, 2, 2]


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

    # an empty mask, a small one and a full one, under long, odd and foreign words
    questions = (sentence, "$x_1^{", "肺?")
    answers = (sentence, "", "word " * 300 + ending)
    examples = []
    for question, mask, answer in zip(questions, masks, answers, strict=True):
        row = Row("lung_CT", "", "", "test", question, sentence, "lung_CT.csv:2")
        image = rng.integers(0, 255, (3, 16, 16), dtype=np.uint8)
        examples.append(prs_med_report.Example(row, image, mask, mask, answer, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = prs_med_report.draw_predictions(examples)
        figure.canvas.draw()

    texts = [" ".join(text.get_text().split()) for axes in figure.axes for text in axes.texts]
    assert texts[0].count(ending) == 3
    assert texts[2].count("top left of the image.") == 2
    for axes in figure.axes:
        for text in axes.texts:
            assert text.get_window_extent().height <= axes.get_window_extent().height


def test_rows_of_each_group_are_printed(prs_med_data, trained, tmp_path, run_prs_med):
    flags = ["--eval_only", "--resume_from", trained, "--eval_split", "val", "--max_new_tokens", "2"]
    done = run_prs_med(prs_med_data, tmp_path, flags)
    assert done.code == 0, done.stderr
    _, _, below = done.stdout.partition("\nval ")
    table = [line.split() for line in below.splitlines()]
    assert table[0][0] == "n"
    counts = {cells[0]: int(cells[1]) for cells in table[1:5]}
    assert counts.pop("all") == sum(counts.values()) == 10


def test_best_is_evaluated_once(prs_med_data, tmp_path, run_prs_med):
    """One val line an epoch; the summary holds that of best.pt's epoch, also after a resume that chooses no other."""
    flags = [*FLAGS, "--num_epochs", "2", "--max_steps", "0", "--annotations", "lung_CT"]
    flags += ["--save_every", "1", "--keep_last", "99"]
    # the second epoch spoils the weights: the first is the best
    flags += ["--learning_rate", "0.03", "--grad_clip", "0", "--seed", "1"]
    done = run_prs_med(prs_med_data, tmp_path, flags)
    assert done.code == 0, done.stderr

    lines = [record for record in records(tmp_path) if "val/loss" in record]
    assert [record["epoch"] for record in lines] == [1, 2]
    assert lines[0]["val/dice"] > lines[1]["val/dice"]
    first = of_splits(summary_of(tmp_path))
    logged = of_splits(lines[0])
    assert {name: first[name] for name in logged} == logged

    # once more from the step before the last
    before = lines[1]["step"] - 1
    done = run_prs_med(prs_med_data, tmp_path, [*flags, "--resume_from", tmp_path / f"step_{before:08d}.pt"])
    assert done.code == 0, done.stderr
    assert of_splits(summary_of(tmp_path)) == first


def test_checkpoints_without_the_metrics_of_best_resume(prs_med_data, trained, tmp_path, run_prs_med):
    """As they were written before those were kept: best.pt is then evaluated again."""
    contents = torch.load(trained / "last.pt", weights_only=True)
    del contents["state"]["best_metrics"]
    torch.save(contents, tmp_path / "old.pt")
    done = run_prs_med(prs_med_data, tmp_path / "new", [*FLAGS, "--resume_from", tmp_path / "old.pt"])
    assert done.code == 0, done.stderr
    assert summary_of(tmp_path / "new")["val/loss"] == summary_of(trained)["val/loss"]


def test_eval_only_of_any_split(prs_med_data, trained, tmp_path, run_prs_med):
    """Equal to what the run itself reported; the run's files stay as they are."""
    summary = summary_of(trained)
    flags = ["--eval_only", "--resume_from", trained / "best.pt", "--max_new_tokens", "3", "--batch_size", "4"]
    for split in ("val", "test"):
        done = run_prs_med(prs_med_data, tmp_path, [*flags, "--eval_split", split])
        assert done.code == 0, done.stderr
        result = json.loads((tmp_path / f"eval_{split}.json").read_text())
        assert result[f"{split}/dice"] == summary[f"{split}/dice"]


def test_shuffled_questions(prs_med_data, trained, tmp_path, run_prs_med):
    flags = ["--eval_only", "--shuffle_questions", "--resume_from", trained, "--max_new_tokens", "3"]
    done = run_prs_med(prs_med_data, tmp_path, flags)
    assert done.code == 0, done.stderr
    # copies of an image are known as one
    assert "10 of 10 rows ask another question about their image" in done.stdout
    results = json.loads((tmp_path / "eval_test_shuffled.json").read_text())
    assert results["rows_with_another_question"] == 10


def test_predict(prs_med_data, trained, run_prs_med):
    image = next(iter((prs_med_data / "skin_rgbimage" / "test_images").iterdir()))
    flags = ["--predict", image, "--question", "Where is the mole located in this image?", "--max_new_tokens", "3"]
    done = run_prs_med(prs_med_data, trained, flags)
    assert done.code == 0, done.stderr

    predictions = trained / "predictions"
    mask = np.asarray(Image.open(predictions / f"{image.stem}_mask.png"))
    assert mask.shape == (32, 32)
    assert set(np.unique(mask)) <= {0, 255}
    assert Image.open(predictions / f"{image.stem}_overlay.png").size == (32, 32)
    assert "Where is the mole" in (predictions / f"{image.stem}.txt").read_text()


def test_predict_turns_an_image_as_its_exif_tag_says(prs_med_data, trained, tmp_path, run_prs_med):
    """The mask and the overlay are of the upright image."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30), (90, 80, 70)).save(tmp_path / "turned.jpg", exif=exif)
    flags = ["--predict", tmp_path / "turned.jpg", "--question", "Where is it?", "--max_new_tokens", "2"]
    done = run_prs_med(prs_med_data, tmp_path, [*flags, "--resume_from", trained / "best.pt"])
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
def test_settings(prs_med_data, tmp_path, run_prs_med, flags):
    """Each runs to its end with finite losses; what they promise to change is looked at."""
    done = run_prs_med(prs_med_data, tmp_path, [*FLAGS, *flags])
    assert done.code == 0, done.stderr
    assert np.isfinite(losses(tmp_path)).all()
    names = list(torch.load(tmp_path / "last.pt", weights_only=True)["model"])
    assert any("vlm.model.vision_tower" in name for name in names) == ("--save_full_state" in flags)
    assert not any(name.startswith("module.") or "_orig_mod" in name for name in names)
    if "--num_workers" in flags:
        assert "2 workers per GPU" in done.stdout
    if "--wandb" in flags:
        assert list((tmp_path / "wandb").glob("offline-run-*"))


@pytest.mark.soak
def test_full_state_resumes(prs_med_data, tmp_path, run_prs_med):
    flags = [*FLAGS, "--save_full_state", "--lora_rank", "4"]
    assert run_prs_med(prs_med_data, tmp_path, flags).code == 0
    done = run_prs_med(prs_med_data, tmp_path, [*flags, "--resume_from", "auto", "--max_steps", "3"])
    assert done.code == 0, done.stderr
    assert summary_of(tmp_path)["steps"] == 3


def test_sam_vision_checkpoint(prs_med_data, trained, tmp_path, run_prs_med):
    """A SamVisionModel checkpoint loads to the same encoder as the SamModel it was cut from."""
    from transformers import SamModel, SamVisionModel

    sam = SamModel.from_pretrained(prs_med_data / "sam_tiny")
    vision = SamVisionModel(sam.config.vision_config)
    vision.vision_encoder.load_state_dict(sam.vision_encoder.state_dict())
    vision.save_pretrained(tmp_path / "vision")
    settings = (prs_med_data / "sam_tiny" / "preprocessor_config.json").read_text()
    (tmp_path / "vision" / "preprocessor_config.json").write_text(settings)

    done = run_prs_med(prs_med_data, tmp_path / "run", [*FLAGS, "--sam_path", tmp_path / "vision"])
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
        # spans the middle column only; its centre is left of it
        ((6, 9, 1, 8), "bottom left"),
        ((4, 6, 4, 6), "center"),
        ((5, 9, 5, 9), "bottom right"),
        ((4, 9, 4, 9), "center"),
    ],
)
def test_position_of_a_box(box, position):
    from tasks.prs_med.metrics import position_of

    top, bottom, left, right = box
    mask = np.zeros((10, 10), bool)
    mask[top:bottom, left:right] = True
    assert position_of(mask) == position
    assert position_of(np.zeros((10, 10), bool)) is None


def test_sample_data(prs_med_data):
    """Columns, positions that follow the rule, two masks for each image that do not overlap."""
    from tasks.prs_med import data as prs
    from tasks.prs_med.metrics import position_in, position_of

    rows = prs.read_annotations(prs_med_data, None, False)
    assert len(rows) == 54
    assert len({row.modality for row in rows}) == 3
    assert all(position_of(prs.open_mask(row.mask)) == position_in(row.answer) for row in rows)
    first = (prs_med_data / "annotations" / "skin_rgbimage.csv").read_text().splitlines()[0]
    assert first == "image_path,image_name,split,description,position,question,answer"
    assert any(row.image.endswith(".jpg") and row.mask.endswith("_Segmentation.png") for row in rows)

    # copies of an image are known by their bytes
    masks_of = {}
    for row in rows:
        content = Path(row.image).read_bytes()
        masks_of.setdefault(content, []).append(prs.open_mask(row.mask))
    for masks in masks_of.values():
        assert len(masks) == 2
        assert not (masks[0] & masks[1]).any()


def test_help_and_mistakes_are_quick():
    for words, code in ((["--help"], 0), (["--data_root", ".", "--batch_size", "no"], 2)):
        begun = time.time()
        done = subprocess.run([sys.executable, PRS_MED, *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code
        assert time.time() - begun < 3
    text = subprocess.run([sys.executable, PRS_MED, "--help"], capture_output=True, text=True).stdout
    assert "PER GPU" in text
    assert " ".join(text.split("\n\n")[1].split()).endswith(" out.")


def test_precedence_of_values(prs_med_data, tmp_path, run_prs_med):
    """defaults < file < command line, and args.yaml holds what came out."""
    import yaml

    (tmp_path / "c.yaml").write_text("batch_size: 5\nlearning_rate: 1e-3\nmax_steps: 1\nannotations: [lung_CT]\n")
    flags = ["--config", tmp_path / "c.yaml", "--batch_size", "3", "--max_new_tokens", "2"]
    done = run_prs_med(prs_med_data, tmp_path / "run", flags)
    assert done.code == 0, done.stderr
    args = yaml.safe_load((tmp_path / "run" / "args.yaml").read_text())
    assert (args["batch_size"], args["learning_rate"], args["num_epochs"]) == (3, 0.001, 20)
    assert args["annotations"] == ["lung_CT"]
