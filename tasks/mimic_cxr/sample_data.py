"""Write a small synthetic data set in the formats of MIMIC-CXR-JPG and MIMIC-Ext-CXR-QBA, and two tiny encoders.

Wherever a finding can occur, the image shows either the finding or a harmless look-alike of a different shape. A lung
lesion is a ring, and its look-alike is a blob. The other findings are smooth, and their look-alikes are wavy.

As in the published data sets, some fields are empty, some labels are uncertain and some answers match no class.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image

from tasks.mimic_cxr.answers import CHEXPERT
from utils.cli import InputError, whole

SIDES = ("left", "right")
SEVERITIES = ("mild", "moderate", "severe")
ZONES = ("upper lung zone", "mid lung zone", "lower lung zone")
IN_LUNG = ("pleural effusion", "pneumothorax", "lung lesion")
GRADED = ("pleural effusion", "pneumothorax", "cardiomegaly")
PLACES = [(entity, side) for entity in (*IN_LUNG, "support devices") for side in SIDES] + [("cardiomegaly", "")]
REGIONS = {"pleural effusion": "costophrenic angle", "pneumothorax": "lung apex", "support devices": "upper lung zone"}
GRADES = ("1_D", "3_B", "4_A", "5_A+", None)
VIEWS = {"PA": "postero-anterior", "AP": "antero-posterior"}
# {(finding, side of the body): severity or, for a lung lesion, lung zone; both are 0 to 2}
Findings = dict[tuple[str, str], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", type=Path, help="output folder; must not hold a data set yet")
    add("--num_train", type=whole(1), default=2000, help="training patients, two studies each")
    add("--num_val", type=whole(0), default=100, help="validation patients")
    add("--num_test", type=whole(0), default=200, help="test patients")
    add("--image_size", type=whole(32), default=64, help="side of the square images in pixels")
    add("--seed", type=int, default=0, help="random seed; equal seeds give equal studies")


def write_sample_data(out: Path, num_train: int, num_val: int, num_test: int, image_size: int, seed: int) -> None:
    """Write the data set and the encoders. Raises InputError if `out` already contains a data set."""
    import pandas as pd

    jpg, qba = out / "mimic-cxr-jpg", out / "mimic-ext-cxr-qba"
    if jpg.exists() or qba.exists():
        raise InputError(f"{out}: already holds a data set; choose another folder or delete it")
    metadata, splits, labels, ratings, texts = [], [], [], [], set()
    counts = {"train": num_train, "validate": num_val, "test": num_test}
    split_of_study = [split for split, count in counts.items() for _ in range(2 * count)]
    for number, split in enumerate(split_of_study):
        rng = np.random.default_rng([seed, number])
        subject, study, dicom = 10_000_000 + number // 2, 50_000_000 + number, f"{number:08x}"
        place = f"p{subject // 1_000_000}/p{subject}"
        findings = draw_findings(rng)
        folder = jpg / "files" / place / f"s{study}"
        folder.mkdir(parents=True)
        Image.fromarray(draw_image(rng, image_size, findings)).save(folder / f"{dicom}.jpg", quality=92)
        view = "PA" if rng.random() < 0.6 else "AP"
        metadata.append((dicom, subject, study, "" if rng.random() < 0.05 else view, VIEWS[view]))
        splits.append((dicom, study, subject, split))
        labels.append((subject, study, *draw_labels(rng, findings)))

        questions = ask(rng, findings)
        file = qba / "qa" / place / f"s{study}.qa.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"patient_id": f"p{subject}", "study_id": f"s{study}", "questions": questions}))
        for question in questions:
            grade = GRADES[rng.integers(len(GRADES))]
            ratings.append((f"p{subject}", f"s{study}", question["question_id"], question["question_type"], grade))
            texts.add(question["question"])

    views = ("ViewPosition", "ViewCodeSequence_CodeMeaning")
    for name, rows, columns in (
        ("metadata", metadata, ("dicom_id", "subject_id", "study_id", *views)),
        ("split", splits, ("dicom_id", "study_id", "subject_id", "split")),
        ("chexpert", labels, ("subject_id", "study_id", *CHEXPERT)),
    ):
        # omit the timestamp from the gzip header, so that the same seed gives identical files
        compression = {"method": "gzip", "mtime": 0}
        path = jpg / f"mimic-cxr-2.0.0-{name}.csv.gz"
        pd.DataFrame(rows, columns=columns).to_csv(path, index=False, compression=compression)
    names = ["patient_id", "study_id", "question_id", "question.question_type", "question.quality.rating"]
    (qba / "metadata").mkdir()
    path = qba / "metadata" / "question_metadata.parquet"
    pd.DataFrame(ratings, columns=names).to_parquet(path, row_group_size=10_000)
    write_encoders(out, texts, seed)
    print(f"{out}: {len(splits)} studies, {len(ratings)} questions, convnext_tiny, bert_tiny")


# --- findings and images ----------------------------------------------------------------------------------------------


def draw_findings(rng: Generator) -> Findings:
    findings = {}
    ill = rng.random() < 0.6
    for side in SIDES:
        if ill and rng.random() < 0.85:
            findings[str(rng.choice(IN_LUNG)), side] = int(rng.integers(3))
        if rng.random() < 0.22:
            findings["support devices", side] = 0
    if ill and rng.random() < 0.5:
        findings["cardiomegaly", ""] = int(rng.integers(3))
    return findings


def soft(distance: np.ndarray) -> np.ndarray:
    """Return a smooth step from 0 outside a shape to 1 inside it; `distance` is positive inside."""
    return 1 / (1 + np.exp(-np.clip(2 * distance, -30, 30)))


def ridge(distance: np.ndarray) -> np.ndarray:
    return np.exp(-(distance**2) / 2)


def draw_image(rng: Generator, size: int, findings: Findings) -> np.ndarray:
    """Draw a synthetic X-ray (size, size), uint8, with the patient's left on the image's right.

    Lengths in the code are in 64ths of the image side.
    """

    def level_of(entity: str, side: str) -> tuple[bool, int]:
        drawn = int(rng.integers(3))
        return (entity, side) in findings, findings.get((entity, side), drawn)

    def wave(along: np.ndarray) -> np.ndarray:
        phase = rng.uniform(0, 2 * np.pi)
        return 2.5 * np.cos(along / 2 + phase)

    y, x = np.mgrid[:size, :size] * 64 / size
    x = x - 32 - rng.uniform(-2.5, 2.5)
    y = y - 35 - rng.uniform(-2.5, 2.5)
    # half the chest width; half the lung height
    width, height = rng.uniform(20, 27.5), rng.uniform(22.5, 25.5)
    coarse = Image.fromarray(rng.uniform(-1, 1, (6, 6)).astype(np.float32))
    image = 0.62 + 0.06 * np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC))
    image = image + 0.1 * soft(0.06 * width - abs(x))
    v = y / height
    for side in SIDES:
        # u: 0 at the spine, 1 at the chest wall; across: -1 to 1 within the lung
        u = (x if side == "left" else -x) / width
        across = (u - 0.61) / 0.37
        lung = soft(0.37 * width * (1 - (abs(across) ** 3 + abs(v) ** 3) ** (1 / 3)))
        ribs = np.cos(25 * v + 3 * across**2 + rng.uniform(0, 6))
        image = image + lung * (0.03 * ribs - 0.3)

        bend = 2 * (across**2 - 1 / 3)
        there, level = level_of("pneumothorax", side)
        below = height * (v + 0.76 - 0.13 * level - rng.uniform(-0.02, 0.02)) - (bend if there else wave(u * width))
        image = image + lung * (rng.uniform(0.25, 0.35) * ridge(below) - rng.uniform(0.14, 0.2) * soft(-below))
        there, level = level_of("pleural effusion", side)
        below = height * (v - 0.8 + 0.13 * level - rng.uniform(-0.02, 0.02)) + (bend if there else wave(u * width))
        image = image + rng.uniform(0.3, 0.4) * lung * soft(below)

        there, zone = level_of("lung lesion", side)
        center_u, center_v = rng.uniform(0.47, 0.75), 0.32 * (zone - 1) + rng.uniform(-0.06, 0.06)
        distance = np.hypot((u - center_u) * width, (v - center_v) * height)
        radius = rng.uniform(4.1, 4.7)
        shape = ridge(distance - radius) if there else np.exp(-((distance / radius) ** 4) / 2)
        image = image + rng.uniform(18, 26) * (size / 64) ** 2 * shape / shape.sum()

        along = (u - rng.uniform(0.5, 0.65)) * width
        shape = 0.1 * along if ("support devices", side) in findings else wave(along)
        off = y + rng.uniform(1.08, 1.2) * height + shape
        image = image + rng.uniform(0.2, 0.3) * soft(rng.uniform(0.3, 0.4) * width - abs(along)) * ridge(off)

    there, level = level_of("cardiomegaly", "")
    heart = 0.52 + 0.11 * level + rng.uniform(-0.02, 0.02)
    dx, dy = (x / width - rng.uniform(-0.02, 0.1)) / heart, (v - 0.3) / 0.32
    inside = heart * width * (1 - np.hypot(dx, dy)) + (0 if there else wave(8 * np.arctan2(dy, dx)))
    image = image + rng.uniform(0.2, 0.28) * soft(inside / (1 if there else 3.5))

    image = 0.45 + rng.uniform(-0.08, 0.08) + rng.uniform(0.75, 1) * (image - 0.5)
    image = image + rng.normal(0, 0.02, image.shape)
    return (255 * image.clip(0, 1)).astype(np.uint8)


# --- labels and questions ---------------------------------------------------------------------------------------------


def draw_labels(rng: Generator, findings: Findings) -> list:
    """Return a study's 14 CheXpert labels: 1 (present), 0 (absent), -1 (uncertain) or "" (blank)."""
    entities = {entity for entity, _ in findings}
    truth = {entity: entity in entities for entity, _ in PLACES}
    truth["no finding"] = not entities - {"support devices"}
    row = []
    for name in CHEXPERT:
        chance = rng.random()
        value = float(truth[name.lower()]) if name.lower() in truth else ""
        row.append("" if chance < 0.1 else -1.0 if chance < 0.15 and value != "" else value)
    return row


