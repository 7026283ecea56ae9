"""Write patients with a CT and two X-rays each for train_accelerate.py, in the drr_patient_data layout.

The CTs (NIfTI, HU) are made-up torsos: body, lungs, spine, ribs, heart, nodules; voxel sizes and orientations vary.
Their frontal and lateral X-rays are rendered by the projector that the training uses (projector.py). No two have
the same size, posture, heart, diaphragm or nodules, and all of that can be seen in the X-rays. With --layout lidc the
same is written as X2CT-GAN's HDF5 files.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from old.cli_utils import InputError, whole
from old.sample_data_utils import CT, Phantom

# What a CT covers, in mm to the right, to the front and up.
FIELD = (380.0, 300.0, 340.0)

# Voxel sizes, in units of field / matrix.
VOXELS = (
    # All sides are equal.
    (1.0, 1.0, 1.0),
    # The slices are thick.
    (0.9, 0.9, 1.3),
    # The slices are thin.
    (1.1, 1.1, 0.9),
)

# The order in which a file has x, y and z.
AXIS_ORDERS = (
    # Two of three files have them in this order.
    (0, 1, 2),
    (0, 1, 2),
    # One of three has them reversed.
    (2, 1, 0),
)


class Body(NamedTuple):
    """What a patient is like.

    width, depth, height: shares of the usual size. lean, forward: mm beside and before the middle. bend: of the spine,
    raised: how high the diaphragm is, fat: how thick it is, all in mm.
    """

    width: float
    depth: float
    height: float
    lean: float
    forward: float
    bend: float
    raised: float
    fat: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this data set's flags."""
    add = parser.add_argument
    add("out", type=Path, help="folder to write; must not hold a data set yet")
    add("--num_patients", type=whole(3), default=120, help="patients, one CT and two X-rays each")
    add("--matrix", type=whole(12), default=64, help="voxels along the first axis")
    add("--layout", choices=("nifti", "lidc"), default="nifti", help="lidc: HDF5 files and lists as X2CT-GAN's")
    add("--seed", type=int, default=0)


def write_sample_data(
    out: Path,
    num_patients: int,
    matrix: int,
    layout: str,
    seed: int,
) -> None:
    """Write <id>/<id>.nii.gz and its two X-rays, or what write_lidc does, and the lists of ids train.txt and test.txt.

    Raises InputError when the folder holds something.
    """
    from tasks.cascade.files import make_drrs

    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out}: holds something already; choose another folder or delete it")

    rng = np.random.default_rng(seed)
    names = [f"patient_{number:04d}" for number in range(1, num_patients + 1)]
    if layout == "lidc":
        write_lidc(out, names, matrix, rng)
        write_lists(out, names)
        return
    for name in names:
        folder = out / name
        folder.mkdir(parents=True)
        ct = torso_ct(rng, matrix)
        ct.save(folder / f"{name}.nii.gz")

    make_drrs(out)
    write_lists(out, names)


def write_lists(out: Path, names: list[str]) -> None:
    """Write the ids of train.txt and test.txt: a sixth is for testing."""
    held = max(1, round(len(names) / 6))
    (out / "train.txt").write_text("\n".join(names[held:]) + "\n")
    (out / "test.txt").write_text("\n".join(names[:held]) + "\n")
    print(f"{out}: {len(names)} patients; --split_files {out}/train.txt {out}/test.txt")


def write_lidc(
    out: Path,
    names: list[str],
    matrix: int,
    rng: Generator,
) -> None:
    """Write <id>/ct_xray_data.h5 of matrix^3 voxels, which cover 320 mm.

    The X-rays are 128^2, and the brightest pixel of each is white. They are parallel projections; X2CT-GAN's are not.
    """
    from tasks.cascade.lidc import EXTENT, write_patient
    from tasks.cascade.projector import VIEWS, render_drr

    voxel = np.full(3, EXTENT / matrix)
    for name in names:
        torso = draw_torso(rng, np.full(3, EXTENT), voxel)
        hu = torso.volume + rng.normal(0, 12, torso.volume.shape)
        images = {}
        for view in VIEWS:
            image = render_drr(hu, voxel, view, longest=128).astype(float)
            images[view] = (image * 255 / image.max()).round().astype(np.uint8)
        write_patient(out / name, hu, images)


def torso_ct(rng: Generator, matrix: int) -> CT:
    """Draw a torso, and turn its axes as a scanner might."""
    field = np.array(FIELD) * rng.uniform(0.95, 1.05)
    choice = rng.integers(len(VOXELS))
    voxel = np.array(VOXELS[choice])
    voxel = field[0] / matrix * voxel
    torso = draw_torso(rng, field, voxel)

    ct = torso.scan(rng, noise=12)
    choice = rng.integers(len(AXIS_ORDERS))
    order = AXIS_ORDERS[choice]
    volume = ct.volume.transpose(order)
    affine = ct.affine[:, [*order, 3]]
    return CT(volume, affine)


