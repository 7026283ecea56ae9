"""What a pair of raw files shows: an image, or the slices of a volume, each with the masks of its structures."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

from old.cli_utils import InputError
from old.image_utils import Window, open_upright
from old.table_utils import Record
from tasks.prs_med.pairs import Pair, is_volume
from tasks.prs_med.raw_masks import Labels, binary_mask, label_masks, read_values
from tasks.prs_med.volumes import cut


class View(NamedTuple):
    """An image to be written, and the masks of what it shows; name: of its file, without ending.

    level: the highest value of a mask of one structure, 0 for a label map.
    """

    name: str
    image: Image.Image
    masks: dict[str, np.ndarray]
    level: float = 0.0


class Reading(NamedTuple):
    """How raw files are read.

    structures: that masks may show. labels: of label maps, empty where each mask shows one structure. min_pixels: a
    label of fewer is left out. spacing: mm between slices. channel: of a volume with several.
    """

    structures: list[str]
    labels: Labels
    min_pixels: int
    window: Window | None
    spacing: float
    channel: int


def views_of(pair: Pair, records: list[Record], reading: Reading) -> Iterator[View]:
    """The image of a pair, or the slices of its volume. records: the image's rows of a table. Raises InputError."""
    if is_volume(pair.image):
        one_label = not reading.labels
        for part in cut(pair.image, pair.mask, reading.spacing, reading.window, reading.channel, one_label):
            name = f"{pair.name}_s{part.number:03d}"
            image = Image.fromarray(part.pixels)
            masks = masks_in(pair, part.values, records, reading)
            yield View(name, image, masks)
        return

    image = read_image(pair, reading.window)
    values = read_values(pair.mask, keep_labels=bool(reading.labels))
    check_size(pair, image, values)
    masks = masks_in(pair, values, records, reading)
    level = 0.0 if reading.labels else float(values.max())
    yield View(pair.name, image, masks, level)


def read_image(pair: Pair, window: Window | None) -> Image.Image:
    """An image in 8 bits, grey where it has no colours. Raises InputError."""
    try:
        with_pages(pair)
        image, _ = open_upright(str(pair.image), window)
    except Exception as error:
        text = str(error) or type(error).__name__
        reason = text.replace(str(pair.image), "file").splitlines()[0]
        raise InputError(f"{pair.image}: not a readable image ({reason}); replace it") from None
    if image.mode == "L":
        return image
    channels = np.asarray(image)
    is_gray = (channels[..., :1] == channels).all()
    return image.convert("L") if is_gray else image


def with_pages(pair: Pair) -> None:
    """Raises ValueError for a TIFF of several pages, of which only the first would be used."""
    if pair.image.suffix.lower() in (".tif", ".tiff"):
        with Image.open(pair.image) as image:
            if image.n_frames > 1:
                raise ValueError(f"{image.n_frames} pages; write each as a file")


def check_size(pair: Pair, image: Image.Image, values: np.ndarray) -> None:
    """Raises InputError where a mask has another shape than its image."""
    from tasks.prs_med.data import misfit

    height, width = values.shape
    problem = misfit((width, height), image.size)
    if problem:
        raise InputError(f"{pair.mask}: {problem}")


def masks_in(pair: Pair, values: np.ndarray, records: list[Record], reading: Reading) -> dict[str, np.ndarray]:
    """{structure: (H, W) bool} of a mask's values; none for a mask that is empty. Raises InputError."""
    if reading.labels:
        masks = label_masks(pair.mask, values, reading.labels)
        return {name: mask for name, mask in masks.items() if mask.sum() >= reading.min_pixels}
    mask = binary_mask(pair.mask, values)
    if not mask.any():
        return {}
    structure = structure_of(pair, records, reading.structures)
    return {structure: mask}


def structure_of(pair: Pair, records: list[Record], structures: list[str]) -> str:
    """What a mask shows: as its name says, as the table says, or the only --structure. Raises InputError."""
    if pair.structure:
        return pair.structure
    named = {record.values.get("structure", "") for record in records} - {""}
    if len(named) == 1:
        return named.pop()
    if len(structures) == 1:
        return structures[0]
    if structures or named:
        names = ", ".join(structures or sorted(named))
        raise InputError(f"{pair.mask}: its name does not say which of {names} it shows; name it such as case1_liver")
    raise InputError(f'{pair.mask}: what it shows is not known; give --structure liver, or --labels "1=liver"')
