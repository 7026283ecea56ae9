"""What is odd about annotations, masks and images, but may be meant: counted and named, worst first."""

from collections.abc import Iterator
from pathlib import Path

from old.distributed_utils import Ranks
from tasks.prs_med.data import SPLITS, Finding, Row
from tasks.prs_med.file_facts import NOISE, Facts, ImageFacts, MaskFacts
from tasks.prs_med.metrics import position_in
from tasks.prs_med.near_copies import near_copies
from tasks.prs_med.orientation import turned_masks

# what may be meant, the worst first, and what to do about it
ADVICE = {
    # of splits
    "nearly the same image in another split": "a copy or a neighbouring slice; keep both in one split",
    "patient also in another split of another CSV": "one person, or the same number twice; look, and keep to one split",
    # of what is said about a mask
    "mask fits its image only when turned": "written transposed or mirrored; write the masks again",
    "answer names another position than the mask": "correct the answer or the mask; left is the image's left",
    "`position` column contradicts the mask": "not trained on, but a sign that masks and texts were mixed up",
    "answer names a position, the mask is empty": "replace the mask or the answer",
    # of a mask
    "mask empty": "meant for images without a finding, else replace it",
    "mask all foreground": "replace it, or remove the row",
    "mask covers the border: inverted?": "write foreground as 255, the rest as 0",
    "mask holds grey values, as an image does": "above 127 is foreground; write 0 and 255",
    "several labels or colours in one mask": "all are foreground; write one mask for each question",
    f"mask values below {NOISE} left out": "foreground is above 127; write 0 and 255",
    "one mask for several images": "meant for registered images, else the masks were mixed up",
    # of an image
    "image of one value": "nothing can be seen in it; replace it or remove the row",
    "image of two values, as a mask": "meant for drawings, else a mask lies in the folder of images",
    # of both
    "only one of image and mask turned as EXIF says": "right if the mask was drawn on the upright image; look",
    "turned as EXIF says": "nothing, if image and mask were turned alike",
    "mask's width and height swapped": "look whether the mask was transposed",
    "mask's proportions up to 2 % off": "it is stretched to its image; crop or pad it instead",
    # of the texts
    "question repeated with another answer": "keep one, or say in the question which is meant",
    "row there twice": "it counts twice in training and in the scores; keep one",
    "answer names no position": "top or bottom with left or right, or center; else it counts as wrong",
}


def all_findings(rows: list[Row], facts: Facts, ranks: Ranks) -> list[Finding]:
    """All ranks: what is odd about the rows, in no order."""
    findings = list(row_findings(rows, facts))
    findings += repeated_findings(rows, facts)
    findings += turned_findings(rows, facts)
    findings += copy_findings(rows, facts, ranks)
    findings += patient_findings(rows)
    return findings


def name_findings(rows: list[Row], findings: list[Finding]) -> list[Row]:
    """The rows, each with its findings, the worst first."""
    of_row: dict[int, list[Finding]] = {}
    for name in ADVICE:
        for finding in findings:
            if finding.name == name:
                of_row.setdefault(finding.index, []).append(finding)

    named = list(rows)
    for index, odd in of_row.items():
        named[index] = rows[index]._replace(findings=tuple(odd))
    return named


def summarise(rows: list[Row], findings: list[Finding]) -> dict[str, tuple[dict, str]]:
    """{finding: (number of rows and the first of them, what to do)}, the worst first."""
    summary = {}
    for name, advice in ADVICE.items():
        of_name = [finding for finding in findings if finding.name == name]
        if not of_name:
            continue
        first = min(of_name)
        how = f"{first.how}: " if first.how else ""
        counts = {"rows": len(of_name), "first": rows[first.index].source}
        summary[name] = (counts, how + advice)
    return summary


# --- one row ----------------------------------------------------------------------------------------------------------


def row_findings(rows: list[Row], facts: Facts) -> Iterator[Finding]:
    """What is unusual about each row by itself."""
    for index, row in enumerate(rows):
        image, mask = facts.of(row)
        odd = odd_pair(image, mask) | odd_texts(row, mask)
        for name, holds in odd.items():
            if holds:
                yield Finding(index, name)


def odd_pair(image: ImageFacts, mask: MaskFacts) -> dict[str, bool]:
    """{finding: whether it holds} of an image and its mask."""
    part = 0 < mask.foreground < 1
    covers_border = mask.foreground > 0.5 and mask.border > 0.95
    swapped = is_swapped(mask.size, image.size)

    # a mask with grey values is no label map
    facts = {
        "mask holds grey values, as an image does": mask.grey,
        "several labels or colours in one mask": mask.labels > 1,
        f"mask values below {NOISE} left out": bool(mask.lost),
    }
    if mask.grey:
        facts = {"mask holds grey values, as an image does": True}

    return facts | {
        "mask empty": mask.foreground == 0,
        "mask all foreground": mask.foreground == 1,
        "mask covers the border: inverted?": part and covers_border,
        "image of one value": image.blank,
        "image of two values, as a mask": image.two_valued,
        "only one of image and mask turned as EXIF says": image.turned != mask.turned,
        "turned as EXIF says": image.turned and mask.turned,
        "mask's width and height swapped": swapped,
        "mask's proportions up to 2 % off": is_stretched(mask.size, image.size) and not swapped,
    }


