"""CompressedAD: train a transformer on recordings of learning agents, so that it learns new tasks from its context.

This script follows a published multi-GPU training guide, guide 4 in README.md: https://github.com/tommyma3/CCCAD

    python train.py                                                               # one GPU, or CPU
    accelerate launch --config_file accelerate_config.yaml train.py               # 2 GPUs, fp16
    torchrun --nproc_per_node=gpu train.py                                        # all GPUs on the machine
    python train.py --config configs/ad_darkroom.yaml                             # the baseline without compression
    python train.py --objective search                                            # predict a search agent's actions
    python train.py --eval_only                                                   # test best.pt on the unseen tasks

Data: an HDF5 file of recordings ("learning histories"); see tasks/compressed_ad/README.md.
"""

import copy
from argparse import Namespace

from utils.cli import Parser, add_common_arguments, launch_workers, real, run_main, whole

FORMAT = "compressed_ad/2"
ADVICE = "lower --n_transit or --tf_n_embd"
MODEL_FLAGS = tuple(
    "model tf_n_embd tf_n_layer tf_n_head tf_dim_feedforward encoder_n_layer n_latent n_transit shift from_start "
    "max_compression_depth objective split_seed env".split()
)
VAL_AGENTS = 5
# random-seed tag for acting agents, distinct from all other seed tags
ACTING = 5


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    advanced = parser.advanced.add_argument

    add = parser.add_argument_group("data").add_argument
    histories = "datasets/history_darkroom_PPO_alg-seed42.hdf5"
    add("--data", default=histories, metavar="FILE", help="HDF5 file of histories, or a folder with one in datasets/")
    text = "darkroom, darkroom:7, key_to_door:5, gym:FrozenLake-v1; default: the one named in the file, or darkroom"
    add("--env", metavar="NAME", help=text)
    add("--split_seed", type=whole(0), default=0, help="seed of the split into training and unseen tasks")
    text = "action to predict; ad: the action in the history; dpt: the action of an expert who knows the task; search: "
    text += "the action of a searcher who knows the map but learns the task from the history"
    add("--objective", choices=("ad", "dpt", "search"), default="ad", help=text)
    text = "share of segments that begin at the start of their history; the others begin at a random step"
    add("--from_start", type=real(0, 1), default=0.0, help=text)
    text = "encode cells one-hot and move the room by 0 to N cells at random during training; 0: plain coordinates"
    advanced("--shift", type=whole(0), default=0, metavar="N", help=text)

    add = parser.add_argument_group("model").add_argument
    add("--model", choices=("compressed_ad", "ad"), default="compressed_ad", help="ad: no compression")
    advanced("--tf_n_embd", type=whole(8), default=128, help="width of the transformer; lower it on OOM")
    advanced("--tf_n_layer", type=whole(1), default=4, help="decoder layers")
    advanced("--tf_n_head", type=whole(1), default=8, help="attention heads; must divide --tf_n_embd")
    advanced("--tf_dim_feedforward", type=whole(8), default=512, help="hidden width of the MLPs")
    advanced("--encoder_n_layer", type=whole(1), default=3, help="layers of the compressing encoder")
    advanced("--n_latent", type=whole(1), default=40, help="latent tokens that hold the compressed context")
    add("--n_transit", type=whole(2), default=240, help="transitions in the context; halve it on OOM")
    advanced(
        "--max_compression_depth",
        type=whole(0),
        default=3,
        help="most compressions in a training segment; acting has no limit",
    )

    add = parser.add_argument_group("optimizer and schedule").add_argument
    add("--train_timesteps", type=whole(1), default=150_000, help="optimizer steps; the cosine schedule ends there")
    add(
        "--warmup_steps",
        "--num_warmup_steps",
        dest="num_warmup_steps",
        type=whole(0),
        default=5000,
        help="optimizer steps of linear warm-up",
    )
    advanced("--weight_decay", type=real(0), default=0.01, help="weight decay of AdamW")
    text = "multiply the learning rate by N, by its root, or by 1; N: GPUs, or effective batch size / batch size"
    add("--lr_scaling", choices=("linear", "sqrt", "none"), default="none", help=text)

    add = parser.add_argument_group("evaluation").add_argument
    add("--eval_episodes", type=whole(2), default=500, help="episodes per agent in the test")
    advanced("--val_episodes", type=whole(2), default=50, help="episodes per agent in evaluations during training")
    add("--eval_seeds", type=whole(1), default=20, help="agents per unseen task in the test")
    add("--temperature", type=real(0), default=1.0, help="temperature of the softmax; 0: always the most likely action")
    advanced(
        "--test_batch_size", type=whole(1), default=256, help="agents or segments per evaluation batch; lower it on OOM"
    )
    text = "run folder of a baseline tested on the same tasks, such as --model ad; becomes a row of the table"
    add("--rival_run", metavar="DIR", help=text)

    add_common_arguments(parser, output_dir="runs/compressed_ad", num_epochs=None, learning_rate=1e-4, batch_size=128)
    parser.set_defaults(log_every=100, eval_every_steps=1000, save_every=1000)
    args = parser.parse(argv)
    if args.tf_n_embd % args.tf_n_head:
        parser.error(f"--tf_n_head {args.tf_n_head}: must divide --tf_n_embd {args.tf_n_embd}")
    if args.num_warmup_steps >= args.train_timesteps:
        parser.error(f"--num_warmup_steps {args.num_warmup_steps}: must be below --train_timesteps")
    if args.model == "ad":
        # ignore --n_latent, so that a config file for --model compressed_ad also works with --model ad
        args.n_latent = 0
    return args


