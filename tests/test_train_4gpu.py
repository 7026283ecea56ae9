"""train_4gpu.sh and train_4gpu.bat: one command line, exactly the same from both (the .bat under wine)."""

import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT

wine = pytest.mark.skipif(shutil.which("wine") is None, reason="wine is not installed (.ci/run installs it)")
NAMES = ("accelerate", "torchrun")
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
    for name in NAMES:
        shell = "#!/usr/bin/env bash\nprintf '%s\\n' " + name + ' "$@" >"$STUB_OUT"\nenv >"$STUB_OUT.env"\nexit 7\n'
        (folder / name).write_text(shell)
        (folder / name).chmod(0o755)
        # cmd's own reading of a word would lose = and , so the whole line is kept
        (folder / f"{name}.bat").write_bytes(
            f"@echo off\r\n>stub.out echo {name} %*\r\nset >stub.env\r\nexit /b 7\r\n".encode()
        )
    gpus = [f"GPU {k}: A100 (UUID: GPU-{k})" for k in range(4)]
    (folder / "nvidia-smi").write_text("#!/usr/bin/env bash\n" + "\n".join(f"echo '{line}'" for line in gpus) + "\n")
    (folder / "nvidia-smi").chmod(0o755)
    text = "@echo off\r\n" + "\r\n".join(f"echo {line}" for line in gpus) + "\r\n"
    (folder / "nvidia-smi.bat").write_bytes(text.encode())
    return folder


def words_of(line: str) -> list[str]:
    """How a Windows program splits its command line: at spaces outside quotes."""
    words, word, inside, any_ = [], "", False, False
    for letter in line + " ":
        if letter == '"':
            inside, any_ = not inside, True
        elif letter == " " and not inside:
            if word or any_:
                words.append(word)
            word, any_ = "", False
        else:
            word += letter
    return words


def clean(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def by_shell(stubs: Path, folder: Path, words: list[str], **environment):
    out = folder / "shell.out"
    base = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
    base |= {"PATH": f"{stubs}:{os.environ['PATH']}", "STUB_OUT": str(out), **environment}
    (folder / "train_accelerate.py").touch()
    done = subprocess.run(
        ["bash", str(ROOT / "train_4gpu.sh"), *words], cwd=folder, env=base, capture_output=True, text=True
    )
    argv = out.read_text().splitlines() if out.exists() else None
    found = clean(Path(f"{out}.env").read_text()) if out.exists() else {}
    out.unlink(missing_ok=True)
    return done, argv, found


def quoted(word: str) -> str:
    return f'"{word}"' if not word or any(letter in word for letter in " &()") else word


def by_bat(prefix: Path, stubs: Path, folder: Path, lines: list[list[str]], start: str = "cmd /c", **environment):
    """[(exit code, output, argv or None, environment)] of several command lines, as typed, in one start of wine.
    start: `call` is quicker, but wine then loses the exit code."""
    base = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
    base |= {"WINEPREFIX": str(prefix), "WINEDEBUG": "-all"}
    base |= {"WINEPATH": "Z:" + str(stubs).replace("/", "\\"), **environment}
    (folder / "train_accelerate.py").touch()
    bat = "Z:" + str(ROOT / "train_4gpu.bat").replace("/", "\\")
    script = ["@echo off"]
    for k, words in enumerate(lines):
        script.append(f"{start} {bat} {' '.join(map(quoted, words))} >said{k} 2>&1")
        script.append(f">code{k} echo %errorlevel%")
        script += [f"if exist stub.{kind} ren stub.{kind} stub.{kind}{k}" for kind in ("out", "env")]
    (folder / "all.bat").write_bytes("\r\n".join([*script, ""]).encode())
    subprocess.run(["wine", "cmd", "/c", "all.bat"], cwd=folder, env=base, timeout=300, **SILENT)
    found = []
    for k in range(len(lines)):
        out = folder / f"stub.out{k}"
        argv = words_of(out.read_text().strip()) if out.exists() else None
        said = (folder / f"said{k}").read_text()
        values = clean((folder / f"stub.env{k}").read_text()) if out.exists() else {}
        found.append((int((folder / f"code{k}").read_text()), said, argv, values))
    return found


START = ["accelerate", "launch", "--num_processes=4", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
START += ["--main_process_port=0", "--multi_gpu", "train_accelerate.py"]
GUIDE = ["--config", "configs/multi_view_config.json"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*GUIDE, "--method", "accelerate", "--wandb"], [*START, *GUIDE, "--wandb"]),
        (
            [*GUIDE, "--method", "torchrun", "--wandb"],
            ["torchrun", "--standalone", "--nproc_per_node=4", "train_accelerate.py", *GUIDE, "--wandb"],
        ),
        (
            ["--num_gpus", "1", "--mixed_precision", "fp16"],
            [*START[:2], "--num_processes=1", START[3], "--mixed_precision=fp16", *START[5:7], START[8]]
            + ["--mixed_precision", "fp16"],
        ),
    ],
)
def test_exact_command(stubs, tmp_path, words, expected):
    done, argv, environment = by_shell(stubs, tmp_path, words)
    assert argv == expected
    assert done.returncode == 7  # the training's own
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    assert "by " + ("torchrun" if "torchrun" in words else "accelerate") in done.stdout


