"""Agents that act in Darkroom with nothing but their own past to go by.

They act in float64, so that who acts beside whom, or on which GPU, changes no action.
"""

import copy
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from old.distributed_utils import StopSignal, any_rank, reduce_sum, world
from old.phase_utils import doing
from tasks.compressed_ad.darkroom import ACTIONS, HORIZON, NEXT, START
from tasks.compressed_ad.model import InContextNet

# The random numbers of acting are apart from all others of a seed.
ACTING = 5


class Agents:
    """Agents that act side by side, each by its own past; keys and values of what they have seen are kept."""

    def __init__(self, model: InContextNet, count: int, forget: int):
        """forget: how many transitions to drop at once from a full context, by a model that does not compress."""
        self.model = model
        self.count = count
        self.forget = forget
        self.latents: Tensor | None = None

        # the context, a transition after the other: (count, 1, 3), and its reward (count, 1)
        self.cells: list[Tensor] = []
        self.rewards: list[Tensor] = []

        # each layer's keys and values, and how many transitions of the context are not in them yet
        self.past: list[Tensor] | None = None
        self.new = 0

    @torch.no_grad()
    def act(self, cells: Tensor) -> Tensor:
        """Logits (count, ACTIONS) for the cells (count,) that the agents are in."""
        model = self.model
        length = len(self.cells)
        x = model.queries(cells[:, None], length)
        if self.new:
            first = length - self.new
            seen = torch.cat(self.cells[first:], 1)
            rewards = torch.cat(self.rewards[first:], 1)
            tokens = model.tokens(seen, rewards, first)
            x = torch.cat([tokens, x], 1)

        # each row sees all that is kept, the rows before it and itself
        rows = self.new + 1
        kept = 0
        if self.past:
            kept = self.past[0].shape[3]
        mask = torch.ones(rows, kept + rows, device=cells.device)
        mask = mask.tril(kept).bool()
        out, own = model.decode(x, mask, self.past)
        if self.new:
            self._keep(own)
        return model.head(out[:, -1])

    def _keep(self, own: list[Tensor]) -> None:
        """Add the keys and values of what is new, without those of the query behind it."""
        for layer, part in enumerate(own):
            part = part[:, :, :, :-1]
            if self.past:
                part = torch.cat([self.past[layer], part], 3)
            own[layer] = part
        self.past = own
        self.new = 0

    @torch.no_grad()
    def observe(self, cells: Tensor, rewards: Tensor) -> None:
        """Take in the transitions (count, 3) of (cell, action, next cell) and rewards (count,) that followed."""
        model = self.model
        rewards = rewards.to(model.positions.dtype)
        self.cells.append(cells[:, None])
        self.rewards.append(rewards[:, None])
        self.new += 1
        if len(self.cells) < model.n_transit:
            return

        # the context is full: compress it, or forget its oldest part
        if model.n_latent:
            seen = torch.cat(self.cells, 1)
            rewards = torch.cat(self.rewards, 1)
            tokens = model.tokens(seen, rewards)
            self.latents = model.compress(self.latents, tokens)
            _, self.past = model.decode(self.latents, None)
            self.cells = []
            self.rewards = []
        else:
            # every position changes, so that all is encoded anew at the next act()
            self.cells = self.cells[self.forget :]
            self.rewards = self.rewards[self.forget :]
            self.past = None
        self.new = len(self.cells)


class ActedEpisodes(NamedTuple):
    """What agents did on some goals.

    returns: (goals, agents, episodes). paths: (goals, 2, HORIZON + 1), the cells that each goal's first agent went
    through in its first and last episode.
    """

    returns: np.ndarray
    paths: np.ndarray


