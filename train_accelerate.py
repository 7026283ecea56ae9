"""X-ray to CT: one to four X-rays in, the CT volume out, by a cascade of conditional diffusion models (guide 3).

    python train_accelerate.py --config configs/single_view_config.json                # one GPU, or CPU
    accelerate launch --multi_gpu --num_processes=4 --mixed_precision=fp16 train_accelerate.py \\
        --config configs/multi_view_config.json --wandb
    torchrun --nproc_per_node=4 train_accelerate.py --config configs/multi_view_config.json --wandb
    bash train_4gpu.sh --config configs/multi_view_config.json --method accelerate --wandb
    python train_accelerate.py --make_drrs data/cts                                    # render the X-rays of your CTs
    python train_accelerate.py --resume_from checkpoints_4gpu/stage3_best.pt --sample new_xrays

Data: <id>/<id>.nii.gz, <id>/<id>_pa_drr.png, <id>/<id>_lat_drr.png. Geometry and units: see tasks/cascade/projector.py.
"""

import contextlib
import gc
import math
import time
import warnings
from argparse import BooleanOptionalAction, Namespace
from functools import partial
from pathlib import Path

from old.cli_utils import Parser, RunError, add_common_arguments, number, parse_arguments, run_main
from old.cli_utils import seed_number, take_from_run, value_sources, whole
from tasks.cascade.settings import SECTIONS, adopt_settings, saved_settings, stages_of_flags
from tasks.cascade.settings import views_to_render, wrong_flags
from tasks.cascade.stages import StageChoice, choose_stages, stage_list
from tasks.cascade.views import DEFAULT_VIEWS, view_list, views_of

FORMAT = "cascade/2"
LOSSES = ["loss", "diffusion_loss", "physics_loss", "grad_norm", "skipped"]
CURVES = ["val/loss", "val/diffusion_loss", "val/physics_loss"]


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    yes_no = BooleanOptionalAction
    add = parser.add_argument_group("data").add_argument
    add("--dataset_path", default="./data/drr_patient_data", metavar="DIR", help="folder with a sub-folder per patient")
    add("--split_seed", type=seed_number, default=42, help="seed of the 80/10/10 split by patient")
    add("--split_files", nargs="+", metavar="FILE", help="ids of TRAIN VAL TEST, or of TRAIN TEST: a tenth validates")
    add("--flip_drrs_vertical", action=yes_no, default=True, help="X-rays show the head at the top; --no-...: the feet")
    add("--flip_drrs_horizontal", choices=("none", "pa", "lat", "both"), default="none", help="views stored mirrored")
    add("--augmentation", action=yes_no, default=True, help="move training patients up or down by 5%%, vary exposure")
    add("--cache_in_memory", action=yes_no, default=False, help="patients in EACH process: 35 MB each at 256^3")
    add("--cache_dir", default="runs/cache/cascade", help="decoded patients on disk, 38 MB each; may be deleted")
    add("--skip_alignment_check", action="store_true", help="do not compare each X-ray with its CT's projection first")
    add("--make_drrs", metavar="DIR", help="render the missing X-rays of every CT below DIR, and end")

    add = parser.add_argument_group("model").add_argument
    add("--img_size", type=whole(32), default=512, help="side of the X-rays in the encoder, pixels; lower it on OOM")
    add("--num_views", type=int, choices=(1, 2), default=2, help="1: frontal; 2: frontal and lateral")
    add("--views", type=view_list, metavar="JSON", help="1 to 4 views, with angles or cone beams; see the task's page")
    add("--encoder_dim", type=whole(16), default=512, help="channels of the X-ray encoder; lower it on OOM")
    add("--stage_configs", type=stage_list, metavar="JSON", help="list of stages; left out: 64^3, 128^3, 256^3")
    add("--num_timesteps", type=whole(10), default=1000, help="diffusion steps of training")
    add("--v_parameterization", action=yes_no, default=True, help="predict v (Salimans & Ho 2022); --no-...: noise")
    add("--xray_agreement", action=yes_no, default=True, help="hold volumes to the X-rays in training and sampling")
    add("--regression", action=yes_no, default=False, help="give the volume in one step, without diffusion: a rival")
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
    add("--num_samples", type=whole(1), default=1, help="of each test patient, for their mean, spread and coverage")
    add("--regression_run", metavar="DIR", help="run folder of a finished --regression on the same patients")
    add("--check_conditioning", action="store_true", help="test with others' X-rays, and with the stage before zeroed")
    add("--sample", metavar="DIR", help="write the CT volumes (NIfTI, HU) of the X-rays in DIR to samples/")

    add_common_arguments(parser, {"learning_rate": "lr"})
    args = parse_arguments(parser, argv, SECTIONS)
    args.source = value_sources(parser, args, argv, SECTIONS)
    if args.eval_only:
        take_from_run(parser, args, args.checkpoint_dir, ("dataset_path", "split_files", "cache_dir"))
    if reason := wrong_flags(vars(args), args.source):
        parser.error(reason)
    args.views = args.views or DEFAULT_VIEWS[: args.num_views]
    args.num_views = len(args.views)
    args.stage_configs = stages_of_flags(vars(args), args.source)
    return args


