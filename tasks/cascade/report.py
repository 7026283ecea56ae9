"""Guide 3's tables, banner rows, results on disk, and volumes as NIfTI."""

import gzip
import json
import re
import statistics
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from old.checkpoint_utils import export_weights
from old.cli_utils import InputError, RunError, counted
from old.distributed_utils import agree_on_errors, print_main, world
from old.hardware_utils import available_ram_gb
from old.logging_utils import RunLog, print_table, save_figure, write_result
from old.loop_utils import TrainingRun, finish_run, print_start, say_where
from old.manifest_utils import write_atomically
from tasks.cascade.agreement import Prior
from tasks.cascade.data import Data
from tasks.cascade.figures import Example, draw_evaluation
from tasks.cascade.files import Patient, read_ct
from tasks.cascade.metrics import CHECKS, COVERAGES, FIELD_SCORES, REGRESSION, SCORES
from tasks.cascade.model import StageNet
from tasks.cascade.plan import StagePlan, stage_weights
from tasks.cascade.projector import hu_difference

# A projection error of the cascade; no view's name has an underscore, and other kinds follow one.
PROJECTION_ERROR = re.compile(r"(projection_error_[a-z0-9-]+)")
# The guide's table of GB by side, for its batches of 16, 8 and 4, and the throughput per GPU that it aims for.
GUIDE_MEMORY_GB = {64: 15, 128: 40, 256: 70}
GUIDE_SAMPLES_PER_S = 10


# --- tables -----------------------------------------------------------------------------------------------------------


def print_metrics(
    title: str,
    split: str,
    metrics: dict[str, float],
    kinds: dict[str, str],
) -> None:
    """Rank 0 prints the scores of the cascade beside those of its rivals. kinds: {end of a score's name: row}."""
    if world()[0]:
        return
    rows: dict[str, dict[str, float]] = {}
    if f"{split}/psnr_regression" in metrics:
        kinds = kinds | REGRESSION
    for kind, row in kinds.items():
        rows[row] = {}
        for score in scores_in(metrics, split):
            name = f"{split}/{score}{kind}"
            if name in metrics:
                rows[row][score.replace("projection_error", "projection")] = metrics[name]
    for score, row in CHECKS.items():
        if f"{split}/{score}" in metrics:
            rows[row] = {"psnr": metrics[f"{split}/{score}"]}
    print_table(title, rows)

    # of several samples
    if f"{split}/coverage_90" in metrics:
        shares = [f"{share:.0%}: {metrics[f'{split}/{name}']:.1%}" for name, share in COVERAGES.items()]
        print(f"true voxels within the samples' intervals: {', '.join(shares)}", flush=True)


def scores_in(metrics: dict, split: str) -> list[str]:
    """The scores of a volume that are among some metrics of a split."""
    names = [name.removeprefix(f"{split}/") for name in metrics]
    return [name for name in names if name in SCORES + FIELD_SCORES or PROJECTION_ERROR.fullmatch(name)]


def comparable_facts(
    data: Data,
    views: list[dict],
    size: list[int],
) -> dict:
    """What must be the same in two runs whose tests stand side by side. size: of the last volume."""
    return {"patients": data.fingerprint, "views": views, "volume_size": size}


def read_regression(run_folder: str | None, facts: dict) -> dict[str, float]:
    """All ranks: the scores, by name, of the finished --regression run that is to stand beside this one.

    facts: those of comparable_facts. Raises InputError for a run of another test.
    """
    if run_folder is None:
        return {}
    with agree_on_errors():
        return load_regression(Path(run_folder) / "summary.json", facts)


def load_regression(path: Path, facts: dict) -> dict[str, float]:
    """See read_regression."""
    advice = "--regression_run wants the folder of a finished run with --regression"
    try:
        summary = json.loads(path.read_text())
        regression = summary["regression"]
        comparable = {name: summary[name] for name in facts}
        scores = {f"test/{score}_regression": summary[f"test/{score}"] for score in scores_in(summary, "test")}
    except OSError as error:
        raise InputError(f"{path}: not read ({error.strerror}); {advice}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: not the summary of a cascade; {advice}") from None
    if not regression or "test/psnr_regression" not in scores:
        raise InputError(f"{path}: of a run by diffusion, or not tested; {advice}")
    if comparable != facts:
        raise InputError(f"{path}: of other patients, views or another last stage; {advice} on the same ones")
    return scores


def print_stages(plan: list[StagePlan]) -> None:
    """Rank 0 prints what each stage takes, beside the guide's table."""
    if world()[0]:
        return
    rows = {}
    for stage in plan:
        size = stage.config["volume_size"]
        guide = GUIDE_MEMORY_GB.get(size[0]) if len(set(size)) == 1 else None
        rows[stage.name] = {
            "volume": "x".join(map(str, size)),
            "batch/GPU": stage.batch.size,
            "parameters": stage.parameters or "-",
            "memory GB": f"{stage.memory:.2f}" if stage.memory else "-",
            "guide GB": guide or "-",
        }
    print_table("stages", rows)


