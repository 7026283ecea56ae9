"""Augmentation of guides 0 and 1: what a change depends on, what it does to pixels, and what it never does."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import PRS_MED, ROOT, SAME, at_step, records
from PIL import Image
from scipy.ndimage import affine_transform

from old.augmentation_utils import Change, change_images, draw_change, draw_changes, draw_grain, move_masks, move_points
from tasks.prs_med.augmentation import augment, extent_of, position_stays
from tasks.prs_med.data import PositionData, Row
from tasks.prs_med.metrics import position_of

MIMIC = str(ROOT / "train_mimic_cxr.py")
SIDE = 64


class OneSize:
    """A reader whose encoders both see images of SIDE pixels."""

    image_size = SIDE
    vlm_size = SIDE

    def pixels(self, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
        values = np.array(image.resize((SIDE, SIDE)))
        tensor = torch.from_numpy(values).permute(2, 0, 1)
        return tensor, tensor

    def tokens(self, *_) -> tuple[list[int], list[int]]:
        return [1], [2]


def ellipse(rng: np.random.Generator) -> np.ndarray:
    """(SIDE, SIDE) bool: an ellipse somewhere, of any size."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    center = rng.uniform(0.1, 0.9, 2)
    radius = rng.uniform(1 / SIDE, 0.3, 2)
    along = (x - center[0]) / radius[0]
    across = (y - center[1]) / radius[1]
    return along**2 + across**2 < 1


def hostile(rng: np.random.Generator) -> np.ndarray:
    """An ellipse, often with a line as thin as a pixel or single pixels far away, which a change may lose."""
    mask = ellipse(rng)
    kind = rng.integers(4)
    if kind == 0:
        mask[rng.integers(SIDE), rng.integers(SIDE) :] = True
    if kind == 1:
        mask |= rng.random(mask.shape) < 0.001
    return mask


def geometry(change: Change) -> Change:
    """The same change without any of intensity."""
    return change._replace(brightness=1.0, contrast=1.0, gamma=1.0, noise=0.0)


def moved(mask: np.ndarray, change: Change) -> np.ndarray:
    """A mask after a change."""
    masks = as_tensor(mask)[0]
    return move_masks(masks, [change], torch.tensor([0]))[0].numpy()


def reference(values: np.ndarray, change: Change, order: int) -> np.ndarray:
    """What scipy makes of a square image, by the matrix that takes three points to where move_points takes them."""
    points = np.eye(3, 2, k=-1)
    moved_points = move_points(points, change)

    # scipy counts in rows and columns, from the middle of the first pixel
    origin, right, down = moved_points[:, ::-1]
    forward = np.stack([down - origin, right - origin], axis=1)
    inverse = np.linalg.inv(forward)
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


def test_images_and_masks_move_as_scipy_moves_them():
    """Bilinear and nearest; the intensity by its formula, in float64; black beyond the border."""
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

        mask = ellipse(rng)
        shape = reference(mask.astype(float), change, order=0)
        unlike = moved(mask, change) != (shape > 0)
        assert unlike.mean() < 0.002

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


def test_positions_stay_true():
    """Of 1000 masks, many with thin parts, none that may move is elsewhere afterwards; without the rule some are."""
    rng = np.random.default_rng(0)
    outcomes = []
    for key in range(1000):
        mask = hostile(rng)
        position = position_of(mask)
        change = draw_change(0, 0, key)
        stays = position_of(moved(mask, change)) == position
        outcomes.append((position_stays(extent_of(mask, position), change), stays))
    assert outcomes.count((True, False)) == 0
    assert outcomes.count((False, False)) > 30
    assert outcomes.count((True, True)) > 150

    # an empty mask has no position to lose, and a single pixel may be lost
    empty = np.zeros((SIDE, SIDE), bool)
    assert position_stays(extent_of(empty, None), draw_change(0, 0, 0))
    empty[20, 20] = True
    assert not position_stays(extent_of(empty, "top left"), draw_change(0, 0, 0))


def write_pair(folder: Path, name: str, mask: np.ndarray) -> None:
    """A mask and an image that shows it."""
    shown = np.where(mask, 255, 0)
    shown = Image.fromarray(shown.astype(np.uint8))
    shown.save(folder / f"{name}.png")
    shown.save(folder / f"image_{name}.png")


