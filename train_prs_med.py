"""PRS-Med (arXiv 2505.11872): a medical picture and a question in, a mask and a sentence saying where it is out. Guide 0.

    python train_prs_med.py --data_root data                              # one GPU, or CPU when there is none
    ./run_multi_gpu_train.sh data 4                                       # 4 GPUs (without GPUs: 4 processes)
    torchrun --nproc_per_node=4 train_prs_med.py --data_root data --batch_size 8 --learning_rate 1e-4 --num_epochs 20
    torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=<node0_ip> --master_port=29500 \
        train_prs_med.py --data_root data                                 # node 0 of 2; the same with --node_rank=1 on node 1
    python train_prs_med.py --data_root data --eval_only --resume_from checkpoints/best.pt --eval_split test
    python train_prs_med.py --data_root data --resume_from checkpoints/best.pt --predict scan.png --question "Where is the cyst?"

Data: <data_root>/annotations/<modality>.csv with image_path,image_name,split,description,position,question,answer, where
image_path is the MASK's path <modality>/<split>_masks/<name>.png and the picture lies in <split>_images.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

from cli_utils import (
    InputError,
    Parser,
    RunError,
    add_common_arguments,
    integer_at_least,
    number_between,
    parse_arguments,
    run_main,
)

FORMAT = "prs_med/1"
LOSSES = ["loss", "loss_seg", "loss_txt", "grad_norm", "skipped"]
SPLITS = ("train", "val", "test")
NO_VLM = ("download a LLaVA-format model (chaoyinshe/llava-med-v1.5-mistral-7b-hf) and give its folder as --vlm_path, "
          "or put it in a folder under --data_root")  # fmt: skip
NO_SAM = ("download a SAM-format model (facebook/sam-vit-base or flaviagiammarino/medsam-vit-base) and give its folder as --sam_path, "
          "or put it in a folder under --data_root")  # fmt: skip


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    data = parser.add_argument_group("data")
    data.add_argument("--data_root", required=True, help="folder with annotations/*.csv and the modality folders")
    data.add_argument("--annotations", nargs="+", metavar="NAME", help="which annotation CSVs, by name; default: all")
    data.add_argument(
        "--skip_bad_rows", action="store_true", help="drop and count CSV rows with a missing field instead of stopping"
    )
    data.add_argument("--skip_data_check", action="store_true",
                      help="do not read every picture before training; pictures are then told apart by path, not by content")  # fmt: skip
    data.add_argument("--cache_gb", type=number_between(0), default=4.0,
                      help="GiB of RAM PER PROCESS for decoded pictures; when all fit, no workers are started; 0: decode each time")  # fmt: skip
    model = parser.add_argument_group("model")
    model.add_argument(
        "--vlm_path", help="LLaVA-format checkpoint (folder or hub name); default: the one found under --data_root"
    )
    model.add_argument(
        "--sam_path", help="SAM-format checkpoint (folder or hub name); default: the one found under --data_root"
    )
    model.add_argument("--image_size", type=integer_at_least(16), default=None,
                       help="side of the encoder's input and of the masks, pixels; default: the checkpoint's own (1024 for SAM and "
                            "MedSAM); out of memory: 512")  # fmt: skip
    model.add_argument(
        "--lora_rank", type=integer_at_least(1), default=16, help="rank of the LoRA matrices in the language model"
    )
    model.add_argument(
        "--lora_alpha", type=number_between(0, above=True), default=16.0, help="LoRA scale is alpha / rank"
    )
    model.add_argument(
        "--lora_dropout", type=number_between(0, 0.99), default=0.05, help="dropout before the LoRA matrices"
    )
    model.add_argument("--gradient_checkpointing", action="store_true",
                       help="recompute activations in the backward pass: much less memory, about a third slower")  # fmt: skip
    optim = parser.add_argument_group("optimisation")
    optim.add_argument(
        "--batch_size", type=integer_at_least(1), default=8, help="samples PER GPU and forward pass; lower it on OOM"
    )
    optim.add_argument(
        "--learning_rate", type=number_between(0, above=True), default=1e-4, help="base rate, before --lr_scaling"
    )
    optim.add_argument("--lr_scaling", choices=("linear", "sqrt", "none"), default="linear",
                       help="multiply the rate by world size, its root, or not; `none` with the same effective batch gives the same "
                            "run on any number of GPUs")  # fmt: skip
    optim.add_argument(
        "--lr_schedule", choices=("constant", "cosine"), default="constant", help="after warm-up; cosine ends at 0"
    )
    optim.add_argument("--warmup_steps", type=integer_at_least(0), default=0, help="optimizer steps of linear warm-up")
    optim.add_argument("--weight_decay", type=number_between(0), default=0.01, help="AdamW weight decay")
    optim.add_argument("--num_epochs", type=integer_at_least(1), default=20, help="passes over the training rows")
    optim.add_argument("--lambda_seg", type=number_between(0), default=1.0, help="weight of the mask loss (BCE + Dice)")
    optim.add_argument("--lambda_txt", type=number_between(0), default=0.5, help="weight of the answer's cross-entropy")
    out = parser.add_argument_group("output")
    out.add_argument("--checkpoint_dir", default="checkpoints", help="run folder: checkpoints, logs, figures, summary")
    out.add_argument(
        "--save_full_state", action="store_true", help="checkpoints hold the frozen weights too (14 GB for a 7B model)"
    )
    test = parser.add_argument_group("evaluation")
    test.add_argument("--eval_split", choices=SPLITS, default="test", help="split that --eval_only takes")
    test.add_argument("--shuffle_questions", action="store_true",
                      help="evaluate with the questions of each picture swapped among its rows: Dice must fall if the text is read")  # fmt: skip
    test.add_argument("--max_new_tokens", type=integer_at_least(1), default=64, help="longest generated answer, tokens")
    test.add_argument("--predict", metavar="IMAGE", help="no training: write mask, overlay and answer for this picture")
    test.add_argument("--question", help="the question for --predict")
    add_common_arguments(parser)
    args = parse_arguments(parser, argv)
    if args.predict and not args.question:
        parser.error("--predict needs --question")
    if args.overwrite and (args.resume_from or args.eval_only or args.predict):
        parser.error("--overwrite starts afresh and excludes --resume_from, --eval_only and --predict")
    if args.shuffle_questions and not args.eval_only:
        parser.error("--shuffle_questions is a test of a trained model and needs --eval_only")
    if not Path(args.data_root).is_dir():
        parser.error(f"{args.data_root}: no such folder (--data_root)")
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the heavy imports: --help and a mistyped flag answer at once

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import checkpoint_utils as ckpt
from distributed_utils import (
    Ranks,
    StopSignal,
    agree_on_errors,
    any_rank,
    create_distributed_dataloader,
    gather_objects,
    launch_workers,
    leave_alone,
    out_of_memory,
    print_main,
    reduce_sum,
    scale_learning_rate,
    setup_distributed,
)
from logging_utils import RunLog, plot_curves, print_banner, print_table

# --- data ---------------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One question: `image` and `mask` are existing files, `source` is `file:row` of the CSV."""

    modality: str
    image: str
    mask: str
    split: str
    question: str
    answer: str
    source: str


