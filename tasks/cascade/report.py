"""Guide 3's tables, banner rows, figures, and volumes as NIfTI."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from checkpoint_utils import export_weights
from cli_utils import RunError
from distributed_utils import print_main, world
from figure_utils import figure_text
from hardware_utils import available_ram_gb
from logging_utils import RunLog, print_table, save_figure, write_result
from loop_utils import TrainingRun, finish_run, print_start, say_where
from manifest_utils import write_atomically
from tasks.cascade.data import Data
from tasks.cascade.diffusion import Draw
from tasks.cascade.files import Patient, read_ct
from tasks.cascade.metrics import CHECKS, KINDS
from tasks.cascade.model import StageNet
from tasks.cascade.plan import StagePlan, stage_weights
from tasks.cascade.projector import VIEWS, as_image, project, spacing_of, to_hu

# The guide's table of GB by side, for its batches of 16, 8 and 4, and the throughput per GPU that it aims for.
GUIDE_MEMORY_GB = {64: 15, 128: 40, 256: 70}
GUIDE_SAMPLES_PER_S = 10
SLICES = ("axial slice", "coronal slice", "sagittal slice")
VIEW_NAMES = {"pa": "frontal", "lat": "lateral"}


# --- tables -----------------------------------------------------------------------------------------------------------


def print_metrics(
    title: str,
    split: str,
    metrics: dict[str, float],
) -> None:
    """Rank 0 prints the scores of the cascade beside those of the two baselines."""
    if world()[0]:
        return
    rows: dict[str, dict[str, float]] = {}
    for kind, row in KINDS.items():
        rows[row] = {}
        for score in ("psnr", "ssim", "mae_hu", "projection_error_pa", "projection_error_lat"):
            name = f"{split}/{score}{kind}"
            if name in metrics:
                rows[row][score.replace("projection_error", "projection")] = metrics[name]
    for score, row in CHECKS.items():
        if f"{split}/{score}" in metrics:
            rows[row] = {"psnr": metrics[f"{split}/{score}"]}
    print_table(title, rows)


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
    for name in ("train/samples_per_s", "train/peak_memory_gb"):
        log.last.pop(name, None)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def note_speed(stage: StagePlan, log: RunLog) -> None:
    """Keep a stage's throughput and memory for summary.json, where this run has trained it."""
    if "train/samples_per_s" in log.last:
        log.last[f"train/samples_per_s_per_gpu/{stage.name}"] = log.last["train/samples_per_s"] / world()[1]
        log.last[f"train/peak_memory_gb/{stage.name}"] = log.last["train/peak_memory_gb"]


def finish_cascade(
    plan: list[StagePlan],
    models: list[StageNet],
    training: TrainingRun,
    begun: float,
    device: torch.device,
) -> None:
    """All ranks, after the test: the weights, the summary and the curves of a run. begun: time.time() at its start."""
    export_weights(stage_weights(plan, models), training.run_folder / "model.safetensors")
    last = plan[len(models) - 1]
    facts = {"stages": len(models), "effective_batch_size": last.effective_batch_size}
    finish_run(training, begun, facts)
    print_speed(plan, training.log, device)
    say_where(training.run_folder)


def print_speed(
    plan: list[StagePlan],
    log: RunLog,
    device: torch.device,
) -> None:
    """Rank 0 prints throughput and memory of each stage that was trained, beside what the guide aims for."""
    if world()[0]:
        return
    total = None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / 2**30

    # a stage that an earlier run has trained is left out
    rows = {}
    for stage in plan:
        samples_per_s = log.last.get(f"train/samples_per_s_per_gpu/{stage.name}")
        if samples_per_s is None:
            continue
        memory = log.last[f"train/peak_memory_gb/{stage.name}"]
        rows[stage.name] = {
            "samples/s/GPU": f"{samples_per_s:.2f}",
            "guide's aim": f"> {GUIDE_SAMPLES_PER_S}",
            "memory GB": f"{memory:.2f}",
            "share": f"{memory / total:.0%}" if total else "-",
            "share's aim": "70-80%",
        }
    if rows:
        print_table("speed", rows)


# --- the banner -------------------------------------------------------------------------------------------------------


