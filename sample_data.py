"""Write a small, learnable data set for a training script, in the exact on-disk format of the real one.

    python sample_data.py prs_med data/demo/prs_med                   # 1000 training pictures, two questions each
    python sample_data.py prs_med OUT --num_train 40 --image_size 64 --seed 1
    python sample_data.py mimic_cxr data/demo/mimic_cxr                # 700 training patients, some 20,000 questions
    python sample_data.py mimic_cxr OUT --num_train 12 --num_val 6 --num_test 6 --image_size 96 --zip
    python sample_data.py survival data/demo/survival                  # 600 patients with a chest CT each
    python sample_data.py survival OUT --num_patients 60 --matrix 20 --event_rate 0.123
    python sample_data.py cascade data/demo/cascade                    # 100 patients with a CT and two X-rays each
    python sample_data.py cascade OUT --num_patients 20 --matrix 24
    python sample_data.py compressed_ad data/demo/compressed_ad        # 81 goals x 100 streams x 1000 steps, 10 seconds
    python sample_data.py compressed_ad OUT --source ppo --steps 1040  # by stable-baselines3, as published; hours

`prs_med` writes the MMRS / PosMed layout (annotations/*.csv, {split}_images, {split}_masks) of made-up brain, lung and
skin pictures, and two tiny Hugging Face checkpoints with random weights beside it (`llava_tiny`, `sam_tiny`), so that
train_prs_med.py goes through the same `from_pretrained` calls as with LLaVA-Med and SAM. Each picture holds two lesions
and is asked about both: nothing in the picture says which one is meant, so only a model that reads the question can
learn it.

`mimic_cxr` writes MIMIC-CXR-JPG (files/p10/..., three tables) and MIMIC-Ext-CXR-QBA (qa/ or qa.zip, metadata/,
exports/) of made-up chest X-rays in which every finding can be seen and its side matters, and two tiny checkpoints
(`convnext_tiny`, `bert_tiny`). As in the real release: views and labels are missing here and there, a fifth of the
questions has no grade, the grades stand in the parquet file alone, and some answers have no target.

`survival` writes a table of patients (dataset.csv) and made-up chest CTs (NIfTI, HU) of several voxel sizes and
orientations, in which calcified lesions lie on the heart. Their load alone drives a Weibull hazard, so the C-index that
the true risk reaches is known, and printed.

`cascade` writes the drr_patient_data layout: made-up torsos (body, lungs, spine, ribs, heart, nodules; NIfTI, HU) of
several voxel sizes and orientations, and their frontal and lateral X-rays, rendered by the projector that the training
uses (drr_projector.py). No two have the same size, posture, heart, diaphragm or nodules, and all of that can be seen in
the X-rays.

`compressed_ad` writes learning histories of Darkroom (datasets/history_darkroom_<SOURCE>_alg-seed<SEED>.hdf5): for each
of the 81 goals what a learner did from its first step on. `tabular`: each stream learns alone, by TD(0) on a table of
state values with a bonus for rare states and less and less chance. `ppo`: the streams of a goal train one net together.
"""

import argparse
import csv
import gzip
import io
import json
import math
import re
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

from cli_utils import InputError, RunError, run_main, whole
from cli_utils import number as real

# modality -> (bright target, dark target); both lie in every picture of that modality
PRS_MED_TARGETS = {
    "brain_tumors_ct_scan": ("tumour", "cyst"),
    "lung_CT": ("mass", "cavity"),
    "skin_rgbimage": ("scar", "mole"),
}
PRS_MED_COLUMNS = ("image_path", "image_name", "split", "description", "position", "question", "answer")
PRS_MED_QUESTIONS = (
    "Where is the {} located in this image?",
    "In which part of the picture is the {}?",
    "Please find the {} and say where it is.",
)
POSITIONS = ("top left", "top right", "bottom left", "bottom right", "center")
PICTURE_OF = {
    "brain_tumors_ct_scan": "A brain slice",
    "lung_CT": "A chest CT slice",
    "skin_rgbimage": "A skin photograph",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    tasks = parser.add_subparsers(dest="task", required=True)
    prs = tasks.add_parser("prs_med", help="position-reasoning segmentation (train_prs_med.py)")
    prs.add_argument("out", type=Path, help="folder to write; must not hold a data set yet")
    prs.add_argument("--num_train", type=whole(1), default=1000, help="training pictures, two questions each")
    prs.add_argument("--num_val", type=whole(0), default=48, help="validation pictures, two questions each")
    prs.add_argument("--num_test", type=whole(0), default=72, help="test pictures, two questions each")
    prs.add_argument("--image_size", type=whole(32), default=96, help="side of the square pictures, pixels")
    prs.add_argument("--seed", type=int, default=0, help="the same seed writes the same bytes")
    cxr = tasks.add_parser("mimic_cxr", help="chest X-ray questions and CheXpert labels (train_mimic_cxr.py)")
    cxr.add_argument("out", type=Path, help="folder to write; must not hold a data set yet")
    cxr.add_argument("--num_train", type=whole(1), default=700, help="training patients, 1 to 3 studies each")
    cxr.add_argument("--num_val", type=whole(0), default=60, help="validation patients")
    cxr.add_argument("--num_test", type=whole(0), default=90, help="test patients")
    cxr.add_argument("--image_size", type=whole(64), default=256, help="longer side of the pictures, pixels")
    cxr.add_argument("--seed", type=int, default=0, help="the same seed writes the same bytes")
    cxr.add_argument(
        "--zip", dest="zipped", action="store_true", help="write qa.zip instead of the folder qa/; users read both"
    )
    ct = tasks.add_parser("survival", help="survival from 3D CT (train_survival_distributed.py)")
    ct.add_argument("out", type=Path, help="folder to write; must not hold a data set yet")
    ct.add_argument("--num_patients", type=whole(20), default=600, help="patients, one CT and one row each")
    ct.add_argument("--event_rate", type=real(0.05, 0.8), default=0.3, help="share with an event (real cohort: 0.123)")
    ct.add_argument(
        "--matrix", type=whole(12), default=48, help="voxels along the first axis, at the middle voxel size"
    )
    ct.add_argument("--risk", type=real(0), default=2.0, help="log-hazard per standard deviation of the lesion load")
    ct.add_argument("--seed", type=int, default=0)
    xray = tasks.add_parser("cascade", help="X-ray to CT (train_accelerate.py)")
    xray.add_argument("out", type=Path, help="folder to write; must not hold a data set yet")
    xray.add_argument("--num_patients", type=whole(3), default=100, help="patients, one CT and two X-rays each")
    xray.add_argument("--matrix", type=whole(12), default=72, help="voxels along the first axis")
    xray.add_argument("--seed", type=int, default=0)
    histories = tasks.add_parser("compressed_ad", help="learning histories for in-context RL (train.py)")
    histories.add_argument("out", type=Path, help="folder to write; its datasets/ must not hold the file yet")
    text = "who learns: tabular TD, all at once; ppo of stable-baselines3 (requirements-dev.txt), about a minute a goal"
    histories.add_argument("--source", choices=("tabular", "ppo"), default="tabular", help=text)
    histories.add_argument("--streams", type=whole(1), default=100, help="histories of each goal")
    histories.add_argument("--steps", type=whole(20), default=1000, help="steps of each history; 20 make an episode")
    histories.add_argument("--seed", type=int, default=42)
    return parser.parse_args(argv)


def save_model(model, path: Path) -> None:
    """save_pretrained without a progress bar.

    It also asks Accelerate whether DeepSpeed has wrapped the model, which imports DeepSpeed: seconds, and a warning
    about its accelerator. No model here is wrapped, so the answer is given without it.
    """
    from unittest import mock

    from accelerate.utils import other
    from transformers.utils import logging

    logging.disable_progress_bar()
    with mock.patch.object(other, "is_deepspeed_available", return_value=False):
        model.save_pretrained(path)


def smooth_noise(rng, size: int, cells: int):
    """(size, size) float32 field of mean 0 and range about +-1 whose features are size/cells pixels wide."""
    import numpy as np
    from PIL import Image

    coarse = Image.fromarray(rng.uniform(-1, 1, (cells + 2, cells + 2)).astype("float32"))
    return np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC))


def blob(rng, size: int, cx: float, cy: float, radius: float, wobble: float = 1.0):
    """(size, size) signed distance-like field, > 0 inside an irregular ellipse; centre and radius are shares of the
    side."""
    import numpy as np

    y, x = np.mgrid[0:size, 0:size] / (size - 1)
    angle = np.arctan2(y - cy, x - cx)
    stretch, turn = 1 + wobble * rng.uniform(-0.2, 0.25), rng.uniform(0, math.pi)
    u, v = (x - cx) * math.cos(turn) + (y - cy) * math.sin(turn), (y - cy) * math.cos(turn) - (x - cx) * math.sin(turn)
    outline = radius * (
        1 + sum(wobble * rng.uniform(0.02, 0.08) * np.cos(k * angle + rng.uniform(0, 6.28)) for k in (2, 3, 5))
    )
    return (outline - np.sqrt((u / stretch) ** 2 + (v * stretch) ** 2)).astype("float32")


