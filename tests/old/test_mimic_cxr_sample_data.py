"""What `tools.sample_data mimic_cxr` writes, read back: the layout and the quirks of the real release."""

import csv
import gzip
import json
import re
import zipfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import tree
from PIL import Image

from old.cli_utils import InputError
from tasks.mimic_cxr.sample_data import write_sample_data
from tasks.mimic_cxr.sample_findings import CHEXPERT
from tasks.mimic_cxr.sample_questions import WORDINGS

SIZES = {"num_train": 30, "num_val": 8, "num_test": 8, "image_size": 64, "seed": 3}
QBA = "mimic-ext-cxr-qba"
JPG = "mimic-cxr-jpg"


def rows_of(out: Path, name: str) -> list[dict]:
    with gzip.open(out / JPG / f"mimic-cxr-2.0.0-{name}.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))


def table_of(folder: Path) -> list[dict]:
    return pq.read_table(folder / "metadata" / "question_metadata.parquet").to_pylist()


def keys(rows: list[dict]) -> list[tuple]:
    return [(row["patient_id"], row["study_id"], row["question_id"]) for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("mimic") / "folder"
    write_sample_data(out, **SIZES)
    return out


@pytest.fixture(scope="module")
def zipped(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("mimic") / "zipped"
    write_sample_data(out, **SIZES, zipped=True)
    return out


@pytest.fixture(scope="module")
def studies(folder) -> dict[str, dict]:
    """{study_id: what its file of questions holds, and where it lies}."""
    contents = [json.loads(path.read_text()) | {"path": path} for path in sorted(folder.rglob("*.qa.json"))]
    return {content["study_id"]: content for content in contents}


def main_answers(question: dict) -> list[dict]:
    return [answer for answer in question["answers"] if answer["answer_type"] == "main_answer"]


def question_keys(studies: list[dict]) -> list[tuple]:
    """As keys() has them of the table."""
    found = []
    for study in studies:
        for question in study["questions"]:
            found.append((study["patient_id"], study["study_id"], question["question_id"]))
    return found


def test_the_same_seed_writes_the_same_bytes_zipped_or_not(folder, zipped):
    ours = tree(folder)
    theirs = tree(zipped)
    qa = {name for name in ours if name.startswith(f"{QBA}/qa/")}
    del theirs[f"{QBA}/qa.zip"]
    assert {name: ours[name] for name in ours.keys() - qa} == theirs
    with zipfile.ZipFile(zipped / QBA / "qa.zip") as archive:
        members = {f"{QBA}/{name}": archive.read(name) for name in archive.namelist()}
    assert members == {name: (folder / name).read_bytes() for name in qa}


def test_an_existing_data_set_is_not_touched(folder):
    before = tree(folder)
    with pytest.raises(InputError, match="already holds"):
        write_sample_data(folder, **SIZES)
    assert tree(folder) == before


def test_pictures_and_tables_agree_and_patients_stay_in_one_split(folder):
    metadata = rows_of(folder, "metadata")
    split_of = {row["dicom_id"]: row["split"] for row in rows_of(folder, "split")}
    assert len(metadata) == len(split_of) == len(list(folder.rglob("*.jpg")))

    # each row has its image
    splits = defaultdict(set)
    for row in metadata:
        subject = row["subject_id"]
        study = row["study_id"]
        dicom = row["dicom_id"]
        assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{8}){4}", dicom)
        assert re.fullmatch(r"1\d{7}", subject)
        assert re.fullmatch(r"5\d{7}", study)
        path = folder / JPG / "files" / f"p{subject[:2]}" / f"p{subject}" / f"s{study}" / f"{dicom}.jpg"
        with Image.open(path) as image:
            assert image.mode == "L"
            assert image.height == int(row["Rows"])
            assert image.width == int(row["Columns"])
            assert np.asarray(image).std() > 20
        splits[subject].add(split_of[dicom])

    # each patient one split
    assert all(len(names) == 1 for names in splits.values())
    counts = Counter(name for names in splits.values() for name in names)
    assert counts == {"train": 30, "validate": 8, "test": 8}

    # views of all kinds, and several studies of one patient
    views = defaultdict(set)
    for row in metadata:
        views[row["study_id"]].add(row["ViewPosition"])
    assert set().union(*views.values()) == {"PA", "AP", "LATERAL", "LL", ""}
    assert any({"PA", "AP"} <= names for names in views.values())
    assert any(names <= {"LATERAL", "LL"} for names in views.values())
    assert len(views) > len(splits)


def test_labels_are_one_row_a_study_with_blanks_and_uncertain_ones(folder, studies):
    labels = rows_of(folder, "chexpert")
    assert list(labels[0]) == ["subject_id", "study_id", *CHEXPERT]
    assert {f"s{row['study_id']}" for row in labels} == set(studies)
    assert {row[name] for row in labels for name in CHEXPERT} == {"1.0", "0.0", "-1.0", ""}
    for name in CHEXPERT:
        assert {"1.0", "0.0"} <= {row[name] for row in labels}, name


def test_questions_match_their_table_and_grades_stand_there_alone(folder, studies):
    rows = table_of(folder / QBA)
    asked = question_keys(list(studies.values()))
    assert sorted(keys(rows)) == sorted(asked)
    assert len(set(asked)) == len(asked)
    assert pq.ParquetFile(folder / QBA / "metadata" / "question_metadata.parquet").num_row_groups > 1

    # every grade, and some without one
    ratings = [row["question.quality.rating"] for row in rows]
    assert {rating for rating in ratings if rating} == {"1_D", "2_C", "3_B", "4_A", "5_A+", "6_A++"}
    assert 0.15 < ratings.count(None) / len(ratings) < 0.25

    for study in studies.values():
        patient = study["patient_id"]
        assert study["path"].parts[-4:-1] == ("qa", patient[:3], patient)
        assert 14 <= len(study["questions"]) <= 36
        for question in study["questions"]:
            assert not any("rating" in name or "grade" in name for name in question)
            check_answers(question)


def check_answers(question: dict) -> None:
    """One main answer, or of a description two; boxes lie inside the image."""
    signs = [answer["positiveness"] for answer in main_answers(question)]
    assert len(signs) == 1 or ("describe" in question["question_type"] and signs == ["neg", "pos"])
    for answer in question["answers"]:
        for dicom, place in answer["localization"].items():
            left, top, right, bottom = place["bboxes"][0]
            assert 0 <= left < right < 64
            assert 0 <= top < bottom < 64
            assert len(dicom) == 44


def test_exports_hold_their_grade_or_better(folder):
    table = table_of(folder / QBA)
    ratings = [row["question.quality.rating"] or "" for row in table]
    rating_of = dict(zip(keys(table), ratings, strict=True))
    exported = {}
    for letter, lowest in (("A", "4"), ("B", "3")):
        place = folder / QBA / "exports" / f"{letter}_frontal"
        exported[letter] = set(keys(table_of(place)))
        assert all(rating_of[key] >= lowest for key in exported[letter])
        with zipfile.ZipFile(place / "qa.zip") as archive:
            inside = [json.loads(archive.read(name)) for name in archive.namelist()]
        assert set(question_keys(inside)) == exported[letter]
    assert exported["A"] < exported["B"] < set(rating_of)


def test_answers_follow_the_findings_and_some_have_no_target(studies):
    main = defaultdict(list)
    for study in studies.values():
        for question in study["questions"]:
            answer = main_answers(question)[0]
            main[question["question_type"]].append((question["question"], answer))
    assert set(main) == set(WORDINGS)

    # descriptions say what is not there, too
    absent = [answer for _, answer in main["D01_describe_finding"] if answer["positiveness"] == "neg"]
    assert any(answer["obs_entities"] != ["no finding"] for answer in absent)

    # positiveness tells of the finding, not of the answer
    for _, answer in main["B04_is_normal"]:
        assert answer["text"] == {"pos": "No.", "neg": "Yes."}[answer["positiveness"]]

    # the side asked for is the side answered
    assert {answer["positiveness"] for _, answer in main["D02_has_finding"]} == {"pos", "neg", "neutral"}
    for question, answer in main["D02_has_finding"]:
        if answer["positiveness"] == "pos" and " lung" in question:
            side = answer["regions"][0].split()[0]
            assert side in question

    # every severity, and a region that is in no vocabulary
    severities = set()
    for _, answer in main["D04_how_severe_is_finding"]:
        modifiers = dict(map(tuple, answer["modifiers"]))
        severities.add(modifiers.get("severity"))
    assert severities == {None, "none", "mild", "moderate", "severe"}
    assert "azygos fissure" in {answer["regions"][0] for _, answer in main["D03_where_is_finding"]}

    # about as often yes as no
    for kind in ("D02_has_finding", "B03_is_abnormal", "C03_is_abnormal_region", "B13_has_devices"):
        signs = [answer["positiveness"] for _, answer in main[kind]]
        assert 0.3 < signs.count("pos") / len(signs) < 0.7, kind