def combinations(count: int, seed: int) -> list[list[str]]:
    """Flag combinations, the same each time."""
    chance, found = random.Random(seed), []
    choices = [
        [[], ["--config", "configs/multi_view_config.json"], ["--config=my configs/a=b.json"]],
        [[], ["--method", "accelerate"], ["--method", "torchrun"], ["--method=torchrun"]],
        [[], ["--num_gpus", "2"], ["--num_gpus=1"], ["--num_gpus", "3"], ["--cpu", "--num_gpus", "12"]],
        [[], ["--mixed_precision", "bf16"], ["--mixed_precision=fp16"], ["--mixed_precision", "auto"]],
        [[], ["--checkpoint_dir", "runs/lr=1e-4"], ["--checkpoint_dir", "D:\\my runs\\a  b"]],
        [[], ["--wandb"], ["--wandb", "--wandb_project", "R & D (x)"], ["--wandb_project="]],
        [[], ["--learning_rate=1e-4", "--stage", "2"], ["--split_files", "a b", "c", "d;e,f"], ["--wandb_project", ""]],
    ]
    while len(found) < count:
        parts = [chance.choice(options) for options in choices]
        chance.shuffle(parts)
        if (words := [word for part in parts for word in part]) not in found:
            found.append(words)
    return found


# the first are the fewest with each choice in one of them: wine takes a second for a line
@wine
@pytest.mark.parametrize(("count", "seed"), [(6, 156), pytest.param(20, 3, marks=pytest.mark.soak)])
def test_bat_and_sh_give_the_same_argv(prefix, stubs, tmp_path, count, seed):
    lines = combinations(count, seed)
    found = by_bat(prefix, stubs, tmp_path, lines, start="call")
    for words, (_, said, argv, windows) in zip(lines, found, strict=True):
        shell, expected, environment = by_shell(stubs, tmp_path, words)
        assert expected is not None, shell.stderr
        assert argv == expected, words
        assert shell.returncode == 7
        assert said.strip() == shell.stdout.strip()
        assert windows["USE_LIBUV"] == "0"
        for name in ENVIRONMENT:
            assert windows.get(name) == environment.get(name), name


WRONG = [
    (["--method", "slurm"], {}, "--method must be accelerate or torchrun, not 'slurm'"),
    (["--method"], {}, "--method needs a value"),
    (["--num_gpus", "0"], {}, "--num_gpus must be a whole number from 1 to 99, not '0'"),
    (["--num_gpus=two"], {}, "--num_gpus must be a whole number from 1 to 99, not 'two'"),
    (["--num_gpus", "5"], {}, "5 GPUs asked for, 4 found; give --num_gpus with at most that many, or --cpu"),
    ([], {"CUDA_VISIBLE_DEVICES": "0,2"}, "4 GPUs asked for, 2 found"),
    ([], {"CUDA_VISIBLE_DEVICES": "-1"}, "4 GPUs asked for, 0 found"),
]


