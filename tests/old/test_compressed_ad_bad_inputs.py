"""train.py and its histories: what a user can get wrong ends with exit code 2 and one line, nothing written."""

import json
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import ROOT, tree

TRAIN = str(ROOT / "train.py")


ARRAYS = ("states", "next_states", "actions", "rewards", "dones")


def run_train(zygote, flags: list, ranks: int = 1, **environment):
    return zygote(TRAIN, *flags, ranks=ranks, **environment)


def run_to_end(zygote, flags: list):
    done = run_train(zygote, flags)
    assert done.code == 0, done.stderr[-2000:]
    return done


@pytest.fixture
def fails(zygote, tmp_path):
    """fails(flags, message): runs, and checks code, the one line, and that no file appears or changes."""

    def run(flags: list, message: str, ranks: int = 1, **environment) -> None:
        before = tree(tmp_path)
        done = run_train(zygote, flags, ranks, **environment)
        assert done.code == 2, (done.code, done.stdout[-500:], done.stderr[-1500:])

        errors = [line for line in done.stderr.splitlines() if line.strip()]
        assert len(errors) == 1, done.stderr[-1500:]
        assert errors[0].startswith("error: ")
        assert re.search(message, errors[0]), errors[0]
        assert tree(tmp_path) == before

    return run


@pytest.fixture
def histories(darkroom_data) -> Path:
    """The good HDF5 file."""
    return next(darkroom_data.glob("datasets/*.hdf5"))


@pytest.fixture
def copied(histories, tmp_path) -> Path:
    """A copy of it to spoil."""
    path = tmp_path / "history.hdf5"
    shutil.copy(histories, path)
    return path


# --- histories --------------------------------------------------------------------------------------------------------


def write(file, goal: int | str, name: str, values) -> None:
    del file[str(goal)][name]
    file[str(goal)][name] = values


def without_a_group(file):
    del file["80"]


def without_rewards(file):
    del file["7"]["rewards"]


def of_another_shape(file):
    write(file, 7, "states", file["7"]["states"][:, :, 0])


def fewer_actions(file):
    write(file, 7, "rewards", file["7"]["rewards"][:-1])


def words_for_actions(file):
    write(file, 7, "actions", np.full((200, 3), b"up"))


def beyond_the_grid(file):
    file["7"]["states"][5, 2] = (9, 0)


def half_a_cell(file):
    write(file, 7, "states", file["7"]["states"][()] + np.float32(0.5))


def a_sixth_action(file):
    file["7"]["actions"][3, 1] = 5


def nan_reward(file):
    file["7"]["rewards"][11, 0] = np.nan


def another_reward(file):
    values = file["7"]["rewards"]
    values[11, 0] = 0.5


def rewards_of_another_goal(file):
    for name in ARRAYS:
        write(file, 7, name, file["70"][name][()])


def an_episode_of_30_steps(file):
    values = file["7"]["dones"]
    values[19, 1] = False


def walks_through_walls(file):
    values = file["7"]["next_states"]
    values[4, 2] = (values[4, 2] + 2) % 9


def jumps(file):
    group = file["7"]
    other_cell = group["states"][8, 2]
    group["states"][6, 2] = other_cell
    group["actions"][6, 2] = 4
    group["next_states"][6, 2] = other_cell
    group["rewards"][6, 2] = float(other_cell @ (9, 1) == 7)


def too_short(file):
    for name in ARRAYS:
        write(file, 7, name, file["7"][name][:10])


def linked_to_another_file(file):
    with h5py.File(Path(file.filename).with_name("other.h5"), "w") as other:
        file.copy("7", other)
    del file["7"]
    file["7"] = h5py.ExternalLink("other.h5", "/7")


def linked_through_another_file(file):
    with h5py.File(Path(file.filename).with_name("other.h5"), "w") as other:
        file.copy("7/actions", other)
    del file["7"]["actions"]
    file["7"]["actions"] = h5py.SoftLink("/elsewhere/actions")
    file["elsewhere"] = h5py.ExternalLink("other.h5", "/")


