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
import platform
import time
import warnings
import zlib
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cli_utils import (
    InputError,
    Parser,
    add_common_arguments,
    end_with,
    number,
    parse_arguments,
    read_config,
    run_main,
    take_from_run,
    value_sources,
    whole,
)

FORMAT = "mimic_cxr/1"
LOSSES = ["loss", "loss_vqa", "loss_chexpert", "grad_norm", "skipped"]
SPLITS = {"train": "train", "val": "validate", "test": "test"}  # our names -> the release's
GRADES = ("A++", "A+", "A", "B", "C", "D", "all")
# what --eval_only takes from the run's args.yaml where no flag says otherwise
OF_THE_RUN = ("mimic_cxr_path", "mimic_qa_path", "index_dir", "image_encoder", "text_encoder", "quality_grade", "view")
OF_THE_RUN += ("image_size", "fusion_layers", "max_question_length", "chexpert_uncertain", "max_samples", "max_missing")
HERE = Path(__file__).resolve().parent
# the guide's own config, and the settings of `python -m hardware_utils --json`: {section: {key: flag}}
TRAINING = dict.fromkeys(("epochs", "learning_rate", "weight_decay", "warmup_steps", "grad_clip"))
TRAINING |= dict.fromkeys(("gradient_accumulation_steps", "gradient_checkpointing", "prefetch_factor"))
TRAINING |= dict.fromkeys(("mixed_precision", "fp16", "dataloader_num_workers", "pin_memory", "effective_batch_size"))
TRAINING |= dict.fromkeys(("engine", "zero_stage", "offload_optimizer"))
ZERO_FILES = {2: "deepspeed_config.json", 3: "deepspeed_zero3.json"}
TRAINING = {key: key for key in ("batch_size_per_gpu", *TRAINING)}
GUIDE_KEYS = ("batch_size_per_gpu", "fp16", "dataloader_num_workers", "pin_memory", "effective_batch_size", "engine")
GUIDE_KEYS += ("zero_stage", "offload_optimizer", "enabled", "stage")
SECTIONS = {
    "training": TRAINING,
    "settings": TRAINING,
    "deepspeed": {"enabled": "deepspeed_enabled", "stage": "zero_stage"},
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument_group("data").add_argument
    text = "folder with files/ and mimic-cxr-2.0.0-{metadata,split,chexpert}.csv.gz"
    add("--mimic_cxr_path", default="data/mimic-cxr-jpg", help=text)
    text = "folder with metadata/question_metadata.parquet and qa/ or qa.zip, or with exports/ that has them"
    add("--mimic_qa_path", default="data/mimic-ext-cxr-qba", help=text)
    text = (
        "where the index of questions is kept (3 GB for all 31 million), shared by all runs and all nodes; delete it "
    )
    text += "after you changed pictures or files inside qa/"
    add("--index_dir", default="runs/index", help=text)
    text = "questions of this grade or better (from the parquet file); all: also unrated ones"
    add("--quality_grade", choices=GRADES, default="B", help=text)
    text = "picture of a study: frontal is PA, else AP; of several the first dicom_id; studies without are left out"
    add("--view", choices=("frontal", "PA", "AP", "lateral"), default="frontal", help=text)
    text = "what an uncertain CheXpert label (-1) is in training; soft is 0.5; metrics never count uncertain labels"
    add("--chexpert_uncertain", choices=("ignore", "positive", "negative", "soft"), default="ignore", help=text)
    text = "use so many questions of each split, evenly spaced; 0: all"
    add("--max_samples", type=whole(0), default=0, help=text)
    text = "go on when up to so many picture files do not exist (their questions are left out); more is an error"
    add("--max_missing", type=whole(0), default=0, help=text)
    add("--image_size", type=whole(32), default=224, help="side of the square input, pixels; lower it on OOM")
    text = "GiB of DISK in --index_dir for decoded pictures (10 for all of MIMIC at 224), shared by all ranks; 0: none"
    add("--cache_gb", type=number(0), default=16.0, help=text)

    add = parser.add_argument_group("model").add_argument
    text = "Hugging Face image encoder, folder or hub name"
    add("--image_encoder", default="facebook/convnext-base-224", help=text)
    text = "Hugging Face text encoder, folder or hub name"
    add("--text_encoder", default="emilyalsentzer/Bio_ClinicalBERT", help=text)
    add("--fusion_layers", type=whole(1), default=2, help="layers in which the question attends to the picture")
    add("--dropout", type=number(0, 0.99), default=0.1, help="in the text encoder, the fusion layers and the heads")
    add("--max_question_length", type=whole(4), default=128, help="tokens; longer questions are cut")
    add("--freeze_image", action="store_true", help="do not train the image encoder (saves memory)")
    add("--freeze_text", action="store_true", help="do not train the text encoder (saves memory)")
    text = "recompute activations: less memory, a third slower; left out: when one question needs it"
    add("--gradient_checkpointing", action=argparse.BooleanOptionalAction, help=text)
    text = "model.safetensors of another run to start from, with a new optimizer (fine-tuning, or another engine)"
    add("--pretrained_weights", metavar="FILE", help=text)

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch_size", type=whole(1), default=16, help="questions PER GPU and forward pass; lower it on OOM")
    add("--epochs", type=whole(1), default=20, help="passes over the training questions")
    add("--learning_rate", type=number(0, above=True), default=1e-4, help="peak rate; not scaled with the GPUs")
    add("--lr_schedule", choices=("constant", "cosine"), default="cosine", help="after warm-up; cosine ends at 0")
    add("--warmup_steps", type=whole(0), default=500, help="optimizer steps of linear warm-up")
    add("--weight_decay", type=number(0), default=0.01, help="AdamW weight decay")
    add("--chexpert_weight", type=number(0), default=0.3, help="weight of the CheXpert loss beside the answers'")

    add = parser.add_argument_group("engine").add_argument
    text = "set batch, accumulation, workers, prefetch and checkpointing from the hardware (default: %(default)s)"
    add("--auto_optimize", dest="auto_optimize", action="store_true", default=True, help=text)
    text = "take them from the file and the defaults (--auto_optimize: %(default)s)"
    add("--no_auto_optimize", dest="auto_optimize", action="store_false", help=text)
    text = "DeepSpeed ZeRO; with --auto_optimize the default for 2 or more processes"
    add("--use_deepspeed", action="store_true", help=text)
    add("--use_ddp", action="store_true", help="torch DistributedDataParallel")
    text = "JSON with ZeRO stage and offload, used as it is; default: configs/deepspeed_config.json "
    text += "(deepspeed_zero3.json below 6 GB), by --auto_optimize without offload from 16 GB on"
    add("--deepspeed_config", metavar="FILE", help=text)
    text = "batches each worker prepares ahead; lower it when RAM is short"
    add("--prefetch_factor", type=whole(1), default=2, help=text)

    add = parser.add_argument_group("output and evaluation").add_argument
    add("--output_dir", default="runs/mimic_cxr", help="run folder: checkpoints, logs, figures, summary")
    add("--eval_split", choices=("val", "test"), default="test", help="split that --eval_only takes")
    add("--save_predictions", action="store_true", help="write predictions_<split>.parquet beside the metrics")
    text = "a trial: 64 questions of 64 studies a split, 2 steps, no network, no workers, where no flag says otherwise"
    add("--debug", action="store_true", help=text)
    add_common_arguments(parser, {"learning_rate": "lr"})
    add_guide_keys(parser)
    args = parse_arguments(parser, argv, SECTIONS)
    args.source = value_sources(parser, args, argv, SECTIONS)
    take_guide_keys(args)
    if args.eval_only:
        take_from_run(parser, args, args.output_dir, OF_THE_RUN)
    if args.use_deepspeed and args.use_ddp:
        parser.error("--use_deepspeed and --use_ddp exclude each other; give one, or none to let the script choose")
    if args.overwrite and (args.resume_from or args.eval_only):
        parser.error("--overwrite starts afresh and excludes --resume_from and --eval_only")
    if args.source["pretrained_weights"] == "command line" and (args.resume_from or args.eval_only):
        parser.error("--pretrained_weights starts a new run and excludes --resume_from and --eval_only")
    if args.source["deepspeed_config"] == "command line" and args.use_ddp:
        parser.error("--deepspeed_config does not go with --use_ddp; leave one of them out")
    for name in ("mimic_cxr_path", "mimic_qa_path") if not args.rehearse else ():
        if not Path(getattr(args, name)).is_dir():
            parser.error(f"{getattr(args, name)}: no such folder; check --{name}")
    if args.deepspeed_config and not Path(args.deepspeed_config).is_file():
        parser.error(f"{args.deepspeed_config}: no such file; check --deepspeed_config")
    if args.debug:
        few = {"max_samples": 64, "max_steps": 2, "num_workers": 0, "log_every": 1, "warmup_steps": 0}
        for name in [name for name in few if args.source[name] != "command line"]:
            setattr(args, name, few[name])
            args.source[name] = "--debug"
        os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    return args


def add_guide_keys(parser: Parser) -> None:
    """Keys of the guide's config that are no flags here; translate_guide_keys says what each becomes."""

    def add(name: str, **options) -> None:
        parser.add_argument(name, help=argparse.SUPPRESS, **options)

    add("--batch_size_per_gpu", type=whole(1))
    add("--fp16", action=argparse.BooleanOptionalAction)
    add("--pin_memory", action=argparse.BooleanOptionalAction)
    add("--dataloader_num_workers", type=whole(0))
    add("--effective_batch_size", type=whole(1))
    add("--engine", choices=("python", "deepspeed", "torchrun"))
    add("--deepspeed_enabled", action=argparse.BooleanOptionalAction)
    add("--zero_stage", type=int, choices=(0, 2, 3))
    add("--offload_optimizer", action=argparse.BooleanOptionalAction)


def take_guide_keys(args: argparse.Namespace) -> None:
    """The guide's keys for batch and engine, where no flag of the command line says otherwise."""
    for key, name in (("batch_size_per_gpu", "batch_size"), ("fp16", "mixed_precision")):
        if getattr(args, key) is not None and args.source[key] == args.source[name]:
            end_with(InputError(f"{args.config or 'command line'}: holds both {key} and {name}; remove one"))
    if args.batch_size_per_gpu is not None and args.source["batch_size"] != "command line":
        args.batch_size = args.batch_size_per_gpu
        args.source["batch_size"] = args.source["batch_size_per_gpu"]
    if "command line" not in (args.source["use_deepspeed"], args.source["use_ddp"]):
        args.use_deepspeed = args.use_deepspeed or args.deepspeed_enabled is True or args.engine == "deepspeed"
        args.use_ddp = args.use_ddp or args.deepspeed_enabled is False or args.engine == "torchrun"
    if args.zero_stage and args.deepspeed_config is None:
        args.deepspeed_config = str(HERE / "configs" / ZERO_FILES[args.zero_stage])


if __name__ == "__main__":
    ARGS = parse_args()  # before the heavy imports: --help and a mistyped flag answer at once

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import deepspeed_utils
from checkpoint_utils import (
    export_weights,
    load_checkpoint,
    load_trained,
    lock_run_folder,
    prepare_checkpoint,
    restore_rng,
    restore_scaler,
)
from distributed_utils import (
    Ranks,
    agree_on_errors,
    create_distributed_dataloader,
    gather_objects,
    launch_workers,
    print_main,
    schedule,
    setup_distributed,
    to_device,
    world,
    wrap_in_ddp,
)
from figure_utils import wrap
from hardware_utils import (
    autocast,
    available_ram_gb,
    choose_precision,
    core_numbers,
    is_roomy,
    out_of_memory,
    set_numerics,
    settings_for,
    smaller_batch,
    split_batch,
    usable_cores,
)
from logging_utils import RunLog, print_table, save_figure, write_result
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
    resume,
    say_if_finished,
    say_where,
    seed_ranks,
    sync_gradients,
)
from memory_utils import BatchSize, auto_batch_advice, batch_flags, copies_held, fit_batch_to_memory, fits_by_itself
from tasks.mimic_cxr.index import CHEXPERT, HEADS, Index, left_out_table, open_index, picture_name

