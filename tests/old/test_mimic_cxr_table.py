"""train_mimic_cxr.py --table: a plain CSV of X-rays with questions and answers instead of both releases."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import ROOT, records
from PIL import Image
from raw_images import SIDE, gray, save_dicom, save_turned, square

from old.cli_utils import InputError
from old.table_utils import Shares, split_of
from tasks.mimic_cxr.answers import CHEXPERT
from tasks.mimic_cxr.data import decode
from tasks.mimic_cxr.own_answers import Asked, route
from tasks.mimic_cxr.own_table import OwnTable, read_own_table

MIMIC = str(ROOT / "train_mimic_cxr.py")
PREPARE = str(ROOT / "tools/prepare_data.py")
SHARES = Shares(70, 15, 15)
POSITIONS = ("top left", "top right", "bottom left", "bottom right", "center")
CORNERS = ((3, 3), (3, 25), (25, 3), (25, 25), (14, 14))


def write_table(path: Path, rows: list[list], header: tuple = ("image", "question", "answer")) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read(folder: Path, rows: list[list], header: tuple = ("image", "question", "answer"), **options) -> OwnTable:
    table = write_table(folder / "t.csv", rows, header)
    return read_own_table(table, options.get("categories"), options.get("shares", SHARES), options.get("seed", 0))


# --- answers ----------------------------------------------------------------------------------------------------------


def heads_of(pairs: list[tuple[str, str]], categories: list[str] | None = None):
    routing = route(
        [Asked(question, answer, f"t.csv:{n}") for n, (question, answer) in enumerate(pairs, 2)], categories
    )
    return routing, routing.heads


def test_all_answers_to_a_question_go_to_one_head():
    routing, heads = heads_of(
        [
            ("Is there edema?", "Yes."),
            ("Is there edema?", "no"),
            ("How severe?", "mild"),
            ("Where?", "Left  Lung"),
            ("Where?", "right lung"),
            ("What is seen?", "Pleural Effusion"),
            ("is there edema?", "NO"),
        ]
    )
    assert heads == ["binary", "binary", "severity", "region", "region", "category", "binary"]
    assert routing.targets[:3] == [1, 0, 1]
    assert routing.categories == [name.lower() for name in CHEXPERT]
    assert routing.categories[routing.targets[5]] == "pleural effusion"


def test_answers_of_their_own_become_classes_beside_those_that_are_needed():
    """An answer that no head has takes all answers to its question with it; CheXpert's names stay where used."""
    asked = [("Which?", "tuberculosis"), ("Which?", "no"), ("Is it?", "no"), ("Which?", "Edema")]
    routing, heads = heads_of(asked)
    assert heads == ["category", "category", "binary", "category"]
    assert routing.categories == ["edema", "no", "tuberculosis"]
    routing, _ = heads_of([*asked, ("Finding?", "Fracture")])
    assert routing.categories == [*(name.lower() for name in CHEXPERT), "no", "tuberculosis"]


def test_classes_that_were_named_are_not_added_to():
    routing, _ = heads_of([("Which?", "B")], ["a", "b"])
    assert (routing.targets, routing.categories) == ([1], ["a", "b"])
    with pytest.raises(
        InputError, match=r"t.csv:2: answer 'beta' is no class, nearest are bet.*; correct it or add it to"
    ):
        heads_of([("Which?", "beta")], ["alpha", "bet"])


# --- the table --------------------------------------------------------------------------------------------------------


def test_labels_of_a_table(tmp_path):
    """A list names what is present, and the rest is absent; a blank cell knows nothing; columns have 1, 0, -1."""
    rows = [["a.png", "Q?", "yes", "edema;Pleural Effusion"], ["a.png", "R?", "no", ""], ["b.png", "Q?", "no", ""]]
    own = read(tmp_path, rows, ("image", "question", "answer", "labels"))
    listed = dict(zip(CHEXPERT, own.images[0].labels, strict=True))
    assert {name for name, value in listed.items() if value == 1} == {"Edema", "Pleural Effusion"}
    assert set(listed.values()) == {0, 1}
    assert set(own.images[1].labels) == {-128}

    rows = [["a.png", "Q?", "yes", "1.0", ""], ["a.png", "R?", "no", "", "-1"]]
    own = read(tmp_path, rows, ("Image", "Question", "Answer", "EDEMA", "Lung Lesion"))
    known = {name: value for name, value in zip(CHEXPERT, own.images[0].labels, strict=True) if value != -128}
    assert known == {"Edema": 1, "Lung Lesion": -1}