def stored_in_another_file(file):
    values = file["7"]["actions"][()]
    raw = Path(file.filename).with_name("actions.raw")
    raw.write_bytes(values.tobytes())
    del file["7"]["actions"]
    external = [(str(raw), 0, values.nbytes)]
    file["7"].create_dataset("actions", values.shape, values.dtype, external=external)


def virtual_of_another_file(file):
    values = file["7"]["actions"][()]
    with h5py.File(Path(file.filename).with_name("other.h5"), "w") as other:
        other["actions"] = values
    layout = h5py.VirtualLayout(values.shape, values.dtype)
    layout[:] = h5py.VirtualSource("other.h5", "actions", values.shape)
    del file["7"]["actions"]
    file["7"].create_virtual_dataset("actions", layout)


def a_link_in_a_circle(file):
    del file["7"]
    file["7"] = h5py.SoftLink("/seven")
    file["seven"] = h5py.SoftLink("/7")


def a_link_to_nothing(file):
    del file["7"]["dones"]
    file["7"]["dones"] = h5py.SoftLink("/7/done")


def a_group_for_actions(file):
    del file["7"]["actions"]
    file["7"].create_group("actions")


def a_data_set_for_a_goal(file):
    del file["7"]
    file["7"] = np.zeros((200, 3))


def a_null_data_set(file):
    write(file, 7, "actions", h5py.Empty("i8"))


def a_type_for_actions(file):
    write(file, 7, "actions", np.dtype("i8"))


def terabytes_of_nothing(file):
    del file["7"]["rewards"]
    file["7"].create_dataset("rewards", (10**6, 10**6), "f4", chunks=(100, 100))


HISTORIES = [
    # What lies in another file, or leads nowhere.
    (linked_to_another_file, r"group '7': is a link into another file, which is not followed"),
    (linked_through_another_file, r"group '7': actions is a link into another file, which is not followed"),
    (stored_in_another_file, r"group '7': actions keeps its values in another file, which is not read"),
    (virtual_of_another_file, r"group '7': actions keeps its values in another file, which is not read"),
    (a_link_in_a_circle, r"group '7': is a link that leads in a circle"),
    (a_link_to_nothing, r"group '7': has no 'dones'"),
    # What is missing, or not an array of numbers.
    (a_group_for_actions, r"group '7': actions is a group, not a data set"),
    (a_data_set_for_a_goal, r"group '7': is a data set, not a group"),
    (a_null_data_set, r"group '7': actions is an empty \(null\) data set"),
    (a_type_for_actions, r"group '7': actions is a named type, not a data set"),
    (terabytes_of_nothing, r"group '7': rewards is declared as 1000000 x 1000000, 4.0 TB, of which 0 bytes are there"),
    (without_a_group, r"group '80': is missing; there must be '0' to '80'"),
    (without_rewards, r"group '7': has no 'rewards'"),
    (of_another_shape, r"group '7': states has shape \(200, 3\); expected \(T, streams, 2\)"),
    (fewer_actions, r"group '7': rewards has shape \(199, 3\); expected \(T, streams\)"),
    (words_for_actions, r"group '7': actions holds \|S2, not numbers"),
    # Numbers that are not Darkroom's.
    (beyond_the_grid, r"group '7': states\[5, 2\] is 9; expected a whole number of 0 to 8"),
    (half_a_cell, r"group '7': states\[0, 0\] is 4.5; expected a whole number of 0 to 8"),
    (a_sixth_action, r"group '7': actions\[3, 1\] is 5; expected a whole number of 0 to 4"),
    (nan_reward, r"group '7': rewards\[11, 0\] is nan; expected a finite number"),
    (another_reward, r"group '7': step 11, stream 0: rewards must be"),
    (rewards_of_another_goal, r"group '7': step \d+, stream \d: rewards must be 1 on the goal \(0, 7\) alone"),
    (an_episode_of_30_steps, r"group '7': dones\[19, 1\] is False; an episode has 20 steps"),
    (walks_through_walls, r"group '7': step 4, stream 2: next_states is not where the action leads"),
    (jumps, r"group '7': step 6, stream 2: states is not where the step before led"),
    (too_short, r"group '7': has 10 steps, less than an episode of 20"),
]


