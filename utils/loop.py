"""Steps, evaluations and checkpoints: the parts of a training loop that all scripts share.

`Run` manages the run folder; `Training` runs the steps. Three rules keep resuming simple:

- The checkpoint of a step is written after everything else in the step, including its evaluation.
- Each micro-batch contains the same samples on any number of ranks.
- Dropout noise depends only on (seed, step, micro-batch), so checkpoints contain no random state.
"""

import contextlib
import faulthandler
import json
import math
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import distributed_utils as du
from hardware_utils import out_of_memory
from utils import checkpoint
from utils.cli import InputError, RunError, with_flags
from utils.engine import Engine
from utils.log import RunLog, draw_curves, print_banner, save_figure
from utils.sampler import TrainBatchSampler

# --- run --------------------------------------------------------------------------------------------------------------


@dataclass
class Position:
    """Progress of a run, saved in every checkpoint.

    step, epoch: completed steps and epochs. samples: samples of the current epoch used so far, over all ranks. best,
    best_metrics: headline metric and all metrics of best.pt.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    best: float | None = None
    best_metrics: dict = field(default_factory=dict)


class BatchPlan(NamedTuple):
    """How the samples of an optimizer step are divided into micro-batches and among ranks.

    lr_factor: the argument `times` of scale_learning_rate(). gpu_shares: micro-batches per rank, relative to the other
    ranks.
    """

    global_batch_size: int
    micro_batch_size: int
    lr_factor: float
    gpu_shares: list[int]

    def invariants(self) -> dict:
        """Return the batch settings by their names in checkpoints; on resume, only lack of memory may change `leaf`."""
        return {
            "effective_batch_size": self.global_batch_size,
            "lr_times": self.lr_factor,
            "leaf": self.micro_batch_size,
        }


@dataclass
class Plan:
    """Settings of a training run.

    steps: optimizer steps of the full run, ignoring --max_steps. losses: names for the losses passed to
    step.backward(). invariants: settings that must not change on resume.
    """

    batch: BatchPlan
    steps: int
    losses: list[str]
    invariants: dict
    banner: dict = field(default_factory=dict)


class Run:
    """Manages a run folder: its lock, the loaded checkpoint and the files written to it.

    checkpoint: the checkpoint to resume from or to evaluate. None for a new run and after Training has begun.
    """

    def __init__(
        self, format: str, args: Namespace, ranks: du.Ranks, advice: str = "", model_flags: tuple[str, ...] = ()
    ):
        """All ranks: lock the run folder and load the checkpoint. Existing files are not changed.

        advice: hint for out-of-memory errors. model_flags: flags whose values come from the checkpoint, if there is
        one. With --eval_only or --predict, the folder is not locked, and the default checkpoint is best.pt. Raises
        InputError if the folder or the checkpoint cannot be used.
        """
        self.folder = Path(args.output_dir)
        self.format, self.ranks, self.advice, self.model_flags = format, ranks, advice, model_flags
        self.begun = time.time()
        resume_from = args.resume_from
        trains = not (args.eval_only or getattr(args, "predict", None))
        self.lock: TextIO | None = None
        if trains:
            self.lock = checkpoint.lock_run_folder(self.folder, bool(resume_from) or args.overwrite)
        else:
            checkpoint.make_folder(self.folder)
            resume_from = resume_from or str(self.folder / "best.pt")
        self.checkpoint = saved = checkpoint.load_checkpoint(resume_from, self.folder, format)
        if not trains and saved is None:
            raise InputError(f"{self.folder}: no checkpoint to use; give one with --resume_from")
        flags = {name: getattr(args, name) for name in model_flags}
        if saved:
            for name, given in flags.items():
                flags[name] = saved["model_flags"].get(name, given)
                if given != flags[name]:
                    du.print_main(f"--{name}: {flags[name]}, as in the checkpoint")
        self.args = with_flags(args, **flags)
        self.position = Position(**saved["position"]) if saved else Position()
        self.writer = checkpoint.CheckpointWriter(self.folder, args.keep_last)
        self.new_figures: dict[str, np.ndarray] = {}
        self.stack_file: TextIO | None = None
        self.watchdog_reset = -math.inf

    @property
    def micro_batch_size(self) -> int:
        return self.checkpoint["run"]["leaf"]

    def plan_batches(
        self, model: nn.Module, try_once: Callable[[int], None], batch_size: int, effective_batch_size: int | None
    ) -> BatchPlan:
        """All ranks: choose the batch and micro-batch sizes from the flags or, on resume, from the checkpoint.

        try_once(size): forward and backward pass, without collectives, on the `size` samples that need the most memory.
        With --auto_batch or --gpu_shares auto, all ranks halve the micro-batch size until this pass succeeds on every
        rank. Raises RunError if a single sample does not fit.
        """
        args, ranks = self.args, self.ranks
        micro_batch_size, global_batch_size = batch_size, effective_batch_size
        lr_factor = global_batch_size / batch_size if global_batch_size else ranks.world_size
        if self.checkpoint:
            own = self.checkpoint["run"]
            if effective_batch_size not in (None, own["effective_batch_size"]):
                reason = f"this run has {own['effective_batch_size']}; leave it out"
                raise InputError(f"--effective_batch_size {effective_batch_size}: {reason}")
            global_batch_size, micro_batch_size, lr_factor = own["effective_batch_size"], own["leaf"], own["lr_times"]
        global_batch_size = global_batch_size or batch_size * args.gradient_accumulation_steps * ranks.world_size

        gpu_shares = [1] * ranks.world_size
        if args.gpu_shares not in ("equal", "auto"):
            gpu_shares = [int(share) for share in args.gpu_shares.split(",")]
            if len(gpu_shares) != ranks.world_size:
                raise InputError(f"--gpu_shares {args.gpu_shares}: needs {ranks.world_size} numbers, one per process")

        wanted = micro_batch_size
        auto_batch = ranks.device.type == "cuda" if args.auto_batch is None else args.auto_batch
        if auto_batch or args.gpu_shares == "auto":
            while math.inf in (seconds := du.gather_objects(_time_pass(try_once, model, micro_batch_size))):
                if micro_batch_size == 1:
                    raise RunError(f"out of memory at one sample per GPU; {self.advice}")
                micro_batch_size //= 2
            if args.gpu_shares == "auto":
                gpu_shares = gpu_shares_from(seconds)
        if micro_batch_size < wanted:
            du.print_main(
                f"memory: {wanted} samples at once do not fit, {micro_batch_size} do; the result stays, its bits change"
            )
        return BatchPlan(global_batch_size, micro_batch_size, lr_factor, gpu_shares)

    def heartbeat(self, place: str) -> None:
        """Record what this rank is doing (`place`) and, during training, reset the rank's watchdog.

        The watchdog writes the stack traces of a hanging rank shortly before the other ranks time out.
        """
        self.ranks.record_position(place)
        timeout, now = self.args.dist_timeout, time.monotonic()
        # resetting the watchdog starts a thread, which is too slow to do at every step
        if self.stack_file and now - self.watchdog_reset > 0.1 * timeout:
            faulthandler.dump_traceback_later(0.9 * timeout, file=self.stack_file)
            self.watchdog_reset = now

    def start_loader(self, loader: DataLoader) -> Iterator:
        # do not fork workers while the checkpoint thread runs: they would inherit its locks, which are never released
        if self.writer.thread and loader.num_workers and loader._iterator is None:
            self.writer.thread.join()
        with du.hold_signals():
            return iter(loader)

    def batches(self, loader: DataLoader, equal_passes: bool = False) -> Iterator:
        """All ranks: yield an evaluation's batches, on the device.

        equal_passes: pad to the same number of batches on every rank; padding has index -1. Raises InputError on all
        ranks if a sample is unusable.
        """
        error = ""
        most = max(du.gather_objects(len(loader))) if equal_passes else 0
        for number, batch in enumerate(self.start_loader(loader), start=1):
            self.heartbeat(f"batch {number} of the evaluation at step {self.position.step}")
            error = error or error_in(batch)
            yield du.to_device(batch, self.ranks.device)
        for _ in range(most - len(loader)):
            batch = du.to_device(loader.collate_fn([loader.dataset[0]]), self.ranks.device)
            yield batch | {"index": torch.full_like(batch["index"], -1)}
        with du.agree_on_errors():
            if error:
                raise InputError(error)

    def figure(self, name: str, figure) -> None:
        """Rank 0: save a matplotlib figure, if any, as figures/<name>.png and, during training, to TensorBoard."""
        if self.ranks.is_main and figure is not None:
            try:
                self.new_figures[name] = save_figure(self.folder, name, figure)
            except OSError as error:
                print(f"warning: {self.folder}: figure not written ({error})", flush=True)

    @contextlib.contextmanager
    def writing(self, what: str = "results", advice: str = "make room, then --eval_only") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"{self.folder}: {what} not written ({error}); {advice}") from None

    def write_summary(self, name: str, values: dict) -> None:
        if self.ranks.is_main:
            (self.folder / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


# --- training ---------------------------------------------------------------------------------------------------------


class Training:
    def __init__(
        self,
        run: Run,
        args: Namespace,
        engine: Engine,
        plan: Plan,
        extra: Callable[[], dict] = dict,
        best_names: tuple[str, ...] = ("best.pt",),
    ):
        """All ranks: open the run folder for writing and delete outdated files, so check all inputs before.

        extra: returns the script's own checkpoint entries. best_names: file names for the best checkpoint; the name for
        the current stage comes first. Raises InputError if the plan's invariants differ from the checkpoint's.
        """
        self.run, self.args, self.engine, self.batch, self.extra = run, args, engine, plan.batch, extra
        self.ranks, self.position, self.best_names = run.ranks, run.position, best_names
        self.planned_steps = plan.steps
        self.last_step = min(args.max_steps or plan.steps, plan.steps)
        saved, run.checkpoint = run.checkpoint, None
        self.invariants = plan.invariants | {"seed": args.seed} | plan.batch.invariants()
        if saved:
            for name, value in self.invariants.items():
                before = saved["run"].get(name)
                # --auto_batch may halve the micro-batch when a run resumes on a GPU with less memory
                if before != value and name != "leaf":
                    before = f"a run with {name.replace('_', ' ')} {before}"
                    raise InputError(f"--resume_from: {before}, now {value}; give the same again")
        self.stop = du.StopSignal()
        self.stopped = 0
        self.epoch_over = self.evaluation_due = False
        self.saved_position, self.saved_at = None, time.monotonic()
        self.stream: Iterator | None = None
        self.samples_read = 0
        self.profiler: torch.profiler.profile | None = None
        first, last = map(int, (args.profile or "0:0").split(":"))
        self.profiled = range(max(first, self.position.step + 1), min(last, self.last_step) + 1)
        if args.profile and not self.profiled:
            made = f"this start makes steps {self.position.step + 1} to {self.last_step}"
            du.print_main(f"warning: --profile {args.profile}: no trace, as {made}")

        best_counts = False
        with du.agree_on_errors():
            try:
                if self.ranks.is_main:
                    best_counts = checkpoint.begin_run(run.folder, saved, args.overwrite, best_names)
                # faulthandler needs this file open throughout training
                run.stack_file = open(run.folder / f"hang_rank{self.ranks.rank}.txt", "w")  # noqa: SIM115
                self.log = RunLog(run.folder, self.ranks, plan.losses, args, saved and saved["log"], self.position.step)
            except OSError as error:
                raise RunError(f"{run.folder}: cannot begin the run ({error.strerror}); make room") from None
        if not du.broadcast_object(best_counts):
            self.position.best, self.position.best_metrics = None, {}
        self._print_banner(plan)

    def _print_banner(self, plan: Plan) -> None:
        batch, world_size = self.batch, self.ranks.world_size
        micro_batches = math.ceil(batch.global_batch_size / batch.micro_batch_size)
        parts = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)} of {batch.micro_batch_size}"
        shares = f", shared {batch.gpu_shares}" if len(set(batch.gpu_shares)) > 1 else ""
        rows = {
            "processes": f"{world_size} by {self.ranks.launcher}, {self.ranks.device.type}",
            "batch": f"{batch.global_batch_size} samples a step = {parts}{shares}",
            "steps": f"{self.position.step} of {self.last_step} done",
        }
        print_banner(str(self.run.folder), rows | plan.invariants | plan.banner)
        idle = world_size - micro_batches
        if idle > 0:
            du.print_main(
                f"warning: {idle} of {world_size} processes have no micro-batch; --batch_size of a new run is too large"
            )

    def start_stage(self, engine: Engine, batch: BatchPlan, best_names: tuple[str, ...]) -> None:
        """All ranks: begin a stage, which trains different weights and has its own best checkpoint."""
        self.engine.close()
        self.engine, self.batch, self.best_names = engine, batch, best_names
        self.invariants |= batch.invariants()
        self.position.best, self.position.best_metrics, self.stream = None, {}, None

    # --- optimizer steps ----------------------------------------------------------------------------------------------

    def steps(self, loader: DataLoader, count: Callable[[list], list[float]] | None = None) -> Iterator["Step"]:
        """All ranks: yield optimizer steps until an evaluation is due or the epoch or the run ends.

        count(batches): called with this rank's batches of the step (perhaps none); returns a list of counts, always of
        the same length. step.totals: their sums over all ranks.

        After a stop signal on any rank, all ranks stop within two steps, and `stopped` is the exit code. Raises
        InputError on all ranks if a sample is unusable.
        """
        position, sampler = self.position, loader.batch_sampler
        if self.stream is None or self.samples_read != position.samples:
            sampler.set_position(position.epoch, position.samples)
            self.stream, self.samples_read = self.run.start_loader(loader), position.samples
        self.log.restart_clock()
        self.epoch_over = self.evaluation_due = False
        every_steps, upcoming = self.args.eval_every_steps, None
        while not self._must_pause():
            self.run.heartbeat(f"step {position.step + 1}")
            samples, numbers, batches, error, agreed = upcoming or self._fetch(sampler, count)
            stop_143, stop_130, unusable, *totals = agreed()
            if unusable:
                raise InputError(next(reason for reason in du.gather_objects(error) if reason))
            if stop_143 or stop_130:
                self.stopped = 143 if stop_143 else 130
                self.stream = None
                return

            if position.step + 1 in self.profiled and self.ranks.is_main and not self.profiler:
                self.profiler = torch.profiler.profile()
                self.profiler.start()
            passes = sampler.most_micro_batches(position.samples) if self.engine.equal_passes else len(batches)
            self.epoch_over = self.samples_read >= sampler.num_samples
            self.evaluation_due = bool(every_steps) and (position.step + 1) % every_steps == 0
            ends = self.epoch_over or self.evaluation_due or position.step + 1 == self.last_step
            upcoming = None if ends else self._fetch(sampler, count)
            yield Step(self, samples, numbers, batches, totals, passes)

            if position.step + 1 == self.profiled.stop:
                self._write_trace()
            if not self._must_pause() and self._save_is_due():
                self.save()

    def _fetch(self, sampler: TrainBatchSampler, count: Callable | None) -> tuple:
        samples, numbers = sampler.share(self.samples_read)
        begun = time.perf_counter()
        batches = [next(self.stream) for _ in numbers or [0]]
        self.samples_read += samples
        self.log.waited += time.perf_counter() - begun

        counts = count(batches if numbers else []) if count else []
        error = next(filter(None, map(error_in, batches)), "")
        own = [self.stop.code == 143, self.stop.code == 130, bool(error), *counts]
        return samples, numbers, batches, error, du.begin_sum(own)

    def _must_pause(self) -> bool:
        return self.is_over() or self.epoch_over or self.evaluation_due

    def is_over(self) -> bool:
        return self.position.step >= self.last_step

    def last_logged(self, name: str) -> float | None:
        return self.log.last.get(name)

    def signalled(self) -> int:
        """All ranks: return the exit code for a stop signal received by any rank, otherwise 0."""
        return du.reduce_max([self.stop.code])[0]

    def _write_trace(self) -> None:
        if self.profiler:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.run.folder / "trace.json"))
            self.profiler = None

    # --- evaluations and checkpoints ----------------------------------------------------------------------------------

    def record(self, metrics: dict[str, float], headline: str, lower: bool = False) -> None:
        """All ranks: log an evaluation and save a checkpoint if one is due.

        Call this each time steps() ends without a stop signal. metrics: {} if there was no evaluation; undefined
        metrics other than the headline may be missing. headline: metric that selects best.pt. lower: whether a lower
        value is better.
        """
        metrics = {name: float(value) for name, value in metrics.items()}
        if metrics:
            shown = " | ".join(f"{name}\xa0{value:.4f}" for name, value in metrics.items())
            du.print_main(textwrap.fill(shown, 100, break_long_words=False).replace("\xa0", " "))
        self._show_figures()
        position = self.position
        where = position.step, position.epoch + 1
        complete = position.step == self.planned_steps
        paused = self.is_over() and not complete
        # an evaluation triggered only by --max_steps must not change best.pt
        planned = self.epoch_over or self.evaluation_due or complete

        if complete:
            self.log.write_interval(*where, self.last_step)
        best = False
        if planned and metrics:
            self.log.write(*where, metrics)
            best = self._note_best(metrics, headline, lower)
        if self.epoch_over:
            position.epoch, position.samples, self.stream = position.epoch + 1, 0, None
        if best or self.is_over() or self._save_is_due(ended=True, evaluated=bool(metrics)):
            self.save(best)
        if paused:
            # save first, then log: a resumed run drops these lines, so its log matches that of an uninterrupted run
            self.log.write_interval(*where, self.last_step)
            if metrics and not planned:
                self.log.write(*where, metrics)

    def _note_best(self, metrics: dict[str, float], headline: str, lower: bool) -> bool:
        """Update the best score; return whether these metrics are the best. On a tie, the later step wins."""
        position, value = self.position, metrics[headline]
        better = position.best is None or (value <= position.best if lower else value >= position.best)
        if not better or not math.isfinite(value):
            return False
        position.best, position.best_metrics = value, metrics
        return True

    def _save_is_due(self, ended: bool = False, evaluated: bool = False) -> bool:
        every, step = self.args.save_every, self.position.step
        if every is not None:
            return evaluated or bool(every and step % every == 0)
        return (ended or step % 500 == 0) and du.broadcast_object(time.monotonic() - self.saved_at > 60)

    def save(self, best: bool = False) -> None:
        """All ranks: save a checkpoint of the current position unless there is one already.

        Raises RunError on all ranks if the previous checkpoint was not written or if the weights differ between ranks.
        """
        position = (self.position.step, self.position.epoch)
        if self.saved_position != position:
            weights = self.engine.weights()
            du.check_same_weights(weights)
            contents = {
                "format": self.run.format,
                "step": self.position.step,
                "run": self.invariants,
                "model_flags": {name: getattr(self.args, name) for name in self.run.model_flags},
                "position": asdict(self.position),
                "log": self.log.state(),
                "model": weights,
            }
            contents |= self.engine.state() | self.extra()
            self.run.writer.save(contents, self.best_names if best else (), before_write=self.log.sync)
            self.saved_position, self.saved_at = position, time.monotonic()

    def save_and_stop(self) -> int:
        """All ranks: save a checkpoint after a stop signal; return the exit code."""
        self.save()
        # close the log first: when wait() returns, other ranks may exit, and srun then kills rank 0
        self.log.close()
        self.run.writer.wait()
        du.print_main(f"signal: saved at step {self.position.step}; --resume_from auto continues from there")
        return self.stopped

    def flush(self) -> None:
        """All ranks: wait until the last checkpoint is on disk. Raises RunError on all ranks if writing failed."""
        self.run.writer.wait()

    def load_best(self) -> int:
        """All ranks: load the weights of best.pt into the model; return the step at which they were saved.

        A run without evaluations keeps its last weights.
        """
        self.flush()
        if self.is_over():
            # everything is saved, so a signal may end the process immediately; a resumed run repeats the test
            self.stop.at_once = b""
            if self.ranks.is_main:
                self.log.writer.flush()
                self.stop.at_once = b"signal: the final test is broken off; --resume_from auto makes it again\n"
        if self.position.best is None:
            return self.position.step
        best = checkpoint.load_checkpoint(str(self.run.folder / self.best_names[0]), self.run.folder, self.run.format)
        self.engine.put_weights(best["model"])
        return best["step"]

    def finish(self, tested: dict[str, float] | None = None) -> None:
        """All ranks: save the model's current weights as model.safetensors; write summary.json and draw the curves."""
        run, position, tested = self.run, self.position, tested or {}
        run.writer.wait()
        summary = self.log.last | {"steps": position.step, "epochs": position.epoch}
        summary |= {"world_size": self.ranks.world_size} | self.invariants | position.best_metrics | tested
        weights = self.engine.weights()
        with du.agree_on_errors(), run.writing(advice="make room and resume"):
            checkpoint.export_weights(weights, run.folder / "model.safetensors")
            run.write_summary("summary", summary | {"seconds": round(time.time() - run.begun, 1)})
            if self.ranks.is_main:
                run.figure("curves", draw_curves(run.folder / "metrics.jsonl"))
                self._show_figures()
                values = {name: v if isinstance(v, str) else f"{v:.4g}" for name, v in tested.items()}
                rows = [f"| {name} | {value} |" for name, value in values.items()]
                self.log.writer.add_text("test", "\n".join(["| metric | value |", "| --- | --- |", *rows]))
        du.print_main(f"done; checkpoints, curves and summary.json are in {run.folder}")

    def _show_figures(self) -> None:
        for name, pixels in self.run.new_figures.items():
            with contextlib.suppress(OSError):
                self.log.writer.add_image(name, pixels, self.position.step, dataformats="HWC")
        self.run.new_figures.clear()

    def __enter__(self) -> "Training":
        self.stop.__enter__()
        return self

    def __exit__(self, kind, error, trace) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.stream = None
        if self.run.writer.thread:
            self.run.writer.thread.join()
        self.log.close()
        stacks, self.run.stack_file = self.run.stack_file, None
        stacks.close()
        if not Path(stacks.name).stat().st_size:
            Path(stacks.name).unlink()
        self.stop.__exit__(kind, error, trace)
        self.engine.close()
        # write the trace last, because torch's profiler may fail
        self._write_trace()
        if error and out_of_memory(error):
            if self.ranks.world_size == 1:
                raise RunError(f"out of memory; {self.run.advice}") from None
            # print on this rank, because the other ranks see only that it died
            print(f"error: rank {self.ranks.rank}: out of memory; {self.run.advice}", file=sys.stderr, flush=True)


