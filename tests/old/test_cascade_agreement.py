"""Volumes held to their X-rays, against dense linear algebra in NumPy; what a cascade knows beforehand; coverage."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from tasks.cascade.agreement import (
    LAST_CORRECTIONS,
    Measured,
    agree,
    correct,
    made_consistent,
    measure_xrays,
    start_volume,
)
from tasks.cascade.alignment import GreyFit, fit_greys
from tasks.cascade.metrics import coverage, gradient_magnitude
from tasks.cascade.projector import MU_WATER, VIEWS, project, project_back, sum_rays
from tasks.cascade.views import LAT, PA

SIZE = (4, 5, 6)
SPACING = torch.tensor([[90.0, 60.0, 50.0], [80.0, 70.0, 55.0]])
GREYS = [
    GreyFit(PA, 0.2, -1.0, 1.0, 0.05),
    GreyFit(LAT, -0.25, 0.9, -1.0, 0.1),
]


def random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Numbers from 0 to 1 that are the same in each run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator)


def flat(volume: torch.Tensor) -> np.ndarray:
    """All numbers of a volume or an image in one row, in float64."""
    return volume.double().flatten().numpy()


def matrix_of(place: int, view: str) -> np.ndarray:
    """(pixels, voxels): what `project` adds for each voxel of one patient, column by column, in float64."""
    air = torch.full((1, 1, *SIZE), -1.0)
    spacing = SPACING[place : place + 1]
    columns = []
    for voxel in range(air.numel()):
        volume = air.clone()
        volume.view(-1)[voxel] = 0.0
        image = project(volume, spacing, view)
        columns.append(flat(image))
    return np.stack(columns, 1)


@pytest.mark.parametrize("view", VIEWS)
def test_rays_forth_and_back_are_transposes(view):
    """<Px, y> = <x, P'y>, and P is the linear part of `project`."""
    volume = random((2, 1, *SIZE)) * 2 - 1
    integrals = sum_rays(volume, SPACING, view)
    images = random(integrals.shape, seed=1)
    back = project_back(images, SPACING, view, SIZE)
    of_images = (integrals * images).double().sum()
    of_volumes = (volume * back).double().sum()
    assert float(of_volumes) == pytest.approx(float(of_images), rel=1e-5)

    # a projection is of what is more than air
    air = torch.full_like(volume, -1.0)
    nothing = torch.zeros_like(integrals)
    assert torch.allclose(project(air, SPACING, view), nothing, atol=1e-5)
    sums = sum_rays(volume - air, SPACING, view)
    projections = project(volume, SPACING, view)
    assert torch.allclose(sums, projections, rtol=1e-5)

    # a step of 1 from air adds 2000 HU, over the length of a voxel
    ray_axis = 1 if view == "pa" else 0
    length = float(SPACING[0, ray_axis])
    of_each_voxel = matrix_of(0, view).sum(0)
    assert np.allclose(of_each_voxel, MU_WATER * 2 * length, rtol=1e-5)


@pytest.mark.parametrize("even", [True, False], ids=["one-variance", "variance-of-each-voxel"])
def test_a_correction_is_the_best_linear_estimate(even):
    """V + C A' (A C A' + N)^-1 (y - A V) of a dense solver, for two patients of other fields of view at once."""
    volume = random((2, 1, *SIZE)) - 1
    variance = 0.04
    covariance = np.full(volume[0].numel(), variance)
    if not even:
        variance = 0.01 + 0.05 * random((1, 1, *SIZE), seed=3)
        covariance = flat(variance)
    true = random((2, 1, *SIZE), seed=4) - 1
    error = 0.2 * random((1,), seed=5)
    integrals = [project(true, SPACING, view) + error for view in VIEWS]
    noise = [0.05, 0.1]
    measured = Measured([PA, LAT], integrals, noise, SPACING)
    nothing = [torch.zeros_like(integral) for integral in integrals]
    corrected, explained = correct(volume, measured, variance, 60, nothing)

    # what is noise by then stays noise
    again, _ = correct(corrected, measured, variance, 60, explained)
    assert torch.allclose(again, corrected, atol=1e-4)

    # the diagonal of N
    noise_variance = []
    for integral, std in zip(integrals, noise, strict=True):
        pixels = integral[0].numel()
        noise_variance += [std**2] * pixels

    for place in range(2):
        rays = np.concatenate([matrix_of(place, view) for view in VIEWS])
        spread = covariance[:, None] * rays.T
        system = rays @ spread + np.diag(noise_variance)

        # projections are of what is more than air
        before = flat(volume[place]) + 1
        xrays = np.concatenate([flat(integral[place]) for integral in integrals])
        weights = np.linalg.solve(system, xrays - rays @ before)
        expected = before + spread @ weights - 1
        assert np.allclose(flat(corrected[place]), expected, atol=2e-4)