HEAD_WEIGHT = {"binary": 1.0, "category": 0.5, "region": 0.5, "severity": 0.3}  # facts: loss of the original
HEAD_WIDTH = {"binary": 256, "category": 512, "region": 512, "severity": 128}
NO_QUESTION = {"study": 0, "head": 0, "target": 0, "type": "", "id": "", "question": ""}  # where none can be read
UNCERTAIN = {"ignore": None, "positive": 1.0, "negative": 0.0, "soft": 0.5}


# --- data -------------------------------------------------------------------------------------------------------------


def decode(path: str, size: int) -> np.ndarray:
    """(size, size) uint8: the whole picture, its sides in proportion, black beside it.

    The JPEG is decoded at the smallest scale that is still twice the wanted size: several times faster, no difference
    that a 224-pixel picture shows.
    """
    with Image.open(path) as picture:
        picture.draft("L", (2 * size, 2 * size))
        picture = picture.convert("L")
    scale = size / max(picture.size)
    small = picture.resize([max(1, round(side * scale)) for side in picture.size], Image.Resampling.BILINEAR)
    square = np.zeros((size, size), np.uint8)
    top, left = (size - small.height) // 2, (size - small.width) // 2
    square[top : top + small.height, left : left + small.width] = np.asarray(small)
    return square


class PictureCache:
    """Decoded pictures in one sparse file, each with a checksum: shared by all ranks and workers without any lock.

    Two that write the same picture write the same bytes, and what a crash left half written does not match its sum.
    """

    def __init__(self, path: Path, size: int, limit: int):
        self.size, self.limit, self.record = size, limit, size * size + 4
        self.file = None
        with contextlib.suppress(OSError):  # a folder one may only read: go on without
            self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644) if limit and hasattr(os, "pread") else None

    def get(self, number: int, path: str) -> np.ndarray:
        """Picture `number`, which lies at `path`. Raises what PIL raises for an unreadable one."""
        if self.file is None or number >= self.limit:
            return decode(path, self.size)
        data = os.pread(self.file, self.record, number * self.record)
        if len(data) == self.record and zlib.crc32(data[:-4]).to_bytes(4, "little") == data[-4:]:
            return np.frombuffer(data, np.uint8, self.size**2).reshape(self.size, self.size)
        picture = decode(path, self.size)
        data = picture.tobytes()
        with contextlib.suppress(OSError):  # the disk is full: go on without
            os.pwrite(self.file, data + zlib.crc32(data).to_bytes(4, "little"), number * self.record)
        return picture


class QuestionData(Dataset):
    """Questions of one split: picture (1, S, S) uint8, question, head, target, CheXpert labels (14,) of the study."""

    def __init__(self, index: Index, split: str, args: argparse.Namespace, tokenizer):
        self.rows, self.studies, self.root = index.questions(SPLITS[split]), index.studies, args.mimic_cxr_path
        self.count = min(args.max_samples or len(self.rows), len(self.rows))
        self.size, self.tokenizer, self.length = args.image_size, tokenizer, args.max_question_length
        self.labels = [index.studies[name].to_numpy() for name in CHEXPERT]
        self.uncertain = UNCERTAIN[args.chexpert_uncertain]
        record = self.size**2 + 4
        limit = min(int(args.cache_gb * 2**30) // record, len(index.studies))
        self.cache = PictureCache(index.folder / f"pictures_{self.size}.u8", self.size, limit)

    def __len__(self) -> int:
        return self.count

    def row(self, i: int) -> dict:
        return self.rows.take(i * len(self.rows) // self.count)

    def picture_path(self, study: int) -> str:
        ids = [self.studies[name][study].as_py() for name in ("subject_id", "study_id", "dicom_id")]
        return f"{self.root}/{picture_name(*ids)}"

    def __getitem__(self, i: int) -> dict:
        """Question i; `error` says why it cannot be used, which all ranks are told before the step."""
        picture = np.zeros((self.size, self.size), np.uint8)
        try:
            row = self.row(i)
        except InputError as reason:
            # a file of the index is gone or damaged since the start
            error = f"{str(reason).split('; ')[0]}; replace it and go on"
            return NO_QUESTION | {"index": i, "picture": picture, "error": error}

        path = self.picture_path(row["study"])
        error = ""
        try:
            picture = self.cache.get(row["study"], path)
        except Exception as reason:
            error = f"{path}: not a readable picture ({str(reason).replace(path, 'file')}); replace it and go on"
        return row | {"index": i, "picture": picture, "error": error}

    def collate(self, items: list[dict]) -> dict:
        texts = [item["question"] for item in items]
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        studies = [item["study"] for item in items]
        raw = torch.from_numpy(np.stack([column[studies] for column in self.labels], 1))
        known = (raw == 0) | (raw == 1) | ((raw == -1) & (self.uncertain is not None))
        value = torch.where(raw == -1, self.uncertain or 0.0, raw.float()) * known
        batch = {name: torch.tensor([item[name] for item in items]) for name in ("index", "head", "target", "study")}
        batch |= {"picture": torch.from_numpy(np.stack([item["picture"] for item in items])[:, None])}
        batch |= {"ids": tokens["input_ids"], "mask": tokens["attention_mask"], "label": value, "known": known}
        batch |= {"type": [item["type"] for item in items]}
        return batch | {"error": next((item["error"] for item in items if item["error"]), "")}


# --- model ------------------------------------------------------------------------------------------------------------


def grid_positions(height: int, width: int, dim: int, device: torch.device) -> torch.Tensor:
    """(height * width, dim) sine and cosine positions: convolution features do not say where they are."""
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, n, device=device) for n in (height, width)), indexing="ij")
    waves = 2.0 ** torch.arange(math.ceil(dim / 4), device=device) % 64 * math.pi / 2
    angles = torch.stack([y, x], -1).reshape(-1, 2, 1) * waves
    return torch.cat([angles.sin(), angles.cos()], 1).flatten(1)[:, :dim]


