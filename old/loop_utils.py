"""One optimizer step at a time: what must be the same in every training loop, or a run's promise breaks.

A script keeps its loop and its loss. Here stand the position in a run, the step's share of the samples, the agreement
of the ranks before it, the update of the weights, the log and the checkpoints after it, and what begins and ends a run.
"""

import contextlib
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from old.checkpoint_utils import best_sha256, check_same_run, mark_best, restore_optimizer, restore_rng
from old.checkpoint_utils import restore_scaler, save_checkpoint, settle_checkpoint
from old.cli_utils import InputError, RunError
from old.distributed_utils import Ranks, StopSignal, agree_on_errors, gather_objects, leave_alone, print_main
from old.distributed_utils import reduce_max, reduce_sum, world
from old.drift_utils import check_drift
from old.hang_utils import watch_run
from old.hardware_utils import out_of_memory
from old.logging_utils import RunLog, print_banner
from old.profile_utils import StepProfile
from old.phase_utils import StepPhase, doing
from old.stop_utils import StopWatch

# --- where a run stands -----------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Where a run stands; a checkpoint holds it as a dict.

    step: optimizer steps done. epoch: from 0. samples: of this epoch, over all ranks. best: value of the best
    checkpoint so far. best_sha256: that file's digest. saved: [step, epoch] of the last checkpoint of this process.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    best: float | None = None
    best_sha256: str | None = None
    saved: list[int] | None = None


@dataclass
class TrainingRun:
    """A training under way: its position and end, its log and its checkpoints.

    last_step: where this run ends. planned_steps: of the whole training, which the learning rate follows; --max_steps
    ends a run earlier. contents: what the script puts into a checkpoint, beside the position and the log. model: what
    the ranks must agree on, if anything, every check_every steps and before each checkpoint.
    """

    run_folder: Path
    progress: Progress
    last_step: int
    planned_steps: int
    effective_batch_size: int
    precision: str
    log: RunLog
    contents: Callable[[], dict]
    save_every: int = 0
    keep_last: int = 3
    max_bad_steps: int = 10

    # what watches over it
    model: nn.Module | None = None
    check_every: int = 0
    profile: StepProfile = field(default_factory=StepProfile)
    stop: StopSignal = field(default_factory=StopSignal)
    phase: StepPhase = field(default_factory=StepPhase)

    def __enter__(self) -> "TrainingRun":
        """All ranks: watch over the run from here on."""
        self.guards = contextlib.ExitStack()
        self.guards.enter_context(self.phase)
        self.guards.enter_context(self.stop)
        self.guards.enter_context(self.profile)
        self.guards.enter_context(watch_run(self.run_folder, lambda: self.progress.step))
        self.profile.warn_if_unused(self.progress.step, self.last_step)
        first_step = self.progress.step
        self.guards.enter_context(StopWatch(self.stop, lambda: (self.progress.step, self.saved_step(first_step))))
        return self

    def __exit__(self, *error) -> None:
        self.guards.__exit__(*error)

    def saved_step(self, first_step: int) -> int:
        """The step of the newest checkpoint; first_step: where this process began."""
        return self.progress.saved[0] if self.progress.saved else first_step

    @doing("saving a checkpoint", must_finish=True)
    def save(self) -> None:
        """All ranks: a checkpoint of this position, unless there is one."""
        progress = self.progress
        position = [progress.step, progress.epoch]
        if progress.saved == position:
            return
        self.check_weights()
        progress.saved = position
        with self.profile.span("save"):
            contents = self.contents() | {"state": asdict(progress), "log": self.log.pending(progress.step)}
            save_checkpoint(self.run_folder, contents, progress.step, self.keep_last)

    def check_weights(self) -> None:
        """All ranks: RunError on all together where their weights differ."""
        if self.check_every and self.model is not None:
            check_drift(self.model, self.progress.step, self.run_folder)


def safety_flags(args: Namespace) -> dict:
    """The flags that guard a run, as TrainingRun takes them."""
    flags = {"save_every": args.save_every, "keep_last": args.keep_last, "max_bad_steps": args.max_bad_steps}
    return flags | {"check_every": args.check_every, "profile": StepProfile(args.profile)}


def resume(progress: Progress, checkpoint: dict, this_run: dict, run_folder: Path) -> None:
    """All ranks: put the progress where a checkpoint stands.

    this_run: what may not differ from the run that wrote it. The best value so far counts only while the run folder
    holds that checkpoint: another folder, or one that went back, holds another one or none. Raises InputError for a
    checkpoint of another run.
    """
    check_same_run(checkpoint, this_run)
    known = {item.name for item in fields(progress)}
    for name, value in checkpoint["state"].items():
        if name in known:
            setattr(progress, name, value)
    progress.saved = None
    if best_sha256(run_folder) != progress.best_sha256 or not math.isfinite(progress.best or 0.0):
        progress.best = None


