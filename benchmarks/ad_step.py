"""What train.py costs beside other ways: a training step, acting with a cache, making histories.

A step of the script's loop over one of a raw Accelerate loop (step_overhead.py has the bare one), agents with a cache
over those that read their context anew, histories by the tabular learner over those by stable-baselines3.

    python benchmarks/ad_step.py                # one process; on CPU about 6 minutes, 2 of them stable-baselines3
    python benchmarks/ad_step.py --real         # on a GPU: steps and evaluation at the published size

Ratios are of times that alternate in one run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from step_overhead import begin_training, digest, wait

import train
from old.distributed_utils import create_distributed_dataloader, setup_distributed, to_device
from old.loop_utils import LossScaler, Progress
from tasks.compressed_ad.acting import Agents
from tasks.compressed_ad.darkroom import NEXT
from tasks.compressed_ad.data import as_it_is
from tasks.compressed_ad.model import visible
from tasks.compressed_ad.ppo_histories import ppo_history
from tasks.compressed_ad.sample_data import tabular_histories

ROOT = Path(__file__).resolve().parent.parent


class Setting:
    """Histories, and the arguments of a run on them."""

    def __init__(self, folder: Path, words: list[str], ranks):
        data = str(folder / "data")
        run_folder = str(folder / "run")
        self.args = train.parse_args(["--data", data, "--output_dir", run_folder, *words])
        self.args.mixed_precision, _ = train.agree_on_launched_precision("auto", "default", ranks)
        self.ranks = ranks
        self.device = ranks.device
        self.data = train.read_data(self.args)

    def loader(self):
        """Segments, in batches of the flags' size."""
        return create_distributed_dataloader(
            self.data.segments,
            self.args.train_batch_size,
            drop_last=False,
            collate_fn=as_it_is,
        )


def raw_accelerate_loop(accelerator, prepared: tuple, loader, steps: int, grad_clip: float) -> None:
    """The loop of Accelerate's own examples: everything prepared, accumulate, backward, clip, step."""
    model, optimizer, scheduler = prepared
    for _, batch in zip(range(steps), loader, strict=False):
        with accelerator.accumulate(model):
            batch = to_device(batch, accelerator.device)
            with accelerator.autocast():
                losses, _ = train.action_losses(model, batch)
            actions = (batch["action"] >= 0).sum()
            accelerator.backward(losses.sum() / actions)
            accelerator.clip_grad_norm_(model.parameters(), grad_clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)


def overhead(setting: Setting, rounds: int, steps: int) -> dict:
    """Time of a step in the script's loop over a raw Accelerate loop, and whether the weights are equal in the end."""
    args = setting.args
    device = setting.device
    args.num_warmup_steps = 0
    accelerator = train.make_accelerator(args.mixed_precision, 1, setting.ranks)
    models = {}
    optimizers = {}
    loaders = {}
    for name in ("raw", "script"):
        models[name] = train.build_model(args, device)
        optimizers[name] = train.make_optimizer(models[name], args)
        loaders[name] = setting.loader()

    # the raw loop has everything prepared
    constant = torch.optim.lr_scheduler.ConstantLR(optimizers["raw"], factor=1.0)
    prepared = accelerator.prepare(models["raw"], optimizers["raw"], constant)

    def raw_turn() -> None:
        raw_accelerate_loop(accelerator, prepared, loaders["raw"], steps, args.grad_clip)

    # the script's loop
    wrapped = accelerator.prepare_model(models["script"])
    scaler = LossScaler(device, args.mixed_precision)
    progress = Progress()
    training = begin_training(
        run_folder=Path(args.output_dir),
        losses=train.LOSSES,
        loader=loaders["script"],
        args=args,
        ranks=setting.ranks,
        progress=progress,
    )

    def script_turn() -> None:
        progress.epoch = 0
        progress.samples = 0
        stretch = replace(training, last_step=progress.step + steps)
        train.train_one_epoch(wrapped, loaders["script"], optimizers["script"], scaler, stretch, args)

    turns = {"raw": raw_turn, "script": script_turn}
    times = time_turns(turns, loaders, rounds, device)
    training.log.close()
    pairs = zip(times["raw"], times["script"], strict=True)
    ratios = [script / raw for raw, script in pairs]
    shown = (statistics.median(ratios), min(ratios), max(ratios))
    return {
        "ms_per_step": 1000 * statistics.median(times["script"]) / steps,
        "equal_weights": digest(models["raw"]) == digest(models["script"]),
        "step_over_raw": [round(ratio, 4) for ratio in shown],
    }


