"""Guide 4: worlds, histories, segments, model, acting and rivals against references of their own; whole runs."""

import json
import math
import shutil
from argparse import Namespace
from itertools import product
from pathlib import Path

import gymnasium
import h5py
import numpy as np
import pytest
import torch

import train as script
from tasks.compressed_ad import data as ad
from tasks.compressed_ad import report, sample_data
from utils.cli import InputError

DARKROOM = ad.make_env("darkroom")
MOVES = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)])


def small_args(**more) -> Namespace:
    flags = {"tf_n_embd": 24, "tf_n_layer": 2, "tf_n_head": 3, "tf_dim_feedforward": 32, "encoder_n_layer": 2}
    flags |= {"n_transit": 12, "n_latent": 4, "shift": 0, "seed": 0, "temperature": 1.0, "test_batch_size": 256}
    return Namespace(**flags | {"max_compression_depth": 3, "from_start": 0.0} | more)


def small_model(**more) -> script.InContextNet:
    """With weights large enough that everything that is seen has a say in the output."""
    torch.manual_seed(0)
    model = script.InContextNet(DARKROOM, small_args(**more)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


# --- the model --------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("n_latent", [4, 0], ids=["compressed_ad", "ad"])
def test_all_that_was_seen_counts(n_latent):
    """Each cell, action and reward of 55 steps, and their order, through four compressions; or what AD keeps of it."""
    model, limits = small_model(n_latent=n_latent), torch.tensor([81, 5, 81, 2])
    past = (torch.rand(55, 4, generator=torch.Generator().manual_seed(0)) * limits).long().repeat(222, 1, 1)
    for k, (t, part) in enumerate(product(range(55), range(4))):
        past[k, t, part] = (past[k, t, part] + 1) % limits[part]
    past[220, :12] = past[220, :12].flip(0)
    agents, silent = script.Agents(model, 222, 5), script.Agents(model, 222, 5)
    for t, step in enumerate(past.unbind(1)):
        agents.act(step[:, 0])
        agents.observe(*step.T)
        if n_latent or t >= 45:
            silent.observe(*step.T)
    cell = torch.full((222,), 40)
    logits = agents.act(cell)
    # who has not acted, or has seen no more than AD keeps, knows the same
    torch.testing.assert_close(silent.act(cell), logits, atol=1e-10, rtol=0)
    moved = (logits - logits[221]).abs().amax(1) > 1e-9
    # a full context of 12 drops 5, which has happened 9 times
    assert moved.tolist() == [bool(n_latent)] * 180 + [True] * 40 + [bool(n_latent), False]


@torch.no_grad()
def test_training_and_acting_are_one():
    """Each place of a context, of samples with 3 to 0 blocks and noise where they have nothing, in a moved room."""
    model, rng = small_model(shift=4), torch.Generator().manual_seed(0)
    cells = torch.randint(0, 81, (4, 4, 12, 3), generator=rng) % torch.tensor([81, 5, 81])
    rewards = torch.randint(0, 2, (4, 4, 12), generator=rng).double()
    depths, lengths = torch.tensor([3, 2, 1, 0]), torch.tensor([12, 7, 12, 3])
    batch = {"cells": cells, "rewards": rewards, "compressed": [3, 2, 1], "shift": torch.full((4, 2), 2)}
    trained = model(batch | {"depth": depths, "length": lengths})
    for k, (depth, length) in enumerate(zip(depths, lengths, strict=True)):
        past, gains = (torch.cat([part[k, :depth].flatten(0, 1), part[k, 3, :length]]) for part in (cells, rewards))
        agents = script.Agents(model, 1, 0)
        for t, (step, gain) in enumerate(zip(past, gains, strict=True)):
            logits = agents.act(step[:1])[0]
            if t >= 12 * depth:
                torch.testing.assert_close(logits, trained[k, t - 12 * depth], atol=1e-10, rtol=0)
            agents.observe(*step[:, None], gain[None])
    # told by hand: a one of 13 rows, a one of 13 columns
    told = model.encode(torch.tensor([[40]]), torch.tensor([[3, 1]]), torch.float64)[0, 0]
    assert told.nonzero().flatten().tolist() == [4 + 3, 13 + 4 + 1]


@pytest.mark.parametrize("compressed", [[4, 2], [0, 0], []])
def test_every_weight_learns(compressed):
    """Also where no sample has anything to compress, as DDP waits for every gradient; the encoder's are 0 then."""
    model, blocks, whole = small_model(), len(compressed) + 1, torch.full((4,), 12)
    batch = {"cells": torch.ones(4, blocks, 12, 3, dtype=torch.long), "rewards": torch.ones(4, blocks, 12)}
    batch |= {"compressed": compressed, "length": whole, "depth": whole * sum(compressed), "shift": torch.zeros(4, 2)}
    model(batch).square().mean().backward()
    for name, parameter in model.named_parameters():
        compresses = "encoder" in name or name == "latents"
        assert bool(parameter.grad.abs().max() > 0) == (sum(compressed) > 0 or not compresses), name


# --- worlds and who acts in them --------------------------------------------------------------------------------------


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
    for cell, move in product(goals, MOVES):
        row, column = np.clip(np.divmod(cell, 9) + move, 0, 8)
        moves[cell, 9 * row + column] += 0.2
    powers = [np.linalg.matrix_power(moves, t)[40] for t in range(1, 21)]
    np.testing.assert_allclose(DARKROOM.value(np.mean), np.sum(powers, 0))


def test_key_to_door_by_a_walk():
    """The key counts once, the door once and only with the key."""
    env, rng, task = ad.make_env("key_to_door:4"), np.random.default_rng(0), np.arange(200)
    key, door = np.divmod(np.random.default_rng(0).permutation(256)[:200], 16)
    place, state, phase = np.full((200, 2), 2), np.full(200, env.start), np.zeros(200, int)
    for _ in range(300):
        action = rng.integers(0, 5, 200)
        place = np.clip(place + MOVES[action], 0, 3)
        gain = place @ (4, 1) == np.choose(phase, (key, door, -1))
        phase = phase + gain
        state, reward = env.step(task, state, action)
        np.testing.assert_array_equal(state, place @ (4, 1) + 16 * phase)
        np.testing.assert_array_equal(reward, gain)
    assert set(phase) >= {1, 2}
    assert env.value(np.max).max() == 2


def test_gymnasium_world_is_gymnasiums():
    """FrozenLake's table, its actions in another order in each task; what ends an episode keeps its place."""
    env, lake = ad.make_env("gym:FrozenLake-v1"), gymnasium.make("FrozenLake-v1").unwrapped
    # the share of each next state, and the reward last
    told = np.zeros((16, 4, 17))
    for state, action in product(range(16), range(4)):
        for share, after, gain, _ in lake.P[state][action]:
            told[state, action, [after, 16]] += share, share * gain
    for end in (5, 7, 11, 12, 15):
        told[end] = np.eye(17)[end]
    shares, orders = np.diff(env.chance, prepend=0), set()
    found = (shares[..., None] * np.stack([*(env.next == k for k in range(16)), env.reward], -1)).sum(-2)
    for task in range(24):
        order = np.abs(found[task][:, :, None] - told[:, None]).max((0, 3)).argmin(1)
        np.testing.assert_allclose(found[task], told[:, order], atol=1e-6)
        orders.add(tuple(order))
    assert len(orders) == 24
    after, _ = env.step(np.zeros(6000, int), np.full(6000, 14), np.zeros(6000, int), np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(after, minlength=16) / 6000, found[0, 14, 0, :16], atol=0.03)


@pytest.mark.parametrize("name", ["darkroom:2", "darkroom:26", "darkroom:x", "atari", "gym:CartPole-v1", "gym:os:X-v0"])
def test_worlds_that_there_are_not(name):
    with pytest.raises(InputError, match="give darkroom|Discrete spaces and a table P"):
        ad.make_env(name)


@pytest.mark.parametrize(
    ("kind", "episodes", "share"), [(ad.Search, 15, 1), (report.RMax, 50, 1), (report.TabularQ, 400, 0.8)]
)
def test_rivals_find_the_best_policy(kind, episodes, share):
    task = np.array([0, 1, 80])
    agents = kind(DARKROOM, task, np.random.default_rng(0))
    _, actions, after, rewards = ad.play(DARKROOM, task, episodes * 20, None, agents.choose, agents.learn)
    assert rewards[-200:].sum() >= share * 10 * DARKROOM.value(np.max)[task].sum()
    if kind is ad.Search:
        # until the first reward all go the same way, as nothing tells them the goal, and to what is new
        assert (actions[:6] == actions[:6, :1]).all()
        assert len(np.unique(after[:20, 2])) == 20


def test_the_posterior_finds_the_order_of_the_actions():
    """On FrozenLake: the likelihood of an order by hand, and nearly the optimum after ten episodes."""
    env, rng, task = ad.make_env("gym:FrozenLake-v1"), np.random.default_rng(0), np.repeat([3, 17], 40)
    rule = report.Posterior(env, task, rng)
    by_hand = rule.score[0, 5]
    *steps, rewards = ad.play(env, task, 40 * env.horizon, rng, rule.choose, rule.learn)
    assert ad.learning_curve(rewards, env)[10:].mean() > 0.85 * env.value(np.max)[3]
    for state, action, after, reward in zip(*(part[:, 0] for part in (*steps, rewards)), strict=True):
        place = 5, state, action
        right = (env.next[place] == after) & (env.reward[place] == reward)
        by_hand += math.log(np.diff(env.chance[place], prepend=0)[right].sum() + 1e-9)
    assert rule.score[0, 5] == pytest.approx(by_hand)


# --- histories --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Histories of 200 steps, three of each goal."""
    root = tmp_path_factory.mktemp("ad") / "data"
    sample_data.write_sample_data(root, "darkroom", "tabular", 3, 200, 0.3, 42)
    return root


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Path:
    """Histories in a world of chance."""
    root = tmp_path_factory.mktemp("lake")
    sample_data.write_sample_data(root, "gym:FrozenLake-v1", "epsilon", 4, 320, 0.3, 0)
    return root


@pytest.fixture(scope="module")
def histories(folder) -> ad.Histories:
    return ad.Histories(str(folder), None, "ad", 0)


@pytest.mark.parametrize("source", ["tabular", "search", "epsilon"])
def test_sources_learn(source, tmp_path):
    """From little to most of what is possible, and no two streams alike; a file that is there is kept."""
    words = tmp_path, "darkroom:5", source, 10, 360, 0.3, 1
    sample_data.write_sample_data(*words)
    read = ad.Histories(str(tmp_path), "darkroom:5", "ad", 0)
    curve, best = np.mean(read.curves, 0), read.env.value(np.max).mean()
    assert curve[-3:].mean() > 0.6 * best > curve[0]
    assert len(np.unique(read.words[3, :, :, 1], axis=0)) == 10
    with pytest.raises(InputError, match="is there already"):
        sample_data.write_sample_data(*words)
    with pytest.raises(InputError, match=r"are of darkroom:5"):
        ad.Histories(str(tmp_path), "darkroom", "ad", 0)


def test_ppo_of_stable_baselines_writes_the_same_kind_of_history():
    states, actions, after, rewards = sample_data.ppo_history(DARKROOM, 4, 200, 42, 40)
    assert np.array_equal(DARKROOM.next[40, states, actions, 0], after)
    assert np.array_equal(rewards, after == 40)
    follows = np.concatenate([np.full((1, 4), 40), after[:-1]])
    follows[::20] = 40
    assert np.array_equal(states, follows)
    assert len(np.unique(actions)) == 5


def test_targets_of_the_objectives(folder, histories, tmp_path):
    """ad: what was done; dpt: a best action, drawn alike; search: what one does who searches without mistakes."""
    assert np.array_equal(histories.words[..., 3], histories.words[..., 1])
    dpt, goal = ad.Histories(str(folder), None, "dpt", 0).words.astype(int), np.arange(81)[:, None, None]
    assert np.array_equal(dpt[..., :3], histories.words[..., :3])
    led = DARKROOM.next[0, dpt[..., 0], dpt[..., 3], 0]
    far, then = (abs(cell // 9 - goal // 9) + abs(cell % 9 - goal % 9) for cell in (dpt[..., 0], led))
    assert np.array_equal(then, np.maximum(far - 1, 0))
    both = (dpt[..., 0] // 9 > goal // 9) & (dpt[..., 0] % 9 > goal % 9)
    shares = np.bincount(dpt[..., 3][both], minlength=5) / both.sum()
    assert shares == pytest.approx([0, 0.5, 0, 0.5, 0], abs=0.05)
    sample_data.write_sample_data(tmp_path, "key_to_door:3", "search", 1, 150, 0.0, 0)
    words = ad.Histories(str(tmp_path), None, "search", 0).words
    assert np.array_equal(words[..., 3], words[..., 1])


def spoil(name: str, place: tuple, value):
    def write(file) -> None:
        values = file[name][()].astype(float if isinstance(value, float) else None)
        values[place] = value
        del file[name]
        file[name] = values

    return write


def replace(name: str, make):
    def write(file) -> None:
        values = file[name][()] if "/" in name else None
        del file[name]
        file[name] = make(values)

    return write


WRONG = {
    "beyond the grid": (spoil("7/states", (5, 2), 9), "group '7', step 5, stream 2: states must be whole numbers"),
    "half a cell": (spoil("7/states", (0, 0), 4.5), "step 0, stream 0: states must be whole numbers"),
    "sixth action": (spoil("7/actions", (3, 1), 5), "step 3, stream 1: actions must be whole numbers"),
    "nan": (spoil("7/actions", (3, 1), math.nan), "step 3, stream 1: actions must be whole numbers"),
    "reward": (spoil("7/rewards", (11, 0), 0.5), "step 11, stream 0: rewards is not what the task gives"),
    "dones": (spoil("7/dones", (19, 1), False), "step 19, stream 1: dones must be True at each episode's end alone"),
    "wall": (spoil("7/next_states", (4, 2), (0, 0)), "step 4, stream 2: next_states is not where the action leads"),
    "short": (replace("7/rewards", lambda values: values[:10]), "group '7': states is int8"),
    "missing group": (lambda file: file.__delitem__("80"), "80 groups; darkroom:9 has 81 tasks"),
    "missing field": (lambda file: file.__delitem__("7/rewards"), "needs groups '0', '1' ... with states"),
    "linked": (replace("7", lambda _: h5py.ExternalLink("other.h5", "/7")), "not readable histories"),
    "chance, jump": (spoil("7/states", (32, 1), 5), "step 32, stream 1: states is not where"),
    "chance, next": (
        spoil("7/next_states", (31, 1), 15),
        "step 31, stream 1: next_states is not where the action leads",
    ),
    "chance, reward": (spoil("7/rewards", (5, 2), 1.0), "step 5, stream 2: rewards is not what the task gives"),
    "module": (lambda file: file.attrs.update(env="gym:antigravity:X-v0"), "no module may be named"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_histories_are_named(name, folder, lake, tmp_path):
    write, message = WRONG[name]
    source = lake if name.startswith("chance") else folder
    path = shutil.copy(next(source.glob("datasets/*")), tmp_path)
    with h5py.File(path, "r+") as file:
        write(file)
    with pytest.raises(InputError, match=message):
        ad.Histories(str(path), None, "ad", 0)


def test_files_that_are_not_there_or_no_hdf5(folder, tmp_path):
    beside = next(folder.glob("datasets/*"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "cut.hdf5").write_bytes(beside.read_bytes()[:9999])
    for path, message in {
        tmp_path / "none.hdf5": "no such file; give --data",
        tmp_path: "holds 0 .hdf5 files, also in datasets/; name one",
        beside.with_name("none.hdf5"): f"no such file; beside it lies {beside.name}",
        tmp_path / "sub": "not readable histories",
    }.items():
        with pytest.raises(InputError, match=message):
            ad.Histories(str(path), None, "ad", 0)


def test_histories_as_others_write_them(folder, histories, tmp_path):
    """Another type of number, one goal with more steps, and ends that are logged as the next start: the same words."""
    path = shutil.copy(next(folder.glob("datasets/*")), tmp_path)
    with h5py.File(path, "r+") as file:
        for name in ad.FIELDS:
            replace(f"3/{name}", lambda values: np.concatenate([values, values[:20]]).astype(float))(file)
        file["5/next_states"][19::20] = (4, 4)
    read = ad.Histories(str(path), None, "ad", 0)
    assert np.array_equal(read.words, histories.words)
    assert np.array_equal(read.rewards, histories.rewards)
    assert read.longest == 220
    assert 20 < read.repaired <= 30


# --- segments ---------------------------------------------------------------------------------------------------------


def segments_of(histories, tasks, train=True, **more) -> ad.SegmentDataset:
    return ad.SegmentDataset(histories, tasks, small_args(**{"n_transit": 20} | more), train)


class Sample(int):
    epoch = 5


def test_segments_are_pieces_of_the_histories(histories):
    """Blocks and context are consecutive, end where they were drawn to, and the rest is zero."""
    data = segments_of(histories, [3, 41, 80])
    batch = data.__getitems__([Sample(k) for k in range(len(data))])
    history, depths, ends, _ = data.draw(batch["index"].numpy(), 5)
    assert batch["depth"].tolist() == sorted(depths, reverse=True)
    assert batch["compressed"] == [int((depths > k).sum()) for k in range(3)]
    # each history as often as contexts cover it
    assert np.bincount(history).tolist() == [10] * 9
    for k, (place, depth, end) in enumerate(zip(history, depths, ends, strict=True)):
        length = min(20, end - 20 * depth)
        assert batch["length"][k] == length
        where = (3, 41, 80)[place // 3], place % 3, slice(end - length - 20 * depth, end)
        words, cells, rewards = histories.words[where], batch["cells"][k], batch["rewards"][k]
        assert np.array_equal(torch.cat([cells[:depth].flatten(0, 1), cells[3, :length]]), words[:, :3])
        assert np.array_equal(torch.cat([rewards[:depth].flatten(), rewards[3, :length]]), histories.rewards[where])
        assert batch["action"][k].tolist() == [*words[-length:, 3], *[-100] * (20 - length)]
        assert not cells[depth:3].any()
        assert not cells[3, length:].any()


def test_segments_reach_the_whole_history_at_every_depth(histories):
    """Late learning is seen with compressions too, and so is the beginning; the original's began at step 0."""
    data = segments_of(histories, list(range(81)), shift=4)
    draws = [data.draw(np.arange(len(data)), epoch) for epoch in range(4)]
    depths, ends, shifts = (np.concatenate([draw[part] for draw in draws]) for part in (1, 2, 3))
    for k in range(4):
        values = ends[depths == k]
        assert len(values) / len(ends) == pytest.approx(0.25, abs=0.02)
        assert set(values) == set(range(20 * k + 1, 201))
        quarters = np.histogram(values, 4, (20 * k + 1, 201))[0]
        assert quarters.min() > 0.9 * quarters.mean()
    counts = np.bincount(shifts @ (5, 1), minlength=25)
    assert counts.min() > 0.8 * counts.mean()
    _, depth, end, _ = segments_of(histories, [0, 1], from_start=1.0).draw(np.arange(400), 0)
    assert np.array_equal(end, 20 * (depth + 1))
    depths = [segments_of(histories, [0], n_transit=n).max_depth for n in (60, 66, 67, 240)]
    assert depths == [3, 3, 2, 0]


def test_draws_depend_on_seed_epoch_and_sample_alone(histories):
    def drawn(seed: int, epoch: int, samples=range(90)) -> np.ndarray:
        return np.stack(segments_of(histories, [0, 40], seed=seed).draw(np.asarray(samples), epoch)[1:3])

    assert np.array_equal(drawn(0, 0)[:, [7, 3]], drawn(0, 0, [7, 3]))
    assert len({drawn(*where).tobytes() for where in ((0, 0), (0, 1), (1, 0), (1, 1), (-1, 0))}) == 5


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_returns_against_a_simulation_step_by_step():
    """One agent after the other in a room written out anew; the same in other company."""
    model, run = small_model(shift=2), Namespace(position=Namespace(step=0), heartbeat=lambda place: None)
    one, other = (
        script.act_in_context(model, DARKROOM, [40, 49], 2, 4, run, small_args(temperature=0.7, test_batch_size=size))
        for size in (4, 3)
    )
    assert all(np.array_equal(*parts) for parts in zip(one, other, strict=True))
    for (place, goal), agent in product(enumerate((40, 49)), range(2)):
        rng, alone = np.random.default_rng([0, script.ACTING, goal, agent]), script.Agents(model, 1, 6)
        for episode in range(4):
            way, noise = [40], -0.7 * np.log(-np.log(rng.random((20, 5))))
            for t in range(20):
                action = int((alone.act(torch.tensor(way[-1:]))[0].numpy() + noise[t]).argmax())
                way.append(int(np.clip(np.divmod(way[-1], 9) + MOVES[action], 0, 8) @ (9, 1)))
                alone.observe(*torch.tensor([way[-2], action, way[-1], way[-1] == goal])[:, None])
            assert one[0][place, agent, episode] == way[1:].count(goal)
            assert (place, agent) != (0, 0) or one[1][episode].tolist() == way


@torch.no_grad()
def test_action_accuracy_against_a_loop(histories):
    """Of a piece of every depth, at the same places whatever the seed."""
    model = small_model(n_transit=20).float()
    data, loss, right = segments_of(histories, [5, 70], train=False, seed=7), [], []
    for sample in range(len(data)):
        batch = data.__getitems__([sample])
        depth, length = int(batch["depth"]), int(batch["length"])
        assert depth == 3 - sample // 6
        assert length == min(20, 1 + int(sample % 6 * 0.618034 % 1 * (200 - 20 * depth)))
        logits, action = model(batch)[0, :length].log_softmax(-1), batch["action"][0, :length]
        loss += (-logits[range(length), action]).tolist()
        right += (logits.argmax(-1) == action).tolist()
    assert len(data) == 2 * 3 * 4
    found = script.action_accuracy(model, data, Namespace(batches=iter), "no", small_args())
    assert found == pytest.approx({"loss": np.mean(loss), "accuracy": np.mean(right)}, rel=1e-5)


def test_numbers_of_the_table():
    """8 goals, 10 agents, 40 episodes; goals differ far more than agents, so that Student's interval is theirs."""
    rng = np.random.default_rng(1)
    returns = rng.normal(5, 1, (8, 10, 40)) + rng.normal(0, 3, (8, 1, 1))
    by_goal = returns[:, :, 36:].mean((1, 2))
    mean, half = by_goal.mean(), 2.3646 * by_goal.std(ddof=1) / 8**0.5
    random, optimum = (DARKROOM.value(choose)[:8].mean() for choose in (np.mean, np.max))
    found = report.return_metrics(returns, DARKROOM, list(range(8)))
    names = ["return_first", "return_last", "return_last_low", "return_last_high", "normalized_last"]
    expected = [returns[:, :, 0].mean(), mean, mean - half, mean + half, (mean - random) / (optimum - random)]
    assert [found[name] for name in names] == pytest.approx(expected, rel=1e-3)


# --- whole runs -------------------------------------------------------------------------------------------------------

FLAGS = "--tf_n_embd 16 --tf_n_layer 1 --tf_n_head 2 --tf_dim_feedforward 16 --encoder_n_layer 1 --n_transit 20 "
FLAGS += "--n_latent 4 --batch_size 8 --train_timesteps 6 --num_warmup_steps 2 --eval_interval 3 --val_episodes 2 "
FLAGS += "--eval_episodes 3 --eval_seeds 2 --num_workers 0 --log_every 1 "


def start(data: Path, out: Path, words: str = "") -> None:
    """The script in this process."""
    assert (
        script.main(script.parse_args([*FLAGS.split(), "--data", str(data), "--output_dir", str(out), *words.split()]))
        == 0
    )


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    start(folder, out, "--split_seed 1 --objective search --from_start 0.5 --shift 1 --max_compression_depth 2")
    return out


def test_a_run_leaves_what_the_page_says(histories, finished):
    assert {"model.safetensors", "summary.json"} <= {path.name for path in finished.iterdir()}
    assert (finished / "figures" / "test.png").stat().st_size > 10_000
    summary = json.loads((finished / "summary.json").read_text())
    rivals = "source_of_the_histories tabular_Q_from_scratch R_max_from_scratch search_that_knows_the_map".split()
    names = {f"test/rival/{name}/normalized_last" for name in (*rivals, "random_actions", "optimum")}
    assert {"test/normalized_last", "test/loss"} | names <= summary.keys()
    assert summary["test/rival/random_actions/normalized_last"] == 0
    _, unseen = ad.split_tasks(81, 1)
    assert summary["tasks"] == f"darkroom:9: {' '.join(map(str, unseen))}"
    source = histories.rewards[unseen, :, 40:60].sum(2).mean()
    assert summary["test/rival/source_of_the_histories/return_last"] == pytest.approx(source)
    curves = (finished / "test_returns.csv").read_text().splitlines()
    assert curves[0].startswith("episode,compressed_ad/search,source of the histories,tabular Q from scratch,R-max")
    assert [line.split(",")[0] for line in curves[1:]] == ["1", "2", "3"]
    # best.pt by the loss on training tasks; a mean over actions, at first nearly that of five alike; warm-up and cosine
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}
    assert losses.keys() == {3, 6}
    assert torch.load(finished / "best.pt", weights_only=True)["position"]["best"] == min(losses.values())
    assert all(line["val/loss"] != line["unseen/loss"] for line in lines if "val/loss" in line)
    train = [line for line in lines if "train/loss" in line]
    assert train[0]["train/loss"] == pytest.approx(math.log(5), abs=0.3)
    shares = [0.5, 1, 1, *((1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3))]
    assert [line["train/lr"] for line in train] == pytest.approx([1e-4 * share for share in shares])


def test_eval_only_gives_the_runs_own_numbers(folder, finished, capfd):
    """What the model and its task are made of comes from the checkpoint; the run's own curve stays as it is."""
    summary, curve = json.loads((finished / "summary.json").read_text()), (finished / "test_returns.csv").read_bytes()
    start(folder, finished, "--eval_only --tf_n_embd 32 --tf_n_head 4")
    found = json.loads((finished / "eval_test.json").read_text())
    assert found == {name: summary[name] for name in found if name != "step"} | {"step": found["step"]}
    told = capfd.readouterr().out
    for words in ("objective: search", "split_seed: 1", "from_start: 0.5", "shift: 1", "max_compression_depth: 2"):
        assert f"--{words}, as in the checkpoint" in told
    start(folder, finished, "--eval_only --seed 1 --temperature 0")
    assert (finished / "test_returns.csv").read_bytes() == curve != (finished / "eval_test_returns.csv").read_bytes()


def test_beside_a_run_without_compression(folder, tmp_path, capfd):
    """Of --model ad, in which an epoch's end alone evaluates and saves nothing; the last evaluation counts."""
    words = "--model ad --train_timesteps 9 --batch_size 600 --save_every 6 --eval_interval 100 --keep_last 20"
    start(folder, tmp_path / "ad", words)
    assert sorted(path.name for path in (tmp_path / "ad").glob("step_*.pt")) == ["step_00000006.pt", "step_00000009.pt"]
    output = capfd.readouterr().out
    assert "epoch 3 step 9/9" in output
    start(folder, tmp_path / "run", f"--rival_run {tmp_path}/ad")
    assert "rival run: ad/ad" in capfd.readouterr().out
    with pytest.raises(InputError, match="tested on darkroom:9: 38 51 62 65 33 5 53 49; give one of darkroom:9: "):
        start(folder, tmp_path / "run2", f"--rival_run {tmp_path}/ad --split_seed 1")


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        ("--tf_n_head 3", "", "--tf_n_head 3: must divide --tf_n_embd 16"),
        ("--num_warmup_steps 6", "", "--num_warmup_steps 6: must be below --train_timesteps"),
        ("--n_transit 201", "", "--n_transit 201: more than the 200 steps of the histories"),
        ("--n_transit 200", "", "--n_transit 200: with histories of 200 steps nothing would be compressed"),
        ("--env key_to_door", "", "--env key_to_door: the histories in"),
        ("--resume_from FINISHED/best.pt", "key_to_door:4", "are of key_to_door:4"),
        ("--resume_from FINISHED/best.pt", "darkroom", "--resume_from: a run with digest"),
    ],
)
def test_wrong_flags_are_named(folder, finished, tmp_path, capfd, words, env, message):
    if env:
        folder = tmp_path / "data"
        sample_data.write_sample_data(folder, env, "epsilon", 1, 200, 0.3, 43)
    with pytest.raises((SystemExit, InputError)) as error:
        start(folder, tmp_path / "run", words.replace("FINISHED", str(finished)))
    assert message in f"{error.value} {capfd.readouterr().err}"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_gymnasium_world_from_end_to_end(lake, tmp_path, capfd):
    start(lake, tmp_path / "run", "--objective dpt --temperature 0.5")
    output = capfd.readouterr().out
    for words in ("3 unseen tasks", "tabular Q from scratch", "posterior over all tasks", "about 0:00:0"):
        assert words in output
    # it is no world without chance, and no room
    assert "R-max" not in output
    with pytest.raises(InputError, match="--shift 2: gym:FrozenLake-v1 is no room"):
        start(lake, tmp_path / "run2", "--shift 2")
    with pytest.raises(InputError, match="no room, whose map one could know"):
        start(lake, tmp_path / "run3", "--objective search")


def test_a_run_of_days_says_so():
    args = Namespace(mixed_precision="no")
    assert "; a trial of minutes" in script.say_how_long(small_model().float(), 3, 1e15, args)


def test_the_published_settings_are_the_defaults():
    defaults = vars(script.parse_args([]))
    args = vars(script.parse_args(["--config", "configs/compressed_ad_darkroom.yaml"]))
    assert {name for name, value in args.items() if value != defaults[name]} == {"config"}
    args = script.parse_args(["--config", "configs/ad_darkroom.yaml"])
    assert (args.model, args.n_latent, args.tf_n_embd, args.batch_size) == ("ad", 0, 64, 512)
