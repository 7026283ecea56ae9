"""Masks as users have them: 0 and 1, 0 and 255, RGBA, palette, DICOM, or label maps of several structures."""

import argparse
import re
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from old.cli_utils import InputError
from old.image_utils import dicom_values, is_dicom, turn_upright, unknown_format

# More values than a label map of a slice has; what JPEG and smooth edges leave are more.
FEW_VALUES = 16
# The name of a label that is left out.
LEFT_OUT = "-"

Labels = dict[int, str]


def parse_labels(text: str) -> Labels:
    """argparse type: "1=liver,2=left kidney", a label that is left out being named "-"."""
    labels = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*=\s*(\S.*?)\s*", part)
        if found is None:
            reason = f'must be such as "1=liver,2=left kidney", not {text!r}'
            raise argparse.ArgumentTypeError(reason)
        value = int(found[1])
        if value in labels or value == 0:
            problem = "is the background" if value == 0 else "is there twice"
            raise argparse.ArgumentTypeError(f"label {value} {problem}; correct {text!r}")
        labels[value] = found[2]
    return labels


# --- values -----------------------------------------------------------------------------------------------------------


def read_values(path: Path, keep_labels: bool) -> np.ndarray:
    """(H, W) values of a mask's file, upright. Raises InputError.

    keep_labels: a palette image has its indices, and colours are an error; else a coloured pixel has its brightest
    channel, and a transparent one 0.
    """
    try:
        with Image.open(path) as image:
            pages = getattr(image, "n_frames", 1)
            if pages > 1 and image.format == "TIFF":
                raise ValueError(f"{pages} pages; write each as a file")
            image.load()
            turn_upright(image)
            return pixel_values(image, keep_labels)
    except UnidentifiedImageError:
        # DICOM, or nothing that is known
        if is_dicom(path):
            return dicom_mask(path)
        raise InputError(f"{path}: not a readable mask ({unknown_format(path)}); replace it") from None
    except InputError:
        raise
    # what a damaged file raises
    except Exception as error:
        reason = str(error).replace(str(path), "file")
        raise InputError(f"{path}: not a readable mask ({reason}); replace it") from None


def dicom_mask(path: Path) -> np.ndarray:
    """(H, W) stored values of a DICOM mask. Raises InputError."""
    try:
        values = dicom_values(path)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: not a readable mask ({reason}); export it as PNG") from None
    return values if values.ndim == 2 else values.max(axis=2)


def pixel_values(image: Image.Image, keep_labels: bool) -> np.ndarray:
    """(H, W) values of a loaded mask, see read_values. Raises ValueError for colours where there should be labels."""
    if image.mode in ("1", "L", "F") or image.mode.startswith("I"):
        values = np.asarray(image)
        if not np.isfinite(values).all():
            raise ValueError("holds values that are not finite numbers")
        return values.astype(np.uint8) if image.mode == "1" else values
    if keep_labels and image.mode == "P":
        return np.asarray(image)

    colors = np.asarray(image.convert("RGBA"))
    channels = colors[..., :3]
    alpha = colors[..., 3]
    values = channels.max(axis=2)
    if keep_labels:
        if (channels != values[..., None]).any():
            raise ValueError("coloured, so that its labels have no numbers; write it with one channel or a palette")
        return np.where(alpha > 0, values, 0)

    # a drawing on a transparent ground, which may be black
    visible = np.where(alpha > 0, values, 0)
    if alpha.min() == 0 and not visible.any():
        return alpha
    return visible


# --- what they show ---------------------------------------------------------------------------------------------------


def binary_mask(path: Path, values: np.ndarray) -> np.ndarray:
    """(H, W) bool of a mask of one structure. Raises InputError for a label map.

    0 is the background. Of more than two values those above half of the highest are foreground, as smooth edges and
    JPEG leave them.
    """
    levels = np.unique(values)
    if len(levels) <= 2:
        if len(levels) == 2 and levels[0] != 0:
            reason = f"holds {levels[0]:g} and {levels[1]:g}, and no 0 for the background"
            raise InputError(f'{path}: {reason}; say which is meant, such as --labels "{levels[1]:g}=NAME"')
        return values != 0
    if len(levels) <= FEW_VALUES:
        between = [level for level in levels[1:-1] if has_solid_area(values == level)]
        if between or levels[0] != 0:
            shown = ", ".join(f"{level:g}" for level in levels)
            raise InputError(f'{path}: a label map (values {shown}); name them, such as --labels "1=liver,2=spleen"')
    return values > levels[-1] / 2


def has_solid_area(inside: np.ndarray) -> bool:
    """Whether some pixel of a bool image and all its neighbours are inside: edges are thinner."""
    height, width = inside.shape
    solid = np.ones((max(height - 2, 0), max(width - 2, 0)), bool)
    for y in range(3):
        for x in range(3):
            solid &= inside[y : y + height - 2, x : x + width - 2]
    return bool(solid.any())


def label_masks(path: Path, values: np.ndarray, labels: Labels) -> dict[str, np.ndarray]:
    """{structure: (..., H, W) bool} of those labels that a label map holds. Raises InputError for one without a name.

    Labels of the same name are one structure.
    """
    whole = np.rint(values)
    if (whole != values).any():
        odd = values[whole != values][0]
        raise InputError(f"{path}: holds {odd:g}, and a label is a whole number; write the labels without smoothing")

    masks: dict[str, np.ndarray] = {}
    for value in np.unique(whole).astype(int).tolist():
        if value == 0:
            continue
        if value not in labels:
            named = ", ".join(f"{number}={name}" for number, name in labels.items())
            advice = f'add "{value}=NAME" to --labels, or "{value}=-" to leave it out'
            raise InputError(f"{path}: holds label {value}, which has no name ({named}); {advice}")

        # labels of one name become one
        name = labels[value]
        if name != LEFT_OUT:
            inside = whole == value
            masks[name] = masks[name] | inside if name in masks else inside
    return masks
