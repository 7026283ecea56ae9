"""utils/images.py: formats, windows, squares. utils/tables.py: rows, columns, encodings, splits, --predict."""

from pathlib import Path

import numpy as np
import pandas as pd
import pydicom
import pytest
from PIL import Image, ImageOps

from utils.cli import InputError
from utils.images import is_dicom, open_image, open_upright, square, square_box
from utils.tables import (
    find_column,
    list_questions,
    parse_shares,
    read_table,
    split_of,
)

# (30, 40): a gray ramp with a bright corner, which shows how the image is rotated
RAMP = np.linspace(0, 200, 1200).reshape(30, 40).astype(np.uint8)
RAMP[:8, :10] = 255


def save_dicom(path, values, **tags):
    """Write (H, W) values as a 16-bit DICOM file, in which 0 HU is stored as 1024."""
    dataset = pydicom.examples.ct
    dataset.Rows, dataset.Columns = values.shape
    dataset.PixelData = values.astype(np.int16).tobytes() * tags.get("NumberOfFrames", 1)
    for name, value in tags.items():
        setattr(dataset, name, value)
    dataset.save_as(path)


TURNED = Image.Exif()
TURNED[0x0112] = 6
FORMATS = {
    "16.png": lambda path: Image.fromarray(RAMP.astype(np.uint16) * 200 + 31).save(path),
    "float.tif": lambda path: Image.fromarray(RAMP / np.float32(1000) - 3).save(path),
    "rgba.png": lambda path: Image.fromarray(RAMP).convert("RGBA").save(path),
    "turned.png": lambda path: Image.fromarray(np.rot90(RAMP).copy()).save(path, exif=TURNED),
    "range.dcm": lambda path: save_dicom(path, RAMP * 16.0),
    "inverse": lambda path: save_dicom(path, 255 - RAMP, PhotometricInterpretation="MONOCHROME1"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_image(tmp_path, name):
    FORMATS[name](tmp_path / name)
    image = open_image(tmp_path / name)
    assert image.mode == "RGB"
    assert np.abs(np.asarray(image).astype(int) - RAMP[..., None]).max() <= 1


def test_dicom_window_of_the_file_or_the_caller(tmp_path):
    hu = np.linspace(-1000, 1000, 1200).reshape(30, 40).round()
    save_dicom(tmp_path / "a.dcm", hu + 1024, WindowCenter=["40", "99"], WindowWidth=["400", "9"])
    for window, low, high in ((None, -160, 240), ((0, 1000), -500, 500)):
        pixels = np.asarray(open_upright(tmp_path / "a.dcm", window))
        assert np.abs(pixels - np.interp(hu, [low, high], [0, 255])).max() <= 1


def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    """Errors of any type in Pillow and pydicom, among them that for a decompression bomb, become two types."""
    image = Image.fromarray(RAMP)
    image.save(tmp_path / "2 pages", "TIFF", save_all=True, append_images=[image])
    save_dicom(tmp_path / "2 frames", RAMP, NumberOfFrames=2)
    Image.fromarray(np.where(RAMP > 9, RAMP, np.nan).astype(np.float32)).save(tmp_path / "not finite", "TIFF")
    (tmp_path / "cannot identify").write_bytes(b"\x89PNG")
    image.save(tmp_path / "broken PNG", "PNG")
    (tmp_path / "broken PNG").write_bytes((tmp_path / "broken PNG").read_bytes().replace(b"IDAT", b"I\0AT"))
    dataset = pydicom.examples.ct
    del dataset.PixelData
    dataset.save_as(tmp_path / "no .* pixel data")
    for path in tmp_path.iterdir():
        with pytest.raises((ValueError, OSError), match=path.name):
            open_upright(path)
    image.save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="decompression bomb"):
        open_upright(tmp_path / "large.png")


def test_pydicoms_example_files_open():
    """All with one frame, except those damaged on purpose and 12-bit lossy JPEG, which GDCM cannot decode."""
    opened, failed = [], set()
    folder = Path(pydicom.data.get_testdata_file("CT_small.dcm")).parent
    for path in filter(is_dicom, sorted(folder.rglob("*"))):
        if "Rows" in pydicom.dcmread(path, stop_before_pixels=True, force=True):
            try:
                opened.append((path.name, np.asarray(open_upright(path))))
            except (ValueError, OSError) as error:
                if "frames" not in str(error):
                    failed.add(path.name)
    assert len(opened) == 81
    assert failed == {
        "JPEG-lossy.dcm", "JPGExtended.dcm", "JPEG2000-embedded-sequence-delimiter.dcm", "MR_truncated.dcm", "badVR.dcm"
    }  # fmt: skip
    pixels = dict(opened)
    assert np.array_equal(pixels["MR_small_jpeg_ls_lossless.dcm"], pixels["MR_small.dcm"])


@pytest.mark.parametrize("size", [(400, 300), (30, 60)])
def test_square_matches_pillow(size):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, size[::-1]).astype(np.uint8))
    padded = square(image, 64, Image.Resampling.BILINEAR)
    assert padded == ImageOps.pad(image, (64, 64), Image.Resampling.BILINEAR)
    assert padded.crop(square_box(size, 64)) == ImageOps.contain(image, (64, 64), Image.Resampling.BILINEAR)
    # a mask at half the resolution covers the same pixels
    assert square_box((size[0] // 2, size[1] // 2), 64) == square_box(size, 64)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_csv_and_parquet_give_the_same_rows(tmp_path):
    values = {"File": ["a.png", "b.png"], "Patient ID": ["007", ""]}
    pd.DataFrame(values).to_parquet(tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("\ufeffFile;Patient ID\na.png; 007 \nb.png;\n")
    expected = [{"file": "a.png", "patient id": "007"}, {"file": "b.png", "patient id": ""}]
    for name in ("t.csv", "t.parquet"):
        path = tmp_path / name
        assert read_table(path) == [(f"{path}:2", expected[0]), (f"{path}:3", expected[1])]
    with pytest.raises(InputError, match=r"t.csv:1: no column 'patient' \(did you mean 'patient id'\?\)"):
        find_column(read_table(tmp_path / "t.csv"), "patient")
    assert find_column(read_table(tmp_path / "t.csv")[:1], "image", "FILE") == "file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,2,3\n1,2\n4,5,6\n", r"t.csv:3, .*t.csv:5: more fields than the header \(2 rows\)"),
        ("a,b\n\udc81,1\n", "not a readable table"),
        ("a;b\n;\n;\n", "holds no rows"),
        (
            "Age;b; age\n1;2;3\n",
            r"t.csv:1: two columns are named 'age' \(capitals do not count\); rename or remove one",
        ),
    ],
)
def test_bad_table(tmp_path, text, message):
    (tmp_path / "t.csv").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=message) as raised:
        read_table(tmp_path / "t.csv")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_encodings_of_spreadsheets(tmp_path, capsys, encoding):
    path = tmp_path / "t.csv"
    path.write_bytes("Größe;Ort\r\n63,5;Köln\r\n;Ærø\r\n;\r\n\r\n".encode(encoding))
    assert [row for _, row in read_table(path)] == [{"größe": "63.5", "ort": "Köln"}, {"größe": "", "ort": "Ærø"}]
    notes = {"utf-16": ["read as UTF-16"], "cp1252": ["read as Windows-1252"]}.get(encoding, [])
    expected = [f"{path}: {line}" for line in (*notes, "decimal commas in größe")]
    assert capsys.readouterr().out.splitlines() == expected


