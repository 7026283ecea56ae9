"""--questions_per_image in guides 0 and 1: what an epoch's order is, and that sharing an image changes no loss."""

import tracemalloc
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PRS_MED, ROOT, SAME, at_step, losses, records

from old.distributed_utils import Ranks
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
def prs(prs_med_data):
    """(script, flags, model, data set) of guide 0 with dropout."""
    import train_prs_med as script

    args = script.parse_args(["--data_root", str(prs_med_data), "--mixed_precision", "no"])
    model = script.build_model(args, "no", CPU)
    ranks = Ranks(0, 0, 1, CPU, "python")
    rows = script.read_rows(prs_med_data, None, False, "train", check=True, ranks=ranks)
    rows = [row for row in rows if row.split == "train"]
    return script, args, model, script.PositionData(rows, model.reader, keep=False)


def pick_questions(image_of: np.ndarray, images: int) -> list[int]:
    """All questions of the first images that have several, and one of another image, mixed."""
    numbers, counts = np.unique(image_of, return_counts=True)
    chosen = numbers[counts > 1][:images]
    is_chosen = np.isin(image_of, chosen)
    single = np.flatnonzero(~is_chosen)[:1]
    rows = np.append(np.flatnonzero(is_chosen), single)
    mixed = np.random.default_rng(0).permutation(rows)
    return mixed.tolist()


def test_prs_med_losses_are_those_of_the_plain_loop(prs):
    script, _, model, data = prs
    picked = pick_questions(data.image_of(), 3)
    shared = model.reader.collate(data.__getitems__(picked))
    repeated = model.reader.collate([data[row] for row in picked])
    assert shared["sam"].shape[0] == shared["vlm"].shape[0] == 4 < len(picked)
    assert torch.equal(shared["sam"][shared["image_of"]], repeated["sam"])
    assert repeated["image_of"].tolist() == list(range(len(picked)))

    def run(batch: dict) -> list[torch.Tensor]:
        logits, text = model.train()(batch)
        return [script.mask_loss(logits, batch["mask"]), text]

    encoded = count_images(model.sam)
    seen = count_images(model.vlm.model.vision_tower)
    compare_losses(run, model, shared, repeated)
    assert encoded == seen == [4, len(picked)]

    # the probe of memory takes an image for each row
    assert len(model.reader.largest_batch(5, model.reader.longest_tokens(data.rows))["sam"]) == 5


def test_prs_med_answers_are_those_of_transformers(prs):
    """Greedy answers from shared features are what transformers makes of an image for each question."""
    _, _, model, data = prs
    model.eval()
    picked = pick_questions(data.image_of(), 3)
    items = data.__getitems__(picked)

    # prompts of several lengths
    place = len(items[0]["prompt"]) - 1
    for k, item in enumerate(items):
        prompt = item["prompt"]
        item["prompt"] = prompt[:place] + prompt[place:] * (1 + k % 3)
    shared = model.reader.collate(items)
    answers = model.answer(shared, 6)

    prompt = shared["prompt"]
    padding = prompt < 0
    pixels = model.vlm_pixels(shared)[shared["image_of"]]
    with torch.no_grad():
        tokens = model.vlm.generate(
            input_ids=prompt.masked_fill(padding, model.reader.pad),
            attention_mask=(~padding).long(),
            pixel_values=pixels,
            do_sample=False,
            max_new_tokens=6,
            pad_token_id=model.reader.pad,
            eos_token_id=model.reader.end,
        )
    expected = model.reader.tokenizer.batch_decode(tokens[:, prompt.shape[1] :], skip_special_tokens=True)

    # the same answers from the whole image at each question
    assert padding.any()
    assert answers == [text.strip() for text in expected]
    assert len(set(answers)) > 1


