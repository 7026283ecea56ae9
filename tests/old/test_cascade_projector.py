"""The projector of the cascade: the geometry, against NumPy and a renderer of another kind."""

from typing import NamedTuple

import nibabel
import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates

from tasks.cascade.files import read_ct
from tasks.cascade.projector import P_MAX, VIEWS, as_image, attenuation, back_project
from tasks.cascade.projector import lift, normalise, project, render_drr, resize, to_hu
from tasks.cascade.figures import SLICES, Column, Row, draw_rows


class Ct(NamedTuple):
    """HU in RAS+ order, the affine of that order, and mm per voxel (3,)."""

    hu: np.ndarray
    affine: np.ndarray
    spacing: np.ndarray

    @property
    def volume(self) -> torch.Tensor:
        """(1, 1, X, Y, Z) in -1..1."""
        return as_input(self.hu)

    @property
    def mm(self) -> torch.Tensor:
        """The spacing as the projector takes it."""
        return torch.tensor([self.spacing.tolist()])


@pytest.fixture(scope="module")
def patient(cascade_data) -> Ct:
    """The CT of one patient."""
    folder = cascade_data / "patient_0001"
    hu, affine = read_ct(folder / "patient_0001.nii.gz")
    squares = affine[:3, :3] ** 2
    spacing = np.sqrt(squares.sum(0))
    return Ct(hu, affine, spacing)


def as_input(hu: np.ndarray) -> torch.Tensor:
    volume = normalise(torch.from_numpy(hu.astype(np.float32)))
    return volume[None, None]


def test_hu_scale():
    hu = torch.tensor([-2000.0, -1000.0, 0.0, 1000.0, 3000.0, 9000.0])
    scaled = normalise(hu)
    assert scaled.tolist() == [-1, -1, -0.5, 0, 1, 1]
    assert to_hu(scaled)[1:5].tolist() == [-1000, 0, 1000, 3000]

    # air and water
    mu = attenuation(torch.tensor([-1.0, -0.5]))
    assert np.allclose(mu.numpy(), [0, 0.0193])


@pytest.mark.parametrize(("view", "axis"), [("pa", 1), ("lat", 0)])
def test_projection_is_a_line_integral(patient, view, axis):
    hu = np.clip(patient.hu, -1000, 3000).astype(np.float64)
    mu = 0.0193 * (1 + hu / 1000)
    integral = mu.sum(axis) * patient.spacing[axis]
    # head up; from the right, or from the front
    expected = integral.T[::-1, ::-1]
    image = project(patient.volume, patient.mm, view)
    image = image[0, 0].numpy()
    assert image.shape == expected.shape
    difference = np.abs(image - expected)
    assert difference.max() < 1e-5 * expected.max()


def falling(count: int) -> np.ndarray:
    """The centres of so many cells, from 0.5 down to -0.5."""
    centres = np.arange(count) + 0.5
    return 0.5 - centres / count


@pytest.mark.parametrize("view", VIEWS)
def test_independent_renderer_in_the_world(patient, view):
    """Rays marched through the world in mm, by the file's affine and scipy's interpolation, in half-voxel steps."""
    rotation = patient.affine[:3, :3]
    origin = patient.affine[:3, 3]
    shape = np.array(patient.hu.shape)
    extent = shape * patient.spacing
    centre = rotation @ ((shape - 1) / 2) + origin
    ray = 1 if view == "pa" else 0
    across = 1 - ray

    # rows from the head down, columns from R or from A, and places along a ray
    rows = 40
    columns = 36
    up = centre[2] + extent[2] * falling(rows)
    side = centre[across] + extent[across] * falling(columns)
    step = patient.spacing[ray] / 2
    half = extent[ray] / 2
    along = np.arange(step / 2 - half, half, step)
    along = centre[ray] + along
    z, s, a = np.meshgrid(up, side, along, indexing="ij")
    points = np.zeros((3, *z.shape))
    points[2] = z
    points[across] = s
    points[ray] = a

    # from the world to voxels
    offsets = points - origin[:, None, None, None]
    index = np.einsum("ij,j...->i...", np.linalg.inv(rotation), offsets)
    hu = np.clip(patient.hu, -1000, 3000)
    sampled = map_coordinates(hu, index, order=1, mode="nearest")
    mu = 0.0193 * (1 + sampled / 1000)
    expected = (mu * step).sum(-1)

    image = project(patient.volume, patient.mm, view)
    image = resize(image, (rows, columns))[0, 0]
    image = image.numpy()
    correlation = np.corrcoef(image.ravel(), expected.ravel())
    difference = np.abs(image - expected)
    assert correlation[0, 1] > 0.995
    assert difference.mean() < 0.02 * expected.mean()


def test_gradient_reaches_every_voxel(patient):
    volume = patient.volume.requires_grad_()
    total = sum(project(volume, patient.mm, view).sum() for view in VIEWS)
    total.backward()
    assert (volume.grad > 0).all()


