"""SLURM's job files on stubs, the Kubernetes manifest and the Dockerfile: what they ask for, start and restart."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from slurm_stub import Cluster, warn
from test_launch_distributed import Machine
from test_pages import ROOT, SCRIPTS, TASKS, flags_in, known_flags, read

MANIFEST = "configs/kubernetes/jobset.yaml"
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


# --- SLURM ------------------------------------------------------------------------------------------------------------


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
    script = SCRIPTS[task]
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


SMALL = "--tf_n_embd 16 --tf_n_layer 2 --tf_n_head 2 --encoder_n_layer 1 --n_transit 20 --n_latent 4 --batch_size 12"
SMALL += " --num_warmup_steps 2 --num_workers 0 --val_episodes 2 --eval_episodes 3 --eval_seeds 2"


@pytest.fixture(scope="module")
def darkroom(tmp_path_factory) -> Path:
    """A few learning histories."""
    folder = tmp_path_factory.mktemp("data") / "darkroom"
    command = [sys.executable, "-m", "tools.sample_data", "compressed_ad", folder, "--streams", "3", "--steps", "200"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_a_real_job_that_is_requeued_is_the_uninterrupted_run(darkroom, tmp_path, monkeypatch):
    """configs/slurm/compressed_ad.sbatch with the real launcher: told to leave, and started again."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    flags = [*SMALL.split(), "--data", darkroom, "--train_timesteps", "100", "--log_every", "5", "--save_every", "4"]
    run, cluster = tmp_path / "run", Cluster(tmp_path / "slurm")
    words = ["--num_gpus", 1, *flags, "--output_dir", run]
    assert warn(cluster.start("compressed_ad", words), lambda: any(run.glob("step_*.pt"))) == 143, cluster.log()
    assert "signal: saved at step" in cluster.log()
    assert [call[0] for call in cluster.calls()] == ["srun", "scancel", "scontrol"]

    # SLURM starts the same file again
    job = cluster.start("compressed_ad", words, SLURM_RESTART_COUNT="1")
    assert job.wait(timeout=240) == 0, cluster.log()
    assert [call[0] for call in cluster.calls()[3:]] == ["srun"]

    command = [sys.executable, "train.py", *flags, "--output_dir", tmp_path / "whole"]
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True, capture_output=True)
    compared = subprocess.run([sys.executable, "-m", "tools.verify", run, tmp_path / "whole"], cwd=ROOT)
    assert compared.returncode == 0


# --- Kubernetes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job_set() -> dict:
    """The JobSet's spec; the manifest's other object is the volume's claim."""
    claim, job_set = yaml.safe_load_all(read(MANIFEST))
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    return job_set["spec"]


@pytest.fixture(scope="module")
def node(job_set) -> dict:
    """The Job of all nodes."""
    (replicated,) = job_set["replicatedJobs"]
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]


def seconds_to_save() -> int:
    """What the launcher lets torchrun's processes have after a SIGTERM."""
    return int(re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)", read("launch_distributed_training.sh"))[1])


