"""What the foundation costs beside a bare loop, and --deterministic beside DDP, each as a ratio within one run.

    python benchmarks/loop_overhead.py                       # minimal.py's model on 128 x 128 images, one process
    python benchmarks/loop_overhead.py prs_med DATA          # PRS-Med; DATA: by python -m tools.sample_data prs_med
    python benchmarks/loop_overhead.py mimic_cxr DATA        # the same, prepared in DATA/prepared
    python benchmarks/loop_overhead.py cascade DATA          # the second of two small stages; at least 60 patients
    python benchmarks/loop_overhead.py compressed_ad DATA    # CompressedAD in the demo's size
    torchrun --standalone --nproc_per_node=2 benchmarks/loop_overhead.py exact [--parameters 20e6]

The two loops take turns, a few steps each, on the same batches; a ratio is the median over the turns of bare time by
the foundation's time, 1 meaning no cost. On a shared machine processor time (cpu) says more than wall time.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import nn
from torch.utils.data import DataLoader

import distributed_utils as du
from utils import loop

TURNS = 9


@contextmanager
def timed(times: list):
    """Adds (wall, cpu) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    times.append((time.perf_counter() - wall, time.process_time() - cpu))


def report(name: str, bare: list, ours: list) -> None:
    for number, kind in enumerate(("wall", "cpu")):
        ratio = statistics.median(a[number] / b[number] for a, b in zip(bare[1:], ours[1:], strict=True))
        seconds = statistics.median(a[number] for a in bare[1:])
        du.print_main(f"{name}: {kind} of the bare loop / ours = {ratio:.3f} ({seconds:.3f} s a turn)")


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)


def compare_loops(
    name: str, model, data, make_loader, loss_parts, args, steps: int, make_optimizer=make_adamw, losses=("loss",),
    count=None,
) -> None:  # fmt: skip
    """Train two copies of a model, one by a bare loop and one by Run, on the same order of samples.

    loss_parts(model, batch, totals): the numbers of `losses`; totals: what `count` gives for [batch].
    """
    if not steps:
        sys.exit(f"{name}: fewer than {TURNS} batches in the data; make more")
    models = [model, copy.deepcopy(model)]
    optimizers = [make_optimizer(model) for model in models]
    trained = [parameter for group in optimizers[0].param_groups for parameter in group["params"]]
    rate = optimizers[0].param_groups[0]["lr"]
    with du.setup_distributed() as ranks, tempfile.TemporaryDirectory() as folder:
        args.output_dir, args.num_workers, args.save_every = folder, 0, 0
        run = loop.Run("benchmark/1", args, ranks, "")
        run.choose_batch(models[1], None)
        loader = make_loader(run)
        order = list(loader.batch_sampler)
        run.begin(models[1], optimizers[1], "no", TURNS * steps, list(losses), {})
        bare, ours = [], []
        batches = iter(DataLoader(data, batch_sampler=order, collate_fn=loader.collate_fn))
        with run:
            own = run.steps(loader, count=count)
            for _ in range(TURNS):
                with timed(bare):
                    for _ in range(steps):
                        batch = next(batches)
                        loss_parts(models[0].train(), batch, count and count([batch]))[0].backward()
                        nn.utils.clip_grad_norm_(trained, 1.0)
                        optimizers[0].step()
                        optimizers[0].zero_grad(set_to_none=True)
                with timed(ours):
                    for _ in range(steps):
                        step = next(own)
                        for batch in step.leaves():
                            step.backward(*loss_parts(models[1].train(), batch, step.totals))
                        step.update(rate)
        report(name, bare, ours)
        state = models[1].state_dict()
        same = all(torch.equal(value, state[key]) for key, value in models[0].state_dict().items())
        print(f"{name}: weights {'equal to the bit' if same else 'DIFFERENT'} after {TURNS * steps} steps")


def minimal(words: list[str]) -> None:
    from examples import minimal as script

    args = script.parse_args(["--batch_size", "16", "--image_size", "128", "--dropout", "0", *words])
    torch.manual_seed(0)
    data = script.Images(None, args, made_up=16 * 10 * TURNS, augmented=False)
    compare_loops(
        "minimal",
        script.make_model(2, 0.0),
        data,
        lambda run: du.create_distributed_dataloader(data, run.leaf),
        lambda model, batch, _: (script.loss_sum(model, batch, "no")[0] / len(batch["label"]),),
        args,
        steps=10,
    )


