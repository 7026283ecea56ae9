"""X-ray to CT: train a cascade of diffusion models to reconstruct a CT volume from a frontal and a lateral X-ray.

    python train_accelerate.py --config configs/single_view_config.json                # one GPU, or CPU
    accelerate launch --multi_gpu --num_processes=4 --mixed_precision=fp16 train_accelerate.py \\
        --config configs/multi_view_config.json --wandb
    torchrun --nproc_per_node=4 train_accelerate.py --config configs/multi_view_config.json --wandb
    bash train_4gpu.sh --config configs/multi_view_config.json --method accelerate --wandb
    python train_accelerate.py --make_drrs data/cts                                    # render the X-rays of your CTs
    python train_accelerate.py --eval_only --dataset_path other_hospital --split_files train.txt test.txt
    python train_accelerate.py --predict new_xrays                                     # write CT volumes as NIfTI

Data format: tasks/cascade/README.md. Without data, `make demo TASK=cascade` trains on synthetic patients.
"""

import copy
import hashlib
import json
import math
import re
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from utils.cli import (
    InputError,
    Parser,
    RunError,
    add_common_arguments,
    launch_workers,
    real,
    run_main,
    whole,
    with_flags,
)

FORMAT = "cascade/3"
ADVICE = "give the stage a smaller voxel_dim or token_grid, or --gradient_checkpointing"
MODEL_FLAGS = (
    "img_size", "num_views", "encoder_dim", "num_timesteps", "v_parameterization", "xray_agreement", "regression",
)  # fmt: skip
FLIPS = ("flip_drrs_vertical", "flip_drrs_horizontal")


@dataclass
class Stage:
    """Settings of one stage of the cascade.

    batch_size: patients per micro-batch on each GPU. effective_batch_size: patients per optimizer step across all GPUs.
    token_grid: maximum number of transformer tokens along each axis.
    """

    name: str
    volume_size: list[int]
    voxel_dim: int
    vit_depth: int
    num_heads: int
    physics_weight: float
    batch_size: int | None = None
    accumulation_steps: int | None = None
    num_epochs: int | None = None
    effective_batch_size: int | None = None
    token_grid: int = 16

    def check(self) -> None:
        if not re.fullmatch(r"(?!step_)[A-Za-z]\w*", str(self.name)):
            raise ArgumentTypeError(f"name {self.name!r} must be a word, which does not begin with step_")
        for item in fields(self):
            value = getattr(self, item.name)
            is_count = item.type in (int, int | None) and value is not None
            if is_count and (type(value) is not int or value < 1):
                raise ArgumentTypeError(f"{self.name}: {item.name} {value!r} must be a whole number of at least 1")
        if type(self.physics_weight) not in (int, float) or not 0 <= self.physics_weight < math.inf:
            raise ArgumentTypeError(f"{self.name}: physics_weight {self.physics_weight!r} must be a number from 0")
        size = self.volume_size
        if not isinstance(size, list) or len(size) != 3 or any(type(side) is not int or side < 8 for side in size):
            raise ArgumentTypeError(f"{self.name}: volume_size {size} must be three whole numbers from 8")
        step = 2**self.halvings
        if any(side % step for side in size):
            raise ArgumentTypeError(f"{self.name}: volume_size {size} must be three multiples of {step}")
        if self.voxel_dim % (2 * self.num_heads) or self.voxel_dim % 8:
            raise ArgumentTypeError(f"{self.name}: voxel_dim {self.voxel_dim} must be a multiple of 8 and 2 num_heads")

    @property
    def halvings(self) -> int:
        return max(1, math.ceil(math.log2(max(self.volume_size) / self.token_grid)))

    @property
    def best_names(self) -> tuple[str, str]:
        return f"{self.name}_best.pt", "best.pt"

    @property
    def eval_batch(self) -> int:
        """Batch size for evaluation, independent of the number of GPUs so that the results are, too."""
        return max(1, min(4, 2 * 128**3 // math.prod(self.volume_size)))


GUIDE = [
    Stage("stage1", [64] * 3, 256, 4, 4, 0.3, 16),
    Stage("stage2", [128] * 3, 384, 6, 6, 0.4, 8),
    Stage("stage3", [256] * 3, 512, 8, 8, 0.5, 2, 2),
]


def json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"must be JSON objects, one per stage, not {text[:60]!r}")
    return value


def choose_stages(args: Namespace, given: set[str], in_config: set[str]) -> list[dict]:
    """Fill in the settings that --stage_configs omits; return the stages as dicts.

    given, in_config: names of the flags set on the command line and in the config file. Raises ArgumentTypeError for an
    invalid stage.

    Precedence with --stage_configs, highest first: command line, the stage's JSON object, config file, flag default,
    the published guide's stage. Without --stage_configs: command line, config file, the guide's stage, flag default.
    """
    guide = [asdict(stage) for stage in GUIDE]
    entries, first = args.stage_configs, given
    if not entries:
        entries, first = guide, given | in_config
    names = ("batch_size", "gradient_accumulation_steps", "num_epochs", "effective_batch_size", "physics_weight")
    keys = {name: name.removeprefix("gradient_") for name in names}
    flags = {key: getattr(args, name) for name, key in keys.items()}
    overrides = {key: flags[key] for name, key in keys.items() if name in first}
    stages = []
    for k, entry in enumerate(entries):
        for key in entry.keys() - guide[0].keys():
            near = get_close_matches(key, guide[0], n=1)
            hint = f", did you mean {near[0]!r}" if near else ""
            raise ArgumentTypeError(f"stage {k + 1}: unknown key {key!r}{hint}")
        values = guide[min(k, 2)] | {"name": f"stage{k + 1}"}
        for layer in (flags, entry, overrides):
            values |= {key: value for key, value in layer.items() if value is not None}
        stages.append(Stage(**values))
        stages[k].check()
    if any(max(a.volume_size) > max(b.volume_size) for a, b in pairwise(stages)):
        raise ArgumentTypeError("a stage's volume_size may not be smaller than that of the stage before")
    if len({stage.name for stage in stages}) < len(stages):
        raise ArgumentTypeError("each stage needs a name of its own")
    return [asdict(stage) for stage in stages]


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__, sections=("xray_config", "training", "data"))
    advanced = parser.advanced.add_argument
    yes_no = BooleanOptionalAction

    add = parser.add_argument_group("data").add_argument
    add("--dataset_path", default="./data/drr_patient_data", metavar="DIR", help="folder with a sub-folder per patient")
    add("--split_seed", type=whole(0), default=42, help="seed of the 80/10/10 split by patient")
    add(
        "--split_files",
        nargs="+",
        metavar="FILE",
        help="id lists: TRAIN VAL TEST, or TRAIN TEST (a tenth of TRAIN validates)",
    )
    advanced("--flip_drrs_vertical", action=yes_no, help="X-rays show the head at the top; --no-...: the feet")
    advanced("--flip_drrs_horizontal", choices=("none", "pa", "lat", "both"), help="views that are stored mirrored")
    advanced(
        "--skip_alignment_check", action="store_true", help="do not compare X-rays with their CT's projection first"
    )
    add("--augmentation", action=yes_no, default=True, help="move training patients up or down by 5%%, vary exposure")
    add("--cache_dir", default="runs/cache/cascade", help="folder of decoded patients, 38 MB each; may be deleted")
    advanced("--cache_in_memory", action="store_true", help="also keep patients in EACH process: 35 MB each at 256^3")
    add("--make_drrs", metavar="DIR", help="no training: render the missing X-rays of every CT below DIR")

    add = parser.add_argument_group("model").add_argument
    add("--img_size", type=whole(32), default=512, help="side of the X-rays in pixels; lower it if out of memory")
    add("--num_views", type=int, choices=(1, 2), default=2, help="1: frontal; 2: frontal and lateral")
    advanced("--encoder_dim", type=whole(16), default=512, help="channels of the X-ray encoder; fewer take less memory")
    text = "one JSON object per stage; default: the guide's stages of 64^3, 128^3 and 256^3"
    add("--stage_configs", type=json_object, nargs="+", metavar="JSON", help=text)
    advanced("--num_timesteps", type=whole(10), default=1000, help="diffusion timesteps during training")
    advanced(
        "--v_parameterization", action=yes_no, default=True, help="predict v (Salimans & Ho 2022); --no-...: noise"
    )
    advanced(
        "--xray_agreement",
        action=yes_no,
        default=True,
        help="correct volumes to agree with the X-rays, during training and sampling",
    )
    add("--regression", action="store_true", help="no diffusion: train only the one-step answer")
    add(
        "--gradient_checkpointing",
        action=yes_no,
        default=False,
        help="activation checkpointing: less memory, a third slower",
    )

    add = parser.add_argument_group("optimizer and schedule").add_argument
    text = "plateau: halve after more than 5 evaluations without a lower val/loss; cosine: decay to 0 in each stage"
    add(
        "--lr_schedule",
        "--scheduler",
        dest="scheduler",
        choices=("plateau", "cosine", "constant"),
        default="plateau",
        help=text,
    )
    add("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up in each stage")
    advanced("--weight_decay", type=real(0), default=0.01, help="weight decay of AdamW")
    advanced("--ema_decay", type=real(0, 1), default=0.9999, help="decay of the EMA weights for evaluation; 0: no EMA")
    advanced("--physics_weight", type=real(0), help="weight of the projection loss; default: per stage (.3, .4, .5)")

    add = parser.add_argument_group("evaluation and prediction").add_argument
    add("--ddim_steps", type=whole(1), default=50, help="denoising steps per stage; must divide --num_timesteps")
    add("--num_samples", type=whole(1), default=1, help="samples per test patient; 2 or more also give intervals")
    add("--rival_run", metavar="DIR", help="add another run on the same patients to the test's table")
    add("--predict", metavar="DIR", help="no training: write CT volumes (NIfTI, HU) for the X-rays in DIR")

    defaults = {"output_dir": "checkpoints_4gpu", "num_epochs": 100, "learning_rate": 1e-4, "batch_size": 8}
    add_common_arguments(parser, **defaults)
    text = "synonym of --num_epochs; a stage may set its own"
    advanced("--num_epochs_per_stage", dest="num_epochs", type=whole(1), help=text)
    text = "synonym of --gradient_accumulation_steps"
    advanced("--accumulation_steps", dest="gradient_accumulation_steps", type=whole(1), help=text)
    args = parser.parse(argv)
    if args.encoder_dim % 16 or args.img_size % 8:
        parser.error("--encoder_dim must be a multiple of 16, and --img_size of 8")
    if args.split_files and len(args.split_files) not in (2, 3):
        parser.error("--split_files: give TRAIN VAL TEST, or TRAIN TEST")
    try:
        in_config = parser.given(parser.config_words(args.config)) if args.config else set()
        args.stage_configs = choose_stages(args, parser.given(argv), in_config)
    except ArgumentTypeError as error:
        parser.error(f"--stage_configs: {error}")
    # for tools that run a single training step: use the settings of the last stage
    args.batch_size, args.gradient_accumulation_steps, args.effective_batch_size = (
        args.stage_configs[-1][name] for name in ("batch_size", "accumulation_steps", "effective_batch_size")
    )
    return args


