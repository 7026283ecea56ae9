"""What follows from the flags and the machine: precision, batch, loading, the cases, and how the banner tells them."""

import argparse
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from old.batch_utils import keep_effective_batch
from old.checkpoint_utils import Checkpoint, RunLock, checkpoint_to_use, load_checkpoint, lock_run_folder
from old.cli_utils import InputError
from old.distributed_utils import Ranks, agree_on_errors, create_distributed_dataloader, print_main, world
from old.hardware_utils import choose_precision, set_numerics, smaller_batch
from old.loop_utils import TrainingRun, agree_on_precision, print_start
from old.memory_utils import BatchSize, auto_batch_advice, batch_flags, fit_batch_to_memory, fits_by_itself

# the task
from tasks.survival.batch import cases_per_process, cores_per_process, describe_batch
from tasks.survival.batch import asked_batch, largest_batch, out_of_memory_advice, trial_step
from tasks.survival.cohort import Cohort, read_cohort
from tasks.survival.data import MultiGPUSurvivalDataset
from tasks.survival.flags import COLUMNS
from tasks.survival.folds import Fold, choose_folds
from tasks.survival.report import describe_cache, describe_cases, describe_model, print_warnings
from tasks.survival.targets import standardize_features
from tasks.survival.volumes import check_volumes, load_images


class Setup(NamedTuple):
    """What follows from the machine and the flags, the same for every fold.

    precision_reason: for the banner. cores: of one process.
    """

    ranks: Ranks
    precision: str
    precision_reason: str
    cores: int


def choose_setup(args: argparse.Namespace, ranks: Ranks) -> Setup:
    """All ranks: precision and --num_workers. Raises InputError, also for a batch that cannot be."""
    precision, reason = agree_on_precision(partial(choose_precision, args.mixed_precision, ranks.device))
    with agree_on_errors():
        if args.backend == "nccl" and ranks.device.type == "cpu":
            raise InputError("--backend nccl: needs GPUs; leave it out")
    reason = set_numerics(ranks.device, precision, reason, args.deterministic)
    # kernels of 1 x 1 x 1 have two layouts at once
    warnings.filterwarnings("ignore", message="Grad strides do not match")

    # a run that is resumed may have an effective batch of its own
    if not args.resume_from:
        asked_batch(args, ranks.world_size)
    return Setup(ranks, precision, reason, choose_workers(args, ranks.device))


def choose_workers(args: argparse.Namespace, device: torch.device) -> int:
    """Set --num_workers where no flag did; returns this node's cores per process."""
    cores = cores_per_process()
    if args.source["num_workers"] == "default":
        loads_beside = device.type == "cuda" or args.use_smart_cache
        args.num_workers = min(4, cores) if loads_beside else 0
        args.source["num_workers"] = "hardware"
    return cores


def out_of_memory_at(batch: BatchSize | None, args: argparse.Namespace, ranks: Ranks) -> str:
    """What a user is told where this batch of one process does not fit; None: the one of the flags."""
    size = cases_per_process(args.batch_size, ranks.world_size, args.source["batch_size"])
    accumulation = args.gradient_accumulation_steps
    if args.effective_batch_size:
        batch = batch or asked_batch(args, ranks.world_size)
    if batch:
        size = batch.size
        accumulation = batch.accumulation_flag
    otherwise = auto_batch_advice(args.auto_batch, ranks.device)
    return out_of_memory_advice(size, accumulation, ranks.world_size, otherwise)


def choose_batch_size(
    cox_loss: Callable[..., torch.Tensor],
    model: nn.Module,
    checkpoint: dict | None,
    args: argparse.Namespace,
) -> BatchSize:
    """The batch of the flags or of the run that is resumed, or what a step leaves room for. cox_loss: see try_cases."""
    keep_effective_batch(vars(args), args.source, checkpoint)
    wanted = asked_batch(args, world()[1])
    # the statistics of --norm batch depend on how the batch is split
    if args.norm == "batch" or not fits_by_itself(args.auto_batch, model.device):
        return wanted
    cases = wanted.share

    def try_once(size: int) -> None:
        try_cases(cox_loss, model, size, cases - size, args)

    words = partial(batch_flags, processes=1 if wanted.total else world()[1])
    advice = "pass a smaller --image_size or --resnet"
    return fit_batch_to_memory(try_once, model, wanted, words, advice, checkpoint=checkpoint)


