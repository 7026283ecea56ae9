"""Train PRS-Med (arXiv 2505.11872): given a medical image and a question, it outputs a mask and a sentence.

    python train_prs_med.py --data_root data                              # one GPU, or CPU when there is none
    ./run_multi_gpu_train.sh data 4                                       # 4 GPUs (without GPUs: 4 processes)
    torchrun --nproc_per_node=4 train_prs_med.py --data_root data --batch_size 8 --learning_rate 1e-4 --num_epochs 20
    torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=<node0_ip> --master_port=29500 \\
        train_prs_med.py --data_root data                                 # node 0 of 2; --node_rank=1 on node 1
    python train_prs_med.py --data_root data --eval_only --resume_from checkpoints/best.pt --eval_split test
    python train_prs_med.py --predict scan.png --question "Where is the cyst located in this image?"

Data: <data_root>/annotations/<modality>.csv, columns image_path,image_name,split,description,position,question,answer.
The column image_path holds the path of the MASK, <modality>/<split>_masks/<name>.png; the image is in
<modality>/<split>_images. The script implements the published training guide for PRS-Med,
https://github.com/huyquoctrinh/PRS-Med.
"""

import os
from argparse import BooleanOptionalAction, Namespace
from pathlib import Path

from utils.cli import InputError, Parser, add_common_arguments, first_line, launch_workers, real, run_main, whole

FORMAT = "prs_med/5"


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    advanced = parser.advanced.add_argument

    add = parser.add_argument_group("data").add_argument
    add("--data_root", default="data", help="folder with annotations/*.csv, and the two models unless given below")
    add("--annotations", nargs="+", metavar="NAME", help="names of the annotation CSVs to use; default: all")
    advanced("--skip_bad_rows", action="store_true", help="drop and count rows with a missing field or file")
    add("--patient_column", metavar="NAME", help="CSV column with the patient id; default: patient, if it exists")
    advanced("--patient_pattern", metavar="REGEX", help="finds the patient id in the image's file name instead")
    add("--questions_per_image", type=whole(1), default=1, help="train on up to N questions about an image together")
    advanced("--cache_gb", type=real(0), default=4.0, help="GiB of memory PER MACHINE to cache decoded images; 0: none")
    add("--augmentation", action="store_true", help="small random affine and contrast changes; answers are updated")
    text = "share of training questions to reword, differently in each epoch; 0: as annotated"
    add("--reword", type=real(0, 1), default=0.5, metavar="SHARE", help=text)
    text = "share of training questions about structures that only other modalities show; their masks are empty"
    advanced("--absent", type=real(0, 1), default=0.0, metavar="SHARE", help=text)

    add = parser.add_argument_group("model").add_argument
    add("--vlm_path", help="LLaVA-format folder or hub name; default: the first in a folder of --data_root")
    add("--sam_path", help="SAM-format folder or hub name; default: the first in a folder of --data_root")
    add("--image_size", type=whole(32), help="side of SAM's input and the masks; default: SAM's; lower it on OOM")
    add("--lora_rank", type=whole(1), default=16, help="rank of the LoRA matrices")
    advanced("--lora_alpha", type=real(0, above=True), default=16.0, help="LoRA scale is alpha / rank")
    advanced("--lora_dropout", type=real(0, 0.99), default=0.05, help="dropout before the LoRA matrices")
    add("--gradient_checkpointing", action=BooleanOptionalAction, default=False, help="save memory; a third slower")

    add = parser.add_argument_group("loss and learning rate").add_argument
    add("--lambda_seg", type=real(0), default=1.0, help="weight of the mask loss (BCE + Dice)")
    add("--lambda_txt", type=real(0), default=0.5, help="weight of the answer's cross-entropy")
    text = "learning rate factor: number of GPUs (or effective batch / batch size), its square root, or 1"
    add("--lr_scaling", choices=("linear", "sqrt", "none"), default="linear", help=text)
    add(
        "--lr_schedule",
        "--scheduler",
        choices=("constant", "cosine"),
        default="constant",
        help="learning rate after warm-up; cosine ends at 0",
    )
    add("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up")
    advanced("--weight_decay", type=real(0), default=0.01, help="AdamW weight decay")

    add = parser.add_argument_group("evaluation and prediction").add_argument
    add("--eval_split", choices=("train", "val", "test"), default="test", help="split for --eval_only")
    advanced("--generate_every", type=whole(0), default=0, help="generate answers every N epochs; 0: only in the test")
    add("--unet_steps", type=whole(0), default=2000, help="steps of 8 images for the UNet baseline; 0: no UNet")
    advanced("--max_new_tokens", type=whole(1), default=64, help="maximum tokens of a generated answer")
    add("--predict", metavar="IMAGE|FOLDER|CSV", help="write masks and answers; CSV columns: image, question")
    add("--question", help="question to ask about each image of --predict")

    add_common_arguments(parser, output_dir="checkpoints", num_epochs=20, learning_rate=1e-4, batch_size=8)
    args = parser.parse(argv)
    if args.predict and not args.question and not args.predict.lower().endswith(".csv"):
        parser.error("--predict: needs --question, or a CSV with the columns image and question")
    return args


if __name__ == "__main__":
    # parse the command line before the heavy imports, so that --help and usage errors appear immediately
    ARGS = parse_args()
    launch_workers(ARGS.world_size)


from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader, Dataset
from transformers import DynamicCache

import distributed_utils as du
from hardware_utils import autocast, out_of_memory, set_precision
from tasks.prs_med import annotations, report, rivals, wordings
from tasks.prs_med.annotations import POSITIONS, Row, is_right, position_in, position_of
from tasks.prs_med.sam_attention import fold_relative_positions, make_relative_positions_deterministic
from tasks.prs_med.unet import unet_scores
from utils import checkpoint
from utils.engine import make_engine
from utils.images import open_image, square, square_box
from utils.loop import Plan, Run, Training
from utils.sampler import EvalBatchSampler, ImageGroups
from utils.tables import list_questions

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADVICE = "give --gradient_checkpointing, a smaller --image_size or fewer --lora_rank"

# --- model ------------------------------------------------------------------------------------------------------------


