"""X-ray to CT: one or two chest X-rays in, the CT volume out, by a cascade of conditional diffusion models (guide 3).

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
import gc
import json
import math
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cli_utils import InputError, Parser, RunError, add_common_arguments, number, parse_arguments, run_main
from cli_utils import seed_number, take_from_run, value_sources, whole
from tasks.cascade.settings import SECTIONS, adopted_settings, saved_settings, set_in_stages, wrong_flags
from tasks.cascade.stages import STAGES, StageChoice, choose_stages, halvings, stage_list

FORMAT = "cascade/1"
LOSSES = ["loss", "diffusion_loss", "physics_loss", "grad_norm", "skipped"]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    yes_no = argparse.BooleanOptionalAction
    add = parser.add_argument_group("data").add_argument
    add("--dataset_path", default="./data/drr_patient_data", metavar="DIR", help="folder with a sub-folder per patient")
    add("--split_seed", type=seed_number, default=42, help="seed of the 80/10/10 split by patient")
    add("--split_files", nargs=3, metavar=("TRAIN", "VAL", "TEST"), help="text files of patient ids, for the split")
    add("--flip_drrs_vertical", action=yes_no, default=True, help="X-rays show the head at the top; --no-...: the feet")
    add("--flip_drrs_horizontal", choices=("none", "pa", "lat", "both"), default="none", help="views stored mirrored")
    add("--augmentation", action=yes_no, default=True, help="move training patients up or down by 5%%, vary exposure")
    add("--cache_in_memory", action=yes_no, default=False, help="patients in EACH process: 35 MB each at 256^3")
    add("--cache_dir", default="runs/cache/cascade", help="decoded patients on disk, 38 MB each; may be deleted")
    add("--skip_alignment_check", action="store_true", help="do not compare each X-ray with its CT's projection first")
    add("--make_drrs", metavar="DIR", help="render missing pa and lat images of every CT below DIR, and end")

    add = parser.add_argument_group("model").add_argument
    add("--img_size", type=whole(32), default=512, help="side of the X-rays in the encoder, pixels; lower it on OOM")
    add("--num_views", type=int, choices=(1, 2), default=2, help="1: frontal; 2: frontal and lateral")
    add("--encoder_dim", type=whole(16), default=512, help="channels of the X-ray encoder; lower it on OOM")
    add("--stage_configs", type=stage_list, metavar="JSON", help="list of stages; left out: 64^3, 128^3, 256^3")
    add("--num_timesteps", type=whole(10), default=1000, help="diffusion steps of training")
    add("--v_parameterization", action=yes_no, default=True, help="predict v (Salimans & Ho 2022); --no-...: noise")
    add("--gradient_checkpointing", action=yes_no, help="less memory, a third slower; left out: where it is needed")

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch_size", type=whole(1), default=8, help="patients per GPU, unless a stage has its own; lower it on OOM")
    add("--num_epochs_per_stage", type=whole(1), default=100, help="unless a stage has num_epochs of its own")
    add("--learning_rate", type=number(0, above=True), default=1e-4, help="at the start; not scaled with the GPUs")
    text = "plateau: halved after 5 epochs without a lower val/loss; cosine: to 0 in a stage"
    add("--scheduler", choices=("plateau", "cosine", "constant"), default="plateau", help=text)
    add("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up in each stage")
    add("--weight_decay", type=number(0), default=0.01, help="of AdamW")
    add("--ema_decay", type=number(0, 1), default=0.9999, help="of the averaged weights that are evaluated; 0: none")
    add("--physics_weight", type=number(0), help="of the projection loss; left out: each stage's own (.3, .4, .5)")
    add("--stage", metavar="STAGE", help="train this stage only (number or name), after those before it")

    add = parser.add_argument_group("output and evaluation").add_argument
    add("--checkpoint_dir", default="checkpoints_4gpu", help="run folder: checkpoints, logs, figures, samples")
    add("--ddim_steps", type=whole(1), default=50, help="denoising steps of a stage; divides --num_timesteps")
    add("--check_conditioning", action="store_true", help="test with others' X-rays, and with the stage before zeroed")
    add("--sample", metavar="DIR", help="write the CT volumes (NIfTI, HU) of the X-rays in DIR to samples/")

    add_common_arguments(parser, {"learning_rate": "lr"})
    args = parse_arguments(parser, argv, SECTIONS)
    args.source = value_sources(parser, args, argv, SECTIONS)
    if args.eval_only:
        take_from_run(parser, args, args.checkpoint_dir, ("dataset_path", "split_files", "cache_dir"))
    if reason := wrong_flags(vars(args)):
        parser.error(reason)
    if args.stage_configs is None:
        args.stage_configs = stage_list(json.dumps(STAGES))
    set_in_stages(args.stage_configs, vars(args), args.source)
    return args


if __name__ == "__main__":
    # before the heavy imports, so that --help and a mistyped flag answer at once
    ARGS = parse_args()

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from accelerate_utils import agree_on_launched_precision, keep_precision, make_accelerator
from checkpoint_utils import at_end_of_step, export_weights, load_checkpoint, load_trained, lock_run_folder
from checkpoint_utils import prepare_checkpoint, trained_state
from distributed_utils import Ranks, StopSignal, agree_on_errors, any_rank, create_distributed_dataloader
from distributed_utils import launch_workers, print_main, reduce_max, reduce_sum, schedule, setup_distributed, world
from hardware_utils import autocast, choose_precision, set_numerics
from logging_utils import RunLog
from loop_utils import LossScaler, TrainingRun, clip_and_step, end_epoch, end_step
from loop_utils import explain_out_of_memory, finish_run, keep_best, next_epoch, optimizer_steps
from loop_utils import print_start, restore_training, resume, say_if_finished, say_saved, say_where, sync_gradients
from tasks.cascade.alignment import GreyFit
from tasks.cascade.data import FLIPS, Data, Decoded, eval_batches, made_up_batch, prepare, split_patients
from tasks.cascade.diffusion import LOSS_DRAWS, Diffusion, Draw, denoise, make_scheduler, training_draw, validation_draw
from tasks.cascade.files import find_patients, make_drrs
from tasks.cascade.metrics import back_projection, measure, projection_error, score_names
from tasks.cascade.model import Ema, StageNet, XraySettings
from tasks.cascade.plan import Learner, RehearsedParts, StagePlan, StageProgress, begin_stage, end_of_run, measure_stage
from tasks.cascade.plan import out_of_memory_advice, plan_as_asked, reduce_on_plateau, rehearse_stages
from tasks.cascade.report import Example, begin_speed, describe_batches, describe_data, describe_position
from tasks.cascade.report import describe_recomputation, draw_inputs, draw_result, note_speed, print_metrics
from tasks.cascade.report import print_speed, print_stages, warn_of_full_memory, write_evaluation
from tasks.cascade.sampling import conditioning_scores, sample_cascade, sample_folder


class Setup(NamedTuple):
    """What all stages of a run share. data: None where a step is only tried."""

    args: argparse.Namespace
    device: torch.device
    precision: str
    data: Data | None = None
    accelerator: object = None


# --- model ------------------------------------------------------------------------------------------------------------


def build_model(k: int, args: argparse.Namespace, device: torch.device) -> StageNet:
    """The model of stage k (from 0) with the same random weights on every rank."""
    # torch takes 64 bits
    seed = args.seed * 1000003 + k
    torch.manual_seed(seed if -(2**63) <= seed < 2**64 else seed % 2**63)
    stage = args.stage_configs[k]
    xray = XraySettings(args.num_views, args.img_size, args.encoder_dim)
    model = StageNet(stage, xray, k == 0, halvings(stage["volume_size"], stage["token_grid"]))
    model.checkpointing = bool(args.gradient_checkpointing)
    for module in model.modules():
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            module.to(memory_format=torch.channels_last_3d)
    return model.to(device)


def make_optimizer(model: StageNet, args: argparse.Namespace) -> torch.optim.AdamW:
    """Fused AdamW over one stage's model, which alone learns."""
    return torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)


