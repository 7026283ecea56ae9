"""Guide 2's input and step against MONAI's own trainer, on the same model, batch and data, in one run.

    python benchmarks/survival_input.py                                          # on CPU about a minute
    python benchmarks/survival_input.py --only_step --resnet resnet50 --base_channels 64 --image_size 256 256 64 \
        --batch_size 24                                                          # the published size, on a GPU

1. Reading an epoch from the disk cache over reading it anew.  2. Samples/s of train_survival_distributed.py over
monai.engines.SupervisedTrainer with a plain Dataset, and with SmartCacheDataset against SmartCacheDataset (medians of
alternating rounds), and the share of time that the script waits for data.  3. One training step in fp32 (TF32 on a
GPU), bf16, channels_last_3d, compiled: ratios, on a GPU also memory and the share of the speed of a large bf16 product.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from old.distributed_utils import Ranks, create_distributed_dataloader
from old.hardware_utils import out_of_memory
from old.logging_utils import RunLog
from old.loop_utils import LossScaler, Progress, TrainingRun, next_epoch
from tasks.survival.cohort import Cohort, read_cohort
from tasks.survival.data import MultiGPUSurvivalDataset
from tasks.survival.folds import Fold

# What is measured: the script's own functions.
from train_survival_distributed import (
    LOSSES,
    CoxMemory,
    Learner,
    build_model,
    cox_loss,
    make_dataset,
    make_optimizer,
    parse_args,
    train_one_epoch,
)

ROOT = Path(__file__).resolve().parent.parent


def seconds(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def one_process(device: torch.device) -> Ranks:
    """A single process without a launcher."""
    return Ranks(0, 0, 1, device, "python")


def new_model(args: argparse.Namespace) -> torch.nn.Module:
    """The script's model with one output, in fp32 and with the same first weights each time."""
    return build_model(args, "no", 1, None, one_process(args.device))


# --- reading ----------------------------------------------------------------------------------------------------------


def read_epochs(cohort: Cohort, image_size: list[int], folder: Path) -> dict:
    """Seconds for reading every case once: anew, into the cache, from it."""
    rows = np.arange(len(cohort))
    cache_dir = str(folder / "reading")
    plain = MultiGPUSurvivalDataset(cohort, rows=rows, image_size=image_size)
    kept = MultiGPUSurvivalDataset(cohort, rows=rows, image_size=image_size, cache_dir=cache_dir)

    def read(data: MultiGPUSurvivalDataset) -> float:
        return seconds(lambda: [data[i] for i in range(len(data))])

    uncached = read(plain)
    filling = read(kept)
    cached = statistics.median(read(kept) for _ in range(3))
    return {
        "cached epoch over uncached": uncached / cached,
        "filling the cache over uncached": uncached / filling,
        "seconds uncached": uncached,
        "seconds cached": cached,
    }


# --- the script against MONAI -----------------------------------------------------------------------------------------


class Script:
    """Epochs of the script's own loop."""

    def __init__(self, args: argparse.Namespace, cohort: Cohort, folder: Path, smart: bool):
        self.args = argparse.Namespace(**vars(args))
        self.args.use_smart_cache = smart
        self.args.cache_dir = str(folder / "cache")
        self.args.log_every = 10**6

        rows = np.arange(len(cohort))
        self.fold = Fold(cohort, "all", rows, rows, {})
        model = new_model(self.args)
        self.learner = Learner(
            model=model,
            optimizer=make_optimizer(model, self.args),
            scaler=LossScaler(args.device, "no"),
            memory=CoxMemory(0, args.device),
            wrapped=model,
        )

        # The script's own order of the cases, which changes with the epoch.
        self.data = make_dataset(cohort, rows, self.args, train=True)
        self.loader = create_distributed_dataloader(
            self.data,
            self.args.batch_size,
            num_workers=self.args.num_workers,
            drop_last=False,
        )
        self.training = self.start(folder / f"log_{smart}")
        self.waits = []

    def start(self, run_folder: Path) -> TrainingRun:
        """A training without an end, which saves nothing."""
        run_folder.mkdir()
        flags = {name: value for name, value in vars(self.args).items() if name != "device"}
        log = RunLog(run_folder, one_process(self.args.device), LOSSES, 10**6, self.args.log_every, "no")
        log.open(argparse.Namespace(**flags))
        return TrainingRun(
            run_folder=run_folder,
            progress=Progress(),
            last_step=10**9,
            planned_steps=10**9,
            effective_batch_size=self.args.batch_size,
            precision="no",
            log=log,
            contents=dict,
            max_bad_steps=self.args.max_bad_steps,
        )

    def train(self) -> float:
        """One epoch; samples/s, with the change of the cache before it."""

        def epoch() -> None:
            train_one_epoch(self.learner, self.fold, self.loader, self.training, self.args)
            # This waits for the GPU.
            self.training.log.collect()

        passed = seconds(epoch)
        self.waits.append(self.training.log.waited / passed)
        next_epoch(self.training)
        return self.loader.batch_sampler.used / passed


