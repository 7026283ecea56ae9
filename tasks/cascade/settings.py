"""Guide 3's flags: the sections of a config file, what does not go together, and what a checkpoint prescribes.

Light on purpose (no torch): the command line is parsed with it.
"""

import json

from cli_utils import InputError
from tasks.cascade.stages import OPTIONAL, STAGES, check_stages, stage_list

# The keys in the sections of a config file.
SECTION_KEYS = {
    "xray_config": "img_size num_views encoder_dim",
    "training": (
        "batch_size num_timesteps v_parameterization learning_rate num_epochs_per_stage gradient_checkpointing "
        "mixed_precision accumulation_steps physics_weight weight_decay scheduler warmup_steps ema_decay grad_clip "
        "ddim_steps seed"
    ),
    "data": (
        "dataset_path augmentation cache_in_memory num_workers cache_dir split_seed split_files flip_drrs_vertical "
        "flip_drrs_horizontal"
    ),
}
# {section: {key: flag}}; but for one, a key is its flag's name.
SECTIONS = {section: {key: key for key in keys.split()} for section, keys in SECTION_KEYS.items()}
SECTIONS["training"]["accumulation_steps"] = "gradient_accumulation_steps"
# What a checkpoint prescribes to a run that resumes from it or uses it.
FIXED = ("img_size", "num_views", "encoder_dim", "num_timesteps", "v_parameterization")
FIXED_DATA = ("split_seed", "flip_drrs_vertical", "flip_drrs_horizontal")


def wrong_flags(values: dict) -> str:
    """What is wrong with the flags' values together, or empty."""
    for name, divisor in (("encoder_dim", 16), ("img_size", 8)):
        if values[name] % divisor:
            return f"--{name} {values[name]}: must be a multiple of {divisor}"
    num_timesteps = values["num_timesteps"]
    ddim_steps = values["ddim_steps"]
    if num_timesteps % ddim_steps:
        divisors = [n for n in range(1, num_timesteps + 1) if num_timesteps % n == 0]
        near = min(divisors, key=lambda n: abs(n - ddim_steps))
        return f"--ddim_steps {ddim_steps}: must divide --num_timesteps {num_timesteps}; nearest {near}"

    # modes that exclude each other
    uses_checkpoint = values["eval_only"] or values["sample"]
    if values["overwrite"] and (values["resume_from"] or uses_checkpoint):
        return "--overwrite starts afresh and excludes --resume_from, --eval_only and --sample"
    if values["eval_only"] and values["sample"]:
        return "--eval_only and --sample exclude each other"
    if values["stage"] and uses_checkpoint:
        return "--stage is for training; name the stage's checkpoint with --resume_from"
    return ""


def stages_of_flags(values: dict, source: dict[str, str]) -> list[dict]:
    """The stages with what the flags say: where a stage says nothing, and for all of them on the command line."""
    stages = values["stage_configs"]
    if stages is None:
        stages = stage_list(json.dumps(STAGES))
    for stage in stages:
        for key, flag in OPTIONAL.items():
            if stage[key] is None or source[flag] == "command line":
                stage[key] = values[flag]
        if values["physics_weight"] is not None:
            stage["physics_weight"] = values["physics_weight"]
    return stages


def saved_settings(values: dict, precision: str) -> dict:
    """What a checkpoint holds of the flags' values."""
    settings = {name: values[name] for name in (*FIXED, *FIXED_DATA, "stage_configs")}
    return settings | {"mixed_precision": precision}


def adopt_settings(values: dict, source: dict[str, str], checkpoint: dict, path: str) -> None:
    """Set the flags' values as a checkpoint prescribes them. source: where each of them comes from.

    Raises InputError where a flag or the config says otherwise.
    """
    settings = checkpoint["settings"]
    adopted = {}
    if source["seed"] == "default":
        adopted["seed"] = checkpoint["run"]["seed"]
    for name in (*FIXED, *FIXED_DATA):
        given = source[name] != "default"
        # how the new images lie, not those of the training
        if given and values["sample"] and name.startswith("flip"):
            continue
        if given and values[name] != settings[name]:
            raise InputError(f"{path}: a run with --{name} {settings[name]}, now {values[name]}; leave it out")
        adopted[name] = settings[name]

    # steps of sampling that fit to those of the training
    num_timesteps = settings["num_timesteps"]
    ddim_steps = values["ddim_steps"]
    if num_timesteps % ddim_steps:
        if source["ddim_steps"] != "default":
            raise InputError(f"--ddim_steps {ddim_steps}: must divide the {num_timesteps} steps of {path}")
        adopted["ddim_steps"] = next(n for n in range(ddim_steps, 0, -1) if num_timesteps % n == 0)

    # its stages, but for what the command line says of all of them
    if source["stage_configs"] != "default":
        check_stages(values["stage_configs"], settings["stage_configs"], checkpoint["state"]["stage"], path)
        values.update(adopted)
        return
    given = {key: values[flag] for key, flag in OPTIONAL.items() if source[flag] == "command line"}
    if values["physics_weight"] is not None:
        given["physics_weight"] = values["physics_weight"]
    adopted["stage_configs"] = [stage | given for stage in settings["stage_configs"]]
    values.update(adopted)
