"""NIfTI volumes with their label maps, cut into slices; the names that the Decathlon's dataset.json gives them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from old.cli_utils import InputError
from old.image_utils import Window, to_bytes

# Percentiles of a volume that become black and white where no window is given.
DARKEST = 0.5
BRIGHTEST = 99.5


class Slice(NamedTuple):
    """A slice as it is looked at: up or the front at the top, the patient's right (or front) at the left.

    number: its place along the axis. pixels: uint8 (H, W). values: of the label map (H, W).
    """

    number: int
    pixels: np.ndarray
    values: np.ndarray


def read_label_names(folder: Path) -> dict[int, str]:
    """{value: name} of the dataset.json beside or in a folder, empty without one. Raises InputError."""
    for path in (folder / "dataset.json", folder.parent / "dataset.json"):
        if path.is_file():
            return parse_label_names(path)
    return {}


def parse_label_names(path: Path) -> dict[int, str]:
    """The labels of a dataset.json but the background, as the Decathlon or nnU-Net write them. Raises InputError."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8-sig"))["labels"]
        names = {}
        for key, value in listed.items():
            # {"1": "liver"}, or {"liver": 1}
            number, name = (key, value) if str(key).isdigit() else (value, key)
            names[int(number)] = str(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else error
        raise InputError(f'{path}: holds no labels ({reason}); give them by --labels "1=liver"') from None
    names.pop(0, None)
    return names


def listed_pairs(folder: Path) -> list[tuple[Path, Path]]:
    """(image, label map) of a Decathlon folder's training cases, by its dataset.json; empty without one."""
    path = folder / "dataset.json"
    if not path.is_file():
        return []
    try:
        cases = json.loads(path.read_text(encoding="utf-8-sig"))["training"]
        pairs = [(folder / case["image"], folder / case["label"]) for case in cases]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: not the list of a data set ({error}); give the folders of images and masks"
        ) from None
    for pair in pairs:
        for file in pair:
            if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
                raise InputError(f"{path}: {file} is not there, or outside the folder; download the set again")
    return pairs


# --- slices -----------------------------------------------------------------------------------------------------------


def cut(
    image: Path,
    mask: Path,
    spacing: float,
    window: Window | None,
    channel: int,
    one_label: bool,
) -> Iterator[Slice]:
    """Slices of a volume that hold some label, `spacing` mm apart. Raises InputError.

    They are cut across the axis of the thickest slices, axial where the voxels are cubes. channel: of a volume with
    several images. one_label: no label has a name, so that there may be one only.
    """
    picture = load(image)
    labels = load(mask)
    values = read_array(image, picture)
    stored = read_array(mask, labels)
    if values.ndim == 4:
        if channel >= values.shape[3]:
            raise InputError(f"{image}: has {values.shape[3]} channels; lower --channel")
        values = values[..., channel]
    if stored.ndim == 4 and stored.shape[3] == 1:
        stored = stored[..., 0]
    check_grids(image, values, mask, stored)
    if not np.allclose(picture.affine, labels.affine, atol=0.01):
        raise InputError(f"{mask}: lies elsewhere in space than {image.name} (other affines); resample it")
    if one_label and len(np.unique(stored[stored != 0])) > 1:
        raise InputError(f'{mask}: holds several labels; name them, such as --labels "1=liver,2=tumour"')

    # where to cut
    sizes = picture.header.get_zooms()[:3]
    axis = slicing_axis(sizes)
    step = max(1, round(spacing / sizes[axis]))
    others = tuple(other for other in range(3) if other != axis)
    holds_label = np.flatnonzero((stored != 0).any(axis=others))
    if not len(holds_label):
        return
    first = int(holds_label[0])
    pixels = to_bytes(values, window or usual_window(values))
    for number in holds_label.tolist():
        if (number - first) % step == 0:
            yield Slice(number, as_seen(pixels, axis, number), as_seen(stored, axis, number))


def load(path: Path):
    """A nibabel image in canonical orientation. Raises InputError."""
    import nibabel

    try:
        return nibabel.as_closest_canonical(nibabel.load(path))
    except Exception as error:
        reason = str(error).replace(str(path), "file").splitlines()[0]
        raise InputError(f"{path}: not a readable NIfTI volume ({reason}); replace it") from None


def read_array(path: Path, volume) -> np.ndarray:
    """The voxels of a nibabel image, float32. Raises InputError."""
    try:
        values = np.asarray(volume.dataobj, np.float32)
    except Exception as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}: {error}); replace it") from None
    if not np.isfinite(values).all():
        raise InputError(f"{path}: holds values that are not finite numbers; repair or remove it")
    return values


def check_grids(image: Path, values: np.ndarray, mask: Path, stored: np.ndarray) -> None:
    """Raises InputError where a label map has not the voxels of its image."""
    if values.ndim != 3 or stored.shape != values.shape:
        sizes = " x ".join(map(str, stored.shape))
        wanted = " x ".join(map(str, values.shape))
        raise InputError(f"{mask}: has {sizes} voxels, and {image.name} {wanted}; resample it to the image")


def slicing_axis(sizes: tuple[float, float, float]) -> int:
    """The axis across which a volume of such voxels (mm) was taken; axial where it cannot be told."""
    thickest = int(np.argmax(sizes))
    return thickest if sizes[thickest] > 1.05 * sizes[2] else 2


def usual_window(values: np.ndarray) -> Window:
    """The range of a volume without its few extreme voxels."""
    low, high = np.percentile(values, [DARKEST, BRIGHTEST])
    return Window((low + high) / 2, max(high - low, 1e-3))


def as_seen(volume: np.ndarray, axis: int, number: int) -> np.ndarray:
    """(H, W) of one slice of a canonical volume, as a Slice is looked at."""
    plane = np.take(volume, number, axis=axis)
    return np.ascontiguousarray(plane[::-1, ::-1].T)
