"""No value that a launcher reads is ever executed, and a wrong number is refused in one line before anything starts."""

import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

# What bash arithmetic, eval, an unquoted word or a careless reading of numbers would stumble over.
# Each MARK is the path of a file that exists only if the value was executed.
COMMANDS = [
    "PATH[$(touch MARK)]",
    "1,x[$(touch MARK)]",
    "x[`touch MARK`]+1",
    "1?x[$(touch MARK)]:2",
    "$(touch MARK)",
    "`touch MARK`",
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
NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
STEP |= {"SLURM_JOB_NODELIST": "node[1-2]"}


class Stubs:
    """Every command that a launcher can start or ask, first on PATH; what is started leaves a line in `started`."""

    def __init__(self, folder: Path):
        self.folder, self.mark, self.started = folder, folder / "executed", folder / "started"
        for name in ("torchrun", "accelerate", "srun"):
            self.write(name, f'printf "%s\\n" "{name}" "$@" >"{self.started}"')
        self.write("python", f'[ "$2" = hardware_utils ] && exec cat "{folder}/facts"\necho python >"{self.started}"')
        self.write("nvidia-smi", "echo 'GPU 0: A (UUID: GPU-0)'\necho 'GPU 1: A (UUID: GPU-1)'")
        self.write("nproc", "echo 8")
        self.write("scontrol", "echo node1")
        (folder / "facts").write_text(HARDWARE)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.folder / name).chmod(0o755)

    def run(self, launcher: str, *words: str, **variables: str):
        """(finished launcher, what it started or None); fails if anything was executed that should not be."""
        self.started.unlink(missing_ok=True)
        env = {"PATH": f"{self.folder}:/usr/bin:/bin", "LANG": "C.UTF-8", **variables}
        command = ["bash", str(ROOT / launcher), *words]
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=30)
        assert not self.mark.exists(), (launcher, words, variables)
        return done, self.started.read_text() if self.started.exists() else None

    def hostile(self, value: str) -> str:
        return value.replace("MARK", str(self.mark))


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
    (CASCADE, "--num_gpus", ["--num_gpus", "VALUE"], {}),
    (CASCADE, "OMP_NUM_THREADS", ["--cpu"], {"OMP_NUM_THREADS": "VALUE"}),
]


@pytest.mark.parametrize(("launcher", "name", "words", "variables"), NUMBERS)
def test_wrong_numbers_are_refused(stubs, launcher, name, words, variables):
    # Each name meets every second value, 13 of 26, to be quick: 247 runs of a launcher.
    chosen = [*COMMANDS, *NOT_NUMBERS][len(name) % 2 :: 2]
    for value in map(stubs.hostile, chosen):
        given = [word.replace("VALUE", value) for word in words]
        done, started = stubs.run(launcher, *given, **{k: v.replace("VALUE", value) for k, v in variables.items()})
        assert (done.returncode, started, done.stdout) == (2, None, ""), (name, value, done.stderr)
        # run_multi_gpu_train.sh takes the word -1 for an option.
        refused = done.stderr.startswith(f"error: {name} must be a whole number from ")
        assert refused or (name, value) == ("NUM_GPUS", "-1"), (name, value, done.stderr)
        assert done.stderr.count("\n") == 1, (name, value, done.stderr)


@pytest.mark.parametrize(
    ("launcher", "words", "variables"),
    [
        (SINGLE, ["data"], NODES | {"MASTER_ADDR": "VALUE"}),
        (DETECT, [], NODES | {"MASTER_ADDR": "VALUE"}),
        (CASCADE, ["--method", "VALUE"], {}),
        (DETECT, ["--script", "VALUE"], {}),
    ],
)
def test_wrong_names_are_refused(stubs, launcher, words, variables):
    for value in map(stubs.hostile, COMMANDS):
        given = [word.replace("VALUE", value) for word in words]
        done, started = stubs.run(launcher, *given, **{k: v.replace("VALUE", value) for k, v in variables.items()})
        assert (done.returncode, started) == (2, None), (value, done.stderr)
        assert done.stderr.startswith("error: "), value
        assert done.stderr.count("\n") == 1, (value, done.stderr)


@pytest.mark.parametrize(
    ("launcher", "words", "variables"),
    [
        (SINGLE, ["VALUE", "--", "--vlm_path", "VALUE"], {}),
        (SINGLE, ["data"], {"CUDA_VISIBLE_DEVICES": "VALUE,0"}),
        (DETECT, ["--config", "VALUE", "--debug"], {}),
        (DETECT, [], STEP | {"SLURM_JOB_NODELIST": "VALUE"}),
        (DETECT, ["--x=VALUE"], {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}),
        (CASCADE, ["--cpu", "--config", "VALUE", "--mixed_precision", "VALUE"], {}),
        (CASCADE, ["--num_gpus", "1"], {"CUDA_VISIBLE_DEVICES": "0,VALUE"}),
    ],
)
def test_other_values_reach_the_script_as_they_are(stubs, launcher, words, variables):
    for value in map(stubs.hostile, COMMANDS[::2]):
        given = [word.replace("VALUE", value) for word in words]
        done, started = stubs.run(launcher, *given, **{k: v.replace("VALUE", value) for k, v in variables.items()})
        assert (done.returncode, done.stderr) == (0, ""), (value, done.stderr)
        assert all(word in started for word in given if "MARK" in word), (value, started)


