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

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT
from PIL import Image

import deepspeed_utils
from distributed_utils import Ranks
from hardware_utils import autocast
from loop_utils import Step
from memory_utils import BatchSize
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


def write_release(root: Path, studies: list[dict], zipped: bool = False) -> tuple[Path, Path]:
    """Both releases with exactly these studies: {subject, study, split, images [(dicom, view, meaning)], labels,
    questions [(id, type, rating, main answer)]}."""
    cxr, qba = root / "cxr", root / "qba"
    tables = {"metadata": [["dicom_id", "subject_id", "study_id", "ViewPosition", "ViewCodeSequence_CodeMeaning"]]}
    tables |= {"split": [["dicom_id", "study_id", "subject_id", "split"]]}
    tables |= {"chexpert": [["subject_id", "study_id", *reversed(LABELS)]]}  # another order: found by name
    rows = []
    for study in studies:
        subject, number = study["subject"], study["study"]
        for dicom, view, meaning in study["images"]:
            path = cxr / releases.image_name(subject, number, dicom)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((20, 30), number % 250, np.uint8)).save(path)
            tables["metadata"].append([dicom, subject, number, view, meaning])
            tables["split"].append([dicom, number, subject, study["split"]])
        labels = study.get("labels", {})
        tables["chexpert"].append([subject, number, *(labels.get(name, "") for name in reversed(LABELS))])
        questions = []
        for name, kind, rating, answer in study["questions"]:
            rows.append({"patient_id": f"p{subject}", "study_id": f"s{number}", "question_id": name} | {
                "question.question_type": kind, "question.quality.rating": rating})  # fmt: skip
            details = {"answer_type": "details", "positiveness": "neg", "regions": ["spine"], "obs_entities": ["edema"]}
            answers = [details, {"answer_type": "main_answer", "modifiers": []} | answer]
            questions.append({"question_id": name, "question_type": kind, "question": f"{name}?", "answers": answers})
        path = qba / "qa" / f"p{str(subject)[:2]}" / f"p{subject}" / f"s{number}.qa.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"patient_id": f"p{subject}", "study_id": f"s{number}", "questions": questions}))
    for name, table in tables.items():
        with gzip.open(cxr / f"mimic-cxr-2.0.0-{name}.csv.gz", "wt", newline="") as file:
            csv.writer(file).writerows(table)
    (qba / "metadata").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), qba / "metadata" / "question_metadata.parquet", row_group_size=3)
    if zipped:
        with zipfile.ZipFile(qba / "qa.zip", "w") as archive:
            for path in sorted((qba / "qa").rglob("*.json")):
                archive.write(path, path.relative_to(qba))
        shutil.rmtree(qba / "qa")
    return cxr, qba


def pos(**more) -> dict:
    return {"positiveness": "pos"} | more


