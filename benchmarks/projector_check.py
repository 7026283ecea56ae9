"""tasks/cascade/projector.py on a real CT, against NumPy and, where it is installed, DiffDRR.

    python benchmarks/projector_check.py CT.nii.gz [FOLDER]      # FOLDER: write pa.png and lat.png there, to look at
    pip install diffdrr                                          # a check only; nothing here needs it

DiffDRR renders cones: its source stands 100 m away, which is parallel to a thousandth.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    import numpy as np
    import torch
    from PIL import Image

    from tasks.cascade import data as xd
    from tasks.cascade import projector as drr

    path = Path(sys.argv[1])
    hu, affine = xd.read_ct(path)
    spacing = np.sqrt((affine[:3, :3] ** 2).sum(0))
    mm = torch.from_numpy(spacing).float()[None]
    volume = drr.normalise(torch.from_numpy(hu))[None, None].requires_grad_()
    shadows = {view: drr.project(volume, mm, view) for view in drr.VIEWS}
    sum(shadow.sum() for shadow in shadows.values()).backward()
    print(f"{path}: {hu.shape} voxels of {spacing.round(3).tolist()} mm")
    reached = int((volume.grad != 0).sum())
    print(f"voxels that a gradient reaches: {reached} of {hu.size}")
    mu = 0.0193 * (1 + np.clip(hu.astype(np.float64), -1000, 3000) / 1000)
    for view, axis in (("pa", 1), ("lat", 0)):
        expected = (mu.sum(axis) * spacing[axis]).T[::-1, ::-1]
        error = np.abs(shadows[view][0, 0].detach().numpy() - expected).max() / expected.max()
        print(f"{view}: largest difference to NumPy's line integral {error:.1e} of the largest value")
        if len(sys.argv) > 2:
            Image.fromarray(drr.render_drr(hu, spacing, view)).save(Path(sys.argv[2]) / f"{view}.png")
    try:
        from diffdrr.data import read
        from diffdrr.drr import DRR
        from torchio import ScalarImage
    except ImportError:
        print("DiffDRR is not installed: not compared")
        return
    subject = read(ScalarImage(tensor=torch.from_numpy(hu)[None], affine=affine), orientation="AP")
    subject.density.set_data(drr.attenuation(volume.detach()[0]))
    far = 1e5
    for view, turn in (("pa", 0.0), ("lat", 90.0)):
        across = 1 - drr.RAY_AXIS[view]
        scale = (far + 1000) / far
        sizes = {"height": hu.shape[2], "width": hu.shape[across]}
        sizes |= {"delx": float(spacing[across]) * scale, "dely": float(spacing[2]) * scale}
        renderer = DRR(subject, sdd=far + 1000, **sizes).double()
        pose = torch.tensor([[turn, 0.0, 0.0]]).double(), torch.tensor([[0.0, far, 0.0]]).double()
        options = {"parameterization": "euler_angles", "convention": "ZXY", "degrees": True}
        theirs = renderer(*pose, **options)[0, 0].detach().numpy()
        ours = shadows[view][0, 0].detach().numpy()
        r = np.corrcoef(ours.ravel(), theirs.ravel())[0, 1]
        print(f"{view}: correlation with DiffDRR {r:.6f}, ratio of the means {ours.mean() / theirs.mean():.5f}")


if __name__ == "__main__":
    main()
