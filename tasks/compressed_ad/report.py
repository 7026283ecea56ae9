"""Report on the CompressedAD test: returns with confidence intervals, baseline agents, a table and a figure."""

import json
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pandas as pd

from tasks.compressed_ad.data import DISCOUNT, Env, Histories, Search, SegmentDataset, learning_curve, play
from utils.checkpoint import write_atomically
from utils.cli import InputError, RunError, first_line
from utils.stats import interval_of_mean, shown

# episode numbers shown in the table
COLUMNS = (1, 5, 10, 20, 50, 100, 500)
BASELINE_AGENTS = 5


def last_tenth(values: np.ndarray) -> np.ndarray:
    return values[..., -max(1, values.shape[-1] // 10) :].mean(-1)


def interval_by_task(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of `values` (tasks, agents), with tasks as clusters."""
    return interval_of_mean(values.ravel(), np.repeat(np.arange(len(values)), values.shape[1]), bounded=False)


def return_metrics(returns: np.ndarray, env: Env, tasks: list[int]) -> dict[str, float]:
    """Return {metric: value}: mean returns in the first episode and in the last tenth of the episodes.

    returns: (tasks, agents, episodes). tasks: the task number of each row of `returns`. normalized_last is 0 for random
    and 1 for optimal actions.
    """
    last = last_tenth(returns)
    low, high = interval_by_task(last)
    random, optimum = (float(env.value(choose)[tasks].mean()) for choose in (np.mean, np.max))
    mean = float(last.mean())
    return {
        "return_first": float(returns[..., 0].mean()), "return_last": mean, "return_last_low": low,
        "return_last_high": high, "return_random": random, "return_optimal": optimum,
        "normalized_last": (mean - random) / (optimum - random),
    }  # fmt: skip


# --- baselines --------------------------------------------------------------------------------------------------------


class TabularQ:
    """Agents that learn their task by Q-learning; high initial Q-values make them try every action.

    In Key-to-Door, these agents observe whether they have the key; the network that is being tested does not.
    """

    optimism = 0.2

    def __init__(self, env: Env, task: np.ndarray, rng: np.random.Generator):
        self.env, self.rng, self.agent = env, rng, np.arange(len(task))
        # initial Q-value: `optimism` times the discounted return of the highest reward at every step
        self.initial_value = max(1e-3, float(env.reward.max())) * self.optimism / (1 - DISCOUNT)
        self.q = np.full((len(task), *env.next.shape[1:3]), self.initial_value)

    def choose(self, _, state: np.ndarray) -> np.ndarray:
        q = self.q[self.agent, state]
        return ((q >= q.max(1, keepdims=True) - 1e-9) * (1 + self.rng.random(q.shape))).argmax(1)

    def learn(self, _, state: np.ndarray, action: np.ndarray, next_state: np.ndarray, reward: np.ndarray) -> None:
        rate = 1.0 if self.env.cumulative is None else 0.2
        target = reward + DISCOUNT * self.q[self.agent, next_state].max(1)
        self.q[self.agent, state, action] += rate * (target - self.q[self.agent, state, action])


class RMax(TabularQ):
    """R-max agents (Brafman & Tennenholtz 2002) for deterministic environments.

    Untried actions have the highest possible Q-value. Value iteration updates the Q-values after each new transition.
    """

    optimism = 1.0

    def __init__(self, env: Env, task: np.ndarray, rng: np.random.Generator):
        super().__init__(env, task, rng)
        self.known, self.next_state, self.reward = (np.zeros(self.q.shape, kind) for kind in (bool, int, float))

    def learn(self, _, state: np.ndarray, action: np.ndarray, next_state: np.ndarray, reward: np.ndarray) -> None:
        tried = self.agent, state, action
        new = np.flatnonzero(~self.known[tried])
        self.known[tried], self.next_state[tried], self.reward[tried] = True, next_state, reward
        value, change = self.q[new].max(-1), np.inf
        while len(new) and change > 1e-3:
            next_value = np.take_along_axis(value, self.next_state[new].reshape(len(new), -1), 1)
            planned = self.reward[new] + DISCOUNT * next_value.reshape(-1, *self.q.shape[1:])
            self.q[new] = np.where(self.known[new], planned, self.initial_value)
            value, before = self.q[new].max(-1), value
            change = np.abs(value - before).max()


class Posterior:
    """Agents that know all tasks of the environment, but not which one they are in.

    They act optimally for the most likely task, given the transitions that they have observed.
    """

    def __init__(self, env: Env, task: np.ndarray, rng: np.random.Generator):
        certain = env.cumulative is None
        probability = np.ones(env.next.shape) if certain else np.diff(env.cumulative, axis=-1, prepend=0)
        self.tables, self.best = (env.next, env.reward, probability), env.best_actions().argmax(-1)
        # log-likelihood of each task for each agent, (agents, tasks), with noise to break ties
        self.score = 1e-3 * rng.random((len(task), env.tasks))

    def choose(self, _, state: np.ndarray) -> np.ndarray:
        return self.best[self.score.argmax(1), state]

    def learn(self, _, state: np.ndarray, action: np.ndarray, next_state: np.ndarray, reward: np.ndarray) -> None:
        next_states, rewards, probability = (table[:, state, action] for table in self.tables)
        observed = (next_states == next_state[:, None]) & (rewards == reward[:, None])
        self.score += np.log((probability * observed).sum(-1).T + 1e-9)


def run_baselines(histories: Histories, tasks: list[int], episodes: int, seed: int) -> dict[str, np.ndarray]:
    env, task = histories.env, np.repeat(tasks, BASELINE_AGENTS)
    kinds = {"tabular Q from scratch": TabularQ}
    if env.cumulative is None:
        kinds["R-max from scratch"] = RMax
    kinds |= {"search that knows the map": Search} if env.is_grid else {"posterior over all tasks": Posterior}
    rows = {"source of the histories": np.mean([histories.curves[task] for task in tasks], 0)[:episodes]}
    for name, kind in kinds.items():
        rng = np.random.default_rng([seed % 2**63, 7])
        agents = kind(env, task, rng)
        rewards = play(env, task, episodes * env.horizon, rng, agents.choose, agents.learn)[-1]
        rows[name] = learning_curve(rewards, env)
    return rows


def name_tasks(env: Env, tasks: list[int]) -> str:
    return f"{env.name}: {' '.join(map(str, tasks))}"


def read_baseline_run(folder: str, env: Env, tasks: list[int]) -> dict[str, np.ndarray]:
    """Read the test results of the run in --rival_run; return {agent's name in the table: mean return of each episode}.

    Raises InputError if the run is not finished or was tested on other tasks.
    """
    path = Path(folder)
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        agent, tested = summary["agent"], summary["tasks"]
        curve = pd.read_csv(path / "test_returns.csv")[agent].to_numpy()
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"not the folder of a finished run ({type(error).__name__}: {first_line(error)})"
        raise InputError(f"--rival_run {folder}: {reason}") from None
    if tested != name_tasks(env, tasks):
        raise InputError(f"--rival_run {folder}: tested on {tested}; give one of {name_tasks(env, tasks)}")
    return {f"rival run: {agent}": curve}


# --- table and figure -------------------------------------------------------------------------------------------------


def report_test(
    metrics: dict,
    returns: np.ndarray,
    path: np.ndarray,
    unseen: SegmentDataset,
    csv: Path,
    baseline_run: dict,
    args: Namespace,
) -> tuple:
    """Rank 0: run the baseline agents, print the table and write the return curves to `csv`.

    returns: (tasks, agents, episodes). path: (episodes, horizon + 1), states of the first agent on the first task.
    Returns ({key: value} for summary.json, figure). Raises RunError if `csv` cannot be written.
    """
    histories, tasks = unseen.histories, unseen.tasks.tolist()
    env, own = histories.env, f"{args.model}/{args.objective}"
    episodes = returns.shape[-1]
    random, optimum = metrics["test/return_random"], metrics["test/return_optimal"]
    curves = {own: returns.mean((0, 1))} | run_baselines(histories, tasks, episodes, args.seed)
    curves |= {name: curve[:episodes] for name, curve in baseline_run.items()}
    curves["random actions"], curves["optimum"] = np.full(episodes, random), np.full(episodes, optimum)

    rows, results = {}, {"agent": own, "tasks": name_tasks(env, tasks)}
    for name, curve in curves.items():
        row = {f"return_episode_{episode}": curve[episode - 1] for episode in COLUMNS if episode <= len(curve)}
        row["return_last"] = last_tenth(curve)
        row["normalized_last"] = (row["return_last"] - random) / (optimum - random)
        key = "test" if name == own else "test/rival/" + re.sub(r"\W+", "_", name)
        results |= {f"{key}/{metric}": float(value) for metric, value in row.items()}
        rows[name] = row
    header = [*(str(episode) for episode in COLUMNS if episode <= episodes), "last", "normalized"]
    print(f"test, {len(tasks)} unseen tasks: return in episode")
    print(pd.DataFrame(rows).T.to_string(header=header, na_rep="", float_format="{:.2f}".format))
    last = shown(*(metrics[f"test/return_last{end}"] for end in ("", "_low", "_high")), digits=2)
    print(f"{own}: {last} in the last tenth of {episodes} episodes")

    bands = np.array([interval_by_task(part) for part in returns.transpose(2, 0, 1)])
    frame = pd.DataFrame({name: pd.Series(curve) for name, curve in curves.items()})
    try:
        write_atomically(csv, frame.set_axis(frame.index + 1).rename_axis("episode").to_csv)
    except OSError as error:
        raise RunError(f"{csv}: not written ({error.strerror}); make room and resume") from None
    return results, draw_test(curves, bands, path, env, tasks)


def draw_test(curves: dict[str, np.ndarray], bands: np.ndarray, path: np.ndarray, env: Env, tasks: list[int]):
    """Plot the return of each episode for each agent in `curves`; return the figure.

    bands: (episodes, 2), confidence interval of the first curve. path: (episodes, horizon + 1), states of one agent on
    the first task, plotted on a map of the room (Darkroom and Key-to-Door only).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(2, 1))
    axes = above.subplots()
    for number, (name, curve) in enumerate(curves.items()):
        style = {"random actions": "k:", "optimum": "k--"}.get(name, "-")
        axes.plot(np.arange(1, len(curve) + 1), curve, style, linewidth=1 if number else 2.5, label=name)
    axes.fill_between(np.arange(1, len(bands) + 1), *bands.T, alpha=0.2)
    axes.set(
        xlabel="episode in the context", ylabel="return", xscale="log", title=f"{len(tasks)} unseen tasks of {env.name}"
    )
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")

    drawn = [*(episode for episode in (1, 2, 3, 5) if episode < len(path)), len(path)] if env.is_grid else []
    rewarded = env.coordinates[np.unique(env.next[tasks[0]][env.reward[tasks[0]] > 0] % env.cells)]
    limits = (-0.5, env.coordinates.max() + 0.5)
    for number, episode in enumerate(drawn, start=1):
        axes = below.add_subplot(1, len(drawn), number)
        rows, columns = env.coordinates[path[episode - 1] % env.cells].T
        axes.plot(columns, rows, "o-", markevery=[0])
        axes.plot(rewarded[:, 1], rewarded[:, 0], "r*", markersize=10)
        axes.set(title=f"episode {episode}", xlim=limits, ylim=limits[::-1], xticks=[], yticks=[], aspect="equal")
    return figure
