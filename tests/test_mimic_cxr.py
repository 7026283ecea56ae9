"""train_mimic_cxr.py and tasks/mimic_cxr beside the promise: data, model, loss, scores and rivals, what goes wrong."""

import csv
import gzip
import json
import math
import os
import pickle
import shutil
import signal
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict

import distributed_utils as du
import train_mimic_cxr as script
from tasks.mimic_cxr import prepare, report, sample_data, zero
from tasks.mimic_cxr.answers import CHEXPERT, HEADS, head_of, target_of
from tools.prepare_data import parse_args as prepare_args
from utils.cli import InputError, RunError, with_flags
from utils.sampler import Index
from utils.stats import interval_of_mean

ROOT = Path(__file__).resolve().parents[1]
ALONE = du.Ranks(0, 1, torch.device("cpu"), "python", None)


def prepared(*words, flags="--workers 1") -> prepare.Prepared:
    """What tools.prepare_data makes of SOURCE ... OUT, at 32 pixels."""
    module, args = prepare_args(["mimic_cxr", *map(str, words), "--image_size", "32", *flags.split()])
    module.prepare(args)
    return prepare.open_prepared(Path(words[-1]))


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    """Several parts for each process that prepares, and few classifiers of single questions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "STUDIES", 2)
        patch.setattr(prepare, "IMAGES", 2)
        patch.setattr(report, "MOST_CLASSIFIERS", 8)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sample data, prepared."""
    root = tmp_path_factory.mktemp("mimic")
    sample_data.write_sample_data(root, num_train=40, num_val=8, num_test=12, image_size=64, seed=0)
    prepared(root / "mimic-cxr-jpg", root / "mimic-ext-cxr-qba", root / "prepared")
    return root


@pytest.fixture(scope="module")
def parse(folder):
    """parse(words...): the script's arguments on the sample data."""
    encoders = ["--image_encoder", folder / "convnext_tiny", "--text_encoder", folder / "bert_tiny"]
    known = ["--data_path", folder / "prepared", *encoders, "--num_workers", "0", "--dropout", "0"]
    return lambda *words: script.parse_args([str(word) for word in (*known, *words)])


@pytest.fixture(scope="module")
def trained(parse, tmp_path_factory):
    """The folder of a run of a few steps, with its predictions."""
    out = tmp_path_factory.mktemp("trained") / "run"
    flags = "--max_steps 6 --eval_every_steps 2 --batch_size 16 --gradient_accumulation_steps 1 --warmup_steps 2"
    words = [*flags.split(), "--lr", "1e-2", "--log_every", "1", "--save_predictions"]
    assert script.run_task(parse("--output_dir", out, *words), ALONE) == 0
    return out


def small_model(parse, *words):
    args = parse("--image_size", "32", "--max_question_length", "16", *words)
    return script.build_model(args, "no", torch.device("cpu")), args


# --- the releases -----------------------------------------------------------------------------------------------------


def main(sign: str | None = "pos", **tags) -> dict:
    """A main answer of a .qa.json."""
    empty = {"answer_type": "main_answer", "regions": [], "obs_entities": [], "modifiers": []}
    return empty | {"positiveness": sign} | tags


DETAIL = main("neg", answer_type="details", obs_entities=["edema"])
# (question type, answers, the class, or why there is none)
TARGETS = [
    ("D02_has_finding", [DETAIL, main(), main("neg")], "yes"),
    ("D02_has_finding", [main("neutral")], "positiveness 'neutral'"),
    ("has_device", [DETAIL], "no main answer"),
    ("B03_is_abnormal", [main()], "yes"),
    ("B04_is_normal", [main()], "no"),
    ("is_normal_region", [main("neg")], "yes"),
    ("is_worse", [main("neg")], "no"),
    # the first name of the vocabulary, whatever its case; what is absent comes last, and is no finding where it is all
    ("D01_describe_finding", [main(obs_entities=["scar", " Edema ", "fracture"])], "edema"),
    ("describe_subcat", [main(obs_entities=["scar", "cyst"])], "category 'scar' not in the vocabulary"),
    ("A_indication", [main()], "no category given"),
    ("D05", [main("neg", obs_entities=["edema"]), main(obs_entities=["fracture"])], "fracture"),
    ("C07_describe_region_device", [main("neg", obs_entities=["support devices"])], "no finding"),
    ("D03_where_is_finding", [main(regions=["left lung"]), main(regions=["heart"])], "left lung"),
    ("where_is_device", [main("neg", regions=["left lung"])], "the finding is absent"),
    ("C01_describe_region", [main("neg", regions=["right hilum"])], "right hilum"),
    ("D04_how_severe_is_finding", [main(modifiers=[["tempo", "acute"], ["severity", "Moderate"]])], "moderate"),
    ("D04_how_severe_is_finding", [main(modifiers=[["severity", "huge"]])], "severity 'huge' not in the vocabulary"),
    ("how_severe_is_finding", [main(modifiers=None)], "no severity given"),
]


def test_heads_and_targets_by_name():
    for kind, answers, expected in TARGETS:
        head = head_of(kind)
        target, reason = target_of({"question_type": kind, "answers": answers}, head)
        assert (reason if target is None else HEADS[head][target]) == expected, kind
    assert head_of("E01_compare") is None


# (study, patient, split, views, questions); a view in capitals is ViewPosition, another one its code, and a study's
# images are named backwards
MILD = main(modifiers=[["severity", "mild"]])
RATED = [
    (grade, "D02_has_finding", main(), str(grade)) for grade in ("5_A+", None, "1_D", "3_B", "6_A++", "4_A", "2_C")
]
RELEASE = [
    (4, 13, "test", ["LATERAL"], [("4_A", "D02_has_finding", main("neg"), "Is it?")]),
    (3, 13, "test", ["lateral", "Postero-Anterior"], [("4_A", "D03_where", main(regions=["heart"]), "Where?")]),
    (2, 12, "validate", ["AP", "AP"], [
        ("3_B", "D04_severe", MILD, "How?"), ("3_B", "D04_severe", main(), "How?"),
        ("4_A", "E01_more", main(), "More?"), ("4_A", "D02_has_finding", main(), " "),
    ]),
    (5, 11, "train", ["AP"], []),
    (1, 11, "train", ["PA", "LATERAL", "PA", "AP"], RATED),
]  # fmt: skip
LABELS = {"Edema": "1.0", "Atelectasis": "0.0", "Support Devices": "-1.0"}


