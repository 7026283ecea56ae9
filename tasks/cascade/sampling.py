"""Sampling from guide 3's cascade: volumes from noise, and the volumes of a folder of X-rays (--sample)."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from cli_utils import InputError
from distributed_utils import EvalBatchSampler, agree_on_errors, print_main, world
from hardware_utils import autocast
from tasks.cascade.data import Decoded, grey
from tasks.cascade.diffusion import PREVIOUS_NOISE_SAMPLING, Diffusion, Previous, denoise, noise_like
from tasks.cascade.files import find_patients
from tasks.cascade.model import StageNet
from tasks.cascade.report import grid_of, write_volume
from tasks.cascade.stages import eval_batch


@torch.no_grad()
def sample_cascade(
    models: list[StageNet],
    xrays: Tensor,
    indices: list[int],
    diffusion: Diffusion,
    precision: str,
    zeroed: bool = False,
) -> list[Tensor]:
    """The volumes (B, 1, X, Y, Z) of every stage, sampled from noise by DDIM (Song et al. 2021).

    Each stage starts from the volume that the one before sampled. xrays: (B, views, H, W) in -1..1. The noise is a
    function of (seed, stage, index). zeroed: the last stage gets zeros for the volume before, to see what that does.
    """
    volumes: list[Tensor] = []
    device = xrays.device
    scheduler = diffusion.scheduler
    for k, model in enumerate(models):
        keys = [(diffusion.seed, 3, k, index) for index in indices]
        x = noise_like((1, *diffusion.sizes[k]), device, keys)

        # the volume of the stage before, with a little noise that hides what it got wrong
        previous = None
        if k:
            last = volumes[-1]
            if zeroed and k == len(models) - 1:
                last = torch.zeros_like(last)
            keys = [(diffusion.seed, 4, k, index) for index in indices]
            grain = noise_like(last.shape[1:], device, keys)
            level = torch.full((len(indices),), PREVIOUS_NOISE_SAMPLING, device=device)
            previous = Previous(last + PREVIOUS_NOISE_SAMPLING * grain, level)

        # from noise to a volume
        for timestep in scheduler.timesteps.tolist():
            now = torch.full((len(indices),), timestep, device=device)
            with autocast(device, precision):
                output, _ = denoise(model, scheduler, x, now, xrays, previous)
            x, _ = scheduler.step(output, timestep, x)
        volumes.append(x.clamp(-1, 1))
    return volumes


@torch.no_grad()
def sample_folder(
    folder: Path,
    samples_folder: Path,
    models: list[StageNet],
    decoded: Decoded,
    diffusion: Diffusion,
    extent: list[float],
    precision: str,
) -> None:
    """All ranks: the CT volumes of a folder's X-rays, as NIfTI in HU. extent: for those without a CT beside them."""
    last = models[-1]
    with agree_on_errors():
        patients = find_patients(folder, last.views, need_ct=False)
        try:
            samples_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{samples_folder}: cannot write here ({error.strerror}); choose another folder") from None

    rank, world_size = world()
    with agree_on_errors():
        for places in EvalBatchSampler(len(patients), eval_batch(last.size), rank, world_size):
            chosen = [patients[place] for place in places]
            xrays = torch.stack([decoded.xrays(patient) for patient in chosen])
            # the noise is a function of the patient's name
            keys = [int(hashlib.sha256(patient.id.encode()).hexdigest()[:12], 16) for patient in chosen]
            volumes = sample_cascade(models, grey(xrays).to(last.position.device), keys, diffusion, precision)
            for patient, volume in zip(chosen, volumes[-1], strict=True):
                path = samples_folder / f"{patient.id}.nii.gz"
                write_volume(path, volume[0], grid_of(patient, last.size, extent))
    print_main(f"{len(patients)} volumes of {' x '.join(map(str, last.size))}: {samples_folder}")
