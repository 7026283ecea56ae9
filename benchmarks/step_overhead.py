"""What four scripts' loops cost beside a bare loop, and --deterministic beside DDP, each as a ratio within one run.

    python benchmarks/step_overhead.py                # four scripts, on sample data that it makes; one process
    python benchmarks/step_overhead.py cascade        # one of them; of survival: benchmarks/frameworks.py
    python benchmarks/step_overhead.py prs_med DATA   # on your sample data (of mimic_cxr: prepared in DATA/prepared)
    torchrun --standalone --nproc_per_node=2 benchmarks/step_overhead.py exact [--parameters 20e6]

Two copies of a model train on the same batches, one in a bare loop (forward, backward, clip, update) and one in the
script's (checked data, agreement of ranks, skipped steps, logs, timings). They take turns of a few steps. The ratio is
the median time of the bare turns over the median of ours: 1 means no cost, the goal is 0.97. On a machine that others
use, processor time (cpu) says more than wall time. Larger sample data make longer turns and a steadier ratio. It takes
a GPU where there is one. The last line is a JSON object: the speed of our loop over the bare one, and our ms a step.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if "exact" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from torch import nn
from torch.utils.data import DataLoader

import distributed_utils as du
from utils.loop import Run

ROOT = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# the first turn of each loop warms up
TURNS = 9
# the sample data of each task; small, as the loop's cost shows most where a step is short
SAMPLES = {
    "prs_med": "--num_train 432 --num_val 1 --num_test 1",
    "mimic_cxr": "--num_train 200 --num_val 1 --num_test 1",
    "cascade": "--num_patients 120 --matrix 32",
    "compressed_ad": "--streams 10 --steps 500",
}


def clock() -> tuple[float, float]:
    """Wall and processor time, once the GPU has done all that it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def report(name: str, bare: list, ours: list) -> tuple[float, float]:
    """Print the ratios of turns, each given by its clock() before and after; returns ours: wall ratio, and seconds."""
    medians = [
        [statistics.median(end[kind] - begin[kind] for begin, end in turns[1:]) for turns in (bare, ours)]
        for kind in range(2)
    ]
    for unit, (theirs, own) in zip(("wall", "cpu"), medians, strict=True):
        du.print_main(f"{name}: {unit} of the bare loop / ours = {theirs / own:.3f} ({theirs:.3f} s a turn)")
    theirs, own = medians[0]
    return theirs / own, own


