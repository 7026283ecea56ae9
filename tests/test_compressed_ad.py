"""Guide 4: environments, histories, segments, model and acting against references of their own; the script as a user
runs it."""

import json
import math
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import train as script
from tasks.compressed_ad import data as ad
from tasks.compressed_ad import report, sample_data
from utils.cli import InputError

ROOT = Path(__file__).resolve().parents[1]
DARKROOM = ad.make_env("darkroom")


class Here:
    """What acting needs of a run."""

    position = Namespace(step=0)

    def alive(self, place: str) -> None:
        pass


def small_args(**more) -> Namespace:
    flags = {"tf_n_embd": 24, "tf_n_layer": 2, "tf_n_head": 3, "tf_dim_feedforward": 32, "encoder_n_layer": 2}
    flags |= {"n_transit": 50, "n_latent": 5, "shift": 0, "seed": 0, "temperature": 1.0, "test_batch_size": 256}
    flags |= {"max_compression_depth": 3, "from_start": 0.0, "objective": "ad", "model": "compressed_ad"}
    return Namespace(**flags | more)


def small_model(n_latent: int = 5, n_transit: int = 50, seed: int = 0, env=DARKROOM, **more) -> script.InContextNet:
    """With weights large enough that everything that is seen has a say in the output."""
    torch.manual_seed(seed)
    model = script.InContextNet(env, small_args(n_latent=n_latent, n_transit=n_transit, **more)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


# --- model and acting -------------------------------------------------------------------------------------------------


def made_up(count: int, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Transitions (count, steps, 3) and rewards (count, steps) without any sense."""
    rng = torch.Generator().manual_seed(seed)
    cells = torch.randint(0, 81, (count, steps, 3), generator=rng)
    cells[..., 1] %= 5
    rewards = torch.randint(0, 2, (count, steps), generator=rng)
    return cells.to(torch.uint8), rewards.double()


def batch_of(cells, rewards, depth: int, n: int, length: int) -> dict:
    """Everything as one segment of `depth` blocks and a context of `length`, padded with noise up to 3 blocks."""
    size = len(cells)
    padded_cells, _ = made_up(size, 4 * n, 99)
    _, padded_rewards = made_up(size, 4 * n, 98)
    padded_cells = padded_cells.unflatten(1, (4, n))
    padded_rewards = padded_rewards.unflatten(1, (4, n))
    for block in range(depth):
        steps = slice(block * n, (block + 1) * n)
        padded_cells[:, block] = cells[:, steps]
        padded_rewards[:, block] = rewards[:, steps]

    # the context is last
    steps = slice(depth * n, depth * n + length)
    padded_cells[:, 3, :length] = cells[:, steps]
    padded_rewards[:, 3, :length] = rewards[:, steps]
    return {
        "cells": padded_cells,
        "rewards": padded_rewards,
        "depth": torch.full((size,), depth),
        "length": torch.full((size,), length),
        "shift": torch.zeros(size, 2, dtype=torch.long),
        "compressed": [size if block < depth else 0 for block in range(3)],
    }


def norm_by_hand(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)


def layer_by_hand(block, x: Tensor, memory: Tensor | None, allowed: Tensor) -> Tensor:
    """A layer for one agent, head by head; allowed: True where a row of x may look."""
    seen = x if memory is None else torch.cat([memory, x])
    query = block.query(norm_by_hand(x, block.norm))
    key_value = block.key_value(norm_by_hand(seen, block.norm))
    key, value = key_value.chunk(2, -1)

    # each head by itself
    queries = query.chunk(block.heads, -1)
    keys = key.chunk(block.heads, -1)
    values = value.chunk(block.heads, -1)
    parts = []
    for q, k, v in zip(queries, keys, values, strict=True):
        scores = q @ k.T / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~allowed, -math.inf)
        weights = scores.softmax(-1)
        parts.append(weights @ v)
    attended = torch.cat(parts, -1)
    x = x + block.out(attended)
    return x + block.mlp(block.norm_mlp(x))


def tokens_by_hand(model: script.InContextNet, cells: Tensor, rewards: Tensor) -> Tensor:
    """The tokens of one agent's transitions."""
    if not len(cells):
        return torch.empty(0, model.positions.shape[1], dtype=torch.float64)
    before = cells[:, 0].long()
    after = cells[:, 2].long()
    actions = cells[:, 1].long()

    # row and column from -1 to 1
    facts = [
        before // 9 / 4 - 1,
        before % 9 / 4 - 1,
        *F.one_hot(actions, 5).T,
        rewards,
        after // 9 / 4 - 1,
        after % 9 / 4 - 1,
    ]
    facts = torch.stack([fact.double() for fact in facts], -1)
    linear, norm = model.embed
    embedded = norm_by_hand(linear(facts), norm)
    return embedded + model.positions[: len(cells)]


def by_hand(model: script.InContextNet, cells: Tensor, rewards: Tensor, query: Tensor) -> Tensor:
    """Logits for `query` after one agent's past (T, 3), (T,), written out anew: no cache, no mask function."""
    n = model.n_transit
    latents = model.positions[:0]

    # fold the oldest block into the latents
    while model.n_latent and len(cells) >= n:
        tokens = tokens_by_hand(model, cells[:n], rewards[:n])
        memory = torch.cat([latents, tokens])
        x = model.latents
        seen = len(memory) + len(x)
        everything = torch.ones(len(x), seen, dtype=torch.bool)
        for block in model.encoder:
            x = layer_by_hand(block, x, memory, everything)
        latents = norm_by_hand(x, model.encoder_norm)
        cells = cells[n:]
        rewards = rewards[n:]

    # latents, context, query
    context = tokens_by_hand(model, cells, rewards)
    asked = model.embed_query.weight[query.long()]
    asked = asked + model.positions[len(cells)]
    x = torch.cat([latents, context, asked[None]])

    # a token sees what is before it; latents see each other
    allowed = torch.ones(len(x), len(x), dtype=torch.bool)
    allowed = allowed.tril()
    allowed[: len(latents), : len(latents)] = True
    for block in model.layers:
        x = layer_by_hand(block, x, None, allowed)
    return model.head(x[-1])


@torch.no_grad()
@pytest.mark.parametrize("n_latent", [5, 0], ids=["compressed_ad", "ad"])
def test_acting_equals_reading_the_whole_past_anew(n_latent):
    """600 steps, 12 compressions deep: the same actions as a reference that keeps nothing, at every step."""
    n = 50
    forget = 20
    steps = 600
    model = small_model(n_latent, n)
    agents = script.Agents(model, 2, forget)
    rng = torch.Generator().manual_seed(3)
    state = torch.tensor([40, 40])

    # the past of both, and how much of its beginning AD has forgotten
    cells = torch.empty(2, 0, 3, dtype=torch.uint8)
    rewards = torch.empty(2, 0).double()
    forgotten = 0
    actions = []
    worst = 0.0
    depths = set()
    for t in range(steps):
        # the reference is slow: the agents take turns
        logits = agents.act(state)
        row = t % 2
        seen = cells[row, forgotten:]
        rewarded = rewards[row, forgotten:]
        expected = by_hand(model, seen, rewarded, state[row])
        difference = (logits[row] - expected).abs().max()
        worst = max(worst, float(difference))

        # the same noise gives the same action
        uniform = torch.rand(2, 5, generator=rng).double()
        noise = -torch.log(-torch.log(uniform))
        action = (logits + noise).argmax(-1)
        assert action[row] == (expected + noise[row]).argmax()

        # both take the step
        after = torch.from_numpy(DARKROOM.next[0, :, :, 0].copy())[state, action]
        new = torch.stack([state, action, after], 1)
        reward = (after == 12).double()
        agents.observe(state, action, after, reward)
        new = new[:, None].to(torch.uint8)
        cells = torch.cat([cells, new], 1)
        rewards = torch.cat([rewards, reward[:, None]], 1)
        actions.append(action)
        depths.add((t + 1) // n)

        # each episode of 20 steps begins in cell 40
        state = torch.full_like(state, 40) if (t + 1) % 20 == 0 else after
        if not n_latent and cells.shape[1] - forgotten == n:
            forgotten += forget
    assert worst < 1e-9
    assert len(depths) == steps // n + 1
    assert torch.stack(actions).unique().tolist() == list(range(5))


@torch.no_grad()
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_training_and_acting_are_one(depth):
    """The logits that are trained at every place of the context are those that an agent acts by there."""
    n = 12
    model = small_model(4, n)
    cells, rewards = made_up(3, (depth + 1) * n)
    for length in (n, 5):
        trained = model(batch_of(cells, rewards, depth, n, length))
        agents = script.Agents(model, 3, 0)
        for t in range(depth * n + length):
            logits = agents.act(cells[:, t, 0].long())
            place = t - depth * n
            if place >= 0:
                difference = (logits - trained[:, place]).abs()
                assert difference.max() < 1e-10
            agents.observe(*cells[:, t].long().T, rewards[:, t])


@torch.no_grad()
def test_padding_and_the_future_change_nothing():
    """Noise in padded context, in blocks that a sample lacks, and after the place that is asked: the same output."""
    n = 12
    model = small_model(4, n)
    cells, rewards = made_up(4, 4 * n)
    batch = batch_of(cells, rewards, 3, n, n)
    batch["depth"] = torch.tensor([3, 2, 1, 0])
    batch["length"] = torch.tensor([12, 7, 12, 3])
    batch["compressed"] = [3, 2, 1]
    before = model(batch)

    # where samples have blocks and context
    there = torch.zeros(4, 4, n, dtype=torch.bool)
    for k in range(4):
        depth = batch["depth"][k]
        length = batch["length"][k]
        there[k, :depth] = True
        there[k, 3, :length] = True

    # the same with other values where nothing is
    other, noise = made_up(4, 4 * n, 7)
    other = other.unflatten(1, (4, n))
    noise = noise.unflatten(1, (4, n))
    changed = dict(batch)
    changed["cells"] = torch.where(there[..., None], batch["cells"], other)
    changed["rewards"] = torch.where(there, batch["rewards"], noise)
    after = model(changed)
    for k, length in enumerate(batch["length"].tolist()):
        assert torch.equal(before[k, :length], after[k, :length])
    assert not torch.equal(batch["cells"], changed["cells"])

    # and what may be seen is seen: each real token changes what comes after it, and nothing before or at its place
    for k, block, place in ((0, 0, 4), (0, 2, 11), (1, 1, 0), (2, 3, 6), (3, 3, 1)):
        changed = dict(batch)
        changed["rewards"] = batch["rewards"].clone()
        changed["rewards"][k, block, place] += 1
        difference = (model(changed) - before).abs()
        moved = difference.amax(-1) > 1e-9
        first = place + 1 if block == 3 else 0
        length = int(batch["length"][k])
        assert not moved[k, :first].any()
        assert moved[k, first:length].all()

        # the other samples stay as they are
        moved[k] = False
        assert not moved.any()


@torch.no_grad()
def test_latents_see_each_other_and_not_the_context():
    """Latents are bidirectional: what the decoder makes of them is the same with and without a context after them."""
    model = small_model(4, 12)
    latents, context = torch.randn(2, 4, 24).double(), torch.randn(2, 24, 24).double()
    mask = script.visible(torch.tensor([True, True]), 4, torch.tensor([12, 12]), 12)
    alone = model.decode(latents, None)
    beside = model.decode(torch.cat([latents, context], 1), mask)
    assert torch.allclose(alone, beside[:, :4], atol=1e-12)
    # the last latent changes all others
    swapped = latents.clone()
    swapped[:, 3] = torch.randn(24).double()
    assert (model.decode(swapped, None) - alone).abs().amax((0, 2)).min() > 1e-6


def test_every_weight_learns():
    """Also where no sample has anything to compress, as DDP waits for every gradient; the encoder's are 0 then."""
    model = small_model(4, 12).float()
    cells, rewards = made_up(4, 48)
    for depth in (3, 0, -1):
        model.zero_grad()
        batch = batch_of(cells, rewards.float(), max(0, depth), 12, 12)

        # as with --max_compression_depth 0
        if depth == -1:
            batch["cells"] = batch["cells"][:, 3:]
            batch["rewards"] = batch["rewards"][:, 3:]
            batch["compressed"] = []
        logits = model(batch).flatten(0, 1)
        target = batch["cells"][:, -1, :, 1].long()
        F.cross_entropy(logits, target.flatten()).backward()

        # the encoder learns where there is something to compress, all else always
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            learns = bool(parameter.grad.abs().max() > 0)
            compresses = "encoder" in name or name == "latents"
            assert learns == (depth > 0 or not compresses), (depth, name)


@torch.no_grad()
def test_a_moved_room_is_another_room_for_the_net_alone():
    """Codes of rows and columns: moving the room by what the frame allows changes the logits, not what may be seen."""
    model = small_model(4, 12, shift=3)
    cells, rewards = made_up(3, 48)
    batch = batch_of(cells, rewards, 3, 12, 12)
    logits = []
    for moved in ((0, 0), (3, 1)):
        batch["shift"] = torch.tensor([moved] * 3)
        logits.append(model(batch))
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    # told by hand: a one of 12 rows, a one of 12 columns
    told = model.facts(torch.tensor([[40]]), torch.tensor([[3, 1]]), torch.float64)[0, 0]
    assert told.nonzero().flatten().tolist() == [4 + 3, 12 + 4 + 1]


# --- environments and who acts in them --------------------------------------------------------------------------------


def test_split_is_the_published_one():
    train, unseen = ad.split_tasks(81, 0)
    assert [divmod(goal, 9) for goal in unseen] == [(4, 2), (5, 6), (6, 8), (7, 2), (3, 6), (0, 5), (5, 8), (5, 4)]
    assert sorted(train + unseen) == list(range(81))
    assert len(ad.split_tasks(24, 1)[1]) == 3


def test_returns_of_the_random_and_the_best_policy():
    """Of Darkroom: 21 less the distance from the centre; of a random one by 20 products of a transition matrix."""
    goals = np.arange(81)
    distance = np.abs(goals // 9 - 4) + np.abs(goals % 9 - 4)
    # who starts on the goal is rewarded for staying
    np.testing.assert_allclose(DARKROOM.value(np.max), np.minimum(21 - distance, 20))
    moves = np.zeros((81, 81))
    for action in range(5):
        moves[goals, DARKROOM.next[0, :, action, 0]] += 0.2
    place, total = np.eye(81)[40], np.zeros(81)
    for _ in range(20):
        place = place @ moves
        total += place
    np.testing.assert_allclose(DARKROOM.value(np.mean), total)


def test_key_to_door_by_hand():
    """The key counts once, the door once and only with the key; both in an episode give 2."""
    env = ad.make_env("key_to_door:5")
    assert env.value(np.max).max() == 2
    key, door = np.divmod(np.random.default_rng(0).permutation(625)[:200], 25)
    task = next(k for k in range(200) if len({key[k], door[k], 12}) == 3)
    state, found, seen = np.array([12]), [], []
    for target in (door[task], key[task], key[task], door[task], door[task]):
        # there by rows, then by columns
        while state[0] % 25 != target:
            (row, column), (to_row, to_column) = divmod(state[0] % 25, 5), divmod(target, 5)
            action = (0 if to_row > row else 1) if row != to_row else (2 if to_column > column else 3)
            state, reward = env.step(np.array([task]), state, np.array([action]))
            if reward[0]:
                found.append(state[0] % 25)
        seen.append(state[0] // 25)
        state, reward = env.step(np.array([task]), state, np.array([4]))
        found += [target] * int(reward[0])
    assert found == [key[task], door[task]]
    assert seen == [0, 1, 1, 2, 2]


def test_rooms_begin_in_the_middle():
    for size in (4, 5, 6):
        for kind in ("darkroom", "key_to_door"):
            env = ad.make_env(f"{kind}:{size}")
            assert env.places[env.start].tolist() == [size // 2, size // 2]
    with pytest.raises(InputError, match="environment darkroom:26: give darkroom or key_to_door"):
        ad.make_env("darkroom:26")


def test_gymnasium_world_is_gymnasiums():
    """FrozenLake's table, its actions in another order in each task, against steps of the environment itself."""
    import gymnasium

    env, lake = ad.make_env("gym:FrozenLake-v1"), gymnasium.make("FrozenLake-v1").unwrapped
    assert (env.tasks, env.cells, env.actions, env.start) == (24, 16, 4, 0)
    np.testing.assert_allclose(env.chance[..., -1], 1)
    inner = [state for state in range(16) if state not in (5, 7, 11, 12, 15)]
    told = [
        {s: sorted((round(p, 6), after, gain) for p, after, gain, _ in lake.P[s][a]) for s in inner} for a in range(4)
    ]
    orders = set()
    for task in range(24):
        order = []
        for action in range(4):
            shares = np.diff(env.chance[task, :, action], prepend=0).round(6)
            rows = zip(shares, env.next[task, :, action], env.reward[task, :, action], strict=True)
            found = {
                s: sorted(zip(*map(np.ndarray.tolist, row), strict=True)) for s, row in enumerate(rows) if s in inner
            }
            order.append(told.index(found))
        orders.add(tuple(order))
    assert len(orders) == 24
    # what ends an episode keeps its place, without reward
    assert env.next[0, 15].tolist() == [[15] * 3] * 4
    assert not env.reward[0, 15].any()
    rng = np.random.default_rng(0)
    after, _ = env.step(np.zeros(6000, int), np.full(6000, 14), np.zeros(6000, int), rng)
    np.testing.assert_allclose(np.bincount(after, minlength=16)[np.unique(after)] / 6000, 1 / 3, atol=0.03)
    with pytest.raises(InputError, match="needs Discrete spaces and a table P"):
        ad.make_env("gym:CartPole-v1")
    for wrong in ("darkroom:2", "darkroom:x", "atari"):
        with pytest.raises(InputError, match="give darkroom"):
            ad.make_env(wrong)


def test_search_sweeps_the_room_and_keeps_the_goal():
    """Never two steps away from an unseen neighbour; found at once in all later episodes, by the shortest way."""
    tasks = np.arange(81)
    searcher = ad.Search(DARKROOM, tasks)
    rewards = ad.play(DARKROOM, tasks, 15 * 20, None, searcher.choose, searcher.learn)[-1]
    returns = rewards.reshape(15, 20, 81).sum(1)
    np.testing.assert_array_equal(returns[-1], DARKROOM.value(np.max))
    # nothing but rewards and places that it has seen tells it of the goal: until then all go the same way
    first = ad.play(DARKROOM, tasks[:5], 6, None, ad.Search(DARKROOM, tasks[:5]).choose)[1]
    assert (first == first[:, :1]).all()


def test_r_max_finds_the_best_policy():
    task = np.array([0, 13, 77])
    agents = report.RMax(DARKROOM, task, np.random.default_rng(0))
    rewards = ad.play(DARKROOM, task, 120 * 20, None, agents.choose, agents.learn)[-1]
    np.testing.assert_array_equal(rewards.reshape(120, 20, 3).sum(1)[-1], DARKROOM.value(np.max)[task])
    agents = report.TabularQ(DARKROOM, task, np.random.default_rng(0))
    rewards = ad.play(DARKROOM, task, 400 * 20, None, agents.choose, agents.learn)[-1]
    assert rewards[-2000:].sum() > 0.8 * 100 * DARKROOM.value(np.max)[task].sum()


# --- histories --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Histories of 200 steps, three of each goal."""
    root = tmp_path_factory.mktemp("ad") / "data"
    sample_data.write_sample_data(root, "darkroom", "tabular", 3, 200, 0.3, 42)
    return root


@pytest.fixture(scope="module")
def histories(folder) -> ad.Histories:
    return ad.Histories(str(folder), None, "ad", 0)


@pytest.mark.parametrize("source", ["tabular", "search", "epsilon"])
def test_sources_learn(source, tmp_path, capsys):
    sample_data.write_sample_data(tmp_path, "darkroom:5", source, 10, 360, 0.3, 1)
    assert "return in episode 1: " in capsys.readouterr().out
    read = ad.Histories(str(tmp_path), "darkroom:5", "ad", 0)
    curve = np.mean(read.curves, 0)
    assert curve[-3:].mean() > 0.6 * read.env.value(np.max).mean() > curve[0]
    with pytest.raises(InputError, match="is there already"):
        sample_data.write_sample_data(tmp_path, "darkroom:5", source, 10, 360, 0.3, 1)
    with pytest.raises(InputError, match=r"are of darkroom:5"):
        ad.Histories(str(tmp_path), "darkroom", "ad", 0)


def test_ppo_of_stable_baselines_writes_the_same_kind_of_history():
    states, actions, after, rewards = sample_data.ppo_history(DARKROOM, 4, 200, 42, 40)
    assert states.shape == actions.shape == after.shape == rewards.shape == (200, 4)
    assert np.array_equal(DARKROOM.next[40, states, actions, 0], after)
    assert np.array_equal(rewards, after == 40)
    starts = np.arange(200) % 20 == 0
    assert (states[starts] == 40).all()
    assert (states[1:][~starts[1:]] == after[:-1][~starts[1:]]).all()
    assert len(np.unique(actions)) == 5


def test_targets_of_the_objectives(folder, histories):
    """dpt: always a best action; search: what the sweeping teacher does, and after the first reward the best way."""
    dpt, search = (ad.Histories(str(folder), None, objective, 0) for objective in ("dpt", "search"))
    assert np.array_equal(histories.words[..., 3], histories.words[..., 1])
    best = DARKROOM.best_actions()
    for task in (0, 40, 71):
        words = dpt.words[task]
        assert best[task, words[..., 0], words[..., 3]].all()
        assert np.array_equal(words[..., :3], histories.words[task, ..., :3])
        for stream in range(3):
            cells, _, after, targets = search.words[task, stream].T.astype(int)
            rewards = search.rewards[task, stream]
            found = int(np.argmax(rewards > 0)) if rewards.any() else len(rewards)
            assert best[task, cells[found + 1 :], targets[found + 1 :]].all()
            # before: towards a cell that no step of this history has led to, one of the nearest
            for t in range(min(found, 30)):
                unseen = np.setdiff1d(np.arange(81), after[:t])

                def nearest(cell: int, unseen=unseen) -> int:
                    return (abs(unseen // 9 - cell // 9) + abs(unseen % 9 - cell % 9)).min()

                assert nearest(DARKROOM.next[0, cells[t], targets[t], 0]) == max(0, nearest(cells[t]) - 1)


def test_the_best_actions_of_dpt_are_drawn_alike(folder):
    """Where two actions lead nearer, each is the target of half of the steps."""
    words = ad.Histories(str(folder), None, "dpt", 0).words[0].reshape(-1, 4)
    # the goal in the corner above and to the left: up and left are best wherever both lead on
    inner = (words[:, 0] >= 9) & (words[:, 0] % 9 > 0)
    shares = np.bincount(words[inner, 3], minlength=5) / inner.sum()
    assert inner.sum() > 200
    assert shares == pytest.approx([0, 0.5, 0, 0.5, 0], abs=0.15)


def spoil(name: str, place: tuple, value):
    def write(file) -> None:
        values = file[name][()].astype(float) if isinstance(value, float) else file[name][()]
        values[place] = value
        del file[name]
        file[name] = values

    return write


def jump(file) -> None:
    group = file["7"]
    cell = group["states"][8, 2]
    group["states"][6, 2] = group["next_states"][6, 2] = cell
    group["actions"][6, 2] = 4
    group["rewards"][6, 2] = float(cell @ (9, 1) == 7)


def shorten(file) -> None:
    for name in ad.FIELDS:
        values = file["7"][name][:10]
        del file["7"][name]
        file["7"][name] = values


def link(name: str, make):
    def write(file) -> None:
        with h5py.File(Path(file.filename).with_name("other.h5"), "w") as other:
            file.copy("7", other)
        del file[name]
        file[name] = make(file) if callable(make) else make

    return write


def virtual(file) -> None:
    layout = h5py.VirtualLayout((200, 3), np.int8)
    layout[:] = h5py.VirtualSource("other.h5", "7/actions", (200, 3))
    del file["7/actions"]
    file.create_virtual_dataset("7/actions", layout)


def external(file) -> None:
    del file["7/actions"]
    file["7"].create_dataset("actions", (200, 3), np.int8, external=[("raw", 0, 600)])


WRONG = {
    "beyond the grid": (spoil("7/states", (5, 2), 9), r"group '7', step 5, stream 2: states must be whole numbers"),
    "half a cell": (spoil("7/states", (0, 0), 4.5), r"step 0, stream 0: states must be whole numbers"),
    "sixth action": (spoil("7/actions", (3, 1), 5), r"step 3, stream 1: actions must be whole numbers"),
    "nan": (spoil("7/actions", (3, 1), math.nan), r"step 3, stream 1: actions must be whole numbers"),
    "reward": (spoil("7/rewards", (11, 0), 0.5), r"step 11, stream 0: rewards is not what the task gives"),
    "dones": (spoil("7/dones", (19, 1), False), r"step 19, stream 1: dones must be True at each episode's end alone"),
    "through a wall": (
        spoil("7/next_states", (4, 2), (0, 0)),
        r"step 4, stream 2: next_states is not where the action leads",
    ),
    "jump": (jump, r"step 6, stream 2: states is not where the step before led"),
    "short": (shorten, r"group '7': 10 steps, less than an episode of 20"),
    "missing group": (lambda file: file.__delitem__("80"), r"80 groups; darkroom:9 has 81 tasks"),
    "missing field": (lambda file: file.__delitem__("7/rewards"), r"needs groups '0', '1' ... with states"),
    "other shape": (lambda file: link("7/states", file["7/states"][:, :, 0])(file), r"states is int8 \(200, 3\)"),
    "linked group": (link("7", h5py.ExternalLink("other.h5", "/7")), r"is no array of numbers in this file"),
    "linked field": (
        link("7/actions", h5py.ExternalLink("other.h5", "/7/actions")),
        r"is no array of numbers in this file",
    ),
    "virtual": (virtual, r"is no array of numbers in this file"),
    "external": (external, r"is no array of numbers in this file"),
    "words": (lambda file: link("7/actions", "words")(file), r"7/actions is no array of numbers in this file"),
    "null": (lambda file: link("7/actions", h5py.Empty("f"))(file), r"not readable histories"),
    "huge": (
        lambda file: (
            file.__delitem__("7/actions"),
            file["7"].create_dataset("actions", (10**7, 10**7), float, chunks=True),
        ),
        r"not readable histories: Unable to allocate",
    ),
    "circle": (link("7", h5py.SoftLink("/7")), r"not readable histories"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_histories_are_named(name, folder, tmp_path):
    write, message = WRONG[name]
    path = tmp_path / "history.hdf5"
    shutil.copy(next(folder.glob("datasets/*")), path)
    with h5py.File(path, "r+") as file:
        write(file)
    with pytest.raises(InputError, match=message):
        ad.Histories(str(path), None, "ad", 0)


def test_wrong_histories_of_a_world_of_chance(tmp_path):
    """Each step must be an outcome that the world has."""
    sample_data.write_sample_data(tmp_path, "gym:FrozenLake-v1", "epsilon", 3, 64, 0.3, 0)
    path = next(tmp_path.glob("datasets/*"))
    ad.Histories(str(path), None, "dpt", 0)
    whole = path.read_bytes()
    for name, place, value, message in (
        ("7/states", (32, 1), 5, "step 32, stream 1: states is not where"),
        ("7/next_states", (31, 1), 15, "step 31, stream 1: next_states is not where the action leads"),
        ("7/rewards", (5, 2), 1.0, "step 5, stream 2: rewards is not what the task gives"),
        ("7/rewards", (5, 2), math.nan, "step 5, stream 2: rewards is not what the task gives"),
    ):
        path.write_bytes(whole)
        with h5py.File(path, "r+") as file:
            spoil(name, place, value)(file)
        with pytest.raises(InputError, match=message):
            ad.Histories(str(path), None, "dpt", 0)
    with pytest.raises(InputError, match="no room, whose map one could know"):
        sample_data.write_sample_data(tmp_path / "other", "gym:FrozenLake-v1", "search", 3, 64, 0.3, 0)
    path.write_bytes(whole)
    with pytest.raises(InputError, match="no room, whose map one could know"):
        ad.Histories(str(path), None, "search", 0)


def test_a_file_names_no_module(folder, tmp_path):
    """Gymnasium would import what stands before a colon."""
    path = tmp_path / "history.hdf5"
    shutil.copy(next(folder.glob("datasets/*")), path)
    with h5py.File(path, "r+") as file:
        file.attrs["env"] = "gym:antigravity:X-v0"
    with pytest.raises(InputError, match="no module may be named"):
        ad.Histories(str(path), None, "ad", 0)
    assert "antigravity" not in sys.modules


def test_files_that_are_not_there_or_no_hdf5(folder, tmp_path):
    with pytest.raises(InputError, match="no such file; histories in seconds: `python -m tools.sample_data"):
        ad.Histories(str(tmp_path / "none.hdf5"), None, "ad", 0)
    with pytest.raises(InputError, match=r"holds 0 .hdf5 files, also in datasets/; name one"):
        ad.Histories(str(tmp_path), None, "ad", 0)
    beside = next(folder.glob("datasets/*"))
    with pytest.raises(InputError, match=f"no such file; beside it lies {beside.name}"):
        ad.Histories(str(beside.with_name("none.hdf5")), None, "ad", 0)
    whole = beside.read_bytes()
    (tmp_path / "cut.hdf5").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="not readable histories"):
        ad.Histories(str(tmp_path), None, "ad", 0)


def test_histories_as_others_write_them(folder, histories, tmp_path):
    """Another type of number, one goal with more steps, and ends that are logged as the next start: the same words."""
    path = tmp_path / "history.hdf5"
    shutil.copy(next(folder.glob("datasets/*")), path)
    with h5py.File(path, "r+") as file:
        for name in ad.FIELDS:
            values = file["3"][name][()]
            del file["3"][name]
            file["3"][name] = np.concatenate([values, values[:20]]).astype(np.float64)
        ends = file["5"]["next_states"]
        ends[19::20] = (4, 4)
    read = ad.Histories(str(path), None, "ad", 0)
    assert np.array_equal(read.words, histories.words)
    assert read.longest == 220
    assert 20 < read.repaired <= 30


# --- segments ---------------------------------------------------------------------------------------------------------


def segments_of(histories, tasks, n_transit=20, train=True, seed=0, **more) -> ad.SegmentDataset:
    return ad.SegmentDataset(histories, tasks, small_args(n_transit=n_transit, seed=seed, **more), train)


class Sample(int):
    epoch = 5


def test_the_posterior_finds_the_order_of_the_actions():
    """On FrozenLake: the likelihood of each order by hand, and nearly the optimum after ten episodes."""
    env, rng = ad.make_env("gym:FrozenLake-v1"), np.random.default_rng(0)
    task = np.repeat([3, 17], 40)
    rule = report.Posterior(env, task, rng)
    before = rule.score.copy()
    states, actions, after, rewards = ad.play(env, task, 40 * env.horizon, rng, rule.choose, rule.learn)
    assert ad.learning_curve(rewards, env)[10:].mean() > 0.85 * env.value(np.max)[3]
    shares, by_hand = np.diff(env.chance, axis=-1, prepend=0), 0.0
    for t in range(len(states)):
        place = 5, states[t, 0], actions[t, 0]
        right = (env.next[place] == after[t, 0]) & (env.reward[place] == rewards[t, 0])
        by_hand += math.log(shares[place][right].sum() + 1e-9)
    assert rule.score[0, 5] - before[0, 5] == pytest.approx(by_hand)


def test_segments_are_pieces_of_the_histories(histories):
    """Against the histories themselves: blocks and context are consecutive, end anywhere, and the rest is zero."""
    tasks = [3, 41, 80]
    data = segments_of(histories, tasks)
    batch = data.__getitems__([Sample(k) for k in range(len(data))])
    history, depths, ends, _ = data.draw(np.arange(len(data)), 5)
    assert batch["depth"].tolist() == sorted(depths.tolist(), reverse=True)
    assert batch["compressed"] == [int((depths > k).sum()) for k in range(3)]
    for k, sample in enumerate(batch["index"].tolist()):
        goal, stream = divmod(history[sample], 3)
        words, rewards = histories.words[tasks[goal], stream], histories.rewards[tasks[goal], stream]
        depth, end = depths[sample], ends[sample]
        length = min(20, end - 20 * depth)
        assert (batch["length"][k], batch["depth"][k]) == (length, depth)
        # (block, its first step, how many it has), the context last
        pieces = [(block, end - length - 20 * (depth - block), 20) for block in range(depth)]
        for block, first, number in [*pieces, (3, end - length, length)]:
            assert first >= 0
            assert np.array_equal(batch["cells"][k, block, :number], words[first : first + number, :3])
            assert np.array_equal(batch["rewards"][k, block, :number], rewards[first : first + number])
        assert batch["action"][k, :length].tolist() == words[end - length : end, 3].tolist()
        assert (batch["action"][k, length:] == -100).all()
        assert not batch["cells"][k, 3, length:].any()
        assert not batch["cells"][k, depth:3].any()


def test_segments_reach_the_whole_history_at_every_depth(histories):
    """Late learning is seen with compressions too, and so is the beginning; the original's began at step 0."""
    data = segments_of(histories, list(range(81)))
    ends: dict[int, list] = {k: [] for k in range(4)}
    for epoch in range(4):
        _, depth, end, _ = data.draw(np.arange(len(data)), epoch)
        for k in range(4):
            ends[k] += end[depth == k].tolist()
    total = sum(map(len, ends.values()))
    for k, values in ends.items():
        assert len(values) / total == pytest.approx(0.25, abs=0.02)
        assert set(values) == set(range(20 * k + 1, 201))
        quarters = np.histogram(values, 4, (20 * k + 1, 201))[0]
        assert quarters.min() > 0.9 * quarters.mean()


def test_segments_from_the_start_in_a_moved_room(histories):
    data = segments_of(histories, [0, 1], from_start=1.0, shift=4)
    _, depth, end, shift = data.draw(np.arange(4000), 0)
    assert np.array_equal(end, 20 * (depth + 1))
    assert {tuple(row) for row in shift.tolist()} == {(row, column) for row in range(5) for column in range(5)}


def test_draws_depend_on_seed_epoch_and_sample_alone(histories):
    def drawn(seed: int, epoch: int, samples) -> np.ndarray:
        return np.stack(segments_of(histories, [0, 40], seed=seed, shift=6).draw(np.asarray(samples), epoch)[1:3])

    every = drawn(0, 0, range(90))
    assert np.array_equal(every[:, [7, 3]], drawn(0, 0, [7, 3]))
    for seed, epoch in ((0, 1), (1, 0), (1, 1), (-1, 0)):
        assert not np.array_equal(every, drawn(seed, epoch, range(90)))
    samples = np.arange(10**5)
    values, others = (ad.hashed(0, 0, samples, draw) for draw in (0, 1))
    counts = np.histogram(values, 50, (0, 1))[0]
    assert np.abs(counts - 2000).max() < 5 * math.sqrt(2000)
    assert abs(np.corrcoef(values, others)[0, 1]) < 0.02
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.02


def test_histories_shorter_than_a_depth_train_to_the_depth_they_have(histories):
    for n_transit, depth in {60: 3, 66: 3, 67: 2, 240: 0}.items():
        assert segments_of(histories, [0], n_transit).max_depth == depth


# --- evaluation -------------------------------------------------------------------------------------------------------


def logits_after(model, past: list[tuple], cell: int) -> Tensor:
    """Logits in a cell after (cell, action, next cell, reward) of each step before, through the training path."""
    blocks, length = divmod(len(past), 20)
    cells, rewards = torch.zeros(1, 5, 20, 3, dtype=torch.int16), torch.zeros(1, 5, 20)
    for step, (*transition, reward) in enumerate(past):
        block, place = divmod(step, 20)
        # the context is last
        block = 4 if block == blocks else block
        cells[0, block, place], rewards[0, block, place] = torch.tensor(transition), reward
    cells[0, 4, length, 0] = cell
    batch = {"cells": cells, "rewards": rewards, "depth": torch.tensor([blocks]), "length": torch.tensor([length])}
    batch |= {"shift": torch.full((1, 2), model.shift // 2), "compressed": [int(k < blocks) for k in range(4)]}
    return model(batch)[0, length]


@torch.no_grad()
def test_returns_against_a_simulation_step_by_step():
    """One agent after the other, through the training path, in a room written out anew."""
    model, args = small_model(4, 20, shift=2), small_args(n_transit=20)
    returns, path = script.act_in_context(model, DARKROOM, [38, 45], 2, 4, Here(), args)
    for place, goal in enumerate((38, 45)):
        for agent in range(2):
            rng, past = np.random.default_rng([0, script.ACTING, goal, agent]), []
            for episode in range(4):
                way = [40]
                noise, cell, total = -np.log(-np.log(rng.random((20, 5)))), 40, 0.0
                for t in range(20):
                    action = int((logits_after(model, past, cell).numpy() + noise[t]).argmax())
                    row, column = divmod(cell, 9)
                    down, right = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))[action]
                    after = 9 * min(8, max(0, row + down)) + min(8, max(0, column + right))
                    past.append((cell, action, after, float(after == goal)))
                    total, cell = total + (after == goal), after
                    way.append(after)
                assert returns[place, agent, episode] == total
                assert (goal, agent) != (38, 0) or path[episode].tolist() == way
    # in other company: the same
    others = script.act_in_context(model, DARKROOM, [38, 45], 2, 4, Here(), small_args(test_batch_size=3))
    assert np.array_equal(returns, others[0])
    assert np.array_equal(path, others[1])


def test_action_accuracy_against_a_loop(histories):
    class Run:
        def batches(self, loader):
            return iter(loader)

    args = small_args(n_transit=20)
    model = small_model(4, 20).float()
    data = segments_of(histories, [5, 70], train=False)
    found = script.action_accuracy(model, data, Run(), "no", args)
    loss = hits = count = 0
    for sample in range(len(data)):
        batch = data.__getitems__([sample])
        depth, length = int(batch["depth"]), int(batch["length"])
        end = 20 * depth + 1 + int(sample % 6 * 0.618034 % 1 * (200 - 20 * depth))
        assert length == min(20, end - 20 * depth)
        with torch.no_grad():
            logits = model(batch)[0, :length].log_softmax(-1)
        loss -= float(logits[range(length), batch["action"][0, :length]].sum())
        hits += int((logits.argmax(-1) == batch["action"][0, :length]).sum())
        count += length
    assert len(data) == 2 * 3 * 4
    assert found["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert found["accuracy"] == pytest.approx(hits / count, rel=1e-6)


def test_action_accuracy_in_any_order(histories):
    """To the bit, also where losses are large: that is how ranks share the batches."""
    model = small_model(4, 20).float()
    model.head[1].weight.data *= 100
    data = segments_of(histories, list(range(81)), train=False)

    def found(order: int) -> dict:
        return script.action_accuracy(
            model, data, Namespace(batches=lambda loader: [*loader][::order]), "no", small_args(test_batch_size=16)
        )

    forwards = found(1)
    assert forwards == found(-1)
    # the sum, which float64 alone would round
    assert forwards["loss"] * 20 * len(data) > 8192


def test_numbers_of_the_table():
    """8 goals, 10 agents, 40 episodes; the goals differ by far more than the agents."""
    rng = np.random.default_rng(1)
    returns = rng.normal(5, 1, (8, 10, 40)) + rng.normal(0, 3, (8, 1, 1))
    metrics = report.return_metrics(returns, DARKROOM, list(range(8)))
    by_goal = returns[:, :, 36:].mean((1, 2))
    assert metrics["return_first"] == pytest.approx(returns[:, :, 0].mean())
    assert metrics["return_last"] == pytest.approx(by_goal.mean())
    # Student's interval over the goals
    half = 2.3646 * by_goal.std(ddof=1) / 8**0.5
    assert metrics["return_last_high"] - by_goal.mean() == pytest.approx(half, rel=1e-3)
    random, optimum = DARKROOM.value(np.mean)[:8].mean(), DARKROOM.value(np.max)[:8].mean()
    assert metrics["normalized_last"] == pytest.approx((by_goal.mean() - random) / (optimum - random))


# --- the script -------------------------------------------------------------------------------------------------------

FLAGS = "--tf_n_embd 16 --tf_n_layer 1 --tf_n_head 2 --tf_dim_feedforward 16 --encoder_n_layer 1 --n_transit 20 "
FLAGS += "--n_latent 4 --batch_size 8 --train_timesteps 6 --num_warmup_steps 2 --eval_interval 3 --val_episodes 2 "
FLAGS += "--eval_episodes 3 --eval_seeds 2 --num_workers 0 --log_every 1"


def start(folder: Path, out: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "train.py", *FLAGS.split(), "--data", str(folder), "--output_dir", str(out), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    # flags that --eval_only takes from the checkpoint
    output = start(folder, out, "--split_seed", "1", "--objective", "search", "--from_start", "0.5", "--shift", "1")
    assert re.search("  time +about 0:00:0[0-9] on this CPU\n", output)
    return out


def read(path: Path) -> dict:
    return {name: value for name, value in json.loads(path.read_text()).items() if name.startswith(("test/", "tasks"))}


def test_a_run_leaves_what_the_page_says(finished):
    assert {"best.pt", "model.safetensors", "summary.json", "test_returns.csv"} <= {
        path.name for path in finished.iterdir()
    }
    assert (finished / "figures" / "test.png").stat().st_size > 10_000
    summary = read(finished / "summary.json")
    names = {"test/normalized_last", "test/loss", "test/rival/R_max_from_scratch/return_last", "tasks"}
    names |= {f"test/rival/{name}/normalized_last" for name in ("source_of_the_histories", "tabular_Q_from_scratch")}
    assert names <= summary.keys()
    curves = (finished / "test_returns.csv").read_text().splitlines()
    assert curves[0].startswith("episode,compressed_ad/search,source of the histories,tabular Q from scratch,R-max")
    assert [line.split(",")[0] for line in curves[1:]] == ["1", "2", "3"]
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "val/loss" in line] == [3, 6]


def test_eval_only_gives_the_runs_own_numbers(folder, finished):
    """What the model and its task are made of comes from the checkpoint."""
    curve = (finished / "test_returns.csv").read_bytes()
    start(folder, finished, "--eval_only", "--tf_n_embd", "32", "--tf_n_head", "4")
    assert read(finished / "eval_test.json") == read(finished / "summary.json")
    # other chances: the run's own curve stays
    start(folder, finished, "--eval_only", "--seed", "1", "--temperature", "0")
    assert (finished / "test_returns.csv").read_bytes() == curve != (finished / "eval_test_returns.csv").read_bytes()
    sample_data.write_sample_data(finished.parent / "door", "key_to_door:9", "search", 1, 50, 0.3, 0)
    assert "are of key_to_door:9" in start(finished.parent / "door", finished, "--eval_only", code=2)


def test_the_last_evaluation_counts_and_an_epochs_end_alone_saves_nothing(folder, tmp_path):
    flags = "--train_timesteps 9 --batch_size 600 --save_every 6 --eval_interval 100 --keep_last 20 --lr 1e-2"
    output = start(folder, tmp_path / "run", *flags.split())
    assert "epoch 3 step 9/9" in output
    steps = sorted(path.name for path in (tmp_path / "run").glob("step_*.pt"))
    assert steps == ["step_00000006.pt", "step_00000009.pt"]
    assert "best.pt (step 9)" in output


def test_beside_a_run_without_compression(folder, finished, tmp_path):
    start(folder, tmp_path / "ad", "--model", "ad")
    output = start(folder, tmp_path / "run", "--ad_run", str(tmp_path / "ad"))
    assert "rival run: ad/ad" in output
    output = start(folder, tmp_path / "run2", "--ad_run", str(tmp_path / "ad"), "--split_seed", "1", code=2)
    assert "--rival_run" in output
    assert "tested on darkroom:9: 38 51 62 65 33 5 53 49; give one of darkroom:9: " in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tf_n_head 3", "--tf_n_head 3: must divide --tf_n_embd 16"),
        ("--num_warmup_steps 6", "--num_warmup_steps 6: must be below --train_timesteps"),
        ("--n_transit 201", "--n_transit 201: more than the 200 steps of the histories"),
        ("--n_transit 200", "--n_transit 200: with histories of 200 steps nothing would be compressed"),
        ("--max_compression_depth 0", "nothing would be compressed in training; halve it, or take --model ad"),
        ("--env key_to_door", "--env key_to_door: the histories in"),
    ],
)
def test_bad_flags(folder, tmp_path, words, message):
    output = start(folder, tmp_path / "run", *words.split(), code=2)
    assert output.count("error: ") == 1
    assert message in output
    assert not (tmp_path / "run" / "run_id").exists()


def test_a_resumed_run_keeps_its_task_and_its_histories(folder, tmp_path):
    out, others = tmp_path / "run", ["--resume_from", "auto", "--max_steps", "3"]
    start(folder, out, "--max_steps", "2", "--split_seed", "1", "--from_start", "0.5", "--max_compression_depth", "2")
    output = start(folder, out, *others, "--objective", "dpt", "--max_compression_depth", "1")
    for name, value in (("objective", "ad"), ("split_seed", 1), ("from_start", 0.5), ("max_compression_depth", 2)):
        assert f"--{name}: {value}, as in the checkpoint" in output
    sample_data.write_sample_data(tmp_path / "data", "darkroom", "tabular", 3, 200, 0.3, 43)
    assert "--resume_from: a run with digest" in start(tmp_path / "data", out, *others, code=2)


def test_first_minute(tmp_path):
    """Without data: the two commands that give some and use them. With data on a CPU: that it would take days."""
    command = [sys.executable, "train.py", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "python -m tools.sample_data compressed_ad" in done.stderr
    assert "python train.py --config configs/compressed_ad_demo.yaml" in done.stderr
    run = Namespace(effective=10**9, ranks=Namespace(world_size=1), checkpoint=None)
    args = Namespace(max_steps=0, train_timesteps=10**6, mixed_precision="no")
    told = script.say_how_long(small_model(4, 20).float(), 3, run, args)
    assert "on this CPU; a trial of minutes: python train.py --config" in told


def test_a_gymnasium_world_from_end_to_end(tmp_path):
    sample_data.write_sample_data(tmp_path / "data", "gym:FrozenLake-v1", "epsilon", 4, 320, 0.3, 0)
    output = start(tmp_path / "data", tmp_path / "run", "--objective", "dpt", "--temperature", "0.5")
    assert "3 unseen tasks" in output
    assert "tabular Q from scratch" in output
    assert "posterior over all tasks" in output
    # it is no world without chance, and no room
    assert "R-max" not in output
    assert "--shift 2: gym:FrozenLake-v1 is no room" in start(
        tmp_path / "data", tmp_path / "run2", "--shift", "2", code=2
    )


@pytest.mark.parametrize("config", ["compressed_ad_darkroom", "compressed_ad_demo", "ad_darkroom"])
def test_configs_parse(config):
    args = script.parse_args(["--config", f"configs/{config}.yaml"])
    if config == "compressed_ad_darkroom":
        # the published settings are the defaults
        defaults = vars(script.parse_args([]))
        assert {name: value for name, value in vars(args).items() if defaults[name] != value} == {
            "config": f"configs/{config}.yaml"
        }
    if config == "ad_darkroom":
        assert (args.model, args.n_latent, args.tf_n_embd, args.batch_size) == ("ad", 0, 64, 512)
