"""Reinforcement-learning environments, histories of agents learning in them, and training segments of the histories.

Histories are stored as HDF5, in the layout of the published CompressedAD repository (guide 4):

    history.hdf5 /0 ... /80   states, next_states (T, streams, D) int   actions (T, streams) int
                              rewards (T, streams) number               dones (T, streams) bool: ends of episodes

Group /k contains task k: T steps of each of several parallel agents ("streams"). D is the number of coordinates. The
file attribute `env` has the syntax of the flag --env; the published files lack it.
"""

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
EVAL_STREAMS = 20

# --- environments -----------------------------------------------------------------------------------------------------


class Env(NamedTuple):
    """Reinforcement-learning environment with several tasks, given by transition tables.

    coordinates: (cells, D). next, reward: (tasks, states, actions, outcomes), the next state and the reward for each
    possible outcome. cumulative: cumulative probabilities of the outcomes, of the same shape, or None if each action
    has one outcome. An agent observes only its cell, which is state % cells. An episode has `horizon` steps; an agent
    that reaches a terminal state stays there without reward.
    """

    name: str
    coordinates: np.ndarray
    start: int
    horizon: int
    next: np.ndarray
    reward: np.ndarray
    cumulative: np.ndarray | None = None

    @property
    def cells(self) -> int:
        return len(self.coordinates)

    @property
    def tasks(self) -> int:
        return len(self.next)

    @property
    def actions(self) -> int:
        return self.next.shape[2]

    @property
    def is_grid(self) -> bool:
        return self.coordinates.shape[1] == 2

    def only(self, task: int) -> "Env":
        cumulative = None if self.cumulative is None else self.cumulative[[task]]
        return self._replace(next=self.next[[task]], reward=self.reward[[task]], cumulative=cumulative)

    def step(self, task, state, action, rng=None) -> tuple[np.ndarray, np.ndarray]:
        outcome = 0
        if self.cumulative is not None:
            outcome = (rng.random((len(state), 1)) >= self.cumulative[task, state, action]).sum(1)
        return self.next[task, state, action, outcome], self.reward[task, state, action, outcome]

    def _expected(self, values: np.ndarray) -> np.ndarray:
        outcomes = self.reward + values[np.arange(len(values))[:, None, None, None], self.next]
        if self.cumulative is None:
            return outcomes[..., 0]
        return (outcomes * np.diff(self.cumulative, axis=-1, prepend=0)).sum(-1)

    def value(self, choose) -> np.ndarray:
        """Return the exact expected return of an episode in each task, (tasks,).

        choose: np.max for optimal actions, np.mean for random actions.
        """
        values = np.zeros(self.next.shape[:2])
        for _ in range(self.horizon):
            values = choose(self._expected(values), axis=-1)
        return values[:, self.start]

    def best_actions(self) -> np.ndarray:
        """Return a boolean array (tasks, states, actions), True for actions that maximize the discounted return."""
        values = np.zeros(self.next.shape[:2])
        for _ in range(10 * self.horizon):
            q = self._expected(DISCOUNT * values)
            values = q.max(-1)
        return q > q.max(-1, keepdims=True) - 1e-6


