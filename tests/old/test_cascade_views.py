"""Views as data: what --views takes, and the projector's oblique rays and cone beams beside formulas in NumPy."""

import importlib.util
import json
import shutil
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, records

from old.cli_utils import InputError
from tasks.cascade import rays
from tasks.cascade.projector import MU_WATER, attenuation, back_project, grey_values, lift, normalise, project
from tasks.cascade.projector import project_back, render_drr, resize, sum_rays, to_hu
from tasks.cascade.views import LAT, LIBRARY, PA, View, as_view, view_list, views_of, wrong_extent

CASCADE = str(ROOT / "train_accelerate.py")
with_library = pytest.mark.skipif(
    importlib.util.find_spec("nanodrr") is None,
    reason="nanodrr is not installed: pip install -r requirements-cone.txt",
)

DETECTOR = {"source_distance": 900.0, "detector_distance": 250.0, "rows": 48, "columns": 40, "spacing": 5.0}
CONE_PA = View("pa", 0.0, **DETECTOR)
CONE_LAT = View("lat", 90.0, **DETECTOR)
CONE_OBLIQUE = View("obl", 40.0, **DETECTOR)
OBLIQUE = View("par30", 30.0)
FROM_THE_FRONT = View("ap", 180.0)
SUMMED = [PA, LAT]
CAST = [CONE_PA, CONE_LAT, CONE_OBLIQUE, OBLIQUE, FROM_THE_FRONT]


def name_of(view: View) -> str:
    """What pytest calls a view."""
    return view.name if view.parallel else f"{view.name}-cone"


def over(views: list) -> pytest.MarkDecorator:
    """The decorator of a test of several views."""
    return pytest.mark.parametrize("view", views, ids=name_of)


cast_here = [pytest.param(view, marks=with_library) for view in CAST]
every_view = over(SUMMED + cast_here)
every_view_without_library = over(SUMMED + CAST)
every_cast_view = over(cast_here)
every_summed_view = over(SUMMED)

# an odd grid of unequal voxels
SIZE = (18, 22, 26)
SPACING = torch.tensor([[7.0, 6.0, 5.0], [6.0, 8.0, 4.0]])
EXTENT = SPACING * torch.tensor(SIZE)


def random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Gaussian numbers that are the same in each run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def inner(first: torch.Tensor, second: torch.Tensor) -> float:
    """The inner product, summed in float64."""
    products = first.double() * second.double()
    return products.sum().item()


def random_volumes(count: int, seed: int = 0) -> torch.Tensor:
    """(count, 1, X, Y, Z) of Gaussian numbers."""
    return random((count, 1, *SIZE), seed)


# --- a second description of the geometry, in NumPy -------------------------------------------------------------------


class Directions(NamedTuple):
    """Unit vectors along a view's rays, and along its image's columns and rows."""

    rays: np.ndarray
    columns: np.ndarray
    rows: np.ndarray


def directions(view: View) -> Directions:
    """As the view's page says them: seen from the detector, facing the source, the head up."""
    angle = np.deg2rad(view.angle)
    along_rays = np.array([-np.sin(angle), np.cos(angle), 0])
    up = np.array([0, 0, 1.0])
    gaze = -along_rays
    to_the_right = np.cross(gaze, up)
    return Directions(along_rays, to_the_right, -up)


def middles(count: int, length: float) -> np.ndarray:
    """The centres of so many cells on a length whose middle is 0."""
    places = (np.arange(count) + 0.5) / count
    return (places - 0.5) * length


def grid_points(size: tuple[int, ...], extent: np.ndarray) -> np.ndarray:
    """(X, Y, Z, 3) mm of the voxels' centres."""
    x, y, z = map(middles, size, extent)
    axes = np.meshgrid(x, y, z, indexing="ij")
    return np.stack(axes, -1)