def compare(name, args, model, make_optimizer, make_loader, losses, loss_parts, count=None) -> dict[str, float]:
    """Train two copies of a model on the same batches, one by a bare loop and one by the project's.

    make_loader(run): of the training set. loss_parts(model, batch, totals): the numbers of `losses`, the first of them
    is learned. count(batches): the totals, as the script counts them. Returns `speed` of our loop over the bare one,
    and `ms` of a step of ours.
    """
    models = [model.to(DEVICE), copy.deepcopy(model).to(DEVICE)]
    optimizers = [make_optimizer(model, args) for model in models]
    trained = [parameter for group in optimizers[0].param_groups for parameter in group["params"]]
    rate = optimizers[0].param_groups[0]["lr"]
    with du.setup_distributed() as ranks, tempfile.TemporaryDirectory() as folder:
        args.output_dir, args.num_workers, args.save_every, args.auto_batch = folder, 0, 0, False
        run = Run("benchmark/1", args, ranks, "")
        run.choose_batch(models[1], None)
        loader = make_loader(run)
        order = list(loader.batch_sampler)
        # an epoch at most
        steps = min(30, len(order) // TURNS)
        if not steps:
            sys.exit(f"error: {name}: fewer than {TURNS} steps in the data; make more")
        run.begin(models[1], optimizers[1], "no", TURNS * steps, losses, {})
        options = {"collate_fn": loader.collate_fn, "pin_memory": loader.pin_memory}
        batches = iter(DataLoader(loader.dataset, batch_sampler=order, **options))
        bare, ours = [], []
        with run:
            own = run.steps(loader, count=count)
            for _ in range(TURNS):
                begun = clock()
                for _ in range(steps):
                    batch = next(batches)
                    totals = count and count([batch])
                    loss_parts(models[0].train(), du.to_device(batch, DEVICE), totals)[0].backward()
                    nn.utils.clip_grad_norm_(trained, 1.0)
                    optimizers[0].step()
                    optimizers[0].zero_grad(set_to_none=True)
                bare.append((begun, clock()))

                begun = clock()
                for _ in range(steps):
                    step = next(own)
                    for batch in step.leaves():
                        step.backward(*loss_parts(models[1].train(), batch, step.totals))
                    step.update(rate)
                ours.append((begun, clock()))
        speed, seconds = report(name, bare, ours)
    state = models[1].state_dict()
    same = all(torch.equal(value, state[key]) for key, value in models[0].state_dict().items())
    print(f"{name}: weights {'equal to the bit' if same else 'DIFFERENT'} after {TURNS * steps} steps", flush=True)
    return {"speed": speed, "ms": 1000 * seconds / steps}


# --- the four scripts -------------------------------------------------------------------------------------------------


def prs_med(data: str) -> dict[str, float]:
    import train_prs_med as script

    args = script.parse_args(["--data_root", data, "--batch_size", "16", "--lora_dropout", "0"])
    model = script.build_model(args, "no", DEVICE)
    train_set = script.make_sets(script.read_data(args, "train"), model.reader, args)["train"]

    return compare(
        "prs_med",
        args,
        model,
        script.make_optimizer,
        lambda run: script.make_loader(train_set, args, run.leaf, train=True),
        ["loss", "loss_seg", "loss_txt"],
        lambda model, batch, totals: script.batch_loss(model, batch, 16, totals[0], args),
        script.count_answer_tokens,
    )


def mimic_cxr(data: str) -> dict[str, float]:
    import train_mimic_cxr as script

    flags = f"--data_path {data}/prepared --image_encoder {data}/convnext_tiny --text_encoder {data}/bert_tiny"
    flags += " --batch_size 16 --gradient_accumulation_steps 1 --dropout 0 --num_workers 0"
    args = script.parse_args(flags.split())
    prepared = script.open_prepared(Path(args.data_path))
    args.image_size = prepared.facts["image_size"]
    model = script.build_model(args, "no", DEVICE)
    train_set = script.Questions(prepared, "train", args)
    groups = script.ImageGroups(train_set.column("study"), args.questions_per_image)

    def make_loader(run: Run) -> DataLoader:
        options = {"effective_batch_size": run.effective, "shares": run.shares, "groups": groups}
        return script.make_loader(train_set, model, run.leaf, args, train=True, **options)

    return compare(
        "mimic_cxr",
        args,
        model,
        script.make_optimizer,
        make_loader,
        ["loss", "loss_vqa", "loss_chexpert"],
        lambda model, batch, totals: script.batch_loss(model, batch, totals, args.chexpert_weight),
        script.count_targets,
    )


def cascade(data: str) -> dict[str, float]:
    """The second of two small stages, which sees what the first has made."""
    import train_accelerate as script

    stage = {"voxel_dim": 64, "vit_depth": 2, "num_heads": 4, "token_grid": 8}
    stages = [json.dumps({"volume_size": [side] * 3, **stage}) for side in (16, 32)]
    flags = f"--dataset_path {data} --cache_dir {data}_cache --img_size 64 --encoder_dim 64 --batch_size 2"
    args = script.parse_args([*flags.split(), "--stage_configs", *stages])
    sizes = [stage["volume_size"] for stage in args.stage_configs]
    patients = script.Data(args, sizes)
    model = script.Cascade(args, DEVICE, "no", patients.learn_prior(), [0.1, 0.1])
    for _ in sizes:
        model.add_stage()
    train_set = script.XrayCtDataset(patients, "train", sizes[-1])
    for number in range(len(train_set)):
        # decoded into the cache before the clock starts
        train_set[number]

    def loss_parts(model: nn.Module, batch: dict, _) -> tuple:
        diffusion, physics = (part.mean() for part in script.patient_losses(model, 1, model.net, batch))
        return diffusion + model.stages[1].physics_weight * physics, diffusion, physics

    return compare(
        "cascade",
        args,
        model,
        script.make_optimizer,
        lambda run: du.create_distributed_dataloader(train_set, run.leaf),
        ["loss", "diffusion_loss", "physics_loss"],
        loss_parts,
    )


def compressed_ad(data: str) -> dict[str, float]:
    import train as script

    flags = f"--config {ROOT}/configs/compressed_ad_demo.yaml --data {data} --batch_size 32 --effective_batch_size 32"
    args = script.parse_args(flags.split())
    histories = script.Histories(args.data, args.env, args.objective, args.seed)
    tasks, _ = script.split_tasks(len(histories.words), args.split_seed)
    train_set = script.SegmentDataset(histories, tasks, args, train=True)

    return compare(
        "compressed_ad",
        args,
        script.build_model(args, "no", DEVICE, histories.env),
        script.make_optimizer,
        lambda run: du.create_distributed_dataloader(train_set, run.leaf, collate_fn=dict),
        ["loss", "accuracy"],
        lambda model, batch, totals: [part.sum() / totals[0] for part in script.action_losses(model, batch, "no")],
        lambda batches: [float(sum(int(batch["length"].sum()) for batch in batches))],
    )


# --- --deterministic over DDP -----------------------------------------------------------------------------------------


def exact(parameters: float, leaves: int) -> None:
    """DDP against ExactSum: leaves of one conv net (compute-bound), or of linear layers with so many parameters."""
    torch.set_num_threads(1)
    with du.setup_distributed() as ranks:
        torch.manual_seed(0)
        if parameters:
            side = int((parameters / 4) ** 0.5)
            model, images = nn.Sequential(*[nn.Linear(side, side) for _ in range(4)]), torch.randn(16, side)
        else:
            model = nn.Sequential(nn.Conv2d(3, 48, 3), nn.ReLU(), nn.Conv2d(48, 48, 3), nn.ReLU(), nn.Flatten())
            images = torch.randn(8, 3, 64, 64)
        plain = copy.deepcopy(model)
        wrapped, total = du.wrap_in_ddp(plain, ranks.device), du.ExactSum(model)
        ddp, ours = [], []
        for _ in range(TURNS):
            for turns, net in ((ddp, wrapped), (ours, model)):
                # all ranks begin a turn together
                du.gather_objects(None)
                begun = clock()
                for leaf in range(leaves):
                    last = leaf == leaves - 1
                    total.begin_leaf(last)
                    if net is wrapped and ranks.world_size > 1:
                        net.require_backward_grad_sync = last
                    net(images).square().mean().backward()
                if net is model:
                    total.finish()
                turns.append((begun, clock()))
                net.zero_grad()
        count = sum(parameter.numel() for parameter in model.parameters())
        report(f"exact sum, {count / 1e6:.1f} M parameters, {ranks.world_size} processes", ddp, ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "exact", *SAMPLES), default="all", help="default: all")
    parser.add_argument("data", nargs="?", help="sample data of the task; left out: made in a temporary folder")
    parser.add_argument("--parameters", type=float, default=0, help="exact: of linear layers; 0: a conv net")
    parser.add_argument("--leaves", type=int, default=4, help="exact: forward and backward passes of a rank in a step")
    options = parser.parse_args()
    if options.what == "exact":
        exact(options.parameters, options.leaves)
        return
    compare_one = {
        "prs_med": prs_med,
        "mimic_cxr": mimic_cxr,
        "cascade": cascade,
        "compressed_ad": compressed_ad,
    }
    for task in SAMPLES if options.what == "all" else [options.what]:
        with tempfile.TemporaryDirectory() as folder:
            data = options.data or f"{folder}/data"
            if not options.data:
                commands = [f"sample_data {task} {data} {SAMPLES[task]}"]
                if task == "mimic_cxr":
                    releases = f"{data}/mimic-cxr-jpg {data}/mimic-ext-cxr-qba"
                    commands += [f"prepare_data mimic_cxr {releases} {data}/prepared --image_size 64"]
                for words in commands:
                    command = [sys.executable, "-m", *f"tools.{words}".split()]
                    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            found = compare_one[task](data)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