@pytest.fixture
def releases(tmp_path) -> Path:
    """Both releases, as PhysioNet has them, in jpg and qba; the images of study k are all of grey 40 k."""
    jpg, qba = tmp_path / "jpg", tmp_path / "qba"
    names = sorted(CHEXPERT, reverse=True)
    tables = {
        "metadata": [("dicom_id", "subject_id", "study_id", "ViewPosition", "Rows", "ViewCodeSequence_CodeMeaning")],
        "split": [("dicom_id", "study_id", "subject_id", "split")],
        "chexpert": [("subject_id", "study_id", *names)],
    }
    ratings = []
    for number, person, split, views, questions in RELEASE:
        subject, study = f"100000{person}", f"5000000{number}"
        image = jpg / f"files/p10/p{subject}/s{study}"
        image.mkdir(parents=True)
        for dicom, view in zip("zyxw", views, strict=False):
            place = (view, "48", "") if view.isupper() else ("", "48", view)
            tables["metadata"].append((f"{dicom}{number}", subject, study, *place))
            tables["split"].append((f"{dicom}{number}", study, subject, split))
            Image.new("L", (48, 48), 40 * number).save(image / f"{dicom}{number}.jpg")
        if number == 1:
            tables["chexpert"].append((subject, study, *[LABELS.get(name, "") for name in names]))
        asked = []
        for place, (grade, kind, answer, text) in enumerate(questions):
            asked.append({"question_id": f"q{place}", "question_type": kind, "question": text, "answers": [answer]})
            ratings.append((f"p{subject}", f"s{study}", f"q{place}", grade))
        file = qba / f"qa/p10/p{subject}/s{study}.qa.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"questions": asked}))
    for name, rows in tables.items():
        with gzip.open(jpg / f"mimic-cxr-2.0.0-{name}.csv.gz", "wt", newline="") as file:
            csv.writer(file).writerows(rows)
    (qba / "metadata").mkdir()
    columns = dict(
        zip(("patient_id", "study_id", "question_id", prepare.RATING), zip(*ratings, strict=True), strict=True)
    )
    pq.write_table(pa.table(columns), qba / "metadata/question_metadata.parquet", row_group_size=3)
    return tmp_path


def from_releases(root: Path, out: str, flags: str = "") -> prepare.Prepared:
    return prepared(root / "jpg", root / "qba", root / out, flags=f"--workers 1 {flags}")


def questions_of(data: prepare.Prepared) -> list[tuple]:
    """(study's place, head, class, text) of each question."""
    heads = [list(HEADS)[head] for head in data.head]
    classes = [HEADS[head][target] for head, target in zip(heads, data.target, strict=True)]
    return list(
        zip(data.study.tolist(), heads, classes, data.texts.take(data.question.tolist()).to_pylist(), strict=True)
    )


def left_out(data: prepare.Prepared) -> dict:
    return {reason: count for reason, count in data.facts["left_out"].items() if count}


def test_what_is_taken_from_the_releases(releases):
    people = releases / "people.csv.gz"
    people.write_bytes(gzip.compress(b"anchor_age,subject_id,gender\n61,10000011,F\n"))
    data = from_releases(releases, "out", f"--patients {people}")
    # PA before AP, then the first by name; sorted by split and study
    found = data.studies[["image", "patient", "split", "view", "sex", "age"]].fillna("")
    assert found.to_numpy().tolist() == [
        ["files/p10/p10000011/s50000001/x1.jpg", "10000011", "train", "PA", "F", 61],
        ["files/p10/p10000011/s50000005/z5.jpg", "10000011", "train", "AP", "F", 61],
        ["files/p10/p10000012/s50000002/y2.jpg", "10000012", "val", "AP", "", ""],
        ["files/p10/p10000013/s50000003/y3.jpg", "10000013", "test", "PA", "", ""],
    ]
    assert np.abs(data.images - np.reshape([40, 200, 80, 120], (4, 1, 1))).max() <= 2
    labels = dict(zip(CHEXPERT, data.labels[0].tolist(), strict=True))
    assert {name: str(value) for name, value in labels.items() if value == value} == LABELS
    assert np.isnan(data.labels[1:]).all()
    good = [(0, "binary", "yes", text) for text in ("5_A+", "3_B", "6_A++", "4_A")]
    assert questions_of(data) == [*good, (2, "severity", "mild", "How?"), (3, "region", "heart", "Where?")]
    assert (data.bounds, data.facts["questions"]) == ([0, 4, 5, 6], {"train": 4, "val": 1, "test": 1})
    assert left_out(data) == {
        "studies without a frontal image": 1, "questions below the grade, or unrated": 3,
        "questions D04_severe: no severity given": 1, "questions E01_more: a type without a head": 1,
        "questions D02_has_finding: no text": 1,
    }  # fmt: skip

    data = from_releases(releases, "lateral", "--view lateral --grade A+")
    assert [Path(image).stem for image in data.studies["image"]] == ["y1", "z3", "z4"]
    assert [text for *_, text in questions_of(data)] == ["5_A+", "6_A++"]
    data = from_releases(releases, "all", "--view PA --grade all")
    assert [text for *_, text in questions_of(data)] == [text for *_, text in RATED] + ["Where?"]


def test_zip_export_and_processes_change_no_byte(releases):
    """Nor do ratings in another order, as large strings."""
    from_releases(releases, "out")
    export = releases / "qba/exports/B_frontal"
    export.mkdir(parents=True)
    with zipfile.ZipFile(export / "qa.zip", "w") as file:
        for member in (releases / "qba").rglob("*.json"):
            file.write(member, member.relative_to(releases / "qba"))
    shutil.rmtree(releases / "qba/qa")
    shutil.move(releases / "qba/metadata", export)
    path = export / "metadata/question_metadata.parquet"
    table = pq.read_table(path)[::-1]
    pq.write_table(table.cast(pa.schema([(name, pa.large_string()) for name in table.column_names])), path)
    from_releases(releases, "again", "--workers 3")
    for file in (releases / "out").iterdir():
        assert file.read_bytes() == (releases / "again" / file.name).read_bytes(), file.name
    with pytest.raises(InputError, match="qba: holds neither qa/ nor qa.zip; check the path"):
        from_releases(releases, "a", "--grade A")