def draw_torso(rng: Generator, field: np.ndarray, voxel: np.ndarray) -> Phantom:
    """Draw a torso; all that makes a patient is drawn anew for each. field: what is covered, in mm."""
    torso = Phantom(field, voxel, fewest_voxels=8, sharpness=6)

    # The patient stands beside the middle, with a curved spine.
    body = draw_body(rng)
    height = field[2]
    curve = np.cos(np.pi * torso.z / height)
    torso.x = torso.x - body.lean - body.bend * curve
    torso.y = torso.y - body.forward

    add_skin(rng, torso, body)
    add_lungs_and_ribs(rng, torso, body)
    add_heart(rng, torso, body)
    add_spine(rng, torso, body)
    add_nodules(rng, torso, body)
    return torso


def draw_body(rng: Generator) -> Body:
    """Draw a patient's size and posture."""
    uniform = rng.uniform
    return Body(
        width=uniform(0.75, 1.12),
        depth=uniform(0.75, 1.15),
        height=uniform(0.9, 1.1),
        lean=uniform(-32, 32),
        forward=uniform(-26, 26),
        bend=uniform(-18, 18),
        raised=uniform(-45, 45),
        fat=uniform(8, 28),
    )


def add_skin(rng: Generator, torso: Phantom, body: Body) -> None:
    """Add the body: fat, and muscle inside it."""
    middle = (0, 0, 0)
    width = 150 * body.width
    depth = 105 * body.depth
    radii = (width, depth, 900)
    hu = rng.normal(-95, 8)
    torso.add(middle, radii, hu)

    # The muscle lies under the fat.
    width -= body.fat
    depth -= body.fat
    radii = (width, depth, 900)
    hu = rng.normal(45, 8)
    torso.add(middle, radii, hu)


def add_lungs_and_ribs(rng: Generator, torso: Phantom, body: Body) -> None:
    """Add both lungs, each on its dome of the diaphragm, and the ribs beside them."""
    left_dome = body.raised + rng.uniform(-12, 12)
    right_dome = body.raised + rng.uniform(-12, 12)
    domes = {-1: left_dome, 1: right_dome}
    for side, dome in domes.items():
        # A lung holds more or less air.
        breath = rng.uniform(0.85, 1.12)
        width = 52 * body.width * breath
        depth = 74 * body.depth
        height = 110 * body.height * breath
        radii = (width, depth, height)
        x = side * 66 * body.width
        z = 28 + dome
        lung = torso.ellipsoid((x, 4, z), radii)

        # It ends at the diaphragm.
        above = torso.z - dome + 62
        share = 1 / (1 + np.exp(-above / 4))
        hu = rng.normal(-830, 25)
        torso.fill(lung * share, hu)

        # The ribs lie one above the other.
        x = side * 118 * body.width
        depth = 62 * body.depth
        radii = (9, depth, 8)
        for level in range(-96, 133, 38):
            z = level * body.height + body.raised
            hu = 0.75 * rng.uniform(450, 650)
            torso.add((x, 8, z), radii, hu)


def add_heart(rng: Generator, torso: Phantom, body: Body) -> None:
    """Add a heart of its own size and place."""
    uniform = rng.uniform
    x = -26 * body.width + uniform(-10, 10)
    y = 26 * body.depth
    z = -18 + body.raised + uniform(-10, 10)
    width = uniform(44, 66)
    depth = uniform(40, 54)
    height = uniform(46, 62)
    radii = (width, depth, height)
    hu = rng.normal(55, 6)
    torso.add((x, y, z), radii, hu)


def add_spine(rng: Generator, torso: Phantom, body: Body) -> None:
    """Add the vertebrae, and their processes behind them."""
    bone = rng.uniform(450, 750)
    y = -66 * body.depth
    radii = (19, 18, 900)
    torso.add((0, y, 0), radii, bone)

    # The processes are less dense.
    bone = 0.8 * bone
    y = -92 * body.depth
    radii = (6, 12, 900)
    torso.add((0, y, 0), radii, bone)


def add_nodules(rng: Generator, torso: Phantom, body: Body) -> None:
    """Add nodules to either lung; many patients have none."""
    uniform = rng.uniform
    count = rng.poisson(1.5)
    for _ in range(count):
        side = rng.choice([-1, 1])
        x = side * uniform(45, 90) * body.width
        y = uniform(-35, 35) * body.depth
        z = body.raised + uniform(-40, 90)
        radius = uniform(9, 22)
        radii = (radius, radius, radius)
        hu = rng.normal(60, 20)
        torso.add((x, y, z), radii, hu)