if __name__ == "__main__":
    # parse before importing torch, so that --help and flag errors appear immediately
    ARGS = parse_args()
    launch_workers(ARGS.world_size)


import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader, Subset

import distributed_utils as du
from hardware_utils import GroupNorm, autocast, check_accelerate, set_precision
from tasks.cascade import report
from tasks.cascade.data import PRIOR_SIDE, Data, XrayCtDataset, find_patients, load_xrays, make_drrs
from tasks.cascade.geometry import (
    HU_PER_UNIT,
    PRIOR_RANK,
    VIEWS,
    Grey,
    Prior,
    RaySums,
    back_projection,
    lift,
    make_consistent,
    normalise,
    project,
    ray_sums,
    rays_of,
    resize,
)
from utils import checkpoint
from utils.engine import Engine, make_engine
from utils.loop import BatchPlan, Plan, Run, Training

# --- model ------------------------------------------------------------------------------------------------------------


def norm(channels: int) -> GroupNorm:
    return GroupNorm(math.gcd(channels, max(1, min(8, channels // 4))), channels)


def zeroed(layer: nn.Module) -> nn.Module:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def sinusoid(values: Tensor, dim: int) -> Tensor:
    """Return sinusoidal embeddings (B, dim) of 1000 * values (Vaswani et al. 2017). values: (B,) in [0, 1]."""
    frequencies = torch.exp(torch.arange(dim // 2, device=values.device) * (-math.log(10000.0) / (dim // 2)))
    angles = 1000.0 * values.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1)


def tokens_of(grid: Tensor) -> Tensor:
    return grid.flatten(2).transpose(1, 2)


def fold(x: Tensor) -> Tensor:
    """Move the voxels of each 2 x 2 x 2 cell to channels: (B, C, X, Y, Z) -> (B, 8 C, X/2, Y/2, Z/2)."""
    b, c, *size = x.shape
    cells = x.reshape(b, c, *(part for side in size for part in (side // 2, 2)))
    return cells.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)


def unfold(x: Tensor) -> Tensor:
    """Invert fold(): (B, 8, X, Y, Z) -> (B, 1, 2 X, 2 Y, 2 Z)."""
    b, _, *size = x.shape
    cells = x.reshape(b, 1, 2, 2, 2, *size).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return cells.reshape(b, 1, *(2 * side for side in size))


class XrayEncoder(nn.Module):
    """Convolutional X-ray encoder: (B, views, H, W) -> (B, views, dim, H/8, W/8)."""

    def __init__(self, views: int, dim: int):
        super().__init__()
        layers = []
        for before, channels in pairwise((1, dim // 8, dim // 4, dim)):
            layers += [nn.Conv2d(before, channels, 3, 2, 1), norm(channels), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(dim, dim, 3, 1, 1), norm(dim), nn.SiLU())
        self.view = nn.Parameter(0.02 * torch.randn(views, dim))

    def forward(self, xrays: Tensor) -> Tensor:
        images = xrays.flatten(0, 1)[:, None].contiguous(memory_format=torch.channels_last)
        return self.layers(images).unflatten(0, xrays.shape[:2]) + self.view[:, :, None, None]


class Block(nn.Module):
    """Transformer block: self-attention, cross-attention to X-ray tokens, MLP; AdaLN-Zero (Peebles & Xie 2023)."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim, elementwise_affine=False) for _ in range(3))
        self.modulation = zeroed(nn.Linear(dim, 9 * dim))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q, self.kv, self.cross_out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))

    def attention(self, *parts: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, xray_tokens: Tensor, condition: Tensor) -> Tensor:
        modulation = self.modulation(F.silu(condition))[:, None].chunk(9, -1)
        shifts, scales, gates = modulation[0::3], modulation[1::3], modulation[2::3]

        def adapted(part: int) -> Tensor:
            return self.norms[part](x) * (1 + scales[part]) + shifts[part]

        x = x + gates[0] * self.out(self.attention(*self.qkv(adapted(0)).chunk(3, -1)))
        x = x + gates[1] * self.cross_out(self.attention(self.q(adapted(1)), *self.kv(xray_tokens).chunk(2, -1)))
        return x + gates[2] * self.mlp(adapted(2))


class ConvBlock(nn.Module):
    def __init__(self, channels: int, condition: int):
        super().__init__()
        self.norm1, self.conv1 = norm(channels), nn.Conv3d(channels, channels, 3, 1, 1)
        self.norm2, self.conv2 = norm(channels), zeroed(nn.Conv3d(channels, channels, 3, 1, 1))
        self.modulation = nn.Linear(condition, 2 * channels)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(F.silu(condition))[:, :, None, None, None].chunk(2, 1)
        hidden = self.norm2(self.conv1(F.silu(self.norm1(x)))) * (1 + scale) + shift
        return x + self.conv2(F.silu(hidden))


class StageInput(NamedTuple):
    """Inputs of a stage's network.

    start: (B, 1, X, Y, Z), the volume that this stage refines. linear: (B, 1, X, Y, Z), the volume predicted by ridge
    regression (see Prior). level: (B,), standard deviation of the noise added to the previous stage's volume. rays: the
    X-rays as sums of voxel values along rays.
    """

    start: Tensor
    linear: Tensor
    level: Tensor
    rays: RaySums


class StageNet(nn.Module):
    """Network of one stage; predicts the diffusion velocity v (Salimans & Ho 2022).

    A convolutional U-Net surrounds the transformer, because its tokens are too coarse for voxel-level noise. The input
    is folded, because layers at full resolution would take most of the memory and time.
    """

    def __init__(self, stage: Stage, args: Namespace):
        super().__init__()
        self.size, dim = tuple(stage.volume_size), stage.voxel_dim
        self.checkpointing = args.gradient_checkpointing
        # channels at each resolution of the U-Net; in the default stages, multiples of 8 for tensor cores
        widths = [min(dim, max(16, dim // 16) * 2**k) for k in range(stage.halvings)]
        pairs = list(pairwise(widths))
        self.grid = tuple(side // 2**stage.halvings for side in self.size)
        self.encoder = XrayEncoder(args.num_views, args.encoder_dim)
        self.token_grid = min(16, args.img_size // 8)
        self.picture_position = nn.Parameter(0.02 * torch.randn(1, self.token_grid**2, dim))
        self.to_tokens = nn.Linear(args.encoder_dim, dim)
        self.time, self.noise = (nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim)) for _ in range(2))
        self.whole_picture = nn.Linear(dim, dim)

        self.stem = nn.Conv3d(8 * (3 + args.num_views), widths[0], 3, 1, 1)
        self.down_blocks = nn.ModuleList(ConvBlock(width, dim) for width in widths)
        self.shrink = nn.ModuleList(nn.Conv3d(wide, deep, 2, 2) for wide, deep in pairs)
        self.enter, self.leave = nn.Linear(widths[-1], dim), nn.Linear(dim, widths[-1])
        self.position = nn.Parameter(0.02 * torch.randn(1, math.prod(self.grid), dim))
        self.blocks = nn.ModuleList(Block(dim, stage.num_heads) for _ in range(stage.vit_depth))
        self.grow = nn.ModuleList(nn.ConvTranspose3d(deep, wide, 2, 2) for wide, deep in pairs)
        self.up_blocks = nn.ModuleList(ConvBlock(width, dim) for width in widths)
        self.last = nn.Sequential(norm(widths[0]), nn.SiLU(), zeroed(nn.Conv3d(widths[0], 8, 3, 1, 1)))
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                module.to(memory_format=torch.channels_last_3d)

    def checkpointed(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return recompute(module, *inputs, use_reentrant=False, preserve_rng_state=False)
        return module(*inputs)

    def forward(self, noisy: Tensor, time: Tensor, xrays: Tensor, given: StageInput) -> Tensor:
        """Predict the velocity v (B, 1, X, Y, Z) in fp32.

        noisy: (B, 1, X, Y, Z), the noisy residual to the start volume. time: (B,) in [0, 1]. xrays: (B, views, H, W).
        """
        views = range(xrays.shape[1])
        features = self.checkpointed(self.encoder, xrays)
        pooled = resize(features.flatten(0, 1), (self.token_grid,) * 2).to(features.dtype)
        tokens = self.to_tokens(tokens_of(pooled)) + self.picture_position
        tokens = tokens.unflatten(0, features.shape[:2]).flatten(1, 2)
        width = self.position.shape[-1]
        condition = self.time(sinusoid(time, width)) + self.noise(sinusoid(given.level, width))
        condition = condition + self.whole_picture(tokens.mean(1))

        volumes = [(volume - CT_MEAN) / CT_STD for volume in (given.start, given.linear)]
        x = torch.cat([noisy, *volumes, *(lift(xrays[:, view, None], view, self.size) for view in views)], 1)
        x = self.stem(fold(x).contiguous(memory_format=torch.channels_last_3d))
        skips = []
        for k, block in enumerate(self.down_blocks):
            x = self.checkpointed(block, self.shrink[k - 1](x) if k else x, condition)
            skips.append(x)

        lifted = sum(lift(features[:, view], view, self.grid) for view in views) / len(views)
        x = self.enter(tokens_of(x)) + self.to_tokens(tokens_of(lifted)) + self.position
        for block in self.blocks:
            x = self.checkpointed(block, x, tokens, condition)
        x = self.leave(x).transpose(1, 2).unflatten(2, self.grid)

        for k in reversed(range(len(self.up_blocks))):
            x = self.checkpointed(self.up_blocks[k], x + skips[k], condition)
            x = self.grow[k - 1](x) if k else x
        return unfold(self.last(x)).float()


# --- diffusion --------------------------------------------------------------------------------------------------------

# with v-prediction, fraction of training samples drawn at the noisiest timestep, to learn one-step prediction
LAST_SHARE = 0.5
# standard deviation of the noise added to the previous stage's volume: upper bound during training (drawn at random),
# fixed value during sampling
PREVIOUS_NOISE, PREVIOUS_NOISE_SAMPLING = 0.1, 0.02
# number of noise levels at which each validation patient is evaluated
LOSS_DRAWS = 4
CT_MEAN, CT_STD = -0.75, 0.25


def hashed_normal(shape: tuple, seeds: Tensor, stream: int | Tensor) -> Tensor:
    """Return Gaussian noise (B, *shape[1:]) that is the same on every device, up to rounding errors.

    seeds: (B,), integers. stream: int or (B,); different streams give independent noise.

    Uses splitmix64 (Steele et al. 2014) and the Box-Muller transform, because the output of torch's CUDA generator
    depends on the GPU model.
    """
    count = math.prod(shape[1:])
    # the hash relies on int64 overflow; the masks in _mix() make right shifts logical
    start = _mix(_mix(seeds) + stream)
    k = _mix(torch.arange((count + 1) // 2, device=seeds.device) * -7046029254386353131 + start[:, None])
    radius = (-2 * (((k & 0xFFFFFF).float() + 1) / 16777217).log()).sqrt()
    angle = (k >> 40 & 0xFFFFFF).float() * (2 * math.pi / 16777216)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count].reshape(-1, *shape[1:])


def _mix(k: Tensor) -> Tensor:
    k = (k ^ (k >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    k = (k ^ (k >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return k ^ (k >> 31 & 0x1FFFFFFFF)


class Cascade(nn.Module):
    """Networks of all stages up to the one being trained, with their diffusion process.

    net: the network being trained. averaged: the EMA copy of each stage's network.

    Each stage generates the residual (true volume - start volume) / std, where std is the root mean square error of the
    start volumes. The first stage starts from a ridge regression (Prior), each later stage from the previous stage's
    volume.

    With v-prediction, zeros replace the noisy residual at the noisiest timestep, so that the network learns to predict
    the mean of all volumes consistent with the X-rays.
    """

    def __init__(self, args: Namespace, device: torch.device, precision: str, prior: Prior, stds: list[float]):
        super().__init__()
        self.args, self.device, self.precision = args, device, precision
        self.stages = [Stage(**stage) for stage in args.stage_configs]
        self.greys, self.variance, self.stds = prior.greys, prior.variance, stds
        self.priors = [prior.to(device, stage.volume_size) for stage in self.stages]
        self.net: StageNet | None = None
        self.averaged = nn.ModuleList()
        # cosine noise schedule (Nichol & Dhariwal 2021, s = 0.008) as Python lists and as tensors
        angles = [(t / args.num_timesteps + 0.008) / 1.008 * math.pi / 2 for t in range(args.num_timesteps)]
        self.host_signal = [math.cos(angle) / math.cos(angles[0]) for angle in angles]
        self.host_noise = [math.sqrt(1 - signal**2) for signal in self.host_signal]
        self.signal, self.noise = (
            torch.tensor(values, device=device) for values in (self.host_signal, self.host_noise)
        )
        self.last = args.num_timesteps - 1

    def add_stage(self) -> None:
        """Add the next stage's network, with the same initial weights on every rank.

        The X-ray encoder starts from the EMA weights of the previous stage's encoder.
        """
        k = len(self.averaged)
        torch.manual_seed((self.args.seed * 1000003 + k) % 2**63)
        self.net = StageNet(self.stages[k], self.args).to(self.device)
        if k:
            self.net.encoder.load_state_dict(self.averaged[-1].encoder.state_dict())
        self.averaged.append(copy.deepcopy(self.net).requires_grad_(False))

    @torch.no_grad()
    def average(self, steps: int) -> None:
        """Update the EMA weights. steps: number of optimizer steps in this stage so far."""
        decay = min(self.args.ema_decay, (1 + steps) / (10 + steps))
        torch._foreach_lerp_(list(self.averaged[-1].parameters()), list(self.net.parameters()), 1 - decay)

    def forward(self, *inputs) -> Tensor:
        return self.net(*inputs)

    @property
    def current(self) -> int:
        return len(self.averaged) - 1

    def stage_input(
        self, k: int, batch: dict, level: Tensor, stream: int | Tensor, previous: Tensor | None = None
    ) -> StageInput:
        """Compute the StageInput of stage k.

        level: (B,), standard deviation of the noise to add to the previous stage's volume. stream: RNG stream for
        this noise, an int or (B,). previous: (B, 1, X, Y, Z), the previous stage's volume; if None, the previous stages
        run with one denoising step each.
        """
        size = self.stages[k].volume_size
        if k and previous is None:
            previous = self.sample(batch, k, one_step=True)[-1]
        with torch.autocast(self.device.type, enabled=False):
            linear = self.priors[k].volume(batch["xrays"], batch["extent"], batch["row"], size)
            rays = ray_sums(batch["xrays"], batch["extent"], self.greys, size)
            start, variance, level = linear, self.priors[k].error, level * (k > 0)
            if k:
                noise = hashed_normal(previous.shape, batch["seed"], stream)
                start = resize(previous + level[:, None, None, None, None] * noise, size)
                variance = self.stds[k - 1] ** 2
            if self.args.xray_agreement:
                start = make_consistent(start, rays, variance, corrections=4)
        return StageInput(start, linear, level, rays)

    def levels(self, timestep: Tensor) -> list[Tensor]:
        return [table[timestep][:, None, None, None, None] for table in (self.signal, self.noise)]

    def denoise(self, k: int, net: nn.Module, noisy: Tensor, timestep: Tensor, batch: dict, given: StageInput) -> tuple:
        """Denoise a residual; return the velocity v and the clean volume, both (B, 1, X, Y, Z) in fp32.

        noisy: (B, 1, X, Y, Z), the residual to the start volume, with noise. timestep: (B,).
        """
        if self.args.v_parameterization:
            noisy = noisy * (timestep != self.last)[:, None, None, None, None]
        with autocast(self.device, self.precision):
            v = net(noisy, (timestep + 1) / self.args.num_timesteps, batch["input_xrays"], given)
        signal, sigma = self.levels(timestep)
        return v, given.start + self.stds[k] * (signal * noisy - sigma * v)

    @torch.no_grad()
    def sample(
        self, batch: dict, stages: int | None = None, number: int | Tensor = 0, one_step: bool = False
    ) -> list[Tensor]:
        """Sample volumes by DDIM (Song et al. 2021); return a list with one tensor (B, 1, X, Y, Z) per stage.

        stages: number of stages to run; None runs all. number: index of the sample, an int or (B,). one_step: run one
        denoising step per stage. The noise depends only on `number`, the stage and the patient's seed.
        """
        volumes: list[Tensor] = []
        every = self.args.num_timesteps // self.args.ddim_steps
        times = list(range(self.last, -1, -every))[: 1 if one_step or self.args.regression else None]
        level = torch.full_like(batch["seed"], PREVIOUS_NOISE_SAMPLING, dtype=torch.float32)
        for k, net in enumerate(self.averaged[:stages]):
            stream = 1000 + 2 * (k + len(self.stages) * number)
            given = self.stage_input(k, batch, level, stream, volumes[-1] if volumes else None)
            noisy = torch.zeros_like(given.start)
            if len(times) > 1:
                noisy = hashed_normal(noisy.shape, batch["seed"], stream + 1)
            for t in times:
                final = t == times[-1]
                _, clean = self.denoise(k, net, noisy, torch.full_like(batch["seed"], t), batch, given)
                clean = clean.clamp(-1, 1)
                if self.args.xray_agreement:
                    # weaken the X-ray correction as the noise decreases, but apply it fully to the final volume
                    variance = (1 if final else self.host_noise[t]) * self.stds[k] ** 2
                    clean = make_consistent(clean, given.rays, variance, corrections=4 if final else 2)
                if not final:
                    residual = (clean - given.start) / self.stds[k]
                    noise = (noisy - self.host_signal[t] * residual) / self.host_noise[t]
                    noisy = self.host_signal[t - every] * residual + self.host_noise[t - every] * noise
            volumes.append(clean)
        return volumes


# --- loss -------------------------------------------------------------------------------------------------------------


def projection_error(volume: Tensor, batch: dict, greys: list[Grey]) -> Tensor:
    """Return the mean squared error (B, views) between a volume's projections and the X-rays, in grey values.

    volume: (B, 1, X, Y, Z) in [-1, 1].
    """
    errors = []
    for view, grey in enumerate(greys):
        image = grey.slope * project(volume, batch["extent"], view) + grey.offset
        errors.append((image - resize(batch["xrays"][:, view : view + 1], image.shape[-2:])).square().mean((1, 2, 3)))
    return torch.stack(errors, 1)


def volume_of(batch: dict) -> Tensor:
    return normalise(batch["volume"].float())[:, None]


def patient_losses(cascade: Cascade, net: nn.Module, batch: dict, draw: Tensor | None = None) -> tuple:
    """Return each patient's diffusion loss and physics loss for the stage being trained, both (B,) in fp32.

    The physics loss is the projection error of the predicted volume. It is weighted by alpha_bar(t), because the
    prediction is unreliable at high noise levels. draw: (B,), which of the LOSS_DRAWS validation noise levels to use;
    None during training, where timesteps are random.
    """
    args, k, last = cascade.args, cascade.current, cascade.last
    if draw is None:
        blind, fraction, level = batch["draws"].T
        timestep, level = (fraction * (last + 1)).long(), (level * PREVIOUS_NOISE).float()
        if args.v_parameterization:
            timestep = timestep.where(blind >= LAST_SHARE, last)
    else:
        fraction = (draw + batch["index"] * 0.618034 % 1) / (LOSS_DRAWS - 1)
        timestep = (fraction * (last + 1)).long().clamp(max=last)
        level = torch.full_like(fraction, PREVIOUS_NOISE_SAMPLING, dtype=torch.float32)
    if args.regression:
        timestep = torch.full_like(timestep, last)

    stream = 0 if draw is None else 10 * draw
    given = cascade.stage_input(k, batch, level, stream)
    noise = hashed_normal(given.start.shape, batch["seed"], stream + 1)
    signal, sigma = cascade.levels(timestep)
    residual = (volume_of(batch) - given.start) / cascade.stds[k]
    v, clean = cascade.denoise(k, net, signal * residual + sigma * noise, timestep, batch, given)
    if args.v_parameterization:
        # zeros replace the noisy residual at the noisiest timestep, so the target must not contain noise
        noise = noise * (timestep != last)[:, None, None, None, None]
    square = (v - (signal * noise - sigma * residual)).square().mean((1, 2, 3, 4))
    alpha_bar = signal.flatten().square()
    # for noise prediction, convert the squared error of v to the squared error of the noise
    diffusion = square if args.v_parameterization else alpha_bar * square
    return diffusion, alpha_bar * projection_error(clean, batch, cascade.greys).mean(1)


# --- evaluation -------------------------------------------------------------------------------------------------------

TISSUES = {"lung": (-950, -500), "soft": (-200, 200), "bone": (200, 3000)}


def eval_batches(run: Run, dataset: XrayCtDataset | Subset, cascade: Cascade) -> Iterator[dict]:
    """Yield this rank's batches for evaluation. Call on all ranks."""
    args, size = cascade.args, cascade.stages[cascade.current].eval_batch
    workers = 0 if args.cache_in_memory else args.num_workers
    return run.batches(du.create_distributed_dataloader(dataset, size, train=False, num_workers=workers))


def repeated(batch: dict, times: int) -> Iterator[tuple[dict, Tensor]]:
    """Yield `times` copies of a batch, two copies at a time, with the copy number (0 to times - 1) of each row.

    Values that are not tensors are dropped. On a CPU, two copies at a time are faster than one.
    """
    size = len(batch["seed"])
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    for numbers in torch.arange(times, device=batch["seed"].device).split(2):
        repetitions = {name: torch.cat([value] * len(numbers)) for name, value in tensors.items()}
        yield repetitions, numbers.repeat_interleave(size)


def draw_samples(cascade: Cascade, batch: dict) -> Tensor:
    count = cascade.args.num_samples
    parts = [cascade.sample(part, number=number)[-1] for part, number in repeated(batch, count)]
    return torch.cat(parts).unflatten(0, (count, -1))


@torch.no_grad()
def evaluate(cascade: Cascade, dataset: XrayCtDataset, run: Run) -> dict[str, float]:
    """All ranks: return the validation losses of the stage being trained, with EMA weights.

    Raises RunError if the loss is not finite.
    """
    table = torch.zeros(len(dataset), 2, dtype=torch.float64)
    for batch in eval_batches(run, dataset, cascade):
        parts = repeated(batch, LOSS_DRAWS)
        losses = [torch.stack(patient_losses(cascade, cascade.averaged[-1], *part), 1) for part in parts]
        losses = torch.cat(losses).unflatten(0, (LOSS_DRAWS, -1))
        table[batch["index"].cpu()] = losses.double().mean(0).cpu()
    diffusion, physics = du.reduce_sum(table).mean(0).tolist()
    loss = diffusion + cascade.stages[cascade.current].physics_weight * physics
    if not math.isfinite(loss):
        raise RunError("the validation loss is not finite; lower --learning_rate")
    return {"val/loss": loss, "val/diffusion_loss": diffusion, "val/physics_loss": physics}


@torch.no_grad()
def start_error(cascade: Cascade, dataset: XrayCtDataset, run: Run) -> float:
    """All ranks: measure the root mean square error of the current stage's start volumes on up to 64 training patients.

    Returns at least 0.005, in volume units (-1..1).
    """
    few = Subset(dataset, range(min(64, len(dataset))))
    total = torch.zeros(1, dtype=torch.float64)
    for batch in eval_batches(run, few, cascade):
        level = (batch["draws"][:, 2] * PREVIOUS_NOISE).float()
        start = cascade.stage_input(cascade.current, batch, level, 0).start
        total += du.round_for_exact_sum((start - volume_of(batch)).square().mean((1, 2, 3, 4))).sum().cpu()
    return max(0.005, math.sqrt(float(du.reduce_sum(total)) / len(few)))


def scores(volume: Tensor, batch: dict, greys: list[Grey]) -> dict[str, Tensor]:
    from monai.metrics import PSNRMetric, SSIMMetric

    true = volume_of(batch)
    ssim = SSIMMetric(spatial_dims=3, data_range=2.0, kernel_type="uniform", win_size=7)
    found = {"psnr": PSNRMetric(max_val=2.0)(volume, true)[:, 0], "ssim": ssim(volume, true)[:, 0]}
    hu = (volume - true).abs() * HU_PER_UNIT
    found["mae_hu"] = hu.mean((1, 2, 3, 4))
    for name, (low, high) in TISSUES.items():
        inside = (batch["volume"][:, None] >= low) & (batch["volume"][:, None] < high)
        # NaN if the patient has no voxels of this tissue
        found[f"{name}_hu"] = (hu * inside).sum((1, 2, 3, 4)) / inside.sum((1, 2, 3, 4))
    for name, error, grey in zip(VIEWS, projection_error(volume, batch, greys).T, greys, strict=False):
        # convert the error from grey values to line integrals
        found[f"rays_{name}"] = error.sqrt() / abs(grey.slope)
    return found


def z_scores(samples: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Return the absolute z-score of each voxel and a mask of the voxels in the body, both (B, 1, X, Y, Z).

    samples: (K, B, 1, X, Y, Z), K volumes per patient. true: (B, 1, X, Y, Z). The standard deviation is multiplied by
    sqrt(1 + 1/K) to account for the uncertainty of the sample mean.
    """
    deviation = math.sqrt(1 + 1 / len(samples)) * samples.std(0)
    return (samples.mean(0) - true).abs() / deviation.clamp(min=1e-6), true > normalise(torch.tensor(-900.0))


@torch.no_grad()
def interval_factor(cascade: Cascade, dataset: XrayCtDataset, run: Run) -> float:
    """All ranks: return the k for which mean +- k standard deviations contains the truth in 90 % of body voxels.

    The standard deviations are those of z_scores().
    """
    # histogram of z-scores in bins of 0.01, because integer counts are summed exactly across ranks
    counts = torch.zeros(10_000, dtype=torch.int64)
    for batch in eval_batches(run, dataset, cascade):
        z, body = z_scores(draw_samples(cascade, batch), volume_of(batch))
        counts += torch.bincount((z[body] * 100).clamp(max=9999).long().cpu(), minlength=10_000)
    counts = du.reduce_sum(counts)
    shares = counts.cumsum(0) / counts.sum()
    return (1 + int(torch.searchsorted(shares, 0.9))) / 100


@torch.no_grad()
def reconstruct(cascade: Cascade, batch: dict, data: Data, prior_rays: Tensor) -> tuple[dict, Tensor | None]:
    """Reconstruct the CTs of a batch with the cascade and with baselines that need no trained network.

    prior_rays: (N, P), mean voxel values along the rays of N training patients. Returns (volumes, samples). volumes:
    {row label of the test table: (B, 1, X, Y, Z)}. samples: (K, B, 1, X, Y, Z), or None with --regression. Raises
    InputError if a training patient's CT cannot be read.
    """
    args, prior, samples = cascade.args, cascade.priors[cascade.current], None
    size = cascade.stages[cascade.current].volume_size
    *earlier, answer = cascade.sample(batch, one_step=True)
    rows = {"regression" if args.regression else "one step": answer}
    if not args.regression:
        samples = draw_samples(cascade, batch)
        rows["one sample"] = samples[0]
        if args.num_samples > 1:
            rows["mean of samples"] = samples.mean(0)
    for stage, volume in zip(cascade.stages, earlier, strict=False):
        rows[f"{stage.name} alone"] = resize(volume, size)
    other = batch | {"xrays": batch["other"], "input_xrays": batch["other"]}
    rows["another patient's X-rays"] = cascade.sample(other, one_step=True)[-1]

    xrays = batch["xrays"], batch["extent"], cascade.greys
    linear = prior.volume(*xrays[:2], batch["row"], size)
    baselines = {
        "linear posterior": linear,
        "mean volume": resize(prior.mean, size).expand_as(linear),
        "back-projection": back_projection(*xrays, size),
    }
    sums = ray_sums(*xrays, size)
    for name, volume in baselines.items():
        rows[name] = volume
        rows[f"{name}, consistent"] = make_consistent(volume, sums, cascade.variance, corrections=30)
    nearest = torch.cdist(rays_of(*xrays, prior.grid), prior_rays).argmin(1).tolist()
    nearest = np.stack([data.volume(data.prior_patients[index], size) for index in nearest])
    rows["nearest patient"] = normalise(torch.from_numpy(nearest).float())[:, None].to(cascade.device)
    return rows, samples


@torch.no_grad()
def test(cascade: Cascade, data: Data, run: Run) -> dict[str, float]:
    """All ranks: evaluate the test patients, print the table, draw the figure; return {metric: value}.

    Raises InputError if a patient's files cannot be used.
    """
    args, size = cascade.args, cascade.stages[cascade.current].volume_size
    metrics, results, example, error = {}, {}, None, None
    if args.num_samples > 1:
        factor = interval_factor(cascade, XrayCtDataset(data, "val", size), run)
        metrics["test/interval_factor"] = factor
    with du.agree_on_errors():
        prior_rays = data.prior_rays(cascade.greys).to(cascade.device)
    for batch in eval_batches(run, XrayCtDataset(data, "test", size), cascade):
        try:
            rows, samples = reconstruct(cascade, batch, data, prior_rays)
        except InputError as reason:
            # raise the error after the loop: if this rank left the loop early, the other ranks would wait for it
            error = error or reason
            continue
        found = {row: scores(volume, batch, cascade.greys) for row, volume in rows.items()}
        if args.num_samples > 1:
            z, body = z_scores(samples, volume_of(batch))
            inside = ((z <= factor) & body).sum((1, 2, 3, 4)) / body.sum((1, 2, 3, 4)).clamp(min=1)
            found["one sample"]["coverage_90"] = inside
        for i, index in enumerate(batch["index"].tolist()):
            results[index] = {
                row: {column: float(values[i]) for column, values in columns.items()} for row, columns in found.items()
            }
            if index == 0:
                example = report.draw(rows, batch, volume_of(batch), cascade.greys)
    with du.agree_on_errors():
        if error:
            raise error
    patients = {index: values for part in du.gather_objects(results) for index, values in part.items()}
    table = {
        row: {column: np.array([patients[index][row][column] for index in sorted(patients)]) for column in columns}
        for row, columns in patients[0].items()
    }
    run.figure("eval_test" if args.eval_only else "test", example)
    return metrics | report.print_test(table, "x".join(map(str, size)), args.rival_run, data.digest)


# --- prediction -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def predict(cascade: Cascade, run: Run, extent: list[float]) -> None:
    """All ranks: reconstruct the CTs of the patients in the --predict folder; write NIfTI files in HU to predictions/.

    extent: (3,), field of view in mm to assume for the CTs: the mean over the training patients.
    """
    args, out = cascade.args, run.folder / "predictions"
    checkpoint.make_folder(out)
    with du.agree_on_errors():
        patients = find_patients(Path(args.predict), args.num_views, need_ct=False)
        rank, world_size = du.world()
        for patient in patients[rank::world_size]:
            xrays = load_xrays(patient, args)[None]
            seed = int.from_bytes(hashlib.sha256(f"{args.seed} {patient.id}".encode()).digest()[:7])
            batch = {"xrays": xrays, "input_xrays": xrays, "extent": torch.tensor([extent])}
            batch |= {"row": torch.tensor([-1]), "seed": torch.tensor([seed])}
            batch = du.to_device(batch, cascade.device)
            answers = {"": cascade.sample(batch, one_step=True)[-1][0, 0]}
            if not args.regression:
                samples = draw_samples(cascade, batch)
                answers["_sample"] = samples[0, 0, 0]
                if args.num_samples > 1:
                    answers["_std"] = samples.std(0)[0, 0]
            for ending, volume in answers.items():
                path = out / f"{patient.id}{ending}.nii.gz"
                report.write_volume(path, volume, extent, is_difference=ending == "_std")
    size = " x ".join(map(str, cascade.stages[cascade.current].volume_size))
    du.print_main(f"volumes of {len(patients)} patient{'s' * (len(patients) > 1)}, {size} voxels each, in {out}")


# --- training run -----------------------------------------------------------------------------------------------------


def make_optimizer(cascade: Cascade, args: Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(cascade.net.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True)


def build_model(args: Namespace, precision: str, device: torch.device) -> Cascade:
    grid = [min(PRIOR_SIDE, side) for side in args.stage_configs[-1]["volume_size"]]
    rays = sum((grid[0], grid[1])[: args.num_views]) * grid[2]
    # shapes of the Prior tensors mean, basis, centre and gain
    shapes = (1, 1, *grid), (PRIOR_RANK, *grid), (rays,), (PRIOR_RANK, rays)
    greys = [Grey(0.2, -1.0, 0.02)] * args.num_views
    prior = Prior(grid, greys, 1.0, 0.01, 0.01, *map(torch.ones, shapes))
    cascade = Cascade(args, device, precision, prior, [0.1] * len(args.stage_configs))
    for _ in args.stage_configs:
        cascade.add_stage()
    return cascade


def largest_batch(cascade: Cascade, size: int) -> dict:
    args, row = cascade.args, torch.zeros(size, dtype=torch.long)
    xrays = torch.linspace(-1, 1, args.img_size).expand(size, args.num_views, args.img_size, -1)
    volume = torch.zeros(size, *cascade.net.size, dtype=torch.int16)
    patients = {"volume": volume, "xrays": xrays, "input_xrays": xrays, "extent": torch.full((size, 3), 300.0)}
    return patients | {"row": row - 1, "seed": row, "draws": torch.full((size, 3), 0.7, dtype=torch.float64)}


def trial_step(cascade: Cascade, batch: dict, args: Namespace) -> None:
    losses = patient_losses(cascade, cascade.net, du.to_device(batch, cascade.device))
    sum(losses).mean().backward()


# initial state of --lr_schedule plateau; waiting: number of consecutive evaluations without a lower val/loss
PLATEAU = {"factor": 1.0, "best": math.inf, "waiting": 0}


def update_plateau(plateau: dict, loss: float) -> None:
    plateau["waiting"] += 1
    if loss < plateau["best"] * (1 - 1e-4):
        plateau["waiting"] = 0
    plateau["best"] = min(plateau["best"], loss)
    if plateau["waiting"] > 5:
        plateau["factor"], plateau["waiting"] = plateau["factor"] / 2, 0


def begin_stage(cascade: Cascade, data: Data, run: Run) -> tuple[Engine, BatchPlan, DataLoader]:
    """All ranks: add the next stage to the cascade; return its training engine, batch plan and data loader."""
    cascade.add_stage()
    args, stage = cascade.args, cascade.stages[cascade.current]
    dataset = XrayCtDataset(data, "train", stage.volume_size)
    if cascade.current == len(cascade.stds):
        cascade.stds.append(start_error(cascade, dataset, run))

    def try_once(size: int) -> None:
        trial_step(cascade, largest_batch(cascade, size), args)

    batch = run.plan_batches(cascade, try_once, stage.batch_size, stage.effective_batch_size)
    options = {"seed": args.seed, "num_workers": 0 if args.cache_in_memory else args.num_workers}
    loader = du.create_distributed_dataloader(
        dataset, batch.micro_batch_size, True, batch.global_batch_size, batch.gpu_shares, **options
    )
    # pass an empty `frozen`: checkpoints would otherwise omit the EMA weights, because they need no gradients
    options = {"saved": run.checkpoint, "frozen": set()}
    optimizer = make_optimizer(cascade, args)
    engine = make_engine(cascade, optimizer, cascade.precision, args, cascade.device, **options)
    return engine, batch, loader


def train(run: Run, args: Namespace, precision: str, described: str) -> int:
    """Train all stages in order, then test. Return 0, or the exit code for a stop signal.

    Steps and epochs are numbered consecutively across stages.
    """
    saved = run.checkpoint or {"stage": 0, "plateau": PLATEAU}
    first, last_epochs = saved["stage"], [*accumulate(stage["num_epochs"] for stage in args.stage_configs)]
    if run.position.epoch > last_epochs[first]:
        raise InputError("--num_epochs: the stage has had more epochs than that; give more")
    data = Data(args, [stage["volume_size"] for stage in args.stage_configs])
    if args.rival_run:
        with du.agree_on_errors():
            report.read_rival(Path(args.rival_run), data.digest, [])
    # refit the Prior when resuming, because checkpoints omit data of individual patients
    prior = data.learn_prior()
    cascade = Cascade(args, run.ranks.device, precision, prior, saved.get("stds", [math.sqrt(prior.error)]))
    stages, plateau = cascade.stages, dict(saved["plateau"])
    del saved
    for _ in range(first):
        cascade.add_stage()

    count = len(data.split["train"])
    steps = [stage.num_epochs * math.ceil(count / stage.effective_batch_size) for stage in stages]
    begins = [0, *accumulate(steps)]
    engine, batch, loader = begin_stage(cascade, data, run)
    prediction = "regression" if args.regression else "v" if args.v_parameterization else "noise"
    banner = {
        "precision": described,
        "stages": "; ".join(
            f"{stage.name} {'x'.join(map(str, stage.volume_size))}, {total} steps of {stage.effective_batch_size}"
            for stage, total in zip(stages, steps, strict=True)
        ),
        "diffusion": f"{prediction}, {args.num_timesteps} steps, DDIM {args.ddim_steps}, EMA {args.ema_decay:g}",
        "X-rays": "; ".join(f"{g.slope:.3f} * line integral {g.offset:+.3f}, noise {g.noise:.3f}" for g in prior.greys),
        "prior": f"linear posterior of {len(prior.kernel)} patients, penalty {prior.penalty:g}",
    }
    invariants = {"training patients": f"{count}, digest {data.digest}"}
    plan = Plan(batch, begins[-1], ["loss", "diffusion_loss", "physics_loss"], invariants, banner)

    def state() -> dict:
        return {
            "prior": prior.state(), "stds": cascade.stds, "stage": k, "stages": args.stage_configs,
            "plateau": plateau, "extent": data.extent, "flips": [getattr(args, name) for name in FLIPS],
            "trained_patients": [*data.ids["train"], *data.ids["val"]],
        }  # fmt: skip

    with Training(run, args, engine, plan, state, stages[first].best_names) as training:
        for k in range(first, len(stages)):
            if k > first:
                engine, batch, loader = begin_stage(cascade, data, run)
                training.start_stage(engine, batch, stages[k].best_names)
                plateau = dict(PLATEAU)
            val = XrayCtDataset(data, "val", stages[k].volume_size)
            while run.position.epoch < last_epochs[k] and not training.is_over():
                cascade.net.train()
                for step in training.steps(loader):
                    for micro_batch in step.micro_batches():
                        parts = patient_losses(cascade, engine.wrapped, micro_batch)
                        diffusion, physics = (part.sum() / step.samples for part in parts)
                        step.backward(diffusion + stages[k].physics_weight * physics, diffusion, physics)
                    done = run.position.step - begins[k]
                    kind = "constant" if args.scheduler == "plateau" else args.scheduler
                    factor = plateau["factor"] * du.schedule(done, steps[k], args.warmup_steps, kind)
                    step.update(args.learning_rate * factor)
                    cascade.average(done + 1)
                if training.stopped:
                    return training.save_and_stop()
                metrics = evaluate(cascade, val, run)
                # skip evaluations triggered only by --max_steps: an uninterrupted run would not evaluate here
                if training.epoch_over or training.evaluation_due:
                    update_plateau(plateau, metrics["val/loss"])
                training.record(metrics, headline="val/loss", lower=True)
            if run.position.epoch >= last_epochs[k]:
                training.load_best()
            if training.is_over():
                break
        results = test(cascade, data, run)
        # export only the EMA weights
        cascade.net = None
        training.finish(results)
    return 0


def stages_of_run(args: Namespace, saved: dict | None, world_size: int) -> list[dict]:
    """Return the settings of all stages: from the flags for a new run, otherwise from the checkpoint `saved`.

    In a resumed run, --num_epochs and --physics_weight still apply to unfinished stages. Raises InputError if
    --effective_batch_size contradicts the checkpoint.
    """
    stages = []
    if saved is None:
        # fix the global batch size, because the run may resume on a different number of GPUs
        for stage in args.stage_configs:
            size = stage["batch_size"] * stage["accumulation_steps"] * world_size
            stages.append(stage | {"effective_batch_size": stage["effective_batch_size"] or size})
        return stages
    flags = {stage["name"]: stage for stage in args.stage_configs}
    differs = list(flags) != [stage["name"] for stage in saved["stages"]]
    for k, stage in enumerate(saved["stages"]):
        wanted = flags.get(stage["name"], stage)
        size, given = stage["effective_batch_size"], wanted["effective_batch_size"]
        if given not in (None, size) and not args.eval_only and not args.predict:
            raise InputError(f"--effective_batch_size {given}: {stage['name']} of this run has {size}; leave it out")
        fixed = ("volume_size", "voxel_dim", "vit_depth", "num_heads", "token_grid")
        differs = differs or any(stage[key] != wanted[key] for key in fixed)
        if k >= saved["stage"]:
            stage = stage | {key: wanted[key] for key in ("num_epochs", "physics_weight")}
        stages.append(stage)
    if differs:
        du.print_main("--stage_configs: as in the checkpoint")
    return stages


def use_checkpoint(run: Run, args: Namespace, precision: str) -> None:
    saved = run.checkpoint
    if args.predict:
        # without a --flip_drrs_* flag, assume that X-rays are stored as in the training data
        flips = {name: value for name, value in zip(FLIPS, saved["flips"], strict=True) if getattr(args, name) is None}
        args = with_flags(args, **flips)
    cascade = Cascade(args, run.ranks.device, precision, Prior.of(saved["prior"]), saved["stds"])
    for _ in range(saved["stage"] + 1):
        cascade.add_stage()
    with du.agree_on_errors():
        checkpoint.load_trained(cascade, saved["model"])
    if args.predict:
        predict(cascade, run, saved["extent"])
        return
    data = Data(args, [stage["volume_size"] for stage in args.stage_configs])
    if seen := set(data.ids["test"]) & set(saved["trained_patients"]):
        raise InputError(
            f"--eval_only: {min(seen)} and {len(seen) - 1} more of the test patients were trained on; name others"
        )
    run.write_summary("eval_test", test(cascade, data, run) | {"step": run.position.step})


def run_task(args: Namespace, ranks: du.Ranks) -> int:
    if args.make_drrs:
        du.print_main(f"{make_drrs(Path(args.make_drrs))} X-rays rendered below {args.make_drrs}")
        return 0
    for stage in args.stage_configs:
        check_accelerate(stage["accumulation_steps"])
    precision, described = set_precision(args.mixed_precision, ranks.device, args.deterministic, convolves_3d=True)
    run = Run(FORMAT, args, ranks, ADVICE, MODEL_FLAGS)
    args = run.args
    if args.num_timesteps % args.ddim_steps:
        raise InputError(f"--ddim_steps {args.ddim_steps}: must divide the model's {args.num_timesteps} timesteps")
    if args.regression and (args.num_samples > 1 or not args.v_parameterization):
        raise InputError("a regression gives one volume, by v: leave out --num_samples and --no-v_parameterization")
    args = with_flags(args, stage_configs=stages_of_run(args, run.checkpoint, ranks.world_size))
    if args.eval_only or args.predict:
        use_checkpoint(run, args, precision)
        return 0
    return train(run, args, precision, described)


def main(args: Namespace) -> int:
    with du.setup_distributed(args.dist_timeout) as ranks:
        return run_task(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
