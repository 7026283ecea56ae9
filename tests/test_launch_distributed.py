"""launch_distributed_training.sh: the exact command line for every machine, and a real run that is told to stop."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import ROOT, SAME

from hardware_utils import imagine_hardware, settings_on, shell_assignments, summary

LAUNCHER = "launch_distributed_training.sh"
ALONE = "--standalone"


class Machine:
    """The launcher in a folder of its own, on a machine of stubs that record how they were called.

    `python` answers `-m hardware_utils` with what that prints on a machine of `gpus` L4 and 32 cores.
    """

    def __init__(self, tmp_path, gpus: int, deepspeed: bool = True):
        self.bin, self.repo, self.gpus, self.deepspeed = tmp_path / "bin", tmp_path / "repo", gpus, deepspeed
        self.bin.mkdir()
        self.repo.mkdir()
        for name in (LAUNCHER, "launch_functions.sh"):
            shutil.copy2(ROOT / name, self.repo)
        for name in ("train_mimic_cxr.py", "train_survival.py"):
            (self.repo / name).touch()
        self.mimic, self.other = (str(self.repo / name) for name in ("train_mimic_cxr.py", "train_survival.py"))
        recorder = f"#!{sys.executable}\nimport json, os, sys\nname = os.path.basename(sys.argv[0])\n"
        recorder += f"folder = {str(tmp_path)!r}\n"
        answer = "if sys.argv[1:3] == ['-m', 'hardware_utils']:\n"
        answer += "    json.dump([sys.argv[3:], os.getcwd()], open(folder + '/asked', 'w'))\n"
        answer += "    sys.exit(print(open(folder + '/facts').read()))\n"
        seen = "json.dump([[name, *sys.argv[1:]], dict(os.environ)], open(folder + '/seen', 'w'))\n"
        for name in ("torchrun", "srun"):
            self.write(name, recorder + seen)
        self.write("python", recorder + answer + seen)
        self.write("scontrol", "#!/bin/sh\n[ \"$*\" = 'show hostnames node[07-08]' ] && printf 'node07\\nnode08\\n'\n")

    def write(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, words: str = "", processes: int | None = None, nodes: int = 1, plain: bool = False, **variables: str):
        """(finished launcher, argv that it became, its environment); asserts what it asked hardware_utils.

        processes: on each node, where they are not one per GPU; plain: DeepSpeed is out of the question.
        """
        facts = imagine_hardware(self.gpus, 24.0 if self.gpus else None, 8.9, 32, 100.0, self.deepspeed)
        facts["processes_per_node"] = processes or self.gpus or 1
        settings = settings_on(facts, facts["processes_per_node"], nodes, not plain)
        facts |= {"summary": summary(facts, settings), "settings": settings}
        folder = self.bin.parent
        (folder / "facts").write_text(shell_assignments(facts))
        env = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": "/tmp", **variables}
        command = [str(self.repo / LAUNCHER), *shlex.split(words)]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=30)
        if (folder / "asked").exists():
            given = ["--shell", "--nodes", str(nodes), *(["--gpus", str(processes)] if processes else [])]
            expected = [*given, *(["--no_deepspeed"] if plain else [])]
            assert json.loads((folder / "asked").read_text()) == [expected, str(self.repo)]
        return done, *(json.loads((folder / "seen").read_text()) if (folder / "seen").exists() else (None, {}))


def torchrun(processes: int, *words: str) -> list[str]:
    return ["torchrun", f"--nproc_per_node={processes}", *words]


@pytest.mark.parametrize("deepspeed", [True, False])
@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
def test_the_guides_diagram(tmp_path, gpus, deepspeed):
    machine = Machine(tmp_path, gpus, deepspeed)
    done, argv, env = machine.run("--config configs/default_config.yaml --epochs 3")
    assert done.returncode == 0, done.stderr
    words = [machine.mimic, "--config", "configs/default_config.yaml", "--epochs", "3"]
    flag = "--use_deepspeed" if deepspeed else "--use_ddp"
    assert argv == (["python", *words] if gpus < 2 else torchrun(gpus, ALONE, *words, flag))
    lines = done.stdout.splitlines()
    assert 3 <= len(lines) <= 6
    found = "no GPU" if not gpus else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    found += " (planned GPU, 24.0 GB)" if gpus else ""
    assert lines[0] == f"Detected: {found}, 32 CPU cores, 100.0 GB RAM available"
    assert any(line.startswith(f"Settings: batch {16 if gpus else 8} x accumulation") for line in lines)
    engine = "python" if gpus < 2 else "deepspeed" if deepspeed else "torchrun"
    assert lines[-1].startswith(f"Engine:   {engine} x {gpus or 1} by {argv[0]} ")
    assert env["OMP_NUM_THREADS"] == str(32 // (gpus or 1))


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
    done, argv, _ = machine.run(words, **facts)
    assert done.returncode == 0, done.stderr
    assert argv == [{"MIMIC": machine.mimic, "OTHER": machine.other}.get(word, word) for word in expected]


def test_cpu_processes(tmp_path):
    machine = Machine(tmp_path, 0)
    _, argv, env = machine.run("--num_gpus 3", processes=3)
    assert argv == torchrun(3, ALONE, machine.mimic, "--use_deepspeed")
    assert env["OMP_NUM_THREADS"] == "10"


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
        ("--csv_path a.csv", {}, "--csv_path belongs to another script; add --script train_survival_distributed.py"),
        ("--epochs 3 --data_root=data", {}, "--data_root belongs to another script; add --script train_prs_med.py"),
        ("--dataset_path data", {}, "--dataset_path belongs to another script; add --script train_accelerate.py"),
        ("--data x.hdf5 --lr 1", {}, "--data belongs to another script; add --script train.py"),
    ],
)
def test_refuses(tmp_path, words, facts, message):
    done, argv, _ = Machine(tmp_path, 4, deepspeed=False).run(words, **facts)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert argv is None


def test_detection_fails(tmp_path):
    machine = Machine(tmp_path, 4)
    machine.write("python", "#!/bin/sh\nexit 1\n")
    done, argv, _ = machine.run()
    assert (done.returncode, argv) == (2, None)
    assert done.stderr == "error: hardware detection failed; try: make setup\n"


def test_environment(tmp_path):
    machine = Machine(tmp_path, 4)
    ours = {
        "OMP_NUM_THREADS": "8",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",
        "NCCL_DEBUG": "WARN",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    env = machine.run(WANDB_MODE="offline", CUDA_VISIBLE_DEVICES="3,1")[2]
    assert {name: env[name] for name in ours} == ours
    assert (env["WANDB_MODE"], env["CUDA_VISIBLE_DEVICES"]) == ("offline", "3,1")
    assert "NCCL_IB_DISABLE" not in env
    mine = dict.fromkeys(ours, "mine") | {"OMP_NUM_THREADS": "4,2"}
    env = machine.run(**mine)[2]
    assert {name: env[name] for name in ours} == mine
    assert machine.run(PYTORCH_CUDA_ALLOC_CONF="old name")[2]["PYTORCH_ALLOC_CONF"] == "old name"


def test_dry_run_and_exit_code(tmp_path):
    machine = Machine(tmp_path, 2)
    done, argv, _ = machine.run("--dry_run --index_dir 'my data'")
    assert argv is None
    expected = f"torchrun --nproc_per_node=2 --standalone {machine.mimic} --index_dir my\\ data --use_deepspeed "
    assert done.stdout.splitlines()[-1] == expected
    machine.write("torchrun", "#!/bin/sh\nexit 77\n")
    assert machine.run()[0].returncode == 77


def test_finds_the_virtual_environment(tmp_path):
    machine = Machine(tmp_path, 2)
    folder = machine.repo / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "torchrun"):
        shutil.move(machine.bin / name, folder / name)
    done, argv, env = machine.run()
    assert done.returncode == 0, done.stderr
    assert argv[0] == "torchrun"
    assert env["PATH"].startswith(f"{folder}:")


def test_help(tmp_path):
    done, argv, _ = Machine(tmp_path, 2).run("--help")
    assert (done.returncode, argv) == (0, None)
    for flag in ("--config", "--num_gpus", "--deepspeed", "--torchrun", "--debug", "--script", "--dry_run"):
        assert flag in done.stdout


# --- several nodes ----------------------------------------------------------------------------------------------------

JOB = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_PROCID": "0"}
MEET = ["--master_addr=node07", "--master_port=23456"]


def test_srun_with_a_task_per_gpu(tmp_path):
    """(a): this is one of 8 tasks; python directly, one speaker, this task's cores."""
    machine = Machine(tmp_path, 1)
    step = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "6"}
    done, argv, env = machine.run(processes=4, nodes=2, **JOB, **step)
    assert done.returncode == 0, done.stderr
    assert argv == ["python", machine.mimic, "--use_deepspeed"]
    assert env["OMP_NUM_THREADS"] == "6"
    assert "Engine:   deepspeed x 8 " in done.stdout
    assert machine.run(processes=4, nodes=2, **JOB | step | {"SLURM_PROCID": "5"})[0].stdout == ""


