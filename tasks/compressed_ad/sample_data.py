"""Write learning histories for train.py: what a learner did in each task, from its first step on.

The file is OUT/datasets/history_<ENV>_<SOURCE>_alg-seed<SEED>.hdf5. Who learns, by --source:
  tabular   TD(0) on a table of state values, with a bonus for rare states and less and less chance; each stream alone
  ppo       of stable-baselines3, as published: the streams of a task train one model (requirements-dev.txt; hours)
  epsilon   no learner: an expert who knows the task, first all noise, at the end none (Zisman et al. 2023)
  search    no learner: one who knows the map, not the task, and errs with a fixed chance of 0 to --noise in each stream
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

# the tabular learner: how fast values change, what a reward one step later is worth, the bonus of a state never
# visited, which falls with the root of its visits, and the share of random actions at the first step and at the last
RATE, TD_DISCOUNT, BONUS, FIRST_CHANCE, LAST_CHANCE = 0.5, 0.9, 0.5, 0.1, 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this data set's flags."""
    add = parser.add_argument
    add("out", type=Path, help="folder to write; its datasets/ must not hold the file yet")
    add("--env", default="darkroom", help="darkroom, darkroom:7, key_to_door:5, gym:FrozenLake-v1")
    add("--source", choices=tuple(SOURCES), default="tabular", help="who learns; ppo takes hours")
    add("--streams", type=whole(1), default=100, help="histories of each task")
    add("--steps", type=whole(20), default=1000, help="steps of each history, in whole episodes")
    add("--noise", type=real(0, 1), default=0.3, help="highest error rate of --source search")
    add("--seed", type=int, default=42, help="of all that is drawn")


def write_sample_data(out: Path, env: str, source: str, streams: int, steps: int, noise: float, seed: int) -> None:
    """Write the histories, and print the learning curve. Raises InputError when the file is there."""
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
    """The actions, by `chance` a random one in their place."""
    return np.where(rng.random(len(action)) < chance, rng.integers(0, actions, len(action)), action)


def tabular(env: Env, task: np.ndarray, steps: int, seed: int) -> list[np.ndarray]:
    """Each learner knows the map; the rewards of its task only by having met them."""
    rng, n, episode = np.random.default_rng(seed), np.arange(len(task)), []
    values, visits = np.zeros((2, len(task), env.next.shape[1]), np.float32)

    def choose(t: int, state: np.ndarray) -> np.ndarray:
        around = n[:, None], env.next[task, state, :, 0]
        score = values[around] + BONUS / np.sqrt(1 + visits[around])
        # ties are broken by a little noise
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
    """Noise to expert: a share of random actions that falls from 1 to 0 over the history."""
    rng, best = np.random.default_rng(seed), env.best_actions()

    def choose(t: int, state: np.ndarray) -> np.ndarray:
        expert = (best[task, state] * rng.random((len(task), env.actions))).argmax(-1)
        return with_noise(expert, 1 - t / max(1, steps - 1), env.actions, rng)

    return play(env, task, steps, rng, choose)


def search(env: Env, task: np.ndarray, steps: int, seed: int, noise: float) -> list[np.ndarray]:
    """To the nearest unseen cell, and from a reward on the best way to it; each stream errs with its own chance."""
    rng, searcher = np.random.default_rng(seed), Search(env, task)
    chance = np.tile(np.linspace(0, noise, len(task) // env.tasks), env.tasks)

    def choose(t: int, state: np.ndarray) -> np.ndarray:
        return with_noise(searcher.choose(t, state), chance, env.actions, rng)

    return play(env, task, steps, rng, choose, searcher.learn)


def ppo(env: Env, task: np.ndarray, steps: int, seed: int) -> list[np.ndarray]:
    """As published, one model a task; a process for each core. Raises InputError without stable-baselines3."""
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
    """(states, actions, next states, rewards) of one task, each (steps, streams)."""
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecEnv

    class Streams(VecEnv):
        """All streams of the task, in NumPy; `log` has what happened at each step."""

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
            # the learner adds to the rewards of last steps
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
    # it learns in whole rollouts of 80 steps, and so may do some more than asked for
    PPO("MlpPolicy", world, device="cpu", **options).learn(steps * streams)
    return tuple(np.stack(part) for part in zip(*world.log[:steps], strict=True))


SOURCES = {"tabular": tabular, "ppo": ppo, "epsilon": epsilon, "search": search}


def write_histories(path: Path, env: Env, states, actions, after, rewards) -> None:
    """One group a task, in the original's layout; arrays (steps, tasks, streams). Raises RunError on a full disk."""
    import h5py

    places = env.places.astype(np.int8 if env.places.max() < 128 else np.int16)
    is_last = np.arange(1, len(rewards) + 1) % env.horizon == 0
    parts = {"states": places[states % env.cells], "next_states": places[after % env.cells]}
    parts |= {"actions": actions.astype(np.int8), "rewards": rewards.astype(np.float32)}
    parts["dones"] = np.broadcast_to(is_last[:, None, None], rewards.shape)
    # made in memory, since the HDF5 library dies on a full disk
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
