"""Every launcher gives the same run; the shell launcher's exact command line."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PRS_MED, ROOT, SAME, forked, losses, train

FLAGS = [*SAME, "--batch_size", "4", "--max_steps", "2"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def expected_curve(data, zygote, tmp_path_factory):
    """Of two processes that no launcher started."""
    out = tmp_path_factory.mktemp("launch") / "forked"
    forked(zygote, data, out, 2, *FLAGS)
    return losses(out)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["deepspeed", "--num_gpus=2"], marks=pytest.mark.soak),
        pytest.param(["./run_multi_gpu_train.sh"], marks=pytest.mark.soak),  # for real: test_launch_utils.py
        pytest.param([sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"], marks=pytest.mark.soak),
        pytest.param(["accelerate", "launch", "--multi_gpu", "--num_processes=2"], marks=pytest.mark.soak),
        pytest.param([sys.executable], marks=pytest.mark.soak),
    ],
    ids=["deepspeed", "run_multi_gpu_train.sh", "torch.distributed.launch", "accelerate", "--world_size"],
)
def test_same_curve(data, tmp_path, expected_curve, launcher, monkeypatch):
    out, port = tmp_path / "run", str(free_port())
    monkeypatch.setenv("MASTER_PORT", port)
    if launcher[0] == "./run_multi_gpu_train.sh":
        command = [*launcher, str(data), "2", "--", "--checkpoint_dir", str(out), *FLAGS]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
    elif launcher == [sys.executable]:
        monkeypatch.delenv("MASTER_PORT")
        done = train(data, out, 1, *FLAGS, "--world_size", "2")
    else:
        flag = {"accelerate": ["--main_process_port", port], "deepspeed": ["--master_port", port]}
        done = train(data, out, 2, *FLAGS, launcher=[*launcher, *flag.get(launcher[0], [f"--master_port={port}"])])
    assert "world size 2" in done.stdout
    assert losses(out) == expected_curve
    assert json.loads((out / "summary.json").read_text())["world_size"] == 2


@pytest.mark.soak
def test_two_nodes_on_one_machine(data, tmp_path, expected_curve):
    """The guide's two-node command: two agents of one process each, told apart by --node_rank."""
    port, out = free_port(), tmp_path / "run"
    command = ["torchrun", "--nproc_per_node=1", "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    flags = [PRS_MED, "--data_root", str(data), "--checkpoint_dir", str(out), *FLAGS]
    nodes = [
        subprocess.Popen([*command, f"--node_rank={rank}", *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in (1, 0)
    ]
    texts = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert "world size 2" in texts[1]
    assert "world size" not in texts[0]  # rank 0 alone speaks
    assert losses(out) == expected_curve


@pytest.mark.parametrize("value", ["node[07-09,12]", "node07,node08", "node07"])
def test_slurm_environment(monkeypatch, value):
    from distributed_utils import read_environment

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that the test's own changes are undone
        monkeypatch.delenv(name)
    slurm = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": value, "SLURM_JOB_ID": "123456"}
    for name, text in slurm.items():
        monkeypatch.setenv(name, text)
    assert read_environment() == (0, 0, 1, "python")  # `python` in an sbatch script, without srun
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert read_environment() == (5, 1, 8, "srun")
    assert os.environ["MASTER_ADDR"] == "node07"
    assert 20000 <= int(os.environ["MASTER_PORT"]) < 40000


class Stubs:
    """torchrun, nvidia-smi and nproc as stubs first on PATH; run() gives exit code, argv and environment of
    torchrun."""

    def __init__(self, folder: Path, gpus: int | None):
        self.folder = folder
        recorder = f"#!{sys.executable}\nimport json, os, sys\n"
        recorder += f"json.dump([sys.argv[1:], dict(os.environ)], open({str(folder / 'seen')!r}, 'w'))\n"
        self.write("torchrun", recorder)
        self.write("nproc", "#!/bin/sh\necho 16\n")
        lines = "".join(f"echo 'GPU {i}: NVIDIA L4 (UUID: GPU-{i})'\n" for i in range(gpus or 0))
        self.write("nvidia-smi", f"#!/bin/sh\n{lines}" if gpus is not None else "#!/bin/sh\nexit 9\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def run(self, *words: str, **variables: str):
        env = {"PATH": f"{self.folder}:/usr/bin:/bin", "HOME": "/tmp", **variables}
        done = subprocess.run([str(ROOT / "run_multi_gpu_train.sh"), *words], env=env, capture_output=True, text=True)
        seen = json.loads((self.folder / "seen").read_text()) if (self.folder / "seen").exists() else [None, {}]
        return done, *seen


ALONE = "--standalone"


@pytest.mark.parametrize(
    ("gpus", "words", "variables", "expected", "threads"),
    [
        (4, ["data"], {}, ["--nproc_per_node=4", ALONE, PRS_MED, "--data_root", "data"], "4"),
        (4, ["data", "2"], {}, ["--nproc_per_node=2", ALONE, PRS_MED, "--data_root", "data"], "8"),
        (8, ["d"], {"CUDA_VISIBLE_DEVICES": "1,3"}, ["--nproc_per_node=2", ALONE, PRS_MED, "--data_root", "d"], "8"),
        (None, ["my data"], {}, ["--nproc_per_node=2", ALONE, PRS_MED, "--data_root", "my data"], "8"),
        (2, [], {"CUDA_VISIBLE_DEVICES": ""}, ["--nproc_per_node=2", ALONE, PRS_MED, "--data_root", "data"], "8"),
        (None, ["d", "3", "--", "--vlm_path", "a b", "--x=1"], {"MASTER_PORT": "7", "OMP_NUM_THREADS": "1"},
         ["--nproc_per_node=3", "--master_addr=127.0.0.1", "--master_port=7", PRS_MED, "--data_root", "d", "--vlm_path",
          "a b", "--x=1"], "1"),
        (4, ["d"], {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"},
         ["--nproc_per_node=4", "--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=29500", PRS_MED,
          "--data_root", "d"], "4"),
    ],
)  # fmt: skip
def test_launcher_command(tmp_path, gpus, words, variables, expected, threads):
    done, argv, env = Stubs(tmp_path, gpus).run(*words, **variables)
    assert done.returncode == 0, done.stderr
    assert argv == expected
    assert env["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("gpus", "words", "variables", "message"),
    [
        (2, ["data", "4"], {}, "4 GPUs asked for, but there are 2"),
        (8, ["data", "4"], {"CUDA_VISIBLE_DEVICES": "0"}, "4 GPUs asked for, but there are 1"),
        (2, ["data", "two"], {}, "NUM_GPUS must be a whole number from 1 to 9999, not 'two'"),
        (2, ["data", "0"], {}, "not '0'"),
        (2, ["data", "1.5"], {}, "not '1.5'"),
        (2, ["data", "1", "more"], {}, "too many arguments"),
        (2, ["data", "--batch_size", "4"], {}, "unknown option --batch_size"),
        (2, ["data"], {"NNODES": "2"}, "NODE_RANK must be a whole number from 0 to 1, not ''"),
        (2, ["data"], {"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK must be a whole number from 0 to 1, not '2'"),
        (2, ["data"], {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR must be the name or address of a host, not ''"),
        (2, ["data"], {"MASTER_PORT": "65536"}, "MASTER_PORT must be a whole number from 1 to 65535, not '65536'"),
    ],
)
def test_launcher_refuses(tmp_path, gpus, words, variables, message):
    done, argv, _ = Stubs(tmp_path, gpus).run(*words, **variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert argv is None


def test_launcher_dry_run_and_exit_code(tmp_path):
    stubs = Stubs(tmp_path, 2)
    done, argv, _ = stubs.run("my data", "--dry_run", "--", "--seed", "3")
    assert argv is None
    assert done.stdout == f"torchrun --nproc_per_node=2 --standalone {PRS_MED} --data_root my\\ data --seed 3 \n"
    stubs.write("torchrun", "#!/bin/sh\nexit 77\n")
    assert stubs.run("data")[0].returncode == 77


def test_guide_commands_parse():
    """Every train_prs_med.py command of the guide is accepted (both spellings of the launchers' local rank, too)."""
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
    assert (args.batch_size, args.learning_rate, args.num_epochs, args.num_workers) == (8, 1e-4, 20, 4)


@pytest.mark.soak
def test_two_nodes_in_two_network_namespaces(data, tmp_path, expected_curve):
    """The guide's two-node command between two hosts of their own addresses, joined by a virtual cable."""
    names = [f"prs{os.getpid()}a", f"prs{os.getpid()}b"]
    if not shutil.which("ip") or subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode:
        pytest.skip("network namespaces need root and iproute2")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        ip("netns", "add", names[1])
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"cable{i}")
            for device in ("lo", f"cable{i}"):
                ip("-n", name, "link", "set", device, "up")
        out, nodes = tmp_path / "run", []
        for rank, name in enumerate(names):
            command = ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME=cable{rank}"]
            command += [
                "torchrun",
                "--nproc_per_node=1",
                "--nnodes=2",
                f"--node_rank={rank}",
                "--master_addr=10.77.0.1",
            ]
            command += ["--master_port=29500", PRS_MED, "--data_root", str(data), "--checkpoint_dir", str(out), *FLAGS]
            nodes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        texts = [node.communicate(timeout=200) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], texts
        assert losses(out) == expected_curve
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
