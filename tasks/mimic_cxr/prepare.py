"""`tools.prepare_data mimic_cxr`: looks at a table before a training reads it, and writes tiny models for a trial."""

import argparse
from collections import Counter
from pathlib import Path

from old.cli_utils import InputError, counted
from old.table_utils import parse_shares


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this task's flags."""
    add = parser.add_argument
    add("table", type=Path, help="CSV for train_mimic_cxr.py --table: columns image, question, answer and more")
    add("--categories", nargs="+", metavar="NAME", help="as of train_mimic_cxr.py: classes of the category head")
    add("--split", dest="shares", type=parse_shares, default="70,15,15", metavar="T,V,T", help="as there")
    add("--split_seed", type=int, default=0, help="as there")
    add("--small_models", type=Path, metavar="DIR", help="write two tiny models with random weights, for a trial")


def prepare(table: Path, categories: list[str] | None, shares: tuple, split_seed: int, small_models: Path) -> None:
    """Print what a training would make of a table; write small models where asked. Raises InputError."""
    from old.logging_utils import print_table
    from tasks.mimic_cxr.answers import HEADS
    from tasks.mimic_cxr.own_table import check_image, describe_splits, read_own_table

    own = read_own_table(table, categories, shares, split_seed)
    missing = []
    for image in own.images:
        path = table.parent / image.name
        if not check_image(path, str(table)):
            missing.append(image.name)
    print_table(str(table), describe_splits(own))
    print(f"split {own.rule}")

    # which answers are learned by which head
    names = dict(HEADS)
    names["category"] = tuple(own.routing.categories)
    counts: Counter = Counter()
    for head, target in zip(own.routing.heads, own.routing.targets, strict=True):
        answer = names[head][target]
        counts[f"{head}: {answer}"] += 1
    rows = {name: {"questions": count} for name, count in sorted(counts.items())}
    print_table("answer", rows)
    for note in own.notes:
        print(f"note: {note}")
    if missing:
        lacking = counted(len(missing), "image")
        raise InputError(f"{table}: {lacking} not found, such as {missing[0]}; paths begin at its folder")

    if small_models:
        questions = [row.question for row in own.asked]
        write_small_models(small_models, questions)
        models = f"--image_encoder {small_models}/convnext_tiny --text_encoder {small_models}/bert_tiny"
        print(f"written: {small_models}")
        config = "--config configs/mimic_cxr_small.yaml"
        print(f"next: python train_mimic_cxr.py --table {table} {config} {models}", flush=True)


def write_small_models(folder: Path, questions: list[str]) -> None:
    """Write convnext_tiny and bert_tiny, whose words are those of the questions. Raises InputError."""
    from tasks.mimic_cxr.sample_models import write_tiny_bert, write_tiny_convnext

    for name in ("convnext_tiny", "bert_tiny"):
        if (folder / name).exists():
            raise InputError(f"{folder / name}: is there already; choose another folder for --small_models")
    write_tiny_convnext(folder / "convnext_tiny", 0)
    write_tiny_bert(folder / "bert_tiny", questions, 0)
