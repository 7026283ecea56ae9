"""What --questions_per_image brings to MIMIC-CXR: a step that encodes an image once for all its questions.

    python benchmarks/shared_image.py                      # about 2 minutes on 2 idle cores
    python benchmarks/shared_image.py --data FOLDER        # tools.sample_data mimic_cxr, prepared in FOLDER/prepared

The same model takes the same questions about one image, with the image once (--questions_per_image 8) and repeated for
each question (1). Both kinds of steps alternate, with the script's own loss and optimizer; the median ratio counts, of
processor seconds of one thread, so that other work on the machine matters little. The proportions are real, at a
smaller scale: ConvNeXt-base at 224 pixels and BERT-base, both at half their width, with random weights.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# transformers may import deepspeed, which would report that it looks for a GPU
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import train_mimic_cxr as script

ROOT = Path(__file__).resolve().parents[1]
GOAL = 1.8
# the loss of a question may differ by so much, relative
TOLERANCE = 1e-6
SIDE = 224


def prepare_samples(folder: Path) -> None:
    """A few studies, prepared in folder/prepared."""
    sizes = "--num_train 8 --num_val 2 --num_test 2 --image_size 256".split()
    made = [folder / "mimic-cxr-jpg", folder / "mimic-ext-cxr-qba", folder / "prepared"]
    for tool, words in (("sample_data", [folder, *sizes]), ("prepare_data", [*made, "--image_size", SIDE])):
        command = [sys.executable, "-m", f"tools.{tool}", "mimic_cxr", *map(str, words)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def write_models(folder: Path, tiny: Path) -> None:
    """Both encoders at half their width, the text encoder with the tokenizer of a tiny one."""
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny)
    tokenizer.save_pretrained(folder / "bert")
    text = hf.BertConfig(vocab_size=len(tokenizer), hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    image = hf.ConvNextConfig(depths=[3, 3, 27, 3], hidden_sizes=[64, 128, 256, 512])
    hf.BertModel(text).save_pretrained(folder / "bert")
    hf.ConvNextModel(image).save_pretrained(folder / "convnext")


def question_losses(model: nn.Module, batch: dict) -> torch.Tensor:
    """The losses of each question."""
    *answers, chexpert = model(batch["image"], batch["ids"], batch["mask"], batch["image_of"])
    entropy, bce = script.question_losses(answers, chexpert, batch)
    return torch.cat([entropy, bce.sum(1)])


def measure(data: Path, models: Path, questions: int, rounds: int) -> bool:
    """Print the figures; False where a loss differs or the goal is missed."""
    flags = f"--data_path {data}/prepared --image_encoder {models}/convnext --text_encoder {models}/bert --dropout 0"
    args = script.parse_args(flags.split())
    prepared = script.open_prepared(Path(args.data_path))
    args.image_size = prepared.facts["image_size"]
    model = script.build_model(args, "no", torch.device("cpu")).train()
    optimizer = script.make_optimizer(model, args)
    dataset = script.Questions(prepared, "train", args)
    dataset.tokenizer = model.tokenizer, model.longest

    # the first questions of the first study
    shared = dataset.batch(list(range(questions)))
    if len(shared["image"]) > 1:
        raise SystemExit(f"the first {questions} questions are about {len(shared['image'])} images; give fewer")
    repeated = shared | {"image": shared["image"][shared["image_of"]], "image_of": torch.arange(questions)}
    totals = script.count_targets([shared])

    def seconds_of_step(batch: dict) -> float:
        begun = time.process_time()
        script.batch_loss(model, batch, totals, args.chexpert_weight)[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begun

    losses, flops = [], []
    for batch in (repeated, shared):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            losses.append(question_losses(model, batch))
        flops.append(counter.get_total_flops())
    difference = float(((losses[0] - losses[1]).abs() / losses[0].abs().clamp_min(1e-12)).max())

    # the first round warms up
    times = [(seconds_of_step(repeated), seconds_of_step(shared)) for _ in range(rounds + 1)][1:]
    ratios = [apart / once for apart, once in times]
    ratio = statistics.median(ratios)
    apart, once = (questions / statistics.median(column) for column in zip(*times, strict=True))
    print(f"{questions} questions about one image: {once:.2f} over {apart:.2f} questions/s")
    print(f"  ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}; goal {GOAL})")
    print(f"  ratio of the forward pass's FLOPs {flops[0] / flops[1]:.2f}")
    print(f"  losses of each question differ by {difference:.1e} at most (goal {TOLERANCE})", flush=True)
    return difference < TOLERANCE and ratio >= GOAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="sample data of MIMIC-CXR, prepared in its folder prepared; left out: made")
    add("--questions", type=int, default=8, help="questions about the image")
    add("--rounds", type=int, default=5, help="steps of each kind")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or Path(folder) / "data"
        if not args.data:
            prepare_samples(data)
        write_models(Path(folder), data / "bert_tiny")
        return 0 if measure(data, Path(folder), args.questions, args.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