class FusionLayer(nn.Module):
    """The question's tokens attend to the picture's (cross-attention, then a feed-forward part), pre-norm."""

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        heads = max(1, dim // 64)  # 12 for 768
        self.norm, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, text: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
        """(B, T, dim), (B, P, dim) -> (B, T, dim)."""
        attended = self.attention(self.norm(text), picture, picture, need_weights=False)[0]
        text = text + self.dropout(attended)
        return text + self.dropout(self.mlp(self.norm_mlp(text)))


def broadcast_mask(mask: torch.Tensor) -> torch.Tensor:
    """(B, T) of 0 and 1 -> (B, 1, T, T) of bool: which tokens each token may attend to, as a view."""
    return mask[:, None, None].bool().expand(-1, -1, mask.shape[1], -1)


@torch.no_grad()
def takes_ready_mask(encoder: nn.Module) -> bool:
    """Whether a text encoder gives the same with broadcast_mask as with the plain mask, tried on padded tokens.

    Of a plain mask transformers asks at each forward pass whether anything is padded, for which the host waits for the
    GPU; a ready one it passes on as it is. BERT, RoBERTa and DistilBERT take it with torch's attention. Encoders with
    another attention, causal ones and some others do not.
    """
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    # other ids at each place, none of them usual for padding: what is attended to must show
    ids = torch.arange(4, 12).view(2, 4) % encoder.config.vocab_size
    training = encoder.training
    encoder.eval()
    try:
        plain = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        ready = encoder(input_ids=ids, attention_mask=broadcast_mask(mask)).last_hidden_state
        return torch.equal(plain, ready)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        return False
    finally:
        encoder.train(training)


def recompute(forward, *args, **kwargs):
    """What a layer gives; its activations are computed again in the backward pass."""
    return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)


class ChestModel(nn.Module):
    """Image encoder, text encoder, fusion, four answer heads; the CheXpert head sees the picture alone."""

    def __init__(
        self,
        image: nn.Module,
        text: nn.Module,
        statistics: tuple[list, list],
        precision: str,
        fusion_layers: int,
        dropout: float,
    ):
        super().__init__()
        self.image = image
        self.text = text
        self.precision = precision
        self.recomputed = False
        self.ready_mask = takes_ready_mask(text)
        dim = text.config.hidden_size
        widths = getattr(image.config, "hidden_sizes", None)
        width = widths[-1] if widths else image.config.hidden_size
        self.project = nn.Sequential(nn.Linear(width, dim), nn.LayerNorm(dim))
        self.fusion = nn.ModuleList(FusionLayer(dim, dropout) for _ in range(fusion_layers))
        self.norm = nn.LayerNorm(dim)

        def head(inside: int, hidden: int, classes: int) -> nn.Module:
            first = nn.Linear(inside, hidden)
            return nn.Sequential(first, nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, classes))

        self.heads = nn.ModuleDict({k: head(dim, HEAD_WIDTH[k], len(names)) for k, names in HEADS.items()})
        self.chexpert = head(dim, 512, len(CHEXPERT))
        for name, values in zip(("mean", "std"), statistics, strict=True):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def features(self, picture: torch.Tensor) -> torch.Tensor:
        """(B, 1, S, S) uint8 -> (B, P, dim)."""
        pixels = (picture / 255 - self.mean) / self.std  # one grey channel becomes the encoder's three
        if self.mean.is_cuda:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        out = self.image(pixel_values=pixels).last_hidden_state
        if out.dim() == 3:  # a transformer: tokens with positions of their own
            return self.project(out)
        tokens = self.project(out.flatten(2).transpose(1, 2))
        return tokens + grid_positions(*out.shape[2:], tokens.shape[2], tokens.device).to(tokens.dtype)

    def forward(self, picture: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits (B, classes) of binary, category, region, severity, and (B, 14) of CheXpert, fp32."""
        with autocast(picture.device, self.precision):
            seen = self.features(picture)
            if self.ready_mask:
                mask = broadcast_mask(mask)
            text = self.text(input_ids=ids, attention_mask=mask).last_hidden_state
            for layer in self.fusion:
                text = recompute(layer, text, seen) if self.recomputed else layer(text, seen)
            pooled = self.norm(text[:, 0])
            answers = [head(pooled) for head in self.heads.values()]
            return *(logits.float() for logits in answers), self.chexpert(seen.mean(1)).float()


def load_encoder(path: str, flag: str, options: dict | None = None):
    """A Hugging Face encoder in fp32, all of whose weights are in the file but for a pooler, which nothing here uses.

    options: values of its config, where that has them. Raises InputError naming flag and reason.
    """
    from transformers import AutoConfig, AutoModel

    kind = flag.split("_")[0]
    needs = ("num_channels",) if kind == "image" else ("hidden_size", "vocab_size")
    width = ("hidden_size", "hidden_sizes")

    try:
        if not Path(path).exists() and (path.count("/") > 1 or path[0] in "./~"):  # else a name on the hub
            raise OSError("no such folder")
        config = AutoConfig.from_pretrained(path)
        for name, value in (options or {}).items():
            if hasattr(config, name):
                setattr(config, name, value)
        if not all(hasattr(config, name) for name in needs) or not any(hasattr(config, name) for name in width):
            raise InputError(f"{path}: a {config.model_type!r} checkpoint is no {kind} encoder; check --{flag}")
        model, found = AutoModel.from_pretrained(path, config=config, dtype=torch.float32, output_loading_info=True)
        if lacking := sorted(name for name in found["missing_keys"] if "pooler" not in name):
            raise ValueError(f"{len(lacking)} weights are not in the file, such as {lacking[0]}")
        return model
    except InputError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = str(error).splitlines()[0][:150] if str(error) else type(error).__name__
        raise InputError(f"{path}: cannot be loaded ({reason}); download it and give its folder as --{flag}") from None


def load_tokenizer(path: str, config):
    """The tokenizer of a text encoder with this config. Raises InputError where one does not go with the other."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids = tokenizer("is there a pleural effusion?", add_special_tokens=False)["input_ids"]
        if set(ids) <= {tokenizer.unk_token_id}:
            raise ValueError("it knows no words")
        if len(tokenizer) > config.vocab_size:
            raise ValueError(f"it has {len(tokenizer)} words and the encoder {config.vocab_size}")
        return tokenizer
    except Exception as error:
        reason = str(error).splitlines()[0][:150] if str(error) else type(error).__name__
        raise InputError(f"{path}: no tokenizer ({reason}); download it again") from None


def image_statistics(path: str) -> tuple[list, list]:
    """(mean, standard deviation) of each channel as an image encoder wants them; ImageNet's where it does not say."""
    from transformers.image_processing_base import ImageProcessingMixin

    statistics = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    with contextlib.suppress(OSError, ValueError, KeyError):
        processor = ImageProcessingMixin.get_image_processor_dict(path)[0]
        statistics = processor["image_mean"], processor["image_std"]
    return statistics


def build_model(args: argparse.Namespace, precision: str, device: torch.device) -> tuple[ChestModel, object]:
    """(model, tokenizer): both encoders loaded, frozen where asked, checkpointing set. Raises InputError."""
    from transformers import utils

    utils.logging.set_verbosity_error()
    utils.logging.disable_progress_bar()
    image = load_encoder(args.image_encoder, "image_encoder")
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout")
    text = load_encoder(args.text_encoder, "text_encoder", dict.fromkeys(names, args.dropout))
    tokenizer = load_tokenizer(args.text_encoder, text.config)
    longest = getattr(text.config, "max_position_embeddings", None) or math.inf
    if args.max_question_length > longest:
        raise InputError(
            f"--max_question_length {args.max_question_length}: {args.text_encoder} takes {longest}; lower it"
        )
    statistics = image_statistics(args.image_encoder)

    # the same new layers on every rank
    torch.manual_seed(args.seed)
    model = ChestModel(image, text, statistics, precision, args.fusion_layers, args.dropout)
    image.requires_grad_(not args.freeze_image)
    text.requires_grad_(not args.freeze_text)
    try:
        freeze_unused(model, args.image_size)
    except (RuntimeError, ValueError) as error:
        if out_of_memory(error):
            raise
        size = f"3 x {args.image_size} x {args.image_size}"
        raise InputError(f"{args.image_encoder}: does not take pictures of {size}; see --image_size") from None
    if args.gradient_checkpointing:
        recompute_activations(model, args)
    return model.to(device), tokenizer


def recompute_activations(model: ChestModel, args: argparse.Namespace) -> None:
    """--gradient_checkpointing: activations are computed again in the backward pass. Raises as blocks_of does."""
    parts = (args.image_encoder, model.image), (args.text_encoder, model.text)
    blocks = [block for path, part in parts for block in blocks_of(part, path)]
    model.recomputed = True
    for block in blocks:
        block.forward = checkpointed(block.forward)


def blocks_of(encoder: nn.Module, path: str) -> nn.ModuleList:
    """The stages or layers of an encoder, the outermost. Raises InputError when it has none of the usual names."""
    named = [(name.split("."), part) for name, part in encoder.named_modules() if isinstance(part, nn.ModuleList)]
    known = [(len(name), part) for name, part in named if name[-1] in ("stages", "layers", "layer", "blocks", "block")]
    if not known:
        raise InputError(f"{path}: --gradient_checkpointing does not know its layers; use --no-gradient_checkpointing")
    return min(known, key=lambda pair: pair[0])[1]


def checkpointed(forward):
    """`forward`, its activations recomputed in the backward pass (ConvNeXt has no switch of its own for that)."""

    def call(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recompute(forward, *args, **kwargs)

    return call


def freeze_unused(model: ChestModel, size: int) -> None:
    """Freeze what no answer depends on (BERT's pooler): DDP would wait for its gradients for ever."""
    ids = torch.ones(1, 4, dtype=torch.long)
    precision, model.precision = model.precision, "no"
    out = model(torch.zeros(1, 1, size, size, dtype=torch.uint8), ids, torch.ones_like(ids))
    sum(logits.sum() for logits in out).backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    model.precision = precision


# --- loss -------------------------------------------------------------------------------------------------------------


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
    *answers, chexpert = model(batch["picture"], batch["ids"], batch["mask"])
    vqa = chexpert.new_zeros(())
    for place, (head, logits) in enumerate(zip(HEADS, answers, strict=True)):
        asked = batch["head"] == place
        entropy = F.cross_entropy(logits, torch.where(asked, batch["target"], 0), reduction="none")
        vqa = vqa + HEAD_WEIGHT[head] * (entropy * asked).sum() / max(1.0, counts[place])
    bce = F.binary_cross_entropy_with_logits(chexpert, batch["label"], reduction="none")
    labels = (bce * batch["known"]).sum() / max(1.0, counts[-1])
    loss = vqa + chexpert_weight * labels

    # a non-finite loss must give non-finite gradients, which reach every rank: all skip the step together
    return torch.stack([loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan), vqa, labels])


# --- engines ----------------------------------------------------------------------------------------------------------


class TorchEngine:
    """One process, or DDP around the model. A step with a non-finite gradient is skipped without a GPU sync."""

    def __init__(self, model: ChestModel, optimizer: torch.optim.AdamW, precision: str, grad_clip: float):
        self.model = model
        self.device = model.mean.device
        self.optimizer = optimizer
        self.grad_clip = grad_clip
        self.scaler = LossScaler(self.device, precision)
        # depthwise kernels have two layouts at once
        warnings.filterwarnings("ignore", message="Grad strides do not match")
        if world()[1] > 1:
            self.model = wrap_in_ddp(model, self.device)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        """Around the forward and backward pass of one micro-batch: gradients are exchanged after the last only."""
        return sync_gradients(self.model, now=last)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self, lr: float) -> torch.Tensor:
        """Clip, step, clear; returns the gradient norm before clipping (non-finite: the step was skipped)."""
        return clip_and_step(self.optimizer, self.scaler, self.grad_clip, lr)

    def scaler_state(self) -> dict:
        return self.scaler.state_dict()

    def restore(self, model: ChestModel, checkpoint: dict) -> None:
        deepspeed_utils.restore_optimizer(model, self.optimizer, None, checkpoint["model"], checkpoint["optimizer"])
        restore_scaler(self.scaler, checkpoint["scaler"], self.scaler.precision)

    def close(self) -> None:
        self.model = None


