"""Bad input: exit code 2, one line, no traceback, nothing overwritten. Each case breaks one thing of good data."""

import csv
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import PRS_MED, ROOT, torchrun, tree
from PIL import Image

FLAGS = ["--batch_size", "4", "--max_steps", "1", "--max_new_tokens", "2"]
TABLE = "annotations/lung_CT.csv"


class Case(NamedTuple):
    """What is broken, a part of the message, and flags of the run; {root} and {trained} stand for data and run."""

    change: Callable
    message: str
    flags: str = ""


@pytest.fixture(scope="module")
def run_prs_med(zygote):
    """run_prs_med(flags): what the script ends with."""

    def run(flags: list) -> SimpleNamespace:
        return zygote(PRS_MED, *flags)

    return run


@pytest.fixture(scope="module")
def trained(prs_med_data, tmp_path_factory):
    """A finished run whose files no bad input may touch."""
    out = tmp_path_factory.mktemp("trained") / "run"
    command = [sys.executable, PRS_MED, "--data_root", str(prs_med_data), "--checkpoint_dir", str(out), *FLAGS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


def rows_of(root: Path) -> list[list[str]]:
    with open(root / TABLE, newline="") as file:
        return list(csv.reader(file))


def write_rows(root: Path, rows: list[list[str]], encoding: str = "utf-8") -> None:
    with open(root / TABLE, "w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows(rows)


def first_file(root: Path, pattern: str) -> Path:
    return min(root.glob(pattern))


def set_field(row: int, column: str, value: str):
    """Break one field of lung_CT.csv (row 1 is the header)."""

    def change(root: Path, _) -> None:
        rows = rows_of(root)
        place = rows[0].index(column)
        rows[row - 1][place] = value
        write_rows(root, rows)

    return change


def one_answer_to_all(root: Path, _) -> None:
    """Every answer names one position."""
    rows = rows_of(root)
    place = rows[0].index("answer")
    for row in rows[1:]:
        row[place] = "It is in the center."
    write_rows(root, rows)


def edit(pattern: str, change: bytes | Callable):
    """bytes, or a function of the old ones: the new content of the first file that matches."""

    def apply(root: Path, _) -> None:
        path = first_file(root, pattern)
        path.write_bytes(change if isinstance(change, bytes) else change(path.read_bytes()))

    return apply


def halve(content: bytes) -> bytes:
    return content[: len(content) // 2]


def first(count: int):
    """bytes -> the first of them."""
    return lambda content: content[:count]


def appended(more: bytes):
    return lambda content: content + more


def replaced(old: bytes, new: bytes):
    """bytes -> the same with the first `old` in them replaced."""
    return lambda content: content.replace(old, new, 1)


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
    """The bytes of a training image under the name of a test image."""
    source = first_file(root, "lung_CT/train_images/*")
    shutil.copy(source, first_file(root, "lung_CT/test_images/*"))


def only_test_rows(root: Path, _) -> None:
    drop_rows(root, ",train,")


def no_test_rows(root: Path, _) -> None:
    drop_rows(root, ",test,")


def drop_rows(root: Path, mark: str) -> None:
    """Leave the rows that hold this mark out of every table."""
    for path in (root / "annotations").iterdir():
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if mark not in line]
        path.write_text("".join(kept))


def resized(name: str, size: tuple[int, int]):
    """Give the first file that matches `name` another size."""

    def apply(root: Path, _) -> None:
        path = first_file(root, name)
        Image.open(path).resize(size).save(path)

    return apply


def both(*changes):
    def apply(root: Path, trained: Path) -> None:
        for change in changes:
            change(root, trained)

    return apply


def label_map(root: Path, _) -> None:
    """A second organ of value 85 in the first mask."""
    path = first_file(root, "lung_CT/train_masks/*")
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
    weights = {name: value + 0.5 for name, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def file_in_the_way(root: Path, _) -> None:
    (root / "taken").write_text("a file")


def same(_root: Path, _trained: Path) -> None:
    pass


CASES = {
    # the command line
    "unknown flag": Case(same, "unknown argument '--batchsize', nearest is --batch_size", "--batchsize 4"),
    "batch size 0": Case(same, "--batch_size: must be a whole number of at least 1, not '0'", "--batch_size 0"),
    "batch size x": Case(same, "--batch_size: must be a whole number", "--batch_size x"),
    "negative rate": Case(same, "--learning_rate: must be a number above 0", "--learning_rate -1"),
    "rate nan": Case(same, "--learning_rate: must be a number above 0", "--learning_rate nan"),
    "dropout 2": Case(same, "--lora_dropout: must be a number at least 0 and at most 0.99", "--lora_dropout 2"),
    "bad choice": Case(same, "--lr_scaling: invalid choice: 'cubic'", "--lr_scaling cubic"),
    "fp16 on CPU": Case(same, "fp16: needs a GPU", "--mixed_precision fp16"),
    # flags that need or exclude each other
    "predict without question": Case(same, "need each other", "--predict x.png"),
    "overwrite and resume": Case(
        same, "--overwrite starts afresh", "--checkpoint_dir {trained} --overwrite --resume_from auto"
    ),
    "shuffle in training": Case(same, "needs --eval_only", "--shuffle_questions"),
    "no data root": Case(same, "/nowhere: no such folder", "--data_root /nowhere"),
    "image size": Case(same, "--image_size 20: not a multiple", "--image_size 20"),
    # the config file
    "config missing": Case(same, "no.yaml: cannot read", "--config {root}/no.yaml"),
    "config not YAML": Case(config("a: [1\nb: 2"), "c.yaml:2: not valid YAML", "--config {root}/c.yaml"),
    "config not JSON": Case(config("{\n1}", "c.json"), "c.json:2: not valid JSON", "--config {root}/c.json"),
    "config a list": Case(config("- a"), "must hold `flag: value` lines", "--config {root}/c.yaml"),
    "config unknown key": Case(config("batch_sise: 2"), "did you mean 'batch_size'?", "--config {root}/c.yaml"),
    "config wrong type": Case(config("batch_size: [2]"), "must be a single value", "--config {root}/c.yaml"),
    "config out of range": Case(config("num_epochs: 0"), "must be a whole number", "--config {root}/c.yaml"),
    "config bad choice": Case(config("lr_scaling: up"), "'up' is not one of", "--config {root}/c.yaml"),
    "config bool": Case(config("compile: 3"), "compile: must be true or false", "--config {root}/c.yaml"),
    # the annotations
    "no annotations": Case(remove("annotations"), "annotations: holds no CSV file"),
    "unknown annotations": Case(same, "no spine.csv, there are brain_tumors_ct_scan", "--annotations spine"),
    # fields
    "no column": Case(edit(TABLE, replaced(b"split", b"s")), "CT.csv:1: no column"),
    "empty file": Case(edit(TABLE, b""), "lung_CT.csv:1: no column 'image_path'"),
    "empty question": Case(set_field(3, "question", " "), "lung_CT.csv:3: empty 'question'"),
    "empty answer": Case(set_field(4, "answer", ""), "lung_CT.csv:4: empty 'answer'"),
    "bad split": Case(set_field(2, "split", "training"), "lung_CT.csv:2: split 'training' is not"),
    "short row": Case(edit(TABLE, appended(b"x,y\n")), "empty 'split'"),
    "long row": Case(edit(TABLE, replaced(b"e.\n", b"e.,x\n")), "more fields"),
    "open quote": Case(edit(TABLE, appended(b'"never closed')), "not a readable UTF-8 CSV"),
    "not UTF-8": Case(edit(TABLE, appended(b"\xff\xfe\n")), "not a readable UTF-8 CSV"),
    # paths
    "escaping path": Case(set_field(2, "image_path", "../../etc/x_masks/a.png"), "lung_CT.csv:2: image_path"),
    "absolute path": Case(set_field(2, "image_path", "/etc/x_masks/a.png"), "leaves the data root"),
    "drive path": Case(set_field(2, "image_path", "C:\\x_masks\\a.png"), "leaves the data root"),
    "odd path": Case(set_field(2, "image_path", "a.png"), "is not <modality>/<split>_masks/<name>"),
    "mask missing": Case(remove("lung_CT/train_masks/*"), "does not exist under"),
    "picture missing": Case(remove("lung_CT/train_images/*"), "lung_CT.csv:2: no picture"),
    # splits
    "two splits": Case(set_field(2, "split", "test"), "keep its rows in one split"),
    "a copy in two splits": Case(copied_picture, "keep its rows in one split"),
    "no training rows": Case(only_test_rows, "no rows in split 'train'"),
    "no patient column": Case(same, "lung_CT.csv:1: no column 'who' but", "--annotations lung_CT --patient_column who"),
    "empty patient": Case(
        set_field(2, "description", ""), "lung_CT.csv:2: empty 'description'", "--patient_column description"
    ),
    "one patient in two splits": Case(
        both(set_field(2, "image_name", "x"), set_field(-1, "image_name", "x")),
        "patient 'x' is in split",
        "--patient_column image_name",
    ),
    "patient not in the name": Case(same, "--patient_pattern finds nothing in", "--patient_pattern zzz"),
    "pattern open": Case(same, "--patient_pattern: not a regular expression", "--patient_pattern (a"),
    "column and pattern": Case(same, "exclude each other", "--patient_pattern a --patient_column b"),
    # the pictures
    "picture truncated": Case(edit("lung_CT/train_images/*", halve), "is not a readable image"),
    "picture is text": Case(edit("lung_CT/test_images/*", b"hello"), "is not a readable image"),
    "JPG truncated": Case(edit("skin_rgbimage/train_images/*", first(300)), "is not a readable image"),
    "mask of another shape": Case(resized("lung_CT/train_masks/*", (32, 40)), "lung_CT.csv:3: "),
    "mask transposed": Case(
        both(resized("lung_CT/train_images/*", (40, 30)), resized("lung_CT/train_masks/*", (30, 40))),
        "mask of 30 x 40 pixels does not fit its image of 40 x 30 (width and height swapped); replace",
    ),
    "answers contradict": Case(one_answer_to_all, "name another position than their mask's, as this one; correct"),
    # masks
    "label map": Case(label_map, "a label map: its value 85 would count as background"),
    "mask truncated": Case(edit("lung_CT/val_masks/*", first(60)), "is not a readable image"),
    "predict a text": Case(
        text_as_picture, "check --predict", "--checkpoint_dir {trained} --predict {root}/bad.png --question ?"
    ),
    # the pretrained checkpoints
    "no VLM": Case(remove("llava_tiny"), "no llava checkpoint in a folder of it; download"),
    "no SAM": Case(remove("sam_tiny"), "no sam checkpoint in a folder of it; download"),
    "VLM path": Case(same, "/no/such: cannot be loaded (no such folder); download", "--vlm_path /no/such"),
    "VLM is a SAM": Case(same, "is a 'sam' checkpoint, not llava", "--vlm_path {root}/sam_tiny"),
    "VLM truncated": Case(edit("llava_tiny/model.safetensors", first(5000)), "checkpoint cannot be loaded"),
    "VLM config": Case(edit("llava_tiny/config.json", first(50)), "no llava checkpoint"),
    # the run folder and the checkpoint
    "run exists": Case(same, "holds a run already", "--checkpoint_dir {trained}"),
    "folder is a file": Case(file_in_the_way, "cannot write here", "--checkpoint_dir {root}/taken"),
    "no checkpoint": Case(same, "no such checkpoint", "--resume_from {root}/none.pt"),
    "checkpoint is text": Case(
        config("x", "changed.pt"), "not a readable checkpoint", "--resume_from {root}/changed.pt"
    ),
    # checkpoints of another run
    "flipped byte": Case(flipped, "damaged", "--resume_from {root}/flipped/step_00000001.pt"),
    "other script's": Case(
        checkpoint(lambda contents: contents.update(format="x/1")), "of x/1", "--resume_from {root}/changed.pt"
    ),
    "other base": Case(
        other_base, "not the base that the checkpoint was trained on", "--resume_from {trained}/last.pt"
    ),
    "other batch": Case(same, "effective batch size 4, now 5", "--resume_from {trained}/last.pt --batch_size 5"),
    "other seed": Case(same, "a run with seed 0, now 5", "--resume_from {trained}/last.pt --seed 5"),
    "dot path": Case(set_field(2, "image_path", "./."), "leaves the data root"),
    "other LoRA rank": Case(same, "checkpoint of another model", "--resume_from {trained}/last.pt --lora_rank 4"),
    "nothing to evaluate": Case(same, "best.pt: no such checkpoint", "--eval_only"),
    "empty split": Case(no_test_rows, "no rows in split 'test'", "--checkpoint_dir {trained} --eval_only"),
}


def check(done, message: str, before: dict, trained: Path, root: Path) -> None:
    assert done.code == 2, done.stderr[-2000:]
    assert message in done.stderr, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.seconds < 20

    # one line, and nothing is written
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert [line.startswith("error: ") for line in lines] == [True], done.stderr
    assert ";" in lines[0]
    assert tree(trained) == before
    assert not any((root / "new" / name).exists() for name in ("args.yaml", "metrics.jsonl", "last.pt"))


def prepare(name: str, data: Path, trained: Path, root: Path) -> list[str]:
    """Break what the case breaks in a copy of the data; the flags of its run."""
    case = CASES[name]
    shutil.copytree(data, root)
    case.change(root, trained)
    flags = f"--data_root {{root}} --checkpoint_dir {{root}}/new {case.flags}".split()
    return [*FLAGS, *(word.format(root=root, trained=trained) for word in flags)]


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, prs_med_data, trained, tmp_path, run_prs_med):
    root = tmp_path / "data"
    flags = prepare(name, prs_med_data, trained, root)
    before = tree(trained)
    done = run_prs_med(flags)
    check(done, CASES[name].message, before, trained, root)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "launcher"), [("bad split", 2), ("picture is text", 3)])
