"""One optimizer step at a time: what must be the same in every training loop, or a run's promise breaks.

A script keeps its loop and its loss. Here stand the position in a run, the leaves of each step, the agreement of the
ranks before it, the update of the weights, and the checkpoints after it. Three rules make a resume simple:

- A checkpoint of step k is written after all that step k brings, its evaluation included.
- The samples of a step and their leaves belong to the run and never change; who computes a leaf does not matter.
- Noise is a function of (seed, step, leaf), so that no random state is saved.
"""

import contextlib
import faulthandler
import gc
import json
import math
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import distributed_utils as du
from hardware_utils import out_of_memory
from utils import checkpoint
from utils.cli import InputError, RunError
from utils.log import RunLog, draw_curves, print_banner, save_figure
from utils.sampler import TrainBatchSampler


@dataclass
class Position:
    """Where a run stands, as each checkpoint holds it. samples: of this epoch, over all ranks."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
    best: float | None = None
    best_metrics: dict = field(default_factory=dict)


class Run:
    """A run folder and what happens in it: its lock, the checkpoint to resume, position, log and stop signal.

    The order of calls: Run(), choose_batch(), begin(), then `with run:` steps(), keep() and finish(). After
    choose_batch() `effective` and `leaf` are the samples of a step over all ranks and those of one forward pass, and
    `shares` says how the ranks divide a step's leaves. A subclass may bring another engine than torch's: see wrap() and
    the methods under "the engine".
    """

    # whether all ranks must make equally many passes in a step and in an evaluation
    equal_passes = False
    # the names of the best checkpoint; a script whose parts each have a best of their own puts that name first
    best_names: tuple[str, ...] = ("best.pt",)

    def __init__(self, format: str, args: Namespace, ranks: du.Ranks, advice: str, model_flags: tuple[str, ...] = ()):
        """All ranks: lock the folder and read the checkpoint; nothing is written or deleted before begin().

        format: name and version of what the script saves. advice: what to do when the memory is too small. model_flags:
        what the model and its task are made of; where there is a checkpoint, `args` takes these from it. With
        --eval_only or --predict the folder is read only, and there must be a checkpoint: --resume_from, or best.pt.
        """
        self.folder = Path(args.output_dir)
        self.format = format
        self.args = args
        self.ranks = ranks
        self.advice = advice
        self.position = Position()
        self.stop = du.StopSignal()
        self.stopped = 0
        self.epoch_over = self.evaluation_due = False
        # step and epoch of the last checkpoint, and when it was written
        self.saved, self.saved_at = None, time.monotonic()
        # the epoch's batches, and how many of its samples are read: an evaluation does not begin them anew
        self.stream = None
        self.read = 0
        self.profiler = self.exact = self.wrapped = None
        self.armed = -math.inf
        self.trains = not (args.eval_only or getattr(args, "predict", None))
        resume_from = args.resume_from
        if self.trains:
            self.lock = checkpoint.lock_run_folder(self.folder, bool(resume_from) or args.overwrite)
        else:
            checkpoint.make_folder(self.folder)
            resume_from = resume_from or str(self.folder / "best.pt")
        self.checkpoint = checkpoint.load_checkpoint(resume_from, self.folder, format)
        for name in model_flags if self.checkpoint else ():
            given = getattr(args, name)
            value = self.checkpoint["model_flags"].get(name, given)
            if given != value:
                du.print_main(f"--{name}: {value}, as in the checkpoint")
            setattr(args, name, value)
        self.model_flags = {name: getattr(args, name) for name in model_flags}
        if not self.trains:
            if self.checkpoint is None:
                raise InputError(f"{self.folder}: no checkpoint to use; give one with --resume_from")
            self.leaf, self.position = self.checkpoint["run"]["leaf"], Position(**self.checkpoint["position"])
        self.begun = time.time()

    def choose_batch(self, model: nn.Module, try_once: Callable[[int], None]) -> None:
        """All ranks: the batch of the flags; of a run that is resumed its own, at any number of GPUs.

        try_once(size): forward and backward pass of the largest batch, without talking to other ranks. With
        --auto_batch the leaf is halved on all ranks until that fits everywhere. Raises RunError where not even one
        sample does.
        """
        args, ranks = self.args, self.ranks
        effective, leaf = args.effective_batch_size, args.batch_size
        times = effective / leaf if effective else ranks.world_size
        effective = effective or leaf * args.gradient_accumulation_steps * ranks.world_size
        if self.checkpoint:
            facts = self.checkpoint["run"]
            if args.effective_batch_size not in (None, facts["effective_batch_size"]):
                raise InputError(
                    f"--effective_batch_size {effective}: this run has {facts['effective_batch_size']}; leave it out"
                )
            effective, leaf, times = facts["effective_batch_size"], facts["leaf"], facts["lr_times"]

        self.shares = [1] * ranks.world_size
        if args.gpu_shares not in ("equal", "auto"):
            self.shares = [int(share) for share in args.gpu_shares.split(",")]
            if len(self.shares) != ranks.world_size:
                raise InputError(f"--gpu_shares {args.gpu_shares}: needs {ranks.world_size} numbers, one per process")

        # what fits the smallest memory, and how fast each GPU is
        wanted = leaf
        auto_batch = ranks.device.type == "cuda" if args.auto_batch is None else args.auto_batch
        if auto_batch or args.gpu_shares == "auto":
            while math.inf in (seconds := du.gather_objects(_try(try_once, model, leaf))):
                if leaf == 1:
                    raise RunError(f"out of memory at one sample per GPU; {self.advice}")
                leaf //= 2
            if args.gpu_shares == "auto":
                # in tenths of the fastest: what differs by less is noise of the measurement
                self.shares = [max(1, round(10 * min(seconds) / own)) for own in seconds]
        if leaf < wanted:
            du.print_main(f"memory: {wanted} samples at once do not fit, {leaf} do; the result stays, its bits change")
        self.effective, self.leaf, self.lr_times = effective, leaf, times

    def begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: str,
        planned_steps: int,
        losses: list[str],
        facts: dict,
        notes: dict | None = None,
        extra: dict | None = None,
    ) -> nn.Module:
        """All ranks, once nothing can be wrong any more: take the folder, and the position where a checkpoint stands.

        planned_steps: of the whole training, which --max_steps cuts short. losses: names of what step.backward() is
        given. facts: what else may not differ where a run is resumed. notes: what else the banner tells. extra: what
        else each checkpoint holds. Returns the model to train, compiled and in DDP as the flags want it. Raises
        InputError for a checkpoint of another run.
        """
        args, saved = self.args, self.checkpoint
        if not self.trains:
            raise ValueError("--eval_only and --predict end before begin()")
        if not optimizer.defaults.get("fused"):
            raise ValueError("the optimizer needs fused=True, which skips a non-finite step without a wait for the GPU")
        self.facts = facts | {"seed": args.seed, "effective_batch_size": self.effective, "lr_times": self.lr_times}
        for name, value in self.facts.items() if saved else ():
            if saved["run"].get(name) != value:
                before = f"a run with {name.replace('_', ' ')} {saved['run'].get(name)}"
                raise InputError(f"--resume_from: {before}, now {value}; give the same again")
        self.facts["leaf"] = self.leaf
        self.extra = extra or {}
        self.precision = precision
        self.planned_steps = planned_steps
        self.last_step = min(args.max_steps or planned_steps, planned_steps)

        # what the training goes on with
        self.model, self.optimizer, self.frozen = model, optimizer, checkpoint.frozen_names(model)
        self.scaler = torch.amp.GradScaler(self.ranks.device.type, init_scale=2.0**14, enabled=precision == "fp16")
        if saved:
            self.position = Position(**saved["position"])
            checkpoint.load_trained(model, saved["model"])
            self.restore_optimizer(saved)

        best_counts = False
        with du.agree_on_errors():
            try:
                if self.ranks.is_main:
                    best_counts = checkpoint.begin_run(self.folder, saved, args.overwrite, self.best_names)
                # faulthandler keeps it open
                self.stacks = open(self.folder / f"hang_rank{self.ranks.rank}.txt", "w")  # noqa: SIM115
                names = [*losses, "grad_norm", "skipped"]
                self.log = RunLog(self.folder, self.ranks, names, args, saved and saved["log"], self.position.step)
            except OSError as error:
                raise RunError(f"{self.folder}: cannot begin the run ({error.strerror}); make room") from None
        if not du.broadcast_object(best_counts):
            self.position.best, self.position.best_metrics = None, {}
        self.writer = checkpoint.CheckpointWriter(self.folder, args.keep_last)

        world_size = self.ranks.world_size
        leaves = math.ceil(self.effective / self.leaf)
        parts = f"{leaves} micro-batch{'es' * (leaves > 1)} of {self.leaf}"
        shares = f", shared {self.shares}" if len(set(self.shares)) > 1 else ""
        rows = {
            "processes": f"{world_size} by {self.ranks.launcher}, {self.ranks.device.type}",
            "batch": f"{self.effective} samples a step = {parts}{shares}",
            "steps": f"{self.position.step} of {self.last_step} done",
        }
        print_banner(str(self.folder), rows | facts | (notes or {}))
        idle = world_size - leaves
        if idle > 0:
            du.print_main(
                f"warning: {idle} of {world_size} processes have no micro-batch; --batch_size of a new run is too large"
            )

        # compiled in place, so that the names of the weights stay
        if args.compile:
            model.compile()
        return self.wrap()

    def go_on_with(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        """All ranks, in mid-run after choose_batch(): other weights of the model are trained from here on.

        What was best so far counts no longer. Returns the model to train, as begin() does.
        """
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(self.ranks.device.type, init_scale=2.0**14, enabled=self.scaler.is_enabled())
        self.facts |= {"effective_batch_size": self.effective, "leaf": self.leaf, "lr_times": self.lr_times}
        self.position.best, self.position.best_metrics, self.stream = None, {}, None
        return self.wrap()

    # --- the engine: torch's own --------------------------------------------------------------------------------------

    def wrap(self) -> nn.Module:
        """All ranks: the model in DDP, or exact sums of its gradients; again where other weights are to be trained."""
        if self.exact:
            self.exact.close()
        if isinstance(self.wrapped, DistributedDataParallel):
            # of two around one model both would exchange its gradients
            self.wrapped = None
            gc.collect()
        self.exact = None
        if self.args.deterministic:
            self.exact = du.ExactSum(self.model)
        self.wrapped = self.model if self.exact else du.wrap_in_ddp(self.model, self.ranks.device)
        return self.wrapped

    def restore_optimizer(self, saved: dict) -> None:
        """Put a checkpoint's moments and loss scale into the optimizer, before wrap()."""
        checkpoint.restore_optimizer(self.optimizer, saved["optimizer"])
        if self.scaler.is_enabled() and saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])

    @contextlib.contextmanager
    def around_leaf(self, last: bool) -> Iterator[None]:
        """Around the passes of a leaf; last: of this rank in the step, after which gradients are exchanged."""
        if self.exact:
            self.exact.shift = du.SHIFT * (self.scaler._scale.double() if self.scaler.is_enabled() else 1)
            self.exact.begin_leaf(last)
        quiet = isinstance(self.wrapped, DistributedDataParallel) and not last
        with self.wrapped.no_sync() if quiet else contextlib.nullcontext():
            yield

    def differentiate(self, loss: Tensor) -> None:
        """Add the gradients of this rank's part of a sum over the ranks."""
        # DDP averages over the ranks, so undo the division
        ranks = 1 if self.exact else du.world()[1]
        self.scaler.scale(loss * ranks).backward()

    def update_weights(self, lr: float) -> tuple[Tensor, Tensor]:
        """Clip the gradients and update the weights; (gradient norm before clipping, 1 where the step was skipped)."""
        optimizer = self.optimizer
        if self.exact:
            self.exact.finish()
        self.scaler.unscale_(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grad_norm = nn.utils.clip_grad_norm_(parameters, self.args.grad_clip or math.inf)
        skipped = 1.0 - grad_norm.isfinite().float()
        for group in optimizer.param_groups:
            group["lr"] = lr
        if self.scaler.is_enabled():
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            # what GradScaler hands to a fused optimizer, which then skips on the device
            optimizer.grad_scale, optimizer.found_inf = None, skipped
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return grad_norm, skipped

    def weights(self) -> dict[str, Tensor]:
        """All ranks: what a checkpoint holds of the model, see checkpoint.trained_state."""
        return checkpoint.trained_state(self.model, self.frozen)

    def engine_state(self) -> dict:
        """All ranks: what a checkpoint holds of the optimizer and the loss scale."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def put_weights(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """All ranks: overwrite the weights of the plain model; the training does not go on from them."""
        checkpoint.load_trained(model, weights)

    # --- the steps ----------------------------------------------------------------------------------------------------

    def steps(self, loader: DataLoader, count: Callable[[list], list[float]] | None = None) -> Iterator["Step"]:
        """Each optimizer step from the run's position to the next evaluation, the end of the epoch or of the run.

        count: numbers of this rank's leaves (a list of their batches, which may be empty), always as many, to be
        summed over the ranks into `totals`. Before a step the ranks tell each other these, a stop signal and an
        unusable sample (a batch's "error"), in a small transfer of host memory that goes on while the step before
        computes. A signal to any rank ends the steps on all, one or two steps later; `stopped` is then its exit code.
        Raises InputError on all for a sample of any.
        """
        position, sampler = self.position, loader.batch_sampler
        first, last = map(int, (self.args.profile or "0:0").split(":"))
        if self.stream is None or self.read != position.samples:
            sampler.set_position(position.epoch, position.samples)
            self.stream, self.read = self._begin(loader), position.samples
        self.log.restart_clock()
        self.epoch_over = self.evaluation_due = False
        every_steps, upcoming = self.args.eval_every_steps, None
        while not self._pauses():
            self.alive(f"step {position.step + 1}")
            samples, numbers, batches, error, agreed = upcoming or self._fetch(sampler, count)
            stop_143, stop_130, unusable, *totals = agreed()
            if unusable:
                raise InputError(next(reason for reason in du.gather_objects(error) if reason))
            if stop_143 or stop_130:
                self.stopped = 143 if stop_143 else 130
                self.stream = None
                return

            if position.step + 1 == first and self.ranks.is_main:
                self.profiler = torch.profiler.profile()
                self.profiler.start()
            passes = sampler.most_leaves(position.samples) if self.equal_passes else len(batches)
            self.epoch_over = self.read >= sampler.num_samples
            self.evaluation_due = bool(every_steps) and (position.step + 1) % every_steps == 0
            ends = self.epoch_over or self.evaluation_due or position.step + 1 == self.last_step
            upcoming = None if ends else self._fetch(sampler, count)
            yield Step(self, samples, numbers, batches, totals, passes)

            if self.profiler and position.step == last:
                self.profiler.stop()
                self.profiler.export_chrome_trace(str(self.folder / "trace.json"))
                self.profiler = None
            every = 500 if self.args.save_every is None else self.args.save_every
            if every and position.step % every == 0 and not self._pauses() and self._save_is_due():
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
        facts = [self.stop.code == 143, self.stop.code == 130, bool(error), *counts]
        return samples, numbers, batches, error, du.begin_sum(facts)

    def _pauses(self) -> bool:
        """Whether steps() ends here; the checkpoint then waits for the evaluation."""
        return self.is_over() or self.epoch_over or self.evaluation_due

    def _save_is_due(self) -> bool:
        """All ranks: whether --save_every wants one, or the last is a minute old by rank 0's clock."""
        return self.args.save_every is not None or du.broadcast_object(time.monotonic() - self.saved_at > 60)

    def batches(self, loader: DataLoader) -> Iterator:
        """The batches of an evaluation, on the device. Raises InputError on all ranks for an unusable sample of any.

        Where all ranks must make equally many passes, spare ones follow, whose "index" is -1.
        """
        error = ""
        most = max(du.gather_objects(len(loader))) if self.equal_passes else 0
        for number, batch in enumerate(self._begin(loader), start=1):
            self.alive(f"batch {number} of the evaluation at step {self.position.step}")
            error = error or error_in(batch)
            yield du.to_device(batch, self.ranks.device)
        for _ in range(most - len(loader)):
            batch = du.to_device(loader.collate_fn([loader.dataset[0]]), self.ranks.device)
            yield batch | {"index": torch.full_like(batch["index"], -1)}
        with du.agree_on_errors():
            if error:
                raise InputError(error)

    def _begin(self, loader: DataLoader) -> Iterator:
        """The loader's batches; its processes are forked at the first call."""
        # not while a thread writes a checkpoint, whose locks the copies would find taken for ever
        if self.trains and self.writer.thread:
            self.writer.thread.join()
        with du.hold_signals():
            return iter(loader)

    def alive(self, place: str) -> None:
        """This rank is at work: where, for the other ranks. If nothing follows for long, its stacks are written.

        That is before the ranks that wait for it give up and the launcher ends all.
        """
        self.ranks.note(place)
        if not self.trains:
            return
        timeout, now = self.args.dist_timeout, time.monotonic()
        # each time starts a thread, so not in every step
        if now - self.armed > 0.1 * timeout:
            faulthandler.dump_traceback_later(0.9 * timeout, file=self.stacks)
            self.armed = now

    def is_over(self) -> bool:
        """Whether the run has made all its steps."""
        return self.position.step >= self.last_step

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, best: bool = False) -> None:
        """All ranks: a checkpoint of this position, unless there is one.

        Raises RunError on all ranks where the disk is full, or a rank holds other weights than the rest.
        """
        position = (self.position.step, self.position.epoch)
        if self.saved != position:
            weights = self.weights()
            du.check_same_weights(weights)
            contents = {
                "format": self.format,
                "step": self.position.step,
                "run": self.facts,
                "model_flags": self.model_flags,
                "position": asdict(self.position),
                "log": self.log.state(),
                "model": weights,
            }
            self.writer.save(contents | self.engine_state() | self.extra, self.best_names if best else ())
            self.saved, self.saved_at = position, time.monotonic()

    def save_and_stop(self) -> int:
        """All ranks, after a signal: save; returns the exit code."""
        self.save()
        # before the ranks agree in wait(): srun ends rank 0 as soon as another rank has ended with the signal's code
        self.log.close()
        self.writer.wait()
        du.print_main(f"signal: saved at step {self.position.step}; --resume_from auto continues from there")
        return self.stopped

    def keep(self, metrics: dict[str, float], headline: str, lower: bool = False) -> None:
        """All ranks, when steps() has ended: log the evaluation and save; best.pt too where `headline` is the best yet.

        metrics: of the evaluation that was due, {} without one. lower: whether less is better, as of an error. Without
        --save_every what is neither the best nor the end is saved once a minute; with it, an epoch's end alone is not.
        """
        metrics = {name: float(value) for name, value in metrics.items()}
        if metrics:
            shown = " | ".join(f"{name}\xa0{value:.4f}" for name, value in metrics.items())
            du.print_main(textwrap.fill(shown, 100, break_long_words=False).replace("\xa0", " "))
        position, epoch = self.position, self.position.epoch + 1
        at_end = position.step == self.planned_steps
        planned = self.epoch_over or self.evaluation_due or at_end
        if at_end:
            self.log.write_interval(position.step, epoch, self.last_step)

        best = False
        if planned and metrics:
            self.log.write(position.step, epoch, metrics)
            value = metrics[headline]
            better = position.best is None or (value <= position.best if lower else value >= position.best)
            best = better and math.isfinite(value)
            if best:
                position.best, position.best_metrics = value, metrics
        if self.epoch_over:
            position.epoch, position.samples, self.stream = position.epoch + 1, 0, None
        every = self.args.save_every
        due = metrics or every is None or (every and position.step % every == 0)
        if best or self.is_over() or (due and self._save_is_due()):
            self.save(best)

        # what --max_steps alone brings is logged after the checkpoint: the run that is resumed has no such line
        if not at_end and self.is_over():
            self.log.write_interval(position.step, epoch, self.last_step)
        if metrics and not planned:
            self.log.write(position.step, epoch, metrics)

    def load_best(self, model: nn.Module) -> int:
        """All ranks: put the weights of best.pt into the plain model; returns the step they are of.

        A run without an evaluation has no best.pt and keeps its last weights.
        With --eval_only or --predict: those of the checkpoint that was named.
        """
        best = self.checkpoint
        if self.trains:
            self.writer.wait()
            if self.is_over():
                # all is saved: a signal need not wait for the end of the test, which a resume makes again
                self.stop.at_once = b""
                if self.ranks.is_main:
                    self.log.writer.flush()
                    self.stop.at_once = b"signal: the final test is broken off; --resume_from auto makes it again\n"
            if self.position.best is None:
                return self.position.step
            best = checkpoint.load_checkpoint(str(self.folder / self.best_names[0]), self.folder, self.format)
        self.put_weights(model, best["model"])
        return best["step"]

    def figure(self, name: str, figure) -> None:
        """Rank 0: a matplotlib figure as figures/<name>.png, in training in TensorBoard too; None is left out."""
        if self.ranks.is_main and figure is not None:
            try:
                pixels = save_figure(self.folder, name, figure)
                if self.trains:
                    self.log.writer.add_image(name, pixels, self.position.step, dataformats="HWC")
            except OSError as error:
                # a full disk ends the run at the next checkpoint, which needs the room too
                print(f"warning: {self.folder}: figure not written ({error})", flush=True)

    def finish(self, tested: dict[str, float] | None = None) -> None:
        """All ranks, at the end of a run that was not stopped: the weights alone, summary.json and the curves.

        The weights are the model's: the last, or the best after load_best(). tested: metrics of the test.
        """
        self.writer.wait()
        facts = {"steps": self.position.step, "epochs": self.position.epoch, "world_size": self.ranks.world_size}
        facts |= self.facts | self.position.best_metrics | (tested or {})
        summary = self.log.last | facts | {"seconds": round(time.time() - self.begun, 1)}
        weights = self.weights()
        with du.agree_on_errors():
            try:
                checkpoint.export_weights(weights, self.folder / "model.safetensors")
                self.write_summary("summary", summary)
                if self.ranks.is_main:
                    self.figure("curves", draw_curves(self.folder / "metrics.jsonl"))
                    rows = [
                        f"| {name} | {value if isinstance(value, str) else f'{value:.4g}'} |"
                        for name, value in (tested or {}).items()
                    ]
                    self.log.writer.add_text("test", "\n".join(["| metric | value |", "| --- | --- |", *rows]))
            except OSError as error:
                raise RunError(f"{self.folder}: results not written ({error}); make room and resume") from None
        du.print_main(f"done; checkpoints, curves and summary.json are in {self.folder}")

    def write_summary(self, name: str, values: dict) -> None:
        """Rank 0: <name>.json in the run folder, one flat object."""
        if self.ranks.is_main:
            (self.folder / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> "Run":
        self.stop.__enter__()
        return self

    def __exit__(self, kind, error, trace) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.stream = None
        if self.writer.thread:
            self.writer.thread.join()
        self.log.close()
        self.stacks.close()
        if not Path(self.stacks.name).stat().st_size:
            Path(self.stacks.name).unlink()
        self.stop.__exit__(kind, error, trace)
        if error and out_of_memory(error):
            if self.ranks.world_size == 1:
                raise RunError(f"out of memory; {self.advice}") from None
            # the others may have enough, and see only that this rank is gone
            print(f"error: rank {self.ranks.rank}: out of memory; {self.advice}", file=sys.stderr, flush=True)


# --- forward, backward, update ----------------------------------------------------------------------------------------


@dataclass
class Step:
    """One optimizer step: what this rank computes of it.

    samples: of all ranks. numbers: of this rank's leaves in the step; none where it has no share, and the one batch it
    computes all the same, as DDP needs, counts nothing. totals: what `count` gave, summed over the ranks. passes: that
    this rank makes; those beyond its leaves repeat the last batch and count nothing.
    """

    run: Run
    samples: int
    numbers: range
    batches: list
    totals: list[float]
    passes: int
    losses: Tensor | int = 0
    weight: float = 1.0

    def leaves(self) -> Iterator:
        """The batch of each leaf on the device, with the leaf's own noise; gradients are exchanged after the last."""
        run = self.run
        for number in range(self.passes):
            self.weight = float(number < len(self.numbers))
            batch = self.batches[min(number, len(self.batches) - 1)]
            leaf = self.numbers[number] if self.weight else 0
            seed_noise(run.ranks.device, run.args.seed, run.position.step, leaf)
            with run.around_leaf(last=number == self.passes - 1):
                yield du.to_device(batch, run.ranks.device)

    def backward(self, *losses: Tensor, through: Tensor | None = None) -> None:
        """Backward pass of the first of these losses, a leaf's part of a sum over the step; the others are logged.

        through: what is differentiated instead, where the loss has no parts that add up. A non-finite loss gives
        non-finite gradients, which reach every rank: all skip the step together.
        """
        finite = torch.where(losses[0].detach().isfinite(), self.weight, torch.nan)
        self.run.differentiate((losses[0] if through is None else through) * finite)
        self.losses = self.losses + du.on_grid(torch.stack([loss.detach() for loss in losses]) * self.weight)

    def update(self, lr: float) -> None:
        """Clip the gradients, update the weights at this learning rate, count the step and log it.

        A non-finite gradient leaves the weights alone. Nothing is read back from the GPU but every log interval.
        """
        run, args = self.run, self.run.args
        grad_norm, skipped = run.update_weights(lr)
        position = run.position
        position.step += 1
        position.samples += self.samples
        # the norm is the same on all ranks, so that rank 0 alone enters it into the sum
        shared = torch.stack([grad_norm, skipped]).double()
        shared = shared if run.ranks.is_main else torch.zeros_like(shared)
        run.log.step(torch.cat([self.losses, shared]), position.step, self.samples, lr)
        run.log.warn_of_days(run.last_step - position.step)
        if position.step % args.log_every == 0:
            run.log.write_interval(position.step, position.epoch + 1, run.last_step)


def error_in(batch: dict) -> str:
    """The first `error` that a batch's samples tell of, or ""."""
    return next((str(reason) for reason in np.atleast_1d(batch.get("error", "")) if reason), "")


def seed_noise(device: torch.device, *position: int) -> None:
    """Dropout from here on is a function of this position: (seed, step, leaf)."""
    sequence = np.random.SeedSequence([number % 2**63 for number in position])
    seed = int(sequence.generate_state(1, np.uint64)[0])
    # torch.manual_seed visits every kind of device, which takes a tenth of a millisecond
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


# --- memory -----------------------------------------------------------------------------------------------------------


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
            # one short pass may find a core that others use free, or taken
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
