"""Guide 3: geometry, baselines, noise, losses and scores against independent references; file formats; whole runs."""

import json
import math
import re
import shutil
from argparse import Namespace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from monai.networks.schedulers import DDIMScheduler
from PIL import Image
from scipy import stats
from sklearn.linear_model import Ridge
from test_images_and_tables import save_dicom
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


# --- without a network ------------------------------------------------------------------------------------------------


def test_line_integrals_are_mu_times_length():
    """Against a sum over voxels in NumPy, for a CT whose axes differ in length."""
    rng = np.random.default_rng(0)
    hu, mm = rng.uniform(-1000, 1500, (6, 5, 4)), np.array([120.0, 200.0, 90.0])
    volume = geo.normalise(torch.from_numpy(hu).float())[None, None]
    mu = 0.0193 * (1 + hu / 1000)
    for view, axis in ((0, 1), (1, 0)):
        found = geo.project(volume, torch.tensor(mm[None]).float(), view)[0, 0].numpy()
        # rows from the head down; columns from the right (x highest), or from the front (y highest)
        expected = (mu.sum(axis) * mm[axis] / hu.shape[axis]).T[::-1, ::-1]
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_resize_matches_pooling_and_interpolation():
    volume = random_volumes(2, 1, 12, 9, 10)
    torch.testing.assert_close(geo.resize(volume, (6, 3, 5)), F.avg_pool3d(volume, (2, 3, 2)))
    torch.testing.assert_close(geo.resize(volume, (24, 20, 17)), F.interpolate(volume, (24, 20, 17), mode="trilinear"))


def test_make_consistent_matches_a_dense_solver():
    """Three corrections of a volume that needs clipping, against the formula as a dense system in float64."""
    size, variance, mm = (3, 6, 4), 0.2, torch.tensor([[100.0, 120.0, 90.0]])
    greys, axes = [geo.Grey(0.2, -1.0, 0.4), geo.Grey(-0.1, 0.5, 0.9)], (1, 0)
    # each view shows another volume, so they contradict each other like noisy X-rays; 12 x 12 pixels suit both grids
    volume, true = random_volumes(1, 1, *size), random_volumes(2, 1, *size, seed=1)
    planes = [g.slope * geo.project(true[v : v + 1], mm, v) + g.offset for v, g in enumerate(greys)]
    xrays = torch.cat([F.interpolate(plane, (12, 12)) for plane in planes], 1)
    found = geo.make_consistent(volume, geo.ray_sums(xrays, mm, greys, size), variance, corrections=3)

    voxels = np.eye(72).reshape(-1, *size)
    a = np.concatenate([voxels.sum(axis + 1).reshape(72, -1) for axis in axes], 1).T
    y = np.concatenate([true[view, 0].double().sum(axis).flatten() for view, axis in enumerate(axes)])
    # variance of a sum of 6 or 3 voxels, 20 or 33.3 mm long, from that of a line integral
    noise = np.repeat([(0.4 / (0.0386 * 20)) ** 2, (0.9 / (0.0386 * 100 / 3)) ** 2], [12, 24])
    v, z = volume.double().numpy().ravel(), np.zeros_like(y)
    for _ in range(3):
        part = np.linalg.solve(variance * a @ a.T + np.diag(noise), y - a @ v - noise * z)
        z, v = z + part, (v + variance * a.T @ part).clip(-1, 1)
    np.testing.assert_allclose(found.numpy().ravel(), v, atol=2e-5)
    means = [true[view, 0].mean(axis, keepdim=True).expand(size) for view, axis in enumerate(axes)]
    torch.testing.assert_close(geo.back_projection(xrays, mm, greys, size)[0, 0], sum(means) / 2)


