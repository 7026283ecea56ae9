"""Write a small synthetic data set, laid out like PosMed, and checkpoints of two tiny models, llava_tiny and sam_tiny.

Each image shows four striped lesions. Questions are about a bright lesion with rising stripes or a dark lesion with
falling stripes. The other two lesions are distractors: bright with falling stripes and dark with rising stripes.
"""

import argparse
import csv
import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, count
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image

from tasks.prs_med.wordings import ABSENT, ANSWERS, QUESTIONS, draw, fill, name_structure
from utils.cli import InputError, whole

BRAIN, LUNG, SKIN = "brain_tumors_ct_scan", "lung_CT", "skin_rgbimage"
# {modality: (name of the bright lesion, name of the dark lesion)}
TARGETS = {BRAIN: ("glioma", "meningioma"), LUNG: ("tumour", "fibrosis"), SKIN: ("naevus", "keratosis")}
PICTURES = {BRAIN: "A brain slice", LUNG: "A chest CT slice", SKIN: "A skin photograph"}
POSITIONS = {"top left": (-1, -1), "top right": (1, -1), "bottom left": (-1, 1), "bottom right": (1, 1)}
POSITIONS["center"] = (0, 0)
COLUMNS = ("image_path", "image_name", "split", "description", "position", "question", "answer", "structure")
SKIN_COLOUR = (1.5, 1.1, 0.92)
PRETRAINING_STEPS = 300
CONFIGS = Path(__file__).parents[2] / "configs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", type=Path, help="folder to write; must not hold a data set yet")
    add("--num_train", type=whole(1), default=1800, help="training images, two questions each")
    add("--num_val", type=whole(0), default=48, help="validation images, two questions each")
    add("--num_test", type=whole(0), default=72, help="test images, two questions each")
    add("--image_size", type=whole(32), default=96, help="side of the square images, pixels")
    add("--seed", type=int, default=0, help="the same seed writes the same images")


def write_sample_data(out: Path, num_train: int, num_val: int, num_test: int, image_size: int, seed: int) -> None:
    """Write images, masks, CSVs of questions and answers, and checkpoints of the tiny models to `out`.

    Raises InputError if `out` already contains a data set.
    """
    if (out / "annotations").exists():
        raise InputError(f"{out}: already holds a data set; choose another folder or delete it")
    counts = {"train": num_train, "val": num_val, "test": num_test}
    splits = [split for split, cases in counts.items() for _ in range(cases)]
    modalities = [list(TARGETS)[i % 3] for cases in counts.values() for i in range(cases)]
    rows = {modality: [] for modality in TARGETS}
    with ProcessPoolExecutor() as pool:
        write = partial(write_case, out, seed, image_size)
        for modality, case in zip(modalities, pool.map(write, count(), modalities, splits, chunksize=16), strict=True):
            rows[modality] += case

    (out / "annotations").mkdir()
    for modality in filter(rows.get, rows):
        with open(out / "annotations" / f"{modality}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows[modality]])
    trained = [row for modality in rows for row in rows[modality] if row[2] == "train"]
    write_small_models(out, [row[5:7] for row in trained], image_size, seed)
    print(f"{out}: {2 * len(splits)} questions about {len(splits)} images, llava_tiny, sam_tiny")


def write_case(out: Path, seed: int, size: int, number: int, modality: str, split: str) -> list[tuple]:
    rng = np.random.default_rng([seed, number])
    pixels, masks, positions = draw_case(rng, modality, size)
    rows = []
    for i, (target, mask, position) in enumerate(zip(TARGETS[modality], masks, positions, strict=True)):
        skin = modality == SKIN
        name = f"ISIC_{number:05d}{i}.jpg" if skin else f"case{number:05d}_{target}.png"
        mask_name = f"ISIC_{number:05d}{i}_Segmentation.png" if skin else name
        for kind, file, content in (("images", name, pixels), ("masks", mask_name, np.uint8(255) * mask)):
            folder = out / modality / f"{split}_{kind}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(content).save(folder / file, quality=92)
        description = f"{PICTURES[modality]} in which the {target} covers {mask.mean():.1%} of the picture."
        question, answer = fill(str(rng.choice(QUESTIONS)), target), fill(ANSWERS[0], target, position=position)
        mask_path = f"{modality}/{split}_masks/{mask_name}"
        rows.append((mask_path, name, split, description, position, question, answer, target))
    return rows


# --- synthetic images -------------------------------------------------------------------------------------------------


def smooth_noise(rng: Generator, size: int, cells: int) -> np.ndarray:
    """Return noise (size, size) in about [-1, 1] with features about `size / cells` pixels wide."""
    coarse = rng.uniform(-1, 1, (cells + 2, cells + 2)).astype(np.float32)
    return np.asarray(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC))


