"""No value that a launcher reads is ever executed, and a wrong number is refused in one line before anything starts."""

import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What bash arithmetic, eval, an unquoted word or a careless reading of numbers would stumble over.
# Each MARK is the path of a file that exists only if the value was executed.
COMMANDS = [
    "PATH[$(touch MARK)]",
    "1,x[$(touch MARK)]",
    "x[`touch MARK`]+1",
    "1?x[$(touch MARK)]:2",
    "$(touch MARK)",
    "`touch MARK`",
    # where a command ends
    "2;touch MARK",
    "2\ntouch MARK",
    "2 && touch MARK",
    "2|touch MARK",
    "2)); touch MARK; ((1",
    "2'; touch MARK; '",
    '2"; touch MARK; "',
    "<(touch MARK)",
]

NOT_NUMBERS = ["08", "0x2", "2#1", "+2", "-1", " 2", "2.0", "two", "RANDOM", "٣", "*", "99999999999999999999"]

# What the hardware detection prints for a launcher.
HARDWARE = """gpu_count=2
cpu_cores=8
processes_per_node=2
engine=torchrun
deepspeed_installed=true
detected='Detected: 2 GPUs'
settings='Settings: batch 16'
"""

SINGLE = "run_multi_gpu_train.sh"
DETECT = "launch_distributed_training.sh"
CASCADE = "train_4gpu.sh"

# Variables of one node of two, and of a step of SLURM.
NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
STEP |= {"SLURM_JOB_NODELIST": "node[1-2]"}


class Stubs:
    """Every command that a launcher can start or ask, first on PATH; what is started leaves a line in `started`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.mark = folder / "executed"
        self.started = folder / "started"
        for name in ("torchrun", "accelerate", "srun"):
            self.write(name, f'printf "%s\\n" "{name}" "$@" >"{self.started}"')
        record = f'printf "%s\\n" "$0" "$@" >"{self.started}"'
        self.write("python", f'[ "$2" = utils.hardware_utils ] && exec cat "{folder}/facts"\n{record}')
        self.write("nvidia-smi", "echo 'GPU 0: A (UUID: GPU-0)'\necho 'GPU 1: A (UUID: GPU-1)'")
        self.write("nproc", "echo 8")
        self.write("scontrol", "echo node1")
        (folder / "facts").write_text(HARDWARE)

    def write(self, name: str, code: str) -> None:
        """A command of a shell's code."""
        (self.folder / name).write_text(f"#!/bin/sh\n{code}\n")
        (self.folder / name).chmod(0o755)

    def run(self, launcher: str, *words: str, **variables: str):
        """(finished launcher, what it started or None); fails if anything was executed that should not be."""
        self.started.unlink(missing_ok=True)
        environment = {"PATH": f"{self.folder}:/usr/bin:/bin", "LANG": "C.UTF-8", **variables}
        command = ["bash", str(ROOT / launcher), *words]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=30)
        assert not self.mark.exists(), (launcher, words, variables)
        return done, self.started.read_text() if self.started.exists() else None

    def run_with(self, value: str, launcher: str, words: list[str], variables: dict[str, str]):
        """run() with a value in place of VALUE in its arguments and variables."""
        given = [word.replace("VALUE", value) for word in words]
        chosen = {name: text.replace("VALUE", value) for name, text in variables.items()}
        return self.run(launcher, *given, **chosen)

    def hostile(self, value: str) -> str:
        """A value that would leave this folder's mark."""
        return value.replace("MARK", str(self.mark))


def assert_refused(done, started: str | None, beginning: str, *case) -> None:
    """A launcher started nothing and ended with code 2 and one line of this beginning."""
    assert done.returncode == 2, (*case, done.stderr)
    assert started is None, (*case, started)
    assert done.stderr.startswith(f"error: {beginning}"), (*case, done.stderr)
    assert done.stderr.count("\n") == 1, (*case, done.stderr)


@pytest.fixture
def stubs(tmp_path) -> Stubs:
    return Stubs(tmp_path)


# Launcher, name of what is wrong, arguments and variables with VALUE for the value.
NUMBERS = [
    (SINGLE, "NUM_GPUS", ["data", "VALUE"], {}),
    (SINGLE, "NNODES", ["data"], {"NNODES": "VALUE"}),
    (SINGLE, "NODE_RANK", ["data"], NODES | {"NODE_RANK": "VALUE"}),
    (SINGLE, "MASTER_PORT", ["data"], {"MASTER_PORT": "VALUE"}),
    (SINGLE, "OMP_NUM_THREADS", ["data"], {"OMP_NUM_THREADS": "VALUE"}),
    # the launcher that looks at the hardware, also under SLURM
    (DETECT, "--num_gpus", ["--num_gpus", "VALUE"], {}),
    (DETECT, "NNODES", [], {"NNODES": "VALUE"}),
    (DETECT, "NODE_RANK", [], NODES | {"NODE_RANK": "VALUE"}),
    (DETECT, "MASTER_PORT", [], NODES | {"MASTER_PORT": "VALUE"}),
    (DETECT, "OMP_NUM_THREADS", [], {"OMP_NUM_THREADS": "VALUE"}),
    (DETECT, "SLURM_JOB_ID", [], STEP | {"SLURM_JOB_ID": "VALUE"}),
    (DETECT, "SLURM_NNODES", [], {"SLURM_JOB_ID": "7", "SLURM_NNODES": "VALUE"}),
    (DETECT, "SLURM_STEP_NUM_NODES", [], STEP | {"SLURM_STEP_NUM_NODES": "VALUE"}),
    (DETECT, "SLURM_STEP_NUM_TASKS", [], STEP | {"SLURM_STEP_NUM_TASKS": "VALUE"}),
    (DETECT, "SLURM_CPUS_PER_TASK", [], STEP | {"SLURM_CPUS_PER_TASK": "VALUE"}),
    (DETECT, "SLURM_NODEID", [], STEP | {"SLURM_NODEID": "VALUE"}),
    (DETECT, "SLURM_PROCID", [], STEP | {"SLURM_PROCID": "VALUE"}),
]


