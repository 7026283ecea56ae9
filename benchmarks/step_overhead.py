"""What the script's training loop costs over a bare one, and what a second process brings.

    python benchmarks/step_overhead.py            # on CPU about 4 minutes

Same model, seed, data and optimizer in all. One process: samples/s of train_prs_med.train_one_epoch over a bare loop
(ratio, alternating in one run), and whether the weights after 20 steps are equal bit for bit; the same for 2 processes
against a bare DDP loop. Then samples/s of 2 processes over 1, one thread each, on a larger, compute-bound size.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def bare_loop(model, loader, optimizer, args, ranks, steps: int) -> None:
    """The shortest correct loop: no logging, checkpoints, signals, resume, NaN guard."""
    import torch

    import train_prs_med as prs

    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _, batch in zip(range(steps), loader, strict=False):
        tokens = torch.tensor(int((batch["answer"] >= 0).sum()), dtype=torch.float64)
        if ranks.world_size > 1:
            torch.distributed.all_reduce(tokens)
        logits, text = model(prs.du.to_device(batch, ranks.device))
        masks = prs.mask_loss(logits, batch["mask"]).sum() / (len(text) * ranks.world_size)
        loss = (args.lambda_seg * masks + args.lambda_txt * (text.sum() / tokens.item())) * ranks.world_size
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def digest(model) -> str:
    state = model.state_dict()
    return hashlib.sha256(b"".join(value.detach().cpu().numpy().tobytes() for value in state.values())).hexdigest()


def measure(options: argparse.Namespace) -> None:
    """One rank's part of a measurement; rank 0 prints a JSON line."""
    import train_prs_med as prs

    words = ["--data_root", options.data, "--mixed_precision", "no", "--batch_size", str(options.batch)]
    words += ["--lora_dropout", "0", "--checkpoint_dir", options.out, "--lr_scaling", "none", "--save_every", "0"]
    args = prs.parse_args(words)
    prs.adopt_architecture(args, None)
    with prs.du.setup_distributed() as ranks:
        result = compare(prs, args, ranks, options)
        if ranks.is_main:
            print(json.dumps(result), flush=True)


def compare(prs, args, ranks, options: argparse.Namespace) -> dict:
    from torch.nn.parallel import DistributedDataParallel

    rows = [row for row in prs.read_annotations(Path(args.data_root), None, False) if row.split == "train"]

    def build(kind: str) -> dict:
        model = prs.build_model(args, ranks)
        data = prs.PositionData(rows, model.reader, True)
        for i in range(len(data)):
            data[i]
        loader = prs.du.create_distributed_dataloader(data, args.batch_size, collate_fn=model.reader.collate)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if ranks.world_size > 1 else model
        log = prs.RunLog(Path(args.checkpoint_dir) / kind, ranks, prs.LOSSES, args, 10**9) if kind == "script" else None
        optimizer, scaler = prs.make_optimizer(model, args)
        state = {"step": 0, "epoch": 0, "samples": 0}
        return {"model": model, "wrapped": wrapped, "loader": loader, "log": log, "optimizer": optimizer,
                "scaler": scaler, "state": state}  # fmt: skip

    def run(kind: str, it: dict, steps: int) -> float:
        begun, done = time.perf_counter(), 0
        while done < steps:
            now = min(steps - done, it["loader"].batch_sampler.steps_per_epoch())
            it["loader"].batch_sampler.set_position(it["state"]["epoch"])
            if kind == "bare":
                bare_loop(it["wrapped"], it["loader"], it["optimizer"], args, ranks, now)
            else:
                it["state"]["samples"] = 0
                # the last step of this call, and the steps of the whole training
                ends = it["state"]["step"] + now, 10**9
                prs.train_one_epoch(it["wrapped"], it["loader"], it["optimizer"], it["scaler"], it["state"], ends, args,
                                    ranks, it["log"], prs.du.StopSignal(), lambda: None)  # fmt: skip
            it["state"]["epoch"] += 1
            done += now
        return steps * args.batch_size * ranks.world_size / (time.perf_counter() - begun)

    for kind in ("bare", "script"):
        (Path(args.checkpoint_dir) / kind).mkdir(parents=True, exist_ok=True)
    sides = {kind: build(kind) for kind in options.kinds.split(",")}
    for kind, it in sides.items():
        run(kind, it, 20)
    equal = len({digest(it["model"]) for it in sides.values()}) == 1
    rates: dict[str, list[float]] = {kind: [] for kind in sides}
    for repeat in range(options.repeats):
        order = list(sides.items())
        for kind, it in order if repeat % 2 else reversed(order):
            rates[kind].append(run(kind, it, options.steps))
    return {"equal": equal, "rates": {kind: statistics.median(values) for kind, values in rates.items()}}


def launch(processes: int, **options) -> dict:
    """Run `measure` in so many processes of one thread each; returns rank 0's result."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += [__file__, "--measure", "--out", out]
        command += [f"--{name}={value}" for name, value in options.items()]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def sample_data(folder: str, size: int, pictures: int) -> str:
    words = [
        "prs_med",
        folder,
        "--num_train",
        str(pictures),
        "--num_val",
        "1",
        "--num_test",
        "1",
        "--image_size",
        str(size),
    ]
    subprocess.run([sys.executable, str(ROOT / "sample_data.py"), *words], check=True, stdout=subprocess.DEVNULL)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of one timing")
    parser.add_argument("--repeats", type=int, default=5, help="timings of each loop, alternating; the median counts")
    for name, default in (("data", ""), ("out", ""), ("kinds", "bare,script"), ("batch", 16)):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options)
    with tempfile.TemporaryDirectory() as folder:
        small, large = sample_data(f"{folder}/small", 96, 80), sample_data(f"{folder}/large", 192, 40)
        timing = {"steps": options.steps, "repeats": options.repeats}
        one = launch(1, data=small, **timing)
        two = launch(2, data=small, steps=1, repeats=1)
        print("1 process, samples/s:", ", ".join(f"{kind} {rate:.1f}" for kind, rate in one["rates"].items()))
        print(f"script over bare loop: {one['rates']['script'] / one['rates']['bare']:.3f}")
        print(f"weights after 20 steps equal bit for bit: 1 process {one['equal']}, 2 processes {two['equal']}")
        few = {"steps": max(4, options.steps // 4), "repeats": max(3, options.repeats // 2), "kinds": "script"}
        rates = [launch(n, data=large, **few)["rates"]["script"] for n in (1, 2, 1, 2)]
        print("compute-bound, samples/s of 1, 2, 1, 2 processes:", " ".join(f"{rate:.1f}" for rate in rates))
        print(f"2 processes over 1: {(rates[1] + rates[3]) / (rates[0] + rates[2]):.2f}")


if __name__ == "__main__":
    main()
