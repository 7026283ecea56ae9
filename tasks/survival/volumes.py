"""CT volumes (NIfTI): what makes one unusable, what the model sees of one, and how it is augmented."""

import contextlib
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from old.cache_utils import DiskCache, identity
from old.checkpoint_utils import write_atomically
from old.cli_utils import InputError
from old.distributed_utils import broadcast_object, gather_objects, world
from old.phase_utils import doing
from tasks.survival.cohort import Cohort, first_line


def find_fault(path: str, geometry: bool) -> str:
    """What is wrong with a NIfTI file, read to its end; "" if nothing. geometry: its affine must be usable too."""
    import nibabel

    try:
        return find_fault_in(nibabel.load(path), geometry)
    except FileNotFoundError:
        return "does not exist"
    except Exception as error:
        # nibabel, zlib and numpy each have their own
        return f"is not a readable NIfTI file, truncated perhaps ({first_line(error, 100, path)})"


def find_fault_in(volume, geometry: bool) -> str:
    """The same of an open file."""
    if len(volume.shape) != 3:
        return f"has {len(volume.shape)} dimensions {volume.shape}, not three"
    if 0 in volume.shape:
        return f"has no voxels: its shape is {volume.shape}"
    values = np.asanyarray(volume.dataobj.get_unscaled())
    if values.dtype.kind not in "fiu":
        return f"holds {values.dtype}, not numbers"

    # a scaling that is not finite makes every voxel so
    scaling = np.array([volume.dataobj.slope, volume.dataobj.inter])
    bad = int((~np.isfinite(values)).sum()) if values.dtype.kind == "f" else 0
    if bad or not np.isfinite(scaling).all():
        return f"holds {bad or values.size} values that are NaN or infinite"
    if values.min() == values.max():
        return "holds one value everywhere"
    if geometry and not has_usable_affine(volume.affine):
        return "has no usable affine, which --spacing and --orientation need"
    return ""


def has_usable_affine(affine: np.ndarray) -> bool:
    """Whether an affine is finite and can be inverted."""
    return bool(np.isfinite(affine).all() and abs(np.linalg.det(affine[:3, :3])) > 1e-9)


class Check(NamedTuple):
    """A volume that was looked at. key: see identity; "" where there is no file. fault: "" for a good one."""

    row: int
    key: str
    fault: str


@doing("checking volumes", has_bar=True)
def check_volumes(
    cohort: Cohort,
    rows: np.ndarray,
    cache_dir: Path,
    geometry: bool,
    threads: int,
) -> None:
    """All ranks: read each volume once, in parallel, and raise InputError for those that cannot be used.

    What was found good is remembered in cache_dir/checked.json; only new and changed files are read again.
    """
    memory = Path(cache_dir) / "checked.json"
    known: set[str] = set()
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        known = set(json.loads(memory.read_text()).get("good", []))
    known = broadcast_object(known)
    kind = "|affine" if geometry else ""

    def check(i: int) -> Check:
        key = ""
        with contextlib.suppress(OSError):
            key = identity(cohort.path[i]) + kind
        fault = "" if key in known else find_fault(cohort.path[i], geometry)
        return Check(i, key, fault)

    # each rank reads its share
    rank, world_size = world()
    share = rows[rank::world_size].tolist()
    hidden = rank != 0 or not sys.stderr.isatty()
    with ThreadPoolExecutor(max(1, threads)) as pool:
        checks = pool.map(check, share)
        local = list(tqdm(checks, total=len(share), desc="checking volumes", disable=hidden, leave=False))
    checked = sorted(check for part in gather_objects(local) for check in part)
    if bad := [check for check in checked if check.fault]:
        raise InputError(describe_faults(cohort, bad))

    # a folder that one may only read: checked again next time
    new = {check.key for check in checked} - known
    if rank == 0 and new:
        content = json.dumps({"good": sorted(known | new)}).encode()
        with contextlib.suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(memory, lambda file: file.write(content))


