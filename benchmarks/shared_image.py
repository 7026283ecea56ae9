"""What --questions_per_image brings in guide 1: questions/s of a step that encodes an image once for all its questions.

    python benchmarks/shared_image.py                      # about 2 minutes on 2 idle cores; --rounds, --questions

The same model takes the same questions about one image, with the image once and repeated for each question as in a loop
that shares nothing. Both kinds of steps alternate, with the script's own loss and update; the median ratio counts, of
processor seconds of one thread, so that what else runs on the machine counts for little.

The proportions are real, at a smaller scale: ConvNeXt-base at 224 pixels and BERT-base, both at half their width.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from old.flops_utils import FlopCount
from old.loop_utils import LossScaler, clip_and_step
from old.sample_data_utils import save_model

CPU = torch.device("cpu")
GOAL = 1.8
# the loss of a question may differ by so much, relative
TOLERANCE = 1e-6


class Steps(NamedTuple):
    """A model, batches of the same questions, the loss of each question and of a batch, and what updates the model."""

    model: nn.Module
    shared: dict
    repeated: dict
    losses: Callable[[dict], torch.Tensor]
    loss: Callable[[dict], torch.Tensor]
    optimizer: torch.optim.Optimizer


def write_samples(task: str, folder: Path, sizes: str) -> None:
    """The task's sample data, with its tiny checkpoints."""
    import subprocess

    command = [sys.executable, "-m", "tools.sample_data", task, str(folder), *sizes.split()]
    subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, check=True, stdout=subprocess.DEVNULL)


# --- the model --------------------------------------------------------------------------------------------------------

# Both at half their width.
CONVNEXT = {
    "depths": [3, 3, 27, 3],
    "hidden_sizes": [64, 128, 256, 512],
}
BERT = {
    "hidden_size": 384,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
}


def copy_tokenizer(source: Path, target: Path):
    """Save a tiny checkpoint's tokenizer beside another model; returns it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(target)
    return tokenizer


def command_line(flags: str, paths: dict[str, Path]) -> list[str]:
    """Some flags, and those that name a file or folder."""
    words = flags.split()
    for name, path in paths.items():
        words += [f"--{name}", str(path)]
    return words


def write_mimic_cxr_models(folder: Path, tiny: Path) -> None:
    """ConvNeXt-base and BERT-base at half their width."""
    from transformers import BertConfig, BertModel
    from transformers import ConvNextConfig, ConvNextModel

    image = ConvNextConfig(**CONVNEXT)
    save_model(ConvNextModel(image), folder / "convnext")
    tokenizer = copy_tokenizer(tiny, folder / "bert")
    text = BertConfig(vocab_size=len(tokenizer), **BERT)
    save_model(BertModel(text), folder / "bert")


def mimic_cxr(folder: Path, questions: int) -> Steps:
    """train_mimic_cxr.py by its torch engine."""
    import train_mimic_cxr as script
    from old.loop_utils import Step

    data = folder / "data"
    write_samples("mimic_cxr", data, "--num_train 8 --num_val 2 --num_test 2 --image_size 256")
    write_mimic_cxr_models(folder, data / "bert_tiny")
    paths = {
        "mimic_cxr_path": data / "mimic-cxr-jpg",
        "mimic_qa_path": data / "mimic-ext-cxr-qba",
        "image_encoder": folder / "convnext",
        "text_encoder": folder / "bert",
    }
    args = script.parse_args(command_line("--dropout 0 --no_auto_optimize --mixed_precision no", paths))
    model, tokenizer = script.build_model(args, "no", CPU)

    # the first study's
    images = paths["mimic_cxr_path"]
    index = script.open_index(folder / "index", images, paths["mimic_qa_path"])
    sets = script.open_sets(
        index,
        str(images),
        tokenizer,
        image_size=224,
        cache_gb=0,
        max_question_length=128,
        chexpert_uncertain="ignore",
        max_samples=0,
    )
    dataset = sets["train"]
    places = list(range(questions))
    shared = dataset.collate(dataset.__getitems__(places))
    repeated = dataset.collate([dataset[i] for i in places])

    def losses(batch: dict) -> torch.Tensor:
        *answers, chexpert = model(batch["image"], batch["ids"], batch["mask"], batch["image_of"])
        entropy, bce = script.question_losses(answers, chexpert, batch)
        return torch.cat([entropy, bce.sum(1)])

    def loss(batch: dict) -> torch.Tensor:
        step = Step(questions, questions, 0, [batch])
        counts = script.count_targets(step)
        parts = script.batch_loss(model, batch, counts, args.chexpert_weight)
        return parts[0]

    optimizer = script.make_optimizer(model, args)
    return Steps(model, shared, repeated, losses, loss, optimizer)


# --- the measurement --------------------------------------------------------------------------------------------------


def largest_difference(steps: Steps) -> float:
    """Of the loss of any question, relative to that of the plain loop."""
    with torch.no_grad():
        shared = steps.losses(steps.shared)
        repeated = steps.losses(steps.repeated)
    size = repeated.abs().clamp_min(1e-12)
    difference = (shared - repeated).abs() / size
    return float(difference.max())


def seconds_of_step(
    steps: Steps,
    batch: dict,
    scaler: LossScaler,
) -> float:
    """Of one training step."""
    begun = time.process_time()
    loss = steps.loss(batch)
    scaler.scale(loss).backward()
    clip_and_step(steps.optimizer, scaler, grad_clip=1.0, lr=1e-5)
    return time.process_time() - begun


def flops_of(steps: Steps, batch: dict) -> int:
    """Of one forward and backward pass."""
    with FlopCount() as count:
        steps.loss(batch).backward()
    steps.optimizer.zero_grad(set_to_none=True)
    return count.total


def measure(questions: int, rounds: int) -> bool:
    """Print the figures; False where a loss differs or the goal is missed."""
    with tempfile.TemporaryDirectory() as folder:
        steps = mimic_cxr(Path(folder), questions)
    steps.model.train()
    difference = largest_difference(steps)
    flops = flops_of(steps, steps.repeated) / flops_of(steps, steps.shared)

    # the first round warms up
    scaler = LossScaler(CPU, "no")
    plain = []
    shared = []
    for _ in range(rounds + 1):
        plain.append(seconds_of_step(steps, steps.repeated, scaler))
        shared.append(seconds_of_step(steps, steps.shared, scaler))
    plain = plain[1:]
    shared = shared[1:]

    ratios = [loop / once for loop, once in zip(plain, shared, strict=True)]
    ratio = statistics.median(ratios)
    rate = questions / statistics.median(shared)
    loop_rate = questions / statistics.median(plain)
    print(f"mimic_cxr, {questions} questions about one image: {rate:.2f} over {loop_rate:.2f} questions/s")
    print(f"  ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}; goal {GOAL}), of FLOPs {flops:.2f}")
    print(f"  losses of each question differ by {difference:.1e} at most (goal {TOLERANCE})", flush=True)
    return difference < TOLERANCE and ratio >= GOAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--questions", type=int, default=8, help="questions about the image")
    add("--rounds", type=int, default=5, help="steps of each kind")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return 0 if measure(args.questions, args.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
