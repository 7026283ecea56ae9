"""DESIGN "the same answer" 5: killed anywhere and resumed, the loss sequence is the uninterrupted one, bit for bit."""

import json
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from background import interrupt
from conftest import PRS_MED, ROOT, at_step, losses, train
from safetensors.torch import load_file

# With dropout: the random state of every rank must come back too.
FLAGS = ["--batch_size", "3", "--num_epochs", "4", "--save_every", "2", "--log_every", "3", "--max_new_tokens", "3"]
FLAGS += ["--learning_rate", "1e-3", "--gradient_accumulation_steps", "2", "--resume_from", "auto"]
STEPS = 12


def command(data: Path, run_folder: Path) -> list:
    """The script and the flags of a run."""
    return [PRS_MED, "--data_root", data, "--checkpoint_dir", run_folder, *FLAGS]


@pytest.fixture(scope="module")
def run_script(zygote):
    """run_script(command, **options): run a script and its flags by the zygote, whatever becomes of it."""

    def run(command: list, **options):
        return zygote(*command, **options)

    return run


def ended_well(done):
    """Assert that a run ended with exit code 0, and hand it on."""
    assert done.code == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def read_metrics(run_folder: Path) -> list[dict]:
    """Every line of metrics.jsonl."""
    text = (run_folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def flip_a_bit(path: Path) -> None:
    """Damage a file in a way that torch.load would not notice; its hard links are damaged as well."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def uninterrupted(prs_med_data, run_script, tmp_path_factory) -> Path:
    """The folder of an uninterrupted run of two processes."""
    run_folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    ended_well(run_script(command(prs_med_data, run_folder), ranks=2))
    return run_folder


def test_kill_and_resume(prs_med_data, run_script, uninterrupted, tmp_path):
    """One run: a worker killed, SIGTERM (which loses no step), the newest checkpoint damaged."""
    run_folder = tmp_path / "run"
    words = command(prs_med_data, run_folder)

    # a worker is killed
    killed = run_script(words, ranks=2, interrupt=at_step(run_folder, 4, "worker", delay=0.05))
    assert killed.code != 0
    assert list(run_folder.glob("step_*.pt"))

    # all are told to stop, and save the step they have reached
    stopped = run_script(words, ranks=2, interrupt=at_step(run_folder, 8, "all", signal.SIGTERM))
    assert stopped.code == 143
    saved = int(stopped.stdout.split("signal: saved at step ")[-1].split(";")[0])
    newest = sorted(run_folder.glob("step_*.pt"))[-1]
    assert newest.name == f"step_{saved:08d}.pt"

    # that checkpoint is damaged, and so is last.pt, its other name
    flip_a_bit(newest)
    done = ended_well(run_script(words, ranks=2))
    assert f"{newest} is damaged" in done.stderr
    assert f"(step {saved})" not in done.stdout

    # the same losses and weights
    assert losses(run_folder) == losses(uninterrupted)
    assert json.loads((run_folder / "summary.json").read_text())["steps"] == STEPS
    weights = torch.load(run_folder / "last.pt", weights_only=True)["model"]
    expected = torch.load(uninterrupted / "last.pt", weights_only=True)["model"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_killed_while_a_checkpoint_is_written(prs_med_data, run_script, uninterrupted, tmp_path):
    """The rank that writes dies in the middle of it, after another step of both; resumed, losses to the bit."""
    run_folder = tmp_path / "run"
    words = command(prs_med_data, run_folder)
    assert run_script([ROOT / "tests/old/kill_in_save.py", 4, *words], ranks=2).code < 0
    assert (run_folder / ".step_00000004.pt.tmp").exists()

    done = ended_well(run_script(words, ranks=2))
    assert "step_00000003.pt (step 3)" in done.stdout
    assert losses(run_folder) == losses(uninterrupted)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_exit_code_and_no_lost_step_in_one_process(prs_med_data, tmp_path, run_script, number, code):
    """SIGTERM: 143; SIGINT: 130; the checkpoint is of the very step reached."""
    run_folder = tmp_path / str(code)
    flags = ["--save_every", "1", "--num_epochs", "200", "--log_every", "1"]
    stopped = run_script([*command(prs_med_data, run_folder), *flags], interrupt=at_step(run_folder, 2, "all", number))
    assert stopped.code == code
    last = torch.load(run_folder / "last.pt", weights_only=True)
    assert last["step"] == read_metrics(run_folder)[-1]["step"]


def test_checkpoints_of_a_run(uninterrupted):
    """Plain names, hard links, a manifest that sha256sum accepts, retention, no pickled objects."""
    names = sorted(path.name for path in uninterrupted.glob("*.pt"))
    assert names == ["best.pt", "last.pt", "step_00000010.pt", "step_00000012.pt"]
    assert os.path.samefile(uninterrupted / "last.pt", uninterrupted / "step_00000012.pt")
    assert not list(uninterrupted.glob(".*.tmp"))
    subprocess.run(["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=uninterrupted, check=True)

    checkpoint = torch.load(uninterrupted / "last.pt", weights_only=True)
    assert len(checkpoint["rng"]) == 2
    assert not any("module." in name.split("vlm.")[0] or "_orig_mod" in name for name in checkpoint["model"])

    # the frozen base is left out
    assert not any("vlm" in name and "lora_" not in name for name in checkpoint["model"])
    assert load_file(uninterrupted / "model.safetensors").keys() == checkpoint["model"].keys()


@pytest.mark.soak
@pytest.mark.parametrize(("number", "kills"), [(signal.SIGKILL, 20), (signal.SIGTERM, 6)], ids=["kill-9", "SIGTERM"])
def test_twenty_kills(prs_med_data, uninterrupted, tmp_path, number, kills):
    """Kills at random moments of 2-process runs: of one worker, of all, of the launcher; each resumed to the end."""
    chance = random.Random(int(number))
    for kill in range(kills):
        # who is killed, and when
        run_folder = tmp_path / f"run{kill}"
        who = ("worker", "rank0", "all", "launcher")[kill % 4]
        step = chance.randrange(0, STEPS)
        delay = chance.uniform(0, 0.6)

        interrupt(command(prs_med_data, run_folder), run_folder, who, step, delay + (5 if step == 0 else 0), number)
        reached = sorted(run_folder.glob("step_*.pt"))
        train(prs_med_data, run_folder, 2, *FLAGS)

        same = losses(run_folder) == losses(uninterrupted)
        newest = reached[-1].name if reached else "no checkpoint"
        print(f"{number} of {who} after step {step} + {delay:.2f} s, {newest}: same {same}")
        assert same
        shutil.rmtree(run_folder)
