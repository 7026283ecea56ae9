"""What is odd about annotations, masks and images, but may be meant: counted and named, worst first."""

from collections.abc import Iterator
from pathlib import Path

from distributed_utils import Ranks
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
    order = list(ADVICE)
    of_row: list[list[Finding]] = [[] for _ in rows]
    for finding in sorted(findings, key=lambda finding: order.index(finding.name)):
        of_row[finding.index].append(finding)
    return [row._replace(findings=tuple(odd)) for row, odd in zip(rows, of_row, strict=True)]


def summarise(rows: list[Row], findings: list[Finding]) -> dict[str, tuple[dict, str]]:
    """{finding: (number of rows and the first of them, what to do)}, the worst first."""
    summary = {}
    for name, advice in ADVICE.items():
        of_name = [finding for finding in findings if finding.name == name]
        if of_name:
            first = min(of_name, key=lambda finding: finding.index)
            counts = {"rows": len(of_name), "first": rows[first.index].source}
            how = f"{first.how}: " if first.how else ""
            summary[name] = (counts, how + advice)
    return summary


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
    ratio = (mask.size[0] * image.size[1]) / (mask.size[1] * image.size[0])
    # a smaller mask's sides are rounded
    rounding = 1 / min(*mask.size, *image.size)
    swapped = mask.size != image.size and mask.size == image.size[::-1]
    return {
        "mask empty": mask.foreground == 0,
        "mask all foreground": mask.foreground == 1,
        "mask covers the border: inverted?": part and mask.foreground > 0.5 and mask.border > 0.95,
        "mask holds grey values, as an image does": mask.grey,
        "several labels or colours in one mask": mask.labels > 1 and not mask.grey,
        f"mask values below {NOISE} left out": bool(mask.lost) and not mask.grey,
        "image of one value": image.blank,
        "image of two values, as a mask": image.two_valued,
        "only one of image and mask turned as EXIF says": image.turned != mask.turned,
        "turned as EXIF says": image.turned and mask.turned,
        "mask's width and height swapped": swapped,
        "mask's proportions up to 2 % off": abs(ratio - 1) > rounding and not swapped,
    }


def odd_texts(row: Row, mask: MaskFacts) -> dict[str, bool]:
    """{finding: whether it holds} of what is said about a mask."""
    answered = position_in(row.answer)
    column = position_in(row.position)
    true = mask.position
    return {
        "answer names another position than the mask": bool(true and answered) and answered != true,
        "answer names a position, the mask is empty": not true and bool(answered),
        "answer names no position": bool(true) and not answered,
        "`position` column contradicts the mask": bool(true and column) and column != true,
    }


def repeated_findings(rows: list[Row], facts: Facts) -> Iterator[Finding]:
    """Masks that several images share, and questions of one image that are answered in two ways."""
    images_of_mask: dict[str, set[str]] = {}
    for row in rows:
        image, mask = facts.of(row)
        if 0 < mask.foreground < 1:
            images_of_mask.setdefault(mask.shape, set()).add(image.digest)
    first_answers: dict[tuple[str, str], str] = {}
    for index, row in enumerate(rows):
        _, mask = facts.of(row)
        if len(images_of_mask.get(mask.shape, ())) > 1:
            yield Finding(index, "one mask for several images")
        answer = row.answer.casefold()
        if first_answers.setdefault((row.identity, row.question.casefold()), answer) != answer:
            yield Finding(index, "question repeated with another answer")


def turned_findings(rows: list[Row], facts: Facts) -> Iterator[Finding]:
    """Masks whose outline lies on edges of the image only when they are transposed or mirrored, CSV by CSV."""
    for modality in dict.fromkeys(row.modality for row in rows):
        pairs: dict[tuple[str, str], list[int]] = {}
        for index, row in enumerate(rows):
            if row.modality == modality:
                pairs.setdefault((row.image, row.mask), []).append(index)
        ways = turned_masks([facts.masks[pair].outline for pair in pairs])
        for indices, way in zip(pairs.values(), ways, strict=True):
            for index in indices if way else ():
                yield Finding(index, "mask fits its image only when turned", way)


def copy_findings(rows: list[Row], facts: Facts, ranks: Ranks) -> Iterator[Finding]:
    """Images that are nearly the same as one of another split; each split is compared with those before it."""
    first_rows: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
    for index, row in enumerate(rows):
        first_rows[row.split].setdefault(row.identity, index)

    copies: dict[str, str] = {}
    for place, split in enumerate(SPLITS):
        second = list(first_rows[split].values())
        for other in SPLITS[:place]:
            first = list(first_rows[other].values())
            found = near_copies(thumbnails(rows, first, facts), thumbnails(rows, second, facts), ranks)
            for query, partner in sorted(found.items()):
                name = Path(rows[first[partner]].image).name
                identity = rows[second[query]].identity
                copies.setdefault(identity, f"{name} of {other}")
    for index, row in enumerate(rows):
        if row.identity in copies:
            yield Finding(index, "nearly the same image in another split", copies[row.identity])


def patient_findings(rows: list[Row]) -> Iterator[Finding]:
    """Patients that CSVs have in different splits; in one CSV that is an error."""
    patients: dict[str, Row] = {}
    for index, row in enumerate(rows):
        first = patients.setdefault(row.patient, row)
        if row.patient and first.split != row.split:
            how = f"{row.patient}, {first.split} in {first.modality}"
            yield Finding(index, "patient also in another split of another CSV", how)


def thumbnails(rows: list[Row], indices: list[int], facts: Facts) -> list[bytes]:
    return [facts.images[rows[index].image].thumbnail for index in indices]