def test_patient_lies_as_a_radiograph_shows_him():
    """A marker at the patient's right, in front, near the head."""
    # x runs to the right, y to the front, z to the head
    hu = np.full((20, 24, 28), -1000.0)
    hu[18, 21, 26] = 3000

    # 1 = 20 - 1 - 18 from the right; 2 = 24 - 1 - 21 from the front
    for view, column in (("pa", 1), ("lat", 2)):
        image = project(as_input(hu), torch.ones(1, 3), view)[0, 0]
        brightest = int(image.argmax())
        assert divmod(brightest, image.shape[1]) == (1, column), view


@pytest.mark.parametrize("turn", ["LPS", "SAR", "IPL", "ASR"])
def test_file_orientation_makes_no_difference(cascade_data, tmp_path, turn):
    """The same patient in another order and direction of axes: the same volume, the same images."""
    path = cascade_data / "patient_0002" / "patient_0002.nii.gz"
    image = nibabel.load(path)
    start = nibabel.orientations.io_orientation(image.affine)
    wanted = nibabel.orientations.axcodes2ornt(tuple(turn))
    turned = image.as_reoriented(nibabel.orientations.ornt_transform(start, wanted))
    nibabel.save(turned, tmp_path / "turned.nii.gz")
    assert nibabel.aff2axcodes(turned.affine) == tuple(turn)

    hu, affine = read_ct(tmp_path / "turned.nii.gz")
    expected, expected_affine = read_ct(path)
    assert np.array_equal(hu, expected)
    assert np.allclose(affine, expected_affine)


def test_real_lengths_whatever_the_voxels(patient):
    """The same body on a coarser grid: the same line integrals."""
    fine = project(patient.volume, patient.mm, "lat")
    half = resize(patient.volume, (8, 8, 8))
    extent = np.array(patient.hu.shape) * patient.spacing
    spacing = torch.tensor([extent.tolist()]) / 8
    coarse = project(half, spacing, "lat")
    fine = resize(fine, (8, 8))
    assert torch.allclose(fine, coarse, atol=1e-4)
    difference = half.mean() - patient.volume.mean()
    assert abs(float(difference)) < 1e-6


def test_lift_goes_back_along_the_view_s_own_rays(patient):
    volume = patient.volume
    for view, axis in (("pa", 3), ("lat", 2)):
        image = project(volume, patient.mm, view)
        lifted = lift(image, view, patient.hu.shape)
        assert lifted.shape == volume.shape
        # the same all along the ray, and each ray its own pixel's value
        first = lifted.narrow(axis, 0, 1)
        assert (lifted == first).all()
        seen = as_image(first.squeeze(axis))
        assert torch.equal(seen, image)


def test_back_projection_of_a_uniform_block():
    water = torch.full((1, 1, 6, 8, 10), -0.5)
    spacing = torch.tensor([[2.0, 3.0, 4.0]])
    integrals = [project(water, spacing, view) for view in VIEWS]
    frontal, lateral = integrals
    assert np.allclose(frontal.numpy(), 0.0193 * 24)
    assert np.allclose(lateral.numpy(), 0.0193 * 12)
    assert torch.allclose(back_project(integrals, spacing, (6, 8, 10)), water, atol=1e-5)


def test_rendered_file_has_square_pixels_and_fixed_greys(patient):
    image = render_drr(patient.hu, patient.spacing, "pa")
    extent = np.array(patient.hu.shape) * patient.spacing
    width, _, height = extent
    rows, columns = image.shape
    assert max(rows, columns) == 512
    assert rows / columns == pytest.approx(height / width, abs=0.01)

    largest = float(project(patient.volume, patient.mm, "pa").max())
    brightest = image.max() / 255 * P_MAX
    assert brightest == pytest.approx(largest, rel=0.05)


def test_figures_name_their_columns():
    """Above the first row, also where that has no image in a column; all images of a column have one window."""
    slices = [np.zeros((4, 4))] * 3
    columns = [*SLICES, Column("PA projection", 0.0, 7.0), Column("PA: less X-ray", -0.5, 0.5)]
    rows = [
        Row("X-rays", [None, None, None, np.eye(4)]),
        Row("true CT", [*slices, np.eye(4) * 7, np.eye(4) * 9]),
    ]
    figure = draw_rows("one patient", columns, rows)
    axes = figure.axes
    titles = [cell.get_title() for cell in axes]
    names = [cell.get_ylabel() for cell in axes[::5]]
    assert titles == [column.title for column in columns] + [""] * 5
    assert names == ["X-rays", "true CT"]
    assert titles[:4] == ["axial", "coronal", "sagittal", "PA projection"]

    windows = [cell.images[0].get_clim() for cell in axes if cell.images]
    assert windows == [(0, 7), (-1, 0), (-1, 0), (-1, 0), (0, 7), (-0.5, 0.5)]
