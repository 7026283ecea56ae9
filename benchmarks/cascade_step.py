"""What a training step of train_accelerate.py costs: over a bare loop, with gradient checkpointing, by SDPA.

    python benchmarks/cascade_step.py             # one process, made-up data; on CPU about 3 minutes
    python benchmarks/cascade_step.py --real      # on a GPU: the guide's three stages at their real size

Ratios are of times that alternate in one run. --real prints, per stage, samples/s, peak memory and the time that 1000
samples would take on 4 such GPUs, beside the guide's table; with bf16, and again with torch.compile.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from old.accelerate_utils import choose_launched_precision, make_accelerator
from old.distributed_utils import Ranks, create_distributed_dataloader
from old.hardware_utils import out_of_memory
from old.logging_utils import RunLog
from old.loop_utils import LossScaler, TrainingRun
from tasks.cascade import model as cascade_model
from tasks.cascade.data import prepare, source_of_flags
from tasks.cascade.diffusion import Draw, training_draw
from tasks.cascade.model import Ema
from tasks.cascade.plan import StageProgress, plan_as_asked
from tasks.cascade.sampling import Sampling, Trained, sample_cascade

# What is measured: the script's own functions.
from train_accelerate import (
    LOSSES,
    Learner,
    Setup,
    build_model,
    make_optimizer,
    parse_args,
    sample_losses,
    train_one_epoch,
    training_batch,
    try_stage,
)

ROOT = Path(__file__).resolve().parent.parent


class GuideStage(NamedTuple):
    """The guide's table for one stage: GB, and minutes of an epoch of 1000 samples on 4 A100."""

    gb: float
    minutes: float


# The key is the side of the stage's volume.
GUIDE = {64: GuideStage(15, 2), 128: GuideStage(40, 8), 256: GuideStage(70, 25)}


class Setting(NamedTuple):
    """One stage to measure, its number from 0, and what the script's functions need for it."""

    k: int
    setup: Setup

    @property
    def config(self) -> dict:
        """The stage's entry of --stage_configs."""
        return self.setup.args.stage_configs[self.k]


class Times(NamedTuple):
    """Seconds of each round in the two loops."""

    bare: list[float]
    script: list[float]


def synchronize() -> None:
    """Wait for the GPU where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def new_learner(setting: Setting) -> Learner:
    """The stage's model with the same first weights each time, its average, optimizer and scaler."""
    setup = setting.setup
    model = build_model(setting.k, setup.args, setup.device)
    return Learner(
        model=model,
        wrapped=model,
        averaged=Ema(model, setup.args.ema_decay),
        optimizer=make_optimizer(model, setup.args),
        scaler=LossScaler(setup.device, setup.precision),
    )


def bare_loop(setting: Setting, learner: Learner, batches: Iterable[dict], steps: int) -> None:
    """The shortest correct loop of the same computation: no logging, checkpoints, signals, resume, NaN guard."""
    setup = setting.setup
    model = learner.model
    physics_weight = setting.config["physics_weight"]
    model.train()
    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        batch, draw = training_batch(batch, setting.k, 0, setup)
        diffusion_loss, physics_loss = sample_losses(model, batch, draw, setup)
        loss = diffusion_loss.mean() + physics_weight * physics_loss.mean()
        loss.backward()

        torch.nn.utils.clip_grad_norm_(model.parameters(), setup.args.grad_clip)
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)
        learner.averaged.update(model, step)


# --- the script's loop over a bare one --------------------------------------------------------------------------------


def start_training(setting: Setting, ranks: Ranks) -> TrainingRun:
    """A run of the script that saves nothing."""
    endless = 10**9
    args = setting.setup.args
    run_folder = Path(args.checkpoint_dir)
    run_folder.mkdir()
    log = RunLog(run_folder, ranks, LOSSES, endless, args.log_every, "no")
    log.open(args)
    log.context = {"stage": setting.k + 1}

    return TrainingRun(
        run_folder=run_folder,
        progress=StageProgress(stage=setting.k),
        last_step=0,
        planned_steps=endless,
        effective_batch_size=setting.config["batch_size"],
        precision=setting.setup.precision,
        log=log,
        contents=dict,
    )


