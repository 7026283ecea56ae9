"""What each stage of the cascade is given in training and in sampling, by models whose answers are known."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import interpolate

import tasks.cascade.sampling as sampling
from tasks.cascade.agreement import Measured
from tasks.cascade.diffusion import LOSS_DRAWS, PREVIOUS_NOISE_SAMPLING, Diffusion, denoise, diffused, make_diffusion
from tasks.cascade.diffusion import noise_like, prediction_of, training_draw, validation_draw
from tasks.cascade.projector import VIEWS, project
from tasks.cascade.sampling import Sampling, Trained, as_estimated, sample_cascade, several_samples
from tasks.cascade.views import DEFAULT_VIEWS

# two stages; a grid that is large enough to measure the noise's size on
SIZES = [[16, 16, 16], [32, 32, 32]]
CPU = torch.device("cpu")
EXTENT = [320.0, 320.0, 320.0]


def diffusion_of(**flags) -> Diffusion:
    values = {
        "num_timesteps": 20,
        "ddim_steps": 4,
        "v_parameterization": True,
        "stage_configs": [{"volume_size": size} for size in SIZES],
        "views": DEFAULT_VIEWS,
        "seed": 3,
        "xray_agreement": False,
        "regression": False,
    }
    return make_diffusion(values | flags, CPU)


def batch_of(indices: list[int]) -> dict:
    """Patients of random volumes, with X-rays that are their projections: UNKNOWN_GREY is a slope of 1."""
    # each patient is of one density, a function of the index
    generator = torch.Generator().manual_seed(0)
    density = torch.rand(1000, generator=generator)[indices]
    volume = torch.zeros(len(indices), 1, *SIZES[1])
    volume += density[:, None, None, None, None] - 1

    extent = torch.tensor([EXTENT] * len(indices))
    images = [project(volume, extent / 32, view) for view in VIEWS]
    xrays = torch.cat(images, 1)
    return {
        "volume": volume,
        "xrays": xrays,
        "seen": xrays,
        "extent": extent,
        "index": indices,
    }


def start_of(call: SimpleNamespace) -> torch.Tensor:
    """What a stage starts from: its model is given (start + .75) / .25."""
    return 0.25 * call.known - 0.75


class Knowing:
    """A model of stage k that answers as if the clean volume were a constant, and notes what it is given."""

    def __init__(self, k: int, diffusion: Diffusion, clean: float):
        self.size = tuple(SIZES[k])
        self.position = torch.zeros(1)
        self.diffusion = diffusion
        self.clean = clean
        self.calls: list[SimpleNamespace] = []

    def __call__(self, noisy, time, xrays, known, level, extent):
        call = SimpleNamespace(noisy=noisy, time=time, known=known, level=level)
        self.calls.append(call)
        residual = self.clean - start_of(call)
        residual = residual / self.diffusion.prior.std

        # what noisy and v are made of
        timestep = (time * 20).round().long() - 1
        alpha = self.diffusion.scheduler.alphas_cumprod[timestep]
        alpha = alpha[:, None, None, None, None]
        signal_scale = alpha.sqrt()
        noise_scale = (1 - alpha).sqrt()
        noise = (noisy - signal_scale * residual) / noise_scale
        return signal_scale * noise - noise_scale * residual


def cascade_of(diffusion: Diffusion, *clean: float) -> Trained:
    models = [Knowing(k, diffusion, value) for k, value in enumerate(clean)]
    names = ["first", "second"][: len(clean)]
    return Trained(models, names, diffusion, "no")


def test_each_stage_starts_from_the_one_before_with_the_noise_that_its_level_says():
    cascade = cascade_of(diffusion_of(), -0.4, -0.3)
    volumes = sample_cascade(cascade, batch_of([5, 9]), Sampling())
    for k, clean in enumerate((-0.4, -0.3)):
        expected = torch.full((2, 1, *SIZES[k]), clean)
        assert torch.allclose(volumes[k], expected, atol=1e-5)

    # the first starts from the prior's mean, without noise
    first, second = (model.calls[0] for model in cascade.models)
    assert not first.known.any()
    assert first.level.tolist() == [0, 0]
    assert second.level.tolist() == pytest.approx([PREVIOUS_NOISE_SAMPLING] * 2)

    # noise of the coarser grid, which the finer one smooths
    keys = [(3, 4, 1, index, 2) for index in (5, 9)]
    coarse = noise_like((1, *SIZES[0]), CPU, keys)
    smoothed = interpolate(coarse, scale_factor=2, mode="trilinear")
    noise = start_of(second) + 0.4
    assert torch.allclose(noise, PREVIOUS_NOISE_SAMPLING * smoothed, atol=1e-5)


def test_noise_depends_on_patient_and_sample_alone():
    def noise_of(indices: list[int], number: int) -> torch.Tensor:
        cascade = cascade_of(diffusion_of(), -0.4)
        sample_cascade(cascade, batch_of(indices), Sampling(number=number))
        return cascade.models[0].calls[1].noisy

    first, second = noise_of([5, 9], 0)
    (alone,) = noise_of([9], 0)
    (other_sample,) = noise_of([9], 1)
    assert torch.equal(alone, second)
    assert not torch.allclose(first, second)
    assert not torch.allclose(other_sample, second)

    # all samples differ, and the first is that of a run that asks for one
    cascade = cascade_of(diffusion_of(), -0.4)
    _, samples = several_samples(cascade, batch_of([5]), 3)
    calls = cascade.models[0].calls
    assert samples.shape == (3, 1, 1, *SIZES[0])
    assert torch.equal(calls[1].noisy[0], first)
    assert not torch.allclose(calls[1].noisy, calls[5].noisy)


@pytest.mark.parametrize(
    ("flags", "how", "calls"),
    [
        ({}, Sampling(), 4),
        ({}, Sampling(one_step=True), 1),
        ({"regression": True}, Sampling(), 1),
    ],
    ids=["diffusion", "one-step", "regression"],
)
def test_the_first_step_sees_no_noise(flags, how, calls):
    cascade = cascade_of(diffusion_of(**flags), -0.4)
    sample_cascade(cascade, batch_of([5]), how)
    seen = cascade.models[0].calls
    assert len(seen) == calls
    assert float(seen[0].time) == 1
    assert not seen[0].noisy.any()
    for call in seen[1:]:
        assert call.noisy.std() > 0.1

    # with noise prediction nothing is learned without noise
    cascade = cascade_of(diffusion_of(v_parameterization=False), -0.4)
    volumes = sample_cascade(cascade, batch_of([5]), Sampling())
    first = cascade.models[0].calls[0]
    assert first.noisy.std() > 0.9
    expected = torch.full_like(volumes[0], -0.4)
    assert torch.allclose(volumes[0], expected, atol=1e-3)


def test_a_stage_before_that_is_zeroed_is_noise_alone():
    """What --check_conditioning compares with."""
    cascade = cascade_of(diffusion_of(), -0.4, -0.3)
    sample_cascade(cascade, batch_of([5]), Sampling(zeroed=True))
    second = cascade.models[1].calls[0]
    start = start_of(second)
    assert start.mean().abs() < 0.01
    assert start.std() < PREVIOUS_NOISE_SAMPLING


def errors_of(volume: torch.Tensor, batch: dict) -> list[float]:
    """By view, the root mean square difference of a volume's projections and the X-rays."""
    errors = []
    spacing = batch["extent"] / volume.shape[-1]
    for k, view in enumerate(VIEWS):
        image = batch["xrays"][:, k : k + 1]
        image = interpolate(image, volume.shape[-2:], mode="area")
        difference = project(volume, spacing, view) - image
        error = difference.square().mean().sqrt()
        errors.append(float(error))
    return errors


