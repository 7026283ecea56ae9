"""Prepared questions at the size of MIMIC-Ext-CXR-QBA: memory of a rank, time to the first batch, speed of preparing.

    python benchmarks/index_scale.py                                        # Linux, 2 minutes, 2 GB of disk
    python benchmarks/index_scale.py --questions 1000000 --files 300        # a trial

Reading: a made-up prepared folder, whose images are an empty sparse file, is opened as train_mimic_cxr.py does by a new
process, which takes the first batch of three epochs as rank 0 of 4; this process watches its memory. Preparing:
`prepare` reads question files of the real size, by one process and by two, in turns with bare json.loads of the same
files; a ratio is that of the medians.
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa

import train_mimic_cxr as script
from tasks.mimic_cxr import prepare
from tasks.mimic_cxr.answers import CHEXPERT, HEAD_NUMBER, HEADS
from utils.sampler import TrainBatchSampler

# of all grades from B on, and their studies
QUESTIONS, STUDIES = 31_230_906, 227_827
SIDE = 224
MB = 1e6


class Words:
    """In place of a tokenizer, whose time is not that of the questions."""

    def __call__(self, texts: list[str], **_) -> dict:
        ids = script.torch.zeros(len(texts), 8, dtype=script.torch.long)
        return {"input_ids": ids, "attention_mask": ids + 1}


# --- reading ----------------------------------------------------------------------------------------------------------


def write_prepared(folder: Path, questions: int) -> None:
    """A prepared folder with so many questions, all but a hundredth of them to train on."""
    rng = np.random.default_rng(0)
    count = questions * STUDIES // QUESTIONS
    folder.mkdir(parents=True)
    split = np.repeat(prepare.SPLITS, [count - 2 * (count // 200), count // 200, count // 200])
    columns = {"image": [f"files/p10/p{n}/s{n}/{n}.jpg" for n in range(count)], "patient": np.arange(count).astype(str)}
    columns |= {"split": split, "view": "PA", "sex": "F", "age": np.float32(60)}
    columns |= {name: rng.choice(np.float32([1, 0, -1, np.nan]), count) for name in CHEXPERT}
    pd.DataFrame(columns).to_parquet(folder / "studies.parquet")
    with open(folder / f"images_{SIDE}.u8", "wb") as empty:
        empty.truncate(count * SIDE**2)

    templates = ("Is there {} {} in the {}?", "What about {} {} of the {}?", "Any {} {} at the {}?")
    parts = itertools.product(templates, HEADS["severity"], CHEXPERT, HEADS["region"])
    texts = list(dict.fromkeys(form.format(severity, name.lower(), place) for form, severity, name, place in parts))
    study = np.sort(rng.integers(count, size=questions, dtype=np.int32))
    numbers = {
        "type": (rng.integers(4, size=questions, dtype=np.int32), [f"type_{name}" for name in HEAD_NUMBER]),
        "question": (rng.integers(len(texts), size=questions, dtype=np.int32), texts),
    }
    plain = [pa.array(study), pa.array(numbers["type"][0].astype(np.int8)), pa.array(np.zeros(questions, np.int8))]
    coded = [pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names)) for codes, names in numbers.values()]
    with pa.OSFile(str(folder / "questions.arrow"), "wb") as sink, pa.ipc.new_file(sink, prepare.SCHEMA) as writer:
        writer.write_table(pa.Table.from_arrays(plain + coded, schema=prepare.SCHEMA))
    facts = {"format": prepare.FORMAT, "image_size": SIDE}
    (folder / "prepared.json").write_text(json.dumps(facts))


def read(folder: Path) -> None:
    """In a process of its own: open the folder, take the first batch of three epochs and 200 more."""
    args = script.parse_args(["--data_path", str(folder)])
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    data = script.Questions(script.open_prepared(folder), "train", args)
    data.tokenizer = Words(), args.max_question_length
    groups = script.ImageGroups(data.column("study"), args.questions_per_image)
    sampler = TrainBatchSampler(len(data), 16, 64, rank=0, world_size=4, groups=groups)
    result = {"length": len(data), "open": time.perf_counter() - begun, "first": []}
    for epoch in range(3):
        begun = time.perf_counter()
        sampler.set_position(epoch)
        batches = iter(sampler)
        data.batch(next(batches))
        result["first"].append(time.perf_counter() - begun)
    begun = time.perf_counter()
    for batch in itertools.islice(batches, 200):
        data.batch(batch)
    print(json.dumps(result | {"rows_per_s": 200 * 16 / (time.perf_counter() - begun)}), flush=True)


def memory_of(process: psutil.Process) -> np.ndarray:
    """MB (private to a process, resident with pages of files, which all ranks share)."""
    memory = process.memory_info()
    return np.array([memory.rss - memory.shared, memory.rss]) / MB


def watch(folder: Path) -> tuple[dict, np.ndarray, np.ndarray]:
    """(what `read` printed, memory after its imports, the most above that)."""
    command = [sys.executable, __file__, "--read", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        while child.stdout.readline() != "ready\n":
            pass
        process = psutil.Process(child.pid)
        base = most = memory_of(process)
        print("go", file=child.stdin, flush=True)
        while child.poll() is None:
            try:
                most = np.maximum(most, memory_of(process))
            except psutil.Error:
                break
            time.sleep(0.02)
        output = child.stdout.read()
    return json.loads(output.splitlines()[-1]), base, most - base


def report_reading(folder: Path, questions: int) -> None:
    write_prepared(folder, questions)
    size = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    print(f"{questions:,} questions on disk without images: {size / 1e9:.2f} GB", flush=True)
    for name in ("cold files", "in the page cache"):
        for path in folder.iterdir() if name == "cold files" else ():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        result, base, (private, resident) = watch(folder)
        first = ", ".join(f"{seconds:.2f}" for seconds in result["first"])
        print(f"{result['length']:,} training questions, {name}:")
        print(f"  a rank's own memory above the imports ({base[0]:.0f} MB): {private:.0f} MB (goal 400)")
        print(f"  with the files' pages, which all ranks share: {resident:.0f} MB")
        print(f"  to open {result['open']:.2f} s, first batch of 3 epochs {first} s (goal 2)")
        print(f"  after that {result['rows_per_s']:.0f} questions/s", flush=True)


# --- preparing --------------------------------------------------------------------------------------------------------


def write_release(folder: Path, source: Path, count: int, questions: int = 185) -> float:
    """Question files as large as the real ones, of the questions of a small release; returns their mean size, KB."""
    pool = []
    for path in sorted(source.rglob("*.qa.json")):
        pool += json.loads(path.read_text())["questions"]
    size = 0
    for number in range(count):
        asked = [pool[(7 * number + k) % len(pool)] for k in range(questions)]
        text = json.dumps({"questions": [question | {"question_id": str(k)} for k, question in enumerate(asked)]})
        path = folder / "qa" / "p10" / f"p{10_000_000 + number}" / f"s{number}.qa.json"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        size += len(text)
    return size / count / 1e3


def load_part(paths: list[Path]) -> None:
    """Bare json.loads of some files."""
    for path in paths:
        json.loads(path.read_bytes())


def report_preparing(folder: Path, source: Path, count: int) -> None:
    """Files a second of prepare.read_part, as prepare calls it, and of json.loads."""
    kilobytes = write_release(folder, source, count)
    names = [(str(10_000_000 + number), str(number)) for number in range(count)]
    good = [{str(k) for k in range(185)}] * 64
    jobs = [(folder, first, names[first : first + 64], good) for first in range(0, count, 64)]
    paths = [folder / "qa" / "p10" / f"p{subject}" / f"s{study}.qa.json" for subject, study in names]
    bare = [paths[first : first + 64] for first in range(0, count, 64)]
    seconds: dict[tuple, list[float]] = {}
    for _, processes, name in itertools.product(range(3), (1, 2), ("prepare", "json.loads")):
        # prepare's processes do without garbage collection
        own = name == "prepare"
        with ProcessPoolExecutor(processes, initializer=gc.disable if own else None) as pool:
            list(pool.map(time.sleep, [0.01] * processes))
            begun = time.perf_counter()
            list(pool.map(prepare.read_part if own else load_part, jobs if own else bare))
            seconds.setdefault((name, processes), []).append(time.perf_counter() - begun)
    rate = {key: count / statistics.median(values) for key, values in seconds.items()}
    print(f"{count} question files of {kilobytes:.0f} KB, files/s:")
    for (name, processes), files in rate.items():
        print(f"  {name}, {processes} process(es): {files:.0f}")
    print(f"  prepare over bare json.loads: {rate['prepare', 1] / rate['json.loads', 1]:.2f} (goal 0.5)")
    print(f"  prepare by 2 processes over 1: {rate['prepare', 2] / rate['prepare', 1]:.2f} (goal 1.7)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="of the made-up prepared folder")
    parser.add_argument("--files", type=int, default=1500, help="question files to prepare, of 51 KB each; 0: none")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read(options.read)
        return
    with tempfile.TemporaryDirectory() as folder:
        report_reading(Path(folder) / "prepared", options.questions)
        if options.files:
            words = f"-m tools.sample_data mimic_cxr {folder}/sample --num_train 60 --num_val 1 --num_test 1"
            root = Path(__file__).resolve().parents[1]
            subprocess.run([sys.executable, *words.split()], cwd=root, check=True, stdout=subprocess.DEVNULL)
            report_preparing(Path(folder) / "release", Path(folder) / "sample", options.files)


if __name__ == "__main__":
    main()
