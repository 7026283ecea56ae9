"""Guide 0's test table with its rivals and ablations, the figures, and the files of an evaluation and of --predict."""

import csv
import io
import textwrap
import warnings
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from tasks.prs_med import rivals
from tasks.prs_med.annotations import Row, position_in, position_of
from utils.checkpoint import write_atomically
from utils.log import format_table
from utils.stats import interval_of_mean, other_cases

# rows that a figure shows, and the most that are evaluated again without their image
EXAMPLES, MOST_ABLATED = 6, 300
# means over rows, by the title of their column; all but the last lie in 0..1
MEANS = {
    "dice": "Dice",
    "iou": "IoU",
    "position_accuracy": "position",
    "position_accuracy_mask": "mask's position",
    "hd95": "HD95",
}


def hausdorff_95(predicted: Tensor, target: Tensor) -> list[float]:
    """95 % Hausdorff distance of each pair of (B, H, W) masks, pixels: 0 where both are empty, the diagonal for one."""
    from monai.metrics import compute_hausdorff_distance

    diagonal = float(np.hypot(*target.shape[1:]))
    either = [mask.any((1, 2)).tolist() for mask in (predicted, target)]
    both = [k for k, (a, b) in enumerate(zip(*either, strict=True)) if a and b]
    distances = [diagonal if a or b else 0.0 for a, b in zip(*either, strict=True)]
    if both:
        with warnings.catch_warnings():
            # MONAI's own call of a name that it has deprecated
            warnings.simplefilter("ignore", FutureWarning)
            values = compute_hausdorff_distance(predicted[both, None], target[both, None], True, percentile=95)
        for k, value in zip(both, values[:, 0].tolist(), strict=True):
            distances[k] = value
    return distances


def case_of(row: Row) -> str:
    """What rows that are not independent share: their patient where that is known, else their image."""
    return row.patient or row.identity


def ablations(rows: list[Row], seed: int) -> dict[str, list[int]]:
    """The row whose image each row is shown, -1 for none: without the image, and with another case's."""
    shown = {"blank_image": [-1] * len(rows)}
    others = other_cases([case_of(row) for row in rows], [row.modality for row in rows], seed)
    return shown | ({"shuffled_image": others} if others else {})


