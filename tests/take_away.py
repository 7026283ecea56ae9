"""take_away.py FOLDER SCRIPT FLAGS...: runs it, and removes the folder after its first checkpoint, as a user might."""

import runpy
import shutil
import sys

import checkpoint_utils


def main() -> None:
    folder, real = sys.argv[1], checkpoint_utils.save_checkpoint

    def save_checkpoint(*args, **kwargs):
        path = real(*args, **kwargs)
        if path.name == "step_00000001.pt":
            shutil.rmtree(folder)
        return path

    checkpoint_utils.save_checkpoint = save_checkpoint
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
