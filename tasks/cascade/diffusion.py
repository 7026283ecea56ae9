"""The diffusion of guide 3's cascade: what is drawn for a batch, and the model's estimate of the clean volume.

A stage starts from an estimate of the volume: the first from the mean of the training patients, each later one from
the volume of the stage before. By default both are made to agree with the X-rays. What is diffused is the residual,
(true volume - start) / std, of about unit variance: so the model need not learn what is known already.

At the last timestep nothing is left of the residual, and the model is given zeros there instead of noise. Half of the
training draws are of that timestep: the model's answer is then the mean of all volumes that are possible, from which
sampling goes on.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from old.fixed_order_utils import interpolate
from tasks.cascade.agreement import Prior, agree, measure_xrays, start_volume
from tasks.cascade.alignment import UNKNOWN_GREY
from tasks.cascade.projector import resize
from tasks.cascade.views import views_of

# Each validation patient's loss is taken at so many noise levels.
LOSS_DRAWS = 4
# The share of the training draws that are of the last timestep.
LAST_TIMESTEP_SHARE = 0.5
# Noise on the volume of the stage before: up to this in training, and so much in sampling, which hides its mistakes.
PREVIOUS_NOISE = 0.1
PREVIOUS_NOISE_SAMPLING = 0.02
# Of a torso CT in -1..1, roughly.
CT_MEAN = -0.75
CT_STD = 0.25
# Threads of each process that draw large noise.
NOISE_THREADS = 4


class Diffusion(NamedTuple):
    """The diffusion of a cascade. scheduler: MONAI's. sizes: of each stage's volume.

    prior: of the training patients. agreement: --xray_agreement. regression: --regression.
    """

    scheduler: object
    seed: int
    sizes: list[list[int]]
    prior: Prior
    agreement: bool
    regression: bool

    def starting_from(self, prior: Prior) -> "Diffusion":
        """The same, with what is known of the training patients, on the device."""
        device = self.prior.mean.device
        prior = prior._replace(mean=prior.mean.to(device), variance=prior.variance.to(device))
        return self._replace(prior=prior)

    @property
    def last_timestep(self) -> int:
        """The one at which nothing is left of the residual."""
        return self.scheduler.num_train_timesteps - 1

    @property
    def starts_blind(self) -> bool:
        """Whether the model is trained without noise at the last timestep. Noise prediction learns nothing there."""
        return self.scheduler.prediction_type == "v_prediction"


class Start(NamedTuple):
    """What a stage starts from: a volume (B, 1, X, Y, Z) on its own grid, and the level (B,) of the noise in it.

    std: how far it is from the true volume, roughly.
    """

    volume: Tensor
    level: Tensor
    std: float


class Draw(NamedTuple):
    """What is drawn for a batch: timestep (B,), noise (B, 1, X, Y, Z), and what the stage starts from."""

    timestep: Tensor
    noise: Tensor
    start: Start


def make_diffusion(values: dict, device: torch.device) -> Diffusion:
    """The diffusion of a cascade as the flags' values say, before anything is known of the training patients."""
    scheduler = make_scheduler(
        values["num_timesteps"],
        values["ddim_steps"],
        values["v_parameterization"],
    )
    sizes = [stage["volume_size"] for stage in values["stage_configs"]]
    greys = [UNKNOWN_GREY._replace(view=view) for view in views_of(values["views"])]
    mean = torch.full((1, 1, *sizes[0]), CT_MEAN, device=device)
    unknown = Prior(greys, mean, torch.full_like(mean, CT_STD**2), CT_STD)
    return Diffusion(scheduler, values["seed"], sizes, unknown, values["xray_agreement"], values["regression"])


