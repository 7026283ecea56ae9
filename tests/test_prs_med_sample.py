"""PRS-Med's made-up data, and the rivals of its table on images whose answer is known."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from tasks.prs_med import rivals, sample_data
from tasks.prs_med.annotations import Row, position_in, position_of


@pytest.fixture(scope="module")
def cases() -> list[tuple]:
    """(modality, image, masks, positions) of 60 made-up images."""
    draws = [(modality, np.random.default_rng([0, k])) for k in range(20) for modality in sample_data.TARGETS]
    return [(modality, *sample_data.draw_case(rng, modality, 96)) for modality, rng in draws]


def test_masks_lie_where_the_answers_say(cases):
    for _, image, masks, positions in cases:
        assert image.dtype == np.uint8
        assert not (masks[0] & masks[1]).sum() > 2
        for mask, position in zip(masks, positions, strict=True):
            assert position_of(mask) == position
            assert ndimage.label(mask)[1] == 1
            assert 0.015 < mask.mean() < 0.08
    # each position about equally often
    counts = [sum(positions[0] == place for *_, positions in cases) for place in sample_data.POSITIONS]
    assert min(counts) >= 5


def test_the_two_lesions_differ_in_grey_and_in_direction(cases):
    for modality, image, masks, _ in cases:
        gray = np.asarray(Image.fromarray(image).convert("L"), float)
        bright = [gray[mask].mean() for mask in masks]
        assert bright[0] > bright[1] + 15
        # edges fall to the right where streaks rise to the right
        slope = ndimage.sobel(gray, 0) * ndimage.sobel(gray, 1)
        inside = [slope[ndimage.binary_erosion(mask, iterations=3)].mean() for mask in masks]
        assert inside[0] > inside[1], modality


def test_the_same_seed_writes_the_same_data(tmp_path):
    sizes = {"num_train": 6, "num_val": 3, "num_test": 3, "image_size": 48}
    sample_data.write_sample_data(tmp_path / "a", **sizes, seed=1)
    sample_data.write_sample_data(tmp_path / "b", **sizes, seed=1)
    sample_data.write_sample_data(tmp_path / "c", **sizes, seed=2)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)
    image = next(file for file in files if file.suffix == ".png" and "images" in str(file))
    assert (tmp_path / "a" / image).read_bytes() != (tmp_path / "c" / image).read_bytes()
    with open(tmp_path / "a/annotations/lung_CT.csv") as file:
        for row in csv.DictReader(file):
            mask = np.asarray(Image.open(tmp_path / "a" / row["image_path"])) > 0
            assert position_in(row["answer"]) == row["position"] == position_of(mask)


# --- rivals -----------------------------------------------------------------------------------------------------------


class Discs:
    """Rows about a disc of a grey of its own among others: "cyst" of 150, "node" of 90; always at the top left."""

    def __init__(self, count: int, seed: int, structures: tuple[str, ...] = ("cyst", "node")):
        self.reader = SimpleNamespace(image_size=64)
        self.rows, self.items = [], []
        rng = np.random.default_rng(seed)
        y, x = np.mgrid[:64, :64]
        for k in range(count):
            name = structures[k % len(structures)]
            places = [(16, 16), (16, 48), (48, 16)]
            greys = {"cyst": 150, "node": 90, "wart": 150}
            gray = rng.integers(0, 40, (64, 64))
            discs = []
            for (top, left), grey in zip(places, (greys[name], 220, 250), strict=True):
                top, left = top + rng.integers(-4, 5), left + rng.integers(-4, 5)
                discs.append((y - top) ** 2 + (x - left) ** 2 < 64)
                gray[discs[-1]] = grey + rng.integers(-5, 6)
            answer = f"The {name} is located in the top left of the image."
            self.rows.append(Row("ct", f"{k}.png", "", "train", f"Where is the {name}?", answer, f"a.csv:{k}"))
            sam = torch.from_numpy(np.repeat(gray[None].astype(np.uint8), 3, axis=0))
            self.items.append({"sam": sam, "mask": torch.from_numpy(discs[0])})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.items[index]


def test_rivals_find_what_they_can():
    """A grey band and a forest of each structure find it; the mean mask overlaps by its place alone."""
    scores = rivals.rival_scores(Discs(40, 0), Discs(10, 1))
    mean = {name: {key: np.mean([row[key] for row in rows]) for key in rows[0]} for name, rows in scores.items()}
    assert sorted(row["index"] for row in scores["grey_threshold"]) == list(range(10))
    assert mean["grey_threshold"]["dice"] > 0.99
    assert mean["grey_threshold"]["position_accuracy"] == mean["pixel_forest"]["position_accuracy"] == 1
    assert mean["pixel_forest"]["dice"] > 0.9
    assert 0.4 < mean["mean_mask"]["dice"] < 0.9
    assert mean["mean_mask"]["dice"] > mean["mean_mask"]["iou"]
    assert mean["frequent_position"] == {"index": 4.5, "position_accuracy": 1}


def test_rivals_are_fitted_by_all_ranks():
    """Each structure by one rank; together the same scores."""
    train, test = Discs(40, 0), Discs(10, 1)
    whole = rivals.rival_scores(train, test)
    parts = [rivals.rival_scores(train, test, rank, 3) for rank in range(3)]
    for name in rivals.NAMES:
        rows = [row for part in parts for row in part[name]]
        assert sorted(rows, key=str) == sorted(whole[name], key=str)
    assert all(len(part["mean_mask"]) < 10 for part in parts)


def test_a_structure_without_training_rows_takes_those_of_its_modality():
    scores = rivals.rival_scores(Discs(40, 0, ("cyst",)), Discs(4, 1, ("wart",)))
    assert np.mean([row["dice"] for row in scores["grey_threshold"]]) > 0.99


def test_a_forest_tells_textures_of_one_grey_apart():
    """Streaks up to the right against streaks up to the left; an empty mask and a small one are no error."""
    y, x = np.mgrid[:160, :160]
    mask = (y - 60) ** 2 + (x - 100) ** 2 < 30**2
    gray = (128 + 80 * np.where(mask, np.sin((x + y) / 3), np.sin((x - y) / 3))).astype(np.uint8)
    forest = rivals.fit_forest([rivals.Example(gray, mask, None)])
    found = rivals.by_forest(forest, gray)
    assert found.shape == mask.shape
    assert rivals.dice(found, mask) > 0.85
    empty = rivals.fit_forest([rivals.Example(gray, np.zeros_like(mask), None)])
    assert not rivals.by_forest(empty, gray).any()


def test_structure_of_an_answer():
    assert rivals.key_of("ct", "The left kidney is in the TOP right of it.") == rivals.key_of(
        "ct", "the kidney is in the center of it"
    )
    assert rivals.key_of("ct", "The cyst is there") != rivals.key_of("ct", "The node is there")
