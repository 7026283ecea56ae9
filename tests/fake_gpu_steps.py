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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fake_cuda_utils  # noqa: E402 - must come before torch

fake_cuda_utils.load_before_torch()

import rehearsal_utils  # noqa: E402


def main() -> None:
    commands = json.load(sys.stdin)
    real_step = rehearsal_utils.rehearse_step
    found: list[dict] = []

    def watched_step(trace, *args, **options):
        step = real_step(trace, *args, **options)
        counts = {name: dict(getattr(trace, name)) for name in ("waits", "casts", "layout_copies", "attention")}
        found.append(counts | step._asdict() | {"launches": trace.launches, "traffic": trace.traffic})
        return step

    rehearsal_utils.rehearse_step = watched_step
    rehearsal_utils.end_rehearsal = lambda: sys.exit(0)
    answers = {}
    for name, (script, *flags) in commands.items():
        found.clear()
        said = io.StringIO()
        sys.argv = [str(ROOT / script), *flags, "--rehearse"]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                code = end.code
            except Exception:
                code = 1
                traceback.print_exc()
        answers[name] = {"code": code, "said": said.getvalue(), "steps": list(found)}
    print(json.dumps(answers), flush=True)
    rehearsal_utils.os._exit(0)


if __name__ == "__main__":
    main()
