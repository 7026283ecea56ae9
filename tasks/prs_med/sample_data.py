"""Write the MMRS / PosMed layout for train_prs_med.py: annotations/*.csv, {split}_images and {split}_masks.

The brain, lung and skin images are made up. Each holds two lesions and is asked about both: nothing in the image says
which one is meant, so only a model that reads the question can learn it. Two tiny Hugging Face checkpoints with random
weights lie beside it (`llava_tiny`, `sam_tiny`), so that train_prs_med.py goes through the same `from_pretrained` calls
as with LLaVA-Med and SAM.

As in the real data, `image_path` is the mask's path, skin images have ISIC's names, and there is one copy of the image
for each mask.
"""

import argparse
import csv
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from PIL import Image

from old.cli_utils import InputError, whole
from old.sample_data_utils import logistic, smooth_noise

BRAIN = "brain_tumors_ct_scan"
LUNG = "lung_CT"
SKIN = "skin_rgbimage"


class Modality(NamedTuple):
    """What an image of one kind holds: a bright lesion and a dark one, and how it is described."""

    targets: tuple[str, str]
    description: str


MODALITIES = {
    BRAIN: Modality(("tumour", "cyst"), "A brain slice"),
    LUNG: Modality(("mass", "cavity"), "A chest CT slice"),
    SKIN: Modality(("scar", "mole"), "A skin photograph"),
}
QUESTIONS = (
    "Where is the {} located in this image?",
    "In which part of the picture is the {}?",
    "Please find the {} and say where it is.",
)
POSITIONS = ("top left", "top right", "bottom left", "bottom right", "center")

# Red, green and blue of the bright and of the dark lesion of the skin, and of the skin between them.
SCAR = (0.99, 0.90, 0.89)
MOLE = (0.26, 0.15, 0.11)
TONE = (0.76, 0.55, 0.46)

# The grey of the bright and of the dark lesion elsewhere.
GREYS = (0.95, 0.05)


class Lesion(NamedTuple):
    """Where a lesion lies; centre and radius are shares of the image's side."""

    position: str
    x: float
    y: float
    radius: float


class Case(NamedTuple):
    """One image of the data set; its number runs over all splits."""

    number: int
    split: str
    modality: str


class AnnotationRow(NamedTuple):
    """One question, as a line of the CSV."""

    image_path: str
    image_name: str
    split: str
    description: str
    position: str
    question: str
    answer: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this data set's flags."""
    add = parser.add_argument
    add("out", type=Path, help="folder to write; must not hold a data set yet")
    add("--num_train", type=whole(1), default=1000, help="training pictures, two questions each")
    add("--num_val", type=whole(0), default=48, help="validation pictures, two questions each")
    add("--num_test", type=whole(0), default=72, help="test pictures, two questions each")
    add("--image_size", type=whole(32), default=96, help="side of the square pictures, pixels")
    add("--seed", type=int, default=0, help="the same seed writes the same bytes")


def write_sample_data(out: Path, num_train: int, num_val: int, num_test: int, image_size: int, seed: int) -> None:
    """Write the images, the questions and the checkpoints. Raises InputError when the folder holds a data set."""
    from tqdm import tqdm

    if (out / "annotations").exists():
        raise InputError(f"{out}: already holds a data set; choose another folder or delete it")

    # The modalities take turns in each split.
    cases = []
    modalities = list(MODALITIES)
    counts = {"train": num_train, "val": num_val, "test": num_test}
    for split, count in counts.items():
        for i in range(count):
            modality = modalities[i % len(modalities)]
            case = Case(len(cases), split, modality)
            cases.append(case)

    # An image and its questions depend on the seed and their number alone.
    rows = {modality: [] for modality in modalities}
    texts = []
    for case in tqdm(cases, desc="images", disable=not sys.stderr.isatty()):
        rng = np.random.default_rng([seed, case.number])
        for row in write_case(rng, out, case, image_size):
            rows[case.modality].append(row)
            texts += [row.question, row.answer, row.description]

    write_annotations(out / "annotations", rows)
    write_checkpoints(out, texts, image_size, seed)
    num_questions = sum(len(lines) for lines in rows.values())
    print(f"{out}: {num_questions} questions about {len(cases)} pictures, llava_tiny, sam_tiny")


