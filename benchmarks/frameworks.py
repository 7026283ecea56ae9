"""The survival script's model and data under its own loop, a bare loop and four trainers, as ratios within one run.

    python benchmarks/frameworks.py                         # a small net, on sample data that it makes
    python benchmarks/frameworks.py --csv_path FILE ...     # flags of train_survival_distributed.py

One process, on a GPU where there is one, without augmentation and loading processes. All take the same batches with the
same weights, in rounds by turns; the first round, and the first steps of each, do not count. On a CPU time is that of
the processor, which other work on the machine hardly changes. A trainer that is not installed is left out. The last
line is a JSON object: ms a step of each, the median of its rounds.
"""

import contextlib
import copy
import importlib.util
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import distributed_utils as du
import train_survival_distributed as script
from utils.loop import Run

ON_GPU = torch.cuda.is_available()
ROUNDS, WARM_UP, STEPS = 4 if ON_GPU else 6, 3, 10
SMALL = "--resnet resnet10 --base_channels 16 --image_size 24 24 16 --batch_size 8 --mixed_precision no"


class RiskLoss(nn.Module):
    """The script's network with its Cox loss, as all trainers but MONAI's want it: a batch in, the loss out."""

    def __init__(self, network: nn.Module, cohort):
        super().__init__()
        self.network = network
        self.time, self.event = torch.from_numpy(cohort.time), torch.from_numpy(cohort.event)

    def loss(self, log_hazard: torch.Tensor, index: list[int]) -> torch.Tensor:
        return script.cox_loss(log_hazard, self.time[index], self.event[index])

    def forward(self, image: torch.Tensor, index: list[int]) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(self.network({"image": image}), index)}


class Case(NamedTuple):
    """What a round has: a fresh copy of the model, its optimizer, its batches, the script's flags and the data set."""

    model: RiskLoss
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    args: Namespace
    data: torch.utils.data.Dataset
    ranks: du.Ranks


class Clock:
    """Seconds between two of a round's steps."""

    def __init__(self):
        self.steps, self.times = 0, []

    def tick(self, *_) -> None:
        """After each optimizer step; the GPU is waited for at the two that count."""
        self.steps += 1
        if self.steps in (WARM_UP, WARM_UP + STEPS):
            if ON_GPU:
                torch.cuda.synchronize()
            self.times.append(time.perf_counter() if ON_GPU else time.process_time())


def collate(items: list[dict]) -> dict:
    """Row numbers stay a list, which no trainer moves to the GPU: the Cox loss reads them on the host."""
    return {"image": torch.stack([item["image"] for item in items]), "index": [item["index"] for item in items]}


# --- the trainers, each with its own loop -----------------------------------------------------------------------------


def this_project(case: Case, clock: Clock) -> None:
    """The loop of train_survival_distributed.py."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        own = {"output_dir": folder, "save_every": 0, "auto_batch": False}
        args = Namespace(**vars(case.args) | own)
        run = Run("benchmark/1", args, case.ranks, "")
        network = case.model.network
        run.choose_batch(network, None)
        loader = du.create_distributed_dataloader(case.data, run.leaf)
        run.begin(network, case.optimizer, args.mixed_precision, WARM_UP + STEPS, ["loss", "events"], {})
        with run:
            for step in run.steps(loader):
                script.cox_step(run, step, loader, args)
                step.update(args.learning_rate)
                clock.tick()


def bare_loop(case: Case, clock: Clock) -> None:
    """The shortest correct loop: no logs, no checkpoints, no guard."""
    for batch in case.loader:
        image = batch["image"].to(case.ranks.device, non_blocking=True)
        case.model(image, batch["index"])["loss"].backward()
        nn.utils.clip_grad_norm_(case.model.parameters(), case.args.grad_clip)
        case.optimizer.step()
        case.optimizer.zero_grad(set_to_none=True)
        clock.tick()


def accelerate(case: Case, clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not ON_GPU, mixed_precision=case.args.mixed_precision)
    model, optimizer = accelerator.prepare(case.model, case.optimizer)
    for batch in case.loader:
        image = batch["image"].to(accelerator.device, non_blocking=True)
        accelerator.backward(model(image, batch["index"])["loss"])
        accelerator.clip_grad_norm_(model.parameters(), case.args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def fabric(case: Case, clock: Clock) -> None:
    from lightning_fabric import Fabric

    precision = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[case.args.mixed_precision]
    fabric = Fabric(accelerator="cuda" if ON_GPU else "cpu", devices=1, precision=precision)
    model, optimizer = fabric.setup(case.model, case.optimizer)
    for batch in case.loader:
        image = batch["image"].to(fabric.device, non_blocking=True)
        fabric.backward(model(image, batch["index"])["loss"])
        fabric.clip_gradients(model, optimizer, max_norm=case.args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def hf_trainer(case: Case, clock: Clock) -> None:
    """The Hugging Face Trainer, which takes the loader as it is."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tick(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            clock.tick()

    class OwnLoader(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return case.loader

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=WARM_UP + STEPS,
            per_device_train_batch_size=case.args.batch_size,
            max_grad_norm=case.args.grad_clip,
            bf16=case.args.mixed_precision == "bf16",
            fp16=case.args.mixed_precision == "fp16",
            use_cpu=not ON_GPU,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        # a schedule of our own keeps the learning rate as it is
        constant = torch.optim.lr_scheduler.ConstantLR(case.optimizer, 1.0)
        with contextlib.redirect_stdout(io.StringIO()):
            OwnLoader(case.model, settings, callbacks=[Tick()], optimizers=(case.optimizer, constant)).train()


def monai_trainer(case: Case, clock: Clock) -> None:
    """MONAI's SupervisedTrainer, on ignite."""
    from ignite.engine import Events
    from monai.engines import SupervisedTrainer
    from monai.engines.utils import IterationEvents

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = case.model.network

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.network({"image": image})

    precision = case.args.mixed_precision
    trainer = SupervisedTrainer(
        device=case.ranks.device,
        max_epochs=1,
        train_data_loader=case.loader,
        network=Network(),
        optimizer=case.optimizer,
        loss_function=case.model.loss,
        prepare_batch=lambda batch, device, *_, **__: (batch["image"].to(device, non_blocking=True), batch["index"]),
        amp=precision != "no",
        amp_kwargs={"dtype": torch.bfloat16} if precision == "bf16" else None,
        decollate=False,
    )
    if precision == "bf16":
        # it would scale the loss as for fp16
        trainer.scaler = torch.amp.GradScaler(enabled=False)
    # ignite has no place for clipping but the end of the backward pass
    parameters = list(case.model.parameters())
    clip = case.args.grad_clip
    trainer.add_event_handler(IterationEvents.BACKWARD_COMPLETED, lambda _: nn.utils.clip_grad_norm_(parameters, clip))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, clock.tick)
    trainer.run()