def monai_transforms(args: argparse.Namespace):
    """Reading, windowing, resizing and flips as MONAI's tutorials have them."""
    from monai.transforms import Compose, LoadImaged, RandFlipd, Resized, ScaleIntensityRanged

    low, high = args.hu_window
    steps = [
        LoadImaged("image", reader="NibabelReader", image_only=True, ensure_channel_first=True),
        ScaleIntensityRanged("image", a_min=low, a_max=high, b_min=0.0, b_max=1.0, clip=True),
        Resized("image", args.image_size, mode="area"),
    ]
    for axis in range(3):
        steps.append(RandFlipd("image", prob=0.5, spatial_axis=axis))
    return Compose(steps)


def monai_dataset(args: argparse.Namespace, cohort: Cohort, smart: bool):
    """MONAI's plain Dataset, or its SmartCacheDataset."""
    from monai.data import Dataset, SmartCacheDataset

    items = []
    for path, duration, event in zip(cohort.path, cohort.time, cohort.event, strict=True):
        items.append({"image": path, "label": torch.tensor([duration, float(event)])})
    transforms = monai_transforms(args)
    if not smart:
        return Dataset(items, transforms)
    return SmartCacheDataset(
        items,
        transforms,
        cache_rate=args.cache_rate,
        replace_rate=args.replace_rate,
        progress=False,
        num_init_workers=args.num_workers or 1,
        num_replace_workers=args.num_workers or 1,
    )


class Monai:
    """Epochs of monai.engines.SupervisedTrainer."""

    def __init__(self, args: argparse.Namespace, cohort: Cohort, smart: bool):
        from monai.data import DataLoader
        from monai.engines import SupervisedTrainer
        from monai.handlers import SmartCacheHandler

        def loss(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            label = label.cpu().double()
            return cox_loss(outputs[:, 0], label[:, 0], label[:, 1] == 1)

        data = monai_dataset(args, cohort, smart)
        self.cases = len(data)
        workers = 0 if smart else args.num_workers
        model = new_model(args)
        self.trainer = SupervisedTrainer(
            device=args.device,
            max_epochs=1,
            train_data_loader=DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=workers),
            network=model,
            optimizer=make_optimizer(model, args),
            loss_function=loss,
            amp=False,
            decollate=False,
            train_handlers=[SmartCacheHandler(data)] if smart else None,
        )

    def train(self) -> float:
        """One epoch; samples/s."""
        self.trainer.state.max_epochs = self.trainer.state.epoch + 1
        return self.cases / seconds(self.trainer.run)


def against_monai(args: argparse.Namespace, cohort: Cohort, folder: Path, rounds: int) -> dict:
    """Samples/s of the script and of MONAI by turns, their ratios, and the script's wait for data."""
    trainers = {
        "script": Script(args, cohort, folder, False),
        "MONAI, Dataset": Monai(args, cohort, False),
        "script, SmartCache": Script(args, cohort, folder, True),
        "MONAI, SmartCache": Monai(args, cohort, True),
    }
    # The first round warms up: it fills the script's disk cache.
    speeds = {name: [] for name in trainers}
    for number in range(rounds + 1):
        for name, trainer in trainers.items():
            speed = trainer.train()
            if number:
                speeds[name].append(speed)

    scripts = ("script", "script, SmartCache")
    for name in scripts:
        trainers[name].data.close()
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    figures = {f"{name}: samples/s": value for name, value in middle.items()}
    figures["script over MONAI with a plain Dataset"] = middle["script"] / middle["MONAI, Dataset"]
    figures["script over MONAI, both with SmartCache"] = middle["script, SmartCache"] / middle["MONAI, SmartCache"]
    for name in scripts:
        figures[f"{name}: share of time waiting for data"] = statistics.median(trainers[name].waits[1:])
    return figures


# --- one training step in several forms -------------------------------------------------------------------------------


class Variant(NamedTuple):
    """A form of the step, by the name that is printed."""

    name: str
    dtype: torch.dtype
    channels_last: bool = False
    compiled: bool = False


VARIANTS = (
    Variant("fp32", torch.float32),
    Variant("bf16", torch.bfloat16),
    Variant("bf16 + channels_last_3d", torch.bfloat16, channels_last=True),
    Variant("bf16 + channels_last_3d + compile", torch.bfloat16, channels_last=True, compiled=True),
    Variant("fp32 + channels_last_3d", torch.float32, channels_last=True),
)
TF32 = Variant("TF32", torch.float32)

# Each ratio is of the first one's samples/s over the second one's.
RATIOS = (
    ("bf16", "fp32"),
    ("fp32 + channels_last_3d", "fp32"),
    ("bf16 + channels_last_3d", "bf16"),
    ("bf16 + channels_last_3d + compile", "bf16 + channels_last_3d"),
)


class Batch(NamedTuple):
    """Images on the device, and their outcomes on the CPU."""

    images: torch.Tensor
    time: torch.Tensor
    event: torch.Tensor


