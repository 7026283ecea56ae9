"""CompressedAD's data: learning histories of Darkroom's goals, and the segments of them that a model is trained on."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch.utils.data import DataLoader, Dataset

from old.cli_utils import InputError
from old.distributed_utils import agree_on_errors, create_distributed_dataloader, reduce_sum, world
from old.memory_utils import BatchSize
from old.sampler_utils import EvalBatchSampler
from tasks.compressed_ad.darkroom import CELLS, HORIZON, NEXT, split_goals, to_cells
from tasks.compressed_ad.history_file import check_goal, find_histories, name_goal, read_goals

# --- histories --------------------------------------------------------------------------------------------------------


class Histories:
    """The histories of every goal, decoded in memory (8 bytes a step), or mapped and decoded where they are needed.

    steps, streams: the least that a goal has. shortest: a goal with so few steps. longest: the most steps of a goal.
    repaired: episodes that are logged with the next one's start as their end. digest: of all values that are used.
    """

    def __init__(self, path: Path, in_memory: bool = True):
        """All ranks; each checks a part of the goals. Raises InputError, on all, that names goal, field and place."""
        self.path = path
        self.in_memory = in_memory
        rank, world_size = world()
        repaired = 0
        with agree_on_errors():
            self.arrays = read_goals(path, in_memory)
            for goal in range(rank, CELLS, world_size):
                with name_goal(path, goal):
                    repaired += check_goal(goal, self.arrays[goal])
        self.repaired = int(reduce_sum([repaired])[0])

        # of each goal as many steps and streams as all of them have
        steps = []
        streams = []
        for arrays in self.arrays:
            steps.append(arrays["actions"].shape[0])
            streams.append(arrays["actions"].shape[1])
        self.steps = min(steps)
        self.shortest = steps.index(self.steps)
        self.longest = max(steps)
        self.streams = min(streams)
        if in_memory:
            self._decode_all()
        self.digest = self._make_digest()

    def _decode_all(self) -> None:
        """Replace the file's arrays by their decoded values."""
        # a fourth byte, so that a step is gathered as one 32-bit word
        shape = (CELLS, self.streams, self.steps)
        self.cells = np.zeros((*shape, 4), np.uint8)
        self.rewards = np.empty(shape, np.float32)
        steps = slice(self.steps)
        streams = slice(self.streams)
        for goal in range(CELLS):
            arrays = self.arrays.pop(0)
            cells, rewards = decode(arrays, steps, streams)
            self.cells[goal, ..., :3] = cells.swapaxes(0, 1)
            self.rewards[goal] = rewards.T

    def _make_digest(self) -> str:
        digest = hashlib.sha256()
        streams = np.arange(self.streams)
        steps = np.tile(np.arange(self.steps), (self.streams, 1))
        for goal in range(CELLS):
            goals = np.full(self.streams, goal)
            cells, rewards = self.take(goals, streams, steps)
            digest.update(cells.tobytes())
            digest.update(rewards.tobytes())
        return digest.hexdigest()[:12]

    def take(self, goals: ndarray, streams: ndarray, steps: ndarray) -> tuple[ndarray, ndarray]:
        """For B histories and steps (B, ...): cells (B, ..., 3) uint8 and rewards (B, ...) float32."""
        if self.in_memory:
            # one index of each step into all steps of all histories
            first = (goals * self.streams + streams) * self.steps
            index = (steps.T + first).T
            all_words = self.cells.view(np.uint32).ravel()
            words = np.take(all_words, index)
            cells = words[..., None].view(np.uint8)
            rewards = np.take(self.rewards.ravel(), index)
            return cells[..., :3], rewards

        # decode what lies between a history's first and last step that is asked for
        cells = np.empty((*steps.shape, 3), np.uint8)
        rewards = np.empty(steps.shape, np.float32)
        for k, wanted in enumerate(steps):
            first = wanted.min()
            near = slice(first, wanted.max() + 1)
            arrays = self.arrays[goals[k]]
            near_cells, near_rewards = decode(arrays, near, streams[k])
            cells[k] = near_cells[wanted - first]
            rewards[k] = near_rewards[wanted - first]
        return cells, rewards

    def learning_curve(self, goals: list[int]) -> ndarray:
        """(episodes, goals): the source algorithm's own return per episode, mean over the streams."""
        episodes = self.steps // HORIZON
        curves = []
        for goal in goals:
            if self.in_memory:
                rewards = self.rewards[goal]
                rewards = rewards.T
            else:
                rewards = self.arrays[goal]["rewards"]
            rewards = rewards[: episodes * HORIZON, : self.streams]
            rewards = rewards.reshape(episodes, HORIZON, -1)
            returns = rewards.sum(1, dtype=float)
            curves.append(returns.mean(1))
        return np.stack(curves, 1)


