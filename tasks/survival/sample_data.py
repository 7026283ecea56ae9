"""Write synthetic cardiac CTs for train_survival_distributed.py: dataset.csv, scans/ and heart masks in masks/.

Calcified lesions are either solid balls or shells with a soft core; both kinds have the same distributions of volume
and HU. Only shells and age raise the hazard, so the number, volume and Agatston score of the lesions predict little.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.random import Generator

from tasks.survival.report import concordance
from utils.cli import InputError, real, whole

# CT field of view in mm; range of the ratio of slice thickness to in-plane voxel size; semi-axes of the heart in mm
FIELD = (160.0, 160.0, 128.0)
THICKNESS = (1.0, 1.2)
HEART = np.array([52.0, 50.0, 46.0])
FOLDS = 5
# in days: earliest event and latest follow-up (both as in a real cohort), and earliest censoring
FIRST_DAY, LAST_DAY, FIRST_CENSORED = 34, 2447, 300
WEIBULL_SHAPE = 1.3
# standard deviation of the log-hazard; fraction of its variance due to age, with the rest due to shells
SPREAD, AGE_SHARE = 2.0, 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", type=Path, help="folder to write to; must not contain a data set yet")
    add("--num_patients", type=whole(20), default=900, help="number of patients, with one CT and one row each")
    add("--event_rate", type=real(0.05, 0.8), default=0.4, help="share with an event (real cohort: 0.123)")
    add("--matrix", type=whole(12), default=32, help="voxels along the first axis of a CT")
    add("--seed", type=int, default=0, help="random seed of the patients")


def write_sample_data(out: Path, num_patients: int, event_rate: float, matrix: int, seed: int) -> None:
    """Write CTs, masks and dataset.csv into `out`; print Harrell's C of the true risk and of simple predictors.

    event_rate: fraction of patients with an event. matrix: voxels along a CT's first axis. Raises InputError if `out`
    already contains a dataset.csv.
    """
    if (out / "dataset.csv").exists():
        raise InputError(f"{out}: holds a data set already; choose another folder or delete it")
    for folder in ("scans", "masks"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    lesions = rng.integers(2, 9, num_patients)
    shells = rng.binomial(lesions, rng.uniform(0, 1, num_patients))
    age = rng.normal(62, 9, num_patients).round()
    parts = [(values - values.mean()) / max(values.std(), 1e-9) for values in (age, shells)]
    log_hazard = (SPREAD * (math.sqrt(AGE_SHARE) * parts[0] + math.sqrt(1 - AGE_SHARE) * parts[1])).round(6)
    day, event = draw_follow_up(rng, log_hazard, event_rate)
    fold = np.zeros(num_patients, int)
    for patients in (np.flatnonzero(event), np.flatnonzero(~event)):
        fold[rng.permutation(patients)] = np.arange(len(patients)) % FOLDS

    rows = []
    for i in range(num_patients):
        names = {kind: f"{folder}/case_{i + 1:05d}.nii.gz" for kind, folder in (("path", "scans"), ("mask", "masks"))}
        kinds = rng.permutation(np.arange(lesions[i]) < shells[i])
        measured = write_ct(out, names, rng, kinds, matrix)
        row = {"case_num": i + 1, "NIFTI Path": names["path"], "heart_mask": names["mask"]}
        row |= {"time": day[i], "event": int(event[i])}
        row |= {f"Fold_{k + 1}": "val" if fold[i] == k else "train" for k in range(FOLDS)}
        row |= {"Age": "" if rng.random() < 0.03 else int(age[i]), "Sex": rng.choice(["female", "male"])}
        rows.append(row | measured | {"true_log_hazard": log_hazard[i]})
    # rename dataset.csv into place last: if it exists, the data set is complete
    unfinished = out / ".dataset.csv.tmp"
    pd.DataFrame(rows).to_csv(unfinished, index=False)
    unfinished.replace(out / "dataset.csv")

    print(f"{out}: {num_patients} patients, {event.sum()} events, follow-up of {day.min()} to {day.max()} days")
    known = {"the true risk": log_hazard, "age": age} | {name: [row[name] for row in rows] for name in measured}
    scores = [f"{name} {concordance(np.array(risk, float), day, event):.3f}" for name, risk in known.items()]
    print("C in all patients of", ", ".join(scores))


def draw_follow_up(rng: Generator, log_hazard: np.ndarray, event_rate: float) -> tuple[np.ndarray, np.ndarray]:
    unscaled = (-np.log(rng.random(len(log_hazard))) * np.exp(-log_hazard)) ** (1 / WEIBULL_SHAPE)
    censored = rng.uniform(FIRST_CENSORED, LAST_DAY, len(log_hazard))
    # scale the event times so that a fraction event_rate of the patients have the event before being censored
    scale = np.quantile(censored / unscaled, 1 - event_rate)
    days = scale * unscaled
    return np.clip(np.ceil(np.minimum(days, censored)), FIRST_DAY, LAST_DAY).astype(int), days <= censored


def write_ct(out: Path, names: dict, rng: Generator, kinds: np.ndarray, matrix: int) -> dict:
    """Write a CT and its heart mask; return the total Agatston score, lesion volume in mm3 and lesion count.

    names: paths of the CT ("path") and the mask ("mask") relative to `out`. kinds: for each lesion, True for a shell
    and False for a ball. matrix: voxels along the CT's first axis.
    """
    import nibabel

    voxel = FIELD[0] / matrix * np.array([1, 1, rng.uniform(*THICKNESS)])
    shape = np.round(FIELD / voxel).astype(int)
    grid = np.stack(np.meshgrid(*(np.arange(n) - (n - 1) / 2 for n in shape), indexing="ij"), -1)
    heart = rng.uniform(0.93, 1.07) * HEART / voxel
    centre = rng.uniform(-6, 6, 3) / voxel
    outside = np.linalg.norm((grid - centre) / heart, axis=-1)
    hu = np.where(outside < 1, rng.normal(50, 6), rng.normal(-800, 20))
    hu[np.linalg.norm(grid[..., :2] / (shape[:2] / 2), axis=-1) > 1.05] = rng.normal(30, 8)

    calcium = np.zeros(shape, bool)
    areas, places = [], []
    for is_shell in kinds:
        for _ in range(500):
            place = grid[tuple(rng.integers(4, shape - 4))]
            inside = 0.3 < np.linalg.norm((place - centre) / heart) < 0.95
            if inside and all(np.linalg.norm(place - other) > 8.3 for other in places):
                break
        else:
            continue
        places.append(place)
        # a ball consists of the voxels nearest to its centre, a shell of the voxels nearest to a sphere around its
        # centre
        voxels = int(rng.integers(50, 90))
        radius = math.sqrt(voxels / (4 * math.pi)) if is_shell else 0
        nearest = np.argsort(np.abs(np.linalg.norm(grid - place, axis=-1) - radius), axis=None)[:voxels]
        calcium.flat[nearest] = True
        peak = rng.uniform(300, 600)
        hu.flat[nearest] = peak
        areas.append(voxels * voxel.prod() / 3 * min(4, int(peak / 100)))
    hu += rng.normal(0, 15, shape)

    affine = np.diag([*voxel, 1])
    nibabel.save(nibabel.Nifti1Image(hu.round().astype(np.int16), affine), out / names["path"])
    nibabel.save(nibabel.Nifti1Image((outside < 1).astype(np.uint8), affine), out / names["mask"])
    return {
        "AgatstonScore": round(sum(areas), 1),
        "VolumeScore": round(calcium.sum() * voxel.prod(), 1),
        "NumLesion": len(areas),
    }
