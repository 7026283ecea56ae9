"""Patients of guide 3: their files, checks of the contents, the split, the cache of decoded files, the data set.

A data folder has one sub-folder per patient: <id>/<id>.nii.gz (or .nii, .npy; HU), <id>_pa_drr.png (or _pa, _frontal)
and <id>_lat_drr.png (or _lat, _lateral; DICOM, .npy, ...). The sub-folders are optional. A CT may also be a folder of
DICOM slices.
"""

import hashlib
import os
import re
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

import distributed_utils as du
from tasks.cascade.geometry import (
    HU_MAX,
    HU_MIN,
    VIEWS,
    Grey,
    Prior,
    learn_prior,
    normalise,
    project,
    rays_of,
    render_drr,
    resize,
)
from utils.cli import InputError, first_line, refuse
from utils.images import IMAGE_ENDINGS, bits_window, is_dicom, open_upright, to_bytes
from utils.sampler import permute
from utils.tables import read_text
from utils.volumes import Volume, describe, files_of, read_volume, stamp

CT_FILE = re.compile(r"(?P<id>.+)\.(nii|nii\.gz|npy)$", re.IGNORECASE)
XRAY_ENDINGS = "|".join(map(re.escape, (*IMAGE_ENDINGS, ".npy")))
XRAY_FILE = re.compile(rf"(?P<id>.+)_(?P<view>pa|frontal|lat|lateral)(_drr)?({XRAY_ENDINGS})$", re.IGNORECASE)
VIEW_OF = {"pa": 0, "frontal": 0, "lat": 1, "lateral": 1}
# alignment check: image side in pixels, and lowest accepted correlation of X-ray and projection after subtracting the
# mean patient
CHECK, ALIKE = 32, 0.5
# linear posterior: maximum number of training patients, side of the grid
KNOWN, PRIOR_SIDE = 256, 64


class Flips(NamedTuple):
    """How X-rays are stored: whether the feet are at the top, and which views are mirrored."""

    feet_up: bool
    mirrored: tuple[bool, ...]

    def flags_to(self, seen: "Flips") -> list[str]:
        """Return the flags to change if images read with these flips still look flipped by `seen`."""
        flags = []
        if seen.feet_up:
            flags.append("--flip_drrs_vertical" if self.feet_up else "--no-flip_drrs_vertical")
        if any(seen.mirrored):
            pairs = zip(VIEWS, self.mirrored, seen.mirrored, strict=False)
            views = [view for view, own, still in pairs if own != still]
            flags.append(f"--flip_drrs_horizontal {'both' if len(views) == 2 else (views or ['none'])[0]}")
        return flags


class Patient(NamedTuple):
    id: str
    ct: Path | None
    xrays: tuple[Path, ...]


# --- finding files ----------------------------------------------------------------------------------------------------


def list_files(root: Path) -> dict[str, dict]:
    """Find a data folder's files: {id: {"ct": Path, 0: frontal, 1: lateral}}. Raises InputError for duplicates."""
    if not root.is_dir():
        raise InputError(
            f"{root}: no such folder; give --dataset_path. None? `make demo TASK=cascade` makes some up and trains; "
            f"`python -m tools.sample_data cascade {root}` only makes them up"
        )
    found: dict[str, dict] = {}
    problems = []
    for path in sorted(path for depth in range(4) for path in root.glob("*/" * depth + "[!.]*")):
        match, deep = None, len(path.relative_to(root).parts) > 2
        if not deep and (match := XRAY_FILE.match(path.name)):
            kind = VIEW_OF[match["view"].lower()]
        elif not deep and (match := CT_FILE.match(path.name)):
            kind = "ct"
        elif is_dicom(path):
            if path.parent == root:
                raise InputError(f"{path}: a DICOM slice beside the patients; put each series into a folder of its own")
            kind, path = "ct", path.parent
        else:
            continue
        # a sub-folder is one patient, whatever the names of its files
        name = match["id"] if match and path.parent == root else path.relative_to(root).parts[0]
        files = found.setdefault(name, {})
        if files.setdefault(kind, path) != path:
            problems.append(f"{path}: beside {files[kind].name}; keep one of a kind per patient")
    refuse(list(dict.fromkeys(problems)), "files are a second one of their kind")
    return found


