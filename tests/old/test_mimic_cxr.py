"""train_mimic_cxr.py on MIMIC-CXR's formats: what is selected, what a target is, what the metrics are."""

import csv
import gzip
import json
import os
import re
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT
from PIL import Image

from old import deepspeed_utils
from old.distributed_utils import Ranks
from old.hardware_utils import autocast
from old.loop_utils import Step
from old.memory_utils import BatchSize
from tasks.mimic_cxr import index as mci
from tasks.mimic_cxr import index_build, index_files, releases
from tasks.mimic_cxr.answers import CHEXPERT, HEADS, REGIONS, head_of, target_of
from tasks.mimic_cxr.data import ImageCache, QuestionData, open_sets
from tasks.mimic_cxr.encoders import layers_of
from tasks.mimic_cxr.engines import choose_precision_with, config_file
from tasks.mimic_cxr.flags import guide_keys, translate_guide_keys
from tasks.mimic_cxr.metrics import answer_metrics, chexpert_metrics, chexpert_truth
from tasks.mimic_cxr.model import broadcast_mask, takes_ready_mask
from tasks.mimic_cxr.report import describe_memory, draw_answers, draw_curves, draw_inputs
from tasks.mimic_cxr.settings import apply_hardware, deepspeed_settings

CPU = torch.device("cpu")
MIMIC = str(ROOT / "train_mimic_cxr.py")
LABELS = list(CHEXPERT)


def read_sets(index: mci.Index, args, tokenizer) -> dict[str, QuestionData]:
    """The questions of each split, as the script reads them."""
    return open_sets(
        index,
        args.mimic_cxr_path,
        tokenizer,
        args.image_size,
        args.cache_gb,
        args.max_question_length,
        args.chexpert_uncertain,
        args.max_samples,
    )


class Study(NamedTuple):
    """A study of a made-up release.

    images: (dicom_id, view, meaning of the view's code). questions: (id, type, rating, main answer).
    """

    subject: int
    number: int
    split: str
    images: list[tuple[str, str, str]]
    questions: list[tuple[str, str, str | None, dict]]
    labels: dict[str, str] | None = None


def write_release(root: Path, studies: list[Study], zipped: bool = False) -> tuple[Path, Path]:
    """Both releases with exactly these studies."""
    cxr = root / "cxr"
    qba = root / "qba"
    # CheXpert's columns stand in another order: they are found by name
    tables = {
        "metadata": [["dicom_id", "subject_id", "study_id", "ViewPosition", "ViewCodeSequence_CodeMeaning"]],
        "split": [["dicom_id", "study_id", "subject_id", "split"]],
        "chexpert": [["subject_id", "study_id", *reversed(LABELS)]],
    }
    rows = []
    for study in studies:
        write_images(cxr, tables, study)
        rows += write_questions(qba, study)

    # the tables of both
    for name, table in tables.items():
        with gzip.open(cxr / f"mimic-cxr-2.0.0-{name}.csv.gz", "wt", newline="") as file:
            csv.writer(file).writerows(table)
    (qba / "metadata").mkdir()
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, qba / "metadata" / "question_metadata.parquet", row_group_size=3)

    if zipped:
        with zipfile.ZipFile(qba / "qa.zip", "w") as archive:
            for path in sorted((qba / "qa").rglob("*.json")):
                archive.write(path, path.relative_to(qba))
        shutil.rmtree(qba / "qa")
    return cxr, qba


def write_images(cxr: Path, tables: dict[str, list], study: Study) -> None:
    """A study's images, and its rows of the three tables."""
    subject = study.subject
    number = study.number
    for dicom, view, meaning in study.images:
        path = cxr / releases.image_name(subject, number, dicom)
        path.parent.mkdir(parents=True, exist_ok=True)
        grey = np.full((20, 30), number % 250, np.uint8)
        Image.fromarray(grey).save(path)
        tables["metadata"].append([dicom, subject, number, view, meaning])
        tables["split"].append([dicom, number, subject, study.split])
    labels = study.labels or {}
    values = [labels.get(name, "") for name in reversed(LABELS)]
    tables["chexpert"].append([subject, number, *values])


def write_questions(qba: Path, study: Study) -> list[dict]:
    """A study's file of questions; returns their rows of the table with the ratings."""
    subject = f"p{study.subject}"
    number = f"s{study.number}"
    details = {"answer_type": "details", "positiveness": "neg", "regions": ["spine"], "obs_entities": ["edema"]}
    rows = []
    questions = []
    for name, kind, rating, answer in study.questions:
        row = {"patient_id": subject, "study_id": number, "question_id": name}
        rows.append(row | {"question.question_type": kind, "question.quality.rating": rating})
        main = {"answer_type": "main_answer", "modifiers": []} | answer
        asked = {"question_id": name, "question_type": kind, "question": f"{name}?"}
        questions.append(asked | {"answers": [details, main]})

    path = qba / "qa" / subject[:3] / subject / f"{number}.qa.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"patient_id": subject, "study_id": number, "questions": questions}
    path.write_text(json.dumps(content))
    return rows


def pos(**more) -> dict:
    return {"positiveness": "pos"} | more


def neg(**more) -> dict:
    return {"positiveness": "neg"} | more


MODERATE = [["spread", "focal"], ["severity", "moderate"]]
STUDIES = [
    # two frontal views and every kind of question
    Study(
        10000001,
        50000001,
        "train",
        images=[("bb", "AP", ""), ("aa", "AP", ""), ("cc", "LATERAL", "")],
        labels={"Edema": "1.0", "Fracture": "-1.0", "Pneumonia": "0.0"},
        # answered by yes or no, by a severity, and by a region
        questions=[
            ("q1", "D02_has_finding", "4_A", pos()),
            ("q2", "D02_has_finding", "5_A+", neg()),
            ("q3", "B04_is_normal", "6_A++", pos()),
            ("q4", "D04_how_severe_is_finding", "3_B", pos(modifiers=MODERATE)),
            ("q5", "D03_where_is_finding", "3_B", pos(regions=["Left Lung Base", "spine"])),
            # by a category
            ("q6", "D01_describe_finding", "2_C", pos(obs_entities=["pleural effusion"])),
            ("q7", "A_indication", None, pos(obs_entities=["edema"])),
            # by nothing that there is a class for
            ("q8", "B01_describe_all", "6_A++", pos()),
            ("q9", "D03_where_is_finding", "4_A", pos(regions=["azygos fissure"])),
            ("q10", "D02_has_finding", "4_A", {"positiveness": "neutral"}),
        ],
    ),
    # PA beside AP
    Study(
        10000001,
        50000002,
        "train",
        images=[("dd", "AP", ""), ("ee", "PA", "")],
        questions=[("q1", "C03_is_abnormal_region", "1_D", pos()), ("q2", "B03_is_abnormal", "3_B", pos())],
    ),
    # the view in its code alone
    Study(
        11000003,
        50000003,
        "validate",
        images=[("ff", "", "postero-anterior")],
        questions=[("q1", "B12_describe_device", "4_A", pos(obs_entities=["Support Devices"]))],
    ),
    # no view, a lateral one, and both
    Study(11000004, 50000004, "test", [("gg", "", "")], [("q1", "D02_has_finding", "4_A", pos())]),
    Study(11000005, 50000005, "test", [("hh", "LL", "")], [("q1", "D02_has_finding", "4_A", pos())]),
    Study(
        11000006,
        50000006,
        "test",
        images=[("ii", "AP", ""), ("jj", "LATERAL", "")],
        labels={"Edema": "0.0"},
        questions=[("q1", "D02_has_finding", "4_A", pos())],
    ),
]


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> tuple[Path, Path]:
    return write_release(tmp_path_factory.mktemp("release"), STUDIES)


