"""What guide 0 finds in its images and masks before the first step, and what it makes of them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import PRS_MED
from PIL import Image, ImageDraw

from tasks.prs_med.data import misfit, open_mask, open_upright, read_annotations
from tasks.prs_med.file_facts import lost_levels, solid_pixels

FLAGS = ["--batch_size", "4", "--max_steps", "1", "--max_new_tokens", "2", "--log_every", "1"]
# EXIF: the camera was held a quarter turn to the left
TURNED = 6


def save_turned(path: Path, values: np.ndarray) -> None:
    """Write an image that only its EXIF tag turns upright."""
    exif = Image.Exif()
    exif[0x0112] = TURNED
    Image.fromarray(np.rot90(values).copy()).save(path, exif=exif)


def shape(size: int = 64, values: tuple[int, ...] = (255,)) -> Image.Image:
    """An ellipse for each value, from left to right."""
    image = Image.new("L", (size, size), 0)
    draw = ImageDraw.Draw(image)
    width = size // len(values)
    for k, value in enumerate(values):
        left = k * width + 2
        right = (k + 1) * width - 3
        draw.ellipse([left, size // 4, right, 3 * size // 4], fill=value)
    return image


@pytest.mark.parametrize("mode", ["L", "RGB", "I;16"])
def test_exif_orientation_is_applied(tmp_path, mode):
    values = np.asarray(shape(40))
    if mode == "RGB":
        values = np.repeat(values[..., None], 3, 2)
    if mode == "I;16":
        values = np.arange(30 * 20, dtype=np.uint16).reshape(30, 20) * 100
    plain = tmp_path / "plain.png"
    turned = tmp_path / "turned.png"
    Image.fromarray(values).save(plain)
    save_turned(turned, values)

    # the same image, of which one was turned, and the same mask
    image, was_turned = open_upright(str(plain))
    other, other_was_turned = open_upright(str(turned))
    assert np.array_equal(np.asarray(image), np.asarray(other))
    assert was_turned is False
    assert other_was_turned is True
    assert np.array_equal(open_mask(str(turned)), open_mask(str(plain)))


def test_a_damaged_exif_block_turns_nothing(tmp_path):
    shape().save(tmp_path / "a.jpg", exif=b"Exif\0\0garbage")
    _, was_turned = open_upright(str(tmp_path / "a.jpg"))
    assert was_turned is False


@pytest.mark.parametrize(
    ("values", "lost"),
    [((255,), []), ((255, 85, 170), [85]), ((255, 1, 2, 3), [1, 2, 3]), ((1, 2, 3), []), ((85,), [])],
)
def test_label_maps_and_the_127_rule(values, lost):
    """Values that the rule takes for background are found; where nothing is above 127, all above 0 is foreground."""
    mask = np.asarray(shape(96, values))
    assert lost_levels(mask, solid_pixels(mask)) == lost


@pytest.mark.parametrize("size", [32, 96])
def test_smeared_masks_are_no_label_maps(tmp_path, size):
    """JPEG of any quality, scaled up and down; a label map that went through JPEG is still found."""
    path = tmp_path / "a.jpg"
    for quality in (10, 25, 50, 75, 90, 100):
        shape(size).save(path, quality=quality)
        smeared = Image.open(path)
        for side in (size, size // 2, size * 2 + 5):
            for method in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC):
                values = np.asarray(smeared.resize((side, side), method))
                assert lost_levels(values, solid_pixels(values)) == []
    shape(256, (255, 85)).save(path, quality=75)
    values = np.asarray(Image.open(path))
    assert 85 in lost_levels(values, solid_pixels(values))


@pytest.mark.parametrize(
    ("mask", "image", "message"),
    [
        ((64, 64), (256, 256), ""),
        ((101, 100), (256, 256), ""),
        ((103, 100), (256, 256), "mask of 103 x 100 pixels does not fit its image of 256 x 256"),
        ((300, 400), (400, 300), "(width and height swapped)"),
    ],
)
def test_shapes_that_fit(mask, image, message):
    assert message in misfit(mask, image)
    assert bool(message) == bool(misfit(mask, image))


@pytest.fixture
def odd(prs_med_data, tmp_path) -> Path:
    """The data with a few odd but possible files: turned by EXIF, empty, full, 1 to 3 beside 255, nearly square."""
    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    rows = [row for row in read_annotations(root, ["lung_CT"], False) if row.split == "train"]
    turned, empty, full, labelled, swapped = rows[:5]
    save_turned(turned.image, np.asarray(Image.open(turned.image)))
    size = Image.open(empty.mask).size
    Image.new("L", size, 0).save(empty.mask)
    Image.new("L", size, 255).save(full.mask)
    shape(size[0], (255, 2)).save(labelled.mask)
    Image.open(swapped.image).resize((150, 151)).save(swapped.image)
    Image.open(swapped.mask).resize((151, 150)).save(swapped.mask)
    return root


def test_findings_are_counted(odd, zygote, tmp_path):
    """In a table ahead of the first step, each with its number of rows and the first of them; the same on two ranks."""
    tables = {}
    for ranks in (1, 2):
        flags = ["--data_root", odd, "--checkpoint_dir", tmp_path / f"run{ranks}", "--annotations", "lung_CT", *FLAGS]
        done = zygote(PRS_MED, *flags, ranks=ranks)
        assert done.code == 0, done.stderr
        _, _, below = done.stdout.partition("data check")
        table, _, _ = below.partition("== PRS-Med")
        # below the table stands what to do
        tables[ranks] = [line.rsplit(maxsplit=2) for line in table.splitlines()[1:] if not line.startswith("  ")]

    # by finding
    rows = {}
    for name, count, first in tables[1]:
        rows[name.strip()] = (int(count), Path(first).name)
    assert rows == {
        "only one of image and mask turned as EXIF says": (1, "lung_CT.csv:2"),
        "mask empty": (1, "lung_CT.csv:3"),
        "answer names a position, the mask is empty": (1, "lung_CT.csv:3"),
        # the label map is a mask of another shape
        "answer names another position than the mask": (1, "lung_CT.csv:5"),
        "`position` column contradicts the mask": (1, "lung_CT.csv:5"),
        "mask all foreground": (1, "lung_CT.csv:4"),
        "mask values below 32 left out": (1, "lung_CT.csv:5"),
        "mask's width and height swapped": (1, "lung_CT.csv:6"),
    }
    assert tables[1] == tables[2]
