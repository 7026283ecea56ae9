"""Index of questions at the size of MIMIC-Ext-CXR-QBA: memory, time to the first batch, disk, and how fast it is built.

    python benchmarks/index_scale.py                        # Linux, about 7 minutes, 4 GB of temporary disk
    python benchmarks/index_scale.py --rows 1000000 --files 300 --repeats 1      # a trial

Scale: an index of made-up questions is written straight as Arrow shards, then new processes open it as
train_mimic_cxr.py does and read batches of rank 0 of 4, while this process watches their memory; another one builds
torch's DistributedSampler over the same number of questions. Build: open_index on made-up question files against bare
json.loads of the same files (warm in the page cache), in one process and in two. The passes alternate and the fastest
of each counts, as other load on the machine only ever adds; where that load never ends, look at the ratio of CPU
seconds (of the busiest process), which leaves out waiting for a core and for the disk.
"""

import argparse
import csv
import gc
import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# The trainer comes first, as in a run: with pyarrow before torch, its processes seem to take 7 MB less.
from train_mimic_cxr import QuestionData

# isort: split
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import DistributedSampler

from old.distributed_utils import gather_objects, setup_distributed
from old.sampler_utils import TrainBatchSampler

# What is measured, and its names for the made-up data.
from tasks.mimic_cxr.answers import CHEXPERT, HEAD_NUMBER, HEADS, REGIONS, head_of
from tasks.mimic_cxr.data import open_image_cache
from tasks.mimic_cxr.index import index_folder, open_index, size_on_disk
from tasks.mimic_cxr.index_build import ROW, Source
from tasks.mimic_cxr.index_files import write_facts, write_table
from tasks.mimic_cxr.releases import BLANK, image_name

ROOT = Path(__file__).resolve().parent.parent

# The questions of grade B or better, of all three splits, and their studies.
ROWS = 31_230_906
STUDIES = 227_827

# Question types of the made-up index, with about the release's share of heads.
KINDS = (
    "A_indication",
    "B03_is_abnormal",
    "B08_describe_subcat",
    "C01_describe_region",
    "C03_is_abnormal_region",
    "D01_describe_finding",
    "D02_has_finding",
    "D03_where_is_finding",
    "D04_how_severe_is_finding",
)
WORDINGS = (
    "Is there {} in the {} on this radiograph?",
    "What can be said about {} in the {}?",
    "Any {} of the {}?",
)

# The passes of the build, as they are printed.
BARE = "bare"
BARE_GC_OFF = "bare, gc off"
INDEX = "index"
PASSES = (BARE, BARE_GC_OFF, INDEX)


class Row(NamedTuple):
    """One line of the table."""

    what: str
    figure: str
    goal: str = ""


# --- made-up index ----------------------------------------------------------------------------------------------------


class Vocabulary(NamedTuple):
    """What the made-up questions are drawn from: head and 20 ids of each type, and wordings."""

    heads: np.ndarray
    ids: pa.Array
    questions: pa.Array


def make_vocabulary() -> Vocabulary:
    """Every type's head and ids, and every wording about every finding and region."""
    heads = [HEAD_NUMBER[head_of(kind)] for kind in KINDS]
    ids = [f"{kind}_{i:03d}" for kind in KINDS for i in range(1, 21)]
    questions = []
    severities = HEADS["severity"][1:]
    for text, severity, name, region in itertools.product(WORDINGS, severities, CHEXPERT, REGIONS):
        finding = f"{severity} {name.lower()}"
        questions.append(text.format(finding, region))
    return Vocabulary(
        heads=np.array(heads, np.int8),
        ids=pa.array(ids),
        questions=pa.array(questions),
    )


def make_studies(count: int, rng) -> pa.Table:
    """A table of training studies with random CheXpert labels."""
    numbers = np.arange(count)
    study_ids = 50_000_000 + numbers * 40
    values = np.array([BLANK, -1, 0, 1], np.int8)
    labels = rng.choice(values, (count, len(CHEXPERT)))
    columns = {
        "study_id": study_ids,
        "subject_id": 10_000_000 + numbers * 40,
        "split": np.zeros(count, np.int8),
        "dicom_id": [f"{i:08x}-89abcdef-01234567-89abcdef" for i in study_ids],
    }
    for name, values in zip(CHEXPERT, labels.T, strict=True):
        columns[name] = values
    return pa.table(columns)