def find_pair(root: Path, path: str, source: str) -> tuple[str, str]:
    """(image, mask) files that a CSV's image_path means (facts: it is the mask's path, may hold backslashes; ISIC names differ)."""
    parts = [part for part in path.strip().replace("\\", "/").split("/") if part not in ("", ".")]
    if ".." in parts or path.strip()[:1] in ("/", "\\") or (parts and ":" in parts[0]):
        raise InputError(f"{source}: image_path {path!r} leaves the data root; use a path relative to it")
    if len(parts) < 2 or not re.search(r"_(masks|images)$", parts[-2]):
        raise InputError(f"{source}: image_path {path!r} is not <modality>/<split>_masks/<name>; correct the row")
    folder, stem = re.sub(r"_images$", "_masks", parts[-2]), Path(parts[-1]).stem.removesuffix("_Segmentation")
    for base in (root.joinpath(*parts[:-2]), root.joinpath("images_and_masks", *parts[:-2]), root.joinpath(*parts[-3:-2]),
                 root.joinpath("images_and_masks", *parts[-3:-2])):  # fmt: skip
        names = (parts[-1], f"{stem}_Segmentation.png", f"{stem}.png", f"{stem}.jpg")
        mask = next((base / folder / name for name in names if (base / folder / name).is_file()), None)
        if mask is None:
            continue
        images = base / folder.replace("_masks", "_images")
        for name in (parts[-1], f"{stem}.jpg", f"{stem}.png", f"{stem}.jpeg", f"{stem}.JPG"):
            if "_Segmentation" not in name and (images / name).is_file():
                return str(images / name), str(mask)
        raise InputError(f"{source}: no picture {stem}.png or .jpg in {images}; add it or remove the row")
    raise InputError(f"{source}: mask {'/'.join(parts)} does not exist under {root}; correct the row or --data_root")


def read_annotations(root: Path, names: list[str] | None, skip_bad_rows: bool) -> list[Row]:
    """All rows of the annotation CSVs, in file order. Raises InputError naming file and row."""
    files = sorted((root / "annotations").glob("*.csv"))
    if not files:
        raise InputError(f"{root / 'annotations'}: holds no CSV file; check --data_root")
    if names:
        wanted = {name.removesuffix(".csv") for name in names}
        if missing := wanted - {file.stem for file in files}:
            raise InputError(
                f"{root / 'annotations'}: no {sorted(missing)[0]}.csv; there are {', '.join(f.stem for f in files)}"
            )
        files = [file for file in files if file.stem in wanted]
    rows, dropped = [], 0
    for file in files:
        needed = ("image_path", "split", "question", "answer")
        try:
            with open(file, newline="", encoding="utf-8-sig") as text:
                reader = csv.DictReader(text)
                if lacking := [name for name in needed if name not in (reader.fieldnames or ())]:
                    raise InputError(
                        f"{file}:1: no column {lacking[0]!r}; the columns are {', '.join(reader.fieldnames or ['none'])}"
                    )
                for record in reader:
                    source = f"{file}:{reader.line_num}"
                    if empty := [name for name in needed if not (record[name] or "").strip()]:
                        if not skip_bad_rows:
                            raise InputError(f"{source}: empty {empty[0]!r}; complete the row or pass --skip_bad_rows")
                        dropped += 1
                        continue
                    split = record["split"].strip().lower()
                    if split not in SPLITS:
                        raise InputError(
                            f"{source}: split {record['split']!r} is not train, val or test; correct the row"
                        )
                    image, mask = find_pair(root, record["image_path"], source)
                    rows.append(
                        Row(file.stem, image, mask, split, record["question"].strip(), record["answer"].strip(), source)
                    )
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{file}: not a readable UTF-8 CSV ({error}); repair the file") from None
    if dropped:
        print_main(f"{dropped} rows with a missing field dropped")
    return rows


def open_picture(path: str) -> Image.Image:
    """Decode to 8-bit RGB; 16-bit and float pictures are scaled to their own range."""
    with Image.open(path) as picture:
        if picture.mode[:1] in "IF":
            values = np.asarray(picture, np.float32)
            low, high = float(values.min()), float(values.max())
            picture = Image.fromarray((255 * (values - low) / max(high - low, 1e-6)).astype(np.uint8))
        return picture.convert("RGB")


def open_mask(path: str) -> np.ndarray:
    """(H, W) bool: foreground > 0; in 0..255 masks, whose edges JPEG may have smeared, > 127."""
    values = np.asarray(open_picture(path)).max(axis=2)
    return values > (127 if values.max() > 127 else 0)


def position_of(mask: np.ndarray) -> str | None:
    """Facts, position rule: "center" when the bounding box spans the image centre, else the quadrant of the box's centre."""
    ys, xs = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(ys):
        return None
    (top, bottom), (left, right) = (ys[0], ys[-1] + 1), (xs[0], xs[-1] + 1)
    middle_y, middle_x = mask.shape[0] / 2, mask.shape[1] / 2
    if top < middle_y < bottom and left < middle_x < right:
        return "center"
    return (
        f"{'top' if (top + bottom) / 2 < middle_y else 'bottom'} {'left' if (left + right) / 2 < middle_x else 'right'}"
    )


def position_in(text: str) -> str | None:
    """The position that a sentence names (the last one, so that "the right kidney is in the bottom left" is bottom left)."""
    found = re.findall(r"\b(top|upper|bottom|lower)[\s-]+(left|right)\b|\b(cent(?:er|re)|middle)\b", text.lower())
    if not found:
        return None
    vertical, side, middle = found[-1]
    return "center" if middle else f"{'top' if vertical in ('top', 'upper') else 'bottom'} {side}"


