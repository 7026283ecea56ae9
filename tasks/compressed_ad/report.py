"""Guide 4's results: returns in a few numbers with their interval, the tables at the end, the figures."""

import numpy as np

from logging_utils import print_table
from tasks.compressed_ad import data as dr


def interval(values: np.ndarray, draws: int = 1000) -> tuple[float, float, float]:
    """(mean, low, high) of values (goals, seeds): the 95 % interval by drawing goals, then agents, with replacement."""
    rng, (goals, seeds) = np.random.default_rng(0), values.shape
    rows = rng.integers(0, goals, (draws, goals))
    means = values[rows[:, :, None], rng.integers(0, seeds, (draws, goals, seeds))].mean((1, 2))
    return float(values.mean()), *(float(v) for v in np.percentile(means, (2.5, 97.5)))


def last_episodes(episodes: int) -> int:
    """How many episodes count as the last: a tenth."""
    return max(1, episodes // 10)


def return_metrics(split: str, returns: np.ndarray, goals: list[int]) -> dict[str, float]:
    """The returns (goals, seeds, episodes) in a few numbers; the last tenth of the episodes counts as the end."""
    mean, low, high = interval(returns[:, :, -last_episodes(returns.shape[2]) :].mean(2))
    return {
        f"{split}/return_first": float(returns[:, :, 0].mean()),
        f"{split}/return_last": mean,
        f"{split}/return_last_low": low,
        f"{split}/return_last_high": high,
        f"{split}/return_random": float(dr.random_return(goals).mean()),
        f"{split}/return_optimal": float(dr.optimal_return(goals).mean()),
    }


def print_returns(name: str, metrics: dict, curve: dict, source, baseline, by_goal: list, unseen: list[int]) -> None:
    episodes = len(curve["mean"])
    shown = sorted({k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500) if k < episodes} | {episodes})
    rows = {}
    for k in shown:
        row = {"return": curve["mean"][k - 1], "low": curve["low"][k - 1], "high": curve["high"][k - 1]}
        other = baseline["return_by_episode"]["mean"] if baseline else []
        row |= {"AD": other[k - 1]} if k <= len(other) else {}
        row |= {"source": float(source[k - 1])} if k <= len(source) else {}
        rows[str(k)] = row | {"random": metrics["test/return_random"], "optimum": metrics["test/return_optimal"]}
    print_table(f"{name}: episode", rows)
    summary = {"last tenth": {"return": metrics["test/return_last"], "low": metrics["test/return_last_low"],
                              "high": metrics["test/return_last_high"]}}  # fmt: skip
    summary["last tenth"] |= {"AD": metrics["test/return_ad_last"]} if baseline else {}
    summary["last tenth"]["source"] = metrics["test/return_source_last"]
    print_table("unseen goals", summary)
    goals = {f"{divmod(goal, dr.GRID)}": {"return": value, "optimum": float(dr.optimal_return([goal])[0])}
             for goal, value in zip(unseen, by_goal, strict=True)}  # fmt: skip
    print_table("goal", goals)
    print(
        f"action accuracy on their histories {metrics['test/accuracy']:.4f}, cross-entropy {metrics['test/loss']:.4f}",
        flush=True,
    )


