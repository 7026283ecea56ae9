"""The launchers: commands, invalid words and variables, exit codes and signals; Kubernetes and container files.

test_promise.py checks that every launcher starts the same run.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from test_pages import help_flags

from utils import launch_4gpu, torchrun
from utils.cli import InputError

ROOT = Path(__file__).resolve().parents[1]
# words that bash arithmetic, eval or missing quotes would execute or expand, and words that are not whole numbers
HOSTILE = ["x[$(touch MARK)]", "`touch MARK`", "2;touch MARK", "2\ntouch MARK", "*"]
NOT_WHOLE = ["08", "2.0", "two", "٣"]
TORCHRUN = str(ROOT / "utils/torchrun.py")


@pytest.fixture
def launch(tmp_path):
    """launch(file, words, variables): run a shell launcher; its python records its arguments and exits with code 7."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\n[ "$2" = utils.hardware_utils ] && echo "asked $*" && exit\n'
                      f'printf "%s\\n" "$@" >{tmp_path}/words\nexit 7\n')  # fmt: skip
    python.chmod(0o755)

    def run(file: str, words: list[str], **variables: str):
        (tmp_path / "words").unlink(missing_ok=True)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "VIRTUAL_ENV": "is set", **variables}
        command = ["bash", str(ROOT / file), *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert not (tmp_path / "MARK").exists()
        started = (tmp_path / "words").read_text().splitlines() if (tmp_path / "words").exists() else None
        return done, started

    return run


SINGLE, DETECT, CASCADE = "run_multi_gpu_train.sh", "launch_distributed_training.sh", "train_4gpu.sh"


@pytest.mark.parametrize(
    ("file", "words", "expected"),
    [
        (SINGLE, "", "PRS_MED --data_root data"),
        (SINGLE, "'my data' 4 -- --x '$y;z' ''", "--nproc_per_node=4 PRS_MED --data_root 'my data' --x '$y;z' ''"),
        (DETECT, "--num_gpus 2 --deepspeed", "--nproc_per_node=2 MIMIC --use_deepspeed"),
        (DETECT, "--num_gpus=2 --torchrun --debug", "--nproc_per_node=2 MIMIC --max_steps 2 --log_every 1 --use_ddp"),
        (DETECT, "--torchrun --script train_prs_med.py --x 'a  b'", "PRS_MED --x 'a  b'"),
        (CASCADE, "'a  b' '$(touch MARK)' '`touch MARK`' ''", "'a  b' '$(touch MARK)' '`touch MARK`' ''"),
    ],
)  # fmt: skip
def test_command_of_a_shell_launcher(launch, file, words, expected):
    done, started = launch(file, shlex.split(words))
    expected = expected.replace("PRS_MED", f"{ROOT}/train_prs_med.py").replace("MIMIC", f"{ROOT}/train_mimic_cxr.py")
    launcher = str(ROOT / "utils/launch_4gpu.py") if file == CASCADE else TORCHRUN
    assert started == [launcher, *shlex.split(expected)]
    assert done.returncode == 7
    # guide 1's script prints guide 1's report
    assert ("asked -m utils.hardware_utils" in done.stdout) == ("train_mimic_cxr" in expected)


@pytest.mark.parametrize(("file", "words"), [(SINGLE, ["data"]), (DETECT, ["--num_gpus"])])
def test_bad_words_for_a_shell_launcher(launch, file, words):
    for word in (*HOSTILE, *NOT_WHOLE):
        done, started = launch(file, [*words, word])
        assert (done.returncode, started) == (2, None)
        assert done.stderr.startswith("error: ")
    done, _ = launch(DETECT, ["--script", "nowhere.py"])
    assert "check --script" in done.stderr


NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NNODES": "", "MASTER_PORT": ""}, "--standalone"),
        ({"MASTER_PORT": "7"}, "--master_addr=127.0.0.1 --master_port=7"),
        (NODES, "--nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=29500"),
    ],
)
def test_rendezvous_flags(variables, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", variables)
    assert torchrun.rendezvous_flags() == expected.split()


BAD_VARIABLES = {
    "MASTER_ADDR": ["", *HOSTILE[:4]],
    "MASTER_PORT": ["0", "99999", *NOT_WHOLE],
    "NODE_RANK": ["", "2", *NOT_WHOLE],
    "NNODES": ["0", *NOT_WHOLE],
}


@pytest.mark.parametrize("name", BAD_VARIABLES)
def test_bad_variable_is_named(name, monkeypatch):
    for value in BAD_VARIABLES[name]:
        monkeypatch.setattr(os, "environ", NODES | {name: value})
        with pytest.raises(InputError, match=f"^{name} must be "):
            torchrun.rendezvous_flags()


def test_srun_may_not_start_a_launcher(monkeypatch):
    monkeypatch.setattr(os, "environ", {"SLURM_STEP_NUM_TASKS": "2"})
    with pytest.raises(InputError, match="let it start the script"):
        torchrun.rendezvous_flags()


ACCELERATE = (
    "accelerate launch --multi_gpu --num_processes={} --num_machines=1 --mixed_precision=no --dynamo_backend=no"
)
ACCELERATE += " --main_process_port=0 SCRIPT"
CONFIG = "--config configs/multi_view_config.json"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{CONFIG} --method accelerate --wandb", f"{ACCELERATE.format(4)} {CONFIG} --wandb"),
        (f"{CONFIG} --method=torchrun --wandb", f"--nproc_per_node=4 SCRIPT {CONFIG} --wandb"),
        ("--num_gpus 1 --lr=-1 -1", "--nproc_per_node=1 SCRIPT --lr=-1 -1"),
        ("--a 'b  c' --x='$y;z' --num_gpus=2 * ''", f"{ACCELERATE.format(2)} --a 'b  c' --x='$y;z' * ''"),
    ],
)
def test_command_of_4gpu(words, expected):
    script = str(ROOT / "train_accelerate.py")
    assert launch_4gpu.build_command(shlex.split(words)) == shlex.split(expected.replace("SCRIPT", script))


