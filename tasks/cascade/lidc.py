"""The HDF5 layout of LIDC in X2CT-GAN (Ying et al. 2019) and its followers: one file with a CT and its two X-rays.

A patient is <id>/ct_xray_data.h5 with the datasets `ct`, `xray1` (frontal) and `xray2` (lateral). `ct` has the axes of
the two images: rows from the head down, then from the front to the back, then from the patient's right to the left. It
holds HU + 1000, so that air is 0. `spacing` (mm) and `ori_size` (voxels) may be there too: they are of the volume that
`ct` was resampled from, which covered the same 320 mm, whatever the size of `ct`.

A dataset is named by the file's path and its own: <id>/ct_xray_data.h5/xray1.
"""

from pathlib import Path

import numpy as np

from old.cli_utils import InputError

ENDINGS = (".h5", ".hdf5")
# The file's name in the data that X2CT-GAN published, and what it ends with where patients lie side by side.
FILE_NAME = "ct_xray_data.h5"
CT = "ct"
# The datasets of the X-rays, by view.
XRAYS = {"pa": "xray1", "lat": "xray2"}

# What is added to HU, and the mm along each side of `ct` where the file does not say.
HU_OFFSET = 1000
EXTENT = 320.0
# Of any CT of a body some values are above.
TISSUE = 500
# Resampling with splines leaves values some way below air; HU without the offset lie lower. Metal is not above.
LOWEST = -500
HIGHEST = 10000


def is_file(name: str) -> bool:
    """Whether a file's name is one of this format."""
    return name.lower().endswith(ENDINGS)


def is_part(path: Path) -> bool:
    """Whether a path names a dataset in a file of this format."""
    return is_file(path.parent.name)


def parts_of(file: Path) -> list[Path]:
    """The datasets that a patient's file should have."""
    return [file / CT, *(file / name for name in XRAYS.values())]


def view_of(path: Path) -> str:
    """ "pa" or "lat" where a path names the dataset of an X-ray, else ""."""
    if not is_part(path):
        return ""
    return next((view for view, name in XRAYS.items() if path.name == name), "")


def holds(path: Path) -> bool:
    """Whether a dataset is there, or its file cannot be opened, which is told when it is read."""
    try:
        with open_file(path.parent) as file:
            return path.name in file
    except OSError:
        return True


# --- reading ----------------------------------------------------------------------------------------------------------


def open_file(path: Path):
    """An open h5py.File, a context manager. Raises OSError."""
    import h5py

    # readers need no lock, and some file systems have none to give
    return h5py.File(path, "r", locking=False)


def find_part(file, path: Path):
    """A dataset of numbers in an open file. Raises InputError."""
    import h5py

    if path.name not in file:
        advice = "add it"
        if path.name == XRAYS["lat"]:
            advice += ", or train on the frontal view with --num_views 1"
        raise InputError(f"{path.parent}: no dataset {path.name!r} beside {', '.join(file) or 'nothing'}; {advice}")
    part = file[path.name]
    if not isinstance(part, h5py.Dataset):
        raise InputError(f"{path}: a group, not a dataset of numbers; replace it")
    if part.dtype.kind not in "fiu":
        raise InputError(f"{path}: holds {part.dtype}, not numbers; replace it")
    return part


def read_ct(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(HU (X, Y, Z) in RAS+ order, affine in mm with 0 in the middle) of a file's `ct`.

    Raises InputError, and what h5py raises for a file that is none of its own or is truncated.
    """
    with open_file(path.parent) as file:
        part = find_part(file, path)
        if len(part.shape) != 3 or 0 in part.shape:
            raise InputError(
                f"{path}: has the shape {part.shape}, not that of a volume such as (128, 128, 128); replace it"
            )
        extent = extent_of(file, part, path)
        stored = part[()]
    check_range(stored, path)

    # from down, back, left to right, front, up
    hu = stored[::-1, ::-1, ::-1].transpose(2, 1, 0).astype(np.float32) - HU_OFFSET
    voxel = extent[::-1] / hu.shape
    affine = np.diag([*voxel, 1.0])
    affine[:3, 3] = -voxel * (np.array(hu.shape) - 1) / 2
    return hu, affine


def check_range(stored: np.ndarray, path: Path) -> None:
    """Raises InputError where a CT is not in HU + 1000; one that is NaN or constant passes, and is told later."""
    low = float(stored.min())
    high = float(stored.max())
    if low < LOWEST:
        raise InputError(f"{path}: its lowest value is {low:g}, and air should be 0; add {HU_OFFSET} to its HU")
    if low != high and high < TISSUE:
        reason = f"its highest value is {high:g}, and tissue should be about {HU_OFFSET}"
        raise InputError(f"{path}: {reason}; scale it to HU + {HU_OFFSET}, 0 to 2500")
    if high > HIGHEST:
        raise InputError(f"{path}: its highest value is {high:g}; scale it to HU + {HU_OFFSET}, 0 to 2500")


def extent_of(file, part, path: Path) -> np.ndarray:
    """(3,) mm that the dataset of a CT covers, in the order of its axes. Raises InputError.

    `ori_size` times `spacing`, where both are there; the shape of `ct` times `spacing`, where only this is; else 320.
    They may be datasets, or attributes of the file or of `ct`.
    """
    spacing = read_lengths(file, part, path, "spacing")
    if spacing is None:
        return np.full(3, EXTENT)
    size = read_lengths(file, part, path, "ori_size")
    return spacing * (part.shape if size is None else size)


def read_lengths(file, part, path: Path, name: str) -> np.ndarray | None:
    """(3,) positive numbers that stand beside a CT, None where there are none. Raises InputError."""
    value = part.attrs.get(name, file.attrs.get(name))
    if name in file:
        value = find_part(file, path.with_name(name))[()]
    if value is None:
        return None
    try:
        lengths = np.broadcast_to(np.asarray(value, np.float64), 3)
    except (TypeError, ValueError):
        lengths = np.zeros(3)
    if not (np.isfinite(lengths).all() and lengths.min() > 0):
        raise InputError(f"{path.parent}: its {name} is {value}; give one or three positive numbers, or leave it out")
    return lengths


def read_image(path: Path) -> np.ndarray:
    """The grey values of an X-ray as they are stored. Raises as read_ct does."""
    with open_file(path.parent) as file:
        stored = find_part(file, path)[()]
    shape = stored.squeeze().shape
    if len(shape) != 2 or shape[0] != shape[1]:
        raise InputError(f"{path}: a picture of shape {stored.shape}; give a square one, such as 128 x 128")
    return stored


# --- writing ----------------------------------------------------------------------------------------------------------


def write_patient(folder: Path, hu: np.ndarray, images: dict[str, np.ndarray]) -> None:
    """Write a patient's file, of a CT (X, Y, Z) in HU that covers 320 mm along each side, and an image of each view."""
    import h5py

    stored = hu.transpose(2, 1, 0)[::-1, ::-1, ::-1] + HU_OFFSET
    folder.mkdir(parents=True)
    with h5py.File(folder / FILE_NAME, "w") as file:
        file[CT] = stored.clip(0, 2500).round().astype(np.int16)
        # of the volume that X2CT-GAN resampled, in voxels and mm
        file["ori_size"] = 320
        file["spacing"] = [EXTENT / 320] * 3
        for view, image in images.items():
            file[XRAYS[view]] = image
