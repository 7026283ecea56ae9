"""launch_distributed_training.sh: the exact command for each machine, on stubs that record how they were called."""

import contextlib
import io
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from utils import hardware_utils

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = "launch_distributed_training.sh"
MIMIC = "train_mimic_cxr.py"
SCRIPTS = (MIMIC, "train_prs_med.py", "train_survival_distributed.py", "train_accelerate.py", "train.py")

# `python` also answers what the launcher asks of the hardware detection.
RECORDER = """\
#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
asked = name == "python" and sys.argv[1:3] == ["-m", "utils.hardware_utils"]
with open({folder!r} + ("/asked" if asked else "/seen"), "w") as file:
    json.dump(dict(argv=[name, *sys.argv[1:]], folder=os.getcwd(), environment=dict(os.environ)), file)
if asked:
    print(open({folder!r} + "/answer").read())
"""
SCONTROL = "#!/bin/sh\n[ \"$*\" = 'show hostnames node[07-08]' ] && printf 'node07\\nnode08\\n'\n"


class Machine:
    """The launcher in a folder of its own, on a machine of so many L4 and 32 cores, whose commands are stubs."""

    def __init__(self, folder: Path, gpus: int, deepspeed: bool = True):
        self.folder, self.repo, self.bin = folder, folder / "repo", folder / "bin"
        self.repo.mkdir()
        self.bin.mkdir()
        for name in (LAUNCHER, "launch_functions.sh"):
            shutil.copy2(ROOT / name, self.repo)
        for name in SCRIPTS:
            (self.repo / name).touch()
        for name in ("torchrun", "srun", "python"):
            self.write(name, RECORDER.format(python=sys.executable, folder=str(folder)))
        self.write("scontrol", SCONTROL)
        gpu = {"name": "NVIDIA L4", "memory_total_gb": 24.0, "memory_free_gb": 23.5, "compute": 8.9}
        self.facts = {"gpu_count": gpus, "gpus": [gpu] * gpus, "cpu_cores": 32, "ram_available_gb": 100.0}
        self.facts |= {"deepspeed_installed": deepspeed, "notes": []}

    def write(self, name: str, text: str) -> None:
        """Make a command of this text."""
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, words: str = "", question: str = "--nodes 1", **variables: str) -> SimpleNamespace:
        """What the launcher printed, its exit code, and argv and environment of what it started (argv None: nothing).

        question: what it must ask of the hardware detection, if it gets that far.
        """
        detect = mock.patch.object(hardware_utils, "detect_hardware", return_value=self.facts)
        with detect, contextlib.redirect_stdout(io.StringIO()) as answer:
            hardware_utils.main(["--shell", *question.split()])
        (self.folder / "answer").write_text(answer.getvalue())
        (self.folder / "asked").write_text("null")
        (self.folder / "seen").write_text('{"argv": null}')

        environment = {"PATH": f"{self.bin}:/usr/bin:/bin", **variables}
        command = [self.repo / LAUNCHER, *shlex.split(words)]
        done = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=30)
        asked, seen = (json.loads((self.folder / name).read_text()) for name in ("asked", "seen"))
        if asked:
            assert (asked["argv"][3:], asked["folder"]) == (["--shell", *question.split()], str(self.repo))
        return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr, **seen)

    def command(self, words: str, script: str = MIMIC) -> list[str]:
        """The words of a command line; SCRIPT and TORCHRUN stand for the script and utils/torchrun.py."""
        paths = {"SCRIPT": str(self.repo / script), "TORCHRUN": str(self.repo / "utils/torchrun.py")}
        return [paths.get(word, word) for word in shlex.split(words)]


