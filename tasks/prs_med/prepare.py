"""`old.prepare_data prs_med`: raw images and masks become the folders and the table that train_prs_med.py reads."""

import argparse
import math
import re
from collections import Counter
from pathlib import Path

from old.cli_utils import InputError, counted, number, whole
from old.image_utils import Window
from old.table_utils import SPLITS, parse_shares
from tasks.prs_med.layout import write_set
from tasks.prs_med.pairs import Pair, Pairs, find_pairs, is_volume, plain_name, simplify
from tasks.prs_med.patients import Images, describe_images
from tasks.prs_med.raw_masks import Labels, parse_labels
from tasks.prs_med.views import Reading
from tasks.prs_med.volumes import listed_pairs, read_label_names

POSITIONS = ("top left", "top right", "center", "bottom left", "bottom right")
# What lies beside the sets.
TAKEN = ("annotations", "data", "llava_tiny", "sam_tiny")


# --- flags ------------------------------------------------------------------------------------------------------------


def parse_window(text: str) -> Window:
    """argparse type: centre and width."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    finite = all(map(math.isfinite, values))
    if len(values) != 2 or not finite or values[1] <= 0:
        raise argparse.ArgumentTypeError(f"must be centre and width, such as 40,400, not {text!r}")
    return Window._make(values)


def parse_pattern(text: str) -> re.Pattern:
    """argparse type: a regular expression with a group."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"not a regular expression ({error}): {text!r}") from None
    if not pattern.groups:
        example = r"^(P\d+)"
        raise argparse.ArgumentTypeError(f"must hold the patient in brackets, such as {example}, not {text!r}")
    return pattern


def parse_name(text: str) -> str:
    """argparse type: the name of a set, which becomes that of a folder."""
    name = text.strip()
    is_plain = re.fullmatch(r"[^./\\:][^/\\:]*", name)
    if not is_plain or name in TAKEN:
        raise argparse.ArgumentTypeError(f"must be a plain name such as liver_CT, not {text!r}")
    return name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this task's flags."""
    add = parser.add_argument
    add("images", type=Path, help="folder of images: PNG, JPEG, TIFF, BMP, DICOM or NIfTI")
    add("masks", type=Path, help="folder of masks or label maps named as the images; may be the same")
    add("out", type=Path, help="folder to write, for --data_root; other sets may lie there")
    add("--name", type=parse_name, help="of the set, OUT/annotations/NAME.csv; default: the folder of images")
    add("--structure", nargs="+", metavar="NAME", help="what masks show; several where their names end with it")
    add("--labels", type=parse_labels, metavar="1=A,2=B", help="values of label maps; default: dataset.json's")
    add("--min_pixels", type=whole(1), default=10, help="a label of fewer in an image is left out")

    add = parser.add_argument_group("splits").add_argument
    add("--table", type=Path, metavar="CSV", help="columns file, patient, structure, question, answer, split")
    add("--patient_column", metavar="NAME", help="column of --table; default: patient, where there is one")
    add("--patient_pattern", type=parse_pattern, metavar="REGEX", help="group 1 is the patient in a name")
    shares = "percent of the patients that train, validate and test"
    add("--split", dest="shares", type=parse_shares, default="70,15,15", metavar="T,V,T", help=shares)
    add("--seed", type=int, default=0, help="decides, with the patient's name, the split; and the wording")

    add = parser.add_argument_group("images").add_argument
    window = "centre and width for DICOM and NIfTI; default: the file's own, else its range"
    add("--window", type=parse_window, metavar="C,W", help=window)
    add("--slice_spacing", type=number(0, above=True), default=10.0, help="mm between the slices of a volume")
    add("--channel", type=whole(0), default=0, help="of a volume with several")

    add = parser.add_argument_group("output").add_argument
    add("--overwrite", action="store_true", help="replace OUT/annotations/NAME.csv and OUT/NAME")
    add("--small_models", action="store_true", help="tiny models with random weights in OUT, for a trial")
    add("--small_size", type=whole(32), default=96, help="side of the small SAM's input, pixels")


# --- the whole --------------------------------------------------------------------------------------------------------


def prepare(images: Path, masks: Path, out: Path, **flags) -> None:
    """Write the data set and print its table. flags: see add_arguments. Raises InputError."""
    name = flags["name"] or name_after(images)
    check_free(out, name, flags["overwrite"])
    structures = flags["structure"] or []
    found = collect(images, masks, structures)
    labels = find_labels(images, structures, flags["labels"])
    for path in found.unpaired:
        print(f"no partner: {path}")

    # whose each image is, and how it is read
    known = describe_images(
        found.pairs,
        flags["table"],
        flags["patient_column"],
        flags["patient_pattern"],
        flags["shares"],
        flags["seed"],
    )
    reading = Reading(
        structures=structures,
        labels=labels,
        min_pixels=flags["min_pixels"],
        window=flags["window"],
        spacing=flags["slice_spacing"],
        channel=flags["channel"],
    )

    rows = write_set(out, name, found.pairs, known, reading, flags["seed"])
    if flags["small_models"]:
        write_small_models(out, rows, flags["small_size"], flags["seed"])
    print_summary(rows, found, known, reading, name)
    print(f"written: {out}/annotations/{name}.csv, {out}/{name}")
    config = " --config configs/prs_med_small.yaml" if flags["small_models"] else ""
    print(f"next: python train_prs_med.py --data_root {out}{config}", flush=True)