def time_turns(
    turns: dict[str, Callable],
    loaders: dict,
    rounds: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """Seconds of each loop's turns, without the first one, which warms up; the loops take turns at being first."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        backwards = number % 2 == 1
        for name in sorted(turns, reverse=backwards):
            # each turn has the same first steps of an epoch
            loaders[name].batch_sampler.set_position(0, 0)
            wait(device)
            begun = time.perf_counter()
            turns[name]()
            wait(device)
            times[name].append(time.perf_counter() - begun)
    return {name: seconds[1:] for name, seconds in times.items()}


class Forgetful(Agents):
    """Agents without a cache: they read their whole context anew at each step, from the latents on."""

    @torch.no_grad()
    def act(self, cells: torch.Tensor) -> torch.Tensor:
        model = self.model
        length = len(self.cells)
        places = model.n_transit
        device = cells.device

        # latents first, then what was seen, then the question
        parts = []
        number = 0
        some = None
        if self.latents is not None:
            parts.append(self.latents)
            number = model.n_latent
            some = torch.tensor([True], device=device)
        if length:
            seen = torch.cat(self.cells, 1)
            rewards = torch.cat(self.rewards, 1)
            parts.append(model.tokens(seen, rewards))
        parts.append(model.queries(cells[:, None], length))

        # the mask's rows and columns of what there is
        full = torch.tensor([places], device=device)
        mask = visible(some, number, full, places)
        rows = [*range(number + length), number + places + length]
        mask = mask[:, :, rows]
        x = torch.cat(parts, 1)
        out, _ = model.decode(x, mask[..., rows])
        return model.head(out[:, -1])


def acting(setting: Setting, agents: int, steps: int) -> dict:
    """Steps/s of agents with their cache over those without; the compressions are kept by both."""
    device = setting.device
    model = train.build_model(setting.args, device).double().eval()
    follow = torch.from_numpy(NEXT).to(device)
    times = {}
    actions = {}
    for name, kind in (("cached", Agents), ("uncached", Forgetful)):
        actors = kind(model, agents, 20)
        cell = torch.full((agents,), 40, device=device)
        taken = []

        # episodes of 20 steps, in which the goal is cell 22
        wait(device)
        begun = time.perf_counter()
        for t in range(steps):
            action = actors.act(cell).argmax(-1)
            after = follow[cell, action]
            transition = torch.stack([cell, action, after], 1)
            actors.observe(transition, (after == 22).double())
            cell = torch.full_like(cell, 40) if (t + 1) % 20 == 0 else after
            taken.append(action)
        wait(device)
        times[name] = time.perf_counter() - begun
        actions[name] = torch.stack(taken).cpu()

    # the actions are the same where the cache is right
    return {
        "agents": agents,
        "steps": steps,
        "steps_per_s": steps / times["cached"],
        "cached_over_uncached": times["uncached"] / times["cached"],
        "same_actions": torch.equal(actions["cached"], actions["uncached"]),
    }


def sources() -> dict:
    """Histories/s of 1000 steps: all goals by the tabular learner, one goal by stable-baselines3's PPO."""
    begun = time.perf_counter()
    tabular_histories(range(81), 100, 1000, 0)
    tabular = 8100 / (time.perf_counter() - begun)
    begun = time.perf_counter()
    ppo_history(60, 100, 1000, 42)
    ppo = 100 / (time.perf_counter() - begun)
    return {
        "tabular_histories_per_s": tabular,
        "ppo_histories_per_s": ppo,
        "ratio": tabular / ppo,
    }


def say(name: str, result: dict) -> None:
    """Print a result as a JSON line."""
    print(json.dumps({name: result}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--real", action="store_true", help="the published size, on a GPU")
    parser.add_argument("--rounds", type=int, default=12, help="times that the loops take turns")
    parser.add_argument("--steps", type=int, default=20, help="steps a turn")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as name, setup_distributed() as ranks:
        folder = Path(name)
        command = [sys.executable, "-m", "tools.sample_data", "compressed_ad"]
        command += [str(folder / "data"), "--streams", "20"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        published = Setting(folder, [], ranks)
        if options.real:
            say("step", overhead(published, options.rounds, options.steps))
            say("acting, published size", acting(published, 160, 600))
            return

        # on a CPU the demo's model, and few agents of the published one
        config = str(ROOT / "configs" / "compressed_ad_demo.yaml")
        demo = Setting(folder, ["--config", config], ranks)
        say("step", overhead(demo, options.rounds, options.steps))
        say("acting, published size", acting(published, 16, 600))
        say("acting, demo", acting(demo, 80, 1000))
        say("sources", sources())


if __name__ == "__main__":
    main()