def rival_scores(train, test) -> dict[str, list[dict]]:
    """The scores of each rival on `test`, fitted to `train` (both PositionData), at 256 x 256 pixels at most."""
    step = max(1, train.reader.image_size // 256)

    def examples(data, indices) -> list[rivals.Example]:
        found = []
        for index in indices:
            item, row = data[index], data.rows[index]
            gray = item["sam"].float().mean(0).numpy()[::step, ::step].astype(np.uint8)
            mask = item["mask"].numpy()[::step, ::step]
            found.append(rivals.Example(rivals.key_of(row.modality, row.answer), gray, mask, position_in(row.answer)))
        return found

    # of a structure asked about often, some hundred rows say enough
    of_key: dict[tuple, list[int]] = {}
    for index, row in enumerate(train.rows):
        of_key.setdefault(rivals.key_of(row.modality, row.answer), []).append(index)
    spread = [np.linspace(0, len(own) - 1, min(len(own), 400)).astype(int) for own in of_key.values()]
    chosen = sorted(own[k] for own, places in zip(of_key.values(), spread, strict=True) for k in places)
    known, asked = examples(train, chosen), examples(test, range(len(test)))

    scores = {}
    for rival in (rivals.grey_threshold, rivals.mean_mask, rivals.frequent_position):
        rows = scores[rival.__name__] = []
        for index, (mask, position) in enumerate(rival(known, asked)):
            true = position_of(asked[index].mask)
            row = {"index": index, "position_accuracy": true and float(position == true)}
            if mask is not None:
                both, either = (mask & asked[index].mask).sum(), (mask | asked[index].mask).sum()
                row |= {"dice": rivals.dice(mask, asked[index].mask), "iou": float(both / either) if either else 1.0}
            rows.append(row)
    return scores


def interval(low: float, high: float, sign: str = "") -> str:
    """A 95 % interval behind its estimate; one case alone has none."""
    return "" if low != low else f" ({low:{sign}.3f} to {high:{sign}.3f})"


def print_table(split: str, scores: list[dict], others: dict[str, list[dict]], rows: list[Row]) -> dict[str, float]:
    """Rank 0: print the network's row, then by modality, then the others'; returns their metrics by name.

    Means over rows with 95 % intervals by case. The last column is the network's mean paired difference to each of the
    others, in Dice, or in position for what has no mask.
    """
    metrics: dict[str, float] = {}
    table: dict[str, dict] = {}

    def add(title: str, prefix: str, some: list[dict], ending: str = "") -> None:
        cases = [case_of(rows[row["index"]]) for row in some]
        line = {"n": len(some), "cases": len(set(cases))}
        for name, column in MEANS.items():
            known = [k for k, row in enumerate(some) if row.get(name) is not None]
            if known:
                values = [float(some[k][name]) for k in known]
                mean = sum(values) / len(values)
                low, high = interval_of_mean(values, [cases[k] for k in known], name != "hd95")
                line[column] = f"{mean:.2f}" if name == "hd95" else f"{mean:.3f}{interval(low, high)}"
                metrics[f"{prefix}/{name}{ending}"] = mean
                if low == low:
                    metrics.update({f"{prefix}/{name}_low{ending}": low, f"{prefix}/{name}_high{ending}": high})
        table[title] = line

    metrics[f"{split}/rows"], metrics[f"{split}/cases"] = len(scores), len({case_of(row) for row in rows})
    add("network", split, scores)
    modalities = sorted({row.modality for row in rows})
    for modality in modalities if len(modalities) > 1 else ():
        add(f"  {modality}", split, [row for row in scores if rows[row["index"]].modality == modality], f"/{modality}")
    own = {row["index"]: row for row in scores}
    for key, some in others.items():
        title = key.partition("/")[2].replace("_", " ")
        add(title, f"{split}/{key}", some)
        # the network's mean lead over the rows that both have
        name = "dice" if "Dice" in table[title] else "position_accuracy"
        pairs = [(own[row["index"]].get(name), row.get(name), row["index"]) for row in some]
        pairs = [(a - b, index) for a, b, index in pairs if a is not None and b is not None]
        if pairs:
            gains = [gain for gain, _ in pairs]
            low, high = interval_of_mean(gains, [case_of(rows[index]) for _, index in pairs], False)
            gain = sum(gains) / len(gains)
            table[title]["network above by"] = f"{gain:+.3f}{interval(low, high, '+')}"
            metrics[f"{split}/{key}/{name}_gain"] = gain
            if low == low:
                metrics |= {f"{split}/{key}/{name}_gain_low": low, f"{split}/{key}/{name}_gain_high": high}
    print(format_table(split, table), flush=True)
    return metrics


# --- figures and files ------------------------------------------------------------------------------------------------


def draw_predictions(rows: list[Row], scores: list[dict], examples: dict[int, dict]):
    """A matplotlib figure: images with the true outline (green) and the predicted mask (red), question and answers."""
    from matplotlib.figure import Figure

    columns = min(3, len(examples))
    lines = -(-len(examples) // columns)
    figure = Figure(figsize=(4 * columns, 5 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, (index, example) in zip(axes, examples.items(), strict=False):
        row, score = rows[index], scores[index]
        says = f"says: {score['answer'] or '(nothing)'}" if "answer" in score else "(no answer asked for)"
        caption = [f"{row.modality}, Dice {score['dice']:.2f}", row.question, says, f"true: {row.answer}"]
        # what a model says early in a training may hold control characters
        caption = ["".join(letter if letter.isprintable() else "?" for letter in text) for text in caption]
        wrapped = [line for text in caption for line in textwrap.wrap(text, 52)[:3]]
        axis.set_title("\n".join(wrapped), fontsize=8, loc="left", parse_math=False)
        axis.imshow(example["image"].transpose(1, 2, 0))
        axis.imshow(np.where(example["predicted"][..., None], [1.0, 0.1, 0.1, 0.4], 0.0))
        # an empty mask and a full one have no outline
        if example["true"].any() and not example["true"].all():
            axis.contour(example["true"], [0.5], colors="lime", linewidths=1.5)
    return figure


def write_csv(path: Path, records: list[dict]) -> None:
    text = io.StringIO()
    table = csv.DictWriter(text, records[0])
    table.writeheader()
    table.writerows(records)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def write_cases(path: Path, rows: list[Row], scores: list[dict]) -> None:
    """Rank 0: a CSV of one line a row: image, case, question, true and generated answer, all scores."""
    records = []
    for score in scores:
        row = rows[score["index"]]
        facts = {"image": row.image, "mask": row.mask, "case": case_of(row), "modality": row.modality}
        facts |= {"question": row.question, "answer": row.answer, "generated": score.get("answer")}
        facts |= {"position": score["position"]} | {name: score.get(name) for name in MEANS}
        facts |= {"loss_seg": score["loss_seg"], "loss_txt": score["loss_txt"] / score["tokens"]}
        records.append(facts)
    write_csv(path, records)


def write_predictions(run_folder: Path, asked: list, records: list[dict], opened: dict[Path, Image.Image]) -> None:
    """Rank 0: predictions.csv, and a mask (0 and 255) and an overlay of each (image, question), named by the image.

    Earlier predictions stay: the folder is predictions, predictions_2, ... agree: whether the sentence names the
    position where the mask lies.
    """
    folder, number = run_folder / "predictions", 1
    while folder.exists():
        number += 1
        folder = run_folder / f"predictions_{number}"
    folder.mkdir(parents=True)
    lines, stems = [], set()
    for (file, question), record in zip(asked, records, strict=True):
        stem = next(name for n in count(1) if (name := f"{file.stem}_{n}" if n > 1 else file.stem) not in stems)
        stems.add(stem)
        mask, position = record["mask"], position_of(record["mask"])
        Image.fromarray(255 * mask.astype(np.uint8)).save(folder / f"{stem}_mask.png")
        red = Image.new("RGB", opened[file].size, (255, 40, 40))
        overlay = Image.composite(red, opened[file], Image.fromarray(110 * mask.astype(np.uint8)))
        overlay.save(folder / f"{stem}_overlay.png")
        facts = {"image": file, "question": question, "answer": record["answer"], "mask_position": position}
        facts |= {"agree": position_in(record["answer"]) == position, "share": round(float(mask.mean()), 6)}
        lines.append(facts | {"mask": f"{stem}_mask.png", "overlay": f"{stem}_overlay.png"})
    write_csv(folder / "predictions.csv", lines)
    for line in lines[:9]:
        print(f"{line['image']}: {line['answer']} (mask: {line['share']:.1%} of the image, {line['mask_position']})")
    apart = [str(line["image"]) for line in lines if not line["agree"]]
    if apart:
        print(f"warning: {len(apart)} of {len(lines)} sentences name another place than their mask: {apart[0]}, ...")
    print(f"written: {folder}/predictions.csv, masks and overlays", flush=True)
