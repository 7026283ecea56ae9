"""The projector of the cascade: the geometry, against NumPy and a renderer of another kind."""

import nibabel
import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates

from tasks.cascade import projector as drr
from tasks.cascade.files import read_ct
from tasks.cascade.report import SLICES, Row, draw_rows


@pytest.fixture(scope="module")
def patient(cascade_data):
    """(HU in RAS+ order, its affine, spacing) of one patient."""
    hu, affine = read_ct(cascade_data / "patient_0001" / "patient_0001.nii.gz")
    return hu, affine, np.sqrt((affine[:3, :3] ** 2).sum(0))


def as_input(hu: np.ndarray) -> torch.Tensor:
    return drr.normalise(torch.from_numpy(hu.astype(np.float32)))[None, None]


def test_hu_scale():
    hu = torch.tensor([-2000.0, -1000.0, 0.0, 1000.0, 3000.0, 9000.0])
    assert drr.normalise(hu).tolist() == [-1, -1, -0.5, 0, 1, 1]
    assert drr.to_hu(drr.normalise(hu))[1:5].tolist() == [-1000, 0, 1000, 3000]
    assert np.allclose(drr.attenuation(torch.tensor([-1.0, -0.5])).numpy(), [0, 0.0193])  # air, water


@pytest.mark.parametrize(("view", "axis"), [("pa", 1), ("lat", 0)])
def test_projection_is_a_line_integral(patient, view, axis):
    hu, _, spacing = patient
    mu = 0.0193 * (1 + np.clip(hu, -1000, 3000).astype(np.float64) / 1000)
    integral = mu.sum(axis) * spacing[axis]
    expected = integral.T[::-1, ::-1]  # head up; from the right, or from the front
    found = drr.project(as_input(hu), torch.tensor([spacing.tolist()]), view)[0, 0].numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5 * expected.max()


@pytest.mark.parametrize("view", drr.VIEWS)
def test_independent_renderer_in_the_world(patient, view):
    """Rays marched through the world in mm, by the file's affine and scipy's interpolation, in half-voxel steps."""
    hu, affine, spacing = patient
    extent = np.array(hu.shape) * spacing
    centre = affine[:3, :3] @ ((np.array(hu.shape) - 1) / 2) + affine[:3, 3]
    rows, columns = 40, 36
    ray, across = (1, 0) if view == "pa" else (0, 1)
    up = centre[2] + extent[2] * (0.5 - (np.arange(rows) + 0.5) / rows)  # from the head down
    side = centre[across] + extent[across] * (0.5 - (np.arange(columns) + 0.5) / columns)  # from R, or from A
    step = spacing[ray] / 2
    along = centre[ray] + np.arange(-extent[ray] / 2 + step / 2, extent[ray] / 2, step)
    z, s, a = np.meshgrid(up, side, along, indexing="ij")
    points = np.zeros((3, *z.shape))
    points[2], points[across], points[ray] = z, s, a
    index = np.einsum("ij,j...->i...", np.linalg.inv(affine[:3, :3]), points - affine[:3, 3, None, None, None])
    sampled = map_coordinates(np.clip(hu, -1000, 3000), index, order=1, mode="nearest")
    expected = (0.0193 * (1 + sampled / 1000) * step).sum(-1)
    found = drr.project(as_input(hu), torch.tensor([spacing.tolist()]), view)
    found = drr.resize(found, (rows, columns))[0, 0].numpy()
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.995
    assert np.abs(found - expected).mean() < 0.02 * expected.mean()


def test_gradient_reaches_every_voxel(patient):
    hu, _, spacing = patient
    volume = as_input(hu).requires_grad_()
    sum(drr.project(volume, torch.tensor([spacing.tolist()]), view).sum() for view in drr.VIEWS).backward()
    assert (volume.grad > 0).all()


def test_patient_lies_as_a_radiograph_shows_him():
    """A marker at the patient's right, in front, near the head."""
    hu = np.full((20, 24, 28), -1000.0)
    hu[18, 21, 26] = 3000  # x runs to the right, y to the front, z to the head
    for view, column in (("pa", 1), ("lat", 2)):  # 1 = 20 - 1 - 18 from the right; 2 = 24 - 1 - 21 from the front
        picture = drr.project(as_input(hu), torch.ones(1, 3), view)[0, 0]
        row, place = np.unravel_index(int(picture.argmax()), picture.shape)
        assert (row, place) == (1, column), view


