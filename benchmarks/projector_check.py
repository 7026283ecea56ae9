"""tasks/cascade/projector.py on a real CT, against NumPy and, where they are installed, nanodrr and DiffDRR.

    python benchmarks/projector_check.py CT.nii.gz [FOLDER]      # FOLDER: write each view as a PNG there, to look at
    pip install -r requirements-cone.txt                         # nanodrr: for all but parallel pa and lat
    pip install diffdrr                                          # a check only; nothing here needs it

NumPy: sums along the voxels where rays run along an axis, and else points along each ray in steps of a quarter voxel,
all in float64. nanodrr: by its own camera and reader, at eight points a voxel. DiffDRR: Siddon's exact lengths of rays
in voxels; its source stands 100 m away where ours is parallel.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tasks.cascade.views import LAT, PA, View, needs_library  # noqa: E402

# What water takes from the rays, per mm.
MU_WATER = 0.0193
# The distance of DiffDRR's source in mm where rays are parallel.
FAR = 1e5
# A C-arm's or a chest stand's distances, and a detector of 43 cm.
DETECTOR = {"rows": 512, "columns": 512, "spacing": 0.84}
STAND = {"source_distance": 1500.0, "detector_distance": 300.0, **DETECTOR}
ARM = {"source_distance": 700.0, "detector_distance": 400.0, **DETECTOR}
VIEWS = {
    "parallel pa": PA,
    "parallel lat": LAT,
    "parallel 45": View("par45", 45.0),
    "cone pa": View("stand-pa", 0.0, **STAND),
    "cone lat": View("stand-lat", 90.0, **STAND),
    "cone 45": View("arm45", 45.0, **ARM),
    "cone -30": View("arm330", -30.0, **ARM),
}
# The goals: correlation, and the adjoint's relative error.
LEAST_CORRELATION = 0.999
MOST_ADJOINT_ERROR = 1e-5


class Scan(NamedTuple):
    """A CT in HU (X, Y, Z), its affine, mm per voxel (3,), and its attenuation per mm in float64."""

    hu: np.ndarray
    affine: np.ndarray
    spacing: np.ndarray
    mu: np.ndarray

    @property
    def extent(self) -> np.ndarray:
        """(3,) mm of the field of view."""
        return self.spacing * self.hu.shape


class Detector(NamedTuple):
    """An image of a view: pixels, and mm of its sides."""

    rows: int
    columns: int
    width: float
    height: float


def read_scan(path: Path) -> Scan:
    """The CT of a file."""
    from tasks.cascade.files import read_ct

    hu, affine = read_ct(path)
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    # air lies at -1000 HU
    clipped = hu.astype(np.float64).clip(-1000, 3000)
    mu = MU_WATER * (1 + clipped / 1000)
    return Scan(hu, affine, spacing, mu)


def detector_of(view: View, scan: Scan, shape: tuple[int, int]) -> Detector:
    """The image of a view of a scan, of a shape in pixels."""
    rows, columns = shape
    if not view.parallel:
        return Detector(rows, columns, view.columns * view.spacing, view.rows * view.spacing)
    angle = np.deg2rad(view.angle)
    of_x = abs(np.cos(angle)) * scan.extent[0]
    of_y = abs(np.sin(angle)) * scan.extent[1]
    return Detector(rows, columns, float(of_x + of_y), float(scan.extent[2]))


# --- the referees -----------------------------------------------------------------------------------------------------


def sums_along_voxels(view: View, scan: Scan) -> np.ndarray:
    """The image of a parallel pa or lat view."""
    axis = {0.0: 1, 90.0: 0}[view.angle]
    integral = scan.mu.sum(axis) * scan.spacing[axis]
    # the head is up, and the first column is the patient's right side or front
    return np.rot90(integral, 2).T


def middles(count: int) -> np.ndarray:
    """The centres of so many pixels, from -1/2 to 1/2 between an image's edges."""
    return (np.arange(count) + 0.5) / count - 0.5