# --- forward, backward, update ----------------------------------------------------------------------------------------


@dataclass
class Step:
    """This rank's part of one optimizer step.

    samples: number of samples on all ranks. numbers: indices of this rank's micro-batches within the step. batches:
    data of these micro-batches, or one batch with loss weight 0 if this rank has none. totals: see Training.steps().
    passes: number of forward passes, at least 1. A rank without micro-batches runs one with loss weight 0; with
    DeepSpeed, every rank runs as many as the busiest rank.
    """

    training: Training
    samples: int
    numbers: range
    batches: list
    totals: list[float]
    passes: int
    losses: list[Tensor] = field(default_factory=list)
    weight: float = 1.0

    def micro_batches(self) -> Iterator:
        training, device = self.training, self.training.ranks.device
        for number in range(self.passes):
            self.weight = float(number < len(self.numbers))
            batch = self.batches[min(number, len(self.batches) - 1)]
            micro_batch = self.numbers[number] if self.weight else 0
            seed_dropout(device, training.args.seed, training.position.step, micro_batch)
            with training.engine.around_micro_batch(last=number == self.passes - 1):
                yield du.to_device(batch, device)

    def backward(self, *losses: Tensor, through: tuple[Tensor, Tensor] | None = None) -> None:
        """Run the backward pass of losses[0], this micro-batch's term of the step's loss; log all losses.

        through: for a loss that is not a sum over micro-batches, the pair (model's output for this micro-batch,
        gradient of the step's loss with respect to this output). If losses[0] is not finite, all ranks skip the step.
        """
        output, gradient = losses[0], self.weight + 0 * losses[0].detach()
        if through:
            output, gradient = through[0], (through[1] * gradient).to(through[0].dtype)
        self.training.engine.backward(output, gradient)
        if self.weight:
            self.losses += [loss.detach() for loss in losses]

    def update(self, lr: float) -> None:
        """Clip the gradients, update the weights unless a gradient is not finite, and log the step."""
        training, log, position = self.training, self.training.log, self.training.position
        grad_norm = training.engine.update(lr)
        position.step += 1
        position.samples += self.samples
        log.step([*self.losses, grad_norm], position.step, self.samples, lr)
        log.warn_if_long(training.last_step - position.step)
        if position.step % training.args.log_every == 0:
            log.write_interval(position.step, position.epoch + 1, training.last_step)


