"""Baselines for the table of test results: grey threshold, mean mask, random forest on texture features, and most
frequent position.
"""

import re
from collections import Counter, defaultdict
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from tasks.prs_med.annotations import is_right, position_in, position_of
from tasks.prs_med.report import evenly_spaced

PLACES = set("top upper bottom lower left right center centre middle".split())
# minimum and maximum number of training rows per structure; MOST also limits the test rows
FEWEST, MOST = 8, 400


class Example(NamedTuple):
    """Image and mask of one row at a reduced size, and the position named in the row's answer.

    gray: uint8 (S, S). mask: bool (S, S). position: None if the answer names no position.
    """

    gray: np.ndarray
    mask: np.ndarray
    position: str | None


def rival_scores(train, test, rank: int = 0, world_size: int = 1) -> dict[str, list[dict]]:
    """Fit the baselines to `train`; return {name of the baseline: scores on `test`, one dict per row}.

    Each rank handles, and returns the scores of, only its share of the structures. If a structure has too few training
    rows, the baselines are fitted to all training rows of its modality or, failing that, to all training rows.
    """
    groups: dict[tuple, list[int]] = defaultdict(list)
    for index, row in enumerate(train.rows):
        key = key_of(row.modality, row.answer)
        for length in range(3):
            groups[key[:length]].append(index)
    asked: dict[tuple, list[int]] = defaultdict(list)
    for index, row in enumerate(test.rows):
        key = key_of(row.modality, row.answer)
        large = (key[:length] for length in (2, 1) if len(groups.get(key[:length], [])) >= FEWEST)
        asked[next(large, ())].append(index)

    step = max(1, train.processor.image_size // 256)
    scores: dict[str, list[dict]] = defaultdict(list)
    for key in sorted(asked)[rank::world_size]:
        known = [read_example(train, index, step) for index in evenly_spaced(groups[key], MOST)]
        shape = shape_of_masks(known)
        band, forest = best_band(evenly_spaced(known, 40), *shape), fit_forest(evenly_spaced(known, 60))
        usual_mask = best_mean_mask(known)
        named = Counter(row.position for row in known if row.position)
        usual_position = max(named, key=named.get, default=None)
        for index in evenly_spaced(asked[key], MOST):
            row = read_example(test, index, step)
            true = position_of(row.mask)
            masks = {
                "grey_threshold": in_band(row.gray, band, *shape),
                "mean_mask": usual_mask,
                "pixel_forest": by_forest(forest, row.gray, *shape),
            }
            for name, mask in masks.items():
                right = is_right(position_of(mask), true)
                scores[name].append(overlap_scores(index, mask, row.mask) | {"position_accuracy": right})
            right = is_right(usual_position, true)
            scores["frequent_position"].append({"index": index, "position_accuracy": right})
    return scores


def key_of(modality: str, answer: str) -> tuple[str, str]:
    """Return (modality, answer without position words), which identifies the structure in the answer."""
    words = re.findall(r"\w+", answer.casefold())
    return modality, " ".join(word for word in words if word not in PLACES)


def read_example(data, index: int, step: int) -> Example:
    item = data[index]
    gray = item["sam"].float().mean(0).numpy()[::step, ::step].astype(np.uint8)
    return Example(gray, item["mask"].numpy()[::step, ::step], position_in(data.rows[index].answer))


def shape_of_masks(rows: list[Example]) -> tuple[int, bool]:
    """Return the median number of connected regions per mask, and whether over 5 % of the masks touch the edge."""
    parts, touching = [], []
    for mask in (row.mask for row in rows if row.mask.any()):
        sizes = np.bincount(ndimage.label(mask)[0].ravel())[1:]
        parts.append((sizes >= 0.1 * sizes.max()).sum())
        touching.append(any(edge.any() for edge in (mask[0], mask[-1], mask[:, 0], mask[:, -1])))
    return (int(np.median(parts)), bool(np.mean(touching) > 0.05)) if parts else (1, True)


def best_band(rows: list[Example], parts: int, touching: bool) -> tuple[int, int]:
    # about 96 pixels per side are enough to compare bands of grey levels
    step = max(1, len(rows[0].gray) // 96)

    def score(band: tuple[int, int]) -> float:
        found = [in_band(row.gray[::step, ::step], band, parts, touching) for row in rows]
        return float(np.mean([dice(mask, row.mask[::step, ::step]) for mask, row in zip(found, rows, strict=True)]))

    # a coarse grid search for lo <= grey level < hi, then a finer one that leaves bounds of 0 and 256 unchanged
    lo, hi = max(combinations(range(0, 257, 16), 2), key=score)
    near = range(-12, 13, 4)
    return max(product([lo + i for i in near if lo] or [0], [hi + i for i in near if hi < 256] or [256]), key=score)


def in_band(gray: np.ndarray, band: tuple[int, int], parts: int, touching: bool) -> np.ndarray:
    """Return a bool mask (H, W) of the largest connected regions with band[0] <= gray < band[1].

    parts: maximum number of regions. touching: whether regions may touch the image edge.
    """
    labels, count = ndimage.label((gray >= band[0]) & (gray < band[1]))
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    sizes[0] = 0
    if not touching:
        for edge in (labels[0], labels[-1], labels[:, 0], labels[:, -1]):
            sizes[edge] = 0
    kept = np.zeros(count + 1, bool)
    kept[np.argsort(-sizes, kind="stable")[:parts]] = True
    return (kept & (sizes > 0))[labels]


def best_mean_mask(rows: list[Example]) -> np.ndarray:
    mean = np.mean([row.mask for row in rows], axis=0)
    cuts = [mean > level for level in np.linspace(0, mean.max(), 20, endpoint=False)]
    return max(cuts, key=lambda cut: np.mean([dice(cut, row.mask) for row in rows]))


def fit_forest(rows: list[Example]):
    from sklearn.ensemble import RandomForestRegressor

    rng = np.random.default_rng(0)
    features, labels = [], []
    for row in rows:
        step = subsampling_step(row.gray)
        inside = row.mask[::step, ::step].ravel()
        foreground, background = (rng.permutation(np.flatnonzero(inside == kind)) for kind in (True, False))
        chosen = np.concatenate([foreground[:100], background[:400]])
        features.append(texture(row.gray[::step, ::step])[chosen])
        labels.append(inside[chosen])
    forest = RandomForestRegressor(60, min_samples_leaf=5, max_features="sqrt", random_state=0)
    return forest.fit(np.concatenate(features), np.concatenate(labels))


def by_forest(forest, gray: np.ndarray, parts: int, touching: bool) -> np.ndarray:
    step = subsampling_step(gray)
    small = gray[::step, ::step]
    likely = ndimage.gaussian_filter(forest.predict(texture(small)).reshape(small.shape), 1)
    mask = in_band(likely, (0.5, np.inf), parts, touching)
    return mask.repeat(step, 0).repeat(step, 1)[: len(gray), : len(gray)]


def texture(gray: np.ndarray) -> np.ndarray:
    """Return smoothed grey, gradient and structure tensor features of each pixel: (H, W) -> (H * W, 12)."""
    gray = gray / 255
    kinds = (ndimage.gaussian_filter, ndimage.gaussian_gradient_magnitude)
    features = [kind(gray, scale) for kind in kinds for scale in (1, 2, 4)]
    x, y = ndimage.sobel(gray, 1), ndimage.sobel(gray, 0)
    features += [ndimage.gaussian_filter(term, scale) for term in (x * x, x * y, y * y) for scale in (2, 4)]
    return np.stack(features, axis=-1).reshape(gray.size, -1)


def subsampling_step(gray: np.ndarray) -> int:
    return max(1, len(gray) // 128)


def dice(predicted: np.ndarray, target: np.ndarray) -> float:
    areas = predicted.sum() + target.sum()
    return float(2 * (predicted & target).sum() / areas) if areas else 1.0


def overlap_scores(index: int, predicted: np.ndarray, target: np.ndarray) -> dict:
    overlap = dice(predicted, target)
    return {"index": index, "dice": overlap, "iou": overlap / (2 - overlap)}