# --- rounds by turns --------------------------------------------------------------------------------------------------


def measure(flags: list[str]) -> dict[str, float]:
    """Milliseconds a step of each trainer that is installed, with these flags of the survival script."""
    trainers = {"this project": this_project, "bare loop": bare_loop}
    others = {
        "Accelerate": (accelerate, "accelerate"),
        "Fabric": (fabric, "lightning_fabric"),
        "HF Trainer": (hf_trainer, "transformers"),
        "MONAI SupervisedTrainer": (monai_trainer, "ignite"),
    }
    for name, (trainer, package) in others.items():
        if importlib.util.find_spec(package):
            trainers[name] = trainer
        else:
            print(f"{name}: {package} is not installed")

    args = script.parse_args([*flags, "--no-augment", "--num_workers", "0"])
    times: dict[str, list[float]] = {name: [] for name in trainers}
    with du.setup_distributed() as ranks:
        script.set_numerics(ranks.device, args.mixed_precision, args.deterministic)
        cohort = script.read_table(args.csv_path, args)
        rows = np.arange(len(cohort))
        data = script.read_inputs(cohort, [], rows, args).sets({"train": rows}, args)["train"]
        network = script.build_model(args, args.mixed_precision, ranks.device).train()
        order = list(du.create_distributed_dataloader(data, args.batch_size).batch_sampler)[: WARM_UP + STEPS]
        if len(order) < WARM_UP + STEPS:
            sys.exit(f"error: {args.csv_path}: needs {(WARM_UP + STEPS) * args.batch_size} cases for a round")
        for number in range(ROUNDS):
            for name, trainer in trainers.items():
                model = RiskLoss(copy.deepcopy(network), cohort)
                optimizer = script.make_optimizer(model.network, args)
                loader = DataLoader(data, batch_sampler=order, collate_fn=collate, pin_memory=ON_GPU)
                clock = Clock()
                trainer(Case(model, optimizer, loader, args, data, ranks), clock)
                if number:
                    times[name].append(1000 * (clock.times[1] - clock.times[0]) / STEPS)
    return {name: statistics.median(values) for name, values in times.items()}


def main(flags: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not flags:
            count = (WARM_UP + STEPS) * 8
            words = f"-m tools.sample_data survival {folder}/data --num_patients {count} --matrix 20"
            root = Path(__file__).resolve().parents[1]
            subprocess.run([sys.executable, *words.split()], cwd=root, check=True, stdout=subprocess.DEVNULL)
            flags = f"--csv_path {folder}/data/dataset.csv --cache_dir {folder}/cache {SMALL}".split()
        times = measure(flags)
    for name, milliseconds in times.items():
        speed = milliseconds / times["this project"]
        print(f"{name:<24} {milliseconds:9.2f} ms a step   speed of this project over it: {speed:.3f}")
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