class DeepSpeedEngine:
    """DeepSpeed ZeRO-1/2/3 with the same AdamW; it skips a step with a non-finite gradient by itself."""

    def __init__(self, model: ChestModel, optimizer: torch.optim.AdamW, config: dict):
        self.model = deepspeed_utils.start_engine(model, optimizer, config)
        self.device = self.model.device
        self.optimizer = optimizer

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        """Around the forward and backward pass of one micro-batch: gradients are exchanged after the last only."""
        self.model.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=False)

    def update(self, lr: float) -> torch.Tensor:
        """Clip, step, clear; returns the gradient norm before clipping (non-finite: the step was skipped)."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.step()
        return torch.as_tensor(self.model.get_global_grad_norm(), device=self.model.device).float()

    def scaler_state(self) -> dict:
        return deepspeed_utils.scaler_state(self.model)

    def restore(self, model: ChestModel, checkpoint: dict) -> None:
        weights = checkpoint["model"]
        deepspeed_utils.restore_optimizer(model, self.optimizer, self.model, weights, checkpoint["optimizer"])
        deepspeed_utils.restore_scaler(self.model, checkpoint["scaler"])

    def close(self) -> None:
        # its hooks hold the model in cycles
        self.model.destroy()
        self.model = None


class Setup(NamedTuple):
    """How a run computes, as follows from its flags, files and machines; the reasons are for the banner.

    config: DeepSpeed's, which lies at config_path; None where torch trains. smallest_gpu: GiB, where --auto_optimize
    looked at one.
    """

    precision: str
    precision_reason: str = ""
    engine_reason: str = ""
    config: dict | None = None
    config_path: str = ""
    smallest_gpu: float | None = None


def start_engine(
    model: ChestModel, setup: Setup, batch: BatchSize, args: argparse.Namespace
) -> TorchEngine | DeepSpeedEngine:
    """The engine around the model, with a fused AdamW over what is trained."""
    if setup.config is None and model.mean.is_cuda:
        # not for DeepSpeed, which sends weights as flat bytes: they must be in order
        model.image.to(memory_format=torch.channels_last)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)
    if setup.config is None:
        return TorchEngine(model, optimizer, setup.precision, args.grad_clip)

    # what the file says of the batch was compared with the flags before the batch was fitted
    config = {name: value for name, value in setup.config.items() if name not in deepspeed_utils.OWNED}
    config = deepspeed_utils.fill_config(
        config, setup.config_path, batch.size, batch.accumulation, args.grad_clip, setup.precision
    )
    return DeepSpeedEngine(model, optimizer, config)


# --- training ---------------------------------------------------------------------------------------------------------


def train_one_epoch(
    engine: TorchEngine | DeepSpeedEngine, loader: DataLoader, training: TrainingRun, args: argparse.Namespace
) -> None:
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


@torch.no_grad()
def answer_questions(model: nn.Module, data: QuestionData, batch_size: int, num_workers: int, prefetch: int) -> dict:
    """Every question of a split once, in row order and the same on every rank: {name: array with a row for each}.

    Names: index, head, target, predicted class, study, type, chexpert: the study's probabilities (n, 14), and each
    question's part of the losses (entropy, bce, known). Raises InputError on all ranks for an unusable image of any.
    """
    model.eval()
    loader = create_distributed_dataloader(
        data,
        batch_size,
        train=False,
        num_workers=num_workers,
        collate_fn=data.collate,
        prefetch_factor=prefetch if num_workers else None,
    )
    rounds = math.ceil(math.ceil(len(data) / loader.batch_sampler.batch_size) / world()[1])
    batches = iter(loader)
    local = []
    error = ""
    for _ in range(rounds):
        # ZeRO-3 gathers weights in each pass, so every rank makes equally many
        batch = next(batches, None)
        has_share = batch is not None
        if not has_share:
            batch = data.collate([data[0]])
        error = error or batch["error"]
        batch = to_device(batch, model.mean.device)
        *answers, chexpert = model(batch["picture"], batch["ids"], batch["mask"])
        if has_share:
            local.append(batch_predictions(answers, chexpert, batch))
    with agree_on_errors():
        if error:
            raise InputError(error)
    return in_row_order(local)


def batch_predictions(answers: list[torch.Tensor], chexpert: torch.Tensor, batch: dict) -> dict[str, np.ndarray]:
    """A row for each question of a batch, see answer_questions."""
    classes = torch.stack([logits.argmax(1) for logits in answers], 1)
    predicted = classes.gather(1, batch["head"][:, None])[:, 0]
    rows = {name: batch[name].cpu().numpy() for name in ("index", "head", "target", "study")}
    rows |= {"predicted": predicted.cpu().numpy(), "chexpert": chexpert.sigmoid().cpu().numpy()}
    rows |= question_losses(answers, chexpert, batch)
    return rows | {"type": np.array(batch["type"], dtype="U48")}


def in_row_order(local: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """All ranks: the rows of every rank's batches as one, by index. local: this rank's, which may be none."""
    own = {name: np.concatenate([batch[name] for batch in local]) for name in local[0]} if local else None
    parts = [part for part in gather_objects(own) if part]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(rows["index"], kind="stable")
    return {name: values[order] for name, values in rows.items()}


def question_losses(answers: list[torch.Tensor], chexpert: torch.Tensor, batch: dict) -> dict[str, np.ndarray]:
    """Each question's cross-entropy (of its own head), sum of CheXpert losses, and number of known labels."""
    entropy = torch.zeros(len(chexpert), device=chexpert.device)
    for place, logits in enumerate(answers):
        asked = batch["head"] == place
        entropy += asked * F.cross_entropy(logits, torch.where(asked, batch["target"], 0), reduction="none")
    bce = F.binary_cross_entropy_with_logits(chexpert, batch["label"], reduction="none")
    values = {"entropy": entropy, "bce": (bce * batch["known"]).sum(1), "known": batch["known"].sum(1)}
    return {name: value.double().cpu().numpy() for name, value in values.items()}


def compute_losses(split: str, found: dict[str, np.ndarray], chexpert_weight: float) -> dict[str, float | None]:
    """The training loss of a split and its two parts, as batch_loss has them. None where one is not finite."""
    vqa = 0.0
    for place, head in enumerate(HEADS):
        rows = found["head"] == place
        if rows.any():
            vqa += HEAD_WEIGHT[head] * float(found["entropy"][rows].mean())
    labels = float(found["bce"].sum() / max(1.0, found["known"].sum()))
    values = {"loss": vqa + chexpert_weight * labels, "loss_vqa": vqa, "loss_chexpert": labels}
    return {f"{split}/{name}": value if math.isfinite(value) else None for name, value in values.items()}


