"""Prepare your own images for a training script; `python -m tools.prepare_data TASK --help` lists the flags for TASK.

    python -m tools.prepare_data prs_med scans masks data/mine --structure lesion --small_models
    python -m tools.prepare_data prs_med scans masks data/mine --structure liver "left kidney" --table patients.csv
    python -m tools.prepare_data prs_med scans maps data/mine --labels "1=liver,2=cyst" --patient_pattern "^(P[0-9]+)"
    python -m tools.prepare_data prs_med Task03/imagesTr Task03/labelsTr data/mine --labels Task03/dataset.json
    python -m tools.prepare_data mimic_cxr mimic-cxr-jpg mimic-ext-cxr-qba data/mimic
    python -m tools.prepare_data mimic_cxr xrays.csv data/mine

The section "Your own images" in tasks/<task>/README.md describes the input formats.
"""

import argparse
import importlib
import os
import sys
from types import ModuleType

from utils.cli import Parser, run_main

TASKS = ("prs_med", "mimic_cxr")


def parse_args(words: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    first = argparse.ArgumentParser(prog="python -m tools.prepare_data", description=__doc__.partition("\n")[0])
    first.add_argument("task", choices=TASKS)
    task = first.parse_args(words[:1]).task
    module = importlib.import_module(f"tasks.{task}.prepare")
    parser = Parser(__doc__)
    parser.prog = f"python -m tools.prepare_data {task}"
    module.add_arguments(parser)
    return module, parser.parse(words[1:])


if __name__ == "__main__":
    # keep DeepSpeed, which transformers may import, from printing a message about its search for a GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    MODULE, ARGS = parse_args(sys.argv[1:])
    run_main(MODULE.prepare, ARGS)
