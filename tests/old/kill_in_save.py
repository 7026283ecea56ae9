"""kill_in_save.py STEP SCRIPT FLAGS...: runs it, and kills it in the middle of writing the checkpoint of a step.

That is once a part of the file is on the disk and the training has made another step meanwhile. A training that does
not go on meanwhile is not killed.
"""

import os
import runpy
import signal
import sys
import time

from old import checkpoint_utils, manifest_utils
from old.logging_utils import RunLog


def main() -> None:
    step = int(sys.argv[1])
    reached = 0
    writing = 0
    real_check = RunLog.check
    real_write_checkpoint = checkpoint_utils.write_checkpoint
    real_write = manifest_utils._HashingFile.write

    def note_step(self, step: int, *more) -> None:
        nonlocal reached
        reached = step
        real_check(self, step, *more)

    def note_file(path, checkpoint: dict) -> str:
        nonlocal writing
        writing = checkpoint["step"]
        return real_write_checkpoint(path, checkpoint)

    def write_part(self, data) -> int:
        nonlocal writing
        written = real_write(self, data)
        if writing == step and self.raw.tell() > 20000:
            self.raw.flush()

            # wait for another step of the training
            deadline = time.monotonic() + 5
            while reached <= step and time.monotonic() < deadline:
                time.sleep(0.01)
            if reached > step:
                os.kill(os.getpid(), signal.SIGKILL)
            writing = 0
        return written

    RunLog.check = note_step
    checkpoint_utils.write_checkpoint = note_file
    manifest_utils._HashingFile.write = write_part
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
