"""DESIGN "the same answer" 1 to 4: index sets, gradients, losses and metrics at 1, 2 and 3 processes."""

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import PRS_MED, SAME, losses

from old.sampler_utils import EvalBatchSampler, TrainBatchSampler, permute

# 34 rows, 6 a batch over all processes, 2 batches a step: the third step of an epoch holds 10 samples instead of 12
BATCHES = {1: 6, 2: 3, 3: 2}
FLAGS = [*SAME, "--gradient_accumulation_steps", "2", "--num_epochs", "2", "--save_every", "1", "--keep_last", "99"]


class Split(NamedTuple):
    """How the 12 samples of a step are made up."""

    world_size: int
    batch: int
    accumulation: int


SPLITS = [
    Split(1, 6, 2),
    Split(1, 12, 1),
    Split(2, 3, 2),
    Split(3, 2, 2),
    Split(3, 4, 1),
    Split(6, 1, 2),
    Split(12, 1, 1),
]


@pytest.fixture(scope="module")
def run_prs_med(zygote):
    """run_prs_med(data, run_folder, processes, flags): to its end, as a launcher would."""

    def run(data: Path, run_folder: Path, processes: int, flags: list) -> None:
        flags = ["--data_root", data, "--checkpoint_dir", run_folder, *flags]
        done = zygote(PRS_MED, *flags, ranks=processes)
        assert done.code == 0, done.stdout[-3000:] + done.stderr[-3000:]

    return run


@pytest.fixture(scope="module")
def runs(prs_med_data, run_prs_med, tmp_path_factory):
    folder = tmp_path_factory.mktemp("same")
    for processes, batch in BATCHES.items():
        run_prs_med(prs_med_data, folder / str(processes), processes, [*FLAGS, "--batch_size", batch])
    return folder


def is_training(row) -> bool:
    """Whether a row of losses() is a training step: its loss starts at about 8, a Dice is at most 1."""
    return row[1] > 1.2


def training_losses(run_folder: Path) -> dict[int, float]:
    """{step: loss} of the training steps."""
    rows = filter(is_training, losses(run_folder))
    return {step: loss for step, loss, _ in rows}


def load(path):
    return torch.load(path, weights_only=True)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far two tensors are apart, relative to the second."""
    difference = (a - b).norm()
    return float(difference / b.norm().clamp_min(1e-12))


def order_of(size: int, seed: int, epoch: int) -> np.ndarray:
    numbers = np.arange(size)
    return permute(numbers, size, seed, epoch)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_permutation_is_one(size):
    order = order_of(size, seed=3, epoch=5)
    assert sorted(order.tolist()) == list(range(size))

    # any part alone
    half = size // 2
    part = permute(np.arange(half, size), size, 3, 5)
    assert np.array_equal(part, order[half:])
    if size > 7:
        assert not np.array_equal(order, order_of(size, 3, 6))
        assert not np.array_equal(order, order_of(size, 4, 5))


def test_permutation_is_well_mixed():
    order = order_of(100_000, 0, 0)
    numbers = np.arange(100_000)
    assert abs(np.corrcoef(numbers, order)[0, 1]) < 0.02
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02

    # of each of ten 500 are expected, with a standard deviation of 21
    zero = np.arange(1)
    firsts = [int(permute(zero, 10, seed, 0)[0]) for seed in range(5000)]
    counts = np.bincount(firsts, minlength=10)
    assert counts.min() > 380


@pytest.mark.parametrize("size", range(1, 40))
def test_training_indices(size):
    """Each step's samples are the same however the effective batch of 12 is made up; disjoint shares, nothing lost."""
    epochs = []
    for world_size, batch, accumulation in SPLITS:
        steps = [[] for _ in range(0, size, 12)]
        empty = 0
        for rank in range(world_size):
            sampler = TrainBatchSampler(size, batch, rank, world_size, 1, accumulation)
            sampler.set_position(4)
            batches = list(sampler)
            assert len(batches) == len(sampler)
            assert all(1 <= len(part) <= batch for part in batches)
            shares = shares_of_steps(sampler, batches)
            for step, share in zip(steps, shares, strict=True):
                step += share
            empty += shares.count([])

        used = list(chain.from_iterable(steps))
        assert sorted(used) == list(range(size))
        lengths = [len(step) for step in steps]
        assert lengths == [min(12, size - first) for first in range(0, size, 12)]
        assert bool(empty) == (0 < size % 12 < world_size)
        epochs.append([sorted(step) for step in steps])

        # a resumed epoch goes on with the step that follows
        if size > 12:
            sampler.set_position(4, samples=12)
            assert list(sampler) == batches[accumulation:]
    assert all(epoch == epochs[0] for epoch in epochs)


