"""Train a model that answers questions about chest X-rays and predicts 14 CheXpert labels (MIMIC-CXR, guide 1).

    python -m tools.prepare_data mimic_cxr mimic-cxr-jpg mimic-ext-cxr-qba data/mimic      # once
    ./launch_distributed_training.sh --config configs/default_config.yaml                  # all GPUs
    python train_mimic_cxr.py --config configs/default_config.yaml                         # one GPU, or CPU
    deepspeed --num_gpus=4 train_mimic_cxr.py --config configs/default_config.yaml --use_deepspeed
    torchrun --nproc_per_node=4 train_mimic_cxr.py --config configs/default_config.yaml --use_ddp
    python train_mimic_cxr.py --config configs/default_config.yaml --eval_only --save_predictions
    python train_mimic_cxr.py --predict xray.png --question "Is there a pleural effusion?"

Guide 1 is the published training guide at https://github.com/JONAHKYAGABA/SVA-MASTERS-WORK. To train on your own
X-rays, see tasks/mimic_cxr/README.md.
"""

import os
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from pathlib import Path

from utils.cli import (
    InputError,
    Parser,
    RunError,
    add_common_arguments,
    first_line,
    launch_workers,
    real,
    run_main,
    whole,
    with_flags,
)

FORMAT = "mimic_cxr/3"
MODEL_FLAGS = ("image_size",)
MAX_TOKENS = 128
ENCODERS = {"image_encoder": "facebook/convnext-base-224", "text_encoder": "emilyalsentzer/Bio_ClinicalBERT"}
FUSION_LAYERS = 2
HEAD_WEIGHT = {"binary": 1.0, "category": 0.5, "region": 0.5, "severity": 0.3}
HEAD_WIDTH = {"binary": 256, "category": 512, "region": 512, "severity": 128}
# training target for CheXpert labels marked as uncertain (-1); None excludes them from the loss
UNCERTAIN = {"ignore": None, "positive": 1.0, "negative": 0.0, "soft": 0.5}
DEFAULTS = {
    "batch_size": 16,
    "gradient_accumulation_steps": 1,
    "num_workers": 4,
    "prefetch_factor": 2,
    "gradient_checkpointing": False,
    "zero_stage": 2,
    "offload_optimizer": False,
}


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__, sections=("training", "deepspeed"))
    advanced = parser.advanced.add_argument

    add = parser.add_argument_group("data").add_argument
    add("--data_path", metavar="DIR", default="data/mimic", help="folder written by tools.prepare_data mimic_cxr")
    advanced("--chexpert_uncertain", choices=UNCERTAIN, default="ignore", help="target for label -1; soft: 0.5")
    add("--questions_per_image", type=whole(1), default=8, help="group up to N questions about one image in a batch")
    advanced("--max_samples", type=whole(0), default=0, help="questions per split, evenly spaced; 0: all")
    add("--augmentation", action="store_true", help="small random shifts, rotations, zooms and contrast changes")
    advanced("--image_size", type=whole(32), help="side of the images in pixels; default: that of the data")

    add = parser.add_argument_group("model").add_argument
    for name, path in ENCODERS.items():
        add(f"--{name}", default=path, help="Hugging Face folder or hub name")
    advanced("--dropout", type=real(0, 0.99), default=0.1, help="dropout in the text encoder, fusion layers and heads")

    add("--freeze_image", action="store_true", help="do not train the image encoder")
    add("--freeze_text", action="store_true", help="do not train the text encoder")
    text = "recompute activations in the backward pass: less memory, a third slower; default: only on small GPUs"
    add("--gradient_checkpointing", action=BooleanOptionalAction, help=text)
    add("--pretrained_weights", metavar="FILE", help="initial weights: another run's model.safetensors")

    add = parser.add_argument_group("loss and learning rate").add_argument
    advanced("--chexpert_weight", type=real(0), default=0.3, help="weight of the CheXpert loss in the total loss")
    add(
        "--lr_schedule",
        "--scheduler",
        choices=("constant", "cosine"),
        default="cosine",
        help="schedule after warm-up; cosine ends at 0",
    )
    add("--warmup_steps", type=whole(0), default=500, help="optimizer steps of linear warm-up")
    advanced("--weight_decay", type=real(0), default=0.01, help="AdamW weight decay, except for norms and biases")

    add = parser.add_argument_group("engine").add_argument
    text = "choose batch, accumulation, workers and activation checkpointing by hardware; flags and files override"
    add("--auto_optimize", action="store_true", default=True, help=text)
    add("--no_auto_optimize", dest="auto_optimize", action="store_false", default=SUPPRESS, help="use fixed defaults")
    add("--use_deepspeed", action="store_true", help="train with DeepSpeed ZeRO; default for 2 or more processes")
    add("--use_ddp", action="store_true", help="train with torch DistributedDataParallel")
    add("--deepspeed_config", metavar="FILE", help="DeepSpeed config; default: configs/deepspeed_config.json")
    advanced("--prefetch_factor", type=whole(1), help="batches that each worker loads ahead; default: by RAM")

    add = parser.add_argument_group("evaluation and prediction").add_argument
    add("--eval_split", choices=("val", "test"), default="test", help="split to evaluate with --eval_only")
    advanced("--eval_samples", type=whole(0), default=20_000, help="questions per validation, evenly spaced; 0: all")
    add("--save_predictions", action="store_true", help="write predictions_<split>.parquet, one row per question")
    add("--predict", metavar="IMAGE|FOLDER|CSV", help="answer questions instead of training; CSV: image, question")
    add("--question", help="with --predict: the question to ask about each image")
    advanced("--head", choices=HEAD_WEIGHT, help="with --predict: answer head; default: by the wording")

    # hidden flags for keys of the published guide's YAML files; --dataloader_num_workers counts workers per node
    parser.add_argument("--batch_size_per_gpu", dest="batch_size", type=whole(1), help=SUPPRESS)
    parser.add_argument("--dataloader_num_workers", type=whole(0), help=SUPPRESS)
    for flag in ("--fp16", "--pin_memory", "--enabled"):
        parser.add_argument(flag, action=BooleanOptionalAction, help=SUPPRESS)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help=SUPPRESS)

    add_common_arguments(parser, output_dir="runs/mimic_cxr", num_epochs=20, learning_rate=1e-4, batch_size=16)
    parser.set_defaults(batch_size=None, gradient_accumulation_steps=None, num_workers=None)
    args = parser.parse(argv)
    if args.use_deepspeed and args.use_ddp:
        parser.error("--use_deepspeed and --use_ddp exclude each other")
    if args.predict and not args.question and not args.predict.lower().endswith(".csv"):
        parser.error("--predict: needs --question, or a CSV with the columns image and question")
    return args


