"""PRS-Med: a vision language model with LoRA, SAM's vision encoder, and the decoder that joins them to a mask."""

import torch
from torch import nn
from torch.nn import functional as F

from old.fixed_order_utils import interpolate
from old.hardware_utils import autocast
from tasks.prs_med.reader import Reader


class MaskDecoder(nn.Module):
    """Fusion and decoder of PRS-Med: image tokens attend to the prompt's words, then convolutions up to 4x SAM's grid.

    dim is the SAM encoder's output width (256): text MLP D -> 2 dim -> dim, 8 heads, convolutions dim -> dim/2 ->
    dim/4. GroupNorm, not BatchNorm, whose statistics would depend on the number of GPUs.
    """

    def __init__(self, text_dim: int, dim: int):
        super().__init__()
        half = dim // 2
        quarter = dim // 4
        self.text = nn.Sequential(
            nn.Linear(text_dim, 2 * dim),
            nn.GELU(),
            nn.Linear(2 * dim, dim),
            nn.LayerNorm(dim),
        )

        self.attention = nn.MultiheadAttention(dim, num_heads=8, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.encoder = nn.TransformerEncoderLayer(
            dim,
            nhead=8,
            dim_feedforward=4 * dim,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
        )

        # the last convolution is made before the others, as in all runs: the order decides who draws which weights
        last = nn.Conv2d(quarter, 1, 3, padding=1)
        self.convolutions = nn.Sequential(
            nn.Conv2d(dim, half, 3, padding=1),
            nn.GroupNorm(8, half),
            nn.GELU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(half, quarter, 3, padding=1),
            nn.GroupNorm(8, quarter),
            nn.GELU(),
            nn.Upsample(scale_factor=2),
            last,
        )

    def forward(
        self,
        features: torch.Tensor,
        words: torch.Tensor,
        padding: torch.Tensor,
    ) -> torch.Tensor:
        """(B, dim, h, w) features and (B, Q, D) words -> (B, 1, 4h, 4w) logits; padding (B, Q): True without a word."""
        tokens = features.flatten(2).transpose(1, 2)
        text = self.text(words)
        attended, _ = self.attention(tokens, text, text, key_padding_mask=padding, need_weights=False)
        tokens = self.norm(tokens + attended)
        tokens = self.encoder(tokens)
        grid = tokens.transpose(1, 2)
        grid = grid.unflatten(2, features.shape[2:])
        return self.convolutions(grid)


class PRSMed(nn.Module):
    """Frozen VLM with LoRA, SAM vision encoder trained in full, mask decoder; one forward pass gives mask and answer.

    precision: no, bf16 or fp16. base: what tells its frozen part from others, as a checkpoint holds it. sharded:
    whether the frozen part is shared out over the processes.
    """

    def __init__(self, vlm: nn.Module, sam: nn.Module, reader: Reader, precision: str):
        super().__init__()
        self.vlm = vlm
        self.sam = sam
        self.reader = reader
        self.precision = precision
        self.base: dict = {}
        self.sharded = False
        self.decoder = MaskDecoder(vlm.config.text_config.hidden_size, sam.config.output_channels)

        # each encoder has its own normalisation
        for name, statistics in reader.statistics.items():
            for kind, values in statistics._asdict().items():
                channels = torch.tensor(values)
                channels = channels.view(3, 1, 1)
                self.register_buffer(f"{name}_{kind}", channels, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.vlm_mean.device

    def train(self, mode: bool = True) -> "PRSMed":
        super().train(mode)
        self.vlm.model.vision_tower.eval()
        return self

    def forward(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask logits (B, image_size, image_size), the answer's cross-entropy summed over its tokens (B,), both fp32.

        Both encoders run once for each different image; image_of says which one a question is about.
        The mask reads hidden states of prompt positions, which by causality know nothing of the answer behind them.
        """
        with autocast(self.device, self.precision):
            hidden = self.hidden_states(batch)
            text_loss = self.text_loss(batch, hidden)
            return self.mask_logits(batch, hidden), text_loss

    def hidden_states(self, batch: dict) -> torch.Tensor:
        """(B, L, D): the language model's last hidden states of image, question and answer."""
        image = self.image_features(batch)

        # the image's features take the places of its tokens
        embed = self.vlm.get_input_embeddings()
        words = embed(batch["ids"])
        image = image.to(words.dtype)
        first = len(self.reader.before)
        last = first + self.reader.image_tokens
        before = words[:, :first]
        after = words[:, last:]
        embeddings = torch.cat([before, image, after], dim=1)

        # a mask is given, or transformers looks into the batch for packed sequences, which waits for the GPU
        samples, length, _ = embeddings.shape
        causal = torch.ones(length, length, dtype=torch.bool, device=words.device)
        causal = causal.tril()
        causal = causal.expand(samples, 1, -1, -1)
        language_model = self.vlm.model.language_model
        output = language_model(inputs_embeds=embeddings, attention_mask=causal, use_cache=False)
        return output.last_hidden_state

    @torch.no_grad()
    def image_features(self, batch: dict) -> torch.Tensor:
        """(B, image tokens, D): what the language model sees of each question's image."""
        pixels = self.vlm_pixels(batch)
        features = self.vlm.model.get_image_features(pixel_values=pixels, return_dict=True)
        image = torch.stack(list(features.pooler_output))
        return image.index_select(0, batch["image_of"])

    def text_loss(self, batch: dict, hidden: torch.Tensor) -> torch.Tensor:
        """(B,) cross-entropy of the answers' tokens, each predicted at the place before it."""
        states = pick(hidden, batch["answer_at"])
        logits = self.vlm.lm_head(states)
        logits = logits.float()
        logits = logits.transpose(1, 2)
        answer = batch["answer"]
        losses = F.cross_entropy(logits, answer, ignore_index=-100, reduction="none")
        return losses.sum(1)

    def mask_logits(self, batch: dict, hidden: torch.Tensor) -> torch.Tensor:
        """(B, image_size, image_size) logits of what the prompt's words ask for."""
        pixels = batch["sam"] / 255
        pixels = (pixels - self.sam_mean) / self.sam_std
        features = self.sam(pixels).last_hidden_state
        features = features.index_select(0, batch["image_of"])

        places = batch["words"]
        words = pick(hidden, places)
        words = words.to(features.dtype)
        masks = self.decoder(features, words, padding=places < 0)
        side = self.reader.image_size
        masks = interpolate(masks.float(), (side, side))
        return masks.squeeze(1)

    def vlm_pixels(self, batch: dict) -> torch.Tensor:
        """The VLM's input of a batch's uint8 images."""
        pixels = batch["vlm"] / 255
        pixels = (pixels - self.vlm_mean) / self.vlm_std
        return pixels.to(self.vlm.dtype)

    @torch.no_grad()
    def answer(self, batch: dict, max_new_tokens: int) -> list[str]:
        """Greedy answers to the prompts of a batch, from the image and the question alone."""
        prompt = batch["prompt"]
        padding = prompt < 0
        embed = self.vlm.get_input_embeddings()

        # processes that share a base out go on until all have their answers
        with autocast(self.device, self.precision):
            # the image's features take the places of its tokens; with embeddings, the new tokens alone come back
            words = embed(prompt.masked_fill(padding, self.reader.pad))
            image = self.image_features(batch).to(words.dtype)
            is_image = prompt == self.reader.image_token
            is_image = is_image.unsqueeze(2)
            embeddings = words.masked_scatter(is_image, image)
            tokens = self.vlm.generate(
                inputs_embeds=embeddings,
                attention_mask=(~padding).long(),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=self.reader.pad,
                eos_token_id=self.reader.end,
                synced_gpus=self.sharded,
            )
        answers = self.reader.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [answer.strip() for answer in answers]


def pick(hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(B, L, D) hidden states at (B, N) places -> (B, N, D); a negative place gives those of the first."""
    _, _, channels = hidden.shape
    index = places.clamp_min(0)
    index = index.unsqueeze(2)
    index = index.expand(-1, -1, channels)
    return hidden.gather(1, index)
