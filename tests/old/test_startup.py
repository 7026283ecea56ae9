"""startup_utils: what is wrong with a machine is one line with what to do, before the process group is made."""

import os
import signal
import socket
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

from old import startup_utils
from old.cli_utils import InputError
from old.distributed_utils import setup_distributed

HOST = socket.gethostname()

# The variables that a start reads or sets.
NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "CUDA_VISIBLE_DEVICES")
NAMES += ("MASTER_ADDR", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_STEP_NUM_NODES", "NCCL_MULTI_RANK_GPU_ENABLE")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in NAMES:
        # set first, so that what a test leaves behind is undone as well
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


# --- what CUDA, NCCL and gloo say, as recorded in issues of torch, NCCL and others ------------------------------------

TOO_OLD = """The NVIDIA driver on your system is too old (found version 11040). Please update your GPU \
driver by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx \
Alternatively, go to: https://pytorch.org to install a PyTorch version that has been compiled with your version of the \
CUDA driver."""

NO_KERNEL = """CUDA error: no kernel image is available for execution on the device
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""

INSUFFICIENT = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:121, unhandled cuda error (run \
with NCCL_DEBUG=INFO for details), NCCL version 2.18.1
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'"""

PEER = """NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error, NCCL version 2.27.3
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 217 'peer access is not supported between these two devices'"""

DUPLICATE = """NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, invalid usage (run \
with NCCL_DEBUG=WARN for details), NCCL version 2.19.3
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"""

SHARED_MEMORY = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error (run \
with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-LeXlEJ (size 9637888)"""

NO_ROUTE = """NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled system error (run \
with NCCL_DEBUG=INFO for details), NCCL version 2.18.6
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host"""

NO_INTERFACE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2588, internal error - \
please report this issue to the NCCL developers, NCCL version 2.21.5
ncclInternalError: Internal check failed.
Last error:
Bootstrap : no socket interface found"""

INVALID = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run \
with NCCL_DEBUG=INFO for details), NCCL version 2.26.2
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 1 'invalid argument'"""

MEMORY = """NCCL error in: ProcessGroupNCCL.cpp:2020, unhandled cuda error, NCCL version 2.21.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""

GLOO = """Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out \
connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:14215"""

GLOO_NAME = """[enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find \
address for: ^lo"""


@pytest.mark.parametrize(
    ("text", "cause", "advice"),
    [
        (TOO_OLD, "The NVIDIA driver on your system is too old (found version 11040)", "update the NVIDIA driver"),
        (NO_KERNEL, "CUDA error: no kernel image is available for execution on the device", "no code for this GPU"),
        (INSUFFICIENT, "Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'", "update the"),
        (PEER, "Cuda failure 217 'peer access is not supported between these two devices'", "NCCL_P2P_DISABLE=1"),
        (DUPLICATE, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", "one process per GPU"),
        (SHARED_MEMORY, "Error while creating shared memory segment /dev/shm/nccl-LeXlEJ (size 9637888)", "--ipc=host"),
        (NO_ROUTE, "socketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host", "SOCKET_IFNAME"),
        (NO_INTERFACE, "Bootstrap : no socket interface found", "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"),
        (INVALID, "Cuda failure 1 'invalid argument'", "NCCL_DEBUG=WARN"),
        (MEMORY, "Cuda failure 2 'out of memory'", "another process holds this GPU's memory"),
        (GLOO, GLOO, "GLOO_SOCKET_IFNAME"),
        (GLOO_NAME, GLOO_NAME, "GLOO_SOCKET_IFNAME"),
    ],
)
def test_failures_of_a_start_in_one_line(text, cause, advice):
    with pytest.raises(InputError) as caught, startup_utils.explain_failure(None, 0):
        raise RuntimeError(text)
    assert str(caught.value).startswith(f"{HOST}: {cause}; ")
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gpu_that_no_kernel_fits(monkeypatch):
    """One process: the first tensor on the GPU is made where its failure is explained."""

    def fail(_) -> None:
        raise RuntimeError(NO_KERNEL)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with pytest.raises(InputError, match="no code for this GPU"), setup_distributed():
        pass


def test_other_failures_keep_their_traceback():
    with pytest.raises(RuntimeError, match="shape"), startup_utils.explain_failure(None, 0):
        raise RuntimeError("shape '[2]' is invalid for input of size 3")


def test_the_first_rank_to_fail_explains(monkeypatch, capfd):
    """Others that fail, also in words of their own as a connection breaks, end with code 2 and say nothing."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    store = dist.HashStore()
    for rank, text in ((1, PEER), (0, PEER), (2, "Connection closed by peer [10.0.0.1]:4711")):
        with startup_utils.explain_failure(store, rank):
            raise RuntimeError(text)
    assert codes == [2, 2, 2]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: rank 1: {HOST}: Cuda failure 217")


# --- the driver -------------------------------------------------------------------------------------------------------


NVIDIA_SMI = """\
#!/bin/sh
case $1 in
*driver*) echo {version}; echo {version} ;;
*) echo 'GPU-0, 1024'; echo 'GPU-1, 1024' ;;
esac
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """driver(reason, version): a machine whose nvidia-smi lists two GPUs, which torch cannot start for this reason."""

    def make(reason: str = "", version: str = "470.223.02", cuda: str | None = "12.9"):
        stub = tmp_path / "nvidia-smi"
        stub.write_text(NVIDIA_SMI.format(version=version))
        stub.chmod(0o755)

        def start() -> None:
            raise RuntimeError(reason)

        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", start)

    return make