def overhead(setting: Setting, ranks: Ranks, rounds: int, steps: int) -> dict:
    """Time of a step in the script's loop over the bare loop's, in turns; and whether the weights come out equal."""
    setup = setting.setup
    train = setup.data.set("train", setting.config["volume_size"])
    # Every volume is decoded before the clock starts.
    for i in range(len(train)):
        train[i]

    accelerator = make_accelerator(setup.precision, 1, ranks)
    bare = new_learner(setting)
    script = new_learner(setting)
    script = script._replace(wrapped=accelerator.prepare_model(script.model))
    loader = create_distributed_dataloader(train, setting.config["batch_size"], drop_last=False)
    training = start_training(setting, ranks)
    progress = training.progress

    times = Times([], [])
    with training.stop:
        for _ in range(rounds + 1):
            loader.batch_sampler.set_position(0)
            begun = time.perf_counter()
            bare_loop(setting, bare, loader, steps)
            synchronize()
            times.bare.append(time.perf_counter() - begun)

            # The script makes as many steps on the same samples.
            progress.samples = 0
            progress.stage_step = 0
            training.last_step = progress.step + steps
            begun = time.perf_counter()
            train_one_epoch(setting.k, script, loader, training, setup)
            times.script.append(time.perf_counter() - begun)
    training.log.close()
    return overhead_figures(times, steps) | {"equal_weights": equal_weights(bare, script)}


def overhead_figures(times: Times, steps: int) -> dict:
    """Ratios of the rounds, without the first, which warms up."""
    pairs = zip(times.bare[1:], times.script[1:], strict=True)
    ratios = [script / bare for bare, script in pairs]
    return {
        "step_over_bare_loop": statistics.median(ratios),
        "from": min(ratios),
        "to": max(ratios),
        "ms_per_step": 1000 * statistics.median(times.script[1:]) / steps,
    }


