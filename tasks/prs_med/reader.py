"""How images, questions and answers become tensors for one pair of checkpoints."""

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence

from old.question_utils import distinct


class PixelStatistics(NamedTuple):
    """What an encoder's pixels are normalised by, for each of the three channels."""

    mean: list[float]
    std: list[float]


class Longest(NamedTuple):
    """The most tokens that a prompt has, its image's among them, and that an answer has."""

    prompt: int
    answer: int


class Reader:
    """Sizes, normalisations, tokenizer and prompt of a VLM and a SAM encoder.

    image_size: side of SAM's input and of the masks. vlm_size: side of the VLM's input. image_tokens: how many tokens
    the VLM makes of an image; in the ids, `image_token` stands in their places. statistics: by encoder, vlm and sam.
    """

    def __init__(
        self,
        tokenizer,
        image_token: int,
        image_tokens: int,
        image_size: int,
        vlm_size: int,
        statistics: dict[str, PixelStatistics],
    ):
        self.tokenizer = tokenizer
        self.image_token = image_token
        self.image_tokens = image_tokens
        self.image_size = image_size
        self.vlm_size = vlm_size
        self.statistics = statistics

        # ids of the prompt before the image, and of what has been asked and answered so far
        self.end = tokenizer.eos_token_id
        self.pad = self.end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.before = self._ids("USER: ")
        if tokenizer.bos_token_id is not None:
            self.before = [tokenizer.bos_token_id, *self.before]
        self.known: dict[tuple, tuple] = {}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def pixels(self, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole image for each encoder: uint8 (3, image_size, image_size) and (3, vlm_size, vlm_size)."""
        for_sam = resized(image, self.image_size)
        for_vlm = resized(image, self.vlm_size)
        return for_sam, for_vlm

    def tokens(
        self,
        question: str,
        answer: str,
    ) -> tuple[list[int], list[int]]:
        """Ids of `USER: <image>\\n{question}\\nASSISTANT:` (<image> once per image token) and of ` {answer}</s>`."""
        key = (question, answer)
        if key not in self.known:
            image = [self.image_token] * self.image_tokens
            asked = self._ids(f"\n{question}\nASSISTANT:")
            answered = self._ids(f" {answer}")
            self.known[key] = (self.before + image + asked, [*answered, self.end])
        return self.known[key]

    def longest_tokens(self, rows: list) -> Longest:
        """How many tokens the longest prompt and the longest answer of some rows have."""
        tokens = [self.tokens(row.question, row.answer) for row in rows]
        prompts = [len(prompt) for prompt, _ in tokens]
        answers = [len(answer) for _, answer in tokens]
        return Longest(max(prompts), max(answers))

    def blank(self, error: str = "") -> dict:
        """The tensors of a black image and an empty mask; error: why they take the place of others."""
        side = self.image_size
        vlm_side = self.vlm_size
        return {
            "sam": torch.zeros(3, side, side, dtype=torch.uint8),
            "vlm": torch.zeros(3, vlm_side, vlm_side, dtype=torch.uint8),
            "mask": torch.zeros(side, side, dtype=torch.bool),
            "position": None,
            "key": 0,
            "extents": [],
            "error": error,
        }

    def largest_batch(self, size: int, longest: Longest) -> dict:
        """A made-up batch, on the host, of rows whose prompt and answer have so many tokens, each of its own image."""
        prompt = [self.pad] * longest.prompt
        answer = [self.pad] * longest.answer
        item = {"index": 0, "prompt": prompt, "answer": answer}
        return self.collate([self.blank() | item for _ in range(size)])

    def collate(self, items: list[dict]) -> dict:
        """A batch of rows.

        sam, vlm: the different images; rows that hold the same tensors share one. image_of: which of them each row is
        about. keys, extents: of each image. ids: prompt and answer, padded on the
        right, which causal attention never sees. prompt: the prompt alone, padded with -1 on the left, as generation
        wants it. words: the places of the prompt's text. answer: the answer's tokens; token k is predicted at place
        answer_at[k], the first one at the prompt's last place.
        """
        prompts = [item["prompt"] for item in items]
        answers = [item["answer"] for item in items]
        words = [self.text_places(prompt) for prompt in prompts]
        ids = []
        answer_at = []
        for prompt, answer in zip(prompts, answers, strict=True):
            first = len(prompt) - 1
            last = first + len(answer)
            ids.append(prompt + answer)
            answer_at.append(list(range(first, last)))

        errors = [item["error"] for item in items]
        errors = [error for error in errors if error]

        # each image once
        places, image_of = distinct([item["sam"] for item in items])
        images = {}
        for name in ("sam", "vlm"):
            tensors = [items[place][name] for place in places]
            images[name] = torch.stack(tensors)
        masks = [item["mask"] for item in items]

        return images | {
            "image_of": torch.tensor(image_of),
            "mask": torch.stack(masks),
            "ids": pad_rows(ids, self.pad),
            "prompt": pad_rows(prompts, -1, side="left"),
            "words": pad_rows(words, -1),
            "answer": pad_rows(answers, -100),
            "answer_at": pad_rows(answer_at, 0),
            # what stays on the host is a list
            "index": [item["index"] for item in items],
            "position": [item["position"] for item in items],
            "keys": [items[place]["key"] for place in places],
            "extents": [items[place]["extents"] for place in places],
            "error": errors[0] if errors else "",
        }

    def text_places(self, prompt: list[int]) -> list[int]:
        """The places of a prompt that hold no image token."""
        first = len(self.before)
        last = first + self.image_tokens
        places = range(len(prompt))
        return [place for place in places if not first <= place < last]


def resized(image: Image.Image, side: int) -> torch.Tensor:
    """uint8 (3, side, side) of an RGB image."""
    small = image.resize((side, side), Image.Resampling.BICUBIC)
    channels_first = np.asarray(small).transpose(2, 0, 1)
    return torch.from_numpy(channels_first.copy())


def pad_rows(
    rows: list[list[int]],
    value: int,
    side: str = "right",
) -> torch.Tensor:
    """int64 (B, longest): the rows, filled up with `value` at the right or at the left (`side`)."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