STUDIES = [
    {
        "subject": 10000001, "study": 50000001, "split": "train",
        "images": [("bb", "AP", ""), ("aa", "AP", ""), ("cc", "LATERAL", "")],
        "labels": {"Edema": "1.0", "Fracture": "-1.0", "Pneumonia": "0.0"},
        "questions": [
            ("q1", "D02_has_finding", "4_A", pos()),
            ("q2", "D02_has_finding", "5_A+", {"positiveness": "neg"}),
            ("q3", "B04_is_normal", "6_A++", pos()),
            ("q4", "D04_how_severe_is_finding", "3_B", pos(modifiers=[["spread", "focal"], ["severity", "moderate"]])),
            ("q5", "D03_where_is_finding", "3_B", pos(regions=["Left Lung Base", "spine"])),
            ("q6", "D01_describe_finding", "2_C", pos(obs_entities=["pleural effusion"])),
            ("q7", "A_indication", None, pos(obs_entities=["edema"])),
            ("q8", "B01_describe_all", "6_A++", pos()),
            ("q9", "D03_where_is_finding", "4_A", pos(regions=["azygos fissure"])),
            ("q10", "D02_has_finding", "4_A", {"positiveness": "neutral"}),
        ],
    },
    {
        "subject": 10000001, "study": 50000002, "split": "train",
        "images": [("dd", "AP", ""), ("ee", "PA", "")],
        "questions": [("q1", "C03_is_abnormal_region", "1_D", pos()), ("q2", "B03_is_abnormal", "3_B", pos())],
    },
    {
        "subject": 11000003, "study": 50000003, "split": "validate", "images": [("ff", "", "postero-anterior")],
        "questions": [("q1", "B12_describe_device", "4_A", pos(obs_entities=["Support Devices"]))],
    },
    {
        "subject": 11000004, "study": 50000004, "split": "test", "images": [("gg", "", "")],
        "questions": [("q1", "D02_has_finding", "4_A", pos())],
    },
    {
        "subject": 11000005, "study": 50000005, "split": "test", "images": [("hh", "LL", "")],
        "questions": [("q1", "D02_has_finding", "4_A", pos())],
    },
    {
        "subject": 11000006, "study": 50000006, "split": "test", "images": [("ii", "AP", ""), ("jj", "LATERAL", "")],
        "labels": {"Edema": "0.0"}, "questions": [("q1", "D02_has_finding", "4_A", pos())],
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return write_release(tmp_path_factory.mktemp("release"), STUDIES)


def rows_of(index: mci.Index) -> dict[str, list[tuple]]:
    """{split: [(dicom, question id, head, class name)]} of an index."""
    found, heads = {}, list(HEADS.items())
    for split in releases.SPLITS:
        questions = index.questions(split)
        found[split] = []
        for row in (questions.take(i) for i in range(len(questions))):
            head, names = heads[row["head"]]
            dicom = index.studies["dicom_id"][row["study"]].as_py()
            assert row["question"] == f"{row['id']}?"
            found[split].append((dicom, row["id"], head, names[row["target"]]))
    return found


Q1, Q2, Q3 = ("aa", "q1", "binary", "yes"), ("aa", "q2", "binary", "no"), ("aa", "q3", "binary", "no")
Q4, Q5 = ("aa", "q4", "severity", "moderate"), ("aa", "q5", "region", "left lung base")
Q6, Q7 = ("aa", "q6", "category", "pleural effusion"), ("aa", "q7", "category", "edema")
OTHER = ("ee", "q2", "binary", "yes")


@pytest.mark.parametrize(
    ("grade", "train"),
    [("A++", [Q3]), ("A+", [Q2, Q3]), ("A", [Q1, Q2, Q3]), ("B", [Q1, Q2, Q3, Q4, Q5, OTHER]),
     ("C", [Q1, Q2, Q3, Q4, Q5, Q6, OTHER]), ("D", [Q1, Q2, Q3, Q4, Q5, Q6, ("ee", "q1", "binary", "yes"), OTHER]),
     ("all", [Q1, Q2, Q3, Q4, Q5, Q6, Q7, ("ee", "q1", "binary", "yes"), OTHER])],
)  # fmt: skip
def test_grades_select_exactly_their_questions(release, tmp_path, grade, train):
    index = mci.open_index(tmp_path, *release, grade)
    found = rows_of(index)
    assert found["train"] == train
    rated = "A" in grade and len(grade) > 1
    assert found["validate"] == ([] if rated else [("ff", "q1", "category", "support devices")])
    assert found["test"] == ([] if rated else [("ii", "q1", "binary", "yes")])
    if grade != "all":
        assert index.facts["ratings"] == {"D": 1, "C": 1, "B": 3, "A": 7, "A+": 1, "A++": 2, "unrated": 1}
    left = index.facts["left_out"]
    if grade == "B":
        assert left["below the grade, or unrated"] == 3
        assert left[f"B01_describe_all: {index_build.NOT_ASKED}"] == 1
        assert left["D03_where_is_finding: region 'azygos fissure' not in the vocabulary"] == 1
        assert left["D02_has_finding: positiveness 'neutral'"] == 1
        assert sum(left.values()) + sum(map(len, found.values())) == 14  # of the studies with a picture


def main_answers(*answers: dict) -> list[dict]:
    return [{"answer_type": "main_answer"} | answer for answer in answers]


def neg(**more) -> dict:
    return {"positiveness": "neg"} | more


@pytest.mark.parametrize(
    ("kind", "answers", "target"),
    [
        ("B08_describe_subcat", [neg(obs_entities=["pneumothorax"]), pos(obs_entities=["edema"])], "edema"),
        ("B08_describe_subcat", [neg(obs_entities=["pneumothorax"]), neg(obs_entities=["edema"])], "no finding"),
        ("B09_describe_abnormal_subcat", [pos(obs_entities=["opacity", "Consolidation"])], "consolidation"),
        ("D01_describe_finding", [neg(obs_entities=["scar"])], None),
        ("C01_describe_region", [neg(regions=["lungs"]), pos(regions=["left lung"])], "left lung"),
        ("C01_describe_region", [neg(regions=["left lung"])], "left lung"),
        ("D03_where_is_finding", [neg(regions=["lungs"])], None),
        ("D04_how_severe_is_finding", [pos(modifiers=[["severity", "tiny"], ["severity", "mild"]])], "mild"),
        ("has_finding", [neg(), pos()], "no"),
        ("is_normal_region", [neg()], "yes"),
        ("describe_all", [pos(obs_entities=["edema"])], ""),
        ("B16_has_imaging_artifacts", [pos()], ""),
    ],
)
def test_targets(kind, answers, target):
    """What is absent is no finding and has no place; of several answers or names the first that has a class."""
    head = head_of(kind)
    assert (head is None) == (target == "")
    if head:
        found, why = target_of({"question_type": kind, "answers": main_answers(*answers)}, head)
        assert (found is None) == (target is None) == bool(why)
        assert target is None or HEADS[head][found] == target


def test_views(release, tmp_path):
    """PA before AP, of several the first dicom_id; a blank view by its code, else not used."""
    pictures = {}
    for view in releases.VIEWS:
        index = mci.open_index(tmp_path, *release, "B", view)
        pictures[view] = index.studies["dicom_id"].to_pylist()
        assert index.facts["studies"]["studies"] == 6
        assert index.facts["studies"]["pictures without a view"] == 1
        assert index.facts["studies"]["studies without such a picture"] == 6 - len(pictures[view])
    assert pictures["frontal"] == ["aa", "ee", "ff", "ii"]
    assert pictures["PA"] == ["ee", "ff"]
    assert pictures["AP"] == ["aa", "dd", "ii"]
    assert pictures["lateral"] == ["cc", "hh", "jj"]


def test_chexpert_policies(release, tmp_path):
    import train_mimic_cxr as script

    args = script.parse_args(["--mimic_cxr_path", str(release[0]), "--mimic_qa_path", str(release[1])])
    index = mci.open_index(tmp_path, *release, "B")
    edema, fracture, pneumonia, heart = (LABELS.index(n) for n in ("Edema", "Fracture", "Pneumonia", "Cardiomegaly"))
    for policy, value, known in (("ignore", 0, 0), ("positive", 1, 1), ("negative", 0, 1), ("soft", 0.5, 1)):
        args.chexpert_uncertain, args.cache_gb = policy, 0
        sets = read_sets(index, args, lambda texts, **_: dict.fromkeys(("input_ids", "attention_mask")))
        data = sets["train"]
        batch = data.collate([data[0]])
        assert (batch["label"][0, edema], batch["label"][0, pneumonia]) == (1, 0)
        assert batch["known"][0, [edema, pneumonia, heart]].tolist() == [True, True, False]
        assert (batch["label"][0, fracture], batch["known"][0, fracture]) == (value, bool(known))
    assert chexpert_truth(index.studies, np.array([0]))[0, [edema, fracture, pneumonia, heart]].tolist() == [
        1,
        -1,
        0,
        -1,
    ]


def test_zip_exports_and_folders_give_one_index(release, tmp_path):
    reference = rows_of(mci.open_index(tmp_path / "index", *release, "B"))
    zipped = write_release(tmp_path / "zipped", STUDIES, zipped=True)
    assert rows_of(mci.open_index(tmp_path / "index", *zipped, "B")) == reference
    exports = tmp_path / "qba" / "exports"
    shutil.copytree(zipped[1], exports / "B_frontal")
    shutil.copytree(zipped[1], exports / "A_frontal")
    assert rows_of(mci.open_index(tmp_path / "index", zipped[0], tmp_path / "qba", "B")) == reference
    assert releases.find_release(tmp_path / "qba", "A+").name == "A_frontal"
    for grade in ("C", "all"):
        with pytest.raises(mci.InputError, match=rf"exports: holds A_frontal, B_frontal, not grade {grade}"):
            releases.find_release(tmp_path / "qba", grade)
    shutil.rmtree(exports / "A_frontal")
    assert releases.find_release(tmp_path / "qba", "A+").name == "B_frontal"  # has it, too
    assert len(list((tmp_path / "index").iterdir())) == 3  # each has a folder of its own


def test_missing_pictures_are_listed_and_come_back(tmp_path):
    cxr, qba = write_release(tmp_path, STUDIES)
    picture = cxr / releases.image_name(10000001, 50000002, "ee")
    content = picture.read_bytes()
    picture.unlink()
    with pytest.raises(mci.InputError, match=r"1 picture files do not exist.*ee\.jpg.*--max_missing"):
        mci.open_index(tmp_path / "index", cxr, qba)
    index = mci.open_index(tmp_path / "index", cxr, qba, max_missing=1)
    assert rows_of(index)["train"] == [Q1, Q2, Q3, Q4, Q5]
    assert index.facts["left_out"]["picture file missing"] == 1
    assert (index.folder / "missing.txt").read_text() == f"{picture.relative_to(cxr)}\n"
    picture.write_bytes(content)
    assert rows_of(mci.open_index(tmp_path / "index", cxr, qba))["train"] == [Q1, Q2, Q3, Q4, Q5, OTHER]


def test_an_interrupted_index_goes_on(mimic_cxr_flags, tmp_path, monkeypatch):
    """Killed after some parts: those are not read again, and the index is the one of an unbroken build."""
    paths = Path(mimic_cxr_flags[1]), Path(mimic_cxr_flags[3])
    whole = mci.open_index(tmp_path / "whole", *paths)
    real, built = index_build.build_part, []

    def part(folder, number, *rest):
        if len(built) == 3:
            raise KeyboardInterrupt
        built.append(number)
        real(folder, number, *rest)

    monkeypatch.setattr(index_build, "build_part", part)
    with pytest.raises(KeyboardInterrupt):
        mci.open_index(tmp_path / "broken", *paths)
    built.clear()
    monkeypatch.setattr(
        index_build, "build_part", lambda folder, number, *rest: built.append(number) or real(folder, number, *rest)
    )
    resumed = mci.open_index(tmp_path / "broken", *paths)
    assert built == list(range(3, len(whole.facts["rows"])))
    assert {k: v for k, v in resumed.facts.items() if k != "seconds"} == {
        k: v for k, v in whole.facts.items() if k != "seconds"
    }
    for file in whole.folder.glob("*.arrow"):
        assert (resumed.folder / file.name).read_bytes() == file.read_bytes()
    built.clear()
    mci.open_index(tmp_path / "broken", *paths)  # a second run starts from it at once
    assert built == []


def whole_rows(index: mci.Index) -> list:
    """Every question of an index, and its table of studies."""
    questions = [index.questions(split) for split in releases.SPLITS]
    return [[part.take(i) for i in range(len(part))] for part in questions] + [index.studies.to_pydict()]


def flip(content: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(content)
    changed[rng.integers(len(content))] ^= 1 << rng.integers(8)
    return bytes(changed)


def truncate(content: bytes, rng: np.random.Generator) -> bytes:
    return content[: rng.integers(len(content))]


def zero_page(content: bytes, rng: np.random.Generator) -> bytes:
    first = rng.integers(len(content)) // 512 * 512
    return content[:first] + bytes(len(content[first : first + 512])) + content[first + 512 :]


def damage(path: Path, content: bytes) -> None:
    """Other bytes under the old modification time, as a disk that rots leaves them."""
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_damaged_index_files_give_no_wrong_questions(mimic_cxr_flags, tmp_path, capsys):
    """40 damaged files, each mended or refused: flipped bits, lost ends, pages of zeros, files in another's place."""
    paths = Path(mimic_cxr_flags[1]), Path(mimic_cxr_flags[3])
    whole = mci.open_index(tmp_path / "index", *paths)
    other = mci.open_index(tmp_path / "index", *paths, "A").folder
    intact = {path.name: path.read_bytes() for path in whole.folder.glob("*.[aj]*")}
    expected = whole_rows(whole)
    rng = np.random.default_rng(0)
    names = ["studies.arrow", "index.json"]
    names += [sorted(name for name in intact if name.endswith(end))[1] for end in ("-train.arrow", "-test.arrow")]
    parts = sorted(name for name in intact if re.fullmatch(r"part-\d+\.json", name))
    cases = [(name, change) for name in names for change in (flip, flip, truncate, zero_page)] * 2
    cases += [(name, other) for name in names] + [(parts[0], change) for change in (flip, truncate, zero_page)]
    for name, change in cases:
        path = whole.folder / name
        damage(path, change(intact[name], rng) if callable(change) else (change / name).read_bytes())
        if name in parts:  # is read again where a build goes on
            (whole.folder / "index.json").unlink()
        index = mci.open_index(tmp_path / "index", *paths)
        assert whole_rows(index) == expected, (name, change)
        assert {k: v for k, v in index.facts.items() if k != "seconds"} == {
            k: v for k, v in whole.facts.items() if k != "seconds"
        }
    (whole.folder / names[2]).unlink()
    assert whole_rows(mci.open_index(tmp_path / "index", *paths)) == expected
    for first, second in ((parts[0], parts[1]), (names[2], parts[2].replace(".json", "-train.arrow"))):
        damage(whole.folder / first, intact[second])
        damage(whole.folder / second, intact[first])
        (whole.folder / "index.json").unlink()
        index = mci.open_index(tmp_path / "index", *paths)
        assert whole_rows(index) == expected, (first, second)
    assert len(cases) + 3 >= 40
    capsys.readouterr()
    damage(whole.folder / names[2], flip(intact[names[2]], rng))
    mci.open_index(tmp_path / "index", *paths)
    said = capsys.readouterr()
    line = f"warning: {whole.folder / names[2]}: damaged (its sha256 is not the one written down); it is built again"
    assert said.err.splitlines() == [line]
    assert said.out.count("building the index") == 1


def test_an_index_without_checksums_is_built_again(release, tmp_path, capsys):
    """As versions before this one wrote it: said in one line, and the index is the same."""
    whole = mci.open_index(tmp_path, *release)
    expected = rows_of(whole)
    for path in whole.folder.glob("*.json"):
        facts = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in facts.items() if key not in ("sha256", "files")}))
    capsys.readouterr()
    assert rows_of(mci.open_index(tmp_path, *release)) == expected
    said = f"{whole.folder}/index.json: damaged, or of an earlier version without checksums; it is built again"
    assert capsys.readouterr().out.count(said) == 1
    mci.open_index(tmp_path, *release)
    assert capsys.readouterr().out == ""


