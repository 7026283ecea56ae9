"""CompressedAD: a transformer that learns in its context, without gradient steps, from histories of learners (guide 4).

    python train.py                                                               # one GPU, or CPU
    accelerate launch --config_file configs/accelerate_config.yaml train.py       # 2 GPUs, fp16
    accelerate launch --multi_gpu --num_processes=4 --mixed_precision=fp16 train.py
    torchrun --nproc_per_node=gpu train.py                                        # every GPU there is
    torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=192.168.1.1 --master_port=29500 train.py
    python train.py --model ad                                                    # without compression, to compare with
    python train.py --eval_only                                                   # 500 episodes on the 8 unseen goals

Data: learning histories, see tasks/compressed_ad/history_file.py; `tools.sample_data compressed_ad .` makes some.
"""

import argparse
import contextlib
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from old.cli_utils import Parser, add_common_arguments, number, parse_arguments
from old.cli_utils import run_main, seed_number, value_sources, whole
from tasks.compressed_ad.settings import FIXED, GUIDE_NAMES, KEPT, MODELS
from tasks.compressed_ad.settings import adopt_settings, check_warmup, fill_in, find_conflict

FORMAT = "compressed_ad/1"
LOSSES = ["loss", "accuracy", "grad_norm", "skipped"]

# agents per goal in the evaluations during training
VAL_SEEDS = 5
# histories of each unseen goal on which the action accuracy is taken
EVAL_STREAMS = 20


def parse_args(argv: list[str] | None = None) -> Namespace:
    """The flags, with what --model stands for filled in; args.source tells where each value comes from."""
    parser = Parser(__doc__)
    yes_no = argparse.BooleanOptionalAction
    positive = whole(1)
    add = parser.add_argument_group("data").add_argument
    histories = "datasets/history_darkroom_PPO_alg-seed42.hdf5"
    add("--data", default=histories, metavar="FILE", help="HDF5 file of histories, or a folder with one in datasets/")
    add("--split_seed", type=seed_number, default=0, help="seed of the split into 73 training goals and 8 unseen ones")
    add("--cache_in_memory", action=yes_no, default=True, help="decode all histories (60 MB a process) or map the file")

    add = parser.add_argument_group("model").add_argument

    def by_model(name: str, kind, text: str, *aliases: str) -> None:
        published, without = (MODELS[model][name] for model in MODELS)
        add(f"--{name}", *aliases, type=kind, help=f"{text}; left out: {published:g}, for ad {without:g}")

    add("--model", choices=tuple(MODELS), default="compressed_ad", help="ad: no compression; sets what is left out")
    by_model("tf_n_embd", whole(8), "width of the transformer; lower it on OOM")
    by_model("tf_n_layer", positive, "layers of the decoder")
    by_model("tf_n_head", positive, "attention heads, must divide --tf_n_embd")
    by_model("tf_dim_feedforward", whole(8), "width inside the layers")
    add("--encoder_n_layer", type=positive, default=3, help="layers of the encoder that compresses")
    by_model("n_latent", whole(0), "latent tokens of compressed context")
    add("--n_transit", type=whole(2), default=240, help="transitions in the context; halve it on OOM")
    add("--max_compression_depth", type=whole(0), default=3, help="most compressions in training; acting has no limit")

    add = parser.add_argument_group("optimisation").add_argument
    by_model("train_batch_size", positive, "segments per step and GPU; halve it on OOM", "--batch_size")
    by_model("train_timesteps", positive, "optimizer steps, and end of the cosine")
    by_model("lr", number(0, above=True), "learning rate at its height")
    scalings = ("none", "sqrt", "linear")
    add("--lr_scaling", choices=scalings, default="none", help="how --lr grows with the batch, from 128 (ad: 512) on")
    by_model("num_warmup_steps", whole(0), "optimizer steps of linear warm-up")
    add("--weight_decay", type=number(0), default=0.01, help="of AdamW")

    add = parser.add_argument_group("output and evaluation").add_argument
    add("--output_dir", help="run folder: checkpoints, logs, figures; left out: runs/compressed_ad, or runs/ad")
    add("--eval_interval", type=whole(0), default=1000, help="optimizer steps between evaluations; 0: at the end alone")
    add("--eval_episodes", type=whole(2), default=500, help="episodes of each agent in the test")
    add("--val_episodes", type=whole(2), default=50, help="episodes of each agent in evaluations during training")
    add("--eval_seeds", type=positive, default=20, help="agents on each unseen goal in the test")
    add("--test_batch_size", type=positive, default=256, help="agents or segments evaluated at once; lower it on OOM")
    add("--ad_run", metavar="DIR", help="run folder of a finished --model ad on the same goals, shown in the test")

    add_common_arguments(parser, GUIDE_NAMES)
    parser.set_defaults(log_every=100, save_every=1000, wandb_project="compressed-ad")
    args = parse_arguments(parser, argv)
    args.source = value_sources(parser, args, argv)
    fill_in(vars(args), args.source)
    if conflict := find_conflict(vars(args), args.source):
        parser.error(conflict)
    return args


