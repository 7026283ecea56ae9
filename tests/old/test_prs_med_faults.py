"""DESIGN "what happens when things go wrong", made to go wrong for real."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import PRS_MED, ROOT, losses, records, torchrun

from old import checkpoint_utils
from old.cli_utils import InputError

FLAGS = ["--batch_size", "4", "--max_new_tokens", "2", "--log_every", "1"]


@pytest.fixture
def run_prs_med(zygote):
    """run_prs_med(data_root, run_folder, flags, **options): a run of train_prs_med.py, whatever becomes of it."""

    def run(data_root: Path, run_folder: Path, flags: list, **options):
        return zygote(PRS_MED, "--data_root", data_root, "--checkpoint_dir", run_folder, *flags, **options)

    return run


def ended_well(done):
    """Assert that a run ended with exit code 0, and hand it on."""
    assert done.code == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def one_line(done) -> str:
    """Assert that a run ended with code 1 and one line on its error stream, and return that line."""
    assert done.code == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB, which takes about two checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.soak
def test_full_disk(prs_med_data, small_disk, tmp_path, run_prs_med):
    """The save that does not fit ends the run with one line; the checkpoint before is intact and can be resumed."""
    run_folder = small_disk / "run"
    flags = [*FLAGS, "--save_every", "1", "--keep_last", "99", "--resume_from", "auto", "--num_epochs", "1"]
    done = run_prs_med(prs_med_data, run_folder, flags)
    assert done.code == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    reason = r"step_\d+\.pt: not written \(No space left on device\), the checkpoint before is intact"
    assert re.search(reason, errors[0])
    assert "Traceback" not in done.stderr
    subprocess.run(["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=run_folder, check=True)
    assert not list(run_folder.glob(".*.tmp"))

    # resumed where there is room, it is the uninterrupted run
    shutil.copytree(run_folder, tmp_path / "roomy")
    done = ended_well(run_prs_med(prs_med_data, tmp_path / "roomy", flags))
    assert "loaded " in done.stdout
    ended_well(run_prs_med(prs_med_data, tmp_path / "uninterrupted", flags))
    assert losses(tmp_path / "roomy") == losses(tmp_path / "uninterrupted")


@pytest.fixture
def poisoned(prs_med_data, tmp_path):
    """The data with a word in one training question whose embedding is NaN in the frozen model."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    root = tmp_path / "poisoned"
    shutil.copytree(prs_med_data, root)

    # the embedding of ~
    tokenizer = AutoTokenizer.from_pretrained(root / "llava_tiny")
    token = tokenizer("~", add_special_tokens=False)["input_ids"]
    path = root / "llava_tiny" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    weights[name][token] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    return root


def poison(root: Path, rows: int) -> None:
    """Write the poisoned word into so many training rows."""
    left = rows
    for table in sorted((root / "annotations").glob("*.csv")):
        lines = table.read_text().splitlines()
        for i, line in enumerate(lines):
            if ",train," in line and left:
                lines[i] = line.replace("?,", " ~?,").replace("it is.,", "it is ~.,")
                left -= 1
        table.write_text("\n".join(lines) + "\n")


def test_a_non_finite_step_is_skipped_by_all_ranks(poisoned, run_prs_med, tmp_path):
    """One bad sample on one of 2 ranks: that step is skipped on both, counted, and the run ends well."""
    poison(poisoned, 1)
    run_folder = tmp_path / "run"
    ended_well(run_prs_med(poisoned, run_folder, [*FLAGS, "--num_epochs", "1"], ranks=2))
    lines = [record for record in records(run_folder) if "train/loss" in record]
    assert [line["train/skipped"] for line in lines].count(1.0) == 1
    assert sum(line["train/loss"] is None for line in lines) == 1

    checkpoint = torch.load(run_folder / "last.pt", weights_only=True)
    assert all(value.isfinite().all() for value in checkpoint["model"].values())
    steps = {float(state["step"]) for state in checkpoint["optimizer"]["state"].values()}
    assert steps == {len(lines) - 1.0}


def test_too_many_bad_steps_stop_the_run(poisoned, tmp_path, run_prs_med):
    poison(poisoned, 999)
    run_folder = tmp_path / "run"
    error = one_line(run_prs_med(poisoned, run_folder, [*FLAGS, "--max_bad_steps", "3"]))
    assert error.startswith("error: 3 steps in a row had a non-finite loss or gradient")

    # the third is the error
    assert len(records(run_folder)) == 2


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stuck", "dead"])
def test_a_stuck_or_dead_rank_ends_the_job(prs_med_data, tmp_path, number):
    """Within the timeout, not never (torchrun gives a stuck one 30 s to answer SIGTERM); no process is left."""
    run_folder = tmp_path / "run"
    command = [*torchrun(2), PRS_MED, "--data_root", str(prs_med_data), *FLAGS, "--num_epochs", "500"]
    command += ["--checkpoint_dir", str(run_folder), "--dist_timeout", "5"]
    launcher = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (run_folder / "metrics.jsonl").exists():
        assert launcher.poll() is None
        time.sleep(0.1)
    time.sleep(1)

    # the last worker gets the signal
    everyone = launcher.children(recursive=True)
    workers = [process for process in everyone if "train_prs_med.py" in " ".join(process.cmdline())]
    workers[-1].send_signal(number)
    begun = time.time()
    assert launcher.wait(timeout=60) != 0
    print(f"{number.name}: the job ended after {time.time() - begun:.1f} s")
    _, alive = psutil.wait_procs(everyone, timeout=5)
    assert not alive


