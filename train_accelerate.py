"""X-ray to CT: one or two chest X-rays in, the CT volume out, by a cascade of conditional diffusion nets (guide 3).

    python train_accelerate.py --config configs/single_view_config.json                # one GPU, or CPU
    accelerate launch --multi_gpu --num_processes=4 --mixed_precision=fp16 train_accelerate.py \\
        --config configs/multi_view_config.json --wandb
    torchrun --nproc_per_node=4 train_accelerate.py --config configs/multi_view_config.json --wandb
    torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=192.168.1.1 --master_port=29500 \\
        train_accelerate.py --config configs/multi_view_config.json                    # --node_rank=1 on node 1
    bash train_4gpu.sh --config configs/multi_view_config.json --method accelerate --wandb
    accelerate launch --multi_gpu --num_processes=4 train_accelerate.py --config configs/multi_view_config.json \\
        --resume_from checkpoints_4gpu/stage2_best.pt
    python train_accelerate.py --make_drrs data/cts                                    # render the X-rays of your CTs
    python train_accelerate.py --resume_from checkpoints_4gpu/stage3_best.pt --sample new_xrays

Data: <id>/<id>.nii.gz, <id>/<id>_pa_drr.png, <id>/<id>_lat_drr.png. Geometry and units: see tasks/cascade/projector.py.
"""

import argparse
import contextlib
import copy
import gc
import gzip
import hashlib
import json
import math
import platform
import re
import time
import warnings
from functools import partial
from pathlib import Path

from cli_utils import (
    InputError,
    Parser,
    RunError,
    add_common_arguments,
    asked,
    number,
    parse_arguments,
    run_main,
    seed_number,
    set_derived,
    take_from_run,
    value_sources,
    whole,
)

FORMAT = "cascade/1"
LOSSES = ["loss", "diffusion_loss", "physics_loss", "grad_norm", "skipped"]
LOSS_DRAWS = 4  # noise levels at which each validation patient's loss is taken
PREVIOUS_NOISE = 0.1  # noise on the previous stage's volume: up to this in training
PREVIOUS_NOISE_SAMPLING = 0.02  # and this much in sampling, which hides what the previous stage got wrong
CT_MEAN, CT_STD = -0.75, 0.25  # of a torso CT in -1..1, roughly
RESIDUAL_STD = 0.06  # of what the stage before lacks, roughly
TOKEN_GRID = 16  # most tokens along an axis
GUIDE_MEMORY_GB = {64: 15, 128: 40, 256: 70}  # the guide's table, for its batches of 16, 8 and 4
GUIDE_RATE = 10  # samples/s per GPU that the guide aims for
# what a checkpoint prescribes to a run that goes on from it or uses it
FIXED = ("img_size", "num_views", "encoder_dim", "num_timesteps", "v_parameterization")
FIXED_STAGE = ("name", "volume_size", "voxel_dim", "vit_depth", "num_heads", "token_grid")
FIXED_DATA = ("split_seed", "flip_drrs_vertical", "flip_drrs_horizontal")
# sections of the config file: {key: flag}
SECTIONS = {
    "xray_config": ("img_size", "num_views", "encoder_dim"),
    "training": ("batch_size", "num_timesteps", "v_parameterization", "learning_rate", "num_epochs_per_stage",
                 "gradient_checkpointing", "mixed_precision", "accumulation_steps", "physics_weight", "weight_decay",
                 "scheduler", "warmup_steps", "ema_decay", "grad_clip", "ddim_steps", "seed"),
    "data": ("dataset_path", "augmentation", "cache_in_memory", "num_workers", "cache_dir", "split_seed", "split_files",
             "flip_drrs_vertical", "flip_drrs_horizontal"),
}  # fmt: skip
SECTIONS = {
    name: {key: "gradient_accumulation_steps" if key == "accumulation_steps" else key for key in keys}
    for name, keys in SECTIONS.items()
}
# keys of a stage that may be left out -> the flag that then holds, and that wins when given on the command line
OPTIONAL = {
    "batch_size": "batch_size",
    "num_epochs": "num_epochs_per_stage",
    "accumulation_steps": "gradient_accumulation_steps",
}
STAGES = [
    {"name": "stage1", "volume_size": [64, 64, 64], "voxel_dim": 256, "vit_depth": 4, "num_heads": 4, "batch_size": 16},
    {"name": "stage2", "volume_size": [128] * 3, "voxel_dim": 384, "vit_depth": 6, "num_heads": 6, "batch_size": 8},
    {
        "name": "stage3",
        "volume_size": [256] * 3,
        "voxel_dim": 512,
        "vit_depth": 8,
        "num_heads": 8,
        "batch_size": 2,
        "accumulation_steps": 2,
    },
]


