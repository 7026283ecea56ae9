"""Weights to start from: model.safetensors or a checkpoint of a run here, or one of MedicalNet's files."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from old.checkpoint_utils import load_trained
from old.cli_utils import InputError
from old.distributed_utils import print_main
from tasks.survival.cohort import first_line

HEAD = ("head.weight", "head.bias")


class Weights(NamedTuple):
    """What a model starts from: {name as in RiskNet: tensor}. path: of --pretrained_path, None for a checkpoint."""

    tensors: dict[str, torch.Tensor]
    path: str | None = None

    @property
    def outputs(self) -> int:
        """How many the model of a checkpoint has."""
        return len(self.tensors["head.bias"])


def first_weights(checkpoint: dict | None, pretrained_path: str | None = None) -> Weights | None:
    """Those of a checkpoint, else of --pretrained_path; None without both. Raises InputError."""
    if checkpoint:
        return Weights(checkpoint["model"])
    if pretrained_path:
        return Weights(read_weights(pretrained_path), pretrained_path)
    return None


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """--pretrained_path: {name as in RiskNet: tensor} of a safetensors file, a checkpoint, or MedicalNet's .pth.

    Raises InputError.
    """
    if Path(path).is_dir():
        path = str(Path(path) / "model.safetensors")
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; check --pretrained_path")

    # DDP's prefix goes, and MedicalNet's file is a backbone alone
    weights = {}
    for name, value in read_tensors(path).items():
        if isinstance(value, torch.Tensor):
            name = str(name).removeprefix("module.")
            has_part = name.startswith(("backbone.", "head."))
            weights[name if has_part else f"backbone.{name}"] = value
    return weights


def read_tensors(path: str) -> dict:
    """What a file holds under the names it has there. Raises InputError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.endswith(".safetensors"):
            return load_file(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
        for part in ("model", "state_dict"):
            weights = weights[part] if isinstance(weights.get(part), dict) else weights
        return weights
    except (OSError, SafetensorError, AttributeError, RuntimeError, EOFError, KeyError, ValueError) as error:
        reason = f"not a readable file of weights ({first_line(error, 100)})"
        raise InputError(f"{path}: {reason}; check --pretrained_path") from None
    except Exception as error:
        # pickle has errors of its own
        raise InputError(f"{path}: not a file of tensors ({type(error).__name__}); check --pretrained_path") from None


def use_weights(model: nn.Module, start: Weights) -> None:
    """Load all of a checkpoint; of other weights the backbone, and the head where its shape fits.

    Raises InputError when a part of the backbone does not fit.
    """
    weights, path = start
    if path is None:
        load_trained(model, weights)
        return
    own = model.state_dict()
    if {"backbone.fc.weight", "backbone.fc.bias"} <= weights.keys():
        weights["head.weight"] = weights["backbone.fc.weight"]
        weights["head.bias"] = weights["backbone.fc.bias"]
    head_fits = all(name in weights and weights[name].shape == own[name].shape for name in HEAD)

    # all of the backbone must be there
    wanted = [name for name in own if name not in HEAD and "num_batches" not in name]
    for name in wanted:
        needed = tuple(own[name].shape)
        given = tuple(weights[name].shape) if name in weights else "not there"
        if given != needed:
            reason = f"weights of another net ({name}: {given}, needed {needed})"
            raise InputError(f"{path}: {reason}; check --resnet, --base_channels and --norm")

    used = [*wanted, *HEAD] if head_fits else wanted
    model.load_state_dict({name: weights[name] for name in used}, strict=False)
    print_main(f"weights from {path}; the head is {'kept' if head_fits else 'new'}, the optimizer starts anew")