@pytest.fixture
def sample_release(mimic_cxr_flags) -> tuple[Path, Path]:
    """The releases that sample_data.py has written."""
    return Path(mimic_cxr_flags[1]), Path(mimic_cxr_flags[3])


@pytest.fixture
def run_mimic(zygote):
    """run_mimic(flags, ranks=..., ...): what the script with these flags ends with."""

    def run(flags: list, **options) -> SimpleNamespace:
        return zygote(MIMIC, *flags, **options)

    return run


def open_index(
    parent: Path,
    release: tuple[Path, Path],
    grade: str = "B",
    view: str = "frontal",
    max_missing: int = 0,
    limit: int = 0,
) -> mci.Index:
    """The index of a release in a folder of `parent`."""
    cxr, qba = release
    return mci.open_index(parent, cxr, qba, grade, view, max_missing, limit)


def facts_of(index: mci.Index) -> dict:
    """What an index says of itself, but for how long it took."""
    return {name: value for name, value in index.facts.items() if name != "seconds"}


def metrics_of(run_folder: Path) -> list[dict]:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def rows_of(index: mci.Index) -> dict[str, list[tuple]]:
    """{split: [(dicom, question id, head, class name)]} of an index."""
    heads = list(HEADS.items())
    found = {}
    for split in releases.SPLITS:
        questions = index.questions(split)
        found[split] = []
        for row in (questions.take(i) for i in range(len(questions))):
            head, names = heads[row["head"]]
            dicom = index.studies["dicom_id"][row["study"]].as_py()
            assert row["question"] == f"{row['id']}?"
            found[split].append((dicom, row["id"], head, names[row["target"]]))
    return found


# the training questions, as rows_of gives them
Q1 = ("aa", "q1", "binary", "yes")
Q2 = ("aa", "q2", "binary", "no")
Q3 = ("aa", "q3", "binary", "no")
Q4 = ("aa", "q4", "severity", "moderate")
Q5 = ("aa", "q5", "region", "left lung base")
Q6 = ("aa", "q6", "category", "pleural effusion")
Q7 = ("aa", "q7", "category", "edema")
REGION = ("ee", "q1", "binary", "yes")
OTHER = ("ee", "q2", "binary", "yes")

# of each grade or better
OF_GRADE = [
    ("A++", [Q3]),
    ("A+", [Q2, Q3]),
    ("A", [Q1, Q2, Q3]),
    ("B", [Q1, Q2, Q3, Q4, Q5, OTHER]),
    ("C", [Q1, Q2, Q3, Q4, Q5, Q6, OTHER]),
    ("D", [Q1, Q2, Q3, Q4, Q5, Q6, REGION, OTHER]),
    ("all", [Q1, Q2, Q3, Q4, Q5, Q6, Q7, REGION, OTHER]),
]


@pytest.mark.parametrize(("grade", "train"), OF_GRADE)
def test_grades_select_exactly_their_questions(release, tmp_path, grade, train):
    index = open_index(tmp_path, release, grade)
    found = rows_of(index)
    assert found["train"] == train
    rated = "A" in grade and len(grade) > 1
    assert found["validate"] == ([] if rated else [("ff", "q1", "category", "support devices")])
    assert found["test"] == ([] if rated else [("ii", "q1", "binary", "yes")])
    if grade != "all":
        assert index.facts["ratings"] == {"D": 1, "C": 1, "B": 3, "A": 7, "A+": 1, "A++": 2, "unrated": 1}

    # why the others are left out; there are 14 of the studies with an image
    left = index.facts["left_out"]
    if grade == "B":
        assert left["below the grade, or unrated"] == 3
        assert left[f"B01_describe_all: {index_build.NOT_ASKED}"] == 1
        assert left["D03_where_is_finding: region 'azygos fissure' not in the vocabulary"] == 1
        assert left["D02_has_finding: positiveness 'neutral'"] == 1
        assert sum(left.values()) + sum(map(len, found.values())) == 14


PNEUMOTHORAX_ABSENT = neg(obs_entities=["pneumothorax"])
MILD = pos(modifiers=[["severity", "tiny"], ["severity", "mild"]])
TARGETS = [
    # what is absent is no finding
    ("B08_describe_subcat", [PNEUMOTHORAX_ABSENT, pos(obs_entities=["edema"])], "edema"),
    ("B08_describe_subcat", [PNEUMOTHORAX_ABSENT, neg(obs_entities=["edema"])], "no finding"),
    ("B09_describe_abnormal_subcat", [pos(obs_entities=["opacity", "Consolidation"])], "consolidation"),
    ("D01_describe_finding", [neg(obs_entities=["scar"])], None),
    # and has no place
    ("C01_describe_region", [neg(regions=["lungs"]), pos(regions=["left lung"])], "left lung"),
    ("C01_describe_region", [neg(regions=["left lung"])], "left lung"),
    ("D03_where_is_finding", [neg(regions=["lungs"])], None),
    # of several the first that has a class
    ("D04_how_severe_is_finding", [MILD], "mild"),
    ("has_finding", [neg(), pos()], "no"),
    ("is_normal_region", [neg()], "yes"),
    # types without a head
    ("describe_all", [pos(obs_entities=["edema"])], ""),
    ("B16_has_imaging_artifacts", [pos()], ""),
]


@pytest.mark.parametrize(("kind", "answers", "target"), TARGETS)
def test_targets(kind, answers, target):
    """What is absent is no finding and has no place; of several answers or names the first that has a class."""
    head = head_of(kind)
    assert (head is None) == (target == "")
    if head:
        mains = [{"answer_type": "main_answer"} | answer for answer in answers]
        found, reason = target_of({"question_type": kind, "answers": mains}, head)
        assert (found is None) == (target is None) == bool(reason)
        assert target is None or HEADS[head][found] == target


def test_views(release, tmp_path):
    """PA before AP, of several the first dicom_id; a blank view by its code, else not used."""
    images = {}
    for view in releases.VIEWS:
        index = open_index(tmp_path, release, "B", view)
        images[view] = index.studies["dicom_id"].to_pylist()
        counts = index.facts["studies"]
        assert counts["studies"] == 6
        assert counts["pictures without a view"] == 1
        assert counts["studies without such a picture"] == 6 - len(images[view])
    assert images["frontal"] == ["aa", "ee", "ff", "ii"]
    assert images["PA"] == ["ee", "ff"]
    assert images["AP"] == ["aa", "dd", "ii"]
    assert images["lateral"] == ["cc", "hh", "jj"]


def test_chexpert_policies(release, tmp_path):
    import train_mimic_cxr as script

    cxr, qba = release
    args = script.parse_args(["--mimic_cxr_path", str(cxr), "--mimic_qa_path", str(qba), "--cache_gb", "0"])
    index = open_index(tmp_path, release)
    edema = LABELS.index("Edema")
    fracture = LABELS.index("Fracture")
    pneumonia = LABELS.index("Pneumonia")
    heart = LABELS.index("Cardiomegaly")

    # what each makes of an uncertain label, and whether it counts
    policies = {"ignore": (0, False), "positive": (1, True), "negative": (0, True), "soft": (0.5, True)}
    for policy, (value, known) in policies.items():
        args.chexpert_uncertain = policy
        sets = read_sets(index, args, lambda texts, **_: dict.fromkeys(("input_ids", "attention_mask")))
        data = sets["train"]
        batch = data.collate([data[0]])
        assert batch["label"][0, edema] == 1
        assert batch["label"][0, pneumonia] == 0
        assert batch["known"][0, [edema, pneumonia, heart]].tolist() == [True, True, False]
        assert batch["label"][0, fracture] == value
        assert batch["known"][0, fracture] == known

    # metrics take neither uncertain nor blank labels
    truth = chexpert_truth(index.studies, np.array([0]))
    assert truth[0, [edema, fracture, pneumonia, heart]].tolist() == [1, -1, 0, -1]