def error_in(batch: dict) -> str:
    return next(filter(None, batch.get("error", ())), "")


def seed_dropout(device: torch.device, seed: int, step: int, micro_batch: int) -> None:
    """Seed the torch generators used by dropout from (seed, step, index of the micro-batch in the step)."""
    sequence = np.random.SeedSequence([seed % 2**63, step, micro_batch])
    seed = int(sequence.generate_state(1, np.uint64)[0])
    # faster than torch.manual_seed(), which seeds every type of device
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


# --- memory and speed -------------------------------------------------------------------------------------------------


def gpu_shares_from(seconds: list[float]) -> list[int]:
    """Return each rank's share of the micro-batches: proportional to its speed, 10 for the fastest rank.

    Ranks within 25 % of each other count as equally fast, because the times of identical ranks differed by up to 21 %.
    """
    fastest_of, fastest = {}, 0.0
    for own in sorted(seconds):
        if own > 1.25 * fastest:
            fastest = own
        fastest_of[own] = fastest
    return [max(1, round(10 * min(seconds) / fastest_of[own])) for own in seconds]


def _time_pass(try_once: Callable[[int], None], model: nn.Module, size: int) -> float:
    """Return the run time of try_once(size) in seconds, or inf if memory runs out.

    Afterwards, the gradients are None; buffers and the random state are unchanged.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    buffers = [buffer.clone() for buffer in model.buffers()]
    on_gpu = trained[0].is_cuda
    held = []
    with torch.random.fork_rng(devices=[trained[0].device] if on_gpu else []):
        try:
            # reserve memory for the optimizer's two moments and DDP's buckets
            held = [torch.empty_like(parameter) for parameter in trained for _ in range(2 + (du.world()[1] > 1))]
            try_once(size)
            begun, passes = time.perf_counter(), 0
            while not passes or time.perf_counter() - begun < 0.5:
                try_once(size)
                if on_gpu:
                    torch.cuda.synchronize()
                passes += 1
            seconds = (time.perf_counter() - begun) / passes
            if on_gpu:
                # reserve memory that NCCL, cuDNN and cuBLAS allocate outside torch's caching allocator
                held.append(torch.empty(1_500_000_000, dtype=torch.uint8, device=trained[0].device))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            seconds = math.inf
    del held
    for parameter in trained:
        parameter.grad = None
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return seconds