def ask(rng: Generator, findings: Findings) -> list[dict]:
    questions = []

    def add(kind: str, text: str, place: tuple | None = None, **changed) -> None:
        answer = {"answer_type": "main_answer", "text": "", "regions": [], "obs_entities": ["no finding"]}
        answer |= {"positiveness": "neg", "modifiers": []}
        if place in findings:
            entity, side = place
            region = ZONES[findings[place]] if entity == "lung lesion" else REGIONS.get(entity, "heart")
            answer |= {"positiveness": "pos", "obs_entities": [entity], "regions": [f"{side} {region}".strip()]}
            if entity in GRADED:
                answer["modifiers"] = [["severity", SEVERITIES[findings[place]]]]
        name = f"{kind}_{len(questions):03d}"
        questions.append({"question_id": name, "question_type": kind, "question": text, "answers": [answer | changed]})

    def words(entity: str, side: str) -> str:
        return f"{entity} on the {side} side" if side else entity

    present = list(findings)
    for _ in range(5):
        # about half of these answers are yes; many of the "no" questions name the wrong side
        entity, side = PLACES[rng.integers(len(PLACES))]
        if present and rng.random() < 0.7:
            entity, side = present[rng.integers(len(present))]
            if side and rng.random() < 0.3:
                side = SIDES[1 - SIDES.index(side)]
        add("D02_has_finding", f"Is there {words(entity, side)}?", (entity, side))
    for entity, side in PLACES:
        there = (entity, side) in findings
        if there and entity in IN_LUNG and sum(name == entity for name, _ in findings) == 1:
            add("D03_where_is_finding", f"Where is the {entity}?", (entity, side))
        if entity in GRADED and (there or rng.random() < 0.1):
            severity = {} if there else {"modifiers": [["severity", "none"]]}
            add("D04_how_severe_is_finding", f"How severe is the {words(entity, side)}?", (entity, side), **severity)
    diseases = [place for place in findings if place[0] != "support devices"]
    for side in SIDES:
        in_lung = next((place for place in diseases if place[1] == side), None)
        add("D01_describe_finding", f"What is the finding in the {side} lung?", in_lung)
    first = next(iter(diseases), None)
    add("B03_is_abnormal", "Is the study abnormal?", first)
    add("B04_is_normal", "Is everything normal?", first)
    # this answer has no severity, so data preparation must exclude the question
    add("D04_how_severe_is_finding", "How severe is the scar?", positiveness="neutral")
    return questions


