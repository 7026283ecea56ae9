"""Learning histories of Darkroom by PPO of stable-baselines3, as published."""

import functools
import multiprocessing

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from old.hardware_utils import usable_cores
from tasks.compressed_ad.darkroom import ACTIONS, CELLS, GRID, HORIZON, NEXT, PLACES, START
from tasks.compressed_ad.sample_data import Transitions


class Darkroom(VecEnv):
    """All streams of one goal, in NumPy; `log` has the states, actions and next states of each step."""

    def __init__(self, goal: int, streams: int):
        # The base class's constructor asks for get_attr, which needs the number of streams.
        self.goal = goal
        self.streams = streams
        self.log: list[Transitions] = []
        space = gymnasium.spaces.Box(0, GRID - 1, (2,), np.float32)
        actions = gymnasium.spaces.Discrete(ACTIONS)
        super().__init__(streams, space, actions)

    def reset(self):
        self.time = 0
        self.state = np.full(self.streams, START)
        return self.places()

    def step_async(self, actions):
        self.actions = actions

    def step_wait(self):
        next_state = NEXT[self.state, self.actions]
        self.log.append(Transitions(self.state, self.actions, next_state))
        self.time += 1
        self.state = next_state
        rewards = next_state == self.goal
        rewards = rewards.astype(np.float32)

        # All streams end together. The last place goes along in `info`, since the next episode has begun by then.
        done = self.time % HORIZON == 0
        info = [{} for _ in range(self.streams)]
        if done:
            last = self.places()
            info = [{"terminal_observation": place, "TimeLimit.truncated": True} for place in last]
            self.state = np.full(self.streams, START)
        return self.places(), rewards, np.full(self.streams, done), info

    def places(self) -> np.ndarray:
        """What is observed: the (streams, 2) coordinates."""
        return PLACES[self.state].astype(np.float32)

    # The rest is asked for by the base class.

    def close(self):
        pass

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.streams

    def env_method(self, method_name, *args, indices=None, **kwargs):
        raise NotImplementedError(method_name)

    def get_attr(self, attr_name, indices=None):
        return [getattr(self, attr_name, None)] * self.streams

    def set_attr(self, attr_name, value, indices=None):
        raise NotImplementedError(attr_name)


def ppo_history(goal: int, streams: int, steps: int, seed: int) -> Transitions:
    """The histories of one goal, (steps, streams); one model learns from all streams."""
    torch.set_num_threads(1)
    darkroom = Darkroom(goal, streams)
    learner = PPO(
        "MlpPolicy",
        darkroom,
        device="cpu",
        n_steps=80,
        batch_size=40,
        n_epochs=20,
        learning_rate=3e-4,
        seed=seed + goal,
    )

    # It learns in whole rollouts of 80 steps, and so may do some more than asked for.
    learner.learn(steps * streams)
    log = darkroom.log[:steps]
    return Transitions(
        states=np.stack([step.states for step in log]).astype(np.uint8),
        actions=np.stack([step.actions for step in log]).astype(np.uint8),
        next_states=np.stack([step.next_states for step in log]).astype(np.uint8),
    )


def ppo_histories(streams: int, steps: int, seed: int) -> Transitions:
    """The histories of every goal, (steps, goals, streams); a process for each core."""
    learn = functools.partial(ppo_history, streams=streams, steps=steps, seed=seed)
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(usable_cores(), CELLS)) as pool:
        goals = pool.imap(learn, range(CELLS))
        histories = list(tqdm(goals, total=CELLS, desc="ppo", unit="goal"))

    return Transitions(
        states=np.stack([history.states for history in histories], 1),
        actions=np.stack([history.actions for history in histories], 1),
        next_states=np.stack([history.next_states for history in histories], 1),
    )
