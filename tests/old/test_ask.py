"""--predict of guide 1: from the run folder alone, about folders and tables, the same at any number of ranks."""

import csv
import gzip
import io
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, tree

from old import predict_utils
from old.cli_utils import InputError
from tasks.mimic_cxr.answers import CHEXPERT, HEADS, head_of
from tasks.mimic_cxr.heads import Wordings
from tasks.mimic_cxr.prediction import draw_attention, likeliest, watch_attention

MIMIC = str(ROOT / "train_mimic_cxr.py")
# trained on no study of the set below
NEVER = "Edema"


class Trained(NamedTuple):
    """A run folder that was moved, its data removed, and images of the data that were kept."""

    run_folder: Path
    images: list[Path]

    def flags(self, run_folder: Path | None = None) -> list:
        """Of a prediction, in the run's folder or, with its checkpoint, in another."""
        where = [MIMIC, "--output_dir", run_folder or self.run_folder]
        return [*where, "--resume_from", self.run_folder / "best.pt"] if run_folder else where


def keep_images(folder: Path, pattern: str, kept: Path) -> list[Path]:
    """Copies of the first six images of a data set."""
    kept.mkdir()
    for number, path in enumerate(sorted(folder.glob(pattern))[:6]):
        shutil.copy(path, kept / f"scan {number}{path.suffix}")
    return sorted(kept.iterdir())


@pytest.fixture(scope="module")
def trained(mimic_cxr_flags, tmp_path_factory, zygote) -> Trained:
    tmp = tmp_path_factory.mktemp("mimic")
    source = Path(mimic_cxr_flags[1]).parent
    data = shutil.copytree(source, tmp / "data", ignore=shutil.ignore_patterns("index"))
    images = keep_images(data, "mimic-cxr-jpg/files/*/*/*/*.jpg", tmp / "images")
    for name in ("convnext_tiny", "bert_tiny"):
        shutil.move(data / name, tmp / name)
    blank_label(data / "mimic-cxr-jpg" / "mimic-cxr-2.0.0-chexpert.csv.gz")
    flags = [flag.replace(str(source), str(data)) for flag in mimic_cxr_flags]
    flags[5] = tmp / "convnext_tiny"
    flags[7] = tmp / "bert_tiny"
    flags += ["--batch_size", 16, "--max_steps", 4, "--max_samples", 200, "--output_dir", tmp / "run"]
    done = zygote(MIMIC, flags)
    assert done.code == 0, done.stderr
    shutil.rmtree(data)
    return Trained((tmp / "run").rename(tmp / "moved"), images)


def blank_label(path: Path) -> None:
    """A label that no study has."""
    rows = list(csv.reader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))
    column = rows[0].index(NEVER)
    lines = [",".join([*row[:column], row[column] if row is rows[0] else "", *row[column + 1 :]]) for row in rows]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


