"""The files of guide 3: which belong to which patient, and what a CT and an X-ray (DRR) hold.

A folder holds one sub-folder per patient: <id>/<id>.nii.gz (or .nii, .npy; HU), <id>_pa_drr.png (or _pa, _frontal) and
<id>_lat_drr.png (or _lat, _lateral; .npy too). The same files may also lie side by side in the folder itself.
The CT may be a DICOM series (dicom.py), and CT and X-rays may be in one HDF5 file (lidc.py).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from old.cache_utils import identity
from old.cli_utils import InputError
from old.distributed_utils import agree_on_errors, broadcast_object, gather_objects, world
from old.phase_utils import doing
from tasks.cascade import dicom, lidc
from tasks.cascade.projector import render_drr, resize
from tasks.cascade.rays import check_views
from tasks.cascade.views import LAT, PA, View, wrong_extent

CT_ENDINGS = (".nii.gz", ".nii", ".npy")
IMAGE_ENDINGS = (".png", ".npy", ".jpg", ".jpeg", ".tif", ".tiff")
# What the names of two views' images may end with, too, before the file type.
OTHER_ENDINGS = {"pa": ("_frontal",), "lat": ("_lateral",)}
# Degrees between the axes of voxels and of the patient that nobody sees.
MOST_TILT = 1.0
AIR_HU = -1000.0


@dataclass(frozen=True)
class Patient:
    """Where one patient's files are; ct None where a CT is not needed (--sample). xrays: in the order of the views.

    ct may be the folder of a DICOM series, and either may name a dataset in an HDF5 file: <id>/ct_xray_data.h5/xray1.
    """

    id: str
    ct: Path | None
    xrays: tuple[Path, ...]


# --- which files there are --------------------------------------------------------------------------------------------


def ending(name: str, endings: tuple[str, ...]) -> str:
    """The one of some endings that a file name has, in any case of letters; empty without one."""
    return next((text for text in endings if name.lower().endswith(text)), "")


def view_endings(view: str) -> tuple[str, ...]:
    """What the names of a view's images end with, before the file type; new ones are called by the first."""
    return (f"_{view}_drr", f"_{view}", *OTHER_ENDINGS.get(view, ()))


def view_of(name: str, views: tuple[View, ...]) -> str:
    """The name of the view, of some or pa and lat, that a file's name ends like an image of; else ""."""
    file_type = ending(name, IMAGE_ENDINGS)
    if not file_type:
        return ""
    stem = name.lower().removesuffix(file_type)
    known = {view.name for view in (PA, LAT, *views)}
    return next((view for view in known if stem.endswith(view_endings(view))), "")


def patient_of(name: str, views: tuple[View, ...]) -> str | None:
    """The patient's id in the name of a file that lies beside those of others; None for a file of another kind."""
    if view := view_of(name, views):
        stem = name[: -len(ending(name, IMAGE_ENDINGS))]
        return stem[: -len(ending(stem, view_endings(view)))]
    if name.endswith(f"_{lidc.FILE_NAME}"):
        return name.removesuffix(f"_{lidc.FILE_NAME}")
    if file_type := ending(name, CT_ENDINGS):
        return name[: -len(file_type)]
    return None


def is_ct(path: Path, views: tuple[View, ...]) -> bool:
    """Whether one of a patient's files is a CT."""
    if lidc.is_part(path):
        return path.name == lidc.CT
    if file_type := ending(path.name, CT_ENDINGS + IMAGE_ENDINGS):
        return file_type in CT_ENDINGS and not view_of(path.name, views)
    # nothing else is listed
    return True


def visible(folder: Path) -> Iterator[Path]:
    """What a folder holds, sorted, without hidden entries."""
    for entry in sorted(folder.iterdir()):
        if not entry.name.startswith("."):
            yield entry


def files_of(folder: Path) -> list[Path]:
    """A patient's images and CTs in a folder. Of an HDF5 file its parts are listed; of a DICOM series its folder is."""
    files = []
    for path in visible(folder):
        if lidc.is_file(path.name):
            files += lidc.parts_of(path)
        elif (path.is_file() or path.is_symlink()) and ending(path.name, CT_ENDINGS + IMAGE_ENDINGS):
            files.append(path)
    return files + dicom.series_below(folder)


