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


def fails(zygote, words: list, folder: Path, expect: str, ranks: int = 1, **environment) -> None:
    """Runs, and checks code, the one line, and that no file appears or changes."""
    before = tree(folder)
    done = zygote(TRAIN, *words, ranks=ranks, **environment)
    assert done.code == 2, (done.code, done.stdout[-500:], done.stderr[-1500:])
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(errors) == 1, done.stderr[-1500:]
    assert errors[0].startswith("error: ")
    assert re.search(expect, errors[0]), errors[0]
    assert tree(folder) == before


# --- histories --------------------------------------------------------------------------------------------------------


def write(file, goal: int, name: str, values) -> None:
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
    for name in ("states", "next_states", "actions", "rewards", "dones"):
        write(file, 7, name, file["70"][name][()])


def an_episode_of_30_steps(file):
    values = file["7"]["dones"]
    values[19, 1] = False


def walks_through_walls(file):
    values = file["7"]["next_states"]
    values[4, 2] = (values[4, 2] + 2) % 9


def jumps(file):
    values = file["7"]["states"]
    values[6, 2], file["7"]["actions"][6, 2] = values[8, 2], 4
    file["7"]["next_states"][6, 2] = values[8, 2]
    file["7"]["rewards"][6, 2] = float(values[8, 2] @ (9, 1) == 7)


def too_short(file):
    for name in ("states", "next_states", "actions", "rewards", "dones"):
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
    (linked_to_another_file, r"group '7': is a link into another file, which is not followed"),
    (linked_through_another_file, r"group '7': actions is a link into another file, which is not followed"),
    (stored_in_another_file, r"group '7': actions keeps its values in another file, which is not read"),
    (virtual_of_another_file, r"group '7': actions keeps its values in another file, which is not read"),
    (a_link_in_a_circle, r"group '7': is a link that leads in a circle"),
    (a_link_to_nothing, r"group '7': has no 'dones'"),
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
def test_bad_histories(compressed_ad_flags, darkroom_data, zygote, tmp_path, spoil, message):
    path = tmp_path / "history.hdf5"
    shutil.copy(next(darkroom_data.glob("datasets/*.hdf5")), path)
    with h5py.File(path, "r+") as file:
        spoil(file)
    ranks = 2 if spoil in (beyond_the_grid, without_a_group) else 1
    fails(zygote, compressed_ad_flags(tmp_path / "run", "--data", path), tmp_path, f"history.hdf5: {message}", ranks)


