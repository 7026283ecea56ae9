"""Guide 2's input and step against MONAI's own trainer, on the same net, batch and data, in one run.

    python benchmarks/survival_input.py                                          # on CPU about a minute
    python benchmarks/survival_input.py --only_step --resnet resnet50 --base_channels 64 --image_size 256 256 64 \
        --batch_size 24                                                          # the published size, on a GPU

1. Reading an epoch from the disk cache over reading it anew.  2. Samples/s of train_survival_distributed.py over
monai.engines.SupervisedTrainer with a plain Dataset, and with SmartCacheDataset against SmartCacheDataset (medians of
alternating rounds), and the share of time that the script waits for data.  3. One training step in fp32 (TF32 on a
GPU), bf16, channels_last_3d, compiled: ratios, on a GPU also memory and the share of the rate of a large bf16 product.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import train_survival_distributed as tsd
from distributed_utils import Ranks, create_distributed_dataloader
from hardware_utils import out_of_memory
from logging_utils import RunLog
from loop_utils import LossScaler, Progress, TrainingRun, next_epoch
from tasks.survival import data as sd


def seconds(call) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def read_epochs(cohort: sd.Cohort, image_size, folder: Path) -> dict:
    """Seconds for reading every case once: anew, into the cache, from it."""
    rows = np.arange(len(cohort))
    plain = sd.MultiGPUSurvivalDataset(cohort, rows=rows, image_size=image_size)
    kept = sd.MultiGPUSurvivalDataset(cohort, rows=rows, image_size=image_size, cache_dir=str(folder / "reading"))

    def read(data) -> float:
        return seconds(lambda: [data[i] for i in range(len(data))])

    uncached, filling = read(plain), read(kept)
    cached = statistics.median(read(kept) for _ in range(3))
    ratio = {"cached epoch over uncached": uncached / cached, "filling the cache over uncached": uncached / filling}
    return ratio | {"seconds uncached": uncached, "seconds cached": cached}


class Script:
    """Epochs of the script's own loop."""

    def __init__(self, args: argparse.Namespace, cohort: sd.Cohort, folder: Path, smart: bool):
        self.args = argparse.Namespace(**vars(args))
        self.args.use_smart_cache = smart
        self.args.cache_dir = str(folder / "cache")
        self.args.log_every = 10**6
        rows = np.arange(len(cohort))
        ranks = Ranks(0, 0, 1, args.device, "python")
        self.target = tsd.Target(cohort, rows, self.args)
        model = tsd.build_model(self.args, "no", 1, None, ranks)
        optimizer = tsd.make_optimizer(model, self.args)
        self.learner = tsd.Learner(model, optimizer, LossScaler(args.device, "no"), tsd.CoxMemory(0, args.device))
        self.data = tsd.make_dataset(cohort, rows, self.args, train=True)
        self.loader = create_distributed_dataloader(
            self.data, self.args.batch_size, num_workers=self.args.num_workers, drop_last=False
        )
        self.training = self.start(folder / f"log_{smart}", ranks)
        self.waits = []

    def start(self, run_folder: Path, ranks: Ranks) -> TrainingRun:
        """A training without an end, which saves nothing."""
        run_folder.mkdir()
        flags = {name: value for name, value in vars(self.args).items() if name != "device"}
        log = RunLog(run_folder, ranks, tsd.LOSSES, 10**6, self.args.log_every, "no")
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
            tsd.train_one_epoch(self.learner.model, self.learner, self.target, self.loader, self.training, self.args)
            # waits for the GPU
            self.training.log.collect()

        passed = seconds(epoch)
        self.waits.append(self.training.log.waited / passed)
        next_epoch(self.training)
        return self.loader.batch_sampler.used / passed