def begin_speed(
    stage: StagePlan,
    log: RunLog,
    device: torch.device,
) -> None:
    """Speed and memory are this stage's from here on, not those of the stages measured or trained before."""
    log.context = {"stage": stage.number + 1}
    log.forget_flops()
    log.rates.clear()
    log.last.pop("train/peak_memory_gb", None)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def note_speed(stage: StagePlan, log: RunLog) -> None:
    """Keep a stage's memory and its usual throughput for summary.json, where this run has trained it."""
    if log.rates:
        log.last[f"train/samples_per_s_per_gpu/{stage.name}"] = statistics.median(log.rates) / world()[1]
        log.last[f"train/peak_memory_gb/{stage.name}"] = log.last["train/peak_memory_gb"]


def finish_cascade(
    plan: list[StagePlan],
    models: list[StageNet],
    training: TrainingRun,
    data: Data,
    values: dict,
    begun: float,
) -> None:
    """All ranks, after the test: the weights, the summary and the curves of a run.

    values: of the flags. begun: time.time() at its start.
    """
    export_weights(stage_weights(plan, models), training.run_folder / "model.safetensors")
    last = plan[len(models) - 1]
    facts = {
        "stages": len(models),
        "effective_batch_size": last.effective_batch_size,
        "regression": values["regression"],
    }
    facts |= comparable_facts(data, values["views"], last.config["volume_size"])
    finish_run(training, begun, facts)
    print_speed(plan[: len(models)], training.log, models[-1].position.device)
    say_where(training.run_folder)


def print_speed(
    plan: list[StagePlan],
    log: RunLog,
    device: torch.device,
) -> None:
    """Rank 0 prints throughput and memory of each stage beside what the guide aims for, - for those of another call."""
    speeds = {stage.name: log.last.get(f"train/samples_per_s_per_gpu/{stage.name}") for stage in plan}
    if world()[0] or not any(speeds.values()):
        return
    total = None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / 2**30

    rows = {}
    for name, samples_per_s in speeds.items():
        # an earlier call may have trained it
        memory = log.last[f"train/peak_memory_gb/{name}"] if samples_per_s else None
        rows[name] = {
            "samples/s/GPU": f"{samples_per_s:.2f}" if samples_per_s else "-",
            "guide's aim": f"> {GUIDE_SAMPLES_PER_S}",
            "memory GB": f"{memory:.2f}" if samples_per_s else "-",
            "share": f"{memory / total:.0%}" if samples_per_s and total else "-",
            "share's aim": "70-80%",
        }
    print_table("speed", rows)


# --- the banner -------------------------------------------------------------------------------------------------------


def print_run(
    plan: list[StagePlan],
    last: int,
    training: TrainingRun,
    data: Data,
    engine: str,
    more: dict[str, str],
    values: dict,
    source: dict[str, str],
) -> None:
    """Rank 0 prints the banner and the table of the stages.

    last: the last stage of this run. engine: how Accelerate sees the processes. more: further rows. values, source: of
    the flags by name, and where each comes from.
    """
    ranks = training.log.ranks
    prediction = "v" if values["v_parameterization"] else "noise"
    diffusion = f"{values['num_timesteps']} steps, cosine, {prediction} prediction, DDIM {values['ddim_steps']}"
    if values["regression"]:
        diffusion = "none: regression, the volume in one step"
    lr = f"{values['learning_rate']:g} ({source['learning_rate']}), {values['scheduler']}, not scaled"
    recomputed = values["gradient_checkpointing"]

    rows = {
        "launcher": f"{ranks.launcher}, world size {ranks.world_size}, {ranks.device}, by Accelerate ({engine})",
        "batch": describe_batches(plan),
        "learning rate": lr,
        "diffusion": f"{diffusion}, EMA {values['ema_decay']:g}",
        "recomputation": describe_recomputation(plan, recomputed, source["gradient_checkpointing"]),
    }
    rows |= more
    split_source = "split files" if values["split_files"] else f"split seed {values['split_seed']}"
    size = plan[last].config["volume_size"]
    rows |= describe_data(data, size, split_source)
    rows |= describe_position(plan[: last + 1], training)

    print_start("X-RAY TO CT CASCADE", ranks, training, rows)
    print_stages(plan)
    warn_of_full_memory(data, size)


def describe_data(
    data: Data,
    size: list[int],
    split_source: str,
) -> dict[str, str]:
    """The banner's rows about the patients and how they are read. size: of the last stage's volume."""
    patients = ", ".join(f"{len(places)} {name}" for name, places in data.split.items())
    num_views = len(data.greys)
    views = f"{num_views} view{'s' * (num_views > 1)} at {data.decoded.img_size}^2"
    greys = []
    for fit in data.greys:
        line = f"{fit.slope:.3f} * line integral {fit.offset:+.3f}"
        greys.append(f"{line} ({fit.view.name}, r = {fit.correlation:.3f})")
    kept = f"on disk in {data.decoded.cache_dir}"
    if data.decoded.in_memory:
        kept = f"in memory, {data.set('train', size).gib():.2f} GB per process"
    return {
        "patients": f"{patients} ({split_source})",
        "X-rays": f"{views}; grey = {'; '.join(greys)}",
        "memory": f"decoded patients {kept}",
        "loading": f"{data.decoded.workers} workers per process",
    }


