"""The baseline model that most would train instead: a small UNet with one output channel per training structure.

The UNet uses the network's images and masks at the same size, and keeps the weights with the best validation Dice. It
neither reads questions nor writes answers.
"""

import math
from collections.abc import Callable
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hardware_utils import autocast
from tasks.prs_med.annotations import position_of
from tasks.prs_med.report import evenly_spaced, hausdorff_95
from tasks.prs_med.rivals import dice

BATCH, EVALUATIONS, MOST_VALIDATED, LEARNING_RATE = 8, 10, 200, 3e-3


def structure_of(row) -> tuple[str, str]:
    """Key of the UNet's output channel for a row; rows without a structure share one channel per modality."""
    return row.modality, " ".join(row.names[:1]).casefold()


def unet_scores(
    train, val, test, steps: int, seed: int, device: torch.device, precision: str, alive: Callable[[], None]
) -> list[dict]:
    """Train a UNet on `train`; return its scores on the rows of `test` whose structure is in `train` (PositionData).

    alive: heartbeat, called in each step.
    """
    from monai.networks.nets import BasicUNet

    outputs = {structure: n for n, structure in enumerate(sorted({structure_of(row) for row in train.rows}))}
    of_image: dict[str, list[int]] = {}
    for index, row in enumerate(train.rows):
        of_image.setdefault(row.identity, []).append(index)
    of_image = list(of_image.values())
    rng = np.random.default_rng(seed % 2**63)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        net = BasicUNet(spatial_dims=2, in_channels=3, out_channels=len(outputs), features=(16, 16, 32, 64, 128, 16))
    net = net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, fused=True)

    def read(data, groups: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return images (B, 3, S, S) in -1..1, and each row's mask (N, S, S), image index and output channel."""
        items = [data[index] for group in groups for index in group]
        image_of = torch.tensor([n for n, group in enumerate(groups) for _ in group])
        first = [sum(map(len, groups[:n])) for n in range(len(groups))]
        pixels = torch.stack([items[n]["sam"] for n in first])
        masks = torch.stack([item["mask"] for item in items])
        channels = torch.tensor([outputs[structure_of(data.rows[index])] for group in groups for index in group])
        pixels, *others = (x.to(device) for x in (pixels, masks, image_of, channels))
        return pixels / 127.5 - 1, *others

    @torch.no_grad()
    def predict(data, rows: list[int]):
        """Yield each row's index, predicted mask and true mask, both (1, S, S)."""
        net.eval()
        # adjacent rows of one image share a forward pass
        for _, group in groupby(rows, key=lambda index: data.rows[index].identity):
            group = list(group)
            pixels, masks, _, channels = read(data, [group])
            with autocast(device, precision):
                logits = net(pixels)[0, channels]
            yield from zip(group, (logits > 0).split(1), masks.split(1), strict=True)

    validated = [index for index, row in enumerate(val.rows if val else ()) if structure_of(row) in outputs]
    best, weights, order = -1.0, net.state_dict(), []
    for step in range(steps):
        alive()
        net.train()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
        while len(order) < BATCH:
            order += rng.permutation(len(of_image)).tolist()
        pixels, masks, image_of, channels = read(train, [of_image[n] for n in order[:BATCH]])
        del order[:BATCH]
        pixels, masks = augment(pixels, masks.float(), image_of, rng)
        with autocast(device, precision):
            logits = net(pixels)[image_of, channels].float()
        probability = logits.sigmoid()
        overlap, areas = (probability * masks).sum((1, 2)), (probability + masks).sum((1, 2))
        loss = F.binary_cross_entropy_with_logits(logits, masks) + 1 - ((2 * overlap + 1) / (areas + 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if validated and (step + 1) % max(1, steps // EVALUATIONS) == 0:
            masks = predict(val, evenly_spaced(validated, MOST_VALIDATED))
            score = np.mean([dice(mask.cpu().numpy(), true.cpu().numpy()) for _, mask, true in masks])
            if score > best:
                best, weights = score, {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(weights)

    scores = []
    for index, mask, true in predict(test, [n for n, row in enumerate(test.rows) if structure_of(row) in outputs]):
        overlap, position = dice(mask.cpu().numpy(), true.cpu().numpy()), test[index]["position"]
        right = position and float(position_of(mask[0].cpu().numpy()) == position)
        row = {"index": index, "dice": overlap, "iou": overlap / (2 - overlap), "position_accuracy_mask": right}
        scores.append(row | {"hd95": hausdorff_95(mask, true)[0]})
    return scores


def augment(pixels: Tensor, masks: Tensor, image_of: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Apply random affine transforms to images (B, 3, S, S) and their masks (N, S, S), gain and noise to the images."""
    count, device = len(pixels), pixels.device
    turn = np.tile(np.eye(2, 3), (count, 1, 1)) + rng.normal(0, 0.06, (count, 2, 3)) * [[1, 0, 1], [0, 1, 1]]
    gain = torch.from_numpy(rng.uniform(0.8, 1.2, (count, 1, 1, 1))).float().to(device)
    grid = F.affine_grid(torch.from_numpy(turn).float().to(device), [*pixels.shape], align_corners=False)
    pixels = F.grid_sample(pixels, grid, padding_mode="border", align_corners=False) * gain
    masks = F.grid_sample(masks[:, None], grid[image_of], align_corners=False)[:, 0]
    return pixels + torch.from_numpy(rng.normal(0, 0.05, tuple(pixels.shape)).astype(np.float32)).to(
        device
    ), masks.round()