if __name__ == "__main__":
    # before the heavy imports: --help and a mistyped flag answer at once
    ARGS = parse_args()

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# several processes, and the device and precision of each
from old.accelerate_utils import agree_on_launched_precision, keep_precision, make_accelerator
from old.distributed_utils import Ranks, StopSignal, agree_on_errors, broadcast_object, choose_workers, launch_workers
from old.distributed_utils import (
    print_main,
    reduce_sum,
    scale_learning_rate,
    schedule,
    setup_distributed,
    to_device,
    world,
)
from old.hardware_utils import autocast, set_numerics

# the run: its steps, its checkpoints and its log
from old.checkpoint_utils import checkpoint_to_use, export_weights, load_checkpoint
from old.checkpoint_utils import load_trained, lock_run_folder, prepare_checkpoint, trained_state
from old.logging_utils import RunLog
from old.loop_utils import LossScaler, Progress, Step, TrainingRun, clip_and_step, end_step
from old.loop_utils import explain_out_of_memory, finish_run, keep_best, optimizer_steps, print_start
from old.loop_utils import restore_training, resume, safety_flags, say_if_finished, say_saved, say_where
from old.loop_utils import stopped_in_evaluation, sync_gradients
from old.memory_utils import BatchSize

# the task
from tasks.compressed_ad.acting import ActedEpisodes, act_in_context
from tasks.compressed_ad.data import DarkroomData, evaluation_batches, make_loader, read_darkroom
from tasks.compressed_ad.memory import RehearsedParts, asked_batch, fit_segments_to_memory
from tasks.compressed_ad.memory import out_of_memory_advice, rehearse_segments
from tasks.compressed_ad.model import InContextNet
from tasks.compressed_ad.report import FinalTest, accuracy_metrics, describe_evaluation
from tasks.compressed_ad.report import describe_run, draw_inputs, draw_test, print_processes
from tasks.compressed_ad.report import read_baseline, report_test, return_metrics, save_figures, warn_of_histories

# --- data, model, loss ------------------------------------------------------------------------------------------------


class Experiment(NamedTuple):
    """A model, with what it learns from and is measured on. baseline: a run without compression, see read_baseline."""

    model: InContextNet
    data: DarkroomData
    precision: str
    args: Namespace
    baseline: dict | None = None


def read_data(args: Namespace) -> DarkroomData:
    """All ranks: the histories, the goals, and the segments to train on. Raises InputError."""
    return read_darkroom(
        path=args.data,
        in_memory=args.cache_in_memory,
        split_seed=args.split_seed,
        n_transit=args.n_transit,
        max_depth=args.max_compression_depth if args.n_latent else 0,
        seed=args.seed,
    )


def build_model(args: Namespace, device: torch.device) -> InContextNet:
    """The model with the same random weights on every rank."""
    torch.manual_seed(args.seed)
    model = InContextNet(
        dim=args.tf_n_embd,
        layers=args.tf_n_layer,
        heads=args.tf_n_head,
        hidden=args.tf_dim_feedforward,
        n_transit=args.n_transit,
        n_latent=args.n_latent,
        encoder_layers=args.encoder_n_layer,
    )
    return model.to(device)


def action_losses(model: nn.Module, batch: dict) -> tuple[Tensor, Tensor]:
    """(cross-entropy, whether the most likely action is right), both (B, n_transit) fp32, zero on padding."""
    logits = model(batch).float()
    target = batch["action"]
    losses = F.cross_entropy(
        logits.transpose(1, 2),
        target,
        reduction="none",
        ignore_index=-100,
    )
    right = logits.argmax(-1) == target
    return losses, right.float()


