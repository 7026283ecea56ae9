"""Figures of survival: risk groups, AUC and calibration of a fold, and slices of the volumes of some cases."""

from collections.abc import Callable
from functools import partial

import numpy as np

from old.cli_utils import counted
from old.figure_utils import figure_text
from tasks.survival.cohort import Outcome
from tasks.survival.data import MultiGPUSurvivalDataset
from tasks.survival.folds import Fold
from tasks.survival.metrics import Evaluation, concordance, easiest_and_hardest, kaplan_meier, logrank_p
from tasks.survival.metrics import pairs_in_order, score, survival_at
from tasks.survival.volumes import Volumes, augment


# --- the scores of a fold ---------------------------------------------------------------------------------------------


def draw_survival(
    log_hazard: np.ndarray, outcome: Outcome, train: Outcome, years: list[float], survival: Callable, heading: str
):
    """A matplotlib figure: Kaplan-Meier by risk tertile with log-rank p, AUC over time, calibration at each horizon.

    survival: function of times giving (n, len(times)). heading: what was scored by what, beside which the number of
    cases stands.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5))
    figure.subplots_adjust(
        left=0.06,
        right=0.98,
        bottom=0.08,
        top=0.88,
        hspace=0.4,
        wspace=0.25,
    )
    cases = counted(len(outcome.time), "case")
    events = counted(int(outcome.event.sum()), "event")
    sizes = f"{cases}, {events}"
    figure.suptitle(f"{heading}: {sizes}", fontsize=13)
    draw_tertiles(figure.add_subplot(2, 2, 1), log_hazard, outcome)
    draw_auc(figure.add_subplot(2, 2, 2), log_hazard, outcome, train)

    # one panel for each horizon
    columns = max(1, len(years))
    for place, year in enumerate(years):
        axes = figure.add_subplot(2, columns, columns + place + 1)
        draw_calibration(axes, outcome, year, survival)
        if place == 0 and year < outcome.time.max():
            axes.set_ylabel("observed (Kaplan-Meier)")
            axes.legend(fontsize=7, loc="upper left")
    return figure


def draw_tertiles(axes, log_hazard: np.ndarray, outcome: Outcome) -> None:
    """Kaplan-Meier curves of the thirds of the cases by predicted risk."""
    event, time = outcome
    order = np.argsort(log_hazard, kind="stable")
    rank = np.argsort(order, kind="stable")
    third = np.minimum(3 * rank // max(1, len(rank)), 2)
    grid = np.linspace(0, time.max(), 300)
    for k, name in enumerate(("low", "middle", "high")):
        rows = third == k
        if rows.any():
            curve = kaplan_meier(event[rows], time[rows], grid)
            cases = counted(rows.sum(), "case")
            events = counted(event[rows].sum(), "event")
            label = f"{name} risk ({cases}, {events})"
            axes.step(grid, curve, where="post", color=f"C{k}", label=label)

    p = logrank_p(third, event, time)
    axes.set_title(f"tertiles of predicted risk, log-rank p = {p:.2g}")
    axes.set_xlabel("years")
    axes.set_ylabel("without event")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8)


def draw_auc(
    axes,
    log_hazard: np.ndarray,
    outcome: Outcome,
    train: Outcome,
) -> None:
    """AUC at up to 15 times, spread as the events are."""
    event, time = outcome
    points = []
    if event.any():
        points = np.quantile(time[event], np.linspace(0.1, 0.9, 15))
    scores = score(log_hazard, outcome, train, sorted(set(points)))
    times = []
    values = []
    for name, value in scores.items():
        if name.startswith("auc/") and value is not None:
            year = name.removeprefix("auc/").removesuffix("y")
            times.append(float(year))
            values.append(value)

    if values:
        axes.plot(times, values, marker=".")
    axes.axhline(0.5, color="grey", linewidth=0.8, label="chance")
    axes.set_title("AUC of an event before each time")
    axes.set_xlabel("years")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8, loc="lower right")


def draw_calibration(axes, outcome: Outcome, year: float, survival: Callable) -> None:
    """Predicted against observed risk of the fifths of the cases."""
    event, time = outcome
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, label="perfectly calibrated")
    axes.set_title(f"risk within {year:g} y")
    axes.set_xlabel("predicted, mean of a fifth")
    if year >= time.max():
        axes.text(
            0.5,
            0.5,
            "beyond\nfollow-up",
            ha="center",
            va="center",
            transform=axes.transAxes,
        )
        return

    # fifths of the cases, from the lowest predicted risk on
    risk = 1 - survival(np.array([year]))[:, 0]
    order = np.argsort(risk, kind="stable")
    groups = np.array_split(order, min(5, len(risk)))
    predicted = [risk[rows].mean() for rows in groups]
    observed = [1 - kaplan_meier(event[rows], time[rows], year) for rows in groups]
    axes.plot(predicted, observed, marker="o")
    edge = max(0.05, 1.1 * max(observed), 1.1 * predicted[-1])
    axes.set_xlim(0, edge)
    axes.set_ylim(0, edge)


# --- volumes ----------------------------------------------------------------------------------------------------------


def draw_volumes(
    volumes: list[np.ndarray],
    titles: list[str],
    heading: str,
):
    """A matplotlib figure: three orthogonal slices of each (X, Y, Z) volume, one column a volume."""
    from matplotlib.figure import Figure

    # inches for the lines of the heading and of the columns' titles
    title_lines = 1 + max(title.count("\n") for title in titles)
    heading_lines = 1 + heading.count("\n")
    above = 0.4 + 0.18 * heading_lines + 0.16 * title_lines
    width = 2.3 * max(3, len(volumes)) + 0.3
    height = 6.4 + above
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        left=0.3 / width,
        right=0.99,
        bottom=0.01,
        top=1 - above / height,
        wspace=0.05,
        hspace=0.05,
    )
    fontsize = 10 if len(volumes) > 3 else 8
    figure.suptitle(heading, fontsize=fontsize, y=1 - 0.12 / height)

    # a column for each volume, a row for each plane
    axes = figure.subplots(3, len(volumes), squeeze=False)
    for column, (volume, title) in enumerate(zip(volumes, titles, strict=True)):
        x, y, z = (size // 2 for size in volume.shape)
        slices = {
            "X-Y": volume[:, :, z],
            "X-Z": volume[:, y, :],
            "Y-Z": volume[x, :, :],
        }
        axes[0, column].set_title(title, fontsize=8)

        # values from 0 to 1, the first axis to the right
        for row, (plane, values) in enumerate(slices.items()):
            place = axes[row, column]
            place.imshow(
                values.T,
                cmap="gray",
                vmin=0,
                vmax=1,
                origin="lower",
                aspect="auto",
            )
            place.set(xticks=[], yticks=[])
            if column == 0:
                place.set_ylabel(f"{plane} plane, middle", fontsize=8)
    return figure


def draw_inputs(data: MultiGPUSurvivalDataset, seed: int | None):
    """A matplotlib figure: six training cases as the model sees them. seed: of the augmentation, None without."""
    count = min(6, len(data.rows))
    places = np.linspace(0, len(data.rows) - 1, count).astype(int)
    titles = []
    images = []
    for i in data.rows[places].tolist():
        image = data.load(i)["image"][None]
        if seed is not None:
            image = augment(image, [i], seed, 0)
        images.append(image[0, 0].float().numpy())
        titles.append(f"case {figure_text(data.cohort.case[i])}")
    heading = "training cases as the model sees them"
    if seed is not None:
        heading += ", flipped and turned at random"
    return draw_volumes(images, titles, heading)


def draw_cases(fold: Fold, log_hazard: np.ndarray, volumes: Volumes):
    """A matplotlib figure: slices of the cases ordered best and worst among the validation cases."""
    cohort = fold.cohort
    event, time = fold.val_outcome
    best, worst = easiest_and_hardest(log_hazard, event, time)
    share, pairs = pairs_in_order(log_hazard, event, time)

    # one column of slices for each case
    images = []
    titles = []
    for name, places in (("best", best), ("worst", worst)):
        for k in places:
            row = fold.val[k]
            case = figure_text(cohort.case[row])
            kind = "event" if event[k] else "censored"
            lines = [
                f"{name}: {case}",
                f"{share[k]:.0%} of {pairs[k]} pairs right",
                f"{kind} at {time[k]:.1f} y",
                f"log-hazard {log_hazard[k]:.2f}",
            ]
            titles.append("\n".join(lines))
            image = volumes.get(cohort.path[row])
            images.append(image[0].float().numpy())

    heading = "validation cases that are most often (best) and least often (worst) in the right order with others:\n"
    heading += "of two cases, the one whose event is known to come first should have the higher log-hazard"
    return draw_volumes(images, titles, heading)


def draw_results(fold: Fold, result: Evaluation, years: list[float]) -> dict:
    """{name: matplotlib figure} of the validation fold."""
    log_hazard = result.log_hazard
    outcome = fold.val_outcome
    survival = partial(survival_at, result.baseline, log_hazard)
    heading = f"validation on {figure_text(fold.name)}"
    figures = {"val_survival": draw_survival(log_hazard, outcome, fold.train_outcome, years, survival, heading)}

    # no case is right or wrong without a pair to compare
    if concordance(log_hazard, outcome.event, outcome.time) is not None:
        figures["val_cases"] = draw_cases(fold, log_hazard, fold.val_set.volumes)
    return figures
