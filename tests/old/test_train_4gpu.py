"""train_4gpu.sh and train_4gpu.bat: one command line, exactly the same from both (the .bat under wine)."""

import os
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT

wine = pytest.mark.skipif(shutil.which("wine") is None, reason="wine is not installed (.ci/run installs it)")
ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
# wine's services keep a pipe open for 3 s after the program has ended
SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """A wine of its own, started once."""
    folder = tmp_path_factory.mktemp("wine") / "prefix"
    environment = os.environ | {"WINEPREFIX": str(folder), "WINEDEBUG": "-all"}
    subprocess.run(["wine", "cmd", "/c", "exit"], env=environment, timeout=120, **SILENT)
    return folder


@pytest.fixture
def stubs(tmp_path) -> Path:
    """Commands that write what they were called with, and end with code 7; a machine with 4 GPUs."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    for name in ("accelerate", "torchrun"):
        shell = f'#!/usr/bin/env bash\nprintf \'%s\\n\' {name} "$@" >"$STUB_OUT"\nenv >"$STUB_OUT.env"\nexit 7\n'
        (folder / name).write_text(shell)
        (folder / name).chmod(0o755)

        # cmd's own reading of a word would lose = and , so the whole line is kept
        bat = f"@echo off\r\n>stub.out echo {name} %*\r\nset >stub.env\r\nexit /b 7\r\n"
        (folder / f"{name}.bat").write_bytes(bat.encode())

    # the driver, for both
    gpus = [f"GPU {k}: A100 (UUID: GPU-{k})" for k in range(4)]
    (folder / "nvidia-smi").write_text("#!/usr/bin/env bash\n" + "\n".join(f"echo '{line}'" for line in gpus) + "\n")
    (folder / "nvidia-smi").chmod(0o755)
    bat = "@echo off\r\n" + "\r\n".join(f"echo {line}" for line in gpus) + "\r\n"
    (folder / "nvidia-smi.bat").write_bytes(bat.encode())
    return folder


def words_of(line: str) -> list[str]:
    """How a Windows program splits its command line: at spaces outside quotes."""
    words = []
    word = ""
    inside = quoted_word = False
    for letter in line + " ":
        if letter == '"':
            inside = not inside
            quoted_word = True
        elif letter == " " and not inside:
            if word or quoted_word:
                words.append(word)
            word = ""
            quoted_word = False
        else:
            word += letter
    return words


def variables_of(text: str) -> dict[str, str]:
    """The variables that `env` or `set` has listed."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def windows_path(path: Path) -> str:
    """How a program under wine names a file of this machine."""
    return "Z:" + str(path).replace("/", "\\")


BAT = windows_path(ROOT / "train_4gpu.bat")


def base_environment() -> dict[str, str]:
    """This process's variables, without those that the launchers set."""
    return {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}


def wine_environment(prefix: Path, stubs: Path | None = None) -> dict[str, str]:
    """Variables of a program under wine that finds the stubs first."""
    environment = base_environment() | {"WINEPREFIX": str(prefix), "WINEDEBUG": "-all"}
    return environment | ({"WINEPATH": windows_path(stubs)} if stubs else {})


