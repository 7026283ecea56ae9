"""CompressedAD: a transformer that learns in its context, without gradient steps, from histories of learners (guide 4).

    python train.py                                                               # one GPU, or CPU
    accelerate launch --config_file configs/accelerate_config.yaml train.py       # 2 GPUs, fp16
    accelerate launch --multi_gpu --num_processes=4 --mixed_precision=fp16 train.py
    torchrun --nproc_per_node=gpu train.py                                        # every GPU there is
    torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=192.168.1.1 --master_port=29500 train.py
    python train.py --model ad                                                    # without compression, to compare with
    python train.py --eval_only                                                   # 500 episodes on the 8 unseen goals

Data: datasets/history_darkroom_PPO_alg-seed42.hdf5, see darkroom.py; `sample_data.py compressed_ad .` makes histories.
"""

import argparse
import contextlib
import copy
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cli_utils import (
    InputError,
    Parser,
    add_common_arguments,
    asked,
    number,
    parse_arguments,
    run_main,
    seed_number,
    set_derived,
    value_sources,
    whole,
)

FORMAT = "compressed_ad/1"
LOSSES = ["loss", "accuracy", "grad_norm", "skipped"]
VAL_SEEDS = 5  # agents per goal in the evaluations during training
EVAL_STREAMS = 20  # histories of each unseen goal on which the action accuracy is taken
# what --model stands for where flag and config are silent: the published settings
MODELS = {
    "compressed_ad": {"tf_n_embd": 128, "tf_n_layer": 4, "tf_n_head": 8, "tf_dim_feedforward": 512, "n_latent": 40,
                      "lr": 1e-4, "train_batch_size": 128, "train_timesteps": 150000, "num_warmup_steps": 5000},
    "ad": {"tf_n_embd": 64, "tf_n_layer": 4, "tf_n_head": 4, "tf_dim_feedforward": 256, "n_latent": 0,
           "lr": 3e-4, "train_batch_size": 512, "train_timesteps": 50000, "num_warmup_steps": 1000},
}  # fmt: skip
# what a checkpoint prescribes to a run that goes on from it or uses it
FIXED = (
    "model",
    "tf_n_embd",
    "tf_n_layer",
    "tf_n_head",
    "tf_dim_feedforward",
    "encoder_n_layer",
    "n_latent",
    "n_transit",
)
FIXED_DATA = ("max_compression_depth", "split_seed")
# what a run that goes on takes from its checkpoint, unless it is told otherwise
KEPT = ("data", "lr", "lr_scaling", "train_timesteps", "num_warmup_steps", "weight_decay")


