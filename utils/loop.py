"""One optimizer step at a time: what must be the same in every training loop, or a run's promise breaks.

A script keeps its loop and its loss. `Run` is the folder, all that an evaluation needs; `Training` holds the steps and
checkpoints of a run that trains, on an engine (utils/engine.py). Three rules make a resume simple:

- The checkpoint for step k is written last, after everything step k does, including its evaluation.
- The samples of a step and their micro-batches belong to the run and never change; who computes a micro-batch does not
matter.
- Noise is a function of (seed, step, micro-batch), so that no random state is saved.
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

# --- what a run is ----------------------------------------------------------------------------------------------------


@dataclass
class Position:
    """Where a run stands, as each checkpoint holds it. samples: of this epoch, over all ranks."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
    best: float | None = None
    best_metrics: dict = field(default_factory=dict)


class BatchPlan(NamedTuple):
    """How a step is computed. All but the shares belong to the run, at any number of GPUs.

    effective: samples of a step over all ranks. leaf: samples of one forward pass. times: factor by which
    --lr_scaling may scale the learning rate. shares: how the ranks divide a step's micro-batches.
    """

    global_batch_size: int
    micro_batch_size: int
    lr_factor: float
    gpu_shares: list[int]

    def invariants(self) -> dict:
        """What a checkpoint holds of it."""
        return {
            "effective_batch_size": self.global_batch_size,
            "lr_times": self.lr_factor,
            "leaf": self.micro_batch_size,
        }


@dataclass
class Plan:
    """What is settled before a training begins; the banner prints it.

    steps: of the whole training, which --max_steps may cut short. losses: names of what step.backward() is given.
    invariants: what may not differ when the run is resumed. banner: further lines.
    """

    batch: BatchPlan
    steps: int
    losses: list[str]
    invariants: dict
    banner: dict = field(default_factory=dict)


