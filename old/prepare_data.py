"""Make a data set of your own images for a training script: pairs, splits, questions and the folders that it reads.

    python -m old.prepare_data prs_med scans masks my_data --structure liver
    python -m old.prepare_data prs_med scans label_maps my_data --labels "1=liver,2=spleen" \
        --patient_pattern "^(P[0-9]+)"
    python -m old.prepare_data prs_med scans masks my_data --structure tumour \
        --table patients.csv --patient_column patient
    python -m old.prepare_data prs_med Task03_Liver/imagesTr Task03_Liver/labelsTr my_data --slice_spacing 10
    python -m old.prepare_data mimic_cxr xrays.csv        # looks at a table that train_mimic_cxr.py --table reads

Made-up data are written by sample_data.py. What is understood is said in tasks/<task>/README.md, "Your own images".
"""

import argparse
from importlib import import_module
from types import ModuleType

from old.cli_utils import Parser, parse_task, run_main

TASKS = {
    "prs_med": "images with masks, for train_prs_med.py",
    "mimic_cxr": "a table of X-rays with questions, for train_mimic_cxr.py",
}


def task_module(task: str) -> ModuleType:
    """Import tasks/<task>/prepare.py, which has the flags and the work of one task."""
    return import_module(f"tasks.{task}.prepare")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    return parse_task(Parser(__doc__), TASKS, task_module, argv)


def main(args: argparse.Namespace) -> None:
    flags = vars(args)
    task = flags.pop("task")
    task_module(task).prepare(**flags)


if __name__ == "__main__":
    run_main(main, parse_args())
