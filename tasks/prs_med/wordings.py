"""Find the structure that a question names, and reword questions about a structure.

Does not import torch.
"""

import re
from collections import defaultdict
from collections.abc import Sequence

from numpy.random import Generator

# templates used by tools.prepare_data and tools.sample_data; {is} and {it} become "are" and "they" for plural names
QUESTIONS = (
    "Where {is} the {name} located in this image?",
    "In which part of the image {is} the {name}?",
    "Please find the {name} and say where in the image {it} {is}.",
    "What is the position of the {name} in this image?",
)
ANSWERS = (
    "The {name} {is} located in the {position} of the image.",
    "The {name} {is} in the {position} of the image.",
    "The {name} can be seen in the {position} of the image.",
)
ABSENT = "There {is} no {name} in this image."

# templates for rewording training questions, combined by draw()
REQUESTS = (
    "{name}",
    "the {name}",
    "find the {name}",
    "show the {name}",
    "show me where the {name} {is}",
    "mark the {name}",
    "segment the {name}",
    "locate the {name}",
    "where {is} the {name}",
    "where do you see the {name}",
    "tell me the position of the {name}",
    "in which part {is} the {name}",
    "I am looking for the {name}",
    "can the {name} be found",
    "give me a mask of the {name}",
    "what area does the {name} take up",
    "which pixels belong to the {name}",
    "{name}: where {is} {it}",
    "the {name} should be drawn in red",
)
EXCLUSIONS = (
    "{request}, not the {other},",
    "{request} and not the {other}",
    "{request}, but leave the {other} out",
    "{request} (the {other} is not asked for)",
    "{request} rather than the {other}",
    "{request} without the {other}",
    "not the {other} but {request}",
)
FILLERS = """
a about again all also always an and another any are as ask at be because been before below best both but by call
came can careful case clear come could day department did different do doctor does each edge end even every few
first for from get go good great had has have he hello help her here him his hospital how I if image important in
into is it its just kind know last let like line little look made make many may me medical might mine more most much
must my need new next no now of on one only or other our out over own patient people picture please point quick
radiologist red report right said same say scan see seen she should shown side since size slice slide small so some
still such sure take tell than thank that their them then there these they thing think this those time to today too
under up upon us use very view want was way we well what when which while who why will with would year yes yet you
your
""".split()
PUNCTUATION = ("", "", "", ".", "?", "!", ",", ":", ";", "...", "?!", " -")

# templates for rewording test questions, never used for training
OTHER_WORDS = (
    "Outline the {name}.",
    "{name} -> border",
    "GIVE THE EXACT BORDERS OF THE {NAME} NOW",
    "Delineate the {name}, never the {other}.",
    "The student wonders: does anything on our slice look like the {name}?",
    "Good evening, I would be grateful if someone could kindly trace for us, with all the care that it deserves, "
    "the whole contour of the {name} displayed above.",
)

COMMON = set("a an and are at be can find image in is it located of part position say see seen the they to".split())


def name_structure(question: str, answer: str) -> str:
    """Guess the structure that a question is about: the longest phrase that the answer repeats.

    The phrase does not begin or end with a word in COMMON, such as "the". Returns "" if there is no such phrase.
    """
    asked, said = (re.findall(r"\w[\w'-]*", text) for text in (question, answer))
    said, best = spaced(" ".join(said)), []
    for first in range(len(asked)):
        for last in range(first + 1 + len(best), len(asked) + 1):
            run = asked[first:last]
            if spaced(" ".join(run)) not in said:
                break
            if not {run[0].casefold(), run[-1].casefold()} & COMMON:
                best = run
    return " ".join(best)


def named_in(question: str, structures: list[list[str]]) -> list[str]:
    """Return the names of the structures that a question mentions by name or synonym.

    structures: [name, synonyms...] of each structure. The longest names are matched first, so that "left kidney" does
    not also count as "kidney".
    """
    left, found = spaced(question), set()
    for name, structure in sorted(((name, s[0]) for s in structures for name in s), key=lambda pair: -len(pair[0])):
        if spaced(name) in left:
            found.add(structure)
            left = left.replace(spaced(name), " . ")
    return sorted(found)


def spaced(text: str) -> str:
    """Return a text's words in lower case, each with a space on both sides, so that whole words can be matched."""
    return " ".join(["", *re.findall(r"[^\W_]+", text.casefold()), ""])