def blob(rng: Generator, size: int, x: float, y: float, radius: float, wobble: float = 1.0) -> np.ndarray:
    """Return the signed distance in pixels, (size, size), to the outline of a random wavy ellipse; positive inside.

    x, y, radius: centre and radius as fractions of `size`. wobble: strength of the deviation from a circle.
    """
    v, u = np.mgrid[:size, :size] / (size - 1)
    z = (u - x + 1j * (v - y)) * np.exp(1j * rng.uniform(0, np.pi))
    stretch = 1 + wobble * rng.uniform(-0.2, 0.25)
    waves = [rng.uniform(0.02, 0.08) * np.cos(k * np.angle(z) + rng.uniform(0, 6.28)) for k in (2, 3, 5)]
    return size * (radius * (1 + wobble * sum(waves)) - np.hypot(z.real / stretch, z.imag * stretch))


def soft(distance: np.ndarray) -> np.ndarray:
    """Convert a signed distance in pixels to an opacity: 0 outside, 1 inside, with a soft edge."""
    return 1 / (1 + np.exp(-np.clip(distance / 0.6, -30, 30)))


def draw_case(rng: Generator, modality: str, size: int) -> tuple[np.ndarray, list[np.ndarray], list[str]]:
    image = draw_anatomy(rng, modality, size) + 0.1 * smooth_noise(rng, size, 2)
    masks, positions = [], [list(POSITIONS)[i] for i in rng.permutation(5)[:4]]
    for i, position in enumerate(positions):
        spread = rng.uniform(0.19, 0.25, 2) if position != "center" else 0
        x, y = 0.5 + rng.uniform(-0.02, 0.02, 2) + spread * np.array(POSITIONS[position])
        lesion = blob(rng, size, x, y, rng.uniform(0.09, 0.125))
        masks.append(lesion > 0)

        # lesions and stripes: bright /, dark \, dark /, bright \; questions are about the first two
        angle = np.pi / 4 * (1, 3)[i % 2] + rng.uniform(-0.15, 0.15)
        v, u = np.mgrid[:size, :size] / (size - 1)
        phase = 17 * (u * np.cos(angle) + v * np.sin(angle)) + 0.25 * smooth_noise(rng, size, 6)
        streaks = rng.uniform(0.1, 0.15) * np.cos(2 * np.pi * (phase + rng.uniform()))
        bright = rng.uniform(0.1, 0.2) * (1, -1, -1, 1)[i]
        image = image + soft(lesion) * (bright + streaks)
    if modality == SKIN:
        image = image[..., None] * SKIN_COLOUR
    image = image + rng.normal(0, 0.03, (size, size, 1)[: image.ndim])
    return (255 * np.clip(image, 0, 1)).astype(np.uint8), masks[:2], positions[:2]


