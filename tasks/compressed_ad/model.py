"""CompressedAD's model: a transformer that reads an agent's own past and predicts its next action.

Algorithm Distillation (Laskin et al. 2022): one token per transition (s, a, r, s'), a query for the state to act in.
CompressedAD: an encoder turns a full context and the latents before it into new latents, so the past has no end.
Training and acting go through the same embedding, `compress`, `decode` and mask, so they cannot differ.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tasks.compressed_ad.darkroom import ACTIONS, CELLS, GRID


class Layer(nn.Module):
    """Pre-norm transformer layer: x attends to `memory`, to what is in `past`, and to itself, as `mask` allows."""

    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.norm_mlp = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden),
            nn.GELU(),
            nn.Linear(hidden, dim),
        )

    def forward(self, x: Tensor, memory=None, mask=None, past=None) -> tuple[Tensor, Tensor]:
        """x (B, N, D) -> the same, and the keys and values of x, (2, B, heads, N, D / heads).

        memory (B, M, D): tokens before x. past (2, B, heads, P, D / heads): keys and values of tokens before x.
        mask (..., N, P + M + N): True where a row may look.
        """
        normed = self.norm(x)
        source = normed
        if memory is not None:
            memory = self.norm(memory)
            source = torch.cat([memory, normed], 1)

        # attention, also to the keys and values of the past
        queries = self.query(normed)
        queries = self._split_heads(queries)
        keys_values = self.key_value(source)
        keys, values = keys_values.chunk(2, -1)
        keys = self._split_heads(keys)
        values = self._split_heads(values)
        own = torch.stack([keys, values])
        seen = own
        if past is not None:
            seen = torch.cat([past, own], 3)
        keys, values = seen
        attended = F.scaled_dot_product_attention(queries, keys, values, mask)
        attended = attended.transpose(1, 2).flatten(2)

        x = x + self.out(attended)
        x = x + self.mlp(self.norm_mlp(x))
        return x, own

    def _split_heads(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, heads, N, D / heads)."""
        x = x.unflatten(-1, (self.heads, -1))
        return x.transpose(1, 2)


