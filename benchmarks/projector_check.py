"""tasks/cascade/projector.py on a real CT, against NumPy and, where it is installed, DiffDRR.

    python benchmarks/projector_check.py CT.nii.gz [FOLDER]      # FOLDER: write pa.png and lat.png there, to look at
    pip install diffdrr                                          # a check only; nothing here needs it

DiffDRR renders cones: its source stands 100 m away, which is parallel to a thousandth.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# What water takes from the rays, per mm.
MU_WATER = 0.0193

# The axis along which the rays of each view run.
RAYS = {"pa": 1, "lat": 0}

# How far DiffDRR turns the body for each view, in degrees.
TURNS = {"pa": 0.0, "lat": 90.0}

# The distance of DiffDRR's source in mm.
FAR = 1e5


def compare_with_numpy(hu, spacing, images: dict) -> None:
    """Print how far each view is from a sum along the rays in float64."""
    import numpy as np

    # Air lies at -1000 HU.
    hu = hu.astype(np.float64)
    water = 1 + hu.clip(-1000, 3000) / 1000
    attenuation = MU_WATER * water

    # The head is up, and the first column is the patient's right side or front.
    for view, axis in RAYS.items():
        integral = attenuation.sum(axis) * spacing[axis]
        expected = np.rot90(integral, 2).T
        difference = np.abs(images[view] - expected)
        error = difference.max() / expected.max()
        print(f"{view}: largest difference to NumPy's line integral {error:.1e} of the largest value")


def write_images(hu, spacing, folder: Path) -> None:
    """Write each view as a PNG, to look at."""
    from PIL import Image

    from tasks.cascade.projector import render_drr

    for view in RAYS:
        Image.fromarray(render_drr(hu, spacing, view)).save(folder / f"{view}.png")


def compare_with_diffdrr(subject, spacing, images: dict) -> None:
    """Print how well each view agrees with DiffDRR's."""
    import numpy as np
    import torch
    from diffdrr.drr import DRR

    from tasks.cascade.projector import RAY_AXIS

    # The detector stands 1 m behind the body, where a voxel's shadow is larger by this factor.
    detector = FAR + 1000
    scale = detector / FAR
    for view, turn in TURNS.items():
        across = 1 - RAY_AXIS[view]
        height, width = images[view].shape
        renderer = DRR(
            subject,
            sdd=detector,
            height=height,
            width=width,
            delx=float(spacing[across]) * scale,
            dely=float(spacing[2]) * scale,
        ).double()

        # The source stands before the body for "pa", and at its side for "lat".
        rendered = renderer(
            torch.tensor([[turn, 0.0, 0.0]], dtype=torch.float64),
            torch.tensor([[0.0, FAR, 0.0]], dtype=torch.float64),
            parameterization="euler_angles",
            convention="ZXY",
            degrees=True,
        )

        ours = images[view]
        theirs = rendered.detach().numpy().reshape(height, width)
        pair = np.stack([ours.ravel(), theirs.ravel()])
        correlation = np.corrcoef(pair)[0, 1]
        ratio = ours.mean() / theirs.mean()
        print(f"{view}: correlation with DiffDRR {correlation:.6f}, ratio of the means {ratio:.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ct", type=Path, help="a CT as NIfTI")
    parser.add_argument("folder", type=Path, nargs="?", help="write pa.png and lat.png there")
    options = parser.parse_args()
    import numpy as np
    import torch

    from tasks.cascade.files import read_ct
    from tasks.cascade.projector import VIEWS, attenuation, normalise, project

    hu, affine = read_ct(options.ct)
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    print(f"{options.ct}: {hu.shape} voxels of {spacing.round(3).tolist()} mm")

    # A gradient has to reach every voxel.
    scan = torch.from_numpy(hu)[None]
    volume = normalise(scan)[None].requires_grad_()
    voxel_mm = torch.from_numpy(spacing).float()
    images = {}
    for view in VIEWS:
        image = project(volume, voxel_mm[None], view)
        image.sum().backward()
        images[view] = image[0, 0].detach().numpy()
    reached = int(volume.grad.count_nonzero())
    print(f"voxels that a gradient reaches: {reached} of {hu.size}")

    compare_with_numpy(hu, spacing, images)
    if options.folder:
        write_images(hu, spacing, options.folder)

    try:
        from diffdrr.data import read
        from torchio import ScalarImage
    except ImportError:
        print("DiffDRR is not installed: not compared")
        return

    subject = read(ScalarImage(tensor=scan, affine=affine), orientation="AP")
    density = attenuation(volume.detach())
    subject.density.set_data(density[0])
    compare_with_diffdrr(subject, spacing, images)


if __name__ == "__main__":
    main()