def test_linear_posterior_matches_ridge_regressions():
    """The closed form equals scikit-learn's ridge regressions, each fitted without one patient."""
    patients, mm = 0.5 * random_volumes(9, 1, 6, 6, 6), torch.full((9, 3), 300.0)
    patients[:, :, 2:4] += torch.linspace(0, 0.2, 9).view(9, 1, 1, 1, 1)
    greys = [geo.Grey(0.2, -1.0, 0.02), geo.Grey(0.19, -0.9, 0.05)]
    xrays = torch.cat([g.slope * geo.project(patients, mm, view) + g.offset for view, g in enumerate(greys)], 1)
    xrays += 0.01 * random_volumes(9, 2, 6, 6)
    rays = geo.rays_of(xrays, mm, greys, [6] * 3)
    prior = geo.learn_prior(patients[:, 0], rays, greys)
    found = prior.volume(xrays, mm, torch.arange(9), [6] * 3)

    flat, told = patients.flatten(1).double().numpy(), rays.double().numpy()
    true_rays = np.concatenate([patients.mean(axis).flatten(1).double().numpy() for axis in (3, 2)], 1)
    errors = {}
    for penalty in (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0):
        ridge = Ridge(penalty * np.square(true_rays - true_rays.mean(0)).sum() / 9)
        fits = (ridge.fit(np.delete(true_rays, i, 0), np.delete(flat, i, 0)) for i in range(9))
        answers = [fit.predict(own[None])[0] for fit, own in zip(fits, told, strict=True)]
        errors[penalty] = np.square(answers - flat).mean()
        if penalty == prior.penalty:
            np.testing.assert_allclose(found.flatten(1).numpy(), np.clip(answers, -1, 1), atol=2e-4)
    assert min(errors, key=errors.get) == prior.penalty
    assert prior.error == pytest.approx(errors[prior.penalty], rel=1e-3)
    assert prior.variance == pytest.approx(flat.var(0).mean(), rel=1e-4)
    # a new patient's answer uses all nine
    new = prior.volume(xrays[:1], mm[:1], torch.tensor([-1]), [6] * 3)
    assert (new - found[:1]).abs().max() > 1e-3


def test_hashed_noise_is_gaussian_and_other_for_each_seed():
    noise = script.hashed_normal((8, 2**17), torch.arange(8) * 77 + 5, 1)
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(noise) - np.eye(8)).max() < 4.2 / math.sqrt(2**17)
    # fixed numbers, because a run must resume with another version of torch
    first = torch.tensor([1.084303, -1.091417, -0.093704, 0.337714])
    found = script.hashed_normal((1, 4), torch.tensor([5]), 1)[0]
    torch.testing.assert_close(found, first, atol=1e-5, rtol=0)


# --- files ------------------------------------------------------------------------------------------------------------


def test_ct_formats_agree(tmp_path):
    """A DICOM series with an X-ray beside its slices, and .npy."""
    hu = np.random.default_rng(0).integers(-1000, 1500, (5, 6, 7)).astype(np.int16)
    write_series(tmp_path / "b", hu, (2, 3, 4))
    (tmp_path / "b" / "b_lat.png").touch()
    np.save(tmp_path / "c.npy", hu)
    found = files.list_files(tmp_path)
    assert found["b"] == {"ct": tmp_path / "b", 1: tmp_path / "b" / "b_lat.png"}
    for name, spacing in {"b": (2, 3, 4), "c": (1, 1, 1)}.items():
        volume = files.read_ct(found[name]["ct"])
        np.testing.assert_array_equal(volume.values, hu)
        np.testing.assert_allclose(volume.spacing, spacing)


def test_xray_formats_agree(tmp_path):
    """12 bits in 16 as scanners write them, and floats; PNG, DICOM and .npy. A dark image stays dark."""
    grey = np.arange(4096).reshape(64, 64) // 2
    Image.fromarray(grey.astype(np.uint16)).save(tmp_path / "12.png")
    for name, values in {"1.npy": grey / 4095, "2.npy": grey / 2047.5 - 1, "12.npy": grey}.items():
        np.save(tmp_path / name, values)
    save_dicom(tmp_path / "12.dcm", grey, BitsStored=12, HighBit=11, PixelRepresentation=0, RescaleIntercept=0)
    for path in tmp_path.iterdir():
        flipped = files.read_xray(path, 64, upside_down=True, mirrored=True)
        np.testing.assert_allclose(flipped, grey[::-1, ::-1] / 2047.5 - 1, atol=3e-4)
        assert len(flipped.unique()) == 2048
    bits8 = grey.astype(np.uint8)
    Image.fromarray(bits8).save(tmp_path / "8.png")
    np.testing.assert_allclose(files.read_xray(tmp_path / "8.png", 64, False, False), bits8 / 127.5 - 1, atol=1e-6)


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
    """Twelve synthetic patients."""
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


