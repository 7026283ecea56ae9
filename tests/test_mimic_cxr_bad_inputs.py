"""train_mimic_cxr.py on bad input: exit code 2, one line, no traceback, nothing overwritten. Each case breaks one thing
of a good data set, of the settings, or of what an earlier run left."""

import csv
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, tree

from tasks.mimic_cxr import index as mci

MIMIC = str(ROOT / "train_mimic_cxr.py")
SMALL = ["--batch_size", "4", "--max_steps", "1", "--max_samples", "24", "--save_every", "0"]
QA, GRADES = "mimic-ext-cxr-qba", "mimic-ext-cxr-qba/metadata/question_metadata.parquet"
MADE = ("args.yaml", "metrics.jsonl", "last.pt", "best.pt", "manifest.sha256", "eval_test.json", "logs", "figures")


@pytest.fixture(scope="module")
def chest_root(mimic_cxr_flags) -> Path:
    return Path(mimic_cxr_flags[mimic_cxr_flags.index("--mimic_cxr_path") + 1]).parent


@pytest.fixture(scope="module")
def run(mimic_cxr_flags, zygote, tmp_path_factory) -> Path:
    """A finished run whose files no bad input may touch."""
    out = tmp_path_factory.mktemp("trained") / "run"
    done = zygote(MIMIC, *mimic_cxr_flags, *SMALL, "--output_dir", out)
    assert done.code == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def before(run) -> dict[str, str]:
    return tree(run)


# --- ways to break a data set: each gets a copy made of hard links, so it writes new files ----------------------------


