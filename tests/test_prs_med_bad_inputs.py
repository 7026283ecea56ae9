"""Bad input: exit code 2, one line, no traceback, nothing overwritten. Each case breaks one thing of good data."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PRS_MED, ROOT, torchrun, train, tree
from PIL import Image

FLAGS = ["--batch_size", "4", "--max_steps", "1", "--max_new_tokens", "2"]


@pytest.fixture(scope="module")
def trained(prs_med_data, tmp_path_factory):
    """A finished run whose files no bad input may touch."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(prs_med_data, out, 1, *FLAGS)
    return out


def rows_of(root: Path) -> tuple[Path, list[list[str]]]:
    path = root / "annotations" / "lung_CT.csv"
    with open(path, newline="") as file:
        return path, list(csv.reader(file))


def set_field(row: int, column: str, value: str):
    """Break one field of lung_CT.csv (row 1 is the header)."""

    def change(root: Path, _) -> None:
        path, rows = rows_of(root)
        rows[row - 1][rows[0].index(column)] = value
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(rows)

    return change


def edit(name: str, change):
    """Apply bytes -> bytes to the files that match `name` (the first only)."""

    def apply(root: Path, _) -> None:
        path = next(iter(sorted(root.glob(name))))
        path.write_bytes(change(path.read_bytes()))

    return apply


def config(text: str, name: str = "c.yaml"):
    def write(root: Path, _) -> None:
        (root / name).write_text(text)

    return write


def remove(name: str):
    def apply(root: Path, _) -> None:
        for path in root.glob(name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return apply


def copied_picture(root: Path, _) -> None:
    """The bytes of a training picture under the name of a test picture."""
    source = next(iter(sorted((root / "lung_CT" / "train_images").iterdir())))
    shutil.copy(source, next(iter(sorted((root / "lung_CT" / "test_images").iterdir()))))


def only_test_rows(root: Path, _) -> None:
    for path in (root / "annotations").iterdir():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if ",train," not in line))


def no_test_rows(root: Path, _) -> None:
    for path in (root / "annotations").iterdir():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if ",test," not in line))


def resized(name: str, size: tuple[int, int]):
    """Give the first file that matches `name` another size."""

    def apply(root: Path, _) -> None:
        path = next(iter(sorted(root.glob(name))))
        Image.open(path).resize(size).save(path)

    return apply


def both(*changes):
    def apply(root: Path, trained: Path) -> None:
        for change in changes:
            change(root, trained)

    return apply


def label_map(root: Path, _) -> None:
    """A second organ of value 85 in the first mask."""
    path = next(iter(sorted((root / "lung_CT" / "train_masks").iterdir())))
    mask = Image.open(path).convert("L")
    mask.paste(85, (0, 0, 8, 8))
    mask.save(path)


def text_as_picture(root: Path, _) -> None:
    (root / "bad.png").write_text("not a picture")


def checkpoint(change):
    """Write <root>/changed.pt: the trained checkpoint, changed."""

    def write(root: Path, trained: Path) -> None:
        contents = torch.load(trained / "last.pt", weights_only=True)
        change(contents)
        torch.save(contents, root / "changed.pt")

    return write


def flipped(root: Path, trained: Path) -> None:
    shutil.copytree(trained, root / "flipped")
    path = root / "flipped" / "step_00000001.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.unlink()
    path.write_bytes(content)


def other_base(root: Path, _) -> None:
    from safetensors.torch import load_file, save_file

    path = root / "llava_tiny" / "model.safetensors"
    weights = load_file(path)
    save_file({name: value + 0.5 for name, value in weights.items()}, path, metadata={"format": "pt"})


def file_in_the_way(root: Path, _) -> None:
    (root / "taken").write_text("a file")


def same(_root: Path, _trained: Path) -> None:
    pass


