"""Write a table of patients and their chest CTs for train_survival_distributed.py: dataset.csv and scans/*.nii.gz.

The CTs (NIfTI, HU) have several voxel sizes and orientations, and calcified lesions lie on the heart. Their load alone
drives a Weibull hazard, so the C-index that the true risk reaches is known, and printed.
"""

import argparse
import csv
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from old.cli_utils import InputError, number, whole
from old.sample_data_utils import CT, Phantom

# What a CT covers, in mm, and voxel sizes in units of field / matrix.
FIELD = (220.0, 180.0, 128.0)
VOXELS = (
    # This is the middle size.
    (1.0, 1.0, 1.6),
    # The slices are thick.
    (0.8, 0.8, 2.0),
    # The slices are thin.
    (1.2, 1.2, 1.3),
)

HEART_RADII = (42, 36, 40)
VESSELS = ("LAD", "LCX", "RCA")
FOLDS = 5

# Days of the real cohort: its first and last event or end of follow-up, and the earliest end of follow-up here.
FIRST_DAY = 34
LAST_DAY = 2447
FIRST_CENSORED = 300
WEIBULL_SHAPE = 1.3


class Lesion(NamedTuple):
    """A calcified lesion: its place from the heart's centre and its radius in mm, its peak in HU above the tissue."""

    place: tuple[float, float, float]
    radius: float
    peak: float
    vessel: str


class FollowUp(NamedTuple):
    """What happened to each patient: the day of the event or of the end of follow-up, and whether it was an event."""

    day: np.ndarray
    event: np.ndarray


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this data set's flags."""
    add = parser.add_argument
    share = number(0.05, 0.8)
    add("out", type=Path, help="folder to write; must not hold a data set yet")
    add("--num_patients", type=whole(20), default=600, help="patients, one CT and one row each")
    add("--event_rate", type=share, default=0.3, help="share with an event (real cohort: 0.123)")
    add("--matrix", type=whole(12), default=48, help="voxels along the first axis, at the middle voxel size")
    add("--risk", type=number(0), default=2.0, help="log-hazard per standard deviation of the lesion load")
    add("--seed", type=int, default=0)


def write_sample_data(out: Path, num_patients: int, event_rate: float, matrix: int, risk: float, seed: int) -> None:
    """Write the CTs and the table, and print the C-index. Raises InputError when the folder holds a data set."""
    if (out / "dataset.csv").exists():
        raise InputError(f"{out}: holds a data set already; choose another folder or delete it")
    (out / "scans").mkdir(parents=True, exist_ok=True)

    # The hazard follows from the lesions alone.
    rng = np.random.default_rng(seed)
    lesions = [draw_lesions(rng) for _ in range(num_patients)]
    load = [lesion_load(patient) for patient in lesions]
    load = np.log1p(load)
    spread = max(load.std(), 1e-9)
    log_hazard = risk * (load - load.mean()) / spread
    follow_up = draw_follow_up(rng, log_hazard, event_rate)
    fold = draw_folds(rng, follow_up.event)

    # A table that is there is whole: it gets its name when the last CT is written.
    unfinished = out / ".dataset.csv.tmp"
    with open(unfinished, "w", newline="", encoding="utf-8") as file:
        table = None
        for i, patient in enumerate(lesions):
            name = f"scans/case_{i + 1:05d}.nii.gz"
            ct = chest_ct(rng, patient, matrix)
            ct.save(out / name)

            # One row a patient, in the columns of the real cohort.
            row = {"case_num": i + 1, "NIFTI Path": name}
            row["time"] = follow_up.day[i]
            row["event"] = int(follow_up.event[i])
            for k in range(FOLDS):
                row[f"Fold_{k + 1}"] = "val" if fold[i] == k else "train"
            row |= describe_patient(rng, patient, load[i])
            row["true_log_hazard"] = round(log_hazard[i], 6)

            if table is None:
                table = csv.DictWriter(file, list(row))
                table.writeheader()
            table.writerow(row)
    unfinished.replace(out / "dataset.csv")

    validation = fold == 0
    print_cohort(out, follow_up, log_hazard, validation)


def draw_lesions(rng: Generator) -> list[Lesion]:
    """Draw the lesions of one patient, who may have none."""
    uniform = rng.uniform
    burden = max(0.0, rng.normal(1.0, 0.9))
    count = rng.poisson(3.5 * burden)
    lesions = []
    for _ in range(count):
        # A place on the heart's surface.
        width, depth, height = HEART_RADII
        up = uniform(-0.8, 0.8)
        around = uniform(0, 2 * math.pi)
        flat = math.sqrt(1 - up * up)
        x = width * flat * math.cos(around)
        y = depth * flat * math.sin(around)
        z = height * up

        # What it is like.
        radius = uniform(4.5, 9)
        peak = uniform(400, 1300)
        choice = rng.integers(len(VESSELS))
        vessel = VESSELS[choice]
        lesion = Lesion((x, y, z), radius, peak, vessel)
        lesions.append(lesion)
    return lesions


def lesion_load(lesions: list[Lesion]) -> float:
    """How much calcium there is: what the hazard follows."""
    load = 0.0
    for lesion in lesions:
        volume = (lesion.radius / 4) ** 3
        load += lesion.peak / 1000 * volume
    return load


