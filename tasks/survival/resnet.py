"""MONAI's 3D ResNet with what it lacks: group norm everywhere, and shortcuts of type A that pass the gradient."""

import torch
from torch import nn

from old.fixed_order_utils import MaxPool3d
from old.hardware_utils import GroupNorm
from tasks.survival.weights import Weights

# of MedicalNet's models, those with shortcuts of type A
TYPE_A = ("resnet10", "resnet18", "resnet34")


class PaddedShortcut(nn.Module):
    """MedicalNet's shortcut of type A: every second voxel, new channels zero. MONAI's own cuts the gradient here."""

    def __init__(self, planes: int, stride: int):
        super().__init__()
        self.planes = planes
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[..., :: self.stride, :: self.stride, :: self.stride]
        new_channels = self.planes - x.shape[1]
        return nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 0, new_channels))


def shortcut_type(name: str, start: Weights | None) -> str:
    """The shortcuts that weights to start from need: MedicalNet's type A has no `downsample` among its names."""
    if start is None or name not in TYPE_A:
        return "B"
    return "B" if any("downsample" in weight for weight in start.tensors) else "A"


def make_backbone(name: str, base_channels: int, norm: str, shortcut: str) -> nn.Module:
    """MONAI's ResNet of this name without a head. norm: group or batch. shortcut: A or B."""
    from monai.networks import nets

    resnet = getattr(nets, name)
    backbone = resnet(
        spatial_dims=3,
        n_input_channels=1,
        feed_forward=False,
        bias_downsample=False,
        shortcut_type=shortcut,
        widen_factor=base_channels / 64,
    )
    backbone.maxpool = MaxPool3d(kernel_size=3, stride=2, padding=1)
    if norm == "group":
        use_group_norm(backbone)
    if shortcut == "A":
        use_padded_shortcuts(backbone)
    return backbone


def use_group_norm(backbone: nn.Module) -> None:
    """Group instead of batch normalization everywhere: MONAI's `norm` argument reaches the first layer only."""
    for module in list(backbone.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm3d):
                setattr(module, name, GroupNorm(8, child.num_features))


def use_padded_shortcuts(backbone: nn.Module) -> None:
    """MedicalNet's shortcuts, which have a gradient, in place of MONAI's."""
    for stage in (backbone.layer1, backbone.layer2, backbone.layer3, backbone.layer4):
        shortcut = stage[0].downsample
        if shortcut is not None:
            stage[0].downsample = PaddedShortcut(shortcut.keywords["planes"], shortcut.keywords["stride"])
