"""CompressedAD's model and data: what may be seen, acting equals re-reading the whole past, and Darkroom itself."""

import math

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tasks.compressed_ad.acting import Agents
from tasks.compressed_ad.darkroom import ACTIONS, NEXT, START, optimal_return, random_return, split_goals
from tasks.compressed_ad.data import Histories, SegmentDataset, hashed
from tasks.compressed_ad.model import InContextNet, visible
from tasks.compressed_ad.sample_data import tabular_histories


def small_model(n_latent: int = 5, n_transit: int = 50, seed: int = 0) -> InContextNet:
    """With weights large enough that everything that is seen has a say in the output."""
    torch.manual_seed(seed)
    model = InContextNet(
        dim=24,
        layers=2,
        heads=3,
        hidden=32,
        n_transit=n_transit,
        n_latent=n_latent,
        encoder_layers=2,
    )
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def made_up(count: int, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Transitions (count, steps, 3) and rewards (count, steps) without any sense."""
    rng = torch.Generator().manual_seed(seed)
    cells = torch.randint(0, 81, (count, steps, 3), generator=rng)
    cells[..., 1] %= ACTIONS
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


def tokens_by_hand(model: InContextNet, cells: Tensor, rewards: Tensor) -> Tensor:
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


def by_hand(model: InContextNet, cells: Tensor, rewards: Tensor, query: Tensor) -> Tensor:
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
    agents = Agents(model, 2, forget)
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
        uniform = torch.rand(2, ACTIONS, generator=rng).double()
        noise = -torch.log(-torch.log(uniform))
        action = (logits + noise).argmax(-1)
        assert action[row] == (expected + noise[row]).argmax()

        # both take the step
        after = torch.from_numpy(NEXT)[state, action]
        new = torch.stack([state, action, after], 1)
        reward = (after == 12).double()
        agents.observe(new, reward)
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
    assert torch.stack(actions).unique().tolist() == list(range(ACTIONS))


@torch.no_grad()
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_training_and_acting_are_one(depth):
    """The logits that are trained at every place of the context are those that an agent acts by there."""
    n = 12
    model = small_model(4, n)
    cells, rewards = made_up(3, (depth + 1) * n)
    for length in (n, 5):
        trained = model(batch_of(cells, rewards, depth, n, length))
        agents = Agents(model, 3, 0)
        for t in range(depth * n + length):
            logits = agents.act(cells[:, t, 0].long())
            place = t - depth * n
            if place >= 0:
                difference = (logits - trained[:, place]).abs()
                assert difference.max() < 1e-10
            agents.observe(cells[:, t].long(), rewards[:, t])


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
    """Latents are bidirectional: what the decoder keeps of them is the same with and without a context after them."""
    model = small_model(4, 12)
    latents = torch.randn(2, 4, 24).double()
    context = torch.randn(2, 24, 24).double()
    has_past = torch.tensor([True, True])
    length = torch.tensor([12, 12])
    mask = visible(has_past, 4, length, 12)
    both = torch.cat([latents, context], 1)

    # keys and values of the latents
    _, alone = model.decode(latents, None)
    _, beside = model.decode(both, mask)
    for kept, kept_beside in zip(alone, beside, strict=True):
        of_latents = kept_beside[:, :, :, :4]
        assert torch.allclose(kept, of_latents, atol=1e-12)

    # the last latent changes all others
    swapped = latents.clone()
    swapped[:, 3] = torch.randn(24).double()
    _, moved = model.decode(swapped, None)
    difference = (moved[1] - alone[1]).abs()
    by_latent = difference.amax((0, 1, 2, 4))
    assert by_latent.min() > 1e-6


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


# --- Darkroom and the histories ---------------------------------------------------------------------------------------


def test_split_is_the_published_one():
    train, unseen = split_goals()
    rows, columns = np.divmod(unseen, 9)
    assert rows.tolist() == [4, 5, 6, 7, 3, 0, 5, 5]
    assert columns.tolist() == [2, 6, 8, 2, 6, 5, 8, 4]
    assert sorted(train + unseen) == list(range(81))
    assert len(train) == 73
    assert split_goals(1)[1] != unseen


def test_returns_of_the_random_and_the_best_policy():
    """Against every plan of the best policy by search, and 20000 random episodes."""
    for goal in (40, 0, 22, 49):
        # value iteration backwards over the 20 steps
        value = np.zeros(81)
        reward = goal == NEXT
        for _ in range(20):
            value = (reward + value[NEXT]).max(1)
        assert optimal_return([goal])[0] == value[START]
    assert optimal_return([0, 40, 49]).tolist() == [13, 20, 20]

    # random walks, counted in each cell
    rng = np.random.default_rng(0)
    cell = np.full(20000, START)
    total = np.zeros(81)
    down = np.array([1, -1, 0, 0, 0])
    right = np.array([0, 0, 1, -1, 0])
    for _ in range(20):
        action = rng.integers(0, 5, len(cell))
        row, column = np.divmod(cell, 9)
        row = np.clip(row + down[action], 0, 8)
        column = np.clip(column + right[action], 0, 8)
        cell = 9 * row + column
        total += np.bincount(cell, minlength=81)
    returns = random_return(range(81))
    assert np.abs(returns - total / 20000).max() < 0.1
    assert returns.sum() == pytest.approx(20)


@pytest.fixture(scope="module")
def history_path(darkroom_data):
    """The HDF5 file: 3 streams of 200 steps for each goal."""
    return next(darkroom_data.glob("datasets/*.hdf5"))


@pytest.fixture(scope="module")
def histories(history_path) -> Histories:
    return Histories(history_path)


GOALS = [3, 70, 11]


def segments_of(histories: Histories, goals: list[int], n_transit: int = 20, seed: int = 0) -> SegmentDataset:
    """Segments of up to 3 compressions."""
    return SegmentDataset(histories, goals, n_transit, 3, seed)


def test_mapped_and_cached_are_the_same(history_path, histories):
    mapped = Histories(history_path, in_memory=False)
    assert mapped.steps == 200
    assert mapped.streams == 3
    assert mapped.digest == histories.digest

    # batches
    cached_data = segments_of(histories, GOALS)
    mapped_data = segments_of(mapped, GOALS)
    samples = list(range(0, len(cached_data), 2))
    cached_batch = cached_data.__getitems__(samples)
    mapped_batch = mapped_data.__getitems__(samples)
    for name in ("cells", "rewards", "depth", "length", "action", "sample"):
        assert torch.equal(cached_batch[name], mapped_batch[name]), name

    # and what the source reached
    curve = histories.learning_curve([5, 6])
    assert np.array_equal(curve, mapped.learning_curve([5, 6]))


def steps_of_file(group, stream: int, first: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Cells (number, 3) and rewards of consecutive steps of a stream, as they stand in the file."""
    steps = slice(first, first + number)
    before = group["states"][steps, stream] @ (9, 1)
    actions = group["actions"][steps, stream]
    after = group["next_states"][steps, stream] @ (9, 1)
    rewards = group["rewards"][steps, stream]
    return np.stack([before, actions, after], 1), rewards


def test_segments_are_pieces_of_the_histories(history_path, histories):
    """Against the file itself: blocks and context are consecutive, end anywhere, and the rest is zero."""
    data = segments_of(histories, GOALS)
    data.epoch = 5
    batch = data.__getitems__(list(range(len(data))))
    history, depths, ends = data.draw(np.arange(len(data)))
    assert batch["depth"].tolist() == sorted(depths.tolist(), reverse=True)
    deeper = [int((depths > k).sum()) for k in range(3)]
    assert batch["compressed"] == deeper

    with h5py.File(history_path) as file:
        for k, sample in enumerate(batch["sample"].tolist()):
            goal, stream = divmod(history[sample], 3)
            group = file[str(GOALS[goal])]
            depth = depths[sample]
            end = ends[sample]
            length = min(20, end - 20 * depth)
            assert batch["length"][k] == length
            assert batch["depth"][k] == depth

            # (block, its first step, how many it has), the context last
            begin = end - length
            pieces = [(block, begin - 20 * (depth - block), 20) for block in range(depth)]
            pieces.append((3, begin, length))
            for block, first, number in pieces:
                assert first >= 0
                cells, rewards = steps_of_file(group, stream, first, number)
                assert np.array_equal(batch["cells"][k, block, :number], cells)
                assert np.array_equal(batch["rewards"][k, block, :number], rewards)

            # what is asked for are the actions of the context
            actions = batch["action"][k]
            assert actions[:length].tolist() == cells[:, 1].tolist()
            assert (actions[length:] == -100).all()
            assert not batch["cells"][k, 3, length:].any()
            assert not batch["cells"][k, depth:3].any()
            assert not batch["rewards"][k, depth:3].any()


def test_segments_reach_the_whole_history_at_every_depth(histories):
    """Late learning is seen with compressions too, and so is the beginning; the original's began at step 0."""
    data = segments_of(histories, list(range(81)))
    samples = np.arange(len(data))
    ends: dict[int, list] = {k: [] for k in range(4)}
    for data.epoch in range(4):
        _, depth, end = data.draw(samples)
        for k in range(4):
            ends[k] += end[depth == k].tolist()
    data.epoch = 3
    assert data.depths().tolist() == np.bincount(depth).tolist()

    # each depth as often, and each of its possible ends as often
    total = sum(map(len, ends.values()))
    for k, values in ends.items():
        share = len(values) / total
        assert share == pytest.approx(0.25, abs=0.02)
        first = 20 * k + 1
        assert set(values) == set(range(first, 201))
        quarters = np.histogram(values, 4, (first, 201))[0]
        assert quarters.min() > 0.9 * quarters.mean()


def test_draws_depend_on_seed_epoch_and_sample_alone(histories):
    def drawn(seed, epoch, samples):
        data = segments_of(histories, GOALS, seed=seed)
        data.epoch = epoch
        return np.stack(data.draw(np.asarray(samples)))

    every = drawn(0, 0, range(90))
    some = drawn(0, 0, [7, 3])
    assert np.array_equal(every[:, [7, 3]], some)
    for seed, epoch in ((0, 1), (1, 0), (1, 1), (-1, 0), (-1, 1)):
        other = drawn(seed, epoch, range(90))
        assert not np.array_equal(every, other)

    # a fair draw
    samples = np.arange(10**5)
    values = hashed(0, 0, samples, 0)
    assert 0 <= values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1
    counts = np.histogram(values, 50, (0, 1))[0]
    assert np.abs(counts - 2000).max() < 5 * math.sqrt(2000)

    # another one for another purpose, and for the next sample
    others = hashed(0, 0, samples, 1)
    by_purpose = np.corrcoef(values, others)
    by_sample = np.corrcoef(values[1:], values[:-1])
    assert abs(by_purpose[0, 1]) < 0.02
    assert abs(by_sample[0, 1]) < 0.02


def test_histories_shorter_than_a_depth_train_to_the_depth_they_have(histories):
    for n_transit, depth in {60: 3, 66: 3, 67: 2, 240: 0}.items():
        data = segments_of(histories, [0], n_transit)
        assert data.max_depth == depth
    long = segments_of(histories, [0, 1], 240)
    batch = long.__getitems__([0, 1])
    assert batch["length"].max() <= 200
    assert batch["cells"].shape == (2, 1, 240, 3)


# --- the histories that sample_data.py makes --------------------------------------------------------------------------


def test_tabular_learners_rise_and_use_nothing_but_their_own_past():
    states, actions, after = tabular_histories([22, 80], 30, 1000, 1)
    assert np.array_equal(NEXT[states, actions], after)

    # returns of 50 episodes of 20 steps, by 30 streams of each goal
    goals = np.repeat([22, 80], 30)
    rewards = after == goals
    curve = rewards.reshape(50, 20, 60).sum(1)
    assert curve[0].mean() < 2
    last = curve[-10:]
    near, far = optimal_return([22, 80])
    assert last[:, :30].mean() > 0.85 * near
    assert last[:, 30:].mean() > 0.85 * far

    # streams are apart: up to the first reward of any, what a stream does is a matter of chance and its own visits
    beginnings = np.unique(actions[:20], axis=1)
    assert len(beginnings.T) > 55

    # the same seed gives the same histories
    again = tabular_histories([22, 80], 30, 1000, 1)
    assert np.array_equal(states, again.states)
    assert np.array_equal(actions, again.actions)
    assert np.array_equal(after, again.next_states)


def test_ppo_of_stable_baselines_writes_the_same_kind_of_history():
    from tasks.compressed_ad.ppo_histories import ppo_history

    states, actions, after = ppo_history(40, 4, 200, 42)
    assert states.shape == actions.shape == after.shape == (200, 4)
    assert np.array_equal(NEXT[states, actions], after)

    # an episode begins at the start, every other step where the step before led
    starts = np.arange(200) % 20 == 0
    assert (states[starts] == START).all()
    inside = ~starts[1:]
    later = states[1:]
    earlier = after[:-1]
    assert (later[inside] == earlier[inside]).all()
    assert len(np.unique(actions)) == 5