def find_patients(root: Path, num_views: int, need_ct: bool = True) -> list[Patient]:
    """List a data folder's patients. Raises InputError that names all missing files."""
    patients, problems = [], []
    for name, files in list_files(root).items():
        if need_ct and "ct" not in files:
            problems.append(f"{root}/{name}: no CT ({name}.nii.gz); add it, or move the files elsewhere")
        for view in range(num_views):
            if view not in files:
                advice = f"add it, render it with --make_drrs {root}, or train on the frontal view with --num_views 1"
                problems.append(f"{root}/{name}: no {VIEWS[view]} picture ({name}_{VIEWS[view]}_drr.png); {advice}")
        patients.append(Patient(name, files.get("ct"), tuple(files.get(view) for view in range(num_views))))
    refuse(problems, "files are missing")
    if not patients:
        raise InputError(f"{root}: holds no patients (<id>/<id>.nii.gz); check the folder's name")
    return patients


def split_patients(patients: list[Patient], seed: int, files: list[str] | None) -> dict[str, list[int]]:
    """Split the indices of patients into "train", "val" and "test", by lists of ids in `files` or else 80/10/10."""
    places = {patient.id: place for place, patient in enumerate(patients)}
    parts = [list(range(len(patients)))]
    if files:
        try:
            names = [read_text(Path(path)).split() for path in files]
            parts = [sorted(places[name] for name in part) for part in names]
        except ValueError:
            raise InputError("--split_files: not text; save the lists anew, in UTF-8") from None
        except OSError as error:
            raise InputError(f"{error.filename}: cannot be read ({error.strerror}); check --split_files") from None
        except KeyError as error:
            raise InputError(f"--split_files: no patient {error} in the data folder; remove the line") from None
        if len(set().union(*parts)) < sum(map(len, parts)):
            raise InputError("--split_files: a patient is named twice; keep each in one split")
    held = {} if len(parts) == 1 else {"test": parts[-1]}
    if len(parts) == 3:
        split = {"train": parts[0], "val": parts[1]} | held
    else:
        train = sorted(parts[0])
        order = [train[place] for place in permute(np.arange(len(train)), len(train), seed, 0)]
        tenth = max(1, round(len(order) / 10))
        rest = order[tenth:] if held else order[2 * tenth :]
        split = {"train": rest, "val": order[:tenth]} | (held or {"test": order[tenth : 2 * tenth]})
    if not all(split.values()) or len(split["train"]) < 2:
        raise InputError("--dataset_path: two patients for training, and one each to validate and to test, are needed")
    return split


# --- reading files ----------------------------------------------------------------------------------------------------


def read_ct(path: Path) -> Volume:
    """Read a CT in RAS+ order; a .npy file has 1 mm voxels. Raises InputError, also if the values are not HU."""
    try:
        volume = Volume(np.load(path).astype(np.float32), np.eye(4), "RAS") if path.suffix == ".npy" else None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be used ({error}); replace it") from None
    volume = volume or read_volume(path)
    hu = volume.values
    if hu.ndim != 3 or min(hu.shape) < 4 or not np.isfinite(hu).all():
        raise InputError(f"{path}: shape {hu.shape}, or values that are NaN; a volume is needed; replace it")
    if hu.min() >= -200 or hu.min() == hu.max():
        raise InputError(f"{path}: its lowest value is {hu.min():g}, so it is not in HU (air is -1000); convert it")
    return volume


