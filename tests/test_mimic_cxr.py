"""train_mimic_cxr.py and tasks/mimic_cxr: data, model, losses, scores, baselines, settings, and error messages."""

import gzip
import json
import math
import os
import re
import shutil
import signal
import zipfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import save_file
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


def prepared(*words, flags="") -> prepare.Prepared:
    """Run tools.prepare_data with SOURCE ... OUT at 32 pixels, and open OUT."""
    module, args = prepare_args(["mimic_cxr", *map(str, words), *f"--image_size 32 --workers 1 {flags}".split()])
    module.prepare(args)
    return prepare.open_prepared(Path(words[-1]))


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    """Give the process pool several jobs, and fit few classifiers of single questions."""
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
    """parse(words...): the script's arguments for the sample data."""
    encoders = ["--image_encoder", folder / "convnext_tiny", "--text_encoder", folder / "bert_tiny"]
    known = ["--data_path", folder / "prepared", *encoders, "--num_workers", "0", "--dropout", "0"]
    return lambda *words: script.parse_args([str(word) for word in (*known, *words)])


@pytest.fixture(scope="module")
def trained(parse, tmp_path_factory):
    """Folder of a run of a few steps, with its predictions."""
    out = tmp_path_factory.mktemp("trained") / "run"
    flags = "--max_steps 6 --eval_every_steps 2 --batch_size 16 --gradient_accumulation_steps 1 --warmup_steps 2"
    words = [*flags.split(), "--lr", "1e-2", "--log_every", "1", "--save_predictions"]
    assert script.run_task(parse("--output_dir", out, *words), ALONE) == 0
    return out


@pytest.fixture
def build(parse):
    """build(words...): (model without dropout for images of 32 pixels, arguments)."""

    def make(*words):
        args = parse("--image_size", "32", *words)
        return script.build_model(args, "no", torch.device("cpu")).eval(), args

    return make


# --- MIMIC-CXR's releases ---------------------------------------------------------------------------------------------


def main(sign: str | None = "pos", **tags) -> dict:
    """A main answer in a .qa.json file."""
    empty = {"answer_type": "main_answer", "regions": [], "obs_entities": [], "modifiers": []}
    return empty | {"positiveness": sign} | tags


DETAIL = main("neg", answer_type="details", obs_entities=["edema"])
# (question type, answers, the class, or the reason why there is none)
TARGETS = [
    ("D02_has_finding", [DETAIL, main(), main("neg")], "yes"),
    ("D02_has_finding", [main("neutral")], "positiveness 'neutral'"),
    ("has_device", [DETAIL], "no main answer"),
    ("B04_is_normal", [main()], "no"),
    ("is_worse", [main("neg")], "no"),
    # the first known name in any case; negative answers come last, and count only if there are no others
    ("D01_describe_finding", [main(obs_entities=["scar", " Edema ", "fracture"])], "edema"),
    ("describe_subcat", [main(obs_entities=["scar", "cyst"])], "category 'scar' not in the vocabulary"),
    ("D05", [main("neg", obs_entities=["edema"]), main(obs_entities=["fracture"])], "fracture"),
    ("C07_describe_region_device", [main("neg", obs_entities=["support devices"])], "no finding"),
    ("where_is_device", [main("neg", regions=["left lung"])], "the finding is absent"),
    ("D04_how_severe_is_finding", [main(modifiers=[["tempo", "acute"], ["severity", "Moderate"]])], "moderate"),
]


def test_head_and_target_of_a_question():
    for kind, answers, expected in TARGETS:
        head = head_of(kind)
        target, reason = target_of({"question_type": kind, "answers": answers}, head)
        assert (reason if target is None else HEADS[head][target]) == expected, kind
    assert head_of("E01_compare") is None


