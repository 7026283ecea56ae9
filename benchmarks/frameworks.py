"""Compare the speed of this project's training loop with a bare loop and four trainers, on the survival task.

    python benchmarks/frameworks.py                         # a small network on generated sample data
    python benchmarks/frameworks.py --csv_path FILE ...     # flags of train_survival_distributed.py
    OMP_NUM_THREADS=1 python benchmarks/frameworks.py       # on a CPU: one thread

All loops start from the same weights and train on the same batches; their order changes every round. The time of a step
is the lower quartile over the rounds: wall time on a GPU, processor time on a CPU. The last line printed is a JSON
object: {name of the loop: milliseconds per step}.
"""

import contextlib
import copy
import io
import itertools
import json
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from gpu import make_samples

# importing step_overhead also puts the project's root on sys.path
from step_overhead import DEVICE, clock, project_loop
from torch import nn
from torch.utils.data import DataLoader

import distributed_utils as du
import train_survival_distributed as script

ON_GPU = DEVICE.type == "cuda"
ROUNDS, WARM_UP, STEPS = 4 if ON_GPU else 13, 3, 10
SMALL = "--resnet resnet10 --base_channels 16 --image_size 24 24 16 --batch_size 8 --mixed_precision no"


class RiskLoss(nn.Module):
    """The survival script's network and Cox loss in one module: HF Trainer requires a model that returns its loss."""

    def __init__(self, network: nn.Module, cohort):
        super().__init__()
        self.network = network
        self.time, self.event = torch.from_numpy(cohort.time), torch.from_numpy(cohort.event)

    def loss(self, log_hazard: torch.Tensor, index: list[int]) -> torch.Tensor:
        return script.cox_loss(log_hazard, self.time[index], self.event[index])

    def forward(self, image: torch.Tensor, index: list[int]) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(self.network({"image": image}), index)}


@dataclass
class Round:
    model: RiskLoss
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    args: Namespace
    ends: list[float] = field(default_factory=list)

    def tick(self, *_) -> None:
        self.ends.append(clock()[0 if ON_GPU else 1])


def collate(items: list[dict]) -> dict:
    """Stack the images; keep the indices in a list, because the Cox loss needs them on the host."""
    return {"image": torch.stack([item["image"] for item in items]), "index": [item["index"] for item in items]}


def this_project(case: Round) -> None:
    args, loader = case.args, du.create_distributed_dataloader(case.loader.dataset, case.args.batch_size)
    loop = project_loop(
        args,
        case.model.network,
        case.optimizer,
        loader,
        ["loss", "events"],
        lambda training, step: script.cox_step(training, step, loader, args),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in itertools.islice(loop, WARM_UP + STEPS):
            case.tick()


def plain_loop(case: Round, model, optimizer, backward, clip) -> None:
    for batch in case.loader:
        image = batch["image"].to(DEVICE, non_blocking=True)
        backward(model(image, batch["index"])["loss"])
        clip(model.parameters(), case.args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        case.tick()


def bare_loop(case: Round) -> None:
    plain_loop(case, case.model, case.optimizer, torch.Tensor.backward, nn.utils.clip_grad_norm_)


def accelerate(case: Round) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not ON_GPU, mixed_precision=case.args.mixed_precision)
    model, optimizer = accelerator.prepare(case.model, case.optimizer)
    plain_loop(case, model, optimizer, accelerator.backward, accelerator.clip_grad_norm_)


def fabric(case: Round) -> None:
    from lightning_fabric import Fabric

    precision = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[case.args.mixed_precision]
    fabric = Fabric(accelerator=DEVICE.type, devices=1, precision=precision)
    model, optimizer = fabric.setup(case.model, case.optimizer)

    def clip(_, most):
        fabric.clip_gradients(model, optimizer, max_norm=most)

    plain_loop(case, model, optimizer, fabric.backward, clip)


def hf_trainer(case: Round) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tick(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            case.tick()

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
        constant = torch.optim.lr_scheduler.ConstantLR(case.optimizer, 1.0)
        with contextlib.redirect_stdout(io.StringIO()):
            OwnLoader(case.model, settings, callbacks=[Tick()], optimizers=(case.optimizer, constant)).train()


def monai_trainer(case: Round) -> None:
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
        device=DEVICE,
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
        # MONAI uses a GradScaler for all mixed precision, but bf16 needs no loss scaling
        trainer.scaler = torch.amp.GradScaler(enabled=False)
    parameters = list(case.model.parameters())
    clip = case.args.grad_clip
    trainer.add_event_handler(IterationEvents.BACKWARD_COMPLETED, lambda _: nn.utils.clip_grad_norm_(parameters, clip))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, case.tick)
    trainer.run()


TRAINERS = {
    "this project": this_project,
    "bare loop": bare_loop,
    "Accelerate": accelerate,
    "Fabric": fabric,
    "HF Trainer": hf_trainer,
    "MONAI SupervisedTrainer": monai_trainer,
}


def measure(flags: list[str]) -> dict[str, np.ndarray]:
    """Return {name: milliseconds, (rounds, steps)} for each training loop whose package is installed.

    The first round is warmup and is not returned.
    """
    args = script.parse_args([*flags, "--no-augment", "--num_workers", "0"])
    script.set_precision(args.mixed_precision, DEVICE, args.deterministic)
    cohort = script.read_table(args.csv_path, args)
    rows = np.arange(len(cohort))
    data = script.read_inputs(cohort, [], rows, args).sets({"train": rows}, args)["train"]
    network = script.build_model(args, args.mixed_precision, DEVICE).train()
    order = list(du.create_distributed_dataloader(data, args.batch_size).batch_sampler)[: WARM_UP + STEPS]
    times: dict[str, list[np.ndarray]] = {name: [] for name in TRAINERS}
    for number in range(ROUNDS):
        names = list(times)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            model = RiskLoss(copy.deepcopy(network), cohort)
            loader = DataLoader(data, batch_sampler=order, collate_fn=collate, pin_memory=ON_GPU)
            case = Round(model, script.make_optimizer(model.network, args), loader, args)
            try:
                TRAINERS[name](case)
            except ModuleNotFoundError as error:
                print(f"{name}: {error}")
                del times[name]
                continue
            times[name].append(1000 * np.diff(case.ends[WARM_UP - 1 : WARM_UP + STEPS]))
    return {name: np.stack(rounds[1:]) for name, rounds in times.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        flags = sys.argv[1:]
        if not flags:
            make_samples("survival", Path(folder, "data"), f"--num_patients {(WARM_UP + STEPS) * 8} --matrix 20")
            flags = f"--csv_path {folder}/data/dataset.csv --cache_dir {folder}/cache {SMALL}".split()
        times = measure(flags)
    of_step = {name: float(np.quantile(rounds, 0.25, axis=0).mean()) for name, rounds in times.items()}
    for name, milliseconds in of_step.items():
        low, high = np.quantile(times[name].mean(1) / times["this project"].mean(1), (0.25, 0.75))
        speed = f"{milliseconds / of_step['this project']:.3f} (rounds: {low:.3f} to {high:.3f})"
        print(f"{name:<24} {milliseconds:9.2f} ms per step   relative speed of this project: {speed}")
    print(json.dumps(of_step), flush=True)
