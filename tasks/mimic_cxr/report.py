"""Tables of scores, prediction files and a figure for train_mimic_cxr.py.

The 95 % confidence intervals are clustered by patient.
"""

import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy import ndarray

from tasks.mimic_cxr.answers import CHEXPERT, HEAD_NUMBER, HEADS
from tasks.mimic_cxr.prepare import GROUPING, Prepared
from utils.stats import interval_of_mean, interval_of_resamples, resample_cases, shown

# maximum questions per ablation; maximum training or validation questions for fitting baselines
MOST_ABLATED, MOST_FITTED = 2000, 30_000
# maximum number of classifiers (one per question text) and of principal components of an image baseline
MOST_CLASSIFIERS, COMPONENTS = 100, 64
AGES = [0, 40, 60, 80, 200]

# {column: one value per question}; answer_questions() adds predicted, probability, chexpert and others to COLUMNS
Rows = dict[str, ndarray]
COLUMNS = ("study", "head", "target", "type", "question")


# --- scores -----------------------------------------------------------------------------------------------------------


def aurocs(scores: ndarray, truth: ndarray, counts: ndarray) -> ndarray:
    """Return the AUROC (R, labels) of each label in R bootstrap resamples of S studies.

    scores: (S, labels). truth: (S, labels) with 1, 0 or any other value for unknown. counts: (R, S), how often each
    resample contains each study. The AUROC is NaN if a resample lacks positive or negative studies.
    """
    areas = np.full((len(counts), scores.shape[1]), np.nan)
    for label in range(scores.shape[1]):
        sure = np.isin(truth[:, label], (0, 1))
        if len(np.unique(truth[sure, label])) < 2:
            continue
        order = np.argsort(scores[sure, label], kind="stable")
        _, starts = np.unique(scores[sure, label][order], return_index=True)
        weights, positive = counts[:, sure][:, order], truth[sure, label][order] == 1
        with_it = np.add.reduceat(weights * positive, starts, axis=1)
        without = np.add.reduceat(weights * ~positive, starts, axis=1)
        below = np.cumsum(without, axis=1) - without / 2
        pairs = with_it.sum(1) * without.sum(1)
        area = (with_it * below).sum(1)
        np.divide(area, pairs, out=areas[:, label], where=pairs > 0)
    return areas


def macro(areas: ndarray) -> ndarray:
    """Average AUROCs (R, labels) over the labels, ignoring NaN; return (R,)."""
    return pd.DataFrame(areas).mean(axis=1).to_numpy()


def calibration_error(probability: ndarray, right: ndarray) -> float:
    """Return the expected calibration error with 15 bins of equal width."""
    from torchmetrics.functional.classification import binary_calibration_error

    return float(binary_calibration_error(torch.from_numpy(probability).float(), torch.from_numpy(right).long()))


def score(rows: Rows, labels: ndarray, head_weight: dict, chexpert_weight: float, split: str) -> dict[str, float]:
    right = rows["predicted"] == rows["target"]
    metrics, vqa = {"vqa_accuracy": right.mean()}, 0.0
    for head, number in HEAD_NUMBER.items():
        asked = rows["head"] == number
        if asked.any():
            vqa += head_weight[head] * rows["entropy"][asked].mean()
            metrics[f"vqa_accuracy/{head}"] = right[asked].mean()
    bce = rows["bce"].sum() / max(1.0, rows["known"].sum())
    losses = {"loss": vqa + chexpert_weight * bce, "loss_vqa": vqa, "loss_chexpert": bce}
    studies, first = np.unique(rows["study"], return_index=True)
    area = macro(aurocs(rows["chexpert"][first], labels[studies], np.ones((1, len(studies)))))[0]
    metrics |= {} if np.isnan(area) else {"chexpert_auroc": area}
    return {f"{split}/{name}": float(value) for name, value in (losses | metrics).items()}


# --- baselines --------------------------------------------------------------------------------------------------------


