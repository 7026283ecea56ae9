"""The two checkpoints that PRS-Med starts from: found, loaded, prepared for training, and told from others."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from old.cli_utils import InputError
from old.distributed_utils import Ranks, gather_objects, wrap_in_ddp
from old.hardware_utils import out_of_memory
from old.phase_utils import doing
from tasks.prs_med.reader import PixelStatistics, Reader

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# the projections of the language model that LoRA changes
LORA_TARGETS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
NO_VLM = (
    "download a LLaVA-format model (such as chaoyinshe/llava-med-v1.5-mistral-7b-hf) and give its folder as --vlm_path"
)
NO_SAM = "download a SAM-format model (such as flaviagiammarino/medsam-vit-base) and give its folder as --sam_path"


class Source(NamedTuple):
    """A pretrained checkpoint: its folder or its name on the hub, and its model type."""

    path: str
    kind: str


def find_vlm(root: Path, given: str | None) -> Source:
    """The LLaVA-format checkpoint given, or the one found in a folder of the data root. Raises InputError."""
    return find_pretrained(root, given, ("llava",), NO_VLM)


def find_sam(root: Path, given: str | None) -> Source:
    """The SAM-format checkpoint given, or the one found in a folder of the data root. Raises InputError."""
    return find_pretrained(root, given, ("sam", "sam_vision_model"), NO_SAM)


def find_pretrained(root: Path, given: str | None, kinds: tuple[str, ...], advice: str) -> Source:
    """The checkpoint given, or the first of these kinds in a folder of the data root. Raises InputError with advice."""
    if given is None:
        configs = root.glob("*/config.json")
        for file in sorted(configs):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                config = json.loads(file.read_text())
                kind = config.get("model_type")
                if kind in kinds:
                    return Source(str(file.parent), kind)
        raise InputError(f"{root}: no {kinds[0]} checkpoint in a folder of it; {advice}")

    from transformers import PretrainedConfig

    try:
        if not Path(given).exists() and given.count("/") != 1:
            raise OSError("no such folder")
        config, _ = PretrainedConfig.get_config_dict(given)
        kind = config.get("model_type")
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0][:150]
        raise InputError(f"{given}: cannot be loaded ({reason}); {advice}") from None
    if kind not in kinds:
        raise InputError(f"{given}: is a {kind!r} checkpoint, not {' or '.join(kinds)}; {advice}")
    return Source(given, kind)


@contextlib.contextmanager
def explain_loading(path: str) -> Iterator[None]:
    """Around the loading of a checkpoint: InputError for what goes wrong, unless memory runs out."""
    from transformers import utils

    utils.logging.set_verbosity_error()
    utils.logging.disable_progress_bar()
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = str(error).splitlines()[0][:150] if str(error) else type(error).__name__
        raise InputError(f"{path}: checkpoint cannot be loaded ({reason}); download it again") from None


@doing("loading the language model")
def load_vlm(source: Source, precision: str, device: torch.device) -> nn.Module:
    """The vision language model in the precision of the run. Raises InputError."""
    from transformers import LlavaForConditionalGeneration

    # a GPU is loaded directly, so that a host does not hold a 7B model for each of its ranks
    place = {"device_map": {"": device}} if device.type == "cuda" else {}
    with explain_loading(source.path):
        return LlavaForConditionalGeneration.from_pretrained(source.path, dtype=DTYPES[precision], **place)


@doing("loading the image encoder")
def load_sam(source: Source, image_size: int | None) -> nn.Module:
    """SAM's vision encoder in fp32 for images of so many pixels a side, None for its own size. Raises InputError."""
    from transformers import SamModel, SamVisionModel

    kinds = {"sam": SamModel, "sam_vision_model": SamVisionModel}
    with explain_loading(source.path):
        encoder = kinds[source.kind].from_pretrained(source.path, dtype=torch.float32).vision_encoder
    resize_encoder(encoder, image_size or encoder.config.image_size)
    return encoder


def resize_encoder(encoder: nn.Module, size: int) -> None:
    """Let SAM's encoder take images of another size; the relative positions it adapts by itself. Raises InputError."""
    patch = encoder.config.patch_size
    side = size // patch
    if size % patch:
        nearest = side * patch or patch
        raise InputError(f"--image_size {size}: not a multiple of the encoder's patch; try {nearest}")

    if size != encoder.config.image_size and encoder.pos_embed is not None:
        positions = encoder.pos_embed.data.permute(0, 3, 1, 2)
        positions = F.interpolate(positions, (side, side), mode="bicubic")
        encoder.pos_embed = nn.Parameter(positions.permute(0, 2, 3, 1).contiguous())
    encoder.patch_embed.image_size = (size, size)


