"""Guide 0: annotation CSVs, images and masks on the disk, and how they become tensors."""

import csv
import hashlib
import re
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch.utils.data import Dataset

from cli_utils import InputError
from distributed_utils import Ranks, agree_on_errors, gather_objects, print_main

SPLITS = ("train", "val", "test")
NEEDED = ("image_path", "split", "question", "answer")
# mask values below this, beside values above 127, can be what JPEG made of 0
NOISE = 32


class Row(NamedTuple):
    """One question: `image` and `mask` are existing files, `source` is `file:row` of the CSV."""

    modality: str
    image: str
    mask: str
    split: str
    question: str
    answer: str
    source: str


def find_pair(root: Path, path: str, source: str) -> tuple[str, str]:
    """(image, mask) files that a CSV's image_path means: it is the mask's path, may hold backslashes, ISIC names
    differ."""
    parts = [part for part in path.strip().replace("\\", "/").split("/") if part not in ("", ".")]
    if not parts or ".." in parts or path.strip()[:1] in ("/", "\\") or ":" in parts[0]:
        raise InputError(f"{source}: image_path {path!r} leaves the data root; use a path relative to it")
    if len(parts) < 2 or not re.search(r"_(masks|images)$", parts[-2]):
        raise InputError(f"{source}: image_path {path!r} is not <modality>/<split>_masks/<name>; correct the row")
    folder, stem = re.sub(r"_images$", "_masks", parts[-2]), Path(parts[-1]).stem.removesuffix("_Segmentation")
    mask_names = (parts[-1], f"{stem}_Segmentation.png", f"{stem}.png", f"{stem}.jpg")
    image_names = (Path(parts[-1]).name, *(f"{stem}{suffix}" for suffix in (".jpg", ".png", ".jpeg", ".JPG")))
    for base in (Path(*parts[:-2]), Path("images_and_masks", *parts[:-2]), Path(*parts[-3:-2])):  # a fork's extra level
        masks, images = root / base / folder, root / base / folder.replace("_masks", "_images")
        mask = next((masks / name for name in mask_names if (masks / name).is_file()), None)
        if mask is not None:
            names = [name for name in image_names if "_Segmentation" not in name and (images / name).is_file()]
            if not names:
                raise InputError(f"{source}: no picture {stem}.png or .jpg in {images}; add it or remove the row")
            return str(images / names[0]), str(mask)
    raise InputError(f"{source}: mask {'/'.join(parts)} does not exist under {root}; correct the row or --data_root")


def read_annotations(root: Path, names: list[str] | None, skip_bad_rows: bool) -> list[Row]:
    """All rows of the annotation CSVs, in file order. Raises InputError naming file and row."""
    files = sorted((root / "annotations").glob("*.csv"))
    if not files:
        raise InputError(f"{root / 'annotations'}: holds no CSV file; check --data_root")
    wanted = {name.removesuffix(".csv") for name in names or [file.stem for file in files]}
    if missing := sorted(wanted - {file.stem for file in files}):
        have = ", ".join(file.stem for file in files)
        raise InputError(f"{root / 'annotations'}: no {missing[0]}.csv, there are {have}; check --annotations")
    rows, dropped = [], 0
    for file in (file for file in files if file.stem in wanted):
        try:
            with open(file, newline="", encoding="utf-8-sig") as text:
                reader = csv.DictReader(text, strict=True)
                if lacking := [name for name in NEEDED if name not in (reader.fieldnames or ())]:
                    raise InputError(f"{file}:1: no column {lacking[0]!r}; the header must hold {', '.join(NEEDED)}")
                for record in reader:
                    source = f"{file}:{reader.line_num}"
                    if empty := [name for name in NEEDED if not (record[name] or "").strip()]:
                        if not skip_bad_rows:
                            raise InputError(f"{source}: empty {empty[0]!r}; complete the row or pass --skip_bad_rows")
                        dropped += 1
                        continue
                    if None in record:
                        raise InputError(f"{source}: more fields than the header has columns; quote texts with commas")
                    split = record["split"].strip().lower()
                    if split not in SPLITS:
                        raise InputError(f"{source}: split {split!r} is not train, val or test; correct the row")
                    image, mask = find_pair(root, record["image_path"], source)
                    question, answer = record["question"].strip(), record["answer"].strip()
                    rows.append(Row(file.stem, image, mask, split, question, answer, source))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{file}: not a readable UTF-8 CSV ({error}); repair the file") from None
    if dropped:
        print_main(f"{dropped} rows with a missing field dropped")
    return rows


