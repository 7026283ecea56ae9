"""What a run says: banner, progress bar, metrics.jsonl, TensorBoard, W&B, throughput and memory, the table at the end.

Every function may be called on all ranks; only rank 0 writes. A full disk never stops a run from here: the log says so
once, and the next checkpoint, which needs the space too, ends the run in order.
"""

import contextlib
import functools
import hashlib
import io
import json
import math
import sys
import textwrap
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from async_save_utils import WRITER
from checkpoint_utils import Checkpoint, begin_run, cut_metrics, settle_checkpoint
from cli_utils import InputError, RunError, save_args
from distributed_utils import Ranks, agree_on_errors, print_main, reduce_sum
from flops_utils import FlopCount, matmul_rate
from hardware_utils import peak_memory_gb
from manifest_utils import note_written, write_atomically


def print_banner(title: str, facts: dict) -> None:
    """Rank 0: one aligned `name  value` line for each derived number of the run."""
    width = max(map(len, facts))
    print_main(
        "\n".join([f"== {title} ".ljust(100, "="), *(f"  {name:<{width}}  {value}" for name, value in facts.items())])
    )


class RunLog:
    """The log of one run.

    Per optimizer step, `step()` takes the step's numbers as a tensor on the device and does nothing else; every
    log_every steps they are summed over the ranks in one transfer and written. `pending()` and `contents` keep an
    interval that a checkpoint cuts in two exact.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        names: list[str],
        args: Namespace,
        total_steps: int,
        contents: Checkpoint | None = None,
        precision: str | None = None,
    ):
        """Also makes the folder this run's (see begin_run) and writes args.yaml, once nothing more can be wrong.

        names: what step() tensors hold, in order, `loss` first, `skipped` last. args: log_every, mixed_precision,
        compile and wandb flags are read from it. contents: the checkpoint to go on from, with what pending() gave."""
        self.folder, self.ranks, self.names = folder, ranks, names
        self.log_every, self.total_steps = args.log_every, total_steps
        self.recent: list[torch.Tensor] = []
        resume = contents["log"] if contents else None
        self.rows: list[list[float]] = [list(row) for row in resume["rows"]] if resume else []
        self.bad_in_row = resume["bad_in_row"] if resume else 0
        self.lr: float | None = resume.get("lr") if resume else None
        self.run_id = ""
        self.restart_clock()
        self.warned, self.written = False, 0  # written: bytes of metrics.jsonl that are on the disk
        self.drawn = -math.inf  # when figures that have a least distance in time were drawn last
        self.context: dict[str, int] = {}  # more for each line beside step and epoch, such as the stage
        self.curves: list[str] | None = None  # which metrics finish() draws beside the loss; None: all of val/
        self.last: dict[str, float] = {}
        # a compiled step cannot be counted: torch would run it uncompiled, with other rounding
        self.counts, self.precision = not args.compile, precision or args.mixed_precision
        self.matmul_rate = matmul_rate(ranks.device, self.precision) if self.counts else 0.0
        self.flops, self.counting = 0, None
        self.forget_flops()
        self.writer = self.wandb = self.jsonl = self.bar = None
        with agree_on_errors():
            if ranks.is_main:
                try:
                    self._open(args, contents)
                except OSError as error:
                    raise InputError(f"{folder}: log not opened ({error.strerror or error}); make room") from None

    def _open(self, args: Namespace, contents: Checkpoint | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if args.wandb:  # first: nothing is deleted or written before the last thing that can be wrong
            import wandb

            try:
                self.wandb = wandb.init(
                    project=args.wandb_project, group=self.folder.name, dir=self.folder, config=vars(args)
                )
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise InputError(f"--wandb: {reason}; log in with `wandb login` or set WANDB_MODE=offline") from None
        # forget what was logged after the checkpoint; without one, all
        self.run_id, size = begin_run(self.folder, contents)
        save_args(self.folder / "args.yaml", args)
        path = self.folder / "metrics.jsonl"
        cut_metrics(path, size)
        self.jsonl = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run
        self.written = self.jsonl.tell()
        self.writer = SummaryWriter(str(self.folder / "logs"), purge_step=contents["step"] + 1 if contents else None)
        for events in (self.folder / "logs").glob("events.out.tfevents.*"):
            note_written(self.folder, f"logs/{events.name}")
        if sys.stderr.isatty():
            first = contents["step"] if contents else 0
            self.bar = tqdm(total=self.total_steps, initial=first, unit="step", dynamic_ncols=True)

    def next_batches(self, iterator, count: int) -> list:
        """Up to `count` batches from a data loader; the time spent here is the wait for data."""
        begun = time.perf_counter()
        batches = []
        for _ in range(count):
            try:
                batches.append(next(iterator))
            except StopIteration:
                break
        self.waited += time.perf_counter() - begun
        return batches

    def speed_facts(self) -> dict[str, str]:
        """For the banner: the rate that train/mfu is a share of."""
        if not self.counts:
            return {"matmul": "train/tflops and train/mfu are left out with --compile"}
        precision = "fp32" if self.precision == "no" else self.precision
        return {"matmul": f"{self.matmul_rate / 1e12:.3g} TFLOP/s in {precision}, measured: the 100% of train/mfu"}

    def count_flops(self, samples: int) -> contextlib.AbstractContextManager:
        """Around each forward and backward pass of a step of so many samples (of all ranks): counts their FLOPs.

        The first step is counted, and a later one if it has more samples, as the last step of an epoch may come first
        after a resume. Otherwise nothing happens here.
        """
        if not self.counts or samples <= self.counted_samples:
            return contextlib.nullcontext()
        self.counting = self.counting or FlopCount()
        return self.counting

    def forget_flops(self) -> None:
        """The next step is counted again, as it will differ from those before: another stage, other trained layers."""
        self.counted_samples = 0

    def step(self, values: torch.Tensor, samples: int, lr: float) -> None:
        """Keep one optimizer step's numbers (this rank's part of their sums over ranks), its global number of samples
        and its learning rate."""
        self.recent.append(values)
        self.lr = lr
        self.samples += samples
        self.steps += 1
        if self.counting:
            self.flops, self.counted_samples = self.counting.total, samples
            self.counting = None
        if self.bar:
            self.bar.update()

    def collect(self) -> None:
        """All ranks: bring the kept steps to the host, summed over the ranks."""
        if self.recent:
            new = reduce_sum(torch.stack(self.recent).double().cpu()).tolist()
            self.recent.clear()
            self.rows += new
            for row in new:
                self.bad_in_row = self.bad_in_row + 1 if row[-1] else 0

    def check(self, step: int, max_bad_steps: int) -> None:
        """All ranks, each step: RunError, on all together, once max_bad_steps steps in a row were skipped."""
        if step % min(self.log_every, max_bad_steps) == 0:
            self.collect()
        if self.bad_in_row >= max_bad_steps:
            raise RunError(
                f"{self.bad_in_row} steps in a row had a non-finite loss or gradient and were skipped; lower "
                "the learning rate, or look for bad data after the last checkpoint"
            )

    def pending(self, step: int) -> dict:
        """All ranks: for the checkpoint of `step`: the interval begun, and how far metrics.jsonl belongs to it."""
        self.collect()
        interval = {"rows": self.rows, "bad_in_row": self.bad_in_row, "lr": self.lr}
        sha256 = ""
        if self.ranks.is_main:
            with contextlib.suppress(OSError), open(self.folder / "metrics.jsonl", "rb") as file:
                sha256 = hashlib.sha256(file.read(self.written)).hexdigest()
        return interval | {"bytes": self.written, "sha256": sha256, "step": step, "run_id": self.run_id}

    def write_rest(self, step: int, epoch: int) -> None:
        """All ranks, at the end of training and after its last checkpoint: the steps since the last full interval."""
        self.collect()
        if self.rows:
            self.write_interval(step, epoch)

    def write_interval(self, step: int, epoch: int) -> None:
        """All ranks, every log_every steps: means over the interval's finite values, throughput, data wait, memory."""
        self.collect()
        seconds = max(time.perf_counter() - self.started, 1e-9)

        # one row for each rank, in one transfer
        facts = torch.zeros(self.ranks.world_size, 5, dtype=torch.float64)
        memory, failed = peak_memory_gb(self.ranks.device), float(WRITER.error is not None)
        own = [self.waited / seconds, memory, self.flops, self.matmul_rate, failed]
        facts[self.ranks.rank] = torch.tensor(own, dtype=torch.float64)
        waits, memories, flops, matmul_rates, errors = reduce_sum(facts).T
        wait, memory, not_saved = float(waits.max()), float(memories.max()), bool(errors.any())
        values = {"train/lr": self.lr}
        for i, name in enumerate(self.names):
            column = [row[i] for row in self.rows if math.isfinite(row[i])]
            values[f"train/{name}"] = sum(column) / len(column) if column else None
        rate, loss = self.samples / seconds, values["train/loss"]
        values |= {"train/samples_per_s": rate, "train/data_wait": wait, "train/peak_memory_gb": memory}

        # FLOP/s of one process, and its share of what a matrix product reaches
        if self.counts:
            speed = rate * float(flops.mean()) / max(1, self.counted_samples)
            values |= {"train/tflops": speed / 1e12, "train/mfu": speed / float(matmul_rates.mean())}
        text = f"loss {'non-finite' if loss is None else f'{loss:.4f}'} | {rate:.1f} samples/s | data {wait:.0%}"
        if self.counts and self.ranks.device.type == "cuda":
            text += f" | mfu {values['train/mfu']:.0%}"
        left = (self.total_steps - step) * seconds / max(1, self.steps)
        self.rows = []
        self.write(step, epoch, values)
        if self.bar:
            self.bar.set_postfix_str(text)
        else:
            context = "".join(f"{name} {value} " for name, value in self.context.items())
            where = f"{context}epoch {epoch} step {step}/{self.total_steps}"
            lr = "" if self.lr is None else f" | lr {self.lr:.2e}"
            print_main(f"{where} | {text}{lr} | {memory:.2f} GB | {tqdm.format_interval(left)} left")
        self.restart_clock()
        if not_saved:
            # the last checkpoint's write failed meanwhile: all ranks end the run here
            settle_checkpoint()

    def restart_clock(self) -> None:
        """Begin a throughput interval (after an evaluation, say, whose time is not training time)."""
        self.started, self.waited, self.samples = time.perf_counter(), 0.0, 0.0
        self.steps = 0

    def write(self, step: int, epoch: int, values: dict[str, float | None]) -> None:
        """Rank 0: one line of metrics.jsonl, and the same names in TensorBoard and W&B."""
        values = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
        self.last |= values
        if not self.ranks.is_main:
            return

        def write():
            self.jsonl.write(json.dumps({"step": step, "epoch": epoch, **self.context, **values}) + "\n")
            self.jsonl.flush()
            self.written = self.jsonl.tell()
            for name, value in values.items():
                if value is not None:
                    self.writer.add_scalar(name, value, step)
            if self.wandb:
                self.wandb.log({**values, **self.context, "epoch": epoch}, step=step)

        self._guard(write)

    def figures(self, draw: Callable[[], dict], step: int, seconds_apart: float = 0) -> None:
        """Rank 0: the matplotlib figures that draw() returns by name, as figures/<name>.png and in TensorBoard.

        The other ranks do not call draw. None in place of a figure is left out. seconds_apart: nothing is drawn sooner
        than this after the last call that gave it, so that short epochs are not spent on drawing.
        """
        if not self.ranks.is_main or (seconds_apart and time.time() - self.drawn < seconds_apart):
            return
        if seconds_apart:
            self.drawn = time.time()

        def write(name: str, figure) -> None:
            import numpy as np
            from PIL import Image

            path = self.folder / "figures" / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            note_written(self.folder, f"figures/{name}.png")
            path.write_bytes(figure_png(figure))
            self.writer.add_image(name, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")

        for name, figure in draw().items():
            if figure:
                self._guard(functools.partial(write, name, figure))

    def finish(self, values: dict) -> None:
        """Rank 0, at the end: summary.json (one flat object: the last value of every metric, and `values`) and the
        curves. All ranks call it: it waits for the last checkpoint."""
        settle_checkpoint()
        if self.ranks.is_main:
            whole = {**self.last, **values}
            whole = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in whole.items()}
            text = json.dumps(whole, indent=2) + "\n"
            self._guard(lambda: (self.folder / "summary.json").write_text(text, encoding="utf-8"))

            def draw() -> dict:
                return {"curves": plot_curves(self.folder / "metrics.jsonl", self.curves)}

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

    def _guard(self, write) -> None:
        try:
            write()
        except OSError as error:
            if not self.warned:
                print(
                    f"warning: {self.folder}: log not written ({error.strerror or error})", file=sys.stderr, flush=True
                )
            self.warned = True


