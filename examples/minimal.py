"""Classify images: a minimal script with exact resume and the same results on any number of GPUs.

    python examples/minimal.py                                    # synthetic images, one process
    torchrun --nproc_per_node=4 examples/minimal.py --data_root photos --output_dir runs/photos
    python examples/minimal.py --data_root photos --output_dir runs/photos --resume_from auto

Data: <data_root>/train/<class>/*.png and <data_root>/val/<class>/*.png (or *.jpg).

For your own task, copy this file to the project's root, the folder that contains train.py, and adapt it.
"""

import sys
from argparse import Namespace
from pathlib import Path

# if you copy this file to the project's root, delete the next line and `import sys`
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils.cli import InputError, Parser, add_common_arguments, launch_workers, real, run_main, whole


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument_group("task").add_argument
    add("--data_root", help="folder with train/ and val/; default: synthetic images")
    add("--image_size", type=whole(8), default=32, help="side that images are resized to")
    add("--dropout", type=real(0, 0.99), default=0.1, help="before the last layer")
    add("--warmup_steps", type=whole(0), default=5, help="optimizer steps of linear warm-up, then a cosine to 0")
    add_common_arguments(parser, output_dir="runs/minimal", num_epochs=5, learning_rate=1e-3, batch_size=16)
    return parser.parse(argv)


if __name__ == "__main__":
    # parse the flags before the slow imports, so that --help appears immediately
    ARGS = parse_args()
    launch_workers(ARGS.world_size)

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import distributed_utils as du
from hardware_utils import autocast, set_precision
from utils import checkpoint
from utils.engine import make_engine
from utils.images import open_image
from utils.loop import Plan, Run, Training


class Images(Dataset):
    """Dataset of the images in <root>/<class>/*.png or *.jpg, or of synthetic images if `root` is None.

    Synthetic images are noise that is brighter in the left half (class "left") or in the right half (class "right"). An
    unreadable image gives a sample with an "error" message, which makes the training loop stop all ranks.
    """

    def __init__(
        self, root: Path | None, args: Namespace, synthetic: int, augmented: bool, known: tuple[str, ...] = ()
    ):
        self.root, self.side, self.seed, self.augmented = root, args.image_size, args.seed, augmented
        self.paths = [Path(("left", "right")[number % 2], f"{number}.png") for number in range(synthetic)]
        if root:
            self.paths = sorted(path for path in root.glob("*/*") if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
        found = {path.parent.name for path in self.paths}
        self.classes = list(known) or sorted(found)
        if not self.paths or not found <= {*self.classes}:
            raise InputError(f"{root}: needs <class>/*.png or *.jpg, of the same classes as train/; check --data_root")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict:
        label, error = self.classes.index(self.paths[index].parent.name), ""
        pixels = np.random.default_rng(index).normal(size=(self.side, self.side, 3))
        pixels[:, label * self.side // 2 : (label + 1) * self.side // 2] += 0.2
        if self.root:
            try:
                image = open_image(self.paths[index]).resize((self.side, self.side))
                pixels = np.asarray(image) / 127.5 - 1
            except (OSError, ValueError) as reason:
                error = f"{self.paths[index]}: cannot be read ({reason}); mend or remove it"
        if self.augmented:
            # this seed makes augmentation the same on any number of GPUs and after a resume
            rng = np.random.default_rng([self.seed % 2**63, index.epoch, index])
            pixels = np.roll(pixels, rng.integers(-2, 3, size=2), axis=(0, 1)) * rng.uniform(0.9, 1.1)
        return {"image": pixels.transpose(2, 0, 1).astype(np.float32), "label": label, "error": error}


def make_model(classes: int, dropout: float) -> nn.Module:
    """Return a network that maps images (B, 3, H, W) to logits (B, classes).

    GroupNorm is used because the statistics of BatchNorm would depend on the number of GPUs.
    """
    body = [nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(1, 16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(128, classes))


def loss_sum(model: nn.Module, batch: dict, precision: str) -> tuple[Tensor, Tensor]:
    with autocast(batch["image"].device, precision):
        logits = model(batch["image"]).float()
    return F.cross_entropy(logits, batch["label"], reduction="sum"), (logits.argmax(1) == batch["label"]).sum()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, run: Run, precision: str, split: str = "val") -> dict[str, float]:
    """All ranks: return the mean loss and accuracy over a dataset, bit-identical on any number of GPUs."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=run.ranks.device)
    for batch in run.batches(loader):
        sums += du.round_for_exact_sum(torch.stack(loss_sum(model, batch, precision)))
    loss, right = (du.reduce_sum(sums.cpu()) / len(loader.dataset)).tolist()
    return {f"{split}/loss": loss, f"{split}/accuracy": right}


def train(args: Namespace, ranks: du.Ranks) -> int:
    device = ranks.device
    precision, described = set_precision(args.mixed_precision, device, args.deterministic)
    # check all inputs before Training() begins, so that an input error leaves an existing run unchanged
    run = Run("minimal/1", args, ranks, advice="lower --image_size", model_flags=("image_size", "dropout"))
    args = run.args
    folder = Path(args.data_root) if args.data_root else None
    train_set = Images(folder and folder / "train", args, synthetic=203, augmented=True)
    val_set = Images(folder and folder / "val", args, synthetic=50, augmented=False, known=train_set.classes)
    torch.manual_seed(args.seed)
    model = make_model(len(train_set.classes), args.dropout).to(device)

    def try_once(size: int) -> None:
        image = torch.rand(size, 3, args.image_size, args.image_size, device=device)
        batch = {"image": image, "label": torch.zeros(size, dtype=torch.long, device=device)}
        loss_sum(model, batch, precision)[0].backward()

    options = {"seed": args.seed, "num_workers": args.num_workers}
    if args.eval_only:
        checkpoint.load_trained(model, run.checkpoint["model"])
        val_loader = du.create_distributed_dataloader(val_set, run.micro_batch_size, train=False, **options)
        metrics = evaluate(model, val_loader, run, precision)
        du.print_main(metrics)
        run.write_summary("eval_val", metrics)
        return 0

    batch = run.plan_batches(model, try_once, args.batch_size, args.effective_batch_size)
    val_loader = du.create_distributed_dataloader(val_set, batch.micro_batch_size, train=False, **options)
    loader = du.create_distributed_dataloader(
        train_set, batch.micro_batch_size, True, batch.global_batch_size, batch.gpu_shares, **options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    engine = make_engine(model, optimizer, precision, args, device, saved=run.checkpoint)
    steps = args.num_epochs * loader.batch_sampler.steps_per_epoch()
    invariants = {"training images": len(train_set), "validation images": len(val_set), "classes": train_set.classes}

    with Training(run, args, engine, Plan(batch, steps, ["loss"], invariants, {"precision": described})) as training:
        while not training.is_over():
            model.train()
            for step in training.steps(loader):
                for micro_batch in step.micro_batches():
                    # divide by the number of samples on all GPUs, so that the losses of the micro-batches add up to the
                    # mean
                    step.backward(loss_sum(engine.wrapped, micro_batch, precision)[0] / step.samples)
                step.update(args.learning_rate * du.schedule(run.position.step, steps, args.warmup_steps, "cosine"))
            if training.stopped:
                return training.save_and_stop()
            training.record(evaluate(model, val_loader, run, precision), headline="val/accuracy")
        training.finish()
    return 0


def main(args: Namespace) -> int:
    with du.setup_distributed(args.dist_timeout) as ranks:
        return train(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
