"""A SLURM of stubs: srun, scancel and scontrol write down how they were called, and do on one node what theirs do."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# srun's step is a session of its own, which no signal to the batch script's processes reaches. A SIGTERM to srun itself
# kills it, and scancel sends a signal to all its processes.
STUB = """\
#!{python}
import json, os, signal, subprocess, sys

folder = {folder!r} + "/"
name = os.path.basename(sys.argv[0])
with open(folder + "calls", "a") as file:
    file.write(json.dumps([name, *sys.argv[1:]]) + "\\n")

if name == "scancel":
    with open(folder + "step") as file:
        os.killpg(int(file.read()), signal.SIGTERM)

if name == "srun":
    command = sys.argv[1:]
    while command[0].startswith("--"):
        command.pop(0)
    step = subprocess.Popen(command, start_new_session=True, env=os.environ | {step})
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(step.pid, signal.SIGKILL))
    with open(folder + "step.new", "w") as file:
        file.write(str(step.pid))
    os.replace(folder + "step.new", folder + "step")
    code = step.wait()
    sys.exit(code if code >= 0 else 128 - code)
"""
JOB = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "2"}
STEP = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}
STEP |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


class Cluster:
    """Runs batch scripts as sbatch would, on one node; `repo` is where they were submitted."""

    def __init__(self, folder: Path, repo: Path = ROOT):
        self.folder = folder
        self.repo = repo
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in ("srun", "scancel", "scontrol"):
            stub = self.bin / name
            stub.write_text(STUB.format(python=sys.executable, folder=str(folder), step=STEP))
            stub.chmod(0o755)

    def start(self, name: str, words: list | tuple = (), **variables: str) -> subprocess.Popen:
        """A job of configs/slurm/<name>.sbatch, which lies elsewhere when it runs."""
        script = self.folder / "slurm_script"
        script.write_bytes((ROOT / "configs" / "slurm" / f"{name}.sbatch").read_bytes())
        environment = {**os.environ, **JOB, "SLURM_SUBMIT_DIR": str(self.repo), **variables}
        environment["PATH"] = f"{self.bin}:{os.environ['PATH']}"
        with open(self.folder / "log", "a") as log:
            command = ["bash", str(script), *map(str, words)]
            return subprocess.Popen(command, env=environment, cwd="/", stdout=log, stderr=subprocess.STDOUT)

    def calls(self) -> list[list[str]]:
        """Every call of a stub so far: its name and its words."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self) -> str:
        """What all the jobs have printed."""
        return (self.folder / "log").read_text()


def warn(job: subprocess.Popen, is_running, seconds: float = 200) -> int:
    """Tell a batch script that its time is nearly up, once its run has come so far; returns its exit code."""
    deadline = time.time() + seconds
    while job.poll() is None and time.time() < deadline and not is_running():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    return job.wait(timeout=seconds)
