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

from cli_utils import (
    InputError,
    Parser,
    add_common_arguments,
    asked,
    end_with,
    number,
    parse_arguments,
    read_config,
    run_main,
    set_derived,
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
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import checkpoint_utils as ckpt
import deepspeed_utils as dsu
import distributed_utils as du
import hardware_utils as hw
import mimic_cxr_index as mci
from logging_utils import RunLog, print_banner, print_table, save_figure, wrap, write_result
from old_loop_utils import (
    auto_batch_advice,
    batch_flags,
    copies_held,
    fit_batch_to_memory,
    fits_by_itself,
    forget_other_best,
    keep_best,
    say_if_finished,
    say_saved,
    split_record,
)

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

    def __init__(self, index: mci.Index, split: str, args: argparse.Namespace, tokenizer):
        self.rows, self.studies, self.root = index.questions(SPLITS[split]), index.studies, args.mimic_cxr_path
        self.count = min(args.max_samples or len(self.rows), len(self.rows))
        self.size, self.tokenizer, self.length = args.image_size, tokenizer, args.max_question_length
        self.labels = [index.studies[name].to_numpy() for name in mci.CHEXPERT]
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
        return f"{self.root}/{mci.picture_name(*ids)}"

    def __getitem__(self, i: int) -> dict:
        try:
            row = self.row(i)
        except InputError as reason:  # a file of the index that is gone or damaged since the start
            picture = np.zeros((self.size, self.size), np.uint8)
            return NO_QUESTION | {"index": i, "picture": picture, "error": str(reason).split("; ")[0]}
        path, error = self.picture_path(row["study"]), ""
        try:
            picture = self.cache.get(row["study"], path)
        except Exception as reason:  # told to all ranks at the step's exchange, which then end together
            text = str(reason).replace(path, "file")
            picture, error = np.zeros((self.size, self.size), np.uint8), f"{path}: not a readable picture ({text})"
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
        if hw.out_of_memory(error):
            raise
        return False
    finally:
        encoder.train(training)


class ChestModel(nn.Module):
    """Image encoder, text encoder, fusion, four answer heads; the CheXpert head sees the picture alone."""

    def __init__(self, image: nn.Module, text: nn.Module, statistics: tuple[list, list], args: argparse.Namespace):
        super().__init__()
        self.image, self.text, self.precision, self.checkpoint = image, text, args.mixed_precision, False
        self.ready_mask = takes_ready_mask(text)
        dim, width = text.config.hidden_size, getattr(image.config, "hidden_sizes", None)
        width = width[-1] if width else image.config.hidden_size
        self.project = nn.Sequential(nn.Linear(width, dim), nn.LayerNorm(dim))
        self.fusion = nn.ModuleList(FusionLayer(dim, args.dropout) for _ in range(args.fusion_layers))
        self.norm = nn.LayerNorm(dim)

        def head(inside: int, hidden: int, classes: int) -> nn.Module:
            first = nn.Linear(inside, hidden)
            return nn.Sequential(first, nn.GELU(), nn.Dropout(args.dropout), nn.Linear(hidden, classes))

        self.heads = nn.ModuleDict({k: head(dim, HEAD_WIDTH[k], len(names)) for k, names in mci.HEADS.items()})
        self.chexpert = head(dim, 512, len(mci.CHEXPERT))
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
        with hw.autocast(picture.device, self.precision):
            seen = self.features(picture)
            if self.ready_mask:
                mask = broadcast_mask(mask)
            text = self.text(input_ids=ids, attention_mask=mask).last_hidden_state
            for layer in self.fusion:
                text = checkpoint(layer, text, seen, use_reentrant=False) if self.checkpoint else layer(text, seen)
            pooled = self.norm(text[:, 0])
            answers = [head(pooled) for head in self.heads.values()]
            return *(logits.float() for logits in answers), self.chexpert(seen.mean(1)).float()


def load_encoder(path: str, flag: str, **options):
    """A Hugging Face encoder in fp32, all of whose weights are in the file (but for a pooler, which nothing here uses).
    Raises InputError naming flag and reason."""
    from transformers import AutoConfig, AutoModel

    kind = flag.split("_")[0]
    needs = ("num_channels",) if kind == "image" else ("hidden_size", "vocab_size")
    width = ("hidden_size", "hidden_sizes")

    try:
        if not Path(path).exists() and (path.count("/") > 1 or path[0] in "./~"):  # else a name on the hub
            raise OSError("no such folder")
        config = AutoConfig.from_pretrained(path)
        for name, value in options.items():
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
        if hw.out_of_memory(error):
            raise
        reason = str(error).splitlines()[0][:150] if str(error) else type(error).__name__
        raise InputError(f"{path}: cannot be loaded ({reason}); download it and give its folder as --{flag}") from None


def build_model(args: argparse.Namespace, ranks: du.Ranks) -> tuple[ChestModel, object]:
    """(model, tokenizer): both encoders loaded, frozen where asked, checkpointing set. Raises InputError."""
    from transformers import AutoTokenizer, utils
    from transformers.image_processing_base import ImageProcessingMixin

    utils.logging.set_verbosity_error()
    utils.logging.disable_progress_bar()
    image = load_encoder(args.image_encoder, "image_encoder")
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), args.dropout)
    text = load_encoder(args.text_encoder, "text_encoder", **rates)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.text_encoder)
        ids = tokenizer("is there a pleural effusion?", add_special_tokens=False)["input_ids"]
        if set(ids) <= {tokenizer.unk_token_id}:
            raise ValueError("it knows no words")
        if len(tokenizer) > text.config.vocab_size:
            raise ValueError(f"it has {len(tokenizer)} words and the encoder {text.config.vocab_size}")
    except Exception as error:
        reason = str(error).splitlines()[0][:150] if str(error) else type(error).__name__
        raise InputError(f"{args.text_encoder}: no tokenizer ({reason}); download it again") from None
    longest = getattr(text.config, "max_position_embeddings", None) or math.inf
    if args.max_question_length > longest:
        raise InputError(
            f"--max_question_length {args.max_question_length}: {args.text_encoder} takes {longest}; lower it"
        )
    statistics = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    with contextlib.suppress(OSError, ValueError, KeyError):
        processor = ImageProcessingMixin.get_image_processor_dict(args.image_encoder)[0]
        statistics = processor["image_mean"], processor["image_std"]
    torch.manual_seed(args.seed)  # the same new layers on every rank
    model = ChestModel(image, text, statistics, args)
    for part, frozen in ((image, args.freeze_image), (text, args.freeze_text)):
        part.requires_grad_(not frozen)
    try:
        freeze_unused(model, args.image_size)
    except (RuntimeError, ValueError) as error:
        if hw.out_of_memory(error):
            raise
        size = f"3 x {args.image_size} x {args.image_size}"
        raise InputError(f"{args.image_encoder}: does not take pictures of {size}; see --image_size") from None
    if args.gradient_checkpointing:
        recompute_activations(model, args)
    model.to(ranks.device)
    return model, tokenizer


