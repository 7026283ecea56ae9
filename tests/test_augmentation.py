"""Augmentation of guides 0 and 1: what a change depends on, what it does to pixels, and what it never does."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import PRS_MED, ROOT, SAME, at_step, records
from PIL import Image
from scipy.ndimage import affine_transform

from augmentation_utils import Change, change_images, draw_change, draw_changes, draw_grain, move_masks, move_points
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
        values = np.array(image.resize((SIDE, SIDE))).transpose(2, 0, 1)
        return torch.from_numpy(values), torch.from_numpy(values)

    def tokens(self, *_) -> tuple[list[int], list[int]]:
        return [1], [2]


def ellipse(rng: np.random.Generator) -> np.ndarray:
    """(SIDE, SIDE) bool: an ellipse somewhere, of any size."""
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    center_x, center_y = rng.uniform(0.1, 0.9, 2) * SIDE
    radius_x, radius_y = rng.uniform(1, 0.3 * SIDE, 2)
    return ((x - center_x) / radius_x) ** 2 + ((y - center_y) / radius_y) ** 2 < 1


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
    return move_masks(torch.from_numpy(mask)[None], [change])[0].numpy()


def reference(values: np.ndarray, change: Change, order: int) -> np.ndarray:
    """What scipy makes of a square image, by the matrix that takes three points to where move_points takes them."""
    points = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    origin, right, down = move_points(points, change)
    forward = np.stack([right - origin, down - origin], axis=1)

    # scipy counts in rows and columns, from the middle of the first pixel
    swap = np.array([[0, 1], [1, 0]])
    inverse = swap @ np.linalg.inv(forward) @ swap
    offset = inverse @ (0.5 - origin[::-1] * len(values)) - 0.5
    return affine_transform(values, inverse, offset=offset, order=order, mode="grid-constant")


def test_a_change_depends_on_seed_epoch_and_image_alone():
    """Not on the batch that an image is in, nor on its order; each of the three numbers counts."""
    images = torch.randint(0, 256, (5, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    keys = [7, 3, 3, 900, 12]
    together = change_images(images, draw_changes(1, 2, keys))
    for place in (4, 0, 2):
        alone = change_images(images[place : place + 1], [draw_change(1, 2, keys[place])])
        assert torch.equal(alone[0], together[place])

    # one change for one image
    assert draw_change(1, 2, 3) == draw_change(1, 2, 3)
    others = {draw_change(1, 2, 3), draw_change(0, 2, 3), draw_change(1, 3, 3), draw_change(1, 2, 4)}
    assert len(others) == 4
    assert draw_change(-1, 0, 0) != draw_change(1, 0, 0)


def test_the_draws_are_what_they_were():
    """A run that is resumed with a later version goes on with the same images."""
    change = draw_change(seed=5, epoch=1, key=9)
    assert change.noise_seed == 1282394674569625510
    assert change.angle == pytest.approx(0.09067768222427842, rel=1e-12)


def test_images_and_masks_move_as_scipy_moves_them():
    """Bilinear and nearest; the intensity by its formula, in float64; black beyond the border."""
    rng = np.random.default_rng(0)
    smooth = np.array(Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).resize((SIDE, SIDE)))
    for key in range(20):
        change = draw_change(0, 0, key)
        expected = reference(smooth.astype(float), change, order=1)
        pixels = torch.from_numpy(smooth)[None, None]
        got = change_images(pixels, [geometry(change)])[0, 0].numpy().astype(float)
        inside = reference(np.ones((SIDE, SIDE)), change, order=1) == 1
        assert np.abs(got - expected)[inside].max() < 1

        mask = ellipse(rng)
        shape = reference(mask.astype(float), change, order=0) > 0
        assert (moved(mask, change) != shape).mean() < 0.002

        # the whole of it
        grain = draw_grain(SIDE, [change], torch.device("cpu"))[0, 0].double().numpy()
        level = ((expected / 255) ** change.gamma - 0.5) * change.contrast + 0.5
        level = level * change.brightness + change.noise * grain
        whole = change_images(pixels, [change])[0, 0].numpy() / 255
        assert np.abs(whole - level.clip(0, 1))[inside].max() < 2 / 255

    # what comes in is black
    white = torch.full((1, 1, SIDE, SIDE), 255, dtype=torch.uint8)
    away = draw_change(0, 0, 0)._replace(shift_x=0.25, scale=1.0, angle=0.0)
    assert change_images(white, [geometry(away)])[0, 0, :, :15].max() == 0


def test_noise_has_its_level_and_one_pattern_in_every_size():
    changes = draw_changes(0, 0, list(range(8)))
    fine = draw_grain(256, changes, torch.device("cpu"))
    coarse = draw_grain(128, changes, torch.device("cpu"))
    assert coarse.std() == pytest.approx(1, abs=0.02)
    assert abs(float(coarse.mean())) < 0.02
    shrunk = torch.nn.functional.avg_pool2d(fine, 2)
    pairs = torch.stack([shrunk.flatten(), coarse.flatten()])
    assert torch.corrcoef(pairs)[0, 1] > 0.9


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


def test_all_masks_of_an_image_decide_whether_it_moves(tmp_path):
    """Whichever of its rows are in a batch: both move, or neither, and all with their image."""
    safe = np.zeros((SIDE, SIDE), bool)
    safe[10:20, 10:20] = True
    near = safe.copy()
    # it ends a pixel above the middle, so that many changes would make it another position
    near[10:31, 24:40] = True
    rows = []
    for name, mask in {"safe": safe, "near": near}.items():
        Image.fromarray(np.where(mask, 255, 0).astype(np.uint8)).save(tmp_path / f"{name}.png")
        Image.fromarray(mask).convert("RGB").save(tmp_path / f"image_{name}.png")
    for image, mask in (("image_safe", "safe"), ("image_near", "safe"), ("image_near", "near")):
        files = [str(tmp_path / f"{name}.png") for name in (image, mask)]
        rows.append(Row("x", files[0], files[1], "train", "where?", "there", "x.csv:2"))
    data = PositionData(rows, OneSize(), keep=False, augmented=True)

    def batch_of(places: list[int]) -> dict:
        items = [data[place] for place in places]
        batch = {name: torch.stack([item[name] for item in items]) for name in ("sam", "vlm", "mask")}
        return batch | {"keys": [item["key"] for item in items], "extents": [item["extents"] for item in items]}

    moves = {0: 0, 1: 0, 2: 0}
    for epoch in range(20):
        whole = augment(batch_of([0, 1, 2]), 0, epoch)
        for place in range(3):
            alone = augment(batch_of([place]), 0, epoch)
            assert torch.equal(alone["mask"][0], whole["mask"][place])
            assert torch.equal(alone["sam"][0], whole["sam"][place])
            before = data[place]["mask"]
            moves[place] += not torch.equal(before, whole["mask"][place])
            assert position_of(whole["mask"][place].numpy()) == data[place]["position"]
        assert torch.equal(whole["sam"], whole["vlm"])
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
    common = ["--log_every", "1", "--save_every", "1", "--augmentation"]
    if request.param == "prs_med":
        data = request.getfixturevalue("prs_med_data")
        flags = [*SAME, "--data_root", data, "--num_epochs", "2", *common]
        return Guide(PRS_MED, flags, "--checkpoint_dir")
    flags = request.getfixturevalue("mimic_cxr_flags")
    flags = [*flags, "--use_ddp", "--dropout", "0", "--learning_rate", "1e-3", "--lr_schedule", "constant"]
    return Guide(MIMIC, [*flags, "--max_samples", "30", "--epochs", "2", *common], "--output_dir")


def train_losses(run_folder: Path) -> list[float]:
    """The loss of each step."""
    return [record["train/loss"] for record in records(run_folder) if "train/loss" in record]


def test_an_augmented_run_is_the_same_on_any_number_of_processes_and_when_killed(guide, zygote, tmp_path):
    """1, 2 and 3 processes to 1e-5 relative; killed and resumed to the bit; and it is not the run without."""

    def run(name: str, processes: int, *more, killed: int = 0) -> list[float]:
        folder = tmp_path / name
        interrupt = at_step(folder, killed, "worker") if killed else None
        flags = [*guide.flags, guide.folder, folder, "--batch_size", 12 // processes, *more]
        done = zygote(guide.script, *flags, ranks=processes, interrupt=interrupt)
        assert killed or done.code == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return train_losses(folder)

    two = run("two", 2)
    assert len(two) == 6
    run("killed", 2, "--resume_from", "auto", killed=2)
    assert run("killed", 2, "--resume_from", "auto") == two
    for processes in (1, 3):
        other = run(str(processes), processes)
        assert other == pytest.approx(two, rel=1e-5)
    plain = run("plain", 1, "--no-augmentation", "--max_steps", "1")
    assert plain[0] != pytest.approx(two[0], rel=1e-4)
