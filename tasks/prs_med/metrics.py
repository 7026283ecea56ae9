"""How good masks and answers are: the positions that both name, the scores of a row, their means over a split."""

import re
from typing import NamedTuple

import numpy as np
import torch

MEANS = ("dice", "iou", "position_accuracy", "position_accuracy_mask")


class MaskBox(NamedTuple):
    """The bounding box of a mask's foreground; right and bottom are the first pixels behind it."""

    left: int
    top: int
    right: int
    bottom: int


def box_of(mask: np.ndarray) -> MaskBox | None:
    """The bounding box of a (H, W) bool mask, None without any foreground."""
    rows = np.flatnonzero(mask.any(axis=1))
    columns = np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return None
    return MaskBox(columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)


def position_of(mask: np.ndarray) -> str | None:
    """Where the foreground of a mask lies, None without any."""
    box = box_of(mask)
    height, width = mask.shape
    return box and position_of_box(box, height, width)


def position_of_box(box: MaskBox, height: float, width: float) -> str:
    """Where the bounding box of a mask lies in an image of this size.

    It is "center" when the box spans the image's centre, else the quadrant that the box's own centre is in.
    """
    if box.top < height / 2 < box.bottom and box.left < width / 2 < box.right:
        return "center"
    vertical = "top" if box.top + box.bottom < height else "bottom"
    side = "left" if box.left + box.right < width else "right"
    return f"{vertical} {side}"


def position_in(sentence: str) -> str | None:
    """The last position that a sentence names: "the right kidney is in the bottom left" is bottom left."""
    pattern = r"\b(top|upper|bottom|lower)[\s-]+(left|right)\b|\b(cent(?:er|re)|middle)\b"
    named = re.findall(pattern, sentence.lower())
    if not named:
        return None
    vertical, side, center = named[-1]
    if center:
        return "center"
    return f"top {side}" if vertical in ("top", "upper") else f"bottom {side}"


class Scores(NamedTuple):
    """What one row of an evaluation comes to.

    A mask that is empty as it should be has a Dice and an IoU of 1. An empty mask has no position, and the two
    accuracies are None. mask_loss: BCE + Dice. text_loss: cross-entropy summed over the answer's tokens.
    """

    index: int
    dice: float
    iou: float
    position_accuracy: bool | None
    position_accuracy_mask: bool | None
    mask_loss: float
    text_loss: float
    tokens: float


class RowSums(NamedTuple):
    """What is added up over a row's pixels and tokens on the GPU, in the order of its columns."""

    intersection: float
    union: float
    mask_loss: float
    text_loss: float
    tokens: float


def add_up_rows(
    predicted: torch.Tensor,
    batch: dict,
    mask_loss: torch.Tensor,
    text_loss: torch.Tensor,
) -> list[RowSums]:
    """What is added up of each row of a batch, brought to the host in one transfer; predicted: (B, H, W) bool masks."""
    target = batch["mask"]
    intersection = predicted & target
    union = predicted | target
    tokens = batch["answer"] >= 0
    columns = RowSums(
        intersection=intersection.sum((1, 2)),
        union=union.sum((1, 2)),
        mask_loss=mask_loss,
        text_loss=text_loss,
        tokens=tokens.sum(1),
    )
    table = torch.stack(columns, dim=1).double().cpu()
    return [RowSums._make(row) for row in table.tolist()]


def score_row(index: int, sums: RowSums, mask: np.ndarray, answer: str, position: str | None) -> Scores:
    """The scores of a predicted mask and a generated answer; position: the true one, None for an empty mask."""
    dice = iou = 1.0
    if sums.union:
        dice = 2 * sums.intersection / (sums.intersection + sums.union)
        iou = sums.intersection / sums.union
    return Scores(
        index=index,
        dice=dice,
        iou=iou,
        position_accuracy=position_in(answer) == position if position else None,
        position_accuracy_mask=position_of(mask) == position if position else None,
        mask_loss=sums.mask_loss,
        text_loss=sums.text_loss,
        tokens=sums.tokens,
    )


def score_batch(batch: dict, sums: list[RowSums], masks: np.ndarray, answers: list[str]) -> list[Scores]:
    """The scores of a batch's rows, for the predicted masks and the generated answers."""
    return [
        score_row(index, sums[k], masks[k], answers[k], batch["position"][k]) for k, index in enumerate(batch["index"])
    ]


def mean_metrics(
    scores: list[Scores], modalities: list[str], split: str, lambda_seg: float, lambda_txt: float
) -> dict[str, float]:
    """The metrics of a split by name: the losses of training, then means over all rows and over each modality's.

    modalities: of each row of the data set, by its index. The mask's loss is a mean over rows, the text's over tokens.
    """
    seg = sum(row.mask_loss for row in scores) / len(scores)
    txt = sum(row.text_loss for row in scores) / sum(row.tokens for row in scores)
    metrics = {
        f"{split}/loss": lambda_seg * seg + lambda_txt * txt,
        f"{split}/loss_seg": seg,
        f"{split}/loss_txt": txt,
        f"{split}/text_loss": txt,
    }
    metrics |= mean_scores(scores, split, "")
    for modality in sorted(set(modalities)):
        of_modality = [row for row in scores if modalities[row.index] == modality]
        metrics |= mean_scores(of_modality, split, f"/{modality}")
    return metrics


def mean_scores(scores: list[Scores], split: str, ending: str) -> dict[str, float]:
    """The means of some rows, by the metric's name with this ending; what no row has is left out."""
    means = {}
    for name in MEANS:
        values = [getattr(row, name) for row in scores if getattr(row, name) is not None]
        if values:
            means[f"{split}/{name}{ending}"] = sum(values) / len(values)
    return means
