"""launch_distributed_training.sh: the exact command line for every machine, and a real run that is told to stop."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from background import Run
from conftest import ROOT

from old.hardware_utils import imagine_hardware, settings_on, shell_assignments, summary

LAUNCHER = "launch_distributed_training.sh"
ALONE = "--standalone"
# on the new foundation
MOVED = ("train_prs_med.py", "train_survival_distributed.py")


# A stub that records how it was called; `python` also answers what a launcher asks of the hardware detection.
RECORDER = """\
#!{python}
import json, os, sys

def record(name, **values):
    with open({folder!r} + "/" + name, "w") as file:
        json.dump(values, file)

name = os.path.basename(sys.argv[0])
if name == "python" and sys.argv[1:3] == ["-m", "old.hardware_utils"]:
    record("asked", flags=sys.argv[3:], folder=os.getcwd())
    sys.exit(print(open({folder!r} + "/facts").read()))
record("seen", argv=[name, *sys.argv[1:]], environment=dict(os.environ))
"""
SCONTROL = """\
#!/bin/sh
[ "$*" = 'show hostnames node[07-08]' ] && printf 'node07\\nnode08\\n'
"""


class Launched(NamedTuple):
    """A launcher that has ended, and the command line that it became; argv is None where it became none."""

    done: subprocess.CompletedProcess
    argv: list[str] | None
    environment: dict[str, str]


class Machine:
    """The launcher in a folder of its own, on a machine of stubs that record how they were called.

    `python` answers `-m old.hardware_utils` with what that prints on a machine of `gpus` L4 and 32 cores.
    """

    def __init__(self, folder: Path, gpus: int, deepspeed: bool = True):
        self.folder = folder
        self.gpus = gpus
        self.deepspeed = deepspeed

        # the launcher and four scripts
        self.repo = folder / "repo"
        self.repo.mkdir()
        for name in (LAUNCHER, "launch_functions.sh"):
            shutil.copy2(ROOT / name, self.repo)
        self.launcher = str(self.repo / LAUNCHER)
        self.mimic = str(self.repo / "train_mimic_cxr.py")
        self.other = str(self.repo / "train_survival.py")
        self.prs_med, self.survival = (str(self.repo / script) for script in MOVED)
        for script in (self.mimic, self.other, self.prs_med, self.survival):
            Path(script).touch()

        # the commands that it can start or ask
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("torchrun", "srun", "python"):
            self.write(name, RECORDER.format(python=sys.executable, folder=str(folder)))
        self.write("scontrol", SCONTROL)

    def write(self, name: str, text: str) -> None:
        """Make a command of this text."""
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def read(self, name: str) -> dict | None:
        """What a stub has recorded, None where it was not called."""
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def run(self, words: str = "", processes: int | None = None, nodes: int = 1, plain: bool = False, **variables: str):
        """Run the launcher; asserts what it asked hardware_utils.

        processes: on each node, where they are not one per GPU; plain: DeepSpeed is out of the question.
        """
        facts = imagine_hardware(self.gpus, 24.0 if self.gpus else None, 8.9, 32, 100.0, self.deepspeed)
        facts["processes_per_node"] = processes or self.gpus or 1
        settings = settings_on(facts, facts["processes_per_node"], nodes, not plain)
        facts |= {"summary": summary(facts, settings), "settings": settings}
        (self.folder / "facts").write_text(shell_assignments(facts))

        environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": "/tmp", **variables}
        command = [self.launcher, *shlex.split(words)]
        done = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=30)

        # what it asked
        if asked := self.read("asked"):
            expected = ["--shell", "--nodes", str(nodes)]
            expected += ["--gpus", str(processes)] if processes else []
            expected += ["--no_deepspeed"] if plain else []
            assert asked == {"flags": expected, "folder": str(self.repo)}

        seen = self.read("seen") or {"argv": None, "environment": {}}
        return Launched(done, seen["argv"], seen["environment"])


def torchrun(processes: int, *words: str) -> list[str]:
    """The command line of torchrun with so many processes on a node."""
    return ["torchrun", f"--nproc_per_node={processes}", *words]


FOUND = {0: "no GPU", 1: "1 GPU", 2: "2 GPUs", 4: "4 GPUs", 8: "8 GPUs"}


@pytest.mark.parametrize("deepspeed", [True, False])
@pytest.mark.parametrize("gpus", FOUND)
def test_the_guides_diagram(tmp_path, gpus, deepspeed):
    machine = Machine(tmp_path, gpus, deepspeed)
    launched = machine.run("--config configs/default_config.yaml --epochs 3")
    assert launched.done.returncode == 0, launched.done.stderr

    # the command: python alone for one process
    script = [machine.mimic, "--config", "configs/default_config.yaml", "--epochs", "3"]
    if gpus < 2:
        engine = "python"
        expected = ["python", *script]
    else:
        engine = "deepspeed" if deepspeed else "torchrun"
        flag = "--use_deepspeed" if deepspeed else "--use_ddp"
        expected = ["torchrun", f"--nproc_per_node={gpus}", ALONE, *script, flag]
    assert launched.argv == expected
    assert launched.environment["OMP_NUM_THREADS"] == str(32 // (gpus or 1))

    # what it says of the machine, the settings and the engine
    lines = launched.done.stdout.splitlines()
    assert 3 <= len(lines) <= 6
    planned = " (planned GPU, 24.0 GB)" if gpus else ""
    assert lines[0] == f"Detected: {FOUND[gpus]}{planned}, 32 CPU cores, 100.0 GB RAM available"
    assert any(line.startswith(f"Settings: batch {16 if gpus else 8} x accumulation") for line in lines)
    assert lines[-1].startswith(f"Engine:   {engine} x {gpus or 1} by {expected[0]} ")


@pytest.mark.parametrize(
    ("words", "facts", "expected"),
    [
        ("--num_gpus 2", {"processes": 2}, torchrun(2, ALONE, "MIMIC", "--use_deepspeed")),
        ("--num_gpus=4 --torchrun", {"processes": 4, "plain": True}, torchrun(4, ALONE, "MIMIC", "--use_ddp")),
        ("--use_ddp --num_gpus 2", {"processes": 2, "plain": True}, torchrun(2, ALONE, "MIMIC", "--use_ddp")),
        ("--num_gpus 1", {"processes": 1}, ["python", "MIMIC"]),
        ("--num_gpus 1 --deepspeed", {"processes": 1}, torchrun(1, ALONE, "MIMIC", "--use_deepspeed")),
        ("--num_gpus 1 --torchrun", {"processes": 1, "plain": True}, torchrun(1, ALONE, "MIMIC", "--use_ddp")),
        ("--debug", {}, torchrun(4, ALONE, "MIMIC", "--use_deepspeed", "--debug")),
        ("--a 'b  c' --x=$y --num_gpus 2 *", {"processes": 2},
         torchrun(2, ALONE, "MIMIC", "--a", "b  c", "--x=$y", "*", "--use_deepspeed")),
        ("--script train_survival.py --fold 1", {"plain": True}, torchrun(4, ALONE, "OTHER", "--fold", "1")),
        ("--script=train_survival.py --debug", {"plain": True}, torchrun(4, ALONE, "OTHER", "--max_steps", "2")),
        ("--script train_survival.py --torchrun", {"plain": True}, torchrun(4, ALONE, "OTHER")),
    ],
)  # fmt: skip
def test_flags(tmp_path, words, facts, expected):
    machine = Machine(tmp_path, 4)
    launched = machine.run(words, **facts)
    assert launched.done.returncode == 0, launched.done.stderr
    scripts = {"MIMIC": machine.mimic, "OTHER": machine.other}
    assert launched.argv == [scripts.get(word, word) for word in expected]


@pytest.mark.parametrize("script", MOVED)
def test_scripts_that_moved_are_started_by_utils_torchrun(tmp_path, script):
    machine = Machine(tmp_path, 4)
    launched = machine.run(f"--script {script} --seed 3", plain=True)
    start = ["python", str(machine.repo / "utils/torchrun.py"), "--nproc_per_node=4", ALONE]
    assert launched.argv == [*start, str(machine.repo / script), "--seed", "3"]
    assert "Engine:   torchrun x 4 by python " in launched.done.stdout


def test_cpu_processes(tmp_path):
    machine = Machine(tmp_path, 0)
    launched = machine.run("--num_gpus 3", processes=3)
    assert launched.argv == torchrun(3, ALONE, machine.mimic, "--use_deepspeed")
    assert launched.environment["OMP_NUM_THREADS"] == "10"


@pytest.mark.parametrize(
    ("words", "facts", "message"),
    [
        ("--num_gpus 8", {"processes": 8}, "--num_gpus 8: there are 4 GPUs; ask for at most 4"),
        ("--num_gpus two", {}, "from 1 to 9999, not 'two'"),
        ("--num_gpus=0", {}, "from 1 to 9999, not '0'"),
        ("--num_gpus", {}, "from 1 to 9999, not ''"),
        ("--deepspeed --torchrun", {}, "--deepspeed: not with --torchrun or another script"),
        ("--deepspeed --script train_survival.py", {}, "--deepspeed: not with --torchrun or another script"),
        ("--use_deepspeed --torchrun", {}, "--deepspeed: not with --torchrun"),
        ("--deepspeed", {}, "--deepspeed: it is not installed"),
        ("--script nowhere.py", {}, "nowhere.py; check --script"),
        ("--script", {}, "--script needs a value"),
        (f"--script {MOVED[0]} --elastic", {}, "--elastic: not with train_prs_med.py; see "),
        (f"--script {MOVED[1]} --elastic", {}, "--elastic: not with train_survival_distributed.py; see "),
        # a flag of a script that was not asked for
        ("--csv_path a.csv", {}, "--csv_path belongs to another script; add --script train_survival_distributed.py"),
        ("--epochs 3 --data_root=data", {}, "--data_root belongs to another script; add --script train_prs_med.py"),
        ("--dataset_path data", {}, "--dataset_path belongs to another script; add --script train_accelerate.py"),
        ("--data x.hdf5 --lr 1", {}, "--data belongs to another script; add --script train.py"),
    ],
)
def test_refuses(tmp_path, words, facts, message):
    launched = Machine(tmp_path, 4, deepspeed=False).run(words, **facts)
    assert launched.done.returncode == 2
    assert message in launched.done.stderr
    assert len(launched.done.stderr.splitlines()) == 1
    assert launched.argv is None


def test_detection_fails(tmp_path):
    machine = Machine(tmp_path, 4)
    machine.write("python", "#!/bin/sh\nexit 1\n")
    launched = machine.run()
    assert launched.done.returncode == 2
    assert launched.argv is None
    assert launched.done.stderr == "error: hardware detection failed; try: make setup\n"


DEFAULTS = {
    "OMP_NUM_THREADS": "8",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",
    "NCCL_DEBUG": "WARN",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def test_environment(tmp_path):
    environment = Machine(tmp_path, 4).run(WANDB_MODE="offline", CUDA_VISIBLE_DEVICES="3,1").environment
    assert {name: environment[name] for name in DEFAULTS} == DEFAULTS
    assert environment["WANDB_MODE"] == "offline"
    assert environment["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert "NCCL_IB_DISABLE" not in environment


def test_environment_that_the_user_set(tmp_path):
    machine = Machine(tmp_path, 4)
    given = dict.fromkeys(DEFAULTS, "given") | {"OMP_NUM_THREADS": "4,2"}
    environment = machine.run(**given).environment
    assert {name: environment[name] for name in DEFAULTS} == given

    # the name that torch had for it before
    environment = machine.run(PYTORCH_CUDA_ALLOC_CONF="old name").environment
    assert environment["PYTORCH_ALLOC_CONF"] == "old name"


def test_dry_run_and_exit_code(tmp_path):
    machine = Machine(tmp_path, 2)
    launched = machine.run("--dry_run --index_dir 'my data'")
    assert launched.argv is None
    command = f"torchrun --nproc_per_node=2 --standalone {machine.mimic} --index_dir my\\ data --use_deepspeed "
    assert launched.done.stdout.splitlines()[-1] == command

    machine.write("torchrun", "#!/bin/sh\nexit 77\n")
    assert machine.run().done.returncode == 77


def test_finds_the_virtual_environment(tmp_path):
    machine = Machine(tmp_path, 2)
    folder = machine.repo / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "torchrun"):
        shutil.move(machine.bin / name, folder / name)
    launched = machine.run()
    assert launched.done.returncode == 0, launched.done.stderr
    assert launched.argv[0] == "torchrun"
    assert launched.environment["PATH"].startswith(f"{folder}:")


def test_help(tmp_path):
    launched = Machine(tmp_path, 2).run("--help")
    assert launched.done.returncode == 0
    assert launched.argv is None
    for flag in ("--config", "--num_gpus", "--deepspeed", "--torchrun", "--debug", "--script", "--dry_run"):
        assert flag in launched.done.stdout


# --- several nodes ----------------------------------------------------------------------------------------------------

JOB = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_PROCID": "0"}
MEET = ["--master_addr=node07", "--master_port=23456"]


def test_srun_with_a_task_per_gpu(tmp_path):
    """(a): this is one of 8 tasks; python directly, one speaker, this task's cores."""
    machine = Machine(tmp_path, 1)
    task = JOB | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "6"}
    launched = machine.run(processes=4, nodes=2, **task)
    assert launched.done.returncode == 0, launched.done.stderr
    assert launched.argv == ["python", machine.mimic, "--use_deepspeed"]
    assert launched.environment["OMP_NUM_THREADS"] == "6"
    assert "Engine:   deepspeed x 8 " in launched.done.stdout

    launched = machine.run(processes=4, nodes=2, **task | {"SLURM_PROCID": "5"})
    assert launched.done.stdout == ""


