"""CompressedAD's model and data: what may be seen, acting equals re-reading the whole past, and Darkroom itself."""

import itertools
import math

import h5py
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tasks.compressed_ad.acting import Agents
from tasks.compressed_ad.darkroom import ACTIONS, NEXT, START, optimal_return, random_return, split_goals
from tasks.compressed_ad.data import Histories, SegmentDataset, hashed
from tasks.compressed_ad.model import InContextNet, visible


def small_net(n_latent: int = 5, n_transit: int = 50, seed: int = 0) -> InContextNet:
    """With weights large enough that everything that is seen has a say in the output."""
    torch.manual_seed(seed)
    net = InContextNet(24, 2, 3, 32, n_transit, n_latent, 2).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return net


def made_up(count: int, steps: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Transitions (count, steps, 3) and rewards (count, steps) without any sense."""
    rng = torch.Generator().manual_seed(seed)
    cells = torch.randint(0, 81, (count, steps, 3), generator=rng)
    cells[..., 1] %= ACTIONS
    return cells.to(torch.uint8), torch.randint(0, 2, (count, steps), generator=rng).double()


def batch_of(cells, rewards, depth: int, n: int, length: int) -> dict:
    """Everything as one segment of `depth` blocks and a context of `length`, padded with noise up to 3 blocks."""
    padded, noise = made_up(len(cells), 4 * n, 99)[0], made_up(len(cells), 4 * n, 98)[1]
    padded, noise = padded.unflatten(1, (4, n)), noise.unflatten(1, (4, n))
    for block in range(depth):
        padded[:, block], noise[:, block] = (
            cells[:, block * n : (block + 1) * n],
            rewards[:, block * n : (block + 1) * n],
        )
    padded[:, 3, :length] = cells[:, depth * n : depth * n + length]
    noise[:, 3, :length] = rewards[:, depth * n : depth * n + length]
    size = len(cells)
    facts = {"depth": torch.full((size,), depth), "length": torch.full((size,), length)}
    facts |= {"compressed": [size if block < depth else 0 for block in range(3)]}
    return {"cells": padded, "rewards": noise, **facts}


def by_hand(net: InContextNet, cells: torch.Tensor, rewards: torch.Tensor, query: torch.Tensor):
    """Logits for `query` after one agent's past (T, 3), (T,), written out anew: no cache, no mask function."""

    def layer(block, x, memory, allowed):
        seen = torch.cat([memory, x]) if memory is not None else x
        q = block.query(F.layer_norm(x, x.shape[-1:], block.norm.weight, block.norm.bias))
        k, v = block.key_value(F.layer_norm(seen, x.shape[-1:], block.norm.weight, block.norm.bias)).chunk(2, -1)
        parts = []
        for a, b, c in zip(q.chunk(net.heads, -1), k.chunk(net.heads, -1), v.chunk(net.heads, -1), strict=True):
            scores = a @ b.T / math.sqrt(a.shape[-1])
            parts.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ c)
        x = x + block.out(torch.cat(parts, -1))
        return x + block.mlp(block.norm_mlp(x))

    def tokens(cells, rewards):
        if not len(cells):
            return torch.empty(0, net.positions.shape[1], dtype=torch.float64)
        a, b = cells[:, 0].long(), cells[:, 2].long()
        facts = [
            a // 9 / 4 - 1,
            a % 9 / 4 - 1,
            *F.one_hot(cells[:, 1].long(), 5).T,
            rewards,
            b // 9 / 4 - 1,
            b % 9 / 4 - 1,
        ]
        x = net.embed[0](torch.stack([fact.double() for fact in facts], -1))
        return F.layer_norm(x, x.shape[-1:], net.embed[1].weight, net.embed[1].bias) + net.positions[: len(cells)]

    n, latents = net.n_transit, None
    while net.n_latent and len(cells) >= n:  # fold the oldest block into the latents
        memory = tokens(cells[:n], rewards[:n])
        memory = memory if latents is None else torch.cat([latents, memory])
        x = net.latents
        for block in net.encoder:
            x = layer(block, x, memory, torch.ones(len(x), len(memory) + len(x), dtype=torch.bool))
        latents = F.layer_norm(x, x.shape[-1:], net.encoder_norm.weight, net.encoder_norm.bias)
        cells, rewards = cells[n:], rewards[n:]
    context = tokens(cells, rewards)
    old = 0 if latents is None else len(latents)
    asked = (net.embed_query.weight[query.long()] + net.positions[len(cells)])[None]
    x = torch.cat([*([] if latents is None else [latents]), context, asked])
    allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    allowed[:old, :old] = True
    for block in net.layers:
        x = layer(block, x, None, allowed)
    return net.head(x[-1])