def lesion_places(rng) -> list[tuple[str, float, float, float]]:
    """Two lesions of one picture that do not touch: (position name, centre x, centre y, radius) each."""
    chosen = rng.choice(len(POSITIONS), size=2, replace=False)
    places = []
    for name in (POSITIONS[i] for i in chosen):
        radius = rng.uniform(0.075, 0.115)
        if name == "center":
            cx, cy = 0.5 + rng.uniform(-0.02, 0.02, 2)
        else:
            cx = 0.5 + (-1 if "left" in name else 1) * rng.uniform(0.16, 0.23)
            cy = 0.5 + (-1 if "top" in name else 1) * rng.uniform(0.16, 0.23)
        places.append((name, float(cx), float(cy), float(radius)))
    return places


def prs_med_picture(rng, modality: str, size: int, lesions: list):
    """One picture as (size, size, 3) uint8 with the two lesion fields painted in: the first bright (or red), the second
    dark."""
    import numpy as np

    texture = 0.05 * smooth_noise(rng, size, 6) + 0.03 * smooth_noise(rng, size, 20)
    inside = [1 / (1 + np.exp(-np.clip(field * size / 0.8, -30, 30))) for field in lesions]  # soft edge, about a pixel
    if modality == "skin_rgbimage":
        tone = np.array([0.76, 0.55, 0.46]) * rng.uniform(0.85, 1.08)
        picture = tone + texture[..., None]
        for field, colour in zip(inside, ([0.99, 0.90, 0.89], [0.26, 0.15, 0.11]), strict=True):
            picture += field[..., None] * (np.array(colour) + 0.5 * texture[..., None] - picture)
        for _ in range(rng.integers(2, 6)):  # hairs
            x = rng.uniform(0, size) + np.cumsum(rng.normal(0, 0.4, size)) + rng.uniform(-0.5, 0.5) * np.arange(size)
            rows = np.arange(size)[(x >= 0) & (x < size)]
            picture[rows, x[rows].astype(int)] *= 0.6
    else:
        body = blob(rng, size, 0.5, 0.5, rng.uniform(0.44, 0.46), wobble=0.25)
        grey = np.where(body > 0, 0.52 + texture, 0.3)  # a background as dark as a dark lesion would be one more riddle
        if modality == "brain_tumors_ct_scan":
            grey = np.where((body > 0) & (body < 0.03), 0.78 + texture, grey)  # skull
            for side in (-1, 1):  # ventricles
                grey = np.where(blob(rng, size, 0.5 + side * 0.06, 0.47, 0.045) > 0, 0.36 + texture, grey)
        else:
            for side in (-1, 1):  # lungs
                lung = blob(rng, size, 0.5 + side * 0.2, 0.5, 0.16)
                grey = np.where(lung > 0, 0.34 + 1.4 * texture, grey)
            grey = np.where(blob(rng, size, 0.5, 0.84, 0.05) > 0, 0.7 + texture, grey)  # spine
        for field, level in zip(inside, (0.95, 0.05), strict=True):
            grey = grey + field * (level + 0.5 * texture - grey)
        picture = np.repeat(grey[..., None], 3, axis=2)
    picture = picture + rng.normal(0, 0.02, (size, size, 1))
    return (255 * np.clip(picture, 0, 1)).astype(np.uint8)


