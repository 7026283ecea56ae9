"""Guide 4's task and data: Darkroom, and the learning histories of an RL algorithm on each of its 81 goals (HDF5).

Darkroom: a 9 x 9 grid, cells row-major (cell = 9 i + j), start in the middle; an episode has 20 steps, and each step
that ends on the hidden goal is rewarded with 1. Goal g of the file is cell g.

    history.hdf5 /0 ... /80   states, next_states (T, streams, 2) int   actions (T, streams) int
                              rewards (T, streams) number               dones (T, streams) bool, every 20th True
"""

import hashlib
import math
import random
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from cli_utils import InputError
from distributed_utils import agree_on_errors, reduce_sum, world
from tasks.compressed_ad.model import ACTIONS, GRID

CELLS, START, HORIZON = GRID * GRID, GRID * GRID // 2, 20
FIELDS = ("states", "next_states", "actions", "rewards", "dones")
MOVES = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)])
PLACES = np.stack(np.divmod(np.arange(CELLS), GRID), 1)
NEXT = np.clip(PLACES[:, None] + MOVES, 0, GRID - 1) @ (GRID, 1)  # (81, 5): where each action leads; walls hold


def split_goals(seed: int = 0, num_test: int = 8) -> tuple[list[int], list[int]]:
    """(73 training goals, 8 unseen ones). Seed 0 gives the split of the published results."""
    goals = list(range(CELLS))
    random.Random(seed).shuffle(goals)
    return goals[:-num_test], goals[-num_test:]


def optimal_return(goals) -> np.ndarray:
    """Best return of an episode: 21 - the Manhattan distance from the start, at most the 20 steps."""
    distance = np.abs(PLACES[np.asarray(goals)] - PLACES[START]).sum(-1)
    return np.minimum(HORIZON, HORIZON + 1 - distance).astype(float)


def random_return(goals) -> np.ndarray:
    """Expected return of an episode of uniformly random actions, exact."""
    step = np.zeros((CELLS, CELLS))
    np.add.at(step, (np.repeat(np.arange(CELLS), ACTIONS), NEXT.ravel()), 1 / ACTIONS)
    there, visits = np.eye(CELLS)[START], np.zeros(CELLS)
    for _ in range(HORIZON):
        there = there @ step
        visits += there
    return visits[np.asarray(goals)]


def hashed(seed: int, epoch: int, samples: np.ndarray, draw: int) -> np.ndarray:
    """A number in [0, 1) for each sample, a function of (seed, epoch, sample, draw) alone (splitmix64)."""
    key = np.random.SeedSequence([seed % 2**63, epoch, draw]).generate_state(1, np.uint64)
    x = samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))).astype(np.float64) / 2.0**64 * (1 - 2**-53)


# --- the file ---------------------------------------------------------------------------------------------------------


class BadLink(Exception):
    """Why a link of an HDF5 file is not followed."""


def find_inside(file, path: str):
    """The group, data set or type at a path of an open HDF5 file; None where there is none.

    Raises BadLink for a link that leads out of the file or in a circle: another file is never opened.
    """
    import h5py

    here, names, followed = file, path.split("/"), 0
    while names:
        name = names.pop(0)
        if name in ("", "."):
            continue
        if not isinstance(here, h5py.Group) or not here.id.links.exists(name.encode()):
            return None
        kind = here.id.links.get_info(name.encode()).type
        if kind == h5py.h5l.TYPE_HARD:
            here = here[name]
            continue
        if kind != h5py.h5l.TYPE_SOFT:
            raise BadLink("a link into another file, which is not followed")
        followed += 1
        if followed > 16:
            raise BadLink("a link that leads in a circle")
        target = here.id.links.get_val(name.encode()).decode(errors="replace")
        here = file if target.startswith("/") else here
        names = target.split("/") + names
    return here


