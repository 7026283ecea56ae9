"""The model of guide 3's cascade: X-ray encoder, transformer blocks, and the model of a stage around them."""

import copy
import math
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn, randn
from torch.nn import GELU, Conv2d, Conv3d, ConvTranspose3d, LayerNorm, Linear
from torch.nn import ModuleList, Parameter, Sequential, SiLU
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from old.fixed_order_utils import adaptive_avg_pool2d
from old.hardware_utils import GroupNorm
from tasks.cascade.projector import lift
from tasks.cascade.stages import halvings
from tasks.cascade.views import View


class XraySettings(NamedTuple):
    """What the models of all stages know of the X-rays: the views, their side in pixels, the encoder's channels."""

    views: tuple[View, ...]
    img_size: int
    encoder_dim: int


def seed_weights(seed: int, k: int) -> None:
    """Seed torch's generators for the weights of stage k, the same on every rank."""
    number = seed * 1000003 + k
    # torch takes 64 bits
    if not -(2**63) <= number < 2**64:
        number %= 2**63
    torch.manual_seed(number)


def norm(channels: int) -> GroupNorm:
    """A GroupNorm of at most 8 groups, of at least 4 channels each where there are as many."""
    groups = max(1, min(8, channels // 4))
    return GroupNorm(math.gcd(channels, groups), channels)


def zeroed(layer: nn.Module) -> nn.Module:
    """The layer with weights and bias of 0, so that a model begins without what it adds."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def same_size_conv(channels_in: int, channels_out: int) -> Conv3d:
    """A 3^3 convolution that keeps the grid."""
    return Conv3d(channels_in, channels_out, 3, 1, 1)


def embedding_mlp(dim: int) -> Sequential:
    """What makes a condition of a sinusoid."""
    return Sequential(
        Linear(dim, dim),
        SiLU(),
        Linear(dim, dim),
    )


def sinusoid(values: Tensor, dim: int) -> Tensor:
    """(B,) in 0..1 -> (B, dim) sines and cosines (Vaswani et al. 2017, of 1000 * value)."""
    half = dim // 2
    places = torch.arange(half, device=values.device)
    frequencies = torch.exp(places * (-math.log(10000.0) / half))
    values = 1000.0 * values.float()
    angles = values[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1)


def tokens_of(grid: Tensor) -> Tensor:
    """(B, channels, *grid) -> (B, N, channels)."""
    return grid.flatten(2).transpose(1, 2)


class XrayEncoder(nn.Module):
    """X-rays (B, views, H, W) -> features (B, views, dim, H/8, W/8).

    The weights are shared between the views, which differ by an embedding.
    """

    def __init__(
        self,
        views: int,
        dim: int,
    ):
        super().__init__()
        # each layer but the last halves the sides
        layers: list[nn.Module] = []
        before = 1
        for channels in (dim // 8, dim // 4, dim):
            layers.append(Conv2d(before, channels, 3, 2, 1))
            layers.append(norm(channels))
            layers.append(SiLU())
            before = channels
        layers.append(Conv2d(dim, dim, 3, 1, 1))
        layers.append(norm(dim))
        layers.append(SiLU())

        self.layers = Sequential(*layers)
        self.view = Parameter(0.02 * randn(views, dim))

    def forward(self, xrays: Tensor) -> Tensor:
        batch, views = xrays.shape[:2]
        images = xrays.flatten(0, 1)[:, None]
        images = images.contiguous(memory_format=torch.channels_last)
        features = self.layers(images).unflatten(0, (batch, views))
        return features + self.view[:, :, None, None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
) -> Tensor:
    """(B, N, dim) x (B, M, dim) -> (B, N, dim)."""

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    out = F.scaled_dot_product_attention(split(q), split(k), split(v))
    return out.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Self-attention, cross-attention to the X-ray tokens, MLP; each with AdaLN-Zero (Peebles & Xie 2023).

    Shift, scale and gate of each come from the condition, and at the start each gate is 0.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
    ):
        super().__init__()
        self.heads = heads
        self.norms = ModuleList(LayerNorm(dim, elementwise_affine=False) for _ in range(3))
        self.modulation = zeroed(Linear(dim, 9 * dim))

        # self-attention, then cross-attention, then the MLP
        self.qkv = Linear(dim, 3 * dim)
        self.out = Linear(dim, dim)
        self.q = Linear(dim, dim)
        self.kv = Linear(dim, 2 * dim)
        self.cross_out = Linear(dim, dim)
        self.mlp = Sequential(
            Linear(dim, 4 * dim),
            GELU(approximate="tanh"),
            Linear(4 * dim, dim),
        )

    def forward(
        self,
        x: Tensor,
        xray_tokens: Tensor,
        condition: Tensor,
    ) -> Tensor:
        modulation = self.modulation(F.silu(condition))[:, None]
        modulation = modulation.chunk(9, -1)
        shifts = modulation[0::3]
        scales = modulation[1::3]
        gates = modulation[2::3]

        def adapted(part: int) -> Tensor:
            return self.norms[part](x) * (1 + scales[part]) + shifts[part]

        q, k, v = self.qkv(adapted(0)).chunk(3, -1)
        attended = attention(q, k, v, self.heads)
        x = x + gates[0] * self.out(attended)

        # what the tokens are of the X-rays
        q = self.q(adapted(1))
        k, v = self.kv(xray_tokens).chunk(2, -1)
        attended = attention(q, k, v, self.heads)
        x = x + gates[1] * self.cross_out(attended)
        return x + gates[2] * self.mlp(adapted(2))


class ConvBlock(nn.Module):
    """Two 3^3 convolutions with a shortcut; the condition shifts and scales between them."""

    def __init__(
        self,
        channels: int,
        condition: int,
    ):
        super().__init__()
        self.norm1 = norm(channels)
        self.conv1 = same_size_conv(channels, channels)
        self.norm2 = norm(channels)
        self.conv2 = zeroed(same_size_conv(channels, channels))
        self.modulation = Linear(condition, 2 * channels)

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
    ) -> Tensor:
        modulation = self.modulation(F.silu(condition))[:, :, None, None, None]
        shift, scale = modulation.chunk(2, 1)
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.norm2(hidden) * (1 + scale) + shift
        return x + self.conv2(F.silu(hidden))


class StageNet(nn.Module):
    """One stage: noisy residual, X-rays and what the stage starts from -> v, at full resolution.

    A convolutional stem with skips around the transformer: tokens alone cannot represent the noise that the model must
    predict. Each view enters twice, lifted along its own rays: as an image beside the noisy volume, and as encoder
    features on the tokens. stage: its entry of --stage_configs. checkpointing: activations are recomputed in the
    backward pass.
    """

    def __init__(
        self,
        stage: dict,
        xray: XraySettings,
    ):
        super().__init__()
        self.size = tuple(stage["volume_size"])
        self.views = xray.views
        self.checkpointing = False
        dim = stage["voxel_dim"]
        # how often the grid is halved before the transformer
        times = halvings(self.size, stage["token_grid"])
        narrowest = max(8, dim // 32)
        widths = [min(dim, narrowest * 2**k) for k in range(times + 1)]
        pairs = list(pairwise(widths))
        self.grid = tuple(n // 2**times for n in self.size)

        # the condition: X-rays, time, and how noisy is what the stage starts from
        self.encoder = XrayEncoder(len(xray.views), xray.encoder_dim)
        self.token_grid = min(16, xray.img_size // 8)
        self.picture_position = Parameter(0.02 * randn(1, self.token_grid**2, dim))
        self.to_tokens = Linear(xray.encoder_dim, dim)
        self.time = embedding_mlp(dim)
        self.noise = embedding_mlp(dim)
        self.whole_picture = Linear(dim, dim)

        # down to the tokens
        channels = 2 + len(xray.views)
        self.stem = same_size_conv(channels, widths[0])
        self.down_blocks = ModuleList(ConvBlock(width, dim) for width in widths[1:-1])
        self.shrink = ModuleList(Conv3d(wide, deep, 2, 2) for wide, deep in pairs)
        self.enter = Linear(widths[-1], dim)
        places = math.prod(self.grid)
        self.position = Parameter(0.02 * randn(1, places, dim))

        # the transformer, and up again
        blocks = [Block(dim, stage["num_heads"]) for _ in range(stage["vit_depth"])]
        self.blocks = ModuleList(blocks)
        self.leave = Linear(dim, widths[-1])
        self.grow = ModuleList(ConvTranspose3d(deep, wide, 2, 2) for wide, deep in pairs)
        self.up_blocks = ModuleList(ConvBlock(width, dim) for width in widths[:-1])
        self.last = Sequential(
            norm(widths[0]),
            SiLU(),
            zeroed(same_size_conv(widths[0], 1)),
        )
        for module in self.modules():
            if isinstance(module, Conv3d | ConvTranspose3d):
                module.to(memory_format=torch.channels_last_3d)

    def part(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        """module(*inputs), its activations kept or computed again in the backward pass."""
        call = module
        if self.checkpointing and torch.is_grad_enabled():
            call = partial(checkpoint, module, use_reentrant=False, preserve_rng_state=False)
        return call(*inputs)

    def encode(self, xrays: Tensor) -> tuple[Tensor, Tensor]:
        """(features (B, views, encoder_dim, H/8, W/8), tokens (B, views * token_grid^2, dim)) of the X-rays."""
        features = self.part(self.encoder, xrays)
        pooled = adaptive_avg_pool2d(features.flatten(0, 1), self.token_grid)
        tokens = self.to_tokens(tokens_of(pooled)) + self.picture_position
        tokens = tokens.unflatten(0, features.shape[:2])
        return features, tokens.flatten(1, 2)

    def lifted(
        self,
        images: Tensor,
        size: tuple[int, int, int],
        extent: Tensor,
    ) -> list[Tensor]:
        """Each view's (B, channels, H, W) of (B, views, channels, H, W), lifted along its rays into a grid."""
        return [lift(images[:, k], view, size, extent) for k, view in enumerate(self.views)]

    def forward(
        self,
        noisy: Tensor,
        time: Tensor,
        xrays: Tensor,
        start: Tensor,
        level: Tensor,
        extent: Tensor,
    ) -> Tensor:
        """noisy (B, 1, X, Y, Z); time (B,) in 0..1; xrays (B, views, H, W) in -1..1.

        start (B, 1, X, Y, Z): what the stage starts from, with noise of the level (B,). extent (B, 3): mm of the field
        of view.
        """
        features, tokens = self.encode(xrays)
        width = self.position.shape[-1]
        condition = self.time(sinusoid(time, width))
        condition = condition + self.whole_picture(tokens.mean(1))
        condition = condition + self.noise(sinusoid(level, width))
        images = xrays[:, :, None]
        inputs = [noisy, start, *self.lifted(images, self.size, extent)]

        # down; at full resolution, where memory and time go, only the decoder has a block
        x = torch.cat(inputs, 1)
        x = self.stem(x.contiguous(memory_format=torch.channels_last_3d))
        skips = [x]
        for k, shrink in enumerate(self.shrink):
            x = shrink(x)
            if k < len(self.down_blocks):
                x = self.part(self.down_blocks[k], x, condition)
                skips.append(x)

        # the transformer: tokens of the volume, of the X-rays' features at their place, and of the place itself
        lifted = self.lifted(features, self.grid, extent)
        lifted = sum(lifted) / len(lifted)
        x = self.enter(tokens_of(x))
        x = x + self.to_tokens(tokens_of(lifted)) + self.position
        for block in self.blocks:
            x = self.part(block, x, tokens, condition)
        x = self.leave(x).transpose(1, 2)
        x = x.unflatten(2, self.grid)

        # up, with what was skipped
        deepest_first = zip(reversed(self.grow), reversed(self.up_blocks), strict=True)
        for grow, block in deepest_first:
            x = grow(x) + skips.pop()
            x = self.part(block, x, condition)
        return self.last(x).float()


class Ema:
    """Averaged weights in a model of their own; the decay grows with the steps, min(decay, (1 + n) / (10 + n))."""

    def __init__(
        self,
        model: StageNet,
        decay: float,
    ):
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.model.checkpointing = False
        self.decay = decay

    @torch.no_grad()
    def update(
        self,
        model: StageNet,
        steps: int,
    ) -> None:
        """Move towards the weights after so many steps."""
        decay = min(self.decay, (1 + steps) / (10 + steps))
        averaged = list(self.model.parameters())
        torch._foreach_lerp_(averaged, list(model.parameters()), 1 - decay)