def fill_in(args: argparse.Namespace) -> None:
    """What --model stands for, where flag and config are silent."""
    for name, value in (MODELS[args.model] | {"output_dir": f"runs/{args.model}"}).items():
        if args.source[name] == "default":
            setattr(args, name, value)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    yes_no = argparse.BooleanOptionalAction
    add = parser.add_argument_group("data").add_argument
    text = "HDF5 file of learning histories, or a folder that holds one in datasets/"
    add("--data", default="datasets/history_darkroom_PPO_alg-seed42.hdf5", metavar="FILE", help=text)
    add("--split_seed", type=seed_number, default=0, help="seed of the split into 73 training goals and 8 unseen ones")
    text = "decode all histories into the memory of each process (60 MB); --no-...: map the file, read what is needed"
    add("--cache_in_memory", action=yes_no, default=True, help=text)

    add = parser.add_argument_group("model").add_argument
    text = "compressed_ad, or ad: the same without compression; each with its published settings where these say"
    add("--model", choices=tuple(MODELS), default="compressed_ad", help=text + " `left out`")

    def by_model(name: str, kind, text: str, *other: str) -> None:
        a, b = (MODELS[model][name] for model in MODELS)
        add(f"--{name}", *other, type=kind, help=f"{text}; left out: {a:g}, for --model ad {b:g}")

    by_model("tf_n_embd", whole(8), "width of the transformer; lower it on OOM")
    by_model("tf_n_layer", whole(1), "layers of the decoder")
    by_model("tf_n_head", whole(1), "attention heads, must divide --tf_n_embd")
    by_model("tf_dim_feedforward", whole(8), "width inside the layers")
    add("--encoder_n_layer", type=whole(1), default=3, help="layers of the encoder that compresses")
    by_model("n_latent", whole(0), "latent tokens that old context is compressed into")
    add("--n_transit", type=whole(2), default=240, help="transitions in the context; halve it on OOM")
    text = "most compressions, one on the other, in training; acting goes on compressing without end"
    add("--max_compression_depth", type=whole(0), default=3, help=text)

    add = parser.add_argument_group("optimisation").add_argument
    text = "segments per step and GPU; on OOM halve it and double --gradient_accumulation_steps (the same result)"
    by_model("train_batch_size", whole(1), text, "--batch_size")
    text = "optimizer steps of the run and of the cosine schedule; --max_steps stops earlier, with the same schedule"
    by_model("train_timesteps", whole(1), text)
    by_model("lr", number(0, above=True), "learning rate at its height")
    text = "sqrt: the rate grows with the root of the effective batch, from --lr at the published one, 128 (ad: 512)"
    add("--lr_scaling", choices=("none", "sqrt", "linear"), default="none", help=text + "; linear")
    by_model("num_warmup_steps", whole(0), "optimizer steps of linear warm-up")
    add("--weight_decay", type=number(0), default=0.01, help="of AdamW")

    add = parser.add_argument_group("output and evaluation").add_argument
    add("--output_dir", help="run folder: checkpoints, logs, figures; left out: runs/compressed_ad, or runs/ad")
    add("--eval_interval", type=whole(0), default=1000, help="optimizer steps between evaluations; 0: at the end alone")
    add("--eval_episodes", type=whole(2), default=500, help="episodes of each agent in the test")
    add("--val_episodes", type=whole(2), default=50, help="episodes of each agent in evaluations during training")
    add("--eval_seeds", type=whole(1), default=20, help="agents on each unseen goal in the test")
    add("--test_batch_size", type=whole(1), default=256, help="agents or segments evaluated at once; lower it on OOM")
    text = "run folder of a finished --model ad on the same goals, shown beside this run's test"
    add("--ad_run", metavar="DIR", help=text)
    names = {
        "log_every": "summary_interval",
        "save_every": "ckpt_interval",
        "grad_clip": "grad_clip_norm",
        "lr": "learning_rate",
    }
    add_common_arguments(parser, names)
    parser.set_defaults(log_every=100, save_every=1000, wandb_project="compressed-ad")
    args = parse_arguments(parser, argv)
    args.source = value_sources(parser, args, argv)
    fill_in(args)
    if args.model == "ad":
        if args.n_latent and args.source["n_latent"] == "command line":
            parser.error("--n_latent: --model ad does not compress; leave it out, or give --model compressed_ad")
        args.n_latent = 0  # so that a config of the other serves both
    if args.model == "compressed_ad" and not args.n_latent:
        parser.error("--n_latent 0: compression needs at least 1; give --model ad to go without")
    if args.tf_n_embd % args.tf_n_head:
        parser.error(f"--tf_n_head {args.tf_n_head}: must divide --tf_n_embd {args.tf_n_embd}")
    if args.model == "ad" and args.ad_run:
        parser.error("--ad_run: stands beside a run of --model compressed_ad, this one is of --model ad; leave it out")
    if args.overwrite and (args.resume_from or args.eval_only):
        parser.error("--overwrite starts afresh and excludes --resume_from and --eval_only")
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the heavy imports: --help and a mistyped flag answer at once

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import checkpoint_utils as ckpt
import darkroom as dr
import distributed_utils as du
import hardware_utils as hw
import in_context_report as report
from accelerate_utils import choose_precision, keep_precision, make_accelerator
from in_context_net import GRID, Agents, InContextNet, Layer
from logging_utils import RunLog, print_banner, save_figure, write_result
from old_loop_utils import (
    auto_batch_advice,
    batch_flags,
    fit_batch_to_memory,
    fits_by_itself,
    forget_other_best,
    keep_best,
    say_if_finished,
    say_saved,
    split_record,
)

# --- data and net -----------------------------------------------------------------------------------------------------


def find_histories(path: str) -> Path:
    """The HDF5 file that --data means. Raises InputError."""
    if not Path(path).is_dir():
        return Path(path)
    patterns = [f"{folder}*.{ending}" for folder in ("", "datasets/") for ending in ("hdf5", "h5")]
    found = sorted(file for pattern in patterns for file in Path(path).glob(pattern))
    if len(found) != 1:
        text = f"holds {len(found)} HDF5 files" if found else "holds no .hdf5 or .h5 file"
        raise InputError(f"{path}: {text}, also not in datasets/; name the file with --data")
    return found[0]


class Data:
    """The histories of a run: training goals, unseen goals, and the segments that are drawn from them."""

    def __init__(self, args: argparse.Namespace):
        """All ranks. Raises InputError."""
        with du.agree_on_errors():
            path = find_histories(args.data)
        self.histories = dr.Histories(path, args.cache_in_memory)
        if args.n_transit > (steps := self.histories.steps):
            raise InputError(f"--n_transit {args.n_transit}: more than the {steps} steps of the histories; lower it")
        self.train_goals, self.unseen = dr.split_goals(args.split_seed)
        depth = args.max_compression_depth if args.n_latent else 0
        self.train = dr.SegmentDataset(self.histories, self.train_goals, args.n_transit, depth, args.seed)
        facts = [self.histories.steps, self.histories.streams, self.train_goals, self.histories.digest]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def as_it_is(batch: dict) -> dict:
    """collate_fn of a set that makes whole batches."""
    return batch


def build_net(args: argparse.Namespace, device: torch.device) -> InContextNet:
    """The net with the same random weights on every rank."""
    torch.manual_seed(args.seed)
    sizes = args.tf_n_embd, args.tf_n_layer, args.tf_n_head, args.tf_dim_feedforward, args.n_transit, args.n_latent
    return InContextNet(*sizes, args.encoder_n_layer).to(device)