def check_pictures(rows: list[Row], ranks: Ranks) -> dict[str, str]:
    """{image path: hash of its bytes}, after every file was decoded once (the ranks share the work).

    Raises InputError on all ranks for an unreadable file, and for a picture, also a copy under another name, in two splits.
    """
    from concurrent.futures import ThreadPoolExecutor

    from tqdm import tqdm

    sources = {path: row.source for row in reversed(rows) for path in (row.image, row.mask)}
    images = {row.image for row in rows}

    def check(path: str) -> tuple[str, str]:
        try:
            open_picture(path)
            return path, hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest() if path in images else ""
        except Exception as error:
            reason = str(error).replace(path, "file")
            raise InputError(
                f"{sources[path]}: {path} is not a readable picture ({reason}); replace it or remove the row"
            ) from None

    hashes: dict[str, str] = {}
    with agree_on_errors(), ThreadPoolExecutor(max_workers=8) as pool:
        mine = sorted(sources)[ranks.rank :: ranks.world_size]
        hashes = dict(
            tqdm(
                pool.map(check, mine),
                "checking pictures",
                len(mine),
                disable=not (ranks.is_main and sys.stderr.isatty()),
            )
        )
    return {path: digest for part in gather_objects(hashes) for path, digest in part.items() if digest}


def check_splits(rows: list[Row], identity: dict[str, str]) -> None:
    """InputError naming an image (not a row) that lies in two splits."""
    seen: dict[str, Row] = {}
    for row in rows:
        first = seen.setdefault(identity.get(row.image, row.image), row)
        if first.split != row.split:
            raise InputError(f"{row.source}: picture {row.image} is in split {row.split!r} and, at {first.source}, in {first.split!r}; "
                             "keep all rows of a picture in one split")  # fmt: skip


def swap_questions(rows: list[Row], identity: dict[str, str]) -> tuple[list[Row], list[bool]]:
    """Give each row the question of the next row of the same picture; also says which rows got another question."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(identity.get(row.image, row.image), []).append(i)
    swapped = list(rows)
    for group in groups.values():
        for i, j in zip(group, group[1:] + group[:1], strict=True):
            swapped[i] = rows[i]._replace(question=rows[j].question)
    return swapped, [a.question != b.question for a, b in zip(rows, swapped, strict=True)]


class PositionData(Dataset):
    """Rows as uint8 pictures at the two encoders' sizes, a bool mask, token ids and the true position. Keeps what it decoded."""

    def __init__(self, rows: list[Row], reader: "Reader", keep: bool):
        self.rows, self.reader, self.keep = rows, reader, keep
        self.pictures: dict[str, tuple] = {}
        self.masks: dict[str, tuple] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        row = self.rows[i]
        picture, mask = self.pictures.get(row.image), self.masks.get(row.mask)
        if picture is None:
            picture = self.reader.picture(open_picture(row.image))
        if mask is None:
            native = open_mask(row.mask)
            size = (self.reader.image_size, self.reader.image_size)
            small = np.asarray(Image.fromarray(native).resize(size, Image.Resampling.NEAREST))
            mask = torch.from_numpy(small.copy()), position_of(native)
        if self.keep:
            self.pictures[row.image], self.masks[row.mask] = picture, mask
        prompt, answer = self.reader.tokens(row.question, row.answer)
        return {
            "index": i,
            "sam": picture[0],
            "vlm": picture[1],
            "mask": mask[0],
            "position": mask[1],
            "prompt": prompt,
            "answer": answer,
        }


