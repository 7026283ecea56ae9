"""What train.py costs: a training step over a raw Accelerate loop and a bare one, acting with a cache over re-reading,
and making histories by the tabular learner over stable-baselines3.

    python benchmarks/ad_step.py                # one process; on CPU about 6 minutes, 2 of them stable-baselines3
    python benchmarks/ad_step.py --real         # on a GPU: steps and evaluation at the published size

Ratios are of times that alternate in one run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Setting:
    """Histories, and the arguments of a run on them."""

    def __init__(self, folder: Path, words: list[str], ranks):
        import train

        self.args = train.parse_args(["--data", str(folder / "data"), "--output_dir", str(folder / "run"), *words])
        self.args.num_workers = 0
        train.choose_precision(self.args, ranks)
        self.ranks, self.device, self.data = ranks, ranks.device, train.Data(self.args)

    def loader(self):
        import train

        return train.du.create_distributed_dataloader(
            self.data.train, self.args.train_batch_size, drop_last=False, collate_fn=train.as_it_is
        )

    def net_and_optimizer(self):
        import torch

        import train

        net = train.build_net(self.args, self.device)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.99), weight_decay=0.01, fused=True)


def wait(device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def bare_loop(setting: Setting, net, optimizer, loader, steps: int) -> None:
    """The shortest correct loop of the same computation: no logging, checkpoints, signals, resume, NaN guard."""
    import torch

    import train

    for _, batch in zip(range(steps), loader, strict=False):
        batch = train.du.to_device(batch, setting.device)
        with train.hw.autocast(setting.device, setting.args.mixed_precision):
            losses, _ = train.action_losses(net, batch)
        (losses.sum() / (batch["action"] >= 0).sum()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def raw_accelerate_loop(setting: Setting, accelerator, net, optimizer, scheduler, loader, steps: int) -> None:
    """The loop of Accelerate's own examples: everything prepared, accumulate, backward, clip, step."""
    import train

    for _, batch in zip(range(steps), loader, strict=False):
        with accelerator.accumulate(net):
            batch = train.du.to_device(batch, setting.device)
            with accelerator.autocast():
                losses, _ = train.action_losses(net, batch)
            accelerator.backward(losses.sum() / (batch["action"] >= 0).sum())
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)


def overhead(setting: Setting, rounds: int, steps: int) -> dict:
    """Time of a step in the script's loop over the two others', alternating; and whether the weights come out equal."""
    import torch

    import train

    args, ranks, device = setting.args, setting.ranks, setting.device
    parts = [setting.net_and_optimizer() for _ in range(3)]
    loaders = [setting.loader() for _ in range(3)]
    accelerator = train.make_accelerator(args, ranks)
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
    wrapped = accelerator.prepare_model(parts[2][0])
    constant = torch.optim.lr_scheduler.ConstantLR(parts[1][1], factor=1.0)
    raw = accelerator.prepare(*parts[1], constant)
    args.lr, args.num_warmup_steps, args.train_timesteps, args.save_every = 1e-4, 0, 10**9, 0
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    log = train.RunLog(Path(args.output_dir), ranks, train.LOSSES, args, 10**9)
    state = {"step": 0, "epoch": 0, "samples": 0}
    times: dict[str, list[float]] = {"bare": [], "raw": [], "script": []}
    with train.du.StopSignal() as stop:
        for turn in range(rounds + 1):
            for name in sorted(times, key=lambda name: (list(times).index(name) + turn) % 3):
                for loader in loaders:
                    loader.batch_sampler.set_position(0, 0)
                state |= {"epoch": 0, "samples": 0}
                wait(device)
                begun = time.perf_counter()
                if name == "bare":
                    bare_loop(setting, *parts[0], loaders[0], steps)
                elif name == "raw":
                    raw_accelerate_loop(setting, accelerator, *raw, loaders[1], steps)
                else:
                    tools = wrapped, parts[2][0], accelerator, parts[2][1], scaler, loaders[2], state
                    train.train_steps(*tools, state["step"] + steps, 1e-4, args, ranks, log, stop, lambda: None)
                wait(device)
                times[name].append(time.perf_counter() - begun)
    log.close()
    same = [all(torch.equal(a, b) for a, b in zip(net.parameters(), parts[2][0].parameters(), strict=True))
            for net, _ in parts[:2]]  # fmt: skip
    found = {"ms_per_step": 1000 * statistics.median(times["script"][1:]) / steps, "equal_weights": same}
    for name in ("bare", "raw"):
        ratios = [s / b for b, s in zip(times[name][1:], times["script"][1:], strict=True)]
        found[f"step_over_{name}"] = [round(v, 4) for v in (statistics.median(ratios), min(ratios), max(ratios))]
    return found


