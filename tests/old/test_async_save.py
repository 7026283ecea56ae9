"""Checkpoints are written beside the training: what is in the file, who waits for it, and who hears of its errors."""

import argparse
import io
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import ROOT

from old import async_save_utils, checkpoint_utils, loop_utils, manifest_utils


@pytest.fixture
def slow_disk(monkeypatch):
    """An event that checkpoints wait for before their first byte; set at the end, so that no test leaves a thread."""
    real_write = manifest_utils._HashingFile.write
    ready = threading.Event()

    def write(self, data) -> int:
        # a save that does not return before the file is there is not waited for again
        if not ready.wait(5):
            ready.set()
        return real_write(self, data)

    monkeypatch.setattr(manifest_utils._HashingFile, "write", write)
    yield ready
    ready.set()
    async_save_utils.WRITER.join()


def parts() -> dict:
    """What training changes in place: weights, two names of one tensor, views of one storage, an optimizer's state."""
    # an optimizer with moments
    parameter = torch.nn.Parameter(torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    # tensors that share their memory
    weight = torch.randn(50, 40)
    flat = torch.arange(24, dtype=torch.float64)
    views = [flat[:12], flat[12:].view(3, 4).t()]
    model = {"weight": weight, "tied": weight, "views": views, "empty": torch.empty(0)}
    return {"format": "toy", "model": model, "optimizer": optimizer.state_dict(), "state": {"losses": [1.0, 2.5]}}


def test_the_file_holds_what_was_there_when_it_was_saved(tmp_path, slow_disk):
    """To the byte what torch.save would have written then, whatever changes while the disk is slow."""
    # the manifest is there before the disk becomes slow
    run_folder = tmp_path / "run"
    slow_disk.set()
    run_folder.mkdir()
    manifest_utils.write_manifest(run_folder, manifest_utils.Manifest("0123456789abcdef"))
    slow_disk.clear()

    # saved, and not yet written
    saved = parts()
    path = checkpoint_utils.save_checkpoint(run_folder, saved, 1, keep_last=2)
    assert not path.exists()
    expected = io.BytesIO()
    more = {"step": 1, "rng": [checkpoint_utils.get_rng_state()], "run_id": "0123456789abcdef"}
    torch.save({**saved, **more}, expected)

    # training changes everything
    saved["model"]["weight"].zero_()
    saved["model"]["views"][0].zero_()
    saved["optimizer"]["state"][0]["exp_avg"].zero_()
    saved["state"]["losses"].append(9.0)

    slow_disk.set()
    checkpoint_utils.settle_checkpoint()
    written = path.read_bytes()
    seal = manifest_utils.read_seal(path)
    assert written[: -seal.size] == expected.getvalue()


@pytest.fixture
def allocated(monkeypatch) -> list[int]:
    """The sizes that are allocated for copies from now on; no copy is there to begin with."""
    sizes = []
    real_allocate = async_save_utils._allocate

    def allocate(size: int):
        sizes.append(size)
        return real_allocate(size)

    monkeypatch.setattr(async_save_utils, "_allocate", allocate)
    async_save_utils.WRITER.join()
    async_save_utils.WRITER.release()
    return sizes


def test_a_second_save_allocates_nothing(tmp_path, allocated):
    """The memory of the first copy is used again, by contents of the same shapes and by smaller ones."""
    for step, count in enumerate((1000, 1000, 10), 1):
        weight = torch.full((count,), float(step))
        saved = {"format": "toy", "model": {"weight": weight}}
        path = checkpoint_utils.save_checkpoint(tmp_path / "run", saved, step, keep_last=3)
        checkpoint_utils.settle_checkpoint()
        checkpoint = torch.load(path, weights_only=True)
        assert torch.equal(checkpoint["model"]["weight"], weight)
    assert len(allocated) == 1


def test_the_first_save_finds_its_memory(tmp_path, allocated):
    """What is taken before training holds the weights and AdamW's moments."""
    model = torch.nn.Linear(200, 200)
    checkpoint_utils.prepare_checkpoint(model)
    allocated.clear()

    # one step, and a save
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    saved = {"format": "toy", "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint_utils.save_checkpoint(tmp_path / "run", saved, 1, keep_last=1)
    checkpoint_utils.settle_checkpoint()
    assert allocated == []


def test_a_forked_process_has_no_copy():
    """It neither writes over the parent's, nor unmaps what lies there in its own memory."""
    writer = async_save_utils.WRITER
    writer.join()
    assert writer._make_room(1000, False)
    memory = writer.memory
    child = os.fork()
    if child == 0:
        os._exit(0 if writer.memory is None and async_save_utils.INHERITED[-1] is memory else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("lacking", ["RAM", "address space"])
def test_without_memory_for_a_copy_it_is_written_at_once(tmp_path, monkeypatch, lacking):
    def refuse(size: int):
        raise OSError(12, "Cannot allocate memory")

    async_save_utils.WRITER.release()
    if lacking == "RAM":
        monkeypatch.setattr(async_save_utils, "available_ram_gb", lambda: 1e-6)
    else:
        monkeypatch.setattr(async_save_utils, "_allocate", refuse)
    path = checkpoint_utils.save_checkpoint(tmp_path / "run", parts(), 1, keep_last=2)
    assert path.name in manifest_utils.read_manifest(tmp_path / "run").checkpoints


def test_the_next_save_and_the_best_one_wait(tmp_path, slow_disk):
    """One write at a time, in order; best.pt is another name of a file that is there."""
    folder = tmp_path / "run"
    checkpoint_utils.save_checkpoint(folder, parts(), 1, keep_last=2)
    threading.Timer(0.2, slow_disk.set).start()
    begun = time.monotonic()
    second = checkpoint_utils.save_checkpoint(folder, parts(), 2, keep_last=2)
    assert time.monotonic() - begun > 0.15
    training = argparse.Namespace(run_folder=folder, progress=loop_utils.Progress(step=2))
    loop_utils.keep_best(training, 1.0, planned=True)
    assert manifest_utils.file_is(folder / "best.pt", manifest_utils.file_sha256(second))
    assert manifest_utils.read_manifest(folder).steps() == ["step_00000001.pt", "step_00000002.pt"]


def test_saved_is_said_when_it_is(tmp_path, slow_disk, capsys):
    """After a stop signal the line comes with the file on the disk, and not before."""
    path = checkpoint_utils.save_checkpoint(tmp_path / "run", parts(), 7, keep_last=2)
    threading.Timer(0.2, slow_disk.set).start()
    assert not path.exists()
    loop_utils.say_saved(7)
    assert "signal: saved at step 7" in capsys.readouterr().out
    assert path.name in manifest_utils.read_manifest(path.parent).checkpoints


# A program that saves on a slow disk, says whether the file is there, and ends.
SAVE_AND_END = """
import sys, time
from pathlib import Path

import torch
from old import checkpoint_utils, manifest_utils

real_write = manifest_utils._HashingFile.write

def write(self, data):
    time.sleep(0.05)
    return real_write(self, data)

manifest_utils._HashingFile.write = write
path = checkpoint_utils.save_checkpoint(Path(sys.argv[1]), {"format": "toy", "x": torch.ones(9)}, 1, 2)
print(path.exists())
"""


def test_python_ends_when_the_file_is_there(tmp_path):
    """A program that saves and ends: its exit code is 0, and the checkpoint is whole."""
    command = [sys.executable, "-c", SAVE_AND_END, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\n"
    assert checkpoint_utils.load_checkpoint("auto", tmp_path / "run", "toy")["step"] == 1


# A run of two ranks, whose disk is full at the second checkpoint: FILE RUN_FOLDER, and what tells it ("save" or "log").
RANKS = """
import sys
from argparse import Namespace
from pathlib import Path

import torch

from old import checkpoint_utils
from old.cli_utils import RunError, run_main
from old.distributed_utils import setup_distributed
from old.logging_utils import RunLog

folder = Path(sys.argv[1])
told = sys.argv[2]
real_write = checkpoint_utils.write_checkpoint


def write(path, checkpoint):
    if checkpoint["step"] == 2:
        raise OSError(28, "No space left on device")
    return real_write(path, checkpoint)


def main(_):
    checkpoint_utils.write_checkpoint = write
    with setup_distributed() as ranks:
        args = Namespace(log_every=1, wandb=False, max_bad_steps=10, compile=False, mixed_precision="no")
        lock = checkpoint_utils.lock_run_folder(folder, False)
        log = RunLog(folder, ranks, ["loss", "skipped"], 9, 1, "no")
        log.open(args)

        try:
            for step in (1, 2):
                parts = {"format": "toy", "x": torch.ones(9), "log": log.pending(step)}
                checkpoint_utils.save_checkpoint(folder, parts, step, 2)
            checkpoint_utils.WRITER.join()
            log.step(torch.zeros(2), 1, 0.1)
            if told == "log":
                log.write_interval(3, 1)
            else:
                checkpoint_utils.save_checkpoint(folder, parts, 3, 2)
        except RunError as error:
            (folder / f"told{ranks.rank}.txt").write_text(str(error))
            raise
        finally:
            log.close()


run_main(main, None)
"""


@pytest.mark.parametrize("told", ["save", "log"])
def test_a_full_disk_is_told_to_all_ranks(tmp_path, zygote, told):
    """At the next save, or already at the next line of the log: one error line, and the checkpoint before is there."""
    script = tmp_path / "ranks.py"
    folder = tmp_path / "run"
    script.write_text(RANKS)
    done = zygote(script, folder, told, ranks=2)
    assert done.code == 1, done.stderr
    reason = f"{folder}/step_00000002.pt: not written (No space left on device), the checkpoint before is intact"
    assert done.stderr.count(f"error: {reason}") == 1, done.stderr
    for rank in range(2):
        told_reason, _, _ = (folder / f"told{rank}.txt").read_text().partition(";")
        assert told_reason == reason
    assert checkpoint_utils.load_checkpoint("auto", folder, "toy")["step"] == 1
