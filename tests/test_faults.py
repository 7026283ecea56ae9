"""DESIGN "what happens when things go wrong", made to go wrong for real."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import PRS_MED, ROOT, forked, losses, records, torchrun, train

FLAGS = ["--batch_size", "4", "--max_new_tokens", "2", "--log_every", "1"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB, which is about two checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.soak
def test_full_disk(data, small_disk, tmp_path, zygote):
    """The save that does not fit ends the run with one line; the checkpoint before is intact and can be resumed."""
    out = small_disk / "run"
    flags = [*FLAGS, "--save_every", "1", "--keep_last", "99", "--resume_from", "auto", "--num_epochs", "1"]
    done = zygote(PRS_MED, "--data_root", data, "--checkpoint_dir", out, *flags)
    assert done.code == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(
        r"step_\d+\.pt: not written \(No space left on device\), the checkpoint before is intact", errors[0]
    )
    assert "Traceback" not in done.stderr
    subprocess.run(["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=out, check=True)
    assert not list(out.glob(".*.tmp"))
    shutil.copytree(out, tmp_path / "roomy")
    done = zygote(PRS_MED, "--data_root", data, "--checkpoint_dir", tmp_path / "roomy", *flags)
    assert done.code == 0, done.stderr
    assert "loaded " in done.stdout
    reference = tmp_path / "whole"
    assert zygote(PRS_MED, "--data_root", data, "--checkpoint_dir", reference, *flags).code == 0
    assert losses(tmp_path / "roomy") == losses(reference)


@pytest.fixture
def poisoned(data, tmp_path):
    """The data with a word in one training question whose embedding is NaN in the frozen model."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    root = tmp_path / "poisoned"
    shutil.copytree(data, root)
    tokenizer = AutoTokenizer.from_pretrained(root / "llava_tiny")
    token = tokenizer("~", add_special_tokens=False)["input_ids"]
    path = root / "llava_tiny" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    weights[name][token] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    return root


def poison(root, rows: int) -> None:
    left = rows
    for table in sorted((root / "annotations").glob("*.csv")):
        lines = table.read_text().splitlines()
        for i, line in enumerate(lines):
            if ",train," in line and left:
                lines[i] = re.sub(r"(located|picture|find)", r"\1 ~", line)
                lines[i] = line.replace("?,", " ~?,").replace("it is.,", "it is ~.,")
                left -= 1
        table.write_text("\n".join(lines) + "\n")


def test_a_non_finite_step_is_skipped_by_all_ranks(poisoned, zygote, tmp_path):
    """One bad sample on one of 2 ranks: that step is skipped on both, counted, and the run ends well."""
    poison(poisoned, 1)
    out = tmp_path / "run"
    forked(zygote, poisoned, out, 2, *FLAGS, "--num_epochs", "1")
    lines = [record for record in records(out) if "train/loss" in record]
    assert [line["train/skipped"] for line in lines].count(1.0) == 1
    assert sum(line["train/loss"] is None for line in lines) == 1
    weights = torch.load(out / "last.pt", weights_only=True)
    assert all(value.isfinite().all() for value in weights["model"].values())
    assert {float(state["step"]) for state in weights["optimizer"]["state"].values()} == {len(lines) - 1.0}


def test_too_many_bad_steps_stop_the_run(poisoned, tmp_path, zygote):
    poison(poisoned, 999)
    out = tmp_path / "run"
    done = zygote(PRS_MED, "--data_root", poisoned, "--checkpoint_dir", out, *FLAGS, "--max_bad_steps", "3")
    assert done.code == 1
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(errors) == 1
    assert errors[0].startswith("error: 3 steps in a row had a non-finite loss or gradient")
    assert len(records(out)) == 2  # the third is the error


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stuck", "dead"])
def test_a_stuck_or_dead_rank_ends_the_job(data, tmp_path, number):
    """Within the timeout, not never (torchrun gives a stuck one 30 s to answer SIGTERM); no process is left."""
    command = [*torchrun(2), PRS_MED, "--data_root", str(data), *FLAGS, "--num_epochs", "500"]
    command += ["--checkpoint_dir", str(tmp_path / "run"), "--dist_timeout", "5"]
    launcher = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert launcher.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    everyone = launcher.children(recursive=True)
    [p for p in everyone if "train_prs_med.py" in " ".join(p.cmdline())][-1].send_signal(number)
    begun = time.time()
    assert launcher.wait(timeout=60) != 0
    print(f"{number.name}: the job ended after {time.time() - begun:.1f} s")
    _, alive = psutil.wait_procs(everyone, timeout=5)
    assert not alive


