"""--predict: masks and answers of images and questions, written as files; those of a single one are printed."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from old.distributed_utils import print_main, to_device
from old.predict_utils import Asked, answer_questions, png, write_files
from tasks.prs_med.data import open_image
from tasks.prs_med.metrics import position_of


def predict(model: nn.Module, asked: list[Asked], batch_size: int, max_new_tokens: int, run_folder: Path) -> int:
    """All ranks: answer all questions, with masks at the images' sizes, in <run_folder>/predictions; the exit code.

    Raises InputError where no image can be read.
    """
    model.eval()
    folder = run_folder / "predictions"
    answer = partial(answer_batch, model, max_new_tokens, folder)
    records = answer_questions(asked, batch_size, open_image, answer, folder)

    # a single one is told at once
    if len(asked) == 1:
        record = records[0]
        print_main(f"{record['answer']}\nmask: {record['share']:.1%} of the image, position {record['position']}")
        print_main(f"written: {folder / asked[0].stem}_mask.png, _overlay.png, .txt, and {folder}/predictions.csv")
    return 0


@torch.no_grad()
def answer_batch(
    model: nn.Module,
    max_new_tokens: int,
    folder: Path,
    asked: list[Asked],
    images: list[Image.Image],
) -> list[dict]:
    """What predictions.csv says of each question about its image; mask, overlay and text are written."""
    reader = model.reader
    items = []
    for index, (one, image) in enumerate(zip(asked, images, strict=True)):
        sam, vlm = reader.pixels(image)
        # a question without an answer
        prompt, answer = reader.tokens(one.question, "")
        items.append(reader.blank() | {"index": index, "sam": sam, "vlm": vlm, "prompt": prompt, "answer": answer})
    batch = to_device(reader.collate(items), model.device)
    logits, _ = model(batch)
    answers = model.answer(batch, max_new_tokens)

    # each image at its own size
    records = []
    for index, (one, image) in enumerate(zip(asked, images, strict=True)):
        size = (image.height, image.width)
        native = F.interpolate(logits[index, None, None], size, mode="bilinear", align_corners=False)
        mask = native[0, 0].cpu().numpy() > 0
        write_prediction(folder, one, image, mask, answers[index])
        record = {
            "answer": answers[index],
            "position": position_of(mask),
            "share": round(float(mask.mean()), 6),
            "mask": f"{one.stem}_mask.png",
            "overlay": f"{one.stem}_overlay.png",
            "text": f"{one.stem}.txt",
        }
        records.append(record)
    return records


def write_prediction(folder: Path, one: Asked, image: Image.Image, mask: np.ndarray, answer: str) -> None:
    """<stem>_mask.png with 0 and 255, <stem>_overlay.png with the mask in red, <stem>.txt. Raises InputError."""
    red = Image.new("RGB", image.size, (255, 40, 40))
    overlay = Image.composite(red, image, gray(mask, 110))
    files = {
        f"{one.stem}_mask.png": png(gray(mask, 255)),
        f"{one.stem}_overlay.png": png(overlay),
        f"{one.stem}.txt": f"{one.question}\n{answer}\n".encode(),
    }
    write_files(folder, files)


def gray(mask: np.ndarray, value: int) -> Image.Image:
    """An 8-bit image of a mask: this value inside, 0 outside."""
    pixels = np.where(mask, value, 0)
    return Image.fromarray(pixels.astype(np.uint8))
