"""Runs torchrun in this process and ends as the training script ended.

python old/launch_utils.py torchrun --standalone --nproc_per_node=2 train.py ...

A script says by itself, in one line, what was wrong or where it saved. torchrun alone would print a traceback of its
own below that and end with code 1, whatever the script's code was.
"""

import gc
import logging
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    # started by its path, from any folder: what it imports is found from the project's folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from old.elastic_utils import CRASHED, end_of_rendezvous, is_elastic, use_elastic_agent

# How a script ends by itself: done, an error or a crash that it has reported, wrong input, a crash of one rank among
# ranks that may come and go, Ctrl-C, SIGTERM.
REPORTED = (0, 1, 2, CRASHED, 130, 143)

# Seconds within which others may have noted that a worker was killed.
ECHO = 5

# How lines begin that say nothing new.
QUIET = ("Sending process %s closing signal", "Received %s death signal", "no error file defined for parent")

# Modules of torchrun that log a line for each process that ends or is told to.
NOISY = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")
NOISY += ("torch.distributed.elastic.multiprocessing.errors.error_handler",)


def is_worth_showing(record: logging.LogRecord) -> bool:
    """False for torchrun's log lines about workers that end by themselves or are told to."""
    message = str(record.msg)
    if message.startswith("failed (exitcode"):
        exit_code = record.args[0]
        return exit_code > 0 and exit_code not in REPORTED
    return not message.startswith(QUIET)


def report_end(worker: str, code: int) -> int:
    """The exit code for a worker that ended with `code`; one line if it did not report its end by itself."""
    if code in REPORTED:
        return code
    reason = f"exit code {code}"
    if code < 0:
        reason = f"signal {-code}"
        if -code in set(signal.Signals):
            reason += f" ({signal.Signals(-code).name})"

    print(f"error: {worker} ended with {reason}", file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def end_of_failures(failures: dict) -> int:
    """The exit code for torchrun's {rank: ProcessFailure}."""
    first = min(failures, key=lambda rank: failures[rank].timestamp)

    # Where a rank has told which one hung or died, that is said.
    told = any("; stacks: " in str(failure.message) for failure in failures.values())
    if told:
        return 1

    # A killed worker takes others with it, and torchrun ends the rest by SIGTERM: report the killed one.
    for rank, failure in failures.items():
        same_time = failure.timestamp <= failures[first].timestamp + ECHO
        if same_time and failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            first = rank
    return report_end(f"rank {first}", failures[first].exitcode)


def end_of_signal(number: int) -> int:
    """The exit code after this process was told to stop: waits for workers that still save."""
    # A second signal ends this process at once, and the workers with it.
    signal.signal(number, signal.SIG_DFL)

    # torchrun waits for its workers but tells nobody how they ended.
    workers = [item for item in gc.get_objects() if type(item) is subprocess.Popen]
    for worker in workers:
        if worker.poll() is None:
            # Windows has told every process of the console already, and knows no other way to.
            if sys.platform != "win32":
                worker.send_signal(number)
            worker.wait()

    # Those that had no time to listen to the signal yet have ended by it.
    expected = (0, 128 + number, -number)
    for worker in workers:
        if worker.returncode not in expected:
            return report_end(f"process {worker.pid}", worker.returncode)
    return 128 + number


def main() -> int:
    """Run the command that the words of the command line name; returns the exit code."""
    # Until there are workers, Ctrl-C just ends this process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    # What is started here reads sys.argv as its own command line.
    sys.argv = sys.argv[1:]
    from torch.distributed.run import main as launch

    # torchrun says nothing of ends that the script has told.
    for name in NOISY:
        logging.getLogger(name).addFilter(is_worth_showing)

    if is_elastic():
        use_elastic_agent()

    def stop(number: int, _frame) -> None:
        raise SignalException(f"signal {number}", signal.Signals(number))

    # torchrun replaces these by the same.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)

    try:
        launch()
    except ChildFailedError as error:
        return end_of_failures(error.failures)
    except RendezvousError as error:
        if not is_elastic():
            raise
        return end_of_rendezvous(error)
    except SignalException as error:
        return end_of_signal(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