def run_bat(lines: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run the lines of a .bat file by wine, in one start."""
    (folder / "train_accelerate.py").touch()
    (folder / "all.bat").write_bytes("\r\n".join(["@echo off", *lines, ""]).encode())
    subprocess.run(["wine", "cmd", "/c", "all.bat"], cwd=folder, env=environment, timeout=300, **SILENT)


class Launched(NamedTuple):
    """A launcher that has ended, and what it started; argv is None where it started nothing."""

    code: int
    stdout: str
    stderr: str
    argv: list[str] | None
    environment: dict[str, str]


def by_shell(stubs: Path, folder: Path, words: list[str], **variables: str) -> Launched:
    """Run train_4gpu.sh with these arguments and environment variables."""
    out = folder / "shell.out"
    environment = base_environment() | {"PATH": f"{stubs}:{os.environ['PATH']}", "STUB_OUT": str(out)}
    (folder / "train_accelerate.py").touch()
    command = ["bash", str(ROOT / "train_4gpu.sh"), *words]
    done = subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, text=True)

    if not out.exists():
        return Launched(done.returncode, done.stdout, done.stderr, None, {})
    argv = out.read_text().splitlines()
    seen = variables_of(Path(f"{out}.env").read_text())
    out.unlink()
    return Launched(done.returncode, done.stdout, done.stderr, argv, seen)


def quoted(word: str) -> str:
    """A word as one types it for cmd."""
    return f'"{word}"' if not word or any(letter in word for letter in " &()") else word


def by_bat(folder: Path, lines: list[list[str]], environment: dict[str, str], start: str = "cmd /c") -> list[Launched]:
    """Run train_4gpu.bat with several command lines, as typed, in one start of wine.

    start: `call` is quicker, but wine then loses the exit code.
    """
    script = []
    for number, words in enumerate(lines):
        script.append(f"{start} {BAT} {' '.join(map(quoted, words))} >said{number} 2>&1")
        script.append(f">code{number} echo %errorlevel%")
        script.append(f"if exist stub.out ren stub.out stub.out{number}")
        script.append(f"if exist stub.env ren stub.env stub.env{number}")
    run_bat(script, folder, environment)

    # what each has left
    launched = []
    for number in range(len(lines)):
        code = int((folder / f"code{number}").read_text())
        said = (folder / f"said{number}").read_text()
        argv = None
        seen = {}
        if (folder / f"stub.out{number}").exists():
            argv = words_of((folder / f"stub.out{number}").read_text().strip())
            seen = variables_of((folder / f"stub.env{number}").read_text())
        launched.append(Launched(code, said, said, argv, seen))
    return launched


START = ["accelerate", "launch", "--num_processes=4", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
START += ["--main_process_port=0", "--multi_gpu", "train_accelerate.py"]
ONE_GPU = ["accelerate", "launch", "--num_processes=1", "--num_machines=1", "--mixed_precision=fp16"]
ONE_GPU += ["--dynamo_backend=no", "--main_process_port=0", "train_accelerate.py"]

TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node=4", "train_accelerate.py"]
GUIDE = ["--config", "configs/multi_view_config.json"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*GUIDE, "--method", "accelerate", "--wandb"], [*START, *GUIDE, "--wandb"]),
        ([*GUIDE, "--method", "torchrun", "--wandb"], [*TORCHRUN, *GUIDE, "--wandb"]),
        (["--num_gpus", "1", "--mixed_precision", "fp16"], [*ONE_GPU, "--mixed_precision", "fp16"]),
    ],
)
def test_exact_command(stubs, tmp_path, words, expected):
    launched = by_shell(stubs, tmp_path, words)
    assert launched.argv == expected
    assert int(launched.environment["OMP_NUM_THREADS"]) >= 1
    assert f"by {expected[0]}" in launched.stdout

    # the training's own exit code
    assert launched.code == 7


def combinations(count: int, seed: int) -> list[list[str]]:
    """Flag combinations, the same each time."""
    chance = random.Random(seed)
    choices = [
        [[], ["--config", "configs/multi_view_config.json"], ["--config=my configs/a=b.json"]],
        [[], ["--method", "accelerate"], ["--method", "torchrun"], ["--method=torchrun"]],
        [[], ["--num_gpus", "2"], ["--num_gpus=1"], ["--num_gpus", "3"], ["--cpu", "--num_gpus", "12"]],
        [[], ["--mixed_precision", "bf16"], ["--mixed_precision=fp16"], ["--mixed_precision", "auto"]],
        [[], ["--checkpoint_dir", "runs/lr=1e-4"], ["--checkpoint_dir", "D:\\my runs\\a  b"]],
        [[], ["--wandb"], ["--wandb", "--wandb_project", "R & D (x)"], ["--wandb_project="]],
        [[], ["--learning_rate=1e-4", "--stage", "2"], ["--split_files", "a b", "c", "d;e,f"], ["--wandb_project", ""]],
    ]

    chosen = []
    while len(chosen) < count:
        parts = [chance.choice(options) for options in choices]
        chance.shuffle(parts)
        words = [word for part in parts for word in part]
        if words not in chosen:
            chosen.append(words)
    return chosen


# The first are the fewest with each choice in one of them: wine takes a second for a line.
@wine
@pytest.mark.parametrize(("count", "seed"), [(6, 156), pytest.param(20, 3, marks=pytest.mark.soak)])
def test_bat_and_sh_give_the_same_argv(prefix, stubs, tmp_path, count, seed):
    lines = combinations(count, seed)
    launched = by_bat(tmp_path, lines, wine_environment(prefix, stubs), start="call")
    for words, bat in zip(lines, launched, strict=True):
        shell = by_shell(stubs, tmp_path, words)
        assert shell.argv is not None, shell.stderr
        assert shell.code == 7
        assert bat.argv == shell.argv, words
        assert bat.stdout.strip() == shell.stdout.strip()
        assert bat.environment["USE_LIBUV"] == "0"
        for name in ENVIRONMENT:
            assert bat.environment.get(name) == shell.environment.get(name), name


WRONG = [
    (["--method", "slurm"], {}, "--method must be accelerate or torchrun, not 'slurm'"),
    (["--method"], {}, "--method needs a value"),
    (["--num_gpus", "0"], {}, "--num_gpus must be a whole number from 1 to 99, not '0'"),
    (["--num_gpus=two"], {}, "--num_gpus must be a whole number from 1 to 99, not 'two'"),
    (["--num_gpus", "5"], {}, "5 GPUs asked for, 4 found; give --num_gpus with at most that many, or --cpu"),
    ([], {"CUDA_VISIBLE_DEVICES": "0,2"}, "4 GPUs asked for, 2 found"),
    ([], {"CUDA_VISIBLE_DEVICES": "-1"}, "4 GPUs asked for, 0 found"),
]


@pytest.mark.parametrize(("words", "variables", "message"), WRONG)
def test_wrong_flags(stubs, tmp_path, words, variables, message):
    launched = by_shell(stubs, tmp_path, words, **variables)
    assert launched.code == 2
    assert launched.argv is None
    assert launched.stderr.strip().startswith(f"error: {message}")


@wine
@pytest.mark.parametrize("variables", [{}, {"CUDA_VISIBLE_DEVICES": "0,2"}, {"CUDA_VISIBLE_DEVICES": "-1"}])
def test_wrong_flags_of_the_bat(prefix, stubs, tmp_path, variables):
    chosen = [(words, message) for words, other, message in WRONG if other == variables]
    lines = [words for words, _ in chosen]
    launched = by_bat(tmp_path, lines, wine_environment(prefix, stubs) | variables)
    for (words, message), bat in zip(chosen, launched, strict=True):
        assert bat.code == 2, words
        assert bat.argv is None, words
        assert bat.stdout.strip().startswith(f"error: {message}")


DRY_RUN = ["--dry_run", "--config", "a b.json"]
DRY_RUN_LINE = f'4 GPUs by accelerate: {" ".join(START)} --config "a b.json"'


def test_dry_run_and_help(stubs, tmp_path):
    dry = by_shell(stubs, tmp_path, DRY_RUN)
    assert dry.code == 0
    assert dry.argv is None
    assert dry.stdout.strip() == DRY_RUN_LINE

    usage = by_shell(stubs, tmp_path, ["--help"])
    assert usage.code == 0
    assert usage.argv is None
    assert "--num_gpus N" in usage.stdout


@wine
def test_dry_run_and_help_of_the_bat(prefix, stubs, tmp_path):
    dry, usage = by_bat(tmp_path, [DRY_RUN, ["--help"]], wine_environment(prefix, stubs))
    assert dry.code == 0
    assert dry.argv is None
    assert dry.stdout.strip() == DRY_RUN_LINE

    assert usage.code == 0
    assert usage.argv is None
    shell = by_shell(stubs, tmp_path, ["--help"])
    assert usage.stdout.replace("train_4gpu.bat", "bash train_4gpu.sh").splitlines() == shell.stdout.splitlines()


# Each would leave the file `executed` if cmd read on behind the & or |.
COMMANDS = ["4&echo x>executed&rem ", "4|echo x>executed|rem ", "4)&echo x>executed&("]
NOT_NUMBERS = ["4;x", ";x", "08", "0x4", "4+4", "-4", "444444444444"]
EVIL = '4"&echo x>executed&"'


class Hostile(NamedTuple):
    """A command line and a variable, of which one has a hostile value; name: what is refused."""

    words: str
    name: str
    value: str = ""


def hostile_lines() -> list[Hostile]:
    """Hostile arguments, then hostile variables."""
    lines = [Hostile(f'--num_gpus "{value}"', "--num_gpus") for value in COMMANDS + NOT_NUMBERS]
    lines += [Hostile(f'--method "{value}"', "--method") for value in COMMANDS]
    for name in ("NUMBER_OF_PROCESSORS", "OMP_NUM_THREADS"):
        lines += [Hostile("", name, value) for value in [*COMMANDS, *NOT_NUMBERS, EVIL, "!EVIL!"]]
    lines += [Hostile("", "CUDA_VISIBLE_DEVICES", f"0,{value}") for value in [*COMMANDS, EVIL, "!EVIL!"]]
    lines.append(Hostile("--num_gpus 1", "errorlevel", "0&echo x>executed"))
    lines.append(Hostile("--num_gpus 1", "before", EVIL))
    return lines


@wine
def test_bat_executes_no_value(prefix, stubs, tmp_path):
    """Hostile arguments, then hostile variables, which `set /p` reads from files as they are."""
    lines = hostile_lines()
    script = [f"set EVIL={EVIL.replace('&', '^&')}"]
    for number, line in enumerate(lines):
        (tmp_path / f"value{number}").write_bytes(f"{line.value}\r\n".encode())
        script.append("setlocal")
        if line.value:
            script.append(f"set /p {line.name}=<value{number}")
        script.append(f"call {BAT} {line.words} >said{number} 2>&1")
        script.append("endlocal")
        script.append(f"if exist stub.out ren stub.out started{number}")
        script.append(f"if exist executed ren executed bad{number}")
    run_bat(script, tmp_path, wine_environment(prefix, stubs))

    for number, line in enumerate(lines):
        said = (tmp_path / f"said{number}").read_text()
        assert not (tmp_path / f"bad{number}").exists(), (line, said)
        if line.name.startswith(("--", "NUMBER", "OMP")):
            assert not (tmp_path / f"started{number}").exists(), (line, said)
            assert said.startswith(f"error: {line.name} must be "), (line, said)
            assert said.count("\n") == 1, (line, said)


@wine
def test_bat_called_directly(prefix, stubs, tmp_path):
    """The exit code; the script beside the launcher, in a folder with a space."""
    folder = tmp_path / "my folder"
    folder.mkdir()
    shutil.copy(ROOT / "train_4gpu.bat", folder)
    (tmp_path / "go.bat").write_bytes(b'@"my folder\\train_4gpu.bat" --config "a  b=c.json"\r\n')
    command = ["wine", "cmd", "/c", "go.bat"]
    environment = wine_environment(prefix, stubs)
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, **SILENT)
    argv = words_of((tmp_path / "stub.out").read_text().strip())
    assert done.returncode == 7
    assert argv[-3].endswith("my folder\\train_accelerate.py")
    assert argv[-2:] == ["--config", "a  b=c.json"]


@wine
@pytest.mark.parametrize("place", ["Scripts", "."], ids=["venv", "conda"])
def test_bat_runs_the_launcher_by_its_own_python(prefix, tmp_path, place):
    """Where there is an accelerate.exe: its environment's python, beside it or a folder above, runs launch_utils.py."""
    scripts = tmp_path / "env" / "Scripts"
    scripts.mkdir(parents=True)
    (scripts / "accelerate.exe").touch()
    (tmp_path / "train_accelerate.py").touch()

    # a python that writes its arguments; wine starts a program of the system's own, too
    python = tmp_path / "env" / place / "python.exe"
    out = tmp_path / "argv"
    python.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{out}.part && mv {out}.part {out}\n")
    python.chmod(0o755)

    command = ["wine", "cmd", "/c", BAT, "--cpu", "--config", "a=b.json"]
    environment = wine_environment(prefix, scripts)
    subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, **SILENT)
    deadline = time.time() + 20
    while not out.exists() and time.time() < deadline:
        time.sleep(0.05)
    argv = out.read_text().splitlines()
    assert argv[0].endswith("\\old\\launch_utils.py")
    assert argv[1:] == [*START, "--config", "a=b.json"]


def test_from_another_folder(stubs, tmp_path):
    """Without the script in the working folder, the one beside the launcher."""
    (tmp_path / "elsewhere").mkdir()
    environment = os.environ | {"PATH": f"{stubs}:{os.environ['PATH']}", "STUB_OUT": str(tmp_path / "out")}
    command = ["bash", str(ROOT / "train_4gpu.sh"), "--cpu", "--num_gpus", "2"]
    subprocess.run(command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True)
    assert str(ROOT / "train_accelerate.py") in (tmp_path / "out").read_text().splitlines()