class Run:
    """A run folder: its lock, the checkpoint to use, the position, figures and summaries.

    args: the flags, of which `model_flags` are as in the checkpoint where there is one. checkpoint: what to resume or
    evaluate; None where a run starts, and once a training has taken it over.
    """

    def __init__(
        self, format: str, args: Namespace, ranks: du.Ranks, advice: str = "", model_flags: tuple[str, ...] = ()
    ):
        """All ranks: lock the folder and read the checkpoint; nothing is written or deleted before a Training.

        format: name and version of what the script saves. advice: what to do when the memory is too small. model_flags:
        flags that define the model and its data; on resume their values come from the checkpoint. With --eval_only or
        --predict the folder is read only, and there must be a checkpoint: --resume_from, or best.pt.
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
        # figures that TensorBoard does not have yet
        self.drawn: dict[str, np.ndarray] = {}
        # in training, the file for this rank's stack traces if it hangs, and when that watchdog was last reset
        self.stacks: TextIO | None = None
        self.armed = -math.inf

    @property
    def micro_batch_size(self) -> int:
        """Samples of one forward pass in the training that the checkpoint is of."""
        return self.checkpoint["run"]["leaf"]

    def plan_batches(
        self, model: nn.Module, try_once: Callable[[int], None], batch_size: int, effective_batch_size: int | None
    ) -> BatchPlan:
        """All ranks: the batch that the flags want; a run that is resumed keeps its own, at any number of GPUs.

        try_once(size): forward and backward pass of the largest batch, without talking to other ranks. With
        --auto_batch the micro-batch is halved on all ranks until that fits everywhere. Raises RunError where not even
        one sample does.
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

        # what fits the smallest memory, and how fast each GPU is
        wanted = micro_batch_size
        auto_batch = ranks.device.type == "cuda" if args.auto_batch is None else args.auto_batch
        if auto_batch or args.gpu_shares == "auto":
            while math.inf in (seconds := du.gather_objects(_try(try_once, model, micro_batch_size))):
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
        """Record that this rank is at work, and where. In training its stacks are written if no heartbeat follows.

        That happens before the ranks that wait for it give up and the launcher ends all.
        """
        self.ranks.note(place)
        timeout, now = self.args.dist_timeout, time.monotonic()
        # each time starts a thread, so not in every step
        if self.stacks and now - self.armed > 0.1 * timeout:
            faulthandler.dump_traceback_later(0.9 * timeout, file=self.stacks)
            self.armed = now

    def start_loader(self, loader: DataLoader) -> Iterator:
        """The loader's batches; its processes are forked at the first call."""
        # not while the checkpoint thread runs: children would inherit its locks, held for ever
        if self.writer.thread and loader.num_workers and loader._iterator is None:
            self.writer.thread.join()
        with du.hold_signals():
            return iter(loader)

    def batches(self, loader: DataLoader, equal_passes: bool = False) -> Iterator:
        """The batches of an evaluation, on the device. Raises InputError on all ranks for an unusable sample of any.

        equal_passes: whether all ranks must make equally many; spare batches follow, whose "index" is -1.
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
        """Rank 0: a matplotlib figure as figures/<name>.png, in training in TensorBoard too; None is left out."""
        if self.ranks.is_main and figure is not None:
            try:
                self.drawn[name] = save_figure(self.folder, name, figure)
            except OSError as error:
                # a full disk ends the run at the next checkpoint, which needs the room too
                print(f"warning: {self.folder}: figure not written ({error})", flush=True)

    @contextlib.contextmanager
    def writing(self, what: str = "results", advice: str = "make room, then --eval_only") -> Iterator[None]:
        """Around the writing of files: a full disk ends the run with one line."""
        try:
            yield
        except OSError as error:
            raise RunError(f"{self.folder}: {what} not written ({error}); {advice}") from None

    def write_summary(self, name: str, values: dict) -> None:
        """Rank 0: <name>.json in the run folder, one flat object."""
        if self.ranks.is_main:
            (self.folder / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


# --- training ---------------------------------------------------------------------------------------------------------


class Training:
    """The training of a run, from its position to the end: steps, evaluations, checkpoints.

    Used as a context: `with Training(...) as training`, then steps(), record() and finish(). A checkpoint holds the
    position, the weights and the engine's state, the log's open interval, the plan's invariants, the model flags, and
    what `extra()` gives; save() puts it together.
    """

    def __init__(
        self,
        run: Run,
        args: Namespace,
        engine: Engine,
        plan: Plan,
        extra: Callable[[], dict] = dict,
        best_names: tuple[str, ...] = ("best.pt",),
    ):
        """All ranks, after all checks: claim the folder for this run, as far as its checkpoint goes.

        args: run.args, completed by the script. extra: asked for what else a checkpoint holds whenever one is written.
        best_names: files of the best checkpoint; a script whose stages each have a best of their own puts it first.
        Raises InputError for a checkpoint of another run.
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
                # a machine with less memory may have halved the micro-batch
                if before != value and name != "leaf":
                    before = f"a run with {name.replace('_', ' ')} {before}"
                    raise InputError(f"--resume_from: {before}, now {value}; give the same again")
        self.stop = du.StopSignal()
        # exit code of a signal that has ended steps(), or 0
        self.stopped = 0
        self.epoch_over = self.evaluation_due = False
        # step and epoch of the last checkpoint, and when it was written
        self.saved, self.saved_at = None, time.monotonic()
        # the epoch's batches, and how many of its samples are read: an evaluation does not begin them anew
        self.stream: Iterator | None = None
        self.read = 0
        self.profiler: torch.profiler.profile | None = None
        first, last = map(int, (args.profile or "0:0").split(":"))
        # the steps of --profile that this start makes
        self.profiled = range(max(first, self.position.step + 1), min(last, self.last_step) + 1)
        if args.profile and not self.profiled:
            made = f"this start makes steps {self.position.step + 1} to {self.last_step}"
            du.print_main(f"warning: --profile {args.profile}: no trace, as {made}")

        best_counts = False
        with du.agree_on_errors():
            try:
                if self.ranks.is_main:
                    best_counts = checkpoint.begin_run(run.folder, saved, args.overwrite, best_names)
                # faulthandler keeps it open
                run.stacks = open(run.folder / f"hang_rank{self.ranks.rank}.txt", "w")  # noqa: SIM115
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
        """All ranks, in mid-run: other weights are trained from here on, with a best checkpoint of their own."""
        self.engine.close()
        self.engine, self.batch, self.best_names = engine, batch, best_names
        self.invariants |= batch.invariants()
        self.position.best, self.position.best_metrics, self.stream = None, {}, None

    # --- the steps ----------------------------------------------------------------------------------------------------

    def steps(self, loader: DataLoader, count: Callable[[list], list[float]] | None = None) -> Iterator["Step"]:
        """Each optimizer step from the run's position to the next evaluation, the end of the epoch or of the run.

        count: numbers of this rank's micro-batches (a list of their batches, which may be empty), always as many, to be
        summed over the ranks into `totals`. Before a step the ranks tell each other these, a stop signal and an
        unusable sample (a batch's "error"), in a small transfer of host memory that goes on while the step before
        computes. A signal to any rank ends the steps on all, one or two steps later; `stopped` is then its exit code.
        Raises InputError on all for a sample of any.
        """
        position, sampler = self.position, loader.batch_sampler
        if self.stream is None or self.read != position.samples:
            sampler.set_position(position.epoch, position.samples)
            self.stream, self.read = self.run.start_loader(loader), position.samples
        self.log.restart_clock()
        self.epoch_over = self.evaluation_due = False
        every_steps, upcoming = self.args.eval_every_steps, None
        while not self._pauses():
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
            self.epoch_over = self.read >= sampler.num_samples
            self.evaluation_due = bool(every_steps) and (position.step + 1) % every_steps == 0
            ends = self.epoch_over or self.evaluation_due or position.step + 1 == self.last_step
            upcoming = None if ends else self._fetch(sampler, count)
            yield Step(self, samples, numbers, batches, totals, passes)

            if position.step + 1 == self.profiled.stop:
                self._write_trace()
            if not self._pauses() and self._save_is_due():
                self.save()

    def _fetch(self, sampler: TrainBatchSampler, count: Callable | None) -> tuple:
        """Read what this rank computes of the next step, and begin to agree about it; see steps()."""
        samples, numbers = sampler.share(self.read)
        # the time this takes is the wait for data
        begun = time.perf_counter()
        batches = [next(self.stream) for _ in numbers or [0]]
        self.read += samples
        self.log.waited += time.perf_counter() - begun

        counts = count(batches if numbers else []) if count else []
        error = next(filter(None, map(error_in, batches)), "")
        own = [self.stop.code == 143, self.stop.code == 130, bool(error), *counts]
        return samples, numbers, batches, error, du.begin_sum(own)

    def _pauses(self) -> bool:
        """Whether steps() ends here; the checkpoint then waits for the evaluation."""
        return self.is_over() or self.epoch_over or self.evaluation_due

    def is_over(self) -> bool:
        """Whether the run has made all its steps."""
        return self.position.step >= self.last_step

    def last_logged(self, name: str) -> float | None:
        """The value of a metric that was logged last; None without one."""
        return self.log.last.get(name)

    def signalled(self) -> int:
        """All ranks: the exit code of a stop signal to any of them by now, or 0."""
        return du.reduce_max([self.stop.code])[0]

    def _write_trace(self) -> None:
        """Rank 0: what --profile has recorded, as trace.json."""
        if self.profiler:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.run.folder / "trace.json"))
            self.profiler = None

    # --- evaluations and checkpoints ----------------------------------------------------------------------------------

    def record(self, metrics: dict[str, float], headline: str, lower: bool = False) -> None:
        """All ranks, when steps() has ended: log the evaluation and save; best.pt too where `headline` is the best yet.

        metrics: of the evaluation, {} without one. lower: whether less is better, as of an error.
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
        # an evaluation that --max_steps alone brings must not count for best.pt: the uninterrupted run has none here
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
            # after the checkpoint, so that the resumed run does not have these lines
            self.log.write_interval(*where, self.last_step)
            if metrics and not planned:
                self.log.write(*where, metrics)

    def _note_best(self, metrics: dict[str, float], headline: str, lower: bool) -> bool:
        """Whether these metrics are the best so far; the later of two that are equal."""
        position, value = self.position, metrics[headline]
        better = position.best is None or (value <= position.best if lower else value >= position.best)
        if not better or not math.isfinite(value):
            return False
        position.best, position.best_metrics = value, metrics
        return True

    def _save_is_due(self, ended: bool = False, evaluated: bool = False) -> bool:
        """All ranks: whether to save at this step. ended: the steps have ended here; evaluated: with an evaluation.

        By --save_every: at its steps and after evaluations. Without it: where steps end, and every 500th step, but at
        most once a minute by rank 0's clock.
        """
        every, step = self.args.save_every, self.position.step
        if every is not None:
            return evaluated or bool(every and step % every == 0)
        return (ended or step % 500 == 0) and du.broadcast_object(time.monotonic() - self.saved_at > 60)

    def save(self, best: bool = False) -> None:
        """All ranks: a checkpoint of this position, unless there is one.

        Raises RunError on all ranks where the disk is full, or a rank holds other weights than the rest.
        """
        position = (self.position.step, self.position.epoch)
        if self.saved != position:
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
            self.run.writer.save(contents, self.best_names if best else (), first=self.log.sync)
            self.saved, self.saved_at = position, time.monotonic()

    def save_and_stop(self) -> int:
        """All ranks, after a signal: save; returns the exit code."""
        self.save()
        # before the ranks agree in wait(): srun ends rank 0 as soon as another rank has ended with the signal's code
        self.log.close()
        self.run.writer.wait()
        du.print_main(f"signal: saved at step {self.position.step}; --resume_from auto continues from there")
        return self.stopped

    def flush(self) -> None:
        """All ranks: wait until the last checkpoint is on the disk. Raises RunError on all where it is full."""
        self.run.writer.wait()

    def load_best(self) -> int:
        """All ranks: put the weights of best.pt into the plain model; returns the step they are of.

        A run without an evaluation has no best.pt and keeps its last weights.
        """
        self.flush()
        if self.is_over():
            # all is saved: a signal need not wait for the end of the test, which a resume makes again
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
        """All ranks, at the end of a run that was not stopped: the weights alone, summary.json and the curves.

        The weights are the model's: the last, or the best after load_best(). tested: metrics of the test.
        """
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
        """Rank 0: the run's new figures in TensorBoard."""
        for name, pixels in self.run.drawn.items():
            with contextlib.suppress(OSError):
                self.log.writer.add_image(name, pixels, self.position.step, dataformats="HWC")
        self.run.drawn.clear()

    def __enter__(self) -> "Training":
        self.stop.__enter__()
        return self

    def __exit__(self, kind, error, trace) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.stream = None
        if self.run.writer.thread:
            self.run.writer.thread.join()
        self.log.close()
        stacks, self.run.stacks = self.run.stacks, None
        stacks.close()
        if not Path(stacks.name).stat().st_size:
            Path(stacks.name).unlink()
        self.stop.__exit__(kind, error, trace)
        self.engine.close()
        # last, so that all else is closed and restored even if torch fails here
        self._write_trace()
        if error and out_of_memory(error):
            if self.ranks.world_size == 1:
                raise RunError(f"out of memory; {self.run.advice}") from None
            # the others may have enough, and see only that this rank is gone
            print(f"error: rank {self.ranks.rank}: out of memory; {self.run.advice}", file=sys.stderr, flush=True)