def results_of(run_folder: Path) -> list[dict]:
    with open(run_folder / "predictions" / "predictions.csv", newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def write_table(path: Path, rows: list[list[str]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows(rows)
    return path


# --- folders and tables -----------------------------------------------------------------------------------------------


def test_folder_with_a_broken_file(trained, tmp_path, zygote):
    """All images in it and below are answered, one that is none is named, and the model is loaded once."""
    folder = shutil.copytree(trained.images[0].parent, tmp_path / "new ones")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no image either")
    (folder / "below").mkdir()
    shutil.copy(trained.images[0], folder / "below")
    done = zygote(trained.flags(), "--predict", folder, "--question", "Where is it?", "--batch_size", 3)
    assert done.code == 0, done.stderr
    assert done.stdout.count("loaded ") == 1
    assert "7 questions answered, 1 not" in done.stdout
    assert "broken.png: not a readable image" in done.stderr
    assert "Traceback" not in done.stderr

    # of each image its own files
    rows = results_of(trained.run_folder)
    written = {path.name for path in (trained.run_folder / "predictions").iterdir()}
    overlays = {row["overlay"] for row in rows if not row["error"]}
    assert len(rows) == 8
    assert len(overlays) == 7
    assert overlays <= written
    assert [row["image"] for row in rows if row["error"]] == ["broken.png"]


def test_table_at_one_and_two_processes(trained, tmp_path, zygote):
    """Two questions an image, one file in two folders, a column of the same name as ours: equal files, none lost."""
    (tmp_path / "other").mkdir()
    shutil.copy(trained.images[0], tmp_path / "other")
    names = [*map(str, trained.images[:3]), f"other/{trained.images[0].name}", "missing.png"]
    rows = [["patient", "image", "question", "answer"]]
    for name in names:
        rows += [["p1", name, "Where is the nodule?", "a, b"], ["p2", name, "Is there a nodule in this image?", ""]]
    table = write_table(tmp_path / "ask.csv", rows)
    trees = []
    for ranks in (1, 2):
        out = tmp_path / f"run{ranks}"
        done = zygote(trained.flags(out), "--predict", table, "--batch_size", 3, ranks=ranks)
        assert done.code == 0, done.stderr
        trees.append(tree(out / "predictions"))
    assert trees[0] == trees[1]

    # in the order of the table, with its columns
    found = results_of(out)
    assert [row["image"] for row in found] == [row[1] for row in rows[1:]]
    assert [row["given_answer"] for row in found] == ["a, b", ""] * 5
    assert [row["patient"] for row in found] == ["p1", "p2"] * 5
    assert [bool(row["error"]) for row in found] == [False] * 8 + [True] * 2
    assert len({row["text"] for row in found[:8]}) == 8


def test_what_its_model_gives(trained, tmp_path, zygote):
    """The probabilities are those of the model itself; a head is chosen by wording or name; no untrained label."""
    import train_mimic_cxr as script
    from tasks.mimic_cxr.data import decode

    image = str(trained.images[0])
    rows = [["image", "question", "head"], [image, "Where is the nodule?", ""], [image, "Is there a nodule?", ""]]
    rows += [[image, "Is there a nodule?", "severity"]]
    done = zygote(trained.flags(tmp_path), "--predict", write_table(tmp_path / "ask.csv", rows))
    assert done.code == 0, done.stderr
    assert f"never trained, so without probability: {NEVER}" in done.stdout
    found = results_of(tmp_path)
    assert [row["head"] for row in found] == ["region", "binary", "severity"]
    assert found[2]["head_chosen"] == "named"

    # the model, put together by hand
    args = script.parse_args(["--output_dir", str(trained.run_folder), "--predict", "x.csv"])
    model, tokenizer = script.build_model(args, "no", torch.device("cpu"))
    saved = torch.load(trained.run_folder / "best.pt", weights_only=True)
    model.load_state_dict(saved["model"], strict=False)
    model.eval()
    pixels = torch.from_numpy(decode(image, 64))[None, None]

    # row by row
    for row in found:
        words = tokenizer([row["question"]], return_tensors="pt")
        with torch.no_grad():
            *answers, findings = model(pixels, words["input_ids"], words["attention_mask"])
        probability = answers[list(HEADS).index(row["head"])].softmax(1)[0]
        assert float(row["probability"]) == pytest.approx(probability.max().item(), abs=2e-4)
        assert row["answer"] == HEADS[row["head"]][probability.argmax()]
        given = [row[f"p({name})"] for name in CHEXPERT]
        assert given.pop(CHEXPERT.index(NEVER)) == ""
        expected = findings.sigmoid()[0].tolist()
        expected.pop(CHEXPERT.index(NEVER))
        np.testing.assert_allclose(np.array(given, float), expected, atol=2e-4)
    check_attention(model, pixels, words)
    check_wordings(saved["training"]["wordings"])


def check_attention(model, pixels, words) -> None:
    """What is watched is softmax(q k) of the layer, mean over heads; the answer stays what it is."""
    with torch.no_grad():
        plain = model(pixels, words["input_ids"], words["attention_mask"])
        with watch_attention(model) as watched:
            again = model(pixels, words["input_ids"], words["attention_mask"])

        # the first layer by hand
        image = model.image_tokens(pixels)
        text = model.text(input_ids=words["input_ids"], attention_mask=words["attention_mask"]).last_hidden_state
        layer = model.fusion[0]
        attention = layer.attention
        weight, key_weight, _ = attention.in_proj_weight.chunk(3)
        bias, key_bias, _ = attention.in_proj_bias.chunk(3)
        query = layer.norm(text) @ weight.T + bias
        key = image @ key_weight.T + key_bias
        heads = attention.num_heads
        query = query.unflatten(2, (heads, -1)).transpose(1, 2)
        key = key.unflatten(2, (heads, -1)).transpose(1, 2)
        by_hand = (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5).softmax(3).mean(1)
    assert len(watched) == len(model.fusion)
    torch.testing.assert_close(watched[0], by_hand, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(plain, again, rtol=1e-4, atol=1e-5)
    assert not layer.attention._forward_hooks


def check_wordings(wordings: dict[str, dict[str, str]]) -> None:
    """Without itself, a training question's nearest neighbour has its head in nearly all cases."""
    known = Wordings(wordings)
    right = []
    for kind, questions in wordings.items():
        for question in questions:
            likeness = known.likeness(question)
            likeness[[other == question for other in known.questions]] = -1
            right.append(known.heads[int(likeness.argmax())] == head_of(kind))
    assert len(right) > 50
    assert np.mean(right) > 0.9
    assert known.nearest("Where is the mass?").head == "region"
    assert known.nearest("How severe is the pneumonia?").head == "severity"
    assert not known.nearest("Hello").near


# --- what cannot be answered ------------------------------------------------------------------------------------------


CSV = "image,question\n{image},Where is it?\n"
ASK = "--question ?"
# name: (a file's content by its name, the flags, the message); {tmp}, {image} and {run} are places
BAD = {
    "no such file": ({}, f"--predict {{tmp}}/no.png {ASK}", "no.png: no such file or folder; check --predict"),
    "text as an image": ({"a.png": "x"}, f"--predict {{tmp}}/a.png {ASK}", "not a readable image"),
    "empty folder": ({}, f"--predict {{tmp}} {ASK}", "holds no image"),
    "folder without images": ({"a.txt": "x"}, f"--predict {{tmp}} {ASK}", "holds no image"),
    "no readable image": ({"a.png": "x", "b.jpg": ""}, f"--predict {{tmp}} {ASK}", "); nor can 1 other; check"),
    # tables
    "no column": ({"a.csv": "image\n{image}\n"}, "--predict {tmp}/a.csv", "a.csv:1: no column 'question'"),
    "no image column": ({"a.csv": "file,question\n"}, "--predict {tmp}/a.csv", "a.csv:1: no column 'image'"),
    "semicolons": ({"a.csv": "image;question\na;b\n"}, "--predict {tmp}/a.csv", "no column 'image'"),
    "column twice": ({"a.csv": "image,question,image\n"}, "--predict {tmp}/a.csv", "'image' is there twice"),
    "no rows": ({"a.csv": "image,question\n"}, "--predict {tmp}/a.csv", "a.csv: holds no rows"),
    "empty table": ({"a.csv": ""}, "--predict {tmp}/a.csv", "a.csv:1: no column 'image'"),
    # named with their number
    "empty question": ({"a.csv": CSV + "{image}, \n,?\n"}, "--predict {tmp}/a.csv", "a.csv:3: empty 'question' (and 1"),
    "more fields": ({"a.csv": CSV + "{image},a,b\n"}, "--predict {tmp}/a.csv", "a.csv:3: more fields"),
    "fewer fields": ({"a.csv": CSV + "{image}\n"}, "--predict {tmp}/a.csv", "a.csv:3: fewer fields"),
    "images elsewhere": ({"a.csv": "image,question\nno.png,?\n"}, "--predict {tmp}/a.csv", "relative to the CSV"),
    "Latin-1": ({"a.csv": "image,question\n\udce4,?\n"}, "--predict {tmp}/a.csv", "not a readable UTF-8 CSV"),
    # flags that do not go together
    "image without question": ({}, "--predict {image}", "need each other; a CSV has a column"),
    "question without image": ({}, ASK, "--predict and --question need each other"),
    "blank question": ({}, ["--predict", "{image}", "--question", " "], "--question: must not be blank"),
    "evaluation": ({}, f"--predict {{image}} {ASK} --eval_only", "--predict and --eval_only exclude each other"),
    "overwrite": ({}, f"--predict {{image}} {ASK} --overwrite", "excludes --predict"),
    "no run": ({}, f"--predict {{image}} {ASK} {{where}} {{tmp}}", "best.pt"),
    # heads
    "head without a question": ({}, "--head binary", "--head and --question_type are about --predict"),
    "two heads": ({}, f"--predict {{image}} {ASK} --head region --question_type D02_has_finding", "exclude each other"),
    "no such type": ({}, f"--predict {{image}} {ASK} --question_type D99", "no head answers question type 'D99'"),
    "no such head": ({"a.csv": "image,question,head\n{image},?,ear\n"}, "--predict {tmp}/a.csv", "a.csv:2: head 'ear'"),
    "old weights": ({}, f"--predict {{image}} {ASK} --pretrained_weights x", "--eval_only and --predict"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(trained, name, tmp_path, zygote):
    """One line, exit code 2, and nothing is written."""
    files, flags, message = BAD[name]
    places = {"tmp": tmp_path / "new", "image": trained.images[0], "where": "--output_dir"}
    places["tmp"].mkdir()
    for file, content in files.items():
        text = content.format(**places)
        (places["tmp"] / file).write_bytes(text.encode(errors="surrogateescape"))
    words = flags.split() if isinstance(flags, str) else flags
    before = tree(trained.run_folder)
    # names of places may hold blanks
    done = zygote(trained.flags(), [word.format(**places) for word in words])
    assert done.code == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr
    assert tree(trained.run_folder) == before


@pytest.mark.parametrize("path", ["/gone/away/model", "{tmp}/model", "docs/model"])
def test_a_model_that_has_moved_is_named_with_its_flag(path, tmp_path, zygote):
    """Also where it was named as `docs/model`, which a model on the hub could be, too."""
    old = path.format(tmp=tmp_path)
    (tmp_path / "args.yaml").write_text(f"text_encoder: {old}\n")
    done = zygote(MIMIC, "--output_dir", tmp_path, "--predict", tmp_path, "--question", "?")
    assert done.code == 2
    reason = "not there any more, and the run was trained with it"
    assert done.stderr == f"error: {old}: {reason}; give its folder as --text_encoder; see --help\n"


# --- the parts --------------------------------------------------------------------------------------------------------


def test_stems_and_batches(tmp_path):
    """Stems are unique where file systems know no capitals; an image that is asked twice is opened once a batch."""
    names = ["a/x.png", "b/x.png", "b/X.jpg", "x_2.png", "a/x.png"]
    table = write_table(tmp_path / "ask.csv", [["image"], *([name] for name in names)])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").touch()
    asked = predict_utils.find_questions(table, "?")
    assert [one.stem for one in asked] == ["x", "x_2", "X_3", "x_2_2", "x_4"]

    # batches of three, without the one that cannot be opened
    opened = []
    sizes = []

    def open_image(path: str) -> str:
        opened.append(path)
        if path.endswith("jpg"):
            raise ValueError("no\nimage")
        return Path(path).name

    def answer(batch, images) -> list[dict]:
        sizes.append(len(batch))
        assert images == [one.path.name for one in batch]
        return [{"answer": one.stem} for one in batch]

    records = predict_utils.answer_questions([*asked, asked[4]], 3, open_image, answer, tmp_path / "out")
    assert sizes == [2, 3]
    assert len(opened) == 5
    assert [record.get("answer") for record in records] == ["x", "x_2", None, "x_2_2", "x_4", "x_4"]
    assert records[2] == {"error": "no"}

    # a table that is left over would tell of other files
    def fail(batch, images) -> list[dict]:
        raise InputError("full")

    with pytest.raises(InputError):
        predict_utils.answer_questions(asked, 3, open_image, fail, tmp_path / "out")
    assert not (tmp_path / "out" / "predictions.csv").exists()


def test_overlay_is_red_where_the_attention_is():
    """A transformer's first token stands for no place; even attention is red all over."""
    attention = torch.zeros(17)
    attention[0] = 9.0
    attention[1 + 4 * 3] = 1.0
    image = np.full((64, 64), 100, np.uint8)
    shown = np.asarray(draw_attention(image, attention)).astype(int)
    redness = shown[..., 0] - shown[..., 1]
    assert redness[56:, :8].min() > 80
    assert np.abs(redness[:32]).max() < 12
    even = np.asarray(draw_attention(image, torch.full((16,), 0.1))).astype(int)
    assert len(np.unique(even[..., 0])) == 1
    assert likeliest(torch.tensor([0.25, 0.75]), ("no", "yes"))["answer_2"] == "no"
