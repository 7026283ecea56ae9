"""Training on whatever GPUs there are: each has a torchrun agent of its own, so that one can go and come back.

python old/elastic_utils.py --agents 4 --ranks 1:4 train.py ...

torchrun's elastic rendezvous drops and takes in whole agents, so there is one agent for each rank. This process starts
those of its machine, holds the store that they meet at, passes on signals, starts a killed agent again after a while,
and ends as the training ended. See docs/elastic.md.
"""

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    # started by its path, from any folder: what it imports is found from the project's folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from old.cli_utils import InputError, Parser, end_with, record_failure, whole

# How a worker ends that may go on from the newest checkpoint: a crash, or a peer that is gone.
CRASHED = 70
# How a worker ends whose machine is at fault: its agent leaves, and the other ranks go on without it.
DROPPED = 71
# A script ends like this by itself, on all ranks together: done, an error it has told, wrong input.
ENDED = (0, 1, 2)

# How often agents show that they are alive, and after how many silent intervals one counts as dead. Clocks of several
# machines differ.
HEARTBEAT_SECONDS = {"one machine": (1, 5), "several": (2, 5)}
# How long a worker may go on that was told to stop as a peer is gone: it may complete a checkpoint.
STUCK_SECONDS = 60
# How long the others are waited for once there are enough ranks.
LAST_CALL_SECONDS = {"one machine": 1, "several": 5}


def is_elastic() -> bool:
    """Whether this process is a worker, or an agent, of a training whose ranks may come and go."""
    return "ELASTIC_RANKS" in os.environ


def leave_out(line: str) -> None:
    """End this rank, whose machine is at fault, with a line; the others go on without it."""
    record_failure(line)
    print(f"error: {line}", file=sys.stderr, flush=True)
    os._exit(DROPPED)


def crash_code() -> int:
    """The exit code of a rank that cannot go on, while the training may."""
    return CRASHED if is_elastic() else 1


