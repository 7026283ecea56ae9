"""Index of questions at the size of MIMIC-Ext-CXR-QBA: memory, time to the first batch, disk, and how fast it is built.

    python benchmarks/index_scale.py                        # Linux, about 7 minutes, 4 GB of temporary disk
    python benchmarks/index_scale.py --rows 1000000 --files 300 --repeats 1      # a trial

Scale: an index of made-up questions is written straight as Arrow shards, then fresh processes open it as
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
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ROWS, STUDIES = 31_230_906, 227_827  # grade B or better, of all three splits
PASSES = ("bare", "bare, gc off", "index")
KINDS = ("A_indication", "B03_is_abnormal", "B08_describe_subcat", "C01_describe_region", "C03_is_abnormal_region")
KINDS += ("D01_describe_finding", "D02_has_finding", "D03_where_is_finding", "D04_how_severe_is_finding")
WORDINGS = ("Is there {} in the {} on this radiograph?", "What can be said about {} in the {}?", "Any {} of the {}?")


# --- made-up data -----------------------------------------------------------------------------------------------------


def write_index(folder: Path, rows: int) -> None:
    """An index that open_index finds complete: `rows` training questions, all as pyarrow columns."""
    import numpy as np
    import pyarrow as pa

    from tasks.mimic_cxr import index as mci

    rng = np.random.default_rng(0)
    release = folder / "qba"
    for path in (folder / "cxr", release / "qa", release / "metadata"):
        path.mkdir(parents=True, exist_ok=True)
    (release / "metadata" / "question_metadata.parquet").touch()
    index = mci.index_folder(folder / "index", folder / "cxr", release, "B", "frontal")
    index.mkdir(parents=True)
    count = max(8, rows * STUDIES // ROWS)
    table = {"study_id": 50_000_000 + np.arange(count) * 40, "subject_id": 10_000_000 + np.arange(count) * 40}
    table |= {
        "split": np.zeros(count, np.int8),
        "dicom_id": [f"{i:08x}-89abcdef-01234567-89abcdef" for i in table["study_id"]],
    }
    labels = rng.choice(np.array([mci.BLANK, -1, 0, 1], np.int8), (count, len(mci.CHEXPERT)))
    files = {}
    files["studies.arrow"] = mci.write_table(
        index / "studies.arrow", pa.table(table | dict(zip(mci.CHEXPERT, labels.T, strict=True)))
    )
    pairs = itertools.product(WORDINGS, mci.HEADS["severity"][1:], mci.CHEXPERT, mci.REGIONS)
    questions = pa.array([text.format(f"{how} {name.lower()}", place) for text, how, name, place in pairs])
    ids = pa.array([f"{kind}_{i:03d}" for kind in KINDS for i in range(1, 21)])
    heads = np.array([mci.HEAD_NUMBER[mci.head_of(kind)] for kind in KINDS], np.int8)
    counts = []
    for part, first in enumerate(range(0, count, 1024)):
        low, high = (-(-s * rows // count) for s in (first, min(first + 1024, count)))
        kind, n = rng.integers(len(KINDS), size=high - low), high - low
        columns = [pa.array(np.arange(low, high) * count // rows, pa.int32()), heads[kind], np.zeros(n, np.int8)]
        columns += [pa.DictionaryArray.from_arrays(kind.astype(np.int16), list(KINDS))]
        columns += [ids.take(pa.array(kind * 20 + rng.integers(20, size=n)))]
        columns += [questions.take(pa.array(rng.integers(len(questions), size=n)))]
        columns = [pa.array(c) if isinstance(c, np.ndarray) else c for c in columns]
        name = f"part-{part:05d}-train.arrow"
        files[name] = mci.write_table(index / name, pa.Table.from_arrays(columns, schema=mci.ROW))
        counts.append({"train": n, "validate": 0, "test": 0})
    facts = {"rows": counts, "studies": {}, "ratings": {}, "left_out": {}, "classes": {}, "missing": []}
    mci.write_facts(index / "index.json", facts | {"files": files})


def write_release(folder: Path, studies: int, questions: int = 185) -> float:
    """Question files like the sample's with as many questions as the real ones, a grade for each, and tables; returns
    the mean size of a file in KB."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tasks.mimic_cxr import index as mci

    sample = ["mimic_cxr", str(folder / "sample"), "--num_train", "60", "--num_val", "1", "--num_test", "1"]
    command = [sys.executable, str(ROOT / "sample_data.py"), *sample, "--image_size", "64"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    files = sorted((folder / "sample" / "mimic-ext-cxr-qba" / "qa").rglob("*.qa.json"))
    pool = [question for file in files for question in json.loads(file.read_text())["questions"]]
    rng, total = np.random.default_rng(0), 0
    cxr, qba, table = folder / "cxr", folder / "qba", []
    ratings = rng.choice(
        np.array(["2_C", "3_B", "4_A", "5_A+", None]), (studies, questions), p=[0.06, 0.52, 0.15, 0.07, 0.2]
    )
    heads = [("dicom_id", "subject_id", "study_id", "ViewPosition"), ("dicom_id", "subject_id", "split")]
    heads += [("subject_id", "study_id", *mci.CHEXPERT)]
    rows: list[list] = [[], [], []]
    for number, rated in enumerate(ratings):
        subject, study, start = 10_000_000 + number * 1000, 50_000_000 + number, int(rng.integers(len(pool)))
        mine = [pool[(start + i) % len(pool)] for i in range(questions)]
        mine = [q | {"question_id": f"{q['question_type']}_{i:03d}"} for i, q in enumerate(mine)]
        text = json.dumps({"patient_id": f"p{subject}", "study_id": f"s{study}", "questions": mine}).encode()
        path = qba / "qa" / f"p{subject // 1_000_000}" / f"p{subject}" / f"s{study}.qa.json"
        picture = cxr / mci.picture_name(subject, study, "0")
        for file, data in ((path, text), (picture, b"\xff\xd8\xff\xd9")):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        total += len(text)
        found = [("0", subject, study, "PA"), ("0", subject, "train"), (subject, study, *[1.0] * len(mci.CHEXPERT))]
        for lines, line in zip(rows, found, strict=True):
            lines.append(line)
        table += [(f"s{study}", q["question_id"], rating) for q, rating in zip(mine, rated, strict=True)]
    for name, head, lines in zip(("metadata", "split", "chexpert"), heads, rows, strict=True):
        with gzip.open(cxr / f"mimic-cxr-2.0.0-{name}.csv.gz", "wt", newline="") as file:
            csv.writer(file).writerows([head, *lines])
    (qba / "metadata").mkdir()
    names = ("study_id", "question_id", "question.quality.rating")
    columns = {
        name: pa.array(column, pa.string()) for name, column in zip(names, zip(*table, strict=True), strict=True)
    }
    pq.write_table(pa.table(columns), qba / "metadata" / "question_metadata.parquet", row_group_size=1 << 17)
    return total / studies / 1e3


# --- measurements, each in a process of its own -----------------------------------------------------------------------


def read_rows(options: argparse.Namespace) -> dict:
    """Open the index as the trainer does and read 200 batches of rank 0 of 4, the first ones timed."""
    import train_mimic_cxr as trainer
    from sampler_utils import TrainBatchSampler
    from tasks.mimic_cxr import index as mci

    ready()
    begun, folder = time.perf_counter(), Path(options.folder)
    index = mci.open_index(folder / "index", folder / "cxr", folder / "qba")
    args = SimpleNamespace(mimic_cxr_path="", max_samples=0, image_size=224, max_question_length=128, cache_gb=0.0,
                           chexpert_uncertain="ignore")  # fmt: skip
    data = trainer.QuestionData(index, "train", args, None)
    data.rows = index.questions("train", options.copies)
    data.count = len(data.rows)
    sampler = TrainBatchSampler(len(data), 16, 0, 4)
    result = {"open": time.perf_counter() - begun, "length": len(data), "first": []}
    for epoch in range(3):
        begun = time.perf_counter()
        sampler.set_position(epoch)
        batches = iter(sampler)
        rows = [data.row(i) for i in next(batches)]
        result["first"].append(time.perf_counter() - begun)
    begun = time.perf_counter()
    for batch in itertools.islice(batches, 200):
        rows = [data.row(i) for i in batch]
    return result | {"rate": 200 * 16 / (time.perf_counter() - begun), "row": rows[-1]}


def torch_sampler(options: argparse.Namespace) -> dict:
    """torch's sampler over as many questions: time from set_epoch to its first index."""
    from torch.utils.data import DistributedSampler

    import train_mimic_cxr  # noqa: F401 - the same modules as beside ours

    ready()
    sampler = DistributedSampler(range(options.rows), num_replicas=4, rank=0)
    begun = time.perf_counter()
    sampler.set_epoch(1)
    next(iter(sampler))
    return {"first": time.perf_counter() - begun}


def build(options: argparse.Namespace) -> dict:
    """[wall, CPU of the busiest rank] seconds of each pass of bare json.loads over all question files (each rank its
    share), of the same without garbage collection, and of open_index in a fresh folder."""
    import distributed_utils as du
    from tasks.mimic_cxr import index as mci

    folder = Path(options.folder)
    files = sorted((folder / "qba" / "qa").rglob("*.qa.json"))
    seconds: dict[str, list[list[float]]] = {what: [] for what in PASSES}
    with du.setup_distributed() as ranks:
        for repeat in range(options.repeats):
            new = folder / f"index-{ranks.world_size}-{repeat}"
            for what, values in seconds.items():
                du.gather_objects(None)  # start together
                begun, cpu = time.perf_counter(), time.process_time()
                if what == "index":
                    mci.open_index(new, folder / "cxr", folder / "qba")
                else:
                    if "off" in what:
                        gc.disable()
                    for file in files[ranks.rank :: ranks.world_size]:
                        with open(file, "rb") as opened:
                            json.loads(opened.read())
                    gc.enable()
                cpu = max(du.gather_objects(time.process_time() - cpu))
                values.append([time.perf_counter() - begun, cpu])
            if ranks.is_main:
                shutil.rmtree(new)
    return seconds


def ready() -> None:
    """Everything is imported: let the watching process take the baseline, then go on."""
    print("ready", flush=True)
    sys.stdin.readline()


def memory(pid: int) -> dict[str, float]:
    """MB: `private` to the process, and `resident` with the mapped files' pages, which all ranks share."""
    try:
        lines = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {"private": int(lines["RssAnon"].split()[0]) / 1e3, "resident": int(lines["VmRSS"].split()[0]) / 1e3}
    except (OSError, KeyError):  # it has ended
        return {"private": 0.0, "resident": 0.0}


def launch(measure: str, processes: int = 1, **options) -> dict:
    """Run a measurement in a fresh process, or some under torchrun; with its peak memory above its imports, in MB."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [__file__, "--measure", measure, *(f"--{name}={value}" for name, value in options.items())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as child:
        peak = base = {}
        if measure != "build":
            child.stdout.readline()
            peak = base = memory(child.pid)
            print("go", file=child.stdin, flush=True)
            while child.poll() is None:
                now = memory(child.pid)
                peak = {name: max(value, now[name]) for name, value in peak.items()}
                time.sleep(0.005)
        out = child.stdout.read()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}")
    result = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    return result | {"base": base, "memory": {name: peak[name] - base[name] for name in base}}


# --- the table --------------------------------------------------------------------------------------------------------


def forget(folder: Path) -> None:
    """Drop the files from the page cache, so that the next process reads from the disk."""
    for path in folder.rglob("*.arrow"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def scale(folder: Path, rows: int) -> list[tuple[str, str, str]]:
    from tasks.mimic_cxr import index as mci

    if not list(folder.glob("index/*/index.json")):
        begun = time.perf_counter()
        write_index(folder, rows)
        print(f"index written in {time.perf_counter() - begun:.0f} s", flush=True)
    index = next(folder.glob("index/*/index.json")).parent
    table = [("index on disk, GB", f"{mci.size_on_disk(index) / 1e9:.2f}", "")]
    for copies, cold in ((1, True), (1, False), (10, False)):
        if cold:
            forget(index)
        it = launch("read_rows", folder=folder, copies=copies)
        name, goal = f"{it['length']:,} questions{', cold files' * cold}", f"<= {400 if copies == 1 else 800}"
        table += [(f"{name}: MB private to a rank", f"{it['memory']['private']:.0f}", goal)]
        table += [(f"{name}: MB with the index's pages, shared", f"{it['memory']['resident']:.0f}", goal)]
        first = " ".join(f"{value:.4f}" for value in it["first"])
        table += [(f"{name}: s to the first batch of 3 epochs", first, "<= 2")]
        table += [(f"{name}: s to open; rows/s after", f"{it['open']:.2f}; {it['rate']:.0f}", "")]
    print(f"a row: {it['row']}")
    theirs = launch("torch_sampler", rows=rows)
    table += [("torch's DistributedSampler, the first size: MB a rank", f"{theirs['memory']['private']:.0f}", "")]
    table += [("torch's DistributedSampler: s to the first index of an epoch", f"{theirs['first']:.2f}", "")]
    table += [("baseline below these: MB private, resident", "{private:.0f}, {resident:.0f}".format(**it["base"]), "")]
    return table


def rate_of_building(folder: Path, files: int, repeats: int) -> list[tuple[str, str, str]]:
    size = write_release(folder, files)
    seconds: dict[tuple[str, int], list[list[float]]] = {}
    for _ in range(repeats):
        for processes in (1, 2):
            it = launch("build", processes, folder=folder, repeats=3)
            for what in PASSES:
                seconds.setdefault((what, processes), []).extend(it[what][1:])  # the first pass warms up
    best = {key: [min(column) for column in zip(*values, strict=True)] for key, values in seconds.items()}
    table = []
    for (what, processes), values in seconds.items():
        print(
            f"{what}, {processes} process(es), s wall/CPU:", " ".join(f"{wall:.2f}/{cpu:.2f}" for wall, cpu in values)
        )
        rates = "; ".join(f"{files / value:.0f}" for value in best[what, processes])
        table += [(f"{files} files of {size:.0f} KB, {what}, {processes} process(es): files/s wall; CPU", rates, "")]
    for what, above, below, goal in (
        ("open_index over bare json.loads, 1 process", ("bare", 1), ("index", 1), ">= 0.5"),
        ("open_index over json.loads without garbage collection", ("bare, gc off", 1), ("index", 1), ""),
        ("open_index, 2 processes over 1", ("index", 1), ("index", 2), ">= 1.7"),
        ("bare json.loads, 2 processes over 1 (what the machine gives)", ("bare", 1), ("bare", 2), ""),
    ):
        ratios = "; ".join(f"{a / b:.3f}" for a, b in zip(best[above], best[below], strict=True))
        table += [(f"{what}: wall; CPU", ratios, goal)]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=ROWS, help="questions of the made-up index")
    parser.add_argument("--folder", help="keep the made-up index here, and use the one that is here")
    parser.add_argument("--skip_build", action="store_true", help="leave the build rate out")
    parser.add_argument("--files", type=int, default=1500, help="question files of the build rate, 0.2 MB each")
    parser.add_argument(
        "--repeats", type=int, default=3, help="rounds of the build rate: 1 process, then 2, two passes each"
    )
    parser.add_argument("--measure", choices=("read_rows", "torch_sampler", "build"), help=argparse.SUPPRESS)
    parser.add_argument("--copies", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return print(json.dumps(globals()[options.measure](options)), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        table = scale(Path(options.folder or temporary) / "scale", options.rows)
        if not options.skip_build:
            table += rate_of_building(Path(temporary) / "build", options.files, options.repeats)
    for what, figure, goal in [("what", "figure", "goal"), *table]:
        print(f"{what:75} {figure:>22}  {goal}")


if __name__ == "__main__":
    main()