# One step of 32 images, where the address space is limited: a real allocation failure.
LARGE_BATCH = ["--max_new_tokens", "2", "--max_steps", "1", "--batch_size", "32"]


def test_out_of_memory(prs_med_data, tmp_path, run_prs_med):
    """One message with the values to try."""
    flags = [*LARGE_BATCH, "--image_size", "512"]
    error = one_line(run_prs_med(prs_med_data, tmp_path / "run", flags, address_space=1_500_000_000))
    assert "out of memory at --batch_size 32; try --batch_size 16 --gradient_accumulation_steps 2" in error
    assert "--auto_batch" in error


def test_auto_batch(prs_med_data, tmp_path, run_prs_med):
    """Halves until it fits; the effective batch stays."""
    run_folder = tmp_path / "run"
    flags = [*LARGE_BATCH, "--image_size", "192", "--auto_batch"]
    done = ended_well(run_prs_med(prs_med_data, run_folder, flags, address_space=700_000_000))
    sizes = re.findall(r"going on with --batch_size (\d+) --gradient_accumulation_steps (\d+)", done.stdout)
    assert sizes
    assert all(int(batch) * int(accumulation) == 32 for batch, accumulation in sizes)
    assert json.loads((run_folder / "summary.json").read_text())["effective_batch_size"] == 32


def test_two_runs_in_one_folder(prs_med_data, tmp_path):
    """The second waits for the first, then says why it does not start."""
    lock = checkpoint_utils.lock_run_folder(tmp_path / "run", False)
    with pytest.raises(InputError, match="another run is writing here"):
        checkpoint_utils.lock_run_folder(tmp_path / "run", False, wait=0.3)
    del lock
    assert checkpoint_utils.lock_run_folder(tmp_path / "run", False, wait=0.3)


class Killed(BaseException):
    """In place of a kill: nothing catches it but the test."""


def save(run_folder: Path, step: int) -> None:
    """Save a checkpoint whose values are its step, as the best one."""
    checkpoint = {"format": "test", "value": torch.full((1000,), float(step))}
    checkpoint_utils.save_checkpoint(run_folder, checkpoint, step, keep_last=2)
    checkpoint_utils.mark_best(run_folder, step)


def kill_before(operation: int, patch: pytest.MonkeyPatch) -> None:
    """From this file operation on, counted from 0, none is carried out."""
    made = 0

    def guarded(real):
        def call(*args, **kwargs):
            nonlocal made
            if made >= operation:
                raise Killed
            made += 1
            return real(*args, **kwargs)

        return call

    for name in ("replace", "link", "fsync", "unlink"):
        patch.setattr(os, name, guarded(getattr(os, name)))


def test_a_kill_between_any_two_writes_of_a_save(tmp_path, monkeypatch):
    """Stop a save before each file operation it makes: the newest checkpoint that resume finds is always whole."""
    for operation in itertools.count():
        run_folder = tmp_path / str(operation)
        run_folder.mkdir()
        for step in (1, 2, 3):
            save(run_folder, step)

        finished = False
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            kill_before(operation, patch)
            save(run_folder, 4)
            finished = True

        newest = checkpoint_utils.load_checkpoint("auto", run_folder, "test")
        assert newest["step"] in (3, 4)
        assert torch.equal(newest["value"], torch.full((1000,), float(newest["step"])))
        best = checkpoint_utils.load_checkpoint(str(run_folder / "best.pt"), run_folder, "test")
        assert best["step"] in (3, 4)
        if finished:
            break
    print(f"stopped before each of {operation} file operations of a save")
    assert operation > 8


@pytest.mark.soak
def test_thirty_runs_in_a_row(prs_med_data, tmp_path):
    """TRAPS 1: no abnormal exit of a 2-process run."""
    for i in range(30):
        command = [*torchrun(2), PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", tmp_path / str(i), *FLAGS]
        done = subprocess.run([*command, "--max_steps", "1"], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print("30 of 30 runs ended with code 0")


def test_an_interrupt_before_the_first_step():
    """Ctrl-C while data or models are read: exit code 130 and one line."""
    # a shell's & would have the signal ignored
    code = "import signal; from old import cli_utils\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "cli_utils.run_main(lambda _: signal.raise_signal(signal.SIGINT), None)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "interrupted\n"