def read_xray(path: Path, size: int, upside_down: bool, mirrored: bool) -> Tensor:
    """Read an X-ray as (size, size) float32 in -1..1, upright and not mirrored. Raises InputError.

    Floats must be in 0..1 or -1..1. Other values are divided by the maximum of 8, 10, 12, 14 or 16 bits, not by the
    image's own range, so that a line integral has the same grey value in all patients.
    """
    try:
        if path.suffix == ".npy":
            stored = np.load(path).squeeze()
        else:
            image = open_upright(path, raw=True)
            stored = np.asarray(image if image.mode == "F" else image.convert("L"))
        values = stored.astype(np.float32)
        low, high = float(values.min()), float(values.max())
        if values.ndim != 2 or not low < high or low < (-1 if high <= 1 else 0) or high > 65535:
            raise ValueError(f"shape {stored.shape}, grey values {low:g} to {high:g}")
    except Exception as error:
        raise InputError(f"{path}: not a readable picture ({first_line(error)}); replace it") from None
    if stored.dtype.kind == "f" and high <= 1:
        values = values if low < 0 else 2 * values - 1
    else:
        values = (to_bytes(values, bits_window(values), np.float32) if high > 255 else values) * (2 / 255) - 1
    values = values[:: -1 if upside_down else 1, :: -1 if mirrored else 1]
    return resize(torch.from_numpy(np.ascontiguousarray(values))[None, None], (size, size))[0, 0]


def make_drrs(root: Path) -> int:
    """All ranks: render the missing X-rays of every CT below root and return their number. Raises InputError."""
    from PIL import Image

    rank, world_size = du.world()
    jobs = []
    with du.agree_on_errors():
        # only rank 0 looks for missing images, because the other ranks could find unfinished ones
        for name, files in list_files(root).items() if rank == 0 else ():
            jobs += [(name, files["ct"], view) for view in (0, 1) if "ct" in files and view not in files]
    jobs = du.broadcast_object(jobs)
    with du.agree_on_errors():
        for name, ct, view in tqdm(jobs[rank::world_size], "rendering", delay=3, disable=rank > 0):
            folder = root / name if (root / name).is_dir() else root
            path = folder / f"{name}_{VIEWS[view]}_drr.png"
            volume = read_ct(ct)
            picture = render_drr(volume.values, volume.spacing, view)
            Image.fromarray(picture).save(path.with_suffix(".tmp"), format="png")
            os.replace(path.with_suffix(".tmp"), path)
    return len(jobs)


# --- all patients of a run --------------------------------------------------------------------------------------------


