"""The nets of guide 3's cascade: X-ray encoder, transformer blocks, and the stage net around them."""

import math
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fixed_order_utils
from hardware_utils import GroupNorm
from tasks.cascade import projector as drr


def norm(channels: int) -> GroupNorm:
    """A GroupNorm of at most 8 groups, of at least 4 channels each where there are as many."""
    return GroupNorm(math.gcd(channels, max(1, min(8, channels // 4))), channels)


def sinusoid(values: torch.Tensor, dim: int) -> torch.Tensor:
    """(B,) in 0..1 -> (B, dim) sines and cosines (Vaswani et al. 2017, of 1000 * value)."""
    rates = torch.exp(torch.arange(dim // 2, device=values.device) * (-math.log(10000.0) / (dim // 2)))
    angles = 1000.0 * values.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], 1)


class XrayEncoder(nn.Module):
    """X-rays (B, views, H, W) -> features (B, views, dim, H/8, W/8); the weights are shared between the views, which
    differ by an embedding."""

    def __init__(self, views: int, dim: int):
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for channels in (dim // 8, dim // 4, dim):
            layers += [nn.Conv2d(before, channels, 3, 2, 1), norm(channels), nn.SiLU()]
            before = channels
        self.layers = nn.Sequential(*layers, nn.Conv2d(dim, dim, 3, 1, 1), norm(dim), nn.SiLU())
        self.view = nn.Parameter(0.02 * torch.randn(views, dim))

    def forward(self, xrays: torch.Tensor) -> torch.Tensor:
        batch, views = xrays.shape[:2]
        features = self.layers(xrays.flatten(0, 1)[:, None].contiguous(memory_format=torch.channels_last))
        return features.unflatten(0, (batch, views)) + self.view[:, :, None, None]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, N, dim) x (B, M, dim) -> (B, N, dim)."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Self-attention, cross-attention to the X-ray tokens, MLP; each with AdaLN-Zero (Peebles & Xie 2023): shift,
    scale and gate come from the condition, and at the start each gate is 0."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim, elementwise_affine=False) for _ in range(3))
        self.modulation = nn.Linear(dim, 9 * dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q, self.kv, self.cross_out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor, xray_tokens: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shifts = self.modulation(F.silu(condition))[:, None].chunk(9, -1)

        def adapted(k: int) -> torch.Tensor:
            return self.norms[k](x) * (1 + shifts[3 * k + 1]) + shifts[3 * k]

        x = x + shifts[2] * self.out(attention(*self.qkv(adapted(0)).chunk(3, -1), self.heads))
        cross = attention(self.q(adapted(1)), *self.kv(xray_tokens).chunk(2, -1), self.heads)
        x = x + shifts[5] * self.cross_out(cross)
        return x + shifts[8] * self.mlp(adapted(2))


class ConvBlock(nn.Module):
    """Two 3^3 convolutions with a shortcut; the condition shifts and scales between them."""

    def __init__(self, channels: int, condition: int):
        super().__init__()
        self.norm1, self.conv1 = norm(channels), nn.Conv3d(channels, channels, 3, 1, 1)
        self.norm2, self.conv2 = norm(channels), nn.Conv3d(channels, channels, 3, 1, 1)
        self.modulation = nn.Linear(condition, 2 * channels)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale = self.modulation(F.silu(condition))[:, :, None, None, None].chunk(2, 1)
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))


class StageNet(nn.Module):
    """One stage: noisy volume, X-rays and the stage before -> v (or the noise), at full resolution.

    A convolutional stem with skips around the transformer: tokens alone cannot represent the noise that the net must
    predict. Each view enters twice, lifted along its own rays: as a picture beside the noisy volume, and as encoder
    features on the tokens. args: img_size, num_views, encoder_dim, gradient_checkpointing; halvings: how often the
    grid is halved before the transformer.
    """

    def __init__(self, stage: dict, args, first: bool, halvings: int):
        super().__init__()
        self.size, self.views, self.first = tuple(stage["volume_size"]), args.num_views, first
        self.checkpointing = args.gradient_checkpointing
        dim = stage["voxel_dim"]
        widths = [min(dim, max(8, dim // 32) * 2**k) for k in range(halvings + 1)]
        self.grid = tuple(n // 2**halvings for n in self.size)
        self.encoder = XrayEncoder(args.num_views, args.encoder_dim)
        self.picture_grid = min(16, args.img_size // 8)
        self.picture_position = nn.Parameter(0.02 * torch.randn(1, self.picture_grid**2, dim))
        self.to_tokens = nn.Linear(args.encoder_dim, dim)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        if not first:
            self.noise = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.whole_picture = nn.Linear(dim, dim)
        self.stem = nn.Conv3d(1 + (not first) + args.num_views, widths[0], 3, 1, 1)
        self.down_blocks = nn.ModuleList(ConvBlock(w, dim) for w in widths[1:-1])
        self.shrink = nn.ModuleList(nn.Conv3d(a, b, 2, 2) for a, b in pairwise(widths))
        self.enter = nn.Linear(widths[-1], dim)
        self.position = nn.Parameter(0.02 * torch.randn(1, math.prod(self.grid), dim))
        self.blocks = nn.ModuleList(Block(dim, stage["num_heads"]) for _ in range(stage["vit_depth"]))
        self.leave = nn.Linear(dim, widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in pairwise(widths))
        self.up_blocks = nn.ModuleList(ConvBlock(w, dim) for w in widths[:-1])
        self.last = nn.Sequential(norm(widths[0]), nn.SiLU(), nn.Conv3d(widths[0], 1, 3, 1, 1))
        nn.init.zeros_(self.last[2].weight)
        nn.init.zeros_(self.last[2].bias)

    def part(self, module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        """module(*inputs), its activations kept or computed again in the backward pass."""
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False)
        return module(*inputs)

    def forward(
        self, noisy: torch.Tensor, time: torch.Tensor, xrays: torch.Tensor, previous: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """noisy (B, 1, X, Y, Z); time (B,) in 0..1; xrays (B, views, H, W) in -1..1; previous (B, 1, X, Y, Z): the
        volume of the stage before on this stage's grid, with noise of the level `noise` (B,)."""
        features = self.part(self.encoder, xrays)
        pooled = (
            fixed_order_utils.adaptive_avg_pool2d(features.flatten(0, 1), self.picture_grid).flatten(2).transpose(1, 2)
        )
        tokens = (self.to_tokens(pooled) + self.picture_position).unflatten(0, features.shape[:2]).flatten(1, 2)
        width = self.position.shape[-1]
        condition = self.time(sinusoid(time, width)) + self.whole_picture(tokens.mean(1))
        inputs = [noisy]
        if not self.first:
            condition = condition + self.noise(sinusoid(noise, width))
            inputs.append(previous)
        views = drr.VIEWS[: self.views]
        inputs += [drr.lift(xrays[:, k : k + 1], view, self.size) for k, view in enumerate(views)]
        x = self.stem(torch.cat(inputs, 1).contiguous(memory_format=torch.channels_last_3d))
        skips = [x]  # at full resolution, where memory and time go, only the decoder has a block
        for k, shrink in enumerate(self.shrink):
            x = shrink(x)
            if k < len(self.down_blocks):
                x = self.part(self.down_blocks[k], x, condition)
                skips.append(x)
        lifted = sum(drr.lift(features[:, k], view, self.grid) for k, view in enumerate(views)) / self.views
        x = self.enter(x.flatten(2).transpose(1, 2)) + self.to_tokens(lifted.flatten(2).transpose(1, 2)) + self.position
        for block in self.blocks:
            x = self.part(block, x, tokens, condition)
        x = self.leave(x).transpose(1, 2).unflatten(2, self.grid)
        for grow, block in zip(reversed(self.grow), reversed(self.up_blocks), strict=True):
            x = self.part(block, grow(x) + skips.pop(), condition)
        return self.last(x).float()
