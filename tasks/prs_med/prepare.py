"""Convert images and masks, or volumes and label maps, to the data set format of train_prs_med.py."""

import csv
import json
import os
import random
import re
import shutil
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from tasks.prs_med.annotations import POSITIONS, foreground, is_label_map, is_misfit, position_of
from tasks.prs_med.wordings import ANSWERS, QUESTIONS, fill
from utils.cli import InputError, RunError, pattern, real, refuse
from utils.images import IMAGE_ENDINGS, is_dicom, open_upright, to_bytes
from utils.tables import SPLITS, check_one_split, find_column, parse_shares, patient_in, read_table, split_of
from utils.volumes import read_volume

VOLUME = r"(?i)[.]nii([.]gz)?$"
ENDING = "(?i)({}|[.]nii|[.]nii[.]gz)$".format("|".join(map(re.escape, IMAGE_ENDINGS)))
# separators in file names, and words that may end the name of a mask or an image; nnU-Net appends _0000 to images
GAP = "[ _.+-]+"
MASK_WORDS = "mask|masks|seg|segmentation|label|labels|gt"
IMAGE_WORDS = "image|img|0000"
UNSAFE = r"[^\w .+-]"
MIN_PIXELS = 10

LABEL_MAP = 'a label map; name its values, as --labels "1=liver,2=spleen"'


class Pair(NamedTuple):
    """An image file, its mask file, and their patient and split.

    structure: the structure in the mask; "" if it is unknown or the mask is a label map. stem: image path relative to
    the image folder, without the extension.
    """

    image: Path
    mask: Path
    structure: str
    stem: str
    patient: str
    split: str


class Record(NamedTuple):
    image_path: str
    image_name: str
    split: str
    description: str
    position: str
    question: str
    answer: str
    structure: str
    patient: str


def parse_labels(text: str) -> dict[int, str]:
    """Parse --labels; return {label value: structure name}, without the background value 0.

    text: "1=liver,2=left kidney,3=-", where "-" skips a value, or the path of a dataset.json (Medical Segmentation
    Decathlon or nnU-Net). Raises ArgumentTypeError for unusable input.
    """
    try:
        listed = [re.split(r"\s*=\s*", part.strip()) for part in text.split(",")]
        if text.endswith(".json"):
            listed = json.loads(Path(text).read_text(encoding="utf-8"))["labels"].items()
        # the Decathlon's dataset.json maps values to names; nnU-Net's maps names to values
        ordered = [sorted(map(str, pair), key=str.isdigit) for pair in listed]
        return {int(value): name for name, value in ordered if int(value)}
    except (OSError, ValueError, KeyError, AttributeError):
        reason = f'must be as "1=liver,2=left kidney", or a dataset.json, not {text!r}'
        raise ArgumentTypeError(reason) from None


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("images", type=Path, help="folder of images: PNG, JPEG, TIFF, BMP, WebP, DICOM (series: subfolders), NIfTI")
    add("masks", type=Path, help="folder of masks or label maps, named like the images; may be the same folder")
    add("out", type=Path, help="folder to write, later the --data_root; may hold other data sets")
    add("--name", type=pattern(r"\w[\w .+-]*", "a plain name"), help="data set name; default: the image folder's")
    text = "structure in the masks, as NAME|SYNONYM|...; if several, each mask's file name must end with its structure"
    add("--structure", nargs="+", default=[], metavar="NAME", help=text)
    add("--labels", type=parse_labels, metavar="1=A,2=B", help="names of label values, or a dataset.json; 3=- skips 3")
    add("--window", type=float, nargs=2, metavar=("CENTER", "WIDTH"), help="default: the DICOM window, or the range")
    add("--slice_spacing", type=real(0, above=True), default=10.0, help="mm between slices taken from a volume")
    add("--seed", type=int, default=0, help="seed of the splits and the wordings")
    add("--split", type=parse_shares, default="70,15,15", metavar="T,V,T", help="shares of patients")
    text = 'matches the patient id in an image name, as "^(P[0-9]+)"; the default treats each image as a patient'
    add("--patient_pattern", default=".*", metavar="REGEX", help=text)
    add("--table", type=Path, help="CSV or parquet with columns file, patient and, optionally, split")
    add("--patient_column", default="patient", metavar="NAME", help="patient column of --table")
    add("--overwrite", action="store_true", help="replace the data set of this name in OUT")
    add("--small_models", action="store_true", help="also write tiny models to OUT, for a trial run")


# --- files and patients -----------------------------------------------------------------------------------------------


