"""What a training step of train_accelerate.py costs: over a bare loop, with gradient checkpointing, by SDPA.

    python benchmarks/cascade_step.py             # one process, made-up data; on CPU about 3 minutes
    python benchmarks/cascade_step.py --real      # on a GPU: the guide's three stages at their real size

Ratios are of times that alternate in one run. --real prints, per stage, samples/s, peak memory and the time that 1000
samples would take on 4 such GPUs, beside the guide's table; with bf16, and again with torch.compile.
"""

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GUIDE = {64: (15, 2), 128: (40, 8), 256: (70, 25)}  # side: GB, minutes of an epoch of 1000 samples on 4 A100


def bare_loop(net, ema, optimizer, batches, k: int, scheduler, greys, args, device, steps: int) -> None:
    """The shortest correct loop of the same computation: no logging, checkpoints, signals, resume, NaN guard."""
    import torch

    import train_accelerate as ta

    net.train()
    for step, batch in zip(range(steps), batches, strict=False):
        batch = ta.prepare(batch, args, device, k, 0)
        timestep, noise, previous = ta.training_draw(batch, k, 0, args)
        with ta.autocast(device, args.mixed_precision):
            diffusion, physics = ta.sample_losses(net, scheduler, batch, timestep, noise, previous, args, greys)
        (diffusion.mean() + args.stage_configs[k]["physics_weight"] * physics.mean()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update(net, step + 1)


class Setting:
    """A data set and stage to measure on."""

    def __init__(self, words: list[str], ranks):
        import train_accelerate as ta

        self.args = ta.parse_args(words)
        self.ranks, self.device = ranks, ranks.device
        self.args.mixed_precision, _ = ta.choose_launched_precision("auto", "default", ranks)
        self.data = ta.Data(self.args, [stage["volume_size"] for stage in self.args.stage_configs])


def overhead(setting: Setting, rounds: int, steps: int) -> dict:
    """Time of a step in the script's loop over the bare loop's, alternating; and whether the weights come out equal."""
    import torch

    import train_accelerate as ta

    args, device, k = setting.args, setting.device, 1
    stage, greys = args.stage_configs[k], setting.data.greys
    train = setting.data.set("train", stage["volume_size"])
    for i in range(len(train)):
        train[i]  # decoded before the clock starts
    scheduler, accelerator = ta.make_scheduler(args), ta.make_accelerator(args.mixed_precision, 1, setting.ranks)
    learners = []
    for _ in range(2):
        model = ta.build_model(k, args, device)
        ema, optimizer = ta.Ema(model, args.ema_decay), ta.make_optimizer(model, args)
        scaler = ta.LossScaler(device, args.mixed_precision)
        learners.append(ta.Learner(model, model, ema, optimizer, scaler))
    bare, script = learners
    script = script._replace(wrapped=accelerator.prepare_model(script.model))
    loader = ta.create_distributed_dataloader(train, stage["batch_size"], drop_last=False)
    progress = ta.StageProgress(stage=k)
    Path(args.checkpoint_dir).mkdir()
    log = ta.RunLog(Path(args.checkpoint_dir), setting.ranks, ta.LOSSES, 10**9, args.log_every, "no")
    log.open(args)
    log.context = {"stage": k + 1}
    training = ta.TrainingRun(
        run_folder=Path(args.checkpoint_dir),
        progress=progress,
        last_step=0,
        planned_steps=10**9,
        effective_batch_size=stage["batch_size"],
        precision=args.mixed_precision,
        log=log,
        contents=dict,
    )

    times: dict[str, list[float]] = {"bare": [], "script": []}
    with training.stop:
        for _ in range(rounds + 1):
            loader.batch_sampler.set_position(0)
            begun = time.perf_counter()
            bare_loop(bare.model, bare.averaged, bare.optimizer, loader, k, scheduler, greys, args, device, steps)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times["bare"].append(time.perf_counter() - begun)
            progress.samples = progress.stage_step = 0
            training.last_step = progress.step + steps
            begun = time.perf_counter()
            ta.train_one_epoch(k, script, loader, training, setting.data, args)
            times["script"].append(time.perf_counter() - begun)
    log.close()
    ratios = [script / bare for bare, script in zip(times["bare"][1:], times["script"][1:], strict=True)]
    same = all(torch.equal(a, b) for a, b in zip(bare.model.parameters(), script.model.parameters(), strict=True))
    return {"step_over_bare_loop": statistics.median(ratios), "from": min(ratios), "to": max(ratios),
            "ms_per_step": 1000 * statistics.median(times["script"][1:]) / steps, "equal_weights": same}  # fmt: skip


def compare(setting: Setting, rounds: int) -> dict:
    """Ratios of time and of kept memory: gradient checkpointing on over off, SDPA over naive attention."""
    import torch

    import train_accelerate as ta
    from tasks.cascade import model as cascade_net

    args, device, greys = setting.args, setting.device, setting.data.greys
    k = len(args.stage_configs) - 1
    net, scheduler = ta.build_model(k, args, device), ta.make_scheduler(args)
    sdpa = cascade_net.attention

    def naive(q, k, v, heads):
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    size, count = args.stage_configs[k]["volume_size"], args.stage_configs[k]["batch_size"]
    data = {"volume": torch.rand(count, 1, *size, device=device) - 1, "index": list(range(count))}
    data["xrays"] = data["seen"] = torch.rand(count, args.num_views, args.img_size, args.img_size, device=device)
    data["extent"] = torch.full((count, 3), 300.0, device=device)
    timestep, noise, previous = ta.training_draw(data, k, 0, args)

    def step() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        with ta.autocast(device, args.mixed_precision):
            losses = ta.sample_losses(net, scheduler, data, timestep, noise, previous, args, greys)
        sum(part.sum() for part in losses).backward()
        net.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def memory(checkpointing: bool) -> float:
        args.gradient_checkpointing, args.auto_batch = checkpointing, False
        return ta.measure_stage(ta.plan_as_asked(k, args), greys, None, args.mixed_precision, args, device).memory

    kinds = {"plain": (False, sdpa), "checkpointing": (True, sdpa), "naive": (False, naive)}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, (checkpointing, function) in kinds.items():
            net.checkpointing, cascade_net.attention = checkpointing, function
            times[name].append(step())
    kept = {}
    for name, (checkpointing, function) in kinds.items():
        cascade_net.attention = function
        kept[name] = memory(checkpointing)
    cascade_net.attention = sdpa
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {
        "checkpointing_memory_ratio": kept["checkpointing"] / kept["plain"],
        "checkpointing_time_ratio": middle["checkpointing"] / middle["plain"],
        "sdpa_over_naive_time": middle["plain"] / middle["naive"],
        "sdpa_over_naive_memory": kept["plain"] / kept["naive"],
        "memory_gb": kept,
    }


def real_size(ranks, seconds: float) -> None:
    """The guide's stages as configs/multi_view_config.json has them, on made-up data, one GPU."""
    import torch

    import train_accelerate as ta
    from hardware_utils import out_of_memory

    greys = [(0.2, -1.0, 1.0), (0.2, -1.0, 1.0)]
    for compiled in (False, True):
        for k, checkpointing in ((0, False), (1, False), (2, False), (2, True)):
            args = ta.parse_args(["--config", str(ROOT / "configs" / "multi_view_config.json")])
            args.mixed_precision, _ = ta.choose_launched_precision("auto", "default", ranks)
            args.gradient_checkpointing = checkpointing
            stage, device = args.stage_configs[k], ranks.device
            count, size = stage["batch_size"], stage["volume_size"]
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            row = {"stage": stage["name"], "batch": count, "precision": args.mixed_precision, "compile": compiled,
                   "checkpointing": checkpointing}  # fmt: skip
            try:
                net, scheduler = ta.build_model(k, args, device), ta.make_scheduler(args)
                ema, optimizer = ta.Ema(net, args.ema_decay), ta.make_optimizer(net, args)
                row["parameters"] = sum(p.numel() for p in net.parameters())
                if compiled:
                    net.compile()
                item = {"volume": torch.zeros(count, *size, dtype=torch.int16).pin_memory(),
                        "xrays": torch.zeros(count, 2, args.img_size, args.img_size, dtype=torch.int16).pin_memory(),
                        "extent": torch.full((count, 3), 300.0).pin_memory(), "index": torch.arange(count)}  # fmt: skip
                bare_loop(net, ema, optimizer, [item] * 3, k, scheduler, greys, args, device, 3)
                torch.cuda.synchronize()
                begun, steps = time.perf_counter(), 0
                while time.perf_counter() - begun < seconds:
                    bare_loop(net, ema, optimizer, [item] * 4, k, scheduler, greys, args, device, 4)
                    torch.cuda.synchronize()
                    steps += 4
                rate = steps * count / (time.perf_counter() - begun)
                memory, minutes = GUIDE[size[0]]
                row |= {"samples_per_s": rate, "peak_memory_gb": torch.cuda.max_memory_allocated() / 2**30}
                row |= {"minutes_per_1000_on_4": 1000 / (4 * rate) / 60, "guide_gb": memory, "guide_minutes": minutes}
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                row["out_of_memory"] = True
            net = ema = optimizer = item = None
            gc.collect()
            torch.compiler.reset()
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="alternations")
    parser.add_argument("--steps", type=int, default=8, help="steps of a round")
    parser.add_argument("--real", action="store_true", help="the guide's sizes; needs a GPU")
    parser.add_argument("--seconds", type=float, default=15, help="with --real: time for each line")
    options = parser.parse_args()
    import torch

    from distributed_utils import Ranks

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    ranks = Ranks(0, 0, 1, device, "python")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}", flush=True)
    if options.real:
        if device.type == "cpu":
            sys.exit("--real needs a GPU")
        real_size(ranks, options.seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        words = ["cascade", f"{folder}/data", "--num_patients", "44", "--matrix", "32"]
        subprocess.run([sys.executable, str(ROOT / "sample_data.py"), *words], check=True)
        net = {"voxel_dim": 64, "vit_depth": 2, "num_heads": 4}
        stages = [net | {"volume_size": [16] * 3, "token_grid": 8}, net | {"volume_size": [32] * 3, "token_grid": 16}]
        words = ["--stage_configs", json.dumps(stages), "--img_size", "64", "--encoder_dim", "64", "--batch_size", "4"]
        words += ["--dataset_path", f"{folder}/data", "--cache_dir", f"{folder}/cache", "--cache_in_memory"]
        setting = Setting([*words, "--checkpoint_dir", f"{folder}/run", "--save_every", "0"], ranks)
        print(json.dumps(overhead(setting, options.rounds, options.steps)), flush=True)
        print(json.dumps(compare(setting, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