def turn_upright(image: Image.Image) -> bool:
    """Turn a loaded image as its EXIF tag says, in place; returns whether the tag said so."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
        if turned:
            ImageOps.exif_transpose(image, in_place=True)
        return turned
    except (SyntaxError, ValueError, struct.error):
        # a damaged EXIF block says nothing about the orientation
        return False


def open_upright(path: str) -> tuple[Image.Image, bool]:
    """The image as 8-bit RGB, upright, and whether it had to be turned for that.

    16-bit and float images are scaled to their own range.
    """
    with Image.open(path) as image:
        image.load()
        turned = turn_upright(image)
        if image.mode[:1] not in "IF":
            return image.convert("RGB"), turned
        values = np.asarray(image, np.float32)
    low, high = float(values.min()), float(values.max())
    scaled = (255 * (values - low) / max(high - low, 1e-6)).astype(np.uint8)
    return Image.fromarray(scaled).convert("RGB"), turned


def open_picture(path: str) -> Image.Image:
    """The image as 8-bit RGB, upright."""
    return open_upright(path)[0]


def foreground(values: np.ndarray) -> np.ndarray:
    """(H, W) bool: foreground > 0; in 0..255 masks, whose edges JPEG may have smeared, > 127."""
    return values > (127 if values.max() > 127 else 0)


def open_mask(path: str) -> np.ndarray:
    """(H, W) bool mask of a file with 1 or 3 channels."""
    return foreground(np.asarray(open_picture(path)).max(axis=2))


def lost_levels(values: np.ndarray) -> list[int]:
    """Values 1..127 of solid areas in a 0..255 mask, which `foreground` takes for background: a label map has them.

    JPEG, resizing and smoothing leave such values at edges and as noise near 0, but no solid areas of more than a few
    pixels. A pixel counts as solid when its 3 x 3 neighbourhood has one value. A solid area is a label when it is not
    near 0 and not small beside the foreground, or when the mask has few values, 0 among them, as a lossless file has.
    """
    count = int((values > 127).sum())
    if not count or not ((values > 0) & (values < 128)).any():
        return []
    height, width = values.shape
    inner = values[1:-1, 1:-1]
    solid = np.ones(inner.shape, bool)
    for y in range(3):
        for x in range(3):
            solid &= values[y : y + height - 2, x : x + width - 2] == inner
    pixels = np.bincount(inner[solid], minlength=256)
    few_values = len(np.unique(values)) <= 16 and pixels[0] > 0
    smallest = 1 if few_values else 0.05 * count
    lowest = 1 if few_values else NOISE
    return [level for level in range(lowest, 128) if pixels[level] >= smallest]


def position_of(mask: np.ndarray) -> str | None:
    """Facts, position rule: "center" when the bounding box spans the image centre, else the quadrant of its centre."""
    ys, xs = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(ys):
        return None
    (top, bottom), (left, right) = (ys[0], ys[-1] + 1), (xs[0], xs[-1] + 1)
    middle_y, middle_x = mask.shape[0] / 2, mask.shape[1] / 2
    if top < middle_y < bottom and left < middle_x < right:
        return "center"
    vertical, side = (top + bottom) / 2 < middle_y, (left + right) / 2 < middle_x
    return f"{'top' if vertical else 'bottom'} {'left' if side else 'right'}"


def position_in(text: str) -> str | None:
    """The position a sentence names; the last one: "the right kidney is in the bottom left" is bottom left."""
    pattern = r"\b(top|upper|bottom|lower)[\s-]+(left|right)\b|\b(cent(?:er|re)|middle)\b"
    found = re.findall(pattern, text.lower())
    if not found:
        return None
    vertical, side, middle = found[-1]
    return "center" if middle else f"{'top' if vertical in ('top', 'upper') else 'bottom'} {side}"


class FileFacts(NamedTuple):
    """What one look at a file tells; digest is for images, the last two are for masks."""

    size: tuple[int, int]
    turned: bool
    digest: str
    foreground: float
    lost: list[int]


def inspect_file(path: str, is_image: bool) -> FileFacts:
    """Decode an image or a mask."""
    image, turned = open_upright(path)
    if is_image:
        digest = hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
        return FileFacts(image.size, turned, digest, 0.0, [])
    values = np.asarray(image).max(axis=2)
    return FileFacts(image.size, turned, "", float(foreground(values).mean()), lost_levels(values))


def inspect_files(rows: list[Row], ranks: Ranks) -> dict[str, FileFacts]:
    """{path: facts} of every image and mask, each decoded once (the ranks share the work).

    Raises InputError on all ranks for an unreadable file.
    """
    from concurrent.futures import ThreadPoolExecutor

    from tqdm import tqdm

    sources = {path: row.source for row in reversed(rows) for path in (row.image, row.mask)}
    images = {row.image for row in rows}

    def inspect(path: str) -> tuple[str, FileFacts]:
        try:
            return path, inspect_file(path, path in images)
        except Exception as error:
            reason = str(error).replace(path, "file")
            raise InputError(f"{sources[path]}: {path} is not a readable image ({reason}); replace it") from None

    local = sorted(sources)[ranks.rank :: ranks.world_size]
    facts: dict[str, FileFacts] = {}
    quiet = not (ranks.is_main and sys.stderr.isatty())
    with agree_on_errors(), ThreadPoolExecutor(max_workers=8) as pool:
        facts = dict(tqdm(pool.map(inspect, local), "checking images", len(local), disable=quiet))
    return {path: fact for part in gather_objects(facts) for path, fact in part.items()}


def misfit(mask: tuple[int, int], image: tuple[int, int]) -> str:
    """Why a mask of one (width, height) cannot belong to an image of another; empty when it can."""
    ratio = (mask[0] * image[1]) / (mask[1] * image[0])
    if abs(ratio - 1) <= 0.02:
        return ""
    swapped = " (width and height swapped)" if mask == image[::-1] else ""
    sizes = f"mask of {mask[0]} x {mask[1]} pixels does not fit its image of {image[0]} x {image[1]}{swapped}"
    return f"{sizes}; replace the mask or remove the row"


def check_pairs(rows: list[Row], files: dict[str, FileFacts]) -> dict[str, dict]:
    """{finding: number of rows and the first} for what may be meant; raises InputError for what cannot be right."""
    for row in rows:
        mask, image = files[row.mask], files[row.image]
        if problem := misfit(mask.size, image.size):
            raise InputError(f"{row.source}: {row.mask}: {problem}")
        if any(level >= NOISE for level in mask.lost):
            levels = ", ".join(map(str, mask.lost[:5]))
            text = f"a label map: its value {levels} would count as background beside values above 127"
            raise InputError(f"{row.source}: {row.mask}: {text}; write foreground as 255, the rest as 0")
    found: dict[str, dict] = {}
    for row in rows:
        mask, image = files[row.mask], files[row.image]
        findings = {
            "turned as EXIF says": image.turned or mask.turned,
            "mask empty": mask.foreground == 0,
            "mask all foreground": mask.foreground == 1,
            "mask's width and height swapped": mask.size != image.size and mask.size == image.size[::-1],
            f"mask values below {NOISE} left out": bool(mask.lost),
        }
        for name in (name for name, true in findings.items() if true):
            entry = found.setdefault(name, {"rows": 0, "first": row.source})
            entry["rows"] += 1
    return found


def check_splits(rows: list[Row], identity: dict[str, str]) -> None:
    """InputError naming an image (not a row, and a copy under another name counts) that lies in two splits."""
    seen: dict[str, Row] = {}
    for row in rows:
        first = seen.setdefault(identity.get(row.image, row.image), row)
        if first.split != row.split:
            where = f"{row.split!r} and, at {first.source}, in {first.split!r}"
            raise InputError(f"{row.source}: picture {row.image} is in split {where}; keep its rows in one split")


def count_rows(rows: list[Row]) -> dict[str, int]:
    """Number of rows in `all` and of each modality."""
    return {"all": len(rows), **Counter(row.modality for row in rows)}


def swap_questions(rows: list[Row], identity: dict[str, str]) -> tuple[list[Row], int]:
    """Give each row the question of the next row of the same picture; also counts the rows whose question changed."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(identity.get(row.image, row.image), []).append(i)
    swapped = list(rows)
    for group in groups.values():
        for i, j in zip(group, group[1:] + group[:1], strict=True):
            swapped[i] = rows[i]._replace(question=rows[j].question)
    return swapped, sum(a.question != b.question for a, b in zip(rows, swapped, strict=True))