def try_cases(
    cox_loss: Callable[..., torch.Tensor],
    model: nn.Module,
    cases: int,
    waiting: int,
    args: argparse.Namespace,
) -> None:
    """A trial step of so many cases, while others of the same step wait. cox_loss(log_hazard, time, event, ties)."""
    batch = largest_batch(cases, args.image_size)
    seed = args.seed if args.augment else None
    images = load_images(batch, model.device, seed, epoch=0)

    def loss_of(outputs: torch.Tensor) -> torch.Tensor:
        if args.task == "pretrain":
            return outputs.square().mean()
        return cox_loss(outputs[:, 0], batch["time"], batch["event"], args.ties)

    trial_step(model, images, loss_of, waiting)


def rehearse(
    build_model: Callable[..., nn.Module],
    make_optimizer: Callable[..., torch.optim.Optimizer],
    cox_loss: Callable[..., torch.Tensor],
    args: argparse.Namespace,
) -> None:
    """--rehearse: memory and FLOPs of one optimizer step on an imaginary GPU, of the script's functions; ends here."""
    from old import rehearsal_utils as rehearsal

    # --batch_size counts all processes, which are one for each GPU here unless a launcher started them
    here = None if "RANK" in os.environ else torch.cuda.device_count()
    processes = rehearsal.processes_to_plan_for(args.world_size or here)
    memory = rehearsal.memory_to_plan_for(args.gpu_memory)
    size = max(1, round(args.batch_size / processes))
    accumulation = args.gradient_accumulation_steps
    if args.effective_batch_size:
        batch = asked_batch(args, processes)
        size = batch.size
        accumulation = batch.accumulation

    # a step of it
    trace = rehearsal.Trace()
    with rehearsal.imaginary_gpu(trace) as ranks:
        precision, _ = choose_precision(args.mixed_precision, ranks.device)
        set_numerics(ranks.device, precision, "", args.deterministic)
        with ranks.device:
            model = build_model(args, precision, 1, None, ranks)
        trial = partial(try_cases, cox_loss, model, size, size * (accumulation - 1), args)
        optimizer = make_optimizer(model, args)
        step = rehearsal.rehearse_step(trace, model, optimizer, trial, accumulation, processes)

    # a smaller batch has the same result, but not where the statistics of --norm batch depend on it
    title = f"survival, {size} cases per GPU x {accumulation} accumulation, {precision}"
    words = partial(rehearsed_flags, size, accumulation, processes)
    if args.effective_batch_size:
        words = partial(batch_flags, accumulation=None)
    otherwise = "a smaller --image_size or --resnet"
    if args.norm == "batch":
        words = None
        otherwise = f"--norm group, {otherwise}"
    rehearsal.report_rehearsal(title, step, size, memory, words, otherwise)
    rehearsal.end_rehearsal()


