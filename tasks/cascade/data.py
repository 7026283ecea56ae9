"""Find, check, split, cache and load the CTs and X-rays of patients for train_accelerate.py.

A data folder contains one sub-folder <id> per patient, with <id>.nii.gz (CT), <id>_pa_drr.png (frontal X-ray) and
<id>_lat_drr.png (lateral X-ray). tasks/cascade/README.md lists other file formats.
"""

import functools
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
from utils.checkpoint import write_atomically
from utils.cli import InputError, first_line, refuse
from utils.images import IMAGE_ENDINGS, bits_window, is_dicom, open_upright, to_bytes
from utils.sampler import permute
from utils.tables import read_text
from utils.volumes import Volume, describe, files_of, read_volume, stamp

CT_FILE = re.compile(r"(?P<id>.+)\.(nii|nii\.gz|npy)$", re.IGNORECASE)
XRAY_ENDINGS = "|".join(map(re.escape, (*IMAGE_ENDINGS, ".npy")))
XRAY_FILE = re.compile(rf"(?P<id>.+)_(?P<view>pa|frontal|lat|lateral)(_drr)?({XRAY_ENDINGS})$", re.IGNORECASE)
VIEW_OF = {"pa": 0, "frontal": 0, "lat": 1, "lateral": 1}
CHECK_SIDE, LEAST_CORRELATION = 32, 0.5
PRIOR_PATIENTS, PRIOR_SIDE = 256, 64


class Patient(NamedTuple):
    id: str
    ct: Path | None
    xrays: tuple[Path, ...]


# --- finding files ----------------------------------------------------------------------------------------------------


def list_files(root: Path) -> dict[str, dict]:
    """Return {patient id: {"ct": path, 0: path of the frontal X-ray, 1: path of the lateral X-ray}} for a data folder.

    Missing files have no key. Raises InputError if the folder does not exist, files cannot be assigned to patients, or
    a patient has two files of one kind.
    """
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
        # all files in a sub-folder belong to the patient that the sub-folder is named after
        name = match["id"] if match and path.parent == root else path.relative_to(root).parts[0]
        files = found.setdefault(name, {})
        if files.setdefault(kind, path) != path:
            problems.append(f"{path}: beside {files[kind].name}; keep one of a kind per patient")
    refuse(list(dict.fromkeys(problems)), "files are a second one of their kind")
    return found


def find_patients(root: Path, num_views: int, need_ct: bool = True) -> list[Patient]:
    """List the patients in a data folder. Raises InputError if there are none or if files are missing."""
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
    """Split the patients into {"train": ..., "val": ..., "test": ...}, lists of indices into `patients`.

    files: text files with the patient ids for training, validation and test, or for training and test. With two files,
    a random tenth of the training patients is used for validation. Without files, the split is random (80/10/10 %).
    Raises InputError for an unusable file, or if there are too few patients.
    """
    index_of = {patient.id: index for index, patient in enumerate(patients)}
    parts = [list(range(len(patients)))]
    if files:
        try:
            names = [read_text(Path(path)).split() for path in files]
            parts = [sorted(index_of[name] for name in part) for part in names]
        except ValueError:
            raise InputError("--split_files: not text; save the lists anew, in UTF-8") from None
        except OSError as error:
            raise InputError(f"{error.filename}: cannot be read ({error.strerror}); check --split_files") from None
        except KeyError as error:
            raise InputError(f"--split_files: no patient {error} in the data folder; remove the line") from None
        if len(set().union(*parts)) < sum(map(len, parts)):
            raise InputError("--split_files: a patient is named twice; keep each in one split")
    if len(parts) == 3:
        train, val, test = parts
    else:
        order = [parts[0][index] for index in permute(np.arange(len(parts[0])), len(parts[0]), seed, 0)]
        tenth = max(1, round(len(order) / 10))
        val, train = order[:tenth], order[tenth:]
        if files:
            test = parts[1]
        else:
            test, train = train[:tenth], train[tenth:]
    split = {"train": train, "val": val, "test": test}
    if not all(split.values()) or len(split["train"]) < 2:
        raise InputError("--dataset_path: two patients for training, and one each to validate and to test, are needed")
    return split