def compute_metrics(split: str, found: dict[str, np.ndarray], index: Index) -> dict[str, float | None]:
    """Accuracy in all, per head and per question type, beside the most frequent training answer of each type; macro F1
    per head; CheXpert AUROC and average precision per label and macro, each study once, uncertain and blank labels left
    out. None where a metric is undefined (a label of one class only)."""
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision, multiclass_f1_score

    right = found["predicted"] == found["target"]
    usual = {kind: int(np.argmax(counts)) for kind, counts in index.facts["classes"].items()}
    kinds, at = np.unique(found["type"], return_inverse=True)
    guess = np.array([usual.get(kind, -1) for kind in kinds])[at] == found["target"]
    metrics = {f"{split}/vqa_accuracy": float(right.mean()), f"{split}/vqa_majority": float(guess.mean())}
    for place, (head, names) in enumerate(HEADS.items()):
        rows = found["head"] == place
        if rows.any():
            metrics[f"{split}/vqa_accuracy/{head}"] = float(right[rows].mean())
            metrics[f"{split}/vqa_majority/{head}"] = float(guess[rows].mean())
            pair = (torch.from_numpy(found[name][rows]) for name in ("predicted", "target"))
            metrics[f"{split}/vqa_f1/{head}"] = float(multiclass_f1_score(*pair, len(names), average="macro"))
    for place, kind in enumerate(kinds):
        metrics[f"{split}/vqa_accuracy/{kind}"] = float(right[at == place].mean())
        metrics[f"{split}/vqa_majority/{kind}"] = float(guess[at == place].mean())
    studies, first = np.unique(found["study"], return_index=True)
    truth, scores = chexpert_truth(index, studies), found["chexpert"][first]
    for name, metric in (("chexpert_auroc", binary_auroc), ("chexpert_ap", binary_average_precision)):
        values = {}
        for i, label in enumerate(CHEXPERT):
            rows = truth[:, i] >= 0
            both = len(np.unique(truth[rows, i])) == 2
            pair = torch.from_numpy(scores[rows, i]), torch.from_numpy(truth[rows, i].astype(np.int64))
            values[label] = float(metric(*pair)) if both else None
        defined = [value for value in values.values() if value is not None]
        metrics[f"{split}/{name}"] = sum(defined) / len(defined) if defined else None
        metrics |= {f"{split}/{name}/{label}": value for label, value in values.items()}
    return metrics


def chexpert_truth(index: Index, studies: np.ndarray) -> np.ndarray:
    """int8 (n, 14): 1, 0, or -1 where blank or uncertain."""
    truth = np.stack([index.studies[name].to_numpy()[studies] for name in CHEXPERT], 1)
    return np.where(truth >= 0, truth, -1)


def group_sizes(found: dict[str, np.ndarray], index: Index) -> dict[str, int]:
    """How many questions each row of the answers' table stands for, and how many studies each of the labels'."""
    kinds, counts = np.unique(found["type"], return_counts=True)
    sizes = {"all": len(found["index"])} | dict(zip(kinds.tolist(), counts.tolist(), strict=True))
    sizes |= {head: int((found["head"] == place).sum()) for place, head in enumerate(HEADS)}
    studies = np.unique(found["study"])
    known = (chexpert_truth(index, studies) >= 0).sum(0).tolist()
    return sizes | {"macro": len(studies)} | dict(zip(CHEXPERT, known, strict=True))


def print_metrics(title: str, metrics: dict[str, float | None], sizes: dict[str, int]) -> None:
    """Three tables: the loss and its parts, answers (all, heads, types), and CheXpert labels, each with its n."""
    losses: dict[str, dict] = {}
    answers: dict[str, dict] = {}
    labels: dict[str, dict] = {}
    for name, value in metrics.items():
        if "/" not in name:
            continue
        metric, *which = name.split("/", 2)[1:]
        if metric.startswith("loss"):
            losses[metric] = {"mean": "undefined" if value is None else value}
            continue
        table = labels if metric.startswith("chexpert") else answers
        group = which[0] if which else ("macro" if table is labels else "all")
        row = table.setdefault(group, {"n": sizes[group]})
        row[metric.split("_")[1]] = "undefined" if value is None else value
    print_table(f"{title}: loss", losses)
    print_table(f"{title}: answers", answers)
    print_table(f"{title}: CheXpert", labels)


