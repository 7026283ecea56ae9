"""Guide 3's flags: the sections of a config file, what does not go together, and what a checkpoint prescribes.

Light on purpose (no torch): the command line is parsed with it.
"""

import json

from old.cli_utils import InputError
from tasks.cascade.stages import OPTIONAL, STAGES, check_stages, stage_list
from tasks.cascade.views import LAT, PA, View, views_of

# The keys in the sections of a config file.
SECTION_KEYS = {
    "xray_config": "img_size num_views views encoder_dim",
    "training": (
        "batch_size num_timesteps v_parameterization learning_rate num_epochs_per_stage gradient_checkpointing "
        "mixed_precision accumulation_steps physics_weight weight_decay scheduler warmup_steps ema_decay grad_clip "
        "ddim_steps seed xray_agreement regression num_samples effective_batch_size"
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
FIXED = ("img_size", "num_views", "views", "encoder_dim")
FIXED += ("num_timesteps", "v_parameterization", "xray_agreement", "regression")
FIXED_DATA = ("split_seed", "flip_drrs_vertical", "flip_drrs_horizontal")


def wrong_flags(values: dict, source: dict[str, str]) -> str:
    """What is wrong with the flags' values together, or empty. source: where each of them comes from."""
    for name, divisor in (("encoder_dim", 16), ("img_size", 8)):
        if values[name] % divisor:
            return f"--{name} {values[name]}: must be a multiple of {divisor}"
    if values["split_files"] and len(values["split_files"]) not in (2, 3):
        return f"--split_files: {len(values['split_files'])} files; give TRAIN VAL TEST, or TRAIN TEST"
    num_timesteps = values["num_timesteps"]
    ddim_steps = values["ddim_steps"]
    if num_timesteps % ddim_steps:
        divisors = [n for n in range(1, num_timesteps + 1) if num_timesteps % n == 0]
        near = min(divisors, key=lambda n: abs(n - ddim_steps))
        return f"--ddim_steps {ddim_steps}: must divide --num_timesteps {num_timesteps}; nearest {near}"

    if reason := wrong_views(values, source) or wrong_rival(values):
        return reason
    if source["gradient_accumulation_steps"] == "command line" and has_effective_batch(values["stage_configs"] or []):
        return "--gradient_accumulation_steps: follows from the stages' effective_batch_size; leave it out"

    # modes that exclude each other
    uses_checkpoint = values["eval_only"] or values["sample"]
    if values["overwrite"] and (values["resume_from"] or uses_checkpoint):
        return "--overwrite starts afresh and excludes --resume_from, --eval_only and --sample"
    if values["eval_only"] and values["sample"]:
        return "--eval_only and --sample exclude each other"
    if values["stage"] and uses_checkpoint:
        return "--stage is for training; name the stage's checkpoint with --resume_from"
    return ""


def wrong_views(values: dict, source: dict[str, str]) -> str:
    """What is wrong with the views, or empty. source: of the flags."""
    views = values["views"]
    num_views = values["num_views"]
    if views and source["num_views"] != "default" and num_views != len(views):
        return f"--num_views {num_views}: --views lists {len(views)}; leave out --num_views"
    names = [view["name"] for view in views] if views else ["pa", "lat"][:num_views]
    mirrored = values["flip_drrs_horizontal"]
    if mirrored in ("pa", "lat") and mirrored not in names:
        return f"--flip_drrs_horizontal {mirrored}: there is no such view; the views are {', '.join(names)}"
    return ""


def wrong_rival(values: dict) -> str:
    """What is wrong with the flags of a regression, or of a run beside one, or empty."""
    if values["regression"] and not values["v_parameterization"]:
        return "--regression: the noise of one step is not predicted; leave out --no-v_parameterization"
    if values["regression"] and values["physics_weight"] is not None:
        return "--physics_weight: counts by the share of signal, which a regression has none of; leave it out"
    if values["regression_run"] and (values["regression"] or values["sample"]):
        return "--regression_run: stands beside a cascade's test; leave it out"
    return too_many_samples(values)


def too_many_samples(values: dict) -> str:
    """What is wrong with --num_samples, or empty."""
    if values["regression"] and values["num_samples"] > 1:
        return "--num_samples: a regression gives one volume; leave it out"
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

        # from the effective batch follows the accumulation; a stage without one does not name it
        if stage["effective_batch_size"] is None:
            del stage["effective_batch_size"]
        else:
            stage["accumulation_steps"] = 1
    return stages


def has_effective_batch(stages: list[dict]) -> bool:
    """Whether any of the stages is to have the same batch at any number of processes."""
    return any(stage.get("effective_batch_size") for stage in stages)


def keep_effective_batches(stages: list[dict], saved: list[dict]) -> None:
    """Let the stages of a resumed run that name no effective batch have that of the checkpoint's."""
    for stage, before in zip(stages, saved, strict=False):
        total = before.get("effective_batch_size")
        if total and not stage.get("effective_batch_size"):
            stage |= {"effective_batch_size": total, "accumulation_steps": 1}


def views_to_render(values: dict, source: dict[str, str]) -> tuple[View, ...]:
    """The views of --make_drrs: those of --views, or the usual two, whatever --num_views a model is to have."""
    if source["views"] == "default":
        return PA, LAT
    return views_of(values["views"])


def saved_settings(values: dict, precision: str) -> dict:
    """What a checkpoint holds of the flags' values."""
    settings = {name: values[name] for name in (*FIXED, *FIXED_DATA, "ddim_steps", "stage_configs")}
    return settings | {"mixed_precision": precision}


def shown(setting) -> str:
    """A flag's value for a message; of views what is given of them."""
    if not isinstance(setting, list):
        return str(setting)
    views = [{key: value for key, value in view.items() if value is not None} for view in setting]
    return json.dumps(views)


def adopt_settings(values: dict, source: dict[str, str], checkpoint: dict, path: str) -> None:
    """Set the flags' values as a checkpoint prescribes them. source: where each of them comes from.

    Raises InputError where a flag or the config says otherwise.
    """
    settings = checkpoint["settings"]
    path = values["checkpoint_dir"] if path == "auto" else path
    adopted = {}
    if source["seed"] == "default":
        adopted["seed"] = checkpoint["run"]["seed"]
    for name in (*FIXED, *FIXED_DATA):
        given = source[name] != "default"
        # how the new images lie, not those of the training
        if given and values["sample"] and name.startswith("flip"):
            continue
        if given and values[name] != settings[name]:
            then, now = (shown(setting) for setting in (settings[name], values[name]))
            raise InputError(f"{path}: a run with --{name} {then}, now {now}; leave it out")
        adopted[name] = settings[name]
    if reason := wrong_rival(values | adopted):
        raise InputError(f"{path}: {reason}")

    # steps of sampling: its own, or others that fit to those of its training
    if source["ddim_steps"] == "default":
        adopted["ddim_steps"] = settings["ddim_steps"]
    elif settings["num_timesteps"] % values["ddim_steps"]:
        asked = f"--ddim_steps {values['ddim_steps']}"
        raise InputError(f"{asked}: must divide the {settings['num_timesteps']} steps of {path}")

    # its stages, but for what the command line says of all of them
    saved = settings["stage_configs"]
    if source["gradient_accumulation_steps"] == "command line" and has_effective_batch(saved):
        raise InputError(f"{path}: a run with --effective_batch_size; leave out --gradient_accumulation_steps")
    if source["stage_configs"] != "default":
        check_stages(values["stage_configs"], saved, checkpoint["state"]["stage"], path)
        keep_effective_batches(values["stage_configs"], saved)
        values.update(adopted)
        return
    given = {key: values[flag] for key, flag in OPTIONAL.items() if source[flag] == "command line"}
    if values["physics_weight"] is not None:
        given["physics_weight"] = values["physics_weight"]
    if "effective_batch_size" in given:
        given["accumulation_steps"] = 1
    adopted["stage_configs"] = [stage | given for stage in saved]
    values.update(adopted)
