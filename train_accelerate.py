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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cli_utils import (
    InputError,
    Parser,
    RunError,
    add_common_arguments,
    number,
    parse_arguments,
    run_main,
    seed_number,
    take_from_run,
    value_sources,
    whole,
)

FORMAT = "cascade/1"
LOSSES = ["loss", "diffusion_loss", "physics_loss", "grad_norm", "skipped"]
# noise levels at which each validation patient's loss is taken
LOSS_DRAWS = 4
# noise on the previous stage's volume: up to this in training, and so much in sampling, which hides its mistakes
PREVIOUS_NOISE = 0.1
PREVIOUS_NOISE_SAMPLING = 0.02
# of a torso CT in -1..1, roughly, and of what the stage before lacks
CT_MEAN = -0.75
CT_STD = 0.25
RESIDUAL_STD = 0.06
# most tokens along an axis
TOKEN_GRID = 16
# the guide's table of GB by side, for its batches of 16, 8 and 4, and the throughput per GPU that it aims for
GUIDE_MEMORY_GB = {64: 15, 128: 40, 256: 70}
GUIDE_SAMPLES_PER_S = 10
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
from torch.utils.data import DataLoader

import fixed_order_utils
from accelerate_utils import choose_launched_precision, keep_precision, make_accelerator
from checkpoint_utils import (
    at_end_of_step,
    export_weights,
    load_checkpoint,
    load_trained,
    lock_run_folder,
    prepare_checkpoint,
    trained_state,
)
from distributed_utils import (
    EvalBatchSampler,
    Ranks,
    StopSignal,
    agree_on_errors,
    any_rank,
    create_distributed_dataloader,
    gather_objects,
    launch_workers,
    print_main,
    reduce_max,
    reduce_sum,
    schedule,
    setup_distributed,
    world,
)
from figure_utils import figure_text
from hardware_utils import autocast, available_ram_gb, set_numerics, smaller_batch, split_batch, usable_cores
from hardware_utils import choose_precision as precision_of_device
from logging_utils import RunLog, print_table, save_figure, write_result
from loop_utils import (
    LossScaler,
    Progress,
    TrainingRun,
    agree_on_precision,
    clip_and_step,
    end_epoch,
    end_step,
    explain_out_of_memory,
    finish_run,
    first_error,
    keep_best,
    next_epoch,
    optimizer_steps,
    print_start,
    restore_training,
    resume,
    say_if_finished,
    say_saved,
    say_where,
    sync_gradients,
)
from manifest_utils import write_atomically
from memory_utils import (
    BatchSize,
    auto_batch_advice,
    batch_flags,
    copies_held,
    fit_batch_to_memory,
    fits_by_itself,
    try_step,
)
from tasks.cascade.data import (
    Decoded,
    Patient,
    XrayCtDataset,
    augment,
    check_alignment,
    draw_noise,
    find_patients,
    fit_greys,
    grey,
    make_drrs,
    read_all,
    read_ct,
    split_patients,
)
from tasks.cascade.metrics import (
    PLACES,
    SLICES,
    draw_result,
    draw_rows,
    measure,
    middle_slices,
    print_metrics,
    projection_error,
)
from tasks.cascade.model import StageNet
from tasks.cascade.projector import VIEWS, back_project, normalise, resize, spacing_of, to_hu

# --- patients ---------------------------------------------------------------------------------------------------------


class Data:
    """The patients of a run: their split, the decoder, and what is derived from all of them.

    greys: (a, b, r) of each view, with grey value = a * line integral + b. extent: mean field of view of the training
    patients, mm. ids: of each split's patients.
    """

    def __init__(self, args: argparse.Namespace, sizes: list[list[int]]):
        """All ranks. sizes: the grids that will be needed. Raises InputError."""
        with agree_on_errors():
            self.patients = find_patients(Path(args.dataset_path), args.num_views)
            self.split = split_patients(self.patients, args.split_seed, args.split_files)
        places = sorted(place for part in self.split.values() for place in part)
        chosen = [self.patients[place] for place in places]
        self.decoded = make_decoder(args)

        # a large CT takes 3 GB while it is read, and the processes of a machine share it
        processes = gather_objects(platform.node()).count(platform.node())
        threads = max(1, min(usable_cores(), int(available_ram_gb() / 3)) // processes)
        print_main(f"reading {len(chosen)} patients ...")
        integrals, images, extents = read_all(chosen, self.decoded, sizes, threads)

        # the X-rays must be those of the CTs; how their grey values follow from line integrals is learned from training
        with agree_on_errors():
            if not args.skip_alignment_check:
                check_alignment(chosen, integrals, images)
            train = np.isin(places, self.split["train"])
            self.greys = fit_greys(integrals[train], images[train])
            self.extent = extents[train].mean(0).tolist()
            if any(not abs(a) > 1e-6 for a, *_ in self.greys):
                raise InputError("--dataset_path: the X-rays have nothing to do with the CTs; see --make_drrs")

        self.in_memory = args.cache_in_memory
        self.ids = {name: sorted(self.patients[i].id for i in part) for name, part in self.split.items()}
        self.fingerprint = hashlib.sha256(json.dumps(self.ids, sort_keys=True).encode()).hexdigest()[:12]
        self.sets: dict[tuple, XrayCtDataset] = {}
        self.means: dict[tuple, torch.Tensor] = {}

    def set(self, split: str, size: list[int]) -> XrayCtDataset:
        """One split on one grid. Those of another grid, of the stage before, are let go."""
        grid = tuple(size)
        if (split, grid) not in self.sets:
            self.sets = {key: dataset for key, dataset in self.sets.items() if key[1] == grid}
            places = self.split[split]
            self.sets[split, grid] = XrayCtDataset(self.patients, places, self.decoded, size, self.in_memory)
        return self.sets[split, grid]

    def mean_volume(self, size: list[int]) -> torch.Tensor:
        """All ranks: (1, 1, X, Y, Z) on the CPU, the mean of the training patients, which is the first baseline."""
        grid = tuple(size)
        if grid not in self.means:
            self.means = {grid: mean_of_volumes(self.set("train", size))}
        return self.means[grid]


def mean_of_volumes(dataset: XrayCtDataset) -> torch.Tensor:
    """All ranks: (1, 1, X, Y, Z) on the CPU, the mean volume of some patients. Raises InputError."""
    rank, world_size = world()
    total = torch.zeros(dataset.size, dtype=torch.float64)
    with agree_on_errors():
        for place in range(rank, len(dataset), world_size):
            item = dataset[place]
            if item["error"]:
                raise InputError(item["error"])
            total += normalise(item["volume"].double())
    return (reduce_sum(total) / len(dataset)).float()[None, None]


def make_decoder(args: argparse.Namespace) -> Decoded:
    """What reads a patient's files, turned as the flags say."""
    horizontal = [args.flip_drrs_horizontal in (view, "both") for view in VIEWS]
    return Decoded(args.img_size, (args.flip_drrs_vertical, *horizontal), args.cache_dir)


def loading_workers(args: argparse.Namespace, device: torch.device) -> int:
    """Loading processes beside each process: none where the patients are in memory, nor by default on a CPU."""
    unasked_on_cpu = args.source["num_workers"] == "default" and device.type == "cpu"
    return 0 if args.cache_in_memory or unasked_on_cpu else args.num_workers


# --- model and noise schedule -----------------------------------------------------------------------------------------


def build_model(k: int, args: argparse.Namespace, device: torch.device) -> StageNet:
    """The model of stage k (from 0) with the same random weights on every rank."""
    seed = args.seed * 1000003 + k
    # torch takes 64 bits
    torch.manual_seed(seed if -(2**63) <= seed < 2**64 else seed % 2**63)
    stage = args.stage_configs[k]
    model = StageNet(stage, args, k == 0, halvings(stage["volume_size"], stage["token_grid"]))
    model.checkpointing = bool(args.gradient_checkpointing)
    for module in model.modules():
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            module.to(memory_format=torch.channels_last_3d)
    return model.to(device)


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
    return draw_noise(shape, device, seeds)


def predict(
    model: nn.Module, scheduler, noisy: torch.Tensor, timestep: torch.Tensor, xrays: torch.Tensor, previous, args
) -> tuple[torch.Tensor, torch.Tensor]:
    """(v or noise as the scheduler expects it, clean volume), both (B, 1, X, Y, Z) fp32, at timesteps (B,).

    The model sees inputs of unit variance and predicts, in unit variance, what a linear estimate from the noisy volume
    leaves of the clean one (Karras et al. 2022, here for v). The estimate's prior is the volume of the stage before;
    in the first stage a uniform one. So the model need not learn to copy its inputs, which are nearly right.
    """
    signal = scheduler.alphas_cumprod.to(noisy.device)[timestep][:, None, None, None, None]
    signal_scale = signal.sqrt()
    noise_scale = (1 - signal).sqrt()

    # the prior of the clean volume, and what the model is given of it
    mean = CT_MEAN
    std = CT_STD
    given = ()
    if previous:
        volume, level = previous
        mean = fixed_order_utils.interpolate(volume, noisy.shape[2:])
        std = RESIDUAL_STD
        given = ((mean - CT_MEAN) / CT_STD, level)

    # the linear estimate, and what the model adds to it
    deviation = (signal * std**2 + noise_scale**2).sqrt()
    centred = noisy - signal_scale * mean
    output = model(centred / deviation, (timestep + 1) / args.num_timesteps, xrays, *given)
    clean = mean + signal_scale * (std / deviation) ** 2 * centred + std * noise_scale / deviation * output
    if args.v_parameterization:
        return (signal_scale * noisy - clean) / noise_scale, clean
    return (noisy - signal_scale * clean) / noise_scale, clean


def sample_losses(
    model: nn.Module, scheduler, batch: dict, timestep: torch.Tensor, noise: torch.Tensor, previous, args, greys
) -> tuple[torch.Tensor, torch.Tensor]:
    """(diffusion loss, physics loss) of each patient, (B,) fp32.

    The first is the mean square error of v or of the noise. The second compares the projections of the clean volume
    that the model implies with the X-rays; at high noise levels that volume is a guess, so each patient counts by its
    share of signal, alpha_bar(t).
    """
    volume = batch["volume"]
    noisy = scheduler.add_noise(volume, noise, timestep)
    output, clean = predict(model, scheduler, noisy, timestep, batch["seen"], previous, args)
    target = scheduler.get_velocity(volume, noise, timestep) if args.v_parameterization else noise
    diffusion = (output - target).square().mean((1, 2, 3, 4))
    physics = projection_error(clean, batch["extent"], batch["xrays"], greys).mean(1)
    return diffusion, scheduler.alphas_cumprod.to(volume.device)[timestep] * physics


def prepare(batch: dict, args, device: torch.device, stage: int, epoch: int | None) -> dict:
    """A batch on the device: volume (B, 1, X, Y, Z), xrays and seen (B, views, H, W) in -1..1, and extent (B, 3) mm.

    xrays: projections of the volume. seen: those that the model gets, of varied exposure. epoch: for augmentation;
    None in evaluations, which have none.
    """
    volume = normalise(batch["volume"].to(device, non_blocking=True).float())[:, None]
    xrays = grey(batch["xrays"].to(device, non_blocking=True))
    seen = xrays
    if args.augmentation and epoch is not None:
        key = args.seed + 1000003 * (stage + 1)
        volume, xrays, seen = augment(volume, xrays, batch["index"].tolist(), key, epoch)
    extent = batch["extent"].to(device, non_blocking=True)
    return {"volume": volume, "xrays": xrays, "seen": seen, "extent": extent, "index": batch["index"].tolist()}


def noised_previous(volume: torch.Tensor, k: int, levels: list[float], keys: list[tuple], args):
    """(volume of the stage before, its noise level) for stage k, made from the true volume; None for the first stage.

    This is the noise-conditioning augmentation of Ho et al. 2022.
    """
    if k == 0:
        return None
    low = resize(volume, args.stage_configs[k - 1]["volume_size"])
    grain = noise_like(low.shape[1:], low.device, keys)
    level = on_device(levels, low.device)
    return low + level[:, None, None, None, None] * grain, level


def training_draw(batch: dict, k: int, epoch: int, args) -> tuple:
    """(timestep, noise, previous) of each patient of a batch: a function of (seed, stage, epoch, patient)."""
    volume = batch["volume"]
    times: list[int] = []
    levels: list[float] = []
    keys: list[tuple] = []
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
    """Averaged weights in a model of their own; the decay grows with the steps, min(decay, (1 + n) / (10 + n))."""

    def __init__(self, model: StageNet, decay: float):
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.model.checkpointing = False
        self.decay = decay

    @torch.no_grad()
    def update(self, model: StageNet, steps: int) -> None:
        """Move towards the weights after so many steps."""
        decay = min(self.decay, (1 + steps) / (10 + steps))
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - decay)