class MaskDecoder(nn.Module):
    """U-Net that computes mask logits from an image and a prompt; SAM's image tokens form the bottleneck.

    Two parts are not in the PRS-Med paper: a convolutional stem processes the image after pixel unshuffle (arXiv
    1609.05158), and the last prompt token scales and shifts SAM's tokens (FiLM, arXiv 1709.07871).
    """

    def __init__(self, text_dim: int, dim: int, scale: int, fine: int = 16):
        super().__init__()
        half, quarter, heads = dim // 2, dim // 4, max(1, dim // 32)
        self.scale = scale
        self.stem = nn.Sequential(*convolve(3 * scale**2, fine), *convolve(fine, fine))
        self.down = nn.Sequential(*convolve(fine, 2 * fine, stride=2))
        self.bottom = nn.Sequential(*convolve(2 * fine, 4 * fine, stride=2), nn.Conv2d(4 * fine, dim, 1))
        self.text = nn.Sequential(nn.Linear(text_dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.LayerNorm(dim))
        self.film = nn.Linear(dim, 2 * dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.image_norm, self.norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.encoder = nn.TransformerEncoderLayer(
            dim, heads, dim_feedforward=4 * dim, dropout=0.0, activation="gelu", batch_first=True
        )
        double = nn.Upsample(scale_factor=2)
        self.up = nn.ModuleList([
            nn.Sequential(*convolve(dim, half), double),
            nn.Sequential(*convolve(half + 2 * fine, quarter), double),
            nn.Sequential(*convolve(quarter + fine, fine), nn.Conv2d(fine, scale**2, 3, padding=1)),
        ])  # fmt: skip
        # the stem initially adds zeros to SAM's tokens, so training starts from SAM's pretrained features
        nn.init.zeros_(self.bottom[-1].weight)
        nn.init.zeros_(self.bottom[-1].bias)

    def forward(self, features: Tensor, words: Tensor, padding: Tensor, pixels: Tensor, image_of: Tensor) -> Tensor:
        """Return mask logits (B, S, S) for B questions about N images.

        features: SAM's output (N, dim, h, w). words: hidden states of the prompt (B, Q, D). padding: bool (B, Q), True
        for padding. pixels: normalized images (N, 3, S, S). image_of: (B,), image index of each question.
        """
        fine = self.stem(F.pixel_unshuffle(pixels, self.scale))
        half = self.down(fine)
        features = features + self.bottom(half)
        features, half, fine = (grid.index_select(0, image_of) for grid in (features, half, fine))

        text = self.text(words)
        scale, shift = self.film(gather_states(text, (~padding).sum(1, keepdim=True) - 1)).chunk(2, dim=2)
        tokens = self.image_norm(features.flatten(2).transpose(1, 2)) * (1 + scale) + shift
        attended, _ = self.attention(tokens, text, text, key_padding_mask=padding, need_weights=False)
        tokens = self.encoder(self.norm(tokens + attended))

        first, second, third = self.up
        decoded = first(tokens.transpose(1, 2).unflatten(2, features.shape[2:]))
        decoded = second(torch.cat([decoded, half], dim=1))
        decoded = third(torch.cat([decoded, fine], dim=1))
        return F.pixel_shuffle(decoded, self.scale)[:, 0]


def convolve(channels: int, out: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """Return a 3 x 3 convolution, group norm and GELU; batch norm would depend on the number of GPUs."""
    return nn.Conv2d(channels, out, 3, stride, padding=1), nn.GroupNorm(8, out), nn.GELU()


class PRSMed(nn.Module):
    """PRS-Med network: a frozen vision-language model with LoRA, a trainable SAM image encoder and a mask decoder."""

    def __init__(self, vlm: nn.Module, sam: nn.Module, processor: "Processor", precision: str):
        super().__init__()
        self.vlm, self.sam, self.processor, self.precision = vlm, sam, processor, precision
        self.checkpointing = False
        scale = sam.config.patch_size // 4
        self.decoder = MaskDecoder(vlm.config.text_config.hidden_size, sam.config.output_channels, scale)
        for name, values in processor.statistics.items():
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.vlm_mean.device

    def train(self, mode: bool = True) -> "PRSMed":
        super().train(mode)
        self.vlm.model.vision_tower.eval()
        return self

    def forward(self, batch: dict) -> tuple[Tensor, Tensor]:
        """Return fp32 mask logits (B, image_size, image_size) and the summed cross-entropy of each answer (B,).

        batch: output of collate(). The mask cannot depend on the answer in `batch`, because attention is causal.
        """
        with autocast(self.device, self.precision):
            words = self.vlm.get_input_embeddings()(batch["ids"])
            first, last = self.processor.image_span
            embeddings = torch.cat([words[:, :first], self.image_features(batch, words.dtype), words[:, last:]], dim=1)
            hidden = self.vlm.model.language_model(inputs_embeds=embeddings, **self.causal(embeddings))
            hidden = hidden.last_hidden_state

            logits = self.vlm.lm_head(gather_states(hidden, batch["answer_at"])).float().transpose(1, 2)
            text_losses = F.cross_entropy(logits, batch["answer"], ignore_index=-100, reduction="none")

            pixels = (batch["sam"] / 255 - self.sam_mean) / self.sam_std
            features = self.sam(pixels).last_hidden_state
            words = gather_states(hidden, batch["words"]).to(features.dtype)
            masks = self.decoder(features, words, batch["words"] < 0, pixels, batch["image_of"])
            return masks.float(), text_losses.sum(1)

    def causal(self, embeddings: Tensor) -> dict:
        """Return keyword arguments that make the language model's attention causal.

        Attention is causal by default, and flash attention takes no mask. Pass a dummy cache: without one, transformers
        would search the batch for packed sequences, which waits for the GPU. Activation checkpointing allows no cache,
        so pass a mask then.
        """
        if not self.checkpointing:
            return {"past_key_values": NoCache(), "use_cache": True}
        samples, length, _ = embeddings.shape
        mask = torch.ones(length, length, dtype=torch.bool, device=embeddings.device).tril()
        return {"attention_mask": mask.expand(samples, 1, -1, -1), "use_cache": False}

    @torch.no_grad()
    def image_features(self, batch: dict, dtype: torch.dtype) -> Tensor:
        """Return the image embeddings of each question: (B, image tokens, D)."""
        pixels = ((batch["vlm"] / 255 - self.vlm_mean) / self.vlm_std).to(self.vlm.dtype)
        features = self.vlm.model.get_image_features(pixel_values=pixels, return_dict=True)
        return torch.stack(list(features.pooler_output)).index_select(0, batch["image_of"]).to(dtype)

    @torch.no_grad()
    def answer(self, batch: dict, max_new_tokens: int) -> list[str]:
        prompt, processor = batch["prompt"], self.processor
        padding = prompt < 0
        with autocast(self.device, self.precision):
            words = self.vlm.get_input_embeddings()(prompt.masked_fill(padding, processor.pad))
            is_image = (prompt == processor.image_token).unsqueeze(2)
            tokens = self.vlm.generate(
                inputs_embeds=words.masked_scatter(is_image, self.image_features(batch, words.dtype)),
                attention_mask=(~padding).long(),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=processor.pad,
                eos_token_id=processor.end,
            )
        return [answer.strip() for answer in processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)]


class NoCache(DynamicCache):
    def update(self, keys: Tensor, values: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        return keys, values


def gather_states(hidden: Tensor, indices: Tensor) -> Tensor:
    """Return the hidden states (B, N, D) at the positions `indices` (B, N); negative indices count as 0."""
    return hidden.take_along_dim(indices.clamp_min(0).unsqueeze(2), dim=1)


# --- pretrained models and LoRA ---------------------------------------------------------------------------------------


def find_model(root: Path, given: str | None, kinds: tuple[str, ...], flag: str, example: str) -> str:
    """Return `given` or, if it is None, the first subfolder of `root` whose model type is in `kinds`.

    Raises InputError if there is no suitable model.
    """
    from transformers import PretrainedConfig

    advice = f"download one, such as {example}, and give {flag}"
    try:
        for path in [given] if given else [str(file.parent) for file in sorted(root.glob("*/config.json"))]:
            kind = PretrainedConfig.get_config_dict(path)[0].get("model_type")
            if kind in kinds:
                return path
            if given:
                # given a folder of another model type, transformers would build an untrained model
                raise InputError(f"{path}: is a {kind} model, not {kinds[0]}; {advice}")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be loaded ({first_line(error)}); {advice}") from None
    raise InputError(f"{root}: no {kinds[0]} model in a folder of it; {advice}")


def build_model(args: Namespace, precision: str, device: torch.device) -> PRSMed:
    """Load the vision-language model, add LoRA and freeze its other weights; load SAM's image encoder.

    Raises InputError if a model cannot be loaded, or if --image_size is not a multiple of SAM's patch size.
    """
    from transformers import AutoModel, AutoTokenizer, LlavaForConditionalGeneration, utils
    from transformers.image_processing_base import ImageProcessingMixin

    utils.logging.set_verbosity_error()
    utils.logging.disable_progress_bar()
    root = Path(args.data_root)
    llava_med = "chaoyinshe/llava-med-v1.5-mistral-7b-hf"
    vlm_path = find_model(root, args.vlm_path, ("llava",), "--vlm_path", llava_med)
    sam_kinds = ("sam", "sam_vision_model")
    sam_path = find_model(root, args.sam_path, sam_kinds, "--sam_path", "flaviagiammarino/medsam-vit-base")
    path = vlm_path
    try:
        # load directly onto the GPU; otherwise, each rank would hold the 7B model in host memory
        options = {"trust_remote_code": False, "dtype": DTYPES[precision]}
        options |= {"device_map": {"": device}} if device.type == "cuda" else {}
        vlm = LlavaForConditionalGeneration.from_pretrained(vlm_path, **options)
        tokenizer = AutoTokenizer.from_pretrained(vlm_path, trust_remote_code=False)
        vlm_settings, _ = ImageProcessingMixin.get_image_processor_dict(vlm_path)
        path = sam_path
        sam_settings, _ = ImageProcessingMixin.get_image_processor_dict(sam_path)
        sam = AutoModel.from_pretrained(sam_path, trust_remote_code=False, dtype=torch.float32).vision_encoder
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = f"model cannot be loaded ({first_line(error)})"
        raise InputError(f"{path}: {reason}; check --vlm_path and --sam_path") from None

    # resize SAM's absolute position embeddings; its forward pass interpolates the relative embeddings itself
    size, patch = args.image_size or sam.config.image_size, sam.config.patch_size
    if size % patch:
        raise InputError(f"--image_size {size}: not a multiple of SAM's patch; try {max(1, size // patch) * patch}")
    if size != sam.config.image_size and sam.pos_embed is not None:
        positions = sam.pos_embed.data.permute(0, 3, 1, 2)
        positions = F.interpolate(positions, (size // patch, size // patch), mode="bicubic")
        sam.pos_embed = nn.Parameter(positions.permute(0, 2, 3, 1).contiguous())
    sam.patch_embed.image_size = (size, size)

    vlm_size = vlm.config.vision_config.image_size
    blank = torch.zeros(1, 3, vlm_size, vlm_size, dtype=vlm.dtype, device=vlm.device)
    with torch.no_grad():
        image_tokens = len(vlm.model.get_image_features(pixel_values=blank, return_dict=True).pooler_output[0])
    statistics = {
        f"{name}_{kind}": settings.get(f"image_{kind}", [float(kind == "std")] * 3)
        for name, settings in (("vlm", vlm_settings), ("sam", sam_settings))
        for kind in ("mean", "std")
    }
    processor = Processor(tokenizer, vlm.config.image_token_id, image_tokens, size, vlm_size, statistics)

    # all ranks must draw the same initial weights
    torch.manual_seed(args.seed)
    model = PRSMed(add_lora(vlm, args, device), sam, processor, precision).to(device)
    if device.type == "cuda":
        fold_relative_positions(model.sam)
        model.sam.to(memory_format=torch.channels_last)
        model.decoder.to(memory_format=torch.channels_last)
    elif torch.get_num_threads() > 1:
        make_relative_positions_deterministic(model.sam)
    if args.gradient_checkpointing:
        model.checkpointing = True
        for encoder in (model.vlm, model.sam):
            encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def add_lora(vlm: nn.Module, args: Namespace, device: torch.device) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
    )
    vlm = inject_adapter_in_model(config, vlm)
    for name, parameter in vlm.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for layer in vlm.modules():
        if isinstance(layer, LoraLayer):
            # peft would cast the input to fp32, and autocast would cast it back
            layer.cast_input_dtype_enabled = False
            for name, dropout in layer.lora_dropout.items():
                if device.type == "cuda" and isinstance(dropout, nn.Dropout):
                    # recompute the dropout output in the backward pass: storing it takes 18 GiB for a 7B model and 8
                    # images
                    matrix = layer.lora_A[name]
                    matrix.forward = partial(linear_after_dropout, matrix, dropout.p)
                    layer.lora_dropout[name] = nn.Identity()
    return vlm


def linear_after_dropout(linear: nn.Linear, probability: float, inputs: Tensor) -> Tensor:
    def compute(inputs: Tensor) -> Tensor:
        return F.linear(F.dropout(inputs, probability, linear.training), linear.weight)

    if linear.training and torch.is_grad_enabled():
        return recompute(compute, inputs, use_reentrant=False)
    return compute(inputs)


def fingerprint(model: nn.Module) -> Tensor:
    """Return an fp32 vector with up to 16 values of each frozen parameter, to identify the base model."""
    values = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            flat = parameter.detach().flatten()
            indices = torch.arange(min(16, len(flat)), device=flat.device) * (len(flat) - 1) // 15
            values.append(flat[indices].float().cpu())
    return torch.cat(values)


def load_weights(model: PRSMed, saved: dict) -> None:
    """Load the trained weights. Raises InputError if the architecture or frozen weights do not match the checkpoint."""
    base, own = saved["base"], fingerprint(model)
    # allow for rounding: either run may have loaded the base model in bf16, which has 7 mantissa bits
    if base.shape != own.shape or not torch.allclose(base, own, rtol=2**-7, atol=1e-6, equal_nan=True):
        raise InputError("--vlm_path: not the base that the checkpoint was trained on; give that one")
    checkpoint.load_trained(model, saved["model"])


# --- data -------------------------------------------------------------------------------------------------------------


@dataclass
class Processor:
    """Converts questions, answers and images to the inputs of the vision-language model (VLM) and SAM.

    image_token: token id of <image>. image_tokens: number of image tokens in a prompt. image_size: side of SAM's input
    and of the masks in pixels. vlm_size: side of the VLM's input in pixels. statistics: pixel mean and standard
    deviation of each image encoder.
    """

    tokenizer: object
    image_token: int
    image_tokens: int
    image_size: int
    vlm_size: int
    statistics: dict

    def __post_init__(self):
        self.end = self.tokenizer.eos_token_id
        self.pad = self.end if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        first = self.tokens("", "")[0].index(self.image_token)
        self.image_span = first, first + self.image_tokens

    def tokens(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the token ids of the prompt and of the answer.

        The prompt is `USER: <image>\\n{question}\\nASSISTANT:`, with <image> repeated once per image token. The answer
        is ` {answer}</s>`.
        """
        image = self.tokenizer.convert_ids_to_tokens(self.image_token)
        asked = f"USER: {image}\n{question}\nASSISTANT:"
        prompt, both = (self.tokenizer(text)["input_ids"] for text in (asked, f"{asked} {answer}"))
        # some tokenizers append </s> to every text; remove that token
        prompt, both = (ids[:-1] if ids[-1] == self.end else ids for ids in (prompt, both))
        first = prompt.index(self.image_token)
        expanded = [*prompt[:first], *[self.image_token] * self.image_tokens, *prompt[first + 1 :]]
        return expanded, [*both[len(prompt) :], self.end]

    def pixels(self, image: Image.Image) -> list[np.ndarray]:
        """Pad an image to a square; return uint8 arrays (3, image_size, image_size) and (3, vlm_size, vlm_size)."""
        padded = [square(image, side, Image.Resampling.BICUBIC) for side in (self.image_size, self.vlm_size)]
        return [np.asarray(image).transpose(2, 0, 1) for image in padded]


class DecodedFiles:
    """Cache of decoded files, each uint8 (length,), shared by all ranks and DataLoader workers on a machine.

    Create it on all ranks. If the cache would exceed `most_bytes` or the disk has no room for it, it is not allocated
    and get() decodes the file on every call.
    """

    def __init__(self, keys: list[str], length: int, most_bytes: float):
        self.index_of = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        size = len(self.index_of) * (length + 1)
        shared = du.share_bytes(size) if size <= most_bytes else None
        # the last byte of a record is 1 once the record is filled
        self.records = None if shared is None else shared.reshape(-1, length + 1)

    def get(self, key: str, decode, file: str) -> np.ndarray:
        if self.records is None:
            return decode(file)
        record = self.records[self.index_of[key]]
        if not record[-1]:
            record[:-1] = decode(file)
            record[-1] = 1
        return record[:-1]


class PositionData(Dataset):
    """Data set of annotation rows: questions about images, with masks and answers.

    An empty path in a row gives a blank image or mask. reword: share of questions to reword in each epoch. absent:
    share of questions to replace with one about a structure found only in other modalities.
    """

    def __init__(
        self,
        rows: list[Row],
        processor: Processor,
        caches: tuple[DecodedFiles, DecodedFiles],
        seed: int = 0,
        augmented: bool = False,
        reword: float = 0.0,
        absent: float = 0.0,
    ):
        self.rows, self.processor, self.caches, self.seed = rows, processor, caches, seed
        self.augmented, self.reword, self.absent = augmented, reword, absent
        self.other_names, self.absent_names = wordings.other_names(rows), wordings.absent_names(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        """Return the item of a row. If a file is unreadable, item["error"] gives the reason and all ranks stop."""
        row, side, small = self.row_in_epoch(index), self.processor.image_size, self.processor.vlm_size
        images, masks = self.caches
        pixels, mask = np.zeros(3 * (side**2 + small**2), np.uint8), np.zeros(side**2 + 1, np.uint8)
        file, error, unmoved = row.mask, "", False
        try:
            if row.mask:
                mask = masks.get(row.mask, self.decode_mask, row.mask)
            if row.image:
                file = row.image
                pixels = images.get(row.identity, self.decode_image, row.image)
        except (OSError, ValueError) as reason:
            error = f"{row.source}: {file} is not a readable image ({reason}); replace it and resume"
        sam, vlm = pixels[: 3 * side**2].reshape(3, side, side), pixels[3 * side**2 :].reshape(3, small, small)
        mask, position, answer = mask[:-1].reshape(side, side) > 0, POSITIONS[mask[-1]], row.answer
        if self.augmented:
            rng = np.random.default_rng([self.seed % 2**63, index.epoch, images.index_of[row.identity]])
            sam, vlm, mask, unmoved = augment(sam, vlm, mask, rng)
            moved = position_of(mask)
            answer, position = annotations.name_position(answer, position, moved), moved
        prompt, answer = self.processor.tokens(row.question, answer)
        item = {name: torch.from_numpy(x.copy()) for name, x in (("sam", sam), ("vlm", vlm), ("mask", mask))}
        # collate() merges images of equal identity, so an image that was not moved needs another one
        item |= {"index": int(index), "identity": (row.identity, unmoved), "error": error}
        return item | {"prompt": prompt, "answer": answer, "position": position}

    def row_in_epoch(self, index: int) -> Row:
        row = self.rows[index]
        if not row.names or not (self.reword or self.absent):
            return row
        rng = np.random.default_rng([self.seed % 2**63, index.epoch, index])
        absent = self.absent_names[row.modality]
        if absent and rng.random() < self.absent:
            name = absent[rng.integers(len(absent))]
            return wordings.ask_for_absent(row, wordings.draw(rng, [name], row.names[:1]), name)
        if rng.random() < self.reword:
            # a model trained on few wordings memorizes whole questions and ignores the structure's name
            others = self.other_names[row.modality, row.names[0]]
            return row._replace(question=wordings.draw(rng, row.names, others))
        return row

    def decode_image(self, path: str) -> np.ndarray:
        return np.concatenate([pixels.ravel() for pixels in self.processor.pixels(open_image(path))])

    def decode_mask(self, path: str) -> np.ndarray:
        """Return the pixels of the resized mask, then the original mask's position as an index into POSITIONS."""
        native = annotations.open_mask(path)
        small = square(Image.fromarray(native), self.processor.image_size, Image.Resampling.NEAREST)
        return np.append(np.asarray(small, np.uint8), POSITIONS.index(position_of(native))).astype(np.uint8)


def blank_item(processor: Processor, prompt: list[int], answer: list[int]) -> dict:
    item = {"index": 0, "identity": "", "position": None, "prompt": prompt, "answer": answer, "error": ""}
    for name, side in (("sam", processor.image_size), ("vlm", processor.vlm_size)):
        item[name] = torch.zeros(3, side, side, dtype=torch.uint8)
    return item | {"mask": torch.zeros(processor.image_size, processor.image_size, dtype=torch.bool)}


def collate(processor: Processor, items: list[dict]) -> dict:
    """Combine items of PositionData into a batch.

    "sam", "vlm": the distinct images at both input sizes. "image_of": image index of each question. "ids": tokens of
    prompt and answer, right-padded. "prompt": tokens of the prompt, left-padded with -1 for generation. "words":
    positions of the prompt's text tokens in "ids", padded with -1. "answer": tokens of the answer, padded with -100.
    "answer_at": positions in "ids" whose hidden states predict the answer's tokens.
    """
    first, last = processor.image_span
    prompts, answers = [item["prompt"] for item in items], [item["answer"] for item in items]
    pairs = list(zip(prompts, answers, strict=True))
    distinct: dict = {}
    for item in items:
        distinct.setdefault(item["identity"], item)
    return {
        "sam": torch.stack([item["sam"] for item in distinct.values()]),
        "vlm": torch.stack([item["vlm"] for item in distinct.values()]),
        "image_of": torch.tensor([list(distinct).index(item["identity"]) for item in items]),
        "mask": torch.stack([item["mask"] for item in items]),
        "ids": pad([prompt + answer for prompt, answer in pairs], processor.pad),
        "prompt": pad(prompts, -1, side="left"),
        "words": pad([[*range(first), *range(last, len(prompt))] for prompt in prompts], -1),
        "answer": pad(answers, -100),
        "answer_at": pad([range(len(prompt) - 1, len(prompt) + len(answer) - 1) for prompt, answer in pairs], 0),
        # du.to_device() leaves lists on the host
        "index": [item["index"] for item in items],
        "position": [item["position"] for item in items],
        "error": [item["error"] for item in items],
    }


def pad(rows: list, value: int, side: str = "right") -> Tensor:
    tensors = [torch.tensor([*row], dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def augment(sam: np.ndarray, vlm: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> tuple:
    """Apply one random affine transform to an image and its mask (S, S); change the image's contrast and gamma.

    sam, vlm: the image (3, S, S) at both input sizes. A transform that would move the whole mask out of the image is
    skipped. Images are never mirrored, because answers name left and right. Returns (sam, vlm, mask, whether the
    transform was skipped).
    """
    angle, zoom = np.radians(rng.uniform(-6, 6)), np.exp(rng.uniform(-0.08, 0.08))
    (x, y), gain, gamma = rng.uniform(-0.08, 0.08, 2), rng.uniform(0.85, 1.15), np.exp(rng.uniform(-0.2, 0.2))
    turn = torch.tensor([[[np.cos(angle), np.sin(angle), x], [-np.sin(angle), np.cos(angle), y]]]).float() / zoom

    def move(values: np.ndarray, mode: str) -> np.ndarray:
        values = torch.from_numpy(values[None]).float()
        grid = F.affine_grid(turn, [*values.shape], align_corners=False)
        return F.grid_sample(values, grid, mode, align_corners=False)[0].round().byte().numpy()

    moved = move(mask[None], "nearest")[0] > 0
    unmoved = bool(mask.any() and not moved.any())
    if not unmoved:
        sam, vlm, mask = move(sam, "bilinear"), move(vlm, "bilinear"), moved
    levels = (255 * np.clip(gain * np.linspace(0, 1, 256) ** gamma, 0, 1)).astype(np.uint8)
    return levels[sam], levels[vlm], mask, unmoved


def read_data(args: Namespace, needed: str) -> list[Row]:
    """Rank 0 only: read and check the annotations; print warnings.

    Raises InputError for unusable data, or if the split `needed` has no rows.
    """
    root = Path(args.data_root)
    if not root.is_dir():
        raise InputError(
            f"{root}: no such folder; give --data_root. No data yet? `make demo` makes some up and trains; "
            "`python -m tools.prepare_data prs_med --help` shows how to use your own images and masks"
        )
    rows = annotations.read_rows(root, args.annotations, args.patient_column, args.patient_pattern, args.skip_bad_rows)
    rows, warnings = annotations.check_data(rows, args.image_size, root / ".data_check.json")
    for warning in warnings:
        print(f"data check: {warning}", flush=True)
    if not any(row.split == needed for row in rows):
        raise InputError(f"{root}: no rows of the {needed} split; check the annotations' column `split`")
    return rows


def make_sets(rows: list[Row], processor: Processor, args: Namespace) -> dict[str, PositionData]:
    length = 3 * (processor.image_size**2 + processor.vlm_size**2)
    images = DecodedFiles([row.identity for row in rows], length, args.cache_gb * 2**30)
    masks = DecodedFiles([row.mask for row in rows], processor.image_size**2 + 1, args.cache_gb * 2**30)
    sets = {}
    for split in ("train", "val", "test"):
        of_split = [row for row in rows if row.split == split]
        if of_split:
            changes = {}
            if split == "train" and not args.eval_only:
                changes = {"augmented": args.augmentation, "reword": args.reword, "absent": args.absent}
            sets[split] = PositionData(of_split, processor, (images, masks), args.seed, **changes)
    return sets


# --- loss and scores --------------------------------------------------------------------------------------------------


def mask_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Return BCE plus Dice loss of each mask, (B,), from logits (B, H, W) and bool masks (B, H, W)."""
    target = masks.float()
    probability = logits.sigmoid()
    bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean((1, 2))
    overlap = (probability * target).sum((1, 2))
    areas = probability.sum((1, 2)) + target.sum((1, 2))
    return bce + 1 - (2 * overlap + 1) / (areas + 1)


def batch_loss(model: nn.Module, batch: dict, samples: int, tokens: float, args: Namespace) -> tuple[Tensor, ...]:
    """Return a micro-batch's share of the global batch's mean losses: (weighted total, mask loss, answer loss).

    samples, tokens: number of questions and of answer tokens in the global batch.
    """
    logits, text_loss = model(batch)
    seg = mask_loss(logits, batch["mask"]).sum() / samples
    txt = text_loss.sum() / tokens
    return args.lambda_seg * seg + args.lambda_txt * txt, seg, txt


def count_answer_tokens(batches: list[dict]) -> list[float]:
    return [sum(float((batch["answer"] >= 0).sum()) for batch in batches)]


@torch.no_grad()
def evaluate(model: PRSMed, loader: DataLoader, run, hausdorff: bool = False) -> tuple[list[dict], dict]:
    """Call on all ranks. Score all rows; return (scores, examples), equal on all ranks.

    scores: one dict per row, in row order; "dice" and "iou" are 1 if both masks are empty. examples: {row index: image
    and masks} for a few rows. hausdorff: whether to compute "hd95".
    """
    model.eval()
    scores, examples = {}, {}
    shown = report.evenly_spaced(range(len(loader.dataset)), report.EXAMPLES)
    for batch in run.batches(loader):
        logits, text_loss = model(batch)
        predicted, target = logits > 0, batch["mask"]
        columns = [
            (predicted & target).sum((1, 2)),
            (predicted | target).sum((1, 2)),
            mask_loss(logits, target),
            text_loss,
            (batch["answer"] >= 0).sum(1),
        ]
        # copy from the GPU only twice per batch, because each copy makes the CPU wait
        table = torch.stack(columns, dim=1).tolist()
        masks = predicted.cpu().numpy()
        distances = report.hausdorff_95(predicted, target) if hausdorff else [None] * len(table)
        for k, (index, position) in enumerate(zip(batch["index"], batch["position"], strict=True)):
            both, either, seg, txt, tokens = table[k]
            iou = both / either if either else 1.0
            scores[index] = {
                "index": index,
                "dice": 2 * iou / (1 + iou),
                "iou": iou,
                "position": position,
                "position_accuracy_mask": is_right(position_of(masks[k]), position),
                "hd95": distances[k],
                "loss_seg": seg,
                "loss_txt": txt,
                "tokens": tokens,
            }
            if index in shown:
                image = batch["sam"][batch["image_of"][k]].cpu().numpy()
                examples[index] = {"image": image, "true": target[k].cpu().numpy(), "predicted": masks[k]}
    return list(du.gather_dicts(scores).values()), du.gather_dicts(examples)


@torch.no_grad()
def add_answers(model: PRSMed, loader: DataLoader, run, scores: list[dict], max_new_tokens: int) -> None:
    """Call on all ranks. Generate an answer to each row's question and add it to `scores` as "generated".

    Also adds "position_accuracy": 1 if the answer names the true position, otherwise 0; None if the true mask is empty.
    """
    model.eval()
    own = {}
    for batch in run.batches(loader):
        own |= dict(zip(batch["index"], model.answer(batch, max_new_tokens), strict=True))
    answers = du.gather_dicts(own)
    for row in scores:
        row["generated"] = answers[row["index"]]
        row["position_accuracy"] = is_right(position_in(row["generated"]), row["position"])


def merge_lora(model: PRSMed) -> None:
    from peft.tuners.lora import LoraLayer

    for layer in model.vlm.modules():
        if isinstance(layer, LoraLayer):
            layer.merge()


def mean_metrics(scores: list[dict], split: str, args: Namespace) -> dict[str, float]:
    seg = sum(row["loss_seg"] for row in scores) / len(scores)
    txt = sum(row["loss_txt"] for row in scores) / sum(row["tokens"] for row in scores)
    metrics = {"loss": args.lambda_seg * seg + args.lambda_txt * txt, "loss_seg": seg, "loss_txt": txt}
    for name in report.MEANS:
        values = [row[name] for row in scores if row.get(name) is not None]
        if values:
            metrics[name] = sum(values) / len(values)
    return {f"{split}/{name}": value for name, value in metrics.items()}


def test(
    model: PRSMed, sets: dict[str, PositionData], split: str, batch_size: int, run: Run, args: Namespace
) -> dict[str, float]:
    """Call on all ranks. Test the model, its ablations and the baselines.

    Prints the test table, writes a figure and a CSV, and merges LoRA into the base weights. Returns {metric: value} on
    rank 0 and {} on the other ranks.
    """
    data, ranks = sets[split], run.ranks
    make = partial(make_loader, args=args, batch_size=batch_size)
    scores, examples = evaluate(model, make(data), run, hausdorff=True)

    some = report.evenly_spaced(range(len(data)), report.MOST_ABLATED)
    # take fewer rows, because each row is reworded with all of OTHER_WORDS
    few = report.evenly_spaced(some, max(1, report.MOST_ABLATED // len(wordings.OTHER_WORDS)))
    absent = wordings.absent_names(sets.get("train", data).rows)
    changed = report.ablations(data.rows, some, args.seed)
    changed += wordings.in_other_words(data.rows, few) + wordings.about_absent(data.rows, some, absent)
    changed_data = PositionData([row for *_, row in changed], data.processor, data.caches)
    changed_scores, _ = evaluate(model, make(changed_data), run)

    # merge_lora() rounds the weights, so call it after all masks are predicted
    merge_lora(model)
    generate = partial(make_loader, args=args, batch_size=max(batch_size, 64))
    add_answers(model, generate(data), run, scores, args.max_new_tokens)
    add_answers(model, generate(changed_data), run, changed_scores, args.max_new_tokens)
    others = defaultdict(list)
    for (name, index, _), row in zip(changed, changed_scores, strict=True):
        others[name].append(row | {"index": index})
    report.join_wordings(others)

    if "train" in sets:
        # the training rows, without augmentation or rewording
        known = PositionData(sets["train"].rows, data.processor, data.caches)
        # with several ranks, rank 0 trains the UNet and the other ranks fit the other baselines
        (rank, size), own = du.world(), {}
        busy = int(args.unet_steps > 0 and size > 1)
        try:
            if rank >= busy:
                own = rivals.rival_scores(known, data, rank - busy, size - busy)
            if args.unet_steps and ranks.is_main:
                settings = args.unet_steps, args.seed, ranks.device, model.precision
                own["unet"] = unet_scores(known, sets.get("val"), data, *settings, lambda: run.heartbeat("the UNet"))
        finally:
            # a collective could time out while rank 0 trains the UNet
            ranks.wait_for_main("the UNet")
        parts = du.gather_objects(own)
        # a rank without structures does not know the baselines' names, so gather them from all ranks; the UNet comes
        # last
        for name in {name: None for part in (*parts[1:], parts[0]) for name in part}:
            rows = [row for part in parts for row in part.get(name, [])]
            others[f"rival/{name}"] = sorted(rows, key=lambda row: row["index"])

    metrics = {}
    with du.agree_on_errors():
        if ranks.is_main:
            metrics = mean_metrics(scores, split, args) | report.print_table(split, scores, others, data.rows)
            with run.writing():
                cases = pd.DataFrame([data.rows[score["index"]]._asdict() | score for score in scores])
                cases.to_csv(run.folder / f"{split}_cases.csv", index=False)
                run.figure(f"{split}_predictions", report.draw_predictions(data.rows, scores, examples))
    return metrics


# --- prediction -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def predict(model: PRSMed, run: Run, args: Namespace) -> None:
    """Call on all ranks. Write the masks and answers for --predict to a new subfolder of the run folder.

    Raises InputError if none of the images can be read.
    """
    asked, opened = [], {}
    for file, question in list_questions(args.predict, args.question):
        try:
            opened[file] = opened.get(file) or open_image(file)
            asked.append((file, question))
        except (OSError, ValueError) as error:
            du.print_main(f"warning: {file}: cannot be read ({error}); left out")
    if not asked:
        raise InputError(f"{args.predict}: no image can be read; check --predict")

    model.eval()
    own, processor = {}, model.processor
    for indices in EvalBatchSampler(len(asked), run.micro_batch_size, *du.world()):
        items = []
        for file, question in (asked[index] for index in indices):
            sam, vlm = map(torch.tensor, processor.pixels(opened[file]))
            item = blank_item(processor, *processor.tokens(question, ""))
            items.append(item | {"identity": str(file), "sam": sam, "vlm": vlm})
        batch = du.to_device(collate(processor, items), model.device)
        logits, answers = model(batch)[0], model.answer(batch, args.max_new_tokens)
        for index, mask, answer in zip(indices, logits, answers, strict=True):
            image = opened[asked[index][0]]
            left, top, right, bottom = square_box(image.size, len(mask))
            inside = mask[None, None, top:bottom, left:right]
            native = F.interpolate(inside, (image.height, image.width), mode="bilinear", align_corners=False)
            own[index] = {"mask": native[0, 0].cpu().numpy() > 0, "answer": answer}
    records = list(du.gather_dicts(own).values())
    if run.ranks.is_main:
        report.write_predictions(run.folder, asked, records, opened, run.checkpoint["structures"])


# --- training and main program ----------------------------------------------------------------------------------------


def make_loader(data: PositionData, args: Namespace, batch_size: int, **options) -> DataLoader:
    options = {"train": False, "seed": args.seed, "num_workers": args.num_workers} | options
    return du.create_distributed_dataloader(data, batch_size, collate_fn=partial(collate, data.processor), **options)


def largest_batch(model: PRSMed, size: int, rows: list[Row] | tuple = ()) -> dict:
    """Return a batch of `size` blank images with the longest prompt and answer that training on `rows` can yield.

    Without rows, the prompt and the answer each get 64 tokens of text.
    """
    processor = model.processor
    texts = {(row.question, row.answer) for row in rows}
    for name in {name for row in rows for name in row.names}:
        texts.add((wordings.longest([name]), wordings.fill(wordings.ABSENT, name)))
    pairs = [processor.tokens(*text) for text in texts]
    prompts, answers = zip(*pairs or [(processor.tokens("", "")[0] + [0] * 64, [0] * 64)], strict=True)
    item = blank_item(processor, max(prompts, key=len), max(answers, key=len))
    return collate(processor, [item | {"identity": number} for number in range(size)])


def trial_step(model: nn.Module, batch: dict, args: Namespace) -> None:
    model.train()
    batch = du.to_device(batch, model.device)
    batch_loss(model, batch, len(batch["index"]), batch["answer"].numel(), args)[0].backward()


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)


def train(run: Run, args: Namespace, model: PRSMed, sets: dict[str, PositionData], base: Tensor, described: str) -> int:
    """Call on all ranks. Train the model, validate after each epoch and test the best checkpoint.

    base: fingerprint() of the frozen weights. described: description of the precision, to print in the banner. Returns
    0 or, after a stop signal, the exit code for that signal.
    """

    def try_once(size: int) -> None:
        trial_step(model, largest_batch(model, size, sets["train"].rows), args)

    batch = run.plan_batches(model, try_once, args.batch_size, args.effective_batch_size)
    options = {"train": True, "effective_batch_size": batch.global_batch_size, "gpu_shares": batch.gpu_shares}
    if args.questions_per_image > 1:
        image_of = np.unique([row.identity for row in sets["train"].rows], return_inverse=True)[1]
        options["groups"] = ImageGroups(image_of, args.questions_per_image)
    loader = make_loader(sets["train"], args, batch.micro_batch_size, **options)
    val_loader = make_loader(sets["val"], args, batch.micro_batch_size) if "val" in sets else None

    steps = args.num_epochs * loader.batch_sampler.steps_per_epoch()
    base_lr = du.scale_learning_rate(args.learning_rate, batch.lr_factor, args.lr_scaling)
    if base_lr > 2e-4 and model.vlm.config.text_config.hidden_size >= 1024:
        du.print_main(f"warning: a learning rate of {base_lr:g} may diverge; --lr_scaling none or --warmup_steps 500")
    invariants = {
        "training rows": len(sets["train"]),
        "images": len(sets["train"].caches[0].index_of),
        "augmentation": args.augmentation,
        "questions per image": args.questions_per_image,
        "questions reworded": args.reword,
        "questions about what is absent": args.absent,
    }
    scaled = "" if base_lr == args.learning_rate else f" -> {base_lr:g} ({args.lr_scaling})"
    banner = {"learning rate": f"{args.learning_rate:g}{scaled}, {args.lr_schedule}", "precision": described}
    plan = Plan(batch, steps, ["loss", "loss_seg", "loss_txt"], invariants, banner)
    structures = [list(names) for names in sorted({row.names for row in sets["train"].rows if row.names})]
    optimizer = make_optimizer(model, args)
    engine = make_engine(model, optimizer, model.precision, args, model.device, saved=run.checkpoint)

    with Training(run, args, engine, plan, lambda: {"base": base, "structures": structures}) as training:
        while not training.is_over():
            model.train()
            for step in training.steps(loader, count_answer_tokens):
                for micro_batch in step.micro_batches():
                    step.backward(*batch_loss(engine.wrapped, micro_batch, step.samples, step.totals[0], args))
                factor = du.schedule(run.position.step, steps, args.warmup_steps, args.lr_schedule)
                step.update(base_lr * factor)
            if training.stopped:
                return training.save_and_stop()

            metrics = {}
            if val_loader is not None:
                scores, examples = evaluate(model, val_loader, run)
                if args.generate_every and (run.position.epoch + 1) % args.generate_every == 0:
                    add_answers(model, val_loader, run, scores, args.max_new_tokens)
                metrics = mean_metrics(scores, "val", args)
                run.figure("val_predictions", report.draw_predictions(sets["val"].rows, scores, examples))
            training.record(metrics, headline="val/dice")

        training.load_best()
        training.finish(test(model, sets, "test", batch.micro_batch_size, run, args) if "test" in sets else {})
    return 0


def run_task(args: Namespace, ranks: du.Ranks) -> int:
    precision, described = set_precision(args.mixed_precision, ranks.device, args.deterministic)
    rows: list[Row] = []
    with du.agree_on_errors():
        try:
            if ranks.is_main and not args.predict:
                rows = read_data(args, args.eval_split if args.eval_only else "train")
        finally:
            # a collective could time out while rank 0 checks the images
            ranks.wait_for_main("the data check")
    rows = du.broadcast_object(rows)

    # write nothing to the run folder before training begins: bad input must leave an existing run intact
    run = Run(FORMAT, args, ranks, ADVICE, ("lora_rank", "lora_alpha", "image_size"))
    # Run() replaces --lora_rank, --lora_alpha and --image_size with the checkpoint's values
    args = run.args
    with du.agree_on_errors():
        model = build_model(args, precision, ranks.device)
        if run.checkpoint:
            load_weights(model, run.checkpoint)
    base = fingerprint(model)
    if any(not torch.equal(base, other) for other in du.gather_objects(base)):
        raise InputError("--vlm_path: the processes have loaded different weights; give every node the same files")
    if args.predict:
        predict(model, run, args)
        return 0
    sets = make_sets(rows, model.processor, args)
    if args.eval_only:
        metrics = test(model, sets, args.eval_split, run.micro_batch_size, run, args)
        run.write_summary(f"eval_{args.eval_split}", metrics)
        return 0
    if args.absent and not any(sets["train"].absent_names.values()):
        raise InputError(f"--absent {args.absent:g}: all structures are of one modality; leave it out")
    return train(run, args, model, sets, base, described)


def main(args: Namespace) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with du.setup_distributed(args.dist_timeout) as ranks:
        return run_task(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