class InContextNet(nn.Module):
    """`n_latent` 0 is plain Algorithm Distillation: no encoder, and what leaves the context is forgotten."""

    def __init__(
        self,
        dim: int,
        layers: int,
        heads: int,
        hidden: int,
        n_transit: int,
        n_latent: int,
        encoder_layers: int = 3,
    ):
        super().__init__()
        self.n_transit = n_transit
        self.n_latent = n_latent
        self.heads = heads

        # a transition is two places, an action and a reward
        facts = 2 + ACTIONS + 1 + 2
        self.embed = nn.Sequential(
            nn.Linear(facts, dim),
            nn.LayerNorm(dim),
        )
        self.embed_query = nn.Embedding(CELLS, dim)

        # the decoder, and the encoder that compresses
        positions = torch.randn(n_transit, dim) * 0.02
        self.positions = nn.Parameter(positions)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))
        self.head = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, ACTIONS),
        )
        if n_latent:
            latents = torch.randn(n_latent, dim) * 0.02
            self.latents = nn.Parameter(latents)
            self.encoder = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(encoder_layers))
            self.encoder_norm = nn.LayerNorm(dim)

    def compile_layers(self) -> None:
        """Layer by layer, as the samples that have a first, second ... block differ in number at each step."""
        for layer in self.modules():
            if isinstance(layer, Layer):
                layer.compile(dynamic=True)

    def tokens(self, cells: Tensor, rewards: Tensor, first: int = 0) -> Tensor:
        """Transitions (B, N, 3) of (cell, action, next cell) and rewards (B, N) -> (B, N, D), at positions first ..."""
        dtype = rewards.dtype
        cell, action, next_cell = cells.long().unbind(-1)
        facts = [
            coordinates(cell, dtype),
            F.one_hot(action, ACTIONS).to(dtype),
            rewards[..., None],
            coordinates(next_cell, dtype),
        ]
        embedded = self.embed(torch.cat(facts, -1))
        return embedded + self._positions_of(cells, first)

    def _positions_of(self, cells: Tensor, first: int) -> Tensor:
        """The positions (N, D) of what stands at the places first ... of the context."""
        last = first + cells.shape[1]
        return self.positions[first:last]

    def queries(self, cells: Tensor, first: int = 0) -> Tensor:
        """Cells to act in, (B, N) -> (B, N, D); each takes the position that its transition will take."""
        embedded = self.embed_query(cells.long())
        return embedded + self._positions_of(cells, first)

    def compress(self, latents: Tensor | None, tokens: Tensor) -> Tensor:
        """Old latents (B, n_latent, D), none the first time, and a full context (B, n_transit, D) -> new latents."""
        memory = tokens
        if latents is not None:
            memory = torch.cat([latents, tokens], 1)
        size = len(tokens)
        x = self.latents.expand(size, -1, -1)
        for layer in self.encoder:
            x, _ = layer(x, memory=memory)
        return self.encoder_norm(x)

    def decode(
        self,
        x: Tensor,
        mask: Tensor | None,
        past: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """(B, N, D) through the decoder -> the same, and each layer's keys and values of x.

        past: each layer's keys and values of what came before x.
        """
        kept = []
        for number, layer in enumerate(self.layers):
            before = past[number] if past else None
            x, own = layer(x, mask=mask, past=before)
            kept.append(own)
        return x, kept

    def forward(self, batch: dict) -> Tensor:
        """Logits (B, n_transit, ACTIONS) of the action at every place of the context, given what came before it.

        batch: `cells` (B, depth + 1, n_transit, 3) and `rewards` (B, depth + 1, n_transit): blocks to compress, from
        the oldest on, and last the context; `depth` (B,) how many blocks a sample has, the deepest samples first;
        `compressed`: list of how many samples have a first, second ... block; `length` (B,) of the context.
        """
        cells = batch["cells"]
        rewards = batch["rewards"].to(self.positions.dtype)
        context_cells = cells[:, -1]
        context = self.tokens(context_cells, rewards[:, -1])
        queries = self.queries(context_cells[..., 0])
        parts = [context, queries]
        has_past = None

        # latents come first, zero where a sample has no past
        if self.n_latent:
            latents = self._compress_blocks(cells, rewards, batch["compressed"])
            without = len(cells) - len(latents)
            latents = F.pad(latents, (0, 0, 0, 0, 0, without))
            parts.insert(0, latents.to(context.dtype))
            has_past = batch["depth"] > 0

        mask = visible(
            has_past=has_past,
            n_latent=self.n_latent,
            length=batch["length"],
            n_transit=self.n_transit,
        )
        x = torch.cat(parts, 1)
        x, _ = self.decode(x, mask)
        return self.head(x[:, -self.n_transit :])

    def _compress_blocks(self, cells: Tensor, rewards: Tensor, compressed: list[int]) -> Tensor:
        """The latents of the first samples, as many as have a block, and at least of one.

        DDP wants a gradient, if of zeros, for the encoder also where no sample of a rank has a block.
        """
        first, *later = compressed or [0]
        first = max(1, first)
        tokens = self.tokens(cells[:first, 0], rewards[:first, 0])
        latents = self.compress(None, tokens)
        for block, count in enumerate(later, start=1):
            if count == 0:
                break

            # samples without this block keep the latents that they have
            tokens = self.tokens(cells[:count, block], rewards[:count, block])
            new = self.compress(latents[:count], tokens)
            latents = torch.cat([new, latents[count:]])
        return latents


def coordinates(cells: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., 2): row and column of cells (...), from -1 to 1."""
    rows = cells // GRID
    columns = cells % GRID
    places = torch.stack([rows, columns], -1)
    return places.to(dtype) / (GRID // 2) - 1


def visible(has_past: Tensor | None, n_latent: int, length: Tensor, n_transit: int) -> Tensor:
    """(B, 1, N, N), True where a row of [latents | context | queries] may look.

    Latents look at all latents, the context at latents and what is not later, a query at latents, the context before
    it and itself. Padding (latents of a sample without a past, context from `length` on) is seen by nobody but itself:
    a row needs something to see.
    """
    size = n_latent + 2 * n_transit
    index = torch.arange(size, device=length.device)
    is_latent = index < n_latent
    is_query = index >= n_latent + n_transit
    is_context = ~(is_latent | is_query)

    # which context a row may see, by the places of both in it
    column = (index - n_latent) % n_transit
    row = column[:, None]
    for_context = is_context[:, None] & (column <= row)
    for_query = is_query[:, None] & (column < row)
    of_context = is_context & (for_context | for_query)
    seen = is_latent | of_context

    # what a sample has, (B, 1, N)
    real = is_context & (column < length[:, None, None])
    if has_past is not None:
        real = real | (is_latent & has_past[:, None, None])
    itself = index == index[:, None]
    mask = (seen & real) | itself
    return mask[:, None]
