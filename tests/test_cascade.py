"""Guide 3: geometry, rivals, noise, loss and scores against references of their own; the script as a user runs it."""

import json
import math
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

import train_accelerate as script
from tasks.cascade import geometry as geo
from tasks.cascade import report
from tasks.cascade.data import Data, XrayCtDataset, find_patients, move, split_patients

ROOT = Path(__file__).resolve().parents[1]
FIRST_NUMBERS = [1.084303, -1.091417, -0.093704, 0.337714]
GREYS = [geo.Grey(0.2, -1.0, 0.02), geo.Grey(0.19, -0.9, 0.05)]


def random_volumes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 1.2 - 1


def xrays_of(volumes: torch.Tensor, extent: torch.Tensor, noise: float = 0.0) -> torch.Tensor:
    """(B, 2, side, side) pictures of volumes with equal sides; noise of a line integral."""
    generator = torch.Generator().manual_seed(1)
    images = [
        grey.slope * (image + noise * torch.randn(image.shape, generator=generator)) + grey.offset
        for view, grey in enumerate(GREYS)
        for image in [geo.project(volumes, extent, view)[:, 0]]
    ]
    return torch.stack(images, 1)


# --- geometry ---------------------------------------------------------------------------------------------------------


def test_line_integrals_are_mu_times_length():
    """Against a sum over voxels in NumPy, of a CT whose axes have different lengths."""
    rng = np.random.default_rng(0)
    hu, mm = rng.uniform(-1000, 1500, (6, 5, 4)), np.array([120.0, 200.0, 90.0])
    volume = geo.normalise(torch.from_numpy(hu).float())[None, None]
    mu = 0.0193 * (1 + hu / 1000)
    for view, axis in ((0, 1), (1, 0)):
        found = geo.project(volume, torch.tensor(mm[None]).float(), view)[0, 0].numpy()
        # rows from the head down; columns from the right (x highest), or from the front (y highest)
        expected = (mu.sum(axis) * mm[axis] / hu.shape[axis]).T[::-1, ::-1]
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_drr_has_square_pixels_and_bone_is_white():
    hu = np.full((10, 20, 30), -1000.0)
    hu[8:, :, 25:] = 1000
    image = geo.render_drr(hu, np.array([2.0, 1.0, 1.0]), 0, longest=60)
    assert image.shape == (60, 40)
    # the patient's right is at the left of a frontal picture, the head above
    assert image[0, 0] == round(20 * 0.0193 * 2 / 10 * 255)
    assert image[-1, -1] == 0


@pytest.mark.parametrize("sizes", [((12, 9, 10), (6, 3, 5)), ((12, 9, 10), (5, 4, 7)), ((6, 6, 6), (9, 8, 6))])
def test_a_resized_volume_has_resized_projections(sizes):
    before, after = sizes
    volume, extent = random_volumes(2, 1, *before), torch.tensor([[100.0, 120.0, 90.0]] * 2)
    for view in (0, 1):
        image = geo.project(geo.resize(volume, after), extent, view)
        whole = geo.resize(geo.project(volume, extent, view), image.shape[-2:])
        shrinks = all(new <= old for old, new in zip(before, after, strict=True))
        if shrinks:
            torch.testing.assert_close(image, whole, rtol=1e-4, atol=1e-4)
        assert image.shape == whole.shape


def test_cells_become_channels_and_come_back():
    volume = random_volumes(2, 1, 4, 6, 8)
    cells = script.fold(volume)
    assert cells.shape == (2, 8, 2, 3, 4)
    assert torch.equal(script.unfold(cells), volume)
    assert cells[1, :, 1, 2, 3].tolist() == volume[1, 0, 2:4, 4:6, 6:8].flatten().tolist()


# --- agreement and rivals ---------------------------------------------------------------------------------------------


def rays_matrix(size: tuple, views: int) -> np.ndarray:
    """(P, voxels): which voxels each ray of all views adds up."""
    voxels = np.eye(math.prod(size)).reshape(-1, *size)
    return np.concatenate([voxels.sum(axis - 1).reshape(len(voxels), -1) for axis in geo.RAYS[:views]], 1).T


@pytest.mark.parametrize("views", [1, 2])
def test_agreement_is_the_best_linear_correction(views):
    """One correction, of volumes that need no clipping, against the formula solved as a dense system in float64."""
    size, variance = (4, 3, 5), 0.02
    volume, true = 0.2 * random_volumes(2, 1, *size), 0.2 * random_volumes(2, 1, *size, seed=1)
    measured = geo.Measured(
        [true.sum(axis) for axis in geo.RAYS[:views]], [torch.full((2, 1, 1, 1), n) for n in (0.01, 0.3)[:views]]
    )
    found = geo.agree(volume, measured, variance, corrections=1).double()
    a = rays_matrix(size, views)
    noise = np.concatenate([np.full(s[0].numel(), float(n[0])) for s, n in zip(*measured, strict=True)])
    for i in range(2):
        v, y = volume[i].numpy().ravel(), np.concatenate([s[i].numpy().ravel() for s in measured.sums])
        z = np.linalg.solve(variance * a @ a.T + np.diag(noise), y - a @ v)
        np.testing.assert_allclose(found[i].numpy().ravel(), v + variance * a.T @ z, atol=1e-6)


