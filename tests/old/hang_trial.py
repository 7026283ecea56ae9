"""Eleven kinds of fault, planted in train.py by three processes: are the right rank and place named?

python tests/old/hang_trial.py FOLDER [ROUNDS] [KIND ...] prints a line for each trial and a table. Each must name the
rank and the place, end within --dist_timeout + 5 s of the fault, and leave no process behind. Linux.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 20
RANKS = 3

# where faults are met: file and function
STEP = ("train.py", "count_actions")
LOAD = ("tasks/compressed_ad/data.py", "__getitems__")
SAVE = ("manifest_utils.py", "write_checkpoint")

# kind: (fault of plant_fault.py, where, whether in a loading process, what the line says)
PLANTED = {
    "SIGSTOP of a rank": (
        "stop",
        *STEP,
        False,
        r"rank {rank} on .* is stopped .* in train.py:\d+ count_actions",
    ),
    "endless loop in a loader": ("loop", *LOAD, True, r"rank {rank} on .* hangs .*data.py:\d+ __getitems__ \(loading"),
    "slow disk": ("slow", *LOAD, True, r"rank {rank} on .* hangs .*data.py:\d+ __getitems__ \(loading"),
    "exception on one rank": ("crash", *STEP, False, r"rank {rank} on .* crashed .*count_actions: ValueError: planted"),
    "killed loader": ("kill", *LOAD, True, r"rank {rank} on .* in old/loop_utils.py:\d+ optimizer_steps: .*DataLoader"),
    "lock held": ("lock", *STEP, False, r"rank {rank} on .* hangs .* in train.py:\d+ count_actions"),
    "out-of-memory kill": ("kill", *STEP, False, r"rank {rank} on .* has died .* after step \d+ in \S+:\d+ \w+"),
    "crash in C code": ("segfault", *STEP, False, r"rank {rank} .*died \(Seg.* in train.py:\d+ count_actions"),
    "full disk": ("full", *SAVE, False, r"step_\d+.pt.*No space left on device"),
}
START = {
    "port taken": r"port {port} is taken by another program; set MASTER_PORT",
    "wrong world size": r"2 of 3 processes came to 127.0.0.1:{port} within .*WORLD_SIZE",
}
# loading processes are forked anew in each epoch
SHORT_EPOCHS = "--num_workers 1 --n_transit 100 --train_batch_size 64 --train_timesteps 100000 --eval_interval 100000"
SHORT_EPOCHS += " --log_every 1"


def flags(folder: Path, out: Path) -> list[str]:
    """A training that never ends by itself, with a loading process for each rank."""
    words = f"train.py --data {folder / 'data'} --output_dir {out} --tf_n_embd 16 --tf_n_layer 2 --tf_n_head 2"
    words += " --encoder_n_layer 1 --tf_dim_feedforward 32 --n_latent 4"
    words += f" {SHORT_EPOCHS} --save_every 4 --dist_timeout {TIMEOUT}"
    return words.split()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_of_trial(process: psutil.Process, mark: str) -> bool:
    """Whether a process was started by a trial, whoever its parent is now."""
    try:
        return process.environ().get("TRIAL") == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def plant(kind: str, folder: Path, mark: str, rank: int) -> tuple[str, float, str]:
    """(output, seconds from the fault to the end, pattern) of a training in which one rank meets a fault."""
    fault, file, function, in_loader, pattern = PLANTED[kind]
    rank = 0 if fault == "full" else rank
    out = folder / mark
    shutil.rmtree(out, ignore_errors=True)
    facts = {"kind": fault, "rank": rank, "file": file, "function": function, "call": 2, "in_loader": in_loader}
    facts |= {"told": str(folder / f"{mark}.told"), "after": str(out / "metrics.jsonl")}
    environment = os.environ | {"TRIAL": mark, "FAULT": json.dumps(facts)}

    # the planting script lies outside of the project, as a fault does
    planter = shutil.copy(ROOT / "tests/old/plant_fault.py", folder)
    command = [sys.executable, "old/launch_utils.py", "torchrun", "--standalone", f"--nproc_per_node={RANKS}", planter]
    command += flags(folder, out)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if not Path(facts["told"]).exists():
        return f"{done.stderr}the fault was not met", 0.0, pattern
    seconds = time.time() - float(Path(facts["told"]).read_text())
    shutil.rmtree(out, ignore_errors=True)
    return done.stderr, seconds, pattern.format(rank=rank)


def start_wrongly(kind: str, folder: Path, mark: str) -> tuple[str, float, str]:
    """(output, seconds to the end, pattern) of processes that do not find each other, each started by itself."""
    port = free_port()
    environment = os.environ | {"TRIAL": mark, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    listener = socket.socket()
    if kind == "port taken":
        listener.bind(("", port))
        listener.listen()

    started = []
    for rank in range(2):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, *flags(folder, folder / mark)]
        started.append(subprocess.Popen(command, cwd=ROOT, env=own, stderr=subprocess.PIPE, text=True))
    begun = time.time()
    output = "".join(process.communicate(timeout=300)[1] for process in started)
    listener.close()
    return output, time.time() - begun, START[kind].format(port=port)


def trial(kind: str, folder: Path, number: int) -> bool:
    """Whether a fault was named rightly, and the run ended in time and left no process."""
    mark = f"trial_{kind.replace(' ', '_')}_{number}"
    if kind in START:
        output, seconds, pattern = start_wrongly(kind, folder, mark)
        # the start of Python and torch comes before there is anything to wait for
        seconds -= 20
    else:
        output, seconds, pattern = plant(kind, folder, mark, number % RANKS)

    # what is said, and what is left
    left = [process for process in psutil.process_iter() if is_of_trial(process, mark)]
    lines = [line for line in output.splitlines() if line.startswith("error:")]
    named = any(re.search(pattern, line) for line in lines)

    # all three count
    good = named and seconds <= TIMEOUT + 5 and not left
    print(
        f"{kind}: {'good' if good else 'BAD'}, {seconds:.1f} s, {len(left)} left\n  " + "\n  ".join(lines), flush=True
    )
    if not named:
        print(output[-3000:])
    return good


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    kinds = sys.argv[3:] or [*PLANTED, *START]
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not (folder / "data").exists():
        command = [sys.executable, "-m", "tools.sample_data", "compressed_ad", folder / "data"]
        subprocess.run([*command, "--streams", "3", "--steps", "200"], cwd=ROOT, check=True)

    results = {kind: [trial(kind, folder, number) for number in range(rounds)] for kind in kinds}
    for kind, good in results.items():
        print(f"{kind:30} {sum(good)} of {len(good)}")
    return 0 if all(all(good) for good in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
