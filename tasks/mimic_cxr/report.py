"""Guide 1's results: the tables of an evaluation, the file of predictions, the figures, and two rows of the banner."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

from old.augmentation_utils import change_images, draw_changes
from old.cli_utils import InputError
from old.figure_utils import wrap
from old.hardware_utils import is_roomy, smaller_batch
from old.logging_utils import print_table, save_figure, write_result
from old.memory_utils import BatchSize, batch_flags
from tasks.mimic_cxr.answers import CHEXPERT, HEADS
from tasks.mimic_cxr.calibration import given_probability, reliability
from tasks.mimic_cxr.data import QuestionData
from tasks.mimic_cxr.metrics import Metrics, Predictions, judge_labels
from tasks.mimic_cxr.releases import largest_first

# Characters of a line above an image, and of a question there.
LINE = 48
LONGEST_QUESTION = 600
# The tables, the row of all in them, and their columns in order.
TITLES = {
    "vqa": "answers",
    "chexpert": "CheXpert",
    "decision": "yes or no",
}
OF_ALL = {"vqa": "all", "chexpert": "macro"}
COLUMNS = ("threshold", "accuracy", "majority", "auroc", "ap", "f1", "ece", "balanced", "sensitivity", "specificity")
# Ways to answer, as the metrics and the table name them.
BLIND = {
    "model": "the model",
    "no_image": "without the image",
    "other_image": "another patient's image",
    "no_question": "without the question",
    "commonest_answer": "commonest training answer",
    "majority": "majority of its type",
}
# What a CheXpert label says.
LABEL_WORDS = {"present": 1, "uncertain": -1, "absent": 0}


# --- tables -----------------------------------------------------------------------------------------------------------


def print_index(facts: dict) -> None:
    """What an index holds, by its index.json, and what was left out."""
    left_out = largest_first(facts["left_out"], 25)
    rows = {reason: {"questions": count} for reason, count in left_out.items()}
    print_table("questions left out", rows)
    for title in ("ratings", "studies"):
        rows = {name: {"count": count} for name, count in facts[title].items()}
        if rows:
            print_table(title, rows)

    # a user's table, and what is odd about it
    if "table" in facts:
        print_table(facts["table"], facts["splits"])
        print(f"split {facts['rule']}")
        for note in facts["notes"]:
            print(f"note: {note}", flush=True)


def print_metrics(
    title: str,
    metrics: Metrics,
    sizes: dict[str, int],
) -> None:
    """A table for each family of metrics: the loss and its parts, answers, labels, decisions, scores without looking.

    sizes: how many questions or studies each row stands for. In brackets are 95 % intervals by patient.
    """
    losses: dict[str, dict] = {}
    tables: dict[str, dict[str, dict]] = {family: {} for family in TITLES}
    for name in metrics:
        split, metric, *group = name.split("/", 2) if "/" in name else ("", "")
        family, _, column = metric.partition("_")
        if family == "loss":
            losses[metric] = {"mean": cell_of(metrics, name)}
        elif family in tables and column in COLUMNS:
            row = group[0] if group else OF_ALL[family]
            line = tables[family].setdefault(row, {"n": sizes[row.removesuffix(" tuned")]})
            line[column] = cell_of(metrics, f"{split}/{metric}", f"/{group[0]}" if group else "")

    print_table(f"{title}: loss", losses)
    for family, rows in tables.items():
        if rows:
            print_table(f"{title}: {TITLES[family]}", rows)
    print_blind(f"{title}: what looking adds", metrics)


def cell_of(
    metrics: Metrics,
    name: str,
    ending: str = "",
    sign: str = "",
) -> str:
    """A metric with its 95 % interval where it has one; sign: `+` for one that tells a difference.

    (-) stands behind a difference that has none: of one case, or the same in all.
    """
    value = metrics[f"{name}{ending}"]
    if value is None:
        return "undefined"
    low = metrics.get(f"{name}_low{ending}")
    high = metrics.get(f"{name}_high{ending}")
    text = format(value, f"{sign}.4f")
    if low is None:
        return f"{text} (-)" if sign else text
    return f"{text} ({low:{sign}.3f} to {high:{sign}.3f})"


def print_blind(title: str, metrics: Metrics) -> None:
    """The table of blind_metrics, where there are any: each way to answer, and how far the model is above it."""
    rows = {}
    for name in metrics:
        # <split>/blind/<way to answer>/accuracy
        *family, way, metric = ["", *name.split("/")]
        if family[-1:] != ["blind"] or metric != "accuracy":
            continue
        split = family[1]
        line = {"n": metrics[f"{split}/blind/rows"], "patients": metrics[f"{split}/blind/cases"]}
        line["accuracy"] = cell_of(metrics, name)
        if way != "model":
            line["model above"] = cell_of(metrics, f"{name}_gain", sign="+")
        rows[BLIND[way]] = line
    if rows:
        print_table(title, rows)


def write_evaluation(
    run_folder: Path,
    metrics: Metrics,
    data: QuestionData,
    predictions: Predictions,
) -> bool:
    """--eval_only: eval_<split>.json and the figures; returns whether the disk took all."""
    content = json.dumps(metrics, indent=2) + "\n"
    written = [write_result(run_folder / f"eval_{data.split}.json", content.encode())]
    for name, figure in draw_split(data, predictions).items():
        written.append(save_figure(run_folder / "figures" / f"{name}.png", figure))
    return all(written)


def make_results_folder(run_folder: Path) -> None:
    """--eval_only: where results go. Raises InputError where a file is in the way.

    Of a full or read-only disk, each file that is not written says so.
    """
    try:
        (run_folder / "figures").mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        reason = error.strerror
        raise InputError(f"{run_folder}: cannot write here ({reason}); choose another --output_dir") from None
    except OSError:
        pass


def write_predictions(
    run_folder: Path,
    data: QuestionData,
    predictions: Predictions,
    thresholds: dict[str, float],
) -> bool:
    """predictions_<split>.parquet: one row a question, with every probability; whether the disk took it.

    Classes of another head than the question's have none, nor have labels that were never trained.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    heads = list(HEADS)
    rows = [data.row(int(i)) for i in predictions["index"]]
    table = {
        "subject_id": [f"p{data.study_column('subject_id', row['study'])}" for row in rows],
        "study_id": [f"s{data.study_column('study_id', row['study'])}" for row in rows],
        "question_id": [row["id"] for row in rows],
        "question_type": predictions["type"].tolist(),
        "head": [heads[head] for head in predictions["head"]],
        "question": [row["question"] for row in rows],
        # what is said of it
        "answer": class_names(predictions, "predicted"),
        "p(answer)": given_probability(predictions),
        "answer at threshold": answers_at_threshold(predictions, thresholds),
        "truth": class_names(predictions, "target"),
    }
    for number, (head, names) in enumerate(HEADS.items()):
        of_others = predictions["head"] != number
        for place, name in enumerate(names):
            table[f"p({head}: {name})"] = pa.array(predictions["p"][:, place], mask=of_others)
    if "image" in data.index.studies.schema.names:
        table = {"image": [data.study_column("image", row["study"]) for row in rows]} | table
    for i, label in enumerate(CHEXPERT):
        table[f"p({label})"] = pa.array(predictions["chexpert"][:, i], from_pandas=True)

    # through memory, so that a full disk leaves no half of it
    content = pa.BufferOutputStream()
    pq.write_table(pa.table(table), content)
    return write_result(run_folder / f"predictions_{data.split}.parquet", content.getvalue().to_pybytes())