def shares_of_steps(sampler: TrainBatchSampler, batches: list[list[int]]) -> list[list[int]]:
    """A rank's samples of each step, of its batches; empty where it has no share and one batch counts nothing."""
    given = iter(batches)
    shares = []
    for k in range(sampler.steps_per_epoch()):
        _, local = sampler.step_sizes(12 * k)
        passes = max(1, -(-local // sampler.batch_size))
        parts = [next(given) for _ in range(passes)]
        shares.append(list(chain.from_iterable(parts)) if local else [])
    assert next(given, None) is None
    return shares


@pytest.mark.parametrize("size", range(1, 30))
def test_training_indices_with_drop_last(size):
    """For someone's own loop: full batches only, a remainder below one batch of all ranks left out."""
    for world_size, batch in ((1, 6), (2, 3), (3, 2), (6, 1)):
        batches = []
        for rank in range(world_size):
            batches += TrainBatchSampler(size, batch, rank, world_size, 1, drop_last=True)
        assert all(len(part) == batch for part in batches)
        used = list(chain.from_iterable(batches))
        assert len(set(used)) == len(used) == size - size % 6


@pytest.mark.parametrize("size", range(0, 30))
def test_evaluation_indices(size):
    """Every sample once, in batches that do not depend on the world size; every rank works once there are 8 samples."""
    for world_size in (1, 2, 3, 8):
        shards = [list(EvalBatchSampler(size, 4, rank, world_size)) for rank in range(world_size)]
        batches = sorted(chain.from_iterable(shards))
        assert sorted(chain.from_iterable(batches)) == list(range(size))
        assert batches == sorted(EvalBatchSampler(size, 4, 0, 1))
        assert size < 8 or all(shards)


def test_losses_and_gradients(runs):
    """The first gradient (AdamW's exp_avg after one step) and every logged loss, relative, below 1e-5; the norms."""
    reference = first_gradient(runs / "1")
    curve = np.array(losses(runs / "1"))
    training = [is_training(row) for row in curve]
    for processes in (2, 3):
        gradient = relative(first_gradient(runs / str(processes)), reference)
        other = np.array(losses(runs / str(processes)))
        off = np.abs(other[training, 1] / curve[training, 1] - 1)
        print(f"{processes} processes: gradient off by {gradient:.1e}, losses by {off.max():.1e}")
        assert gradient < 1e-5
        assert off.max() < 1e-5

        # the logged norm of the whole gradient, once and not once a rank
        norms = other[training, 2] / curve[training, 2]
        assert np.abs(norms - 1).max() < 1e-3

    # two epochs of three steps, each with a validation; the test of the best
    assert len(curve) == 3 + 1 + 3 + 1 + 1


def first_gradient(run_folder: Path) -> torch.Tensor:
    """All that AdamW has averaged of the gradients after one step."""
    optimizer = load(run_folder / "step_00000001.pt")["optimizer"]
    averages = [state["exp_avg"].flatten() for state in optimizer["state"].values()]
    return torch.cat(averages)


def test_short_window_is_divided_by_its_true_size(runs, prs_med_data):
    """Step 3 sees 10 samples instead of 12; its loss equals one computed apart, the text part by Hugging Face's own."""
    import train_prs_med as prs

    args = prs.parse_args(["--data_root", str(prs_med_data), *FLAGS])
    device = torch.device("cpu")
    precision, _ = prs.choose_precision("auto", device)
    model = prs.build_model(args, precision, device)
    prs.load_weights(model, load(runs / "1" / "step_00000002.pt"))
    rows = [row for row in prs.read_annotations(prs_med_data, None, False) if row.split == "train"]
    dataset = prs.PositionData(rows, model.reader, True)
    places = permute(np.arange(24, 34), 34, 0, 0)
    batch = model.reader.collate([dataset[int(place)] for place in places])

    # the answers alone are labels
    labels = torch.full_like(batch["ids"], -100)
    lengths = (batch["prompt"] >= 0).sum(1).tolist()
    for row, answer, begin in zip(labels, batch["answer"], lengths, strict=True):
        answer = answer[answer >= 0]
        end = begin + len(answer)
        row[begin:end] = answer

    # Hugging Face shifts them by itself and takes the mean over the tokens
    model.eval()
    with torch.no_grad():
        pixels = model.vlm_pixels(batch)[batch["image_of"]]
        text = model.vlm(input_ids=batch["ids"], pixel_values=pixels, labels=labels).loss
        logits, _ = model(batch)
    probability = logits.sigmoid().double()
    probability = probability.clamp(1e-12, 1 - 1e-12).numpy()
    mask = batch["mask"].double().numpy()
    likelihood = mask * np.log(probability)
    likelihood += (1 - mask) * np.log(1 - probability)
    bce = -likelihood.mean()

    # smoothed by one pixel
    overlap = probability * mask
    overlap = overlap.sum((1, 2))
    areas = probability.sum((1, 2)) + mask.sum((1, 2))
    dice = 1 - (2 * overlap + 1) / (areas + 1)
    expected = bce + dice.mean() + 0.5 * float(text)
    _, logged, _ = losses(runs / "1")[2]
    assert logged == pytest.approx(expected, rel=1e-5)


def test_answer_does_not_reach_the_mask(runs, prs_med_data):
    """Another answer behind the same prompt changes the text loss and not one bit of the mask."""
    import train_prs_med as prs

    args = prs.parse_args(["--data_root", str(prs_med_data), "--mixed_precision", "no"])
    model = prs.build_model(args, "no", torch.device("cpu")).eval()
    row = prs.read_annotations(prs_med_data, None, False)[0]

    # each beside a third, so that both batches are padded to the same length
    longest = "A longer answer that sets the length which both batches are padded to."
    rows = [row._replace(answer=answer) for answer in ("Top left.", "Center, mid.", longest)]
    dataset = prs.PositionData(rows, model.reader, False)
    padding = dataset[2]
    with torch.no_grad():
        mask, text = model(model.reader.collate([dataset[0], padding]))
        other_mask, other_text = model(model.reader.collate([dataset[1], padding]))
    assert torch.equal(mask, other_mask)
    assert text[0] != other_text[0]


def test_fewer_rows_than_processes(runs, prs_med_data, run_prs_med, tmp_path):
    """2 training rows on 3 processes: the one without a row takes part all the same, and losses equal one process's."""
    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    for table in (root / "annotations").glob("*.csv"):
        lines = table.read_text().splitlines(keepends=True)
        keep = 2 if table.stem == "lung_CT" else 0
        dropped = [line for line in lines if ",train," in line][keep:]
        table.write_text("".join(line for line in lines if line not in dropped))
    for processes in (1, 3):
        flags = [*SAME, "--num_epochs", "3", "--batch_size", 12 // processes]
        run_prs_med(root, tmp_path / str(processes), processes, flags)

    # Dice values are left out, where one pixel on the border may flip
    one = np.array(losses(tmp_path / "1"))
    three = np.array(losses(tmp_path / "3"))
    assert one.shape == three.shape == (7, 3)
    training = [is_training(row) for row in one]
    worst = np.abs(three[training, 1] / one[training, 1] - 1).max()
    print(f"2 rows on 3 processes: losses off by {worst:.1e}")
    assert sum(training) == 3
    assert worst < 1e-5


def test_resume_at_another_world_size(runs, prs_med_data, run_prs_med, tmp_path):
    """A 2-process run goes on as one process from step 2: the remaining losses agree to 1e-5."""
    flags = [*FLAGS, "--batch_size", "6", "--resume_from", runs / "2" / "step_00000002.pt"]
    run_prs_med(prs_med_data, tmp_path / "run", 1, flags)
    whole = training_losses(runs / "2")
    rest = training_losses(tmp_path / "run")
    assert list(rest) == [3, 4, 5, 6]
    worst = max(abs(loss / whole[step] - 1) for step, loss in rest.items())
    print(f"gone on with 1 process instead of 2: losses off by {worst:.1e}")
    assert worst < 1e-5


def test_sets_of_one_to_ten_samples(runs, prs_med_data, zygote):
    """The same weights at 1, 2 and 3 processes, empty shards included: no hang, metrics equal to 1e-6 and to
    MONAI's."""
    results = {}
    for processes in (1, 2, 3):
        done = zygote("tests/old/small_sets.py", prs_med_data, runs / "1" / "last.pt", ranks=processes)
        assert done.code == 0, done.stderr[-3000:]
        results[processes] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(results[processes]) == 10

    # those of one process hold MONAI's, too
    worst = 0.0
    for processes in (2, 3):
        for other, one in zip(results[processes], results[1], strict=True):
            shared = one.keys() & other.keys()
            off = [abs(other[name] - one[name]) for name in shared]
            worst = max([worst, *off])
    print(f"sets of 1 to 10 samples: largest difference between 1, 2 and 3 processes {worst:.1e}")
    assert worst < 1e-6

    for one in results[1]:
        assert one["test/dice"] == pytest.approx(one["monai/dice"], abs=1e-6)
        assert one["test/iou"] == pytest.approx(one["monai/iou"], abs=1e-6)
        for name in ("loss", "loss_seg", "loss_txt"):
            assert one[f"test/{name}"] == pytest.approx(one[f"train/{name}"], rel=1e-5)