if __name__ == "__main__":
    # parse the flags before the heavy imports, so that --help appears immediately
    ARGS = parse_args()
    launch_workers(ARGS.world_size)

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distributed_utils as du
from hardware_utils import autocast, check_accelerate, choose_precision, set_precision
from tasks.compressed_ad import report
from tasks.compressed_ad.data import Env, Histories, SegmentDataset, make_env, split_tasks
from utils import checkpoint
from utils.cli import InputError, with_flags
from utils.engine import make_engine
from utils.loop import Plan, Run, Training

# --- model ------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key_value, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, cache=None, cached: int = 0
    ) -> Tensor:
        """Transform the tokens x (B, N, D), which attend to earlier tokens and to each other.

        The earlier tokens are given either as `memory` (B, M, D) or as the keys and values in the first `cached` slots
        of `cache` (2, B, heads, slots, D / heads). The keys and values of x are added to the cache. mask: (..., N, M +
        N), True where attention is allowed.
        """
        normed = self.norm(x)
        source = normed if memory is None else torch.cat([self.norm(memory), normed], 1)
        queries = self.query(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        halves = self.key_value(source).chunk(2, -1)
        keys, values = (half.unflatten(-1, (self.heads, -1)).transpose(1, 2) for half in halves)
        if cache is not None:
            end = cached + x.shape[1]
            cache[0, :, :, cached:end], cache[1, :, :, cached:end] = keys, values
            keys, values = cache[:, :, :, :end]
        attended = F.scaled_dot_product_attention(queries, keys, values, mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class InContextNet(nn.Module):
    """Transformer that predicts an agent's action from the agent's past (Algorithm Distillation, Laskin et al. 2022).

    Each past transition is one token; each state that needs an action is one query token. When the context is full, an
    encoder compresses it and the previous latent tokens into new latent tokens. With n_latent = 0, the oldest
    transitions are dropped instead.
    """

    def __init__(self, env: Env, args: Namespace):
        super().__init__()
        dim, heads, hidden = args.tf_n_embd, args.tf_n_head, args.tf_dim_feedforward
        self.n_transit, self.n_latent, self.heads, self.actions = args.n_transit, args.n_latent, heads, env.actions
        coordinates = torch.from_numpy(env.coordinates)
        size = int(coordinates.max()) + 1
        self.shift, self.codes = args.shift, size + args.shift if args.shift or not env.is_grid else 0
        if not self.codes:
            coordinates = coordinates.float() / (size // 2) - 1
        self.register_buffer("coordinates", coordinates, persistent=False)
        width = coordinates.shape[1] * max(1, self.codes)
        self.embed = nn.Sequential(nn.Linear(2 * width + env.actions + 1, dim), nn.LayerNorm(dim))
        self.embed_query = nn.Linear(width, dim) if self.codes else nn.Embedding(env.cells, dim)
        self.positions = nn.Parameter(torch.randn(args.n_transit, dim) * 0.02)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(args.tf_n_layer))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, env.actions))
        if self.n_latent:
            self.latents = nn.Parameter(torch.randn(self.n_latent, dim) * 0.02)
            self.encoder = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(args.encoder_n_layer))
            self.encoder_norm = nn.LayerNorm(dim)

    def compile(self) -> None:
        """Compile each layer for dynamic shapes, because the number of samples to compress varies."""
        for layer in self.modules():
            if isinstance(layer, Layer):
                layer.compile(dynamic=True)

    def encode(self, cells: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        coordinates = self.coordinates[cells]
        if self.codes:
            moved = coordinates + shift[:, None, : coordinates.shape[-1]]
            coordinates = F.one_hot(moved, self.codes).flatten(2)
        return coordinates.to(dtype)

    def embed_transitions(self, cells: Tensor, rewards: Tensor, shift: Tensor, first: int = 0) -> Tensor:
        cell, action, next_cell = cells.long().unbind(-1)
        state, next_state = (self.encode(each, shift, rewards.dtype) for each in (cell, next_cell))
        action = F.one_hot(action, self.actions).to(rewards.dtype)
        embedded = self.embed(torch.cat([state, action, rewards[..., None], next_state], -1))
        return embedded + self.positions[first : first + cells.shape[1]]

    def embed_queries(self, cells: Tensor, shift: Tensor, first: int = 0) -> Tensor:
        """Return one query token for each cell: (B, N) -> (B, N, D).

        first: position of the first query in the context.
        """
        cells = cells.long()
        embedded = self.embed_query(self.encode(cells, shift, self.positions.dtype) if self.codes else cells)
        return embedded + self.positions[first : first + cells.shape[1]]

    def compress(self, latents: Tensor | None, tokens: Tensor) -> Tensor:
        memory = tokens if latents is None else torch.cat([latents, tokens], 1)
        x = self.latents.expand(len(tokens), -1, -1)
        for layer in self.encoder:
            x = layer(x, memory=memory)
        return self.encoder_norm(x)

    def decode(self, x: Tensor, mask: Tensor | None, cache: list[Tensor] | None = None, cached: int = 0) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, mask=mask, cache=cache and cache[number], cached=cached)
        return x

    def forward(self, batch: dict) -> Tensor:
        """Return action logits (B, n_transit, actions) for each position of the context, given all earlier transitions.

        The entries of `batch`:

        cells: (B, blocks + 1, n_transit, 3), cell, action and next cell; blocks to compress come before the context.
        rewards: (B, blocks + 1, n_transit).
        depth: (B,), number of blocks to compress, in descending order.
        compressed: list; entry i is the number of samples with more than i blocks.
        length: (B,), number of transitions in the context.
        shift: (B, 2), row and column offset of the room.
        """
        cells, rewards, shift = batch["cells"], batch["rewards"].to(self.positions.dtype), batch["shift"]
        context = self.embed_transitions(cells[:, -1], rewards[:, -1], shift)
        parts = [context, self.embed_queries(cells[:, -1, :, 0], shift)]
        if self.n_latent:
            latents = self._compress_blocks(cells, rewards, shift, batch["compressed"])
            latents = F.pad(latents, (0, 0, 0, 0, 0, len(cells) - len(latents)))
            parts.insert(0, latents.to(context.dtype))
        mask = visible(batch["depth"] > 0, self.n_latent, batch["length"], self.n_transit)
        x = self.decode(torch.cat(parts, 1), mask)
        return self.head(x[:, -self.n_transit :])

    def _compress_blocks(self, cells: Tensor, rewards: Tensor, shift: Tensor, compressed: list[int]) -> Tensor:
        """Return the latent tokens of the samples that have blocks to compress; these samples come first in the batch.

        Always compresses at least one sample, even if none has blocks: DDP needs encoder gradients on every rank, and
        flash attention rejects empty batches (github.com/pytorch/pytorch/issues/133780).
        """
        first, *later = compressed
        first = max(1, first)
        latents = self.compress(None, self.embed_transitions(cells[:first, 0], rewards[:first, 0], shift[:first]))
        for block, count in enumerate(later, start=1):
            if count:
                tokens = self.embed_transitions(cells[:count, block], rewards[:count, block], shift[:count])
                latents = torch.cat([self.compress(latents[:count], tokens), latents[count:]])
        return latents


