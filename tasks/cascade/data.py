"""The patients of guide 3 as a data set: their split, decoded files that are kept on disk, batches and augmentation.

Which files belong to a patient, and what they hold, is in files.py.
"""

import hashlib
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from tqdm import tqdm

from old.cache_utils import DiskCache
from old.cli_utils import InputError
from old.distributed_utils import agree_on_errors, create_distributed_dataloader, gather_objects, print_main, reduce_sum
from old.distributed_utils import world
from old.hardware_utils import available_ram_gb, usable_cores
from old.phase_utils import doing
from old.sampler_utils import permute
from tasks.cascade.agreement import Prior, start_volume
from tasks.cascade.alignment import GreyFit, check_alignment, fit_greys
from tasks.cascade.diffusion import draw_noise
from tasks.cascade.files import Patient, find_patients, identity_of, read_ct, read_xray, voxel_spacing
from tasks.cascade.projector import HU_MAX, HU_MIN, normalise, project, resize
from tasks.cascade.rays import check_views
from tasks.cascade.stages import eval_batch
from tasks.cascade.views import View, views_of, wrong_extent

SPLITS = ("train", "val", "test")
# The side of the images that the alignment check compares.
CHECK_SIZE = 32
# Of a voxel among the training patients, and of what the first stage starts from, where all of them are equal.
LEAST_VARIANCE = 1e-4
LEAST_STD = 0.005
# A cache entry begins with the field of view, three numbers of 4 bytes.
EXTENT_BYTES = 12


# --- split ------------------------------------------------------------------------------------------------------------


def split_patients(
    patients: list[Patient],
    seed: int,
    files: list[str] | None = None,
) -> dict[str, list[int]]:
    """{"train", "val", "test": places in `patients`}: 80/10/10 by patient, or as text files of ids say.

    They are three, or two of training and test patients: then a tenth of the former validates. At least one patient in
    each part. Raises InputError.
    """
    if files and len(files) == 3:
        return read_split(patients, files, SPLITS)
    if files:
        parts = read_split(patients, files, ("train", "test"))
        return hold_out(parts, seed, files[0])
    if len(patients) < 3:
        raise InputError(f"--dataset_path: {len(patients)} patients; training, validation and test need at least 3")
    order = permute(np.arange(len(patients)), len(patients), seed, 0).tolist()
    held = max(1, round(len(patients) / 10))
    return {
        "train": order[2 * held :],
        "val": order[:held],
        "test": order[held : 2 * held],
    }


def hold_out(
    parts: dict[str, list[int]],
    seed: int,
    path: str,
) -> dict[str, list[int]]:
    """Training and test patients, of the file at path, with a tenth of the former for validation. Raises InputError."""
    # the order of the file does not matter
    named = sorted(parts["train"])
    if len(named) < 2:
        raise InputError(f"{path}: names one patient; training and validation need at least 2")
    order = permute(np.arange(len(named)), len(named), seed, 0)
    held = max(1, round(len(named) / 10))
    return {
        "train": [named[number] for number in order[held:]],
        "val": [named[number] for number in order[:held]],
        "test": parts["test"],
    }


def read_split(
    patients: list[Patient],
    files: list[str],
    splits: tuple[str, ...],
) -> dict[str, list[int]]:
    """{split: places in `patients`} of a text file each, with one id a line. Raises InputError."""
    places = {patient.id: place for place, patient in enumerate(patients)}
    parts: dict[str, list[int]] = {}
    seen: dict[str, str] = {}
    for split, path in zip(splits, files, strict=True):
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read ({error}); check --split_files") from None

        # each id is a patient's, and in one split only
        parts[split] = []
        for row, line in enumerate(lines, start=1):
            name = line.strip()
            if not name:
                continue
            if name not in places:
                raise InputError(f"{path}:{row}: no patient {name!r} in the data folder; remove the line")
            if name in seen:
                raise InputError(f"{path}:{row}: patient {name} is in {seen[name]} already; keep it in one split")
            seen[name] = f"{path}:{row}"
            parts[split].append(places[name])
        if not parts[split]:
            raise InputError(f"{path}: names no patient; the {split} split needs at least one")
    return parts


# --- decoded files ----------------------------------------------------------------------------------------------------


class Flips(NamedTuple):
    """How the files of X-rays are turned: with the head up, and mirrored."""

    vertical: bool
    pa: bool
    lat: bool


