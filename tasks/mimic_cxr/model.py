"""Guide 1's model: an image encoder, a text encoder, layers that bring them together, and a head for each answer."""

import math

import torch
from torch import Tensor, nn

from old.cli_utils import InputError
from old.hardware_utils import autocast, out_of_memory
from tasks.mimic_cxr.answers import CHEXPERT, HEADS
from tasks.mimic_cxr.encoders import Encoders, layers_of, recompute, recomputed, size_options

HEAD_WIDTH = {
    "binary": 256,
    "category": 512,
    "region": 512,
    "severity": 128,
}


def broadcast_mask(mask: Tensor) -> Tensor:
    """(B, T) of 0 and 1 -> (B, 1, T, T) of bool: which tokens each token may attend to, as a view."""
    tokens = mask.shape[1]
    keys = mask[:, None, None].bool()
    return keys.expand(-1, -1, tokens, -1)


@torch.no_grad()
def takes_ready_mask(encoder: nn.Module) -> bool:
    """Whether a text encoder gives the same with broadcast_mask as with the plain mask, tried on padded tokens.

    Of a plain mask transformers asks at each forward pass whether anything is padded, for which the host waits for the
    GPU; a ready one it passes on as it is. BERT, RoBERTa and DistilBERT take it with torch's attention. Encoders with
    another attention, causal ones and some others do not.
    """
    mask = torch.ones(2, 4, dtype=torch.long)
    mask[1, 2:] = 0
    # other ids at each place, none of them usual for padding: what is attended to must show
    ids = torch.arange(4, 12).view(2, 4) % encoder.config.vocab_size

    training = encoder.training
    encoder.eval()
    try:
        plain = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        ready = encoder(input_ids=ids, attention_mask=broadcast_mask(mask)).last_hidden_state
        return torch.equal(plain, ready)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if out_of_memory(error):
            raise
        return False
    finally:
        encoder.train(training)


def grid_positions(
    height: int,
    width: int,
    dim: int,
    device: torch.device,
) -> Tensor:
    """(height * width, dim) sine and cosine positions: convolution features do not say where they are."""
    rows = torch.linspace(-1, 1, height, device=device)
    columns = torch.linspace(-1, 1, width, device=device)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    places = torch.stack([y, x], -1).reshape(-1, 2, 1)

    # of each axis as many waves as the features have room for
    count = math.ceil(dim / 4)
    waves = 2.0 ** torch.arange(count, device=device) % 64 * math.pi / 2
    angles = places * waves
    positions = torch.cat([angles.sin(), angles.cos()], 1)
    positions = positions.flatten(1)
    return positions[:, :dim]