@pytest.mark.parametrize("gpus", [1, 4])
def test_srun_with_a_task_per_node(tmp_path, gpus):
    """(b): torchrun joins the nodes, also nodes of one GPU."""
    machine = Machine(tmp_path, gpus)
    task = JOB | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_NODEID": "1"}
    launched = machine.run("--resume_from auto", nodes=2, **task)
    assert launched.done.returncode == 0, launched.done.stderr
    meeting = ["--nnodes=2", "--node_rank=1", *MEET]
    assert launched.argv == torchrun(gpus, *meeting, machine.mimic, "--resume_from", "auto", "--use_deepspeed")


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}])
def test_one_node_of_slurm(tmp_path, step):
    machine = Machine(tmp_path, 4)
    launched = machine.run(**JOB | {"SLURM_NNODES": "1"} | step)
    assert launched.argv == torchrun(4, ALONE, machine.mimic, "--use_deepspeed")


def test_sbatch_script(tmp_path):
    """(c): on its own node only so far, it starts itself on each."""
    machine = Machine(tmp_path, 4)
    words = "--num_gpus=4 --x 'a b'"
    own = [machine.launcher, "--num_gpus=4", "--x", "a b"]
    start = ["srun", "-n", "2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    assert machine.run(words, **JOB).argv == [*start, *own]
    assert machine.run(words, **JOB, SLURM_CPUS_PER_TASK="48").argv == [*start, "-c", "48", *own]


def test_nodes_without_slurm(tmp_path):
    machine = Machine(tmp_path, 4)
    launched = machine.run(nodes=2, NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    meeting = ["--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=29500"]
    assert launched.argv == torchrun(4, *meeting, machine.mimic, "--use_deepspeed")


# --- a real run -------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_sigterm_saves_and_leaves_no_process(compressed_ad_flags, tmp_path, monkeypatch):
    """The launcher has become torchrun: a signal to it reaches both workers, and its exit code is theirs."""
    run_folder = tmp_path / "run"
    monkeypatch.delenv("OMP_NUM_THREADS")
    launcher = [ROOT / LAUNCHER, "--script", "train.py", "--num_gpus", "2"]
    flags = compressed_ad_flags(run_folder, "--train_timesteps", "9999", "--eval_interval", "0", "--save_every", "1")
    run = Run([*launcher, *flags], "train.py", run_folder, cwd=tmp_path)

    run.wait_for_step(1)
    assert len(run.workers()) >= 2
    assert "torch" in " ".join(run.launcher.cmdline())
    run.kill("launcher", signal.SIGTERM)
    assert run.end() == 143

    text = (tmp_path / "run.log").read_text()
    assert "Traceback" not in text
    assert "Engine:   torchrun x 2 " in text
    saved = int(text.split("signal: saved at step ")[-1].split(";")[0])
    assert torch.load(run_folder / "last.pt", weights_only=True)["step"] == saved
