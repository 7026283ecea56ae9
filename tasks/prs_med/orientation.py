"""Whether masks lie on their images the right way round, seen by the edges of the images and by the answers.

A mask that was written transposed or mirrored has the size of its image and looks like any other. But its outline no
longer runs along edges of the image. One outline proves little, those of a whole CSV do.
"""

from collections import Counter

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
A_FIFTH = np.log(1.2)


def turn(y, x, last: int) -> dict[str, tuple]:
    """{name: (y, x)} of where the points of a square image come to lie when it is turned; last: its side - 1."""
    below = last - y
    beside = last - x
    return {
        AS_IT_IS: (y, x),
        "transposed": (x, y),
        "mirrored left to right": (y, beside),
        "mirrored top to bottom": (below, x),
        "turned by 180 degrees": (below, beside),
        "turned by 90 degrees to the left": (beside, y),
        "turned by 90 degrees to the right": (x, below),
        "mirrored at the other diagonal": (beside, below),
    }


def edges_of(image: Image.Image) -> np.ndarray:
    """(SIDE, SIDE) strength of the edges of a grey image, by that of their neighbourhood, whose mean is about 1."""
    small = image.resize(
        (SIDE, SIDE),
        Image.Resampling.BOX,
        reducing_gap=1,
    )
    values = np.asarray(small, np.float32)
    vertical = sobel(values, axis=0)
    horizontal = sobel(values, axis=1)
    strength = np.hypot(vertical, horizontal)
    around = uniform_filter(strength, NEIGHBOURHOOD)
    return strength / (around + EDGE_NOISE)


def outline_scores(edges: np.ndarray, mask: np.ndarray) -> tuple[float, ...]:
    """Mean strength of an image's edges along a mask's outline, for the mask turned in each way; () without outline."""
    size = (SIDE, SIDE)
    image = Image.fromarray(mask)
    small = image.resize(size, Image.Resampling.NEAREST)
    inside = np.asarray(small)
    core = binary_erosion(inside, border_value=1)
    outline = binary_dilation(inside) & ~core
    y, x = np.nonzero(outline)
    if not len(y):
        return ()
    scores = []
    for points in turn(y, x, SIDE - 1).values():
        strength = edges[points].mean()
        scores.append(float(strength))
    return tuple(scores)


def turned_masks(scores: list[tuple[float, ...]]) -> list[str]:
    """How each of a CSV's masks seems to be turned, empty where it seems right; scores: outline_scores of each."""
    found = [""] * len(scores)
    known = [index for index, score in enumerate(scores) if score]
    if len(known) < FEWEST_MASKS:
        return found

    names = list(turn(0, 0, 0))
    values = [scores[index] for index in known]
    values = np.maximum(values, 0.2)
    logs = np.log(values)
    way = common_way(logs)
    ways = [way] * len(known)
    if not way:
        ways = single_ways(logs)
    for index, chosen in zip(known, ways, strict=True):
        if chosen:
            found[index] = names[chosen]
    return found


def common_way(logs: np.ndarray) -> int:
    """The way in which all masks lie on edges clearly better, 0 for none; logs: (masks, ways) of their scores.

    That is by a fifth on average, for at least 3 of 4 masks, and not by chance in a paired t-test.
    """
    gains = logs - logs[:, :1]
    means = gains.mean(axis=0)
    deviations = gains.std(axis=0, ddof=1)
    errors = deviations / np.sqrt(len(gains))
    tests = means / (errors + 1e-6)

    # what is best, and whether it is clearly so
    best = int(tests.argmax())
    better = gains[:, best] > 0
    clear = tests[best] > 5
    clear = clear and means[best] > A_FIFTH
    clear = clear and better.mean() >= 0.75
    return best if clear else 0


def single_ways(logs: np.ndarray) -> np.ndarray:
    """The way of each mask, 0 for as it is; logs: (masks, ways) of their scores.

    Another one is taken where a mask scores far below the others as it is, and as they do when it is turned. The others
    must lie on edges for that.
    """
    as_it_is = logs[:, 0]
    best = logs.max(axis=1)
    usual = np.median(as_it_is)
    deviations = np.abs(as_it_is - usual)
    spread = 1.48 * np.median(deviations) + 0.05

    turned = usual > np.log(1.3)
    turned = turned & (as_it_is < usual - 3 * spread)
    turned = turned & (best > usual - spread)
    gain = best - as_it_is
    turned = turned & (gain > np.log(1.5))
    return np.where(turned, logs.argmax(axis=1), 0)


def turned_position(position: str) -> dict[str, str]:
    """{name: position} that a mask at this position comes to when it is turned."""
    if position == "center":
        return dict.fromkeys(turn(0, 0, 1), position)
    vertical, side = position.split()
    rows = ("top", "bottom")
    columns = ("left", "right")
    y = rows.index(vertical)
    x = columns.index(side)
    words = {}
    for name, (row, column) in turn(y, x, last=1).items():
        words[name] = f"{rows[row]} {columns[column]}"
    return words


def explain_positions(stated: list[str], true: list[str]) -> str:
    """How all masks would have to be turned so that 9 of 10 stated positions are theirs; empty where none helps."""
    counts = Counter()
    for said, position in zip(stated, true, strict=True):
        turned = turned_position(position)
        counts.update(name for name in turned if turned[name] == said)
    for name, count in counts.most_common(1):
        if name != AS_IT_IS and count >= 0.9 * len(stated):
            return name
    return ""