def write_case(rng: Generator, out: Path, case: Case, size: int) -> list[AnnotationRow]:
    """Write one image, once for each of its two masks, and return the questions about it."""
    modality = MODALITIES[case.modality]
    lesions = draw_lesions(rng)
    fields = [blob(rng, size, lesion) for lesion in lesions]
    pixels = draw_image(rng, case.modality, size, fields)
    image = Image.fromarray(pixels)
    if case.modality != SKIN:
        image = image.convert("L")

    rows = []
    for i, target in enumerate(modality.targets):
        name = f"case{case.number:05d}_{target}.png"
        mask_name = name
        if case.modality == SKIN:
            name = f"ISIC_{case.number:05d}{i}.jpg"
            mask_name = f"ISIC_{case.number:05d}{i}_Segmentation.png"

        # The quality is for JPEG; PNG has none.
        folder = out / case.modality / f"{case.split}_images"
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / name, quality=92)

        # The mask, in a folder beside.
        inside = fields[i] > 0
        folder = out / case.modality / f"{case.split}_masks"
        folder.mkdir(parents=True, exist_ok=True)
        mask = np.where(inside, 255, 0)
        mask = Image.fromarray(mask.astype(np.uint8))
        mask.save(folder / mask_name)

        position = lesions[i].position
        wording = str(rng.choice(QUESTIONS))
        row = AnnotationRow(
            image_path=f"{case.modality}/{case.split}_masks/{mask_name}",
            image_name=name,
            split=case.split,
            description=f"{modality.description} in which the {target} covers {inside.mean():.1%} of the picture.",
            position=position,
            question=wording.format(target),
            answer=f"The {target} is located in the {position} of the image.",
        )
        rows.append(row)
    return rows


def write_annotations(folder: Path, rows: dict[str, list[AnnotationRow]]) -> None:
    """Write a CSV for each modality that has rows."""
    folder.mkdir()
    for modality, lines in rows.items():
        if lines:
            path = folder / f"{modality}.csv"
            with open(path, "w", newline="", encoding="utf-8") as file:
                table = csv.writer(file, lineterminator="\n")
                table.writerow(AnnotationRow._fields)
                table.writerows(lines)


def write_checkpoints(out: Path, texts: list[str], image_size: int, seed: int) -> None:
    """Write the two tiny checkpoints; LLaVA's tokenizer is trained on the texts."""
    from tasks.prs_med.sample_models import write_tiny_llava, write_tiny_sam

    write_tiny_llava(out / "llava_tiny", texts, seed)
    write_tiny_sam(out / "sam_tiny", image_size, seed)


# --- images -----------------------------------------------------------------------------------------------------------


def draw_lesions(rng: Generator) -> list[Lesion]:
    """Draw the places of an image's two lesions, which do not touch."""
    uniform = rng.uniform
    lesions = []
    choices = rng.choice(len(POSITIONS), size=2, replace=False)
    for i in choices:
        position = POSITIONS[i]
        radius = uniform(0.075, 0.115)
        if position == "center":
            x = 0.5 + uniform(-0.02, 0.02)
            y = 0.5 + uniform(-0.02, 0.02)
        else:
            left = -1 if "left" in position else 1
            top = -1 if "top" in position else 1
            x = 0.5 + left * uniform(0.16, 0.23)
            y = 0.5 + top * uniform(0.16, 0.23)

        # The other lies at another of the five positions.
        lesion = Lesion(position, x, y, radius)
        lesions.append(lesion)
    return lesions


def blob(rng: Generator, size: int, lesion: Lesion, wobble: float = 1.0) -> np.ndarray:
    """Draw a (size, size) field that is > 0 inside an irregular ellipse and falls with the distance from it."""
    uniform = rng.uniform
    pixels = np.mgrid[0:size, 0:size]
    y, x = pixels / (size - 1)
    x = x - lesion.x
    y = y - lesion.y
    angle = np.arctan2(y, x)

    # Longer in one direction than across.
    stretch = 1 + wobble * uniform(-0.2, 0.25)
    turn = uniform(0, math.pi)
    cosine = math.cos(turn)
    sine = math.sin(turn)
    along = x * cosine + y * sine
    across = y * cosine - x * sine
    along = along / stretch
    across = across * stretch
    distance = np.sqrt(along**2 + across**2)

    # The outline has waves.
    waves = 0
    for k in (2, 3, 5):
        height = wobble * uniform(0.02, 0.08)
        phase = uniform(0, 6.28)
        waves = waves + height * np.cos(k * angle + phase)
    outline = lesion.radius * (1 + waves)
    return (outline - distance).astype("float32")