def test_an_index_that_stays_damaged_is_refused(release, tmp_path, monkeypatch):
    """A disk that gives back other bytes than were written."""
    mci.open_index(tmp_path, *release)
    monkeypatch.setattr(index_files, "file_sha256", lambda path: "0" * 64)
    with pytest.raises(mci.InputError, match=r"\.arrow: damaged again after it was written.*--index_dir"):
        mci.open_index(tmp_path, *release)


def test_an_index_on_a_disk_one_may_only_read(release, tmp_path):
    """Is used as it is; a damaged one is refused in one line."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        index = mci.open_index(disk, *release)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        expected = whole_rows(index)
        assert whole_rows(mci.open_index(disk, *release)) == expected
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        path = index.folder / "part-00000-train.arrow"
        path.write_bytes(flip(path.read_bytes(), np.random.default_rng(0)))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(
            mci.InputError, match=r"cannot write here \(Read-only file system\); choose another --index_d"
        ):
            mci.open_index(disk, *release)
    finally:
        del index
        subprocess.run(["umount", disk], check=True)


def test_ranks_mend_an_index_together(mimic_cxr_flags, zygote, tmp_path):
    """One of 2 ranks meets the damage; both build, and one line says so."""
    index = mci.open_index(tmp_path / "index", Path(mimic_cxr_flags[1]), Path(mimic_cxr_flags[3]))
    path = index.folder / "part-00001-train.arrow"
    content = path.read_bytes()
    path.write_bytes(flip(content, np.random.default_rng(0)))
    words = [
        *mimic_cxr_flags,
        "--index_dir",
        tmp_path / "index",
        "--max_steps",
        "1",
        "--max_samples",
        "24",
        "--batch_size",
        "4",
    ]
    done = zygote(MIMIC, *words, "--output_dir", tmp_path / "run", ranks=2)
    assert done.code == 0, done.stderr
    assert done.stderr.count("damaged") == 1
    assert path.read_bytes() == content


def test_of_two_jobs_one_waits(release, tmp_path, capsys):
    """The folder is locked by another job that builds; when it is gone, this one builds what is lacking."""
    folder = mci.index_folder(tmp_path, index_build.Source(*release, "B", "frontal"))
    folder.mkdir()
    other = [mci.RunLock(folder / ".lock", wait=0)]
    threading.Timer(2.5, other.clear).start()
    assert rows_of(mci.open_index(tmp_path, *release, "B"))["train"] == [Q1, Q2, Q3, Q4, Q5, OTHER]
    assert capsys.readouterr().out.count("another run builds the index") == 1


NOTHING_LEFT_OUT = [
    {"subject": 10000001, "study": 50000001, "split": "train", "images": [("aa", "PA", "")],
     "questions": [("q1", "D02_has_finding", "4_A", pos()), ("q2", "B03_is_abnormal", "3_B", {"positiveness": "neg"})]},
    {"subject": 11000003, "study": 50000003, "split": "validate", "images": [("bb", "PA", "")],
     "questions": [("q1", "D02_has_finding", "4_A", pos())]},
    {"subject": 11000004, "study": 50000004, "split": "test", "images": [("cc", "PA", "")],
     "questions": [("q1", "D02_has_finding", "4_A", pos())]},
]  # fmt: skip


def test_a_run_on_data_of_which_nothing_is_left_out(mimic_cxr_flags, zygote, tmp_path):
    """The table of what was left out has no rows."""
    cxr, qba = write_release(tmp_path, NOTHING_LEFT_OUT)
    words = [*mimic_cxr_flags, "--mimic_cxr_path", cxr, "--mimic_qa_path", qba, "--index_dir", tmp_path / "index"]
    done = zygote(MIMIC, *words, "--max_steps", "1", "--output_dir", tmp_path / "run")
    assert done.code == 0, done.stderr
    assert "questions left out: none" in done.stdout
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_table_without_rows(capsys):
    from logging_utils import print_table

    print_table("questions left out", {})
    assert capsys.readouterr().out == "questions left out: none\n"
    print_table("counts", {"a": {"n": 1}})
    assert capsys.readouterr().out.split() == ["counts", "n", "a", "1"]


def test_a_trial_reads_few_studies(release, tmp_path):
    index = mci.open_index(tmp_path, *release, "B", limit=1)
    assert index.studies["dicom_id"].to_pylist() == ["aa", "ff", "ii"]
    assert len(mci.open_index(tmp_path, *release, "B").studies) == 4


def test_a_full_disk_ends_the_build_and_it_goes_on(mimic_cxr_flags, zygote, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        words = [*mimic_cxr_flags, "--debug", "--cache_gb", "0", "--output_dir", tmp_path / "run", "--index_dir"]
        done = zygote(MIMIC, *words, disk, ranks=2)
        assert done.code == 1
        assert done.stderr.count("\n") == 1
        assert re.search(r"error: \S+: not written \(No space left on device\); free space and", done.stderr)
        shutil.copytree(disk, tmp_path / "roomy")
    finally:
        subprocess.run(["umount", disk], check=True)
    assert zygote(MIMIC, *words, tmp_path / "roomy").code == 0


def test_ranks_share_the_index_and_get_the_same(mimic_cxr_flags, zygote, tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    mci.open_index(alone, Path(mimic_cxr_flags[1]), Path(mimic_cxr_flags[3]))
    done = zygote(MIMIC, *mimic_cxr_flags, "--index_dir", shared, "--output_dir", tmp_path / "run", "--debug", ranks=3)
    assert done.code == 0, done.stderr
    files = {path.name: path.read_bytes() for path in alone.rglob("*.arrow")}
    assert {path.name: path.read_bytes() for path in shared.rglob("*.arrow")} == files
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["world_size"] == 3
    assert summary["test/vqa_majority"] > 0


def test_no_row_is_kept_in_memory(mimic_cxr_flags, tmp_path):
    """A thousand copies of the index take no more Python objects than one."""
    import gc

    index = mci.open_index(tmp_path, Path(mimic_cxr_flags[1]), Path(mimic_cxr_flags[3]))
    one = index.questions("train")
    gc.collect()
    before = len(gc.get_objects())
    many = index.questions("train", copies=50)
    gc.collect()
    assert len(many) == 50 * len(one)
    assert len(gc.get_objects()) - before < 50 * len(index.facts["rows"]) * 12
    assert many.take(len(one) * 49 + 3) == one.take(3)


def test_metrics_against_scikit_learn(release, tmp_path):
    from sklearn import metrics as sk

    index = mci.open_index(tmp_path, *release, "B")
    rng = np.random.default_rng(0)
    count, kinds = 400, np.array(["D02_has_finding", "D03_where_is_finding", "D04_how_severe_is_finding", "unseen"])
    which = rng.integers(0, 4, count)
    head = np.array([0, 2, 3, 0])[which]
    sizes = np.array([len(names) for names in HEADS.values()])[head]
    found = {"head": head, "target": rng.integers(0, sizes), "predicted": rng.integers(0, sizes), "type": kinds[which]}
    found["target"] = np.where(rng.random(count) < 0.5, found["predicted"], found["target"])
    studies = np.array([0, 1, 2, 3])
    truth = np.where(rng.random((4, 14)) < 0.5, 1, 0).astype(np.int8)
    truth[:, 3] = 1  # one class only
    truth[0, 4] = -1
    found |= {"study": rng.choice(studies, count), "index": np.arange(count)}
    probability = rng.random((4, 14)).astype(np.float32)
    found["chexpert"] = probability[found["study"]]
    index.studies = pa.record_batch({name: truth[:, i] for i, name in enumerate(LABELS)})
    got = answer_metrics("test", found, index.facts["classes"])
    got |= chexpert_metrics("test", found, index.studies)
    assert got["test/vqa_accuracy"] == pytest.approx(sk.accuracy_score(found["target"], found["predicted"]), abs=1e-6)
    for name, number in (("binary", 0), ("region", 2), ("severity", 3)):
        rows = head == number
        pair = found["target"][rows], found["predicted"][rows]
        assert got[f"test/vqa_accuracy/{name}"] == pytest.approx(sk.accuracy_score(*pair), abs=1e-6)
        assert got[f"test/vqa_f1/{name}"] == pytest.approx(sk.f1_score(*pair, average="macro"), abs=1e-6)
    usual = {"D02_has_finding": 0, "D03_where_is_finding": REGIONS.index("left lung base")}
    usual["D04_how_severe_is_finding"] = 2
    guess = [usual.get(kind, -1) == target for kind, target in zip(found["type"], found["target"], strict=True)]
    assert got["test/vqa_majority"] == pytest.approx(np.mean(guess), abs=1e-9)
    areas = []
    for i, label in enumerate(LABELS):
        rows = truth[:, i] >= 0
        if len(set(truth[rows, i])) < 2:
            assert got[f"test/chexpert_auroc/{label}"] is None
            continue
        areas.append(sk.roc_auc_score(truth[rows, i], probability[rows, i]))
        assert got[f"test/chexpert_auroc/{label}"] == pytest.approx(areas[-1], abs=1e-6)
        precision = sk.average_precision_score(truth[rows, i], probability[rows, i])
        assert got[f"test/chexpert_ap/{label}"] == pytest.approx(precision, abs=1e-6)
    assert 0 < len(areas) < 14
    assert got["test/chexpert_auroc"] == pytest.approx(np.mean(areas), abs=1e-6)


def test_losses_of_a_split_are_those_of_training(mimic_cxr_flags, tmp_path):
    """The evaluation's loss and its parts: batch_loss of the whole split as one batch, uncertain labels as asked."""
    import train_mimic_cxr as script

    args = script.parse_args([*mimic_cxr_flags, "--chexpert_uncertain", "soft", "--batch_size", "7", "--cache_gb", "0"])
    index = mci.open_index(tmp_path, Path(mimic_cxr_flags[1]), Path(mimic_cxr_flags[3]))
    model, tokenizer = script.build_model(args, "no", CPU)
    data = read_sets(index, args, tokenizer)["val"]
    metrics = script.evaluate(model, data, args.batch_size, args).metrics
    batch = data.collate([data[i] for i in range(len(data))])
    with torch.no_grad():
        counts = script.count_targets(Step(len(data), len(data), 0, [batch]))
        expected = script.batch_loss(model.eval(), batch, counts, args.chexpert_weight)
    for name, value in zip(("loss", "loss_vqa", "loss_chexpert"), expected.tolist(), strict=True):
        assert metrics[f"val/{name}"] == pytest.approx(value, rel=1e-5), name