def answers_at_threshold(predictions: Predictions, thresholds: dict[str, float]) -> list[str | None]:
    """The answers of yes or no at the threshold of the validation; None for others, and where there is none."""
    if "binary" not in thresholds:
        return [None] * len(predictions["head"])
    said = predictions["p"][:, 1].astype(np.float64) >= thresholds["binary"]
    binary = predictions["head"] == list(HEADS).index("binary")
    return [HEADS["binary"][int(yes)] if asked else None for yes, asked in zip(said, binary, strict=True)]


def class_names(predictions: Predictions, column: str) -> list[str]:
    """The names of the classes in a column, each of its question's head."""
    pairs = zip(predictions["head"], predictions[column], strict=True)
    classes = list(HEADS.values())
    return [classes[head][number] for head, number in pairs]


# --- the banner -------------------------------------------------------------------------------------------------------


def describe_trained(model: nn.Module) -> str:
    """How many of a model's parameters are trained. In ZeRO-3, a process holds a part of each."""
    total = trained = 0
    for parameter in model.parameters():
        size = getattr(parameter, "ds_numel", parameter.numel())
        total += size
        trained += size if parameter.requires_grad else 0
    return f"{trained:,} of {total:,} parameters"


def describe_memory(
    gpu_gb: float,
    used: dict,
    batch: BatchSize,
    own_file: bool,
) -> str:
    """The smallest GPU's memory in GiB, and what was set by it.

    used: {flag: value} of those that the hardware decided. batch: as it was fitted. own_file: DeepSpeed trains, by a
    file of ours.
    """
    settings = []
    if batch.size == used.get("batch_size"):
        settings.append(f"batch {batch.size}")
    if batch.recomputed == used.get("gradient_checkpointing"):
        settings.append("activations recomputed" if batch.recomputed else "activations kept")
    if own_file and "offload_optimizer" in used:
        settings.append(f"optimizer on the {'CPU' if used['offload_optimizer'] else 'GPU'}")
    kind = "16 GB or more" if is_roomy(gpu_gb) else "below 16 GB"
    return f"{gpu_gb:.1f} GiB on the smallest GPU, {kind}: {', '.join(settings) or 'nothing set by it'}"