def acting(setting: Setting, agents: int, steps: int) -> dict:
    """Steps/s of agents with their cache over those of agents that read their whole context anew at each step, from
    the latents on (the compressions are kept: re-reading these too would be slower still)."""
    import torch

    import train
    from in_context_net import Agents, visible

    net, _ = setting.net_and_optimizer()
    net = net.double().eval()
    n, device = setting.args.n_transit, setting.device
    follow = torch.from_numpy(train.dr.NEXT).to(device)

    class Forgetful(Agents):
        """The same agents without a cache."""

        @torch.no_grad()
        def act(self, cells):
            length = len(self.cells)
            full = torch.zeros(self.count, n, 3, dtype=torch.long, device=cells.device)
            rewards = torch.zeros(self.count, n, dtype=torch.float64, device=cells.device)
            if length:
                full[:, :length], rewards[:, :length] = torch.cat(self.cells, 1), torch.cat(self.rewards, 1)
            old = self.latents if self.latents is not None else None
            number = 0 if old is None else net.n_latent
            x = [] if old is None else [old]
            x += [net.tokens(full[:, :length], rewards[:, :length]), net.queries(cells[:, None], length)]
            some = torch.ones(1, dtype=torch.bool, device=cells.device) if number else None
            mask = visible(some, number, torch.tensor([n], device=cells.device), n)
            rows = [*range(number + length), number + n + length]
            out, _ = net.decode(torch.cat(x, 1), mask[:, :, rows][:, :, :, rows])
            return net.head(out[:, -1])

    times, actions = {}, {}
    for name, kind in (("cached", Agents), ("uncached", Forgetful)):
        acting, cell, taken = kind(net, agents, 20), torch.full((agents,), 40, device=device), []
        wait(device)
        begun = time.perf_counter()
        for t in range(steps):
            action = acting.act(cell).argmax(-1)
            after = follow[cell, action]
            acting.observe(torch.stack([cell, action, after], 1), (after == 22).double())
            cell = torch.full_like(cell, 40) if (t + 1) % 20 == 0 else after
            taken.append(action)
        wait(device)
        times[name], actions[name] = time.perf_counter() - begun, torch.stack(taken).cpu()
    return {"agents": agents, "steps": steps, "steps_per_s": steps / times["cached"],
            "cached_over_uncached": times["uncached"] / times["cached"],
            "same_actions": torch.equal(actions["cached"], actions["uncached"])}  # fmt: skip


def sources() -> dict:
    """Histories/s of 1000 steps: all goals by the tabular learner, one goal by stable-baselines3's PPO."""
    from tasks.compressed_ad.ppo_histories import ppo_history
    from tasks.compressed_ad.sample_data import tabular_histories

    begun = time.perf_counter()
    tabular_histories(range(81), 100, 1000, 0)
    tabular = 8100 / (time.perf_counter() - begun)
    begun = time.perf_counter()
    ppo_history(60, 100, 1000, 42)
    ppo = 100 / (time.perf_counter() - begun)
    return {"tabular_histories_per_s": tabular, "ppo_histories_per_s": ppo, "ratio": tabular / ppo}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--real", action="store_true", help="the published size, on a GPU")
    parser.add_argument("--rounds", type=int, default=12, help="times that the loops take turns")
    parser.add_argument("--steps", type=int, default=20, help="steps a turn")
    options = parser.parse_args()
    import distributed_utils as du

    with tempfile.TemporaryDirectory() as name, du.setup_distributed() as ranks:
        folder = Path(name)
        command = [sys.executable, str(ROOT / "sample_data.py"), "compressed_ad", str(folder / "data")]
        subprocess.run([*command, "--streams", "20"], check=True, capture_output=True)
        demo = ["--config", str(ROOT / "configs" / "compressed_ad_demo.yaml")]
        setting = Setting(folder, [] if options.real else demo, ranks)
        print(json.dumps({"step": overhead(setting, options.rounds, options.steps)}), flush=True)
        published = Setting(folder, [], ranks)
        print(json.dumps({"acting, published size": acting(published, 160 if options.real else 16, 600)}), flush=True)
        if not options.real:
            print(json.dumps({"acting, demo": acting(setting, 80, 1000)}), flush=True)
            print(json.dumps({"sources": sources()}), flush=True)


if __name__ == "__main__":
    main()
