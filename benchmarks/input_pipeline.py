"""How fast chest X-rays are decoded by prepare, and questions put together for the model.

    python benchmarks/input_pipeline.py                    # on 2 cores about 2 minutes
    python benchmarks/input_pipeline.py --data FOLDER      # tools.sample_data mimic_cxr; its images become larger

Full-size made-up chest X-rays (2500 x 3056 grey, JPEG quality 90, noise as grainy as makes files of the real size) take
the place of sample data's images. One thread runs every loop, in turn; the fastest pass of each counts, as other work
on the machine only ever adds. Rates are a second of CPU time.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# transformers may import deepspeed, which would report that it looks for a GPU
os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer

import train_mimic_cxr as script
from tasks.mimic_cxr.prepare import decode, open_prepared
from utils.sampler import Index

ROOT = Path(__file__).resolve().parents[1]
SIDE = 224
BATCH = 16
# questions/s that the guide wants of 4 GPUs
TARGET = 720


def run_tool(tool: str, words: list) -> None:
    command = [sys.executable, "-m", f"tools.{tool}", "mimic_cxr", *map(str, words)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def enlarge(path: Path, number: int) -> None:
    """Put a full-size image in place of a small one."""
    large = Image.open(path).convert("L").resize((2500, 3056), Image.Resampling.BICUBIC)
    noise = np.random.default_rng(number).normal(0, 5, (3056, 2500))
    Image.fromarray((np.asarray(large) + noise).clip(0, 255).astype(np.uint8)).save(path, quality=90)


def bare(path: Path, draft: bool) -> np.ndarray:
    """Open, decode and resize as briefly as PIL allows; with `draft` at the same reduced scale as prepare."""
    with Image.open(path) as image:
        if draft:
            image.draft("L", (2 * SIDE, 2 * SIDE))
        return np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def measure(loops: dict[str, Callable], repeats: int) -> dict[str, float]:
    """CPU seconds of each loop's fastest pass."""
    names, times = list(loops), {}
    for repeat in range(repeats + 1):
        # each pass begins with another loop
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            begun = time.process_time()
            loops[name]()
            # the first pass brings the files into the page cache
            if repeat:
                times.setdefault(name, []).append(time.process_time() - begun)
    return {name: min(times[name]) for name in names}


def decoding(data: Path, count: int, repeats: int) -> None:
    paths = sorted((data / "mimic-cxr-jpg" / "files").rglob("*.jpg"))[:count]
    for number, path in enumerate(paths):
        enlarge(path, number)
    loops = {
        "PIL, whole image": lambda: [bare(path, draft=False) for path in paths],
        "PIL, with draft": lambda: [bare(path, draft=True) for path in paths],
        "prepare.decode": lambda: [decode(path, SIDE) for path in paths],
    }
    seconds = measure(loops, repeats)
    megabytes = statistics.fmean(path.stat().st_size for path in paths) / 1e6
    print(f"{len(paths)} images of {megabytes:.2f} MB to {SIDE} x {SIDE}:")
    for name, value in seconds.items():
        print(f"  {name:<20} {len(paths) / value:8.1f} images/s")
    whole, draft, ours = seconds.values()
    print(
        f"  prepare.decode over PIL: {whole / ours:.2f} (goal 0.9), over PIL with draft {draft / ours:.2f}", flush=True
    )


def batching(data: Path, repeats: int) -> None:
    """Batches as the training takes them, of groups of 8 questions and of single ones."""
    prepared = open_prepared(data / "prepared")
    args = script.parse_args(["--data_path", str(data / "prepared")])
    questions = script.Questions(prepared, "train", args)
    questions.tokenizer = AutoTokenizer.from_pretrained(data / "bert_tiny"), args.max_question_length
    places = {
        "8 questions an image": np.arange(len(questions)),
        "in any order": np.random.default_rng(0).permutation(len(questions)),
    }

    def pass_over(order: np.ndarray) -> None:
        for first in range(0, len(order), BATCH):
            questions.batch([Index(place) for place in order[first : first + BATCH]])

    seconds = measure({name: lambda order=order: pass_over(order) for name, order in places.items()}, repeats)
    print(f"Questions.batch, {BATCH} questions, images of {prepared.facts['image_size']} pixels:")
    for name, value in seconds.items():
        rate = len(questions) / value
        cores = math.ceil(TARGET / rate)
        text = f"{rate / BATCH:8.1f} batches/s; cores for {TARGET} questions/s: {TARGET / rate:.2f} = {cores}"
        print(f"  {name:<20} {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="sample data of MIMIC-CXR, not prepared yet; left out: made")
    parser.add_argument("--images", type=int, default=36, help="full-size images")
    parser.add_argument("--repeats", type=int, default=7, help="passes of each loop")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder) / "data"
        if not options.data:
            run_tool("sample_data", [data, "--num_train", options.images, "--num_val", 2, "--num_test", 2])
        decoding(data, options.images, options.repeats)
        sources = [data / "mimic-cxr-jpg", data / "mimic-ext-cxr-qba", data / "prepared"]
        run_tool("prepare_data", [*sources, "--image_size", SIDE])
        batching(data, options.repeats)


if __name__ == "__main__":
    main()
