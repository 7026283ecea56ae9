"""PRS-Med results: test table, figure of examples, and output of --predict."""

import textwrap
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from tasks.prs_med.annotations import Row, position_in, position_of
from tasks.prs_med.wordings import named_in
from utils import stats

EXAMPLES, MOST_ABLATED = 6, 300
# scores to average over rows: in [0, 1], except hd95, which is in pixels
MEANS = ("dice", "iou", "position_accuracy", "position_accuracy_mask", "hd95")
COLUMNS = {"dice": "Dice", "position_accuracy": "position", "position_accuracy_mask": "mask pos.", "hd95": "HD95"}


def hausdorff_95(predicted: Tensor, target: Tensor) -> list[float]:
    """Return the 95th-percentile Hausdorff distance in pixels for each pair of bool masks (B, H, W).

    The distance is 0 if both masks are empty, and the length of the image diagonal if only one mask is empty.
    """
    from monai.metrics import compute_hausdorff_distance

    with warnings.catch_warnings():
        # MONAI warns about empty masks and about a deprecated function that MONAI itself calls
        warnings.simplefilter("ignore")
        distances = compute_hausdorff_distance(predicted[:, None], target[:, None], True, percentile=95)[:, 0]
    limits = float(np.hypot(*target.shape[1:])) * (predicted | target).any((1, 2))
    return torch.where(distances.isfinite(), distances, limits).tolist()


def evenly_spaced(items, most: int) -> list:
    return [items[i] for i in np.linspace(0, len(items) - 1, min(most, len(items))).astype(int)]


def case_of(row: Row) -> str:
    """Return the row's case, the unit of confidence intervals: its patient or, if unknown, its image."""
    return row.patient or row.identity


def ablations(rows: list[Row], some: list[int], seed: int) -> list[tuple[str, int, Row]]:
    """Copy each selected row twice: with a blank image, and with the image of another case.

    some: indices of the selected rows. Returns [(name of the ablation, row index, changed row)]. If all selected rows
    belong to one case, only the copies with a blank image are made.
    """
    asked = [rows[index] for index in some]
    changed = []
    for index, row in zip(some, asked, strict=True):
        changed.append(("ablation/blank_image", index, row._replace(image="", digest="")))
    others = stats.other_cases([case_of(row) for row in asked], [row.modality for row in asked], seed)
    for index, row, other in zip(some, asked, others or [], strict=False):
        image, digest = asked[other].image, asked[other].digest
        changed.append(("ablation/shuffled_image", index, row._replace(image=image, digest=digest)))
    return changed


def join_wordings(others: dict[str, list[dict]]) -> None:
    """Replace the "wording/..." entries of `others` with "in_other_words" and "worst_wording".

    "in_other_words": each row's mean scores over all wordings. "worst_wording": the scores for the wording with the
    lowest mean Dice.
    """
    asked = {key: others.pop(key) for key in [*others] if key.startswith("wording/")}
    if asked:
        frame = pd.DataFrame([row for rows in asked.values() for row in rows])[["index", *MEANS]]
        means = frame.astype(float).groupby("index").mean().reset_index().astype({"index": int})
        others["in_other_words"] = means.astype(object).where(means.notna(), None).to_dict("records")
        others["worst_wording"] = min(asked.values(), key=lambda rows: np.mean([row["dice"] for row in rows]))


def print_table(split: str, scores: list[dict], others: dict[str, list[dict]], rows: list[Row]) -> dict[str, float]:
    """Rank 0 only: print a table line for the network and for each item of `others`; return {metric: value}.

    others: {name: scores} of ablations, rewordings and baselines. The last column is the network's mean gain over each
    item, in Dice or, for baselines without masks, in position accuracy.
    """
    metrics: dict[str, float] = {}
    absent = others.pop("absent", [])

    def add_metric(key: str, values: dict[int, float], bounded: bool, sign: str = "") -> str:
        mean = metrics[key] = sum(values.values()) / len(values)
        low, high = stats.interval_of_mean(list(values.values()), [case_of(rows[index]) for index in values], bounded)
        # with only one case, both bounds are NaN, so this comparison is false
        if low == low:
            # a score cannot be negative, but a difference between two scores can
            low = low if sign else max(low, 0.0)
            metrics.update({f"{key}_low": low, f"{key}_high": high})
        return stats.shown(mean, low, high, sign)

    parts = {split: scores}
    modalities = sorted({row.modality for row in rows})
    for modality in modalities if len(modalities) > 1 else ():
        parts[f"{split}/{modality}"] = [row for row in scores if rows[row["index"]].modality == modality]
    table: dict[str, dict] = {}
    for key, some in (parts | {f"{split}/{key}": some for key, some in others.items()}).items():
        cases = len({case_of(rows[row["index"]]) for row in some})
        metrics |= {f"{key}/rows": len(some), f"{key}/cases": cases}
        line = {}
        for name in MEANS:
            values = {row["index"]: float(row[name]) for row in some if row.get(name) is not None}
            if values:
                text = add_metric(f"{key}/{name}", values, name != "hd95")
                if name in COLUMNS:
                    line[COLUMNS[name]] = text if name == "dice" else text.partition(" ")[0]
        title = key.rpartition("/")[2]
        if key in parts:
            table["network" if key == split else f" {title}"] = line
            continue
        table[title.replace("_", " ")] = line
        name = "dice" if COLUMNS["dice"] in line else "position_accuracy"
        own, other = ({row["index"]: row.get(name) for row in of_one} for of_one in (scores, some))
        gains = {index: own[index] - value for index, value in other.items() if None not in (value, own[index])}
        if gains:
            line["network above by"] = add_metric(f"{key}/{name}_gain", gains, False, "+")
    asked, cases = (metrics[f"{split}/{name}"] for name in ("rows", "cases"))
    print(f"\n{split}: {asked} questions, {cases} cases (95 % intervals by case)")
    print(pd.DataFrame.from_dict(table, orient="index").to_string(na_rep="-"), flush=True)
    if absent:
        # the true masks are empty, so Dice is 1 only if the predicted mask is empty
        empty = [row["dice"] == 1 for row in absent]
        named = [position_in(row["generated"]) is not None for row in absent]
        metrics |= {f"{split}/absent/empty_mask": float(np.mean(empty))}
        metrics |= {f"{split}/absent/place_named": float(np.mean(named))}
        shares = f"{sum(empty)} of {len(absent)} masks empty, {sum(named)} of {len(absent)} answers name a place"
        print(f"asked for what is not in the image: {shares}", flush=True)
    return metrics


