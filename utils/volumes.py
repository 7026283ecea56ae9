"""Read NIfTI and DICOM volumes, check their geometry and reorient their axes.

DICOM slices are sorted by position, and missing or duplicate slices are an error. Libraries do not check all of this:
SimpleITK averages over gaps between slices, and dicom2nifti trusts InstanceNumber.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.cli import InputError, first_line
from utils.images import is_dicom

# letters for axis directions (right, left, ...), or "?" if the file does not define them
CODES = "RLAPSI?"
# required DICOM tags of a slice, and how many values each has
POSITION, SLOPE = "ImagePositionPatient", "RescaleSlope"
TAGS = {
    POSITION: 3,
    "ImageOrientationPatient": 6,
    "PixelSpacing": 2,
    "Rows": 1,
    "Columns": 1,
    SLOPE: 1,
    "RescaleIntercept": 1,
}


class Volume(NamedTuple):
    """A 3D image and its geometry.

    values: (X, Y, Z) float32, in HU for CT. affine: (4, 4), maps voxel indices to mm in RAS+ coordinates. codes: axis
    directions in the file, such as "LPS", or "???" if the file does not define them.
    """

    values: np.ndarray
    affine: np.ndarray
    codes: str

    @property
    def spacing(self) -> np.ndarray:
        return np.linalg.norm(self.affine[:3, :3], axis=0)

    def summary(self) -> np.ndarray:
        return np.array([*self.spacing, *map(CODES.index, self.codes)])


def describe(summaries: np.ndarray, orientation: str | None) -> str:
    """Describe the axis directions and voxel sizes of a data set in one line.

    summaries: (N, 6), Volume.summary() of each volume. orientation: axis directions after reorientation, if any.
    """
    codes = Counter("".join(CODES[int(code)] for code in row[3:]) for row in summaries)
    found = ", ".join(f"{count} {code}" for code, count in codes.most_common()).replace("???", "of unknown axes")
    turned = f", turned to {orientation}" if orientation and {*codes} != {orientation} else ""
    ends = np.quantile(summaries[:, :3], (0, 1), axis=0).T
    sizes = " x ".join(" to ".join(dict.fromkeys(f"{end:.3g}" for end in both)) for both in ends)
    return f"{found}{turned}; voxels {sizes} mm"


def files_of(path: str | Path) -> list[Path]:
    """List the files that read_volume() inspects for a path.

    For a folder or a DICOM file, these are all DICOM files in the folder and its subfolders.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent if is_dicom(path) else None
    return sorted(filter(is_dicom, folder.rglob("[!.]*"))) if folder else [path]


def stamp(files: list[Path]) -> list[tuple[str, int, int]]:
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def read_volume(path: str | Path, orientation: str | None = "RAS", first_channel: bool = False) -> Volume:
    """Read a NIfTI file, a folder with one DICOM series, or the series that a DICOM file belongs to.

    orientation: axis directions of the returned volume; None keeps the file's directions. first_channel: read only the
    first channel of a 4D NIfTI file. Raises InputError unless the path holds one volume with regularly spaced voxels.
    """
    import nibabel
    from nibabel import orientations as axes

    path = Path(path)
    try:
        if path.is_dir() or is_dicom(path):
            values, affine, axes_defined = *_read_series(path), True
        else:
            image = nibabel.squeeze_image(nibabel.load(path))
            if image.get_data_dtype().kind not in "iuf":
                raise ValueError("holds colours or complex numbers")
            # nibabel's dataobj applies the slope and intercept in the NIfTI header
            values, affine = np.asarray(image.dataobj, np.float32), image.affine
            axes_defined = image.header.get("sform_code", 0) or image.header.get("qform_code", 0)
        values = values[..., 0] if first_channel and values.ndim == 4 else values
        if values.ndim != 3:
            raise ValueError(f"has shape {values.shape}, not one volume")
        cosines = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
        if not all(np.isfinite(array).all() for array in (affine, cosines, values)):
            raise ValueError("holds values or voxel sizes that are not finite, or sizes of 0")
        if abs(cosines.T @ cosines - np.eye(3)).max() > 0.01:
            raise ValueError("its axes are not at right angles, as a tilted gantry leaves them")
        current = axes.io_orientation(affine)
        if orientation:
            change = axes.ornt_transform(current, axes.axcodes2ornt(orientation))
            values, affine = axes.apply_orientation(values, change), affine @ axes.inv_ornt_aff(change, values.shape)
        # reorientation may produce negative strides, which torch does not support
        values = values if min(values.strides) > 0 else values.copy("K")
        return Volume(values, affine, "".join(axes.ornt2axcodes(current)) if axes_defined else "???")
    except InputError:
        raise
    except Exception as error:
        # nibabel, zlib and pydicom raise many types of exceptions
        raise InputError(f"{path}: cannot be used ({first_line(error)}); correct or replace it") from None