def put(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def edit(pattern: str, change, every: bool = False):
    """bytes -> bytes, on the first file (or every file) that matches."""

    def apply(root: Path) -> None:
        paths = sorted(root.glob(pattern))
        for path in paths if every else paths[:1]:
            put(path, change(path.read_bytes()))

    return apply


def remove(*patterns: str):
    def apply(root: Path) -> None:
        for path in [path for pattern in patterns for path in root.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return apply


def table(name: str, change):
    """A list of rows (row 0 is the header) of mimic-cxr-2.0.0-<name>.csv.gz, changed in place."""

    def apply(root: Path) -> None:
        path = root / "mimic-cxr-jpg" / f"mimic-cxr-2.0.0-{name}.csv.gz"
        rows = list(csv.reader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))
        change(rows)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        put(path, gzip.compress(text.getvalue().encode()))

    return apply


def cell(name: str, line: int, column: str, value: str):
    def change(rows: list) -> None:
        rows[line - 1][rows[0].index(column)] = value

    return table(name, change)


def column(name: str, column: str, value):
    """value(old) in the column of every row."""

    def change(rows: list) -> None:
        for row in rows[1:]:
            row[rows[0].index(column)] = value(row[rows[0].index(column)])

    return table(name, change)


def packed(name: str, content: bytes):
    return edit(f"mimic-cxr-jpg/*-{name}.csv.gz", lambda _: content)


def unpacked(root: Path) -> None:
    for path in root.glob("mimic-cxr-jpg/*.csv.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()


def header(name: str, old: str, new: str):
    return table(name, lambda rows: rows.__setitem__(0, [new if word == old else word for word in rows[0]]))


def other_split(rows: list) -> None:
    """The last row of the first patient who has several is put into another split."""
    first = next(row for row in rows[1:] if sum(row[2] == other[2] for other in rows) > 1)
    last = [row for row in rows if row[2] == first[2]][-1]
    last[3] = "test" if last[3] == "train" else "train"


def grades(change):
    """pa.Table -> pa.Table, on the table with the ratings."""

    def apply(root: Path) -> None:
        changed = change(pq.read_table(root / GRADES))
        (root / GRADES).unlink()
        pq.write_table(changed, root / GRADES)

    return apply


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def garbage(content: bytes) -> bytes:
    return content[:60] + b"\xff" * 400 + content[460:]


def questions(change, every: bool = True):
    """Change the contents of qa.json in place, or return others, in every study."""

    def apply(content: bytes) -> bytes:
        value = json.loads(content)
        changed = change(value)
        return json.dumps(value if changed is None else changed).encode()

    return edit(f"{QA}/qa/*/*/*.qa.json", apply, every)


def each_question(change):
    def apply(value: dict) -> None:
        for question in value["questions"]:
            change(question)

    return questions(apply)


def folder_for_json(root: Path) -> None:
    for path in root.glob(f"{QA}/qa/*/*/*.qa.json"):
        path.unlink()
        path.mkdir()


def zipped(change=None, **more):
    """qa.zip in place of the folder qa/; change(bytes of the archive) -> bytes, `more`: extra members."""

    def apply(root: Path) -> None:
        made, folder = io.BytesIO(), root / QA
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted((folder / "qa").glob("*/*/*.qa.json")):
                archive.write(path, path.relative_to(folder))
            for name, content in more.items():
                archive.writestr(name, content)
        shutil.rmtree(folder / "qa")
        put(folder / "qa.zip", change(made.getvalue()) if change else made.getvalue())

    return apply


def in_members(offset: int, new: bytes, central: int | None = None):
    """Overwrite bytes at `offset` into every member (its 30-byte header, its name, its data) and into its entry in the
    directory at the end."""

    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        for found in re.finditer(b"PK\x03\x04", content):
            begin = found.start() + offset
            if offset >= 30:  # into the data, behind the name
                begin += int.from_bytes(content[found.start() + 26 : found.start() + 28], "little")
            changed[begin : begin + len(new)] = new
        for found in re.finditer(b"PK\x01\x02", content) if central is not None else ():
            changed[found.start() + central : found.start() + central + len(new)] = new
        return bytes(changed)

    return change


def crc(root: Path) -> None:
    """One letter of each question file changes inside an archive that stores them as they are."""
    folder, made = root / QA, io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted((folder / "qa").glob("*/*/*.qa.json")):
            archive.write(path, path.relative_to(folder))
    shutil.rmtree(folder / "qa")
    put(folder / "qa.zip", made.getvalue().replace(b'"question_type"', b'"Question_type"'))


def pictures(change):
    return edit("mimic-cxr-jpg/files/*/*/*/*.jpg", change, every=True)


def pictures_of(split: str, change):
    """Only the pictures of a split, all but the first of it."""

    def apply(root: Path) -> None:
        with gzip.open(root / "mimic-cxr-jpg" / "mimic-cxr-2.0.0-split.csv.gz", "rt") as file:
            names = sorted(row["dicom_id"] for row in csv.DictReader(file) if row["split"] == split)
        for name in names[1:]:
            edit(f"mimic-cxr-jpg/files/*/*/*/{name}.jpg", change)(root)

    return apply


def no_laterals(rows: list) -> None:
    view, meaning = rows[0].index("ViewPosition"), rows[0].index("ViewCodeSequence_CodeMeaning")
    for row in rows[1:]:
        row[view] = row[meaning] = ""


def both(*changes):
    def apply(root: Path) -> None:
        for change in changes:
            change(root)

    return apply


def weights(name: str, change):
    """{name: tensor} -> {name: tensor}, on the safetensors file of an encoder."""

    def apply(root: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = root / name / "model.safetensors"
        changed = change(load_file(path))
        path.unlink()
        save_file({key: value.contiguous() for key, value in changed.items()}, path, metadata={"format": "pt"})

    return apply


def few_positions(root: Path) -> None:
    """A BERT that knows 8 positions."""
    edit("bert_tiny/config.json", lambda b: json.dumps(json.loads(b) | {"max_position_embeddings": 8}).encode())(root)
    name = "embeddings.position_embeddings.weight"
    weights("bert_tiny", lambda w: {k: v[:8] if k.endswith(name) else v for k, v in w.items()})(root)


def few_words(root: Path) -> None:
    """A BERT whose tokenizer knows more words than it."""
    edit("bert_tiny/config.json", lambda b: json.dumps(json.loads(b) | {"vocab_size": 12}).encode())(root)
    name = "embeddings.word_embeddings.weight"
    weights("bert_tiny", lambda w: {k: v[:12] if k.endswith(name) else v for k, v in w.items()})(root)


def one_channel(root: Path) -> None:
    """A ConvNeXt for pictures of one channel."""
    edit("convnext_tiny/config.json", lambda b: json.dumps(json.loads(b) | {"num_channels": 1}).encode())(root)
    name = "patch_embeddings.weight"
    weights("convnext_tiny", lambda w: {k: v[:, :1] if k.endswith(name) else v for k, v in w.items()})(root)


CUT = b"\xff\xd8\xff\xe0"  # how a JPEG begins
ALL = ["--quality_grade", "all"]
DATA = {
    # the tables
    "table missing": (remove("mimic-cxr-jpg/*metadata*"), [], r"metadata\.csv\.gz: does not exist; check --mimic_cxr"),
    "table unpacked": (unpacked, [], r"metadata\.csv\.gz: does not exist; pack mimic-cxr-2\.0\.0-metadata\.csv again"),
    "no ViewPosition": (header("metadata", "ViewPosition", "View"), [], r"metadata\.csv\.gz:1: no column 'ViewPositio"),
    "no split": (header("split", "split", "part"), [], r"split\.csv\.gz:1: no column 'split'"),
    "no Pneumonia": (header("chexpert", "Pneumonia", "pneumonia"), [], r"chexpert\.csv\.gz:1: no column 'Pneumonia'"),
    "column twice": (header("split", "study_id", "subject_id"), [], r"split\.csv\.gz:1: column 'subject_id' is there"),
    "study number": (cell("metadata", 3, "study_id", "s12"), [], r"metadata\.csv\.gz:3: study_id 's12' is not a numbe"),
    "blank patient": (cell("split", 4, "subject_id", ""), [], r"split\.csv\.gz:4: subject_id '' is not a number"),
    "long number": (cell("chexpert", 2, "study_id", "9" * 20), [], r"chexpert\.csv\.gz:2: study_id '9+' is not a numb"),
    "label 7": (cell("chexpert", 5, "Edema", "7.0"), [], r"chexpert\.csv\.gz:5: Edema '7\.0' is not 1\.0, 0\.0, -1\.0"),
    "label text": (cell("chexpert", 2, "Fracture", "yes"), [], r"chexpert\.csv\.gz:2: Fracture 'yes' is not 1\.0"),
    "unknown split": (cell("split", 6, "split", "dev"), [], r"split\.csv\.gz:6: split 'dev' is not one of train, vali"),
    "first row's split": (cell("split", 2, "split", "dev"), [], r"split\.csv\.gz:2: split 'dev' is not one of"),
    "patient in two splits": (table("split", other_split), [], r"split\.csv\.gz:\d+: patient \d+ is in two splits"),
    "gz truncated": (edit("mimic-cxr-jpg/*chexpert*", lambda b: b[: len(b) // 2]), [], r"chexpert.*not a readable CSV"),
    "gz is HTML": (packed("split", b"<html>log in"), [], r"split\.csv\.gz: not a readable CSV .*download it again"),
    "gz empty": (packed("metadata", b""), [], r"metadata\.csv\.gz: not a readable CSV"),
    "table of nothing": (packed("metadata", gzip.compress(b"")), [], r"metadata\.csv\.gz: not a readable CSV"),
    "table of a header": (table("metadata", lambda rows: rows.__delitem__(slice(1, None))), [], "no studies"),
    "not UTF-8": (packed("split", gzip.compress(b"dicom_id,subject_id,split\n\xff\xfe,1,train\n")), [], "not a readab"),
    "row too long": (table("split", lambda rows: rows[2].append("x")), [], r"split\.csv\.gz: not a readable CSV"),
    "escaping picture": (column("metadata", "dicom_id", lambda v: f"../{v}"), [], r"metadata\.csv\.gz:2: dicom_id '\."),
    "nothing to train on": (column("split", "split", lambda _: "test"), [], "no questions in split 'train'"),
    "nothing to test on": (column("split", "split", lambda _: "train"), ["--eval_only"], "no questions in split 'test"),
    "no studies in split": (table("split", lambda rows: rows.__delitem__(slice(1, None))), [], "no question is left"),
    "view without pictures": (table("metadata", no_laterals), ["--view", "lateral"], r"no question is left.*or --view"),
    # the ratings
    "parquet missing": (remove(GRADES), [], r"qba: holds no metadata/question_metadata\.parquet, which has the grades"),
    "parquet is text": (edit(GRADES, lambda _: b"hello"), [], r"parquet: not a readable table of questions"),
    "parquet empty": (edit(GRADES, lambda _: b""), [], r"parquet: not a readable table of questions"),
    "parquet truncated": (edit(GRADES, lambda b: b[: len(b) // 2]), [], r"parquet: not a readable table of questions"),
    "parquet overwritten": (edit(GRADES, garbage), [], r"parquet: not a readable table of questions"),
    "parquet without rating": (
        grades(lambda t: t.drop_columns("question.quality.rating")), [], r"no column 'question\.quality\.rating'; it"),
    "parquet study names": (
        grades(lambda t: with_column(t, "study_id", pa.array(["x"] * len(t)))), [], "parquet: not a readable table"),
    "parquet study numbers": (
        grades(lambda t: with_column(t, "study_id", pa.array([5] * len(t)))), [], "parquet: not a readable table"),
    "nothing of the grade": (
        grades(lambda t: with_column(t, "question.quality.rating", pa.nulls(len(t), pa.string()))), [],
        r"no question is left \(\d+ below the grade, or unrated.*choose another --quality_grade"),
    # the questions
    "JSON truncated": (edit(f"{QA}/qa/*/*/*.qa.json", lambda b: b[:-20]), ALL, r"s\d+\.qa\.json: not a question file"),
    "JSON empty": (edit(f"{QA}/qa/*/*/*.qa.json", lambda _: b"", True), [], r"s\d+\.qa\.json: not a question file"),
    "JSON not UTF-8": (edit(f"{QA}/qa/*/*/*.qa.json", lambda _: b'{"\xff"', True), [], r"json: not a question file"),
    "JSON nested": (edit(f"{QA}/qa/*/*/*.qa.json", lambda _: b"[" * 10**5, True), [], r"json: not a question file"),
    "JSON a list": (questions(lambda v: [v]), [], r"qa/p\d+/p\d+/s\d+\.qa\.json: not a question file"),
    "no questions": (questions(lambda v: v.pop("questions") and None), [], r"json: not a question file \(no key 'ques"),
    "questions a dict": (questions(lambda v: v | {"questions": {"a": 1}}), [], "`questions` is not a list"),
    "question a string": (questions(lambda v: v | {"questions": ["why?"]}), [], r"json: question not in the release's"),
    "no question_id": (each_question(lambda q: q.pop("question_id")), [], r"\(no key 'question_id'\)"),
    "no answers": (each_question(lambda q: q.pop("answers")), [], r"/s\d+\.qa\.json: question not .* \(no key 'answer"),
    "no answer_type": (each_question(lambda q: q["answers"][0].pop("answer_type")), [], r"\(no key 'answer_type'\)"),
    "answers null": (each_question(lambda q: q.update(answers=None)), [], "question not in the release's format"),
    "type null": (each_question(lambda q: q.update(question_type=None)), [], "question not in the release's format"),
    "modifiers": (each_question(lambda q: q["answers"][0].update(modifiers=5)), ALL, "question not in the release's"),
    "text null": (each_question(lambda q: q.update(question=None)), [], r"s\d+\.qa\.json: question not in the release"),
    "text empty": (each_question(lambda q: q.update(question=" ")), [], r"s\d+\.qa\.json: question not in the release"),
    "text a number": (each_question(lambda q: q.update(question=5)), [], r"s\d+\.qa\.json: question not in the releas"),
    "id a number": (each_question(lambda q: q.update(question_id=5)), ALL, r"s\d+\.qa\.json: question not in the rel"),
    "folder for JSON": (folder_for_json, [], r"s\d+\.qa\.json: not a question file"),
    "question files missing": (remove(f"{QA}/qa/*/*/*.qa.json"), [], r"no question is left \(\d+ study without a ques"),
    "neither folder nor zip": (remove(f"{QA}/*"), [], r"qba: holds neither qa/ nor qa\.zip; check --mimic_qa_path"),
    "types without a head": (each_question(lambda q: q.update(question_type="Z99_odd")), [], r"Z99_odd: question type"),
    # the archive
    "zip is text": (zipped(lambda _: b"hello"), [], r"qa\.zip: not a readable zip file"),
    "zip cut": (zipped(lambda b: b[:-3000]), [], r"qa\.zip: not a readable zip file"),
    "zip escapes": (zipped(**{"../../etc/s1.qa.json": "{}"}), [], r"qa\.zip: member '\.\./\.\./etc.*points outside"),
    "zip escapes backwards": (zipped(**{"qa\\..\\..\\s1.qa.json": "{}"}), [], r"qa\.zip: member .*points outside"),
    "zip absolute": (zipped(**{"/etc/s1.qa.json": "{}"}), [], r"qa\.zip: member '/etc.*points outside the archive"),
    "zip sum": (crc, [], r"qa\.zip:qa/p\d+/.*json: not a question file \(Bad CRC-32"),
    "zip data": (zipped(in_members(30, b"\xff" * 40)), [], r"qa\.zip:qa/p\d+/.*json: not a question file"),
    "zip encrypted": (zipped(in_members(6, b"\x01", 8)), [], r"qa\.zip:qa/p\d+/.*json: not a question file .*encrypte"),
    "zip method": (zipped(in_members(8, b"\x63", 10)), [], r"qa\.zip:qa/p\d+/.*json: not a question file"),
    "zip without the files": (zipped(lambda b: b.replace(b".qa.json", b".qa.JSON")), [], "without a question file"),
    "zip JSON": (both(edit(f"{QA}/qa/*/*/*.qa.json", lambda b: b[:99], True), zipped()), [], r"qa\.zip:qa/.*not a que"),
    "zip question": (
        both(each_question(lambda q: q.pop("answers")), zipped()), [], r"qa\.zip:\S*s\d+\.qa\.json: question not in"),
    # the pictures
    "JPG is HTML": (pictures(lambda _: b"<html>log in"), [], r"files/p\d+/p\d+/s\d+/\S+\.jpg: not a JPEG file"),
    "JPG is PNG": (pictures(lambda _: b"\x89PNG\r\n"), [], r"\.jpg: not a JPEG file; download it again"),
    "JPG empty": (pictures(lambda _: b""), [], r"\.jpg: not a JPEG file"),
    "JPG missing": (remove("mimic-cxr-jpg/files/p1[0-4]"), [], r"\d+ picture files do not exist.*missing\.txt.*--max_"),
    "too many missing": (remove("mimic-cxr-jpg/files/p1[0-4]"), ["--max_missing", "1"], r"picture files do not exist"),
    "no files": (
        remove("mimic-cxr-jpg/files"), ["--max_missing", "9999"], r"cxr-jpg: no question is left.*lack their pict"),
    "JPG truncated": (pictures(lambda b: b[: len(b) // 2]), [], r"\.jpg: not a readable picture .*truncated"),
    "JPG a header": (pictures(lambda _: CUT), [], r"\.jpg: not a readable picture \(cannot identify image file"),
    "JPG truncated in val": (
        pictures_of("validate", lambda b: b[:300]), ["--max_samples", "0"], r"\.jpg: not a readable picture"),
    # the encoders
    "no image encoder": (remove("convnext_tiny"), [], r"convnext_tiny: cannot be loaded .*--image_encoder"),
    "no text encoder": (remove("bert_tiny"), [], r"bert_tiny: cannot be loaded \(no such folder\).*--text_encoder"),
    "encoder config": (edit("convnext_tiny/config.json", lambda b: b[:40]), [], r"convnext_tiny: cannot be loaded"),
    "encoder weights cut": (edit("bert_tiny/model.safetensors", lambda b: b[:9000]), [], r"bert_tiny: cannot be loade"),
    "encoder weights missing": (remove("bert_tiny/model.safetensors"), [], r"bert_tiny: cannot be loaded"),
    "encoder weights of another": (
        weights("bert_tiny", lambda w: {f"decoder.{k}": v for k, v in w.items()}), [], r"bert_tiny: cannot be loaded"),
    "image weights of another": (
        weights("convnext_tiny", lambda w: {f"a.{k}": v for k, v in w.items()}), [], r"convnext_tiny: cannot be loade"),
    "no tokenizer": (remove("bert_tiny/tokenizer*", "bert_tiny/vocab*"), [], r"bert_tiny: no tokenizer \(it knows no"),
    "tokenizer of another": (few_words, [], r"bert_tiny: no tokenizer \(it has \d+ words and the encoder 12\)"),
    "few positions": (few_positions, ["--max_question_length", "9"], r"--max_question_length 9: \S+bert_tiny takes 8"),
    "one channel": (one_channel, [], r"convnext_tiny: does not take pictures of 3 x 64 x 64"),
}  # fmt: skip


# --- ways to break the settings and what other runs left: each gets a folder for its files, the finished run, the data


def side(name: str, content):
    """Write <tmp>/name: text, or a value as JSON."""

    def write(tmp: Path, _run: Path, _root: Path) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp / name).write_text(text)

    return write


def same(_tmp: Path, _run: Path, _root: Path) -> None:
    pass


def copied(tmp: Path, run: Path, _root: Path) -> None:
    shutil.copytree(run, tmp / "run")


def checkpoint(change):
    """<tmp>/changed.pt: the checkpoint of the run, changed."""

    def write(tmp: Path, run: Path, _root: Path) -> None:
        contents = torch.load(run / "last.pt", weights_only=True)
        change(contents)
        torch.save(contents, tmp / "changed.pt")

    return write


def flipped(tmp: Path, run: Path, _root: Path) -> None:
    (tmp / "flipped").mkdir()
    content = bytearray((run / "step_00000001.pt").read_bytes())
    content[len(content) // 3] ^= 4
    (tmp / "flipped" / "step_00000001.pt").write_bytes(content)
    shutil.copy(run / "manifest.sha256", tmp / "flipped")


def weight_file(change):
    """<tmp>/w.safetensors: the weights of the run, changed."""

    def write(tmp: Path, run: Path, _root: Path) -> None:
        from safetensors.torch import load_file, save_file

        save_file(change(load_file(run / "model.safetensors")), tmp / "w.safetensors")

    return write


def index(change):
    """<tmp>/index: the index of the run, change(its folder)."""

    def write(tmp: Path, _run: Path, root: Path) -> None:
        source = next(root.glob("index/*/index.json")).parent
        shutil.copytree(source, tmp / "index" / source.name, ignore=shutil.ignore_patterns("*.u8"))
        change(tmp / "index" / source.name)

    return write


def no_lock(folder: Path) -> None:
    """A folder that has to be built but whose lock cannot be opened."""
    (folder / "index.json").unlink()
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()


def deepspeed(config, *flags, message: str, name: str = "ds.json"):
    """A case of a DeepSpeed file."""
    words = [*NEW, "--use_deepspeed", "--deepspeed_config", f"{{tmp}}/{name}", *flags]
    return side(name, config), words, rf"{re.escape(name)}{message}"


def configured(text, message: str, *flags, name: str = "c.yaml"):
    """A case of a --config file."""
    return side(name, text), [*NEW, "--config", f"{{tmp}}/{name}", *flags], rf"{re.escape(name)}{message}"


def zero(stage=2, **more) -> dict:
    return {"zero_optimization": {"stage": stage, **more}}


RUN, NEW = ["--output_dir", "{run}"], ["--output_dir", "{tmp}/new"]
RESUME, INDEX = [*NEW, "--resume_from"], [*NEW, "--index_dir", "{tmp}/index"]
PRETRAINED = [*NEW, "--pretrained_weights", "{tmp}/w.safetensors"]
SETTINGS = {
    # the command line
    "unknown flag": (same, [*NEW, "--batchsize", "4"], "unknown argument '--batchsize', nearest is --batch_size"),
    "abbreviated flag": (same, [*NEW, "--mimic_cxr", "x"], "unknown argument '--mimic_cxr', nearest is --mimic_cxr_pa"),
    "word without a flag": (same, [*NEW, "train"], "unknown argument 'train'; see --help"),
    "flag without a value": (same, [*NEW, "--epochs"], "argument --epochs: expected one argument"),
    "batch size 0": (same, [*NEW, "--batch_size", "0"], "--batch_size: must be a whole number of at least 1, not '0'"),
    "rate nan": (same, [*NEW, "--learning_rate", "nan"], "--learning_rate: must be a number above 0, not 'nan'"),
    "rate 0": (same, [*NEW, "--learning_rate", "0"], "--learning_rate: must be a number above 0"),
    "clip inf": (same, [*NEW, "--grad_clip", "inf"], "--grad_clip: must be a number at least 0"),
    "image size 1": (same, [*NEW, "--image_size", "1"], "--image_size: must be a whole number of at least 32, not '1'"),
    "dropout 1": (same, [*NEW, "--dropout", "1"], "--dropout: must be a number at least 0 and at most 0.99"),
    "epochs 1.5": (same, [*NEW, "--epochs", "1.5"], "--epochs: must be a whole number of at least 1"),
    "workers -1": (same, [*NEW, "--num_workers", "-1"], "--num_workers: must be a whole number of at least 0"),
    "seed x": (same, [*NEW, "--seed", "x"], "--seed: must be a whole number from .*, not 'x'"),
    "grade E": (same, [*NEW, "--quality_grade", "E"], r"--quality_grade: invalid choice: 'E' \(choose from"),
    "view": (same, [*NEW, "--view", "sagittal"], "--view: invalid choice: 'sagittal'"),
    "uncertain": (same, [*NEW, "--chexpert_uncertain", "zeros"], "--chexpert_uncertain: invalid choice: 'zeros'"),
    "fp16 on CPU": (same, [*NEW, "--mixed_precision", "fp16"], "--mixed_precision fp16: needs a GPU; use no or bf16"),
    "two engines": (same, [*NEW, "--use_deepspeed", "--use_ddp"], "--use_deepspeed and --use_ddp exclude each other"),
    "overwrite and resume": (same, [*RUN, "--overwrite", "--resume_from", "auto"], "--overwrite starts afresh"),
    "overwrite and evaluate": (same, [*RUN, "--overwrite", "--eval_only"], "--overwrite starts afresh and excludes"),
    "no pictures folder": (same, [*NEW, "--mimic_cxr_path", "/no/w"], "/no/w: no such folder; check --mimic_cxr_path"),
    "no questions folder": (same, [*NEW, "--mimic_qa_path", "/no/w"], "/no/w: no such folder; check --mimic_qa_path"),
    "folders swapped": (same, [*NEW, "--mimic_qa_path", "{cxr}"], r"mimic-cxr-jpg: holds neither qa/ nor qa\.zip"),
    "folder empty": (same, [*NEW, "--mimic_cxr_path", "{tmp}"], r"metadata\.csv\.gz: does not exist"),
    "hub name": (same, [*NEW, "--image_encoder", "no/such"], "no/such: cannot be loaded .*--image_encoder"),
    "text as image encoder": (same, [*NEW, "--image_encoder", "{root}/bert_tiny"], "bert_tiny: a 'bert' checkpoint is"),
    "image as text encoder": (same, [*NEW, "--text_encoder", "{root}/convnext_tiny"], "convnext_tiny: a 'convnext' ch"),
    # the config file
    "config missing": (same, [*NEW, "--config", "{tmp}/no.yaml"], r"no\.yaml: cannot read the config .*check --config"),
    "config a folder": (same, [*NEW, "--config", "{tmp}"], r"cannot read the config \(Is a directory\)"),
    "config not YAML": configured("a: [1\nb: 2", ":2: not valid YAML; correct the file"),
    "config with an object": configured("seed: !!python/object/apply:os.getcwd []", ":1: not valid YAML"),
    "config not JSON": configured("{\n1}", r":2: not valid JSON", name="c.json"),
    "config a list": configured("- a", ": must hold `flag: value` lines, not a list"),
    "config unknown key": configured("batch_sise: 2", ": unknown key 'batch_sise'; did you mean 'batch_size'"),
    "config nested": configured("train:\n  epochs: 2", ": unknown key 'train'"),
    "config unknown key in a section": configured(
        "training:\n  batch_size_per_gp: 2", ": unknown key 'batch_size_per_gp' in training; did you mean 'bat"),
    "config section a number": configured("deepspeed: 2", ": deepspeed: must be a section of keys, not 2"),
    "config key of another section": configured("training:\n  stage: 2", ": unknown key 'stage' in training"),
    "config a key twice": configured("epochs: 2\ntraining:\n  epochs: 3", ": epochs is given twice; remove one"),
    "config two precisions": configured(
        "mixed_precision: bf16\ntraining:\n  fp16: true", ": holds both fp16 and mixed_precision; remove one"),
    "config fp16 a number": configured("training:\n  fp16: 1", ": fp16: must be true or false, not 1"),
    "config stage 7": configured("deepspeed:\n  stage: 7", ": zero_stage: 7 is not one of 0, 2, 3"),
    "config workers": configured("training:\n  dataloader_num_workers: -1", ": dataloader_num_workers: must be a who"),
    "config a negated key": configured("no_auto_optimize: true", ": unknown key 'no_auto_optimize'; did you mean 'aut"),
    "config wrong type": configured("batch_size: [2]", r": batch_size: must be a single value, not \[2\]"),
    "config nothing": configured("output_dir:", ": output_dir: wrong type NoneType"),
    "config bool": configured("use_ddp: 3", ": use_ddp: must be true or false, not 3"),
    "config negated bool": configured("auto_optimize: 'no'", ": auto_optimize: must be true or false, not 'no'"),
    "config bad choice": configured("quality_grade: A+++", r": quality_grade: 'A\+\+\+' is not one of A\+\+, A\+, A"),
    "config out of range": configured("epochs: 0", ": epochs: must be a whole number of at least 1, not '0'"),
    "config two engines": (
        side("c.yaml", "use_deepspeed: true"), [*NEW, "--config", "{tmp}/c.yaml", "--use_ddp"], "exclude each other"),
    "config grade": configured("quality_grade: 4", ": quality_grade: wrong type int"),
    # the DeepSpeed file
    "no DeepSpeed file": (
        same, [*NEW, "--use_deepspeed", "--deepspeed_config", "/no/d.json"], r"/no/d\.json: no such file; check --dee"),
    "DeepSpeed not JSON": deepspeed("{'a': 1}", message=":1: not valid JSON"),
    "DeepSpeed list": deepspeed("[]", message=": must hold"),
    "DeepSpeed empty": deepspeed({}, message=": zero_optimization: stage must be 1, 2 or 3"),
    "DeepSpeed unknown key": deepspeed(zero() | {"zero_optimisation": {}}, message=": unknown key 'zero_optimisation'"),
    "DeepSpeed optimizer": deepspeed(zero() | {"optimizer": {"type": "Adam"}}, message=": optimizer: is set by the sc"),
    "DeepSpeed stage 7": deepspeed(zero(7), message=": zero_optimization: stage must be 1, 2 or 3"),
    "DeepSpeed stage 0": deepspeed(zero(0), message=": zero_optimization: stage must be 1, 2 or 3"),
    "DeepSpeed stage text": deepspeed(zero("two"), message=": zero_optimization: stage must be 1, 2 or 3"),
    "DeepSpeed block": deepspeed(zero() | {"fp16": True}, message=r": fp16: must be a block"),
    "DeepSpeed product": deepspeed(zero() | {"train_batch_size": 256}, message=": train_batch_size: follows from the"),
    "DeepSpeed micro batch": deepspeed(
        zero() | {"train_micro_batch_size_per_gpu": 16}, message=": train_micro_batch_size_per_gpu: 16, but the run h"),
    "DeepSpeed accumulation": deepspeed(
        zero() | {"gradient_accumulation_steps": 8}, message=": gradient_accumulation_steps: 8, but the run has 1"),
    "DeepSpeed precision": deepspeed(
        zero() | {"fp16": {"enabled": True}}, "--mixed_precision", "no",
        message=r": fp16\.enabled: true, but --mixed_precision is no; write"),
    "DeepSpeed clipping": deepspeed(zero() | {"gradient_clipping": 0.3}, message=": gradient_clipping: 0.3, but the r"),
    "DeepSpeed ZeRO key": deepspeed(zero(overlap_com=True), message=r": zero_optimization\.overlap_com: Extra inputs"),
    "DeepSpeed ZeRO type": deepspeed(zero(overlap_comm="maybe"), message=r": zero_optimization\.overlap_comm: Input s"),
    "DeepSpeed device": deepspeed(
        zero(offload_optimizer={"device": "disk"}), message=r": zero_optimization\.offload_optimizer\.device: Input ."),
    "DeepSpeed null": deepspeed(zero(offload_optimizer="cpu"), message=r": zero_optimization\.offload_optimizer: Inpu"),
    "DeepSpeed fp16 key": deepspeed(zero() | {"fp16": {"enable": True}}, message=r": fp16\.enable: Extra inputs are n"),
    "compile with ZeRO-3": (
        side("ds.json", zero(3)), [*NEW, "--use_deepspeed", "--deepspeed_config", "{tmp}/ds.json", "--compile"],
        "--compile: does not go with ZeRO-3"),
    "DeepSpeed file for DDP": (
        side("ds.json", zero()), [*NEW, "--use_ddp", "--deepspeed_config", "{tmp}/ds.json"], "--deepspeed_config"),
    # weights of another run
    "no weights": (same, PRETRAINED, r"w\.safetensors: no such file; check --pretrained_weights"),
    "weights are text": (side("w.safetensors", "hello, world"), PRETRAINED, r"w\.safetensors: not a safetensors file"),
    "weights empty": (side("w.safetensors", ""), PRETRAINED, r"w\.safetensors: not a safetensors file"),
    "weights a checkpoint": (same, [*NEW, "--pretrained_weights", "{run}/last.pt"], r"last\.pt: not a safetensors fil"),
    "weights of BERT": (
        same, [*NEW, "--pretrained_weights", "{root}/bert_tiny/model.safetensors"], "weights of another model"),
    "weights of another size": (
        weight_file(lambda w: {k: v[..., :1].clone() if v.dim() > 1 else v for k, v in w.items()}), PRETRAINED,
        r"w\.safetensors: weights of another model"),
    "weights and resume": (
        same, [*RESUME, "auto", "--pretrained_weights", "{run}/model.safetensors"], "--pretrained_weights starts a ne"),
    "weights and evaluate": (
        copied, ["--output_dir", "{tmp}/run", "--eval_only", "--pretrained_weights", "{run}/model.safetensors"],
        "--pretrained_weights starts a new run"),
    # the run folder and checkpoints
    "run exists": (same, RUN, r"run: holds a run already; go on with --resume_from auto, or --overwrite it"),
    "folder is a file": (side("taken", ""), ["--output_dir", "{tmp}/taken"], "taken: cannot write here"),
    "folder in a file": (side("taken", ""), ["--output_dir", "{tmp}/taken/run"], "taken/run: cannot write here"),
    "evaluation into a file": (
        side("taken", ""), ["--output_dir", "{tmp}/taken", "--eval_only", "--resume_from", "{run}"], "taken: cannot w"),
    "no checkpoint": (same, [*RESUME, "{tmp}/none.pt"], r"none\.pt: no such checkpoint; check --resume_from"),
    "no checkpoint in folder": (same, [*RESUME, "{tmp}"], "holds no intact checkpoint; check --resume_from"),
    "checkpoint is text": (side("c.pt", "hello"), [*RESUME, "{tmp}/c.pt"], r"c\.pt: not a readable checkpoint"),
    "checkpoint is weights": (same, [*RESUME, "{run}/model.safetensors"], r"model\.safetensors: not a (readable )?che"),
    "flipped byte": (flipped, [*RESUME, "{tmp}/flipped/step_00000001.pt"], r"step_00000001\.pt: damaged"),
    "other task": (checkpoint(lambda c: c.update(format="prs_med/1")), [*RESUME, "{tmp}/changed.pt"], "of prs_med/1,"),
    "other batch": (same, [*RESUME, "{run}/last.pt", "--batch_size", "5"], "effective batch size 4, now 5"),
    "other accumulation": (
        same, [*RESUME, "{run}", "--gradient_accumulation_steps", "2"], "effective batch size 4, now 8; keep the prod"),
    "other seed": (same, [*RESUME, "{run}/last.pt", "--seed", "5"], "a run with seed 0, now 5"),
    "other questions": (same, [*RESUME, "{run}/last.pt", "--max_samples", "20"], "training questions 24, now 20"),
    "other fusion": (same, [*RESUME, "{run}/last.pt", "--fusion_layers", "1"], "--resume_from: checkpoint of another"),
    "nothing to evaluate": (same, [*NEW, "--eval_only"], r"new: holds no best\.pt; check --output_dir"),
    "nothing to evaluate yet": (same, [*NEW, "--eval_only", "--resume_from", "auto"], "no checkpoint to use; give one"),
    # the index
    "index is a file": (side("index", ""), INDEX, "index: cannot write here .*choose another --index_dir"),
    "index in a file": (side("f", ""), [*NEW, "--index_dir", "{tmp}/f/index"], "f/index: cannot write here"),
    "index not writable": (index(no_lock), INDEX, r"cannot write here \(Is a directory\); choose another --index_dir"),
}  # fmt: skip


def check(done, message: str, tmp: Path) -> None:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert "Traceback" not in done.stdout + done.stderr, done.stderr[-3000:]
    assert done.code == 2, done.stderr[-2000:]
    assert [line.startswith("error: ") for line in lines] == [True], done.stderr
    assert re.search(message, lines[0]), lines[0]
    assert "; " in lines[0], lines[0]
    assert len(lines[0]) < 600
    if "not a readable picture" not in message:  # that one is found while training
        assert not any((tmp / "new" / name).exists() for name in MADE)
    assert done.seconds < 20


def prepare(name: str, mimic_cxr_flags: list[str], root: Path, tmp: Path, run: Path) -> tuple[list[str], str]:
    """Break what the case breaks; (flags, message)."""
    if name in DATA:
        change, flags, message = DATA[name]
        copy = tmp / "data"
        for source in (path for path in root.iterdir() if path.name != "index"):
            shutil.copytree(source, copy / source.name, copy_function=os.link)
        change(copy)
        words = [word.replace(str(root), str(copy)) for word in mimic_cxr_flags]
        return [*words, *SMALL, "--output_dir", str(tmp / "new"), *flags], message
    change, flags, message = SETTINGS[name]
    change(tmp, run, root)
    places = {"tmp": tmp, "run": run, "root": root, "cxr": root / "mimic-cxr-jpg"}
    return [*mimic_cxr_flags, *SMALL, *(word.format(**places) for word in flags)], message


def test_there_are_enough():
    assert len(DATA.keys() | SETTINGS.keys()) == len(DATA) + len(SETTINGS) >= 40


@pytest.mark.parametrize("name", [*DATA, *SETTINGS])
def test_bad_input(name, mimic_cxr_flags, chest_root, run, before, tmp_path, zygote):
    words, message = prepare(name, mimic_cxr_flags, chest_root, tmp_path, run)
    done = zygote(MIMIC, *words)
    check(done, message, tmp_path)
    if any(str(run) in word for word in words):
        assert tree(run) == before


TOGETHER = ("label 7", "JSON truncated", "JPG truncated", "encoder weights cut", "DeepSpeed stage 7", "run exists")


@pytest.mark.parametrize("name", TOGETHER)
def test_all_ranks_end_together(name, mimic_cxr_flags, chest_root, run, before, tmp_path, zygote):
    words, message = prepare(name, mimic_cxr_flags, chest_root, tmp_path, run)
    done = zygote(MIMIC, *words, ranks=2)
    check(done, message, tmp_path)
    assert tree(run) == before


def test_an_index_that_can_be_mended_is(mimic_cxr_flags, chest_root, run, tmp_path, zygote):
    """A half-written index.json is made anew; where no pictures can be kept, it goes on without."""
    index(lambda folder: (folder / "index.json").write_text("{}"))(tmp_path, run, chest_root)
    next((tmp_path / "index").iterdir()).joinpath("pictures_64.u8").mkdir()
    shutil.copytree(run, tmp_path / "run")
    words = ["--output_dir", tmp_path / "run", "--eval_only", "--index_dir", tmp_path / "index"]
    done = zygote(MIMIC, *mimic_cxr_flags, *SMALL, *words)
    assert done.code == 0, done.stderr
    assert "building the index" in done.stdout


@pytest.fixture
def disk(tmp_path):
    """mount(size, *options): a file system of its own, which ends with the test."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: str, *options: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", folder]
        if subprocess.run(words, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs needs root")
        return folder

    yield mount
    subprocess.run(["umount", folder], capture_output=True)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("size", "options", "reason", "ranks"),
    [("1m", ["nr_inodes=1"], "No space left on device", 1), ("1m", ["ro"], "Read-only file system", 2)],
    ids=["full", "read-only"],
)
def test_an_evaluation_that_cannot_be_written_is_printed(
    mimic_cxr_flags, run, disk, zygote, size, options, reason, ranks
):
    """A warning for each file and exit code 0: the metrics are what was asked for."""
    out = disk(size, *options)
    words = ["--output_dir", out, "--eval_only", "--resume_from", run / "best.pt", "--save_predictions"]
    done = zygote(MIMIC, *mimic_cxr_flags, *SMALL, *words, ranks=ranks)
    assert done.code == 0, done.stderr
    for name in ("figures/test_answers.png", "figures/test_curves.png", "eval_test.json", "predictions_test.parquet"):
        assert f"warning: {out}/{name}: not written ({reason})\n" in done.stderr
    assert done.stderr.count("\n") == 4, done.stderr
    assert "test, step 1: answers" in done.stdout
    assert "written:" not in done.stdout


UNREADABLE = [
    ("train", "deleted", 1),
    ("train", "truncated", 2),
    ("validate", "truncated", 1),
    ("validate", "deleted", 2),
]


@pytest.mark.soak
@pytest.mark.parametrize(("split", "how", "ranks"), [*UNREADABLE, ("test", "deleted", 2)])
def test_images_that_become_unreadable(mimic_cxr_flags, chest_root, run, tmp_path, zygote, split, how, ranks):
    """After the index was built, in training, validation and --eval_only: one line on all ranks, exit code 2."""
    copy = tmp_path / "data"
    for source in (path for path in chest_root.iterdir() if path.name != "index"):
        shutil.copytree(source, copy / source.name, copy_function=os.link)
    words = [word.replace(str(chest_root), str(copy)) for word in mimic_cxr_flags]
    mci.open_index(copy / "index", copy / "mimic-cxr-jpg", copy / QA)
    with gzip.open(copy / "mimic-cxr-jpg" / "mimic-cxr-2.0.0-split.csv.gz", "rt") as file:
        names = sorted(row["dicom_id"] for row in csv.DictReader(file) if row["split"] == split)
    for name in names:
        path = next(copy.glob(f"mimic-cxr-jpg/files/*/*/*/{name}.jpg"))
        content = path.read_bytes()
        path.unlink()
        if how == "truncated":
            path.write_bytes(content[: len(content) // 2])
    more = ["--eval_only", "--resume_from", run / "best.pt"] if split == "test" else []
    words += [*SMALL, *more, "--cache_gb", "0", "--output_dir", tmp_path / "new"]
    done = zygote(MIMIC, *words, ranks=ranks)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.code, len(errors)) == (2, 1), done.stderr
    assert re.search(r"\.jpg: not a readable picture .*; replace it", errors[0])
    assert "Traceback" not in done.stdout + done.stderr


def test_an_index_that_is_lost_while_training(mimic_cxr_flags, tmp_path, zygote):
    """Before rank 1 of 2 reads its first question: one line on both."""
    lose = [
        "import os, runpy, sys",
        "from tasks.mimic_cxr import index as mci",
        "take = mci.Questions.take",
        "def lose(self, row):",
        "    if os.environ['RANK'] == '1':",
        "        for path in self.folder.glob('part-*-train.arrow'):",
        "            path.rename(path.with_suffix('.gone'))",
        "    return take(self, row)",
        "mci.Questions.take = lose",
        "sys.argv = sys.argv[1:]",
        "runpy.run_path(sys.argv[0], run_name='__main__')",
    ]
    (tmp_path / "lose.py").write_text("\n".join(lose))
    words = [*mimic_cxr_flags, *SMALL, "--index_dir", tmp_path / "index", "--output_dir", tmp_path / "new"]
    done = zygote(tmp_path / "lose.py", MIMIC, *words, ranks=2, PYTHONPATH=str(ROOT))
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.code, len(errors)) == (2, 1), done.stderr
    assert re.search(r"part-\d+-train\.arrow: damaged index file", errors[0])
    assert "Traceback" not in done.stdout + done.stderr


def test_the_weights_a_config_names_do_not_hinder_a_resume(mimic_cxr_flags, run, tmp_path, zygote):
    """--config of a fine-tuning also evaluates, and goes on with, the run that it began."""
    (tmp_path / "c.yaml").write_text("pretrained_weights: no_longer_there.safetensors")
    shutil.copytree(run, tmp_path / "run")
    for more in ("--eval_only", "--resume_from=auto"):
        done = zygote(
            MIMIC, *mimic_cxr_flags, *SMALL, "--output_dir", tmp_path / "run", "--config", tmp_path / "c.yaml", more
        )
        assert done.code == 0, done.stderr
        assert "(step 1)" in done.stdout
