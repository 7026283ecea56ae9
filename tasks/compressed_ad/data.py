"""Environments as transition tables, learning histories (HDF5, in the published layout) and training segments.

    history.hdf5 /0 ... /80   states, next_states (T, streams, D) int   actions (T, streams) int
                              rewards (T, streams) number               dones (T, streams) bool: ends of episodes

Group k holds the learning histories of task k from their first step on. The file's attribute `env` names the
environment in the syntax of --env. The published files lack it; then --env decides, with Darkroom as the default.
"""

import functools
import hashlib
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.cli import InputError, first_line

FIELDS = ("states", "next_states", "actions", "rewards", "dones")
DISCOUNT = 0.95
# histories per task for loss and accuracy
EVAL_STREAMS = 20

# --- environments -----------------------------------------------------------------------------------------------------


class Env(NamedTuple):
    """Transition tables of a family of tasks; an agent in state s observes only the cell s % cells.

    places (cells, D): coordinates of each cell in history files. next, reward (tasks, states, actions, outcomes).
    chance: cumulative probabilities of the outcomes, or None if there is a single outcome. An episode has `horizon`
    steps from state `start`; an agent that reaches a terminal state earlier stays there without reward.
    """

    name: str
    places: np.ndarray
    start: int
    horizon: int
    next: np.ndarray
    reward: np.ndarray
    chance: np.ndarray | None = None

    @property
    def cells(self) -> int:
        return len(self.places)

    @property
    def tasks(self) -> int:
        return len(self.next)

    @property
    def actions(self) -> int:
        return self.next.shape[2]

    @property
    def is_grid(self) -> bool:
        return self.places.shape[1] == 2

    def only(self, task: int) -> "Env":
        """Return the environment with this task alone, as task 0."""
        chance = None if self.chance is None else self.chance[task : task + 1]
        return self._replace(next=self.next[task : task + 1], reward=self.reward[task : task + 1], chance=chance)

    def step(self, task, state, action, rng=None) -> tuple[np.ndarray, np.ndarray]:
        """Return (next state, reward) of each agent. rng: required if outcomes are random."""
        outcome = 0
        if self.chance is not None:
            outcome = (rng.random((len(state), 1)) >= self.chance[task, state, action]).sum(1)
        return self.next[task, state, action, outcome], self.reward[task, state, action, outcome]

    def _expected(self, values: np.ndarray) -> np.ndarray:
        """Expected reward plus value of the next state (tasks, states, actions). values: (tasks, states)."""
        following = self.reward + values[np.arange(len(values))[:, None, None, None], self.next]
        if self.chance is None:
            return following[..., 0]
        return (following * np.diff(self.chance, axis=-1, prepend=0)).sum(-1)

    def value(self, choose) -> np.ndarray:
        """Exact expected return of an episode (tasks,). choose: np.max for the optimum, np.mean for random actions."""
        values = np.zeros(self.next.shape[:2])
        for _ in range(self.horizon):
            values = choose(self._expected(values), axis=-1)
        return values[:, self.start]

    def best_actions(self) -> np.ndarray:
        """Mask (tasks, states, actions) of the actions that are optimal for the discounted return."""
        values = np.zeros(self.next.shape[:2])
        for _ in range(10 * self.horizon):
            q = self._expected(DISCOUNT * values)
            values = q.max(-1)
        return q > q.max(-1, keepdims=True) - 1e-6