@pytest.mark.parametrize(("words", "environment", "message"), WRONG)
def test_wrong_flags(stubs, tmp_path, words, environment, message):
    done, argv, _ = by_shell(stubs, tmp_path, words, **environment)
    assert (done.returncode, argv) == (2, None)
    assert done.stderr.strip().startswith(f"error: {message}")


@wine
@pytest.mark.parametrize("visible", [None, "0,2", "-1"])
def test_wrong_flags_of_the_bat(prefix, stubs, tmp_path, visible):
    environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    chosen = [(words, message) for words, other, message in WRONG if other == environment]
    found = by_bat(prefix, stubs, tmp_path, [words for words, _ in chosen], **environment)
    for (words, message), (code, said, argv, _) in zip(chosen, found, strict=True):
        assert (code, argv) == (2, None), words
        assert said.strip().startswith(f"error: {message}")


def test_dry_run_and_help(stubs, tmp_path):
    done, argv, _ = by_shell(stubs, tmp_path, ["--dry_run", "--config", "a b.json"])
    assert (done.returncode, argv) == (0, None)
    assert done.stdout.strip() == "4 GPUs by accelerate: " + " ".join(START) + ' --config "a b.json"'
    done, argv, _ = by_shell(stubs, tmp_path, ["--help"])
    assert (done.returncode, argv) == (0, None)
    assert "--num_gpus N" in done.stdout


@wine
def test_dry_run_and_help_of_the_bat(prefix, stubs, tmp_path):
    dry, usage = by_bat(prefix, stubs, tmp_path, [["--dry_run", "--config", "a b.json"], ["--help"]])
    assert (dry[0], dry[2]) == (0, None)
    assert dry[1].strip() == "4 GPUs by accelerate: " + " ".join(START) + ' --config "a b.json"'
    assert (usage[0], usage[2]) == (0, None)
    shell, *_ = by_shell(stubs, tmp_path, ["--help"])
    assert usage[1].replace("train_4gpu.bat", "bash train_4gpu.sh").splitlines() == shell.stdout.splitlines()


# Each would leave the file `executed` if cmd read on behind the & or |.
COMMANDS = ["4&echo x>executed&rem ", "4|echo x>executed|rem ", "4)&echo x>executed&("]
NOT_NUMBERS = ["4;x", ";x", "08", "0x4", "4+4", "-4", "444444444444"]
EVIL = '4"&echo x>executed&"'


@wine
def test_bat_executes_no_value(prefix, stubs, tmp_path):
    """Hostile arguments, then hostile variables, which `set /p` reads from files as they are."""
    lines = [(f'--num_gpus "{value}"', "--num_gpus", "") for value in COMMANDS + NOT_NUMBERS]
    lines += [(f'--method "{value}"', "--method", "") for value in COMMANDS]
    for name in ("NUMBER_OF_PROCESSORS", "OMP_NUM_THREADS"):
        lines += [("", name, value) for value in [*COMMANDS, *NOT_NUMBERS, EVIL, "!EVIL!"]]
    lines += [("", "CUDA_VISIBLE_DEVICES", f"0,{value}") for value in [*COMMANDS, EVIL, "!EVIL!"]]
    lines += [("--num_gpus 1", "errorlevel", "0&echo x>executed"), ("--num_gpus 1", "before", EVIL)]

    script = ["@echo off", f"set EVIL={EVIL.replace('&', '^&')}"]
    (tmp_path / "train_accelerate.py").touch()
    for k, (words, name, value) in enumerate(lines):
        (tmp_path / f"value{k}").write_bytes(f"{value}\r\n".encode())
        script.append("setlocal")
        if value:
            script.append(f"set /p {name}=<value{k}")
        bat = "Z:" + str(ROOT / "train_4gpu.bat").replace("/", "\\")
        script.append(f"call {bat} {words} >said{k} 2>&1")
        script += ["endlocal", f"if exist stub.out ren stub.out started{k}", f"if exist executed ren executed bad{k}"]
    (tmp_path / "all.bat").write_bytes("\r\n".join([*script, ""]).encode())
    base = {key: text for key, text in os.environ.items() if key not in ENVIRONMENT}
    base |= {"WINEPREFIX": str(prefix), "WINEDEBUG": "-all", "WINEPATH": "Z:" + str(stubs).replace("/", "\\")}
    subprocess.run(["wine", "cmd", "/c", "all.bat"], cwd=tmp_path, env=base, timeout=300, **SILENT)
    for k, (words, name, value) in enumerate(lines):
        said = (tmp_path / f"said{k}").read_text()
        assert not (tmp_path / f"bad{k}").exists(), (words, name, value, said)
        if name.startswith(("--", "NUMBER", "OMP")):
            assert not (tmp_path / f"started{k}").exists(), (words, name, value, said)
            assert said.startswith(f"error: {name} must be "), (words, name, value, said)
            assert said.count("\n") == 1, (words, name, value, said)