def shadow_of(view: View, points: np.ndarray) -> np.ndarray:
    """(..., 2) mm (column, row) from the detector's middle where the rays through points (..., 3) meet it."""
    axes = directions(view)
    column = points @ axes.columns
    row = points @ axes.rows
    flat = np.stack([column, row], -1)
    if view.parallel:
        return flat
    to_point = view.source_distance + points @ axes.rays
    to_detector = view.source_distance + view.detector_distance
    magnification = to_detector / to_point
    return flat * magnification[..., None]


def image_sides(view: View, extent: np.ndarray) -> np.ndarray:
    """(2,) mm of an image's width and height."""
    if not view.parallel:
        pixels = np.array([view.columns, view.rows])
        return pixels * view.spacing
    # the shadow of the field of view
    corners = np.array([[1, 1, 0], [1, -1, 0], [-1, 1, 0], [-1, -1, 0]]) * extent
    across = corners @ directions(view).columns
    return np.array([across.max(), extent[2]])


class Ball(NamedTuple):
    """A ball of water in air: its centre (3,) and radius in mm, the grid, and the field of view (3,) in mm."""

    centre: np.ndarray
    radius: float
    size: tuple[int, int, int]
    extent: np.ndarray

    @property
    def spacing(self) -> torch.Tensor:
        """(1, 3) as the projector takes it."""
        mm = self.extent / self.size
        return torch.tensor([mm.tolist()])

    def volume(self) -> torch.Tensor:
        """(1, 1, X, Y, Z) in -1..1, each voxel the mean of 4 x 4 x 4 points."""
        fine = tuple(4 * side for side in self.size)
        offset = grid_points(fine, self.extent) - self.centre
        inside = np.linalg.norm(offset, axis=-1) < self.radius
        share = torch.from_numpy(inside.astype(np.float32))
        share = resize(share[None, None], self.size)
        return normalise(share * 1000 - 1000)

    def integrals(self, view: View, shape: tuple[int, int]) -> np.ndarray:
        """(rows, columns) line integrals by the formula of a chord."""
        axes = directions(view)
        width, height = image_sides(view, self.extent)
        column = middles(shape[1], width)[None, :, None] * axes.columns
        row = middles(shape[0], height)[:, None, None] * axes.rows
        place = column + row

        # from where each pixel's ray comes, and where it goes
        start = place
        along = np.broadcast_to(axes.rays, place.shape)
        if not view.parallel:
            start = -view.source_distance * axes.rays
            along = place + view.detector_distance * axes.rays - start
            along = along / np.linalg.norm(along, axis=-1, keepdims=True)

        # the nearest point to the centre
        offset = self.centre - start
        ahead = (offset * along).sum(-1, keepdims=True)
        distance = np.linalg.norm(offset - ahead * along, axis=-1)
        half_chord = np.sqrt(np.clip(self.radius**2 - distance**2, 0, None))
        return MU_WATER * 2 * half_chord


# --- the operators ----------------------------------------------------------------------------------------------------


@every_view
def test_project_back_is_the_transpose(view):
    """<Px, y> = <x, P'y>."""
    x = random((2, 3, *SIZE))
    projection = sum_rays(x, SPACING, view)
    y = random(projection.shape, seed=1)
    back = project_back(y, SPACING, view, SIZE)
    assert back.shape == x.shape

    difference = abs(inner(projection, y) - inner(x, back))
    size = (projection.norm() * y.norm()).item()
    assert difference <= 1e-5 * abs(inner(projection, y))
    assert difference <= 1e-6 * size


@every_view
def test_projection_is_affine(view):
    """A change of the volume adds its sums along the rays, and air projects to nothing."""
    volume = random_volumes(2) / 4 - 0.5
    change = random_volumes(2, seed=1) / 4
    before = project(volume, SPACING, view)
    after = project(volume + change, SPACING, view)
    added = sum_rays(change, SPACING, view)
    rounding = 1e-5 * before.abs().max()
    assert torch.allclose(after, before + added, atol=rounding)

    whole = sum_rays(volume + 1, SPACING, view)
    assert torch.allclose(before, whole, atol=rounding)
    air = torch.full_like(volume, -1)
    assert project(air, SPACING, view).abs().max() < 1e-6


