"""Guide 4: environments, histories, segments, model, acting and baselines against independent references; runs."""

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
import torch.nn.functional as F
from scipy import stats

import train as script
from tasks.compressed_ad import data as ad
from tasks.compressed_ad import report, sample_data
from utils.cli import InputError

DARKROOM = ad.make_env("darkroom")
MOVES = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)])


SMALL = "--tf_n_embd 24 --tf_n_layer 2 --tf_n_head 3 --tf_dim_feedforward 32 --encoder_n_layer 2 --n_transit 12 "
SMALL += "--n_latent 4"


def small_args(**more) -> Namespace:
    return Namespace(**vars(script.parse_args(SMALL.split())) | more)


def small_model(**more) -> script.InContextNet:
    """A model whose weights are large enough that every input changes the output."""
    torch.manual_seed(0)
    model = script.InContextNet(DARKROOM, small_args(**more)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


# --- the model --------------------------------------------------------------------------------------------------------


def random_past(steps: int) -> torch.Tensor:
    """Transitions (steps, 4): cell, action, next cell, reward."""
    limits = torch.tensor([81, 5, 81, 2])
    return (torch.rand(steps, 4, generator=torch.Generator().manual_seed(0)) * limits).long()


@torch.no_grad()
def test_compressed_context_depends_on_every_transition():
    """Each cell, action and reward of 55 transitions, and their order, through four compressions."""
    past = random_past(55).repeat(222, 1, 1)
    for k, (t, part) in enumerate(product(range(55), range(4))):
        past[k, t, part] = (past[k, t, part] + 1) % (81, 5, 81, 2)[part]
    past[220, :12] = past[220, :12].flip(0)
    agents = script.Agents(small_model(), 222, 5)
    for step in past.unbind(1):
        agents.observe(*step.T)
    logits = agents.act(torch.full((222,), 40))
    assert (logits[:221] - logits[221]).abs().amax(1).min() > 1e-9


@torch.no_grad()
def test_ad_forgets_its_oldest_transitions():
    """A full context of 12 drops 5: after 55 transitions, 10 are left."""
    model, past = small_model(n_latent=0), random_past(55)[:, None]
    logits = []
    for first in (0, 45, 46):
        agents = script.Agents(model, 1, 5)
        for step in past[first:].unbind(0):
            agents.act(step[:, 0])
            agents.observe(*step.T)
        logits.append(agents.act(torch.tensor([40])))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-10, rtol=0)
    assert (logits[0] - logits[2]).abs().max() > 1e-9


@pytest.mark.parametrize("compressed", [[4, 2], [0, 0]])
def test_every_weight_gets_a_gradient(compressed):
    """DDP needs one for the encoder, though of 0, even from a rank whose samples have no blocks; no batch is empty."""
    model = small_model()
    batch = script.largest_batch(model, 4, depth=2) | {"compressed": compressed}
    batch["depth"] = torch.full((4,), sum(compressed))
    batch["rewards"] = batch["rewards"].double()
    assert len(model._compress_blocks(*(batch[name] for name in ("cells", "rewards", "shift", "compressed")))) >= 1
    model(batch).square().mean().backward()
    for name, parameter in model.named_parameters():
        is_encoder = "encoder" in name or name == "latents"
        assert bool(parameter.grad.abs().max() > 0) == (sum(compressed) > 0 or not is_encoder), name


# --- environments and agents without a network ------------------------------------------------------------------------


def test_split_matches_the_published_one():
    train, unseen = ad.split_tasks(81, 0)
    assert unseen == [38, 51, 62, 65, 33, 5, 53, 49]
    assert sorted(train + unseen) == list(range(81))