def grid_moves(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates (cells, 2) of a square room and next cells (cells, 5) for +i, -i, +j, -j, stay; walls block moves."""
    places = np.stack(np.divmod(np.arange(size * size), size), -1)
    after = np.clip(places[:, None] + [(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)], 0, size - 1)
    return places, after @ (size, 1)


def darkroom(size: int) -> Env:
    """Room with a hidden goal, cell k in task k, that rewards each step ending on it. The published room has size 9."""
    places, after = grid_moves(size)
    cells = size * size
    following = np.broadcast_to(after[None, ..., None], (cells, cells, 5, 1))
    reward = (following == np.arange(cells)[:, None, None, None]).astype(np.float32)
    return Env(f"darkroom:{size}", places, size // 2 * (size + 1), 2 * size + 2, following, reward)


def key_to_door(size: int, tasks: int = 200) -> Env:
    """Room with a hidden key and then a hidden door, each rewarded once with 1.

    States: cell without the key, cell + cells with the key, cell + 2 * cells after the door.
    """
    places, after = grid_moves(size)
    cells = size * size
    pairs = np.random.default_rng(0).permutation(cells * cells)[:tasks]
    key, door = (half[:, None, None] for half in np.divmod(pairs, cells))
    with_key = np.where(after == key, after + cells, after)
    with_door = np.where(after == door, after + 2 * cells, after + cells)
    done = np.broadcast_to(after + 2 * cells, with_key.shape)
    following = np.concatenate([with_key, with_door, done], 1)[..., None]
    before = np.arange(3 * cells)[:, None, None]
    reward = (following // cells > before // cells).astype(np.float32)
    return Env(f"key_to_door:{size}", places, size // 2 * (size + 1), 50, following, reward)


def gymnasium_env(name: str) -> Env:
    """Gymnasium environment with a transition table P (FrozenLake, CliffWalking, Taxi).

    Each task permutes the actions, so that an agent has something to learn. Raises InputError.
    """
    try:
        import gymnasium

        if ":" in name:
            raise ValueError("no module may be named")
        env = gymnasium.make(name)
        table = env.unwrapped.P
        start, states, actions = int(env.reset(seed=0)[0]), int(env.observation_space.n), int(env.action_space.n)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        needs = "it needs `make setup-dev`, Discrete spaces and a table P"
        raise InputError(f"--env gym:{name}: {reason}; {needs}") from None
    outcomes = max(len(found) for row in table.values() for found in row.values())
    # pad all actions to the same number of outcomes with copies of probability 0
    rows = [
        [(found + outcomes * [(0, *found[-1][1:])])[:outcomes] for found in table[state].values()]
        for state in range(states)
    ]
    chance, following, reward, is_end = np.moveaxis(np.array(rows, float), -1, 0)
    following = following.astype(int)
    over = np.unique(following[is_end > 0])
    following[over], reward[over] = over[:, None, None], 0
    # one random order of the actions per task, at most 120 tasks
    rng = np.random.default_rng(0)
    orders = np.unique(rng.permuted(np.tile(np.arange(actions), (6000, 1)), axis=1), axis=0)
    order = rng.permutation(orders)[:120]
    following, reward, chance = (part[:, order].swapaxes(0, 1) for part in (following, reward, chance.cumsum(-1)))
    horizon = min(env.spec.max_episode_steps or 50, 2 * states)
    places = np.arange(states)[:, None]
    return Env(f"gym:{name}", places, start, horizon, following, reward, chance if outcomes > 1 else None)


@functools.cache
def make_env(spec: str) -> Env:
    """Build the environment that --env names. Raises InputError."""
    kind, _, rest = spec.partition(":")
    if kind == "gym":
        return gymnasium_env(rest)
    makers = {"darkroom": darkroom, "key_to_door": key_to_door}
    if kind not in makers or (rest and not (rest.isdecimal() and 2 < int(rest) < 26)):
        raise InputError(f"environment {spec}: give darkroom or key_to_door, perhaps with :3 to :25, or gym:NAME")
    return makers[kind](int(rest or 9))


def split_tasks(tasks: int, seed: int) -> tuple[list[int], list[int]]:
    """Split into training tasks and 8 unseen tasks (2 to 7 if there are fewer than 64 tasks).

    Seed 0 on Darkroom gives the published split.
    """
    order = list(range(tasks))
    random.Random(seed).shuffle(order)
    unseen = min(8, max(2, tasks // 8))
    return order[:-unseen], order[-unseen:]


# --- agents without a network -----------------------------------------------------------------------------------------


def play(env: Env, task: np.ndarray, steps: int, rng, choose, learn=lambda *_: None) -> list[np.ndarray]:
    """Run one agent per entry of `task`; return [states, actions, next states, rewards], each (steps, agents).

    choose(t, state) returns the actions; learn(t, state, action, next state, reward) is called after each step.
    """
    parts = [np.empty((steps, len(task)), kind) for kind in (np.int32, np.int8, np.int32, np.float32)]
    state = np.full(len(task), env.start)
    for t in range(steps):
        action = choose(t, state)
        after, reward = env.step(task, state, action, rng)
        for part, value in zip(parts, (state, action, after, reward), strict=True):
            part[t] = value
        learn(t, state, action, after, reward)
        state = np.full(len(task), env.start) if (t + 1) % env.horizon == 0 else after
    return parts


def learning_curve(rewards: np.ndarray, env: Env) -> np.ndarray:
    """Mean return over agents in each episode. rewards (steps, agents): an incomplete last episode is dropped."""
    whole = rewards[: len(rewards) // env.horizon * env.horizon]
    return whole.reshape(-1, env.horizon, rewards.shape[1]).sum(1, dtype=float).mean(1)


class Search:
    """Agents that know where each action leads, but learn the goal only from the transitions they observe.

    They move to the nearest unseen cell (ties: lowest action) and, after the first reward, take the shortest path to
    the goal. The phases of a task with hidden states (without the key, with it) are searched separately. Raises
    InputError if the environment is not a room.
    """

    def __init__(self, env: Env, task: np.ndarray, rng=None):
        if not env.is_grid:
            raise InputError(f"search: {env.name} is no room, whose map one could know; take another")
        self.env, self.task, self.n = env, task, np.arange(len(task))
        phases = env.next.shape[1] // env.cells
        self.seen = np.zeros((len(task), phases, env.cells), bool)
        self.found = np.zeros((len(task), phases), bool)
        self.best = env.best_actions().argmax(-1)
        self.follow = env.next[:, : env.cells, :, 0] % env.cells
        # shortest paths between all pairs of cells, in steps
        self.far = np.where(np.eye(env.cells, dtype=bool), 0, env.cells)
        for _ in range(env.cells):
            self.far = np.minimum(self.far, self.far[self.follow[0]].min(1) + 1)

    def choose(self, _, state: np.ndarray) -> np.ndarray:
        phase, cell = np.divmod(state, self.env.cells)
        action = self.best[self.task, state]
        lost = np.flatnonzero(~self.found[self.n, phase] & ~self.seen[self.n, phase].all(1))
        unseen = ~self.seen[lost, phase[lost]]
        away = np.where(unseen[:, None], self.far[self.follow[self.task[lost], cell[lost]]], self.env.cells + 1)
        action[lost] = away.min(-1).argmin(-1)
        return action

    def learn(self, _, state: np.ndarray, action: np.ndarray, after: np.ndarray, reward: np.ndarray) -> None:
        self.found[self.n, state // self.env.cells] |= reward > 0
        for phase in (state // self.env.cells, after // self.env.cells):
            self.seen[self.n, phase, after % self.env.cells] = True


# --- histories --------------------------------------------------------------------------------------------------------


class Histories:
    """The histories of all tasks, in memory.

    words (tasks, streams, steps, 4) int16: cell, action, next cell, action to predict. rewards (tasks, streams, steps)
    float32. curves: the source's mean return per episode, an array (episodes,) for each task.
    """

    def __init__(self, path: str, env: str | None, objective: str, seed: int):
        """objective: which actions to predict, see find_targets. Raises InputError if the file is invalid."""
        self.path = find_file(path)
        self.env, groups = read_file(self.path, env)
        shapes = np.array([group["actions"].shape for group in groups])
        # cut all tasks to the fewest steps and streams of any task
        self.steps, self.streams = shapes.min(0).tolist()
        self.longest = int(shapes[:, 0].max())
        self.words = np.empty((len(groups), self.streams, self.steps, 4), np.int16)
        self.rewards = np.empty(self.words.shape[:3], np.float32)
        self.repaired, self.curves = 0, []
        rng = np.random.default_rng([seed % 2**63, 6])
        for task, group in enumerate(groups):
            states, after, repaired = replay(self.path, task, group, self.env)
            self.repaired += repaired
            parts = states, after, group["actions"], group["rewards"]
            states, after, actions, rewards = (part[: self.steps, : self.streams] for part in parts)
            target = find_targets(objective, self.env, task, states, actions, after, rewards, rng)
            words = np.stack([states % self.env.cells, actions, after % self.env.cells, target], -1)
            self.words[task], self.rewards[task] = words.swapaxes(0, 1), rewards.T
            self.curves.append(learning_curve(rewards, self.env))
        self.digest = hashlib.sha256(self.words.tobytes() + self.rewards.tobytes()).hexdigest()[:12]

    def take(self, tasks: np.ndarray, streams: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return words (B, ..., 4) and rewards (B, ...) of B histories at `steps` (B, ...)."""
        index = (steps.T + (tasks * self.streams + streams) * self.steps).T
        # one int64 gather fetches the four int16 words of a step
        words = np.take(self.words.view(np.int64).ravel(), index)[..., None].view(np.int16)
        return words, np.take(self.rewards.ravel(), index)


def find_file(path: str) -> Path:
    """Find the HDF5 file for --data. Raises InputError with advice if there is none."""
    place = Path(path)
    if place.is_dir():
        found = sorted(file for sub in (place, place / "datasets") for file in sub.glob("*.h*5"))
        if len(found) != 1:
            raise InputError(f"{path}: holds {len(found)} .hdf5 files, also in datasets/; name one with --data")
        place = found[0]
    if not place.is_file():
        beside = ", ".join(sorted(file.name for file in place.parent.glob("*.h*5"))[:3])
        raise InputError(
            f"{place}: no such file; "
            + (f"beside it lies {beside}; " if beside else "")
            + "give --data. No histories yet? `make demo TASK=compressed_ad` makes some and trains; "
            "`python -m tools.sample_data compressed_ad data` only makes them, for --data data"
        )
    return place


def read_file(path: Path, env: str | None) -> tuple[Env, list[dict]]:
    """Read the environment and the arrays of each group. Raises InputError."""
    import h5py

    try:
        with h5py.File(path) as file:
            own = file.attrs.get("env", env or "darkroom")
            own = own.decode() if isinstance(own, bytes) else str(own)
            groups = [{name: read_array(file, f"{task}/{name}") for name in FIELDS} for task in range(len(file))]
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError, MemoryError) as error:
        reason = f"{first_line(error)}; it needs groups '0', '1' ... with {', '.join(FIELDS)}"
        raise InputError(f"{path}: not readable histories: {reason}") from None
    world = make_env(own)
    if env and make_env(env).name != world.name:
        raise InputError(f"--env {env}: the histories in {path} are of {own}")
    if len(groups) != world.tasks:
        raise InputError(f"{path}: {len(groups)} groups; {own} has {world.tasks} tasks; --env says another")
    for task, group in enumerate(groups):
        shape = group["rewards"].shape
        for name, array in group.items():
            expected = shape + (world.places.shape[1:] if "states" in name else ())
            if len(shape) != 2 or array.shape != expected or 0 in shape or array.dtype.kind not in "biuf":
                raise InputError(f"{path}: group '{task}': {name} is {array.dtype} {array.shape}; expected {expected}")
        if shape[0] < world.horizon:
            raise InputError(f"{path}: group '{task}': {shape[0]} steps, less than an episode of {world.horizon}")
    return world, groups


