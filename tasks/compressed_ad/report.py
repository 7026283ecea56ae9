"""CompressedAD's results: returns in a few numbers with their interval, tables, figures, and what a run says."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from old.cli_utils import InputError
from old.distributed_utils import Ranks, agree_on_errors, gather_objects, print_main, world
from old.logging_utils import print_table, save_figure, write_result
from old.memory_utils import BatchSize
from tasks.compressed_ad.acting import ActedEpisodes
from tasks.compressed_ad.darkroom import ACTIONS, GRID, HORIZON, START, optimal_return, random_return, split_goals
from tasks.compressed_ad.data import DarkroomData, SegmentDataset
from tasks.compressed_ad.model import InContextNet

# Episodes of the table; the last one is shown besides.
SHOWN_EPISODES = (1, 2, 5, 10, 20, 50, 100, 200, 500)

# What eval_test.json of another run must have, to stand beside this one.
BASELINE_KEYS = {"test/return_first", "test/return_last", "goals"}


# --- numbers ----------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def interval(values: np.ndarray, draws: int = 1000) -> Interval:
    """Mean and interval of values (goals, agents), by drawing goals, then agents, with replacement."""
    rng = np.random.default_rng(0)
    goals, agents = values.shape
    drawn_goals = rng.integers(0, goals, (draws, goals))
    drawn_agents = rng.integers(0, agents, (draws, goals, agents))
    drawn = values[drawn_goals[:, :, None], drawn_agents]
    means = drawn.mean((1, 2))
    low, high = np.percentile(means, (2.5, 97.5)).tolist()
    return Interval(float(values.mean()), low, high)


def last_tenth(values: np.ndarray) -> np.ndarray:
    """The values (..., episodes) of the episodes that count as the last ones: a tenth, at least one."""
    episodes = values.shape[-1]
    count = max(1, episodes // 10)
    return values[..., -count:]


def return_metrics(split: str, returns: np.ndarray, goals: list[int]) -> dict[str, float]:
    """The returns (goals, agents, episodes) in a few numbers; the last tenth of the episodes counts as the end."""
    first = returns[:, :, 0]
    last = interval(last_tenth(returns).mean(2))
    return {
        f"{split}/return_first": float(first.mean()),
        f"{split}/return_last": last.mean,
        f"{split}/return_last_low": last.low,
        f"{split}/return_last_high": last.high,
        f"{split}/return_random": float(random_return(goals).mean()),
        f"{split}/return_optimal": float(optimal_return(goals).mean()),
    }


def accuracy_metrics(split: str, table: Tensor) -> tuple[dict[str, float], np.ndarray]:
    """Loss and accuracy of the next action, and the accuracy (depth + 1, n_transit) by place, nan where there is none.

    table: (depth + 1, 3, n_transit), the sums of losses, of right actions and of actions.
    """
    loss, right, number = table.sum((0, 2)).tolist()
    metrics = {f"{split}/loss": loss / number, f"{split}/accuracy": right / number}
    _, right_by_place, number_by_place = table.unbind(1)
    by_place = right_by_place / number_by_place.clamp(min=1)
    by_place[number_by_place == 0] = math.nan
    return metrics, by_place.numpy()


@dataclass
class FinalTest:
    """The full evaluation on the unseen goals.

    model: as --model calls it. step: of the checkpoint. metrics: of the next action; those of the returns join them.
    acted: what the agents did. accuracy: (depth + 1, n_transit) of the next action, by place in the context.
    baseline: eval_test.json of a run without compression.
    """

    model: str
    step: int
    data: DarkroomData
    metrics: dict[str, float]
    acted: ActedEpisodes
    accuracy: np.ndarray
    baseline: dict | None

    def __post_init__(self):
        """Also: goals, and source, the returns (episodes,) of the learner whose histories these are."""
        self.goals = self.data.unseen_goals
        curves = self.data.histories.learning_curve(self.goals)
        self.source = curves.mean(1)

        # the returns, beside those of the source and of the run without compression
        metrics = self.metrics
        metrics |= return_metrics("test", self.acted.returns, self.goals)
        metrics["test/return_source_first"] = float(self.source[0])
        metrics["test/return_source_last"] = float(last_tenth(self.source).mean())
        if self.baseline:
            metrics["test/return_ad_first"] = self.baseline["test/return_first"]
            metrics["test/return_ad_last"] = self.baseline["test/return_last"]

    @cached_property
    def curve(self) -> dict[str, list[float]]:
        """Mean return of each episode over goals and agents, with its interval."""
        episodes = self.acted.returns.transpose(2, 0, 1)
        intervals = [interval(returns) for returns in episodes]
        return {
            "mean": [one.mean for one in intervals],
            "low": [one.low for one in intervals],
            "high": [one.high for one in intervals],
        }

    @property
    def last_by_goal(self) -> list[float]:
        """Mean return of each goal over its agents and the last tenth of their episodes."""
        last = last_tenth(self.acted.returns)
        return last.mean((1, 2)).tolist()


# --- files ------------------------------------------------------------------------------------------------------------


def report_test(test: FinalTest, run_folder: Path, name: str = "test") -> None:
    """Rank 0: a test as eval_<name>.json, and its tables. name: `test` for best.pt, else the checkpoint's."""
    _, agents, episodes = test.acted.returns.shape
    facts = {
        "model": test.model,
        "step": test.step,
        "goals": places_of(test.goals),
        "return_last_by_goal": test.last_by_goal,
        "return_by_episode": test.curve,
        "eval_episodes": episodes,
        "eval_seeds": agents,
        "data": str(test.data.histories.path),
    }
    text = json.dumps(test.metrics | facts, indent=2) + "\n"
    write_result(run_folder / f"eval_{name}.json", text.encode())
    print_test("test, best.pt" if name == "test" else name, test)


