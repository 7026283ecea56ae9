"""How good masks and answers are: the positions that both name, and the scores of a row."""

import re
from typing import NamedTuple

import numpy as np
import torch
from scipy import ndimage


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


def meaning_of(answer: str) -> str:
    """What an answer has in common with its other wordings: the position that it names, else all of it."""
    return position_in(answer) or answer.casefold()


class Scores(NamedTuple):
    """What one row of an evaluation comes to.

    A mask that is empty as it should be has a Dice and an IoU of 1. An empty mask has no position, and the two
    accuracies are None. hd95: pixels, see hausdorff_95. position: the true one. mask_loss: BCE + Dice. text_loss:
    cross-entropy summed over the answer's tokens. answer: the generated one; None where none was asked for, as is
    position_accuracy.
    """

    index: int
    dice: float
    iou: float
    hd95: float
    position: str | None
    position_accuracy: bool | None
    position_accuracy_mask: bool | None
    mask_loss: float
    text_loss: float
    tokens: float
    answer: str | None


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


def outline(mask: np.ndarray) -> np.ndarray:
    """The pixels of a mask that touch its outside, or the image's border."""
    return mask & ~ndimage.binary_erosion(mask)


def hausdorff_95(predicted: np.ndarray, target: np.ndarray) -> float:
    """The distance within which 95 % of each mask's outline lie from the other's, in pixels; (H, W) bool masks.

    The larger one of both directions, as MONAI's. Both empty: 0; one of them: the image's diagonal, the largest
    distance there is.
    """
    either = predicted | target
    if not either.any():
        return 0.0
    if not predicted.any() or not target.any():
        return float(np.hypot(*either.shape))

    # both outlines, in the box around them
    rows = np.flatnonzero(either.any(axis=1))
    columns = np.flatnonzero(either.any(axis=0))
    box = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
    of_predicted = outline(predicted[box])
    of_target = outline(target[box])

    to_target = ndimage.distance_transform_edt(~of_target)
    to_predicted = ndimage.distance_transform_edt(~of_predicted)
    there = np.percentile(to_target[of_predicted], 95)
    back = np.percentile(to_predicted[of_target], 95)
    return float(max(there, back))


def score_row(
    index: int,
    sums: RowSums,
    mask: np.ndarray,
    target: np.ndarray,
    answer: str | None,
    position: str | None,
) -> Scores:
    """The scores of a predicted mask and a generated answer; position: the true one, None for an empty mask."""
    dice = iou = 1.0
    if sums.union:
        dice = 2 * sums.intersection / (sums.intersection + sums.union)
        iou = sums.intersection / sums.union
    named = None
    if position and answer is not None:
        named = position_in(answer) == position

    return Scores(
        index=index,
        dice=dice,
        iou=iou,
        hd95=hausdorff_95(mask, target),
        position=position,
        position_accuracy=named,
        position_accuracy_mask=position_of(mask) == position if position else None,
        mask_loss=sums.mask_loss,
        text_loss=sums.text_loss,
        tokens=sums.tokens,
        answer=answer,
    )


def score_batch(
    batch: dict,
    sums: list[RowSums],
    masks: np.ndarray,
    answers: list[str] | None,
) -> list[Scores]:
    """The scores of a batch's rows, for the predicted masks and the generated answers; None: none were asked for."""
    targets = batch["mask"].cpu().numpy()
    scores = []
    for k, index in enumerate(batch["index"]):
        answer = answers[k] if answers else None
        position = batch["position"][k]
        scores.append(score_row(index, sums[k], masks[k], targets[k], answer, position))
    return scores