def recompute_activations(model: ChestModel, args: argparse.Namespace) -> None:
    """--gradient_checkpointing: activations are computed again in the backward pass. Raises as blocks_of does."""
    parts = (args.image_encoder, model.image), (args.text_encoder, model.text)
    blocks = [block for path, part in parts for block in blocks_of(part, path)]
    model.checkpoint = True
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
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

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


def batch_counts(batches: list[dict]) -> list[int]:
    """[questions of each head..., known CheXpert labels] of some batches, on the host."""
    heads = torch.cat([batch["head"] for batch in batches])
    counts = torch.bincount(heads, minlength=len(mci.HEADS)).tolist()
    return [*counts, sum(int(batch["known"].sum()) for batch in batches)]


def batch_loss(model: nn.Module, batch: dict, counts: list[float], args: argparse.Namespace) -> torch.Tensor:
    """(loss, answers' part, CheXpert part): a micro-batch's share of the means over the global batch.

    Each head's cross-entropy is a mean over ITS questions in the global batch (`counts`, of all ranks), weighted
    1/.5/.5/.3; CheXpert's BCE one over the labels that are known. Shares of all ranks and micro-batches add up.
    """
    *answers, chexpert = model(batch["picture"], batch["ids"], batch["mask"])
    vqa = chexpert.new_zeros(())
    for place, (head, logits) in enumerate(zip(mci.HEADS, answers, strict=True)):
        mine = batch["head"] == place
        entropy = F.cross_entropy(logits, torch.where(mine, batch["target"], 0), reduction="none")
        vqa = vqa + HEAD_WEIGHT[head] * (entropy * mine).sum() / max(1.0, counts[place])
    bce = F.binary_cross_entropy_with_logits(chexpert, batch["label"], reduction="none")
    labels = (bce * batch["known"]).sum() / max(1.0, counts[-1])
    loss = vqa + args.chexpert_weight * labels
    # a non-finite loss must give non-finite gradients, which reach every rank: all skip the step together
    return torch.stack([loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan), vqa, labels])


# --- engines ----------------------------------------------------------------------------------------------------------


class TorchEngine:
    """One process, or DDP. A GradScaler skips non-finite steps without a GPU sync (its scale moves for fp16 only)."""

    def __init__(self, model: nn.Module, optimizer, args: argparse.Namespace, ranks: du.Ranks):
        self.optimizer, self.clip, self.fp16 = optimizer, args.grad_clip or math.inf, args.mixed_precision == "fp16"
        self.scaler = torch.amp.GradScaler(ranks.device.type, init_scale=2.0**14 if self.fp16 else 1.0)
        self.model, self.trained = model, optimizer.param_groups[0]["params"]
        if ranks.world_size > 1:
            ids = [ranks.device] if ranks.device.type == "cuda" else None
            options = {"forward_sync_buffers": False, "find_unused_parameters": du.keep_buckets()}
            self.model = DDP(model, device_ids=ids, gradient_as_bucket_view=True, **options)

    @contextlib.contextmanager
    def micro_batch(self, last: bool):
        """Around the forward and backward pass of one micro-batch: gradients are exchanged after the last only."""
        with contextlib.nullcontext() if last or not isinstance(self.model, DDP) else self.model.no_sync():
            yield

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> torch.Tensor:
        """Clip, step, clear; returns the gradient norm before clipping (non-finite: the step was skipped)."""
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.trained, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update(None if self.fp16 else 1.0)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def scaler_state(self) -> dict:
        return self.scaler.state_dict()

    def restore(self, model: ChestModel, contents: dict) -> None:
        dsu.restore_optimizer(model, self.optimizer, None, contents["model"], contents["optimizer"])
        ckpt.restore_scaler(self.scaler, contents["scaler"], "fp16" if self.fp16 else "no")

    def close(self) -> None:
        self.model = None


class DeepSpeedEngine:
    """DeepSpeed ZeRO-1/2/3 with the same AdamW; it skips a step with a non-finite gradient by itself."""

    def __init__(self, model: nn.Module, optimizer, config: dict):
        self.model, self.optimizer = dsu.start_engine(model, optimizer, config), optimizer

    @contextlib.contextmanager
    def micro_batch(self, last: bool):
        self.model.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=False)

    def update(self) -> torch.Tensor:
        self.model.step()
        return torch.as_tensor(self.model.get_global_grad_norm(), device=self.model.device).float()

    def scaler_state(self) -> dict:
        return dsu.scaler_state(self.model)

    def restore(self, model: ChestModel, contents: dict) -> None:
        dsu.restore_optimizer(model, self.optimizer, self.model, contents["model"], contents["optimizer"])
        dsu.restore_scaler(self.model, contents["scaler"])

    def close(self) -> None:
        self.model.destroy()  # its hooks hold the model in cycles
        self.model = None


