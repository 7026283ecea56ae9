"""The diffusion of guide 3's cascade: what is drawn for a batch, and the model's estimate of the clean volume."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fixed_order_utils import interpolate
from tasks.cascade.projector import resize

# Each validation patient's loss is taken at so many noise levels.
LOSS_DRAWS = 4
# Noise on the volume of the stage before: up to this in training, and so much in sampling, which hides its mistakes.
PREVIOUS_NOISE = 0.1
PREVIOUS_NOISE_SAMPLING = 0.02
# Of a torso CT in -1..1, roughly, and of what the stage before lacks.
CT_MEAN = -0.75
CT_STD = 0.25
RESIDUAL_STD = 0.06
# Threads of each process that draw large noise.
NOISE_THREADS = 4


class Diffusion(NamedTuple):
    """The diffusion of a cascade. scheduler: MONAI's. sizes: of each stage's volume."""

    scheduler: object
    seed: int
    sizes: list[list[int]]


class Previous(NamedTuple):
    """The volume (B, 1, X, Y, Z) of the stage before, and the level (B,) of the noise on it."""

    volume: Tensor
    level: Tensor


class Draw(NamedTuple):
    """What is drawn for a batch: timestep (B,), noise (B, 1, X, Y, Z), and the stage before, None in the first."""

    timestep: Tensor
    noise: Tensor
    previous: Previous | None


def make_diffusion(
    num_timesteps: int,
    ddim_steps: int,
    v_parameterization: bool,
    seed: int,
    stages: list[dict],
) -> Diffusion:
    """The diffusion of a cascade as the flags say. stages: the entries of --stage_configs."""
    scheduler = make_scheduler(num_timesteps, ddim_steps, v_parameterization)
    sizes = [stage["volume_size"] for stage in stages]
    return Diffusion(scheduler, seed, sizes)


def make_scheduler(
    num_timesteps: int,
    ddim_steps: int,
    v_parameterization: bool,
):
    """MONAI's DDIM scheduler: cosine schedule (Nichol & Dhariwal 2021, s = .008), v or noise prediction."""
    from monai.networks.schedulers import DDIMScheduler

    kind = "v_prediction" if v_parameterization else "epsilon"
    scheduler = DDIMScheduler(num_timesteps, schedule="cosine", prediction_type=kind, clip_sample=True)
    scheduler.set_timesteps(ddim_steps)

    # step() goes back by T / steps; set_timesteps spaces the times by (T - 1) / (steps - 1), which is more
    scheduler.timesteps = torch.arange(num_timesteps - 1, -1, -(num_timesteps // ddim_steps))
    return scheduler


# --- noise ------------------------------------------------------------------------------------------------------------


def draw_noise(
    shape: tuple[int, ...],
    device: torch.device,
    seeds: list[int],
) -> Tensor:
    """Gaussian noise (len(seeds), *shape) on the device, each part a function of its seed alone.

    Drawn on the CPU: CUDA's generator deals its numbers out by the GPU's number of multiprocessors, so that a large
    tensor differs between GPU models. Large parts are drawn side by side, in threads that end here, as a data loader
    may fork next.
    """
    noise = torch.empty(len(seeds), *shape, pin_memory=device.type == "cuda")

    def draw(place: int) -> None:
        generator = torch.Generator().manual_seed(seeds[place])
        noise[place].normal_(generator=generator)

    # a fake tensor, of a step that is only traced, has no values and one thread
    if noise.numel() < 2**18 or type(noise) is not Tensor:
        for place in range(len(seeds)):
            draw(place)
    else:
        with ThreadPoolExecutor(min(len(seeds), NOISE_THREADS)) as pool:
            list(pool.map(draw, range(len(seeds))))
    return noise.to(device, non_blocking=True)


def generator_of(key: tuple[int, ...]) -> np.random.Generator:
    """A generator of its own for each key, whose numbers may have 64 bits and a sign."""
    return np.random.default_rng([number % 2**63 for number in key])


def noise_like(
    shape: tuple[int, ...],
    device: torch.device,
    keys: list[tuple[int, ...]],
) -> Tensor:
    """Gaussian noise (len(keys), *shape), each part a function of its key alone."""
    seeds = [int(generator_of(key).integers(2**62)) for key in keys]
    return draw_noise(shape, device, seeds)


def on_device(values: list, device: torch.device) -> Tensor:
    """A few numbers on the device, without waiting for it."""
    tensor = torch.tensor(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def noised_previous(
    volume: Tensor,
    k: int,
    levels: list[float],
    keys: list[tuple],
    diffusion: Diffusion,
) -> Previous | None:
    """What stage k is given of the stage before, made from the true volume; None for the first stage.

    This is the noise-conditioning augmentation of Ho et al. 2022.
    """
    if k == 0:
        return None
    low = resize(volume, diffusion.sizes[k - 1])
    grain = noise_like(low.shape[1:], low.device, [(*key, 2) for key in keys])
    level = on_device(levels, low.device)
    return Previous(low + level[:, None, None, None, None] * grain, level)


def training_draw(
    batch: dict,
    k: int,
    epoch: int,
    diffusion: Diffusion,
) -> Draw:
    """What each patient of a batch is trained with: a function of (seed, stage, epoch, patient)."""
    volume = batch["volume"]
    times: list[int] = []
    levels: list[float] = []
    keys = [(diffusion.seed, 1, k, epoch, index) for index in batch["index"]]
    for key in keys:
        generator = generator_of(key)
        times.append(int(generator.integers(diffusion.scheduler.num_train_timesteps)))
        levels.append(float(generator.uniform(0, PREVIOUS_NOISE)))
    timestep = on_device(times, volume.device)
    noise = noise_like(volume.shape[1:], volume.device, [(*key, 1) for key in keys])
    return Draw(timestep, noise, noised_previous(volume, k, levels, keys, diffusion))


def validation_draw(
    batch: dict,
    places: list[int],
    k: int,
    number: int,
    diffusion: Diffusion,
) -> Draw:
    """What each patient of a batch is validated with, in one of LOSS_DRAWS draws; places: in the data set.

    The noise levels are spread evenly over the draws and the patients.
    """
    volume = batch["volume"]
    num_timesteps = diffusion.scheduler.num_train_timesteps
    shares = [(number + place * 0.618034 % 1) / LOSS_DRAWS for place in places]
    timestep = on_device([int(share * num_timesteps) for share in shares], volume.device)
    keys = [(diffusion.seed, 2, k, number, index) for index in batch["index"]]
    noise = noise_like(volume.shape[1:], volume.device, [(*key, 1) for key in keys])
    levels = [PREVIOUS_NOISE_SAMPLING] * len(keys)
    return Draw(timestep, noise, noised_previous(volume, k, levels, keys, diffusion))


# --- what the model says ----------------------------------------------------------------------------------------------


def training_target(
    scheduler,
    volume: Tensor,
    draw: Draw,
) -> Tensor:
    """What denoise() is to return first: v, or the noise."""
    if scheduler.prediction_type == "v_prediction":
        return scheduler.get_velocity(volume, draw.noise, draw.timestep)
    return draw.noise


def denoise(
    model: nn.Module,
    scheduler,
    noisy: Tensor,
    timestep: Tensor,
    xrays: Tensor,
    previous: Previous | None,
) -> tuple[Tensor, Tensor]:
    """(v or noise as the scheduler expects it, clean volume), both (B, 1, X, Y, Z) fp32, at timesteps (B,).

    The model sees inputs of unit variance and predicts, in unit variance, what a linear estimate from the noisy volume
    leaves of the clean one (Karras et al. 2022, here for v). The estimate's prior is the volume of the stage before;
    in the first stage a uniform one. So the model need not learn to copy its inputs, which are nearly right.
    """
    signal = scheduler.alphas_cumprod.to(noisy.device)[timestep][:, None, None, None, None]
    signal_scale = signal.sqrt()
    noise_scale = (1 - signal).sqrt()

    # the prior of the clean volume, and what the model is given of it
    mean = CT_MEAN
    std = CT_STD
    given = ()
    if previous:
        mean = interpolate(previous.volume, noisy.shape[2:])
        std = RESIDUAL_STD
        given = ((mean - CT_MEAN) / CT_STD, previous.level)

    # the linear estimate, and what the model adds to it
    deviation = (signal * std**2 + noise_scale**2).sqrt()
    centred = noisy - signal_scale * mean
    time = (timestep + 1) / scheduler.num_train_timesteps
    output = model(centred / deviation, time, xrays, *given)
    clean = mean + signal_scale * (std / deviation) ** 2 * centred + std * noise_scale / deviation * output
    if scheduler.prediction_type == "v_prediction":
        return (signal_scale * noisy - clean) / noise_scale, clean
    return (noisy - signal_scale * clean) / noise_scale, clean
