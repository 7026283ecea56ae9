"""How fast pictures and questions reach the model: decoding, the picture cache, and the wait for data in a real run.

    python benchmarks/input_pipeline.py           # on 2 cores about 2 minutes

Full-size made-up chest X-rays (2500 x 3056 grey, JPEG quality 90, noise as grainy as makes files of the real size) take
the place of a sample data set's pictures. One thread, every loop over the same pictures, in turn; the fastest pass of
each counts, as other load on the machine only ever adds. Rates are samples/s of CPU time where not said otherwise.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SIZE, TARGET = 224, 720  # pixels; samples/s that the guide wants of 4 GPUs


def write_data(folder: Path, patients: int, image_size: int) -> None:
    words = ["--num_train", str(patients), "--num_val", "2", "--num_test", "2", "--image_size", str(image_size)]
    command = [sys.executable, str(ROOT / "sample_data.py"), "mimic_cxr", str(folder), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def enlarge(path: Path, number: int) -> None:
    """Put a full-size picture in place of a small one."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(number).normal(0, 5, (3056, 2500))
    grey = np.asarray(Image.open(path).resize((2500, 3056), Image.Resampling.BICUBIC)) + noise
    Image.fromarray(grey.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def bare(path: str, draft: bool):
    """Open, decode and resize as briefly as PIL allows; with `draft` at the same reduced scale as the trainer's."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as picture:
        if draft:
            picture.draft("L", (2 * SIZE, 2 * SIZE))
        return np.asarray(picture.convert("L").resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def decoding(folder: Path, pictures: int, repeats: int) -> list[tuple[str, str, str]]:
    """Rates of every loop over the pictures, and what follows from them."""
    from transformers import AutoTokenizer

    import train_mimic_cxr as trainer
    from tasks.mimic_cxr import index as mci

    write_data(folder, pictures, 512)
    index = mci.open_index(folder / "index", folder / "mimic-cxr-jpg", folder / "mimic-ext-cxr-qba")
    args = SimpleNamespace(mimic_cxr_path=str(folder / "mimic-cxr-jpg"), max_samples=0, image_size=SIZE,
                           max_question_length=128, chexpert_uncertain="ignore")  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert_tiny")

    def questions(cache_gb: float) -> trainer.QuestionData:
        args.cache_gb = cache_gb
        return trainer.QuestionData(index, "train", args, tokenizer)

    plain, cached = questions(0), questions(1)
    first = {plain.row(i)["study"]: i for i in reversed(range(len(plain)))}  # one question a study
    chosen = dict(sorted(first.items())[:pictures])
    rows, paths = list(chosen.values()), [plain.picture_path(study) for study in chosen]
    for number, path in enumerate(paths):
        enlarge(Path(path), number)

    def cold() -> None:
        os.truncate(index.folder / f"pictures_{SIZE}.u8", 0)
        for i in rows:
            cached[i]

    def batches() -> None:
        for at in range(0, len(rows), 16):
            cached.collate([cached[i] for i in rows[at : at + 16]])

    # after `cold` the cache is warm: the loops run in this order, or in the order turned round at the second half
    loops = {
        "PIL: whole picture, resized": lambda: [bare(path, False) for path in paths],
        "PIL: with draft, resized": lambda: [bare(path, True) for path in paths],
        "decode()": lambda: [trainer.decode(path, SIZE) for path in paths],
        "QuestionData, no cache": lambda: [plain[i] for i in rows],
        "QuestionData, cold cache": cold,
        "QuestionData, warm cache": lambda: [cached[i] for i in rows],
        "QuestionData + collate, warm cache": batches,
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(repeats + 1):
        shift = repeat % len(loops)
        for name in [*list(loops)[shift:], *list(loops)[:shift]]:
            begun = time.process_time()
            loops[name]()
            if repeat:  # the first pass brings the files into the page cache and fills the picture cache
                times[name].append((time.process_time() - begun) / len(rows))
    rate = {name: 1 / min(values) for name, values in times.items()}
    size = sum(os.path.getsize(path) for path in paths) / len(paths) / 1e6
    table = [
        (f"{len(paths)} pictures of {size:.2f} MB, samples/s per core: {n}", f"{r:.1f}", "") for n, r in rate.items()
    ]
    whole, draft = rate["PIL: whole picture, resized"], rate["PIL: with draft, resized"]
    for name in ("decode()", "QuestionData, no cache", "QuestionData, cold cache"):
        table += [(f"{name} over the bare PIL loop", f"{rate[name] / whole:.2f}", ">= 0.9")]
        table += [(f"{name} over the bare PIL loop with draft", f"{rate[name] / draft:.3f}", "")]
    table += [
        ("QuestionData, warm cache, over the bare PIL loop", f"{rate['QuestionData, warm cache'] / whole:.0f}", "")
    ]
    collate = 1 / rate["QuestionData + collate, warm cache"] - 1 / rate["QuestionData, warm cache"]
    for what, name in (("cold cache", "QuestionData, cold cache"), ("warm cache", "QuestionData, warm cache")):
        cores = TARGET * (1 / rate[name] + collate)
        table += [(f"cores for {TARGET} samples/s (collate too), {what}", f"{cores:.2f} = {math.ceil(cores)}", "")]
    return table


def waiting(folder: Path) -> list[tuple[str, str, str]]:
    """Share of time that a real run with 2 workers waits for data: its own figure, the mean of each epoch's lines."""
    write_data(folder, 60, 96)
    command = [sys.executable, str(ROOT / "train_mimic_cxr.py"), "--no_auto_optimize", "--num_workers", "2"]
    command += ["--mimic_cxr_path", f"{folder}/mimic-cxr-jpg", "--mimic_qa_path", f"{folder}/mimic-ext-cxr-qba"]
    command += ["--image_encoder", f"{folder}/convnext_tiny", "--text_encoder", f"{folder}/bert_tiny"]
    command += ["--image_size", "64", "--batch_size", "16", "--epochs", "3", "--log_every", "10", "--save_every", "0"]
    command += ["--index_dir", f"{folder}/index", "--output_dir", f"{folder}/run", "--mixed_precision", "no"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "train/data_wait" in line]
    table = []
    for epoch in (1, 2, 3):
        mine = [line for line in lines if line["epoch"] == epoch]
        wait, rate = (sum(line[n] for line in mine) / len(mine) for n in ("train/data_wait", "train/samples_per_s"))
        text = f"2 workers, epoch {epoch}: share of time waiting for data; samples/s"
        table += [(text, f"{wait:.3f}; {rate:.0f}", "")]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pictures", type=int, default=36, help="full-size pictures")
    parser.add_argument("--repeats", type=int, default=7, help="passes over them of each loop")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        table = decoding(Path(folder) / "large", options.pictures, options.repeats)
        table += waiting(Path(folder) / "small")
    for what, figure, goal in [("what", "figure", "goal"), *table]:
        print(f"{what:85} {figure:>12}  {goal}")


if __name__ == "__main__":
    main()
