"""Guide 1's pretrained encoders: loaded and checked, their attention mask, and layers that are computed again."""

import contextlib
import inspect
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn

from old.checkpoint_utils import load_trained
from old.cli_utils import InputError
from old.distributed_utils import print_main
from old.hardware_utils import out_of_memory
from old.phase_utils import doing

# ImageNet's statistics, for an image encoder that names none.
IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]
# What Hugging Face's configs call the dropout of a text encoder.
DROPOUT_NAMES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout")
# What encoders call the list of their layers.
LAYER_NAMES = ("stages", "layers", "layer", "blocks", "block")


class Encoders(NamedTuple):
    """Both pretrained encoders, in fp32, and what their inputs must be: tokens, and each channel's mean and std."""

    image: nn.Module
    text: nn.Module
    tokenizer: Callable
    mean: list[float]
    std: list[float]

    @property
    def longest_question(self) -> float:
        """How many tokens the text encoder takes."""
        return getattr(self.text.config, "max_position_embeddings", None) or math.inf


def load_encoders(image_encoder: str, text_encoder: str, dropout: float) -> Encoders:
    """Both encoders from folders or the hub. dropout: the text encoder's. Raises InputError."""
    from transformers import utils

    utils.logging.set_verbosity_error()
    utils.logging.disable_progress_bar()
    # a masked autoencoder would hide most of the image from itself
    image = load_encoder(image_encoder, "image_encoder", {"mask_ratio": 0.0})
    text = load_encoder(text_encoder, "text_encoder", dict.fromkeys(DROPOUT_NAMES, dropout))
    tokenizer = load_tokenizer(text_encoder, text.config)
    mean, std = image_statistics(image_encoder, image.config.num_channels)
    return Encoders(image, text, tokenizer, mean, std)


@doing("loading an encoder")
def load_encoder(path: str, flag: str, options: dict | None = None) -> nn.Module:
    """A Hugging Face encoder in fp32, all of whose weights are in the file but for a pooler, which nothing here uses.

    options: values of its config, where that has them. Raises InputError naming flag and reason.
    """
    from transformers import AutoModel

    try:
        config = encoder_config(path, flag)
        for name, value in (options or {}).items():
            if hasattr(config, name):
                setattr(config, name, value)

        # whatever is not in the file would be left as it was drawn
        model, loading = AutoModel.from_pretrained(path, config=config, dtype=torch.float32, output_loading_info=True)
        lacking = sorted(name for name in loading["missing_keys"] if "pooler" not in name)
        if lacking:
            raise ValueError(f"{len(lacking)} weights are not in the file, such as {lacking[0]}")
        return model
    except InputError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = first_line(error)
        raise InputError(f"{path}: cannot be loaded ({reason}); download it and give its folder as --{flag}") from None


def encoder_config(path: str, flag: str):
    """The config of a checkpoint that is an encoder of the kind that the flag names. Raises InputError and others."""
    from transformers import AutoConfig

    # whatever looks like no name on the hub is a folder
    is_folder_name = path.count("/") > 1 or path[0] in "./~"
    if is_folder_name and not Path(path).exists():
        raise OSError("no such folder")
    config = AutoConfig.from_pretrained(path)

    kind = flag.removesuffix("_encoder")
    needed = ("num_channels",) if kind == "image" else ("hidden_size", "vocab_size")
    has_width = hasattr(config, "hidden_size") or hasattr(config, "hidden_sizes")
    if not has_width or not all(hasattr(config, name) for name in needed):
        raise InputError(f"{path}: a {config.model_type!r} checkpoint is no {kind} encoder; check --{flag}")
    return config


def load_tokenizer(path: str, config):
    """The tokenizer of a text encoder with this config. Raises InputError where one does not go with the other."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids = tokenizer("is there a pleural effusion?", add_special_tokens=False)["input_ids"]
        if set(ids) <= {tokenizer.unk_token_id}:
            raise ValueError("it knows no words")
        if len(tokenizer) > config.vocab_size:
            raise ValueError(f"it has {len(tokenizer)} words and the encoder {config.vocab_size}")
        return tokenizer
    except Exception as error:
        raise InputError(f"{path}: no tokenizer ({first_line(error)}); download it again") from None


def first_line(error: Exception) -> str:
    """The beginning of an error's message, or its kind where it has none."""
    return str(error).splitlines()[0][:150] if str(error) else type(error).__name__


def image_statistics(path: str, channels: int) -> tuple[list[float], list[float]]:
    """(mean, standard deviation) of each channel as an image encoder wants them; ImageNet's where it does not say."""
    from transformers.image_processing_base import ImageProcessingMixin

    settings = {}
    with contextlib.suppress(OSError, ValueError):
        settings = ImageProcessingMixin.get_image_processor_dict(path)[0]

    # pixels from 0 to 1, as they are
    if settings.get("do_normalize") is False:
        return [0.0] * channels, [1.0] * channels
    mean = per_channel(settings.get("image_mean") or IMAGENET_MEAN, channels)
    std = per_channel(settings.get("image_std") or IMAGENET_STD, channels)
    return mean, std


def per_channel(values: float | list[float], channels: int) -> list[float]:
    """A number for each channel: a single one, or the mean where they are of another number of channels."""
    numbers = values if isinstance(values, list | tuple) else [values]
    if len(numbers) == channels:
        return list(numbers)
    return [sum(numbers) / len(numbers)] * channels


def size_options(encoder: nn.Module, size: int) -> dict[str, bool]:
    """What a forward pass of an image encoder is told for images of another size than its own.

    A vision transformer has a position for each patch of the size that it was made for; most resize them if asked.
    """
    own = getattr(encoder.config, "image_size", None)
    sides = own if isinstance(own, list | tuple) else [own, own]
    known = inspect.signature(encoder.forward).parameters
    if own is None or list(sides) == [size, size] or "interpolate_pos_encoding" not in known:
        return {}
    return {"interpolate_pos_encoding": True}


# --- recomputation and weights ----------------------------------------------------------------------------------------


def layers_of(encoder: nn.Module, path: str) -> nn.ModuleList:
    """The stages or layers of an encoder, the outermost. Raises InputError when it has none of the usual names."""
    found = None
    fewest = math.inf
    for name, part in encoder.named_modules():
        depth = name.count(".")
        if isinstance(part, nn.ModuleList) and name.split(".")[-1] in LAYER_NAMES and depth < fewest:
            found = part
            fewest = depth
    if found is None:
        raise InputError(f"{path}: --gradient_checkpointing does not know its layers; use --no-gradient_checkpointing")
    return found


# What a layer gives for its arguments; its activations are computed again in the backward pass.
recompute = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def recomputed(forward: Callable) -> Callable:
    """`forward`, its activations recomputed in the backward pass (ConvNeXt has no switch of its own for that)."""

    def call(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recompute(forward, *args, **kwargs)

    return call


def load_pretrained(model: nn.Module, path: str) -> None:
    """--pretrained_weights: the exported weights of a run, of any engine. Raises InputError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if not Path(path).is_file():
            raise InputError(f"{path}: no such file; check --pretrained_weights")
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a safetensors file ({error}); give a run's model.safetensors") from None

    shapes = {name: value.shape for name, value in weights.items()}
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    unlike = sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))
    if unlike:
        raise InputError(f"{path}: weights of another model ({unlike[0]}); give the encoders it was trained with")
    load_trained(model, weights)
    print_main(f"weights from {path}; the optimizer starts anew")
