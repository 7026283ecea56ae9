"""utils/checkpoint.py: sealed files, what counts as the newest, best.pt, whose folder it is, strides of moments."""

import copy
import os
import random
import shutil

import pytest
import torch

from utils import checkpoint
from utils.cli import InputError, RunError

RUN = "0123456789abcdef"


def contents(step: int) -> dict:
    return {"format": "test/1", "step": step, "model": {"weight": torch.arange(1000.0) + step}, "log": {"bytes": 9}}


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
    assert checkpoint.load_checkpoint("auto", folder, "test/1")["step"] == 6
    told = capsys.readouterr().out
    assert "step_00000012.pt: of another run; passed over" in told
    assert "step_00000009.pt: has no seal" in told
    for path in folder.glob("step_*.pt"):
        path.write_bytes(b"torn")
    with pytest.raises(InputError, match="no intact checkpoint is left"):
        checkpoint.load_checkpoint("auto", folder, "test/1")


def test_best_is_another_name_of_its_checkpoint(folder):
    assert os.path.samefile(folder / "best.pt", folder / "step_00000006.pt")
    assert checkpoint.load_checkpoint(str(folder / "best.pt"), folder, "test/1")["step"] == 6


def test_old_ones_go_and_best_stays(folder):
    writer = checkpoint.CheckpointWriter(folder, keep_last=1)
    writer.save(contents(12))
    writer.wait()
    assert [path.name for path in sorted(folder.glob("*.pt"))] == ["best.pt", "step_00000012.pt"]
    assert checkpoint.read_seal(folder / "best.pt") == (6, RUN, "")


def test_weights_that_change_after_a_save_do_not_reach_it(folder):
    state = contents(15)
    writer = checkpoint.CheckpointWriter(folder, keep_last=3)
    writer.save(state)
    state["model"]["weight"].zero_()
    writer.wait()
    saved = checkpoint.load_checkpoint("auto", folder, "test/1")
    assert torch.equal(saved["model"]["weight"], torch.arange(1000.0) + 15)


def test_a_failed_save_leaves_the_one_before_and_no_litter(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    writer = checkpoint.CheckpointWriter(folder, keep_last=3)
    writer.save(contents(12), ("best.pt",))
    with pytest.raises(RunError, match="No space left"):
        writer.wait()
    assert checkpoint.find_newest(folder).name == "step_00000009.pt"
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.append(torch.nn.Linear(2, 2)), "another model"),
        (lambda model: model.__setitem__(0, torch.nn.Linear(4, 2)), "another model"),
        (lambda model: model.__delitem__(1), "another model"),
    ],
)
def test_weights_of_another_model_are_refused(change, reason):
    make = lambda: torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))  # noqa: E731
    saved = checkpoint.trained_state(make())
    model = make()
    checkpoint.load_trained(model, saved)
    change(model)
    with pytest.raises(InputError, match=reason):
        checkpoint.load_trained(model, saved)


def test_frozen_weights_are_not_saved():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert list(checkpoint.trained_state(model)) == ["1.weight", "1.bias"]


def test_moments_take_the_strides_of_their_parameters():
    """Fused AdamW pairs memory with memory: moments of another layout would belong to other elements."""
    torch.manual_seed(0)
    images, layers = torch.randn(2, 3, 5, 5), [torch.nn.Conv2d(3, 4, 3) for _ in range(2)]
    layers[0].to(memory_format=torch.channels_last)
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [torch.optim.AdamW(layer.parameters(), fused=True) for layer in layers]
    layers[0](images).square().sum().backward()
    optimizers[0].step()
    layers[1].load_state_dict(layers[0].state_dict())
    checkpoint.restore_optimizer(optimizers[1], copy.deepcopy(optimizers[0].state_dict()))
    for layer, optimizer in zip(layers, optimizers, strict=True):
        layer.zero_grad()
        layer(images).square().sum().backward()
        optimizer.step()
    assert torch.allclose(layers[0].weight, layers[1].weight, atol=1e-7)


def test_a_run_that_was_resumed_elsewhere_begins_a_folder_of_its_own(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    saved = checkpoint.load_checkpoint(str(folder / "step_00000006.pt"), other, "test/1")
    # the best so far comes along, one of a later step does not
    assert checkpoint.begin_run(other, saved) is True
    assert checkpoint.read_seal(other / "best.pt").run_id == checkpoint.read_run_id(other)
    early = checkpoint.load_checkpoint(str(folder / "step_00000003.pt"), other, "test/1")
    assert checkpoint.begin_run(tmp_path_factory.mktemp("early"), early) is False
    assert checkpoint.find_newest(other).name == "step_00000006.pt"
    assert checkpoint.read_run_id(other) != RUN
    # whose log stays behind
    assert checkpoint.load_checkpoint("auto", other, "test/1")["log"] == {"bytes": 0}
    assert len(list(folder.glob("step_*.pt"))) == 3


def test_going_back_makes_later_checkpoints_of_the_run_disappear(folder):
    saved = checkpoint.load_checkpoint(str(folder / "step_00000003.pt"), folder, "test/1")
    assert checkpoint.begin_run(folder, saved) is False
    assert [path.name for path in folder.glob("*.pt")] == ["step_00000003.pt"]


def test_going_back_to_the_best_of_an_earlier_part(folder):
    """It is the best again, and what a later part had as its best is gone."""
    shutil.copy(folder / "step_00000003.pt", folder / "first_best.pt")
    shutil.copy(folder / "step_00000009.pt", folder / "second_best.pt")
    saved = checkpoint.load_checkpoint(str(folder / "first_best.pt"), folder, "test/1")
    assert checkpoint.begin_run(folder, saved, best_names=("first_best.pt", "best.pt")) is True
    assert {path.name for path in folder.glob("*.pt")} == {"step_00000003.pt", "first_best.pt", "best.pt"}
    assert checkpoint.read_seal(folder / "best.pt").step == 3
