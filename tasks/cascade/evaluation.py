"""What a trained cascade samples for the patients of a split, scored beside the baselines."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from distributed_utils import StopSignal, agree_on_errors, reduce_sum
from loop_utils import agree_on_signal
from tasks.cascade.data import Data, XrayCtDataset, eval_batches, grey
from tasks.cascade.diffusion import LOSS_DRAWS, Diffusion, Draw, validation_draw
from tasks.cascade.files import Patient
from tasks.cascade.metrics import back_projection, measure, score_names
from tasks.cascade.model import StageNet
from tasks.cascade.report import Example
from tasks.cascade.sampling import sample_cascade


class Evaluation(NamedTuple):
    """What came of an evaluation, on all ranks. code: of a stop signal; else there are metrics.

    example: the first patient, for a figure, on the rank that had it.
    """

    code: int
    metrics: dict[str, float]
    example: Example | None


@torch.no_grad()
def mean_losses(
    k: int,
    dataset: XrayCtDataset,
    diffusion: Diffusion,
    device: torch.device,
    sample_losses: Callable[[dict, Draw], tuple[Tensor, Tensor]],
) -> list[float]:
    """All ranks: the mean over a split of both losses in stage k, at fixed noise, the same for any number of ranks.

    sample_losses(batch, draw): both of each patient.
    """
    table = torch.zeros(len(dataset), 2, dtype=torch.float64)
    with agree_on_errors():
        for places, batch in eval_batches(dataset, device):
            for number in range(LOSS_DRAWS):
                draw = validation_draw(batch, places, k, number, diffusion)
                losses = torch.stack(sample_losses(batch, draw), 1)
                table[places] += losses.double().cpu() / LOSS_DRAWS
    return reduce_sum(table).mean(0).tolist()


@torch.no_grad()
def evaluate(
    split: str,
    models: list[StageNet],
    data: Data,
    diffusion: Diffusion,
    precision: str,
    check_conditioning: bool,
    stop: StopSignal | None = None,
) -> Evaluation:
    """All ranks: the scores of the cascade up to the last of `models`, each patient once for any number of ranks.

    check_conditioning: on the test patients. stop: on a signal to any rank all leave.
    """
    size = models[-1].size
    device = models[-1].position.device
    dataset = data.set(split, size)
    mean = data.mean_volume(size).to(device)
    checks = check_conditioning and split == "test"
    others = data.others(split) if checks else {}

    # a row for each patient
    names = score_names(split, models[-1].views, checks, first_stage=len(models) == 1)
    table = torch.zeros(len(dataset), len(names), dtype=torch.float64)
    example = None
    with agree_on_errors():
        for places, batch in eval_batches(dataset, device):
            if stop and stop.code:
                break
            scores, shown = score_batch(models, batch, others, mean, diffusion, data, precision)
            table[places] = scores
            if 0 in places:
                example = shown

    code = agree_on_signal(stop) if stop else 0
    if code:
        return Evaluation(code, {}, None)
    means = reduce_sum(table).mean(0).tolist()
    return Evaluation(0, dict(zip(names, means, strict=True)), example)


def score_batch(
    models: list[StageNet],
    batch: dict,
    others: dict[int, Patient],
    mean: Tensor,
    diffusion: Diffusion,
    data: Data,
    precision: str,
) -> tuple[Tensor, Example]:
    """(a row of scores for each patient of a batch, float64; the first of them for a figure).

    The scores are those of the cascade, of both baselines, and with `others` (see Data.others) those of
    --check_conditioning. mean: volume of the training patients.
    """
    volumes = sample_cascade(models, batch["xrays"], batch["index"], diffusion, precision)
    back = back_projection(batch, data.greys, models[-1].size)
    judged = [volumes[-1], mean.expand_as(back), back]
    scores = [measure(volume, batch, data.greys) for volume in judged]
    if others:
        shown = [others[place] for place in batch["index"]]
        scores += conditioning_scores(models, batch, shown, diffusion, data, precision)
    example = Example([volume[:1] for volume in volumes], batch, mean, back[:1])
    return torch.cat(scores, 1), example


def conditioning_scores(
    models: list[StageNet],
    batch: dict,
    others: list[Patient],
    diffusion: Diffusion,
    data: Data,
    precision: str,
) -> list[Tensor]:
    """--check_conditioning: the PSNR (B, 1) float64 with others' X-rays, and with the stage before zeroed, if any."""
    indices = batch["index"]
    stored = [data.decoded.xrays(patient) for patient in others]
    xrays = grey(torch.stack(stored)).to(batch["volume"].device)
    volumes = sample_cascade(models, xrays, indices, diffusion, precision)
    last_volumes = [volumes[-1]]
    if len(models) > 1:
        volumes = sample_cascade(models, batch["xrays"], indices, diffusion, precision, zeroed=True)
        last_volumes.append(volumes[-1])
    return [measure(volume, batch, data.greys)[:, :1] for volume in last_volumes]