@pytest.mark.parametrize(("launcher", "name", "words", "variables"), NUMBERS)
def test_wrong_numbers_are_refused(stubs, launcher, name, words, variables):
    # each name meets every second value, 13 of 26, to be quick: 221 runs of a launcher
    chosen = [*COMMANDS, *NOT_NUMBERS][len(name) % 2 :: 2]
    for value in map(stubs.hostile, chosen):
        done, started = stubs.run_with(value, launcher, words, variables)
        assert done.stdout == "", (name, value)

        # run_multi_gpu_train.sh takes the word -1 for an option
        beginning = f"{name} must be a whole number from "
        if name == "NUM_GPUS" and value == "-1":
            beginning = ""
        # and what has a colon for a range
        if launcher == SINGLE and name == "NNODES" and ":" in value:
            beginning = "NNODES must be MIN:MAX"
        assert_refused(done, started, beginning, name, value)


@pytest.mark.parametrize(
    ("launcher", "words", "variables"),
    [
        (SINGLE, ["data"], NODES | {"MASTER_ADDR": "VALUE"}),
        (SINGLE, ["data"], {"NNODES": "1:VALUE"}),
        (SINGLE, ["data"], {"NNODES": "1:2", "MASTER_ADDR": "VALUE", "RDZV_ID": "x"}),
        (SINGLE, ["data"], {"NNODES": "1:2", "RDZV_ID": "VALUE"}),
        (SINGLE, ["data"], {"NNODES": "1:2", "MAX_RESTARTS": "VALUE"}),
        (DETECT, [], NODES | {"MASTER_ADDR": "VALUE"}),
        (DETECT, ["--script", "VALUE"], {}),
    ],
)
def test_wrong_names_are_refused(stubs, launcher, words, variables):
    for value in map(stubs.hostile, COMMANDS):
        done, started = stubs.run_with(value, launcher, words, variables)
        assert_refused(done, started, "", value)


@pytest.mark.parametrize(
    ("launcher", "words", "variables"),
    [
        (SINGLE, ["VALUE", "--", "--vlm_path", "VALUE"], {}),
        (SINGLE, ["data"], {"CUDA_VISIBLE_DEVICES": "VALUE,0"}),
        (DETECT, ["--config", "VALUE", "--debug"], {}),
        (DETECT, [], STEP | {"SLURM_JOB_NODELIST": "VALUE"}),
        (DETECT, ["--x=VALUE"], {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}),
        (CASCADE, ["--num_gpus", "VALUE", "--config", "VALUE"], {"OMP_NUM_THREADS": "VALUE"}),
    ],
)
def test_other_values_reach_the_script_as_they_are(stubs, launcher, words, variables):
    for value in map(stubs.hostile, COMMANDS[::2]):
        done, started = stubs.run_with(value, launcher, words, variables)
        assert done.returncode == 0, (value, done.stderr)
        assert done.stderr == "", value
        given = [word.replace("VALUE", value) for word in words if "VALUE" in word]
        assert all(word in started for word in given), (value, started)


def test_what_other_programs_print_is_not_executed(stubs):
    """Of nvidia-smi and nproc."""
    for value in map(stubs.hostile, COMMANDS):
        stubs.write("nproc", f"cat <<'END'\n{value}\nEND")
        stubs.write("nvidia-smi", f"cat <<'END'\nGPU {value}\nGPU {value}\nEND")
        done, started = stubs.run(SINGLE, "data")
        assert done.returncode == 0, (value, done.stderr)
        assert started, value


USUAL = [("gpu_count", "2"), ("cpu_cores", "8"), ("processes_per_node", "2")]


@pytest.mark.parametrize(("name", "usual"), USUAL)
def test_what_the_hardware_detection_prints_is_not_executed(stubs, name, usual):
    """A value that is not quoted is refused as a whole, a quoted one for what it is."""
    for value in map(stubs.hostile, COMMANDS[::3]):
        for written in (value, shlex.quote(value), f"'{value}'"):
            facts = HARDWARE.replace(f"{name}={usual}", f"{name}={written}")
            (stubs.folder / "facts").write_text(facts)
            done, started = stubs.run(DETECT)
            assert_refused(done, started, "hardware_utils: ", name, written)


FOREIGN_LINES = ["PATH=/nowhere", "here=/nowhere", "touch MARK", "engine", "engine=torchrun touch MARK", "gpu_count+=1"]


@pytest.mark.parametrize("line", FOREIGN_LINES)
def test_a_line_of_another_name_is_refused(stubs, line):
    (stubs.folder / "facts").write_text(HARDWARE + stubs.hostile(line))
    done, started = stubs.run(DETECT)
    assert_refused(done, started, "hardware_utils: cannot read its answer ", line)


def test_the_words_of_the_hardware_detection_are_shown_as_they_are(stubs):
    for value in map(stubs.hostile, COMMANDS):
        facts = HARDWARE.replace("'Detected: 2 GPUs'", shlex.quote(f"Detected: {value}"))
        (stubs.folder / "facts").write_text(facts)
        done, started = stubs.run(DETECT)
        assert done.returncode == 0, (value, done.stderr)
        assert done.stderr == "", value
        assert done.stdout.startswith(f"Detected: {value}\n"), value
        assert started, value