def agree_by_conjugate_gradients(volume, measured, variance, corrections):
    """As agree(), in float64, each correction solved by 200 rounds of conjugate gradients."""
    volume = volume.double()
    sums, noise = ([part.double() for part in parts] for parts in measured)

    def spread(z):
        return sum(part.unsqueeze(axis) for part, axis in zip(z, geo.RAYS, strict=True))

    def system(z):
        back = variance * spread(z)
        return [back.sum(axis) + n * part for axis, n, part in zip(geo.RAYS, noise, z, strict=True)]

    def inner(a, b):
        return sum((x * y).sum((1, 2, 3), keepdim=True) for x, y in zip(a, b, strict=True))

    explained = [torch.zeros_like(part) for part in sums]
    for _ in range(corrections):
        rest = [s - volume.sum(a) - n * z for s, a, n, z in zip(sums, geo.RAYS, noise, explained, strict=True)]
        z, direction = [torch.zeros_like(part) for part in rest], rest
        square = inner(rest, rest)
        for _ in range(200):
            along = system(direction)
            step = square / inner(direction, along).clamp(min=1e-300)
            z = [a + step * b for a, b in zip(z, direction, strict=True)]
            rest = [a - step * b for a, b in zip(rest, along, strict=True)]
            new = inner(rest, rest)
            direction = [a + new / square.clamp(min=1e-300) * b for a, b in zip(rest, direction, strict=True)]
            square = new
        explained = [a + b for a, b in zip(explained, z, strict=True)]
        volume = (volume + variance * spread(z)).clamp(-1, 1)
    return volume


@pytest.mark.parametrize("corrections", [1, 2, 4])
def test_agreement_equals_conjugate_gradients(corrections):
    volume, true = random_volumes(2, 1, 24, 20, 18), random_volumes(2, 1, 24, 20, 18, seed=1)
    extent = torch.tensor([[380.0, 300.0, 340.0], [300.0, 280.0, 350.0]])
    xrays = torch.stack([geo.resize(geo.project(true, extent, view)[:, 0], (32, 32)) for view in (0, 1)], 1)
    measured = geo.measure(xrays, extent, [geo.Grey(1.0, 0.0, 0.02), geo.Grey(1.0, 0.0, 0.06)], (24, 20, 18))
    found = geo.agree(volume, measured, 0.05**2, corrections)
    expected = agree_by_conjugate_gradients(volume, measured, 0.05**2, corrections)
    assert (found - expected).abs().max() <= 1e-6


def psnr(volume: torch.Tensor, true: torch.Tensor) -> float:
    return float((10 * torch.log10(4 / (volume - true).square().mean((1, 2, 3, 4)))).mean())


def smooth_patients(count: int, side: int = 16) -> torch.Tensor:
    """(N, X, Y, Z): bodies of a few soft blobs, so that few numbers tell most of them."""
    generator = torch.Generator().manual_seed(3)
    at = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, side)] * 3, indexing="ij"))
    volumes = torch.full((count, side, side, side), -1.0)
    for middle, radius in (((0, 0, 0), 0.8), ((0.3, 0.2, 0), 0.4), ((-0.3, 0, 0.2), 0.3)):
        size = radius * (0.8 + 0.4 * torch.rand(count, generator=generator))
        place = torch.tensor(middle) + 0.2 * torch.randn(count, 3, generator=generator)
        distance = (at[None] - place[:, :, None, None, None]).square().sum(1).sqrt()
        volumes = volumes + 0.5 * torch.sigmoid(12 * (size[:, None, None, None] - distance))
    return volumes


def test_rivals_get_worse_smoothly_as_x_rays_get_noisier():
    """Solved with the noise that is there, no rival diverges: from .01 to .2 of a line integral PSNR falls, slowly."""
    patients = smooth_patients(24)
    true, extent = patients[20:, None], torch.tensor([[300.0, 300.0, 300.0]] * 4)
    found = []
    for noise in (0.01, 0.03, 0.06, 0.1, 0.2):
        greys = [grey._replace(noise=noise) for grey in GREYS]
        seen = geo.rays_of(
            xrays_of(patients[:20, None], extent[:1].expand(20, -1), noise), extent[:1].expand(20, -1), greys, [16] * 3
        )
        prior = geo.learn_prior(patients[:20], seen, greys)
        known = xrays_of(true, extent, noise), extent
        measured = geo.measure(*known, greys, (16,) * 3)
        linear = prior.volume(*known, torch.full((4,), -1), [16] * 3)
        rivals = (linear, prior.mean.expand_as(linear), geo.back_projection(*known, greys, (16,) * 3))
        found.append([psnr(geo.agree(volume, measured, prior.variance, 30), true) for volume in rivals])
    steps = np.diff(np.array(found), axis=0)
    assert (steps < 0.05).all(), found
    assert (steps > -6).all(), found


