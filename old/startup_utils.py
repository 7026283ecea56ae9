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
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from old.cli_utils import InputError
from old.hardware_utils import cuda_starts, detect_gpus, out_of_memory

# Before this driver, RTX 40 cards need NCCL without P2P and InfiniBand: the rule that Accelerate goes by.
RTX_40 = "GeForce RTX 40"
RTX_40_DRIVER = (550, 40, 7)
# Interfaces of containers and virtual machines, which lead to no other node.
VIRTUAL = ("docker", "veth", "virbr", "br-")


INTERFACE_ADVICE = "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that joins the nodes"
NCCL_ADVICE = "see NCCL's own lines (NCCL_DEBUG=WARN)"


class Failure(NamedTuple):
    """What CUDA, NCCL or gloo say when a start fails, as a regular expression, and what to do about it."""

    pattern: str
    advice: str


# The first that is found counts.
FAILURES = (
    # CUDA
    Failure(
        r"no kernel image is available|not compatible with the current PyTorch",
        "this torch build has no code for this GPU; install a build for its compute capability",
    ),
    Failure(
        r"driver on your system is too old|driver version is insufficient",
        "update the NVIDIA driver, or install a torch built for the CUDA version it has",
    ),
    # How the processes share a machine
    Failure(r"Duplicate GPU detected", "start one process per GPU, and see CUDA_VISIBLE_DEVICES"),
    Failure(r"peer access is not supported", "set NCCL_P2P_DISABLE=1"),
    Failure(r"/dev/shm", "give the container more shared memory: docker run --ipc=host, or --shm-size=8g"),
    # The network
    Failure(
        r"no socket interface found|ncclSocketInit: connecting to address|failed : No route to host"
        r"|connectFullMesh failed|Unable to find address",
        INTERFACE_ADVICE,
    ),
    # NCCL, where it says no more
    Failure(
        r"ncclUnhandledCudaError|unhandled cuda error", f"{NCCL_ADVICE} and nvidia-smi; NCCL_P2P_DISABLE=1 often helps"
    ),
    Failure(
        r"ncclSystemError|unhandled system error|ncclRemoteError|ncclInternalError|ncclInvalidUsage",
        f"{NCCL_ADVICE}; between nodes {INTERFACE_ADVICE}",
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
        _, notes = detect_gpus()
        return notes

    # The reason is what CUDA says when it is started.
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
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()

    # Each GPU has a line, all with the same version.
    first_line = answer.partition("\n")[0]
    return tuple(int(part) for part in re.findall(r"\d+", first_line))


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
    usable = {}
    for name, addresses in psutil.net_if_addrs().items():
        if name.startswith(VIRTUAL):
            continue
        for entry in addresses:
            # An address from fe80 holds on one link only.
            is_ip = entry.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and not entry.address.startswith("fe80") and not is_loopback(entry.address):
                usable.setdefault(name, entry.address)
    return usable


def own_address() -> str:
    """The address that gloo listens on by default: the first one of this host's name that is this machine's.

    "" when there is none; gloo then takes the loopback address.
    """
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ""

    # An address of this machine is one that a socket can be bound to.
    for family, kind, protocol, _, address in resolved:
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

    # The first is set by torchrun and accelerate, the second by deepspeed's own runner.
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name]) < world_size

    # Under srun the processes of a node are not counted.
    nodes = os.environ.get("SLURM_STEP_NUM_NODES", "")
    return nodes.isdigit() and int(nodes) > 1


def choose_interface() -> list[str]:
    """See to it that gloo listens where other nodes reach it; returns what to tell the user. For several nodes only.

    GLOO_SOCKET_IFNAME is taken from NCCL_SOCKET_IFNAME where that names an interface in full. Raises InputError for an
    interface that does not exist, and for a host that resolves its own name to a loopback address.
    """
    host = socket.gethostname()
    usable = interfaces()
    choice = ", ".join(f"{name} ({address})" for name, address in usable.items()) or "none but loopback"

    # What the user says of gloo holds, if it exists.
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if given:
        for name in given.split(","):
            if name not in psutil.net_if_addrs():
                raise InputError(f"GLOO_SOCKET_IFNAME: {host} has no network interface {name!r}; it has {choice}")
        return []

    # What the user says of NCCL holds for gloo too. NCCL's ^ means all interfaces but these.
    listed = os.environ.get("NCCL_SOCKET_IFNAME", "")
    names = [] if listed.startswith("^") else listed.removeprefix("=").split(",")
    for name in names:
        if name in usable:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return [f"gloo takes the interface of NCCL_SOCKET_IFNAME: GLOO_SOCKET_IFNAME={name}"]

    # Else gloo listens at the address that this host's name has.
    address = own_address()
    if not address or is_loopback(address):
        place = f"to {address}" if address else "to no address of this machine"
        reason = f"resolves its own name {place}, where no other node reaches it"
        raise InputError(f"{host}: {reason}; set GLOO_SOCKET_IFNAME to one of {choice}, or correct /etc/hosts")
    return []


# --- before there is a process group ----------------------------------------------------------------------------------


