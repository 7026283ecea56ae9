"""How guide 3's stages are trained: the position in a cascade, the batch, steps and memory of each stage."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from old.checkpoint_utils import Checkpoint, at_end_of_step, load_trained
from old.cli_utils import InputError, RunError
from old.distributed_utils import agree_on_errors, reduce_max, schedule
from old.hardware_utils import smaller_batch, split_batch
from old.logging_utils import RunLog
from old.loop_utils import LossScaler, Progress, TrainingRun, resume
from old.memory_utils import BatchSize, auto_batch_advice, batch_flags, copies_held
from old.memory_utils import fit_batch_to_memory, fits_by_itself, try_step
from tasks.cascade.model import Ema, StageNet
from tasks.cascade.stages import StageChoice, choose_rehearsed

# On a CPU a stage of more voxels is not measured unless it must be, as a step would take minutes.
MOST_VOXELS_ON_CPU = 8 * 64**3


@dataclass
class StageProgress(Progress):
    """Progress of the cascade: `step` counts over all stages; `epoch`, `samples` and `best` belong to the stage.

    stage: from 0. stage_step: optimizer steps of the stage done. plateau: factor on the learning rate. lowest: lowest
    validation loss so far. waiting: epochs since.
    """

    stage: int = 0
    stage_step: int = 0
    plateau: float = 1.0
    lowest: float | None = None
    waiting: int = 0


def begin_stage(progress: StageProgress, k: int) -> None:
    """Set the progress to the first step of stage k (from 0)."""
    fresh = StageProgress(step=progress.step, stage=k)
    for name, value in asdict(fresh).items():
        setattr(progress, name, value)


def reduce_on_plateau(progress: StageProgress, loss: float) -> None:
    """After an epoch: as torch's ReduceLROnPlateau(factor=.5, patience=5); the factor goes into the progress."""
    progress.waiting += 1
    if progress.lowest is None or loss < progress.lowest * (1 - 1e-4):
        progress.lowest = loss
        progress.waiting = 0
    if progress.waiting > 5:
        progress.plateau *= 0.5
        progress.waiting = 0


def lr_factor(progress: StageProgress, stage_steps: int, warmup_steps: int, scheduler: str) -> float:
    """What the learning rate of the next step is multiplied by. scheduler: --scheduler."""
    if scheduler == "plateau":
        return progress.plateau * schedule(progress.stage_step, stage_steps, warmup_steps, "constant")
    return schedule(progress.stage_step, stage_steps, warmup_steps, scheduler)


class StagePlan(NamedTuple):
    """How one stage is trained.

    number: from 0. config: its entry of --stage_configs. steps: optimizer steps in all. parameters, memory: of its
    model, and GiB of one training step; None where they were not measured.
    """

    number: int
    config: dict
    batch: BatchSize
    steps: int = 0
    parameters: int | None = None
    memory: float | None = None

    @property
    def name(self) -> str:
        """Also the first part of its best checkpoint's name."""
        return self.config["name"]

    @property
    def effective_batch_size(self) -> int:
        """Patients of an optimizer step, over all processes."""
        return self.batch.effective_batch_size

    def run_facts(self, seed: int, training_data: str) -> dict:
        """What may not differ in a run that resumes in this stage. training_data: fingerprint of the patients."""
        return {
            "seed": seed,
            "training_data": training_data,
            "effective_batch_size": self.effective_batch_size,
        }

    def with_steps(self, patients: int) -> "StagePlan":
        """The stage with the steps that its epochs take."""
        steps_per_epoch = math.ceil(patients / self.effective_batch_size)
        return self._replace(steps=steps_per_epoch * self.config["num_epochs"])


class Learner(NamedTuple):
    """What learns in one stage. wrapped: the model, in DDP where there are several processes."""

    model: StageNet
    wrapped: nn.Module
    averaged: Ema
    optimizer: torch.optim.AdamW
    scaler: LossScaler