def test_key_to_door_matches_a_random_walk():
    """The key is rewarded once, the door once and only after the key."""
    env, rng, task = ad.make_env("key_to_door:4"), np.random.default_rng(0), np.arange(200)
    key, door = np.divmod(np.random.default_rng(0).permutation(256)[:200], 16)
    place, state, phase = np.full((200, 2), 2), np.full(200, env.start), np.zeros(200, int)
    for _ in range(300):
        action = rng.integers(0, 5, 200)
        place = np.clip(place + MOVES[action], 0, 3)
        rewarded = place @ (4, 1) == np.choose(phase, (key, door, -1))
        phase = phase + rewarded
        state, reward = env.step(task, state, action)
        np.testing.assert_array_equal(state, place @ (4, 1) + 16 * phase)
        np.testing.assert_array_equal(reward, rewarded)
    assert set(phase) >= {1, 2}
    assert env.value(np.max).max() == 2


def test_gymnasium_environment_matches_gymnasium():
    """Exact returns by FrozenLake's own table; each task has its own order of the actions."""
    env, table = ad.make_env("gym:FrozenLake-v1"), gymnasium.make("FrozenLake-v1").unwrapped.P
    for choose in (np.max, np.mean):
        values = np.zeros(16)
        for _ in range(env.horizon):
            q = [[sum(p * (r + values[after]) for p, after, r, _ in table[s][a]) for a in range(4)] for s in range(16)]
            values = choose(q, axis=1)
        np.testing.assert_allclose(env.value(choose), np.full(24, values[0]))
    assert len(np.unique(env.next.reshape(24, -1), axis=0)) == 24


@pytest.mark.parametrize(
    ("kind", "env", "tasks", "episodes", "share"),
    [
        (ad.Search, "darkroom", [0, 1, 80], 15, 1),
        (report.RMax, "darkroom", [0, 1, 80], 50, 1),
        (report.TabularQ, "darkroom", [0, 1, 80], 400, 0.8),
        (report.Posterior, "gym:FrozenLake-v1", [3, 17] * 40, 40, 0.85),
    ],
)
def test_baselines_find_the_best_policy(kind, env, tasks, episodes, share):
    env, task, rng = ad.make_env(env), np.array(tasks), np.random.default_rng(0)
    agents = kind(env, task, rng)
    _, actions, next_states, rewards = ad.play(env, task, episodes * env.horizon, rng, agents.choose, agents.learn)
    assert ad.learning_curve(rewards, env)[-10:].mean() >= share * env.value(np.max)[task].mean()
    if kind is ad.Search:
        # agents do not know the goal: all take the same way to unseen cells until their first reward
        assert (actions[:6] == actions[:6, :1]).all()
        assert len(np.unique(next_states[:20, 2])) == 20


# --- histories --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Histories of 200 steps, three for each goal."""
    root = tmp_path_factory.mktemp("ad") / "data"
    sample_data.write_sample_data(root, "darkroom", "tabular", 3, 200, 42)
    return root


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Path:
    """Histories of an environment with random outcomes."""
    root = tmp_path_factory.mktemp("lake")
    sample_data.write_sample_data(root, "gym:FrozenLake-v1", "epsilon", 4, 320, 0)
    return root


@pytest.fixture(scope="module")
def histories(folder) -> ad.Histories:
    return ad.Histories(str(folder), None, "ad", 0)


@pytest.mark.parametrize("source", ["tabular", "search", "epsilon"])
def test_sources_learn(source, tmp_path):
    """From little to most of the optimum, in streams that all differ; an existing file is not replaced."""
    options = tmp_path, "darkroom:5", source, 10, 360, 1
    sample_data.write_sample_data(*options)
    histories = ad.Histories(str(tmp_path), None, "ad", 0)
    curve, best = np.mean(histories.curves, 0), histories.env.value(np.max).mean()
    assert curve[-3:].mean() > 0.6 * best > curve[0]
    assert len(np.unique(histories.words[3, :, :, 1], axis=0)) == 10
    with pytest.raises(InputError, match="is there already"):
        sample_data.write_sample_data(*options)


