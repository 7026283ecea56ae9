"""--predict: answers, findings and an overlay for images and questions of one's own, by the run folder alone."""

import contextlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from checkpoint_utils import load_trained
from distributed_utils import Ranks, agree_on_errors, print_main, to_device
from hardware_utils import choose_precision, set_numerics
from loop_utils import agree_on_precision
from predict_utils import Asked, answer_questions, list_questions, png, write_files
from tasks.mimic_cxr.answers import CHEXPERT, HEADS
from tasks.mimic_cxr.checkpoints import open_checkpoint
from tasks.mimic_cxr.data import decode
from tasks.mimic_cxr.heads import ChosenHead, choose_heads
from tasks.mimic_cxr.model import ChestModel

# Side of an overlay, pixels.
OVERLAY = 512
# Answers that predictions.csv has, the likeliest first.
ANSWERS = 3
NOTE = (
    "overlay: where the answer's token attends to, mean over heads and layers; it does not prove why it is so answered"
)


def predict(build_model: Callable, format: str, args: Namespace, ranks: Ranks) -> int:
    """All ranks: answer --predict in <output_dir>/predictions by the run's weights; returns the exit code.

    Raises InputError on all ranks.
    """
    asked = list_questions(args.predict, args.question)
    run_folder = Path(args.output_dir)
    precision, _ = agree_on_precision(partial(choose_precision, args.mixed_precision, ranks.device))
    set_numerics(ranks.device, precision, "", args.deterministic)
    checkpoint = open_checkpoint(run_folder, args.resume_from, True, format)
    training = checkpoint.get("training", {"wordings": None, "labels": dict.fromkeys(CHEXPERT, 1)})
    with agree_on_errors():
        heads = choose_heads(asked, args.head, args.question_type, training["wordings"])
        model, tokenizer = build_model(args, precision, ranks.device)
        load_trained(model, checkpoint["model"])
    tell_of_training(asked, heads, training)

    # the images at the model's size, and larger for the overlay
    model.eval()
    folder = run_folder / "predictions"
    head_of_question = {one.stem: head for one, head in zip(asked, heads, strict=True)}
    trained = [name for name, known in training["labels"].items() if known]
    tokens = partial(tokenizer, padding=True, truncation=True, max_length=args.max_question_length, return_tensors="pt")
    answer = partial(answer_batch, model, tokens, head_of_question, trained, folder)
    records = answer_questions(asked, args.batch_size, partial(open_xray, args.image_size), answer, folder)
    if len(asked) == 1:
        print_main(f"{describe(asked[0], records[0])}\n{NOTE}")
        print_main(f"written: {folder / asked[0].stem}_overlay.png, .txt, and {folder}/predictions.csv")
    return 0


def tell_of_training(asked: list[Asked], heads: list[ChosenHead], training: dict) -> None:
    """Print what makes the answers less than they seem."""
    far = [(one, head) for one, head in zip(asked, heads, strict=True) if not head.near]
    if far:
        one, head = far[0]
        print_main(f"{len(far)} questions like none in training, such as {one.question!r}: {head.head}, {head.reason}")
    if training["wordings"] is None:
        print_main("the checkpoint does not tell which labels were trained: all are given")
    never = [name for name, known in training["labels"].items() if not known]
    if never:
        print_main(f"never trained, so without probability: {', '.join(never)}")


def open_xray(size: int, path: str) -> tuple[np.ndarray, np.ndarray]:
    """The image as the model sees it (size, size), as in training, and as the overlay shows it; uint8."""
    return decode(path, size), decode(path, OVERLAY)