def fill(wording: str, name: str, other: str = "", position: str = "") -> str:
    word = name.lower().split()[-1]
    plural = word.endswith("s") and not word.endswith(("ss", "us", "is", "as"))
    words = {"is": "are" if plural else "is", "it": "they" if plural else "it", "NAME": name.upper()}
    return wording.format(name=name, other=other, position=position, **words)


def other_names(rows: list) -> dict[tuple[str, str], list[str]]:
    """Return {(modality, structure): main names of the other structures in the modality}."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        names[row.modality] |= dict.fromkeys(row.names[:1])
    return {
        (kind, name): sorted(other for other in known if differ(name, other))
        for kind, known in names.items()
        for name in known
    }


def absent_names(rows: list) -> dict[str, list[str]]:
    """Return {modality: main names of the structures that occur only in other modalities}.

    The list is empty if any row of the modality names no structure, because that row could be about any structure.
    """
    structures: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for row in rows:
        structures[row.modality].add(row.names)
    known = {row.names for row in rows if row.names}
    absent = {}
    for kind, own in structures.items():
        own_names = {name for names in own for name in names}
        others = [names for names in known if all(differ(name, own_name) for name in names for own_name in own_names)]
        absent[kind] = [] if () in own else sorted({names[0] for names in others})
    return absent


def differ(one: str, other: str) -> bool:
    """Return False if one name contains the other: "kidney" and "left kidney" may mean the same structure."""
    return spaced(one) not in spaced(other) and spaced(other) not in spaced(one)


def ask_for_absent(row, question: str, name: str):
    return row._replace(question=question, answer=fill(ABSENT, name), mask="", names=(name,))


def draw(rng: Generator, names: Sequence[str], others: Sequence[str]) -> str:
    """Return a question about one structure, with random wording and letter case.

    names: name and synonyms of the structure. others: names of other structures, which the question may exclude ("not
    the ...").
    """

    def choose(choices: Sequence[str]) -> str:
        return choices[rng.integers(len(choices))]

    def filler(most: int) -> str:
        """Return up to `most` random filler words; some have shuffled letters, to mimic unknown words."""
        words = [choose(FILLERS) for _ in range(rng.integers(most + 1))]
        words = ["".join(rng.permutation(list(word))) if rng.random() < 0.2 else word for word in words]
        return " ".join(words) + (choose(PUNCTUATION) if words else "")

    wording = choose(REQUESTS) if rng.random() < 0.8 else "{name}"
    if others and rng.random() < 0.35:
        wording = choose(EXCLUSIONS).replace("{request}", wording)
    if rng.random() < 0.7:
        wording = f"{filler(12)} {wording} {filler(8)}".strip()
    text = fill(wording + choose(PUNCTUATION), choose(names), choose(others) if others else "")
    case = rng.random()
    if case < 0.25:
        return text.upper()
    return text.lower() if case < 0.4 else text[:1].upper() + text[1:]


def longest(names: Sequence[str]) -> str:
    """Return a question roughly as long as draw()'s longest, for measuring peak memory."""
    name, request = max(names, key=len), max(REQUESTS, key=len)
    wording = max(EXCLUSIONS, key=len).replace("{request}", request) + 20 * f" {max(FILLERS, key=len)}"
    return fill(wording, name, name).upper()


def in_other_words(rows: list, some: list[int]) -> list[tuple]:
    """Reword the question of each selected row with each template in OTHER_WORDS.

    some: indices of the selected rows. Returns [("wording/" + template, row index, changed row)]. Rows that name no
    structure are skipped, and so are templates with {other} if the modality has no other structure.
    """
    others, changed = other_names(rows), []
    for wording in OTHER_WORDS:
        for index in some:
            row = rows[index]
            known = others[row.modality, row.names[0]] if row.names else []
            if row.names and (known or "{other}" not in wording):
                question = fill(wording, row.names[0], known[index % len(known)] if known else "")
                changed.append((f"wording/{wording}", index, row._replace(question=question)))
    return changed


def about_absent(rows: list, some: list[int], absent: dict[str, list[str]]) -> list[tuple]:
    changed = []
    for index in some:
        known, number = absent.get(rows[index].modality), len(changed)
        if known:
            name = known[number % len(known)]
            question = fill(QUESTIONS[number % len(QUESTIONS)], name)
            changed.append(("absent", index, ask_for_absent(rows[index], question, name)))
    return changed
