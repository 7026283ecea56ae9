"""Write learning histories for train.py: the transitions of agents in each task, in the published file layout.

The file is OUT/datasets/history_<ENV>_<SOURCE>_alg-seed<SEED>.hdf5. --source selects the agent:
  tabular   TD(0) on state values with a bonus for rare states and decaying random exploration; one learner per stream
  ppo       PPO of stable-baselines3, as published: all streams of a task train one model (requirements-dev.txt; hours)
  epsilon   an expert who knows the task; the share of random actions falls from 1 to 0 (Zisman et al. 2023)
  search    a searcher who knows the map but not the task; each stream has a fixed error rate from 0 to --noise
"""

import argparse
import io
import multiprocessing
from functools import partial
from pathlib import Path

import numpy as np

from tasks.compressed_ad.data import Env, Search, learning_curve, make_env, play
from utils.checkpoint import write_atomically
from utils.cli import InputError, RunError, real, whole

# tabular learner: learning rate, discount, bonus of an unvisited state (falls with the square root of visits), share of
# random actions at the first and last step
RATE, TD_DISCOUNT, BONUS, FIRST_CHANCE, LAST_CHANCE = 0.5, 0.9, 0.5, 0.1, 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", type=Path, help="folder to write to; fails if the file exists in its datasets/")
    add("--env", default="darkroom", help="darkroom, darkroom:7, key_to_door:5, gym:FrozenLake-v1")
    add("--source", choices=tuple(SOURCES), default="tabular", help="agent that makes the histories; ppo takes hours")
    add("--streams", type=whole(1), default=100, help="histories per task")
    add("--steps", type=whole(20), default=1000, help="steps per history, rounded down to complete episodes")
    add("--noise", type=real(0, 1), default=0.3, help="highest error rate of --source search")
    add("--seed", type=int, default=42, help="random seed")