def test_decimal_commas(tmp_path):
    """In a column of numbers only, and not where they may be English thousands separators."""
    (tmp_path / "t.csv").write_text("age;mixed;text\n63,5;1,5;1,5\nNA;2.5;x\n-1,25e2;;2\n")
    rows = [list(row.values()) for _, row in read_table(tmp_path / "t.csv")]
    assert rows == [["63.5", "1,5", "1,5"], ["NA", "2.5", "x"], ["-1.25e2", "", "2"]]
    (tmp_path / "t.csv").write_text('a,b,c\n"1,234","0,5","1,5"\n900,"1,25",2\n')
    assert read_table(tmp_path / "t.csv")[0][1] == {"a": "1,234", "b": "0.5", "c": "1.5"}


def test_split_depends_only_on_seed_and_patient():
    shares = parse_shares("80,10,10")
    assert shares == pytest.approx(parse_shares("0.8,0.1,0.1"))
    splits = [split_of(str(patient), 3, shares) for patient in range(20_000)]
    assert splits != [split_of(str(patient), 4, shares) for patient in range(20_000)]
    for split, share in zip(("train", "val", "test"), shares, strict=True):
        assert splits.count(split) / 20_000 == pytest.approx(share, abs=0.01)
    for text in ("70,30", "0,1,1", "1,-1,1", "x"):
        with pytest.raises(Exception, match="must be the shares"):
            parse_shares(text)


def test_images_and_questions_for_predict(tmp_path):
    """A folder's images without the figures of a run in it; one file of any name; a CSV with its own questions."""
    names = ["a.png", "run/figures/curves.png", "run/b.JPG", "figures/c.png", "run/run_id", "run/notes.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [(tmp_path / name, "Is it?") for name in ("a.png", "figures/c.png", "run/b.JPG")]
    assert list_questions(str(tmp_path), "Is it?") == found
    assert list_questions(str(tmp_path / "run/run_id"), None) == [(tmp_path / "run/run_id", None)]
    with pytest.raises(InputError, match="no image there; check --predict"):
        list_questions(str(tmp_path / "run/figures"), None)
    table = tmp_path / "ask.csv"
    table.write_text("image,question\na.png,Where?\nrun/b.JPG,\n")
    assert list_questions(str(table), "Is it?") == [(tmp_path / "a.png", "Where?"), (tmp_path / "run/b.JPG", "Is it?")]
    with pytest.raises(InputError, match="ask.csv:3: no question; complete the row or give --question"):
        list_questions(str(table), None)