def prs_med(words: list[str]) -> None:
    import train_prs_med as script

    args = script.parse_args(["--data_root", words[0], "--batch_size", "16", "--lora_dropout", "0", *words[1:]])
    model = script.build_model(args, "no", torch.device("cpu"))
    data = script.make_sets(script.read_data(args, "train"), model.reader, args)["train"]
    compare_loops(
        "prs_med",
        model,
        data,
        lambda run: script.make_loader(data, args, run.leaf, train=True),
        lambda model, batch, _: script.batch_loss(model, batch, 16, float((batch["answer"] >= 0).sum()), args)[:1],
        args,
        steps=max(1, len(data) // 16 // TURNS),
    )


def mimic_cxr(words: list[str]) -> None:
    import train_mimic_cxr as script

    folder = words[0]
    flags = f"--data_path {folder}/prepared --image_encoder {folder}/convnext_tiny --text_encoder {folder}/bert_tiny"
    flags += " --batch_size 16 --gradient_accumulation_steps 1 --dropout 0"
    args = script.parse_args([*flags.split(), *words[1:]])
    prepared = script.open_prepared(Path(args.data_path))
    args.image_size = prepared.facts["image_size"]
    model = script.build_model(args, "no", torch.device("cpu"))
    data = script.Questions(prepared, "train", args)
    groups = script.ImageGroups(data.column("study"), args.questions_per_image)
    args.num_workers = 0

    def make_loader(run: loop.Run) -> DataLoader:
        options = {"effective_batch_size": run.effective, "shares": run.shares, "groups": groups}
        return script.make_loader(data, model, run.leaf, args, train=True, **options)

    compare_loops(
        "mimic_cxr",
        model,
        data,
        make_loader,
        lambda model, batch, totals: script.batch_loss(model, batch, totals, args.chexpert_weight),
        args,
        steps=max(1, len(data) // 16 // TURNS),
        make_optimizer=lambda model: script.make_optimizer(model, args),
        losses=("loss", "loss_vqa", "loss_chexpert"),
        count=script.count_targets,
    )


def cascade(words: list[str]) -> None:
    import train_accelerate as script

    stage = {"voxel_dim": 64, "vit_depth": 2, "num_heads": 4, "token_grid": 8}
    stages = [json.dumps({"volume_size": [side] * 3, **stage}) for side in (16, 32)]
    flags = f"--dataset_path {words[0]} --cache_dir {words[0]}_cache --img_size 64 --encoder_dim 64 --batch_size 2"
    args = script.parse_args([*flags.split(), "--stage_configs", *stages, *words[1:]])
    sizes = [stage["volume_size"] for stage in args.stage_configs]
    patients = script.Data(args, sizes)
    model = script.Cascade(args, torch.device("cpu"), "no", patients.learn_prior(), [0.1, 0.1])
    for _ in sizes:
        model.add_stage()
    data = script.XrayCtDataset(patients, "train", sizes[-1])
    for number in range(len(data)):
        # decoded into the cache before the clock starts
        data[number]

    def loss_parts(model, batch: dict, _) -> tuple:
        diffusion, physics = (part.mean() for part in script.patient_losses(model, 1, model.net, batch))
        return diffusion + model.stages[1].physics_weight * physics, diffusion, physics

    compare_loops(
        "cascade",
        model,
        data,
        lambda run: du.create_distributed_dataloader(data, run.leaf),
        loss_parts,
        args,
        steps=max(1, len(data) // 2 // TURNS),
        make_optimizer=lambda model: script.make_optimizer(model, args),
        losses=("loss", "diffusion_loss", "physics_loss"),
    )


def compressed_ad(words: list[str]) -> None:
    import train as script

    flags = [
        "--config",
        f"{ROOT}/configs/compressed_ad_demo.yaml",
        "--batch_size",
        "32",
        "--effective_batch_size",
        "32",
    ]
    args = script.parse_args([*flags, "--data", *words])
    histories = script.Histories(args.data, args.env, args.objective, args.seed)
    tasks, _ = script.split_tasks(len(histories.words), args.split_seed)
    data = script.SegmentDataset(histories, tasks, args, train=True)
    size = args.batch_size

    def loss_parts(model, batch: dict, totals: list[float]) -> list:
        return [part.sum() / totals[0] for part in script.action_losses(model, batch, "no")]

    compare_loops(
        "compressed_ad",
        script.build_model(args, "no", torch.device("cpu"), histories.env),
        data,
        lambda run: du.create_distributed_dataloader(data, run.leaf, collate_fn=dict),
        loss_parts,
        args,
        steps=min(30, len(data) // size // TURNS),
        make_optimizer=lambda model: script.make_optimizer(model, args),
        losses=("loss", "accuracy"),
        count=lambda batches: [float(sum(int(batch["length"].sum()) for batch in batches))],
    )


def exact(words: list[str]) -> None:
    """DDP against ExactSum: leaves of one conv net (compute-bound), or of linear layers with --parameters in all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=float, default=0)
    parser.add_argument("--leaves", type=int, default=4, help="of a rank in a step")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    with du.setup_distributed() as ranks:
        torch.manual_seed(0)
        if given.parameters:
            side = int((given.parameters / 4) ** 0.5)
            model, images = nn.Sequential(*[nn.Linear(side, side) for _ in range(4)]), torch.randn(16, side)
        else:
            model = nn.Sequential(nn.Conv2d(3, 48, 3), nn.ReLU(), nn.Conv2d(48, 48, 3), nn.ReLU(), nn.Flatten())
            images = torch.randn(8, 3, 64, 64)
        plain = copy.deepcopy(model)
        wrapped, total = du.wrap_in_ddp(plain, ranks.device), du.ExactSum(model)
        ddp, ours = [], []
        for _ in range(TURNS):
            for times, net in ((ddp, wrapped), (ours, model)):
                du.gather_objects(None)
                with timed(times):
                    for leaf in range(given.leaves):
                        last = leaf == given.leaves - 1
                        total.begin_leaf(last)
                        if net is wrapped and ranks.world_size > 1:
                            net.require_backward_grad_sync = last
                        net(images).square().mean().backward()
                    if net is model:
                        total.finish()
                net.zero_grad()
        count = sum(parameter.numel() for parameter in model.parameters())
        report(f"exact sum, {count / 1e6:.1f} M parameters, {ranks.world_size} processes", ddp, ours)


if __name__ == "__main__":
    parts = {part.__name__: part for part in (minimal, prs_med, mimic_cxr, cascade, compressed_ad, exact)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=parts, default="minimal")
    given, rest = parser.parse_known_args()
    parts[given.part](rest)