# --- reading files ----------------------------------------------------------------------------------------------------


def read_ct(path: Path) -> Volume:
    """Read a CT from a NIfTI file, a .npy file or a folder of DICOM slices; reorient it to RAS+.

    A .npy array must be in RAS+ orientation already, with voxels of 1 mm. Raises InputError if the CT is unreadable,
    not 3D or not in HU.
    """
    try:
        is_npy = path.suffix == ".npy"
        volume = Volume(np.load(path).astype(np.float32), np.eye(4), "RAS") if is_npy else read_volume(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be used ({error}); replace it") from None
    hu = volume.values
    if hu.ndim != 3 or min(hu.shape) < 4 or not np.isfinite(hu).all():
        raise InputError(f"{path}: shape {hu.shape}, or values that are NaN; a volume is needed; replace it")
    if hu.min() >= -200 or hu.min() == hu.max():
        raise InputError(f"{path}: its lowest value is {hu.min():g}, so it is not in HU (air is -1000); convert it")
    return volume


def read_xray(path: Path, size: int, upside_down: bool, mirrored: bool) -> Tensor:
    """Read an X-ray as (size, size) float32 in [-1, 1], with the head at the top. Raises InputError if it is unusable.

    upside_down, mirrored: flips to undo. Floating-point values up to 1 are taken to span 0..1, or -1..1 if any is
    negative. All others are scaled by the bit depth rather than the image's maximum, so that a grey value means the
    same attenuation in every patient.
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


def is_mirrored(view: int, flag: str | None) -> bool:
    return flag in (VIEWS[view], "both")


def make_drrs(root: Path) -> int:
    """All ranks: render the missing X-rays of data folder `root` from its CTs; return how many were rendered.

    Raises InputError for an unusable CT.
    """
    from PIL import Image

    rank, world_size = du.world()
    jobs = []
    with du.agree_on_errors():
        # list the missing images on rank 0 only: a slower rank would miss those that faster ranks have already rendered
        if rank == 0:
            for name, files in list_files(root).items():
                jobs += [(name, files["ct"], view) for view in (0, 1) if "ct" in files and view not in files]
    jobs = du.broadcast_object(jobs)
    with du.agree_on_errors():
        for name, ct, view in tqdm(jobs[rank::world_size], "rendering", delay=3, disable=rank > 0):
            folder = root / name if (root / name).is_dir() else root
            volume = read_ct(ct)
            image = Image.fromarray(render_drr(volume.values, volume.spacing, view))
            write_atomically(folder / f"{name}_{VIEWS[view]}_drr.png", functools.partial(image.save, format="png"))
    return len(jobs)


# --- dataset ----------------------------------------------------------------------------------------------------------


class Data:
    def __init__(self, args: Namespace, sizes: list[list[int]]):
        """All ranks: find, check and split the patients of --dataset_path; cache their decoded files.

        sizes: the voxel grid (X, Y, Z) of each stage. Raises InputError on all ranks if files are missing or unusable,
        or if X-rays do not match their CTs.
        """
        self.args = args
        self.prior_size = [min(PRIOR_SIDE, side) for side in sizes[-1]]
        self.sizes = {tuple(size) for size in (*sizes, self.prior_size)}
        self.header_key = ("facts", args.num_views)
        with du.agree_on_errors():
            self.patients = find_patients(Path(args.dataset_path), args.num_views)
            self.split = split_patients(self.patients, args.split_seed, args.split_files)
        self.prior_patients = [self.patients[index] for index in self.split["train"][:PRIOR_PATIENTS]]
        self.ids = {name: sorted(self.patients[index].id for index in part) for name, part in self.split.items()}
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
        """All ranks: read the files of all patients, split among the ranks, and cache them on disk.

        Returns four arrays with one row per patient: line integrals through the CT, X-rays, field of view in mm, and
        Volume.summary(). Raises InputError listing the unusable patients.
        """
        rank, world_size = du.world()

        def read(patient: Patient) -> tuple | str:
            try:
                images = resize(load_xrays(patient, self.args)[None], (CHECK_SIDE, CHECK_SIDE))[0].numpy()
                extent, summary, rays = self.header(patient)
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
        """Raise InputError if X-rays are flipped relative to their CTs or do not show the same patients.

        rays: line integrals through the CTs. images: the X-rays. Both are (patients, views, CHECK_SIDE, CHECK_SIDE). A
        flip that improves the correlation only slightly is ignored, because a body is almost symmetric.
        """
        views = range(self.args.num_views)
        head_up, mirrored = self.args.flip_drrs_vertical is not False, self.args.flip_drrs_horizontal or "none"

        def correlation(view: int, turn: bool, mirror: bool) -> float:
            flipped = images[:, view, :: -1 if turn else 1, :: -1 if mirror else 1]
            pairs = zip(rays[:, view], flipped, strict=True)
            return np.median([abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) for a, b in pairs])

        now, candidates = [correlation(view, False, False) for view in views], []
        for vertical, horizontal in product((True, False), ("none", "pa", "lat", "both")[: 2 * len(views)]):
            turn = vertical != head_up
            mirror = [is_mirrored(view, horizontal) != is_mirrored(view, mirrored) for view in views]
            scores = [correlation(view, turn, mirror[view]) for view in views]
            candidates.append((sum(scores) - 0.02 * (turn + sum(mirror)), scores, vertical, horizontal))
        _, scores, vertical, horizontal = max(candidates)
        if max(b - a for a, b in zip(now, scores, strict=True)) > 0.05:
            flags = ["--flip_drrs_vertical" if vertical else "--no-flip_drrs_vertical"] * (vertical != head_up)
            flags += [f"--flip_drrs_horizontal {horizontal}"] * (horizontal != mirrored)
            found = ", ".join(f"{VIEWS[view]} {now[view]:.2f} -> {scores[view]:.2f}" for view in views)
            raise InputError(f"--dataset_path: X-rays lie otherwise than CTs (r {found}); give {' '.join(flags)}")
        for view in views:
            # all bodies look similar, so correlate only the deviations from the mean over all patients
            a, b = (part[:, view] - part[:, view].mean(0) for part in (rays, images))
            sign = np.sign(np.corrcoef(rays[:, view].ravel(), images[:, view].ravel())[0, 1])
            r = sign * (a * b).sum((1, 2)) / np.sqrt((a**2).sum((1, 2)) * (b**2).sum((1, 2)))
            wrong = [self.patients[index].id for index in np.flatnonzero(~(r > LEAST_CORRELATION))]
            if wrong:
                reason = f"not the {VIEWS[view]} picture of its CT (r < {LEAST_CORRELATION}) in {len(wrong)} patients: "
                advice = "; put the right ones there, or --skip_alignment_check"
                raise InputError("--dataset_path: " + reason + ", ".join(wrong[:8]) + advice)

    def prior_rays(self, greys: list[Grey]) -> Tensor:
        rays = []
        for patient in self.prior_patients:
            extent = torch.from_numpy(self.header(patient)[0])
            rays.append(rays_of(load_xrays(patient, self.args)[None], extent[None], greys, self.prior_size))
        return torch.cat(rays)

    def learn_prior(self) -> Prior:
        """All ranks: return the Prior, which rank 0 fits to the first PRIOR_PATIENTS training patients."""
        prior, threads = None, torch.get_num_threads()
        with du.agree_on_errors():
            if du.world()[0] == 0:
                # use one thread, because the number of threads changes the last bits of the result
                torch.set_num_threads(1)
                volumes = np.stack([self.volume(patient, self.prior_size) for patient in self.prior_patients])
                prior = learn_prior(
                    normalise(torch.from_numpy(volumes).float()), self.prior_rays(self.greys), self.greys
                )
                torch.set_num_threads(threads)
        return du.broadcast_object(prior)

    def volume(self, patient: Patient, size: list[int]) -> np.ndarray:
        """Return a patient's CT as int16 HU, resampled to `size` voxels. Raises InputError if the CT is unusable.

        size: one of self.sizes.
        """
        return self._decode(patient, tuple(size))

    def header(self, patient: Patient) -> tuple[np.ndarray, ...]:
        """Return a CT's field of view (3,) in mm, Volume.summary() (6,), and line integrals
        (views, CHECK_SIDE, CHECK_SIDE).

        Raises InputError if the CT is unusable.
        """
        extent, summary, rays = np.split(self._decode(patient, self.header_key), [3, 9])
        return extent, summary, rays.reshape(-1, CHECK_SIDE, CHECK_SIDE)

    def _decode(self, patient: Patient, content: tuple) -> np.ndarray:
        paths = {key: cache_path(self.args.cache_dir, patient.ct, key) for key in (*self.sizes, self.header_key)}
        if not paths[content].is_file():
            found = read_ct(patient.ct)
            hu = torch.from_numpy(np.array(found.values, order="C")).clamp_(HU_MIN, HU_MAX)
            extent = (found.spacing * hu.shape).astype(np.float32)
            for size in self.sizes:
                write_cached(paths[size], resize(hu, size).round().to(torch.int16).numpy())
            true = normalise(hu)[None, None], torch.from_numpy(extent)[None]
            views = range(self.args.num_views)
            rays = [resize(project(*true, view), (CHECK_SIDE, CHECK_SIDE)).numpy().ravel() for view in views]
            header = np.concatenate([extent, found.summary().astype(np.float32), *rays])
            write_cached(paths[self.header_key], header)
        return load_cached(paths[content])


def load_xrays(patient: Patient, args: Namespace) -> Tensor:
    """Return a patient's X-rays (views, img_size, img_size), float32 in [-1, 1]. Raises InputError for an unusable
    file.
    """
    images = []
    for view, source in enumerate(patient.xrays):
        flips = (args.flip_drrs_vertical is False, is_mirrored(view, args.flip_drrs_horizontal))
        path = cache_path(args.cache_dir, source, ("xray", view, args.img_size, flips))
        if not path.is_file():
            write_cached(path, (read_xray(source, args.img_size, *flips) * 32767).round().to(torch.int16).numpy())
        images.append(torch.from_numpy(load_cached(path)))
    return torch.stack(images).float() / 32767


# --- cache of decoded files -------------------------------------------------------------------------------------------


@functools.cache
def cache_path(folder: str, source: Path, content: tuple) -> Path:
    """Return the path of the cache file for data decoded from `source` (an X-ray, a CT or a folder of DICOM slices).

    content: what distinguishes this decoding from others, such as the voxel grid. The path changes when `source` is
    modified, but each process looks at `source` only once.
    """
    files = files_of(source) if source.is_dir() else [source]
    return Path(folder, hashlib.sha256(f"{stamp(files)}{content}5".encode()).hexdigest()[:32] + ".npy")


def load_cached(path: Path) -> np.ndarray:
    """Load an array that write_cached() saved. If the file is damaged, delete it and raise InputError."""
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):
        path.unlink(missing_ok=True)
        raise InputError(f"{path}: a damaged file in --cache_dir, now deleted; start again") from None


def write_cached(path: Path, values: np.ndarray) -> None:
    """Save an array to a .npy file atomically. Raises InputError if this fails, for example on a full disk."""
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
    x, y = integrals.ravel().astype(np.float64), images.ravel().astype(np.float64)
    slope = ((x - x.mean()) * (y - y.mean())).mean() / x.var()
    offset = y.mean() - slope * x.mean()
    if not abs(slope) > 1e-6:
        raise InputError("--dataset_path: the X-rays have nothing to do with the CTs; see --make_drrs")
    return Grey(float(slope), float(offset), float((y - offset - slope * x).std() / abs(slope)))


class XrayCtDataset(Dataset):
    """The patients of one split ("train", "val" or "test").

    Each item is a dict. volume: (X, Y, Z), the CT in HU. extent: (3,), field of view in mm. xrays: (views, H, W) in
    [-1, 1]. input_xrays: the network's input, `xrays` or, with augmentation, `xrays` with random exposure and noise.
    index: patient's index in the split. row: patient's index among the Prior's training patients, or -1. seed, draws:
    the patient's random numbers, derived from the run's seed and, during training, the epoch. other: X-rays of another
    test patient; empty in other splits. error: why the files are unusable, or "".

    Augmentation, which is for training only, also shifts the volume and its X-rays along z.
    """

    def __init__(self, data: Data, split: str, size: list[int]):
        self.data, self.split, self.size = data, split, tuple(size)
        self.patients = [data.patients[index] for index in data.split[split]]
        self.memory: dict[int, tuple] = {}

    def __len__(self) -> int:
        return len(self.patients)

    def read(self, index: int) -> tuple:
        if index in self.memory:
            return self.memory[index]
        patient, args = self.patients[index], self.data.args
        volume, extent = self.data.volume(patient, self.size), self.data.header(patient)[0]
        sample = torch.from_numpy(volume), torch.from_numpy(extent), load_xrays(patient, args)
        if args.cache_in_memory:
            self.memory[index] = sample
        return sample

    def __getitem__(self, index: int) -> dict:
        args, number, error = self.data.args, int(index), ""
        try:
            volume, extent, xrays = self.read(number)
            other = self.read((number + 1) % len(self))[2] if self.split == "test" else torch.zeros(0)
        except (InputError, OSError, ValueError) as reason:
            # return zeros and the error message instead of raising, so that all ranks stop together
            error = f"{self.patients[number].id}: {reason}"
            xrays = torch.zeros(args.num_views, args.img_size, args.img_size)
            other = xrays if self.split == "test" else torch.zeros(0)
            volume, extent = torch.zeros(self.size, dtype=torch.int16), torch.ones(3)
        epoch = getattr(index, "epoch", None)
        rng = np.random.default_rng([args.seed % 2**63, number] + [epoch] * (epoch is not None))
        seed, draws, input_xrays = int(rng.integers(2**62)), rng.random(3), xrays
        if epoch is not None and args.augmentation:
            steps = round(int(0.05 * volume.shape[-1]) * rng.uniform(-1, 1))
            volume = shift(volume, steps, -1)
            xrays = shift(xrays, -steps * xrays.shape[-2] / volume.shape[-1], -2)
            gain, offset = rng.uniform(-1, 1, 2)
            noise = torch.from_numpy(rng.standard_normal(xrays.shape, np.float32))
            input_xrays = xrays * (1 + 0.05 * gain) + 0.03 * offset + 0.01 * noise
        row = number if self.split == "train" and number < PRIOR_PATIENTS else -1
        return {
            "index": number, "row": row, "seed": seed, "draws": torch.from_numpy(draws), "error": error,
            "volume": volume, "extent": extent, "xrays": xrays, "input_xrays": input_xrays, "other": other,
        }  # fmt: skip


def shift(x: Tensor, steps: float, axis: int) -> Tensor:
    last = x.shape[axis] - 1
    position = (torch.arange(last + 1) - steps).clamp(0, last)
    low = position.floor().long()
    if steps == round(steps):
        return x.index_select(axis, low)
    fraction = (position - low).view([-1 if a == axis % x.dim() else 1 for a in range(x.dim())])
    return x.index_select(axis, low) * (1 - fraction) + x.index_select(axis, (low + 1).clamp(max=last)) * fraction
