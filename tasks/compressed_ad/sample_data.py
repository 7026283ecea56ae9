"""Write learning histories of Darkroom for train.py: what a learner did for each of the 81 goals, from its first step.

The file is datasets/history_darkroom_<SOURCE>_alg-seed<SEED>.hdf5. With `tabular` each stream learns alone, by TD(0) on
a table of state values with a bonus for rare states and less and less chance. With `ppo` the streams of a goal train
one model together.
"""

import argparse
import importlib.util
import io
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from old.cli_utils import InputError, RunError, whole
from tasks.compressed_ad.darkroom import (
    ACTIONS,
    CELLS,
    HORIZON,
    NEXT,
    PLACES,
    START,
    optimal_return,
    random_return,
)

# The tabular learner: how fast values change, what a reward one step later is worth, and the bonus of a cell never
# visited, which falls with the root of its visits.
TD_LEARNING_RATE = 0.5
TD_DISCOUNT = 0.9
TD_BONUS = 0.5

# Its share of random actions, at the first step and at the last.
FIRST_CHANCE = 0.1
LAST_CHANCE = 0.02

# Of the learning curve that is printed.
SHOWN_EPISODES = (1, 2, 5, 10, 20, 50, 100)


class Transitions(NamedTuple):
    """What learners did at each step, as uint8 cells and actions."""

    states: np.ndarray
    actions: np.ndarray
    next_states: np.ndarray


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this data set's flags."""
    add = parser.add_argument
    learners = "tabular TD, all at once; ppo of stable-baselines3 (requirements-dev.txt), about a minute a goal"
    add("out", type=Path, help="folder to write; its datasets/ must not hold the file yet")
    add("--source", choices=("tabular", "ppo"), default="tabular", help=f"who learns: {learners}")
    add("--streams", type=whole(1), default=100, help="histories of each goal")
    add("--steps", type=whole(20), default=1000, help="steps of each history; 20 make an episode")
    add("--seed", type=int, default=42)


def write_sample_data(out: Path, source: str, streams: int, steps: int, seed: int) -> None:
    """Write the histories, and print the learning curve. Raises InputError when the file is there."""
    learner = {"tabular": "TD", "ppo": "PPO"}[source]
    path = out / "datasets" / f"history_darkroom_{learner}_alg-seed{seed}.hdf5"
    if path.exists():
        raise InputError(f"{path}: is there already; choose another folder or delete it")

    # The learners of all goals, on axes of steps, goals and streams.
    if source == "tabular":
        flat = tabular_histories(range(CELLS), streams, steps, seed)
        parts = [part.reshape(steps, CELLS, streams) for part in flat]
        histories = Transitions._make(parts)
    else:
        if importlib.util.find_spec("stable_baselines3") is None:
            raise InputError("--source ppo: needs stable-baselines3; pip install -r requirements-dev.txt")
        from tasks.compressed_ad.ppo_histories import ppo_histories

        histories = ppo_histories(streams, steps, seed)

    # A step is rewarded that ends on the goal.
    goals = np.arange(CELLS)
    rewards = histories.next_states == goals[:, None]
    write_histories(path, histories, rewards)
    print(f"{path}: {CELLS} goals x {streams} streams x {steps} steps, by {source}")
    print_learning_curve(rewards)


