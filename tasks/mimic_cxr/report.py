"""Evaluation of a MIMIC-CXR run: scores with intervals by patient, baselines, ablations, files, and a figure."""

import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy import ndarray

from tasks.mimic_cxr.answers import CHEXPERT, HEADS
from tasks.mimic_cxr.prepare import Prepared
from utils.stats import interval_of_mean, interval_of_resamples, resample_cases, shown

# maximum number of questions in an ablation, and of questions whose images the baselines are fitted to
MOST_ABLATED, MOST_FITTED = 2000, 30_000
# in baselines that see the image: maximum number of questions with their own classifier, and of components
MOST_CLASSIFIERS, COMPONENTS = 100, 64
AGES = [0, 40, 60, 80, 200]

# {column: one value per question}: COLUMNS and the model's answers, see answer_questions() in train_mimic_cxr.py
Rows = dict[str, ndarray]
COLUMNS = ("study", "head", "target", "type", "question")


# --- scores -----------------------------------------------------------------------------------------------------------


def aurocs(scores: ndarray, truth: ndarray, counts: ndarray) -> ndarray:
    """Areas under the ROC curves (R, labels) of scores (S, labels); resample r contains study s counts[r, s] times.

    truth: 1, 0, or any other value for unknown. Ties count half. NaN if a class is absent.
    """
    areas = np.full((len(counts), scores.shape[1]), np.nan)
    for label in range(scores.shape[1]):
        sure = np.isin(truth[:, label], (0, 1))
        if len(np.unique(truth[sure, label])) < 2:
            continue
        values, place = np.unique(scores[sure, label], return_inverse=True)
        order = np.argsort(place, kind="stable")
        starts = np.searchsorted(place[order], np.arange(len(values)))
        weights, positive = counts[:, sure][:, order], truth[sure, label][order] == 1
        with_it = np.add.reduceat(weights * positive, starts, axis=1)
        without = np.add.reduceat(weights * ~positive, starts, axis=1)
        below = np.cumsum(without, axis=1) - without / 2
        pairs = with_it.sum(1) * without.sum(1)
        area = (with_it * below).sum(1)
        areas[:, label] = np.divide(area, pairs, out=np.full(len(counts), np.nan), where=pairs > 0)
    return areas


def macro(areas: ndarray) -> ndarray:
    """Average areas (R, labels) over the labels, ignoring NaN."""
    return pd.DataFrame(areas).mean(axis=1).to_numpy()


def calibration_error(probability: ndarray, right: ndarray) -> float:
    """Expected calibration error in 15 bins of equal width."""
    from torchmetrics.functional.classification import binary_calibration_error

    return float(binary_calibration_error(torch.from_numpy(probability).float(), torch.from_numpy(right).long()))


def score(rows: Rows, labels: ndarray, head_weight: dict, chexpert_weight: float, split: str) -> dict[str, float]:
    """Return a split's training loss, its accuracy overall and by head, and the macro AUROC of the labels."""
    right = rows["given"] == rows["target"]
    metrics, vqa = {"vqa_accuracy": right.mean()}, 0.0
    for place, head in enumerate(HEADS):
        asked = rows["head"] == place
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