def save_figures(test: FinalTest, run_folder: Path, name: str) -> None:
    """Rank 0: the figures of a test that no log draws, and where all of it lies. name: as for report_test."""
    prefix = "" if name == "test" else f"{name}_"
    folder = run_folder / "figures"
    written = []
    for kind, figure in draw_test(test).items():
        path = folder / f"{prefix}{kind}.png"
        written.append(save_figure(path, figure))
    if all(written):
        print(f"written: {run_folder}/eval_{name}.json, {folder}", flush=True)


def places_of(goals: list[int]) -> list[list[int]]:
    """[i, j] of each goal."""
    return [list(divmod(goal, GRID)) for goal in goals]


def read_baseline(run_folder: str | None, split_seed: int, episodes: int) -> dict | None:
    """All ranks: eval_test.json of the --model ad run that is to stand beside this one; None without one.

    split_seed, episodes: of this run's test. Raises InputError for a run that was tested otherwise.
    """
    if run_folder is None:
        return None
    with agree_on_errors():
        return load_baseline(Path(run_folder), split_seed, episodes)


def load_baseline(run_folder: Path, split_seed: int, episodes: int) -> dict:
    """See read_baseline."""
    path = run_folder / "eval_test.json"
    advice = "--ad_run wants the folder of a finished run"
    try:
        baseline = json.loads(path.read_text())
        model = baseline["model"]
        tested = len(baseline["return_by_episode"]["mean"])
        complete = baseline.keys() >= BASELINE_KEYS
    except OSError as error:
        raise InputError(f"{path}: not read ({error.strerror}); {advice}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise InputError(f"{path}: not an evaluation of train.py; {advice}")

    # of the same test only
    if model != "ad":
        raise InputError(f"{path}: of --model {model}; give --ad_run a run of --model ad")
    _, goals = split_goals(split_seed)
    if baseline["goals"] != places_of(goals):
        raise InputError(f"{path}: of other goals; give a run with the same --split_seed")
    if tested != episodes:
        reason = f"of {tested} episodes, this run has --eval_episodes {episodes}"
        advice = f"evaluate it anew: --eval_only --resume_from {run_folder} --eval_episodes {episodes}"
        raise InputError(f"{path}: {reason}; {advice}")
    return baseline


# --- what is printed --------------------------------------------------------------------------------------------------


def print_processes(kind: str, precision: str, ranks: Ranks) -> None:
    """All ranks: the start-up lines as the guide shows them. kind: of distributed training, as Accelerate calls it."""
    devices = gather_objects(str(ranks.device))
    print_main(f"Distributed training: {kind}")
    print_main(f"Number of processes: {ranks.world_size}")
    print_main(f"Mixed precision: {precision}")
    for rank, device in enumerate(devices):
        print_main(f"Process {rank} using device: {device}")


def describe_run(
    data: DarkroomData, model: InContextNet, batch: BatchSize, loader, lr: str, reason: str
) -> dict[str, str]:
    """The banner's rows of this task. lr: in words. reason: for the precision."""
    _, world_size = world()
    sampler = loader.batch_sampler
    split = f"{batch.size} per GPU x {batch.accumulation} accumulation x {world_size}"
    split += f" = {sampler.effective_batch_size} ({batch.source})"

    # the model
    name = "compressed_ad" if model.n_latent else "ad"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    context = f"context {model.n_transit}, {model.n_latent} latents"

    # what it learns from
    histories = data.histories
    goals = f"{len(data.train_goals)} goals; {len(data.unseen_goals)} goals unseen (split seed {data.split_seed})"
    counts = data.segments.depths()
    depths = [f"{count} of depth {depth}" for depth, count in enumerate(counts)]
    steps = sampler.steps_per_epoch()
    cached = "all histories" if histories.in_memory else "none, mapped"
    return {
        "batch": batch.describe() if batch.total else split,
        "learning rate": lr,
        "precision": reason,
        "model": f"{name}, {parameters} parameters, {context}",
        "histories": f"{histories.streams} of {histories.steps} steps for each of {goals}",
        "segments": f"{len(data.segments)} an epoch: {', '.join(depths)}; {steps} steps",
        "in memory": f"{cached}; {loader.num_workers} workers",
    }


def warn_of_histories(data: DarkroomData, path: str) -> None:
    """Rank 0 says what of the histories is not used, or not as it is in the file. path: as --data names them."""
    histories = data.histories
    steps = histories.steps
    if histories.longest > steps:
        used = f"{steps} steps of each history are used, as goal {histories.shortest} has no more"
        print_main(f"warning: {path}: {used}; others have up to {histories.longest}")
    if histories.repaired:
        reason = "steps end an episode with the next one's start as next state; taken is where the action led"
        print_main(f"histories: {histories.repaired} {reason}")
    segments = data.segments
    if segments.wanted_depth > segments.max_depth:
        room = f"histories of {steps} steps have room for {segments.max_depth} blocks of {segments.n_transit}"
        print_main(f"warning: --max_compression_depth {segments.wanted_depth}: {room}; trained to that depth")


def describe_evaluation(metrics: dict[str, float]) -> str:
    """One line of an evaluation in training."""
    parts = []
    for split, name in (("val", "return on 8 training goals"), ("unseen", "on 8 unseen goals")):
        first = metrics[f"{split}/return_first"]
        last = metrics[f"{split}/return_last"]
        parts.append(f"{name} {first:.2f} -> {last:.2f}")
    accuracy = metrics["unseen/accuracy"]
    loss = metrics["unseen/loss"]
    return f"{', '.join(parts)} (action accuracy {accuracy:.3f}, loss {loss:.3f})"


def print_test(title: str, test: FinalTest) -> None:
    """Rank 0: the tables of a test, by episode, at the end and by goal."""
    metrics = test.metrics
    count = len(test.curve["mean"])
    shown = [episode for episode in SHOWN_EPISODES if episode < count]
    rows = {}
    for episode in (*shown, count):
        rows[str(episode)] = episode_row(test, episode)
    print_table(f"{title}: episode", rows)

    # the end, beside what else there is
    row = {
        "return": metrics["test/return_last"],
        "low": metrics["test/return_last_low"],
        "high": metrics["test/return_last_high"],
    }
    if test.baseline:
        row["AD"] = metrics["test/return_ad_last"]
    row["source"] = metrics["test/return_source_last"]
    print_table("unseen goals", {"last tenth": row})

    rows = {}
    for goal, value in zip(test.goals, test.last_by_goal, strict=True):
        optimum = float(optimal_return([goal])[0])
        rows[str(divmod(goal, GRID))] = {"return": value, "optimum": optimum}
    print_table("goal", rows)
    accuracy = f"action accuracy on their histories {metrics['test/accuracy']:.4f}"
    print(f"{accuracy}, cross-entropy {metrics['test/loss']:.4f}", flush=True)


def episode_row(test: FinalTest, episode: int) -> dict[str, float]:
    """What the table shows of an episode, counted from 1."""
    place = episode - 1
    row = {
        "return": test.curve["mean"][place],
        "low": test.curve["low"][place],
        "high": test.curve["high"][place],
    }
    if test.baseline:
        row["AD"] = test.baseline["return_by_episode"]["mean"][place]
    if episode <= len(test.source):
        row["source"] = float(test.source[place])
    row["random"] = test.metrics["test/return_random"]
    row["optimum"] = test.metrics["test/return_optimal"]
    return row


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_test(test: FinalTest) -> dict:
    """The figures of a test by their names."""
    return {
        "returns": draw_returns(test),
        "trajectories": draw_paths(test),
        "accuracy": draw_accuracy(test.accuracy),
    }


def draw_returns(test: FinalTest):
    """Return against episode, with the interval, beside everything it must be measured by."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    draw_curve(axes, test.curve, test.model, "tab:blue")
    if test.baseline:
        draw_curve(axes, test.baseline["return_by_episode"], "ad", "tab:orange")
    episodes = np.arange(1, len(test.source) + 1)
    axes.plot(episodes, test.source, color="tab:green", label="source of the histories")
    for kind, style in (("optimal", "--"), ("random", ":")):
        value = test.metrics[f"test/return_{kind}"]
        axes.axhline(value, color="k", linestyle=style, label=kind, linewidth=1)

    axes.set_xlabel("episode in the context")
    axes.set_ylabel(f"return, of {HORIZON} steps")
    axes.set_title("unseen goals: mean and 95 % interval")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def draw_curve(axes, curve: dict[str, list[float]], label: str, colour: str) -> None:
    """The mean return of each episode, and its interval as a band."""
    mean = curve["mean"]
    episodes = np.arange(1, len(mean) + 1)
    axes.plot(episodes, mean, color=colour, label=label)
    low = curve["low"]
    high = curve["high"]
    axes.fill_between(episodes, low, high, color=colour, alpha=0.2, linewidth=0)


def draw_paths(test: FinalTest):
    """What the first agent of each goal did in its first episode (above) and in its last."""
    from matplotlib.figure import Figure

    count = len(test.goals)
    figure = Figure(figsize=(1.7 * count, 4), layout="constrained")
    upper, lower = figure.subplots(2, count)
    for k, goal in enumerate(test.goals):
        first_path, last_path = test.acted.paths[k]
        returns = test.acted.returns[k, 0]
        draw_path(upper[k], first_path, goal)
        draw_path(lower[k], last_path, goal)
        upper[k].set_title(f"first episode, return {returns[0]:.0f}", fontsize="small")
        lower[k].set_title(f"last episode, return {returns[-1]:.0f}", fontsize="small")
    title = "unseen goals (star) from the start (square): an agent's first episode and its last"
    figure.suptitle(f"{title}; i is down, j to the right", fontsize="medium")
    return figure


def draw_path(axes, path: np.ndarray, goal: int) -> None:
    """The cells of an episode on the grid, a little apart where they repeat."""
    i, j = np.divmod(path, GRID)
    jitter = np.linspace(-0.2, 0.2, len(path))
    axes.plot(j + jitter, i + jitter, ".-", linewidth=0.8, markersize=3)
    goal_i, goal_j = divmod(goal, GRID)
    axes.plot(goal_j, goal_i, "*", color="tab:red", markersize=10)
    start_i, start_j = divmod(START, GRID)
    axes.plot(start_j, start_i, "s", color="k", markersize=3)

    # the whole grid, its rows from above
    axes.set_xlim(-0.6, GRID - 0.4)
    axes.set_ylim(GRID - 0.4, -0.6)
    axes.set(xticks=[], yticks=[], aspect="equal")


def draw_accuracy(accuracy: np.ndarray):
    """Action accuracy by place in the context, one line per number of compressions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for depth, values in enumerate(accuracy):
        compressions = "1 compression" if depth == 1 else f"{depth} compressions"
        axes.plot(values, linewidth=1, label=f"after {compressions}")
    axes.axhline(1 / ACTIONS, color="k", linestyle=":", linewidth=1, label="chance")
    axes.set_xlabel("transitions in the context")
    axes.set_ylabel("accuracy")
    axes.set_title("next action on unseen goals' histories")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def draw_inputs(segments: SegmentDataset):
    """What the model is given: four samples of the first epoch, blocks and context, by the cell that was reached."""
    from matplotlib.figure import Figure

    samples = [k * len(segments) // 4 for k in range(4)]
    batch = segments.__getitems__(samples)
    figure = Figure(figsize=(11, 7), layout="constrained")
    title = "what the model is given: cells (i, j) and rewards of a history; lines part the blocks"
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(4, 1)
    for place, axes in enumerate(panels):
        draw_segment(axes, batch, place)

    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize="small", loc="outside lower right", ncols=3)
    figure.supxlabel("transition", fontsize="small")
    return figure


def draw_segment(axes, batch: dict, place: int) -> None:
    """One sample of a batch: the cells that were reached, the rewards, and where blocks end."""
    n_transit = batch["cells"].shape[2]
    depth = int(batch["depth"][place])
    length = int(batch["length"][place])
    sample = int(batch["sample"][place])

    # its blocks and, last in the batch, its context, without padding
    parts = [*range(depth), -1]
    count = depth * n_transit + length
    cells = batch["cells"][place, parts].flatten(0, 1)
    rewards = batch["rewards"][place, parts].flatten()
    reached = cells[:count, 2].numpy()
    axes.plot(reached // GRID, linewidth=0.7, label="i of the cell reached")
    axes.plot(reached % GRID, linewidth=0.7, label="j of the cell reached")
    rewarded = np.flatnonzero(rewards[:count])
    height = np.full(len(rewarded), -0.7)
    axes.plot(rewarded, height, "|", color="tab:red", label="reward")
    for block in range(1, depth + 1):
        axes.axvline(block * n_transit, color="k", linewidth=0.8)

    blocks = "1 block" if depth == 1 else f"{depth} blocks"
    title = f"sample {sample}: {blocks} to compress, then a context of {length} transitions"
    axes.set(ylim=(-1.5, GRID), ylabel="i, j", xmargin=0.01)
    axes.set_title(title, fontsize="small")
