"""break_data.py ROOT PATTERN SCRIPT FLAGS...: runs it, and cuts the files short after its first checkpoint.

With the pattern `.` the folder itself is removed, as a user might do.
"""

import runpy
import shutil
import sys
from pathlib import Path

from old import checkpoint_utils, loop_utils


def main() -> None:
    root = Path(sys.argv[1])
    pattern = sys.argv[2]
    real_save = checkpoint_utils.save_checkpoint

    def save_checkpoint(*args, **kwargs):
        path = real_save(*args, **kwargs)
        checkpoint_utils.settle_checkpoint()
        if path.name == "step_00000001.pt" and pattern == ".":
            shutil.rmtree(root)
        elif path.name == "step_00000001.pt":
            for file in root.glob(pattern):
                file.write_bytes(file.read_bytes()[:40])
        return path

    # the scripts that are not on loop_utils yet call it by its module
    checkpoint_utils.save_checkpoint = loop_utils.save_checkpoint = save_checkpoint
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