@doing("evaluating agents", has_bar=True)
@torch.no_grad()
def act_in_context(
    model: InContextNet,
    goals: list[int],
    agents_per_goal: int,
    episodes: int,
    seed: int,
    batch_size: int,
    stop: StopSignal | None = None,
) -> ActedEpisodes | None:
    """All ranks: let agents act on each of the goals; None after a signal to any rank.

    The same on all ranks, at any world size: an agent's chance is a function of (seed, goal, agent) alone.
    batch_size: agents that act side by side.
    """
    rank, world_size = world()
    device = next(model.parameters()).device
    actor = copy.deepcopy(model).double().eval()
    forget = max(1, min(HORIZON, model.n_transit // 2))
    count = len(goals) * agents_per_goal
    returns = torch.zeros(count, episodes, dtype=torch.float64)
    paths = torch.zeros(len(goals), 2, HORIZON + 1, dtype=torch.float64)

    # agents are numbered goal by goal; the ranks take them in turn
    local = range(rank, count, world_size)
    quiet = rank > 0 or not sys.stderr.isatty()
    for first in range(0, len(local), batch_size):
        numbers = list(local[first : first + batch_size])
        chosen = [divmod(number, agents_per_goal) for number in numbers]
        generators = [agent_generator(seed, goals[place], agent) for place, agent in chosen]
        goal = torch.tensor([goals[place] for place, _ in chosen])
        goal = goal.to(device)
        agents = Agents(actor, len(numbers), forget)
        for episode in with_progress_bar(range(episodes), quiet):
            if stop and stop.code:
                break
            if rank == 0 and quiet and episode and episode % 100 == 0:
                print(f"agents {first + 1} to {first + len(numbers)}: episode {episode}/{episodes}", flush=True)
            rewards, path = play_episode(agents, goal, gumbel_noise(generators, device))
            returns[numbers, episode] = rewards.cpu()

            # keep the way of each goal's first agent
            if episode in (0, episodes - 1):
                path = path.double().cpu()
                for row, (place, agent) in enumerate(chosen):
                    if agent == 0:
                        paths[place, int(episode > 0)] = path[row]

    if stop and any_rank(bool(stop.code)):
        return None
    shape = (len(goals), agents_per_goal, episodes)
    return ActedEpisodes(
        returns=reduce_sum(returns).numpy().reshape(shape),
        paths=reduce_sum(paths).numpy().astype(int),
    )


def with_progress_bar(episodes: range, quiet: bool) -> tqdm:
    """The episodes, with a progress bar that is gone at the end."""
    return tqdm(
        episodes,
        desc="in context",
        unit="episode",
        disable=quiet,
        leave=False,
    )


def agent_generator(seed: int, goal: int, agent: int) -> np.random.Generator:
    """The random numbers of one agent on a goal."""
    entropy = [seed % 2**63, ACTING, goal, agent]
    return np.random.default_rng(entropy)


def gumbel_noise(generators: list[np.random.Generator], device: torch.device) -> Tensor:
    """(HORIZON, agents, ACTIONS): the most likely action plus this noise is a draw from the softmax."""
    shape = (HORIZON, ACTIONS)
    draws = [generator.random(shape) for generator in generators]
    uniform = np.stack(draws, 1)
    uniform = np.maximum(uniform, 1e-300)
    noise = -np.log(-np.log(uniform))
    return torch.from_numpy(noise).to(device)


def play_episode(agents: Agents, goal: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Each agent's return (agents,) in one episode, and the cells (agents, HORIZON + 1) that it went through."""
    follow = torch.from_numpy(NEXT).to(goal.device)
    cell = torch.full_like(goal, START)
    total = torch.zeros_like(goal, dtype=torch.float64)
    path = [cell]
    for step_noise in noise:
        logits = agents.act(cell)
        action = (logits + step_noise).argmax(-1)
        next_cell = follow[cell, action]
        reward = (next_cell == goal).double()
        transition = torch.stack([cell, action, next_cell], 1)
        agents.observe(transition, reward)
        total = total + reward
        cell = next_cell
        path.append(cell)
    return total, torch.stack(path, 1)