@pytest.mark.parametrize("turn", ["LPS", "SAR", "IPL", "ASR"])
def test_file_orientation_makes_no_difference(cascade_data, tmp_path, turn):
    """The same patient in another order and direction of axes: the same volume, the same pictures."""
    image = nibabel.load(cascade_data / "patient_0002" / "patient_0002.nii.gz")
    start = nibabel.orientations.io_orientation(image.affine)
    wanted = nibabel.orientations.axcodes2ornt(tuple(turn))
    turned = image.as_reoriented(nibabel.orientations.ornt_transform(start, wanted))
    nibabel.save(turned, tmp_path / "turned.nii.gz")
    assert nibabel.aff2axcodes(turned.affine) == tuple(turn)
    hu, affine = read_ct(tmp_path / "turned.nii.gz")
    expected, affine_before = read_ct(cascade_data / "patient_0002" / "patient_0002.nii.gz")
    assert np.array_equal(hu, expected)
    assert np.allclose(affine, affine_before)


def test_real_lengths_whatever_the_voxels(patient):
    """The same body on a coarser grid: the same line integrals."""
    hu, _, spacing = patient
    fine = drr.project(as_input(hu), torch.tensor([spacing.tolist()]), "lat")
    half = drr.resize(as_input(hu), (8, 8, 8))
    extent = torch.tensor([(np.array(hu.shape) * spacing).tolist()])
    coarse = drr.project(half, extent / 8, "lat")
    assert torch.allclose(drr.resize(fine, (8, 8)), coarse, atol=1e-4)
    assert abs(float(half.mean() - as_input(hu).mean())) < 1e-6


def test_lift_goes_back_along_the_view_s_own_rays(patient):
    hu, _, spacing = patient
    volume, spaces = as_input(hu), torch.tensor([spacing.tolist()], dtype=torch.float32)
    for view, axis in (("pa", 3), ("lat", 2)):
        picture = drr.project(volume, spaces, view)
        lifted = drr.lift(picture, view, hu.shape)
        assert lifted.shape == volume.shape
        assert (lifted == lifted.narrow(axis, 0, 1)).all()  # the same all along the ray
        assert torch.equal(drr.as_image(lifted.select(axis, 0)), picture)  # and each ray its own pixel's value


def test_back_projection_of_a_uniform_block():
    volume = torch.full((1, 1, 6, 8, 10), -0.5)  # water
    spacing = torch.tensor([[2.0, 3.0, 4.0]])
    integrals = [drr.project(volume, spacing, view) for view in drr.VIEWS]
    assert np.allclose(integrals[0].numpy(), 0.0193 * 24)
    assert np.allclose(integrals[1].numpy(), 0.0193 * 12)
    assert torch.allclose(drr.back_project(integrals, spacing, (6, 8, 10)), volume, atol=1e-5)


def test_rendered_file_has_square_pixels_and_fixed_greys(patient):
    hu, _, spacing = patient
    picture = drr.render_drr(hu, spacing, "pa")
    width, height = hu.shape[0] * spacing[0], hu.shape[2] * spacing[2]
    assert max(picture.shape) == 512
    assert abs(picture.shape[0] / picture.shape[1] - height / width) < 0.01
    integral = drr.project(as_input(hu), torch.tensor([spacing.tolist()]), "pa")[0, 0]
    assert abs(picture.max() / 255 * drr.P_MAX - float(integral.max())) < 0.05 * float(integral.max())


def test_figures_name_their_columns():
    """Above the first row, also where that has no image in a column; X-rays keep their own grey values."""
    slices, xrays = [np.zeros((4, 4))] * 3, [np.full((4, 4), -1.0), np.eye(4)]
    columns = [*SLICES, "frontal projection", "lateral projection"]
    rows = [Row("input X-rays", [None, None, None, *xrays], grey_values=True)]
    rows.append(Row("true CT", [*slices, np.eye(4) * 7, np.eye(4) * 9]))
    figure = draw_rows("one patient", columns, rows)
    assert [axes.get_title() for axes in figure.axes] == columns + [""] * 5
    assert [axes.get_ylabel() for axes in figure.axes[::5]] == ["input X-rays", "true CT"]
    assert [axes.images[0].get_clim() for axes in figure.axes[3:5]] == [(-1, -1), (-1, 1)]
    assert [axes.images[0].get_clim() for axes in figure.axes[8:]] == [(0, 7), (0, 9)]