class Learner(NamedTuple):
    """What learns in one stage. wrapped: the model, in DDP where there are several processes."""

    model: StageNet
    wrapped: nn.Module
    averaged: Ema
    optimizer: torch.optim.AdamW
    scaler: LossScaler


@dataclass
class StageProgress(Progress):
    """Progress of the cascade: `step` counts over all stages; `epoch`, `samples` and `best` belong to the stage.

    stage: from 0. stage_step: optimizer steps of the stage done. plateau: factor on the learning rate. lowest: lowest
    validation loss so far. waiting: epochs since.
    """

    stage: int = 0
    stage_step: int = 0
    plateau: float = 1.0
    lowest: float | None = None
    waiting: int = 0


def make_optimizer(model: StageNet, args: argparse.Namespace) -> torch.optim.AdamW:
    """Fused AdamW over one stage's model, which alone learns."""
    return torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)


def train_one_epoch(
    k: int, learner: Learner, loader: DataLoader, training: TrainingRun, data: Data, args: argparse.Namespace
) -> None:
    """Train stage k from the run's position to the end of the epoch, of the stage or the run, or to a stop signal.

    Between log lines nothing is read back from the GPU. Raises InputError on all ranks for an unusable file of any.
    """
    # 1 x 1 x 1 kernels have two memory layouts at once
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    learner.model.train()
    device = learner.model.position.device
    world_size = world()[1]
    progress = training.progress
    scaler = learner.scaler
    scheduler = make_scheduler(args)
    physics_weight = args.stage_configs[k]["physics_weight"]
    lr_schedule = "constant" if args.scheduler == "plateau" else args.scheduler
    for step in optimizer_steps(loader, training):
        factor = schedule(progress.stage_step, training.planned_steps, args.warmup_steps, lr_schedule)
        lr = args.learning_rate * progress.plateau * factor

        # forward and backward: each micro-batch gives its share of the mean over the global batch
        losses = torch.zeros(3, device=device)
        for batch, last in step.micro_batches():
            batch = prepare(batch, args, device, k, progress.epoch)
            timestep, noise, previous = training_draw(batch, k, progress.epoch, args)
            with training.log.count_flops(step.samples), sync_gradients(learner.wrapped, now=last):
                with autocast(device, scaler.precision):
                    parts = sample_losses(
                        learner.wrapped, scheduler, batch, timestep, noise, previous, args, data.greys
                    )
                diffusion, physics = (part.sum() * (step.weight / step.samples) for part in parts)
                loss = diffusion + physics_weight * physics
                # DDP averages over the ranks; these are shares of a sum, so undo the division
                scaler.scale(loss * world_size).backward()
            losses += torch.stack([loss, diffusion, physics]).detach()

        # update the weights and their average; a non-finite gradient skips the step on all ranks together
        grad_norm = clip_and_step(learner.optimizer, scaler, args.grad_clip, lr)
        progress.stage_step += 1
        learner.averaged.update(learner.model, progress.stage_step)
        end_step(training, step, losses, grad_norm, lr)


# --- evaluation -------------------------------------------------------------------------------------------------------


def eval_batches(
    dataset: XrayCtDataset, k: int, args: argparse.Namespace, device: torch.device
) -> Iterator[tuple[list[int], dict]]:
    """(places in the data set, prepared batch) of this rank's share. Raises InputError on this rank for a bad file."""
    workers = loading_workers(args, device)
    loader = create_distributed_dataloader(dataset, eval_batch(dataset.size), train=False, num_workers=workers)
    for places, batch in zip(loader.batch_sampler, loader, strict=True):
        if error := first_error([batch]):
            raise InputError(error)
        yield places, prepare(batch, args, device, k, None)