def folder_of(root: Path, name: str) -> Path:
    """Where a patient's files are: in a folder of its own, or beside those of others."""
    return root / name if (root / name).is_dir() else root


def list_patients(
    root: Path,
    views: tuple[View, ...],
    flag: str = "--dataset_path",
) -> dict[str, list[Path]]:
    """{id: its files} of a data folder, sorted. Raises InputError."""
    if not root.is_dir():
        raise InputError(f"{root}: no such folder; check {flag}")

    # a folder is a patient; other files bear a patient's name
    patients: dict[str, list[Path]] = {}
    try:
        for entry in visible(root):
            if entry.is_dir():
                files = files_of(entry)
                name = entry.name if files else None
            else:
                files = lidc.parts_of(entry) if lidc.is_file(entry.name) else [entry]
                name = patient_of(entry.name, views)
            if name is not None:
                patients.setdefault(name, []).extend(files)
    except OSError as error:
        raise InputError(f"{root}: cannot be read ({error.strerror}); check {flag}") from None
    return patients


def only_one(paths: list[Path], named: list[Path], kind: str) -> Path | None:
    """The one path there may be, of those that bear the patient's name if any do. Raises InputError for several."""
    chosen = named or paths
    if len(chosen) > 1:
        raise InputError(f"{chosen[0].parent}: {chosen[0].name} and {chosen[1].name}; keep one {kind}")
    return chosen[0] if chosen else None


def find_ct(name: str, files: list[Path], views: tuple[View, ...]) -> Path | None:
    """The one CT among a patient's files; None without any. Raises InputError where it is not clear which."""
    scans = [path for path in files if is_ct(path, views)]
    named = [path for path in scans if path.name.removesuffix(ending(path.name, CT_ENDINGS)) == name]
    return only_one(scans, named, "CT per patient")


def find_xray(
    name: str,
    files: list[Path],
    view: View,
    views: tuple[View, ...],
) -> Path | None:
    """The one image of a view among a patient's files; None without any. Raises InputError for several."""
    images = [path for path in files if (lidc.view_of(path) or view_of(path.name, views)) == view.name]
    named = [path for path in images if path.name.lower().startswith(f"{name.lower()}_")]
    return only_one(images, named, f"{view.name} picture")


def find_patients(
    root: Path,
    views: tuple[View, ...],
    need_ct: bool = True,
) -> list[Patient]:
    """Every patient of a data folder with all files that are needed. Raises InputError naming what is missing."""
    patients = []
    flag = "--dataset_path" if need_ct else "--sample"
    for name, files in list_patients(root, views, flag).items():
        folder = folder_of(root, name)
        ct = find_ct(name, files, views)
        if ct is None and need_ct:
            reason = f"no CT ({name}.nii.gz) beside {files[0].name}"
            raise InputError(f"{folder}: {reason}; add it, or move the files elsewhere")
        if ct is not None and not need_ct and lidc.is_part(ct) and not lidc.holds(ct):
            ct = None

        # an X-ray of each view
        xrays = []
        for view in views:
            xray = find_xray(name, files, view, views)
            if xray is None:
                expected = f"{name}{view_endings(view.name)[0]}.png"
                advice = f"add it, render it with --make_drrs {root}"
                if view == LAT and views == (PA, LAT):
                    advice += ", or train on the frontal view with --num_views 1"
                raise InputError(f"{folder}: no {view.name} picture ({expected}); {advice}")
            xrays.append(xray)
        patients.append(Patient(name, ct, tuple(xrays)))
    if not patients:
        raise InputError(f"{root}: holds no patients (<id>/<id>.nii.gz); check {flag}")
    return patients


# --- what a file holds ------------------------------------------------------------------------------------------------


def first_line(error: Exception, path: Path) -> str:
    """What a library says about a file, short enough for one line, without the path."""
    if not str(error):
        return type(error).__name__
    return str(error).replace(str(path), "file").splitlines()[0][:100]


def identity_of(path: Path) -> str:
    """A key that changes when a CT or an X-ray does. Raises OSError."""
    if lidc.is_part(path):
        return f"{identity(path.parent)}|{path.name}"
    if path.is_dir():
        return "|".join(identity(file) for file in dicom.slice_files(path))
    return identity(path)


