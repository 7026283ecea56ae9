"""What --model stands for, and what a run takes over from a checkpoint.

Light on purpose (no torch): train.py needs it before its arguments are parsed.
"""

from old.batch_utils import keep_effective_batch
from old.cli_utils import InputError

# What --model stands for where flag and config are silent: the published settings.
MODELS = {
    "compressed_ad": {
        "tf_n_embd": 128,
        "tf_n_layer": 4,
        "tf_n_head": 8,
        "tf_dim_feedforward": 512,
        "n_latent": 40,
        "lr": 1e-4,
        "train_batch_size": 128,
        "train_timesteps": 150000,
        "num_warmup_steps": 5000,
    },
    # the same without compression
    "ad": {
        "tf_n_embd": 64,
        "tf_n_layer": 4,
        "tf_n_head": 4,
        "tf_dim_feedforward": 256,
        "n_latent": 0,
        "lr": 3e-4,
        "train_batch_size": 512,
        "train_timesteps": 50000,
        "num_warmup_steps": 1000,
    },
}

# What a checkpoint prescribes to a run that is resumed from it or uses it.
FIXED = [
    *("model", "tf_n_embd", "tf_n_layer", "tf_n_head", "tf_dim_feedforward", "encoder_n_layer"),
    *("n_latent", "n_transit", "max_compression_depth", "split_seed"),
]

# What a resumed run takes from its checkpoint, unless it is told otherwise.
KEPT = ["data", "lr", "lr_scaling", "train_timesteps", "num_warmup_steps", "weight_decay"]

# The guide's names for common flags.
GUIDE_NAMES = {
    "log_every": "summary_interval",
    "save_every": "ckpt_interval",
    "grad_clip": "grad_clip_norm",
    "lr": "learning_rate",
}


def fill_in(flags: dict, source: dict[str, str]) -> None:
    """Set what --model stands for, where flag and config are silent. source: where each flag's value comes from."""
    settings = MODELS[flags["model"]] | {"output_dir": f"runs/{flags['model']}"}
    for name, value in settings.items():
        if source[name] == "default":
            flags[name] = value


def find_conflict(flags: dict, source: dict[str, str]) -> str:
    """What cannot be together in the flags, and what to do; empty where all can. Leaves --model ad without latents."""
    if flags["model"] == "ad":
        if flags["n_latent"] and source["n_latent"] == "command line":
            return "--n_latent: --model ad does not compress; leave it out, or give --model compressed_ad"
        # so that a config of the other serves both
        flags["n_latent"] = 0
        if flags["ad_run"]:
            return "--ad_run: stands beside a run of --model compressed_ad, this one is of --model ad; leave it out"
    elif not flags["n_latent"]:
        return "--n_latent 0: compression needs at least 1; give --model ad to go without"
    if flags["tf_n_embd"] % flags["tf_n_head"]:
        return f"--tf_n_head {flags['tf_n_head']}: must divide --tf_n_embd {flags['tf_n_embd']}"
    if flags["overwrite"] and (flags["resume_from"] or flags["eval_only"]):
        return "--overwrite starts afresh and excludes --resume_from and --eval_only"
    return ""


def check_warmup(flags: dict, source: dict[str, str]) -> None:
    """Raises InputError for a warm-up that does not end before the training."""
    if flags["num_warmup_steps"] >= flags["train_timesteps"]:
        warmup = f"--num_warmup_steps {flags['num_warmup_steps']} ({source['num_warmup_steps']})"
        raise InputError(f"{warmup}: must be below --train_timesteps {flags['train_timesteps']}")


def adopt_settings(flags: dict, source: dict[str, str], checkpoint: dict, path: str) -> list[str]:
    """Take what a checkpoint prescribes; returns what the flags change all the same.

    Raises InputError where a flag or the config says what cannot be.
    """
    settings = checkpoint["settings"]
    if source["model"] == "default" and flags["model"] != settings["model"]:
        flags["model"] = settings["model"]
        output_dir = flags["output_dir"]
        fill_in(flags, source)
        flags["output_dir"] = output_dir

    # what cannot differ
    for name in FIXED:
        before = settings[name]
        now = flags[name]
        if source[name] != "default" and now != before:
            raise InputError(f"--resume_from {path}: a run with --{name} {before}, now {now}; leave it out")
        flags[name] = before

    # what stays unless a flag changes it
    changes = []
    for name in KEPT:
        before = settings[name]
        now = flags[name]
        if source[name] == "default":
            flags[name] = before
        elif before != now and name != "data":
            changes.append(f"begun with --{name} {before}, going on with {now}: another run from here on")
    if source["seed"] == "default":
        flags["seed"] = checkpoint["run"]["seed"]
    keep_effective_batch(flags, source, checkpoint, "train_batch_size")
    return changes