def start_engine(model: ChestModel, config: dict | None, args: argparse.Namespace, ranks: du.Ranks):
    """The engine around the model, with a fused AdamW over what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config is None and ranks.device.type == "cuda":  # DeepSpeed sends weights as flat bytes, which must be in order
        model.image.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)
    if config is None:
        return TorchEngine(model, optimizer, args, ranks)
    return DeepSpeedEngine(model, optimizer, config)


# --- training ---------------------------------------------------------------------------------------------------------


def train_one_epoch(
    engine, loader, state: dict, ends: tuple[int, int], args, ranks: du.Ranks, log, stop, save
) -> int:  # fmt: skip
    """Train from state's position to the end of the epoch or run; returns the exit code of a stop signal, else 0.

    state: `step`, `epoch`, `samples` (of all ranks, this epoch), kept up to date. ends: (last step of this run, steps
    of the whole training, which the learning rate follows). Between log lines nothing is read back from the GPU. Raises
    InputError on all ranks for an unreadable picture of any of them.
    """
    warnings.filterwarnings("ignore", message="Grad strides do not match")  # depthwise kernels have two layouts at once
    engine.model.train()
    batches, sampler = iter(loader), loader.batch_sampler
    while state["step"] < ends[0] and state["samples"] < sampler.used:
        samples, mine = sampler.window(state["samples"])
        window = log.next_batches(batches, max(1, math.ceil(mine / args.batch_size)))
        counts = batch_counts(window) if mine else [0] * (len(mci.HEADS) + 1)
        error = next((batch["error"] for batch in window if batch["error"]), "")
        facts = [*counts, stop.code == 143, stop.code == 130, bool(error)]
        *counts, stop_143, stop_130, broken = du.reduce_sum(facts).tolist()
        if broken:
            raise InputError(next(text for text in du.gather_objects(error) if text) + "; replace it and go on")
        if stop_143 or stop_130:  # agreed by all ranks, before the window is used
            save()
            return 143 if stop_143 else 130
        weights = [float(mine > 0)] * len(window)
        # every rank passes through the model equally often, as ZeRO exchanges in each pass: spare ones count nothing
        spare = math.ceil(math.ceil(samples / ranks.world_size) / args.batch_size) - len(window)
        window, weights = window + window[-1:] * spare, weights + [0.0] * spare
        rate = args.learning_rate * du.schedule(state["step"], ends[1], args.warmup_steps, args.lr_schedule)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        losses = []
        for i, (batch, weight) in enumerate(zip(window, weights, strict=True)):
            with log.count_flops(samples), engine.micro_batch(last=i == len(window) - 1):
                parts = batch_loss(engine.model, du.to_device(batch, ranks.device), counts, args) * weight
                engine.backward(parts[0] * ranks.world_size)  # both engines take the mean, these are shares of a sum
            losses.append(parts.detach())
        norm = engine.update()
        shared = torch.stack([norm, 1.0 - norm.isfinite().float()])  # the same on all ranks: rank 0 gives it to the sum
        log.step(torch.cat([sum(losses), shared if ranks.is_main else torch.zeros_like(shared)]), samples, rate)
        state["step"] += 1
        state["samples"] += samples
        log.check(state["step"], args.max_bad_steps)
        if state["step"] % args.log_every == 0:
            log.write_interval(state["step"], state["epoch"] + 1)
        if args.save_every and state["step"] % args.save_every == 0:
            save()
    return 0


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def predict(model: nn.Module, data: QuestionData, args: argparse.Namespace, ranks: du.Ranks) -> dict[str, np.ndarray]:
    """Every question of a split once, in row order and the same on every rank: index, head, target, predicted class,
    study, type, the study's CheXpert probabilities (n, 14), and each question's part of the losses (entropy, bce)."""
    model.eval()
    options = {"num_workers": args.num_workers, "collate_fn": data.collate, **prefetch(args)}
    loader = du.create_distributed_dataloader(data, args.batch_size, train=False, **options)
    rounds = math.ceil(math.ceil(len(data) / loader.batch_sampler.batch_size) / ranks.world_size)
    batches, found, error = iter(loader), [], ""
    for _ in range(rounds):
        batch = next(batches, None)
        real = batch is not None
        batch = batch if real else data.collate([data[0]])  # ZeRO-3 gathers weights in each pass: all ranks pass
        error = error or batch["error"]
        batch = du.to_device(batch, ranks.device)
        *answers, chexpert = model(batch["picture"], batch["ids"], batch["mask"])
        if real:
            best = torch.stack([logits.argmax(1) for logits in answers], 1).gather(1, batch["head"][:, None])[:, 0]
            part = {name: batch[name].cpu().numpy() for name in ("index", "head", "target", "study")}
            part |= {"predicted": best.cpu().numpy(), "chexpert": chexpert.sigmoid().cpu().numpy()}
            part |= question_losses(answers, chexpert, batch)
            found.append(part | {"type": np.array(batch["type"], dtype="U48")})
    with du.agree_on_errors():
        if error:
            raise InputError(f"{error}; replace it and go on")
    names = ("index", "head", "target", "study", "predicted", "chexpert", "entropy", "bce", "known", "type")
    mine = {name: np.concatenate([part[name] for part in found]) if found else None for name in names}
    parts = [part for part in du.gather_objects(mine) if part["index"] is not None]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in names}
    order = np.argsort(whole["index"], kind="stable")
    return {name: values[order] for name, values in whole.items()}


def question_losses(answers: list[torch.Tensor], chexpert: torch.Tensor, batch: dict) -> dict[str, np.ndarray]:
    """Each question's cross-entropy (of its own head), sum of CheXpert losses, and number of known labels."""
    entropy = torch.zeros(len(chexpert), device=chexpert.device)
    for place, logits in enumerate(answers):
        mine = batch["head"] == place
        entropy += mine * F.cross_entropy(logits, torch.where(mine, batch["target"], 0), reduction="none")
    bce = F.binary_cross_entropy_with_logits(chexpert, batch["label"], reduction="none")
    values = {"entropy": entropy, "bce": (bce * batch["known"]).sum(1), "known": batch["known"].sum(1)}
    return {name: value.double().cpu().numpy() for name, value in values.items()}


def compute_losses(split: str, found: dict[str, np.ndarray], chexpert_weight: float) -> dict[str, float | None]:
    """The training loss of a split and its two parts, as batch_loss has them. None where one is not finite."""
    vqa = 0.0
    for place, head in enumerate(mci.HEADS):
        rows = found["head"] == place
        if rows.any():
            vqa += HEAD_WEIGHT[head] * float(found["entropy"][rows].mean())
    labels = float(found["bce"].sum() / max(1.0, found["known"].sum()))
    values = {"loss": vqa + chexpert_weight * labels, "loss_vqa": vqa, "loss_chexpert": labels}
    return {f"{split}/{name}": value if math.isfinite(value) else None for name, value in values.items()}