@functools.cache
def drawable_characters() -> frozenset[int]:
    """Code points that matplotlib's default font has."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    return frozenset(font.get_charmap())


def figure_text(text: str, most: int = 32) -> str:
    """A user's text as a figure can show it, on one line of at most so many characters.

    What the font lacks becomes a question mark, and a dollar sign begins no formula.
    """
    text = " ".join(str(text).split())
    text = text if len(text) <= most else text[: most - 3] + "..."
    text = "".join(letter if ord(letter) in drawable_characters() else "?" for letter in text)
    return text.replace("$", r"\$")


def print_table(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Rank 0: {row name: {column: value}} as an aligned table; `title: none` where there are no rows."""
    if not rows:
        print(f"{title}: none", flush=True)
        return
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    width = max(len(title), *(len(name) for name in rows))
    lines = [f"{title:<{width}}" + "".join(f"  {column:>12}" for column in columns)]
    for name, row in rows.items():
        cells = ((f"{row[c]:.4f}" if isinstance(row[c], float) else str(row[c])) if c in row else "-" for c in columns)
        lines.append(f"{name:<{width}}" + "".join(f"  {cell:>12}" for cell in cells))
    print("\n".join(lines), flush=True)


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


def figure_png(figure) -> bytes:
    """A matplotlib figure as a PNG; a character that the font lacks is a box in it, and no warning."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def wrap(text: str, width: int) -> str:
    """The text in lines of at most `width` characters, for a figure."""
    return textwrap.fill(text, width)


def plot_curves(metrics: Path, chosen: list[str] | None = None):
    """A matplotlib figure of a metrics.jsonl: losses, learning rate, and the validation metrics (or those chosen).

    A panel that would be empty is left out; losses have a logarithmic axis when all are positive.
    """
    from matplotlib.figure import Figure

    records = []
    for line in metrics.read_text().splitlines():
        # a line that a full disk cut short is no point of a curve
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    names = chosen or [
        n for n in dict.fromkeys(n for r in records for n in r) if n.startswith("val/") and n.count("/") == 1
    ]
    losses = ["train/loss", *(name for name in names if "loss" in name)]
    others = [name for name in names if "loss" not in name]
    # all panels: title, names, and place in a grid of 4 x 2
    panels = [("loss", losses, (slice(0, 3), 0)), ("learning rate", ["train/lr"], (3, 0))]
    panels += [("validation", others, (slice(0, 4), 1))]

    def points(name: str) -> list[tuple]:
        return [(r["step"], r[name]) for r in records if r.get(name) is not None]

    drawn = [(title, {n: points(n) for n in names if points(n)}, place) for title, names, place in panels]
    drawn = [panel for panel in drawn if panel[1]]
    wide = any(place[1] == 1 for _, _, place in drawn)
    figure = Figure(figsize=(11 if wide else 6, 5))
    left = 0.06 if wide else 0.11
    grid = figure.add_gridspec(
        4, 2 if wide else 1, left=left, right=0.98, bottom=0.1, top=0.94, hspace=1.4, wspace=0.15
    )
    for title, curves, place in drawn:
        axes = figure.add_subplot(grid[place])
        for name, values in curves.items():
            axes.plot(*zip(*values, strict=True), label=name, marker="." if len(values) < 40 else None)
        if title == "loss" and all(value > 0 for values in curves.values() for _, value in values):
            use_log_axis(axes)
            title = "loss, on a logarithmic axis"
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3, which="both")
        axes.set_xlabel("optimizer step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        if title == "learning rate":
            axes.set_ylim(bottom=0, top=1.1 * axes.dataLim.y1 or 1)
        else:
            axes.legend(fontsize="small")
    return figure


def use_log_axis(axes) -> None:
    """A logarithmic y axis whose ticks are plain numbers, also where it spans less than a power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