def plan_as_asked(number: int, config: dict, recompute: bool | None) -> StagePlan:
    """A stage with the batch of the flags or of the config. recompute: --gradient_checkpointing."""
    batch = BatchSize(config["batch_size"], config["accumulation_steps"], "", bool(recompute))
    return StagePlan(number, config, batch.of_effective_batch(config.get("effective_batch_size")))


def plan_stages(
    configs: list[dict],
    first: int,
    patients: int,
    recompute: bool | None,
    measure: Callable[[StagePlan, dict | None], StagePlan],
    checkpoint: dict | None,
) -> list[StagePlan]:
    """All ranks: every stage, from `first` on measured.

    patients: of an epoch. recompute: --gradient_checkpointing. measure(stage, checkpoint): the stage with its memory.
    checkpoint: where the first one is resumed in its middle.
    """
    plan = []
    for k, config in enumerate(configs):
        stage = plan_as_asked(k, config, recompute)
        if k >= first:
            stage = measure(stage, checkpoint if k == first else None)
        plan.append(stage.with_steps(patients))
    return plan


def resume_stages(
    checkpoint: Checkpoint | None,
    this_run: dict,
    choice: StageChoice,
    best: Path,
) -> StageProgress:
    """All ranks: the progress where a checkpoint stands, or at the start of the next stage.

    this_run: what may not differ from the run that wrote it. best: where the best checkpoint of the first stage would
    be. Raises InputError for the checkpoint of another run.
    """
    progress = StageProgress()
    if checkpoint is None:
        return progress
    if choice.anew:
        # another stage may have another batch
        this_run = {name: value for name, value in this_run.items() if name != "effective_batch_size"}
    else:
        checkpoint.need("net", "ema", "optimizer", "scaler", "rng")
    resume(progress, checkpoint, this_run, best.parent, best.name)
    if choice.anew:
        begin_stage(progress, choice.first)
    return progress


def load_models(checkpoint: dict, build_model: Callable[[int], StageNet]) -> list[StageNet]:
    """The averaged models of every stage that a checkpoint holds, for evaluation. build_model(k): of stage k."""
    models = []
    states = [*checkpoint["earlier"], checkpoint["ema"]]
    for k, weights in enumerate(states):
        model = build_model(k)
        model.requires_grad_(False).eval()
        with agree_on_errors():
            load_trained(model, weights)
        models.append(model)
    return models


def log_to_resume(
    checkpoint: Checkpoint | None,
    choice: StageChoice,
    run_folder: Path,
) -> Checkpoint | None:
    """The checkpoint as the log resumes from it: behind the evaluation of its stage, where that is over."""
    if checkpoint and choice.anew:
        return at_end_of_step(checkpoint, run_folder)
    return checkpoint


def write_rest_of_stage(log: RunLog, checkpoint: Checkpoint | None, choice: StageChoice) -> None:
    """All ranks, at the start of the next stage: what the one before had not logged yet."""
    if checkpoint and choice.anew:
        log.context = {"stage": choice.first}
        log.write_rest(checkpoint["step"], checkpoint["state"]["epoch"] + 1)


def part_of_run(
    training: TrainingRun,
    stage: StagePlan,
    contents: Callable[[], dict],
    model: nn.Module,
) -> TrainingRun:
    """A stage's part of a run, which ends with its steps, or where --max_steps ends the run.

    model: what the ranks must agree on.
    """
    progress = training.progress
    end_of_stage = progress.step - progress.stage_step + stage.steps
    return replace(
        training,
        last_step=min(end_of_stage, training.last_step),
        planned_steps=stage.steps,
        effective_batch_size=stage.effective_batch_size,
        contents=contents,
        model=model,
    )


def stage_weights(plan: list[StagePlan], models: list[StageNet]) -> dict[str, Tensor]:
    """The weights of all stages, for export."""
    weights = {}
    for stage, model in zip(plan, models, strict=False):
        for name, value in model.state_dict().items():
            weights[f"{stage.name}.{name}"] = value
    return weights


