"""A CT as a DICOM series, one .dcm file per slice, read by pydicom and stacked by MONAI."""

from pathlib import Path

import numpy as np

from old.cli_utils import InputError

ENDING = ".dcm"
FEWEST_SLICES = 4
# How much a distance between slices may differ from the others, and how far a slice may lie beside the first.
TOLERANCE = 0.05
# What stacking needs of a slice, and what must be the same in all of them.
SHARED_TAGS = ("Rows", "Columns", "PixelSpacing", "ImageOrientationPatient")
TAGS = (*SHARED_TAGS, "ImagePositionPatient", "PixelData")


def is_slice(path: Path) -> bool:
    """Whether a path's name is one of a slice."""
    name = path.name.lower()
    return name.endswith(ENDING) and not name.startswith(".")


def slice_files(folder: Path) -> list[Path]:
    """The slices in a folder, sorted by name."""
    return sorted(path for path in folder.iterdir() if is_slice(path))


def series_below(folder: Path) -> list[Path]:
    """The folders that hold slices: a patient's own, and those at any depth below it."""
    folders = {path.parent for path in folder.rglob("*") if is_slice(path)}
    return sorted(folders)


def read_series(folder: Path):
    """A CT in HU as a nibabel image, float32, its slices in the order of their places.

    Raises InputError, and what pydicom raises for a file that it cannot decode.
    """
    import nibabel
    from monai.data import PydicomReader
    from pydicom import dcmread

    # one file each
    files = slice_files(folder)
    slices = []
    for file in files:
        try:
            slices.append(dcmread(file))
        except Exception as error:
            raise unreadable(file, error) from None
    for file, one in zip(files, slices, strict=True):
        check_slice(file, one, slices[0])
        try:
            # decoded once, here where its name is known
            one.pixel_array  # noqa: B018
        except Exception as error:
            raise unreadable(file, error) from None

    # MONAI stacks them by their numbers, which need not follow their places
    order = check_places(folder, files, slices)
    ordered = [slices[place] for place in order]
    for number, one in enumerate(ordered):
        one.InstanceNumber = number
    reader = PydicomReader()
    reader.has_series = True
    reader.filenames = [[files[place] for place in order]]
    hu, facts = reader.get_data(ordered)
    values = np.asarray(hu, np.float32)
    return nibabel.Nifti1Image(values, facts["affine"])


def unreadable(file: Path, error: Exception) -> InputError:
    """What to say of a file that pydicom cannot read or decode."""
    text = str(error) or type(error).__name__
    reason = text.splitlines()[0][:60]
    return InputError(f"{file}: not a readable DICOM slice ({reason}); replace it")


def check_slice(file: Path, one, first) -> None:
    """Raises InputError where a slice cannot be stacked upon the first."""
    missing = [tag for tag in TAGS if tag not in one]
    if missing:
        raise InputError(f"{file}: has no {missing[0]}; export the series anew, or convert it to NIfTI")
    if (one.get("NumberOfFrames") or 1) > 1:
        raise InputError(f"{file}: has several frames; convert it to NIfTI")
    if one.get("Modality", "CT") != "CT":
        raise InputError(f"{file}: its modality is {one.Modality}, not CT; move it elsewhere")

    # the same series, and the same grid
    if one.get("SeriesInstanceUID") != first.get("SeriesInstanceUID"):
        raise InputError(f"{file.parent}: slices of more than one series; give each a folder of its own, and keep one")
    for tag in SHARED_TAGS:
        if not np.allclose(one[tag].value, first[tag].value, atol=1e-3):
            advice = "remove it, or convert the series to NIfTI"
            raise InputError(f"{file}: its {tag} is not that of the other slices; {advice}")


def check_places(
    folder: Path,
    files: list[Path],
    slices: list,
) -> list[int]:
    """The order of the slices along their normal. Raises InputError where they are not evenly spaced."""
    if len(slices) < FEWEST_SLICES:
        raise InputError(f"{folder}: only {len(slices)} slices; a volume is needed")
    directions = np.array(slices[0].ImageOrientationPatient, np.float64)
    normal = np.cross(directions[:3], directions[3:])
    places = np.array([one.ImagePositionPatient for one in slices], np.float64)
    along = places @ normal
    order = np.argsort(along, kind="stable").tolist()

    # the distance of each slice to the next
    gaps = np.diff(along[order])
    usual = float(np.median(gaps))
    for number, gap in enumerate(gaps):
        names = f"{files[order[number]].name} and {files[order[number + 1]].name}"
        if gap < 1e-3:
            raise InputError(f"{folder}: {names} lie at the same place; remove one")
        if abs(gap - usual) > TOLERANCE * usual:
            reason = f"{gap:.3g} mm between {names}, elsewhere {usual:.3g}"
            raise InputError(f"{folder}: {reason}; add the missing slices, or resample it as NIfTI")

    # a tilted gantry moves each slice beside the one before
    beside = places - np.outer(along, normal)
    shift = np.ptp(beside, axis=0).max()
    if shift > TOLERANCE * usual * len(slices):
        raise InputError(f"{folder}: its slices are not above each other (a tilted gantry); resample it as NIfTI")
    return order
