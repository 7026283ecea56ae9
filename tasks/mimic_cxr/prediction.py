"""--predict: answers, findings and an overlay for images and questions of one's own, by the run folder alone."""

import contextlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from old.checkpoint_utils import load_trained
from old.cli_utils import counted
from old.distributed_utils import Ranks, agree_on_errors, print_main, to_device
from old.hardware_utils import choose_precision, set_numerics
from old.loop_utils import agree_on_precision
from old.predict_utils import Asked, answer_questions, list_questions, png, write_files
from tasks.mimic_cxr.answers import CHEXPERT, HEADS
from tasks.mimic_cxr.checkpoints import open_checkpoint
from tasks.mimic_cxr.data import decode
from tasks.mimic_cxr.heads import ChosenHead, choose_heads
from tasks.mimic_cxr.model import ChestModel

# Side of an overlay, pixels.
OVERLAY = 512
# Answers that predictions.csv has, the likeliest first.
ANSWERS = 3
NOTE = "overlay: where the answer's token attends to, mean over heads and layers; no proof of why it answers so"


def predict(build_model: Callable, format: str, args: Namespace, ranks: Ranks) -> int:
    """All ranks: answer --predict in <output_dir>/predictions by the run's weights; returns the exit code.

    Raises InputError on all ranks.
    """
    asked = list_questions(args.predict, args.question)
    run_folder = Path(args.output_dir)
    precision, _ = agree_on_precision(partial(choose_precision, args.mixed_precision, ranks.device))
    set_numerics(ranks.device, precision, "", args.deterministic)
    checkpoint = open_checkpoint(run_folder, args.resume_from, True, format)
    training = checkpoint.get("training", {"wordings": None, "labels": list(CHEXPERT)})
    with agree_on_errors():
        heads = choose_heads(asked, args.head, args.question_type, training["wordings"])
        model, tokenizer = build_model(args, precision, ranks.device)
        load_trained(model, checkpoint["model"])
    tell_of_training(asked, heads, training)

    # each image at the model's size, and at the overlay's
    model.eval()
    run = Predictor(
        model=model,
        tokenizer=tokenizer,
        max_question_length=args.max_question_length,
        heads={one.stem: head for one, head in zip(asked, heads, strict=True)},
        trained=training["labels"],
        folder=run_folder / "predictions",
    )
    answer = partial(answer_batch, run)
    open_image = partial(open_xray, args.image_size)
    records = answer_questions(asked, args.batch_size, open_image, answer, run.folder)

    # a single one is told at once
    if len(asked) == 1:
        print_main(f"{describe(asked[0], records[0])}\n{NOTE}")
        print_main(f"written: {run.folder / asked[0].stem}_overlay.png, .txt, and {run.folder}/predictions.csv")
    return 0


def tell_of_training(asked: list[Asked], heads: list[ChosenHead], training: dict) -> None:
    """Print what makes the answers less than they seem."""
    far = [(one, head) for one, head in zip(asked, heads, strict=True) if not head.near]
    if far:
        one, head = far[0]
        questions = counted(len(far), "question")
        print_main(f"{questions} like none in training, such as {one.question!r}: {head.head}, {head.reason}")
    if training["wordings"] is None:
        print_main("the checkpoint does not tell which labels were trained: all are given")
    never = [name for name in CHEXPERT if name not in training["labels"]]
    if never:
        print_main(f"never trained, so without probability: {', '.join(never)}")


def open_xray(size: int, path: str) -> tuple[np.ndarray, np.ndarray]:
    """The image as the model sees it (size, size), as in training, and as the overlay shows it; uint8."""
    return decode(path, size), decode(path, OVERLAY)


# --- a batch ----------------------------------------------------------------------------------------------------------


class Predictor(NamedTuple):
    """A trained model and what belongs to it.

    heads: of each question, by its stem. trained: the CheXpert labels that are given. folder: of what is written.
    """

    model: ChestModel
    tokenizer: Callable
    max_question_length: int
    heads: dict[str, ChosenHead]
    trained: list[str]
    folder: Path


def answer_batch(run: Predictor, asked: list[Asked], images: list[tuple[np.ndarray, np.ndarray]]) -> list[dict]:
    """What predictions.csv says of each question about its image; overlay and text are written."""
    small = [image for image, _ in images]
    answers, findings, attention = look(run, asked, small)
    records = []
    for place, one in enumerate(asked):
        chosen = run.heads[one.stem]
        record = likeliest(answers[chosen.head][place], HEADS[chosen.head])
        record["head"] = chosen.head
        record["head_chosen"] = chosen.reason
        probabilities = findings[place].tolist()
        for name, probability in zip(CHEXPERT, probabilities, strict=True):
            record[f"p({name})"] = round(probability, 4) if name in run.trained else ""

        # its files
        overlay = draw_attention(images[place][1], attention[place])
        text = f"{describe(one, record)}\n{NOTE}\n"
        record["overlay"] = f"{one.stem}_overlay.png"
        record["text"] = f"{one.stem}.txt"
        files = {record["overlay"]: png(overlay), record["text"]: text.encode()}
        write_files(run.folder, files)
        records.append(record)
    return records


@torch.no_grad()
def look(
    run: Predictor,
    asked: list[Asked],
    images: list[np.ndarray],
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(probabilities (B, classes) of each head, those of the labels (B, 14), attention (B, P)), on the host.

    attention: of the token that all answers are read from, the mean over the fusion layers and their heads.
    """
    questions = [one.question for one in asked]
    tokens = run.tokenizer(
        questions,
        padding=True,
        truncation=True,
        max_length=run.max_question_length,
        return_tensors="pt",
    )
    pixels = np.stack(images)

    # where the weights are
    batch = {
        "image": torch.from_numpy(pixels[:, None]),
        "ids": tokens["input_ids"],
        "mask": tokens["attention_mask"],
    }
    batch = to_device(batch, run.model.mean.device)
    with watch_attention(run.model) as watched:
        *logits, chexpert = run.model(batch["image"], batch["ids"], batch["mask"])

    answers = {}
    for name, values in zip(HEADS, logits, strict=True):
        answers[name] = values.softmax(1).cpu()
    attention = torch.stack(watched).float()
    attention = attention.mean(0)[:, 0]
    return answers, chexpert.sigmoid().cpu(), attention.cpu()


def likeliest(probabilities: Tensor, names: tuple[str, ...]) -> dict:
    """The likeliest answers and their probabilities: answer, probability, answer_2, probability_2, ..."""
    order = probabilities.argsort(descending=True, stable=True)
    record = {}
    for number in range(ANSWERS):
        ending = f"_{number + 1}" if number else ""
        answer = ""
        probability = ""
        if number < len(names):
            place = int(order[number])
            answer = names[place]
            probability = round(float(probabilities[place]), 4)
        record[f"answer{ending}"] = answer
        record[f"probability{ending}"] = probability
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
