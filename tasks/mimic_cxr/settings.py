"""Guide 1's settings: engine, precision and batch as they follow from the flags, the files and the machines."""

import argparse
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from old import deepspeed_utils
from old.batch_utils import keep_effective_batch
from old.cli_utils import InputError
from old.distributed_utils import Ranks, agree_on_errors, print_main, world
from old.hardware_utils import choose_precision, set_numerics, split_batch
from old.loop_utils import TrainingRun, agree_on_precision
from old.memory_utils import BatchSize, auto_batch_advice, batch_flags, fit_batch_to_memory, fits_by_itself
from old.question_utils import describe_sharing
from old.table_utils import parse_shares

# the task
from tasks.mimic_cxr.data import QuestionData
from tasks.mimic_cxr.engines import choose_engine, choose_precision_with, config_file, engine_copies
from tasks.mimic_cxr.flags import is_given, set_flags, translate_guide_keys
from tasks.mimic_cxr.hardware import HardwareSettings, processes_per_node, settings_of_job, settings_of_plan
from tasks.mimic_cxr.index import Index, open_index
from tasks.mimic_cxr.model import ChestModel, encoder_layers, recompute_activations
from tasks.mimic_cxr.own_index import open_own_index
from tasks.mimic_cxr.report import describe_memory, describe_trained, print_rehearsal


class Setup(NamedTuple):
    """How a run computes, as follows from its flags, files and machines; the reasons are for the banner.

    config: DeepSpeed's, which lies at config_path; None where torch trains.
    """

    precision: str
    precision_reason: str = ""
    engine_reason: str = ""
    config: dict | None = None
    config_path: str = ""
    hardware: HardwareSettings = HardwareSettings({})


def choose_setup(args: argparse.Namespace, ranks: Ranks) -> Setup:
    """All ranks: engine, precision, and the flags that the guide's keys and the hardware decide. Raises InputError."""
    processes = processes_per_node()
    for line in translate_guide_keys(args, ranks.device.type == "cuda", processes):
        print_main(line)
    hardware = apply_hardware(args, ranks, processes)

    config = None
    config_path = ""
    engine_reason = ""
    with agree_on_errors():
        file_named = is_given(args, "deepspeed_config")
        use_deepspeed, engine_reason = choose_engine(
            args.use_ddp, args.use_deepspeed, file_named, args.auto_optimize, ranks.world_size
        )
        if use_deepspeed and not args.eval_only:
            config_path = args.deepspeed_config or config_file(hardware.zero_stage)
            config = deepspeed_settings(config_path, args)
    choose = partial(choose_precision_with, config, args.mixed_precision, ranks.device)
    precision, reason = agree_on_precision(choose)

    # what the file says must go with the flags
    with agree_on_errors():
        if config is not None:
            batch = asked_batch(args)
            size = batch.size
            accumulation = batch.accumulation
            deepspeed_utils.fill_config(config, config_path, size, accumulation, args.grad_clip, precision)
    reason = set_numerics(ranks.device, precision, reason, args.deterministic)
    return Setup(precision, reason, engine_reason, config, config_path, hardware)


def apply_hardware(args: argparse.Namespace, ranks: Ranks, processes: int) -> HardwareSettings:
    """All ranks: what --auto_optimize finds, whose flags are set. processes: of a node."""
    if not args.auto_optimize:
        return HardwareSettings({})
    hardware = settings_of_job(ranks, processes, args.batch_size if is_given(args, "batch_size") else None)
    set_flags(args, hardware.flags, "hardware")
    leave_accumulation(args)
    return hardware


def leave_accumulation(args: argparse.Namespace) -> None:
    """With --effective_batch_size the accumulation follows from it, and not from the hardware."""
    if args.effective_batch_size:
        args.gradient_accumulation_steps = 1


