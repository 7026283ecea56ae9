"""Reads {name: [script, flags...]} and writes {name: [what each traced step did]}, as JSON; all in one process.

Each script runs its own --rehearse, as from the command line.
"""

import contextlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from old import fake_cuda_utils  # noqa: E402 - must come before torch

fake_cuda_utils.load_before_torch()

from old import rehearsal_utils  # noqa: E402


def run_script() -> tuple[int | None, str]:
    """Run the script of sys.argv; returns its exit code and all that it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
        except Exception:
            code = 1
            traceback.print_exc()
    return code, output.getvalue()


def main() -> None:
    commands = json.load(sys.stdin)
    real_step = rehearsal_utils.rehearse_step
    traced: list[dict] = []

    def watched_step(trace, *args, **options):
        step = real_step(trace, *args, **options)
        counts = {name: dict(getattr(trace, name)) for name in ("waits", "casts", "layout_copies", "attention")}
        traced.append(counts | step._asdict() | {"launches": trace.launches, "traffic": trace.traffic})
        return step

    rehearsal_utils.rehearse_step = watched_step
    rehearsal_utils.end_rehearsal = lambda: sys.exit(0)

    # all scripts, one after the other
    answers = {}
    for name, (script, *flags) in commands.items():
        traced.clear()
        sys.argv = [str(ROOT / script), *flags, "--rehearse"]
        code, said = run_script()
        answers[name] = {"code": code, "said": said, "steps": list(traced)}
    print(json.dumps(answers), flush=True)
    rehearsal_utils.os._exit(0)


if __name__ == "__main__":
    main()