class Data:
    """The patients of a run: split, decoded files, grey values of the views, training patients' mean field of view."""

    def __init__(self, args: Namespace, sizes: list[list[int]]):
        """All ranks: find, check and cache all patients' files. sizes: the stages' grids. Raises InputError."""
        self.args = args
        mirrored = tuple(args.flip_drrs_horizontal in (view, "both") for view in VIEWS)
        self.flips = Flips(args.flip_drrs_vertical is False, mirrored)
        self.prior_size = [min(PRIOR_SIDE, side) for side in sizes[-1]]
        self.sizes = [tuple(size) for size in (*sizes, self.prior_size)]
        self.places: dict[tuple, Path] = {}
        if args.predict:
            return
        with du.agree_on_errors():
            self.patients = find_patients(Path(args.dataset_path), args.num_views)
            self.split = split_patients(self.patients, args.split_seed, args.split_files)
        self.ids = {name: sorted(self.patients[place].id for place in part) for name, part in self.split.items()}
        self.digest = hashlib.sha256(repr(self.ids).encode()).hexdigest()[:8]
        rays, images, extents, summaries = self.survey()
        du.print_main(f"volumes: {describe(summaries, 'RAS')}")
        train = self.split["train"]
        with du.agree_on_errors():
            if not args.skip_alignment_check:
                self.check_alignment(rays, images)
            self.greys = [fit_grey(rays[train, view], images[train, view]) for view in range(args.num_views)]
        self.extent = extents[train].mean(0).tolist()

    def survey(self) -> tuple[np.ndarray, ...]:
        """All ranks: read every patient. Raises InputError that lists all unusable files.

        Returns line integrals and images, both (patients, views, CHECK, CHECK), extents (patients, 3) and summaries.
        """
        rank, world_size = du.world()

        def read(patient: Patient) -> tuple | str:
            try:
                images = resize(self.xrays(patient)[None], (CHECK, CHECK))[0].numpy()
                _, extent, rays, summary = self.volume(patient, self.sizes[-1])
                return rays, images, extent, summary
            except InputError as reason:
                return str(reason)
            except OSError as reason:
                return f"{patient.id}: {reason.filename}: {reason.strerror}; replace the file"

        with ThreadPoolExecutor(max(1, self.args.num_workers)) as pool:
            own = self.patients[rank::world_size]
            own = list(
                tqdm(pool.map(read, own), "reading patients", len(own), delay=3, mininterval=2, disable=rank > 0)
            )
        rows = [None] * len(self.patients)
        for first, part in enumerate(du.gather_objects(own)):
            rows[first::world_size] = part
        refuse([row for row in rows if isinstance(row, str)], "patients cannot be used")
        return tuple(map(np.stack, zip(*rows, strict=True)))

    def check_alignment(self, rays: np.ndarray, images: np.ndarray) -> None:
        """Raise InputError if X-rays do not match their CT's projection; for flipped X-rays it names the flags to set.

        The mirror image of a symmetric body matches equally well, so a flip must improve the correlation clearly.
        """
        views = range(self.args.num_views)

        def alike(view: int, feet_up: bool, mirrored: bool) -> np.ndarray:
            seen = images[:, view, :: -1 if feet_up else 1, :: -1 if mirrored else 1]
            return np.array([abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) for a, b in zip(rays[:, view], seen)])  # noqa: B905

        medians = {
            Flips(feet_up, mirrored): [np.median(alike(view, feet_up, mirrored[view])) for view in views]
            for feet_up in (False, True)
            for mirrored in product((False, True), repeat=len(views))
        }
        now = next(iter(medians.values()))
        best, scores = max(
            medians.items(), key=lambda item: sum(item[1]) - 0.02 * sum((item[0].feet_up, *item[0].mirrored))
        )
        if max(b - a for a, b in zip(now, scores, strict=True)) > 0.05:
            flags = self.flips.flags_to(best)
            found = ", ".join(f"{VIEWS[view]} {now[view]:.2f} -> {scores[view]:.2f}" for view in views)
            raise InputError(f"--dataset_path: X-rays lie otherwise than CTs (r {found}); give {' '.join(flags)}")
        for view in views:
            # all bodies look similar, so only the difference from the mean identifies a patient
            own = [part - part.mean(0) for part in (rays[:, view], images[:, view])]
            sign = np.sign(np.corrcoef(rays[:, view].ravel(), images[:, view].ravel())[0, 1])
            r = sign * (own[0] * own[1]).sum((1, 2)) / np.sqrt((own[0] ** 2).sum((1, 2)) * (own[1] ** 2).sum((1, 2)))
            wrong = [self.patients[place].id for place in np.flatnonzero(~(r > ALIKE))]
            if wrong:
                names = ", ".join(wrong[:8])
                reason = f"not the {VIEWS[view]} picture of its CT (r < {ALIKE}) in {len(wrong)} patients: {names}"
                raise InputError(f"--dataset_path: {reason}; put the right ones there, or --skip_alignment_check")

    def known_rays(self, greys: list[Grey]) -> Tensor:
        """rays_of() the X-rays of the training patients in the linear posterior: (N, P)."""
        known = [self.patients[place] for place in self.split["train"][:KNOWN]]
        extents = torch.from_numpy(np.stack([self.volume(patient, None)[1] for patient in known]))
        return torch.cat([
            rays_of(self.xrays(patient)[None], extent[None], greys, self.prior_size)
            for patient, extent in zip(known, extents, strict=True)
        ])  # fmt: skip

    def learn_prior(self) -> Prior:
        """All ranks: fit the linear posterior to the training patients, identically on all ranks and at each start."""
        prior, threads = None, torch.get_num_threads()
        with du.agree_on_errors():
            if du.world()[0] == 0:
                # one thread, because the last bits of the result depend on the number of threads
                torch.set_num_threads(1)
                known = [self.patients[place] for place in self.split["train"][:KNOWN]]
                volumes = np.stack([self.volume(patient, self.prior_size)[0] for patient in known])
                prior = learn_prior(
                    normalise(torch.from_numpy(volumes).float()), self.known_rays(self.greys), self.greys
                )
                torch.set_num_threads(threads)
        return du.broadcast_object(prior)

    # --- cache of decoded files ---------------------------------------------------------------------------------------

    def kept(self, path: Path, content) -> Path:
        """Path of the cached `content` of a file. A changed file gets a new path; changes are detected once per run."""
        if (path, content) not in self.places:
            files = files_of(path) if path.is_dir() else [path]
            name = hashlib.sha256(f"{stamp(files)}{content}5".encode()).hexdigest()[:32]
            self.places[path, content] = Path(self.args.cache_dir, name + ".npy")
        return self.places[path, content]

    def volume(self, patient: Patient, size: list[int] | None) -> tuple[np.ndarray | None, ...]:
        """Return a patient's volume, extent, line integrals and Volume.summary(). Raises InputError.

        volume: int16 HU on a grid of this size, or None if size is None. extent: (3,) mm of the field of view. line
        integrals: (views, CHECK, CHECK). The CT is decoded once for all of the run's grids.
        """
        paths = {other: self.kept(patient.ct, other) for other in self.sizes}
        facts = self.kept(patient.ct, ("facts", self.args.num_views))
        if not all(path.is_file() for path in (facts, *paths.values())):
            found = read_ct(patient.ct)
            hu = torch.from_numpy(np.array(found.values, order="C")).clamp_(HU_MIN, HU_MAX)
            extent = (found.spacing * hu.shape).astype(np.float32)
            for other, path in paths.items():
                keep(path, resize(hu, other).round().to(torch.int16).numpy())
            whole = normalise(hu)[None, None], torch.from_numpy(extent)[None]
            rays = [resize(project(*whole, view), (CHECK, CHECK))[0, 0].numpy() for view in range(self.args.num_views)]
            keep(facts, np.concatenate([extent, found.summary().astype(np.float32), np.stack(rays).ravel()]))
        extent, summary, rays = np.split(load_kept(facts), [3, 9])
        return load_kept(paths[tuple(size)]) if size else None, extent, rays.reshape(-1, CHECK, CHECK), summary

    def xrays(self, patient: Patient) -> Tensor:
        """X-rays (views, img_size, img_size) float32 in -1..1, cached in 16 bits. Raises InputError."""
        images, side = [], self.args.img_size
        for view, path in enumerate(patient.xrays):
            turn = (self.flips.feet_up, self.flips.mirrored[view])
            kept = self.kept(path, ("xray", view, side, turn))
            if not kept.is_file():
                keep(kept, (read_xray(path, side, *turn) * 32767).round().to(torch.int16).numpy())
            images.append(torch.from_numpy(load_kept(kept)))
        return torch.stack(images).float() / 32767


