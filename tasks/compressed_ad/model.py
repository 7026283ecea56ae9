"""Guide 4's net: a transformer that reads an agent's own past and predicts its next action; old past is compressed.

Algorithm Distillation (Laskin et al. 2022): one token per transition (s, a, r, s'), a query for the state to act in.
CompressedAD: an encoder turns a full context and the latents before it into new latents, so the past has no end.
Training and acting go through the same embedding, `compress`, `decode` and `visible`, so they cannot differ.
"""

import torch
from torch import nn
from torch.nn import functional as F

GRID, ACTIONS = 9, 5  # Darkroom: 9 x 9 cells, row-major; +x, -x, +y, -y, stay


class Layer(nn.Module):
    """Pre-norm transformer layer: x attends to `memory`, to what is in `past`, and to itself, as `mask` allows."""

    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key_value, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: torch.Tensor, memory=None, mask=None, past=None) -> tuple[torch.Tensor, torch.Tensor]:
        """x (B, N, D) -> the same, and the keys and values of x, (2, B, heads, N, D / heads).

        memory (B, M, D): tokens before x. past (2, B, heads, P, D / heads): keys and values of tokens before x.
        mask (..., N, P + M + N): True where a row may look.
        """
        normed = self.norm(x)
        source = normed if memory is None else torch.cat([self.norm(memory), normed], 1)
        queries = self._split(self.query(normed))
        own = torch.stack([self._split(part) for part in self.key_value(source).chunk(2, -1)])
        keys, values = own if past is None else torch.cat([past, own], 3)
        found = F.scaled_dot_product_attention(queries, keys, values, mask)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x)), own

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class InContextNet(nn.Module):
    """`n_latent` 0 is plain Algorithm Distillation: no encoder, and what leaves the context is forgotten."""

    def __init__(self, dim: int, layers: int, heads: int, hidden: int, n_transit: int, n_latent: int, encoder: int = 3):
        super().__init__()
        self.n_transit, self.n_latent, self.heads = n_transit, n_latent, heads
        self.embed = nn.Sequential(nn.Linear(2 * 2 + ACTIONS + 1, dim), nn.LayerNorm(dim))
        self.embed_query = nn.Embedding(GRID * GRID, dim)
        self.positions = nn.Parameter(torch.randn(n_transit, dim) * 0.02)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, ACTIONS))
        if n_latent:
            self.latents = nn.Parameter(torch.randn(n_latent, dim) * 0.02)
            self.encoder = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(encoder))
            self.encoder_norm = nn.LayerNorm(dim)

    def tokens(self, cells: torch.Tensor, rewards: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Transitions (B, N, 3) of (cell, action, next cell) and rewards (B, N) -> (B, N, D), at positions first ..."""
        before, action, after = cells.long().unbind(-1)
        places = [(cell // GRID, cell % GRID) for cell in (before, after)]
        (i, j), (k, l) = ((axis.to(rewards.dtype) / (GRID // 2) - 1 for axis in place) for place in places)  # noqa: E741
        onehot = F.one_hot(action, ACTIONS).to(rewards.dtype)
        facts = torch.cat([torch.stack([i, j], -1), onehot, rewards[..., None], torch.stack([k, l], -1)], -1)
        return self.embed(facts) + self.positions[first : first + cells.shape[1]]

    def queries(self, cells: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Cells to act in, (B, N) -> (B, N, D); each takes the position that its transition will take."""
        return self.embed_query(cells.long()) + self.positions[first : first + cells.shape[1]]

    def compress(self, latents: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """Old latents (B, n_latent, D), none the first time, and a full context (B, n_transit, D) -> new latents."""
        memory = tokens if latents is None else torch.cat([latents, tokens], 1)
        x = self.latents.expand(len(tokens), -1, -1)
        for layer in self.encoder:
            x, _ = layer(x, memory=memory)
        return self.encoder_norm(x)

    def decode(self, x: torch.Tensor, mask: torch.Tensor | None, past: list | None = None) -> tuple[torch.Tensor, list]:
        """(B, N, D) through the decoder -> the same, and each layer's keys and values of x. past: those of each layer
        for what came before x."""
        kept = []
        for i, layer in enumerate(self.layers):
            x, own = layer(x, mask=mask, past=past[i] if past else None)
            kept.append(own)
        return x, kept

    def forward(self, batch: dict) -> torch.Tensor:
        """Logits (B, n_transit, ACTIONS) of the action at every place of the context, given what came before it.

        batch: `cells` (B, depth + 1, n_transit, 3) and `rewards` (B, depth + 1, n_transit): blocks to compress, from
        the oldest on, and last the context; `depth` (B,) how many blocks a sample has, the deepest samples first;
        `compressed`: list of how many samples have a first, second ... block; `length` (B,) of the context.
        """
        cells, rewards = batch["cells"], batch["rewards"].to(self.positions.dtype)
        size = len(cells)
        x = [self.tokens(cells[:, -1], rewards[:, -1]), self.queries(cells[:, -1, :, 0])]
        if self.n_latent:
            latents = None
            # DDP wants a gradient, if of zeros, for the encoder also where no sample of a rank has a block
            counts = batch["compressed"] or [0]
            for block, count in enumerate([max(1, counts[0]), *counts[1:]]):
                if count == 0:
                    break
                old = None if latents is None else latents[:count]
                new = self.compress(old, self.tokens(cells[:count, block], rewards[:count, block]))
                latents = new if latents is None else torch.cat([new, latents[count:]])
            empty = latents.new_zeros(size - len(latents), *latents.shape[1:])
            x = [torch.cat([latents, empty]).to(x[0].dtype), *x]
        has_past = batch["depth"] > 0 if self.n_latent else None
        mask = visible(has_past, self.n_latent, batch["length"], self.n_transit)
        x, _ = self.decode(torch.cat(x, 1), mask)
        return self.head(x[:, -self.n_transit :])


def visible(has_past: torch.Tensor | None, n_latent: int, length: torch.Tensor, n_transit: int) -> torch.Tensor:
    """(B, 1, N, N), True where a row of [latents | context | queries] may look: latents at all latents, context at
    latents and what is not later, query p at latents, the context before p and itself. What is padding (latents of a
    sample without a past, context from `length` on) is seen by nobody, but for itself: a row needs something to see."""
    device, context = length.device, torch.arange(n_transit, device=length.device)
    kind = torch.cat([torch.full((n_latent,), 0, device=device), torch.full((n_transit,), 1, device=device),
                      torch.full((n_transit,), 2, device=device)])  # fmt: skip
    place = torch.cat([torch.zeros(n_latent, dtype=torch.long, device=device), context, context])
    row, column = kind[:, None], kind[None]
    seen = (column == 0) | ((column == 1) & (row == 1) & (place[None] <= place[:, None]))
    seen = seen | ((column == 1) & (row == 2) & (place[None] < place[:, None]))
    real = (column == 1) & (place[None] < length[:, None, None])
    if has_past is not None:
        real = real | ((column == 0) & has_past[:, None, None])
    return ((seen & real) | torch.eye(len(kind), dtype=torch.bool, device=device))[:, None]


class Agents:
    """Agents that act side by side, each by its own past; keys and values of what they have seen are kept.

    In float64 by convention (see train.py), so that who acts beside whom, or where, changes no action.
    """

    def __init__(self, net: InContextNet, count: int, forget: int):
        """forget: how many transitions to drop at once from a full context, for a net that does not compress."""
        self.net, self.count, self.forget = net, count, forget
        self.latents: torch.Tensor | None = None
        self.past: list | None = None
        self.cells: list[torch.Tensor] = []  # the context, each (count, 1, 3)
        self.rewards: list[torch.Tensor] = []
        self.new = 0  # how many of the context are not in `past` yet

    @torch.no_grad()
    def act(self, cells: torch.Tensor) -> torch.Tensor:
        """Logits (count, ACTIONS) for the cells (count,) that the agents are in."""
        net, length = self.net, len(self.cells)
        x = [net.queries(cells[:, None], length)]
        if self.new:
            seen, rewards = torch.cat(self.cells[-self.new :], 1), torch.cat(self.rewards[-self.new :], 1)
            x.insert(0, net.tokens(seen, rewards, length - self.new))
        rows = self.new + 1
        kept = self.past[0].shape[3] if self.past else 0
        mask = torch.ones(rows, kept + rows, dtype=torch.bool, device=cells.device).tril(kept)
        out, own = net.decode(torch.cat(x, 1), mask, self.past)
        if self.new:
            own = [part[:, :, :, :-1] for part in own]  # not the query's
            self.past = own if self.past is None else [torch.cat(pair, 3) for pair in zip(self.past, own, strict=True)]
            self.new = 0
        return net.head(out[:, -1])

    @torch.no_grad()
    def observe(self, cells: torch.Tensor, rewards: torch.Tensor) -> None:
        """Take in the transitions (count, 3) of (cell, action, next cell) and rewards (count,) that followed."""
        net = self.net
        self.cells.append(cells[:, None])
        self.rewards.append(rewards[:, None].to(net.positions.dtype))
        self.new += 1
        if len(self.cells) < net.n_transit:
            return
        if net.n_latent:
            self.latents = net.compress(self.latents, net.tokens(torch.cat(self.cells, 1), torch.cat(self.rewards, 1)))
            _, self.past = net.decode(self.latents, None)
            self.cells, self.rewards = [], []
        else:  # every position changes: encoded anew at the next act()
            self.past, self.cells, self.rewards = None, self.cells[self.forget :], self.rewards[self.forget :]
        self.new = len(self.cells)
