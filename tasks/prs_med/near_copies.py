"""Images that are nearly the same: saved again, in another size or format, brighter, mirrored or turned.

An image's details at 32 x 32 pixels are compared: what is left when the mean around each pixel is taken off, by the
contrast around it. X-rays of two patients agree in their outlines, not in these.
"""

import numpy as np
from PIL import Image
from scipy.ndimage import uniform_filter

from old.distributed_utils import Ranks, gather_objects

SIDE = 32
NEIGHBOURHOOD = 7
# Copies correlate by 0.95 and more, slices of one CT 3 mm apart by up to 0.90, images of two patients by up to 0.8.
LEAST_CORRELATION = 0.93
# of the details at half the size, which are compared first; those of copies correlate by more
LEAST_AT_HALF_SIZE = 0.92
# images compared at a time: so many, with so many in 8 orientations
BLOCK = 1024
QUERIES = 128


def thumbnail(image: Image.Image) -> bytes:
    """SIDE x SIDE grey values of a grey image."""
    small = image.resize(
        (SIDE, SIDE),
        Image.Resampling.LANCZOS,
        reducing_gap=3,
    )
    return small.tobytes()


def details_of(thumbnails: list[bytes]) -> np.ndarray:
    """(N, SIDE, SIDE) details of thumbnails, with a mean of 0 and a norm of 1; 0 for an image without any."""
    content = b"".join(thumbnails)
    values = np.frombuffer(content, np.uint8)
    values = values.reshape(-1, SIDE, SIDE)
    values = values.astype(np.float32)

    # what differs from the mean around, by the contrast there; 1: a grey value's rounding is no detail
    window = (1, NEIGHBOURHOOD, NEIGHBOURHOOD)
    details = values - uniform_filter(values, window)
    power = uniform_filter(details**2, window)
    contrast = np.sqrt(power) + 1
    details = normalise(details / contrast)

    # a blank image has none
    axes = (1, 2)
    spread = values.std(axes, keepdims=True)
    return np.where(spread > 2, details, 0)


def normalise(details: np.ndarray) -> np.ndarray:
    """(N, S, S) details with a mean of 0 and a norm of 1."""
    axes = (1, 2)
    details = details - details.mean(axes, keepdims=True)
    power = details**2
    power = power.sum(axes, keepdims=True)
    norm = np.sqrt(power) + 1e-6
    return details / norm


def half_size(details: np.ndarray) -> np.ndarray:
    """(N, S / 2 * S / 2) rows of details at half the size."""
    count, side, _ = details.shape
    half = side // 2
    blocks = details.reshape(count, half, 2, half, 2)
    small = blocks.mean(axis=(2, 4))
    return normalise(small).reshape(count, -1)


def all_orientations(details: np.ndarray) -> np.ndarray:
    """(8 N, SIDE, SIDE): as they are and mirrored, and both turned by 90, 180 and 270 degrees."""
    ways = []
    mirrored = np.flip(details, axis=2)
    for either in (details, mirrored):
        turned = either
        for _ in range(4):
            ways.append(turned)
            turned = np.rot90(turned, axes=(1, 2))
    return np.concatenate(ways)


def compare(first: np.ndarray, second: np.ndarray) -> dict[int, int]:
    """{index in `second`: that of one in `first`} of details that are nearly the same, in any orientation."""
    # most pairs are told apart at half the size
    turned = all_orientations(second)
    small = half_size(turned)
    products = small @ half_size(first).T
    close = products > LEAST_AT_HALF_SIZE
    likely, partners = np.nonzero(close)

    pairs = turned[likely] * first[partners]
    correlations = pairs.sum(axis=(1, 2))
    same = correlations > LEAST_CORRELATION
    queries = likely % len(second)
    found = {}
    for query, partner in zip(queries[same], partners[same], strict=True):
        found.setdefault(int(query), int(partner))
    return found


def near_copies(first: list[bytes], second: list[bytes], ranks: Ranks) -> dict[int, int]:
    """{index in `second`: that of the thumbnail in `first` that it is nearly the same as}; the ranks share the work."""
    local = range(len(second))[ranks.rank :: ranks.world_size]
    found: dict[int, int] = {}
    for begin in range(0, len(first), BLOCK):
        block = first[begin : begin + BLOCK]
        details = details_of(block)
        for start in range(0, len(local), QUERIES):
            queries = local[start : start + QUERIES]
            asked = details_of([second[index] for index in queries])
            copies = compare(details, asked)
            for query, partner in copies.items():
                index = queries[query]
                found.setdefault(index, begin + partner)

    everything = {}
    for part in gather_objects(found):
        everything |= part
    return everything