def asked_batch(args: argparse.Namespace, checkpoint: dict | None = None) -> BatchSize:
    """The batch of the flags, or of the run that is resumed."""
    keep_effective_batch(vars(args), args.source, checkpoint)
    recomputed = bool(args.gradient_checkpointing)
    batch = BatchSize(args.batch_size, args.gradient_accumulation_steps, args.source["batch_size"], recomputed)
    return batch.of_effective_batch(args.effective_batch_size)


def deepspeed_settings(path: str, args: argparse.Namespace) -> dict:
    """DeepSpeed's config. Ours gives way to what --auto_optimize finds of memory; one that is named stands."""
    # without a GPU, DeepSpeed would search for one and warn; setup_distributed says why there is none
    if not torch.cuda.device_count():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    config = deepspeed_utils.read_deepspeed_config(path)
    source = args.source["gradient_checkpointing"]
    named = args.source["deepspeed_config"] != "default"
    weaker = source != "command line" if named else source == "default"
    if "activation_checkpointing" in config and weaker:
        set_flags(args, {"gradient_checkpointing": True}, Path(path).name)
    if args.offload_optimizer is False and not named:
        config["zero_optimization"].pop("offload_optimizer", None)
    if args.compile and config["zero_optimization"]["stage"] == 3:
        raise InputError("--compile: does not go with ZeRO-3; leave it out, or use stage 1 or 2")
    return config


def open_questions(args: argparse.Namespace) -> Index:
    """All ranks: the index of the releases' questions, or of a user's table, whose classes are kept for args.yaml."""
    if args.table:
        index = open_own_index(
            Path(args.index_dir),
            Path(args.table),
            args.categories,
            parse_shares(args.split),
            args.split_seed,
            args.max_missing,
        )
        args.categories = index.facts["categories"]
        return index

    # both releases
    return open_index(
        Path(args.index_dir),
        Path(args.mimic_cxr_path),
        Path(args.mimic_qa_path),
        args.quality_grade,
        args.view,
        args.max_missing,
        limit=64 if args.debug else 0,
    )


def choose_batch_size(
    try_once: Callable[[int], None],
    model: ChestModel,
    config: dict | None,
    checkpoint: dict | None,
    args: argparse.Namespace,
) -> BatchSize:
    """The batch of the flags, or what a step of the longest questions, try_once(batch size), leaves room for.

    Where no flag decided, activations are recomputed if not even one question fits. config: DeepSpeed's, None where
    torch trains.
    """
    wanted = asked_batch(args, checkpoint)
    recomputed = wanted.recomputed
    if not fits_by_itself(args.auto_batch, model.mean.device):
        return wanted

    # the encoders' layers must be known, or there is no recomputation to turn on
    turn_on = None
    advice = "pass --gradient_checkpointing or a smaller --image_size"
    undecided = args.gradient_checkpointing is None or args.source["gradient_checkpointing"] == "hardware"
    if undecided and not recomputed:
        with contextlib.suppress(InputError):
            encoder_layers(model, args.image_encoder, args.text_encoder)
            turn_on = partial(recompute_activations, model, args.image_encoder, args.text_encoder)
            advice = "pass a smaller --image_size"

    # as large as memory allows, the effective batch staying what it is
    return fit_batch_to_memory(
        try_once,
        model,
        wanted,
        batch_flags,
        advice,
        copies=engine_copies(config),
        recompute=turn_on,
        checkpoint=checkpoint,
    )


