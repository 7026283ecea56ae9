"""Images that are nearly the same: saved again, in another size or format, brighter, mirrored or turned.

An image's details at 32 x 32 pixels are compared: what is left when the mean around each pixel is taken off, by the
contrast around it. X-rays of two patients agree in their outlines, not in these.
"""

import numpy as np
from PIL import Image
from scipy.ndimage import uniform_filter

from distributed_utils import Ranks, gather_objects

SIDE = 32
NEIGHBOURHOOD = 7
# Copies correlate by 0.95 and more, slices of one CT 3 mm apart by up to 0.90, images of two patients by up to 0.8.
LEAST_CORRELATION = 0.93
# of the details at half the size, which are compared first; those of copies correlate by more
LEAST_AT_HALF_SIZE = 0.92
# images compared at a time
BLOCK = 1024


def thumbnail(image: Image.Image) -> bytes:
    """SIDE x SIDE grey values of a grey image."""
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS, reducing_gap=3).tobytes()


def details_of(thumbnails: list[bytes]) -> np.ndarray:
    """(N, SIDE, SIDE) details of thumbnails, with a mean of 0 and a norm of 1; 0 for an image without any."""
    values = np.frombuffer(b"".join(thumbnails), np.uint8)
    values = values.reshape(-1, SIDE, SIDE).astype(np.float32)
    window = (1, NEIGHBOURHOOD, NEIGHBOURHOOD)
    details = values - uniform_filter(values, window)
    contrast = np.sqrt(uniform_filter(details**2, window))
    # 1: a grey value's rounding is no detail
    details = details / (contrast + 1)
    return normalise(details) * (values.std(axis=(1, 2), keepdims=True) > 2)


def normalise(details: np.ndarray) -> np.ndarray:
    """(N, S, S) details with a mean of 0 and a norm of 1."""
    details = details - details.mean(axis=(1, 2), keepdims=True)
    norm = np.sqrt((details**2).sum(axis=(1, 2), keepdims=True))
    return details / (norm + 1e-6)


def half_size(details: np.ndarray) -> np.ndarray:
    """(N, S / 2 * S / 2) rows of details at half the size."""
    count, side, _ = details.shape
    blocks = details.reshape(count, side // 2, 2, side // 2, 2)
    return normalise(blocks.mean(axis=(2, 4))).reshape(count, -1)


def all_orientations(details: np.ndarray) -> np.ndarray:
    """(8 N, SIDE, SIDE): as they are, mirrored, and both turned by 90, 180 and 270 degrees."""
    mirrored = details[:, :, ::-1]
    turns = [np.rot90(either, quarter, (1, 2)) for either in (details, mirrored) for quarter in range(4)]
    return np.concatenate(turns)


def near_copies(first: list[bytes], second: list[bytes], ranks: Ranks) -> dict[int, int]:
    """{index in `second`: that of the image in `first` that it is nearly the same as}; the ranks share the work."""
    local = range(ranks.rank, len(second), ranks.world_size)
    found: dict[int, int] = {}
    for begin in range(0, len(first), BLOCK):
        details = details_of(first[begin : begin + BLOCK])
        small = half_size(details)
        for start in range(0, len(local), BLOCK // 8):
            queries = local[start : start + BLOCK // 8]
            turned = all_orientations(details_of([second[index] for index in queries]))

            # most pairs are told apart at half the size
            likely, partners = np.nonzero(half_size(turned) @ small.T > LEAST_AT_HALF_SIZE)
            pairs = turned[likely] * details[partners]
            correlations = pairs.sum(axis=(1, 2))
            for k in np.flatnonzero(correlations > LEAST_CORRELATION):
                query = queries[likely[k] % len(queries)]
                found.setdefault(query, begin + int(partners[k]))

    everything: dict[int, int] = {}
    for part in gather_objects(found):
        everything |= part
    return everything