def test_prs_med_files_are_decoded_once_a_batch(prs, monkeypatch):
    """Also where nothing is kept in memory, and of copies one; nothing is kept afterwards."""
    from tasks.prs_med import data as module

    _, _, _, data = prs
    opened = []
    real = module.open_image
    monkeypatch.setattr(module, "open_image", lambda path: opened.append(path) or real(path))
    picked = pick_questions(data.image_of(), 3)
    data.__getitems__(picked)
    assert len(opened) == 4
    assert len({data.rows[row].image for row in picked}) == 7
    assert not data.kept


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


def test_shared_gradients_add_up_in_one_order(prs):
    """The same bits in every run, with several threads too."""
    _, _, model, data = prs
    picked = pick_questions(data.image_of(), 3)
    batch = model.reader.collate(data.__getitems__(picked))

    def features_gradient(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        features = torch.randn(4, 64, 16, 16, requires_grad=True)
        spread = features.index_select(0, batch["image_of"])
        (spread * torch.randn(spread.shape)).sum().backward()
        return features.grad

    before = torch.get_num_threads()
    try:
        expected = features_gradient(1)
        assert all(torch.equal(features_gradient(threads), expected) for threads in (1, 2, 2, 4, 4))
    finally:
        torch.set_num_threads(before)


# --- the scripts ------------------------------------------------------------------------------------------------------

# 34 questions of 17 images; with dropout, whose random state must come back
SHARED = ["--gradient_accumulation_steps", "2", "--num_epochs", "2", "--questions_per_image", "4"]


def run_prs_med(zygote, data: Path, run_folder: Path, processes: int, flags: list, interrupt: dict | None = None):
    """Train guide 0 with a global batch of 12."""
    sizes = ["--batch_size", 6 // processes, "--save_every", "1", "--keep_last", "99"]
    folders = ["--data_root", data, "--checkpoint_dir", run_folder]
    return zygote(PRS_MED, folders, SAME, SHARED, sizes, flags, ranks=processes, interrupt=interrupt)


def training_losses(run_folder: Path) -> dict[int, float]:
    """{step: loss} of the training steps."""
    return {line["step"]: line["train/loss"] for line in records(run_folder) if "train/loss" in line}


def largest_difference(curve: dict[int, float], expected: dict[int, float]) -> float:
    """Of two runs' losses, relative."""
    assert list(curve) == list(expected)
    return max(abs(curve[step] / loss - 1) for step, loss in expected.items())


def test_prs_med_at_1_2_and_3_processes(prs_med_data, zygote, tmp_path):
    runs = {}
    for processes in (1, 2, 3):
        run_folder = tmp_path / str(processes)
        done = run_prs_med(zygote, prs_med_data, run_folder, processes, [])
        assert done.code == 0, done.stderr[-3000:]
        runs[processes] = training_losses(run_folder)
        assert "17 to train on, 2.0 questions each on average; encoded once for 4 questions in a row" in done.stdout
    assert list(runs[1]) == [1, 2, 3, 4, 5, 6]
    for processes in (2, 3):
        worst = largest_difference(runs[processes], runs[1])
        print(f"{processes} processes: losses off by {worst:.1e}")
        assert worst < 1e-5


def test_prs_med_killed_and_resumed(prs_med_data, zygote, tmp_path):
    """In the middle of an epoch: the same bits. Another order, which would ask questions twice, is refused."""
    killed = tmp_path / "killed"
    uninterrupted = tmp_path / "uninterrupted"
    flags = ["--lora_dropout", "0.1", "--resume_from", "auto"]
    done = run_prs_med(zygote, prs_med_data, uninterrupted, 2, flags)
    assert done.code == 0, done.stderr[-3000:]

    interrupt = at_step(killed, 2, "worker")
    done = run_prs_med(zygote, prs_med_data, killed, 2, flags, interrupt)
    assert done.code != 0
    wrong = run_prs_med(zygote, prs_med_data, killed, 2, [*flags, "--questions_per_image", "1"])
    done = run_prs_med(zygote, prs_med_data, killed, 2, flags)
    assert done.code == 0, done.stderr[-3000:]
    assert losses(killed) == losses(uninterrupted)
    assert wrong.code == 2
    assert "a run with questions per image 4, now 1; give the same again" in wrong.stderr


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