def test_splits_of_a_table(tmp_path):
    names = [f"{patient}_{image}.png" for patient in range(30) for image in range(2)]
    rows = [[name, "Q?", "yes", name.split("_")[0]] for name in names]
    own = read(tmp_path, rows, ("image", "question", "answer", "patient"), seed=5)
    assert {image.split for image in own.images} == {"train", "val", "test"}
    assert all(image.split == split_of(image.patient, 5, SHARES) for image in own.images)
    assert own.rule == "by patient, 70, 15 and 15 %, seed 5"

    assert "by image, as the table has no column 'patient'" in read(tmp_path, [row[:3] for row in rows]).rule
    given = [[*row[:3], "validate" if number % 2 else "Train"] for number, row in enumerate(rows)]
    own = read(tmp_path, given, ("image", "question", "answer", "split"))
    assert [image.split for image in own.images] == ["train", "val"] * 30


def test_what_is_odd_about_classes_is_said(tmp_path):
    rows = [
        ["a.png", "Q?", "pneumonya", "train"],
        ["b.png", "Q?", "pneumonia", "train"],
        ["c.png", "Q?", "cyst", "test"],
        ["c.png", "q?", "Cyst.", "test"],
    ]
    notes = read(tmp_path, rows, ("image", "question", "answer", "split")).notes
    assert [note for note in notes if "'pneumonya'" in note] == [
        "answers 'pneumonia' and 'pneumonya' are two classes; make them one if one is misspelt"
    ]
    assert "1 row there twice or more; each counts" in notes
    assert any("'cyst' has no training row" in note for note in notes)