def rehearse_model(
    build_model: Callable,
    make_engine: Callable,
    trial_step: Callable,
    args: argparse.Namespace,
) -> None:
    """--rehearse: memory and FLOPs of one optimizer step of the longest questions, by DDP or one process.

    The first three are the script's functions. Ends the process.
    """
    from old import rehearsal_utils as rehearsal

    # the flags of the job that is planned
    processes = rehearsal.processes_to_plan_for(args.world_size)
    memory = rehearsal.memory_to_plan_for(args.gpu_memory)
    if args.auto_optimize:
        asked = args.batch_size if is_given(args, "batch_size") else None
        plan = settings_of_plan(processes, memory, asked)
        set_flags(args, plan.flags, "hardware")
        leave_accumulation(args)
    batch = asked_batch(args).planned_for(processes)

    # a step of it on a GPU that is not there
    trace = rehearsal.Trace()
    with rehearsal.imaginary_gpu(trace) as ranks, rehearsal.random_weights(ranks.device):
        precision, _ = choose_precision(args.mixed_precision, ranks.device)
        set_numerics(ranks.device, precision, "", args.deterministic)
        with ranks.device:
            model, _ = build_model(args, precision, ranks.device)
        engine = make_engine(model, Setup(precision), batch, args)
        trial = partial(trial_step, model, batch.size, args)
        step = rehearsal.rehearse_step(trace, model, engine.optimizer, trial, batch.accumulation, processes)

    title = f"MIMIC-CXR by DDP, {batch.size} per GPU x {batch.accumulation} accumulation, {precision}"
    recomputed = bool(args.gradient_checkpointing)
    print_rehearsal(title, step, batch.size, batch.accumulation_flag, recomputed, memory)
    rehearsal.end_rehearsal()


def out_of_memory_advice(size: int, accumulation: int | None, auto_batch: bool | None, device: torch.device) -> str:
    """The flags that take less memory than this batch."""
    half, micro_batches = split_batch(size, accumulation)
    smaller = batch_flags(half, micro_batches)
    otherwise = "--gradient_checkpointing, a smaller --image_size or ZeRO-3"
    otherwise += auto_batch_advice(auto_batch, device)
    return f"--batch_size {size}; try {smaller} (the same result), {otherwise}"


def describe_run(
    model: ChestModel,
    sets: dict[str, QuestionData],
    batch: BatchSize,
    setup: Setup,
    training: TrainingRun,
    args: argparse.Namespace,
) -> dict[str, str]:
    """The banner's rows of this script, {name: text}."""
    world_size = world()[1]
    source = args.source
    engine = "DDP" if world_size > 1 else "torch"
    if setup.config:
        engine = deepspeed_utils.describe(setup.config)

    # where the batch was fitted to memory, its source says so
    fitted = batch.accumulation != args.gradient_accumulation_steps
    accumulation_source = "fitted" if fitted else source["gradient_accumulation_steps"]
    accumulation = f"{batch.accumulation} accumulation ({accumulation_source})"
    recomputed_source = source["gradient_checkpointing"]
    if batch.recomputed and not args.gradient_checkpointing:
        recomputed_source = "one question did not fit without"

    # the questions, and the images that they are about
    questions = ", ".join(f"{len(data):,} {split}" for split, data in sets.items())
    selected = f"grade {args.quality_grade}, {source['quality_grade']}; view {args.view}"
    train = sets["train"]
    images = describe_sharing(len(train), train.count_images(), args.questions_per_image)
    if args.table:
        selected = args.table
    epoch_steps = training.planned_steps // args.epochs
    product = f"{batch.size} per GPU ({batch.source}) x {accumulation} x {world_size}"
    product += f" = {training.effective_batch_size}"

    rows = {
        "engine": f"{engine} ({setup.engine_reason})",
        "batch": batch.describe() if batch.total else product,
        "learning rate": f"{args.learning_rate:g} ({source['learning_rate']}), {args.lr_schedule}, not scaled",
        "precision": setup.precision_reason,
        "checkpointing": f"{batch.recomputed} ({recomputed_source})",
        "loading": f"{args.num_workers} workers per GPU ({source['num_workers']}), {args.cache_gb:g} GiB disk cache",
        "questions": f"{questions} ({selected})",
        # each of which is about one
        "images": images,
        "epochs": f"{args.epochs} epochs ({source['epochs']}), {epoch_steps} steps an epoch",
        "trained": describe_trained(model),
    }
    if setup.hardware.smallest_gpu is not None:
        used = {name: value for name, value in setup.hardware.flags.items() if source[name] == "hardware"}
        own_file = setup.config is not None and source["deepspeed_config"] == "default"
        rows["memory"] = describe_memory(setup.hardware.smallest_gpu, used, batch, own_file)
    return rows
