"""What must be right before processes can train together: GPUs that start, a network interface, settings of NCCL.

distributed_utils.setup_distributed asks these questions before it makes the process group. Each answer is one line
that says what to do, where NCCL, gloo or CUDA would hang or end with a traceback.
"""

import contextlib
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from cli_utils import InputError
from hardware_utils import cuda_starts, detect_gpus, out_of_memory

# Before this driver, RTX 40 cards need NCCL without P2P and InfiniBand: the rule that Accelerate goes by.
RTX_40 = "GeForce RTX 40"
RTX_40_DRIVER = (550, 40, 7)
# Interfaces of containers and virtual machines, which lead to no other node.
VIRTUAL = ("docker", "veth", "virbr", "br-")

INTERFACE_ADVICE = "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that joins the nodes"
# What CUDA, NCCL and gloo say when a start fails -> what to do about it; the first that is found counts.
FAILURES = (
    (
        r"no kernel image is available|not compatible with the current PyTorch",
        "this torch build has no code for this GPU; install a build for its compute capability",
    ),
    (
        r"driver on your system is too old|driver version is insufficient",
        "update the NVIDIA driver, or install a torch built for the CUDA version it has",
    ),
    (r"Duplicate GPU detected", "start one process per GPU, and see CUDA_VISIBLE_DEVICES"),
    (r"peer access is not supported", "set NCCL_P2P_DISABLE=1"),
    (r"/dev/shm", "give the container more shared memory: docker run --ipc=host, or --shm-size=8g"),
    (
        r"no socket interface found|ncclSocketInit: connecting to address|failed : No route to host"
        r"|connectFullMesh failed|Unable to find address",
        INTERFACE_ADVICE,
    ),
    (
        r"ncclUnhandledCudaError|unhandled cuda error",
        "see NCCL's own lines (NCCL_DEBUG=WARN) and nvidia-smi; NCCL_P2P_DISABLE=1 often helps",
    ),
    (
        r"ncclSystemError|unhandled system error|ncclRemoteError|ncclInternalError|ncclInvalidUsage",
        "see NCCL's own lines (NCCL_DEBUG=WARN); between nodes " + INTERFACE_ADVICE,
    ),
)


# --- what this machine has --------------------------------------------------------------------------------------------


def check_gpus() -> list[str]:
    """Lines about GPUs that a CPU build of torch leaves idle. Raises InputError for GPUs that torch cannot start.

    An old driver, for example: torch would warn and train on the CPU, or end with a traceback at the first tensor.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    if hidden or shutil.which("nvidia-smi") is None or cuda_starts():
        return []
    if torch.version.cuda is None:
        return detect_gpus()[1]
    try:
        torch.cuda.init()
        return []
    except RuntimeError as error:
        reason = cause_of(str(error))
        advice = advice_for(str(error)) or "see nvidia-smi"
    raise InputError(f"{socket.gethostname()}: {reason}; {advice}, or set CUDA_VISIBLE_DEVICES= to train on the CPU")


def driver_version() -> tuple[int, ...]:
    """(550, 40, 7) of the NVIDIA driver 550.40.07; () when it cannot be asked."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("\n")[0]))


def needs_no_p2p(device: torch.device) -> bool:
    """Whether this GPU is an RTX 40 under a driver with which NCCL must not use P2P."""
    return RTX_40 in torch.cuda.get_device_name(device) and driver_version() < RTX_40_DRIVER


def is_mig_slice(device: torch.device) -> bool:
    """Whether this GPU is a slice (MIG) of one."""
    return "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "") or " MIG " in torch.cuda.get_device_name(device)


# --- the network ------------------------------------------------------------------------------------------------------


def is_loopback(address: str) -> bool:
    """True for 127.x.x.x, ::1 and the name localhost."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return address == "localhost"


def interfaces() -> dict[str, str]:
    """{name: address} of this machine's network interfaces through which another node may be reached."""
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            usable = entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80")
            if usable and not is_loopback(entry.address) and not name.startswith(VIRTUAL):
                found.setdefault(name, entry.address)
    return found


def own_address() -> str:
    """The address that gloo listens on by default: the first one of this host's name that is this machine's.

    "" when there is none; gloo then takes the loopback address.
    """
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return address[0]
    return ""


def several_nodes(world_size: int) -> bool:
    """Whether the processes are spread over machines, by the launcher's variables.

    They are not if they meet at a loopback address, whatever the launcher was told.
    """
    if is_loopback(os.environ.get("MASTER_ADDR", "")):
        return False

    # torchrun, accelerate and Slurm's task per node; deepspeed's own runner
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name]) < world_size
    nodes = os.environ.get("SLURM_STEP_NUM_NODES", "")
    return nodes.isdigit() and int(nodes) > 1


def choose_interface() -> list[str]:
    """Of a run on several nodes: see to it that gloo listens where other nodes reach it; returns what to say.

    GLOO_SOCKET_IFNAME is taken from NCCL_SOCKET_IFNAME where that names an interface in full. Raises InputError for an
    interface that does not exist, and for a host that resolves its own name to a loopback address.
    """
    host, usable = socket.gethostname(), interfaces()
    choice = ", ".join(f"{name} ({address})" for name, address in usable.items()) or "none but loopback"

    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if given:
        if lacking := [name for name in given.split(",") if name not in psutil.net_if_addrs()]:
            raise InputError(f"GLOO_SOCKET_IFNAME: {host} has no network interface {lacking[0]!r}; it has {choice}")
        return []

    # NCCL's ^ means all interfaces but these
    listed = os.environ.get("NCCL_SOCKET_IFNAME", "")
    for name in [] if listed.startswith("^") else listed.removeprefix("=").split(","):
        if name in usable:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return [f"gloo takes the interface of NCCL_SOCKET_IFNAME: GLOO_SOCKET_IFNAME={name}"]

    address = own_address()
    if not address or is_loopback(address):
        reason = f"to {address}" if address else "to no address of this machine"
        text = f"{host}: resolves its own name {reason}, where no other node reaches it"
        raise InputError(f"{text}; set GLOO_SOCKET_IFNAME to one of {choice}, or correct /etc/hosts")
    return []


