"""train_4gpu.sh and train_4gpu.bat (under wine), which start utils/launch_4gpu.py: its command, errors, exit codes."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentError
from pathlib import Path

import pytest
import torch

from utils import launch_4gpu
from utils.launch_4gpu import ROOT

SCRIPT = str(ROOT / "train_accelerate.py")
CONFIG = "--config configs/multi_view_config.json"
ACCELERATE = "accelerate launch --num_processes=4 --num_machines=1 --mixed_precision={} --dynamo_backend=no"
ACCELERATE += " --main_process_port=0 --multi_gpu SCRIPT"
ONE = "accelerate launch --num_processes=1 --num_machines=1 --mixed_precision=no --dynamo_backend=no"
ONE += " --main_process_port=0 SCRIPT"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ACCELERATE.format("no")),
        (f"{CONFIG} --method accelerate --wandb", ACCELERATE.format("no") + f" {CONFIG} --wandb"),
        (f"{CONFIG} --method=torchrun --wandb", f"torchrun --standalone --nproc_per_node=4 SCRIPT {CONFIG} --wandb"),
        ("--mixed_precision fp16 -x", ACCELERATE.format("fp16") + " -x --mixed_precision fp16"),
        # Accelerate has no auto
        ("--mixed_precision=auto", ACCELERATE.format("no") + " --mixed_precision auto"),
        ("--num_gpus 1 --lr=-1 -1", f"{ONE} --lr=-1 -1 --world_size 1"),
        # words of the script stay as they are and where they are
        ("--a 'b  c' --cpu --x='$y;z' --num_gpus=4 * ''", ACCELERATE.format("no") + " --a 'b  c' --x='$y;z' * ''"),
        ("--num {}1 --cp --meth torchrun", ACCELERATE.format("no") + " --num {}1 --cp --meth torchrun"),
    ],
)
def test_command(words, expected):
    args, script_words = launch_4gpu.parse_args(shlex.split(words))
    assert launch_4gpu.build_command(args, script_words) == shlex.split(expected.replace("SCRIPT", SCRIPT))


NOT_NUMBERS = ("0", "100", "08", "-1", "+2", "2.0", "two", "", " 2", "x[$(touch bad)]", "4;touch bad", "٣")


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_wrong_numbers(value, monkeypatch):
    with pytest.raises(ArgumentError, match="--num_gpus: must be a whole number from 1 to 99, not "):
        launch_4gpu.parse_args([f"--num_gpus={value}"])
    if value not in ("", "100"):
        args, _ = launch_4gpu.parse_args(["--cpu"])
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        with pytest.raises(launch_4gpu.InputError, match="OMP_NUM_THREADS must be a whole number from 1 to 99999, not"):
            launch_4gpu.prepare(args)


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    args, _ = launch_4gpu.parse_args([])
    with pytest.raises(launch_4gpu.InputError, match="4 GPUs asked for, 2 found; give --num_gpus"):
        launch_4gpu.prepare(args)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    args, _ = launch_4gpu.parse_args(["--num_gpus", "2"])
    launch_4gpu.prepare(args)
    assert os.environ["OMP_NUM_THREADS"] == "4"


def test_an_error_is_one_line(monkeypatch, capsys):
    for words, line in (
        (["--method"], "error: --method: expected one argument\n"),
        (["--method", "slurm"], "error: --method: invalid choice: 'slurm' (choose from accelerate, torchrun)\n"),
    ):
        monkeypatch.setattr(sys, "argv", ["train_4gpu", *words])
        assert launch_4gpu.main() == 2
        assert capsys.readouterr().err.replace("'accelerate', 'torchrun'", "accelerate, torchrun") == line


# --- how a run ends ---------------------------------------------------------------------------------------------------

# Ends as its first word says, and is quick: it does not import torch.
WORKER = """
import os, signal, sys, time
rank = os.environ.get("RANK", "0")
if sys.argv[1].isdigit():
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, f"saved by {rank}\\n".encode()), sys.exit(143)))
open(sys.argv[2] + rank, "w").close()
time.sleep(60)
"""
LAUNCH = "import sys; from utils import launch_4gpu; sys.exit(launch_4gpu.run(sys.argv[1:]))"
STARTS = {
    "accelerate, 2": (2, f"{ACCELERATE.format('no').replace('=4', '=2')}"),
    "accelerate, 1": (1, ONE),
    "torchrun, 2": (2, "torchrun --standalone --nproc_per_node=2 SCRIPT"),
}


def start(name: str, tmp_path: Path, *words: str) -> subprocess.Popen:
    (tmp_path / "worker.py").write_text(WORKER)
    launcher = STARTS[name][1].replace("SCRIPT", str(tmp_path / "worker.py")).split()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LAUNCH, *launcher, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


@pytest.mark.parametrize("name", STARTS)
def test_the_scripts_own_exit_code(name, tmp_path):
    process = start(name, tmp_path, "2")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in said


@pytest.mark.parametrize("name", STARTS)
def test_sigterm_reaches_the_script(name, tmp_path):
    """It saves, by each process, and its exit code is the launcher's."""
    process = start(name, tmp_path, "waits", str(tmp_path / "ready"))
    count = STARTS[name][0]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready*"))) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert sorted(said.split("\n")) == ["", *(f"saved by {rank}" for rank in range(count))]
    assert "Traceback" not in errors


# --- the two files ----------------------------------------------------------------------------------------------------

WORDS = ["--config", "a  b=c.json", "--x=1,2;3", "--wandb_project", "R & D (x)", "--num_gpus=4&echo x>executed"]


def test_shell_file(tmp_path):
    """All words and the exit code, from any folder; a value is not executed."""
    for name in ("python", "accelerate"):
        (tmp_path / name).write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 7\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [*WORDS, "$(touch executed)", "`touch executed`", ""]
    command = ["bash", str(ROOT / "train_4gpu.sh"), *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 7
    assert done.stdout.splitlines() == [str(ROOT / "utils/launch_4gpu.py"), *words]
    assert not (tmp_path / "executed").exists()


@pytest.mark.skipif(shutil.which("wine") is None, reason="wine is not installed (.ci/run installs it)")
@pytest.mark.parametrize("place", [".venv/Scripts", "bin"])
def test_bat_file(place, tmp_path):
    """The same; its python is that of .venv, or else the first on PATH."""
    folder = tmp_path / "my folder"
    scripts = folder / place
    scripts.mkdir(parents=True)
    shutil.copy(ROOT / "train_4gpu.bat", folder)
    # wine starts a program of the system's own, too
    python = scripts / "python.exe"
    out = tmp_path / "argv"
    python.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{out}.part && mv {out}.part {out}\nexit 7\n")
    python.chmod(0o755)

    typed = " ".join(f'"{word}"' if any(letter in word for letter in " &;") else word for word in WORDS)
    (tmp_path / "go.bat").write_bytes(f'@"my folder\\train_4gpu.bat" {typed}\r\n'.encode())
    environment = os.environ | {"WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"}
    environment |= {"WINEPATH": "Z:" + str(scripts).replace("/", "\\")}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["wine", "cmd", "/c", "go.bat"], cwd=tmp_path, env=environment, timeout=180, **silent)
    deadline = time.monotonic() + 20
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    argv = out.read_text().splitlines()
    assert argv[0].endswith("my folder\\utils\\launch_4gpu.py")
    assert argv[1:] == WORDS
    assert not (tmp_path / "executed").exists()