def write_prs_med(out: Path, num_train: int, num_val: int, num_test: int, image_size: int, seed: int) -> None:
    """The data set of guide 0 (facts: columns, `image_path` = the mask's path, ISIC names, one copy of the image per
    mask)."""
    import numpy as np
    from PIL import Image
    from tqdm import tqdm

    if (out / "annotations").exists():
        raise InputError(f"{out}: already holds a data set; choose another folder or delete it")
    texts = []
    modalities = list(PRS_MED_TARGETS)
    rows: dict[str, list] = {modality: [] for modality in modalities}
    cases = [(split, i) for split, n in (("train", num_train), ("val", num_val), ("test", num_test)) for i in range(n)]
    for number, (split, i) in enumerate(tqdm(cases, desc="pictures", disable=not sys.stderr.isatty())):
        rng = np.random.default_rng([seed, number])
        modality = modalities[i % len(modalities)]
        places = lesion_places(rng)
        lesions = [blob(rng, image_size, cx, cy, radius) for _, cx, cy, radius in places]
        picture = Image.fromarray(prs_med_picture(rng, modality, image_size, lesions))
        for k, target in enumerate(PRS_MED_TARGETS[modality]):
            if modality == "skin_rgbimage":
                image_name, mask_name = f"ISIC_{number:05d}{k}.jpg", f"ISIC_{number:05d}{k}_Segmentation.png"
            else:
                image_name = mask_name = f"case{number:05d}_{target}.png"
                picture = picture.convert("L")
            image, mask = out / modality / f"{split}_images" / image_name, out / modality / f"{split}_masks" / mask_name
            image.parent.mkdir(parents=True, exist_ok=True)
            mask.parent.mkdir(parents=True, exist_ok=True)
            picture.save(image, quality=92) if image.suffix == ".jpg" else picture.save(image)
            Image.fromarray(np.where(lesions[k] > 0, 255, 0).astype(np.uint8)).save(mask)
            position = places[k][0]
            question = str(rng.choice(PRS_MED_QUESTIONS)).format(target)
            answer = f"The {target} is located in the {position} of the image."
            description = (
                f"{PICTURE_OF[modality]} in which the {target} covers {(lesions[k] > 0).mean():.1%} of the picture."
            )
            rows[modality].append(
                (mask.relative_to(out).as_posix(), image_name, split, description, position, question, answer)
            )
            texts += [question, answer, description]
    (out / "annotations").mkdir()
    for modality, lines in rows.items():
        if lines:
            with open(out / "annotations" / f"{modality}.csv", "w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([PRS_MED_COLUMNS, *lines])
    write_tiny_llava(out / "llava_tiny", texts, seed)
    write_tiny_sam(out / "sam_tiny", image_size, seed)
    print(f"{out}: {sum(map(len, rows.values()))} questions about {len(cases)} pictures, llava_tiny, sam_tiny")


def write_tiny_llava(path: Path, texts: list[str], seed: int) -> None:
    """A LLaVA-format checkpoint (CLIP tower, projector, Llama, byte-level BPE tokenizer trained on `texts`), random
    weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        PreTrainedTokenizerFast,
    )

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [*texts, "USER: \nASSISTANT:"],
        trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        image_size=72, patch_size=12, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        projection_dim=64, initializer_range=0.1,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, initializer_range=0.1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=4, image_seq_length=36)
    model = LlavaForConditionalGeneration(config)
    # all weights are random, but the table of positions is a random mix of smooth waves over the picture, as in a
    # trained tower
    side = torch.linspace(-1, 1, 6)
    phase = torch.cartesian_prod(side, side)[:, :, None] * torch.tensor([1.0, 2.0]) * math.pi / 2
    waves = torch.cat([phase.sin(), phase.cos()], 2).flatten(1)
    table = model.model.vision_tower.embeddings.position_embedding.weight
    table.data[1:] = waves @ torch.randn(waves.shape[1], 64) * (2 / waves.shape[1]) ** 0.5
    # frozen: wide enough that the projector passes the picture on and the head can be sure of a word
    for layer, factor in (
        (model.model.multi_modal_projector.linear_1, 2),
        (model.model.multi_modal_projector.linear_2, 2),
    ):
        layer.weight.data *= factor
    model.lm_head.weight.data *= 3
    save_model(model, path)
    tokenizer.save_pretrained(path)
    clip = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 72},
        "crop_size": {"height": 72, "width": 72},
    }
    clip |= {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    (path / "preprocessor_config.json").write_text(json.dumps(clip, indent=2))


def write_tiny_sam(path: Path, image_size: int, seed: int) -> None:
    """A SAM-format checkpoint (full SamModel, of which only the vision encoder is used), random weights."""
    import torch
    from transformers import SamConfig, SamMaskDecoderConfig, SamModel, SamPromptEncoderConfig, SamVisionConfig

    torch.manual_seed(seed)
    side = max(8, round(image_size / 8) * 8)
    vision = SamVisionConfig(
        hidden_size=64, output_channels=32, num_hidden_layers=2, num_attention_heads=4, image_size=side, patch_size=8,
        window_size=4, global_attn_indexes=[1], mlp_ratio=2.0, mlp_dim=128, initializer_range=0.02, num_pos_feats=16,
    )  # fmt: skip
    prompt = SamPromptEncoderConfig(hidden_size=32, image_size=side, patch_size=8, mask_input_channels=4)
    decoder = SamMaskDecoderConfig(
        hidden_size=64, mlp_dim=64, num_hidden_layers=1, num_attention_heads=2, iou_head_hidden_dim=16
    )
    config = SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    save_model(SamModel(config), path)
    sam = {"image_processor_type": "SamImageProcessor", "size": {"longest_edge": side}}
    sam |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (path / "preprocessor_config.json").write_text(json.dumps(sam, indent=2))


# --- mimic_cxr --------------------------------------------------------------------------------------------------------

CHEXPERT = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Enlarged Cardiomediastinum", "Fracture", "Lung Lesion",
    "Lung Opacity", "No Finding", "Pleural Effusion", "Pleural Other", "Pneumonia", "Pneumothorax", "Support Devices",
)  # fmt: skip
SEVERITIES = ("none", "mild", "moderate", "severe")
GRADES = ("1_D", "2_C", "3_B", "4_A", "5_A+", "6_A++", None)
GRADE_SHARES = (0.02, 0.04, 0.32, 0.22, 0.12, 0.08, 0.20)  # a fifth is unrated, as in the release
SIDES = ("left", "right")
# what one lung can hold (at most one of them, so that "what is wrong with the left lung?" has one answer): entity ->
# (share, name in questions, region without its side, "" = the zone drawn)
LUNG_FINDINGS = {
    "": (0.20, "", ""),
    "consolidation": (0.20, "consolidation", ""),
    "pleural effusion": (0.16, "pleural effusion", "costophrenic angle"),
    "pneumothorax": (0.12, "pneumothorax", "lung apex"),
    "lung lesion": (0.14, "nodule", ""),
    "atelectasis": (0.09, "atelectasis", "lung base"),
    "pleural other": (0.09, "pleural thickening", "lung apex"),
}
NAMES = {entity: name for entity, (_, name, _) in LUNG_FINDINGS.items() if entity} | {"fracture": "rib fracture"}
NAMES |= {"cardiomegaly": "cardiomegaly", "edema": "pulmonary edema", "enlarged cardiomediastinum": "wide mediastinum"}
SUBCATEGORIES = {
    "pleura": ("pleural effusion", "pneumothorax", "pleural other"),
    "lung tissue": ("consolidation", "lung lesion", "atelectasis", "edema"),
    "heart": ("cardiomegaly",),
    "rib cage": ("fracture",),
}
ZONES = {"upper lung zone": -0.42, "mid lung zone": -0.1, "lower lung zone": 0.2}  # centre, body coordinates
WORDINGS = {
    "A_indication": ("Rule out {}: what is found?", "Referred because of possible {}. What does the picture show?"),
    "B01_describe_all": ("Describe the study.", "Please describe all that can be seen."),
    "B03_is_abnormal": ("Is the study abnormal?", "Is there anything abnormal?", "Are there abnormal findings?"),
    "B04_is_normal": ("Is the study normal?", "Is everything normal?", "Is this a normal chest X-ray?"),
    "B08_describe_subcat": ("Describe the {}.", "What can be said about the {}?", "How does the {} look?"),
    "B09_describe_abnormal_subcat": ("What is abnormal about the {}?", "Describe the abnormal findings of the {}."),
    "B10_is_abnormal_subcat": ("Is the {} abnormal?", "Are there abnormal findings of the {}?"),
    "B11_is_normal_subcat": ("Is the {} normal?", "Does the {} look normal?"),
    "B12_describe_device": ("Describe the support devices.", "Which devices can be seen?"),
    "B13_has_devices": ("Are there any devices?", "Can a support device be seen?"),
    "B14_describe_acquisition": ("How was the picture taken?",),
    "B16_has_imaging_artifacts": ("Are there imaging artifacts?",),
    "C01_describe_region": ("Describe the {}.", "Which part of the {} stands out?"),
    "C02_describe_abnormal_region": ("Which lung is abnormal?", "Describe the abnormal lung."),
    "C03_is_abnormal_region": ("Is the {} abnormal?", "Is there anything abnormal in the {}?"),
    "C04_is_normal_region": ("Is the {} normal?", "Does the {} look normal?"),
    "C07_describe_region_device": ("Describe the devices on the {} side.", "Which devices lie on the {} side?"),
    "C08_has_region_device": ("Is there a device on the {} side?", "Does a device lie on the {} side?"),
    "D01_describe_finding": ("What is the finding in the {}?", "Describe the finding in the {}."),
    "D02_has_finding": ("Is there {}?", "Does the picture show {}?", "Can {} be seen?"),
    "D03_where_is_finding": ("Where is the {}?", "In which region is the {}?"),
    "D04_how_severe_is_finding": ("How severe is the {}?", "What is the severity of the {}?"),
    "D05_describe_device": ("Describe the pacemaker.", "What can be said about a pacemaker?"),
    "D06_has_device": ("Is there a pacemaker on the {} side?", "Does a pacemaker lie on the {} side?"),
    "D07_where_is_device": ("Where is the pacemaker?", "In which region is the pacemaker?"),
}
STRATEGIES = {"A": "indication", "B": "abnormal", "C": "region_abnormal", "D": "finding"}
METADATA_COLUMNS = (
    "dicom_id", "subject_id", "study_id", "PerformedProcedureStepDescription", "ViewPosition", "Rows", "Columns",
    "StudyDate", "StudyTime", "ProcedureCodeSequence_CodeMeaning", "ViewCodeSequence_CodeMeaning",
    "PatientOrientationCodeSequence_CodeMeaning",
)  # fmt: skip
VIEW_MEANING = {"PA": "postero-anterior", "AP": "antero-posterior", "LATERAL": "lateral", "LL": "left lateral"}


class Finding(NamedTuple):
    """One thing that is wrong in a study. `level` 1-3 is mild, moderate or severe; `side` is "" for central ones."""

    entity: str
    side: str
    region: str
    level: int


def draw_findings(rng) -> list[Finding]:
    """The findings of one study: at most one a lung, and heart, mediastinum, edema, fracture, pacemaker beside them."""
    found = []
    entities, shares = list(LUNG_FINDINGS), [share for share, _, _ in LUNG_FINDINGS.values()]
    if rng.random() > 0.3:  # the others are normal, but for a pacemaker
        for side in SIDES:
            if entity := entities[rng.choice(len(entities), p=shares)]:
                region = LUNG_FINDINGS[entity][2] or list(ZONES)[rng.integers(3)]
                found.append(Finding(entity, side, f"{side} {region}", int(rng.integers(1, 4))))
        if rng.random() < 0.4:
            found.append(Finding("cardiomegaly", "", "heart", int(rng.integers(1, 4))))
        if rng.random() < 0.25:
            found.append(Finding("enlarged cardiomediastinum", "", "mediastinum", 2))
        if rng.random() < 0.25:
            found.append(Finding("edema", "", "lungs", int(rng.integers(1, 4))))
        if rng.random() < 0.35:
            side = SIDES[rng.integers(2)]
            found.append(Finding("fracture", side, f"{side} mid lung zone", 2))
    if rng.random() < 0.5:
        side = SIDES[rng.integers(2)]
        found.append(Finding("support devices", side, f"{side} upper lung zone", 2))
    return found


def chexpert_labels(found: list[Finding]) -> dict[str, bool]:
    """The 14 labels that follow from the findings."""
    there = {finding.entity for finding in found}
    labels = {name: name.lower() in there for name in CHEXPERT}
    labels["Lung Opacity"] = bool(there & {"consolidation", "pleural effusion", "edema", "atelectasis", "lung lesion"})
    labels["Pneumonia"] = any(f.entity == "consolidation" and "upper" not in f.region for f in found)
    labels["No Finding"] = not there - {"support devices"}
    return labels


def chest_picture(rng, size: int, found: list[Finding], lateral: bool = False):
    """(rows, columns) uint8 chest X-ray with the findings painted in, and the pixel box of each finding.

    Body coordinates: x from -1 to 1 (the patient's left is on the picture's right), y downwards, 0 in the middle.
    """
    import numpy as np

    def soft(field, width=0.02):  # 1 where field > 0, with a soft edge
        return 1 / (1 + np.exp(np.clip(-field / width, -30, 30)))

    def ball(cx, cy, rx, ry=None, width=0.02):
        ry = ry or rx
        return soft((1 - np.sqrt(((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2)) * min(rx, ry), width)

    def line(x0, y0, x1, y1, thick):  # distance to a segment
        along = np.clip(((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / ((x1 - x0) ** 2 + (y1 - y0) ** 2), 0, 1)
        return soft(thick - np.hypot(x - x0 - along * (x1 - x0), y - y0 - along * (y1 - y0)), 0.01)

    def paint(mask, level):
        nonlocal grey
        grey = grey + mask * (level - grey)

    rows, columns = (size, round(size * rng.uniform(0.84, 1.0)))
    if rng.random() < 0.2:
        rows, columns = columns, size
    scale, turn = rng.uniform(0.92, 1.04), rng.uniform(-0.05, 0.05)
    dx, dy = rng.uniform(-0.04, 0.04), rng.uniform(-0.04, 0.04)
    half = min(rows, columns / 0.86) / 2 * scale  # pixels of one unit
    v, u = np.mgrid[0:rows, 0:columns].astype("float32")
    u, v = (u - columns / 2) / half - dx, (v - rows / 2) / half - dy
    x, y = u * math.cos(turn) + v * math.sin(turn), v * math.cos(turn) - u * math.sin(turn)
    fine, cloud = smooth_noise(rng, size, size // 6)[:rows, :columns], smooth_noise(rng, size, 9)[:rows, :columns]
    grey = 0.05 + 0.02 * cloud
    if lateral:
        paint(ball(0.0, 0.1, 0.72, 1.15), 0.5 + 0.05 * cloud)
        paint(ball(0.0, -0.1, 0.5, 0.68), 0.24 + 0.05 * cloud + 0.03 * np.sin(16 * y + 5 * x))
        paint(0.8 * soft(y - 0.42 + 0.2 * x), 0.72)
        paint(0.7 * ball(-0.28, 0.2, 0.3, 0.26, 0.06), 0.7)
        paint(0.6 * soft(0.1 - abs(x - 0.5)), 0.75 + 0.06 * np.sin(24 * y))
        return finish_picture(rng, grey, fine), []

    paint(soft(0.86 - 0.05 * np.cos(3 * y) - abs(x), 0.03) * soft(y + 0.93 - 0.35 * x**2, 0.03), 0.52 + 0.05 * cloud)
    paint(0.35 * soft(abs(x) - 0.72, 0.05), 0.7)  # chest wall
    lungs, rims = {}, {}
    for side, s in zip(SIDES, (1, -1), strict=True):
        across = (s * x - 0.4) / 0.3
        dome = (0.47 if side == "left" else 0.42) - 0.1 * np.cos(1.4 * across)
        rims[side] = 1 - across**2 - abs((y + 0.08) / 0.66) ** 2.6  # 1 in the middle of the lung, 0 at its edge
        lungs[side] = soft(rims[side], 0.05) * soft(dome - y)
        paint(lungs[side], 0.24 + 0.04 * cloud)
        vessels = np.exp(-4 * np.hypot(s * x - 0.2, y + 0.02)) * (
            0.5 + 0.5 * np.sin(13 * np.arctan2(y, s * x - 0.12) + 7 * cloud)
        )
        grey = grey + 0.16 * lungs[side] * vessels
        paint(0.5 * ball(s * 0.2, -0.03, 0.09, 0.13, 0.04), 0.62)  # hilum
        paint(0.55 * line(s * 0.06, -0.6, s * 0.72, -0.74, 0.03), 0.75)  # clavicle
    both = lungs["left"] + lungs["right"]
    ribs = 0.12 * np.exp(-((np.sin(11 * (y - 0.55 * (abs(x) - 0.3) ** 2 + 0.12 * abs(x))) / 0.45) ** 2))
    ribs = ribs * soft(0.78 - abs(x)) * soft(0.5 - y, 0.05) * soft(y + 0.8, 0.05)
    grey = grey + ribs
    level = {f.entity: f.level for f in found if not f.side}
    if "edema" in level:
        haze = (0.35, 0.7, 1.05)[level["edema"] - 1] * (0.32 + 0.1 * cloud)
        grey = grey + both * haze * (0.75 + 0.25 * np.exp(-4 * (abs(x) - 0.25) ** 2))
    boxes = [(0.0, 0.0, 0.0, 0.0)] * len(found)  # centre and half sides
    for i, (entity, side, _, strength) in enumerate(found):  # these lie under the heart
        s, pick, lung = (1 if side == "left" else -1), strength - 1, lungs.get(side)
        if entity == "pleural effusion":
            height = (0.18, 0.4, 0.66)[pick]
            surface = 0.42 - height - 0.2 * (s * x - 0.3).clip(0) ** 1.5 / 0.3
            paint(0.97 * soft(rims[side] + 0.05, 0.05) * soft(y - surface) * soft(0.46 - y, 0.05), 0.8 + 0.03 * cloud)
            boxes[i] = (0.4 * s, 0.47 - height / 2, 0.3, height / 2)
        elif entity == "pneumothorax":
            shrink = (0.86, 0.69, 0.52)[pick]
            inner = 1 - ((s * x - 0.12) / (0.57 * shrink)) ** 2 - abs((y - 0.16) / (0.92 * shrink)) ** 2.4
            paint(lung * soft(-inner, 0.04), 0.03)
            paint(0.7 * lung * np.exp(-((inner / 0.05) ** 2)), 0.6)  # the visceral pleura
            boxes[i] = (0.45 * s, -0.2, 0.28, 0.5)
    wide = (0.3 if "enlarged cardiomediastinum" in level else 0.15) * rng.uniform(0.95, 1.05)
    paint(0.8 * soft(wide - abs(x - 0.02), 0.03) * soft(y + 0.72, 0.05), 0.68)
    paint(0.7 * ball(0.13, -0.3, 0.1, 0.1, 0.03), 0.74)  # aortic knob
    size_of_heart = (1.0, 1.32, 1.6, 1.9)[level.get("cardiomegaly", 0)] * rng.uniform(0.96, 1.04)
    tilted = np.sqrt(
        ((x - 0.1 + 0.3 * (y - 0.2)) / (0.27 * size_of_heart)) ** 2
        + ((y - 0.24) / (0.25 * (0.6 + 0.4 * size_of_heart))) ** 2
    )
    paint(0.95 * soft(1 - tilted, 0.07), 0.76 + 0.02 * cloud)
    paint(0.55 * soft(0.085 - abs(x)), 0.8 + 0.06 * np.sin(30 * y))  # spine
    paint(0.5 * soft(0.045 - abs(x)) * soft(-0.32 - y, 0.04), 0.3)  # trachea
    paint(0.6 * soft(y - 0.5, 0.04) * soft(0.84 - abs(x)), 0.74)  # abdomen
    paint(0.5 * ball(0.32, 0.56, 0.12, 0.07, 0.03), 0.3)  # air in the stomach
    for i, (entity, side, region, strength) in enumerate(found):  # these lie over the heart
        s, pick, lung = (1 if side == "left" else -1), strength - 1, lungs.get(side)
        cx, cy = 0.42 * s + rng.uniform(-0.04, 0.04), rng.uniform(-0.03, 0.03)
        if entity == "consolidation":
            cy += ZONES[region.removeprefix(f"{side} ")]
            radius = (0.17, 0.195, 0.22)[pick]
            paint(lung * ball(cx, cy, 1.2 * radius, radius, 0.04) * (0.9 + 0.2 * cloud), 0.84)
            boxes[i] = (cx, cy, 1.2 * radius, radius)
        elif entity == "lung lesion":
            cy += ZONES[region.removeprefix(f"{side} ")]
            radius = (0.09, 0.105, 0.12)[pick]
            paint(ball(cx, cy, radius), 1.0)
            boxes[i] = (cx, cy, radius, radius)
        elif entity == "atelectasis":
            for shift in (-0.06, 0.08):
                cy = 0.2 + shift
                paint(lung * line(0.2 * s, cy - 0.05, 0.64 * s, cy + 0.04, 0.03), 0.85)
            boxes[i] = (0.42 * s, 0.22, 0.25, 0.13)
        elif entity == "pleural other":
            paint(0.95 * lung * soft(-0.46 - 0.03 * pick + 0.06 * np.sin(14 * x) - y), 0.82)
            boxes[i] = (0.4 * s, -0.62, 0.24, 0.14)
        elif entity == "fracture":
            cx, cy = s * 0.75, rng.uniform(-0.08, 0.08)
            paint(ball(cx, cy, 0.13), 0.1)
            paint(line(cx - 0.14, cy - 0.08, cx + 0.01, cy - 0.04, 0.045), 1.0)
            paint(line(cx - 0.02, cy + 0.08, cx + 0.12, cy + 0.05, 0.045), 1.0)
            boxes[i] = (cx, cy, 0.15, 0.13)
        elif entity == "support devices":
            cx, cy = s * 0.6 + rng.uniform(-0.03, 0.03), -0.56 + rng.uniform(-0.03, 0.03)
            paint(soft(0.1 - np.maximum(abs(x - cx), abs(y - cy)), 0.01), 1.05)
            paint(line(cx - s * 0.08, cy, s * 0.1, -0.35, 0.013), 0.98)
            paint(line(s * 0.1, -0.35, 0.05, 0.25, 0.013), 0.98)
            boxes[i] = (cx, cy, 0.1, 0.1)
        elif entity == "cardiomegaly":
            boxes[i] = (0.1, 0.24, 0.27 * size_of_heart, 0.25)
        else:
            boxes[i] = {"edema": (0.0, -0.1, 0.7, 0.6), "enlarged cardiomediastinum": (0.0, -0.3, wide, 0.4)}.get(
                entity, boxes[i]
            )
    pixels = []
    for cx, cy, rx, ry in boxes:
        at = [columns / 2 + (cx + dx) * half, rows / 2 + (cy + dy) * half]
        low = [max(0.0, at[0] - rx * half), max(0.0, at[1] - ry * half)]
        high = [min(columns - 1.0, at[0] + rx * half), min(rows - 1.0, at[1] + ry * half)]
        pixels.append([round(float(value), 1) for value in low + high])
    return finish_picture(rng, grey, fine), pixels


def finish_picture(rng, grey, fine):
    """Grain, exposure and contrast of a picture in [0, 1] -> uint8."""
    import numpy as np

    grey = grey + 0.02 * fine + 0.015 * rng.standard_normal(grey.shape, dtype=np.float32)
    grey = np.clip(grey, 0, 1.05) ** rng.uniform(0.9, 1.1) * rng.uniform(0.86, 0.98) + rng.uniform(0, 0.03)
    return (255 * np.clip(grey, 0, 1)).astype(np.uint8)


def study_questions(rng, found: list[Finding], boxes: dict[str, list]) -> list[dict]:
    """The questions about one study with their answers, as in a .qa.json. `boxes` {dicom_id: a box per finding}."""
    questions, counts = [], {}

    def about(finding: Finding | None) -> dict:  # the tags of a finding; none: of "no finding"
        if finding is None:
            return {"regions": [], "obs_entities": ["no finding"], "positiveness": "neg", "modifiers": [], "at": None}
        modifiers = [["severity", SEVERITIES[finding.level]]]
        tags = {"regions": [finding.region], "obs_entities": [finding.entity], "positiveness": "pos"}
        return tags | {"modifiers": modifiers, "at": found.index(finding)}

    def answer(answer_id: str, kind: str, text: str, tags: dict) -> dict:
        at = tags["at"]
        places = {} if at is None else {dicom: {"image_id": dicom, "bboxes": [box[at]]} for dicom, box in boxes.items()}
        return {
            "answer_id": answer_id, "answer_type": kind, "answer_level": 0, "text": text, "regions": tags["regions"],
            "obs_entities": tags["obs_entities"], "obs_categories": ["ANATOMICAL_FINDING"], "certainty": "certain",
            "positiveness": tags["positiveness"], "modifiers": tags["modifiers"], "localization": places,
            "sub_answers": [], "answer_quality": {"entailment": int(rng.integers(3, 7)), "relevance": 6},
        }  # fmt: skip

    def ask(kind: str, subject: str, text: str, finding: Finding | None = None, **changed) -> None:
        counts[kind] = counts.get(kind, 0) + 1
        number = f"{kind}_{counts[kind]:03d}"
        wording = WORDINGS[kind][rng.integers(len(WORDINGS[kind]))]
        tags = about(finding) | changed
        answers = [answer(f"{number}_A1", "main_answer", text, tags)]
        if "describe" in kind and not changed and rng.random() < 0.5:  # descriptions also list what is absent
            name, absent = some(sorted(NAMES.items())), dict(about(None))
            if name[0] not in {f.entity for f in found}:
                absent |= {"obs_entities": [name[0]], "regions": ["lungs"]}
                absent = answer(f"{number}_A3", "main_answer", f"There is no {name[1]}.", absent)
                answers = [absent, *answers] if finding else [absent]
        if finding is not None and rng.random() < 0.3:
            detail = f"It lies in the {finding.region}."
            details = answer(f"{number}_A2", "details", detail, about(finding) | {"regions": ["chest wall"]})
            details["sub_answers"] = [answer(f"{number}_A2.1", "details", "Nothing else of note.", about(None))]
            answers.append(details)
        if rng.random() < 0.1:  # stands before the main answer now and then: what counts is answer_type
            answers.insert(0, answer(f"{number}_A0", "related_information", "No other change.", about(None)))
        questions.append({
            "question_id": number, "question_type": kind, "question_strategy": STRATEGIES[kind[0]],
            "variables": {"subject": subject}, "obs_ids": [f"O{tags['at'] + 1:02d}"] if tags["at"] is not None else [],
            "question": wording.format(subject), "answers": answers,
            "question_quality": {"clarity": int(rng.integers(3, 7)), "completeness": int(rng.integers(3, 7))},
        })  # fmt: skip

    def some(items):
        return items[rng.integers(len(items))] if items else None

    def yes_no(kind: str, subject: str, finding: Finding | None) -> None:
        """`positiveness` tells of the finding, also where normality is asked for: then pos goes with the answer no."""
        yes = (finding is not None) != ("is_normal" in kind)
        ask(kind, subject, "Yes." if yes else "No.", finding)

    def phrase(entity: str, side: str, article: bool = False) -> str:
        place = f" on the {side} side" if entity == "fracture" else f" in the {side} lung" if side else ""
        uncounted = ("consolidation", "atelectasis", "pleural other", "cardiomegaly", "edema")
        return ("a " if article and entity not in uncounted else "") + NAMES[entity] + place

    ill = [f for f in found if f.entity != "support devices"]
    device = next((f for f in found if f.entity == "support devices"), None)
    in_lung = {side: next((f for f in ill if f.side == side and f.entity in LUNG_FINDINGS), None) for side in SIDES}
    edema = next((f for f in ill if f.entity == "edema"), None)
    ask("B01_describe_all", "", "; ".join(NAMES[f.entity] for f in ill) or "Normal.", ill[0] if ill else None)
    ask("B16_has_imaging_artifacts", "", "No.")
    if rng.random() < 0.1:
        ask("B14_describe_acquisition", "", "Upright.", positiveness="neutral")
    if not ill or rng.random() < 0.45:  # as many questions about normal studies as about others
        yes_no("B03_is_abnormal", "", some(ill))
        yes_no("B04_is_normal", "", some(ill))

    # finding: half of the answers are yes, and half of the others name a finding of the other lung
    there = {(f.entity, f.side) for f in ill}
    absent = [
        (entity, side) for entity in NAMES for side in ((*SIDES,) if entity in (*LUNG_FINDINGS, "fracture") else ("",))
    ]
    absent = [pair for pair in absent if pair not in there]
    mirrored = [pair for pair in absent if pair[1] and any(e == pair[0] for e, _ in there)]
    for kind in ("D02_has_finding",) * 4 + ("A_indication",):
        if ill and rng.random() < (0.68 if kind[0] == "D" else 0.75):
            finding = some(ill)
            entity, side = finding.entity, finding.side
        else:
            finding, (entity, side) = None, some(mirrored if mirrored and rng.random() < 0.6 else absent)
        if kind[0] == "D":
            yes_no(kind, phrase(entity, side, article=True), finding)
        else:
            ask(kind, phrase(entity, side), NAMES[entity] if finding else "Nothing.", finding)
    for side in SIDES:
        mine = in_lung[side]
        if not edema and (mine or rng.random() < 0.3):
            ask("D01_describe_finding", f"{side} lung", NAMES[mine.entity] if mine else "Nothing.", mine)
            ask(
                "C01_describe_region",
                f"{side} lung",
                "See the region.",
                mine,
                **({} if mine else {"regions": [f"{side} lung"]}),
            )
        if mine and [f.entity for f in ill].count(mine.entity) == 1:  # else "where?" would have two answers
            ask("D03_where_is_finding", NAMES[mine.entity], f"In the {mine.region}.", mine)
    both = edema or all(in_lung.values())
    if rng.random() < (0.3 if both else any(in_lung.values())):
        which = next(f for f in (edema, *in_lung.values()) if f)
        ask(
            "C02_describe_abnormal_region",
            "",
            "See the region.",
            which,
            regions=["lungs" if both else f"{which.side} lung"],
        )

    # region and subcategory
    for kind in ("C03_is_abnormal_region", "C04_is_normal_region"):
        place = some(("left lung", "right lung", "heart", "mediastinum"))
        hits = [
            f for f in ill if f.region == place or (f.side and f"{f.side} lung" == place and f.entity != "fracture")
        ]
        hits += [edema] if edema and "lung" in place else []
        yes_no(kind, place, some(hits))
    for kind in (
        "B08_describe_subcat",
        "B09_describe_abnormal_subcat",
        "B10_is_abnormal_subcat",
        "B11_is_normal_subcat",
    ):
        hit = {name: [f for f in ill if f.entity in entities] for name, entities in SUBCATEGORIES.items()}
        one = {name: fs for name, fs in hit.items() if len({f.entity for f in fs}) < 2}  # several: no single category
        choice = one if kind[:3] in ("B08", "B09") else hit
        full, empty = [name for name in choice if choice[name]], [name for name in choice if not choice[name]]
        name = some(full if full and rng.random() < 0.75 else empty or full)
        if kind[:3] in ("B08", "B09"):
            if not hit[name] and rng.random() < 0.4:
                continue  # else "no finding" would be most of the answers
            ask(kind, name, "See the finding." if hit[name] else "Nothing.", some(hit[name]))
        else:
            yes_no(kind, name, some(hit[name]))
    graded = ("pleural effusion", "pneumothorax", "cardiomegaly", "edema")
    for finding in [f for f in ill if f.entity in graded]:
        subject = phrase(finding.entity, finding.side)
        ask("D04_how_severe_is_finding", subject, SEVERITIES[finding.level].capitalize() + ".", finding)
    if rng.random() < 0.5:
        entity, side = some([pair for pair in absent if pair[0] in graded])
        ask("D04_how_severe_is_finding", phrase(entity, side), "There is none.", modifiers=[["severity", "none"]])

    # devices
    side = device.side if device and rng.random() < 0.85 else some(SIDES)
    on_side = device if device and device.side == side else None
    yes_no("B13_has_devices", "", device)
    yes_no("C08_has_region_device", side, on_side)
    yes_no("D06_has_device", side, on_side)
    ask("B12_describe_device", "", "A pacemaker." if device else "None.", device)
    ask("C07_describe_region_device", side, "A pacemaker." if on_side else "None.", on_side)
    if rng.random() < 0.5:
        ask("D05_describe_device", "", "It lies over the chest." if device else "There is none.", device)
    if device:
        ask("D07_where_is_device", "", f"Over the {device.region}.", device)

    # answers without a target: a name outside the vocabulary, neither yes nor no, no severity given
    if rng.random() < 0.3:
        ask("D03_where_is_finding", "old scar", "At the azygos fissure.", regions=["azygos fissure"])
        ask("D02_has_finding", "old scar", "That cannot be told.", positiveness="neutral", certainty="unknown")
        ask("D04_how_severe_is_finding", "old scar", "Not given.", obs_entities=["scar"])
        ask("D01_describe_finding", "old scar", "A scar.", obs_entities=["scar"], positiveness="pos")
    return questions


def write_gz(path: Path, rows: list) -> None:
    """A .csv.gz whose bytes depend on the rows alone (no time, no file name inside)."""
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        file.write(text.getvalue().encode())


def write_qa(out: Path, studies: list[dict], zipped: bool) -> None:
    """qa/p10/p10000032/s50414267.qa.json under `out`, as files or as members of qa.zip."""
    archive = zipfile.ZipFile(out / "qa.zip", "w", zipfile.ZIP_DEFLATED) if zipped else None
    for study in studies:
        name = f"qa/{study['patient_id'][:3]}/{study['patient_id']}/{study['study_id']}.qa.json"
        if archive:
            member = zipfile.ZipInfo(name, (2025, 7, 22, 0, 0, 0))  # a fixed date: the same bytes each time
            archive.writestr(member, json.dumps(study), zipfile.ZIP_DEFLATED)
        else:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(json.dumps(study))
    if archive:
        archive.close()


def write_question_table(out: Path, rows: list[tuple]) -> None:
    """metadata/question_metadata.parquet under `out`; rows are (patient, study, id, type, strategy, rating)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("patient_id", "study_id", "question_id")
    names += ("question.question_type", "question.question_strategy", "question.quality.rating")
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    (out / "metadata").mkdir(parents=True, exist_ok=True)
    table = pa.table({name: pa.array(column, pa.string()) for name, column in zip(names, columns, strict=True)})
    pq.write_table(table, out / "metadata" / "question_metadata.parquet", row_group_size=len(rows) // 5 + 1)


def write_mimic_cxr(
    out: Path, num_train: int, num_val: int, num_test: int, image_size: int, seed: int, zipped: bool = False
) -> None:
    """The data set of guide 1. Pictures and questions of a study depend on the seed and its number alone."""
    import numpy as np
    from PIL import Image
    from tqdm import tqdm

    jpg, qba = out / "mimic-cxr-jpg", out / "mimic-ext-cxr-qba"
    if jpg.exists() or qba.exists():
        raise InputError(f"{out}: already holds a data set; choose another folder or delete it")
    rng = np.random.default_rng([seed, 1])
    splits = [name for name, n in (("train", num_train), ("validate", num_val), ("test", num_test)) for _ in range(n)]
    patients = 10_000_000 + rng.choice(10_000_000, len(splits), replace=False)
    number_of_studies = rng.choice((1, 2, 3), len(splits), p=(0.45, 0.35, 0.2))
    study_ids = iter((50_000_000 + rng.choice(10_000_000, number_of_studies.sum(), replace=False)).tolist())
    cases = sorted(
        (int(p), s, next(study_ids))
        for p, s, n in zip(patients, splits, number_of_studies, strict=True)
        for _ in range(n)
    )
    metadata, split_rows, labels, table, studies, frontal = [METADATA_COLUMNS], [], [], [], [], set()
    for number, (patient, split, study) in enumerate(tqdm(cases, desc="studies", disable=not sys.stderr.isatty())):
        rng = np.random.default_rng([seed, 2, number])
        found = draw_findings(rng)
        kind = rng.random()
        views = ["PA"] if kind < 0.45 else ["AP"] if kind < 0.8 else ["PA", "AP"] if kind < 0.93 else []
        if not views or rng.random() < 0.25:
            views.append("LATERAL" if rng.random() < 0.7 else "LL")
        folder = jpg / "files" / f"p{patient // 1_000_000}" / f"p{patient}" / f"s{study}"
        folder.mkdir(parents=True)
        boxes = {}
        for view in views:
            dicom = "-".join(f"{word:08x}" for word in rng.integers(0, 2**32, 5))
            lateral = view in ("LATERAL", "LL")
            picture, pixels = chest_picture(rng, image_size, found, lateral)
            Image.fromarray(picture).save(folder / f"{dicom}.jpg", quality=92)
            blank = rng.random()  # ViewPosition is missing at times, and what is left may tell or not
            meaning = "" if blank < 0.02 else VIEW_MEANING[view]
            position = "" if blank < 0.07 else view
            metadata.append(
                (dicom, patient, study, "CHEST (PA AND LAT)" if "PA" in views else "CHEST (PORTABLE AP)", position,
                 *picture.shape, 21800101 + number % 28, "083015.531", "CHEST (PA AND LAT)", meaning, "Erect")
            )  # fmt: skip
            split_rows.append((dicom, study, patient, split))
            if not lateral:
                boxes[dicom] = pixels
                if meaning:
                    frontal.add(study)
        truth, chances = chexpert_labels(found), rng.random(len(CHEXPERT))
        told = [
            "" if c < (0.02 if yes else 0.15) else -1.0 if c > 0.95 else float(yes)
            for yes, c in zip(truth.values(), chances, strict=True)
        ]
        labels.append((patient, study, *told))
        names = {"patient_id": f"p{patient}", "study_id": f"s{study}"}
        questions = study_questions(rng, found, boxes)
        studies.append(names | {"questions": questions})
        grades = [GRADES[i] for i in rng.choice(len(GRADES), len(questions), p=GRADE_SHARES)]
        for q, grade in zip(questions, grades, strict=True):
            table.append((*names.values(), q["question_id"], q["question_type"], q["question_strategy"], grade))
    write_gz(jpg / "mimic-cxr-2.0.0-metadata.csv.gz", metadata)
    write_gz(jpg / "mimic-cxr-2.0.0-split.csv.gz", [("dicom_id", "study_id", "subject_id", "split"), *split_rows])
    write_gz(jpg / "mimic-cxr-2.0.0-chexpert.csv.gz", [("subject_id", "study_id", *CHEXPERT), *labels])
    write_question_table(qba, table)
    write_qa(qba, studies, zipped)
    info = {
        "obs_entities": [name.lower() for name in CHEXPERT],
        "severities": SEVERITIES,
        "question_types": list(WORDINGS),
    }
    (qba / "metadata" / "dataset_info.json").write_text(json.dumps(info, indent=2))
    for letter in "BA":  # one grade or better, studies with a frontal picture only
        good = [
            row for row in table if row[5] and row[5] >= {"A": "4", "B": "3"}[letter] and int(row[1][1:]) in frontal
        ]
        wanted = {row[1:3] for row in good}
        few = [
            s | {"questions": [q for q in s["questions"] if (s["study_id"], q["question_id"]) in wanted]}
            for s in studies
        ]
        folder = qba / "exports" / f"{letter}_frontal"
        write_question_table(folder, good)
        write_qa(folder, [study for study in few if study["questions"]], zipped=True)
    write_tiny_convnext(out / "convnext_tiny", seed)
    write_tiny_bert(out / "bert_tiny", [q["question"] for study in studies for q in study["questions"]], seed)
    ratings = [row[5] for row in table]
    by_grade = ", ".join(f"{str(g or 'unrated').split('_')[-1]} {ratings.count(g)}" for g in GRADES)
    print(
        f"{out}: {len(splits)} patients, {len(cases)} studies, {len(split_rows)} images, {len(table)} questions "
        f"({by_grade}), convnext_tiny, bert_tiny"
    )


def write_tiny_convnext(path: Path, seed: int) -> None:
    """A ConvNeXt checkpoint for 64 x 64 pixels with random weights. Layer scale starts at 1: at the usual 1e-6 the
    blocks do nothing for the first thousands of steps."""
    import torch
    from transformers import ConvNextConfig, ConvNextModel

    torch.manual_seed(seed)
    config = ConvNextConfig(
        num_channels=3, patch_size=4, num_stages=3, depths=[1, 1, 2], hidden_sizes=[24, 48, 96], image_size=64,
        layer_scale_init_value=1.0,
    )  # fmt: skip
    model = ConvNextModel(config)
    for weight in model.parameters():
        if (
            weight.dim() > 1
        ):  # the usual 0.02 suits wide layers; in these narrow ones a block would pass on next to nothing
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    save_model(model, path)
    image = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 64}, "crop_pct": 1.0}
    image |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (path / "preprocessor_config.json").write_text(json.dumps(image, indent=2))