def compute_metrics(split: str, found: dict[str, np.ndarray], index: mci.Index) -> dict[str, float | None]:
    """Accuracy in all, per head and per question type, beside the most frequent training answer of each type; macro F1
    per head; CheXpert AUROC and average precision per label and macro, each study once, uncertain and blank labels left
    out. None where a metric is undefined (a label of one class only)."""
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision, multiclass_f1_score

    right = found["predicted"] == found["target"]
    usual = {kind: int(np.argmax(counts)) for kind, counts in index.facts["classes"].items()}
    kinds, at = np.unique(found["type"], return_inverse=True)
    guess = np.array([usual.get(kind, -1) for kind in kinds])[at] == found["target"]
    metrics = {f"{split}/vqa_accuracy": float(right.mean()), f"{split}/vqa_majority": float(guess.mean())}
    for place, (head, names) in enumerate(mci.HEADS.items()):
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
        for i, label in enumerate(mci.CHEXPERT):
            rows = truth[:, i] >= 0
            both = len(np.unique(truth[rows, i])) == 2
            pair = torch.from_numpy(scores[rows, i]), torch.from_numpy(truth[rows, i].astype(np.int64))
            values[label] = float(metric(*pair)) if both else None
        defined = [value for value in values.values() if value is not None]
        metrics[f"{split}/{name}"] = sum(defined) / len(defined) if defined else None
        metrics |= {f"{split}/{name}/{label}": value for label, value in values.items()}
    return metrics


def chexpert_truth(index: mci.Index, studies: np.ndarray) -> np.ndarray:
    """int8 (n, 14): 1, 0, or -1 where blank or uncertain."""
    truth = np.stack([index.studies[name].to_numpy()[studies] for name in mci.CHEXPERT], 1)
    return np.where(truth >= 0, truth, -1)


def group_sizes(found: dict[str, np.ndarray], index: mci.Index) -> dict[str, int]:
    """How many questions each row of the answers' table stands for, and how many studies each of the labels'."""
    kinds, counts = np.unique(found["type"], return_counts=True)
    sizes = {"all": len(found["index"])} | dict(zip(kinds.tolist(), counts.tolist(), strict=True))
    sizes |= {head: int((found["head"] == place).sum()) for place, head in enumerate(mci.HEADS)}
    studies = np.unique(found["study"])
    known = (chexpert_truth(index, studies) >= 0).sum(0).tolist()
    return sizes | {"macro": len(studies)} | dict(zip(mci.CHEXPERT, known, strict=True))


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

    heads = list(mci.HEADS.items())
    rows = [data.row(int(i)) for i in found["index"]]
    table = {"study_id": [f"s{data.studies['study_id'][row['study']].as_py()}" for row in rows]}
    table |= {"question_id": [row["id"] for row in rows], "question_type": found["type"].tolist()}
    table |= {"head": [heads[h][0] for h in found["head"]], "question": [row["question"] for row in rows]}
    for name, column in (("answer", "predicted"), ("truth", "target")):
        table[name] = [heads[h][1][c] for h, c in zip(found["head"], found[column], strict=True)]
    table |= {f"p({label})": found["chexpert"][:, i] for i, label in enumerate(mci.CHEXPERT)}
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
    heads = list(mci.HEADS.values())
    texts = []
    for item in items:
        labels = {name: column[item["study"]] for name, column in zip(mci.CHEXPERT, data.labels, strict=True)}
        lines = [wrap(item["question"][:600], 48), f"answer: {heads[item['head']][item['target']]}"]
        for word, value in (("present", 1), ("uncertain", -1), ("absent", 0)):
            if names := [name for name, label in labels.items() if label == value]:
                lines.append(wrap(f"{word}: {', '.join(names)}", 48))
        texts.append("\n".join([*lines, "NOT READABLE"] if item["error"] else lines))
    return draw_images(items, texts, ["black"] * len(items))


def draw_answers(data: QuestionData, found: dict[str, np.ndarray]):
    """A matplotlib figure: nine images, each with its question, the answer given and the true one."""
    heads = list(mci.HEADS.values())
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


def draw_curves(found: dict[str, np.ndarray], index: mci.Index):
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


def draw_roc(axes, found: dict[str, np.ndarray], index: mci.Index) -> None:
    """The ROC curve of each CheXpert label, each study once, with its area and number of studies beside."""
    from torchmetrics.functional.classification import binary_auroc, binary_roc

    studies, first = np.unique(found["study"], return_index=True)
    truth = chexpert_truth(index, studies)
    for i, label in enumerate(mci.CHEXPERT):
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

    names = mci.HEADS[head]
    rows = found["head"] == list(mci.HEADS).index(head)
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


def evaluate(model: nn.Module, data: QuestionData, index: mci.Index, split: str, args, ranks: du.Ranks):
    """(metrics, raw predictions) of a split, the same on every rank and at any number of ranks."""
    found = predict(model, data, args, ranks)
    return compute_losses(split, found, args.chexpert_weight) | compute_metrics(split, found, index), found


# --- the run ----------------------------------------------------------------------------------------------------------


def prefetch(args: argparse.Namespace) -> dict:
    return {"prefetch_factor": args.prefetch_factor} if args.num_workers else {}


def processes_per_node() -> int:
    """Ranks that share their cores: srun may give each its own, torchrun gives all of a node the same."""
    places = du.gather_objects((platform.node(), hw.core_numbers()))
    return max(sum(bool(node == n and cores & c) for n, c in places) for node, cores in places)


def translate_guide_keys(args: argparse.Namespace, ranks: du.Ranks) -> None:
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
        du.print_main(f"{Path(args.config).name}: {key} {json.dumps(value)} -> {says[key.split('.')[-1]]}")
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


