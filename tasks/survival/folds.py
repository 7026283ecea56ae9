"""Which cases are trained on and which are validated on: by the labels of a column, or by folds made here."""

from typing import NamedTuple

import numpy as np

from old.cli_utils import InputError
from old.sampler_utils import permute
from tasks.survival.cohort import Cohort, Outcome
from tasks.survival.data import MultiGPUSurvivalDataset
from tasks.survival.targets import Features

# labels of a fold column that are neither trained nor validated on
HELD_OUT = ("test", "holdout", "hold-out")


class Fold(NamedTuple):
    """A split of the cohort, and what is learned on it.

    train, val: rows of the cohort. flags: those that ask for just this split. features: with --task pretrain.
    train_set, val_set: the cases of both sides in order, for evaluations; see settings.prepare_fold.
    """

    cohort: Cohort
    name: str
    train: np.ndarray
    val: np.ndarray
    flags: dict
    features: Features | None = None
    train_set: MultiGPUSurvivalDataset | None = None
    val_set: MultiGPUSurvivalDataset | None = None

    @property
    def train_outcome(self) -> Outcome:
        """Events and times of the training cases."""
        return self.cohort.outcome(self.train)

    @property
    def val_outcome(self) -> Outcome:
        """Events and times of the validation cases."""
        return self.cohort.outcome(self.val)

    @property
    def outputs(self) -> int:
        """How many the model has: the log-hazard, or the features."""
        return len(self.features.names) if self.features else 1


def choose_folds(
    cohort: Cohort,
    count: int,
    fold_column: str,
    train_label: str,
    val_label: str | None,
    seed: int,
    every: bool,
) -> list[Fold]:
    """One fold, or with `every` all of a cross-validation. Raises InputError.

    count: so many are made, of which val_label is one (default 1). With 0 the labels of fold_column say: the rows of
    train_label against those of val_label (default val) or, where no row has that training label, all other labels but
    those that are held out. All folds are then those of the column's sisters (Fold_1, Fold_2 ...), or one label after
    the other.
    """
    if count:
        folds = numbered_folds(cohort, count, val_label or "1", seed, every)
    else:
        folds = labelled_folds(cohort, fold_column, train_label, val_label or "val", every)

    # the predictions of all folds are scored together
    validated: dict[int, str] = {}
    for fold in folds:
        check_fold(fold)
        for i in fold.val.tolist():
            if i in validated:
                reason = f"validated in {validated[i]} and in {fold.name}, so the predictions cannot be pooled"
                raise InputError(f"{cohort.where(i)}: {reason}; give folds that do not overlap, or --folds 5")
            validated[i] = fold.name
    return folds


def numbered_folds(cohort: Cohort, count: int, chosen: str, seed: int, every: bool) -> list[Fold]:
    """The folds of --folds, or the chosen one. Raises InputError."""
    number = make_folds(cohort, count, seed)
    labels = [str(k + 1) for k in range(count)]
    if chosen not in labels:
        raise InputError(f"--val_fold {chosen}: with --folds {count} it is one of 1 to {count}")
    folds = []
    for label in labels if every else [chosen]:
        is_val = number == int(label) - 1
        flags = {"folds": count, "val_fold": label}
        folds.append(Fold(cohort, f"fold {label} of {count}", np.flatnonzero(~is_val), np.flatnonzero(is_val), flags))
    return folds


def make_folds(cohort: Cohort, count: int, seed: int) -> np.ndarray:
    """Fold (0..count-1) of each row: cases stay whole, events are dealt out evenly, a function of the seed alone.

    Raises InputError when there are fewer cases with events than folds.
    """
    numbers = {name: i for i, name in enumerate(dict.fromkeys(cohort.case))}
    case_of_row = np.array([numbers[name] for name in cohort.case])
    event = np.zeros(len(numbers), bool)
    np.logical_or.at(event, case_of_row, cohort.event)
    if event.sum() < count:
        raise InputError(f"{cohort.source}: {event.sum()} cases with events for --folds {count}; ask for fewer folds")

    # first the cases with an event, then the others, each in a random order
    fold = np.zeros(len(numbers), int)
    dealt = 0
    for group in (np.flatnonzero(event), np.flatnonzero(~event)):
        order = permute(np.arange(len(group)), len(group), seed, 0) if len(group) else group
        fold[group[order]] = (dealt + np.arange(len(group))) % count
        dealt += len(group)
    return fold[case_of_row]