def test_the_best_validation_is_neither_run_nor_logged_twice(mimic_cxr_flags, zygote, tmp_path):
    """One line of metrics.jsonl for each epoch's validation, also after a resume; summary.json has the best one's."""
    out = tmp_path / "run"
    words = [
        *mimic_cxr_flags,
        "--batch_size",
        "16",
        "--max_samples",
        "40",
        "--learning_rate",
        "1e-3",
        "--output_dir",
        out,
    ]
    for epochs in (2, 3):
        done = zygote(MIMIC, *words, "--epochs", epochs, "--save_predictions", "--resume_from", "auto")
        assert done.code == 0, done.stderr
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        validated = [line for line in lines if "val/loss" in line]
        assert [line["step"] for line in validated] == [3 * (epoch + 1) for epoch in range(epochs)]
        summary = json.loads((out / "summary.json").read_text())
        best = next(line for line in validated if line["step"] == summary["best_step"])
        assert best["val/vqa_accuracy"] == max(line["val/vqa_accuracy"] for line in validated)
        assert {k: v for k, v in best.items() if "/" in k} == {k: v for k, v in summary.items() if k.startswith("val/")}
        table = pq.read_table(out / "predictions_val.parquet").to_pylist()
        right = np.mean([row["answer"] == row["truth"] for row in table])
        assert right == pytest.approx(best["val/vqa_accuracy"])
        shown = re.search(
            r"val, best\.pt: loss +mean\nloss +([\d.]+)\nloss_vqa +([\d.]+)\nloss_chexpert +([\d.]+)\n", done.stdout
        )
        names = ("val/loss", "val/loss_vqa", "val/loss_chexpert")
        assert [float(text) for text in shown.groups()] == [pytest.approx(best[name], abs=1e-4) for name in names]