def print_run(
    plan: list[StagePlan],
    last: int,
    training: TrainingRun,
    data: Data,
    engine: str,
    reason: str,
    values: dict,
    source: dict[str, str],
) -> None:
    """Rank 0 prints the banner and the table of the stages.

    last: the last stage of this run. engine: how Accelerate sees the processes. reason: for the precision. values,
    source: of the flags by name, and where each comes from.
    """
    ranks = training.log.ranks
    prediction = "v" if values["v_parameterization"] else "noise"
    diffusion = f"{values['num_timesteps']} steps, cosine, {prediction} prediction, DDIM {values['ddim_steps']}"
    lr = f"{values['learning_rate']:g} ({source['learning_rate']}), {values['scheduler']}, not scaled"
    recomputed = values["gradient_checkpointing"]

    rows = {
        "launcher": f"{ranks.launcher}, world size {ranks.world_size}, {ranks.device}, by Accelerate ({engine})",
        "batch": describe_batches(plan),
        "learning rate": lr,
        "precision": reason,
        "diffusion": f"{diffusion}, EMA {values['ema_decay']:g}",
        "recomputation": describe_recomputation(plan, recomputed, source["gradient_checkpointing"]),
    }
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
    for view, fit in zip(VIEWS, data.greys, strict=False):
        line = f"{fit.slope:.3f} * line integral {fit.offset:+.3f}"
        greys.append(f"{line} ({view}, r = {fit.correlation:.3f})")
    kept = f"on disk in {data.decoded.cache_dir}"
    if data.decoded.in_memory:
        kept = f"in memory, {data.set('train', size).gib():.2f} GB per process"
    return {
        "patients": f"{patients} ({split_source})",
        "X-rays": f"{views}; grey = {'; '.join(greys)}",
        "memory": f"decoded patients {kept}",
        "loading": f"{data.decoded.workers} workers per process",
    }


def describe_batches(plan: list[StagePlan]) -> str:
    """The banner's row about the batch of each stage."""
    batches = []
    for stage in plan:
        batch = f"{stage.batch.size} per GPU x {stage.batch.accumulation} accumulation x {world()[1]}"
        source = f" ({stage.batch.source})" if stage.batch.source else ""
        batches.append(f"{stage.name}: {batch} = {stage.effective_batch_size}{source}")
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