if __name__ == "__main__":
    # parse the flags before the slow imports, so that --help appears immediately
    ARGS = parse_args()
    launch_workers(ARGS.world_size)


import functools
import inspect
import math
import platform
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader, Dataset

import distributed_utils as du
from hardware_utils import GIB, autocast, out_of_memory, set_precision
from tasks.mimic_cxr import report, zero
from tasks.mimic_cxr.answers import CHEXPERT, HEAD_NUMBER, HEADS
from tasks.mimic_cxr.prepare import SPLITS, Prepared, decode, open_prepared
from utils import checkpoint, hardware_utils, stats, tables
from utils.engine import make_engine
from utils.loop import Plan, Run, Training
from utils.sampler import EvalBatchSampler, ImageGroups

ADVICE = "give --gradient_checkpointing, a smaller --image_size or --deepspeed_config configs/deepspeed_zero3.json"
# maximum random augmentation: x and y shifts (fractions of the image side), rotation (radians), and logarithms of the
# zoom, brightness and gamma factors
STRENGTH = (0.04, 0.04, 0.1, 0.08, 0.15, 0.2)

# --- model ------------------------------------------------------------------------------------------------------------


def make_head(dim: int, hidden: int, classes: int, dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, classes))


class FusionLayer(nn.Module):
    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, max(1, dim // 64), dropout=dropout, batch_first=True)
        self.mlp = make_head(dim, 4 * dim, dim, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        attended, _ = self.attention(self.norm(text), image, image, need_weights=False)
        text = text + self.dropout(attended)
        return text + self.dropout(self.mlp(self.norm_mlp(text)))


class ChestModel(nn.Module):
    """Visual question answering model with one head per answer type and one head for the CheXpert labels."""

    def __init__(
        self, image: nn.Module, text: nn.Module, tokenizer, mean: list, std: list, args: Namespace, precision: str
    ):
        super().__init__()
        self.image, self.text, self.tokenizer, self.precision = image, text, tokenizer, precision
        self.side = args.image_size or 224
        # image size for which the position embeddings need no interpolation
        interpolates = "interpolate_pos_encoding" in inspect.signature(image.forward).parameters
        self.native_side = image.config.image_size if interpolates else self.side
        dim, config = text.config.hidden_size, image.config
        width = config.hidden_sizes[-1] if getattr(config, "hidden_sizes", None) else config.hidden_size
        self.project = nn.Sequential(nn.Linear(width, dim), nn.LayerNorm(dim))
        self.fusion = nn.ModuleList(FusionLayer(dim, args.dropout) for _ in range(FUSION_LAYERS))
        self.norm = nn.LayerNorm(dim)
        heads = {name: make_head(dim, HEAD_WIDTH[name], len(names), args.dropout) for name, names in HEADS.items()}
        self.heads = nn.ModuleDict(heads)
        self.chexpert = make_head(dim, 512, len(CHEXPERT), args.dropout)
        self.findings = nn.Sequential(nn.Linear(2 * len(CHEXPERT), dim), nn.LayerNorm(dim))
        # plain tensors, because DeepSpeed would round buffers to half precision
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def _apply(self, function, recurse: bool = True) -> "ChestModel":
        super()._apply(function, recurse)
        self.mean, self.std = (values.to(self.norm.weight.device) for values in (self.mean, self.std))
        return self

    def image_features(self, image: Tensor, encoder: nn.Module | None = None) -> Tensor:
        """Encode images (I, 1, S, S) in [0, 255] as features (I, P, width) of tokens or feature-map cells."""
        encoder = encoder or self.image
        pixels = (image / 255 - self.mean) / self.std
        if image.is_cuda:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        options = {"interpolate_pos_encoding": True} if image.shape[-1] != self.native_side else {}
        features = encoder(pixel_values=pixels, **options).last_hidden_state
        if features.dim() == 4:
            features = features.flatten(2).transpose(1, 2)
            # Hugging Face's ConvNeXt applies its final layer norm only to the pooled output
            norm = getattr(encoder, "layernorm", None)
            return features if norm is None else norm(features)
        # the first token of DINOv3's ConvNeXt is the pooled output
        return features[:, 1:] if "convnext" in encoder.config.model_type else features

    def image_tokens(self, image: Tensor) -> Tensor:
        tokens = self.project(self.image_features(image))
        if hasattr(self.image.config, "depths") and not hasattr(self.image.config, "window_size"):
            positions = grid_positions(math.isqrt(tokens.shape[1]), tokens.shape[2], tokens.device)
            tokens = tokens + positions.to(tokens.dtype)
        return tokens

    def finding_tokens(self, labels: Tensor) -> Tensor:
        """Embed CheXpert logits (I, 14) as tokens (I, 14, dim).

        The logits are detached, so that the answer loss does not train the CheXpert head.
        """
        name = torch.eye(len(CHEXPERT), device=labels.device).expand(len(labels), -1, -1)
        return self.findings(torch.cat([name, labels.detach().float().sigmoid().diag_embed()], -1))

    def forward(self, image: Tensor, ids: Tensor, mask: Tensor, image_of: Tensor) -> tuple[Tensor, ...]:
        """Return fp32 logits: (B, classes) for each answer head, then (B, 14) for the CheXpert labels.

        image, ids, mask, image_of: see Questions.batch(); after augment(), `image` is float.
        """
        with autocast(image.device, self.precision):
            tokens = self.image_tokens(image)
            labels = self.chexpert(tokens.mean(1))
            tokens = torch.cat([tokens, self.finding_tokens(labels)], 1).index_select(0, image_of)
            labels = labels.index_select(0, image_of)
            if self.text.config.model_type in ("bert", "roberta"):
                # a 4D mask avoids transformers' padding check, which waits for the GPU
                mask = mask[:, None, None].bool().expand(-1, -1, mask.shape[1], -1)
            text = self.text(input_ids=ids, attention_mask=mask).last_hidden_state
            for layer in self.fusion:
                text = layer(text, tokens)
            pooled = self.norm(text[:, 0])
            logits = [*(head(pooled) for head in self.heads.values()), labels]
        return tuple(values.float() for values in logits)


def grid_positions(side: int, dim: int, device: torch.device) -> Tensor:
    """Return sine and cosine position embeddings (side * side, dim) for a square feature map."""
    ruler = torch.linspace(-1, 1, side, device=device)
    points = torch.stack(torch.meshgrid(ruler, ruler, indexing="ij"), -1).reshape(-1, 2, 1)
    octaves = 2.0 ** torch.arange(math.ceil(dim / 4), device=device).clamp(max=6)
    angles = points * (octaves % 64 * math.pi / 2)
    return torch.cat([angles.sin(), angles.cos()], 1).flatten(1)[:, :dim]


def load_encoder(path: str, flag: str, **options) -> nn.Module:
    """Load a pretrained Hugging Face encoder in fp32.

    options: changes to the config; unknown keys are ignored. Raises InputError if loading fails or the model is not an
    encoder of the kind that the command-line flag `flag` takes.
    """
    from transformers import AutoConfig, AutoModel, utils

    utils.logging.set_verbosity_error()
    utils.logging.disable_progress_bar()
    # masked autoencoders drop most image patches by default
    options["mask_ratio"] = 0.0
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        for name in options.keys() & vars(config).keys():
            setattr(config, name, options[name])
        loaded = AutoModel.from_pretrained(
            path, config=config, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
        )
        encoder, info = loaded if isinstance(loaded, tuple) else (loaded, {"missing_keys": ()})
        lacking = [name for name in info["missing_keys"] if "pooler" not in name]
        if lacking:
            raise ValueError(f"{len(lacking)} weights are not in the file, such as {min(lacking)}")
    except Exception as error:
        if out_of_memory(error):
            raise
        advice = f"download it and give its folder as {flag}"
        raise InputError(f"{path}: cannot be loaded ({first_line(error)}); {advice}") from None
    # for CLIP and SigLIP, keep only the vision tower
    encoder = getattr(encoder, "vision_model", encoder) if flag == "--image_encoder" else encoder
    needed = "num_channels" if flag == "--image_encoder" else "vocab_size"
    if not hasattr(encoder.config, needed):
        raise InputError(f"{path}: {encoder.config.model_type} is not an encoder for {flag}; give another")
    return encoder


def build_model(args: Namespace, precision: str, device: torch.device) -> ChestModel:
    from transformers import AutoTokenizer
    from transformers.image_processing_base import ImageProcessingMixin
    from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    image = load_encoder(args.image_encoder, "--image_encoder")
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout")
    text = load_encoder(args.text_encoder, "--text_encoder", **dict.fromkeys(dropouts, args.dropout))
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.text_encoder, trust_remote_code=False)
    except Exception as error:
        raise InputError(f"{args.text_encoder}: no tokenizer ({first_line(error)}); download it again") from None
    max_tokens = getattr(text.config, "max_position_embeddings", MAX_TOKENS)
    if len(tokenizer) > text.config.vocab_size or max_tokens < MAX_TOKENS:
        sizes = f"{len(tokenizer)} words for {text.config.vocab_size}, {MAX_TOKENS} tokens for {max_tokens}"
        raise InputError(f"{args.text_encoder}: tokenizer and encoder do not go together ({sizes})")
    try:
        settings, _ = ImageProcessingMixin.get_image_processor_dict(args.image_encoder)
    except (OSError, ValueError):
        settings = {}
    mean = settings.get("image_mean") or IMAGENET_DEFAULT_MEAN
    std = settings.get("image_std") or IMAGENET_DEFAULT_STD
    if settings.get("do_normalize") is False:
        mean, std = [0.0], [1.0]

    # with the same seed, every rank initializes the new layers identically
    torch.manual_seed(args.seed)
    model = ChestModel(image, text, tokenizer, mean, std, args, precision)
    model.image.requires_grad_(not args.freeze_image)
    model.text.requires_grad_(not args.freeze_text)
    if args.deterministic and device.type == "cuda" and model.native_side != model.side:
        reason = f"resizing its positions from {model.native_side} pixels has no deterministic gradient on a GPU"
        raise InputError(f"{args.image_encoder}: {reason}; prepare images of that size, or drop --deterministic")
    freeze_unused(model, args.image_encoder)
    if args.gradient_checkpointing:
        for encoder in (model.image, model.text):
            layers = next(part for part in encoder.modules() if isinstance(part, nn.ModuleList))
            for layer in layers:
                # wrap each layer, because ConvNeXt has no option for activation checkpointing
                layer.forward = functools.partial(recompute, layer.forward, use_reentrant=False)
    return model.to(device)


def freeze_unused(model: ChestModel, path: str) -> None:
    """Freeze parameters that receive no gradient, such as BERT's pooler; otherwise DDP would fail."""
    precision, model.precision = model.precision, "no"
    try:
        batch = largest_batch(model, 1)
        logits = model(batch["image"], batch["ids"], batch["mask"], batch["image_of"])
        sum(values.sum() for values in logits).backward()
    except (RuntimeError, ValueError) as error:
        if out_of_memory(error):
            raise
        reason = f"does not take images of {model.side} pixels ({first_line(error)})"
        raise InputError(f"{path}: {reason}; prepare others, or give another encoder") from None
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    model.precision = precision


# --- data -------------------------------------------------------------------------------------------------------------


class Questions(Dataset):
    """Dataset of the questions of a split. Items are only indices; batch() loads the data.

    limit: number of evenly spaced questions to use; 0 uses all. replacement: (studies,), for each study, the index of
    the study whose image is shown instead; -1 for a black image. rows: row numbers of questions in `data`, instead of
    the whole split.
    """

    def __init__(
        self,
        data: Prepared,
        split: str,
        args: Namespace,
        limit: int = 0,
        replacement: np.ndarray | None = None,
        rows: np.ndarray | None = None,
    ):
        self.data, self.split, self.replacement = data, split, replacement
        self.uncertain = UNCERTAIN[args.chexpert_uncertain] if split == "train" else None
        self.augmentation_seed = args.seed if args.augmentation and split == "train" else None
        first, end = data.bounds[SPLITS.index(split)], data.bounds[SPLITS.index(split) + 1]
        if limit and limit < end - first:
            rows = first + np.arange(limit) * (end - first) // limit
        self.rows = range(first, end) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return index

    def column(self, name: str) -> np.ndarray:
        column = getattr(self.data, name)
        return column[self.rows.start : self.rows.stop] if isinstance(self.rows, range) else column[self.rows]

    def columns(self) -> report.Rows:
        return {name: self.column(name) for name in report.COLUMNS}

    def batch(self, tokenizer, indices: list[int]) -> dict:
        """Collate B questions about I distinct images into a dict of tensors.

        index: (B,) indices in this dataset. image: (I, 1, S, S) uint8. image_of: (B,) index of each question's image.
        ids, mask: (B, T). head, target: (B,) indices of the answer head and the correct class. label, known: (B, 14)
        CheXpert labels, and whether each label enters the loss. augmentation: (I, 6), in the order of STRENGTH; only in
        training with --augmentation.
        """
        data, rows = self.data, np.array([self.rows[index] for index in indices])
        study = data.study[rows]
        texts = data.texts.take(data.question[rows].tolist()).to_pylist()
        batch = tokenize(tokenizer, texts)
        batch["index"] = torch.tensor([int(index) for index in indices])
        for name, column in (("head", data.head), ("target", data.target)):
            batch[name] = torch.from_numpy(column[rows].astype(np.int64))
        label = torch.from_numpy(data.labels[study])
        known = (label == 0) | (label == 1)
        if self.uncertain is not None:
            known |= label == -1
            label = torch.where(label == -1, self.uncertain, label)
        batch |= {"label": torch.where(known, label, 0.0), "known": known}

        sources = study if self.replacement is None else self.replacement[study]
        distinct, image_of = np.unique(sources, return_inverse=True)
        images = data.images[distinct]
        images[distinct < 0] = 0
        batch |= {"image": torch.from_numpy(images)[:, None], "image_of": torch.from_numpy(image_of)}
        if self.augmentation_seed is not None:
            seeds = [[self.augmentation_seed % 2**63, indices[0].epoch, study] for study in distinct]
            drawn = np.stack([np.random.default_rng(seed).uniform(-1, 1, len(STRENGTH)) for seed in seeds])
            batch["augmentation"] = torch.tensor(drawn * STRENGTH, dtype=torch.float32)
        return batch


def tokenize(tokenizer, texts: list[str]) -> dict[str, Tensor]:
    tokens = tokenizer(
        texts, padding=True, pad_to_multiple_of=8, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
    )
    return {"ids": tokens["input_ids"], "mask": tokens["attention_mask"]}


def augment(image: Tensor, augmentation: Tensor) -> Tensor:
    """Shift, rotate and zoom images (I, 1, S, S) in [0, 255], and change their brightness and gamma.

    Images are never mirrored, because questions mention left and right.
    """
    x, y, angle, zoom, gain, gamma = augmentation.unbind(1)
    cos, sin = angle.cos() * zoom.exp(), angle.sin() * zoom.exp()
    turn = torch.stack([torch.stack([cos, -sin, 2 * x], 1), torch.stack([sin, cos, 2 * y], 1)], 1)
    pixels = F.grid_sample(image / 255, F.affine_grid(turn, [*image.shape], align_corners=False), align_corners=False)
    gain, gamma = (factor.exp().view(-1, 1, 1, 1) for factor in (gain, gamma))
    return 255 * (gain * pixels.clamp_min(1e-6) ** gamma).clamp_max(1)


# --- loss -------------------------------------------------------------------------------------------------------------


def question_losses(answers: list[Tensor], chexpert: Tensor, batch: dict) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy (B,) of the answers and the binary cross-entropy (B, 14) of the CheXpert labels."""
    entropy = torch.zeros(len(chexpert), device=chexpert.device)
    for head, logits in enumerate(answers):
        asked = batch["head"] == head
        entropy = entropy + asked * F.cross_entropy(logits, torch.where(asked, batch["target"], 0), reduction="none")
    bce = F.binary_cross_entropy_with_logits(chexpert, batch["label"], reduction="none")
    return entropy, bce * batch["known"]


def count_targets(batches: list[dict]) -> list[float]:
    """Return the number of questions per answer head, then the number of CheXpert labels in the loss."""
    heads = sum(torch.bincount(batch["head"], minlength=len(HEADS)) for batch in batches)
    known = sum(int(batch["known"].sum()) for batch in batches)
    return [*(heads.tolist() if batches else [0] * len(HEADS)), known]


def batch_loss(model: nn.Module, batch: dict, counts: list[float], chexpert_weight: float) -> tuple[Tensor, ...]:
    """Return a micro-batch's contribution to the global batch's total, answer and CheXpert losses.

    counts: result of count_targets() for the global batch.
    """
    image = augment(batch["image"], batch["augmentation"]) if "augmentation" in batch else batch["image"]
    *answers, chexpert = model(image, batch["ids"], batch["mask"], batch["image_of"])
    entropy, bce = question_losses(answers, chexpert, batch)
    weights = [weight / max(1.0, count) for weight, count in zip(HEAD_WEIGHT.values(), counts[:-1], strict=True)]
    vqa = sum(weight * (entropy * (batch["head"] == head)).sum() for head, weight in enumerate(weights))
    labels = bce.sum() / max(1.0, counts[-1])
    return vqa + chexpert_weight * labels, vqa, labels


# --- evaluation -------------------------------------------------------------------------------------------------------


def gather_rows(own: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Gather rows from all ranks on rank 0, sorted by the column "index"; return {} on other ranks.

    Call on all ranks. Rows with a negative index are padding and are dropped.
    """
    parts = du.gather_to_main({name: np.concatenate(batches) for name, batches in own.items()})
    parts = [part for part in parts if part]
    if not parts:
        return {}
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    index = rows.pop("index")
    order = np.argsort(index)[(index < 0).sum() :]
    return {name: values[order] for name, values in rows.items()}


@torch.no_grad()
def answer_questions(model: ChestModel, data: Questions, batch_size: int, run: Run, args: Namespace) -> report.Rows:
    """Answer the questions; return {column: one value per question}.

    Call on all ranks. Only rank 0 returns the answers. Raises RunError if a prediction is not finite.
    """
    model.eval()
    own, width = defaultdict(list), max(map(len, HEADS.values()))
    for batch in run.batches(make_loader(data, model, batch_size, args), equal_passes=zero.is_sharded(model)):
        *answers, chexpert = model(batch["image"], batch["ids"], batch["mask"], batch["image_of"])
        entropy, bce = question_losses(answers, chexpert, batch)
        padded = torch.stack([F.pad(x.softmax(1), (0, width - x.shape[1])) for x in answers], 1)
        probability = padded.gather(1, batch["head"][:, None, None].expand(-1, 1, width))[:, 0]
        columns = {
            "index": batch["index"],
            "predicted": probability.argmax(1),
            "probability": probability,
            "entropy": entropy,
            "bce": bce.sum(1),
            "known": batch["known"].sum(1),
            "chexpert": chexpert.sigmoid(),
        }
        for name, values in columns.items():
            own[name].append(values.double().cpu().numpy())
    rows = gather_rows(own)
    with du.agree_on_errors():
        if not all(np.isfinite(values).all() for values in rows.values()):
            raise RunError("predictions are not finite; lower --lr")
    return data.columns() | rows


def evaluate(model: ChestModel, data: Questions, batch_size: int, run: Run, args: Namespace) -> dict[str, float]:
    """Score the model on a split; return the metrics on every rank. Call on all ranks."""
    rows, metrics = answer_questions(model, data, batch_size, run, args), {}
    if run.ranks.is_main:
        metrics = report.score(rows, data.data.labels, HEAD_WEIGHT, args.chexpert_weight, data.split)
        run.figure(f"{data.split}_answers", report.draw(rows, data.data))
    return du.broadcast_object(metrics)


@torch.no_grad()
def image_features(model: ChestModel, data: Prepared, studies: np.ndarray, batch_size: int, args: Namespace) -> dict:
    """Compute image features for the baselines; return {baseline: (N, D)} on rank 0 and {} on other ranks.

    Call on all ranks. The "encoder" baseline uses the image encoder before fine-tuning.
    """
    untrained = load_encoder(args.image_encoder, "--image_encoder").to(model.device).eval()
    own = defaultdict(list)
    for indices in EvalBatchSampler(len(studies), max(batch_size, 32), *du.world()):
        image = torch.from_numpy(data.images[studies[indices]])[:, None]
        for name, compute in report.IMAGE_FEATURES.items():
            own[name].append(compute(image / 255).numpy())
        with autocast(model.device, model.precision):
            encoded = model.image_features(image.to(model.device), untrained)
        own["encoder"].append(encoded.mean(1).float().cpu().numpy())
        own["index"].append(np.array(indices))
    return gather_rows(own)


def test(model: ChestModel, sets: dict, split: str, batch_size: int, run: Run, args: Namespace) -> dict[str, float]:
    """Compare the model with baselines and ablations on a split; return the metrics.

    Call on all ranks. Rank 0 prints the tables and saves the files.
    """
    data = sets[split].data
    rows = answer_questions(model, sets[split], batch_size, run, args)

    ablated = np.linspace(0, len(sets[split]) - 1, min(len(sets[split]), report.MOST_ABLATED)).astype(np.int64)
    studies, patients = np.unique(sets[split].column("study")), data.studies["patient"].to_numpy()
    replacements = {"blank_image": np.full(len(patients), -1)}
    if others := stats.other_cases(patients[studies].tolist(), [""] * len(studies), args.seed):
        replacements["shuffled_image"] = np.arange(len(patients))
        replacements["shuffled_image"][studies] = studies[others]
    ablations = {}
    for name, replacement in replacements.items():
        questions = Questions(data, split, args, replacement=replacement, rows=np.array(sets[split].rows)[ablated])
        ablations[name] = ablated, answer_questions(model, questions, batch_size, run, args)

    fitted, val = (Questions(data, name, args, report.MOST_FITTED).columns() for name in ("train", "val"))
    features, fitted_studies = {}, np.unique(fitted["study"])
    if len(fitted_studies) > 1:
        images = np.concatenate([fitted_studies, np.unique(val["study"]), studies])
        features = image_features(model, data, images, batch_size, args)
    metrics = {}
    with du.agree_on_errors():
        try:
            if run.ranks.is_main:
                metrics = report.score(rows, data.labels, HEAD_WEIGHT, args.chexpert_weight, split)
                train = Questions(data, "train", args).columns()
                results = report.SplitResults(split, rows, data)
                metrics |= report.print_tables(results, train, fitted, val, features, ablations)
                if args.save_predictions:
                    with run.writing():
                        report.save_predictions(run.folder / f"predictions_{split}.parquet", rows, data)
                run.figure(f"{'eval_' * args.eval_only}{split}_answers", report.draw(rows, data))
        finally:
            # other ranks wait without a timeout, because the tables may take longer than the collective timeout
            run.ranks.wait_for_main("the tables")
    return du.broadcast_object(metrics)


# --- prediction -------------------------------------------------------------------------------------------------------


def head_for(question: str) -> str:
    words = question.lower()
    if "how severe" in words or "severity" in words:
        return "severity"
    if words.startswith(("where", "which region", "in which")):
        return "region"
    return "category" if words.startswith(("what", "describe", "which")) else "binary"


@torch.no_grad()
def predict(model: ChestModel, run: Run, args: Namespace) -> None:
    """Answer the questions given by --predict and --question; write predictions.csv.

    Call on all ranks. Raises InputError if no image is readable or a question needs an untrained answer head.
    """
    asked = tables.list_questions(args.predict, args.question)
    heads = [args.head or head_for(question) for _, question in asked]
    for head, (_, question) in zip(heads, asked, strict=True):
        if head not in run.checkpoint["trained_heads"]:
            known = ", ".join(run.checkpoint["trained_heads"])
            raise InputError(f"{question!r}: no training question had a {head} answer; --head may be {known}")
    model.eval()
    own = {}
    for indices in EvalBatchSampler(len(asked), run.micro_batch_size, *du.world()):
        pixels, usable = [], []
        for index in indices:
            try:
                pixels.append(decode(asked[index][0], args.image_size))
                usable.append(index)
            except (OSError, ValueError) as error:
                print(f"warning: {asked[index][0]}: cannot be read ({error}); skipped", flush=True)
        if not usable:
            continue
        batch = tokenize(model.tokenizer, [asked[index][1] for index in usable])
        batch |= {"image": torch.from_numpy(np.stack(pixels))[:, None], "image_of": torch.arange(len(usable))}
        batch = du.to_device(batch, model.device)
        *answers, chexpert = model(batch["image"], batch["ids"], batch["mask"], batch["image_of"])
        for row, index in enumerate(usable):
            probability = answers[HEAD_NUMBER[heads[index]]][row].softmax(0).cpu().numpy()
            own[index] = (heads[index], probability, chexpert[row].sigmoid().cpu().numpy())
    found = du.gather_dicts(own)
    if not found:
        raise InputError(f"{args.predict}: no image can be read; check --predict")
    with du.agree_on_errors(), run.writing("predictions.csv", "close it or make room"):
        if run.ranks.is_main:
            report.write_answers(run.folder, asked, found, run.checkpoint["trained_labels"])


# --- training run -----------------------------------------------------------------------------------------------------


def make_loader(data: Questions, model: ChestModel, batch_size: int, args: Namespace, **options) -> DataLoader:
    if args.num_workers:
        options["prefetch_factor"] = args.prefetch_factor
    options = {"train": False, "seed": args.seed, "num_workers": args.num_workers} | options
    collate = functools.partial(data.batch, model.tokenizer)
    return du.create_distributed_dataloader(data, batch_size, collate_fn=collate, **options)


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, fused=True)