def check_elastic(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Flags of a script that a training must have, or cannot have, whose ranks may come and go; ends it with code 2."""
    if args.overwrite:
        parser.error("--overwrite: would delete the run at each restart; remove the run folder yourself")
    if args.effective_batch_size is None:
        parser.error("--ranks: the batch must not change with the GPUs; give --effective_batch_size N")
    if args.resume_from != "auto":
        # each restart would go back to it
        parser.error("--resume_from: with --ranks only auto, as it restarts from the newest checkpoint")


def die_with(parent: int) -> None:
    """Linux: get SIGTERM when the parent, of this process id, dies. Ends at once if that has happened already."""
    if sys.platform != "linux":
        return
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


# --- the agent of one rank --------------------------------------------------------------------------------------------


class Finished(NamedTuple):
    """The result of a worker that has finished, and torchrun's handle of that worker."""

    of: object
    result: object


def use_elastic_agent() -> None:
    """Let torchrun, in this process, use an agent that knows which ends of its worker are final."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.launcher import api

    class Agent(LocalElasticAgent):
        """torchrun's agent, which ends with what a script has told, and restarts no one for less than a change."""

        _finished = None
        _lost_one = False

        def _look_at_worker(self, worker_group) -> RunResult:
            """How the worker does; one that has finished is kept until all have, as a change may call it back."""
            if self._finished is None or self._finished.of is not self._pcontext:
                result = super()._monitor_workers(worker_group)
                if result.state != WorkerState.SUCCEEDED:
                    return result
                self._finished = Finished(self._pcontext, result)
                worker_group.store.add("finished", 1)
            if worker_group.store.add("finished", 0) >= worker_group.group_world_size:
                return self._finished.result
            return RunResult(state=WorkerState.HEALTHY)

        def _monitor_workers(self, worker_group) -> RunResult:
            result = self._look_at_worker(worker_group)
            codes = {failure.exitcode for failure in result.failures.values()}

            # what the script has told is the same on all ranks, and would be told again
            if codes.intersection(ENDED):
                self._remaining_restarts = 0
            if DROPPED in codes:
                os._exit(DROPPED)

            # a worker was asked to save and make room for a change
            if 128 + signal.SIGTERM in codes:
                self._remaining_restarts += 1

            # an agent is gone without a word: its peers may be stuck
            rendezvous = worker_group.spec.rdzv_handler
            alive = len(rendezvous._state_holder.state.participants)
            self._lost_one = alive < worker_group.group_world_size
            if result.state == WorkerState.HEALTHY and self._lost_one:
                self._remaining_restarts += 1
                return RunResult(state=WorkerState.FAILED)
            return result

        def _stop_workers(self, worker_group) -> None:
            # who makes room for a newcomer may take its time to save
            timeout = STUCK_SECONDS if self._lost_one else self._shutdown_timeout
            self._shutdown(timeout=timeout)

    api.LocalElasticAgent = Agent
    die_with(int(os.environ["ELASTIC_PARENT"]))
    os.environ["ELASTIC_PARENT"] = str(os.getpid())
    _wait_for_local_agents()


def _wait_for_local_agents() -> None:
    """At the first start on one machine: begin together, or the first agents would start without the others."""
    from torch.distributed import TCPStore

    gate = os.environ.pop("ELASTIC_GATE", "")
    if not gate:
        return
    port, agents = gate.split(":")
    store = TCPStore("127.0.0.1", int(port), is_master=False)
    store.add("ready", 1)
    deadline = time.monotonic() + 60
    while store.add("ready", 0) < int(agents) and time.monotonic() < deadline:
        time.sleep(0.05)


def end_of_rendezvous(error: Exception) -> int:
    """The exit code for torchrun's RendezvousError; one line if it is an error."""
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

    if isinstance(error, RendezvousClosedError):
        # The training has ended without this rank.
        return 0
    reason = "the node that holds the rendezvous is gone; start the training again, it goes on from its checkpoint"
    if isinstance(error, RendezvousTimeoutError):
        least = os.environ["ELASTIC_RANKS"].partition(":")[0]
        reason = f"fewer than {least} ranks for too long; start more nodes, or lower MIN of --ranks=MIN:MAX"
    print(f"error: {reason}", file=sys.stderr, flush=True)
    return 1


# --- the agents of one machine ----------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line: how many agents, and the script with its flags."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--agents", type=whole(1), required=True, help="ranks of this machine, one per GPU")
    add("--ranks", metavar="MIN:MAX", required=True, help="how many ranks the training may have, over all machines")
    add("--endpoint", metavar="HOST:PORT", help="several machines: where they meet")
    add("--host", action="store_true", help="this machine is HOST")
    add("--rejoin", type=whole(1), default=30, help="seconds after which a killed agent is started again")
    add("--max_restarts", type=whole(1), default=30, help="crashes of a rank that are put up with")
    add("script", nargs=argparse.REMAINDER, help="the script and its flags")
    return parser.parse_args(argv)


def read_ranks(text: str, agents: int) -> tuple[int, int]:
    """(least, most) of MIN:MAX. Raises InputError."""
    found = re.fullmatch(r"([1-9][0-9]{0,6}):([1-9][0-9]{0,6})", text)
    if not found or int(found[1]) > int(found[2]):
        raise InputError(f"--ranks: must be MIN:MAX with MIN <= MAX, such as 1:4, not {text!r}")
    least, most = int(found[1]), int(found[2])
    if most < agents:
        raise InputError(f"--ranks: {text} with {agents} processes on this machine; raise MAX")
    return least, most


def complete_script(words: list[str]) -> list[str]:
    """The script's command line with --resume_from auto. Raises InputError without a script."""
    if not words:
        raise InputError("no script to start; give one after the flags")
    if any(word.partition("=")[0] == "--resume_from" for word in words):
        return words
    return [*words, "--resume_from", "auto"]


def agent_command(args: argparse.Namespace, endpoint: str) -> list[str]:
    """torchrun's command line for the agent of one rank."""
    machines = "several" if args.endpoint else "one machine"
    interval, attempts = HEARTBEAT_SECONDS[machines]
    meeting = [f"last_call_timeout={LAST_CALL_SECONDS[machines]}"]
    meeting += [f"keep_alive_interval={interval}", f"keep_alive_max_attempt={attempts}"]
    # the store is in the process that starts the agents
    meeting.append("is_host=0")

    launcher = str(Path(__file__).with_name("launch_utils.py"))
    command = [sys.executable, launcher, "torchrun", f"--nnodes={args.ranks}", "--nproc_per_node=1"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=training"]
    command += [f"--rdzv_conf={','.join(meeting)}", f"--max_restarts={args.max_restarts}"]
    if not args.endpoint:
        command.append("--local_addr=127.0.0.1")
    return [*command, *args.script]


def own_gpus(agents: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each agent; empty on a machine without GPUs. Raises InputError for too few of them."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        return []
    if agents > gpus:
        raise InputError(f"{agents} processes, but there are {gpus} GPUs; start at most one per GPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(gpus)]
    return [name.strip() for name in names]


class Agents:
    """The agents of this machine, by their number from 0."""

    def __init__(self, command: list[str], gpus: list[str], rejoin: float, tries: int, least: int = 1):
        """least: so many of them must run; 1 where other machines may have them."""
        self.command = command
        self.least = least
        self.gpus = gpus
        self.rejoin = rejoin
        # starts that each agent may still have after it was killed
        self.tries: dict[int, int] = {}
        self.most_tries = tries
        self.running: dict[int, subprocess.Popen] = {}
        # when a killed agent is started again
        self.due: dict[int, float] = {}
        self.codes: list[int] = []
        self.signal = 0

    def start(self, number: int, gate: str = "") -> None:
        """Start an agent; gate: see _wait_for_local_agents."""
        environment = os.environ | {"ELASTIC_PARENT": str(os.getpid())}
        if gate:
            environment["ELASTIC_GATE"] = gate
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[number]

        # Ctrl-C reaches an agent through this process alone: a second signal would end it before it has saved
        self.running[number] = subprocess.Popen(self.command, env=environment, start_new_session=True)

    def stop(self, number: int, _frame) -> None:
        """Pass a signal on to all agents, which save and end."""
        self.signal = number
        for agent in self.running.values():
            agent.send_signal(number)

    def call_back(self, _number: int, _frame) -> None:
        """Start the killed agents again now."""
        self.due = dict.fromkeys(self.due, 0.0)

    def look(self) -> None:
        """Note which agents have ended, and start those that are due again."""
        for number, agent in list(self.running.items()):
            code = agent.poll()
            if code is None:
                continue
            del self.running[number]
            if code >= 0 and code != DROPPED:
                self.codes.append(1 if code == CRASHED else code)
            elif not self.signal:
                self.lose(number, code)

        # a training that has ended is not joined
        for number, due in list(self.due.items()):
            if time.monotonic() >= due and not self.codes and not self.signal:
                del self.due[number]
                self.start(number)

    def lose(self, number: int, code: int) -> None:
        """Say that an agent is gone, and when it comes back."""
        place = f"GPU {self.gpus[number]}" if self.gpus else f"process {number}"
        tries = self.tries.setdefault(number, self.most_tries)
        if code == DROPPED or not tries:
            print(f"elastic: {place} is left out; the others go on without it", file=sys.stderr, flush=True)
            return
        self.tries[number] -= 1
        self.due[number] = time.monotonic() + self.rejoin
        others = "the others go on" if len(self.running) >= self.least else f"fewer than {self.least} are left and wait"
        reason = f"ended by signal {-code}; {others}, it joins again in {self.rejoin:g} s"
        print(f"elastic: {place} {reason}", file=sys.stderr, flush=True)

    def wait(self) -> int:
        """The exit code of the training, once all agents have ended."""
        while self.running or (self.due and not self.codes and not self.signal):
            self.look()
            time.sleep(0.1)
        if any(self.codes):
            return next(code for code in self.codes if code)
        if self.signal:
            return 128 + self.signal
        return 0 if self.codes else 1


def main() -> int:
    """Start the agents of this machine and wait for them; returns the exit code."""
    args = parse_args()
    try:
        least, most = read_ranks(args.ranks, args.agents)
        args.script = complete_script(args.script)
        gpus = own_gpus(args.agents)
    except InputError as error:
        end_with(error)
    if sys.platform == "win32":
        end_with(InputError("torchrun on Windows has no elastic agents; start without it, or under Linux"))

    os.environ["ELASTIC_RANKS"] = f"{least}:{most}"
    # A worker takes no store of a start before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    # the store outlives every agent of this machine
    from torch.distributed import TCPStore

    endpoint = args.endpoint
    if not endpoint or args.host:
        port = int(endpoint.rpartition(":")[2]) if endpoint else 0
        store = TCPStore("0.0.0.0" if endpoint else "127.0.0.1", port, is_master=True, wait_for_workers=False)
        endpoint = endpoint or f"127.0.0.1:{store.port}"

    needed = 1 if args.endpoint else least
    agents = Agents(agent_command(args, endpoint), gpus, args.rejoin, args.max_restarts, needed)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, agents.stop)
    signal.signal(signal.SIGUSR2, agents.call_back)
    gate = "" if args.endpoint else f"{store.port}:{args.agents}"
    for number in range(args.agents):
        agents.start(number, gate)
    code = agents.wait()

    # agents of other machines still say goodbye to the store
    if args.host:
        time.sleep(5)
    return code


if __name__ == "__main__":
    sys.exit(main())