def write_predictions(path: Path, data: QuestionData, found: dict[str, np.ndarray]) -> bool:
    """--save_predictions: one row a question, with CheXpert probabilities; returns whether it could be written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    heads = list(HEADS.items())
    rows = [data.row(int(i)) for i in found["index"]]
    table = {"study_id": [f"s{data.studies['study_id'][row['study']].as_py()}" for row in rows]}
    table |= {"question_id": [row["id"] for row in rows], "question_type": found["type"].tolist()}
    table |= {"head": [heads[h][0] for h in found["head"]], "question": [row["question"] for row in rows]}
    for name, column in (("answer", "predicted"), ("truth", "target")):
        table[name] = [heads[h][1][c] for h, c in zip(found["head"], found[column], strict=True)]
    table |= {f"p({label})": found["chexpert"][:, i] for i, label in enumerate(CHEXPERT)}
    content = pa.BufferOutputStream()
    pq.write_table(pa.table(table), content)
    return write_result(path, content.getvalue().to_pybytes())


def draw_images(items: list[dict], texts: list[str], colors: list[str]):
    """A matplotlib figure: images as the model sees them, each under its text, three in a row."""
    from matplotlib.figure import Figure

    # inches: the images are squares, and the longest text has room above each
    side, gap = 3.8, 0.15
    above = 0.2 + 0.17 * max((text.count("\n") + 1 for text in texts), default=1)
    rows = max(1, math.ceil(len(items) / 3))
    width, height = 3 * (side + gap) + gap, rows * (side + above)
    figure = Figure(figsize=(width, height))
    for k, (item, text, color) in enumerate(zip(items, texts, colors, strict=True)):
        left = gap + k % 3 * (side + gap)
        bottom = height - (k // 3 + 1) * (side + above)
        axes = figure.add_axes([left / width, bottom / height, side / width, side / height])
        axes.axis("off")
        axes.imshow(item["picture"], cmap="gray", vmin=0, vmax=255)
        # a dollar sign in a question is no formula
        axes.set_title(text, fontsize=9, color=color, parse_math=False)
    return figure


def evenly(count: int, wanted: int) -> list[int]:
    """Up to `wanted` places of `count`, evenly spaced."""
    return np.linspace(0, count - 1, min(wanted, count)).astype(int).tolist()


def draw_inputs(data: QuestionData):
    """A matplotlib figure: nine training images, each with its question, the answer and the CheXpert labels."""
    items = [data[i] for i in evenly(len(data), 9)]
    heads = list(HEADS.values())
    texts = []
    for item in items:
        labels = {name: column[item["study"]] for name, column in zip(CHEXPERT, data.labels, strict=True)}
        lines = [wrap(item["question"][:600], 48), f"answer: {heads[item['head']][item['target']]}"]
        for word, value in (("present", 1), ("uncertain", -1), ("absent", 0)):
            if names := [name for name, label in labels.items() if label == value]:
                lines.append(wrap(f"{word}: {', '.join(names)}", 48))
        texts.append("\n".join([*lines, "NOT READABLE"] if item["error"] else lines))
    return draw_images(items, texts, ["black"] * len(items))


def draw_answers(data: QuestionData, found: dict[str, np.ndarray]):
    """A matplotlib figure: nine images, each with its question, the answer given and the true one."""
    heads = list(HEADS.values())
    items = []
    texts = []
    colors = []
    for k in evenly(len(found["index"]), 9):
        item = data[int(found["index"][k])]
        names = heads[found["head"][k]]
        says = names[found["predicted"][k]]
        true = names[found["target"][k]]
        items.append(item)
        texts.append(f"{wrap(item['question'][:600], 48)}\nsays: {says}\ntrue: {true}")
        colors.append("darkgreen" if says == true else "firebrick")
    return draw_images(items, texts, colors)


def draw_curves(found: dict[str, np.ndarray], index: Index):
    """A matplotlib figure: ROC curves of the CheXpert labels and the confusion matrix of each head."""
    from matplotlib.figure import Figure

    # left edge, bottom edge and side of each square, inches
    places = {"roc": (0.9, 11.6, 4.6), "binary": (9.9, 11.6, 4.6), "severity": (15.6, 11.6, 4.6)}
    places |= {"category": (2.3, 2.0, 8.0), "region": (12.0, 2.0, 8.0)}
    width, height = 20.3, 16.8
    figure = Figure(figsize=(width, height))
    for name, (left, bottom, side) in places.items():
        axes = figure.add_axes([left / width, bottom / height, side / width, side / height])
        if name == "roc":
            draw_roc(axes, found, index)
        else:
            draw_confusion(axes, found, name)
    return figure


def draw_roc(axes, found: dict[str, np.ndarray], index: Index) -> None:
    """The ROC curve of each CheXpert label, each study once, with its area and number of studies beside."""
    from torchmetrics.functional.classification import binary_auroc, binary_roc

    studies, first = np.unique(found["study"], return_index=True)
    truth = chexpert_truth(index, studies)
    for i, label in enumerate(CHEXPERT):
        rows = truth[:, i] >= 0
        if len(np.unique(truth[rows, i])) == 2:
            scores = torch.from_numpy(found["chexpert"][first][rows, i])
            target = torch.from_numpy(truth[rows, i].astype(np.int64))
            false, true, _ = binary_roc(scores, target)
            text = f"{label}: {float(binary_auroc(scores, target)):.3f} (n {rows.sum()})"
            axes.plot(false, true, label=text, color=f"C{i % 10}", linestyle="-" if i < 10 else "--")
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
    axes.set(title="CheXpert ROC, area, studies", xlabel="false positive rate", ylabel="true positive rate", aspect=1)
    if len(axes.lines) > 1:
        axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0, frameon=False)


def draw_confusion(axes, found: dict[str, np.ndarray], head: str) -> None:
    """The confusion matrix of a head: colours are shares of a row, numbers are questions."""
    from torchmetrics.functional.classification import multiclass_confusion_matrix

    names = HEADS[head]
    rows = found["head"] == list(HEADS).index(head)
    pair = (torch.from_numpy(found[name][rows]) for name in ("predicted", "target"))
    matrix = multiclass_confusion_matrix(*pair, len(names)).numpy()
    shares = matrix / matrix.sum(1, keepdims=True).clip(1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    size = 12 if len(names) < 8 else 8 if len(names) < 20 else 6
    for row, column in zip(*np.nonzero(matrix), strict=True):
        count = matrix[row, column]
        color = "white" if shares[row, column] > 0.6 else "black"
        text = str(count) if count < 10_000 else f"{count / 1000:.0f}k"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=color)
    axes.set_title(f"{head}: {rows.sum():,} questions (rows: truth)")
    axes.set_xticks(range(len(names)), names, rotation=90 if len(names) > 8 else 0, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)


def draw_split(data: QuestionData, index: Index, split: str, predictions: dict[str, np.ndarray]) -> dict:
    """The figures of an evaluation, {name: matplotlib figure}."""
    return {f"{split}_answers": draw_answers(data, predictions), f"{split}_curves": draw_curves(predictions, index)}


def evaluate(
    model: nn.Module, data: QuestionData, index: Index, split: str, batch_size: int, args: argparse.Namespace
) -> tuple[dict[str, float | None], dict[str, np.ndarray]]:
    """(metrics, predictions) of a split, the same on every rank and at any number of ranks."""
    predictions = answer_questions(model, data, batch_size, args.num_workers, args.prefetch_factor)
    metrics = compute_losses(split, predictions, args.chexpert_weight)
    return metrics | compute_metrics(split, predictions, index), predictions


# --- the run ----------------------------------------------------------------------------------------------------------


def processes_per_node() -> int:
    """Ranks that share their cores: srun may give each its own, torchrun gives all of a node the same."""
    places = gather_objects((platform.node(), core_numbers()))
    return max(sum(bool(node == n and cores & c) for n, c in places) for node, cores in places)


def translate_guide_keys(args: argparse.Namespace, ranks: Ranks) -> None:
    """All ranks: turn the guide's keys into our flags, now that the processes are counted; rank 0 prints each.

    A flag of the command line stands.
    """
    says = {"batch_size_per_gpu": f"--batch_size {args.batch_size}{given(args, 'batch_size')}"}
    if args.fp16 is not None:
        says["fp16"] = translate_fp16(args, ranks.device)
    if args.dataloader_num_workers is not None:
        local = processes_per_node()
        note = given(args, "num_workers")
        if args.source["num_workers"] not in ("command line", "--debug"):
            args.num_workers = args.dataloader_num_workers // local
            args.source["num_workers"] = args.source["dataloader_num_workers"]
            note = f" (each of the node's {local} processes){given(args, 'num_workers')}"
        says["dataloader_num_workers"] = f"--num_workers {args.num_workers}{note}"
    engine = "--use_deepspeed" if args.use_deepspeed else "--use_ddp" if args.use_ddp else "one process, or as launched"
    says["engine"] = says["enabled"] = engine + (given(args, "use_deepspeed") or given(args, "use_ddp"))
    says["stage"] = "nothing to set here: no DeepSpeed"
    if args.deepspeed_config:
        file = Path(args.deepspeed_config)
        shown = file.relative_to(HERE) if file.is_relative_to(HERE) else file
        says["stage"] = f"--deepspeed_config {shown}{given(args, 'deepspeed_config')}"
    says["zero_stage"] = says["stage"]
    says["offload_optimizer"] = "the optimizer on the CPU, where DeepSpeed trains and no file of it is named"
    if args.offload_optimizer is False:
        says["offload_optimizer"] = "no optimizer on the CPU, where no DeepSpeed file is named"
    says["pin_memory"] = "nothing to set here: done by itself on a GPU"
    says["effective_batch_size"] = "nothing to set here: batch x accumulation x processes"
    for key, value in guide_keys(args.config):
        print_main(f"{Path(args.config).name}: {key} {json.dumps(value)} -> {says[key.split('.')[-1]]}")
    for name in (
        "batch_size_per_gpu",
        "fp16",
        "pin_memory",
        "dataloader_num_workers",
        "effective_batch_size",
        "engine",
    ):
        setattr(args, name, None)
    args.deepspeed_enabled = args.zero_stage = None


def translate_fp16(args: argparse.Namespace, device: torch.device) -> str:
    """What `fp16` of the guide becomes: half precision where there is a GPU."""
    note = given(args, "mixed_precision")
    if not note:
        args.mixed_precision = "fp16" if args.fp16 and device.type == "cuda" else "no"
        note = " (fp16 needs a GPU)" if args.fp16 and device.type != "cuda" else ""
    return f"--mixed_precision {args.mixed_precision}{note}"


def given(args: argparse.Namespace, name: str) -> str:
    """A note where another value than the guide's key will be used: the command line's, or the hardware's."""
    source = args.source[name]
    if source in ("command line", "--debug"):
        return f" ({source})"
    return ", but --auto_optimize finds its own" if args.auto_optimize and name in ("batch_size", "num_workers") else ""


def guide_keys(config: str | None) -> list[tuple[str, object]]:
    """[(section.key, value)] of a config's keys that translate_guide_keys explains."""
    found = []
    for name, value in (read_config(config) if config else {}).items():
        inside = {f"{name}.{key}": item for key, item in value.items()} if name in SECTIONS else {name: value}
        found += [(key, item) for key, item in inside.items() if key.split(".")[-1] in GUIDE_KEYS and item is not None]
    return found


def apply_hardware(args: argparse.Namespace, ranks: Ranks) -> tuple[int, float | None]:
    """--auto_optimize: set what the command line did not from the weakest machine of the job (file < this < flags).

    Returns (the ZeRO stage for it, GiB of the smallest GPU or None on CPU).
    """
    memory = compute = None
    if ranks.device.type == "cuda":
        card = torch.cuda.get_device_properties(ranks.device)
        memory = card.total_memory / 2**30
        compute = float(f"{card.major}.{card.minor}")
    facts = gather_objects([memory, compute, usable_cores(), available_ram_gb()])
    weakest = [
        min((value for value in column if value is not None), default=None) for column in zip(*facts, strict=True)
    ]
    smallest_gpu, lowest_compute, fewest_cores, least_ram = weakest
    local = processes_per_node()
    chosen = settings_for(
        ranks.world_size,
        smallest_gpu,
        lowest_compute,
        fewest_cores,
        least_ram,
        deepspeed_utils.available(),
        batch_size=args.batch_size if args.source["batch_size"] == "command line" else None,
        processes_per_node=local,
    )

    # what the command line says stands
    values = {
        "batch_size": chosen["batch_size_per_gpu"],
        "gradient_accumulation_steps": chosen["gradient_accumulation_steps"],
        "num_workers": chosen["dataloader_num_workers"] // local,
        "prefetch_factor": chosen["prefetch_factor"],
        "gradient_checkpointing": chosen["gradient_checkpointing"],
        "offload_optimizer": not is_roomy(smallest_gpu),
    }
    for name, value in values.items():
        if args.source[name] not in ("command line", "--debug"):
            setattr(args, name, value)
            args.source[name] = "hardware"
    return chosen["zero_stage"] or 2, smallest_gpu


def describe_memory(args: argparse.Namespace, memory: float, config: dict | None, batch: BatchSize) -> str:
    """For the banner: the smallest GPU's memory in GiB, and what --auto_optimize has set by it."""
    settings = []
    if args.source["batch_size"] == "hardware" and batch.size == args.batch_size:
        settings.append(f"batch {batch.size}")
    if args.source["gradient_checkpointing"] == "hardware" and batch.recomputed == args.gradient_checkpointing:
        settings.append("activations recomputed" if batch.recomputed else "activations kept")
    if config and args.source["offload_optimizer"] == "hardware" and args.source["deepspeed_config"] == "default":
        settings.append(f"optimizer on the {'CPU' if args.offload_optimizer else 'GPU'}")
    reason = "16 GB or more" if is_roomy(memory) else "below 16 GB"
    return f"{memory:.1f} GiB on the smallest GPU, {reason}: {', '.join(settings) or 'nothing set by it'}"