def test_linear_posterior_leaves_a_patient_out_of_all_it_knows():
    """The closed form equals a ridge regression fitted without the patient: without his column, and in the mean."""
    patients = smooth_patients(9, side=6)
    extent = torch.tensor([[300.0, 300.0, 300.0]] * 9)
    xrays = xrays_of(patients[:, None], extent, 0.02)
    rays = geo.rays_of(xrays, extent, GREYS, [6] * 3)
    prior = geo.learn_prior(patients, rays, GREYS, rank=9)
    found = prior.volume(xrays, extent, torch.arange(9), [6] * 3)

    flat = patients.flatten(1).double().numpy()
    true_rays = np.concatenate([patients.mean(axis - 1).flatten(1).double().numpy() for axis in geo.RAYS], 1)
    deviations = true_rays - true_rays.mean(0)
    penalty = prior.penalty * np.trace(deviations @ deviations.T) / 9
    errors = []
    for i in range(9):
        others = np.delete(np.arange(9), i)
        mean, centre = flat[others].mean(0), true_rays[others].mean(0)
        s = true_rays[others] - centre
        w = np.linalg.solve(s @ s.T + penalty * np.eye(8), s @ (rays[i].double().numpy() - centre))
        expected = mean + w @ (flat[others] - mean)
        np.testing.assert_allclose(found[i].flatten().numpy(), expected.clip(-1, 1), atol=2e-4)
        errors.append(((expected - flat[i]) ** 2).mean())
    assert prior.error == pytest.approx(np.mean(errors), rel=1e-3)
    assert prior.variance == pytest.approx(((flat - flat.mean(0)) ** 2).mean(), rel=1e-4)
    # a new patient is answered by all nine, and the form on a coarser grid is that answer, resized
    new = prior.volume(xrays[:1], extent[:1], torch.tensor([-1]), [6] * 3)
    assert (new - found[:1]).abs().max() > 1e-3
    coarse = prior.on(torch.device("cpu"), [3] * 3).volume(xrays[:1], extent[:1], torch.tensor([-1]), [3] * 3)
    torch.testing.assert_close(coarse, geo.resize(new, [3] * 3), atol=0.02, rtol=0)


# --- noise ------------------------------------------------------------------------------------------------------------