def draw_follow_up(rng: Generator, log_hazard: np.ndarray, event_rate: float) -> FollowUp:
    """Draw Weibull times of events and uniform ends of follow-up, so that a share of event_rate has an event."""
    count = len(log_hazard)
    draw = -np.log(rng.random(count))
    censored = rng.uniform(FIRST_CENSORED, LAST_DAY, count)

    # The share of events falls with the scale, whose logarithm is found by bisection.
    spread = draw * np.exp(-log_hazard)
    spread = spread ** (1 / WEIBULL_SHAPE)
    low = -5.0
    high = 30.0
    for _ in range(60):
        middle = (low + high) / 2
        days = np.exp(middle) * spread
        event = days <= censored
        if event.mean() > event_rate:
            low = middle
        else:
            high = middle

    # The table has whole days.
    day = np.ceil(np.minimum(days, censored))
    day = np.clip(day, FIRST_DAY, LAST_DAY)
    return FollowUp(day.astype(int), event)


def draw_folds(rng: Generator, event: np.ndarray) -> np.ndarray:
    """Draw each patient's validation fold; the events are spread evenly."""
    fold = np.zeros(len(event), int)
    for kind in (event, ~event):
        patients = np.flatnonzero(kind)
        patients = rng.permutation(patients)
        fold[patients] = np.arange(len(patients)) % FOLDS
    return fold


def chest_ct(rng: Generator, lesions: list[Lesion], matrix: int) -> CT:
    """Draw a chest with these lesions: body, lungs, ribs, spine and heart."""
    choice = rng.integers(len(VOXELS))
    voxel = np.array(VOXELS[choice])
    voxel = FIELD[0] / matrix * voxel
    chest = Phantom(FIELD, voxel, fewest_voxels=6, sharpness=8)
    size = rng.uniform(0.93, 1.07)
    shift = rng.uniform(-6, 6, 3)

    # The body without its heart.
    radii = (104 * size, 80 * size, 400)
    hu = rng.normal(30, 8)
    chest.add((0, 0, 0), radii, hu)
    bone = rng.uniform(350, 700)
    rib_bone = 0.8 * bone
    add_lungs_and_ribs(rng, chest, size, rib_bone)
    y = -62 * size
    radii = (15, 14, 400)
    chest.add((0, y, 0), radii, bone)

    # The heart and the calcium on it.
    centre = shift + (8, 14, 0)
    hu = rng.normal(50, 6)
    chest.add(centre, HEART_RADII, hu)
    for lesion in lesions:
        chest.volume += lesion_hu(chest, centre, lesion)
    return chest.scan(rng, noise=22)


def add_lungs_and_ribs(rng: Generator, chest: Phantom, size: float, bone: float) -> None:
    """Add both lungs, and the ribs beside them; bone is in HU."""
    for side in (-1, 1):
        x = side * 52 * size
        radii = (40 * size, 58 * size, 90)
        hu = rng.normal(-850, 25)
        chest.add((x, 6, 0), radii, hu)

        # The ribs lie one above the other.
        x = side * 88 * size
        radii = (6, 30, 5)
        for z in range(-48, 49, 24):
            chest.add((x, 10, z), radii, bone)


def lesion_hu(chest: Phantom, centre: tuple, lesion: Lesion) -> np.ndarray:
    """The HU that a lesion adds, as a soft ball; centre is the heart's."""
    x, y, z = lesion.place
    x = chest.x - centre[0] - x
    y = chest.y - centre[1] - y
    z = chest.z - centre[2] - z
    squared_distance = x**2 + y**2 + z**2
    width = 0.72 * lesion.radius**2
    return lesion.peak * np.exp(-squared_distance / width)


def describe_patient(rng: Generator, lesions: list[Lesion], load: float) -> dict:
    """The columns of the table that describe the patient and the calcium, as a reader of the CT would measure it."""
    volumes = []
    mass = 0
    agatston = dict.fromkeys(VESSELS, 0.0)
    for lesion in lesions:
        volume = 4.2 * lesion.radius**3
        volumes.append(volume)
        mass += volume * lesion.peak / 1000

        # The Agatston score weighs an area with a step of the density, 1 to 4.
        density = min(4, int(lesion.peak / 100))
        score = volume / 3 * density * rng.uniform(0.9, 1.1)
        agatston[lesion.vessel] += score

    age = rng.normal(58 + 4 * load, 8)
    is_female = rng.random() < 0.45
    peaks = [lesion.peak for lesion in lesions]
    mean_peak = sum(peaks) / max(1, len(peaks))

    # The columns' names are the real cohort's.
    return {
        "Age": round(age),
        "isFemale": int(is_female),
        "AgatstonScore2D": round(sum(agatston.values()), 1),
        "MassScore": round(mass, 1),
        "VolumeScore": round(sum(volumes), 1),
        "NumLesion3D": len(lesions),
        "MaxHU": round(max(peaks, default=0)),
        "MeanHU": round(mean_peak),
        "LargestVolume": round(max(volumes, default=0), 1),
        "LAD_Agatston": round(agatston["LAD"], 1),
        "LCX_Agatston": round(agatston["LCX"], 1),
        "RCA_Agatston": round(agatston["RCA"], 1),
    }


def print_cohort(out: Path, follow_up: FollowUp, log_hazard: np.ndarray, validation: np.ndarray) -> None:
    """Print the numbers of the cohort and the C-index of the true risk; `validation` marks a fold's patients."""
    from tasks.survival.metrics import concordance

    day, event = follow_up
    first_fold = event[validation]
    print(
        f"{out}: {len(day)} patients, {event.sum()} events ({event.mean():.1%}), follow-up {day.min()} to {day.max()} "
        f"days; validation fold Fold_1: {len(first_fold)} patients, {first_fold.sum()} events"
    )

    everyone = np.ones_like(validation)
    c_index = []
    for rows in (validation, everyone):
        risk = np.round(log_hazard[rows], 6)
        days = day[rows].astype(float)
        value = concordance(risk, event[rows], days)
        c_index.append("undefined" if value is None else f"{value:.4f}")
    in_fold, in_all = c_index
    print(f"C-index of the true risk: {in_fold} in the validation fold of Fold_1, {in_all} in all")