def largest_batch(model: ChestModel, size: int) -> dict:
    """Return a dummy batch of `size` questions of maximum length, each with its own image."""
    ids = torch.ones(size, MAX_TOKENS, dtype=torch.long)
    return {
        "ids": ids,
        "mask": torch.ones_like(ids),
        "head": torch.arange(size) % len(HEADS),
        "target": torch.zeros(size, dtype=torch.long),
        "label": torch.zeros(size, len(CHEXPERT)),
        "known": torch.ones(size, len(CHEXPERT), dtype=torch.bool),
        "image": torch.zeros(size, 1, model.side, model.side, dtype=torch.uint8),
        "image_of": torch.arange(size),
    }


def trial_step(model: ChestModel, batch: dict, args: Namespace) -> None:
    counts = [len(batch["ids"])] * (len(HEADS) + 1)
    batch_loss(model.train(), du.to_device(batch, model.device), counts, args.chexpert_weight)[0].backward()


def fill_settings(args: Namespace, world_size: int, memory: float | None, compute: float | None, node: tuple) -> dict:
    """Return {flag: value} for unset flags, based on the hardware (--auto_optimize) or DEFAULTS.

    memory: GPU memory in GiB. compute: compute capability. node: (CPU cores, available RAM in GiB, number of processes
    that share them).
    """
    cores, ram, processes = node
    table = hardware_utils.settings_for(
        world_size, memory, compute, cores, ram, zero.is_installed(), args.batch_size, processes
    )
    values = dict(DEFAULTS)
    if args.auto_optimize:
        values |= {name: table[name] for name in values.keys() & table.keys()}
        values |= {"batch_size": table["batch_size_per_gpu"], "zero_stage": table["zero_stage"] or 2}
        values["num_workers"] = table["dataloader_num_workers"] // processes
    if args.dataloader_num_workers is not None:
        values["num_workers"] = args.dataloader_num_workers // processes
    return {name: value for name, value in values.items() if getattr(args, name, None) is None}