def validation_draw(batch: dict, places: list[int], k: int, draw: int, args: argparse.Namespace) -> tuple:
    """(timestep, noise, previous) of each patient of a batch, for one of LOSS_DRAWS noise levels.

    The noise levels are spread evenly over the draws and the patients.
    """
    volume = batch["volume"]
    keys = [(args.seed, 2, k, draw, index) for index in batch["index"]]
    shares = [(draw + place * 0.618034 % 1) / LOSS_DRAWS for place in places]
    timestep = on_device([int(share * args.num_timesteps) for share in shares], volume.device)
    noise = noise_like(volume.shape[1:], volume.device, [(*key, 1) for key in keys])
    levels = [PREVIOUS_NOISE_SAMPLING] * len(keys)
    return timestep, noise, noised_previous(volume, k, levels, [(*key, 2) for key in keys], args)


@torch.no_grad()
def validation_loss(k: int, model: StageNet, data: Data, precision: str, args: argparse.Namespace) -> dict[str, float]:
    """val/loss and its parts at fixed noise, the same on all ranks and for any number of them. Raises RunError."""
    dataset = data.set("val", args.stage_configs[k]["volume_size"])
    device = model.position.device
    scheduler = make_scheduler(args)
    table = torch.zeros(len(dataset), 2, dtype=torch.float64)
    with agree_on_errors():
        for places, batch in eval_batches(dataset, k, args, device):
            for draw in range(LOSS_DRAWS):
                timestep, noise, previous = validation_draw(batch, places, k, draw, args)
                with autocast(device, precision):
                    losses = sample_losses(model, scheduler, batch, timestep, noise, previous, args, data.greys)
                table[places] += torch.stack(losses, 1).double().cpu() / LOSS_DRAWS

    diffusion, physics = reduce_sum(table).mean(0).tolist()
    loss = diffusion + args.stage_configs[k]["physics_weight"] * physics
    if not math.isfinite(loss):
        raise RunError("the validation loss is not finite; lower --learning_rate")
    return {"val/loss": loss, "val/diffusion_loss": diffusion, "val/physics_loss": physics}


@torch.no_grad()
def sample_cascade(
    models: list[StageNet],
    xrays: torch.Tensor,
    indices: list[int],
    scheduler,
    precision: str,
    args: argparse.Namespace,
    zeroed: bool = False,
) -> list[torch.Tensor]:
    """The volumes (B, 1, X, Y, Z) of every stage, sampled from noise by DDIM (Song et al. 2021).

    Each stage starts from the volume that the one before sampled. xrays: (B, views, H, W) in -1..1. The noise is a
    function of (seed, stage, index). zeroed: the last stage gets zeros for the volume before, to see what that does.
    """
    volumes: list[torch.Tensor] = []
    device = xrays.device
    for k, model in enumerate(models):
        size = (1, *args.stage_configs[k]["volume_size"])
        x = noise_like(size, device, [(args.seed, 3, k, index) for index in indices])

        # the volume of the stage before, with a little noise that hides what it got wrong
        previous = None
        if k:
            last = torch.zeros_like(volumes[-1]) if zeroed and k == len(models) - 1 else volumes[-1]
            grain = noise_like(last.shape[1:], device, [(args.seed, 4, k, index) for index in indices])
            level = torch.full((len(indices),), PREVIOUS_NOISE_SAMPLING, device=device)
            previous = last + PREVIOUS_NOISE_SAMPLING * grain, level

        # from noise to a volume
        for timestep in scheduler.timesteps.tolist():
            now = torch.full((len(indices),), timestep, device=device)
            with autocast(device, precision):
                output, _ = predict(model, scheduler, x, now, xrays, previous, args)
            x, _ = scheduler.step(output, timestep, x)
        volumes.append(x.clamp(-1, 1))
    return volumes


def back_projection(batch: dict, greys: list, size: tuple[int, ...]) -> torch.Tensor:
    """(B, 1, X, Y, Z): the X-rays of a batch smeared back along their rays, the second baseline."""
    integrals = [(batch["xrays"][:, v : v + 1] - b) / a for v, (a, b, _) in enumerate(greys)]
    return back_project(integrals, spacing_of(batch["extent"], size), size)


def others_of(data: Data, split: str) -> list[int]:
    """For each patient of a split another one, whose X-rays to show instead."""
    places = data.split[split]
    return [*places[1:], places[0]] if len(places) > 1 else [data.split["train"][0]]


def conditioning_scores(
    models: list[StageNet], batch: dict, other_xrays: torch.Tensor, scheduler, greys: list, precision: str, args
) -> torch.Tensor:
    """--check_conditioning: (B, 2) float64, the PSNR with another patient's X-rays, and with the stage before zeroed.

    The second is 0 in the first stage, which has none before it.
    """
    scores = torch.zeros(len(batch["index"]), 2, dtype=torch.float64)
    volumes = sample_cascade(models, other_xrays, batch["index"], scheduler, precision, args)
    scores[:, 0] = measure(volumes[-1], batch, greys)[:, 0]
    if len(models) > 1:
        volumes = sample_cascade(models, batch["xrays"], batch["index"], scheduler, precision, args, zeroed=True)
        scores[:, 1] = measure(volumes[-1], batch, greys)[:, 0]
    return scores


@torch.no_grad()
def evaluate(
    split: str,
    models: list[StageNet],
    data: Data,
    precision: str,
    args: argparse.Namespace,
    stop: StopSignal | None = None,
) -> tuple[dict[str, float] | None, dict]:
    """(metrics, {"volumes", "batch" ...} of the first patient for a figure) of the cascade up to the last of `models`.

    Each patient once, however many ranks there are; all ranks return the same metrics. stop: on a signal to any rank
    all leave, with None for the metrics.
    """
    k = len(models) - 1
    device = models[-1].position.device
    size = args.stage_configs[k]["volume_size"]
    dataset = data.set(split, size)
    mean = data.mean_volume(size).to(device)
    scheduler = make_scheduler(args)
    others = others_of(data, split) if args.check_conditioning and split == "test" else None

    # a row for each patient: the scores of the cascade and of both baselines, and --check_conditioning's two
    names = score_names(split, args)
    table = torch.zeros(len(dataset), len(names), dtype=torch.float64)
    shown = {}
    with agree_on_errors():
        for places, batch in eval_batches(dataset, k, args, device):
            if stop and stop.code:
                break
            volumes = sample_cascade(models, batch["xrays"], batch["index"], scheduler, precision, args)
            back = back_projection(batch, data.greys, dataset.size)
            scores = [measure(volume, batch, data.greys) for volume in (volumes[-1], mean.expand_as(back), back)]
            checks = torch.zeros(len(places), 2, dtype=torch.float64)
            if others is not None:
                other_xrays = torch.stack([data.decoded.xrays(data.patients[others[place]]) for place in places])
                other_xrays = grey(other_xrays).to(device)
                checks = conditioning_scores(models, batch, other_xrays, scheduler, data.greys, precision, args)
            table[places] = torch.cat([*scores, checks], 1)
            if 0 in places:
                shown = {"volumes": [volume[:1] for volume in volumes], "batch": batch, "back": back[:1], "mean": mean}

    if stop and any_rank(bool(stop.code)):
        return None, {}
    metrics = dict(zip(names, reduce_sum(table).mean(0).tolist(), strict=True))
    if others is None:
        del metrics[f"{split}/psnr_other_patient"]
    if others is None or k == 0:
        del metrics[f"{split}/psnr_previous_zeroed"]
    return metrics, shown


