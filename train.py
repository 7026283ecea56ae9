"""CompressedAD: a transformer that learns in its context, without gradient steps, from histories of learners (guide 4).

    python train.py                                                               # one GPU, or CPU
    accelerate launch --config_file configs/accelerate_config.yaml train.py       # 2 GPUs, fp16
    accelerate launch --multi_gpu --num_processes=4 --mixed_precision=fp16 train.py
    torchrun --nproc_per_node=gpu train.py                                        # every GPU there is
    torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=192.168.1.1 --master_port=29500 train.py
    python train.py --model ad                                                    # without compression, to compare with
    python train.py --eval_only                                                   # 500 episodes on the 8 unseen goals

Data: datasets/history_darkroom_PPO_alg-seed42.hdf5, see tasks/compressed_ad/data.py; `sample_data.py compressed_ad .`
makes histories.
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
from dataclasses import replace
from functools import partial
from pathlib import Path

from cli_utils import (
    InputError,
    Parser,
    add_common_arguments,
    number,
    parse_arguments,
    run_main,
    seed_number,
    value_sources,
    whole,
)

FORMAT = "compressed_ad/1"
LOSSES = ["loss", "accuracy", "grad_norm", "skipped"]

# Agents per goal in the evaluations during training.
VAL_SEEDS = 5

# Histories of each unseen goal on which the action accuracy is taken.
EVAL_STREAMS = 20

# What --model stands for where flag and config are silent: the published settings.
MODELS = {
    "compressed_ad": {
        "tf_n_embd": 128,
        "tf_n_layer": 4,
        "tf_n_head": 8,
        "tf_dim_feedforward": 512,
        "n_latent": 40,
        "lr": 1e-4,
        "train_batch_size": 128,
        "train_timesteps": 150000,
        "num_warmup_steps": 5000,
    },
    # the same without compression
    "ad": {
        "tf_n_embd": 64,
        "tf_n_layer": 4,
        "tf_n_head": 4,
        "tf_dim_feedforward": 256,
        "n_latent": 0,
        "lr": 3e-4,
        "train_batch_size": 512,
        "train_timesteps": 50000,
        "num_warmup_steps": 1000,
    },
}

# What a checkpoint prescribes to a run that is resumed from it or uses it.
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

# What a resumed run takes from its checkpoint, unless it is told otherwise.
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

    # other names that the guide has for common flags
    names = {
        "log_every": "summary_interval",
        "save_every": "ckpt_interval",
        "grad_clip": "grad_clip_norm",
        "lr": "learning_rate",
    }
    add_common_arguments(parser, names)
    parser.set_defaults(log_every=100, save_every=1000, wandb_project="compressed-ad")
    args = parse_arguments(parser, argv)

    # what --model stands for, and what cannot be together
    args.source = value_sources(parser, args, argv)
    fill_in(args)
    if args.model == "ad":
        if args.n_latent and args.source["n_latent"] == "command line":
            parser.error("--n_latent: --model ad does not compress; leave it out, or give --model compressed_ad")
        # so that a config of the other serves both
        args.n_latent = 0
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
    # before the heavy imports: --help and a mistyped flag answer at once
    ARGS = parse_args()

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from accelerate_utils import choose_launched_precision, keep_precision, make_accelerator
from checkpoint_utils import (
    export_weights,
    load_checkpoint,
    load_trained,
    lock_run_folder,
    prepare_checkpoint,
    trained_state,
)
from distributed_utils import (
    Ranks,
    StopSignal,
    agree_on_errors,
    any_rank,
    broadcast_object,
    create_distributed_dataloader,
    gather_objects,
    launch_workers,
    print_main,
    reduce_max,
    reduce_sum,
    scale_learning_rate,
    schedule,
    setup_distributed,
    to_device,
    world,
)
from hardware_utils import autocast, set_numerics, smaller_batch, split_batch
from logging_utils import RunLog, save_figure, write_result
from loop_utils import (
    LossScaler,
    Progress,
    Step,
    TrainingRun,
    agree_on_precision,
    clip_and_step,
    end_step,
    explain_out_of_memory,
    finish_run,
    keep_best,
    optimizer_steps,
    print_start,
    restore_training,
    resume,
    say_if_finished,
    say_saved,
    say_where,
    sync_gradients,
)
from memory_utils import BatchSize, auto_batch_advice, batch_flags, fit_batch_to_memory, fits_by_itself
from sampler_utils import EvalBatchSampler
from tasks.compressed_ad.data import ACTIONS, HORIZON, NEXT, START, Histories, SegmentDataset, split_goals
from tasks.compressed_ad.model import GRID, Agents, InContextNet, Layer
from tasks.compressed_ad.report import (
    draw_accuracy,
    draw_inputs,
    draw_paths,
    draw_returns,
    interval,
    last_episodes,
    print_returns,
    return_metrics,
)

# --- data and model ---------------------------------------------------------------------------------------------------


def find_histories(path: str) -> Path:
    """The HDF5 file that --data means. Raises InputError."""
    if not Path(path).is_dir():
        return Path(path)
    patterns = [f"{folder}*.{ending}" for folder in ("", "datasets/") for ending in ("hdf5", "h5")]
    files = sorted(file for pattern in patterns for file in Path(path).glob(pattern))
    if len(files) != 1:
        reason = f"holds {len(files)} HDF5 files" if files else "holds no .hdf5 or .h5 file"
        raise InputError(f"{path}: {reason}, also not in datasets/; name the file with --data")
    return files[0]


class Data:
    """The histories of a run: training goals, unseen goals, and the segments that are drawn from them."""

    def __init__(self, args: argparse.Namespace):
        """All ranks. Raises InputError."""
        with agree_on_errors():
            path = find_histories(args.data)
        self.histories = Histories(path, args.cache_in_memory)
        steps = self.histories.steps
        if args.n_transit > steps:
            raise InputError(f"--n_transit {args.n_transit}: more than the {steps} steps of the histories; lower it")

        # goals, and segments of the training goals' histories
        self.train_goals, self.unseen = split_goals(args.split_seed)
        depth = args.max_compression_depth if args.n_latent else 0
        self.train = SegmentDataset(self.histories, self.train_goals, args.n_transit, depth, args.seed)

        # a run is resumed on the same training data only
        facts = [steps, self.histories.streams, self.train_goals, self.histories.digest]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def as_it_is(batch: dict) -> dict:
    """collate_fn of a set that makes whole batches."""
    return batch


def build_model(args: argparse.Namespace, device: torch.device) -> InContextNet:
    """The model with the same random weights on every rank."""
    torch.manual_seed(args.seed)
    model = InContextNet(
        args.tf_n_embd,
        args.tf_n_layer,
        args.tf_n_head,
        args.tf_dim_feedforward,
        args.n_transit,
        args.n_latent,
        args.encoder_n_layer,
    )
    return model.to(device)


def action_losses(model: nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy, whether the most likely action is right), both (B, n_transit) fp32, zero on padding."""
    logits = model(batch).float()
    losses = F.cross_entropy(logits.transpose(1, 2), batch["action"], reduction="none", ignore_index=-100)
    return losses, (logits.argmax(-1) == batch["action"]).float()