def draw_image(rng: Generator, modality: str, size: int, fields: list[np.ndarray]) -> np.ndarray:
    """Draw a (size, size, 3) uint8 image with the two lesions painted in: the first bright, the second dark."""
    texture = 0.05 * smooth_noise(rng, size, 6)
    texture = texture + 0.03 * smooth_noise(rng, size, 20)

    # A lesion's edge is soft over about a pixel.
    shares = [logistic(field * size / 0.8) for field in fields]
    if modality == SKIN:
        image = draw_skin(rng, texture, shares)
    else:
        draw = draw_brain if modality == BRAIN else draw_lungs
        image = draw(rng, texture)
        for share, level in zip(shares, GREYS, strict=True):
            painted = level + 0.5 * texture
            image = image + share * (painted - image)
        image = np.repeat(image[..., None], 3, axis=2)

    # Grain is the same in all colours.
    grain = rng.normal(0, 0.02, (size, size, 1))
    image = np.clip(image + grain, 0, 1)
    image = 255 * image
    return image.astype(np.uint8)


def draw_skin(rng: Generator, texture: np.ndarray, shares: list[np.ndarray]) -> np.ndarray:
    """Draw skin with a scar, a mole and hairs; float, in colour."""
    size = len(texture)
    texture = texture[..., None]
    tone = np.array(TONE) * rng.uniform(0.85, 1.08)
    image = tone + texture
    colours = (SCAR, MOLE)
    for share, colour in zip(shares, colours, strict=True):
        painted = np.array(colour) + 0.5 * texture
        image += share[..., None] * (painted - image)

    # A hair runs from top to bottom, aslant and not quite straight.
    rows = np.arange(size)
    for _ in range(rng.integers(2, 6)):
        x = rng.uniform(0, size)
        bends = np.cumsum(rng.normal(0, 0.4, size))
        x = x + bends + rng.uniform(-0.5, 0.5) * rows
        inside = (x >= 0) & (x < size)
        columns = x[inside].astype(int)
        image[rows[inside], columns] *= 0.6
    return image


def draw_body(rng: Generator, texture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw a round body as a grey float image, and return its field too.

    The background is not black: as dark as a dark lesion it would be one more riddle.
    """
    radius = rng.uniform(0.44, 0.46)
    outline = Lesion("", 0.5, 0.5, radius)
    body = blob(rng, len(texture), outline, wobble=0.25)
    image = np.where(body > 0, 0.52 + texture, 0.3)
    return image, body


def draw_brain(rng: Generator, texture: np.ndarray) -> np.ndarray:
    """Draw a brain as a grey float image: skull and ventricles."""
    image, body = draw_body(rng, texture)
    skull = (body > 0) & (body < 0.03)
    image = np.where(skull, 0.78 + texture, image)
    for side in (-1, 1):
        x = 0.5 + side * 0.06
        place = Lesion("", x, 0.47, 0.045)
        ventricle = blob(rng, len(texture), place)
        image = np.where(ventricle > 0, 0.36 + texture, image)
    return image


def draw_lungs(rng: Generator, texture: np.ndarray) -> np.ndarray:
    """Draw a chest as a grey float image: lungs and spine."""
    image, _ = draw_body(rng, texture)
    for side in (-1, 1):
        x = 0.5 + side * 0.2
        place = Lesion("", x, 0.5, 0.16)
        lung = blob(rng, len(texture), place)
        image = np.where(lung > 0, 0.34 + 1.4 * texture, image)
    place = Lesion("", 0.5, 0.84, 0.05)
    spine = blob(rng, len(texture), place)
    return np.where(spine > 0, 0.7 + texture, image)