def score_names(split: str, args: argparse.Namespace) -> list[str]:
    """The names of an evaluation's numbers, in the order in which `evaluate` puts them together."""
    scores = ["psnr", "ssim", "mae_hu", *(f"projection_error_{view}" for view in VIEWS[: args.num_views])]
    kinds = ("", "_mean_volume", "_backprojection")
    names = [f"{score}{kind}" for kind in kinds for score in scores]
    return [f"{split}/{name}" for name in (*names, "psnr_other_patient", "psnr_previous_zeroed")]


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_inputs(k: int, data: Data, args: argparse.Namespace, device: torch.device):
    """What the model of stage k is given in training: the first patients of the first epoch."""
    from torch.utils.data import default_collate

    dataset = data.set("train", args.stage_configs[k]["volume_size"])
    items = [dataset[place] for place in range(min(2, len(dataset)))]
    batch = prepare(default_collate(items), args, device, k, 0)
    timestep, noise, previous = training_draw(batch, k, 0, args)
    noisy = make_scheduler(args).add_noise(batch["volume"], noise, timestep)

    # for each patient what goes in, and what is to come out
    rows = []
    for i, index in enumerate(batch["index"]):
        name = figure_text(data.patients[index].id, 16)
        noisy_slices = middle_slices(noisy[i, 0])
        rows.append((f"input: noisy CT\nt = {int(timestep[i])}", [*noisy_slices, *batch["seen"][i].cpu().numpy()]))
        if previous:
            slices = middle_slices(previous[0][i, 0])
            rows.append((f"input: stage before\nnoise {float(previous[1][i]):.2f}", slices))
        rows.append((f"target: CT of\n{name}", middle_slices(batch["volume"][i, 0])))

    columns = [*SLICES, *(f"input X-ray, {PLACES[view]}" for view in VIEWS[: args.num_views])]
    name = figure_text(args.stage_configs[k]["name"])
    return draw_rows(f"{name}: what the net is given in training (t of {args.num_timesteps})", columns, rows)


# --- the run ----------------------------------------------------------------------------------------------------------


def adopt(args: argparse.Namespace, checkpoint: dict, path: str) -> None:
    """Take what a checkpoint prescribes. Raises InputError where a flag or the config says otherwise."""
    settings = checkpoint["settings"]
    if args.source["seed"] == "default":
        args.seed = checkpoint["run"]["seed"]
    for name in (*FIXED, *FIXED_DATA):
        given = args.source[name] != "default"
        # how the new images lie, not those of the training
        if args.sample and name.startswith("flip") and given:
            continue
        if given and getattr(args, name) != settings[name]:
            raise InputError(f"{path}: a run with --{name} {settings[name]}, now {getattr(args, name)}; leave it out")
        setattr(args, name, settings[name])

    # steps of sampling that fit to those of the training
    if args.num_timesteps % args.ddim_steps:
        if args.source["ddim_steps"] != "default":
            raise InputError(f"--ddim_steps {args.ddim_steps}: must divide the {args.num_timesteps} steps of {path}")
        args.ddim_steps = next(n for n in range(args.ddim_steps, 0, -1) if args.num_timesteps % n == 0)

    if args.source["stage_configs"] == "default":
        adopt_stages(args, settings["stage_configs"])
    else:
        check_stages(args, settings["stage_configs"], checkpoint["state"]["stage"], path)


def adopt_stages(args: argparse.Namespace, saved: list[dict]) -> None:
    """Take a checkpoint's stages, but for what the command line says of all of them."""
    given = {key: getattr(args, flag) for key, flag in OPTIONAL.items() if args.source[flag] == "command line"}
    if args.physics_weight is not None:
        given["physics_weight"] = args.physics_weight
    args.stage_configs = saved
    for stage in args.stage_configs:
        stage |= given


def check_stages(args: argparse.Namespace, saved: list[dict], reached: int, path: str) -> None:
    """Raises InputError where the config's stages, up to the one reached, are not a checkpoint's."""
    if len(args.stage_configs) <= reached:
        raise InputError(f"{path}: is at stage {reached + 1} of a cascade, the config has {len(args.stage_configs)}")
    for k in range(reached + 1):
        for name in FIXED_STAGE:
            before, now = saved[k][name], args.stage_configs[k][name]
            if before != now:
                raise InputError(f"{path}: stage {k + 1} was trained with {name} {before}, now {now}; set it back")


def load_models(checkpoint: dict, args: argparse.Namespace, device: torch.device) -> list[StageNet]:
    """The averaged models of every stage that a checkpoint holds, for evaluation."""
    models = []
    for k, weights in enumerate([*checkpoint["earlier"], checkpoint["ema"]]):
        model = build_model(k, args, device).requires_grad_(False).eval()
        with agree_on_errors():
            load_trained(model, weights)
        models.append(model)
    return models


# --- the run: a trained cascade ---------------------------------------------------------------------------------------


def use_checkpoint(precision: str, why: str, args: argparse.Namespace, ranks: Ranks) -> None:
    """--eval_only and --sample: what a trained cascade does. why: the reason for the precision."""
    run_folder = Path(args.checkpoint_dir)
    used = str(run_folder / "best.pt") if args.resume_from in (None, "auto") else args.resume_from
    used = str(Path(used) / "best.pt") if Path(used).is_dir() else used
    checkpoint = load_checkpoint(used, run_folder, FORMAT)
    adopt(args, checkpoint, used)
    set_numerics(ranks.device, precision, why, args.deterministic)
    # an `accelerate config` that is of no use here is refused, as in training
    make_accelerator(precision, args.gradient_accumulation_steps, ranks)
    if args.sample:
        sample_new(checkpoint, precision, args, ranks.device)
    else:
        evaluate_only(checkpoint, used, precision, args, ranks.device)


def sample_new(checkpoint: dict, precision: str, args: argparse.Namespace, device: torch.device) -> None:
    """--sample: the CT volumes of a folder's X-rays, as NIfTI in HU, in `samples` of the run folder."""
    samples_folder = Path(args.checkpoint_dir) / "samples"
    models = load_models(checkpoint, args, device)
    with agree_on_errors():
        patients = find_patients(Path(args.sample), args.num_views, need_ct=False)
        try:
            samples_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{samples_folder}: cannot write here ({error.strerror}); choose another folder") from None

    decoded = make_decoder(args)
    scheduler = make_scheduler(args)
    size = args.stage_configs[len(models) - 1]["volume_size"]
    rank, world_size = world()
    with agree_on_errors(), torch.no_grad():
        for places in EvalBatchSampler(len(patients), eval_batch(size), rank, world_size):
            chosen = [patients[place] for place in places]
            xrays = grey(torch.stack([decoded.xrays(patient) for patient in chosen])).to(device)
            # the noise is a function of the patient's name
            keys = [int(hashlib.sha256(patient.id.encode()).hexdigest()[:12], 16) for patient in chosen]
            volumes = sample_cascade(models, xrays, keys, scheduler, precision, args)[-1]
            for patient, volume in zip(chosen, volumes, strict=True):
                path = samples_folder / f"{patient.id}.nii.gz"
                write_volume(path, volume[0], grid_of(patient, size, checkpoint["extent"]))
    print_main(f"{len(patients)} volumes of {' x '.join(map(str, size))}: {samples_folder}")


def grid_of(patient: Patient, size: list[int], extent: list[float]) -> np.ndarray:
    """(4, 4) from voxels to mm: the place and field of view of the CT beside the X-rays; else `extent`, centred."""
    if patient.ct is None:
        voxel = np.array(extent) / size
        grid = np.diag([*voxel, 1.0])
        grid[:3, 3] = -voxel * (np.array(size) - 1) / 2
        return grid
    hu, affine = read_ct(patient.ct)
    factor = np.array(hu.shape) / size
    grid = affine @ np.diag([*factor, 1.0])
    # the first voxel's centre
    grid[:3, 3] += affine[:3, :3] @ ((factor - 1) / 2)
    return grid


def write_volume(path: Path, volume: torch.Tensor, grid: np.ndarray) -> None:
    """A volume (X, Y, Z) in -1..1 as NIfTI in HU. Raises RunError on a full disk."""
    import nibabel

    values = to_hu(volume).round().to(torch.int16).cpu().numpy()
    image = nibabel.Nifti1Image(values, grid)
    image.header.set_xyzt_units("mm")
    try:
        write_atomically(path, lambda file: file.write(gzip.compress(image.to_bytes())))
    except OSError as error:
        raise RunError(f"{path}: not written ({error.strerror}); make room") from None