def load_kept(path: Path) -> np.ndarray:
    """Load an array that keep() wrote. A damaged file raises InputError and is deleted; the next start recreates it."""
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):
        path.unlink(missing_ok=True)
        raise InputError(f"{path}: a damaged file in --cache_dir, now deleted; start again") from None


def keep(path: Path, values: np.ndarray) -> None:
    """Write an array atomically. Raises InputError if that fails, for example because the disk is full."""
    temporary = path.with_suffix(f".{os.getpid()}.{du.world()[0]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.save(file, values)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path.parent}: not written ({error.strerror}); make room or choose a --cache_dir") from None


def fit_grey(integrals: np.ndarray, images: np.ndarray) -> Grey:
    """Fit a view's grey values to the line integrals of all training patients by least squares."""
    x, y = integrals.ravel().astype(np.float64), images.ravel().astype(np.float64)
    slope = ((x - x.mean()) * (y - y.mean())).mean() / x.var()
    offset = y.mean() - slope * x.mean()
    if not abs(slope) > 1e-6:
        raise InputError("--dataset_path: the X-rays have nothing to do with the CTs; see --make_drrs")
    return Grey(float(slope), float(offset), float((y - offset - slope * x).std() / abs(slope)))


class XrayCtDataset(Dataset):
    """A split on a stage's grid, augmented in training, with the random draws for each sample.

    A sample: volume (X, Y, Z) int16 HU; extent (3,) mm; xrays (views, H, W), projections of the volume; seen, the
    X-rays shown to the network; index; row, the patient's index in the linear posterior or -1; seed and draws (3,) in
    0..1, functions of (seed, epoch, patient); other, the next patient's X-rays (test set only); error, "" or the reason
    why the sample is unusable.

    The augmentation shifts a patient up or down by up to 5 %. Both views' image rows follow z, so the shifted X-rays
    remain true projections. `seen` also varies in exposure and noise. A flip would make the lateral view wrong.
    """

    def __init__(self, data: Data, split: str, size: list[int]):
        self.data, self.split, self.size = data, split, tuple(size)
        self.places = data.split[split]
        self.memory: dict[int, tuple] = {}

    def __len__(self) -> int:
        return len(self.places)

    def read(self, index: int) -> tuple:
        if index in self.memory:
            return self.memory[index]
        patient = self.data.patients[self.places[index]]
        volume, extent, *_ = self.data.volume(patient, self.size)
        found = torch.from_numpy(volume), torch.from_numpy(extent), self.data.xrays(patient)
        if self.data.args.cache_in_memory:
            self.memory[index] = found
        return found

    def __getitem__(self, index: int) -> dict:
        args, number, error = self.data.args, int(index), ""
        try:
            volume, extent, xrays = self.read(number)
            other = self.read((number + 1) % len(self))[2] if self.split == "test" else torch.zeros(0)
        except (InputError, OSError, ValueError) as reason:
            # return zeros and the reason, so that all ranks stop together
            error = f"{self.data.patients[self.places[number]].id}: {reason}"
            xrays = torch.zeros(args.num_views, args.img_size, args.img_size)
            other = xrays if self.split == "test" else torch.zeros(0)
            volume, extent = torch.zeros(self.size, dtype=torch.int16), torch.ones(3)
        epoch = getattr(index, "epoch", None)
        rng = np.random.default_rng([args.seed % 2**63, number] + [epoch] * (epoch is not None))
        seed, draws, seen = int(rng.integers(2**62)), rng.random(3), xrays
        if epoch is not None and args.augmentation:
            steps = round(int(0.05 * volume.shape[-1]) * rng.uniform(-1, 1))
            volume = move(volume, steps, -1)
            xrays = move(xrays, -steps * xrays.shape[-2] / volume.shape[-1], -2)
            gain, offset = rng.uniform(-1, 1, 2)
            grain = torch.from_numpy(rng.standard_normal(xrays.shape, np.float32))
            seen = xrays * (1 + 0.05 * gain) + 0.03 * offset + 0.01 * grain
        row = number if self.split == "train" and number < KNOWN else -1
        return {
            "index": number, "row": row, "seed": seed, "draws": torch.from_numpy(draws), "error": error,
            "volume": volume, "extent": extent, "xrays": xrays, "seen": seen, "other": other,
        }  # fmt: skip


def move(x: Tensor, steps: float, axis: int) -> Tensor:
    """Shift x along an axis by a number of steps, with linear interpolation and repeated edges."""
    last = x.shape[axis] - 1
    place = (torch.arange(last + 1) - steps).clamp(0, last)
    low = place.floor().long()
    if steps == round(steps):
        return x.index_select(axis, low)
    share = (place - low).view([-1 if a == axis % x.dim() else 1 for a in range(x.dim())])
    return x.index_select(axis, low) * (1 - share) + x.index_select(axis, (low + 1).clamp(max=last)) * share