def test_the_chexpert_head_sees_the_picture_alone(mimic_cxr_flags, tmp_path):
    import train_mimic_cxr as script

    args = script.parse_args([*mimic_cxr_flags, "--dropout", "0"])
    model, tokenizer = script.build_model(args, "no", CPU)
    model.eval()
    picture = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    tokens = tokenizer(["is there an effusion?", "where is it?"], padding=True, return_tensors="pt")
    a = model(picture, tokens["input_ids"], tokens["attention_mask"])
    b = model(picture, tokens["input_ids"].flip(0), tokens["attention_mask"].flip(0))
    assert torch.equal(a[-1], b[-1])
    assert not torch.equal(a[0], b[0])
    assert [logits.shape[1] for logits in a] == [2, 14, 26, 4, 14]
    flipped = model(picture.flip(3), tokens["input_ids"], tokens["attention_mask"])
    assert not torch.allclose(flipped[2], a[2], atol=1e-4)  # the side of a finding can be seen


def test_checkpointing_and_freezing(mimic_cxr_flags):
    """Recomputed activations give the same gradients; frozen encoders have none; BERT's unused pooler is frozen."""
    import train_mimic_cxr as script

    grads = []
    for more in ([], ["--gradient_checkpointing"], ["--freeze_image", "--freeze_text"]):
        args = script.parse_args([*mimic_cxr_flags, "--dropout", "0", *more])
        model, tokenizer = script.build_model(args, "no", CPU)
        tokens = tokenizer(["is there an effusion?"], return_tensors="pt")
        picture = torch.arange(64 * 64).view(1, 1, 64, 64).to(torch.uint8)
        out = model.train()(picture, tokens["input_ids"], tokens["attention_mask"])
        sum(logits.square().sum() for logits in out).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.allclose(grads[0][name], grads[1][name], rtol=1e-5, atol=1e-7) for name in grads[0])
    assert not any("pooler" in name for name in grads[0])
    assert any(name.startswith("image.") for name in grads[0])
    assert any(name.startswith("text.") for name in grads[0])
    assert not any(name.startswith(("image.", "text.")) for name in grads[2])


