"""How fast images and questions reach the model: decoding, the image cache, and the wait for data in a real run.

    python benchmarks/input_pipeline.py           # on 2 cores about 2 minutes

Full-size made-up chest X-rays (2500 x 3056 grey, JPEG quality 90, noise as grainy as makes files of the real size) take
the place of a sample data set's images. One thread runs every loop over the same images, in turn; the fastest pass of
each counts, as other load on the machine only ever adds. Speeds are samples/s of CPU time where not said otherwise.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Pixels of the model's images.
SIZE = 224

# Samples/s that the guide wants of 4 GPUs.
TARGET = 720

# Names of the loops, as they are printed.
WHOLE = "PIL: whole picture, resized"
DRAFT = "PIL: with draft, resized"
DECODE = "decode()"
NO_CACHE = "QuestionData, no cache"
COLD = "QuestionData, cold cache"
WARM = "QuestionData, warm cache"
COLLATE = "QuestionData + collate, warm cache"


class Row(NamedTuple):
    """One line of the table."""

    what: str
    figure: str
    goal: str = ""


# --- made-up data -----------------------------------------------------------------------------------------------------


def write_data(folder: Path, patients: int, image_size: int) -> None:
    """A sample data set of MIMIC-CXR."""
    command = [sys.executable, "-m", "tools.sample_data"]
    command += ["mimic_cxr", str(folder)]
    command += ["--num_train", str(patients), "--num_val", "2", "--num_test", "2"]
    command += ["--image_size", str(image_size)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def enlarge(path: Path, number: int) -> None:
    """Put a full-size image in place of a small one."""
    import numpy as np
    from PIL import Image

    small = Image.open(path)
    large = small.resize((2500, 3056), Image.Resampling.BICUBIC)
    rng = np.random.default_rng(number)
    noise = rng.normal(0, 5, (3056, 2500))
    grey = (np.asarray(large) + noise).clip(0, 255)
    grainy = Image.fromarray(grey.astype(np.uint8))
    grainy.save(path, quality=90)


# --- decoding and the cache -------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """The questions without and with a cache, and for each image the row of one question and its file."""

    plain: object
    cached: object
    cache_file: Path
    rows: list[int]
    paths: list[str]


def make_sample(folder: Path, count: int) -> Sample:
    """Write the data, and open it as train_mimic_cxr.py does."""
    from transformers import AutoTokenizer

    from tasks.mimic_cxr.data import QuestionData, open_image_cache
    from tasks.mimic_cxr.index import open_index

    write_data(folder, count, 512)
    index = open_index(folder / "index", folder / "mimic-cxr-jpg", folder / "mimic-ext-cxr-qba")
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert_tiny")

    def questions(cache_gb: float) -> QuestionData:
        cache = open_image_cache(index, SIZE, cache_gb)
        images = str(folder / "mimic-cxr-jpg")
        return QuestionData(index, "train", images, cache, tokenizer, 128)

    plain = questions(0)
    cached = questions(1)

    # The first question of each study stands for its image.
    first = {}
    for i in range(len(plain)):
        first.setdefault(plain.row(i)["study"], i)
    studies = sorted(first)[:count]
    rows = [first[study] for study in studies]
    paths = [plain.image_path(study) for study in studies]
    for number, path in enumerate(paths):
        enlarge(Path(path), number)
    cache_file = index.folder / f"pictures_{SIZE}.u8"
    return Sample(plain, cached, cache_file, rows, paths)


def bare(path: str, draft: bool):
    """Open, decode and resize as briefly as PIL allows; with `draft` at the same reduced scale as the trainer's."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        if draft:
            image.draft("L", (2 * SIZE, 2 * SIZE))
        grey = image.convert("L")
        small = grey.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        return np.asarray(small)


def make_loops(sample: Sample) -> dict[str, Callable]:
    """Every loop over the images, by name; the loop with a cold cache leaves the cache warm for the next ones."""
    from tasks.mimic_cxr.data import decode

    rows = sample.rows
    paths = sample.paths
    plain = sample.plain
    cached = sample.cached

    def cold() -> None:
        os.truncate(sample.cache_file, 0)
        for i in rows:
            cached[i]

    def batches() -> None:
        for start in range(0, len(rows), 16):
            batch = rows[start : start + 16]
            cached.collate([cached[i] for i in batch])

    return {
        WHOLE: lambda: [bare(path, False) for path in paths],
        DRAFT: lambda: [bare(path, True) for path in paths],
        DECODE: lambda: [decode(path, SIZE) for path in paths],
        NO_CACHE: lambda: [plain[i] for i in rows],
        COLD: cold,
        WARM: lambda: [cached[i] for i in rows],
        COLLATE: batches,
    }


