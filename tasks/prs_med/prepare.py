"""Raw images with masks, label maps or volumes become the folders and the CSV that train_prs_med.py reads."""

import csv
import json
import os
import random
import re
import shutil
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from tasks.prs_med.annotations import POSITIONS, foreground, is_label_map, is_misfit, position_of
from tasks.prs_med.wordings import ANSWERS, QUESTIONS, fill
from utils.cli import InputError, RunError, pattern, real, refuse, whole
from utils.images import IMAGE_ENDINGS, is_dicom, open_upright, to_bytes
from utils.tables import SPLITS, check_one_split, find_column, parse_shares, patient_in, read_table, split_of
from utils.volumes import read_volume

VOLUME = r"(?i)[.]nii([.]gz)?$"
ENDING = "(?i)({}|[.]nii|[.]nii[.]gz)$".format("|".join(map(re.escape, IMAGE_ENDINGS)))
# what separates words in a name, and which may follow the name that an image and its mask share (nnU-Net adds _0000)
GAP = "[ _.+-]+"
MASK_WORDS = "mask|masks|seg|segmentation|label|labels|gt"
IMAGE_WORDS = "image|img|0000"
# what a file system or the CSV may not hold in a name
UNSAFE = r"[^\w .+-]"
MIN_PIXELS = 10

LABEL_MAP = 'a label map; name its values, as --labels "1=liver,2=spleen"'
COLUMNS = ("image_path", "image_name", "split", "description", "position", "question", "answer", "structure", "patient")


def parse_labels(text: str) -> dict[int, str]:
    """argparse type: "1=liver,2=left kidney,3=-" ("-": left out), or the dataset.json of the Decathlon or nnU-Net."""
    try:
        listed = [re.split(r"\s*=\s*", part.strip()) for part in text.split(",")]
        if text.endswith(".json"):
            listed = json.loads(Path(text).read_text(encoding="utf-8"))["labels"].items()
        # nnU-Net has the name first
        ordered = [sorted(map(str, pair), key=str.isdigit) for pair in listed]
        return {int(value): name for name, value in ordered if int(value)}
    except (OSError, ValueError, KeyError, AttributeError):
        reason = f'must be as "1=liver,2=left kidney", or a dataset.json, not {text!r}'
        raise ArgumentTypeError(reason) from None


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("images", type=Path, help="folder of images: PNG, JPEG, TIFF, BMP, WebP, DICOM, NIfTI, series as subfolders")
    add("masks", type=Path, help="folder of masks or label maps, named like the images; may be the same folder")
    add("out", type=Path, help="folder to write, for --data_root; other sets may be there")
    add("--name", type=pattern(r"\w[\w .+-]*", "a plain name"), help="name of the set; default: the folder of images")
    text = "what the masks show, as NAME|SYNONYM|...; of several structures, the one that a mask's name ends with"
    add("--structure", nargs="+", default=[], metavar="NAME", help=text)
    add("--labels", type=parse_labels, metavar="1=A,2=B", help="for label maps, or a dataset.json; 3=- leaves 3 out")
    add("--window", type=float, nargs=2, metavar=("CENTER", "WIDTH"), help="default: the DICOM file's, else its range")
    add("--slice_spacing", type=real(0, above=True), default=10.0, help="mm between the slices of a volume")
    add("--seed", type=int, default=0, help="decides, with a patient's name, the split; and the wording")
    add("--split", type=parse_shares, default="70,15,15", metavar="T,V,T", help="shares of the patients")
    text = 'the patient in the name of an image, as "^(P[0-9]+)"; the default takes each image for one'
    add("--patient_pattern", default=".*", metavar="REGEX", help=text)
    add("--table", type=Path, help="CSV or parquet: columns file, patient and, if the table decides it, split")
    add("--patient_column", default="patient", metavar="NAME", help="in the table")
    add("--overwrite", action="store_true", help="replace the set of this name in OUT")
    add("--small_models", action="store_true", help="write tiny models into OUT, for a trial")
    add("--small_size", type=whole(32), default=96, help="input side of the tiny SAM")


# --- files and patients -----------------------------------------------------------------------------------------------


def list_files(folder: Path) -> dict[str, Path]:
    """{path in the folder, without ending and capitals: file} of the images in a folder and below it."""
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
    """(image, structure) of a mask: the image of the same name, or of what is left without structure and MASK_WORDS.

    In a folder of both, a mask is not its own image. structure: "" where the name tells none of several.
    """
    words = {name: GAP.join(map(re.escape, name.partition("|")[0].lower().split())) for name in structures}
    named = [name for name, word in words.items() if re.search(f"{GAP}{word}({GAP}({MASK_WORDS}))*$", key)]
    # "left kidney" also ends with "kidney"
    structure = max(named, key=len) if named else structures[0] if len(structures) == 1 else ""
    while images.get(key, mask) == mask:
        key, longer = re.sub(f"{GAP}({'|'.join([MASK_WORDS, *words.values()])})$", "", key), key
        if key == longer:
            return None, structure
    return images[key], structure


def read_patients(args: Namespace) -> dict[str, tuple[str, str, str]]:
    """{file without folder, ending and capitals: (patient, split, source)} of --table. Raises InputError."""
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
    return dict(zip(names, found, strict=True))


# --- images, masks, sentences -----------------------------------------------------------------------------------------