def labelled_folds(cohort: Cohort, fold_column: str, train_label: str, val_label: str, every: bool) -> list[Fold]:
    """The folds of a column's labels. Raises InputError."""
    column = cohort.find_fold_column(fold_column)
    if column is None:
        advice = "name it with --fold_column, or make folds with --folds 5"
        raise InputError(f"{cohort.source}: no fold column {fold_column!r}; {advice}")
    columns = [column]
    chosen = [val_label]

    # a cross-validation: the columns beside this one, or each label in turn
    labels = list(dict.fromkeys(cohort.folds[column]))
    if every and (train_label in labels or val_label in labels):
        stem = column.rstrip("0123456789")
        columns = [name for name in cohort.folds if name.rstrip("0123456789") == stem]
        if len(columns) < 2:
            raise InputError(f"{cohort.source}: {column} is one split; for --cross_validate give --folds 5")
    elif every:
        chosen = [label for label in labels if label and label.lower() not in HELD_OUT]
    return [labelled_fold(cohort, name, train_label, label) for name in columns for label in chosen]


def labelled_fold(cohort: Cohort, column: str, train_label: str, val_label: str) -> Fold:
    """The rows of one label against those of another, or against all others. Raises InputError."""
    labels = np.array(cohort.folds[column])
    is_val = labels == val_label
    if not is_val.any():
        known = ", ".join(repr(str(label)) for label in np.unique(labels)[:9])
        raise InputError(f"{cohort.source}: no row has {val_label!r} in {column} ({known}); check --val_fold")
    is_train = labels == train_label
    if not is_train.any():
        held_out = np.isin(np.char.lower(labels), [*HELD_OUT, ""])
        is_train = ~held_out & ~is_val
    flags = {"fold_column": column, "train_fold": train_label, "val_fold": val_label, "folds": 0}
    return Fold(cohort, f"{column} {val_label!r}", np.flatnonzero(is_train), np.flatnonzero(is_val), flags)


# --- checks -----------------------------------------------------------------------------------------------------------


def check_fold(fold: Fold) -> None:
    """InputError for an empty side, one without events, or a case or volume on both sides (or a volume twice)."""
    cohort = fold.cohort
    for side, rows in (("training", fold.train), ("validation", fold.val)):
        if not len(rows):
            advice = "check --train_fold, --val_fold"
            raise InputError(f"{cohort.source}: no rows in the {side} fold of {fold.name}; {advice}")
        if not cohort.event[rows].any():
            extent = f"{len(rows)} rows from {cohort.row[rows[0]]} to {cohort.row[rows[-1]]}"
            reason = f"the {side} fold of {fold.name} ({extent}) has no event"
            raise InputError(f"{cohort.source}: {reason}; a Cox model needs some")

    validated = set(fold.val.tolist())
    for column, names in (("case", cohort.case), ("volume", cohort.path)):
        first_row: dict[str, int] = {}
        for i in [*fold.train.tolist(), *fold.val.tolist()]:
            before = first_row.setdefault(names[i], i)
            if (i in validated) != (before in validated):
                reason = f"{column} {names[i]} is in the training and, in row {cohort.row[i]}, in the validation fold"
                raise InputError(f"{cohort.where(before)}: {reason}; keep a patient in one fold")
            if i != before and column == "volume":
                reason = f"the same volume as row {cohort.row[before]}"
                raise InputError(f"{cohort.where(i)}: {reason}; remove one of them")


def check_evaluated(fold: Fold, outputs: int, trained_cases: list[str], checkpoint: str) -> None:
    """InputError where a checkpoint was trained on a case of the validation fold, or has another number of outputs."""
    cohort = fold.cohort
    trained = set(trained_cases)
    seen = [i for i in fold.val if cohort.case[i] in trained]
    if seen:
        case = f"case {cohort.case[seen[0]]} and {len(seen) - 1} more of {fold.name}"
        advice = "evaluate on the fold it was validated on, or on new cases"
        raise InputError(f"{cohort.where(seen[0])}: {case} were trained on by {checkpoint}; {advice}")
    if fold.outputs != outputs:
        raise InputError(f"{checkpoint}: a net of {outputs} outputs, the table asks {fold.outputs}")