# (study, patient, split, views, questions); a view in capitals is a ViewPosition, any other a view code; the names of a
# study's images are in reverse order
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
    """Folder with both releases, jpg and qba, in PhysioNet's format; all pixels of study k are 40 k."""
    jpg, qba = tmp_path / "jpg", tmp_path / "qba"
    images, ratings = [], []
    for number, person, split, views, questions in RELEASE:
        subject, study = f"100000{person}", f"5000000{number}"
        folder = jpg / f"files/p10/p{subject}/s{study}"
        folder.mkdir(parents=True)
        for letter, view in zip("zyxw", views, strict=False):
            images.append((f"{letter}{number}", subject, study, split, *((view, "") if view.isupper() else ("", view))))
            Image.new("L", (48, 48), 40 * number).save(folder / f"{letter}{number}.jpg")
        asked = []
        for index, (grade, kind, answer, text) in enumerate(questions):
            asked.append({"question_id": f"q{index}", "question_type": kind, "question": text, "answers": [answer]})
            ratings.append((f"s{study}", f"q{index}", grade))
        file = qba / f"qa/p10/p{subject}/s{study}.qa.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"questions": asked}))
    columns = ["dicom_id", "subject_id", "study_id", "split", "ViewPosition", "ViewCodeSequence_CodeMeaning"]
    labels = pd.DataFrame([{"study_id": "50000001"} | LABELS], columns=[*reversed(CHEXPERT), "study_id"])
    tables = {"metadata": pd.DataFrame(images, columns=columns), "chexpert": labels}
    for name, table in (tables | {"split": tables["metadata"]}).items():
        table.to_csv(jpg / f"mimic-cxr-2.0.0-{name}.csv.gz", index=False)
    (qba / "metadata").mkdir()
    table = pd.DataFrame(ratings, columns=["study_id", "question_id", prepare.RATING])
    table.to_parquet(qba / "metadata/question_metadata.parquet", row_group_size=3)
    return tmp_path


def from_releases(root: Path, out: str, flags: str = "") -> prepare.Prepared:
    return prepared(root / "jpg", root / "qba", root / out, flags=flags)


def questions_of(data: prepare.Prepared) -> list[tuple]:
    """(study, head, class, text) of each question."""
    heads = [list(HEADS)[head] for head in data.head]
    classes = [HEADS[head][target] for head, target in zip(heads, data.target, strict=True)]
    texts = data.texts.take(data.question.tolist()).to_pylist()
    return list(zip(data.study.tolist(), heads, classes, texts, strict=True))


def left_out(data: prepare.Prepared) -> dict:
    return {reason: count for reason, count in data.metadata["left_out"].items() if count}


def test_contents_of_prepared_releases(releases):
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
    assert (data.bounds, data.metadata["questions"]) == ([0, 4, 5, 6], {"train": 4, "val": 1, "test": 1})
    assert left_out(data) == {
        "studies without a frontal image": 1, "questions below the grade, or unrated": 3,
        "questions D04_severe: no severity given": 1, "questions E01_more: a type without a head": 1,
        "questions D02_has_finding: no text": 1,
    }  # fmt: skip

    data = from_releases(releases, "lateral", "--view lateral --grade all")
    assert [Path(image).stem for image in data.studies["image"]] == ["y1", "z3", "z4"]
    assert [text for *_, text in questions_of(data)] == [*(text for *_, text in RATED), "Where?", "Is it?"]


def test_zip_and_number_of_processes_change_no_byte(releases):
    """Unsorted ratings don't either."""
    from_releases(releases, "out")
    export = releases / "qba/exports/B_frontal"
    export.mkdir(parents=True)
    with zipfile.ZipFile(export / "qa.zip", "w") as file:
        for member in (releases / "qba").rglob("*.json"):
            file.write(member, member.relative_to(releases / "qba"))
    shutil.rmtree(releases / "qba/qa")
    shutil.move(releases / "qba/metadata", export)
    path = export / "metadata/question_metadata.parquet"
    pq.write_table(pq.read_table(path)[::-1], path)
    from_releases(releases, "again", "--workers 3")
    for file in (releases / "out").iterdir():
        assert file.read_bytes() == (releases / "again" / file.name).read_bytes(), file.name
    with pytest.raises(InputError, match="qba: holds neither qa/ nor qa.zip; check the path"):
        from_releases(releases, "a", "--grade A")


def test_partial_download(releases, capsys):
    """Missing and damaged files are counted; an unusable release is an error."""
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

    def fails(message: str) -> None:
        with pytest.raises(InputError, match=message):
            from_releases(releases, "b")

    for number in (2, 3):
        asked[number].unlink()
    fails(r"qba: no question is left \(2 studies without a question file.*\); check --grade")
    shutil.rmtree(releases / "jpg/files")
    fails("jpg: none of 4 frontal images is there; check the path")


# --- user-supplied table ----------------------------------------------------------------------------------------------


def write_table(root: Path, *lines: str) -> Path:
    (root / "scans").mkdir(exist_ok=True)
    for number in range(3):
        Image.new("L", (48, 24)).save(root / f"scans/{number}.png")
    (root / "t.csv").write_text("\n".join(lines))
    return root / "t.csv"


