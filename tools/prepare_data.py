"""Turn your own images into a data set for a training script: pairs, splits, questions, and the folders that it reads.

    python -m tools.prepare_data prs_med scans masks data/mine --structure lesion --small_models
    python -m tools.prepare_data prs_med scans masks data/mine --structure liver "left kidney" --table patients.csv
    python -m tools.prepare_data prs_med scans maps data/mine --labels "1=liver,2=cyst" --patient_pattern "^(P[0-9]+)"
    python -m tools.prepare_data prs_med Task03/imagesTr Task03/labelsTr data/mine --labels Task03/dataset.json
    python -m tools.prepare_data mimic_cxr xrays.csv                # looks at a table that train_mimic_cxr.py reads

What is understood is in tasks/<task>/README.md, "Your own images".
"""

import argparse
import os
import runpy
import sys

from utils.cli import Parser, run_main


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    from tasks.prs_med.prepare import add_arguments

    parser = Parser(__doc__)
    parser.add_argument("task", choices=("prs_med", "mimic_cxr"), help="whose data set; the flags below are prs_med's")
    add_arguments(parser)
    return parser.parse(argv)


if __name__ == "__main__":
    # transformers may import deepspeed, which would report that it looks for a GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if sys.argv[1:2] == ["mimic_cxr"]:
        # this task has not moved yet, and has its own flags
        runpy.run_module("old.prepare_data", run_name="__main__")
        sys.exit()
    ARGS = parse_args()

    from tasks.prs_med.prepare import prepare

    run_main(prepare, ARGS)
