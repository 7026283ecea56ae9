"""What a trained cascade samples for the patients of a split, scored beside its rivals."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from old.distributed_utils import StopSignal, agree_on_errors, reduce_sum
from old.fixed_order_utils import interpolate
from old.loop_utils import agree_on_signal
from old.phase_utils import doing
from tasks.cascade.agreement import made_consistent, measure_xrays, start_volume
from tasks.cascade.alignment import GreyFit
from tasks.cascade.data import Data, XrayCtDataset, eval_batches, grey
from tasks.cascade.diffusion import LOSS_DRAWS, Diffusion, Draw, validation_draw
from tasks.cascade.figures import Example, example_of
from tasks.cascade.files import Patient
from tasks.cascade.metrics import BASELINES, CASCADE, CHECKS, COVERAGES, FREE, ONE_STEP, OWN_KINDS
from tasks.cascade.metrics import REGRESSED, RIVALS, START
from tasks.cascade.metrics import back_projection, coverage, earlier_stages, mean_of_samples, measure, score_names
from tasks.cascade.sampling import Sampling, Trained, sample_cascade, several_samples


class Evaluation(NamedTuple):
    """What came of an evaluation, on all ranks. code: of a stop signal; else there are metrics.

    kinds: what is judged, {end of a score's name: row}. example: the first patient, on the rank that had it.
    """

    code: int
    metrics: dict[str, float]
    kinds: dict[str, str]
    example: Example | None


@doing("evaluating (val)")
@torch.no_grad()
def mean_losses(
    k: int,
    dataset: XrayCtDataset,
    diffusion: Diffusion,
    device: torch.device,
    estimate_before: Callable[[dict], Tensor | None],
    sample_losses: Callable[[dict, Draw], tuple[Tensor, Tensor]],
) -> list[float]:
    """All ranks: the mean over a split of both losses in stage k, at fixed noise, the same for any number of ranks.

    estimate_before(batch): the volumes of the stage before. sample_losses(batch, draw): both losses of each patient.
    """
    table = torch.zeros(len(dataset), 2, dtype=torch.float64)
    with agree_on_errors():
        for places, batch in eval_batches(dataset, device):
            previous = estimate_before(batch)
            for number in range(LOSS_DRAWS):
                draw = validation_draw(k, batch, previous, places, number, diffusion)
                losses = torch.stack(sample_losses(batch, draw), 1)
                table[places] += losses.double().cpu() / LOSS_DRAWS
    return reduce_sum(table).mean(0).tolist()


def judged_kinds(split: str, cascade: Trained, num_samples: int) -> dict[str, str]:
    """What is scored in a split, {end of a score's name: row of the table}; of validation patients what is quick."""
    kinds = REGRESSED if cascade.diffusion.regression else CASCADE
    if split != "test":
        return kinds | BASELINES
    kinds = kinds | mean_of_samples(num_samples)
    if cascade.diffusion.starts_blind and not cascade.diffusion.regression:
        kinds |= ONE_STEP
    kinds |= earlier_stages(cascade.names) | BASELINES | RIVALS
    if cascade.diffusion.agreement:
        kinds |= START | FREE
    return kinds


class Test(NamedTuple):
    """What is judged in an evaluation.

    kinds: of volumes, {end of a score's name: row}. mean: volume of the training patients, (1, 1, X, Y, Z). others: for
    a patient's place another one whose X-rays to show instead; empty without --check_conditioning.
    """

    kinds: dict[str, str]
    num_samples: int
    mean: Tensor
    others: dict[int, Patient]

    def score_names(self, split: str, greys: list[GreyFit], num_stages: int) -> list[str]:
        """What the columns of `score_batch` are called."""
        more = list(COVERAGES) if self.num_samples > 1 else []
        if self.others:
            # the first stage has none before it that could be zeroed
            more += list(CHECKS)[:num_stages]
        views = [fit.view.name for fit in greys]
        return score_names(split, views, self.kinds, more)


@doing("evaluating the cascade")
@torch.no_grad()
def evaluate(
    split: str,
    cascade: Trained,
    data: Data,
    num_samples: int,
    check_conditioning: bool,
    stop: StopSignal | None = None,
) -> Evaluation:
    """All ranks: the scores of a cascade, each patient once for any number of ranks.

    num_samples, check_conditioning: of the test patients. stop: on a signal to any rank all leave.
    """
    final = split == "test"
    num_samples = num_samples if final else 1
    size = list(cascade.size)
    dataset = data.set(split, size)
    test = Test(
        kinds=judged_kinds(split, cascade, num_samples),
        num_samples=num_samples,
        mean=data.mean_volume(size).to(cascade.device),
        others=data.others(split) if final and check_conditioning else {},
    )

    # a row for each patient
    names = test.score_names(split, data.greys, len(cascade.models))
    table = torch.zeros(len(dataset), len(names), dtype=torch.float64)
    example = None
    with agree_on_errors():
        for places, batch in eval_batches(dataset, cascade.device):
            if stop and stop.code:
                break
            scores, volumes, samples = score_batch(cascade, batch, data, test)
            table[places] = scores
            if 0 in places:
                example = example_of(volumes, samples, batch, data.greys, test.kinds)

    code = agree_on_signal(stop) if stop else 0
    if code:
        return Evaluation(code, {}, test.kinds, None)
    means = reduce_sum(table).mean(0).tolist()
    metrics = dict(zip(names, means, strict=True))
    return Evaluation(0, metrics, test.kinds, example)


def score_batch(
    cascade: Trained,
    batch: dict,
    data: Data,
    test: Test,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """(a row of scores for each patient of a batch, float64; what is judged, and all samples: see judged_volumes)."""
    volumes, samples = judged_volumes(cascade, batch, data, test)
    scores = []
    for kind in test.kinds:
        own = kind in OWN_KINDS
        scores.append(measure(volumes[kind], batch, data.greys, field=own))
    if test.num_samples > 1:
        true = batch["volume"]
        held = [coverage(samples, true, nominal) for nominal in COVERAGES.values()]
        scores.append(torch.stack(held, 1))
    if test.others:
        shown = [test.others[place] for place in batch["index"]]
        scores.append(conditioning_scores(cascade, batch, shown, data))
    return torch.cat(scores, 1), volumes, samples


def judged_volumes(
    cascade: Trained,
    batch: dict,
    data: Data,
    test: Test,
) -> tuple[dict[str, Tensor], Tensor]:
    """({kind: (B, 1, X, Y, Z)} of what is judged, all samples (K, B, 1, X, Y, Z))."""
    size = cascade.size
    stages, samples = several_samples(cascade, batch, test.num_samples)
    mean = test.mean.expand_as(samples[0])
    back = back_projection(batch, data.greys, size)
    volumes = {
        "": stages[-1],
        "_mean_of_samples": samples.mean(0),
        "_mean_volume": mean,
        "_backprojection": back,
    }
    for name, volume in zip(cascade.names[:-1], stages, strict=False):
        volumes[f"_of_{name}"] = interpolate(volume, size)

    # the mean of all volumes that are possible, as the model sees it
    if "_one_step" in test.kinds:
        at_once = Sampling(one_step=True)
        volumes["_one_step"] = sample_cascade(cascade, batch, at_once)[-1]

    # what the same X-rays make of the baselines
    if "_mean_consistent" in test.kinds:
        measured = measure_xrays(batch["xrays"], batch["extent"], data.greys, size)
        volumes["_mean_consistent"] = made_consistent(mean, measured)
        volumes["_backprojection_consistent"] = made_consistent(back, measured)

    # where the cascade begins, and what it gives without being held to the X-rays
    if "_start" in test.kinds:
        prior = cascade.diffusion.prior
        volumes["_start"] = start_volume(prior, batch, size, agreement=True)
        free = Sampling(agree=False)
        volumes["_free"] = sample_cascade(cascade, batch, free)[-1]
    return volumes, samples


def conditioning_scores(
    cascade: Trained,
    batch: dict,
    others: list[Patient],
    data: Data,
) -> Tensor:
    """--check_conditioning: the PSNR, (B, 1 or 2) float64, with others' X-rays, and with the stage before zeroed."""
    stored = [data.decoded.xrays(patient) for patient in others]
    xrays = grey(torch.stack(stored)).to(cascade.device)
    shown = batch | {"xrays": xrays, "seen": xrays}
    volumes = [sample_cascade(cascade, shown, Sampling())[-1]]
    if len(cascade.models) > 1:
        zeroed = Sampling(zeroed=True)
        volumes.append(sample_cascade(cascade, batch, zeroed)[-1])
    psnr = []
    for volume in volumes:
        scores = measure(volume, batch, data.greys)
        psnr.append(scores[:, 0])
    return torch.stack(psnr, 1)
