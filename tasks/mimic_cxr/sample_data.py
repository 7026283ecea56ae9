"""Write MIMIC-CXR-JPG and MIMIC-Ext-CXR-QBA for train_mimic_cxr.py, with made-up chest X-rays and questions.

The folder gets mimic-cxr-jpg (files/p10/..., three tables), mimic-ext-cxr-qba (qa/ or qa.zip, metadata/, exports/) and
two tiny checkpoints with random weights (`convnext_tiny`, `bert_tiny`). Every finding can be seen and its side matters.
As in the real release: views and labels are missing here and there, a fifth of the questions has no grade, the grades
stand in the parquet file alone, and some answers have no target.
"""

import argparse
import csv
import gzip
import io
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from PIL import Image

from old.cli_utils import InputError, whole
from tasks.mimic_cxr.answers import CHEXPERT
from tasks.mimic_cxr.sample_findings import Finding, chexpert_labels, draw_findings
from tasks.mimic_cxr.sample_images import chest_image, lateral_image
from tasks.mimic_cxr.sample_questions import SEVERITIES, WORDINGS, study_questions

# A fifth is unrated, as in the release.
GRADE_SHARES = {"1_D": 0.02, "2_C": 0.04, "3_B": 0.32, "4_A": 0.22, "5_A+": 0.12, "6_A++": 0.08, None: 0.20}
VIEW_MEANINGS = {"PA": "postero-anterior", "AP": "antero-posterior", "LATERAL": "lateral", "LL": "left lateral"}
LATERAL_VIEWS = ("LATERAL", "LL")

# The columns of the release's question table, by the fields of QuestionRow.
QUESTION_COLUMNS = {
    "patient_id": "patient_id",
    "study_id": "study_id",
    "question_id": "question_id",
    "question_type": "question.question_type",
    "question_strategy": "question.question_strategy",
    "grade": "question.quality.rating",
}

# Members of a zip file have a date; with a fixed one the bytes are the same each time.
ZIP_DATE = (2025, 7, 22, 0, 0, 0)


class Case(NamedTuple):
    """One study to be made."""

    patient: int
    split: str
    study: int


class ImageRow(NamedTuple):
    """One line of the metadata table, whose columns have DICOM's names."""

    dicom_id: str
    subject_id: int
    study_id: int
    PerformedProcedureStepDescription: str
    ViewPosition: str
    Rows: int
    Columns: int
    StudyDate: int
    StudyTime: str
    ProcedureCodeSequence_CodeMeaning: str
    ViewCodeSequence_CodeMeaning: str
    PatientOrientationCodeSequence_CodeMeaning: str


class QuestionRow(NamedTuple):
    """One line of the question table."""

    patient_id: str
    study_id: str
    question_id: str
    question_type: str
    question_strategy: str
    grade: str | None


class StudyRecord(NamedTuple):
    """What is written about one study.

    is_frontal: whether one of its images is known to be a frontal one. labels: 1, 0, -1 (uncertain) or "" each.
    """

    case: Case
    images: list[ImageRow]
    is_frontal: bool
    labels: list
    questions: list[dict]
    rows: list[QuestionRow]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this data set's flags."""
    add = parser.add_argument
    add("out", type=Path, help="folder to write; must not hold a data set yet")
    add("--num_train", type=whole(1), default=700, help="training patients, 1 to 3 studies each")
    add("--num_val", type=whole(0), default=60, help="validation patients")
    add("--num_test", type=whole(0), default=90, help="test patients")
    add("--image_size", type=whole(64), default=256, help="longer side of the pictures, pixels")
    add("--seed", type=int, default=0, help="the same seed writes the same bytes")
    add("--zip", dest="zipped", action="store_true", help="write qa.zip instead of the folder qa/; users read both")


def write_sample_data(
    out: Path, num_train: int, num_val: int, num_test: int, image_size: int, seed: int, zipped: bool = False
) -> None:
    """Write both releases and the checkpoints. Raises InputError when the folder holds a data set."""
    from tqdm import tqdm

    jpg = out / "mimic-cxr-jpg"
    qba = out / "mimic-ext-cxr-qba"
    if jpg.exists() or qba.exists():
        raise InputError(f"{out}: already holds a data set; choose another folder or delete it")

    # A study depends on the seed and its number alone.
    splits = ["train"] * num_train + ["validate"] * num_val + ["test"] * num_test
    cases = draw_cases(seed, splits)
    studies = []
    for number, case in enumerate(tqdm(cases, desc="studies", disable=not sys.stderr.isatty())):
        rng = np.random.default_rng([seed, 2, number])
        study = make_study(rng, jpg, case, number, image_size)
        studies.append(study)

    write_jpg_tables(jpg, studies)
    write_qba(qba, studies, zipped)
    write_checkpoints(out, studies, seed)

    # Sum up: how many questions have which grade.
    grades = [row.grade for study in studies for row in study.rows]
    counts = [f"{short_grade(grade)} {grades.count(grade)}" for grade in GRADE_SHARES]
    num_images = sum(len(study.images) for study in studies)
    print(
        f"{out}: {len(splits)} patients, {len(studies)} studies, {num_images} images, {len(grades)} questions "
        f"({', '.join(counts)}), convnext_tiny, bert_tiny"
    )


