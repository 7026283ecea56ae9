"""--shard_base: the frozen VLM shared out over 2 and 3 processes gives the losses of the whole one, in less memory."""

import re
from pathlib import Path

import pytest
import torch
from conftest import PRS_MED, SAME, losses
from safetensors.torch import load_file

# 34 rows in steps of 12: the third step's 10 are unlike on each rank, and so are the batches of the 10 validated rows
FLAGS = [*SAME, "--num_epochs", "1", "--save_every", "1", "--keep_last", "9"]
BATCHES = {
    1: ["--batch_size", "12"],
    2: ["--batch_size", "3", "--gradient_accumulation_steps", "2"],
    3: ["--batch_size", "1", "--gradient_accumulation_steps", "4"],
}


@pytest.fixture
def run(zygote, prs_med_data, tmp_path):
    """run(name, processes, flags): what a run prints; its folder is tmp_path / name."""

    def start(name: str, processes: int, flags: list) -> str:
        places = ["--data_root", prs_med_data, "--checkpoint_dir", tmp_path / name]
        done = zygote(PRS_MED, FLAGS, BATCHES[processes], places, flags, ranks=processes)
        assert done.code == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "UserWarning" not in done.stderr
        return done.stdout

    return start


def steps_and_losses(run_folder: Path) -> list[tuple]:
    """(step, loss) of each step, (step, Dice) of each evaluation."""
    return [row[:2] for row in losses(run_folder)]


@pytest.mark.parametrize(("processes", "flags"), [(2, []), (3, ["--gradient_checkpointing"])])
def test_a_shared_base_gives_the_losses_of_a_whole_one(run, processes, flags, tmp_path):
    """Each step's, the validation's and the test's; the same checkpoints; each process holds its share."""
    run("whole", processes, flags)
    said = run("sharded", processes, ["--shard_base", *flags])
    expected = steps_and_losses(tmp_path / "whole")
    found = steps_and_losses(tmp_path / "sharded")
    assert len(found) == len(expected) == 5
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-6)

    # all that is frozen but the vision tower's own embeddings and norms
    sizes = re.search(r"parameters of ([\d.]+) MB a process instead of ([\d.]+)", said)
    left = float(sizes[1])
    everything = float(sizes[2])
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    trained = sum(value.nbytes for value in weights.values()) / 1e6
    share = (left - trained) / (everything - trained)
    print(f"{processes} processes: each holds {share:.3f} of the frozen weights")
    assert 1 / processes < share < 1 / processes + 0.1

    # a checkpoint knows nothing of it
    one = torch.load(tmp_path / "whole" / "last.pt", weights_only=True)["model"]
    other = torch.load(tmp_path / "sharded" / "last.pt", weights_only=True)["model"]
    assert one.keys() == other.keys()
    assert all(type(value) is torch.Tensor for value in other.values())


def test_a_run_goes_on_with_any_number_of_processes_sharded_or_not(run, tmp_path):
    """From step 2 of two processes: the loss of step 3 agrees to 1e-5."""
    run("two", 2, ["--shard_base"])
    expected = steps_and_losses(tmp_path / "two")[2]
    start = ["--resume_from", tmp_path / "two" / "step_00000002.pt"]
    for processes, flags in ((3, ["--shard_base"]), (1, ["--shard_base"]), (2, [])):
        name = f"from_{processes}"
        run(name, processes, start + flags)
        found = steps_and_losses(tmp_path / name)[0]
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("flag", ["--auto_batch", "--compile", "--save_full_state"])
def test_what_does_not_go_with_it(zygote, prs_med_data, flag):
    done = zygote(PRS_MED, "--data_root", prs_med_data, "--shard_base", flag)
    assert done.code == 2
    assert f"{flag} does not go with --shard_base" in done.stderr