# --- loss -------------------------------------------------------------------------------------------------------------


def make_diffusion(args: argparse.Namespace) -> Diffusion:
    """The diffusion as the flags say."""
    scheduler = make_scheduler(args.num_timesteps, args.ddim_steps, args.v_parameterization)
    return Diffusion(scheduler, args.seed, [stage["volume_size"] for stage in args.stage_configs])


def training_batch(batch: dict, k: int, epoch: int, diffusion: Diffusion, setup: Setup) -> tuple[dict, Draw]:
    """A batch of stage k on the device, augmented, and what is drawn for it."""
    seed = setup.args.seed + 1000003 * (k + 1) if setup.args.augmentation else None
    batch = prepare(batch, setup.device, seed, epoch)
    return batch, training_draw(batch, k, epoch, diffusion)


def sample_losses(model: nn.Module, batch: dict, draw: Draw, scheduler, greys: list[GreyFit]) -> tuple[Tensor, Tensor]:
    """(diffusion loss, physics loss) of each patient, (B,) fp32.

    The first is the mean square error of v or of the noise. The second compares the projections of the clean volume
    that the model implies with the X-rays; at high noise levels that volume is a guess, so each patient counts by its
    share of signal, alpha_bar(t).
    """
    volume = batch["volume"]
    noisy = scheduler.add_noise(volume, draw.noise, draw.timestep)
    output, clean = denoise(model, scheduler, noisy, draw.timestep, batch["seen"], draw.previous)
    target = draw.noise
    if scheduler.prediction_type == "v_prediction":
        target = scheduler.get_velocity(volume, draw.noise, draw.timestep)
    diffusion = (output - target).square().mean((1, 2, 3, 4))
    physics = projection_error(clean, batch["extent"], batch["xrays"], greys).mean(1)
    signal = scheduler.alphas_cumprod.to(volume.device)[draw.timestep]
    return diffusion, signal * physics