def points_along_rays(view: View, scan: Scan, detector: Detector) -> np.ndarray:
    """The image of any view, by interpolation in steps of a quarter voxel."""
    from scipy.ndimage import map_coordinates

    angle = np.deg2rad(view.angle)
    forward = np.array([-np.sin(angle), np.cos(angle), 0])
    right = np.array([-np.cos(angle), -np.sin(angle), 0])
    up = np.array([0, 0, 1.0])
    column = middles(detector.columns) * detector.width
    row = -middles(detector.rows) * detector.height
    places = column[None, :, None] * right + row[:, None, None] * up

    # from the middle of each ray, both ways
    middle = places
    along = np.broadcast_to(forward, places.shape)
    if not view.parallel:
        source = -view.source_distance * forward
        along = places + view.detector_distance * forward - source
        along = along / np.linalg.norm(along, axis=-1, keepdims=True)
        ahead = -(source * along).sum(-1, keepdims=True)
        middle = source + ahead * along

    # all rays at once, from end to end of the field of view
    step = scan.spacing.min() / 4
    reach = np.linalg.norm(scan.extent) / 2 + scan.spacing.max()
    centre = (np.array(scan.hu.shape) - 1) / 2
    total = np.zeros(places.shape[:2])
    for place in np.arange(-reach, reach, step):
        mm = middle + place * along
        voxels = mm / scan.spacing + centre
        voxels = np.moveaxis(voxels, -1, 0)
        total += map_coordinates(scan.mu, voxels, order=1, mode="grid-constant")
    return total * step


def by_nanodrr(view: View, scan: Scan, detector: Detector) -> np.ndarray | None:
    """The image by the library's own reader and camera; None where it is not installed."""
    try:
        from nanodrr.camera import make_k_inv, make_rt_inv
        from nanodrr.data import Subject
        from nanodrr.drr import render
        from torchio import ScalarImage
    except ImportError:
        return None
    import torch

    attenuation = torch.from_numpy(scan.mu[None]).float()
    image = ScalarImage(tensor=attenuation, affine=scan.affine)
    subject = Subject.from_images(image, max_label=0, convert_to_mu=False)
    source = 2000.0
    length = 4000.0
    if not view.parallel:
        source = view.source_distance
        length = source + view.detector_distance

    to_ray = make_k_inv(
        sdd=length,
        delx=detector.width / detector.columns,
        dely=detector.height / detector.rows,
        x0=0.0,
        y0=0.0,
        height=detector.rows,
        width=detector.columns,
    )

    # turned about the long axis, the source behind the patient
    camera = make_rt_inv(
        torch.tensor([[view.angle, 0.0, 0.0]]),
        torch.tensor([[0.0, -source, 0.0]]),
        orientation="PA",
        isocenter=subject.isocenter,
    )
    # as many rows and columns as the detector
    rendered = render(
        subject,
        to_ray,
        camera,
        torch.tensor([length]),
        detector.rows,
        detector.columns,
        n_samples=8 * (max(scan.hu.shape) + 1),
        orthographic=view.parallel,
    )
    return rendered[0, 0].numpy()


def by_diffdrr(view: View, scan: Scan, detector: Detector) -> np.ndarray | None:
    """The image by DiffDRR; None where it is not installed."""
    try:
        from diffdrr.data import read
        from diffdrr.drr import DRR
        from torchio import ScalarImage
    except ImportError:
        return None
    import torch

    hu = torch.from_numpy(scan.hu[None])
    subject = read(ScalarImage(tensor=hu, affine=scan.affine), orientation="PA")
    subject.density.set_data(torch.from_numpy(scan.mu[None]).float())
    source = FAR
    length = FAR + 1000
    # the shadow of a parallel view on the far detector
    larger = length / source
    if not view.parallel:
        source = view.source_distance
        length = source + view.detector_distance
        larger = 1.0

    renderer = DRR(
        subject,
        sdd=length,
        height=detector.rows,
        width=detector.columns,
        delx=detector.width / detector.columns * larger,
        dely=detector.height / detector.rows * larger,
    )
    turn = torch.tensor([[view.angle, 0.0, 0.0]], dtype=torch.float64)
    place = torch.tensor([[0.0, -source, 0.0]], dtype=torch.float64)
    # turned about the long axis, the source behind the patient
    rendered = renderer.double()(
        turn,
        place,
        parameterization="euler_angles",
        convention="ZXY",
        degrees=True,
    )
    image = rendered.detach().numpy()
    return image.reshape(detector.rows, detector.columns)


def referee_images(view: View, scan: Scan, detector: Detector) -> dict[str, np.ndarray]:
    """{referee: its image}, of those that are there."""
    images = {
        "NumPy, voxels": None if needs_library(view) else sums_along_voxels(view, scan),
        "NumPy, points": points_along_rays(view, scan, detector),
        "nanodrr": by_nanodrr(view, scan, detector),
        "DiffDRR": by_diffdrr(view, scan, detector),
    }
    return {name: image for name, image in images.items() if image is not None}


# --- what is compared -------------------------------------------------------------------------------------------------


class Agreement(NamedTuple):
    """Of our image with a referee's: correlation, relative difference (of the norms), ratio of the means."""

    correlation: float
    difference: float
    ratio: float


def agreement(ours: np.ndarray, theirs: np.ndarray) -> Agreement:
    """How well two images agree."""
    pair = np.stack([ours, theirs])
    correlation = np.corrcoef(pair.reshape(2, -1))[0, 1]
    difference = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    return Agreement(correlation, difference, ours.mean() / theirs.mean())