def test_zip_exports_and_folders_give_one_index(release, tmp_path):
    folder = tmp_path / "index"
    reference = rows_of(open_index(folder, release))
    cxr, qba = write_release(tmp_path / "zipped", STUDIES, zipped=True)
    assert rows_of(open_index(folder, (cxr, qba))) == reference

    # exports by grade, of which the smallest that has it is taken
    root = tmp_path / "qba"
    shutil.copytree(qba, root / "exports" / "B_frontal")
    shutil.copytree(qba, root / "exports" / "A_frontal")
    assert rows_of(open_index(folder, (cxr, root))) == reference
    assert releases.find_release(root, "A+").name == "A_frontal"
    for grade in ("C", "all"):
        with pytest.raises(mci.InputError, match=rf"exports: holds A_frontal, B_frontal, not grade {grade}"):
            releases.find_release(root, grade)
    shutil.rmtree(root / "exports" / "A_frontal")
    assert releases.find_release(root, "A+").name == "B_frontal"

    # each has a folder of its own
    assert len(list(folder.iterdir())) == 3


def test_missing_pictures_are_listed_and_come_back(tmp_path):
    cxr, qba = write_release(tmp_path, STUDIES)
    folder = tmp_path / "index"
    image = cxr / releases.image_name(10000001, 50000002, "ee")
    content = image.read_bytes()
    image.unlink()
    with pytest.raises(mci.InputError, match=r"1 picture file not found.*ee\.jpg.*--max_missing"):
        open_index(folder, (cxr, qba))

    index = open_index(folder, (cxr, qba), max_missing=1)
    assert rows_of(index)["train"] == [Q1, Q2, Q3, Q4, Q5]
    assert index.facts["left_out"]["picture file missing"] == 1
    assert (index.folder / "missing.txt").read_text() == f"{image.relative_to(cxr)}\n"

    image.write_bytes(content)
    index = open_index(folder, (cxr, qba))
    assert rows_of(index)["train"] == [Q1, Q2, Q3, Q4, Q5, OTHER]


def test_an_interrupted_index_goes_on(sample_release, tmp_path, monkeypatch):
    """Killed after some parts: those are not read again, and the index is the one of an unbroken build."""
    whole = open_index(tmp_path / "whole", sample_release)
    real = index_build.build_part
    built = []
    most = 3

    def build_part(folder, number, *rest):
        if len(built) == most:
            raise KeyboardInterrupt
        built.append(number)
        real(folder, number, *rest)

    monkeypatch.setattr(index_build, "build_part", build_part)
    with pytest.raises(KeyboardInterrupt):
        open_index(tmp_path / "broken", sample_release)

    # the second build makes what is lacking
    built.clear()
    parts = len(whole.facts["rows"])
    most = parts
    resumed = open_index(tmp_path / "broken", sample_release)
    assert built == list(range(3, parts))
    assert facts_of(resumed) == facts_of(whole)
    for file in whole.folder.glob("*.arrow"):
        assert (resumed.folder / file.name).read_bytes() == file.read_bytes()

    # a third run starts from it at once
    built.clear()
    open_index(tmp_path / "broken", sample_release)
    assert built == []


def whole_rows(index: mci.Index) -> list:
    """Every question of an index, and its table of studies."""
    rows = []
    for split in releases.SPLITS:
        questions = index.questions(split)
        rows.append([questions.take(i) for i in range(len(questions))])
    return [*rows, index.studies.to_pydict()]


