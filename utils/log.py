"""Run log: banner, progress lines, metrics.jsonl, TensorBoard, Weights & Biases and training curves.

All ranks use this module, but only rank 0 writes.
"""

import contextlib
import json
import math
import os
import sys
import textwrap
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from distributed_utils import Ranks, combine, print_main, round_for_exact_sum
from hardware_utils import peak_memory_gb
from utils.cli import InputError, RunError

NOT_PLOTTED = ("_low", "_high", "_random", "_optimal")
# flags that may change on resume without a warning
MAY_CHANGE = """
    resume_from overwrite max_steps output_dir world_size num_workers dist_timeout gpu_shares auto_batch profile wandb
    log_every save_every keep_last batch_size gradient_accumulation_steps effective_batch_size script
"""


def duration(seconds: float) -> str:
    for limit, unit, length in ((100, "s", 1), (6000, "min", 60), (172_800, "h", 3600), (math.inf, "days", 86_400)):
        if seconds < limit:
            return f"{seconds / length:.{int(length > 60)}f} {unit}"


def print_banner(title: str, rows: dict) -> None:
    width = max(map(len, rows))
    lines = [f"== {title} ".ljust(100, "=")]
    for name, value in rows.items():
        wrap = textwrap.TextWrapper(
            100, f"  {name:<{width}}  ", " " * (width + 4), break_long_words=False, break_on_hyphens=False
        )
        lines += wrap.wrap(str(value)) or [f"  {name}"]
    print_main("\n".join(lines))


