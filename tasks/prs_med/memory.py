"""What PRS-Med's two large models do on a GPU to need less memory; the results are the same.

SAM adds to the score of a query and a key one number for their vertical and one for their horizontal distance. As a
bias these take heads x tokens^2 numbers a layer: 3 GiB for 8 images of 1024 x 1024. With h(q) and w(q) for what a query
gives to each row and column of the grid, the same scores are a plain product, which attention kernels never store:

    q.k / sqrt(d) + h(q)[row of k] + w(q)[column of k] = [q / sqrt(d), h(q), w(q)] . [k, one_hot(row), one_hot(column)]

LoRA keeps for each of its 224 layers in a 7B model its own dropped-out copy of the input, and the mask: 18 GiB for 8
images. Most of these layers share their input, so that keeping it and drawing the mask again takes less than half.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from old.fixed_order_utils import interpolate


def recompute_activations(model: nn.Module) -> None:
    """--gradient_checkpointing: both encoders' activations are computed again in the backward pass."""
    options = {"use_reentrant": False}
    for encoder in (model.vlm, model.sam):
        encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


# --- SAM's attention --------------------------------------------------------------------------------------------------


def fold_relative_positions(encoder: nn.Module) -> None:
    """Let each layer of transformers' SamVisionEncoder attend by `folded_attention`; its weights stay as they are."""
    for layer in encoder.layers:
        if layer.attn.use_rel_pos:
            layer.attn.forward = partial(folded_attention, layer.attn)


def folded_attention(
    attention: nn.Module,
    hidden_states: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    """SamVisionSdpaAttention.forward: (B, H, W, C) -> ((B, H, W, C), no attention weights)."""
    batch, height, width, _ = hidden_states.shape
    heads = attention.num_attention_heads
    tokens = height * width
    qkv = attention.qkv(hidden_states)
    qkv = qkv.reshape(batch, tokens, 3, heads, -1)
    qkv = qkv.permute(2, 0, 3, 1, 4)
    query, key, value = qkv.unbind(0)
    channels = query.shape[-1]

    # what each query gives to the rows and columns of keys: (B, heads, H, W, H) and (B, heads, H, W, W)
    grid = query.unflatten(2, (height, width))
    row_table = distance_table(attention.rel_pos_h, height)
    column_table = distance_table(attention.rel_pos_w, width)
    to_rows = torch.einsum("bnhwc,hck->bnhwk", grid, row_table)
    to_columns = torch.einsum("bnhwc,wck->bnhwk", grid, column_table)
    distances = torch.cat([to_rows, to_columns], dim=-1)
    distances = distances.flatten(2, 3)

    # queries and keys with their folded positions; all three as wide as a kernel wants them
    query = query * attention.scale
    query = torch.cat([query, distances], dim=-1)
    places = grid_places(height, width, key)
    places = places.expand(batch, heads, -1, -1)
    key = torch.cat([key, places], dim=-1)
    wide = channels + height + width
    wide += padding_of(wide)
    query = widened(query, wide)
    key = widened(key, wide)
    value = widened(value, wide)

    # back to the channels of the values, the heads side by side
    out = F.scaled_dot_product_attention(query, key, value, scale=1.0)
    out = out[..., :channels]
    out = out.transpose(1, 2)
    out = out.reshape(batch, height, width, -1)
    return attention.proj(out), None


def widened(
    vectors: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """The vectors with zeros behind them, up to a width."""
    padding = width - vectors.shape[-1]
    return F.pad(vectors, (0, padding))


def padding_of(width: int) -> int:
    """Zeros to append to queries, keys and values: kernels take one width for all three, a multiple of 8.

    For 200 to 224 the flash kernel has no gradient on some consumer GPUs (compute capability 8.6, 8.9, 12.0).
    """
    if 192 < width <= 224:
        return 232 - width
    return -width % 8


def distance_table(positions: torch.Tensor, size: int) -> torch.Tensor:
    """(2 size - 1, C) embeddings of the distances 1 - size ... size - 1 -> (size, C, size) of each query and key.

    Embeddings of another image size are first interpolated, as SAM does. Windows over the reversed list: no index
    tensor, for which the host would wait.
    """
    distances = 2 * size - 1
    if len(positions) != distances:
        channels_first = positions.T.unsqueeze(0)
        channels_first = interpolate(channels_first, (distances,))
        positions = channels_first.squeeze(0).T
    backwards = positions.flip(0)
    windows = backwards.unfold(0, size, 1)
    return windows.flip(0)


def use_fixed_order(encoder: nn.Module) -> None:
    """Let SAM's own attention look its relative positions up by windows, without an index.

    The gradient of an index is added up by several CPU threads in varying order.
    """

    def look_up(
        queries: int,
        _: int,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        table = distance_table(positions, queries)
        return table.transpose(1, 2)

    for layer in encoder.layers:
        layer.attn.get_rel_pos = look_up


def grid_places(
    height: int,
    width: int,
    like: torch.Tensor,
) -> torch.Tensor:
    """(H W, H + W): row and column of each place of a grid, one-hot, of the dtype and on the device of `like`."""
    kind = {"dtype": like.dtype, "device": like.device}
    rows = torch.eye(height, **kind)
    rows = rows.unsqueeze(1)
    rows = rows.expand(-1, width, -1)
    columns = torch.eye(width, **kind)
    columns = columns.unsqueeze(0)
    columns = columns.expand(height, -1, -1)
    places = torch.cat([rows, columns], dim=-1)
    return places.flatten(0, 1)


# --- LoRA's dropout ---------------------------------------------------------------------------------------------------


def recompute_lora_dropout(model: nn.Module) -> None:
    """Let each LoRA layer compute its dropout and first matrix again in the backward pass."""
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        for name, dropout in layer.lora_dropout.items():
            if isinstance(dropout, nn.Dropout):
                matrix = layer.lora_A[name]
                matrix.forward = partial(dropped_linear, matrix, dropout.p)
                layer.lora_dropout[name] = nn.Identity()


def dropped_linear(
    linear: nn.Linear,
    probability: float,
    inputs: torch.Tensor,
) -> torch.Tensor:
    """linear(dropout(inputs)), with the same random numbers when it is computed again; (..., in) -> (..., rank)."""

    def compute(inputs: torch.Tensor) -> torch.Tensor:
        dropped = F.dropout(inputs, probability)
        return F.linear(dropped, linear.weight)

    if not linear.training:
        return F.linear(inputs, linear.weight)
    if not torch.is_grad_enabled():
        return compute(inputs)
    return checkpoint(compute, inputs, use_reentrant=False)
