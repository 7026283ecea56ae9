"""MIMIC-CXR questions + CheXpert: a chest X-ray and a question in, an answer and 14 labels out (guide 1).

    ./launch_distributed_training.sh --config configs/default_config.yaml          # every GPU, settings found by itself
    python train_mimic_cxr.py --config configs/default_config.yaml                 # one GPU, or CPU
    deepspeed --num_gpus=4 train_mimic_cxr.py --config configs/default_config.yaml --use_deepspeed
    torchrun --nproc_per_node=4 train_mimic_cxr.py --config configs/default_config.yaml --use_ddp
    torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=<node0_ip> --master_port=29500 \\
        train_mimic_cxr.py --config configs/default_config.yaml               # node 0 of 2; --node_rank=1 on node 1
    python train_mimic_cxr.py --config configs/default_config.yaml --eval_only --resume_from runs/mimic_cxr/best.pt

Data: MIMIC-CXR-JPG 2.1.0 (--mimic_cxr_path) and MIMIC-Ext-CXR-QBA 1.0.0 (--mimic_qa_path) as they are downloaded. The
report-derived scene graph is never an input: the answers come from the same report.
"""

import argparse
import contextlib
import json
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cli_utils import InputError, Parser, add_common_arguments, number, parse_arguments, run_main, take_from_run
from cli_utils import value_sources, whole
from tasks.mimic_cxr.guide_keys import FLAG_SOURCES, SECTIONS, add_guide_keys, take_guide_keys, translate_guide_keys

FORMAT = "mimic_cxr/1"
LOSSES = ["loss", "loss_vqa", "loss_chexpert", "grad_norm", "skipped"]
# What --eval_only takes from the run's args.yaml where no flag says otherwise.
OF_THE_RUN = ("mimic_cxr_path", "mimic_qa_path", "index_dir", "image_encoder", "text_encoder", "quality_grade", "view")
OF_THE_RUN += ("image_size", "fusion_layers", "max_question_length", "chexpert_uncertain", "max_samples", "max_missing")
DEBUG = {"max_samples": 64, "max_steps": 2, "num_workers": 0, "log_every": 1, "warmup_steps": 0}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument_group("data").add_argument
    grades = ("A++", "A+", "A", "B", "C", "D", "all")
    views = ("frontal", "PA", "AP", "lateral")
    uncertain = ("ignore", "positive", "negative", "soft")
    add("--mimic_cxr_path", default="data/mimic-cxr-jpg", help="MIMIC-CXR-JPG: folder with files/ and three .csv.gz")
    add("--mimic_qa_path", default="data/mimic-ext-cxr-qba", help="MIMIC-Ext-CXR-QBA: folder with metadata/ and qa/")
    add("--index_dir", default="runs/index", help="index of questions (3 GB), shared by all runs and all nodes")
    add("--quality_grade", choices=grades, default="B", help="questions of this grade or better; all: unrated ones too")
    add("--view", choices=views, default="frontal", help="image of a study; frontal: PA, else AP")
    add("--chexpert_uncertain", choices=uncertain, default="ignore", help="label -1 in training; soft: 0.5")
    add("--max_samples", type=whole(0), default=0, help="questions of each split, evenly spaced; 0: all")
    add("--max_missing", type=whole(0), default=0, help="image files that may be missing; more are an error")
    add("--image_size", type=whole(32), default=224, help="side of the square input, pixels; lower it on OOM")
    add("--cache_gb", type=number(0), default=16.0, help="GiB of DISK for decoded images, for all ranks; 0: none")

    add = parser.add_argument_group("model").add_argument
    add("--image_encoder", default="facebook/convnext-base-224", help="Hugging Face folder or hub name")
    add("--text_encoder", default="emilyalsentzer/Bio_ClinicalBERT", help="Hugging Face folder or hub name")
    add("--fusion_layers", type=whole(1), default=2, help="layers in which the question attends to the image")
    add("--dropout", type=number(0, 0.99), default=0.1, help="in the text encoder, the fusion layers and the heads")
    add("--max_question_length", type=whole(4), default=128, help="tokens; longer questions are cut")
    add("--freeze_image", action="store_true", help="do not train the image encoder (saves memory)")
    add("--freeze_text", action="store_true", help="do not train the text encoder (saves memory)")
    text = "recompute activations: less memory, a third slower; left out: when needed"
    add("--gradient_checkpointing", action=argparse.BooleanOptionalAction, help=text)
    add("--pretrained_weights", metavar="FILE", help="another run's model.safetensors to start from")

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch_size", type=whole(1), default=16, help="questions PER GPU and forward pass; lower it on OOM")
    add("--epochs", type=whole(1), default=20, help="passes over the training questions")
    add("--learning_rate", type=number(0, above=True), default=1e-4, help="peak; not scaled with the GPUs")
    add("--lr_schedule", choices=("constant", "cosine"), default="cosine", help="after warm-up; cosine ends at 0")
    add("--warmup_steps", type=whole(0), default=500, help="optimizer steps of linear warm-up")
    add("--weight_decay", type=number(0), default=0.01, help="AdamW weight decay")
    add("--chexpert_weight", type=number(0), default=0.3, help="weight of the CheXpert loss beside the answers'")

    add = parser.add_argument_group("engine").add_argument
    add("--auto_optimize", action="store_true", default=True, help="batch, workers and checkpointing from the hardware")
    text = "take them from the file and the defaults (--auto_optimize: %(default)s)"
    add("--no_auto_optimize", dest="auto_optimize", action="store_false", help=text)
    add("--use_deepspeed", action="store_true", help="DeepSpeed ZeRO; --auto_optimize's choice for 2 or more processes")
    add("--use_ddp", action="store_true", help="torch DistributedDataParallel")
    add("--deepspeed_config", metavar="FILE", help="DeepSpeed's JSON, used as it is; left out: one of configs/")
    add("--prefetch_factor", type=whole(1), default=2, help="batches each worker prepares; lower it when RAM is short")

    add = parser.add_argument_group("output and evaluation").add_argument
    add("--output_dir", default="runs/mimic_cxr", help="run folder: checkpoints, logs, figures, summary")
    add("--eval_split", choices=("val", "test"), default="test", help="split that --eval_only takes")
    add("--save_predictions", action="store_true", help="write predictions_<split>.parquet beside the metrics")
    add("--debug", action="store_true", help="a trial: 64 questions a split, 2 steps, no network, no workers")
    add_common_arguments(parser, {"learning_rate": "lr"})
    add_guide_keys(parser)

    # a value's source decides whether something else may replace it
    args = parse_arguments(parser, argv, SECTIONS)
    args.source = value_sources(parser, args, argv, SECTIONS)
    take_guide_keys(args)
    if args.eval_only:
        take_from_run(parser, args, args.output_dir, OF_THE_RUN)
    check_flags(parser, args)
    if args.debug:
        set_flags(args, {name: value for name, value in DEBUG.items() if not is_given(args, name)}, "--debug")
        os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    return args