@torch.no_grad()
@pytest.mark.parametrize("n_latent", [5, 0], ids=["compressed_ad", "ad"])
def test_acting_equals_reading_the_whole_past_anew(n_latent):
    """600 steps, 12 compressions deep: the same actions as a reference that keeps nothing, at every step."""
    n, forget, steps = 50, 20, 600
    net = small_net(n_latent, n)
    agents, kept = Agents(net, 2, forget), 0
    rng = torch.Generator().manual_seed(3)
    cells, rewards = torch.empty(2, 0, 3, dtype=torch.uint8), torch.empty(2, 0).double()
    state, actions, worst, depths = torch.tensor([40, 40]), [], 0.0, set()
    for t in range(steps):
        logits = agents.act(state)
        row = t % 2  # the reference is slow: the agents take turns
        expected = by_hand(net, cells[row, kept:], rewards[row, kept:], state[row])
        worst = max(worst, float((logits[row] - expected).abs().max()))
        noise = -torch.log(-torch.log(torch.rand(2, ACTIONS, generator=rng).double()))
        action = (logits + noise).argmax(-1)
        assert action[row] == (expected + noise[row]).argmax()
        after = torch.from_numpy(NEXT)[state, action]
        new = torch.stack([state, action, after], 1)
        reward = (after == 12).double()
        agents.observe(new, reward)
        cells, rewards = torch.cat([cells, new[:, None].to(torch.uint8)], 1), torch.cat([rewards, reward[:, None]], 1)
        state = torch.full_like(state, 40) if (t + 1) % 20 == 0 else after
        actions.append(action)
        depths.add((t + 1) // n)
        if not n_latent and cells.shape[1] - kept == n:
            kept += forget
    assert worst < 1e-9
    assert len(depths) == steps // n + 1
    assert torch.stack(actions).unique().tolist() == list(range(ACTIONS))


@torch.no_grad()
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_training_and_acting_are_one(depth):
    """The logits that are trained at every place of the context are those that an agent acts by there."""
    n = 12
    net = small_net(4, n)
    cells, rewards = made_up(3, (depth + 1) * n)
    for length in (n, 5):
        trained = net(batch_of(cells, rewards, depth, n, length))
        agents = Agents(net, 3, 0)
        for t in range(depth * n + length):
            logits = agents.act(cells[:, t, 0].long())
            if t >= depth * n:
                assert (logits - trained[:, t - depth * n]).abs().max() < 1e-10
            agents.observe(cells[:, t].long(), rewards[:, t])


@torch.no_grad()
def test_padding_and_the_future_change_nothing():
    """Noise in padded context, in blocks that a sample lacks, and after the place that is asked: the same output."""
    n = 12
    net = small_net(4, n)
    cells, rewards = made_up(4, 4 * n)
    batch = batch_of(cells, rewards, 3, n, n)
    batch["depth"], batch["length"] = torch.tensor([3, 2, 1, 0]), torch.tensor([12, 7, 12, 3])
    batch["compressed"] = [3, 2, 1]
    before = net(batch)
    other, noise = made_up(4, 4 * n, 7)
    other, noise = other.unflatten(1, (4, n)), noise.unflatten(1, (4, n))
    there = torch.ones(4, 4, n, dtype=torch.bool)
    for k in range(4):
        there[k, :3] = torch.arange(3)[:, None] < batch["depth"][k]
        there[k, 3, batch["length"][k] :] = False
    changed = dict(batch)
    changed["cells"] = torch.where(there[..., None], batch["cells"], other)
    changed["rewards"] = torch.where(there, batch["rewards"], noise)
    after = net(changed)
    for k, length in enumerate(batch["length"].tolist()):
        assert torch.equal(before[k, :length], after[k, :length])
    assert not torch.equal(batch["cells"], changed["cells"])
    # and what may be seen is seen: each real token changes what comes after it, and nothing before or at its place
    for k, block, place in [(0, 0, 4), (0, 2, 11), (1, 1, 0), (2, 3, 6), (3, 3, 1)]:
        changed = batch | {"rewards": batch["rewards"].clone()}
        changed["rewards"][k, block, place] += 1
        moved = (net(changed) - before).abs().amax(-1) > 1e-9
        first = place + 1 if block == 3 else 0
        length = int(batch["length"][k])
        assert not moved[k, :first].any()
        assert moved[k, first:length].all()
        assert not moved[[j for j in range(4) if j != k]].any()


@torch.no_grad()
def test_latents_see_each_other_and_not_the_context():
    """Latents are bidirectional: what the decoder keeps of them is the same with and without a context after them."""
    net = small_net(4, 12)
    latents = torch.randn(2, 4, 24).double()
    _, alone = net.decode(latents, None)
    mask = visible(torch.tensor([True, True]), 4, torch.tensor([12, 12]), 12)
    _, beside = net.decode(torch.cat([latents, torch.randn(2, 24, 24).double()], 1), mask)
    for a, b in zip(alone, beside, strict=True):
        assert torch.allclose(a, b[:, :, :, :4], atol=1e-12)
    swapped = latents.clone()
    swapped[:, 3] = torch.randn(24).double()
    _, moved = net.decode(swapped, None)
    assert (moved[1] - alone[1]).abs().amax((0, 1, 2, 4)).min() > 1e-6


def test_every_weight_learns():
    """Also where no sample has anything to compress, as DDP waits for every gradient; the encoder's are 0 then."""
    net = small_net(4, 12).float()
    cells, rewards = made_up(4, 48)
    for depth in (3, 0, -1):
        net.zero_grad()
        batch = batch_of(cells, rewards.float(), max(0, depth), 12, 12)
        if depth == -1:  # --max_compression_depth 0
            batch |= {"cells": batch["cells"][:, 3:], "rewards": batch["rewards"][:, 3:], "compressed": []}
        F.cross_entropy(net(batch).flatten(0, 1), batch["cells"][:, -1, :, 1].long().flatten()).backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None, name
            compresses = "encoder" in name or name == "latents"
            assert (parameter.grad.abs().max() > 0) == (depth > 0 or not compresses), (depth, name)


# --- Darkroom and the histories ---------------------------------------------------------------------------------------


def test_split_is_the_published_one():
    train, unseen = split_goals()
    assert [divmod(goal, 9) for goal in unseen] == [(4, 2), (5, 6), (6, 8), (7, 2), (3, 6), (0, 5), (5, 8), (5, 4)]
    assert sorted(train + unseen) == list(range(81))
    assert len(train) == 73
    assert split_goals(1)[1] != unseen


def test_returns_of_the_random_and_the_best_policy():
    """Against every plan of the best policy by search, and 20000 random episodes."""
    best = np.full((21, 81), -1)
    best[0, START] = 0
    for goal in (40, 0, 22, 49):
        value = np.zeros(81)
        for _ in range(20):  # value iteration backwards over the 20 steps
            value = ((goal == NEXT) + value[NEXT]).max(1)
        assert optimal_return([goal])[0] == value[START]
    assert optimal_return([0, 40, 49]).tolist() == [13, 20, 20]
    rng = np.random.default_rng(0)
    cell, total = np.full(20000, START), np.zeros(81)
    for _ in range(20):
        i, j = np.divmod(cell, 9)
        di, dj = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)])[rng.integers(0, 5, len(cell))].T
        cell = np.clip(i + di, 0, 8) * 9 + np.clip(j + dj, 0, 8)
        total += np.bincount(cell, minlength=81)
    assert np.abs(random_return(range(81)) - total / 20000).max() < 0.1
    assert random_return(range(81)).sum() == pytest.approx(20)