# --- training ---------------------------------------------------------------------------------------------------------


def make_optimizer(model: InContextNet, args: argparse.Namespace) -> torch.optim.AdamW:
    """Fused AdamW with the guide's betas."""
    return torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=args.weight_decay, fused=True
    )


def scale_lr(effective_batch_size: int, args: argparse.Namespace) -> float:
    """--lr, changed as --lr_scaling says for another effective batch than the published one."""
    published = MODELS[args.model]["train_batch_size"]
    return scale_learning_rate(args.lr, effective_batch_size / published, args.lr_scaling)


def count_actions(step: Step) -> list[float]:
    """Actions to predict in this rank's share of a step."""
    return [float(sum(int(batch["length"].sum()) for batch in step.batches))]


def train_one_epoch(
    model: nn.Module, loader, optimizer, scaler: LossScaler, training: TrainingRun, args: argparse.Namespace
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
                # DDP averages over the ranks; these are shares of a sum, so undo the division
                scaler.scale(loss * world_size).backward()
            losses += torch.stack([loss.detach(), right.sum() * share])

        # update the weights; a non-finite gradient skips the step on all ranks together
        grad_norm = clip_and_step(optimizer, scaler, args.grad_clip, lr)
        end_step(training, step, losses, grad_norm, lr)


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def act_in_context(
    model: InContextNet, goals: list[int], seeds: int, episodes: int, args, stop: StopSignal | None = None
) -> tuple[np.ndarray | None, np.ndarray]:
    """Let agents act in Darkroom with nothing but their own past to go by.

    Gives the returns (goals, seeds, episodes), and the cells (goals, 2, HORIZON + 1) that each goal's first agent
    went through in its first and last episode; the same on all ranks, at any world size: an agent's chance is a
    function of (seed, goal, agent) alone, and it acts in float64, where its neighbours in the batch change no action.
    On a signal to any rank all leave, with None for the returns.
    """
    rank, world_size = world()
    device = next(model.parameters()).device
    actor = copy.deepcopy(model).double().eval()
    returns = torch.zeros(len(goals) * seeds, episodes, dtype=torch.float64)
    paths = torch.zeros(len(goals), 2, HORIZON + 1, dtype=torch.float64)

    # agent i is number i % seeds of goal i // seeds; the ranks take them in turn
    local = range(rank, len(returns), world_size)
    quiet = rank > 0 or not sys.stderr.isatty()
    for first in range(0, len(local), args.test_batch_size):
        agents = list(local[first : first + args.test_batch_size])
        generators = [np.random.default_rng([args.seed % 2**63, 5, goals[i // seeds], i % seeds]) for i in agents]
        goal = torch.tensor([goals[i // seeds] for i in agents], device=device)
        acting = Agents(actor, len(agents), forget=max(1, min(HORIZON, model.n_transit // 2)))
        for episode in tqdm(range(episodes), desc="in context", unit="episode", disable=quiet, leave=False):
            if stop and stop.code:
                break
            if rank == 0 and quiet and episode and episode % 100 == 0:
                print(f"agents {first + 1} to {first + len(agents)}: episode {episode}/{episodes}", flush=True)
            rewards, path = play_episode(acting, goal, gumbel_noise(generators, device))
            returns[agents, episode] = rewards.cpu()

            # the way of each goal's first agent is shown
            if episode in (0, episodes - 1):
                walked = path.double().cpu()
                for row, i in enumerate(agents):
                    if i % seeds == 0:
                        paths[i // seeds, int(episode > 0)] = walked[row]
    if stop and any_rank(bool(stop.code)):
        return None, np.empty(0)
    returns = reduce_sum(returns).numpy().reshape(len(goals), seeds, episodes)
    return returns, reduce_sum(paths).numpy().astype(int)


def gumbel_noise(generators: list[np.random.Generator], device: torch.device) -> torch.Tensor:
    """(HORIZON, agents, ACTIONS): the most likely action plus this noise is a draw from the softmax."""
    uniform = np.stack([generator.random((HORIZON, ACTIONS)) for generator in generators], 1)
    return torch.from_numpy(-np.log(-np.log(np.maximum(uniform, 1e-300)))).to(device)


def play_episode(acting: Agents, goal: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each agent's return (agents,) in one episode, and the cells (agents, HORIZON + 1) that it went through."""
    follow = torch.from_numpy(NEXT).to(goal.device)
    cell = torch.full_like(goal, START)
    total = torch.zeros(len(goal), dtype=torch.float64, device=goal.device)
    path = [cell]
    for t in range(HORIZON):
        action = (acting.act(cell) + noise[t]).argmax(-1)
        after = follow[cell, action]
        reward = (after == goal).double()
        acting.observe(torch.stack([cell, action, after], 1), reward)
        total = total + reward
        cell = after
        path.append(cell)
    return total, torch.stack(path, 1)


@torch.no_grad()
def action_accuracy(
    split: str, goals: list[int], model: InContextNet, data: Data, precision: str, args: argparse.Namespace
) -> tuple[dict, np.ndarray]:
    """Loss and accuracy of the next action on some goals' histories; the accuracy (depth + 1, n_transit) by place.

    The same segments at each call: of each goal's first histories one of every depth, its end spread over the history.
    """
    model.eval()
    rank, world_size = world()
    device = next(model.parameters()).device
    streams = min(EVAL_STREAMS, data.histories.streams)
    segments = SegmentDataset(data.histories, goals, args.n_transit, data.train.max_depth, 0)
    history = np.concatenate([np.arange(streams) + k * data.histories.streams for k in range(len(goals))])
    depths = segments.max_depth + 1

    # for each depth and place in the context: the loss, how many were right, and how many there were
    table = torch.zeros(depths, 3, args.n_transit, dtype=torch.float64)
    for places in EvalBatchSampler(len(history) * depths, args.test_batch_size, rank, world_size):
        places = np.array(places)

        # the deepest first; each segment ends somewhere in its history
        depth = depths - 1 - places // len(history)
        least = depth * args.n_transit + 1
        spread = (places % len(history) * 0.618034) % 1
        end = least + (spread * (data.histories.steps + 1 - least)).astype(np.int64)
        batch = to_device(segments.batch(history[places % len(history)], depth, end), device)
        with autocast(device, precision):
            losses, right = action_losses(model, batch)
        numbers = torch.stack([losses, right, (batch["action"] >= 0).float()], 1)
        table.index_add_(0, torch.from_numpy(depth), numbers.double().cpu())

    # sums over all ranks
    table = reduce_sum(table)
    loss, right, number = table.sum((0, 2)).tolist()
    by_place = (table[:, 1] / table[:, 2].clamp(min=1)).masked_fill(table[:, 2] == 0, math.nan)
    return {f"{split}/loss": loss / number, f"{split}/accuracy": right / number}, by_place.numpy()


def evaluate_briefly(
    model: InContextNet, data: Data, precision: str, args: argparse.Namespace, stop: StopSignal
) -> dict | None:
    """In training: `val/` of 8 training goals, whose loss chooses best.pt, and `unseen/` of the test's, to look at.

    None after a signal to any rank.
    """
    watched = data.train_goals[: len(data.unseen)]
    seeds = min(VAL_SEEDS, args.eval_seeds)
    returns, _ = act_in_context(model, watched + data.unseen, seeds, args.val_episodes, args, stop)
    if returns is None:
        return None
    metrics = {}
    for split, goals in (("val", watched), ("unseen", data.unseen)):
        metrics |= action_accuracy(split, goals, model, data, precision, args)[0]
    metrics |= return_metrics("val", returns[: len(watched)], watched)
    return metrics | return_metrics("unseen", returns[len(watched) :], data.unseen)


def describe_evaluation(metrics: dict) -> str:
    """One line of an evaluation in training."""
    parts = []
    for split, name in (("val", "return on 8 training goals"), ("unseen", "on 8 unseen goals")):
        parts.append(f"{name} {metrics[f'{split}/return_first']:.2f} -> {metrics[f'{split}/return_last']:.2f}")
    return f"{', '.join(parts)} (action accuracy {metrics['unseen/accuracy']:.3f}, loss {metrics['unseen/loss']:.3f})"


def read_baseline(args: argparse.Namespace) -> dict | None:
    """eval_test.json of the --model ad run that is to stand beside this one. Raises InputError when it cannot."""
    if args.ad_run is None:
        return None
    path = Path(args.ad_run) / "eval_test.json"
    goals = split_goals(args.split_seed)[1]
    try:
        baseline = json.loads(path.read_text())
        model = baseline["model"]
        episodes = len(baseline["return_by_episode"]["mean"])
        complete = {"test/return_first", "test/return_last", "goals"} <= baseline.keys()
    except OSError as error:
        raise InputError(f"{path}: not read ({error.strerror}); --ad_run wants the folder of a finished run") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise InputError(f"{path}: not an evaluation of train.py; --ad_run wants the folder of a finished run")

    # of the same test only
    if model != "ad":
        raise InputError(f"{path}: of --model {model}; give --ad_run a run of --model ad")
    if baseline["goals"] != [list(divmod(goal, GRID)) for goal in goals]:
        raise InputError(f"{path}: of other goals; give a run with the same --split_seed")
    if episodes != args.eval_episodes:
        advice = f"evaluate it anew: --eval_only --resume_from {args.ad_run} --eval_episodes {args.eval_episodes}"
        raise InputError(f"{path}: of {episodes} episodes, this run has --eval_episodes {args.eval_episodes}; {advice}")
    return baseline


def final_test(
    model: InContextNet,
    name: str,
    data: Data,
    step: int,
    baseline: dict | None,
    precision: str,
    args: argparse.Namespace,
    stop: StopSignal | None = None,
) -> tuple[dict | None, Callable[[], dict] | None]:
    """The full evaluation on the unseen goals; (metrics, what draws its figures); rank 0 writes and prints it.

    Both are None after a signal to any rank.
    """
    returns, paths = act_in_context(model, data.unseen, args.eval_seeds, args.eval_episodes, args, stop)
    if returns is None:
        return None, None
    metrics, by_place = action_accuracy("test", data.unseen, model, data, precision, args)
    metrics |= return_metrics("test", returns, data.unseen)

    # beside the learner whose histories these are, and the run without compression
    source = data.histories.learning_curve(data.unseen).mean(1)
    metrics["test/return_source_first"] = float(source[0])
    metrics["test/return_source_last"] = float(source[-last_episodes(len(source)) :].mean())
    if baseline:
        metrics |= {f"test/return_ad_{part}": baseline[f"test/return_{part}"] for part in ("first", "last")}
    if world()[0] > 0:
        return metrics, None

    # of each episode, over goals and agents; of each goal, over the last episodes
    rows = [interval(episode) for episode in returns.transpose(2, 0, 1)]
    curve = {kind: [row[k] for row in rows] for k, kind in enumerate(("mean", "low", "high"))}
    by_goal = returns[:, :, -last_episodes(args.eval_episodes) :].mean((1, 2)).tolist()
    facts = {
        "model": args.model,
        "step": step,
        "goals": [list(divmod(goal, GRID)) for goal in data.unseen],
        "return_last_by_goal": by_goal,
        "return_by_episode": curve,
        "eval_episodes": args.eval_episodes,
        "eval_seeds": args.eval_seeds,
        "data": str(data.histories.path),
    }

    # rank 0 writes, prints and draws
    text = json.dumps(metrics | facts, indent=2) + "\n"
    write_result(Path(args.output_dir) / f"eval_{name}.json", text.encode())
    title = "test, best.pt" if name == "test" else name
    print_returns(title, metrics, curve, source, baseline, by_goal, data.unseen)

    def draw() -> dict:
        return {
            "returns": draw_returns(curve, metrics, source, baseline, args.model),
            "trajectories": draw_paths(paths, returns, data.unseen),
            "accuracy": draw_accuracy(by_place),
        }

    return metrics, draw


def evaluate_only(precision: str, args: argparse.Namespace, ranks: Ranks) -> None:
    """--eval_only: the test of a checkpoint."""
    run_folder = Path(args.output_dir)
    path = str(run_folder / "best.pt") if args.resume_from in (None, "auto") else args.resume_from
    if Path(path).is_dir():
        path = str(Path(path) / "best.pt")
    checkpoint = load_checkpoint(path, run_folder, FORMAT)
    adopt_settings(args, checkpoint, path)
    if args.source["output_dir"] == "default":
        # beside the checkpoint, not in another model's run
        run_folder = Path(path).parent
        args.output_dir = str(run_folder)
    set_numerics(ranks.device, precision, "", args.deterministic)
    accelerator = make_accelerator(precision, args.gradient_accumulation_steps, ranks)
    with agree_on_errors():
        baseline = read_baseline(args)
    print_processes(accelerator, precision, ranks)
    data = Data(args)
    model = build_model(args, ranks.device)
    with agree_on_errors():
        load_trained(model, checkpoint["net"])

    # of another checkpoint than the best: beside the run's own test, not in its place
    stem = Path(path).stem
    name = "test" if stem == "best" else stem
    _, draw = final_test(model, name, data, checkpoint["step"], baseline, precision, args)
    if ranks.is_main:
        prefix = "" if name == "test" else f"{name}_"
        figures = run_folder / "figures"
        written = [save_figure(figures / f"{prefix}{kind}.png", figure) for kind, figure in draw().items()]
        if all(written):
            print(f"written: {run_folder}/eval_{name}.json, {figures}", flush=True)
    accelerator.free_memory()


# --- the run ----------------------------------------------------------------------------------------------------------


def adopt_settings(args: argparse.Namespace, checkpoint: dict, path: str) -> None:
    """Take what a checkpoint prescribes. Raises InputError where a flag or the config says otherwise."""
    settings = checkpoint["settings"]
    if args.source["model"] == "default" and args.model != settings["model"]:
        args.model = settings["model"]
        output_dir = args.output_dir
        fill_in(args)
        args.output_dir = output_dir

    # what cannot differ
    for name in (*FIXED, *FIXED_DATA):
        if args.source[name] != "default" and getattr(args, name) != settings[name]:
            reason = f"a run with --{name} {settings[name]}, now {getattr(args, name)}; leave it out"
            raise InputError(f"--resume_from {path}: {reason}")
        setattr(args, name, settings[name])

    # what stays unless a flag changes it
    for name in KEPT:
        before = settings[name]
        now = getattr(args, name)
        if args.source[name] == "default":
            setattr(args, name, before)
        elif before != now and name != "data" and not args.eval_only:
            print_main(f"warning: begun with --{name} {before}, going on with {now}: another run from here on")
    if args.source["seed"] == "default":
        args.seed = checkpoint["run"]["seed"]


def largest_batch(batch_size: int, depth: int, n_transit: int) -> dict:
    """A made-up batch, on the host, of segments that all have `depth` blocks to compress and a full context."""
    return {
        "cells": torch.zeros(batch_size, depth + 1, n_transit, 3, dtype=torch.uint8),
        "rewards": torch.zeros(batch_size, depth + 1, n_transit),
        "depth": torch.full((batch_size,), depth),
        "compressed": [batch_size] * depth,
        "length": torch.full((batch_size,), n_transit),
        "action": torch.zeros(batch_size, n_transit, dtype=torch.long),
        "sample": torch.arange(batch_size),
    }


def trial_step(model: InContextNet, batch: dict, precision: str) -> None:
    """Forward and backward pass of one micro-batch, as in training; the gradients stay in the model."""
    batch = to_device(batch, model.positions.device)
    with autocast(model.positions.device, precision):
        losses, _ = action_losses(model, batch)
    (losses.sum() / losses.numel()).backward()


def choose_batch_size(
    model: InContextNet, depth: int, checkpoint: dict | None, precision: str, args: argparse.Namespace
) -> BatchSize:
    """The batch of the flags, or what a step of segments of this depth leaves room for."""
    wanted = BatchSize(args.train_batch_size, args.gradient_accumulation_steps, args.source["train_batch_size"])
    if not fits_by_itself(args.auto_batch, model.positions.device):
        return wanted

    def try_once(size: int) -> None:
        trial_step(model, largest_batch(size, depth, args.n_transit), precision)

    words = partial(batch_flags, flag="--train_batch_size")
    advice = "pass a smaller --n_transit or --tf_n_embd"
    return fit_batch_to_memory(try_once, model, wanted, words, advice, checkpoint=checkpoint)


def make_loader(segments: SegmentDataset, batch: BatchSize, args: argparse.Namespace, device: torch.device):
    """This rank's segments, in micro-batches."""
    num_workers = args.num_workers
    if args.source["num_workers"] == "default" and device.type == "cpu":
        # they would take the training's cores
        num_workers = 0
    return create_distributed_dataloader(
        segments,
        batch.size,
        seed=args.seed,
        num_workers=num_workers,
        accumulation=batch.accumulation,
        drop_last=False,
        collate_fn=as_it_is,
    )


def print_processes(accelerator, precision: str, ranks: Ranks) -> None:
    """The start-up lines as the guide shows them."""
    devices = gather_objects(str(ranks.device))
    print_main(f"Distributed training: {accelerator.distributed_type.value}")
    print_main(f"Number of processes: {ranks.world_size}")
    print_main(f"Mixed precision: {precision}")
    for rank, device in enumerate(devices):
        print_main(f"Process {rank} using device: {device}")


def describe_run(
    model: InContextNet, data: Data, loader, batch: BatchSize, why: str, args: argparse.Namespace
) -> dict[str, str]:
    """The banner's rows of this script."""
    world_size = world()[1]
    sampler = loader.batch_sampler
    effective = sampler.effective_batch_size
    published = MODELS[args.model]["train_batch_size"]
    histories = data.histories
    parameters = sum(parameter.numel() for parameter in model.parameters())

    # what there is to learn from
    depths = ", ".join(f"{count} of depth {depth}" for depth, count in enumerate(data.train.depths()))
    in_memory = "all histories" if args.cache_in_memory else "none, mapped"
    return {
        "batch": f"{batch.size} per GPU x {batch.accumulation} accumulation x {world_size} = {effective} "
        f"({batch.source})",
        "learning rate": f"{args.lr:g} -> {scale_lr(effective, args):g} (--lr_scaling {args.lr_scaling}, published "
        f"batch {published}), {args.num_warmup_steps} warm-up steps, then cosine",
        "precision": why,
        "model": f"{args.model}, {parameters} parameters, context {args.n_transit}, {args.n_latent} latents",
        "histories": f"{histories.streams} of {histories.steps} steps for each of {len(data.train_goals)} goals; "
        f"{len(data.unseen)} goals unseen (split seed {args.split_seed})",
        "segments": f"{len(data.train)} an epoch: {depths}; {sampler.steps_per_epoch()} steps",
        "in memory": f"{in_memory}; {loader.num_workers} workers",
    }


def warn_of_histories(data: Data, args: argparse.Namespace) -> None:
    """Rank 0 says what of the histories is not used, or not as it is in the file."""
    histories = data.histories
    if histories.longest > histories.steps:
        used = f"{histories.steps} steps of each history are used, as goal {histories.shortest} has no more"
        print_main(f"warning: {args.data}: {used}; others have up to {histories.longest}")
    if histories.repaired:
        reason = "steps end an episode with the next one's start as next state; taken is where the action led"
        print_main(f"histories: {histories.repaired} {reason}")
    if args.max_compression_depth > data.train.max_depth and args.n_latent:
        room = f"histories of {histories.steps} steps have room for {data.train.max_depth} blocks of {args.n_transit}"
        print_main(f"warning: --max_compression_depth {args.max_compression_depth}: {room}; trained to that depth")


def checkpoint_contents(
    model: InContextNet, optimizer, scaler: LossScaler, this_run: dict, batch: BatchSize, args: argparse.Namespace
) -> dict:
    """What a checkpoint holds beside the position and the log."""
    settings = {name: getattr(args, name) for name in (*FIXED, *FIXED_DATA, *KEPT)}
    return {
        "format": FORMAT,
        "net": trained_state(model),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict() if scaler.precision == "fp16" else {},
        "run": this_run,
        "settings": settings | {"mixed_precision": scaler.precision},
        "split": batch.record(),
    }


def run(args: argparse.Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun = time.time()

    asked_by = args.source["mixed_precision"]
    choose = partial(choose_launched_precision, args.mixed_precision, asked_by, ranks)
    precision, why = agree_on_precision(choose)
    if args.eval_only:
        evaluate_only(precision, args, ranks)
        return 0

    # the run folder is ours from here on
    run_folder = Path(args.output_dir)
    lock = lock_run_folder(run_folder, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
    checkpoint = load_checkpoint(args.resume_from, run_folder, FORMAT, resume=True)
    if checkpoint:
        adopt_settings(args, checkpoint, args.resume_from)
        begun_in = checkpoint["settings"]["mixed_precision"]
        precision, why = keep_precision(precision, why, begun_in, asked_by, ranks)
    if args.num_warmup_steps >= args.train_timesteps:
        warmup = f"--num_warmup_steps {args.num_warmup_steps} ({args.source['num_warmup_steps']})"
        raise InputError(f"{warmup}: must be below --train_timesteps {args.train_timesteps}")
    why = set_numerics(ranks.device, precision, why, args.deterministic)

    code = fit(checkpoint, precision, why, begun, args, ranks)
    del lock
    return code


def fit(checkpoint: dict | None, precision: str, why: str, begun: float, args: argparse.Namespace, ranks: Ranks) -> int:
    """Load the histories, train, and test the best checkpoint; returns the exit code. begun: when the run began."""
    run_folder = Path(args.output_dir)
    with agree_on_errors():
        baseline = read_baseline(args)
    accelerator = make_accelerator(precision, args.gradient_accumulation_steps, ranks)
    data = Data(args)
    model = build_model(args, ranks.device)
    batch = choose_batch_size(model, data.train.max_depth, checkpoint, precision, args)
    loader = make_loader(data.train, batch, args, ranks.device)
    effective_batch_size = loader.batch_sampler.effective_batch_size

    # begin, or go on where the checkpoint stands
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
    log.open(args, checkpoint)
    log.curves = [f"{split}/return_{part}" for split in ("val", "unseen") for part in ("first", "last")]
    training = TrainingRun(
        run_folder=run_folder,
        progress=progress,
        last_step=last_step,
        planned_steps=args.train_timesteps,
        effective_batch_size=effective_batch_size,
        precision=precision,
        log=log,
        contents=partial(checkpoint_contents, model, optimizer, scaler, this_run, batch, args),
        save_every=args.save_every,
        keep_last=args.keep_last,
        max_bad_steps=args.max_bad_steps,
    )

    # what is said at the start
    prepare_checkpoint(model)
    print_processes(accelerator, precision, ranks)
    title = "COMPRESSED AD" if args.n_latent else "ALGORITHM DISTILLATION"
    print_start(title, ranks, training, describe_run(model, data, loader, batch, why, args))
    warn_of_histories(data, args)
    if args.compile:
        compile_layers(model)

    advice = partial(out_of_memory_advice, batch.size, batch.accumulation, args, ranks)
    with explain_out_of_memory(advice), training.stop, contextlib.closing(log):
        wrapped = accelerator.prepare_model(model)
        code = train(model, wrapped, loader, optimizer, scaler, training, data, args)
        code = code or test_best(model, data, training, baseline, begun, args)
    accelerator.free_memory()
    return code


def compile_layers(model: InContextNet) -> None:
    """--compile: layer by layer, as the samples that have a first, second ... block differ in number at each step."""
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.compile(dynamic=True)


def train(
    model: InContextNet, wrapped: nn.Module, loader, optimizer, scaler, training: TrainingRun, data: Data, args
) -> int:
    """All steps, with an evaluation every --eval_interval and at the end; the exit code of a stop signal or 0."""
    progress = training.progress
    if progress.step == 0:
        training.log.figures(lambda: {"inputs": draw_inputs(data.train)}, 0)
    say_if_finished(training, "--train_timesteps")
    while True:
        # also after a resume from here, as the evaluation may have been cut short
        due = is_planned(progress.step, training, args) or progress.step >= training.last_step
        code = evaluate_and_keep(model, data, training, args) if progress.step and due else 0
        if code or progress.step >= training.last_step:
            return code

        # to the next evaluation, through as many epochs as that takes
        until = training.last_step
        if args.eval_interval:
            until = min(until, (progress.step // args.eval_interval + 1) * args.eval_interval)
        stretch = replace(training, last_step=until)
        while progress.step < until:
            train_one_epoch(wrapped, loader, optimizer, scaler, stretch, args)
            if training.stop.agreed:
                training.save()
                say_saved(progress.step)
                return training.stop.agreed
            if progress.samples >= loader.batch_sampler.used:
                progress.epoch += 1
                progress.samples = 0


def is_planned(step: int, training: TrainingRun, args: argparse.Namespace) -> bool:
    """Whether the uninterrupted run, which --max_steps does not end, has an evaluation at this step."""
    return step >= training.planned_steps or (args.eval_interval > 0 and step % args.eval_interval == 0)


def evaluate_and_keep(model: InContextNet, data: Data, training: TrainingRun, args: argparse.Namespace) -> int:
    """Save, evaluate, and keep the checkpoint if it is the best; the exit code of a stop signal or 0."""
    progress = training.progress
    training.save()
    if progress.step >= training.last_step:
        training.log.write_rest(progress.step, epochs_begun(progress))
    metrics = evaluate_briefly(model, data, training.precision, args, training.stop)
    if metrics is None:
        return stopped_in_evaluation(training)
    training.log.write(progress.step, epochs_begun(progress), metrics)
    print_main(f"step {progress.step}: {describe_evaluation(metrics)}")

    # no rank decides by itself
    loss = broadcast_object(metrics["val/loss"])
    keep_best(training, loss, is_planned(progress.step, training, args), lower=True)
    return 0


def test_best(
    model: InContextNet,
    data: Data,
    training: TrainingRun,
    baseline: dict | None,
    begun: float,
    args: argparse.Namespace,
) -> int:
    """Test best.pt, and write the weights and the summary; the exit code of a stop signal or 0."""
    run_folder = training.run_folder
    best = load_checkpoint(str(run_folder / "best.pt"), run_folder, FORMAT)
    load_trained(model, best["net"])
    train_seconds = time.time() - begun
    metrics, draw = final_test(model, "test", data, best["step"], baseline, training.precision, args, training.stop)
    if metrics is None:
        return stopped_in_evaluation(training)
    step = training.progress.step
    epochs = epochs_begun(training.progress)
    training.log.write(step, epochs, metrics | {"best_step": best["step"]})
    export_weights(trained_state(model), run_folder / "model.safetensors")
    finish_run(training, begun, {"epochs": epochs, "train_seconds": round(train_seconds, 1)})
    training.log.figures(draw, step)
    print_main(f"{train_seconds:.0f} seconds of training, {time.time() - begun:.0f} in all")
    say_where(run_folder)
    return 0


def epochs_begun(progress: Progress) -> int:
    """Epochs that were begun; at the end of one the position is the start of the next."""
    return max(1, progress.epoch + (progress.samples > 0))


def stopped_in_evaluation(training: TrainingRun) -> int:
    """The exit code of a signal during an evaluation, agreed by all ranks; what it needs is saved."""
    say_saved(training.progress.step)
    return int(reduce_max([training.stop.code])[0])


def rehearse(args: argparse.Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step of segments of the greatest depth."""
    import rehearsal_utils as rehearsal

    processes = rehearsal.processes_to_plan_for(args.world_size)
    memory = rehearsal.memory_to_plan_for(args.gpu_memory)
    size = args.train_batch_size
    accumulation = args.gradient_accumulation_steps
    depth = args.max_compression_depth if args.n_latent else 0
    trace = rehearsal.Trace()
    with rehearsal.imaginary_gpu(trace) as ranks:
        asked_by = args.source["mixed_precision"]
        precision, _ = choose_launched_precision(args.mixed_precision, asked_by, ranks)
        set_numerics(ranks.device, precision, "", args.deterministic)
        with ranks.device:
            model = build_model(args, ranks.device)
        trial = partial(trial_step, model, largest_batch(size, depth, args.n_transit), precision)
        step = rehearsal.rehearse_step(trace, model, make_optimizer(model, args), trial, accumulation, processes)

    def words(samples: int) -> str:
        return batch_flags(*smaller_batch(size, accumulation, samples), flag="--train_batch_size")

    title = f"{args.model}, {size} segments per GPU x {accumulation} accumulation, {precision}"
    rehearsal.report_rehearsal(title, step, size, memory, words, "a smaller --n_transit or --tf_n_embd")
    rehearsal.end_rehearsal()


def out_of_memory_advice(size: int, accumulation: int, args: argparse.Namespace, ranks: Ranks) -> str:
    """The flags that take less memory than this batch."""
    fewer, more = split_batch(size, accumulation)
    smaller = batch_flags(fewer, more, flag="--train_batch_size")
    otherwise = "a smaller --test_batch_size if it was evaluating" + auto_batch_advice(args.auto_batch, ranks.device)
    return f"--train_batch_size {size}; try {smaller} (the same result), {otherwise}"


def main(args: argparse.Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    launch_workers(args.world_size or 1)
    with setup_distributed(timeout=args.dist_timeout) as ranks:
        size = args.train_batch_size
        accumulation = args.gradient_accumulation_steps
        with explain_out_of_memory(partial(out_of_memory_advice, size, accumulation, args, ranks)):
            return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
