"""The stages of guide 3's cascade as the config and a checkpoint describe them: defaults, checks, and which to train.

Light on purpose (no torch): the command line is parsed with it.
"""

import math
import re
from argparse import ArgumentTypeError
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from old.cli_utils import InputError, json_value

# Most tokens along an axis.
TOKEN_GRID = 16
# The guide's stages.
STAGES = [
    {"name": "stage1", "volume_size": [64] * 3, "voxel_dim": 256, "vit_depth": 4, "num_heads": 4, "batch_size": 16},
    {"name": "stage2", "volume_size": [128] * 3, "voxel_dim": 384, "vit_depth": 6, "num_heads": 6, "batch_size": 8},
    {"name": "stage3", "volume_size": [256] * 3, "voxel_dim": 512, "vit_depth": 8, "num_heads": 8, "batch_size": 2},
]
STAGES[2]["accumulation_steps"] = 2
PHYSICS_WEIGHTS = (0.3, 0.4, 0.5)
# The keys of a stage that hold whole numbers, with the least of each.
LEAST = {
    "voxel_dim": 16,
    "vit_depth": 1,
    "num_heads": 1,
    "batch_size": 1,
    "num_epochs": 1,
    "token_grid": 2,
    "accumulation_steps": 1,
    "effective_batch_size": 1,
}
KEYS = ("name", "volume_size", *LEAST, "physics_weight")
# The keys that may be left out, and the flag that then holds, and that wins when given on the command line.
OPTIONAL = {
    "batch_size": "batch_size",
    "num_epochs": "num_epochs_per_stage",
    "accumulation_steps": "gradient_accumulation_steps",
    "effective_batch_size": "effective_batch_size",
}
# What may not differ from the stages of a checkpoint.
FIXED_KEYS = ("name", "volume_size", "voxel_dim", "vit_depth", "num_heads", "token_grid")