class Monai:
    """Epochs of monai.engines.SupervisedTrainer with the transforms as MONAI's tutorials have them."""

    def __init__(self, args: argparse.Namespace, cohort: sd.Cohort, smart: bool):
        from monai.data import DataLoader, Dataset, SmartCacheDataset
        from monai.engines import SupervisedTrainer
        from monai.handlers import SmartCacheHandler
        from monai.transforms import Compose, LoadImaged, RandFlipd, Resized, ScaleIntensityRanged

        steps = [LoadImaged("image", reader="NibabelReader", image_only=True, ensure_channel_first=True)]
        steps.append(ScaleIntensityRanged("image", *args.hu_window, 0.0, 1.0, clip=True))
        steps.append(Resized("image", args.image_size, mode="area"))
        steps += [RandFlipd("image", prob=0.5, spatial_axis=axis) for axis in range(3)]
        outcome = zip(cohort.time, cohort.event, strict=True)
        items = [
            {"image": p, "label": torch.tensor([t, float(e)])} for p, (t, e) in zip(cohort.path, outcome, strict=True)
        ]
        if smart:
            options = {"cache_rate": args.cache_rate, "replace_rate": args.replace_rate, "progress": False}
            threads = {"num_init_workers": args.num_workers or 1, "num_replace_workers": args.num_workers or 1}
            data = SmartCacheDataset(items, Compose(steps), **options, **threads)
        else:
            data = Dataset(items, Compose(steps))
        self.cases = len(data)
        loader = DataLoader(
            data, batch_size=args.batch_size, shuffle=True, num_workers=0 if smart else args.num_workers
        )
        model = tsd.build_model(args, "no", 1, None, Ranks(0, 0, 1, args.device, "python"))

        def loss(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            label = label.cpu().double()
            return tsd.cox_loss(outputs[:, 0], label[:, 0], label[:, 1] == 1)

        optimizer = tsd.make_optimizer(model, args)
        self.trainer = SupervisedTrainer(
            args.device, 1, loader, model, optimizer, loss, amp=False, decollate=False,
            train_handlers=[SmartCacheHandler(data)] if smart else None,
        )  # fmt: skip

    def train(self) -> float:
        self.trainer.state.max_epochs = self.trainer.state.epoch + 1
        return self.cases / seconds(self.trainer.run)


def against_monai(args: argparse.Namespace, cohort: sd.Cohort, folder: Path, rounds: int) -> dict:
    made = {"script": Script(args, cohort, folder, False), "MONAI, Dataset": Monai(args, cohort, False)}
    made |= {"script, SmartCache": Script(args, cohort, folder, True), "MONAI, SmartCache": Monai(args, cohort, True)}
    rates = {name: [] for name in made}
    for k in range(rounds + 1):  # the first warms up: it fills the script's disk cache
        for name, trainer in made.items():
            rate = trainer.train()
            rates[name] += [rate] if k else []
    for name in ("script", "script, SmartCache"):
        made[name].data.close()
    middle = {name: statistics.median(values) for name, values in rates.items()}
    found = {f"{name}: samples/s": value for name, value in middle.items()}
    found["script over MONAI with a plain Dataset"] = middle["script"] / middle["MONAI, Dataset"]
    found["script over MONAI, both with SmartCache"] = middle["script, SmartCache"] / middle["MONAI, SmartCache"]
    for name in ("script", "script, SmartCache"):
        found[f"{name}: share of time waiting for data"] = statistics.median(made[name].waits[1:])
    return found


def step_variants(args: argparse.Namespace, repeats: int) -> dict:
    """Samples/s of a training step (forward, Cox loss, backward, AdamW) in several forms, data on the device."""
    device, gpu = args.device, args.device.type == "cuda"
    images = torch.rand(args.batch_size, 1, *args.image_size, device=device)
    noise = np.random.default_rng(0)
    when = torch.from_numpy(noise.random(args.batch_size))
    event = torch.from_numpy(np.arange(args.batch_size) % 3 == 0)
    variants = {"fp32": (torch.float32, False, False), "bf16": (torch.bfloat16, False, False)}
    variants |= {"bf16 + channels_last_3d": (torch.bfloat16, True, False)}
    variants |= {"bf16 + channels_last_3d + compile": (torch.bfloat16, True, True)}
    variants |= {"fp32 + channels_last_3d": (torch.float32, True, False)}
    variants |= {"TF32": (torch.float32, False, False)} if gpu else {}
    found, rates = {}, {}
    for name, (dtype, last, compiled) in variants.items():
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = name == "TF32"
        model = tsd.build_model(args, "no", 1, None, Ranks(0, 0, 1, device, "python"))
        layout = torch.channels_last_3d if last else torch.contiguous_format
        net = torch.nn.Sequential(model.backbone, model.head).to(memory_format=layout)
        optimizer = tsd.make_optimizer(net, args)
        run = torch.compile(net) if compiled else net

        def step(run=run, optimizer=optimizer, dtype=dtype, layout=layout) -> None:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                outputs = run(images.contiguous(memory_format=layout)).float()
            tsd.cox_loss(outputs[:, 0], when, event).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        def wait() -> None:
            if gpu:
                torch.cuda.synchronize()

        if gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            for _ in range(2):
                step()
            wait()
            passed = statistics.median(seconds(lambda step=step: (step(), wait())) for _ in range(repeats))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            found[f"{name}: samples/s"] = "out of memory"
            continue
        rates[name] = args.batch_size / passed
        found[f"{name}: samples/s"] = rates[name]
        if gpu:
            found[f"{name}: GiB"] = torch.cuda.max_memory_allocated() / 2**30
        del model, net, run, optimizer, step
    pairs = [("bf16", "fp32"), ("fp32 + channels_last_3d", "fp32"), ("bf16 + channels_last_3d", "bf16")]
    pairs.append(("bf16 + channels_last_3d + compile", "bf16 + channels_last_3d"))
    for one, other in pairs:
        if one in rates and other in rates:
            found[f"{one} over {other}"] = rates[one] / rates[other]
    if gpu:
        a = torch.rand(16384, 16384, device=device, dtype=torch.bfloat16)
        a @ a
        torch.cuda.synchronize()
        peak = 2 * 16384**3 * 10 / seconds(lambda: ([a @ a for _ in range(10)], torch.cuda.synchronize()))
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            model = tsd.build_model(args, "no", 1, None, Ranks(0, 0, 1, device, "python"))
            torch.nn.Sequential(model.backbone, model.head)(images[:1]).sum().backward()
        each = counter.get_total_flops()
        found |= {"TFLOP of one sample": each / 1e12, "TFLOP/s of a large bf16 product": peak / 1e12}
        for name in rates:
            if name.startswith("bf16"):
                found[f"{name}: share of that"] = rates[name] * each / peak
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--matrix", type=int, default=160, help="voxels along the first axis of the made-up CTs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only_step", action="store_true", help="leave out what reads files")
    options, rest = parser.parse_known_args()
    small = ["--resnet", "resnet10", "--base_channels", "8", "--image_size", "48", "40", "24", "--batch_size", "8"]
    args = tsd.parse_args(["--csv_path", "-", *small, "--num_workers", "0", *rest])
    args.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = {}
    name = torch.cuda.get_device_name() if args.device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    folder = Path(tempfile.mkdtemp())
    try:
        if not options.only_step:
            sizes = ["--num_patients", str(options.cases), "--matrix", str(options.matrix)]
            words = [
                sys.executable,
                str(Path(tsd.__file__).with_name("sample_data.py")),
                "survival",
                str(folder / "data"),
                *sizes,
            ]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            cohort = sd.read_cohort(str(folder / "data" / "dataset.csv"))
            found |= read_epochs(cohort, args.image_size, folder)
            found |= against_monai(args, cohort, folder, options.rounds)
        found |= step_variants(args, 5)
    finally:
        shutil.rmtree(folder)
    for key, value in found.items():
        print(f"{key:<50} {value if isinstance(value, str) else f'{value:10.3f}'}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