def action_losses(net: nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy, whether the most likely action is right), both (B, n_transit) fp32, zero on padding."""
    logits = net(batch).float()
    losses = F.cross_entropy(logits.transpose(1, 2), batch["action"], reduction="none", ignore_index=-100)
    return losses, (logits.argmax(-1) == batch["action"]).float()


# --- training ---------------------------------------------------------------------------------------------------------


def train_steps(
    wrapped, net: InContextNet, accelerator, optimizer, scaler, loader, state: dict, until: int, base_rate: float,
    args: argparse.Namespace, ranks: du.Ranks, log: RunLog, stop: du.StopSignal, save,
) -> int:  # fmt: skip
    """Train from state's position to step `until` or the end of the epoch; returns the exit code of a stop signal.

    state: `step`, `epoch` and `samples` (of this epoch, all ranks), kept up to date. Nothing is read back from the
    GPU but every --log_every steps, or --max_bad_steps if these are fewer.
    """
    net.train()
    sampler = loader.batch_sampler
    loader.dataset.epoch = state["epoch"]
    sampler.set_position(state["epoch"], state["samples"])
    batches, size = iter(loader), sampler.batch_size
    parameters = list(net.parameters())
    while state["step"] < until and state["samples"] < sampler.used:
        count, mine = sampler.window(state["samples"])
        window = log.next_batches(batches, max(1, math.ceil(mine / size)))
        actions = sum(int(batch["length"].sum()) for batch in window) * bool(mine)
        signals = [stop.code == 143, stop.code == 130]
        stop_143, stop_130, actions = du.reduce_sum([*signals, actions]).tolist()
        if stop_143 or stop_130:  # agreed by all ranks, before the window is used
            save()
            return 143 if stop_143 else 130
        rate = base_rate * du.schedule(state["step"], args.train_timesteps, args.num_warmup_steps, "cosine")
        for group in optimizer.param_groups:
            group["lr"] = rate
        totals = torch.zeros(2, device=ranks.device)
        for i, batch in enumerate(window):
            batch = du.to_device(batch, ranks.device)
            apart = contextlib.nullcontext() if i == len(window) - 1 else accelerator.no_sync(wrapped)
            with log.count_flops(count), apart:
                with accelerator.autocast():
                    losses, right = action_losses(wrapped, batch)
                # DDP takes the mean over ranks, this is a part of a sum; a rank without a share has weight 0
                loss = losses.sum() * (bool(mine) / actions)
                scaler.scale(loss * ranks.world_size).backward()
            totals += torch.stack([loss.detach(), right.sum() * (bool(mine) / actions)])
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, args.grad_clip or math.inf)
        scaler.step(optimizer)  # leaves the weights alone when a gradient is not finite, without a GPU sync
        scaler.update(None if args.mixed_precision == "fp16" else 1.0)
        optimizer.zero_grad(set_to_none=True)
        state["step"] += 1
        state["samples"] += count
        facts = torch.stack([norm, 1.0 - norm.isfinite().float()])  # the same on all ranks: one tells
        log.step(torch.cat([totals, facts if ranks.is_main else torch.zeros_like(facts)]), count, rate)
        log.check(state["step"], args.max_bad_steps)
        if state["step"] % args.log_every == 0:
            log.write_interval(state["step"], state["epoch"] + 1)
        if args.save_every and state["step"] % args.save_every == 0 and state["step"] < until:
            save()
    if state["samples"] >= sampler.used:
        state["epoch"], state["samples"] = state["epoch"] + 1, 0
    return 0


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def act_in_context(
    net: InContextNet, goals: list[int], seeds: int, episodes: int, args, ranks: du.Ranks, stop=None
) -> tuple[np.ndarray | None, np.ndarray]:
    """Let agents act in Darkroom with nothing but their own past to go by.

    Gives the returns (goals, seeds, episodes), and the cells (goals, 2, HORIZON + 1) that each goal's first agent
    went through in its first and last episode; the same on all ranks, at any world size: an agent's chance is a
    function of (seed, goal, agent) alone, and it acts in float64, where its neighbours in the batch change no action.
    On a signal to any rank all leave, with None for the returns.
    """
    device, actor = ranks.device, copy.deepcopy(net).double().eval()
    agents = [(goal, k) for goal in goals for k in range(seeds)]
    returns = torch.zeros(len(agents), episodes, dtype=torch.float64)
    paths = torch.zeros(len(goals), 2, dr.HORIZON + 1, dtype=torch.float64)
    follow = torch.from_numpy(dr.NEXT).to(device)
    mine = range(ranks.rank, len(agents), ranks.world_size)
    quiet = not (ranks.is_main and sys.stderr.isatty())
    for first in range(0, len(mine), args.test_batch_size):
        chosen = list(mine[first : first + args.test_batch_size])
        chance = [np.random.default_rng([args.seed % 2**63, 5, *agents[c]]) for c in chosen]
        goal = torch.tensor([agents[c][0] for c in chosen], device=device)
        acting = Agents(actor, len(chosen), forget=max(1, min(dr.HORIZON, net.n_transit // 2)))
        for episode in tqdm(range(episodes), desc="in context", unit="episode", disable=quiet, leave=False):
            if stop and stop.code:
                break
            if ranks.is_main and quiet and episode and episode % 100 == 0:
                print(f"agents {first + 1} to {first + len(chosen)}: episode {episode}/{episodes}", flush=True)
            uniform = np.stack([rng.random((dr.HORIZON, dr.ACTIONS)) for rng in chance], 1)
            gumbel = torch.from_numpy(-np.log(-np.log(np.maximum(uniform, 1e-300)))).to(device)
            cell, total = torch.full_like(goal, dr.START), torch.zeros(len(chosen), dtype=torch.float64, device=device)
            path = [cell]
            for t in range(dr.HORIZON):
                action = (acting.act(cell) + gumbel[t]).argmax(-1)  # a draw from the softmax
                after = follow[cell, action]
                reward = (after == goal).double()
                acting.observe(torch.stack([cell, action, after], 1), reward)
                cell, total = after, total + reward
                path.append(cell)
            returns[chosen, episode] = total.cpu()
            if episode in (0, episodes - 1):
                walked = torch.stack(path, 1).double().cpu()
                for row, c in enumerate(chosen):
                    if c % seeds == 0:
                        paths[c // seeds, int(episode > 0)] = walked[row]
    if stop and du.any_rank(bool(stop.code)):
        return None, np.empty(0)
    shape = len(goals), seeds, episodes
    return du.reduce_sum(returns).numpy().reshape(shape), du.reduce_sum(paths).numpy().astype(int)


@torch.no_grad()
def action_accuracy(
    split: str, goals: list[int], net: InContextNet, data: Data, accelerator, args, ranks: du.Ranks
) -> tuple[dict, np.ndarray]:
    """Loss and accuracy of the next action on some goals' histories; the accuracy (depth + 1, n_transit) by place.

    The same segments at each call: of each goal's first histories one of every depth, its end spread over the history.
    """
    net.eval()
    train, streams = data.train, min(EVAL_STREAMS, data.histories.streams)
    segments = dr.SegmentDataset(data.histories, goals, args.n_transit, train.max_depth, 0)
    history = np.concatenate([np.arange(streams) + k * data.histories.streams for k in range(len(goals))])
    depths = segments.max_depth + 1
    table = torch.zeros(depths, 3, args.n_transit, dtype=torch.float64)  # loss, right, number
    for places in du.EvalBatchSampler(len(history) * depths, args.test_batch_size, ranks.rank, ranks.world_size):
        places = np.array(places)
        depth = depths - 1 - places // len(history)  # the deepest first
        least = depth * args.n_transit + 1
        spread = (places % len(history) * 0.618034) % 1
        end = least + (spread * (data.histories.steps + 1 - least)).astype(np.int64)
        batch = du.to_device(segments.batch(history[places % len(history)], depth, end), ranks.device)
        with accelerator.autocast():
            losses, right = action_losses(net, batch)
        found = torch.stack([losses, right, (batch["action"] >= 0).float()], 1).double().cpu()
        table.index_add_(0, torch.from_numpy(depth), found)
    net.train()
    table = du.reduce_sum(table)
    loss, right, number = table.sum((0, 2)).tolist()
    by_place = (table[:, 1] / table[:, 2].clamp(min=1)).masked_fill(table[:, 2] == 0, math.nan)
    return {f"{split}/loss": loss / number, f"{split}/accuracy": right / number}, by_place.numpy()


def evaluate_briefly(net: InContextNet, data: Data, accelerator, args, ranks: du.Ranks, stop) -> dict | None:
    """In training: `val/` of 8 training goals, whose loss chooses best.pt, and `unseen/` of the test's, to look at."""
    watched = data.train_goals[: len(data.unseen)]
    seeds = min(VAL_SEEDS, args.eval_seeds)
    returns, _ = act_in_context(net, watched + data.unseen, seeds, args.val_episodes, args, ranks, stop)
    if returns is None:
        return None
    metrics = {}
    for split, goals in (("val", watched), ("unseen", data.unseen)):
        metrics |= action_accuracy(split, goals, net, data, accelerator, args, ranks)[0]
    metrics |= report.return_metrics("val", returns[: len(watched)], watched)
    return metrics | report.return_metrics("unseen", returns[len(watched) :], data.unseen)


