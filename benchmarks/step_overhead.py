"""What a script's training loop costs over a bare one, for each of the five, and what a second process brings.

    python benchmarks/step_overhead.py                    # all five; on CPU about 10 minutes
    python benchmarks/step_overhead.py --tasks prs_med    # with samples/s of 2 processes over 1

Both loops have the same model, seed, data and optimizer. One process: samples/s of the script's train_one_epoch over
those of a bare loop (they alternate in one run; the median of the ratios counts), and whether the weights after 20
steps are equal bit for bit; that, too, for 2 processes against a bare DDP loop. For PRS-Med also samples/s of 2
processes over 1, one thread each, at a size that is bound by computing.
"""

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed_utils import (
    Ranks,
    all_gather_with_grad,
    create_distributed_dataloader,
    gather_objects,
    reduce_sum,
    setup_distributed,
    to_device,
    world,
)
from logging_utils import RunLog
from loop_utils import LossScaler, Progress, TrainingRun

ROOT = Path(__file__).resolve().parent.parent

# Steps after which the weights are compared; they warm the loops up, too.
COMPARED_STEPS = 20

# As many planned steps as this leave a cosine schedule at its height, to the bit.
ENDLESS = 10**15


class Loop(NamedTuple):
    """One way to train: its model, what makes so many optimizer steps more, and the samples of a step on all ranks."""

    model: nn.Module
    train: Callable[[int], None]
    samples: int


# --- what the five have in common -------------------------------------------------------------------------------------


def bare_loop(model: nn.Module, loader, one_step: Callable[[dict, int], None]) -> Loop:
    """Batches and steps: no logging, checkpoints, signals, resume, NaN guard. one_step takes a batch and its epoch."""
    sampler = loader.batch_sampler
    per_epoch = sampler.steps_per_epoch()
    done = 0

    def train(steps: int) -> None:
        nonlocal done
        model.train()
        end = done + steps
        while done < end:
            epoch, place = divmod(done, per_epoch)
            sampler.set_position(epoch, place * sampler.effective_batch_size)
            # the histories of CompressedAD are cut anew in each epoch; other sets do not look
            loader.dataset.epoch = epoch
            for batch in itertools.islice(loader, min(per_epoch - place, end - done)):
                one_step(batch, epoch)
                done += 1

    return Loop(model, train, sampler.effective_batch_size)


def script_loop(
    model: nn.Module, loader, training: TrainingRun, train_one_epoch: Callable[[TrainingRun], None]
) -> Loop:
    """The script's own loop, from one epoch to the next."""
    sampler = loader.batch_sampler
    progress = training.progress

    def train(steps: int) -> None:
        end = progress.step + steps
        stretch = replace(training, last_step=end)
        while progress.step < end:
            train_one_epoch(stretch)
            if progress.samples >= sampler.used:
                progress.epoch += 1
                progress.samples = 0

    return Loop(model, train, sampler.effective_batch_size)


def words(flags: str, **files: Path) -> list[str]:
    """A command line: some flags, and those that name a file or folder."""
    return [*flags.split(), *(word for name, path in files.items() for word in (f"--{name}", str(path)))]


def wait(device: torch.device) -> None:
    """Until the GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def begin_training(
    run_folder: Path, losses: list[str], loader, args: argparse.Namespace, ranks: Ranks, progress: Progress
) -> TrainingRun:
    """A run that logs as the script does and saves nothing."""
    run_folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(run_folder, ranks, losses, ENDLESS, args.log_every, "no")
    log.open(args)
    return TrainingRun(
        run_folder=run_folder,
        progress=progress,
        last_step=ENDLESS,
        planned_steps=ENDLESS,
        effective_batch_size=loader.batch_sampler.effective_batch_size,
        precision="no",
        log=log,
        contents=dict,
    )


def wrap(model: nn.Module) -> nn.Module:
    """DDP where there are several processes, as torch's manual has it."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True) if world()[1] > 1 else model


