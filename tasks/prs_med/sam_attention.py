"""SAM's attention without the large tensors of relative position biases; results are equal up to rounding.

SAM adds the bias h(q)[row of k] + w(q)[column of k] to the attention score of query q and key k. A tensor of all biases
takes 3 GiB per global attention layer in bf16, for 8 images of 1024 x 1024 pixels. Here, the query is extended by h(q)
and w(q), and the key by one-hot vectors, so fused attention kernels need no bias tensor:

    q.k / sqrt(d) + h(q)[row of k] + w(q)[column of k] = [q / sqrt(d), h(q), w(q)] . [k, one_hot(row), one_hot(column)]
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def fold_relative_positions(encoder: nn.Module) -> None:
    for layer in encoder.layers:
        if layer.attn.use_rel_pos:
            layer.attn.forward = partial(folded_attention, layer.attn)


def make_relative_positions_deterministic(encoder: nn.Module) -> None:
    """On a CPU, make SAM look up its relative position embeddings with distance_table().

    SAM's own lookup is not deterministic: its backward pass sums gradients in several threads in no fixed order.
    """
    for layer in encoder.layers:
        layer.attn.get_rel_pos = lambda queries, _, positions: distance_table(positions, queries).transpose(1, 2)


def folded_attention(attention: nn.Module, hidden_states: Tensor) -> tuple[Tensor, None]:
    """Drop-in replacement for SamVisionSdpaAttention.forward(). Returns (output (B, H, W, C), None)."""
    batch, height, width, _ = hidden_states.shape
    heads = attention.num_attention_heads
    qkv = attention.qkv(hidden_states).reshape(batch, height * width, 3, heads, -1)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)

    # biases per row of keys, (B, heads, H, W, H), and per column of keys, (B, heads, H, W, W)
    grid = query.unflatten(2, (height, width))
    to_rows = torch.einsum("bnhwc,hck->bnhwk", grid, distance_table(attention.rel_pos_h, height))
    to_columns = torch.einsum("bnhwc,wck->bnhwk", grid, distance_table(attention.rel_pos_w, width))
    query = torch.cat([query * attention.scale, torch.cat([to_rows, to_columns], dim=-1).flatten(2, 3)], dim=-1)

    # one-hot encoding of each key's row and column: (H * W, H + W)
    rows = torch.eye(height, dtype=key.dtype, device=key.device).unsqueeze(1).expand(-1, width, -1)
    columns = torch.eye(width, dtype=key.dtype, device=key.device).unsqueeze(0).expand(height, -1, -1)
    one_hot = torch.cat([rows, columns], dim=-1).flatten(0, 1)
    key = torch.cat([key, one_hot.expand(batch, heads, -1, -1)], dim=-1)

    # attention kernels need query, key and value of equal width, a multiple of 8; at widths of 200 to 224, flash
    # attention has no backward pass on some consumer GPUs (compute capability 8.6, 8.9, 12.0)
    channels, width_now = value.shape[-1], query.shape[-1]
    wide = 232 if 192 < width_now <= 224 else width_now + -width_now % 8
    query, key, value = (F.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, scale=1.0)[..., :channels]
    return attention.proj(out.transpose(1, 2).reshape(batch, height, width, -1)), None


def distance_table(positions: Tensor, size: int) -> Tensor:
    """Return a table (size, C, size): entry [q, :, k] is the embedding of the distance q - k.

    positions: (2 size - 1, C), embeddings of the distances 1 - size to size - 1; other lengths are interpolated.
    """
    if len(positions) != 2 * size - 1:
        # interpolate by matrix multiplication, because F.interpolate has no deterministic backward pass on CUDA
        ruler = torch.eye(len(positions), device=positions.device)[None]
        weights = F.interpolate(ruler, 2 * size - 1, mode="linear", align_corners=False)[0]
        positions = weights.T.to(positions.dtype) @ positions
    return positions.flip(0).unfold(0, size, 1).flip(0)
