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
from conftest import PRS_MED, ROOT, at_step, forked, losses, train

# dropout on: the random state of every rank must come back too
FLAGS = ["--batch_size", "3", "--num_epochs", "4", "--save_every", "2", "--log_every", "3", "--max_new_tokens", "3"]
FLAGS += ["--learning_rate", "1e-3", "--gradient_accumulation_steps", "2", "--resume_from", "auto"]
STEPS = 12


@pytest.fixture(scope="module")
def whole(data, zygote, tmp_path_factory):
    """The uninterrupted 2-process run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    forked(zygote, data, out, 2, *FLAGS)
    return out


def words(data: Path, out: Path, *flags: str) -> list:
    return [PRS_MED, "--data_root", data, "--checkpoint_dir", out, *FLAGS, *flags]


def test_kill_and_resume(data, zygote, whole, tmp_path):
    """One run: a worker killed, SIGTERM (which loses no step), the newest checkpoint damaged."""
    out = tmp_path / "run"
    assert zygote(*words(data, out), ranks=2, interrupt=at_step(out, 4, "worker", delay=0.05)).code != 0
    assert list(out.glob("step_*.pt"))
    stopped = zygote(*words(data, out), ranks=2, interrupt=at_step(out, 8, "all", signal.SIGTERM))
    assert stopped.code == 143
    saved = int(stopped.stdout.split("signal: saved at step ")[-1].split(";")[0])
    newest = sorted(out.glob("step_*.pt"))[-1]
    assert newest.name == f"step_{saved:08d}.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1  # torch.load would not notice
    newest.write_bytes(content)  # and so last.pt, its other name
    done = forked(zygote, data, out, 2, *FLAGS)
    assert f"{newest} is damaged" in done.stderr
    assert f"(step {saved})" not in done.stdout
    assert losses(out) == losses(whole)
    assert json.loads((out / "summary.json").read_text())["steps"] == STEPS
    weights = [torch.load(folder / "last.pt", weights_only=True)["model"] for folder in (out, whole)]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


def test_killed_while_a_checkpoint_is_written(data, zygote, whole, tmp_path):
    """The rank that writes dies in the middle of it, after another step of both; resumed, losses to the bit."""
    out = tmp_path / "run"
    assert zygote(ROOT / "tests" / "kill_in_save.py", 4, *words(data, out), ranks=2).code < 0
    assert (out / ".step_00000004.pt.tmp").exists()
    assert "step_00000003.pt (step 3)" in forked(zygote, data, out, 2, *FLAGS).stdout
    assert losses(out) == losses(whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_exit_code_and_no_lost_step_in_one_process(data, tmp_path, zygote, number, code):
    """SIGTERM: 143; SIGINT: 130; the checkpoint is of the very step reached."""
    out = tmp_path / str(code)
    flags = words(data, out, "--save_every", "1", "--num_epochs", "200", "--log_every", "1")
    assert zygote(*flags, interrupt=at_step(out, 2, "all", number)).code == code
    logged = [record["step"] for record in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())]
    assert torch.load(out / "last.pt", weights_only=True)["step"] == logged[-1]


def test_checkpoints_of_a_run(whole):
    """Plain names, hard links, a manifest that sha256sum accepts, retention, no pickled objects."""
    names = sorted(path.name for path in whole.glob("*.pt"))
    assert names == ["best.pt", "last.pt", "step_00000010.pt", "step_00000012.pt"]
    assert os.path.samefile(whole / "last.pt", whole / "step_00000012.pt")
    subprocess.run(["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=whole, check=True)
    contents = torch.load(whole / "last.pt", weights_only=True)
    assert len(contents["rng"]) == 2
    assert not any("module." in name.split("vlm.")[0] or "_orig_mod" in name for name in contents["model"])
    assert not any("vlm" in name and "lora_" not in name for name in contents["model"])  # the frozen base is left out
    from safetensors.torch import load_file

    assert load_file(whole / "model.safetensors").keys() == contents["model"].keys()
    assert not list(whole.glob(".*.tmp"))


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill-9", "SIGTERM"])
def test_twenty_kills(data, whole, tmp_path, number):
    """20 kills at random moments of 2-process runs: of one worker, of all, of the launcher; each resumed to the end."""
    chance, kills = random.Random(int(number)), 0
    while kills < (20 if number == signal.SIGKILL else 6):
        out = tmp_path / f"run{kills}"
        who = ("worker", "rank0", "all", "launcher")[kills % 4]
        step, delay = chance.randrange(0, STEPS), chance.uniform(0, 0.6)
        interrupt(words(data, out), out, who, step, delay + (5 if step == 0 else 0), number)
        reached = sorted(out.glob("step_*.pt"))
        train(data, out, 2, *FLAGS)
        same = losses(out) == losses(whole)
        found = reached[-1].name if reached else "no checkpoint"
        print(f"{number} of {who} after step {step} + {delay:.2f} s, {found}: same {same}")
        assert same
        shutil.rmtree(out)
        kills += 1