def tiny_text_encoder(kind: str, attention: str) -> torch.nn.Module:
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "GPT2":
        sizes = {"vocab_size": 50, "n_embd": 64, "n_layer": 2, "n_head": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(1)
    return getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation=attention)


@pytest.mark.parametrize(
    ("kind", "attention", "ready"),
    [
        ("Bert", "sdpa", True), ("Roberta", "sdpa", True), ("DistilBert", "sdpa", True), ("Electra", "sdpa", True),
        ("Bert", "eager", False), ("Roberta", "eager", False), ("DistilBert", "eager", False),
        ("GPT2", "sdpa", False), ("MPNet", "eager", False), ("DebertaV2", "eager", False),
    ],
)  # fmt: skip
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
        for precision in ("no", "bf16"):
            with torch.no_grad(), autocast(CPU, precision):
                plain = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
                given = encoder(input_ids=ids, attention_mask=broadcast_mask(mask.long())).last_hidden_state
            assert torch.equal(plain, given)


def test_the_model_does_not_read_its_mask_back(mimic_cxr_flags, monkeypatch):
    """transformers asks `padding_mask.all()` of a plain mask: on a GPU one wait in each forward pass."""
    import transformers.masking_utils as masking

    import train_mimic_cxr as script

    asked = []
    real = masking._ignore_bidirectional_mask_sdpa
    monkeypatch.setattr(masking, "_ignore_bidirectional_mask_sdpa", lambda *a, **k: asked.append(1) or real(*a, **k))
    args = script.parse_args([*mimic_cxr_flags, "--dropout", "0"])
    model, tokenizer = script.build_model(args, "no", CPU)
    tokens = tokenizer(["is there an effusion?", "where?"], padding=True, return_tensors="pt")
    picture, asked[:] = torch.zeros(2, 1, 64, 64, dtype=torch.uint8), []
    ready = model.eval()(picture, tokens["input_ids"], tokens["attention_mask"])
    assert not asked
    model.ready_mask = False
    plain = model(picture, tokens["input_ids"], tokens["attention_mask"])
    assert asked
    assert all(torch.equal(a, b) for a, b in zip(ready, plain, strict=True))


def test_checkpointing_finds_the_layers():
    """Of encoders whose layers have other names; one that has none is an error."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    for kind in ("ViT", "Bert", "Roberta", "SiglipVision"):
        config = getattr(transformers, f"{kind}Config")(**sizes)
        assert len(layers_of(getattr(transformers, f"{kind}Model")(config), kind)) == 3
    with pytest.raises(mci.InputError, match="no such: --gradient_checkpointing does not know its layers"):
        layers_of(torch.nn.Linear(2, 2), "no such")


def test_optimizer_state_takes_the_format_of_the_weights():
    """The fused AdamW walks through memory: state from a checkpoint must lie as channels_last weights do."""
    import deepspeed_utils as dsu

    layer = torch.nn.Conv2d(3, 8, 4).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    saved = {name: torch.randn(p.shape) for name, p in layer.named_parameters()}
    dsu.restore_optimizer(layer, optimizer, None, {}, {"step": 3, "exp_avg": saved, "exp_avg_sq": saved})
    state = optimizer.state[layer.weight]
    assert state["exp_avg"].stride() == layer.weight.stride()
    assert torch.equal(state["exp_avg_sq"], saved["weight"])


def test_precision_of_the_deepspeed_file():
    """The guide's JSON has fp16 enabled: taken where there is a GPU; a given --mixed_precision stands."""

    config = {"fp16": {"enabled": True, "loss_scale": 0}, "bf16": {"enabled": False}}
    assert choose_precision_with(config, "auto", CPU)[0] == "no"
    assert config == {"fp16": {"loss_scale": 0}, "bf16": {}}  # nothing left that fill_config could find wrong
    assert choose_precision_with({"bf16": {"enabled": True}}, "no", CPU)[0] == "no"
    assert choose_precision_with(None, "bf16", CPU)[0] == "bf16"


@pytest.mark.soak
@pytest.mark.parametrize("name", ["deepspeed_config", pytest.param("deepspeed_zero3", marks=pytest.mark.soak)])
def test_our_own_deepspeed_files(mimic_cxr_flags, zygote, tmp_path, name):
    """As they are, in bf16: offload, checkpointing, a frozen encoder; then DDP goes on from there."""
    words = [*mimic_cxr_flags, "--mixed_precision", "bf16", "--batch_size", "4", "--max_samples", "40", "--freeze_text"]
    words += ["--output_dir", tmp_path / "run", "--quality_grade", "all", "--log_every", "1", "--auto_batch"]
    file = ROOT / "configs" / f"{name}.json"
    done = zygote(MIMIC, *words, "--max_steps", "2", "--deepspeed_config", file, ranks=2)
    assert done.code == 0, done.stderr
    assert re.search(rf"checkpointing:? +True \({name}\.json\)", done.stdout), done.stdout
    assert "bf16" in done.stdout
    done = zygote(MIMIC, *words, "--max_steps", "3", "--use_ddp", "--resume_from", "auto", ranks=2)
    assert done.code == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3]


@pytest.mark.soak
def test_banner_says_where_values_come_from(mimic_cxr_flags, zygote, tmp_path):
    """file < hardware < command line."""
    config = tmp_path / "my.yaml"
    config.write_text("batch_size: 3\ngradient_accumulation_steps: 7\nlearning_rate: 2.0e-3\nepochs: 9\n")
    flags = [
        *(word for word in mimic_cxr_flags if word != "--no_auto_optimize"),
        "--config",
        config,
        "--max_steps",
        "1",
    ]
    flags = [word for word in flags if word not in ("--num_workers", "0")] + ["--max_samples", "20", "--epochs", "4"]
    done = zygote(MIMIC, *flags, "--output_dir", tmp_path / "a")
    assert done.code == 0, done.stderr
    assert "8 per GPU (hardware) x 32 accumulation (hardware) x 1 = 256" in done.stdout
    assert "0.002 (my.yaml)" in done.stdout
    assert "4 epochs (command line)" in done.stdout
    done = zygote(MIMIC, *flags, "--output_dir", tmp_path / "b", "--batch_size", "4")
    assert "4 per GPU (command line) x 64 accumulation (hardware) x 1 = 256" in done.stdout
    done = zygote(MIMIC, *flags, "--output_dir", tmp_path / "c", "--no_auto_optimize")
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


def test_the_guides_own_yaml(mimic_cxr_flags, zygote, tmp_path):
    """As the guide writes it: one line for each key that is named otherwise here; the command line wins."""
    (tmp_path / "config.yaml").write_text(GUIDE_YAML)
    words = [*mimic_cxr_flags, "--config", tmp_path / "config.yaml", "--max_steps", "1", "--max_samples", "40"]
    done = zygote(MIMIC, *words, "--output_dir", tmp_path / "run", "--gradient_accumulation_steps", "1", ranks=2)
    assert done.code == 0, done.stderr
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
    assert (args.use_deepspeed, args.batch_size, args.mixed_precision, args.fp16) == (True, 16, "no", None)
    assert guide_keys(args.config) == []


