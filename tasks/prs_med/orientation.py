"""Whether masks lie on their images the right way round, seen by the edges of the images and by the answers.

A mask that was written transposed or mirrored has the size of its image and looks like any other. But its outline no
longer runs along edges of the image. One outline proves little, those of a whole CSV do.
"""

import numpy as np
from PIL import Image
from scipy.ndimage import binary_dilation, binary_erosion, sobel, uniform_filter

# side of the images on which edges are compared, and of the neighbourhood that an edge is measured by, pixels
SIDE = 128
NEIGHBOURHOOD = 17
# what noise of an 8-bit image comes to, in units of the edges
EDGE_NOISE = 4.0

# a CSV with fewer masks says nothing
FEWEST_MASKS = 8
AS_IT_IS = "as it is"


def turn(y, x, last: int) -> dict[str, tuple]:
    """{name: (y, x)} of where the points of a square image come to lie when it is turned; last: its side - 1."""
    return {
        AS_IT_IS: (y, x),
        "transposed": (x, y),
        "mirrored left to right": (y, last - x),
        "mirrored top to bottom": (last - y, x),
        "turned by 180 degrees": (last - y, last - x),
        "turned by 90 degrees to the left": (last - x, y),
        "turned by 90 degrees to the right": (x, last - y),
        "mirrored at the other diagonal": (last - x, last - y),
    }


def edges_of(image: Image.Image) -> np.ndarray:
    """(SIDE, SIDE) strength of the edges of a grey image, by that of their neighbourhood, whose mean is about 1."""
    small = image.resize((SIDE, SIDE), Image.Resampling.BOX, reducing_gap=1)
    values = np.asarray(small, np.float32)
    strength = np.hypot(sobel(values, axis=0), sobel(values, axis=1))
    around = uniform_filter(strength, NEIGHBOURHOOD)
    return strength / (around + EDGE_NOISE)


def outline_scores(edges: np.ndarray, mask: np.ndarray) -> tuple[float, ...]:
    """Mean strength of an image's edges along a mask's outline, for the mask turned in each way; () without outline."""
    small = Image.fromarray(mask).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    inside = np.asarray(small)
    outline = binary_dilation(inside) & ~binary_erosion(inside, border_value=1)
    y, x = np.nonzero(outline)
    if not len(y):
        return ()
    return tuple(float(edges[points].mean()) for points in turn(y, x, SIDE - 1).values())


def turned_masks(scores: list[tuple[float, ...]]) -> list[str]:
    """How each of a CSV's masks seems to be turned, empty where it seems right; scores: outline_scores of each.

    All of them are, when their outlines lie on edges in one other way clearly better, by mean and by number. One is,
    when it scores far below the others, and as they do when it is turned.
    """
    found = ["" for _ in scores]
    known = [index for index, score in enumerate(scores) if score]
    if len(known) < FEWEST_MASKS:
        return found
    names = list(turn(0, 0, 0))
    logs = np.log(np.maximum([scores[index] for index in known], 0.2))
    gains = logs - logs[:, :1]

    # all of them: a gain of a fifth, of at least 3 of 4 masks, and no chance by a paired t-test
    deviations = gains.std(axis=0, ddof=1) + 1e-6
    tests = gains.mean(axis=0) / deviations * np.sqrt(len(known))
    best = int(tests.argmax())
    common = (gains[:, best] > 0).mean() >= 0.75
    if tests[best] > 5 and gains[:, best].mean() > np.log(1.2) and common:
        for index in known:
            found[index] = names[best]
        return found

    # a single one, where the others lie on edges
    usual = np.median(logs[:, 0])
    if usual < np.log(1.3):
        return found
    spread = 1.48 * np.median(np.abs(logs[:, 0] - usual)) + 0.05
    best_ways = logs.argmax(axis=1)
    for row, way in enumerate(best_ways):
        far_below = logs[row, 0] < usual - 3 * spread
        as_others = logs[row, way] > usual - spread
        if far_below and as_others and gains[row, way] > np.log(1.5):
            found[known[row]] = names[way]
    return found


def turned_position(position: str) -> dict[str, str]:
    """{name: position} that a mask at this position comes to when it is turned."""
    if position == "center":
        return dict.fromkeys(turn(0, 0, 1), position)
    vertical, side = position.split()
    points = turn(int(vertical == "bottom"), int(side == "right"), 1)
    words = {}
    for name, (y, x) in points.items():
        words[name] = ("bottom " if y else "top ") + ("right" if x else "left")
    return words


def explain_positions(stated: list[str], true: list[str]) -> str:
    """How all masks would have to be turned so that 9 of 10 stated positions are theirs; empty where none helps."""
    counts: dict[str, int] = {}
    for said, position in zip(stated, true, strict=True):
        for name, turned in turned_position(position).items():
            counts[name] = counts.get(name, 0) + (turned == said)
    best = max(counts, key=counts.get)
    return best if best != AS_IT_IS and counts[best] >= 0.9 * len(stated) else ""