# By the value of --flip_drrs_horizontal, with the head up.
FLIPS = {
    "none": Flips(True, False, False),
    "pa": Flips(True, True, False),
    "lat": Flips(True, False, True),
    "both": Flips(True, True, True),
}


class Decoded:
    """Decoded files, kept on disk: volumes on a stage's grid, and X-rays of some views at the encoder's size.

    in_memory: a data set keeps what it has read. workers: loading processes beside each process. Everything here raises
    InputError for a file that cannot be used.
    """

    def __init__(
        self,
        img_size: int,
        views: tuple[View, ...],
        flips: Flips,
        cache_dir: str | None = None,
        in_memory: bool = False,
        workers: int = 0,
    ):
        self.img_size = img_size
        self.views = views
        self.flips = flips
        self.cache_dir = cache_dir
        self.cache = DiskCache(cache_dir)
        self.in_memory = in_memory
        self.workers = workers

    def key(
        self,
        path: Path,
        content,
    ) -> str:
        """A key that changes when the file does; empty where nothing is kept. content: what is made of the file."""
        try:
            return f"{identity_of(path)}|{content}|2" if self.cache.folder else ""
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); check --dataset_path") from None

    def volume(
        self,
        path: Path,
        size: tuple[int, int, int],
    ) -> tuple[Tensor, Tensor]:
        """(int16 HU (X, Y, Z) clipped, field of view in mm (3,) float32) on a stage's grid."""
        content = self.cache.get(self.key(path, tuple(size)), volume_bytes(size))
        if content is None:
            clipped, spacing = read_clipped(path)
            content = self.keep_volume(path, clipped, extent_of(clipped, spacing), size)
        buffer = bytearray(content)
        extent = torch.frombuffer(buffer, dtype=torch.float32, count=3)
        voxels = torch.frombuffer(buffer, dtype=torch.int16, offset=EXTENT_BYTES)
        return voxels.view(*size), extent

    def survey(
        self,
        path: Path,
        sizes: list,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(field of view in mm (3,), line integrals of all views (views, CHECK_SIZE, CHECK_SIZE)), float32.

        The integrals are of the file's own resolution. The file is read once, and only if these or a grid are not kept.
        """
        shape = (len(self.views), CHECK_SIZE, CHECK_SIZE)
        key = self.key(path, ("survey", self.views))
        content = self.cache.get(key, EXTENT_BYTES + 4 * math.prod(shape))
        missing = []
        if self.cache.folder:
            missing = [size for size in sizes if not self.cache.has(self.key(path, tuple(size)), volume_bytes(size))]
        if content is None or missing:
            clipped, spacing = read_clipped(path)
            extent = extent_of(clipped, spacing)
            for size in missing:
                self.keep_volume(path, clipped, extent, size)

            # what the alignment check compares
            for view in self.views:
                if reason := wrong_extent(view, tuple(extent)):
                    raise InputError(f"{path}: {reason}; correct --views")
            mm = torch.from_numpy(spacing).float()[None]
            volume = normalise(clipped)[None, None]
            integrals = [resize(project(volume, mm, view), shape[1:])[0, 0] for view in self.views]
            content = extent.tobytes() + torch.stack(integrals).contiguous().numpy().tobytes()
            self.cache.put(key, content)
        extent = np.frombuffer(content, np.float32, 3)
        return extent, np.frombuffer(content, np.float32, offset=EXTENT_BYTES).reshape(shape)

    def keep_volume(
        self,
        path: Path,
        clipped: Tensor,
        extent: np.ndarray,
        size: tuple[int, int, int],
    ) -> bytes:
        """Put a volume on a stage's grid, and into the cache."""
        voxels = resize(clipped, size).round().to(torch.int16).contiguous().numpy()
        content = extent.tobytes() + voxels.tobytes()
        self.cache.put(self.key(path, tuple(size)), content)
        return content

    def xray(
        self,
        path: Path,
        view: View,
    ) -> Tensor:
        """int16 (img_size, img_size), grey values 0..1 as -32768..32767: see grey()."""
        shape = (self.img_size, self.img_size)
        mirrored = {"pa": self.flips.pa, "lat": self.flips.lat}.get(view.name, False)
        key = self.key(path, (self.img_size, (self.flips.vertical, mirrored)))
        content = self.cache.get(key, 2 * math.prod(shape))
        if content is None:
            image = read_xray(path, self.img_size, flip_vertical=self.flips.vertical, flip_horizontal=mirrored)
            content = ((image * 65535).round() - 32768).to(torch.int16).numpy().tobytes()
            self.cache.put(key, content)
        return torch.frombuffer(bytearray(content), dtype=torch.int16).view(shape)

    def xrays(self, patient: Patient) -> Tensor:
        """int16 (views, img_size, img_size)."""
        images = [self.xray(path, view) for path, view in zip(patient.xrays, self.views, strict=True)]
        return torch.stack(images)


def volume_bytes(size: tuple[int, int, int]) -> int:
    """What a volume takes in the cache."""
    return EXTENT_BYTES + 2 * math.prod(size)


def read_clipped(path: Path) -> tuple[Tensor, np.ndarray]:
    """(HU clipped to HU_MIN..HU_MAX, mm per voxel (3,)) of a CT file. Raises InputError."""
    hu, affine = read_ct(path)
    return torch.from_numpy(hu).clamp_(HU_MIN, HU_MAX), voxel_spacing(affine)


def extent_of(volume: Tensor, spacing: np.ndarray) -> np.ndarray:
    """The field of view of a volume, in mm (3,) float32."""
    return (spacing * tuple(volume.shape)).astype(np.float32)


def grey(xrays: Tensor) -> Tensor:
    """X-rays as Decoded keeps them -> float32 -1..1."""
    return (xrays.float() + 0.5) / 32767.5


# --- all patients of a run --------------------------------------------------------------------------------------------


class Survey(NamedTuple):
    """What is learned from a patient's files: line integrals and images (views, CHECK_SIZE, CHECK_SIZE), extent (3,).

    error: what is wrong with a file, or empty.
    """

    integrals: np.ndarray
    images: np.ndarray
    extent: np.ndarray
    error: str = ""


def survey_patient(
    patient: Patient,
    decoded: Decoded,
    sizes: list,
) -> Survey:
    """Decode (and keep) a patient's files, on all grids that will be needed."""
    shape = (len(patient.xrays), CHECK_SIZE, CHECK_SIZE)
    try:
        extent, integrals = decoded.survey(patient.ct, sizes)
        images = resize(grey(decoded.xrays(patient))[None], shape[1:])[0]
        return Survey(integrals, images.numpy(), extent)
    except InputError as error:
        empty = np.zeros(shape, np.float32)
        return Survey(empty, empty, np.zeros(3, np.float32), str(error))


@doing("reading CTs", has_bar=True)
def survey_patients(
    patients: list[Patient],
    decoded: Decoded,
    sizes: list,
) -> list[Survey]:
    """All ranks together: decode (and keep) every patient once.

    Raises InputError on all ranks for the first file that cannot be used.
    """
    # a large CT takes 3 GB while it is read, and the processes of a machine share it
    processes = gather_objects(platform.node()).count(platform.node())
    threads = max(1, min(usable_cores(), int(available_ram_gb() / 3)) // processes)
    print_main(f"reading {len(patients)} patients ...")

    rank, world_size = world()
    local = patients[rank::world_size]
    hidden = rank != 0 or not sys.stderr.isatty()
    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(lambda patient: survey_patient(patient, decoded, sizes), local)
        surveys = list(tqdm(results, total=len(local), desc="reading CTs", disable=hidden, leave=False))
    shares = gather_objects(surveys)
    surveys = [shares[place % world_size][place // world_size] for place in range(len(patients))]
    errors = [survey.error for survey in surveys if survey.error]
    if errors:
        more = f" (and {len(errors) - 1} more patients with bad files)" if len(errors) > 1 else ""
        raise InputError(f"{errors[0]}{more}")
    return surveys


class Data:
    """The patients of a run: their split, the decoder, and what is derived from all of them.

    greys: how each view's grey values follow from line integrals. extent: mean field of view of the training patients,
    mm. ids: of each split's patients.
    """

    def __init__(
        self,
        patients: list[Patient],
        split: dict[str, list[int]],
        decoded: Decoded,
        sizes: list,
        check: bool = True,
    ):
        """All ranks. sizes: the grids that will be needed. check: that X-rays and CTs agree. Raises InputError."""
        self.patients = patients
        self.split = split
        self.decoded = decoded
        places = sorted(place for part in split.values() for place in part)
        chosen = [patients[place] for place in places]
        surveys = survey_patients(chosen, decoded, sizes)
        integrals = np.stack([survey.integrals for survey in surveys])
        images = np.stack([survey.images for survey in surveys])
        extents = np.stack([survey.extent for survey in surveys])

        # the X-rays must be those of the CTs; how their grey values follow from line integrals is learned from training
        with agree_on_errors():
            if check:
                check_alignment(chosen, integrals, images, decoded.views)
            train = np.isin(places, split["train"])
            self.greys: list[GreyFit] = fit_greys(integrals[train], images[train], decoded.views)
            self.extent = extents[train].mean(0).tolist()
            if any(not abs(fit.slope) > 1e-6 for fit in self.greys):
                raise InputError("--dataset_path: the X-rays have nothing to do with the CTs; see --make_drrs")

        self.ids = {name: sorted(patients[place].id for place in part) for name, part in split.items()}
        self.fingerprint = hashlib.sha256(json.dumps(self.ids, sort_keys=True).encode()).hexdigest()[:12]
        self.sets: dict[tuple, XrayCtDataset] = {}
        self.means: dict[tuple, Tensor] = {}

    def set(
        self,
        split: str,
        size: list[int],
    ) -> "XrayCtDataset":
        """One split on one grid. Those of another grid, of the stage before, are let go."""
        grid = tuple(size)
        if (split, grid) not in self.sets:
            self.sets = {key: dataset for key, dataset in self.sets.items() if key[1] == grid}
            self.sets[split, grid] = XrayCtDataset(self.patients, self.split[split], self.decoded, size)
        return self.sets[split, grid]

    def mean_volume(self, size: list[int]) -> Tensor:
        """All ranks: (1, 1, X, Y, Z) on the CPU, the mean of the training patients, which is the first baseline."""
        grid = tuple(size)
        if grid not in self.means:
            dataset = self.set("train", size)
            mean = mean_over(dataset, grid, torch.device("cpu"), lambda batch: batch["volume"][:, 0])
            self.means = {grid: mean.float()[None, None]}
        return self.means[grid]

    def refuse_trained(
        self,
        checkpoint: dict,
        path: str,
    ) -> None:
        """Raises InputError where the checkpoint at path was trained on test patients."""
        patients = self.ids["test"]
        seen = sorted(set(patients) & set(checkpoint["trained_patients"]))
        if seen:
            reason = f"{path} was trained on {seen[0]} and {len(seen) - 1} more of the {len(patients)} test patients"
            raise InputError(f"--dataset_path: {reason}; give the run's data and its --split_files or --split_seed")

    def others(self, split: str) -> dict[int, Patient]:
        """For the place of each patient of a split another one, whose X-rays to show instead."""
        places = self.split[split]
        shown = [*places[1:], places[0]]
        if len(places) == 1:
            shown = self.split["train"][:1]
        return {place: self.patients[other] for place, other in zip(places, shown, strict=True)}

    def first_items(
        self,
        split: str,
        size: list[int],
    ) -> dict:
        """The first two patients of a split, as the loader gives them."""
        dataset = self.set(split, size)
        return default_collate([dataset[place] for place in range(min(2, len(dataset)))])


class Source(NamedTuple):
    """Where the patients of a run are, and how their files are read; each field is a flag's value."""

    dataset_path: str
    views: list[dict]
    split_seed: int
    split_files: list[str] | None
    skip_alignment_check: bool
    img_size: int
    flip_drrs_vertical: bool
    flip_drrs_horizontal: str
    cache_dir: str | None
    cache_in_memory: bool
    num_workers: int

    def decoder(self) -> Decoded:
        """What reads a patient's files, turned as the flags say."""
        flips = FLIPS[self.flip_drrs_horizontal]._replace(vertical=self.flip_drrs_vertical)
        # no loading processes where the patients are in memory
        workers = 0 if self.cache_in_memory else self.num_workers
        return Decoded(self.img_size, views_of(self.views), flips, self.cache_dir, self.cache_in_memory, workers)

    def load(self, sizes: list) -> Data:
        """All ranks: the patients, on the grids that will be needed. Raises InputError."""
        with agree_on_errors():
            views = views_of(self.views)
            check_views(views, on_gpu=torch.cuda.is_available())
            patients = find_patients(Path(self.dataset_path), views)
            split = split_patients(patients, self.split_seed, self.split_files)
        return Data(patients, split, self.decoder(), sizes, check=not self.skip_alignment_check)


def source_of_flags(values: dict, source: dict[str, str], device: torch.device) -> Source:
    """Where the flags' values say that the patients are. source: where each of them comes from."""
    fields = {name: values[name] for name in Source._fields}
    # by default there are no loading processes on a CPU
    if device.type == "cpu" and source["num_workers"] == "default":
        fields["num_workers"] = 0
    return Source(**fields)


@doing("computing means over the patients")
def mean_over(
    dataset: "XrayCtDataset",
    shape: tuple[int, ...],
    device: torch.device,
    statistic: Callable[[dict], Tensor],
) -> Tensor:
    """All ranks: the mean, on the CPU in float64, of a statistic of each of some patients. Raises InputError.

    statistic(batch): of each patient of a prepared batch, (B, *shape).
    """
    total = torch.zeros(shape, dtype=torch.float64)
    with agree_on_errors():
        for _, batch in eval_batches(dataset, device):
            values = statistic(batch).double()
            total += values.sum(0).cpu()
    return reduce_sum(total) / len(dataset)


def learn_prior(
    dataset: "XrayCtDataset",
    greys: list[GreyFit],
    agreement: bool,
    device: torch.device,
) -> Prior:
    """All ranks: what a cascade knows before it sees a patient, from the training patients. Raises InputError.

    agreement: whether what the first stage starts from is made to agree with the X-rays.
    """

    def moments(batch: dict) -> Tensor:
        volume = batch["volume"][:, 0].double()
        return torch.stack([volume, volume.square()], 1)

    mean, mean_square = mean_over(dataset, (2, *dataset.size), device, moments)
    variance = (mean_square - mean.square()).clamp(min=LEAST_VARIANCE)
    prior = Prior(
        greys,
        mean.float()[None, None].to(device),
        variance.float()[None, None].to(device),
        std=1.0,
    )

    # how wrong that is for one patient
    def squared_error(batch: dict) -> Tensor:
        start = start_volume(prior, batch, dataset.size, agreement)
        return (start - batch["volume"]).double().square().mean((1, 2, 3, 4))

    mean_error = float(mean_over(dataset, (), device, squared_error))
    # few digits, as the order of the sum depends on the number of processes
    std = float(f"{math.sqrt(mean_error):.4g}")
    return prior._replace(std=max(std, LEAST_STD))


# --- the data set and its batches -------------------------------------------------------------------------------------


class XrayCtDataset(Dataset):
    """Some patients on one stage's grid, without augmentation.

    volume: int16 HU (X, Y, Z). extent: (3,) mm. xrays: int16 (views, H, W). index: place in `patients`. error: "" or
    what is wrong, for a loop that ends all ranks together.
    """

    def __init__(
        self,
        patients: list[Patient],
        places: list[int],
        decoded: Decoded,
        size: list[int],
    ):
        self.patients = patients
        self.places = places
        self.decoded = decoded
        self.size = tuple(size)
        self.kept: dict[int, dict] = {}

    def __len__(self) -> int:
        return len(self.places)

    def gib(self) -> float:
        """Memory that the decoded patients take in each process that keeps them."""
        views = len(self.patients[0].xrays)
        values = math.prod(self.size) + views * self.decoded.img_size**2
        return len(self.places) * 2 * values / 2**30

    def __getitem__(self, number: int) -> dict:
        if number in self.kept:
            return self.kept[number]
        place = self.places[number]
        patient = self.patients[place]

        # a file that cannot be used gives zeros, and the reason
        error = ""
        try:
            xrays = self.decoded.xrays(patient)
            volume, extent = self.decoded.volume(patient.ct, self.size)
        except InputError as reason:
            error = str(reason)
            side = self.decoded.img_size
            xrays = torch.zeros(len(patient.xrays), side, side, dtype=torch.int16)
            volume = torch.zeros(self.size, dtype=torch.int16)
            extent = torch.ones(3)

        # tensors of the same shapes, whatever the error
        item = {
            "volume": volume,
            "extent": extent,
            "xrays": xrays,
            "index": place,
            "error": error,
        }
        if self.decoded.in_memory and not error:
            self.kept[number] = item
        return item


def made_up_batch(
    batch_size: int,
    volume_size: list[int],
    num_views: int,
    img_size: int,
) -> dict:
    """A batch of a stage's patients, as the loader gives it, to try a step on."""
    return {
        "volume": torch.zeros(batch_size, *volume_size, dtype=torch.int16),
        "xrays": torch.zeros(batch_size, num_views, img_size, img_size, dtype=torch.int16),
        "extent": torch.ones(batch_size, 3),
        "index": torch.arange(batch_size),
        "error": [""] * batch_size,
    }


def prepare(
    batch: dict,
    device: torch.device,
    seed: int | None = None,
    epoch: int = 0,
    moved: bool = True,
) -> dict:
    """A batch on the device: volume (B, 1, X, Y, Z), xrays and seen (B, views, H, W) in -1..1, and extent (B, 3) mm.

    xrays: projections of the volume. seen: those that the model gets, of varied exposure. seed: of the augmentation;
    None for none, as in evaluations. moved: patients are moved up and down in it.
    """
    volume = normalise(batch["volume"].to(device, non_blocking=True).float())[:, None]
    xrays = grey(batch["xrays"].to(device, non_blocking=True))
    seen = xrays
    index = batch["index"].tolist()
    if seed is not None:
        volume, xrays, seen = augment(volume, xrays, index, seed, epoch, moved)
    extent = batch["extent"].to(device, non_blocking=True)
    return {
        "volume": volume,
        "xrays": xrays,
        "seen": seen,
        "extent": extent,
        "index": index,
    }


def eval_batches(dataset: XrayCtDataset, device: torch.device) -> Iterator[tuple[list[int], dict]]:
    """(places in the data set, prepared batch) of this rank's share. Raises InputError on this rank for a bad file."""
    workers = dataset.decoded.workers
    loader = create_distributed_dataloader(dataset, eval_batch(dataset.size), train=False, num_workers=workers)
    for places, batch in zip(loader.batch_sampler, loader, strict=True):
        for error in batch["error"]:
            if error:
                raise InputError(error)
        yield places, prepare(batch, device)


def augment(
    volume: Tensor,
    xrays: Tensor,
    indices: list[int],
    seed: int,
    epoch: int,
    moved: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, 1, X, Y, Z), (B, views, H, W) -> (volume, X-rays that belong to it, X-rays as the model sees them).

    With `moved` the patient is moved up or down by up to 5 %: rows of parallel views run along z, so they stay true
    projections, which those of a cone would not; a flip would break the lateral view. What the model sees also varies
    in brightness, contrast and noise, as exposures do. A function of (seed, epoch, patient).
    """
    volumes = []
    projections = []
    exposures = []
    seeds = []
    for one, images, index in zip(volume, xrays, indices, strict=True):
        generator = np.random.default_rng([seed % 2**63, epoch, int(index)])
        most = int(0.05 * one.shape[-1]) if moved else 0
        shift = int(generator.integers(-most, most + 1))
        if shift:
            one, images = move_up(one, images, shift)

        # an exposure of its own
        gain = float(generator.uniform(0.95, 1.05))
        offset = float(generator.uniform(-0.03, 0.03))
        seeds.append(int(generator.integers(2**62)))
        volumes.append(one)
        projections.append(images)
        exposures.append(images * gain + offset)
    grain = draw_noise(xrays.shape[1:], xrays.device, seeds)
    return torch.stack(volumes), torch.stack(projections), torch.stack(exposures) + 0.01 * grain


def move_up(
    volume: Tensor,
    images: Tensor,
    shift: int,
) -> tuple[Tensor, Tensor]:
    """A volume (1, X, Y, Z) moved by so many voxels along z, and its images (views, H, W) with it; edges repeat."""
    depth = volume.shape[-1]
    rows = images.shape[-2]
    order = (torch.arange(depth, device=volume.device) - shift).clamp(0, depth - 1)

    # the image's row of a place in the volume: row r shows z = (rows - r - 0.5) * depth / rows
    place = (torch.arange(rows, device=volume.device) + shift * rows / depth).clamp(0, rows - 1)
    low = place.floor().long()
    high = (low + 1).clamp(max=rows - 1)
    share = (place - low)[:, None]
    return volume.index_select(-1, order), images[:, low] * (1 - share) + images[:, high] * share