IMAGES = {
    "8bit.png": lambda path, values: Image.fromarray(values).save(path),
    "16bit.png": lambda path, values: Image.fromarray(values.astype(np.uint16) * 200 + 9).save(path),
    "rgba.png": lambda path, values: Image.fromarray(values).convert("RGBA").save(path),
    "turned.png": save_turned,
    "xray.dcm": lambda path, values: save_dicom(path, 255 - values, PhotometricInterpretation="MONOCHROME1"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_every_format_look_alike(tmp_path, name):
    values = gray(square((3, 22)))
    IMAGES[name](tmp_path / name, values if name != "xray.dcm" else values.astype(np.uint16))
    decoded = decode(str(tmp_path / name), SIDE).astype(int)
    assert np.abs(decoded - values).max() <= 1


# --- a training -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_flags(zygote, tmp_path_factory) -> list:
    """Flags of a small run: 40 X-rays in two formats, a question of yes or no and one of five places each."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my scans").mkdir()
    rows = []
    for number in range(40):
        place = number % 5
        values = gray(square(CORNERS[place]))
        values[-1, number % SIDE] = 200
        name = f"my scans/{number}.png"
        pixels = values.astype(np.uint16) * 256 if number % 2 else values
        Image.fromarray(pixels).save(folder / name)
        labels = "Lung Lesion" if place < 2 else "No Finding"
        rows.append([name, f"P{number // 2}", "Is it high?", "yes" if place < 2 else "no", labels])
        rows.append([name, f"P{number // 2}", "Where is it?", POSITIONS[place], ""])

    # looked at, with tiny encoders for it
    table = write_table(folder / "xrays.csv", rows, ("image", "patient", "question", "answer", "labels"))
    done = zygote(PREPARE, "mimic_cxr", table, "--small_models", folder / "small")
    assert done.code == 0, done.stderr
    assert "category: bottom left" in done.stdout

    # small and the same each time
    flags = ["--table", table, "--index_dir", folder / "index", "--image_size", "64", "--dropout", "0"]
    flags += ["--image_encoder", folder / "small" / "convnext_tiny", "--text_encoder", folder / "small" / "bert_tiny"]
    flags += ["--no_auto_optimize", "--num_workers", "0", "--warmup_steps", "2", "--log_every", "1"]
    return [*flags, "--epochs", "2"]


def train(zygote, flags: list, out: Path, *more, ranks: int = 1):
    done = zygote(MIMIC, flags, "--output_dir", out, *more, ranks=ranks)
    assert done.code == 0, done.stderr
    return done


def training_losses(out: Path) -> list[float]:
    return [record["train/loss"] for record in records(out) if "train/loss" in record]


def test_a_table_is_trained_on_stopped_resumed_and_judged(own_flags, zygote, tmp_path):
    whole = tmp_path / "whole"
    one = ["--batch_size", "8"]
    done = train(zygote, own_flags, whole, one)
    assert "split by patient, 70, 15 and 15 %, seed 0" in done.stdout
    losses = training_losses(whole)
    assert len(losses) > 8

    # the classes are the run's, and the metrics are counted by question
    assert yaml.safe_load((whole / "args.yaml").read_text())["categories"] == sorted(POSITIONS)
    summary = json.loads((whole / "summary.json").read_text())
    assert "test/vqa_accuracy/Where is it?" in summary

    # two processes compute the same
    train(zygote, own_flags, tmp_path / "two", "--batch_size", "4", "--use_ddp", ranks=2)
    assert training_losses(tmp_path / "two") == pytest.approx(losses, rel=1e-5)

    # stopped and resumed
    train(zygote, own_flags, tmp_path / "parts", one, "--max_steps", "3")
    train(zygote, own_flags, tmp_path / "parts", one, "--resume_from", "auto")
    assert training_losses(tmp_path / "parts") == losses

    # judged without the flags of the training
    train(zygote, [], whole, "--eval_only", "--save_predictions", "--no_auto_optimize", "--num_workers", "0")
    judged = json.loads((whole / "eval_test.json").read_text())
    assert judged["test/vqa_accuracy"] == summary["test/vqa_accuracy"]
    predictions = pq.read_table(whole / "predictions_test.parquet").to_pylist()
    assert {row["answer"] for row in predictions} <= {"yes", "no", *POSITIONS}
    assert all(row["image"].startswith("my scans/") for row in predictions)

    # asked, with answers of the head that the wording had in training
    image = next((Path(own_flags[1]).parent / "my scans").iterdir())
    for question, answers in (("Is it high?", {"yes", "no"}), ("Where is it?", set(POSITIONS))):
        done = train(zygote, [], whole, "--predict", image, "--question", question)
        assert done.stdout.split(question)[1].split()[0] in {answer.split()[0] for answer in answers}
    train(zygote, [], whole, "--predict", image, "--question", "Hm?", "--question_type", "Where is it?")


def test_a_changed_table_is_another_index(own_flags, zygote, tmp_path):
    """A run is not resumed on other classes, and an answer outside its classes is named."""
    table = own_flags[1]
    flags = [*own_flags, "--batch_size", "8", "--max_steps", "1"]
    train(zygote, flags, tmp_path / "run")
    other = table.with_name("other.csv")
    other.write_text(table.read_text().replace("top left", "upper left"))
    done = zygote(MIMIC, [*flags, "--table", other], "--output_dir", tmp_path / "run", "--resume_from", "auto")
    assert done.code == 2
    assert "--resume_from: a run with categories" in done.stderr
    done = zygote(MIMIC, "--eval_only", "--table", other, "--output_dir", tmp_path / "run")
    assert done.code == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "answer 'upper left' is no class, nearest are" in line


# --- bad inputs -------------------------------------------------------------------------------------------------------


class Bad(NamedTuple):
    """A table, and the one line that it ends with."""

    text: str | bytes
    message: str
    change: Callable | None = None


HEAD = "image,question,answer"
GOOD = "a.png,Q?,yes"
BAD = {
    "no image column": Bad("picture,question,answer\na.png,Q?,yes\n", "t.csv:1: no column 'image' (the image's path)"),
    "no answer column": Bad("image,question\na.png,Q?\n", "t.csv:1: no column 'answer' (the right answer), there are"),
    "a column twice": Bad("image,Question,question,answer\na,b,c,d\n", "t.csv:1: column 'question' is there twice"),
    "empty": Bad("", "t.csv: is empty; its first row must name the columns"),
    "no rows": Bad(f"{HEAD}\n", "t.csv: holds no rows; a row for each question is needed"),
    # rows
    "empty answer": Bad(f"{HEAD}\n{GOOD}\na.png,Q?,\n", "t.csv:3: empty 'answer'; complete or remove the row"),
    "empty image": Bad(f"{HEAD}\n,Q?,yes\n", "t.csv:2: empty 'image'; complete the row"),
    # paths
    "outside": Bad(f"{HEAD}\n../a.png,Q?,yes\n", "t.csv:2: image '../a.png' leaves the table's folder; use a path"),
    "absolute": Bad(f"{HEAD}\n/a.png,Q?,yes\n", "t.csv:2: image '/a.png' leaves the table's folder; use a path"),
    "drive": Bad(f"{HEAD}\nC:\\a.png,Q?,yes\n", "t.csv:2: image 'C:/a.png' leaves the table's folder; use a path"),
    # not a table
    "extra field": Bad(f"{HEAD}\n{GOOD},more\n", "t.csv:2: more fields than the header has columns; quote texts"),
    "latin": Bad(f"{HEAD}\na.png,Ödem?,yes\n".encode("latin-1"), "t.csv: not a readable UTF-8 CSV ("),
    "open quote": Bad(f'{HEAD}\na.png,"Q?,yes\n', "t.csv: not a readable UTF-8 CSV ("),
    # patients and splits
    "odd split": Bad(f"{HEAD},split\n{GOOD},dev\n", "t.csv:2: split 'dev' is not train, val or test; correct the row"),
    "no patient": Bad(f"{HEAD},patient\n{GOOD},\n", "t.csv:2: empty 'patient'; complete the row"),
    "two patients": Bad(f"{HEAD},patient\n{GOOD},1\n{GOOD},2\n", "t.csv:3: another patient than in"),
    "patient in two splits": Bad(
        f"{HEAD},patient,split\n{GOOD},1,train\nb.png,Q?,no,1,test\n",
        "t.csv:3: patient '1' is in split 'test' and, at",
    ),
    # labels
    "odd label": Bad(
        f"{HEAD},labels\n{GOOD},Edma\n", "t.csv:2: label 'Edma' is none of CheXpert's 14, nearest is Edema"
    ),
    "odd label value": Bad(f"{HEAD},Edema\n{GOOD},yes\n", "t.csv:2: edema 'yes' is not 1, 0, -1 or blank; correct"),
    "labels twice": Bad(
        f"{HEAD},Edema,labels\n{GOOD},1,Edema\n", "t.csv:1: has a column 'labels' and one 'edema'; keep"
    ),
    "labels against each other": Bad(
        f"{HEAD},Edema\n{GOOD},1\n{GOOD},0\n", "t.csv:3: Edema is 0, and 1 in another row"
    ),
    # answers
    "two answers": Bad(
        f"{HEAD}\n{GOOD}\nb.png,Q?,yes\na.png,q?,No.\nb.png,Q?,no\n",
        "t.csv:4: answer 'No.', and 'yes' in ",
    ),
    "free text": Bad(
        "\n".join([HEAD, *(f"{n}.png,Q?,The text number {n}" for n in range(101))]),
        "t.csv:2: 101 different answers such as 'The text number 0' are free text, and this model chooses among",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_one_line(tmp_path, name):
    case = BAD[name]
    path = tmp_path / "t.csv"
    path.write_bytes(case.text if isinstance(case.text, bytes) else case.text.encode())
    with pytest.raises(InputError) as raised:
        read_own_table(path, None, SHARES, 0)
    line = str(raised.value)
    assert case.message in line
    assert "\n" not in line
    assert "; " in line


RUNS = {
    "no such table": ("--table {folder}/none.csv", "none.csv: no such file; check --table"),
    "both": ("--table {table} --mimic_qa_path x", "--table and --mimic_qa_path exclude each other; give one"),
    "a table's flag": ("--split_seed 3", "--split_seed is of a table of your own and needs --table"),
    "bad shares": ("--table {table} --split 60,20,10", "--split: must be three shares that add up to 100, such as"),
    "no images": ("--table {folder}/lost.csv", "lost.csv: none of its images is there, such as lost.png; they lie in"),
    "an image too few": ("--table {folder}/short.csv", "1 picture file not found, such as lost.png"),
    "no image at all": ("--table {folder}/text.csv", "text.csv:2: {folder}/text.png is not a readable image ("),
    "no DICOM": ("--table {folder}/junk.csv", "junk.csv:2: {folder}/junk.dcm is not a readable image (not a DICOM"),
    "no training rows": ("--table {folder}/test.csv", "test.csv: no questions in split 'train'; add a column 'split'"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_bad_table_is_one_line(own_flags, zygote, tmp_path, name):
    words, message = RUNS[name]
    Image.fromarray(gray(square())).save(tmp_path / "a.png")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "junk.dcm").write_bytes(bytes(500))

    # their tables
    write_table(tmp_path / "junk.csv", [["junk.dcm", "Q?", "yes"]])
    write_table(tmp_path / "lost.csv", [["lost.png", "Q?", "yes"]])
    write_table(tmp_path / "short.csv", [["a.png", "Q?", "yes"], ["lost.png", "Q?", "yes"]])
    write_table(tmp_path / "text.csv", [["text.png", "Q?", "yes"]])
    write_table(tmp_path / "test.csv", [["a.png", "Q?", "yes", "test"]], ("image", "question", "answer", "split"))
    places = {"folder": tmp_path, "table": own_flags[1]}
    out = tmp_path / "run"
    done = zygote(MIMIC, own_flags[2:], words.format(**places).split(" "), "--output_dir", out)
    assert done.code == 2, done.stdout
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message.format(**places) in line
    assert not out.exists()