def tabular_histories(goals, streams: int, steps: int, seed: int) -> Transitions:
    """The histories of len(goals) * streams learners, (steps, learners).

    Each knows the rewards of one goal only by having met them.
    """
    from tqdm import tqdm

    rng = np.random.default_rng(seed)
    count = len(goals) * streams
    goal = np.repeat(np.asarray(goals), streams)
    learners = np.arange(count)
    values, visits = np.zeros((2, count, CELLS), np.float32)
    parts = np.empty((3, steps, count), np.uint8)
    histories = Transitions._make(parts)

    state = np.full(count, START)
    hidden = not sys.stderr.isatty()
    for step in tqdm(range(steps), desc="tabular", unit="step", disable=hidden):
        # The action that leads to the best cell; ties are broken by a little noise.
        around = learners[:, None], NEXT[state]
        bonus = TD_BONUS / np.sqrt(1 + visits[around])
        score = values[around] + bonus
        noise = rng.random((count, ACTIONS), np.float32)
        score = score + 0.01 * noise
        action = score.argmax(1)

        # Now and then a random one instead.
        change = LAST_CHANCE - FIRST_CHANCE
        chance = FIRST_CHANCE + change * step / steps
        is_random = rng.random(count) < chance
        random_action = rng.integers(0, ACTIONS, count)
        action = np.where(is_random, random_action, action)

        # Take the step.
        histories.states[step] = state
        histories.actions[step] = action
        state = NEXT[state, action]
        histories.next_states[step] = state
        visits[learners, state] += 1

        # An episode is over: learn from it, and go back to the start.
        if (step + 1) % HORIZON == 0:
            begin = step + 1 - HORIZON
            episode = histories.next_states[begin : step + 1]
            back_up(values, goal, episode)
            state = np.full(count, START)
    return histories


def back_up(values: np.ndarray, goal: np.ndarray, episode: np.ndarray) -> None:
    """Update the values along an episode's cells, from its end; values is (learners, cells)."""
    learners = np.arange(len(values))
    for cell in episode[::-1]:
        around = values[learners[:, None], NEXT[cell]]
        target = (cell == goal) + TD_DISCOUNT * around.max(1)
        change = target - values[learners, cell]
        values[learners, cell] += TD_LEARNING_RATE * change


def write_histories(path: Path, histories: Transitions, rewards: np.ndarray) -> None:
    """Write one group a goal; rewards are (steps, goals, streams). Raises RunError on a full disk."""
    import h5py

    from old.checkpoint_utils import write_atomically

    steps, goals, streams = rewards.shape
    step = np.arange(1, steps + 1)
    is_last = step[:, None] % HORIZON == 0
    dones = np.broadcast_to(is_last, (steps, streams))
    places = PLACES.astype(np.int8)

    # The file is made in memory, since the HDF5 library dies on a full disk. Its data sets are contiguous, so that
    # they can be mapped.
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        for goal in range(goals):
            group = file.create_group(str(goal))
            states = histories.states[:, goal]
            next_states = histories.next_states[:, goal]
            actions = histories.actions[:, goal]
            goal_rewards = rewards[:, goal]

            group["states"] = places[states]
            group["next_states"] = places[next_states]
            group["actions"] = actions.astype(np.int8)
            group["dones"] = dones
            group["rewards"] = goal_rewards.astype(np.float32)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(memory.getbuffer()))
    except OSError as error:
        raise RunError(f"{path}: not written ({error.strerror}); make room") from None


def print_learning_curve(rewards: np.ndarray) -> None:
    """Print the mean return in some episodes, and a warning when the last are no better than the first."""
    episodes = len(rewards) // HORIZON
    rewards = rewards[: episodes * HORIZON]
    rewards = rewards.reshape(episodes, HORIZON, -1)
    returns = rewards.sum(1)
    curve = returns.mean(1)

    # Some episodes, and the last one.
    shown = [episode for episode in SHOWN_EPISODES if episode < episodes]
    shown.append(episodes)
    points = [f"{episode}: {curve[episode - 1]:.2f}" for episode in shown]
    random = random_return(range(CELLS))
    optimum = optimal_return(range(CELLS))
    print(f"return in episode {', '.join(points)}; random policy {random.mean():.2f}, optimum {optimum.mean():.2f}")

    # Compare the last tenth with the first episode.
    tenth = max(1, episodes // 10)
    last_return = curve[-tenth:].mean()
    if episodes > 1 and last_return <= curve[0]:
        print("warning: the source has not learned anything yet; give more --steps", file=sys.stderr)