def read_baseline(args: argparse.Namespace) -> dict | None:
    """eval_test.json of the --model ad run that is to stand beside this one. Raises InputError when it cannot."""
    if args.ad_run is None:
        return None
    path, goals = Path(args.ad_run) / "eval_test.json", dr.split_goals(args.split_seed)[1]
    try:
        found = json.loads(path.read_text())
        model, episodes = found["model"], len(found["return_by_episode"]["mean"])
        complete = {"test/return_first", "test/return_last", "goals"} <= found.keys()
    except OSError as error:
        raise InputError(f"{path}: not read ({error.strerror}); --ad_run wants the folder of a finished run") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise InputError(f"{path}: not an evaluation of train.py; --ad_run wants the folder of a finished run")
    if model != "ad":
        raise InputError(f"{path}: of --model {model}; give --ad_run a run of --model ad")
    if found["goals"] != [list(divmod(goal, GRID)) for goal in goals]:
        raise InputError(f"{path}: of other goals; give a run with the same --split_seed")
    if episodes != args.eval_episodes:
        text = f"evaluate it anew: --eval_only --resume_from {args.ad_run} --eval_episodes {args.eval_episodes}"
        raise InputError(f"{path}: of {episodes} episodes, this run has --eval_episodes {args.eval_episodes}; {text}")
    return found