def test_every_stage_and_every_start_agrees_with_the_x_rays():
    """Whatever the models say; and without the flag, or for one sample without it, nothing is corrected."""
    batch = batch_of([5, 9])
    cascade = cascade_of(diffusion_of(xray_agreement=True), -0.2, -0.3)
    volumes = sample_cascade(cascade, batch, Sampling())
    for volume, model in zip(volumes, cascade.models, strict=True):
        errors = errors_of(volume, batch)
        assert max(errors) < 0.02
        errors = errors_of(start_of(model.calls[0]), batch)
        assert max(errors) < 1e-3

    # one sample without agreement
    *_, free = sample_cascade(cascade, batch, Sampling(agree=False))
    expected = torch.full_like(free, -0.3)
    assert torch.allclose(free, expected, atol=1e-4)
    assert max(errors_of(free, batch)) > 0.2

    # a cascade without agreement
    cascade = cascade_of(diffusion_of(), -0.2, -0.3)
    *_, without = sample_cascade(cascade, batch, Sampling())
    assert torch.allclose(without, free, atol=1e-4)


def test_an_estimate_is_the_surer_the_less_noise_is_left(monkeypatch):
    """The variance that a correction reckons with falls from step to step; the last one agrees as well as it can."""
    variances = []

    def agree(volume, measured: Measured, variance, corrections):
        largest = torch.as_tensor(variance).max()
        variances.append(float(largest))
        return volume

    monkeypatch.setattr(sampling, "agree", agree)
    diffusion = diffusion_of(xray_agreement=True)
    cascade = cascade_of(diffusion, -0.4)
    sample_cascade(cascade, batch_of([5]), Sampling())
    variance = diffusion.prior.std**2
    signal = diffusion.scheduler.alphas_cumprod[[19, 14, 9]]
    falling = variance * (1 - signal)
    expected = [*falling.tolist(), variance]
    assert variances == pytest.approx(expected, rel=1e-5)