def weakest_hardware(device: torch.device) -> tuple[float | None, float | None, tuple]:
    """Return memory, compute and node for fill_settings(), each the worst over all ranks. Call on all ranks."""
    memory = compute = None
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        memory, compute = card.total_memory / GIB, float(f"{card.major}.{card.minor}")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    # torchrun's processes share all cores of a machine, while srun may assign each process its own cores
    own = (platform.node(), *cores), memory, compute, hardware_utils.usable_cores(), hardware_utils.available_ram_gb()
    core_sets, *sizes = zip(*du.gather_objects(own), strict=True)
    memory, compute, cores, ram = (min((x for x in values if x is not None), default=None) for values in sizes)
    return memory, compute, (cores, ram, max(map(core_sets.count, core_sets)))


def choose_engine(args: Namespace, ranks: du.Ranks) -> tuple[bool, str]:
    """Return (whether to use DeepSpeed, reason). Raises InputError if DeepSpeed is requested but cannot be used."""
    if args.use_ddp or args.eval_only or args.predict:
        return False, "--use_ddp" if args.use_ddp else "no training"
    if args.use_deepspeed or args.deepspeed_config or args.enabled:
        if args.deterministic:
            raise InputError("--deterministic: DeepSpeed adds gradients in an order of its own; give --use_ddp")
        if not zero.is_installed():
            raise InputError("--use_deepspeed: DeepSpeed is not installed; pip install deepspeed, or --use_ddp")
        return True, "as asked"
    if ranks.world_size == 1:
        return False, "one process"
    if args.enabled is False or args.deterministic or not args.auto_optimize:
        return False, "DeepSpeed not requested, or --deterministic"
    if not zero.is_installed():
        return False, "DeepSpeed is not installed"
    return True, "2 processes or more"