if __name__ == "__main__":
    # before the heavy imports, so that --help and a mistyped flag answer at once
    ARGS = parse_args()

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

# what all scripts share
from old.accelerate_utils import agree_on_launched_precision, keep_precision, make_accelerator
from old.checkpoint_utils import checkpoint_to_use, load_checkpoint, load_trained, lock_run_folder
from old.checkpoint_utils import prepare_checkpoint, trained_state
from old.distributed_utils import Ranks, agree_on_errors, create_distributed_dataloader
from old.distributed_utils import launch_workers, print_main, setup_distributed, world
from old.hardware_utils import autocast, choose_precision, set_numerics
from old.logging_utils import RunLog
from old.loop_utils import LossScaler, TrainingRun, clip_and_step, end_epoch, end_step
from old.loop_utils import explain_out_of_memory, keep_best, next_epoch, optimizer_steps
from old.loop_utils import restore_training, safety_flags, say_if_finished, say_saved, sync_gradients

# the cascade
from tasks.cascade.agreement import prior_state
from tasks.cascade.data import made_up_batch, prepare, source_of_flags
from tasks.cascade.diffusion import Draw, denoise, diffused, scales, training_draw
from tasks.cascade.evaluation import evaluate, mean_losses
from tasks.cascade.figures import draw_evaluation, draw_inputs
from tasks.cascade.files import make_drrs
from tasks.cascade.metrics import projection_error
from tasks.cascade.model import Ema, StageNet, XraySettings, seed_weights
from tasks.cascade.sampling import as_estimated, sample_folder
from tasks.cascade.setup import Setup

# its stages, and what is said of them
from tasks.cascade.plan import Learner, RehearsedParts, StagePlan, begin_stage, end_of_run, load_models
from tasks.cascade.plan import log_to_resume, lr_factor, measure_stage, out_of_memory_advice, part_of_run
from tasks.cascade.plan import plan_stages, reduce_on_plateau, rehearse_stages, resume_stages
from tasks.cascade.plan import write_rest_of_stage
from tasks.cascade.report import begin_speed, describe_agreement, finish_cascade, note_speed, print_metrics, print_run
from tasks.cascade.report import write_evaluation

# --- model ------------------------------------------------------------------------------------------------------------


def build_model(k: int, args: Namespace, device: torch.device) -> StageNet:
    """The model of stage k (from 0) with the same random weights on every rank."""
    seed_weights(args.seed, k)
    xray = XraySettings(views_of(args.views), args.img_size, args.encoder_dim)
    model = StageNet(args.stage_configs[k], xray)
    model.checkpointing = bool(args.gradient_checkpointing)
    return model.to(device)