@wine
def test_bat_called_directly(prefix, stubs, tmp_path):
    """The exit code; the script beside the launcher, in a folder with a space."""
    folder = tmp_path / "my folder"
    folder.mkdir()
    shutil.copy(ROOT / "train_4gpu.bat", folder)
    base = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
    base |= {"WINEPREFIX": str(prefix), "WINEDEBUG": "-all", "WINEPATH": "Z:" + str(stubs).replace("/", "\\")}
    (tmp_path / "go.bat").write_bytes(b'@"my folder\\train_4gpu.bat" --config "a  b=c.json"\r\n')
    command = ["wine", "cmd", "/c", "go.bat"]
    done = subprocess.run(command, cwd=tmp_path, env=base, timeout=60, **SILENT)
    argv = words_of((tmp_path / "stub.out").read_text().strip())
    assert done.returncode == 7
    assert argv[-3].endswith("my folder\\train_accelerate.py")
    assert argv[-2:] == ["--config", "a  b=c.json"]


@wine
@pytest.mark.parametrize("place", ["Scripts", "."], ids=["venv", "conda"])
def test_bat_runs_the_launcher_by_its_own_python(prefix, tmp_path, place):
    """Where there is an accelerate.exe: its environment's python, beside it or a folder above, runs launch_utils.py."""
    (tmp_path / "env" / "Scripts").mkdir(parents=True)
    (tmp_path / "env" / "Scripts" / "accelerate.exe").touch()
    python = tmp_path / "env" / place / "python.exe"
    # wine starts a program of the system's own, too
    python.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{tmp_path}/argv.part && mv {tmp_path}/argv.part {tmp_path}/argv\n"
    )
    python.chmod(0o755)
    (tmp_path / "train_accelerate.py").touch()
    base = {key: text for key, text in os.environ.items() if key not in ENVIRONMENT}
    base |= {"WINEPREFIX": str(prefix), "WINEDEBUG": "-all"}
    base |= {"WINEPATH": "Z:" + str(tmp_path / "env" / "Scripts").replace("/", "\\")}
    bat = "Z:" + str(ROOT / "train_4gpu.bat").replace("/", "\\")
    command = ["wine", "cmd", "/c", bat, "--cpu", "--config", "a=b.json"]
    subprocess.run(command, cwd=tmp_path, env=base, timeout=60, **SILENT)
    deadline = time.time() + 20
    while not (tmp_path / "argv").exists() and time.time() < deadline:
        time.sleep(0.05)
    argv = (tmp_path / "argv").read_text().splitlines()
    assert argv[0].endswith("\\launch_utils.py")
    assert argv[1:] == [*START, "--config", "a=b.json"]


def test_from_another_folder(stubs, tmp_path):
    """Without the script in the working folder, the one beside the launcher."""
    (tmp_path / "elsewhere").mkdir()
    base = os.environ | {"PATH": f"{stubs}:{os.environ['PATH']}", "STUB_OUT": str(tmp_path / "out")}
    command = ["bash", str(ROOT / "train_4gpu.sh"), "--cpu", "--num_gpus", "2"]
    subprocess.run(command, cwd=tmp_path / "elsewhere", env=base, capture_output=True)
    assert str(ROOT / "train_accelerate.py") in (tmp_path / "out").read_text().splitlines()