class RunLog:
    """Writes a run's log.

    The values of several steps are copied from the GPU together, to avoid a sync in every step.
    """

    def __init__(self, folder: Path, ranks: Ranks, losses: list[str], args: Namespace, saved: dict | None, step: int):
        """losses: names of the losses passed to step(), in order. saved: result of state() at step `step`, or None for
        a new run.
        """
        self.folder = folder
        self.ranks = ranks
        self.names = [*losses, "grad_norm", "skipped"]
        self.log_every = args.log_every
        self.max_bad_steps = args.max_bad_steps
        saved = saved or {"rows": [], "bad_in_row": 0, "lr": None, "bytes": 0, "last": {}}

        # steps not logged yet: this rank's values on the device (recent), and sums over the ranks on the host (rows)
        self.recent: list[list[torch.Tensor]] = []
        self.rows: list[list[float]] = saved["rows"]
        # maxima over the ranks: fraction of time spent waiting for data, and peak memory in GB
        self.worst = [0.0, 0.0]
        self.bad_in_row: int = saved["bad_in_row"]
        self.lr: float | None = saved["lr"]
        # latest value of each metric, and size of metrics.jsonl
        self.last: dict[str, float] = saved["last"]
        self.bytes: int = saved["bytes"]
        self.wandb = None
        self.steps_timed, self.warned = 0, False
        self.restart_clock()
        if ranks.is_main:
            self._open(args, step)

    def _open(self, args: Namespace, step: int) -> None:
        import yaml
        from torch.utils.tensorboard import SummaryWriter

        values = {name: value for name, value in vars(args).items() if name not in ("config", "local_rank")}
        values |= {"script": Path(sys.argv[0]).name, "world_size": self.ranks.world_size}
        path, text = self.folder / "args.yaml", yaml.safe_dump(values)
        before = None
        # a killed run may leave a truncated file
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            before = yaml.safe_load(path.read_text(encoding="utf-8"))
        if step and isinstance(before, dict):
            now = yaml.safe_load(text)
            names = sorted(before.keys() & now.keys() - set(MAY_CHANGE.split()))
            changed = [f"{name} {before[name]} -> {now[name]}" for name in names if before[name] != now[name]]
            if changed:
                print_main(f"warning: other flags than at the run's last start: {', '.join(changed)}")
        path.write_text(text, encoding="utf-8")

        # drop lines logged after the checkpoint
        path, expected = self.folder / "metrics.jsonl", self.bytes
        self.jsonl = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open for the whole run
        # an incomplete copy of the file may end in the middle of a line
        self.bytes = path.read_bytes().rfind(b"\n", 0, expected) + 1
        if self.bytes < expected:
            print_main(f"warning: {path}: cut short; {expected - self.bytes} bytes of it are lost")
        self.jsonl.truncate(self.bytes)
        self.writer = SummaryWriter(str(self.folder / "logs"), purge_step=step + 1 if step else None)
        if args.wandb:
            import wandb

            try:
                self.wandb = wandb.init(project=args.wandb, group=self.folder.name, dir=self.folder, config=values)
            except wandb.Error as error:
                raise InputError(f"--wandb: {error} (or set WANDB_API_KEY, or WANDB_MODE=offline)") from None

    def state(self) -> dict:
        """All ranks: return the state of the log for a checkpoint."""
        self.collect()
        interval = {"rows": self.rows, "bad_in_row": self.bad_in_row, "lr": self.lr}
        return interval | {"bytes": self.bytes, "last": dict(self.last)}

    def sync(self) -> None:
        """Rank 0: flush metrics.jsonl to disk before a checkpoint that records the file's size."""
        # this runs in the checkpoint thread, and the main thread may already have closed self.jsonl
        with open(self.folder / "metrics.jsonl", "ab") as file:
            os.fsync(file.fileno())

    def restart_clock(self) -> None:
        """Restart the throughput measurement, for example to exclude an evaluation."""
        self.started = time.perf_counter()
        if not self.steps_timed:
            self.opened = self.started
        self.waited = 0.0
        self.samples = self.steps = 0

    def step(self, values: list[torch.Tensor], step: int, samples: int, lr: float) -> None:
        """Record the values of one optimizer step. Raises RunError on all ranks after too many skipped steps in a row.

        values: scalar tensors with the losses of each micro-batch on this rank, then the gradient norm over all ranks.
        Losses are summed over micro-batches and ranks. A non-finite norm means that the step was skipped.
        """
        self.recent.append(values)
        self.samples += samples
        self.steps += 1
        self.lr = lr
        if step % min(self.log_every, self.max_bad_steps) == 0:
            self.collect()

    def collect(self) -> None:
        if not self.recent:
            return
        values, rows = torch.stack([value for step in self.recent for value in step]).double().cpu(), []
        for step in values.split([len(step) for step in self.recent]):
            losses, norm = round_for_exact_sum(step[:-1].view(-1, len(self.names) - 2)).sum(0), float(step[-1])
            # the norm is the same on all ranks, so only rank 0 adds it
            rows.append([*losses.tolist(), *((norm, not math.isfinite(norm)) if self.ranks.is_main else (0, 0))])
        rows = np.array(rows, float)
        own = [self.waited / (time.perf_counter() - self.started), peak_memory_gb(self.ranks.device)]
        rows, self.worst = combine((rows, own), lambda a, b: (a[0] + b[0], list(map(max, a[1], b[1]))))
        self.recent.clear()
        self.rows += rows.tolist()
        for row in rows.tolist():
            self.bad_in_row = self.bad_in_row + 1 if row[-1] else 0
            if self.bad_in_row >= self.max_bad_steps:
                reason = f"{self.bad_in_row} steps in a row had a non-finite loss or gradient and were skipped"
                raise RunError(f"{reason}; lower the learning rate, or look for bad data after the last checkpoint")

    def write_interval(self, step: int, epoch: int, total_steps: int) -> None:
        """All ranks: log speed, memory and the mean of each value's finite entries since the last log line."""
        self.collect()
        if not self.rows:
            return
        values = {"train/lr": self.lr}
        for column, name in enumerate(self.names):
            finite = [row[column] for row in self.rows if math.isfinite(row[column])]
            values[f"train/{name}"] = sum(finite) / len(finite) if finite else None
        seconds = time.perf_counter() - self.started
        wait, memory = self.worst
        speed = self.samples / seconds
        values |= {"train/samples_per_s": speed, "train/data_wait": wait, "train/peak_memory_gb": memory}
        self.rows = []
        self.write(step, epoch, values)
        loss = values[f"train/{self.names[0]}"]
        shown = "non-finite" if loss is None else f"{loss:.4f}"
        left = duration((total_steps - step) * seconds / max(self.steps, 1))
        speeds = f"{speed:.1f} samples/s | data {wait:.0%} | {memory:.2f} GB"
        print_main(f"epoch {epoch} step {step}/{total_steps} | loss {shown} | {speeds} | {left} left")
        self.restart_clock()

    def warn_if_long(self, steps: int) -> None:
        if self.warned:
            return
        self.steps_timed += 1
        spent = time.perf_counter() - self.opened
        self.warned = self.steps_timed == 10 or spent > 60
        left = spent / self.steps_timed * steps
        if self.warned and left > 86_400:
            trial = "`make demo` shows a task in minutes, --max_steps stops earlier"
            print_main(f"warning: at the speed of its first steps the training takes {duration(left)} more; {trial}")

    def write(self, step: int, epoch: int, values: dict[str, float | None]) -> None:
        values = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
        self.last |= values
        if not self.ranks.is_main:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        try:
            self.jsonl.write(json.dumps({"step": step, "epoch": epoch, **values}) + "\n")
            self.jsonl.flush()
            self.bytes = self.jsonl.tell()
            shown = {
                name: value
                for name, value in values.items()
                if value is not None and name.count("/") == 1 and not name.endswith(NOT_PLOTTED)
            }
            # one event for all values: each add_scalar() takes about 0.1 ms
            scalars = [Summary.Value(tag=name, simple_value=value) for name, value in shown.items()]
            self.writer.file_writer.add_summary(Summary(value=scalars), step)
        except OSError as error:
            # not fatal: if the disk stays full, saving the next checkpoint ends the run
            print(f"warning: {self.folder}: log not written ({error.strerror})", file=sys.stderr, flush=True)
        if self.wandb:
            self.wandb.log({**values, "epoch": epoch}, step=step)

    def close(self) -> None:
        if self.ranks.is_main:
            # write() has already reported a full disk
            with contextlib.suppress(OSError):
                self.writer.close()
            with contextlib.suppress(OSError):
                self.jsonl.close()
        if self.wandb:
            self.wandb.finish()


def save_figure(folder: Path, name: str, figure) -> np.ndarray:
    path = folder / "figures" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def draw_curves(path: Path):
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(12, 5))
    for axes, prefix in zip(figure.subplots(1, 2), ("train/loss", "val/"), strict=True):
        for name in sorted({name for line in lines for name in line if name.startswith(prefix)}):
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=name)
        axes.set_xlabel("optimizer step")
        if axes.lines:
            axes.legend(fontsize="x-small")
    return figure
