"""Measure the overhead of the project's training loop over a bare loop, for two scripts with short steps.

    python benchmarks/step_overhead.py                      # both scripts, on generated sample data
    python benchmarks/step_overhead.py mimic_cxr            # only MIMIC-CXR; for survival see frameworks.py
    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py    # on a CPU: one thread

Two copies of a model train on the same batches, one in a bare loop and one in the project's loop (utils/loop.py). The
speed is the bare loop's time divided by the project loop's time: 1 means no overhead. On a busy machine, trust
processor time more than wall time. The last line for each script is a JSON object.
"""

import copy
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from gpu import make_samples
from torch import nn
from torch.utils.data import DataLoader

import distributed_utils as du
from utils.cli import with_flags
from utils.engine import make_engine
from utils.loop import Plan, Run, Training

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TURNS = 13


def project_loop(args, model, optimizer, loader, names, passes, count=None) -> Iterator[None]:
    """Train in the project's loop (utils/loop.py); each next() runs one optimizer step.

    passes(training, step): runs the forward and backward passes of a step. count(batches): returns the totals that
    normalize the losses of a step, such as the number of targets.
    """
    with du.setup_distributed() as ranks, tempfile.TemporaryDirectory() as folder:
        args = with_flags(args, output_dir=folder, save_every=0, eval_every_steps=0, auto_batch=False)
        run = Run("benchmark/1", args, ranks)
        plan = Plan(run.plan_batches(model, None, args.batch_size, None), len(loader), names, {})
        engine = make_engine(model, optimizer, args.mixed_precision, args, ranks.device)
        with Training(run, args, engine, plan) as training:
            for step in training.steps(loader, count=count):
                passes(training, step)
                step.update(args.learning_rate)
                yield


def bare_loop(args, model, optimizer, loader, losses, count) -> Iterator[None]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for batch in loader:
        totals = count and count([batch])
        losses(model, du.to_device(batch, DEVICE), totals)[0].backward()
        nn.utils.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def clock() -> np.ndarray:
    """Wait for the GPU to finish, then return (wall time, processor time) in seconds."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return np.array([time.perf_counter(), time.process_time()])


def compare(script, args: Namespace, model: nn.Module, loader: DataLoader, names: list, losses, count=None) -> None:
    """Time the bare loop and the project's loop in turns; print the relative speed of the project's loop.

    losses(model, batch, totals): returns the values listed in `names`; the first value is minimized. count: see
    project_loop().
    """
    models = [copy.deepcopy(model).to(DEVICE).train() for _ in range(2)]
    optimizers = [script.make_optimizer(model, args) for model in models]
    order = list(loader.batch_sampler)
    same = DataLoader(loader.dataset, batch_sampler=order, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory)
    bare = bare_loop(args, models[0], optimizers[0], same, losses, count)

    def passes(_: Training, step) -> None:
        for batch in step.micro_batches():
            step.backward(*losses(models[1], batch, step.totals))

    ours = project_loop(args, models[1], optimizers[1], loader, names, passes, count)
    steps = min(30, len(order) // TURNS)
    times = np.zeros((TURNS, 2, 2))
    for turn in range(TURNS):
        for number in (0, 1) if turn % 2 else (1, 0):
            begun = clock()
            for _ in range(steps):
                next((bare, ours)[number])
            times[turn, number] = clock() - begun
    ours.close()

    times = 1000 * times[1:] / steps
    low, (wall, cpu), high = np.quantile(times[:, 0] / times[:, 1], (0.25, 0.5, 0.75), axis=0)
    cost = np.median(times[:, 1] - times[:, 0], axis=0)
    state = models[1].state_dict()
    same_bits = all(torch.equal(value, state[name]) for name, value in models[0].state_dict().items())
    weights = "equal to the bit" if same_bits else "DIFFERENT"
    spread = f"quartiles {low[0]:.3f} to {high[0]:.3f}"
    print(f"{script.__name__}: speed over the bare loop {wall:.3f} ({spread}), by processor time {cpu:.3f}")
    print(f"{script.__name__}: our loop costs {cost[0]:.2f} ms per step, {cost[1]:.2f} ms of processor time")
    print(f"{script.__name__}: weights {weights} after {TURNS * steps} steps")
    print(json.dumps({"speed": wall, "ms": float(np.median(times[:, 1, 0]))}), flush=True)


def mimic_cxr(data: Path) -> None:
    import train_mimic_cxr as script

    make_samples("mimic_cxr", data, "--num_train 500 --num_val 1 --num_test 1")
    flags = f"--data_path {data}/prepared --image_encoder {data}/convnext_tiny --text_encoder {data}/bert_tiny"
    flags += " --batch_size 16 --gradient_accumulation_steps 1 --dropout 0 --num_workers 0 --mixed_precision no"
    args = script.parse_args(flags.split())
    prepared = script.open_prepared(data / "prepared")
    args = with_flags(args, image_size=prepared.metadata["image_size"])
    model = script.build_model(args, "no", DEVICE)
    train_set = script.Questions(prepared, "train", args)
    groups = script.ImageGroups(train_set.column("study"), args.questions_per_image)
    compare(
        script,
        args,
        model,
        script.make_loader(train_set, model, args.batch_size, args, train=True, groups=groups),
        ["loss", "loss_vqa", "loss_chexpert"],
        lambda model, batch, totals: script.batch_loss(model, batch, totals, args.chexpert_weight),
        script.count_targets,
    )


def compressed_ad(data: Path) -> None:
    import train as script

    make_samples("compressed_ad", data, "--streams 16 --steps 500")
    flags = f"--config configs/compressed_ad_demo.yaml --data {data} --batch_size 32"
    flags += " --effective_batch_size 32 --num_workers 0 --mixed_precision no"
    args = script.parse_args(flags.split())
    histories = script.Histories(args.data, args.env, args.objective, args.seed)
    tasks, _ = script.split_tasks(len(histories.words), args.split_seed)
    train_set = script.SegmentDataset(histories, tasks, args, train=True)
    compare(
        script,
        args,
        script.build_model(args, "no", DEVICE, histories.env),
        du.create_distributed_dataloader(train_set, args.batch_size, collate_fn=dict),
        ["loss", "accuracy"],
        lambda model, batch, totals: [part.sum() / totals[0] for part in script.action_losses(model, batch, "no")],
        lambda batches: [float(sum(int(batch["length"].sum()) for batch in batches))],
    )


if __name__ == "__main__":
    tasks = {"mimic_cxr": mimic_cxr, "compressed_ad": compressed_ad}
    for task in sys.argv[1:] or tasks:
        with tempfile.TemporaryDirectory() as folder:
            tasks[task](Path(folder, "data"))