def final_test(
    net: InContextNet, name: str, data: Data, step: int, baseline: dict | None, accelerator, args, ranks: du.Ranks,
    stop=None,
) -> tuple[dict | None, Callable[[], dict] | None]:  # fmt: skip
    """The full evaluation on the unseen goals; (metrics, what draws its figures); rank 0 writes and prints it."""
    returns, paths = act_in_context(net, data.unseen, args.eval_seeds, args.eval_episodes, args, ranks, stop)
    if returns is None:
        return None, None
    metrics, by_place = action_accuracy("test", data.unseen, net, data, accelerator, args, ranks)
    metrics |= report.return_metrics("test", returns, data.unseen)
    source = data.histories.learning_curve(data.unseen).mean(1)
    metrics |= {"test/return_source_first": float(source[0]),
                "test/return_source_last": float(source[-report.last_episodes(len(source)) :].mean())}  # fmt: skip
    if baseline:
        metrics |= {f"test/return_ad_{part}": baseline[f"test/return_{part}"] for part in ("first", "last")}
    if not ranks.is_main:
        return metrics, None
    rows = [report.interval(episode) for episode in returns.transpose(2, 0, 1)]
    curve = {name: [row[k] for row in rows] for k, name in enumerate(("mean", "low", "high"))}
    facts = {"model": args.model, "step": step, "goals": [list(divmod(goal, GRID)) for goal in data.unseen]}
    by_goal = returns[:, :, -report.last_episodes(args.eval_episodes) :].mean((1, 2)).tolist()
    facts |= {"return_last_by_goal": by_goal, "return_by_episode": curve}
    facts |= {"eval_episodes": args.eval_episodes, "eval_seeds": args.eval_seeds, "data": str(data.histories.path)}
    folder = Path(args.output_dir)
    text = json.dumps({**metrics, **facts}, indent=2) + "\n"
    write_result(folder / f"eval_{name}.json", text.encode())
    report.print_returns(
        "test, best.pt" if name == "test" else name, metrics, curve, source, baseline, by_goal, data.unseen
    )

    def draw() -> dict:
        return {
            "returns": report.draw_returns(curve, metrics, source, baseline, args.model),
            "trajectories": report.draw_paths(paths, returns, data.unseen),
            "accuracy": report.draw_accuracy(by_place),
        }

    return metrics, draw


# --- the run ----------------------------------------------------------------------------------------------------------


def adopt(args: argparse.Namespace, contents: dict, path: str) -> None:
    """Take what a checkpoint prescribes. Raises InputError where a flag or the config says otherwise."""
    settings = contents["settings"]
    if args.source["model"] == "default" and args.model != settings["model"]:
        args.model, folder = settings["model"], args.output_dir
        fill_in(args)
        args.output_dir = folder
    for name in (*FIXED, *FIXED_DATA):
        if args.source[name] != "default" and getattr(args, name) != settings[name]:
            text = f"a run with --{name} {settings[name]}, now {getattr(args, name)}; leave it out"
            raise InputError(f"--resume_from {path}: {text}")
        setattr(args, name, settings[name])
    for name in KEPT:
        before, now = settings[name], getattr(args, name)
        if args.source[name] == "default":
            setattr(args, name, before)
        elif before != now and name != "data" and not args.eval_only:
            du.print_main(f"warning: begun with --{name} {before}, going on with {now}: another run from here on")
    if args.source["seed"] == "default":
        args.seed = contents["run"]["seed"]


def largest_batch(batch_size: int, depth: int, n_transit: int) -> dict:
    """A made-up batch, on the host, of segments that all have `depth` blocks to compress and a full context."""
    shape = batch_size, depth + 1, n_transit
    batch = {"cells": torch.zeros(*shape, 3, dtype=torch.uint8), "rewards": torch.zeros(shape)}
    batch |= {"depth": torch.full((batch_size,), depth), "compressed": [batch_size] * depth}
    batch["length"] = torch.full((batch_size,), n_transit)
    batch["action"] = torch.zeros(batch_size, n_transit, dtype=torch.long)
    return batch | {"sample": torch.arange(batch_size)}


def trial_step(net: InContextNet, batch: dict, args: argparse.Namespace) -> None:
    """Forward and backward pass of one micro-batch, as in training; the gradients stay in the net."""
    batch = du.to_device(batch, net.positions.device)
    with hw.autocast(net.positions.device, args.mixed_precision):
        losses, _ = action_losses(net, batch)
    (losses.sum() / losses.numel()).backward()