def test_a_partial_download(releases, capsys):
    """What is there is taken, the rest is counted; a release that cannot be used is named."""
    images = {path.stem: path for path in (releases / "jpg").rglob("*.jpg")}
    asked = {int(path.name[8]): path for path in (releases / "qba").rglob("*.json")}
    images["x1"].unlink()
    images["y3"].write_bytes(b"\xff\xd8\xff")
    asked[5].write_text(asked[5].read_text()[:-5])
    data = from_releases(releases, "out")
    assert questions_of(data) == [(1, "severity", "mild", "How?")]
    counts = {"without an image file": 1, "with a damaged image": 1, "with a damaged question file": 1}
    assert {f"studies {reason}": count for reason, count in counts.items()}.items() <= left_out(data).items()
    assert f"warning: {images['y3']}: not a readable image (" in capsys.readouterr().out
    for number in (2, 3):
        asked[number].unlink()

    def fails(message: str) -> None:
        with pytest.raises(InputError, match=message):
            from_releases(releases, "b")

    fails(r"qba: no question is left \(2 studies without a question file.*\); check --grade")
    (releases / "qba/metadata/question_metadata.parquet").unlink()
    fails("question_metadata.parquet: cannot be read .*--grade all")
    shutil.rmtree(releases / "jpg/files")
    fails("jpg: none of 4 frontal images is there; check the path")
    path = releases / "jpg/mimic-cxr-2.0.0-split.csv.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"10000011,train", b"10000011,test", 1)))
    fails("split.csv.gz: patient '10000011' is in two splits")


# --- a table of one's own ---------------------------------------------------------------------------------------------


def write_table(root: Path, text: str, images: int = 3) -> Path:
    (root / "scans").mkdir(exist_ok=True)
    for number in range(images):
        Image.new("L", (48, 24), 6 * number).save(root / f"scans/{number}.png")
    (root / "t.csv").write_text(text)
    return root / "t.csv"


def test_a_table_with_questions(tmp_path):
    """Semicolons, a head that is given or follows from the answer, labels by name, and rows of a study together."""
    lines = [
        "Image;Patient;Question;Answer;Head;Type;labels;split;sex;age",
        "scans/1.png;7;Where?;left lung;;where;none;validation;;",
        'scans/0.png;007;Is it, here?;YES;;;"Edema; pleural effusion";Training;F;61',
        "scans/0.png;007;How?;none;Severity;;;train;;",
        "scans/1.png;7;What?;No finding;category;what;;val;;",
    ]
    data = prepared(write_table(tmp_path, "\n".join(lines)), tmp_path / "not yet/there/out")
    assert questions_of(data) == [
        (0, "binary", "yes", "Is it, here?"),
        (0, "severity", "none", "How?"),
        (1, "region", "left lung", "Where?"),
        (1, "category", "no finding", "What?"),
    ]
    assert [data.types[kind] for kind in data.type] == ["binary", "severity", "where", "what"]
    assert data.studies[["patient", "split", "sex"]].fillna("").to_numpy().tolist() == [
        ["007", "train", "F"],
        ["7", "val", ""],
    ]
    present = [{CHEXPERT[place] for place in np.flatnonzero(labels == 1)} for labels in data.labels]
    assert present == [{"Edema", "Pleural Effusion"}, {"No Finding"}]
    assert (data.labels == 0).sum() == 12 + 13


def test_a_table_of_labels(tmp_path):
    """Each label that is known becomes a question; a patient's studies are in one split."""
    lines = [f"scans/{number}.png,P{number // 2},{('1', '-1', '')[number % 3]},0.0" for number in range(40)]
    table = write_table(tmp_path, "\n".join(["image,patient,edema,Fracture", *lines]), images=40)
    data = prepared(table, tmp_path / "out", flags="--split 50,25,25")
    number = data.studies["image"].str.extract(r"(\d+)").astype(int)[0].to_numpy()
    # padded, not stretched
    assert (data.images[:, 8:24] == 6 * number.reshape(-1, 1, 1)).all()
    assert not data.images[:, [7, 24]].any()
    np.testing.assert_array_equal(data.labels[:, CHEXPERT.index("Edema")], np.array([1, -1, np.nan])[number % 3])
    asked = questions_of(data)
    edema = [place for place, _, answer, text in asked if (answer, text) == ("yes", "Is there edema?")]
    assert number[edema].tolist() == [one for one in number if one % 3 == 0]
    assert [place for place, *rest in asked if rest == ["binary", "no", "Is there fracture?"]] == list(range(40))
    assert len(asked) == 40 + len(edema)
    split = data.studies.groupby("patient")["split"]
    assert (split.nunique() == 1).all()
    assert set(split.first()) == {"train", "val", "test"}


BAD_ROWS = {
    "scans/z.png,P1,Is it?,yes,,,": r"scans/z.png\); .*table's folder",
    "../0.png,P1,Is it?,yes,,,": "../0.png leads out of the table's folder; ",
    "scans/1.png,P1,Is it?,maybe,,,": "answer 'maybe' is none of the answers of binary, .*; ",
    "scans/1.png,P1,Is it?,yes,Severity,,": "answer 'yes' is none of none, mild, moderate, .*; ",
    "scans/1.png,P1,Is it?,yes,size,,": "head 'size' is none of binary, category, .*; ",
    "scans/1.png,P1,,yes,,,": "no question; ",
    "scans/1.png,P1,Is it?,yes,,Edema;Oedema,": "label 'oedema' is none of Atelectasis, .*; ",
    "scans/1.png,P1,Is it?,yes,,,dev": "split 'dev' is none of train, val and test; ",
    "scans/1.png,P0,Is it?,yes,,,test": "this patient is in another split .*; keep each",
    "scans/0.png,P1,Is it?,yes,,,train": "patient 'P1' of this image is 'P0' in .*t.csv:2; ",
    "scans/0.png,P0,Is it?,yes,,Edema,train": "Edema 1.0 of this image is 0.0 in .*t.csv:2; ",
    "scans/bad.png,P2,Is it?,yes,,,train": r"bad.png: not a readable image \(.*\); replace",
}