def update(model: nn.Module, optimizer: torch.optim.Optimizer, grad_clip: float) -> None:
    """Clip, step, clear."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    nn.utils.clip_grad_norm_(trained, grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# --- the five ---------------------------------------------------------------------------------------------------------


def prs_med(kind: str, data: Path, run_folder: Path, ranks: Ranks) -> Loop:
    """train_prs_med.py: loss and optimizer are the script's in both loops, here and below."""
    import train_prs_med as script

    flags = "--batch_size 16 --lora_dropout 0 --lr_scaling none --mixed_precision no"
    args = script.parse_args(words(flags, data_root=data, checkpoint_dir=run_folder))
    model = script.build_model(args, "no", ranks.device)
    rows = [row for row in script.read_annotations(data, None, False) if row.split == "train"]
    images = script.PositionData(rows, model.reader, True)

    # decoded before the clock starts
    for i in range(len(images)):
        images[i]
    loader = create_distributed_dataloader(images, args.batch_size, collate_fn=model.reader.collate)
    optimizer = script.make_optimizer(model, args)
    if kind == "script":
        wrapped = script.wrap_model(model, ranks)
        training = begin_training(run_folder, script.LOSSES, loader, args, ranks, Progress())
        scaler = LossScaler(ranks.device, "no")

        def train_one_epoch(stretch: TrainingRun) -> None:
            script.train_one_epoch(wrapped, loader, optimizer, scaler, stretch, args)

        return script_loop(model, loader, training, train_one_epoch)

    wrapped = wrap(model)

    def one_step(batch: dict, epoch: int) -> None:
        tokens = float(reduce_sum([int((batch["answer"] >= 0).sum())])[0])
        logits, text = wrapped(to_device(batch, ranks.device))
        seg = script.mask_loss(logits, batch["mask"]).sum() / (len(text) * ranks.world_size)
        loss = args.lambda_seg * seg + args.lambda_txt * (text.sum() / tokens)
        (loss * ranks.world_size).backward()
        update(model, optimizer, args.grad_clip)

    return bare_loop(model, loader, one_step)


def mimic_cxr(kind: str, data: Path, run_folder: Path, ranks: Ranks) -> Loop:
    """train_mimic_cxr.py by its torch engine."""
    import train_mimic_cxr as script
    from tasks.mimic_cxr.data import QuestionData, open_image_cache

    files = {
        "mimic_cxr_path": data / "mimic-cxr-jpg",
        "mimic_qa_path": data / "mimic-ext-cxr-qba",
        "image_encoder": data / "convnext_tiny",
        "text_encoder": data / "bert_tiny",
        "index_dir": data / "index",
        "output_dir": run_folder,
    }
    flags = "--no_auto_optimize --use_ddp --image_size 64 --batch_size 16 --dropout 0 --lr_schedule constant"
    flags += " --warmup_steps 0 --num_workers 0 --mixed_precision no"
    args = script.parse_args(words(flags, **files))
    index = script.open_index(Path(args.index_dir), Path(args.mimic_cxr_path), Path(args.mimic_qa_path))
    model, tokenizer = script.build_model(args, "no", ranks.device)
    cache = open_image_cache(index, args.image_size, args.cache_gb)
    questions = QuestionData(index, "train", args.mimic_cxr_path, cache, tokenizer, args.max_question_length)

    # in the image cache before the clock starts
    for i in range(len(questions)):
        questions[i]
    loader = create_distributed_dataloader(questions, args.batch_size, collate_fn=questions.collate)
    if kind == "script":
        engine = script.make_engine(model, script.Setup("no"), None, args)
        training = begin_training(run_folder, script.LOSSES, loader, args, ranks, Progress())

        def train_one_epoch(stretch: TrainingRun) -> None:
            script.train_one_epoch(engine, loader, stretch, args)

        return script_loop(model, loader, training, train_one_epoch)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)
    wrapped = wrap(model)

    def one_step(batch: dict, epoch: int) -> None:
        heads = torch.bincount(batch["head"], minlength=len(script.HEADS)).tolist()
        counts = reduce_sum([*heads, int(batch["known"].sum())]).tolist()
        losses = script.batch_loss(wrapped, to_device(batch, ranks.device), counts, args.chexpert_weight)
        (losses[0] * ranks.world_size).backward()
        update(model, optimizer, args.grad_clip)

    return bare_loop(model, loader, one_step)