def evaluate_only(checkpoint: dict, used: str, precision: str, args: argparse.Namespace, device: torch.device) -> None:
    """--eval_only: the test metrics of a checkpoint, printed and written to eval_test.json."""
    models = load_models(checkpoint, args, device)
    data = Data(args, [args.stage_configs[len(models) - 1]["volume_size"]])
    data.greys = checkpoint["greys"]
    patients = data.ids["test"]
    if seen := sorted(set(patients) & set(checkpoint["trained_patients"])):
        reason = f"{used} was trained on {seen[0]} and {len(seen) - 1} more of the {len(patients)} test patients"
        raise InputError(f"--dataset_path: {reason}; give the run's data and its --split_files or --split_seed")

    metrics, shown = evaluate("test", models, data, precision, args)
    if world()[0] == 0:
        print_metrics(f"test, {Path(used).name}", "test", metrics)
        run_folder = Path(args.checkpoint_dir)
        text = json.dumps({**metrics, "step": checkpoint["step"], "stage": len(models)}, indent=2) + "\n"
        write_result(run_folder / "eval_test.json", text.encode())
        if shown:
            save_figure(run_folder / "figures" / "eval_test.png", draw_result(shown, args))
        written = f"{run_folder}/eval_test.json, {run_folder}/figures/eval_test.png"
        print(f"{len(patients)} patients; written: {written}", flush=True)


# --- the run: what each stage takes -----------------------------------------------------------------------------------


class StagePlan(NamedTuple):
    """How one stage is trained.

    number: from 0. config: its entry of --stage_configs. steps: optimizer steps in all. parameters, memory: of its
    model, and GiB of one training step; None where they were not measured.
    """

    number: int
    config: dict
    batch: BatchSize
    steps: int = 0
    parameters: int | None = None
    memory: float | None = None

    @property
    def name(self) -> str:
        """Also the first part of its best checkpoint's name."""
        return self.config["name"]

    @property
    def effective_batch_size(self) -> int:
        """Patients of an optimizer step, over all processes."""
        return self.batch.size * self.batch.accumulation * world()[1]


def plan_as_asked(k: int, args: argparse.Namespace) -> StagePlan:
    """Stage k with the batch of the flags or of the config."""
    config = args.stage_configs[k]
    recomputed = bool(args.gradient_checkpointing)
    return StagePlan(k, config, BatchSize(config["batch_size"], config["accumulation_steps"], "", recomputed))


def plan_stages(
    first: int, data: Data, checkpoint: dict | None, precision: str, args: argparse.Namespace, device: torch.device
) -> list[StagePlan]:
    """All ranks: every stage, from `first` on measured, and its batch fitted to memory where that is asked for.

    checkpoint: where the first one is resumed in its middle. Raises RunError when one does not fit.
    """
    plan = []
    for k in range(len(args.stage_configs)):
        stage = plan_as_asked(k, args)
        if k >= first:
            resumed = checkpoint if k == first else None
            stage = measure_stage(stage, data.greys, resumed, precision, args, device)
        steps_per_epoch = math.ceil(len(data.split["train"]) / stage.effective_batch_size)
        plan.append(stage._replace(steps=steps_per_epoch * stage.config["num_epochs"]))
    return plan


def largest_batch(batch_size: int, stage: dict, args: argparse.Namespace) -> dict:
    """A made-up batch, on the host, of a stage's patients."""
    volume = torch.zeros(batch_size, *stage["volume_size"], dtype=torch.int16)
    xrays = torch.zeros(batch_size, args.num_views, args.img_size, args.img_size, dtype=torch.int16)
    batch = {"volume": volume, "xrays": xrays, "extent": torch.ones(batch_size, 3)}
    return batch | {"index": torch.arange(batch_size), "error": [""] * batch_size}


def trial_step(model: StageNet, batch: dict, k: int, greys: list, precision: str, args: argparse.Namespace) -> None:
    """Forward and backward pass of one micro-batch of stage k, as in training; the gradients stay in the model."""
    device = model.position.device
    batch = prepare(batch, args, device, k, 0)
    timestep, noise, previous = training_draw(batch, k, 0, args)
    with autocast(device, precision):
        losses = sample_losses(model.train(), make_scheduler(args), batch, timestep, noise, previous, args, greys)
    diffusion, physics = (part.mean() for part in losses)
    (diffusion + args.stage_configs[k]["physics_weight"] * physics).backward()


@contextlib.contextmanager
def count_saved_tensors(kept: dict[int, int]) -> Iterator[None]:
    """Inside, {address: bytes} of what autograd keeps for the backward pass."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        yield


def measure_stage(
    stage: StagePlan, greys: list, checkpoint: dict | None, precision: str, args: argparse.Namespace, device
) -> StagePlan:
    """All ranks: the stage with the memory of one training step on made-up data, and with a batch that fits.

    The memory is on a GPU what torch reserved at most. On a CPU it is the sum of weights, gradients, AdamW's moments,
    averaged weights and the activations kept for the backward pass; None for sizes that would take a CPU minutes.
    Raises RunError when the stage does not fit.
    """
    on_gpu = device.type == "cuda"
    fits = fits_by_itself(args.auto_batch, device)
    model = build_model(stage.number, args, device)
    stage = stage._replace(parameters=sum(parameter.numel() for parameter in model.parameters()))
    voxels = stage.batch.size * math.prod(stage.config["volume_size"])
    if not on_gpu and not fits and voxels > 8 * 64**3:
        return stage
    kept: dict[int, int] = {}

    def try_once(size: int) -> None:
        batch = largest_batch(size, stage.config, args)
        with contextlib.nullcontext() if on_gpu else count_saved_tensors(kept):
            trial_step(model, batch, stage.number, greys, precision, args)

    # one more copy than in the other scripts: the averaged weights
    copies = copies_held() + 1
    if fits:
        stage = stage._replace(batch=fit_stage_batch(stage, model, try_once, copies, checkpoint, args))
        peak = stage.batch.peak_gib
    else:
        trial = try_step(partial(try_once, stage.batch.size), model, copies, passes=2 if on_gpu else 1)
        failed, peak = reduce_max([bool(trial.error), (trial.peak or 0) / 2**30]).tolist()
        if failed:
            raise RunError(f"out of memory in {stage.name} {smaller_stage_advice(stage, args, device)}")

    # fp32: weights, gradients, averaged weights, and two moments
    if not on_gpu:
        peak = (sum(kept.values()) + 4 * 5 * stage.parameters) / 2**30
    return stage._replace(memory=float(reduce_max([peak])[0]))


def fit_stage_batch(
    stage: StagePlan,
    model: StageNet,
    try_once: Callable[[int], None],
    copies: float,
    checkpoint: dict | None,
    args: argparse.Namespace,
) -> BatchSize:
    """All ranks: a stage's batch that fits into memory, with recomputation where no flag decided."""
    undecided = args.gradient_checkpointing is None
    recompute = partial(setattr, model, "checkpointing", True) if undecided else None
    advice = f"pass {'' if undecided else '--gradient_checkpointing or '}a smaller voxel_dim or token_grid"

    def words(size: int, accumulation: int) -> str:
        return f"{stage.name}: batch_size {size} and accumulation_steps {accumulation}"

    return fit_batch_to_memory(
        try_once, model, stage.batch, words, advice, copies=copies, recompute=recompute, checkpoint=checkpoint
    )


def smaller_stage_advice(stage: StagePlan, args: argparse.Namespace, device: torch.device) -> str:
    """The batch at which a stage ran out of memory, and what to change."""
    size, accumulation = split_batch(stage.batch.size, stage.batch.accumulation)
    smaller = f"batch_size {size} and accumulation_steps {accumulation} for this stage in --config (the same result), "
    otherwise = "a smaller voxel_dim or token_grid" if args.gradient_checkpointing else "--gradient_checkpointing"
    advice = f"try {smaller if stage.batch.size > 1 else ''}{otherwise}"
    return f"at batch_size {stage.batch.size} per GPU; {advice}{auto_batch_advice(args.auto_batch, device)}"


def describe_recomputation(plan: list[StagePlan], args: argparse.Namespace) -> str:
    """For the banner: where activations are recomputed, and why."""
    if args.gradient_checkpointing is not None:
        return f"{'on' if args.gradient_checkpointing else 'off'} ({args.source['gradient_checkpointing']})"
    names = [stage.name for stage in plan if stage.batch.recomputed]
    return f"on in {', '.join(names)} (one patient did not fit without)" if names else "off (default)"