def stage_list(text: str) -> list[dict]:
    """argparse type of --stage_configs: JSON list of stages, checked and with defaults filled in."""
    whole_keys = {"voxel_dim": 16, "vit_depth": 1, "num_heads": 1, "batch_size": 1, "num_epochs": 1, "token_grid": 2}
    whole_keys["accumulation_steps"] = 1
    keys = ("name", "volume_size", *whole_keys, "physics_weight")

    def wrong(reason: str) -> argparse.ArgumentTypeError:
        return argparse.ArgumentTypeError(reason)

    try:
        stages = json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong(f"not valid JSON ({error.msg})") from None
    except (RecursionError, ValueError) as error:
        raise wrong(f"not a list of stages ({error})") from None
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        raise wrong("must be a list of at least one stage, each with name, volume_size, voxel_dim ...")
    checked = []
    for k, stage in enumerate(stages):
        what = f"stage {k + 1}"
        for key in stage:
            if key not in keys:
                import difflib

                near = difflib.get_close_matches(str(key), keys, n=1)
                raise wrong(f"{what}: unknown key {key!r}" + (f", did you mean {near[0]!r}" if near else ""))
        like = STAGES[min(k, 2)]
        full = {"name": f"stage{k + 1}", "physics_weight": (0.3, 0.4, 0.5)[min(k, 2)], "token_grid": TOKEN_GRID}
        full |= {key: like[key] for key in ("volume_size", "voxel_dim", "vit_depth", "num_heads")}
        full |= dict.fromkeys(OPTIONAL) | stage
        if not isinstance(full["name"], str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", full["name"]):
            raise wrong(f"{what}: name {full['name']!r} must be of letters, digits, _ and -")
        for key, least in whole_keys.items():
            value = full[key]
            if value is None and key in OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise wrong(f"{what}: {key} {value!r} must be a whole number of at least {least}")
        weight, size = full["physics_weight"], full["volume_size"]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise wrong(f"{what}: physics_weight {weight!r} must be a number of at least 0")
        if not isinstance(size, list) or len(size) != 3 or not all(type(n) is int and n >= 8 for n in size):
            raise wrong(f"{what}: volume_size {size!r} must be three whole numbers of at least 8")
        parts = 2 ** halvings(size, full["token_grid"])
        if bad := [n for n in size if n % parts]:
            text = f"must be multiples of {parts} (token_grid {full['token_grid']})"
            raise wrong(f"{what}: volume_size {size}: {text}, {bad[0]} is not; take {round(bad[0] / parts) * parts}")
        if full["voxel_dim"] % (2 * full["num_heads"]) or full["voxel_dim"] % 8:
            raise wrong(f"{what}: voxel_dim {full['voxel_dim']} must be a multiple of 8 and of twice num_heads")
        if checked:
            before = checked[-1]["volume_size"]
            if not all(a <= b for a, b in zip(before, size, strict=True)) or before == size:
                raise wrong(f"{what}: volume_size {size} must be larger than the {before} of the stage before")
            if full["name"] in [other["name"] for other in checked]:
                raise wrong(f"{what}: the name {full['name']!r} is taken")
        checked.append(full)
    return checked


def eval_batch(size: list[int]) -> int:
    """Patients per forward pass of an evaluation: the same at any world size, so that results are too."""
    return max(1, min(4, 2 * 128**3 // math.prod(size)))


def halvings(size: list[int], token_grid: int) -> int:
    """How often a stage's net halves its grid before the transformer."""
    return max(1, math.ceil(math.log2(max(size) / token_grid)))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument_group("data").add_argument
    yes_no = argparse.BooleanOptionalAction
    text = (
        "folder of patients: <id>/<id>.nii.gz (.nii, .npy), <id>_pa_drr.png (_pa, _frontal), <id>_lat_drr.png (_lat, "
    )
    add("--dataset_path", default="./data/drr_patient_data", metavar="DIR", help=text + "_lateral)")
    add("--split_seed", type=seed_number, default=42, help="seed of the 80/10/10 split by patient")
    text = "text files with one patient id a line, instead of the random split"
    add("--split_files", nargs=3, metavar=("TRAIN", "VAL", "TEST"), help=text)
    text = "pictures show the head at the top (upside down relative to the CT's voxel order); --no-...: the feet"
    add("--flip_drrs_vertical", action=yes_no, default=True, help=text)
    text = "pictures that are mirrored: expected are the patient's right side at the left (pa), the front at the left "
    choices = ("none", "pa", "lat", "both")
    add("--flip_drrs_horizontal", choices=choices, default="none", help=text + "(lat)")
    text = "training patients move up and down by 5%%, their pictures' exposure varies"
    add("--augmentation", action=yes_no, default=True, help=text)
    text = "keep decoded patients in the memory of EACH process (sets --num_workers 0): 35 MB a patient at 256^3"
    add("--cache_in_memory", action=yes_no, default=False, help=text)
    text = "decoded patients on disk, 38 MB each at the guide's sizes; shared by all ranks and runs, may be deleted"
    add("--cache_dir", default="runs/cache/cascade", help=text)
    text = "do not compare each X-ray with its CT's projection before training"
    add("--skip_alignment_check", action="store_true", help=text)
    text = "render missing pa and lat pictures of every CT below DIR, and end"
    add("--make_drrs", metavar="DIR", help=text)

    add = parser.add_argument_group("model").add_argument
    add("--img_size", type=whole(32), default=512, help="side of the X-rays in the encoder, pixels; lower it on OOM")
    add("--num_views", type=int, choices=(1, 2), default=2, help="1: frontal; 2: frontal and lateral")
    add("--encoder_dim", type=whole(16), default=512, help="channels of the X-ray encoder; lower it on OOM")
    text = "list of stages, each {name, volume_size, voxel_dim, vit_depth, num_heads, batch_size, num_epochs, "
    text += (
        "physics_weight, token_grid (most tokens along an axis, 16; lower it on OOM)}; usually in --config; left out: "
    )
    text += "the guide's three, 64^3 128^3 256^3"
    add("--stage_configs", type=stage_list, metavar="JSON", help=text)
    text = "diffusion steps of training"
    add("--num_timesteps", type=whole(10), default=1000, help=text)
    text = "the net predicts v (Salimans & Ho 2022); --no-...: the noise"
    add("--v_parameterization", action=yes_no, default=True, help=text)
    text = "recompute activations: less memory, a third slower; left out: in a stage that needs it"
    add("--gradient_checkpointing", action=yes_no, help=text)

    add = parser.add_argument_group("optimisation").add_argument
    text = "patients per step and GPU; on the command line for all stages, else a stage's own batch_size wins; on OOM "
    add("--batch_size", type=whole(1), default=8, help=text + "halve it and double --gradient_accumulation_steps")
    text = "passes over the training patients in each stage; a stage's own num_epochs wins unless given here by hand"
    add("--num_epochs_per_stage", type=whole(1), default=100, help=text)
    add("--learning_rate", type=number(0, above=True), default=1e-4, help="at the start; not scaled with the GPUs")
    text = "plateau: halved after 5 epochs without a lower validation loss; cosine: to 0 over the stage"
    add("--scheduler", choices=("plateau", "cosine", "constant"), default="plateau", help=text)
    add("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up in each stage")
    add("--weight_decay", type=number(0), default=0.01, help="of AdamW")
    add("--ema_decay", type=number(0, 1), default=0.9999, help="of the averaged weights that are evaluated; 0: none")
    text = "weight of the projection loss in every stage; left out: each stage's own (.3, .4, .5)"
    add("--physics_weight", type=number(0), help=text)
    text = "train this stage only (number or name); the ones before must be there, see --resume_from"
    add("--stage", metavar="STAGE", help=text)

    add = parser.add_argument_group("output and evaluation").add_argument
    add("--checkpoint_dir", default="checkpoints_4gpu", help="run folder: checkpoints, logs, figures, samples")
    text = "denoising steps per stage when sampling; must divide --num_timesteps"
    add("--ddim_steps", type=whole(1), default=50, help=text)
    text = "with the test metrics: also those with another patient's X-rays, and with the stage before zeroed"
    add("--check_conditioning", action="store_true", help=text)
    text = "write the CT volumes (NIfTI, HU) of the patients in DIR, whose X-rays are enough, to samples/; uses "
    add("--sample", metavar="DIR", help=text + "--resume_from, default best.pt of --checkpoint_dir")
    add_common_arguments(parser, {"learning_rate": "lr"})
    args = parse_arguments(parser, argv, SECTIONS)
    args.source = value_sources(parser, args, argv, SECTIONS)
    if args.eval_only:
        take_from_run(parser, args, args.checkpoint_dir, ("dataset_path", "split_files", "cache_dir"))
    if args.stage_configs is None:
        args.stage_configs = stage_list(json.dumps(STAGES))
    if args.encoder_dim % 16:
        parser.error(f"--encoder_dim {args.encoder_dim}: must be a multiple of 16")
    if args.img_size % 8:
        parser.error(f"--img_size {args.img_size}: must be a multiple of 8")
    if args.num_timesteps % args.ddim_steps:
        steps = [n for n in range(1, args.num_timesteps + 1) if args.num_timesteps % n == 0]
        near = min(steps, key=lambda n: abs(n - args.ddim_steps))
        parser.error(
            f"--ddim_steps {args.ddim_steps}: must divide --num_timesteps {args.num_timesteps}; nearest {near}"
        )
    if args.overwrite and (args.resume_from or args.eval_only or args.sample):
        parser.error("--overwrite starts afresh and excludes --resume_from, --eval_only and --sample")
    if args.eval_only and args.sample:
        parser.error("--eval_only and --sample exclude each other")
    if args.stage and (args.eval_only or args.sample):
        parser.error("--stage is for training; name the stage's checkpoint with --resume_from")
    for stage in args.stage_configs:
        for key, flag in OPTIONAL.items():
            if stage[key] is None or args.source[flag] == "command line":
                stage[key] = getattr(args, flag)
        if args.physics_weight is not None:
            stage["physics_weight"] = args.physics_weight
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the heavy imports: --help and a mistyped flag answer at once

import numpy as np
import torch
from torch import nn

import checkpoint_utils as ckpt
import distributed_utils as du
import fixed_order_utils
import hardware_utils as hw
from accelerate_utils import choose_precision, keep_precision, make_accelerator
from logging_utils import RunLog, figure_text, print_banner, print_table, save_figure, write_result
from old_loop_utils import (
    Fitted,
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
    try_step,
)
from tasks.cascade import data as xd
from tasks.cascade import metrics as cm
from tasks.cascade import projector as drr
from tasks.cascade.model import StageNet

# --- net and noise schedule -------------------------------------------------------------------------------------------


def build_net(k: int, args: argparse.Namespace, device: torch.device) -> StageNet:
    """The net of stage k (from 0) with the same random weights on every rank."""
    seed = args.seed * 1000003 + k
    # torch takes 64 bits
    torch.manual_seed(seed if -(2**63) <= seed < 2**64 else seed % 2**63)
    stage = args.stage_configs[k]
    net = StageNet(stage, args, k == 0, halvings(stage["volume_size"], stage["token_grid"]))
    net.checkpointing = bool(args.gradient_checkpointing) or stage.get("recompute", False)
    for module in net.modules():
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            module.to(memory_format=torch.channels_last_3d)
    return net.to(device)


def make_scheduler(args: argparse.Namespace):
    """MONAI's DDIM scheduler: cosine schedule (Nichol & Dhariwal 2021, s = .008), v or noise prediction."""
    from monai.networks.schedulers import DDIMScheduler

    kind = "v_prediction" if args.v_parameterization else "epsilon"
    scheduler = DDIMScheduler(args.num_timesteps, schedule="cosine", prediction_type=kind, clip_sample=True)
    scheduler.set_timesteps(args.ddim_steps)
    # step() goes back by T / steps; set_timesteps spaces the times by (T - 1) / (steps - 1), which is more
    scheduler.timesteps = torch.arange(args.num_timesteps - 1, -1, -(args.num_timesteps // args.ddim_steps))
    return scheduler


# --- loss -------------------------------------------------------------------------------------------------------------


def on_device(values: list, device: torch.device) -> torch.Tensor:
    """A few numbers on the device, without waiting for it."""
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def noise_like(shape: tuple[int, ...], device: torch.device, keys: list[tuple[int, ...]]) -> torch.Tensor:
    """Gaussian noise (len(keys), *shape), each part a function of its key alone."""
    seeds = [int(np.random.default_rng([k % 2**63 for k in key]).integers(2**62)) for key in keys]
    return xd.draw_noise(shape, device, seeds)


def predict(
    net: nn.Module, scheduler, noisy: torch.Tensor, timestep: torch.Tensor, xrays: torch.Tensor, previous, args
):
    """(v or noise as the scheduler expects it, clean volume), both (B, 1, X, Y, Z) fp32, at timesteps (B,).

    The net sees inputs of unit variance and predicts, in unit variance, what a linear estimate from the noisy volume
    leaves of the clean one (Karras et al. 2022, here for v). The estimate's prior is the volume of the stage before;
    in the first stage a uniform one. So the net need not learn to copy its inputs, which are nearly right.
    """
    signal = scheduler.alphas_cumprod.to(noisy.device)[timestep][:, None, None, None, None]
    a, s = signal.sqrt(), (1 - signal).sqrt()
    mean, std, given = CT_MEAN, CT_STD, ()
    if previous:
        mean, std = fixed_order_utils.interpolate(previous[0], noisy.shape[2:]), RESIDUAL_STD
        given = (mean - CT_MEAN) / CT_STD, previous[1]
    deviation = (signal * std**2 + s**2).sqrt()
    centred = noisy - a * mean
    output = net(centred / deviation, (timestep + 1) / args.num_timesteps, xrays, *given)
    clean = mean + a * (std / deviation) ** 2 * centred + std * s / deviation * output
    return ((a * noisy - clean) if args.v_parameterization else (noisy - a * clean)) / s, clean


def sample_losses(
    net: nn.Module, scheduler, batch: dict, timestep: torch.Tensor, noise: torch.Tensor, previous, args, greys
) -> tuple[torch.Tensor, torch.Tensor]:
    """(diffusion loss, physics loss) of each patient, (B,) fp32.

    The first is the mean square error of v or of the noise. The second compares the projections of the clean volume
    that the net implies with the X-rays; at high noise levels that volume is a guess, so each patient counts by its
    share of signal, alpha_bar(t).
    """
    volume = batch["volume"]
    noisy = scheduler.add_noise(volume, noise, timestep)
    output, clean = predict(net, scheduler, noisy, timestep, batch["seen"], previous, args)
    target = scheduler.get_velocity(volume, noise, timestep) if args.v_parameterization else noise
    diffusion = (output - target).square().mean((1, 2, 3, 4))
    physics = cm.projection_error(clean, batch["extent"], batch["xrays"], greys).mean(1)
    return diffusion, scheduler.alphas_cumprod.to(volume.device)[timestep] * physics


def prepare(batch: dict, args, device: torch.device, stage: int, epoch: int | None) -> dict:
    """A batch on the device: volume (B, 1, X, Y, Z) and xrays (B, views, H, W) in -1..1, `seen` the pictures as the net
    gets them. epoch: for augmentation; None in evaluations, which have none."""
    volume = drr.normalise(batch["volume"].to(device, non_blocking=True).float())[:, None]
    xrays = xd.grey(batch["xrays"].to(device, non_blocking=True))
    seen = xrays
    if args.augmentation and epoch is not None:
        key = args.seed + 1000003 * (stage + 1)
        volume, xrays, seen = xd.augment(volume, xrays, batch["index"].tolist(), key, epoch)
    extent = batch["extent"].to(device, non_blocking=True)
    return {"volume": volume, "xrays": xrays, "seen": seen, "extent": extent, "index": batch["index"].tolist()}


def noised_previous(volume: torch.Tensor, k: int, levels: list[float], keys: list[tuple], args):
    """(previous, level) for a net of stage k from the true volume: noise-conditioning augmentation (Ho et al. 2022).
    None for the first stage."""
    if k == 0:
        return None
    low = drr.resize(volume, args.stage_configs[k - 1]["volume_size"])
    grain = noise_like(low.shape[1:], low.device, keys)
    level = on_device(levels, low.device)
    return low + level[:, None, None, None, None] * grain, level


def training_draw(batch: dict, k: int, epoch: int, args) -> tuple:
    """(timestep, noise, previous) of each patient of a batch: a function of (seed, stage, epoch, patient)."""
    volume, times, levels, keys = batch["volume"], [], [], []
    for index in batch["index"]:
        key = (args.seed, 1, k, epoch, index)
        draw = np.random.default_rng([n % 2**63 for n in key])
        times.append(int(draw.integers(args.num_timesteps)))
        levels.append(float(draw.uniform(0, PREVIOUS_NOISE)))
        keys.append(key)
    timestep = on_device(times, volume.device)
    noise = noise_like(volume.shape[1:], volume.device, [(*key, 1) for key in keys])
    return timestep, noise, noised_previous(volume, k, levels, [(*key, 2) for key in keys], args)


# --- training ---------------------------------------------------------------------------------------------------------


class Ema:
    """Averaged weights in a net of their own; the decay grows with the steps, min(decay, (1 + n) / (10 + n))."""

    def __init__(self, net: StageNet, decay: float):
        self.net, self.decay = copy.deepcopy(net).requires_grad_(False).eval(), decay
        self.net.checkpointing = False

    @torch.no_grad()
    def update(self, net: StageNet, steps: int) -> None:
        decay = min(self.decay, (1 + steps) / (10 + steps))
        torch._foreach_lerp_(list(self.net.parameters()), list(net.parameters()), 1 - decay)


def train_one_epoch(
    k: int, wrapped, net: StageNet, ema: Ema, accelerator, optimizer, scaler, scheduler, loader, state: dict,
    ends: tuple[int, int], greys, args, ranks: du.Ranks, log: RunLog, stop: du.StopSignal, save,
) -> int:  # fmt: skip
    """Train stage k from state's position to the end of the epoch or run; returns the exit code of a stop signal.

    state: `step` (all stages), `stage_step`, `epoch` and `samples` (of this stage, all ranks), kept up to date. ends:
    (last step of the run, steps of this stage). Between log lines nothing is read back from the GPU. Raises
    InputError on all ranks for a file that any of them cannot use.
    """
    warnings.filterwarnings("ignore", message="Grad strides do not match")  # 1 x 1 x 1 kernels have two layouts at once
    net.train()
    stage, sampler = args.stage_configs[k], loader.batch_sampler
    batches, size, epoch = iter(loader), sampler.batch_size, state["epoch"]
    parameters = list(net.parameters())
    while state["step"] < ends[0] and state["samples"] < sampler.used:
        count, mine = sampler.window(state["samples"])
        window = log.next_batches(batches, max(1, math.ceil(mine / size)))
        error = next((text for batch in window for text in batch["error"] if text), "")
        stop_143, stop_130, broken = du.reduce_max([stop.code == 143, stop.code == 130, bool(error)]).tolist()
        if broken:
            raise InputError(next(text for text in du.gather_objects(error) if text))
        if stop_143 or stop_130:  # agreed by all ranks, before the window is used
            save()
            return 143 if stop_143 else 130
        kind = "constant" if args.scheduler == "plateau" else args.scheduler
        rate = (
            args.learning_rate * state["plateau"] * du.schedule(state["stage_step"], ends[1], args.warmup_steps, kind)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        totals = torch.zeros(3, device=ranks.device)
        for i, batch in enumerate(window):
            batch = prepare(batch, args, ranks.device, k, epoch)
            timestep, noise, previous = training_draw(batch, k, epoch, args)
            apart = contextlib.nullcontext() if i == len(window) - 1 else accelerator.no_sync(wrapped)
            with log.count_flops(count), apart:
                with accelerator.autocast():
                    losses = sample_losses(wrapped, scheduler, batch, timestep, noise, previous, args, greys)
                # DDP takes the mean over ranks, these are parts of a sum; a rank without a share has weight 0
                diffusion, physics = ((part.sum() * (bool(mine) / count)) for part in losses)
                loss = diffusion + stage["physics_weight"] * physics
                scaler.scale(loss * ranks.world_size).backward()
            totals += torch.stack([loss, diffusion, physics]).detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, args.grad_clip or math.inf)
        scaler.step(optimizer)  # leaves the weights alone when a gradient is not finite, without a GPU sync
        scaler.update(None if args.mixed_precision == "fp16" else 1.0)
        optimizer.zero_grad(set_to_none=True)
        state["step"] += 1
        state["stage_step"] += 1
        state["samples"] += count
        ema.update(net, state["stage_step"])
        facts = torch.stack([norm, 1.0 - norm.isfinite().float()])  # the same on all ranks: one tells
        log.step(torch.cat([totals, facts if ranks.is_main else torch.zeros_like(facts)]), count, rate)
        log.check(state["step"], args.max_bad_steps)
        if state["step"] % args.log_every == 0:
            log.write_interval(state["step"], state["epoch"] + 1)
        if args.save_every and state["step"] % args.save_every == 0:
            save()
    return 0


# --- evaluation -------------------------------------------------------------------------------------------------------


def eval_batches(data: xd.XrayCtDataset, args, k: int, ranks: du.Ranks):
    """(places in data, prepared batch) of this rank's share. Raises InputError (of this rank) for a bad file."""
    workers = 0 if data.kept is not None else args.num_workers
    loader = du.create_distributed_dataloader(data, eval_batch(data.size), train=False, num_workers=workers)
    for places, batch in zip(loader.batch_sampler, loader, strict=True):
        if error := next((text for text in batch["error"] if text), ""):
            raise InputError(error)
        yield places, prepare(batch, args, ranks.device, k, None)


@torch.no_grad()
def validation_loss(k: int, ema: Ema, accelerator, scheduler, data, greys, args, ranks: du.Ranks) -> dict[str, float]:
    """val/loss and its parts by the averaged weights, at fixed noise, the same at any world size; on all ranks."""
    table = torch.zeros(len(data), 2, dtype=torch.float64)
    with du.agree_on_errors():
        for places, batch in eval_batches(data, args, k, ranks):
            for draw in range(LOSS_DRAWS):
                keys = [(args.seed, 2, k, draw, index) for index in batch["index"]]
                # noise levels spread evenly over the draws and the patients
                shares = [(draw + place * 0.618034 % 1) / LOSS_DRAWS for place in places]
                timestep = on_device([int(share * args.num_timesteps) for share in shares], ranks.device)
                shape, device = batch["volume"].shape[1:], ranks.device
                noise = noise_like(shape, device, [(*key, 1) for key in keys])
                levels = [PREVIOUS_NOISE_SAMPLING] * len(keys)
                previous = noised_previous(batch["volume"], k, levels, [(*key, 2) for key in keys], args)
                with accelerator.autocast():
                    losses = sample_losses(ema.net, scheduler, batch, timestep, noise, previous, args, greys)
                table[places] += torch.stack(losses, 1).double().cpu() / LOSS_DRAWS
    diffusion, physics = du.reduce_sum(table).mean(0).tolist()
    weight = args.stage_configs[k]["physics_weight"]
    values = {"val/loss": diffusion + weight * physics, "val/diffusion_loss": diffusion, "val/physics_loss": physics}
    if not math.isfinite(values["val/loss"]):
        raise RunError("the validation loss is not finite; lower --learning_rate")
    return values


@torch.no_grad()
def sample_cascade(
    nets: list[StageNet], xrays: torch.Tensor, indices: list[int], accelerator, scheduler, args, zeroed: bool = False
) -> list[torch.Tensor]:
    """The volumes (B, 1, X, Y, Z) of every stage, sampled from noise by DDIM (Song et al. 2021), each stage from the
    volume that the one before sampled. xrays (B, views, H, W) in -1..1. The noise is a function of (seed, stage,
    index). zeroed: the last stage gets zeros for the volume before, to see what that does."""
    volumes: list[torch.Tensor] = []
    for k, net in enumerate(nets):
        size = (1, *args.stage_configs[k]["volume_size"])
        x = noise_like(size, xrays.device, [(args.seed, 3, k, index) for index in indices])
        previous = None
        if k:
            last = torch.zeros_like(volumes[-1]) if zeroed and k == len(nets) - 1 else volumes[-1]
            grain = noise_like(last.shape[1:], x.device, [(args.seed, 4, k, index) for index in indices])
            level = torch.full((len(indices),), PREVIOUS_NOISE_SAMPLING, device=x.device)
            previous = last + PREVIOUS_NOISE_SAMPLING * grain, level
        for timestep in scheduler.timesteps.tolist():
            now = torch.full((len(indices),), timestep, device=x.device)
            with accelerator.autocast():
                output, _ = predict(net, scheduler, x, now, xrays, previous, args)
            x, _ = scheduler.step(output, timestep, x)
        volumes.append(x.clamp(-1, 1))
    return volumes


def mean_volume(data: xd.XrayCtDataset, ranks: du.Ranks) -> torch.Tensor:
    """(1, 1, X, Y, Z) on the CPU: the mean of the training patients, the first baseline."""
    total = torch.zeros(data.size, dtype=torch.float64)
    with du.agree_on_errors():
        for place in range(ranks.rank, len(data), ranks.world_size):
            item = data[place]
            if item["error"]:
                raise InputError(item["error"])
            total += drr.normalise(item["volume"].double())
    return (du.reduce_sum(total) / len(data)).float()[None, None]


@torch.no_grad()
def evaluate(
    split: str, nets: list[StageNet], data: xd.XrayCtDataset, mean: torch.Tensor, accelerator, scheduler, greys,
    args, ranks: du.Ranks, others: list[int] | None = None, stop: du.StopSignal | None = None,
) -> tuple[dict[str, float] | None, dict]:  # fmt: skip
    """(metrics, {"volumes", "batch"} of the first patient for a figure) of the whole cascade up to the last of `nets`.

    Each patient once, however many ranks there are; all ranks return the same metrics. others: for
    --check_conditioning, whose X-rays to give to each patient in a second pass. stop: on a signal to any rank all
    leave, with None for the metrics.
    """
    k, views = len(nets) - 1, drr.VIEWS[: args.num_views]
    names = ["psnr", "ssim", "mae_hu", *(f"projection_error_{view}" for view in views)]
    kinds = ["", "_mean_volume", "_backprojection"]
    table = torch.zeros(len(data), len(kinds) * len(names) + 2, dtype=torch.float64)
    mean, shown = mean.to(ranks.device), {}
    with du.agree_on_errors():
        for places, batch in eval_batches(data, args, k, ranks):
            if stop and stop.code:
                break
            volumes = sample_cascade(nets, batch["xrays"], batch["index"], accelerator, scheduler, args)
            integrals = [(batch["xrays"][:, v : v + 1] - b) / a for v, (a, b, _) in enumerate(greys)]
            spacing = drr.spacing_of(batch["extent"], data.size)
            back = drr.back_project(integrals, spacing, data.size)
            rows = [cm.measure(v, batch, greys) for v in (volumes[-1], mean.expand_as(back), back)]
            extra = torch.zeros(len(places), 2, dtype=torch.float64)
            if others is not None:
                swapped = xd.grey(torch.stack([data.decoded.xrays(data.patients[others[p]]) for p in places]))
                swapped = swapped.to(ranks.device)
                for c, (pictures, zeroed) in enumerate(((swapped, False), (batch["xrays"], True))):
                    if zeroed and k == 0:
                        continue
                    found = sample_cascade(nets, pictures, batch["index"], accelerator, scheduler, args, zeroed)
                    extra[:, c] = cm.measure(found[-1], batch, greys)[:, 0]
            table[places] = torch.cat([*rows, extra], 1)
            if 0 in places:
                shown = {"volumes": [volume[:1] for volume in volumes], "batch": batch, "back": back[:1], "mean": mean}
    if stop and du.any_rank(bool(stop.code)):
        return None, {}
    means = du.reduce_sum(table).mean(0).tolist()
    metrics = {f"{split}/{name}{kind}": means[len(names) * i + j]
               for i, kind in enumerate(kinds) for j, name in enumerate(names)}  # fmt: skip
    if others is not None:
        metrics[f"{split}/psnr_other_patient"] = means[-2]
        if k:
            metrics[f"{split}/psnr_previous_zeroed"] = means[-1]
    return metrics, shown


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_inputs(k: int, data: xd.XrayCtDataset, scheduler, args, ranks: du.Ranks):
    """What the net of stage k is given in training: the first patients of the first epoch."""
    from torch.utils.data import default_collate

    batch = prepare(default_collate([data[i] for i in range(min(2, len(data)))]), args, ranks.device, k, 0)
    timestep, noise, previous = training_draw(batch, k, 0, args)
    noisy = scheduler.add_noise(batch["volume"], noise, timestep)
    rows = []
    for i, index in enumerate(batch["index"]):
        name = figure_text(data.patients[index].id, 16)
        noisy_slices = cm.middle_slices(noisy[i, 0])
        rows.append((f"input: noisy CT\nt = {int(timestep[i])}", [*noisy_slices, *batch["seen"][i].cpu().numpy()]))
        if previous:
            slices = cm.middle_slices(previous[0][i, 0])
            rows.append((f"input: stage before\nnoise {float(previous[1][i]):.2f}", slices))
        rows.append((f"target: CT of\n{name}", cm.middle_slices(batch["volume"][i, 0])))
    columns = [*cm.SLICES, *(f"input X-ray, {cm.PLACES[view]}" for view in drr.VIEWS[: args.num_views])]
    heading = (
        f"{figure_text(args.stage_configs[k]['name'])}: what the net is given in training (t of {args.num_timesteps})"
    )
    return cm.draw_rows(heading, columns, rows)


# --- the run ----------------------------------------------------------------------------------------------------------


def adopt(args: argparse.Namespace, contents: dict, path: str) -> None:
    """Take what a checkpoint prescribes. Raises InputError where a flag or the config says otherwise."""
    settings, reached = contents["settings"], contents["state"]["stage"]
    if args.source["seed"] == "default":
        args.seed = contents["run"]["seed"]
    for name in (*FIXED, *FIXED_DATA):
        if args.sample and name.startswith("flip") and args.source[name] != "default":
            continue  # how the new pictures lie, not those of the training
        if args.source[name] != "default" and getattr(args, name) != settings[name]:
            raise InputError(f"{path}: a run with --{name} {settings[name]}, now {getattr(args, name)}; leave it out")
        setattr(args, name, settings[name])
    if args.num_timesteps % args.ddim_steps:
        if args.source["ddim_steps"] != "default":
            raise InputError(f"--ddim_steps {args.ddim_steps}: must divide the {args.num_timesteps} steps of {path}")
        args.ddim_steps = next(n for n in range(args.ddim_steps, 0, -1) if args.num_timesteps % n == 0)
    if args.source["stage_configs"] == "default":
        given = {key: flag for key, flag in OPTIONAL.items() if args.source[flag] == "command line"}
        args.stage_configs = settings["stage_configs"]
        for stage in args.stage_configs:
            stage |= {key: getattr(args, flag) for key, flag in given.items()}
            stage |= {} if args.physics_weight is None else {"physics_weight": args.physics_weight}
        return
    if len(args.stage_configs) <= reached:
        raise InputError(f"{path}: is at stage {reached + 1} of a cascade, the config has {len(args.stage_configs)}")
    for k in range(reached + 1):  # later stages may be others
        for name in FIXED_STAGE:
            was, now = settings["stage_configs"][k][name], args.stage_configs[k][name]
            if was != now:
                raise InputError(f"{path}: stage {k + 1} was trained with {name} {was}, now {now}; set it back")


def make_optimizer(net: StageNet, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW over one stage's net, which alone learns."""
    return torch.optim.AdamW(net.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)


def largest_batch(batch_size: int, stage: dict, args: argparse.Namespace) -> dict:
    """A made-up batch, on the host, of a stage's patients."""
    volume = torch.zeros(batch_size, *stage["volume_size"], dtype=torch.int16)
    xrays = torch.zeros(batch_size, args.num_views, args.img_size, args.img_size, dtype=torch.int16)
    batch = {"volume": volume, "xrays": xrays, "extent": torch.ones(batch_size, 3)}
    return batch | {"index": torch.arange(batch_size), "error": [""] * batch_size}


def trial_step(net: StageNet, batch: dict, args: argparse.Namespace, k: int, greys) -> None:
    """Forward and backward pass of one micro-batch of stage k, as in training; the gradients stay in the net."""
    device = net.position.device
    batch = prepare(batch, args, device, k, 0)
    timestep, noise, previous = training_draw(batch, k, 0, args)
    with hw.autocast(device, args.mixed_precision):
        losses = sample_losses(net.train(), make_scheduler(args), batch, timestep, noise, previous, args, greys)
    diffusion, physics = (part.mean() for part in losses)
    (diffusion + args.stage_configs[k]["physics_weight"] * physics).backward()


def measure_stage(
    k: int, greys, before: dict | None, args: argparse.Namespace, ranks: du.Ranks
) -> tuple[float | None, int, Fitted | None]:  # fmt: skip
    """All ranks: (memory of one training step in GiB, parameters, the batch that fits) of stage k, on made-up data.

    The memory is on a GPU what torch reserved at most. On CPU it is the sum of weights, gradients, AdamW's moments,
    averaged weights and the activations kept for the backward pass; None for sizes that would take a CPU minutes. The
    batch is None where it is not fitted. Raises RunError when the stage does not fit.
    """
    stage, gpu = args.stage_configs[k], ranks.device.type == "cuda"
    fits = fits_by_itself(args.auto_batch, ranks.device)
    net = build_net(k, args, ranks.device)
    count = sum(p.numel() for p in net.parameters())
    if not gpu and not fits and stage["batch_size"] * math.prod(stage["volume_size"]) > 8 * 64**3:
        return None, count, None
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def try_once(size: int) -> None:
        kept.clear()
        batch = largest_batch(size, stage, args)
        with contextlib.nullcontext() if gpu else torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            trial_step(net, batch, args, k, greys)

    def words(size: int, accumulation: int) -> str:
        return f"{stage['name']}: batch_size {size} and accumulation_steps {accumulation}"

    # one more copy than in the other scripts: the averaged weights
    copies, fitted = copies_held() + 1, None
    if fits:
        undecided = args.gradient_checkpointing is None
        recompute = partial(setattr, net, "checkpointing", True) if undecided else None
        advice = f"pass {'' if undecided else '--gradient_checkpointing or '}a smaller voxel_dim or token_grid"
        wanted = stage["batch_size"], stage["accumulation_steps"]
        fitted = fit_batch_to_memory(try_once, net, wanted, words, advice, copies, recompute=recompute, before=before)
        peak = fitted.peak_gib
    else:
        trial = try_step(partial(try_once, stage["batch_size"]), net, copies, passes=2 if gpu else 1)
        failed, peak = du.reduce_max([bool(trial.error), (trial.peak or 0) / 2**30]).tolist()
        if failed:
            raise RunError(out_of_memory_advice(stage, args, ranks.device))
    if not gpu:
        peak = (sum(kept.values()) + 4 * 5 * count) / 2**30
    return float(du.reduce_max([peak])[0]), count, fitted


def plan_stages(first: int, greys, before: dict | None, args: argparse.Namespace, ranks: du.Ranks) -> list[dict]:
    """All ranks: the table of stages, from `first` on measured, and each stage's batch fitted to memory.

    before: the split_record of the first one, where a run is resumed in its middle. Raises RunError when one does not
    fit.
    """
    table, stages = [], copy.deepcopy(args.stage_configs)
    for k, stage in enumerate(stages):
        memory, count, fitted = None, None, None
        if k >= first:
            memory, count, fitted = measure_stage(k, greys, before if k == first else None, args, ranks)
        if fitted and fitted.reason:
            stage |= {"batch_size": fitted.size, "accumulation_steps": fitted.accumulation, "fitted": fitted.reason}
        if fitted and fitted.recomputed:
            stage["recompute"] = True
        size = stage["volume_size"]
        guide = GUIDE_MEMORY_GB.get(size[0]) if len(set(size)) == 1 else None
        table.append({"volume": "x".join(map(str, size)), "batch/GPU": stage["batch_size"], "parameters": count or "-",
                      "memory GB": f"{memory:.2f}" if memory else "-", "guide GB": guide or "-"})  # fmt: skip
    set_derived(args, stage_configs=stages)
    return table


def out_of_memory_advice(stage: dict, args: argparse.Namespace, device: torch.device) -> str:
    size, accumulation = hw.split_batch(stage["batch_size"], stage["accumulation_steps"])
    advice = "--gradient_checkpointing" if not args.gradient_checkpointing else "a smaller voxel_dim or token_grid"
    smaller = (
        f"try batch_size {size} and accumulation_steps {accumulation} for this stage in --config (the same result), "
    )
    smaller = smaller if stage["batch_size"] > 1 else "try "
    text = f"out of memory in {stage['name']} at batch_size {stage['batch_size']} per GPU; {smaller}{advice}"
    return text + auto_batch_advice(args.auto_batch, device)


def describe_recomputation(args: argparse.Namespace) -> str:
    """For the banner: where activations are recomputed, and why."""
    if args.gradient_checkpointing is not None:
        return f"{'on' if args.gradient_checkpointing else 'off'} ({args.source['gradient_checkpointing']})"
    names = [stage["name"] for stage in args.stage_configs if stage.get("recompute")]
    return f"on in {', '.join(names)} (one patient did not fit without)" if names else "off (default)"


class Data:
    """The patients of a run: their split, the decoder, and what is derived from all of them."""

    def __init__(self, args: argparse.Namespace, sizes: list, ranks: du.Ranks):
        """All ranks. sizes: the grids that will be needed. Raises InputError."""
        with du.agree_on_errors():
            self.patients = xd.find_patients(Path(args.dataset_path), args.num_views)
            self.split = xd.split_patients(self.patients, args.split_seed, args.split_files)
        chosen = sorted(place for places in self.split.values() for place in places)
        self.decoded = make_decoder(args)
        local = du.gather_objects(platform.node()).count(platform.node())
        share = max(1, min(hw.usable_cores(), int(hw.available_ram_gb() / 3)) // local)  # 3 GB for a large CT
        du.print_main(f"reading {len(chosen)} patients ...")
        shown = xd.read_all([self.patients[i] for i in chosen], self.decoded, sizes, share)
        integrals, pictures, extents = shown
        with du.agree_on_errors():
            if not args.skip_alignment_check:
                xd.check_alignment([self.patients[i] for i in chosen], integrals, pictures)
            train = np.isin(chosen, self.split["train"])
            self.greys = xd.fit_greys(integrals[train], pictures[train])
            self.extent = extents[train].mean(0).tolist()
            if any(not abs(a) > 1e-6 for a, *_ in self.greys):
                raise InputError("--dataset_path: the X-rays have nothing to do with the CTs; see --make_drrs")
        self.in_memory = args.cache_in_memory
        self.ids = {name: sorted(self.patients[i].id for i in places) for name, places in self.split.items()}
        self.fingerprint = hashlib.sha256(json.dumps(self.ids, sort_keys=True).encode()).hexdigest()[:12]
        self.made: dict = {}

    def set(self, split: str, size: list[int]) -> xd.XrayCtDataset:
        """One split on one grid."""
        key = split, tuple(size)
        if key not in self.made:
            self.made = {k: v for k, v in self.made.items() if k[1] == key[1]}  # another stage: let go of the last
            places = self.split[split]
            self.made[key] = xd.XrayCtDataset(self.patients, places, self.decoded, size, self.in_memory)
        return self.made[key]


def make_decoder(args: argparse.Namespace) -> xd.Decoded:
    flips = tuple(args.flip_drrs_horizontal in (view, "both") for view in drr.VIEWS)
    return xd.Decoded(args.img_size, (args.flip_drrs_vertical, *flips), args.cache_dir)


def load_nets(contents: dict, args: argparse.Namespace, ranks: du.Ranks) -> list[StageNet]:
    """The averaged nets of every stage that a checkpoint holds, for evaluation."""
    nets = []
    for k, weights in enumerate([*contents["earlier"], contents["ema"]]):
        net = build_net(k, args, ranks.device).requires_grad_(False).eval()
        with du.agree_on_errors():
            ckpt.load_trained(net, weights)
        nets.append(net)
    return nets


def others_of(data: Data, split: str) -> list[int]:
    """For each patient of a split another one, whose X-rays to show instead."""
    places = data.split[split]
    return [*places[1:], places[0]] if len(places) > 1 else [data.split["train"][0]]


def sample_new(contents: dict, args: argparse.Namespace, accelerator, ranks: du.Ranks) -> int:
    """--sample: the CT volumes of a folder's X-rays, as NIfTI in HU; where a CT lies beside them, in its place in the
    world and its field of view, else centred, with the mean field of view of the training patients."""
    import nibabel

    folder, nets = Path(args.checkpoint_dir) / "samples", load_nets(contents, args, ranks)
    with du.agree_on_errors():
        patients = xd.find_patients(Path(args.sample), args.num_views, need_ct=False)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: cannot write here ({error.strerror}); choose another folder") from None
    decoded, scheduler, size = (
        make_decoder(args),
        make_scheduler(args),
        args.stage_configs[len(nets) - 1]["volume_size"],
    )
    with du.agree_on_errors(), torch.no_grad():
        for places in du.EvalBatchSampler(len(patients), eval_batch(size), ranks.rank, ranks.world_size):
            xrays = xd.grey(torch.stack([decoded.xrays(patients[p]) for p in places])).to(ranks.device)
            keys = [int(hashlib.sha256(patients[p].id.encode()).hexdigest()[:12], 16) for p in places]
            volumes = sample_cascade(nets, xrays, keys, accelerator, scheduler, args)
            for place, volume in zip(places, volumes[-1], strict=True):
                patient = patients[place]
                if patient.ct is not None:
                    hu, affine = xd.read_ct(patient.ct)
                    factor = np.array(hu.shape) / size
                    grid = affine @ np.diag([*factor, 1.0])
                    grid[:3, 3] += affine[:3, :3] @ ((factor - 1) / 2)  # the first voxel's centre
                else:
                    voxel = np.array(contents["extent"]) / size
                    grid = np.diag([*voxel, 1.0])
                    grid[:3, 3] = -voxel * (np.array(size) - 1) / 2
                values = drr.to_hu(volume[0]).round().to(torch.int16).cpu().numpy()
                image = nibabel.Nifti1Image(values, grid)
                image.header.set_xyzt_units("mm")
                path = folder / f"{patient.id}.nii.gz"
                try:
                    ckpt.write_atomically(path, lambda file, image=image: file.write(gzip.compress(image.to_bytes())))
                except OSError as error:
                    raise RunError(f"{path}: not written ({error.strerror}); make room") from None
    du.print_main(f"{len(patients)} volumes of {' x '.join(map(str, size))}: {folder}")
    return 0


def evaluate_only(contents: dict, used: str, args: argparse.Namespace, accelerator, ranks: du.Ranks) -> int:
    """--eval_only: the test metrics of a checkpoint, printed and written to eval_test.json."""
    nets = load_nets(contents, args, ranks)
    size = args.stage_configs[len(nets) - 1]["volume_size"]
    data = Data(args, [size], ranks)
    data.greys = contents["greys"]
    if seen := sorted(set(data.ids["test"]) & set(contents["trained_patients"])):
        text = f"{used} was trained on {seen[0]} and {len(seen) - 1} more of the {len(data.ids['test'])} test patients"
        raise InputError(f"--dataset_path: {text}; give the run's data and its --split_files or --split_seed")
    others = others_of(data, "test") if args.check_conditioning else None
    test, mean = data.set("test", size), mean_volume(data.set("train", size), ranks)
    options = accelerator, make_scheduler(args), data.greys, args, ranks, others
    metrics, shown = evaluate("test", nets, test, mean, *options)
    if ranks.is_main:
        cm.print_metrics(f"test, {Path(used).name}", "test", metrics)
        folder = Path(args.checkpoint_dir)
        text = json.dumps({**metrics, "step": contents["step"], "stage": len(nets)}, indent=2) + "\n"
        write_result(folder / "eval_test.json", text.encode())
        if shown:
            save_figure(folder / "figures" / "eval_test.png", cm.draw_result(shown, args))
        print(f"{len(test)} patients; written: {folder}/eval_test.json, {folder}/figures/eval_test.png", flush=True)
    return 0


def begin_stage(state: dict, k: int) -> None:
    """Set state to the first step of stage k (from 0)."""
    state |= {"stage": k, "epoch": 0, "samples": 0, "stage_step": 0, "best": None, "best_sha256": None, "saved": None}
    state |= {"plateau": 1.0, "lowest": None, "waiting": 0}


def next_rate(state: dict, loss: float) -> None:
    """Reduce on plateau, as torch's ReduceLROnPlateau(factor=.5, patience=5): the factor goes into state."""
    if state["lowest"] is None or loss < state["lowest"] * (1 - 1e-4):
        state["lowest"], state["waiting"] = loss, 0
    else:
        state["waiting"] += 1
    if state["waiting"] > 5:
        state["plateau"], state["waiting"] = state["plateau"] * 0.5, 0


def fit_stage(
    k: int, earlier: list[StageNet], contents: dict | None, data: Data, state: dict, last_step: int, save_parts,
    accelerator, args: argparse.Namespace, ranks: du.Ranks, log: RunLog, stop: du.StopSignal,
) -> tuple[int, StageNet | None, int]:  # fmt: skip
    """Train stage k from state on; returns (exit code of a signal or 0, its best averaged net, step of that)."""
    stage, folder = args.stage_configs[k], Path(args.checkpoint_dir)
    net = build_net(k, args, ranks.device)
    if earlier and not contents:  # what the X-rays' features are worth was learned before
        net.encoder.load_state_dict(earlier[-1].encoder.state_dict())
    ema = Ema(net, args.ema_decay)
    optimizer, scheduler = make_optimizer(net, args), make_scheduler(args)
    fp16 = args.mixed_precision == "fp16"
    scaler = torch.amp.GradScaler(ranks.device.type, init_scale=2.0**14 if fp16 else 1.0)
    if contents:
        with du.agree_on_errors():
            ckpt.load_trained(net, contents["net"])
            ckpt.load_trained(ema.net, contents["ema"])
        ckpt.restore_optimizer(optimizer, contents["optimizer"], args.weight_decay)
        ckpt.restore_scaler(scaler, contents["scaler"], args.mixed_precision)
        ckpt.restore_rng(contents["rng"])
    # the averaged weights are saved too, and those of the stages before
    ckpt.prepare_checkpoint(net, copies=4 + len(earlier))
    train, val = data.set("train", stage["volume_size"]), data.set("val", stage["volume_size"])
    if args.compile:
        net.compile()
    wrapped = accelerator.prepare_model(net)
    loader = du.create_distributed_dataloader(
        train, stage["batch_size"], seed=args.seed + 1000003 * k, drop_last=False,
        num_workers=0 if args.cache_in_memory else args.num_workers, accumulation=stage["accumulation_steps"],
    )  # fmt: skip
    sampler = loader.batch_sampler
    stage_steps = sampler.steps_per_epoch() * stage["num_epochs"]
    log.context = {"stage": k + 1}
    log.forget_flops()
    for name in ("train/samples_per_s", "train/peak_memory_gb"):  # of the stage before
        log.last.pop(name, None)
    if ranks.device.type == "cuda":  # of this stage, not of those measured or trained before
        torch.cuda.reset_peak_memory_stats(ranks.device)

    def save() -> None:
        where = [state["step"], state["epoch"]]
        if state["saved"] == where:
            return
        state["saved"] = where
        parts = {"format": FORMAT, "net": ckpt.trained_state(net), "ema": ckpt.trained_state(ema.net, everything=True)}
        parts |= {"earlier": [ckpt.trained_state(n, everything=True) for n in earlier], "state": dict(state)}
        parts |= {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict() if fp16 else {}}
        ckpt.save_checkpoint(folder, parts | save_parts(k, log.pending(state["step"])), state["step"], args.keep_last)

    if state["stage_step"] == 0 and k:
        # written down at once: from here on the stage before is done
        save()
    if state["stage_step"] == 0:
        log.figures(lambda: {f"{stage['name']}_inputs": draw_inputs(k, train, scheduler, args, ranks)}, state["step"])
    while True:
        sampler.set_position(state["epoch"], state["samples"])
        log.restart_clock()
        options = state, (last_step, stage_steps), data.greys, args, ranks, log, stop, save
        tools = accelerator, optimizer, scaler, scheduler, loader
        if code := train_one_epoch(k, wrapped, net, ema, *tools, *options):
            return code, None, 0
        save()
        if state["step"] >= last_step or state["stage_step"] >= stage_steps:
            log.write_rest(state["step"], state["epoch"] + 1)
        metrics = validation_loss(k, ema, accelerator, scheduler, val, data.greys, args, ranks)
        log.write(state["step"], state["epoch"] + 1, metrics)
        du.print_main(f"{stage['name']} epoch {state['epoch'] + 1}: val loss {metrics['val/loss']:.4f}")
        names = f"{stage['name']}_best.pt", "best.pt"
        keep_best(folder, state, metrics["val/loss"], state["samples"] >= sampler.used, lower=True, names=names)
        if args.scheduler == "plateau":
            next_rate(state, metrics["val/loss"])
        if state["step"] >= last_step or state["stage_step"] >= stage_steps:
            break
        state["epoch"], state["samples"] = state["epoch"] + 1, 0
    best = ckpt.load_checkpoint(str(folder / f"{stage['name']}_best.pt"), folder, FORMAT)
    ckpt.load_trained(ema.net, best["ema"])
    accelerator.free_memory()
    return 0, ema.net, best["step"]


def stage_steps(k: int, data: Data, args: argparse.Namespace, world_size: int) -> int:
    """Optimizer steps of stage k."""
    stage = args.stage_configs[k]
    effective = stage["batch_size"] * stage["accumulation_steps"] * world_size
    return math.ceil(len(data.split["train"]) / effective) * stage["num_epochs"]


def choose_stages(contents: dict | None, args: argparse.Namespace) -> tuple[int, int, bool]:
    """(first stage to go through, last one, whether the first is begun anew) from --stage and the checkpoint.

    Raises InputError when the stages before are not there.
    """
    names, wanted = [stage["name"] for stage in args.stage_configs], None
    if args.stage:
        if args.stage not in (*names, *map(str, range(1, len(names) + 1))):
            raise InputError(f"--stage {args.stage}: there are 1 to {len(names)} ({', '.join(names)})")
        wanted = names.index(args.stage) if args.stage in names else int(args.stage) - 1
    last = len(args.stage_configs) - 1 if wanted is None else wanted
    if contents is None:
        if wanted:
            text = "the stages before it are not there; train them first, or name one of their checkpoints with "
            raise InputError(f"--stage {args.stage}: {text}--resume_from")
        return 0, last, True
    reached = contents["state"]["stage"]
    if wanted is not None and not reached <= wanted <= reached + 1:
        more = f" or {reached + 2}" if reached + 1 < len(names) else ""
        text = f"the checkpoint is at stage {reached + 1}"
        raise InputError(f"--stage {args.stage}: {text}; go on with --stage {reached + 1}{more}")
    if wanted == reached + 1 and Path(args.resume_from).is_file():  # the user's choice of weights for the stage before
        return wanted, last, True
    return reached, last, False


def run(args: argparse.Namespace, ranks: du.Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun, folder, world_size = time.time(), Path(args.checkpoint_dir), ranks.world_size
    if args.make_drrs:
        du.print_main(f"{xd.make_drrs(Path(args.make_drrs))} pictures rendered below {args.make_drrs}")
        return 0
    with du.agree_on_errors():
        why = choose_precision(args, ranks)
    if len(set(du.gather_objects(args.mixed_precision))) > 1:
        raise InputError("--mixed_precision auto: the GPUs differ; choose fp16 or no")
    if args.source["num_workers"] == "default" and ranks.device.type == "cpu":
        args.num_workers = 0
    if args.eval_only or args.sample:
        used = str(folder / "best.pt") if args.resume_from in (None, "auto") else args.resume_from
        used = str(Path(used) / "best.pt") if Path(used).is_dir() else used
        contents = ckpt.load_checkpoint(used, folder, FORMAT)
        adopt(args, contents, used)
        hw.set_numerics(ranks.device, args.mixed_precision, why, args.deterministic)
        accelerator = make_accelerator(args, ranks)
        if args.sample:
            return sample_new(contents, args, accelerator, ranks)
        return evaluate_only(contents, used, args, accelerator, ranks)

    lock = ckpt.lock_run_folder(folder, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
    contents = ckpt.load_checkpoint(args.resume_from, folder, FORMAT, resume=True)
    state: dict = {"step": 0}
    if contents:
        adopt(args, contents, args.resume_from)
        why = keep_precision(args, contents, why, ranks)
    why = hw.set_numerics(ranks.device, args.mixed_precision, why, args.deterministic)
    accelerator = make_accelerator(args, ranks)
    first, last, anew = choose_stages(contents, args)
    data = Data(args, [stage["volume_size"] for stage in args.stage_configs[: last + 1]], ranks)
    table = plan_stages(first, data.greys, contents.get("split") if contents and not anew else None, args, ranks)
    stages = args.stage_configs
    effective = [stage["batch_size"] * stage["accumulation_steps"] * world_size for stage in stages]
    this_run = {"seed": args.seed, "training_data": data.fingerprint, "effective_batch_size": effective[first]}
    begun_from = ckpt.at_end_of_step(contents, folder) if contents and anew else contents
    earlier: list[StageNet] = []
    if contents:
        ckpt.check_same_run(contents, {name: this_run[name] for name in list(this_run)[: 2 if anew else 3]})
        state = contents["state"] | {"saved": None}
        data.greys = contents["greys"]
        nets = load_nets(contents, args, ranks)
        earlier = nets if anew else nets[:-1]
        del nets
        if anew:
            contents = None
        else:
            contents.need("net", "ema", "optimizer", "scaler", "rng")
    if anew:
        begin_stage(state, first)
    else:
        forget_other_best(folder, state, f"{stages[first]['name']}_best.pt")
    planned = [stage_steps(k, data, args, world_size) for k in range(last + 1)]
    planned[first] = max(planned[first], state["stage_step"])  # begun with more epochs than are asked for now
    if last > first and args.stage and state["stage_step"] < planned[first]:
        text = (
            f"{stages[first]['name']} has done {state['stage_step']} of {planned[first]} steps; leave out --stage, or "
        )
        raise InputError(f"--stage {args.stage}: {text}--resume_from {folder}/{stages[first]['name']}_best.pt")
    last_step = state["step"] - state["stage_step"] + sum(planned[first:])
    last_step = min(args.max_steps or math.inf, last_step)

    origin = args.source
    facts = {
        "launcher": f"{ranks.launcher}, world size {world_size}, {ranks.device}, by Accelerate "
        f"({accelerator.distributed_type.value})",
        "batch": "; ".join(
            f"{s['name']}: {s['batch_size']} per GPU x {s['accumulation_steps']} accumulation x {world_size} = {e}"
            + (f" ({s['fitted']})" if "fitted" in s else "")
            for s, e in zip(stages, effective, strict=True)
        ),
        "learning rate": f"{args.learning_rate:g} ({origin['learning_rate']}), {args.scheduler}, not scaled",
        "precision": f"{args.mixed_precision} ({why})",
        "patients": ", ".join(f"{len(places)} {name}" for name, places in data.split.items())
        + f" ({'split files' if args.split_files else f'split seed {args.split_seed}'})",
        "X-rays": f"{args.num_views} view{'s' * (args.num_views > 1)} at {args.img_size}^2; grey = "
        + "; ".join(
            f"{a:.3f} * line integral {b:+.3f} ({v}, r = {r:.3f})"
            for v, (a, b, r) in zip(drr.VIEWS, data.greys, strict=False)
        ),
        "diffusion": f"{args.num_timesteps} steps, cosine, {'v' if args.v_parameterization else 'noise'} prediction, "
        f"DDIM {args.ddim_steps}, EMA {args.ema_decay:g}",
        "recomputation": describe_recomputation(args),
        "memory": "decoded patients "
        + (
            f"in memory, {data.set('train', stages[last]['volume_size']).bytes() / 2**30:.2f} GB per process"
            if args.cache_in_memory
            else f"on disk in {args.cache_dir}"
        ),
        "loading": f"{0 if args.cache_in_memory else args.num_workers} workers per process",
        "steps": f"{last_step}: " + ", ".join(f"{s['name']} {n}" for s, n in zip(stages, planned, strict=False)),
        "start": f"step {state['step']}, {stages[state['stage']]['name']}, epoch {state['epoch'] + 1}",
        "output": folder,
    }
    log = RunLog(folder, ranks, LOSSES, args, last_step, begun_from)
    if begun_from and anew:
        # what the stage before had not logged yet
        log.context = {"stage": first}
        log.write_rest(state["step"], begun_from["state"]["epoch"] + 1)
    del begun_from
    log.curves = ["val/loss", "val/diffusion_loss", "val/physics_loss"]
    print_banner("X-RAY TO CT CASCADE", facts | log.speed_facts())
    if ranks.is_main:
        print_table("stages", {stage["name"]: row for stage, row in zip(stages, table, strict=True)})
    if args.cache_in_memory and (
        (need := data.set("train", stages[last]["volume_size"]).bytes() / 2**30) > hw.available_ram_gb()
    ):
        du.print_main(
            f"warning: --cache_in_memory takes {need:.1f} GB per process; {hw.available_ram_gb():.1f} are free"
        )

    def save_parts(k: int, pending: dict) -> dict:
        parts = {"run": this_run | {"effective_batch_size": effective[k]}, "log": pending, "greys": data.greys}
        settings = {name: getattr(args, name) for name in (*FIXED, *FIXED_DATA, "mixed_precision")}
        settings["stage_configs"] = asked(args, "stage_configs")
        sizes = [(s["batch_size"], s["accumulation_steps"]) for s in (settings["stage_configs"][k], stages[k])]
        parts["split"] = split_record(*sizes, stages[k].get("recompute", False))
        return parts | {"settings": settings, "extent": data.extent, "trained_patients": data.ids["train"]}

    speed: dict[str, float] = {}
    with du.StopSignal() as stop, contextlib.closing(log):
        say_if_finished(state["step"], last_step, "--num_epochs_per_stage")
        for k in range(first, last + 1):
            tools = accelerator, args, ranks, log, stop
            code, net, best_step = fit_stage(k, earlier, contents, data, state, last_step, save_parts, *tools)
            gc.collect()
            if code:
                return stopped(code, state)
            earlier.append(net)
            contents, size, name = None, stages[k]["volume_size"], stages[k]["name"]
            options = accelerator, make_scheduler(args), data.greys, args, ranks
            mean = mean_volume(data.set("train", size), ranks)
            metrics, shown = evaluate("val", earlier, data.set("val", size), mean, *options, stop=stop)
            if metrics is None:
                return stopped(int(du.reduce_max([stop.code])[0]), state)
            log.write(state["step"], state["epoch"] + 1, metrics)
            if ranks.is_main:
                cm.print_metrics(f"val, {name}", "val", metrics)
            log.figures(lambda n=name, patients=shown: {f"{n}_val": cm.draw_result(patients, args)}, state["step"])
            if "train/samples_per_s" in log.last:
                speed[f"train/samples_per_s_per_gpu/{name}"] = log.last["train/samples_per_s"] / world_size
                speed[f"train/peak_memory_gb/{name}"] = log.last["train/peak_memory_gb"]
            if state["step"] >= last_step:
                break
            begin_stage(state, k + 1)
        others = others_of(data, "test") if args.check_conditioning else None
        metrics, shown = evaluate("test", earlier, data.set("test", size), mean, *options, others, stop)
        if metrics is None:
            return stopped(int(du.reduce_max([stop.code])[0]), state)
        log.write(state["step"], state["epoch"] + 1, metrics | {"best_step": best_step})
        weights = {
            f"{stage['name']}.{key}": value
            for stage, net in zip(stages, earlier, strict=False)
            for key, value in net.state_dict().items()
        }
        ckpt.export_weights(weights, folder / "model.safetensors")
        facts = {"steps": state["step"], "epochs": state["epoch"] + 1, "stages": len(earlier), "world_size": world_size}
        facts |= {"effective_batch_size": effective[len(earlier) - 1], "precision": args.mixed_precision}
        log.finish(facts | speed | {"seconds": round(time.time() - begun, 1)})
        if ranks.is_main:
            cm.print_metrics(f"test, {stages[len(earlier) - 1]['name']}", "test", metrics)
            print_speed(stages, speed, ranks)
        log.figures(lambda: {"test": cm.draw_result(shown, args)}, state["step"])
        du.print_main(f"weights: {folder}/model.safetensors; figures: {folder}/figures; summary: {folder}/summary.json")
    del lock
    return 0


def stopped(code: int, state: dict) -> int:
    say_saved(state["step"])
    return code


def print_speed(stages: list[dict], speed: dict[str, float], ranks: du.Ranks) -> None:
    """Rank 0: throughput and memory of each stage that was trained, beside what the guide aims for."""
    rows = {}
    total = None
    if ranks.device.type == "cuda":
        total = torch.cuda.get_device_properties(ranks.device).total_memory / 2**30
    for name in [stage["name"] for stage in stages]:
        if f"train/samples_per_s_per_gpu/{name}" in speed:
            used, rate = speed[f"train/peak_memory_gb/{name}"], speed[f"train/samples_per_s_per_gpu/{name}"]
            row = {"samples/s/GPU": f"{rate:.2f}", "guide's aim": f"> {GUIDE_RATE}"}
            row |= {
                "memory GB": f"{used:.2f}",
                "share": f"{used / total:.0%}" if total else "-",
                "share's aim": "70-80%",
            }
            rows[name] = row
    if rows:
        print_table("speed", rows)


def rehearse(args: argparse.Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step of each stage, or of --stage; the object is the largest's."""
    import rehearsal_utils as rehearsal

    processes, memory = rehearsal.processes_to_plan_for(args.world_size), rehearsal.memory_to_plan_for(args.gpu_memory)
    wanted = [k for k, stage in enumerate(args.stage_configs) if args.stage in (None, stage["name"], str(k + 1))]
    if not wanted:
        raise InputError(f"--stage {args.stage}: there are 1 to {len(args.stage_configs)}; name one of them")
    reports = []
    for k in wanted:
        stage, trace = args.stage_configs[k], rehearsal.Trace()
        size, accumulation = stage["batch_size"], stage["accumulation_steps"]
        with rehearsal.imaginary_gpu(trace) as ranks:
            precision, _ = hw.choose_precision(args.mixed_precision, ranks.device)
            settings = argparse.Namespace(**{**vars(args), "mixed_precision": precision})
            hw.set_numerics(ranks.device, precision, "", args.deterministic)
            with ranks.device:
                net = build_net(k, settings, ranks.device)
            averaged = Ema(net, args.ema_decay).net
            # the X-rays' grey values are known from the data only, and change no size
            trial = partial(trial_step, net, largest_batch(size, stage, settings), settings, k, [(1.0, 0.0, 1.0)] * 2)
            optimizer = make_optimizer(net, settings)
            step = rehearsal.rehearse_step(trace, net, optimizer, trial, accumulation, processes, averaged)
        title = f"cascade, {stage['name']}, {size} per GPU x {accumulation} accumulation, {precision}"
        reports.append((step.peak, title, step, stage))

    # the largest comes last
    otherwise = "a smaller voxel_dim or token_grid" if args.gradient_checkpointing else "--gradient_checkpointing"
    for _, title, step, stage in sorted(reports, key=lambda report: report[0]):

        def words(samples: int, stage: dict = stage) -> str:
            size, accumulation = hw.smaller_batch(stage["batch_size"], stage["accumulation_steps"], samples)
            if args.stage:
                return batch_flags(size, accumulation)
            return f"in --config, {stage['name']}: batch_size {size} and accumulation_steps {accumulation}"

        rehearsal.report_rehearsal(title, step, stage["batch_size"], memory, words, otherwise)
    rehearsal.end_rehearsal()


def main(args: argparse.Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    du.launch_workers(args.world_size or 1)
    with du.setup_distributed(timeout=args.dist_timeout) as ranks:
        try:
            return run(args, ranks)
        except (RuntimeError, MemoryError) as error:
            if not hw.out_of_memory(error):
                raise
            advice = (
                "try --gradient_checkpointing, or halve the stage's batch_size and double its accumulation_steps in "
            )
            advice += "--config (the same result)" + auto_batch_advice(args.auto_batch, ranks.device)
            du.leave_alone(f"out of memory; {advice}")


if __name__ == "__main__":
    run_main(main, ARGS)