def print_rehearsal(
    title: str,
    step,
    batch_size: int,
    accumulation: int | None,
    recomputed: bool,
    memory_gb: float,
) -> None:
    """--rehearse: what a step takes, and the flags of a batch that fits into GPUs of this memory."""
    from old.rehearsal_utils import report_rehearsal

    def fitting_flags(samples: int) -> str:
        size, micro_batches = smaller_batch(batch_size, accumulation, samples)
        return batch_flags(size, micro_batches)

    title += f", activations {'recomputed' if recomputed else 'kept'}"
    otherwise = "a smaller --image_size" if recomputed else "--gradient_checkpointing"
    note = "is not rehearsed: it takes less than this by DDP"
    print(f"ZeRO, which shares the optimizer's state over the processes, {note}")
    report_rehearsal(title, step, batch_size, memory_gb, fitting_flags, otherwise)


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_images(
    images: list[np.ndarray],
    texts: list[str],
    colors: list[str],
):
    """A matplotlib figure: images as the model sees them, each under its text, three in a row."""
    from matplotlib.figure import Figure

    # inches: the images are squares, and the longest text has room above each
    side = 3.8
    gap = 0.15
    most_lines = max((text.count("\n") + 1 for text in texts), default=1)
    above = 0.2 + 0.17 * most_lines
    rows = max(1, math.ceil(len(images) / 3))
    width = 3 * (side + gap) + gap
    height = rows * (side + above)
    figure = Figure(figsize=(width, height))

    # a dollar sign in a question is no formula
    for k, (image, text, color) in enumerate(zip(images, texts, colors, strict=True)):
        left = gap + k % 3 * (side + gap)
        bottom = height - (k // 3 + 1) * (side + above)
        axes = add_square(figure, left, bottom, side)
        axes.axis("off")
        axes.imshow(image, cmap="gray", vmin=0, vmax=255)
        axes.set_title(text, fontsize=9, color=color, parse_math=False)
    return figure


def add_square(figure, left: float, bottom: float, side: float):
    """Axes of a matplotlib figure, as wide as they are high, inches."""
    width, height = figure.get_size_inches()
    return figure.add_axes([left / width, bottom / height, side / width, side / height])


def evenly(count: int, wanted: int) -> list[int]:
    """Up to `wanted` places of `count`, evenly spaced."""
    places = np.linspace(0, count - 1, min(wanted, count))
    return places.astype(int).tolist()


def short_question(item: dict) -> str:
    """A question in lines that go above its image."""
    return wrap(item["question"][:LONGEST_QUESTION], LINE)


def draw_inputs(data: QuestionData, seed: int | None = None):
    """A matplotlib figure: nine training images, each with its question, the answer and the CheXpert labels.

    seed: of the augmentation, whose first epoch is shown; None without one.
    """
    classes = list(HEADS.values())
    images = []
    texts = []
    for i in evenly(len(data), 9):
        item = data[i]
        lines = [short_question(item), f"answer: {classes[item['head']][item['target']]}"]
        for word, value in LABEL_WORDS.items():
            names = labels_of(data, item["study"], value)
            if names:
                lines.append(wrap(f"{word}: {', '.join(names)}", LINE))
        if item["error"]:
            lines.append("NOT READABLE")

        # as the first epoch has it
        image = item["image"]
        if seed is not None:
            pixels = torch.from_numpy(image.copy())
            changes = draw_changes(seed, 0, [item["study"]])
            image = change_images(pixels[None, None], changes)[0, 0].numpy()
        images.append(image)
        texts.append("\n".join(lines))
    return draw_images(images, texts, ["black"] * len(images))


def labels_of(
    data: QuestionData,
    study: int,
    value: int,
) -> list[str]:
    """The CheXpert labels that have this value in a study."""
    return [name for name, column in zip(CHEXPERT, data.labels, strict=True) if column[study] == value]


def draw_answers(data: QuestionData, predictions: Predictions):
    """A matplotlib figure: nine images, each with its question, the answer given and the true one."""
    given = class_names(predictions, "predicted")
    truth = class_names(predictions, "target")
    images = []
    texts = []
    colors = []
    for k in evenly(len(given), 9):
        item = data[int(predictions["index"][k])]
        images.append(item["image"])
        texts.append(f"{short_question(item)}\nsays: {given[k]}\ntrue: {truth[k]}")
        colors.append("darkgreen" if given[k] == truth[k] else "firebrick")
    return draw_images(images, texts, colors)


def draw_split(data: QuestionData, predictions: Predictions) -> dict:
    """The figures of an evaluation, {name: matplotlib figure}."""
    return {
        f"{data.split}_answers": draw_answers(data, predictions),
        f"{data.split}_curves": draw_curves(data, predictions),
        f"{data.split}_reliability": draw_reliability(data, predictions),
    }


def draw_reliability(data: QuestionData, predictions: Predictions):
    """A matplotlib figure: how often what is given a probability is true, of the answers and of the labels."""
    from matplotlib.figure import Figure

    right = predictions["predicted"] == predictions["target"]
    curves = {"all answers": reliability(given_probability(predictions), right)}
    for number, head in enumerate(HEADS):
        rows = predictions["head"] == number
        if rows.any():
            curves[head] = reliability(given_probability(predictions)[rows], right[rows])
    figure = Figure(figsize=(12.4, 6.2))
    draw_shares(add_square(figure, 0.9, 0.8, 4.8), "probability of the answer given", curves)

    # all labels together: each has few studies
    judged = judge_labels(predictions, data.index.studies)
    scores = np.concatenate([label.scores.numpy() for label in judged.values()])
    truth = np.concatenate([label.truth.numpy() for label in judged.values()])
    curves = {"all labels": reliability(scores, truth)} if len(truth) else {}
    draw_shares(add_square(figure, 7.0, 0.8, 4.8), "probability of a CheXpert label", curves)
    return figure


def draw_shares(axes, title: str, curves: dict) -> None:
    """Shares against probabilities, {name: Bins}; the diagonal is what they should be, points grow with their rows."""
    diagonal = [0, 1]
    axes.plot(diagonal, diagonal, color="grey", linewidth=0.8, linestyle=":")
    for i, (name, bins) in enumerate(curves.items()):
        text = f"{name} (n {bins.count.sum():,})"
        axes.plot(bins.probability, bins.share, color=f"C{i}", label=text, linewidth=2 if i == 0 else 1)
        axes.scatter(bins.probability, bins.share, s=4 + 200 * bins.count / bins.count.sum(), color=f"C{i}")
    axes.set_title(title)
    axes.set_xlabel("probability, mean of a bin")
    axes.set_ylabel("share that is true")
    axes.set_aspect(1)
    if curves:
        axes.legend(loc="upper left", fontsize=9, frameon=False)


def draw_curves(data: QuestionData, predictions: Predictions):
    """A matplotlib figure: ROC curves of the CheXpert labels and the confusion matrix of each head."""
    from matplotlib.figure import Figure

    # left edge, bottom edge and side of each square, inches
    places = {
        "roc": (0.9, 11.6, 4.6),
        "binary": (9.9, 11.6, 4.6),
        "severity": (15.6, 11.6, 4.6),
        "category": (2.3, 2.0, 8.0),
        "region": (12.0, 2.0, 8.0),
    }
    figure = Figure(figsize=(20.3, 16.8))
    for name, (left, bottom, side) in places.items():
        axes = add_square(figure, left, bottom, side)
        if name == "roc":
            draw_roc(axes, data, predictions)
        else:
            draw_confusion(axes, predictions, name)
    return figure


def draw_roc(axes, data: QuestionData, predictions: Predictions) -> None:
    """The ROC curve of each CheXpert label, each study once, with its area and number of studies beside."""
    from torchmetrics.functional.classification import binary_auroc, binary_roc

    labels = judge_labels(predictions, data.index.studies)
    for i, (label, judged) in enumerate(labels.items()):
        if not judged.has_both:
            continue
        false_rate, true_rate, _ = binary_roc(judged.scores, judged.truth)
        area = float(binary_auroc(judged.scores, judged.truth))
        text = f"{label}: {area:.3f} (n {len(judged.truth)})"
        style = "-" if i < 10 else "--"
        axes.plot(false_rate, true_rate, label=text, color=f"C{i % 10}", linestyle=style)

    # what guessing would reach
    diagonal = [0, 1]
    axes.plot(diagonal, diagonal, color="grey", linewidth=0.8, linestyle=":")
    axes.set_title("CheXpert ROC, area, studies")
    axes.set_xlabel("false positive rate")
    axes.set_ylabel("true positive rate")
    axes.set_aspect(1)
    if len(axes.lines) > 1:
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.02, 1),
            fontsize=9,
            borderaxespad=0,
            frameon=False,
        )


def draw_confusion(axes, predictions: Predictions, head: str) -> None:
    """The confusion matrix of a head: colours are shares of a row, numbers are questions."""
    names = HEADS[head]
    rows = predictions["head"] == list(HEADS).index(head)
    matrix = np.zeros((len(names), len(names)), np.int64)
    target = predictions["target"][rows]
    predicted = predictions["predicted"][rows]
    np.add.at(matrix, (target, predicted), 1)
    shares = matrix / matrix.sum(1, keepdims=True).clip(1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)

    # the number of questions in each square
    size = 12 if len(names) < 8 else 8
    if len(names) >= 20:
        size = 6
    for row, column in np.argwhere(matrix).tolist():
        count = int(matrix[row, column])
        color = "white" if shares[row, column] > 0.6 else "black"
        text = str(count) if count < 10_000 else f"{count / 1000:.0f}k"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=color)

    ticks = range(len(names))
    rotation = 90 if len(names) > 8 else 0
    axes.set_title(f"{head}: {rows.sum():,} questions (rows: truth)")
    axes.set_xticks(ticks, names, rotation=rotation, fontsize=8)
    axes.set_yticks(ticks, names, fontsize=8)
