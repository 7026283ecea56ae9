"""Open PNG, JPEG, TIFF and DICOM images in upright orientation.

Training, data preparation and prediction all open images here, so a model always sees the same pixels.
"""

import contextlib
import zlib  # noqa: F401 - must be imported before GDCM, which has its own copy of zlib; otherwise the process crashes
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

DICOM_ENDINGS = (".dcm", ".dicom", ".ima")
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", *DICOM_ENDINGS)

# display window (center, width): center - width / 2 becomes black, center + width / 2 white
Window = tuple[float, float]


def open_image(path: str | Path) -> Image.Image:
    return open_upright(path).convert("RGB")


def open_upright(path: str | Path, window: Window | None = None, side: int | None = None, raw=False) -> Image.Image:
    """Open an image as 8-bit gray (mode L) or RGB, rotated according to its EXIF orientation tag.

    Gray values of more than 8 bits are scaled to 0..255 by `window`, by the window in the DICOM file, or by the range
    of the values, in this order of preference. side: a JPEG may be decoded at a reduced size, but each edge keeps at
    least `side` pixels. raw: return such values unrounded (mode F); integers without a DICOM window are then
    scaled by bits_window(), and floats are not scaled. Raises OSError or ValueError if the file cannot be opened.
    """
    try:
        return _open_dicom(path, window, raw) if is_dicom(path) else _open_picture(path, window, side, raw)
    except OSError:
        raise
    except Exception as error:
        # pydicom and Pillow raise many types of exceptions
        raise ValueError(str(error) or type(error).__name__) from None


def _open_picture(path: str | Path, window: Window | None, side: int | None, raw: bool) -> Image.Image:
    with Image.open(path) as image:
        if side:
            image.draft(None, (side, side))
        if image.format == "TIFF" and image.n_frames > 1:
            raise ValueError(f"a TIFF of {image.n_frames} pages; write each to its own file")
        # do not rotate an image whose EXIF block is damaged
        with contextlib.suppress(SyntaxError, ValueError):
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode[0] in "IF":
            values = np.asarray(image, np.float32)
            if not raw:
                values = to_bytes(values, window)
            elif image.mode != "F":
                values = to_bytes(values, bits_window(values), np.float32)
            return Image.fromarray(values)
        return image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")


def to_bytes(values: np.ndarray, window: Window | None = None, dtype=np.uint8) -> np.ndarray:
    """Scale values linearly so that `window` (by default, the range of the values) becomes 0..255.

    Without a window, uint8 values stay unchanged. Raises ValueError for non-finite values.
    """
    if window is None and values.dtype == np.uint8:
        return values
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("holds values that are not finite numbers")
    center, width = window or ((values.min() + values.max()) / 2, np.ptp(values))
    return (255 * ((values - center) / max(width, 1e-6) + 0.5)).clip(0, 255).astype(dtype)


def bits_window(values: np.ndarray) -> Window:
    """Return the smallest window from 0 to 2**bits - 1 that contains all values; bits is 8, 10, 12, 14 or 16.

    Unlike the range of the values, this window is usually the same for all images from one scanner.
    """
    bits = max(8, int(values.max()).bit_length())
    top = 2 ** (bits + bits % 2) - 1
    return top / 2, top


def is_dicom(path: str | Path) -> bool:
    path = Path(path)
    if path.name == "DICOMDIR" or not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(132)[128:] == b"DICM" or path.suffix.lower() in DICOM_ENDINGS


def _open_dicom(path: str | Path, window: Window | None, raw: bool) -> Image.Image:
    from pydicom import dcmread
    from pydicom.pixels import apply_color_lut, apply_modality_lut, apply_voi_lut

    dataset = dcmread(path)
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames > 1:
        raise ValueError(f"a DICOM file of {frames} frames; write each to its own file")
    stored = dataset.pixel_array
    interpretation = dataset.PhotometricInterpretation
    if interpretation == "PALETTE COLOR":
        stored = apply_color_lut(stored, dataset)
    if stored.ndim == 3:
        return Image.fromarray((stored >> 8 * (stored.itemsize - 1)).astype(np.uint8))

    # convert CT values to HU, the unit of the window
    values = apply_modality_lut(stored, dataset)
    if window is None and dataset.get("WindowWidth") and dataset.get("WindowCenter") is not None:
        window = float(np.ravel(dataset.WindowCenter)[0]), float(np.ravel(dataset.WindowWidth)[0])
    elif window is None and "VOILUTSequence" in dataset:
        values = apply_voi_lut(values.astype(stored.dtype), dataset)
    elif window is None and raw:
        values, window = stored, bits_window(stored)
    pixels = to_bytes(values, window, np.float32 if raw else np.uint8)
    return Image.fromarray(255 - pixels if interpretation == "MONOCHROME1" else pixels)


def square_box(size: tuple[int, int], side: int) -> tuple[int, int, int, int]:
    """Return the box (left, top, right, bottom) that an image of size (width, height) fills after square().

    `prediction.crop(square_box(size, side)).resize(size)` converts a square prediction to the original size.
    """
    width, height = (max(1, round(edge * side / max(size))) for edge in size)
    left, top = (side - width) // 2, (side - height) // 2
    return left, top, left + width, top + height


def square(image: Image.Image, side: int, resample: Image.Resampling) -> Image.Image:
    """Scale an image to fit into side x side pixels, keep its aspect ratio, and center it on a black square."""
    box = square_box(image.size, side)
    padded = Image.new(image.mode, (side, side))
    padded.paste(image.resize((box[2] - box[0], box[3] - box[1]), resample), box)
    return padded