def read_deepspeed_config(args: Namespace) -> dict:
    if args.deepspeed_config:
        config = zero.read_zero_config(args.deepspeed_config)
    else:
        file = "deepspeed_zero3.json" if (args.stage or args.zero_stage) == 3 else "deepspeed_config.json"
        config = zero.read_zero_config(str(Path(__file__).parent / "configs" / file))
        if args.stage:
            config["zero_optimization"]["stage"] = args.stage
        if not args.offload_optimizer:
            config["zero_optimization"].pop("offload_optimizer", None)
    if args.compile and config["zero_optimization"]["stage"] == 3:
        raise InputError("--compile: does not go with ZeRO-3; leave it out, or use stage 1 or 2")
    return config


def wanted_precision(args: Namespace, config: dict, device: torch.device) -> str:
    """Return the precision from --mixed_precision, `fp16` in --config or the DeepSpeed config, in this order.

    Returns "auto" if none of them is set. Without a GPU, only --mixed_precision counts.
    """
    if args.mixed_precision != "auto" or device.type != "cuda":
        return args.mixed_precision
    if args.fp16 is not None:
        return "fp16" if args.fp16 else "no"
    bf16, fp16 = (config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    if bf16 is True or fp16 is True:
        return "bf16" if bf16 is True else "fp16"
    return "no" if bf16 is False and fp16 is False else "auto"


@dataclass
class Settings:
    """Settings of a run. config: DeepSpeed config, or {} without DeepSpeed. banner: {title: text} to print."""

    args: Namespace
    precision: str
    config: dict
    banner: dict


def choose_settings(args: Namespace, ranks: du.Ranks) -> Settings:
    """Choose the training engine, the precision and the flags that depend on the hardware. Call on all ranks."""
    chosen = fill_settings(args, ranks.world_size, *weakest_hardware(ranks.device))
    names = [name for name in chosen if name not in ("zero_stage", "offload_optimizer")] if args.auto_optimize else []
    from_hardware = ", ".join(f"{name} {chosen[name]}" for name in names)
    config, engine = {}, "torch"
    with du.agree_on_errors():
        use_deepspeed, reason = choose_engine(args, ranks)
        if use_deepspeed:
            config = read_deepspeed_config(with_flags(args, **chosen))
            block = config["zero_optimization"]
            offloaded = ", optimizer on the CPU" if "offload_optimizer" in block else ""
            engine = f"DeepSpeed ZeRO-{block['stage']}{offloaded}"
    if args.deepspeed_config and args.gradient_checkpointing is None:
        chosen["gradient_checkpointing"] = "activation_checkpointing" in config
    args = with_flags(args, **chosen)
    precision, described = set_precision(wanted_precision(args, config, ranks.device), ranks.device, args.deterministic)
    banner = {
        "engine": f"{engine} ({reason})",
        "from hardware": from_hardware or "nothing",
        "learning rate": f"{args.learning_rate:g}, {args.lr_schedule}, not scaled with the GPUs",
        "precision": described,
    }
    return Settings(args, precision, config, banner)


def open_sets(data: Prepared, args: Namespace) -> dict[str, Questions]:
    limits = dict.fromkeys(SPLITS, args.max_samples)
    if not args.eval_only:
        limits["val"] = min(filter(None, (args.max_samples, args.eval_samples)), default=0)
    sets = {name: Questions(data, name, args, limit) for name, limit in limits.items()}
    needed = args.eval_split if args.eval_only else "train"
    if not len(sets[needed]):
        raise InputError(f"{args.data_path}: no questions of the {needed} split; prepare the data with some")
    return sets


def train(run: Run, args: Namespace, model: ChestModel, sets: dict[str, Questions], settings: Settings) -> int:
    data, device = sets["train"].data, run.ranks.device
    batch = run.plan_batches(
        model,
        lambda size: trial_step(model, largest_batch(model, size), args),
        args.batch_size,
        args.effective_batch_size,
    )
    options = {"train": True, "effective_batch_size": batch.global_batch_size, "gpu_shares": batch.gpu_shares}
    if args.questions_per_image > 1:
        options["groups"] = ImageGroups(sets["train"].column("study"), args.questions_per_image)
    loader = make_loader(sets["train"], model, batch.micro_batch_size, args, **options)
    steps = args.num_epochs * loader.batch_sampler.steps_per_epoch()
    invariants = {
        "training questions": len(sets["train"]),
        "questions per image": args.questions_per_image,
        "data": data.metadata["digest"],
        "augmentation": args.augmentation,
        "uncertain labels": args.chexpert_uncertain,
        "chexpert weight": args.chexpert_weight,
    }
    banner = settings.banner | {"questions": ", ".join(f"{len(some):,} {name}" for name, some in sets.items())}
    plan = Plan(batch, steps, ["loss", "loss_vqa", "loss_chexpert"], invariants, banner)
    heads = [head for head, number in HEAD_NUMBER.items() if (sets["train"].column("head") == number).any()]
    extra = {"trained_labels": report.trained_labels(data), "trained_heads": heads}
    extra["encoders"] = {name: getattr(args, name) for name in ENCODERS}

    parts = model, make_optimizer(model, args), settings.precision, args, device
    if settings.config:
        engine = zero.ZeroEngine(
            *parts, saved=run.checkpoint, config=settings.config, micro_batch_size=batch.micro_batch_size
        )
    else:
        if device.type == "cuda":
            # skip channels_last with DeepSpeed, which needs contiguous weights
            model.image.to(memory_format=torch.channels_last)
        engine = make_engine(*parts, saved=run.checkpoint)

    with Training(run, args, engine, plan, lambda: extra) as training:
        while not training.is_over():
            model.train()
            for step in training.steps(loader, count=count_targets):
                for micro_batch in step.micro_batches():
                    step.backward(*batch_loss(engine.wrapped, micro_batch, step.totals, args.chexpert_weight))
                step.update(
                    args.learning_rate * du.schedule(run.position.step, steps, args.warmup_steps, args.lr_schedule)
                )
            if training.stopped:
                return training.save_and_stop()
            metrics = evaluate(model, sets["val"], batch.micro_batch_size, run, args) if len(sets["val"]) else {}
            training.record(metrics, headline="val/vqa_accuracy")

        # without a validation set, the final weights count as the best
        training.load_best()
        training.finish(test(model, sets, "test", batch.micro_batch_size, run, args) if len(sets["test"]) else {})
    return 0


def run_task(args: Namespace, ranks: du.Ranks) -> int:
    settings = choose_settings(args, ranks)
    args, data = settings.args, None
    with du.agree_on_errors():
        if not args.predict:
            data = open_prepared(Path(args.data_path))
            args = with_flags(args, image_size=args.image_size or data.metadata["image_size"])
    run = Run(FORMAT, args, ranks, ADVICE, MODEL_FLAGS)
    # use the encoder paths from the checkpoint, unless --image_encoder or --text_encoder sets a new path
    saved = run.checkpoint["encoders"] if run.checkpoint else {}
    args = with_flags(run.args, **{name: saved[name] for name in saved if getattr(args, name) == ENCODERS[name]})
    if data and args.image_size != data.metadata["image_size"]:
        sizes = f"has images of {data.metadata['image_size']} pixels, not of {args.image_size}"
        raise InputError(f"{args.data_path}: {sizes} as --image_size or the checkpoint says; prepare others")
    with du.agree_on_errors():
        model = build_model(args, settings.precision, ranks.device)
        if run.checkpoint:
            checkpoint.load_trained(model, run.checkpoint["model"])
        elif args.pretrained_weights:
            try:
                weights = load_file(args.pretrained_weights)
            except Exception as error:
                reason = f"not readable as safetensors ({error})"
                raise InputError(f"{args.pretrained_weights}: {reason}; give a run's model.safetensors") from None
            checkpoint.load_trained(model, weights, args.pretrained_weights)
    if args.predict:
        predict(model, run, args)
        return 0
    sets = open_sets(data, args)
    if args.eval_only:
        run.write_summary(
            f"eval_{args.eval_split}", test(model, sets, args.eval_split, run.micro_batch_size, run, args)
        )
        return 0
    return train(run, args, model, sets, settings)


def main(args: Namespace) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not torch.cuda.device_count():
        # without DS_ACCELERATOR, DeepSpeed would search for a GPU and print a warning
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with du.setup_distributed(args.dist_timeout) as ranks:
        return run_task(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
