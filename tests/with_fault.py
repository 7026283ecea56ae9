"""Run a training script with an injected fault: `with_fault.py KIND@STEPS@RANK script.py ...`.

STEPS is a step or a range, such as 7 or 3-19; RANK is a number or `all`. KIND is one of:

nan           the loss is NaN
fp16          the loss is NaN, in half precision with a loss scale on the CPU
oom           the backward pass runs out of memory
small         only micro-batches of at most STEPS samples fit into memory
drift         one weight changes slightly after the step
hang          sleep before the step
hang_inside   sleep between the forward and the backward pass
slow_loader   the batch never arrives; in a single process it is 2 s late
stop          stop itself by SIGSTOP
segv          crash in C code
die           kill itself by SIGKILL
kill_eval<n>  kill itself in the n-th evaluation after the step, counting only those with a batch on this rank
int_eval<n>   the same with SIGINT
slow          every step and every evaluation batch takes 50 ms longer, on all ranks
minutes       every step takes 6.1 s by the clock that decides about checkpoints
"""

import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import distributed_utils as du
import hardware_utils
from utils import loop

KIND, STEPS, RANK = (sys.argv[1] + "@0@0").split("@")[:3]
FIRST, LAST = [*map(int, STEPS.split("-")), int(STEPS.split("-")[0])][:2]

EVALUATIONS: list[str] = []


def is_here(run: loop.Run | loop.Training, done: int = 0) -> bool:
    """Whether this rank is at one of STEPS. done: 1 once the current step has been counted."""
    return FIRST <= run.position.step + 1 - done <= LAST and RANK in ("all", str(run.ranks.rank))


def heartbeat(run: loop.Run, place: str) -> None:
    """Called on each rank before every step and every batch of an evaluation."""
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
        if KIND == "segv":
            ctypes.string_at(0)
        if KIND in ("stop", "die"):
            os.kill(os.getpid(), signal.SIGSTOP if KIND == "stop" else signal.SIGKILL)


def fetch(training: loop.Training, *options) -> tuple:
    if KIND == "slow_loader" and is_here(training):
        time.sleep(10_000 if training.ranks.world_size > 1 else 2)
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


def time_pass(try_once, model, size: int) -> float:
    def try_with_limit(count: int) -> None:
        if KIND == "small" and count > FIRST and RANK in ("all", str(du.world()[0])):
            raise torch.OutOfMemoryError("CUDA out of memory")
        try_once(count)

    return REAL_TIME_PASS(try_with_limit, model, size)


if KIND == "fp16":
    hardware_utils.choose_precision = lambda *_: ("fp16", "as on a GPU")
if KIND == "minutes":
    REAL_CLOCK, UPDATES = time.monotonic, []
    register_optimizer_step_post_hook(lambda *_: UPDATES.append(1))
    time.monotonic = lambda: REAL_CLOCK() + 6.1 * len(UPDATES)
REAL_TIME_PASS, loop._time_pass = loop._time_pass, time_pass
REAL_FETCH, loop.Training._fetch = loop.Training._fetch, fetch
REAL_HEARTBEAT, REAL_BACKWARD, REAL_UPDATE = loop.Run.heartbeat, loop.Step.backward, loop.Step.update
loop.Run.heartbeat, loop.Step.backward, loop.Step.update = heartbeat, backward, update
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
