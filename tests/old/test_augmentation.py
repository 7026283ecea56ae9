"""Augmentation of guide 1: what a change depends on, and what it does to pixels."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, at_step, records
from PIL import Image
from scipy.ndimage import affine_transform

from old.augmentation_utils import Change, change_images, draw_change, draw_changes, draw_grain

MIMIC = str(ROOT / "train_mimic_cxr.py")
SIDE = 64


def geometry(change: Change) -> Change:
    """The same change without any of intensity."""
    return change._replace(brightness=1.0, contrast=1.0, gamma=1.0, noise=0.0)


def reference(values: np.ndarray, change: Change, order: int) -> np.ndarray:
    """What scipy makes of a square image turned and zoomed about its middle, then shifted."""
    cosine, sine = math.cos(change.angle), math.sin(change.angle)
    forward = change.scale * np.array([[cosine, -sine], [sine, cosine]])
    origin = forward @ (-0.5, -0.5) + 0.5 + (change.shift_x, change.shift_y)

    # scipy counts in rows and columns, from the middle of the first pixel
    inverse = np.linalg.inv(forward)[::-1, ::-1]
    origin = origin[::-1]
    offset = inverse @ (0.5 - origin * len(values)) - 0.5
    return affine_transform(values, inverse, offset=offset, order=order, mode="grid-constant")


def as_tensor(image: np.ndarray) -> torch.Tensor:
    """A grey image as a batch of one."""
    tensor = torch.from_numpy(image)
    return tensor[None, None]


def changed(image: np.ndarray, change: Change) -> np.ndarray:
    """A grey image after a change, 0 to 255."""
    images = change_images(as_tensor(image), [change])
    return images[0, 0].double().numpy()


def test_a_change_depends_on_seed_epoch_and_image_alone():
    """Not on the batch that an image is in, nor on its order; each of the three numbers counts."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (5, 3, 40, 40), dtype=torch.uint8, generator=generator)
    keys = [7, 3, 3, 900, 12]
    together = change_images(images, draw_changes(1, 2, keys))
    for place in (4, 0, 2):
        change = draw_change(1, 2, keys[place])
        alone = change_images(images[place, None], [change])
        assert torch.equal(alone[0], together[place])

    # one change for one image
    change = draw_change(1, 2, 3)
    assert change == draw_change(1, 2, 3)
    for numbers in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        other = draw_change(*numbers)
        assert other != change
    assert draw_change(-1, 0, 0) != draw_change(1, 0, 0)


def test_the_draws_are_what_they_were():
    """A run that is resumed with a later version goes on with the same images."""
    change = draw_change(seed=5, epoch=1, key=9)
    assert change.noise_seed == 1282394674569625510
    assert change.angle == pytest.approx(0.09067768222427842, rel=1e-12)


def test_images_move_as_scipy_moves_them():
    """Bilinear; the intensity by its formula, in float64; black beyond the border."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (8, 8), np.uint8)
    image = Image.fromarray(coarse).resize((SIDE, SIDE))
    image = np.array(image)
    for key in range(20):
        change = draw_change(0, 0, key)
        expected = reference(image / 255, change, order=1)
        got = changed(image, geometry(change)) / 255
        inside = reference(np.ones_like(expected), change, order=1) == 1
        off = np.abs(got - expected)
        assert off[inside].max() < 1 / 255

        # the whole of it
        grain = draw_grain(SIDE, [change], torch.device("cpu"))
        noise = change.noise * grain[0, 0].numpy()
        level = (expected**change.gamma - 0.5) * change.contrast + 0.5
        level = level * change.brightness + noise
        off = np.abs(changed(image, change) / 255 - level.clip(0, 1))
        assert off[inside].max() < 2 / 255

    # what comes in is black
    white = np.full((SIDE, SIDE), 255, np.uint8)
    aside = Change(0.25, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0)
    got = changed(white, aside)
    assert got[:, :16].max() == 0
    assert got[:, 17:].min() == 255


def test_noise_has_its_level_and_one_pattern_in_every_size():
    changes = draw_changes(0, 0, list(range(8)))
    host = torch.device("cpu")
    coarse = draw_grain(128, changes, host)
    assert coarse.std() == pytest.approx(1, abs=0.02)
    assert abs(float(coarse.mean())) < 0.02

    fine = draw_grain(256, changes, host)
    shrunk = torch.nn.functional.avg_pool2d(fine, 2)
    pairs = torch.stack([shrunk.flatten(), coarse.flatten()])
    correlation = torch.corrcoef(pairs)
    assert correlation[0, 1] > 0.9


# --- in a run ---------------------------------------------------------------------------------------------------------


def train_losses(run_folder: Path) -> list[float]:
    """The loss of each step."""
    return [record["train/loss"] for record in records(run_folder) if "train/loss" in record]


def test_an_augmented_run_is_the_same_on_any_number_of_processes_and_when_killed(mimic_cxr_flags, zygote, tmp_path):
    """1, 2 and 3 processes to 1e-5 relative; killed and resumed to the bit; and it is not the run without.

    Questions share images, in groups that the ranks' shares cut; a step has 12.
    """
    common = [*mimic_cxr_flags, "--log_every", "1", "--save_every", "1", "--no-blind_scores", "--use_ddp"]
    common += ["--augmentation", "--questions_per_image", "2", "--dropout", "0", "--learning_rate", "1e-3"]
    common += ["--lr_schedule", "constant", "--max_samples", "30", "--epochs", "2"]

    def run(name: str, processes: int, *more, killed: int = 0) -> list[float]:
        folder = tmp_path / name
        interrupt = at_step(folder, killed, "worker") if killed else None
        batch = ["--batch_size", 12 // processes]
        flags = ["--output_dir", folder, *batch, *more]
        done = zygote(MIMIC, common, flags, ranks=processes, interrupt=interrupt)
        assert killed or done.code == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return train_losses(folder)

    two = run("two", 2)
    assert len(two) == 6
    run("killed", 2, "--resume_from", "auto", killed=2)
    assert run("killed", 2, "--resume_from", "auto") == two
    for processes in (1, 3):
        other = run(str(processes), processes)
        assert other == pytest.approx(two, rel=1e-5)

    # without it the first step is another one, and a run that had it does not go on
    plain = run("plain", 1, "--no-augmentation", "--max_steps", "1")
    assert plain[0] != pytest.approx(two[0], rel=1e-4)
    flags = ["--output_dir", tmp_path / "two", "--batch_size", "6", "--resume_from", "auto", "--no-augmentation"]
    done = zygote(MIMIC, common, flags, ranks=2)
    assert done.code == 2
    assert "a run with augmentation True, now False" in done.stderr