RUN = ["--checkpoint_dir", "{trained}"]
NEW = ["--checkpoint_dir", "{root}/new"]
RESUME = [*NEW, "--resume_from"]
CASES = {
    # the command line
    "unknown flag": (same, [*NEW, "--batchsize", "4"], "unknown argument '--batchsize', nearest is --batch_size"),
    "batch size 0": (same, [*NEW, "--batch_size", "0"], "--batch_size: must be a whole number of at least 1, not '0'"),
    "batch size x": (same, [*NEW, "--batch_size", "x"], "--batch_size: must be a whole number"),
    "negative rate": (same, [*NEW, "--learning_rate", "-1"], "--learning_rate: must be a number above 0"),
    "rate nan": (same, [*NEW, "--learning_rate", "nan"], "--learning_rate: must be a number above 0"),
    "dropout 2": (same, [*NEW, "--lora_dropout", "2"], "--lora_dropout: must be a number at least 0 and at most 0.99"),
    "bad choice": (same, [*NEW, "--lr_scaling", "cubic"], "--lr_scaling: invalid choice: 'cubic'"),
    "fp16 on CPU": (same, [*NEW, "--mixed_precision", "fp16"], "fp16: needs a GPU"),
    "predict without question": (same, ["--predict", "x.png"], "need each other"),
    "overwrite and resume": (same, [*RUN, "--overwrite", "--resume_from", "auto"], "--overwrite starts afresh"),
    "shuffle in training": (same, [*NEW, "--shuffle_questions"], "needs --eval_only"),
    "no data root": (same, [*NEW, "--data_root", "/nowhere"], "/nowhere: no such folder"),
    "image size": (same, [*NEW, "--image_size", "20"], "--image_size 20: not a multiple"),
    # the config file
    "config missing": (same, [*NEW, "--config", "{root}/no.yaml"], "no.yaml: cannot read"),
    "config not YAML": (config("a: [1\nb: 2"), [*NEW, "--config", "{root}/c.yaml"], "c.yaml:2: not valid YAML"),
    "config not JSON": (config("{\n1}", "c.json"), [*NEW, "--config", "{root}/c.json"], "c.json:2: not valid JSON"),
    "config a list": (config("- a"), [*NEW, "--config", "{root}/c.yaml"], "must hold `flag: value` lines"),
    "config unknown key": (config("batch_sise: 2"), [*NEW, "--config", "{root}/c.yaml"], "did you mean 'batch_size'?"),
    "config wrong type": (config("batch_size: [2]"), [*NEW, "--config", "{root}/c.yaml"], "must be a single value"),
    "config out of range": (config("num_epochs: 0"), [*NEW, "--config", "{root}/c.yaml"], "must be a whole number"),
    "config bad choice": (config("lr_scaling: up"), [*NEW, "--config", "{root}/c.yaml"], "'up' is not one of"),
    "config bool": (config("compile: 3"), [*NEW, "--config", "{root}/c.yaml"], "compile: must be true or false"),
    # the annotations
    "no annotations": (remove("annotations"), NEW, "annotations: holds no CSV file"),
    "unknown annotations": (same, [*NEW, "--annotations", "spine"], "no spine.csv, there are brain_tumors_ct_scan"),
    "no column": (edit("annotations/lung_CT.csv", lambda b: b.replace(b"split", b"s", 1)), NEW, "CT.csv:1: no column"),
    "empty file": (edit("annotations/lung_CT.csv", lambda b: b""), NEW, "lung_CT.csv:1: no column 'image_path'"),
    "empty question": (set_field(3, "question", " "), NEW, "lung_CT.csv:3: empty 'question'"),
    "empty answer": (set_field(4, "answer", ""), NEW, "lung_CT.csv:4: empty 'answer'"),
    "bad split": (set_field(2, "split", "training"), NEW, "lung_CT.csv:2: split 'training' is not"),
    "short row": (edit("annotations/lung_CT.csv", lambda b: b + b"x,y\n"), NEW, "empty 'split'"),
    "long row": (edit("annotations/lung_CT.csv", lambda b: b.replace(b"e.\n", b"e.,x\n", 1)), NEW, "more fields"),
    "open quote": (edit("annotations/lung_CT.csv", lambda b: b + b'"never closed'), NEW, "not a readable UTF-8 CSV"),
    "not UTF-8": (edit("annotations/lung_CT.csv", lambda b: b + b"\xff\xfe\n"), NEW, "not a readable UTF-8 CSV"),
    "escaping path": (set_field(2, "image_path", "../../etc/x_masks/a.png"), NEW, "lung_CT.csv:2: image_path"),
    "absolute path": (set_field(2, "image_path", "/etc/x_masks/a.png"), NEW, "leaves the data root"),
    "drive path": (set_field(2, "image_path", "C:\\x_masks\\a.png"), NEW, "leaves the data root"),
    "odd path": (set_field(2, "image_path", "a.png"), NEW, "is not <modality>/<split>_masks/<name>"),
    "mask missing": (remove("lung_CT/train_masks/*"), NEW, "does not exist under"),
    "picture missing": (remove("lung_CT/train_images/*"), NEW, "lung_CT.csv:2: no picture"),
    "two splits": (set_field(2, "split", "test"), NEW, "keep its rows in one split"),
    "a copy in two splits": (copied_picture, NEW, "keep its rows in one split"),
    "no training rows": (only_test_rows, NEW, "no rows in split 'train'"),
    # the pictures
    "picture truncated": (edit("lung_CT/train_images/*", lambda b: b[: len(b) // 2]), NEW, "is not a readable image"),
    "picture is text": (edit("lung_CT/test_images/*", lambda b: b"hello"), NEW, "is not a readable image"),
    "JPG truncated": (edit("skin_rgbimage/train_images/*", lambda b: b[:300]), NEW, "is not a readable image"),
    "mask of another shape": (resized("lung_CT/train_masks/*", (32, 40)), NEW, "lung_CT.csv:3: "),
    "mask transposed": (
        both(resized("lung_CT/train_images/*", (40, 30)), resized("lung_CT/train_masks/*", (30, 40))), NEW,
        "mask of 30 x 40 pixels does not fit its image of 40 x 30 (width and height swapped); replace",
    ),
    "label map": (label_map, NEW, "a label map: its value 85 would count as background"),
    "mask truncated": (edit("lung_CT/val_masks/*", lambda b: b[:60]), NEW, "is not a readable image"),
    "predict a text": (text_as_picture, [*RUN, "--predict", "{root}/bad.png", "--question", "?"], "check --predict"),
    # the pretrained checkpoints
    "no VLM": (remove("llava_tiny"), NEW, "no llava checkpoint in a folder of it; download"),
    "no SAM": (remove("sam_tiny"), NEW, "no sam checkpoint in a folder of it; download"),
    "VLM path": (same, [*NEW, "--vlm_path", "/no/such"], "/no/such: cannot be loaded (no such folder); download"),
    "VLM is a SAM": (same, [*NEW, "--vlm_path", "{root}/sam_tiny"], "is a 'sam' checkpoint, not llava"),
    "VLM truncated": (edit("llava_tiny/model.safetensors", lambda b: b[:5000]), NEW, "checkpoint cannot be loaded"),
    "VLM config": (edit("llava_tiny/config.json", lambda b: b[:50]), NEW, "no llava checkpoint"),
    # the run folder and the checkpoint
    "run exists": (same, RUN, "holds a run already"),
    "folder is a file": (file_in_the_way, ["--checkpoint_dir", "{root}/taken"], "cannot write here"),
    "no checkpoint": (same, [*RESUME, "{root}/none.pt"], "no such checkpoint"),
    "checkpoint is text": (config("x", "changed.pt"), [*RESUME, "{root}/changed.pt"], "not a readable checkpoint"),
    "flipped byte": (flipped, [*RESUME, "{root}/flipped/step_00000001.pt"], "damaged"),
    "other script's": (checkpoint(lambda c: c.update(format="x/1")), [*RESUME, "{root}/changed.pt"], "of x/1"),
    "other base": (other_base, [*RESUME, "{trained}/last.pt"], "not the base that the checkpoint was trained on"),
    "other batch": (same, [*RESUME, "{trained}/last.pt", "--batch_size", "5"], "effective batch size 4, now 5"),
    "other seed": (same, [*RESUME, "{trained}/last.pt", "--seed", "5"], "a run with seed 0, now 5"),
    "dot path": (set_field(2, "image_path", "./."), NEW, "leaves the data root"),
    "other LoRA rank": (same, [*RESUME, "{trained}/last.pt", "--lora_rank", "4"], "checkpoint of another model"),
    "nothing to evaluate": (same, [*NEW, "--eval_only"], "best.pt: no such checkpoint"),
    "empty split": (no_test_rows, [*RUN, "--eval_only"], "no rows in split 'test'"),
}  # fmt: skip


def check(done, seconds: float, message: str, before: dict, trained: Path, root: Path) -> None:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.code == 2, done.stderr[-2000:]
    assert message in done.stderr, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert [line.startswith("error: ") for line in lines] == [True], done.stderr
    assert ";" in lines[0]
    assert tree(trained) == before
    assert not any((root / "new" / name).exists() for name in ("args.yaml", "metrics.jsonl", "last.pt"))
    assert seconds < 20


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, prs_med_data, trained, tmp_path, zygote):
    change, flags, message = CASES[name]
    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    change(root, trained)
    before = tree(trained)
    words = [flag.format(root=root, trained=trained) for flag in flags]
    done = zygote(PRS_MED, "--data_root", root, *FLAGS, *words)
    check(done, done.seconds, message, before, trained, root)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "launcher"), [("bad split", 2), ("picture is text", 3)])
