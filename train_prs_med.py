"""Guide 0, PRS-Med (arXiv 2505.11872): a medical image and a question in, a mask and a sentence saying where it is out.

    python train_prs_med.py --data_root data                              # one GPU, or CPU when there is none
    ./run_multi_gpu_train.sh data 4                                       # 4 GPUs (without GPUs: 4 processes)
    torchrun --nproc_per_node=4 train_prs_med.py --data_root data --batch_size 8 --learning_rate 1e-4 --num_epochs 20
    torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=<node0_ip> --master_port=29500 \\
        train_prs_med.py --data_root data                                 # node 0 of 2; --node_rank=1 on node 1
    python train_prs_med.py --data_root data --eval_only --resume_from checkpoints/best.pt --eval_split test
    python train_prs_med.py --data_root data --predict scan.png --question "Where is the cyst located in this image?"

Data: <data_root>/annotations/<modality>.csv with image_path,image_name,split,description,position,question,answer,
where image_path is the MASK's path <modality>/<split>_masks/<name>.png and the picture lies in <split>_images.
"""

import argparse
import contextlib
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cli_utils import (
    InputError,
    Parser,
    add_common_arguments,
    number,
    parse_arguments,
    run_main,
    take_from_run,
    value_sources,
    whole,
)

FORMAT = "prs_med/1"
LOSSES = ["loss", "loss_seg", "loss_txt", "grad_norm", "skipped"]
CURVES = ["loss", "dice", "iou", "position_accuracy", "position_accuracy_mask"]
NO_VLM = (
    "download a LLaVA-format model (such as chaoyinshe/llava-med-v1.5-mistral-7b-hf) and give its folder as --vlm_path"
)
NO_SAM = "download a SAM-format model (such as flaviagiammarino/medsam-vit-base) and give its folder as --sam_path"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument_group("data").add_argument
    text = "needed, but with --eval_only or --predict of a run: folder with annotations/*.csv and the modality folders"
    add("--data_root", help=text)
    add("--annotations", nargs="+", metavar="NAME", help="which annotation CSVs, by name; default: all")
    add("--skip_bad_rows", action="store_true", help="drop and count CSV rows with a missing field instead of stopping")
    text = "do not read every image before training; images are then told apart by path, not by content"
    add("--skip_data_check", action="store_true", help=text)
    text = "GiB of RAM PER PROCESS for decoded pictures; when all fit, no workers are started; 0: decode each time"
    add("--cache_gb", type=number(0), default=4.0, help=text)

    add = parser.add_argument_group("model").add_argument
    add(
        "--vlm_path",
        help="LLaVA-format checkpoint, folder or hub name; default: the one found in a folder of --data_root",
    )
    add(
        "--sam_path",
        help="SAM-format checkpoint, folder or hub name; default: the one found in a folder of --data_root",
    )
    text = "side of SAM's input and of the masks, pixels; default: the checkpoint's own (1024 for SAM); lower it on OOM"
    add("--image_size", type=whole(16), help=text)
    add(
        "--lora_rank",
        type=whole(1),
        help="rank of the LoRA matrices in the language model; default: the checkpoint's, else 16",
    )
    add(
        "--lora_alpha",
        type=number(0, above=True),
        help="LoRA scale is alpha / rank; default: the checkpoint's, else 16",
    )
    add("--lora_dropout", type=number(0, 0.99), default=0.05, help="dropout before the LoRA matrices")
    text = "recompute activations: less memory, a third slower; left out: when one image needs it"
    add("--gradient_checkpointing", action=argparse.BooleanOptionalAction, help=text)

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch_size", type=whole(1), default=8, help="samples PER GPU and forward pass; lower it on OOM")
    add("--learning_rate", type=number(0, above=True), default=1e-4, help="base rate, before --lr_scaling")
    text = "multiply by world size, its root, or 1; with `none` and one effective batch, GPUs change only the time"
    add("--lr_scaling", choices=("linear", "sqrt", "none"), default="linear", help=text)
    add("--lr_schedule", choices=("constant", "cosine"), default="constant", help="after warm-up; cosine ends at 0")
    add("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up")
    add("--weight_decay", type=number(0), default=0.01, help="AdamW weight decay")
    add("--num_epochs", type=whole(1), default=20, help="passes over the training rows")
    add("--lambda_seg", type=number(0), default=1.0, help="weight of the mask loss (BCE + Dice)")
    add("--lambda_txt", type=number(0), default=0.5, help="weight of the answer's cross-entropy")

    add = parser.add_argument_group("output and evaluation").add_argument
    add("--checkpoint_dir", default="checkpoints", help="run folder: checkpoints, logs, figures, summary")
    add("--save_full_state", action="store_true", help="checkpoints hold the frozen weights too (14 GB for a 7B model)")
    add("--eval_split", choices=("train", "val", "test"), default="test", help="split that --eval_only takes")
    text = "with --eval_only: swap the questions of each picture's rows; Dice must fall if the model reads them"
    add("--shuffle_questions", action="store_true", help=text)
    add("--max_new_tokens", type=whole(1), default=64, help="longest generated answer, tokens")
    add("--predict", metavar="IMAGE", help="no training: write mask, overlay and answer for this picture")
    add("--question", help="the question for --predict")
    add_common_arguments(parser, {"learning_rate": "lr"})
    args = parse_arguments(parser, argv)
    args.source = value_sources(parser, args, argv)
    if args.eval_only or args.predict:
        take_from_run(parser, args, args.checkpoint_dir, ("data_root", "vlm_path", "sam_path"))
    if args.rehearse and args.data_root is None and args.vlm_path and args.sam_path:
        # config.json of both models is enough
        args.data_root = "."
    if args.data_root is None:
        less = ", or --vlm_path and --sam_path, of which config.json and tokenizer are enough" if args.rehearse else ""
        parser.error(f"--data_root: name the folder with the data{less}")
    if bool(args.predict) != bool(args.question):
        parser.error("--predict IMAGE and --question TEXT need each other")
    if args.overwrite and (args.resume_from or args.eval_only or args.predict):
        parser.error("--overwrite starts afresh and excludes --resume_from, --eval_only and --predict")
    if args.shuffle_questions and not args.eval_only:
        parser.error("--shuffle_questions tests a trained model and needs --eval_only")
    if not Path(args.data_root).is_dir():
        parser.error(f"{args.data_root}: no such folder; check --data_root")
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the heavy imports: --help and a mistyped flag answer at once

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import checkpoint_utils as ckpt
import distributed_utils as du
import fixed_order_utils
from hardware_utils import autocast, choose_precision, out_of_memory, set_numerics, smaller_batch, split_batch
from logging_utils import RunLog, save_figure, write_result
from loop_utils import (
    LossScaler,
    Step,
    TrainingRun,
    ValidatedProgress,
    agree_on_precision,
    clip_and_step,
    end_epoch,
    end_step,
    explain_out_of_memory,
    finish_run,
    keep_best,
    next_epoch,
    optimizer_steps,
    print_start,
    restore_training,
    resume,
    say_if_finished,
    say_where,
    seed_ranks,
    sync_gradients,
)
from memory_utils import BatchSize, auto_batch_advice, batch_flags, fit_batch_to_memory, fits_by_itself
from tasks.prs_med.data import (
    SPLITS,
    PositionData,
    Reader,
    check_pairs,
    check_splits,
    count_rows,
    fits_in_memory,
    inspect_files,
    open_picture,
    position_in,
    position_of,
    read_annotations,
    swap_questions,
)
from tasks.prs_med.memory import fold_relative_positions, recompute_lora_dropout, use_fixed_order
from tasks.prs_med.report import draw_inputs, draw_predictions, print_data_check, print_metrics, write_prediction

