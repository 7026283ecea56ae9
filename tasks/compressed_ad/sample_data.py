"""Write learning histories (agents' recorded transitions in each task) to an HDF5 file for train.py.

The file is OUT/datasets/history_<ENV>_<SOURCE>_alg-seed<SEED>.hdf5. --source selects the agent to record:

  tabular   TD(0) on state values, with a bonus for rarely visited states; a separate learner for each history
  ppo       PPO from stable-baselines3, as in the published repository (guide 4); takes hours
  epsilon   an expert who knows the task; the fraction of random actions falls from 1 to 0 (Zisman et al. 2023)
  search    a searcher who knows the map but not the goal, with 0 to 30 % random actions
"""

import argparse
import io
import multiprocessing
from functools import partial
from pathlib import Path

import numpy as np

from tasks.compressed_ad.data import Env, Search, learning_curve, make_env, play
from utils.checkpoint import write_atomically
from utils.cli import InputError, RunError, whole

# tabular learner: learning rate, discount factor, exploration bonus, fraction of random actions at the first and last
# step
RATE, TD_DISCOUNT, BONUS, FIRST_EPSILON, LAST_EPSILON = 0.5, 0.9, 0.5, 0.1, 0.02
# highest fraction of random actions with --source search
SEARCH_ERRORS = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", type=Path, help="folder to write to; fails if the file exists in its datasets/")
    add("--env", default="darkroom", help="darkroom, darkroom:7, key_to_door:5, gym:FrozenLake-v1")
    add("--source", choices=tuple(SOURCES), default="tabular", help="agent that makes the histories; ppo takes hours")
    add("--streams", type=whole(1), default=100, help="histories per task")
    add("--steps", type=whole(20), default=1000, help="steps per history, rounded down to complete episodes")
    add("--seed", type=int, default=42, help="random seed")