def describe_faults(cohort: Cohort, bad: list[Check]) -> str:
    """The error line of some unusable volumes: the first one, and up to three more."""
    others = [f"row {cohort.row[check.row]}: {cohort.path[check.row]} {check.fault}" for check in bad[1:4]]
    more = ""
    if others:
        dots = " ..." if len(bad) > 4 else ""
        more = f" (and {len(bad) - 1} more: {'; '.join(others)}{dots})"
    first = bad[0]
    advice = "replace it or remove the row"
    if "does not exist" in first.fault:
        advice += ", or check --data_dir"
    return f"{cohort.where(first.row)}: {cohort.path[first.row]} {first.fault}{more}; {advice}"


class Volumes:
    """Reads volumes: (1, X, Y, Z) float16 in 0..1, axes as in the file, or in `orientation` ("RAS") if given.

    Spacing (mm) if given, then the HU window to 0..1, then averaging to image_size. With a folder, what was read is
    kept there, each file with a checksum; ranks that write the same file write the same bytes, and a torn one is
    read anew.
    """

    def __init__(
        self,
        image_size=(256, 256, 64),
        window=(-1000, 1000),
        spacing=None,
        orientation: str | None = None,
        cache_dir: str | None = None,
    ):
        from monai.transforms import Compose, LoadImage, Orientation, Resize, ScaleIntensityRange, Spacing

        # beside an installed pydicom MONAI tells of a GPU's decoder that it lacks, whichever reader is asked for
        logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", message="NvImgCodecPydicomReader")
        steps = [LoadImage(reader="NibabelReader", image_only=True, ensure_channel_first=True, dtype=np.float32)]
        if orientation:
            steps.append(Orientation(axcodes=orientation, labels=None))
        if spacing:
            steps.append(Spacing(pixdim=spacing, mode="bilinear", padding_mode="border"))
        low, high = window
        steps.append(ScaleIntensityRange(low, high, 0.0, 1.0, clip=True))
        steps.append(Resize(image_size, mode="area"))

        self.read = Compose(steps)
        self.shape = (1, *image_size)
        self.settings = f"{tuple(image_size)}|{tuple(window)}|{spacing}|{orientation}|1"
        self.cache = DiskCache(cache_dir, ".f16")

    def bytes(self) -> int:
        """What one volume takes."""
        return 2 * math.prod(self.shape)

    def get(self, path: str) -> torch.Tensor:
        """Raises what MONAI raises for an unreadable file, ValueError for values that are not finite."""
        key = f"{identity(path)}|{self.settings}" if self.cache.folder else ""
        if data := self.cache.get(key, self.bytes()):
            return torch.frombuffer(bytearray(data), dtype=torch.float16).view(self.shape)
        volume = self.read(path).as_tensor().to(torch.float16).contiguous()
        if tuple(volume.shape) != self.shape:
            raise ValueError(f"has {len(volume.shape) - 1} dimensions and channels {volume.shape[0]}, not one volume")
        if not volume.isfinite().all():
            raise ValueError("holds values that are NaN or infinite")
        self.cache.put(key, volume.numpy().tobytes())
        return volume


# --- augmentation -----------------------------------------------------------------------------------------------------


def case_noise(
    seed: int,
    epoch: int,
    indices: list[int],
) -> Iterator[np.random.Generator]:
    """A generator of random numbers per case: the same at any world size, also after a resume."""
    for index in indices:
        yield np.random.default_rng([seed % 2**63, epoch, int(index)])


def load_images(
    batch: dict,
    device: torch.device,
    seed: int | None,
    epoch: int,
) -> torch.Tensor:
    """A micro-batch's images on the device, augmented as in this epoch. seed: of the augmentation, None without."""
    images = batch["image"].to(device, non_blocking=True)
    if seed is None:
        return images
    cases = batch["index"].tolist()
    return augment(images, cases, seed, epoch)


def augment(
    images: torch.Tensor,
    indices: list[int],
    seed: int,
    epoch: int,
) -> torch.Tensor:
    """(B, 1, X, Y, Z) -> the same: each case flipped along each axis, and turned by quarters where X equals Y.

    On the device of the images; a function of (seed, epoch, case).
    """
    changed = []
    for image, noise in zip(images, case_noise(seed, epoch, indices), strict=True):
        flips = noise.integers(0, 2, 3)
        turns = int(noise.integers(0, 4))
        image = image.flip([axis + 1 for axis in range(3) if flips[axis]])
        if image.shape[1] == image.shape[2]:
            image = torch.rot90(image, turns, (1, 2))
        changed.append(image)
    return torch.stack(changed)