class Histories:
    """The histories of every goal, decoded in memory (8 bytes a step), or mapped and decoded where they are needed.

    `steps` and `streams`: of each goal, the least that one of them has."""

    def __init__(self, path: Path, in_memory: bool = True):
        """All ranks; each checks a part of the goals. Raises InputError, on all, that names goal, field and place."""
        self.path, self.in_memory = path, in_memory
        self.raw: dict[int, dict[str, np.ndarray]] = {}
        self.repaired = 0
        with agree_on_errors():
            self._open()
            rank, world_size = world()
            for goal in range(rank, CELLS, world_size):
                self.repaired += self._check(goal)
        self.repaired = int(reduce_sum([self.repaired])[0])
        shapes = {goal: raw["actions"].shape for goal, raw in self.raw.items()}
        self.shortest = min(shapes, key=lambda goal: shapes[goal][0])
        self.steps, self.longest = shapes[self.shortest][0], max(steps for steps, _ in shapes.values())
        self.streams = min(streams for _, streams in shapes.values())
        if in_memory:
            self.cells = np.zeros((CELLS, self.streams, self.steps, 4), np.uint8)  # 4: gathered as one 32-bit word
            self.rewards = np.empty((CELLS, self.streams, self.steps), np.float32)
            for goal in range(CELLS):
                raw, where = self.raw.pop(goal), (slice(0, self.steps), slice(0, self.streams))
                self.cells[goal, :, :, :3] = decode(raw, where).swapaxes(0, 1)
                self.rewards[goal] = raw["rewards"][where].T
        digest, steps = hashlib.sha256(), np.arange(self.steps)[None].repeat(self.streams, 0)
        for goal in range(CELLS):
            cells, rewards = self.take(np.full(self.streams, goal), np.arange(self.streams), steps)
            digest.update(cells.tobytes() + rewards.tobytes())
        self.digest = digest.hexdigest()[:12]

    def _wrong(self, goal: int | str, text: str) -> InputError:
        return InputError(f"{self.path}: group '{goal}': {text}; correct or make the histories anew")

    def _open(self) -> None:
        import h5py

        if not self.path.is_file():
            others = sorted(path.name for path in self.path.parent.glob("*.hdf5"))
            text = "make histories with `python sample_data.py compressed_ad FOLDER`, then give --data FOLDER"
            text = f"beside it lies {others[0]}; give that with --data" if others else text
            raise InputError(f"{self.path}: no such file; {text}")
        try:
            with h5py.File(self.path) as file:
                for goal in range(CELLS):
                    group = self._find(file, goal)
                    if group is None:
                        raise self._wrong(goal, f"is missing; there must be '0' to '{CELLS - 1}', one for each goal")
                    fields = {name: self._find(file, goal, name) for name in FIELDS}
                    if lacking := [name for name in FIELDS if fields[name] is None]:
                        raise self._wrong(goal, f"has no {lacking[0]!r}")
                    self.raw[goal] = {name: self._array(goal, name, data) for name, data in fields.items()}
        except InputError:
            raise
        except (OSError, KeyError, RuntimeError, ValueError, TypeError, OverflowError) as error:  # all are h5py's
            kind = "truncated HDF5 file" if "truncated" in str(error) else "not a readable HDF5 file"
            raise InputError(f"{self.path}: {kind} of {self.path.stat().st_size} bytes; get or make it anew") from None

    def _find(self, file, goal: int, name: str = ""):
        """A goal's group, or its data set `name`; None where there is none. Raises InputError for any other thing."""
        import h5py

        subject = f"{name} " if name else ""
        try:
            found = find_inside(file, f"{goal}/{name}")
        except BadLink as error:
            raise self._wrong(goal, f"{subject}is {error}") from None
        kinds = {h5py.Group: "a group", h5py.Dataset: "a data set", h5py.Datatype: "a named type"}
        wanted = h5py.Dataset if name else h5py.Group
        if found is not None and not isinstance(found, wanted):
            what = next(text for kind, text in kinds.items() if isinstance(found, kind))
            raise self._wrong(goal, f"{subject}is {what}, not {kinds[wanted]}")
        return found

    def _array(self, goal: int, name: str, data) -> np.ndarray:
        """A data set's values, in memory or mapped. Raises InputError for one whose values are not in this file."""
        if data.shape is None:
            raise self._wrong(goal, f"{name} is an empty (null) data set")
        if data.is_virtual or data.external:
            raise self._wrong(goal, f"{name} keeps its values in another file, which is not read")
        if data.dtype.kind not in "biuf":
            raise self._wrong(goal, f"{name} holds {data.dtype}, not numbers")

        # no compression of HDF5 reaches a factor of 2000: before memory is taken, such a size is known to be wrong
        declared, stored = data.dtype.itemsize * math.prod(data.shape), data.id.get_storage_size()
        if declared > max(2**30, 2000 * stored):
            shape = " x ".join(map(str, data.shape))
            text = f"{name} is declared as {shape}, {declared / 1e12:.1f} TB, of which {stored} bytes are there"
            raise self._wrong(goal, text)
        if self.in_memory:
            return data[()]
        offset = data.id.get_offset()
        if offset is None or data.chunks or data.dtype.kind not in "biuf":
            text = f"{name} is compressed or chunked and cannot be mapped; leave out --no-cache_in_memory"
            raise InputError(f"{self.path}: group '{goal}': {text}")
        return np.memmap(self.path, data.dtype, "r", offset, data.shape)

    def _check(self, goal: int) -> int:
        """Raise InputError for what is wrong with a goal's arrays; returns how many next states are resets."""
        raw = self.raw[goal]
        shape = raw["actions"].shape
        for name in FIELDS:
            array, wanted = raw[name], (*shape, 2) if "states" in name else shape
            if len(shape) != 2 or array.shape != wanted or 0 in shape:
                raise self._wrong(
                    goal, f"{name} has shape {array.shape}; expected (T, streams{', 2' * (name in FIELDS[:2])})"
                )
            if array.dtype.kind not in "biuf":
                raise self._wrong(goal, f"{name} holds {array.dtype}, not numbers")
            limits = {"states": GRID, "next_states": GRID, "actions": ACTIONS}.get(name)
            with np.errstate(invalid="ignore"):
                bad = (
                    ~np.isfinite(array)
                    if limits is None
                    else (array != np.floor(array)) | (array < 0) | (array >= limits)
                )
            if bad.any():
                at = tuple(int(k) for k in np.argwhere(bad)[0])
                allowed = f"a whole number of 0 to {limits - 1}" if limits else "a finite number"
                raise self._wrong(goal, f"{name}[{at[0]}, {at[1]}] is {array[at]}; expected {allowed}")
        if shape[0] < HORIZON:
            raise self._wrong(goal, f"has {shape[0]} steps, less than an episode of {HORIZON}")
        ends = (np.arange(shape[0]) + 1) % HORIZON == 0
        if (bad := raw["dones"].astype(bool) != ends[:, None]).any():
            at = tuple(int(k) for k in np.argwhere(bad)[0])
            raise self._wrong(goal, f"dones[{at[0]}, {at[1]}] is {raw['dones'][at]}; an episode has {HORIZON} steps")
        states, after = (np.asarray(raw[name], np.int64) @ (GRID, 1) for name in ("states", "next_states"))
        actions = np.asarray(raw["actions"], np.int64)
        led = NEXT[states, actions]
        resets = (after != led) & (after == START) & ends[:, None]
        chain = np.concatenate([np.full((1, shape[1]), START), np.where(ends[:, None], START, led)])[:-1]
        for bad, text in (
            (
                (after != led) & ~resets,
                "next_states is not where the action leads (0: +i, 1: -i, 2: +j, 3: -j, 4: stay)",
            ),
            (states != chain, "states is not where the step before led, or the start of an episode"),
            (
                (led == goal) != (np.asarray(raw["rewards"]) == 1),
                f"rewards must be 1 on the goal {divmod(goal, GRID)} alone",
            ),
            ((led != goal) & (np.asarray(raw["rewards"]) != 0), "rewards must be 0 or 1"),
        ):
            if bad.any():
                at = tuple(int(k) for k in np.argwhere(bad)[0])
                raise self._wrong(goal, f"step {at[0]}, stream {at[1]}: {text}")
        return int(resets.sum())

    def take(self, goals: np.ndarray, streams: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For B histories and steps (B, ...): cells (B, ..., 3) uint8 and rewards (B, ...) float32."""
        if self.in_memory:
            first = (goals * self.streams + streams) * self.steps
            flat = first.reshape(-1, *[1] * (steps.ndim - 1)) + steps
            words = np.take(self.cells.view(np.uint32).ravel(), flat)
            return words[..., None].view(np.uint8)[..., :3], np.take(self.rewards.ravel(), flat)
        cells, rewards = np.empty((*steps.shape, 3), np.uint8), np.empty(steps.shape, np.float32)
        for k, (goal, stream) in enumerate(zip(goals.tolist(), streams.tolist(), strict=True)):
            first, last = steps[k].min(), steps[k].max() + 1
            cells[k] = decode(self.raw[goal], (slice(first, last), stream))[steps[k] - first]
            rewards[k] = self.raw[goal]["rewards"][first:last, stream][steps[k] - first]
        return cells, rewards

    def learning_curve(self, goals: list[int]) -> np.ndarray:
        """(episodes, goals): the source algorithm's own return per episode, mean over the streams."""
        whole, curves = self.steps // HORIZON * HORIZON, []
        for goal in goals:
            rewards = self.rewards[goal].T if self.in_memory else self.raw[goal]["rewards"][:, : self.streams]
            curves.append(np.asarray(rewards[:whole], float).reshape(-1, HORIZON, rewards.shape[1]).sum(1).mean(1))
        return np.stack(curves, 1)


def decode(raw: dict[str, np.ndarray], where: tuple) -> np.ndarray:
    """(..., 3) uint8 of (cell, action, next cell); next is where the action led, also where an episode's end was logged
    as the start of the one after."""
    states = np.asarray(raw["states"][where], np.int64) @ (GRID, 1)
    actions = np.asarray(raw["actions"][where], np.int64)
    return np.stack([states, actions, NEXT[states, actions]], -1).astype(np.uint8)


# --- what the net is trained on ---------------------------------------------------------------------------------------


class SegmentDataset(Dataset):
    """Pieces of histories: up to `max_depth` whole blocks of n_transit transitions, and the context after them.

    A sample is what an agent would hold at some step of a history: it ends at any step that leaves room for its number
    of blocks, and reaches as far back as they do, at most to the beginning. Depth and end are a function of (seed,
    epoch, sample); `epoch` must be set before each pass. A pass has about as many contexts as cover the histories.
    """

    def __init__(self, histories: Histories, goals: list[int], n_transit: int, max_depth: int, seed: int):
        self.histories, self.goals, self.seed, self.epoch = histories, np.array(goals), seed, 0
        self.n_transit, self.slots = n_transit, max(1, histories.steps // n_transit)
        self.max_depth = min(max_depth, (histories.steps - 1) // n_transit)  # what the histories are long enough for

    def __len__(self) -> int:
        return len(self.goals) * self.histories.streams * self.slots

    def draw(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(history, depth, end) of samples in this epoch; the context's last transition is end - 1."""
        depth = (hashed(self.seed, self.epoch, samples, 0) * (self.max_depth + 1)).astype(np.int64)
        least = depth * self.n_transit + 1
        room = self.histories.steps + 1 - least
        end = least + (hashed(self.seed, self.epoch, samples, 1) * room).astype(np.int64)
        return samples // self.slots, depth, end

    def depths(self) -> np.ndarray:
        """How many samples of this epoch have 0, 1, ... blocks."""
        return np.bincount(self.draw(np.arange(len(self)))[1], minlength=self.max_depth + 1)

    def __getitems__(self, samples: list[int]) -> dict:
        """A batch as InContextNet.forward takes it, the deepest first, with `sample` (B,) and the target `action`
        (B, n_transit), -100 on padding."""
        samples = np.asarray(samples)
        history, depth, end = self.draw(samples)
        order = np.argsort(-depth, kind="stable")
        samples, history, depth, end = samples[order], history[order], depth[order], end[order]
        return self.batch(history, depth, end) | {"sample": torch.from_numpy(samples)}

    def batch(self, history: np.ndarray, depth: np.ndarray, end: np.ndarray) -> dict:
        """The segments of B histories that end before `end`, depths sorted from the largest."""
        n, blocks = self.n_transit, self.max_depth
        length = np.minimum(n, end - depth * n)
        begin = end - length - depth * n
        first = np.concatenate([begin[:, None] + np.arange(blocks) * n, (end - length)[:, None]], 1)
        steps = first[..., None] + np.arange(n)
        there = np.concatenate([np.arange(blocks) < depth[:, None], np.ones((len(end), 1), bool)], 1)[..., None]
        there = np.broadcast_to(there, steps.shape).copy()
        there[:, -1] = np.arange(n) < length[:, None]
        streams = self.histories.streams
        goals = self.goals[history // streams]
        cells, rewards = self.histories.take(goals, history % streams, np.where(there, steps, end[:, None, None] - 1))
        cells, rewards = torch.from_numpy(cells * there[..., None]), torch.from_numpy(rewards * there)
        action = cells[:, -1, :, 1].long().masked_fill(~torch.from_numpy(there[:, -1]), -100)
        compressed = [int((depth > block).sum()) for block in range(blocks)]
        return {"cells": cells, "rewards": rewards, "depth": torch.from_numpy(depth), "compressed": compressed,
                "length": torch.from_numpy(length), "action": action}  # fmt: skip