def decode(arrays: dict[str, ndarray], steps: slice, streams: slice | int) -> tuple[ndarray, ndarray]:
    """Cells (..., 3) uint8 of (cell, action, next cell), and rewards (...), of a goal's arrays.

    The next cell is where the action led, also where an episode's end was logged as the start of the one after.
    """
    chosen = (steps, streams)
    states = to_cells(arrays["states"][chosen])
    actions = arrays["actions"][chosen]
    actions = actions.astype(np.int64)
    next_states = NEXT[states, actions]
    cells = np.stack([states, actions, next_states], -1)
    rewards = arrays["rewards"][chosen]
    return cells.astype(np.uint8), rewards


# --- segments ---------------------------------------------------------------------------------------------------------


def hashed(seed: int, epoch: int, samples: ndarray, draw: int) -> ndarray:
    """A number in [0, 1) for each sample, a function of (seed, epoch, sample, draw) alone (splitmix64)."""
    sequence = np.random.SeedSequence([seed % 2**63, epoch, draw])
    key = sequence.generate_state(1, np.uint64)
    x = samples.astype(np.uint64)
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = x + key

    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    fraction = x.astype(np.float64) / 2.0**64
    return fraction * (1 - 2**-53)


class SegmentDataset(Dataset):
    """Pieces of histories: up to `max_depth` whole blocks of n_transit transitions, and the context after them.

    A sample is what an agent would hold at some step of a history: it ends at any step that leaves room for its number
    of blocks, and reaches as far back as they do, at most to the beginning. Depth and end are a function of (seed,
    epoch, sample); `epoch` must be set before each pass. A pass has about as many contexts as cover the histories.
    """

    def __init__(self, histories: Histories, goals: list[int], n_transit: int, max_depth: int, seed: int):
        """max_depth: as it is wanted; the histories may not be long enough for that."""
        self.histories = histories
        self.goals = np.array(goals)
        self.n_transit = n_transit
        self.wanted_depth = max_depth
        room = (histories.steps - 1) // n_transit
        self.max_depth = min(max_depth, room)
        self.slots = max(1, histories.steps // n_transit)
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        histories = len(self.goals) * self.histories.streams
        return histories * self.slots

    def draw(self, samples: ndarray) -> tuple[ndarray, ndarray, ndarray]:
        """(history, depth, end) of samples in this epoch; the context's last transition is end - 1."""
        which_depth = hashed(self.seed, self.epoch, samples, 0)
        which_end = hashed(self.seed, self.epoch, samples, 1)
        depth = which_depth * (self.max_depth + 1)
        depth = depth.astype(np.int64)
        end = self.choose_end(depth, which_end)
        return samples // self.slots, depth, end

    def choose_end(self, depth: ndarray, share: ndarray) -> ndarray:
        """Where segments of these depths end: share, in [0, 1), of the way from the first end there can be."""
        least = depth * self.n_transit + 1
        room = self.histories.steps + 1 - least
        more = share * room
        return least + more.astype(np.int64)

    def depths(self) -> ndarray:
        """How many samples of this epoch have 0, 1, ... blocks."""
        _, depth, _ = self.draw(np.arange(len(self)))
        return np.bincount(depth, minlength=self.max_depth + 1)

    def __getitems__(self, samples: list[int]) -> dict:
        """A batch as `batch` makes it, the deepest sample first, with `sample` (B,)."""
        samples = np.asarray(samples)
        history, depth, end = self.draw(samples)
        order = np.argsort(-depth, kind="stable")
        batch = self.batch(
            history=history[order],
            depth=depth[order],
            end=end[order],
        )
        batch["sample"] = torch.from_numpy(samples[order])
        return batch

    def batch(self, history: ndarray, depth: ndarray, end: ndarray) -> dict:
        """The segments of B histories that end before `end`, depths sorted from the largest.

        It is as InContextNet.forward takes it, with the target `action` (B, n_transit), -100 on padding.
        """
        places = np.arange(self.n_transit)
        blocks = np.arange(self.max_depth)
        compressed = depth * self.n_transit
        length = np.minimum(self.n_transit, end - compressed)

        # the steps (B, blocks + 1, n_transit) of the blocks and, last, of the context
        context_begin = end - length
        begin = np.empty((len(end), self.max_depth + 1), np.int64)
        begin[:, -1] = context_begin
        begin[:, :-1] = blocks * self.n_transit
        begin[:, :-1] += (context_begin - compressed)[:, None]
        steps = begin[..., None] + places

        # which of them the sample has; the others are zero in the batch
        real = np.empty(steps.shape, bool)
        has_block = depth[:, None] > blocks
        real[:, :-1] = has_block[..., None]
        real[:, -1] = places < length[:, None]
        last = end[:, None, None] - 1
        steps = np.where(real, steps, last)

        # read them
        streams = self.histories.streams
        goals = self.goals[history // streams]
        stream = history % streams
        cells, rewards = self.histories.take(goals, stream, steps)
        cells = cells * real[..., None]
        rewards = rewards * real
        action = cells[:, -1, :, 1].astype(np.int64)
        action[~real[:, -1]] = -100
        return {
            "cells": torch.from_numpy(cells),
            "rewards": torch.from_numpy(rewards),
            "depth": torch.from_numpy(depth),
            "compressed": has_block.sum(0).tolist(),
            "length": torch.from_numpy(length),
            "action": torch.from_numpy(action),
        }


def as_it_is(batch: dict) -> dict:
    """collate_fn of a data set that makes whole batches."""
    return batch


def make_loader(segments: SegmentDataset, batch: BatchSize, seed: int, num_workers: int) -> DataLoader:
    """This rank's segments, in micro-batches."""
    return create_distributed_dataloader(
        segments,
        batch.size,
        seed=seed,
        num_workers=num_workers,
        accumulation=batch.accumulation,
        effective_batch_size=batch.total,
        drop_last=False,
        collate_fn=as_it_is,
    )


# --- what a run needs -------------------------------------------------------------------------------------------------


class DarkroomData(NamedTuple):
    """What a run learns from, and the goals that it is tested on.

    split_seed: of the goals. segments: of the training goals' histories. fingerprint: a run is resumed on data of the
    same one only.
    """

    histories: Histories
    split_seed: int
    train_goals: list[int]
    unseen_goals: list[int]
    segments: SegmentDataset
    fingerprint: str


def read_darkroom(
    path: str,
    in_memory: bool,
    split_seed: int,
    n_transit: int,
    max_depth: int,
    seed: int,
) -> DarkroomData:
    """All ranks: the histories that --data names, split into goals. Raises InputError.

    split_seed: of the goals. max_depth: most compressions of a segment. seed: of depth and end of the segments.
    """
    with agree_on_errors():
        file = find_histories(path)
    histories = Histories(file, in_memory)
    steps = histories.steps
    if n_transit > steps:
        raise InputError(f"--n_transit {n_transit}: more than the {steps} steps of the histories; lower it")

    train_goals, unseen_goals = split_goals(split_seed)
    facts = [steps, histories.streams, train_goals, histories.digest]
    text = json.dumps(facts)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return DarkroomData(
        histories=histories,
        split_seed=split_seed,
        train_goals=train_goals,
        unseen_goals=unseen_goals,
        segments=SegmentDataset(histories, train_goals, n_transit, max_depth, seed),
        fingerprint=fingerprint[:12],
    )


def evaluation_batches(data: DarkroomData, goals: list[int], streams: int, batch_size: int) -> Iterator[dict]:
    """This rank's share of the segments on which the action accuracy of some goals is taken, the same at each call.

    Of the first histories of each goal, `streams` at most, one segment of every depth, its end spread over the history.
    """
    histories = data.histories
    trained = data.segments
    segments = SegmentDataset(
        histories,
        goals,
        n_transit=trained.n_transit,
        max_depth=trained.max_depth,
        seed=0,
    )
    depths = segments.max_depth + 1
    streams = min(streams, histories.streams)
    first = np.arange(len(goals)) * histories.streams
    chosen = np.add.outer(first, np.arange(streams)).ravel()

    # the deepest come first
    rank, world_size = world()
    count = len(chosen)
    for samples in EvalBatchSampler(count * depths, batch_size, rank, world_size):
        number, place = np.divmod(samples, count)
        depth = depths - 1 - number
        spread = (place * 0.618034) % 1
        end = segments.choose_end(depth, spread)
        yield segments.batch(chosen[place], depth, end)