def end_of_run(
    plan: list[StagePlan],
    choice: StageChoice,
    progress: StageProgress,
    asked: str | None,
    max_steps: int | None,
    run_folder: Path,
) -> int:
    """The step at which the run ends: that of the stages, or --max_steps.

    asked: --stage; raises InputError where that is not the one under way. A stage that was begun with more epochs than
    are asked for now ends where it is.
    """
    stage = plan[choice.first]
    stage = stage._replace(steps=max(stage.steps, progress.stage_step))
    plan[choice.first] = stage
    if asked and choice.last > choice.first and progress.stage_step < stage.steps:
        done = f"{stage.name} has done {progress.stage_step} of {stage.steps} steps"
        best = run_folder / f"{stage.name}_best.pt"
        raise InputError(f"--stage {asked}: {done}; leave out --stage, or --resume_from {best}")
    steps = sum(stage.steps for stage in choice.of(plan))
    end_of_stages = progress.step - progress.stage_step + steps
    return min(max_steps or end_of_stages, end_of_stages)


# --- memory -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def count_saved_tensors(kept: dict[int, int]) -> Iterator[None]:
    """Inside, {address: bytes} of what autograd keeps for the backward pass."""

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        yield


def measure_stage(
    stage: StagePlan,
    model: StageNet,
    try_once: Callable[[int], None],
    auto_batch: bool | None,
    recompute: bool | None,
    checkpoint: dict | None = None,
) -> StagePlan:
    """All ranks: the stage with the memory of one training step on made-up data, and with a batch that fits.

    try_once(size): a training step's forward and backward pass. auto_batch, recompute: --auto_batch and
    --gradient_checkpointing. checkpoint: where the stage is resumed in its middle. The memory is on a GPU what torch
    reserved at most. On a CPU it is the sum of weights, gradients, AdamW's moments, averaged weights and the
    activations kept for the backward pass; None for sizes that would take a CPU minutes. Raises RunError when the stage
    does not fit.
    """
    device = model.position.device
    on_gpu = device.type == "cuda"
    fits = fits_by_itself(auto_batch, device)
    stage = stage._replace(parameters=sum(parameter.numel() for parameter in model.parameters()))
    voxels = stage.batch.size * math.prod(stage.config["volume_size"])
    if not on_gpu and not fits and voxels > MOST_VOXELS_ON_CPU:
        return stage
    kept: dict[int, int] = {}

    def count_once(size: int) -> None:
        with contextlib.nullcontext() if on_gpu else count_saved_tensors(kept):
            try_once(size)

    # one more copy than in the other scripts: the averaged weights
    copies = copies_held() + 1
    if fits:
        stage = stage._replace(batch=fit_stage_batch(stage, model, count_once, copies, recompute, checkpoint))
        peak = stage.batch.peak_gib
    else:
        trial = try_step(partial(count_once, stage.batch.size), model, copies, passes=2 if on_gpu else 1)
        failed, peak = reduce_max([bool(trial.error), (trial.peak or 0) / 2**30]).tolist()
        if failed:
            advice = smaller_stage_advice(stage, recompute, auto_batch, device)
            raise RunError(f"out of memory in {stage.name} {advice}")

    # fp32: weights, gradients, averaged weights, and two moments
    if not on_gpu:
        peak = (sum(kept.values()) + 4 * 5 * stage.parameters) / 2**30
    return stage._replace(memory=float(reduce_max([peak])[0]))


def fit_stage_batch(
    stage: StagePlan,
    model: StageNet,
    try_once: Callable[[int], None],
    copies: float,
    recompute: bool | None,
    checkpoint: dict | None,
) -> BatchSize:
    """All ranks: a stage's batch that fits into memory, with recomputation where no flag decided."""
    turn_on = None
    advice = "pass --gradient_checkpointing or a smaller voxel_dim or token_grid"
    if recompute is None:
        turn_on = partial(setattr, model, "checkpointing", True)
        advice = "pass a smaller voxel_dim or token_grid"

    def words(size: int, accumulation: int | None) -> str:
        return f"{stage.name}: {batch_keys(size, accumulation)}"

    return fit_batch_to_memory(
        try_once, model, stage.batch, words, advice, copies=copies, recompute=turn_on, checkpoint=checkpoint
    )


