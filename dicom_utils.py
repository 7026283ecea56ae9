"""One DICOM file as an 8-bit image, read by pydicom."""

from pathlib import Path

import numpy as np
from PIL import Image

ENDINGS = (".dcm", ".dicom")
# Files that need no look inside: most, and on a network each look takes its time.
PLAIN = (".jpg", ".jpeg", ".png")
# A DICOM file without such an ending begins with 128 bytes of anything and this.
MARK = b"DICM"
MARK_AT = 128


def is_dicom(path: str | Path) -> bool:
    """Whether a file is DICOM, by its ending or by its first bytes. Raises OSError where it cannot be read."""
    name = str(path).lower()
    if name.endswith(ENDINGS + PLAIN):
        return name.endswith(ENDINGS)
    with open(path, "rb") as file:
        head = file.read(MARK_AT + len(MARK))
    return head[MARK_AT:] == MARK


def open_dicom(path: str | Path) -> Image.Image:
    """The image of a file with one frame: 8 bits, gray (L) or RGB, bright where a viewer shows it bright.

    The file's rescaling and its window or look-up table are applied, then the image is scaled to its own range.
    Raises ValueError for a file without an image or with several, and what pydicom raises for one it cannot decode.
    """
    from pydicom import dcmread
    from pydicom.pixels import apply_modality_lut, apply_voi_lut

    data = dcmread(path)
    if "PixelData" not in data:
        raise ValueError("a DICOM file without an image")
    frames = int(data.get("NumberOfFrames") or 1)
    if frames > 1:
        raise ValueError(f"a DICOM file of {frames} frames; export one of them")
    values = data.pixel_array
    if values.ndim == 3:
        return Image.fromarray(to_8_bit(values)).convert("RGB")

    # stored values to the modality's unit, and that to what is shown
    values = apply_modality_lut(values, data)
    values = apply_voi_lut(values, data)
    shown = to_8_bit(values)
    if data.get("PhotometricInterpretation") == "MONOCHROME1":
        shown = 255 - shown
    return Image.fromarray(shown)


def to_8_bit(values: np.ndarray) -> np.ndarray:
    """uint8 of the same shape: what has 8 bits as it is, all else scaled from its own range to 0..255."""
    if values.dtype == np.uint8:
        return values
    values = values.astype(np.float32)
    low = float(values.min())
    high = float(values.max())
    scaled = 255 * (values - low) / max(high - low, 1e-6)
    return scaled.astype(np.uint8)