def test_the_guides_yaml_where_the_processes_are_counted(mimic_cxr_flags, tmp_path, monkeypatch, capsys):
    """12 workers for the 4 processes of a node are 3 each; fp16 is taken on a GPU; what has no meaning is said."""
    import train_mimic_cxr as script

    flags = [word for word in mimic_cxr_flags if word not in ("--num_workers", "0")]
    path = tmp_path / "config.yaml"
    path.write_text(GUIDE_YAML.replace("training:", "pin_memory: true\ntraining:"))
    args = script.parse_args([*flags, "--config", str(path)])
    said = "\n".join([*translate_guide_keys(args, on_gpu=True, processes_per_node=4), ""])
    assert (
        "config.yaml: training.dataloader_num_workers 12 -> --num_workers 3 (each of the node's 4 processes)\n" in said
    )
    assert "config.yaml: training.fp16 true -> --mixed_precision fp16\n" in said
    assert "config.yaml: pin_memory true -> nothing to set here: done by itself on a GPU\n" in said
    assert (args.num_workers, args.mixed_precision, args.source["num_workers"]) == (3, "fp16", "config.yaml")
    args = script.parse_args([*flags, "--config", str(path), "--use_ddp", "--mixed_precision", "bf16"])
    said = "\n".join(translate_guide_keys(args, on_gpu=True, processes_per_node=4))
    assert (args.use_deepspeed, args.mixed_precision) == (False, "bf16")
    assert "deepspeed.enabled true -> --use_ddp (command line)" in said
    flags = [word for word in flags if word != "--no_auto_optimize"]
    args = script.parse_args([*flags, "--config", str(path)])
    said = translate_guide_keys(args, on_gpu=True, processes_per_node=4)
    assert any(
        line.endswith("batch_size_per_gpu 16 -> --batch_size 16, but --auto_optimize finds its own") for line in said
    )


@pytest.mark.parametrize("section", ["", "training", "settings"])
@pytest.mark.parametrize(("gpus", "memory"), [(4, 24), (4, 12), (4, 5), (1, 16), (2, None)])
def test_the_settings_that_hardware_utils_prints(mimic_cxr_flags, tmp_path, capsys, section, gpus, memory):
    """`python -m hardware_utils --json`, its settings as a config, in a section or not."""
    import hardware_utils as hw
    import train_mimic_cxr as script

    hw.main(["--json", "--plan", "--gpus", str(gpus), *(["--gpu_memory", str(memory)] if memory else [])])
    settings = json.loads(capsys.readouterr().out)["settings"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({section: settings} if section else settings))
    args = script.parse_args([*mimic_cxr_flags, "--config", str(path)])
    lines = translate_guide_keys(args, on_gpu=False, processes_per_node=1)
    assert args.batch_size == settings["batch_size_per_gpu"]
    names = ("gradient_accumulation_steps", "prefetch_factor", "mixed_precision", "gradient_checkpointing")
    for name in (*names, "offload_optimizer"):
        assert getattr(args, name) == settings[name]
    assert args.use_deepspeed == (settings["engine"] == "deepspeed")
    stage = {0: None, 2: "deepspeed_config.json", 3: "deepspeed_zero3.json"}[settings["zero_stage"]]
    assert (args.deepspeed_config and Path(args.deepspeed_config).name) == stage
    said = "\n".join(lines)
    assert said.count("config.json: ") == 6  # batch, workers, effective batch, stage, offload, engine
    assert f"effective_batch_size {settings['effective_batch_size']} -> nothing to set here" in said