# --- model ------------------------------------------------------------------------------------------------------------


class MaskDecoder(nn.Module):
    """Fusion and decoder of PRS-Med: image tokens attend to the prompt's words, then convolutions up to 4x SAM's grid.

    dim is the SAM encoder's output width (256): text MLP D -> 2 dim -> dim, 8 heads, convolutions dim -> dim/2 ->
    dim/4. GroupNorm, not BatchNorm, whose statistics would depend on the number of GPUs.
    """

    def __init__(self, text_dim: int, dim: int):
        super().__init__()
        self.text = nn.Sequential(nn.Linear(text_dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.LayerNorm(dim))
        self.attention = nn.MultiheadAttention(dim, 8, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.encoder = nn.TransformerEncoderLayer(dim, 8, 4 * dim, dropout=0.0, activation="gelu", batch_first=True)

        def block(inside: int, outside: int) -> list[nn.Module]:
            return [
                nn.Conv2d(inside, outside, 3, padding=1),
                nn.GroupNorm(8, outside),
                nn.GELU(),
                nn.Upsample(scale_factor=2),
            ]

        last = nn.Conv2d(dim // 4, 1, 3, padding=1)
        self.convolutions = nn.Sequential(*block(dim, dim // 2), *block(dim // 2, dim // 4), last)

    def forward(self, features: torch.Tensor, words: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """features (B, dim, h, w), words (B, Q, D), padding (B, Q) True where there is none -> logits (B, 1, 4h,
        4w)."""
        tokens, text = features.flatten(2).transpose(1, 2), self.text(words)
        attended = self.attention(tokens, text, text, key_padding_mask=padding, need_weights=False)[0]
        tokens = self.encoder(self.norm(tokens + attended))
        return self.convolutions(tokens.transpose(1, 2).unflatten(2, features.shape[2:]))


class PRSMed(nn.Module):
    """Frozen VLM with LoRA, SAM vision encoder trained in full, mask decoder. One forward pass gives mask and
    answer."""

    def __init__(self, vlm: nn.Module, sam: nn.Module, reader: Reader):
        super().__init__()
        self.vlm, self.sam, self.reader = vlm, sam, reader
        self.decoder = MaskDecoder(vlm.config.text_config.hidden_size, sam.config.output_channels)
        for name, statistics in reader.statistics.items():  # each encoder has its own normalisation
            for kind, values in zip(("mean", "std"), statistics, strict=True):
                self.register_buffer(f"{name}_{kind}", torch.tensor(values).view(3, 1, 1), persistent=False)

    def train(self, mode: bool = True) -> "PRSMed":
        super().train(mode)
        self.vlm.model.vision_tower.eval()
        return self

    def vlm_pixels(self, pictures: torch.Tensor) -> torch.Tensor:
        return ((pictures / 255 - self.vlm_mean) / self.vlm_std).to(self.vlm.dtype)

    def forward(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask logits (B, image_size, image_size) and the answer's cross-entropy summed over its tokens (B,), both
        fp32.

        The mask reads hidden states of prompt positions, which by causality know nothing of the answer behind them.
        """
        with torch.no_grad():
            pixels = self.vlm_pixels(batch["vlm"])
            seen = self.vlm.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        first, last = len(self.reader.before), len(self.reader.before) + self.reader.image_tokens
        words = self.vlm.get_input_embeddings()(batch["ids"])
        embeddings = torch.cat([words[:, :first], torch.stack(list(seen)).to(words.dtype), words[:, last:]], dim=1)
        length = embeddings.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=words.device).tril().expand(len(words), 1, -1, -1)
        # given ready-made, or transformers looks into the batch for packed sequences, which waits for the GPU
        model = self.vlm.model.language_model
        hidden = model(inputs_embeds=embeddings, attention_mask=causal, use_cache=False).last_hidden_state

        def at(places: torch.Tensor) -> torch.Tensor:
            return hidden.gather(1, places.clamp_min(0)[..., None].expand(-1, -1, hidden.shape[2]))

        logits = self.vlm.lm_head(at(batch["answer_at"])).float().transpose(1, 2)
        text_loss = F.cross_entropy(logits, batch["answer"], ignore_index=-100, reduction="none").sum(1)
        features = self.sam((batch["sam"] / 255 - self.sam_mean) / self.sam_std).last_hidden_state
        masks = self.decoder(features, at(batch["words"]).to(features.dtype), batch["words"] < 0)
        size = (self.reader.image_size, self.reader.image_size)
        return fixed_order_utils.interpolate(masks.float(), size)[:, 0], text_loss

    @torch.no_grad()
    def answer(self, batch: dict, max_new_tokens: int) -> list[str]:
        """Greedy answers to the prompts of a batch, from the picture and the question alone."""
        # the prompts without their answers, padded on the left
        longest = max(batch["prompt_length"])
        lengths = torch.tensor(batch["prompt_length"], device=batch["ids"].device)
        places = torch.arange(longest, device=lengths.device) - (longest - lengths)[:, None]
        mask = (places >= 0).long()
        ids = batch["ids"].gather(1, places.clamp_min(0)).masked_fill(places < 0, self.reader.pad)
        end = {"pad_token_id": self.reader.pad, "eos_token_id": self.reader.tokenizer.eos_token_id}
        pixels = self.vlm_pixels(batch["vlm"])
        out = self.vlm.generate(
            input_ids=ids,
            attention_mask=mask,
            pixel_values=pixels,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            **end,
        )
        texts = self.reader.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        return [text.strip() for text in texts]


def find_pretrained(root: Path, given: str | None, kinds: tuple[str, ...], missing: str) -> tuple[str, str]:
    """(path or hub name, model type) of the checkpoint given, or of the one found in a folder of the data root."""
    from transformers import PretrainedConfig

    if given is None:
        for file in sorted(root.glob("*/config.json")):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                kind = json.loads(file.read_text()).get("model_type")
                if kind in kinds:
                    return str(file.parent), kind
        raise InputError(f"{root}: no {kinds[0]} checkpoint in a folder of it; {missing}")
    try:
        if not Path(given).exists() and given.count("/") != 1:
            raise OSError("no such folder")
        kind = PretrainedConfig.get_config_dict(given)[0].get("model_type")
    except (OSError, ValueError) as error:
        raise InputError(f"{given}: cannot be loaded ({str(error).splitlines()[0][:150]}); {missing}") from None
    if kind not in kinds:
        raise InputError(f"{given}: is a {kind!r} checkpoint, not {' or '.join(kinds)}; {missing}")
    return given, kind


def build_model(args: argparse.Namespace, precision: str, ranks: du.Ranks) -> PRSMed:
    """Load both checkpoints, add LoRA to the language model, freeze the rest of the VLM. Raises InputError."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoTokenizer, LlavaForConditionalGeneration, SamModel, SamVisionModel, utils
    from transformers.image_processing_base import ImageProcessingMixin

    utils.logging.set_verbosity_error()
    utils.logging.disable_progress_bar()
    vlm_path, _ = find_pretrained(Path(args.data_root), args.vlm_path, ("llava",), NO_VLM)
    sam_path, sam_kind = find_pretrained(Path(args.data_root), args.sam_path, ("sam", "sam_vision_model"), NO_SAM)
    # args.yaml and the banner name those that were found, too
    args.vlm_path, args.sam_path = vlm_path, sam_path
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    place = {"device_map": {"": ranks.device}} if ranks.device.type == "cuda" else {}  # no 7B per rank in host memory
    loading = vlm_path
    try:
        vlm = LlavaForConditionalGeneration.from_pretrained(vlm_path, dtype=dtype, **place)
        tokenizer = AutoTokenizer.from_pretrained(vlm_path)
        processors = {"vlm": ImageProcessingMixin.get_image_processor_dict(vlm_path)[0]}
        loading = sam_path
        sam = {"sam": SamModel, "sam_vision_model": SamVisionModel}[sam_kind].from_pretrained(
            sam_path, dtype=torch.float32
        )
        sam = sam.vision_encoder
        processors["sam"] = ImageProcessingMixin.get_image_processor_dict(sam_path)[0]
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = str(error).splitlines()[0][:150] if str(error) else type(error).__name__
        raise InputError(f"{loading}: checkpoint cannot be loaded ({reason}); download it again") from None
    patch, size = sam.config.patch_size, args.image_size or sam.config.image_size
    if size % patch:
        raise InputError(
            f"--image_size {size}: not a multiple of the encoder's patch; try {size // patch * patch or patch}"
        )
    if size != sam.config.image_size and sam.pos_embed is not None:  # the model adapts its relative positions by itself
        grid = F.interpolate(sam.pos_embed.data.permute(0, 3, 1, 2), (size // patch, size // patch), mode="bicubic")
        sam.pos_embed = nn.Parameter(grid.permute(0, 2, 3, 1).contiguous())
    sam.patch_embed.image_size = (size, size)
    if ranks.device.type == "cpu" and torch.get_num_threads() > 1:
        use_fixed_order(sam)
    torch.manual_seed(args.seed)  # the same LoRA and decoder on every rank
    targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    lora = LoraConfig(
        r=args.lora_rank, lora_alpha=args.lora_alpha, lora_dropout=args.lora_dropout, target_modules=targets
    )
    vlm = inject_adapter_in_model(lora, vlm)
    for module in vlm.modules():
        # or each LoRA layer keeps an fp32 copy of its input, which autocast lowers again
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
    for name, parameter in vlm.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    side = vlm.config.vision_config.image_size
    with torch.no_grad():  # how many tokens a picture takes depends on the kind of vision tower: ask it
        blank = torch.zeros(1, 3, side, side, dtype=dtype, device=vlm.device)
        image_tokens = len(vlm.model.get_image_features(pixel_values=blank, return_dict=True).pooler_output[0])
    model = PRSMed(vlm, sam, Reader(tokenizer, vlm.config, processors, size, image_tokens)).to(ranks.device)
    if ranks.device.type == "cuda":
        fold_relative_positions(model.sam)
        recompute_lora_dropout(model.vlm)
        model.sam.to(memory_format=torch.channels_last)
        model.decoder.to(memory_format=torch.channels_last)
    model.base = {"name": Path(vlm_path).name, "fingerprint": fingerprint(model)}
    model.base |= {"lora_rank": args.lora_rank, "lora_alpha": args.lora_alpha, "image_size": size}
    if args.gradient_checkpointing:
        recompute_activations(model)
    return model


def recompute_activations(model: PRSMed) -> None:
    """--gradient_checkpointing: both encoders' activations are computed again in the backward pass."""
    for part in (model.vlm, model.sam):
        part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def fingerprint(model: nn.Module) -> torch.Tensor:
    """fp32 vector of up to 16 values of every frozen tensor, which tell one base from another in any precision."""
    frozen = [parameter.detach().flatten() for parameter in model.parameters() if not parameter.requires_grad]
    places = [torch.arange(min(16, len(flat))) * (len(flat) - 1) // 15 for flat in frozen]
    return torch.cat([flat[at.to(flat.device)].float().cpu() for flat, at in zip(frozen, places, strict=True)])


def check_same_base(model: PRSMed) -> None:
    """All ranks: InputError unless all have loaded the same frozen weights, which DDP does not send to them."""
    ours = model.base["fingerprint"]
    others = du.gather_objects(ours)
    if any(other.numpy().tobytes() != ours.numpy().tobytes() for other in others):
        raise InputError("--vlm_path: the processes have loaded different weights; give every node the same files")


def adopt_architecture(args: argparse.Namespace, contents: dict | None) -> None:
    """Fill in --lora_rank, --lora_alpha and --image_size from a checkpoint. Raises InputError where a flag differs."""
    saved = contents["base"] if contents else {"lora_rank": 16, "lora_alpha": 16.0, "image_size": args.image_size}
    for name in ("lora_rank", "lora_alpha", "image_size"):
        if getattr(args, name) not in (None, saved[name]):
            if not contents:
                continue
            raise InputError(
                f"--resume_from: checkpoint of another model, trained with --{name} {saved[name]}; give that"
            )
        setattr(args, name, saved[name])


def load_weights(model: PRSMed, contents: dict) -> None:
    """Put a checkpoint's weights into the model. Raises InputError for another model or another frozen base."""
    theirs, ours = contents["base"]["fingerprint"], model.base["fingerprint"]
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=2**-7, atol=1e-6, equal_nan=True):
        name = contents["base"]["name"]
        raise InputError(f"--vlm_path: not the base that the checkpoint was trained on ({name}); give that one")
    ckpt.load_trained(model, contents["model"])


# --- loss -------------------------------------------------------------------------------------------------------------


def mask_loss(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """BCE + Dice loss of each sample: (B, H, W) logits and bool masks -> (B,)."""
    target, probability = masks.float(), logits.sigmoid()
    bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean((1, 2))
    overlap = (2 * (probability * target).sum((1, 2)) + 1) / (probability.sum((1, 2)) + target.sum((1, 2)) + 1)
    return bce + 1 - overlap


def batch_loss(
    model: nn.Module, batch: dict, samples: int, tokens: float, precision: str, args: argparse.Namespace
) -> torch.Tensor:
    """(loss, mask part, text part): a micro-batch's share of the means over the global batch.

    samples, tokens: images and answer tokens of the global batch.
    """
    with autocast(batch["sam"].device, precision):
        logits, text = model(batch)
    seg = mask_loss(logits, batch["mask"]).sum() / samples
    txt = text.sum() / tokens
    loss = args.lambda_seg * seg + args.lambda_txt * txt

    # a non-finite loss must give non-finite gradients, which DDP carries to every rank: all skip the step together
    return torch.stack([loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan), seg, txt])


# --- training ---------------------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """Fused AdamW over what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)


def count_answer_tokens(step: Step) -> list[float]:
    """Tokens of the answers in this rank's share of a step."""
    return [float(sum(int((batch["answer"] >= 0).sum()) for batch in step.batches))]


def train_one_epoch(
    model: nn.Module, loader, optimizer, scaler: LossScaler, training: TrainingRun, args: argparse.Namespace
) -> None:
    """Train from the run's position to the end of the epoch, of the run, or to a stop signal.

    model: PRSMed, or DDP around it. Between log lines nothing is read back from the GPU. Raises InputError on all ranks
    for an unusable image of any.
    """
    model.train()
    world_size = du.world()[1]
    device = next(model.parameters()).device
    base_lr = du.scale_learning_rate(args.learning_rate, world_size, args.lr_scaling)
    for step in optimizer_steps(loader, training, count=count_answer_tokens):
        factor = du.schedule(training.progress.step, training.planned_steps, args.warmup_steps, args.lr_schedule)
        lr = base_lr * factor

        # forward and backward: each micro-batch gives its share of the mean over the global batch
        losses = torch.zeros(3, device=device)
        for batch, last in step.micro_batches():
            batch = du.to_device(batch, device)
            with training.log.count_flops(step.samples), sync_gradients(model, now=last):
                parts = batch_loss(model, batch, step.samples, step.totals[0], scaler.precision, args) * step.weight
                # DDP averages over the ranks; these are shares of a sum, so undo the division
                scaler.scale(parts[0] * world_size).backward()
            losses += parts.detach()

        # update the weights; a non-finite gradient skips the step on all ranks together
        grad_norm = clip_and_step(optimizer, scaler, args.grad_clip, lr)
        end_step(training, step, losses, grad_norm, lr)


# --- evaluation -------------------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """One row of an evaluation: `seg` and `txt` are its mask loss and its text loss, summed over `tokens`."""

    index: int
    dice: float
    iou: float
    position_accuracy: bool | None
    position_accuracy_mask: bool | None
    seg: float
    txt: float
    tokens: float


@torch.no_grad()
def evaluate(
    model: PRSMed, data: PositionData, split: str, batch_size: int, precision: str, args: argparse.Namespace
) -> tuple[dict[str, float], list[tuple]]:
    """Metrics of a split and a few images to show, the same on every rank and for any number of ranks.

    dice, iou: means over rows at image_size (1 when both masks are empty), also per modality. position_accuracy: the
    GENERATED answer names the position computed from the true mask; position_accuracy_mask: the predicted mask lies
    there. loss, loss_seg, loss_txt: as in training, over the whole split. text_loss: another name of loss_txt.
    """
    model.eval()
    device = model.vlm_mean.device
    loader = du.create_distributed_dataloader(
        data, batch_size, train=False, num_workers=0 if data.keep else args.num_workers, collate_fn=data.reader.collate
    )
    local: list[Scores] = []
    shown, error = {}, ""
    for batch in loader:
        error = error or batch["error"]
        batch = du.to_device(batch, device)
        with autocast(device, precision):
            logits, text = model(batch)
            answers = model.answer(batch, args.max_new_tokens)
        predicted, target = logits > 0, batch["mask"]
        both, either = (predicted & target).sum((1, 2)), (predicted | target).sum((1, 2))
        tokens = (batch["answer"] >= 0).sum(1)
        numbers = torch.stack([both, either, mask_loss(logits, target), text, tokens], 1).double().cpu().tolist()
        masks = predicted.cpu().numpy()
        for k, (i, truth, (inter, union, seg, txt, count)) in enumerate(
            zip(batch["index"], batch["position"], numbers, strict=True)
        ):
            dice, iou = (2 * inter / (inter + union), inter / union) if union else (1.0, 1.0)
            right = (position_in(answers[k]) == truth, position_of(masks[k]) == truth) if truth else (None, None)
            local.append(Scores(i, dice, iou, *right, seg, txt, count))
            if i in {n * (len(data) - 1) // 8 for n in range(9)}:
                shown[i] = (
                    data.rows[i],
                    batch["sam"][k].cpu().numpy(),
                    masks[k],
                    target[k].cpu().numpy(),
                    answers[k],
                    dice,
                )
    with du.agree_on_errors():
        if error:
            raise InputError(error)
    # in row order, so that sums do not depend on the ranks
    scores = sorted(row for part in du.gather_objects(local) for row in part)
    metrics = split_losses(scores, split, args)
    for modality in ["", *sorted({row.modality for row in data.rows})]:
        chosen = [row for row in scores if modality in ("", data.rows[row.index].modality)]
        for name in ("dice", "iou", "position_accuracy", "position_accuracy_mask"):
            # an empty mask has no position
            if values := [getattr(row, name) for row in chosen if getattr(row, name) is not None]:
                metrics[f"{split}/{name}/{modality}".rstrip("/")] = sum(values) / len(values)
    images = {i: image for part in du.gather_objects(shown) for i, image in part.items()}
    return metrics, [images[i] for i in sorted(images)][:9]


def split_losses(scores: list[Scores], split: str, args: argparse.Namespace) -> dict[str, float]:
    """The losses of training over a split: the mask part over its rows, the text part over their answer tokens."""
    seg = sum(row.seg for row in scores) / len(scores)
    txt = sum(row.txt for row in scores) / sum(row.tokens for row in scores)
    loss = args.lambda_seg * seg + args.lambda_txt * txt
    return {f"{split}/loss": loss, f"{split}/loss_seg": seg, f"{split}/loss_txt": txt, f"{split}/text_loss": txt}


def predict(model: PRSMed, precision: str, args: argparse.Namespace, ranks: du.Ranks) -> None:
    """--predict: the mask at the image's size, an overlay and the answer, in <checkpoint_dir>/predictions."""
    try:
        image = open_picture(args.predict)
    except Exception as error:
        raise InputError(f"{args.predict}: not a readable image ({error}); check --predict") from None
    model.eval()
    prompt, end = model.reader.tokens(args.question, "")
    sam, vlm = model.reader.picture(image)
    item = {"index": 0, "sam": sam, "vlm": vlm, "mask": sam[0] > 255, "position": None, "error": ""}
    item |= {"prompt": prompt, "answer": end}
    batch = du.to_device(model.reader.collate([item]), ranks.device)
    with torch.no_grad(), autocast(ranks.device, precision):
        logits, answer = model(batch)[0], model.answer(batch, args.max_new_tokens)[0]
    native = F.interpolate(logits[None], (image.height, image.width), mode="bilinear", align_corners=False)
    mask = native[0, 0].cpu().numpy() > 0
    if ranks.is_main:
        print(f"{answer}\nmask: {mask.mean():.1%} of the image, position {position_of(mask)}", flush=True)
    stem = Path(args.checkpoint_dir) / "predictions" / Path(args.predict).stem
    with du.agree_on_errors():
        if ranks.is_main:
            try:
                write_prediction(stem, image, mask, f"{args.question}\n{answer}\n")
            except OSError as error:
                reason = error.strerror or error
                raise InputError(f"{stem}: not written ({reason}); choose another --checkpoint_dir") from None
            print(f"written: {stem}_mask.png, _overlay.png, .txt", flush=True)


# --- the run ----------------------------------------------------------------------------------------------------------


def largest_batch(batch_size: int, reader: Reader, prompt_tokens: int, answer_tokens: int) -> dict:
    """A made-up batch, on the host, of rows whose prompt and answer have so many tokens."""
    sizes = {"sam": reader.image_size, "vlm": reader.vlm_size}
    item = {name: torch.zeros(3, side, side, dtype=torch.uint8) for name, side in sizes.items()}
    item["mask"] = torch.zeros(reader.image_size, reader.image_size, dtype=torch.bool)
    item |= {"prompt": [reader.pad] * prompt_tokens, "answer": [reader.pad] * answer_tokens}
    item |= {"index": 0, "position": None, "error": ""}
    return reader.collate([item] * batch_size)


def trial_step(model: PRSMed, batch: dict, precision: str, args: argparse.Namespace) -> None:
    """Forward and backward pass of one micro-batch, as in training; the gradients stay in the model."""
    batch = du.to_device(batch, model.vlm_mean.device)
    images, tokens = len(batch["index"]), batch["answer"].numel()
    batch_loss(model.train(), batch, images, tokens, precision, args)[0].backward()


def longest_tokens(reader: Reader, rows: list) -> tuple[int, int]:
    """(tokens of the longest prompt, tokens of the longest answer) of some rows."""
    tokens = [reader.tokens(row.question, row.answer) for row in rows]
    return max(len(prompt) for prompt, _ in tokens), max(len(answer) for _, answer in tokens)


def choose_batch_size(
    model: PRSMed, data: PositionData, checkpoint: dict | None, precision: str, args: argparse.Namespace
) -> BatchSize:
    """The batch of the flags, or what a step of the longest rows leaves room for; recomputation where no flag
    decided."""
    source = args.source["batch_size"]
    recomputed = bool(args.gradient_checkpointing)
    wanted = BatchSize(args.batch_size, args.gradient_accumulation_steps, source, recomputed)
    if not fits_by_itself(args.auto_batch, model.vlm_mean.device):
        return wanted
    longest = longest_tokens(data.reader, data.rows)

    def try_once(size: int) -> None:
        trial_step(model, largest_batch(size, data.reader, *longest), precision, args)

    undecided = args.gradient_checkpointing is None
    advice = "pass a smaller --image_size" if undecided else "pass --gradient_checkpointing or a smaller --image_size"
    recompute = partial(recompute_activations, model) if undecided else None
    return fit_batch_to_memory(try_once, model, wanted, batch_flags, advice, recompute=recompute, checkpoint=checkpoint)


def evaluate_only(
    model: PRSMed, data: PositionData, identity: dict, step: int, precision: str, args: argparse.Namespace
) -> None:
    """--eval_only: the metrics of one split, printed and written to eval_<split>[_shuffled].json, nothing else."""
    name = args.eval_split
    facts = {"step": step}
    if args.shuffle_questions:
        name = f"{name}_shuffled"
        data.rows, changed = swap_questions(data.rows, identity)
        facts |= {"rows": len(data), "rows_with_another_question": changed}
        du.print_main(f"{changed} of {len(data)} rows ask another question about their picture")
    metrics, shown = evaluate(model, data, args.eval_split, args.batch_size, precision, args)
    if du.world()[0] == 0:
        print_metrics(name, metrics, count_rows(data.rows))
        run_folder = Path(args.checkpoint_dir)
        text = json.dumps({**metrics, **facts}, indent=2) + "\n"
        write_result(run_folder / f"eval_{name}.json", text.encode())
        save_figure(run_folder / "figures" / f"{name}_predictions.png", draw_predictions(shown))


def read_rows(args: argparse.Namespace, ranks: du.Ranks) -> tuple[list, dict]:
    """All ranks: (the annotations' rows, {image: digest of its content} where it was read).

    Raises InputError for a split without rows, an unreadable image, or one patient in two splits.
    """
    root = Path(args.data_root)
    rows: list = []
    identity: dict = {}
    with du.agree_on_errors():
        rows = [] if args.predict else read_annotations(root, args.annotations, args.skip_bad_rows)
        needed = args.eval_split if args.eval_only else "train"
        if not args.predict and not any(row.split == needed for row in rows):
            raise InputError(f"{root}: no rows in split {needed!r}; correct the CSVs or choose another --eval_split")
    if rows and not args.skip_data_check:
        files = inspect_files(rows, ranks)
        findings = check_pairs(rows, files)
        identity = {row.image: files[row.image].digest for row in rows}
        if ranks.is_main:
            print_data_check(len(rows), findings)
    check_splits(rows, identity)
    return rows, identity


def run(args: argparse.Namespace, ranks: du.Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun = time.time()
    run_folder = Path(args.checkpoint_dir)
    precision, why = agree_on_precision(partial(choose_precision, args.mixed_precision, ranks.device))
    why = set_numerics(ranks.device, precision, why, args.deterministic)
    rows, identity = read_rows(args, ranks)

    # the run folder is ours from here on, where this is a training
    apply_only = bool(args.eval_only or args.predict)
    lock = None
    if not apply_only:
        lock = ckpt.lock_run_folder(run_folder, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
    resume_from = args.resume_from or (str(run_folder / "best.pt") if apply_only else None)
    checkpoint = ckpt.load_checkpoint(resume_from, run_folder, FORMAT, resume=not apply_only)
    if apply_only and checkpoint is None:
        raise InputError(f"{run_folder}: no checkpoint to use; give one with --resume_from")

    adopt_architecture(args, checkpoint)
    with du.agree_on_errors():
        model = build_model(args, precision, ranks)
    check_same_base(model)
    with du.agree_on_errors():
        if checkpoint:
            load_weights(model, checkpoint)

    if args.predict:
        predict(model, precision, args, ranks)
        return 0
    keep = fits_in_memory(rows, model.reader, args.cache_gb)
    sets = {split: PositionData([row for row in rows if row.split == split], model.reader, keep) for split in SPLITS}
    if args.eval_only:
        evaluate_only(model, sets[args.eval_split], identity, checkpoint["step"], precision, args)
        return 0
    code = fit(model, sets, checkpoint, precision, why, args, ranks)
    du.print_main(f"{time.time() - begun:.0f} seconds in all")
    del lock
    return code


def describe_run(model: PRSMed, sets: dict, batch: BatchSize, why: str, args: argparse.Namespace) -> dict[str, str]:
    """The banner's rows of this script."""
    world_size = du.world()[1]
    lr = du.scale_learning_rate(args.learning_rate, world_size, args.lr_scaling)
    effective = batch.size * batch.accumulation * world_size
    decided = "one image did not fit without" if batch.recomputed and not args.gradient_checkpointing else ""
    sources = {name: args.source[name] for name in ("vlm_path", "sam_path")}
    found = {name: "found by itself" if source == "default" else source for name, source in sources.items()}
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    everything = sum(parameter.numel() for parameter in model.parameters())
    return {
        "batch": f"{batch.size} per GPU x {batch.accumulation} accumulation x {world_size} = {effective} "
        f"({batch.source})",
        "recomputation": f"{'on' if batch.recomputed else 'off'} ({decided or args.source['gradient_checkpointing']})",
        "learning rate": f"{args.learning_rate:g} -> {lr:g} ({args.lr_scaling}), {args.lr_schedule}",
        "precision": why,
        "rows": ", ".join(f"{len(data)} {split}" for split, data in sets.items()),
        "models": f"{args.vlm_path} ({found['vlm_path']}), {args.sam_path} ({found['sam_path']})",
        "loading": "pictures kept in memory" if sets["train"].keep else f"{args.num_workers} workers per GPU",
        "trained": f"{trained:,} of {everything:,} parameters",
    }


def wrap_model(model: PRSMed, ranks: du.Ranks) -> nn.Module:
    """DDP around the model where there are several processes."""
    if ranks.world_size == 1:
        return model
    # or rank 0 would send all 14 GB of frozen weights to the others, who have loaded the same file
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    DDP._set_params_and_buffers_to_ignore_for_model(model, frozen)
    return du.wrap_in_ddp(model, ranks.device)


def fit(
    model: PRSMed, sets: dict[str, PositionData], checkpoint: dict | None, precision: str, why: str, args, ranks
) -> int:
    """Train, validate each epoch, keep checkpoints, test the best; returns the exit code."""
    begun = time.time()
    run_folder = Path(args.checkpoint_dir)
    batch = choose_batch_size(model, sets["train"], checkpoint, precision, args)
    loader = du.create_distributed_dataloader(
        sets["train"],
        batch.size,
        seed=args.seed,
        num_workers=0 if sets["train"].keep else args.num_workers,
        accumulation=batch.accumulation,
        drop_last=False,
        collate_fn=model.reader.collate,
    )
    effective_batch_size = loader.batch_sampler.effective_batch_size
    planned_steps = args.num_epochs * loader.batch_sampler.steps_per_epoch()
    last_step = min(args.max_steps or planned_steps, planned_steps)

    # begin, or go on where the checkpoint stands
    optimizer = make_optimizer(model, args)
    scaler = LossScaler(ranks.device, precision)
    progress = ValidatedProgress()
    this_run = {"training_rows": len(sets["train"]), "effective_batch_size": effective_batch_size, "seed": args.seed}
    seed_ranks(args.seed)
    if checkpoint:
        resume(progress, checkpoint, this_run, run_folder)
        restore_training(checkpoint, optimizer, scaler, args.weight_decay)

    def contents() -> dict:
        return {
            "format": FORMAT,
            "base": model.base,
            "model": ckpt.trained_state(model, args.save_full_state),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "run": this_run,
            "precision": precision,
            "split": batch.record(),
        }

    log = RunLog(run_folder, ranks, LOSSES, last_step, args.log_every, precision, args.compile)
    log.open(args, checkpoint)
    log.curves = [f"val/{name}" for name in CURVES]
    training = TrainingRun(
        run_folder=run_folder,
        progress=progress,
        last_step=last_step,
        planned_steps=planned_steps,
        effective_batch_size=effective_batch_size,
        precision=precision,
        log=log,
        contents=contents,
        save_every=args.save_every,
        keep_last=args.keep_last,
        max_bad_steps=args.max_bad_steps,
    )
    ckpt.prepare_checkpoint(model)
    print_start("PRS-Med", ranks, training, describe_run(model, sets, batch, why, args))
    if args.compile:
        model.compile()

    advice = partial(out_of_memory_advice, batch.size, batch.accumulation, args, ranks)
    with training.stop, contextlib.closing(log), explain_out_of_memory(advice):
        wrapped = wrap_model(model, ranks)
        code, best_images = train(model, wrapped, loader, optimizer, scaler, training, sets, args)
        if code:
            return code
        test_best(model, sets, training, batch.size, args)
        if best_images:
            log.figures(lambda: {"val_predictions": draw_predictions(best_images)}, progress.step)
        finish_run(training, begun, progress.best_metrics if len(sets["val"]) else {})
        ckpt.export_weights(ckpt.trained_state(model, args.save_full_state), run_folder / "model.safetensors")
        say_where(run_folder)
    return 0


def train(
    model: PRSMed, wrapped: nn.Module, loader, optimizer, scaler, training: TrainingRun, sets: dict, args
) -> tuple[int, list]:
    """All epochs, each with its validation; (exit code of a stop signal or 0, images of the best validation)."""
    progress = training.progress
    best_images: list = []
    say_if_finished(training, "--num_epochs")
    if progress.step == 0:
        training.log.figures(lambda: {"inputs": draw_inputs(sets["train"])}, 0)
    while True:
        train_one_epoch(wrapped, loader, optimizer, scaler, training, args)
        if code := end_epoch(training):
            return code, []
        if len(sets["val"]):
            metrics, images = evaluate_and_log(
                model, sets["val"], "val", training, loader.batch_sampler.batch_size, args
            )
            loss, dice = metrics["val/loss"], metrics["val/dice"]
            du.print_main(f"epoch {progress.epoch + 1}: val loss {loss:.4f}, dice {dice:.4f}")
            epoch_complete = progress.samples >= loader.batch_sampler.used
            if keep_best(training, dice, epoch_complete):
                progress.best_metrics = metrics
                best_images = images
        if not next_epoch(training):
            return 0, best_images


def evaluate_and_log(
    model: PRSMed, data: PositionData, split: str, training: TrainingRun, batch_size: int, args: argparse.Namespace
) -> tuple[dict[str, float], list[tuple]]:
    """What evaluate gives, in the log; its figure, too, but not that of every short epoch."""
    metrics, images = evaluate(model, data, split, batch_size, training.precision, args)
    progress = training.progress
    training.log.write(progress.step, progress.epoch + 1, metrics)
    seconds_apart = 0 if split == "test" else 60
    training.log.figures(lambda: {f"{split}_predictions": draw_predictions(images)}, progress.step, seconds_apart)
    return metrics, images


def test_best(model: PRSMed, sets: dict, training: TrainingRun, batch_size: int, args: argparse.Namespace) -> None:
    """Load best.pt and print its metrics of the validation and test splits."""
    if len(sets["val"]):
        load_weights(model, ckpt.load_checkpoint(str(training.run_folder / "best.pt"), training.run_folder, FORMAT))
    for split in ("val", "test"):
        if not len(sets[split]):
            continue
        # best.pt was evaluated and logged when it was chosen
        metrics = training.progress.best_metrics if split == "val" else None
        if metrics is None:
            metrics, _ = evaluate_and_log(model, sets[split], split, training, batch_size, args)
            if split == "val":
                training.progress.best_metrics = metrics
        if du.world()[0] == 0:
            print_metrics(f"{split}, best.pt", metrics, count_rows(sets[split].rows))


def rehearse(args: argparse.Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step, of the longest rows where the annotations are there."""
    import rehearsal_utils as rehearsal

    processes = rehearsal.processes_to_plan_for(args.world_size)
    memory = rehearsal.memory_to_plan_for(args.gpu_memory)
    accumulation = args.gradient_accumulation_steps
    there = (Path(args.data_root) / "annotations").is_dir()
    rows = read_annotations(Path(args.data_root), args.annotations, args.skip_bad_rows) if there else []
    trace = rehearsal.Trace()
    with rehearsal.imaginary_gpu(trace) as ranks, rehearsal.random_weights(ranks.device):
        precision, _ = choose_precision(args.mixed_precision, ranks.device)
        set_numerics(ranks.device, precision, "", args.deterministic)
        adopt_architecture(args, None)
        with ranks.device:
            model = build_model(args, precision, ranks)
        longest = longest_tokens(model.reader, rows) if rows else (model.reader.image_tokens + 64, 64)
        batch = largest_batch(args.batch_size, model.reader, *longest)
        trial = partial(trial_step, model, batch, precision, args)
        optimizer = make_optimizer(model, args)
        step = rehearsal.rehearse_step(trace, model, optimizer, trial, accumulation, processes)

    def words(samples: int) -> str:
        return batch_flags(*smaller_batch(args.batch_size, accumulation, samples))

    otherwise = "a smaller --image_size" if args.gradient_checkpointing else "--gradient_checkpointing"
    title = f"PRS-Med, {args.batch_size} per GPU x {accumulation} accumulation, {sum(longest)} tokens"
    title += f", {precision}, activations {'recomputed' if args.gradient_checkpointing else 'kept'}"
    rehearsal.report_rehearsal(title, step, args.batch_size, memory, words, otherwise)
    rehearsal.end_rehearsal()


def out_of_memory_advice(size: int, accumulation: int, args: argparse.Namespace, ranks: du.Ranks) -> str:
    """The flags that take less memory than this batch."""
    smaller = batch_flags(*split_batch(size, accumulation))
    otherwise = "--gradient_checkpointing or a smaller --image_size" + auto_batch_advice(args.auto_batch, ranks.device)
    return f"--batch_size {size}; try {smaller} (the same result), {otherwise}"


def main(args: argparse.Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    du.launch_workers(args.world_size or 1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with du.setup_distributed(timeout=args.dist_timeout) as ranks:
        asked = args.batch_size, args.gradient_accumulation_steps
        with explain_out_of_memory(partial(out_of_memory_advice, *asked, args, ranks)):
            return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
