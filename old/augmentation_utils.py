"""Small random changes of training images on their device, each a function of (seed, epoch, image) alone.

What is drawn is drawn on the host, by a generator of its own for each image, so that batches, ranks, devices and
resuming change nothing. Nothing is mirrored: questions name sides. The random transforms of MONAI and torchvision take
one image at a time, or draw one change for a whole batch.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# The side of a grid of noise, which is as fine as that in every size of an image.
GRAIN = 128


class Strength(NamedTuple):
    """The largest changes: shifts as shares of the image's side, the angle in degrees, noise of a range of 1.

    scale, brightness, contrast and gamma: of the logarithm of a factor.
    """

    shift: float = 0.04
    scale: float = 0.08
    angle: float = 6.0
    brightness: float = 0.15
    contrast: float = 0.15
    gamma: float = 0.2
    noise: float = 0.02


class Change(NamedTuple):
    """What becomes of one image; angle: radians, from x to y. noise: standard deviation, drawn by `noise_seed`."""

    shift_x: float
    shift_y: float
    scale: float
    angle: float
    brightness: float
    contrast: float
    gamma: float
    noise: float
    noise_seed: int


# What training takes, in both guides.
MILD = Strength()


def draw_change(seed: int, epoch: int, key: int, strength: Strength = MILD) -> Change:
    """The change of the image with this number in this epoch."""
    generator = np.random.default_rng([seed % 2**63, epoch, key])

    def draw(largest: float) -> float:
        return float(generator.uniform(-largest, largest))

    return Change(
        shift_x=draw(strength.shift),
        shift_y=draw(strength.shift),
        scale=math.exp(draw(strength.scale)),
        angle=math.radians(draw(strength.angle)),
        brightness=math.exp(draw(strength.brightness)),
        contrast=math.exp(draw(strength.contrast)),
        gamma=math.exp(draw(strength.gamma)),
        noise=abs(draw(strength.noise)),
        noise_seed=int(generator.integers(2**62)),
    )


def draw_changes(seed: int, epoch: int, keys: list[int]) -> list[Change]:
    """The change of each image of a batch, by the images' numbers."""
    return [draw_change(seed, epoch, key) for key in keys]


# --- where things move ------------------------------------------------------------------------------------------------


def source_row(change: Change) -> list[float]:
    """[a, b, c, d, e, f]: what is at (x, y) afterwards was at (a x + b y + c, d x + e y + f); -1 to 1 edge to edge."""
    cosine = math.cos(change.angle) / change.scale
    sine = math.sin(change.angle) / change.scale
    x = 2 * change.shift_x
    y = 2 * change.shift_y
    before_x = cosine * x + sine * y
    before_y = cosine * y - sine * x
    return [
        cosine,
        sine,
        -before_x,
        -sine,
        cosine,
        -before_y,
    ]


def sampling_grid(side: int, changes: list[Change], device: torch.device) -> Tensor:
    """(B, side, side, 2): from where in a square image each pixel is taken, as grid_sample wants it.

    Added up by elements: a matrix product may be rounded to 10 bits on a GPU.
    """
    rows = [source_row(change) for change in changes]
    table = on_device(torch.tensor(rows), device)
    table = table.view(-1, 6, 1, 1)
    a, b, c, d, e, f = table.unbind(1)

    # the middles of the pixels
    numbers = torch.arange(side, device=device)
    x = (2 * numbers + 1) / side - 1
    y = x[:, None]
    from_x = a * x + b * y + c
    from_y = d * x + e * y + f
    return torch.stack([from_x, from_y], dim=-1)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for it."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


# --- a batch ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def change_images(images: Tensor, changes: list[Change]) -> Tensor:
    """(B, C, S, S) uint8 images, each moved and then changed in its intensity; uint8 on the same device.

    What comes in from beyond the border is black, as padding is, and changes its intensity as padding does.
    """
    device = images.device
    side = images.shape[-1]
    grid = sampling_grid(side, changes, device)
    pixels = F.grid_sample(images / 255, grid, align_corners=False)

    # (((p ** gamma) - 1/2) contrast + 1/2) brightness + noise, in place
    rows = [intensity_row(change) for change in changes]
    table = on_device(torch.tensor(rows), device)
    table = table.view(-1, 4, 1, 1, 1)
    gamma, gain, offset, noise = table.unbind(1)
    pixels.clamp_(0, 1)
    pixels.pow_(gamma)
    pixels.mul_(gain)
    pixels.add_(offset)

    grain = draw_grain(side, changes, device)
    pixels.addcmul_(noise, grain)
    pixels.clamp_(0, 1)
    pixels.mul_(255)
    pixels.round_()
    return pixels.to(torch.uint8)


def intensity_row(change: Change) -> list[float]:
    """[gamma, gain, offset, noise] of a change."""
    gain = change.contrast * change.brightness
    offset = (change.brightness - gain) / 2
    return [
        change.gamma,
        gain,
        offset,
        change.noise,
    ]


def draw_grain(side: int, changes: list[Change], device: torch.device) -> Tensor:
    """(B, 1, side, side) Gaussian noise, each image's by its seed and of the same pattern in every size."""
    grains = []
    for change in changes:
        generator = np.random.default_rng(change.noise_seed)
        grain = generator.standard_normal((1, GRAIN, GRAIN), np.float32)
        grains.append(torch.from_numpy(grain))
    noise = torch.stack(grains)
    noise = on_device(noise, device)
    return F.interpolate(noise, (side, side), mode="bilinear", align_corners=False)