def is_swapped(mask: tuple[int, int], image: tuple[int, int]) -> bool:
    """Whether the width and height of a mask are the height and width of its image."""
    return mask != image and mask == image[::-1]


def is_stretched(mask: tuple[int, int], image: tuple[int, int]) -> bool:
    """Whether the proportions of a mask differ from its image's by more than the rounding of the smaller's sides."""
    mask_width, mask_height = mask
    image_width, image_height = image
    ratio = mask_width * image_height
    ratio = ratio / (mask_height * image_width)
    smallest = min(mask + image)
    return abs(ratio - 1) > 1 / smallest


def odd_texts(row: Row, mask: MaskFacts) -> dict[str, bool]:
    """{finding: whether it holds} of what is said about a mask."""
    answered = position_in(row.answer)
    column = position_in(row.position)
    if mask.position is None:
        return {"answer names a position, the mask is empty": answered is not None}
    return {
        "answer names another position than the mask": answered not in (None, mask.position),
        "answer names no position": answered is None,
        "`position` column contradicts the mask": column not in (None, mask.position),
    }


# --- several rows -----------------------------------------------------------------------------------------------------


def repeated_findings(rows: list[Row], facts: Facts) -> Iterator[Finding]:
    """Masks that several images share, questions of one image that are answered in two ways, and rows there twice."""
    images_of_mask: dict[str, set[str]] = {}
    for row in rows:
        image, mask = facts.of(row)
        if 0 < mask.foreground < 1:
            images = images_of_mask.setdefault(mask.shape, set())
            images.add(image.digest)
    for index, row in enumerate(rows):
        _, mask = facts.of(row)
        images = images_of_mask.get(mask.shape, ())
        if len(images) > 1:
            yield Finding(index, "one mask for several images")

    first_answers: dict[tuple[str, str], str] = {}
    known: set[tuple[str, ...]] = set()
    for index, row in enumerate(rows):
        asked = (row.identity, row.question.casefold())
        answer = row.answer.casefold()
        first = first_answers.setdefault(asked, answer)
        if answer != first:
            yield Finding(index, "question repeated with another answer")
        whole = (row.image, row.mask, *asked, answer)
        if whole in known:
            yield Finding(index, "row there twice")
        known.add(whole)


def turned_findings(rows: list[Row], facts: Facts) -> Iterator[Finding]:
    """Masks whose outline lies on edges of the image only when they are transposed or mirrored, CSV by CSV."""
    of_csv: dict[str, dict[str, tuple[float, ...]]] = {}
    for row in rows:
        _, mask = facts.of(row)
        outlines = of_csv.setdefault(row.modality, {})
        outlines[row.mask] = mask.outline

    ways: dict[str, str] = {}
    for outlines in of_csv.values():
        of_masks = turned_masks(list(outlines.values()))
        ways.update(zip(outlines, of_masks, strict=True))
    for index, row in enumerate(rows):
        if ways[row.mask]:
            yield Finding(index, "mask fits its image only when turned", ways[row.mask])


def copy_findings(rows: list[Row], facts: Facts, ranks: Ranks) -> Iterator[Finding]:
    """Images that are nearly the same as one of another split; each split is compared with those before it."""
    # one file of each image, by its identity
    images: dict[str, dict[str, str]] = {split: {} for split in SPLITS}
    for row in rows:
        images[row.split].setdefault(row.identity, row.image)

    copies: dict[str, str] = {}
    for place, split in enumerate(SPLITS):
        for other in SPLITS[:place]:
            first = list(images[other].values())
            second = list(images[split].values())
            found = near_copies(thumbnails(first, facts), thumbnails(second, facts), ranks)
            identities = list(images[split])
            for query, partner in sorted(found.items()):
                name = Path(first[partner]).name
                copies.setdefault(identities[query], f"{name} of {other}")

    for index, row in enumerate(rows):
        if row.identity in copies:
            yield Finding(index, "nearly the same image in another split", copies[row.identity])


def thumbnails(images: list[str], facts: Facts) -> list[bytes]:
    return [facts.images[path].thumbnail for path in images]


def patient_findings(rows: list[Row]) -> Iterator[Finding]:
    """Patients that CSVs have in different splits; in one CSV that is an error."""
    patients: dict[str, Row] = {}
    for index, row in enumerate(rows):
        first = patients.setdefault(row.patient, row)
        if row.patient and first.split != row.split:
            how = f"{row.patient}, {first.split} in {first.modality}"
            yield Finding(index, "patient also in another split of another CSV", how)