def trial_step(model: StageNet, stage: StagePlan, setup: Setup, batch_size: int) -> None:
    """Forward and backward pass of one micro-batch as in training, made up; the gradients stay in the model."""
    args = setup.args
    diffusion = make_diffusion(args)
    batch = made_up_batch(batch_size, stage.config["volume_size"], args.num_views, args.img_size)
    batch, draw = training_batch(batch, stage.number, 0, diffusion, setup)
    # the X-rays' grey values are known from the data only, and change no size
    greys = [GreyFit(1.0, 0.0, 1.0)] * args.num_views
    with autocast(setup.device, setup.precision):
        losses = sample_losses(model.train(), batch, draw, diffusion.scheduler, greys)
    diffusion_loss, physics_loss = (loss.mean() for loss in losses)
    (diffusion_loss + stage.config["physics_weight"] * physics_loss).backward()


# --- training ---------------------------------------------------------------------------------------------------------


def make_learner(stage: StagePlan, models: list[StageNet], checkpoint: dict | None, setup: Setup) -> Learner:
    """All ranks: what learns in a stage, at its start or as a checkpoint has it. models: of the stages before."""
    args = setup.args
    model = build_model(stage.number, args, setup.device)
    model.checkpointing = stage.batch.recomputed
    if models and not checkpoint:
        # what the X-rays' features are worth was learned before
        model.encoder.load_state_dict(models[-1].encoder.state_dict())
    averaged = Ema(model, args.ema_decay)
    optimizer = make_optimizer(model, args)
    scaler = LossScaler(setup.device, setup.precision)
    if checkpoint:
        with agree_on_errors():
            load_trained(model, checkpoint["net"])
            load_trained(averaged.model, checkpoint["ema"])
        restore_training(checkpoint, optimizer, scaler, args.weight_decay)
    if args.compile:
        model.compile()
    return Learner(model, setup.accelerator.prepare_model(model), averaged, optimizer, scaler)