def test_ppo_histories_follow_the_environment():
    states, actions, next_states, rewards = sample_data.ppo_history(DARKROOM, 4, 200, 42, 40)
    assert np.array_equal(DARKROOM.next[40, states, actions, 0], next_states)
    assert np.array_equal(rewards, next_states == 40)
    expected = np.concatenate([np.full((1, 4), 40), next_states[:-1]])
    expected[::20] = 40
    assert np.array_equal(states, expected)
    assert len(np.unique(actions)) == 5


def test_targets_of_the_objectives(folder, histories, tmp_path):
    """ad: the action taken; dpt: any optimal action; search: what a searcher would do."""
    assert np.array_equal(histories.words[..., 3], histories.words[..., 1])
    dpt, goal = ad.Histories(str(folder), None, "dpt", 0).words.astype(int), np.arange(81)[:, None, None]
    assert np.array_equal(dpt[..., :3], histories.words[..., :3])
    led = DARKROOM.next[0, dpt[..., 0], dpt[..., 3], 0]
    before, after = (abs(cell // 9 - goal // 9) + abs(cell % 9 - goal % 9) for cell in (dpt[..., 0], led))
    assert np.array_equal(after, np.maximum(before - 1, 0))
    two_optimal = (dpt[..., 0] // 9 > goal // 9) & (dpt[..., 0] % 9 > goal % 9)
    assert set(dpt[..., 3][two_optimal]) == {1, 3}
    # the first stream of a searcher has no errors
    sample_data.write_sample_data(tmp_path, "key_to_door:3", "search", 1, 150, 0)
    words = ad.Histories(str(tmp_path), None, "search", 0).words
    assert np.array_equal(words[..., 3], words[..., 1])


def spoil(name: str, where: tuple, value):
    return lambda file: file[f"7/{name}"].__setitem__(where, value)


def replace(name: str, value):
    def write(file) -> None:
        del file[name]
        file[name] = value

    return write


WRONG = [
    ("folder", spoil("states", (5, 2), 9), "group '7', step 5, stream 2: states must be whole numbers"),
    ("folder", spoil("rewards", (11, 0), 0.5), "step 11, stream 0: rewards is not what the task gives"),
    ("folder", spoil("dones", (19, 1), False), "step 19, stream 1: dones must be True at each episode's end alone"),
    ("folder", spoil("next_states", (4, 2), (0, 0)), "step 4, stream 2: next_states is not where the action leads"),
    ("lake", spoil("states", (32, 1), 5), "step 32, stream 1: states is not where"),
    ("lake", spoil("next_states", (31, 1), 15), "step 31, stream 1: next_states is not where the action leads"),
    ("folder", replace("7/rewards", np.zeros((10, 3))), "group '7': states is int8"),
    ("folder", replace("7", h5py.ExternalLink("other.h5", "/7")), "not readable histories: .* needs groups '0', '1'"),
    ("folder", lambda file: file.pop("80"), "80 groups; darkroom:9 has 81 tasks"),
    ("folder", lambda file: file.attrs.update(env="gym:antigravity:X-v0"), "no module may be named"),
]


@pytest.mark.parametrize(("source", "write", "message"), WRONG)
def test_wrong_histories_are_named(source, write, message, request, tmp_path):
    path = shutil.copy(next(request.getfixturevalue(source).glob("datasets/*")), tmp_path)
    with h5py.File(path, "r+") as file:
        write(file)
    with pytest.raises(InputError, match=message):
        ad.Histories(str(path), None, "ad", 0)


def test_missing_and_truncated_files(folder, tmp_path):
    cut = tmp_path / "datasets" / "cut.hdf5"
    cut.parent.mkdir()
    with pytest.raises(InputError, match="holds 0 .hdf5 files, also in datasets/; name one"):
        ad.Histories(str(tmp_path), None, "ad", 0)
    cut.write_bytes(next(folder.glob("datasets/*")).read_bytes()[:9999])
    for path, message in ((tmp_path, "not readable histories"), (cut.parent / "none", "beside it lies cut.hdf5")):
        with pytest.raises(InputError, match=message):
            ad.Histories(str(path), None, "ad", 0)


def test_other_layouts_give_the_same_histories(folder, histories, tmp_path):
    """A goal with other number types and more steps, and the next start logged as an episode's last next state."""
    path = shutil.copy(next(folder.glob("datasets/*")), tmp_path)
    with h5py.File(path, "r+") as file:
        for name in ad.FIELDS:
            values = file[f"3/{name}"][()]
            replace(f"3/{name}", np.concatenate([values, values[:20]]).astype(float))(file)
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


@torch.no_grad()
def test_acting_gives_the_logits_of_training(histories):
    """At each position of a segment, an agent with the same part of the history behind it has the same logits."""
    data, model = segments_of(histories, [3, 41, 80], shift=4), small_model(n_transit=20, shift=4)
    batch = data.__getitems__([Sample(k) for k in range(0, 90, 7)])
    history, depths, ends, _ = data.draw(batch["index"].numpy(), Sample.epoch)
    assert set(depths) == {0, 1, 2, 3}
    trained = model(batch | {"shift": torch.full((len(ends), 2), 2)})
    for k, (number, depth, end) in enumerate(zip(history, depths, ends, strict=True)):
        length = min(20, end - 20 * depth)
        where = (3, 41, 80)[number // 3], number % 3, slice(end - length - 20 * depth, end)
        transitions, rewards = (torch.from_numpy(part[where]) for part in (histories.words, histories.rewards))
        agents, logits = script.Agents(model, 1, 0), []
        for transition, reward in zip(transitions, rewards, strict=True):
            logits += agents.act(transition[:1])
            agents.observe(*transition[:3, None], reward)
        torch.testing.assert_close(torch.stack(logits[-length:]), trained[k, :length], atol=1e-10, rtol=0)
        assert batch["action"][k].tolist() == [*transitions[-length:, 3], *[-100] * (20 - length)]
    # in training, rooms are moved by other distances
    assert (model(batch) - trained).abs().amax((1, 2)).count_nonzero() > len(ends) / 2


def test_segments_of_every_depth_cover_the_history(histories):
    """Depths, ends and shifts are uniform and depend on seed and epoch; --from_start 1 begins at step 0."""
    sets = {seed: segments_of(histories, list(range(81)), shift=4, seed=seed) for seed in (0, 1, -1)}
    # three histories per goal, each ten contexts long
    assert len(sets[0]) == 81 * 3 * 10
    draws = [sets[seed].draw(np.arange(len(sets[0])), epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (-1, 0))]
    assert len(np.unique([draw[2] for draw in draws], axis=0)) == 4
    depths, ends, shifts = (np.concatenate([draw[part] for draw in draws]) for part in (1, 2, 3))
    for k in range(4):
        values = ends[depths == k]
        assert set(values) == set(range(20 * k + 1, 201))
        assert values.mean() == pytest.approx((20 * k + 201) / 2, rel=0.02)
    counts = np.bincount(shifts @ (5, 1), minlength=25)
    assert counts.min() > 0.8 * counts.mean()
    _, depth, end, _ = segments_of(histories, [0, 1], from_start=1.0).draw(np.arange(400), 0)
    assert np.array_equal(end, 20 * (depth + 1))
    assert [segments_of(histories, [0], n_transit=n).max_depth for n in (66, 67)] == [3, 2]


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_returns_match_a_step_by_step_simulation():
    """Each agent alone, in a room by NumPy."""
    model, run = small_model(shift=2), Namespace(position=Namespace(step=0), heartbeat=lambda place: None)
    args = small_args(temperature=0.7)
    returns, path = script.act_in_context(model, DARKROOM, [40, 49], 2, 4, run, args)
    for (task, goal), agent in product(enumerate((40, 49)), range(2)):
        rng, alone = np.random.default_rng([0, script.ACTING, goal, agent]), script.Agents(model, 1, 6)
        for episode in range(4):
            cells, noise = [40], -0.7 * np.log(-np.log(rng.random((20, 5))))
            for t in range(20):
                action = int((alone.act(torch.tensor(cells[-1:]))[0].numpy() + noise[t]).argmax())
                cells.append(int(np.clip(np.divmod(cells[-1], 9) + MOVES[action], 0, 8) @ (9, 1)))
                alone.observe(*torch.tensor([cells[-2], action, cells[-1], cells[-1] == goal])[:, None])
            assert returns[task, agent, episode] == cells[1:].count(goal)
            assert (task, agent) != (0, 0) or path[episode].tolist() == cells


@torch.no_grad()
def test_action_accuracy_is_a_mean_over_actions(histories):
    """Of one segment of every depth for each history, in several batches."""
    data, model = segments_of(histories, [5, 70], train=False), small_model(n_transit=20).float()
    batch = data.__getitems__(range(2 * 3 * 4))
    is_real = batch["action"] >= 0
    logits, action = model(batch)[is_real], batch["action"][is_real]
    found = script.action_accuracy(model, data, Namespace(batches=iter), "no", 7)
    assert batch["depth"].bincount().tolist() == [6] * 4
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits, action)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(-1) == action).double().mean()))