def make_scheduler(
    num_timesteps: int,
    ddim_steps: int,
    v_parameterization: bool,
):
    """MONAI's DDIM scheduler: cosine schedule (Nichol & Dhariwal 2021, s = .008), v or noise prediction.

    A residual has no bounds at which to clip it.
    """
    from monai.networks.schedulers import DDIMScheduler

    kind = "v_prediction" if v_parameterization else "epsilon"
    scheduler = DDIMScheduler(num_timesteps, schedule="cosine", prediction_type=kind, clip_sample=False)
    scheduler.set_timesteps(ddim_steps)

    # step() goes back by T / steps; set_timesteps spaces the times by (T - 1) / (steps - 1), which is more
    scheduler.timesteps = torch.arange(num_timesteps - 1, -1, -(num_timesteps // ddim_steps))
    return scheduler


# --- noise ------------------------------------------------------------------------------------------------------------


def draw_noise(
    shape: tuple[int, ...],
    device: torch.device,
    seeds: list[int | None],
) -> Tensor:
    """Gaussian noise (len(seeds), *shape) on the device, each part a function of its seed alone; zeros without a seed.

    Drawn on the CPU: CUDA's generator deals its numbers out by the GPU's number of multiprocessors, so that a large
    tensor differs between GPU models. Large parts are drawn side by side, in threads that end here, as a data loader
    may fork next.
    """
    noise = torch.empty(len(seeds), *shape, pin_memory=device.type == "cuda")

    def draw(place: int) -> None:
        if seeds[place] is None:
            noise[place].zero_()
            return
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
    keys: list[tuple[int, ...] | None],
) -> Tensor:
    """Gaussian noise (len(keys), *shape), each part a function of its key alone; zeros without a key."""
    seeds = [None if key is None else int(generator_of(key).integers(2**62)) for key in keys]
    return draw_noise(shape, device, seeds)


def on_device(values: list, device: torch.device) -> Tensor:
    """A few numbers on the device, without waiting for it."""
    tensor = torch.tensor(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def start_of_stage(
    k: int,
    batch: dict,
    previous: Tensor | None,
    levels: list[float],
    keys: list[tuple],
    diffusion: Diffusion,
) -> Start:
    """What stage k starts from. previous: the volume of the stage before, None in the first.

    Noise of the given levels is added to it, the noise-conditioning augmentation of Ho et al. 2022. keys: of the noise.
    """
    prior = diffusion.prior
    size = diffusion.sizes[k]
    extent = batch["extent"]
    if previous is None:
        volume = start_volume(prior, batch, size, diffusion.agreement)
        return Start(volume, torch.zeros(len(extent), device=extent.device), prior.std)

    grain = noise_like(previous.shape[1:], previous.device, [(*key, 2) for key in keys])
    level = on_device(levels, previous.device)
    noised = previous + level[:, None, None, None, None] * grain
    volume = interpolate(noised, size)
    if diffusion.agreement:
        measured = measure_xrays(batch["xrays"], extent, prior.greys, size)
        volume = agree(volume, measured, prior.std**2)
    return Start(volume, level, prior.std)


def make_draw(
    k: int,
    batch: dict,
    previous: Tensor | None,
    times: list[int],
    levels: list[float],
    keys: list[tuple],
    diffusion: Diffusion,
) -> Draw:
    """What the patients of a batch are shown to stage k with, at some timesteps. keys: of all noise.

    previous: as the stages before estimate it; None in the first, and where they are not trained yet, as in a step that
    is only tried: then it is made from the true volume.
    """
    volume = batch["volume"]
    if k > 0 and previous is None:
        previous = resize(volume, diffusion.sizes[k - 1])
    if diffusion.regression:
        times = [diffusion.last_timestep] * len(times)
    noise_keys: list[tuple | None] = []
    for time, key in zip(times, keys, strict=True):
        blind = diffusion.starts_blind and time == diffusion.last_timestep
        noise_keys.append(None if blind else (*key, 1))
    timestep = on_device(times, volume.device)
    noise = noise_like(volume.shape[1:], volume.device, noise_keys)
    return Draw(timestep, noise, start_of_stage(k, batch, previous, levels, keys, diffusion))


def training_draw(
    k: int,
    batch: dict,
    previous: Tensor | None,
    epoch: int,
    diffusion: Diffusion,
) -> Draw:
    """What each patient of a batch is trained with: a function of (seed, stage, epoch, patient).

    previous: the volumes of the stage before; see make_draw.
    """
    times: list[int] = []
    levels: list[float] = []
    keys = [(diffusion.seed, 1, k, epoch, index) for index in batch["index"]]
    for key in keys:
        generator = generator_of(key)
        timestep = int(generator.integers(diffusion.last_timestep + 1))
        if diffusion.starts_blind and generator.uniform() < LAST_TIMESTEP_SHARE:
            timestep = diffusion.last_timestep
        times.append(timestep)
        levels.append(float(generator.uniform(0, PREVIOUS_NOISE)))
    return make_draw(k, batch, previous, times, levels, keys, diffusion)


def validation_draw(
    k: int,
    batch: dict,
    previous: Tensor | None,
    places: list[int],
    number: int,
    diffusion: Diffusion,
) -> Draw:
    """What each patient of a batch is validated with, in one of LOSS_DRAWS draws; places: in the data set.

    The noise levels are spread evenly over the draws and the patients; the last draw is of the last timestep.
    """
    shares = [(number + place * 0.618034 % 1) / (LOSS_DRAWS - 1) for place in places]
    times = [min(int(share * (diffusion.last_timestep + 1)), diffusion.last_timestep) for share in shares]
    keys = [(diffusion.seed, 2, k, number, index) for index in batch["index"]]
    levels = [PREVIOUS_NOISE_SAMPLING] * len(keys)
    return make_draw(k, batch, previous, times, levels, keys, diffusion)


# --- what the model says ----------------------------------------------------------------------------------------------


def scales(diffusion: Diffusion, timestep: Tensor) -> tuple[Tensor, Tensor]:
    """(signal, noise), both (B, 1, 1, 1, 1): what residual and noise are multiplied by at timesteps (B,)."""
    signal = diffusion.scheduler.alphas_cumprod.to(timestep.device)[timestep]
    signal = signal[:, None, None, None, None]
    return signal.sqrt(), (1 - signal).sqrt()


def diffused(
    volume: Tensor,
    draw: Draw,
    diffusion: Diffusion,
) -> tuple[Tensor, Tensor]:
    """(noisy residual, v that denoise() is to return), both (B, 1, X, Y, Z), of true volumes."""
    start = draw.start
    residual = (volume - start.volume) / start.std
    scheduler = diffusion.scheduler
    noisy = scheduler.add_noise(residual, draw.noise, draw.timestep)
    if diffusion.starts_blind:
        seeing = draw.timestep != diffusion.last_timestep
        noisy = noisy * seeing[:, None, None, None, None]
    return noisy, scheduler.get_velocity(residual, draw.noise, draw.timestep)


def denoise(
    model: nn.Module,
    noisy: Tensor,
    timestep: Tensor,
    batch: dict,
    start: Start,
    diffusion: Diffusion,
) -> tuple[Tensor, Tensor]:
    """(v, clean volume), both (B, 1, X, Y, Z) fp32, of a noisy residual at timesteps (B,).

    All that the model is given has about unit variance, and so has v (Salimans & Ho 2022). batch: X-rays as the model
    sees them, and the field of view.
    """
    time = (timestep + 1) / diffusion.scheduler.num_train_timesteps
    known = (start.volume - CT_MEAN) / CT_STD
    v = model(noisy, time, batch["seen"], known, start.level, batch["extent"])
    signal, noise = scales(diffusion, timestep)
    return v, start.volume + start.std * (signal * noisy - noise * v)


def prediction_of(
    clean: Tensor,
    noisy: Tensor,
    timestep: Tensor,
    start: Start,
    diffusion: Diffusion,
) -> Tensor:
    """The v or noise, as the scheduler's step() expects it, that says that the clean volume is this one."""
    signal, noise = scales(diffusion, timestep)
    residual = (clean - start.volume) / start.std
    grain = (noisy - signal * residual) / noise
    if diffusion.scheduler.prediction_type == "epsilon":
        return grain
    return diffusion.scheduler.get_velocity(residual, grain, timestep)