def make_optimizer(model: StageNet, args: Namespace) -> torch.optim.AdamW:
    """Fused AdamW over one stage's model, which alone learns."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        fused=True,
    )


# --- loss -------------------------------------------------------------------------------------------------------------


def training_batch(
    batch: dict,
    k: int,
    epoch: int,
    setup: Setup,
) -> tuple[dict, Draw]:
    """A batch of stage k on the device, augmented, and what is drawn for it."""
    seed = None
    if setup.args.augmentation:
        seed = setup.args.seed + 1000003 * (k + 1)
    batch = prepare(batch, setup.device, seed, epoch, setup.moved)
    # a step that is only tried has no stages before
    previous = as_estimated(setup.cascade(k), batch, epoch)
    return batch, training_draw(k, batch, previous, epoch, setup.diffusion)


def sample_losses(
    model: nn.Module,
    batch: dict,
    draw: Draw,
    setup: Setup,
) -> tuple[Tensor, Tensor]:
    """(diffusion loss, physics loss) of each patient, (B,) fp32.

    The first is the mean square error of v or of the noise. The second compares the projections of the clean volume
    that the model implies with the X-rays; at high noise levels that volume is a guess, so each patient counts by its
    share of signal, alpha_bar(t).
    """
    diffusion = setup.diffusion
    with autocast(setup.device, setup.precision):
        noisy, target = diffused(batch["volume"], draw, diffusion)
        v, clean = denoise(model, noisy, draw.timestep, batch, draw.start, diffusion)
        signal = scales(diffusion, draw.timestep)[0].flatten().square()
        loss = (v - target).square().mean((1, 2, 3, 4))
        # an error of v is one of the noise, times the signal's scale
        if not setup.args.v_parameterization:
            loss = signal * loss
        errors = projection_error(clean, batch["extent"], batch["xrays"], diffusion.prior.greys)
        return loss, signal * errors.mean(1)


def trial_step(model: StageNet, stage: StagePlan, setup: Setup, batch_size: int) -> None:
    """Forward and backward pass of one micro-batch as in training, made up; the gradients stay in the model."""
    args = setup.args
    batch = made_up_batch(batch_size, stage.config["volume_size"], args.num_views, args.img_size)
    batch, draw = training_batch(batch, stage.number, 0, setup)
    diffusion_loss, physics_loss = sample_losses(model.train(), batch, draw, setup)
    loss = diffusion_loss + stage.config["physics_weight"] * physics_loss
    loss.mean().backward()


# --- training ---------------------------------------------------------------------------------------------------------


def make_learner(stage: StagePlan, checkpoint: dict | None, setup: Setup) -> Learner:
    """All ranks: what learns in a stage, at its start or as a checkpoint has it."""
    args = setup.args
    model = build_model(stage.number, args, setup.device)
    model.checkpointing = stage.batch.recomputed
    if setup.models and not checkpoint:
        # the X-rays' encoder starts from that of the stage before
        encoder = setup.models[-1].encoder
        model.encoder.load_state_dict(encoder.state_dict())
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
    wrapped = setup.accelerator.prepare_model(model)
    return Learner(model, wrapped, averaged, optimizer, scaler)


def train_one_epoch(
    k: int,
    learner: Learner,
    loader: DataLoader,
    training: TrainingRun,
    setup: Setup,
) -> None:
    """Train stage k from the run's position to the end of the epoch, of the stage or the run, or to a stop signal.

    Raises InputError on all ranks for an unusable file of any.
    """
    # 1 x 1 x 1 kernels have two memory layouts at once
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    learner.model.train()
    args = setup.args
    progress = training.progress
    scaler = learner.scaler
    physics_weight = args.stage_configs[k]["physics_weight"]
    for step in optimizer_steps(loader, training):
        factor = lr_factor(progress, training.planned_steps, args.warmup_steps, args.scheduler)
        lr = args.learning_rate * factor

        # forward and backward: each micro-batch gives its share of the mean over the global batch
        losses = torch.zeros(3, device=setup.device)
        for batch, last in step.micro_batches():
            batch, draw = training_batch(batch, k, progress.epoch, setup)
            with training.log.count_flops(step.samples), sync_gradients(learner.wrapped, now=last):
                parts = sample_losses(learner.wrapped, batch, draw, setup)
                share = step.weight / step.samples
                diffusion_loss, physics_loss = (part.sum() * share for part in parts)
                loss = diffusion_loss + physics_weight * physics_loss
                # DDP averages over the ranks; these are shares of a sum, so undo the division
                scaler.scale(loss * world()[1]).backward()
            losses += torch.stack([loss, diffusion_loss, physics_loss]).detach()

        # update the weights and their average; a non-finite gradient skips the step on all ranks together
        grad_norm = clip_and_step(learner.optimizer, scaler, args.grad_clip, lr)
        progress.stage_step += 1
        learner.averaged.update(learner.model, progress.stage_step)
        end_step(training, step, losses, grad_norm, lr)


def train_epochs(
    stage: StagePlan,
    learner: Learner,
    loader: DataLoader,
    training: TrainingRun,
    setup: Setup,
) -> int:
    """All epochs of a stage, each with its validation loss; the exit code of a stop signal, else 0."""
    progress = training.progress
    while True:
        train_one_epoch(stage.number, learner, loader, training, setup)
        if code := end_epoch(training):
            return code
        metrics = validation_loss(stage.number, learner.averaged.model, setup)
        loss = metrics["val/loss"]
        epoch = progress.epoch + 1
        training.log.write(progress.step, epoch, metrics)
        print_main(f"{stage.name} epoch {epoch}: val loss {loss:.4f}")

        # the best of the stage is the best of the run, too, as later stages start from it
        names = (f"{stage.name}_best.pt", "best.pt")
        epoch_complete = progress.samples >= loader.batch_sampler.used
        keep_best(training, loss, epoch_complete, lower=True, names=names)
        if setup.args.scheduler == "plateau":
            reduce_on_plateau(progress, loss)
        if not next_epoch(training):
            return 0


def fit_stage(
    stage: StagePlan,
    checkpoint: dict | None,
    setup: Setup,
    training: TrainingRun,
) -> int:
    """Train one stage from the run's position on, for setup.models; the exit code of a stop signal, else 0.

    checkpoint: where the stage is resumed in its middle. training: of the whole run.
    """
    args = setup.args
    learner = make_learner(stage, checkpoint, setup)
    if checkpoint:
        # its weights are in the models; let go of the host's memory
        checkpoint.clear()
    # a checkpoint also holds the averaged weights, and those of the stages before
    prepare_checkpoint(learner.model, copies=4 + len(setup.models))
    loader = create_distributed_dataloader(
        setup.data.set("train", stage.config["volume_size"]),
        stage.batch.size,
        seed=args.seed + 1000003 * stage.number,
        num_workers=setup.data.decoded.workers,
        accumulation=stage.batch.accumulation,
        effective_batch_size=stage.batch.total,
        drop_last=False,
    )
    held = nn.ModuleDict({"net": learner.model, "ema": learner.averaged.model, "earlier": nn.ModuleList(setup.models)})
    part = part_of_run(training, stage, partial(checkpoint_contents, stage, learner, setup), held)

    # at its start a stage is written down and drawn
    begin_speed(stage, training.log, setup.device)
    if training.progress.stage_step == 0:
        if stage.number > 0:
            part.save()
        make_batch = partial(training_batch, k=stage.number, epoch=0, setup=setup)
        draw_figure = partial(draw_inputs, stage, setup.data, setup.diffusion, make_batch)
        training.log.figures(draw_figure, training.progress.step)
    if code := train_epochs(stage, learner, loader, part, setup):
        return code

    # what the next stage and the test take
    path = training.run_folder / f"{stage.name}_best.pt"
    best = load_checkpoint(str(path), training.run_folder, FORMAT)
    load_trained(learner.averaged.model, best["ema"])
    setup.models.append(learner.averaged.model)
    setup.best_step = best["step"]
    setup.accelerator.free_memory()
    return 0


# --- evaluation -------------------------------------------------------------------------------------------------------


def validation_loss(k: int, model: StageNet, setup: Setup) -> dict[str, float]:
    """val/loss and its parts, the same on all ranks. Raises RunError."""
    stage = setup.args.stage_configs[k]
    dataset = setup.data.set("val", stage["volume_size"])
    before = partial(as_estimated, setup.cascade(k), epoch=0)
    losses = partial(sample_losses, model, setup=setup)

    # at fixed noise
    diffusion_loss, physics_loss = mean_losses(
        k,
        dataset,
        setup.diffusion,
        setup.device,
        before,
        losses,
    )
    loss = diffusion_loss + stage["physics_weight"] * physics_loss
    if not math.isfinite(loss):
        raise RunError("the validation loss is not finite; lower --learning_rate")
    return {
        "val/loss": loss,
        "val/diffusion_loss": diffusion_loss,
        "val/physics_loss": physics_loss,
    }


def log_evaluation(split: str, stage: StagePlan, setup: Setup, training: TrainingRun, **more) -> int:
    """All ranks: evaluate the cascade up to a stage, log and draw it; the exit code of a stop signal, else 0."""
    progress = training.progress
    args = setup.args
    result = evaluate(
        split,
        setup.cascade(),
        setup.data,
        args.num_samples,
        args.check_conditioning,
        training.stop,
    )
    if result.code:
        say_saved(progress.step)
        return result.code

    # the table, beside it what a regression gives, and the figures
    metrics = result.metrics | setup.regression_beside(split)
    training.log.write(progress.step, progress.epoch + 1, metrics | more)
    print_metrics(f"{split}, {stage.name}", split, metrics, result.kinds)
    name = f"{stage.name}_val" if split == "val" else split
    training.log.figures(partial(draw_evaluation, name, result.example, metrics), progress.step)
    return 0


# --- what a checkpoint holds, and a trained cascade -------------------------------------------------------------------


def checkpoint_contents(stage: StagePlan, learner: Learner, setup: Setup) -> dict:
    """What a checkpoint holds beside position, log and random state."""
    return {
        "format": FORMAT,
        "run": stage.run_facts(setup.args.seed, setup.data.fingerprint),
        "settings": saved_settings(vars(setup.args), setup.precision),
        "prior": prior_state(setup.diffusion.prior),
        "extent": setup.data.extent,
        "trained_patients": setup.data.ids["train"],
        "net": trained_state(learner.model),
        "ema": trained_state(learner.averaged.model, everything=True),
        "earlier": [trained_state(model, everything=True) for model in setup.models],
        "optimizer": learner.optimizer.state_dict(),
        "scaler": learner.scaler.state_dict(),
        "split": stage.batch.record(),
    }


def use_checkpoint(precision: str, reason: str, args: Namespace, ranks: Ranks) -> None:
    """--eval_only and --sample: what a trained cascade does. reason: for the precision."""
    run_folder = Path(args.checkpoint_dir)
    path = str(checkpoint_to_use(args.resume_from, run_folder))
    checkpoint = load_checkpoint(path, run_folder, FORMAT)
    adopt_settings(vars(args), args.source, checkpoint, path)
    set_numerics(ranks.device, precision, reason, args.deterministic)
    # an `accelerate config` that is of no use here is refused, as in training
    make_accelerator(precision, args.gradient_accumulation_steps, ranks)
    setup = Setup(args, ranks.device, precision)
    source = source_of_flags(vars(args), args.source, ranks.device)
    build = partial(build_model, args=args, device=ranks.device)
    setup.models = load_models(checkpoint, build)
    if args.eval_only:
        setup.data = source.load([setup.models[-1].size])
    setup.take_prior(checkpoint)

    if args.sample:
        sample_folder(
            Path(args.sample),
            run_folder / "samples",
            setup.cascade(),
            source.decoder(),
            checkpoint["extent"],
            args.num_samples,
        )
        return

    setup.data.refuse_trained(checkpoint, path)
    setup.take_regression(setup.models[-1].size)
    result = evaluate(
        "test",
        setup.cascade(),
        setup.data,
        args.num_samples,
        args.check_conditioning,
    )
    metrics = result.metrics | setup.regression
    print_metrics(f"test, {Path(path).name}", "test", metrics, result.kinds)
    facts = {"step": checkpoint["step"], "stage": len(setup.models)}
    write_evaluation(run_folder, metrics | facts, result.example, setup.data)


# --- the run ----------------------------------------------------------------------------------------------------------


def try_stage(setup: Setup, stage: StagePlan, checkpoint: dict | None) -> StagePlan:
    """All ranks: the stage measured, with a batch that fits. Raises RunError where it does not."""
    args = setup.args
    model = build_model(stage.number, args, setup.device)
    try_once = partial(trial_step, model, stage, setup)
    return measure_stage(stage, model, try_once, args.auto_batch, args.gradient_checkpointing, checkpoint)


def train_stages(todo: list[StagePlan], checkpoint: dict | None, setup: Setup, training: TrainingRun) -> int:
    """Train and validate one stage after another, test the last; the exit code of a stop signal, else 0."""
    say_if_finished(training, "--num_epochs_per_stage")
    for stage in todo:
        code = fit_stage(stage, checkpoint, setup, training)
        gc.collect()
        if code:
            return code
        checkpoint = None

        # sample the validation patients by all stages so far
        if code := log_evaluation("val", stage, setup, training):
            return code
        note_speed(stage, training.log)
        if training.progress.step >= training.last_step:
            break
        begin_stage(training.progress, stage.number + 1)
    return log_evaluation("test", stage, setup, training, best_step=setup.best_step)


def open_run(
    plan: list[StagePlan],
    choice: StageChoice,
    checkpoint: dict | None,
    setup: Setup,
    ranks: Ranks,
) -> TrainingRun:
    """All ranks: a run that begins, or resumes where the checkpoint stands, and its log. Raises InputError."""
    args = setup.args
    run_folder = Path(args.checkpoint_dir)
    first = plan[choice.first]
    this_run = first.run_facts(args.seed, setup.data.fingerprint)
    progress = resume_stages(checkpoint, this_run, choice, run_folder / f"{first.name}_best.pt")
    if checkpoint:
        build = partial(build_model, args=args, device=ranks.device)
        setup.models = load_models(checkpoint, build)[: choice.first]
    setup.take_prior(checkpoint)
    setup.take_regression(args.stage_configs[choice.last]["volume_size"])

    last_step = end_of_run(plan, choice, progress, args.stage, args.max_steps, run_folder)
    log = RunLog(run_folder, ranks, LOSSES, last_step, args.log_every, setup.precision, args.compile)
    log.curves = CURVES
    resumed = log_to_resume(checkpoint, choice, run_folder)
    log.open(args, resumed)
    write_rest_of_stage(log, resumed, choice)

    return TrainingRun(
        run_folder=run_folder,
        progress=progress,
        last_step=last_step,
        planned_steps=last_step,
        effective_batch_size=first.effective_batch_size,
        precision=setup.precision,
        log=log,
        # each stage has its own, see part_of_run
        contents=dict,
        **safety_flags(args),
    )


def fit(precision: str, reason: str, args: Namespace, ranks: Ranks) -> int:
    """Train the stages one after another, test the last; returns the exit code. reason: for the precision."""
    begun = time.time()
    run_folder = Path(args.checkpoint_dir)
    checkpoint = load_checkpoint(args.resume_from, run_folder, FORMAT, resume=True)
    if checkpoint:
        adopt_settings(vars(args), args.source, checkpoint, args.resume_from)
        asked_by = args.source["mixed_precision"]
        precision, reason = keep_precision(precision, reason, checkpoint, asked_by, ranks)
    reason = set_numerics(ranks.device, precision, reason, args.deterministic)
    accelerator = make_accelerator(precision, args.gradient_accumulation_steps, ranks)

    # which stages, their patients, and the batch of each
    choice = choose_stages(args.stage, args.stage_configs, checkpoint, args.resume_from)
    sizes = [stage["volume_size"] for stage in args.stage_configs[: choice.last + 1]]
    data = source_of_flags(vars(args), args.source, ranks.device).load(sizes)
    setup = Setup(args, ranks.device, precision, data, accelerator)
    begun_stage = None if choice.anew else checkpoint
    plan = plan_stages(
        args.stage_configs,
        choice.first,
        patients=len(data.split["train"]),
        recompute=args.gradient_checkpointing,
        measure=partial(try_stage, setup),
        checkpoint=begun_stage,
    )

    training = open_run(plan, choice, checkpoint, setup, ranks)
    engine = accelerator.distributed_type.value
    agreement = describe_agreement(setup.diffusion.prior, args.xray_agreement)
    more = {"precision": reason, "agreement": agreement}
    print_run(
        plan,
        choice.last,
        training,
        data,
        engine,
        more,
        vars(args),
        args.source,
    )

    # the weights of a stage before are in the models; let go of the rest
    del checkpoint
    with training, contextlib.closing(training.log):
        if code := train_stages(choice.of(plan), begun_stage, setup, training):
            return code
        finish_cascade(plan, setup.models, training, data, vars(args), begun)
    return 0


def run(args: Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    if args.make_drrs:
        views = views_to_render(vars(args), args.source)
        rendered = make_drrs(Path(args.make_drrs), views)
        print_main(f"{rendered} pictures rendered below {args.make_drrs}")
        return 0
    asked_by = args.source["mixed_precision"]
    precision, reason = agree_on_launched_precision(args.mixed_precision, asked_by, ranks)
    if args.eval_only or args.sample:
        use_checkpoint(precision, reason, args, ranks)
        return 0
    may_exist = bool(args.resume_from) or args.overwrite
    lock = lock_run_folder(Path(args.checkpoint_dir), may_exist, overwrite=args.overwrite)
    code = fit(precision, reason, args, ranks)
    del lock
    return code


def rehearse(args: Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step of each stage, or of --stage."""

    def make(stage: StagePlan, device: torch.device) -> RehearsedParts:
        precision, _ = choose_precision(args.mixed_precision, device)
        set_numerics(device, precision, "", args.deterministic)
        setup = Setup(args, device, precision)
        with device:
            model = build_model(stage.number, args, device)
        return RehearsedParts(
            model=model,
            averaged=Ema(model, args.ema_decay).model,
            optimizer=make_optimizer(model, args),
            trial=partial(trial_step, model, stage, setup, stage.batch.size),
            precision=precision,
        )

    recompute = args.gradient_checkpointing
    rehearse_stages(args.stage_configs, args.stage, make, args.world_size, args.gpu_memory, recompute)


def main(args: Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    launch_workers(args.world_size or 1)
    with setup_distributed(timeout=args.dist_timeout) as ranks:
        advice = partial(out_of_memory_advice, args.auto_batch, ranks.device)
        with explain_out_of_memory(advice):
            return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