def survival(kind: str, data: Path, run_folder: Path, ranks: Ranks) -> Loop:
    """train_survival_distributed.py on volumes from the disk cache."""
    import numpy as np

    import train_survival_distributed as script
    from tasks.survival.cohort import read_cohort

    flags = "--resnet resnet10 --base_channels 8 --image_size 48 40 24 --batch_size 8 --no-augment"
    flags += " --scheduler constant --eta_min 0 --num_workers 0 --mixed_precision no"
    args = script.parse_args(words(flags, csv_path=data / "dataset.csv", cache_dir=data / "cache", log_dir=run_folder))
    cohort = read_cohort(args.csv_path)
    rows = np.arange(len(cohort))
    model = script.build_model(args, "no", 1, None, ranks)
    volumes = script.make_dataset(cohort, rows, args, train=True)

    # in the cache before the clock starts
    for i in range(len(volumes)):
        volumes[i]
    loader = create_distributed_dataloader(volumes, args.batch_size // ranks.world_size)
    optimizer = script.make_optimizer(model, args)
    if kind == "script":
        wrapped = script.wrap_model(model, frozen=False)
        fold = script.Fold(cohort, "all", rows, rows, {})
        memory = script.CoxMemory(0, ranks.device)
        learner = script.Learner(model, optimizer, LossScaler(ranks.device, "no"), memory, wrapped)
        training = begin_training(run_folder, script.LOSSES, loader, args, ranks, Progress())

        def train_one_epoch(stretch: TrainingRun) -> None:
            script.train_one_epoch(learner, fold, loader, stretch, args)

        return script_loop(model, loader, training, train_one_epoch)

    wrapped = wrap(model)
    time_to_event = torch.from_numpy(cohort.time)
    event = torch.from_numpy(cohort.event)

    def one_step(batch: dict, epoch: int) -> None:
        outputs = all_gather_with_grad(wrapped(batch["image"].to(ranks.device)))
        cases = torch.cat(gather_objects(batch["index"]))
        script.cox_loss(outputs[:, 0], time_to_event[cases], event[cases]).backward()
        update(model, optimizer, args.grad_clip)

    return bare_loop(model, loader, one_step)


def cascade(kind: str, data: Path, run_folder: Path, ranks: Ranks) -> Loop:
    """train_accelerate.py in its second stage, which has the volume of the first beside the X-rays."""
    import train_accelerate as script
    from tasks.cascade.plan import StageProgress

    sizes = {"voxel_dim": 64, "vit_depth": 2, "num_heads": 4}
    stages = [sizes | {"volume_size": [16] * 3, "token_grid": 8}, sizes | {"volume_size": [32] * 3, "token_grid": 16}]
    flags = "--img_size 64 --encoder_dim 64 --batch_size 4 --scheduler constant --cache_in_memory --num_workers 0"
    files = {"dataset_path": data, "cache_dir": data / "cache", "checkpoint_dir": run_folder}
    args = script.parse_args([*words(flags, **files), "--mixed_precision", "no", "--stage_configs", json.dumps(stages)])
    stage = 1
    volume_size = args.stage_configs[stage]["volume_size"]
    source = script.data_source(args, ranks.device)
    patients = source.load([config["volume_size"] for config in args.stage_configs])
    setup = script.Setup(args, ranks.device, "no", patients)
    volumes = patients.set("train", volume_size)

    # decoded before the clock starts
    for i in range(len(volumes)):
        volumes[i]
    loader = create_distributed_dataloader(volumes, args.batch_size)
    model = script.build_model(stage, args, ranks.device)
    averaged = script.Ema(model, args.ema_decay)
    optimizer = script.make_optimizer(model, args)
    if kind == "script":
        wrapped = script.make_accelerator("no", 1, ranks).prepare_model(model)
        learner = script.Learner(model, wrapped, averaged, optimizer, LossScaler(ranks.device, "no"))
        training = begin_training(run_folder, script.LOSSES, loader, args, ranks, StageProgress(stage=stage))

        def train_one_epoch(stretch: TrainingRun) -> None:
            script.train_one_epoch(stage, learner, loader, stretch, setup)

        return script_loop(model, loader, training, train_one_epoch)

    wrapped = wrap(model)
    physics_weight = args.stage_configs[stage]["physics_weight"]
    steps = itertools.count(1)

    def one_step(batch: dict, epoch: int) -> None:
        batch, draw = script.training_batch(batch, stage, epoch, setup)
        losses = script.sample_losses(wrapped, batch, draw, patients.greys, setup)
        diffusion_loss, physics_loss = (loss.mean() for loss in losses)
        (diffusion_loss + physics_weight * physics_loss).backward()
        update(model, optimizer, args.grad_clip)
        averaged.update(model, next(steps))

    return bare_loop(model, loader, one_step)


def compressed_ad(kind: str, data: Path, run_folder: Path, ranks: Ranks) -> Loop:
    """train.py with the demo's model."""
    import train as script
    from tasks.compressed_ad.data import as_it_is

    config = ROOT / "configs" / "compressed_ad_demo.yaml"
    flags = "--num_warmup_steps 0 --num_workers 0 --mixed_precision no"
    args = script.parse_args(words(flags, config=config, data=data, output_dir=run_folder))
    model = script.build_model(args, ranks.device)
    segments = script.read_data(args).segments
    loader = create_distributed_dataloader(segments, args.train_batch_size, collate_fn=as_it_is)
    optimizer = script.make_optimizer(model, args)
    if kind == "script":
        wrapped = script.make_accelerator("no", 1, ranks).prepare_model(model)
        training = begin_training(run_folder, script.LOSSES, loader, args, ranks, Progress())
        scaler = LossScaler(ranks.device, "no")

        def train_one_epoch(stretch: TrainingRun) -> None:
            script.train_one_epoch(wrapped, loader, optimizer, scaler, stretch, args)

        return script_loop(model, loader, training, train_one_epoch)

    wrapped = wrap(model)

    def one_step(batch: dict, epoch: int) -> None:
        actions = float(reduce_sum([int(batch["length"].sum())])[0])
        losses, _ = script.action_losses(wrapped, to_device(batch, ranks.device))
        (losses.sum() * (1 / actions) * ranks.world_size).backward()
        update(model, optimizer, args.grad_clip)

    return bare_loop(model, loader, one_step)


class Task(NamedTuple):
    """build(kind, data, run folder, ranks) makes one of the two loops; sample_data: flags for what it reads."""

    build: Callable[[str, Path, Path, Ranks], Loop]
    sample_data: str


TASKS = {
    "prs_med": Task(prs_med, "--num_train 80 --num_val 1 --num_test 1 --image_size 96"),
    "mimic_cxr": Task(mimic_cxr, "--num_train 24 --num_val 6 --num_test 6 --image_size 80"),
    "survival": Task(survival, "--num_patients 40 --matrix 64"),
    "cascade": Task(cascade, "--num_patients 44 --matrix 32"),
    "compressed_ad": Task(compressed_ad, "--streams 20"),
}

# PRS-Med's data at a size that is bound by computing.
LARGE = "--num_train 40 --num_val 1 --num_test 1 --image_size 192"


# --- measuring --------------------------------------------------------------------------------------------------------


def digest(model: nn.Module) -> str:
    """A digest of all weights."""
    state = model.state_dict()
    return hashlib.sha256(b"".join(value.detach().cpu().numpy().tobytes() for value in state.values())).hexdigest()


def measure(options: argparse.Namespace) -> None:
    """One rank's part of a measurement; rank 0 prints a JSON line."""
    with setup_distributed() as ranks:
        result = compare(options, ranks)
        if ranks.is_main:
            print(json.dumps(result), flush=True)


def compare(options: argparse.Namespace, ranks: Ranks) -> dict:
    """{equal: whether the weights are, rates: {kind: samples/s of each timing}} of the loops in --kinds."""
    build = TASKS[options.task].build
    loops: dict[str, Loop] = {}
    for kind in options.kinds.split(","):
        loops[kind] = build(kind, Path(options.data), Path(options.out) / kind, ranks)
        loops[kind].train(COMPARED_STEPS)
    equal = len({digest(loop.model) for loop in loops.values()}) == 1

    # the loops take turns, and take turns at being first
    rates: dict[str, list[float]] = {kind: [] for kind in loops}
    for repeat in range(options.repeats):
        for kind in sorted(loops, reverse=bool(repeat % 2)):
            begun = time.perf_counter()
            loops[kind].train(options.steps)
            wait(ranks.device)
            rates[kind].append(options.steps * loops[kind].samples / (time.perf_counter() - begun))
    return {"equal": equal, "rates": rates}


def launch(processes: int, **options) -> dict:
    """Run `measure` in so many processes of one thread each; returns rank 0's result."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += [__file__, "--measure", "--out", out]
        command += [f"--{name}={value}" for name, value in options.items()]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def write_sample_data(task: str, folder: str, flags: str) -> str:
    """The folder, with sample data of the task in it."""
    command = [sys.executable, str(ROOT / "sample_data.py"), task, folder, *flags.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def report_overhead(task: str, data: str, steps: int, repeats: int) -> None:
    """Print one task's ratio, and whether the weights are equal."""
    one = launch(1, task=task, data=data, steps=steps, repeats=repeats)
    two = launch(2, task=task, data=data, steps=1, repeats=1)
    bare = one["rates"]["bare"]
    script = one["rates"]["script"]
    ratios = [ours / theirs for ours, theirs in zip(script, bare, strict=True)]
    speeds = f"{statistics.median(script):.1f} over {statistics.median(bare):.1f} samples/s"
    print(
        f"{task}: script over bare loop {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}; {speeds}); weights after {COMPARED_STEPS} steps equal bit for bit: "
        f"1 process {one['equal']}, 2 processes {two['equal']}",
        flush=True,
    )


def report_scaling(data: str, steps: int, repeats: int) -> None:
    """Print samples/s of PRS-Med's loop in 2 processes over 1."""
    rates = []
    for processes in (1, 2, 1, 2):
        result = launch(processes, task="prs_med", data=data, steps=steps, repeats=repeats, kinds="script")
        rates.append(statistics.median(result["rates"]["script"]))
    print("prs_med, compute-bound, samples/s of 1, 2, 1, 2 processes:", " ".join(f"{rate:.1f}" for rate in rates))
    print(f"prs_med, 2 processes over 1: {(rates[1] + rates[3]) / (rates[0] + rates[2]):.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS), help="which to measure")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of one timing")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each loop, alternating; the median counts")
    for name, default in (("task", ""), ("data", ""), ("out", ""), ("kinds", "bare,script")):
        parser.add_argument(f"--{name}", default=default, help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return

    # this is the parent of those that measure
    with tempfile.TemporaryDirectory() as folder:
        for task in options.tasks:
            data = write_sample_data(task, f"{folder}/{task}", TASKS[task].sample_data)
            report_overhead(task, data, options.steps, options.repeats)
        if "prs_med" in options.tasks:
            large = write_sample_data("prs_med", f"{folder}/large", LARGE)
            report_scaling(large, max(4, options.steps // 4), max(3, options.repeats // 2))


if __name__ == "__main__":
    main()