def synchronize() -> None:
    """Wait for the GPU where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_batch(args: argparse.Namespace) -> Batch:
    """As many made-up cases as a batch has."""
    images = torch.rand([args.batch_size, 1, *args.image_size], device=args.device)
    durations = np.random.default_rng(0).random(args.batch_size)
    event = np.arange(args.batch_size) % 3 == 0
    return Batch(images, torch.from_numpy(durations), torch.from_numpy(event))


def seconds_of_step(args: argparse.Namespace, variant: Variant, batch: Batch, repeats: int) -> float:
    """The median of some steps, after two that warm up."""
    allow = variant.name == "TF32"
    torch.backends.cudnn.allow_tf32 = allow
    torch.backends.cuda.matmul.allow_tf32 = allow
    layout = torch.channels_last_3d if variant.channels_last else torch.contiguous_format
    risk_net = new_model(args)
    model = torch.nn.Sequential(risk_net.backbone, risk_net.head).to(memory_format=layout)
    optimizer = make_optimizer(model, args)
    run = torch.compile(model) if variant.compiled else model
    mixed = variant.dtype != torch.float32

    def step() -> None:
        with torch.autocast(args.device.type, variant.dtype, enabled=mixed):
            outputs = run(batch.images.contiguous(memory_format=layout)).float()
        loss = cox_loss(outputs[:, 0], batch.time, batch.event)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def finished_step() -> None:
        step()
        synchronize()

    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    finished_step()
    return statistics.median(seconds(finished_step) for _ in range(repeats))


def step_variants(args: argparse.Namespace, repeats: int) -> dict:
    """Samples/s of a training step (forward, Cox loss, backward, AdamW) in several forms, data on the device."""
    on_gpu = args.device.type == "cuda"
    batch = random_batch(args)
    figures = {}
    speeds = {}
    for variant in (*VARIANTS, TF32) if on_gpu else VARIANTS:
        name = variant.name
        try:
            passed = seconds_of_step(args, variant, batch, repeats)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            figures[f"{name}: samples/s"] = "out of memory"
            continue

        speeds[name] = args.batch_size / passed
        figures[f"{name}: samples/s"] = speeds[name]
        if on_gpu:
            figures[f"{name}: GiB"] = torch.cuda.max_memory_allocated() / 2**30

    for one, other in RATIOS:
        if one in speeds and other in speeds:
            figures[f"{one} over {other}"] = speeds[one] / speeds[other]
    if on_gpu:
        figures |= shares_of_peak(args, batch.images, speeds)
    return figures


def shares_of_peak(args: argparse.Namespace, images: torch.Tensor, speeds: dict[str, float]) -> dict:
    """The FLOP of the bf16 steps as a share of what the GPU makes in a large bf16 product."""
    side = 16384
    factor = torch.rand(side, side, device=args.device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(10):
            factor @ factor
        torch.cuda.synchronize()

    # One product warms up.
    factor @ factor
    torch.cuda.synchronize()
    peak = 2 * side**3 * 10 / seconds(products)

    with FlopCounterMode(display=False) as counter:
        risk_net = new_model(args)
        model = torch.nn.Sequential(risk_net.backbone, risk_net.head)
        model(images[:1]).sum().backward()
    flop = counter.get_total_flops()
    figures = {"TFLOP of one sample": flop / 1e12, "TFLOP/s of a large bf16 product": peak / 1e12}
    for name, speed in speeds.items():
        if name.startswith("bf16"):
            figures[f"{name}: share of that"] = speed * flop / peak
    return figures


# --- command line -----------------------------------------------------------------------------------------------------


def make_cohort(folder: Path, cases: int, matrix: int) -> Cohort:
    """Made-up CTs and their outcomes."""
    command = [sys.executable, "-m", "tools.sample_data", "survival", str(folder)]
    command += ["--num_patients", str(cases), "--matrix", str(matrix)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return read_cohort(str(folder / "dataset.csv"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--matrix", type=int, default=160, help="voxels along the first axis of the made-up CTs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only_step", action="store_true", help="leave out what reads files")
    options, rest = parser.parse_known_args()

    flags = ["--csv_path", "-", "--num_workers", "0", "--batch_size", "8"]
    flags += ["--resnet", "resnet10", "--base_channels", "8", "--image_size", "48", "40", "24"]
    args = parse_args([*flags, *rest])
    on_gpu = torch.cuda.is_available()
    args.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    device_name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{device_name}, torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)

    figures = {}
    folder = Path(tempfile.mkdtemp())
    try:
        if not options.only_step:
            cohort = make_cohort(folder / "data", options.cases, options.matrix)
            figures |= read_epochs(cohort, args.image_size, folder)
            figures |= against_monai(args, cohort, folder, options.rounds)
        figures |= step_variants(args, 5)
    finally:
        shutil.rmtree(folder)
    for name, value in figures.items():
        print(f"{name:<50} {value if isinstance(value, str) else f'{value:10.3f}'}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