def test_table_with_questions(tmp_path):
    """The answer determines a blank head; `labels` names those present; the rows of a study are put together."""
    table = write_table(
        tmp_path,
        "Image;Patient;Question;Answer;Head;Type;labels;split;sex;age",
        "scans/1.png;7;Where?;left lung;;where;none;validation;;",
        'scans/0.png;007;Is it, here?;YES;;;"Edema; pleural effusion";Training;F;63,5',
        "scans/0.png;007;How?;none;Severity;;;train;;",
        "scans/1.png;7;What?;No finding;category;what;;val;;",
    )
    data = prepared(table, tmp_path / "not yet/there/out")
    assert questions_of(data) == [
        (0, "binary", "yes", "Is it, here?"),
        (0, "severity", "none", "How?"),
        (1, "region", "left lung", "Where?"),
        (1, "category", "no finding", "What?"),
    ]
    assert [data.types[kind] for kind in data.type] == ["binary", "severity", "where", "what"]
    studies = data.studies[["patient", "split", "sex", "age"]].fillna("")
    assert studies.to_numpy().tolist() == [["007", "train", "F", 63.5], ["7", "val", "", ""]]
    present = {"Edema": 0, "Pleural Effusion": 0, "No Finding": 1}
    assert {CHEXPERT[label]: study for study, label in np.argwhere(data.labels == 1)} == present
    assert (data.labels == 0).sum() == 12 + 13


def test_table_of_labels(tmp_path):
    """Each known label becomes a question; without patients, each image is one."""
    lines = "image,edema,Fracture", "scans/0.png,1,", "scans/1.png,-1,0.0", "scans/2.png,,1"
    data = prepared(write_table(tmp_path, *lines), tmp_path / "out", flags="--split 1,0,0")
    assert list(data.studies["patient"]) == ["scans/0.png", "scans/1.png", "scans/2.png"]
    np.testing.assert_array_equal(data.labels[:, CHEXPERT.index("Edema")], [1, -1, np.nan])
    assert questions_of(data) == [
        (0, "binary", "yes", "Is there edema?"),
        (1, "binary", "no", "Is there fracture?"),
        (2, "binary", "yes", "Is there fracture?"),
    ]


BAD_ROWS = {
    "scans/z.png,P1,Is it?,yes,,,,": r"no such image \(.*/scans/z.png\); ",
    "../0.png,P1,Is it?,yes,,,,": "../0.png leads out of the table's folder; ",
    "scans/1.png,P1,Is it?,maybe,,,,": "answer 'maybe' is none of the answers of binary, .*; ",
    "scans/1.png,P1,Is it?,yes,Severity,,,": "answer 'yes' is none of none, mild, moderate, .*; ",
    "scans/1.png,P1,Is it?,yes,size,,,": "head 'size' is none of binary, category, .*; ",
    "scans/1.png,P1,,yes,,,,": "no question; ",
    "scans/1.png,P1,Is it?,yes,,Edema;Oedema,,": "label 'oedema' is none of Atelectasis, .*; ",
    "scans/1.png,P1,Is it?,yes,,,dev,": "split 'dev' is none of train, val and test; ",
    "scans/0.png,P1,Is it?,yes,,,train,": "patient 'P1' of this image is 'P0' in .*t.csv:2; ",
    "scans/2.png,P2,Is it?,yes,,,,070Y": "age '070Y' is no number; ",
}