def meet(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store through which all ranks find each other, as init_process_group would make it.

    Raises InputError where the port is taken, or where not all come in time.
    """
    try:
        store = next(rendezvous("env://", rank, world_size, timeout=timeout))[0]
    except dist.DistError as error:
        raise _not_met(rank, str(error), timeout.total_seconds()) from None
    # rank 0 gives up first, and tells the others
    store.set_timeout(timeout + timedelta(seconds=2 * (rank > 0)))

    # Processes that torchrun has restarted on one machine may be given the same store again. On several nodes they
    # are not, and count their restarts differently.
    restarts = "0"
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start_{restarts}", store)


def _not_met(rank: int, reason: str, seconds: float) -> InputError:
    """Why ranks did not find each other, on rank 0; any other rank says it here, as it may be alone on its machine."""
    port = os.environ.get("MASTER_PORT")
    place = f"{os.environ.get('MASTER_ADDR')}:{port}"
    came = re.search(r"(\d+)/(\d+) clients joined", reason)
    if "EADDRINUSE" in reason or "address already in use" in reason.lower():
        message = f"{socket.gethostname()}: port {port} is taken by another program; set MASTER_PORT to a free one"
    elif came:
        message = (
            f"{came[1]} of {came[2]} processes came to {place} within {seconds:g} s; start the others, or correct "
        )
        message += "the number of processes (WORLD_SIZE)"
    else:
        message = f"{socket.gethostname()}: rank 0 not found at {place} within {seconds:g} s; see its log, and the "
        message += "address and port (MASTER_ADDR, MASTER_PORT)"
    if rank > 0:
        print(f"error: rank {rank}: {message}", file=sys.stderr, flush=True)
    return InputError(message)


def agree_to_start(store: dist.Store, rank: int, world_size: int, device: torch.device, backend: str) -> None:
    """All ranks: look at the machine, tell each other, and go on or end together.

    Sets NCCL's and gloo's variables that follow; rank 0 says which. Raises the first rank's InputError on all.
    """
    facts, notes = look_at_machine(world_size, device, backend)
    all_facts = exchange_facts(store, rank, world_size, facts)

    error = next((facts["error"] for facts in all_facts if facts["error"]), "") or mig_error(all_facts)
    if error:
        # Rank 0 may hold the store: it leaves when the others have read.
        if rank == 0:
            came = [other for other in range(world_size) if store.check([f"facts/{other}"])]
            store.wait([f"read/{other}" for other in came], timedelta(seconds=30))
        raise InputError(error)

    # One GPU that must not use P2P is enough: NCCL wants the same settings on all ranks.
    unset = [name for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in os.environ]
    if unset and any(facts["no_p2p"] for facts in all_facts):
        os.environ |= dict.fromkeys(unset, "1")
        least = ".".join(f"{part:02}" for part in RTX_40_DRIVER)
        notes.append(f"RTX 40 GPUs under a driver before {least}: {'=1 and '.join(unset)}=1 set for NCCL")
    if rank == 0:
        for note in notes:
            print(note, flush=True)


def look_at_machine(world_size: int, device: torch.device, backend: str) -> tuple[dict, list[str]]:
    """(facts about this rank's machine that all ranks need, notes for the user); an error is one of the facts."""
    facts = {"host": socket.gethostname(), "error": "", "mig": False, "no_p2p": False}
    notes = []
    try:
        notes += check_gpus()
        if several_nodes(world_size):
            notes += choose_interface()

        # A process too many for the GPUs is told so later.
        if device.type == "cuda" and "nccl" in backend and device.index < torch.cuda.device_count():
            facts["mig"] = is_mig_slice(device)
            facts["no_p2p"] = needs_no_p2p(device)
    except InputError as error:
        facts["error"] = str(error)
    except RuntimeError as error:
        # CUDA does not start.
        advice = advice_for(str(error))
        if not advice:
            raise
        facts["error"] = f"{facts['host']}: {cause_of(str(error))}; {advice}"
    return facts, notes


def exchange_facts(store: dist.Store, rank: int, world_size: int, facts: dict) -> list[dict]:
    """The facts of all ranks. Rank 0 collects and hands out: two messages a rank, also on many nodes."""
    names = [f"facts/{other}" for other in range(world_size)]
    store.set(f"facts/{rank}", json.dumps(facts))

    # rank 0 waits for all, and says who did not come
    if rank == 0:
        try:
            texts = store.multi_get(names)
        except dist.DistStoreError:
            missing = [str(other) for other in range(world_size) if not store.check([names[other]])]
            reason = (
                f"rank {', '.join(missing)} of {world_size} did not come within {store.timeout.total_seconds():g} s"
            )
            reason += "; see its log, or correct the number of processes (WORLD_SIZE)"
            texts = [json.dumps(facts | {"error": reason})]
        store.set("facts", json.dumps([json.loads(text) for text in texts]))

    # the others hear from it
    try:
        all_facts = json.loads(store.get("facts"))
    except dist.DistError as error:
        raise _not_met(rank, str(error), store.timeout.total_seconds()) from None
    store.set(f"read/{rank}", "")
    return all_facts


def mig_error(facts: list[dict]) -> str:
    """What is wrong when several processes of a machine have slices of GPUs; "" if nothing is."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ""
    slices = Counter(fact["host"] for fact in facts if fact["mig"])
    for host, count in slices.items():
        if count > 1:
            reason = "experimental in its newest versions, with NCCL_MULTI_RANK_GPU_ENABLE=1"
            advice = "start one process, or use whole GPUs"
            return f"{host}: {count} processes on MIG slices, which NCCL does not join ({reason}); {advice}"
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
    return next((failure.advice for failure in FAILURES if re.search(failure.pattern, text)), "")


@contextlib.contextmanager
def explain_failure(store: dist.Store | None, rank: int) -> Iterator[None]:
    """Around the start of the process group and the first tensor on the GPU: tells a failure that is known in one line.

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

        # An unknown failure may be the echo of another rank's known one.
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
        # The store is gone, and with it a rank 0 that has explained its own failure.
        return own if rank else 0
