"""Baseline: a small UNet that ignores the question and has one output channel per anatomical structure in the training
set.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hardware_utils import autocast
from tasks.prs_med.annotations import is_right, position_of
from tasks.prs_med.report import evenly_spaced, hausdorff_95
from tasks.prs_med.rivals import dice, overlap_scores

BATCH, EVALUATIONS, MOST_VALIDATED, LEARNING_RATE = 8, 10, 200, 3e-3


def structure_of(row) -> tuple[str, str]:
    return row.modality, " ".join(row.names[:1]).casefold()


def unet_scores(
    train, val, test, steps: int, seed: int, device: torch.device, precision: str, heartbeat: Callable[[], None]
) -> list[dict]:
    """Train a UNet on `train`; return one dict of scores for each `test` row whose structure occurs in `train`.

    The test uses the weights with the best Dice on `val` or, if `val` is None, the final weights.
    """
    from monai.networks.nets import BasicUNet

    outputs = {structure: n for n, structure in enumerate(sorted({structure_of(row) for row in train.rows}))}
    rows_of_image: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(train.rows):
        rows_of_image[row.identity].append(index)
    groups = list(rows_of_image.values())
    rng = np.random.default_rng(seed % 2**63)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        net = BasicUNet(spatial_dims=2, in_channels=3, out_channels=len(outputs), features=(16, 16, 32, 64, 128, 16))
    net = net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, fused=True)

    def read(data, groups: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return images (B, 3, S, S) in [-1, 1] and each row's mask (N, S, S), image index (N,) and channel (N,).

        groups: one list of row indices in `data` per image.
        """
        items = [[data[index] for index in group] for group in groups]
        pixels = torch.stack([group[0]["sam"] for group in items])
        masks = torch.stack([item["mask"] for group in items for item in group])
        image_of = torch.tensor([n for n, group in enumerate(groups) for _ in group])
        channels = torch.tensor([outputs[structure_of(data.rows[index])] for group in groups for index in group])
        pixels, *others = (x.to(device) for x in (pixels, masks, image_of, channels))
        return pixels / 127.5 - 1, *others

    @torch.no_grad()
    def predict(data, rows: list[int]):
        net.eval()
        for _, group in groupby(rows, key=lambda index: data.rows[index].identity):
            group = list(group)
            pixels, masks, _, channels = read(data, [group])
            with autocast(device, precision):
                logits = net(pixels)[0, channels]
            yield from zip(group, (logits > 0).cpu().numpy(), masks.cpu().numpy(), strict=True)

    validated = [index for index, row in enumerate(val.rows if val else ()) if structure_of(row) in outputs]
    best, weights, order = -1.0, net.state_dict(), []
    for step in range(steps):
        heartbeat()
        net.train()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
        while len(order) < BATCH:
            order += rng.permutation(len(groups)).tolist()
        pixels, masks, image_of, channels = read(train, [groups[n] for n in order[:BATCH]])
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
            score = np.mean([dice(mask, true) for _, mask, true in masks])
            if score > best:
                best, weights = score, {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(weights)

    scores = []
    for index, mask, true in predict(test, [n for n, row in enumerate(test.rows) if structure_of(row) in outputs]):
        right = is_right(position_of(mask), test[index]["position"])
        [distance] = hausdorff_95(torch.from_numpy(mask[None]), torch.from_numpy(true[None]))
        scores.append(overlap_scores(index, mask, true) | {"position_accuracy_mask": right, "hd95": distance})
    return scores


def augment(pixels: Tensor, masks: Tensor, image_of: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Apply a random affine transform to each image (B, 3, S, S) and its masks (N, S, S); vary the image's gain and add
    noise.

    image_of: (N,), image index of each mask.
    """
    count, device = len(pixels), pixels.device
    turn = np.tile(np.eye(2, 3), (count, 1, 1)) + rng.normal(0, 0.06, (count, 2, 3)) * [[1, 0, 1], [0, 1, 1]]
    gain = torch.from_numpy(rng.uniform(0.8, 1.2, (count, 1, 1, 1))).float().to(device)
    grid = F.affine_grid(torch.from_numpy(turn).float().to(device), [*pixels.shape], align_corners=False)
    pixels = F.grid_sample(pixels, grid, padding_mode="border", align_corners=False) * gain
    masks = F.grid_sample(masks[:, None], grid[image_of], align_corners=False)[:, 0]
    noise = torch.from_numpy(rng.normal(0, 0.05, tuple(pixels.shape))).float().to(device)
    return pixels + noise, masks.round()