def flip(content: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(content)
    changed[rng.integers(len(content))] ^= 1 << rng.integers(8)
    return bytes(changed)


def truncate(content: bytes, rng: np.random.Generator) -> bytes:
    return content[: rng.integers(len(content))]


def zero_page(content: bytes, rng: np.random.Generator) -> bytes:
    first = rng.integers(len(content)) // 512 * 512
    last = min(first + 512, len(content))
    return content[:first] + bytes(last - first) + content[last:]


def damage(path: Path, content: bytes) -> None:
    """Other bytes under the old modification time, as a disk that rots leaves them."""
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_damaged_index_files_give_no_wrong_questions(sample_release, tmp_path, capsys):
    """40 damaged files, each mended or refused: flipped bits, lost ends, pages of zeros, files in another's place."""
    folder = tmp_path / "index"
    whole = open_index(folder, sample_release)
    other = open_index(folder, sample_release, "A").folder
    intact = {path.name: path.read_bytes() for path in whole.folder.glob("*.[aj]*")}
    expected = whole_rows(whole)
    rng = np.random.default_rng(0)

    # studies, facts, a table of each split, and the facts of the parts
    tables = {}
    for split in ("train", "test"):
        tables[split] = sorted(name for name in intact if name.endswith(f"-{split}.arrow"))
    names = ["studies.arrow", "index.json", tables["train"][1], tables["test"][1]]
    parts = sorted(name for name in intact if re.fullmatch(r"part-\d+\.json", name))
    cases = [(name, change) for name in names for change in (flip, flip, truncate, zero_page)] * 2
    cases += [(name, other) for name in names]
    cases += [(parts[0], change) for change in (flip, truncate, zero_page)]

    for name, change in cases:
        content = change(intact[name], rng) if callable(change) else (change / name).read_bytes()
        damage(whole.folder / name, content)
        # a part is read again where a build goes on
        if name in parts:
            (whole.folder / "index.json").unlink()
        index = open_index(folder, sample_release)
        assert whole_rows(index) == expected, (name, change)
        assert facts_of(index) == facts_of(whole)

    # a file that is gone, and two that have changed places
    (whole.folder / names[2]).unlink()
    assert whole_rows(open_index(folder, sample_release)) == expected
    table = parts[2].replace(".json", "-train.arrow")
    for first, second in ((parts[0], parts[1]), (names[2], table)):
        damage(whole.folder / first, intact[second])
        damage(whole.folder / second, intact[first])
        (whole.folder / "index.json").unlink()
        index = open_index(folder, sample_release)
        assert whole_rows(index) == expected, (first, second)
    assert len(cases) + 3 >= 40

    # one line says so
    capsys.readouterr()
    damage(whole.folder / names[2], flip(intact[names[2]], rng))
    open_index(folder, sample_release)
    said = capsys.readouterr()
    line = f"warning: {whole.folder / names[2]}: damaged (its sha256 is not the one written down); it is built again"
    assert said.err.splitlines() == [line]
    assert said.out.count("building the index") == 1


def test_an_index_without_checksums_is_built_again(release, tmp_path, capsys):
    """As versions before this one wrote it: said in one line, and the index is the same."""
    whole = open_index(tmp_path, release)
    expected = rows_of(whole)
    for path in whole.folder.glob("*.json"):
        facts = json.loads(path.read_text())
        facts.pop("sha256", None)
        facts.pop("files", None)
        path.write_text(json.dumps(facts))

    capsys.readouterr()
    assert rows_of(open_index(tmp_path, release)) == expected
    said = f"{whole.folder}/index.json: damaged, or of an earlier version without checksums; it is built again"
    assert capsys.readouterr().out.count(said) == 1
    open_index(tmp_path, release)
    assert capsys.readouterr().out == ""


def test_an_index_that_stays_damaged_is_refused(release, tmp_path, monkeypatch):
    """A disk that gives back other bytes than were written."""
    open_index(tmp_path, release)
    monkeypatch.setattr(index_files, "file_sha256", lambda path: "0" * 64)
    with pytest.raises(mci.InputError, match=r"\.arrow: damaged again after it was written.*--index_dir"):
        open_index(tmp_path, release)


def test_an_index_on_a_disk_one_may_only_read(release, tmp_path):
    """Is used as it is; a damaged one is refused in one line."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        index = open_index(disk, release)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        expected = whole_rows(index)
        assert whole_rows(open_index(disk, release)) == expected

        # damaged while it may be written
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        path = index.folder / "part-00000-train.arrow"
        path.write_bytes(flip(path.read_bytes(), np.random.default_rng(0)))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        refused = r"cannot write here \(Read-only file system\); choose another --index_d"
        with pytest.raises(mci.InputError, match=refused):
            open_index(disk, release)
    finally:
        del index
        subprocess.run(["umount", disk], check=True)


def test_ranks_mend_an_index_together(mimic_cxr_flags, sample_release, run_mimic, tmp_path):
    """One of 2 ranks meets the damage; both build, and one line says so."""
    index = open_index(tmp_path / "index", sample_release)
    path = index.folder / "part-00001-train.arrow"
    content = path.read_bytes()
    path.write_bytes(flip(content, np.random.default_rng(0)))

    flags = [*mimic_cxr_flags, "--index_dir", tmp_path / "index", "--output_dir", tmp_path / "run"]
    flags += ["--max_steps", "1", "--max_samples", "24", "--batch_size", "4"]
    done = run_mimic(flags, ranks=2)
    assert done.code == 0, done.stderr
    assert done.stderr.count("damaged") == 1
    assert path.read_bytes() == content


def test_of_two_jobs_one_waits(release, tmp_path, capsys):
    """The folder is locked by another job that builds; when it is gone, this one builds what is lacking."""
    cxr, qba = release
    folder = mci.index_folder(tmp_path, index_build.Source(cxr, qba, "B", "frontal"))
    folder.mkdir()
    other = [mci.RunLock(folder / ".lock", wait=0)]
    threading.Timer(2.5, other.clear).start()
    index = open_index(tmp_path, release)
    assert rows_of(index)["train"] == [Q1, Q2, Q3, Q4, Q5, OTHER]
    assert capsys.readouterr().out.count("another run builds the index") == 1


YES = [("q1", "D02_has_finding", "4_A", pos())]
NOTHING_LEFT_OUT = [
    Study(10000001, 50000001, "train", [("aa", "PA", "")], [*YES, ("q2", "B03_is_abnormal", "3_B", neg())]),
    Study(11000003, 50000003, "validate", [("bb", "PA", "")], YES),
    Study(11000004, 50000004, "test", [("cc", "PA", "")], YES),
]


def test_a_run_on_data_of_which_nothing_is_left_out(mimic_cxr_flags, run_mimic, tmp_path):
    """The table of what was left out has no rows."""
    cxr, qba = write_release(tmp_path, NOTHING_LEFT_OUT)
    flags = [*mimic_cxr_flags, "--mimic_cxr_path", cxr, "--mimic_qa_path", qba, "--index_dir", tmp_path / "index"]
    done = run_mimic([*flags, "--max_steps", "1", "--output_dir", tmp_path / "run"])
    assert done.code == 0, done.stderr
    assert "questions left out: none" in done.stdout
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_table_without_rows(capsys):
    from old.logging_utils import print_table

    print_table("questions left out", {})
    assert capsys.readouterr().out == "questions left out: none\n"
    print_table("counts", {"a": {"n": 1}})
    assert capsys.readouterr().out.split() == ["counts", "n", "a", "1"]


def test_a_trial_reads_few_studies(release, tmp_path):
    index = open_index(tmp_path, release, limit=1)
    assert index.studies["dicom_id"].to_pylist() == ["aa", "ff", "ii"]
    assert len(open_index(tmp_path, release).studies) == 4


def test_a_full_disk_ends_the_build_and_it_goes_on(mimic_cxr_flags, run_mimic, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    flags = [*mimic_cxr_flags, "--debug", "--cache_gb", "0", "--output_dir", tmp_path / "run"]
    try:
        done = run_mimic([*flags, "--index_dir", disk], ranks=2)
        assert done.code == 1
        assert done.stderr.count("\n") == 1
        assert re.search(r"error: \S+: not written \(No space left on device\); free space and", done.stderr)
        shutil.copytree(disk, tmp_path / "roomy")
    finally:
        subprocess.run(["umount", disk], check=True)
    assert run_mimic([*flags, "--index_dir", tmp_path / "roomy"]).code == 0


def test_ranks_share_the_index_and_get_the_same(mimic_cxr_flags, sample_release, run_mimic, tmp_path):
    alone = tmp_path / "alone"
    shared = tmp_path / "shared"
    open_index(alone, sample_release)
    flags = [*mimic_cxr_flags, "--index_dir", shared, "--output_dir", tmp_path / "run", "--debug"]
    done = run_mimic(flags, ranks=3)
    assert done.code == 0, done.stderr

    files = {path.name: path.read_bytes() for path in alone.rglob("*.arrow")}
    assert {path.name: path.read_bytes() for path in shared.rglob("*.arrow")} == files
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["world_size"] == 3
    assert summary["test/vqa_majority"] > 0


def test_no_row_is_kept_in_memory(sample_release, tmp_path):
    """A thousand copies of the index take no more Python objects than one."""
    import gc

    index = open_index(tmp_path, sample_release)
    one = index.questions("train")
    gc.collect()
    before = len(gc.get_objects())
    many = index.questions("train", copies=50)
    gc.collect()
    more = len(gc.get_objects()) - before
    assert len(many) == 50 * len(one)
    assert more < 50 * len(index.facts["rows"]) * 12
    assert many.take(len(one) * 49 + 3) == one.take(3)


def test_metrics_against_scikit_learn(release, tmp_path):
    from sklearn import metrics as sk

    # 400 questions of three known types and one that training does not have, half of them answered right
    index = open_index(tmp_path, release)
    rng = np.random.default_rng(0)
    count = 400
    kinds = np.array(["D02_has_finding", "D03_where_is_finding", "D04_how_severe_is_finding", "unseen"])
    which = rng.integers(0, 4, count)
    head = np.array([0, 2, 3, 0])[which]
    classes = np.array([len(names) for names in HEADS.values()])
    sizes = classes[head]
    target = rng.integers(0, sizes)
    predicted = rng.integers(0, sizes)
    target = np.where(rng.random(count) < 0.5, predicted, target)

    # the labels of four studies: one label has one class only, another is unknown in the first study
    truth = np.where(rng.random((4, 14)) < 0.5, 1, 0).astype(np.int8)
    truth[:, 3] = 1
    truth[0, 4] = -1
    study = rng.choice(np.arange(4), count)
    probability = rng.random((4, 14)).astype(np.float32)
    index.studies = pa.record_batch({name: truth[:, i] for i, name in enumerate(LABELS)})
    found = {
        "head": head,
        "target": target,
        "predicted": predicted,
        "type": kinds[which],
        "study": study,
        "index": np.arange(count),
        "chexpert": probability[study],
    }

    # ours
    got = answer_metrics("test", found, index.facts["classes"])
    got |= chexpert_metrics("test", found, index.studies)

    # answers
    assert got["test/vqa_accuracy"] == pytest.approx(sk.accuracy_score(target, predicted), abs=1e-6)
    for name, number in (("binary", 0), ("region", 2), ("severity", 3)):
        rows = head == number
        accuracy = sk.accuracy_score(target[rows], predicted[rows])
        f1 = sk.f1_score(target[rows], predicted[rows], average="macro")
        assert got[f"test/vqa_accuracy/{name}"] == pytest.approx(accuracy, abs=1e-6)
        assert got[f"test/vqa_f1/{name}"] == pytest.approx(f1, abs=1e-6)

    # the most frequent answer of each type in training
    usual = {
        "D02_has_finding": 0,
        "D03_where_is_finding": REGIONS.index("left lung base"),
        "D04_how_severe_is_finding": 2,
    }
    guesses = np.array([usual.get(kind, -1) for kind in found["type"]])
    assert got["test/vqa_majority"] == pytest.approx(np.mean(guesses == target), abs=1e-9)

    check_labels(got, truth, probability)


def check_labels(got: dict, truth: np.ndarray, probability: np.ndarray) -> None:
    """The area and the precision of each label, and the mean area, are those of scikit-learn."""
    from sklearn import metrics as sk

    areas = []
    for i, label in enumerate(LABELS):
        rows = truth[:, i] >= 0
        known = truth[rows, i]
        if len(set(known)) < 2:
            assert got[f"test/chexpert_auroc/{label}"] is None
            continue
        scores = probability[rows, i]
        areas.append(sk.roc_auc_score(known, scores))
        precision = sk.average_precision_score(known, scores)
        assert got[f"test/chexpert_auroc/{label}"] == pytest.approx(areas[-1], abs=1e-6)
        assert got[f"test/chexpert_ap/{label}"] == pytest.approx(precision, abs=1e-6)
    assert 0 < len(areas) < 14
    assert got["test/chexpert_auroc"] == pytest.approx(np.mean(areas), abs=1e-6)


def test_losses_of_a_split_are_those_of_training(mimic_cxr_flags, sample_release, tmp_path):
    """The evaluation's loss and its parts: batch_loss of the whole split as one batch, uncertain labels as asked."""
    import train_mimic_cxr as script

    flags = [*mimic_cxr_flags, "--chexpert_uncertain", "soft", "--batch_size", "7", "--cache_gb", "0"]
    args = script.parse_args(flags)
    index = open_index(tmp_path, sample_release)
    model, tokenizer = script.build_model(args, "no", CPU)
    data = read_sets(index, args, tokenizer)["val"]
    metrics = script.evaluate(model, data, args.batch_size, args).metrics

    # the whole split as one batch
    count = len(data)
    batch = data.collate([data[i] for i in range(count)])
    with torch.no_grad():
        counts = script.count_targets(Step(count, count, [batch]))
        expected = script.batch_loss(model.eval(), batch, counts, args.chexpert_weight)
    for name, value in zip(("loss", "loss_vqa", "loss_chexpert"), expected.tolist(), strict=True):
        assert metrics[f"val/{name}"] == pytest.approx(value, rel=1e-5), name


def test_the_best_validation_is_neither_run_nor_logged_twice(mimic_cxr_flags, run_mimic, tmp_path):
    """One line of metrics.jsonl for each epoch's validation, also after a resume; summary.json has the best one's."""
    out = tmp_path / "run"
    flags = [*mimic_cxr_flags, "--batch_size", "16", "--max_samples", "40", "--learning_rate", "1e-3"]
    flags += ["--output_dir", out, "--save_predictions", "--resume_from", "auto"]
    for epochs in (2, 3):
        done = run_mimic([*flags, "--epochs", epochs])
        assert done.code == 0, done.stderr

        # each epoch was validated once
        validated = [line for line in metrics_of(out) if "val/loss" in line]
        assert [line["step"] for line in validated] == [3 * (epoch + 1) for epoch in range(epochs)]

        # the summary holds the best
        summary = json.loads((out / "summary.json").read_text())
        best = next(line for line in validated if line["step"] == summary["best_step"])
        assert best["val/vqa_accuracy"] == max(line["val/vqa_accuracy"] for line in validated)
        logged = {name: value for name, value in best.items() if "/" in name}
        assert logged == {name: value for name, value in summary.items() if name.startswith("val/")}

        # so do the predictions, and what was printed
        table = pq.read_table(out / "predictions_val.parquet").to_pylist()
        right = np.mean([row["answer"] == row["truth"] for row in table])
        assert right == pytest.approx(best["val/vqa_accuracy"])
        printed = r"val, best\.pt: loss +mean\nloss +([\d.]+)\nloss_vqa +([\d.]+)\nloss_chexpert +([\d.]+)\n"
        shown = re.search(printed, done.stdout)
        names = ("val/loss", "val/loss_vqa", "val/loss_chexpert")
        assert [float(text) for text in shown.groups()] == [pytest.approx(best[name], abs=1e-4) for name in names]


def test_the_chexpert_head_sees_the_picture_alone(mimic_cxr_flags, tmp_path):
    import train_mimic_cxr as script

    args = script.parse_args([*mimic_cxr_flags, "--dropout", "0"])
    model, tokenizer = script.build_model(args, "no", CPU)
    model.eval()
    image = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    tokens = tokenizer(["is there an effusion?", "where is it?"], padding=True, return_tensors="pt")
    ids = tokens["input_ids"]
    mask = tokens["attention_mask"]

    # another question, the same labels
    first = model(image, ids, mask)
    second = model(image, ids.flip(0), mask.flip(0))
    assert torch.equal(first[-1], second[-1])
    assert not torch.equal(first[0], second[0])
    assert [logits.shape[1] for logits in first] == [2, 14, 26, 4, 14]

    # the side of a finding can be seen
    mirrored = model(image.flip(3), ids, mask)
    assert not torch.allclose(mirrored[2], first[2], atol=1e-4)


def test_checkpointing_and_freezing(mimic_cxr_flags):
    """Recomputed activations give the same gradients; frozen encoders have none; BERT's unused pooler is frozen."""
    import train_mimic_cxr as script

    gradients = []
    for more in ([], ["--gradient_checkpointing"], ["--freeze_image", "--freeze_text"]):
        args = script.parse_args([*mimic_cxr_flags, "--dropout", "0", *more])
        model, tokenizer = script.build_model(args, "no", CPU)
        tokens = tokenizer(["is there an effusion?"], return_tensors="pt")
        image = torch.arange(64 * 64).view(1, 1, 64, 64).to(torch.uint8)
        out = model.train()(image, tokens["input_ids"], tokens["attention_mask"])
        sum(logits.square().sum() for logits in out).backward()
        named = model.named_parameters()
        gradients.append({name: value.grad for name, value in named if value.grad is not None})

    kept, recomputed, frozen = gradients
    assert kept.keys() == recomputed.keys()
    assert all(torch.allclose(kept[name], recomputed[name], rtol=1e-5, atol=1e-7) for name in kept)
    assert not any("pooler" in name for name in kept)
    assert any(name.startswith("image.") for name in kept)
    assert any(name.startswith("text.") for name in kept)
    assert not any(name.startswith(("image.", "text.")) for name in frozen)


def tiny_text_encoder(kind: str, attention: str) -> torch.nn.Module:
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "GPT2":
        sizes = {"vocab_size": 50, "n_embd": 64, "n_layer": 2, "n_head": 2}
    make_config = getattr(transformers, f"{kind}Config")
    encoder = getattr(transformers, f"{kind}Model")
    torch.manual_seed(1)
    return encoder._from_config(make_config(**sizes), attn_implementation=attention)


READY_MASKS = [
    ("Bert", "sdpa", True),
    ("Roberta", "sdpa", True),
    ("DistilBert", "sdpa", True),
    ("Electra", "sdpa", True),
    # another attention
    ("Bert", "eager", False),
    ("Roberta", "eager", False),
    ("DistilBert", "eager", False),
    # a causal one, and some that add to the mask
    ("GPT2", "sdpa", False),
    ("MPNet", "eager", False),
    ("DebertaV2", "eager", False),
]


@pytest.mark.parametrize(("kind", "attention", "ready"), READY_MASKS)
def test_encoders_that_take_a_ready_mask(kind, attention, ready):
    """They give the same to the bit, padded or not, in both precisions; the others keep the plain mask."""
    encoder = tiny_text_encoder(kind, attention).train()
    assert takes_ready_mask(encoder) is ready
    assert encoder.training
    if not ready:
        return

    encoder.eval()
    ids = torch.randint(3, 50, (3, 40))
    lengths = torch.tensor([[40], [17], [5]])
    for mask in (torch.arange(40) < lengths, torch.ones(3, 40) > 0):
        mask = mask.long()
        for precision in ("no", "bf16"):
            with torch.no_grad(), autocast(CPU, precision):
                plain = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
                given = encoder(input_ids=ids, attention_mask=broadcast_mask(mask)).last_hidden_state
            assert torch.equal(plain, given)


def test_the_model_does_not_read_its_mask_back(mimic_cxr_flags, monkeypatch):
    """transformers asks `padding_mask.all()` of a plain mask: on a GPU one wait in each forward pass."""
    import transformers.masking_utils as masking

    import train_mimic_cxr as script

    ask = Mock(wraps=masking._ignore_bidirectional_mask_sdpa)
    monkeypatch.setattr(masking, "_ignore_bidirectional_mask_sdpa", ask)
    args = script.parse_args([*mimic_cxr_flags, "--dropout", "0"])
    model, tokenizer = script.build_model(args, "no", CPU)
    tokens = tokenizer(["is there an effusion?", "where?"], padding=True, return_tensors="pt")
    ids = tokens["input_ids"]
    mask = tokens["attention_mask"]
    image = torch.zeros(2, 1, 64, 64, dtype=torch.uint8)

    # the ready mask is not asked, the plain one is, and both give the same
    ask.reset_mock()
    ready = model.eval()(image, ids, mask)
    assert not ask.called
    model.ready_mask = False
    plain = model(image, ids, mask)
    assert ask.called
    assert all(torch.equal(a, b) for a, b in zip(ready, plain, strict=True))


def test_checkpointing_finds_the_layers():
    """Of encoders whose layers have other names; one that has none is an error."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    for kind in ("ViT", "Bert", "Roberta", "SiglipVision"):
        make_config = getattr(transformers, f"{kind}Config")
        make_model = getattr(transformers, f"{kind}Model")
        encoder = make_model(make_config(**sizes))
        assert len(layers_of(encoder, kind)) == 3
    with pytest.raises(mci.InputError, match="no such: --gradient_checkpointing does not know its layers"):
        layers_of(torch.nn.Linear(2, 2), "no such")


def test_optimizer_state_takes_the_format_of_the_weights():
    """The fused AdamW walks through memory: state from a checkpoint must lie as channels_last weights do."""
    layer = torch.nn.Conv2d(3, 8, 4).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    saved = {name: torch.randn(value.shape) for name, value in layer.named_parameters()}
    moments = {"step": 3, "exp_avg": saved, "exp_avg_sq": saved}
    deepspeed_utils.restore_optimizer(layer, optimizer, None, {}, moments)
    state = optimizer.state[layer.weight]
    assert state["exp_avg"].stride() == layer.weight.stride()
    assert torch.equal(state["exp_avg_sq"], saved["weight"])


def test_precision_of_the_deepspeed_file():
    """The guide's JSON has fp16 enabled: taken where there is a GPU; a given --mixed_precision stands."""
    config = {"fp16": {"enabled": True, "loss_scale": 0}, "bf16": {"enabled": False}}
    precision, _ = choose_precision_with(config, "auto", CPU)
    assert precision == "no"
    # nothing is left that fill_config could find wrong
    assert config == {"fp16": {"loss_scale": 0}, "bf16": {}}

    precision, _ = choose_precision_with({"bf16": {"enabled": True}}, "no", CPU)
    assert precision == "no"
    precision, _ = choose_precision_with(None, "bf16", CPU)
    assert precision == "bf16"


@pytest.mark.soak
@pytest.mark.parametrize("name", ["deepspeed_config", pytest.param("deepspeed_zero3", marks=pytest.mark.soak)])
def test_our_own_deepspeed_files(mimic_cxr_flags, run_mimic, tmp_path, name):
    """As they are, in bf16: offload, checkpointing, a frozen encoder; then DDP goes on from there."""
    out = tmp_path / "run"
    flags = [*mimic_cxr_flags, "--mixed_precision", "bf16", "--batch_size", "4", "--max_samples", "40"]
    flags += ["--freeze_text", "--output_dir", out, "--quality_grade", "all", "--log_every", "1", "--auto_batch"]
    file = ROOT / "configs" / f"{name}.json"
    done = run_mimic([*flags, "--max_steps", "2", "--deepspeed_config", file], ranks=2)
    assert done.code == 0, done.stderr
    assert re.search(rf"checkpointing:? +True \({name}\.json\)", done.stdout), done.stdout
    assert "bf16" in done.stdout

    done = run_mimic([*flags, "--max_steps", "3", "--use_ddp", "--resume_from", "auto"], ranks=2)
    assert done.code == 0, done.stderr
    assert [line["step"] for line in metrics_of(out) if "train/loss" in line] == [1, 2, 3]


@pytest.mark.soak
def test_banner_says_where_values_come_from(mimic_cxr_flags, run_mimic, tmp_path):
    """file < hardware < command line."""
    config = tmp_path / "my.yaml"
    config.write_text("batch_size: 3\ngradient_accumulation_steps: 7\nlearning_rate: 2.0e-3\nepochs: 9\n")
    left_to_the_hardware = ("--no_auto_optimize", "--num_workers", "0")
    flags = [word for word in mimic_cxr_flags if word not in left_to_the_hardware]
    flags += ["--config", config, "--max_steps", "1", "--max_samples", "20", "--epochs", "4"]

    done = run_mimic([*flags, "--output_dir", tmp_path / "a"])
    assert done.code == 0, done.stderr
    assert "8 per GPU (hardware) x 32 accumulation (hardware) x 1 = 256" in done.stdout
    assert "0.002 (my.yaml)" in done.stdout
    assert "4 epochs (command line)" in done.stdout

    done = run_mimic([*flags, "--output_dir", tmp_path / "b", "--batch_size", "4"])
    assert "4 per GPU (command line) x 64 accumulation (hardware) x 1 = 256" in done.stdout
    done = run_mimic([*flags, "--output_dir", tmp_path / "c", "--no_auto_optimize"])
    assert "3 per GPU (my.yaml) x 7 accumulation (my.yaml) x 1 = 21" in done.stdout


GUIDE_YAML = """\
training:
  batch_size_per_gpu: 16
  gradient_accumulation_steps: 4
  # Effective batch: 16 * 4 * 4 = 256
  fp16: true
  gradient_checkpointing: true
  dataloader_num_workers: 12  # 3 per GPU

deepspeed:
  enabled: true
  stage: 2
"""


def test_the_guides_own_yaml(mimic_cxr_flags, run_mimic, tmp_path):
    """As the guide writes it: one line for each key that is named otherwise here; the command line wins."""
    (tmp_path / "config.yaml").write_text(GUIDE_YAML)
    flags = [*mimic_cxr_flags, "--config", tmp_path / "config.yaml", "--max_steps", "1", "--max_samples", "40"]
    flags += ["--output_dir", tmp_path / "run", "--gradient_accumulation_steps", "1"]
    done = run_mimic(flags, ranks=2)
    assert done.code == 0, done.stderr

    # what was translated
    said = [line for line in done.stdout.splitlines() if line.startswith("config.yaml: ")]
    assert said == [
        "config.yaml: training.batch_size_per_gpu 16 -> --batch_size 16",
        "config.yaml: training.fp16 true -> --mixed_precision no (fp16 needs a GPU)",
        "config.yaml: training.dataloader_num_workers 12 -> --num_workers 0 (command line)",
        "config.yaml: deepspeed.enabled true -> --use_deepspeed",
        "config.yaml: deepspeed.stage 2 -> --deepspeed_config configs/deepspeed_config.json",
    ]
    assert "16 per GPU (config.yaml) x 1 accumulation (command line) x 2 = 32" in done.stdout
    assert re.search(r"engine +ZeRO-2", done.stdout)
    assert re.search(r"checkpointing +True", done.stdout)

    # args.yaml, a config again, holds what was translated under our names alone
    import train_mimic_cxr as script

    args = script.parse_args(["--config", str(tmp_path / "run" / "args.yaml")])
    assert args.use_deepspeed is True
    assert args.batch_size == 16
    assert args.mixed_precision == "no"
    assert args.fp16 is None
    assert guide_keys(args.config) == []


def test_the_guides_yaml_where_the_processes_are_counted(mimic_cxr_flags, tmp_path, monkeypatch, capsys):
    """12 workers for the 4 processes of a node are 3 each; fp16 is taken on a GPU; what has no meaning is said."""
    import train_mimic_cxr as script

    flags = [word for word in mimic_cxr_flags if word not in ("--num_workers", "0")]
    path = tmp_path / "config.yaml"
    path.write_text(GUIDE_YAML.replace("training:", "pin_memory: true\ntraining:"))
    args = script.parse_args([*flags, "--config", str(path)])
    lines = translate_guide_keys(args, on_gpu=True, processes_per_node=4)
    workers = "training.dataloader_num_workers 12 -> --num_workers 3 (each of the node's 4 processes)"
    assert f"config.yaml: {workers}" in lines
    assert "config.yaml: training.fp16 true -> --mixed_precision fp16" in lines
    assert "config.yaml: pin_memory true -> nothing to set here: done by itself on a GPU" in lines
    assert args.num_workers == 3
    assert args.mixed_precision == "fp16"
    assert args.source["num_workers"] == "config.yaml"

    # the command line wins
    args = script.parse_args([*flags, "--config", str(path), "--use_ddp", "--mixed_precision", "bf16"])
    said = "\n".join(translate_guide_keys(args, on_gpu=True, processes_per_node=4))
    assert not args.use_deepspeed
    assert args.mixed_precision == "bf16"
    assert "deepspeed.enabled true -> --use_ddp (command line)" in said

    # and --auto_optimize finds its own batch
    flags = [word for word in flags if word != "--no_auto_optimize"]
    args = script.parse_args([*flags, "--config", str(path)])
    lines = translate_guide_keys(args, on_gpu=True, processes_per_node=4)
    batch = "batch_size_per_gpu 16 -> --batch_size 16, but --auto_optimize finds its own"
    assert any(line.endswith(batch) for line in lines)


@pytest.mark.parametrize("section", ["", "training", "settings"])
@pytest.mark.parametrize(("gpus", "memory"), [(4, 24), (4, 12), (4, 5), (1, 16), (2, None)])
def test_the_settings_that_hardware_utils_prints(mimic_cxr_flags, tmp_path, capsys, section, gpus, memory):
    """`python -m old.hardware_utils --json`, its settings as a config, in a section or not."""
    import train_mimic_cxr as script
    from old import hardware_utils as hw

    words = ["--json", "--plan", "--gpus", str(gpus)]
    words += ["--gpu_memory", str(memory)] if memory else []
    hw.main(words)
    settings = json.loads(capsys.readouterr().out)["settings"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({section: settings} if section else settings))
    args = script.parse_args([*mimic_cxr_flags, "--config", str(path)])
    lines = translate_guide_keys(args, on_gpu=False, processes_per_node=1)

    # each setting became the flag of its meaning
    assert args.batch_size == settings["batch_size_per_gpu"]
    names = ("gradient_accumulation_steps", "prefetch_factor", "mixed_precision", "gradient_checkpointing")
    for name in (*names, "offload_optimizer"):
        assert getattr(args, name) == settings[name]
    assert args.use_deepspeed == (settings["engine"] == "deepspeed")
    stages = {0: None, 2: "deepspeed_config.json", 3: "deepspeed_zero3.json"}
    file = args.deepspeed_config and Path(args.deepspeed_config).name
    assert file == stages[settings["zero_stage"]]

    # batch, workers, effective batch, stage, offload, engine
    said = "\n".join(lines)
    assert said.count("config.json: ") == 6
    assert f"effective_batch_size {settings['effective_batch_size']} -> nothing to set here" in said


class OnGpus(NamedTuple):
    """What follows from so many GiB a GPU with these flags, GUIDE standing for the guide's config."""

    memory: float
    flags: str
    checkpointing: bool
    offload: bool
    said: str


KEPT = "activations kept, optimizer on the GPU"
RECOMPUTED = "batch 8, activations recomputed, optimizer on the CPU"
OWN_FILE = "--deepspeed_config configs/deepspeed_config.json"
MEMORIES = [
    OnGpus(79.2, "", False, False, f"79.2 GiB on the smallest GPU, 16 GB or more: batch 64, {KEPT}"),
    OnGpus(14.56, "", False, False, f"batch 12, {KEPT}"),
    OnGpus(11.8, "", True, True, f"11.8 GiB on the smallest GPU, below 16 GB: {RECOMPUTED}"),
    # the command line wins
    OnGpus(79.2, "--gradient_checkpointing --batch_size 4", True, False, "16 GB or more: optimizer on the GPU"),
    # a file that is named is used as it is
    OnGpus(79.2, OWN_FILE, True, True, "16 GB or more: batch 64"),
    OnGpus(79.2, "--no_auto_optimize --use_deepspeed", True, True, ""),
    OnGpus(79.2, "--config GUIDE", False, False, f"batch 64, {KEPT}"),
]


@pytest.mark.parametrize("case", MEMORIES)
def test_recomputation_and_offload_follow_the_gpus_memory(mimic_cxr_flags, tmp_path, monkeypatch, case):
    """On 4 GPUs, whether DeepSpeed's file is ours, named by the user, or meant by the guide's `stage: 2`."""
    import train_mimic_cxr as script

    guide = tmp_path / "guide.yaml"
    guide.write_text(GUIDE_YAML)
    card = SimpleNamespace(total_memory=case.memory * 2**30, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    flags = [word for word in mimic_cxr_flags if word != "--no_auto_optimize"]
    flags += case.flags.replace("GUIDE", str(guide)).split()
    args = script.parse_args(flags)
    ranks = Ranks(0, 0, 4, torch.device("cuda", 0), "torchrun")
    hardware = apply_hardware(args, ranks, processes=4)
    config = deepspeed_settings(args.deepspeed_config or config_file(hardware.zero_stage), args)

    assert ("offload_optimizer" in config["zero_optimization"]) == case.offload
    assert ("on the CPU" in deepspeed_utils.describe(config)) == case.offload
    assert args.gradient_checkpointing == case.checkpointing
    if case.said:
        recomputed = bool(args.gradient_checkpointing)
        batch = BatchSize(args.batch_size, args.gradient_accumulation_steps, "", recomputed)
        used = {name: value for name, value in hardware.flags.items() if args.source[name] == "hardware"}
        own_file = args.source["deepspeed_config"] == "default"
        said = describe_memory(hardware.smallest_gpu, used, batch, own_file)
        assert said.endswith(case.said)


def test_help_of_auto_optimize(capsys):
    """Its default is said once, and turning it off is not called a default."""
    import train_mimic_cxr as script

    with pytest.raises(SystemExit):
        script.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "checkpointing from the hardware (default: True)" in text
    assert "take them from the file and the defaults (--auto_optimize: True) --use_deepspeed" in text


def test_outputs_of_a_run(mimic_cxr_flags, run_mimic, tmp_path):
    """--debug with W&B offline: figures, tables, summary, predictions; --eval_only repeats the summary's numbers."""
    out = tmp_path / "run"
    flags = [*mimic_cxr_flags, "--output_dir", out, "--batch_size", "16"]
    done = run_mimic([*flags, "--debug", "--save_predictions", "--wandb"], figures=True)
    assert done.code == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 2

    # figures, tables, and W&B's folder without its key
    names = {path.name for path in (out / "figures").iterdir()}
    assert {"inputs.png", "val_answers.png", "test_answers.png", "test_curves.png", "curves.png"} <= names
    assert re.search(r"test, best\.pt: answers +n +accuracy.*\nall +64 +0\.\d{4}", done.stdout)
    assert list((out / "wandb").glob("offline-run-*"))
    assert not any("WANDB_API_KEY" in path.read_text(errors="ignore") for path in out.rglob("*.yaml"))

    # predictions
    table = pq.read_table(out / "predictions_test.parquet").to_pylist()
    right = np.mean([row["answer"] == row["truth"] for row in table])
    assert len(table) == 64
    assert right == pytest.approx(summary["test/vqa_accuracy"])
    assert all(0 <= row["p(Edema)"] <= 1 for row in table)
    assert all(row["study_id"].startswith("s5") for row in table)

    # the log
    group = {"train/loss", "train/loss_vqa", "train/loss_chexpert", "train/lr", "train/peak_memory_gb"}
    first = metrics_of(out)[0]
    assert group | {"train/samples_per_s", "train/data_wait"} <= first.keys()

    # the same numbers from --eval_only
    before = {name: value for name, value in summary.items() if name.startswith("test/")}
    done = run_mimic([*flags, "--eval_only", "--max_samples", "64"])
    assert done.code == 0, done.stderr
    evaluated = json.loads((out / "eval_test.json").read_text())
    assert {name: evaluated[name] for name in before} == before


def overlaps(one, other) -> bool:
    """Whether two boxes share more than a pixel of both axes."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width > 1 and height > 1


def test_figures_are_whole(mimic_cxr_flags, sample_release, tmp_path, monkeypatch, recwarn):
    """Long questions with odd characters: every title lies inside the figure and over nothing, and none is cut."""
    import train_mimic_cxr as script
    from old.logging_utils import save_figure

    args = script.parse_args([*mimic_cxr_flags, "--cache_gb", "0"])
    index = open_index(tmp_path, sample_release)
    data = read_sets(index, args, None)["test"]
    row = data.row
    question = "Is there 水 $\\frac{1 at the $left$ \U0001f600 costophrenic angle? " * 4 + "The end?"
    monkeypatch.setattr(data, "row", lambda i: row(i) | {"question": question})

    # answers that are all right, and labels that are drawn
    rows = [row(i) for i in range(len(data))]
    found = {name: np.array([row[name] for row in rows]) for name in ("head", "target", "study", "type")}
    probability = np.random.default_rng(0).random((len(index.studies), 14), dtype=np.float32)
    found["index"] = np.arange(len(rows))
    found["predicted"] = found["target"]
    found["chexpert"] = probability[found["study"]]
    answers = draw_answers(data, found)
    inputs = draw_inputs(data)
    curves = draw_curves(data, found)

    for number, figure in enumerate((answers, inputs, curves)):
        recwarn.clear()
        save_figure(tmp_path / f"{number}.png", figure)
        assert [str(warning.message) for warning in recwarn] == []
        check_titles(figure)
    for figure in (answers, inputs):
        assert all("The end?" in axes.title.get_text() for axes in figure.axes)

    # what stands in the curves
    roc, binary = curves.axes[:2]
    assert re.fullmatch(r"Atelectasis: \d\.\d{3} \(n \d+\)", roc.get_legend().get_texts()[0].get_text())
    counts = [int(text.get_text()) for text in binary.texts]
    assert sum(counts) == (found["head"] == 0).sum()


def check_titles(figure) -> None:
    """Every title, and the legend, lies inside the figure, over no square and over no other."""
    boxes = [axes.get_window_extent() for axes in figure.axes if axes.images or axes.lines]
    titles = [axes.title.get_window_extent() for axes in figure.axes if axes.title.get_text()]
    assert len(titles) == len(boxes)
    legend = figure.axes[0].get_legend()
    extents = titles
    if legend:
        extents = [*titles, legend.get_window_extent()]

    frame = figure.bbox
    for extent in extents:
        assert frame.x0 <= extent.x0 <= extent.x1 <= frame.x1
        assert frame.y0 <= extent.y0 <= extent.y1 <= frame.y1
        assert not any(overlaps(extent, box) for box in boxes)
        # it overlaps itself
        assert sum(overlaps(extent, other) for other in extents) == 1


def test_out_of_memory(mimic_cxr_flags, run_mimic, tmp_path):
    """Of a really limited memory: one message with the values to try."""
    flags = [*mimic_cxr_flags, "--image_size", "512", "--max_steps", "1", "--max_samples", "64"]
    flags += ["--batch_size", "64", "--cache_gb", "0", "--output_dir", tmp_path / "a"]
    done = run_mimic(flags, address_space=600_000_000)
    assert done.code == 1
    assert re.fullmatch(r"error: out of memory at --batch_size 64; try --batch_size 32 --grad\S+ 2 .*\n", done.stderr)


def test_picture_cache(tmp_path):
    """Decoded once; a torn record is decoded again; a full disk is no error."""
    path = tmp_path / "a.jpg"
    pixels = np.arange(600 * 400, dtype=np.uint32).reshape(600, 400)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    cache = ImageCache(tmp_path / "cache.u8", 32, 5)
    first = cache.get(2, str(path))
    assert first.shape == (32, 32)
    # black beside the upright image
    assert first[:, :5].max() == 0

    # kept, unlike another one
    path.unlink()
    assert np.array_equal(cache.get(2, str(path)), first)
    with pytest.raises(FileNotFoundError):
        cache.get(1, str(path))

    # a torn record
    with open(tmp_path / "cache.u8", "r+b") as file:
        file.seek(2 * cache.record + 100)
        file.write(b"\x07\x07\x07")
    with pytest.raises(FileNotFoundError):
        cache.get(2, str(path))


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["deepspeed", "launcher"])
def test_guide_commands(mimic_cxr_flags, launcher, tmp_path):
    """The guide's own lines, for real: deepspeed --num_gpus=2 ... --use_deepspeed, and the launcher by itself."""
    config = ROOT / "configs" / "default_config.yaml"
    flags = [*mimic_cxr_flags, "--debug", "--output_dir", tmp_path / "run", "--config", config]
    command = ["deepspeed", "--num_gpus=2", MIMIC, *flags, "--use_deepspeed"]
    if launcher == "launcher":
        command = [ROOT / "launch_distributed_training.sh", "--num_gpus", "2", *flags]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "ZeRO-2, optimizer on the CPU" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2


def test_a_question_counts_for_its_own_head_and_a_label_where_it_is_known():
    import train_mimic_cxr as script

    rng = torch.Generator().manual_seed(0)
    sizes = [2, 3, 4, 5][: len(HEADS)]
    logits = [torch.randn(6, size, generator=rng) for size in sizes]
    findings = torch.randn(6, len(CHEXPERT), generator=rng)
    head = torch.arange(6) % len(HEADS)
    label = (torch.rand(6, len(CHEXPERT), generator=rng) > 0.5).float()
    known = torch.rand(6, len(CHEXPERT), generator=rng) > 0.5
    batch = {"head": head, "target": torch.ones(6, dtype=torch.long), "label": label, "known": known}
    entropy, bce = script.question_losses(logits, findings, batch)

    # each question by hand
    for question in range(6):
        own = logits[int(head[question])][question]
        assert float(entropy[question]) == pytest.approx(float(-own.log_softmax(0)[1]), rel=1e-5)
    probability = findings.sigmoid()
    right = torch.where(label > 0, probability, 1 - probability)
    assert torch.allclose(bce[known], -right.log()[known], rtol=1e-4)
    assert (bce[~known] == 0).all()
