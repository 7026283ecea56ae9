"""utils/volumes.py: DICOM series and NIfTI files as hospitals export them, compared voxel by voxel."""

import random
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
from pydicom import dcmread
from pydicom.uid import RLELossless

from utils.cli import InputError
from utils.volumes import describe, read_volume

# a volume in RAS+
HU = np.random.default_rng(0).integers(-1000, 2000, (5, 6, 8)).astype(np.int16)
SPACING = (0.7, 0.8, 2.0)
AFFINE = np.diag([*SPACING, 1.0])
AFFINE[:3, 3] = -10, 20, 30


def write_series(folder: Path, hu: np.ndarray, spacing=SPACING, plane="axial", uid="1.2.3") -> list[Path]:
    """Write hu (X, Y, Z) as a CT series in random file order; return the files from foot to head.

    Every second slice has another slope.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # in DICOM, x points to the left and y to the back
    hu, origin = hu[::-1, ::-1], AFFINE[:3, 3] + (np.array(hu.shape) - 1) * spacing
    origin = np.array([-origin[0], -origin[1], AFFINE[2, 3]])
    row, column, normal = {"axial": (0, 1, 2), "coronal": (0, 2, 1), "sagittal": (1, 2, 0)}[plane]
    names = random.Random(0).sample(range(100), hu.shape[normal])
    for k, name in enumerate(names):
        one = pydicom.examples.ct
        one.SeriesInstanceUID = uid
        one.ImagePositionPatient = (origin + np.eye(3)[normal] * k * spacing[normal]).tolist()
        one.ImageOrientationPatient = np.eye(3)[[row, column]].ravel().tolist()
        one.PixelSpacing = [spacing[column], spacing[row]]
        picture = np.moveaxis(hu, (column, row, normal), (0, 1, 2))[..., k].astype(int)
        one.Rows, one.Columns = picture.shape
        one.RescaleSlope = 1 / (1 + k % 2)
        one.PixelData = ((picture + 1024) * (1 + k % 2)).astype(np.int16).tobytes()
        one.save_as(folder / f"IM{name:03d}")
    return [folder / f"IM{name:03d}" for name in names]


def change(path: Path, **tags) -> None:
    one = dcmread(path)
    for name, value in tags.items():
        setattr(one, name, value)
    one.save_as(path)


def save_nifti(path: Path, codes: str) -> Path:
    turn = nibabel.orientations.ornt_transform(*map(nibabel.orientations.axcodes2ornt, ("RAS", codes)))
    nibabel.save(nibabel.Nifti1Image(HU, AFFINE).as_reoriented(turn), path)
    return path


@pytest.mark.parametrize(("plane", "codes"), [("axial", "LPS"), ("coronal", "LSA"), ("sagittal", "PSL")])
def test_series_is_sorted_by_position(tmp_path, plane, codes):
    """In a subfolder, without file extensions, one file compressed, beside other files and an X-ray."""
    files = write_series(tmp_path / "a/b", HU, plane=plane)
    (tmp_path / "a/DICOMDIR").write_bytes(files[0].read_bytes())
    (tmp_path / "a/notes.txt").write_text("exported on a Monday")
    (tmp_path / "a/link").symlink_to(tmp_path / "gone")
    xray = dcmread(files[0])
    del xray.ImagePositionPatient
    xray.SeriesInstanceUID = "1.2.9"
    xray.save_as(tmp_path / "a/b/xray")
    packed = dcmread(files[2])
    packed.compress(RLELossless)
    packed.save_as(files[2])
    volume = read_volume(tmp_path)
    np.testing.assert_array_equal(volume.values, HU)
    np.testing.assert_allclose(volume.affine, AFFINE, atol=1e-9)
    np.testing.assert_allclose(volume.spacing, SPACING)
    assert volume.codes == codes
    # in the file's own orientation: the same voxels at the same positions
    raw = read_volume(tmp_path, orientation=None)
    image = nibabel.as_closest_canonical(nibabel.Nifti1Image(raw.values, raw.affine))
    np.testing.assert_array_equal(image.get_fdata(), HU)
    np.testing.assert_allclose(image.affine, AFFINE, atol=1e-6)


def test_a_file_selects_one_of_two_series(tmp_path):
    one = min(write_series(tmp_path, HU))
    two = min(write_series(tmp_path / "new", HU[..., 4:7], (0.7, 0.8, 5), uid="1.2.4"))
    names = rf"1.2.3 \(8 files, as {one}\), 1.2.4 \(3 files, as {two}\)"
    with pytest.raises(InputError, match=rf"^{tmp_path}: holds 2 series .*{names}; keep one there, or name one of its"):
        read_volume(tmp_path)
    np.testing.assert_array_equal(read_volume(one).values, HU)
    volume = read_volume(two)
    np.testing.assert_array_equal(volume.values, HU[..., 4:7])
    np.testing.assert_allclose(volume.spacing, (0.7, 0.8, 5))


# (what damages the files, the error; {k} is the name of slice k)
DAMAGE = {
    "missing": (
        lambda files: files[3].unlink(),
        r"4 mm between .*{2} at \[.*34.0\] and .*{4} at \[.*38.0\], where 2 are",
    ),
    "1 % more": (
        lambda files: change(files[7], ImagePositionPatient=[7.2, -24, 44.03]),
        "2.03 mm between .*{6} .* and .*{7}",
    ),
    "twice": (
        lambda files: (files[0].parent / "copy").write_bytes(files[2].read_bytes()),
        "0 mm between .* missing or",
    ),
    "shifted": (
        lambda files: change(files[4], ImagePositionPatient=[9.2, -24, 38]),
        "between .*{3} .* and .*{4} .*: slices",
    ),
    "tilted": (
        lambda files: [change(file, ImagePositionPatient=[0, 0.3 * k, 2 * k]) for k, file in enumerate(files)],
        "its axes are not at right angles, as a tilted gantry",
    ),
    "spacing": (lambda files: change(files[5], PixelSpacing=[0.9, 0.7]), "another size, orientation or pixel spacing"),
    "no slope": (
        lambda files: [change(file, RescaleSlope=None) for file in files],
        "no usable RescaleSlope .* export the series anew",
    ),
    "not HU": (lambda files: change(files[5], RescaleType="Z_EFF"), "{5}: values in Z_EFF, not HU"),
    "bad pixels": (lambda files: change(files[5], PixelData=b"12"), "{5}: cannot be decoded"),
    "empty file": (
        lambda files: files[7].rename(files[7].with_suffix(".dcm")).write_bytes(b""),
        "{7}.dcm: a damaged DICOM file, or none",
    ),
    "frames": (lambda files: change(files[2], NumberOfFrames=2), "{2}: several frames in one file"),
    "one slice": (lambda files: [file.unlink() for file in files[1:]], "one slice alone is no volume; give the folder"),
    "no slice": (lambda files: [file.unlink() for file in files], "holds no DICOM slices with a position"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_irregular_series(tmp_path, kind):
    files = write_series(tmp_path / "scan", HU)
    damage, line = DAMAGE[kind]
    damage(files)
    with pytest.raises(InputError, match=line.format(*(file.name for file in files))) as raised:
        read_volume(tmp_path / "scan")
    assert str(raised.value).startswith(str(tmp_path / "scan"))
    assert "\n" not in str(raised.value)


def test_all_mr_slices_have_a_slope_or_none(tmp_path):
    files = write_series(tmp_path, HU)
    for k, file in enumerate(files):
        pixels = (HU[::-1, ::-1, k].T + 1024).tobytes()
        change(file, Modality="MR", PixelData=pixels, RescaleSlope=None, RescaleIntercept=None)
    np.testing.assert_array_equal(read_volume(tmp_path).values, HU + 1024)
    change(files[3], RescaleSlope=2, RescaleIntercept=0)
    with pytest.raises(InputError, match="no usable RescaleSlope"):
        read_volume(tmp_path)


def test_positions_may_be_rounded(tmp_path):
    """With two decimals, a spacing of 0.625 mm alternates between 0.62 and 0.63."""
    for k, file in enumerate(write_series(tmp_path, HU)):
        change(file, ImagePositionPatient=[0, 0, round(0.625 * k + 1e-9, 2)])
    np.testing.assert_allclose(read_volume(tmp_path).spacing[2], 0.625, atol=1e-3)


def test_nifti_is_reoriented_scaled_and_squeezed(tmp_path):
    for codes in ("RAS", "LPS", "PIR"):
        volume = read_volume(save_nifti(tmp_path / f"{codes}.nii.gz", codes))
        np.testing.assert_array_equal(volume.values, HU)
        np.testing.assert_allclose(volume.affine, AFFINE, atol=1e-5)
        assert volume.codes == codes
    # a fourth axis of length 1, and stored values with a slope and an intercept
    image = nibabel.Nifti1Image((HU + 1024)[..., None].astype(np.uint16), AFFINE)
    image.header.set_slope_inter(0.5, -1024)
    nibabel.save(image, tmp_path / "scaled.nii")
    scaled = read_volume(tmp_path / "scaled.nii", orientation="SPL").values
    np.testing.assert_allclose(scaled, ((HU + 1024) * 0.5 - 1024)[::-1, ::-1].transpose(2, 1, 0))


def test_unusable_nifti(tmp_path):
    both = np.stack([HU, -HU], -1)
    nibabel.save(nibabel.Nifti1Image(both, AFFINE), tmp_path / "4d.nii")
    np.testing.assert_array_equal(read_volume(tmp_path / "4d.nii", first_channel=True).values, HU)
    nibabel.save(nibabel.Nifti1Image(np.where(HU > 0, np.nan, HU), AFFINE), tmp_path / "nan.nii")
    sheared = AFFINE.copy()
    sheared[1, 2] = 0.3
    nibabel.save(nibabel.Nifti1Image(HU, sheared), tmp_path / "sheared.nii")
    (tmp_path / "text.nii.gz").write_bytes(b"\x1f\x8b no volume")
    lines = {
        "4d.nii": "not one volume",
        "nan.nii": "not finite",
        "sheared.nii": "right angles",
        "text.nii.gz": "file type",
        "none.nii": "No such",
    }
    for name, line in lines.items():
        path = tmp_path / name
        with pytest.raises(InputError, match=rf"^{path}: cannot be used \(.*(?i:{line}).*\); correct or replace it"):
            read_volume(path)


def test_description_of_a_data_set(tmp_path):
    """A file without qform and sform has unknown axes."""
    nibabel.save(nibabel.Nifti1Image(HU, None), tmp_path / "unknown.nii")
    paths = [save_nifti(tmp_path / f"{name}.nii", codes) for name, codes in (("a", "LPS"), ("b", "LPS"), ("c", "RAS"))]
    found = [read_volume(path).summary() for path in (*paths, tmp_path / "unknown.nii")]
    sizes = "voxels 0.7 to 1 x 0.8 to 1 x 1 to 2 mm"
    assert describe(np.array(found), "RAS") == f"2 LPS, 1 RAS, 1 of unknown axes, turned to RAS; {sizes}"
    assert describe(np.array(found[2:3]), "RAS") == "1 RAS; voxels 0.7 x 0.8 x 2 mm"