def restore_training(checkpoint: dict, optimizer: torch.optim.Optimizer, scaler: "LossScaler", weight_decay: float):
    """All ranks: the optimizer's moments, the loss scale and the random state of a checkpoint.

    Raises InputError for the state of another optimizer.
    """
    restore_optimizer(optimizer, checkpoint["optimizer"], weight_decay)
    restore_scaler(scaler, checkpoint["scaler"], scaler.precision)
    restore_rng(checkpoint["rng"])


# --- one optimizer step -----------------------------------------------------------------------------------------------


@dataclass
class Step:
    """This rank's share of one optimizer step.

    samples: of all ranks. local: of this rank; 0 where the last step of an epoch has none for it, and one sample is
    computed that counts nothing. batches: the micro-batches, as the loader gave them. totals: what `count` gave, summed
    over the ranks. digest: of the samples of all ranks.
    """

    samples: int
    local: int
    batches: list[dict]
    totals: list[float] = field(default_factory=list)
    digest: str = ""

    @property
    def weight(self) -> float:
        """What this rank's losses are multiplied by: 0 for a rank without a share, which must pass all the same."""
        return float(self.local > 0)

    def micro_batches(self) -> Iterator[tuple[dict, bool]]:
        """(micro-batch, whether it is the last), one after another."""
        for number, batch in enumerate(self.batches, start=1):
            yield batch, number == len(self.batches)


def optimizer_steps(
    loader: DataLoader, training: TrainingRun, count: Callable[[Step], list[float]] | None = None
) -> Iterator[Step]:
    """Each optimizer step from the run's position to the end of the epoch or of the run.

    count: numbers of this rank's share to be summed over the ranks, equally many on each. Before a step the ranks tell
    each other these, a stop signal and an unusable sample, in one small transfer of host memory. A signal to any rank
    ends the steps on all; `stop.agreed` is then its exit code. Raises InputError on all ranks for an unusable sample.
    """
    progress = training.progress
    log = training.log
    stop = training.stop
    profile = training.profile
    phase = training.phase

    # the loader goes on where the run stands
    sampler = loader.batch_sampler
    sampler.set_position(progress.epoch, progress.samples)
    log.restart_clock()
    phase.fetch()
    batches = iter(loader)
    digests = sampler.step_digests(progress.samples)

    while progress.step < training.last_step and progress.samples < sampler.used:
        profile.begin_step(progress.step + 1)
        samples, local = sampler.step_sizes(progress.samples)
        step = Step(samples, local, batches=[])

        # fetch; the time this takes is the wait for data
        phase.fetch()
        stop.step_due = phase.due
        begun = time.perf_counter()
        with profile.span("data wait"):
            for _ in range(max(1, math.ceil(local / sampler.batch_size))):
                step.batches.append(next(batches))
        log.waited += time.perf_counter() - begun

        # agree with the other ranks, before anything of the step is used
        phase.compute(progress.step + 1, not log.counts)
        counts = [step.weight * value for value in count(step)] if count else []
        error = first_error(step.batches)
        facts = [stop.code == 143, stop.code == 130, bool(error), *counts]
        with profile.span("wait for the other ranks"):
            stop_143, stop_130, unusable, *step.totals = reduce_sum(facts).tolist()
        if unusable:
            raise InputError(next(reason for reason in gather_objects(error) if reason))
        if stop_143 or stop_130:
            stop.agreed = 143 if stop_143 else 130
            break

        # the script computes the step
        step.digest = next(digests)
        yield step
        profile.end_step(progress.step, training.run_folder)

    profile.end(training.run_folder)
    phase.rest()


def first_error(batches: list[dict]) -> str:
    """The first reason why a sample of some batches cannot be used, empty without one."""
    for batch in batches:
        errors = batch.get("error", "")
        if isinstance(errors, str):
            errors = [errors]
        for reason in errors:
            if reason:
                return reason
    return ""


def sync_gradients(model: nn.Module, now: bool) -> contextlib.AbstractContextManager:
    """Around a forward and backward pass: DDP exchanges the gradients after the last micro-batch of a step only."""
    if now or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


class LossScaler(torch.amp.GradScaler):
    """Skips a step with a non-finite gradient without waiting for the GPU; its scale moves for fp16, else it is 1."""

    def __init__(self, device: torch.device, precision: str):
        self.precision = precision
        super().__init__(device.type, init_scale=2.0**14 if precision == "fp16" else 1.0)

    def update(self, new_scale: float | None = None) -> None:
        """The scale of the next step."""
        super().update(new_scale if self.precision == "fp16" else 1.0)