# --- figures ----------------------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """A patient for a figure. volumes: sampled, of each stage. batch: of which it is the first. mean, back: baselines.

    All volumes are (1, 1, X, Y, Z).
    """

    volumes: list[Tensor]
    batch: dict
    mean: Tensor
    back: Tensor


class Row(NamedTuple):
    """A row of a figure: its name, and an image for each column, None for a place that stays free.

    grey_values: the images behind the slices are X-rays, and not projections.
    """

    name: str
    images: list[np.ndarray | None]
    grey_values: bool = False


def middle_slices(volume: Tensor) -> list[np.ndarray]:
    """Axial, coronal and sagittal slices through the middle of (X, Y, Z), as one looks at them (front up, head up)."""
    volume = volume.float().cpu()
    x, y, z = (side // 2 for side in volume.shape)
    axial = volume[:, :, z].transpose(0, 1).flip(0, 1)
    coronal = as_image(volume[:, y])
    sagittal = as_image(volume[x])
    return [axial.numpy(), coronal.numpy(), sagittal.numpy()]


def draw_rows(
    heading: str,
    columns: list[str],
    rows: list[Row],
):
    """A matplotlib figure: one row of images per name, below the columns' titles.

    The first three columns are slices, shown from -1000 to 1000 HU. Projections of one column are on the scale of its
    first; grey values are on their own.
    """
    from matplotlib.figure import Figure

    width = 2.2 * len(columns) + 1
    height = 2.3 * len(rows) + 0.8
    figure = Figure(figsize=(width, height))
    figure.suptitle(heading, fontsize=11, y=1 - 0.12 / height)
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for cell, title in zip(axes[0], columns, strict=True):
        cell.set_title(title, fontsize=9)

    scales: dict[int, tuple[float, float]] = dict.fromkeys(range(len(SLICES)), (-1.0, 0.0))
    for cells, row in zip(axes, rows, strict=True):
        cells[0].set_ylabel(row.name, fontsize=9)
        for place, cell in enumerate(cells):
            cell.set(xticks=[], yticks=[])
            image = row.images[place] if place < len(row.images) else None
            if image is None:
                for side in cell.spines.values():
                    side.set_visible(False)
                continue
            scale = (-1.0, float(image.max()))
            if not row.grey_values or place < len(SLICES):
                scale = scales.setdefault(place, (float(image.min()), float(image.max())))
            cell.imshow(image, cmap="gray", vmin=scale[0], vmax=scale[1], aspect="auto")
    figure.subplots_adjust(left=0.6 / width, right=0.99, bottom=0.01, top=1 - 0.75 / height, wspace=0.03, hspace=0.05)
    return figure


def draw_inputs(
    stage: StagePlan,
    data: Data,
    scheduler,
    make_batch: Callable[[dict], tuple[dict, Draw]],
) -> dict:
    """A figure, by name, of what the model of a stage is given in training, and what is to come out.

    make_batch(items): a batch of the first epoch, and what is drawn for it.
    """
    batch, draw = make_batch(data.first_items("train", stage.config["volume_size"]))
    noisy = scheduler.add_noise(batch["volume"], draw.noise, draw.timestep)
    rows = []
    for i, place in enumerate(batch["index"]):
        name = data.patients[place].id
        xrays = list(batch["seen"][i].cpu().numpy())
        noisy_slices = middle_slices(noisy[i, 0])
        label = f"input: noisy CT\nt = {int(draw.timestep[i])}"
        rows.append(Row(label, noisy_slices + xrays, grey_values=True))
        if draw.previous:
            label = f"input: stage before\nnoise {float(draw.previous.level[i]):.2f}"
            rows.append(Row(label, middle_slices(draw.previous.volume[i, 0])))
        rows.append(Row(f"target: CT of\n{figure_text(name, 16)}", middle_slices(batch["volume"][i, 0])))

    num_views = batch["seen"].shape[1]
    columns = [*SLICES, *(f"input X-ray, {VIEW_NAMES[view]}" for view in VIEWS[:num_views])]
    heading = f"{figure_text(stage.name)}: what the net is given in training (t of {scheduler.num_train_timesteps})"
    return {f"{stage.name}_inputs": draw_rows(heading, columns, rows)}


def draw_result(example: Example, stages: list[dict]):
    """X-rays, true and sampled volume of one patient, of every stage, and the projections of each volume."""
    stage_names = [stage["name"] for stage in stages]
    batch = example.batch
    xrays = list(batch["xrays"][0].cpu().numpy())
    views = VIEWS[: len(xrays)]

    def volume_row(name: str, volume: Tensor) -> Row:
        spacing = spacing_of(batch["extent"][:1], volume.shape[2:])
        projections = [project(volume, spacing, view)[0, 0].cpu().numpy() for view in views]
        return Row(name, middle_slices(volume[0, 0]) + projections)

    rows = [Row("input X-rays", [None, None, None, *xrays], grey_values=True)]
    rows.append(volume_row("true CT", batch["volume"][:1]))
    for name, volume in reversed(list(zip(stage_names, example.volumes, strict=False))):
        size = " x ".join(map(str, volume.shape[2:]))
        rows.append(volume_row(f"sample of {figure_text(name, 16)}\n{size}", volume))
    rows.append(volume_row("mean of the training CTs", example.mean))
    rows.append(volume_row("back-projected X-rays", example.back))
    columns = [*SLICES, *(f"{VIEW_NAMES[view]} projection" for view in views)]
    return draw_rows("one patient: middle slices, and the projections beside the X-rays", columns, rows)


# --- results on disk --------------------------------------------------------------------------------------------------


def write_evaluation(
    run_folder: Path,
    facts: dict,
    example: Example | None,
    stages: list[dict],
    data: Data,
) -> None:
    """Rank 0 writes, for --eval_only, the metrics of the test patients, and a figure of the first."""
    if world()[0]:
        return
    text = json.dumps(facts, indent=2) + "\n"
    write_result(run_folder / "eval_test.json", text.encode())
    if example:
        save_figure(run_folder / "figures" / "eval_test.png", draw_result(example, stages))
    written = f"{run_folder}/eval_test.json, {run_folder}/figures/eval_test.png"
    print(f"{len(data.ids['test'])} patients; written: {written}", flush=True)


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
    """A volume (X, Y, Z) in -1..1 as NIfTI in HU. Raises RunError on a full disk."""
    import nibabel

    values = to_hu(volume).round().to(torch.int16).cpu().numpy()
    image = nibabel.Nifti1Image(values, grid)
    image.header.set_xyzt_units("mm")
    try:
        write_atomically(path, lambda file: file.write(gzip.compress(image.to_bytes())))
    except OSError as error:
        raise RunError(f"{path}: not written ({error.strerror}); make room") from None