@pytest.mark.parametrize("gpus", [1, 4])
def test_srun_with_a_task_per_node(tmp_path, gpus):
    """(b): torchrun joins the nodes, also nodes of one GPU."""
    machine = Machine(tmp_path, gpus)
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_NODEID": "1"}
    done, argv, _ = machine.run("--resume_from auto", nodes=2, **JOB, **step)
    assert done.returncode == 0, done.stderr
    place = ["--nnodes=2", "--node_rank=1", *MEET]
    assert argv == torchrun(gpus, *place, machine.mimic, "--resume_from", "auto", "--use_deepspeed")


def test_one_node_of_slurm(tmp_path):
    machine = Machine(tmp_path, 4)
    job = JOB | {"SLURM_NNODES": "1"}
    for step in ({}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}):
        assert machine.run(**job, **step)[1] == torchrun(4, ALONE, machine.mimic, "--use_deepspeed")


def test_sbatch_script(tmp_path):
    """(c): on its own node only so far, it starts itself on each."""
    machine = Machine(tmp_path, 4)
    own = [str(machine.repo / LAUNCHER), "--num_gpus=4", "--x", "a b"]
    start = ["srun", "-n", "2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    assert machine.run("--num_gpus=4 --x 'a b'", **JOB)[1] == [*start, *own]
    assert machine.run("--num_gpus=4 --x 'a b'", **JOB, SLURM_CPUS_PER_TASK="48")[1] == [*start, "-c", "48", *own]


def test_nodes_without_slurm(tmp_path):
    machine = Machine(tmp_path, 4)
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    place = ["--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=29500"]
    assert machine.run(nodes=2, **variables)[1] == torchrun(4, *place, machine.mimic, "--use_deepspeed")


# --- a real run -------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_sigterm_saves_and_leaves_no_process(data, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    words = ["--script", "train_prs_med.py", "--num_gpus", "2", "--data_root", data, "--checkpoint_dir", out, *SAME]
    words += ["--batch_size", "3", "--num_epochs", "200", "--save_every", "1"]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with open(log, "w") as file:
        launcher = psutil.Popen(
            [str(ROOT / LAUNCHER), *map(str, words)], cwd=tmp_path, env=env, stdout=file, stderr=subprocess.STDOUT
        )
    known = []
    try:
        deadline = time.time() + 60
        while not list(out.glob("step_*.pt")) and launcher.poll() is None and time.time() < deadline:
            time.sleep(0.05)
        known = launcher.children(recursive=True)
        assert len([p for p in known if "train_prs_med.py" in " ".join(p.cmdline())]) >= 2, log.read_text()
        assert "torch" in " ".join(launcher.cmdline())  # the launcher has become torchrun
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=40) == 143
        _, alive = psutil.wait_procs(known, timeout=10)
        assert not alive, f"left behind: {alive}"
    finally:
        for process in [launcher, *known]:
            if process.is_running():
                process.kill()
    text = log.read_text()
    assert "Traceback" not in text
    assert "Engine:   torchrun x 2 " in text
    saved = int(text.split("signal: saved at step ")[-1].split(";")[0])
    assert torch.load(out / "last.pt", weights_only=True)["step"] == saved