def test_an_old_driver(driver, monkeypatch):
    driver(TOO_OLD)
    with pytest.raises(InputError) as caught:
        startup_utils.check_gpus()
    assert str(caught.value) == (
        f"{HOST}: The NVIDIA driver on your system is too old (found version 11040); update the NVIDIA driver, or "
        "install a torch built for the CUDA version it has, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
    )
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert startup_utils.check_gpus() == []


def test_a_cpu_build_of_torch_beside_gpus_is_said(driver):
    driver(cuda=None)
    notes = startup_utils.check_gpus()
    assert len(notes) == 1
    assert notes[0].startswith("nvidia-smi lists 2 GPUs, but this torch")
    assert "built without CUDA" in notes[0]


# --- RTX 40 and MIG ---------------------------------------------------------------------------------------------------

CUDA = torch.device("cuda", 0)


def start_alone() -> None:
    """What one process of one does before the process group is made."""
    startup_utils.agree_to_start(dist.HashStore(), 0, 1, CUDA, "cpu:gloo,cuda:nccl")


@pytest.fixture
def gpu(monkeypatch):
    """gpu(name): a machine with one GPU of this name."""

    def make(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)

    return make


@pytest.mark.parametrize(
    ("name", "version", "disabled"),
    [
        ("NVIDIA GeForce RTX 4090", "545.29.06", True),
        ("NVIDIA GeForce RTX 4060 Ti", "550.40.06", True),
        ("NVIDIA GeForce RTX 4090", "550.40.07", False),
        ("NVIDIA GeForce RTX 4090", "580.82.07", False),
        ("NVIDIA GeForce RTX 3090", "545.29.06", False),
        ("NVIDIA RTX 4000 SFF Ada Generation", "545.29.06", False),
    ],
)
def test_rtx_40_without_p2p(driver, gpu, capsys, name, version, disabled):
    driver(version=version)
    gpu(name)
    start_alone()
    note = "RTX 40 GPUs under a driver before 550.40.07: NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 set for NCCL\n"
    expected = "1" if disabled else None
    assert capsys.readouterr().out == (note if disabled else "")
    assert os.environ.get("NCCL_P2P_DISABLE") == expected
    assert os.environ.get("NCCL_IB_DISABLE") == expected