def test_return_metrics_match_students_interval():
    """Goals are the independent units: they differ far more than the agents of one goal."""
    rng = np.random.default_rng(1)
    returns = rng.normal(5, 1, (8, 10, 40)) + rng.normal(0, 3, (8, 1, 1))
    by_goal = returns[:, :, 36:].mean((1, 2))
    low, high = stats.t.interval(0.95, 7, by_goal.mean(), stats.sem(by_goal))
    random, optimum = (DARKROOM.value(choose)[:8].mean() for choose in (np.mean, np.max))
    found = report.return_metrics(returns, DARKROOM, list(range(8)))
    assert (found["return_last_low"], found["return_last_high"]) == pytest.approx((low, high))
    assert found["normalized_last"] == pytest.approx((by_goal.mean() - random) / (optimum - random))


# --- runs -------------------------------------------------------------------------------------------------------------

FLAGS = "--tf_n_embd 16 --tf_n_layer 1 --tf_n_head 2 --tf_dim_feedforward 16 --encoder_n_layer 1 --n_transit 20 "
FLAGS += "--n_latent 4 --batch_size 8 --train_timesteps 6 --num_warmup_steps 2 --eval_interval 3 --val_episodes 2 "
FLAGS += "--eval_episodes 3 --eval_seeds 2 --num_workers 0 --log_every 1"


