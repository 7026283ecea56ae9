"""The patients of guide 3: their CT and X-rays (DRRs) on disk, the split, the check that they belong together, the
data set.

A folder holds one sub-folder per patient: <id>/<id>.nii.gz (or .nii, .npy; HU), <id>_pa_drr.png (or _pa, _frontal) and
<id>_lat_drr.png (or _lat, _lateral; .npy too). The same files may also lie side by side in the folder itself.
"""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

import distributed_utils as du
from cache_utils import DiskCache, identity
from cli_utils import InputError
from sampler_utils import permute
from tasks.cascade import projector as drr

CT_ENDINGS = (".nii.gz", ".nii", ".npy")
PICTURE_ENDINGS = (".png", ".npy", ".jpg", ".jpeg", ".tif", ".tiff")
NAMES = {"pa": ("_pa_drr", "_pa", "_frontal"), "lat": ("_lat_drr", "_lat", "_lateral")}
SPLITS = ("train", "val", "test")
CHECK_SIZE = 32  # side of the pictures that the alignment check compares
NOISE_THREADS = 4  # of each process, for large tensors


@dataclass(frozen=True)
class Patient:
    """Where one patient's files are; ct None where a CT is not needed (--sample)."""

    id: str
    ct: Path | None
    xrays: tuple[Path, ...]  # in the order of drr.VIEWS


# --- files ------------------------------------------------------------------------------------------------------------


def ending(name: str, endings: tuple[str, ...]) -> str:
    return next((text for text in endings if name.lower().endswith(text)), "")


def view_of(name: str) -> str:
    """ "pa" or "lat" when the file name ends like a picture of that view, else ""."""
    stem = name.lower().removesuffix(ending(name, PICTURE_ENDINGS)) if ending(name, PICTURE_ENDINGS) else ""
    return next((view for view, names in NAMES.items() if stem.endswith(names)), "")


def list_patients(root: Path, flag: str = "--dataset_path") -> dict[str, list[Path]]:
    """{id: its files} of a data folder, sorted. Raises InputError."""
    if not root.is_dir():
        raise InputError(f"{root}: no such folder; check {flag}")
    found: dict[str, list[Path]] = {}
    try:
        for entry in sorted(root.iterdir()):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                files = [p for p in sorted(entry.iterdir()) if p.is_file() and not p.name.startswith(".")]
                files = [p for p in files if ending(p.name, (*CT_ENDINGS, *PICTURE_ENDINGS))]
                if files:
                    found.setdefault(entry.name, []).extend(files)
            elif view := view_of(entry.name):
                stem = entry.name[: -len(ending(entry.name, PICTURE_ENDINGS))]
                name = stem[: -next(len(text) for text in NAMES[view] if stem.lower().endswith(text))]
                found.setdefault(name, []).append(entry)
            elif kind := ending(entry.name, CT_ENDINGS):
                found.setdefault(entry.name[: -len(kind)], []).append(entry)
    except OSError as error:
        raise InputError(f"{root}: cannot be read ({error.strerror}); check {flag}") from None
    return found


def find_ct(name: str, files: list[Path]) -> Path | None:
    """The one CT among a patient's files; None without any. Raises InputError where it is not clear which."""
    scans = [p for p in files if ending(p.name, CT_ENDINGS) and not view_of(p.name)]
    named = [p for p in scans if p.name.removesuffix(ending(p.name, CT_ENDINGS)) == name]
    chosen = named or scans
    if len(chosen) > 1:
        raise InputError(f"{chosen[0].parent}: {chosen[0].name} and {chosen[1].name}; keep one CT per patient")
    return chosen[0] if chosen else None


def find_picture(name: str, files: list[Path], view: str) -> Path | None:
    chosen = [p for p in files if view_of(p.name) == view]
    named = [p for p in chosen if p.name.lower().startswith(f"{name.lower()}_")]
    chosen = named or chosen
    if len(chosen) > 1:
        raise InputError(f"{chosen[0].parent}: {chosen[0].name} and {chosen[1].name}; keep one {view} picture")
    return chosen[0] if chosen else None