def make_questions(studies: np.ndarray, words: Vocabulary, rng) -> pa.Table:
    """One random question for each of these study numbers."""
    count = len(studies)
    kinds = rng.integers(len(KINDS), size=count)
    id_rows = kinds * 20 + rng.integers(20, size=count)
    question_rows = rng.integers(len(words.questions), size=count)
    columns = [
        pa.array(studies, pa.int32()),
        pa.array(words.heads[kinds]),
        pa.array(np.zeros(count, np.int8)),
        pa.DictionaryArray.from_arrays(kinds.astype(np.int16), list(KINDS)),
        words.ids.take(pa.array(id_rows)),
        words.questions.take(pa.array(question_rows)),
    ]
    return pa.Table.from_arrays(columns, schema=ROW)


def write_index(folder: Path, rows: int) -> None:
    """An index that open_index finds complete: this many training questions, all as pyarrow columns."""
    rng = np.random.default_rng(0)
    cxr = folder / "cxr"
    release = folder / "qba"
    for path in (cxr, release / "qa", release / "metadata"):
        path.mkdir(parents=True, exist_ok=True)
    (release / "metadata" / "question_metadata.parquet").touch()
    source = Source(cxr, release, "B", "frontal")
    index = index_folder(folder / "index", source)
    index.mkdir(parents=True)

    count = max(8, rows * STUDIES // ROWS)
    studies = make_studies(count, rng)
    files = {"studies.arrow": write_table(index / "studies.arrow", studies)}

    # A part holds the questions of 1024 studies.
    words = make_vocabulary()
    counts = []
    for part, first in enumerate(range(0, count, 1024)):
        last = min(first + 1024, count)
        low = -(-first * rows // count)
        high = -(-last * rows // count)
        questions = make_questions(np.arange(low, high) * count // rows, words, rng)
        name = f"part-{part:05d}-train.arrow"
        files[name] = write_table(index / name, questions)
        counts.append({"train": high - low, "validate": 0, "test": 0})

    facts = {
        "rows": counts,
        "studies": {},
        "ratings": {},
        "left_out": {},
        "classes": {},
        "missing": [],
        "files": files,
    }
    write_facts(index / "index.json", facts)


# --- made-up release --------------------------------------------------------------------------------------------------


def sample_questions(folder: Path) -> list[dict]:
    """All questions of a small sample data set."""
    command = [sys.executable, "-m", "tools.sample_data", "mimic_cxr", str(folder.resolve())]
    command += ["--num_train", "60", "--num_val", "1", "--num_test", "1", "--image_size", "64"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    questions = []
    release = folder / "mimic-ext-cxr-qba"
    for file in sorted(release.glob("qa/**/*.qa.json")):
        study = json.loads(file.read_text())
        questions += study["questions"]
    return questions


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, and its folder where it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_csv(path: Path, header: tuple, rows: list[tuple]) -> None:
    """Write a gzipped table."""
    with gzip.open(path, "wt", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_ratings(path: Path, ratings: list[tuple]) -> None:
    """Write (study, question, rating) as the release's parquet file."""
    names = ("study_id", "question_id", "question.quality.rating")
    columns = {}
    for i, name in enumerate(names):
        columns[name] = pa.array([rating[i] for rating in ratings], pa.string())
    path.parent.mkdir()
    pq.write_table(pa.table(columns), path, row_group_size=1 << 17)


def write_release(folder: Path, studies: int, questions: int = 185) -> float:
    """Write question files as large as the real ones, a grade for each question, and tables; returns a file's mean KB.

    The questions are those of a small sample data set.
    """
    pool = sample_questions(folder / "sample")
    rng = np.random.default_rng(0)
    grades = np.array(["2_C", "3_B", "4_A", "5_A+", None])
    grades = rng.choice(grades, (studies, questions), p=[0.06, 0.52, 0.15, 0.07, 0.2])

    cxr = folder / "cxr"
    qba = folder / "qba"
    metadata = []
    splits = []
    chexpert = []
    ratings = []
    size = 0

    # Each study asks other questions of the pool.
    for number in range(studies):
        subject = 10_000_000 + number * 1000
        study = 50_000_000 + number
        start = int(rng.integers(len(pool)))
        asked = []
        for i in range(questions):
            question = dict(pool[(start + i) % len(pool)])
            question["question_id"] = f"{question['question_type']}_{i:03d}"
            asked.append(question)
            ratings.append((f"s{study}", question["question_id"], grades[number, i]))

        # The study's question file and its image, which is never decoded.
        content = {"patient_id": f"p{subject}", "study_id": f"s{study}", "questions": asked}
        text = json.dumps(content).encode()
        patient_folder = qba / "qa" / f"p{subject // 1_000_000}" / f"p{subject}"
        write_bytes(patient_folder / f"s{study}.qa.json", text)
        write_bytes(cxr / image_name(subject, study, "0"), b"\xff\xd8\xff\xd9")
        size += len(text)

        # Its lines in the three tables.
        metadata.append(("0", subject, study, "PA"))
        splits.append(("0", subject, "train"))
        chexpert.append((subject, study, *[1.0] * len(CHEXPERT)))

    # The tables of MIMIC-CXR-JPG and the release's ratings.
    prefix = "mimic-cxr-2.0.0"
    write_csv(cxr / f"{prefix}-metadata.csv.gz", ("dicom_id", "subject_id", "study_id", "ViewPosition"), metadata)
    write_csv(cxr / f"{prefix}-split.csv.gz", ("dicom_id", "subject_id", "split"), splits)
    write_csv(cxr / f"{prefix}-chexpert.csv.gz", ("subject_id", "study_id", *CHEXPERT), chexpert)
    write_ratings(qba / "metadata" / "question_metadata.parquet", ratings)
    return size / studies / 1e3


# --- measurements, each in a process of its own -----------------------------------------------------------------------


def read_rows(options: argparse.Namespace) -> dict:
    """Open the index as the trainer does and read 200 batches of rank 0 of 4, the first ones timed."""
    ready()
    begun = time.perf_counter()
    folder = Path(options.folder)
    index = open_index(folder / "index", folder / "cxr", folder / "qba")
    cache = open_image_cache(index, 224, 0.0)
    data = QuestionData(index, "train", "", cache, None, 128)

    # The index stands for its copies too, to measure at ten times its size.
    data.rows = index.questions("train", options.copies)
    data.count = len(data.rows)
    sampler = TrainBatchSampler(len(data), 16, 0, 4)
    opened = time.perf_counter() - begun

    first = []
    for epoch in range(3):
        begun = time.perf_counter()
        sampler.set_position(epoch)
        batches = iter(sampler)
        rows = [data.row(i) for i in next(batches)]
        first.append(time.perf_counter() - begun)

    # The batches after the first one.
    begun = time.perf_counter()
    for batch in itertools.islice(batches, 200):
        rows = [data.row(i) for i in batch]
    seconds = time.perf_counter() - begun
    return {
        "open": opened,
        "length": len(data),
        "first": first,
        "rows_per_s": 200 * 16 / seconds,
        "row": rows[-1],
    }


def torch_sampler(options: argparse.Namespace) -> dict:
    """torch's sampler over as many questions: time from set_epoch to its first index."""
    ready()
    sampler = DistributedSampler(range(options.rows), num_replicas=4, rank=0)
    begun = time.perf_counter()
    sampler.set_epoch(1)
    next(iter(sampler))
    return {"first": time.perf_counter() - begun}


def read_files(files: list[Path], collect_garbage: bool) -> None:
    """Parse every file with json.loads alone."""
    if not collect_garbage:
        gc.disable()
    for file in files:
        with open(file, "rb") as opened:
            json.loads(opened.read())
    gc.enable()


def build(options: argparse.Namespace) -> dict:
    """Seconds of each pass, as [wall, CPU of the busiest rank]: open_index in a new folder, and json.loads.

    json.loads reads all question files, each rank its share, with and without garbage collection.
    """
    folder = Path(options.folder)
    files = sorted((folder / "qba" / "qa").rglob("*.qa.json"))
    seconds: dict[str, list[list[float]]] = {name: [] for name in PASSES}
    with setup_distributed() as ranks:
        local_files = files[ranks.rank :: ranks.world_size]
        for repeat in range(options.repeats):
            new = folder / f"index-{ranks.world_size}-{repeat}"
            for name in PASSES:
                # All ranks start together.
                gather_objects(None)
                begun = time.perf_counter()
                cpu_begun = time.process_time()
                if name == INDEX:
                    open_index(new, folder / "cxr", folder / "qba")
                else:
                    read_files(local_files, collect_garbage=name == BARE)
                cpu = gather_objects(time.process_time() - cpu_begun)
                wall = time.perf_counter() - begun
                seconds[name].append([wall, max(cpu)])
            if ranks.is_main:
                shutil.rmtree(new)
    return seconds


def ready() -> None:
    """Everything is imported: let the watching process take the baseline, then go on."""
    print("ready", flush=True)
    sys.stdin.readline()


# --- a watched process ------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """MB that are private to a process, and MB with the mapped files' pages, which all ranks share."""

    private: float
    resident: float


class Measured(NamedTuple):
    """What a process measured, its memory after its imports, and its peak above that."""

    result: dict
    base: Memory
    peak: Memory


def memory_of(pid: int) -> Memory:
    """The memory of a process now; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        lines = dict(line.split(":") for line in status.splitlines())
        private, _ = lines["RssAnon"].split()
        resident, _ = lines["VmRSS"].split()
        return Memory(int(private) / 1e3, int(resident) / 1e3)
    except (OSError, KeyError):
        return Memory(0.0, 0.0)


def watch(child: subprocess.Popen) -> tuple[Memory, Memory]:
    """Let the process go on, and wait for its end; returns (memory before, peak above it)."""
    child.stdout.readline()
    base = memory_of(child.pid)
    print("go", file=child.stdin, flush=True)
    private = base.private
    resident = base.resident
    while child.poll() is None:
        now = memory_of(child.pid)
        private = max(private, now.private)
        resident = max(resident, now.resident)
        time.sleep(0.005)
    return base, Memory(private - base.private, resident - base.resident)


def launch(measure: str, processes: int = 1, **options) -> Measured:
    """Run a measurement in a new process, or in some under torchrun, whose memory is not watched."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [__file__, "--measure", measure]
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    pipe = subprocess.PIPE
    base = peak = Memory(0.0, 0.0)
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as child:
        if measure != "build":
            base, peak = watch(child)
        output = child.stdout.read()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}")

    # The measurement is the last JSON object that was printed.
    objects = [line for line in output.splitlines() if line.startswith("{")]
    return Measured(json.loads(objects[-1]), base, peak)


# --- the table --------------------------------------------------------------------------------------------------------


def forget(folder: Path) -> None:
    """Drop the files from the page cache, so that the next process reads from the disk."""
    for path in folder.rglob("*.arrow"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def scale(folder: Path, rows: int) -> list[Row]:
    """Memory and time of reading an index of this many questions, and of ten times as many."""
    if not list(folder.glob("index/*/index.json")):
        begun = time.perf_counter()
        write_index(folder, rows)
        print(f"index written in {time.perf_counter() - begun:.0f} s", flush=True)
    index = next(folder.glob("index/*/index.json")).parent
    table = [Row("index on disk, GB", f"{size_on_disk(index) / 1e9:.2f}")]

    for copies, cold in ((1, True), (1, False), (10, False)):
        if cold:
            forget(index)
        ours = launch("read_rows", folder=folder, copies=copies)
        name = f"{ours.result['length']:,} questions"
        name += ", cold files" if cold else ""
        table += reading_rows(name, ours, "<= 400" if copies == 1 else "<= 800")
    print(f"a row: {ours.result['row']}")

    theirs = launch("torch_sampler", rows=rows)
    name = "torch's DistributedSampler"
    table.append(Row(f"{name}, the first size: MB a rank", f"{theirs.peak.private:.0f}"))
    table.append(Row(f"{name}: s to the first index of an epoch", f"{theirs.result['first']:.2f}"))
    base = f"{ours.base.private:.0f}, {ours.base.resident:.0f}"
    table.append(Row("baseline below these: MB private, resident", base))
    return table


def reading_rows(name: str, measured: Measured, goal: str) -> list[Row]:
    """The lines of the table about one process that read the index."""
    result = measured.result
    first = " ".join(f"{value:.4f}" for value in result["first"])
    return [
        Row(f"{name}: MB private to a rank", f"{measured.peak.private:.0f}", goal),
        Row(f"{name}: MB with the index's pages, shared", f"{measured.peak.resident:.0f}", goal),
        Row(f"{name}: s to the first batch of 3 epochs", first, "<= 2"),
        Row(f"{name}: s to open; rows/s after", f"{result['open']:.2f}; {result['rows_per_s']:.0f}"),
    ]


class Seconds(NamedTuple):
    """Wall seconds of a pass, and CPU seconds of its busiest process."""

    wall: float
    cpu: float


def time_builds(folder: Path, repeats: int) -> dict[tuple[str, int], list[Seconds]]:
    """The times of every pass in one process and in two, by turns."""
    times: dict[tuple[str, int], list[Seconds]] = {}
    for _ in range(repeats):
        for processes in (1, 2):
            passes = launch("build", processes, folder=folder, repeats=3).result
            for name in PASSES:
                # The first pass warms up.
                for wall, cpu in passes[name][1:]:
                    times.setdefault((name, processes), []).append(Seconds(wall, cpu))
    return times


def rate_of_building(folder: Path, files: int, repeats: int) -> list[Row]:
    """How many question files open_index reads in a second, and json.loads alone."""
    kilobytes = write_release(folder, files)
    times = time_builds(folder, repeats)
    best = {}
    table = []
    for key, passes in times.items():
        name, processes = key
        seconds = " ".join(f"{one.wall:.2f}/{one.cpu:.2f}" for one in passes)
        print(f"{name}, {processes} process(es), s wall/CPU:", seconds)

        # The fastest pass counts: other load on the machine only ever adds.
        wall = min(one.wall for one in passes)
        cpu = min(one.cpu for one in passes)
        best[key] = Seconds(wall, cpu)
        rates = f"{files / wall:.0f}; {files / cpu:.0f}"
        what = f"{files} files of {kilobytes:.0f} KB, {name}, {processes} process(es): files/s wall; CPU"
        table.append(Row(what, rates))

    def compare(what: str, above: tuple[str, int], below: tuple[str, int], goal: str = "") -> None:
        wall = best[above].wall / best[below].wall
        cpu = best[above].cpu / best[below].cpu
        table.append(Row(f"{what}: wall; CPU", f"{wall:.3f}; {cpu:.3f}", goal))

    compare("open_index over bare json.loads, 1 process", (BARE, 1), (INDEX, 1), ">= 0.5")
    compare("open_index over json.loads without garbage collection", (BARE_GC_OFF, 1), (INDEX, 1))
    compare("open_index, 2 processes over 1", (INDEX, 1), (INDEX, 2), ">= 1.7")
    compare("bare json.loads, 2 processes over 1 (what the machine gives)", (BARE, 1), (BARE, 2))
    return table


# --- command line -----------------------------------------------------------------------------------------------------

MEASUREMENTS = {"read_rows": read_rows, "torch_sampler": torch_sampler, "build": build}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--rows", type=int, default=ROWS, help="questions of the made-up index")
    add("--folder", help="keep the made-up index here, and use the one that is here")
    add("--skip_build", action="store_true", help="leave the build rate out")
    add("--files", type=int, default=1500, help="question files of the build rate, 0.2 MB each")
    add("--repeats", type=int, default=3, help="rounds of the build rate: two passes by 1 process, then by 2")

    # What a measuring process is told.
    add("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    add("--copies", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        result = MEASUREMENTS[options.measure](options)
        print(json.dumps(result), flush=True)
        return

    with tempfile.TemporaryDirectory() as temporary:
        table = scale(Path(options.folder or temporary) / "scale", options.rows)
        if not options.skip_build:
            table += rate_of_building(Path(temporary) / "build", options.files, options.repeats)
    heading = Row("what", "figure", "goal")
    for row in [heading, *table]:
        print(f"{row.what:75} {row.figure:>22}  {row.goal}")


if __name__ == "__main__":
    main()