def short_grade(grade: str | None) -> str:
    """A grade without its number: "A+" for "5_A+"."""
    return grade.split("_")[1] if grade else "unrated"


def draw_cases(seed: int, splits: list[str]) -> list[Case]:
    """Draw the studies of the patients, of whom each is in one split, sorted by patient."""
    rng = np.random.default_rng([seed, 1])
    count = len(splits)
    patients = 10_000_000 + rng.choice(10_000_000, count, replace=False)
    num_studies = rng.choice((1, 2, 3), count, p=(0.45, 0.35, 0.2))
    study_ids = 50_000_000 + rng.choice(10_000_000, num_studies.sum(), replace=False)
    study_ids = iter(study_ids.tolist())

    cases = []
    for i, split in enumerate(splits):
        for _ in range(num_studies[i]):
            case = Case(int(patients[i]), split, next(study_ids))
            cases.append(case)
    return sorted(cases)


def make_study(rng: Generator, jpg: Path, case: Case, number: int, size: int) -> StudyRecord:
    """Draw one study, and write its images; number is that of the study."""
    findings = draw_findings(rng)
    views = draw_views(rng)
    folder = jpg / "files" / f"p{case.patient // 1_000_000}" / f"p{case.patient}" / f"s{case.study}"
    folder.mkdir(parents=True)

    images = []
    boxes = {}
    is_frontal = False
    for view in views:
        words = rng.integers(0, 2**32, 5)
        dicom_id = "-".join(f"{word:08x}" for word in words)
        if view in LATERAL_VIEWS:
            pixels = lateral_image(rng, size)
        else:
            pixels, boxes[dicom_id] = chest_image(rng, size, findings)
        image = Image.fromarray(pixels)
        image.save(folder / f"{dicom_id}.jpg", quality=92)

        # ViewPosition is missing at times, and what is left may tell or not.
        blank = rng.random()
        position = "" if blank < 0.07 else view
        meaning = "" if blank < 0.02 else VIEW_MEANINGS[view]
        is_frontal = is_frontal or (dicom_id in boxes and meaning != "")

        rows, columns = pixels.shape
        row = ImageRow(
            dicom_id=dicom_id,
            subject_id=case.patient,
            study_id=case.study,
            PerformedProcedureStepDescription="CHEST (PA AND LAT)" if "PA" in views else "CHEST (PORTABLE AP)",
            ViewPosition=position,
            Rows=rows,
            Columns=columns,
            StudyDate=21800101 + number % 28,
            StudyTime="083015.531",
            ProcedureCodeSequence_CodeMeaning="CHEST (PA AND LAT)",
            ViewCodeSequence_CodeMeaning=meaning,
            PatientOrientationCodeSequence_CodeMeaning="Erect",
        )
        images.append(row)

    labels = draw_labels(rng, findings)
    questions = study_questions(rng, findings, boxes)
    rows = draw_grades(rng, case, questions)
    return StudyRecord(case, images, is_frontal, labels, questions, rows)


def draw_views(rng: Generator) -> list[str]:
    """Draw which images a study has: mostly a frontal one, now and then two or none, and at times a lateral one."""
    kind = rng.random()
    if kind < 0.45:
        views = ["PA"]
    elif kind < 0.8:
        views = ["AP"]
    elif kind < 0.93:
        views = ["PA", "AP"]
    else:
        views = []

    if not views or rng.random() < 0.25:
        is_usual = rng.random() < 0.7
        views.append("LATERAL" if is_usual else "LL")
    return views


def draw_labels(rng: Generator, findings: list[Finding]) -> list:
    """Draw which CheXpert labels a report tells: some are blank and some are uncertain."""
    chances = rng.random(len(CHEXPERT))
    truth = chexpert_labels(findings)
    labels = []
    for is_true, chance in zip(truth.values(), chances, strict=True):
        blank_share = 0.02 if is_true else 0.15
        if chance < blank_share:
            labels.append("")
        elif chance > 0.95:
            labels.append(-1.0)
        else:
            labels.append(float(is_true))
    return labels


