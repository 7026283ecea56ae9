"""What each stage of the cascade is given in sampling: the volume of the stage before, with a little noise on it."""

import pytest
import torch

import tasks.cascade.sampling as sampling
from tasks.cascade.diffusion import PREVIOUS_NOISE_SAMPLING, Diffusion, make_scheduler

# two stages; a grid that is large enough to measure the noise's size on
SIZES = [[16, 16, 16], [32, 32, 32]]


@pytest.fixture
def given(monkeypatch):
    """given(indices, zeroed) -> (the volumes of all stages, what the second stage was given), by a model of noise."""

    def sample(indices: list[int], zeroed: bool = False):
        calls = []

        def denoise(model, scheduler, x, timestep, xrays, previous):
            calls.append(previous)
            return 0.5 * x, None

        monkeypatch.setattr(sampling, "denoise", denoise)
        scheduler = make_scheduler(num_timesteps=20, ddim_steps=2, v_parameterization=True)
        diffusion = Diffusion(scheduler, seed=3, sizes=SIZES)
        xrays = torch.zeros(len(indices), 2, 8, 8)
        volumes = sampling.sample_cascade(["first", "second"], xrays, indices, diffusion, "no", zeroed)
        first, again, second, still = calls
        assert first is None
        assert again is None
        assert second is still
        return volumes, second

    return sample


def test_the_stage_before_has_the_noise_that_its_level_says(given):
    volumes, previous = given([5, 9])
    noise = previous.volume - volumes[0]
    assert previous.level.tolist() == pytest.approx([PREVIOUS_NOISE_SAMPLING] * 2)
    assert noise.std((1, 2, 3, 4)).tolist() == pytest.approx([PREVIOUS_NOISE_SAMPLING] * 2, rel=0.05)
    assert abs(float(noise.mean())) < 0.05 * PREVIOUS_NOISE_SAMPLING

    # a patient's noise depends on the patient alone
    _, beside_others = given([9])
    assert torch.equal(beside_others.volume[0], previous.volume[1])
    assert not torch.equal(noise[0], noise[1])


def test_a_stage_before_that_is_zeroed_is_noise_alone(given):
    """What --check_conditioning compares with."""
    volumes, previous = given([5], zeroed=True)
    assert volumes[0].std() > 0.1
    assert float(previous.volume.std()) == pytest.approx(PREVIOUS_NOISE_SAMPLING, rel=0.05)