def make_optimizer(model: InContextNet, args: Namespace) -> torch.optim.AdamW:
    """Fused AdamW with the guide's betas."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=args.lr,
        betas=(0.9, 0.99),
        weight_decay=args.weight_decay,
        fused=True,
    )


def scale_lr(effective_batch_size: int, args: Namespace) -> float:
    """--lr, changed as --lr_scaling says for another effective batch than the published one."""
    published = MODELS[args.model]["train_batch_size"]
    return scale_learning_rate(args.lr, effective_batch_size / published, args.lr_scaling)


def describe_lr(effective_batch_size: int, args: Namespace) -> str:
    """The banner's row of the learning rate."""
    lr = scale_lr(effective_batch_size, args)
    scaling = f"--lr_scaling {args.lr_scaling}, published batch {MODELS[args.model]['train_batch_size']}"
    return f"{args.lr:g} -> {lr:g} ({scaling}), {args.num_warmup_steps} warm-up steps, then cosine"


# --- training ---------------------------------------------------------------------------------------------------------


def count_actions(step: Step) -> list[float]:
    """Actions to predict in this rank's share of a step."""
    actions = 0.0
    for batch in step.batches:
        actions += float(batch["length"].sum())
    return [actions]


def train_one_epoch(
    model: nn.Module,
    loader,
    optimizer,
    scaler: LossScaler,
    training: TrainingRun,
    args: Namespace,
) -> None:
    """Train from the run's position to the end of the epoch, to `training.last_step`, or to a stop signal.

    model: InContextNet, or DDP around it. Between log lines nothing is read back from the GPU.
    """
    model.train()
    world_size = world()[1]
    device = next(model.parameters()).device
    base_lr = scale_lr(training.effective_batch_size, args)

    # each epoch cuts other segments out of the histories
    loader.dataset.epoch = training.progress.epoch
    for step in optimizer_steps(loader, training, count=count_actions):
        factor = schedule(training.progress.step, training.planned_steps, args.num_warmup_steps, "cosine")
        lr = base_lr * factor

        # forward and backward: each micro-batch gives its share of the mean over the global batch's actions
        share = step.weight / step.totals[0]
        losses = torch.zeros(2, device=device)
        for batch, last in step.micro_batches():
            batch = to_device(batch, device)
            with training.log.count_flops(step.samples), sync_gradients(model, now=last):
                with autocast(device, scaler.precision):
                    action_loss, right = action_losses(model, batch)
                loss = action_loss.sum() * share
                accuracy = right.sum() * share
                # DDP averages over the ranks; these are shares of a sum, so undo the division
                scaler.scale(loss * world_size).backward()
            losses += torch.stack([loss.detach(), accuracy])

        # update the weights; a non-finite gradient skips the step on all ranks together
        grad_norm = clip_and_step(optimizer, scaler, args.grad_clip, lr)
        end_step(training, step, losses, grad_norm, lr)


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def action_accuracy(
    split: str,
    goals: list[int],
    experiment: Experiment,
) -> tuple[dict[str, float], np.ndarray]:
    """Loss and accuracy of the next action on some goals' histories; the accuracy (depth + 1, n_transit) by place."""
    model = experiment.model
    data = experiment.data
    args = experiment.args
    model.eval()
    device = model.positions.device

    # for each depth and place in the context: the loss, how many were right, and how many there were
    depths = data.segments.max_depth + 1
    table = torch.zeros(depths, 3, args.n_transit, dtype=torch.float64)
    for batch in evaluation_batches(data, goals, EVAL_STREAMS, args.test_batch_size):
        batch = to_device(batch, device)
        with autocast(device, experiment.precision):
            losses, right = action_losses(model, batch)
        there = (batch["action"] >= 0).float()
        numbers = torch.stack([losses, right, there], 1)
        depth = batch["depth"].cpu()
        table.index_add_(0, depth, numbers.double().cpu())

    return accuracy_metrics(split, reduce_sum(table))