def print_stages(plan: list[StagePlan]) -> None:
    """Rank 0: what each stage takes, beside the guide's table."""
    rows = {}
    for stage in plan:
        size = stage.config["volume_size"]
        guide = GUIDE_MEMORY_GB.get(size[0]) if len(set(size)) == 1 else None
        rows[stage.name] = {
            "volume": "x".join(map(str, size)),
            "batch/GPU": stage.batch.size,
            "parameters": stage.parameters or "-",
            "memory GB": f"{stage.memory:.2f}" if stage.memory else "-",
            "guide GB": guide or "-",
        }
    print_table("stages", rows)


# --- the run: training ------------------------------------------------------------------------------------------------


class StageChoice(NamedTuple):
    """The stages of a run, from 0. anew: the first is begun, and not resumed in its middle."""

    first: int
    last: int
    anew: bool


def choose_stages(checkpoint: dict | None, args: argparse.Namespace) -> StageChoice:
    """What --stage and the checkpoint ask for. Raises InputError when the stages before are not there."""
    names = [stage["name"] for stage in args.stage_configs]
    wanted = None
    if args.stage:
        if args.stage not in (*names, *map(str, range(1, len(names) + 1))):
            raise InputError(f"--stage {args.stage}: there are 1 to {len(names)} ({', '.join(names)})")
        wanted = names.index(args.stage) if args.stage in names else int(args.stage) - 1
    last = len(names) - 1 if wanted is None else wanted

    if checkpoint is None:
        if wanted:
            reason = "the stages before it are not there; train them first, or name one of their checkpoints with "
            raise InputError(f"--stage {args.stage}: {reason}--resume_from")
        return StageChoice(0, last, anew=True)

    reached = checkpoint["state"]["stage"]
    if wanted is not None and not reached <= wanted <= reached + 1:
        more = f" or {reached + 2}" if reached + 1 < len(names) else ""
        reason = f"the checkpoint is at stage {reached + 1}"
        raise InputError(f"--stage {args.stage}: {reason}; go on with --stage {reached + 1}{more}")
    # a file is the user's choice of weights for the stage before
    if wanted == reached + 1 and Path(args.resume_from).is_file():
        return StageChoice(wanted, last, anew=True)
    return StageChoice(reached, last, anew=False)


def begin_stage(progress: StageProgress, k: int) -> None:
    """Set the progress to the first step of stage k (from 0)."""
    for name, value in asdict(StageProgress(step=progress.step, stage=k)).items():
        setattr(progress, name, value)


def reduce_on_plateau(progress: StageProgress, loss: float) -> None:
    """After an epoch: as torch's ReduceLROnPlateau(factor=.5, patience=5); the factor goes into the progress."""
    progress.waiting += 1
    if progress.lowest is None or loss < progress.lowest * (1 - 1e-4):
        progress.lowest = loss
        progress.waiting = 0
    if progress.waiting > 5:
        progress.plateau *= 0.5
        progress.waiting = 0


def load_position(
    checkpoint: dict, choice: StageChoice, this_run: dict, data: Data, progress: StageProgress, args, device
) -> list[StageNet]:
    """All ranks: put the progress where a checkpoint stands; returns the models of the stages before.

    Raises InputError for the checkpoint of another run.
    """
    if choice.anew:
        # another stage may have another batch
        this_run = {name: value for name, value in this_run.items() if name != "effective_batch_size"}
    else:
        checkpoint.need("net", "ema", "optimizer", "scaler", "rng")
    best = f"{args.stage_configs[choice.first]['name']}_best.pt"
    resume(progress, checkpoint, this_run, Path(args.checkpoint_dir), best)
    data.greys = checkpoint["greys"]
    models = load_models(checkpoint, args, device)
    return models if choice.anew else models[:-1]


def end_of_run(plan: list[StagePlan], choice: StageChoice, progress: StageProgress, args: argparse.Namespace) -> int:
    """The step at which the run ends. Raises InputError where --stage is not the stage that is under way.

    A stage that was begun with more epochs than are asked for now ends where it is.
    """
    stage = plan[choice.first]
    stage = stage._replace(steps=max(stage.steps, progress.stage_step))
    plan[choice.first] = stage
    if args.stage and choice.last > choice.first and progress.stage_step < stage.steps:
        done = f"{stage.name} has done {progress.stage_step} of {stage.steps} steps"
        best = Path(args.checkpoint_dir) / f"{stage.name}_best.pt"
        use = f"leave out --stage, or --resume_from {best}"
        raise InputError(f"--stage {args.stage}: {done}; {use}")
    steps = sum(stage.steps for stage in plan[choice.first : choice.last + 1])
    last_step = progress.step - progress.stage_step + steps
    return min(args.max_steps or last_step, last_step)


def gib_in_memory(data: Data, size: list[int]) -> float:
    """What --cache_in_memory takes in each process."""
    return data.set("train", size).bytes() / 2**30


def describe_data(data: Data, size: list[int], args: argparse.Namespace, device: torch.device) -> dict[str, str]:
    """The banner's rows about the patients and how they are read. size: of the last stage's grid."""
    patients = ", ".join(f"{len(places)} {name}" for name, places in data.split.items())
    source = "split files" if args.split_files else f"split seed {args.split_seed}"
    views = f"{args.num_views} view{'s' * (args.num_views > 1)} at {args.img_size}^2"
    greys = [
        f"{a:.3f} * line integral {b:+.3f} ({view}, r = {r:.3f})"
        for view, (a, b, r) in zip(VIEWS, data.greys, strict=False)
    ]
    kept = f"on disk in {args.cache_dir}"
    if args.cache_in_memory:
        kept = f"in memory, {gib_in_memory(data, size):.2f} GB per process"
    return {
        "patients": f"{patients} ({source})",
        "X-rays": f"{views}; grey = {'; '.join(greys)}",
        "memory": f"decoded patients {kept}",
        "loading": f"{loading_workers(args, device)} workers per process",
    }


def describe_batches(plan: list[StagePlan]) -> str:
    """The banner's row about the batch of each stage."""
    batches = []
    for stage in plan:
        batch = f"{stage.batch.size} per GPU x {stage.batch.accumulation} accumulation x {world()[1]}"
        source = f" ({stage.batch.source})" if stage.batch.source else ""
        batches.append(f"{stage.name}: {batch} = {stage.effective_batch_size}{source}")
    return "; ".join(batches)


def describe_run(
    plan: list[StagePlan], last: int, data: Data, training: TrainingRun, why: str, args, device: torch.device
) -> dict[str, str]:
    """The banner's rows of this script. last: the last stage of this run. why: the reason for the precision."""
    prediction = "v" if args.v_parameterization else "noise"
    diffusion = f"{args.num_timesteps} steps, cosine, {prediction} prediction, DDIM {args.ddim_steps}"
    steps = ", ".join(f"{stage.name} {stage.steps}" for stage in plan[: last + 1])
    progress = training.progress
    rows = {
        "batch": describe_batches(plan),
        "learning rate": f"{args.learning_rate:g} ({args.source['learning_rate']}), {args.scheduler}, not scaled",
        "precision": why,
        "diffusion": f"{diffusion}, EMA {args.ema_decay:g}",
        "recomputation": describe_recomputation(plan, args),
    }
    rows |= describe_data(data, plan[last].config["volume_size"], args, device)
    rows |= {"steps": f"{training.last_step}: {steps}"}
    return rows | {"start": f"step {progress.step}, {plan[progress.stage].name}, epoch {progress.epoch + 1}"}


def warn_of_full_memory(gib: float) -> None:
    """Rank 0 says so where --cache_in_memory takes more than is free. gib: of each process."""
    free = available_ram_gb()
    if gib > free:
        print_main(f"warning: --cache_in_memory takes {gib:.1f} GB per process; {free:.1f} are free")