@pytest.mark.skipif(shutil.which("wine") is None, reason="wine is not installed (.ci/run installs it)")
def test_4gpu_bat_passes_all_words(tmp_path):
    """Under wine, with the python of .venv."""
    words = ["--config", "a  b=c.json", "--x=1,2;3", "--wandb_project", "R & D (x)", "--num_gpus=4&echo x>MARK"]
    folder = tmp_path / "my folder"
    python = folder / ".venv/Scripts/python.exe"
    python.parent.mkdir(parents=True)
    shutil.copy(ROOT / "train_4gpu.bat", folder)
    # wine can start a shell script of the host
    out = tmp_path / "argv"
    python.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{out}.part && mv {out}.part {out}\nexit 7\n")
    python.chmod(0o755)
    typed = " ".join(f'"{word}"' if any(letter in word for letter in " &;") else word for word in words)
    (tmp_path / "go.bat").write_bytes(f'@"my folder\\train_4gpu.bat" {typed}\r\n'.encode())
    environment = os.environ | {"WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["wine", "cmd", "/c", "go.bat"], cwd=tmp_path, env=environment, timeout=180, **silent)
    deadline = time.monotonic() + 20
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    argv = out.read_text().splitlines()
    assert argv[0].endswith("my folder\\utils\\launch_4gpu.py")
    assert argv[1:] == words
    assert not (tmp_path / "MARK").exists()


# --- exit codes and signals -------------------------------------------------------------------------------------------

# exits with the code of its first word, or waits for SIGTERM; fast, because it does not import torch
WORKER = """
import os, signal, sys, time
rank = os.environ.get("RANK", "0")
if sys.argv[1].isdigit():
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, f"saved by {rank}\\n".encode()), sys.exit(143)))
print("ready", flush=True)
time.sleep(60)
"""
STARTS = {"torchrun": "--nproc_per_node=2 SCRIPT", "accelerate": ACCELERATE.format(2), "alone": "SCRIPT"}


@pytest.mark.parametrize("name", STARTS)
def test_exit_code_and_sigterm(name, tmp_path):
    """The launcher returns the script's exit code and forwards SIGTERM to all processes, which then save."""
    (tmp_path / "worker.py").write_text(WORKER)
    words = STARTS[name].replace("SCRIPT", str(tmp_path / "worker.py")).split()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, TORCHRUN, *words]
    failed = subprocess.run([*command, "2"], timeout=100, **pipes)
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
    process = subprocess.Popen([*command, "waits"], start_new_session=True, **pipes)
    count = 1 if name == "alone" else 2
    for _ in range(count):
        assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    saved, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert sorted(saved.split("\n")) == ["", *(f"saved by {rank}" for rank in range(count))]
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        ("--nproc_per_node=8 train.py", "1"),
        ("accelerate launch --num_processes 3 train.py", "2"),
        ("accelerate launch train.py", "6"),
    ],
)
def test_processes_share_the_cores(words, threads, monkeypatch):
    """They share the cores that torch would use, which are fewer than usable_cores() with hyper-threading."""
    given = []
    monkeypatch.setattr("hardware_utils.usable_cores", lambda: 8)
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    for module in ("torch.distributed.run", "accelerate.commands.accelerate_cli"):
        monkeypatch.setattr(f"{module}.main", lambda: given.append(os.environ["OMP_NUM_THREADS"]))
    # main() changes these
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr("logging.disable", lambda _: None)
    assert torchrun.main(words.split()) == 0
    assert given == [threads]