def make_optimizer(net: InContextNet, args: argparse.Namespace) -> torch.optim.AdamW:
    """Fused AdamW with the guide's betas."""
    options = {"lr": args.lr, "betas": (0.9, 0.99), "weight_decay": args.weight_decay, "fused": True}
    return torch.optim.AdamW(net.parameters(), **options)


def find_batch_size(net: InContextNet, depth: int, contents: dict | None, args: argparse.Namespace) -> None:
    """Fit the batch to what a step of segments of the greatest depth takes."""

    def try_once(size: int) -> None:
        trial_step(net, largest_batch(size, depth, args.n_transit), args)

    fitted = fit_batch_to_memory(
        try_once, net, (args.train_batch_size, args.gradient_accumulation_steps),
        partial(batch_flags, flag="--train_batch_size"), "pass a smaller --n_transit or --tf_n_embd",
        before=contents and contents.get("split"),
    )  # fmt: skip
    if fitted.reason:
        sizes = {"train_batch_size": fitted.size, "gradient_accumulation_steps": fitted.accumulation}
        set_derived(args, fitted.reason, **sizes)


def print_start(args: argparse.Namespace, accelerator, ranks: du.Ranks) -> None:
    """The start-up lines as the guide shows them."""
    devices = du.gather_objects(str(ranks.device))
    du.print_main(f"Distributed training: {accelerator.distributed_type.value}")
    du.print_main(f"Number of processes: {ranks.world_size}")
    du.print_main(f"Mixed precision: {args.mixed_precision}")
    for rank, device in enumerate(devices):
        du.print_main(f"Process {rank} using device: {device}")


def evaluate_only(args: argparse.Namespace, ranks: du.Ranks) -> int:
    """--eval_only: the test of a checkpoint."""
    folder = Path(args.output_dir)
    used = str(folder / "best.pt") if args.resume_from in (None, "auto") else args.resume_from
    used = str(Path(used) / "best.pt") if Path(used).is_dir() else used
    contents = ckpt.load_checkpoint(used, folder, FORMAT)
    adopt(args, contents, used)
    if args.source["output_dir"] == "default":  # beside the checkpoint, not in another model's run
        folder = Path(used).parent
        args.output_dir = str(folder)
    hw.set_numerics(ranks.device, args.mixed_precision, "", args.deterministic)
    accelerator = make_accelerator(args, ranks)
    with du.agree_on_errors():
        baseline = read_baseline(args)
    print_start(args, accelerator, ranks)
    data, net = Data(args), build_net(args, ranks.device)
    with du.agree_on_errors():
        ckpt.load_trained(net, contents["net"])
    stem = Path(used).stem  # of another checkpoint than the best: beside the run's own test, not in its place
    name = "test" if stem == "best" else stem
    _, draw = final_test(net, name, data, contents["step"], baseline, accelerator, args, ranks)
    if ranks.is_main:
        prefix = "" if name == "test" else f"{name}_"
        written = [save_figure(folder / "figures" / f"{prefix}{kind}.png", fig) for kind, fig in draw().items()]
        if all(written):
            print(f"written: {folder}/eval_{name}.json, {folder}/figures", flush=True)
    accelerator.free_memory()
    return 0