def test_augmentation_is_reproducible_and_keeps_projections(data):
    dataset, index, drawn = files.XrayCtDataset(data, "train", [16, 16, 40]), TrainingIndex(3), []
    plain = batch_of(dataset, [3])
    error = script.projection_error(script.volume_of(plain), plain, data.greys).max()
    assert torch.equal(plain["input_xrays"], plain["xrays"])
    for index.epoch in (0, 1, 0):
        one = batch_of(dataset, [index])
        assert script.projection_error(script.volume_of(one), one, data.greys).max() < 3 * error
        assert 0 < (one["input_xrays"] - one["xrays"]).abs().max() < 0.2
        drawn.append([one[name].sum() for name in ("seed", "draws", "input_xrays", "xrays", "volume")])
    assert drawn[0] == drawn[2]
    assert all(a != b for a, b in zip(*drawn[:2], strict=True))
    assert one["row"] == 3
    assert files.XrayCtDataset(data, "val", [16, 16, 40])[0]["row"] == -1


def test_split_is_random_or_from_lists(data, tmp_path):
    assert sorted(sum(data.split.values(), [])) == list(range(12))
    lists = [str(tmp_path / name) for name in ("train", "test")]
    for path in lists:
        # PowerShell writes UTF-16
        Path(path).write_text("\n".join(data.ids[Path(path).name]), encoding="utf-16")
    split = files.split_patients(data.patients, 42, lists)
    assert {name: len(part) for name, part in split.items()} == {"train": 9, "val": 1, "test": 1}
    assert split["test"] == data.split["test"]
    with pytest.raises(InputError, match="named twice"):
        files.split_patients(data.patients, 42, lists[:1] * 2)


@pytest.fixture
def copies(folder, tmp_path) -> Path:
    """Copies of eight patients, to be damaged."""
    for patient in sorted(folder.glob("patient_*"))[:8]:
        shutil.copytree(patient, tmp_path / "d" / patient.name)
    return tmp_path / "d"


def test_flipped_xrays_name_the_flags_to_set(copies):
    """With the flags of the message, the check passes for all views."""
    for path in copies.glob("*/*.png"):
        columns = -1 if "_lat_" in path.name else 1
        Image.fromarray(np.asarray(Image.open(path))[::-1, ::columns]).save(path)
    with pytest.raises(InputError, match="X-rays lie otherwise than CTs") as error:
        files.Data(make_args(copies), [[16, 16, 16]])
    flags = str(error.value).rpartition("give ")[2].split()
    assert flags == ["--no-flip_drrs_vertical", "--flip_drrs_horizontal", "lat"]
    files.Data(make_args(copies, *flags), [[16, 16, 16]])


# changes to the CT of patient_0003, the frontal X-ray of patient_0004 and the lateral one of patient_0005
BAD_PATIENTS = {
    "beside other.nii.gz": lambda ct, pa, lat: ct.with_name("other.nii.gz").touch(),
    "not in HU": lambda ct, pa, lat: (np.save(ct.with_name("ct.npy"), np.arange(64).reshape(4, 4, 4)), ct.unlink()),
    "not the pa picture .* in 1 patients: patient_0004": lambda ct, pa, lat: shutil.copy(lat, pa),
    "0004_pa_drr.png, ...: 2 patients cannot be used": lambda ct, pa, lat: [p.write_bytes(b"x") for p in (ct, pa)],
    "patient_0004, .*patient_0005, ...: 2 files are missing": lambda ct, pa, lat: [p.unlink() for p in (pa, lat)],
}