def draw_anatomy(rng: Generator, modality: str, size: int) -> np.ndarray:
    image = 0.5 + 0.04 * smooth_noise(rng, size, 6) + 0.03 * smooth_noise(rng, size, 16)
    if modality == SKIN:
        rows = np.arange(size)
        for _ in range(rng.integers(2, 6)):
            hair = rng.uniform(0, size) + np.cumsum(rng.normal(0, 0.4, size)) + rng.uniform(-0.5, 0.5) * rows
            inside = (hair >= 0) & (hair < size)
            image[rows[inside], hair[inside].astype(int)] -= 0.2
        return image

    body = blob(rng, size, 0.5, 0.5, rng.uniform(0.44, 0.46), 0.25)
    image = np.where(body > 0, image, 0.22)
    if modality == BRAIN:
        image[(body > 0) & (body < 0.03 * size)] = 0.85
        organs = [(-0.14, 0.44, 0.47, 0.045), (-0.14, 0.56, 0.47, 0.045)]
    else:
        organs = [(-0.2, 0.3, 0.5, 0.17), (-0.2, 0.7, 0.5, 0.17), (0.2, 0.5, 0.84, 0.05)]
    for grey, x, y, radius in organs:
        image = image + grey * soft(blob(rng, size, x, y, radius))
    return image


# --- checkpoints of tiny models ---------------------------------------------------------------------------------------


def write_small_models(out: Path, pairs: list[tuple[str, str]], image_size: int, seed: int) -> None:
    """Write checkpoints of llava_tiny and sam_tiny to subfolders of `out`.

    pairs: (question, answer) pairs to train llava_tiny on. sam_tiny's input size is `image_size`, rounded to a multiple
    of 8.
    """
    import torch
    import transformers as hf
    from tokenizers import Regex, normalizers

    hf.utils.logging.disable_progress_bar()
    for name in ("llava_tiny", "sam_tiny"):
        shutil.copytree(CONFIGS / "tiny_models" / name, out / name, dirs_exist_ok=True)
    tokenizer = hf.AutoTokenizer.from_pretrained(CONFIGS / "models" / "llava_med_v1.5_mistral_7b")
    rng = np.random.default_rng(seed)
    answers: dict[str, list[str]] = {}
    for question, answer in pairs:
        answers.setdefault(name_structure(question, answer), []).append(answer)
    answers.pop("", None)
    spoken = [draw(rng, [name], list(answers)) for name in answers for _ in range(200)]
    # normalise case and punctuation, so that the name of a structure always becomes the same tokens
    symbols = normalizers.Replace(Regex(r"[^\w\n<>.,?!:;]+"), " ")
    one_way = [normalizers.Lowercase(), normalizers.Replace("\n", "\n "), symbols]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(one_way)
    texts = [*chain(*pairs), *spoken, "USER: \nASSISTANT:", ABSENT]
    tokenizer = tokenizer.train_new_from_iterator(texts, vocab_size=1024, show_progress=False)
    tokenizer.save_pretrained(out / "llava_tiny")

    torch.manual_seed(seed)
    config = hf.LlavaConfig.from_pretrained(out / "llava_tiny")
    config.text_config.vocab_size = len(tokenizer)
    llava = hf.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        set_image_filters(llava.model.vision_tower.embeddings, llava.model.multi_modal_projector)
        llava.lm_head.weight *= 3
    pretrain_language_model(llava, tokenizer, answers, rng)
    llava.save_pretrained(out / "llava_tiny")

    torch.manual_seed(seed)
    settings = json.loads((out / "sam_tiny" / "config.json").read_text())
    for part in ("vision_config", "prompt_encoder_config"):
        settings[part]["image_size"] = max(8, round(image_size / 8) * 8)
    hf.SamModel(hf.SamConfig(**settings)).save_pretrained(out / "sam_tiny")