# --- forward, backward, update ----------------------------------------------------------------------------------------


@dataclass
class Step:
    """One optimizer step: what this rank computes of it.

    samples: of all ranks. numbers: of this rank's micro-batches in the step; none where it has no share, and the one
    batch it
    computes all the same, as DDP needs, counts nothing. totals: what `count` gave, summed over the ranks. passes: that
    this rank makes; those beyond its micro-batches repeat the last batch and count nothing.
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
        """The batch of each micro-batch on the device, with the micro-batch's own noise; gradients are exchanged after
        the last."""
        training, device = self.training, self.training.ranks.device
        for number in range(self.passes):
            self.weight = float(number < len(self.numbers))
            batch = self.batches[min(number, len(self.batches) - 1)]
            micro_batch = self.numbers[number] if self.weight else 0
            seed_noise(device, training.args.seed, training.position.step, micro_batch)
            with training.engine.around_micro_batch(last=number == self.passes - 1):
                yield du.to_device(batch, device)

    def backward(self, *losses: Tensor, through: tuple[Tensor, Tensor] | None = None) -> None:
        """Backward pass of the first of these losses, a micro-batch's part of a sum over the step; all are logged.

        through: where the loss has no parts that add up, a micro-batch's output and the loss's gradient by it. A
        non-finite loss gives non-finite gradients, which reach every rank: all skip the step together.
        """
        # NaN where the loss is not finite
        output, gradient = losses[0], self.weight + 0 * losses[0].detach()
        if through:
            output, gradient = through[0], (through[1] * gradient).to(through[0].dtype)
        self.training.engine.backward(output, gradient)
        if self.weight:
            self.losses += [loss.detach() for loss in losses]

    def update(self, lr: float) -> None:
        """Clip the gradients, update the weights at this learning rate, count the step and log it.

        A non-finite gradient leaves the weights alone. Nothing is read back from the GPU but every log interval.
        """
        training, log, position = self.training, self.training.log, self.training.position
        grad_norm = training.engine.update(lr)
        position.step += 1
        position.samples += self.samples
        log.step([*self.losses, grad_norm], position.step, self.samples, lr)
        log.warn_of_days(training.last_step - position.step)
        if position.step % training.args.log_every == 0:
            log.write_interval(position.step, position.epoch + 1, training.last_step)


def error_in(batch: dict) -> str:
    """The first `error` that a batch's samples tell of, or ""."""
    return next(filter(None, batch.get("error", ())), "")