@pytest.mark.parametrize("message", BAD_PATIENTS)
def test_bad_patients_are_named(copies, message):
    names = ("patient_0003.nii.gz", "patient_0004_pa_drr.png", "patient_0005_lat_drr.png")
    BAD_PATIENTS[message](*(copies / name[:12] / name for name in names))
    with pytest.raises(InputError, match=message):
        files.Data(make_args(copies), [[16, 16, 16]])


def test_make_drrs_renders_missing_xrays(copies):
    path = copies / "patient_0003" / "patient_0003_lat_drr.png"
    before = path.read_bytes()
    path.unlink()
    assert script.main(script.parse_args(["--make_drrs", str(copies)])) == 0
    assert path.read_bytes() == before


# --- diffusion, losses and scores -------------------------------------------------------------------------------------


def make_cascade(folder: Path, *words: str) -> tuple[script.Cascade, files.XrayCtDataset, files.XrayCtDataset]:
    """Two stages with random weights, also in their last layers, and the training patients on both grids."""
    data = files.Data(make_args(folder, *words), [stage["volume_size"] for stage in STAGES])
    cascade = script.Cascade(data.args, torch.device("cpu"), "no", data.learn_prior(), [0.1, 0.08])
    for _ in STAGES:
        cascade.add_stage()
        torch.nn.init.normal_(cascade.averaged[-1].last[-1].weight, std=0.02)
        torch.nn.init.normal_(cascade.net.last[-1].weight, std=0.02)
    return cascade, *(files.XrayCtDataset(data, "train", stage["volume_size"]) for stage in STAGES)


class Half(torch.nn.Module):
    """A network that returns half of its input plus a tenth of the time."""

    def forward(self, noisy, time, *_):
        return 0.5 * noisy + 0.1 * time[:, None, None, None, None]


def test_sampling_matches_monais_ddim(folder):
    """Against MONAI's cosine schedule, except for its last, clipped betas, and its scheduler."""
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
    # compare only where nothing is clipped
    inside = start.abs() < 0.6
    found = (cascade.sample(batch, 1)[0] - start)[inside]
    torch.testing.assert_close(found, 0.1 * residual[inside], atol=1e-4, rtol=0)
    assert found.std() > 0.01


@pytest.mark.parametrize("kind", ["v", "noise"])
def test_losses_match_closed_form(folder, kind):
    """(x - truth)^2 / noise^2, for noise prediction times signal^2, and the projections' error times signal^2."""
    cascade, train, _ = make_cascade(folder, *["--no-v_parameterization"] * (kind == "noise"))
    del cascade.averaged[1]
    batch = batch_of(train, [0, 1, 2])
    # below 0.5: last timestep; fraction of the timesteps; noise level of the previous stage
    batch["draws"] = torch.tensor([[0.7, 0.2, 0.5], [0.51, 0.6, 0.5], [0.49, 0.6, 0.5]], dtype=torch.float64)
    t = torch.tensor([200, 600, 999 if kind == "v" else 600])
    signal, noise = (table[t].view(3, 1, 1, 1, 1) for table in (cascade.signal, cascade.noise))
    start, true = cascade.stage_input(0, batch, torch.zeros(3), 0).start, script.volume_of(batch)
    noisy = signal * (true - start) / 0.1 + noise * script.hashed_normal(true.shape, batch["seed"], 1)
    if kind == "v":
        noisy[2] = 0
    clean = start + 0.1 * (signal * noisy - noise * Half()(noisy, (t + 1) / 1000))
    diffusion, physics = script.patient_losses(cascade, Half(), batch)
    alpha_bar = signal.flatten() ** 2
    expected = ((clean - true) / 0.1 / noise).square().mean((1, 2, 3, 4)) * (1 if kind == "v" else alpha_bar)
    torch.testing.assert_close(diffusion, expected, rtol=1e-3, atol=1e-4)
    errors = script.projection_error(clean, batch, cascade.greys).mean(1)
    torch.testing.assert_close(physics, alpha_bar * errors, rtol=1e-3, atol=1e-6)


