"""Raw images as users have them, with a square to be found."""

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