def read_array(file, name: str) -> np.ndarray:
    """Read a numeric data set of an open HDF5 file. Raises ValueError if its values are stored in another file."""
    import h5py

    data = file[name]
    is_here = isinstance(data, h5py.Dataset) and data.file.filename == file.filename
    if not is_here or data.is_virtual or data.external or data.dtype.kind not in "biuf":
        raise ValueError(f"{name} is no array of numbers in this file")
    return np.array(data)


def replay(path: Path, task: int, group: dict, env: Env) -> tuple[np.ndarray, np.ndarray, int]:
    """Check every step of a task's histories; return states and next states (T, streams) and the number of repairs.

    Some sources log the start of the next episode as an episode's last next state; this is repaired. Raises InputError
    with group, step and stream.
    """
    corner = env.places.max(0) + 1
    is_last = (np.arange(len(group["actions"])) % env.horizon == env.horizon - 1)[:, None]
    wrong = {"dones must be True at each episode's end alone": group["dones"].astype(bool) != is_last}
    for name, limit in (("states", corner), ("next_states", corner), ("actions", env.actions)):
        array = group[name]
        # NaN fails too
        good = (array == np.floor(array)) & (array >= 0) & (array < limit)
        wrong[f"{name} must be whole numbers from 0 and below {limit}"] = ~(good.all(-1) if good.ndim > 2 else good)
    fail_at_first(path, task, wrong)
    places = (group[name].astype(np.int64) for name in ("states", "next_states"))
    cells, following = (np.ravel_multi_index(place.T, corner).T for place in places)
    actions = group["actions"] = group["actions"].astype(np.int64)

    states, after = cells.copy(), following.copy()
    expected = np.full(cells.shape[1], env.start)
    for t in range(len(cells)):
        states[t] = expected
        if env.chance is None:
            after[t] = env.next[task, expected, actions[t], 0]
        expected = np.full_like(expected, env.start) if is_last[t] else after[t]
    resets = is_last & (following != after % env.cells) & (following == env.start)
    wrong = {"states is not where the step before led, or the start of an episode": states % env.cells != cells}
    led, gain = (part[task, states, actions] for part in (env.next, env.reward))
    leads = led == after[..., None]
    wrong["next_states is not where the action leads"] = ((after % env.cells != following) & ~resets) | ~leads.any(-1)
    wrong["rewards is not what the task gives"] = ~(leads & (gain == group["rewards"][..., None])).any(-1)
    fail_at_first(path, task, wrong)
    return states, after, int(resets.sum())