def look_up(keys: ndarray, heads: ndarray, targets: ndarray, wanted: ndarray, wanted_heads: ndarray) -> ndarray:
    """Return the most frequent target of each wanted (key, head) pair, or -1 for a pair without a target.

    Processes a million rows at a time, because there may be 31 million.
    """
    pairs = counts = np.zeros(0, np.int64)
    for begin in range(0, len(keys), 2**20):
        part = slice(begin, begin + 2**20)
        more, times = np.unique(
            (keys[part].astype(np.int64) * 4 + heads[part]) * 64 + targets[part], return_counts=True
        )
        pairs, place = np.unique(np.append(pairs, more), return_inverse=True)
        counts = np.bincount(place, np.append(counts, times))
    pairs = pairs[np.lexsort((counts, pairs // 64))]
    last = np.flatnonzero(np.diff(pairs // 64, append=-1))
    keys, best = pairs[last] // 64, pairs[last] % 64
    wanted = wanted.astype(np.int64) * 4 + wanted_heads
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, best[place], -1)


def answers_without_image(train: Rows, rows: Rows) -> dict[str, ndarray]:
    """Answer with the most frequent training answer to the question's type, or to its exact text if that occurs."""
    majority, question = (
        look_up(train[name], train["head"], train["target"], rows[name], rows["head"]) for name in ("type", "question")
    )
    return {"majority": majority, "question_only": np.where(question < 0, majority, question)}


def answers_from_labels(train: Rows, rows: Rows, labels: ndarray, fallback: ndarray) -> ndarray:
    """Answer each question from the CheXpert label that best predicts its answer in training.

    The training rows use the true labels (studies, 14), `rows` the predicted labels. fallback (N,): answers to
    questions that no label can answer.
    """
    names, text = np.unique(train["question"], return_inverse=True)
    known, target, heads = labels[train["study"]], train["target"], train["head"]
    alone = look_up(train["question"], heads, target, train["question"], heads)
    best, answers = np.full(len(names), -1.0), fallback.copy()
    for label in range(len(CHEXPERT)):
        sure = np.isin(known[:, label], (0, 1))
        if not sure.any():
            continue
        keys = train["question"].astype(np.int64) * 2 + (known[:, label] == 1)
        table = keys[sure], heads[sure], target[sure]
        right = np.bincount(text, np.where(sure, look_up(*table, keys, heads), alone) == target)
        wanted = rows["question"].astype(np.int64) * 2 + (rows["chexpert"][:, label] > 0.5)
        guess = look_up(*table, wanted, rows["head"])
        better = np.isin(rows["question"], names[right > best]) & (guess >= 0)
        answers, best = np.where(better, guess, answers), np.maximum(best, right)
    return answers


def small_pixels(image: torch.Tensor) -> torch.Tensor:
    """Downsample images (N, 1, S, S) to 32 x 32 and flatten them to (N, 1024)."""
    return F.adaptive_avg_pool2d(image, 32).flatten(1)


def image_numbers(image: torch.Tensor) -> torch.Tensor:
    """Features (N, 60) of images (N, 1, S, S) in 0..1: 4 x 4 means and SDs, histograms of gray values and gradients."""
    mean = F.adaptive_avg_pool2d(image, 4)
    deviation = (F.adaptive_avg_pool2d(image.square(), 4) - mean.square()).clamp_min(0).sqrt()
    gradient = torch.hypot(image.diff(dim=2)[..., :-1], image.diff(dim=3)[:, :, :-1])
    histograms = []
    for values, bins, largest in ((image, 16, 1.0), (gradient, 12, 0.5)):
        place = (values.flatten(1) * (bins / largest)).long().clamp_max(bins - 1)
        share = torch.full(place.shape, 1 / place.shape[1])
        histograms.append(torch.zeros(len(image), bins).scatter_add_(1, place, share))
    return torch.cat([mean.flatten(1), deviation.flatten(1), *histograms], 1)


# {name of the baseline: function from images (N, 1, S, S) in 0..1 to features}
LOOKS = {"pixels": small_pixels, "numbers": image_numbers}


def components(features: ndarray, fitted: int) -> ndarray:
    """Whitened principal components (N, 64) of standardized features (N, D), fitted to the first `fitted` rows."""
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler

    x = StandardScaler().fit(features[:fitted]).transform(features.astype(float))
    count = min(COMPONENTS, fitted, x.shape[1])
    pca = PCA(count, whiten=True, svd_solver="covariance_eigh").fit(x[:fitted])
    # Drop components without variance, where whitening would amplify rounding errors; they come from linearly dependent
    # features, such as the shares of a histogram. Keep at least one, because scikit-learn cannot fit zero features.
    return pca.transform(x)[:, : max(1, (pca.explained_variance_ > 1e-6).sum())]


def fit_logistic(x: ndarray, target: ndarray, penalty: float):
    """Fit a logistic regression whose L2 penalty is relative to the mean loss, independent of the number of rows."""
    from sklearn.linear_model import LogisticRegression

    # converge tightly, so that no answer depends on the processor
    return LogisticRegression(C=1 / (penalty * len(x)), tol=1e-8, max_iter=1000).fit(x, target)


def classical(features: ndarray, labels: ndarray, train: Rows, val: Rows, rows: Rows, start: ndarray) -> tuple:
    """Return (answers (N,), label scores (S, 14)) of logistic regressions on principal components of image features.

    Fits one regression per label and per frequent question to the training set; the validation set selects one penalty
    for the labels and one for the questions. rows: questions to answer. features: the studies of train, val and rows,
    concatenated. labels: (studies, 14). start: answers to the less frequent questions.
    """
    images = [np.unique(part["study"]) for part in (train, val, rows)]
    x = components(features, len(images[0]))
    # each study's row in x
    place = np.zeros(len(labels), int)
    place[np.concatenate(images)] = np.arange(len(x))
    judged = {name: np.concatenate([val[name], rows[name]]) for name in ("study", "question")}
    texts, counts = np.unique(rows["question"], return_counts=True)
    texts = texts[np.argsort(-counts, kind="stable")][:MOST_CLASSIFIERS]
    best_labels, best_answers = -1.0, -1.0
    for penalty in (0.01, 0.001, 0.1):
        found = np.zeros((len(x), len(CHEXPERT)))
        for label, truth in enumerate(labels[images[0]].T):
            known = np.flatnonzero(np.isin(truth, (0, 1)))
            if len(np.unique(truth[known])) > 1:
                found[:, label] = fit_logistic(x[known], truth[known], penalty).decision_function(x)
        on_val, on_test = (found[place[studies]] for studies in images[1:])
        area = np.nan_to_num(macro(aurocs(on_val, labels[images[1]], np.ones((1, len(on_val)))))[0])
        if area > best_labels:
            best_labels, scores = area, on_test

        guesses = np.append(np.full(len(val["study"]), -1), start)
        for text in texts:
            fitted, asked = (np.flatnonzero(part["question"] == text) for part in (train, judged))
            target = train["target"][fitted]
            if len(np.unique(target)) > 1:
                model = fit_logistic(x[place[train["study"][fitted]]], target, penalty)
                guesses[asked] = model.predict(x[place[judged["study"][asked]]])
        on_val, on_test = np.split(guesses, [len(val["study"])])
        accuracy = (on_val == val["target"]).mean() if len(on_val) else 0.0
        if accuracy > best_answers:
            best_answers, answers = accuracy, on_test
    return answers, scores


# --- tables -----------------------------------------------------------------------------------------------------------


class SplitResults:
    """A split's questions with the network's answers, its distinct studies, and resamples of its patients."""

    def __init__(self, split: str, rows: Rows, data: Prepared):
        patients = data.studies["patient"].to_numpy()
        self.split, self.rows, self.data = split, rows, data
        self.right, self.case = (rows["given"] == rows["target"]).astype(float), patients[rows["study"]]
        self.studies, first = np.unique(rows["study"], return_index=True)
        self.truth, self.probability = data.labels[self.studies], rows["chexpert"][first]
        # how often each study occurs in the data (row 0) and in each resample of the patients
        whole = np.ones(len(self.studies))
        self.counts = np.vstack([whole, resample_cases(patients[self.studies], whole)])
        # AUROC of each label, (1 + 1000, 14)
        self.areas = aurocs(self.probability, self.truth, self.counts)


def print_tables(
    own: SplitResults, asked: Rows, fitted: dict[str, Rows], features: dict[str, ndarray], ablations: dict
) -> dict[str, float]:
    """Rank 0: print the scores of the network, its baselines and its ablations; return them as {name: value}.

    asked: all training questions; if there are none, there are no baselines. fitted: {"train": ..., "val": ...},
    questions whose images the baselines see. features: the studies of train, val and the split, concatenated.
    ablations: {name: (indices of the questions, their Rows)}.
    """
    guesses, seeing = {}, {}
    if len(asked["target"]):
        guesses = answers_without_image(asked, own.rows)
        start = guesses["question_only"]
        guesses["label_lookup"] = answers_from_labels(fitted["train"], own.rows, own.data.labels, start)
        for name, values in features.items():
            parts = fitted["train"], fitted["val"], own.rows
            guesses[name], seeing[name] = classical(values, own.data.labels, *parts, start)
    metrics = table_of_answers(own, guesses, ablations) | table_of_findings(own, seeing)
    metrics |= table_of_labels(own) | table_of_groups(own)
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def table_of_answers(own: SplitResults, guesses: dict[str, ndarray], ablations: dict) -> dict[str, float]:
    """Accuracy of the network, its ablations and the baselines, with the network's lead on the same questions."""
    metrics, key = {}, f"{own.split}/vqa_accuracy"
    table = {"network": {"n": len(own.right), "accuracy": enter_mean(metrics, key, own.right, own.case)}}
    others = {f"ablation/{name}": (places, of["given"] == of["target"]) for name, (places, of) in ablations.items()}
    others |= {f"rival/{name}": (slice(None), guess == own.rows["target"]) for name, guess in guesses.items()}
    for name, (places, hits) in others.items():
        key, case = f"{own.split}/{name}/vqa_accuracy", own.case[places]
        table[name.rpartition("/")[2].replace("_", " ")] = {
            "n": len(hits),
            "accuracy": enter_mean(metrics, key, hits.astype(float), case),
            "network above by": enter_mean(metrics, f"{key}_gain", own.right[places] - hits, case, "+"),
        }
    show(f"{own.split}: answers ({len(np.unique(own.case))} patients)", table)
    return metrics


def table_of_findings(own: SplitResults, seeing: dict[str, ndarray]) -> dict[str, float]:
    """Mean AUROC of the labels, with the network's lead over each baseline in the same resamples."""
    metrics, area = {}, macro(own.areas)
    table = {"network": {"AUROC": enter_area(metrics, f"{own.split}/chexpert_auroc", area)}}
    for name, scores in seeing.items():
        key, theirs = f"{own.split}/rival/{name}/chexpert_auroc", macro(aurocs(scores, own.truth, own.counts))
        text = enter_area(metrics, key, theirs)
        table[name] = {"AUROC": text, "network above by": enter_area(metrics, f"{key}_gain", area - theirs, "+")}
    show(f"{own.split}: CheXpert, mean of the labels ({len(own.studies)} studies)", table)
    return metrics


def table_of_labels(own: SplitResults) -> dict[str, float]:
    """AUROC and calibration of each label that is present in some studies and absent in others."""
    metrics, table = {}, {}
    for place, label in enumerate(CHEXPERT):
        if np.isfinite(own.areas[0, place]):
            sure = np.isin(own.truth[:, place], (0, 1))
            truth = own.truth[sure, place]
            error = calibration_error(own.probability[sure, place], truth)
            metrics[f"{own.split}/chexpert_ece/{label}"] = error
            text = enter_area(metrics, f"{own.split}/chexpert_auroc/{label}", own.areas[:, place])
            table[label] = {"n": len(truth), "present": int(truth.sum()), "AUROC": text, "ECE": f"{error:.3f}"}
    show(f"{own.split}: labels", table)
    return metrics


def table_of_groups(own: SplitResults) -> dict[str, float]:
    """Accuracy and calibration by head and by group (view, sex, age), and the AUROC by group."""
    split, studies = own.split, own.data.studies.iloc[own.rows["study"]]
    age = pd.cut(studies["age"], AGES, right=False).astype(str).replace("nan", None)
    groups = {head: own.rows["head"] == place for place, head in enumerate(HEADS)}
    for name, values in {"view": studies["view"], "sex": studies["sex"], "age": age}.items():
        groups |= {f"{name} {value}": (values == value).to_numpy() for value in sorted(values.dropna().unique())}

    confidence = own.rows["probability"].max(1)
    error = calibration_error(confidence, own.right)
    metrics, table = {f"{split}/vqa_ece": error}, {}
    for name, some in groups.items():
        if not some.any():
            continue
        key = f"{split}/vqa_accuracy/{name}" if name in HEADS else f"{split}/group/{name}/vqa_accuracy"
        table[name] = {
            "n": some.sum(),
            "accuracy": enter_mean(metrics, key, own.right[some], own.case[some]),
            "ECE": f"{calibration_error(confidence[some], own.right[some]):.3f}",
        }
        if name not in HEADS:
            inside = np.isin(own.studies, own.rows["study"][some])
            area = macro(aurocs(own.probability[inside], own.truth[inside], own.counts[:, inside]))
            key = f"{split}/group/{name}/chexpert_auroc"
            table[name]["AUROC"] = "-" if np.isnan(area[0]) else enter_area(metrics, key, area)
    show(f"{split}: answers by head and group (all: ECE {error:.3f})", table)
    return metrics


def enter_mean(metrics: dict, key: str, values: ndarray, case: ndarray, sign: str = "") -> str:
    """Add a mean and its interval by patient to the metrics; return both as text. sign: "+" for a lead."""
    return enter(metrics, key, values.mean(), interval_of_mean(values, case, bounded=not sign), sign)


def enter_area(metrics: dict, key: str, areas: ndarray, sign: str = "") -> str:
    """Like enter_mean(), for AUROCs or leads; areas[0] is from the data, the others from the resamples."""
    return enter(metrics, key, areas[0], interval_of_resamples(areas[1:]), sign)


def enter(metrics: dict, key: str, value: float, interval: tuple[float, float], sign: str) -> str:
    low, high = interval
    metrics |= {key: float(value), f"{key}_low": low, f"{key}_high": high}
    return shown(value, low, high, sign)


def show(title: str, table: dict[str, dict]) -> None:
    print(f"\n{title}\n{pd.DataFrame.from_dict(table, orient='index').to_string(na_rep='-')}", flush=True)


# --- files and figure -------------------------------------------------------------------------------------------------


def trained_labels(data: Prepared) -> list[str]:
    """Return the CheXpert labels that can be learned: present in some training studies and absent in others."""
    labels = data.labels[(data.studies["split"] == "train").to_numpy()]
    return [label for label, column in zip(CHEXPERT, labels.T, strict=True) if {0, 1} <= set(column)]


def save_predictions(path: Path, rows: Rows, data: Prepared) -> None:
    """Write one row per question: patient, image, question, truth, answer, and class and label probabilities."""
    studies, names = data.studies.iloc[rows["study"]], list(HEADS)
    heads = [names[head] for head in rows["head"]]
    frame = pd.DataFrame({
        "patient": studies["patient"].to_numpy(),
        "image": studies["image"].to_numpy(),
        "question": data.texts.take(rows["question"].tolist()).to_pylist(),
        "type": [data.types[kind] for kind in rows["type"]],
        "head": heads,
        "truth": [HEADS[head][target] for head, target in zip(heads, rows["target"], strict=True)],
        "answer": [HEADS[head][int(given)] for head, given in zip(heads, rows["given"], strict=True)],
        "probability": [p[: len(HEADS[head])].tolist() for head, p in zip(heads, rows["probability"], strict=True)],
    })  # fmt: skip
    for label in trained_labels(data):
        frame[label] = rows["chexpert"][:, CHEXPERT.index(label)].astype(np.float32)
    frame.to_parquet(path)
    print(f"written: {path}", flush=True)


def write_answers(folder: Path, asked: list[tuple[Path, str]], found: dict[int, tuple], labels: list[str]) -> None:
    """Rank 0: write predictions.csv and print the first answers with their likeliest findings."""
    lines = []
    for place, (file, question) in enumerate(asked):
        if place not in found:
            continue
        head, probability, findings = found[place]
        best = int(probability.argmax())
        line = {"image": file, "question": question, "head": head, "answer": HEADS[head][best]}
        line |= {"probability": round(float(probability[best]), 4)}
        lines.append(line | {label: round(float(findings[CHEXPERT.index(label)]), 4) for label in labels})
    for line in lines[:9]:
        print(f"{line['image']}: {line['question']} {line['answer']} ({line['probability']:.2f}, head {line['head']})")
        likely = sorted(labels, key=line.get, reverse=True)[:4]
        print("    findings: " + ", ".join(f"{label} {line[label]:.2f}" for label in likely))
    path = folder / "predictions.csv"
    pd.DataFrame(lines).to_csv(path, index=False)
    print(f"{len(lines)} of {len(asked)} questions answered: {path}", flush=True)


def draw(rows: Rows, data: Prepared):
    """Draw a matplotlib figure of wrong and right answers, the labels' ROC curves, and the calibration."""
    from matplotlib.figure import Figure
    from torchmetrics.functional.classification import binary_roc

    right = rows["given"] == rows["target"]
    places = [
        some[np.linspace(0, len(some) - 1, 4).astype(int)] for some in map(np.flatnonzero, (~right, right)) if len(some)
    ]
    figure = Figure(figsize=(15, 8), layout="constrained")
    grid = figure.subplots(2, 5)
    for axes in grid[:, :4].ravel():
        axes.set(xticks=[], yticks=[], frame_on=False)
    for axes, place in zip(grid[:, :4].ravel(), np.concatenate(places), strict=False):
        classes = HEADS[list(HEADS)[rows["head"][place]]]
        given, target = int(rows["given"][place]), rows["target"][place]
        question = textwrap.fill(data.texts[int(rows["question"][place])].as_py(), 34)
        text = f"{question}\n{classes[given]} ({rows['probability'][place, given]:.2f})"
        text += "" if given == target else f"; true: {classes[target]}"
        axes.imshow(data.images[rows["study"][place]], cmap="gray")
        axes.set_title(
            text, fontsize=9, loc="left", color="darkgreen" if given == target else "darkred", parse_math=False
        )
    top, bottom = grid[:, 4]
    for axes in (top, bottom):
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        axes.set_box_aspect(1)
    studies, first = np.unique(rows["study"], return_index=True)
    for place, label in enumerate(CHEXPERT):
        truth, scores = data.labels[studies, place], rows["chexpert"][first, place]
        sure = np.isin(truth, (0, 1))
        if len(np.unique(truth[sure])) == 2:
            x, y, _ = binary_roc(torch.from_numpy(scores[sure]), torch.from_numpy(truth[sure]).long())
            top.plot(x, y, label=label)
    top.set(title="labels", xlabel="1 - specificity", ylabel="sensitivity")
    if len(top.lines) > 1:
        top.legend(fontsize=6)
    confidence = rows["probability"].max(1)
    parts = [part for part in np.array_split(np.argsort(confidence), 10) if len(part)]
    bottom.plot([confidence[part].mean() for part in parts], [right[part].mean() for part in parts], "o-")
    bottom.set(title="answers, tenths by confidence", xlabel="probability of the answer", ylabel="share that is right")
    return figure