def visible(has_past: Tensor, n_latent: int, length: Tensor, n_transit: int) -> Tensor:
    """Return the attention mask (B, 1, N, N) of [latents | context | queries], True where attention is allowed.

    Every token attends to the latents. Context tokens and queries also attend to earlier context tokens. Padding is
    hidden from other tokens. Every token attends to itself, because softmax needs a True in each row. has_past: (B,),
    False if the latents are padding. length: (B,), number of real context tokens.
    """
    index = torch.arange(n_latent + 2 * n_transit, device=length.device)
    is_latent, is_query = index < n_latent, index >= n_latent + n_transit
    is_context = ~(is_latent | is_query)
    column = (index - n_latent) % n_transit
    row = column[:, None]
    seen = is_latent | is_context & (is_context[:, None] & (column <= row) | is_query[:, None] & (column < row))
    is_real = is_context & (column < length[:, None, None]) | is_latent & has_past[:, None, None]
    return (seen & is_real | (index == index[:, None]))[:, None]


# --- loss -------------------------------------------------------------------------------------------------------------


def action_losses(model: nn.Module, batch: dict, precision: str) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy and the correctness (0 or 1) of each prediction, two float32 tensors (B, n_transit).

    Both are 0 on padding.
    """
    target = batch["action"]
    with autocast(target.device, precision):
        logits = model(batch)
    logits = logits.float()
    losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none", ignore_index=-100)
    return losses, (logits.argmax(-1) == target).float()


# --- acting -----------------------------------------------------------------------------------------------------------


class Agents:
    """A batch of agents that share one model but have their own past transitions.

    The model should be in float64: rounding errors are then too small to change an action.
    """

    def __init__(self, model: InContextNet, count: int, forget: int):
        """forget: number of transitions that a model without compression drops when the context is full."""
        self.model, self.forget = model, forget
        like = model.positions
        self.cells = like.new_zeros(count, model.n_transit, 3, dtype=torch.long)
        self.rewards = like.new_zeros(count, model.n_transit)
        # training shifts room coordinates by a random offset of at most model.shift; acting fixes it at half of that
        self.shift = self.cells.new_full((count, 2), model.shift // 2)
        shape = (2, count, model.heads, model.n_latent + model.n_transit + 1, like.shape[1] // model.heads)
        self.cache = [like.new_zeros(shape) for _ in model.layers]
        self.latents: Tensor | None = None
        # counts: transitions in the context, transitions not cached yet, tokens in the cache
        self.length = self.uncached = self.cached = 0

    def act(self, cells: Tensor) -> Tensor:
        """Return action logits (count, actions) for the agents' current cells (count,)."""
        new = slice(self.length - self.uncached, self.length)
        transitions = self.model.embed_transitions(self.cells[:, new], self.rewards[:, new], self.shift, new.start)
        query = self.model.embed_queries(cells[:, None], self.shift, self.length)
        x = torch.cat([transitions, query], 1)
        # decode() also caches the query, but self.cached does not count it, so the next act() overwrites it
        mask = torch.ones(x.shape[1], self.cached + x.shape[1], device=x.device).tril(self.cached).bool()
        x = self.model.decode(x, mask, self.cache, self.cached)
        self.cached += self.uncached
        self.uncached = 0
        return self.model.head(x[:, -1])

    def observe(self, cell: Tensor, action: Tensor, next_cell: Tensor, reward: Tensor) -> None:
        self.cells[:, self.length] = torch.stack([cell, action, next_cell], 1)
        self.rewards[:, self.length] = reward
        self.length += 1
        self.uncached += 1
        if self.length < self.model.n_transit:
            return
        if self.model.n_latent:
            tokens = self.model.embed_transitions(self.cells, self.rewards, self.shift)
            self.latents = self.model.compress(self.latents, tokens)
            self.model.decode(self.latents, None, self.cache)
            self.length, self.cached = 0, self.model.n_latent
        else:
            # the remaining transitions have new positions, so the next act() encodes all of them again
            self.cells, self.rewards = self.cells.roll(-self.forget, 1), self.rewards.roll(-self.forget, 1)
            self.length, self.cached = self.length - self.forget, 0
        self.uncached = self.length


