"""utils/checkpoint.py: sealed files, what counts as the newest, best.pt, whose folder it is, the optimizer's state."""

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
from utils.cli import InputError, RunError

RUN = "0123456789abcdef"


def contents(step: int) -> dict:
    return {"format": "test/1", "step": step, "model": {"weight": torch.arange(1000.0) + step}, "log": {"bytes": 9}}


def load(path: Path | str, folder: Path) -> dict:
    return checkpoint.load_checkpoint(str(path), folder, "test/1")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.pt"))


@pytest.fixture
def folder(tmp_path):
    """A run folder with checkpoints of steps 3, 6 and 9, the second of them the best."""
    (tmp_path / "run_id").write_text(RUN)
    writer = checkpoint.CheckpointWriter(tmp_path, keep_last=3)
    for step in (3, 6, 9):
        writer.save(contents(step), ("best.pt",) * (step == 6))
    writer.wait()
    return tmp_path


def test_every_flipped_bit_and_every_cut_is_found(folder):
    path = folder / "step_00000009.pt"
    whole, chance = path.read_bytes(), random.Random(0)
    assert checkpoint.read_seal(path) == (9, RUN, "")
    for _ in range(60):
        broken = bytearray(whole)
        broken[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(broken)
        assert checkpoint.read_seal(path).damage
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert checkpoint.read_seal(path).damage


def test_the_newest_intact_one_of_this_run_counts(folder, capsys):
    assert checkpoint.find_newest(folder).name == "step_00000009.pt"
    checkpoint.write_checkpoint(folder / "step_00000012.pt", contents(12), "f" * 16)
    (folder / "step_00000009.pt").write_bytes(b"torn")
    assert load("auto", folder)["step"] == 6
    told = capsys.readouterr().out
    assert "step_00000012.pt: of another run; passed over" in told
    assert "step_00000009.pt: has no seal" in told
    with pytest.raises(InputError, match="step_00000009.pt: damaged"):
        load(folder / "step_00000009.pt", folder)
    with pytest.raises(InputError, match="a checkpoint of test/1; this script's are test/2, with other weights"):
        checkpoint.load_checkpoint("auto", folder, "test/2")
    for path in folder.glob("step_*.pt"):
        path.write_bytes(b"torn")
    with pytest.raises(InputError, match="no intact checkpoint is left"):
        load("auto", folder)


def test_best_is_another_name_of_its_checkpoint_and_stays(folder):
    assert os.path.samefile(folder / "best.pt", folder / "step_00000006.pt")
    writer = checkpoint.CheckpointWriter(folder, keep_last=1)
    writer.save(contents(12))
    writer.wait()
    assert names(folder) == ["best.pt", "step_00000012.pt"]
    assert load(folder / "best.pt", folder)["step"] == 6
    assert torch.equal(load("auto", folder)["model"]["weight"], torch.arange(1000.0) + 12)
    # weights that change after a save began do not reach it
    state, copy = contents(15), checkpoint.HostCopy()
    first = copy(state)["model"]["weight"]
    state["model"]["weight"].zero_()
    assert torch.equal(first, contents(15)["model"]["weight"])


def test_a_copy_in_host_memory_takes_the_memory_of_the_one_before():
    copy, weight = checkpoint.HostCopy(), torch.rand(3, 4, 5, 6).to(memory_format=torch.channels_last)
    state = {"model": {"weight": weight}, "moments": [weight.double(), torch.tensor(3)], "step": 7}
    first = copy(state)
    state["moments"][1] += 1
    second = copy(state)
    assert second["step"] == 7
    pairs = zip((second["model"]["weight"], *second["moments"]), (weight, *state["moments"]), strict=True)
    assert all(torch.equal(a, b) and a.stride() == b.stride() and a is not b for a, b in pairs)
    assert second["model"]["weight"].data_ptr() == first["model"]["weight"].data_ptr()
    # another shape, as of a further stage
    assert torch.equal(copy({"model": {"weight": weight[:2]}})["model"]["weight"], weight[:2])


def test_a_failed_save_leaves_the_one_before_and_no_litter(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    writer = checkpoint.CheckpointWriter(folder, keep_last=3)
    writer.save(contents(12), ("best.pt",))
    with pytest.raises(RunError, match="No space left"):
        writer.wait()
    assert checkpoint.find_newest(folder).name == "step_00000009.pt"
    assert load(folder / "best.pt", folder)["step"] == 6
    assert not list(folder.glob(".*.tmp"))


def test_a_file_is_on_the_disk_before_it_has_its_names(tmp_path, monkeypatch):
    """So that a power cut, too, leaves the checkpoint before or this one."""
    done, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: done.append(("fsync", os.fstat(file).st_size)) or sync(file))
    for name in ("link", "replace"):
        act = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *paths, name=name, act=act: done.append((name, paths[1].name)) or act(*paths)
        )
    checkpoint.write_atomically(tmp_path / "a", lambda file: file.write(b"123"), (tmp_path / "b",))
    assert done == [("fsync", 3), ("link", ".b.tmp"), ("replace", "b"), ("replace", "a")]