def measure(loops: dict[str, Callable], repeats: int, count: int) -> dict[str, float]:
    """Samples/s of each loop's fastest pass, in CPU time."""
    names = list(loops)
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        # Each pass begins with another loop.
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            begun = time.process_time()
            loops[name]()
            seconds = time.process_time() - begun

            # The first pass brings the files into the page cache and fills the image cache.
            if repeat:
                times[name].append(seconds / count)
    return {name: 1 / min(values) for name, values in times.items()}


def decoding(folder: Path, count: int, repeats: int) -> list[Row]:
    """Speeds of every loop over the images, and what follows from them."""
    sample = make_sample(folder, count)
    paths = sample.paths
    speed = measure(make_loops(sample), repeats, len(paths))
    sizes = [os.path.getsize(path) for path in paths]
    megabytes = statistics.fmean(sizes) / 1e6

    title = f"{len(paths)} pictures of {megabytes:.2f} MB, samples/s per core"
    table = [Row(f"{title}: {name}", f"{value:.1f}") for name, value in speed.items()]
    for name in (DECODE, NO_CACHE, COLD):
        over_whole = speed[name] / speed[WHOLE]
        over_draft = speed[name] / speed[DRAFT]
        table.append(Row(f"{name} over the bare PIL loop", f"{over_whole:.2f}", ">= 0.9"))
        table.append(Row(f"{name} over the bare PIL loop with draft", f"{over_draft:.3f}"))
    over_whole = speed[WARM] / speed[WHOLE]
    table.append(Row(f"{WARM}, over the bare PIL loop", f"{over_whole:.0f}"))

    # A sample costs its reading and its share of the collation.
    collate = 1 / speed[COLLATE] - 1 / speed[WARM]
    for name in (COLD, WARM):
        cache = name.removeprefix("QuestionData, ")
        cores = TARGET * (1 / speed[name] + collate)
        what = f"cores for {TARGET} samples/s (collate too), {cache}"
        table.append(Row(what, f"{cores:.2f} = {math.ceil(cores)}"))
    return table


# --- the wait for data ------------------------------------------------------------------------------------------------


def train(folder: Path) -> list[dict]:
    """Train for 3 epochs with 2 workers; returns the lines of metrics.jsonl that tell the wait for data."""
    write_data(folder, 60, 96)
    command = [sys.executable, str(ROOT / "train_mimic_cxr.py")]
    command += ["--mimic_cxr_path", f"{folder}/mimic-cxr-jpg", "--mimic_qa_path", f"{folder}/mimic-ext-cxr-qba"]
    command += ["--image_encoder", f"{folder}/convnext_tiny", "--text_encoder", f"{folder}/bert_tiny"]
    command += ["--index_dir", f"{folder}/index", "--output_dir", f"{folder}/run"]
    command += ["--image_size", "64", "--batch_size", "16", "--epochs", "3"]
    command += ["--mixed_precision", "no", "--no_auto_optimize"]
    command += ["--num_workers", "2", "--log_every", "10", "--save_every", "0"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    metrics = folder / "run" / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record for record in records if "train/data_wait" in record]


def waiting(folder: Path) -> list[Row]:
    """Share of time that a real run waits for data: its own figure, the mean of each epoch's lines."""
    records = train(folder)
    table = []
    for epoch in (1, 2, 3):
        chosen = [record for record in records if record["epoch"] == epoch]
        wait = statistics.fmean(record["train/data_wait"] for record in chosen)
        speed = statistics.fmean(record["train/samples_per_s"] for record in chosen)
        what = f"2 workers, epoch {epoch}: share of time waiting for data; samples/s"
        table.append(Row(what, f"{wait:.3f}; {speed:.0f}"))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pictures", type=int, default=36, help="full-size images")
    parser.add_argument("--repeats", type=int, default=7, help="passes over them of each loop")
    options = parser.parse_args()

    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        table = decoding(Path(folder) / "large", options.pictures, options.repeats)
        table += waiting(Path(folder) / "small")
    heading = Row("what", "figure", "goal")
    for row in [heading, *table]:
        print(f"{row.what:85} {row.figure:>12}  {row.goal}")


if __name__ == "__main__":
    main()
