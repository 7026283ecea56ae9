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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, tree

from tasks.mimic_cxr import index as mci

MIMIC = str(ROOT / "train_mimic_cxr.py")
SMALL = ["--batch_size", "4", "--max_steps", "1", "--max_samples", "24", "--save_every", "0"]
NEW = ["--output_dir", "{tmp}/new"]

# files of a data set, by pattern, and the column with the grades
QA = "mimic-ext-cxr-qba"
QUESTIONS = f"{QA}/qa/*/*/*.qa.json"
GRADES = f"{QA}/metadata/question_metadata.parquet"
RATING = "question.quality.rating"

# what a run leaves
MADE = ("args.yaml", "metrics.jsonl", "last.pt", "best.pt", "manifest.sha256", "eval_test.json", "logs", "figures")


class Case(NamedTuple):
    """What is broken, the message that it leads to, and flags of the run, in which {tmp} and so on are places."""

    change: Callable
    message: str
    flags: str = ""


@pytest.fixture(scope="module")
def run_mimic(zygote):
    """run_mimic(flags, ranks=...): what the script with these flags ends with."""

    def run_script(flags: list, **options) -> SimpleNamespace:
        return zygote(MIMIC, *flags, **options)

    return run_script


@pytest.fixture(scope="module")
def chest_root(mimic_cxr_flags) -> Path:
    return Path(mimic_cxr_flags[mimic_cxr_flags.index("--mimic_cxr_path") + 1]).parent


@pytest.fixture(scope="module")
def run(mimic_cxr_flags, run_mimic, tmp_path_factory) -> Path:
    """A finished run whose files no bad input may touch."""
    out = tmp_path_factory.mktemp("trained") / "run"
    done = run_mimic([*mimic_cxr_flags, *SMALL, "--output_dir", out])
    assert done.code == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def before(run) -> dict[str, str]:
    return tree(run)


# --- ways to break a data set: each gets a copy made of hard links, so it writes new files ----------------------------