@pytest.mark.parametrize(("spoil", "message"), HISTORIES, ids=[spoil.__name__ for spoil, _ in HISTORIES])
def test_bad_histories(compressed_ad_flags, fails, copied, tmp_path, spoil, message):
    with h5py.File(copied, "r+") as file:
        spoil(file)
    ranks = 2 if spoil in (beyond_the_grid, without_a_group) else 1
    fails(compressed_ad_flags(tmp_path / "run", "--data", copied), f"history.hdf5: {message}", ranks)


def test_bad_files(compressed_ad_flags, fails, histories, zygote, tmp_path):
    out = tmp_path / "run"
    path = tmp_path / "history.hdf5"
    (tmp_path / "empty").mkdir()

    def refused(data: Path, message: str, *more) -> None:
        fails(compressed_ad_flags(out, "--data", data, *more), message)

    # half a file, and a text file
    whole = histories.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(path, r"history.hdf5: truncated HDF5 file of \d+ bytes; get or make")
    path.write_text("states,actions\n")
    refused(path, r"history.hdf5: not a readable HDF5 file of 15 bytes; get or")

    # no file, and more than one
    refused(tmp_path / "none.hdf5", r"none.hdf5: no such file; beside it lies h")
    refused(tmp_path / "empty" / "x.hdf5", r"x.hdf5: no such file; make histories with `python -m tools.sample_data")
    refused(tmp_path / "empty", r"empty: holds no .hdf5 or .h5 file, also not in")
    shutil.copy(path, tmp_path / "second.hdf5")
    refused(tmp_path, r"holds 2 HDF5 files, .*name the file with --data")

    # a compressed file cannot be mapped, but it can be read
    with h5py.File(histories) as file, h5py.File(path, "w") as packed:
        for goal in file:
            for name, values in file[goal].items():
                packed.create_dataset(f"{goal}/{name}", data=values, compression="gzip")
    message = r"group '0': \w+ is compressed or chunked and cannot be mapped; leave out --no-cache_in_memory"
    refused(path, message, "--no-cache_in_memory")
    run_to_end(zygote, compressed_ad_flags(out, "--data", path, "--max_steps", "1"))


def test_histories_as_others_write_them(compressed_ad_flags, darkroom_data, copied, zygote, tmp_path):
    """int64, float rewards, more streams and steps in some goals, the next episode's start as an episode's last state:
    the same run."""
    with h5py.File(copied, "r+") as file:
        for goal in file:
            for name in list(file[goal]):
                values = file[goal][name][()]
                if name == "next_states":
                    values[19::20] = 4
                if name != "dones":
                    values = values.astype(np.float64 if name == "rewards" else np.int64)
                if goal in ("5", "60"):
                    values = np.concatenate([values, values[:, :2]], 1)
                    values = np.concatenate([values, values[:20]], 0)
                write(file, goal, name, values)

    losses = []
    for name, data in (("ours", darkroom_data), ("theirs", copied)):
        run_folder = tmp_path / name
        done = run_to_end(zygote, compressed_ad_flags(run_folder, "--data", data, "--max_steps", "3"))
        lines = (run_folder / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["train/loss"] for line in lines[:3]])
    assert losses[0] == losses[1]
    repaired = int(re.search(r"histories: (\d+) steps end an episode with the next one's start", done.stdout)[1])
    assert 2000 < repaired <= 81 * 3 * 10 + 2 * (5 * 11 - 30)


# --- flags and config -------------------------------------------------------------------------------------------------