def write_sample_data(out: Path, env: str, source: str, streams: int, steps: int, noise: float, seed: int) -> None:
    """Write the histories and print the learning curve. Raises InputError if the file exists."""
    world = make_env(env)
    label = {"tabular": "TD", "ppo": "PPO"}.get(source, source)
    path = out / "datasets" / f"history_{env.replace(':', '_')}_{label}_alg-seed{seed}.hdf5"
    if path.exists():
        raise InputError(f"{path}: is there already; choose another folder or delete it")
    steps = max(1, steps // world.horizon) * world.horizon
    task = np.repeat(np.arange(world.tasks), streams)
    options = {"noise": noise} if source == "search" else {}
    parts = SOURCES[source](world, task, steps, seed, **options)
    write_histories(path, world, *(part.reshape(steps, world.tasks, streams) for part in parts))
    print(f"{path}: {world.tasks} tasks x {streams} streams x {steps} steps, by {source}")
    curve = learning_curve(parts[-1], world)
    points = ", ".join(f"{e}: {curve[e - 1]:.2f}" for e in (1, 2, 5, 10, 20, 50, 100, len(curve)) if e <= len(curve))
    lowest, highest = world.value(np.mean).mean(), world.value(np.max).mean()
    print(f"return in episode {points}; random policy {lowest:.2f}, optimum {highest:.2f}")


def with_noise(action: np.ndarray, chance, actions: int, rng: np.random.Generator) -> np.ndarray:
    """Replace each action by a random one with probability `chance`."""
    return np.where(rng.random(len(action)) < chance, rng.integers(0, actions, len(action)), action)


def tabular(env: Env, task: np.ndarray, steps: int, seed: int) -> list[np.ndarray]:
    """Run tabular TD(0) learners, which know the map but learn rewards only by receiving them."""
    rng, n, episode = np.random.default_rng(seed), np.arange(len(task)), []
    values, visits = np.zeros((2, len(task), env.next.shape[1]), np.float32)

    def choose(t: int, state: np.ndarray) -> np.ndarray:
        around = n[:, None], env.next[task, state, :, 0]
        score = values[around] + BONUS / np.sqrt(1 + visits[around])
        # noise to break ties
        score = score + 0.01 * rng.random((len(n), env.actions), np.float32)
        chance = FIRST_CHANCE + (LAST_CHANCE - FIRST_CHANCE) * t / steps
        return with_noise(score.argmax(1), chance, env.actions, rng)

    def learn(t: int, _, action: np.ndarray, after: np.ndarray, reward: np.ndarray) -> None:
        visits[n, after] += 1
        episode.append((after, reward))
        if (t + 1) % env.horizon == 0:
            for state, gain in reversed(episode):
                around = values[n[:, None], env.next[task, state, :, 0]]
                values[n, state] += RATE * (gain + TD_DISCOUNT * around.max(1) - values[n, state])
            episode.clear()

    return play(env, task, steps, rng, choose, learn)


def epsilon(env: Env, task: np.ndarray, steps: int, seed: int) -> list[np.ndarray]:
    """Run an expert whose share of random actions falls from 1 to 0 over the history."""
    rng, best = np.random.default_rng(seed), env.best_actions()

    def choose(t: int, state: np.ndarray) -> np.ndarray:
        expert = (best[task, state] * rng.random((len(task), env.actions))).argmax(-1)
        return with_noise(expert, 1 - t / max(1, steps - 1), env.actions, rng)

    return play(env, task, steps, rng, choose)


def search(env: Env, task: np.ndarray, steps: int, seed: int, noise: float) -> list[np.ndarray]:
    """Run Search with random actions at a rate of 0 to `noise`, fixed for each stream."""
    rng, searcher = np.random.default_rng(seed), Search(env, task)
    chance = np.tile(np.linspace(0, noise, len(task) // env.tasks), env.tasks)

    def choose(t: int, state: np.ndarray) -> np.ndarray:
        return with_noise(searcher.choose(t, state), chance, env.actions, rng)

    return play(env, task, steps, rng, choose, searcher.learn)


def ppo(env: Env, task: np.ndarray, steps: int, seed: int) -> list[np.ndarray]:
    """Train one PPO model per task, as published, on all cores. Raises InputError without stable-baselines3."""
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
    """Train PPO on one task; return its (states, actions, next states, rewards), each (steps, streams)."""
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecEnv

    class Streams(VecEnv):
        """Vectorized environment for all streams of the task; `log` records every step."""

        def __init__(self):
            self.log, self.rng, self.t = [], np.random.default_rng(seed + task), 0
            high = env.places.max(0).astype(np.float32)
            super().__init__(streams, gymnasium.spaces.Box(0 * high, high), gymnasium.spaces.Discrete(env.actions))

        def seen(self):
            return env.places[self.state % env.cells].astype(np.float32)

        def reset(self):
            self.state = np.full(streams, env.start)
            return self.seen()

        def step_async(self, actions):
            self.action = actions

        def step_wait(self):
            after, reward = env.step(np.full(streams, task), self.state, self.action, self.rng)
            # copied, because PPO adds to the rewards of an episode's last step in place
            self.log.append((self.state, self.action, after, reward.copy()))
            self.t += 1
            self.state = after
            done = self.t % env.horizon == 0
            end = [{"terminal_observation": place, "TimeLimit.truncated": True} for place in self.seen()]
            info = end if done else [{} for _ in range(streams)]
            return (self.reset() if done else self.seen()), reward, np.full(streams, done), info

        def close(self):
            pass

        def env_is_wrapped(self, wrapper_class, indices=None):
            return [False] * streams

        def get_attr(self, name, indices=None):
            return [getattr(self, name, None)] * streams

        env_method = set_attr = None

    torch.set_num_threads(1)
    world = Streams()
    options = {"n_steps": 80, "batch_size": 40, "n_epochs": 20, "learning_rate": 3e-4, "seed": seed + task}
    # PPO runs complete rollouts of 80 steps, so it may exceed `steps`
    PPO("MlpPolicy", world, device="cpu", **options).learn(steps * streams)
    return tuple(np.stack(part) for part in zip(*world.log[:steps], strict=True))


SOURCES = {"tabular": tabular, "ppo": ppo, "epsilon": epsilon, "search": search}


def write_histories(path: Path, env: Env, states, actions, after, rewards) -> None:
    """Write arrays (steps, tasks, streams) in the published layout, one group per task. Raises RunError if the disk is
    full."""
    import h5py

    places = env.places.astype(np.int8 if env.places.max() < 128 else np.int16)
    is_last = np.arange(1, len(rewards) + 1) % env.horizon == 0
    parts = {"states": places[states % env.cells], "next_states": places[after % env.cells]}
    parts |= {"actions": actions.astype(np.int8), "rewards": rewards.astype(np.float32)}
    parts["dones"] = np.broadcast_to(is_last[:, None, None], rewards.shape)
    # built in memory, because the HDF5 library crashes on a full disk
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