def seed_noise(device: torch.device, *position: int) -> None:
    """Dropout from here on is a function of this position: (seed, step, micro-batch)."""
    sequence = np.random.SeedSequence([number % 2**63 for number in position])
    seed = int(sequence.generate_state(1, np.uint64)[0])
    # torch.manual_seed visits every kind of device, which takes a tenth of a millisecond
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


# --- memory and speed -------------------------------------------------------------------------------------------------


def gpu_shares_from(seconds: list[float]) -> list[int]:
    """How the ranks share a step, from the seconds that each needs for the same pass: the fastest has 10.

    Ranks less than 25 % slower than the fastest of their group count as equally fast: on a busy machine two equal ones
    differed by up to 21 %.
    """
    fastest_of, fastest = {}, 0.0
    for own in sorted(seconds):
        if own > 1.25 * fastest:
            fastest = own
        fastest_of[own] = fastest
    return [max(1, round(10 * min(seconds) / fastest_of[own])) for own in seconds]


def _try(try_once: Callable[[int], None], model: nn.Module, size: int) -> float:
    """Seconds that a pass takes, inf where the memory is too small. All is as before: gradients, buffers, noise."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    buffers = [buffer.clone() for buffer in model.buffers()]
    on_gpu = trained[0].is_cuda
    held = []
    with torch.random.fork_rng(devices=[trained[0].device] if on_gpu else []):
        try:
            # the optimizer's two moments, and the sum over the ranks; gradients are there from the second pass on
            held = [torch.empty_like(parameter) for parameter in trained for _ in range(2 + (du.world()[1] > 1))]
            try_once(size)
            # the mean of several passes: one may find a core that others use free, or taken
            begun, passes = time.perf_counter(), 0
            while not passes or time.perf_counter() - begun < 0.5:
                try_once(size)
                if on_gpu:
                    torch.cuda.synchronize()
                passes += 1
            seconds = (time.perf_counter() - begun) / passes
            if on_gpu:
                # what NCCL, cuDNN and cuBLAS take past torch's allocator
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
