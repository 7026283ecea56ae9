"""Questions about a structure, and answers that say where it lies: several wordings, chosen by name and seed."""

import hashlib

# {}: the structure. A plural takes the other verb.
QUESTIONS = (
    "Where {is} the {} located in this image?",
    "In which part of the image {is} the {}?",
    "Please find the {} and say where in the image {it} {is}.",
    "What is the position of the {} in this image?",
)
ANSWERS = (
    "The {} {is} located in the {position} of the image.",
    "The {} {is} in the {position} of the image.",
    "The {} can be seen in the {position} of the image.",
)
# What ends in s and is still one thing.
SINGULAR_ENDINGS = ("ss", "us", "is", "as")


def is_plural(structure: str) -> bool:
    """Whether a structure's name is that of several: lungs, left kidneys, but not pancreas or pelvis."""
    last = structure.lower().split(" ")[-1]
    return last.endswith("s") and not last.endswith(SINGULAR_ENDINGS)


def question_about(structure: str, case: str, seed: int) -> str:
    """A question about a structure; case: the image's name, which with the seed chooses among the wordings."""
    wording = choose(QUESTIONS, f"{seed}/question/{case}/{structure}")
    plural = is_plural(structure)
    verb = "are" if plural else "is"
    return wording.format(structure, **{"is": verb, "it": "they" if plural else "it"})


def answer_with(structure: str, position: str, case: str, seed: int) -> str:
    """A sentence that names a structure's position."""
    wording = choose(ANSWERS, f"{seed}/answer/{case}/{structure}")
    verb = "are" if is_plural(structure) else "is"
    return wording.format(structure, **{"is": verb, "position": position})


def choose(wordings: tuple[str, ...], key: str) -> str:
    """One of these, the same for the same key."""
    digest = hashlib.blake2b(key.encode(), digest_size=4)
    return wordings[int.from_bytes(digest.digest(), "big") % len(wordings)]
