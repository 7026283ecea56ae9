"""What the outputs of a step are compared with, beside its own times and events.

These are the features that --task pretrain learns, and the earlier log-hazards that --cox_memory adds to the risk set.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from old.cli_utils import InputError
from tasks.survival.cohort import Cohort


class Features(NamedTuple):
    """Numeric columns of the table, as z-scores (cases, columns); NaN where blank."""

    names: list[str]
    scores: Tensor


def standardize_features(
    cohort: Cohort,
    train: np.ndarray,
    chosen: list[str] | None,
) -> Features:
    """The chosen columns, or all numeric ones, by mean and spread of the training rows. Raises InputError.

    A column that does not vary is left out.
    """
    names = list(chosen or cohort.features)
    unknown = [name for name in names if name not in cohort.features]
    if unknown:
        reason = f"no column {unknown[0]!r} with numbers (or blanks) alone"
        there = ", ".join(cohort.features)
        raise InputError(f"{cohort.source}: {reason}; there are {there}; see --feature_columns")

    varying = []
    scores = []
    for name in names:
        values = cohort.features[name]
        known = values[train]
        known = known[np.isfinite(known)]
        if len(known) > 1 and known.std() > 0:
            varying.append(name)
            scores.append((values - known.mean()) / known.std())
    if not varying:
        reason = "no numeric column that varies in the training fold"
        raise InputError(f"{cohort.source}: {reason}; --task pretrain needs some")
    scores = np.stack(scores, axis=1)
    return Features(varying, torch.from_numpy(scores).float())


def feature_loss(outputs: Tensor, scores: Tensor) -> Tensor:
    """The mean square over the features that are known of some cases; both (cases, features)."""
    known = scores.isfinite()
    weight = known / max(1, int(known.sum()))
    weight = weight.to(outputs.device, non_blocking=True)
    scores = scores.nan_to_num(0)
    scores = scores.to(outputs.device, non_blocking=True)
    errors = (outputs - scores).square()
    return (errors * weight).sum()


class CoxMemory:
    """--cox_memory: the last N log-hazards (detached) and whose they are; a function of the steps, not of the ranks."""

    def __init__(self, size: int, device: torch.device):
        self.size = size
        self.rows = np.zeros(0, np.int64)
        self.values = torch.zeros(0, device=device)

    def others(
        self,
        rows: np.ndarray,
        times: np.ndarray,
    ) -> tuple[Tensor, Tensor] | None:
        """(log_hazard, time) of what is kept, without the cases in `rows`; None without any."""
        keep = np.flatnonzero(~np.isin(self.rows, rows))
        if not len(keep):
            return None
        times = times[self.rows[keep]]
        return self.at(keep), torch.from_numpy(times)

    def at(self, places: np.ndarray) -> Tensor:
        """The log-hazards at some places of the memory."""
        places = torch.from_numpy(places)
        return self.values[places.to(self.values.device, non_blocking=True)]

    def add(self, rows: np.ndarray, values: Tensor) -> None:
        """Keep a step's log-hazards; what is older than the last N goes."""
        if not self.size:
            return
        # those of a step that was skipped are no part of any sum
        values = torch.where(values.isfinite(), values, -torch.inf)
        stays = np.flatnonzero(~np.isin(self.rows, rows))
        kept = self.at(stays)
        rows = np.concatenate([self.rows[stays], rows])
        values = torch.cat([kept, values])
        self.rows = rows[-self.size :]
        self.values = values[-self.size :]

    def state(self) -> dict:
        """For a checkpoint."""
        return {"rows": self.rows.tolist(), "values": self.values.cpu()}

    def restore(self, state: dict) -> None:
        """Take the state of a checkpoint."""
        self.rows = np.array(state["rows"], np.int64)
        self.values = state["values"].to(self.values.device)