def put(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def edit(pattern: str, change: bytes | Callable, every: bool = False):
    """bytes, or a function of the old ones: the new content of the first file (or every file) that matches."""

    def apply(root: Path) -> None:
        paths = sorted(root.glob(pattern))
        for path in paths if every else paths[:1]:
            put(path, changed(path.read_bytes(), change))

    return apply


def changed(content: bytes, change: bytes | Callable) -> bytes:
    return change if isinstance(change, bytes) else change(content)


def first(count: int):
    """bytes -> the first of them."""
    return lambda content: content[:count]


def halve(content: bytes) -> bytes:
    return content[: len(content) // 2]


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


def column(name: str, column: str, value: str):
    """Another value in the column of every row; {} stands for the old one."""

    def change(rows: list) -> None:
        place = rows[0].index(column)
        for row in rows[1:]:
            row[place] = value.format(row[place])

    return table(name, change)


def packed(name: str, content: bytes):
    return edit(f"mimic-cxr-jpg/*-{name}.csv.gz", content)


def unpacked(root: Path) -> None:
    for path in root.glob("mimic-cxr-jpg/*.csv.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()


def header(name: str, old: str, new: str):
    """Another name of a column."""

    def change(rows: list) -> None:
        rows[0] = [new if word == old else word for word in rows[0]]

    return table(name, change)


def header_alone(rows: list) -> None:
    del rows[1:]


def other_split(rows: list) -> None:
    """The last row of the first patient who has several is put into another split."""
    patients = [row[2] for row in rows]
    several = next(patient for patient in patients[1:] if patients.count(patient) > 1)
    last = [row for row in rows if row[2] == several][-1]
    last[3] = "test" if last[3] == "train" else "train"


def grades(change):
    """pa.Table -> pa.Table, on the table with the ratings."""

    def apply(root: Path) -> None:
        changed = change(pq.read_table(root / GRADES))
        (root / GRADES).unlink()
        pq.write_table(changed, root / GRADES)

    return apply


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, values)


def grades_with(name: str, value: str | int | None):
    """The same value in a column of every row of the table with the ratings."""
    kind = pa.int64() if isinstance(value, int) else pa.string()
    return grades(lambda table: with_column(table, name, pa.array([value] * len(table), kind)))


def garbage(content: bytes) -> bytes:
    return content[:60] + b"\xff" * 400 + content[460:]


def questions(change, every: bool = True):
    """Change the contents of qa.json in place, or return others, in every study."""

    def apply(content: bytes) -> bytes:
        old = json.loads(content)
        new = change(old)
        return json.dumps(old if new is None else new).encode()

    return edit(QUESTIONS, apply, every)


def without_questions(content: dict) -> None:
    del content["questions"]


def each_question(change):
    def apply(content: dict) -> None:
        for question in content["questions"]:
            change(question)

    return questions(apply)


def question_with(**values):
    """Other values in every question."""
    return each_question(lambda question: question.update(values))


def question_without(key: str):
    return each_question(lambda question: question.pop(key))


def folder_for_json(root: Path) -> None:
    for path in root.glob(QUESTIONS):
        path.unlink()
        path.mkdir()


def zipped(change: bytes | Callable = bytes, member: str = ""):
    """qa.zip in place of the folder qa/; change: as of edit. member: the name of one more file in it."""

    def apply(root: Path) -> None:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            add_questions(file, root / QA)
            if member:
                file.writestr(member, "{}")
        replace_folder(root / QA, changed(archive.getvalue(), change))

    return apply


def add_questions(file: zipfile.ZipFile, folder: Path) -> None:
    for path in sorted(folder.glob("qa/*/*/*.qa.json")):
        file.write(path, path.relative_to(folder))


def replace_folder(folder: Path, archive: bytes) -> None:
    """qa.zip of these bytes in place of the folder qa/."""
    shutil.rmtree(folder / "qa")
    put(folder / "qa.zip", archive)


def in_capitals(archive: bytes) -> bytes:
    return archive.replace(b".qa.json", b".qa.JSON")


def in_members(offset: int, new: bytes, central: int | None = None):
    """Overwrite bytes at `offset` into every member (its 30-byte header, its name, its data) and into its entry in the
    directory at the end."""

    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        for found in re.finditer(b"PK\x03\x04", content):
            start = found.start()
            begin = start + offset
            # into the data, behind the name
            if offset >= 30:
                begin += int.from_bytes(content[start + 26 : start + 28], "little")
            changed[begin : begin + len(new)] = new

        # the directory
        if central is not None:
            for found in re.finditer(b"PK\x01\x02", content):
                begin = found.start() + central
                changed[begin : begin + len(new)] = new
        return bytes(changed)

    return change


def crc(root: Path) -> None:
    """One letter of each question file changes inside an archive that stores them as they are."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        add_questions(file, root / QA)
    replace_folder(root / QA, archive.getvalue().replace(b'"question_type"', b'"Question_type"'))


def pictures(change: bytes | Callable):
    return edit("mimic-cxr-jpg/files/*/*/*/*.jpg", change, every=True)


def pictures_of(split: str, change: Callable):
    """Only the images of a split, all but the first of it."""

    def apply(root: Path) -> None:
        for name in names_in(root, split)[1:]:
            edit(f"mimic-cxr-jpg/files/*/*/*/{name}.jpg", change)(root)

    return apply


def names_in(root: Path, split: str) -> list[str]:
    """The dicom_id of each image of a split."""
    path = root / "mimic-cxr-jpg" / "mimic-cxr-2.0.0-split.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    return sorted(row["dicom_id"] for row in rows)


def no_laterals(rows: list) -> None:
    view = rows[0].index("ViewPosition")
    meaning = rows[0].index("ViewCodeSequence_CodeMeaning")
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
        tensors = {key: value.contiguous() for key, value in changed.items()}
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def prefixed(prefix: str):
    """{name: tensor} -> the same under other names."""
    return lambda weights: {prefix + name: value for name, value in weights.items()}


def smaller(encoder: str, setting: str, size: int, weight: str, axis: int = 0):
    """An encoder of which a size is smaller, in its config and in the weight that ends with this name."""

    def cut(tensors: dict) -> dict:
        for name, value in tensors.items():
            if name.endswith(weight):
                tensors[name] = value.narrow(axis, 0, size)
        return tensors

    def configure(content: bytes) -> bytes:
        return json.dumps(json.loads(content) | {setting: size}).encode()

    return both(edit(f"{encoder}/config.json", configure), weights(encoder, cut))


# a BERT that knows 8 positions, and one whose tokenizer knows more words than it
few_positions = smaller("bert_tiny", "max_position_embeddings", 8, "embeddings.position_embeddings.weight")
few_words = smaller("bert_tiny", "vocab_size", 12, "embeddings.word_embeddings.weight")

# how a JPEG begins
CUT = b"\xff\xd8\xff\xe0"
DATA = {
    # the tables
    "table missing": Case(remove("mimic-cxr-jpg/*metadata*"), r"metadata\.csv\.gz: does not exist; check --mimic_cxr"),
    "table unpacked": Case(unpacked, r"metadata\.csv\.gz: does not exist; pack mimic-cxr-2\.0\.0-metadata\.csv again"),
    # headers
    "no ViewPosition": Case(header("metadata", "ViewPosition", "View"), r"metadata\.csv\.gz:1: no column 'ViewPositio"),
    "no split": Case(header("split", "split", "part"), r"split\.csv\.gz:1: no column 'split'"),
    "no Pneumonia": Case(header("chexpert", "Pneumonia", "pneumonia"), r"chexpert\.csv\.gz:1: no column 'Pneumonia'"),
    "column twice": Case(header("split", "study_id", "subject_id"), r"split\.csv\.gz:1: column 'subject_id' is there"),
    # values of a row
    "study number": Case(cell("metadata", 3, "study_id", "s12"), r"metadata\.csv\.gz:3: study_id 's12' is not a numbe"),
    "blank patient": Case(cell("split", 4, "subject_id", ""), r"split\.csv\.gz:4: subject_id '' is not a number"),
    "long number": Case(cell("chexpert", 2, "study_id", "9" * 20), r"chexpert\.csv\.gz:2: study_id '9+' is not a numb"),
    "label 7": Case(cell("chexpert", 5, "Edema", "7.0"), r"chexpert\.csv\.gz:5: Edema '7\.0' is not 1\.0, 0\.0, -1\.0"),
    "label text": Case(cell("chexpert", 2, "Fracture", "yes"), r"chexpert\.csv\.gz:2: Fracture 'yes' is not 1\.0"),
    "unknown split": Case(cell("split", 6, "split", "dev"), r"split\.csv\.gz:6: split 'dev' is not one of train, vali"),
    "first row's split": Case(cell("split", 2, "split", "dev"), r"split\.csv\.gz:2: split 'dev' is not one of"),
    "patient in two splits": Case(table("split", other_split), r"split\.csv\.gz:\d+: patient \d+ is in two splits"),
    # files that are no tables
    "gz truncated": Case(edit("mimic-cxr-jpg/*chexpert*", halve), r"chexpert.*not a readable CSV"),
    "gz is HTML": Case(packed("split", b"<html>log in"), r"split\.csv\.gz: not a readable CSV .*download it again"),
    "gz empty": Case(packed("metadata", b""), r"metadata\.csv\.gz: not a readable CSV"),
    "table of nothing": Case(packed("metadata", gzip.compress(b"")), r"metadata\.csv\.gz: not a readable CSV"),
    "table of a header": Case(table("metadata", header_alone), "no studies"),
    "not UTF-8": Case(packed("split", gzip.compress(b"dicom_id,subject_id,split\n\xff\xfe,1,train\n")), "not a readab"),
    # rows that leave nothing to do, or lead elsewhere
    "row too long": Case(table("split", lambda rows: rows[2].append("x")), r"split\.csv\.gz: not a readable CSV"),
    "escaping picture": Case(column("metadata", "dicom_id", "../{}"), r"metadata\.csv\.gz:2: dicom_id '\."),
    "nothing to train on": Case(column("split", "split", "test"), "no questions in split 'train'"),
    "nothing to test on": Case(column("split", "split", "train"), "no questions in split 'test", "--eval_only"),
    "no studies in split": Case(table("split", header_alone), "no question is left"),
    "view without pictures": Case(table("metadata", no_laterals), r"no question is left.*or --view", "--view lateral"),
    # the ratings
    "parquet missing": Case(remove(GRADES), r"qba: holds no metadata/question_metadata\.parquet, which has the grades"),
    "parquet is text": Case(edit(GRADES, b"hello"), r"parquet: not a readable table of questions"),
    "parquet empty": Case(edit(GRADES, b""), r"parquet: not a readable table of questions"),
    "parquet truncated": Case(edit(GRADES, halve), r"parquet: not a readable table of questions"),
    "parquet overwritten": Case(edit(GRADES, garbage), r"parquet: not a readable table of questions"),
    "parquet without rating": Case(
        grades(lambda table: table.drop_columns(RATING)), r"no column 'question\.quality\.rating'; it"
    ),
    "parquet study names": Case(grades_with("study_id", "x"), "parquet: not a readable table"),
    "parquet study numbers": Case(grades_with("study_id", 5), "parquet: not a readable table"),
    "nothing of the grade": Case(
        grades_with(RATING, None),
        r"no question is left \(\d+ below the grade, or unrated.*choose another --quality_grade",
    ),
    # the questions
    "JSON truncated": Case(edit(QUESTIONS, first(-20)), r"s\d+\.qa\.json: not a question file", "--quality_grade all"),
    "JSON empty": Case(edit(QUESTIONS, b"", True), r"s\d+\.qa\.json: not a question file"),
    "JSON not UTF-8": Case(edit(QUESTIONS, b'{"\xff"', True), r"json: not a question file"),
    "JSON nested": Case(edit(QUESTIONS, b"[" * 10**5, True), r"json: not a question file"),
    "JSON a list": Case(questions(lambda content: [content]), r"qa/p\d+/p\d+/s\d+\.qa\.json: not a question file"),
    # questions that lack something
    "no questions": Case(questions(without_questions), r"json: not a question file \(no key 'ques"),
    "questions a dict": Case(questions(lambda content: content | {"questions": {"a": 1}}), "`questions` is not a list"),
    "question a string": Case(
        questions(lambda content: content | {"questions": ["why?"]}), r"json: question not in the release's"
    ),
    "no question_id": Case(question_without("question_id"), r"\(no key 'question_id'\)"),
    "no answers": Case(question_without("answers"), r"/s\d+\.qa\.json: question not .* \(no key 'answer"),
    # in its answers
    "no answer_type": Case(
        each_question(lambda question: question["answers"][0].pop("answer_type")), r"\(no key 'answer_type'\)"
    ),
    "answers null": Case(question_with(answers=None), "question not in the release's format"),
    "type null": Case(question_with(question_type=None), "question not in the release's format"),
    "modifiers": Case(
        each_question(lambda question: question["answers"][0].update(modifiers=5)),
        "question not in the release's",
        "--quality_grade all",
    ),
    # or hold something else
    "text null": Case(question_with(question=None), r"s\d+\.qa\.json: question not in the release"),
    "text empty": Case(question_with(question=" "), r"s\d+\.qa\.json: question not in the release"),
    "text a number": Case(question_with(question=5), r"s\d+\.qa\.json: question not in the releas"),
    "id a number": Case(
        question_with(question_id=5), r"s\d+\.qa\.json: question not in the rel", "--quality_grade all"
    ),
    "folder for JSON": Case(folder_for_json, r"s\d+\.qa\.json: not a question file"),
    "question files missing": Case(remove(QUESTIONS), r"no question is left \(\d+ study without a ques"),
    # files that are not there
    "neither folder nor zip": Case(remove(f"{QA}/*"), r"qba: holds neither qa/ nor qa\.zip; check --mimic_qa_path"),
    "types without a head": Case(question_with(question_type="Z99_odd"), r"Z99_odd: question type"),
    # the archive
    "zip is text": Case(zipped(b"hello"), r"qa\.zip: not a readable zip file"),
    "zip cut": Case(zipped(first(-3000)), r"qa\.zip: not a readable zip file"),
    "zip escapes": Case(zipped(member="../../etc/s1.qa.json"), r"qa\.zip: member '\.\./\.\./etc.*points outside"),
    "zip escapes backwards": Case(zipped(member="qa\\..\\..\\s1.qa.json"), r"qa\.zip: member .*points outside"),
    "zip absolute": Case(zipped(member="/etc/s1.qa.json"), r"qa\.zip: member '/etc.*points outside the archive"),
    "zip sum": Case(crc, r"qa\.zip:qa/p\d+/.*json: not a question file \(Bad CRC-32"),
    # members that cannot be read
    "zip data": Case(zipped(in_members(30, b"\xff" * 40)), r"qa\.zip:qa/p\d+/.*json: not a question file"),
    "zip encrypted": Case(zipped(in_members(6, b"\x01", 8)), r"qa\.zip:qa/p\d+/.*json: not a question file .*encrypte"),
    "zip method": Case(zipped(in_members(8, b"\x63", 10)), r"qa\.zip:qa/p\d+/.*json: not a question file"),
    "zip without the files": Case(zipped(in_capitals), "without a question file"),
    "zip JSON": Case(both(edit(QUESTIONS, first(99), True), zipped()), r"qa\.zip:qa/.*not a que"),
    "zip question": Case(both(question_without("answers"), zipped()), r"qa\.zip:\S*s\d+\.qa\.json: question not in"),
    # the pictures
    "JPG is HTML": Case(pictures(b"<html>log in"), r"files/p\d+/p\d+/s\d+/\S+\.jpg: not a JPEG file"),
    "JPG is PNG": Case(pictures(b"\x89PNG\r\n"), r"\.jpg: not a JPEG file; download it again"),
    "JPG empty": Case(pictures(b""), r"\.jpg: not a JPEG file"),
    "JPG missing": Case(remove("mimic-cxr-jpg/files/p1[0-4]"), r"\d+ picture files not found.*missing\.txt.*--max_"),
    "too many missing": Case(remove("mimic-cxr-jpg/files/p1[0-4]"), r"picture files not found", "--max_missing 1"),
    "no files": Case(
        remove("mimic-cxr-jpg/files"), r"cxr-jpg: no question is left.*lack their pict", "--max_missing 9999"
    ),
    # images that cannot be decoded
    "JPG truncated": Case(pictures(halve), r"\.jpg: not a readable picture .*truncated"),
    "JPG a header": Case(pictures(CUT), r"\.jpg: not a readable picture \(of no known format, or cut short"),
    "JPG truncated in val": Case(
        pictures_of("validate", first(300)), r"\.jpg: not a readable picture", "--max_samples 0"
    ),
    # the encoders
    "no image encoder": Case(remove("convnext_tiny"), r"convnext_tiny: cannot be loaded .*--image_encoder"),
    "no text encoder": Case(remove("bert_tiny"), r"bert_tiny: cannot be loaded \(no such folder\).*--text_encoder"),
    "encoder config": Case(edit("convnext_tiny/config.json", first(40)), r"convnext_tiny: cannot be loaded"),
    "encoder weights cut": Case(edit("bert_tiny/model.safetensors", first(9000)), r"bert_tiny: cannot be loade"),
    "encoder weights missing": Case(remove("bert_tiny/model.safetensors"), r"bert_tiny: cannot be loaded"),
    # weights, words and sizes of another
    "encoder weights of another": Case(weights("bert_tiny", prefixed("decoder.")), r"bert_tiny: cannot be loaded"),
    "image weights of another": Case(weights("convnext_tiny", prefixed("a.")), r"convnext_tiny: cannot be loade"),
    "no tokenizer": Case(remove("bert_tiny/tokenizer*", "bert_tiny/vocab*"), r"bert_tiny: no tokenizer \(it knows no"),
    "tokenizer of another": Case(few_words, r"bert_tiny: no tokenizer \(it has \d+ words and the encoder 12\)"),
    "few positions": Case(few_positions, r"--max_question_length 9: \S+bert_tiny takes 8", "--max_question_length 9"),
}


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
    """One bit of a checkpoint has changed."""
    folder = tmp / "flipped"
    folder.mkdir()
    content = bytearray((run / "step_00000001.pt").read_bytes())
    content[len(content) // 3] ^= 4
    (folder / "step_00000001.pt").write_bytes(content)
    shutil.copy(run / "manifest.sha256", folder)


def weight_file(change):
    """<tmp>/w.safetensors: the weights of the run, changed."""

    def write(tmp: Path, run: Path, _root: Path) -> None:
        from safetensors.torch import load_file, save_file

        changed = change(load_file(run / "model.safetensors"))
        save_file(changed, tmp / "w.safetensors")

    return write


def narrowed(tensors: dict) -> dict:
    """Matrices of one column."""
    return {name: value[..., :1].clone() if value.dim() > 1 else value for name, value in tensors.items()}


def index(change):
    """<tmp>/index: the index of the run, change(its folder)."""

    def write(tmp: Path, _run: Path, root: Path) -> None:
        source = next(root.glob("index/*/index.json")).parent
        copy = tmp / "index" / source.name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.u8"))
        change(copy)

    return write


def no_lock(folder: Path) -> None:
    """A folder that has to be built but whose lock cannot be opened."""
    (folder / "index.json").unlink()
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()


def deepspeed(config: dict | str, message: str, flags: str = "") -> Case:
    """A case of a DeepSpeed file."""
    flags = f"--use_deepspeed --deepspeed_config {{tmp}}/ds.json {flags}"
    return Case(side("ds.json", config), rf"ds\.json{message}", flags)


def configured(content: str, message: str, name: str = "c.yaml") -> Case:
    """A case of a --config file."""
    return Case(side(name, content), rf"{re.escape(name)}{message}", f"--config {{tmp}}/{name}")


def zero(stage=2, **more) -> dict:
    return {"zero_optimization": {"stage": stage, **more}}


SETTINGS = {
    # the command line
    "unknown flag": Case(same, "unknown argument '--batchsize', nearest is --batch_size", "--batchsize 4"),
    "abbreviated flag": Case(same, "unknown argument '--mimic_cxr', nearest is --mimic_cxr_pa", "--mimic_cxr x"),
    "word without a flag": Case(same, "unknown argument 'train'; see --help", "train"),
    "flag without a value": Case(same, "argument --epochs: expected one argument", "--epochs"),
    # numbers
    "batch size 0": Case(same, "--batch_size: must be a whole number of at least 1, not '0'", "--batch_size 0"),
    "rate nan": Case(same, "--learning_rate: must be a number above 0, not 'nan'", "--learning_rate nan"),
    "rate 0": Case(same, "--learning_rate: must be a number above 0", "--learning_rate 0"),
    "clip inf": Case(same, "--grad_clip: must be a number at least 0", "--grad_clip inf"),
    "image size 1": Case(same, "--image_size: must be a whole number of at least 32, not '1'", "--image_size 1"),
    "dropout 1": Case(same, "--dropout: must be a number at least 0 and at most 0.99", "--dropout 1"),
    "epochs 1.5": Case(same, "--epochs: must be a whole number of at least 1", "--epochs 1.5"),
    "workers -1": Case(same, "--num_workers: must be a whole number of at least 0", "--num_workers -1"),
    "seed x": Case(same, "--seed: must be a whole number from .*, not 'x'", "--seed x"),
    # choices
    "grade E": Case(same, r"--quality_grade: invalid choice: 'E' \(choose from", "--quality_grade E"),
    "view": Case(same, "--view: invalid choice: 'sagittal'", "--view sagittal"),
    "uncertain": Case(same, "--chexpert_uncertain: invalid choice: 'zeros'", "--chexpert_uncertain zeros"),
    "fp16 on CPU": Case(same, "--mixed_precision fp16: needs a GPU; use no or bf16", "--mixed_precision fp16"),
    # flags that exclude each other
    "two engines": Case(same, "--use_deepspeed and --use_ddp exclude each other", "--use_deepspeed --use_ddp"),
    "overwrite and resume": Case(
        same, "--overwrite starts afresh", "--output_dir {run} --overwrite --resume_from auto"
    ),
    "overwrite and evaluate": Case(
        same, "--overwrite starts afresh and excludes", "--output_dir {run} --overwrite --eval_only"
    ),
    # folders and encoders
    "no pictures folder": Case(same, "/no/w: no such folder; check --mimic_cxr_path", "--mimic_cxr_path /no/w"),
    "no questions folder": Case(same, "/no/w: no such folder; check --mimic_qa_path", "--mimic_qa_path /no/w"),
    "folders swapped": Case(same, r"mimic-cxr-jpg: holds neither qa/ nor qa\.zip", "--mimic_qa_path {cxr}"),
    "folder empty": Case(same, r"metadata\.csv\.gz: does not exist", "--mimic_cxr_path {tmp}"),
    "hub name": Case(same, "no/such: cannot be loaded .*--image_encoder", "--image_encoder no/such"),
    "text as image encoder": Case(same, "bert_tiny: a 'bert' checkpoint is", "--image_encoder {root}/bert_tiny"),
    "image as text encoder": Case(same, "convnext_tiny: a 'convnext' ch", "--text_encoder {root}/convnext_tiny"),
    # the config file
    "config missing": Case(same, r"no\.yaml: cannot read the config .*check --config", "--config {tmp}/no.yaml"),
    "config a folder": Case(same, r"cannot read the config \(Is a directory\)", "--config {tmp}"),
    "config not YAML": configured("a: [1\nb: 2", ":2: not valid YAML; correct the file"),
    # what it holds
    "config with an object": configured("seed: !!python/object/apply:os.getcwd []", ":1: not valid YAML"),
    "config not JSON": configured("{\n1}", r":2: not valid JSON", name="c.json"),
    "config a list": configured("- a", ": must hold `flag: value` lines, not a list"),
    "config unknown key": configured("batch_sise: 2", ": unknown key 'batch_sise'; did you mean 'batch_size'"),
    "config nested": configured("train:\n  epochs: 2", ": unknown key 'train'"),
    # its sections
    "config unknown key in a section": configured(
        "training:\n  batch_size_per_gp: 2", ": unknown key 'batch_size_per_gp' in training; did you mean 'bat"
    ),
    "config section a number": configured("deepspeed: 2", ": deepspeed: must be a section of keys, not 2"),
    "config key of another section": configured("training:\n  stage: 2", ": unknown key 'stage' in training"),
    "config a key twice": configured("epochs: 2\ntraining:\n  epochs: 3", ": epochs is given twice; remove one"),
    "config two precisions": configured(
        "mixed_precision: bf16\ntraining:\n  fp16: true", ": holds both fp16 and mixed_precision; remove one"
    ),
    "config fp16 a number": configured("training:\n  fp16: 1", ": fp16: must be true or false, not 1"),
    # its values
    "config stage 7": configured("deepspeed:\n  stage: 7", ": zero_stage: 7 is not one of 0, 2, 3"),
    "config workers": configured("training:\n  dataloader_num_workers: -1", ": dataloader_num_workers: must be a who"),
    "config a negated key": configured("no_auto_optimize: true", ": unknown key 'no_auto_optimize'; did you mean 'aut"),
    "config wrong type": configured("batch_size: [2]", r": batch_size: must be a single value, not \[2\]"),
    "config nothing": configured("output_dir:", ": output_dir: wrong type NoneType"),
    "config bool": configured("use_ddp: 3", ": use_ddp: must be true or false, not 3"),
    "config negated bool": configured("auto_optimize: 'no'", ": auto_optimize: must be true or false, not 'no'"),
    "config bad choice": configured("quality_grade: A+++", r": quality_grade: 'A\+\+\+' is not one of A\+\+, A\+, A"),
    "config out of range": configured("epochs: 0", ": epochs: must be a whole number of at least 1, not '0'"),
    "config two engines": Case(
        side("c.yaml", "use_deepspeed: true"), "exclude each other", "--config {tmp}/c.yaml --use_ddp"
    ),
    "config grade": configured("quality_grade: 4", ": quality_grade: wrong type int"),
    # the DeepSpeed file
    "no DeepSpeed file": Case(
        same, r"/no/d\.json: no such file; check --dee", "--use_deepspeed --deepspeed_config /no/d.json"
    ),
    "DeepSpeed not JSON": deepspeed("{'a': 1}", ":1: not valid JSON"),
    "DeepSpeed list": deepspeed("[]", ": must hold"),
    "DeepSpeed empty": deepspeed({}, ": zero_optimization: stage must be 1, 2 or 3"),
    # its keys
    "DeepSpeed unknown key": deepspeed(zero() | {"zero_optimisation": {}}, ": unknown key 'zero_optimisation'"),
    "DeepSpeed optimizer": deepspeed(zero() | {"optimizer": {"type": "Adam"}}, ": optimizer: is set by the sc"),
    "DeepSpeed stage 7": deepspeed(zero(7), ": zero_optimization: stage must be 1, 2 or 3"),
    "DeepSpeed stage 0": deepspeed(zero(0), ": zero_optimization: stage must be 1, 2 or 3"),
    "DeepSpeed stage text": deepspeed(zero("two"), ": zero_optimization: stage must be 1, 2 or 3"),
    "DeepSpeed block": deepspeed(zero() | {"fp16": True}, r": fp16: must be a block"),
    # what must go with the flags
    "DeepSpeed product": deepspeed(zero() | {"train_batch_size": 256}, ": train_batch_size: follows from the"),
    "DeepSpeed micro batch": deepspeed(
        zero() | {"train_micro_batch_size_per_gpu": 16}, ": train_micro_batch_size_per_gpu: 16, but the run h"
    ),
    "DeepSpeed accumulation": deepspeed(
        zero() | {"gradient_accumulation_steps": 8}, ": gradient_accumulation_steps: 8, but the run has 1"
    ),
    "DeepSpeed precision": deepspeed(
        zero() | {"fp16": {"enabled": True}},
        r": fp16\.enabled: true, but --mixed_precision is no; write",
        "--mixed_precision no",
    ),
    "DeepSpeed clipping": deepspeed(zero() | {"gradient_clipping": 0.3}, ": gradient_clipping: 0.3, but the r"),
    # DeepSpeed's own check
    "DeepSpeed ZeRO key": deepspeed(zero(overlap_com=True), r": zero_optimization\.overlap_com: Extra inputs"),
    "DeepSpeed ZeRO type": deepspeed(zero(overlap_comm="maybe"), r": zero_optimization\.overlap_comm: Input s"),
    "DeepSpeed device": deepspeed(
        zero(offload_optimizer={"device": "disk"}), r": zero_optimization\.offload_optimizer\.device: Input ."
    ),
    "DeepSpeed null": deepspeed(zero(offload_optimizer="cpu"), r": zero_optimization\.offload_optimizer: Inpu"),
    "DeepSpeed fp16 key": deepspeed(zero() | {"fp16": {"enable": True}}, r": fp16\.enable: Extra inputs are n"),
    # flags that it does not go with
    "compile with ZeRO-3": Case(
        side("ds.json", zero(3)),
        "--compile: does not go with ZeRO-3",
        "--use_deepspeed --deepspeed_config {tmp}/ds.json --compile",
    ),
    "DeepSpeed file for DDP": Case(
        side("ds.json", zero()), "--deepspeed_config", "--use_ddp --deepspeed_config {tmp}/ds.json"
    ),
    # weights of another run
    "no weights": Case(
        same, r"w\.safetensors: no such file; check --pretrained_weights", "--pretrained_weights {tmp}/w.safetensors"
    ),
    "weights are text": Case(
        side("w.safetensors", "hello, world"),
        r"w\.safetensors: not a safetensors file",
        "--pretrained_weights {tmp}/w.safetensors",
    ),
    "weights empty": Case(
        side("w.safetensors", ""), r"w\.safetensors: not a safetensors file", "--pretrained_weights {tmp}/w.safetensors"
    ),
    "weights a checkpoint": Case(same, r"last\.pt: not a safetensors fil", "--pretrained_weights {run}/last.pt"),
    # weights that do not fit
    "weights of BERT": Case(
        same, "weights of another model", "--pretrained_weights {root}/bert_tiny/model.safetensors"
    ),
    "weights of another size": Case(
        weight_file(narrowed), r"w\.safetensors: weights of another model", "--pretrained_weights {tmp}/w.safetensors"
    ),
    "weights and resume": Case(
        same, "--pretrained_weights starts a ne", "--resume_from auto --pretrained_weights {run}/model.safetensors"
    ),
    "weights and evaluate": Case(
        copied,
        "--pretrained_weights starts a new run",
        "--output_dir {tmp}/run --eval_only --pretrained_weights {run}/model.safetensors",
    ),
    # the run folder and checkpoints
    "run exists": Case(
        same, r"run: holds a run already; go on with --resume_from auto, or --overwrite it", "--output_dir {run}"
    ),
    "folder is a file": Case(side("taken", ""), "taken: cannot write here", "--output_dir {tmp}/taken"),
    "folder in a file": Case(side("taken", ""), "taken/run: cannot write here", "--output_dir {tmp}/taken/run"),
    "evaluation into a file": Case(
        side("taken", ""), "taken: cannot w", "--output_dir {tmp}/taken --eval_only --resume_from {run}"
    ),
    # checkpoints that are not there, or damaged
    "no checkpoint": Case(same, r"none\.pt: no such checkpoint; check --resume_from", "--resume_from {tmp}/none.pt"),
    "no checkpoint in folder": Case(same, "holds no intact checkpoint; check --resume_from", "--resume_from {tmp}"),
    "checkpoint is text": Case(side("c.pt", "hello"), r"c\.pt: not a readable checkpoint", "--resume_from {tmp}/c.pt"),
    "checkpoint is weights": Case(
        same, r"model\.safetensors: not a (readable )?che", "--resume_from {run}/model.safetensors"
    ),
    "flipped byte": Case(flipped, r"step_00000001\.pt: damaged", "--resume_from {tmp}/flipped/step_00000001.pt"),
    # of another run
    "other task": Case(
        checkpoint(lambda contents: contents.update(format="prs_med/1")),
        "of prs_med/1,",
        "--resume_from {tmp}/changed.pt",
    ),
    "other batch": Case(same, "effective batch size 4, now 5", "--resume_from {run}/last.pt --batch_size 5"),
    "other accumulation": Case(
        same, "effective batch size 4, now 8; keep the prod", "--resume_from {run} --gradient_accumulation_steps 2"
    ),
    "other seed": Case(same, "a run with seed 0, now 5", "--resume_from {run}/last.pt --seed 5"),
    "other questions": Case(same, "training questions 24, now 20", "--resume_from {run}/last.pt --max_samples 20"),
    "other fusion": Case(same, "--resume_from: checkpoint of another", "--resume_from {run}/last.pt --fusion_layers 1"),
    "nothing to evaluate": Case(same, r"new: holds no best\.pt; check --output_dir", "--eval_only"),
    "nothing to evaluate yet": Case(same, "no checkpoint to use; give one", "--eval_only --resume_from auto"),
    # the index
    "index is a file": Case(
        side("index", ""), "index: cannot write here .*choose another --index_dir", "--index_dir {tmp}/index"
    ),
    "index in a file": Case(side("f", ""), "f/index: cannot write here", "--index_dir {tmp}/f/index"),
    "index not writable": Case(
        index(no_lock), r"cannot write here \(Is a directory\); choose another --index_dir", "--index_dir {tmp}/index"
    ),
}


def check(done, message: str, tmp: Path) -> None:
    assert "Traceback" not in done.stdout + done.stderr, done.stderr[-3000:]
    assert done.code == 2, done.stderr[-2000:]
    assert done.seconds < 20

    # one line
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert [line.startswith("error: ") for line in lines] == [True], done.stderr
    line = lines[0]
    assert re.search(message, line), line
    assert "; " in line, line
    assert len(line) < 600

    # an image that cannot be decoded is found while training
    if "not a readable picture" not in message:
        assert not any((tmp / "new" / name).exists() for name in MADE)


def copy_data(root: Path, copy: Path) -> None:
    """A data set made of hard links, without its index."""
    for source in root.iterdir():
        if source.name != "index":
            shutil.copytree(source, copy / source.name, copy_function=os.link)


def prepare(name: str, mimic_cxr_flags: list[str], root: Path, tmp: Path, run: Path) -> tuple[list[str], str]:
    """Break what the case breaks; (flags, message)."""
    flags = mimic_cxr_flags
    if name in DATA:
        case = DATA[name]
        copy = tmp / "data"
        copy_data(root, copy)
        case.change(copy)
        flags = [word.replace(str(root), str(copy)) for word in flags]
    else:
        case = SETTINGS[name]
        case.change(tmp, run, root)
    places = {"tmp": tmp, "run": run, "root": root, "cxr": root / "mimic-cxr-jpg"}
    more = [word.format(**places) for word in (*NEW, *case.flags.split())]
    return [*flags, *SMALL, *more], case.message


def test_there_are_enough():
    assert len(DATA.keys() | SETTINGS.keys()) == len(DATA) + len(SETTINGS) >= 40


@pytest.mark.parametrize("name", [*DATA, *SETTINGS])
def test_bad_input(name, mimic_cxr_flags, chest_root, run, before, tmp_path, run_mimic):
    flags, message = prepare(name, mimic_cxr_flags, chest_root, tmp_path, run)
    check(run_mimic(flags), message, tmp_path)
    if any(str(run) in word for word in flags):
        assert tree(run) == before


TOGETHER = ("label 7", "JSON truncated", "JPG truncated", "encoder weights cut", "DeepSpeed stage 7", "run exists")


@pytest.mark.parametrize("name", TOGETHER)
def test_all_ranks_end_together(name, mimic_cxr_flags, chest_root, run, before, tmp_path, run_mimic):
    flags, message = prepare(name, mimic_cxr_flags, chest_root, tmp_path, run)
    check(run_mimic(flags, ranks=2), message, tmp_path)
    assert tree(run) == before


def test_an_index_that_can_be_mended_is(mimic_cxr_flags, chest_root, run, tmp_path, run_mimic):
    """A half-written index.json is made anew; where no images can be kept, it goes on without."""
    index(lambda folder: (folder / "index.json").write_text("{}"))(tmp_path, run, chest_root)
    folder = next((tmp_path / "index").iterdir())
    (folder / "pictures_64.u8").mkdir()
    shutil.copytree(run, tmp_path / "run")
    flags = ["--output_dir", tmp_path / "run", "--eval_only", "--index_dir", tmp_path / "index"]
    done = run_mimic([*mimic_cxr_flags, *SMALL, *flags])
    assert done.code == 0, done.stderr
    assert "building the index" in done.stdout


@pytest.fixture
def disk(tmp_path):
    """mount(options): a file system of 1 MB of its own, which ends with the test."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size=1m,{options}", "tmpfs", folder]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs needs root")
        return folder

    yield mount
    subprocess.run(["umount", folder], capture_output=True)


FULL = pytest.param("nr_inodes=1", "No space left on device", 1, id="full")
READ_ONLY = pytest.param("ro", "Read-only file system", 2, id="read-only")


@pytest.mark.soak
@pytest.mark.parametrize(("options", "reason", "ranks"), [FULL, READ_ONLY])
def test_an_evaluation_that_cannot_be_written_is_printed(mimic_cxr_flags, run, disk, run_mimic, options, reason, ranks):
    """A warning for each file and exit code 0: the metrics are what was asked for."""
    out = disk(options)
    flags = ["--output_dir", out, "--eval_only", "--resume_from", run / "best.pt", "--save_predictions"]
    done = run_mimic([*mimic_cxr_flags, *SMALL, *flags], ranks=ranks)
    assert done.code == 0, done.stderr
    figures = [f"figures/test_{name}.png" for name in ("answers", "curves", "reliability")]
    names = [*figures, "eval_test.json", "predictions_test.parquet"]
    for name in names:
        assert f"warning: {out}/{name}: not written ({reason})\n" in done.stderr
    assert done.stderr.count("\n") == len(names), done.stderr
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
def test_images_that_become_unreadable(mimic_cxr_flags, chest_root, run, tmp_path, run_mimic, split, how, ranks):
    """After the index was built, in training, validation and --eval_only: one line on all ranks, exit code 2."""
    copy = tmp_path / "data"
    copy_data(chest_root, copy)
    mci.open_index(copy / "index", copy / "mimic-cxr-jpg", copy / QA)
    for name in names_in(copy, split):
        path = next(copy.glob(f"mimic-cxr-jpg/files/*/*/*/{name}.jpg"))
        content = path.read_bytes()
        path.unlink()
        if how == "truncated":
            path.write_bytes(halve(content))

    flags = [word.replace(str(chest_root), str(copy)) for word in mimic_cxr_flags]
    flags += [*SMALL, "--cache_gb", "0", "--output_dir", tmp_path / "new"]
    if split == "test":
        flags += ["--eval_only", "--resume_from", run / "best.pt"]
    check_error(run_mimic(flags, ranks=ranks), r"\.jpg: not a readable picture .*; replace it")


def check_error(done, message: str) -> None:
    """All ranks have ended with one line, beside what torch may have warned of."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.code == 2, done.stderr
    assert len(errors) == 1, done.stderr
    assert re.search(message, errors[0])
    assert "Traceback" not in done.stdout + done.stderr


# as the script, but rank 1 of 2 loses its questions before it reads the first
LOSE = """
import os, runpy, sys
from tasks.mimic_cxr import index as mci
take = mci.Questions.take
def lose(self, row):
    if os.environ['RANK'] == '1':
        for path in self.folder.glob('part-*-train.arrow'):
            path.rename(path.with_suffix('.gone'))
    return take(self, row)
mci.Questions.take = lose
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_an_index_that_is_lost_while_training(mimic_cxr_flags, tmp_path, zygote):
    """Before rank 1 of 2 reads its first question: one line on both."""
    script = tmp_path / "lose.py"
    script.write_text(LOSE)
    flags = [*mimic_cxr_flags, *SMALL, "--index_dir", tmp_path / "index", "--output_dir", tmp_path / "new"]
    done = zygote(script, MIMIC, *flags, ranks=2, PYTHONPATH=str(ROOT))
    check_error(done, r"part-\d+-train\.arrow: damaged index file")


def test_the_weights_a_config_names_do_not_hinder_a_resume(mimic_cxr_flags, run, tmp_path, run_mimic):
    """--config of a fine-tuning also evaluates, and goes on with, the run that it began."""
    config = tmp_path / "c.yaml"
    config.write_text("pretrained_weights: no_longer_there.safetensors")
    shutil.copytree(run, tmp_path / "run")
    flags = [*mimic_cxr_flags, *SMALL, "--output_dir", tmp_path / "run", "--config", config]
    for more in ("--eval_only", "--resume_from=auto"):
        done = run_mimic([*flags, more])
        assert done.code == 0, done.stderr
        assert "(step 1)" in done.stdout