def grid_moves(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a room's cell coordinates (cells, 2) and the next cell for each action (cells, 5).

    The room has size x size cells. The actions are i + 1, i - 1, j + 1, j - 1 and stay; walls block moves.
    """
    coordinates = np.stack(np.divmod(np.arange(size * size), size), -1)
    moved = np.clip(coordinates[:, None] + [(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)], 0, size - 1)
    return coordinates, moved @ (size, 1)


def darkroom(size: int) -> Env:
    """Build Darkroom: a room of size x size cells with a hidden goal, which is cell k in task k.

    Each step that ends on the goal gives a reward of 1.
    """
    coordinates, next_cell = grid_moves(size)
    cells = size * size
    next_state = np.broadcast_to(next_cell[None, ..., None], (cells, cells, 5, 1))
    reward = (next_state == np.arange(cells)[:, None, None, None]).astype(np.float32)
    return Env(f"darkroom:{size}", coordinates, size // 2 * (size + 1), 2 * size + 2, next_state, reward)


def key_to_door(size: int) -> Env:
    """Build Key-to-Door: a room of size x size cells in which an agent must find a hidden key, then a hidden door.

    The key and the door each give a reward of 1, once. In a room of n cells, an agent on cell c is in state c without
    the key, c + n with the key, and c + 2 n after it has reached the door.
    """
    coordinates, next_cell = grid_moves(size)
    cells = size * size
    pairs = np.random.default_rng(0).permutation(cells * cells)[:200]
    key, door = (half[:, None, None] for half in np.divmod(pairs, cells))
    with_key = np.where(next_cell == key, next_cell + cells, next_cell)
    with_door = np.where(next_cell == door, next_cell + 2 * cells, next_cell + cells)
    done = np.broadcast_to(next_cell + 2 * cells, with_key.shape)
    next_state = np.concatenate([with_key, with_door, done], 1)[..., None]
    state = np.arange(3 * cells)[:, None, None]
    reward = (next_state // cells > state // cells).astype(np.float32)
    return Env(f"key_to_door:{size}", coordinates, size // 2 * (size + 1), 50, next_state, reward)


def gymnasium_env(name: str) -> Env:
    """Build tasks from a Gymnasium environment with a transition table P, such as FrozenLake or Taxi.

    Each task permutes the actions differently. Raises InputError if the environment cannot be used.
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
    # give all actions the same number of outcomes: append copies of the last outcome, with probability 0
    rows = [
        [(found + outcomes * [(0, *found[-1][1:])])[:outcomes] for found in table[state].values()]
        for state in range(states)
    ]
    probability, next_state, reward, is_end = np.moveaxis(np.array(rows, float), -1, 0)
    next_state = next_state.astype(int)
    terminal = np.unique(next_state[is_end > 0])
    next_state[terminal], reward[terminal] = terminal[:, None, None], 0
    rng = np.random.default_rng(0)
    orders = np.unique(rng.permuted(np.tile(np.arange(actions), (6000, 1)), axis=1), axis=0)
    order = rng.permutation(orders)[:120]
    tables = next_state, reward, probability.cumsum(-1)
    next_state, reward, cumulative = (table[:, order].swapaxes(0, 1) for table in tables)
    horizon = min(env.spec.max_episode_steps or 50, 2 * states)
    coordinates = np.arange(states)[:, None]
    return Env(f"gym:{name}", coordinates, start, horizon, next_state, reward, cumulative if outcomes > 1 else None)


def make_env(spec: str) -> Env:
    kind, _, rest = spec.partition(":")
    if kind == "gym":
        return gymnasium_env(rest)
    makers = {"darkroom": darkroom, "key_to_door": key_to_door}
    if kind not in makers or (rest and not (rest.isdecimal() and 2 < int(rest) < 26)):
        raise InputError(f"environment {spec}: give darkroom or key_to_door, perhaps with :3 to :25, or gym:NAME")
    return makers[kind](int(rest or 9))


def split_tasks(tasks: int, seed: int) -> tuple[list[int], list[int]]:
    """Split task numbers 0 to tasks - 1 into training tasks and unseen test tasks.

    For Darkroom, seed 0 gives the split of the published CompressedAD repository (guide 4).
    """
    order = list(range(tasks))
    random.Random(seed).shuffle(order)
    unseen = min(8, max(2, tasks // 8))
    return order[:-unseen], order[-unseen:]


# --- scripted agents --------------------------------------------------------------------------------------------------


def play(env: Env, task: np.ndarray, steps: int, rng, choose, learn=lambda *_: None) -> list[np.ndarray]:
    """Let agents act for `steps` steps; return [states, actions, next states, rewards], each (steps, agents).

    task: each agent's task number. choose(t, states) returns the actions; learn(t, states, actions, next states,
    rewards) is called after each step.
    """
    parts = [np.empty((steps, len(task)), kind) for kind in (np.int32, np.int8, np.int32, np.float32)]
    state = np.full(len(task), env.start)
    for t in range(steps):
        action = choose(t, state)
        next_state, reward = env.step(task, state, action, rng)
        for part, value in zip(parts, (state, action, next_state, reward), strict=True):
            part[t] = value
        learn(t, state, action, next_state, reward)
        state = np.full(len(task), env.start) if (t + 1) % env.horizon == 0 else next_state
    return parts


def learning_curve(rewards: np.ndarray, env: Env) -> np.ndarray:
    complete = rewards[: len(rewards) // env.horizon * env.horizon]
    return complete.reshape(-1, env.horizon, rewards.shape[1]).sum(1, dtype=float).mean(1)


class Search:
    """Agents that know a room's layout but not where the goal is.

    An agent moves toward the nearest unvisited cell until its first reward, then takes the shortest path to the goal.
    In Key-to-Door, it searches the room once without the key and once with it. Raises InputError if the environment is
    not a room.
    """

    def __init__(self, env: Env, task: np.ndarray, rng=None):
        if not env.is_grid:
            raise InputError(f"search: {env.name} is no room, whose map one could know; take another")
        self.env, self.task, self.agent = env, task, np.arange(len(task))
        phases = env.next.shape[1] // env.cells
        self.seen = np.zeros((len(task), phases, env.cells), bool)
        self.found = np.zeros((len(task), phases), bool)
        self.best = env.best_actions().argmax(-1)
        self.next_cell = env.next[:, : env.cells, :, 0] % env.cells
        self.distance = np.where(np.eye(env.cells, dtype=bool), 0, env.cells)
        for _ in range(env.cells):
            self.distance = np.minimum(self.distance, self.distance[self.next_cell[0]].min(1) + 1)

    def choose(self, _, state: np.ndarray) -> np.ndarray:
        phase, cell = np.divmod(state, self.env.cells)
        action = self.best[self.task, state]
        searching = np.flatnonzero(~self.found[self.agent, phase] & ~self.seen[self.agent, phase].all(1))
        unseen = ~self.seen[searching, phase[searching]]
        next_cell = self.next_cell[self.task[searching], cell[searching]]
        distance = np.where(unseen[:, None], self.distance[next_cell], self.env.cells + 1)
        action[searching] = distance.min(-1).argmin(-1)
        return action

    def learn(self, _, state: np.ndarray, action: np.ndarray, next_state: np.ndarray, reward: np.ndarray) -> None:
        self.found[self.agent, state // self.env.cells] |= reward > 0
        for phase in (state // self.env.cells, next_state // self.env.cells):
            self.seen[self.agent, phase, next_state % self.env.cells] = True


# --- histories --------------------------------------------------------------------------------------------------------


class Histories:
    """Learning histories of all tasks, loaded into memory.

    words: (tasks, streams, steps, 4) int16, the cell, action, next cell and action to predict at each step. rewards:
    (tasks, streams, steps) float32. curves: for each task, the mean return in each episode.
    """

    def __init__(self, path: str, env: str | None, objective: str, seed: int):
        file = find_file(path)
        self.env, groups = read_file(file, env)
        shapes = np.array([group["actions"].shape for group in groups])
        self.steps, self.streams = shapes.min(0).tolist()
        self.longest = int(shapes[:, 0].max())
        self.words = np.empty((len(groups), self.streams, self.steps, 4), np.int16)
        self.rewards = np.empty(self.words.shape[:3], np.float32)
        self.repaired, self.curves = 0, []
        rng = np.random.default_rng([seed % 2**63, 6])
        for task, group in enumerate(groups):
            self.repaired += replay(file, task, group, self.env)
            states, next_states, actions, rewards = (group[name][: self.steps, : self.streams] for name in FIELDS[:4])
            targets = find_targets(objective, self.env, task, states, actions, next_states, rewards, rng)
            words = np.stack([states % self.env.cells, actions, next_states % self.env.cells, targets], -1)
            self.words[task], self.rewards[task] = words.swapaxes(0, 1), rewards.T
            self.curves.append(learning_curve(rewards, self.env))
            # free the arrays of this task
            group.clear()
        self.digest = hashlib.sha256(self.words.tobytes() + self.rewards.tobytes()).hexdigest()[:12]


def find_file(path: str) -> Path:
    file = Path(path)
    if file.is_dir():
        found = sorted(each for folder in (file, file / "datasets") for each in folder.glob("*.h*5"))
        if len(found) != 1:
            raise InputError(f"{path}: holds {len(found)} .hdf5 files, also in datasets/; name one with --data")
        file = found[0]
    if not file.is_file():
        beside = ", ".join(sorted(each.name for each in file.parent.glob("*.h*5"))[:3])
        raise InputError(
            f"{file}: no such file; "
            + (f"beside it lies {beside}; " if beside else "")
            + "give --data. No histories yet? `make demo TASK=compressed_ad` makes some and trains; "
            "`python -m tools.sample_data compressed_ad data` only makes them, for --data data"
        )
    return file


def read_file(path: Path, wanted: str | None) -> tuple[Env, list[dict]]:
    """Read a file of histories; return its environment and, for each task, a dict of arrays.

    Raises InputError if the file is unusable or does not belong to the environment `wanted`.
    """
    import h5py

    try:
        with h5py.File(path) as file:
            spec = file.attrs.get("env", wanted or "darkroom")
            # h5py returns fixed-length strings as bytes
            spec = spec.decode() if isinstance(spec, bytes) else str(spec)
            groups = [{name: read_array(file, f"{task}/{name}") for name in FIELDS} for task in range(len(file))]
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError, MemoryError) as error:
        reason = f"{first_line(error)}; it needs groups '0', '1' ... with {', '.join(FIELDS)}"
        raise InputError(f"{path}: not readable histories: {reason}") from None
    env = make_env(spec)
    if wanted and make_env(wanted).name != env.name:
        raise InputError(f"--env {wanted}: the histories in {path} are of {spec}")
    if len(groups) != env.tasks:
        raise InputError(f"{path}: {len(groups)} groups; {spec} has {env.tasks} tasks; --env says another")
    for task, group in enumerate(groups):
        shape = group["rewards"].shape
        for name, array in group.items():
            expected = shape + (env.coordinates.shape[1:] if "states" in name else ())
            if len(shape) != 2 or array.shape != expected or 0 in shape:
                raise InputError(f"{path}: group '{task}': {name} is {array.dtype} {array.shape}; expected {expected}")
        if shape[0] < env.horizon:
            raise InputError(f"{path}: group '{task}': {shape[0]} steps, less than an episode of {env.horizon}")
    return env, groups


def read_array(file, name: str) -> np.ndarray:
    data = file[name]
    is_elsewhere = data.file.filename != file.filename or data.is_virtual or data.external
    if is_elsewhere or data.dtype.kind not in "biuf":
        raise ValueError(f"{name} is no array of numbers in this file")
    return np.array(data)


def replay(path: Path, task: int, group: dict, env: Env) -> int:
    """Check one task's histories by replaying their actions; return the number of repaired next states.

    group: the task's arrays; their coordinates are replaced by state numbers (T, streams). In some files, an episode's
    final next_state is the start of the next episode; these entries are corrected. Raises InputError at the first
    error.
    """
    limits = env.coordinates.max(0) + 1
    is_last = (np.arange(len(group["actions"])) % env.horizon == env.horizon - 1)[:, None]
    wrong = {"dones must be True at each episode's end alone": group["dones"].astype(bool) != is_last}
    for name, limit in (("states", limits), ("next_states", limits), ("actions", env.actions)):
        array = group[name]
        # comparisons with NaN are False, so NaN fails this check
        good = (array == np.floor(array)) & (array >= 0) & (array < limit)
        wrong[f"{name} must be whole numbers from 0 and below {limit}"] = ~(good.all(-1) if good.ndim > 2 else good)
    fail_at_first(path, task, wrong)
    cells, next_cells = (
        np.ravel_multi_index(group[name].astype(np.int64).T, limits).T for name in ("states", "next_states")
    )
    actions = group["actions"].astype(np.int64)

    states, next_states = np.empty_like(cells), next_cells.copy()
    state = np.full(cells.shape[1], env.start)
    for t in range(len(cells)):
        states[t] = state
        if env.cumulative is None:
            next_states[t] = env.next[task, state, actions[t], 0]
        state = np.full_like(state, env.start) if is_last[t] else next_states[t]
    resets = is_last & (next_cells != next_states % env.cells) & (next_cells == env.start)
    wrong = {"states is not where the step before led, or the start of an episode": states % env.cells != cells}
    possible = env.next[task, states, actions] == next_states[..., None]
    right_cell = next_states % env.cells == next_cells
    wrong["next_states is not where the action leads"] = ~(right_cell | resets) | ~possible.any(-1)
    right_reward = env.reward[task, states, actions] == group["rewards"][..., None]
    wrong["rewards is not what the task gives"] = ~(possible & right_reward).any(-1)
    fail_at_first(path, task, wrong)
    group |= {"states": states, "next_states": next_states, "actions": actions}
    return int(resets.sum())


def fail_at_first(path: Path, task: int, wrong: dict[str, np.ndarray]) -> None:
    for reason, mask in wrong.items():
        if mask.any():
            step, stream = np.argwhere(mask)[0]
            raise InputError(f"{path}: group '{task}', step {step}, stream {stream}: {reason}; correct it")


def find_targets(objective: str, env: Env, task: int, states, actions, next_states, rewards, rng) -> np.ndarray:
    """Return the actions (T, streams) that the network learns to predict in one task's histories.

    objective: "ad", the recorded actions; "dpt", optimal actions, with ties broken at random (Lee et al. 2023);
    "search", the actions a Search agent would choose given the same past.
    """
    if objective == "ad":
        return actions
    env = env.only(task)
    if objective == "dpt":
        return (env.best_actions()[0][states] * rng.random((*states.shape, env.actions))).argmax(-1)
    searcher = Search(env, np.zeros(states.shape[1], int))
    targets = np.empty_like(actions)
    for t, step in enumerate(zip(states, actions, next_states, rewards, strict=True)):
        targets[t] = searcher.choose(t, states[t])
        searcher.learn(t, *step)
    return targets


# --- segments ---------------------------------------------------------------------------------------------------------


def hashed(seed: int, epoch: int, samples: np.ndarray, draw: int) -> np.ndarray:
    """Return a number in [0, 1) for each sample: the splitmix64 hash of (seed, epoch, sample index, draw number)."""
    key = np.random.SeedSequence([seed % 2**63, epoch, draw]).generate_state(1, np.uint64)
    x = samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x = x ^ (x >> np.uint64(31))
    return x.astype(np.float64) / 2.0**64 * (1 - 2**-53)


class SegmentDataset(Dataset):
    """Dataset of segments, contiguous parts of learning histories.

    A segment is `depth` blocks of n_transit transitions each, followed by a context of 1 to n_transit transitions. The
    network compresses the blocks and predicts the actions in the context. Training segments are random, but depend only
    on (seed, epoch, sample index). Evaluations use one segment of every depth from each of a task's first EVAL_STREAMS
    histories.
    """

    def __init__(self, histories: Histories, tasks: list[int], args, train: bool):
        self.histories, self.tasks, self.train = histories, np.array(tasks), train
        self.n_transit, self.from_start, self.shift = args.n_transit, args.from_start, args.shift
        self.seed = args.seed if train else 0
        wanted = args.max_compression_depth if args.n_latent else 0
        self.max_depth = min(wanted, (histories.steps - 1) // self.n_transit)
        self.streams = histories.streams if train else min(EVAL_STREAMS, histories.streams)
        self.segments_per_history = histories.steps // self.n_transit if train else self.max_depth + 1

    def __len__(self) -> int:
        return len(self.tasks) * self.streams * self.segments_per_history

    def draw(self, samples: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
        """Choose a segment for each sample index; return (history, depth, end, shift), each with one entry per index.

        history: number of the history within the dataset. end: the step after the context. shift: (n, 2), row and
        column offset of the room.
        """
        if self.train:
            history = samples // self.segments_per_history
            draws = [hashed(self.seed, epoch, samples, draw) for draw in range(5)]
            depth_draw, end_draw, start_draw, *shift_draws = draws
            depth = (depth_draw * (self.max_depth + 1)).astype(np.int64)
            shift = (np.stack(shift_draws, 1) * (self.shift + 1)).astype(np.int64)
        else:
            number, history = np.divmod(samples, len(self.tasks) * self.streams)
            depth, end_draw, start_draw = self.max_depth - number, history * 0.618034 % 1, history * 0.381966 % 1
            shift = np.full((len(samples), 2), self.shift // 2)
        first_end = depth * self.n_transit + 1
        end = first_end + (end_draw * (self.histories.steps + 1 - first_end)).astype(np.int64)
        full_end = np.minimum((depth + 1) * self.n_transit, self.histories.steps)
        end = np.where(start_draw < self.from_start, full_end, end)
        return history, depth, end, shift

    def __getitems__(self, samples: list[int]) -> dict:
        """Return a batch of the samples with these indices, sorted by descending depth.

        The entries are described in InContextNet.forward(). In addition, `action` (B, n_transit) contains the actions
        to predict, with -100 on padding, and `index` (B,) the sample indices.
        """
        index = np.asarray(samples)
        history, depth, end, shift = self.draw(index, getattr(samples[0], "epoch", 0))
        order = np.argsort(-depth, kind="stable")
        index, history, depth, end, shift = (part[order] for part in (index, history, depth, end, shift))
        length = np.minimum(self.n_transit, end - depth * self.n_transit)
        # block numbers (B, max_depth + 1): 0, 1, ... for the blocks to compress; last column: `depth` for the context
        block = np.tile(np.arange(self.max_depth + 1), (len(end), 1))
        is_used = block < depth[:, None]
        compressed = is_used.sum(0)[:-1].tolist()
        block[:, -1], is_used[:, -1] = depth, True
        begin = (end - length)[:, None] + (block - depth[:, None]) * self.n_transit
        steps = begin[..., None] + np.arange(self.n_transit)
        last = end[:, None, None] - 1
        is_real = is_used[..., None] & (steps <= last)

        task, stream = self.tasks[history // self.streams], history % self.streams
        where = task[:, None, None], stream[:, None, None], np.minimum(steps, last)
        words = self.histories.words[where] * is_real[..., None]
        rewards = self.histories.rewards[where] * is_real
        action = np.where(is_real[:, -1], words[:, -1, :, 3], -100).astype(np.int64)
        batch = {"cells": words[..., :3], "rewards": rewards, "depth": depth, "length": length}
        batch |= {"action": action, "shift": shift, "index": index}
        return {name: torch.from_numpy(part) for name, part in batch.items()} | {"compressed": compressed}