@pytest.mark.parametrize("deepspeed", [True, False])
@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
def test_the_guides_diagram(tmp_path, gpus, deepspeed):
    machine = Machine(tmp_path, gpus, deepspeed)
    launched = machine.run("--config configs/default_config.yaml --epochs 3")
    script = "SCRIPT --config configs/default_config.yaml --epochs 3"
    engine, expected = "python", f"python {script}"
    if gpus > 1:
        engine = "deepspeed" if deepspeed else "torchrun"
        flag = "--use_deepspeed" if deepspeed else "--use_ddp"
        expected = f"python TORCHRUN --standalone --nproc_per_node={gpus} {script} {flag}"
    assert launched.argv == machine.command(expected)
    assert launched.environment["OMP_NUM_THREADS"] == str(32 // (gpus or 1))

    # the guide's report, and the choice
    assert f"  Number of GPUs:        {gpus or 'none; CPU only'}\n" in launched.out
    batch = "Batch size per GPU:    16" if gpus else "Batch per process:     8"
    assert f"  {batch}\n  Gradient accumulation: " in launched.out
    assert launched.out.endswith(f"\nEngine: {engine} x {gpus or 1}\n")


FOUR = "python TORCHRUN --standalone --nproc_per_node=4 SCRIPT"
TWO = "python TORCHRUN --standalone --nproc_per_node=2 SCRIPT"


@pytest.mark.parametrize(
    ("words", "question", "expected"),
    [
        ("--num_gpus 2", "--gpus 2", f"{TWO} --use_deepspeed"),
        ("--num_gpus=2 --torchrun", "--gpus 2 --no_deepspeed", f"{TWO} --use_ddp"),
        ("--use_ddp", "--no_deepspeed", f"{FOUR} --use_ddp"),
        ("--num_gpus 1", "--gpus 1", "python SCRIPT"),
        ("--num_gpus 1 --deepspeed", "--gpus 1", "python SCRIPT --use_deepspeed"),
        ("--num_gpus 1 --torchrun", "--gpus 1 --no_deepspeed", "python SCRIPT --use_ddp"),
        ("--debug --lr 1", "", f"{FOUR} --lr 1 --max_steps 2 --log_every 1 --use_deepspeed"),
        ("--a 'b  c' '--x=$y' --num_gpus 2 * ''", "--gpus 2", f"{TWO} --a 'b  c' '--x=$y' * '' --use_deepspeed"),
    ],
)
def test_flags(tmp_path, words, question, expected):
    machine = Machine(tmp_path, 4)
    launched = machine.run(words, f"--nodes 1 {question}")
    assert launched.argv == machine.command(expected), launched.err


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_another_script(tmp_path, script):
    """It gets no flag of an engine."""
    machine = Machine(tmp_path, 4)
    launched = machine.run(f"--script={script} --debug --seed 3", "--nodes 1 --no_deepspeed")
    assert launched.argv == machine.command(f"{FOUR} --seed 3 --max_steps 2", script)
    assert "Gradient accumulation" not in launched.out


NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ("--num_gpus 8", {}, "--num_gpus 8: there are 4 GPUs; ask for at most 4"),
        ("--num_gpus two", {}, "--num_gpus must be a whole number from 1 to 9999, not 'two'"),
        ("--num_gpus=", {}, "--num_gpus must be a whole number from 1 to 9999, not ''"),
        ("--num_gpus", {}, "--num_gpus needs a value"),
        ("--deepspeed", {}, "--deepspeed: it is not installed"),
        ("--deepspeed --torchrun", {}, "--deepspeed: not with --torchrun or another script"),
        ("--use_deepspeed --script train.py", {}, "--deepspeed: not with --torchrun or another script"),
        ("--script nowhere.py", {}, "nowhere.py; check --script"),
        ("", {"NNODES": "PATH[$(touch x)]"}, "NNODES must be a whole number from 1 to 9999999, not 'PATH[$(touch x)]'"),
        ("", NODE | {"NODE_RANK": "2"}, "NODE_RANK must be a whole number from 0 to 1, not '2'"),
        ("", NODE | {"MASTER_ADDR": ""}, "MASTER_ADDR must be the name or address of a host, not ''"),
        ("", NODE | {"MASTER_PORT": "x[$(touch x)]"}, "MASTER_PORT must be a whole number from 1 to 65535, not "),
        ("", {"OMP_NUM_THREADS": "4;x"}, "OMP_NUM_THREADS must be a whole number from 1 to 99999, not '4;x'"),
        ("", {"SLURM_JOB_ID": "x[$(touch x)]"}, "SLURM_JOB_ID must be a whole number from 0 to 4294967295, not "),
    ],
)
def test_refuses(tmp_path, words, variables, message):
    question = f"--nodes {len(variables) > 1 and 2 or 1}" + " --gpus 8" * ("8" in words)
    launched = Machine(tmp_path, 4, deepspeed=False).run(words, question, **variables)
    assert (launched.code, launched.argv) == (2, None)
    (line,) = launched.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "x").exists()


