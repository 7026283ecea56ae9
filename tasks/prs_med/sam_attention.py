"""SAM's attention without its largest tensors, the relative position biases; results are equal up to rounding.

SAM adds to each attention score one term for the vertical and one for the horizontal distance of query and key. As a
bias these terms take heads x tokens^2 numbers per layer: 3 GiB for 8 images of 1024 x 1024. If h(q) and w(q) are the
terms of query q for each row and column of the grid, the scores are a plain product, which attention kernels never
store:

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
    """Make SAM's own attention look up relative positions by distance_table(), which is deterministic on a CPU.

    The backward pass of SAM's indexing adds up gradients in several threads, in no fixed order.
    """
    for layer in encoder.layers:
        layer.attn.get_rel_pos = lambda queries, _, positions: distance_table(positions, queries).transpose(1, 2)


def folded_attention(attention: nn.Module, hidden_states: Tensor) -> tuple[Tensor, None]:
    """Replacement for SamVisionSdpaAttention.forward: (B, H, W, C) -> ((B, H, W, C), no attention weights)."""
    batch, height, width, _ = hidden_states.shape
    heads = attention.num_attention_heads
    qkv = attention.qkv(hidden_states).reshape(batch, height * width, 3, heads, -1)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)

    # h(q) and w(q): (B, heads, H, W, H) and (B, heads, H, W, W)
    grid = query.unflatten(2, (height, width))
    to_rows = torch.einsum("bnhwc,hck->bnhwk", grid, distance_table(attention.rel_pos_h, height))
    to_columns = torch.einsum("bnhwc,wck->bnhwk", grid, distance_table(attention.rel_pos_w, width))
    query = torch.cat([query * attention.scale, torch.cat([to_rows, to_columns], dim=-1).flatten(2, 3)], dim=-1)

    # one-hot row and column of each key: (H W, H + W)
    rows = torch.eye(height, dtype=key.dtype, device=key.device).unsqueeze(1).expand(-1, width, -1)
    columns = torch.eye(width, dtype=key.dtype, device=key.device).unsqueeze(0).expand(height, -1, -1)
    one_hot = torch.cat([rows, columns], dim=-1).flatten(0, 1)
    key = torch.cat([key, one_hot.expand(batch, heads, -1, -1)], dim=-1)

    # attention kernels want one width for query, key and value, a multiple of 8; for widths of 200 to 224, flash
    # attention has no backward pass on some consumer GPUs (compute capability 8.6, 8.9, 12.0)
    channels, width_now = value.shape[-1], query.shape[-1]
    wide = 232 if 192 < width_now <= 224 else width_now + -width_now % 8
    query, key, value = (F.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, scale=1.0)[..., :channels]
    return attention.proj(out.transpose(1, 2).reshape(batch, height, width, -1)), None


def distance_table(positions: Tensor, size: int) -> Tensor:
    """Table (size queries, C, size keys) of the embeddings of all distances between a query and a key.

    positions: (2 size - 1, C), embeddings of the distances 1 - size ... size - 1; for another image size they are first
    interpolated, as in SAM. Windows over the reversed list need no index tensor and thus no host-device sync.
    """
    if len(positions) != 2 * size - 1:
        # interpolate by a matrix: F.interpolate has no deterministic backward pass on CUDA
        ruler = torch.eye(len(positions), device=positions.device)[None]
        weights = F.interpolate(ruler, 2 * size - 1, mode="linear", align_corners=False)[0]
        positions = weights.T.to(positions.dtype) @ positions
    return positions.flip(0).unfold(0, size, 1).flip(0)