def train_one_epoch(k: int, learner: Learner, loader: DataLoader, training: TrainingRun, setup: Setup) -> None:
    """Train stage k from the run's position to the end of the epoch, of the stage or the run, or to a stop signal.

    Between log lines nothing is read back from the GPU. Raises InputError on all ranks for an unusable file of any.
    """
    # 1 x 1 x 1 kernels have two memory layouts at once
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    learner.model.train()
    args = setup.args
    progress = training.progress
    scaler = learner.scaler
    diffusion = make_diffusion(args)
    physics_weight = args.stage_configs[k]["physics_weight"]
    lr_schedule = "constant" if args.scheduler == "plateau" else args.scheduler
    for step in optimizer_steps(loader, training):
        factor = schedule(progress.stage_step, training.planned_steps, args.warmup_steps, lr_schedule)
        lr = args.learning_rate * progress.plateau * factor

        # forward and backward: each micro-batch gives its share of the mean over the global batch
        losses = torch.zeros(3, device=setup.device)
        for batch, last in step.micro_batches():
            batch, draw = training_batch(batch, k, progress.epoch, diffusion, setup)
            with training.log.count_flops(step.samples), sync_gradients(learner.wrapped, now=last):
                with autocast(setup.device, scaler.precision):
                    parts = sample_losses(learner.wrapped, batch, draw, diffusion.scheduler, setup.data.greys)
                diffusion_loss, physics_loss = (part.sum() * (step.weight / step.samples) for part in parts)
                loss = diffusion_loss + physics_weight * physics_loss
                # DDP averages over the ranks; these are shares of a sum, so undo the division
                scaler.scale(loss * world()[1]).backward()
            losses += torch.stack([loss, diffusion_loss, physics_loss]).detach()

        # update the weights and their average; a non-finite gradient skips the step on all ranks together
        grad_norm = clip_and_step(learner.optimizer, scaler, args.grad_clip, lr)
        progress.stage_step += 1
        learner.averaged.update(learner.model, progress.stage_step)
        end_step(training, step, losses, grad_norm, lr)


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def validation_loss(k: int, model: StageNet, setup: Setup) -> dict[str, float]:
    """val/loss and its parts at fixed noise, the same on all ranks and for any number of them. Raises RunError."""
    stage = setup.args.stage_configs[k]
    dataset = setup.data.set("val", stage["volume_size"])
    diffusion = make_diffusion(setup.args)
    table = torch.zeros(len(dataset), 2, dtype=torch.float64)
    with agree_on_errors():
        for places, batch in eval_batches(dataset, setup.device):
            for draw_number in range(LOSS_DRAWS):
                draw = validation_draw(batch, places, k, draw_number, diffusion)
                with autocast(setup.device, setup.precision):
                    losses = sample_losses(model, batch, draw, diffusion.scheduler, setup.data.greys)
                table[places] += torch.stack(losses, 1).double().cpu() / LOSS_DRAWS

    diffusion_loss, physics_loss = reduce_sum(table).mean(0).tolist()
    loss = diffusion_loss + stage["physics_weight"] * physics_loss
    if not math.isfinite(loss):
        raise RunError("the validation loss is not finite; lower --learning_rate")
    return {"val/loss": loss, "val/diffusion_loss": diffusion_loss, "val/physics_loss": physics_loss}


@torch.no_grad()
def evaluate(
    split: str, models: list[StageNet], setup: Setup, stop: StopSignal | None = None
) -> tuple[dict[str, float] | None, Example | None]:
    """(metrics, first patient for a figure) of the cascade up to the last of `models`.

    Each patient once, however many ranks there are; all ranks return the same metrics. stop: on a signal to any rank
    all leave, with None for the metrics.
    """
    args = setup.args
    data = setup.data
    size = models[-1].size
    dataset = data.set(split, size)
    mean = data.mean_volume(size).to(setup.device)
    diffusion = make_diffusion(args)
    others = data.others(split) if args.check_conditioning and split == "test" else []

    # a row for each patient: the scores of the cascade and of both baselines, and --check_conditioning's two
    names = score_names(split, args.num_views, checks=bool(others), first_stage=len(models) == 1)
    table = torch.zeros(len(dataset), len(names), dtype=torch.float64)
    example = None
    with agree_on_errors():
        for places, batch in eval_batches(dataset, setup.device):
            if stop and stop.code:
                break
            volumes = sample_cascade(models, batch["xrays"], batch["index"], diffusion, setup.precision)
            back = back_projection(batch, data.greys, size)
            scores = [measure(volume, batch, data.greys) for volume in (volumes[-1], mean.expand_as(back), back)]
            if others:
                chosen = [others[place] for place in places]
                scores += conditioning_scores(models, batch, chosen, diffusion, data, setup.precision)
            table[places] = torch.cat(scores, 1)
            if 0 in places:
                example = Example([volume[:1] for volume in volumes], batch, mean, back[:1])

    if stop and any_rank(bool(stop.code)):
        return None, None
    metrics = dict(zip(names, reduce_sum(table).mean(0).tolist(), strict=True))
    return metrics, example


# --- what a checkpoint holds, and a trained cascade -------------------------------------------------------------------


