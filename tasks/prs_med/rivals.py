"""Simple rivals for the test table: the best grey band, the mean mask, the most frequent position. No torch.

Each is fitted to the training rows of the structure asked about, and predicts (mask or None, position or None).
"""

import re
from collections import Counter
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from tasks.prs_med.annotations import position_of

PLACES = set("top upper bottom lower left right center centre middle".split())
# fewer rows than this say too little about a structure
FEWEST = 8

Key = tuple[str, str]
Prediction = tuple[np.ndarray | None, str | None]


class Example(NamedTuple):
    """A row. key: see key_of. gray: uint8 (S, S). mask: bool (S, S). position: the one that its answer names."""

    key: Key
    gray: np.ndarray
    mask: np.ndarray
    position: str | None


def key_of(modality: str, answer: str) -> Key:
    """(modality, structure). The structure is the answer without its position: "the cyst is located in the of the"."""
    words = re.findall(r"\w+", answer.casefold())
    return modality, " ".join(word for word in words if word not in PLACES)


def examples_like(train: list[Example], key: Key, most: int) -> list[Example]:
    """At most `most` training rows of the structure, evenly spaced; if it has too few, of the modality, or of all."""
    groups = ([row for row in train if row.key[:length] == key[:length]] for length in (2, 1))
    rows = next((rows for rows in groups if len(rows) >= FEWEST), train)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)]


def grey_threshold(train: list[Example], test: list[Example]) -> list[Prediction]:
    """The largest connected component of lo <= grey < hi, by the best lo and hi for each structure."""

    @cache
    def band_of(key: Key) -> tuple[int, int]:
        rows = examples_like(train, key, 40)
        # about 96 pixels a side are enough to compare bands
        step = max(1, len(rows[0].gray) // 96)

        def score(band: tuple[int, int]) -> float:
            found = [largest_component(row.gray[::step, ::step], band) for row in rows]
            return float(np.mean([dice(mask, row.mask[::step, ::step]) for mask, row in zip(found, rows, strict=True)]))

        # bands from 0 are "darker than", bands up to 256 "brighter than"; then a finer look around the best
        lo, hi = max(combinations(range(0, 257, 16), 2), key=score)
        near = range(-12, 13, 4)
        return max(product([lo + i for i in near if lo] or [0], [hi + i for i in near if hi < 256] or [256]), key=score)

    masks = [largest_component(row.gray, band_of(row.key)) for row in test]
    return [(mask, position_of(mask)) for mask in masks]


def mean_mask(train: list[Example], test: list[Example]) -> list[Prediction]:
    """The mean training mask of the structure, cut at the level of the best mean training Dice; no image is used."""

    @cache
    def mask_of(key: Key) -> np.ndarray:
        rows = examples_like(train, key, 400)
        mean = np.mean([row.mask for row in rows], axis=0)
        cuts = [mean > level for level in np.linspace(0, mean.max(), 20, endpoint=False)]
        return max(cuts, key=lambda cut: np.mean([dice(cut, row.mask) for row in rows]))

    return [(mask_of(row.key), position_of(mask_of(row.key))) for row in test]


def frequent_position(train: list[Example], test: list[Example]) -> list[Prediction]:
    """The most frequent position in the training answers of the structure."""

    @cache
    def position_for(key: Key) -> str | None:
        named = Counter(row.position for row in examples_like(train, key, len(train)) if row.position)
        return max(named, key=named.get, default=None)

    return [(None, position_for(row.key)) for row in test]


def largest_component(gray: np.ndarray, band: tuple[int, int]) -> np.ndarray:
    """(H, W) bool: the largest connected part of the pixels with lo <= grey < hi."""
    mask = (gray >= band[0]) & (gray < band[1])
    labels, count = ndimage.label(mask)
    return labels == np.bincount(labels.ravel())[1:].argmax() + 1 if count > 1 else mask


def dice(predicted: np.ndarray, target: np.ndarray) -> float:
    """Dice of two bool masks; 1 where both are empty."""
    areas = predicted.sum() + target.sum()
    return float(2 * (predicted & target).sum() / areas) if areas else 1.0