def test_what_the_user_set_for_nccl_stays(driver, gpu, monkeypatch, capsys):
    driver(version="545.29.06")
    gpu("NVIDIA GeForce RTX 4090")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    start_alone()
    assert "NCCL_IB_DISABLE=1 set" in capsys.readouterr().out
    assert os.environ["NCCL_P2P_DISABLE"] == "0"
    assert os.environ["NCCL_IB_DISABLE"] == "1"


def test_mig_slices():
    """Several processes of one machine on slices are an error, one on each machine is none."""

    def facts(*hosts: str) -> list[dict]:
        return [{"host": host, "mig": True} for host in hosts]

    message = startup_utils.mig_error(facts("a", "b", "b"))
    assert message.startswith("b: 2 processes on MIG slices, which NCCL does not join")
    assert message.endswith("start one process, or use whole GPUs")
    assert startup_utils.mig_error(facts("a", "b")) == ""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    assert startup_utils.mig_error(facts("b", "b")) == ""


def test_mig_is_seen_by_variable_and_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB MIG 3g.20gb")
    assert startup_utils.is_mig_slice(CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    assert not startup_utils.is_mig_slice(CUDA)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-d9a47cfb-d1f2-d08c-b40e-0812b597ae69")
    assert startup_utils.is_mig_slice(CUDA)


# --- the network ------------------------------------------------------------------------------------------------------

CARDS = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.7", "fe80::1%eth0"],
    "ib0": ["192.168.3.7"],
    "docker0": ["172.17.0.1"],
}


@pytest.fixture
def network(monkeypatch):
    """network(address): a host with the cards above whose name resolves to this address, or to none."""

    def make(address: str | None) -> None:
        def entry(address: str) -> SimpleNamespace:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return SimpleNamespace(family=family, address=address)

        def resolve(*_, **__) -> list[tuple]:
            if address is None:
                raise socket.gaierror(-2, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

        cards = {name: [entry(text) for text in addresses] for name, addresses in CARDS.items()}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
        monkeypatch.setattr(socket, "getaddrinfo", resolve)

    return make


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1", "to 127.0.0.1"),
        (None, "to no address of this machine"),
        # as a name server may still say of a machine that was moved
        ("198.51.100.7", "to no address of this machine"),
    ],
)
def test_a_host_that_resolves_its_name_to_loopback(network, address, reason):
    network(address)
    with pytest.raises(InputError) as caught:
        startup_utils.choose_interface()
    assert str(caught.value) == (
        f"{HOST}: resolves its own name {reason}, where no other node reaches it; set GLOO_SOCKET_IFNAME to one of "
        "eth0 (10.0.0.7), ib0 (192.168.3.7), or correct /etc/hosts"
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    assert startup_utils.choose_interface() == []


GIVEN = [("ib0", "ib0"), ("=eth0", "eth0"), ("eth9,ib0", "ib0"), ("eth", None), ("^docker0,ib0", None)]


@pytest.mark.parametrize(("given", "taken"), GIVEN)
def test_gloo_takes_nccls_interface(network, given, taken):
    """Where it is named in full: NCCL also takes the beginning of a name, and names to leave out."""
    network("127.0.0.1")
    os.environ["NCCL_SOCKET_IFNAME"] = given
    if taken is None:
        with pytest.raises(InputError, match="resolves its own name"):
            startup_utils.choose_interface()
    else:
        notes = startup_utils.choose_interface()
        assert notes == [f"gloo takes the interface of NCCL_SOCKET_IFNAME: GLOO_SOCKET_IFNAME={taken}"]
        assert os.environ["GLOO_SOCKET_IFNAME"] == taken


def test_an_interface_that_does_not_exist(network):
    network("127.0.0.1")
    os.environ["GLOO_SOCKET_IFNAME"] = "^lo"
    with pytest.raises(InputError, match=r"has no network interface '\^lo'; it has eth0 \(10.0.0.7\), ib0"):
        startup_utils.choose_interface()


@pytest.mark.parametrize(
    ("variables", "several"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, False),
        ({"LOCAL_WORLD_SIZE": "2"}, True),
        ({"LOCAL_SIZE": "2"}, True),
        ({"SLURM_STEP_NUM_NODES": "2"}, True),
        ({"SLURM_STEP_NUM_NODES": "1"}, False),
        ({}, False),
        # two launchers on one machine
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, False),
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, False),
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, True),
    ],
)
def test_several_nodes(variables, several):
    os.environ |= variables
    assert startup_utils.several_nodes(4) is several


