"""What a run says: banner, progress bar, metrics.jsonl, TensorBoard, W&B, throughput and memory, the table at the end.

Every function may be called on all ranks; only rank 0 writes. A full disk never stops a run from here: the log says so
once, and the next checkpoint, which needs the space too, ends the run in order.
"""

import contextlib
import functools
import hashlib
import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from old.async_save_utils import WRITER
from old.checkpoint_utils import Checkpoint, begin_run, cut_metrics, settle_checkpoint
from old.cli_utils import InputError, RunError, save_args
from old.distributed_utils import Ranks, agree_on_errors, print_main, reduce_sum
from old.figure_utils import figure_png, plot_curves
from old.flops_utils import FlopCount, matmul_rate
from old.hardware_utils import peak_memory_gb
from old.manifest_utils import note_written, write_atomically
from old.start_utils import note_start


def print_banner(title: str, facts: dict) -> None:
    """Rank 0: one aligned `name  value` line for each derived number of the run."""
    width = max(map(len, facts))
    lines = [f"== {title} ".ljust(100, "=")]
    for name, value in facts.items():
        lines.append(f"  {name:<{width}}  {value}")
    print_main("\n".join(lines))


class RunLog:
    """The log of one run.

    Per optimizer step, `step()` takes the step's numbers as a tensor on the device and does nothing else; every
    log_every steps they are summed over the ranks in one transfer and written. `pending()` keeps an interval that a
    checkpoint cuts in two exact.
    """

    def __init__(
        self,
        run_folder: Path,
        ranks: Ranks,
        names: list[str],
        total_steps: int,
        log_every: int,
        precision: str,
        compiled: bool = False,
    ):
        """names: what step() tensors hold, in order, `loss` first, `skipped` last. compiled: whether --compile is on.

        A compiled step cannot be counted: torch would run it uncompiled, with other rounding.
        """
        self.run_folder = run_folder
        self.ranks = ranks
        self.names = names
        self.total_steps = total_steps
        self.log_every = log_every
        self.precision = precision
        self.run_id = ""

        # steps that no line tells of yet: on the device, and on the host summed over the ranks
        self.recent: list[torch.Tensor] = []
        self.rows: list[list[float]] = []
        # the digest of each of these steps' samples
        self.batches: list[str] = []
        self.bad_in_row = 0
        self.lr: float | None = None
        self.restart_clock()

        # the last value of each metric
        self.last: dict[str, float] = {}
        # samples/s of each interval
        self.rates: list[float] = []

        # metrics that finish() draws beside the loss, None for all of val/
        self.curves: list[str] | None = None

        # FLOPs of a step, and what a matrix product of this device reaches
        self.counts = not compiled
        self.matmul_rate = matmul_rate(ranks.device, precision) if self.counts else 0.0
        self.flops = 0
        self.counting: FlopCount | None = None
        self.counted_samples = 0

        # open files, and how many bytes of metrics.jsonl are on the disk
        self.writer = None
        self.wandb = None
        self.jsonl = None
        self.bar = None
        self.written = 0
        self.warned = False

    def open(self, args: Namespace, checkpoint: Checkpoint | None = None) -> None:
        """All ranks, once nothing more can be wrong: make the folder this run's (see begin_run) and open its files.

        args: written as args.yaml; --wandb and --wandb_project are read. checkpoint: the one to resume from, whose
        interval (see pending) goes on. Raises InputError where the folder cannot be written.
        """
        if checkpoint:
            interval = checkpoint["log"]
            self.rows = [list(row) for row in interval["rows"]]
            # checkpoints of earlier versions do not hold the batches
            known = interval.get("batches", []) if self.rows else []
            self.batches = [""] * (len(self.rows) - len(known)) + list(known)
            self.bad_in_row = interval["bad_in_row"]
            self.lr = interval.get("lr")
        with agree_on_errors():
            if self.ranks.is_main:
                try:
                    self._open_files(args, checkpoint)
                except OSError as error:
                    reason = error.strerror or error
                    raise InputError(f"{self.run_folder}: log not opened ({reason}); make room") from None

    def _open_files(self, args: Namespace, checkpoint: Checkpoint | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # W&B comes first: nothing is deleted or written before the last thing that can be wrong
        if args.wandb:
            self._open_wandb(args)

        # forget what was logged after the checkpoint; without one, all
        self.run_id, size = begin_run(self.run_folder, checkpoint)
        save_args(self.run_folder / "args.yaml", args)
        note_start(self.run_folder, checkpoint["step"] if checkpoint else 0, args, self.ranks)
        path = self.run_folder / "metrics.jsonl"
        cut_metrics(path, size)
        self.jsonl = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run
        self.written = self.jsonl.tell()

        # TensorBoard, and a progress bar where someone looks
        events = self.run_folder / "logs"
        begun_at = checkpoint["step"] if checkpoint else 0
        self.writer = SummaryWriter(str(events), purge_step=begun_at + 1 if checkpoint else None)
        for file in events.glob("events.out.tfevents.*"):
            note_written(self.run_folder, f"logs/{file.name}")
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.total_steps, initial=begun_at, unit="step", dynamic_ncols=True)

    def _open_wandb(self, args: Namespace) -> None:
        import wandb

        try:
            self.wandb = wandb.init(
                project=args.wandb_project,
                group=self.run_folder.name,
                dir=self.run_folder,
                config=vars(args),
            )
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"--wandb: {reason}; log in with `wandb login` or set WANDB_MODE=offline") from None

    # --- each step ----------------------------------------------------------------------------------------------------

    def count_flops(self, samples: int) -> contextlib.AbstractContextManager:
        """Around each forward and backward pass of a step of so many samples (of all ranks): counts their FLOPs.

        The first step is counted, and a later one if it has more samples, as the last step of an epoch may come first
        after a resume. Otherwise nothing happens here.
        """
        if not self.counts or samples <= self.counted_samples:
            return contextlib.nullcontext()
        self.counting = self.counting or FlopCount()
        return self.counting

    def step(self, values: torch.Tensor, samples: int, lr: float, batch: str = "") -> None:
        """Keep one optimizer step's numbers, its samples (of all ranks) and its learning rate.

        values: this rank's part of the sums over the ranks, one for each of the names. batch: digest of the samples.
        """
        self.recent.append(values)
        self.batches.append(batch)
        self.lr = lr
        self.samples += samples
        self.steps += 1
        if self.counting:
            self.flops = self.counting.total
            self.counted_samples = samples
            self.counting = None
        if self.bar:
            self.bar.update()

    def check(self, step: int, max_bad_steps: int) -> None:
        """All ranks, each step: RunError, on all together, once max_bad_steps steps in a row were skipped."""
        if step % min(self.log_every, max_bad_steps) == 0:
            self.collect()
        if self.bad_in_row >= max_bad_steps:
            raise RunError(
                f"{self.bad_in_row} steps in a row had a non-finite loss or gradient and were skipped; lower "
                "the learning rate, or look for bad data after the last checkpoint"
            )

    def collect(self) -> None:
        """All ranks: bring the kept steps to the host, summed over the ranks."""
        if not self.recent:
            return
        new_rows = reduce_sum(torch.stack(self.recent).double().cpu()).tolist()
        self.recent.clear()
        self.rows += new_rows
        for row in new_rows:
            skipped = row[-1]
            self.bad_in_row = self.bad_in_row + 1 if skipped else 0

    def pending(self, step: int) -> dict:
        """All ranks: for the checkpoint of `step`: the interval begun, and how far metrics.jsonl belongs to it."""
        self.collect()
        sha256 = ""
        if self.ranks.is_main:
            with contextlib.suppress(OSError), open(self.run_folder / "metrics.jsonl", "rb") as file:
                sha256 = hashlib.sha256(file.read(self.written)).hexdigest()
        return {
            "rows": self.rows,
            "batches": list(self.batches),
            "bad_in_row": self.bad_in_row,
            "lr": self.lr,
            "bytes": self.written,
            "sha256": sha256,
            "step": step,
            "run_id": self.run_id,
        }

    # --- each interval ------------------------------------------------------------------------------------------------

    def restart_clock(self) -> None:
        """Begin a throughput interval (after an evaluation, say, whose time is not training time)."""
        self.started = time.perf_counter()
        self.waited = 0.0
        self.samples = 0.0
        self.steps = 0

    def write_rest(self, step: int, epoch: int) -> None:
        """All ranks, at the end of training and after its last checkpoint: the steps since the last full interval."""
        self.collect()
        if self.rows:
            self.write_interval(step, epoch)

    def write_interval(self, step: int, epoch: int) -> None:
        """All ranks, every log_every steps: means over the interval's finite values, throughput, data wait, memory."""
        self.collect()
        seconds = max(time.perf_counter() - self.started, 1e-9)
        seconds_left = (self.total_steps - step) * seconds / max(1, self.steps)

        # means over the steps of the interval
        values = {"train/lr": self.lr}
        for place, name in enumerate(self.names):
            finite = [row[place] for row in self.rows if math.isfinite(row[place])]
            values[f"train/{name}"] = sum(finite) / len(finite) if finite else None
        speed, not_saved = self._measure_speed(seconds)
        values |= speed
        each_step = self._each_step()
        self.rows = []
        self.batches = []
        self.write(step, epoch, values, each_step)
        self._show(step, epoch, values, seconds_left)
        self.restart_clock()

        # the last checkpoint's write failed meanwhile: all ranks end the run here
        if not_saved:
            settle_checkpoint()

    def _each_step(self) -> dict[str, list]:
        """Loss, gradient norm and digest of the samples of each step of the interval, for verify.py to compare."""
        each_step: dict[str, list] = {}
        for place, name in enumerate(self.names):
            if name in ("loss", "grad_norm"):
                each_step[name] = [finite_or_none(row[place]) for row in self.rows]
        return each_step | {"batch": self.batches}

    def _measure_speed(self, seconds: float) -> tuple[dict[str, float], bool]:
        """All ranks: (throughput, data wait, memory and FLOP/s of an interval, whether a checkpoint's write failed)."""
        memory = peak_memory_gb(self.ranks.device)
        failed = float(WRITER.error is not None)

        # one row for each rank, in one transfer
        facts = torch.zeros(self.ranks.world_size, 5, dtype=torch.float64)
        own = [self.waited / seconds, memory, self.flops, self.matmul_rate, failed]
        facts[self.ranks.rank] = torch.tensor(own, dtype=torch.float64)
        waits, memories, flops, matmul_rates, errors = reduce_sum(facts).T

        samples_per_s = self.samples / seconds
        values = {
            "train/samples_per_s": samples_per_s,
            "train/data_wait": float(waits.max()),
            "train/peak_memory_gb": float(memories.max()),
        }

        # FLOP/s of one process, and its share of what a matrix product reaches
        if self.counts:
            speed = samples_per_s * float(flops.mean()) / max(1, self.counted_samples)
            values["train/tflops"] = speed / 1e12
            values["train/mfu"] = speed / float(matmul_rates.mean())
        return values, bool(errors.any())

    def _show(self, step: int, epoch: int, values: dict[str, float | None], seconds_left: float) -> None:
        """Rank 0: the interval on the progress bar, or as a line where nobody looks."""
        loss = values["train/loss"]
        parts = [
            "loss non-finite" if loss is None else f"loss {loss:.4f}",
            f"{values['train/samples_per_s']:.1f} samples/s",
            f"data {values['train/data_wait']:.0%}",
        ]
        if self.counts and self.ranks.device.type == "cuda":
            parts.append(f"mfu {values['train/mfu']:.0%}")
        if self.bar:
            self.bar.set_postfix_str(" | ".join(parts))
            return

        # a line says the rest, too
        if self.lr is not None:
            parts.append(f"lr {self.lr:.2e}")
        parts.append(f"{values['train/peak_memory_gb']:.2f} GB")
        parts.append(f"{tqdm.format_interval(seconds_left)} left")
        print_main(f"epoch {epoch} step {step}/{self.total_steps} | {' | '.join(parts)}")

    def speed_facts(self) -> dict[str, str]:
        """For the banner: the rate that train/mfu is a share of."""
        if not self.counts:
            return {"matmul": "train/tflops and train/mfu are left out with --compile"}
        precision = "fp32" if self.precision == "no" else self.precision
        return {"matmul": f"{self.matmul_rate / 1e12:.3g} TFLOP/s in {precision}, measured: the 100% of train/mfu"}

    # --- what is written ----------------------------------------------------------------------------------------------

    def write(
        self, step: int, epoch: int, values: dict[str, float | None], each_step: dict[str, list] | None = None
    ) -> None:
        """Rank 0: one line of metrics.jsonl, and the same names in TensorBoard and W&B.

        each_step: lists that the line holds as `steps`, and metrics.jsonl alone.
        """
        values = {name: finite_or_none(value) for name, value in values.items()}
        self.last |= values
        # an interval may hold steps of an earlier call alone, which were not timed here
        if values.get("train/samples_per_s"):
            self.rates.append(values["train/samples_per_s"])
        if not self.ranks.is_main:
            return

        def write() -> None:
            line = {"step": step, "epoch": epoch, **values}
            if each_step:
                line["steps"] = each_step
            self.jsonl.write(json.dumps(line) + "\n")
            self.jsonl.flush()
            self.written = self.jsonl.tell()
            for name, value in values.items():
                if value is not None:
                    self.writer.add_scalar(name, value, step)
            if self.wandb:
                self.wandb.log({**values, "epoch": epoch}, step=step)

        self._guard(write)

    def figures(self, draw: Callable[[], dict], step: int) -> None:
        """Rank 0: the matplotlib figures that draw() returns by name, as figures/<name>.png and in TensorBoard.

        The other ranks do not call draw. None in place of a figure is left out.
        """
        if not self.ranks.is_main:
            return
        for name, figure in draw().items():
            if figure:
                self._guard(functools.partial(self._write_figure, name, figure, step))

    def _write_figure(self, name: str, figure, step: int) -> None:
        import numpy as np
        from PIL import Image

        path = self.run_folder / "figures" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        note_written(self.run_folder, f"figures/{name}.png")
        path.write_bytes(figure_png(figure))
        pixels = np.asarray(Image.open(path).convert("RGB"))
        self.writer.add_image(name, pixels, step, dataformats="HWC")

    def finish(self, values: dict) -> None:
        """All ranks, at the end: wait for the last checkpoint; rank 0 writes summary.json and the curves.

        summary.json is one flat object: the last value of every metric, and `values`.
        """
        settle_checkpoint()
        if not self.ranks.is_main:
            return
        summary = {name: finite_or_none(value) for name, value in {**self.last, **values}.items()}
        text = json.dumps(summary, indent=2) + "\n"
        self._guard(lambda: (self.run_folder / "summary.json").write_text(text, encoding="utf-8"))

        def draw() -> dict:
            return {"curves": plot_curves(self.run_folder / "metrics.jsonl", self.curves)}

        self._guard(lambda: self.figures(draw, values["steps"]))

    def close(self) -> None:
        """However the run ends, the checkpoint that was begun is completed."""
        try:
            WRITER.wait()
        except Exception as error:
            # whatever ends the run must not be hidden by it
            print(f"warning: {error}", file=sys.stderr, flush=True)
        for resource in (self.bar, self.writer, self.jsonl):
            if resource:
                self._guard(resource.close)
        if self.wandb:
            self.wandb.finish()

    def _guard(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self.warned:
                reason = error.strerror or error
                print(f"warning: {self.run_folder}: log not written ({reason})", file=sys.stderr, flush=True)
            self.warned = True


def finite_or_none(value):
    """The value, or None for a number that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_table(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Rank 0: print format_table."""
    print(format_table(title, rows), flush=True)


def format_table(title: str, rows: dict[str, dict[str, float]]) -> str:
    """{row name: {column: value}} as an aligned table; `title: none` where there are no rows."""
    if not rows:
        return f"{title}: none"
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    names = [title, *rows]
    width = max(len(name) for name in names)
    table = [columns]
    for row in rows.values():
        table.append([format_cell(row.get(column, "-")) for column in columns])
    widths = [max(12, *map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for name, cells in zip(names, table, strict=True):
        aligned = [f"  {cell:>{wide}}" for cell, wide in zip(cells, widths, strict=True)]
        lines.append(f"{name:<{width}}" + "".join(aligned))
    return "\n".join(lines)


def format_cell(value) -> str:
    """A cell of a table: four decimals, or as it is."""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def write_result(path: Path, content: bytes) -> bool:
    """Rank 0: put a result in place, whether that worked; a full disk is said, and ends nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(content))
    except OSError as error:
        print(f"warning: {path}: not written ({error.strerror or error})", file=sys.stderr, flush=True)
        return False
    return True


def save_figure(path: Path, figure) -> bool:
    """Rank 0: a matplotlib figure as a PNG, as write_result."""
    return write_result(path, figure_png(figure))
