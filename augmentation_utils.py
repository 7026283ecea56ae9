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

    def in_place(self) -> "Change":
        """The same change of intensity, and no other."""
        return self._replace(shift_x=0.0, shift_y=0.0, scale=1.0, angle=0.0)


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


def move_points(points: np.ndarray, change: Change) -> np.ndarray:
    """(N, 2) points (x, y) of a square image -> (N, 2) where they are afterwards; 0 to 1 from edge to edge, float64."""
    cosine = change.scale * math.cos(change.angle)
    sine = change.scale * math.sin(change.angle)
    turn = np.array([[cosine, -sine], [sine, cosine]])
    shift = [change.shift_x, change.shift_y]
    return (points - 0.5) @ turn.T + 0.5 + shift


def source_row(change: Change) -> list[float]:
    """[a, b, c, d, e, f]: what is at (x, y) afterwards was at (a x + b y + c, d x + e y + f); -1 to 1 edge to edge."""
    cosine = math.cos(change.angle) / change.scale
    sine = math.sin(change.angle) / change.scale
    x = 2 * change.shift_x
    y = 2 * change.shift_y
    return [
        cosine,
        sine,
        -cosine * x - sine * y,
        -sine,
        cosine,
        sine * x - cosine * y,
    ]


def sampling_grid(side: int, changes: list[Change], device: torch.device) -> Tensor:
    """(B, side, side, 2): from where in a square image each pixel is taken, as grid_sample wants it.

    Added up by elements: a matrix product may be rounded to 10 bits on a GPU.
    """
    rows = [source_row(change) for change in changes]
    table = on_device(torch.tensor(rows), device)
    a, b, c, d, e, f = table.view(-1, 6, 1, 1).unbind(1)
    centers = torch.arange(side, device=device)
    x = (2 * centers + 1) / side - 1
    y = x[:, None]
    return torch.stack([a * x + b * y + c, d * x + e * y + f], dim=-1)


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

    # (((p ** gamma) - 1/2) contrast + 1/2) brightness + noise, the factors in one place
    gains = [change.contrast * change.brightness for change in changes]
    offsets = [(1 - change.contrast) * change.brightness / 2 for change in changes]
    gammas = [change.gamma for change in changes]
    levels = [change.noise for change in changes]
    factors = torch.tensor([gammas, gains, offsets, levels])
    gamma, gain, offset, level = on_device(factors, device).view(4, -1, 1, 1, 1)
    pixels = pixels.clamp_(0, 1).pow_(gamma).mul_(gain).add_(offset)
    pixels = pixels.addcmul_(level, draw_grain(side, changes, device))
    return pixels.clamp_(0, 1).mul_(255).round_().to(torch.uint8)


def draw_grain(side: int, changes: list[Change], device: torch.device) -> Tensor:
    """(B, 1, side, side) Gaussian noise, each image's by its seed and of the same pattern in every size."""
    grains = []
    for change in changes:
        generator = np.random.default_rng(change.noise_seed)
        grains.append(generator.standard_normal((1, GRAIN, GRAIN), np.float32))
    noise = on_device(torch.from_numpy(np.stack(grains)), device)
    return F.interpolate(noise, (side, side), mode="bilinear", align_corners=False)


@torch.no_grad()
def move_masks(masks: Tensor, changes: list[Change]) -> Tensor:
    """(B, S, S) bool masks, each moved as its image is; bool on the same device, False beyond the border."""
    grid = sampling_grid(masks.shape[-1], changes, masks.device)
    values = masks[:, None].float()
    moved = F.grid_sample(values, grid, mode="nearest", align_corners=False)
    return moved[:, 0] > 0.5
