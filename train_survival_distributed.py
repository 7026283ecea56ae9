"""Survival from 3D CT: a NIfTI volume in, one log-hazard of a major adverse cardiac event (MACE) out (guide 2).

    python train_survival_distributed.py --csv_path data/dataset.csv            # every GPU; all else found by itself
    python train_survival_distributed.py --csv_path data/dataset.csv --world_size 1             # one GPU, or CPU
    torchrun --nproc_per_node=4 train_survival_distributed.py --csv_path data/dataset.csv
    ./launch_distributed_training.sh --script train_survival_distributed.py --csv_path data/dataset.csv
    python -m torch.distributed.launch --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=<node0_ip> \\
        --master_port=12355 train_survival_distributed.py --csv_path data/dataset.csv   # --node_rank=1 on node 1
    python train_survival_distributed.py --csv_path data/dataset.csv --cross_validate
    python train_survival_distributed.py --predict new.csv --resume_from runs/survival/best.pt

Data: a table (CSV or xlsx) with a path, a time, an event (1) or censoring (0) and a fold for each case, and CT volumes.
"""

import contextlib
import gc
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from old.cli_utils import InputError, Parser, number, parse_arguments, run_main, take_from_run, value_sources, whole
from tasks.survival.flags import COLUMNS, FIXED, OF_THE_RUN, add_cache_arguments, add_data_arguments
from tasks.survival.flags import add_output_arguments, adopt_settings, check_modes, check_settings, check_values