def test_out_of_memory(data, tmp_path, zygote):
    """A real allocation failure (limited address space): one message with the values to try."""
    flags = [
        "--data_root",
        data,
        "--max_new_tokens",
        "2",
        "--max_steps",
        "1",
        "--image_size",
        "512",
        "--batch_size",
        "32",
    ]
    done = zygote(PRS_MED, *flags, "--checkpoint_dir", tmp_path / "a", address_space=1_500_000_000)
    assert done.code == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(errors) == 1
    assert "out of memory at --batch_size 32; try --batch_size 16 --gradient_accumulation_steps 2" in errors[0]
    assert "--auto_batch" in errors[0]


def test_auto_batch(data, tmp_path, zygote):
    """Halves until it fits; the effective batch stays."""
    flags = [
        "--data_root",
        data,
        "--max_new_tokens",
        "2",
        "--max_steps",
        "1",
        "--image_size",
        "192",
        "--batch_size",
        "32",
    ]
    out = tmp_path / "run"
    done = zygote(PRS_MED, *flags, "--auto_batch", "--checkpoint_dir", out, address_space=700_000_000)
    assert done.code == 0, done.stderr[-2000:]
    sizes = re.findall(r"going on with --batch_size (\d+) --gradient_accumulation_steps (\d+)", done.stdout)
    assert sizes
    assert all(int(batch) * int(accumulation) == 32 for batch, accumulation in sizes)
    assert json.loads((out / "summary.json").read_text())["effective_batch_size"] == 32


def test_two_runs_in_one_folder(data, tmp_path):
    """The second waits for the first, then says why it does not start."""
    import checkpoint_utils
    from cli_utils import InputError

    lock = checkpoint_utils.lock_run_folder(tmp_path / "run", False)
    with pytest.raises(InputError, match="another run is writing here"):
        checkpoint_utils.lock_run_folder(tmp_path / "run", False, wait=0.3)
    del lock
    assert checkpoint_utils.lock_run_folder(tmp_path / "run", False, wait=0.3)


def test_a_kill_between_any_two_writes_of_a_save(tmp_path, monkeypatch):
    """Stop a save before each file operation it makes: the newest checkpoint that resume finds is always whole."""
    import os

    import checkpoint_utils

    def save(step: int) -> None:
        contents = {"format": "test", "value": torch.full((1000,), float(step))}
        checkpoint_utils.save_checkpoint(folder, contents, step, keep_last=2)
        checkpoint_utils.mark_best(folder, step)

    class Killed(BaseException):
        pass

    operations = 0
    while True:
        folder = tmp_path / str(operations)
        folder.mkdir()
        for step in (1, 2, 3):
            save(step)
        countdown = operations

        def stop_at_zero(real):
            def call(*args, **kwargs):
                nonlocal countdown
                countdown -= 1
                if countdown < 0:
                    raise Killed
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("replace", "link", "fsync", "unlink"):
                patch.setattr(os, name, stop_at_zero(getattr(os, name)))
            try:
                save(4)
                finished = True
            except Killed:
                finished = False
        found = checkpoint_utils.load_checkpoint("auto", folder, "test")
        assert found["step"] in (3, 4)
        assert torch.equal(found["value"], torch.full((1000,), float(found["step"])))
        assert checkpoint_utils.load_checkpoint(str(folder / "best.pt"), folder, "test")["step"] in (3, 4)
        if finished:
            break
        operations += 1
    print(f"stopped before each of {operations} file operations of a save")
    assert operations > 8


@pytest.mark.soak
def test_thirty_runs_in_a_row(data, tmp_path):
    """TRAPS 1: no abnormal exit of a 2-process run."""
    for i in range(30):
        train(data, tmp_path / str(i), 2, *FLAGS, "--max_steps", "1")
    print("30 of 30 runs ended with code 0")


def test_an_interrupt_before_the_first_step():
    """Ctrl-C while data or models are read: exit code 130 and one line."""
    code = "import signal, cli_utils\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "cli_utils.run_main(lambda _: signal.raise_signal(signal.SIGINT), None)"  # a shell's & has it ignored
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