def test_what_other_programs_print_is_not_executed(stubs):
    """nvidia-smi and nproc."""
    for value in map(stubs.hostile, COMMANDS):
        stubs.write("nproc", f"cat <<'END'\n{value}\nEND")
        stubs.write("nvidia-smi", f"cat <<'END'\nGPU {value}\nGPU {value}\nEND")
        for launcher, words in ((SINGLE, ["data"]), (CASCADE, ["--num_gpus", "1"])):
            done, started = stubs.run(launcher, *words)
            assert done.returncode == 0, (value, done.stderr)
            assert started, value


def test_what_the_hardware_detection_prints_is_not_executed(stubs):
    """A value that is not quoted is refused as a whole, a quoted one for what it is."""
    for name, usual in (("gpu_count", "2"), ("cpu_cores", "8"), ("processes_per_node", "2"), ("engine", "torchrun")):
        for value in map(stubs.hostile, COMMANDS[::3]):
            for written in (value, shlex.quote(value), f"'{value}'"):
                (stubs.folder / "facts").write_text(HARDWARE.replace(f"{name}={usual}", f"{name}={written}"))
                done, started = stubs.run(DETECT)
                assert (done.returncode, started) == (2, None), (name, written, done.stderr)
                assert done.stderr.startswith("error: hardware_utils: "), (name, written, done.stderr)
                assert done.stderr.count("\n") == 1, (name, written, done.stderr)


def test_a_line_of_another_name_is_refused(stubs):
    for line in (
        "PATH=/nowhere",
        "here=/nowhere",
        "touch MARK",
        "engine",
        "engine=torchrun touch MARK",
        "gpu_count+=1",
    ):
        (stubs.folder / "facts").write_text(HARDWARE + stubs.hostile(line))
        done, started = stubs.run(DETECT)
        assert (done.returncode, started) == (2, None), (line, done.stderr)
        assert done.stderr.startswith("error: hardware_utils: cannot read its answer "), (line, done.stderr)


def test_the_words_of_the_hardware_detection_are_shown_as_they_are(stubs):
    for value in map(stubs.hostile, COMMANDS):
        facts = HARDWARE.replace("'Detected: 2 GPUs'", shlex.quote(f"Detected: {value}"))
        (stubs.folder / "facts").write_text(facts)
        done, started = stubs.run(DETECT)
        assert (done.returncode, done.stderr) == (0, ""), (value, done.stderr)
        assert done.stdout.startswith(f"Detected: {value}\n"), value
        assert started, value


SCRIPTS = ["train_prs_med", "train_mimic_cxr", "train_survival_distributed", "train_accelerate", "train"]
FLAGS = {
    "train_prs_med": ["--data_root", "."],
    "train_mimic_cxr": ["--mimic_cxr_path", ".", "--mimic_qa_path", "."],
    "train_survival_distributed": ["--csv_path", "nowhere"],
}
RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
TASKS = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}


def test_wrong_ranks_are_refused(monkeypatch):
    """The same variables where the scripts read them."""
    from cli_utils import InputError, is_first_process
    from distributed_utils import read_environment

    for good in (RANKS, TASKS):
        for name in set(good) - {"MASTER_ADDR"}:
            for value in [*COMMANDS, *NOT_NUMBERS, "", "2\n", "4" * 5000]:
                with monkeypatch.context() as patch:
                    for key, text in (good | {name: value}).items():
                        patch.setenv(key, text)
                    with pytest.raises(InputError, match=f"^{name} must be a whole number from "):
                        read_environment()
                    is_first_process()


@pytest.mark.parametrize("script", SCRIPTS)
def test_wrong_ranks_end_a_script_in_one_line(zygote, script):
    cases = [RANKS | {"RANK": "x[$(id)]"}, RANKS | {"WORLD_SIZE": "two"}, TASKS | {"SLURM_PROCID": "0;id"}]
    cases.append(TASKS | {"SLURM_JOB_ID": "1e3"})
    for variables in cases:
        done = zygote(ROOT / f"{script}.py", *FLAGS.get(script, []), **variables)
        wrong = next(name for name in variables if variables[name] not in (RANKS | TASKS).values())
        assert done.code == 2, done.stderr
        assert done.stderr.startswith(f"error: {wrong} must be a whole number"), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