def fit(precision: str, why: str, args: argparse.Namespace, ranks: Ranks) -> int:
    """Train the stages one after another, test the last; returns the exit code. why: the reason for the precision."""
    begun = time.time()
    run_folder = Path(args.checkpoint_dir)
    device = ranks.device
    checkpoint = load_checkpoint(args.resume_from, run_folder, FORMAT, resume=True)
    if checkpoint:
        adopt(args, checkpoint, args.resume_from)
        begun_in = checkpoint["settings"]["mixed_precision"]
        asked_by = args.source["mixed_precision"]
        precision, why = keep_precision(precision, why, begun_in, asked_by, ranks)
    why = set_numerics(device, precision, why, args.deterministic)
    accelerator = make_accelerator(precision, args.gradient_accumulation_steps, ranks)

    # which stages, their patients, and the batch of each
    choice = choose_stages(checkpoint, args)
    data = Data(args, [stage["volume_size"] for stage in args.stage_configs[: choice.last + 1]])
    begun_stage = None if choice.anew else checkpoint
    plan = plan_stages(choice.first, data, begun_stage, precision, args, device)

    # begin, or go on where the checkpoint stands
    progress = StageProgress()
    effective_batch_size = plan[choice.first].effective_batch_size
    this_run = {"seed": args.seed, "training_data": data.fingerprint, "effective_batch_size": effective_batch_size}
    models: list[StageNet] = []
    if checkpoint:
        models = load_position(checkpoint, choice, this_run, data, progress, args, device)
    if choice.anew:
        begin_stage(progress, choice.first)
    last_step = end_of_run(plan, choice, progress, args)
    training = TrainingRun(
        run_folder=run_folder,
        progress=progress,
        last_step=last_step,
        planned_steps=last_step,
        effective_batch_size=effective_batch_size,
        precision=precision,
        log=open_log(checkpoint, choice, last_step, precision, args, ranks),
        contents=partial(run_contents, this_run, data, precision, args),
        save_every=args.save_every,
        keep_last=args.keep_last,
        max_bad_steps=args.max_bad_steps,
    )
    engine = f"by Accelerate ({accelerator.distributed_type.value})"
    rows = {"launcher": f"{ranks.launcher}, world size {ranks.world_size}, {device}, {engine}"}
    rows |= describe_run(plan, choice.last, data, training, why, args, device)
    print_start("X-RAY TO CT CASCADE", ranks, training, rows)
    if ranks.is_main:
        print_stages(plan)
    if args.cache_in_memory:
        warn_of_full_memory(gib_in_memory(data, plan[choice.last].config["volume_size"]))

    # the weights of a stage before are in the models; let go of the rest
    del checkpoint
    todo = plan[choice.first : choice.last + 1]
    with training.stop, contextlib.closing(training.log):
        say_if_finished(training, "--num_epochs_per_stage")
        code, best_step = train_stages(todo, models, begun_stage, data, training, accelerator, args, device)
        return code or test_cascade(models, best_step, plan, data, training, begun, args)


def open_log(
    checkpoint: dict | None, choice: StageChoice, last_step: int, precision: str, args: argparse.Namespace, ranks: Ranks
) -> RunLog:
    """All ranks: the log of the run, which makes the run folder this run's."""
    run_folder = Path(args.checkpoint_dir)
    next_stage = checkpoint is not None and choice.anew
    resumed = at_end_of_step(checkpoint, run_folder) if next_stage else checkpoint
    log = RunLog(run_folder, ranks, LOSSES, last_step, args.log_every, precision, args.compile)
    log.open(args, resumed)
    log.curves = ["val/loss", "val/diffusion_loss", "val/physics_loss"]
    if next_stage:
        # what the stage before had not logged yet
        log.context = {"stage": choice.first}
        log.write_rest(resumed["step"], resumed["state"]["epoch"] + 1)
    return log


def run_contents(this_run: dict, data: Data, precision: str, args: argparse.Namespace) -> dict:
    """What the checkpoints of all stages hold."""
    settings = {name: getattr(args, name) for name in (*FIXED, *FIXED_DATA, "stage_configs")}
    return {
        "format": FORMAT,
        "run": this_run,
        "settings": settings | {"mixed_precision": precision},
        "greys": data.greys,
        "extent": data.extent,
        "trained_patients": data.ids["train"],
    }


def stage_contents(stage: StagePlan, learner: Learner, models: list[StageNet], training: TrainingRun) -> dict:
    """What a checkpoint of this stage holds. models: of the stages before. training: of the whole run."""
    contents = training.contents()
    return contents | {
        "run": contents["run"] | {"effective_batch_size": stage.effective_batch_size},
        "net": trained_state(learner.model),
        "ema": trained_state(learner.averaged.model, everything=True),
        "earlier": [trained_state(model, everything=True) for model in models],
        "optimizer": learner.optimizer.state_dict(),
        "scaler": learner.scaler.state_dict(),
        "split": stage.batch.record(),
    }


def train_stages(
    todo: list[StagePlan],
    models: list[StageNet],
    checkpoint: dict | None,
    data: Data,
    training: TrainingRun,
    accelerator,
    args: argparse.Namespace,
    device: torch.device,
) -> tuple[int, int]:
    """Train and validate one stage after another; (exit code of a stop signal or 0, step of the last best checkpoint).

    models: the best averaged ones of the stages before, to which those trained here are added. checkpoint: where the
    first stage is resumed in its middle.
    """
    progress = training.progress
    log = training.log
    best_step = 0
    for stage in todo:
        code, model, best_step = fit_stage(stage, models, checkpoint, data, training, accelerator, args, device)
        gc.collect()
        if code:
            return code, 0
        models.append(model)
        checkpoint = None

        # sample the validation patients by all stages so far
        metrics, shown = evaluate("val", models, data, training.precision, args, training.stop)
        if metrics is None:
            return leave_evaluation(training), 0
        log.write(progress.step, progress.epoch + 1, metrics)
        if world()[0] == 0:
            print_metrics(f"val, {stage.name}", "val", metrics)
        draw = partial(draw_result, shown, args)
        log.figures(lambda name=stage.name, draw=draw: {f"{name}_val": draw()}, progress.step)
        note_speed(stage, log)

        if progress.step >= training.last_step:
            break
        begin_stage(progress, stage.number + 1)
    return 0, best_step


def make_learner(
    stage: StagePlan, models: list[StageNet], checkpoint: dict | None, precision: str, accelerator, args, device
) -> Learner:
    """All ranks: what learns in a stage, at its start or as a checkpoint has it. models: of the stages before."""
    model = build_model(stage.number, args, device)
    model.checkpointing = stage.batch.recomputed
    if models and not checkpoint:
        # what the X-rays' features are worth was learned before
        model.encoder.load_state_dict(models[-1].encoder.state_dict())
    averaged = Ema(model, args.ema_decay)
    optimizer = make_optimizer(model, args)
    scaler = LossScaler(device, precision)
    if checkpoint:
        with agree_on_errors():
            load_trained(model, checkpoint["net"])
            load_trained(averaged.model, checkpoint["ema"])
        restore_training(checkpoint, optimizer, scaler, args.weight_decay)
    if args.compile:
        model.compile()
    return Learner(model, accelerator.prepare_model(model), averaged, optimizer, scaler)


def fit_stage(
    stage: StagePlan,
    models: list[StageNet],
    checkpoint: dict | None,
    data: Data,
    training: TrainingRun,
    accelerator,
    args: argparse.Namespace,
    device: torch.device,
) -> tuple[int, StageNet | None, int]:
    """Train one stage from the run's position on; (exit code of a signal or 0, its best averaged model, step of that).

    models: of the stages before. checkpoint: where the stage is resumed in its middle. training: of the whole run.
    """
    learner = make_learner(stage, models, checkpoint, training.precision, accelerator, args, device)
    if checkpoint:
        # its weights are in the models; let go of the host's memory
        checkpoint.clear()
    # a checkpoint also holds the averaged weights, and those of the stages before
    prepare_checkpoint(learner.model, copies=4 + len(models))
    loader = create_distributed_dataloader(
        data.set("train", stage.config["volume_size"]),
        stage.batch.size,
        seed=args.seed + 1000003 * stage.number,
        num_workers=loading_workers(args, device),
        accumulation=stage.batch.accumulation,
        drop_last=False,
    )

    # the stage's part of the run ends with its steps, or where --max_steps ends the run
    progress = training.progress
    log = training.log
    end_of_stage = progress.step - progress.stage_step + stage.steps
    stage_training = replace(
        training,
        last_step=min(end_of_stage, training.last_step),
        planned_steps=stage.steps,
        effective_batch_size=stage.effective_batch_size,
        contents=partial(stage_contents, stage, learner, models, training),
    )
    begin_log_of_stage(stage, log, device)
    if progress.stage_step == 0:
        if stage.number > 0:
            # written down at once: from here on the stage before is done
            stage_training.save()
        log.figures(lambda: {f"{stage.name}_inputs": draw_inputs(stage.number, data, args, device)}, progress.step)

    if code := train_stage(stage, learner, loader, stage_training, data, args):
        return code, None, 0
    best = load_checkpoint(str(training.run_folder / f"{stage.name}_best.pt"), training.run_folder, FORMAT)
    load_trained(learner.averaged.model, best["ema"])
    accelerator.free_memory()
    return 0, learner.averaged.model, best["step"]


