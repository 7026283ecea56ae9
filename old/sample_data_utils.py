"""CTs made of ellipsoids, for the cascade's sample data."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator


def logistic(field: np.ndarray) -> np.ndarray:
    """From 0 far below 0 to 1 far above it."""
    field = np.clip(-field, -30, 30)
    return 1 / (1 + np.exp(field))


# Which way a file's voxels run along each axis, 1 is to the right, to the front or up.
ORIENTATIONS = (
    # RAS
    (1, 1, 1),
    # LPS
    (-1, -1, 1),
    # LAS
    (-1, 1, 1),
    # RAI
    (1, 1, -1),
)


class CT(NamedTuple):
    """A CT as a file has it: int16 HU, and the affine from voxels to mm."""

    volume: np.ndarray
    affine: np.ndarray

    def save(self, path: Path) -> None:
        """Write it as NIfTI."""
        import nibabel

        image = nibabel.Nifti1Image(self.volume, self.affine)
        nibabel.save(image, path)


@dataclass
class Phantom:
    """A CT under construction, in mm: x runs to the right, y to the front, z up, and 0 is in the middle.

    field: what it covers. voxel: the size of a voxel. sharpness: of edges, in steps per side of a voxel.
    """

    field: tuple
    voxel: np.ndarray
    fewest_voxels: int
    sharpness: float

    def __post_init__(self):
        self.axes = []
        for length, side in zip(self.field, self.voxel, strict=True):
            count = round(length / side)
            count = max(count, self.fewest_voxels)
            middle = (count - 1) / 2
            axis = np.arange(count) - middle
            self.axes.append(axis * side)

        grid = np.meshgrid(*self.axes, indexing="ij")
        self.x, self.y, self.z = grid
        self.volume = np.full_like(self.x, -1000.0)

    def ellipsoid(self, centre: tuple, radii: tuple) -> np.ndarray:
        """How much of each voxel lies inside, 0 to 1."""
        x, y, z = centre
        x = self.x - x
        y = self.y - y
        z = self.z - z
        width, depth, height = radii
        across = (x / width) ** 2
        along = (y / depth) ** 2
        upwards = (z / height) ** 2
        distance = np.sqrt(across + along + upwards)
        edge = self.sharpness * (distance - 1)
        edge = edge * min(radii) / self.voxel.max()
        return logistic(-edge)

    def fill(self, inside: np.ndarray, hu: float) -> None:
        """Replace what is there by a tissue of so many HU."""
        kept = self.volume * (1 - inside)
        self.volume = kept + hu * inside

    def add(self, centre: tuple, radii: tuple, hu: float) -> None:
        """Add an ellipsoid of one tissue."""
        inside = self.ellipsoid(centre, radii)
        self.fill(inside, hu)

    def scan(self, rng: Generator, noise: float) -> CT:
        """Add noise of so many HU, and turn the axes as a scanner might."""
        shape = self.volume.shape
        volume = self.volume + rng.normal(0, noise, shape)
        volume = np.clip(volume, -1024, 3071)
        volume = volume.astype(np.int16)
        choice = rng.integers(len(ORIENTATIONS))

        # The affine's last column is where the first voxel lies.
        affine = np.eye(4)
        for i, sign in enumerate(ORIENTATIONS[choice]):
            axis = self.axes[i]
            affine[i, i] = self.voxel[i] * sign
            affine[i, 3] = axis[0]
            if sign < 0:
                volume = np.flip(volume, i)
                affine[i, 3] = axis[-1]
        return CT(volume, affine)