def clip_and_step(optimizer: torch.optim.Optimizer, scaler: LossScaler, grad_clip: float, lr: float) -> torch.Tensor:
    """Update the weights at this learning rate and clear the gradients; returns the gradient norm before clipping.

    grad_clip: the largest norm, 0 for none. A non-finite gradient leaves the weights alone; its norm tells.
    """
    scaler.unscale_(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grad_norm = nn.utils.clip_grad_norm_(parameters, grad_clip or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = lr
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def end_step(training: TrainingRun, step: Step, losses: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
    """Count the step, log it, and save where that is due. Nothing is read back from the GPU but every log interval.

    losses: this rank's part of the sums over the ranks. Raises RunError on all ranks after too many skipped steps.
    """
    progress = training.progress
    log = training.log
    progress.step += 1
    progress.samples += step.samples

    # the norm is the same on all ranks, so that rank 0 alone enters it into the sum
    skipped = 1.0 - grad_norm.isfinite().float()
    shared = torch.stack([grad_norm, skipped])
    if world()[0] > 0:
        shared = torch.zeros_like(shared)
    log.step(torch.cat([losses, shared]), step.samples, lr, step.digest)

    try:
        log.check(progress.step, training.max_bad_steps)
    except RunError:
        # one rank's own weights may be the cause
        training.check_weights()
        raise
    if progress.step % log.log_every == 0:
        log.write_interval(progress.step, progress.epoch + 1)
    if training.save_every and progress.step % training.save_every == 0:
        training.save()
    elif training.check_every and progress.step % training.check_every == 0:
        training.check_weights()


# --- the end of a run ---------------------------------------------------------------------------------


def keep_best(training: TrainingRun, value: float, planned: bool, lower: bool = False) -> bool:
    """All ranks, after an evaluation: best.pt becomes the checkpoint of this step if its value is the best so far.

    planned: False where --max_steps cut an epoch short. Such an evaluation is no part of the uninterrupted run, so it
    leaves no trace in the progress, and gives best.pt its first checkpoint only; nor does one that is not finite, which
    nothing would ever beat. lower: smaller values are better. Returns whether best.pt is now this checkpoint.
    """
    progress = training.progress
    best = progress.best
    better = best is None or (value <= best if lower else value >= best)
    if planned and better and math.isfinite(value):
        progress.best = value
        progress.best_sha256 = mark_best(training.run_folder, progress.step)
        return True
    if progress.best is None:
        mark_best(training.run_folder, progress.step)
        return True
    return False


def say_if_finished(training: TrainingRun, flags: str) -> None:
    """Rank 0 tells a user who resumes a finished run why nothing is trained, and which flags would change that."""
    step = training.progress.step
    last_step = training.last_step
    if step >= last_step:
        print_main(f"nothing left to train: step {step} of {last_step}; see {flags}, --max_steps")


def say_saved(step: int) -> None:
    """All ranks, after a stop signal: once the checkpoint is on the disk, rank 0 says so."""
    settle_checkpoint()
    print_main(f"signal: saved at step {step}; --resume_from auto goes on from there")


def print_start(title: str, ranks: Ranks, training: TrainingRun, rows: dict) -> None:
    """Rank 0: the banner, a script's own rows between those that all runs have, or instead of them."""
    progress = training.progress
    first = {"launcher": f"{ranks.launcher}, world size {ranks.world_size}, {ranks.device}"}
    rows = rows | {"precision": f"{training.precision} ({rows['precision']})"}
    last = {"steps": f"{training.last_step} of {training.planned_steps}"}
    last |= {"start": f"step {progress.step}, epoch {progress.epoch + 1}", "output": training.run_folder}
    print_banner(title, first | rows | last | rows | training.log.speed_facts())


def agree_on_signal(stop: StopSignal) -> int:
    """All ranks: the exit code of a signal that any of them was sent so far, else 0."""
    stop.agreed = int(reduce_max([stop.code])[0])
    return stop.agreed


def stopped_in_evaluation(training: TrainingRun) -> int:
    """All ranks: the exit code of a signal during an evaluation; what the resumed run needs is saved already."""
    say_saved(training.progress.step)
    return agree_on_signal(training.stop)


def finish_run(training: TrainingRun, begun: float, more: dict) -> None:
    """All ranks: summary.json and the curves. begun: time.time() at the start. more: further values of the summary."""
    progress = training.progress
    facts = {"steps": progress.step, "epochs": progress.epoch + 1, "world_size": world()[1]}
    facts |= {"effective_batch_size": training.effective_batch_size, "precision": training.precision}
    training.log.finish(facts | more | {"seconds": round(time.time() - begun, 1)})


def say_where(run_folder: Path) -> None:
    """Rank 0, at the very end: where the results lie."""
    print_main(
        f"weights: {run_folder}/model.safetensors; figures: {run_folder}/figures; summary: {run_folder}/summary.json"
    )


# --- what may go wrong around a run -----------------------------------------------------------------------------------


def agree_on_precision(choose: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """All ranks: (precision, reason) as `choose` says, which must be the same everywhere. Raises InputError."""
    precision = ""
    reason = ""
    with agree_on_errors():
        precision, reason = choose()
    if len(set(gather_objects(precision))) > 1:
        raise InputError("--mixed_precision auto: the GPUs differ; choose fp16 or no")
    return precision, reason


@contextlib.contextmanager
def explain_out_of_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Where a process runs out of memory, end it with one line: `out of memory at` and the advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        leave_alone(f"out of memory at {advice()}")