# --- encoders ---------------------------------------------------------------------------------------------------------


def write_encoders(out: Path, texts: set[str], seed: int) -> None:
    import torch
    import transformers as hf
    from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    hf.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    # ConvNeXt's default layer scale of 1e-6 would disable the blocks for thousands of training steps
    sizes = {"patch_size": 4, "num_stages": 3, "depths": [1, 1, 2], "hidden_sizes": [24, 48, 96]}
    convnext = hf.ConvNextModel(hf.ConvNextConfig(**sizes, image_size=64, layer_scale_init_value=1.0))
    for weight in convnext.parameters():
        if weight.dim() > 1:
            # with the default standard deviation of 0.02, the activations of such narrow layers would vanish
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    convnext.save_pretrained(out / "convnext_tiny")
    settings = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 64}, "crop_pct": 1.0}
    settings |= {"image_mean": IMAGENET_DEFAULT_MEAN, "image_std": IMAGENET_DEFAULT_STD}
    (out / "convnext_tiny" / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = sorted({word for text in texts for word in re.findall(r"[a-z0-9]+|[^a-z0-9 ]", text.lower())})
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *words]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    tokenizer = hf.BertTokenizerFast(vocab=vocabulary, do_lower_case=True, model_max_length=128)
    tokenizer.save_pretrained(out / "bert_tiny")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    torch.manual_seed(seed)
    config = hf.BertConfig(vocab_size=len(tokenizer), **sizes, max_position_embeddings=128, initializer_range=0.1)
    hf.BertModel(config).save_pretrained(out / "bert_tiny")