# --- before there is a process group ----------------------------------------------------------------------------------


def meet(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store through which all ranks find each other, as init_process_group would make it."""
    store = next(rendezvous("env://", rank, world_size, timeout=timeout))[0]
    store.set_timeout(timeout)
    # processes that torchrun has restarted on one machine may be given the same store again; on several nodes they
    # are not, and count their restarts differently
    one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_node else "0"
    return dist.PrefixStore(f"start_{restarts}", store)


def agree_to_start(store: dist.Store, rank: int, world_size: int, device: torch.device, backend: str) -> None:
    """All ranks: look at the machine, tell each other, and go on or end together.

    Sets NCCL's and gloo's variables that follow; rank 0 says which. Raises the first rank's InputError on all.
    """
    own = {"host": socket.gethostname(), "error": "", "mig": False, "no_p2p": False}
    notes = []
    try:
        notes += check_gpus()
        if several_nodes(world_size):
            notes += choose_interface()
        # a process too many for the GPUs is told so later
        if device.type == "cuda" and "nccl" in backend and device.index < torch.cuda.device_count():
            own |= {"mig": is_mig_slice(device), "no_p2p": needs_no_p2p(device)}
    except InputError as error:
        own["error"] = str(error)
    except RuntimeError as error:
        # CUDA that does not start
        advice = advice_for(str(error))
        if not advice:
            raise
        own["error"] = f"{own['host']}: {cause_of(str(error))}; {advice}"

    # rank 0 collects and hands out: two messages a rank, also on many nodes
    store.set(f"facts/{rank}", json.dumps(own))
    if rank == 0:
        every = [json.loads(text) for text in store.multi_get([f"facts/{other}" for other in range(world_size)])]
        store.set("facts", json.dumps(every))
    facts = json.loads(store.get("facts"))
    store.set(f"read/{rank}", "")

    error = next((fact["error"] for fact in facts if fact["error"]), "") or mig_error(facts)
    if error:
        # rank 0 may hold the store: it leaves when the others have read
        if rank == 0:
            store.wait([f"read/{other}" for other in range(world_size)], timedelta(seconds=30))
        raise InputError(error)

    unset = [name for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in os.environ]
    if unset and any(fact["no_p2p"] for fact in facts):
        os.environ |= dict.fromkeys(unset, "1")
        least = ".".join(f"{part:02}" for part in RTX_40_DRIVER)
        notes.append(f"RTX 40 GPUs under a driver before {least}: {'=1 and '.join(unset)}=1 set for NCCL")
    if rank == 0:
        for note in notes:
            print(note, flush=True)


def mig_error(facts: list[dict]) -> str:
    """What is wrong when several processes of a machine have slices of GPUs; "" if nothing is."""
    slices = Counter(fact["host"] for fact in facts if fact["mig"])
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ""
    for host, count in slices.items():
        if count > 1:
            text = f"{host}: {count} processes on MIG slices, which NCCL does not join (experimental in its newest "
            text += "versions, with NCCL_MULTI_RANK_GPU_ENABLE=1); start one process, or use whole GPUs"
            return text
    return ""


# --- while it starts --------------------------------------------------------------------------------------------------


def cause_of(text: str) -> str:
    """The one sentence of an error that says why: NCCL's last error, else the beginning."""
    after = text.partition("Last error:")[2].strip() or text.strip()
    return re.split(r"\n|\. Please ", after)[0].strip().rstrip(".")


def advice_for(text: str) -> str:
    """What to do about a failed start; "" for an error that is not among FAILURES."""
    if out_of_memory(RuntimeError(text)):
        return "another process holds this GPU's memory, see nvidia-smi"
    return next((advice for pattern, advice in FAILURES if re.search(pattern, text)), "")


@contextlib.contextmanager
def explain_failure(store: dist.Store | None, rank: int) -> Iterator[None]:
    """Around the start of the process group and the first tensor on the GPU: a failure that is known is one line.

    store: None for one process, which ends with an InputError. Of several, that line comes from the first to fail (the
    others may wait for it elsewhere) and each ends at once with code 2. Other errors pass.
    """
    try:
        yield
    except RuntimeError as error:
        advice = advice_for(str(error))
        message = f"{socket.gethostname()}: {cause_of(str(error))}; {advice}"
        if store is None:
            if not advice:
                raise
            raise InputError(message) from None

        # an unknown failure may be the echo of another rank's known one
        told = earlier_failures(store, rank, int(bool(advice)))
        if not advice and not told:
            raise
        if not told:
            print(f"error: rank {rank}: {message}", file=sys.stderr, flush=True)
        os._exit(2)


def earlier_failures(store: dist.Store, rank: int, own: int) -> int:
    """How many ranks have explained a failed start before this one; own: 1 to be counted among them."""
    try:
        return store.add("failed", own) - own
    except RuntimeError:
        # the store is gone, and with it a rank 0 that has explained its own
        return own if rank else 0