@every_view
def test_gradients_are_the_operators(view):
    """Of the projection: project_back. Of project_back: the sums along the rays."""
    volume = random_volumes(2).requires_grad_()
    projection = project(volume, SPACING, view)
    weights = random(projection.shape, seed=1).requires_grad_()
    (gradient,) = torch.autograd.grad(projection, volume, weights, create_graph=True)
    expected = project_back(weights, SPACING, view, SIZE)
    assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-4)

    direction = random_volumes(2, seed=2)
    (second,) = torch.autograd.grad(expected, weights, direction)
    sums = sum_rays(direction, SPACING, view)
    assert torch.allclose(second, sums, rtol=1e-4, atol=1e-4)


@every_view
def test_each_patient_has_an_extent_of_its_own(view):
    volume = random_volumes(2)
    together = project(volume, SPACING, view)
    image = random(together.shape, seed=1)
    backs = project_back(image, SPACING, view, SIZE)
    lifted = lift(image, view, SIZE, EXTENT)
    for one in (slice(0, 1), slice(1, 2)):
        alone = project(volume[one], SPACING[one], view)
        back_alone = project_back(image[one], SPACING[one], view, SIZE)
        lifted_alone = lift(image[one], view, SIZE, EXTENT[one])
        assert torch.equal(together[one], alone)
        assert torch.equal(backs[one], back_alone)
        assert torch.equal(lifted[one], lifted_alone)

    # the same grid of another size is another body
    other = project(volume, SPACING.flip(0), view)
    assert not torch.allclose(together, other, rtol=0.05)