def test_bad_input_under_a_launcher(name, launcher, prs_med_data, trained, tmp_path):
    """Rank 0 alone prints the line, also for a fault that another rank met; no worker prints a traceback.

    (In the quick suite: test_launch_utils.py under the launcher, test_contract.py on two ranks.)
    """
    change, flags, message = CASES[name]
    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    change(root, trained)
    words = [flag.format(root=root, trained=trained) for flag in flags]
    command = [*torchrun(launcher), PRS_MED, "--data_root", str(root), *FLAGS, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert done.stderr.count("error: ") - done.stderr.count("_error: ") == 1, done.stderr
    assert message in done.stderr
    assert 'train_prs_med.py", line' not in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_bad_input_in_a_process_of_its_own(name, prs_med_data, trained, tmp_path):
    """The same by the plain command a user types, with its start-up time."""
    import time
    from types import SimpleNamespace

    change, flags, message = CASES[name]
    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    change(root, trained)
    before, begun = tree(trained), time.time()
    words = [flag.format(root=root, trained=trained) for flag in flags]
    command = [sys.executable, PRS_MED, "--data_root", str(root), *FLAGS, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    done = SimpleNamespace(code=done.returncode, stdout=done.stdout, stderr=done.stderr)
    check(done, time.time() - begun, message, before, trained, root)


def test_bad_rows_can_be_skipped(prs_med_data, tmp_path, zygote):
    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    set_field(3, "question", "")(root, None)
    done = zygote(PRS_MED, "--data_root", root, "--checkpoint_dir", tmp_path / "run", *FLAGS, "--skip_bad_rows")
    assert done.code == 0, done.stderr
    assert "1 rows with a missing field dropped" in done.stdout


def test_odd_but_good_data(prs_med_data, tmp_path, zygote):
    """Backslashes, an extra images_and_masks level, JPEG-edged and 3-channel and 0/1 masks, a 16-bit picture, a BOM."""
    import numpy as np

    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    path, rows = rows_of(root)
    for row in rows[1:]:
        row[0] = row[0].replace("/", "\\")
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(rows)
    (root / "images_and_masks").mkdir()
    (root / "lung_CT").rename(root / "images_and_masks" / "lung_CT")
    masks = sorted((root / "images_and_masks" / "lung_CT" / "train_masks").iterdir())
    first = np.asarray(Image.open(masks[0]))
    Image.fromarray(np.repeat(first[..., None], 3, 2)).save(tmp_path / "x.jpg", quality=40)
    Image.open(tmp_path / "x.jpg").save(masks[0])
    Image.fromarray((np.asarray(Image.open(masks[1])) > 0).astype(np.uint8)).save(masks[1])
    pictures = sorted((root / "images_and_masks" / "lung_CT" / "train_images").iterdir())
    for picture in pictures[:2]:  # one picture under two names
        Image.fromarray(np.asarray(Image.open(picture)).astype(np.uint16) * 200).save(picture)
    done = zygote(PRS_MED, "--data_root", root, "--checkpoint_dir", tmp_path / "run", *FLAGS)
    assert done.code == 0, done.stderr
    from tasks.prs_med import data as prs

    assert (
        np.array_equal(prs.open_mask(str(masks[0])), first > 0)
        or (prs.open_mask(str(masks[0])) != (first > 0)).mean() < 0.02
    )
    assert set(np.unique(np.asarray(prs.open_image(str(pictures[0]))))) >= {0, 255}