def test_later_stage_starts_from_the_previous_volume(folder):
    cascade, _, train = make_cascade(folder, "--no-xray_agreement")
    assert torch.equal(cascade.net.encoder.view, cascade.averaged[0].encoder.view)
    batch, before = batch_of(train, [0, 1]), random_volumes(2, 1, 8, 8, 8)
    start = cascade.stage_input(1, batch, torch.tensor([0.0, 0.1]), 0, before).start - geo.resize(before, [16] * 3)
    assert not start[0].any()
    assert 0.03 < start[1].std() < 0.1
    # only this stage's network gets gradients; the EMA weights follow it more slowly later
    sum(script.patient_losses(cascade, cascade.net, batch)).sum().backward()
    assert all(parameter.grad is not None for parameter in cascade.net.parameters())
    assert all(parameter.grad is None for parameter in cascade.averaged.parameters())
    cascade.net.position.data += 1
    for steps, share in ((8, 0.5), (900, 0.1)):
        one = cascade.averaged[1].position.clone()
        cascade.average(steps)
        torch.testing.assert_close(cascade.averaged[1].position, one.lerp(cascade.net.position, share))


@torch.no_grad()
def test_evaluation_is_the_mean_over_patients(folder):
    """Validation loss and start error against patients one by one; a sample does not depend on the other samples."""
    cascade, _, train = make_cascade(folder, "--num_samples", "3")
    # two batches
    del train.patients[6:]
    run, losses, squares = Namespace(batches=iter), [], []
    for index in range(6):
        batch = batch_of(train, [index])
        for draw in range(4):
            losses.append(script.patient_losses(cascade, cascade.averaged[1], batch, torch.tensor([draw])))
        previous = cascade.sample(batch, 1, one_step=True)[-1]
        start = cascade.stage_input(1, batch, 0.1 * batch["draws"][:, 2].float(), 0, previous).start
        squares.append((start - script.volume_of(batch)).square().mean())
    diffusion, physics = torch.tensor(losses).mean(0).tolist()
    expected = {"val/loss": diffusion + 0.4 * physics, "val/diffusion_loss": diffusion, "val/physics_loss": physics}
    assert script.evaluate(cascade, train, run) == pytest.approx(expected, rel=1e-4)
    assert script.start_error(cascade, train, run) == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-4)

    batch = batch_of(train, range(6))
    samples = script.draw_samples(cascade, batch)
    torch.testing.assert_close(samples[2], cascade.sample(batch, 2, 2)[-1], atol=1e-5, rtol=0)
    assert (samples[0] - samples[2]).abs().max() > 1e-3
    # 90 % of the body's voxels are within this many standard deviations of the samples' mean
    z = (samples.mean(0) - script.volume_of(batch)).abs() / (samples.std(0) * math.sqrt(4 / 3))
    quantile = np.nanquantile(z[batch["volume"][:, None] > -900], 0.9)
    assert script.interval_factor(cascade, train, run) == pytest.approx(quantile, abs=0.03)


def test_scores_match_known_errors():
    """Errors of 40 HU in lung, 60 in soft tissue, 100 in bone and 20 in air."""
    hu, error = (np.repeat(values, 128).reshape(8, 8, 8) for values in ([-700, 0, 1000, -1000], [40, 60, 100, 20]))
    batch = {"volume": torch.from_numpy(hu)[None], "extent": torch.tensor([[90.0, 120, 100]])}
    batch["xrays"], greys = random_volumes(1, 1, 8, 8), [geo.Grey(-0.1, 0.5, 0)]
    volume = geo.normalise(torch.from_numpy(hu + error).float())[None, None]
    found = {name: float(value) for name, value in script.scores(volume, batch, greys).items()}
    expected = {"lung_hu": 40, "soft_hu": 60, "bone_hu": 100, "mae_hu": 55}
    expected["psnr"] = 20 * math.log10(4000 / math.sqrt((error**2).mean()))
    # line integrals: mu times length
    integrals = 0.0193 * (1 + (hu + error) / 1000).mean(1).T[::-1, ::-1] * 120
    true = (batch["xrays"][0, 0].numpy() - 0.5) / -0.1
    expected["rays_pa"] = math.sqrt(((integrals - true) ** 2).mean())
    del found["ssim"]
    assert found == pytest.approx(expected, rel=1e-3)
    # SSIM of constant volumes: (2 a b + c1) / (a^2 + b^2 + c1) with c1 = (.01 * 2)^2
    batch["volume"] = torch.full((1, 8, 8, 8), 1040)
    ssim = script.scores(torch.full((1, 1, 8, 8, 8), 0.05), batch, greys)["ssim"]
    assert float(ssim) == pytest.approx(0.0024 / 0.0033, rel=1e-3)