def test_hashed_noise_is_gaussian_and_independent():
    """60 seeds of 2^18 values: moments, lags, halves, streams and Kolmogorov-Smirnov; z-scores as chance has them."""
    n = 2**18
    noise = script.hashed_normal((60, n), torch.arange(60) * 77 + 5, 3).double()
    other = script.hashed_normal((60, n), torch.arange(60) * 77 + 5, 4).double()
    z = {
        "mean": noise.mean(1) * math.sqrt(n),
        "variance": (noise.square().mean(1) - 1) * math.sqrt(n / 2),
        "skewness": noise.pow(3).mean(1) * math.sqrt(n / 15),
        "kurtosis": (noise.pow(4).mean(1) - 3) * math.sqrt(n / 96),
        "lag 1": (noise[:, 1:] * noise[:, :-1]).mean(1) * math.sqrt(n),
        "lag 64": (noise[:, 64:] * noise[:, :-64]).mean(1) * math.sqrt(n),
        "halves": (noise[:, : n // 2] * noise[:, n // 2 :]).mean(1) * math.sqrt(n / 2),
        "squares of halves": ((noise[:, : n // 2] ** 2 - 1) * (noise[:, n // 2 :] ** 2 - 1)).mean(1) * math.sqrt(n / 8),
        "streams": (noise * other).mean(1) * math.sqrt(n),
        "seeds": (noise[1:] * noise[:-1]).mean(1) * math.sqrt(n),
    }
    for name, scores in z.items():
        assert 0.7 < scores.std() < 1.35, (name, scores)
        assert scores.abs().max() < 4.2, (name, scores)
    p = [scipy_stats.kstest(row.numpy(), "norm").pvalue for row in noise]
    assert min(p) > 1e-4
    assert scipy_stats.kstest(p, "uniform").pvalue > 1e-3


def test_hashed_noise_is_a_function_of_seed_and_place():
    """The same bits with any number of threads, at any place of a batch, in a batch of any size."""
    seeds = torch.tensor([5, 2**62 - 3, 0])
    noise = script.hashed_normal((3, 1, 24, 20, 17), seeds, 1)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(script.hashed_normal((3, 1, 24, 20, 17), seeds, 1), noise)
            assert torch.equal(script.hashed_normal((1, 1, 24, 20, 17), seeds[1:2], 1), noise[1:2])
    finally:
        torch.set_num_threads(threads)
    assert noise.isfinite().all()
    assert not torch.equal(noise[0], noise[2])
    # these very numbers, so that a run goes on with another version of torch as it began
    found = script.hashed_normal((1, 4), torch.tensor([5]), 1)[0]
    torch.testing.assert_close(found, torch.tensor(FIRST_NUMBERS), atol=1e-5, rtol=0)


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Twelve made-up patients."""
    root = tmp_path_factory.mktemp("cascade") / "patients"
    command = [
        sys.executable,
        "-m",
        "tools.sample_data",
        "cascade",
        str(root),
        "--num_patients",
        "12",
        "--matrix",
        "20",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return root


STAGES = [
    {"volume_size": [8, 8, 8], "voxel_dim": 16, "vit_depth": 1, "num_heads": 2, "token_grid": 4, "num_epochs": 2},
    {"volume_size": [16, 16, 16], "voxel_dim": 16, "vit_depth": 1, "num_heads": 2, "token_grid": 4, "num_epochs": 1},
]
FLAGS = ["--img_size", "32", "--encoder_dim", "16", "--ddim_steps", "2", "--batch_size", "4", "--num_workers", "0"]
FLAGS += ["--lr", "2e-3", "--ema_decay", "0.9"]


def make_args(folder: Path, *words: str) -> Namespace:
    stages = [] if "--stage_configs" in words else ["--stage_configs", *map(json.dumps, STAGES)]
    paths = ["--dataset_path", str(folder), "--cache_dir", str(folder.parent / "cache")]
    return script.parse_args([*FLAGS, *stages, *paths, *words])


@pytest.fixture(scope="module")
def data(folder) -> Data:
    return Data(make_args(folder), [[8, 8, 8], [16, 16, 16]])


@pytest.fixture(scope="module")
def cascade(data) -> script.Cascade:
    """Two stages with random weights, whose last layers are not zero."""
    prior = data.learn_prior()
    cascade = script.Cascade(data.args, torch.device("cpu"), "no", prior, [0.1, 0.08])
    for _ in range(2):
        cascade.add_stage()
        torch.nn.init.normal_(cascade.averaged[-1].last[-1].weight, std=0.02)
        torch.nn.init.normal_(cascade.net.last[-1].weight, std=0.02)
    return cascade


def batch_of(dataset: XrayCtDataset, indices) -> dict:
    return torch.utils.data.default_collate([dataset[index] for index in indices])


class TrainingIndex(int):
    epoch = 0


def test_training_patients_are_drawn_by_seed_epoch_and_patient(data):
    dataset = XrayCtDataset(data, "train", [16, 16, 16])
    index = TrainingIndex(3)
    one, same = dataset[index], dataset[index]
    assert all(torch.equal(one[name], same[name]) for name in ("volume", "xrays", "seen", "draws"))
    index.epoch = 1
    other = dataset[index]
    assert one["seed"] != other["seed"]
    assert not torch.equal(one["seen"], other["seen"])
    assert one["row"] == 3
    assert XrayCtDataset(data, "val", [16, 16, 16])[0]["row"] == -1
    assert torch.equal(dataset[3]["seen"], dataset[3]["xrays"])


def test_moved_patients_keep_true_projections():
    """Moved up or down by whole voxels, with air at both ends, a volume's projections are the moved projections."""
    volume = random_volumes(1, 1, 8, 8, 40)[0, 0]
    volume[..., :4] = volume[..., -4:] = -1
    moved = move(volume, 2, -1)
    extent = torch.tensor([[300.0, 300.0, 300.0]])
    for view in (0, 1):
        before, after = (geo.project(one[None, None], extent, view)[0, 0] for one in (volume, moved))
        torch.testing.assert_close(move(before, -2, -2), after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ending", [".npy", ".nii"])
def test_a_ct_is_the_same_in_any_format_and_orientation(folder, tmp_path, ending):
    from tasks.cascade.data import read_ct

    image = nibabel.as_closest_canonical(nibabel.load(folder / "patient_0002" / "patient_0002.nii.gz"))
    expected, spacing = np.asarray(image.dataobj, np.float32), image.header.get_zooms()
    path = tmp_path / f"ct{ending}"
    if ending == ".npy":
        np.save(path, expected)
    else:
        turned = nibabel.Nifti1Image(np.flip(expected, 0)[..., None], np.diag([-spacing[0], *spacing[1:], 1]))
        nibabel.save(turned, path)
    hu, voxel = read_ct(path)
    np.testing.assert_array_equal(hu, expected)
    np.testing.assert_allclose(voxel, [1, 1, 1] if ending == ".npy" else spacing, rtol=1e-5)


def test_hdf5_of_x2ct_gan(tmp_path):
    """Axes from the head down, front to back, right to left; a link to another file is refused."""
    import h5py

    from tasks.cascade.data import HDF5, list_files, read_ct, read_xray
    from utils.cli import InputError

    rng = np.random.default_rng(0)
    hu = rng.integers(-1000, 1500, (5, 6, 7))
    (tmp_path / "p1").mkdir()
    path = tmp_path / "p1" / HDF5
    with h5py.File(path, "w") as file:
        file["ct"] = (hu + 1000).transpose(2, 1, 0)[::-1, ::-1, ::-1].astype(np.int16)
        file["xray1"] = file["xray2"] = np.arange(64.0).reshape(8, 8)
    assert list_files(tmp_path) == {"p1": {"ct": path, 0: path, 1: path}}
    found, spacing = read_ct(path)
    np.testing.assert_array_equal(found, hu)
    np.testing.assert_allclose(spacing, [320 / 5, 320 / 6, 320 / 7])
    assert read_xray(path, 0, 8, False, False).shape == (8, 8)
    with h5py.File(path, "a") as file:
        del file["xray2"]
        file["xray2"] = h5py.ExternalLink("/etc/other.h5", "x")
    with pytest.raises(InputError, match="link to another file"):
        read_ct(path)


def test_dicom_series_without_gaps(tmp_path):
    import pydicom
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    from tasks.cascade.data import read_ct
    from utils.cli import InputError

    hu = np.random.default_rng(0).integers(-1000, 1500, (7, 6, 8)).astype(np.int16)
    series = generate_uid()
    for k in range(8):
        one = pydicom.Dataset()
        one.file_meta = FileMetaDataset()
        one.file_meta.TransferSyntaxUID, one.file_meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, CTImageStorage
        one.SOPClassUID, one.SOPInstanceUID, one.SeriesInstanceUID = CTImageStorage, generate_uid(), series
        one.Modality, one.Rows, one.Columns, one.SamplesPerPixel = "CT", 6, 7, 1
        one.PhotometricInterpretation, one.PixelRepresentation = "MONOCHROME2", 1
        one.BitsAllocated = one.BitsStored = 16
        one.HighBit = 15
        one.RescaleIntercept, one.RescaleSlope = 0, 1
        one.PixelSpacing, one.SliceThickness = [2.0, 3.0], 4.0
        # LPS: x to the left, y to the back
        one.ImageOrientationPatient, one.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [0, 0, 4.0 * k]
        one.InstanceNumber = k
        one.PixelData = hu[:, :, k].T.tobytes()
        one.save_as(tmp_path / f"{(k * 5) % 8}.{'dcm' if k else 'DCM'}", enforce_file_format=True)
    # pictures may lie beside the slices
    (tmp_path / "p_pa_drr.png").write_bytes(b"a picture")
    found, spacing = read_ct(tmp_path)
    np.testing.assert_array_equal(found, hu[::-1, ::-1])
    np.testing.assert_allclose(spacing, [3, 2, 4])
    # of another scan, at the place of the first; then one is missing
    one.ImagePositionPatient, one.SOPInstanceUID = [0, 0, 0.0], generate_uid()
    one.save_as(tmp_path / "other.dcm", enforce_file_format=True)
    with pytest.raises(InputError, match="not evenly spaced"):
        read_ct(tmp_path)
    (tmp_path / "other.dcm").unlink()
    (tmp_path / "4.dcm").unlink()
    with pytest.raises(InputError, match="slices are missing"):
        read_ct(tmp_path)


def test_a_split_is_the_same_however_its_lists_are_sorted(folder, data, tmp_path):
    names = [*data.ids["train"], *data.ids["val"]]
    splits = []
    for number, part in enumerate([names, names[::-1]]):
        (tmp_path / f"train{number}.txt").write_text("\n".join(part))
        (tmp_path / "test.txt").write_text("\n".join(data.ids["test"]))
        files = [str(tmp_path / f"train{number}.txt"), str(tmp_path / "test.txt")]
        splits.append(split_patients(data.patients, 42, files))
    assert splits[0] == splits[1]
    assert sorted(sum(splits[0].values(), [])) == list(range(12))


def test_a_damaged_file_in_the_cache_is_named_and_made_anew(folder, tmp_path):
    from utils.cli import InputError

    args = make_args(folder, "--cache_dir", str(tmp_path / "cache"))
    patient = find_patients(folder, 2)[0]
    data = Data(args, [[8, 8, 8], [16, 16, 16]])
    whole = data.volume(patient, [16, 16, 16])[0]
    path = data.kept(patient.ct, (16, 16, 16))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match="damaged file in --cache_dir"):
        data.volume(patient, [16, 16, 16])
    np.testing.assert_array_equal(data.volume(patient, [16, 16, 16])[0], whole)
    assert not list((tmp_path / "cache").glob("*.[0-9]*.*"))


@pytest.mark.parametrize("turn", [(1, ""), (0, "pa"), (0, "lat"), (0, "both"), (1, "both"), (1, "lat")], ids=str)
def test_x_rays_that_lie_otherwise_name_the_flags_that_mend_all_views(folder, tmp_path, turn):
    """One line; with what it says the check passes, so that no advice leads to the next."""
    from PIL import Image

    from utils.cli import InputError

    upside_down, mirrored = turn
    for patient in sorted(folder.glob("patient_*"))[:8]:
        target = tmp_path / "d" / patient.name
        target.mkdir(parents=True)
        (target / f"{patient.name}.nii.gz").symlink_to(patient / f"{patient.name}.nii.gz")
        for view in geo.VIEWS:
            image = np.asarray(Image.open(patient / f"{patient.name}_{view}_drr.png"))
            image = image[:: -1 if upside_down else 1, :: -1 if mirrored in (view, "both") else 1]
            Image.fromarray(image).save(target / f"{patient.name}_{view}_drr.png")
    with pytest.raises(InputError, match="X-rays lie otherwise than CTs") as error:
        Data(make_args(tmp_path / "d"), [[16, 16, 16]])
    advice = str(error.value).rpartition("give ")[2].split()
    Data(make_args(tmp_path / "d", *advice), [[16, 16, 16]])


def test_exchanged_pictures_are_named(folder, tmp_path):
    from utils.cli import InputError

    patients = sorted(folder.glob("patient_*"))[:10]
    for patient, source in zip(patients, [patients[1], patients[0], *patients[2:]], strict=True):
        target = tmp_path / "d" / patient.name
        target.mkdir(parents=True)
        (target / f"{patient.name}.nii.gz").symlink_to(patient / f"{patient.name}.nii.gz")
        views = ("lat", "pa") if patient == patients[4] else ("pa", "lat")
        for view, other in zip(geo.VIEWS, views, strict=True):
            (target / f"{patient.name}_{view}_drr.png").symlink_to(source / f"{source.name}_{other}_drr.png")
    with pytest.raises(InputError, match="not the (pa|lat) picture of its CT") as error:
        Data(make_args(tmp_path / "d"), [[16, 16, 16]])
    assert patients[4].name in str(error.value)
    assert {patients[0].name, patients[1].name} & set(str(error.value).replace(",", " ").replace(";", " ").split())


# --- diffusion and loss -----------------------------------------------------------------------------------------------


def test_the_schedule_is_nichol_and_dhariwals(cascade):
    """Against MONAI's cosine schedule; its betas are clipped, so the last steps differ."""
    from monai.networks.schedulers import DDIMScheduler

    alpha_bar = DDIMScheduler(1000, schedule="cosine").alphas_cumprod
    torch.testing.assert_close(cascade.signal.square()[:-5], alpha_bar[:-5], atol=2e-3, rtol=0)
    torch.testing.assert_close(cascade.signal**2 + cascade.noise**2, torch.ones(1000))


class Oracle(torch.nn.Module):
    """Returns the v that is right for a true residual."""

    def __init__(self, cascade, residual):
        super().__init__()
        self.cascade, self.residual = cascade, residual

    def forward(self, noisy, time, seen, known):
        timestep = (time * 1000).round().long() - 1
        signal, scale = (
            table[timestep][:, None, None, None, None] for table in (self.cascade.signal, self.cascade.noise)
        )
        return (signal * noisy - self.residual) / scale


def test_the_right_v_gives_the_true_volume_and_no_loss(data, cascade):
    """For a network that knows the answer the clean volume is the true one, and the diffusion loss is 0."""
    # not the first patient, whose first draw is of a timestep without noise, where v is the noise alone
    batch = batch_of(XrayCtDataset(data, "train", [8, 8, 8]), range(1, 4))
    known = cascade.know(0, batch, None, torch.zeros(3), 0)
    residual = (script.volume_of(batch) - known.start) / cascade.stds[0]
    oracle = Oracle(cascade, residual)
    for draw in range(script.LOSS_DRAWS):
        diffusion, physics = script.patient_losses(cascade, 0, oracle, batch, torch.full((3,), draw))
        assert diffusion.max() < 1e-4
        assert physics.max() < 1e-3
    t = torch.full((3,), 400)
    noise = script.hashed_normal(known.start.shape, batch["seed"], 1)
    noisy = cascade.signal[400] * residual + cascade.noise[400] * noise
    clean = cascade.denoise(0, oracle, noisy, t, batch, known)[1]
    torch.testing.assert_close(clean, script.volume_of(batch), atol=1e-4, rtol=0)


def test_gradients_reach_all_weights_that_learn(data, cascade):
    dataset = XrayCtDataset(data, "train", [16, 16, 16])
    losses = script.patient_losses(cascade, 1, cascade.net, batch_of(dataset, [TrainingIndex(0), TrainingIndex(1)]))
    sum(losses).sum().backward()
    assert all(parameter.grad is not None for parameter in cascade.net.parameters())
    assert all(parameter.grad is None for parameter in cascade.averaged.parameters())
    cascade.net.zero_grad()


def test_samples_are_a_function_of_patient_and_number(data, cascade):
    """A patient's sample is the same beside others, and another one by another number."""
    dataset = XrayCtDataset(data, "train", [16, 16, 16])
    both = script.draw_samples(cascade, batch_of(dataset, [0, 1]), Namespace(num_samples=3))
    for number in range(3):
        alone = cascade.sample(batch_of(dataset, [1]), 2, number)[-1]
        torch.testing.assert_close(both[number, 1:], alone, atol=1e-5, rtol=0)
    assert (both[0] - both[2]).abs().max() > 1e-3


def test_the_plateau_scheduler_is_torchs():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs, ours = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=5), script.Plateau()
    rng = np.random.default_rng(0)
    for k in range(80):
        loss = float(1 / (1 + min(k, 25)) + 0.02 * rng.random())
        theirs.step(loss)
        ours.note(loss)
        assert ours.state["factor"] == optimizer.param_groups[0]["lr"]
    assert ours.state["factor"] < 0.05


# --- scores -----------------------------------------------------------------------------------------------------------


def test_scores_against_numpy(data):
    dataset = XrayCtDataset(data, "val", [16, 16, 16])
    batch = batch_of(dataset, [0])
    true = script.volume_of(batch)
    volume = (true + 0.05 * random_volumes(*true.shape)).clamp(-1, 1)
    found = {name: float(value) for name, value in script.scores(volume, batch, data.greys).items()}
    error = ((volume - true)[0, 0] * 2000).numpy().astype(float)
    hu = batch["volume"][0].numpy()
    assert found["psnr"] == pytest.approx(20 * math.log10(4000 / math.sqrt((error**2).mean())), abs=1e-3)
    assert found["mae_hu"] == pytest.approx(np.abs(error).mean(), rel=1e-4)
    assert found["bone_hu"] == pytest.approx(np.abs(error)[(hu >= 200) & (hu < 3000)].mean(), rel=1e-4)
    assert found["lung_hu"] == pytest.approx(np.abs(error)[(hu >= -950) & (hu < -500)].mean(), rel=1e-4)
    assert 0 < found["ssim"] < 1
    assert found["rays_pa"] > 0


def test_interval_factor_is_the_90_percent_quantile(data, cascade):
    class Here:
        def batches(self, loader):
            return iter(loader)

    args = Namespace(**vars(data.args) | {"num_samples": 4})
    dataset = XrayCtDataset(data, "val", [16, 16, 16])
    factor = script.interval_factor(cascade, dataset, Here(), args)
    batch = batch_of(dataset, range(len(dataset)))
    samples = torch.stack([cascade.sample(batch, 2, number)[-1] for number in range(4)])
    ratio = (samples.mean(0) - script.volume_of(batch)).abs() / (samples.std(0) * math.sqrt(1.25)).clamp(min=1e-6)
    body = batch["volume"][:, None] > -900
    assert factor == pytest.approx(float(ratio[body].clamp(max=99.99).quantile(0.9)), abs=0.03)


def test_table_names_rivals_and_compares_with_the_strongest(capsys):
    rng = np.random.default_rng(0)
    psnr = {
        "one step": 34 + rng.random(6),
        "one sample": 31 + rng.random(6),
        "another patient's X-rays": 20 + rng.random(6),
    }
    psnr |= {
        "linear posterior": 28 + rng.random(6),
        "linear posterior, consistent": 30 + rng.random(6),
        "mean volume": np.full(6, 22.0),
    }
    metrics = report.print_test({(row, "psnr"): values for row, values in psnr.items()}, None, "")
    assert metrics["test/psnr"] == psnr["one step"].mean()
    assert metrics["test/rival/linear_posterior_consistent/psnr"] == psnr["linear posterior, consistent"].mean()
    lead = psnr["one sample"] - psnr["linear posterior, consistent"]
    half = scipy_stats.t.ppf(0.975, 5) * lead.std(ddof=1) / math.sqrt(6)
    assert metrics["test/one_sample/psnr_above_strongest_rival_low"] == pytest.approx(lead.mean() - half)
    # a patient without bone does not count as one without an error
    table = {(row, "psnr"): values for row, values in psnr.items()} | {
        ("one step", "bone_hu"): np.array([90, np.nan, 110])
    }
    assert report.print_test(table, None, "")["test/bone_hu"] == 100
    assert "above linear posterior, consistent" in capsys.readouterr().out


# --- stages and the script --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["single_view_config", "multi_view_config", "cascade_demo"])
def test_configs_parse(config):
    args = script.parse_args(["--config", str(ROOT / f"configs/{config}.json")])
    assert [stage["name"] for stage in args.stage_configs] == ["stage1", "stage2", "stage3"][: len(args.stage_configs)]


def test_the_guides_json_as_printed(tmp_path):
    """Guide 3's config with its comments: keys of stages and sections mean what they say."""
    path = tmp_path / "config.json"
    path.write_text("""{
  "xray_config": {"img_size": 512, "num_views": 2},
  "stage_configs": [
    {
      "name": "stage1",
      "volume_size": [64, 64, 64],
      "voxel_dim": 384,      // Can increase with more memory
      "vit_depth": 6,         // Can increase to 8
      "num_heads": 6
    }
  ],
  "training": {"batch_size": 8, "learning_rate": 1e-4, "num_epochs_per_stage": 70, "num_timesteps": 1000,
    "v_parameterization": true, "gradient_checkpointing": true, "mixed_precision": "fp16", "accumulation_steps": 2},
  "data": {"dataset_path": "./data/drr_patient_data", "augmentation": true, "cache_in_memory": false, "num_workers": 4}
}""")
    args = script.parse_args(["--config", str(path)])
    (stage,) = args.stage_configs
    assert (stage["voxel_dim"], stage["batch_size"], stage["accumulation_steps"], stage["num_epochs"]) == (
        384,
        8,
        2,
        70,
    )
    assert stage["physics_weight"] == 0.3
    assert args.gradient_checkpointing
    assert args.mixed_precision == "fp16"
    # without stages the guide's have what the file gives
    path.write_text('{"training": {"batch_size": 3, "accumulation_steps": 7, "physics_weight": 0}}')
    stages = script.parse_args(["--config", str(path)]).stage_configs
    assert {(s["batch_size"], s["accumulation_steps"], s["physics_weight"]) for s in stages} == {(3, 7, 0)}
    # the command line wins over a stage's own
    args = script.parse_args(["--config", str(ROOT / "configs/multi_view_config.json"), "--batch_size", "3"])
    assert [stage["batch_size"] for stage in args.stage_configs] == [3, 3, 3]
    args = script.parse_args(["--config", str(ROOT / "configs/multi_view_config.json")])
    assert [stage["batch_size"] for stage in args.stage_configs] == [16, 8, 2]


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        ({"voxel_dimm": 8}, "did you mean 'voxel_dim'"),
        ({"volume_size": [30, 30, 30], "token_grid": 4}, "multiples of 8"),
        ({"voxel_dim": 20, "num_heads": 3}, "multiple of 8 and 2 num_heads"),
        ({"batch_size": 0}, "at least 1"),
        ({"vit_depth": None}, "at least 1"),
        ({"physics_weight": "0.3"}, "a number from 0"),
        ({"name": "../x"}, "must be a word"),
        ({"name": "step_1"}, "must be a word"),
        ({"volume_size": 64}, "three whole numbers"),
    ],
)
def test_wrong_stages_are_named(capsys, stage, reason):
    with pytest.raises(SystemExit) as error:
        script.parse_args(["--stage_configs", json.dumps(stage)])
    assert error.value.code == 2
    assert reason in capsys.readouterr().err


def start(folder: Path, out: Path, *words: str) -> str:
    stages = ["--stage_configs", *map(json.dumps, STAGES)]
    paths = ["--dataset_path", str(folder), "--cache_dir", str(folder.parent / "cache"), "--checkpoint_dir", str(out)]
    command = [sys.executable, "train_accelerate.py", *FLAGS, *stages, *paths, *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory) -> Path:
    """A finished run of two stages, with intervals."""
    out = tmp_path_factory.mktemp("run") / "run"
    start(folder, out, "--num_samples", "2")
    return out


def read(path: Path) -> dict:
    return {name: value for name, value in json.loads(path.read_text()).items() if name.startswith("test/")}


def test_a_run_leaves_what_the_page_says(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"stage1_best.pt", "stage2_best.pt", "best.pt", "model.safetensors", "summary.json", "figures"} <= names
    assert (finished / "figures" / "test.png").stat().st_size > 10_000
    summary = read(finished / "summary.json")
    rivals = {name.split("/")[2] for name in summary if name.startswith("test/rival/")}
    both = {
        f"{name}{ending}"
        for name in ("linear_posterior", "mean_volume", "back_projection")
        for ending in ("", "_consistent")
    }
    assert rivals == both | {"nearest_patient"}
    assert {
        "test/psnr",
        "test/one_sample/psnr",
        "test/one_sample/coverage_90",
        "test/stage1_alone/psnr",
    } <= summary.keys()
    # a checkpoint does not tell a single patient's CT: of the prior's tensors none has a row for each patient
    prior = torch.load(finished / "best.pt", weights_only=True)["prior"]
    assert {name for name, value in prior.items() if value is None} == {"coordinates", "weights", "kernel"}


def test_eval_only_gives_the_runs_own_numbers(folder, finished):
    """The checkpoint's stages count, and other ones are not passed over in silence."""
    for words, told in (([], False), (["--stage_configs", json.dumps(STAGES[0])], True)):
        output = start(folder, finished, "--eval_only", "--num_samples", "2", *words)
        assert ("--stage_configs: as in the checkpoint" in output) is told
        assert read(finished / "eval_test.json") == read(finished / "summary.json")


def test_a_resumed_run_may_have_other_epochs(folder, tmp_path):
    """Those of a stage that is over stay; more of the one that goes on are made; fewer than it has had are refused."""
    out = tmp_path / "run"
    start(folder, out, "--max_steps", "7")
    more = [stage | {"num_epochs": 3} for stage in STAGES]
    command = [sys.executable, "train_accelerate.py", *FLAGS, "--dataset_path", str(folder), "--stage_configs"]
    command += [*map(json.dumps, more), "--cache_dir", str(folder.parent / "cache"), "--resume_from", "auto"]
    done = subprocess.run([*command, "--checkpoint_dir", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["epochs"] == 2 + 3
    assert all(json.loads(line).get("train/lr", 1) > 0 for line in (out / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--eval_only --num_timesteps 700 --ddim_steps 7", "--ddim_steps 7: must divide"),
        ("--resume_from auto --effective_batch_size 12", "--effective_batch_size 12: stage1 of this run has 4"),
    ],
)
def test_a_flag_that_the_checkpoint_does_not_allow(folder, finished, words, error):
    command = [sys.executable, "train_accelerate.py", *FLAGS, "--dataset_path", str(folder), *words.split()]
    done = subprocess.run([*command, "--checkpoint_dir", str(finished)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {error}")


def test_accumulation_that_accelerate_is_asked_for_must_be_every_stages(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    stages = [STAGES[0], STAGES[1] | {"accumulation_steps": 2}]
    command = [sys.executable, "train_accelerate.py", *FLAGS, "--stage_configs", *map(json.dumps, stages)]
    done = subprocess.run(
        [*command, "--checkpoint_dir", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: accelerate launch --gradient_accumulation_steps 2: not read")


def test_predict_writes_the_volumes_that_were_tested(folder, finished, data):
    """Of a test patient's X-rays alone: the CT in HU, as near to the truth as the table says, and its uncertainty."""
    start(folder, finished, "--predict", str(folder), "--num_samples", "2")
    summary, errors = read(finished / "summary.json"), []
    for place in data.split["test"]:
        patient = data.patients[place].id
        image = nibabel.load(finished / "predictions" / f"{patient}.nii.gz")
        true = data.volume(data.patients[place], [16, 16, 16])[0]
        errors.append(np.abs(np.asarray(image.dataobj) - true).mean())
        np.testing.assert_allclose(image.header.get_zooms(), np.array(data.extent) / 16, rtol=1e-4)
        spread = np.asarray(nibabel.load(finished / "predictions" / f"{patient}_std.nii.gz").dataobj)
        assert spread.min() >= 0
        assert spread.max() > 0
    # the field of view is the training patients' mean here, and the patient's own in the test
    assert np.mean(errors) == pytest.approx(summary["test/mae_hu"], rel=0.25)


def test_resume_from_a_stages_best(folder, finished, tmp_path):
    """Guide 3's command: from stage1_best.pt into a new folder, on to the end of the last stage."""
    output = start(folder, tmp_path / "run", "--resume_from", str(finished / "stage1_best.pt"), "--num_samples", "2")
    assert "test, 1 patient " in output
    assert "nan" not in output
    # the best so far comes along
    assert {path.name for path in (tmp_path / "run").glob("*best.pt")} == {
        "stage1_best.pt",
        "stage2_best.pt",
        "best.pt",
    }


def test_the_other_settings_train(folder, tmp_path):
    """One view, noise prediction, no agreement, recomputed activations, plateau; then regression as its rival's row."""
    words = "--num_views 1 --no-v_parameterization --no-xray_agreement --gradient_checkpointing --scheduler plateau"
    start(folder, tmp_path / "noise", *words.split(), "--cache_in_memory")
    output = start(folder, tmp_path / "regression", "--regression", "--rival_run", str(tmp_path / "noise"))
    assert "noise (--rival_run)" in output
    assert "regression: " in output
    assert "one sample" not in output


def test_make_drrs_renders_what_is_missing(folder, tmp_path):
    from PIL import Image

    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "ct.nii.gz").symlink_to(folder / "patient_0003" / "patient_0003.nii.gz")
    subprocess.run([sys.executable, "train_accelerate.py", "--make_drrs", str(tmp_path)], cwd=ROOT, check=True)
    for view in geo.VIEWS:
        made, known = (
            Image.open(path)
            for path in (tmp_path / "p" / f"p_{view}_drr.png", folder / "patient_0003" / f"patient_0003_{view}_drr.png")
        )
        np.testing.assert_array_equal(np.asarray(made), np.asarray(known))
