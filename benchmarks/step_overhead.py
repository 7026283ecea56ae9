"""What train.py's training loop costs over a bare one; loop_overhead.py has the loop of the other scripts.

    python benchmarks/step_overhead.py

Both loops have the same model, seed, data and optimizer. One process: samples/s of the script's train_one_epoch over
those of a bare loop (they alternate in one run; the median of the ratios counts), and whether the weights after 20
steps are equal bit for bit; that, too, for 2 processes against a bare DDP loop.
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
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from old.distributed_utils import Ranks, create_distributed_dataloader, reduce_sum, setup_distributed, to_device, world
from old.logging_utils import RunLog
from old.loop_utils import LossScaler, Progress, TrainingRun

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


# --- the loops --------------------------------------------------------------------------------------------------------


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
            left = min(per_epoch - place, end - done)
            for batch in itertools.islice(loader, left):
                one_step(batch, epoch)
                done += 1

    return Loop(model, train, sampler.effective_batch_size)


def script_loop(model: nn.Module, loader, training: TrainingRun, train_epoch: Callable, setup) -> Loop:
    """The script's own loop, from one epoch to the next.

    train_epoch: the script's train_one_epoch, of the run and its setup, which are the flags where there is no other.
    """
    sampler = loader.batch_sampler
    progress = training.progress

    def train(steps: int) -> None:
        end = progress.step + steps
        stretch = replace(training, last_step=end)
        while progress.step < end:
            train_epoch(stretch, setup)
            if progress.samples >= sampler.used:
                progress.epoch += 1
                progress.samples = 0

    return Loop(model, train, sampler.effective_batch_size)


def command_line(flags: str, files: dict[str, Path]) -> list[str]:
    """Some flags, and those that name a file or folder."""
    words = flags.split()
    for name, path in files.items():
        words += [f"--{name}", str(path)]
    return words


def wait(device: torch.device) -> None:
    """Until the GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def begin_training(
    run_folder: Path,
    losses: list[str],
    loader,
    args: argparse.Namespace,
    ranks: Ranks,
    progress: Progress,
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
    _, world_size = world()
    if world_size == 1:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sum_over_ranks(count: Tensor) -> float:
    """A number of all ranks together."""
    total = reduce_sum([int(count)])
    return float(total[0])


def backward_and_step(loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer, args) -> None:
    """Backward, clip, step, clear."""
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    nn.utils.clip_grad_norm_(trained, args.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def compressed_ad(kind: str, data: Path, run_folder: Path, ranks: Ranks) -> Loop:
    """train.py with the demo's model."""
    import train as script
    from tasks.compressed_ad.data import as_it_is

    config = ROOT / "configs" / "compressed_ad_demo.yaml"
    files = {"config": config, "data": data, "output_dir": run_folder}
    flags = "--num_warmup_steps 0 --num_workers 0 --mixed_precision no"
    args = script.parse_args(command_line(flags, files))
    model = script.build_model(args, ranks.device)
    segments = script.read_data(args).segments
    loader = create_distributed_dataloader(segments, args.train_batch_size, collate_fn=as_it_is)
    optimizer = script.make_optimizer(model, args)
    if kind == "script":
        accelerator = script.make_accelerator("no", 1, ranks)
        wrapped = accelerator.prepare_model(model)
        scaler = LossScaler(ranks.device, "no")
        training = begin_training(run_folder, script.LOSSES, loader, args, ranks, Progress())
        train_epoch = partial(script.train_one_epoch, wrapped, loader, optimizer, scaler)
        return script_loop(model, loader, training, train_epoch, args)

    wrapped = wrap(model)

    def one_step(batch: dict, epoch: int) -> None:
        actions = sum_over_ranks(batch["length"].sum())
        batch = to_device(batch, ranks.device)
        losses, _ = script.action_losses(wrapped, batch)
        loss = losses.sum() * (1 / actions)
        backward_and_step(loss * ranks.world_size, model, optimizer, args)

    return bare_loop(model, loader, one_step)


# --- measuring --------------------------------------------------------------------------------------------------------


def digest(model: nn.Module) -> str:
    """A digest of all weights."""
    weights = hashlib.sha256()
    for value in model.state_dict().values():
        array = value.detach().cpu().numpy()
        weights.update(array.tobytes())
    return weights.hexdigest()


def measure(options: argparse.Namespace) -> None:
    """One rank's part of a measurement; rank 0 prints a JSON line."""
    with setup_distributed() as ranks:
        result = compare(options, ranks)
        if ranks.is_main:
            print(json.dumps(result), flush=True)


def compare(options: argparse.Namespace, ranks: Ranks) -> dict:
    """{equal: whether the weights are, rates: {kind: samples/s of each timing}} of the loops in --kinds."""
    data = Path(options.data)
    loops: dict[str, Loop] = {}
    for kind in options.kinds.split(","):
        run_folder = Path(options.out) / kind
        loops[kind] = compressed_ad(kind, data, run_folder, ranks)
        loops[kind].train(COMPARED_STEPS)
    digests = {digest(loop.model) for loop in loops.values()}

    # the loops take turns, and take turns at being first
    rates: dict[str, list[float]] = {kind: [] for kind in loops}
    for repeat in range(options.repeats):
        backwards = repeat % 2 == 1
        for kind in sorted(loops, reverse=backwards):
            samples = options.steps * loops[kind].samples
            begun = time.perf_counter()
            loops[kind].train(options.steps)
            wait(ranks.device)
            seconds = time.perf_counter() - begun
            rates[kind].append(samples / seconds)
    return {"equal": len(digests) == 1, "rates": rates}


def launch(processes: int, **options) -> dict:
    """Run `measure` in so many processes of one thread each; returns rank 0's result."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += [__file__, "--measure", "--out", out]
        command += [f"--{name}={value}" for name, value in options.items()]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )

    # the result is the last JSON object that was printed
    objects = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(objects[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=30, help="optimizer steps of one timing")
    add("--repeats", type=int, default=7, help="timings of each loop, alternating; the median counts")

    # what a measuring process is told
    add("--measure", action="store_true", help=argparse.SUPPRESS)
    add("--data", help=argparse.SUPPRESS)
    add("--out", help=argparse.SUPPRESS)
    add("--kinds", default="bare,script", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return

    # this is the parent of those that measure
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/compressed_ad"
        command = [sys.executable, "-m", "tools.sample_data", "compressed_ad", data, "--streams", "20"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        one = launch(1, data=data, steps=options.steps, repeats=options.repeats)
        two = launch(2, data=data, steps=1, repeats=1)
    bare, script = one["rates"]["bare"], one["rates"]["script"]
    ratios = [ours / theirs for ours, theirs in zip(script, bare, strict=True)]
    speeds = f"{statistics.median(script):.1f} over {statistics.median(bare):.1f} samples/s"
    print(
        f"script over bare loop {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}; {speeds}); "
        f"weights after {COMPARED_STEPS} steps equal bit for bit: 1 process {one['equal']}, 2 processes {two['equal']}"
    )


if __name__ == "__main__":
    main()
