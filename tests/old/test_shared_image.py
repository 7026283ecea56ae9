"""--questions_per_image in guide 1: what an epoch's order is, and that sharing an image changes no loss."""

import tracemalloc
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, records

from old.image_order_utils import ImageGroups
from old.sampler_utils import TrainBatchSampler
from tasks.mimic_cxr.data import largest_batch
from tasks.mimic_cxr.index import open_index

MIMIC = str(ROOT / "train_mimic_cxr.py")
CPU = torch.device("cpu")
# 12 questions a step by 1, 2 and 3 processes
SPLITS = [(1, 6, 2), (2, 3, 2), (3, 2, 2), (3, 4, 1), (12, 1, 1)]


def questions_about(images: int, seed: int) -> np.ndarray:
    """Which image each of some questions is about: 1 to 9 questions an image, one after another."""
    counts = np.random.default_rng(seed).integers(1, 10, images)
    return np.repeat(np.arange(images), counts)


def epoch_of(groups: ImageGroups, count: int, seed: int = 1, epoch: int = 4) -> list[int]:
    """The whole order of an epoch."""
    return groups.order(np.arange(count), seed, epoch).tolist()


# --- the order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [1, 2, 5, 30])
@pytest.mark.parametrize("size", [2, 4, 100])
def test_each_question_once_in_whole_groups(images, size):
    image_of = questions_about(images, seed=size)
    count = len(image_of)
    groups = ImageGroups(image_of, size)
    order = epoch_of(groups, count)
    assert sorted(order) == list(range(count))

    # a group is of one image and full, but for the last one of an image
    ends = groups.ends.tolist()
    sizes = {image: [] for image in range(images)}
    begin = 0
    for end in ends:
        of_group = set(image_of[order[begin:end]])
        assert len(of_group) == 1
        sizes[of_group.pop()].append(end - begin)
        begin = end
    for image, lengths in sizes.items():
        asked = int((image_of == image).sum())
        full, rest = divmod(asked, size)
        expected = [size] * full
        expected += [rest] * bool(rest)
        assert sorted(lengths) == sorted(expected)

    # another seed or epoch is another order, also within an image
    if images == 30:
        assert order != epoch_of(groups, count, seed=2)
        later = epoch_of(groups, count, epoch=5)
        one, other = ([question for question in whole if image_of[question] == 3] for whole in (order, later))
        assert one != other
        assert sorted(one) == sorted(other)


def test_questions_of_an_image_need_not_be_neighbours():
    image_of = questions_about(20, seed=0)
    count = len(image_of)
    mixed = np.random.default_rng(0).permutation(count)
    order = epoch_of(ImageGroups(image_of[mixed], 4), count)
    assert sorted(order) == list(range(count))
    images = image_of[mixed][order]
    assert np.array_equal(images, image_of[epoch_of(ImageGroups(image_of, 4), count)])