def test_wrong_input_ends_a_job_set_and_anything_else_restarts_it(job_set, node):
    """The job's one rule, and the one reason of the set's: all others are counted and restart."""
    (container,) = node["template"]["spec"]["containers"]
    exit_codes = {"containerName": container["name"], "operator": "In", "values": [2]}
    assert node["podFailurePolicy"] == {"rules": [{"action": "FailJob", "onExitCodes": exit_codes}]}
    assert job_set["failurePolicy"]["maxRestarts"] > 0
    (rule,) = job_set["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])

    # a failure policy wants pods that are not restarted; one that is lost fails the job, so that all nodes begin again
    assert node["template"]["spec"]["restartPolicy"] == "Never"
    assert node["backoffLimit"] == 0
    assert job_set["failurePolicy"]["restartStrategy"] == "BlockingRecreate"


def test_a_pod_has_time_to_save(node):
    grace = node["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= seconds_to_save() + 30


def test_the_nodes_find_each_other_and_their_folders(job_set, node):
    name = list(yaml.safe_load_all(read(MANIFEST)))[1]["metadata"]["name"]
    pod = node["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert node["completionMode"] == "Indexed"
    assert node["completions"] == node["parallelism"] == int(environment["NNODES"])

    # the host name of the first pod, as JobSet makes it up
    first = f"{name}-{job_set['replicatedJobs'][0]['name']}-0-0.{job_set['network']['subdomain']}"
    assert job_set["network"]["enableDNSHostnames"] is True
    assert environment["MASTER_ADDR"] == first

    # what is read and written lies on the volume
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    claim = next(iter(yaml.safe_load_all(read(MANIFEST))))
    assert mounts["/storage"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"

    flags = dict(word.split("=", 1) for word in container["args"])
    script = flags.pop("--script")
    assert set(flags) <= known_flags(script)
    assert flags["--resume_from"] == "auto"
    assert all(value.startswith("/storage/") for flag, value in flags.items() if flag != "--resume_from")

    # the user of the image
    assert pod["securityContext"]["runAsUser"] == int(instructions("USER")[-1])


def test_the_launcher_takes_the_manifests_words(node, tmp_path):
    """On the second node, with its four GPUs."""
    machine = Machine(tmp_path, 4)
    (container,) = node["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    words = shlex.join(container["args"])
    launched = machine.run(words, "--nodes 2 --no_deepspeed", NODE_RANK="1", **environment)
    assert launched.code == 0, launched.err

    meeting = "--nnodes=2 --node_rank=1 --master_addr=training-node-0-0.training --master_port=29500"
    start = machine.command(f"python TORCHRUN {meeting} --nproc_per_node=4 SCRIPT", "train_prs_med.py")
    assert launched.argv == [*start, *container["args"][1:]]


# --- the container ----------------------------------------------------------------------------------------------------


def instructions(kind: str = "") -> list[str]:
    """What stands behind each instruction of this kind in the Dockerfile; of all kinds, the whole lines."""
    text = read("Dockerfile").replace("\\\n", " ")
    lines = [" ".join(line.split()) for line in text.splitlines() if line and not line.startswith("#")]
    if not kind:
        return lines
    return [line.removeprefix(kind + " ") for line in lines if line.startswith(kind + " ")]


def test_the_dockerfile():
    """Packages before the project, so that a change of the project installs nothing; not root when it runs."""
    kinds = [line.split()[0] for line in instructions()]
    assert kinds == "FROM RUN ENV WORKDIR COPY RUN COPY RUN USER ENTRYPOINT CMD".split()
    assert instructions("FROM")[0].startswith("python:3.11-")
    assert instructions("COPY") == ["requirements.txt ./", ". ./"]
    assert "-r requirements.txt" in instructions("RUN")[1]
    assert int(instructions("USER")[0]) > 0
    *init, launcher = yaml.safe_load(instructions("ENTRYPOINT")[0])
    assert init == ["tini", "--"]
    assert "tini" in instructions("RUN")[0]
    assert (ROOT / launcher).stat().st_mode & 0o111

    # what is left out is nothing that git has
    ignored = read(".dockerignore").split()
    listed = subprocess.run(["git", "ls-files", "--", *ignored], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout == ""


@pytest.mark.soak
def test_the_dockerfiles_lines_in_order(tmp_path, darkroom):
    """In a clean environment, without those that need root: what was installed trains."""
    app = tmp_path / "app"
    app.mkdir()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    environment = {"PATH": f"{tmp_path}/env/bin:/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(line: str) -> None:
        done = subprocess.run(["sh", "-c", line], cwd=app, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

    # the packages, before the project is there
    _, install, _ = instructions("RUN")
    shutil.copy2(ROOT / "requirements.txt", app)
    run(install)
    # cp of many files replaces none
    (app / "requirements.txt").unlink()

    # the project, as git has it, and a run of it by the container's own entry
    run(f"cd {shlex.quote(str(ROOT))} && git ls-files -z | xargs -0 cp --parents -t {shlex.quote(str(app))}")
    launcher = yaml.safe_load(instructions("ENTRYPOINT")[0])[-1]
    flags = f"{SMALL} --data {darkroom} --train_timesteps 3 --output_dir {tmp_path}/run"
    run(f"{launcher} --script train.py --num_gpus 2 {flags}")
    assert (tmp_path / "run" / "summary.json").is_file()
