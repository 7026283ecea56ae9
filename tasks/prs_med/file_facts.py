"""What one look at an image and its masks tells the data check; each file is read and decoded once."""

import hashlib
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tasks.prs_med.data import Row, foreground, mask_values, open_upright
from tasks.prs_med.metrics import position_of
from tasks.prs_med.near_copies import thumbnail
from tasks.prs_med.orientation import edges_of, outline_scores

# mask values below this, beside values above 127, can be what JPEG made of 0
NOISE = 32
# an image with grey values between them is none of two values
NEAR = 8


class ImageFacts(NamedTuple):
    """digest: of the file. blank: one value everywhere. two_valued: as a mask is. thumbnail: see near_copies."""

    size: tuple[int, int]
    turned: bool
    digest: str
    blank: bool
    two_valued: bool
    thumbnail: bytes


class MaskFacts(NamedTuple):
    """digest: of the file. shape: digest of what is foreground. foreground: its share; border: that of the border.

    lost: see lost_levels. labels: number of labels that become one foreground. grey: values as those of an image.
    position: see position_of. outline: see outline_scores.
    """

    size: tuple[int, int]
    turned: bool
    digest: str
    shape: str
    foreground: float
    border: float
    lost: list[int]
    labels: int
    grey: bool
    position: str | None
    outline: tuple[float, ...]


class Facts(NamedTuple):
    """Facts of the files: of each image by its path, of each mask by the paths of image and mask."""

    images: dict[str, ImageFacts]
    masks: dict[tuple[str, str], MaskFacts]

    def of(self, row: Row) -> tuple[ImageFacts, MaskFacts]:
        """Facts of a row's image and of its mask."""
        return self.images[row.image], self.masks[row.image, row.mask]


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def image_facts(path: str) -> tuple[ImageFacts, np.ndarray]:
    """Look at an image; also the edges in it."""
    content = Path(path).read_bytes()
    image, turned = open_upright(io.BytesIO(content))
    grey = image.convert("L")
    histogram = np.array(grey.histogram())
    levels = np.flatnonzero(histogram)
    span = int(levels[-1]) - int(levels[0])
    two_valued = has_two_values(histogram)
    facts = ImageFacts(
        size=image.size,
        turned=turned,
        digest=digest_of(content),
        blank=span <= 2 and not two_valued,
        two_valued=two_valued,
        thumbnail=thumbnail(grey),
    )
    return facts, edges_of(grey)


def has_two_values(histogram: np.ndarray) -> bool:
    """Whether an image has two values, as JPEG may have smeared them; histogram: of 256 values."""
    levels = np.flatnonzero(histogram)
    if len(levels) == 2:
        return True
    low = levels[0] + NEAR
    high = levels[-1] - NEAR
    between = histogram[low + 1 : high]
    return bool(high - low > 2 * NEAR and between.sum() <= 0.005 * histogram.sum())


def mask_facts(path: str, edges: np.ndarray) -> MaskFacts:
    """Look at a mask; edges: those of its image."""
    content = Path(path).read_bytes()
    image, turned = open_upright(io.BytesIO(content))
    values = mask_values(image)
    histogram = np.array(image.histogram())
    if image.mode != "L":
        histogram = np.bincount(values.ravel(), minlength=256)
    inside = foreground(values)
    packed = np.packbits(inside)
    border = np.concatenate([inside[0], inside[-1], inside[:, 0], inside[:, -1]])

    # two values, 0 among them, can neither be lost nor be several labels
    lost = []
    labels = 1
    if np.count_nonzero(histogram) > 2 or histogram[0] == 0:
        solid = solid_pixels(values)
        lost = lost_levels(values, solid)
        labels = merged_labels(histogram, solid)
    if image.mode == "RGB":
        colours = merged_colours(np.asarray(image))
        labels = max(labels, colours)

    return MaskFacts(
        size=image.size,
        turned=turned,
        digest=digest_of(content),
        shape=digest_of(packed.tobytes()),
        # shares
        foreground=float(inside.mean()),
        border=float(border.mean()),
        # values
        lost=lost,
        labels=labels,
        grey=has_grey_values(histogram),
        # places
        position=position_of(inside),
        outline=outline_scores(edges, inside),
    )


def has_grey_values(histogram: np.ndarray) -> bool:
    """Whether a mask has values as an image does: many, a fifth of the pixels between dark and bright."""
    between = histogram[NOISE : 256 - NOISE]
    several = np.count_nonzero(histogram) > 64
    return bool(several and between.sum() > 0.2 * histogram.sum())


# --- the values of a mask ---------------------------------------------------------------------------------------------


def solid_pixels(values: np.ndarray) -> np.ndarray:
    """How many pixels of each of the 256 values have a 3 x 3 neighbourhood of that value alone."""
    height, width = values.shape
    inner = values[1:-1, 1:-1]
    solid = np.ones(inner.shape, bool)
    for y in range(3):
        for x in range(3):
            neighbours = values[y : y + height - 2, x : x + width - 2]
            solid &= neighbours == inner
    return np.bincount(inner[solid], minlength=256)


def lost_levels(values: np.ndarray, pixels: np.ndarray) -> list[int]:
    """Values 1..127 of solid areas in a 0..255 mask, which `foreground` takes for background: a label map has them.

    JPEG, resizing and smoothing leave such values at edges and as noise near 0, but no solid areas of more than a few
    pixels. A pixel counts as solid when its 3 x 3 neighbourhood has one value; pixels: solid ones of each value. A
    solid area is a label when it is not near 0 and not small beside the foreground, or when the mask has few values, 0
    among them, as a lossless file has.
    """
    above = values > 127
    count = int(above.sum())
    between = (values > 0) & ~above
    if not count or not between.any():
        return []

    few_values = len(np.unique(values)) <= 16
    few_values = few_values and pixels[0] > 0
    smallest = 1 if few_values else 0.05 * count
    lowest = 1 if few_values else NOISE
    return [level for level in range(lowest, 128) if pixels[level] >= smallest]


def merged_labels(histogram: np.ndarray, pixels: np.ndarray) -> int:
    """How many values of solid areas count as one foreground: those of a label map 0, 1, 2, or 0, 128, 255.

    pixels: solid ones of each value. Above 127 values of less than NOISE apart are what JPEG made of one.
    """
    levels = np.flatnonzero(histogram)
    bright = levels[-1] > 127
    if not bright and len(levels) > 64:
        return 1
    lowest = 128 if bright else 1
    marked = histogram[lowest:]
    smallest = max(1, 0.01 * marked.sum())
    solid = [level for level in range(lowest, 256) if pixels[level] >= smallest]
    apart = NOISE if bright else 1
    gaps = np.diff(solid)
    return 1 + int((gaps >= apart).sum())


def merged_colours(values: np.ndarray) -> int:
    """How many colours of a mask with three channels count as one foreground; (H, W, 3) values."""
    red, green, blue = np.moveaxis(values, 2, 0)
    if np.array_equal(red, green) and np.array_equal(red, blue):
        return 1
    codes = 4 * (red > 127) + 2 * (green > 127)
    codes = codes + (blue > 127)
    counts = np.bincount(codes.ravel(), minlength=8)
    counts = counts[1:]
    common = counts > 0.01 * counts.sum()
    return max(1, int(common.sum()))