def test_environment(tmp_path):
    """What the user has set stays."""
    defaults = {"TOKENIZERS_PARALLELISM": "false", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    defaults |= {"NCCL_DEBUG": "WARN", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120", "OMP_NUM_THREADS": "8"}
    machine = Machine(tmp_path, 4)
    assert defaults.items() <= machine.run().environment.items()
    given = dict.fromkeys(defaults, "given") | {"OMP_NUM_THREADS": "4,2"}
    assert given.items() <= machine.run(**given).environment.items()
    # the name that torch had for it before
    assert machine.run(PYTORCH_CUDA_ALLOC_CONF="x").environment["PYTORCH_ALLOC_CONF"] == "x"


def test_dry_run_and_exit_code(tmp_path):
    machine = Machine(tmp_path, 2)
    launched = machine.run("--dry_run --index_dir 'my data'")
    assert (launched.code, launched.argv) == (0, None)
    line = launched.out.splitlines()[-1]
    assert shlex.split(line) == machine.command(f"{TWO} --index_dir 'my data' --use_deepspeed")

    # the script's own exit code
    answers = f'[ "$2" = utils.hardware_utils ] && exec cat "{tmp_path}/answer"\n'
    machine.write("python", f"#!/bin/sh\n{answers}exit 77\n")
    assert machine.run().code == 77
    # no torch in this python, say
    machine.write("python", "#!/bin/sh\nexit 1\n")
    launched = machine.run()
    assert (launched.code, launched.err) == (2, "error: hardware detection failed; try: make setup\n")


def test_finds_the_virtual_environment(tmp_path):
    machine = Machine(tmp_path, 2)
    folder = machine.repo / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "torchrun"):
        shutil.move(machine.bin / name, folder / name)
    assert machine.run().environment["PATH"].startswith(f"{folder}:")


def test_help(tmp_path):
    lines = Machine(tmp_path, 2).run("--help").out.splitlines()
    assert lines[0].startswith("Look at this machine, ")
    assert lines[-1].startswith("Several nodes: ")


# --- several nodes ----------------------------------------------------------------------------------------------------

JOB = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_PROCID": "0"}
TASK_PER_NODE = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
SOME_NODES = {"SLURM_STEP_NODELIST": "node[07-08]", "SLURM_JOB_NODELIST": "node[01-08]"}
ONE_NODE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
BY_HAND = "python TORCHRUN --nnodes=2 --node_rank=1 --master_addr=10.0.0.1"
BY_SRUN = "python TORCHRUN --nnodes=2 --node_rank=1 --master_addr=node07 --master_port=23456"


@pytest.mark.parametrize(
    ("gpus", "nodes", "variables", "expected"),
    [
        (4, 2, NODE, f"{BY_HAND} --master_port=29500 --nproc_per_node=4 SCRIPT"),
        (4, 2, NODE | {"MASTER_PORT": "7"}, f"{BY_HAND} --master_port=7 --nproc_per_node=4 SCRIPT"),
        # srun with a task per node; nodes of one GPU are joined too
        (4, 2, JOB | TASK_PER_NODE | SOME_NODES, f"{BY_SRUN} --nproc_per_node=4 SCRIPT"),
        (1, 2, JOB | TASK_PER_NODE, f"{BY_SRUN} --nproc_per_node=1 SCRIPT"),
        # a job of one node, and a step on one of two
        (4, 1, JOB | {"SLURM_NNODES": "1"}, FOUR),
        (4, 1, JOB | ONE_NODE, FOUR),
    ],
)
def test_nodes(tmp_path, gpus, nodes, variables, expected):
    machine = Machine(tmp_path, gpus)
    launched = machine.run(question=f"--nodes {nodes}", **variables)
    assert launched.argv == machine.command(f"{expected} --use_deepspeed"), launched.err


def test_srun_with_a_task_per_gpu(tmp_path):
    """The script alone, which reads srun's variables; one speaker; this task's cores."""
    machine = Machine(tmp_path, 1)
    task = JOB | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "6"}
    launched = machine.run(question="--nodes 2 --gpus 4", **task)
    assert launched.argv == machine.command("python SCRIPT --use_deepspeed")
    assert launched.environment["OMP_NUM_THREADS"] == "6"
    assert launched.out.endswith("\nEngine: deepspeed x 8\n")
    assert machine.run(question="--nodes 2 --gpus 4", **task | {"SLURM_PROCID": "5"}).out == ""


def test_sbatch_script(tmp_path):
    """It runs on the first node only, and starts itself on each."""
    machine = Machine(tmp_path, 4)
    words = "--num_gpus=4 --x 'a b'"
    start, itself = "srun --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1", f"{machine.repo / LAUNCHER} {words}"
    assert machine.run(words, **JOB).argv == shlex.split(f"{start} {itself}")
    launched = machine.run(words, **JOB, SLURM_CPUS_PER_TASK="48")
    assert launched.argv == shlex.split(f"{start} --cpus-per-task=48 {itself}")