@every_cast_view
def test_precision_and_memory_change_nothing(view, monkeypatch):
    volume = random_volumes(1)
    spacing = SPACING[:1]
    expected = project(volume, spacing, view)
    image = random(expected.shape, seed=1)
    back = project_back(image, spacing, view, SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        half_image = project(volume, spacing, view)
        half_back = project_back(image, spacing, view, SIZE)
        half_lifted = lift(image, view, SIZE, EXTENT[:1])
    assert torch.equal(half_image, expected)
    assert torch.equal(half_back, back)
    assert torch.equal(half_lifted, lift(image, view, SIZE, EXTENT[:1]))

    # three rows at a time
    columns = expected.shape[-1]
    monkeypatch.setattr(rays, "MOST_POINTS", 3 * columns * rays.points_per_ray(SIZE))
    blocks = rays.row_blocks(SIZE, expected.shape[-2:], on_gpu=False)
    assert len(blocks) > 5
    in_blocks = project(volume, spacing, view)
    back_in_blocks = project_back(image, spacing, view, SIZE)
    assert torch.allclose(in_blocks, expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(back_in_blocks, back, rtol=1e-4, atol=1e-4)


# --- where rays run ---------------------------------------------------------------------------------------------------


def a_ball() -> Ball:
    """A ball off the middle."""
    return Ball(
        centre=np.array([22.0, -30.0, 25.0]),
        radius=36.0,
        size=(40, 44, 48),
        extent=np.array([160.0, 176.0, 192.0]),
    )


@every_cast_view
def test_ball_in_the_beam(view):
    """The lengths of the rays within a ball, by the formula of a chord."""
    ball = a_ball()
    image = project(ball.volume(), ball.spacing, view)[0, 0].numpy()
    assert image.shape == rays.image_shape(view, ball.size)
    expected = ball.integrals(view, image.shape)

    # the voxels blur the ball's edge
    pair = np.stack([image.ravel(), expected.ravel()])
    assert np.corrcoef(pair)[0, 1] > 0.998
    difference = np.abs(image - expected)
    assert difference.mean() < 0.005 * expected.max()
    assert image.max() == pytest.approx(expected.max(), rel=0.01)


def centre_of_shadow(across: float, depth: float) -> float:
    """The mean column, in mm, of the shadow of a small ball at x = across, y = depth in the cone's pa view."""
    centre = np.array([across, depth, 0])
    ball = Ball(centre, 12.0, (48, 48, 48), np.full(3, 240.0))
    image = project(ball.volume(), ball.spacing, CONE_PA)[0, 0].numpy()
    profile = image.sum(0)
    places = middles(len(profile), CONE_PA.columns * CONE_PA.spacing)
    return profile @ places / profile.sum()


@with_library
@pytest.mark.parametrize("depth", [-80, 0, 80])
def test_magnification(depth):
    """Two small balls beside each other lie farther apart on the detector, by source-detector over source-object."""
    right = centre_of_shadow(60, depth)
    left = centre_of_shadow(-60, depth)
    # columns begin at the patient's right, which has the larger x
    assert left - right == pytest.approx(120 * 1150 / (900 + depth), rel=0.005)


@with_library
@every_summed_view
def test_far_source_is_parallel(view):
    size = (24, 28, 32)
    spacing = torch.full((1, 3), 5.0)
    volume = resize(random((1, 1, 6, 7, 8)), size).clamp(-1, 1)
    expected = project(volume, spacing, view)
    rows, columns = expected.shape[-2:]
    far = View("far", view.angle, 2e5, 0.0, rows, columns, 5.0)
    image = project(volume, spacing, far)
    pair = np.stack([image.numpy().ravel(), expected.numpy().ravel()])
    assert np.corrcoef(pair)[0, 1] > 0.9999
    assert (image - expected).norm() < 0.004 * expected.norm()

    # and the library's own parallel rays
    cast = rays.ray_sums(attenuation(volume), spacing, view, (rows, columns))
    assert (cast - expected).norm() < 0.004 * expected.norm()


@every_view_without_library
def test_lift_takes_the_pixel_that_a_voxel_s_ray_meets(view):
    """An image whose values are the places of its pixels: each voxel gets the place that a formula gives it."""
    extent = EXTENT[0].numpy().astype(np.float64)
    sides = image_sides(view, extent)
    rows, columns = rays.image_shape(view, SIZE)
    column = middles(columns, sides[0])
    row = middles(rows, sides[1])
    places = np.stack(np.meshgrid(column, row))
    image = torch.from_numpy(places).float()
    lifted = lift(image[None], view, SIZE, EXTENT[:1])

    # beyond the centres of the outermost pixels it is the edge's
    expected = shadow_of(view, grid_points(SIZE, extent))
    largest = np.array([column.max(), row.max()])
    expected = np.clip(expected, -largest, largest)
    difference = lifted[0].numpy() - np.moveaxis(expected, -1, 0)
    assert np.abs(difference).max() < 1e-3


@every_view
def test_lift_and_project_agree(view):
    """A blob alone in the air: the lifted projection is largest along the ray through it, and nowhere else."""
    points = grid_points(SIZE, EXTENT[0].numpy())
    for voxel in ((4, 6, 7), (9, 11, 13), (14, 17, 19)):
        squares = np.square(points - points[voxel]).sum(-1)
        blob = torch.from_numpy(np.exp(-squares / 2 / 12**2)).float()
        image = project(blob[None, None] - 1, SPACING[:1], view)
        lifted = lift(image, view, SIZE, EXTENT[:1])[0, 0]
        assert lifted[voxel] > 0.95 * image.max()

        # within a sigma of it, magnified
        brightest = (lifted > 0.7 * lifted.max()).nonzero().numpy()
        shadows = shadow_of(view, points[tuple(brightest.T)])
        distance = np.linalg.norm(shadows - shadow_of(view, points[voxel]), axis=1)
        assert len(distance) >= 5
        assert distance.max() < 12 * 1.4


@pytest.mark.parametrize("view", [LAT, CONE_OBLIQUE, OBLIQUE], ids=name_of)
def test_lift_takes_all_pixels_of_a_fine_image(view):
    """A fine chequered image is grey to the voxels."""
    rows, columns = rays.image_shape(view, SIZE)
    row = torch.arange(4 * rows)[:, None]
    squares = (row + torch.arange(4 * columns)) % 2
    lifted = lift(squares[None, None].float(), view, SIZE, EXTENT[:1])
    assert torch.allclose(lifted, torch.full((1, 1, *SIZE), 0.5), atol=1e-4)


def test_gradient_of_lift_has_a_fixed_order():
    gradients = []
    for _ in range(2):
        image = random((2, 3, 30, 20)).requires_grad_()
        lifted = lift(image, CONE_OBLIQUE, SIZE, EXTENT)
        lifted.backward(random(lifted.shape, seed=1))
        gradients.append(image.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert (gradients[0] != 0).float().mean() > 0.3


@with_library
def test_back_projection_of_a_uniform_block():
    """Water all over: each ray's mean attenuation is water's, whatever the views."""
    water = torch.full((2, 1, *SIZE), -0.5)
    views = [CONE_PA, OBLIQUE, CONE_LAT, LAT]
    integrals = [project(water, SPACING, view) for view in views]
    back = back_project(integrals, SPACING, SIZE, views)
    inside = back[:, :, 4:-4, 4:-4, 4:-4]
    assert (inside + 0.5).abs().max() < 0.02

    # a picture is not black where rays miss the body
    brighter = [image + 0.01 for image in integrals]
    assert back_project(brighter, SPACING, SIZE, views).max() < -0.3


@with_library
def test_rendered_files():
    """A cone's file has its detector's pixels, an oblique one square pixels over the shadow."""
    ball = a_ball()
    hu = to_hu(ball.volume())[0, 0].numpy()
    spacing = ball.extent / ball.size
    image = render_drr(hu, spacing, CONE_OBLIQUE)
    assert image.shape == (48, 40)
    expected = torch.from_numpy(ball.integrals(CONE_OBLIQUE, image.shape))
    greys = grey_values(expected).numpy() * 255
    assert np.abs(image - greys).mean() < 0.5
    smaller = render_drr(hu, spacing, CONE_OBLIQUE, longest=24)
    assert smaller.shape == (24, 20)

    flat = render_drr(hu, spacing, OBLIQUE, longest=200)
    width = 160 * np.cos(np.pi / 6) + 176 / 2
    assert flat.shape == (round(192 / width * 200), 200)


# --- the library that is not there ------------------------------------------------------------------------------------


def test_without_the_library(monkeypatch):
    """One line with the version to install; parallel pa and lat do without."""
    monkeypatch.setitem(sys.modules, "nanodrr", None)
    monkeypatch.setitem(sys.modules, "nanodrr.data", None)
    volume = random_volumes(1)
    for view in CAST:
        with pytest.raises(InputError, match=f"^--views: .*not installed.*; pip install {LIBRARY}$"):
            project(volume, SPACING[:1], view)
    with pytest.raises(InputError, match="pip install"):
        rays.check_views((PA, CONE_LAT), on_gpu=False)
    rays.check_views((PA, LAT), on_gpu=True)
    image = project(volume, SPACING[:1], PA)
    lifted = lift(image, CONE_PA, SIZE, EXTENT[:1])
    assert lifted.shape == volume.shape

    pins = (ROOT / "requirements-cone.txt").read_text().split("\n")
    assert LIBRARY in pins


@with_library
def test_gradients_without_order_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    rays.check_views((CONE_PA,), on_gpu=False)
    with pytest.raises(InputError, match=r"^--deterministic: .*\(view pa\); leave it out"):
        rays.check_views((CONE_PA,), on_gpu=True)


# --- --views ----------------------------------------------------------------------------------------------------------


def test_views_as_the_config_says_them():
    cone = {"name": "obl45", "angle": 45, **DETECTOR}
    lateral = {"name": "lat", "angle": -270}
    settings = view_list(json.dumps(["pa", lateral, cone]))
    saved = json.loads(json.dumps(settings))
    views = views_of(saved)
    assert views == (PA, View("lat", -270.0), View("obl45", 45.0, **DETECTOR))
    assert [view.ray_axis for view in views] == [1, 0, None]
    assert as_view("lat") == LAT
    assert view_list(json.dumps(settings)) == settings


def cone(**changes) -> list[dict]:
    return [{"name": "obl", "angle": 45, **DETECTOR, **changes}]


WRONG = [
    # the list
    ("[", "not valid JSON"),
    ("{}", "must be a list of 1 to 4 views"),
    ("[]", "must be a list of 1 to 4 views"),
    ([{"name": f"v{k}", "angle": k} for k in range(5)], "must be a list of 1 to 4 views"),
    # keys
    ([3], "view 1: 3 must be a view such as"),
    (["pa", {"name": "lat", "angel": 90}], "view 2: unknown key 'angel', did you mean 'angle'"),
    ([{"title": "pa"}], "view 1: unknown key 'title', it has name, angle"),
    # names
    ([{"angle": 3}], "view 1: name None must be of small letters"),
    ([{"name": "a_b", "angle": 3}], "view 1: name 'a_b' must be of small letters"),
    (["frontal"], "the name 'frontal' ends other views' files"),
    (["pa", "pa"], "view 2: the name 'pa' is taken"),
    # angles
    ([{"name": "obl"}], "'obl' has no angle, in degrees"),
    ('[{"name": "obl", "angle": NaN}]', "angle nan must be a number of degrees"),
    ([{"name": "obl", "angle": True}], "angle True must be a number of degrees"),
    # source and detector
    ([{"name": "obl", "angle": 45, "rows": 8}], "rows is of a cone beam; give source_distance too"),
    (cone(spacing=None), "a cone beam needs spacing too"),
    (cone(rows=8.5), "rows 8.5 must be a whole number from 8 to 8192"),
    (cone(columns=4), "columns 4 must be a whole number from 8 to 8192"),
    (cone(source_distance=-900), "source_distance -900 must be a number from 1 to 1e"),
    (cone(detector_distance="250"), "detector_distance '250' must be a number from 0 to 1e"),
]


@pytest.mark.parametrize(("value", "message"), WRONG)
def test_wrong_views(value, message):
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(ArgumentTypeError) as error:
        view_list(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_source_and_detector_lie_outside_the_patient():
    assert wrong_extent(PA, (5000, 5000, 5000)) == ""
    assert wrong_extent(CONE_PA, (4000, 490, 4000)) == ""
    assert "the detector of view 'pa' lies 250 mm" in wrong_extent(CONE_PA, (300, 510, 300))
    assert "inside a field of view 1900 mm deep" in wrong_extent(CONE_PA, (300, 1900, 300))
    assert "the source of view 'lat' lies 900 mm" in wrong_extent(CONE_LAT, (1900, 300, 300))


def test_the_command_line_is_parsed_without_torch():
    words = "import sys, tasks.cascade.views; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- runs -------------------------------------------------------------------------------------------------------------

# two cones and an oblique view of rays that are parallel
THREE = [
    CONE_PA._asdict(),
    CONE_LAT._asdict(),
    {"name": "obl45", "angle": 45},
]
# what runs of three views are compared by
METRICS = (
    "train/loss",
    "val/psnr",
    "test/psnr",
    "test/psnr_backprojection",
    "test/projection_error_obl45",
)


@pytest.fixture
def start(zygote, cascade_flags, tmp_path):
    """start(name, flags, ranks): a small run into a folder of this name."""

    def start(name: str, flags: list, ranks: int = 1):
        words = cascade_flags(tmp_path / name, *flags)
        return zygote(CASCADE, words, ranks=ranks)

    return start


@pytest.fixture(scope="session")
def three_views(zygote, cascade_data, tmp_path_factory) -> list:
    """Flags of a set of CTs with three X-rays each, rendered by two processes."""
    folder = tmp_path_factory.mktemp("three") / "set"
    for ct in cascade_data.glob("*/*.nii.gz"):
        (folder / ct.parent.name).mkdir(parents=True)
        shutil.copy(ct, folder / ct.parent.name)
    views = ["--views", json.dumps(THREE)]
    done = zygote(CASCADE, "--make_drrs", folder, views, ranks=2)
    assert done.code == 0, done.stderr
    assert "39 pictures rendered" in done.stdout
    assert (folder / "patient_0001" / "patient_0001_obl45_drr.png").exists()
    return ["--dataset_path", str(folder), *views]


@with_library
def test_three_views_train_and_resume(start, three_views, tmp_path):
    """Of which two are cones: one process and two give the same, and so does a run that was stopped."""
    words = [*three_views, "--batch_size", "6"]

    def run(name: str, flags: list, ranks: int = 1, code: int = 0):
        done = start(name, flags, ranks)
        assert done.code == code, done.stdout[-2000:] + done.stderr[-2000:]
        return done

    run("one", words)
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    for view in ("pa", "lat", "obl45"):
        error = summary[f"test/projection_error_{view}"]
        assert error < 0.3 * summary[f"test/projection_error_{view}_mean_volume"]

    # two processes, and a run that was stopped
    run("two", [*three_views, "--batch_size", "3"], ranks=2)
    run("stopped", [*words, "--max_steps", "5"])
    run("stopped", [*words, "--resume_from", "auto"])
    lines = records(tmp_path / "one")
    for name in ("two", "stopped"):
        other = json.loads((tmp_path / name / "summary.json").read_text())
        for metric in METRICS:
            assert other[metric] == pytest.approx(summary[metric], rel=1e-5), metric
        assert len(records(tmp_path / name)) == len(lines)

    # a checkpoint knows its views
    best = ["--resume_from", tmp_path / "one" / "best.pt"]
    folder = three_views[1]
    run("eval", ["--dataset_path", folder, "--eval_only", *best], ranks=2)
    result = json.loads((tmp_path / "eval" / "eval_test.json").read_text())
    assert result["test/psnr"] == pytest.approx(summary["test/psnr"], rel=1e-5)
    refused = run("eval", ["--dataset_path", folder, "--views", '["pa", "lat"]', "--eval_only", *best], code=2)
    assert "a run with --views" in refused.stderr

    # X-rays alone
    alone = tmp_path / "alone"
    alone.mkdir()
    for image in Path(folder).glob("patient_0003/*.png"):
        shutil.copy(image, alone)
    done = run("sample", ["--sample", alone, *best])
    assert "1 volumes of 16 x 16 x 16" in done.stdout


def test_views_on_the_command_line(start):
    """One line for what does not go together, for a source inside a patient, and for a picture that is not there."""
    inside = [{**CONE_PA._asdict(), "source_distance": 100.0}]
    cases = [
        (["--views", '["pa", "lat"]', "--num_views", "1"], "--num_views 1: --views lists 2; leave out --num_views"),
        (["--views", '["pa", {"name": "obl45", "angle": 45}]'], "no obl45 picture (patient_0001_obl45_drr.png)"),
        (["--views", '["pa", {"name": "obl45"}]'], "view 2: 'obl45' has no angle, in degrees"),
    ]
    if importlib.util.find_spec("nanodrr"):
        cases[1:1] = [(["--views", json.dumps(inside)], "inside a field of view")]
    else:
        cases[1:1] = [(["--views", json.dumps(inside)], "pip install")]
    for flags, message in cases:
        done = start("run", flags)
        assert done.code == 2
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_the_two_parallel_views_are_those_of_num_views(start, tmp_path):
    settings = json.dumps([PA._asdict(), LAT._asdict()])
    flags_of = {"short": [], "long": ["--views", settings]}
    curves = []
    for name, flags in flags_of.items():
        done = start(name, ["--max_steps", "2", *flags])
        assert done.code == 0, done.stderr
        curves.append([line["train/loss"] for line in records(tmp_path / name) if "train/loss" in line])
    assert curves[0] == curves[1]
    assert len(curves[0]) == 2