def projection_errors(volume: torch.Tensor, measured: Measured) -> list[float]:
    errors = []
    for view, integral in zip(VIEWS, measured.integrals, strict=True):
        difference = project(volume, measured.spacing, view) - integral
        errors.append(float(difference.square().mean().sqrt()))
    return errors


def test_volumes_agree_with_what_was_measured_and_hold_no_less_than_air():
    """X-rays of another resolution and of negative greys, too; what agrees already is left as it is."""
    true = random((2, 1, 16, 12, 8)) - 1
    true[:, :, :4] = -1
    extent = torch.tensor([[320.0, 240.0, 160.0], [300.0, 250.0, 170.0]])
    spacing = extent / torch.tensor([16, 12, 8])
    images = []
    for view, fit in zip(VIEWS, GREYS, strict=True):
        image = fit.slope * project(true, spacing, view) + fit.offset
        images.append(interpolate(image, (48, 48), mode="nearest-exact"))
    xrays = torch.cat(images, 1)

    # the true volume
    measured = measure_xrays(xrays, extent, GREYS, (16, 12, 8))
    assert measured.noise == [0.05, 0.1]
    assert max(projection_errors(true, measured)) < 1e-4
    corrected = agree(true, measured, 0.01)
    assert torch.allclose(corrected, true, atol=1e-4)

    # from elsewhere
    start = torch.full_like(true, -0.9)
    corrected = agree(start, measured, 0.05, corrections=LAST_CORRECTIONS)
    assert corrected.min() >= -1
    assert corrected.max() <= 1
    before = projection_errors(start, measured)
    after = projection_errors(corrected, measured)
    for k, fit in enumerate(GREYS):
        assert after[k] < 0.05 * before[k]
        assert after[k] < 1.1 * fit.noise
    mse_before = (start - true).square().mean()
    mse_after = (corrected - true).square().mean()
    assert mse_after < 0.5 * mse_before

    # what it is compared with
    rival = made_consistent(start, measured)
    assert max(projection_errors(rival, measured)) < 0.02

    # a large tolerance leaves the volume alone
    vague = measured._replace(noise=[1e3, 1e3])
    corrected = agree(start, vague, 0.05)
    assert torch.allclose(corrected, start, atol=1e-4)

    # and one as large as the errors keeps its share, however often the volume is corrected
    half = measured._replace(noise=[1.0, 1.0])
    once = agree(start, half, 0.001, corrections=1)
    often = agree(start, half, 0.001, corrections=5)
    assert (once - start).abs().mean() > 1e-3
    assert torch.allclose(often, once, atol=1e-4)


def test_exact_x_rays_may_contradict_each_other_by_a_rounding_error():
    """The difference of the two views' sums, which no volume explains, is not blown up."""
    true = torch.full((1, 1, 16, 16, 16), -0.44)
    extent = torch.tensor([[320.0, 320.0, 320.0]])
    integrals = [project(true, extent / 16, view) for view in VIEWS]
    integrals[0] = integrals[0] + 1e-6
    exact = [fit._replace(slope=1.0, offset=0.0, noise=0.0) for fit in GREYS]
    measured = measure_xrays(torch.cat(integrals, 1), extent, exact, (16, 16, 16))
    start = torch.full_like(true, -0.75)
    for variance in (0.0625, torch.full_like(true, 0.0625)):
        corrected = agree(start, measured, variance, corrections=5)
        assert torch.allclose(corrected, true, atol=1e-3)


def test_noise_is_what_the_straight_line_does_not_explain():
    rng = np.random.default_rng(0)
    integrals = rng.uniform(0, 10, (50, 1, 32, 32)).astype(np.float32)
    noise = rng.normal(0, 0.3, integrals.shape)
    images = 0.2 * (integrals + noise) - 1
    (fit,) = fit_greys(integrals, images.astype(np.float32), (PA,))
    assert fit.slope == pytest.approx(0.2, rel=1e-3)
    assert fit.noise == pytest.approx(0.3, rel=0.02)


