"""Write a small, learnable data set for a training script, in the exact on-disk format of the real one.

    python -m old.sample_data prs_med data/demo/prs_med            # 1000 training images, two questions each
    python -m old.sample_data prs_med OUT --num_train 40 --image_size 64 --seed 1
    python -m old.sample_data mimic_cxr data/demo/mimic_cxr         # 700 training patients, some 20,000 questions
    python -m old.sample_data mimic_cxr OUT --num_train 12 --num_val 6 --num_test 6 --image_size 96 --zip
    python -m old.sample_data survival data/demo/survival           # 600 patients with a chest CT each
    python -m old.sample_data survival OUT --num_patients 60 --matrix 20 --event_rate 0.123
    python -m old.sample_data cascade data/demo/cascade             # 120 patients with a CT and two X-rays each
    python -m old.sample_data cascade OUT --num_patients 20 --matrix 24
    python -m old.sample_data cascade OUT --layout lidc             # the same as X2CT-GAN's HDF5 files of LIDC
    python -m old.sample_data compressed_ad data/demo/compressed_ad # 81 goals x 100 streams x 1000 steps, 10 seconds
    python -m old.sample_data compressed_ad OUT --source ppo --steps 1040  # by stable-baselines3, as published; hours

What a task's data set looks like is said in tasks/<task>/sample_data.py, which writes it.
"""

import argparse
from importlib import import_module
from types import ModuleType

from old.cli_utils import parse_task, run_main

TASKS = {
    "prs_med": "position-reasoning segmentation (train_prs_med.py)",
    "mimic_cxr": "chest X-ray questions and CheXpert labels (train_mimic_cxr.py)",
    "survival": "survival from 3D CT (train_survival_distributed.py)",
    "cascade": "X-ray to CT (train_accelerate.py)",
    "compressed_ad": "learning histories for in-context RL (train.py)",
}


def task_module(task: str) -> ModuleType:
    """Import tasks/<task>/sample_data.py, which has the flags and the writer of one task."""
    return import_module(f"tasks.{task}.sample_data")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    return parse_task(parser, TASKS, task_module, argv)


def main(args: argparse.Namespace) -> None:
    flags = vars(args)
    task = flags.pop("task")
    task_module(task).write_sample_data(**flags)


if __name__ == "__main__":
    run_main(main, parse_args())
