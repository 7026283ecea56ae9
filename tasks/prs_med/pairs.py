"""Images and masks of a user's folders, brought together by their names."""

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from old.cli_utils import InputError
from old.image_utils import DICOM_ENDINGS, is_dicom

VOLUME_ENDINGS = (".nii.gz", ".nii")
ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", *DICOM_ENDINGS, *VOLUME_ENDINGS)
# What a name may end with behind that of the case; nnU-Net numbers an image's channels.
MASK_WORD = r"[ _.-]+(mask|masks|seg|segmentation|label|labels|gt)$"
IMAGE_WORD = r"[ _.-]+(image|img|0000)$"


class Pair(NamedTuple):
    """An image with a mask of it.

    name: the image's in its folder, without ending. structure: what the mask's name says that it shows, or "".
    """

    name: str
    image: Path
    mask: Path
    structure: str


class Pairs(NamedTuple):
    """The pairs of two folders in the order of their names, and the files without a partner."""

    pairs: list[Pair]
    unpaired: list[Path]


def find_pairs(images: Path, masks: Path, structures: list[str]) -> Pairs:
    """Each mask with its image: the same name, or with one of MASK_WORD or a structure behind it. Raises InputError.

    Capitals, endings, and how an umlaut is encoded may differ. images and masks may be one folder.
    """
    image_files = list_files(images)
    mask_files = image_files
    same_folder = images.resolve() == masks.resolve()
    if not same_folder:
        mask_files = list_files(masks)

    # in one folder a mask is what is named after another file
    image_keys = unique_keys(images, image_files)
    if same_folder:
        named_after = [path for path in image_files if partner(key_of(images, path), image_keys, structures, True)]
        image_files = [path for path in image_files if path not in named_after]
        image_keys = unique_keys(images, image_files)
        mask_files = named_after

    pairs = []
    unpaired = []
    for path in mask_files:
        found = partner(key_of(masks, path), image_keys, structures, same_folder)
        if found is None:
            unpaired.append(path)
            continue
        image, structure = found
        pairs.append(Pair(plain_name(images, image), image, path, structure))
    used = {pair.image for pair in pairs}
    unpaired += [path for path in image_files if path not in used]
    if not pairs:
        raise no_pairs(images, masks, image_files, mask_files)
    check_unique(pairs)
    return Pairs(sorted(pairs), sorted(unpaired))


# --- files and their names --------------------------------------------------------------------------------------------


def list_files(folder: Path) -> list[Path]:
    """The images in a folder and below it, sorted. Raises InputError where there are none."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; check its name")
    files = [path for path in sorted(folder.rglob("*")) if is_image(path)]
    if not files:
        raise InputError(f"{folder}: holds no image; its files must end with {', '.join(ENDINGS)}")
    return files


def is_image(path: Path) -> bool:
    """Whether a file's ending is one of an image, or it is DICOM without any. Hidden files are none."""
    if path.name.startswith(".") or not path.is_file():
        return False
    return path.name.lower().endswith(ENDINGS) or (not path.suffix and is_dicom(path))


def is_volume(path: Path) -> bool:
    """Whether a file is a NIfTI volume."""
    return path.name.lower().endswith(VOLUME_ENDINGS)


def without_ending(name: str) -> str:
    """A name without the ending of an image."""
    for ending in (*VOLUME_ENDINGS, *ENDINGS):
        if name.lower().endswith(ending):
            return name[: -len(ending)]
    return name


def simplify(text: str) -> str:
    """What names that mean the same have in common: letters as one code each, no capitals."""
    return unicodedata.normalize("NFC", text).casefold()


def key_of(folder: Path, path: Path) -> str:
    """What the names of an image and its mask share: the path in the folder, without ending and capitals."""
    relative = path.relative_to(folder).as_posix()
    return simplify(without_ending(relative))


def plain_name(folder: Path, path: Path) -> str:
    """A name for what is written: the path in the folder, without ending and without signs that part folders."""
    relative = path.relative_to(folder).as_posix()
    name = unicodedata.normalize("NFC", without_ending(relative))
    return re.sub(r"[/\\:]", "_", name).strip()


def unique_keys(folder: Path, files: list[Path]) -> dict[str, Path]:
    """{key: file}, also by the key without IMAGE_WORD. Raises InputError for two files of one key."""
    keys: dict[str, Path] = {}
    for path in files:
        key = key_of(folder, path)
        if key in keys:
            raise InputError(f"{path}: {keys[key].name} has the same name; keep one of them")
        keys[key] = path
    for key, path in list(keys.items()):
        keys.setdefault(re.sub(IMAGE_WORD, "", key), path)
    return keys


# --- partners ---------------------------------------------------------------------------------------------------------


def partner(key: str, images: dict[str, Path], structures: list[str], another: bool = False) -> tuple[Path, str] | None:
    """(image, structure) of a mask's key, None without an image. another: the key itself does not count."""
    for candidate, structure in candidates(key, structures):
        if candidate in images and not (another and candidate == key):
            return images[candidate], structure
    return None


def candidates(key: str, structures: list[str]) -> Iterable[tuple[str, str]]:
    """(key of an image, structure) that a mask's key may stand for, the likeliest first."""
    bare = re.sub(MASK_WORD, "", key)
    yield key, ""
    yield bare, ""
    for structure in structures:
        # "left kidney" may be written left_kidney
        words = [re.escape(simplify(word)) for word in structure.split()]
        ending = rf"[ _.-]+{'[ _.-]+'.join(words)}$"
        for before in (key, bare):
            stem = re.sub(ending, "", before)
            if stem != before:
                yield stem, structure
                yield re.sub(MASK_WORD, "", stem), structure


def check_unique(pairs: list[Pair]) -> None:
    """Raises InputError where two masks of an image show the same."""
    seen: dict[tuple, Path] = {}
    for pair in pairs:
        first = seen.setdefault((pair.image, pair.structure), pair.mask)
        if first != pair.mask:
            reason = f"{first.name} is a mask of {pair.image.name} too"
            raise InputError(f"{pair.mask}: {reason}; keep one, or name what each shows with --structure")


def no_pairs(images: Path, masks: Path, image_files: list[Path], mask_files: list[Path]) -> InputError:
    """The error of two folders of which no names fit."""
    if not image_files or not mask_files:
        return InputError(f"{masks}: no file is named after another, such as case1_mask.png; give masks a folder")
    example = f"{image_files[0].name} and {mask_files[0].name}"
    return InputError(f"{masks}: no mask is named as an image of {images} ({example}); name both alike")