# --- a batch ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def answer_batch(
    model: ChestModel,
    tokens: Callable,
    heads: dict[str, ChosenHead],
    trained: list[str],
    folder: Path,
    asked: list[Asked],
    images: list[tuple[np.ndarray, np.ndarray]],
) -> list[dict]:
    """What predictions.csv says of each question about its image; overlay and text are written.

    heads: of each question, by its stem. trained: the CheXpert labels that are given.
    """
    words = tokens([one.question for one in asked])
    pixels = np.stack([small for small, _ in images])
    batch = {"image": torch.from_numpy(pixels[:, None]), "ids": words["input_ids"], "mask": words["attention_mask"]}
    batch = to_device(batch, model.mean.device)
    with watch_attention(model) as watched:
        *logits, chexpert = model(batch["image"], batch["ids"], batch["mask"])

    # to the host: of each head and label, and where each answer's token attends to
    answers = {name: values.softmax(1).cpu() for name, values in zip(HEADS, logits, strict=True)}
    findings = chexpert.sigmoid().cpu()
    attention = torch.stack(watched).float().mean(0)[:, 0].cpu()
    records = []
    for place, one in enumerate(asked):
        head = heads[one.stem]
        record = likeliest(answers[head.head][place], HEADS[head.head])
        record |= {"head": head.head, "head_chosen": head.reason}
        for name, probability in zip(CHEXPERT, findings[place].tolist(), strict=True):
            record[f"p({name})"] = round(probability, 4) if name in trained else ""
        record |= {"overlay": f"{one.stem}_overlay.png", "text": f"{one.stem}.txt"}
        overlay = draw_attention(images[place][1], attention[place])
        files = {record["overlay"]: png(overlay), record["text"]: f"{describe(one, record)}\n{NOTE}\n".encode()}
        write_files(folder, files)
        records.append(record)
    return records


def likeliest(probabilities: Tensor, names: tuple[str, ...]) -> dict:
    """The likeliest answers and their probabilities: answer, probability, answer_2, probability_2, ..."""
    order = probabilities.argsort(descending=True, stable=True).tolist()
    record = {}
    for number in range(ANSWERS):
        ending = f"_{number + 1}" if number else ""
        known = number < len(order)
        record[f"answer{ending}"] = names[order[number]] if known else ""
        record[f"probability{ending}"] = round(float(probabilities[order[number]]), 4) if known else ""
    return record


def describe(one: Asked, record: dict) -> str:
    """A question's record in lines for a reader."""
    next_ones = []
    for ending in ("_2", "_3"):
        if record[f"answer{ending}"]:
            next_ones.append(f"{record[f'answer{ending}']} {record[f'probability{ending}']:.3f}")
    lines = [
        one.question,
        f"{record['answer']} {record['probability']:.3f} (then {', '.join(next_ones)})",
        f"head: {record['head']} ({record['head_chosen']})",
        "findings, from the image alone:",
    ]
    for name in CHEXPERT:
        probability = record[f"p({name})"]
        lines.append(f"  {name:<28}{'never trained' if probability == '' else f'{probability:.3f}'}")
    return "\n".join(lines)


# --- where it looked --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watch_attention(model: ChestModel) -> Iterator[list[Tensor]]:
    """Inside, a pass puts each fusion layer's attention (B, T, P), the mean over its heads, into the list."""
    watched: list[Tensor] = []

    def ask(_, args: tuple, options: dict) -> tuple:
        return args, options | {"need_weights": True}

    def keep(_, args: tuple, output: tuple) -> None:
        watched.append(output[1])

    hooks = []
    for layer in model.fusion:
        hooks.append(layer.attention.register_forward_pre_hook(ask, with_kwargs=True))
        hooks.append(layer.attention.register_forward_hook(keep))
    try:
        yield watched
    finally:
        for hook in hooks:
            hook.remove()


def draw_attention(image: np.ndarray, attention: Tensor) -> Image.Image:
    """The image (S, S) with its attention (P,) in red: full where it is largest, so even attention is red all over.

    A transformer's tokens that stand for no place come first and are left out.
    """
    side = math.isqrt(len(attention))
    grid = attention[-side * side :].reshape(side, side)
    strength = 160 * grid / grid.max().clamp_min(1e-12)
    mask = Image.fromarray(strength.round().numpy().astype(np.uint8))
    shown = Image.fromarray(image).convert("RGB")
    mask = mask.resize(shown.size, Image.Resampling.BICUBIC)
    red = Image.new("RGB", shown.size, (255, 40, 40))
    return Image.composite(red, shown, mask)
