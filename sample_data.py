"""Write a small, learnable data set for a training script, in the exact on-disk format of the real one.

    python sample_data.py prs_med data/demo/prs_med                   # 1000 training pictures, two questions each
    python sample_data.py prs_med OUT --num_train 40 --image_size 64 --seed 1

`prs_med` writes the MMRS / PosMed layout (annotations/*.csv, {split}_images, {split}_masks) of made-up brain, lung and
skin pictures, and two tiny Hugging Face checkpoints with random weights beside it (`llava_tiny`, `sam_tiny`), so that
train_prs_med.py goes through the same `from_pretrained` calls as with LLaVA-Med and SAM. Each picture holds two lesions
and is asked about both: nothing in the picture says which one is meant, so only a model that reads the question can
learn it.
"""

import argparse
import csv
import json
import math
import sys
from pathlib import Path

from cli_utils import InputError, run_main, whole

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
    return parser.parse_args(argv)


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
    model.save_pretrained(path)
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
    SamModel(config).save_pretrained(path)
    sam = {"image_processor_type": "SamImageProcessor", "size": {"longest_edge": side}}
    sam |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (path / "preprocessor_config.json").write_text(json.dumps(sam, indent=2))


def main(args: argparse.Namespace) -> None:
    write_prs_med(args.out, args.num_train, args.num_val, args.num_test, args.image_size, args.seed)


if __name__ == "__main__":
    run_main(main, parse_args())