def rehearsed_flags(size: int, accumulation: int, processes: int, samples: int) -> str:
    """The flags that ask for micro-batches of at most so many samples."""
    smaller, steps = smaller_batch(size, accumulation, samples)
    flags = batch_flags(smaller, steps, processes=processes)
    # the Cox loss wants all outputs before the first gradient
    return flags + ", by a third more arithmetic" * (accumulation == 1)


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def open_checkpoint(
    args: argparse.Namespace, run_folder: Path, format: str
) -> tuple[Checkpoint | None, str | None, RunLock | None]:
    """All ranks: (checkpoint to resume or use, its name, lock of the run folder where this is a training)."""
    if args.eval_only or args.predict:
        used = str(checkpoint_to_use(args.resume_from, run_folder))
        return load_checkpoint(used, run_folder, format), used, None

    # each fold of a cross-validation has its own
    if args.cross_validate:
        return None, None, None
    with agree_on_errors():
        if (run_folder / "fold_1").is_dir():
            raise InputError(f"{run_folder}: holds a cross-validation; give its flags, or choose another --log_dir")
    lock = lock_run_folder(run_folder, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
    return load_checkpoint(args.resume_from, run_folder, format, resume=True), args.resume_from, lock


# --- the cases --------------------------------------------------------------------------------------------------------


def read_cases(args: argparse.Namespace, cores: int) -> tuple[Cohort, list[Fold]]:
    """All ranks: the table and its folds, none with --predict; every volume that is needed is checked.

    cores: threads that read. Raises InputError.
    """
    with agree_on_errors():
        table = args.predict or args.csv_path
        columns = {name: getattr(args, name) for name in COLUMNS}
        cohort = read_cohort(table, args.data_dir, args.time_unit, outcome=not args.predict, **columns)
        folds = []
        if not args.predict:
            folds = choose_folds(
                cohort,
                count=args.folds,
                fold_column=args.fold_column,
                train_label=args.train_fold,
                val_label=args.val_fold,
                seed=args.seed,
                every=args.cross_validate,
            )

    # rows of no fold are not looked at
    if not args.skip_data_check:
        needed = np.arange(len(cohort))
        if folds:
            needed = np.unique(np.concatenate([rows for fold in folds for rows in (fold.train, fold.val)]))
        print_main(f"checking {len(needed)} volumes ...")
        check_volumes(cohort, needed, Path(args.cache_dir), bool(args.spacing or args.orientation), cores)
    return cohort, folds


def make_dataset(cohort: Cohort, rows: np.ndarray, args: argparse.Namespace, train=False) -> MultiGPUSurvivalDataset:
    """The cases of some rows of the cohort, as the flags say; SmartCache for training only."""
    smart = train and args.use_smart_cache
    # an unreadable volume is told in its batch, so that all ranks end together
    return MultiGPUSurvivalDataset(
        cohort,
        rows=rows,
        use_smart_cache=smart,
        num_workers=args.num_workers,
        event_balanced=train and args.event_balanced,
        raise_errors=False,
        image_size=args.image_size,
        window=args.hu_window,
        spacing=args.spacing,
        orientation=args.orientation,
        cache_dir=args.cache_dir if args.cache == "persistent" and not smart else None,
        cache_rate=args.cache_rate,
        replace_rate=args.replace_rate,
        seed=args.seed,
    )


def make_loader(fold: Fold, batch: BatchSize, args: argparse.Namespace) -> DataLoader:
    """The training cases of this rank. Raises InputError for a batch larger than an epoch."""
    loader = create_distributed_dataloader(
        make_dataset(fold.cohort, fold.train, args, train=True),
        batch.size,
        seed=args.seed,
        num_workers=0 if args.use_smart_cache else args.num_workers,
        accumulation=batch.accumulation,
        effective_batch_size=batch.total,
        drop_last=args.norm == "batch",
    )
    sampler = loader.batch_sampler
    if not sampler.steps_per_epoch():
        total = batch.size * world()[1]
        raise InputError(f"--batch_size {total}: larger than the {sampler.num_samples} cases of an epoch; lower it")
    return loader


def prepare_fold(fold: Fold, args: argparse.Namespace) -> Fold:
    """The fold with what --task pretrain learns, and with its cases for evaluations."""
    features = None
    if args.task == "pretrain":
        features = standardize_features(fold.cohort, fold.train, args.feature_columns)
    return fold._replace(
        features=features,
        train_set=make_dataset(fold.cohort, fold.train, args),
        val_set=make_dataset(fold.cohort, fold.val, args),
    )


# --- what is told -----------------------------------------------------------------------------------------------------


def describe_data(fold: Fold, effective_batch_size: int, args: argparse.Namespace) -> dict:
    """What may not differ between a run and one that is resumed from it."""
    rates = [args.cache_rate, args.replace_rate, world()[1]]
    return {
        "training_cases": len(fold.train),
        "effective_batch_size": effective_batch_size,
        "seed": args.seed,
        "optimizer": args.optimizer,
        "event_balanced": args.event_balanced,
        "training_data": fold.cohort.digest(fold.train),
        "smart_cache": f"rates and processes {rates}" if args.use_smart_cache else "off",
    }


def print_run(
    title: str,
    fold: Fold,
    loader: DataLoader,
    model: nn.Module,
    batch: BatchSize,
    training: TrainingRun,
    setup: Setup,
    args: argparse.Namespace,
) -> None:
    """Rank 0: the banner, and warnings; where a value is not a flag's, a row says where it is from."""
    origin = args.source
    kind = "threads" if args.use_smart_cache else "workers"
    name = f"{args.resnet}, {args.norm} norm"
    rows = {
        "batch": describe_batch(batch, setup.ranks.world_size),
        "learning rate": f"{args.lr:g} ({origin['lr']}), {args.scheduler}, not scaled",
        "precision": setup.precision_reason,
        "loading": f"{args.num_workers} {kind} per process ({origin['num_workers']})",
        "cache": describe_cache(loader.dataset, len(fold.train) + len(fold.val)),
    }
    rows |= describe_cases(fold) | describe_model(fold, model, name, args.image_size, args.ties)
    steps = training.planned_steps // args.epochs
    rows["epochs"] = f"{args.epochs} ({origin['epochs']}) of {steps} steps"
    print_start(title, setup.ranks, training, rows)
    print_warnings(fold, loader, args.eval_years)