def run_contents(this_run: dict, setup: Setup) -> dict:
    """What the checkpoints of all stages hold."""
    return {
        "format": FORMAT,
        "run": this_run,
        "settings": saved_settings(vars(setup.args), setup.precision),
        "greys": [tuple(fit) for fit in setup.data.greys],
        "extent": setup.data.extent,
        "trained_patients": setup.data.ids["train"],
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


def load_models(checkpoint: dict, args: argparse.Namespace, device: torch.device) -> list[StageNet]:
    """The averaged models of every stage that a checkpoint holds, for evaluation."""
    models = []
    for k, weights in enumerate([*checkpoint["earlier"], checkpoint["ema"]]):
        model = build_model(k, args, device).requires_grad_(False).eval()
        with agree_on_errors():
            load_trained(model, weights)
        models.append(model)
    return models


def make_decoder(args: argparse.Namespace, device: torch.device) -> Decoded:
    """What reads a patient's files, turned as the flags say."""
    flips = FLIPS[args.flip_drrs_horizontal]._replace(vertical=args.flip_drrs_vertical)
    # no loading processes where the patients are in memory, nor by default on a CPU
    unasked_on_cpu = args.source["num_workers"] == "default" and device.type == "cpu"
    workers = 0 if args.cache_in_memory or unasked_on_cpu else args.num_workers
    return Decoded(args.img_size, flips, args.cache_dir, args.cache_in_memory, workers)


def load_data(sizes: list[list[int]], args: argparse.Namespace, device: torch.device) -> Data:
    """All ranks: the patients of a run, on the grids that will be needed. Raises InputError."""
    with agree_on_errors():
        patients = find_patients(Path(args.dataset_path), args.num_views)
        split = split_patients(patients, args.split_seed, args.split_files)
    return Data(patients, split, make_decoder(args, device), sizes, check=not args.skip_alignment_check)


def use_checkpoint(precision: str, reason: str, args: argparse.Namespace, ranks: Ranks) -> None:
    """--eval_only and --sample: what a trained cascade does. reason: for the precision."""
    run_folder = Path(args.checkpoint_dir)
    path = run_folder / "best.pt" if args.resume_from in (None, "auto") else Path(args.resume_from)
    path = str(path / "best.pt") if path.is_dir() else str(path)
    checkpoint = load_checkpoint(path, run_folder, FORMAT)
    vars(args).update(adopted_settings(vars(args), args.source, checkpoint, path))
    set_numerics(ranks.device, precision, reason, args.deterministic)
    # an `accelerate config` that is of no use here is refused, as in training
    make_accelerator(precision, args.gradient_accumulation_steps, ranks)
    models = load_models(checkpoint, args, ranks.device)
    if args.sample:
        decoded = make_decoder(args, ranks.device)
        diffusion = make_diffusion(args)
        extent = checkpoint["extent"]
        sample_folder(Path(args.sample), run_folder / "samples", models, decoded, diffusion, extent, precision)
        return

    data = load_data([models[-1].size], args, ranks.device)
    data.greys = [GreyFit._make(fit) for fit in checkpoint["greys"]]
    data.refuse_trained(checkpoint["trained_patients"], path)
    metrics, example = evaluate("test", models, Setup(args, ranks.device, precision, data))
    if ranks.is_main:
        print_metrics(f"test, {Path(path).name}", "test", metrics)
        figure = draw_result(example, stage_names(args)) if example else None
        facts = metrics | {"step": checkpoint["step"], "stage": len(models)}
        write_evaluation(run_folder, facts, figure, len(data.ids["test"]))


# --- the run ----------------------------------------------------------------------------------------------------------


def stage_names(args: argparse.Namespace) -> list[str]:
    """The names of all stages, in order."""
    return [stage["name"] for stage in args.stage_configs]


def try_stage(stage: StagePlan, checkpoint: dict | None, setup: Setup) -> StagePlan:
    """All ranks: the stage measured, with a batch that fits. Raises RunError where it does not."""
    args = setup.args
    model = build_model(stage.number, args, setup.device)
    try_once = partial(trial_step, model, stage, setup)
    return measure_stage(stage, model, try_once, args.auto_batch, args.gradient_checkpointing, checkpoint)


def plan_stages(first: int, checkpoint: dict | None, setup: Setup) -> list[StagePlan]:
    """All ranks: every stage, from `first` on measured. checkpoint: where the first one is resumed in its middle."""
    plan = []
    for k, config in enumerate(setup.args.stage_configs):
        stage = plan_as_asked(k, config, setup.args.gradient_checkpointing)
        if k >= first:
            stage = try_stage(stage, checkpoint if k == first else None, setup)
        plan.append(stage.with_steps(len(setup.data.split["train"])))
    return plan


def describe_run(
    plan: list[StagePlan], last: int, training: TrainingRun, launcher: str, reason: str, setup: Setup
) -> dict[str, str]:
    """The banner's rows of this script. last: the last stage of this run. reason: for the precision."""
    args = setup.args
    prediction = "v" if args.v_parameterization else "noise"
    diffusion = f"{args.num_timesteps} steps, cosine, {prediction} prediction, DDIM {args.ddim_steps}"
    source = args.source["gradient_checkpointing"]
    split_source = "split files" if args.split_files else f"split seed {args.split_seed}"
    rows = {
        "launcher": launcher,
        "batch": describe_batches(plan),
        "learning rate": f"{args.learning_rate:g} ({args.source['learning_rate']}), {args.scheduler}, not scaled",
        "precision": reason,
        "diffusion": f"{diffusion}, EMA {args.ema_decay:g}",
        "recomputation": describe_recomputation(plan, args.gradient_checkpointing, source),
    }
    rows |= describe_data(setup.data, plan[last].config["volume_size"], split_source)
    return rows | describe_position(plan[: last + 1], training)


def train_stages(
    todo: list[StagePlan], models: list[StageNet], checkpoint: dict | None, setup: Setup, training: TrainingRun
) -> tuple[int, int]:
    """Train and validate one stage after another; (exit code of a stop signal or 0, step of the last best checkpoint).

    models: the best averaged ones of the stages before, to which those trained here are added. checkpoint: where the
    first stage is resumed in its middle.
    """
    best_step = 0
    for stage in todo:
        code, model, best_step = fit_stage(stage, models, checkpoint, setup, training)
        gc.collect()
        if code:
            return code, 0
        models.append(model)
        checkpoint = None

        # sample the validation patients by all stages so far
        if code := log_evaluation("val", stage, models, setup, training):
            return code, 0
        note_speed(stage, training.log)
        if training.progress.step >= training.last_step:
            break
        begin_stage(training.progress, stage.number + 1)
    return 0, best_step


def fit_stage(
    stage: StagePlan, models: list[StageNet], checkpoint: dict | None, setup: Setup, training: TrainingRun
) -> tuple[int, StageNet | None, int]:
    """Train one stage from the run's position on; (exit code of a signal or 0, its best averaged model, step of that).

    models: of the stages before. checkpoint: where the stage is resumed in its middle. training: of the whole run.
    """
    args = setup.args
    learner = make_learner(stage, models, checkpoint, setup)
    if checkpoint:
        # its weights are in the models; let go of the host's memory
        checkpoint.clear()
    # a checkpoint also holds the averaged weights, and those of the stages before
    prepare_checkpoint(learner.model, copies=4 + len(models))
    loader = create_distributed_dataloader(
        setup.data.set("train", stage.config["volume_size"]),
        stage.batch.size,
        seed=args.seed + 1000003 * stage.number,
        num_workers=setup.data.decoded.workers,
        accumulation=stage.batch.accumulation,
        drop_last=False,
    )

    # the stage's part of the run ends with its steps, or where --max_steps ends the run
    progress = training.progress
    end_of_stage = progress.step - progress.stage_step + stage.steps
    stage_training = replace(
        training,
        last_step=min(end_of_stage, training.last_step),
        planned_steps=stage.steps,
        effective_batch_size=stage.effective_batch_size,
        contents=partial(stage_contents, stage, learner, models, training),
    )
    begin_speed(stage, training.log, setup.device)
    if progress.stage_step == 0:
        if stage.number > 0:
            # written down at once: from here on the stage before is done
            stage_training.save()
        training.log.figures(lambda: {f"{stage.name}_inputs": draw_first_inputs(stage, setup)}, progress.step)

    if code := train_epochs(stage, learner, loader, stage_training, setup):
        return code, None, 0
    best = load_checkpoint(str(training.run_folder / f"{stage.name}_best.pt"), training.run_folder, FORMAT)
    load_trained(learner.averaged.model, best["ema"])
    setup.accelerator.free_memory()
    return 0, learner.averaged.model, best["step"]


def draw_first_inputs(stage: StagePlan, setup: Setup):
    """A figure of what the model of a stage is given in training: the first patients of the first epoch."""
    data = setup.data
    dataset = data.set("train", stage.config["volume_size"])
    diffusion = make_diffusion(setup.args)
    batch = default_collate([dataset[place] for place in range(min(2, len(dataset)))])
    batch, draw = training_batch(batch, stage.number, 0, diffusion, setup)
    noisy = diffusion.scheduler.add_noise(batch["volume"], draw.noise, draw.timestep)
    names = [data.patients[index].id for index in batch["index"]]
    return draw_inputs(stage.name, names, batch, draw, noisy, setup.args.num_timesteps)


def train_epochs(stage: StagePlan, learner: Learner, loader: DataLoader, training: TrainingRun, setup: Setup) -> int:
    """All epochs of a stage, each with its validation loss; the exit code of a stop signal, else 0."""
    progress = training.progress
    while True:
        train_one_epoch(stage.number, learner, loader, training, setup)
        if code := end_epoch(training):
            return code
        metrics = validation_loss(stage.number, learner.averaged.model, setup)
        loss = metrics["val/loss"]
        training.log.write(progress.step, progress.epoch + 1, metrics)
        print_main(f"{stage.name} epoch {progress.epoch + 1}: val loss {loss:.4f}")

        # the best of the stage is the best of the run, too, as later stages start from it
        epoch_complete = progress.samples >= loader.batch_sampler.used
        keep_best(training, loss, epoch_complete, lower=True, names=(f"{stage.name}_best.pt", "best.pt"))
        if setup.args.scheduler == "plateau":
            reduce_on_plateau(progress, loss)
        if not next_epoch(training):
            return 0


def log_evaluation(
    split: str, stage: StagePlan, models: list[StageNet], setup: Setup, training: TrainingRun, **more
) -> int:
    """All ranks: evaluate the cascade up to a stage, log and draw it; the exit code of a stop signal, else 0."""
    progress = training.progress
    metrics, example = evaluate(split, models, setup, training.stop)
    if metrics is None:
        say_saved(progress.step)
        return int(reduce_max([training.stop.code])[0])
    training.log.write(progress.step, progress.epoch + 1, metrics | more)
    if world()[0] == 0:
        print_metrics(f"{split}, {stage.name}", split, metrics)
    name = f"{stage.name}_val" if split == "val" else split
    training.log.figures(lambda: {name: draw_result(example, stage_names(setup.args))}, progress.step)
    return 0


def load_position(
    checkpoint: dict, choice: StageChoice, this_run: dict, progress: StageProgress, setup: Setup
) -> list[StageNet]:
    """All ranks: put the progress where a checkpoint stands; returns the models of the stages before.

    Raises InputError for the checkpoint of another run.
    """
    if choice.anew:
        # another stage may have another batch
        this_run = {name: value for name, value in this_run.items() if name != "effective_batch_size"}
    else:
        checkpoint.need("net", "ema", "optimizer", "scaler", "rng")
    best = f"{stage_names(setup.args)[choice.first]}_best.pt"
    resume(progress, checkpoint, this_run, Path(setup.args.checkpoint_dir), best)
    setup.data.greys = [GreyFit._make(fit) for fit in checkpoint["greys"]]
    models = load_models(checkpoint, setup.args, setup.device)
    return models if choice.anew else models[:-1]


def open_log(checkpoint: dict | None, choice: StageChoice, last_step: int, setup: Setup, ranks: Ranks) -> RunLog:
    """All ranks: the log of the run, which makes the run folder this run's."""
    args = setup.args
    run_folder = Path(args.checkpoint_dir)
    next_stage = checkpoint is not None and choice.anew
    resumed = at_end_of_step(checkpoint, run_folder) if next_stage else checkpoint
    log = RunLog(run_folder, ranks, LOSSES, last_step, args.log_every, setup.precision, args.compile)
    log.open(args, resumed)
    log.curves = ["val/loss", "val/diffusion_loss", "val/physics_loss"]
    if next_stage:
        # what the stage before had not logged yet
        log.context = {"stage": choice.first}
        log.write_rest(resumed["step"], resumed["state"]["epoch"] + 1)
    return log


def fit(precision: str, reason: str, args: argparse.Namespace, ranks: Ranks) -> int:
    """Train the stages one after another, test the last; returns the exit code. reason: for the precision."""
    begun = time.time()
    run_folder = Path(args.checkpoint_dir)
    checkpoint = load_checkpoint(args.resume_from, run_folder, FORMAT, resume=True)
    if checkpoint:
        vars(args).update(adopted_settings(vars(args), args.source, checkpoint, args.resume_from))
        asked_by = args.source["mixed_precision"]
        precision, reason = keep_precision(precision, reason, checkpoint, asked_by, ranks)
    reason = set_numerics(ranks.device, precision, reason, args.deterministic)
    accelerator = make_accelerator(precision, args.gradient_accumulation_steps, ranks)

    # which stages, their patients, and the batch of each
    reached = checkpoint["state"]["stage"] if checkpoint else None
    choice = choose_stages(args.stage, stage_names(args), reached, args.resume_from)
    sizes = [stage["volume_size"] for stage in args.stage_configs[: choice.last + 1]]
    data = load_data(sizes, args, ranks.device)
    setup = Setup(args, ranks.device, precision, data, accelerator)
    begun_stage = None if choice.anew else checkpoint
    plan = plan_stages(choice.first, begun_stage, setup)

    # begin, or resume where the checkpoint stands
    progress = StageProgress()
    effective_batch_size = plan[choice.first].effective_batch_size
    this_run = {"seed": args.seed, "training_data": data.fingerprint, "effective_batch_size": effective_batch_size}
    models = load_position(checkpoint, choice, this_run, progress, setup) if checkpoint else []
    if choice.anew:
        begin_stage(progress, choice.first)
    end_of_stages = end_of_run(plan, choice, progress, args.stage, run_folder)
    last_step = min(args.max_steps or end_of_stages, end_of_stages)
    training = TrainingRun(
        run_folder=run_folder,
        progress=progress,
        last_step=last_step,
        planned_steps=last_step,
        effective_batch_size=effective_batch_size,
        precision=precision,
        log=open_log(checkpoint, choice, last_step, setup, ranks),
        contents=partial(run_contents, this_run, setup),
        save_every=args.save_every,
        keep_last=args.keep_last,
        max_bad_steps=args.max_bad_steps,
    )
    engine = f"by Accelerate ({accelerator.distributed_type.value})"
    launcher = f"{ranks.launcher}, world size {ranks.world_size}, {ranks.device}, {engine}"
    rows = describe_run(plan, choice.last, training, launcher, reason, setup)
    print_start("X-RAY TO CT CASCADE", ranks, training, rows)
    if ranks.is_main:
        print_stages(plan)
    warn_of_full_memory(data, sizes[-1])

    # the weights of a stage before are in the models; let go of the rest
    del checkpoint
    todo = plan[choice.first : choice.last + 1]
    with training.stop, contextlib.closing(training.log):
        say_if_finished(training, "--num_epochs_per_stage")
        code, best_step = train_stages(todo, models, begun_stage, setup, training)
        return code or test_cascade(models, best_step, plan, setup, training, begun)


def test_cascade(
    models: list[StageNet], best_step: int, plan: list[StagePlan], setup: Setup, training: TrainingRun, begun: float
) -> int:
    """The test patients by the whole cascade, the results of the run; the exit code."""
    last = plan[len(models) - 1]
    if code := log_evaluation("test", last, models, setup, training, best_step=best_step):
        return code
    weights = {}
    for stage, model in zip(plan, models, strict=False):
        weights |= {f"{stage.name}.{key}": value for key, value in model.state_dict().items()}
    export_weights(weights, training.run_folder / "model.safetensors")
    finish_run(training, begun, {"stages": len(models), "effective_batch_size": last.effective_batch_size})
    if world()[0] == 0:
        print_speed(plan, training.log, setup.device)
    say_where(training.run_folder)
    return 0


def run(args: argparse.Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    if args.make_drrs:
        print_main(f"{make_drrs(Path(args.make_drrs))} pictures rendered below {args.make_drrs}")
        return 0
    asked_by = args.source["mixed_precision"]
    precision, reason = agree_on_launched_precision(args.mixed_precision, asked_by, ranks)
    if args.eval_only or args.sample:
        use_checkpoint(precision, reason, args, ranks)
        return 0
    run_folder = Path(args.checkpoint_dir)
    lock = lock_run_folder(run_folder, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
    code = fit(precision, reason, args, ranks)
    del lock
    return code


def rehearse(args: argparse.Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step of each stage, or of --stage."""
    names = stage_names(args)
    wanted = [k for k, name in enumerate(names) if args.stage in (None, name, str(k + 1))]
    if not wanted:
        raise InputError(f"--stage {args.stage}: there are 1 to {len(names)}; name one of them")

    def make(stage: StagePlan, device: torch.device) -> RehearsedParts:
        precision, _ = choose_precision(args.mixed_precision, device)
        set_numerics(device, precision, "", args.deterministic)
        with device:
            model = build_model(stage.number, args, device)
        averaged = Ema(model, args.ema_decay).model
        trial = partial(trial_step, model, stage, Setup(args, device, precision), stage.batch.size)
        return RehearsedParts(model, averaged, make_optimizer(model, args), trial, precision)

    stages = [plan_as_asked(k, args.stage_configs[k], args.gradient_checkpointing) for k in wanted]
    rehearse_stages(stages, make, args.world_size, args.gpu_memory, bool(args.stage), args.gradient_checkpointing)


def main(args: argparse.Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    launch_workers(args.world_size or 1)
    with (
        setup_distributed(timeout=args.dist_timeout) as ranks,
        explain_out_of_memory(partial(out_of_memory_advice, args.auto_batch, ranks.device)),
    ):
        return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