def batch_of(data: PositionData, places: list[int]) -> dict:
    """What augment needs of a batch of these rows."""
    items = [data[place] for place in places]
    batch = {}
    for name in ("sam", "vlm", "mask"):
        tensors = [item[name] for item in items]
        batch[name] = torch.stack(tensors)
    batch["image_of"] = torch.arange(len(places))
    batch["keys"] = [item["key"] for item in items]
    batch["extents"] = [item["extents"] for item in items]
    return batch


def test_all_masks_of_an_image_decide_whether_it_moves(tmp_path):
    """Whichever of its rows are in a batch: both masks move with their image, or none of the three."""
    safe = np.zeros((SIDE, SIDE), bool)
    safe[10:20, 10:20] = True
    write_pair(tmp_path, "safe", safe)
    # it ends a pixel above the middle, so that many changes would make it another position
    near = safe.copy()
    near[10:31, 24:40] = True
    write_pair(tmp_path, "near", near)

    rows = []
    for image, mask in (("safe", "safe"), ("near", "safe"), ("near", "near")):
        image_path = str(tmp_path / f"image_{image}.png")
        mask_path = str(tmp_path / f"{mask}.png")
        rows.append(Row("x", image_path, mask_path, "train", "where?", "there", "x.csv:2"))
    data = PositionData(rows, OneSize(), keep=False, augmented=True)

    moves = [0, 0, 0]
    for epoch in range(20):
        together = augment(batch_of(data, [0, 1, 2]), 0, epoch)
        assert torch.equal(together["sam"], together["vlm"])
        for place in range(3):
            alone = augment(batch_of(data, [place]), 0, epoch)
            mask = together["mask"][place]
            assert torch.equal(alone["mask"][0], mask)
            assert torch.equal(alone["sam"][0], together["sam"][place])
            item = data[place]
            assert position_of(mask.numpy()) == item["position"]
            moves[place] += not torch.equal(mask, item["mask"])
    assert moves[0] > 10
    assert 0 < moves[1] < 10
    assert moves[1] == moves[2]


# --- in a run ---------------------------------------------------------------------------------------------------------


class Guide(NamedTuple):
    """A script, its flags, and the flag of its run folder; 12 samples a step on any number of processes."""

    script: str
    flags: list
    folder: str


@pytest.fixture(params=["prs_med", "mimic_cxr"])
def guide(request) -> Guide:
    common = ["--log_every", "1", "--save_every", "1"]
    common += ["--augmentation", "--questions_per_image", "2", "--no-blind_scores"]
    if request.param == "prs_med":
        data = request.getfixturevalue("prs_med_data")
        flags = ["--data_root", data, "--num_epochs", "2"]
        return Guide(PRS_MED, SAME + common + flags, "--checkpoint_dir")

    data = request.getfixturevalue("mimic_cxr_flags")
    flags = ["--use_ddp", "--dropout", "0", "--learning_rate", "1e-3", "--lr_schedule", "constant"]
    flags += ["--max_samples", "30", "--epochs", "2"]
    return Guide(MIMIC, data + common + flags, "--output_dir")


def train_losses(run_folder: Path) -> list[float]:
    """The loss of each step."""
    return [record["train/loss"] for record in records(run_folder) if "train/loss" in record]


def test_an_augmented_run_is_the_same_on_any_number_of_processes_and_when_killed(guide, zygote, tmp_path):
    """1, 2 and 3 processes to 1e-5 relative; killed and resumed to the bit; and it is not the run without.

    Questions share images, in groups that the ranks' shares cut.
    """

    def run(name: str, processes: int, *more, killed: int = 0) -> list[float]:
        folder = tmp_path / name
        interrupt = at_step(folder, killed, "worker") if killed else None
        batch = ["--batch_size", 12 // processes]
        flags = [guide.folder, folder, *batch, *more]
        done = zygote(guide.script, guide.flags, flags, ranks=processes, interrupt=interrupt)
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
    flags = [guide.folder, tmp_path / "two", "--batch_size", "6", "--resume_from", "auto", "--no-augmentation"]
    done = zygote(guide.script, guide.flags, flags, ranks=2)
    assert done.code == 2
    assert "a run with augmentation True, now False" in done.stderr
