"""utils/checkpoint.py: sealed files, the newest intact checkpoint, best.pt, run folders, model and optimizer states."""

import copy
import os
import random
import shutil
from pathlib import Path
from threading import Timer

import pytest
import torch
from torch import nn

from utils import checkpoint
from utils.cli import InputError

RUN = "0123456789abcdef"


def contents(step: int) -> dict:
    return {"format": "test/1", "step": step, "model": {"weight": torch.arange(1000.0) + step}, "log": {"bytes": 9}}


def load(path: Path | str, folder: Path) -> dict:
    return checkpoint.load_checkpoint(str(path), folder, "test/1")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.pt"))


@pytest.fixture
def folder(tmp_path):
    """A run folder with checkpoints of steps 3, 6 and 9; step 6 is the best."""
    (tmp_path / "run_id").write_text(RUN)
    writer = checkpoint.CheckpointWriter(tmp_path, keep_last=3)
    for step in (3, 6, 9):
        writer.save(contents(step), ("best.pt",) * (step == 6))
    writer.wait()
    return tmp_path


def test_seal_detects_flipped_bits_and_truncation(folder):
    path = folder / "step_00000009.pt"
    intact, chance = path.read_bytes(), random.Random(0)
    assert checkpoint.read_seal(path) == (9, RUN, "")
    for _ in range(60):
        broken = bytearray(intact)
        broken[chance.randrange(len(intact))] ^= 1 << chance.randrange(8)
        path.write_bytes(broken)
        assert checkpoint.read_seal(path).damage
    for length in (0, len(intact) - 1):
        path.write_bytes(intact[:length])
        assert checkpoint.read_seal(path).damage


def test_auto_loads_the_newest_intact_checkpoint_of_this_run(folder, capsys):
    checkpoint.write_checkpoint(folder / "step_00000012.pt", contents(12), "f" * 16)
    (folder / "step_00000009.pt").write_bytes(b"torn")
    assert load("auto", folder)["step"] == 6
    output = capsys.readouterr().out
    assert "step_00000012.pt: of another run; passed over" in output
    assert "step_00000009.pt: has no seal" in output
    with pytest.raises(InputError, match="step_00000009.pt: damaged"):
        load(folder / "step_00000009.pt", folder)
    with pytest.raises(InputError, match="a checkpoint of test/1; this script's are test/2, with other weights"):
        checkpoint.load_checkpoint("auto", folder, "test/2")
    for path in folder.glob("step_*.pt"):
        path.write_bytes(b"torn")
    with pytest.raises(InputError, match="no intact checkpoint is left"):
        load("auto", folder)


def test_best_is_a_hard_link_that_outlives_its_checkpoint(folder):
    assert os.path.samefile(folder / "best.pt", folder / "step_00000006.pt")
    writer = checkpoint.CheckpointWriter(folder, keep_last=1)
    writer.save(contents(12))
    writer.wait()
    assert names(folder) == ["best.pt", "step_00000012.pt"]
    assert load(folder / "best.pt", folder)["step"] == 6
    assert torch.equal(load("auto", folder)["model"]["weight"], torch.arange(1000.0) + 12)


def test_host_copy_is_independent_and_reuses_its_memory():
    host_copy, weight = checkpoint.HostCopy(), torch.rand(3, 4, 5, 6).to(memory_format=torch.channels_last)
    state = {"model": {"weight": weight}, "moments": [weight.double(), torch.tensor(3)], "step": 7}
    first, expected, exactly = host_copy(state), copy.deepcopy(state), {"rtol": 0, "atol": 0, "check_stride": True}
    weight += 1
    torch.testing.assert_close(first, expected, **exactly)
    second = host_copy(state)
    torch.testing.assert_close(second, state, **exactly)
    assert second["model"]["weight"].data_ptr() == first["model"]["weight"].data_ptr()
    # a later stage has weights of another shape
    assert torch.equal(host_copy({"model": {"weight": weight[:2]}})["model"]["weight"], weight[:2])


def test_file_is_on_disk_before_it_gets_its_names(tmp_path, monkeypatch):
    """After a power cut, either the previous checkpoint or this one is intact."""
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.fstat(file).st_size) or sync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append(paths[1].name) or replace(*paths))
    checkpoint.write_atomically(tmp_path / "a", lambda file: file.write(b"123"), (tmp_path / "b",))
    assert done == [3, "b", "a"]
    assert (tmp_path / "b").read_bytes() == b"123"


