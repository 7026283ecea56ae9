"""Start a training script with a fault in it: `with_fault.py KIND@STEPS@RANK script.py ...`, STEPS as 7 or 3-19.

nan: the loss is not a number. hang: the rank stands still before the step. hang_inside: between forward and backward
pass. stop: SIGSTOP to itself. loop: an endless loop that never waits. segv: a crash in C code. slow_loader: a batch
that takes forever. drift: a weight changes a little. die: SIGKILL. kill_eval1: SIGKILL in the first evaluation after
the step, of those that have a batch on this rank; kill_eval2: in the second; int_eval1: SIGINT. slow: each step takes
50 ms longer, on all ranks. oom: no memory is left. small: more than STEPS samples at once do not fit. numpy: metrics
are NumPy's numbers. fp16: half precision and a loss scale on the CPU, and a loss that is not a number. minutes: by the
clock each step takes 6.1 s. RANK is a number or `all`.
"""

import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import distributed_utils as du
import hardware_utils
from utils import loop

KIND, STEPS, RANK = (sys.argv[1] + "@0@0").split("@")[:3]
FIRST, LAST = [*map(int, STEPS.split("-")), int(STEPS.split("-")[0])][:2]

EVALUATIONS: list[str] = []


def is_here(run: loop.Run | loop.Training, done: int = 0) -> bool:
    """Whether this rank is at one of the steps; done: how many of them it has counted already."""
    return FIRST <= run.position.step + 1 - done <= LAST and RANK in ("all", str(run.ranks.rank))


def heartbeat(run: loop.Run, place: str) -> None:
    """Called by each rank at the begin of each step and of each batch of an evaluation."""
    REAL_HEARTBEAT(run, place)
    if KIND == "slow":
        time.sleep(0.05)
    if "_eval" in KIND and place.startswith("batch 1 of the evaluation") and is_here(run, done=1):
        EVALUATIONS.append(place)
        if len(EVALUATIONS) == int(KIND[-1]):
            os.kill(os.getpid(), signal.SIGINT if KIND.startswith("int") else signal.SIGKILL)
    if place.startswith("step") and is_here(run):
        if KIND == "hang":
            time.sleep(10_000)
        if KIND == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if KIND == "loop":
            while True:
                pass
        if KIND == "segv":
            ctypes.string_at(0)
        if KIND == "die":
            os.kill(os.getpid(), signal.SIGKILL)


def fetch(training: loop.Training, *options) -> tuple:
    if KIND == "slow_loader" and is_here(training):
        time.sleep(10_000)
    return REAL_FETCH(training, *options)


def backward(step: loop.Step, *losses, **options) -> None:
    if is_here(step.training):
        if KIND == "hang_inside":
            time.sleep(10_000)
        if KIND in ("nan", "fp16"):
            losses = [loss * float("nan") for loss in losses]
        if KIND == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory")
    REAL_BACKWARD(step, *losses, **options)


def update(step: loop.Step, lr: float) -> None:
    REAL_UPDATE(step, lr)
    if KIND == "drift" and is_here(step.training, done=1):
        step.training.engine.optimizer.param_groups[0]["params"][0].data.view(-1)[0] += 1e-6


def fit(try_once, model, size: int) -> float:
    def within(count: int) -> None:
        if KIND == "small" and count > FIRST and RANK in ("all", str(du.world()[0])):
            raise torch.OutOfMemoryError("CUDA out of memory")
        try_once(count)

    return REAL_FIT(within, model, size)


def record(training: loop.Training, metrics: dict, headline: str = "", lower: bool = False) -> None:
    if KIND == "numpy":
        metrics = {name: np.float64(value) for name, value in metrics.items()}
    REAL_RECORD(training, metrics, headline, lower)


if KIND == "fp16":
    hardware_utils.choose_precision = lambda *_: ("fp16", "as on a GPU")
if KIND == "minutes":
    REAL_CLOCK, UPDATES = time.monotonic, []
    register_optimizer_step_post_hook(lambda *_: UPDATES.append(1))
    time.monotonic = lambda: REAL_CLOCK() + 6.1 * len(UPDATES)
REAL_RECORD, loop.Training.record = loop.Training.record, record
REAL_FIT, loop._time_pass = loop._time_pass, fit
REAL_FETCH, loop.Training._fetch = loop.Training._fetch, fetch
REAL_HEARTBEAT, REAL_BACKWARD, REAL_UPDATE = loop.Run.heartbeat, loop.Step.backward, loop.Step.update
loop.Run.heartbeat, loop.Step.backward, loop.Step.update = heartbeat, backward, update
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