def start(data: Path, out: Path, flags: str = "") -> None:
    args = script.parse_args([*FLAGS.split(), "--data", str(data), "--output_dir", str(out), *flags.split()])
    assert script.main(args) == 0


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    # 450 of 2190 segments per step, so the first epoch ends at step 5
    flags = "--split_seed 1 --objective search --from_start 0.5 --shift 1 --max_compression_depth 2 --batch_size 450"
    start(folder, out, flags)
    return out


@pytest.fixture(scope="module")
def baseline(folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("ad") / "ad"
    start(folder, out, "--model ad --split_seed 1")
    return out


def test_run_folder(histories, finished):
    assert (finished / "figures" / "test.png").stat().st_size > 10_000
    summary = json.loads((finished / "summary.json").read_text())
    baselines = "source_of_the_histories tabular_Q_from_scratch R_max_from_scratch search_that_knows_the_map".split()
    names = {f"test/rival/{name}/normalized_last" for name in (*baselines, "random_actions", "optimum")}
    assert {"test/normalized_last", "test/loss"} | names <= summary.keys()
    assert summary["test/rival/random_actions/normalized_last"] == 0
    _, unseen = ad.split_tasks(81, 1)
    assert summary["tasks"] == f"darkroom:9: {' '.join(map(str, unseen))}"
    source = histories.rewards[unseen, :, 40:60].sum(2).mean()
    assert summary["test/rival/source_of_the_histories/return_last"] == pytest.approx(source)
    curves = (finished / "test_returns.csv").read_text().splitlines()
    assert curves[0].startswith("episode,compressed_ad/search,source of the histories,tabular Q from scratch,R-max")
    assert [line.split(",")[0] for line in curves[1:]] == ["1", "2", "3"]


def test_log_and_best_checkpoint(finished):
    # the loss on training tasks selects best.pt
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: line for line in lines if "val/loss" in line}
    # none at the end of an epoch
    assert evaluations.keys() == {3, 6}
    best = torch.load(finished / "best.pt", weights_only=True)["position"]["best"]
    assert best == min(line["val/loss"] for line in evaluations.values())
    assert all(line["val/loss"] != line["unseen/loss"] for line in evaluations.values())
    # a mean over actions, at first nearly that of five equally likely ones; warm-up and cosine
    train = [line for line in lines if "train/loss" in line]
    assert [line["epoch"] for line in train] == [1, 1, 1, 1, 1, 2]
    assert train[0]["train/loss"] == pytest.approx(math.log(5), abs=0.3)
    factors = [0.5, 1, 1, *((1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3))]
    assert [line["train/lr"] for line in train] == pytest.approx([1e-4 * factor for factor in factors])