def test_checkpoint_with_code_and_link_in_a_run_folder_are_refused(folder):
    checkpoint.write_checkpoint(folder / "evil.pt", contents(12) | {"log": os.system}, RUN)
    with pytest.raises(InputError, match="not a readable checkpoint"):
        load(folder / "evil.pt", folder)
    (folder / "metrics.jsonl").symlink_to(folder / "victim")
    with pytest.raises(InputError, match="a link in a run folder"):
        checkpoint.lock_run_folder(folder, may_exist=True)


@pytest.mark.skipif(os.name == "nt", reason="locks by flock")
def test_lock_is_waited_for_with_one_message(tmp_path, capsys):
    import fcntl

    with open(tmp_path / "lock", "w") as ours, open(tmp_path / "lock", "w") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        Timer(0.5, fcntl.flock, (theirs, fcntl.LOCK_UN)).start()
        assert checkpoint._take_lock(ours, tmp_path, wait=20)
    assert capsys.readouterr().out == f"waiting up to 20 s for the run in {tmp_path} to end\n"


def test_weights_of_another_model_are_refused():
    """The other models have one more layer, another shape, or one layer less. Frozen weights are not saved."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    saved = checkpoint.trained_state(model)
    checkpoint.load_trained(model, saved)
    more, other = nn.Sequential(*model, nn.Linear(2, 2)), nn.Sequential(nn.Linear(4, 2), model[1])
    for wrong in (more, other, model[:1]):
        with pytest.raises(InputError, match="another model"):
            checkpoint.load_trained(wrong, saved)
    model[0].requires_grad_(False)
    assert list(checkpoint.trained_state(model)) == ["1.weight", "1.bias"]


def test_optimizer_resumes_with_its_moments_and_this_starts_flags():
    """Moments get the strides of their parameters: fused AdamW ignores strides and pairs elements by memory order."""
    layers = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Conv2d(3, 4, 3)
    old, new = (torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1, fused=True) for layer in layers)
    layers[0](torch.randn(2, 3, 5, 5)).square().sum().backward()
    old.step()
    new.param_groups[0] |= {"lr": 0.5, "weight_decay": 0.2}
    checkpoint.restore_optimizer(new, copy.deepcopy(old.state_dict()))
    assert (new.param_groups[0]["lr"], new.param_groups[0]["weight_decay"]) == (0.5, 0.2)
    saved, restored = old.state[layers[0].weight], new.state[layers[1].weight]
    torch.testing.assert_close(restored, saved, rtol=0, atol=0)
    assert restored["exp_avg"].stride() == layers[1].weight.stride() != saved["exp_avg"].stride()
    with pytest.raises(InputError, match="the state of another optimizer"):
        checkpoint.restore_optimizer(torch.optim.AdamW([layers[1].weight]), old.state_dict())


def test_run_resumed_into_another_folder_gets_an_id_of_its_own(folder, tmp_path_factory):
    """best.pt is copied unless it is from a later step; the log is not. Only --overwrite replaces another run."""
    other = tmp_path_factory.mktemp("other")
    saved = load(folder / "step_00000006.pt", other)
    assert checkpoint.begin_run(other, saved) is True
    assert checkpoint.read_seal(other / "best.pt").run_id == checkpoint.read_run_id(other) != RUN
    early = load(folder / "step_00000003.pt", other)
    assert checkpoint.begin_run(tmp_path_factory.mktemp("early"), early) is False
    assert checkpoint.find_newest(other).name == "step_00000006.pt"
    assert load("auto", other)["log"] == {"bytes": 0}
    with pytest.raises(InputError, match="holds another run"):
        checkpoint.begin_run(other, early)
    checkpoint.begin_run(other, early, overwrite=True)
    assert names(other) == ["step_00000003.pt"]
    assert len(names(folder)) == 4


def test_going_back_deletes_later_checkpoints_of_the_run(folder):
    """First to the best of an earlier stage, which becomes best.pt again, then to a step before any best."""
    shutil.copy(folder / "step_00000006.pt", folder / "first_best.pt")
    shutil.copy(folder / "step_00000009.pt", folder / "second_best.pt")
    shutil.copy(folder / "step_00000009.pt", folder / "best.pt")
    saved = load(folder / "first_best.pt", folder)
    assert checkpoint.begin_run(folder, saved, best_names=("first_best.pt", "best.pt")) is True
    assert names(folder) == ["best.pt", "first_best.pt", "step_00000003.pt", "step_00000006.pt"]
    assert checkpoint.read_seal(folder / "best.pt").step == 6
    assert checkpoint.begin_run(folder, load(folder / "step_00000003.pt", folder)) is False
    assert names(folder) == ["step_00000003.pt"]