@pytest.mark.parametrize("images", [1, 3, 9])
def test_steps_are_the_same_for_any_number_of_processes(images):
    """The samples of each step; disjoint shares, and a resumed epoch goes on with the step that follows."""
    image_of = questions_about(images, seed=7)
    count = len(image_of)
    epochs = []
    for world_size, batch, accumulation in SPLITS:
        steps: dict[int, list[int]] = {}
        for rank in range(world_size):
            sampler = TrainBatchSampler(count, batch, rank, world_size, 1, accumulation)
            sampler.groups = ImageGroups(image_of, 4)
            sampler.set_position(4)
            batches = iter(sampler)
            for first in range(0, count, 12):
                _, local = sampler.step_sizes(first)
                passes = max(1, -(-local // batch))
                share = [question for _ in range(passes) for question in next(batches)]
                # a rank without a share computes one question that counts nothing
                steps.setdefault(first, []).extend(share if local else [])
            assert next(batches, None) is None

        # in order, as the shares follow each other
        epochs.append([steps[first] for first in range(0, count, 12)])
        if count > 12:
            whole = list(sampler)
            sampler.groups = ImageGroups(image_of, 4)
            sampler.set_position(4, samples=12)
            assert list(sampler) == whole[len(whole) - len(sampler) :]
    assert list(chain.from_iterable(epochs[0])) == epoch_of(ImageGroups(image_of, 4), count)
    assert all(epoch == epochs[0] for epoch in epochs)


def test_groups_take_little_memory():
    """Of 3 million questions of 20,000 images: 8 bytes a group, and no list of the questions."""
    image_of = np.repeat(np.arange(20_000, dtype=np.int32), 150)
    tracemalloc.start()
    groups = ImageGroups(image_of, 4)
    batch = groups.order(np.arange(1_000_000, 1_000_064), 0, 0)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(batch.tolist())) == 64
    assert groups.count == 20_000 * 38
    assert kept < 8 * groups.count + 1e6 + 20_000 * 40


# --- the losses -------------------------------------------------------------------------------------------------------


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """{name: gradient}, which the model no longer has."""
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors, relative to the largest value."""
    difference = (one - other).abs().max() / other.abs().max().clamp_min(1e-12)
    return float(difference.detach())


def count_images(module: torch.nn.Module) -> list[int]:
    """The numbers of images that an encoder is given from now on."""
    seen: list[int] = []

    def note(_module, arguments, options):
        pixels = options.get("pixel_values", arguments[0] if arguments else None)
        seen.append(len(pixels))

    module.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def compare_losses(run, model: torch.nn.Module, shared: dict, repeated: dict) -> None:
    """run(batch): losses of each question. Those of both batches, and the gradients of their sums, agree to 1e-6."""
    torch.manual_seed(5)
    one = run(shared)
    sum(loss.sum() for loss in one).backward()
    ours = gradients(model)
    torch.manual_seed(5)
    plain = run(repeated)
    sum(loss.sum() for loss in plain).backward()
    theirs = gradients(model)

    worst = max(off(a, b) for a, b in zip(one, plain, strict=True))
    whole = torch.cat([value.flatten() for value in theirs.values()])
    difference = torch.cat([(ours[name] - value).flatten() for name, value in theirs.items()])
    gradient = float(difference.norm() / whole.norm())
    print(f"losses of each question off by {worst:.1e}, gradient by {gradient:.1e}")
    assert ours.keys() == theirs.keys()
    assert worst < 1e-6
    assert gradient < 1e-5


@pytest.fixture(scope="module")
def mimic(mimic_cxr_flags, tmp_path_factory):
    """(script, flags, model, data set) of guide 1 with dropout."""
    import train_mimic_cxr as script

    index_dir = tmp_path_factory.mktemp("index")
    args = script.parse_args([*mimic_cxr_flags, "--index_dir", str(index_dir), "--cache_gb", "0"])
    model, tokenizer = script.build_model(args, "no", CPU)
    index = open_index(index_dir, Path(args.mimic_cxr_path), Path(args.mimic_qa_path))
    sizes = {"image_size": 64, "cache_gb": 0, "max_question_length": 128}
    sets = script.open_sets(index, args.mimic_cxr_path, tokenizer, chexpert_uncertain="soft", max_samples=0, **sizes)
    return script, args, model, sets["train"]


def test_mimic_cxr_losses_are_those_of_the_plain_loop(mimic):
    script, _, model, data = mimic
    image_of = data.image_of()
    assert image_of.tolist() == [data.row(i)["study"] for i in range(len(data))]
    assert data.count_images() == len(set(image_of.tolist()))
    picked = [*range(9), len(data) - 1, len(data) - 2, 11]
    shared = data.collate(data.__getitems__(picked))
    repeated = data.collate([data[i] for i in picked])
    images = len(set(image_of[picked].tolist()))
    assert len(shared["image"]) == images < len(picked) == len(repeated["image"])

    def run(batch: dict) -> list[torch.Tensor]:
        *answers, chexpert = model.train()(batch["image"], batch["ids"], batch["mask"], batch["image_of"])
        return list(script.question_losses(answers, chexpert, batch))

    encoded = count_images(model.image)
    compare_losses(run, model, shared, repeated)
    assert encoded == [images, len(picked)]
    assert len(largest_batch(5, 64, 16)["image"]) == 5


def test_thinned_questions_know_their_images(mimic):
    _, _, _, data = mimic
    whole = data.count
    try:
        data.count = 45
        image_of = data.image_of().tolist()
        assert image_of == [data.row(i)["study"] for i in range(45)]
        assert data.count_images() == len(set(image_of))
    finally:
        data.count = whole


# --- the scripts ------------------------------------------------------------------------------------------------------


def training_losses(run_folder: Path) -> dict[int, float]:
    """{step: loss} of the training steps."""
    return {line["step"]: line["train/loss"] for line in records(run_folder) if "train/loss" in line}


def largest_difference(curve: dict[int, float], expected: dict[int, float]) -> float:
    """Of two runs' losses, relative."""
    assert list(curve) == list(expected)
    return max(abs(curve[step] / loss - 1) for step, loss in expected.items())


@pytest.mark.parametrize("engine", ["--use_ddp", pytest.param("--use_deepspeed", marks=pytest.mark.soak)])
def test_mimic_cxr_at_1_and_2_processes(mimic_cxr_flags, zygote, engine, tmp_path):
    flags = [*mimic_cxr_flags, "--dropout", "0", "--log_every", "1", "--max_steps", "4", "--max_samples", "45"]
    flags += ["--learning_rate", "1e-3", "--warmup_steps", "1", "--epochs", "2", "--questions_per_image", "4"]

    # a global batch of 16
    curves = []
    for processes, chosen in ((1, "--use_ddp"), (2, engine)):
        run_folder = tmp_path / str(processes)
        sizes = ["--batch_size", 8 // processes, "--gradient_accumulation_steps", "2"]
        done = zygote(MIMIC, flags, sizes, chosen, "--output_dir", run_folder, ranks=processes)
        assert done.code == 0, done.stderr[-3000:]
        curves.append(training_losses(run_folder))
    one, two = curves
    assert list(one) == [1, 2, 3, 4]
    worst = largest_difference(two, one)
    print(f"{engine}: losses off by {worst:.1e}")
    assert worst < 1e-5