def fail_at_first(path: Path, task: int, wrong: dict[str, np.ndarray]) -> None:
    """Raise InputError for the first True, with its step and stream. wrong: {reason: array (T, streams)}."""
    for reason, mask in wrong.items():
        if mask.any():
            step, stream = np.argwhere(mask)[0]
            raise InputError(f"{path}: group '{task}', step {step}, stream {stream}: {reason}; correct it")


def find_targets(objective: str, env: Env, task: int, states, actions, after, rewards, rng) -> np.ndarray:
    """Return the actions to predict (T, streams).

    ad: the actions in the history. dpt: optimal actions, ties broken at random (Lee et al. 2023). search: the actions
    of Search after the same history.
    """
    if objective == "ad":
        return actions
    env = env.only(task)
    if objective == "dpt":
        return (env.best_actions()[0][states] * rng.random((*states.shape, env.actions))).argmax(-1)
    searcher = Search(env, np.zeros(states.shape[1], int))
    targets = np.empty_like(actions)
    for t, step in enumerate(zip(states, actions, after, rewards, strict=True)):
        targets[t] = searcher.choose(t, states[t])
        searcher.learn(t, *step)
    return targets


# --- segments ---------------------------------------------------------------------------------------------------------


def hashed(seed: int, epoch: int, samples: np.ndarray, draw: int) -> np.ndarray:
    """Random numbers in [0, 1), one per sample, that depend only on (seed, epoch, sample, draw) (splitmix64)."""
    key = np.random.SeedSequence([seed % 2**63, epoch, draw]).generate_state(1, np.uint64)
    x = samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x = x ^ (x >> np.uint64(31))
    return x.astype(np.float64) / 2.0**64 * (1 - 2**-53)