def draw_returns(curve: dict, metrics: dict, source, baseline: dict | None, model: str):
    """Return against episode, with the interval, beside everything it must be measured by."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    shown = [(model, "tab:blue", curve)]
    shown += [("ad", "tab:orange", baseline["return_by_episode"])] if baseline else []
    for label, colour, values in shown:
        episodes = np.arange(1, len(values["mean"]) + 1)
        axes.plot(episodes, values["mean"], color=colour, label=label)
        axes.fill_between(episodes, values["low"], values["high"], color=colour, alpha=0.2, linewidth=0)
    axes.plot(np.arange(1, len(source) + 1), source, color="tab:green", label="source of the histories")
    for kind, style in (("optimal", "k--"), ("random", "k:")):
        axes.axhline(metrics[f"test/return_{kind}"], color=style[0], linestyle=style[1:], label=kind, linewidth=1)
    axes.set(
        xlabel="episode in the context",
        ylabel=f"return, of {dr.HORIZON} steps",
        title="unseen goals: mean and 95 % interval",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def draw_paths(paths: np.ndarray, returns: np.ndarray, goals: list[int]):
    """What the first agent of each goal did in its first episode (above) and in its last."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.7 * len(goals), 4), layout="constrained")
    for k, (goal, axes) in enumerate(zip(goals, figure.subplots(2, len(goals)).T, strict=True)):
        for row, (episode, place) in enumerate(((0, "first"), (-1, "last"))):
            i, j = np.divmod(paths[k, row], dr.GRID)
            jitter = np.linspace(-0.2, 0.2, len(i))
            axes[row].plot(j + jitter, i + jitter, ".-", linewidth=0.8, markersize=3)
            axes[row].plot(*divmod(goal, dr.GRID)[::-1], "*", color="tab:red", markersize=10)
            axes[row].plot(*divmod(dr.START, dr.GRID)[::-1], "s", color="k", markersize=3)
            axes[row].set(xlim=(-0.6, dr.GRID - 0.4), ylim=(dr.GRID - 0.4, -0.6), xticks=[], yticks=[], aspect="equal")
            axes[row].set_title(f"{place} episode, return {returns[k, 0, episode]:.0f}", fontsize="small")
    text = (
        "unseen goals (star) from the start (square): an agent's first episode and its last; i is down, j to the right"
    )
    figure.suptitle(text, fontsize="medium")
    return figure


def draw_accuracy(by_place: np.ndarray):
    """Action accuracy by place in the context, one line per number of compressions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for depth, values in enumerate(by_place):
        text = "1 compression" if depth == 1 else f"{depth} compressions"
        axes.plot(values, linewidth=1, label=f"after {text}")
    axes.axhline(1 / dr.ACTIONS, color="k", linestyle=":", linewidth=1, label="chance")
    axes.set(xlabel="transitions in the context", ylabel="accuracy", title="next action on unseen goals' histories")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def draw_inputs(segments: dr.SegmentDataset):
    """What the net is given: the first samples of the first epoch, blocks and context, by the cell that was reached."""
    from matplotlib.figure import Figure

    batch = segments.__getitems__([k * len(segments) // 4 for k in range(4)])
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle("what the net is given: cells (i, j) and rewards of a history; lines part the blocks", fontsize=11)
    for k, axes in enumerate(figure.subplots(4, 1)):
        depth, length = int(batch["depth"][k]), int(batch["length"][k])
        blocks = [*range(depth), -1]
        cells = np.concatenate([batch["cells"][k, b] for b in blocks])[: depth * segments.n_transit + length]
        rewards = np.concatenate([batch["rewards"][k, b] for b in blocks])[: len(cells)]
        axes.plot(cells[:, 2] // dr.GRID, linewidth=0.7, label="i of the cell reached")
        axes.plot(cells[:, 2] % dr.GRID, linewidth=0.7, label="j of the cell reached")
        at = np.flatnonzero(rewards)
        axes.plot(at, np.full(len(at), -0.7), "|", color="tab:red", label="reward")
        for block in range(1, depth + 1):
            axes.axvline(block * segments.n_transit, color="k", linewidth=0.8)
        before = "1 block" if depth == 1 else f"{depth} blocks"
        text = f"sample {int(batch['sample'][k])}: {before} to compress, then a context of {length} transitions"
        axes.set(ylim=(-1.5, dr.GRID), title=text, ylabel="i, j", xmargin=0.01)
        axes.title.set_fontsize("small")
    figure.legend(*axes.get_legend_handles_labels(), fontsize="small", loc="outside lower right", ncols=3)
    figure.supxlabel("transition", fontsize="small")
    return figure