def choose_engine(args: argparse.Namespace, ranks: Ranks) -> tuple[bool, str]:
    """(whether DeepSpeed trains, why), as the guide's diagram has it."""
    if args.use_ddp:
        return False, "--use_ddp"
    flag = "--use_deepspeed" if args.use_deepspeed else "--deepspeed_config"
    if args.use_deepspeed or args.source["deepspeed_config"] == "command line":
        if not deepspeed_utils.available():
            raise InputError(f"{flag}: DeepSpeed is not installed; pip install deepspeed, or use --use_ddp")
        return True, flag
    if ranks.world_size == 1:
        return False, "one process"
    if not args.auto_optimize:
        return False, "--no_auto_optimize"
    if not deepspeed_utils.available():
        return False, "DeepSpeed is not installed"
    return True, "2 or more processes"


def deepspeed_settings(args: argparse.Namespace, stage: int) -> tuple[dict, str]:
    """(config, file name): the JSON of --deepspeed_config, or the one of configs/ for the ZeRO stage.

    A file that the user names is used as it is. Ours gives way to what --auto_optimize finds of memory: no
    checkpointing and no optimizer on the CPU where the GPU has room.
    """
    path = args.deepspeed_config or str(HERE / "configs" / f"deepspeed_{'zero3' if stage == 3 else 'config'}.json")
    config = deepspeed_utils.read_deepspeed_config(path)
    source = args.source["gradient_checkpointing"]
    named = args.source["deepspeed_config"] != "default"
    weaker = source != "command line" if named else source == "default"
    if "activation_checkpointing" in config and weaker:
        args.gradient_checkpointing = True
        args.source["gradient_checkpointing"] = Path(path).name
    if args.offload_optimizer is False and not named:
        config["zero_optimization"].pop("offload_optimizer", None)
    if args.compile and config["zero_optimization"]["stage"] == 3:
        raise InputError("--compile: does not go with ZeRO-3; leave it out, or use stage 1 or 2")
    return config, path


def choose_precision_with(config: dict | None, wanted: str, device: torch.device) -> tuple[str, str]:
    """(precision, why): `auto` heeds what the DeepSpeed file enables or disables, where the device can.

    These words are then taken out of the config, so that fill_config finds nothing wrong with the choice.
    """
    if config is None or wanted != "auto":
        return choose_precision(wanted, device)
    enabled = {name: config.get(name, {}).pop("enabled", "auto") for name in ("bf16", "fp16")}
    named = next((name for name, value in enabled.items() if value is True and device.type == "cuda"), None)
    chosen, why = choose_precision(named or wanted, device)
    if enabled.get(chosen) is False:
        return "no", f"{chosen} is disabled in the DeepSpeed file"
    return chosen, "the DeepSpeed file" if named else why


def choose_setup(args: argparse.Namespace, ranks: Ranks) -> Setup:
    """All ranks: engine, precision, and with --auto_optimize the flags that the hardware decides. Raises InputError."""
    stage, smallest_gpu = apply_hardware(args, ranks) if args.auto_optimize else (2, None)
    config = None
    config_path = engine_reason = ""
    with agree_on_errors():
        use_deepspeed, engine_reason = choose_engine(args, ranks)
        if use_deepspeed and not args.eval_only:
            config, config_path = deepspeed_settings(args, stage)
    precision, why = agree_on_precision(partial(choose_precision_with, config, args.mixed_precision, ranks.device))

    # what the file says must go with the flags
    with agree_on_errors():
        if config is not None:
            deepspeed_utils.fill_config(
                config, config_path, args.batch_size, args.gradient_accumulation_steps, args.grad_clip, precision
            )
    why = set_numerics(ranks.device, precision, why, args.deterministic)
    return Setup(precision, why, engine_reason, config, config_path, smallest_gpu)


def largest_batch(batch_size: int, args: argparse.Namespace) -> dict:
    """A made-up batch, on the host, of questions of the full length, with all heads and labels."""
    kinds = torch.arange(batch_size) % len(HEADS)
    zeros = torch.zeros(batch_size, dtype=torch.long)
    side, length, labels = args.image_size, args.max_question_length, len(CHEXPERT)
    batch = {"index": zeros, "head": kinds, "target": zeros, "study": zeros}
    batch["picture"] = torch.zeros(batch_size, 1, side, side, dtype=torch.uint8)
    batch["ids"] = torch.zeros(batch_size, length, dtype=torch.long)
    batch["mask"] = torch.ones(batch_size, length, dtype=torch.long)
    batch["label"] = torch.zeros(batch_size, labels)
    batch["known"] = torch.ones(batch_size, labels, dtype=torch.bool)
    return batch | {"type": [""] * batch_size, "error": ""}


def trial_step(model: ChestModel, batch: dict, args: argparse.Namespace) -> None:
    """Forward and backward pass of one micro-batch, as in training; the gradients stay in the model."""
    counts = [len(batch["type"])] * (len(HEADS) + 1)
    batch = to_device(batch, model.mean.device)
    batch_loss(model.train(), batch, counts, args.chexpert_weight)[0].backward()


def held_copies(config: dict | None) -> float:
    """Copies of the trained parameters that a GPU holds beside them and their gradients: see copies_held.

    DeepSpeed shares the moments and the masters out over the processes, or keeps them on the CPU.
    """
    if config is None:
        return copies_held()
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    on_cpu = offload.get("device", "none") != "none"
    return 1 if on_cpu else 1 + 3 / world()[1]


def choose_batch_size(
    model: ChestModel, config: dict | None, checkpoint: dict | None, args: argparse.Namespace
) -> BatchSize:
    """The batch of the flags, or what a step of questions of the full length leaves room for; recomputation where no
    flag decided.

    config: DeepSpeed's, None where torch trains.
    """
    recomputed = bool(args.gradient_checkpointing)
    wanted = BatchSize(args.batch_size, args.gradient_accumulation_steps, args.source["batch_size"], recomputed)
    if not fits_by_itself(args.auto_batch, model.mean.device):
        return wanted

    def try_once(size: int) -> None:
        trial_step(model, largest_batch(size, args), args)

    # the encoders' layers must be known, or there is no recomputation to turn on
    turn_on = None
    advice = "pass --gradient_checkpointing or a smaller --image_size"
    by_hardware = args.source["gradient_checkpointing"] == "hardware" and not args.gradient_checkpointing
    if by_hardware or args.gradient_checkpointing is None:
        with contextlib.suppress(InputError):
            blocks_of(model.image, args.image_encoder)
            blocks_of(model.text, args.text_encoder)
            turn_on = partial(recompute_activations, model, args)
            advice = "pass a smaller --image_size"
    return fit_batch_to_memory(
        try_once,
        model,
        wanted,
        batch_flags,
        advice,
        copies=held_copies(config),
        recompute=turn_on,
        checkpoint=checkpoint,
    )


