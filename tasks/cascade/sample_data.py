"""Write a data folder of synthetic patients, each with a CT and two X-rays, for train_accelerate.py.

The CTs show torsos with random anatomy. Voxel size and orientation vary between files.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.random import Generator

from utils.cli import InputError, whole

# field of view along x, y and z in mm
FIELD = (380.0, 300.0, 340.0)
# voxel sizes along x, y and z, as multiples of (width of the field of view / --matrix)
VOXELS = ((1.0, 1.0, 1.0), (0.9, 0.9, 1.3), (1.1, 1.1, 0.9))
# order and direction of the axes in CT files
AXIS_ORDERS = ((0, 1, 2), (0, 1, 2), (2, 1, 0))
ORIENTATIONS = ((1, 1, 1), (-1, -1, 1), (-1, 1, 1), (1, 1, -1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", type=Path, help="folder to write; must not hold a data set yet")
    add("--num_patients", type=whole(4), default=120, help="patients, one CT and two X-rays each")
    add("--matrix", type=whole(12), default=64, help="voxels along the first axis")
    add("--seed", type=int, default=0, help="the same seed writes the same patients")


def write_sample_data(out: Path, num_patients: int, matrix: int, seed: int) -> None:
    from tasks.cascade.data import make_drrs

    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out}: holds something already; choose another folder or delete it")
    rng = np.random.default_rng(seed)
    names = [f"patient_{number:04d}" for number in range(1, num_patients + 1)]
    for name in names:
        (out / name).mkdir(parents=True)
        write_ct(out / name / f"{name}.nii.gz", rng, matrix)
    make_drrs(out)
    num_test = max(1, round(num_patients / 6))
    (out / "train.txt").write_text("\n".join(names[num_test:]) + "\n")
    (out / "test.txt").write_text("\n".join(names[:num_test]) + "\n")
    print(f"{out}: {num_patients} patients; --split_files {out}/train.txt {out}/test.txt")


class Phantom:
    """Synthetic CT in HU: air, with ellipsoids drawn into it.

    Coordinates are in mm from the centre of the CT: x increases to the patient's right, y to the front, z to the head.
    """

    def __init__(self, field: np.ndarray, voxel: np.ndarray):
        counts = [max(8, round(length / side)) for length, side in zip(field, voxel, strict=True)]
        self.voxel = voxel
        self.axes = [(np.arange(n) - (n - 1) / 2) * side for n, side in zip(counts, voxel, strict=True)]
        self.x, self.y, self.z = np.meshgrid(*self.axes, indexing="ij")
        self.volume = np.full_like(self.x, -1000.0)

    def ellipsoid(self, centre: tuple, radii: tuple) -> np.ndarray:
        parts = zip((self.x, self.y, self.z), centre, radii, strict=True)
        distance = np.sqrt(sum(((along - middle) / radius) ** 2 for along, middle, radius in parts))
        edge = 6 * (distance - 1) * min(radii) / self.voxel.max()
        return 1 / (1 + np.exp(np.clip(edge, -30, 30)))

    def fill(self, inside: np.ndarray, hu: float) -> None:
        self.volume = self.volume * (1 - inside) + inside * hu

    def add(self, centre: tuple, radii: tuple, hu: float) -> None:
        self.fill(self.ellipsoid(centre, radii), hu)


def write_ct(path: Path, rng: Generator, matrix: int) -> None:
    import nibabel

    field = np.array(FIELD) * rng.uniform(0.95, 1.05)
    voxel = field[0] / matrix * np.array(VOXELS[rng.integers(len(VOXELS))])
    torso = draw_torso(rng, field, voxel)
    volume = np.clip(torso.volume + rng.normal(0, 12, torso.volume.shape), -1024, 3071).astype(np.int16)

    # the last column of the affine matrix is the position of the first voxel
    affine = np.eye(4)
    for axis, sign in enumerate(ORIENTATIONS[rng.integers(len(ORIENTATIONS))]):
        affine[axis, axis] = voxel[axis] * sign
        affine[axis, 3] = torso.axes[axis][0 if sign > 0 else -1]
        volume = volume if sign > 0 else np.flip(volume, axis)
    order = AXIS_ORDERS[rng.integers(len(AXIS_ORDERS))]
    nibabel.save(nibabel.Nifti1Image(volume.transpose(order), affine[:, [*order, 3]]), path)


def draw_torso(rng: Generator, field: np.ndarray, voxel: np.ndarray) -> Phantom:
    """Draw a torso with random anatomy. field: (3,), field of view in mm. voxel: (3,), voxel size in mm."""
    torso = Phantom(field, voxel)
    uniform, normal = rng.uniform, rng.normal

    # width, depth and height are relative to an average body, all other values are in mm
    width, depth, height = uniform(0.75, 1.12), uniform(0.75, 1.15), uniform(0.9, 1.1)
    lean, forward, bend = uniform(-32, 32), uniform(-26, 26), uniform(-18, 18)
    raised, fat = uniform(-45, 45), uniform(8, 28)
    torso.x = torso.x - lean - bend * np.cos(np.pi * torso.z / field[2])
    torso.y = torso.y - forward

    # layer of fat around muscle
    torso.add((0, 0, 0), (150 * width, 105 * depth, 900), normal(-95, 8))
    torso.add((0, 0, 0), (150 * width - fat, 105 * depth - fat, 900), normal(45, 8))

    # on each side: lung, dome of the diaphragm, ribs
    for side, dome in ((-1, raised + uniform(-12, 12)), (1, raised + uniform(-12, 12))):
        breath = uniform(0.85, 1.12)
        radii = (52 * width * breath, 74 * depth, 110 * height * breath)
        lung = torso.ellipsoid((side * 66 * width, 4, 28 + dome), radii)
        torso.fill(lung / (1 + np.exp(-(torso.z - dome + 62) / 4)), normal(-830, 25))
        for level in range(-96, 133, 38):
            hu = 0.75 * uniform(450, 650)
            torso.add((side * 118 * width, 8, level * height + raised), (9, 62 * depth, 8), hu)

    # heart
    x, z = -26 * width + uniform(-10, 10), -18 + raised + uniform(-10, 10)
    radii = (uniform(44, 66), uniform(40, 54), uniform(46, 62))
    torso.add((x, 26 * depth, z), radii, normal(55, 6))

    # vertebrae and, behind them, the less dense spinous processes
    bone = uniform(450, 750)
    torso.add((0, -66 * depth, 0), (19, 18, 900), bone)
    torso.add((0, -92 * depth, 0), (6, 12, 900), 0.8 * bone)

    # nodules, each in a random lung; about a fifth of the patients have none
    for _ in range(rng.poisson(1.5)):
        x = rng.choice([-1, 1]) * uniform(45, 90) * width
        y, z = uniform(-35, 35) * depth, raised + uniform(-40, 90)
        radius = uniform(9, 22)
        torso.add((x, y, z), (radius, radius, radius), normal(60, 20))
    return torso