def draw_predictions(rows: list[Row], scores: list[dict], examples: dict[int, dict]):
    from matplotlib.figure import Figure

    columns = min(3, len(examples))
    lines = -(-len(examples) // columns)
    figure = Figure(figsize=(4 * columns, 5.5 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, (index, example) in zip(axes, examples.items(), strict=False):
        row, score = rows[index], scores[index]
        says = f"answer: {score['generated'] or '(nothing)'}" if "generated" in score else "(no answer generated)"
        caption = [f"{row.modality}, Dice {score['dice']:.2f}", row.question, says, f"true: {row.answer}"]
        # early in training, generated answers may contain characters that cannot be drawn
        caption = ["".join(x if x.isprintable() and x != "\ufffd" else "?" for x in text) for text in caption]
        wrapped = [line for text in caption for line in textwrap.wrap(text, 52)[:3]]
        axis.set_title("\n".join(wrapped), fontsize=8, loc="left", parse_math=False)
        axis.imshow(example["image"].transpose(1, 2, 0))
        axis.imshow(np.where(example["predicted"][..., None], [1.0, 0.1, 0.1, 0.4], 0.0))
        # a mask that is empty or covers the whole image has no outline
        if example["true"].any() and not example["true"].all():
            axis.contour(example["true"], [0.5], colors="lime", linewidths=1.5)
    return figure


def write_predictions(
    run_folder: Path, asked: list, records: list[dict], opened: dict[Path, Image.Image], structures: list[list[str]]
) -> None:
    """Rank 0 only: write predictions.csv, masks (0 and 255) and overlays to a new subfolder.

    records: predicted mask, bool (H, W), and answer of each pair in `asked`. structures: [name, synonyms...] of each
    structure in the training data.
    """
    folder, number = run_folder / "predictions", 1
    while folder.exists():
        number += 1
        folder = run_folder / f"predictions_{number}"
    folder.mkdir(parents=True)
    lines = []
    stems = Counter(file.stem for file, _ in asked)
    for number, ((file, question), record) in enumerate(zip(asked, records, strict=True), start=1):
        stem = file.stem if stems[file.stem] == 1 else f"{file.stem}_{number}"

        mask, position = record["mask"], position_of(record["mask"])
        Image.fromarray(255 * mask.astype(np.uint8)).save(folder / f"{stem}_mask.png")
        red = Image.new("RGB", opened[file].size, (255, 40, 40))
        overlay = Image.composite(red, opened[file], Image.fromarray(110 * mask.astype(np.uint8)))
        overlay.save(folder / f"{stem}_overlay.png")
        lines.append({
            "image": file,
            "question": question,
            "answer": record["answer"],
            "mask_position": position,
            "named": "|".join(named_in(question, structures)),
            "agree": position_in(record["answer"]) == position,
            "share": round(float(mask.mean()), 6),
            "mask": f"{stem}_mask.png",
            "overlay": f"{stem}_overlay.png",
        })  # fmt: skip
    pd.DataFrame(lines).to_csv(folder / "predictions.csv", index=False)
    for line in lines[:9]:
        print(f"{line['image']}: {line['answer']} (mask: {line['share']:.1%} of the image, {line['mask_position']})")
    unclear = [line for line in lines if not line["named"] or "|" in line["named"]]
    if unclear and structures:
        named = unclear[0]["named"].replace("|", " and ") or "none"
        known = ", ".join(names[0] for names in structures)
        print(
            f"warning: {len(unclear)} of {len(lines)} questions name none of the training's structures, or several; "
            f"masks may show anything: {unclear[0]['question']!r} names {named}; known are {known}"
        )
    apart = [str(line["image"]) for line in lines if not line["agree"]]
    if apart:
        print(f"warning: {len(apart)} of {len(lines)} answers name another position than their mask's: {apart[0]}, ...")
    print(f"written: {folder}/predictions.csv, masks and overlays", flush=True)