# --- training ---------------------------------------------------------------------------------------------------------


def test_a_stage_is_trained_on_what_the_stages_before_give():
    """In one step each; it starts from that with noise of its own level, a function of epoch and patient."""
    diffusion = diffusion_of()
    batch = batch_of([5, 9])
    untrained = cascade_of(diffusion)
    assert as_estimated(untrained, batch, epoch=0) is None
    cascade = cascade_of(diffusion, -0.4)
    previous = as_estimated(cascade, batch, epoch=0)
    assert len(cascade.models[0].calls) == 1
    expected = torch.full_like(previous, -0.4)
    assert torch.allclose(previous, expected, atol=1e-5)

    # two draws of one epoch, and one of the next
    start = training_draw(1, batch, previous, 0, diffusion).start
    again = training_draw(1, batch, previous, 0, diffusion).start
    later = training_draw(1, batch, previous, 1, diffusion).start
    assert torch.equal(start.volume, again.volume)
    assert not torch.equal(start.volume, later.volume)
    added = start.volume + 0.4
    for noise, level in zip(added, start.level.tolist(), strict=True):
        assert 0 < level < 0.1
        # linear interpolation leaves two thirds of the noise's deviation along each axis, about
        assert float(noise.std()) == pytest.approx(0.5 * level, rel=0.15)

    # where nothing is trained yet, the true volume stands for it
    tried = training_draw(1, batch, None, 0, diffusion).start
    difference = tried.volume - batch["volume"]
    assert torch.allclose(difference, added, atol=1e-5)


def test_half_of_the_draws_are_of_the_last_timestep():
    """Where the model is shown zeros; in a regression all of them, and in noise prediction hardly any."""

    def draws_of(**flags) -> tuple[torch.Tensor, torch.Tensor]:
        diffusion = diffusion_of(**flags)
        batch = batch_of(list(range(200)))
        corner = batch["volume"][..., :16, :16, :16]
        batch["volume"] = corner.contiguous()
        draw = training_draw(0, batch, None, 0, diffusion)
        shown, _ = diffused(batch["volume"], draw, diffusion)
        loudest = shown.abs().amax((1, 2, 3, 4))
        return draw.timestep == 19, loudest == 0

    last, silent = draws_of()
    assert torch.equal(last, silent)
    assert 0.4 < last.float().mean() < 0.65

    # in a regression
    last, silent = draws_of(regression=True)
    assert last.all()
    assert silent.all()

    # in noise prediction
    last, silent = draws_of(v_parameterization=False)
    assert last.float().mean() < 0.15
    assert not silent.any()

    # in validation the last draw is, and the others are spread over all timesteps
    batch = batch_of([5, 9])
    timesteps = set()
    for number in range(LOSS_DRAWS):
        draw = validation_draw(1, batch, None, [0, 1], number, diffusion_of())
        timesteps.update(draw.timestep.tolist())
    assert draw.timestep.tolist() == [19, 19]
    assert len(timesteps) == 7


@pytest.mark.parametrize("v_parameterization", [True, False])
def test_prediction_and_clean_volume_are_the_same_statement(v_parameterization):
    """What the scheduler is told of a clean volume leads it back there; a model that knows v finds the true volume."""
    diffusion = diffusion_of(v_parameterization=v_parameterization)
    batch = batch_of([5, 9, 7])
    draw = training_draw(1, batch, None, 0, diffusion)
    start = draw.start
    true = batch["volume"]
    timesteps = torch.tensor([1, 9, 18])
    draw = draw._replace(timestep=timesteps, noise=torch.randn(true.shape))
    noisy, v = diffused(true, draw, diffusion)
    _, clean = denoise(lambda *given: v, noisy, timesteps, batch, start, diffusion)
    assert torch.allclose(clean, true, atol=1e-5)

    # what the scheduler makes of it
    other = torch.rand_like(clean) - 1
    output = prediction_of(other, noisy, timesteps, start, diffusion)
    for i, timestep in enumerate(timesteps.tolist()):
        _, residual = diffusion.scheduler.step(output[i], timestep, noisy[i])
        named = start.volume[i] + start.std * residual
        assert torch.allclose(named, other[i], atol=1e-3)