def most_frequent_targets(
    keys: ndarray, heads: ndarray, targets: ndarray, wanted: ndarray, wanted_heads: ndarray
) -> ndarray:
    """Return the most frequent target class (M,) for each wanted (key, answer head) pair; -1 for an unknown pair.

    keys, heads, targets: (N,), one entry per question. A key is an integer, such as the question type.
    """
    codes, counts = np.unique((keys.astype(np.int64) * 4 + heads) * 64 + targets, return_counts=True)
    codes = codes[np.lexsort((counts, codes // 64))]
    last = np.flatnonzero(np.diff(codes // 64, append=-1))
    keys, best = codes[last] // 64, codes[last] % 64
    wanted = wanted.astype(np.int64) * 4 + wanted_heads
    nearest = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[nearest] == wanted, best[nearest], -1)


def answers_without_image(train: Rows, rows: Rows) -> dict[str, ndarray]:
    """Return the most frequent training answer by question type ("majority") and by text ("question_only")."""
    majority, question = (
        most_frequent_targets(train[name], train["head"], train["target"], rows[name], rows["head"])
        for name in ("type", "question")
    )
    return {"majority": majority, "question_only": np.where(question < 0, majority, question)}


def answers_from_labels(train: Rows, rows: Rows, labels: ndarray, fallback: ndarray) -> ndarray:
    """Predict each answer by looking up (question text, value of a CheXpert label) in a table of the most frequent
    training answers.

    For each question text, the label that best predicts its training answers is used. The table is built with the true
    labels (studies, 14) and read with the predicted labels. fallback: (N,) answers for questions that are not in the
    table.
    """
    names, text = np.unique(train["question"], return_inverse=True)
    known, target, heads = labels[train["study"]], train["target"], train["head"]
    alone = most_frequent_targets(train["question"], heads, target, train["question"], heads)
    best, answers = np.full(len(names), -1.0), fallback.copy()
    for label in range(len(CHEXPERT)):
        sure = np.isin(known[:, label], (0, 1))
        if not sure.any():
            continue
        keys = train["question"].astype(np.int64) * 2 + (known[:, label] == 1)
        table = keys[sure], heads[sure], target[sure]
        right = np.bincount(text, np.where(sure, most_frequent_targets(*table, keys, heads), alone) == target)
        wanted = rows["question"].astype(np.int64) * 2 + (rows["chexpert"][:, label] > 0.5)
        guess = most_frequent_targets(*table, wanted, rows["head"])
        better = np.isin(rows["question"], names[right > best]) & (guess >= 0)
        answers, best = np.where(better, guess, answers), np.maximum(best, right)
    return answers


def small_pixels(image: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool2d(image, 32).flatten(1)


def image_numbers(image: torch.Tensor) -> torch.Tensor:
    """Return features (N, 60) of images (N, 1, S, S) in [0, 1]: means and SDs in a 4 x 4 grid, and histograms."""
    mean = F.adaptive_avg_pool2d(image, 4)
    deviation = (F.adaptive_avg_pool2d(image.square(), 4) - mean.square()).clamp_min(0).sqrt()
    gradient = torch.hypot(image.diff(dim=2)[..., :-1], image.diff(dim=3)[:, :, :-1])
    histograms = []
    for values, bins, largest in ((image, 16, 1.0), (gradient, 12, 0.5)):
        bin_of = (values.flatten(1) * (bins / largest)).long().clamp_max(bins - 1)
        share = torch.full(bin_of.shape, 1 / bin_of.shape[1])
        histograms.append(torch.zeros(len(image), bins).scatter_add_(1, bin_of, share))
    return torch.cat([mean.flatten(1), deviation.flatten(1), *histograms], 1)


IMAGE_FEATURES = {"pixels": small_pixels, "numbers": image_numbers}


def components(features: ndarray, fitted: int) -> ndarray:
    """Standardize features (N, D) and project them onto whitened principal components.

    fitted: number of leading rows used for fitting.
    """
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler

    x = StandardScaler().fit(features[:fitted]).transform(features.astype(float))
    count = min(COMPONENTS, fitted, x.shape[1])
    pca = PCA(count, whiten=True, svd_solver="covariance_eigh").fit(x[:fitted])
    # drop components without variance, because whitening would amplify their rounding errors; keep at least one
    return pca.transform(x)[:, : max(1, (pca.explained_variance_ > 1e-6).sum())]


def fit_logistic(x: ndarray, target: ndarray, penalty: float):
    """Fit a logistic regression; `penalty` is the weight of the L2 penalty relative to the mean loss."""
    from sklearn.linear_model import LogisticRegression

    # tight tolerance, so that rounding differences between CPU models do not flip predicted answers
    return LogisticRegression(C=1 / (penalty * len(x)), tol=1e-8, max_iter=1000).fit(x, target)


def answers_from_features(
    features: ndarray, labels: ndarray, train: Rows, val: Rows, rows: Rows, fallback: ndarray
) -> tuple[ndarray, ndarray]:
    """Predict answers and CheXpert labels by logistic regression on principal components of image features.

    features: one row per distinct study of `train`, then of `val`, then of `rows`. labels: (studies, 14) true labels.
    fallback: (N,) answers for rare question texts. Returns (answers (N,), CheXpert scores (S, 14) of the distinct
    studies in `rows`).
    """
    studies = [np.unique(part["study"]) for part in (train, val, rows)]
    x = components(features, len(studies[0]))
    row_of = np.zeros(len(labels), int)
    row_of[np.concatenate(studies)] = np.arange(len(x))
    judged = {name: np.concatenate([val[name], rows[name]]) for name in ("study", "question")}
    texts, counts = np.unique(rows["question"], return_counts=True)
    texts = texts[np.argsort(-counts, kind="stable")][:MOST_CLASSIFIERS]
    best_labels, best_answers = -1.0, -1.0
    for penalty in (0.01, 0.001, 0.1):
        found = np.zeros((len(x), len(CHEXPERT)))
        for label, truth in enumerate(labels[studies[0]].T):
            known = np.flatnonzero(np.isin(truth, (0, 1)))
            if len(np.unique(truth[known])) > 1:
                found[:, label] = fit_logistic(x[known], truth[known], penalty).decision_function(x)
        on_val, on_test = (found[row_of[part]] for part in studies[1:])
        area = np.nan_to_num(macro(aurocs(on_val, labels[studies[1]], np.ones((1, len(on_val)))))[0])
        if area > best_labels:
            best_labels, scores = area, on_test

        guesses = np.append(np.full(len(val["study"]), -1), fallback)
        for text in texts:
            fitted, asked = (np.flatnonzero(part["question"] == text) for part in (train, judged))
            target = train["target"][fitted]
            if len(np.unique(target)) > 1:
                model = fit_logistic(x[row_of[train["study"][fitted]]], target, penalty)
                guesses[asked] = model.predict(x[row_of[judged["study"][asked]]])
        on_val, on_test = np.split(guesses, [len(val["study"])])
        accuracy = (on_val == val["target"]).mean() if len(on_val) else 0.0
        if accuracy > best_answers:
            best_answers, answers = accuracy, on_test
    return answers, scores


# --- tables -----------------------------------------------------------------------------------------------------------


class SplitResults:
    def __init__(self, split: str, rows: Rows, data: Prepared):
        patients = data.studies["patient"].to_numpy()
        self.split, self.rows, self.data = split, rows, data
        self.right, self.patients = (rows["predicted"] == rows["target"]).astype(float), patients[rows["study"]]
        self.studies, first = np.unique(rows["study"], return_index=True)
        self.truth, self.probability = data.labels[self.studies], rows["chexpert"][first]
        # (1 + 1000, studies): how often each study occurs in the data, then in each bootstrap resample of the patients
        once = np.ones(len(self.studies))
        self.counts = np.vstack([once, resample_cases(patients[self.studies], once)])
        self.areas = aurocs(self.probability, self.truth, self.counts)


def print_tables(
    results: SplitResults, train: Rows, fitted: Rows, val: Rows, features: dict[str, ndarray], ablations: dict
) -> dict[str, float]:
    """Print and return the scores of the network, the baselines and the ablations.

    train: all training questions. fitted: those used to fit the label and image baselines. val: validation questions
    that select the image baselines' penalties. ablations: {ablation: (question indices, answers)}.
    """
    answers, label_scores = {}, {}
    if len(train["target"]):
        answers = answers_without_image(train, results.rows)
        fallback, labels = answers["question_only"], results.data.labels
        answers["label_lookup"] = answers_from_labels(fitted, results.rows, labels, fallback)
        for name, values in features.items():
            answers[name], label_scores[name] = answers_from_features(
                values, labels, fitted, val, results.rows, fallback
            )
    metrics = table_of_answers(results, answers, ablations) | table_of_findings(results, label_scores)
    metrics |= table_of_labels(results) | table_of_groups(results)
    return {f"{results.split}/{name}": value for name, value in metrics.items() if np.isfinite(value)}


def table_of_answers(results: SplitResults, answers: dict[str, ndarray], ablations: dict) -> dict[str, float]:
    right, patients = results.right, results.patients
    metrics = {}
    table = {"network": {"n": len(right), "accuracy": add_mean(metrics, "vqa_accuracy", right, patients)}}
    others = {
        f"ablation/{name}": (some, rows["predicted"] == rows["target"]) for name, (some, rows) in ablations.items()
    }
    others |= {f"rival/{name}": (slice(None), guess == results.rows["target"]) for name, guess in answers.items()}
    for name, (some, hits) in others.items():
        key = f"{name}/vqa_accuracy"
        table[name.rpartition("/")[2].replace("_", " ")] = {
            "n": len(hits),
            "accuracy": add_mean(metrics, key, hits.astype(float), patients[some]),
            "network above by": add_mean(metrics, f"{key}_gain", right[some] - hits, patients[some], "+"),
        }
    print_table(f"{results.split}: answers ({len(np.unique(patients))} patients)", table)
    return metrics


def table_of_findings(results: SplitResults, label_scores: dict[str, ndarray]) -> dict[str, float]:
    metrics, areas = {}, macro(results.areas)
    table = {"network": {"AUROC": add_area(metrics, "chexpert_auroc", areas)}}
    for name, scores in label_scores.items():
        key, others = f"rival/{name}/chexpert_auroc", macro(aurocs(scores, results.truth, results.counts))
        text = add_area(metrics, key, others)
        table[name] = {"AUROC": text, "network above by": add_area(metrics, f"{key}_gain", areas - others, "+")}
    print_table(f"{results.split}: CheXpert, mean of the labels ({len(results.studies)} studies)", table)
    return metrics


def table_of_labels(results: SplitResults) -> dict[str, float]:
    metrics, table = {}, {}
    for number, label in enumerate(CHEXPERT):
        if np.isfinite(results.areas[0, number]):
            sure = np.isin(results.truth[:, number], (0, 1))
            truth = results.truth[sure, number]
            error = calibration_error(results.probability[sure, number], truth)
            metrics[f"chexpert_ece/{label}"] = error
            text = add_area(metrics, f"chexpert_auroc/{label}", results.areas[:, number])
            table[label] = {"n": len(truth), "present": int(truth.sum()), "AUROC": text, "ECE": f"{error:.3f}"}
    print_table(f"{results.split}: labels", table)
    return metrics


def table_of_groups(results: SplitResults) -> dict[str, float]:
    rows, right = results.rows, results.right
    studies = results.data.studies.iloc[rows["study"]]
    age = pd.cut(studies["age"], AGES, right=False).astype(str).replace("nan", None)
    groups = {head: rows["head"] == number for head, number in HEAD_NUMBER.items()}
    for name, values in studies[list(GROUPING)].assign(age=age).items():
        groups |= {f"{name} {value}": (values == value).to_numpy() for value in sorted(values.dropna().unique())}

    confidence = rows["probability"].max(1)
    error = calibration_error(confidence, right)
    metrics, table = {"vqa_ece": error}, {}
    for name, some in groups.items():
        if not some.any():
            continue
        key = f"vqa_accuracy/{name}" if name in HEADS else f"group/{name}/vqa_accuracy"
        table[name] = {
            "n": some.sum(),
            "accuracy": add_mean(metrics, key, right[some], results.patients[some]),
            "ECE": f"{calibration_error(confidence[some], right[some]):.3f}",
        }
        if name not in HEADS:
            inside = np.isin(results.studies, rows["study"][some])
            areas = macro(aurocs(results.probability[inside], results.truth[inside], results.counts[:, inside]))
            key = f"group/{name}/chexpert_auroc"
            table[name]["AUROC"] = "-" if np.isnan(areas[0]) else add_area(metrics, key, areas)
    print_table(f"{results.split}: answers by head and group (all: ECE {error:.3f})", table)
    return metrics


def add_mean(metrics: dict, key: str, values: ndarray, patients: ndarray, sign: str = "") -> str:
    """Add the mean of `values` and its confidence interval to `metrics`; return both as text.

    sign: "+" if the values are differences between two models.
    """
    return add_score(metrics, key, values.mean(), interval_of_mean(values, patients, bounded=not sign), sign)


def add_area(metrics: dict, key: str, areas: ndarray, sign: str = "") -> str:
    """Like add_mean(), but for an AUROC or a difference of two AUROCs.

    areas: the value on the full data, followed by one value per bootstrap resample.
    """
    return add_score(metrics, key, areas[0], interval_of_resamples(areas[1:]), sign)


def add_score(metrics: dict, key: str, value: float, interval: tuple[float, float], sign: str) -> str:
    low, high = interval
    metrics |= {key: float(value), f"{key}_low": low, f"{key}_high": high}
    return shown(value, low, high, sign)


def print_table(title: str, table: dict[str, dict]) -> None:
    print(f"\n{title}\n{pd.DataFrame.from_dict(table, orient='index').to_string(na_rep='-')}", flush=True)


# --- files and figure -------------------------------------------------------------------------------------------------


def trained_labels(data: Prepared) -> list[str]:
    labels = data.labels[(data.studies["split"] == "train").to_numpy()]
    return [label for label, column in zip(CHEXPERT, labels.T, strict=True) if {0, 1} <= set(column)]


def save_predictions(path: Path, rows: Rows, data: Prepared) -> None:
    studies, names = data.studies.iloc[rows["study"]], list(HEADS)
    classes = [HEADS[names[head]] for head in rows["head"]]
    frame = pd.DataFrame({
        "patient": studies["patient"].to_numpy(),
        "image": studies["image"].to_numpy(),
        "question": data.texts.take(rows["question"].tolist()).to_pylist(),
        "type": [data.types[kind] for kind in rows["type"]],
        "head": [names[head] for head in rows["head"]],
        "truth": [known[target] for known, target in zip(classes, rows["target"], strict=True)],
        "answer": [known[int(predicted)] for known, predicted in zip(classes, rows["predicted"], strict=True)],
        "probability": [p[: len(known)].tolist() for known, p in zip(classes, rows["probability"], strict=True)],
    })  # fmt: skip
    for label in trained_labels(data):
        frame[label] = rows["chexpert"][:, CHEXPERT.index(label)].astype(np.float32)
    frame.to_parquet(path)
    print(f"written: {path}", flush=True)


def write_answers(folder: Path, asked: list[tuple[Path, str]], found: dict[int, tuple], labels: list[str]) -> None:
    """Write predictions.csv and print the first nine answers.

    found: {index in `asked`: (answer head, class probabilities, probabilities of the 14 CheXpert labels)}.
    """
    lines = []
    for index, (head, probability, findings) in found.items():
        image, question = asked[index]
        best = int(probability.argmax())
        answer, certainty = HEADS[head][best], round(float(probability[best]), 4)
        line = {"image": image, "question": question, "head": head, "answer": answer, "probability": certainty}
        lines.append(line | {label: round(float(findings[CHEXPERT.index(label)]), 4) for label in labels})
    for line in lines[:9]:
        print(f"{line['image']}: {line['question']} {line['answer']} ({line['probability']:.2f}, head {line['head']})")
        likely = sorted(labels, key=line.get, reverse=True)[:4]
        print("    findings: " + ", ".join(f"{label} {line[label]:.2f}" for label in likely))
    path = folder / "predictions.csv"
    pd.DataFrame(lines).to_csv(path, index=False)
    print(f"{len(lines)} of {len(asked)} questions answered: {path}", flush=True)


def draw(rows: Rows, data: Prepared):
    from matplotlib.figure import Figure
    from torchmetrics.functional.classification import binary_roc

    right = rows["predicted"] == rows["target"]
    examples = [
        some[np.linspace(0, len(some) - 1, 4).astype(int)] for some in map(np.flatnonzero, (~right, right)) if len(some)
    ]
    figure = Figure(figsize=(15, 8), layout="constrained")
    grid = figure.subplots(2, 5)
    for axes in grid[:, :4].ravel():
        axes.set(xticks=[], yticks=[], frame_on=False)
    for axes, row in zip(grid[:, :4].ravel(), np.concatenate(examples), strict=False):
        classes = HEADS[list(HEADS)[rows["head"][row]]]
        predicted, target = int(rows["predicted"][row]), rows["target"][row]
        question = textwrap.fill(data.texts[int(rows["question"][row])].as_py(), 34)
        text = f"{question}\n{classes[predicted]} ({rows['probability'][row, predicted]:.2f})"
        text += "" if right[row] else f"; true: {classes[target]}"
        axes.imshow(data.images[rows["study"][row]], cmap="gray")
        axes.set_title(text, fontsize=9, loc="left", color="darkgreen" if right[row] else "darkred", parse_math=False)
    top, bottom = grid[:, 4]
    for axes in (top, bottom):
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        axes.set_box_aspect(1)
    studies, first = np.unique(rows["study"], return_index=True)
    for number, label in enumerate(CHEXPERT):
        truth, scores = data.labels[studies, number], rows["chexpert"][first, number]
        sure = np.isin(truth, (0, 1))
        if len(np.unique(truth[sure])) == 2:
            x, y, _ = binary_roc(torch.from_numpy(scores[sure]), torch.from_numpy(truth[sure]).long())
            top.plot(x, y, label=label)
    top.set(title="labels", xlabel="1 - specificity", ylabel="sensitivity")
    if len(top.lines) > 1:
        top.legend(fontsize=6)
    confidence = rows["probability"].max(1)
    bins = [part for part in np.array_split(np.argsort(confidence), 10) if len(part)]
    bottom.plot([confidence[part].mean() for part in bins], [right[part].mean() for part in bins], "o-")
    bottom.set(title="answers, tenths by confidence", xlabel="probability of the answer", ylabel="share that is right")
    return figure