def list_files(folder: Path) -> dict[str, Path]:
    """Return {lower-case relative path without extension: file} for all images below `folder`.

    Raises InputError if two files have the same key, or if there are no images.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("[!.]*")):
        if path.is_file() and (re.search(ENDING, path.name) or is_dicom(path)):
            key = re.sub(ENDING, "", path.relative_to(folder).as_posix()).lower()
            if files.setdefault(key, path) != path:
                raise InputError(f"{path}: has the same name as {files[key].name}; keep one of them")
    if not files:
        raise InputError(f"{folder}: holds no image, such as .png, .jpg, .tif, .dcm or .nii.gz; check the folder")
    return files


def find_image(key: str, mask: Path, images: dict[str, Path], structures: list[str]) -> tuple[Path | None, str]:
    """Find a mask's image (or None) and its structure from the mask's file name.

    key: the mask's key in list_files(). Structure names and MASK_WORDS are removed from the end of the key until an
    image other than the mask has this key. The structure is "" if it is unknown.
    """
    words = {name: GAP.join(map(re.escape, name.partition("|")[0].lower().split())) for name in structures}
    named = [name for name, word in words.items() if re.search(f"{GAP}{word}({GAP}({MASK_WORDS}))*$", key)]
    # the longest match wins: a file name that ends with "left kidney" also ends with "kidney"
    structure = max(named, key=len) if named else structures[0] if len(structures) == 1 else ""
    while images.get(key, mask) == mask:
        key, longer = re.sub(f"{GAP}({'|'.join([MASK_WORDS, *words.values()])})$", "", key), key
        if key == longer:
            return None, structure
    return images[key], structure


def read_patients(args: Namespace) -> dict[str, tuple[str, str]]:
    """Read --table; return {lower-case image file name without extension: (patient, split)}.

    Without a split column, a hash of --seed and the patient determines the split. Raises InputError if a row is
    incomplete or a patient is in two splits.
    """
    table = read_table(args.table)
    file, patient = find_column(table, "file", "image", "image_name"), find_column(table, args.patient_column)
    found = []
    for source, row in table:
        split = SPLITS.get(row["split"].lower()) if "split" in row else split_of(row[patient], args.seed, args.split)
        found.append((row[patient], split, source))
    advice = "no patient, or a split that is not train, val or test; complete the row"
    refuse([f"{source}: {advice}" for *known, source in found if not all(known)], "rows without patient or split")
    check_one_split(found)
    names = [re.sub(ENDING, "", re.split(r"[/\\]", row[file])[-1]).lower() for _, row in table]
    return {name: (patient, split) for name, (patient, split, _) in zip(names, found, strict=True)}


# --- images, masks, sentences -----------------------------------------------------------------------------------------


def masks_in(values: np.ndarray, labels: dict[int, str] | None, structure: str) -> dict[str, np.ndarray]:
    """Split a label map or mask (H, W) into {structure name: bool mask (H, W)}.

    labels: {label value: structure name, or "-" to skip the value}. Raises ValueError if a structure's name is unknown.
    """
    if labels:
        unnamed = set(np.unique(values).tolist()) - {0, *labels}
        if unnamed:
            raise ValueError(f"holds label {min(unnamed):g}; name it in --labels, or leave it out: {min(unnamed):g}=-")
        return {name: np.isin(values, [v for v in labels if labels[v] == name]) for name in {*labels.values()} - {"-"}}
    if is_label_map(values):
        raise ValueError(LABEL_MAP)
    if not structure:
        raise ValueError("its name does not end with a --structure; rename it, or give one structure only")
    return {structure: foreground(values)}


def read_views(image: Path, mask: Path, structure: str, args: Namespace) -> list[tuple]:
    """Return [(file name suffix, image, {structure: bool mask})] for an image or for the slices of a volume.

    Of the slices with foreground, one every --slice_spacing mm is used. Slices are orthogonal to the axis with the
    largest voxel spacing, or axial if the spacings are about equal. In axial slices, the top is the front of the body
    and the left side is the patient's right. Raises InputError if a file is unusable.
    """
    path = image
    try:
        if image.is_file() and not re.search(VOLUME, image.name):
            pixels, path = open_upright(image, args.window), mask
            # read label maps unchanged; open masks as training does: 8-bit, with EXIF rotation applied
            values = np.asarray(Image.open(mask) if args.labels else open_upright(mask).convert("L"))
            if values.ndim > 2:
                raise ValueError("labels in colours; write them as numbers in one channel")
            if is_misfit(pixels.size, values.shape[::-1]):
                raise ValueError(f"its {values.shape[::-1]} pixels do not fit {pixels.size} of {image.name}")
            return [("", pixels, masks_in(values, args.labels, structure))]

        volume = read_volume(image, first_channel=True)
        low, high = np.percentile(volume.values, [0.5, 99.5])
        voxels = to_bytes(volume.values, args.window or ((low + high) / 2, high - low))
        path = mask
        label_map = read_volume(mask)
        values, sizes = label_map.values, volume.spacing
        if values.shape != voxels.shape or not np.allclose(volume.affine, label_map.affine, atol=0.01):
            raise ValueError(f"{image.name} has another grid; resample one of them")
        if not args.labels and len(np.unique(values)) > 2:
            raise ValueError(LABEL_MAP)
        axis = int(np.argmax(sizes)) if max(sizes) > 1.05 * sizes[2] else 2
        voxels, values = (np.moveaxis(array, axis, 0)[:, ::-1, ::-1].transpose(0, 2, 1) for array in (voxels, values))
        slices = np.flatnonzero(values.any((1, 2)))[:: max(1, round(args.slice_spacing / sizes[axis]))]
        masks = [masks_in(values[n], args.labels, structure) for n in slices]
        return [(f"_s{n:03d}", Image.fromarray(voxels[n].copy()), of_n) for n, of_n in zip(slices, masks, strict=True)]
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path}: cannot be used ({error}); correct or remove it") from None


def sentences(structure: str, position: str, case: str, seed: int) -> tuple[str, str]:
    draw = random.Random(f"{seed}/{case}/{structure}")
    return tuple(fill(draw.choice(texts), structure, position=position) for texts in (QUESTIONS, ANSWERS))


# --- writing the data set ---------------------------------------------------------------------------------------------


def pair_files(images: dict, masks: dict, known: dict, args: Namespace) -> tuple[list[Pair], dict[Path, str]]:
    """Pair each mask with its image; return the pairs and {unused file: reason}.

    known: {file name: (patient, split)} or {}. Paired files count as unused until write_set() has converted them.
    """
    partners = {re.sub(f"{GAP}({IMAGE_WORDS})$", "", key): path for key, path in images.items()} | images
    # a NIfTI mask may belong to a folder of DICOM slices
    folders = {path.parent.relative_to(args.images).as_posix().lower(): path.parent for path in images.values()}
    unused = dict.fromkeys(masks.values(), "no image of this name")
    unused |= dict.fromkeys(images.values(), "no mask of this name")
    pairs = []
    for key, mask in masks.items():
        candidates = folders | partners if re.search(VOLUME, mask.name) else partners
        image, structure = find_image(key, mask, candidates, args.structure)
        if image is None:
            continue
        stem = re.sub(ENDING, "", image.relative_to(args.images).as_posix())
        if args.table:
            patient, split = known.get(Path(stem).name.lower(), ("", ""))
            if not patient:
                unused |= {path: "no row in --table" for path in (image, mask) if path in unused}
                continue
        else:
            patient = patient_in(args.patient_pattern, stem)
            split = split_of(patient, args.seed, args.split)
        pairs.append(Pair(image, mask, structure, stem, patient, split))
    return pairs, unused


def write_set(pairs: list[Pair], unused: dict, folder: Path, name: str, args: Namespace) -> list[Record]:
    """Write the images and masks of the pairs to `folder`; return the rows of the annotation CSV.

    Removes converted files from `unused`. Raises one InputError for all unusable files.
    """
    for split in ("train", "val", "test"):
        (folder / f"{split}_images").mkdir(parents=True)
        (folder / f"{split}_masks").mkdir()
    several = args.labels or len(args.structure) > 1
    rows, problems, image_of = [], [], {}
    for image, mask, structure, stem, patient, split in tqdm(pairs, "masks", mininterval=2):
        try:
            if not patient:
                raise InputError(f"{image}: --patient_pattern finds nothing in its name; correct the pattern")
            views = read_views(image, mask, structure, args)
        except InputError as error:
            problems.append(str(error))
            continue

        for addition, pixels, of_view in views:
            file = re.sub(UNSAFE, "_", stem) + addition
            # replacing unsafe characters may give two images the same file name
            while image_of.setdefault(file.lower(), image) != image:
                file += "_"
            for names, inside in sorted(of_view.items()):
                shows = names.partition("|")[0].strip()
                if inside.sum() < MIN_PIXELS:
                    reason = f"a mask of fewer than {MIN_PIXELS} pixels"
                    unused |= {path: reason for path in (image, mask) if path in unused}
                    continue
                for path in (image, mask, *(image.rglob("*") if image.is_dir() else ())):
                    unused.pop(path, None)
                mask_file = f"{file}__{re.sub(UNSAFE, '_', shows)}.png" if several else f"{file}.png"
                mask_path = f"{split}_masks/{mask_file}"
                if (folder / mask_path).exists():
                    problems.append(f"{mask}: a mask of the {shows} in {image.name} is there already; remove one")
                pixels.save(folder / f"{split}_images" / f"{file}.png")
                Image.fromarray(inside).convert("L").save(folder / mask_path)
                description = f"Area of the {shows}: {inside.mean():.1%} of the image."
                position = position_of(inside)
                texts = description, position, *sentences(shows, position, file, args.seed)
                rows.append(Record(f"{name}/{mask_path}", f"{file}.png", split, *texts, names, patient))
    refuse(problems, "files cannot be used")
    return rows


def print_summary(rows: list[Record], unused: dict, known: dict, args: Namespace) -> None:
    for reason in sorted({*unused.values()}):
        files = sorted(str(path) for path, why in unused.items() if why == reason)
        print(f"left out, {reason} ({len(files)}): {', '.join(files[:3])}{', ...' * (len(files) > 3)}")
    if args.table:
        lost = {patient for patient, _ in known.values()} - {row.patient for row in rows}
        print(f"{args.table}: {len(lost)} of its patients have no image here")
    elif args.patient_pattern == ".*":
        print("split by image; if a patient has several images, give --patient_pattern or --table")
    for split, share in zip(("train", "val", "test"), args.split, strict=True):
        of_split = [row for row in rows if row.split == split]
        images, patients = {row.image_name for row in of_split}, {row.patient for row in of_split}
        few = "; too few to judge by" if split != "train" and 0 < len(patients) < 20 else ""
        hint = "; to get some, try another --seed or name the splits in --table" if share and not of_split else few
        print(f"{split:5} {len(of_split)} questions about {len(images)} images of {len(patients)} patients{hint}")


def prepare(args: Namespace) -> None:
    """Write the annotations to OUT/annotations/NAME.csv, and the images and masks to OUT/NAME.

    The CSV and the folder appear only when both are complete. Raises InputError for unusable input, and RunError if OUT
    cannot be written.
    """
    name = args.name or re.sub(UNSAFE, "_", args.images.resolve().name)
    folder, table, partial = args.out / name, args.out / f"annotations/{name}.csv", args.out / f".{name}.partial"
    if not args.overwrite and (folder.exists() or table.exists()):
        raise InputError(f"{folder}: is there already; choose another --name or pass --overwrite")
    if bool(args.structure) == bool(args.labels):
        raise InputError('what do the masks show? give --structure lesion, or for label maps --labels "1=liver,2=cyst"')
    images, masks = list_files(args.images), list_files(args.masks)
    known = read_patients(args) if args.table else {}
    pairs, unused = pair_files(images, masks, known, args)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        rows = write_set(pairs, unused, partial, name, args)
        if not any(row.split == "train" for row in rows):
            names = f"{min(images.values()).name} and {min(masks.values()).name}"
            raise InputError(f"{args.masks}: no mask for training; check names ({names}), contents and --split")
        table.parent.mkdir(exist_ok=True)
        with open(partial / "rows.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Record._fields, *rows])
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial / "rows.csv", table)
        os.replace(partial, folder)
    except OSError as error:
        raise RunError(f"{args.out}: cannot be written ({error}); choose another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)

    print_summary(rows, unused, known, args)
    if args.small_models:
        from tasks.prs_med.sample_data import write_small_models

        training = [row for row in rows if row.split == "train"]
        pairs = [(row.question, row.answer) for row in training]
        synonyms = sorted({name for row in training for name in row.structure.split("|")[1:]})
        for name, position in product(synonyms, POSITIONS[1:]):
            pairs.append((fill(QUESTIONS[0], name), fill(ANSWERS[0], name, position=position)))
        write_small_models(args.out, pairs, 96, args.seed)
    config = " --config configs/prs_med_small.yaml" if args.small_models else ""
    print(f"written: {table}, {folder}")
    run = f"--data_root {args.out} --output_dir runs/{args.out.name}"
    print(f"next: python train_prs_med.py {run}{config}")
    print(f'then: python train_prs_med.py {run} --predict NEW_IMAGES --question "{rows[0].question}"', flush=True)