def masks_in(values: np.ndarray, labels: dict[int, str] | None, structure: str) -> dict[str, np.ndarray]:
    """{structure: (H, W) bool} of a mask's or a label map's values. Raises ValueError for what has no name."""
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
    """[(addition to the name, image, masks_in it)] of a flat image, or of a volume's slices that hold foreground.

    A volume is cut across the axis of its thickest voxels, else axially, every --slice_spacing mm, and seen with the
    patient's right at the left and the front (or the head) at the top. Raises InputError naming the file.
    """
    path = image
    try:
        if image.is_file() and not re.search(VOLUME, image.name):
            pixels, path = open_upright(image, args.window), mask
            # labels as they are stored; a mask as training opens it
            values = np.asarray(Image.open(mask) if args.labels else open_upright(mask).convert("L"))
            if values.ndim > 2:
                raise ValueError("labels in colours; write them as numbers in one channel")
            if is_misfit(pixels.size, values.shape[::-1]):
                raise ValueError(f"its {values.shape[::-1]} pixels do not fit {pixels.size} of {image.name}")
            return [("", pixels, masks_in(values, args.labels, structure))]

        # of several channels the first
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
    """A question about a structure and its answer, in wordings drawn from (seed, case, structure)."""
    draw = random.Random(f"{seed}/{case}/{structure}")
    return tuple(fill(draw.choice(texts), structure, position=position) for texts in (QUESTIONS, ANSWERS))


# --- the whole --------------------------------------------------------------------------------------------------------


def pair_files(images: dict, masks: dict, known: dict, args: Namespace) -> tuple[list[tuple], dict[Path, str]]:
    """([(image, mask, structure, stem, patient, split)], {file: why it is left out}) of list_files() of both.

    stem: the image's path without its ending. patient: "" if --patient_pattern finds none. Every file is left out until
    write_set() uses it. known: read_patients(), empty without --table.
    """
    partners = {re.sub(f"{GAP}({IMAGE_WORDS})$", "", key): path for key, path in images.items()} | images
    # a folder of DICOM slices is one image where the mask is a volume
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
            patient, split, _ = known.get(Path(stem).name.lower(), ("", "", ""))
            if not patient:
                unused |= {path: "no row in --table" for path in (image, mask) if path in unused}
                continue
        else:
            patient = patient_in(args.patient_pattern, stem)
            split = split_of(patient, args.seed, args.split)
        pairs.append((image, mask, structure, stem, patient, split))
    return pairs, unused


def write_set(pairs: list[tuple], unused: dict, folder: Path, name: str, args: Namespace) -> list[tuple]:
    """Write the images and masks of pair_files() into a folder; returns the rows of the CSV.

    Files that are used leave `unused`. Raises InputError naming all files that cannot be used.
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
            # two images may not have one name
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
                texts = (description, position, *sentences(shows, position, file, args.seed))
                rows.append((f"{name}/{mask_path}", f"{file}.png", split, *texts, names, patient))
    refuse(problems, "files cannot be used")
    return rows


def say_what_is_there(rows: list[tuple], unused: dict, known: dict, args: Namespace) -> None:
    """Print which files are left out and why, and how many questions, images and patients each split has."""
    for reason in sorted({*unused.values()}):
        files = sorted(str(path) for path, why in unused.items() if why == reason)
        print(f"left out, {reason} ({len(files)}): {', '.join(files[:3])}{', ...' * (len(files) > 3)}")
    if args.table:
        lost = {patient for patient, _, _ in known.values()} - {row[-1] for row in rows}
        print(f"{args.table}: {len(lost)} of its patients have no image here")
    elif args.patient_pattern == ".*":
        print("split by image: where a patient has several, give --patient_pattern or --table")
    for split, share in zip(("train", "val", "test"), args.split, strict=True):
        of_split = [row for row in rows if row[2] == split]
        images, patients = ({row[column] for row in of_split} for column in (1, -1))
        few = "; few to judge by" if split != "train" and 0 < len(patients) < 20 else ""
        hint = "; for some, try another --seed or name the splits in --table" if share and not of_split else few
        print(f"{split:5} {len(of_split)} questions about {len(images)} images of {len(patients)} patients{hint}")


def prepare(args: Namespace) -> None:
    """Write OUT/annotations/NAME.csv and OUT/NAME, both or neither, and say what is in them. Raises InputError."""
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
        if not any(row[2] == "train" for row in rows):
            names = f"{min(images.values()).name} and {min(masks.values()).name}"
            raise InputError(f"{args.masks}: no mask for training; check names ({names}), contents and --split")
        table.parent.mkdir(exist_ok=True)
        with open(partial / "rows.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial / "rows.csv", table)
        os.replace(partial, folder)
    except OSError as error:
        raise RunError(f"{args.out}: cannot be written ({error}); choose another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)

    say_what_is_there(rows, unused, known, args)
    if args.small_models:
        from tasks.prs_med.sample_data import write_small_models

        training = [row for row in rows if row[2] == "train"]
        texts = [text for row in training for text in row[5:7]]
        synonyms = sorted({name for row in training for name in row[7].split("|")[1:]})
        for name, position in product(synonyms, POSITIONS[1:]):
            texts += [fill(wording, name, position=position) for wording in (QUESTIONS[0], ANSWERS[0])]
        write_small_models(args.out, texts, args.small_size, args.seed)
    config = " --config configs/prs_med_small.yaml" if args.small_models else ""
    print(f"written: {table}, {folder}")
    run = f"--data_root {args.out} --output_dir runs/{args.out.name}"
    print(f"next: python train_prs_med.py {run}{config}")
    print(f'then: python train_prs_med.py {run} --predict NEW_IMAGES --question "{rows[0][5]}"', flush=True)