def equal_weights(one: Learner, other: Learner) -> bool:
    """Whether the two models have the same weights, bit for bit."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


# --- gradient checkpointing, and SDPA ---------------------------------------------------------------------------------


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """Attention written out, with its whole matrix of weights in memory."""

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    q = split(q)
    scores = q @ split(k).transpose(-1, -2)
    weights = (scores / math.sqrt(q.shape[-1])).softmax(-1)
    values = weights @ split(v)
    return values.transpose(1, 2).flatten(2)


def random_batch(setting: Setting) -> dict:
    """A made-up batch on the device, as prepare() returns it."""
    args = setting.setup.args
    device = setting.setup.device
    count = setting.config["batch_size"]
    volume = torch.rand([count, 1, *setting.config["volume_size"]], device=device) - 1
    xrays = torch.rand([count, args.num_views, args.img_size, args.img_size], device=device)
    return {
        "volume": volume,
        "index": list(range(count)),
        "xrays": xrays,
        "seen": xrays,
        "extent": torch.full((count, 3), 300.0, device=device),
    }


def seconds_of_step(setting: Setting, model: torch.nn.Module, batch: dict, draw: Draw) -> float:
    """Seconds of one forward and backward pass."""
    synchronize()
    begun = time.perf_counter()
    losses = sample_losses(model, batch, draw, setting.setup)
    total = sum(loss.sum() for loss in losses)
    total.backward()
    model.zero_grad(set_to_none=True)
    synchronize()
    return time.perf_counter() - begun


def memory_of_step(setting: Setting, checkpointing: bool) -> float:
    """GiB that a training step of the script takes."""
    args = setting.setup.args
    args.gradient_checkpointing = checkpointing
    args.auto_batch = False
    stage = plan_as_asked(setting.k, setting.config, checkpointing)
    return try_stage(setting.setup, stage, None).memory


class Variant(NamedTuple):
    """A way to make the same step."""

    checkpointing: bool
    attention: object


def compare(setting: Setting, rounds: int) -> dict:
    """Ratios of time and of memory: gradient checkpointing on over off, SDPA over naive attention."""
    model = build_model(setting.k, setting.setup.args, setting.setup.device)
    batch = random_batch(setting)
    draw = training_draw(setting.k, batch, None, 0, setting.setup.diffusion)
    sdpa = cascade_model.attention
    variants = {
        "plain": Variant(False, sdpa),
        "checkpointing": Variant(True, sdpa),
        "naive": Variant(False, naive_attention),
    }

    # The first round warms up.
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, variant in variants.items():
            model.checkpointing = variant.checkpointing
            cascade_model.attention = variant.attention
            seconds = seconds_of_step(setting, model, batch, draw)
            if number:
                times[name].append(seconds)

    memory = {}
    for name, variant in variants.items():
        cascade_model.attention = variant.attention
        memory[name] = memory_of_step(setting, variant.checkpointing)
    cascade_model.attention = sdpa

    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "checkpointing_memory_ratio": memory["checkpointing"] / memory["plain"],
        "checkpointing_time_ratio": middle["checkpointing"] / middle["plain"],
        "sdpa_over_naive_time": middle["plain"] / middle["naive"],
        "sdpa_over_naive_memory": memory["plain"] / memory["naive"],
        "memory_gb": memory,
    }


# --- the published sizes, on a GPU ------------------------------------------------------------------------------------


def pinned_batch(setting: Setting) -> dict:
    """A made-up batch in pinned memory, as the loader returns it."""
    count = setting.config["batch_size"]
    side = setting.setup.args.img_size
    volume = torch.zeros([count, *setting.config["volume_size"]], dtype=torch.int16)
    xrays = torch.zeros([count, 2, side, side], dtype=torch.int16)
    return {
        "volume": volume.pin_memory(),
        "xrays": xrays.pin_memory(),
        "extent": torch.full((count, 3), 300.0).pin_memory(),
        "index": torch.arange(count),
    }


def speed_of_stage(setting: Setting, compiled: bool, seconds: float, row: dict) -> None:
    """Add samples/s and memory of the bare loop to the row, beside the guide's figures."""
    learner = new_learner(setting)
    row["parameters"] = sum(parameter.numel() for parameter in learner.model.parameters())
    if compiled:
        learner.model.compile()
    batch = pinned_batch(setting)
    bare_loop(setting, learner, [batch] * 3, 3)
    synchronize()

    steps = 0
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        bare_loop(setting, learner, [batch] * 4, 4)
        synchronize()
        steps += 4
    samples_per_s = steps * setting.config["batch_size"] / (time.perf_counter() - begun)

    guide = GUIDE[setting.config["volume_size"][0]]
    row["samples_per_s"] = samples_per_s
    row["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    row["minutes_per_1000_on_4"] = 1000 / (4 * samples_per_s) / 60
    row["guide_gb"] = guide.gb
    row["guide_minutes"] = guide.minutes


def real_size(ranks: Ranks, seconds: float) -> None:
    """The guide's stages as configs/multi_view_config.json has them, on made-up data, one GPU."""
    precision, _ = choose_launched_precision("auto", "default", ranks)
    stages = [(0, False), (1, False), (2, False), (2, True)]
    for compiled, (k, checkpointing) in itertools.product((False, True), stages):
        args = parse_args(["--config", str(ROOT / "configs" / "multi_view_config.json")])
        args.gradient_checkpointing = checkpointing
        setup = Setup(args, ranks.device, precision)
        setting = Setting(k, setup)
        row = {
            "stage": setting.config["name"],
            "batch": setting.config["batch_size"],
            "precision": precision,
            "compile": compiled,
            "checkpointing": checkpointing,
        }

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            speed_of_stage(setting, compiled, seconds, row)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            row["out_of_memory"] = True
        gc.collect()
        torch.compiler.reset()
        print(json.dumps(row), flush=True)


# --- what it costs to be held to the X-rays ---------------------------------------------------------------------------


def stage_before(setup: Setup) -> torch.nn.Module:
    """A first stage that has learned nothing, whose estimate the second starts from in each step."""
    model = build_model(0, setup.args, setup.device)
    model.requires_grad_(False)
    return model.eval()


def agreement_setting(folder: str, ranks: Ranks, flag: str) -> Setting:
    """The demo's last two stages, 32^3 and 64^3, with made-up data. flag: --xray_agreement or --no-xray_agreement."""
    size = {
        "voxel_dim": 64,
        "vit_depth": 2,
        "num_heads": 4,
        "token_grid": 8,
    }
    stages = [size | {"volume_size": [side] * 3} for side in (32, 64)]
    flags = ["--stage_configs", json.dumps(stages), "--ddim_steps", "4", flag]
    flags += ["--img_size", "64", "--encoder_dim", "64"]
    flags += ["--dataset_path", f"{folder}/data", "--cache_dir", f"{folder}/cache"]
    args = parse_args(flags)
    data = source_of_flags(vars(args), args.source, ranks.device).load([[32] * 3, [64] * 3])
    setup = Setup(args, ranks.device, "no", data)
    setup.take_prior(None)
    setup.models = [stage_before(setup)]
    return Setting(1, setup)


def cost_of_agreement(folder: str, ranks: Ranks, rounds: int) -> dict:
    """Time of a sample and of a training step at 64^3, of two patients, over the same without agreement, in turns."""
    settings = []
    for flag in ("--xray_agreement", "--no-xray_agreement"):
        settings.append(agreement_setting(folder, ranks, flag))
    model = build_model(1, settings[0].setup.args, ranks.device)
    items = settings[0].setup.data.first_items("train", [64] * 3)

    def sample(setting: Setting) -> None:
        setup = setting.setup
        models = [*setup.models, model]
        cascade = Trained(models, ["stage1", "stage2"], setup.diffusion, setup.precision)
        sample_cascade(cascade, prepare(items, ranks.device), Sampling())

    def train(setting: Setting) -> None:
        batch, draw = training_batch(items, 1, 0, setting.setup)
        losses = sample_losses(model, batch, draw, setting.setup)
        sum(loss.sum() for loss in losses).backward()
        model.zero_grad(set_to_none=True)

    figures = {}
    for name, work in (("sample", sample), ("training_step", train)):
        ratios = []
        for number in range(rounds + 1):
            seconds = []
            for setting in settings:
                synchronize()
                begun = time.perf_counter()
                work(setting)
                synchronize()
                seconds.append(time.perf_counter() - begun)
            # The first round warms up.
            if number:
                ratios.append(seconds[0] / seconds[1])
        figures[f"agreement_{name}"] = statistics.median(ratios)
    return figures


# --- command line -----------------------------------------------------------------------------------------------------


def small_setting(folder: str, ranks: Ranks) -> Setting:
    """The second of two small stages, with made-up data."""
    words = ["cascade", f"{folder}/data", "--num_patients", "44", "--matrix", "32"]
    subprocess.run([sys.executable, "-m", "tools.sample_data", *words], cwd=ROOT, check=True)

    size = {"voxel_dim": 64, "vit_depth": 2, "num_heads": 4}
    stages = [
        size | {"volume_size": [16] * 3, "token_grid": 8},
        size | {"volume_size": [32] * 3, "token_grid": 16},
    ]
    flags = ["--stage_configs", json.dumps(stages)]
    flags += ["--img_size", "64", "--encoder_dim", "64", "--batch_size", "4"]
    flags += ["--dataset_path", f"{folder}/data", "--cache_dir", f"{folder}/cache", "--cache_in_memory"]
    flags += ["--checkpoint_dir", f"{folder}/run", "--save_every", "0"]
    args = parse_args(flags)

    precision, _ = choose_launched_precision("auto", "default", ranks)
    sizes = [stage["volume_size"] for stage in args.stage_configs]
    data = source_of_flags(vars(args), args.source, ranks.device).load(sizes)
    setup = Setup(args, ranks.device, precision, data)
    setup.take_prior(None)
    setup.models = [stage_before(setup)]
    return Setting(1, setup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="alternations")
    parser.add_argument("--steps", type=int, default=8, help="steps of a round")
    parser.add_argument("--real", action="store_true", help="the guide's sizes; needs a GPU")
    parser.add_argument("--seconds", type=float, default=15, help="with --real: time for each line")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    ranks = Ranks(0, 0, 1, device, "python")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if on_gpu else 'CPU'}", flush=True)
    if options.real:
        if not on_gpu:
            sys.exit("--real needs a GPU")
        real_size(ranks, options.seconds)
        return

    with tempfile.TemporaryDirectory() as folder:
        setting = small_setting(folder, ranks)
        figures = overhead(setting, ranks, options.rounds, options.steps)
        print(json.dumps(figures), flush=True)
        print(json.dumps(compare(setting, options.rounds)), flush=True)
        print(json.dumps(cost_of_agreement(folder, ranks, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
