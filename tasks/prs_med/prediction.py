"""--predict: the mask and the answer of one image and question, printed and written as files."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from checkpoint_utils import write_atomically
from cli_utils import InputError
from distributed_utils import Ranks, agree_on_errors, to_device
from tasks.prs_med.data import open_image
from tasks.prs_med.metrics import position_of


@torch.no_grad()
def predict_image(
    model: nn.Module, path: str, question: str, max_new_tokens: int, run_folder: Path, ranks: Ranks
) -> None:
    """All ranks: the answer, and the mask at the image's size, in <run_folder>/predictions. Raises InputError."""
    try:
        image = open_image(path)
    except Exception as error:
        raise InputError(f"{path}: not a readable image ({error}); check --predict") from None

    # a batch of one question without an answer
    reader = model.reader
    sam, vlm = reader.pixels(image)
    prompt, answer_tokens = reader.tokens(question, "")
    item = reader.blank() | {"index": 0, "key": 0, "sam": sam, "vlm": vlm}
    item |= {"prompt": prompt, "answer": answer_tokens}
    batch = reader.collate([item])
    batch = to_device(batch, ranks.device)

    model.eval()
    logits, _ = model(batch)
    answer = model.answer(batch, max_new_tokens)[0]
    size = (image.height, image.width)
    native = F.interpolate(logits[None], size, mode="bilinear", align_corners=False)
    mask = native[0, 0].cpu().numpy() > 0

    stem = run_folder / "predictions" / Path(path).stem
    with agree_on_errors():
        if ranks.is_main:
            print(f"{answer}\nmask: {mask.mean():.1%} of the image, position {position_of(mask)}", flush=True)
            write_prediction(stem, image, mask, f"{question}\n{answer}\n")


def write_prediction(stem: Path, image: Image.Image, mask: np.ndarray, text: str) -> None:
    """<stem>_mask.png with 0 and 255, <stem>_overlay.png with the mask in red, <stem>.txt. Raises InputError."""
    red = Image.new("RGB", image.size, (255, 40, 40))
    overlay = Image.composite(red, image, gray(mask, 110))
    files = {
        "_mask.png": png(gray(mask, 255)),
        "_overlay.png": png(overlay),
        ".txt": text.encode(),
    }
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for ending, content in files.items():
            write_atomically(Path(f"{stem}{ending}"), lambda file, content=content: file.write(content))
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{stem}: not written ({reason}); choose another --checkpoint_dir") from None
    print(f"written: {stem}_mask.png, _overlay.png, .txt", flush=True)


def gray(mask: np.ndarray, value: int) -> Image.Image:
    """An 8-bit image of a mask: this value inside, 0 outside."""
    pixels = np.where(mask, value, 0)
    return Image.fromarray(pixels.astype(np.uint8))


def png(image: Image.Image) -> bytes:
    """The image as a PNG file."""
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