def find_patients(root: Path, num_views: int, need_ct: bool = True) -> list[Patient]:
    """Every patient of a data folder with all files that are needed. Raises InputError naming what is missing."""
    patients = []
    flag = "--dataset_path" if need_ct else "--sample"
    for name, files in list_patients(root, flag).items():
        ct = find_ct(name, files)
        if ct is None and need_ct:
            text = f"no CT ({name}.nii.gz) beside {files[0].name}"
            raise InputError(f"{files[0].parent}: {text}; add it, or move the files elsewhere")
        xrays = []
        for view in drr.VIEWS[:num_views]:
            picture = find_picture(name, files, view)
            if picture is None:
                advice = f"add it, render it with --make_drrs {root}"
                advice += ", or train on the frontal view with --num_views 1" if view == "lat" else ""
                raise InputError(f"{files[0].parent}: no {view} picture ({name}{NAMES[view][0]}.png); {advice}")
            xrays.append(picture)
        patients.append(Patient(name, ct, tuple(xrays)))
    if not patients:
        raise InputError(f"{root}: holds no patients (<id>/<id>.nii.gz); check {flag}")
    return patients


def read_ct(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(HU float32 (X, Y, Z) in canonical RAS+ order, affine of that order, mm). Raises InputError.

    A .npy has no affine: its axes are taken as x, y, z in RAS+ order, its voxels as 1 mm.
    """
    try:
        if path.name.endswith(".npy"):
            hu, affine = np.load(path, allow_pickle=False), np.eye(4)
        else:
            import nibabel

            image = nibabel.load(path)
            if len(image.shape) != 3:
                raise InputError(f"{path}: has {len(image.shape)} dimensions {image.shape}, not three; replace it")
            if 0 in image.shape:
                raise InputError(f"{path}: has no voxels: its shape is {image.shape}; replace it")
            if image.get_data_dtype().kind not in "fiu":
                raise InputError(f"{path}: holds {image.get_data_dtype()}, not numbers; replace it")
            image = nibabel.as_closest_canonical(image)
            hu, affine = np.asarray(image.dataobj, dtype=np.float32), image.affine
    except InputError:
        raise
    except Exception as error:  # nibabel, zlib and numpy each have their own
        text = str(error).replace(str(path), "file").splitlines()[0][:100] if str(error) else type(error).__name__
        raise InputError(f"{path}: not a readable volume, truncated perhaps ({text}); replace it") from None
    if hu.ndim != 3:
        raise InputError(f"{path}: has {hu.ndim} dimensions {hu.shape}, not three; replace it")
    if hu.dtype.kind not in "fiu":
        raise InputError(f"{path}: holds {hu.dtype}, not numbers; replace it")
    if min(hu.shape) < 4:
        raise InputError(f"{path}: only {' x '.join(map(str, hu.shape))} voxels; a volume is needed")
    hu = np.array(hu, np.float32, order="C")
    if not np.isfinite(hu).all():
        raise InputError(f"{path}: {int((~np.isfinite(hu)).sum())} voxels are NaN or infinite; replace it")
    if hu.min() == hu.max():
        raise InputError(f"{path}: holds one value everywhere; replace it")
    if hu.min() >= -200:
        raise InputError(f"{path}: its lowest value is {hu.min():g}, so it is not in HU (air is -1000); convert it")
    spacing = np.sqrt((affine[:3, :3] ** 2).sum(0))
    if not np.isfinite(affine).all() or spacing.min() < 1e-3 or spacing.max() > 100:
        raise InputError(f"{path}: voxels of {spacing.round(4).tolist()} mm; correct its affine")
    return hu, affine


def read_picture(path: Path, size: int, flip_vertical: bool, flip_horizontal: bool) -> torch.Tensor:
    """(size, size) float32 grey values 0..1 as one looks at the patient. Raises InputError.

    8- and 16-bit pictures are divided by their range; .npy floats must lie within 0..1, -1..1 or 0..255. The flips say
    how the files are stored: see DATA keys in the help.
    """
    try:
        if path.suffix.lower() == ".npy":
            grey = np.load(path, allow_pickle=False)
        else:
            from PIL import Image

            with Image.open(path) as image:
                grey = np.asarray(image if image.mode.startswith(("I", "F")) else image.convert("L"))
    except Exception as error:
        text = str(error).replace(str(path), "file").splitlines()[0][:100] if str(error) else type(error).__name__
        raise InputError(f"{path}: not a readable picture ({text}); replace it") from None
    if grey.ndim == 3 and 1 in grey.shape:
        grey = grey.squeeze()
    if grey.ndim != 2 or min(grey.shape) < 4 or grey.dtype.kind not in "fiu":
        raise InputError(f"{path}: a picture of shape {grey.shape} and type {grey.dtype}; give grey values in 2D")
    values = grey.astype(np.float32)
    if not np.isfinite(values).all():
        raise InputError(f"{path}: holds values that are NaN or infinite; replace it")
    low, high = float(values.min()), float(values.max())
    if low == high:
        raise InputError(f"{path}: one grey value everywhere; replace it")
    if grey.dtype.kind == "f" and low >= -1 and high <= 1:
        values = values if low >= 0 else (values + 1) / 2
    elif low >= 0 and high <= 65535:
        values = values / (255 if high <= 255 else 65535)
    else:
        raise InputError(f"{path}: grey values from {low:g} to {high:g}; give 8 or 16 bits, or 0..1")
    if not flip_vertical:  # stored with the feet up, as the volume's z runs
        values = values[::-1]
    if flip_horizontal:
        values = values[:, ::-1]
    return drr.resize(torch.from_numpy(np.ascontiguousarray(values))[None, None], (size, size))[0, 0]


def make_drrs(root: Path) -> int:
    """All ranks: render the missing pa and lat pictures of every CT below root; returns how many. Raises InputError."""
    from PIL import Image

    rank, world_size = du.world()
    jobs, written = [], 0
    with du.agree_on_errors():
        if rank == 0:  # one rank looks: another might find pictures that are being written
            patients = list_patients(root, "--make_drrs")
            if not patients:
                raise InputError(f"{root}: holds no CT (<id>/<id>.nii.gz); check --make_drrs")
            for name, files in patients.items():
                missing = [view for view in drr.VIEWS if find_picture(name, files, view) is None]
                ct = find_ct(name, files)
                if missing and ct is None:
                    text = f"no CT ({name}.nii.gz) to render the {missing[0]} picture from"
                    raise InputError(f"{files[0].parent}: {text}; add it, or move the files elsewhere")
                if missing:
                    jobs.append((name, ct, missing))
    jobs = du.broadcast_object(jobs)
    with du.agree_on_errors():
        shown = {"desc": "rendering", "disable": rank != 0 or not sys.stderr.isatty(), "leave": False}
        for name, ct, missing in tqdm(jobs[rank::world_size], **shown):
            hu, affine = read_ct(ct)
            spacing = np.sqrt((affine[:3, :3] ** 2).sum(0))
            for view in missing:
                path = ct.parent / f"{name}{NAMES[view][0]}.png"
                temporary = path.with_name(f".{path.name}.tmp")
                try:
                    Image.fromarray(drr.render_drr(hu, spacing, view)).save(temporary, format="png")
                    temporary.replace(path)
                except OSError as error:
                    temporary.unlink(missing_ok=True)
                    raise InputError(f"{path}: cannot be written ({error.strerror}); make room") from None
                written += 1
    return sum(du.gather_objects(written))


# --- split ------------------------------------------------------------------------------------------------------------


def split_patients(patients: list[Patient], seed: int, files: list[str] | None = None) -> dict[str, list[int]]:
    """{"train", "val", "test": places in `patients`}: 80/10/10 by patient, or as three text files of ids say.

    At least one patient in each part. Raises InputError.
    """
    if files:
        place = {patient.id: k for k, patient in enumerate(patients)}
        parts, seen = {}, {}
        for name, path in zip(SPLITS, files, strict=True):
            try:
                lines = Path(path).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{path}: cannot be read ({error}); check --split_files") from None
            parts[name] = []
            for row, line in enumerate(lines, start=1):
                if not (text := line.strip()):
                    continue
                if text not in place:
                    raise InputError(f"{path}:{row}: no patient {text!r} in the data folder; remove the line")
                if text in seen:
                    raise InputError(f"{path}:{row}: patient {text} is in {seen[text]} already; keep it in one split")
                seen[text] = f"{path}:{row}"
                parts[name].append(place[text])
            if not parts[name]:
                raise InputError(f"{path}: names no patient; the {name} split needs at least one")
        return parts
    if len(patients) < 3:
        raise InputError(f"--dataset_path: {len(patients)} patients; training, validation and test need at least 3")
    order = permute(np.arange(len(patients)), len(patients), seed, 0).tolist()
    held = max(1, round(len(patients) / 10))
    return {"train": order[2 * held :], "val": order[:held], "test": order[held : 2 * held]}


# --- decoded, cached, checked -----------------------------------------------------------------------------------------


class Decoded:
    """Decoded files, kept on disk: volumes on a stage's grid, and pictures at the encoder's size.

    flips: (vertical, pa horizontal, lat horizontal). Everything here raises InputError for a file that cannot be used.
    """

    def __init__(self, img_size: int, flips: tuple[bool, bool, bool], cache_dir: str | None):
        self.img_size, self.flips = img_size, flips
        self.cache = DiskCache(cache_dir, ".bin")

    def key(self, path: Path, what) -> str:
        try:
            return f"{identity(path)}|{what}|2" if self.cache.folder else ""
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); check --dataset_path") from None

    def volume(self, path: Path, size: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(int16 HU (X, Y, Z) clipped, field of view in mm (3,) float32) on a stage's grid."""
        data = self.cache.get(self.key(path, tuple(size)), 12 + 2 * math.prod(size))
        if data is None:
            hu, affine = read_ct(path)
            extent = (np.sqrt((affine[:3, :3] ** 2).sum(0)) * hu.shape).astype(np.float32)
            data = self._grid(path, torch.from_numpy(hu).clamp_(drr.HU_MIN, drr.HU_MAX), extent, size)
        return self._unpack(data, size)

    def survey(self, path: Path, sizes: list) -> tuple[np.ndarray, np.ndarray]:
        """(field of view in mm (3,), line integrals of both views at the file's own resolution (2, CHECK_SIZE,
        CHECK_SIZE)), float32; reads the file once, and only if a grid or these are not kept yet."""
        shape = (len(drr.VIEWS), CHECK_SIZE, CHECK_SIZE)
        data = self.cache.get(self.key(path, "survey"), 12 + 4 * math.prod(shape))
        missing = [size for size in sizes if not self.cache.has(self.key(path, tuple(size)), 12 + 2 * math.prod(size))]
        if data is None or (missing and self.cache.folder):
            hu, affine = read_ct(path)
            spacing = np.sqrt((affine[:3, :3] ** 2).sum(0))
            extent = (spacing * hu.shape).astype(np.float32)
            clipped = torch.from_numpy(hu).clamp_(drr.HU_MIN, drr.HU_MAX)
            for size in missing if self.cache.folder else ():
                self._grid(path, clipped, extent, size)
            mm = torch.from_numpy(spacing).float()[None]
            volume = drr.normalise(clipped)[None, None]
            parts = [drr.resize(drr.project(volume, mm, view), shape[1:])[0, 0] for view in drr.VIEWS]
            data = extent.tobytes() + torch.stack(parts).contiguous().numpy().tobytes()
            self.cache.put(self.key(path, "survey"), data)
        return np.frombuffer(data, np.float32, 3), np.frombuffer(data, np.float32, offset=12).reshape(shape)

    def _grid(self, path: Path, clipped: torch.Tensor, extent: np.ndarray, size) -> bytes:
        grid = drr.resize(clipped, size).round().to(torch.int16).contiguous().numpy()
        data = extent.tobytes() + grid.tobytes()
        self.cache.put(self.key(path, tuple(size)), data)
        return data

    def _unpack(self, data: bytes, size) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = bytearray(data)
        extent = torch.frombuffer(buffer, dtype=torch.float32, count=3)
        return torch.frombuffer(buffer, dtype=torch.int16, offset=12).view(*size), extent

    def picture(self, path: Path, view: str) -> torch.Tensor:
        """int16 (img_size, img_size), grey values 0..1 as -32768..32767: see grey()."""
        flips = self.flips[0], self.flips[1 + drr.VIEWS.index(view)]
        key, shape = self.key(path, (self.img_size, flips)), (self.img_size, self.img_size)
        data = self.cache.get(key, 2 * math.prod(shape))
        if data is None:
            grey = read_picture(path, self.img_size, *flips)
            data = ((grey * 65535).round() - 32768).to(torch.int16).numpy().tobytes()
            self.cache.put(key, data)
        return torch.frombuffer(bytearray(data), dtype=torch.int16).view(shape)

    def xrays(self, patient: Patient) -> torch.Tensor:
        """int16 (views, img_size, img_size)."""
        return torch.stack([self.picture(p, v) for p, v in zip(patient.xrays, drr.VIEWS, strict=False)])


def grey(xrays: torch.Tensor) -> torch.Tensor:
    """Pictures as Decoded keeps them -> float32 -1..1."""
    return (xrays.float() + 0.5) / 32767.5


def look(patient: Patient, decoded: Decoded, sizes: list) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """(line integrals, pictures, field of view in mm, "" or what is wrong with a file): the first two (views,
    CHECK_SIZE, CHECK_SIZE)."""
    shape = (len(patient.xrays), CHECK_SIZE, CHECK_SIZE)
    try:
        extent, integrals = decoded.survey(patient.ct, sizes)
        pictures = drr.resize(grey(decoded.xrays(patient))[None], shape[1:])[0]
        return integrals[: shape[0]], pictures.numpy(), extent, ""
    except InputError as error:
        return np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(3, np.float32), str(error)


def read_all(
    patients: list[Patient], decoded: Decoded, sizes: list, threads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All ranks together: decode (and keep) every patient once; what `look` finds, of all patients.

    Raises InputError on all ranks for the first file that cannot be used.
    """
    rank, world_size = du.world()
    mine = patients[rank::world_size]
    with ThreadPoolExecutor(max(1, threads)) as pool:
        shown = {"desc": "reading CTs", "disable": rank != 0 or not sys.stderr.isatty(), "leave": False}
        found = list(tqdm(pool.map(lambda p: look(p, decoded, sizes), mine), total=len(mine), **shown))
    everyone = du.gather_objects(found)
    found = [everyone[k % world_size][k // world_size] for k in range(len(patients))]
    if bad := [text for *_, text in found if text]:
        raise InputError(bad[0] + (f" (and {len(bad) - 1} more patients with bad files)" if len(bad) > 1 else ""))
    integrals, pictures, extents, _ = zip(*found, strict=True)
    return np.stack(integrals), np.stack(pictures), np.stack(extents)


def fit_greys(integrals: np.ndarray, pictures: np.ndarray) -> list[tuple[float, float, float]]:
    """[(a, b, r)] per view: grey (-1..1) = a * line integral + b by least squares over the patients, correlation r."""
    fits = []
    for view in range(integrals.shape[1]):
        x, y = integrals[:, view].ravel().astype(np.float64), pictures[:, view].ravel().astype(np.float64)
        slope = float(((x - x.mean()) * (y - y.mean())).mean() / x.var())
        fits.append((slope, float(y.mean() - slope * x.mean()), float(np.corrcoef(x, y)[0, 1])))
    return fits


def correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(N, side, side) x 2 -> (N, N): Pearson correlation of each picture of the second with each of the first."""
    a, b = (images.reshape(len(images), -1).astype(np.float64) for images in (first, second))
    a, b = (x - x.mean(1, keepdims=True) for x in (a, b))
    a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (a, b))
    return b @ a.T


def fitting_turn(integral: np.ndarray, picture: np.ndarray, sign: float, now: float) -> str:
    """How to turn a single picture so that it fits its CT, for an error message; "" where no turn helps much."""
    turns = {"upside down": (-1, 1), "mirrored": (1, -1), "turned by 180 degrees": (-1, -1)}
    values = {}
    for name, (up, along) in turns.items():
        values[name] = sign * float(correlations(integral[None], picture[None, ::up, ::along])[0, 0])
    best = max(values, key=values.__getitem__)
    return f"; {best} it fits ({values[best]:.2f})" if values[best] > max(0.5, now + 0.3) else ""


def check_alignment(patients: list[Patient], integrals: np.ndarray, pictures: np.ndarray) -> None:
    """Whether each X-ray is one of its own CT, as one looks at the patient. Raises InputError
    naming those that are not.

    A picture must look like its CT's projection (|r| >= 0.5), and more so than like the other view's. With 5 patients
    or more, what is peculiar to a patient (the difference from the mean picture) must agree too: where all are turned
    alike, the turn that helps is named; a picture whose agreement lies far below the others' (by 0.5) belongs to
    somebody else, and is said to fit whom it fits best. Negative pictures (bone dark) are as good. A mirrored picture
    of an asymmetric crop looks like a negative, so sign and turn are chosen together, by the largest |r|.
    """
    views = drr.VIEWS[: integrals.shape[1]]
    raw = {(a, b): correlations(integrals[:, j], pictures[:, k])
           for j, a in enumerate(views) for k, b in enumerate(views)}  # fmt: skip
    many = len(patients) >= 5

    def peculiar(k: int, up: int = 1, along: int = 1) -> np.ndarray:
        """Correlations of (the projections, the pictures, turned) of view k, of what differs from the mean."""
        shown = pictures[:, k, ::up, ::along]
        if not many:
            return correlations(integrals[:, k], shown)
        return correlations(integrals[:, k] - integrals[:, k].mean(0), shown - shown.mean(0))

    for k, view in enumerate(views):
        turns = {
            "--flip_drrs_vertical the other way": (-1, 1),
            f"--flip_drrs_horizontal {view}": (1, -1),
            f"--flip_drrs_vertical the other way and --flip_drrs_horizontal {view}": (-1, -1),
        }
        turned = {name: float(np.median(np.diag(peculiar(k, *turn)))) for name, turn in turns.items()}
        best = max(turned, key=lambda name: abs(turned[name]))
        now = float(np.median(np.diag(peculiar(k))))
        # a turn must win by a margin; hardly one where it also makes negatives positive, or the reverse
        margin = 0.2 if many else 0.05
        if now * turned[best] < 0 and abs(turned[best]) >= 0.5:
            margin = 0.01
        if abs(turned[best]) > abs(now) + margin:
            text = f"the {view} pictures do not lie as the CTs do (median correlation {now:.2f}, turned"
            raise InputError(f"--dataset_path: {text} {turned[best]:.2f}); give {best}")
        own = np.diag(raw[view, view])
        sign = 1.0 if np.median(own) >= 0 else -1.0
        own, mine, now = sign * own, sign * peculiar(k), sign * now
        # {place of a patient: what its picture is instead, if that is known}
        wrong = {int(i): fitting_turn(integrals[i, k], pictures[i, k], sign, own[i]) for i in np.flatnonzero(own < 0.5)}
        if many and now > 0.6:
            for i in np.flatnonzero(np.diag(mine) < now - 0.5):
                j = int(mine[i].argmax())
                fits = mine[i, j] > mine[i, i] + 0.3
                somebody = f"; it fits the CT of {patients[j].id} ({mine[i, j]:.2f})" if fits else ""
                wrong[int(i)] = wrong.get(int(i)) or somebody
        for other in views:
            for i in np.flatnonzero(sign * np.diag(raw[other, view]) > own + 0.05):
                wrong[int(i)] = f"; it looks like the {other} view"
        if wrong:
            i = min(wrong)
            names = ", ".join(patients[j].id for j in sorted(wrong)[:8]) + (" ..." if len(wrong) > 8 else "")
            more = f" ({len(wrong)} patients: {names})" if len(wrong) > 1 else ""
            text = f"not a {view} picture of {patients[i].ct} (correlation {own[i]:.2f}){wrong[i]}{more}"
            raise InputError(f"{patients[i].xrays[k]}: {text}; put the right one there, or --skip_alignment_check")


# --- the data set -----------------------------------------------------------------------------------------------------


class XrayCtDataset(Dataset):
    """Some patients on one stage's grid: volume int16 HU (X, Y, Z), extent (3,) mm, xrays int16 (views, H, W), index
    (place in `patients`), error ("" or what is wrong, for a loop that ends all ranks together).

    in_memory keeps what was decoded in this process. No augmentation here: see augment.
    """

    def __init__(self, patients: list[Patient], places: list[int], decoded: Decoded, size, in_memory: bool = False):
        self.patients, self.places, self.decoded, self.size = patients, places, decoded, tuple(size)
        self.kept: dict[int, dict] | None = {} if in_memory else None

    def __len__(self) -> int:
        return len(self.places)

    def bytes(self) -> int:
        """Memory that the decoded patients take."""
        views = len(self.patients[0].xrays)
        return len(self.places) * 2 * (math.prod(self.size) + views * self.decoded.img_size**2)

    def __getitem__(self, k: int) -> dict:
        if self.kept is not None and k in self.kept:
            return self.kept[k]
        place, error = self.places[k], ""
        patient = self.patients[place]
        try:
            xrays = self.decoded.xrays(patient)
            volume, extent = self.decoded.volume(patient.ct, self.size)
        except InputError as reason:
            error = str(reason)
            volume, extent = torch.zeros(self.size, dtype=torch.int16), torch.ones(3)
            xrays = torch.zeros(len(patient.xrays), *2 * (self.decoded.img_size,), dtype=torch.int16)
        item = {"volume": volume, "extent": extent, "xrays": xrays, "index": place, "error": error}
        if self.kept is not None and not error:
            self.kept[k] = item
        return item


def augment(
    volume: torch.Tensor, xrays: torch.Tensor, indices: list[int], seed: int, epoch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B, 1, X, Y, Z), (B, views, H, W) -> (volume, pictures that belong to it, pictures as the net sees them).

    The patient is moved up or down by up to 5 %: rows of both views run along z, so they stay true projections; a flip
    would break the lateral view. What the net sees also varies in brightness, contrast and noise, as exposures do. A
    function of (seed, epoch, patient).
    """
    volumes, clean, exposed, seeds = [], [], [], []
    for one, pictures, index in zip(volume, xrays, indices, strict=True):
        noise = np.random.default_rng([seed % 2**63, epoch, int(index)])
        depth, rows = one.shape[-1], pictures.shape[-2]
        most = int(0.05 * depth)
        shift = int(noise.integers(-most, most + 1))
        if shift:
            order = (torch.arange(depth, device=one.device) - shift).clamp(0, depth - 1)
            one = one.index_select(-1, order)
            # the picture's row of a place in the volume: row r shows z = (rows - r - 0.5) * depth / rows
            at = (torch.arange(rows, device=one.device) + shift * rows / depth).clamp(0, rows - 1)
            low = at.floor().long()
            share = (at - low)[:, None]
            high = (low + 1).clamp(max=rows - 1)
            pictures = pictures[:, low] * (1 - share) + pictures[:, high] * share
        gain, offset = float(noise.uniform(0.95, 1.05)), float(noise.uniform(-0.03, 0.03))
        seeds.append(int(noise.integers(2**62)))
        volumes.append(one)
        clean.append(pictures)
        exposed.append(pictures * gain + offset)
    grain = draw_noise(xrays.shape[1:], xrays.device, seeds)
    return torch.stack(volumes), torch.stack(clean), torch.stack(exposed) + 0.01 * grain


def draw_noise(shape: tuple[int, ...], device: torch.device, seeds: list[int]) -> torch.Tensor:
    """Gaussian noise (len(seeds), *shape) on the device, each part a function of its seed alone.

    Drawn on the CPU: CUDA's generator deals its numbers out by the GPU's number of multiprocessors, so that a large
    tensor differs between GPU models. Large parts are drawn side by side, in threads that end here, as a data loader
    may fork next.
    """
    noise = torch.empty(len(seeds), *shape, pin_memory=device.type == "cuda")

    def draw(place: int) -> None:
        noise[place].normal_(generator=torch.Generator().manual_seed(seeds[place]))

    # a fake tensor, of a step that is only traced, has no values and one thread
    if noise.numel() < 2**18 or type(noise) is not torch.Tensor:
        for place in range(len(seeds)):
            draw(place)
    else:
        with ThreadPoolExecutor(min(len(seeds), NOISE_THREADS)) as pool:
            list(pool.map(draw, range(len(seeds))))
    return noise.to(device, non_blocking=True)