def test_bad_rows_are_listed(tmp_path, capsys):
    first = "image,patient,question,answer,head,labels,split,age", "scans/0.png,P0,Is it?,no,,Fracture,train,"
    table = write_table(tmp_path, *first, *BAD_ROWS)
    with pytest.raises(InputError, match=f"{table}:3, {table}:4, {table}:5, ...: 10 rows cannot be used, all listed"):
        prepared(table, tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    for row, (line, message) in enumerate(zip(lines, BAD_ROWS.values(), strict=True), start=3):
        assert re.match(f"{table}:{row}: {message}", line)

    def fails(line: str, message: str) -> None:
        write_table(tmp_path, *first, line)
        with pytest.raises(InputError, match=f"{table}:3: {message}"):
            prepared(table, tmp_path / "out")

    fails("scans/1.png,P0,Is it?,yes,,,test,", "this patient is in another split .*; keep each")
    (tmp_path / "scans/bad.png").write_bytes(b"\x89PNG")
    fails("scans/bad.png,P2,Is it?,yes,,,train,", r".*bad.png: not a readable image \(.*\); replace")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scans", "t.csv"]


# --- images and the folder --------------------------------------------------------------------------------------------


def test_prepared_folder_is_complete_or_absent(folder, tmp_path, monkeypatch):
    releases = folder / "mimic-cxr-jpg", folder / "mimic-ext-cxr-qba"
    with pytest.raises(InputError, match="exists already"):
        prepared(*releases, folder / "prepared")
    # as the kernel does when memory runs out
    monkeypatch.setattr(prepare.json, "loads", lambda text: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RunError, match="a process was killed, .* --workers"):
        prepared(*releases, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_synthetic_findings_differ_only_in_shape():
    """Neither means nor histograms separate a finding from its look-alike."""
    rng = np.random.default_rng(0)
    for finding in sample_data.PLACES[::2]:
        present = rng.integers(0, 2, 300)
        drawn = [sample_data.draw_image(rng, 32, {finding: rng.integers(3)} if one else {}) for one in present]
        numbers = report.image_numbers(torch.from_numpy(np.stack(drawn))[:, None] / 255)
        scores = cross_val_predict(LogisticRegression(C=0.1), numbers, present, method="decision_function")
        assert roc_auc_score(present, scores) < 0.65, finding


# --- model ------------------------------------------------------------------------------------------------------------


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
PATCHES = SMALL | {"image_size": 32, "patch_size": 16}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
# {encoder: (settings, tokens of an image of 32 pixels, whether sine positions are added)}
ENCODERS = {
    "ResNet": (STAGES | {"embedding_size": 8}, 1, True),
    "DINOv3ConvNext": (STAGES, 1, True),
    "ViT": (PATCHES | {"image_size": 64}, 5, False),
    "ViTMAE": (PATCHES, 5, False),
    "Swin": (WINDOWS, 16, False),
    "CLIP": ({"text_config": SMALL | {"vocab_size": 99}, "vision_config": PATCHES}, 5, False),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_vision_encoders(name, build, tmp_path):
    """All parameters but unused ones are trained; activation checkpointing gives the same gradients."""
    settings, tokens, has_positions = ENCODERS[name]
    config = getattr(transformers, f"{name}Config")(**settings)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    model, args = build("--image_encoder", tmp_path)
    batch = script.largest_batch(model, 2)
    found = model.image_tokens(batch["image"])
    assert found.shape == (2, tokens, model.text.config.hidden_size)
    assert torch.equal(found, model.project(model.image_features(batch["image"]))) is not has_positions

    script.trial_step(model, batch, args)
    checkpointed, args = build("--image_encoder", tmp_path, "--gradient_checkpointing")
    checkpointed.load_state_dict(model.state_dict())
    script.trial_step(checkpointed, batch, args)
    for one, other in zip(model.parameters(), checkpointed.parameters(), strict=True):
        assert (one.grad is None) is not one.requires_grad
        assert one.grad is None or torch.allclose(one.grad, other.grad, atol=1e-7)


def test_image_and_convnext_features_are_normalized(build):
    """By ImageNet's statistics, and by the last norm, which transformers applies only to the pooled output."""
    model, args = build("--weight_decay", "0.3")
    image = torch.randint(0, 255, (2, 1, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    found = model.image(pixel_values=(image / 255 - mean) / std).last_hidden_state
    assert torch.equal(model.image_features(image), model.image.layernorm(found.flatten(2).transpose(1, 2)))
    # no weight decay on norms
    decayed, kept = script.make_optimizer(model, args).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0)
    assert all(parameter.dim() > 1 for parameter in decayed["params"])
    assert any(parameter is model.norm.weight for parameter in kept["params"])
    frozen, _ = build("--freeze_image", "--freeze_text")
    parts = {name.partition(".")[0] for name, parameter in frozen.named_parameters() if parameter.requires_grad}
    assert parts == {"project", "fusion", "norm", "heads", "chexpert", "findings"}


def test_sine_positions_are_distinct():
    positions = script.grid_positions(7, 768, torch.device("cpu"))
    assert len(positions.unique(dim=0)) == 49


def test_padding_and_other_questions_do_not_change_an_answer(build):
    model, _ = build()
    images = torch.randint(0, 255, (2, 1, 32, 32), dtype=torch.uint8)
    texts = ["is the study abnormal?", "is there pleural effusion on the left side?"]
    both = model(images, *script.tokenize(model.tokenizer, texts).values(), torch.tensor([1, 0]))
    alone = model(images[1:], *script.tokenize(model.tokenizer, texts[:1]).values(), torch.tensor([0]))
    for together, single in zip(both, alone, strict=True):
        assert torch.allclose(together[:1], single, atol=1e-5)


# --- batches and loss -------------------------------------------------------------------------------------------------


@pytest.fixture
def questions(parse, folder):
    """The training questions, with random augmentation and soft labels."""
    args = parse("--augmentation", "--chexpert_uncertain", "soft")
    return script.Questions(prepare.open_prepared(folder / "prepared"), "train", args)


@pytest.fixture
def batch_of(folder):
    """batch_of(questions, numbers, epoch): a batch of these questions."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bert_tiny")

    def make(questions, numbers, epoch=0) -> dict:
        indices = [Index(number) for number in numbers]
        for index in indices:
            index.epoch = epoch
        return questions.batch(tokenizer, indices)

    return make


def test_batch_holds_each_image_once_and_its_labels(questions, batch_of, parse):
    data, chosen = questions.data, [5, 0, 1, len(questions) - 1, *range(40, 60)]
    batch, studies = batch_of(questions, chosen), data.study[chosen]
    assert len(batch["image"]) == len(set(studies))
    assert np.array_equal(batch["image"][batch["image_of"], 0], data.images[studies])
    assert batch["target"].tolist() == data.target[chosen].tolist()
    truth = data.labels[studies]
    assert (truth == -1).any()
    assert np.array_equal(batch["known"], np.isfinite(truth))
    assert np.array_equal(batch["label"], np.where(truth == -1, 0.5, np.nan_to_num(truth)))

    # evenly spaced test questions; they are not augmented, and uncertain labels do not count
    first, last = data.bounds[2:]
    test = script.Questions(data, "test", parse("--augmentation", "--chexpert_uncertain", "soft"), limit=7)
    studies = data.study[first + np.arange(7) * (last - first) // 7]
    batch = batch_of(test, range(7))
    assert "augmentation" not in batch
    assert np.array_equal(batch["known"], np.isin(data.labels[studies], (0, 1)))


def test_augmentation(questions, batch_of):
    """It depends on seed, epoch and study; it shifts images and changes their contrast."""
    one, two = batch_of(questions, (0, 1)), batch_of(questions, (0, len(questions) - 1))
    assert torch.equal(one["augmentation"][one["image_of"][0]], two["augmentation"][two["image_of"][0]])
    assert not torch.equal(one["augmentation"], batch_of(questions, (0, 1), epoch=1)["augmentation"])

    image = torch.randint(0, 255, (2, 1, 32, 32), dtype=torch.uint8)
    # shifted by one pixel; brighter by a factor of e^0.15, gamma e^0.2
    augmentation = torch.tensor([[1 / 32, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0.15, 0.2]])
    moved, brighter = script.augment(image, augmentation)[:, 0]
    assert torch.allclose(moved[:, :-1], image[0, 0, :, 1:].float(), atol=0.1)
    expected = 255 * math.exp(0.15) * (image[1, 0] / 255) ** math.exp(0.2)
    assert torch.allclose(brighter, expected.clamp(max=255), rtol=1e-4, atol=1e-3)


def test_micro_batch_losses_add_up_to_means_over_the_global_batch(questions, batch_of, build):
    """Each head's cross-entropy is a mean over its own questions, the labels' loss over known labels."""
    model, _ = build()
    questions.augmentation_seed = None
    whole = batch_of(questions, range(40))
    counts = script.count_targets([batch_of(questions, range(9)), batch_of(questions, range(9, 40))])
    *answers, chexpert = model(whole["image"], whole["ids"], whole["mask"], whole["image_of"])
    expected = 0.0
    for head, weight in enumerate((1, 0.5, 0.5, 0.3)):
        asked = whole["head"] == head
        expected += weight * F.cross_entropy(answers[head][asked], whole["target"][asked])
    known = whole["known"]
    labels = F.binary_cross_entropy_with_logits(chexpert[known], whole["label"][known])
    parts = [batch_of(questions, range(begin, min(begin + 7, 40))) for begin in range(0, 40, 7)]
    losses = sum(torch.stack(script.batch_loss(model, part, counts, 0.3)) for part in parts)
    assert torch.allclose(losses, torch.stack([expected + 0.3 * labels, expected, labels]), rtol=1e-5)


def test_answers_depend_on_predicted_labels_without_training_them(questions, batch_of, build):
    model, _ = build()
    batch = batch_of(questions, range(12))
    parts = [batch[name] for name in ("image", "ids", "mask", "image_of")]
    before = model(*parts)
    torch.cat([values.flatten() for values in before[:-1]]).sum().backward()
    assert all(parameter.grad is None for parameter in model.chexpert.parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.findings.parameters())
    with torch.no_grad():
        model.chexpert[-1].bias[3] += 5
    assert ((model(*parts)[0] - before[0]).abs() > 1e-6).any(1).all()


# --- scores and baselines ---------------------------------------------------------------------------------------------


def test_aurocs_match_scikit_learn():
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


def test_table_is_grouped_by_view_sex_and_age(tmp_path):
    lines = ["image,question,answer,labels,split,view,sex,age"]
    for number, (answer, group) in enumerate((("yes", "AP,F,39"), ("no", "AP,M,40"), ("yes", "PA,,"))):
        Image.new("L", (32, 32)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,Is it?,{answer},{('Edema', 'none')[number % 2]},test,{group}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    data = prepared(tmp_path / "t.csv", tmp_path / "out")
    rows = {"study": data.study, "head": data.head, "target": data.target, "chexpert": data.labels[data.study]}
    rows |= {"predicted": np.full(3, data.target[0]), "probability": np.full((3, 2), 0.5)}
    metrics = report.table_of_groups(report.SplitResults("test", rows, data))
    accuracy = {name.split("/")[1]: value for name, value in metrics.items() if re.fullmatch("group/.*accuracy", name)}
    assert accuracy == {"view AP": 0.5, "view PA": 1, "sex F": 1, "sex M": 0, "age [0, 40)": 1, "age [40, 60)": 0}
    assert metrics["group/view AP/chexpert_auroc"] == 1


def test_baselines_without_the_image():
    """The most frequent answer to the question's type, or to its text if that occurs in training."""
    train = {"type": [0, 0, 0, 1, 1], "head": [0, 0, 0, 2, 2], "question": [7, 7, 8, 9, 9], "target": [1, 1, 0, 5, 5]}
    asked = {"type": [0, 0, 1, 3], "head": [0, 0, 2, 1], "question": [8, 99, 99, 99]}
    train, asked = ({name: np.array(values) for name, values in rows.items()} for rows in (train, asked))
    guesses = report.answers_without_image(train, asked)
    assert guesses["majority"].tolist() == [1, 1, 5, -1]
    assert guesses["question_only"].tolist() == [0, 1, 5, -1]


def test_label_lookup_uses_the_most_predictive_label():
    """Known values of label 1 answer question 3; the opposite of label 0 answers question 4."""
    labels = np.random.default_rng(0).integers(0, 2, (400, len(CHEXPERT))).astype(float)
    labels[::7, 1] = np.nan
    study, question, zeros = np.arange(800) // 2, np.tile([3, 4], 400), np.zeros(800, int)
    target = np.where(question == 3, labels[study, 1] == 1, 1 - labels[study, 0]).astype(int)
    train = {"study": study, "question": question, "head": zeros, "target": target}
    predicted = np.repeat([[0.1], [0.1], [0.9], [0.9]], len(CHEXPERT), axis=1)[[0, 2, 2, 0]]
    asked = {"question": question[:4], "head": zeros[:4], "chexpert": predicted}
    assert report.answers_from_labels(train, asked, labels, np.full(4, -1)).tolist() == [0, 0, 1, 1]


def test_validation_selects_the_penalty_of_logistic_regressions(monkeypatch):
    rng = np.random.default_rng(0)
    labels = np.tile(rng.integers(0, 2, (90, 1)).astype(float), len(CHEXPERT))
    features = rng.normal(size=(90, 8)) + labels[:, :1]
    images = np.split(np.arange(90), [60, 75])
    parts = [{"study": x, "question": x * 0, "target": labels[x, 0].astype(int)} for x in images]
    # standardized by the training images only
    assert report.components(features, 60)[:60].mean(0) == pytest.approx(np.zeros(8), abs=1e-9)
    real = report.fit_logistic

    def fit(x, target, penalty):
        """Fit wrong targets unless the penalty is 0.001."""
        return real(x, target if penalty == 0.001 else 1 - target, penalty)

    monkeypatch.setattr(report, "fit_logistic", fit)
    answers, scores = report.answers_from_features(features, labels, *parts, np.full(15, -1))
    assert roc_auc_score(parts[2]["target"], answers) > 0.6
    assert roc_auc_score(parts[2]["target"], scores[:, 0]) > 0.6


# --- runs -------------------------------------------------------------------------------------------------------------


def test_scores_match_pandas_and_scikit_learn(trained, folder):
    """Losses, scores and intervals of the test, recomputed from the saved predictions."""
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
    expected["test/vqa_accuracy_low"], _ = interval_of_mean(table["right"], table["patient"])
    expected["test/loss_vqa"] = (of_head["entropy"] * pd.Series(script.HEAD_WEIGHT)).sum()
    bins = (table["probability"].map(max) * 15).astype(int)
    gaps = (table["probability"].map(max) - table["right"]).groupby(bins).sum()
    expected["test/vqa_ece"] = gaps.abs().sum() / len(table)

    # each study once; labels that are not both present and absent in training have no column
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
    for name in ("majority/vqa_accuracy", "label_lookup/vqa_accuracy", "numbers/chexpert_auroc"):
        lead = summary[f"test/{name.partition('/')[2]}"] - summary[f"test/rival/{name}"]
        assert summary[f"test/rival/{name}_gain"] == pytest.approx(lead)


def test_best_weights_and_inputs_of_the_final_test(trained, parse, monkeypatch):
    """--eval_only repeats the test's numbers; ablations show other images; baselines know only the training set."""
    summary = json.loads((trained / "summary.json").read_text())
    log = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    rates = [line["train/lr"] for line in log if "train/lr" in line]
    assert rates[:3] == pytest.approx([0.5e-2, 1e-2, 1e-2])
    validated = [line["val/vqa_accuracy"] for line in log if "val/vqa_accuracy" in line]
    assert summary["val/vqa_accuracy"] == max(validated) > min(validated)

    answer, print_tables = Mock(wraps=script.answer_questions), Mock(wraps=report.print_tables)
    monkeypatch.setattr(script, "answer_questions", answer)
    monkeypatch.setattr(report, "print_tables", print_tables)
    assert script.run_task(parse("--output_dir", trained, "--eval_only"), ALONE) == 0
    again = json.loads((trained / "eval_test.json").read_text())
    assert {name: summary[name] for name in again} == again
    test, blank, shuffled = (call.args[1] for call in answer.call_args_list)
    split, patient = (test.data.studies[name].to_numpy() for name in ("split", "patient"))
    assert (blank.replacement == -1).all()
    others = shuffled.replacement[shuffled.column("study")]
    assert (patient[others] != patient[shuffled.column("study")]).all()
    assert set(split[others]) == {"test"}
    results, train, fitted, val, *_ = print_tables.call_args.args
    parts = train, fitted, val, results.rows
    assert [set(split[part["study"]]) for part in parts] == [{"train"}, {"train"}, {"val"}, {"test"}]


def test_predict_repeats_the_probabilities_of_the_test(trained, folder, parse, tmp_path, capsys):
    """A damaged image in the CSV is skipped."""
    table = pd.read_parquet(trained / "predictions_test.parquet").query("head == 'region'").head(3)
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8\xff")
    paths = [str(folder / "mimic-cxr-jpg" / name) for name in table["image"]]
    asked = pd.DataFrame({"image": ["bad.jpg", *paths], "question": ["Is it?", *table["question"]]})
    asked.to_csv(tmp_path / "ask.csv", index=False)
    words = ["--output_dir", trained, "--predict", tmp_path / "ask.csv", "--head", "region"]
    assert script.run_task(parse(*words), ALONE) == 0
    answers = pd.read_csv(trained / "predictions.csv")
    assert [*answers["image"], *answers["answer"]] == [*paths, *table["answer"]]
    assert np.allclose(answers["probability"], table["probability"].map(max), atol=1e-3)
    assert np.allclose(answers["Pneumothorax"], table["Pneumothorax"], atol=1e-3)
    assert "3 of 4 questions answered" in capsys.readouterr().out


def test_head_for_a_question():
    asked = ["Is it?", "Where is it?", "In which zone?", "How severe is it?", "What is it?", "Describe it."]
    heads = "binary region region severity category category"
    assert [script.head_for(question) for question in asked] == heads.split()


def test_run_on_a_user_supplied_table(parse, tmp_path):
    """Pneumonia is a bright spot. Image baselines see it too, but need two training images or more."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(48):
        pixels = rng.integers(0, 80, (50, 40))
        pixels[10:30, 5:20] += 120 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{number}.png")
        answer, labels = (("no", "none"), ("yes", "Pneumonia"))[number % 2]
        lines.append(f"{number}.png,Is there pneumonia?,{answer},{labels},{'test' if number > 31 else 'train'}")
    for name, chosen in {"all": lines, "test": lines[32:], "one": [lines[0], *lines[32:]]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["image,question,answer,labels,split", *chosen]))
        prepared(tmp_path / f"{name}.csv", tmp_path / name)
    flags = "--config", ROOT / "configs/mimic_cxr_small.yaml", "--resume_from", "auto"

    def run(out: str, data: str, *words) -> None:
        known = "--output_dir", tmp_path / out, "--data_path", tmp_path / data
        assert script.run_task(parse(*known, *flags, *words), ALONE) == 0

    run("run", "all")
    weights = tmp_path / "run/model.safetensors"
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    for name in ("", "rival/pixels/", "rival/numbers/", "rival/encoder/"):
        assert min(summary[f"test/{name}vqa_accuracy"], summary[f"test/{name}chexpert_auroc"]) > 0.9, name
    assert summary["test/rival/label_lookup/vqa_accuracy"] == 1
    for name in ("rival/majority", "ablation/blank_image"):
        assert summary[f"test/{name}/vqa_accuracy"] == 0.5, name
    for name, baselines in {"test": set(), "one": {"majority", "question_only", "label_lookup"}}.items():
        run("run", name, "--eval_only")
        alone = json.loads((tmp_path / "run/eval_test.json").read_text())
        assert alone["test/vqa_accuracy"] == summary["test/vqa_accuracy"]
        assert {key.split("/")[2] for key in alone if "/rival/" in key} == baselines

    with pytest.raises(InputError, match="no training question had a region answer; --head may be binary"):
        run("run", "test", "--predict", tmp_path / "0.png", "--question", "Where is it?")
    run("next", "one", "--pretrained_weights", weights, "--lr", "1e-30", "--max_steps", "1")
    assert (tmp_path / "next/model.safetensors").read_bytes() == weights.read_bytes()


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


def test_settings_from_file_hardware_and_defaults(tmp_path):
    """In this order of precedence; the guide's YAML and flat flags, on a node of 4 GPUs of 24 GB."""

    def fill(text: str, *words: str, memory: float = 24.0):
        (tmp_path / "config.yaml").write_text(text)
        args = script.parse_args(["--config", str(tmp_path / "config.yaml"), *words])
        return with_flags(args, **script.fill_settings(args, 4, memory, 8.9, (32, 100.0, 4)))

    def settings(*words: str) -> list:
        return [vars(fill(*words))[name] for name in list(script.DEFAULTS)[:5]]

    # the guide's row for 20 GB and more; accumulation depends on the batch
    assert settings("") == [16, 4, 3, 4, False]
    assert settings("batch_size: 8\nnum_workers: 0") == [8, 8, 0, 4, False]
    assert settings("", "--no_auto_optimize") == [16, 1, 4, 2, False]
    assert settings(GUIDE) == [24, 2, 2, 4, True]
    assert script.choose_engine(fill(GUIDE), ALONE) == (True, "as asked")
    for text, stage in ((GUIDE, 2), ("", 3)):
        assert script.read_deepspeed_config(fill(text, memory=4.0))["zero_optimization"]["stage"] == stage


def test_choice_of_engine(parse, monkeypatch):
    pair = du.Ranks(0, 2, torch.device("cpu"), "torchrun", None)
    assert not script.choose_engine(parse(), ALONE)[0]
    for words in ("--use_ddp", "--no_auto_optimize", "--eval_only", "--deterministic"):
        assert not script.choose_engine(parse(words), pair)[0], words
    assert script.choose_engine(parse(), pair)[0]
    assert script.choose_engine(parse("--use_deepspeed"), ALONE)[0]
    with pytest.raises(InputError, match="--deterministic: DeepSpeed adds gradients"):
        script.choose_engine(parse("--deterministic", "--use_deepspeed"), pair)
    monkeypatch.setattr(zero, "is_installed", lambda: False)
    assert script.choose_engine(parse(), pair) == (False, "DeepSpeed is not installed")
    with pytest.raises(InputError, match="DeepSpeed is not installed"):
        script.choose_engine(parse("--use_deepspeed"), pair)


# --- errors -----------------------------------------------------------------------------------------------------------

STAGE = '{"zero_optimization": {"stage": 2}, '
CONFIGS = {
    '{"zero_optimization": {"stage": 7}}': "zero_optimization.stage",
    STAGE + '"bf16": {"enabledd": true}}': "bf16.enabledd",
    STAGE + '"fp16": "yes"}': "fp16: must be a block",
    '{"fp16": {"enabled": "auto"}}': "zero_optimization.stage: must be 1, 2 or 3",
    STAGE + '"train_batch_size": 8}': "train_batch_size: is set by the script's flags",
}


def test_invalid_deepspeed_config(tmp_path):
    path = tmp_path / "zero.json"
    for content, message in CONFIGS.items():
        path.write_text(content)
        with pytest.raises(InputError, match=f"^{path}: .*{message}"):
            zero.read_zero_config(str(path))


NEW, OLD = "--output_dir {tmp}/run ", "--output_dir {trained} --resume_from auto "
INVALID = {
    NEW + "--image_size 64": "has images of 32 pixels, not of 64",
    NEW + "--image_encoder {tmp}": "{tmp}: cannot be loaded",
    NEW + "--image_encoder {tmp}/damaged": r"\d+ weights are not in the file",
    NEW + "--image_encoder {folder}/bert_tiny": "bert is not an encoder for --image_encoder",
    NEW + "--pretrained_weights {tmp}/no.safetensors": "not readable as safetensors",
    OLD + "--chexpert_uncertain soft": "give the same again",
}


def test_invalid_flags(trained, folder, parse, tmp_path):
    shutil.copytree(folder / "convnext_tiny", tmp_path / "damaged")
    save_file({}, tmp_path / "damaged/model.safetensors", metadata={"format": "pt"})
    places = {"tmp": tmp_path, "trained": trained, "folder": folder}
    for words, message in INVALID.items():
        with pytest.raises(InputError, match=message.format(**places)):
            script.run_task(parse(*words.format(**places).split()), ALONE)
        assert not (tmp_path / "run/metrics.jsonl").exists()