def write_tiny_bert(path: Path, texts: list[str], seed: int) -> None:
    """A BERT checkpoint with random weights and a WordPiece vocabulary of the questions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, BertTokenizerFast

    # every word, and the letters for words never seen; a trained vocabulary breaks ties differently in each run
    words = sorted({word for text in set(texts) for word in re.findall(r"[a-z0-9]+|[^a-z0-9 ]", text.lower())})
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *words]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    pieces = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece()
    pieces.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = BertTokenizerFast(tokenizer_object=pieces, model_max_length=128)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=128, initializer_range=0.1,
    )  # fmt: skip
    save_model(BertModel(config), path)
    tokenizer.save_pretrained(path)


# --- survival ---------------------------------------------------------------------------------------------------------

FIELD = (220.0, 180.0, 128.0)  # mm that a CT covers
VOXELS = ((1.0, 1.0, 1.6), (0.8, 0.8, 2.0), (1.2, 1.2, 1.3))  # in units of field / matrix
TURNS = ((1, 1, 1), (-1, -1, 1), (-1, 1, 1), (1, 1, -1))  # RAS, LPS, LAS, RAI


def draw_lesions(rng) -> list[tuple]:
    """[(position on the heart's surface, radius mm, HU above tissue, vessel)] of one patient, also none."""
    burden = max(0.0, rng.normal(1.0, 0.9))
    lesions = []
    for _ in range(rng.poisson(3.5 * burden)):
        up, around = rng.uniform(-0.8, 0.8), rng.uniform(0, 2 * math.pi)
        flat = math.sqrt(1 - up * up)
        place = (42 * flat * math.cos(around), 36 * flat * math.sin(around), 40 * up)
        lesions.append((place, rng.uniform(4.5, 9), rng.uniform(400, 1300), ("LAD", "LCX", "RCA")[rng.integers(3)]))
    return lesions


def chest_ct(rng, lesions: list[tuple], matrix: int):
    """(int16 HU, affine) of a chest: body, lungs, spine, ribs, heart, and the lesions; voxel size and axes vary."""
    import numpy as np

    voxel = FIELD[0] / matrix * np.array(VOXELS[rng.integers(len(VOXELS))])
    axes = [
        (np.arange(max(6, round(f / v))) - (max(6, round(f / v)) - 1) / 2) * v
        for f, v in zip(FIELD, voxel, strict=True)
    ]
    x, y, z = np.meshgrid(*axes, indexing="ij")
    size, shift = rng.uniform(0.93, 1.07), rng.uniform(-6, 6, 3)

    def inside(cx, cy, cz, rx, ry, rz):
        distance = ((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 + ((z - cz) / rz) ** 2
        return 1 / (1 + np.exp(np.clip(8 * (np.sqrt(distance) - 1) * min(rx, ry, rz) / voxel.max(), -30, 30)))

    volume = np.full(x.shape, -1000.0)

    def put(shape, value):
        volume[:] = volume * (1 - shape) + value * shape

    put(inside(0, 0, 0, 104 * size, 80 * size, 400), rng.normal(30, 8))
    bone = rng.uniform(350, 700)
    for side in (-1, 1):
        put(inside(side * 52 * size, 6, 0, 40 * size, 58 * size, 90), rng.normal(-850, 25))
        for height in range(-48, 49, 24):
            put(inside(side * 88 * size, 10, height, 6, 30, 5), 0.8 * bone)
    put(inside(0, -62 * size, 0, 15, 14, 400), bone)  # the spine; y runs to the front
    centre = (8 + shift[0], 14 + shift[1], shift[2])
    put(inside(*centre, 42, 36, 40), rng.normal(50, 6))
    for (dx, dy, dz), radius, peak, _ in lesions:
        away = (x - centre[0] - dx) ** 2 + (y - centre[1] - dy) ** 2 + (z - centre[2] - dz) ** 2
        volume += peak * np.exp(-away / (0.72 * radius**2))
    volume += rng.normal(0, 22, volume.shape)
    turn = TURNS[rng.integers(len(TURNS))]
    affine = np.diag([*(voxel * turn), 1.0])
    affine[:3, 3] = [axis[0] if sign > 0 else axis[-1] for axis, sign in zip(axes, turn, strict=True)]
    return np.clip(volume, -1024, 3071).astype(np.int16)[tuple(slice(None, None, sign) for sign in turn)], affine


def write_survival(out: Path, num_patients: int, event_rate: float, matrix: int, risk: float, seed: int) -> None:
    """dataset.csv, and scans/*.nii.gz. Raises InputError when the folder holds a data set."""
    import nibabel
    import numpy as np

    from survival_metrics import concordance

    if (out / "dataset.csv").exists():
        raise InputError(f"{out}: holds a data set already; choose another folder or delete it")
    (out / "scans").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    lesions = [draw_lesions(rng) for _ in range(num_patients)]
    load = np.log1p([sum(peak / 1000 * (radius / 4) ** 3 for _, radius, peak, _ in found) for found in lesions])
    true = risk * (load - load.mean()) / max(load.std(), 1e-9)
    draw, censored = -np.log(rng.random(num_patients)), rng.uniform(300, 2447, num_patients)
    low, high = -5.0, 30.0  # log of the Weibull scale, by bisection: the share of events falls with it
    for _ in range(60):
        middle = (low + high) / 2
        days = np.exp(middle) * (draw * np.exp(-true)) ** (1 / 1.3)
        low, high = (middle, high) if np.mean(days <= censored) > event_rate else (low, middle)
    event = days <= censored
    time = np.clip(np.ceil(np.minimum(days, censored)), 34, 2447).astype(int)
    part = np.zeros(num_patients, int)
    for group in (np.flatnonzero(event), np.flatnonzero(~event)):
        part[rng.permutation(group)] = np.arange(len(group)) % 5
    header = ["case_num", "NIFTI Path", "time", "event", *(f"Fold_{k}" for k in range(1, 6)), "Age", "isFemale"]
    header += ["AgatstonScore2D", "MassScore", "VolumeScore", "NumLesion3D", "MaxHU", "MeanHU", "LargestVolume"]
    header += ["LAD_Agatston", "LCX_Agatston", "RCA_Agatston", "true_log_hazard"]
    unfinished = out / ".dataset.csv.tmp"  # a table that is there is whole
    with open(unfinished, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(header)
        for i, found in enumerate(lesions):
            volume, affine = chest_ct(rng, found, matrix)
            name = f"scans/case_{i + 1:05d}.nii.gz"
            nibabel.save(nibabel.Nifti1Image(volume, affine), out / name)
            sizes = [4.2 * radius**3 for _, radius, _, _ in found]
            parts = {"LAD": 0.0, "LCX": 0.0, "RCA": 0.0}
            for volume_mm3, (_, _, peak, vessel) in zip(sizes, found, strict=True):
                parts[vessel] += volume_mm3 / 3 * min(4, int(peak / 100)) * rng.uniform(0.9, 1.1)
            mass = sum(v * peak / 1000 for v, (_, _, peak, _) in zip(sizes, found, strict=True))
            peaks = [peak for _, _, peak, _ in found]
            row = [i + 1, name, time[i], int(event[i]), *("val" if part[i] == k else "train" for k in range(5))]
            row += [round(rng.normal(58 + 4 * load[i], 8)), int(rng.random() < 0.45), round(sum(parts.values()), 1)]
            row += [round(mass, 1), round(sum(sizes), 1), len(found), round(max(peaks, default=0))]
            row += [round(sum(peaks) / max(1, len(peaks))), round(max(sizes, default=0), 1)]
            table.writerow([*row, *(round(value, 1) for value in parts.values()), round(true[i], 6)])
    unfinished.replace(out / "dataset.csv")
    rows = part == 0
    print(
        f"{out}: {num_patients} patients, {event.sum()} events ({event.mean():.1%}), follow-up {time.min()} to "
        f"{time.max()} days; validation fold Fold_1: {rows.sum()} patients, {event[rows].sum()} events"
    )
    both = [
        concordance(np.round(true[r], 6), event[r], time[r].astype(float)) for r in (rows, np.ones(num_patients, bool))
    ]
    shown = ["undefined" if value is None else f"{value:.4f}" for value in both]
    print(f"C-index of the true risk: {shown[0]} in the validation fold of Fold_1, {shown[1]} in all")


# --- cascade ----------------------------------------------------------------------------------------------------------

TORSO = (380.0, 300.0, 340.0)  # mm that a CT covers: right, front, up
TORSO_VOXELS = ((1.0, 1.0, 1.0), (0.9, 0.9, 1.3), (1.1, 1.1, 0.9))  # in units of field / matrix
TORSO_AXES = ((0, 1, 2), (0, 1, 2), (2, 1, 0))  # order in which the file has x, y, z


def torso_ct(rng, matrix: int):
    """(int16 HU, affine) of a torso; what makes a patient is drawn anew for each, voxel size and axes vary."""
    import numpy as np

    field = np.array(TORSO) * rng.uniform(0.95, 1.05)
    voxel = field[0] / matrix * np.array(TORSO_VOXELS[rng.integers(len(TORSO_VOXELS))])
    counts = [max(8, round(f / v)) for f, v in zip(field, voxel, strict=True)]
    axes = [(np.arange(n) - (n - 1) / 2) * v for n, v in zip(counts, voxel, strict=True)]
    x, y, z = np.meshgrid(*axes, indexing="ij")
    wide, deep, tall = rng.uniform(0.75, 1.12), rng.uniform(0.75, 1.15), rng.uniform(0.9, 1.1)
    lean, forward, bend, raised = rng.uniform([-32, -26, -18, -45], [32, 26, 18, 45])
    x = x - lean - bend * np.cos(np.pi * z / field[2])  # the patient stands beside the middle, spine curved
    y = y - forward

    def inside(cx, cy, cz, rx, ry, rz):
        distance = ((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 + ((z - cz) / rz) ** 2
        return 1 / (1 + np.exp(np.clip(6 * (np.sqrt(distance) - 1) * min(rx, ry, rz) / voxel.max(), -30, 30)))

    volume = np.full(x.shape, -1000.0)

    def put(shape, value):
        volume[:] = volume * (1 - shape) + value * shape

    fat = rng.uniform(8, 28)
    put(inside(0, 0, 0, 150 * wide, 105 * deep, 900), rng.normal(-95, 8))
    put(inside(0, 0, 0, 150 * wide - fat, 105 * deep - fat, 900), rng.normal(45, 8))
    for side, high in ((-1, raised + rng.uniform(-12, 12)), (1, raised + rng.uniform(-12, 12))):
        breath = rng.uniform(0.85, 1.12)
        lung = inside(side * 66 * wide, 4, 28 + high, 52 * wide * breath, 74 * deep, 110 * tall * breath)
        put(lung * (1 / (1 + np.exp(-(z - high + 62) / 4))), rng.normal(-830, 25))  # on the diaphragm's dome
        for height in range(-96, 133, 38):
            arc = inside(side * 118 * wide, 8, height * tall + raised, 9, 62 * deep, 8)
            put(arc, 0.75 * rng.uniform(450, 650))
    heart = (-26 * wide + rng.uniform(-10, 10), 26 * deep, -18 + raised + rng.uniform(-10, 10))
    put(inside(*heart, rng.uniform(44, 66), rng.uniform(40, 54), rng.uniform(46, 62)), rng.normal(55, 6))
    bone = rng.uniform(450, 750)
    put(inside(0, -66 * deep, 0, 19, 18, 900), bone)
    put(inside(0, -92 * deep, 0, 6, 12, 900), 0.8 * bone)
    for _ in range(rng.poisson(1.5)):
        side = rng.choice([-1, 1])
        at = side * rng.uniform(45, 90) * wide, rng.uniform(-35, 35) * deep, raised + rng.uniform(-40, 90)
        put(inside(*at, *[rng.uniform(9, 22)] * 3), rng.normal(60, 20))
    volume += rng.normal(0, 12, volume.shape)
    turn, order = TURNS[rng.integers(len(TURNS))], TORSO_AXES[rng.integers(len(TORSO_AXES))]
    affine = np.diag([*(voxel * turn), 1.0])
    affine[:3, 3] = [axis[0] if sign > 0 else axis[-1] for axis, sign in zip(axes, turn, strict=True)]
    volume = np.clip(volume, -1024, 3071).astype(np.int16)[tuple(slice(None, None, sign) for sign in turn)]
    return volume.transpose(order), affine[:, [*order, 3]]


def write_cascade(out: Path, num_patients: int, matrix: int, seed: int) -> None:
    """<id>/<id>.nii.gz and its two X-rays. Raises InputError when the folder holds something."""
    import nibabel
    import numpy as np

    from xray_ct_data import make_drrs

    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out}: holds something already; choose another folder or delete it")
    rng = np.random.default_rng(seed)
    for i in range(num_patients):
        name = f"patient_{i + 1:04d}"
        (out / name).mkdir(parents=True)
        volume, affine = torso_ct(rng, matrix)
        nibabel.save(nibabel.Nifti1Image(volume, affine), out / name / f"{name}.nii.gz")
    print(f"{out}: {num_patients} patients, {make_drrs(out)} X-rays")


# --- compressed_ad ----------------------------------------------------------------------------------------------------

TD_RATE, TD_DISCOUNT, TD_BONUS = 0.5, 0.9, 0.5  # the bonus falls with the root of a cell's visits
TD_CHANCE = (0.1, 0.02)  # share of random actions, at the first step and at the last


def tabular_histories(goals, streams: int, steps: int, seed: int):
    """(states, actions, next states) (steps, len(goals) * streams) uint8 cells of learners that each know one goal's
    rewards only by having met them. After each episode the values are backed up along it, from its end."""
    import numpy as np
    from tqdm import tqdm

    from darkroom import ACTIONS, CELLS, HORIZON, NEXT, START

    rng, count = np.random.default_rng(seed), len(goals) * streams
    goal, every = np.repeat(np.asarray(goals), streams), np.arange(count)
    values, visits = np.zeros((2, count, CELLS), np.float32)
    states, actions, after = np.empty((3, steps, count), np.uint8)
    state = np.full(count, START)
    for t in tqdm(range(steps), desc="tabular", unit="step", disable=not sys.stderr.isatty()):
        around = every[:, None], NEXT[state]
        score = values[around] + TD_BONUS / np.sqrt(1 + visits[around])
        chosen = (score + 0.01 * rng.random((count, ACTIONS), np.float32)).argmax(1)
        chance = TD_CHANCE[0] + (TD_CHANCE[1] - TD_CHANCE[0]) * t / steps
        chosen = np.where(rng.random(count) < chance, rng.integers(0, ACTIONS, count), chosen)
        states[t], actions[t], state = state, chosen, NEXT[state, chosen]
        after[t] = state
        visits[every, state] += 1
        if (t + 1) % HORIZON == 0:
            for k in range(t, t - HORIZON, -1):
                cell = after[k]
                ahead = values[every[:, None], NEXT[cell]].max(1)
                values[every, cell] += TD_RATE * ((cell == goal) + TD_DISCOUNT * ahead - values[every, cell])
            state = np.full(count, START)
    return states, actions, after


def ppo_history(goal: int, streams: int, steps: int, seed: int):
    """The same for one goal by PPO as published (n_steps 80, batch 40, 20 epochs, 3e-4), one net for all streams."""
    import gymnasium
    import numpy as np
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecEnv

    from darkroom import ACTIONS, GRID, HORIZON, NEXT, PLACES, START

    torch.set_num_threads(1)

    class Darkroom(VecEnv):
        """All streams of one goal, in NumPy."""

        def __init__(self):
            space = gymnasium.spaces.Box(0, GRID - 1, (2,), np.float32)
            super().__init__(streams, space, gymnasium.spaces.Discrete(ACTIONS))
            self.log: list = []

        def reset(self):
            self.time, self.state = 0, np.full(streams, START)
            return PLACES[self.state].astype(np.float32)

        def step_async(self, actions):
            self.actions = actions

        def step_wait(self):
            after = NEXT[self.state, self.actions]
            self.log.append((self.state, self.actions, after))
            self.time, self.state = self.time + 1, after
            done, info = self.time % HORIZON == 0, [{} for _ in range(streams)]
            if done:
                last = PLACES[after].astype(np.float32)
                info = [{"terminal_observation": last[k], "TimeLimit.truncated": True} for k in range(streams)]
                self.state = np.full(streams, START)
            observed = PLACES[self.state].astype(np.float32)
            return observed, (after == goal).astype(np.float32), np.full(streams, done), info

        def close(self):
            pass

        def env_is_wrapped(self, wrapper_class, indices=None):
            return [False] * streams

        def env_method(self, method_name, *args, indices=None, **kwargs):
            raise NotImplementedError(method_name)

        def get_attr(self, attr_name, indices=None):
            return [getattr(self, attr_name, None)] * streams

        def set_attr(self, attr_name, value, indices=None):
            raise NotImplementedError(attr_name)

    room = Darkroom()
    options = {"n_steps": 80, "batch_size": 40, "n_epochs": 20, "learning_rate": 3e-4, "seed": seed + goal}
    PPO("MlpPolicy", room, device="cpu", **options).learn(steps * streams)  # in whole rollouts of 80 steps
    return tuple(np.stack(column)[:steps].astype(np.uint8) for column in zip(*room.log, strict=True))


def write_compressed_ad(out: Path, source: str, streams: int, steps: int, seed: int) -> None:
    """datasets/history_darkroom_*.hdf5, and the learning curve on the screen. Raises InputError when it is there."""
    import h5py
    import numpy as np

    from checkpoint_utils import write_atomically
    from darkroom import CELLS, HORIZON, PLACES, optimal_return, random_return

    name = {"tabular": "TD", "ppo": "PPO"}[source]
    path = out / "datasets" / f"history_darkroom_{name}_alg-seed{seed}.hdf5"
    if path.exists():
        raise InputError(f"{path}: is there already; choose another folder or delete it")
    if source == "tabular":
        parts = [part.reshape(steps, CELLS, streams) for part in tabular_histories(range(CELLS), streams, steps, seed)]
    else:
        parts = [np.stack(columns, 1) for columns in zip(*ppo_histories(streams, steps, seed), strict=True)]
    rewards = parts[2] == np.arange(CELLS)[:, None]
    ends = np.broadcast_to((np.arange(steps) + 1)[:, None] % HORIZON == 0, (steps, streams))
    memory = io.BytesIO()  # on a full disk the HDF5 library dies
    with h5py.File(memory, "w") as file:
        for goal in range(CELLS):
            group = file.create_group(str(goal))  # contiguous, so that it can be mapped
            for field, cells in (("states", parts[0]), ("next_states", parts[2])):
                group[field] = PLACES[cells[:, goal]].astype(np.int8)
            group["actions"], group["dones"] = parts[1][:, goal].astype(np.int8), ends
            group["rewards"] = rewards[:, goal].astype(np.float32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(memory.getbuffer()))
    except OSError as error:
        raise RunError(f"{path}: not written ({error.strerror}); make room") from None
    whole = steps // HORIZON
    curve = rewards[: whole * HORIZON].reshape(whole, HORIZON, -1).sum(1).mean(1)
    shown = sorted({k for k in (1, 2, 5, 10, 20, 50, 100) if k < whole} | {whole})
    print(f"{path}: {CELLS} goals x {streams} streams x {steps} steps, by {source}")
    trivial = (
        f"random policy {random_return(range(CELLS)).mean():.2f}, optimum {optimal_return(range(CELLS)).mean():.2f}"
    )
    print(f"return in episode {', '.join(f'{k}: {curve[k - 1]:.2f}' for k in shown)}; {trivial}")
    if whole > 1 and curve[-max(1, whole // 10) :].mean() <= curve[0]:
        print("warning: the source has not learned anything yet; give more --steps", file=sys.stderr)


def ppo_histories(streams: int, steps: int, seed: int) -> list:
    """ppo_history of every goal, one process per core."""
    import functools
    import importlib.util
    import multiprocessing

    from tqdm import tqdm

    from darkroom import CELLS
    from hardware_utils import usable_cores

    if importlib.util.find_spec("stable_baselines3") is None:
        raise InputError("--source ppo: needs stable-baselines3; pip install -r requirements-dev.txt")
    work = functools.partial(ppo_history, streams=streams, steps=steps, seed=seed)
    with multiprocessing.get_context("spawn").Pool(min(usable_cores(), CELLS)) as pool:
        return list(tqdm(pool.imap(work, range(CELLS)), total=CELLS, desc="ppo", unit="goal"))


def main(args: argparse.Namespace) -> None:
    options = {name: value for name, value in vars(args).items() if name != "task"}
    writers = {"prs_med": write_prs_med, "mimic_cxr": write_mimic_cxr, "survival": write_survival}
    (writers | {"cascade": write_cascade, "compressed_ad": write_compressed_ad})[args.task](**options)


if __name__ == "__main__":
    run_main(main, parse_args())