def load_reader(vlm_path: str, sam_path: str, vlm: nn.Module, image_size: int) -> Reader:
    """The tokenizer, the sizes and the normalisations that belong to both checkpoints. Raises InputError."""
    from transformers import AutoTokenizer

    with explain_loading(vlm_path):
        tokenizer = AutoTokenizer.from_pretrained(vlm_path)
        vlm_statistics = read_statistics(vlm_path)
    with explain_loading(sam_path):
        sam_statistics = read_statistics(sam_path)
    return Reader(
        tokenizer=tokenizer,
        image_token=vlm.config.image_token_id,
        image_tokens=count_image_tokens(vlm),
        image_size=image_size,
        vlm_size=vlm.config.vision_config.image_size,
        statistics={"vlm": vlm_statistics, "sam": sam_statistics},
    )


def read_statistics(path: str) -> PixelStatistics:
    """The mean and the standard deviation that a checkpoint's image processor normalises by."""
    from transformers.image_processing_base import ImageProcessingMixin

    settings, _ = ImageProcessingMixin.get_image_processor_dict(path)
    mean = settings.get("image_mean", [0.0, 0.0, 0.0])
    std = settings.get("image_std", [1.0, 1.0, 1.0])
    return PixelStatistics(mean, std)


@torch.no_grad()
def count_image_tokens(vlm: nn.Module) -> int:
    """How many tokens the VLM makes of an image; that depends on the kind of its vision tower, so it is tried."""
    side = vlm.config.vision_config.image_size
    blank = torch.zeros(1, 3, side, side, dtype=vlm.dtype, device=vlm.device)
    features = vlm.model.get_image_features(pixel_values=blank, return_dict=True).pooler_output
    return len(features[0])


def add_lora(vlm: nn.Module, rank: int, alpha: float, dropout: float) -> nn.Module:
    """The VLM with LoRA matrices in its language model; they are fp32, and all the rest is frozen."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=LORA_TARGETS)
    vlm = inject_adapter_in_model(config, vlm)
    for module in vlm.modules():
        # or each LoRA layer keeps an fp32 copy of its input, which autocast lowers again
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
    for name, parameter in vlm.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return vlm


# --- which base it is -------------------------------------------------------------------------------------------------


def fingerprint(model: nn.Module) -> torch.Tensor:
    """fp32 vector of up to 16 values of every frozen tensor, which tell one base from another in any precision."""
    values = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            flat = parameter.detach().flatten()
            count = min(16, len(flat))
            places = torch.arange(count) * (len(flat) - 1) // 15
            places = places.to(flat.device)
            values.append(flat[places].float().cpu())
    return torch.cat(values)


def check_same_base(own: torch.Tensor) -> None:
    """All ranks: InputError unless all have loaded the same frozen weights, which DDP does not send to them."""
    for other in gather_objects(own):
        if other.numpy().tobytes() != own.numpy().tobytes():
            raise InputError("--vlm_path: the processes have loaded different weights; give every node the same files")


def check_base(saved: dict, own: torch.Tensor) -> None:
    """InputError where a checkpoint's base (`saved`) is not the one loaded, whose fingerprint is `own`."""
    theirs = saved["fingerprint"]
    same = theirs.shape == own.shape
    # bf16 has 7 bits of mantissa, and a base may have been loaded in it
    same = same and torch.allclose(theirs, own, rtol=2**-7, atol=1e-6, equal_nan=True)
    if not same:
        name = saved["name"]
        raise InputError(f"--vlm_path: not the base that the checkpoint was trained on ({name}); give that one")


class Architecture(NamedTuple):
    """The flags that make the model; None where neither a flag nor a checkpoint has said."""

    lora_rank: int | None
    lora_alpha: float | None
    image_size: int | None


def choose_architecture(asked: Architecture, base: dict | None) -> Architecture:
    """As the flags ask, else as in a checkpoint's base, else by default. Raises InputError where these two differ."""
    if base is None:
        return asked._replace(lora_rank=asked.lora_rank or 16, lora_alpha=asked.lora_alpha or 16.0)
    for name, value in asked._asdict().items():
        if value not in (None, base[name]):
            trained = f"trained with --{name} {base[name]}"
            raise InputError(f"--resume_from: checkpoint of another model, {trained}; give that")
    return Architecture(base["lora_rank"], base["lora_alpha"], base["image_size"])


def wrap_model(model: nn.Module, ranks: Ranks, sharded: bool) -> nn.Module:
    """DDP around the model where there are several processes; sharded: they share its frozen weights out."""
    if ranks.world_size == 1:
        return model
    if sharded:
        from tasks.prs_med.sharding import shard_base

        shard_base(model)
    # or rank 0 would send all 14 GB of frozen weights to the others, who have loaded the same file
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
    return wrap_in_ddp(model, ranks.device)