def pretrain_language_model(llava, tokenizer, answers: dict[str, list[str]], rng: Generator, batch: int = 32) -> None:
    """Pretrain llava_tiny's language model on questions and answers, without images.

    answers: {structure: its answers in the training set}. The lower half of the layers also learns to predict the
    structure's name, so the upper half can later learn to find the structure in the image.
    """
    import torch
    import torch.nn.functional as F

    model, head, names = llava.model.language_model, llava.lm_head, list(answers)
    trained = [*model.layers.parameters(), *model.norm.parameters()]
    optimizer = torch.optim.AdamW(trained, 3e-3, fused=True)
    others = {name: [other for other in names if other != name] for name in names}
    words = {name: tokenizer(f" {name}", add_special_tokens=False)["input_ids"] for name in names}
    for step in range(PRETRAINING_STEPS if names else 0):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - step / PRETRAINING_STEPS)

        asked = [names[i] for i in rng.integers(len(names), size=batch)]
        prompts = [f"USER: \n{draw(rng, [name], others[name])}\nASSISTANT:" for name in asked]
        said = [answers[name][rng.integers(len(answers[name]))] for name in asked]
        texts = [f"{prompt} {answer}{tokenizer.eos_token}" for prompt, answer in zip(prompts, said, strict=True)]
        tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        ends = torch.tensor([len(ids) - 1 for ids in tokenizer(prompts)["input_ids"]])
        states = model(**tokens, output_hidden_states=True)

        half_way = states.hidden_states[len(model.layers) // 2][range(batch), ends]
        heard = head(model.norm(half_way)).log_softmax(1)
        loss = -torch.stack([row[words[name]].mean() for row, name in zip(heard, asked, strict=True)]).mean()
        ids, mask = tokens["input_ids"][:, 1:], tokens["attention_mask"][:, 1:] > 0
        mask &= torch.arange(ids.shape[1]) >= ends[:, None]
        # 4 is the value of lambda_txt in configs/prs_med_demo.yaml
        loss = loss + 4 * F.cross_entropy(head(states.last_hidden_state[:, :-1][mask]), ids[mask])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1)
        optimizer.step()


def set_image_filters(tower, projector) -> None:
    """Set hand-made weights in the image encoder's embeddings (`tower`) and in the projector.

    Training does not change these weights, and random weights would destroy the image content.
    """
    import torch

    width, _, patch, _ = tower.patch_embedding.weight.shape
    side = tower.image_size // patch
    pixel = (torch.arange(patch) + 0.5) / patch - 0.5
    waves = torch.cartesian_prod(torch.arange(-2.0, 3), torch.arange(3.0))
    waves = waves[(waves[:, 1] > 0) | (waves[:, 0] > 0)]
    n = len(waves)
    phase = 2 * torch.pi * (waves[:, :1, None] * pixel + waves[:, 1:, None] * pixel[:, None])
    filters = torch.cat([phase.cos(), phase.sin()]) * (0.25 + waves.norm(dim=1)).repeat(2)[:, None, None] / patch
    tower.patch_embedding.weight.zero_()
    tower.patch_embedding.weight[: 2 * n] = filters[:, None] / 3
    tower.patch_embedding.weight[2 * n] = 1 / patch / 6
    angles = torch.cartesian_prod(*[torch.linspace(-1, 1, side)] * 2) * torch.pi / 2
    tower.position_embedding.weight.zero_()
    tower.position_embedding.weight[1:, 2 * n + 1 : 2 * n + 5] = 2 * torch.cat([angles.sin(), angles.cos()], 1)

    # linear_1 splits each feature into its positive and negative part. linear_2 adds the two parts of the wave filters'
    # features, which discards the sign, and subtracts those of the other features.
    projector.linear_1.weight[:] = 1.5 * torch.cat([torch.eye(width), -torch.eye(width)])
    strength = torch.randn(2 * width, n)
    strength = torch.cat([strength, strength, torch.zeros(2 * width, width - 2 * n)], 1)
    signed = torch.randn(2 * width, width)
    signed[:, : 2 * n] = 0
    projector.linear_2.weight[:] = torch.cat([strength + signed, strength - signed], 1) * (2 / width) ** 0.5
