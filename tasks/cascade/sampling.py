"""Sampling from guide 3's cascade: volumes from noise, and the volumes of a folder of X-rays (--sample)."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from old.cli_utils import InputError
from old.distributed_utils import EvalBatchSampler, agree_on_errors, print_main, world
from old.hardware_utils import autocast
from old.phase_utils import doing
from tasks.cascade.agreement import CORRECTIONS, LAST_CORRECTIONS, agree, measure_xrays
from tasks.cascade.data import Decoded, grey
from tasks.cascade.diffusion import PREVIOUS_NOISE_SAMPLING, Diffusion, Start, denoise, noise_like, prediction_of
from tasks.cascade.diffusion import start_of_stage
from tasks.cascade.files import Patient, find_patients
from tasks.cascade.model import StageNet
from tasks.cascade.projector import hu_difference, to_hu
from tasks.cascade.rays import check_views
from tasks.cascade.report import grid_of, write_volume
from tasks.cascade.stages import eval_batch


class Trained(NamedTuple):
    """A cascade up to one of its stages. names: of the stages. precision: of the forward passes."""

    models: list[StageNet]
    names: list[str]
    diffusion: Diffusion
    precision: str

    @property
    def size(self) -> tuple[int, ...]:
        """Of the last volume."""
        return self.models[-1].size

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.models[-1].position.device


class Sampling(NamedTuple):
    """How a volume is sampled.

    number: which of several samples. one_step: the model's answer at the last timestep alone. agree: every estimate is
    brought to agree with the X-rays, where the cascade was trained so. zeroed: the last stage gets zeros for the volume
    of the stage before, to see what that does.
    """

    number: int = 0
    one_step: bool = False
    agree: bool = True
    zeroed: bool = False


@torch.no_grad()
def sample_cascade(
    cascade: Trained,
    batch: dict,
    how: Sampling,
) -> list[Tensor]:
    """The volumes (B, 1, X, Y, Z) of every stage, sampled from noise by DDIM (Song et al. 2021).

    Each stage starts from the volume that the one before sampled. batch: xrays (B, views, H, W) in -1..1, `seen` as the
    model is shown them, extent (B, 3) mm, index of each patient. The noise is a function of (seed, stage, index, number
    of the sample).
    """
    diffusion = cascade.diffusion
    # the first sample's noise is that of a run that asks for one
    patients = [(index, how.number) if how.number else (index,) for index in batch["index"]]
    levels = [PREVIOUS_NOISE_SAMPLING] * len(patients)
    volumes: list[Tensor] = []
    for k, model in enumerate(cascade.models):
        previous = volumes[-1] if volumes else None
        if how.zeroed and k == len(cascade.models) - 1:
            previous = torch.zeros_like(previous)
        keys = [(diffusion.seed, 4, k, *patient) for patient in patients]
        start = start_of_stage(k, batch, previous, levels, keys, diffusion)
        # a first step that is the only one does without noise
        blind = diffusion.starts_blind and (how.one_step or diffusion.regression)
        keys = [None if blind else (diffusion.seed, 3, k, *patient) for patient in patients]
        noise = noise_like((1, *diffusion.sizes[k]), cascade.device, keys)
        with autocast(cascade.device, cascade.precision):
            volumes.append(sample_stage(k, model, batch, start, noise, diffusion, how))
    return volumes


def sample_stage(
    k: int,
    model: StageNet,
    batch: dict,
    start: Start,
    noise: Tensor,
    diffusion: Diffusion,
    how: Sampling,
) -> Tensor:
    """(B, 1, X, Y, Z) in -1..1: a volume of stage k, from a noisy residual (B, 1, X, Y, Z) that is all noise."""
    measured = None
    if diffusion.agreement and how.agree:
        measured = measure_xrays(batch["xrays"], batch["extent"], diffusion.prior.greys, diffusion.sizes[k])
    times = diffusion.scheduler.timesteps.tolist()
    if how.one_step or diffusion.regression:
        times = times[:1]

    noisy = noise
    for timestep in times:
        now = torch.full((len(noise),), timestep, device=noise.device)
        blind = diffusion.starts_blind and timestep == diffusion.last_timestep
        shown = torch.zeros_like(noisy) if blind else noisy
        _, clean = denoise(model, shown, now, batch, start, diffusion)
        clean = clean.clamp(-1, 1)
        last = timestep == times[-1]
        if measured:
            # an estimate is the surer, the less noise is left; the last one agrees as well as it can
            share = 1 if last else 1 - float(diffusion.scheduler.alphas_cumprod[timestep])
            variance = share * start.std**2
            clean = agree(clean, measured, variance, corrections=LAST_CORRECTIONS if last else CORRECTIONS)
        if not last:
            output = prediction_of(clean, noisy, now, start, diffusion)
            noisy, _ = diffusion.scheduler.step(output, timestep, noisy)
    return clean


def as_estimated(cascade: Trained, batch: dict, epoch: int) -> Tensor | None:
    """(B, 1, X, Y, Z): what the stages before one give for a batch, in one step each; None before the first.

    A stage is trained on this, and not on the true volume: so it learns what the stages before get wrong.
    """
    if not cascade.models:
        return None
    how = Sampling(number=epoch + 1, one_step=True)
    return sample_cascade(cascade, batch, how)[-1]


def several_samples(
    cascade: Trained,
    batch: dict,
    num_samples: int,
) -> tuple[list[Tensor], Tensor]:
    """(the volumes of every stage in the first sample, that of the last stage in all of them (K, B, 1, X, Y, Z))."""
    first = sample_cascade(cascade, batch, Sampling())
    samples = [first[-1]]
    for number in range(1, num_samples):
        volumes = sample_cascade(cascade, batch, Sampling(number=number))
        samples.append(volumes[-1])
    return first, torch.stack(samples)


def folder_batch(
    patients: list[Patient],
    grids: list[np.ndarray],
    size: tuple[int, ...],
    decoded: Decoded,
    device: torch.device,
) -> dict:
    """The batch that sample_cascade takes, of patients without a CT. grids: from voxels to mm. Raises InputError."""
    stored = [decoded.xrays(patient) for patient in patients]
    xrays = grey(torch.stack(stored)).to(device)
    spacings = [np.linalg.norm(grid[:3, :3], axis=0) for grid in grids]
    extents = np.stack(spacings) * size
    return {
        "xrays": xrays,
        "seen": xrays,
        "extent": torch.from_numpy(extents).float().to(device),
        # the noise is a function of the patient's name
        "index": [int(hashlib.sha256(patient.id.encode()).hexdigest()[:12], 16) for patient in patients],
    }


@doing("sampling volumes")
@torch.no_grad()
def sample_folder(
    folder: Path,
    samples_folder: Path,
    cascade: Trained,
    decoded: Decoded,
    extent: list[float],
    num_samples: int,
) -> None:
    """All ranks: the CT volumes of a folder's X-rays, as NIfTI in HU; of several samples mean and standard deviation.

    extent: for those without a CT beside them.
    """
    size = cascade.size
    with agree_on_errors():
        check_views(decoded.views, on_gpu=cascade.device.type == "cuda")
        patients = find_patients(folder, decoded.views, need_ct=False)
        try:
            samples_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{samples_folder}: cannot write here ({error.strerror}); choose another folder") from None

    rank, world_size = world()
    with agree_on_errors():
        for places in EvalBatchSampler(len(patients), eval_batch(size), rank, world_size):
            chosen = [patients[place] for place in places]
            grids = [grid_of(patient, size, extent) for patient in chosen]
            batch = folder_batch(chosen, grids, size, decoded, cascade.device)
            _, samples = several_samples(cascade, batch, num_samples)
            for i, patient in enumerate(chosen):
                write_samples(samples_folder / patient.id, samples[:, i, 0], grids[i])
    what = "volumes"
    if num_samples > 1:
        what = f"means and standard deviations of {num_samples} samples"
    print_main(f"{len(patients)} {what} of {' x '.join(map(str, size))}: {samples_folder}")


def write_samples(path: Path, samples: Tensor, grid: np.ndarray) -> None:
    """One patient's samples (K, X, Y, Z) as <path>.nii.gz, and of several the standard deviation <path>_std.nii.gz."""
    mean = to_hu(samples.mean(0))
    write_volume(path.with_name(f"{path.name}.nii.gz"), mean, grid)
    std_path = path.with_name(f"{path.name}_std.nii.gz")
    if len(samples) > 1:
        write_volume(std_path, hu_difference(samples.std(0)), grid)
    else:
        # of an earlier call
        std_path.unlink(missing_ok=True)
