"""Guide 0: images and masks of a training batch changed together, and no answer made untrue by it.

An answer says where the mask lies. So an image moves only where each of its masks in the training split, whoever asks
about it and in whichever batch, stays inside the image and at its position for certain; else its intensity alone
changes. All questions about an image share one change an epoch, and batches and ranks decide nothing.
"""

from itertools import product
from typing import NamedTuple

import numpy as np

from old.augmentation_utils import Change, change_images, draw_change, move_masks, move_points
from tasks.prs_med.metrics import box_of, position_of_box


class Box(NamedTuple):
    """A rectangle of an image, 0 to 1 from edge to edge."""

    left: float
    top: float
    right: float
    bottom: float

    def corners(self) -> np.ndarray:
        """(4, 2) corners (x, y)."""
        columns = (self.left, self.right)
        rows = (self.top, self.bottom)
        points = list(product(columns, rows))
        return np.array(points)


class Extent(NamedTuple):
    """Where a mask lies; position: None for an empty one.

    outer: the box around the mask. core: around those pixels of it that belong to 2 x 2 of them, of which each still
    has a pixel after a change, which a thinner part may lose; None without any. pixel: the side of one.
    """

    position: str | None
    outer: Box | None
    core: Box | None
    pixel: float


def extent_of(mask: np.ndarray, position: str | None) -> Extent:
    """Where a square bool mask lies, with the position that its answer names."""
    pairs = mask[:-1] & mask[1:]
    blocks = pairs[:, :-1] & pairs[:, 1:]
    thick = np.zeros_like(mask)
    thick[:-1, :-1] |= blocks
    thick[:-1, 1:] |= blocks
    thick[1:, :-1] |= blocks
    thick[1:, 1:] |= blocks
    return Extent(
        position,
        outer=share_of(mask),
        core=share_of(thick),
        pixel=1 / len(mask),
    )


def share_of(mask: np.ndarray) -> Box | None:
    """The box around a square mask, None without any foreground."""
    box = box_of(mask)
    if box is None:
        return None
    side = len(mask)
    return Box(
        box.left / side,
        box.top / side,
        box.right / side,
        box.bottom / side,
    )


def position_stays(extent: Extent, change: Change) -> bool:
    """Whether the moved mask is all inside the image and for certain at its position.

    Each edge of the moved mask lies between the farthest corner of its outer box and what has moved least of the strip
    of blocks along that edge of its core, a pixel more for rounding. It is at its position if it is there with every
    choice of the four edges, as the rule is monotone in each.
    """
    if extent.position is None:
        return True
    if extent.core is None:
        return False
    outer = moved_corners(extent.outer, change)
    low = outer.min(axis=0) - extent.pixel
    high = outer.max(axis=0) + extent.pixel
    if low.min() < 0 or high.max() > 1:
        return False

    # the strips of 2 pixels along the edges of the core
    core = extent.core
    width = 2 * extent.pixel
    left_strip = moved_corners(core._replace(right=core.left + width), change)
    top_strip = moved_corners(core._replace(bottom=core.top + width), change)
    right_strip = moved_corners(core._replace(left=core.right - width), change)
    bottom_strip = moved_corners(core._replace(top=core.bottom - width), change)

    # how far in and out each edge of the moved mask may lie
    farthest = Box(
        low[0],
        low[1],
        high[0],
        high[1],
    )
    nearest = Box(
        left_strip[:, 0].max() + extent.pixel,
        top_strip[:, 1].max() + extent.pixel,
        right_strip[:, 0].min() - extent.pixel,
        bottom_strip[:, 1].min() - extent.pixel,
    )
    edges = zip(farthest, nearest, strict=True)
    boxes = map(Box._make, product(*edges))
    return all(position_of_box(box, 1, 1) == extent.position for box in boxes)


def moved_corners(box: Box, change: Change) -> np.ndarray:
    """(4, 2) corners (x, y) of a box after a change."""
    return move_points(box.corners(), change)


def augment(batch: dict, seed: int, epoch: int) -> dict:
    """A training batch, on its device, with each image for both encoders and each mask changed for this epoch.

    keys, extents: of each image, its number, and where each of its masks in the training split lies. A mask moves as
    its row's image does.
    """
    changes = []
    for key, extents in zip(batch["keys"], batch["extents"], strict=True):
        change = draw_change(seed, epoch, key)
        stays = all(position_stays(extent, change) for extent in extents)
        changes.append(change if stays else change.in_place())
    return batch | {
        "sam": change_images(batch["sam"], changes),
        "vlm": change_images(batch["vlm"], changes),
        "mask": move_masks(batch["mask"], changes, batch["image_of"]),
    }