def act(
    experiment: Experiment,
    goals: list[int],
    agents: int,
    episodes: int,
    stop: StopSignal | None,
) -> ActedEpisodes | None:
    """All ranks: so many agents on each goal, for so many episodes; None after a signal to any rank."""
    args = experiment.args
    return act_in_context(experiment.model, goals, agents, episodes, args.seed, args.test_batch_size, stop)


def evaluate_briefly(experiment: Experiment, stop: StopSignal) -> dict[str, float] | None:
    """In training: `val/` of 8 training goals, whose loss chooses best.pt, and `unseen/` of the test's, to look at.

    None after a signal to any rank.
    """
    args = experiment.args
    unseen = experiment.data.unseen_goals
    watched = experiment.data.train_goals[: len(unseen)]
    agents = min(VAL_SEEDS, args.eval_seeds)
    acted = act(experiment, watched + unseen, agents, args.val_episodes, stop)
    if acted is None:
        return None
    metrics, _ = action_accuracy("val", watched, experiment)
    unseen_metrics, _ = action_accuracy("unseen", unseen, experiment)
    metrics |= unseen_metrics
    watched_returns, unseen_returns = np.split(acted.returns, [len(watched)])
    metrics |= return_metrics("val", watched_returns, watched)
    metrics |= return_metrics("unseen", unseen_returns, unseen)
    return metrics


def final_test(experiment: Experiment, step: int, stop: StopSignal | None = None) -> FinalTest | None:
    """All ranks: the full evaluation on the unseen goals; None after a signal to any rank.

    step: of the checkpoint that is tested.
    """
    data = experiment.data
    args = experiment.args
    acted = act(experiment, data.unseen_goals, args.eval_seeds, args.eval_episodes, stop)
    if acted is None:
        return None
    metrics, accuracy = action_accuracy("test", data.unseen_goals, experiment)
    return FinalTest(args.model, step, data, metrics, acted, accuracy, experiment.baseline)


def evaluate_only(experiment: Experiment, checkpoint: dict, path: Path) -> None:
    """--eval_only: the test of a checkpoint. path: its file."""
    args = experiment.args
    with agree_on_errors():
        load_trained(experiment.model, checkpoint["net"])
    test = final_test(experiment, checkpoint["step"])
    if world()[0] == 0:
        # beside the checkpoint, not in another model's run
        run_folder = path.parent if args.source["output_dir"] == "default" else Path(args.output_dir)
        # of another checkpoint than the best: beside the run's own test, not in its place
        name = "test" if path.stem == "best" else path.stem
        report_test(test, run_folder, name)
        save_figures(test, run_folder, name)


# --- the run ----------------------------------------------------------------------------------------------------------


def trial_step(model: InContextNet, precision: str, batch: dict) -> None:
    """Forward and backward pass of one micro-batch, as in training; the gradients stay in the model."""
    device = model.positions.device
    with autocast(device, precision):
        losses, _ = action_losses(model, to_device(batch, device))
    losses.mean().backward()


def checkpoint_contents(
    model: InContextNet, optimizer, scaler: LossScaler, this_run: dict, batch: BatchSize, args: Namespace
) -> dict:
    """What a checkpoint holds beside position, log and random state."""
    settings = {name: getattr(args, name) for name in (*FIXED, *KEPT)}
    return {
        "format": FORMAT,
        "net": trained_state(model),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict() if scaler.precision == "fp16" else {},
        "run": this_run,
        "settings": settings | {"mixed_precision": scaler.precision},
        "split": batch.record(),
    }