def write_sample_data(out: Path, env: str, source: str, streams: int, steps: int, seed: int) -> None:
    """Write a file of learning histories into out/datasets; print the agents' mean returns.

    Raises InputError if the file already exists.
    """
    world = make_env(env)
    label = {"tabular": "TD", "ppo": "PPO"}.get(source, source)
    path = out / "datasets" / f"history_{env.replace(':', '_')}_{label}_alg-seed{seed}.hdf5"
    if path.exists():
        raise InputError(f"{path}: is there already; choose another folder or delete it")
    steps = max(1, steps // world.horizon) * world.horizon
    task = np.repeat(np.arange(world.tasks), streams)
    parts = SOURCES[source](world, task, steps, seed)
    write_histories(path, world, *(part.reshape(steps, world.tasks, streams) for part in parts))
    print(f"{path}: {world.tasks} tasks x {streams} streams x {steps} steps, by {source}")
    curve = learning_curve(parts[-1], world)
    points = ", ".join(f"{e}: {curve[e - 1]:.2f}" for e in (1, 2, 5, 10, 20, 50, 100, len(curve)) if e <= len(curve))
    lowest, highest = world.value(np.mean).mean(), world.value(np.max).mean()
    print(f"return in episode {points}; random policy {lowest:.2f}, optimum {highest:.2f}")


def with_errors(action: np.ndarray, error_rate, actions: int, rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random(len(action)) < error_rate, rng.integers(0, actions, len(action)), action)


def tabular(env: Env, task: np.ndarray, steps: int, seed: int) -> list[np.ndarray]:
    """Run TD(0) learners that know where each action leads, but not the rewards; return the result of play()."""
    rng, agent, episode = np.random.default_rng(seed), np.arange(len(task)), []
    values, visits = np.zeros((2, len(task), env.next.shape[1]), np.float32)

    def choose(t: int, state: np.ndarray) -> np.ndarray:
        reached = agent[:, None], env.next[task, state, :, 0]
        score = values[reached] + BONUS / np.sqrt(1 + visits[reached])
        # break ties at random
        score = score + 0.01 * rng.random((len(task), env.actions), np.float32)
        epsilon = FIRST_EPSILON + (LAST_EPSILON - FIRST_EPSILON) * t / steps
        return with_errors(score.argmax(1), epsilon, env.actions, rng)

    def learn(t: int, _, action: np.ndarray, next_state: np.ndarray, reward: np.ndarray) -> None:
        visits[agent, next_state] += 1
        episode.append((next_state, reward))
        if (t + 1) % env.horizon == 0:
            for state, reward in reversed(episode):
                best = values[agent[:, None], env.next[task, state, :, 0]].max(1)
                values[agent, state] += RATE * (reward + TD_DISCOUNT * best - values[agent, state])
            episode.clear()

    return play(env, task, steps, rng, choose, learn)


def epsilon(env: Env, task: np.ndarray, steps: int, seed: int) -> list[np.ndarray]:
    rng, best = np.random.default_rng(seed), env.best_actions()

    def choose(t: int, state: np.ndarray) -> np.ndarray:
        expert = (best[task, state] * rng.random((len(task), env.actions))).argmax(-1)
        return with_errors(expert, 1 - t / (steps - 1), env.actions, rng)

    return play(env, task, steps, rng, choose)


def search(env: Env, task: np.ndarray, steps: int, seed: int) -> list[np.ndarray]:
    rng, searcher = np.random.default_rng(seed), Search(env, task)
    error_rate = np.tile(np.linspace(0, SEARCH_ERRORS, len(task) // env.tasks), env.tasks)

    def choose(t: int, state: np.ndarray) -> np.ndarray:
        return with_errors(searcher.choose(t, state), error_rate, env.actions, rng)

    return play(env, task, steps, rng, choose, searcher.learn)


def ppo(env: Env, task: np.ndarray, steps: int, seed: int) -> list[np.ndarray]:
    """Train one PPO model per task, as in the published CompressedAD repository (guide 4), using all CPU cores.

    Returns [states, actions, next states, rewards], each (steps, tasks, streams). Raises InputError if
    stable-baselines3 is not installed.
    """
    try:
        import stable_baselines3  # noqa: F401
    except ImportError:
        raise InputError("--source ppo: needs stable-baselines3; pip install -r requirements-dev.txt") from None
    from tqdm import tqdm

    with multiprocessing.get_context("spawn").Pool() as pool:
        learn = partial(ppo_history, env, len(task) // env.tasks, steps, seed)
        histories = list(tqdm(pool.imap(learn, range(env.tasks)), "ppo", env.tasks))
    return [np.stack(parts, 1) for parts in zip(*histories, strict=True)]


def ppo_history(env: Env, streams: int, steps: int, seed: int, task: int) -> tuple[np.ndarray, ...]:
    """Train a PPO model on one task; return (states, actions, next states, rewards), each (steps, streams)."""
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    rng, high = np.random.default_rng(seed + task), env.coordinates.max(0).astype(np.float32)

    class Stream(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0 * high, high)
        action_space = gymnasium.spaces.Discrete(env.actions)

        def __init__(self):
            self.log = []

        def observe(self):
            return env.coordinates[self.state[0] % env.cells].astype(np.float32)

        def reset(self, seed=None, options=None):
            self.state = np.array([env.start])
            return self.observe(), {}

        def step(self, action):
            state = self.state
            self.state, reward = env.step(task, state, action, rng)
            self.log.append((state[0], action, self.state[0], reward[0]))
            return self.observe(), reward[0], False, len(self.log) % env.horizon == 0, {}

    torch.set_num_threads(1)
    recorded = [Stream() for _ in range(streams)]
    options = {"n_steps": 80, "batch_size": 40, "n_epochs": 20, "learning_rate": 3e-4, "seed": seed + task}
    vectorized = DummyVecEnv([lambda stream=stream: stream for stream in recorded])
    PPO("MlpPolicy", vectorized, device="cpu", **options).learn(steps * streams)
    # PPO collects rollouts of 80 steps, so an environment's log may be longer than `steps`
    logs = zip(*(zip(*stream.log[:steps], strict=True) for stream in recorded), strict=True)
    return tuple(np.stack(part, 1) for part in logs)


SOURCES = {"tabular": tabular, "ppo": ppo, "epsilon": epsilon, "search": search}


def write_histories(path: Path, env: Env, states, actions, next_states, rewards) -> None:
    """Write histories as an HDF5 file, in the layout shown at the top of tasks/compressed_ad/data.py.

    states, actions, next_states, rewards: (steps, tasks, streams). Raises RunError if the file cannot be written.
    """
    import h5py

    coordinates = env.coordinates.astype(np.int8 if env.coordinates.max() < 128 else np.int16)
    is_last = np.arange(1, len(rewards) + 1) % env.horizon == 0
    parts = {"states": coordinates[states % env.cells], "next_states": coordinates[next_states % env.cells]}
    parts |= {"actions": actions.astype(np.int8), "rewards": rewards.astype(np.float32)}
    parts["dones"] = np.broadcast_to(is_last[:, None, None], rewards.shape)
    # build the file in memory, because the HDF5 library crashes when the disk is full
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file.attrs["env"] = env.name
        for name, part in parts.items():
            for task in range(env.tasks):
                file[f"{task}/{name}"] = part[:, task]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(memory.getbuffer()))
    except OSError as error:
        raise RunError(f"{path}: not written ({error.strerror}); make room") from None