@torch.no_grad()
def test_baselines(folder):
    """The nearest patient of a training patient is that patient; the mean is over all training patients."""
    cascade, _, train = make_cascade(folder)
    train.split = "test"
    batch = batch_of(train, [4])
    rows, _ = script.reconstruct(cascade, batch, train.data, train.data.prior_rays(cascade.greys))
    assert torch.equal(rows["nearest patient"], script.volume_of(batch))
    mean = script.volume_of(batch_of(train, range(len(train)))).mean(0, keepdim=True)
    torch.testing.assert_close(rows["mean volume"], mean, atol=1e-5, rtol=0)

    def error(row: str, xrays: str = "xrays") -> float:
        return float(script.projection_error(rows[row], batch | {"xrays": batch[xrays]}, cascade.greys).max())

    for name in ("mean volume", "linear posterior", "back-projection"):
        assert error(f"{name}, consistent") < 0.1 * error(name)
    assert error("another patient's X-rays", "other") < 0.1 * error("another patient's X-rays")


def test_table_compares_with_the_strongest_baseline(capfd):
    rng = np.random.default_rng(0)
    means = {"one step": 34, "linear posterior, consistent": 30, "mean volume": 25, "another patient's X-rays": 20}
    means["one sample"] = 31
    table = {row: {"psnr": mean + rng.random(6)} for row, mean in means.items()}
    own, baseline, *_ = (columns["psnr"] for columns in table.values())
    # a patient without bone is left out of the bone error
    table["one step"]["bone_hu"] = np.array([90, np.nan, 110])
    metrics = report.print_test(table, "4x4x4", None, "")
    assert metrics["test/bone_hu"] == 100
    assert metrics["test/rival/linear_posterior_consistent/psnr"] == baseline.mean()
    interval = stats.ttest_rel(own, baseline).confidence_interval()
    found = [metrics[f"test/psnr_above_strongest_rival_{end}"] for end in ("low", "high")]
    assert found == pytest.approx(interval)
    # twice the squared error 10 ** (-psnr / 10)
    perfect = -10 * np.log10(2 * 10 ** (-own / 10)).mean()
    assert re.search(rf"^one perfect sample +{perfect:.2f} +-$", capfd.readouterr().out, re.MULTILINE)


def test_plateau_halves_the_learning_rate_after_a_resume_too(folder, tmp_path):
    """After more than 5 evaluations, like torch's ReduceLROnPlateau. The loss does not depend on the micro-batch."""
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


def test_guides_config_as_printed(tmp_path):
    """Guide 3's config with its comments: keys of stages and sections take effect, and the command line wins."""
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
    # without stage_configs, the guide's stages take the file's values
    path.write_text('{"training": {"batch_size": 3, "accumulation_steps": 7, "physics_weight": 0}}')
    stages = script.parse_args(["--config", str(path)]).stage_configs
    assert {(s["batch_size"], s["accumulation_steps"], s["physics_weight"]) for s in stages} == {(3, 7, 0)}
    for words, sizes in (([], [16, 8, 2]), (["--batch_size", "3"], [3, 3, 3])):
        args = script.parse_args(["--config", str(ROOT / "configs/multi_view_config.json"), *words])
        assert [stage["batch_size"] for stage in args.stage_configs] == sizes


def run(folder: Path, out: Path, *words) -> dict:
    """Run the script in this process and return its results."""
    assert script.main(make_args(folder, "--checkpoint_dir", out, *words)) == 0
    name = "eval_test.json" if "--eval_only" in words else "summary.json"
    return json.loads((out / name).read_text())


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory) -> Path:
    """A finished run of two stages, with intervals."""
    out = tmp_path_factory.mktemp("run") / "run"
    run(folder, out, "--num_samples", 2)
    return out