def check_flags(parser: Parser, args: argparse.Namespace) -> None:
    """Flags that exclude each other, and files that must be there."""
    if args.use_deepspeed and args.use_ddp:
        parser.error("--use_deepspeed and --use_ddp exclude each other; give one, or none to let the script choose")
    if args.overwrite and (args.resume_from or args.eval_only):
        parser.error("--overwrite starts afresh and excludes --resume_from and --eval_only")
    if is_given(args, "pretrained_weights") and (args.resume_from or args.eval_only):
        parser.error("--pretrained_weights starts a new run and excludes --resume_from and --eval_only")
    if is_given(args, "deepspeed_config") and args.use_ddp:
        parser.error("--deepspeed_config does not go with --use_ddp; leave one of them out")
    for name in ("mimic_cxr_path", "mimic_qa_path") if not args.rehearse else ():
        if not Path(getattr(args, name)).is_dir():
            parser.error(f"{getattr(args, name)}: no such folder; check --{name}")
    if args.deepspeed_config and not Path(args.deepspeed_config).is_file():
        parser.error(f"{args.deepspeed_config}: no such file; check --deepspeed_config")


def is_given(args: argparse.Namespace, name: str) -> bool:
    """Whether a flag stands on the command line."""
    return args.source[name] == "command line"


def set_flags(args: argparse.Namespace, values: dict, source: str) -> None:
    """Replace flags by {flag: value} from this source."""
    for name, value in values.items():
        setattr(args, name, value)
        args.source[name] = source


if __name__ == "__main__":
    ARGS = parse_args()  # before the heavy imports: --help and a mistyped flag answer at once

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import deepspeed_utils
from checkpoint_utils import export_weights, load_checkpoint, load_trained, lock_run_folder, prepare_checkpoint
from checkpoint_utils import restore_rng
from distributed_utils import Ranks, agree_on_errors, create_distributed_dataloader, gather_objects, launch_workers
from distributed_utils import print_main, schedule, setup_distributed, to_device, world
from hardware_utils import autocast, choose_precision, out_of_memory, set_numerics, smaller_batch, split_batch
from logging_utils import RunLog, save_figure, write_result
from loop_utils import Step, TrainingRun, ValidatedProgress, agree_on_precision, end_epoch, end_step
from loop_utils import explain_out_of_memory, finish_run, keep_best, next_epoch, optimizer_steps, print_start, resume
from loop_utils import say_if_finished, say_where, seed_ranks
from memory_utils import BatchSize, auto_batch_advice, batch_flags, fit_batch_to_memory, fits_by_itself
from tasks.mimic_cxr.data import RELEASE_SPLITS, QuestionData, open_image_cache
from tasks.mimic_cxr.encoders import Encoders, broadcast_mask, layers_of, load_encoders, load_pretrained, recompute
from tasks.mimic_cxr.encoders import recomputed, takes_ready_mask
from tasks.mimic_cxr.engines import DeepSpeedEngine, Engine, TorchEngine, choose_engine, choose_precision_with
from tasks.mimic_cxr.engines import config_file, engine_copies, fill_batch, prepare_deepspeed_alone, spare_a_search
from tasks.mimic_cxr.hardware import HardwareSettings, processes_per_node, settings_of_job, settings_of_plan
from tasks.mimic_cxr.index import CHEXPERT, HEADS, Index, open_index
from tasks.mimic_cxr.metrics import Metrics, Predictions, answer_metrics, chexpert_metrics, group_sizes, split_losses
from tasks.mimic_cxr.report import describe_memory, describe_trained, draw_inputs, draw_split, print_index
from tasks.mimic_cxr.report import print_metrics, write_predictions

HEAD_WEIGHT = {"binary": 1.0, "category": 0.5, "region": 0.5, "severity": 0.3}
HEAD_WIDTH = {"binary": 256, "category": 512, "region": 512, "severity": 128}


# --- model ------------------------------------------------------------------------------------------------------------


def grid_positions(height: int, width: int, dim: int, device: torch.device) -> torch.Tensor:
    """(height * width, dim) sine and cosine positions: convolution features do not say where they are."""
    rows = torch.linspace(-1, 1, height, device=device)
    columns = torch.linspace(-1, 1, width, device=device)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    waves = 2.0 ** torch.arange(math.ceil(dim / 4), device=device) % 64 * math.pi / 2
    angles = torch.stack([y, x], -1).reshape(-1, 2, 1) * waves
    return torch.cat([angles.sin(), angles.cos()], 1).flatten(1)[:, :dim]


class FusionLayer(nn.Module):
    """The question's tokens attend to the image's (cross-attention, then a feed-forward part), pre-norm."""

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        # 12 heads for 768
        heads = max(1, dim // 64)
        self.norm = nn.LayerNorm(dim)
        self.norm_mlp = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """(B, T, dim), (B, P, dim) -> (B, T, dim)."""
        attended, _ = self.attention(self.norm(text), image, image, need_weights=False)
        text = text + self.dropout(attended)
        return text + self.dropout(self.mlp(self.norm_mlp(text)))


def make_head(dim: int, hidden: int, classes: int, dropout: float) -> nn.Module:
    """Features (B, dim) -> logits (B, classes)."""
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, classes))