def batch_keys(size: int, accumulation: int | None) -> str:
    """How --config asks for a stage's batch. accumulation: None where it follows from the effective batch."""
    return f"batch_size {size}" + (f" and accumulation_steps {accumulation}" if accumulation else "")


def otherwise_smaller(recompute: bool | None) -> str:
    """What takes less memory beside a smaller batch."""
    return "a smaller voxel_dim or token_grid" if recompute else "--gradient_checkpointing"


def smaller_stage_advice(
    stage: StagePlan, recompute: bool | None, auto_batch: bool | None, device: torch.device
) -> str:
    """The batch at which a stage ran out of memory, and what to change."""
    size, accumulation = split_batch(stage.batch.size, stage.batch.accumulation_flag)
    advice = otherwise_smaller(recompute) + auto_batch_advice(auto_batch, device)
    if stage.batch.size > 1:
        smaller = f"{batch_keys(size, accumulation)} for this stage in --config"
        advice = f"{smaller} (the same result), {advice}"
    return f"at batch_size {stage.batch.size} per GPU; try {advice}"


def out_of_memory_advice(auto_batch: bool | None, device: torch.device) -> str:
    """What takes less memory, where it ran out after the stages were measured."""
    smaller = "halve it in --config, and without effective_batch_size double accumulation_steps (the same result)"
    otherwise = auto_batch_advice(auto_batch, device)
    return f"a stage's batch_size; try --gradient_checkpointing, or {smaller}{otherwise}"


def smaller_batch_words(stage: StagePlan, by_flags: bool, samples: int) -> str:
    """How a user asks for micro-batches of at most so many samples in a stage, the effective batch as it is."""
    size, accumulation = smaller_batch(stage.batch.size, stage.batch.accumulation_flag, samples)
    if by_flags:
        return batch_flags(size, accumulation)
    return f"in --config, {stage.name}: {batch_keys(size, accumulation)}"


# --- rehearsal --------------------------------------------------------------------------------------------------------


class RehearsedParts(NamedTuple):
    """What a step of a stage is rehearsed with. trial: a micro-batch's forward and backward pass."""

    model: StageNet
    averaged: StageNet
    optimizer: torch.optim.Optimizer
    trial: Callable[[], None]
    precision: str


def rehearse_stages(
    configs: list[dict],
    asked: str | None,
    make: Callable[[StagePlan, torch.device], RehearsedParts],
    world_size: int | None,
    gpu_memory: float | None,
    recompute: bool | None,
) -> None:
    """What a step of each stage takes on a GPU that is not there; the largest comes last, and the process ends.

    asked: --stage; without it all are tried. world_size, gpu_memory: the flags. recompute: --gradient_checkpointing.
    Raises InputError.
    """
    from old import rehearsal_utils as rehearsal

    stages = [plan_as_asked(k, configs[k], recompute) for k in choose_rehearsed(asked, configs)]
    processes = rehearsal.processes_to_plan_for(world_size)
    memory = rehearsal.memory_to_plan_for(gpu_memory)
    reports = []
    for stage in stages:
        stage = stage._replace(batch=stage.batch.planned_for(processes))
        trace = rehearsal.Trace()
        with rehearsal.imaginary_gpu(trace) as ranks:
            parts = make(stage, ranks.device)
            accumulation = stage.batch.accumulation
            step = rehearsal.rehearse_step(
                trace, parts.model, parts.optimizer, parts.trial, accumulation, processes, parts.averaged
            )
        split = f"{stage.batch.size} per GPU x {accumulation} accumulation"
        reports.append((step, f"cascade, {stage.name}, {split}, {parts.precision}", stage))

    for step, title, stage in sorted(reports, key=lambda report: report[0].peak):
        words = partial(smaller_batch_words, stage, bool(asked))
        rehearsal.report_rehearsal(title, step, stage.batch.size, memory, words, otherwise_smaller(recompute))
    rehearsal.end_rehearsal()
