"""Guide 3: geometry, rivals, noise, losses and scores against references of their own; file formats; whole runs."""

import json
import math
import re
import shutil
from argparse import Namespace
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
import torch
from monai.networks.schedulers import DDIMScheduler
from PIL import Image
from scipy import stats
from sklearn.linear_model import Ridge
from test_volumes import write_series
from torch.nn import functional as F

import train_accelerate as script
from tasks.cascade import data as files
from tasks.cascade import geometry as geo
from tasks.cascade import report, sample_data
from utils.cli import InputError

ROOT = Path(__file__).resolve().parents[1]


def random_volumes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 1.2 - 1


# --- geometry and what needs no network -------------------------------------------------------------------------------


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


def test_resizing_averages_or_interpolates_and_keeps_projections():
    volume, mm = random_volumes(2, 1, 12, 9, 10), torch.full((2, 3), 100.0)
    torch.testing.assert_close(geo.resize(volume, (6, 3, 5)), F.avg_pool3d(volume, (2, 3, 2)))
    torch.testing.assert_close(geo.resize(volume, (24, 20, 17)), F.interpolate(volume, (24, 20, 17), mode="trilinear"))
    image = geo.project(geo.resize(volume, (5, 4, 7)), mm, 1)
    torch.testing.assert_close(image, geo.resize(geo.project(volume, mm, 1), (7, 4)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("views", [1, 2])
def test_agreement_is_the_best_linear_correction(views):
    """Three corrections of a volume that needs clipping, against the formula solved as a dense system in float64."""
    size, variance, mm = (3, 6, 4), 0.2, torch.tensor([[100.0, 120.0, 90.0]])
    greys = [geo.Grey(0.2, -1.0, 0.4), geo.Grey(-0.1, 0.5, 0.9)][:views]
    # the views are of two volumes, so that they contradict each other as noisy ones do
    volume, true = random_volumes(1, 1, *size), random_volumes(2, 1, *size, seed=1)
    # pictures of 12 x 12 pixels, so that both have one size
    planes = [g.slope * geo.project(true[v : v + 1], mm, v) + g.offset for v, g in enumerate(greys)]
    xrays = torch.cat([F.interpolate(plane, (12, 12)) for plane in planes], 1)
    found = geo.agree(volume, geo.measure(xrays, mm, greys, size), variance, corrections=3)

    voxels, spread = np.eye(72).reshape(-1, *size), geo.back_projection(xrays, mm, greys, size)
    a = np.concatenate([voxels.sum(axis).reshape(72, -1) for axis in (2, 1)[:views]], 1).T
    v, told = volume.double().numpy().ravel(), true.double().numpy().reshape(2, 72)
    y = np.concatenate([a[:12] @ told[0], a[12:] @ told[1]])
    # of a line integral, as one of the sum of 6 or 3 voxels of 20 or 33.3 mm
    noise = np.repeat([(0.4 / (0.0386 * 20)) ** 2, (0.9 / (0.0386 * 100 / 3)) ** 2], [12, 24])[: len(y)]
    z = np.zeros_like(y)
    for _ in range(3):
        part = np.linalg.solve(variance * a @ a.T + np.diag(noise), y - a @ v - noise * z)
        z, v = z + part, (v + variance * a.T @ part).clip(-1, 1)
    np.testing.assert_allclose(found.numpy().ravel(), v, atol=2e-5)
    means = [true[v].mean(axis, keepdim=True).expand(1, *size) for v, axis in enumerate((2, 1)[:views])]
    torch.testing.assert_close(spread[0], sum(means) / views)


def test_linear_posterior_leaves_a_patient_out_of_all_it_knows():
    """The closed form equals scikit-learn's ridge regressions, each fitted without the patient."""
    patients, mm = 0.5 * random_volumes(9, 1, 6, 6, 6), torch.full((9, 3), 300.0)
    patients[:, :, 2:4] += torch.linspace(0, 0.2, 9).view(9, 1, 1, 1, 1)
    greys = [geo.Grey(0.2, -1.0, 0.02), geo.Grey(0.19, -0.9, 0.05)]
    xrays = torch.cat([g.slope * geo.project(patients, mm, view) + g.offset for view, g in enumerate(greys)], 1)
    xrays += 0.01 * random_volumes(9, 2, 6, 6)
    rays = geo.rays_of(xrays, mm, greys, [6] * 3)
    prior = geo.learn_prior(patients[:, 0], rays, greys, rank=9)
    found = prior.volume(xrays, mm, torch.arange(9), [6] * 3)

    flat, told = patients.flatten(1).double().numpy(), rays.double().numpy()
    true_rays = np.concatenate([patients.mean(axis).flatten(1).double().numpy() for axis in (3, 2)], 1)
    errors = {}
    for share in (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0):
        ridge = Ridge(share * np.square(true_rays - true_rays.mean(0)).sum() / 9)
        others = ((np.delete(true_rays, i, 0), np.delete(flat, i, 0)) for i in range(9))
        answers = [ridge.fit(*known).predict(own[None])[0] for known, own in zip(others, told, strict=True)]
        errors[share] = np.square(answers - flat).mean()
        if share == prior.penalty:
            np.testing.assert_allclose(found.flatten(1).numpy(), np.clip(answers, -1, 1), atol=2e-4)
    assert min(errors, key=errors.get) == prior.penalty
    assert prior.error == pytest.approx(errors[prior.penalty], rel=1e-3)
    assert prior.variance == pytest.approx(flat.var(0).mean(), rel=1e-4)
    # a new patient is answered by all nine; on a coarser grid by that answer, resized
    new = xrays[:1], mm[:1], torch.tensor([-1])
    answer = prior.volume(*new, [6] * 3)
    assert (answer - found[:1]).abs().max() > 1e-3
    coarse = prior.on(torch.device("cpu"), [3] * 3).volume(*new, [3] * 3)
    torch.testing.assert_close(coarse, geo.resize(answer, [3] * 3), atol=0.02, rtol=0)


def test_hashed_noise_is_gaussian_and_a_function_of_seed_and_place():
    noise = script.hashed_normal((8, 2**17), torch.arange(8) * 77 + 5, 1)
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(noise) - np.eye(8)).max() < 4.2 / math.sqrt(2**17)
    assert torch.equal(script.hashed_normal((1, 2**17), torch.tensor([82]), 1)[0], noise[1])
    # these very numbers, so that a run goes on with another version of torch as it began
    first = torch.tensor([1.084303, -1.091417, -0.093704, 0.337714])
    found = script.hashed_normal((1, 4), torch.tensor([5]), 1)[0]
    torch.testing.assert_close(found, first, atol=1e-5, rtol=0)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_ct_is_the_same_in_any_format_and_orientation(tmp_path):
    """NIfTI with other axes, .npy and a DICOM series, beside which pictures lie, one of them DICOM."""
    hu = np.random.default_rng(0).integers(-1000, 1500, (5, 6, 7)).astype(np.int16)
    affine = np.array([[0, 0, -2, 8], [0, 3, 0, 0], [4, 0, 0, 0], [0, 0, 0, 1.0]])
    nibabel.save(nibabel.Nifti1Image(hu[::-1].T[..., None], affine), tmp_path / "ct.nii")
    np.save(tmp_path / "ct.npy", hu)
    write_series(tmp_path / "p", hu, (2, 3, 4))
    (tmp_path / "p" / "p_pa_drr.png").write_bytes(b"a picture beside the slices")
    save_xray(tmp_path / "p" / "p_lat.dcm", np.arange(256).reshape(16, 16))
    found = [files.read_ct(tmp_path / name) for name in ("ct.nii", "p", "ct.npy")]
    (tmp_path / "ct.npy").unlink()
    for volume, spacing in zip(found, ([2, 3, 4], [2, 3, 4], [1, 1, 1]), strict=True):
        np.testing.assert_array_equal(volume.values, hu)
        np.testing.assert_allclose(volume.spacing, spacing)
    assert files.list_files(tmp_path)["p"] == {
        "ct": tmp_path / "p", 0: tmp_path / "p" / "p_pa_drr.png", 1: tmp_path / "p" / "p_lat.dcm"
    }  # fmt: skip


def save_xray(path: Path, values: np.ndarray, **tags) -> None:
    one = pydicom.examples.ct
    one.Rows, one.Columns = values.shape
    one.Modality, one.SeriesInstanceUID, one.RescaleIntercept, one.PixelRepresentation = "DX", "1.2", 0, 0
    one.PixelData = values.astype(np.uint16).tobytes()
    del one.ImagePositionPatient
    for name, value in tags.items():
        setattr(one, name, value)
    one.save_as(path)


def test_a_picture_is_the_same_in_any_format(tmp_path):
    """12 bits in 16 as scanners write them, or all 16; DICOM; numbers of several kinds."""
    grey = np.arange(256).reshape(16, 16)
    Image.fromarray(grey.astype(np.uint8)).save(tmp_path / "8.png")
    Image.fromarray((grey * 257).astype(np.uint16)).save(tmp_path / "16.png")
    of_12_bits = (grey / 255 * 4095).round()
    Image.fromarray(of_12_bits.astype(np.uint16)).save(tmp_path / "12.png")
    Image.fromarray((grey / 255).astype(np.float32)).save(tmp_path / "float.tif")
    save_xray(tmp_path / "12.dcm", of_12_bits, BitsStored=12, HighBit=11)
    save_xray(tmp_path / "12_of_16.dcm", of_12_bits)
    save_xray(tmp_path / "inverse.dcm", 4095 - of_12_bits, BitsStored=12, PhotometricInterpretation="MONOCHROME1")
    save_xray(tmp_path / "window.dcm", 1000 + grey, WindowCenter=1127.5, WindowWidth=255)
    for number, values in enumerate((grey / 255, grey / 127.5 - 1, grey * 1.0, of_12_bits)):
        np.save(tmp_path / f"{number}.npy", values)
    for path in tmp_path.iterdir():
        turned = files.read_xray(path, 16, upside_down=True, mirrored=True)
        np.testing.assert_allclose(turned, grey[::-1, ::-1] / 127.5 - 1, atol=3e-4)
    # a dark picture of 12 bits stays dark, as one of 8 bits does
    Image.fromarray((of_12_bits / 2).astype(np.uint16)).save(tmp_path / "dark.png")
    np.testing.assert_allclose(files.read_xray(tmp_path / "dark.png", 16, False, False), grey / 255 - 1, atol=4e-4)
    # not cut to 8 bits on the way
    Image.fromarray((np.arange(4096) // 2 * 2).reshape(64, 64).astype(np.uint16)).save(tmp_path / "fine.png")
    assert len(files.read_xray(tmp_path / "fine.png", 64, False, False).unique()) == 2048


STAGES = [
    {"volume_size": [8, 8, 8], "voxel_dim": 16, "vit_depth": 1, "num_heads": 2, "token_grid": 4, "num_epochs": 2},
    {"volume_size": [16, 16, 16], "voxel_dim": 16, "vit_depth": 1, "num_heads": 2, "token_grid": 4, "num_epochs": 1},
]
FLAGS = "--img_size 32 --encoder_dim 16 --ddim_steps 2 --batch_size 4 --num_workers 0 --lr 2e-3 --ema_decay 0.9".split()


def make_args(folder: Path, *words: str) -> Namespace:
    paths = ["--dataset_path", str(folder), "--cache_dir", str(folder.parent / "cache")]
    return script.parse_args([*FLAGS, *paths, "--stage_configs", *map(json.dumps, STAGES), *map(str, words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Twelve made-up patients."""
    root = tmp_path_factory.mktemp("cascade") / "patients"
    sample_data.write_sample_data(root, num_patients=12, matrix=20, seed=0)
    return root


@pytest.fixture(scope="module")
def data(folder) -> files.Data:
    return files.Data(make_args(folder), [[8, 8, 8], [16, 16, 40]])


def batch_of(dataset: files.XrayCtDataset, indices) -> dict:
    return torch.utils.data.default_collate([dataset[index] for index in indices])


class TrainingIndex(int):
    epoch = 0


def test_training_patients_are_moved_and_drawn_by_seed_epoch_and_patient(data):
    """Moved up or down, with other exposures; their true X-rays stay projections of their volumes."""
    dataset, index, drawn = files.XrayCtDataset(data, "train", [16, 16, 40]), TrainingIndex(3), []
    still = batch_of(dataset, [3])
    error = script.projection_error(script.volume_of(still), still, data.greys).max()
    assert torch.equal(still["seen"], still["xrays"])
    for index.epoch in (0, 1, 2, 3, 4, 0):
        one = batch_of(dataset, [index])
        assert script.projection_error(script.volume_of(one), one, data.greys).max() < 3 * error
        assert 0 < (one["seen"] - one["xrays"]).abs().max() < 0.2
        drawn.append([float(one[name].double().sum()) for name in ("seed", "draws", "seen", "xrays")])
    assert drawn[0] == drawn[5]
    # moves by -2 to 2 of 40 slices may be the same twice
    assert (np.array([len(set(values)) for values in zip(*drawn, strict=True)]) >= (5, 5, 5, 3)).all()
    assert one["row"] == 3
    assert files.XrayCtDataset(data, "val", [16, 16, 40])[0]["row"] == -1


def test_a_split_is_by_patient_and_as_its_lists_say(data, tmp_path):
    assert [len(data.split[name]) for name in ("train", "val", "test")] == [10, 1, 1]
    assert sorted(sum(data.split.values(), [])) == list(range(12))
    lists = [tmp_path / "train.txt", tmp_path / "test.txt"]
    for path, names in zip(lists, ("train", "test"), strict=True):
        # as PowerShell writes them
        path.write_text("\n".join(data.ids[names]), encoding="utf-16")
    split = files.split_patients(data.patients, 42, lists)
    assert split["test"] == data.split["test"]
    assert sorted(split["train"] + split["val"]) == sorted(data.split["train"])
    with pytest.raises(InputError, match="named twice"):
        files.split_patients(data.patients, 42, [lists[0], lists[0]])


@pytest.fixture
def copies(folder, tmp_path) -> Path:
    """Eight of the patients, to be spoilt."""
    for patient in sorted(folder.glob("patient_*"))[:8]:
        shutil.copytree(patient, tmp_path / "d" / patient.name)
    return tmp_path / "d"


@pytest.mark.parametrize("turn", [(1, "lat"), (0, "both")], ids=str)
def test_x_rays_that_lie_otherwise_name_the_flags_that_mend_all_views(copies, turn):
    """With what the one line says the check passes, so that no advice leads to the next."""
    upside_down, mirrored = turn
    for path in copies.glob("*/*.png"):
        columns = -1 if mirrored == "both" or f"_{mirrored}_" in path.name else 1
        Image.fromarray(np.asarray(Image.open(path))[:: -1 if upside_down else 1, ::columns]).save(path)
    with pytest.raises(InputError, match="X-rays lie otherwise than CTs") as error:
        files.Data(make_args(copies), [[16, 16, 16]])
    advice = str(error.value).rpartition("give ")[2].split()
    files.Data(make_args(copies, *advice), [[16, 16, 16]])


def exchange(one: Path, two: Path) -> None:
    one.rename(one.with_suffix(".kept"))
    two.rename(one)
    one.with_suffix(".kept").rename(two)


# of patient_0003, by ending
SPOILT = {
    "one view": (lambda ct, pa, lat, _: lat.unlink(), "no lat picture"),
    "two CTs": (lambda ct, *_: shutil.copy(ct, ct.with_name("other.nii.gz")), "beside other.nii.gz"),
    "cut": (lambda ct, *_: ct.write_bytes(ct.read_bytes()[:999]), "patient_0003.nii.gz: cannot be used"),
    "no HU": (
        lambda ct, *_: (np.save(ct.with_name("ct.npy"), np.eye(5)[:, :, None] * np.ones(5)), ct.unlink()),
        "not in HU",
    ),
    "no picture": (lambda ct, pa, *_: pa.write_bytes(b"x"), "not a readable picture"),
    "views exchanged": (lambda ct, pa, lat, _: exchange(pa, lat), "not the pa picture .* patient_0003"),
    "patients exchanged": (lambda ct, pa, lat, other: exchange(pa, other), "in 2 patients: patient_0003, patient_0004"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_patients_are_named(copies, name):
    spoil, message = SPOILT[name]
    place = copies / "patient_0003" / "patient_0003"
    ct, pa, lat = (place.with_name(place.name + ending) for ending in (".nii.gz", "_pa_drr.png", "_lat_drr.png"))
    spoil(ct, pa, lat, copies / "patient_0004" / "patient_0004_pa_drr.png")
    with pytest.raises(InputError, match=message):
        files.Data(make_args(copies), [[16, 16, 16]])


def test_all_files_that_cannot_be_used_are_listed(copies, capsys):
    for patient, ending in (("patient_0003", ".nii.gz"), ("patient_0005", "_lat_drr.png")):
        (copies / patient / f"{patient}{ending}").write_bytes(b"x")
    with pytest.raises(InputError, match="patient_0005_lat_drr.png, ...: 2 patients cannot be used, all listed above"):
        files.Data(make_args(copies), [[16, 16, 16]])
    assert [line.split(": ")[0][-12:] for line in capsys.readouterr().out.splitlines()] == [
        "_0003.nii.gz",
        "_lat_drr.png",
    ]
    for patient in ("patient_0003", "patient_0005"):
        (copies / patient / f"{patient}_pa_drr.png").unlink()
    with pytest.raises(InputError, match="patient_0003, .*patient_0005, ...: 2 files are missing, all listed above"):
        files.Data(make_args(copies), [[16, 16, 16]])


def test_make_drrs_renders_what_is_missing(copies):
    path = copies / "patient_0003" / "patient_0003_lat_drr.png"
    before = path.read_bytes()
    path.unlink()
    assert script.main(script.parse_args(["--make_drrs", str(copies)])) == 0
    assert path.read_bytes() == before


# --- diffusion, losses and scores -------------------------------------------------------------------------------------


def make_cascade(folder: Path, *words: str) -> tuple[script.Cascade, files.XrayCtDataset, files.XrayCtDataset]:
    """Two stages with random weights, whose last layers are not zero; the training patients on the grid of each."""
    data = files.Data(make_args(folder, *words), [stage["volume_size"] for stage in STAGES])
    cascade = script.Cascade(data.args, torch.device("cpu"), "no", data.learn_prior(), [0.1, 0.08])
    for _ in STAGES:
        cascade.add_stage()
        torch.nn.init.normal_(cascade.averaged[-1].last[-1].weight, std=0.02)
        torch.nn.init.normal_(cascade.net.last[-1].weight, std=0.02)
    return cascade, *(files.XrayCtDataset(data, "train", stage["volume_size"]) for stage in STAGES)


class Half(torch.nn.Module):
    """A network that answers with half of what it is shown, and its time."""

    def forward(self, noisy, time, *_):
        return 0.5 * noisy + 0.1 * time[:, None, None, None, None]


def test_sampling_is_ddim(folder):
    """By MONAI's scheduler and cosine schedule, whose last betas are clipped."""
    cascade, train, _ = make_cascade(folder, "--no-xray_agreement", "--no-v_parameterization", "--ddim_steps", "4")
    cascade.averaged[0], batch = Half(), batch_of(train, [0, 1])
    scheduler = DDIMScheduler(1000, schedule="cosine", clip_sample=False, prediction_type="v_prediction")
    torch.testing.assert_close(cascade.signal.square()[:-5], scheduler.alphas_cumprod[:-5], atol=2e-3, rtol=0)
    scheduler.alphas_cumprod = cascade.signal.square()
    scheduler.set_timesteps(4)
    residual = script.hashed_normal((2, 1, 8, 8, 8), batch["seed"], 1001)
    for t in (999, 749, 499, 249):
        residual, _ = scheduler.step(Half()(residual, torch.tensor([(t + 1) / 1000])), t, residual)
    start = cascade.priors[0].volume(batch["xrays"], batch["extent"], batch["row"], [8] * 3)
    # where nothing is clipped
    inside = start.abs() < 0.6
    found = (cascade.sample(batch, 1)[0] - start)[inside]
    torch.testing.assert_close(found, 0.1 * residual[inside], atol=1e-4, rtol=0)
    assert found.std() > 0.01


@pytest.mark.parametrize("kind", ["v", "noise"])
def test_losses_are_those_of_the_clean_volume(folder, kind):
    """(x - truth)^2 / noise^2, for noise prediction times signal^2; and the projections' error times signal^2."""
    cascade, train, _ = make_cascade(folder, *["--no-v_parameterization"] * (kind == "noise"))
    batch = batch_of(train, [0, 1, 2])
    # blind or not, timestep, noise of the stage before
    batch["draws"] = torch.tensor([[0.7, 0.2, 0.5], [0.51, 0.6, 0.5], [0.49, 0.6, 0.5]], dtype=torch.float64)
    t = torch.tensor([200, 600, 999 if kind == "v" else 600])
    signal, noise = (table[t].view(3, 1, 1, 1, 1) for table in (cascade.signal, cascade.noise))
    start, true = cascade.know(0, batch, None, torch.zeros(3), 0).start, geo.normalise(batch["volume"].float())[:, None]
    noisy = signal * (true - start) / 0.1 + noise * script.hashed_normal(true.shape, batch["seed"], 1)
    if kind == "v":
        noisy[2] = 0
    clean = start + 0.1 * (signal * noisy - noise * Half()(noisy, (t + 1) / 1000))
    diffusion, physics = script.patient_losses(cascade, 0, Half(), batch)
    alpha_bar = signal.flatten() ** 2
    expected = ((clean - true) / 0.1 / noise).square().mean((1, 2, 3, 4)) * (1 if kind == "v" else alpha_bar)
    torch.testing.assert_close(diffusion, expected, rtol=1e-3, atol=1e-4)
    errors = script.projection_error(clean, batch, cascade.greys).mean(1)
    torch.testing.assert_close(physics, alpha_bar * errors, rtol=1e-3, atol=1e-6)


def test_a_later_stage_starts_from_the_volume_before(folder):
    cascade, _, train = make_cascade(folder, "--no-xray_agreement")
    assert torch.equal(cascade.net.encoder.view, cascade.averaged[0].encoder.view)
    batch, before = batch_of(train, [0, 1]), random_volumes(2, 1, 8, 8, 8)
    start = cascade.know(1, batch, before, torch.tensor([0.0, 0.1]), 0).start - geo.resize(before, [16] * 3)
    assert not start[0].any()
    assert 0.03 < start[1].std() < 0.1
    losses = script.patient_losses(cascade, 1, cascade.net, batch)
    cascade.averaged[0].last[-1].weight.data *= 2
    assert not torch.equal(losses[0], script.patient_losses(cascade, 1, cascade.net, batch)[0])
    # all of the stage learns, and nothing else; the averaged weights follow, the slower the later
    sum(losses).sum().backward()
    assert all(parameter.grad is not None for parameter in cascade.net.parameters())
    assert all(parameter.grad is None for parameter in cascade.averaged.parameters())
    cascade.net.position.data += 1
    for steps, share in ((0, 0.9), (8, 0.5), (900, 0.1)):
        one = cascade.averaged[1].position.clone()
        cascade.average(steps)
        torch.testing.assert_close(cascade.averaged[1].position, one.lerp(cascade.net.position, share))


@torch.no_grad()
def test_evaluations_are_means_over_patients(folder):
    """Validation loss and a stage's start against one patient after the other; a sample beside others is the same."""
    cascade, _, train = make_cascade(folder, "--num_samples", "3")
    args, run, losses, squares = cascade.args, Namespace(batches=iter), [], []
    for index in range(len(train)):
        batch = batch_of(train, [index])
        for draw in range(4):
            losses.append(script.patient_losses(cascade, 1, cascade.averaged[1], batch, torch.tensor([draw])))
        previous = cascade.sample(batch, 1, one_step=True)[-1]
        start = cascade.know(1, batch, previous, 0.1 * batch["draws"][:, 2].float(), 0).start
        squares.append((start - script.volume_of(batch)).square().mean())
    diffusion, physics = torch.tensor(losses).mean(0).tolist()
    expected = {"val/loss": diffusion + 0.4 * physics, "val/diffusion_loss": diffusion, "val/physics_loss": physics}
    assert script.evaluate(cascade, train, run, args) == pytest.approx(expected, rel=1e-4)
    assert script.start_error(cascade, 1, train, run, args) == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-4)

    batch = batch_of(train, range(len(train)))
    samples = script.draw_samples(cascade, batch, args)
    torch.testing.assert_close(samples[2], cascade.sample(batch, 2, 2)[-1], atol=1e-5, rtol=0)
    assert (samples[0] - samples[2]).abs().max() > 1e-3
    # so many standard deviations from the mean of the samples lie 90 % of the body's voxels
    ratio = (samples.mean(0) - script.volume_of(batch)).abs() / (samples.std(0) * math.sqrt(4 / 3)).clamp(min=1e-6)
    ratio = ratio[batch["volume"][:, None] > -900].clamp(max=99.99)
    assert script.interval_factor(cascade, train, run, args) == pytest.approx(np.quantile(ratio, 0.9), abs=0.03)


def test_scores_by_hand(data):
    """Of errors of 40 HU in lung, 60 in soft tissue, 100 in bone and 20 elsewhere."""
    batch = batch_of(files.XrayCtDataset(data, "val", [16, 16, 40]), [0])
    hu = batch["volume"][0].numpy()
    tissues = [(hu >= low) & (hu < high) for low, high in ((-950, -500), (-200, 200), (200, 3000))]
    error = np.select(tissues, [40.0, 60.0, 100.0], 20.0)
    volume = geo.normalise(torch.from_numpy(hu + error).float())[None, None]
    found = {name: float(value) for name, value in script.scores(volume, batch, data.greys).items()}
    expected = {"lung_hu": 40, "soft_hu": 60, "bone_hu": 100, "mae_hu": error.mean()}
    expected["psnr"] = 20 * math.log10(4000 / math.sqrt((error**2).mean()))
    # in line integrals: mu times length
    for name, grey, axis, xray in zip(("pa", "lat"), data.greys, (1, 0), batch["xrays"][0], strict=True):
        image = 0.0193 * (1 + (hu + error) / 1000).mean(axis).T[::-1, ::-1] * float(batch["extent"][0, axis])
        told = (geo.resize(xray, image.shape).numpy() - grey.offset) / grey.slope
        expected[f"rays_{name}"] = math.sqrt(((image - told) ** 2).mean())
    assert 0 < found.pop("ssim") < 1
    assert found == pytest.approx(expected, rel=1e-3)
    # of constants c1 alone decides: (2 a b + c1) / (a^2 + b^2 + c1), (.01 * 2)^2
    constant = batch | {"volume": torch.full((1, 8, 8, 8), 1040)}
    ssim = script.scores(torch.full((1, 1, 8, 8, 8), 0.05), constant, data.greys)["ssim"]
    assert float(ssim) == pytest.approx(0.0024 / 0.0033, rel=1e-3)


@torch.no_grad()
def test_rivals_of_the_table(folder):
    """Of a training patient the nearest one is himself; the mean is all training patients'; other X-rays count."""
    cascade, _, train = make_cascade(folder)
    train.split = "test"
    batch = batch_of(train, [4])
    rows, _ = script.reconstruct(cascade, batch, train.data, train.data.known_rays(cascade.greys), cascade.args)
    assert torch.equal(rows["nearest patient"], script.volume_of(batch))
    mean = script.volume_of(batch_of(train, range(len(train)))).mean(0, keepdim=True)
    torch.testing.assert_close(rows["mean volume"], mean, atol=1e-5, rtol=0)

    def error(row: str, xrays: str = "xrays") -> float:
        return float(script.projection_error(rows[row], batch | {"xrays": batch[xrays]}, cascade.greys).max())

    for name in ("mean volume", "linear posterior", "back-projection"):
        assert error(f"{name}, consistent") < 0.1 * error(name)
    assert error("another patient's X-rays", "other") < 0.1 * error("another patient's X-rays")


def test_table_names_rivals_and_compares_with_the_strongest(capfd):
    rng = np.random.default_rng(0)
    means = {"one step": 34, "another patient's X-rays": 20, "linear posterior, consistent": 30, "one sample": 31}
    table = {(row, "psnr"): mean + rng.random(6) for row, mean in means.items()}
    # a patient without bone does not count as one without an error
    metrics = report.print_test(table | {("one step", "bone_hu"): np.array([90, np.nan, 110])}, "4x4x4", None, "")
    own, _, rival, _ = table.values()
    assert metrics["test/bone_hu"] == 100
    assert metrics["test/psnr"] == own.mean()
    assert metrics["test/rival/linear_posterior_consistent/psnr"] == rival.mean()
    interval = stats.ttest_rel(own, rival).confidence_interval()
    found = [metrics[f"test/psnr_above_strongest_rival_{end}"] for end in ("low", "high")]
    assert found == pytest.approx(interval)
    shown = capfd.readouterr().out
    assert "above linear posterior, consistent" in shown
    # twice the squared error, of a volume of 1: 10 ** (-psnr / 10)
    perfect = -10 * np.log10(2 * 10 ** (-own / 10)).mean()
    assert metrics["test/perfect_sample/psnr"] == pytest.approx(perfect)
    assert re.search(rf"^one perfect sample +{perfect:.2f} +-$", shown, re.M)


def test_a_plateau_halves_the_learning_rate_also_across_a_resume(folder, tmp_path):
    """As torch's ReduceLROnPlateau, after more than 5 evaluations; and losses are means over a step, however cut."""
    flags = ["--lr", "1e-9", "--log_every", "1", "--effective_batch_size", "10", "--stage_configs"]
    flags.append(json.dumps(STAGES[0] | {"num_epochs": 16}))
    run(folder, tmp_path / "run", *flags, "--max_steps", 5)
    run(folder, tmp_path / "run", *flags, "--resume_from", "auto")
    run(folder, tmp_path / "whole", *flags, "--batch_size", 10, "--max_steps", 1)
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "whole")]
    cut, whole = ([line for line in map(json.loads, log) if "train/lr" in line] for log in logs)
    lrs = [line["train/lr"] for line in cut]
    assert lrs == pytest.approx([1e-9] * 7 + [5e-10] * 6 + [2.5e-10] * 3)
    assert cut[0]["train/loss"] == pytest.approx(whole[0]["train/loss"], rel=1e-5)


# --- flags and runs ---------------------------------------------------------------------------------------------------


def test_the_guides_json_as_printed(tmp_path):
    """Guide 3's config with its comments: keys of stages and sections mean what they say, and the command line wins."""
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
    names = ("voxel_dim", "batch_size", "accumulation_steps", "num_epochs", "physics_weight")
    assert [stage[name] for name in names] == [384, 8, 2, 70, 0.3]
    assert (args.gradient_checkpointing, args.mixed_precision) == (True, "fp16")
    # without stages the guide's have what the file gives
    path.write_text('{"training": {"batch_size": 3, "accumulation_steps": 7, "physics_weight": 0}}')
    stages = script.parse_args(["--config", str(path)]).stage_configs
    assert {(s["batch_size"], s["accumulation_steps"], s["physics_weight"]) for s in stages} == {(3, 7, 0)}
    for words, sizes in (([], [16, 8, 2]), (["--batch_size", "3"], [3, 3, 3])):
        args = script.parse_args(["--config", str(ROOT / "configs/multi_view_config.json"), *words])
        assert [stage["batch_size"] for stage in args.stage_configs] == sizes


def run(folder: Path, out: Path, *words) -> dict:
    """The script in this process; the test's numbers."""
    assert script.main(make_args(folder, "--checkpoint_dir", out, *words)) == 0
    name = "eval_test.json" if "--eval_only" in words else "summary.json"
    return json.loads((out / name).read_text())


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory) -> Path:
    """A finished run of two stages, with intervals."""
    out = tmp_path_factory.mktemp("run") / "run"
    run(folder, out, "--num_samples", 2)
    return out


def test_a_run_leaves_what_the_page_says(folder, finished, capfd):
    names = {path.name for path in finished.iterdir()}
    assert {"stage1_best.pt", "stage2_best.pt", "best.pt", "model.safetensors", "summary.json"} <= names
    assert (finished / "figures" / "test.png").stat().st_size > 10_000
    summary = json.loads((finished / "summary.json").read_text())
    rivals = {name.split("/")[2] for name in summary if name.startswith("test/rival/")}
    names = ("linear_posterior", "mean_volume", "back_projection")
    assert rivals == {f"{name}{ending}" for name in names for ending in ("", "_consistent")} | {"nearest_patient"}
    assert {"test/psnr", "test/one_sample/psnr", "test/stage1_alone/psnr"} <= summary.keys()
    assert 0.5 < summary["test/one_sample/coverage_90"] <= 1
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    losses = [line["val/loss"] for line in lines if "val/loss" in line]
    best = torch.load(finished / "stage1_best.pt", weights_only=True)
    assert best["position"]["best"] == min(losses[:2])
    # how far each stage's start is from the truth
    assert [len(torch.load(finished / f"stage{k}_best.pt", weights_only=True)["stds"]) for k in (1, 2)] == [1, 2]
    # a checkpoint does not tell a single patient's CT: of the prior's tensors none has a row for each patient
    assert {name for name, value in best["prior"].items() if value is None} == {"coordinates", "weights", "kernel"}
    # --eval_only gives the same numbers; other stages than the checkpoint's are not passed over in silence
    for words, told in ((), False), (("--stage_configs", json.dumps(STAGES[0])), True):
        again = run(folder, finished, "--eval_only", "--num_samples", 2, *words)
        assert {name: summary[name] for name in again if name.startswith("test/")} | {"step": 9} == again
        assert ("--stage_configs: as in the checkpoint" in capfd.readouterr().out) is told


def test_predict_writes_the_volumes_that_were_tested(folder, finished, data):
    """Of a test patient's X-rays alone: the CT in HU, as near to the truth as the table says, and its uncertainty."""
    summary = run(folder, finished, "--predict", folder, "--num_samples", 2)
    patient = data.patients[data.split["test"][0]]
    image, spread = (nibabel.load(finished / "predictions" / f"{patient.id}{ending}.nii.gz") for ending in ("", "_std"))
    true = files.Data(make_args(folder), [[16] * 3]).volume(patient, [16] * 3)[0]
    # the field of view is the training patients' mean here, and the patient's own in the test
    assert np.abs(np.asarray(image.dataobj) - true).mean() == pytest.approx(summary["test/mae_hu"], rel=0.25)
    np.testing.assert_allclose(image.header.get_zooms(), np.array(data.extent) / 16, rtol=1e-4)
    assert 0 <= np.asarray(spread.dataobj).min() < np.asarray(spread.dataobj).max() < 1000


def test_resumed_from_a_stages_best_and_with_more_epochs(folder, finished, tmp_path):
    """Guide 3's command, stage1_best.pt into a new folder; then more epochs, which a stage that is over ignores."""
    out = tmp_path / "run"
    run(folder, out, "--resume_from", finished / "stage1_best.pt")
    assert {path.name for path in out.glob("*best.pt")} == {"stage1_best.pt", "stage2_best.pt", "best.pt"}
    more = ["--stage_configs", *(json.dumps(stage | {"num_epochs": 3}) for stage in STAGES)]
    assert run(folder, tmp_path / "more", "--resume_from", out / "best.pt", *more)["epochs"] == 2 + 3
    lines = (tmp_path / "more" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line).get("train/lr", 1) > 0 for line in lines)


def test_the_other_settings_train(folder, tmp_path, capfd):
    """One view, noise prediction, no agreement, recomputed activations, cosine; then regression as its rival's row."""
    words = "--num_views 1 --no-v_parameterization --no-xray_agreement --gradient_checkpointing --scheduler cosine"
    run(folder, tmp_path / "noise", *words.split(), "--cache_in_memory")
    summary = run(folder, tmp_path / "regression", "--regression", "--rival_run", tmp_path / "noise")
    output = capfd.readouterr().out
    assert "noise (--rival_run)" in output
    assert "regression: " in output
    assert "test/one_sample/psnr" not in summary


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--stage_configs", '{"voxel_dimm": 8}'], "did you mean 'voxel_dim'"),
        (["--stage_configs", '{"volume_size": [30, 30, 30], "token_grid": 4}'], "multiples of 8"),
        (["--stage_configs", '{"voxel_dim": 20, "num_heads": 3}'], "multiple of 8 and 2 num_heads"),
        (["--stage_configs", '{"vit_depth": 0}'], "at least 1"),
        (["--stage_configs", '{"physics_weight": "0.3"}'], "a number from 0"),
        (["--stage_configs", '{"name": "../x"}'], "must be a word"),
        (["--stage_configs", '{"volume_size": 64}'], "three whole numbers"),
        ("--eval_only --num_timesteps 700 --ddim_steps 7".split(), "--ddim_steps 7: must divide"),
        ("--eval_only --split_seed 1".split(), "of the test patients were trained on; name others"),
        ("--resume_from auto --effective_batch_size 12".split(), "--effective_batch_size 12: stage1 of this run has 4"),
        ("--resume_from auto --rival_run /none".split(), "no summary.json of a finished run"),
    ],
)
def test_wrong_flags_are_named(folder, finished, capfd, words, reason):
    with pytest.raises((SystemExit, InputError)) as error:
        run(folder, finished, *words)
    assert reason in f"{error.value} {capfd.readouterr().err}"