@pytest.mark.parametrize(
    ("memory", "words", "checkpointing", "offload", "said"),
    [
        (79.2, "", False, False, "79.2 GiB on the smallest GPU, 16 GB or more: batch 64, activations kept, "
         "optimizer on the GPU"),
        (14.56, "", False, False, "batch 12, activations kept, optimizer on the GPU"),
        (11.8, "", True, True, "11.8 GiB on the smallest GPU, below 16 GB: batch 8, activations recomputed, "
         "optimizer on the CPU"),
        # the command line wins; a file that is named is used as it is
        (79.2, "--gradient_checkpointing --batch_size 4", True, False, "16 GB or more: optimizer on the GPU"),
        (79.2, "--deepspeed_config configs/deepspeed_config.json", True, True, "16 GB or more: batch 64"),
        (79.2, "--no_auto_optimize --use_deepspeed", True, True, ""),
        (79.2, "--config GUIDE", False, False, "batch 64, activations kept, optimizer on the GPU"),
    ],
)  # fmt: skip
def test_recomputation_and_offload_follow_the_gpus_memory(
    mimic_cxr_flags, tmp_path, monkeypatch, memory, words, checkpointing, offload, said
):
    """On 4 GPUs, whether DeepSpeed's file is ours, named by the user, or meant by the guide's `stage: 2`."""
    import train_mimic_cxr as script

    (tmp_path / "guide.yaml").write_text(GUIDE_YAML)
    card = SimpleNamespace(total_memory=memory * 2**30, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    flags = [word for word in mimic_cxr_flags if word != "--no_auto_optimize"]
    args = script.parse_args([*flags, *words.replace("GUIDE", str(tmp_path / "guide.yaml")).split()])
    ranks = Ranks(0, 0, 4, torch.device("cuda", 0), "torchrun")
    hardware = apply_hardware(args, ranks, processes=4)
    config = deepspeed_settings(args.deepspeed_config or config_file(hardware.zero_stage), args)
    assert ("offload_optimizer" in config["zero_optimization"]) == offload
    assert ("on the CPU" in deepspeed_utils.describe(config)) == offload
    assert args.gradient_checkpointing == checkpointing
    if said:
        recomputed = bool(args.gradient_checkpointing)
        batch = BatchSize(args.batch_size, args.gradient_accumulation_steps, "", recomputed)
        used = {name: value for name, value in hardware.flags.items() if args.source[name] == "hardware"}
        own_file = args.source["deepspeed_config"] == "default"
        assert describe_memory(hardware.smallest_gpu, used, batch, own_file).endswith(said)


def test_help_of_auto_optimize(capsys):
    """Its default is said once, and turning it off is not called a default."""
    import train_mimic_cxr as script

    with pytest.raises(SystemExit):
        script.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "checkpointing from the hardware (default: True)" in text
    assert "take them from the file and the defaults (--auto_optimize: True) --use_deepspeed" in text


def test_outputs_of_a_run(mimic_cxr_flags, zygote, tmp_path):
    """--debug with W&B offline: figures, tables, summary, predictions; --eval_only repeats the summary's numbers."""
    out = tmp_path / "run"
    words = ["--debug", "--save_predictions", "--wandb", "--batch_size", "16"]
    done = zygote(MIMIC, *mimic_cxr_flags, "--output_dir", out, *words, figures=True)
    assert done.code == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 2
    names = {path.name for path in (out / "figures").iterdir()}
    assert {"inputs.png", "val_answers.png", "test_answers.png", "test_curves.png", "curves.png"} <= names
    assert re.search(r"test, best\.pt: answers +n +accuracy.*\nall +64 +0\.\d{4}", done.stdout)
    assert list((out / "wandb").glob("offline-run-*"))
    assert not any("WANDB_API_KEY" in path.read_text(errors="ignore") for path in out.rglob("*.yaml"))
    table = pq.read_table(out / "predictions_test.parquet").to_pylist()
    right = np.mean([row["answer"] == row["truth"] for row in table])
    assert len(table) == 64
    assert right == pytest.approx(summary["test/vqa_accuracy"])
    assert all(0 <= row["p(Edema)"] <= 1 and row["study_id"].startswith("s5") for row in table)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    group = {"train/loss", "train/loss_vqa", "train/loss_chexpert", "train/lr", "train/peak_memory_gb"}
    assert group | {"train/samples_per_s", "train/data_wait"} <= lines[0].keys()
    before = {name: value for name, value in summary.items() if name.startswith("test/")}
    more = ["--output_dir", out, "--eval_only", "--max_samples", "64", "--batch_size", "16"]
    done = zygote(MIMIC, *mimic_cxr_flags, *more)
    assert done.code == 0, done.stderr
    evaluated = json.loads((out / "eval_test.json").read_text())
    assert {name: evaluated[name] for name in before} == before


def overlaps(one, other) -> bool:
    return min(one.x1, other.x1) - max(one.x0, other.x0) > 1 and min(one.y1, other.y1) - max(one.y0, other.y0) > 1


def test_figures_are_whole(mimic_cxr_flags, tmp_path, monkeypatch, recwarn):
    """Long questions with odd characters: every title lies inside the figure and over nothing, and none is cut."""
    import train_mimic_cxr as script
    from logging_utils import save_figure

    args = script.parse_args([*mimic_cxr_flags, "--cache_gb", "0"])
    index = mci.open_index(tmp_path, Path(mimic_cxr_flags[1]), Path(mimic_cxr_flags[3]))
    data = read_sets(index, args, None)["test"]
    question, row = "Is there 水 $\\frac{1 at the $left$ \U0001f600 costophrenic angle? " * 4 + "The end?", data.row
    monkeypatch.setattr(data, "row", lambda i: row(i) | {"question": question})
    rows = [row(i) for i in range(len(data))]
    found = {name: np.array([row[name] for row in rows]) for name in ("head", "target", "study", "type")}
    probability = np.random.default_rng(0).random((len(index.studies), 14), dtype=np.float32)
    found |= {"index": np.arange(len(rows)), "predicted": found["target"], "chexpert": probability[found["study"]]}
    figures = [draw_answers(data, found), draw_inputs(data), draw_curves(data, found)]
    for number, figure in enumerate(figures):
        recwarn.clear()
        save_figure(tmp_path / f"{number}.png", figure)
        assert [str(warning.message) for warning in recwarn] == []
        boxes = [axes.get_window_extent() for axes in figure.axes if axes.images or axes.lines]
        titles = [axes.title.get_window_extent() for axes in figure.axes if axes.title.get_text()]
        assert len(titles) == len(boxes)
        legend = figure.axes[0].get_legend()
        extents = [*titles, *([legend.get_window_extent()] if legend else [])]
        for extent in extents:
            assert figure.bbox.x0 <= extent.x0 <= extent.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= extent.y0 <= extent.y1 <= figure.bbox.y1
            assert not any(overlaps(extent, box) for box in boxes)
            assert sum(overlaps(extent, other) for other in extents) == 1  # itself
        if number < 2:
            assert all("The end?" in axes.title.get_text() for axes in figure.axes)
    assert re.fullmatch(r"Atelectasis: \d\.\d{3} \(n \d+\)", legend.get_texts()[0].get_text())
    binary = [int(text.get_text()) for text in figures[2].axes[1].texts]
    assert sum(binary) == (found["head"] == 0).sum()


def test_out_of_memory(mimic_cxr_flags, zygote, tmp_path):
    """Of a really limited memory: one message with the values to try."""
    words = [*mimic_cxr_flags, "--image_size", "256", "--max_steps", "1", "--max_samples", "64"]
    words += ["--batch_size", "64", "--cache_gb", "0", "--output_dir"]
    done = zygote(MIMIC, *words, tmp_path / "a", address_space=600_000_000)
    assert done.code == 1
    assert re.fullmatch(r"error: out of memory at --batch_size 64; try --batch_size 32 --grad\S+ 2 .*\n", done.stderr)


def test_picture_cache(tmp_path):
    """Decoded once; a torn record is decoded again; a full disk is no error."""

    Image.fromarray(np.arange(600 * 400, dtype=np.uint32).reshape(600, 400).astype(np.uint8)).save(tmp_path / "a.jpg")
    cache = ImageCache(tmp_path / "cache.u8", 32, 5)
    first = cache.get(2, str(tmp_path / "a.jpg"))
    assert first.shape == (32, 32)
    assert first[:, :5].max() == 0  # black beside the upright picture
    (tmp_path / "a.jpg").unlink()
    assert np.array_equal(cache.get(2, str(tmp_path / "a.jpg")), first)
    with pytest.raises(FileNotFoundError):
        cache.get(1, str(tmp_path / "a.jpg"))
    with open(tmp_path / "cache.u8", "r+b") as file:
        file.seek(2 * cache.record + 100)
        file.write(b"\x07\x07\x07")
    with pytest.raises(FileNotFoundError):
        cache.get(2, str(tmp_path / "a.jpg"))


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["deepspeed", "launcher"])
def test_guide_commands(mimic_cxr_flags, launcher, tmp_path):
    """The guide's own lines, for real: deepspeed --num_gpus=2 ... --use_deepspeed, and the launcher by itself."""
    words = [
        *mimic_cxr_flags,
        "--debug",
        "--output_dir",
        tmp_path / "run",
        "--config",
        ROOT / "configs" / "default_config.yaml",
    ]
    command = ["deepspeed", "--num_gpus=2", MIMIC, *words, "--use_deepspeed"]
    if launcher == "launcher":
        command = [ROOT / "launch_distributed_training.sh", "--num_gpus", "2", *words]
    done = subprocess.run([str(w) for w in command], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "ZeRO-2, optimizer on the CPU" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2