# --- what is known beforehand -----------------------------------------------------------------------------------------


def load_small(cascade_data: Path, flags: list):
    """A setup of one small stage, and its data."""
    import train_accelerate as script
    from tasks.cascade.data import source_of_flags
    from tasks.cascade.setup import Setup

    stage = {
        "name": "only",
        "volume_size": [8, 8, 8],
        "voxel_dim": 16,
        "vit_depth": 1,
        "num_heads": 2,
        "token_grid": 4,
    }
    words = ["--stage_configs", json.dumps([stage])]
    words += ["--img_size", "32", "--encoder_dim", "16"]
    words += ["--dataset_path", str(cascade_data)]
    args = script.parse_args([*words, *flags])
    device = torch.device("cpu")
    source = source_of_flags(vars(args), args.source, device)
    return Setup(args, device, "no", source.load([[8, 8, 8]]))


def test_the_prior_is_of_the_training_patients(cascade_data, tmp_path):
    """Mean and variance of each voxel, and how wrong the start is, as NumPy has them; agreement makes it less wrong."""
    from torch.utils.data import default_collate

    from tasks.cascade.data import prepare

    stds = {}
    for flag in ("--xray_agreement", "--no-xray_agreement"):
        setup = load_small(cascade_data, [flag, "--cache_dir", str(tmp_path)])
        setup.take_prior(None)
        prior = setup.diffusion.prior

        # all training patients in one batch
        dataset = setup.data.set("train", [8, 8, 8])
        rows = [dataset[i] for i in range(len(dataset))]
        batch = prepare(default_collate(rows), torch.device("cpu"))
        volumes = batch["volume"].double().numpy()
        mean = volumes.mean(0, keepdims=True)
        variance = volumes.var(0, keepdims=True)
        variance = np.maximum(variance, 1e-4)
        assert np.allclose(prior.mean.numpy(), mean, atol=1e-6)
        assert np.allclose(prior.variance.numpy(), variance, atol=1e-6)

        # how wrong the start is
        start = start_volume(prior, batch, (8, 8, 8), setup.diffusion.agreement)
        squares = np.square(start.numpy() - volumes)
        stds[flag] = np.sqrt(squares.mean())
        assert prior.std == pytest.approx(stds[flag], rel=1e-3)
        if flag == "--no-xray_agreement":
            assert torch.equal(start, prior.mean.expand_as(start))
    assert stds["--xray_agreement"] < 0.7 * stds["--no-xray_agreement"]


# --- several samples --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4, 8])
def test_intervals_hold_the_truth_as_often_as_they_say(count):
    """Where truth and samples are of one distribution, whatever the number of samples."""
    generator = torch.Generator().manual_seed(count)
    centre = 0.2 * torch.randn(1, 1, 32, 32, 32, generator=generator)
    spread = 0.02 + 0.1 * random(centre.shape)

    def draw() -> torch.Tensor:
        noise = torch.randn(centre.shape, generator=generator)
        return centre + spread * noise

    samples = torch.stack([draw() for _ in range(count)])
    true = draw()
    for nominal in (0.5, 0.9):
        held = coverage(samples, true, nominal)
        assert float(held) == pytest.approx(nominal, abs=0.02)

    # air does not count, wherever the samples are
    with_air = true.clone()
    with_air[..., :16] = -1.0
    elsewhere = samples.clone()
    elsewhere[..., :16] = 0.0
    held = coverage(elsewhere, with_air, 0.9)
    assert float(held) == pytest.approx(0.9, abs=0.02)


def test_gradient_magnitude_against_numpy():
    volume = random((2, 1, 5, 6, 7)).double()
    magnitudes = gradient_magnitude(volume)
    for x, magnitude in zip(volume[:, 0].numpy(), magnitudes, strict=True):
        # forward differences, where there is a next voxel along all three axes
        steps = [
            np.diff(x[:, :-1, :-1], axis=0),
            np.diff(x[:-1, :, :-1], axis=1),
            np.diff(x[:-1, :-1, :], axis=2),
        ]
        squares = np.square(steps).sum(0)
        expected = np.sqrt(squares).mean()
        assert float(magnitude) == pytest.approx(expected, rel=1e-9)
