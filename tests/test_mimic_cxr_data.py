"""tasks/mimic_cxr/prepare.py and answers.py: both releases, a table of one's own, images, and the folder written."""

import csv
import gzip
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_images_and_tables import save_dicom

from tasks.mimic_cxr.answers import CHEXPERT, HEADS
from tasks.mimic_cxr.prepare import Prepared, few_at_a_time, open_prepared
from tools.prepare_data import parse_args
from utils.cli import InputError, RunError

# 64 x 48, smooth, and not the same when mirrored or turned
PICTURE = (np.add.outer(np.linspace(20, 110, 48), np.linspace(0, 120, 64) ** 2 / 120)).astype(np.uint8)


def save(path: Path, values=PICTURE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


def main(positiveness: str | None = "pos", **tags) -> dict:
    """A main answer, as in a .qa.json."""
    empty = {"answer_type": "main_answer", "text": "", "regions": [], "obs_entities": [], "modifiers": []}
    return empty | {"positiveness": positiveness} | tags


def ask(kind="D02_has_finding", *answers: dict, text="Is there edema?", grade: str | None = "3_B") -> dict:
    """A question of a .qa.json, and its grade for the parquet file."""
    return {"question_type": kind, "question": text, "answers": list(answers or [main()]), "grade": grade}


def study(number: int, split="train", questions=None, views=("PA",), labels=(), subject: int | None = None) -> dict:
    """views: of each image d0, d1, ...; or (name, ViewPosition, its code)."""
    images = [(f"d{place}", view, "") if isinstance(view, str) else view for place, view in enumerate(views)]
    person = subject or 10000000 + number
    return {
        "subject": str(person), "study": str(50000000 + number), "split": split, "images": images,
        "labels": dict(labels), "questions": [ask()] if questions is None else questions,
    }  # fmt: skip


def write_csv(path: Path, header: list[str], rows: list) -> None:
    with gzip.open(path, "wt", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_releases(root: Path, *studies: dict) -> Path:
    """Both releases, as PhysioNet has them, below root/jpg and root/qba. Returns root."""
    jpg, qba = root / "jpg", root / "qba"
    metadata, splits, labels, rated = [], [], [], []
    # the columns of the labels stand in another order than CheXpert's
    names = sorted(CHEXPERT, reverse=True)
    for one in studies:
        subject, name = one["subject"], one["study"]
        for dicom, view, code in one["images"]:
            metadata.append((f"{dicom}-{name}", subject, "CHEST", name, view, "48", code))
            splits.append((f"{dicom}-{name}", name, subject, one["split"]))
            save(jpg / f"files/p{subject[:2]}/p{subject}/s{name}/{dicom}-{name}.jpg")
        labels.append((subject, name, *[one["labels"].get(label, "") for label in names]))
        questions = [question | {"question_id": f"q{place}"} for place, question in enumerate(one["questions"])]
        rated += [(f"p{subject}", f"s{name}", q["question_id"], q.pop("grade")) for q in questions]
        path = qba / f"qa/p{subject[:2]}/p{subject}/s{name}.qa.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"patient_id": f"p{subject}", "study_id": f"s{name}", "questions": questions}))
    tables = {
        "metadata": ("dicom_id subject_id Procedure study_id ViewPosition Rows ViewCodeSequence_CodeMeaning", metadata),
        "split": ("dicom_id study_id subject_id split", splits),
    }
    for name, (header, rows) in tables.items():
        write_csv(jpg / f"mimic-cxr-2.0.0-{name}.csv.gz", header.split(), rows)
    write_csv(jpg / "mimic-cxr-2.0.0-chexpert.csv.gz", ["subject_id", "study_id", *names], labels)
    (qba / "metadata").mkdir()
    columns = ("patient_id", "study_id", "question_id", "question.quality.rating")
    arrays = [pa.array([row[place] for row in rated], pa.string()) for place in range(4)]
    pq.write_table(pa.table(arrays, columns), qba / "metadata/question_metadata.parquet", row_group_size=3)
    return root


def run(out: Path, *sources: Path, flags="") -> Prepared:
    words = [*map(str, sources), str(out), *"--image_size 32 --workers 1".split(), *flags.split()]
    module, args = parse_args(["mimic_cxr", *words])
    module.prepare(args)
    return open_prepared(out)


def run_releases(root: Path, flags="", out="out") -> Prepared:
    return run(root / out, root / "jpg", root / "qba", flags=flags)


def rows_of(data: Prepared) -> list[tuple]:
    """(image's study, head, class, type, text) of each question, all by name."""
    names = [Path(image).parent.name for image in data.studies["image"]]
    heads = list(HEADS)
    texts = data.texts.to_pylist()
    columns = zip(data.study, data.head, data.target, data.type, data.question, strict=True)
    return [
        (names[s], heads[h], HEADS[heads[h]][target], data.types[kind], texts[text])
        for s, h, target, kind, text in columns
    ]


def left_out(data: Prepared) -> dict[str, int]:
    return {reason: count for reason, count in data.facts["left_out"].items() if count}


# --- questions of the releases ----------------------------------------------------------------------------------------

GRADES = ["1_D", "2_C", "3_B", "4_A", "5_A+", "6_A++"]


@pytest.mark.parametrize("grade", ["D", "C", "B", "A", "A+", "A++", "all"])
def test_questions_of_a_grade_or_better(tmp_path, grade):
    questions = [ask(text=str(one), grade=one) for one in ["5_A+", None, "1_D", "3_B", "6_A++", "4_A", "2_C"]]
    data = run_releases(write_releases(tmp_path, study(1, questions=questions)), f"--grade {grade}")
    good = [*GRADES, "None"] if grade == "all" else GRADES[["D", "C", "B", "A", "A+", "A++"].index(grade) :]
    texts = [row[4] for row in rows_of(data)]
    assert texts == [question["question"] for question in questions if question["question"] in good]
    below = 7 - len(good)
    assert left_out(data) == ({"questions below the grade, or unrated": below} if below else {})


# (type, main answers, the class, or why there is none)
DETAIL = main("neg", answer_type="details", obs_entities=["edema"], regions=["heart"])
TARGETS = [
    ("D02_has_finding", [DETAIL, main("pos"), main("neg")], "yes"),
    ("D02_has_finding", [main("neg")], "no"),
    ("D02_has_finding", [main("neutral")], "positiveness 'neutral'"),
    ("has_device", [main(None)], "positiveness None"),
    ("D06_has_device", [DETAIL], "no main answer"),
    ("B03_is_abnormal", [main("pos")], "yes"),
    ("B04_is_normal", [main("pos")], "no"),
    ("is_normal_region", [main("neg")], "yes"),
    ("is_worse", [main("neg")], "no"),
    # the first name that is in the vocabulary, whatever its case
    ("D01_describe_finding", [main(obs_entities=["scar", " Edema ", "fracture"])], "edema"),
    ("describe_subcat", [main(obs_entities=["scar", "cyst"])], "category 'scar' not in the vocabulary"),
    ("A_indication", [main(obs_entities=["lung"])], "category 'lung' not in the vocabulary"),
    ("B12_describe_device", [main()], "no category given"),
    # what is absent comes last, and is no finding where it is all
    ("D05", [main("neg", obs_entities=["edema"]), main(obs_entities=["fracture"])], "fracture"),
    ("C07_describe_region_device", [main("neg", obs_entities=["support devices"])], "no finding"),
    ("D03_where_is_finding", [main(regions=["left lung"]), main(regions=["heart"])], "left lung"),
    ("where_is_device", [main("neg", regions=["left lung"])], "the finding is absent"),
    ("C01_describe_region", [main("neg", regions=["right hilum"])], "right hilum"),
    ("C02", [main(regions=["left arm"])], "region 'left arm' not in the vocabulary"),
    ("D04_how_severe_is_finding", [main(modifiers=[["tempo", "acute"], ["severity", "Moderate"]])], "moderate"),
    ("D04_how_severe_is_finding", [main(modifiers=[["severity", "huge"]])], "severity 'huge' not in the vocabulary"),
    ("how_severe_is_finding", [main(modifiers=[["severity", None]])], "no severity given"),
    ("D04_how_severe_is_finding", [main(modifiers=None)], "no severity given"),
    ("E01_compare", [main()], "a type without a head"),
]


def test_heads_and_targets_by_name(tmp_path):
    """Every rule of answers.py, through a whole preparation."""
    questions = [ask(kind, *answers, text=f"Q{place}?") for place, (kind, answers, _) in enumerate(TARGETS)]
    data = run_releases(write_releases(tmp_path, study(1, questions=questions)))
    found = {text: (kind, name) for _, _, name, kind, text in rows_of(data)}
    classes = {name for names in HEADS.values() for name in names}
    expected = [(f"Q{place}?", (kind, name)) for place, (kind, _, name) in enumerate(TARGETS)]
    assert found == {text: row for text, row in expected if row[1] in classes}
    assert left_out(data) == Counter(f"questions {kind}: {why}" for _, (kind, why) in expected if why not in classes)
    heads = {row[1]: row[3] for row in rows_of(data)}
    assert heads == {
        "binary": "is_worse", "category": "C07_describe_region_device", "region": "C01_describe_region",
        "severity": "D04_how_severe_is_finding",
    }  # fmt: skip
    assert data.facts["questions"] == {"train": len(data.study), "val": 0, "test": 0}


def test_a_question_without_a_text_is_counted(tmp_path):
    texts = [None, " ", 7, "Is it?"]
    data = run_releases(write_releases(tmp_path, study(1, questions=[ask(text=text) for text in texts])))
    assert [row[4] for row in rows_of(data)] == ["Is it?"]
    assert left_out(data) == {"questions D02_has_finding: no text": 3}


@pytest.fixture
def releases(tmp_path) -> Path:
    """Six studies, in no order; two texts and types in all, and one study without questions."""
    pair = [ask(text="Is there edema?"), ask("D04_x", main(modifiers=[["severity", "mild"]]), text="How severe?")]
    kinds = [(6, "test"), (2, "train"), (5, "validate"), (4, "test"), (1, "train")]
    return write_releases(tmp_path, *[study(n, split, pair) for n, split in kinds], study(3, questions=[]))


def test_rows_are_sorted_by_split_and_study_and_texts_kept_once(releases):
    data = run_releases(releases)
    studies = [int(image.split("/s")[1][:8]) - 50000000 for image in data.studies["image"]]
    assert studies == [1, 2, 3, 5, 4, 6]
    assert list(data.studies["split"]) == ["train"] * 3 + ["val"] + ["test"] * 2
    assert list(data.studies["patient"]) == [str(10000000 + number) for number in studies]
    assert data.study.tolist() == [0, 0, 1, 1, 3, 3, 4, 4, 5, 5]
    assert data.bounds == [0, 4, 6, 10]
    assert (data.types, data.texts.to_pylist()) == (["D02_has_finding", "D04_x"], ["Is there edema?", "How severe?"])
    assert data.facts["questions"] == {"train": 4, "val": 2, "test": 4}
    assert [row[2] for row in rows_of(data)] == ["yes", "mild"] * 5


def test_one_content_gives_equal_bytes(releases):
    """qa/, qa.zip and the export; a parquet file in another order; one process and three."""

    def read(name: str) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (releases / name).iterdir()}

    run_releases(releases, out="one")
    run_releases(releases, out="three", flags="--workers 3")
    assert read("one") == read("three")
    assert len(read("one")) == 4

    questions = read("one")["questions.arrow"]
    path = releases / "qba/metadata/question_metadata.parquet"
    table = pq.read_table(path)
    # strings as pandas 3 writes them
    large = pa.schema([(name, pa.large_string()) for name in table.column_names])
    pq.write_table(table.take(np.random.default_rng(0).permutation(len(table))).cast(large), path)
    with zipfile.ZipFile(releases / "qba/qa.zip", "w") as file:
        for member in sorted((releases / "qba").rglob("*.json")):
            file.write(member, member.relative_to(releases / "qba"))
    shutil.rmtree(releases / "qba/qa")
    run_releases(releases, out="zip")
    (releases / "qba/exports").mkdir()
    (releases / "export").mkdir()
    for name in ("metadata", "qa.zip"):
        shutil.move(releases / "qba" / name, releases / "export" / name)
    shutil.move(releases / "export", releases / "qba/exports/B_frontal")
    run_releases(releases, out="export")
    assert read("zip")["questions.arrow"] == read("export")["questions.arrow"] == questions
    with pytest.raises(InputError, match="qba: holds neither qa/ nor qa.zip; check the path"):
        run_releases(releases, "--grade A", out="a")


# --- studies of the releases ------------------------------------------------------------------------------------------


def test_the_image_of_a_study(tmp_path):
    views = {
        1: ["AP", "LATERAL", "PA", "PA"],
        2: [("z", "AP", ""), ("b", "AP", "")],
        3: ["LATERAL", ("d1", "", "Postero-Anterior")],
        4: [("d0", "", ""), ("d1", "", "oblique")],
        5: ["LL", ("d1", "", "antero-posterior")],
        6: ["LL", ("d1", "", "lateral")],
    }
    write_releases(tmp_path, *[study(number, views=images) for number, images in views.items()])

    def chosen(view: str) -> dict:
        data = run_releases(tmp_path, f"--view {view}", out=view)
        names = data.studies["image"].str.extract(r"/s5000000(\d)/(\w+)-").to_numpy()
        assert left_out(data) == {f"studies without a {view} image": 6 - len(names)}
        return {int(number): (name, view) for (number, name), view in zip(names, data.studies["view"], strict=True)}

    assert chosen("frontal") == {1: ("d2", "PA"), 2: ("b", "AP"), 3: ("d1", "PA"), 5: ("d1", "AP")}
    assert chosen("PA") == {1: ("d2", "PA"), 3: ("d1", "PA")}
    assert chosen("lateral") == {
        1: ("d1", "LATERAL"), 3: ("d0", "LATERAL"), 5: ("d0", "LL"), 6: ("d1", "LATERAL"),
    }  # fmt: skip


def test_labels_sex_and_age(tmp_path):
    labels = {"Edema": "1.0", "Atelectasis": "0.0", "Support Devices": "-1.0"}
    write_releases(tmp_path, study(1, labels=labels), study(2), study(3, subject=10000001))
    write_csv(tmp_path / "p.csv.gz", ["anchor_age", "subject_id", "gender"], [(61, 10000001, "F")])
    data = run_releases(tmp_path, f"--patients {tmp_path}/p.csv.gz")
    expected = np.full((3, 14), np.nan, np.float32)
    for name, value in labels.items():
        expected[0, CHEXPERT.index(name)] = float(value)
    np.testing.assert_array_equal(data.labels, expected)
    assert data.studies["sex"].fillna("").tolist() == ["F", "", "F"]
    assert data.studies["age"].fillna(0).tolist() == [61, 0, 61]


def test_a_partial_download(releases, capsys):
    images = {int(path.parent.name[-1]): path for path in sorted((releases / "jpg").rglob("*.jpg"))}
    questions = {int(path.name[8]): path for path in sorted((releases / "qba").rglob("*.json"))}
    for path in (images[1], images[4], questions[1], questions[6]):
        path.unlink()
    images[5].write_bytes(images[5].read_bytes()[:300])
    data = run_releases(releases)
    assert {row[0] for row in rows_of(data)} == {"s50000002"}
    assert left_out(data) == {
        "studies without an image file": 2, "studies without a question file": 1, "studies with a damaged image": 1,
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert f"warning: {images[5]}: not a readable image (" in printed
    assert "left out:         2 studies without an image file" in printed
    assert data.images[[2, 3]].any(axis=(1, 2)).tolist() == [False, True]

    shutil.rmtree(releases / "qba/qa")
    (releases / "qba/qa").mkdir()
    # said before images are decoded for an hour
    images[2].write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"qba: no question is left \(4 studies without a question file"):
        run_releases(releases, out="b")
    assert "not a readable image" not in capsys.readouterr().out
    shutil.rmtree(releases / "jpg/files")
    with pytest.raises(InputError, match="jpg: none of 6 frontal images is there; check the path"):
        run_releases(releases, out="b")
    assert not [path.name for path in releases.iterdir() if path.name.endswith("partial")]


def test_releases_that_cannot_be_used_are_named(tmp_path):
    write_releases(tmp_path, study(1), study(2, "validate", subject=10000001), study(4), study(3, "dev"))
    splits = "mimic-cxr-2.0.0-split.csv.gz"
    with pytest.raises(InputError, match=f"{splits}: patient '10000001' is in two splits"):
        run_releases(tmp_path)
    (tmp_path / "jpg" / splits).write_bytes(gzip.compress(b"dicom_id,split\nd0-50000001,train\nd0-50000002,train\n"))
    assert left_out(run_releases(tmp_path)) == {"studies without a split": 2}

    path = tmp_path / "qba/qa/p10/p10000001/s50000002.qa.json"
    path.write_text(path.read_text()[:-20])
    assert left_out(run_releases(tmp_path, out="c"))["studies with a damaged question file"] == 1
    path.unlink()
    metadata = tmp_path / "qba/metadata/question_metadata.parquet"
    pq.write_table(pq.read_table(metadata).slice(0, 0), metadata)
    with pytest.raises(InputError, match=r"no question is left \(.*1 questions below the grade"):
        run_releases(tmp_path, out="b")
    metadata.unlink()
    with pytest.raises(InputError, match="question_metadata.parquet: cannot be read .*--grade all"):
        run_releases(tmp_path, out="b")
    (tmp_path / "qba/qa.zip").write_bytes(b"PK")
    shutil.rmtree(tmp_path / "qba/qa")
    with pytest.raises(InputError, match="2 studies with a damaged question file"):
        run_releases(tmp_path, "--grade all", out="b")
    (tmp_path / "jpg" / splits).write_bytes(gzip.compress(b"dicom_id,split\n" * 99)[:30] + b"\xff" * 30)
    with pytest.raises(InputError, match=f"{splits}: cannot be read"):
        run_releases(tmp_path, out="b")


def test_jobs_are_made_when_their_turn_comes():
    """The names of 31 million good questions would take gigabytes."""
    made = []
    jobs = (made.append(number) or number for number in range(50))
    with ThreadPoolExecutor(1) as pool:
        results = few_at_a_time(pool, lambda job: 2 * job, jobs, ahead=4)
        assert next(results) == 0
        assert len(made) <= 5
        assert list(results) == list(range(2, 100, 2))


# --- a table of one's own ---------------------------------------------------------------------------------------------


def write_table(root: Path, text: str, images: str = "a b c") -> Path:
    for name in images.split():
        save(root / f"scans/{name}.png")
    (root / "t.csv").write_text(text)
    return root / "t.csv"


def test_a_table_with_questions(tmp_path):
    """Semicolons, a head that is given or follows from the answer, labels by name, and rows of a study together."""
    lines = [
        "Image;Patient;Question;Answer;Head;Type;labels;split;sex;age",
        'scans/a.png;007;Is it, here?;YES;;;"Edema; pleural effusion";Training;F;61',
        "scans/b.png;7;Where?;left lung;;where;none;validation;;",
        "scans/a.png;007;How?;none;Severity;;;train;;",
        "scans/b.png;7;What?;No finding;category;what;;val;;",
    ]
    table = write_table(tmp_path, "\n".join(lines))
    data = run(tmp_path / "not yet/there/out", table)
    assert [row[1:] for row in rows_of(data)] == [
        ("binary", "yes", "binary", "Is it, here?"),
        ("severity", "none", "severity", "How?"),
        ("region", "left lung", "where", "Where?"),
        ("category", "no finding", "what", "What?"),
    ]
    assert data.bounds == [0, 2, 4, 4]
    assert data.studies[["patient", "split", "sex"]].fillna("").to_numpy().tolist() == [
        ["007", "train", "F"],
        ["7", "val", ""],
    ]
    present = [{CHEXPERT[place] for place in np.flatnonzero(labels == 1)} for labels in data.labels]
    assert present == [{"Edema", "Pleural Effusion"}, {"No Finding"}]
    assert (data.labels == 0).sum() == 12 + 13
    assert data.facts["left_out"] == {}
    assert data.facts["split"] == [0.7, 0.15, 0.15]
    assert "grade" not in data.facts


def test_a_table_without_questions_asks_about_its_labels(tmp_path):
    table = write_table(tmp_path, "image,edema,Fracture\nscans/a.png,1,-1\nscans/b.png,,0.0\nscans/c.png,,\n")
    data = run(tmp_path / "out", table, flags="--split 1,0,0")
    assert [row[1:] for row in rows_of(data)] == [
        ("binary", "yes", "is_Edema", "Is there edema?"),
        ("binary", "no", "is_Fracture", "Is there fracture?"),
    ]
    known = {(int(s), CHEXPERT[k]): float(data.labels[s, k]) for s, k in np.argwhere(~np.isnan(data.labels))}
    assert known == {(0, "Edema"): 1, (0, "Fracture"): -1, (1, "Fracture"): 0}
    table.write_text("image\nscans/a.png")
    with pytest.raises(InputError, match=r"t.csv: no question is left \(neither questions nor labels"):
        run(tmp_path / "b", table)


def test_the_split_is_a_function_of_patient_and_seed(tmp_path):
    names = [f"i{number}" for number in range(40)]
    lines = [f"scans/{name}.png,P{number // 2},Is it?,no" for number, name in enumerate(names)]

    def write(rows: list[str]) -> None:
        write_table(tmp_path, "\n".join(["image,patient,question,answer", *rows]), " ".join(names))

    def splits(out: str, flags="--split 50,25,25") -> dict:
        data = run(tmp_path / out, tmp_path / "t.csv", flags=flags)
        pairs = set(zip(data.studies["patient"], data.studies["split"], strict=True))
        assert len(pairs) == len(dict(pairs))
        return dict(pairs)

    write(lines)
    every = splits("a")
    assert set(every.values()) == {"train", "val", "test"}
    assert splits("b", "--split 50,25,25 --seed 1") != every
    # fewer patients, in another order
    write(lines[:9:-1])
    assert splits("c") == {patient: every[patient] for patient in splits("d")}


BAD_ROWS = {
    "no such image": ("scans/z.png,P1,Is it?,yes,,,", r"scans/z.png\); .*table's folder"),
    "path out of the folder": ("../a.png,P1,Is it?,yes,,,", "../a.png leads out of the table's folder; "),
    "unknown answer": ("scans/b.png,P1,Is it?,maybe,,,", "answer 'maybe' is none of the answers of binary, .*; "),
    "not of this head": ("scans/b.png,P1,Is it?,yes,Severity,,", "answer 'yes' is none of none, mild, moderate, .*; "),
    "unknown head": ("scans/b.png,P1,Is it?,yes,size,,", "head 'size' is none of binary, category, .*; "),
    "no question": ("scans/b.png,P1,,yes,,,", "no question; "),
    "unknown label": ("scans/b.png,P1,Is it?,yes,,Edema;Oedema,", "label 'oedema' is none of Atelectasis, .*; "),
    "bad split": ("scans/b.png,P1,Is it?,yes,,,dev", "split 'dev' is none of train, val and test; "),
    "patient in two splits": ("scans/b.png,P0,Is it?,yes,,,test", "this patient is in another split .*; keep each"),
    "two patients": ("scans/a.png,P1,Is it?,yes,,,train", "patient 'P1' of this image is 'P0' in .*t.csv:2; "),
    "two labels": ("scans/a.png,P0,Is it?,yes,,Edema,train", "Edema 1.0 of this image is 0.0 in .*t.csv:2; "),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named(tmp_path, name):
    line, message = BAD_ROWS[name]
    first = "scans/a.png,P0,Is it?,no,,Fracture,train"
    table = write_table(tmp_path, f"image,patient,question,answer,head,labels,split\n{first}\n{line}\n")
    with pytest.raises(InputError, match=f"^{table}:3: .*{message}"):
        run(tmp_path / "out", table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scans", "t.csv"]


def test_bad_cells_of_labels_and_damaged_images_are_named(tmp_path):
    table = write_table(tmp_path, "image,Edema\nscans/a.png,1\nscans/b.png,2\n")
    with pytest.raises(InputError, match="t.csv:3: Edema '2' is none of 1, 0, -1 and blank; "):
        run(tmp_path / "out", table)
    table.write_text("image,Edema\nscans/a.png,1\nscans/b.png,0\n")
    (tmp_path / "scans/b.png").write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match=r"t.csv:3: .*scans/b.png: not a readable image \(.*1 such images.*; replace"):
        run(tmp_path / "out", table)


# --- images -----------------------------------------------------------------------------------------------------------


def squared(values: np.ndarray, side: int) -> np.ndarray:
    """Scaled in proportion until the longer edge fits, centred on black."""
    height, width = (round(edge * side / max(values.shape)) for edge in values.shape)
    expected = np.zeros((side, side))
    top, left = (side - height) // 2, (side - width) // 2
    scaled = Image.fromarray(values).resize((width, height), Image.Resampling.LANCZOS)
    expected[top : top + height, left : left + width] = scaled
    return expected


def test_images_are_as_an_independent_decode(tmp_path):
    """A JPEG much larger than the side, a tall one in colours, 16 bits, and DICOM; by relative paths with spaces."""
    wide = np.asarray(Image.fromarray(PICTURE).resize((700, 500), Image.Resampling.BICUBIC))
    tall = np.rot90(wide[:300]).copy()
    folder = tmp_path / "my scans"
    save(folder / "wide.jpg", wide)
    save(folder / "tall 1.jpg", np.dstack([tall] * 3))
    full = np.interp(wide, [wide.min(), wide.max()], [0, 255])
    save(folder / "16.png", wide.astype(np.uint16) * 200 + 31)
    save_dicom(folder / "x.dcm", wide * 8.0)
    (folder / "link.png").symlink_to("16.png")
    names = ["wide.jpg", "tall 1.jpg", "16.png", "x.dcm", "link.png"]
    pd.DataFrame({"image": names, "Edema": 1, "split": "train"}).to_excel(folder / "t.xlsx", index=False)
    here = Path.cwd()
    try:
        os.chdir(folder)
        data = run(Path("../out 1"), Path("t.xlsx"), flags="--image_size 64")
        assert len(pickle.loads(pickle.dumps(data)).study) == 5
    finally:
        os.chdir(here)
    assert data.images.shape == (5, 64, 64)
    assert (tmp_path / "out 1/images_64.u8").stat().st_size == 5 * 64 * 64
    for found, values in zip(data.images, [wide, tall, *[full.astype(np.uint8)] * 3], strict=True):
        difference = np.abs(found - squared(values, 64))
        assert difference.max() <= 6
        assert difference.mean() < 1.5


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_prepared_folder_is_opened_by_its_path(releases):
    data = run_releases(releases)
    packed = pickle.dumps(data)
    assert len(packed) < 500
    again = pickle.loads(packed)
    assert isinstance(again.images, np.memmap)
    assert (again.study.tolist(), again.bounds, again.types) == (data.study.tolist(), data.bounds, data.types)

    with pytest.raises(InputError, match="out: exists already"):
        run_releases(releases)
    (releases / "dangling").symlink_to("nowhere")
    with pytest.raises(InputError, match="dangling: exists already"):
        run_releases(releases, out="dangling")
    # OUT is forgotten: the advice is not to delete a release
    with pytest.raises(InputError, match="give CXR_JPG QA_RELEASE OUT, or TABLE OUT"):
        run(releases / "qba", releases / "jpg")

    facts = releases / "out/prepared.json"
    text = facts.read_text()
    facts.write_text(text.replace('"format": 1', '"format": 9'))
    with pytest.raises(InputError, match=r"out: cannot be used \(.*format 9\); prepare the data again"):
        open_prepared(releases / "out")
    facts.write_text(text)
    pixels = releases / "out/images_32.u8"
    pixels.write_bytes(pixels.read_bytes()[: 32 * 32])
    with pytest.raises(InputError, match=r"out: cannot be used \("):
        open_prepared(releases / "out")
    with pytest.raises(InputError, match="none: no prepared data; make it once: "):
        open_prepared(releases / "none")


def command(root: Path, *more: str) -> list[str]:
    words = [str(root / name) for name in ("jpg", "qba", "out")]
    return [sys.executable, "-m", "tools.prepare_data", "mimic_cxr", *words, "--workers", "2", *more]


def test_a_killed_preparation_leaves_no_folder(releases):
    """A question file that never ends holds it up, until it is killed with its processes."""
    path = next((releases / "qba").rglob("s50000004.qa.json"))
    text = path.read_text()
    path.unlink()
    os.mkfifo(path)
    partial = releases / ".out.partial"
    process = subprocess.Popen(command(releases), stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not partial.is_dir() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert partial.is_dir()
    assert not (releases / "out").exists()
    path.unlink()
    path.write_text(text)
    assert len(run_releases(releases).study) == 10
    assert not partial.exists()


def test_a_disk_without_room_and_a_bad_flag_are_one_line(releases):
    """Files end after 3 blocks, as on a full disk."""
    limited = ["bash", "-c", 'ulimit -f 3 && "$@"', "-", *command(releases)]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {releases}/out: cannot be written ([Errno 27] File too")
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in releases.iterdir()) == ["jpg", "qba"]

    done = subprocess.run(command(releases, "--grad", "A"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: unknown flag --grad; did you mean --grade?; see --help\n"


def test_a_process_that_is_killed_is_one_line(releases, monkeypatch):
    """As by the kernel, where memory ends."""
    monkeypatch.setattr("tasks.mimic_cxr.prepare.json.loads", lambda text: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RunError, match="a process was killed, .* --workers"):
        run_releases(releases)