def describe_agreement(prior: Prior, agreement: bool) -> str:
    """The banner's row about what volumes owe the X-rays, and how far the first stage's start is from the truth."""
    away = f"the first stage starts {float(hu_difference(torch.tensor(prior.std))):.0f} HU (rms) from the truth"
    if not agreement:
        return f"no (--no-xray_agreement); {away}"
    noise = ", ".join(f"{fit.noise:.3f} ({fit.view.name})" for fit in prior.greys)
    return f"volumes are held to them, within line integrals of {noise}; {away}"


def describe_batches(plan: list[StagePlan]) -> str:
    """The banner's row about the batch of each stage."""
    batches = []
    for stage in plan:
        batch = f"{stage.batch.size} per GPU x {stage.batch.accumulation} accumulation x {world()[1]}"
        source = f" ({stage.batch.source})" if stage.batch.source else ""
        product = f"{batch} = {stage.effective_batch_size}{source}"
        batches.append(f"{stage.name}: {stage.batch.describe() if stage.batch.total else product}")
    return "; ".join(batches)


def describe_recomputation(
    plan: list[StagePlan],
    asked: bool | None,
    source: str,
) -> str:
    """The banner's row about where activations are recomputed, and why. asked: by a flag, from `source`."""
    if asked is not None:
        return f"{'on' if asked else 'off'} ({source})"
    names = [stage.name for stage in plan if stage.batch.recomputed]
    return f"on in {', '.join(names)} (one patient did not fit without)" if names else "off (default)"


def describe_position(plan: list[StagePlan], training: TrainingRun) -> dict[str, str]:
    """The banner's rows about where the run stands and ends. plan: the stages up to the last of this run."""
    progress = training.progress
    steps = ", ".join(f"{stage.name} {stage.steps}" for stage in plan)
    start = f"step {progress.step}, {plan[progress.stage].name}, epoch {progress.epoch + 1}"
    return {"steps": f"{training.last_step}: {steps}", "start": start}


def warn_of_full_memory(data: Data, size: list[int]) -> None:
    """Rank 0 says so where --cache_in_memory takes more than is free."""
    gib = data.set("train", size).gib() if data.decoded.in_memory else 0.0
    free = available_ram_gb()
    if gib > free:
        print_main(f"warning: --cache_in_memory takes {gib:.1f} GB per process; {free:.1f} are free")


# --- results on disk --------------------------------------------------------------------------------------------------


def write_evaluation(
    run_folder: Path,
    facts: dict,
    example: Example | None,
    data: Data,
) -> None:
    """Rank 0 writes, for --eval_only, the metrics of the test patients, and the figures."""
    if world()[0]:
        return
    text = json.dumps(facts, indent=2) + "\n"
    write_result(run_folder / "eval_test.json", text.encode())
    if example:
        for name, figure in draw_evaluation("eval_test", example, facts).items():
            save_figure(run_folder / "figures" / f"{name}.png", figure)
    written = f"{run_folder}/eval_test.json, {run_folder}/figures/eval_test.png"
    patients = counted(len(data.ids["test"]), "patient")
    print(f"{patients}; written: {written}", flush=True)


def grid_of(
    patient: Patient,
    size: list[int],
    extent: list[float],
) -> np.ndarray:
    """(4, 4) from voxels to mm: the place and field of view of the CT beside the X-rays; else `extent`, centred."""
    if patient.ct is None:
        voxel = np.array(extent) / size
        grid = np.diag([*voxel, 1.0])
        grid[:3, 3] = -voxel * (np.array(size) - 1) / 2
        return grid
    hu, affine = read_ct(patient.ct)
    factor = np.array(hu.shape) / size
    grid = affine @ np.diag([*factor, 1.0])
    # the first voxel's centre
    grid[:3, 3] += affine[:3, :3] @ ((factor - 1) / 2)
    return grid


def write_volume(
    path: Path,
    volume: Tensor,
    grid: np.ndarray,
) -> None:
    """A volume (X, Y, Z) in HU as NIfTI, in whole numbers. Raises RunError on a full disk."""
    import nibabel

    values = volume.round().to(torch.int16).cpu().numpy()
    image = nibabel.Nifti1Image(values, grid)
    image.header.set_xyzt_units("mm")
    try:
        write_atomically(path, lambda file: file.write(gzip.compress(image.to_bytes())))
    except OSError as error:
        raise RunError(f"{path}: not written ({error.strerror}); make room") from None