FLAGS = [
    # The model.
    (["--tf_n_head", "3"], r"--tf_n_head 3: must divide --tf_n_embd 16"),
    (["--n_latent", "0"], r"--n_latent 0: compression needs at least 1; give --model ad to go without"),
    (["--model", "ad"], r"--n_latent: --model ad does not compress; leave it out"),
    (["--model", "dt"], r"argument --model: invalid choice: '?dt'?"),
    (["--n_transit", "1"], r"--n_transit: must be a whole number of at least 2"),
    (["--n_transit", "201"], r"--n_transit 201: more than the 200 steps of the histories"),
    # The training.
    (["--num_warmup_steps", "8"], r"--num_warmup_steps 8 \(command line\): must be below --train_timesteps 8"),
    (["--train_batch_size", "0"], r"--train_batch_size: must be a whole number of at least 1, not '0'"),
    (["--lr", "-1"], r"argument --lr: must be a number above 0, not '-1'"),
    (["--lr_scaling", "cube"], r"argument --lr_scaling: invalid choice"),
    (["--train_batch_sise", "1"], r"unknown argument '--train_batch_sise', nearest is --train_batch_size"),
    (["--mixed_precision", "fp16"], r"--mixed_precision fp16: needs a GPU"),
    # What is resumed, evaluated or read.
    (["--resume_from", "none.pt"], r"none.pt: no such checkpoint"),
    (["--eval_only"], r"run/best.pt: no such checkpoint"),
    (["--overwrite", "--resume_from", "auto"], r"--overwrite starts afresh and excludes --resume_from"),
    (["--ad_run", "somewhere", "--model", "ad", "--n_latent", "0"], r"--ad_run: stands beside a run of --model compr"),
    (["--ad_run", "nowhere"], r"nowhere/eval_test.json: not read \(No such file or directory\); --ad_run wants"),
    (["--config", "none.yaml"], r"none.yaml: cannot read the config"),
]


@pytest.mark.parametrize(("flags", "message"), FLAGS, ids=[" ".join(flags) for flags, _ in FLAGS])
def test_bad_flags(compressed_ad_flags, fails, tmp_path, flags, message):
    fails([*compressed_ad_flags(tmp_path / "run"), *flags], message)


