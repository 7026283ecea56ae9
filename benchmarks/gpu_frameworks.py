"""The survival model under other trainers, and the bandwidth between processes; a part of benchmarks/gpu.py.

python benchmarks/gpu_frameworks.py train --trainer "HF Trainer" --steps 30 --warm_up 10 -- --csv_path ... (flags of
    train_survival_distributed.py)
torchrun --nproc_per_node=2 benchmarks/gpu_frameworks.py bandwidth --backend nccl

The last line is a JSON object: samples_per_s of the steps after the warm-up, or gb_per_s.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from distributed_utils import create_distributed_dataloader
from train_survival_distributed import build_model, cox_loss, make_optimizer, make_sets, parse_args, read_table

ON_GPU = torch.cuda.is_available()


class Case(NamedTuple):
    """What all trainers are given: the model in fp32, its optimizer, endless batches, and how to run it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: torch.utils.data.DataLoader
    precision: str
    grad_clip: float
    steps: int
    batch_size: int


class Clock:
    """Seconds of the steps after the warm-up."""

    def __init__(self, warm_up: int):
        self.warm_up = warm_up
        self.done = 0
        self.begun = 0.0

    def tick(self, *_) -> None:
        """After each optimizer step."""
        self.done += 1
        # The GPU is waited for once here and once at the end.
        if self.done == self.warm_up:
            synchronize()
            self.begun = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since the warm-up."""
        synchronize()
        return time.perf_counter() - self.begun


def synchronize() -> None:
    """Wait for the GPU where there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


