"""Raw images as users have them: files of every format that prepare_data.py understands, with a square to be found."""

from pathlib import Path

import numpy as np
import pydicom
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

SIDE = 40
# EXIF: the camera was held a quarter turn to the left
TURNED = 6
EXIF_ORIENTATION = 0x0112


def square(corner: tuple[int, int] = (4, 6), side: int = 12) -> np.ndarray:
    """(40, 40) bool; corner: row and column of the square's first pixel."""
    mask = np.zeros((SIDE, SIDE), bool)
    row, column = corner
    mask[row : row + side, column : column + side] = True
    return mask


def gray(mask: np.ndarray) -> np.ndarray:
    """(H, W) uint8: a ramp on which the mask is bright; its range is 0 to 255."""
    ramp = np.linspace(0, 100, mask.size)
    values = np.where(mask, 255, ramp.reshape(mask.shape))
    return values.astype(np.uint8)


def save_turned(path: Path, values: np.ndarray) -> None:
    """Write an image that only its EXIF tag turns upright."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = TURNED
    Image.fromarray(np.rot90(values).copy()).save(path, exif=exif)


def save_dicom(path: Path, values: np.ndarray, **tags) -> None:
    """Write a 16-bit grey DICOM image."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)

    # what a viewer needs
    facts = {
        "SOPClassUID": meta.MediaStorageSOPClassUID,
        "SOPInstanceUID": meta.MediaStorageSOPInstanceUID,
        "Rows": values.shape[0],
        "Columns": values.shape[1],
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "BitsAllocated": 16,
        "BitsStored": 16,
        "HighBit": 15,
        "PixelRepresentation": 0,
    }

    # with what is asked for
    for name, value in (facts | tags).items():
        setattr(dataset, name, value)
    if "NumberOfFrames" not in tags:
        dataset.PixelData = values.astype(np.uint16).tobytes()
    else:
        dataset.PixelData = values.astype(np.uint16).tobytes() * tags["NumberOfFrames"]
    pydicom.dcmwrite(path, dataset, enforce_file_format=True)


def palette_image(mask: np.ndarray) -> Image.Image:
    """A palette image whose index 1 is dark green: its brightest channel is below 128."""
    image = Image.fromarray(mask.astype(np.uint8))
    image.putpalette([0, 0, 0, 0, 100, 0])
    return image


def drawn_on_nothing(mask: np.ndarray, color: tuple[int, int, int]) -> Image.Image:
    """An RGBA image that is transparent outside the mask."""
    pixels = np.zeros((*mask.shape, 4), np.uint8)
    pixels[mask] = (*color, 255)
    return Image.fromarray(pixels)


def write_raw_set(folder: Path, count: int = 20) -> None:
    """scans/ and masks/ of so many images in turn: 16-bit, RGBA, palette, names with blanks, dots and umlauts."""
    scans = folder / "scans"
    masks = folder / "masks"
    scans.mkdir(parents=True)
    masks.mkdir()
    corners = [(3, 3), (3, 25), (25, 3), (25, 25), (14, 14)]
    for number in range(count):
        mask = square(corners[number % 5])
        values = gray(mask)
        # no two images are alike
        values[-1, number % SIDE] = 50 + number
        kind = number % 4

        # a name and a format of each kind
        if kind == 0:
            Image.fromarray(values.astype(np.uint16) * 16 + 200).save(scans / f"patient {number:02d}.png")
            Image.fromarray(mask.astype(np.uint8) * 255).save(masks / f"patient {number:02d}_mask.PNG")
        elif kind == 1:
            Image.fromarray(values).convert("RGBA").save(scans / f"Über.{number:02d}.tif")
            drawn_on_nothing(mask, (255, 0, 0)).save(masks / f"über.{number:02d}_seg.png")
        elif kind == 2:
            Image.fromarray(values).save(scans / f"c{number:02d}.JPG", quality=95)
            palette_image(mask).save(masks / f"c{number:02d}.png")
        else:
            save_dicom(scans / f"d{number:02d}.dcm", values.astype(np.uint16))
            Image.fromarray(mask.astype(np.uint8)).save(masks / f"d{number:02d}_gt.bmp")
