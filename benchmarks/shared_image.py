"""What --questions_per_image brings: questions/s of a training step that encodes an image once for all its questions.

    python benchmarks/shared_image.py                      # both guides, about 3 minutes on 2 idle cores
    python benchmarks/shared_image.py --tasks prs_med      # one of them; --rounds, --questions

The same model takes the same questions about one image, with the image once and repeated for each question as in a loop
that shares nothing. Both kinds of steps alternate, with the script's own loss and update; the median ratio counts, of
processor seconds of one thread, so that what else runs on the machine counts for little.

The proportions are real, at a smaller scale. Guide 0: SAM ViT-B (12 layers, 768 wide) at 112 pixels, 1/84 of its
arithmetic at 1024, beside a language model of 0.17 GMAC a question, 1/84 of one with 135 million parameters. Guide 1:
ConvNeXt-base at 224 pixels and BERT-base, both at half their width.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from flops_utils import FlopCount
from loop_utils import LossScaler, clip_and_step
from tasks.sample_data_utils import save_image_processor, save_model

CPU = torch.device("cpu")
GOALS = {"prs_med": 3.0, "mimic_cxr": 1.8}
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

    script = Path(__file__).resolve().parent.parent / "sample_data.py"
    command = [sys.executable, str(script), task, str(folder), *sizes.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# --- the two guides ---------------------------------------------------------------------------------------------------


def write_prs_med_models(folder: Path) -> None:
    """SAM ViT-B for 112 pixels, and a small LLaVA."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, SamVisionConfig, SamVisionModel

    vision = SamVisionConfig(image_size=112, window_size=7, global_attn_indexes=[2, 5, 8, 11])
    save_model(SamVisionModel(vision), folder / "sam")
    save_image_processor(folder / "sam", {"image_processor_type": "SamImageProcessor"})

    # both halves 192 wide with 6 layers; 36 tokens an image
    tower = {"model_type": "clip_vision_model", "hidden_size": 192, "intermediate_size": 768, "image_size": 84}
    tower |= {"num_hidden_layers": 6, "num_attention_heads": 3, "patch_size": 14}
    text = {"model_type": "llama", "vocab_size": 512, "hidden_size": 192, "intermediate_size": 512}
    text |= {"num_hidden_layers": 6, "num_attention_heads": 3, "num_key_value_heads": 3}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_id=4, image_seq_length=36)
    save_model(LlavaForConditionalGeneration(config), folder / "llava")


def prs_med(folder: Path, questions: int) -> Steps:
    """train_prs_med.py."""
    from transformers import AutoTokenizer

    import train_prs_med as script

    data = folder / "data"
    write_samples("prs_med", data, "--num_train 32 --num_val 1 --num_test 1")
    write_prs_med_models(folder)
    AutoTokenizer.from_pretrained(data / "llava_tiny").save_pretrained(folder / "llava")
    save_image_processor(folder / "llava", {"image_processor_type": "CLIPImageProcessor"})

    # the questions of other images about the first one
    flags = ["--data_root", str(data), "--lora_dropout", "0", "--mixed_precision", "no"]
    args = script.parse_args([*flags, "--vlm_path", str(folder / "llava"), "--sam_path", str(folder / "sam")])
    model = script.build_model(args, "no", CPU)
    rows = script.read_annotations(data, None, False)
    asked = [rows[0]._replace(question=row.question, answer=row.answer) for row in rows[:questions]]
    dataset = script.PositionData(asked, model.reader, keep=False)

    def losses(batch: dict) -> torch.Tensor:
        logits, text = model(batch)
        return torch.cat([script.mask_loss(logits, batch["mask"]), text])

    def loss(batch: dict) -> torch.Tensor:
        return script.batch_loss(model, batch, questions, float((batch["answer"] >= 0).sum()), args)[0]

    shared = model.reader.collate(dataset.__getitems__(list(range(questions))))
    repeated = model.reader.collate([dataset[i] for i in range(questions)])
    return Steps(model, shared, repeated, losses, loss, script.make_optimizer(model, args))