class Reader:
    """How a picture and a question become tensors for one pair of checkpoints (sizes, normalisation, tokenizer, prompt)."""

    def __init__(self, tokenizer, vlm_config, vlm_processor: dict, sam_processor: dict, image_size: int):
        vision = vlm_config.vision_config
        self.tokenizer, self.image_size, self.vlm_size = tokenizer, image_size, vision.image_size
        self.image_token = vlm_config.image_token_id
        self.image_tokens = (vision.image_size // vision.patch_size) ** 2 + (
            vlm_config.vision_feature_select_strategy == "full"
        )
        self.statistics = {
            name: (processor.get("image_mean", [0.0] * 3), processor.get("image_std", [1.0] * 3))
            for name, processor in (("vlm", vlm_processor), ("sam", sam_processor))
        }
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
        self.before = begin + self._ids("USER: ")
        self.cache: dict[tuple, tuple] = {}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def picture(self, picture: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 (3, image_size, image_size) for SAM and (3, vlm_size, vlm_size) for the VLM, the whole picture in both."""
        return tuple(
            torch.from_numpy(
                np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC)).transpose(2, 0, 1).copy()
            )
            for size in (self.image_size, self.vlm_size)
        )

    def tokens(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """`USER: <image>\\n{question}\\nASSISTANT:` and ` {answer}</s>` as ids; <image> stands once per image token."""
        if (question, answer) not in self.cache:
            prompt = self.before + [self.image_token] * self.image_tokens + self._ids(f"\n{question}\nASSISTANT:")
            self.cache[question, answer] = prompt, self._ids(f" {answer}") + [self.tokenizer.eos_token_id]
        return self.cache[question, answer]

    def collate(self, items: list[dict]) -> dict:
        """Right-padded ids (causal attention never sees the padding) with the places of the prompt's words and of the answer."""
        ids = [item["prompt"] + item["answer"] for item in items]
        before, after = list(range(len(self.before))), len(self.before) + self.image_tokens
        words = [before + list(range(after, len(item["prompt"]))) for item in items]
        starts = [len(item["prompt"]) - 1 for item in items]  # the last prompt position predicts the first answer token
        longest = max(len(item["answer"]) for item in items)
        return {
            "sam": torch.stack([item["sam"] for item in items]),
            "vlm": torch.stack([item["vlm"] for item in items]),
            "mask": torch.stack([item["mask"] for item in items]),
            "ids": pad_rows(ids, self.pad),
            "words": pad_rows(words, -1),
            "answer_at": pad_rows(
                [[min(s + k, len(i) - 1) for k in range(longest)] for s, i in zip(starts, ids, strict=True)], 0
            ),
            "answer": pad_rows([item["answer"] for item in items], -100),
            "index": [item["index"] for item in items],
            "position": [item["position"] for item in items],
            "prompt": [item["prompt"] for item in items],
        }


def pad_rows(rows: list[list[int]], value: int, left: bool = False) -> torch.Tensor:
    """int64 (B, longest), each row padded with `value`."""
    longest = max(map(len, rows))
    return torch.tensor([[value] * (longest - len(r)) + r if left else r + [value] * (longest - len(r)) for r in rows])


def to_device(batch: dict, device: torch.device) -> dict:
    return {k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


# --- model --------------------------------------------------------------------------------------------------------------------


class MaskDecoder(nn.Module):
    """Fusion and decoder of PRS-Med: image tokens attend to the prompt's words, then convolutions up to 4x the encoder's grid.

    dim is the SAM encoder's output width (256 for SAM): text MLP D -> 2 dim -> dim, 8 heads, conv dim -> dim/2 -> dim/4 -> 1.
    GroupNorm, not BatchNorm, whose statistics would depend on the number of GPUs.
    """

    def __init__(self, text_dim: int, dim: int):
        super().__init__()
        self.text = nn.Sequential(nn.Linear(text_dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.LayerNorm(dim))
        self.attention = nn.MultiheadAttention(dim, 8, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.encoder = nn.TransformerEncoderLayer(
            dim, 8, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

        def block(inside: int, outside: int) -> list[nn.Module]:
            return [
                nn.Conv2d(inside, outside, 3, padding=1),
                nn.GroupNorm(8, outside),
                nn.GELU(),
                nn.Upsample(scale_factor=2),
            ]

        self.convolutions = nn.Sequential(
            *block(dim, dim // 2), *block(dim // 2, dim // 4), nn.Conv2d(dim // 4, 1, 3, padding=1)
        )

    def forward(self, features: torch.Tensor, words: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """features (B, dim, h, w), words (B, Q, D), padding (B, Q) True where there is no word -> logits (B, 1, 4h, 4w)."""
        tokens = features.flatten(2).transpose(1, 2)
        text = self.text(words)
        tokens = self.norm(tokens + self.attention(tokens, text, text, key_padding_mask=padding, need_weights=False)[0])
        tokens = self.encoder(tokens)
        return self.convolutions(tokens.transpose(1, 2).unflatten(2, features.shape[2:]))


class PRSMed(nn.Module):
    """Frozen VLM with LoRA, SAM vision encoder trained in full, mask decoder. One forward pass gives mask and answer loss."""

    def __init__(self, vlm: nn.Module, sam: nn.Module, reader: Reader):
        super().__init__()
        self.vlm, self.sam, self.reader = vlm, sam, reader
        self.decoder = MaskDecoder(vlm.config.text_config.hidden_size, sam.config.output_channels)
        for name, (mean, std) in reader.statistics.items():
            self.register_buffer(f"{name}_mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
            self.register_buffer(f"{name}_std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def train(self, mode: bool = True) -> "PRSMed":
        super().train(mode)
        self.vlm.model.vision_tower.eval()
        return self

    def vlm_pixels(self, pictures: torch.Tensor) -> torch.Tensor:
        return ((pictures / 255 - self.vlm_mean) / self.vlm_std).to(self.vlm.dtype)

    def forward(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask logits (B, image_size, image_size) and the answer's cross-entropy summed over its tokens (B,), both fp32.

        The mask reads hidden states of prompt positions, which by causality know nothing of the answer behind them.
        """
        with torch.no_grad():
            seen = self.vlm.model.get_image_features(
                pixel_values=self.vlm_pixels(batch["vlm"]), return_dict=True
            ).pooler_output
        first = len(self.reader.before)
        words = self.vlm.get_input_embeddings()(batch["ids"])
        after = words[:, first + self.reader.image_tokens :]
        embeddings = torch.cat([words[:, :first], torch.stack(list(seen)).to(words.dtype), after], dim=1)
        hidden = self.vlm.model.language_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state

        def at(places: torch.Tensor) -> torch.Tensor:
            return hidden.gather(1, places.clamp_min(0)[..., None].expand(-1, -1, hidden.shape[2]))

        logits = self.vlm.lm_head(at(batch["answer_at"])).float()
        text_loss = F.cross_entropy(logits.transpose(1, 2), batch["answer"], ignore_index=-100, reduction="none").sum(1)
        pixels = (batch["sam"] / 255 - self.sam_mean) / self.sam_std
        features = self.sam(pixels).last_hidden_state
        masks = self.decoder(features, at(batch["words"]).to(features.dtype), batch["words"] < 0)
        size = (self.reader.image_size, self.reader.image_size)
        return F.interpolate(masks.float(), size, mode="bilinear", align_corners=False)[:, 0], text_loss

    @torch.no_grad()
    def answer(self, batch: dict, max_new_tokens: int) -> list[str]:
        """Greedy answers to the prompts of a batch, from the picture and the question alone."""
        ids = pad_rows(batch["prompt"], self.reader.pad, left=True).to(batch["vlm"].device)
        lengths = torch.tensor([[len(prompt)] for prompt in batch["prompt"]], device=ids.device)
        mask = (torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] - lengths).long()
        out = self.vlm.generate(
            input_ids=ids, attention_mask=mask, pixel_values=self.vlm_pixels(batch["vlm"]), do_sample=False,
            max_new_tokens=max_new_tokens, pad_token_id=self.reader.pad, eos_token_id=self.reader.tokenizer.eos_token_id,
        )  # fmt: skip
        return [
            text.strip()
            for text in self.reader.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        ]


def find_pretrained(root: Path, given: str | None, kinds: tuple[str, ...], missing: str) -> tuple[str, dict]:
    """(path or hub name, config) of the checkpoint given, or of the one found in a folder under the data root."""
    from transformers import PretrainedConfig

    if given is None:
        for file in sorted(root.glob("*/config.json")):
            try:
                config = json.loads(file.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(config, dict) and config.get("model_type") in kinds:
                return str(file.parent), config
        raise InputError(f"{root}: no {kinds[0]} checkpoint here; {missing}")
    try:
        if not Path(given).exists() and given.count("/") != 1:
            raise OSError("no such folder")
        config, _ = PretrainedConfig.get_config_dict(given)
    except (OSError, ValueError) as error:
        raise InputError(f"{given}: cannot be loaded ({str(error).splitlines()[0][:150]}); {missing}") from None
    if config.get("model_type") not in kinds:
        raise InputError(f"{given}: is a {config.get('model_type')!r} checkpoint, not {' or '.join(kinds)}; {missing}")
    return given, config


def build_model(args: argparse.Namespace, ranks: Ranks) -> PRSMed:
    """Load both checkpoints, add LoRA to the language model, freeze the rest of the VLM. Raises InputError."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoTokenizer, LlavaForConditionalGeneration, SamModel, SamVisionModel, utils
    from transformers.image_processing_base import ImageProcessingMixin

    utils.logging.set_verbosity_error()
    utils.logging.disable_progress_bar()
    root = Path(args.data_root)
    vlm_path, _ = find_pretrained(root, args.vlm_path, ("llava",), NO_VLM)
    sam_path, sam_config = find_pretrained(root, args.sam_path, ("sam", "sam_vision_model"), NO_SAM)
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.mixed_precision]
    place = (
        {"device_map": {"": ranks.device}} if ranks.device.type == "cuda" else {}
    )  # no 7B copy per rank in host memory
    loading = vlm_path
    try:
        vlm = LlavaForConditionalGeneration.from_pretrained(vlm_path, dtype=dtype, **place)
        tokenizer = AutoTokenizer.from_pretrained(vlm_path)
        vlm_processor = ImageProcessingMixin.get_image_processor_dict(vlm_path)[0]
        loading = sam_path
        sam_class = SamModel if sam_config["model_type"] == "sam" else SamVisionModel
        sam = sam_class.from_pretrained(sam_path, dtype=torch.float32).vision_encoder
        sam_processor = ImageProcessingMixin.get_image_processor_dict(sam_path)[0]
    except Exception as error:
        reason = str(error).splitlines()[0][:150] if str(error) else type(error).__name__
        raise InputError(f"{loading}: checkpoint cannot be loaded ({reason}); download it again") from None
    patch = sam.config.patch_size
    if args.image_size and args.image_size % patch:
        raise InputError(f"--image_size {args.image_size}: not a multiple of the encoder's patch; "
                         f"try {args.image_size // patch * patch or patch}")  # fmt: skip
    size = args.image_size or sam.config.image_size
    if (
        size != sam.config.image_size and sam.pos_embed is not None
    ):  # relative positions adapt by themselves in the model
        grid = F.interpolate(sam.pos_embed.data.permute(0, 3, 1, 2), (size // patch, size // patch), mode="bicubic")
        sam.pos_embed = nn.Parameter(grid.permute(0, 2, 3, 1).contiguous())
    sam.patch_embed.image_size = (size, size)
    torch.manual_seed(args.seed)  # the same LoRA and decoder on every rank
    lora = LoraConfig(
        r=args.lora_rank, lora_alpha=args.lora_alpha, lora_dropout=args.lora_dropout,
        target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
    )  # fmt: skip
    vlm = inject_adapter_in_model(lora, vlm)
    for name, parameter in vlm.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if args.gradient_checkpointing:
        for part in (vlm, sam):
            part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = PRSMed(vlm, sam, Reader(tokenizer, vlm.config, vlm_processor, sam_processor, size)).to(ranks.device)
    if ranks.device.type == "cuda":
        model.sam.to(memory_format=torch.channels_last)
        model.decoder.to(memory_format=torch.channels_last)
    model.base = {"name": Path(vlm_path).name, "fingerprint": fingerprint(model)}
    return model


def fingerprint(model: nn.Module) -> str:
    """A hash over names, shapes and 64 bf16-rounded values of every frozen tensor: the same base in any precision."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            flat = parameter.detach().flatten()
            some = flat[torch.linspace(0, flat.numel() - 1, min(64, flat.numel()), device=flat.device).long()]
            digest.update(f"{name}{tuple(parameter.shape)}{some.bfloat16().float().tolist()}".encode())
    return digest.hexdigest()


def trainable_state(model: nn.Module, everything: bool) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: the trained tensors, or all of them (--save_full_state)."""
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in ckpt.clean_keys(model.state_dict()).items() if everything or name in wanted}


def load_trainable(model: nn.Module, contents: dict) -> None:
    """Put a checkpoint's weights into the model. Raises InputError for another model or another frozen base."""
    if contents["format"] != FORMAT:
        raise InputError(f"--resume_from: checkpoint of {contents['format']}, not of {FORMAT}; choose another")
    if contents["base"]["fingerprint"] != model.base["fingerprint"]:
        raise InputError(
            f"--vlm_path: not the base that the checkpoint was trained on ({contents['base']['name']}); give that one"
        )
    own = dict(model.named_parameters())
    lacking = {name for name, parameter in own.items() if parameter.requires_grad} - contents["model"].keys()
    unlike = [n for n, value in contents["model"].items() if n not in own or own[n].shape != value.shape]
    if wrong := sorted(lacking) + unlike:
        raise InputError(
            f"--resume_from: checkpoint of another model ({wrong[0]} does not fit); give the flags it was trained with"
        )
    model.load_state_dict(contents["model"], strict=False)


# --- loss ---------------------------------------------------------------------------------------------------------------------


def mask_loss(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """BCE + Dice loss of each sample: (B, H, W) logits and bool masks -> (B,). A mean over samples needs no other rank."""
    target = masks.float()
    bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean((1, 2))
    probability = logits.sigmoid()
    overlap = 2 * (probability * target).sum((1, 2)) + 1
    return bce + 1 - overlap / (probability.sum((1, 2)) + target.sum((1, 2)) + 1)


def batch_loss(model: nn.Module, batch: dict, samples: int, tokens: int, args: argparse.Namespace) -> torch.Tensor:
    """(loss, mask part, text part) of one micro-batch: its share of the means over the global batch's `samples` and `tokens`."""
    with torch.autocast(batch["sam"].device.type, precision_dtype(args), enabled=args.mixed_precision != "no"):
        logits, text = model(batch)
    seg, txt = mask_loss(logits, batch["mask"]).sum() / samples, text.sum() / tokens
    loss = args.lambda_seg * seg + args.lambda_txt * txt
    # a non-finite loss must give non-finite gradients, which DDP carries to every rank: all skip the step together
    return torch.stack([loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan), seg, txt])


def precision_dtype(args: argparse.Namespace) -> torch.dtype:
    return torch.float16 if args.mixed_precision == "fp16" else torch.bfloat16


# --- training -----------------------------------------------------------------------------------------------------------------


def learning_rate(step: int, base: float, args: argparse.Namespace, total_steps: int) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then constant or cosine to 0."""
    if step < args.warmup_steps:
        return base * (step + 1) / args.warmup_steps
    if args.lr_schedule == "constant":
        return base
    return base * 0.5 * (1 + math.cos(math.pi * (step - args.warmup_steps) / max(1, total_steps - args.warmup_steps)))


def train_one_epoch(model, loader, optimizer, scaler, state: dict, args, ranks: Ranks, log, stop, save) -> int:
    """Train from state's position to the end of the epoch or of the run; returns the exit code of a stop signal, else 0.

    model: PRSMed or DDP around it. state: `step`, `epoch`, `samples` (of all ranks, this epoch), `bad_in_row`; kept up to date.
    Between log lines nothing is read back from the GPU: numbers stay there, and a step with a non-finite gradient is skipped
    there by the fused optimizer.
    """
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batches = iter(loader)
    check_every = min(args.log_every, args.max_bad_steps)
    while state["step"] < args.total_steps:
        window = log.next_batches(batches, args.gradient_accumulation_steps)
        if not window:
            break
        answer_tokens = sum(int((batch["answer"] >= 0).sum()) for batch in window)
        tokens, stop_143, stop_130 = reduce_sum([answer_tokens, stop.code == 143, stop.code == 130]).tolist()
        if stop_143 or stop_130:  # agreed by all ranks, before the window is used
            save()
            return 143 if stop_143 else 130
        samples = len(window) * args.batch_size * ranks.world_size
        losses = []
        for i, batch in enumerate(window):
            if ranks.world_size > 1:
                model.require_backward_grad_sync = i == len(window) - 1  # what DDP.no_sync() sets
            parts = batch_loss(model, to_device(batch, ranks.device), samples, tokens, args)
            scaler.scale(
                parts[0] * ranks.world_size
            ).backward()  # DDP averages over ranks, the loss is a share of a sum
            losses.append(parts.detach())
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, args.grad_clip or math.inf, foreach=True)
        rate = learning_rate(state["step"], args.scaled_lr, args, args.total_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        scaler.step(optimizer)
        scaler.update(None if args.mixed_precision == "fp16" else 1.0)
        optimizer.zero_grad(set_to_none=True)
        mine = float(
            ranks.is_main
        )  # norm and skip flag are the same on all ranks: rank 0 alone enters them into the sum
        shared = torch.stack([norm, (~norm.isfinite()).to(norm.dtype)]) * mine
        log.step(torch.cat([torch.stack(losses).sum(0), shared.nan_to_num(nan=math.nan if mine else 0.0)]), samples)
        state["step"] += 1
        state["samples"] += samples
        if state["step"] % check_every == 0:
            count_bad_steps(log, state, args)
        if state["step"] % args.log_every == 0:
            log.write_interval(state["step"], state["epoch"] + 1, rate)
        if args.save_every and state["step"] % args.save_every == 0:
            save()
    return 0


def count_bad_steps(log: RunLog, state: dict, args: argparse.Namespace) -> None:
    """All ranks see the same reduced rows, so all stop together. Raises RunError after --max_bad_steps bad steps in a row."""
    for row in log.collect():
        state["bad_in_row"] = state["bad_in_row"] + 1 if row[LOSSES.index("skipped")] else 0
        if state["bad_in_row"] >= args.max_bad_steps:
            raise RunError(f"{state['bad_in_row']} steps in a row had a non-finite loss or gradient and were skipped; lower "
                           "--learning_rate, or look for bad data from the last checkpoint on")  # fmt: skip


# --- evaluation ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    model: PRSMed, data: PositionData, split: str, args, ranks: Ranks, log=None, step: int = 0
) -> dict[str, float]:
    """Metrics of a split, the same on every rank and for any number of ranks: rows are gathered, then averaged in row order.

    dice, iou: means over rows at image_size (1 when both masks are empty); also per modality. position_accuracy: the GENERATED
    answer names the position computed from the true mask; position_accuracy_mask: the predicted mask lies there. text_loss: mean
    cross-entropy per answer token.
    """
    model.eval()
    loader = create_distributed_dataloader(
        data, args.batch_size, train=False, num_workers=args.workers, collate_fn=data.reader.collate
    )
    results, pictures = [], {}
    for batch in loader:
        batch = to_device(batch, ranks.device)
        with torch.autocast(ranks.device.type, precision_dtype(args), enabled=args.mixed_precision != "no"):
            logits, text = model(batch)
            answers = model.answer(batch, args.max_new_tokens)
        predicted, target = logits > 0, batch["mask"]
        both, either = (predicted & target).sum((1, 2)), (predicted | target).sum((1, 2))
        numbers = torch.stack([both, either, text, (batch["answer"] >= 0).sum(1)], 1).double().cpu().tolist()
        masks = predicted.cpu().numpy()
        for k, (i, truth, (inter, union, loss, tokens)) in enumerate(
            zip(batch["index"], batch["position"], numbers, strict=True)
        ):
            dice, iou = (2 * inter / (inter + union), inter / union) if union else (1.0, 1.0)
            results.append(
                (
                    i,
                    dice,
                    iou,
                    position_in(answers[k]) == truth,
                    position_of(masks[k]) == truth,
                    truth is not None,
                    loss,
                    tokens,
                )
            )
            if i < 6 or i in range(len(data) // 2, len(data) // 2 + 3):
                small = Image.fromarray(masks[k]), Image.fromarray(target[k].cpu().numpy())
                pictures[i] = (batch["sam"][k].cpu().numpy(), *map(np.asarray, small), answers[k], dice)
    rows = sorted(row for part in gather_objects(results) for row in part)
    shown = {i: picture for part in gather_objects(pictures) for i, picture in part.items()}
    if log is not None and ranks.is_main and shown:
        log.figure(f"{split}_predictions", draw_predictions([(data.rows[i], *shown[i]) for i in sorted(shown)]), step)
    metrics = {f"{split}/text_loss": sum(r[6] for r in rows) / max(1, sum(r[7] for r in rows))}
    modalities = sorted({row.modality for row in data.rows})
    for name in ["", *(f"/{m}" for m in modalities)]:
        chosen = [r for r in rows if not name or data.rows[r[0]].modality == name[1:]]
        placed = [r for r in chosen if r[5]]
        metrics[f"{split}/dice{name}"] = sum(r[1] for r in chosen) / len(chosen)
        metrics[f"{split}/iou{name}"] = sum(r[2] for r in chosen) / len(chosen)
        if placed:
            metrics[f"{split}/position_accuracy{name}"] = sum(r[3] for r in placed) / len(placed)
            metrics[f"{split}/position_accuracy_mask{name}"] = sum(r[4] for r in placed) / len(placed)
    return metrics


def print_metrics(split: str, metrics: dict[str, float]) -> None:
    """The table of a split: all rows, then each modality."""
    table: dict[str, dict] = {}
    for name, value in metrics.items():
        _, metric, *modality = name.split("/")
        table.setdefault(modality[0] if modality else "all", {})[metric.replace("position_accuracy", "position")] = (
            value
        )
    print_table(split, table)


def draw_predictions(shown: list[tuple]):
    """A matplotlib figure: picture with the true outline (green) and the predicted mask (red), question, answers, Dice."""
    from matplotlib.figure import Figure

    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(4 * columns, 4.4 * lines), layout="constrained")
    for axes, (row, picture, predicted, target, answer, dice) in zip(
        figure.subplots(lines, columns, squeeze=False).flat, shown, strict=False
    ):
        axes.imshow(picture.transpose(1, 2, 0))
        axes.imshow(np.where(predicted[..., None], [1.0, 0.1, 0.1, 0.45], 0.0))
        if target.any():
            axes.contour(target, [0.5], colors="lime", linewidths=1.5)
        axes.set_title(
            f"{row.question}\nsaid: {answer[:60] or '(nothing)'}\ntrue: {row.answer[:60]}   Dice {dice:.2f}", fontsize=8
        )
    for axes in figure.axes:
        axes.axis("off")
    return figure


def predict(model: PRSMed, args: argparse.Namespace, ranks: Ranks) -> None:
    """--predict: <checkpoint_dir>/predictions/<name>_mask.png at the picture's size, _overlay.png, and the answer as .txt."""
    try:
        picture = open_picture(args.predict)
    except Exception as error:
        raise InputError(f"{args.predict}: not a readable picture ({error}); check --predict") from None
    model.eval()
    prompt, end = model.reader.tokens(args.question, "")
    sam, vlm = model.reader.picture(picture)
    item = {"index": 0, "sam": sam, "vlm": vlm, "mask": sam[0] > 255, "position": None, "prompt": prompt, "answer": end}
    batch = to_device(model.reader.collate([item]), ranks.device)
    with (
        torch.no_grad(),
        torch.autocast(ranks.device.type, precision_dtype(args), enabled=args.mixed_precision != "no"),
    ):
        logits, answer = model(batch)[0], model.answer(batch, args.max_new_tokens)[0]
    mask = (
        F.interpolate(logits[None], (picture.height, picture.width), mode="bilinear", align_corners=False)[0, 0]
        .cpu()
        .numpy()
        > 0
    )
    if ranks.is_main:
        folder, name = Path(args.checkpoint_dir) / "predictions", Path(args.predict).stem
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.where(mask, 255, 0).astype(np.uint8)).save(folder / f"{name}_mask.png")
        colours = np.asarray(picture) * np.where(mask[..., None], [1.0, 0.5, 0.5], 1.0) + np.where(
            mask[..., None], [110.0, 0, 0], 0
        )
        Image.fromarray(colours.clip(0, 255).astype(np.uint8)).save(folder / f"{name}_overlay.png")
        (folder / f"{name}.txt").write_text(f"{args.question}\n{answer}\n")
        print(
            f"{answer}\nmask covers {mask.mean():.1%}, position by mask: {position_of(mask)}; written to {folder}/{name}_*.png"
        )


# --- the run ------------------------------------------------------------------------------------------------------------------


def choose_precision(wanted: str, device: torch.device) -> tuple[str, str]:
    """(precision, why) for --mixed_precision. Raises InputError for fp16 on CPU."""
    if device.type == "cpu":
        if wanted == "fp16":
            raise InputError("--mixed_precision fp16: needs a GPU; use no or bf16")
        return ("no", "fp32 on CPU") if wanted == "auto" else (wanted, "as asked")
    capability = torch.cuda.get_device_capability(device)
    automatic = "bf16" if capability >= (8, 0) else "fp16"
    return (
        (automatic, f"compute capability {capability[0]}.{capability[1]}") if wanted == "auto" else (wanted, "as asked")
    )


def halve_batch_until_it_fits(model: PRSMed, data: PositionData, args: argparse.Namespace, ranks: Ranks) -> None:
    """--auto_batch: run one forward and backward pass of the longest rows; all ranks halve together when one runs out of memory."""
    rows = sorted(range(len(data)), key=lambda i: -len(data.rows[i].question + data.rows[i].answer))
    while True:
        failed = False
        try:
            items = [data[rows[k % len(rows)]] for k in range(args.batch_size)]
            batch_loss(model.train(), to_device(data.reader.collate(items), ranks.device), 1, 1, args)[0].backward()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            failed = True
        model.zero_grad(set_to_none=True)
        items = None
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        if not any_rank(failed):
            return
        if args.batch_size == 1:
            raise RunError("out of memory at --batch_size 1; pass --gradient_checkpointing or a smaller --image_size")
        args.batch_size, args.gradient_accumulation_steps = (
            (args.batch_size + 1) // 2,
            args.gradient_accumulation_steps * 2,
        )
        print_main(f"out of memory: now --batch_size {args.batch_size} "
                   f"--gradient_accumulation_steps {args.gradient_accumulation_steps}")  # fmt: skip


def run(args: argparse.Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun = time.time()
    folder, root = Path(args.checkpoint_dir), Path(args.data_root)
    resuming = bool(args.resume_from or args.eval_only or args.predict)
    args.mixed_precision, why = choose_precision(args.mixed_precision, ranks.device)
    rows, identity = [], {}
    if not args.predict:
        rows = read_annotations(root, args.annotations, args.skip_bad_rows)
        identity = {} if args.skip_data_check else check_pictures(rows, ranks)
        check_splits(rows, identity)
    lock = None if args.eval_only or args.predict else ckpt.open_run_folder(folder, resuming, args.overwrite)
    source = args.resume_from or (str(folder / "best.pt") if args.eval_only or args.predict else None)
    contents = ckpt.load_checkpoint(source, folder)
    if contents is None and (args.eval_only or args.predict):
        raise InputError(f"{folder}: no checkpoint to evaluate; give one with --resume_from")
    model = build_model(args, ranks)
    if contents is not None:
        load_trainable(model, contents)
    if args.predict:
        predict(model, args, ranks)
        return 0
    keep = enough_memory(rows, model.reader, args.cache_gb)
    args.workers = 0 if keep else args.num_workers
    sets = {split: PositionData([row for row in rows if row.split == split], model.reader, keep) for split in SPLITS}
    if args.eval_only:
        return evaluate_only(model, sets[args.eval_split], identity, contents, args, ranks)
    train_rows, per_step = len(sets["train"]), args.batch_size * ranks.world_size
    if train_rows < per_step:
        raise InputError(f"{root}: {train_rows} training rows are fewer than one global batch of {per_step} (batch_size x processes); "
                         "lower --batch_size or the number of processes")  # fmt: skip
    if args.auto_batch:
        halve_batch_until_it_fits(model, sets["train"], args, ranks)
    loader = create_distributed_dataloader(
        sets["train"], args.batch_size, seed=args.seed, num_workers=args.workers, collate_fn=model.reader.collate,
        prefetch_factor=4 if args.workers else None,
    )  # fmt: skip
    epoch_steps = math.ceil(loader.batch_sampler.batches_per_epoch() / args.gradient_accumulation_steps)
    args.total_steps = min(args.max_steps or math.inf, args.num_epochs * epoch_steps)
    args.scaled_lr = scale_learning_rate(args.learning_rate, ranks.world_size, args.lr_scaling)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.scaled_lr, weight_decay=args.weight_decay, fused=True)
    fp16 = (
        args.mixed_precision == "fp16"
    )  # otherwise the scale stays 1 and the scaler only skips non-finite steps, without a sync
    scaler = torch.amp.GradScaler(ranks.device.type, init_scale=2.0**14 if fp16 else 1.0)
    state = {"step": 0, "epoch": 0, "samples": 0, "bad_in_row": 0, "best": None, "saved": -1}
    torch.manual_seed(args.seed * 1000003 + ranks.rank)  # dropout differs between ranks
    if contents is not None:
        state |= contents["state"]
        optimizer.load_state_dict(contents["optimizer"])
        scaler.load_state_dict(contents["scaler"])
        if ranks.rank < len(contents["rng"]) == ranks.world_size:
            ckpt.set_rng_state(contents["rng"][ranks.rank])
    log = RunLog(folder, ranks, LOSSES, args.log_every, args.total_steps, args.wandb_project if args.wandb else None,
                 contents["log"] if contents else None, vars(args))  # fmt: skip
    effective = per_step * args.gradient_accumulation_steps
    if ranks.is_main:
        ckpt.write_atomically(folder / "args.yaml", lambda file: file.write(as_yaml(args).encode()))
        print_banner("PRS-Med", {
            "launcher": f"{ranks.launcher}, world size {ranks.world_size}, device {ranks.device}",
            "batch": f"{args.batch_size} per GPU x {args.gradient_accumulation_steps} accumulation x {ranks.world_size} processes "
                     f"= {effective} effective",
            "learning rate": f"{args.learning_rate:g} -> {args.scaled_lr:g} ({args.lr_scaling}), {args.lr_schedule}",
            "precision": f"{args.mixed_precision} ({why})",
            "data": ", ".join(f"{len(sets[split])} {split}" for split in SPLITS) + f" rows of {len({r.modality for r in rows})} modalities",
            "loading": "decoded pictures kept in memory, no workers" if keep else f"{args.workers} workers per GPU",
            "steps": f"{args.total_steps} ({epoch_steps} an epoch, {args.num_epochs} epochs)",
            "start": f"step {state['step']}, epoch {state['epoch'] + 1}" if contents else "from the beginning",
            "trained": f"{sum(p.numel() for p in parameters):,} of {sum(p.numel() for p in model.parameters()):,} parameters",
            "output": folder,
        })  # fmt: skip
    if args.compile:
        model.compile()
    wrapped = model
    if ranks.world_size > 1:
        wrapped = DDP(
            model, device_ids=[ranks.device] if ranks.device.type == "cuda" else None, gradient_as_bucket_view=True
        )

    def save() -> None:
        if state["saved"] == state["step"]:
            return
        count_bad_steps(log, state, args)
        state["saved"] = state["step"]
        ckpt.save_checkpoint(folder, {
            "format": FORMAT, "model": trainable_state(model, args.save_full_state), "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(), "state": dict(state), "base": model.base, "log": log.pending(state["step"]),
        }, state["step"], args.keep_last)  # fmt: skip

    try:
        with StopSignal() as stop:
            while True:
                loader.batch_sampler.set_position(state["epoch"], state["samples"])
                log.restart_clock()
                code = train_one_epoch(wrapped, loader, optimizer, scaler, state, args, ranks, log, stop, save)
                if code:
                    print_main(
                        f"stopped by a signal at step {state['step']}, saved; --resume_from auto goes on from here"
                    )
                    return code
                save()
                if len(sets["val"]):
                    metrics = evaluate(model, sets["val"], "val", args, ranks, log, state["step"])
                    log.write(state["step"], state["epoch"] + 1, metrics)
                    print_main(f"epoch {state['epoch'] + 1} val dice {metrics['val/dice']:.4f} position "
                               f"{metrics.get('val/position_accuracy', math.nan):.4f}")  # fmt: skip
                    if state["best"] is None or metrics["val/dice"] >= state["best"]:
                        state["best"] = metrics["val/dice"]
                        ckpt.mark_best(folder, folder / f"step_{state['step']:08d}.pt")
                if state["step"] >= args.total_steps:
                    break
                if any_rank(bool(stop.code)):
                    print_main("stopped by a signal after the evaluation; --resume_from auto goes on from here")
                    return max(int(code) for code in gather_objects(stop.code))
                state["epoch"], state["samples"] = state["epoch"] + 1, 0
        finish(model, sets, folder, state, args, ranks, log, time.time() - begun, effective)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        leave_alone(f"out of memory at --batch_size {args.batch_size}; try --batch_size {max(1, args.batch_size // 2)} "
                    f"--gradient_accumulation_steps {args.gradient_accumulation_steps * 2} (the result stays the same), "
                    "--gradient_checkpointing or a smaller --image_size; --auto_batch finds the batch by itself")  # fmt: skip
    finally:
        log.close()
    del lock
    return 0


def finish(
    model, sets, folder: Path, state: dict, args, ranks: Ranks, log: RunLog, seconds: float, effective: int
) -> None:
    """The end of a run: best weights, test metrics, curves, table, summary.json, weights as safetensors."""
    best = folder / "best.pt"
    if any_rank(best.exists()):
        load_trainable(model, ckpt.load_checkpoint(str(best), folder))
    metrics = {}
    for split in ("val", "test"):
        if len(sets[split]):
            metrics = evaluate(model, sets[split], split, args, ranks, log, state["step"])
            log.write(state["step"], state["epoch"] + 1, metrics)
            if ranks.is_main:
                print_metrics(f"{split} (best on val)", metrics)
    if ranks.is_main:
        ckpt.export_weights(trainable_state(model, args.save_full_state), folder / "model.safetensors")
        log.figure("curves", plot_curves(folder / "metrics.jsonl"), state["step"])
        log.summary({"steps": state["step"], "epochs": state["epoch"] + 1, "world_size": ranks.world_size,
                     "effective_batch_size": effective, "precision": args.mixed_precision, "seconds": round(seconds, 1)})  # fmt: skip
        print(f"weights {folder}/model.safetensors, pictures {folder}/figures, summary {folder}/summary.json")


def evaluate_only(model, data: PositionData, identity: dict, contents: dict, args, ranks: Ranks) -> int:
    """--eval_only: metrics of one split, printed and written to eval_<split>[_shuffled].json; touches nothing else of the run."""
    if not len(data):
        raise InputError(f"{args.data_root}: no rows in split {args.eval_split!r}; choose another --eval_split")
    name, notes = args.eval_split, {}
    if args.shuffle_questions:
        data.rows, changed = swap_questions(data.rows, identity)
        name, notes = f"{name}_shuffled", {"rows_with_another_question": sum(changed), "rows": len(changed)}
        print_main(f"{sum(changed)} of {len(changed)} rows ask another question about their picture")
    metrics = evaluate(model, data, args.eval_split, args, ranks)
    if ranks.is_main:
        print_metrics(name, metrics)
        folder = Path(args.checkpoint_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"eval_{name}.json").write_text(
            json.dumps({**metrics, **notes, "step": contents["step"]}, indent=2) + "\n"
        )
    return 0


def enough_memory(rows: list[Row], reader: Reader, limit_gb: float) -> bool:
    """Whether all decoded pictures and masks fit in --cache_gb."""
    picture = 3 * (reader.image_size**2 + reader.vlm_size**2)
    need = len({row.image for row in rows}) * picture + len({row.mask for row in rows}) * reader.image_size**2
    return need <= limit_gb * 2**30


def as_yaml(args: argparse.Namespace) -> str:
    import yaml

    return yaml.safe_dump(vars(args))


def main(args: argparse.Namespace) -> int:
    launch_workers(args.world_size or 1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with setup_distributed(timeout=args.dist_timeout) as ranks:
        return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