CONFIGS = [
    ("train_batch_sizes: 8", r"unknown key 'train_batch_sizes'; did you mean 'train_batch_size'\?"),
    ("summary_interval: often", r"summary_interval|log_every: must be a whole number of at least 1, not 'often'"),
    ("summary_interval: 10\nlog_every: 5", r"log_every means the same as summary_interval; remove one"),
    ("mixed_precision: fp8", r"mixed_precision: 'fp8' is not one of auto, no, bf16, fp16"),
    ("cache_in_memory: maybe", r"cache_in_memory: must be true or false, not 'maybe'"),
    ("tf_n_head: [1, 2]", r"tf_n_head: must be a single value, not \[1, 2\]"),
    ("lr: 1e-4: 3", r"c.yaml:1: not valid YAML"),
    ("- lr", r"must hold `flag: value` lines, not a list"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=[config for config, _ in CONFIGS])
def test_bad_configs(fails, tmp_path, config, message):
    path = tmp_path / "c.yaml"
    path.write_text(config + "\n")
    fails(["--config", path], message)


OTHER_RUNS = [
    (["--train_batch_size", "3"], r"a run with effective batch size 12, now 3; keep the product of"),
    (["--seed", "5"], r"a run with seed 0, now 5; give the same again"),
    (["--tf_n_layer", "3"], r"last.pt: a run with --tf_n_layer 2, now 3; leave it out"),
    (["--n_latent", "6"], r"last.pt: a run with --n_latent 4, now 6; leave it out"),
    (["--max_compression_depth", "1"], r"a run with --max_compression_depth 3, now 1; leave it out"),
    (["--split_seed", "1"], r"a run with --split_seed 0, now 1; leave it out"),
]


def test_checkpoint_of_another_run(compressed_ad_flags, fails, histories, zygote, tmp_path):
    begun = tmp_path / "begun"
    run_to_end(zygote, compressed_ad_flags(begun, "--max_steps", "2"))
    again = compressed_ad_flags(tmp_path / "run", "--resume_from", begun / "last.pt")
    for flags, message in OTHER_RUNS:
        fails([*again, *flags], message)

    # the same histories but for two streams of a goal that changed places
    other = tmp_path / "other.hdf5"
    shutil.copy(histories, other)
    with h5py.File(other, "r+") as file:
        for name in ARRAYS:
            write(file, 7, name, file["7"][name][()][:, [0, 2, 1]])
    fails([*again, "--data", other], r"a run with training data \w+, now \w+; give the same again")

    # files that are no checkpoint of this script, and a run folder that is taken
    unreadable = tmp_path / "no.pt"
    unreadable.write_bytes(b"x")
    fails([*again, "--resume_from", unreadable], r"no.pt: not a readable checkpoint")
    foreign = tmp_path / "foreign.pt"
    torch.save({"format": "cascade/1", "step": 1, "rng": []}, foreign)
    fails([*again, "--resume_from", foreign], r"checkpoint of cascade/1, not of compr")
    fails(compressed_ad_flags(begun), r"holds a run already; go on with --resume_from auto")

    # evaluations that this run cannot stand beside
    beside = compressed_ad_flags(tmp_path / "run", "--ad_run", begun)
    fails(beside, r"eval_test.json: of --model compressed_ad; give --ad_run a run of --model ad")
    evaluation = begun / "eval_test.json"
    of_ad = json.loads(evaluation.read_text()) | {"model": "ad"}
    evaluation.write_text(json.dumps(of_ad | {"goals": [[0, 0]]}))
    fails(beside, r"of other goals; give a run with the same")
    evaluation.write_text(json.dumps(of_ad | {"return_by_episode": {"mean": [0.0]}}))
    fails(beside, r"of 1 episodes, this run has --eval_episodes 3")
    evaluation.write_text("[1]")
    fails(beside, r"not an evaluation of train.py; --ad_run wants")


def test_one_short_goal(compressed_ad_flags, copied, zygote, tmp_path):
    """What it cuts from the others is said; and what the source reached is the same from the file and from memory."""
    with h5py.File(copied, "r+") as file:
        for name in ARRAYS:
            write(file, 7, name, file["7"][name][:100])

            # one stream more of another goal
            streams = file["38"][name][()]
            write(file, 38, name, np.concatenate([streams, streams[:, :1]], 1))

    evaluations = []
    for name, more in (("cached", []), ("mapped", ["--no-cache_in_memory"])):
        flags = compressed_ad_flags(tmp_path / name, "--data", copied, "--max_steps", "1")
        done = run_to_end(zygote, [*flags, *more])
        assert "100 steps of each history are used, as goal 7 has no more; others have up to 200" in done.stdout
        evaluations.append(json.loads((tmp_path / name / "eval_test.json").read_text()))
    assert evaluations[0] == evaluations[1]


def test_accelerate_config_of_another_kind(compressed_ad_flags, fails, tmp_path):
    flags = compressed_ad_flags(tmp_path / "run")
    message = r"accelerate config: DEEPSPEED is not supported here; choose multi-GPU"
    fails(flags, message, ACCELERATE_USE_DEEPSPEED="true")
    message = r"accelerate launch --gradient_accumulation_steps 4: not read; give --gradient_accumulation_steps 4 to"
    fails(flags, message, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")


def test_sample_data_overwrites_nothing(darkroom_data, zygote):
    before = tree(darkroom_data)
    done = zygote(str(ROOT / "tools/sample_data.py"), "compressed_ad", darkroom_data)
    assert done.code == 2
    assert re.search(r"error: .*history_darkroom_TD_alg-seed42.hdf5: is there already; choose another", done.stderr)
    assert tree(darkroom_data) == before