def run(args: argparse.Namespace, ranks: du.Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun, folder, world_size = time.time(), Path(args.output_dir), ranks.world_size
    with du.agree_on_errors():
        why = choose_precision(args, ranks)
    if len(set(du.gather_objects(args.mixed_precision))) > 1:
        raise InputError("--mixed_precision auto: the GPUs differ; choose fp16 or no")
    if args.source["num_workers"] == "default" and ranks.device.type == "cpu":
        args.num_workers = 0
    if args.eval_only:
        return evaluate_only(args, ranks)
    lock = ckpt.lock_run_folder(folder, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
    contents = ckpt.load_checkpoint(args.resume_from, folder, FORMAT, resume=True)
    if contents:
        adopt(args, contents, args.resume_from)
        why = keep_precision(args, contents, why, ranks)
    if args.num_warmup_steps >= args.train_timesteps:
        text = f"--num_warmup_steps {args.num_warmup_steps} ({args.source['num_warmup_steps']}): must be below"
        raise InputError(f"{text} --train_timesteps {args.train_timesteps}")
    with du.agree_on_errors():
        baseline = read_baseline(args)
    why = hw.set_numerics(ranks.device, args.mixed_precision, why, args.deterministic)
    accelerator = make_accelerator(args, ranks)
    data, net = Data(args), build_net(args, ranks.device)
    if fits_by_itself(args.auto_batch, ranks.device):
        find_batch_size(net, data.train.max_depth, contents, args)
    loader = du.create_distributed_dataloader(
        data.train, args.train_batch_size, seed=args.seed, num_workers=args.num_workers, drop_last=False,
        accumulation=args.gradient_accumulation_steps, collate_fn=as_it_is,
    )  # fmt: skip
    effective = loader.batch_sampler.effective_batch_size
    optimizer = make_optimizer(net, args)
    fp16 = args.mixed_precision == "fp16"
    scaler = torch.amp.GradScaler(ranks.device.type, init_scale=2.0**14 if fp16 else 1.0)
    state = {"step": 0, "epoch": 0, "samples": 0, "best": None, "best_sha256": None, "saved": None}
    this_run = {"seed": args.seed, "training_data": data.fingerprint, "effective_batch_size": effective}
    if contents:
        ckpt.check_same_run(contents, this_run)
        state |= contents["state"] | {"saved": None}
        forget_other_best(folder, state)
        with du.agree_on_errors():
            ckpt.load_trained(net, contents["net"])
        ckpt.restore_optimizer(optimizer, contents["optimizer"], args.weight_decay)
        ckpt.restore_scaler(scaler, contents["scaler"], args.mixed_precision)
        ckpt.restore_rng(contents["rng"])
    last_step = min(args.max_steps or math.inf, args.train_timesteps)
    published = MODELS[args.model]["train_batch_size"]
    base_rate = du.scale_learning_rate(args.lr, effective / published, args.lr_scaling)
    train = data.train
    depths = ", ".join(f"{n} of depth {depth}" for depth, n in enumerate(train.depths()))
    facts = {
        "launcher": f"{ranks.launcher}, world size {world_size}, {ranks.device}, by Accelerate",
        "batch": f"{args.train_batch_size} per GPU x {args.gradient_accumulation_steps} accumulation x {world_size} "
        f"= {effective} ({args.source['train_batch_size']})",
        "learning rate": f"{args.lr:g} -> {base_rate:g} (--lr_scaling {args.lr_scaling}, published batch {published}), "
        f"{args.num_warmup_steps} "
        "warm-up steps, then cosine",
        "precision": f"{args.mixed_precision} ({why})",
        "model": f"{args.model}, {sum(p.numel() for p in net.parameters())} parameters, context {args.n_transit}, "
        f"{args.n_latent} latents",
        "histories": f"{data.histories.streams} of {data.histories.steps} steps for each of {len(data.train_goals)} "
        f"goals; {len(data.unseen)} goals unseen (split seed {args.split_seed})",
        "segments": f"{len(train)} an epoch: {depths}",
        "in memory": f"{'all histories' if args.cache_in_memory else 'none, mapped'}; {args.num_workers} workers",
        "steps": f"{last_step} of {args.train_timesteps}, {loader.batch_sampler.steps_per_epoch()} an epoch",
        "start": f"step {state['step']}, epoch {state['epoch'] + 1}",
        "output": folder,
    }
    log = RunLog(folder, ranks, LOSSES, args, last_step, contents)
    ckpt.prepare_checkpoint(net)
    log.curves = [f"{split}/return_{part}" for split in ("val", "unseen") for part in ("first", "last")]
    print_start(args, accelerator, ranks)
    print_banner("COMPRESSED AD" if args.n_latent else "ALGORITHM DISTILLATION", facts | log.speed_facts())
    if (longest := data.histories.longest) > data.histories.steps:
        text = f"{data.histories.steps} steps of each history are used, as goal {data.histories.shortest} has no more"
        du.print_main(f"warning: {args.data}: {text}; others have up to {longest}")
    if data.histories.repaired:
        text = "steps end an episode with the next one's start as next state; taken is where the action led"
        du.print_main(f"histories: {data.histories.repaired} {text}")
    if args.max_compression_depth > train.max_depth and args.n_latent:
        text = f"histories of {data.histories.steps} steps have room for {train.max_depth} blocks of {args.n_transit}"
        du.print_main(f"warning: --max_compression_depth {args.max_compression_depth}: {text}; trained to that depth")

    wanted = asked(args, "train_batch_size"), asked(args, "gradient_accumulation_steps")
    split = split_record(wanted, (args.train_batch_size, args.gradient_accumulation_steps), False)

    def save() -> None:
        if state["saved"] == state["step"]:
            return
        state["saved"] = state["step"]
        parts = {"format": FORMAT, "net": ckpt.trained_state(net), "optimizer": optimizer.state_dict()}
        parts |= {"scaler": scaler.state_dict() if fp16 else {}, "state": dict(state), "run": this_run}
        settings = {name: getattr(args, name) for name in (*FIXED, *FIXED_DATA, *KEPT, "mixed_precision")}
        parts |= {"settings": settings, "split": split, "log": log.pending(state["step"])}
        ckpt.save_checkpoint(folder, parts, state["step"], args.keep_last)

    if args.compile:  # layer by layer: how many samples have a first, second ... block differs from step to step
        for layer in net.modules():
            if isinstance(layer, Layer):
                layer.compile(dynamic=True)
    wrapped = accelerator.prepare_model(net)
    tools = wrapped, net, accelerator, optimizer, scaler, loader
    with du.StopSignal() as stop, contextlib.closing(log):
        if state["step"] == 0:
            log.figures(lambda: {"inputs": report.draw_inputs(data.train)}, 0)
        say_if_finished(state["step"], last_step, "--train_timesteps")
        while True:
            planned = state["step"] >= args.train_timesteps
            planned |= bool(args.eval_interval) and state["step"] % args.eval_interval == 0
            # also after a resume from here, as the evaluation may have been cut short
            if state["step"] and (planned or state["step"] >= last_step):
                save()
                if state["step"] >= last_step:
                    log.write_rest(state["step"], passes(state))
                metrics = evaluate_briefly(net, data, accelerator, args, ranks, stop)
                if metrics is None:
                    return stopped(stop, state)
                log.write(state["step"], passes(state), metrics)
                du.print_main(f"step {state['step']}: {brief(metrics)}")
                keep_best(folder, state, du.broadcast_object(metrics["val/loss"]), planned, lower=True)
            if state["step"] >= last_step:
                break
            until = last_step
            if args.eval_interval:
                until = min(until, (state["step"] // args.eval_interval + 1) * args.eval_interval)
            log.restart_clock()
            while state["step"] < until:
                options = state, until, base_rate, args, ranks, log, stop, save
                if code := train_steps(*tools, *options):
                    say_saved(state["step"])
                    return code
        best = ckpt.load_checkpoint(str(folder / "best.pt"), folder, FORMAT)
        ckpt.load_trained(net, best["net"])
        trained = time.time() - begun
        options = baseline, accelerator, args, ranks, stop
        metrics, draw = final_test(net, "test", data, best["step"], *options)
        if metrics is None:
            return stopped(stop, state)
        log.write(state["step"], passes(state), metrics | {"best_step": best["step"]})
        ckpt.export_weights(ckpt.trained_state(net), folder / "model.safetensors")
        facts = {"steps": state["step"], "epochs": passes(state), "world_size": world_size}
        facts |= {"effective_batch_size": effective, "precision": args.mixed_precision}
        log.finish(facts | {"train_seconds": round(trained, 1), "seconds": round(time.time() - begun, 1)})
        log.figures(draw, state["step"])
        du.print_main(f"{trained:.0f} seconds of training, {time.time() - begun:.0f} in all")
        du.print_main(f"weights: {folder}/model.safetensors; figures: {folder}/figures; summary: {folder}/summary.json")
    accelerator.free_memory()
    del lock
    return 0


def passes(state: dict) -> int:
    """Epochs that were begun."""
    return max(1, state["epoch"] + (state["samples"] > 0))


def brief(metrics: dict) -> str:
    """One line of an evaluation in training."""
    parts = [f"{name} {metrics[f'{split}/return_first']:.2f} -> {metrics[f'{split}/return_last']:.2f}"
             for split, name in (("val", "return on 8 training goals"), ("unseen", "on 8 unseen goals"))]  # fmt: skip
    return ", ".join(parts) + f" (action accuracy {metrics['unseen/accuracy']:.3f}, loss {metrics['unseen/loss']:.3f})"


def stopped(stop: du.StopSignal, state: dict) -> int:
    """The exit code of a signal during an evaluation, agreed by all ranks; what it needs is saved."""
    say_saved(state["step"])
    return int(du.reduce_max([stop.code])[0])


def rehearse(args: argparse.Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step of segments of the greatest depth."""
    import rehearsal_utils as rehearsal

    processes, memory = rehearsal.processes_to_plan_for(args.world_size), rehearsal.memory_to_plan_for(args.gpu_memory)
    size, accumulation = args.train_batch_size, args.gradient_accumulation_steps
    depth = args.max_compression_depth if args.n_latent else 0
    trace = rehearsal.Trace()
    with rehearsal.imaginary_gpu(trace) as ranks:
        args.mixed_precision, _ = hw.choose_precision(args.mixed_precision, ranks.device)
        hw.set_numerics(ranks.device, args.mixed_precision, "", args.deterministic)
        with ranks.device:
            net = build_net(args, ranks.device)
        trial = partial(trial_step, net, largest_batch(size, depth, args.n_transit), args)
        step = rehearsal.rehearse_step(trace, net, make_optimizer(net, args), trial, accumulation, processes)

    def words(samples: int) -> str:
        return batch_flags(*hw.smaller_batch(size, accumulation, samples), flag="--train_batch_size")

    title = f"{args.model}, {size} segments per GPU x {accumulation} accumulation, {args.mixed_precision}"
    rehearsal.report_rehearsal(title, step, size, memory, words, "a smaller --n_transit or --tf_n_embd")
    rehearsal.end_rehearsal()


def main(args: argparse.Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    du.launch_workers(args.world_size or 1)
    with du.setup_distributed(timeout=args.dist_timeout) as ranks:
        try:
            return run(args, ranks)
        except (RuntimeError, MemoryError) as error:
            if not hw.out_of_memory(error):
                raise
            now = f"out of memory at --train_batch_size {args.train_batch_size}"
            size, accumulation = hw.split_batch(args.train_batch_size, args.gradient_accumulation_steps)
            smaller = f"--train_batch_size {size} --gradient_accumulation_steps {accumulation} (the same result)"
            more = "a smaller --test_batch_size if it was evaluating"
            more += auto_batch_advice(args.auto_batch, ranks.device)
            du.leave_alone(f"{now}; try {smaller}, {more}")


if __name__ == "__main__":
    run_main(main, ARGS)