def load_pretrained(model: ChestModel, path: str) -> None:
    """--pretrained_weights: the exported weights of a run, of any engine. Raises InputError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if not Path(path).is_file():
            raise InputError(f"{path}: no such file; check --pretrained_weights")
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a safetensors file ({error}); give a run's model.safetensors") from None
    shapes = {name: value.shape for name, value in weights.items()}
    own = {name: value.shape for name, value in model.state_dict().items()}
    if unlike := sorted(name for name in shapes.keys() | own.keys() if shapes.get(name) != own.get(name)):
        raise InputError(f"{path}: weights of another model ({unlike[0]}); give the encoders it was trained with")
    load_trained(model, weights)
    print_main(f"weights from {path}; the optimizer starts anew")


def evaluate_only(model: ChestModel, data: QuestionData, index: Index, step: int, args: argparse.Namespace) -> None:
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
    metrics, predictions = evaluate(model, data, index, split, args.batch_size, args)
    if world()[0] > 0:
        return

    print_metrics(f"{split}, step {step}", metrics, group_sizes(predictions, index))
    report = run_folder / f"eval_{split}.json"
    written = [write_result(report, (json.dumps({**metrics, "step": step}, indent=2) + "\n").encode())]
    for name, figure in draw_split(data, index, split, predictions).items():
        written.append(save_figure(run_folder / "figures" / f"{name}.png", figure))
    if args.save_predictions:
        written.append(write_predictions(run_folder / f"predictions_{split}.parquet", data, predictions))
    if all(written):
        print(f"{len(data):,} questions; written: {report}, {run_folder}/figures", flush=True)


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
        if not len(index.questions(SPLITS[needed])):
            advice = f"see {args.mimic_cxr_path}/mimic-cxr-2.0.0-split.csv.gz, or choose another --quality_grade"
            raise InputError(f"{args.mimic_qa_path}: no questions in split {needed!r}; {advice}")
    if world()[0] == 0:
        print_table("questions left out", left_out_table(index.facts))
        for title in ("ratings", "studies"):
            if rows := {name: {"count": count} for name, count in index.facts[title].items()}:
                print_table(title, rows)
    return index


def open_checkpoint(args: argparse.Namespace) -> dict | None:
    """All ranks: the checkpoint to resume or to evaluate, None for a fresh start. Raises InputError."""
    run_folder = Path(args.output_dir)
    if not args.eval_only:
        return load_checkpoint(args.resume_from, run_folder, FORMAT, resume=True)
    path = args.resume_from or str(run_folder / "best.pt")
    with agree_on_errors():
        if not args.resume_from and not Path(path).exists():
            raise InputError(
                f"{run_folder}: holds no best.pt; check --output_dir, or give a checkpoint with --resume_from"
            )
    checkpoint = load_checkpoint(path, run_folder, FORMAT, resume=False)
    if checkpoint is None:
        raise InputError(f"{run_folder}: no checkpoint to use; give one with --resume_from")
    return checkpoint


def run(args: argparse.Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun = time.time()
    translate_guide_keys(args, ranks)
    setup = choose_setup(args, ranks)
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
        sets = {split: QuestionData(index, split, args, tokenizer) for split in SPLITS}
    if args.eval_only:
        evaluate_only(model, sets[args.eval_split], index, checkpoint["step"], args)
        return 0
    if ranks.launcher == "python" and torch.cuda.device_count() > 1:
        print_main(f"{torch.cuda.device_count()} GPUs are here and one is used: --world_size, or the launcher")
    code = fit(model, sets, index, checkpoint, setup, args, ranks)
    print_main(f"{time.time() - begun:.0f} seconds in all")
    del lock
    return code


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

    # in ZeRO-3, a process holds a part of each parameter
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    trained = sum(size for size, learns in sizes if learns)

    questions = ", ".join(f"{len(data):,} {split}" for split, data in sets.items())
    selected = f"grade {args.quality_grade}, {source['quality_grade']}; view {args.view}"
    epoch_steps = training.planned_steps // args.epochs
    rows = {
        "engine": f"{engine} ({setup.engine_reason})",
        "batch": f"{batch.size} per GPU ({batch.source}) x {accumulation} x {world_size} = "
        f"{training.effective_batch_size}",
        "learning rate": f"{args.learning_rate:g} ({source['learning_rate']}), {args.lr_schedule}, not scaled",
        "precision": setup.precision_reason,
        "checkpointing": f"{batch.recomputed} ({recomputed_source})",
        "loading": f"{args.num_workers} workers per GPU ({source['num_workers']}), {args.cache_gb:g} GiB disk cache",
        "questions": f"{questions} ({selected})",
        "epochs": f"{args.epochs} epochs ({source['epochs']}), {epoch_steps} steps an epoch",
        "trained": f"{trained:,} of {sum(size for size, _ in sizes):,} parameters",
    }
    if setup.smallest_gpu is not None:
        rows["memory"] = describe_memory(args, setup.smallest_gpu, setup.config, batch)
    return rows


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


def checkpoint_contents(
    model: ChestModel, engine: TorchEngine | DeepSpeedEngine, batch: BatchSize, precision: str, this_run: dict
) -> dict:
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


def fit(
    model: ChestModel, sets: dict[str, QuestionData], index: Index, checkpoint: dict | None, setup: Setup, args, ranks
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
    engine = start_engine(model, setup, batch, args)
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
        code, sizes = train(model, engine, loader, training, sets, index, args)
        if code:
            return code
        best_step = test_best(model, sets, index, training, sizes, batch.size, args)
        finish_run(training, begun, {"best_step": best_step} | (progress.best_metrics or {}))
        export(run_folder, "best.pt" if len(sets["val"]) else "last.pt")
        say_where(run_folder)
    return 0


def train(
    model: ChestModel, engine, loader: DataLoader, training: TrainingRun, sets: dict, index: Index, args
) -> tuple[int, dict[str, int]]:
    """All epochs, each with its validation; (exit code of a stop signal or 0, group_sizes of the validation)."""
    progress = training.progress
    sampler = loader.batch_sampler
    sizes: dict[str, int] = {}
    say_if_finished(training, "--epochs")
    if progress.step == 0:
        training.log.figures(lambda: {"inputs": draw_inputs(sets["train"])}, 0)
    while True:
        train_one_epoch(engine, loader, training, args)
        if code := end_epoch(training):
            return code, sizes
        if len(sets["val"]):
            metrics, predictions = evaluate(model, sets["val"], index, "val", sampler.batch_size, args)
            log_evaluation(sets["val"], index, "val", metrics, predictions, training)
            sizes = group_sizes(predictions, index)
            accuracy, auroc = metrics["val/vqa_accuracy"], metrics["val/chexpert_auroc"]
            shown = "undefined" if auroc is None else f"{auroc:.4f}"
            print_main(f"epoch {progress.epoch + 1}: val accuracy {accuracy:.4f}, CheXpert AUROC {shown}")
            epoch_complete = progress.samples >= sampler.used
            if keep_best(training, accuracy, epoch_complete):
                progress.best_metrics = metrics
                keep_predictions(sets["val"], "val", predictions, args)
        if not next_epoch(training):
            return 0, sizes


def log_evaluation(
    data: QuestionData, index: Index, split: str, metrics: dict, predictions: dict, training: TrainingRun
) -> None:
    """What evaluate gives, in the log; its figures, too, but not those of every short epoch."""
    progress = training.progress
    training.log.write(progress.step, progress.epoch + 1, metrics)
    seconds_apart = 0 if split == "test" else 60
    training.log.figures(lambda: draw_split(data, index, split, predictions), progress.step, seconds_apart)


def keep_predictions(data: QuestionData, split: str, predictions: dict, args: argparse.Namespace) -> None:
    """--save_predictions: rank 0 writes predictions_<split>.parquet."""
    if args.save_predictions and world()[0] == 0:
        write_predictions(Path(args.output_dir) / f"predictions_{split}.parquet", data, predictions)


def test_best(
    model: ChestModel,
    sets: dict[str, QuestionData],
    index: Index,
    training: TrainingRun,
    sizes: dict[str, int],
    batch_size: int,
    args: argparse.Namespace,
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
            metrics, predictions = evaluate(model, sets[split], index, split, batch_size, args)
            # the row stands at the last step, but its weights may be older
            metrics["best_step"] = best_step
            log_evaluation(sets[split], index, split, metrics, predictions, training)
            keep_predictions(sets[split], split, predictions, args)
            sizes = group_sizes(predictions, index)
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
        wanted = args.batch_size if args.source["batch_size"] == "command line" else None
        chosen = settings_for(
            processes, memory, 9.0, usable_cores(), available_ram_gb(), deepspeed=False, batch_size=wanted
        )
        values = {"batch_size": chosen["batch_size_per_gpu"]}
        values |= {name: chosen[name] for name in ("gradient_accumulation_steps", "gradient_checkpointing")}
        for name, value in values.items():
            if args.source[name] != "command line":
                setattr(args, name, value)

    trace = rehearsal.Trace()
    accumulation = args.gradient_accumulation_steps
    with rehearsal.imaginary_gpu(trace) as ranks, rehearsal.random_weights(ranks.device):
        precision, _ = choose_precision(args.mixed_precision, ranks.device)
        set_numerics(ranks.device, precision, "", args.deterministic)
        with ranks.device:
            model, _ = build_model(args, precision, ranks.device)
        batch = BatchSize(args.batch_size, accumulation, "")
        engine = start_engine(model, Setup(precision), batch, args)
        trial = partial(trial_step, model, largest_batch(args.batch_size, args), args)
        step = rehearsal.rehearse_step(trace, model, engine.optimizer, trial, accumulation, processes)

    def words(samples: int) -> str:
        size, micro_batches = smaller_batch(args.batch_size, accumulation, samples)
        return batch_flags(size, micro_batches)

    otherwise = "a smaller --image_size" if args.gradient_checkpointing else "--gradient_checkpointing"
    title = f"MIMIC-CXR by DDP, {args.batch_size} per GPU x {accumulation} accumulation, {precision}"
    title += f", activations {'recomputed' if args.gradient_checkpointing else 'kept'}"
    print(
        "ZeRO, which shares the optimizer's state over the processes, is not rehearsed: it takes less than this by DDP"
    )
    rehearsal.report_rehearsal(title, step, args.batch_size, memory, words, otherwise)
    rehearsal.end_rehearsal()


def out_of_memory_advice(size: int, accumulation: int, args: argparse.Namespace, device: torch.device) -> str:
    """The flags that take less memory than this batch."""
    half, micro_batches = split_batch(size, accumulation)
    smaller = batch_flags(half, micro_batches)
    otherwise = "--gradient_checkpointing, a smaller --image_size or ZeRO-3"
    otherwise += auto_batch_advice(args.auto_batch, device)
    return f"--batch_size {size}; try {smaller} (the same result), {otherwise}"


def main(args: argparse.Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    launch_workers(args.world_size or 1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not torch.cuda.device_count():
        # spares DeepSpeed a search and a warning; setup_distributed says why there is no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with setup_distributed(timeout=args.dist_timeout) as ranks:
        wanted = args.use_deepspeed or args.source["deepspeed_config"] == "command line"
        if wanted and ranks.world_size == 1 and not args.eval_only:
            # DeepSpeed wants a group even so
            backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

        def advice() -> str:
            # --auto_optimize sets these on the way
            return out_of_memory_advice(args.batch_size, args.gradient_accumulation_steps, args, ranks.device)

        with explain_out_of_memory(advice):
            return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