class RiskLoss(nn.Module):
    """The script's network with its Cox loss: a batch in, the loss out."""

    def __init__(self, network: nn.Module, time_to_event: torch.Tensor, event: torch.Tensor):
        super().__init__()
        self.network = network
        self.time_to_event = time_to_event
        self.event = event

    def forward(self, image: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        log_hazard = self.network({"image": image})
        rows = index.cpu()
        loss = cox_loss(log_hazard, self.time_to_event[rows], self.event[rows])
        return {"loss": loss}


class EndlessBatches(torch.utils.data.Sampler):
    """The script's order of the training cases, epoch after epoch."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Iterator[list[int]]:
        for epoch in itertools.count():
            self.sampler.set_position(epoch)
            yield from self.sampler


def collate(items: list[dict]) -> dict[str, torch.Tensor]:
    """A batch of images and their row numbers, which stay on the CPU, where the Cox loss reads them."""
    images = [torch.as_tensor(item["image"]) for item in items]
    rows = [int(item["index"]) for item in items]
    return {"image": torch.stack(images), "index": torch.tensor(rows)}


def make_case(steps: int, flags: list[str]) -> Case:
    """The model, optimizer and data of train_survival_distributed.py with these flags."""
    args = parse_args(flags)
    device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    cohort = read_table(args.csv_path, args)
    network = build_model(args, args.mixed_precision, device)
    no_columns = np.zeros((len(cohort), 0), np.float32)
    data = make_sets(cohort, no_columns, {"train": np.arange(len(cohort))}, args)["train"]

    # The order of the cases is the script's.
    ordered = create_distributed_dataloader(data, args.batch_size).batch_sampler
    loader = torch.utils.data.DataLoader(
        data,
        batch_sampler=EndlessBatches(ordered),
        collate_fn=collate,
        pin_memory=ON_GPU,
    )

    # All trainers get the same model with its loss.
    time_to_event = torch.from_numpy(cohort.time)
    event = torch.from_numpy(cohort.event)
    model = RiskLoss(network, time_to_event, event)
    return Case(
        model=model.train(),
        optimizer=make_optimizer(network, args),
        loader=loader,
        precision=args.mixed_precision,
        grad_clip=args.grad_clip,
        steps=steps,
        batch_size=args.batch_size,
    )


# --- the trainers, each with its own loop -----------------------------------------------------------------------------


def bare_loop(case: Case, clock: Clock) -> None:
    """The shortest correct loop: no logs, no checkpoints, no guard."""
    device = next(case.model.parameters()).device
    for batch in itertools.islice(case.loader, case.steps):
        image = batch["image"].to(device, non_blocking=True)
        loss = case.model(image, batch["index"])["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(case.model.parameters(), case.grad_clip)
        case.optimizer.step()
        case.optimizer.zero_grad(set_to_none=True)
        clock.tick()


def accelerate_loop(case: Case, clock: Clock) -> None:
    """Accelerate with model, optimizer and loader prepared."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not ON_GPU, mixed_precision=case.precision)
    model, optimizer = accelerator.prepare(case.model, case.optimizer)
    for batch in itertools.islice(case.loader, case.steps):
        image = batch["image"].to(accelerator.device, non_blocking=True)
        loss = model(image, batch["index"])["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), case.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def fabric_loop(case: Case, clock: Clock) -> None:
    """Lightning Fabric with model and optimizer set up."""
    try:
        from lightning.fabric import Fabric
    except ImportError:
        from lightning_fabric import Fabric

    names = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
    accelerator = "cuda" if ON_GPU else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=1, precision=names[case.precision])
    model, optimizer = fabric.setup(case.model, case.optimizer)
    for batch in itertools.islice(case.loader, case.steps):
        image = batch["image"].to(fabric.device, non_blocking=True)
        loss = model(image, batch["index"])["loss"]
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=case.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def hf_trainer(case: Case, clock: Clock) -> None:
    """The Hugging Face Trainer, which takes the loader as it is."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    class Tick(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            clock.tick()

    class OwnLoader(Trainer):
        def get_train_dataloader(self):
            return case.loader

    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=case.steps,
            per_device_train_batch_size=case.batch_size,
            max_grad_norm=case.grad_clip,
            bf16=case.precision == "bf16",
            fp16=case.precision == "fp16",
            use_cpu=not ON_GPU,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )

        # A scheduler of our own keeps the learning rate as it is.
        constant = torch.optim.lr_scheduler.ConstantLR(case.optimizer, 1.0)
        optimizers = (case.optimizer, constant)
        trainer = OwnLoader(case.model, settings, callbacks=[Tick()], optimizers=optimizers)
        trainer.train()


def monai_trainer(case: Case, clock: Clock) -> None:
    """MONAI's SupervisedTrainer on ignite."""
    from ignite.engine import Events
    from monai.engines import SupervisedTrainer
    from monai.engines.utils import IterationEvents

    device = next(case.model.parameters()).device

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = case.model.network

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.network({"image": image})

    def prepare(batch: dict, device: torch.device, non_blocking: bool, **_) -> tuple:
        return batch["image"].to(device, non_blocking=True), batch["index"]

    def loss(outputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        time_to_event = case.model.time_to_event[index]
        return cox_loss(outputs, time_to_event, case.model.event[index])

    trainer = SupervisedTrainer(
        device=device,
        max_epochs=1,
        train_data_loader=case.loader,
        network=Network(),
        optimizer=case.optimizer,
        loss_function=loss,
        epoch_length=case.steps,
        prepare_batch=prepare,
        amp=case.precision != "no",
        amp_kwargs={"dtype": torch.bfloat16} if case.precision == "bf16" else None,
        decollate=False,
        non_blocking=True,
    )

    # Ignite has no place for clipping but the end of the backward pass.
    def clip(*_) -> None:
        nn.utils.clip_grad_norm_(case.model.parameters(), case.grad_clip)

    trainer.add_event_handler(IterationEvents.BACKWARD_COMPLETED, clip)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, clock.tick)
    trainer.run()


TRAINERS = {
    "bare loop": bare_loop,
    "Accelerate": accelerate_loop,
    "Fabric": fabric_loop,
    "HF Trainer": hf_trainer,
    "MONAI SupervisedTrainer": monai_trainer,
}


def bandwidth(backend: str) -> float | None:
    """GB/s of an all-reduce of 64 MiB over the processes that torchrun started; on rank 0 alone."""
    on_gpu = backend == "nccl"
    rank = int(os.environ["RANK"])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    values = torch.ones(2**24, device="cuda" if on_gpu else "cpu")
    rounds = 20 if on_gpu else 3

    # The first all-reduce warms up.
    dist.all_reduce(values)
    if on_gpu:
        synchronize()
    begun = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(values)
    if on_gpu:
        synchronize()
    seconds = (time.perf_counter() - begun) / rounds
    dist.destroy_process_group()
    return values.nbytes / seconds / 1e9 if rank == 0 else None


def parse_options() -> argparse.Namespace:
    """The options of this command; those of the script are parsed by the script."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("bandwidth")
    one.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    train = commands.add_parser("train")
    train.add_argument("--trainer", choices=TRAINERS, required=True)
    train.add_argument("--steps", type=int, default=30, help="optimizer steps, with those of the warm-up")
    train.add_argument("--warm_up", type=int, default=10, help="steps before the clock starts")
    train.add_argument("flags", nargs="+", help="of train_survival_distributed.py, after --")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.command == "bandwidth":
        gb_per_s = bandwidth(options.backend)
        if gb_per_s is not None:
            print(json.dumps({"gb_per_s": gb_per_s}), flush=True)
        return

    case = make_case(options.steps, options.flags)
    clock = Clock(options.warm_up)
    TRAINERS[options.trainer](case, clock)
    samples = (options.steps - options.warm_up) * case.batch_size
    samples_per_s = samples / clock.seconds()
    print(json.dumps({"samples_per_s": samples_per_s}), flush=True)


if __name__ == "__main__":
    main()