def _find_series(path: Path) -> dict:
    from pydicom import dcmread

    series: dict[str, dict] = {}
    for file in files_of(path):
        header = dcmread(file, stop_before_pixels=True, force=True)
        if "Modality" not in header:
            raise InputError(f"{file}: a damaged DICOM file, or none; replace or remove it")
        series.setdefault(str(header.get("SeriesInstanceUID")), {})[file] = header
    # skip reports, X-rays and screenshots, which have no position
    series = {uid: files for uid, files in series.items() if any(POSITION in header for header in files.values())}
    found = [files for files in series.values() if path.is_dir() or path in files]
    if not found:
        advice = "check the path; convert an enhanced CT, of several frames a file, to NIfTI"
        raise InputError(f"{path}: holds no DICOM slices with a position ({POSITION}); {advice}")
    if len(found) > 1:
        names = ", ".join(f"{uid} ({len(files)} files, as {min(files)})" for uid, files in series.items())
        advice = "keep one there, or name one of its files instead of the folder"
        raise InputError(f"{path}: holds {len(found)} series of DICOM slices, {names}; {advice}")
    return found[0]


def _read_tags(series: dict) -> np.ndarray:
    """Return the DICOM tags in TAGS as a (slices, 15) array. Raises InputError for a missing or unusable tag."""
    # MR images may lack a rescale slope, but CT values need one to be in HU
    scaled = any(header.get(SLOPE) is not None or header.Modality == "CT" for header in series.values())
    numbers = []
    for file, header in series.items():
        unit = str(header.get("RescaleType", "")).upper()
        if header.Modality == "CT" and unit not in ("", "HU", "HU_MOD", "HOUNSFIELD", "US"):
            raise InputError(f"{file}: values in {unit}, not HU; export the CT itself")
        if int(header.get("NumberOfFrames") or 1) > 1:
            raise InputError(f"{file}: several frames in one file; convert it to NIfTI")
        for tag, count in TAGS.items():
            try:
                value = header.get(tag) if scaled or "Rescale" not in tag else float(tag == SLOPE)
                found = np.array(value, float).ravel()
                if len(found) != count or not np.isfinite(found).all():
                    raise ValueError(f"{value!r} is not {count} numbers")
            except (TypeError, ValueError) as error:
                advice = "export the series anew, or remove what does not belong to it"
                raise InputError(f"{file}: no usable {tag} ({error}); {advice}") from None
            numbers += found.tolist()
    return np.reshape(numbers, (len(series), -1))


def _read_series(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a DICOM series; return its rescaled values (X, Y, Z) and its RAS+ affine matrix (4, 4).

    Slices are sorted along the normal of the slice plane. Raises InputError unless they form one regular volume.
    """
    from pydicom import dcmread, pixels

    series = _find_series(path)
    files, table = list(series), _read_tags(series)
    differs = (abs(table - table[0])[:, 3:13] > 1e-3).any(1)
    if differs.any():
        reason = f"another size, orientation or pixel spacing than {files[0]} of the same series"
        raise InputError(f"{files[differs.argmax()]}: {reason}; remove what does not belong to the volume")
    axes, (height, width) = table[0, 3:9].reshape(2, 3), table[0, 9:11]
    if abs(axes @ axes.T - np.eye(2)).max() > 1e-3:
        raise InputError(
            f"{path}: ImageOrientationPatient {axes.tolist()}: no two right-angled directions; export anew"
        )
    if len(files) == 1:
        raise InputError(f"{path}: one slice alone is no volume; give the folder of a whole series")

    order = np.argsort(table[:, :3] @ np.cross(*axes))
    files, table = [files[k] for k in order], table[order]
    positions = table[:, :3]
    steps = np.diff(positions, axis=0)
    gaps = np.linalg.norm(steps, axis=1)
    typical = np.argsort(gaps)[(len(gaps) - 1) // 2]
    # slice positions are often rounded to 0.01 mm
    wrong = (gaps < 1e-3) | (np.linalg.norm(steps - steps[typical], axis=1) > max(0.01 * gaps[typical], 0.011))
    if wrong.any():
        k = int(wrong.argmax())
        ends = " and ".join(f"{files[n]} at {positions[n].round(2).tolist()}" for n in (k, k + 1))
        advice = "slices are missing or doubled, or spacing changes; export one whole series, or resample it"
        raise InputError(f"{path}: {gaps[k]:.4g} mm between {ends}, where {gaps[typical]:.4g} are usual: {advice}")

    stack = np.empty((len(files), *table[0, 11:13].astype(int)), np.float32)
    for values, file, (slope, intercept) in zip(stack, files, table[:, 13:], strict=True):
        try:
            values[:] = pixels.pixel_array(dcmread(file)) * slope + intercept
        except Exception as error:
            raise InputError(f"{file}: cannot be decoded ({' '.join(str(error).split())}); replace it") from None
    affine = np.eye(4)
    step = (positions[-1] - positions[0]) / len(gaps)
    affine[:3] = np.column_stack([axes[0] * width, axes[1] * height, step, positions[0]])
    # convert from DICOM's LPS coordinates to RAS+
    return stack.transpose(2, 1, 0), np.diag([-1, -1, 1, 1]) @ affine