class Reader:
    """How a picture and a question become tensors for one pair of checkpoints: sizes, normalisation, tokenizer,
    prompt."""

    def __init__(self, tokenizer, vlm_config, processors: dict[str, dict], image_size: int, image_tokens: int):
        self.tokenizer, self.image_size, self.vlm_size = tokenizer, image_size, vlm_config.vision_config.image_size
        self.image_tokens = image_tokens
        self.image_token = vlm_config.image_token_id
        zero, one = [0.0] * 3, [1.0] * 3
        self.statistics = {k: (p.get("image_mean", zero), p.get("image_std", one)) for k, p in processors.items()}
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.before = [i for i in [tokenizer.bos_token_id] if i is not None] + self._ids("USER: ")
        self.cache: dict[tuple[str, str], tuple[list[int], list[int]]] = {}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def picture(self, picture: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 (3, image_size, image_size) for SAM and (3, vlm_size, vlm_size) for the VLM, the whole picture in
        both."""
        sizes = [(size, size) for size in (self.image_size, self.vlm_size)]
        arrays = [np.asarray(picture.resize(size, Image.Resampling.BICUBIC)) for size in sizes]
        return tuple(torch.from_numpy(array.transpose(2, 0, 1).copy()) for array in arrays)

    def tokens(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Ids of `USER: <image>\\n{question}\\nASSISTANT:` (<image> once per image token) and of ` {answer}</s>`."""
        if (question, answer) not in self.cache:
            prompt = self.before + [self.image_token] * self.image_tokens + self._ids(f"\n{question}\nASSISTANT:")
            self.cache[question, answer] = prompt, [*self._ids(f" {answer}"), self.tokenizer.eos_token_id]
        return self.cache[question, answer]

    def collate(self, items: list[dict]) -> dict:
        """Right-padded ids (causal attention never sees padding) and where the prompt's words and the answer's are.

        `words` are the prompt's text positions. The prediction of answer token k is read at position `answer_at[k]`.
        """
        ids = [item["prompt"] + item["answer"] for item in items]
        before, after = list(range(len(self.before))), len(self.before) + self.image_tokens
        starts = [len(item["prompt"]) - 1 for item in items]  # the last prompt position predicts the first answer token
        places = [list(range(s, len(i) - 1)) for s, i in zip(starts, ids, strict=True)]
        batch = {name: torch.stack([item[name] for item in items]) for name in ("sam", "vlm", "mask")}
        batch["ids"] = pad_rows(ids, self.pad)
        batch["words"] = pad_rows([before + list(range(after, len(item["prompt"]))) for item in items], -1)
        batch["answer_at"] = pad_rows(places, 0)
        batch["answer"] = pad_rows([item["answer"] for item in items], -100)
        batch["error"] = next((item["error"] for item in items if item["error"]), "")
        batch["prompt_length"] = [len(item["prompt"]) for item in items]
        return batch | {name: [item[name] for item in items] for name in ("index", "position")}


class PositionData(Dataset):
    """Rows as uint8 pictures at the two encoders' sizes, bool mask, token ids and true position; may keep what it
    decoded."""

    def __init__(self, rows: list[Row], reader: Reader, keep: bool):
        self.rows, self.reader, self.keep = rows, reader, keep
        self.kept: dict[str, tuple] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def _decode(self, path: str, source: str, decode) -> tuple:
        try:
            value = self.kept.get(path) or decode(path)
        except MemoryError:
            raise
        except Exception as error:
            # the file changed after the check, or --skip_data_check
            reason = str(error).replace(path, "file")
            text = f"{source}: {path} is not a readable image ({reason}); replace it and resume"
            raise InputError(text) from None
        if self.keep:
            self.kept[path] = value
        return value

    def _image(self, path: str) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
        image = open_picture(path)
        return *self.reader.picture(image), image.size

    def _mask(self, path: str) -> tuple[torch.Tensor, str | None, tuple[int, int]]:
        native, size = open_mask(path), self.reader.image_size
        small = Image.fromarray(native).resize((size, size), Image.Resampling.NEAREST)
        return torch.from_numpy(np.array(small)), position_of(native), native.shape[::-1]

    def _pair(self, row: Row) -> dict:
        sam, vlm, image_size = self._decode(row.image, row.source, self._image)
        mask, position, mask_size = self._decode(row.mask, row.source, self._mask)
        if problem := misfit(mask_size, image_size):
            raise InputError(f"{row.source}: {row.mask}: {problem}")
        return {"sam": sam, "vlm": vlm, "mask": mask, "position": position, "error": ""}

    def _blank(self, error: str) -> dict:
        sizes = {"sam": self.reader.image_size, "vlm": self.reader.vlm_size}
        images = {name: torch.zeros(3, size, size, dtype=torch.uint8) for name, size in sizes.items()}
        mask = torch.zeros(self.reader.image_size, self.reader.image_size, dtype=torch.bool)
        return {**images, "mask": mask, "position": None, "error": error}

    def __getitem__(self, i: int) -> dict:
        """A row's tensors; a pair that cannot be used is blank and its `error` says why.

        The error is told to all ranks at the step's exchange, and they end together.
        """
        row = self.rows[i]
        prompt, answer = self.reader.tokens(row.question, row.answer)
        try:
            pair = self._pair(row)
        except InputError as error:
            pair = self._blank(str(error))
        return {"index": i, **pair, "prompt": prompt, "answer": answer}


def fits_in_memory(rows: list[Row], reader: Reader, limit_gb: float) -> bool:
    """Whether all decoded pictures and masks fit in --cache_gb."""
    picture = 3 * (reader.image_size**2 + reader.vlm_size**2)
    need = len({row.image for row in rows}) * picture + len({row.mask for row in rows}) * reader.image_size**2
    return need <= limit_gb * 2**30


def pad_rows(rows: list[list[int]], value: int) -> torch.Tensor:
    """int64 (B, longest), each row padded with `value`."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])
