"""remove_run.py RUN_FOLDER SCRIPT FLAGS...: runs it, and removes the folder after the first checkpoint."""

import runpy
import shutil
import sys
from pathlib import Path

from old import checkpoint_utils, loop_utils


def main() -> None:
    run_folder = Path(sys.argv[1])
    real_save = loop_utils.save_checkpoint

    def save_checkpoint(*args, **kwargs):
        path = real_save(*args, **kwargs)
        checkpoint_utils.settle_checkpoint()
        if path.name == "step_00000001.pt":
            shutil.rmtree(run_folder)
        return path

    loop_utils.save_checkpoint = save_checkpoint
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