def test_bad_input_under_a_launcher(name, launcher, prs_med_data, trained, tmp_path):
    """Rank 0 alone prints the line, also for a fault that another rank met; no worker prints a traceback.

    (In the quick suite: test_launch_utils.py under the launcher, test_contract.py on two ranks.)
    """
    flags = prepare(name, prs_med_data, trained, tmp_path / "data")
    command = [*torchrun(launcher), PRS_MED, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert done.stderr.count("error: ") - done.stderr.count("_error: ") == 1, done.stderr
    assert CASES[name].message in done.stderr
    assert 'train_prs_med.py", line' not in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_bad_input_in_a_process_of_its_own(name, prs_med_data, trained, tmp_path):
    """The same by the plain command a user types, with its start-up time."""
    root = tmp_path / "data"
    flags = prepare(name, prs_med_data, trained, root)
    before = tree(trained)
    begun = time.time()
    ended = subprocess.run([sys.executable, PRS_MED, *flags], cwd=ROOT, capture_output=True, text=True, timeout=60)
    seconds = time.time() - begun
    done = SimpleNamespace(code=ended.returncode, stdout=ended.stdout, stderr=ended.stderr, seconds=seconds)
    check(done, CASES[name].message, before, trained, root)


def test_bad_rows_can_be_skipped(prs_med_data, tmp_path, run_prs_med):
    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    set_field(3, "question", "")(root, None)
    done = run_prs_med(["--data_root", root, "--checkpoint_dir", tmp_path / "run", *FLAGS, "--skip_bad_rows"])
    assert done.code == 0, done.stderr
    assert "1 row with a missing field dropped" in done.stdout


def test_odd_but_good_data(prs_med_data, tmp_path, run_prs_med):
    """Backslashes, an extra images_and_masks level, JPEG-edged and 3-channel and 0/1 masks, a 16-bit image, a BOM."""
    from tasks.prs_med.data import open_image, open_mask

    # backslashes, a BOM, and a level more
    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    rows = rows_of(root)
    for row in rows[1:]:
        row[0] = row[0].replace("/", "\\")
    write_rows(root, rows, encoding="utf-8-sig")
    folder = root / "images_and_masks" / "lung_CT"
    folder.parent.mkdir()
    (root / "lung_CT").rename(folder)

    # a mask of 3 channels that went through JPEG, and one of 0 and 1
    smeared, binary = sorted((folder / "train_masks").iterdir())[:2]
    mask = np.asarray(Image.open(smeared))
    channels = np.repeat(mask[..., None], 3, 2)
    Image.fromarray(channels).save(tmp_path / "x.jpg", quality=40)
    Image.open(tmp_path / "x.jpg").save(smeared)
    foreground = np.asarray(Image.open(binary)) > 0
    Image.fromarray(foreground.astype(np.uint8)).save(binary)

    # a 16-bit image under two names
    images = sorted((folder / "train_images").iterdir())[:2]
    for path in images:
        values = np.asarray(Image.open(path)).astype(np.uint16)
        Image.fromarray(values * 200).save(path)
    done = run_prs_med(["--data_root", root, "--checkpoint_dir", tmp_path / "run", *FLAGS])
    assert done.code == 0, done.stderr
    wrong = open_mask(str(smeared)) != (mask > 0)
    assert wrong.mean() < 0.02
    assert set(np.unique(np.asarray(open_image(str(images[0]))))) >= {0, 255}