class FusionLayer(nn.Module):
    """The question's tokens attend to the image's (cross-attention, then a feed-forward part), pre-norm."""

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        # 12 heads for 768
        heads = max(1, dim // 64)
        self.norm = nn.LayerNorm(dim)
        self.norm_mlp = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.mlp = make_head(dim, 4 * dim, dim, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        """(B, T, dim), (B, P, dim) -> (B, T, dim)."""
        query = self.norm(text)
        attended, _ = self.attention(query, image, image, need_weights=False)
        text = text + self.dropout(attended)
        inner = self.mlp(self.norm_mlp(text))
        return text + self.dropout(inner)


def make_head(
    dim: int,
    hidden: int,
    classes: int,
    dropout: float,
) -> nn.Module:
    """Features (..., dim) -> (..., classes), by one hidden layer."""
    return nn.Sequential(
        nn.Linear(dim, hidden),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )


class ChestModel(nn.Module):
    """Image encoder, text encoder, fusion, four answer heads; the CheXpert head sees the image alone."""

    def __init__(
        self,
        encoders: Encoders,
        precision: str,
        fusion_layers: int,
        dropout: float,
    ):
        super().__init__()
        self.image = encoders.image
        self.text = encoders.text
        self.precision = precision
        self.recomputed = False
        self.ready_mask = takes_ready_mask(encoders.text)

        # the image's features become as wide as the text's
        dim = self.text.config.hidden_size
        widths = getattr(self.image.config, "hidden_sizes", None)
        width = widths[-1] if widths else self.image.config.hidden_size
        self.project = nn.Sequential(nn.Linear(width, dim), nn.LayerNorm(dim))
        layers = [FusionLayer(dim, dropout) for _ in range(fusion_layers)]
        self.fusion = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(dim)

        # one head for each kind of answer, and one for the labels
        self.heads = nn.ModuleDict()
        for name, classes in HEADS.items():
            self.heads[name] = make_head(dim, HEAD_WIDTH[name], len(classes), dropout)
        self.chexpert = make_head(dim, 512, len(CHEXPERT), dropout)

        # what pixels are normalised by
        mean = torch.tensor(encoders.mean).view(-1, 1, 1)
        std = torch.tensor(encoders.std).view(-1, 1, 1)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def image_tokens(self, image: Tensor) -> Tensor:
        """(B, 1, S, S) uint8 -> (B, P, dim)."""
        # one grey channel becomes the encoder's three
        pixels = (image / 255 - self.mean) / self.std
        if self.mean.is_cuda:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        options = size_options(self.image, image.shape[-1])
        features = self.image(pixel_values=pixels, **options).last_hidden_state

        # a transformer gives tokens with positions of their own
        if features.dim() == 3:
            return self.project(features)
        height, width = features.shape[2:]
        features = features.flatten(2).transpose(1, 2)
        tokens = self.project(features)
        positions = grid_positions(height, width, tokens.shape[2], tokens.device)
        return tokens + positions.to(tokens.dtype)

    def forward(
        self,
        image: Tensor,
        ids: Tensor,
        mask: Tensor,
        image_of: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Logits (B, classes) of binary, category, region, severity, and (B, 14) of CheXpert, fp32.

        image_of: (B,), which image each question is about, where there is not one for each.
        """
        with autocast(image.device, self.precision):
            image = self.image_tokens(image)
            if image_of is not None:
                image = image.index_select(0, image_of)
            if self.ready_mask:
                mask = broadcast_mask(mask)
            text = self.text(input_ids=ids, attention_mask=mask).last_hidden_state
            for layer in self.fusion:
                text = recompute(layer, text, image) if self.recomputed else layer(text, image)
            pooled = self.norm(text[:, 0])
            logits = [head(pooled) for head in self.heads.values()]
            logits.append(self.chexpert(image.mean(1)))
        return tuple(values.float() for values in logits)


def encoder_layers(
    model: ChestModel,
    image_encoder: str,
    text_encoder: str,
) -> list[nn.Module]:
    """The layers of both encoders, which lie at these paths. Raises InputError where they are not known."""
    layers = list(layers_of(model.image, image_encoder))
    layers += layers_of(model.text, text_encoder)
    return layers


def recompute_activations(model: ChestModel, image_encoder: str, text_encoder: str) -> None:
    """Activations are computed again in the backward pass. Raises InputError as encoder_layers does."""
    for layer in encoder_layers(model, image_encoder, text_encoder):
        layer.forward = recomputed(layer.forward)
    model.recomputed = True


def freeze_unused(model: ChestModel, size: int, image_encoder: str) -> None:
    """Freeze what no answer depends on (BERT's pooler): DDP would wait for its gradients for ever.

    Raises InputError where the image encoder, which lies at this path, does not take images of the size.
    """
    precision = model.precision
    model.precision = "no"
    image = torch.zeros(1, 1, size, size, dtype=torch.uint8)
    ids = torch.ones(1, 4, dtype=torch.long)
    try:
        logits = model(image, ids, torch.ones_like(ids))
        sum(values.sum() for values in logits).backward()
    except (RuntimeError, ValueError) as error:
        if out_of_memory(error):
            raise
        reason = f"does not take pictures of 3 x {size} x {size}"
        raise InputError(f"{image_encoder}: {reason}; see --image_size") from None

    # what has no gradient now never will
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    model.precision = precision
