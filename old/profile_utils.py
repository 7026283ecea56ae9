"""--profile A:B: what the operations of a few optimizer steps take, and what they wait for, by torch's profiler.

In the run folder's `profile/`: a Chrome trace of each rank, and the table that rank 0 prints.
"""

import contextlib
import os
import sys
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from old.distributed_utils import gather_objects, print_main, world
from old.logging_utils import format_table
from old.manifest_utils import note_written

# What StepProfile.span() is asked for, in the order of a step.
WAITS = ("data wait", "wait for the other ranks", "save")
# Operations in the table.
ROWS = 15


class StepProfile:
    """A profile of the optimizer steps of --profile, which an evaluation, or the end of an epoch, cuts in two.

    steps: `A:B`, None for no profile. A run that is resumed between them has a profile of the rest.
    """

    def __init__(self, steps: str | None = None):
        first, last = steps.split(":") if steps else (0, 0)
        self.first = int(first)
        self.last = int(last)
        self.profiler: profile | None = None
        self.mark: record_function | None = None
        # steps of the profile under way
        self.steps: list[int] = []

    def __enter__(self) -> "StepProfile":
        return self

    def __exit__(self, *error) -> None:
        """A run that fails leaves no profile: the ranks may not be together any more."""
        self._stop()

    def warn_if_unused(self, step: int, last_step: int) -> None:
        """Rank 0, before training: say so where a run from this step to that one has nothing to profile."""
        if self.last and not (step < self.last and self.first <= last_step):
            steps = f"steps {self.first} to {self.last}"
            print_main(f"warning: --profile: the run makes steps {step + 1} to {last_step}, none of {steps}")

    def begin_step(self, step: int) -> None:
        """Before anything of a step is done."""
        if not self.first <= step <= self.last:
            return
        if self.profiler is None:
            self._start()
        self.steps.append(step)
        # tools that read traces know steps by this name
        self.mark = record_function(f"ProfilerStep#{step}")
        self.mark.__enter__()

    def span(self, name: str) -> contextlib.AbstractContextManager:
        """Around one of the WAITS, to find it again in the trace."""
        return record_function(name) if self.profiler else contextlib.nullcontext()

    def end_step(self, step: int, run_folder: Path) -> None:
        """All ranks, once all of a step is done: after the last one, write the profile."""
        if self.mark is not None:
            self.mark.__exit__(None, None, None)
            self.mark = None
        if step == self.last:
            self.end(run_folder)

    def end(self, run_folder: Path) -> None:
        """All ranks: write the profile of the steps so far, if one is under way."""
        profiler = self.profiler
        if profiler is None:
            return

        # a step that a stop signal ended is no step
        steps = self.steps[:-1] if self.mark else self.steps
        self._stop()
        if steps:
            write_profile(profiler, steps, run_folder)

    def _start(self) -> None:
        # else each process says that it profiles
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(activities=activities)
        self.profiler.start()

    def _stop(self) -> None:
        if self.mark is not None:
            self.mark.__exit__(None, None, None)
        if self.profiler is not None:
            self.profiler.stop()
        self.profiler = None
        self.mark = None
        self.steps = []


# --- what is written --------------------------------------------------------------------------------------------------


def write_profile(profiler: profile, steps: list[int], run_folder: Path) -> None:
    """All ranks: each its trace; rank 0 prints and writes the table. A full disk is said, and ends nothing."""
    name = f"steps_{steps[0]}-{steps[-1]}"
    rank, world_size = world()
    waits = gather_objects(measure_waits(profiler, len(steps)))
    table = ""
    if rank == 0:
        table = f"{waits_table(waits)}\n\n{operations_table(profiler, len(steps))}\n"
        print_main(f"profile of steps {steps[0]} to {steps[-1]}: {run_folder}/profile\n{table}")

    folder = run_folder / "profile"
    try:
        folder.mkdir(exist_ok=True)
        if rank == 0:
            # the run's own files, which --overwrite deletes
            traces = [f"{name}_rank{other}.json" for other in range(world_size)]
            for file in (f"{name}.txt", *traces):
                note_written(run_folder, f"profile/{file}")
            (folder / f"{name}.txt").write_text(table, encoding="utf-8")
        profiler.export_chrome_trace(str(folder / f"{name}_rank{rank}.json"))
    except (OSError, RuntimeError) as error:
        print(f"warning: {folder}: profile not written ({error})", file=sys.stderr, flush=True)


def measure_waits(profiler: profile, steps: int) -> dict[str, float]:
    """{name: milliseconds a step} of this rank: the step itself, each of the WAITS, and the collectives.

    collectives: the time in which one at least was under way, whether or not something was computed meanwhile.
    """
    totals = dict.fromkeys(("step", *WAITS), 0.0)
    collectives = []
    for event in profiler.events():
        on_cpu = event.device_type == DeviceType.CPU
        name = "step" if event.name.startswith("ProfilerStep") else event.name
        if on_cpu and name in totals:
            totals[name] += event.time_range.elapsed_us()

        # gloo's are on the host's clock; of NCCL's the kernels count, not the calls that start them
        elif event.name.startswith("gloo:" if on_cpu else "nccl"):
            collectives.append((event.time_range.start, event.time_range.end))
    totals["collectives"] = covered(collectives)
    return {name: microseconds / 1e3 / steps for name, microseconds in totals.items()}


def covered(intervals: list[tuple[float, float]]) -> float:
    """How much time lies in at least one of the intervals."""
    total = 0.0
    reached = -float("inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def waits_table(waits: list[dict[str, float]]) -> str:
    """What measure_waits found on each rank, as a table over the ranks."""
    step = sum(rank_waits["step"] for rank_waits in waits) / len(waits)
    rows = {}
    for name in waits[0]:
        values = [rank_waits[name] for rank_waits in waits]
        mean = sum(values) / len(values)
        most = max(values)
        rows[name] = {
            "ms a step": f"{mean:.2f}",
            "share": f"{mean / step:.1%}",
            "least": f"{min(values):.2f}",
            "most": f"{most:.2f}",
            "rank": values.index(most),
        }
    return format_table("waits, mean over ranks", rows)


def operations_table(profiler: profile, steps: int) -> str:
    """The operations that take most of rank 0's GPU, or of its CPU where there is none; each without those in it."""
    averages = [average for average in profiler.key_averages() if not average.is_user_annotation]
    operations = [average for average in averages if average.device_type == DeviceType.CPU]
    on_gpu = any(average.self_device_time_total for average in operations)
    times = {}
    for average in operations:
        times[average] = average.self_device_time_total if on_gpu else average.self_cpu_time_total
    total = sum(times.values()) or 1.0

    rows = {}
    for average in sorted(times, key=times.get, reverse=True)[:ROWS]:
        rows[average.key[:60]] = {
            "calls a step": f"{average.count / steps:.1f}",
            "ms a step": f"{times[average] / 1e3 / steps:.2f}",
            "share": f"{times[average] / total:.1%}",
        }
    return format_table(f"operations, {'GPU' if on_gpu else 'CPU'} time of rank 0", rows)