@pytest.fixture(scope="module")
def histories(rooms) -> Histories:
    return Histories(next(rooms.glob("datasets/*.hdf5")))


def test_mapped_and_cached_are_the_same(rooms, histories):
    mapped = Histories(next(rooms.glob("datasets/*.hdf5")), in_memory=False)
    assert (mapped.steps, mapped.streams, mapped.digest) == (200, 3, histories.digest)
    sets = [SegmentDataset(h, [3, 70, 11], 20, 3, 0) for h in (histories, mapped)]
    a, b = (s.__getitems__(list(range(0, len(s), 2))) for s in sets)
    for name in ("cells", "rewards", "depth", "length", "action", "sample"):
        assert torch.equal(a[name], b[name]), name
    assert np.array_equal(histories.learning_curve([5, 6]), mapped.learning_curve([5, 6]))


def test_segments_are_pieces_of_the_histories(rooms, histories):
    """Against the file itself: blocks and context are consecutive, end anywhere, and the rest is zero."""
    data = SegmentDataset(histories, [3, 70, 11], 20, 3, 0)
    data.epoch = 5
    batch = data.__getitems__(list(range(len(data))))
    history, depth, end = data.draw(np.arange(len(data)))
    assert batch["depth"].tolist() == sorted(depth.tolist(), reverse=True)
    assert batch["compressed"] == [int((depth > k).sum()) for k in range(3)]
    with h5py.File(next(rooms.glob("datasets/*.hdf5"))) as file:
        for k, sample in enumerate(batch["sample"].tolist()):
            group = file[str([3, 70, 11][history[sample] // 3])]
            stream, d, last = history[sample] % 3, depth[sample], end[sample]
            length = min(20, last - 20 * d)
            assert batch["length"][k] == length
            assert batch["depth"][k] == d
            pieces = [(block, last - length - 20 * (d - block), 20) for block in range(d)] + [
                (3, last - length, length)
            ]
            assert pieces[0][1] >= 0
            for block, first, number in pieces:
                states = group["states"][first : first + number, stream] @ (9, 1)
                led = group["next_states"][first : first + number, stream] @ (9, 1)
                actions = group["actions"][first : first + number, stream]
                expected = np.stack([states, actions, led], 1)
                assert np.array_equal(batch["cells"][k, block, :number], expected)
                assert np.array_equal(
                    batch["rewards"][k, block, :number], group["rewards"][first : first + number, stream]
                )
            assert batch["action"][k, :length].tolist() == actions.tolist()
            assert (batch["action"][k, length:] == -100).all()
            assert not batch["cells"][k, 3, length:].any()
            assert not batch["cells"][k, d:3].any()
            assert not batch["rewards"][k, d:3].any()


def test_segments_reach_the_whole_history_at_every_depth(histories):
    """Late learning is seen with compressions too, and so is the beginning; the original's began at step 0."""
    data = SegmentDataset(histories, list(range(81)), 20, 3, 0)
    ends: dict[int, list] = {k: [] for k in range(4)}
    for data.epoch in range(4):
        _, depth, end = data.draw(np.arange(len(data)))
        for k in range(4):
            ends[k] += end[depth == k].tolist()
    total = sum(map(len, ends.values()))
    for k, values in ends.items():
        assert len(values) / total == pytest.approx(0.25, abs=0.02)
        assert set(values) == set(range(20 * k + 1, 201))
        quarters = np.histogram(values, 4, (20 * k + 1, 201))[0]
        assert quarters.min() > 0.9 * quarters.mean()
    data.epoch = 3
    assert data.depths().tolist() == np.bincount(depth).tolist()


def test_draws_depend_on_seed_epoch_and_sample_alone(histories):
    def drawn(seed, epoch, samples):
        data = SegmentDataset(histories, [3, 70, 11], 20, 3, seed)
        data.epoch = epoch
        return np.stack(data.draw(np.asarray(samples)))

    every = drawn(0, 0, range(90))
    assert np.array_equal(every[:, [7, 3]], drawn(0, 0, [7, 3]))
    for seed, epoch in itertools.product((0, 1, -1), (0, 1)):
        assert (seed, epoch) == (0, 0) or not np.array_equal(every, drawn(seed, epoch, range(90)))
    values = hashed(0, 0, np.arange(10**5), 0)
    assert 0 <= values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1
    counts = np.histogram(values, 50, (0, 1))[0]
    assert np.abs(counts - 2000).max() < 5 * math.sqrt(2000)
    assert abs(np.corrcoef(values, hashed(0, 0, np.arange(10**5), 1))[0, 1]) < 0.02
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.02


def test_histories_shorter_than_a_depth_train_to_the_depth_they_have(histories):
    assert SegmentDataset(histories, [0], 60, 3, 0).max_depth == 3
    assert SegmentDataset(histories, [0], 66, 3, 0).max_depth == 3
    assert SegmentDataset(histories, [0], 67, 3, 0).max_depth == 2
    assert SegmentDataset(histories, [0], 240, 3, 0).max_depth == 0
    long = SegmentDataset(histories, [0, 1], 240, 3, 0)
    batch = long.__getitems__([0, 1])
    assert batch["length"].max() <= 200
    assert batch["cells"].shape == (2, 1, 240, 3)


# --- the histories that sample_data.py makes --------------------------------------------------------------------------


def test_tabular_learners_rise_and_use_nothing_but_their_own_past():
    from tasks.compressed_ad.sample_data import tabular_histories

    states, actions, after = tabular_histories([22, 80], 30, 1000, 1)
    assert np.array_equal(NEXT[states, actions], after)
    rewards = after == np.repeat([22, 80], 30)
    curve = rewards.reshape(50, 20, 60).sum(1)
    assert curve[0].mean() < 2
    assert curve[-10:, :30].mean() > 0.85 * optimal_return([22])[0]
    assert curve[-10:, 30:].mean() > 0.85 * optimal_return([80])[0]
    # streams are apart: up to the first reward of any, what a stream does is a matter of chance and its own visits
    assert len(np.unique(actions[:20], axis=1).T) > 55
    again = tabular_histories([22, 80], 30, 1000, 1)
    assert all(np.array_equal(a, b) for a, b in zip((states, actions, after), again, strict=True))


def test_ppo_of_stable_baselines_writes_the_same_kind_of_history():
    from tasks.compressed_ad.ppo_histories import ppo_history

    states, actions, after = ppo_history(40, 4, 200, 42)
    assert states.shape == actions.shape == after.shape == (200, 4)
    assert np.array_equal(NEXT[states, actions], after)
    starts = np.arange(200) % 20 == 0
    assert (states[starts] == START).all()
    assert (states[1:][~starts[1:]] == after[:-1][~starts[1:]]).all()
    assert len(np.unique(actions)) == 5