@torch.no_grad()
def act_in_context(
    model: InContextNet, env: Env, tasks: list[int], count: int, episodes: int, run: Run, args: Namespace
) -> tuple[np.ndarray, np.ndarray]:
    """All ranks: let `count` agents per task act, split among the ranks; return (returns, path).

    returns: (tasks, count, episodes), the total reward of each episode, identical for any number of ranks. path:
    (episodes, horizon + 1), states of the first agent on the first task, valid on rank 0 only.
    """
    rank, world_size = du.world()
    device = model.positions.device
    actor = copy.deepcopy(model).double().eval()
    next_states, rewards = (torch.from_numpy(table[tasks]).to(device) for table in (env.next, env.reward))
    cumulative = None if env.cumulative is None else torch.from_numpy(env.cumulative[tasks]).to(device)
    returns = torch.zeros(len(tasks) * count, episodes, dtype=torch.float64)
    path = torch.full((episodes, env.horizon + 1), env.start, device=device)
    local = range(rank, len(returns), world_size)
    for first in range(0, len(local), args.test_batch_size):
        numbers = list(local[first : first + args.test_batch_size])
        row = torch.tensor(numbers, device=device) // count
        rngs = [np.random.default_rng([args.seed % 2**63, ACTING, tasks[n // count], n % count]) for n in numbers]
        agents = Agents(actor, len(numbers), min(env.horizon, model.n_transit // 2))
        for episode in range(episodes):
            run.heartbeat(f"episode {episode + 1} of an evaluation at step {run.position.step}")
            # Gumbel noise scaled by the temperature: argmax(logits + noise) samples from softmax(logits / temperature)
            uniform = np.stack([rng.random((env.horizon, env.actions)) for rng in rngs], 1)
            noise = -np.log(-np.log(np.maximum(uniform, 1e-300)))
            noise = args.temperature * torch.from_numpy(noise).to(device)
            if cumulative is not None:
                outcome_draw = torch.from_numpy(np.stack([rng.random(env.horizon) for rng in rngs], 1)).to(device)
            state, total = torch.full_like(row, env.start), torch.zeros_like(row, dtype=torch.float64)
            for t in range(env.horizon):
                cell = state % env.cells
                action = (agents.act(cell) + noise[t]).argmax(-1)
                outcome = 0
                if cumulative is not None:
                    outcome = (outcome_draw[t, :, None] >= cumulative[row, state, action]).sum(1)
                reward = rewards[row, state, action, outcome]
                state = next_states[row, state, action, outcome]
                agents.observe(cell, action, state % env.cells, reward)
                total = total + reward
                if first == 0:
                    path[episode, t + 1] = state[0]
            returns[numbers, episode] = total.cpu()
    return du.reduce_sum(returns).numpy().reshape(len(tasks), count, episodes), path.cpu().numpy()


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def action_accuracy(model: InContextNet, segments: SegmentDataset, run: Run, precision: str, batch_size: int) -> dict:
    """All ranks: return {"loss": mean cross-entropy, "accuracy": fraction of correct actions} over all segments."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    # the dataset returns whole batches, and collate_fn=dict does not change them
    loader = du.create_distributed_dataloader(segments, batch_size, train=False, collate_fn=dict)
    for batch in run.batches(loader):
        losses, right = action_losses(model, batch, precision)
        parts = (losses, right, batch["action"] >= 0)
        # round the sums so that the total is the same in any order; dividing by 1024 keeps it below 8192, where
        # additions are exact
        sums += torch.stack([du.round_for_exact_sum(part.double().sum() / 1024) for part in parts]).cpu()
    loss, right, count = du.reduce_sum(sums).tolist()
    return {"loss": loss / count, "accuracy": right / count}


def evaluate(model: InContextNet, splits: dict[str, SegmentDataset], run: Run, precision: str, args: Namespace) -> dict:
    """All ranks: evaluate the model during training; return {"split/metric": value}.

    All splits must have the same number of tasks.
    """
    env = splits["val"].histories.env
    tasks = [task for segments in splits.values() for task in segments.tasks.tolist()]
    returns, _ = act_in_context(model, env, tasks, VAL_AGENTS, args.val_episodes, run, args)
    metrics = {}
    for (split, segments), part in zip(splits.items(), np.split(returns, len(splits)), strict=True):
        measured = action_accuracy(model, segments, run, precision, args.test_batch_size)
        measured |= report.return_metrics(part, env, segments.tasks.tolist())
        metrics |= {f"{split}/{name}": value for name, value in measured.items()}
    return metrics


def test(
    model: InContextNet, unseen: SegmentDataset, baseline_run: dict, run: Run, precision: str, args: Namespace
) -> dict:
    """All ranks: test the model on the unseen tasks; return {metric: value}. Rank 0 also prints a table."""
    env, tasks = unseen.histories.env, unseen.tasks.tolist()
    returns, path = act_in_context(model, env, tasks, args.eval_seeds, args.eval_episodes, run, args)
    measured = action_accuracy(model, unseen, run, precision, args.test_batch_size)
    measured |= report.return_metrics(returns, env, tasks)
    metrics = {f"test/{name}": value for name, value in measured.items()}
    table, name = {}, "eval_test" if args.eval_only else "test"
    with du.agree_on_errors():
        if run.ranks.is_main:
            csv = run.folder / f"{name}_returns.csv"
            table, figure = report.report_test(metrics, returns, path, unseen, csv, baseline_run, args)
            run.figure(name, figure)
    return metrics | du.broadcast_object(table)


# --- training run -----------------------------------------------------------------------------------------------------


def build_model(args: Namespace, precision: str, device: torch.device, env: Env | None = None) -> InContextNet:
    # with the same seed, every rank initializes the model identically
    torch.manual_seed(args.seed)
    return InContextNet(env or make_env(args.env or "darkroom"), args).to(device)


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """Return a fused AdamW optimizer with the betas of the published training guide (guide 4)."""
    return torch.optim.AdamW(
        model.parameters(), args.learning_rate, betas=(0.9, 0.99), weight_decay=args.weight_decay, fused=True
    )


def largest_batch(model: InContextNet, size: int, depth: int = 3) -> dict:
    depth = depth if model.n_latent else 0
    shape, zeros = (size, depth + 1, model.n_transit), torch.zeros(size, dtype=torch.long)
    batch = {"cells": torch.zeros(*shape, 3, dtype=torch.int16), "rewards": torch.zeros(shape), "depth": zeros + depth}
    batch |= {"length": zeros + model.n_transit, "action": torch.zeros(size, model.n_transit, dtype=torch.long)}
    return batch | {"shift": torch.zeros(size, 2, dtype=torch.long), "compressed": [size] * depth}


def trial_step(model: nn.Module, batch: dict, args: Namespace) -> None:
    device = next(model.parameters()).device
    precision, _ = choose_precision(args.mixed_precision, device)
    action_losses(model, du.to_device(batch, device), precision)[0].mean().backward()


def run_task(args: Namespace, ranks: du.Ranks) -> int:
    check_accelerate(args.gradient_accumulation_steps)
    precision, described = set_precision(args.mixed_precision, ranks.device, args.deterministic)
    # these lines match the sample output of the training guide (guide 4 in README.md)
    kind = f"MULTI_{'GPU' if ranks.device.type == 'cuda' else 'CPU'}" if ranks.world_size > 1 else "NO"
    du.print_main(
        f"Distributed training: {kind}\nNumber of processes: {ranks.world_size}\nMixed precision: {precision}"
    )
    for rank, device in enumerate(du.gather_objects(str(ranks.device))):
        du.print_main(f"Process {rank} using device: {device}")

    run = Run(FORMAT, args, ranks, ADVICE, MODEL_FLAGS)
    args = run.args
    with du.agree_on_errors():
        histories = Histories(args.data, args.env, args.objective, args.seed)
        if args.n_transit > histories.steps:
            raise InputError(f"--n_transit {args.n_transit}: more than the {histories.steps} steps of the histories")
        if args.shift and not histories.env.is_grid:
            raise InputError(f"--shift {args.shift}: {histories.env.name} is no room; leave it out")
        args = with_flags(args, env=histories.env.name)
        train_tasks, unseen_tasks = split_tasks(len(histories.words), args.split_seed)
        baseline_run = report.read_baseline_run(args.rival_run, histories.env, unseen_tasks) if args.rival_run else {}
        segments = SegmentDataset(histories, train_tasks, args, train=True)
        if args.n_latent and not segments.max_depth:
            reason = f"with histories of {histories.steps} steps nothing would be compressed in training"
            raise InputError(f"--n_transit {args.n_transit}: {reason}; halve it, or take --model ad")
    # "val" (training tasks) selects best.pt; "unseen" (test tasks) is evaluated for information only
    splits = {"val": train_tasks[: len(unseen_tasks)], "unseen": unseen_tasks}
    splits = {name: SegmentDataset(histories, tasks, args, train=False) for name, tasks in splits.items()}
    model = build_model(args, precision, ranks.device, histories.env)
    if args.eval_only:
        checkpoint.load_trained(model, run.checkpoint["model"])
        results = test(model, splits["unseen"], baseline_run, run, precision, args)
        run.write_summary("eval_test", results | {"step": run.position.step})
        return 0

    def try_once(size: int) -> None:
        trial_step(model, largest_batch(model, size, segments.max_depth), args)

    batch = run.plan_batches(model, try_once, args.batch_size, args.effective_batch_size)
    loader = du.create_distributed_dataloader(
        segments,
        batch.micro_batch_size,
        True,
        batch.global_batch_size,
        batch.gpu_shares,
        args.seed,
        args.num_workers,
        collate_fn=dict,
    )
    base_lr = du.scale_learning_rate(args.learning_rate, batch.lr_factor, args.lr_scaling)
    size = sum(parameter.numel() for parameter in model.parameters())
    longest = f"the longest has {histories.longest}; {histories.repaired} next states at episode ends were corrected"
    tasks = f"{len(train_tasks)} tasks, {len(unseen_tasks)} unseen by split {args.split_seed}"
    context = f"{segments.max_depth} compressed blocks and a context; {args.from_start:.0%} from a history's start"
    banner = {
        "precision": described,
        "model": f"{args.model}, {size} parameters, context {args.n_transit}, {args.n_latent} latents",
        "objective": args.objective,
        "histories": f"{histories.streams} of {histories.steps} steps ({longest}) for each of {tasks}",
        "segments": f"{len(segments)} per epoch, of at most {context}",
    }
    plan = Plan(batch, args.train_timesteps, ["loss", "accuracy"], {"digest": histories.digest}, banner)
    engine = make_engine(model, make_optimizer(model, args), precision, args, ranks.device, saved=run.checkpoint)

    def count(batches: list[dict]) -> list[float]:
        return [float(sum(int(batch["length"].sum()) for batch in batches))]

    with Training(run, args, engine, plan) as training:
        while not training.is_over():
            model.train()
            for step in training.steps(loader, count):
                # the step's loss is the mean over the actions on all ranks
                weight = 1 / step.totals[0]
                for micro_batch in step.micro_batches():
                    losses, right = action_losses(engine.wrapped, micro_batch, precision)
                    step.backward(losses.sum() * weight, right.sum() * weight)
                step.update(
                    base_lr * du.schedule(run.position.step, args.train_timesteps, args.num_warmup_steps, "cosine")
                )
            if training.stopped:
                return training.save_and_stop()
            # training.steps() also ends after each epoch, even if no evaluation is due
            due = training.evaluation_due or training.is_over()
            metrics = evaluate(model, splits, run, precision, args) if due else {}
            training.record(metrics, headline="val/loss", lower=True)
        training.load_best()
        training.finish(test(model, splits["unseen"], baseline_run, run, precision, args))
    return 0


def main(args: Namespace) -> int:
    with du.setup_distributed(args.dist_timeout) as ranks:
        return run_task(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