def write_mimic_cxr_models(folder: Path, vocabulary: int) -> None:
    """ConvNeXt-base and BERT-base at half their width."""
    from transformers import BertConfig, BertModel, ConvNextConfig, ConvNextModel

    image = ConvNextConfig(depths=[3, 3, 27, 3], hidden_sizes=[64, 128, 256, 512])
    save_model(ConvNextModel(image), folder / "convnext")
    text = BertConfig(vocab_size=vocabulary, hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    save_model(BertModel(text), folder / "bert")


def mimic_cxr(folder: Path, questions: int) -> Steps:
    """train_mimic_cxr.py by its torch engine."""
    from transformers import AutoTokenizer

    import train_mimic_cxr as script
    from loop_utils import Step

    data = folder / "data"
    write_samples("mimic_cxr", data, "--num_train 8 --num_val 2 --num_test 2 --image_size 256")
    tokenizer = AutoTokenizer.from_pretrained(data / "bert_tiny")
    write_mimic_cxr_models(folder, len(tokenizer))
    tokenizer.save_pretrained(folder / "bert")

    releases = [data / "mimic-cxr-jpg", data / "mimic-ext-cxr-qba"]
    flags = ["--mimic_cxr_path", str(releases[0]), "--mimic_qa_path", str(releases[1]), "--dropout", "0"]
    flags += ["--image_encoder", str(folder / "convnext"), "--text_encoder", str(folder / "bert")]
    args = script.parse_args([*flags, "--no_auto_optimize", "--mixed_precision", "no"])
    model, tokenizer = script.build_model(args, "no", CPU)
    index = script.open_index(folder / "index", releases[0], releases[1])
    options = {"cache_gb": 0, "max_question_length": 128, "chexpert_uncertain": "ignore", "max_samples": 0}
    dataset = script.open_sets(index, str(releases[0]), tokenizer, image_size=224, **options)["train"]

    def losses(batch: dict) -> torch.Tensor:
        *answers, chexpert = model(batch["image"], batch["ids"], batch["mask"], batch["image_of"])
        entropy, bce = script.question_losses(answers, chexpert, batch)
        return torch.cat([entropy, bce.sum(1)])

    def loss(batch: dict) -> torch.Tensor:
        counts = script.count_targets(Step(questions, questions, 0, [batch]))
        return script.batch_loss(model, batch, counts, args.chexpert_weight)[0]

    # the first study's
    shared = dataset.collate(dataset.__getitems__(list(range(questions))))
    repeated = dataset.collate([dataset[i] for i in range(questions)])
    return Steps(model, shared, repeated, losses, loss, script.make_optimizer(model, args))


TASKS = {"prs_med": prs_med, "mimic_cxr": mimic_cxr}


# --- the measurement --------------------------------------------------------------------------------------------------


def largest_difference(steps: Steps) -> float:
    """Of the loss of any question, relative to that of the plain loop."""
    with torch.no_grad():
        shared = steps.losses(steps.shared)
        repeated = steps.losses(steps.repeated)
    return float(((shared - repeated).abs() / repeated.abs().clamp_min(1e-12)).max())


def seconds_of_step(steps: Steps, batch: dict, scaler: LossScaler) -> float:
    """Of one training step."""
    begun = time.process_time()
    scaler.scale(steps.loss(batch)).backward()
    clip_and_step(steps.optimizer, scaler, grad_clip=1.0, lr=1e-5)
    return time.process_time() - begun


def flops_of(steps: Steps, batch: dict) -> int:
    """Of one forward and backward pass."""
    with FlopCount() as count:
        steps.loss(batch).backward()
    steps.optimizer.zero_grad(set_to_none=True)
    return count.total


def measure(task: str, questions: int, rounds: int) -> bool:
    """Print a task's figures; False where a loss differs or the goal is missed."""
    with tempfile.TemporaryDirectory() as folder:
        steps = TASKS[task](Path(folder), questions)
    steps.model.train()
    difference = largest_difference(steps)
    more = flops_of(steps, steps.repeated) / flops_of(steps, steps.shared)

    # the first round warms up
    scaler = LossScaler(CPU, "no")
    step = partial(seconds_of_step, steps, scaler=scaler)
    pairs = [(step(steps.repeated), step(steps.shared)) for _ in range(rounds + 1)][1:]
    ratios = sorted(plain / shared for plain, shared in pairs)
    plain, shared = (questions / statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    ratio = statistics.median(ratios)
    print(f"{task}, {questions} questions about one image: {shared:.2f} over {plain:.2f} questions/s")
    print(f"  ratio {ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}; goal {GOALS[task]}), of FLOPs {more:.2f}")
    print(f"  losses of each question differ by {difference:.1e} at most (goal {TOLERANCE})", flush=True)
    return difference < TOLERANCE and ratio >= GOALS[task]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS), help="which guides")
    parser.add_argument("--questions", type=int, default=8, help="questions about the image")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    reached = [measure(task, args.questions, args.rounds) for task in args.tasks]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
