"""Images as users have them: 8 or 16 bits, float, palette, RGBA, turned by EXIF, or DICOM. No torch.

What a training reads and what a trained model is asked about goes through the same functions, so that an image looks
the same to a model in both.
"""

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

DICOM_ENDINGS = (".dcm", ".dicom", ".ima")


class Window(NamedTuple):
    """Which stored values become black and white: centre -/+ half the width, in HU for CT."""

    center: float
    width: float


# --- Pillow's formats, and DICOM where it knows none ------------------------------------------------------------------


def turn_upright(image: Image.Image) -> bool:
    """Turn a loaded image as its EXIF tag says, in place; returns whether the tag said so."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
        if turned:
            ImageOps.exif_transpose(image, in_place=True)
        return turned
    except (SyntaxError, ValueError, struct.error):
        # a damaged EXIF block says nothing about the orientation
        return False


def open_gray(path: str, side: int) -> Image.Image:
    """The image as 8-bit grey, upright; a JPEG is decoded at the smallest scale of at least `side` pixels."""
    try:
        with Image.open(path) as image:
            image.draft("L", (side, side))
            image.load()
            turn_upright(image)
            if image.mode[:1] not in "IF":
                return image.convert("L")
            values = np.asarray(image, np.float32)
    except UnidentifiedImageError:
        if not is_dicom(path):
            raise unknown_format(path) from None
        return dicom_image(path).convert("L")
    return Image.fromarray(to_bytes(values, None))


def to_bytes(values: np.ndarray, window: Window | None) -> np.ndarray:
    """Numbers as uint8: those of the window, or of their own range, become 0 to 255; without a window 8 bits stay.

    Raises ValueError for NaN.
    """
    if window is None and values.dtype == np.uint8:
        return values
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("holds values that are not finite numbers")
    low = float(values.min())
    high = float(values.max())
    if window:
        low = window.center - window.width / 2
        high = window.center + window.width / 2
    scaled = 255 * (values - low) / max(high - low, 1e-6)
    return scaled.clip(0, 255).astype(np.uint8)


# --- DICOM ------------------------------------------------------------------------------------------------------------


def is_dicom(path: str | Path) -> bool:
    """Whether a file begins as DICOM does: 128 bytes of anything, then its name."""
    try:
        with open(path, "rb") as opened:
            return opened.read(132)[128:] == b"DICM"
    except OSError:
        return False


def unknown_format(path: str | Path) -> ValueError:
    """The error of a file that is neither DICOM nor of a format that Pillow knows; the caller names it."""
    if str(path).lower().endswith(DICOM_ENDINGS):
        return ValueError("not a DICOM file, though it is named as one; export it again, as DICOM or PNG")
    return ValueError("of no known format, or cut short")


def read_dicom(path: str | Path):
    """A pydicom dataset with one image in it. Raises ValueError, and what pydicom raises."""
    from pydicom import dcmread

    dataset = dcmread(path)
    if "PixelData" not in dataset:
        raise ValueError("DICOM without an image")
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames > 1:
        raise ValueError(f"DICOM of {frames} frames; export each as a file")
    return dataset


def dicom_image(path: str | Path) -> Image.Image:
    """A DICOM image in 8 bits, grey or RGB: by its window, or by the range of its values.

    MONOCHROME1 is inverted, so that bone is bright.
    """
    from pydicom.pixels import apply_color_lut, apply_modality_lut, apply_voi_lut

    dataset = read_dicom(path)
    stored = dataset.pixel_array
    kind = dataset.get("PhotometricInterpretation", "MONOCHROME2")
    if kind == "PALETTE COLOR":
        stored = apply_color_lut(stored, dataset)
    if stored.ndim == 3:
        bits = 8 * stored.dtype.itemsize
        return Image.fromarray((stored >> (bits - 8)).astype(np.uint8))

    # grey: HU where it is CT, then the window
    values = apply_modality_lut(stored, dataset)
    window = own_window(dataset)
    if window is None and "VOILUTSequence" in dataset:
        values = apply_voi_lut(values.astype(stored.dtype), dataset)
    pixels = to_bytes(values, window)
    if kind == "MONOCHROME1":
        pixels = 255 - pixels
    return Image.fromarray(pixels)


def own_window(dataset) -> Window | None:
    """The first window that a DICOM file names, None without one."""
    center = first_number(dataset.get("WindowCenter"))
    width = first_number(dataset.get("WindowWidth"))
    if center is None or width is None or width <= 0:
        return None
    return Window(center, width)


def first_number(value) -> float | None:
    """A DICOM number, or the first of several."""
    if value is None or value == "":
        return None
    values = value if hasattr(value, "__len__") and not isinstance(value, str) else [value]
    return float(values[0]) if len(values) else None