def test_run_writes_the_documented_files(folder, finished, capfd):
    assert {"best.pt", "model.safetensors"} <= {path.name for path in finished.iterdir()}
    assert (finished / "figures" / "test.png").stat().st_size > 10_000
    summary = json.loads((finished / "summary.json").read_text())
    assert {"test/stage1_alone/psnr", "test/rival/back_projection_consistent/psnr"} <= summary.keys()
    assert 0.5 < summary["test/one_sample/coverage_90"] <= 1
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    losses = [line["val/loss"] for line in lines if "val/loss" in line]
    best = [torch.load(finished / f"stage{k}_best.pt", weights_only=True) for k in (1, 2)]
    assert best[0]["position"]["best"] == min(losses[:2])
    assert [len(saved["stds"]) for saved in best] == [1, 2]
    # no tensor with a row per patient, which would reveal CTs
    assert {name for name, value in best[0]["prior"].items() if value is None} == {"coordinates", "weights", "kernel"}
    # --eval_only gives the same numbers, and says that it ignores other stages than the checkpoint's
    again = run(folder, finished, "--eval_only", "--num_samples", 2, "--stage_configs", json.dumps(STAGES[0]))
    assert {name: summary[name] for name in again if name.startswith("test/")} | {"step": 9} == again
    assert "--stage_configs: as in the checkpoint" in capfd.readouterr().out


def test_predict_writes_the_tested_volumes(folder, finished, data):
    """From a test patient's X-rays alone: a CT in HU as close to the truth as in the table, and its uncertainty."""
    summary = run(folder, finished, "--predict", folder, "--num_samples", 2)
    patient = data.patients[data.split["test"][0]]
    image, spread = (nibabel.load(finished / "predictions" / f"{patient.id}{ending}.nii.gz") for ending in ("", "_std"))
    true = files.Data(make_args(folder), [[16] * 3]).volume(patient, [16] * 3)
    # prediction uses the training patients' mean field of view, the test the patient's own
    assert np.abs(np.asarray(image.dataobj) - true).mean() == pytest.approx(summary["test/mae_hu"], rel=0.25)
    np.testing.assert_allclose(image.header.get_zooms(), np.array(data.extent) / 16, rtol=1e-4)
    assert 0 <= np.asarray(spread.dataobj).min() < np.asarray(spread.dataobj).max() < 1000


def test_resume_from_a_stages_best_with_more_epochs(folder, finished, tmp_path):
    """Into a new folder; a finished stage ignores further epochs."""
    more = ["--stage_configs", *(json.dumps(stage | {"num_epochs": 3}) for stage in STAGES)]
    summary = run(folder, tmp_path / "run", "--resume_from", finished / "stage2_best.pt", *more)
    assert summary["epochs"] == 2 + 3
    assert {path.name for path in (tmp_path / "run").glob("*best.pt")} == {"stage2_best.pt", "best.pt"}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line).get("train/lr", 1) > 0 for line in lines)


def test_other_settings_train(folder, tmp_path, capfd):
    """One view, noise prediction, no correction, activation checkpointing, cosine; then regression compared with it."""
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
        (["--stage_configs", '{"name": "../x"}'], "must be a word"),
        ("--eval_only --num_timesteps 700 --ddim_steps 7".split(), "--ddim_steps 7: must divide"),
        ("--eval_only --split_seed 1".split(), "of the test patients were trained on; name others"),
        ("--resume_from auto --effective_batch_size 12".split(), "--effective_batch_size 12: stage1 of this run has 4"),
        ("--resume_from auto --rival_run /none".split(), "no summary.json of a finished run"),
    ],
)
def test_bad_flags(folder, finished, capfd, words, reason):
    with pytest.raises((SystemExit, InputError)) as error:
        run(folder, finished, *words)
    assert reason in f"{error.value} {capfd.readouterr().err}"