ENTRIES = [path.name for path in sorted(ROOT.glob("train*.py"))]
ENTRIES += ["examples/minimal.py", "utils/torchrun.py", "utils/launch_4gpu.py"]
MODULES = ["utils.hardware_utils", "tools.sample_data", "tools.prepare_data", "tools.verify", "tools.rehearse"]


@pytest.mark.parametrize("words", [*ENTRIES, *(f"-m {name}" for name in MODULES)])
def test_error_before_pip_install(words):
    """python -S finds no installed packages."""
    done = subprocess.run([sys.executable, "-S", *words.split()], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr == f"error: {sys.executable} has no torch; run `make setup`, then `source .venv/bin/activate`\n"


@pytest.mark.parametrize(
    ("command", "commands"),
    [
        ("train_mimic_cxr.py --data_path nowhere", "TASK=mimic_cxr` prepare_data mimic_cxr"),
        ("train_survival_distributed.py", "TASK=survival` sample_data survival"),
        # guide 3 writes config/ instead of configs/
        (
            "utils/launch_4gpu.py --method torchrun --num_gpus 1 --config config/multi_view_config.json",
            "TASK=cascade` cascade",
        ),
        ("train.py --data nowhere", "TASK=compressed_ad` sample_data compressed_ad"),
    ],
)
def test_error_without_data_names_two_commands(command, commands, tmp_path):
    path, *words = command.split()
    cwd = ROOT if "config/" in command else tmp_path
    done = subprocess.run([sys.executable, ROOT / path, *words], cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(words in line for words in commands.split("` ")), line


# --- Kubernetes, containers -------------------------------------------------------------------------------------------


def test_job_set(launch):
    """Kubernetes and JobSet know every field; names, numbers of nodes and codes agree; the launcher's command."""
    service, policy, job_set = yaml.safe_load_all((ROOT / "configs/kubernetes/jobset.yaml").read_text())
    name, spec = job_set["metadata"]["name"], job_set["spec"]
    (replicated,) = spec["replicatedJobs"]
    batch_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **replicated["template"]}
    for part in (service, policy, batch_job):
        kubernetes_validate.validate(part, "1.30", strict=True)
    # the model drops unknown fields
    assert JobsetV1alpha2JobSet.from_dict(job_set).to_dict() == job_set
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    # the address that JobSet gives the first pod
    assert environment["MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{spec['network']['subdomain']}"
    assert job["completions"] == job["parallelism"] == int(environment["NNODES"])
    # pods may only talk to each other
    nodes = {"podSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}}
    assert policy["spec"]["ingress"] == [{"from": [nodes]}]
    # invalid input ends the set; on SIGTERM, a run has 120 s to save
    invalid_input = {"containerName": container["name"], "operator": "In", "values": [2]}
    assert job["podFailurePolicy"]["rules"] == [{"action": "FailJob", "onExitCodes": invalid_input}]
    assert pod["terminationGracePeriodSeconds"] >= 120 + 30

    done, started = launch(DETECT, container["args"], NODE_RANK="1", **environment)
    assert done.returncode == 7
    assert started == [TORCHRUN, str(ROOT / "train_prs_med.py"), *container["args"][1:]]
    assert {word.partition("=")[0] for word in container["args"][1:]} <= help_flags("train_prs_med.py")


def test_container(tmp_path):
    """The user is not root, and a script starts with the files that .dockerignore admits."""
    assert "\nUSER 1000\n" in (ROOT / "Dockerfile").read_text()
    first, *allowed = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("#", "")]
    assert first == "*"
    for name in (line.removeprefix("!") for line in allowed if line.startswith("!")):
        found = [*ROOT.glob(name)]
        assert found, name
        subprocess.run(["cp", "-r", *found, tmp_path], check=True)
    command = [sys.executable, "train_prs_med.py", "--data_root", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stderr.startswith("error: nowhere: no such folder")
    assert "make demo`" in done.stderr
    assert "prepare_data prs_med" in done.stderr
