"""Job files of SLURM, on stubs: what they ask for, what they start, and when a job goes back into the queue."""

import re
import shutil
import subprocess

import pytest
from conftest import ROOT
from slurm_stub import Cluster, warn
from test_contract import SCRIPTS, TASKS
from test_pages import flags_in, known_flags, read

JOB_FILES = {task: f"configs/slurm/{task}.sbatch" for task in TASKS}
# Options of sbatch that its manual lists, as far as they are used here.
OPTIONS = "job-name nodes ntasks-per-node gpus-per-node cpus-per-task mem time signal requeue open-mode output".split()
OPTIONS += ["partition", "account"]

# In place of the launcher: it leaves with its own code, or waits until it is told to save.
LAUNCHER = """\
#!/usr/bin/env bash
exec 2>/dev/null
trap 'sleep 0.2; exit "${SAVED_CODE:-143}"' TERM
touch started
if [[ ${OWN_CODE:-} ]]; then exit "$OWN_CODE"; fi
for ((i = 0; i < 600; i++)); do sleep 0.05; done
"""


@pytest.fixture
def cluster(tmp_path):
    """A cluster of stubs, with a launcher that trains nothing."""
    repo = tmp_path / "repo"
    repo.mkdir()
    shutil.copy2(ROOT / "launch_functions.sh", repo)
    launcher = repo / "launch_distributed_training.sh"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    return Cluster(tmp_path / "slurm", repo)


def warned(cluster: Cluster, task: str = "prs_med", words: tuple = (), **variables: str) -> int:
    """The exit code of a job whose time is nearly up while it trains."""
    return warn(cluster.start(task, words, **variables), (cluster.repo / "started").exists)


def finished(cluster: Cluster, **variables: str) -> int:
    """The exit code of a job that is left alone."""
    return cluster.start("prs_med", **variables).wait(timeout=30)


def requeues(cluster: Cluster) -> list[list[str]]:
    return [call for call in cluster.calls() if call[0] == "scontrol"]


@pytest.mark.parametrize("task", TASKS)
def test_a_job_file(task):
    """Valid for bash and for sbatch; it trains this task, with flags that exist and files that are there."""
    path = JOB_FILES[task]
    assert f"sbatch {path}" in read("docs/clusters.md")
    subprocess.run(["bash", "-n", ROOT / path], check=True)

    # every directive stands before the first command, where sbatch looks for them
    lines = read(path).splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    directives = [line for line in lines if re.match("#+SBATCH", line)]
    assert directives == [line for line in lines[:first] if re.match("#+SBATCH", line)]
    options = dict(re.fullmatch(r"#+SBATCH --([a-z-]+)=?(.*)", line).groups() for line in directives)
    assert set(options) <= set(OPTIONS)

    # the batch script alone is told, 2 minutes before the end; the log of a requeued job goes on
    assert options["signal"] == "B:USR1@120"
    assert "requeue" in options
    assert options["open-mode"] == "append"
    assert options["ntasks-per-node"] == "1"

    # the command, which resumes
    command = read(path).split("train_under_slurm ")[1]
    script = SCRIPTS[task].name
    assert script in command or task == "mimic_cxr"
    assert '--resume_from auto "$@"' in command
    assert flags_in(command) <= known_flags("launch_distributed_training.sh") & (known_flags(script) | {"--script"})
    for name in re.findall(r"configs/\S+", command):
        assert (ROOT / name).is_file()


@pytest.mark.parametrize("task", TASKS)
def test_at_the_time_limit_the_run_saves_and_the_job_is_requeued(task, cluster):
    """In this order: srun, scancel's SIGTERM to the step alone, the end of the step, scontrol."""
    code = warned(cluster, task, ("--seed", "3"), SLURM_NNODES="2", SLURM_CPUS_PER_TASK="6")
    start, *rest = cluster.calls()
    assert code == 143
    assert rest == [["scancel", "--signal=TERM", "77"], ["scontrol", "requeue", "77"]]
    assert "requeue 1 of at most 30, after exit code 143" in cluster.log()

    # srun starts the launcher once on each node
    step = ["--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=6"]
    assert start[:5] == ["srun", *step]
    assert start[5] == "./launch_distributed_training.sh"
    assert start[-4:] == ["--resume_from", "auto", "--seed", "3"]


# Environment, whether the time is up, and what is printed; a job that is requeued says so.
ENDS = [
    # done, or wrong input, also when told to leave
    ({"OWN_CODE": "0"}, False, ""),
    ({"OWN_CODE": "2"}, False, ""),
    ({"SAVED_CODE": "0"}, True, ""),
    ({"SAVED_CODE": "2"}, True, ""),
    # stopped by the user
    ({"OWN_CODE": "143", "SECONDS": "9000"}, False, ""),
    ({"OWN_CODE": "130", "SECONDS": "9000"}, False, ""),
    # a failure, early and late
    ({"OWN_CODE": "1"}, False, "not requeued: exit code 1 in the first 10 minutes"),
    ({"OWN_CODE": "1", "SECONDS": "9000"}, False, "requeue 1 of at most 30, after exit code 1"),
    ({"OWN_CODE": "137", "SECONDS": "9000"}, False, "requeue 1 of at most 30, after exit code 137"),
    ({"SAVED_CODE": "137"}, True, "requeue 1 of at most 30, after exit code 137"),
    # too often, and an array
    ({"SLURM_RESTART_COUNT": "29"}, True, "requeue 30 of at most 30, after exit code 143"),
    ({"SLURM_RESTART_COUNT": "30"}, True, "not requeued: 30 times already; submit the job again, or set MAX_REQUEUES"),
    ({"SLURM_RESTART_COUNT": "2", "MAX_REQUEUES": "2"}, True, "not requeued: 2 times already"),
    ({"SLURM_ARRAY_JOB_ID": "70"}, True, "not requeued: the tasks of an array job are not; submit this one again"),
]


@pytest.mark.parametrize(("variables", "told", "line"), ENDS)
def test_when_a_job_is_requeued(variables, told, line, cluster):
    run = warned if told else finished
    code = run(cluster, **variables)
    assert code == int(variables.get("OWN_CODE") or variables.get("SAVED_CODE") or 143)
    assert line in cluster.log()
    assert bool(cluster.log()) == bool(line)
    assert requeues(cluster) == ([["scontrol", "requeue", "77"]] if line.startswith("requeue") else [])


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_RESTART_COUNT", "MAX_REQUEUES", "SLURM_NNODES"])
def test_a_hostile_value(name, cluster):
    """Checked before any arithmetic of bash, which would run the command."""
    mark = cluster.folder / "ran"
    job = cluster.start("prs_med", **{name: f"PATH[$(touch {mark})]"})
    assert job.wait(timeout=30) == 2
    assert f"error: {name} must be a whole number" in cluster.log()
    assert not mark.exists()
    assert cluster.calls() == []