def compare_images(views: dict[str, View], scan: Scan) -> float:
    """Print how each view agrees with its referees; returns the least correlation."""
    import torch

    from tasks.cascade.projector import normalise, project

    hu = torch.from_numpy(scan.hu)
    volume = normalise(hu)[None, None]
    spacing = torch.tensor([scan.spacing.tolist()])
    print(f"\n{'view':14} {'referee':14} {'r':>10} {'difference':>11} {'means':>9}")
    least = 1.0
    for name, view in views.items():
        ours = project(volume, spacing, view)[0, 0].numpy()
        detector = detector_of(view, scan, ours.shape)
        for referee, theirs in referee_images(view, scan, detector).items():
            found = agreement(ours, theirs)
            least = min(least, found.correlation)
            figures = f"{found.correlation:10.6f} {found.difference:11.2e} {found.ratio:9.5f}"
            print(f"{name:14} {referee:14} {figures}", flush=True)
    return least


def adjoint_error(view: View, scan: Scan) -> float:
    """|<Px, y> - <x, P'y>| / |<Px, y>| in fp32 on the scan's grid, the inner products summed in float64."""
    import torch

    from tasks.cascade.projector import project_back, sum_rays

    generator = torch.Generator().manual_seed(0)
    x = torch.rand((1, 1, *scan.hu.shape), generator=generator)
    spacing = torch.tensor([scan.spacing.tolist()])
    projection = sum_rays(x, spacing, view)
    y = torch.rand(projection.shape, generator=generator)
    back = project_back(y, spacing, view, scan.hu.shape)

    of_images = (projection.double() * y).sum().item()
    of_volumes = (back.double() * x).sum().item()
    return abs(of_images - of_volumes) / abs(of_images)


def compare_transposes(views: dict[str, View], scan: Scan) -> float:
    """Print each view's adjoint_error; returns the largest."""
    print(f"\n{'view':14} {'|<Px,y> - <x,Pty>| / |<Px,y>|':>30}")
    largest = 0.0
    for name, view in views.items():
        error = adjoint_error(view, scan)
        largest = max(largest, error)
        print(f"{name:14} {error:30.1e}")
    return largest


def milliseconds(call: Callable) -> str:
    """The least of three calls."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        times.append(end - start)
    return f"{min(times) * 1000:10.1f}"


def print_times(views: dict[str, View], side: int) -> None:
    """One projection, its transpose and a lift of one volume of side^3, in milliseconds."""
    import torch

    from tasks.cascade.projector import lift, project, project_back

    volume = torch.rand(1, 1, side, side, side)
    extent = torch.full((1, 3), 360.0)
    spacing = extent / side
    size = (side, side, side)
    for name, view in views.items():
        image = project(volume, spacing, view)
        # what shares memory is read, so that it costs what it is used for
        forth = milliseconds(partial(project, volume, spacing, view))
        back = milliseconds(lambda view=view, image=image: project_back(image, spacing, view, size).sum())
        lifted = milliseconds(lambda view=view, image=image: lift(image, view, size, extent).sum())
        print(f"{side:3}^3  {name:14} {forth} {back} {lifted}")


def write_images(views: dict[str, View], scan: Scan, folder: Path) -> None:
    """Write each view as a PNG, to look at."""
    from PIL import Image

    from tasks.cascade.projector import render_drr

    for view in views.values():
        image = render_drr(scan.hu, scan.spacing, view)
        Image.fromarray(image).save(folder / f"{view.name}.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ct", type=Path, help="a CT as NIfTI")
    parser.add_argument("folder", type=Path, nargs="?", help="write each view as a PNG there")
    options = parser.parse_args()
    import torch

    scan = read_scan(options.ct)
    print(f"{options.ct}: {scan.hu.shape} voxels of {scan.spacing.round(3).tolist()} mm")
    views = VIEWS
    if find_spec("nanodrr") is None:
        print("nanodrr is not installed: parallel pa and lat only")
        views = {name: view for name, view in VIEWS.items() if not needs_library(view)}
    if options.folder:
        write_images(views, scan, options.folder)

    correlation = compare_images(views, scan)
    error = compare_transposes(views, scan)
    threads = f"ms, {torch.get_num_threads()} threads"
    print(f"\n{threads:21} {'project':>10} {'back':>10} {'lift':>10}")
    for side in (64, 128):
        print_times(views, side)

    passed = correlation >= LEAST_CORRELATION and error <= MOST_ADJOINT_ERROR
    print(f"\n{'passed' if passed else 'FAILED'}: least r {correlation:.6f}, largest adjoint error {error:.1e}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