FORMAT = "survival/1"
LOSSES = ["loss", "events", "grad_norm", "skipped"]
TITLE = {"survival": "SURVIVAL", "pretrain": "SURVIVAL: PRE-TRAINING"}
# the score that best.pt is chosen by, and what is drawn of each epoch
HEADLINE = {"survival": "c_index", "pretrain": "r2"}
CURVES = {
    "survival": ["val/loss", "val/c_index", "val/c_index_uno", "val/auc"],
    "pretrain": ["val/loss", "val/r2"],
}
RESNETS = ("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
# cases per forward pass of an evaluation: the same at any world size, so that results are too
EVAL_BATCH = 4


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    add_data_arguments(parser)
    add_cache_arguments(parser)

    add = parser.add_argument_group("model").add_argument
    add("--task", choices=("survival", "pretrain"), default="survival", help="Cox, or features by squared error")
    add("--feature_columns", nargs="+", metavar="NAME", help="of --task pretrain; default: all numeric ones")
    add("--resnet", choices=RESNETS, default="resnet50", help="MONAI's 3D ResNet; a smaller one on OOM")
    add("--base_channels", type=whole(8), default=64, help="of the first stage; 64 as published, 8 for a trial")
    add("--norm", choices=("group", "batch"), default="group", help="group: the same on any number of GPUs")
    add("--init", choices=("random", "pretrained"), default="random", help="pretrained: from --pretrained_path")
    add("--pretrained_path", metavar="FILE", help="safetensors or checkpoint of a run here, or MedicalNet's .pth")
    add("--freeze_epochs", type=whole(0), default=0, help="first epochs in which only the head learns")

    add = parser.add_argument_group("optimisation").add_argument
    text = "cases per step over ALL GPUs, a multiple of their number (default: the nearest to 24)"
    add("--batch_size", type=whole(1), default=24, help=text + "; lower it on OOM")
    add("--epochs", type=whole(1), default=50, help="passes over the training fold, or over what is cached of it")
    add("--lr", type=number(0, above=True), default=1e-4, help="peak learning rate; not scaled with the GPUs")
    add("--optimizer", choices=("adamw", "adam", "sgd"), default="adamw", help="sgd with momentum 0.9")
    add("--weight_decay", type=number(0), default=1e-5, help="weight decay")
    add("--scheduler", choices=("cosine", "constant"), default="cosine", help="learning rate after the warm-up")
    add("--eta_min", type=number(0), default=1e-7, help="learning rate at the end of the cosine")
    add("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up")
    add("--max_grad_norm", type=number(0), help="the same as --grad_clip")

    # the Cox loss
    add("--ties", choices=("efron", "breslow"), default="efron", help="how the Cox loss treats equal event times")
    text = "keep the last N log-hazards as additional risk set, for small batches; 0: none"
    add("--cox_memory", type=whole(0), default=0, metavar="N", help=text)
    add("--event_balanced", action="store_true", help="put events into every step, as evenly as can be")

    add_output_arguments(parser)
    args = parse_arguments(parser, argv)
    args.source = value_sources(parser, args, argv)
    if args.eval_only or args.predict:
        take_from_run(parser, args, args.log_dir, COLUMNS if args.predict else OF_THE_RUN)
    check_modes(parser, args)
    check_values(parser, args)
    return args


# before the heavy imports: --help and a mistyped flag answer at once
if __name__ == "__main__":
    ARGS = parse_args()

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

# the processes, the checkpoints and the memory
from old.checkpoint_utils import export_weights, load_checkpoint, load_trained, prepare_checkpoint, trained_state
from old.distributed_utils import Ranks, agree_on_errors, broadcast_object, create_distributed_dataloader
from old.distributed_utils import (
    launch_workers,
    print_main,
    reduce_sum,
    schedule,
    setup_distributed,
    world,
    wrap_in_ddp,
)
from old.hardware_utils import autocast
from old.memory_utils import BatchSize

# the loop and its log
from old.logging_utils import RunLog, with_bar
from old.loop_utils import LossScaler, Progress, Step, TrainingRun, clip_and_step, end_epoch, end_step
from old.loop_utils import agree_on_signal, explain_out_of_memory, first_error, keep_best, next_epoch, optimizer_steps
from old.loop_utils import restore_training, resume, safety_flags
from old.loop_utils import say_if_finished, seed_ranks, sync_gradients

# the cases, and what is told of them
from tasks.survival.batch import rows_of_step
from tasks.survival.cohort import Cohort
from tasks.survival.cross_validation import cross_validate
from tasks.survival.data import MultiGPUSurvivalDataset
from tasks.survival.figures import draw_inputs
from tasks.survival.folds import Fold, check_evaluated
from tasks.survival.metrics import Evaluation, check_finite, score_fold
from tasks.survival.report import FoldResult, end_fold, print_epoch, write_evaluation, write_new_predictions
from tasks.survival.volumes import load_images

# the model's parts, and what follows from the flags
from tasks.survival.resnet import make_backbone, shortcut_type
from tasks.survival.settings import Setup, choose_batch_size, choose_setup, describe_data, print_run
from tasks.survival.settings import make_dataset, make_loader, open_checkpoint, out_of_memory_at
from tasks.survival.settings import prepare_fold, read_cases, rehearse
from tasks.survival.targets import CoxMemory, feature_loss
from tasks.survival.weights import Weights, first_weights, use_weights

# --- model ------------------------------------------------------------------------------------------------------------


class RiskNet(nn.Module):
    """MONAI's 3D ResNet and a linear head: (B, 1, X, Y, Z) in 0..1 -> (B, outputs) fp32; one output: the log-hazard."""

    def __init__(self, args: Namespace, precision: str, outputs: int, shortcut: str = "B"):
        super().__init__()
        self.precision = precision
        self.backbone = make_backbone(args.resnet, args.base_channels, args.norm, shortcut)

        # the head begins near zero, so that all cases begin with about the same risk
        self.head = nn.Linear(self.backbone.in_planes, outputs)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.weight.device

    def forward(self, images: Tensor) -> Tensor:
        # the head's fp32, whatever autocast does between
        dtype = self.head.weight.dtype
        with autocast(images.device, self.precision):
            images = images.to(dtype)
            images = images.contiguous(memory_format=torch.channels_last_3d)
            return self.head(self.backbone(images)).to(dtype)


def build_model(
    args: Namespace,
    precision: str,
    outputs: int,
    start: Weights | None,
    ranks: Ranks,
) -> RiskNet:
    """The model with the same weights on every rank: random ones, or those to start from.

    Raises InputError for weights that do not fit, and for --norm batch on several CPU processes.
    """
    torch.manual_seed(args.seed)
    model = RiskNet(args, precision, outputs, shortcut_type(args.resnet, start))
    if args.norm == "batch" and ranks.world_size > 1:
        if ranks.device.type == "cpu":
            raise InputError("--norm batch: statistics over several processes need GPUs; use --norm group")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(ranks.device, memory_format=torch.channels_last_3d)
    if start:
        use_weights(model, start)
    return model


# --- loss -------------------------------------------------------------------------------------------------------------


def cox_loss(
    log_hazard: Tensor,
    time: Tensor,
    event: Tensor,
    ties: str = "efron",
    extra: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Negative Cox partial log-likelihood per event: Efron (1977) or Breslow (1974) for tied event times.

    log_hazard (n,) on any device; time (n,) and event (n,) bool on the CPU, so that nothing waits for the GPU; extra:
    (log_hazard (m,), time (m,)) of cases that count as being at risk only. Half precision is raised to fp32. Without
    an event the result is 0, connected to the input.
    """
    if log_hazard.dtype != torch.float64:
        log_hazard = log_hazard.float()
    device = log_hazard.device
    rows = torch.nonzero(event)[:, 0]
    if not len(rows):
        return (log_hazard * 0).sum()

    # the hazard of all who are at risk at each event
    at_risk = log_hazard
    all_times = time
    if extra is not None:
        more, more_times = extra
        at_risk = torch.cat([log_hazard, more.to(log_hazard)])
        all_times = torch.cat([time, more_times])
    event_times = time[rows]
    outside = all_times < event_times[:, None]
    outside = outside.to(device, non_blocking=True)
    hazards = at_risk.expand(len(rows), -1)
    total = hazards.masked_fill(outside, -torch.inf).logsumexp(1)
    own = log_hazard[rows.to(device, non_blocking=True)]

    # of d tied events the l-th (from 0) sees only 1 - l/d of their hazard
    if ties == "efron":
        tied = event_times == event_times[:, None]
        places = tied.tril(-1).sum(1)
        before = places.double() / tied.sum(1)
        before = before.to(total.dtype).to(device, non_blocking=True)
        untied = (~tied).to(device, non_blocking=True)
        hazards = own.expand(len(rows), -1)
        together = hazards.masked_fill(untied, -torch.inf).logsumexp(1)
        total = total + torch.log1p(-before * (together - total).exp())
    return (total - own).sum() / len(rows)


def step_loss(
    outputs: Tensor,
    rows: np.ndarray,
    fold: Fold,
    ties: str,
    extra=None,
) -> Tensor:
    """Loss of (n, outputs) for these rows of the cohort: Cox, or with --task pretrain the features' squared error."""
    if fold.features:
        return feature_loss(outputs, fold.features.scores[rows])
    time = torch.from_numpy(fold.cohort.time[rows])
    event = torch.from_numpy(fold.cohort.event[rows])
    return cox_loss(outputs[:, 0], time, event, ties, extra)


# --- training ---------------------------------------------------------------------------------------------------------


class Learner(NamedTuple):
    """What the steps of a training change, and a checkpoint keeps. wrapped: the model, or DDP around it."""

    model: RiskNet
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    memory: CoxMemory
    wrapped: nn.Module | None = None


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """The fused form of --optimizer over all parameters, those that are frozen at first included."""
    parameters = list(model.parameters())
    options = {"lr": args.lr, "weight_decay": args.weight_decay, "fused": True}
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **options)
    if args.optimizer == "adam":
        return torch.optim.Adam(parameters, **options)

    # fused SGD fails where some have a momentum and others, unfrozen later, none
    optimizer = torch.optim.SGD(parameters, momentum=0.9, **options)
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def wrap_model(model: RiskNet, frozen: bool) -> nn.Module:
    """The model for one stretch of epochs: the backbone frozen or not, in DDP where there are several processes."""
    model.backbone.requires_grad_(not frozen)
    if world()[1] == 1:
        return model
    return wrap_in_ddp(model, model.device)


def train_step(
    learner: Learner,
    step: Step,
    images: list[Tensor],
    loss_of: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Gradients of one optimizer step, the same at any number of ranks and micro-batches; returns (loss, outputs).

    The Cox loss has no parts that add up: each case's risk set is the whole batch. So the outputs of all ranks are put
    together, every rank takes the loss of them all, and sends its own cases' part of the gradient back through its
    model. Micro-batches are first passed forward without memory, then again one by one. A rank without a share passes
    one case of no weight. images: of each micro-batch. loss_of: the loss of all cases' outputs.
    """
    if len(images) == 1:
        passed = [learner.wrapped(images[0])]
    else:
        with torch.no_grad():
            passed = [learner.model(batch) for batch in images]

    # the outputs of all ranks, and the loss of them all
    share = slice(step.first, step.first + step.local)
    local = torch.cat([output.detach() for output in passed])
    outputs = local.new_zeros(step.samples, local.shape[1])
    outputs[share] = local[: step.local]
    outputs = reduce_sum(outputs).requires_grad_()
    loss = loss_of(outputs)
    loss.backward()

    # a non-finite loss must give non-finite gradients, which reach every rank: all skip the step together
    finite = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
    # DDP averages over the ranks; these are parts of a sum, so undo the division
    grad = learner.scaler.scale(outputs.grad * finite * world()[1])
    grad = grad[share] if step.local else grad[:1] * 0

    # this rank's part of the gradient, back through its model
    for k, batch in enumerate(images, start=1):
        is_last = k == len(images)
        with sync_gradients(learner.wrapped, now=is_last):
            output = passed[0] if len(images) == 1 else learner.wrapped(batch)
            output.backward(grad[: len(output)])
        grad = grad[len(output) :]
    return loss.detach(), outputs.detach()


def train_one_epoch(
    learner: Learner,
    fold: Fold,
    loader: DataLoader,
    training: TrainingRun,
    args: Namespace,
) -> None:
    """Train from the run's position to the end of the epoch, of the run, or to a stop signal.

    Between log lines nothing is read back from the GPU. Raises InputError on all ranks for an unreadable volume of any.
    """
    model = learner.model
    progress = training.progress
    model.train()
    if progress.epoch < args.freeze_epochs:
        model.backbone.eval()
    seed = args.seed if args.augment else None
    load = partial(load_images, device=model.device, seed=seed, epoch=progress.epoch)
    for step in optimizer_steps(loader, training, count=rows_of_step):
        rows = np.array(step.totals, np.int64)
        images = [load(batch) for batch in step.batches]
        factor = schedule(progress.step, training.planned_steps, args.warmup_steps, args.scheduler)
        lowest = args.eta_min if progress.step >= args.warmup_steps else 0.0
        lr = lowest + (args.lr - lowest) * factor

        # forward and backward: the risk set of each event is the global batch, with what --cox_memory keeps
        extra = learner.memory.others(rows, fold.cohort.time)
        loss_of = partial(step_loss, rows=rows, fold=fold, ties=args.ties, extra=extra)
        with training.log.count_flops(step.samples):
            loss, outputs = train_step(learner, step, images, loss_of)
        learner.memory.add(rows, outputs[:, 0])

        # update the weights; a non-finite gradient skips the step on all ranks together
        grad_norm = clip_and_step(learner.optimizer, learner.scaler, args.grad_clip, lr)

        # loss and events are the same on all ranks, so that rank 0 alone enters them into the sum
        events = 0.0 if fold.features else float(fold.cohort.event[rows].sum())
        losses = torch.stack([loss, torch.full_like(loss, events)])
        if world()[0] > 0:
            losses = torch.zeros_like(losses)
        end_step(training, step, losses, grad_norm, lr)


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def compute_outputs(model: RiskNet, cases: MultiGPUSurvivalDataset, workers: int) -> np.ndarray:
    """(n, outputs) float64 of every case, in order and the same on all ranks.

    Raises InputError on all ranks for an unreadable volume, RunError when an output is not finite.
    """
    model.eval()
    loader = create_distributed_dataloader(cases, EVAL_BATCH, train=False, num_workers=workers)
    shape = (len(cases), model.head.out_features)
    outputs = torch.zeros(shape, dtype=torch.float64)
    error = ""
    batches = zip(loader.batch_sampler, loader, strict=True)
    for places, batch in with_bar(batches, "cases"):
        error = error or first_error([batch])
        images = batch["image"].to(model.device, non_blocking=True)
        outputs[places] = model(images).double().cpu()

    with agree_on_errors():
        if error:
            raise InputError(error)
    outputs = reduce_sum(outputs).numpy()
    check_finite(outputs)
    return outputs


def evaluate(
    model: RiskNet,
    fold: Fold,
    args: Namespace,
    final: bool = False,
) -> Evaluation:
    """Metrics and outputs of the validation fold, the same on all ranks.

    final: also the training fold, whose baseline hazard gives survival probabilities, and the bootstrap interval.
    """
    # no fork beside SmartCache's thread
    workers = args.num_workers if final or not args.use_smart_cache else 0
    val = compute_outputs(model, fold.val_set, workers)
    train = None
    if final and fold.features is None:
        train = compute_outputs(model, fold.train_set, workers)

    # rank 0 computes and tells the others, so that all take the same decisions
    scores = None
    if world()[0] == 0:
        loss = step_loss(torch.from_numpy(val), fold.val, fold, args.ties)
        scores = score_fold(fold, val, train, float(loss), args.eval_years)
    metrics, baseline = broadcast_object(scores)
    return Evaluation(metrics, val, train, baseline)


# --- the run ----------------------------------------------------------------------------------------------------------


def checkpoint_contents(
    learner: Learner,
    fold: Fold,
    batch: BatchSize,
    this_run: dict,
    args: Namespace,
) -> dict:
    """What a checkpoint holds beside position, log and random state."""
    settings = {name: getattr(args, name) for name in FIXED}
    return {
        "format": FORMAT,
        "model": trained_state(learner.model, everything=True),
        "optimizer": learner.optimizer.state_dict(),
        "scaler": learner.scaler.state_dict(),
        "memory": learner.memory.state(),
        "run": this_run,
        "split": batch.record(),
        "settings": settings | fold.flags,
        "trained_cases": fold.cohort.cases_of(fold.train),
    }


def fit(
    fold: Fold, run_folder: Path, checkpoint: dict | None, setup: Setup, args: Namespace
) -> tuple[int, FoldResult | None]:
    """Train on one fold, validate each epoch, evaluate the best; (exit code, results, None after a stop signal)."""
    begun = time.time()
    ranks = setup.ranks
    with agree_on_errors():
        fold = prepare_fold(fold, args)
        start = first_weights(checkpoint, args.pretrained_path)
        model = build_model(args, setup.precision, fold.outputs, start, ranks)
        del start
    batch = choose_batch_size(cox_loss, model, checkpoint, args)
    loader = make_loader(fold, batch, args)
    sampler = loader.batch_sampler
    planned_steps = args.epochs * sampler.steps_per_epoch()
    last_step = min(args.max_steps or planned_steps, planned_steps)

    # what is trained and what is logged; the scores of every epoch are drawn as curves
    scaler = LossScaler(ranks.device, setup.precision)
    memory = CoxMemory(args.cox_memory, ranks.device)
    learner = Learner(model, make_optimizer(model, args), scaler, memory)
    log = RunLog(run_folder, ranks, LOSSES, last_step, args.log_every, setup.precision, args.compile)
    log.curves = CURVES[args.task]
    this_run = describe_data(fold, sampler.effective_batch_size, args)

    # where the run stands and ends, and what a checkpoint of it holds
    training = TrainingRun(
        run_folder=run_folder,
        progress=Progress(),
        last_step=last_step,
        planned_steps=planned_steps,
        effective_batch_size=sampler.effective_batch_size,
        precision=setup.precision,
        log=log,
        contents=partial(checkpoint_contents, learner, fold, batch, this_run, args),
        model=model,
        **safety_flags(args),
    )

    # begin, or resume where the checkpoint stands
    seed_ranks(args.seed)
    if checkpoint:
        resume(training.progress, checkpoint, this_run, run_folder)
        memory.restore(checkpoint["memory"])
        restore_training(checkpoint, learner.optimizer, scaler, args.weight_decay)
    log.open(args, checkpoint)
    prepare_checkpoint(model)
    print_run(TITLE[args.task], fold, loader, model, batch, training, setup, args)
    if args.compile:
        model.compile()

    # SmartCache's thread ends with the training; the evaluations after it read all cases
    advice = partial(out_of_memory_at, batch, args, ranks)
    with training, contextlib.closing(log), explain_out_of_memory(advice):
        with contextlib.closing(loader.dataset):
            code, last_score = train(learner, fold, loader, training, args)
        if code:
            return code, None
        return 0, finish_fold(model, fold, training, last_score, begun, args)


def train(
    learner: Learner,
    fold: Fold,
    loader: DataLoader,
    training: TrainingRun,
    args: Namespace,
) -> tuple[int, float | None]:
    """All epochs, each with its validation; (exit code of a stop signal or 0, headline score of the last epoch)."""
    progress = training.progress
    headline = HEADLINE[args.task]
    # the evaluations of a run with SmartCache have no loading processes: read the fold once, in parallel
    if args.use_smart_cache:
        fold.val_set.read_ahead()
    say_if_finished(training, "--epochs")
    if progress.step == 0:
        seed = args.seed if args.augment else None
        training.log.figures(lambda: {"train_inputs": draw_inputs(fold.train_set, seed)}, 0)

    while True:
        # the backbone is trained from --freeze_epochs on: another DDP, one at a time on these parameters
        if learner.wrapped is None or progress.epoch == args.freeze_epochs:
            learner = learner._replace(wrapped=None)
            gc.collect()
            wrapped = wrap_model(learner.model, progress.epoch < args.freeze_epochs)
            learner = learner._replace(wrapped=wrapped)
            training.log.forget_flops()

        # a stop signal ends the run here, before the validation
        train_one_epoch(learner, fold, loader, training, args)
        if code := end_epoch(training):
            return code, None

        # best.pt is the checkpoint of the highest score, where it is undefined of the lowest loss
        metrics = evaluate(learner.model, fold, args).metrics
        training.log.write(progress.step, progress.epoch + 1, metrics)
        print_epoch(progress.epoch, headline, metrics)
        score = metrics[f"val/{headline}"]
        value = -metrics["val/loss"] if score is None else score
        epoch_complete = progress.samples >= loader.batch_sampler.used
        keep_best(training, value, epoch_complete)
        if not next_epoch(training):
            return 0, score


def finish_fold(
    model: RiskNet,
    fold: Fold,
    training: TrainingRun,
    last_score: float | None,
    begun: float,
    args: Namespace,
) -> FoldResult:
    """Score and export the weights of best.pt, in a cross-validation those of the last epoch; the end of the log.

    last_score: headline score of the last epoch. begun: time.time() at the start.
    """
    run_folder = training.run_folder
    last = None
    if args.cross_validate:
        last = evaluate(model, fold, args, final=True)
        export_weights(trained_state(model, everything=True), run_folder / "model.safetensors")

    # best.pt was chosen on the fold that is scored, so that a cross-validation may not be scored by it
    checkpoint = load_checkpoint(str(run_folder / "best.pt"), run_folder, FORMAT)
    load_trained(model, checkpoint["model"])
    best = evaluate(model, fold, args, final=True)
    if not args.cross_validate:
        export_weights(checkpoint["model"], run_folder / "model.safetensors")

    result = FoldResult(fold, training.progress.step, 0, last, best)
    end_fold(result, training, checkpoint, f"val/{HEADLINE[args.task]}", last_score, begun, args.eval_years)
    # a signal up to here ends a cross-validation before its next fold
    return result._replace(signal=agree_on_signal(training.stop))


def use_checkpoint(
    cohort: Cohort,
    folds: list[Fold],
    checkpoint: dict,
    used: str,
    setup: Setup,
    args: Namespace,
) -> None:
    """--predict: log-hazards of new cases. --eval_only: all that a run ends with, metrics in eval_val.json."""
    run_folder = Path(args.log_dir)
    start = first_weights(checkpoint)
    with agree_on_errors():
        model = build_model(args, setup.precision, start.outputs, start, setup.ranks)
    if args.predict:
        cases = make_dataset(cohort, np.arange(len(cohort)), args)
        outputs = compute_outputs(model, cases, args.num_workers)
        path = run_folder / f"predictions_{Path(args.predict).stem}.csv"
        with agree_on_errors():
            if setup.ranks.is_main:
                write_new_predictions(cohort, outputs[:, 0], used, path, args.eval_years)
        return

    # the cases of the validation fold, none of which was trained on
    with agree_on_errors():
        fold = prepare_fold(folds[0], args)
    check_evaluated(fold, start.outputs, checkpoint["trained_cases"], used)
    result = evaluate(model, fold, args, final=True)
    if setup.ranks.is_main:
        write_evaluation(fold, result, checkpoint, used, run_folder, args.eval_years)


def run(args: Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun = time.time()
    run_folder = Path(args.log_dir)
    setup = choose_setup(args, ranks)
    checkpoint, used, lock = open_checkpoint(args, run_folder, FORMAT)
    if checkpoint:
        adopt_settings(args, checkpoint, used)
    check_settings(args)

    cohort, folds = read_cases(args, setup.cores)
    if args.predict or args.eval_only:
        use_checkpoint(cohort, folds, checkpoint, used, setup, args)
        return 0
    if args.cross_validate:
        code = cross_validate(fit, folds, run_folder, FORMAT, setup, args)
    else:
        code, _ = fit(folds[0], run_folder, checkpoint, setup, args)
    print_main(f"{time.time() - begun:.0f} seconds in all")
    del lock
    return code


def main(args: Namespace) -> int:
    if args.rehearse:
        rehearse(build_model, make_optimizer, cox_loss, args)
    launch_workers(args.world_size or torch.cuda.device_count() or 1)
    # NCCL has no host tensors: gloo stays beside it
    backend = "gloo" if args.backend == "gloo" else None
    joined = setup_distributed(backend, timeout=args.dist_timeout)
    with joined as ranks, explain_out_of_memory(partial(out_of_memory_at, None, args, ranks)):
        return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