def check_nifti(image, path: Path) -> None:
    """Raises InputError where a file's header shows that it is no volume of numbers."""
    if len(image.shape) != 3:
        raise InputError(f"{path}: has {len(image.shape)} dimensions {image.shape}, not three; replace it")
    if 0 in image.shape:
        raise InputError(f"{path}: has no voxels: its shape is {image.shape}; replace it")
    if image.get_data_dtype().kind not in "fiu":
        raise InputError(f"{path}: holds {image.get_data_dtype()}, not numbers; replace it")


def along_axes(image):
    """A canonical nibabel image whose voxels lie along the patient's axes: resampled where they are tilted."""
    from nibabel.processing import resample_to_output

    spacing = voxel_spacing(image.affine)
    # what is wrong with such an affine is said later
    if not np.isfinite(spacing).all() or spacing.min() < 1e-3:
        return image
    cosines = np.abs(np.diag(image.affine)[:3]) / spacing
    tilt = np.degrees(np.arccos(np.clip(cosines, 0, 1))).max()
    if tilt <= MOST_TILT:
        return image
    # what the turned field of view did not hold is air
    return resample_to_output(image, spacing, order=1, cval=AIR_HU)


def load_volume(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(values, affine) of a file, of any kind of number. Raises InputError."""
    try:
        if path.name.endswith(".npy"):
            return np.load(path, allow_pickle=False), np.eye(4)
        if lidc.is_part(path):
            return lidc.read_ct(path)
        import nibabel

        image = dicom.read_series(path) if path.is_dir() else nibabel.load(path)
        check_nifti(image, path)
        image = along_axes(nibabel.as_closest_canonical(image))
        return np.asarray(image.dataobj, dtype=np.float32), image.affine
    except InputError:
        raise
    except Exception as error:
        # nibabel, zlib and numpy each have their own
        reason = first_line(error, path)
        raise InputError(f"{path}: not a readable volume, truncated perhaps ({reason}); replace it") from None


def read_ct(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(HU float32 (X, Y, Z) in canonical RAS+ order, affine of that order, mm). Raises InputError.

    A .npy has no affine: its axes are taken as x, y, z in RAS+ order, its voxels as 1 mm.
    """
    hu, affine = load_volume(path)
    if hu.ndim != 3:
        raise InputError(f"{path}: has {hu.ndim} dimensions {hu.shape}, not three; replace it")
    if hu.dtype.kind not in "fiu":
        raise InputError(f"{path}: holds {hu.dtype}, not numbers; replace it")
    if min(hu.shape) < 4:
        raise InputError(f"{path}: only {' x '.join(map(str, hu.shape))} voxels; a volume is needed")

    # the values
    hu = np.array(hu, np.float32, order="C")
    finite = np.isfinite(hu)
    if not finite.all():
        raise InputError(f"{path}: {int((~finite).sum())} voxels are NaN or infinite; replace it")
    if hu.min() == hu.max():
        raise InputError(f"{path}: holds one value everywhere; replace it")
    if hu.min() >= -200:
        raise InputError(f"{path}: its lowest value is {hu.min():g}, so it is not in HU (air is -1000); convert it")

    # the lengths
    spacing = voxel_spacing(affine)
    if not np.isfinite(affine).all() or spacing.min() < 1e-3 or spacing.max() > 100:
        raise InputError(f"{path}: voxels of {spacing.round(4).tolist()} mm; correct its affine or spacing")
    return hu, affine


def voxel_spacing(affine: np.ndarray) -> np.ndarray:
    """(3,) mm per voxel along the axes of an affine."""
    return np.sqrt((affine[:3, :3] ** 2).sum(0))


def load_image(path: Path) -> np.ndarray:
    """The grey values of a file as they are stored. Raises InputError."""
    try:
        if path.suffix.lower() == ".npy":
            return np.load(path, allow_pickle=False)
        if lidc.is_part(path):
            return lidc.read_image(path)
        from PIL import Image

        with Image.open(path) as image:
            return np.asarray(image if image.mode.startswith(("I", "F")) else image.convert("L"))
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path}: not a readable picture ({first_line(error, path)}); replace it") from None