class ChestModel(nn.Module):
    """Image encoder, text encoder, fusion, four answer heads; the CheXpert head sees the image alone."""

    def __init__(self, encoders: Encoders, precision: str, fusion_layers: int, dropout: float):
        super().__init__()
        self.image = encoders.image
        self.text = encoders.text
        self.precision = precision
        self.recomputed = False
        self.ready_mask = takes_ready_mask(encoders.text)
        dim = self.text.config.hidden_size
        widths = getattr(self.image.config, "hidden_sizes", None)
        width = widths[-1] if widths else self.image.config.hidden_size
        self.project = nn.Sequential(nn.Linear(width, dim), nn.LayerNorm(dim))
        self.fusion = nn.ModuleList(FusionLayer(dim, dropout) for _ in range(fusion_layers))
        self.norm = nn.LayerNorm(dim)

        # one head for each kind of answer, and one for the labels
        self.heads = nn.ModuleDict()
        for name, classes in HEADS.items():
            self.heads[name] = make_head(dim, HEAD_WIDTH[name], len(classes), dropout)
        self.chexpert = make_head(dim, 512, len(CHEXPERT), dropout)
        self.register_buffer("mean", torch.tensor(encoders.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(encoders.std).view(-1, 1, 1), persistent=False)

    def image_tokens(self, image: torch.Tensor) -> torch.Tensor:
        """(B, 1, S, S) uint8 -> (B, P, dim)."""
        # one grey channel becomes the encoder's three
        pixels = (image / 255 - self.mean) / self.std
        if self.mean.is_cuda:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        features = self.image(pixel_values=pixels).last_hidden_state

        # a transformer gives tokens with positions of their own
        if features.dim() == 3:
            return self.project(features)
        height, width = features.shape[2:]
        tokens = self.project(features.flatten(2).transpose(1, 2))
        return tokens + grid_positions(height, width, tokens.shape[2], tokens.device).to(tokens.dtype)

    def forward(self, image: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits (B, classes) of binary, category, region, severity, and (B, 14) of CheXpert, fp32."""
        with autocast(image.device, self.precision):
            image = self.image_tokens(image)
            if self.ready_mask:
                mask = broadcast_mask(mask)
            text = self.text(input_ids=ids, attention_mask=mask).last_hidden_state
            for layer in self.fusion:
                text = recompute(layer, text, image) if self.recomputed else layer(text, image)
            pooled = self.norm(text[:, 0])
            logits = [head(pooled) for head in self.heads.values()]
            logits.append(self.chexpert(image.mean(1)))
        return tuple(values.float() for values in logits)


def build_model(args: argparse.Namespace, precision: str, device: torch.device) -> tuple[ChestModel, object]:
    """(model, tokenizer): both encoders loaded, frozen where asked, checkpointing set. Raises InputError."""
    encoders = load_encoders(args.image_encoder, args.text_encoder, args.dropout)
    longest = encoders.longest_question
    if args.max_question_length > longest:
        reason = f"{args.text_encoder} takes {longest}"
        raise InputError(f"--max_question_length {args.max_question_length}: {reason}; lower it")

    # the same new layers on every rank
    torch.manual_seed(args.seed)
    model = ChestModel(encoders, precision, args.fusion_layers, args.dropout)
    model.image.requires_grad_(not args.freeze_image)
    model.text.requires_grad_(not args.freeze_text)
    try:
        freeze_unused(model, args.image_size)
    except (RuntimeError, ValueError) as error:
        if out_of_memory(error):
            raise
        size = f"3 x {args.image_size} x {args.image_size}"
        raise InputError(f"{args.image_encoder}: does not take pictures of {size}; see --image_size") from None
    if args.gradient_checkpointing:
        recompute_activations(model, args)
    return model.to(device), encoders.tokenizer


def encoder_layers(model: ChestModel, args: argparse.Namespace) -> list[nn.Module]:
    """The layers of both encoders. Raises InputError where they are not known."""
    return [*layers_of(model.image, args.image_encoder), *layers_of(model.text, args.text_encoder)]


def recompute_activations(model: ChestModel, args: argparse.Namespace) -> None:
    """--gradient_checkpointing: activations are computed again in the backward pass. Raises InputError."""
    for layer in encoder_layers(model, args):
        layer.forward = recomputed(layer.forward)
    model.recomputed = True


def freeze_unused(model: ChestModel, size: int) -> None:
    """Freeze what no answer depends on (BERT's pooler): DDP would wait for its gradients for ever."""
    precision = model.precision
    model.precision = "no"
    ids = torch.ones(1, 4, dtype=torch.long)
    logits = model(torch.zeros(1, 1, size, size, dtype=torch.uint8), ids, torch.ones_like(ids))
    sum(values.sum() for values in logits).backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    model.precision = precision


# --- loss -------------------------------------------------------------------------------------------------------------


def question_losses(
    answers: list[torch.Tensor], chexpert: torch.Tensor, batch: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy (B,) of each question's own head, binary cross-entropy (B, 14) of each known CheXpert label)."""
    entropy = torch.zeros(len(chexpert), device=chexpert.device)
    for place, logits in enumerate(answers):
        asked = batch["head"] == place
        target = torch.where(asked, batch["target"], 0)
        entropy = entropy + asked * F.cross_entropy(logits, target, reduction="none")
    bce = F.binary_cross_entropy_with_logits(chexpert, batch["label"], reduction="none")
    return entropy, bce * batch["known"]


def count_targets(step: Step) -> list[float]:
    """[questions of each head..., known CheXpert labels] of this rank's share of a step, on the host."""
    heads = torch.cat([batch["head"] for batch in step.batches])
    counts = torch.bincount(heads, minlength=len(HEADS)).tolist()
    return [*counts, sum(int(batch["known"].sum()) for batch in step.batches)]


def batch_loss(model: nn.Module, batch: dict, counts: list[float], chexpert_weight: float) -> torch.Tensor:
    """(loss, answers' part, CheXpert part): a micro-batch's share of the means over the global batch.

    counts: as count_targets gives them, of all ranks. Each head's cross-entropy is a mean over ITS questions in the
    global batch, weighted 1/.5/.5/.3; CheXpert's BCE one over the labels that are known. Shares of all ranks and
    micro-batches add up.
    """
    *answers, chexpert = model(batch["image"], batch["ids"], batch["mask"])
    entropy, bce = question_losses(answers, chexpert, batch)
    vqa = chexpert.new_zeros(())
    for place, head in enumerate(HEADS):
        asked = batch["head"] == place
        vqa = vqa + HEAD_WEIGHT[head] * (entropy * asked).sum() / max(1.0, counts[place])
    labels = bce.sum() / max(1.0, counts[-1])
    loss = vqa + chexpert_weight * labels

    # a non-finite loss must give non-finite gradients, which reach every rank: all skip the step together
    finite = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
    return torch.stack([loss * finite, vqa, labels])


# --- training ---------------------------------------------------------------------------------------------------------


class Setup(NamedTuple):
    """How a run computes, as follows from its flags, files and machines; the reasons are for the banner.

    config: DeepSpeed's, which lies at config_path; None where torch trains.
    """

    precision: str
    precision_reason: str = ""
    engine_reason: str = ""
    config: dict | None = None
    config_path: str = ""
    hardware: HardwareSettings = HardwareSettings({})


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """A fused AdamW over what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)


def make_engine(model: ChestModel, setup: Setup, batch: BatchSize, args: argparse.Namespace) -> Engine:
    """The optimizer, and the engine around the model: torch's, or DeepSpeed's where there is a config for it."""
    if setup.config is None:
        # not for DeepSpeed, which sends weights as flat bytes: they must be in order
        if model.mean.is_cuda:
            model.image.to(memory_format=torch.channels_last)
        return TorchEngine(model, make_optimizer(model, args), model.mean.device, setup.precision, args.grad_clip)
    config = fill_batch(
        setup.config, setup.config_path, batch.size, batch.accumulation, args.grad_clip, setup.precision
    )
    return DeepSpeedEngine(model, make_optimizer(model, args), config)


def train_one_epoch(engine: Engine, loader: DataLoader, training: TrainingRun, args: argparse.Namespace) -> None:
    """Train from the run's position to the end of the epoch, of the run, or to a stop signal.

    Between log lines nothing is read back from the GPU. Raises InputError on all ranks for an unusable image of any.
    """
    engine.model.train()
    world_size = world()[1]
    for step in optimizer_steps(loader, training, count=count_targets):
        factor = schedule(training.progress.step, training.planned_steps, args.warmup_steps, args.lr_schedule)
        lr = args.learning_rate * factor

        # ZeRO exchanges in each pass, so every rank makes equally many: what is spare counts nothing
        passes = math.ceil(math.ceil(step.samples / world_size) / loader.batch_sampler.batch_size)
        spare = passes - len(step.batches)
        weights = [step.weight] * len(step.batches) + [0.0] * spare
        step.batches += step.batches[-1:] * spare

        # forward and backward: each micro-batch gives its share of the mean over the global batch
        losses = torch.zeros(3, device=engine.device)
        for (batch, last), weight in zip(step.micro_batches(), weights, strict=True):
            batch = to_device(batch, engine.device)
            with training.log.count_flops(step.samples), engine.micro_batch(last):
                parts = batch_loss(engine.model, batch, step.totals, args.chexpert_weight) * weight
                # both engines average over the ranks; these are shares of a sum, so undo the division
                engine.backward(parts[0] * world_size)
            losses += parts.detach()

        # update the weights; a non-finite gradient skips the step on all ranks together
        grad_norm = engine.update(lr)
        end_step(training, step, losses, grad_norm, lr)


# --- evaluation -------------------------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """What evaluate gives, the same on every rank and at any number of ranks. sizes: see group_sizes."""

    metrics: Metrics
    sizes: dict[str, int]
    predictions: Predictions


def evaluate(model: nn.Module, data: QuestionData, split: str, batch_size: int, args: argparse.Namespace) -> Evaluation:
    """Answer every question of a split, and judge the answers."""
    predictions = answer_questions(model, data, batch_size, args.num_workers, args.prefetch_factor)
    metrics = split_losses(split, predictions, HEAD_WEIGHT, args.chexpert_weight)
    metrics |= answer_metrics(split, predictions, data.index.facts["classes"])
    metrics |= chexpert_metrics(split, predictions, data.index.studies)
    return Evaluation(metrics, group_sizes(predictions, data.index.studies), predictions)


@torch.no_grad()
def answer_questions(
    model: nn.Module, data: QuestionData, batch_size: int, num_workers: int, prefetch: int
) -> Predictions:
    """All ranks: every question of a split once, in row order, {name: array with a row for each}.

    Names: index, head, target, predicted class, study, type, chexpert: the study's probabilities (n, 14), and each
    question's part of the losses (entropy, bce, known). Raises InputError on all ranks for an unusable image of any.
    """
    model.eval()
    prefetch_factor = prefetch if num_workers else None
    loader = create_distributed_dataloader(
        data,
        batch_size,
        train=False,
        num_workers=num_workers,
        collate_fn=data.collate,
        prefetch_factor=prefetch_factor,
    )
    batches = iter(loader)
    local = []
    error = ""
    for _ in range(math.ceil(math.ceil(len(data) / loader.batch_sampler.batch_size) / world()[1])):
        # ZeRO-3 gathers weights in each pass, so every rank makes equally many
        batch = next(batches, None)
        has_share = batch is not None
        if not has_share:
            batch = data.collate([data[0]])
        error = error or batch["error"]
        batch = to_device(batch, model.mean.device)
        *answers, chexpert = model(batch["image"], batch["ids"], batch["mask"])
        if has_share:
            local.append(batch_predictions(answers, chexpert, batch))
    with agree_on_errors():
        if error:
            raise InputError(error)
    return in_row_order(local)


def batch_predictions(answers: list[torch.Tensor], chexpert: torch.Tensor, batch: dict) -> Predictions:
    """A row for each question of a batch, see answer_questions."""
    classes = torch.stack([logits.argmax(1) for logits in answers], 1)
    entropy, bce = question_losses(answers, chexpert, batch)
    rows = {name: batch[name] for name in ("index", "head", "target", "study")}
    rows |= {
        "predicted": classes.gather(1, batch["head"][:, None])[:, 0],
        "chexpert": chexpert.sigmoid(),
        "entropy": entropy.double(),
        "bce": bce.sum(1).double(),
        "known": batch["known"].sum(1).double(),
    }
    predictions = {name: values.cpu().numpy() for name, values in rows.items()}
    predictions["type"] = np.array(batch["type"], dtype="U48")
    return predictions


def in_row_order(local: list[Predictions]) -> Predictions:
    """All ranks: the rows of every rank's batches as one, by index. local: this rank's, which may be none."""
    own = {name: np.concatenate([batch[name] for batch in local]) for name in local[0]} if local else None
    parts = [part for part in gather_objects(own) if part]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(rows["index"], kind="stable")
    return {name: values[order] for name, values in rows.items()}


def log_evaluation(data: QuestionData, split: str, result: Evaluation, training: TrainingRun) -> None:
    """An evaluation in the log; its figures, too, but not those of every short epoch."""
    progress = training.progress
    training.log.write(progress.step, progress.epoch + 1, result.metrics)
    seconds_apart = 0 if split == "test" else 60
    training.log.figures(lambda: draw_split(data, split, result.predictions), progress.step, seconds_apart)


def keep_predictions(data: QuestionData, split: str, predictions: Predictions, args: argparse.Namespace) -> bool:
    """--save_predictions: rank 0 writes predictions_<split>.parquet; False where the disk does not take it."""
    if not args.save_predictions or world()[0] > 0:
        return True
    return write_predictions(Path(args.output_dir) / f"predictions_{split}.parquet", data, predictions)


def evaluate_only(model: ChestModel, data: QuestionData, step: int, args: argparse.Namespace) -> None:
    """--eval_only: the metrics of one split, printed and written to eval_<split>.json where the disk takes them."""
    run_folder = Path(args.output_dir)
    with agree_on_errors():
        try:
            (run_folder / "figures").mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            reason = error.strerror
            raise InputError(f"{run_folder}: cannot write here ({reason}); choose another --output_dir") from None
        except OSError:
            # a full or read-only disk: each file that is not written says so
            pass
    split = args.eval_split
    result = evaluate(model, data, split, args.batch_size, args)
    if world()[0] > 0:
        return

    # the table, the file, the figures
    print_metrics(f"{split}, step {step}", result.metrics, result.sizes)
    report = run_folder / f"eval_{split}.json"
    content = json.dumps(result.metrics | {"step": step}, indent=2) + "\n"
    written = [write_result(report, content.encode())]
    for name, figure in draw_split(data, split, result.predictions).items():
        written.append(save_figure(run_folder / "figures" / f"{name}.png", figure))
    written.append(keep_predictions(data, split, result.predictions, args))
    if all(written):
        print(f"{len(data):,} questions; written: {report}, {run_folder}/figures", flush=True)


# --- settings ---------------------------------------------------------------------------------------------------------


def choose_setup(args: argparse.Namespace, ranks: Ranks, processes: int) -> Setup:
    """All ranks: engine, precision, and with --auto_optimize the flags that the hardware decides. Raises InputError.

    processes: of a node.
    """
    hardware = HardwareSettings({})
    if args.auto_optimize:
        batch_size = args.batch_size if is_given(args, "batch_size") else None
        hardware = settings_of_job(ranks, processes, batch_size)
        apply_hardware(args, hardware)
    config = None
    config_path = engine_reason = ""
    with agree_on_errors():
        file_named = is_given(args, "deepspeed_config")
        use_deepspeed, engine_reason = choose_engine(
            args.use_ddp, args.use_deepspeed, file_named, args.auto_optimize, ranks.world_size
        )
        if use_deepspeed and not args.eval_only:
            config_path = args.deepspeed_config or config_file(hardware.zero_stage)
            config = deepspeed_settings(config_path, args)
    choose = partial(choose_precision_with, config, args.mixed_precision, ranks.device)
    precision, reason = agree_on_precision(choose)

    # what the file says must go with the flags
    with agree_on_errors():
        if config is not None:
            accumulation = args.gradient_accumulation_steps
            deepspeed_utils.fill_config(config, config_path, args.batch_size, accumulation, args.grad_clip, precision)
    reason = set_numerics(ranks.device, precision, reason, args.deterministic)
    return Setup(precision, reason, engine_reason, config, config_path, hardware)


def apply_hardware(args: argparse.Namespace, hardware: HardwareSettings) -> None:
    """--auto_optimize: file < hardware < command line."""
    values = {name: value for name, value in hardware.flags.items() if args.source[name] not in FLAG_SOURCES}
    set_flags(args, values, "hardware")


def deepspeed_settings(path: str, args: argparse.Namespace) -> dict:
    """DeepSpeed's config. Ours gives way to what --auto_optimize finds of memory; one that is named stands."""
    config = deepspeed_utils.read_deepspeed_config(path)
    source = args.source["gradient_checkpointing"]
    named = args.source["deepspeed_config"] != "default"
    weaker = source != "command line" if named else source == "default"
    if "activation_checkpointing" in config and weaker:
        set_flags(args, {"gradient_checkpointing": True}, Path(path).name)
    if args.offload_optimizer is False and not named:
        config["zero_optimization"].pop("offload_optimizer", None)
    if args.compile and config["zero_optimization"]["stage"] == 3:
        raise InputError("--compile: does not go with ZeRO-3; leave it out, or use stage 1 or 2")
    return config


def largest_batch(batch_size: int, args: argparse.Namespace) -> dict:
    """A made-up batch, on the host, of questions of the full length, with all heads and labels."""
    zeros = torch.zeros(batch_size, dtype=torch.long)
    tokens = torch.zeros(batch_size, args.max_question_length, dtype=torch.long)
    return {
        "index": zeros,
        "head": torch.arange(batch_size) % len(HEADS),
        "target": zeros,
        "study": zeros,
        "image": torch.zeros(batch_size, 1, args.image_size, args.image_size, dtype=torch.uint8),
        "ids": tokens,
        "mask": torch.ones_like(tokens),
        "label": torch.zeros(batch_size, len(CHEXPERT)),
        "known": torch.ones(batch_size, len(CHEXPERT), dtype=torch.bool),
    }


def trial_step(model: ChestModel, batch: dict, args: argparse.Namespace) -> None:
    """Forward and backward pass of one micro-batch, as in training; the gradients stay in the model."""
    counts = [len(batch["head"])] * (len(HEADS) + 1)
    batch = to_device(batch, model.mean.device)
    batch_loss(model.train(), batch, counts, args.chexpert_weight)[0].backward()


def choose_batch_size(
    model: ChestModel, config: dict | None, checkpoint: dict | None, args: argparse.Namespace
) -> BatchSize:
    """The batch of the flags, or what a step of questions of the full length leaves room for.

    Where no flag decided, activations are recomputed if not even one question fits. config: DeepSpeed's, None where
    torch trains.
    """
    kept = not args.gradient_checkpointing
    wanted = BatchSize(args.batch_size, args.gradient_accumulation_steps, args.source["batch_size"], not kept)
    if not fits_by_itself(args.auto_batch, model.mean.device):
        return wanted

    def try_once(size: int) -> None:
        trial_step(model, largest_batch(size, args), args)

    # the encoders' layers must be known, or there is no recomputation to turn on
    turn_on = None
    advice = "pass --gradient_checkpointing or a smaller --image_size"
    undecided = args.gradient_checkpointing is None or args.source["gradient_checkpointing"] == "hardware"
    if kept and undecided:
        with contextlib.suppress(InputError):
            encoder_layers(model, args)
            turn_on = partial(recompute_activations, model, args)
            advice = "pass a smaller --image_size"
    return fit_batch_to_memory(
        try_once,
        model,
        wanted,
        batch_flags,
        advice,
        copies=engine_copies(config),
        recompute=turn_on,
        checkpoint=checkpoint,
    )


def out_of_memory_advice(size: int, accumulation: int, args: argparse.Namespace, device: torch.device) -> str:
    """The flags that take less memory than this batch."""
    half, micro_batches = split_batch(size, accumulation)
    smaller = batch_flags(half, micro_batches)
    otherwise = "--gradient_checkpointing, a smaller --image_size or ZeRO-3"
    otherwise += auto_batch_advice(args.auto_batch, device)
    return f"--batch_size {size}; try {smaller} (the same result), {otherwise}"


def describe_run(model: ChestModel, sets: dict, batch: BatchSize, setup: Setup, training: TrainingRun, args) -> dict:
    """The banner's rows of this script, {name: text}."""
    world_size = world()[1]
    source = args.source
    engine = "DDP" if world_size > 1 else "torch"
    if setup.config:
        engine = deepspeed_utils.describe(setup.config)

    # where the batch was fitted to memory, its source says so
    fitted = batch.accumulation != args.gradient_accumulation_steps
    accumulation_source = "fitted" if fitted else source["gradient_accumulation_steps"]
    accumulation = f"{batch.accumulation} accumulation ({accumulation_source})"
    recomputed_source = source["gradient_checkpointing"]
    if batch.recomputed and not args.gradient_checkpointing:
        recomputed_source = "one question did not fit without"

    questions = ", ".join(f"{len(data):,} {split}" for split, data in sets.items())
    selected = f"grade {args.quality_grade}, {source['quality_grade']}; view {args.view}"
    epoch_steps = training.planned_steps // args.epochs
    product = f"{batch.size} per GPU ({batch.source}) x {accumulation} x {world_size}"
    rows = {
        "engine": f"{engine} ({setup.engine_reason})",
        "batch": f"{product} = {training.effective_batch_size}",
        "learning rate": f"{args.learning_rate:g} ({source['learning_rate']}), {args.lr_schedule}, not scaled",
        "precision": setup.precision_reason,
        "checkpointing": f"{batch.recomputed} ({recomputed_source})",
        "loading": f"{args.num_workers} workers per GPU ({source['num_workers']}), {args.cache_gb:g} GiB disk cache",
        "questions": f"{questions} ({selected})",
        "epochs": f"{args.epochs} epochs ({source['epochs']}), {epoch_steps} steps an epoch",
        "trained": describe_trained(model),
    }
    if setup.hardware.smallest_gpu is not None:
        used = {name: value for name, value in setup.hardware.flags.items() if source[name] == "hardware"}
        own_file = setup.config is not None and source["deepspeed_config"] == "default"
        rows["memory"] = describe_memory(setup.hardware.smallest_gpu, used, batch, own_file)
    return rows


# --- the run ----------------------------------------------------------------------------------------------------------


def open_questions(args: argparse.Namespace) -> Index:
    """All ranks: the index of the questions; rank 0 prints what it holds. Raises InputError for an empty split."""
    index = open_index(
        Path(args.index_dir),
        Path(args.mimic_cxr_path),
        Path(args.mimic_qa_path),
        args.quality_grade,
        args.view,
        args.max_missing,
        limit=64 if args.debug else 0,
    )
    needed = args.eval_split if args.eval_only else "train"
    with agree_on_errors():
        if not len(index.questions(RELEASE_SPLITS[needed])):
            advice = f"see {args.mimic_cxr_path}/mimic-cxr-2.0.0-split.csv.gz, or choose another --quality_grade"
            raise InputError(f"{args.mimic_qa_path}: no questions in split {needed!r}; {advice}")
    if world()[0] == 0:
        print_index(index.facts)
    return index


def open_sets(index: Index, tokenizer, args: argparse.Namespace) -> dict[str, QuestionData]:
    """The questions of each split."""
    cache = open_image_cache(index, args.image_size, args.cache_gb)
    sets = {}
    for split in RELEASE_SPLITS:
        sets[split] = QuestionData(
            index,
            split,
            args.mimic_cxr_path,
            cache,
            tokenizer,
            args.max_question_length,
            args.chexpert_uncertain,
            args.max_samples,
        )
    return sets


def open_checkpoint(args: argparse.Namespace) -> dict | None:
    """All ranks: the checkpoint to resume or to evaluate, None for a fresh start. Raises InputError."""
    run_folder = Path(args.output_dir)
    if not args.eval_only:
        return load_checkpoint(args.resume_from, run_folder, FORMAT, resume=True)
    path = args.resume_from or str(run_folder / "best.pt")
    with agree_on_errors():
        if not args.resume_from and not Path(path).exists():
            advice = "check --output_dir, or give a checkpoint with --resume_from"
            raise InputError(f"{run_folder}: holds no best.pt; {advice}")
    checkpoint = load_checkpoint(path, run_folder, FORMAT, resume=False)
    if checkpoint is None:
        raise InputError(f"{run_folder}: no checkpoint to use; give one with --resume_from")
    return checkpoint


def checkpoint_contents(model: ChestModel, engine: Engine, batch: BatchSize, precision: str, this_run: dict) -> dict:
    """All ranks: what a checkpoint holds beside position, log and random state; the same from every engine.

    this_run: what may not differ where the run is resumed.
    """
    return {
        "format": FORMAT,
        "model": deepspeed_utils.full_weights(model),
        "optimizer": deepspeed_utils.full_optimizer_state(model, engine.optimizer),
        "scaler": engine.scaler_state(),
        "run": this_run,
        "precision": precision,
        "split": batch.record(),
    }


def make_loader(data: QuestionData, batch: BatchSize, args: argparse.Namespace) -> DataLoader:
    """The training questions, shuffled and dealt out to the ranks."""
    return create_distributed_dataloader(
        data,
        batch.size,
        seed=args.seed,
        num_workers=args.num_workers,
        accumulation=batch.accumulation,
        drop_last=False,
        collate_fn=data.collate,
        prefetch_factor=args.prefetch_factor if args.num_workers else None,
    )


def run(args: argparse.Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun = time.time()
    processes = processes_per_node()
    for line in translate_guide_keys(args, ranks.device.type == "cuda", processes):
        print_main(line)
    setup = choose_setup(args, ranks, processes)
    index = open_questions(args)

    # the run folder is ours from here on, where this is a training
    lock = None
    if not args.eval_only:
        may_exist = bool(args.resume_from) or args.overwrite
        lock = lock_run_folder(Path(args.output_dir), may_exist, overwrite=args.overwrite)
    checkpoint = open_checkpoint(args)

    with agree_on_errors():
        model, tokenizer = build_model(args, setup.precision, ranks.device)
        if checkpoint:
            load_trained(model, checkpoint["model"])
        elif args.pretrained_weights:
            load_pretrained(model, args.pretrained_weights)
        sets = open_sets(index, tokenizer, args)
    if args.eval_only:
        evaluate_only(model, sets[args.eval_split], checkpoint["step"], args)
        return 0
    if ranks.launcher == "python" and torch.cuda.device_count() > 1:
        print_main(f"{torch.cuda.device_count()} GPUs are here and one is used: --world_size, or the launcher")
    code = fit(model, sets, checkpoint, setup, args, ranks)
    print_main(f"{time.time() - begun:.0f} seconds in all")
    del lock
    return code


def fit(
    model: ChestModel, sets: dict[str, QuestionData], checkpoint: dict | None, setup: Setup, args, ranks: Ranks
) -> int:
    """Train, validate each epoch, keep checkpoints, test the best; returns the exit code."""
    begun = time.time()
    run_folder = Path(args.output_dir)
    batch = choose_batch_size(model, setup.config, checkpoint, args)
    loader = make_loader(sets["train"], batch, args)
    effective_batch_size = loader.batch_sampler.effective_batch_size
    planned_steps = args.epochs * loader.batch_sampler.steps_per_epoch()
    last_step = min(args.max_steps or planned_steps, planned_steps)

    # begin, or go on where the checkpoint stands
    progress = ValidatedProgress()
    questions = len(sets["train"])
    this_run = {"training_questions": questions, "effective_batch_size": effective_batch_size, "seed": args.seed}
    seed_ranks(args.seed)
    if checkpoint:
        resume(progress, checkpoint, this_run, run_folder)
    if args.compile:
        model.compile()
    engine = make_engine(model, setup, batch, args)
    if checkpoint:
        engine.restore(model, checkpoint)
        restore_rng(checkpoint["rng"])

    log = RunLog(run_folder, ranks, LOSSES, last_step, args.log_every, setup.precision, args.compile)
    log.open(args, checkpoint)
    training = TrainingRun(
        run_folder=run_folder,
        progress=progress,
        last_step=last_step,
        planned_steps=planned_steps,
        effective_batch_size=effective_batch_size,
        precision=setup.precision,
        log=log,
        contents=partial(checkpoint_contents, model, engine, batch, setup.precision, this_run),
        save_every=args.save_every,
        keep_last=args.keep_last,
        max_bad_steps=args.max_bad_steps,
    )
    prepare_checkpoint(model)
    print_start("MIMIC-CXR", ranks, training, describe_run(model, sets, batch, setup, training, args))

    advice = partial(out_of_memory_advice, batch.size, batch.accumulation, args, ranks.device)
    with training.stop, contextlib.closing(log), contextlib.closing(engine), explain_out_of_memory(advice):
        code, sizes = train(model, engine, loader, training, sets, args)
        if code:
            return code
        best_step = test_best(model, sets, training, sizes, batch.size, args)
        finish_run(training, begun, {"best_step": best_step} | (progress.best_metrics or {}))
        export(run_folder, "best.pt" if len(sets["val"]) else "last.pt")
        say_where(run_folder)
    return 0


def train(
    model: ChestModel, engine: Engine, loader: DataLoader, training: TrainingRun, sets: dict, args
) -> tuple[int, dict[str, int]]:
    """All epochs, each with its validation; (exit code of a stop signal or 0, group_sizes of the validation)."""
    progress = training.progress
    sizes: dict[str, int] = {}
    say_if_finished(training, "--epochs")
    if progress.step == 0:
        training.log.figures(lambda: {"inputs": draw_inputs(sets["train"])}, 0)
    while True:
        train_one_epoch(engine, loader, training, args)
        if code := end_epoch(training):
            return code, sizes
        if len(sets["val"]):
            result = evaluate(model, sets["val"], "val", loader.batch_sampler.batch_size, args)
            sizes = result.sizes
            log_evaluation(sets["val"], "val", result, training)
            accuracy = result.metrics["val/vqa_accuracy"]
            auroc = result.metrics["val/chexpert_auroc"]
            shown = "undefined" if auroc is None else f"{auroc:.4f}"
            print_main(f"epoch {progress.epoch + 1}: val accuracy {accuracy:.4f}, CheXpert AUROC {shown}")

            # the best is that of the highest accuracy
            epoch_complete = progress.samples >= loader.batch_sampler.used
            if keep_best(training, accuracy, epoch_complete):
                progress.best_metrics = result.metrics
                keep_predictions(sets["val"], "val", result.predictions, args)
        if not next_epoch(training):
            return 0, sizes


def test_best(
    model: ChestModel, sets: dict, training: TrainingRun, sizes: dict[str, int], batch_size: int, args
) -> int:
    """Load best.pt and print its metrics of the validation and test splits; returns its step.

    sizes: group_sizes of the validation.
    """
    best_step = training.progress.step
    name = "the last weights (there are no validation questions)"
    if len(sets["val"]):
        best = load_checkpoint(str(training.run_folder / "best.pt"), training.run_folder, FORMAT)
        deepspeed_utils.put_weights(model, best["model"])
        best_step = best["step"]
        name = "best.pt"
    for split in ("val", "test"):
        if not len(sets[split]):
            continue
        # best.pt was validated and logged when it was chosen, but not by an earlier version
        metrics = training.progress.best_metrics if split == "val" else None
        if metrics is None:
            result = evaluate(model, sets[split], split, batch_size, args)
            metrics = result.metrics
            sizes = result.sizes
            # the row stands at the last step, but its weights may be older
            metrics["best_step"] = best_step
            log_evaluation(sets[split], split, result, training)
            keep_predictions(sets[split], split, result.predictions, args)
        if world()[0] == 0:
            print_metrics(f"{split}, {name}", metrics, sizes)
    return best_step


def export(run_folder: Path, chosen: str) -> None:
    """All ranks call it: model.safetensors (the chosen weights) and model_last.safetensors, whole from any engine."""
    for name, source in (("model", chosen), ("model_last", "last.pt")):
        weights = load_checkpoint(str(run_folder / source), run_folder, FORMAT)["model"]
        export_weights(weights, run_folder / f"{name}.safetensors")


def rehearse(args: argparse.Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step of questions of the full length, by DDP or one process."""
    import rehearsal_utils as rehearsal

    processes = rehearsal.processes_to_plan_for(args.world_size)
    memory = rehearsal.memory_to_plan_for(args.gpu_memory)
    if args.auto_optimize:
        batch_size = args.batch_size if is_given(args, "batch_size") else None
        apply_hardware(args, settings_of_plan(processes, memory, batch_size))

    trace = rehearsal.Trace()
    size = args.batch_size
    accumulation = args.gradient_accumulation_steps
    with rehearsal.imaginary_gpu(trace) as ranks, rehearsal.random_weights(ranks.device):
        precision, _ = choose_precision(args.mixed_precision, ranks.device)
        set_numerics(ranks.device, precision, "", args.deterministic)
        with ranks.device:
            model, _ = build_model(args, precision, ranks.device)
        engine = make_engine(model, Setup(precision), BatchSize(size, accumulation, ""), args)
        trial = partial(trial_step, model, largest_batch(size, args), args)
        step = rehearsal.rehearse_step(trace, model, engine.optimizer, trial, accumulation, processes)

    def fitting_flags(samples: int) -> str:
        fitting, micro_batches = smaller_batch(size, accumulation, samples)
        return batch_flags(fitting, micro_batches)

    otherwise = "a smaller --image_size" if args.gradient_checkpointing else "--gradient_checkpointing"
    activations = "recomputed" if args.gradient_checkpointing else "kept"
    title = f"MIMIC-CXR by DDP, {size} per GPU x {accumulation} accumulation, {precision}, activations {activations}"
    note = "it takes less than this by DDP"
    print(f"ZeRO, which shares the optimizer's state over the processes, is not rehearsed: {note}")
    rehearsal.report_rehearsal(title, step, size, memory, fitting_flags, otherwise)
    rehearsal.end_rehearsal()


def main(args: argparse.Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    launch_workers(args.world_size or 1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    spare_a_search()
    with setup_distributed(timeout=args.dist_timeout) as ranks:
        wanted = args.use_deepspeed or is_given(args, "deepspeed_config")
        if wanted and ranks.world_size == 1 and not args.eval_only:
            prepare_deepspeed_alone(ranks.device)

        def advice() -> str:
            # --auto_optimize sets these on the way
            return out_of_memory_advice(args.batch_size, args.gradient_accumulation_steps, args, ranks.device)

        with explain_out_of_memory(advice):
            return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