def begin_log_of_stage(stage: StagePlan, log: RunLog, device: torch.device) -> None:
    """Speed and memory are this stage's from here on, not those of the stages measured or trained before."""
    log.context = {"stage": stage.number + 1}
    log.forget_flops()
    for name in ("train/samples_per_s", "train/peak_memory_gb"):
        log.last.pop(name, None)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def train_stage(
    stage: StagePlan, learner: Learner, loader: DataLoader, training: TrainingRun, data: Data, args: argparse.Namespace
) -> int:
    """All epochs of a stage, each with its validation loss; the exit code of a stop signal, else 0."""
    progress = training.progress
    while True:
        train_one_epoch(stage.number, learner, loader, training, data, args)
        if code := end_epoch(training):
            return code
        metrics = validation_loss(stage.number, learner.averaged.model, data, training.precision, args)
        loss = metrics["val/loss"]
        training.log.write(progress.step, progress.epoch + 1, metrics)
        print_main(f"{stage.name} epoch {progress.epoch + 1}: val loss {loss:.4f}")

        # the best of the stage is the best of the run, too, as later stages start from it
        epoch_complete = progress.samples >= loader.batch_sampler.used
        keep_best(training, loss, epoch_complete, lower=True, names=(f"{stage.name}_best.pt", "best.pt"))
        if args.scheduler == "plateau":
            reduce_on_plateau(progress, loss)
        if not next_epoch(training):
            return 0


def leave_evaluation(training: TrainingRun) -> int:
    """All ranks, once a stop signal has ended an evaluation: its exit code."""
    say_saved(training.progress.step)
    return int(reduce_max([training.stop.code])[0])


def note_speed(stage: StagePlan, log: RunLog) -> None:
    """Keep a stage's throughput and memory for summary.json, where this run has trained it."""
    if "train/samples_per_s" in log.last:
        log.last[f"train/samples_per_s_per_gpu/{stage.name}"] = log.last["train/samples_per_s"] / world()[1]
        log.last[f"train/peak_memory_gb/{stage.name}"] = log.last["train/peak_memory_gb"]


def print_speed(plan: list[StagePlan], log: RunLog, device: torch.device) -> None:
    """Rank 0: throughput and memory of each stage that was trained, beside what the guide aims for."""
    total = None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
    rows = {}
    for stage in plan:
        samples_per_s = log.last.get(f"train/samples_per_s_per_gpu/{stage.name}")
        if samples_per_s is None:
            continue
        memory = log.last[f"train/peak_memory_gb/{stage.name}"]
        rows[stage.name] = {
            "samples/s/GPU": f"{samples_per_s:.2f}",
            "guide's aim": f"> {GUIDE_SAMPLES_PER_S}",
            "memory GB": f"{memory:.2f}",
            "share": f"{memory / total:.0%}" if total else "-",
            "share's aim": "70-80%",
        }
    if rows:
        print_table("speed", rows)


def test_cascade(
    models: list[StageNet],
    best_step: int,
    plan: list[StagePlan],
    data: Data,
    training: TrainingRun,
    begun: float,
    args: argparse.Namespace,
) -> int:
    """The test patients by the whole cascade, the results of the run; the exit code."""
    progress = training.progress
    log = training.log
    last = plan[len(models) - 1]
    metrics, shown = evaluate("test", models, data, training.precision, args, training.stop)
    if metrics is None:
        return leave_evaluation(training)
    log.write(progress.step, progress.epoch + 1, metrics | {"best_step": best_step})
    weights = {
        f"{stage.name}.{key}": value
        for stage, model in zip(plan, models, strict=False)
        for key, value in model.state_dict().items()
    }
    export_weights(weights, training.run_folder / "model.safetensors")
    facts = {"stages": len(models), "effective_batch_size": last.effective_batch_size}
    finish_run(training, begun, facts)
    if world()[0] == 0:
        print_metrics(f"test, {last.name}", "test", metrics)
        print_speed(plan, log, models[-1].position.device)
    log.figures(lambda: {"test": draw_result(shown, args)}, progress.step)
    say_where(training.run_folder)
    return 0


def run(args: argparse.Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    if args.make_drrs:
        print_main(f"{make_drrs(Path(args.make_drrs))} pictures rendered below {args.make_drrs}")
        return 0

    asked_by = args.source["mixed_precision"]
    choose = partial(choose_launched_precision, args.mixed_precision, asked_by, ranks)
    precision, why = agree_on_precision(choose)
    if args.eval_only or args.sample:
        use_checkpoint(precision, why, args, ranks)
        return 0
    run_folder = Path(args.checkpoint_dir)
    lock = lock_run_folder(run_folder, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
    code = fit(precision, why, args, ranks)
    del lock
    return code


def rehearse(args: argparse.Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step of each stage, or of --stage; the object is the largest's."""
    import rehearsal_utils as rehearsal

    processes = rehearsal.processes_to_plan_for(args.world_size)
    memory = rehearsal.memory_to_plan_for(args.gpu_memory)
    wanted = [k for k, stage in enumerate(args.stage_configs) if args.stage in (None, stage["name"], str(k + 1))]
    if not wanted:
        raise InputError(f"--stage {args.stage}: there are 1 to {len(args.stage_configs)}; name one of them")
    reports = []
    for k in wanted:
        stage = plan_as_asked(k, args)
        trace = rehearsal.Trace()
        with rehearsal.imaginary_gpu(trace) as ranks:
            precision, _ = precision_of_device(args.mixed_precision, ranks.device)
            set_numerics(ranks.device, precision, "", args.deterministic)
            with ranks.device:
                model = build_model(k, args, ranks.device)
            averaged = Ema(model, args.ema_decay).model
            # the X-rays' grey values are known from the data only, and change no size
            greys = [(1.0, 0.0, 1.0)] * 2
            batch = largest_batch(stage.batch.size, stage.config, args)
            trial = partial(trial_step, model, batch, k, greys, precision, args)
            optimizer = make_optimizer(model, args)
            step = rehearsal.rehearse_step(
                trace, model, optimizer, trial, stage.batch.accumulation, processes, averaged
            )
        split = f"{stage.batch.size} per GPU x {stage.batch.accumulation} accumulation"
        reports.append((step, f"cascade, {stage.name}, {split}, {precision}", stage))

    # the largest comes last
    otherwise = "a smaller voxel_dim or token_grid" if args.gradient_checkpointing else "--gradient_checkpointing"
    for step, title, stage in sorted(reports, key=lambda report: report[0].peak):
        words = partial(smaller_batch_words, stage, args)
        rehearsal.report_rehearsal(title, step, stage.batch.size, memory, words, otherwise)
    rehearsal.end_rehearsal()


def smaller_batch_words(stage: StagePlan, args: argparse.Namespace, samples: int) -> str:
    """How a user asks for micro-batches of at most so many samples in a stage, the effective batch as it is."""
    size, accumulation = smaller_batch(stage.batch.size, stage.batch.accumulation, samples)
    if args.stage:
        return batch_flags(size, accumulation)
    return f"in --config, {stage.name}: batch_size {size} and accumulation_steps {accumulation}"


def out_of_memory_advice(args: argparse.Namespace, ranks: Ranks) -> str:
    """What takes less memory, where it ran out after the stages were measured."""
    smaller = "halve it and double the stage's accumulation_steps in --config (the same result)"
    otherwise = auto_batch_advice(args.auto_batch, ranks.device)
    return f"a stage's batch_size; try --gradient_checkpointing, or {smaller}{otherwise}"


def main(args: argparse.Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    launch_workers(args.world_size or 1)
    with (
        setup_distributed(timeout=args.dist_timeout) as ranks,
        explain_out_of_memory(partial(out_of_memory_advice, args, ranks)),
    ):
        return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
