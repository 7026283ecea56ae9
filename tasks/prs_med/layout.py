"""The folders and the table that train_prs_med.py reads, written from raw pairs: whole, or not at all.

What is written first lies in a hidden folder, and is moved into place once all of it is there.
"""

import csv
import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

from PIL import Image

from old.cli_utils import InputError
from tasks.prs_med.pairs import Pair, is_volume, simplify
from tasks.prs_med.patients import Images
from tasks.prs_med.raw_masks import FEW_VALUES
from tasks.prs_med.views import Reading, View, views_of
from tasks.prs_med.wording import answer_with, question_about

COLUMNS = ("image_path", "image_name", "split", "description", "position", "question", "answer", "patient")


class Writer:
    """Writes the views of a set into a hidden folder, and collects the rows of its table."""

    def __init__(self, folder: Path, name: str, images: Images, seed: int):
        """name: of the set. seed: of the wording."""
        self.folder = folder
        self.name = name
        self.images = images
        self.seed = seed
        self.rows: list[dict] = []
        self.sources: dict[str, Path] = {}
        self.pixels: dict[bytes, tuple[str, Path]] = {}
        self.levels: dict[float, Path] = {}

    def add(self, pair: Pair, view: View) -> None:
        """Write an image once and each of its masks. Raises InputError where a file of that name is there."""
        self.check_level(pair, view)
        split = self.images.splits[simplify(pair.name)]
        image_name = f"{view.name}.png"
        source = self.sources.setdefault(simplify(image_name), pair.image)
        if source != pair.image:
            raise InputError(f"{pair.image}: would be written as {image_name}, as {source} is; rename it")
        self.check_copy(pair, view, split)

        # a mask of several has its structure in the name
        for structure, mask in view.masks.items():
            mask_name = image_name
            if pair.structure or view.level == 0:
                mask_name = f"{view.name}__{re.sub(r'[/:]', '_', structure)}.png"
            save(self.folder / f"{split}_images" / image_name, view.image)
            path = self.folder / f"{split}_masks" / mask_name
            if path.exists():
                raise InputError(f"{pair.mask}: {mask_name} would be the name of two masks; rename a structure")
            save(path, Image.fromarray(mask).convert("L"))
            self.add_rows(pair, view, structure, image_name, f"{self.name}/{split}_masks/{mask_name}")

    def check_copy(self, pair: Pair, view: View, split: str) -> None:
        """Raises InputError where an image of another split has the same pixels, which a training refuses."""
        content = view.image.mode.encode() + view.image.tobytes()
        digest = hashlib.blake2b(content, digest_size=16)
        before, first = self.pixels.setdefault(digest.digest(), (split, pair.image))
        if before != split:
            reason = f"shows what {first} does, which is in split {before!r}, and this in {split!r}"
            raise InputError(f"{pair.image}: {reason}; keep one, or give both one patient")

    def check_level(self, pair: Pair, view: View) -> None:
        """Raises InputError where masks have 1 here and 2 there: they are label maps, of which each holds one."""
        if 0 < view.level <= FEW_VALUES:
            first = self.levels.setdefault(view.level, pair.mask)
            for level, path in self.levels.items():
                if path != first:
                    reason = f"marks with {view.level:g}, and {path.name} with {level:g}, as label maps do"
                    raise InputError(f'{pair.mask}: {reason}; name the values, such as --labels "1=liver,2=spleen"')

    def add_rows(self, pair: Pair, view: View, structure: str, image_name: str, mask_path: str) -> None:
        """The rows of one mask: the table's questions, or one of ours."""
        from tasks.prs_med.metrics import position_of

        key = simplify(pair.name)
        mask = view.masks[structure]
        position = position_of(mask)
        answer = answer_with(structure, position, view.name, self.seed)
        facts = {
            "image_path": mask_path,
            "image_name": image_name,
            "split": self.images.splits[key],
            "description": f"An image in which the {structure} covers {mask.mean():.1%} of the area.",
            "position": position,
            "patient": self.images.patients[key],
        }

        # the table's questions about it
        asked = []
        for record in self.images.rows.get(key, []):
            about = record.values.get("structure", "")
            question = record.values.get("question", "")
            if question and simplify(about) in ("", simplify(structure)):
                asked.append({"question": question, "answer": record.values.get("answer") or answer})
        usual = {"question": question_about(structure, view.name, self.seed), "answer": answer}
        self.rows += [facts | texts for texts in asked or [usual]]


def write_set(
    out: Path,
    name: str,
    pairs: list[Pair],
    images: Images,
    reading: Reading,
    seed: int,
) -> list[dict]:
    """Write images, masks and the table; returns its rows. Raises InputError for the first unusable pair."""
    from tqdm import tqdm

    partial = out / f".{name}.partial"
    writer = Writer(partial, name, images, seed)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for pair in tqdm(pairs, desc="images", disable=not sys.stderr.isatty()):
            before = len(writer.rows)
            records = images.rows.get(simplify(pair.name), [])
            for view in views_of(pair, records, reading):
                writer.add(pair, view)
            if len(writer.rows) == before:
                kind = "volume" if is_volume(pair.mask) else "mask"
                print(f"empty {kind}, left out: {pair.mask}")

        # nothing lies in place before all of it is written
        if not any(row["split"] == "train" for row in writer.rows):
            raise InputError(f"{pairs[0].mask.parent}: no mask of a training image shows anything; check the masks")
        write_csv(partial / "annotations.csv", writer.rows)
        put_in_place(partial, out, name)
    except BrokenPipeError:
        # of standard output, not of a file
        raise
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{error.filename or out}: not written ({reason}); choose another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return writer.rows


def save(path: Path, image: Image.Image) -> None:
    """Write a PNG where there is none yet."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write the table of questions."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def put_in_place(partial: Path, out: Path, name: str) -> None:
    """Move what is complete to where it belongs, the table last; what lay there is deleted."""
    table = out / "annotations" / f"{name}.csv"
    table.parent.mkdir(exist_ok=True)
    table.unlink(missing_ok=True)
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for part in sorted(partial.iterdir()):
        if part.is_dir():
            os.replace(part, folder / part.name)
    os.replace(partial / "annotations.csv", table)