@pytest.mark.parametrize("line", BAD_ROWS)
def test_a_bad_row_is_named(tmp_path, line):
    first = "scans/0.png,P0,Is it?,no,,Fracture,train"
    table = write_table(tmp_path, f"image,patient,question,answer,head,labels,split\n{first}\n{line}\n")
    (tmp_path / "scans/bad.png").write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match=f"^{table}:3: .*{BAD_ROWS[line]}"):
        prepared(table, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scans", "t.csv"]


def test_all_bad_rows_are_listed(tmp_path, capsys):
    """Ages with decimal commas are numbers where all of the column are, and then only."""
    lines = ["image;patient;question;answer;age", "scans/0.png;P0;Is it?;no;63,5", "scans/1.png;P1;Is it?;yes;70"]
    data = prepared(write_table(tmp_path, "\n".join(lines), images=9), tmp_path / "out")
    assert data.studies["age"].tolist() == [63.5, 70]
    lines += ["scans/2.png;P2;Is it?;yes;070Y", "scans/3.png;P3;;yes;", "scans/4.png;P4;Is it?;perhaps;"]
    table = write_table(tmp_path, "\n".join(lines), images=9)
    with pytest.raises(InputError, match=f"^{table}:2, {table}:4, {table}:5, ...: 4 rows cannot be used, all listed"):
        prepared(table, tmp_path / "other")
    assert f"{table}:4: age '070Y' is no number; correct it, or leave it blank" in capsys.readouterr().out


# --- images and the folder --------------------------------------------------------------------------------------------


def test_a_prepared_folder_is_there_as_a_whole_or_not(folder, tmp_path, monkeypatch):
    releases = folder / "mimic-cxr-jpg", folder / "mimic-ext-cxr-qba"
    data = prepare.open_prepared(folder / "prepared")
    paths = releases[0] / data.studies["image"]
    assert all(np.array_equal(data.images[k], prepare.decode(path, 32)) for k, path in enumerate(paths))
    # a loading process gets its path alone
    assert len(pickle.dumps(data)) < 500
    assert np.array_equal(pickle.loads(pickle.dumps(data)).study, data.study)
    with pytest.raises(InputError, match="exists already"):
        prepared(*releases, folder / "prepared")
    shutil.copytree(folder / "prepared", tmp_path / "cut")
    os.truncate(tmp_path / "cut/images_32.u8", 32 * 32)
    with pytest.raises(InputError, match=r"cut: cannot be used \("):
        prepare.open_prepared(tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut")

    def full(args, partial: Path) -> None:
        (partial / "studies.parquet").touch()
        assert not (tmp_path / "out").exists()
        raise OSError(28, "No space left on device")

    real = prepare.write
    monkeypatch.setattr(prepare, "write", full)
    with pytest.raises(RunError, match=r"out: cannot be written \(\[Errno 28\] No space"):
        prepared(*releases, tmp_path / "out")
    # as by the kernel, where memory ends
    monkeypatch.setattr(prepare, "write", real)
    monkeypatch.setattr(prepare.json, "loads", lambda text: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RunError, match="a process was killed, .* --workers"):
        prepared(*releases, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_made_up_findings_differ_by_form_alone():
    """Neither a mean nor a histogram tells a finding from its look-alike."""
    rng = np.random.default_rng(0)
    for place in sample_data.PLACES[::2]:
        there = rng.integers(0, 2, 300)
        drawn = [sample_data.draw_image(rng, 32, {place: rng.integers(3)} if one else {}) for one in there]
        numbers = report.image_numbers(torch.from_numpy(np.stack(drawn))[:, None] / 255)
        scores = cross_val_predict(LogisticRegression(C=0.1), numbers, there, method="decision_function")
        assert roc_auc_score(there, scores) < 0.65, place
        none, *degrees = (
            sample_data.draw_image(np.random.default_rng(1), 32, {place: degree} if degree < 3 else {})
            for degree in (3, 0, 1, 2)
        )
        assert all((image != none).any() for image in degrees), place


# --- model ------------------------------------------------------------------------------------------------------------


def of(name: str, **options) -> torch.nn.Module:
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
PATCHES = SMALL | {"image_size": 32, "patch_size": 16}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
WINDOWS = {"patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
# encoder: (how it is made, tokens of an image of 32 pixels, whether sine positions are added)
ENCODERS = {
    "convnext_v2": (lambda: of("ConvNextV2", **STAGES), 1, True),
    "resnet": (lambda: of("ResNet", embedding_size=8, **STAGES), 1, True),
    "dinov3_convnext": (lambda: of("DINOv3ConvNext", **STAGES), 1, True),
    "dinov3_vit": (lambda: of("DINOv3ViT", **PATCHES), 5, False),
    "vit": (lambda: of("ViT", **PATCHES | {"image_size": 64}), 5, False),
    "mae": (lambda: of("ViTMAE", **PATCHES), 5, False),
    "swin": (lambda: of("Swin", image_size=32, **WINDOWS), 16, False),
    "clip": (lambda: of("CLIP", text_config=SMALL | {"vocab_size": 99}, vision_config=PATCHES), 5, False),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_any_vision_encoder(name, parse, tmp_path):
    """Tokens in the width of the text; all weights but the unused ones are trained; recomputed gradients are equal."""
    make, tokens, has_positions = ENCODERS[name]
    make().save_pretrained(tmp_path / name)
    model, args = small_model(parse, "--image_encoder", tmp_path / name)
    batch = script.largest_batch(model, 2)
    found = model.image_tokens(batch["image"])
    assert found.shape == (2, tokens, model.text.config.hidden_size)
    assert torch.equal(found, model.project(model.image_features(batch["image"]))) is not has_positions

    script.trial_step(model, batch, args)
    recomputed, args = small_model(parse, "--image_encoder", tmp_path / name, "--gradient_checkpointing")
    recomputed.load_state_dict(model.state_dict())
    script.trial_step(recomputed, batch, args)
    for one, other in zip(model.parameters(), recomputed.parameters(), strict=True):
        assert (one.grad is None) is not one.requires_grad
        assert one.grad is None or torch.allclose(one.grad, other.grad, atol=1e-7)


def test_the_image_is_normalised_and_so_are_the_convnexts_features(parse):
    """By ImageNet's statistics, and by the last norm, which transformers applies to the pooled output alone."""
    model, args = small_model(parse, "--weight_decay", "0.3")
    image = torch.randint(0, 255, (2, 1, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    found = model.image(pixel_values=(image / 255 - mean) / std).last_hidden_state
    assert torch.equal(model.image_features(image), model.image.layernorm(found.flatten(2).transpose(1, 2)))
    # the norms do not decay
    decayed, kept = script.make_optimizer(model, args).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0)
    assert all(parameter.dim() > 1 for parameter in decayed["params"])
    assert any(parameter is model.norm.weight for parameter in kept["params"])


def test_positions_are_finite_and_differ():
    """At the width of BERT-base, and of the tests' models."""
    for width in (768, 32):
        places = script.grid_positions(7, width, torch.device("cpu"))
        assert places.isfinite().all()
        assert len(places.unique(dim=0)) == 49


def test_padding_and_neighbours_change_no_answer(parse):
    """A question alone, and beside a longer one about another image."""
    model, _ = small_model(parse)
    model.eval()
    images = torch.randint(0, 255, (2, 1, 32, 32), dtype=torch.uint8)
    batch = script.tokenize(
        model.tokenizer, 16, ["is the study abnormal?", "is there pleural effusion on the left side?"]
    )
    alone = script.tokenize(model.tokenizer, 16, ["is the study abnormal?"])
    assert (alone["ids"].shape[1], batch["ids"].shape[1]) == (8, 16)
    with torch.no_grad():
        both = model(images, batch["ids"], batch["mask"], torch.tensor([1, 0]))
        one = model(images[1:], alone["ids"], alone["mask"], torch.tensor([0]))
    for together, single in zip(both, one, strict=True):
        assert torch.allclose(together[:1], single, atol=1e-5)


# --- batches and loss -------------------------------------------------------------------------------------------------


@pytest.fixture
def questions(folder, parse):
    """The training questions, with a tokenizer."""
    args = parse("--augmentation", "--chexpert_uncertain", "soft")
    data = script.Questions(prepare.open_prepared(folder / "prepared"), "train", args)
    data.tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bert_tiny"), 128
    return data


def indices(*numbers: int, epoch: int = 0) -> list[Index]:
    made = [Index(number) for number in numbers]
    for index in made:
        index.epoch = epoch
    return made


def test_a_batch_holds_each_image_once_and_its_own_labels(questions, parse):
    data, chosen = questions.data, np.array([5, 0, 1, len(questions) - 1, *range(40, 60)])
    batch, studies = questions.batch(indices(*chosen)), data.study[chosen]
    assert len(batch["image"]) == len(set(studies))
    assert np.array_equal(batch["image"][batch["image_of"], 0], data.images[studies])
    texts = data.texts.take(data.question[chosen].tolist()).to_pylist()
    assert torch.equal(batch["ids"], script.tokenize(*questions.tokenizer, texts)["ids"])
    truth = data.labels[studies]
    assert (truth == -1).any()
    assert np.array_equal(batch["known"], np.isfinite(truth))
    assert np.array_equal(batch["label"], np.where(truth == -1, 0.5, np.nan_to_num(truth)))

    # evenly spaced questions of the test, where an uncertain label does not count; their images are those of others
    first, last = data.bounds[2:]
    shown = np.arange(len(data.studies)) - 1
    test = script.Questions(data, "test", parse("--augmentation", "--chexpert_uncertain", "soft"), limit=7, shown=shown)
    test.tokenizer, studies = questions.tokenizer, data.study[first + np.arange(7) * (last - first) // 7]
    batch = test.batch(range(7))
    assert "changes" not in batch
    assert np.array_equal(test.column("study"), studies)
    assert np.array_equal(batch["known"], np.isin(data.labels[studies], (0, 1)))
    assert np.array_equal(batch["image"][batch["image_of"], 0], data.images[studies - 1])
    shown[:] = -1
    assert not test.batch(range(7))["image"].any()


def test_augmentation(questions):
    """A function of seed, epoch and study; it moves and changes contrast, and mirrors nothing."""
    one, two = questions.batch(indices(0, 1)), questions.batch(indices(0, len(questions) - 1))
    assert torch.equal(one["changes"][one["image_of"][0]], two["changes"][two["image_of"][0]])
    assert not torch.equal(one["changes"], questions.batch(indices(0, 1, epoch=1))["changes"])
    assert (one["changes"].abs() <= torch.tensor(script.STRENGTH)).all()

    image = torch.randint(0, 255, (2, 1, 32, 32), dtype=torch.uint8)
    # a shift by one pixel, of the second image alone
    changes = torch.zeros(2, 6)
    changes[1, 0] = 1 / 32
    moved = script.augment(image, changes)
    assert torch.allclose(moved[0], image[0].float(), atol=1e-3)
    assert torch.allclose(moved[1, 0, :, :-1], image[1, 0, :, 1:].float(), atol=0.1)
    # brighter by the factor e^0.15, gamma e^0.2
    changes = torch.tensor([[0.0, 0, 0, 0, 0.15, 0.2]])
    expected = 255 * math.exp(0.15) * (128 / 255) ** math.exp(0.2)
    grey = torch.full((1, 1, 32, 32), 128, dtype=torch.uint8)
    assert script.augment(grey, changes)[0, 0, 16, 16] == pytest.approx(expected, rel=1e-4)


def test_leaves_add_up_to_means_over_the_global_batch(questions, parse):
    """Each head's cross-entropy over its own questions, the labels' over those that are known, whatever the cut."""
    model, _ = small_model(parse)
    model.eval()
    questions.augmented_by = None
    whole = questions.batch(indices(*range(40)))
    counts = script.count_targets([questions.batch(indices(*range(9))), questions.batch(indices(*range(9, 40)))])
    *answers, chexpert = model(whole["image"], whole["ids"], whole["mask"], whole["image_of"])
    expected = 0.0
    for place, weight in enumerate((1, 0.5, 0.5, 0.3)):
        asked = whole["head"] == place
        expected += weight * F.cross_entropy(answers[place][asked], whole["target"][asked])
    known = whole["known"]
    labels = F.binary_cross_entropy_with_logits(chexpert[known], whole["label"][known])
    parts = [questions.batch(indices(*range(begin, min(begin + 7, 40)))) for begin in range(0, 40, 7)]
    losses = sum(torch.stack(script.batch_loss(model, part, counts, 0.3)) for part in parts)
    assert torch.allclose(losses, torch.stack([expected + 0.3 * labels, expected, labels]), rtol=1e-5)


def test_answers_know_what_the_head_of_the_labels_knows(questions, parse):
    """Another label gives another answer, in all places of a batch; no answer's gradient reaches the labels' head."""
    model, _ = small_model(parse)
    model.eval()
    batch = questions.batch(indices(*range(12)))
    parts = [batch[name] for name in ("image", "ids", "mask", "image_of")]
    before = model(*parts)
    torch.cat([values.flatten() for values in before[:-1]]).sum().backward()
    assert all(parameter.grad is None for parameter in model.chexpert.parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.findings.parameters())
    with torch.no_grad():
        model.chexpert[-1].bias[3] += 5
        after = model(*parts)
    assert torch.allclose(after[-1] - before[-1], 5.0 * (torch.arange(14) == 3), atol=1e-5)
    assert ((after[0] - before[0]).abs() > 1e-6).any(1).all()


# --- scores and rivals ------------------------------------------------------------------------------------------------


def test_areas_are_scikit_learns():
    rng = np.random.default_rng(0)
    scores, truth = rng.integers(0, 9, (60, 3)) / 8, rng.choice([0, 1, -1, np.nan], (60, 3))
    truth[:, 2] = 0
    counts = rng.integers(0, 4, (5, 60))
    areas = report.aurocs(scores, truth, counts)
    for label in range(2):
        sure = np.isin(truth[:, label], (0, 1))
        for count, area in zip(counts, areas[:, label], strict=False):
            expected = roc_auc_score(truth[sure, label], scores[sure, label], sample_weight=count[sure])
            assert area == pytest.approx(expected)
    assert np.isnan(areas[:, 2]).all()
    assert report.macro(areas) == pytest.approx(areas[:, :2].mean(1))


def test_rivals_without_the_image():
    """The type's most frequent answer, and the text's, which falls back on the type's for a new text."""
    train = {"type": [0, 0, 0, 1, 1], "head": [0, 0, 0, 2, 2], "question": [7, 7, 8, 9, 9], "target": [1, 1, 0, 5, 5]}
    asked = {"type": [0, 0, 1, 3], "head": [0, 0, 2, 1], "question": [8, 99, 99, 99]}
    guesses = report.answers_without_image(
        *({name: np.array(x) for name, x in rows.items()} for rows in (train, asked))
    )
    assert guesses["majority"].tolist() == [1, 1, 5, -1]
    assert guesses["question_only"].tolist() == [0, 1, 5, -1]


def test_the_label_that_tells_most_of_a_question_answers_it():
    """Question 3 is label 1's, where that is known; question 4 is the other way round of label 0."""
    labels = np.random.default_rng(0).integers(0, 2, (400, len(CHEXPERT))).astype(float)
    labels[::7, 1] = np.nan
    study, question, zeros = np.arange(800) // 2, np.tile([3, 4], 400), np.zeros(800, int)
    target = np.where(question == 3, labels[study, 1] == 1, 1 - labels[study, 0]).astype(int)
    train = {"study": study, "question": question, "head": zeros, "target": target}
    asked = {
        "question": question[:4],
        "head": zeros[:4],
        "chexpert": np.tile([[0.1], [0.9]], (2, len(CHEXPERT)))[[0, 2, 1, 3]],
    }
    assert report.answers_from_labels(train, asked, labels, np.full(4, -1)).tolist() == [0, 1, 1, 0]


def test_the_validation_chooses_the_penalties_of_a_rival(monkeypatch):
    rng = np.random.default_rng(0)
    labels = np.tile(rng.integers(0, 2, (90, 1)).astype(float), len(CHEXPERT))
    features = rng.normal(size=(90, 8)) + labels[:, :1]
    images = np.split(np.arange(90), [60, 75])
    parts = [{"study": x, "question": x * 0, "target": labels[x, 0].astype(int)} for x in images]
    # standardised by what is fitted alone
    assert not report.components(np.ones((90, 8)), 60).any()
    assert report.components(features, 60)[:60].mean(0) == pytest.approx(np.zeros(8), abs=1e-9)
    real = report.fit_logistic

    def fit(x, target, penalty):
        """With the other penalties all is the wrong way round."""
        return real(x, target if penalty == 0.001 else 1 - target, penalty)

    monkeypatch.setattr(report, "fit_logistic", fit)
    answers, scores = report.classical(features, labels, *parts, np.full(15, -1))
    assert roc_auc_score(parts[2]["target"], answers) > 0.6
    assert roc_auc_score(parts[2]["target"], scores[:, 0]) > 0.6


# --- a run ------------------------------------------------------------------------------------------------------------


def test_the_table_by_other_means(trained, folder):
    """Losses, scores and intervals of the test from the saved predictions, by pandas and scikit-learn."""
    summary = json.loads((trained / "summary.json").read_text())
    table = pd.read_parquet(trained / "predictions_test.parquet")
    data = prepare.open_prepared(folder / "prepared")
    assert len(table) == data.bounds[3] - data.bounds[2]
    rows = table[["head", "probability", "truth"]].to_numpy()
    assert [HEADS[head][p.argmax()] for head, p, _ in rows] == list(table["answer"])
    table["entropy"] = [-np.log(p[HEADS[head].index(truth)]) for head, p, truth in rows]
    table["right"] = (table["truth"] == table["answer"]).astype(float)
    of_head = table.groupby("head")[["right", "entropy"]].mean()
    expected = {f"test/vqa_accuracy/{head}": right for head, right in of_head["right"].items()}
    expected["test/vqa_accuracy"] = table["right"].mean()
    expected["test/vqa_accuracy_low"], expected["test/vqa_accuracy_high"] = interval_of_mean(
        table["right"], table["patient"]
    )
    expected["test/loss_vqa"] = (of_head["entropy"] * pd.Series(script.HEAD_WEIGHT)).sum()
    sure = table["probability"].map(max)
    bins = pd.DataFrame({"sure": sure, "right": table["right"]}).groupby((sure * 15).astype(int))
    gaps = bins["sure"].mean() - bins["right"].mean()
    expected["test/vqa_ece"] = (gaps.abs() * bins.size()).sum() / len(table)

    # labels, each study once; one that is not both present and absent in training has no column
    studies = table.drop_duplicates("image").set_index("image")
    truth, areas, losses = data.studies.set_index("image").loc[studies.index], {}, []
    for label in studies.columns.intersection(CHEXPERT):
        known = truth[label][truth[label].isin((0, 1))]
        scores = studies[label][known.index]
        areas[f"test/chexpert_auroc/{label}"] = roc_auc_score(known, scores)
        losses += np.log(np.where(known == 1, scores, 1 - scores)).tolist()
    assert 0 < len(areas) < len(CHEXPERT)
    expected |= areas | {"test/chexpert_auroc": np.mean(list(areas.values()))}
    for name, value in expected.items():
        assert summary[name] == pytest.approx(value, rel=1e-4), name
    assert summary["test/chexpert_auroc_low"] < summary["test/chexpert_auroc"] < summary["test/chexpert_auroc_high"]
    assert summary["test/loss"] == pytest.approx(summary["test/loss_vqa"] + 0.3 * summary["test/loss_chexpert"])
    for metric, names in (
        ("vqa_accuracy", ["majority", "question_only", "label_lookup", "pixels", "numbers", "encoder"]),
        ("chexpert_auroc", ["pixels", "numbers", "encoder"]),
    ):
        for rival in (f"test/rival/{name}/{metric}" for name in names):
            assert summary[f"{rival}_gain"] == pytest.approx(summary[f"test/{metric}"] - summary[rival])


def test_the_steps_and_what_the_test_knows(trained, parse, monkeypatch):
    """--eval_only gives the test's numbers again; ablations show other images, and rivals know the training alone."""
    summary = json.loads((trained / "summary.json").read_text())
    log = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    steps = 20 * math.ceil(summary["training questions"] / 16)
    factors = [0.5, 1, *(0.5 + 0.5 * math.cos(math.pi * step / (steps - 2)) for step in range(4))]
    assert [line["train/lr"] for line in log if "train/lr" in line] == pytest.approx([1e-2 * x for x in factors])
    validated = [line["val/vqa_accuracy"] for line in log if "val/vqa_accuracy" in line]
    assert summary["val/vqa_accuracy"] == max(validated) > min(validated)

    asked, tables = [], []
    answer, tell = script.answer_questions, report.print_tables
    monkeypatch.setattr(script, "answer_questions", lambda *words: asked.append(words[1]) or answer(*words))
    monkeypatch.setattr(report, "print_tables", lambda *words: tables.append(words) or tell(*words))
    assert script.run_task(parse("--output_dir", trained, "--eval_only"), ALONE) == 0
    again = json.loads((trained / "eval_test.json").read_text())
    assert {name: summary[name] for name in again} == again
    test, blank, shuffled = asked
    split, patient = (test.data.studies[name].to_numpy() for name in ("split", "patient"))
    assert (blank.shown == -1).all()
    others = shuffled.shown[shuffled.column("study")]
    assert (patient[others] != patient[shuffled.column("study")]).all()
    assert set(split[others]) == {"test"}
    own, known, fitted, *_ = tables[0]
    parts = known, fitted["train"], fitted["val"], own.rows
    assert [set(split[part["study"]]) for part in parts] == [{"train"}, {"train"}, {"val"}, {"test"}]


def test_prediction_equals_the_test(trained, folder, parse, tmp_path, capsys):
    """A CSV of test images, one of them damaged: the saved probabilities, and the others are answered."""
    table = pd.read_parquet(trained / "predictions_test.parquet").drop_duplicates("image").head(3)
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8\xff")
    paths = [str(folder / "mimic-cxr-jpg" / name) for name in table["image"]]
    asked = pd.DataFrame({"image": ["bad.jpg", *paths], "question": ["Is it?", *table["question"]]})
    asked.to_csv(tmp_path / "ask.csv", index=False)
    for head in set(table["head"]):
        words = ["--output_dir", trained, "--predict", tmp_path / "ask.csv", "--head", head]
        assert script.run_task(parse(*words), ALONE) == 0
        answers = pd.read_csv(trained / "predictions.csv").set_index("image")
        for row, path in zip(table.itertuples(), paths, strict=True):
            assert answers.loc[path, "Pneumothorax"] == pytest.approx(row.Pneumothorax, abs=1e-3)
            if row.head == head:
                assert answers.loc[path, "probability"] == pytest.approx(max(row.probability), abs=1e-3)
                assert answers.loc[path, "answer"] == row.answer
    text = capsys.readouterr().out
    assert "bad.jpg: cannot be read" in text
    assert "3 of 4 questions answered" in text


def test_which_head_answers():
    asked = ["Is it?", "Where is it?", "In which zone?", "How severe is it?", "What is it?", "Describe it."]
    heads = "binary region region severity category category"
    assert [script.head_for(question) for question in asked] == heads.split()
    # a label that no training study has, or all have, means nothing
    labels, studies = np.eye(3, len(CHEXPERT)), pd.DataFrame({"split": ["train", "train", "test"]})
    assert report.trained_labels(SimpleNamespace(labels=labels, studies=studies)) == list(CHEXPERT[:2])


def test_own_images_are_learned(parse, tmp_path):
    """A bright spot where there is pneumonia; rivals see it, too, but not where training has one image or none."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(48):
        pixels = rng.integers(0, 80, (50, 40))
        pixels[10:30, 5:20] += 120 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{number}.png")
        answer, labels = (("no", "none"), ("yes", "Pneumonia"))[number % 2]
        lines.append(f"{number}.png,Is there pneumonia?,{answer},{labels},{'test' if number > 31 else 'train'}")
    for name, chosen in (
        ("all", lines), ("train", lines[:32]), ("test", lines[32:]), ("one", [lines[0], *lines[32:]])
    ):  # fmt: skip
        (tmp_path / f"{name}.csv").write_text("\n".join(["image,question,answer,labels,split", *chosen]))
        prepared(tmp_path / f"{name}.csv", tmp_path / name)

    def run(out: str, data: str, *words) -> None:
        known = "--output_dir", tmp_path / out, "--data_path", tmp_path / data
        assert script.run_task(parse(*known, "--config", ROOT / "configs/mimic_cxr_small.yaml", *words), ALONE) == 0

    run("run", "all")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    for name in ("", "rival/pixels/", "rival/numbers/", "rival/encoder/"):
        assert min(summary[f"test/{name}vqa_accuracy"], summary[f"test/{name}chexpert_auroc"]) > 0.9, name
    assert (summary["test/rival/label_lookup/vqa_accuracy"], summary["test/rival/majority/vqa_accuracy"]) == (1, 0.5)
    for name, rivals in (("test", set()), ("one", {"majority", "question_only", "label_lookup"})):
        run("run", name, "--eval_only", "--resume_from", "auto")
        alone = json.loads((tmp_path / "run/eval_test.json").read_text())
        assert alone["test/vqa_accuracy"] == summary["test/vqa_accuracy"]
        assert {key.split("/")[2] for key in alone if "/rival/" in key} == rivals

    with pytest.raises(InputError, match="no training question had a region answer; --head may be binary"):
        run("run", "test", "--resume_from", "auto", "--predict", tmp_path / "0.png", "--question", "Where is it?")
    weights = tmp_path / "run/model.safetensors"
    run("next", "train", "--pretrained_weights", weights, "--lr", "1e-30", "--max_steps", "1")
    assert (tmp_path / "next/model.safetensors").read_bytes() == weights.read_bytes()
    frozen, _ = small_model(parse, "--freeze_image", "--freeze_text")
    names = [name for name, parameter in frozen.named_parameters() if parameter.requires_grad]
    assert not [name for name in names if name.startswith(("image.", "text."))]
    assert "project.0.weight" in names


# --- settings ---------------------------------------------------------------------------------------------------------

GUIDE = """
training:
  batch_size_per_gpu: 24
  gradient_accumulation_steps: 2
  fp16: true
  gradient_checkpointing: true
  dataloader_num_workers: 8  # 2 per GPU

deepspeed:
  enabled: true
  stage: 2
"""


def test_command_line_over_file_over_hardware_over_default(tmp_path):
    """The guide's YAML as printed and flat flags, on a node of 4 GPUs of 24 GB."""

    def settings(text: str, *words: str) -> tuple:
        (tmp_path / "config.yaml").write_text(text)
        args = script.parse_args(["--config", str(tmp_path / "config.yaml"), *words])
        args = with_flags(args, **script.fill_settings(args, 4, 24.0, 8.9, (32, 100.0, 4)))
        names = "batch_size gradient_accumulation_steps num_workers prefetch_factor gradient_checkpointing"
        return tuple(getattr(args, name) for name in names.split())

    assert settings("batch_size: 16\ngradient_accumulation_steps: 1\nnum_workers: 0\n")[:3] == (16, 1, 0)
    assert settings("batch_size: 16", "--batch_size", "3")[0] == 3
    # the guide's row of 20 GB and more; accumulation goes with a batch that is given
    assert settings("") == (16, 4, 3, 4, False)
    assert settings("batch_size: 8")[:2] == (8, 8)
    assert settings("", "--no_auto_optimize") == (16, 1, 4, 2, False)
    assert settings(GUIDE) == (24, 2, 2, 4, True)
    args = script.parse_args(["--config", str(tmp_path / "config.yaml")])
    args = with_flags(args, **script.fill_settings(args, 4, 4.0, 8.9, (32, 100.0, 4)))
    assert script.choose_engine(args, ALONE) == (True, "as asked")
    assert script.read_engine(args)["zero_optimization"]["stage"] == 2
    args.stage = None
    assert script.read_engine(args)["zero_optimization"]["stage"] == 3


def test_the_engine_follows_the_guides_diagram(parse, monkeypatch):
    pair = du.Ranks(0, 2, torch.device("cpu"), "torchrun", None)
    for ranks, words, expected in (
        (ALONE, [], False), (pair, [], True), (pair, ["--use_ddp"], False), (ALONE, ["--use_deepspeed"], True),
        (pair, ["--no_auto_optimize"], False), (pair, ["--eval_only"], False), (pair, ["--deterministic"], False),
    ):  # fmt: skip
        assert script.choose_engine(parse(*words), ranks)[0] is expected, words
    with pytest.raises(InputError, match="--deterministic: DeepSpeed adds gradients"):
        script.choose_engine(parse("--deterministic", "--use_deepspeed"), pair)
    monkeypatch.setattr(zero, "is_installed", lambda: False)
    assert script.choose_engine(parse(), pair) == (False, "DeepSpeed is not installed")
    with pytest.raises(InputError, match="DeepSpeed is not installed"):
        script.choose_engine(parse("--use_deepspeed"), pair)


# --- what goes wrong --------------------------------------------------------------------------------------------------

STAGE = '{"zero_optimization": {"stage": 2}, '
CONFIGS = {
    '{"zero_optimization": {"stage": 7}}': "zero_optimization.stage",
    '{"zero_optimization": {"stagee": 2}}': "zero_optimization",
    STAGE + '"bf16": {"enabledd": true}}': "bf16.enabledd",
    STAGE + '"fp16": "yes"}': "fp16: must be a block",
    '{"fp16": {"enabled": "auto"}}': "zero_optimization.stage: must be 1, 2 or 3",
    STAGE + '"train_batch_size": 8}': "train_batch_size: is set by the script's flags",
}


@pytest.mark.parametrize("content", CONFIGS)
def test_a_wrong_deepspeed_config_is_one_line(tmp_path, content):
    (tmp_path / "zero.json").write_text(content)
    with pytest.raises(InputError, match=f"^{tmp_path}/zero.json: .*{CONFIGS[content]}"):
        zero.read_zero_config(str(tmp_path / "zero.json"))


NEW, OLD = "--output_dir {tmp}/run ", "--output_dir {trained} --resume_from auto "
MISTAKES = {
    NEW + "--data_path {tmp}/nothing": "no data; give --data_path",
    NEW + "--image_size 64": "has images of 32 pixels, not of 64",
    NEW + "--image_encoder {tmp}": "{tmp}: cannot be loaded",
    NEW + "--image_encoder {tmp}/damaged": "1 weights are not in the file",
    NEW + "--image_encoder {folder}/bert_tiny": "bert is not an encoder for --image_encoder",
    NEW + "--max_question_length 4000": "do not go together",
    NEW + "--pretrained_weights {tmp}/no.safetensors": "not readable as safetensors",
    NEW + "--predict {folder} --question Is?": "no such checkpoint",
    OLD + "--chexpert_uncertain soft": "give the same again",
    OLD + "--chexpert_weight 2": "give the same again",
    OLD + "--questions_per_image 3": "give the same again",
    OLD + "--augmentation": "give the same again",
    # the run's own figures are no images
    "--output_dir {trained} --predict {trained} --question Where?": "no image there",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_one_line(words, trained, folder, parse, tmp_path):
    shutil.copytree(folder / "convnext_tiny", tmp_path / "damaged")
    weights = load_file(tmp_path / "damaged/model.safetensors")
    del weights[max(weights)]
    save_file(weights, tmp_path / "damaged/model.safetensors", metadata={"format": "pt"})
    places = {"tmp": tmp_path, "trained": trained, "folder": folder}
    with pytest.raises(InputError, match=MISTAKES[words].format(**places)):
        script.run_task(parse(*words.format(**places).split()), ALONE)
    assert not (tmp_path / "run/metrics.jsonl").exists()
