"""Write a small synthetic data set for trying out a task: `python -m tools.sample_data TASK FOLDER`.

`python -m tools.sample_data TASK --help` lists the flags for the size of the data set.
"""

import argparse
import importlib
import os
import sys

from utils.cli import HelpFormatter, run_main

TASKS = ("prs_med", "mimic_cxr", "survival", "cascade", "compressed_ad")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.sample_data", description=__doc__)
    parser.add_argument("task", choices=TASKS)
    task = parser.parse_args(words[:1]).task
    module = importlib.import_module(f"tasks.{task}.sample_data")
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.sample_data {task}",
        description=module.__doc__.partition("\n")[0],
        formatter_class=HelpFormatter,
    )
    module.add_arguments(parser)
    run_main(lambda args: module.write_sample_data(**vars(args)), parser.parse_args(words[1:]))


if __name__ == "__main__":
    # keep DeepSpeed, which transformers may import, from printing a message about its search for a GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main(sys.argv[1:])