def test_eval_only_repeats_the_test(folder, finished, baseline, capfd):
    # model flags come from the checkpoint; the other run becomes a row
    summary, curves = json.loads((finished / "summary.json").read_text()), (finished / "test_returns.csv").read_bytes()
    start(folder, finished, f"--eval_only --tf_n_embd 32 --tf_n_head 4 --rival_run {baseline}")
    found = json.loads((finished / "eval_test.json").read_text())
    repeated = {name for name in found if "rival_run" not in name} - {"step"}
    assert {name: found[name] for name in repeated} == {name: summary[name] for name in repeated}
    assert (finished / "test_returns.csv").read_bytes() == curves
    output = capfd.readouterr().out
    for flag in ("objective: search", "split_seed: 1", "shift: 1", "max_compression_depth: 2"):
        assert f"--{flag}, as in the checkpoint" in output
    assert "rival run: ad/ad" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tf_n_head 3", "--tf_n_head 3: must divide --tf_n_embd 16"),
        ("--num_warmup_steps 6", "--num_warmup_steps 6: must be below --train_timesteps"),
        ("--n_transit 201", "--n_transit 201: more than the 200 steps of the histories"),
        ("--n_transit 200", "--n_transit 200: with histories of 200 steps nothing would be compressed"),
        ("--env key_to_door", "--env key_to_door: the histories in"),
        ("--env atari", "environment atari: give darkroom"),
        ("--env gym:CartPole-v1", "Discrete spaces and a table P"),
        ("--rival_run BASELINE", "tested on darkroom:9: 60 57 63 15 32 8 72 17; give one of darkroom:9: 38"),
        ("--resume_from FINISHED/best.pt --data OTHER", "--resume_from: a run with digest"),
        ("--data LAKE --shift 2", "--shift 2: gym:FrozenLake-v1 is no room"),
        ("--data LAKE --objective search", "no room, whose map one could know"),
    ],
)
def test_wrong_flags_are_named(folder, lake, finished, baseline, tmp_path, capfd, flags, message):
    if "OTHER" in flags:
        sample_data.write_sample_data(tmp_path / "other", "darkroom", "epsilon", 1, 200, 43)
    for name, path in {"FINISHED": finished, "BASELINE": baseline, "LAKE": lake, "OTHER": tmp_path / "other"}.items():
        flags = flags.replace(name, str(path))
    with pytest.raises((SystemExit, InputError)) as error:
        start(folder, tmp_path / "run", flags)
    assert message in f"{error.value} {capfd.readouterr().err}"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_run_on_a_gymnasium_environment(lake, tmp_path, capfd):
    start(lake, tmp_path / "run", "--objective dpt --temperature 0.5")
    output = capfd.readouterr().out
    for row in ("3 unseen tasks", "tabular Q from scratch", "posterior over all tasks"):
        assert row in output
    # R-max is for deterministic environments
    assert "R-max" not in output
