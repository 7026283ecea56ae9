"""How long a training stands still when a rank is lost, under torchrun's own agents.

    python benchmarks/restart_gap.py FOLDER [ROUNDS] [KIND ...]

Trainings of train.py by three processes take turns. In each a worker is killed, or an agent with its worker;
the seconds from then to the second step that is new are counted. torchrun's agents notice a lost one after 15 s; with
SETTINGS after 5 s. Linux, with nothing else to do.
"""

import argparse
import contextlib
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
RANKS = 3
KINDS = ("worker", "agent")
WAYS = ("torchrun", "torchrun with SETTINGS")
SETTINGS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
MODEL = "--tf_n_embd 16 --tf_n_layer 2 --tf_n_head 2 --n_transit 20 --val_episodes 2 --eval_episodes 3 --eval_seeds 2"
RUN = "--train_timesteps 100000 --eval_interval 100000 --effective_batch_size 6 --batch_size 2 --save_every 5"


def start(way: str, words: list[str], log) -> list[psutil.Popen]:
    """Start a training; returns the processes that the test has started itself."""
    # where workers share torchrun's store they meet the addresses of the start before, and seldom come together
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f"--nnodes=1:{RANKS}", "--nproc_per_node=1", "--max_restarts=30", "--rdzv_backend=c10d"]
    flags += [f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=training", "--local_addr=127.0.0.1"]
    settings = "" if way == "torchrun" else f",{SETTINGS}"

    # the first one holds the store
    commands = []
    for number in range(RANKS):
        own = f"--rdzv_conf=is_host={int(number == 0)}{settings}"
        commands.append([sys.executable, "utils/torchrun.py", *flags, own, *words])
    return [psutil.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) for command in commands]


def end(started: list[psutil.Popen]) -> None:
    """End a training with all its processes."""
    everyone = list(started)
    for process in started:
        everyone += process.children(recursive=True)
    for process in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for process in started:
        process.wait()


def wait_for(condition, log: Path) -> float:
    """The time at which a condition came to hold; ends the benchmark with the log after two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(log.read_text()[-5000:])
        time.sleep(0.02)
    return time.monotonic()


def gap(way: str, kind: str, folder: Path) -> float:
    """Seconds from a kill to the second step that is new."""
    run_folder = folder / "run"
    shutil.rmtree(run_folder, ignore_errors=True)
    words = ["train.py", "--data", str(folder / "data"), *MODEL.split(), *RUN.split(), "--log_every", "1"]
    words += ["--output_dir", str(run_folder), "--resume_from", "auto"]
    log = folder / "log"

    def trained() -> int:
        path = run_folder / "metrics.jsonl"
        found = re.findall(r'"step": (\d+).*"train/loss"', path.read_text()) if path.exists() else []
        return int(found[-1]) if found else 0

    with open(log, "w") as file:
        started = start(way, words, file)
        try:
            wait_for(lambda: trained() >= 12, log)

            # the agent that holds torchrun's store stays
            agent = started[-1]
            struck = agent.children(recursive=True)
            if kind == "agent":
                struck.append(agent)
            for process in struck:
                process.kill()
            reached, killed = trained(), time.monotonic()
            return wait_for(lambda: trained() > reached + 1, log) - killed
        finally:
            end(started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("kinds", choices=KINDS, nargs="*")
    given = parser.parse_args()
    folder, rounds, kinds = given.folder, given.rounds, given.kinds or KINDS
    data = folder / "data"
    if not data.exists():
        sizes = "--streams 3 --steps 200".split()
        subprocess.run([sys.executable, "-m", "tools.sample_data", "compressed_ad", data, *sizes], cwd=ROOT, check=True)

    # only a lost agent is a matter of these settings
    seconds = {(kind, way): [] for kind in kinds for way in WAYS}
    seconds.pop(("worker", WAYS[1]), None)
    for _ in range(rounds):
        for kind, way in seconds:
            seconds[kind, way].append(gap(way, kind, folder))
            print(f"{kind}, {way}: {seconds[kind, way][-1]:.1f} s", flush=True)

    for (kind, way), found in seconds.items():
        print(f"{kind:8} {way:32} median {statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f}) s")


if __name__ == "__main__":
    main()