def name_after(images: Path) -> str:
    """The name of a set that the folder of images gives it. Raises InputError where it is not plain."""
    try:
        return parse_name(images.resolve().name)
    except argparse.ArgumentTypeError:
        raise InputError(f"{images}: its name is taken; name the set with --name") from None


def check_free(out: Path, name: str, overwrite: bool) -> None:
    """Raises InputError where the set is there already, or a file is in the way."""
    for path in (out, out / "annotations", out / name):
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: is a file; choose another folder to write")
    for path in (out / "annotations" / f"{name}.csv", out / name):
        if path.exists() and not overwrite:
            raise InputError(f"{path}: is there already; choose another --name or folder, or pass --overwrite")


def collect(images: Path, masks: Path, structures: list[str]) -> Pairs:
    """The pairs of both folders, or of a Decathlon folder by its own list. Raises InputError."""
    names = {simplify(name) for name in structures}
    if len(names) < len(structures):
        raise InputError(f"--structure {' '.join(structures)}: a name is there twice; remove one")
    listed = []
    for image, mask in listed_pairs(images):
        pair = Pair(plain_name(image.parent, image), image, mask, "")
        listed.append(pair)
    found = Pairs(sorted(listed), []) if listed else find_pairs(images, masks, structures)
    for pair in found.pairs:
        if is_volume(pair.image) != is_volume(pair.mask):
            raise InputError(f"{pair.mask}: a volume and a flat image ({pair.image.name}) are no pair; convert one")
    return found


def find_labels(images: Path, structures: list[str], labels: Labels | None) -> Labels:
    """The names of labels: the flag's, else dataset.json's where no structure is named. Raises InputError."""
    if labels is not None and structures:
        raise InputError("--structure and --labels exclude each other; --labels names what each value shows")
    if labels is None and not structures:
        return read_label_names(images)
    return labels or {}


def write_small_models(out: Path, rows: list[dict], side: int, seed: int) -> None:
    """Write llava_tiny and sam_tiny, whose words are those of the questions, where there are none."""
    from tasks.prs_med.sample_models import write_tiny_llava, write_tiny_sam

    texts = []
    for row in rows:
        texts += [row["question"], row["answer"]]
    llava = out / "llava_tiny"
    if not llava.exists():
        write_tiny_llava(llava, texts, seed)
    sam = out / "sam_tiny"
    if not sam.exists():
        write_tiny_sam(sam, side, seed)


def print_summary(rows: list[dict], found: Pairs, known: Images, reading: Reading, name: str) -> None:
    """The closing table: images, rows and patients of each split, and at which positions things lie."""
    from old.logging_utils import print_table

    table = {}
    for split in SPLITS:
        of_split = [row for row in rows if row["split"] == split]
        positions = Counter(row["position"] for row in of_split)
        images = {row["image_name"] for row in of_split}
        patients = {row["patient"] for row in of_split}
        counts = {"images": len(images), "rows": len(of_split), "patients": len(patients)}
        table[split] = counts | {position: positions[position] for position in POSITIONS}

    volumes = [pair for pair in found.pairs if is_volume(pair.image)]
    if volumes:
        slices = {row["image_name"] for row in rows}
        print(f"{counted(len(slices), 'slice')} of {counted(len(volumes), 'volume')}, {reading.spacing:g} mm apart")
    print_table(name, table)
    print(f"split {known.rule}")
    for note in notes_on_repeats(rows):
        print(f"note: {note}")
    print(f"{counted(len(found.unpaired), 'file')} without a partner")


def notes_on_repeats(rows: list[dict]) -> list[str]:
    """What to say of questions that an image has more than once: answered in two ways, or the very same row."""
    from tasks.prs_med.metrics import meaning_of

    firsts: dict[tuple[str, str], dict] = {}
    contradictions = []
    copies = 0
    for row in rows:
        asked = (row["image_name"], row["question"].casefold())
        first = firsts.setdefault(asked, row)
        if meaning_of(row["answer"]) != meaning_of(first["answer"]):
            contradictions.append(row)
        elif row is not first and row["image_path"] == first["image_path"]:
            copies += 1

    notes = []
    if contradictions:
        row = contradictions[0]
        what = counted(len(contradictions), "answer")
        about = f"such as {row['answer']!r} to {row['question']!r} about {row['image_name']}"
        notes.append(f"{what} to a question that a row before answers otherwise, {about}; keep one of them")
    if copies:
        notes.append(f"{counted(copies, 'row')} there twice or more; each counts")
    return notes