def run(args: Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun = time.time()
    asked_by = args.source["mixed_precision"]
    precision, reason = agree_on_launched_precision(args.mixed_precision, asked_by, ranks)

    # what is tested, or resumed; a training has the run folder to itself from here on
    run_folder = Path(args.output_dir)
    used = args.resume_from
    lock = None
    if args.eval_only:
        used = str(checkpoint_to_use(used, run_folder))
    else:
        lock = lock_run_folder(run_folder, bool(used) or args.overwrite, overwrite=args.overwrite)
    checkpoint = load_checkpoint(used, run_folder, FORMAT, resume=not args.eval_only)
    changes = adopt_settings(vars(args), args.source, checkpoint, used) if checkpoint else []
    if not args.eval_only:
        for change in changes:
            print_main(f"warning: {change}")
        precision, reason = keep_precision(precision, reason, checkpoint, asked_by, ranks)
        check_warmup(vars(args), args.source)
    reason = set_numerics(ranks.device, precision, reason, args.deterministic)

    # the test, or the training
    accelerator = make_accelerator(precision, args.gradient_accumulation_steps, ranks)
    baseline = read_baseline(args.ad_run, args.split_seed, args.eval_episodes)
    print_processes(accelerator.distributed_type.value, precision, ranks)
    data = read_data(args)
    experiment = Experiment(build_model(args, ranks.device), data, precision, args, baseline)
    code = 0
    if args.eval_only:
        evaluate_only(experiment, checkpoint, Path(used))
    else:
        code = fit(experiment, checkpoint, reason, accelerator.prepare_model, begun, ranks)
    accelerator.free_memory()
    del lock
    return code


def fit(
    experiment: Experiment, checkpoint: dict | None, reason: str, wrap: Callable, begun: float, ranks: Ranks
) -> int:
    """Train, and test the best checkpoint; returns the exit code.

    reason: for the precision. wrap: of a model, for several processes. begun: time.time() at the start.
    """
    model, data, precision, args, _ = experiment
    run_folder = Path(args.output_dir)
    batch = asked_batch(args)
    try_batch = partial(trial_step, model, precision)
    batch = fit_segments_to_memory(try_batch, model, batch, data.segments.max_depth, args.auto_batch, checkpoint)
    workers = choose_workers(args.num_workers, args.source["num_workers"], ranks.device)
    loader = make_loader(data.segments, batch, args.seed, workers)
    effective_batch_size = loader.batch_sampler.effective_batch_size

    # begin, or resume where the checkpoint stands
    optimizer = make_optimizer(model, args)
    scaler = LossScaler(ranks.device, precision)
    progress = Progress()
    this_run = {"seed": args.seed, "training_data": data.fingerprint, "effective_batch_size": effective_batch_size}
    if checkpoint:
        resume(progress, checkpoint, this_run, run_folder)
        with agree_on_errors():
            load_trained(model, checkpoint["net"])
        restore_training(checkpoint, optimizer, scaler, args.weight_decay)

    # --max_steps ends a run earlier, with the same schedule
    last_step = min(args.max_steps or args.train_timesteps, args.train_timesteps)
    log = RunLog(run_folder, ranks, LOSSES, last_step, args.log_every, precision, args.compile)
    log.curves = ["val/return_first", "val/return_last", "unseen/return_first", "unseen/return_last"]
    log.open(args, checkpoint)
    training = TrainingRun(
        run_folder=run_folder,
        progress=progress,
        last_step=last_step,
        planned_steps=args.train_timesteps,
        effective_batch_size=effective_batch_size,
        precision=precision,
        log=log,
        contents=partial(checkpoint_contents, model, optimizer, scaler, this_run, batch, args),
        model=model,
        **safety_flags(args),
    )

    # say what will be done
    prepare_checkpoint(model)
    rows = describe_run(data, model, batch, loader, describe_lr(effective_batch_size, args), reason)
    print_start("COMPRESSED AD" if args.n_latent else "ALGORITHM DISTILLATION", ranks, training, rows)
    warn_of_histories(data, args.data)
    if args.compile:
        model.compile_layers()

    advice = partial(out_of_memory_advice, batch.size, batch.accumulation_flag, args.auto_batch, ranks.device)
    with explain_out_of_memory(advice), training, contextlib.closing(log):
        train_epoch = partial(train_one_epoch, wrap(model), loader, optimizer, scaler)
        code = train(experiment, train_epoch, loader.batch_sampler.used, training)
        return code or test_best(experiment, training, begun)


def train(experiment: Experiment, train_epoch: Callable, epoch_samples: int, training: TrainingRun) -> int:
    """All steps, with an evaluation every --eval_interval and at the end; the exit code of a stop signal or 0.

    train_epoch: train_one_epoch, of a TrainingRun and the flags. epoch_samples: of all ranks.
    """
    args = experiment.args
    progress = training.progress
    if progress.step == 0:
        training.log.figures(lambda: {"inputs": draw_inputs(experiment.data.segments)}, 0)
    say_if_finished(training, "--train_timesteps")
    while True:
        # also after a resume from here, as the evaluation may have been cut short
        is_end = progress.step >= training.last_step
        due = is_end or is_planned(progress.step, training, args)
        code = evaluate_and_keep(experiment, training) if due and progress.step else 0
        if code or is_end:
            return code

        # to the next evaluation, through as many epochs as that takes
        interval = args.eval_interval or training.last_step
        evaluations = progress.step // interval
        until = min(training.last_step, (evaluations + 1) * interval)
        stretch = replace(training, last_step=until)
        while progress.step < until:
            train_epoch(stretch, args)
            if training.stop.agreed:
                training.save()
                say_saved(progress.step)
                return training.stop.agreed
            if progress.samples >= epoch_samples:
                progress.epoch += 1
                progress.samples = 0


def is_planned(step: int, training: TrainingRun, args: Namespace) -> bool:
    """Whether the uninterrupted run, which --max_steps does not end, has an evaluation at this step."""
    on_interval = args.eval_interval > 0 and step % args.eval_interval == 0
    return on_interval or step >= training.planned_steps


def evaluate_and_keep(experiment: Experiment, training: TrainingRun) -> int:
    """Save, evaluate, and keep the checkpoint if it is the best; the exit code of a stop signal or 0."""
    step = training.progress.step
    epochs = epochs_begun(training.progress)
    training.save()
    if step >= training.last_step:
        training.log.write_rest(step, epochs)
    metrics = evaluate_briefly(experiment, training.stop)
    if metrics is None:
        return stopped_in_evaluation(training)
    training.log.write(step, epochs, metrics)
    print_main(f"step {step}: {describe_evaluation(metrics)}")

    # no rank decides by itself
    loss = broadcast_object(metrics["val/loss"])
    keep_best(training, loss, is_planned(step, training, experiment.args), lower=True)
    return 0


def test_best(experiment: Experiment, training: TrainingRun, begun: float) -> int:
    """Test best.pt, and write the weights and the summary; the exit code of a stop signal or 0."""
    run_folder = training.run_folder
    best = load_checkpoint(str(run_folder / "best.pt"), run_folder, FORMAT)
    load_trained(experiment.model, best["net"])
    train_seconds = time.time() - begun
    test = final_test(experiment, best["step"], training.stop)
    if test is None:
        return stopped_in_evaluation(training)
    if world()[0] == 0:
        report_test(test, run_folder)

    step = training.progress.step
    epochs = epochs_begun(training.progress)
    training.log.write(step, epochs, test.metrics | {"best_step": best["step"]})
    export_weights(trained_state(experiment.model), run_folder / "model.safetensors")
    times = {"epochs": epochs, "train_seconds": round(train_seconds, 1)}
    finish_run(training, begun, times)
    training.log.figures(partial(draw_test, test), step)
    print_main(f"{train_seconds:.0f} seconds of training, {time.time() - begun:.0f} in all")
    say_where(run_folder)
    return 0


def epochs_begun(progress: Progress) -> int:
    """Epochs that were begun; at the end of one the position is the start of the next."""
    within = int(progress.samples > 0)
    return max(1, progress.epoch + within)


def rehearse(args: Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step of segments of the greatest depth; ends the process."""

    def parts(ranks: Ranks) -> RehearsedParts:
        asked_by = args.source["mixed_precision"]
        precision, _ = agree_on_launched_precision(args.mixed_precision, asked_by, ranks)
        set_numerics(ranks.device, precision, "", args.deterministic)
        with ranks.device:
            model = build_model(args, ranks.device)
        return RehearsedParts(model, make_optimizer(model, args), partial(trial_step, model, precision), precision)

    depth = args.max_compression_depth if args.n_latent else 0
    rehearse_segments(parts, depth, asked_batch(args), args.world_size, args.gpu_memory)


def main(args: Namespace) -> int:
    """Rehearse, or join the other processes and run; returns the exit code."""
    if args.rehearse:
        rehearse(args)
    launch_workers(args.world_size or 1)
    with setup_distributed(timeout=args.dist_timeout) as ranks:
        asked = asked_batch(args)
        advice = partial(out_of_memory_advice, asked.size, asked.accumulation_flag, args.auto_batch, ranks.device)
        with explain_out_of_memory(advice):
            return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