def test_bad_files(compressed_ad_flags, darkroom_data, zygote, tmp_path):
    out, path = tmp_path / "run", tmp_path / "history.hdf5"
    whole = next(darkroom_data.glob("datasets/*.hdf5")).read_bytes()
    (tmp_path / "empty").mkdir()
    path.write_bytes(whole[: len(whole) // 2])
    fails(
        zygote,
        compressed_ad_flags(out, "--data", path),
        tmp_path,
        r"history.hdf5: truncated HDF5 file of \d+ bytes; get or make",
    )
    path.write_text("states,actions\n")
    fails(
        zygote,
        compressed_ad_flags(out, "--data", path),
        tmp_path,
        r"history.hdf5: not a readable HDF5 file of 15 bytes; get or",
    )
    fails(
        zygote,
        compressed_ad_flags(out, "--data", tmp_path / "none.hdf5"),
        tmp_path,
        r"none.hdf5: no such file; beside it lies h",
    )
    other = tmp_path / "empty" / "x.hdf5"
    fails(
        zygote,
        compressed_ad_flags(out, "--data", other),
        tmp_path,
        r"x.hdf5: no such file; make histories with `python sample",
    )
    fails(
        zygote,
        compressed_ad_flags(out, "--data", tmp_path / "empty"),
        tmp_path,
        r"empty: holds no .hdf5 or .h5 file, also not in",
    )
    shutil.copy(path, tmp_path / "second.hdf5")
    fails(
        zygote,
        compressed_ad_flags(out, "--data", tmp_path),
        tmp_path,
        r"holds 2 HDF5 files, .*name the file with --data",
    )
    with h5py.File(next(darkroom_data.glob("datasets/*.hdf5"))) as file, h5py.File(path, "w") as packed:
        for goal in file:
            for name, values in file[goal].items():
                packed.create_dataset(f"{goal}/{name}", data=values, compression="gzip")
    message = r"group '0': \w+ is compressed or chunked and cannot be mapped; leave out --no-cache_in_memory"
    fails(zygote, compressed_ad_flags(out, "--data", path, "--no-cache_in_memory"), tmp_path, message)
    done = zygote(TRAIN, *compressed_ad_flags(out, "--data", path, "--max_steps", "1"))
    assert done.code == 0, done.stderr[-2000:]


def test_histories_as_others_write_them(compressed_ad_flags, darkroom_data, zygote, tmp_path):
    """int64, float rewards, more streams and steps in some goals, the next episode's start as an episode's last state:
    the same run."""
    path = tmp_path / "history.hdf5"
    shutil.copy(next(darkroom_data.glob("datasets/*.hdf5")), path)
    with h5py.File(path, "r+") as file:
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
                del file[goal][name]
                file[goal][name] = values
    losses = []
    for k, data in enumerate((darkroom_data, path)):
        done = zygote(TRAIN, *compressed_ad_flags(tmp_path / f"{k}", "--data", data, "--max_steps", "3"))
        assert done.code == 0, done.stderr[-2000:]
        lines = (tmp_path / f"{k}" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["train/loss"] for line in lines[:3]])
    assert losses[0] == losses[1]
    repaired = int(re.search(r"histories: (\d+) steps end an episode with the next one's start", done.stdout)[1])
    assert 2000 < repaired <= 81 * 3 * 10 + 2 * (5 * 11 - 30)


# --- flags and config -------------------------------------------------------------------------------------------------

FLAGS = [
    (["--tf_n_head", "3"], r"--tf_n_head 3: must divide --tf_n_embd 16"),
    (["--n_latent", "0"], r"--n_latent 0: compression needs at least 1; give --model ad to go without"),
    (["--model", "ad"], r"--n_latent: --model ad does not compress; leave it out"),
    (["--model", "dt"], r"argument --model: invalid choice: '?dt'?"),
    (["--num_warmup_steps", "8"], r"--num_warmup_steps 8 \(command line\): must be below --train_timesteps 8"),
    (["--train_batch_size", "0"], r"--train_batch_size: must be a whole number of at least 1, not '0'"),
    (["--n_transit", "1"], r"--n_transit: must be a whole number of at least 2"),
    (["--lr", "-1"], r"argument --lr: must be a number above 0, not '-1'"),
    (["--lr_scaling", "cube"], r"argument --lr_scaling: invalid choice"),
    (["--train_batch_sise", "1"], r"unknown argument '--train_batch_sise', nearest is --train_batch_size"),
    (["--mixed_precision", "fp16"], r"--mixed_precision fp16: needs a GPU"),
    (["--resume_from", "none.pt"], r"none.pt: no such checkpoint"),
    (["--eval_only"], r"run/best.pt: no such checkpoint"),
    (["--ad_run", "somewhere", "--model", "ad", "--n_latent", "0"], r"--ad_run: stands beside a run of --model compr"),
    (["--overwrite", "--resume_from", "auto"], r"--overwrite starts afresh and excludes --resume_from"),
    (["--ad_run", "nowhere"], r"nowhere/eval_test.json: not read \(No such file or directory\); --ad_run wants"),
    (["--config", "none.yaml"], r"none.yaml: cannot read the config"),
    (["--n_transit", "201"], r"--n_transit 201: more than the 200 steps of the histories"),
]


@pytest.mark.parametrize(("flags", "message"), FLAGS, ids=[" ".join(flags) for flags, _ in FLAGS])
def test_bad_flags(compressed_ad_flags, zygote, tmp_path, flags, message):
    fails(zygote, compressed_ad_flags(tmp_path / "run", *flags), tmp_path, message)


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
def test_bad_configs(zygote, tmp_path, config, message):
    (tmp_path / "c.yaml").write_text(config + "\n")
    fails(zygote, ["--config", str(tmp_path / "c.yaml")], tmp_path, message)


def test_checkpoint_of_another_run(compressed_ad_flags, darkroom_data, zygote, tmp_path):
    run = tmp_path / "one"
    done = zygote(TRAIN, *compressed_ad_flags(run, "--max_steps", "2"))
    assert done.code == 0, done.stderr[-2000:]
    again = compressed_ad_flags(tmp_path / "run", "--resume_from", run / "last.pt")
    for flags, message in (
        (["--train_batch_size", "3"], r"a run with effective batch size 12, now 3; keep the product of"),
        (["--seed", "5"], r"a run with seed 0, now 5; give the same again"),
        (["--tf_n_layer", "3"], r"last.pt: a run with --tf_n_layer 2, now 3; leave it out"),
        (["--n_latent", "6"], r"last.pt: a run with --n_latent 4, now 6; leave it out"),
        (["--max_compression_depth", "1"], r"a run with --max_compression_depth 3, now 1; leave it out"),
        (["--split_seed", "1"], r"a run with --split_seed 0, now 1; leave it out"),
    ):
        fails(zygote, [*again, *flags], tmp_path, message)
    other = tmp_path / "other.hdf5"
    shutil.copy(next(darkroom_data.glob("datasets/*.hdf5")), other)
    with h5py.File(other, "r+") as file:
        for name in ("states", "next_states", "actions", "rewards", "dones"):
            write(file, 7, name, file["7"][name][()][:, [0, 2, 1]])
    fails(zygote, [*again, "--data", other], tmp_path, r"a run with training data \w+, now \w+; give the same again")
    (tmp_path / "no.pt").write_bytes(b"x")
    fails(zygote, [*again, "--resume_from", tmp_path / "no.pt"], tmp_path, r"no.pt: not a readable checkpoint")
    torch.save({"format": "cascade/1", "step": 1, "rng": []}, tmp_path / "foreign.pt")
    fails(
        zygote, [*again, "--resume_from", tmp_path / "foreign.pt"], tmp_path, r"checkpoint of cascade/1, not of compr"
    )
    fails(zygote, compressed_ad_flags(run), tmp_path, r"holds a run already; go on with --resume_from auto")
    found = r"eval_test.json: of --model compressed_ad; give --ad_run a run of --model ad"
    fails(zygote, compressed_ad_flags(tmp_path / "run", "--ad_run", run), tmp_path, found)
    text = json.loads((run / "eval_test.json").read_text())
    (run / "eval_test.json").write_text(json.dumps(text | {"model": "ad", "goals": [[0, 0]]}))
    fails(
        zygote,
        compressed_ad_flags(tmp_path / "run", "--ad_run", run),
        tmp_path,
        r"of other goals; give a run with the same",
    )
    text |= {"model": "ad", "return_by_episode": {"mean": [0.0]}}
    (run / "eval_test.json").write_text(json.dumps(text))
    fails(
        zygote,
        compressed_ad_flags(tmp_path / "run", "--ad_run", run),
        tmp_path,
        r"of 1 episodes, this run has --eval_episodes 3",
    )
    (run / "eval_test.json").write_text("[1]")
    fails(
        zygote,
        compressed_ad_flags(tmp_path / "run", "--ad_run", run),
        tmp_path,
        r"not an evaluation of train.py; --ad_run wants",
    )


def test_one_short_goal(compressed_ad_flags, darkroom_data, zygote, tmp_path):
    """What it cuts from the others is said; and what the source reached is the same from the file and from memory."""
    path = tmp_path / "history.hdf5"
    shutil.copy(next(darkroom_data.glob("datasets/*.hdf5")), path)
    with h5py.File(path, "r+") as file:
        for name in ("states", "next_states", "actions", "rewards", "dones"):
            write(file, 7, name, file["7"][name][:100])
            write(file, 38, name, np.concatenate([file["38"][name][()], file["38"][name][:, :1]], 1))
    found = []
    for k, more in enumerate(([], ["--no-cache_in_memory"])):
        done = zygote(TRAIN, *compressed_ad_flags(tmp_path / f"{k}", "--data", path, "--max_steps", "1", *more))
        assert done.code == 0, done.stderr[-2000:]
        assert "100 steps of each history are used, as goal 7 has no more; others have up to 200" in done.stdout
        found.append(json.loads((tmp_path / f"{k}" / "eval_test.json").read_text()))
    assert found[0] == found[1]


def test_accelerate_config_of_another_kind(compressed_ad_flags, zygote, tmp_path):
    message = r"accelerate config: DEEPSPEED is not supported here; choose multi-GPU"
    fails(zygote, compressed_ad_flags(tmp_path / "run"), tmp_path, message, ACCELERATE_USE_DEEPSPEED="true")
    message = r"accelerate launch --gradient_accumulation_steps 4: not read; give --gradient_accumulation_steps 4 to"
    fails(zygote, compressed_ad_flags(tmp_path / "run"), tmp_path, message, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")


def test_sample_data_overwrites_nothing(darkroom_data, zygote):
    before = tree(darkroom_data)
    done = zygote(str(ROOT / "sample_data.py"), "compressed_ad", darkroom_data)
    assert done.code == 2
    assert re.search(r"error: .*history_darkroom_TD_alg-seed42.hdf5: is there already; choose another", done.stderr)
    assert tree(darkroom_data) == before
