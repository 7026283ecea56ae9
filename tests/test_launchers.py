"""Every launcher gives the same run of PRS-Med; the exact command line of run_multi_gpu_train.sh."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
PRS_MED = str(ROOT / "train_prs_med.py")
FLAGS = "--lr_scaling none --log_every 1 --max_new_tokens 3 --batch_size 4 --max_steps 2 --num_workers 0".split()
TORCHRUN = str(ROOT / "utils/torchrun.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def curve(run_folder: Path) -> list[tuple]:
    """(step, loss, gradient norm) of every training line."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "train/loss" in line]
    return [(line["step"], line["train/loss"], line["train/grad_norm"]) for line in lines]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """torchrun, deepspeed and accelerate are those beside this python."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture(scope="module")
def prs_med_data(tmp_path_factory) -> Path:
    """A few rows of 48 x 48 pixels, with tiny checkpoints."""
    folder = tmp_path_factory.mktemp("data") / "prs_med"
    sizes = "--num_train 9 --num_val 3 --num_test 3 --image_size 48".split()
    command = [sys.executable, "-m", "tools.sample_data", "prs_med", folder, *sizes]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def script_words(data: Path, run_folder: Path) -> list[str]:
    return [PRS_MED, "--data_root", str(data), "--output_dir", str(run_folder), *FLAGS]


@pytest.fixture(scope="module")
def expected_curve(prs_med_data, tmp_path_factory):
    """The losses of two processes under utils/torchrun.py."""
    run_folder = tmp_path_factory.mktemp("launch") / "run"
    command = [sys.executable, TORCHRUN, "--standalone", "--nproc_per_node=2", *script_words(prs_med_data, run_folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return curve(run_folder)


# How each launcher starts two processes of a script, at a port of their own.
STARTS = {
    "deepspeed": ["deepspeed", "--num_gpus=2", "--master_port", "PORT"],
    "module": ["python", "-m", "torch.distributed.launch", "--nproc_per_node=2", "--master_port=PORT"],
    "accelerate": ["accelerate", "launch", "--multi_gpu", "--num_processes=2", "--main_process_port", "PORT"],
    "world_size": [sys.executable],
    "shell": ["./run_multi_gpu_train.sh"],
}


@pytest.mark.soak
@pytest.mark.parametrize("launcher", STARTS)
def test_same_curve(prs_med_data, tmp_path, expected_curve, launcher, monkeypatch):
    """Each of them starts two processes, which have the expected losses."""
    run_folder = tmp_path / "run"
    port = str(free_port())
    monkeypatch.setenv("MASTER_PORT", port)
    start = [word.replace("PORT", port) for word in STARTS[launcher]]
    script = script_words(prs_med_data, run_folder)
    if launcher == "world_size":
        script += ["--world_size", "2"]
    if launcher == "shell":
        script = [str(prs_med_data), "2", "--", *script[3:]]
    done = subprocess.run([*start, *script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert curve(run_folder) == expected_curve
    assert json.loads((run_folder / "summary.json").read_text())["world_size"] == 2


def start_node(command: list[str]) -> subprocess.Popen:
    """Start one node of a job."""
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output_of(node: subprocess.Popen) -> str:
    """What a node printed, once it has ended well."""
    stdout, stderr = node.communicate(timeout=200)
    assert node.returncode == 0, stdout[-3000:] + stderr[-3000:]
    return stdout


@pytest.mark.soak
def test_two_nodes_on_one_machine(prs_med_data, tmp_path, expected_curve):
    """The guide's two-node command: two agents of one process each, told apart by --node_rank."""
    start = ["torchrun", "--nproc_per_node=1", "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    script = script_words(prs_med_data, tmp_path / "run")
    second = start_node([*start, "--node_rank=1", *script])
    first = start_node([*start, "--node_rank=0", *script])

    # rank 0 alone speaks
    assert "2 by torchrun, cpu" in output_of(first)
    assert not output_of(second)
    assert curve(tmp_path / "run") == expected_curve


RECORDER = """\
#!{python}
import json, os, sys
json.dump({{"argv": sys.argv[1:], "environment": dict(os.environ)}}, open({path!r}, "w"))
"""


class Launched(NamedTuple):
    """A launcher that has ended, and what torchrun was called with; argv is None where it was not."""

    done: subprocess.CompletedProcess
    argv: list[str] | None
    environment: dict[str, str]


class Stubs:
    """python, torchrun, nvidia-smi and nproc as stubs first on PATH; gpus is None where there is no driver."""

    def __init__(self, folder: Path, gpus: int | None):
        self.folder = folder
        self.seen = folder / "seen"
        for name in ("python", "torchrun"):
            self.write(name, RECORDER.format(python=sys.executable, path=str(self.seen)))
        self.write("nproc", "#!/bin/sh\necho 16\n")
        lines = [f"echo 'GPU {index}: NVIDIA L4 (UUID: GPU-{index})'\n" for index in range(gpus or 0)]
        self.write("nvidia-smi", "#!/bin/sh\nexit 9\n" if gpus is None else "#!/bin/sh\n" + "".join(lines))

    def write(self, name: str, text: str) -> None:
        """Make a command of this text."""
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def run(self, arguments: list[str], **variables: str) -> Launched:
        """Run the shell launcher with these arguments and environment variables."""
        environment = {"PATH": f"{self.folder}:/usr/bin:/bin", "HOME": "/tmp", **variables}
        command = [str(ROOT / "run_multi_gpu_train.sh"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not self.seen.exists():
            return Launched(done, None, {})
        seen = json.loads(self.seen.read_text())
        return Launched(done, seen["argv"], seen["environment"])


def started(processes: int, meeting: list[str], *script: str) -> list[str]:
    """What python is given to start so many processes of the script on this node."""
    return [TORCHRUN, f"--nproc_per_node={processes}", *meeting, PRS_MED, "--data_root", *script]


NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("gpus", "visible", "arguments", "processes", "data_root", "threads"),
    [
        (4, None, ["data"], 4, "data", "4"),
        (4, None, ["data", "2"], 2, "data", "8"),
        (8, "1,3", ["d"], 2, "d", "8"),
        (None, None, ["my data"], 2, "my data", "8"),
        (2, "", [], 2, "data", "8"),
    ],
)
def test_launcher_command(tmp_path, gpus, visible, arguments, processes, data_root, threads):
    """As many processes as GPUs are visible or asked for; the CPU cores are shared out between them."""
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    launched = Stubs(tmp_path, gpus).run(arguments, **variables)
    assert launched.done.returncode == 0, launched.done.stderr
    assert launched.argv == started(processes, ["--standalone"], data_root)
    assert launched.environment["OMP_NUM_THREADS"] == threads


def test_launcher_command_with_a_port_and_flags(tmp_path):
    arguments = ["d", "3", "--", "--vlm_path", "a b", "--x=1"]
    launched = Stubs(tmp_path, None).run(arguments, MASTER_PORT="7", OMP_NUM_THREADS="1")
    assert launched.done.returncode == 0, launched.done.stderr
    meeting = ["--master_addr=127.0.0.1", "--master_port=7"]
    assert launched.argv == started(3, meeting, "d", "--vlm_path", "a b", "--x=1")
    assert launched.environment["OMP_NUM_THREADS"] == "1"


def test_launcher_command_of_a_node(tmp_path):
    launched = Stubs(tmp_path, 4).run(["d"], **NODE)
    assert launched.done.returncode == 0, launched.done.stderr
    meeting = ["--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=29500"]
    assert launched.argv == started(4, meeting, "d")
    assert launched.environment["OMP_NUM_THREADS"] == "4"


def test_launcher_command_of_nodes_that_come_and_go(tmp_path):
    """The same word on all nodes; one machine makes up a new one each time."""
    several = {"NNODES": "1:4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7", "RDZV_ID": "my-run", "MAX_RESTARTS": "9"}
    stubs = Stubs(tmp_path, 4)
    meeting = ["--nnodes=1:4", "--max_restarts=9", "--rdzv_id=my-run", "--rdzv_backend=c10d"]
    assert stubs.run(["d"], **several).argv == started(4, [*meeting, "--rdzv_endpoint=10.0.0.1:7"], "d")

    words = []
    for _ in range(2):
        argv = stubs.run(["d"], NNODES="1:1").argv
        words += [word.removeprefix("--rdzv_id=") for word in argv if word.startswith("--rdzv_id=")]
        assert "--rdzv_endpoint=127.0.0.1:29500" in argv
        assert "--max_restarts=3" in argv
    assert len(set(words)) == 2
    assert all(len(word) == 32 for word in words)


@pytest.mark.parametrize(
    ("gpus", "arguments", "variables", "message"),
    [
        (2, ["data", "4"], {}, "4 GPUs asked for, but there are 2"),
        (8, ["data", "4"], {"CUDA_VISIBLE_DEVICES": "0"}, "4 GPUs asked for, but there are 1"),
        (2, ["data", "two"], {}, "NUM_GPUS must be a whole number from 1 to 9999, not 'two'"),
        (2, ["data", "0"], {}, "not '0'"),
        (2, ["data", "1.5"], {}, "not '1.5'"),
        (2, ["data", "1", "more"], {}, "too many arguments"),
        (2, ["data", "--batch_size", "4"], {}, "unknown option --batch_size"),
        (2, ["data", "--elastic"], {}, "unknown option --elastic"),
        (2, ["data"], {"NNODES": "2"}, "NODE_RANK must be a whole number from 0 to 1, not ''"),
        (2, ["data"], {"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK must be a whole number from 0 to 1, not '2'"),
        (2, ["data"], {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR must be the name or address of a host, not ''"),
        (2, ["data"], {"NNODES": "1:x"}, "NNODES must be MIN:MAX, such as 1:4, not '1:x'"),
        (2, ["data"], {"NNODES": "1:2", "MASTER_ADDR": "a"}, "RDZV_ID must be a word, the same on every node, not ''"),
        (2, ["data"], {"NNODES": "1:2", "RDZV_ID": "a b"}, "RDZV_ID must be a word, the same on every node, not 'a b'"),
        (2, ["data"], {"NNODES": "1:2", "MAX_RESTARTS": "-1"}, "MAX_RESTARTS must be a whole number from 0 to 9999"),
        (2, ["data"], {"MASTER_PORT": "65536"}, "MASTER_PORT must be a whole number from 1 to 65535, not '65536'"),
    ],
)
def test_launcher_refuses(tmp_path, gpus, arguments, variables, message):
    launched = Stubs(tmp_path, gpus).run(arguments, **variables)
    assert launched.done.returncode == 2
    assert message in launched.done.stderr
    assert len(launched.done.stderr.splitlines()) == 1
    assert launched.argv is None


def test_launcher_dry_run_and_exit_code(tmp_path):
    stubs = Stubs(tmp_path, 2)
    launched = stubs.run(["my data", "--dry_run", "--", "--seed", "3"])
    assert launched.argv is None
    command = f"python {TORCHRUN} --nproc_per_node=2 --standalone {PRS_MED} --data_root my\\ data --seed 3 \n"
    assert launched.done.stdout == command

    stubs.write("python", "#!/bin/sh\nexit 77\n")
    assert stubs.run(["data"]).done.returncode == 77


# --- real runs --------------------------------------------------------------------------------------------------------


def test_no_data_is_one_line():
    command = [str(ROOT / "run_multi_gpu_train.sh"), "nowhere", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: nowhere: no such folder; give --data_root, or make data up (make demo)")
    assert "python -m tools.prepare_data prs_med" in line


class Background:
    """The launcher with two processes of a run that saves each step."""

    def __init__(self, data: Path, run_folder: Path, *flags: str):
        self.folder, self.log = run_folder, run_folder.with_suffix(".log")
        words = [*script_words(data, run_folder)[3:], "--max_steps", "0", "--save_every", "1", *flags]
        with open(self.log, "w") as log:
            command = [str(ROOT / "run_multi_gpu_train.sh"), str(data), "2", "--", *words]
            self.launcher = psutil.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def wait_for_step(self, step: int) -> None:
        """Until there is a checkpoint of this step or a later one, or the run is over."""
        deadline = time.monotonic() + 90
        while self.launcher.poll() is None and time.monotonic() < deadline:
            if any(int(path.stem[5:]) >= step for path in self.folder.glob("step_*.pt")):
                return
            time.sleep(0.02)

    def workers(self) -> list[psutil.Process]:
        """The processes of the script, without their launcher."""
        found = []
        for process in self.launcher.children():
            # it may have just ended
            with contextlib.suppress(psutil.NoSuchProcess):
                if "train_prs_med.py" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def end(self) -> int:
        """The launcher's exit code; a process left behind fails the test."""
        everyone = self.launcher.children(recursive=True)
        code = self.launcher.wait(timeout=200)
        _, alive = psutil.wait_procs(everyone, timeout=30)
        assert not alive, f"left behind: {alive}"
        return code


def test_sigterm_saves_and_ends_with_143(prs_med_data, tmp_path):
    run = Background(prs_med_data, tmp_path / "run", "--num_epochs", "200")
    run.wait_for_step(1)
    run.launcher.send_signal(signal.SIGTERM)
    assert run.end() == 143

    text = run.log.read_text()
    saved = int(text.split("signal: saved at step ")[-1].split(";")[0])
    assert (tmp_path / "run" / f"step_{saved:08d}.pt").exists()
    for noise in ("Traceback", "SignalException", "Sending process", "death signal", "OMP_NUM_THREADS"):
        assert noise not in text, text


def test_a_killed_process_begins_again(prs_med_data, tmp_path, monkeypatch):
    """By torchrun's own elasticity: all start again from the newest checkpoint, and the steps are those of one run."""
    monkeypatch.setenv("NNODES", "1:1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    run = Background(prs_med_data, tmp_path / "run", "--num_epochs", "12", "--resume_from", "auto")
    run.wait_for_step(2)
    run.workers()[-1].kill()
    assert run.end() == 0, run.log.read_text()
    steps = [step for step, _, _ in curve(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert run.log.read_text().count("2 by torchrun, cpu") == 2


def test_guide_commands_parse():
    """Every train_prs_med.py command of the guide is accepted, and both spellings of the launchers' local rank."""
    import train_prs_med

    guide = [
        "--data_root . --batch_size 8 --learning_rate 1e-4 --num_epochs 20",
        "--data_root . --batch_size 4 --learning_rate 5e-5 --num_epochs 50 --num_workers 4 --checkpoint_dir ./c",
        "--data_root . --local_rank=1",
        "--data_root . --local-rank=1",
    ]
    for words in guide:
        train_prs_med.parse_args(words.split())
    args = train_prs_med.parse_args(["--data_root", "."])
    assert args.batch_size == 8
    assert args.learning_rate == 1e-4
    assert args.num_epochs == 20
    assert args.num_workers == 4


def ip(command: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(["ip", *command.split()], check=True)


@pytest.fixture
def two_hosts():
    """The names of two network namespaces with addresses 10.77.0.1 and 10.77.0.2, joined by a virtual cable."""
    first = f"prs{os.getpid()}a"
    second = f"prs{os.getpid()}b"
    if not shutil.which("ip") or subprocess.run(["ip", "netns", "add", first], capture_output=True).returncode:
        pytest.skip("network namespaces need root and iproute2")

    try:
        ip(f"netns add {second}")
        ip(f"link add cable0 netns {first} type veth peer name cable1 netns {second}")
        for index, name in enumerate((first, second)):
            ip(f"-n {name} addr add 10.77.0.{index + 1}/24 dev cable{index}")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set cable{index} up")
        yield first, second
    finally:
        for name in (first, second):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.soak
def test_two_nodes_in_two_network_namespaces(prs_med_data, tmp_path, expected_curve, two_hosts):
    """The guide's two-node command between two hosts of their own addresses."""
    script = script_words(prs_med_data, tmp_path / "run")
    nodes = []
    for rank, name in enumerate(two_hosts):
        inside = ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME=cable{rank}"]
        start = ["torchrun", "--nproc_per_node=1", "--nnodes=2", f"--node_rank={rank}", "--master_addr=10.77.0.1"]
        nodes.append(start_node([*inside, *start, "--master_port=29500", *script]))

    for node in nodes:
        output_of(node)
    assert curve(tmp_path / "run") == expected_curve