@pytest.mark.skipif(os.name == "nt", reason="locks by flock")
def test_a_lock_is_waited_for_and_the_user_told_once(tmp_path, capsys):
    import fcntl

    with open(tmp_path / "lock", "w") as ours, open(tmp_path / "lock", "w") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert not checkpoint._take_lock(ours, tmp_path, wait=0.5)
        Timer(0.5, fcntl.flock, (theirs, fcntl.LOCK_UN)).start()
        assert checkpoint._take_lock(ours, tmp_path, wait=20)
    lines = [f"waiting up to {wait} s for the run in {tmp_path} to end\n" for wait in (0, 20)]
    assert capsys.readouterr().out == "".join(lines)


def test_weights_of_another_model_are_refused():
    """One layer more, of another shape, or less; frozen ones are not saved."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    saved = checkpoint.trained_state(model)
    checkpoint.load_trained(model, saved)
    more, other = nn.Sequential(*model, nn.Linear(2, 2)), nn.Sequential(nn.Linear(4, 2), model[1])
    for wrong in (more, other, model[:1]):
        with pytest.raises(InputError, match="another model"):
            checkpoint.load_trained(wrong, saved)
    model[0].requires_grad_(False)
    assert list(checkpoint.trained_state(model)) == ["1.weight", "1.bias"]


def test_an_optimizer_goes_on_with_its_moments_by_the_flags_of_this_start():
    """Moments take the strides of their parameters: fused AdamW pairs memory with memory, whatever the layout."""
    torch.manual_seed(0)
    images, layers = torch.randn(2, 3, 5, 5), [nn.Conv2d(3, 4, 3) for _ in range(2)]
    layers[0].to(memory_format=torch.channels_last)
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=1e-3, weight_decay=0.1, fused=True) for layer in layers]
    layers[0](images).square().sum().backward()
    optimizers[0].step()
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers[1].param_groups[0] |= {"lr": 0.5, "weight_decay": 0.2}
    checkpoint.restore_optimizer(optimizers[1], copy.deepcopy(optimizers[0].state_dict()))
    (group,) = optimizers[1].param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.2)
    optimizers[0].param_groups[0] |= {"lr": 0.5, "weight_decay": 0.2}
    for layer, optimizer in zip(layers, optimizers, strict=True):
        layer.zero_grad()
        layer(images).square().sum().backward()
        optimizer.step()
    assert torch.allclose(layers[0].weight, layers[1].weight, atol=1e-6)
    with pytest.raises(InputError, match="the state of another optimizer"):
        checkpoint.restore_optimizer(torch.optim.AdamW([nn.Parameter(images)]), optimizers[0].state_dict())


def test_a_run_that_was_resumed_elsewhere_begins_a_folder_of_its_own(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    saved = load(folder / "step_00000006.pt", other)
    # the best so far comes along, one of a later step does not
    assert checkpoint.begin_run(other, saved) is True
    assert checkpoint.read_seal(other / "best.pt").run_id == checkpoint.read_run_id(other) != RUN
    early = load(folder / "step_00000003.pt", other)
    assert checkpoint.begin_run(tmp_path_factory.mktemp("early"), early) is False
    assert checkpoint.find_newest(other).name == "step_00000006.pt"
    # whose log stays behind
    assert load("auto", other)["log"] == {"bytes": 0}
    assert len(names(folder)) == 4


def test_going_back_makes_later_checkpoints_of_the_run_disappear(folder):
    """Back to the best of an earlier part, which is the best again; then to one before any."""
    shutil.copy(folder / "step_00000006.pt", folder / "first_best.pt")
    shutil.copy(folder / "step_00000009.pt", folder / "second_best.pt")
    shutil.copy(folder / "step_00000009.pt", folder / "best.pt")
    saved = load(folder / "first_best.pt", folder)
    assert checkpoint.begin_run(folder, saved, best_names=("first_best.pt", "best.pt")) is True
    assert names(folder) == ["best.pt", "first_best.pt", "step_00000003.pt", "step_00000006.pt"]
    assert checkpoint.read_seal(folder / "best.pt").step == 6
    assert checkpoint.begin_run(folder, load(folder / "step_00000003.pt", folder)) is False
    assert names(folder) == ["step_00000003.pt"]