def eval_batch(size: list[int]) -> int:
    """Patients per forward pass of an evaluation: the same at any world size, so that results are too."""
    return max(1, min(4, 2 * 128**3 // math.prod(size)))


def halvings(size: list[int], token_grid: int) -> int:
    """How often a stage's model halves its grid before the transformer."""
    return max(1, math.ceil(math.log2(max(size) / token_grid)))


# --- --stage_configs --------------------------------------------------------------------------------------------------


def stage_list(text: str) -> list[dict]:
    """argparse type of --stage_configs: JSON list of stages, checked and with defaults filled in."""
    stages = json_value(text, "a list of stages")
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        raise ArgumentTypeError("must be a list of at least one stage, each with name, volume_size, voxel_dim ...")

    checked: list[dict] = []
    for k, stage in enumerate(stages):
        config = with_defaults(stage, k)
        reason = unknown_key(stage) or wrong_value(config) or wrong_size(config) or wrong_order(config, checked)
        if reason:
            raise ArgumentTypeError(f"stage {k + 1}: {reason}")
        checked.append(config)
    return checked


def with_defaults(stage: dict, k: int) -> dict:
    """Stage k with every key, like the guide's stage k or its last; keys of OPTIONAL are None where a flag holds."""
    guide = min(k, len(STAGES) - 1)
    config = {"name": f"stage{k + 1}", "physics_weight": PHYSICS_WEIGHTS[guide], "token_grid": TOKEN_GRID}
    for key in ("volume_size", "voxel_dim", "vit_depth", "num_heads"):
        config[key] = STAGES[guide][key]
    return config | dict.fromkeys(OPTIONAL) | stage


def unknown_key(stage: dict) -> str:
    """What is wrong with a stage's keys, or empty."""
    for key in stage:
        if key not in KEYS:
            near = get_close_matches(str(key), KEYS, n=1)
            return f"unknown key {key!r}" + (f", did you mean {near[0]!r}" if near else "")
    return ""


def wrong_value(config: dict) -> str:
    """What is wrong with the name, the whole numbers or the weight of a stage, or empty."""
    name = config["name"]
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        return f"name {name!r} must be of letters, digits, _ and -"
    for key, least in LEAST.items():
        value = config[key]
        if value is None and key in OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            return f"{key} {value!r} must be a whole number of at least {least}"
    if config["effective_batch_size"] and (config["accumulation_steps"] or 1) > 1:
        return "accumulation_steps follows from effective_batch_size; remove one"
    weight = config["physics_weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        return f"physics_weight {weight!r} must be a number of at least 0"
    return ""


def wrong_size(config: dict) -> str:
    """What is wrong with the sizes of a stage's volume and tokens, or empty."""
    size = config["volume_size"]
    if not isinstance(size, list) or len(size) != 3 or not all(type(side) is int and side >= 8 for side in size):
        return f"volume_size {size!r} must be three whole numbers of at least 8"
    step = 2 ** halvings(size, config["token_grid"])
    for side in size:
        if side % step:
            reason = f"must be multiples of {step} (token_grid {config['token_grid']})"
            return f"volume_size {size}: {reason}, {side} is not; take {round(side / step) * step}"
    if config["voxel_dim"] % (2 * config["num_heads"]) or config["voxel_dim"] % 8:
        return f"voxel_dim {config['voxel_dim']} must be a multiple of 8 and of twice num_heads"
    return ""


def wrong_order(config: dict, earlier: list[dict]) -> str:
    """What is wrong with a stage after those before it, or empty."""
    if not earlier:
        return ""
    size = config["volume_size"]
    before = earlier[-1]["volume_size"]
    smaller = any(side < side_before for side, side_before in zip(size, before, strict=True))
    if smaller or size == before:
        return f"volume_size {size} must be larger than the {before} of the stage before"
    if config["name"] in [stage["name"] for stage in earlier]:
        return f"the name {config['name']!r} is taken"
    return ""


def check_stages(stages: list[dict], saved: list[dict], reached: int, path: str) -> None:
    """Raises InputError where the config's stages, up to the one reached, are not those of the checkpoint at path."""
    if len(stages) <= reached:
        raise InputError(f"{path}: is at stage {reached + 1} of a cascade, the config has {len(stages)}")
    for k in range(reached + 1):
        for name in FIXED_KEYS:
            before = saved[k][name]
            now = stages[k][name]
            if before != now:
                raise InputError(f"{path}: stage {k + 1} was trained with {name} {before}, now {now}; set it back")


# --- --stage ----------------------------------------------------------------------------------------------------------


class StageChoice(NamedTuple):
    """The stages of a run, from 0. anew: the first is begun, and not resumed in its middle."""

    first: int
    last: int
    anew: bool

    def of(self, plan: list) -> list:
        """The chosen ones of all stages."""
        return plan[self.first : self.last + 1]


def choose_stages(
    asked: str | None,
    stages: list[dict],
    checkpoint: dict | None,
    resume_from: str | None,
) -> StageChoice:
    """What --stage and the checkpoint ask for. Raises InputError when the stages before are not there."""
    names = [stage["name"] for stage in stages]
    wanted = None
    if asked:
        numbers = [str(k + 1) for k in range(len(names))]
        if asked not in names + numbers:
            raise InputError(f"--stage {asked}: there are 1 to {len(names)} ({', '.join(names)})")
        wanted = names.index(asked) if asked in names else numbers.index(asked)
    last = len(names) - 1 if wanted is None else wanted

    if checkpoint is None:
        if wanted:
            reason = "the stages before it are not there; train them first, or name one of their checkpoints with "
            raise InputError(f"--stage {asked}: {reason}--resume_from")
        return StageChoice(0, last, anew=True)

    reached = checkpoint["state"]["stage"]
    if wanted is not None and not reached <= wanted <= reached + 1:
        more = f" or {reached + 2}" if reached + 1 < len(names) else ""
        reason = f"the checkpoint is at stage {reached + 1}"
        raise InputError(f"--stage {asked}: {reason}; go on with --stage {reached + 1}{more}")

    # a file is the user's choice of weights for the stage before
    if wanted == reached + 1 and Path(resume_from).is_file():
        return StageChoice(wanted, last, anew=True)
    return StageChoice(reached, last, anew=False)


def choose_rehearsed(asked: str | None, stages: list[dict]) -> list[int]:
    """The numbers, from 0, of the stages that --rehearse tries: that of --stage, or all. Raises InputError."""
    chosen = [k for k, stage in enumerate(stages) if asked in (None, stage["name"], str(k + 1))]
    if not chosen:
        raise InputError(f"--stage {asked}: there are 1 to {len(stages)}; name one of them")
    return chosen