def read_xray(path: Path, size: int, flip_vertical: bool, flip_horizontal: bool) -> Tensor:
    """(size, size) float32 grey values 0..1 as one looks at the patient. Raises InputError.

    8- and 16-bit images are divided by their range; .npy floats must lie within 0..1, -1..1 or 0..255. The flips say
    how the files are stored: see --flip_drrs_vertical and --flip_drrs_horizontal.
    """
    stored = load_image(path)
    if stored.ndim == 3 and 1 in stored.shape:
        stored = stored.squeeze()
    if stored.ndim != 2 or min(stored.shape) < 4 or stored.dtype.kind not in "fiu":
        raise InputError(f"{path}: a picture of shape {stored.shape} and type {stored.dtype}; give grey values in 2D")
    values = stored.astype(np.float32)
    if not np.isfinite(values).all():
        raise InputError(f"{path}: holds values that are NaN or infinite; replace it")

    # the range that the values are of
    low = float(values.min())
    high = float(values.max())
    if low == high:
        raise InputError(f"{path}: one grey value everywhere; replace it")
    if stored.dtype.kind == "f" and low >= -1 and high <= 1:
        values = values if low >= 0 else (values + 1) / 2
    elif low >= 0 and high <= 65535:
        values = values / (255 if high <= 255 else 65535)
    else:
        raise InputError(f"{path}: grey values from {low:g} to {high:g}; give 8 or 16 bits, or 0..1")

    # without the flip the feet are up, as the volume's z runs
    if not flip_vertical:
        values = values[::-1]
    if flip_horizontal:
        values = values[:, ::-1]
    image = torch.from_numpy(np.ascontiguousarray(values))
    return resize(image[None, None], (size, size))[0, 0]


# --- X-rays of a CT ---------------------------------------------------------------------------------------------------


class DrrJob(NamedTuple):
    """A patient whose CT is to be rendered in some views, into a folder."""

    name: str
    folder: Path
    ct: Path
    views: list[View]


def find_missing_drrs(root: Path, views: tuple[View, ...]) -> list[DrrJob]:
    """The views that have no image yet. Raises InputError."""
    patients = list_patients(root, views, "--make_drrs")
    if not patients:
        raise InputError(f"{root}: holds no CT (<id>/<id>.nii.gz); check --make_drrs")
    jobs = []
    for name, files in patients.items():
        missing = [view for view in views if find_xray(name, files, view, views) is None]
        ct = find_ct(name, files, views)
        if missing and ct is None:
            reason = f"no CT ({name}.nii.gz) to render the {missing[0].name} picture from"
            raise InputError(f"{folder_of(root, name)}: {reason}; add it, or move the files elsewhere")
        if missing:
            jobs.append(DrrJob(name, folder_of(root, name), ct, missing))
    return jobs


def write_drrs(job: DrrJob) -> int:
    """Render one patient's missing images; returns how many. Raises InputError."""
    from PIL import Image

    hu, affine = read_ct(job.ct)
    spacing = voxel_spacing(affine)
    for view in job.views:
        if reason := wrong_extent(view, tuple(spacing * hu.shape)):
            raise InputError(f"{job.ct}: {reason}; correct --views")
        path = job.folder / f"{job.name}{view_endings(view.name)[0]}.png"
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            Image.fromarray(render_drr(hu, spacing, view)).save(temporary, format="png")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise InputError(f"{path}: cannot be written ({error.strerror}); make room") from None
    return len(job.views)


@doing("rendering X-rays", has_bar=True)
def make_drrs(root: Path, views: tuple[View, ...] = (PA, LAT)) -> int:
    """All ranks: render the missing images of every CT below root; returns how many. Raises InputError."""
    rank, world_size = world()
    jobs: list[DrrJob] = []
    with agree_on_errors():
        check_views(views, on_gpu=False)
        # one rank looks: another might find images that are being written
        if rank == 0:
            jobs = find_missing_drrs(root, views)
    jobs = broadcast_object(jobs)
    written = 0
    with agree_on_errors():
        local = jobs[rank::world_size]
        for job in tqdm(local, desc="rendering", disable=rank != 0 or not sys.stderr.isatty(), leave=False):
            written += write_drrs(job)
    return sum(gather_objects(written))
