"""What is looked at before the first step: every image and mask decodes, fits its partner and is of one split."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from old.cli_utils import InputError, counted
from old.distributed_utils import Ranks, agree_on_errors, gather_objects
from tasks.prs_med.data import NO_PATIENTS, Patients, Row, misfit, read_annotations
from tasks.prs_med.file_facts import NOISE, Facts, ImageFacts, MaskFacts, image_facts, mask_facts
from tasks.prs_med.findings import all_findings, name_findings, summarise
from tasks.prs_med.metrics import meaning_of, position_in
from tasks.prs_med.orientation import explain_positions
from tasks.prs_med.report import print_data_check

# fewer contradictions than this never end a run
FEWEST_CONTRADICTIONS = 3


def read_rows(
    root: Path,
    names: list[str] | None,
    skip_bad_rows: bool,
    needed_split: str,
    check: bool,
    ranks: Ranks,
    patients: Patients = NO_PATIENTS,
    max_contradictions: float = 1.0,
) -> list[Row]:
    """All ranks: the annotations' rows; with `check`, each with its findings and the digest of its image's content.

    Raises InputError for a needed split without rows, an unreadable image, one image or patient in two splits, a pair
    that cannot be right, or a CSV with more than this share of answers that contradict their masks or each other.
    """
    rows: list[Row] = []
    with agree_on_errors():
        rows = read_annotations(root, names, skip_bad_rows, patients)
        if not any(row.split == needed_split for row in rows):
            problem = f"no rows in split {needed_split!r}"
            raise InputError(f"{root}: {problem}; correct the CSVs or choose another --eval_split")
    if check:
        facts = inspect_files(rows, ranks)
        rows = [row._replace(digest=facts.images[row.image].digest) for row in rows]
        check_pairs(rows, facts)
    check_splits(rows)
    if check:
        rows = report_findings(rows, facts, ranks)
        check_contradictions(rows, facts, max_contradictions)
        check_repeated(rows, max_contradictions)
    return rows


def report_findings(rows: list[Row], facts: Facts, ranks: Ranks) -> list[Row]:
    """Print what may be meant; the rows with the names of it, the worst first."""
    findings = all_findings(rows, facts, ranks)
    if ranks.is_main:
        print_data_check(len(rows), summarise(rows, findings))
    return name_findings(rows, findings)


# --- the files --------------------------------------------------------------------------------------------------------


def inspect_files(rows: list[Row], ranks: Ranks) -> Facts:
    """What there is to know of every image and mask, each decoded once (the ranks share the work).

    Raises InputError on all ranks for an unreadable file.
    """
    sources = {}
    masks: dict[str, dict[str, None]] = {}
    for row in reversed(rows):
        sources[row.image] = row.source
        sources[row.mask] = row.source
        masks.setdefault(row.image, {})[row.mask] = None

    def look(path: str, facts_of, *given):
        try:
            return facts_of(path, *given)
        except Exception as error:
            reason = str(error).replace(path, "file")
            raise InputError(f"{sources[path]}: {path} is not a readable image ({reason}); replace it") from None

    def inspect(path: str) -> Facts:
        image, edges = look(path, image_facts)
        of_masks = {(path, mask): look(mask, mask_facts, edges) for mask in masks[path]}
        return Facts({path: image}, of_masks)

    paths = sorted(masks)
    local = paths[ranks.rank :: ranks.world_size]
    local_facts = Facts({}, {})
    quiet = not (ranks.is_main and sys.stderr.isatty())
    with agree_on_errors(), ThreadPoolExecutor(max_workers=8) as pool:
        inspected = pool.map(inspect, local)
        for facts in tqdm(inspected, "checking images", len(local), disable=quiet):
            local_facts.images.update(facts.images)
            local_facts.masks.update(facts.masks)

    everything = Facts({}, {})
    for part in gather_objects(local_facts):
        everything.images.update(part.images)
        everything.masks.update(part.masks)
    return everything


# --- what cannot be right ---------------------------------------------------------------------------------------------


def check_pairs(rows: list[Row], facts: Facts) -> None:
    """InputError for the first pair that cannot be right, with the number of others."""
    problems = {}
    for index, row in enumerate(rows):
        image, mask = facts.of(row)
        problem = pair_problem(image, mask)
        if problem:
            problems[index] = problem
    if problems:
        first = min(problems)
        more = len(problems) - 1
        others = f" ({counted(more, 'more row')} like it)" if more else ""
        row = rows[first]
        raise InputError(f"{row.source}: {row.mask}: {problems[first]}{others}")


def pair_problem(image: ImageFacts, mask: MaskFacts) -> str:
    """Why an image and a mask cannot be a pair; empty when they can."""
    if image.two_valued and mask.grey:
        return "the image has two values and the mask has grey ones: they are swapped; exchange the two files"
    if image.digest == mask.digest:
        return "the mask is a copy of its image; put the mask into the folder of masks"
    problem = misfit(mask.size, image.size)
    if problem and image.turned != mask.turned:
        turned = "image" if image.turned else "mask"
        return f"{problem} (the {turned} alone was turned as its EXIF tag says)"
    if problem:
        return problem
    if any(level >= NOISE for level in mask.lost) and not mask.grey:
        levels = ", ".join(map(str, mask.lost[:5]))
        problem = f"a label map: its value {levels} would count as background beside values above 127"
        problem += "; write foreground as 255, the rest as 0"
    return problem


def check_splits(rows: list[Row]) -> None:
    """InputError naming an image, also where it is a copy under another name, or a patient that lies in two splits.

    A patient of two CSVs may be two people: numbers are given anew in each data set.
    """
    seen: dict[str, Row] = {}
    for row in rows:
        first = seen.setdefault(row.identity, row)
        if first.split != row.split:
            splits = f"{row.split!r} and, at {first.source}, in {first.split!r}"
            raise InputError(f"{row.source}: picture {row.image} is in split {splits}; keep its rows in one split")

    patients: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row.modality, row.patient)
        first = patients.setdefault(key, row)
        if row.patient and first.split != row.split:
            splits = f"{row.split!r} and, at {first.source}, in {first.split!r}"
            raise InputError(f"{row.source}: patient {row.patient!r} is in split {splits}; keep a patient in one split")


def check_contradictions(rows: list[Row], facts: Facts, limit: float) -> None:
    """InputError for a CSV where more than this share of the answers name another position than the mask's."""
    for modality in dict.fromkeys(row.modality for row in rows):
        of_csv = [row for row in rows if row.modality == modality]
        stated = {row: position_in(row.answer) for row in of_csv}
        positions = {row: facts.of(row)[1].position for row in of_csv}
        named = [row for row in of_csv if stated[row] and positions[row]]
        wrong = [row for row in named if stated[row] != positions[row]]
        if len(wrong) < FEWEST_CONTRADICTIONS or len(wrong) <= limit * len(named):
            continue
        said = [stated[row] for row in named]
        true = [positions[row] for row in named]
        how = explain_positions(said, true)
        hint = f" (they fit the masks {how})" if how else ""
        counts = f"{len(wrong)} of {len(named)} answers name another position than their mask's, as this one{hint}"
        raise InputError(f"{wrong[0].source}: {counts}; correct them or raise --max_contradictions")


def check_repeated(rows: list[Row], limit: float) -> None:
    """InputError for a CSV where more than this share of the rows answer a question otherwise than a row before.

    That is a row about the same image; answers that name one position in other words are the same.
    """
    for modality in dict.fromkeys(row.modality for row in rows):
        of_csv = [row for row in rows if row.modality == modality]
        firsts: dict[tuple[str, str], Row] = {}
        wrong = []
        for row in of_csv:
            first = firsts.setdefault((row.identity, row.question.casefold()), row)
            if meaning_of(row.answer) != meaning_of(first.answer):
                wrong.append((row, first))
        if len(wrong) < FEWEST_CONTRADICTIONS or len(wrong) <= limit * len(of_csv):
            continue
        row, first = wrong[0]
        counts = f"{len(wrong)} of {len(of_csv)} rows answer a question about an image otherwise than a row before"
        advice = "keep one of them or raise --max_contradictions"
        raise InputError(f"{row.source}: {counts}, as this one and {first.source}; {advice}")