class SegmentDataset(Dataset):
    """Segments of histories: up to `max_depth` blocks of n_transit transitions to compress, then the context.

    In training, a segment depends only on (seed, epoch, sample), and the contexts of an epoch are together about as
    long as the histories. from_start: share of segments that begin at the start of their history, as the past of an
    acting agent does. shift: moves the room of each segment by 0 to `shift` rows and columns, so that goals cannot be
    memorized. In evaluations, the first histories of each task yield one segment of every depth.
    """

    def __init__(self, histories: Histories, tasks: list[int], args, train: bool):
        self.histories, self.tasks, self.train = histories, np.array(tasks), train
        self.n_transit, self.from_start, self.shift = args.n_transit, args.from_start, args.shift
        self.seed = args.seed if train else 0
        wanted = args.max_compression_depth if args.n_latent else 0
        self.max_depth = min(wanted, (histories.steps - 1) // self.n_transit)
        self.streams = histories.streams if train else min(EVAL_STREAMS, histories.streams)
        self.pieces = max(1, histories.steps // self.n_transit) if train else self.max_depth + 1

    def __len__(self) -> int:
        return len(self.tasks) * self.streams * self.pieces

    def draw(self, samples: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
        """Return (history, depth, end, shift) of samples. end: step after the last transition of the context."""
        if self.train:
            history = samples // self.pieces
            deep, share, which, *moved = (hashed(self.seed, epoch, samples, draw) for draw in range(5))
            depth = (deep * (self.max_depth + 1)).astype(np.int64)
            shift = (np.stack(moved, 1) * (self.shift + 1)).astype(np.int64)
        else:
            number, history = np.divmod(samples, len(self.tasks) * self.streams)
            depth, share, which = self.max_depth - number, history * 0.618034 % 1, history * 0.381966 % 1
            shift = np.full((len(samples), 2), self.shift // 2)
        least = depth * self.n_transit + 1
        end = least + (share * (self.histories.steps + 1 - least)).astype(np.int64)
        whole = np.minimum((depth + 1) * self.n_transit, self.histories.steps)
        end = np.where(which < self.from_start, whole, end)
        return history, depth, end, shift

    def __getitems__(self, samples: list[int]) -> dict:
        """Return a batch for InContextNet.forward with the targets `action` (B, n_transit), -100 on padding, and the
        sample numbers `index` (B,)."""
        index = np.asarray(samples)
        history, depth, end, shift = self.draw(index, getattr(samples[0], "epoch", 0))
        order = np.argsort(-depth, kind="stable")
        index, history, depth, end, shift = (part[order] for part in (index, history, depth, end, shift))
        blocks = np.arange(self.max_depth)
        length = np.minimum(self.n_transit, end - depth * self.n_transit)
        begin = np.empty((len(end), self.max_depth + 1), np.int64)
        begin[:, -1] = end - length
        begin[:, :-1] = blocks * self.n_transit + (end - length - depth * self.n_transit)[:, None]
        steps = begin[..., None] + np.arange(self.n_transit)

        real = np.empty(steps.shape, bool)
        real[:, :-1] = (depth[:, None] > blocks)[..., None]
        real[:, -1] = np.arange(self.n_transit) < length[:, None]
        steps = np.where(real, steps, end[:, None, None] - 1)
        words, rewards = self.histories.take(self.tasks[history // self.streams], history % self.streams, steps)
        words = words * real[..., None]
        action = words[:, -1, :, 3].astype(np.int64)
        action[~real[:, -1]] = -100
        found = {"cells": words[..., :3], "rewards": rewards * real, "depth": depth, "length": length}
        found |= {"action": action, "shift": shift, "index": index}
        compressed = (depth[:, None] > blocks).sum(0).tolist()
        return {name: torch.from_numpy(part) for name, part in found.items()} | {"compressed": compressed}