def draw_grades(rng: Generator, case: Case, questions: list[dict]) -> list[QuestionRow]:
    """Draw the grade of each question, which stands in the question table alone."""
    grades = list(GRADE_SHARES)
    shares = list(GRADE_SHARES.values())
    choices = rng.choice(len(grades), len(questions), p=shares)
    rows = []
    for question, choice in zip(questions, choices, strict=True):
        row = QuestionRow(
            patient_id=f"p{case.patient}",
            study_id=f"s{case.study}",
            question_id=question["question_id"],
            question_type=question["question_type"],
            question_strategy=question["question_strategy"],
            grade=grades[choice],
        )
        rows.append(row)
    return rows


# --- files ------------------------------------------------------------------------------------------------------------


def write_jpg_tables(jpg: Path, studies: list[StudyRecord]) -> None:
    """Write the three tables of MIMIC-CXR-JPG."""
    metadata = [ImageRow._fields]
    splits = [("dicom_id", "study_id", "subject_id", "split")]
    labels = [("subject_id", "study_id", *CHEXPERT)]
    for study in studies:
        case = study.case
        labels.append((case.patient, case.study, *study.labels))
        for image in study.images:
            metadata.append(image)
            splits.append((image.dicom_id, case.study, case.patient, case.split))

    write_gz(jpg / "mimic-cxr-2.0.0-metadata.csv.gz", metadata)
    write_gz(jpg / "mimic-cxr-2.0.0-split.csv.gz", splits)
    write_gz(jpg / "mimic-cxr-2.0.0-chexpert.csv.gz", labels)


def write_gz(path: Path, rows: list[tuple]) -> None:
    """Write a .csv.gz whose bytes depend on the rows alone: it has no time and no file name inside."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerows(rows)
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        file.write(text.getvalue().encode())


def write_qba(qba: Path, studies: list[StudyRecord], zipped: bool) -> None:
    """Write the questions, their table, and the two exports."""
    rows = [row for study in studies for row in study.rows]
    write_question_table(qba, rows)
    write_questions(qba, studies, zipped)

    info = {
        "obs_entities": [name.lower() for name in CHEXPERT],
        "severities": SEVERITIES,
        "question_types": list(WORDINGS),
    }
    file = qba / "metadata" / "dataset_info.json"
    file.write_text(json.dumps(info, indent=2))
    write_export(qba / "exports" / "B_frontal", studies, "3_B")
    write_export(qba / "exports" / "A_frontal", studies, "4_A")


def write_export(folder: Path, studies: list[StudyRecord], lowest: str) -> None:
    """Write the questions of this grade or better about studies with a frontal image."""
    exported = []
    for study in studies:
        rows = [row for row in study.rows if row.grade and row.grade >= lowest]
        if rows and study.is_frontal:
            wanted = {row.question_id for row in rows}
            questions = [question for question in study.questions if question["question_id"] in wanted]
            exported.append(study._replace(questions=questions, rows=rows))

    rows = [row for study in exported for row in study.rows]
    write_question_table(folder, rows)
    write_questions(folder, exported, zipped=True)


def write_question_table(folder: Path, rows: list[QuestionRow]) -> None:
    """Write metadata/question_metadata.parquet, in several groups of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for field, name in QUESTION_COLUMNS.items():
        values = [getattr(row, field) for row in rows]
        columns[name] = pa.array(values, pa.string())
    table = pa.table(columns)

    folder = folder / "metadata"
    folder.mkdir(parents=True, exist_ok=True)
    group_size = len(rows) // 5 + 1
    pq.write_table(table, folder / "question_metadata.parquet", row_group_size=group_size)


def write_questions(folder: Path, studies: list[StudyRecord], zipped: bool) -> None:
    """Write one file a study below qa/, or as the members of qa.zip."""
    if zipped:
        with zipfile.ZipFile(folder / "qa.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in question_files(studies):
                member = zipfile.ZipInfo(name, ZIP_DATE)
                archive.writestr(member, text, zipfile.ZIP_DEFLATED)
    else:
        for name, text in question_files(studies):
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


def question_files(studies: list[StudyRecord]) -> Iterator[tuple[str, str]]:
    """The name, as qa/p10/p10000032/s50414267.qa.json, and the text of each study's file."""
    for study in studies:
        patient_id = f"p{study.case.patient}"
        study_id = f"s{study.case.study}"
        name = f"qa/{patient_id[:3]}/{patient_id}/{study_id}.qa.json"
        content = {"patient_id": patient_id, "study_id": study_id, "questions": study.questions}
        yield name, json.dumps(content)


def write_checkpoints(out: Path, studies: list[StudyRecord], seed: int) -> None:
    """Write the two tiny checkpoints; BERT's vocabulary is that of the questions."""
    from tasks.mimic_cxr.sample_models import write_tiny_bert, write_tiny_convnext

    texts = [question["question"] for study in studies for question in study.questions]
    write_tiny_convnext(out / "convnext_tiny", seed)
    write_tiny_bert(out / "bert_tiny", texts, seed)