def apply_hardware(args: argparse.Namespace, ranks: du.Ranks) -> tuple[int, float | None]:
    """--auto_optimize: set what the command line did not from the weakest machine of the job (file < this < flags);
    returns (the ZeRO stage for it, GiB of the smallest GPU or None on CPU)."""
    memory = compute = None
    if ranks.device.type == "cuda":
        card = torch.cuda.get_device_properties(ranks.device)
        memory, compute = card.total_memory / 2**30, float(f"{card.major}.{card.minor}")
    facts = du.gather_objects([memory, compute, hw.usable_cores(), hw.available_ram_gb()])
    machine = [min((v for v in column if v is not None), default=None) for column in zip(*facts, strict=True)]
    local = processes_per_node()
    given = args.batch_size if args.source["batch_size"] == "command line" else None
    options = {"batch_size": given, "processes_per_node": local}
    chosen = hw.settings_for(ranks.world_size, *machine, dsu.available(), **options)
    values = {"batch_size": chosen["batch_size_per_gpu"], "prefetch_factor": chosen["prefetch_factor"]}
    values |= {"gradient_accumulation_steps": chosen["gradient_accumulation_steps"]}
    values |= {"num_workers": chosen["dataloader_num_workers"] // local}
    values |= {"gradient_checkpointing": chosen["gradient_checkpointing"]}
    values |= {"offload_optimizer": not hw.is_roomy(machine[0])}
    for name, value in values.items():
        if args.source[name] not in ("command line", "--debug"):
            setattr(args, name, value)
            args.source[name] = "hardware"
    return chosen["zero_stage"] or 2, machine[0]


def describe_memory(args: argparse.Namespace, memory: float, config: dict | None) -> str:
    """For the banner: the smallest GPU's memory in GiB, and what --auto_optimize has set by it."""
    settings = []
    if args.source["batch_size"] == "hardware":
        settings.append(f"batch {args.batch_size}")
    if args.source["gradient_checkpointing"] == "hardware":
        settings.append("activations recomputed" if args.gradient_checkpointing else "activations kept")
    if config and args.source["offload_optimizer"] == "hardware" and args.source["deepspeed_config"] == "default":
        settings.append(f"optimizer on the {'CPU' if args.offload_optimizer else 'GPU'}")
    reason = "16 GB or more" if hw.is_roomy(memory) else "below 16 GB"
    return f"{memory:.1f} GiB on the smallest GPU, {reason}: {', '.join(settings) or 'nothing set by it'}"


def choose_engine(args: argparse.Namespace, ranks: du.Ranks) -> tuple[bool, str]:
    """(whether DeepSpeed trains, why), as the guide's diagram has it."""
    if args.use_ddp:
        return False, "--use_ddp"
    flag = "--use_deepspeed" if args.use_deepspeed else "--deepspeed_config"
    if args.use_deepspeed or args.source["deepspeed_config"] == "command line":
        if not dsu.available():
            raise InputError(f"{flag}: DeepSpeed is not installed; pip install deepspeed, or use --use_ddp")
        return True, flag
    if ranks.world_size == 1:
        return False, "one process"
    if not args.auto_optimize:
        return False, "--no_auto_optimize"
    return dsu.available(), "2 or more processes" if dsu.available() else "DeepSpeed is not installed"


def deepspeed_settings(args: argparse.Namespace, stage: int) -> tuple[dict, str]:
    """(config, file name): the JSON of --deepspeed_config, or the one of configs/ for the ZeRO stage.

    A file that the user names is used as it is. Ours gives way to what --auto_optimize finds of memory: no
    checkpointing and no optimizer on the CPU where the GPU has room.
    """
    path = args.deepspeed_config or str(HERE / "configs" / f"deepspeed_{'zero3' if stage == 3 else 'config'}.json")
    config = dsu.read_deepspeed_config(path)
    source = args.source["gradient_checkpointing"]
    named = args.source["deepspeed_config"] != "default"
    weaker = source != "command line" if named else source == "default"
    if "activation_checkpointing" in config and weaker:
        args.gradient_checkpointing, args.source["gradient_checkpointing"] = True, Path(path).name
    if args.offload_optimizer is False and not named:
        config["zero_optimization"].pop("offload_optimizer", None)
    if args.compile and config["zero_optimization"]["stage"] == 3:
        raise InputError("--compile: does not go with ZeRO-3; leave it out, or use stage 1 or 2")
    return config, path


def choose_precision(config: dict | None, wanted: str, device: torch.device) -> tuple[str, str]:
    """(precision, why): `auto` heeds what the DeepSpeed file enables or disables, where the device can."""
    blocks = {name: (config or {}).get(name, {}) for name in ("bf16", "fp16")} if wanted == "auto" else {}
    enabled = {name: block.pop("enabled", "auto") for name, block in blocks.items()}
    asked = next((name for name, value in enabled.items() if value is True and device.type == "cuda"), None)
    chosen, why = hw.choose_precision(asked or wanted, device)
    if enabled.get(chosen) is False:
        return "no", f"{chosen} is disabled in the DeepSpeed file"
    return chosen, "the DeepSpeed file" if asked else why


def largest_batch(batch_size: int, args: argparse.Namespace) -> dict:
    """A made-up batch, on the host, of questions of the full length, with all heads and labels."""
    kinds = torch.arange(batch_size) % len(mci.HEADS)
    zeros = torch.zeros(batch_size, dtype=torch.long)
    side, length, labels = args.image_size, args.max_question_length, len(mci.CHEXPERT)
    batch = {"index": zeros, "head": kinds, "target": zeros, "study": zeros}
    batch["picture"] = torch.zeros(batch_size, 1, side, side, dtype=torch.uint8)
    batch["ids"] = torch.zeros(batch_size, length, dtype=torch.long)
    batch["mask"] = torch.ones(batch_size, length, dtype=torch.long)
    batch["label"] = torch.zeros(batch_size, labels)
    batch["known"] = torch.ones(batch_size, labels, dtype=torch.bool)
    return batch | {"type": [""] * batch_size, "error": ""}


def trial_step(model: ChestModel, batch: dict, args: argparse.Namespace) -> None:
    """Forward and backward pass of one micro-batch, as in training; the gradients stay in the model."""
    counts = [len(batch["type"])] * (len(mci.HEADS) + 1)
    batch_loss(model.train(), du.to_device(batch, model.mean.device), counts, args)[0].backward()


def held_copies(config: dict | None) -> float:
    """Copies of the trained parameters that a GPU holds beside them and their gradients: see copies_held.

    DeepSpeed shares the moments and the masters out over the processes, or keeps them on the CPU.
    """
    if config is None:
        return copies_held()
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    return 1 if offload.get("device", "none") != "none" else 1 + 3 / du.world()[1]


def find_batch_size(model: ChestModel, config: dict | None, contents: dict | None, args: argparse.Namespace) -> None:
    """Fit the batch, and recomputation where no flag decided, to what a step of questions of the full length takes."""

    def try_once(size: int) -> None:
        trial_step(model, largest_batch(size, args), args)

    # the encoders' layers must be known, or there is no recomputation to turn on
    recompute, advice = None, "pass --gradient_checkpointing or a smaller --image_size"
    weak = args.source["gradient_checkpointing"] == "hardware" and not args.gradient_checkpointing
    if weak or args.gradient_checkpointing is None:
        with contextlib.suppress(InputError):
            blocks_of(model.image, args.image_encoder)
            blocks_of(model.text, args.text_encoder)
            recompute, advice = partial(recompute_activations, model, args), "pass a smaller --image_size"
    fitted = fit_batch_to_memory(
        try_once, model, (args.batch_size, args.gradient_accumulation_steps), batch_flags, advice,
        copies=held_copies(config), recompute=recompute, before=contents and contents.get("split"),
    )  # fmt: skip
    if fitted.reason:
        set_derived(args, fitted.reason, batch_size=fitted.size)
        set_derived(args, "fitted", gradient_accumulation_steps=fitted.accumulation)
    if fitted.recomputed:
        set_derived(args, "one question did not fit without", gradient_checkpointing=True)


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
    shapes, own = ({k: v.shape for k, v in named.items()} for named in (weights, model.state_dict()))
    if unlike := sorted(name for name in shapes.keys() | own.keys() if shapes.get(name) != own.get(name)):
        raise InputError(f"{path}: weights of another model ({unlike[0]}); give the encoders it was trained with")
    ckpt.load_trained(model, weights)
    du.print_main(f"weights from {path}; the optimizer starts anew")


def evaluate_only(model: ChestModel, data: QuestionData, index: mci.Index, step: int, args, ranks: du.Ranks) -> None:
    """--eval_only: the metrics of one split, printed and written to eval_<split>.json where the disk takes them."""
    folder = Path(args.output_dir)
    with du.agree_on_errors():
        try:
            (folder / "figures").mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise InputError(f"{folder}: cannot write here ({error.strerror}); choose another --output_dir") from None
        except OSError:
            pass  # a full or read-only disk: each file that is not written says so
    metrics, found = evaluate(model, data, index, args.eval_split, args, ranks)
    if ranks.is_main:
        print_metrics(f"{args.eval_split}, step {step}", metrics, group_sizes(found, index))
        report = folder / f"eval_{args.eval_split}.json"
        written = [write_result(report, (json.dumps({**metrics, "step": step}, indent=2) + "\n").encode())]
        written += [save_figure(folder / "figures" / f"{args.eval_split}_answers.png", draw_answers(data, found))]
        written += [save_figure(folder / "figures" / f"{args.eval_split}_curves.png", draw_curves(found, index))]
        if args.save_predictions:
            written += [write_predictions(folder / f"predictions_{args.eval_split}.parquet", data, found)]
        if all(written):
            print(f"{len(data):,} questions; written: {report}, {folder}/figures", flush=True)


def run(args: argparse.Namespace, ranks: du.Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun, folder, config, config_path = time.time(), Path(args.output_dir), None, ""
    translate_guide_keys(args, ranks)
    stage, memory = apply_hardware(args, ranks) if args.auto_optimize else (2, None)
    with du.agree_on_errors():
        use_deepspeed, why_engine = choose_engine(args, ranks)
        if use_deepspeed and not args.eval_only:
            config, config_path = deepspeed_settings(args, stage)
        args.mixed_precision, why_precision = choose_precision(config, args.mixed_precision, ranks.device)
        if config is not None:
            batch = args.batch_size, args.gradient_accumulation_steps
            dsu.fill_config(config, config_path, *batch, args.grad_clip, args.mixed_precision)
    if len(set(du.gather_objects(args.mixed_precision))) > 1:
        raise InputError("--mixed_precision auto: the GPUs differ; choose fp16 or no")
    why_precision = hw.set_numerics(ranks.device, args.mixed_precision, why_precision, args.deterministic)
    paths = Path(args.index_dir), Path(args.mimic_cxr_path), Path(args.mimic_qa_path)
    options = args.quality_grade, args.view, args.max_missing
    index = mci.open_index(*paths, *options, limit=64 if args.debug else 0)
    needed = args.eval_split if args.eval_only else "train"
    with du.agree_on_errors():
        if not len(index.questions(SPLITS[needed])):
            advice = f"see {args.mimic_cxr_path}/mimic-cxr-2.0.0-split.csv.gz, or choose another --quality_grade"
            raise InputError(f"{args.mimic_qa_path}: no questions in split {needed!r}; {advice}")
    if ranks.is_main:
        print_table("questions left out", mci.left_out_table(index.facts))
        for title in ("ratings", "studies"):
            if rows := {name: {"count": count} for name, count in index.facts[title].items()}:
                print_table(title, rows)
    lock = (
        None
        if args.eval_only
        else ckpt.lock_run_folder(folder, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
    )
    resume = args.resume_from or (str(folder / "best.pt") if args.eval_only else None)
    with du.agree_on_errors():
        if args.eval_only and not args.resume_from and not Path(resume).exists():
            raise InputError(f"{folder}: holds no best.pt; check --output_dir, or give a checkpoint with --resume_from")
    contents = ckpt.load_checkpoint(resume, folder, FORMAT, resume=not args.eval_only)
    if args.eval_only and contents is None:
        raise InputError(f"{folder}: no checkpoint to use; give one with --resume_from")
    with du.agree_on_errors():
        model, tokenizer = build_model(args, ranks)
        if contents:
            ckpt.load_trained(model, contents["model"])
        elif args.pretrained_weights:
            load_pretrained(model, args.pretrained_weights)
        sets = {split: QuestionData(index, split, args, tokenizer) for split in SPLITS}
    if args.eval_only:
        evaluate_only(model, sets[args.eval_split], index, contents["step"], args, ranks)
        return 0
    if fits_by_itself(args.auto_batch, ranks.device):
        find_batch_size(model, config, contents, args)
    if config is not None:
        batch = args.batch_size, args.gradient_accumulation_steps
        # what the file says of these was compared with the flags before the batch was fitted
        config = {name: value for name, value in config.items() if name not in dsu.OWNED}
        config = dsu.fill_config(config, config_path, *batch, args.grad_clip, args.mixed_precision)
    why = {"precision": why_precision, "engine": why_engine}
    if memory is not None:
        why["memory"] = describe_memory(args, memory, config)
    code = fit(model, sets, index, contents, config, why, args, ranks)
    du.print_main(f"{time.time() - begun:.0f} seconds in all")
    del lock
    return code


def fit(model: ChestModel, sets: dict, index: mci.Index, contents, config, why: dict, args, ranks: du.Ranks) -> int:
    """Train, validate each epoch, keep checkpoints, test the best; returns the exit code."""
    begun, folder = time.time(), Path(args.output_dir)
    loader = du.create_distributed_dataloader(
        sets["train"], args.batch_size, seed=args.seed, num_workers=args.num_workers, drop_last=False,
        accumulation=args.gradient_accumulation_steps, collate_fn=sets["train"].collate, **prefetch(args),
    )  # fmt: skip
    effective, epoch_steps = loader.batch_sampler.effective_batch_size, loader.batch_sampler.steps_per_epoch()
    planned_steps = args.epochs * epoch_steps
    last_step = min(args.max_steps or planned_steps, planned_steps)
    state = {"step": 0, "epoch": 0, "samples": 0, "best": None, "best_sha256": None, "saved": None}
    state["best_metrics"] = None  # of the validation of best.pt
    this_run = {"training_questions": len(sets["train"]), "effective_batch_size": effective, "seed": args.seed}
    torch.manual_seed((args.seed * 1000003 + ranks.rank) % 2**63)  # dropout differs between ranks
    if contents:
        ckpt.check_same_run(contents, this_run)
        state |= contents["state"] | {"saved": None}
        forget_other_best(folder, state)
    if args.compile:
        model.compile()
    engine = start_engine(model, config, args, ranks)
    if contents:
        engine.restore(model, contents)
        ckpt.restore_rng(contents["rng"])
    counts = [(p.ds_numel if hasattr(p, "ds_id") else p.numel(), p.requires_grad) for p in model.parameters()]

    origin = args.source
    accumulation = f"{args.gradient_accumulation_steps} accumulation ({origin['gradient_accumulation_steps']})"
    facts = {
        "launcher": f"{ranks.launcher}, world size {ranks.world_size}, {ranks.device}",
        "engine": f"{dsu.describe(config) if config else 'DDP' if ranks.world_size > 1 else 'torch'} ({why['engine']})",
        "batch": f"{args.batch_size} per GPU ({origin['batch_size']}) x {accumulation} x {ranks.world_size}"
        + f" = {effective}",
        "learning rate": f"{args.learning_rate:g} ({origin['learning_rate']}), {args.lr_schedule}, not scaled",
        "precision": f"{args.mixed_precision} ({why['precision']})",
        "checkpointing": f"{bool(args.gradient_checkpointing)} ({origin['gradient_checkpointing']})",
        **({"memory": why["memory"]} if "memory" in why else {}),
        "loading": f"{args.num_workers} workers per GPU ({origin['num_workers']}), {args.cache_gb:g} GiB disk cache",
        "questions": ", ".join(f"{len(data):,} {split}" for split, data in sets.items())
        + f" (grade {args.quality_grade}, {origin['quality_grade']}; view {args.view})",
        "steps": f"{last_step} of {planned_steps}: {epoch_steps} an epoch, {args.epochs} epochs ({origin['epochs']})",
        "start": f"step {state['step']}, epoch {state['epoch'] + 1}",
        "trained": f"{sum(n for n, t in counts if t):,} of {sum(n for n, _ in counts):,} parameters",
        "output": folder,
    }
    log = RunLog(folder, ranks, LOSSES, args, last_step, contents)
    ckpt.prepare_checkpoint(model)
    print_banner("MIMIC-CXR", facts | log.speed_facts())
    if ranks.launcher == "python" and torch.cuda.device_count() > 1:
        du.print_main(f"{torch.cuda.device_count()} GPUs are here and one is used: --world_size, or the launcher")

    wanted = asked(args, "batch_size"), asked(args, "gradient_accumulation_steps")
    used = args.batch_size, args.gradient_accumulation_steps
    split = split_record(wanted, used, args.gradient_checkpointing)

    def save() -> None:
        where = [state["step"], state["epoch"]]
        if state["saved"] == where:
            return
        state["saved"] = where
        parts = {"format": FORMAT, "model": dsu.full_weights(model), "state": dict(state), "run": this_run}
        parts |= {"optimizer": dsu.full_optimizer_state(model, engine.optimizer), "scaler": engine.scaler_state()}
        parts |= {"precision": args.mixed_precision, "split": split, "log": log.pending(state["step"])}
        ckpt.save_checkpoint(folder, parts, state["step"], args.keep_last)

    drawn, best_step = -math.inf, None
    sizes: dict[str, dict] = {}  # of the groups of each split that was evaluated
    if contents is None:
        log.figures(lambda: {"inputs": draw_inputs(sets["train"])}, 0)

    def report(split: str, final: bool = False) -> tuple[dict, dict]:
        """(metrics, raw predictions) of a split, logged."""
        nonlocal drawn
        metrics, found = evaluate(model, sets[split], index, split, args, ranks)
        sizes[split] = group_sizes(found, index)
        if final:  # the row stands at the last step, but its weights may be older
            metrics["best_step"] = best_step
        log.write(state["step"], state["epoch"] + 1, metrics)
        if split == "test" or time.time() - drawn > 60:  # short epochs: not every one is drawn
            log.figures(
                lambda: {
                    f"{split}_answers": draw_answers(sets[split], found),
                    f"{split}_curves": draw_curves(found, index),
                },
                state["step"],
            )
            drawn = time.time()
        return metrics, found

    def keep_predictions(split: str, found: dict) -> None:
        if ranks.is_main and args.save_predictions:
            write_predictions(folder / f"predictions_{split}.parquet", sets[split], found)

    ends = last_step, planned_steps
    with du.StopSignal() as stop, contextlib.closing(log), contextlib.closing(engine):
        say_if_finished(state["step"], last_step, "--epochs")
        while True:
            loader.batch_sampler.set_position(state["epoch"], state["samples"])
            log.restart_clock()
            if code := train_one_epoch(engine, loader, state, ends, args, ranks, log, stop, save):
                say_saved(state["step"])
                return code
            save()
            if state["step"] >= last_step:
                log.write_rest(state["step"], state["epoch"] + 1)
            if len(sets["val"]):
                metrics, found = report("val")
                accuracy, auroc = metrics["val/vqa_accuracy"], metrics["val/chexpert_auroc"]
                shown = "undefined" if auroc is None else f"{auroc:.4f}"
                du.print_main(f"epoch {state['epoch'] + 1}: val accuracy {accuracy:.4f}, CheXpert AUROC {shown}")
                if keep_best(folder, state, accuracy, state["samples"] >= loader.batch_sampler.used):
                    state["best_metrics"] = metrics
                    keep_predictions("val", found)
            if state["step"] >= last_step:
                break
            state["epoch"], state["samples"] = state["epoch"] + 1, 0
        best_step, name = state["step"], "the last weights (there are no validation questions)"
        if len(sets["val"]):
            best = ckpt.load_checkpoint(str(folder / "best.pt"), folder, FORMAT)
            dsu.put_weights(model, best["model"])
            best_step, name = best["step"], "best.pt"
        for split in ("val", "test"):
            if len(sets[split]):
                # the validation of best.pt has been run and logged, unless it is a checkpoint of an earlier version
                metrics = state["best_metrics"] if split == "val" else None
                if metrics is None:
                    metrics, found = report(split, final=True)
                    keep_predictions(split, found)
                if ranks.is_main:
                    print_metrics(f"{split}, {name}", metrics, sizes[split])
        facts = {"steps": state["step"], "epochs": state["epoch"] + 1, "world_size": ranks.world_size}
        facts |= {"effective_batch_size": effective, "precision": args.mixed_precision, "best_step": best_step}
        facts |= state["best_metrics"] or {}
        log.finish(facts | {"seconds": round(time.time() - begun, 1)})
        export(folder, "best.pt" if len(sets["val"]) else "last.pt", FORMAT)
        du.print_main(f"weights: {folder}/model.safetensors; figures: {folder}/figures; summary: {folder}/summary.json")
    return 0


def export(folder: Path, chosen: str, format: str) -> None:
    """All ranks call it: model.safetensors (the chosen weights) and model_last.safetensors, whole from any engine."""
    for name, source in (("model", chosen), ("model_last", "last.pt")):
        weights = ckpt.load_checkpoint(str(folder / source), folder, format)["model"]
        ckpt.export_weights(weights, folder / f"{name}.safetensors")


def rehearse(args: argparse.Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step of questions of the full length, by DDP or one process."""
    import rehearsal_utils as rehearsal

    processes, memory = rehearsal.processes_to_plan_for(args.world_size), rehearsal.memory_to_plan_for(args.gpu_memory)
    if args.auto_optimize:
        machine = memory, 9.0, hw.usable_cores(), hw.available_ram_gb()
        wanted = args.batch_size if args.source["batch_size"] == "command line" else None
        chosen = hw.settings_for(processes, *machine, deepspeed=False, batch_size=wanted)
        values = {"batch_size": chosen["batch_size_per_gpu"]}
        values |= {name: chosen[name] for name in ("gradient_accumulation_steps", "gradient_checkpointing")}
        for name, value in values.items():
            if args.source[name] != "command line":
                setattr(args, name, value)

    trace = rehearsal.Trace()
    with rehearsal.imaginary_gpu(trace) as ranks, rehearsal.random_weights(ranks.device):
        args.mixed_precision, _ = hw.choose_precision(args.mixed_precision, ranks.device)
        hw.set_numerics(ranks.device, args.mixed_precision, "", args.deterministic)
        with ranks.device:
            model, _ = build_model(args, ranks)
        engine = start_engine(model, None, args, ranks)
        trial = partial(trial_step, model, largest_batch(args.batch_size, args), args)
        accumulation = args.gradient_accumulation_steps
        step = rehearsal.rehearse_step(trace, model, engine.optimizer, trial, accumulation, processes)

    def words(samples: int) -> str:
        return batch_flags(*hw.smaller_batch(args.batch_size, accumulation, samples))

    otherwise = "a smaller --image_size" if args.gradient_checkpointing else "--gradient_checkpointing"
    title = f"MIMIC-CXR by DDP, {args.batch_size} per GPU x {accumulation} accumulation, {args.mixed_precision}"
    title += f", activations {'recomputed' if args.gradient_checkpointing else 'kept'}"
    print(
        "ZeRO, which shares the optimizer's state over the processes, is not rehearsed: it takes less than this by DDP"
    )
    rehearsal.report_rehearsal(title, step, args.batch_size, memory, words, otherwise)
    rehearsal.end_rehearsal()


def main(args: argparse.Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    du.launch_workers(args.world_size or 1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not torch.cuda.device_count():  # setup_distributed says why
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # spares DeepSpeed a search and a warning
    with du.setup_distributed(timeout=args.dist_timeout) as ranks:
        wanted = args.use_deepspeed or args.source["deepspeed_config"] == "command line"
        if wanted and ranks.world_size == 1 and not args.eval_only:  # DeepSpeed wants a group even so
            backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            return run(args, ranks)
        except (RuntimeError, MemoryError) as error:
            if not hw.out_of_memory(error):
                raise
            smaller = hw.split_batch(args.batch_size, args.gradient_accumulation_steps)
            advice = "try --batch_size {} --gradient_accumulation_steps {} (the same result)".format(*smaller)
            more = "--gradient_checkpointing, a smaller --image_size or ZeRO-3"
            more += auto_batch_advice(args.auto_batch, ranks.device)
            du.leave_alone(f"out of memory at --batch_size {args.batch_size}; {advice}, {more}")


if __name__ == "__main__":
    run_main(main, ARGS)
