"""DESIGN "the same answer" 1 to 4: index sets, gradients, losses and metrics at 1, 2 and 3 processes."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import SAME, forked, losses

from sampler_utils import EvalBatchSampler, TrainBatchSampler, permute

# 34 rows, 6 a batch over all processes, 2 batches a step: the third step of an epoch holds 10 samples instead of 12
BATCHES = {1: 6, 2: 3, 3: 2}
FLAGS = [*SAME, "--gradient_accumulation_steps", "2", "--num_epochs", "2", "--save_every", "1", "--keep_last", "99"]


@pytest.fixture(scope="module")
def runs(prs_med_data, zygote, tmp_path_factory):
    folder = tmp_path_factory.mktemp("same")
    for processes, batch in BATCHES.items():
        forked(zygote, prs_med_data, folder / str(processes), processes, *FLAGS, "--batch_size", batch)
    return folder


def load(path):
    return torch.load(path, weights_only=True)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_permutation_is_one(size):
    order = permute(np.arange(size), size, seed=3, epoch=5)
    assert sorted(order.tolist()) == list(range(size))
    assert np.array_equal(permute(np.arange(size)[size // 2 :], size, 3, 5), order[size // 2 :])  # any part alone
    if size > 7:
        assert not np.array_equal(order, permute(np.arange(size), size, 3, 6))
        assert not np.array_equal(order, permute(np.arange(size), size, 4, 5))


def test_permutation_is_well_mixed():
    order = permute(np.arange(100_000), 100_000, 0, 0)
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    firsts = [int(permute(np.arange(1), 10, seed, 0)[0]) for seed in range(5000)]
    assert np.bincount(firsts, minlength=10).min() > 380  # 500 expected, standard deviation 21


SPLITS = [(1, 6, 2), (1, 12, 1), (2, 3, 2), (3, 2, 2), (3, 4, 1), (6, 1, 2), (12, 1, 1)]  # world, batch, accumulation


@pytest.mark.parametrize("size", range(1, 40))
def test_training_indices(size):
    """Each step's samples are the same however the effective batch of 12 is made up; disjoint shares, nothing lost."""
    epochs = {}
    for world_size, batch, accumulation in SPLITS:
        samplers = [TrainBatchSampler(size, batch, r, world_size, 1, accumulation) for r in range(world_size)]
        steps, empty = [], 0
        for sampler in samplers:
            sampler.set_position(4)
            batches = list(sampler)
            assert len(batches) == len(sampler)
            assert all(1 <= len(part) <= batch for part in batches)
            given = iter(batches)
            for k in range(sampler.steps_per_epoch()):
                mine = sampler.window(12 * k)[1]
                parts = [next(given) for _ in range(max(1, -(-mine // batch)))]
                steps += [[] for _ in range(k + 1 - len(steps))]
                steps[k] += [i for part in parts for i in part] if mine else []
                empty += not mine
            assert next(given, None) is None
        used = [i for step in steps for i in step]
        assert sorted(used) == list(range(size))
        assert [len(step) for step in steps] == [min(12, size - k) for k in range(0, size, 12)]
        assert bool(empty) == (0 < size % 12 < world_size)
        epochs[world_size, batch] = [sorted(step) for step in steps]
        if size > 12:  # a resumed epoch goes on with the step that follows
            sampler.set_position(4, samples=12)
            assert list(sampler) == batches[accumulation:]
    assert all(epoch == epochs[1, 6] for epoch in epochs.values())


@pytest.mark.parametrize("size", range(1, 30))
def test_training_indices_with_drop_last(size):
    """For someone's own loop: full batches only, a remainder below one batch of all ranks left out."""
    for world_size, batch in ((1, 6), (2, 3), (3, 2), (6, 1)):
        ranks = [list(TrainBatchSampler(size, batch, r, world_size, 1, drop_last=True)) for r in range(world_size)]
        assert all(len(part) == batch for batches in ranks for part in batches)
        used = [i for batches in ranks for part in batches for i in part]
        assert len(set(used)) == len(used) == size - size % 6


@pytest.mark.parametrize("size", range(0, 30))
def test_evaluation_indices(size):
    """Every sample once, in batches that do not depend on the world size; every rank works once there are 8 samples."""
    for world_size in (1, 2, 3, 8):
        shards = [list(EvalBatchSampler(size, 4, rank, world_size)) for rank in range(world_size)]
        assert sorted(i for shard in shards for batch in shard for i in batch) == list(range(size))
        batches = sorted(batch for shard in shards for batch in shard)
        assert batches == sorted(EvalBatchSampler(size, 4, 0, 1))
        assert size < 8 or all(shards)


def test_losses_and_gradients(runs):
    """The first gradient (AdamW's exp_avg after one step) and every logged loss, relative, below 1e-5."""
    reference, worst = load(runs / "1" / "step_00000001.pt"), {}
    for processes in (2, 3):
        other = load(runs / str(processes) / "step_00000001.pt")
        pairs = [
            (other["optimizer"]["state"][k]["exp_avg"], v["exp_avg"])
            for k, v in reference["optimizer"]["state"].items()
        ]
        gradient = relative(torch.cat([a.flatten() for a, _ in pairs]), torch.cat([b.flatten() for _, b in pairs]))
        curves = [np.array(losses(runs / str(n))) for n in (processes, 1)]
        train_rows = [i for i, row in enumerate(curves[0]) if row[1] > 1.2]  # losses start at about 8
        loss = np.abs(curves[0][:, 1:2] / curves[1][:, 1:2] - 1)[train_rows].max()
        worst[processes] = (gradient, loss)
        print(f"{processes} processes: gradient off by {gradient:.1e}, losses by {loss:.1e}")
    assert max(gradient for gradient, _ in worst.values()) < 1e-5
    assert max(loss for _, loss in worst.values()) < 1e-5
    assert (
        len(curves[0]) == 3 + 1 + 3 + 1 + 1
    )  # two epochs of three steps, each with a validation; the test of the best


def test_short_window_is_divided_by_its_true_size(runs, prs_med_data):
    """Step 3 sees 10 samples instead of 12; its loss equals one computed apart, the text part by Hugging Face's own."""
    import train_prs_med as prs
    from hardware_utils import choose_precision

    args = prs.parse_args(["--data_root", str(prs_med_data), *FLAGS])
    device = torch.device("cpu")
    precision, _ = choose_precision("auto", device)
    model = prs.build_model(args, precision, device)
    prs.load_weights(model, load(runs / "1" / "step_00000002.pt"))
    rows = [row for row in prs.read_annotations(prs_med_data, None, False) if row.split == "train"]
    dataset = prs.PositionData(rows, model.reader, True)
    batch = model.reader.collate([dataset[int(i)] for i in permute(np.arange(24, 34), 34, 0, 0)])
    model.eval()
    with torch.no_grad():
        labels = torch.full_like(batch["ids"], -100)
        for k, length in enumerate((batch["prompt"] >= 0).sum(1).tolist()):
            answer = [token for token in batch["answer"][k].tolist() if token >= 0]
            labels[k, length : length + len(answer)] = torch.tensor(answer)
        pixels = model.vlm_pixels(batch)
        text = model.vlm(
            input_ids=batch["ids"], pixel_values=pixels, labels=labels
        ).loss  # shifts by itself, mean over tokens
        probability = torch.sigmoid(model(batch)[0]).double().clamp(1e-12, 1 - 1e-12).numpy()
    mask = batch["mask"].double().numpy()
    bce = -(mask * np.log(probability) + (1 - mask) * np.log(1 - probability)).mean()
    dice = [1 - (2 * (p * m).sum() + 1) / (p.sum() + m.sum() + 1) for p, m in zip(probability, mask, strict=True)]
    expected = bce + np.mean(dice) + 0.5 * float(text)
    logged = losses(runs / "1")[2][1]
    assert logged == pytest.approx(expected, rel=1e-5)


def test_answer_does_not_reach_the_mask(runs, prs_med_data):
    """Another answer behind the same prompt changes the text loss and not one bit of the mask."""
    import train_prs_med as prs

    args = prs.parse_args(["--data_root", str(prs_med_data), "--mixed_precision", "no"])
    model = prs.build_model(args, "no", torch.device("cpu")).eval()
    row = prs.read_annotations(prs_med_data, None, False)[0]
    longest = "A longer answer that sets the length which both batches are padded to."
    rows = [row._replace(answer=text) for text in ("Top left.", "Center, mid.", longest)]
    first, second, padding = (prs.PositionData([row], model.reader, False)[0] for row in rows)
    with torch.no_grad():
        (mask_a, text_a), (mask_b, text_b) = (model(model.reader.collate([item, padding])) for item in (first, second))
    assert torch.equal(mask_a, mask_b)
    assert text_a[0] != text_b[0]


def test_fewer_rows_than_processes(runs, prs_med_data, zygote, tmp_path):
    """2 training rows on 3 processes: the one without a row takes part all the same, and losses equal one process's."""
    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    for table in (root / "annotations").glob("*.csv"):
        lines = table.read_text().splitlines(keepends=True)
        keep = 2 if table.stem == "lung_CT" else 0
        train_rows = [line for line in lines if ",train," in line]
        table.write_text("".join(line for line in lines if line not in train_rows[keep:]))
    for processes in (1, 3):
        flags = [*SAME, "--num_epochs", "3", "--batch_size", 12 // processes]
        forked(zygote, root, tmp_path / str(processes), processes, *flags)
    one, three = (np.array(losses(tmp_path / name)) for name in ("1", "3"))
    assert one.shape == three.shape == (7, 3)
    training = one[:, 1] > 1.2  # the others are Dice values, where one pixel on the border may flip
    worst = np.abs(three[training, 1] / one[training, 1] - 1).max()
    print(f"2 rows on 3 processes: losses off by {worst:.1e}")
    assert training.sum() == 3
    assert worst < 1e-5


def test_resume_at_another_world_size(runs, prs_med_data, zygote, tmp_path):
    """A 2-process run goes on as one process from step 2: the remaining losses agree to 1e-5."""
    flags = [*FLAGS, "--batch_size", "6", "--resume_from", runs / "2" / "step_00000002.pt"]
    forked(zygote, prs_med_data, tmp_path / "run", 1, *flags)
    whole = {row[0]: row[1] for row in losses(runs / "2") if row[1] > 1.2}
    rest = [row for row in losses(tmp_path / "run") if row[1] > 1.2]
    worst = max(abs(row[1] / whole[row[0]] - 1) for row in rest)
    print(f"gone on with 1 process instead of 2: losses off by {worst:.1e}")
    assert [row[0] for row in rest] == [3, 4, 5, 6]
    assert worst < 1e-5


def test_sets_of_one_to_ten_samples(runs, prs_med_data, zygote):
    """The same weights at 1, 2 and 3 processes, empty shards included: no hang, metrics equal to 1e-6 and to
    MONAI's."""
    results = {}
    for processes in (1, 2, 3):
        done = zygote("tests/small_sets.py", prs_med_data, runs / "1" / "last.pt", ranks=processes)
        assert done.code == 0, done.stderr[-3000:]
        results[processes] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(results[processes]) == 10
    worst = max(
        abs(mine[key] - value)
        for n in (2, 3)
        for mine, one in zip(results[n], results[1], strict=True)
        for key, value in one.items()
        if key in mine
    )
    print(f"sets of 1 to 10 samples: largest difference between 1, 2 and 3 processes {worst:.1e}")
    assert worst < 1e-6
    for one in results[1]:
        assert one["test/dice"] == pytest.approx(one["monai/dice"], abs=1e-6)
        assert one["test/iou"] == pytest.approx(one["monai/iou"], abs=1e-6)
        for name in ("loss", "loss_seg", "loss_txt"):
            assert one[f"test/{name}"] == pytest.approx(one[f"train/{name}"], rel=1e-5)