@pytest.mark.parametrize(("nodes", "prefix"), [("1", "start_2"), ("3", "start_0")])
def test_restarted_processes_meet_anew(monkeypatch, nodes, prefix):
    """On one machine apart from what earlier processes left; nodes, which count differently, all in one place."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    store = startup_utils.meet(0, 1, timedelta(seconds=20))
    store.set("key", "value")
    assert store.underlying_store.get(f"{prefix}/key") == b"value"


def test_all_ranks_hear_of_one_ranks_error():
    """Rank 1 of two has a wrong machine; rank 0, which holds the store, leaves after it."""
    store = dist.HashStore()
    store.set("facts/1", '{"host": "b", "error": "b: wrong", "mig": false, "no_p2p": false}')
    store.set("read/1", "")
    with pytest.raises(InputError, match="b: wrong"):
        startup_utils.agree_to_start(store, 0, 2, torch.device("cpu"), "gloo")


# --- real runs --------------------------------------------------------------------------------------------------------

SCRIPT = """\
import sys
sys.path.insert(0, {root!r})
from old.cli_utils import run_main
from old.distributed_utils import gather_objects, print_main, setup_distributed

def main(_):
    with setup_distributed(timeout=60) as ranks:
        print_main("together", gather_objects(ranks.rank))

run_main(main, None)
"""

# Goes before SCRIPT: rank 1 fails by itself, and rank 0 half a second later, as it loses the connection.
FAILING = """\
import os, sys, time
sys.path.insert(0, {root!r})
import torch.distributed as dist

def fail(*_, **__):
    if os.environ["RANK"] == "1":
        raise RuntimeError({text!r})
    time.sleep(0.5)
    raise RuntimeError("Connection reset by peer")

dist.init_process_group = fail
"""


def test_nccl_that_fails_on_one_rank(zygote, tmp_path):
    """Its line is the only one, without a traceback of the rank that loses the connection."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(root=str(ROOT), text=PEER) + SCRIPT.format(root=str(ROOT)))
    done = zygote(script, ranks=2)
    assert done.code != 0
    line = "Cuda failure 217 'peer access is not supported between these two devices'; set NCCL_P2P_DISABLE=1"
    assert done.stderr.splitlines() == [f"error: rank 1: {HOST}: {line}"]


def test_two_nodes_whose_host_name_is_loopback(zygote, tmp_path, monkeypatch):
    """Really two processes, each a node of its own: one line and code 2; with the interface named they train."""
    outside = startup_utils.interfaces()
    if not outside or not startup_utils.is_loopback(startup_utils.own_address()):
        pytest.skip("needs a host with a network interface whose own name is at a loopback address")
    name, address = next(iter(outside.items()))
    script = tmp_path / "nodes.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    node = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address}

    done = zygote(script, ranks=2, **node)
    # a process that is still leaving when the other has left is told to
    assert done.code in (2, -signal.SIGTERM)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {HOST}: resolves its own name to {startup_utils.own_address()}, ")
    assert f"set GLOO_SOCKET_IFNAME to one of {name} ({address})" in lines[0]

    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        done = zygote(script, ranks=2, **node, **{variable: name})
        assert done.code == 0, done.stderr
        assert "together [0, 1]" in done.stdout
        assert ("gloo takes the interface" in done.stdout) == variable.startswith("NCCL")
