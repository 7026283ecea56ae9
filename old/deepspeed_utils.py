"""DeepSpeed as an engine for a plain module and torch.optim.AdamW: its JSON checked, its state as plain tensors.

Checkpoints hold full fp32 tensors by parameter name, gathered from whatever ZeRO stage: the same file resumes under
DDP, ZeRO-1/2/3, with or without offload, at any world size, and no DeepSpeed pickle is ever loaded.
"""

import importlib.util
import logging
import os
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from old.cli_utils import InputError, read_config
from old.phase_utils import doing

# What the command line owns.
OWNED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
# The keys of a file that DeepSpeed reads.
KNOWN = (
    *OWNED,
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    # How numbers are stored and exchanged.
    "fp16",
    "bf16",
    "data_types",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    # The rest.
    "activation_checkpointing",
    "aio",
    "comms_logger",
    "flops_profiler",
    "steps_per_print",
    "wall_clock_breakdown",
)
# What AdamW keeps of each parameter, beside the step.
MOMENTS = ("exp_avg", "exp_avg_sq")


def available() -> bool:
    """Whether DeepSpeed is installed."""
    return importlib.util.find_spec("deepspeed") is not None


def read_deepspeed_config(path: str) -> dict:
    """The JSON of --deepspeed_config. DeepSpeed accepts an unknown key silently: here it is an InputError."""
    config = read_config(path)
    for key in config:
        if key in ("optimizer", "scheduler"):
            raise InputError(f"{path}: {key}: is set by the script's own flags; remove it from the file")
        if key not in KNOWN:
            raise InputError(f"{path}: unknown key {key!r}; DeepSpeed would ignore it, correct the file")

    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3):
        raise InputError(f"{path}: zero_optimization: stage must be 1, 2 or 3; correct the file")
    for name in ("fp16", "bf16", "activation_checkpointing"):
        if not isinstance(config.get(name, {}), dict):
            raise InputError(f"{path}: {name}: must be a block {{...}}; correct the file")
    check_blocks(config, path)
    return config


def check_blocks(config: dict, path: str) -> None:
    """DeepSpeed's own check of its blocks, before anything is built. Raises InputError naming the key."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    blocks = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}
    for name, block in blocks.items():
        try:
            block(**config.get(name, {}))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join([name, *(str(part) for part in first["loc"])])
            raise InputError(f"{path}: {key}: {first['msg']}; correct the file") from None


def fill_config(config: dict, path: str, micro_batch: int, accumulation: int, grad_clip: float, precision: str) -> dict:
    """`config` with what the command line owns filled in: the micro batch and the accumulation, never their product.

    A value in the file may be "auto" or the same; another one is an InputError, as no one could tell which was meant.
    """
    own = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": grad_clip,
    }
    check_owned(config, path, own, precision)

    # What decides the precision is filled in anew.
    left_out = (*OWNED, "fp16", "bf16", "activation_checkpointing")
    filled = {key: value for key, value in config.items() if key not in left_out}
    filled |= own

    # torch's AdamW resumes bit for bit, DeepSpeed's own does not.
    filled["zero_allow_untested_optimizer"] = True
    filled["zero_force_ds_cpu_optimizer"] = False
    filled["steps_per_print"] = 1 << 40

    if precision != "no":
        given = config.get(precision, {})
        block = {key: value for key, value in given.items() if value != "auto"}
        block["enabled"] = True
        if precision == "bf16":
            block["check_grad_overflow"] = True
        filled[precision] = block
    return filled


def check_owned(config: dict, path: str, own: dict, precision: str) -> None:
    """InputError where the file says another value than the command line."""
    for key, value in own.items():
        if config.get(key, "auto") not in ("auto", value):
            raise InputError(f'{path}: {key}: {config[key]}, but the run has {value:g}; write "auto" there')
    if config.get("train_batch_size", "auto") != "auto":
        raise InputError(f'{path}: train_batch_size: follows from the flags; write "auto" there or remove it')
    for name in ("fp16", "bf16"):
        enabled = config.get(name, {}).get("enabled", "auto")
        if enabled != "auto" and enabled != (precision == name):
            reason = f"{str(enabled).lower()}, but --mixed_precision is {precision}"
            raise InputError(f'{path}: {name}.enabled: {reason}; write "auto" there, or give --mixed_precision')


@doing("starting DeepSpeed")
def start_engine(model: nn.Module, optimizer: Optimizer, config: dict):
    """deepspeed.initialize in the process group that is there already."""
    # DeepSpeed insists on it; plain python and srun do not set it.
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

    # Its shared-memory collectives on CPU want a C++ compiler at the first start; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


# --- whole tensors out of an engine -----------------------------------------------------------------------------------


def belongs_to_engine(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed holds this parameter, or its master, in parts (ZeRO-3 or ZeRO-1 and 2)."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """All ranks call it: fp32 tensors of all parameters and buffers, masters where the weights are half precision.

    Collects from DDP's or DeepSpeed's module alike; every rank gets the whole. What DeepSpeed holds in parts is put
    together on the CPU; the others are the module's own tensors, which training goes on to change.
    """
    weights = {name: value.detach() for name, value in model.named_buffers()}
    for name, parameter in model.named_parameters():
        if belongs_to_engine(parameter):
            weights[name] = _full(parameter).float().cpu().clone()
        else:
            weights[name] = parameter.detach().float()
    persistent = model.state_dict().keys()
    return {name: value for name, value in weights.items() if name in persistent}


def _full(parameter: nn.Parameter) -> Tensor:
    """All ranks call it: the whole of a parameter that DeepSpeed holds in parts."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    value = safe_get_full_fp32_param(parameter)
    if value is not None:
        return value

    # A frozen parameter has no master.
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def put_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """All ranks call it: overwrite the weights that forward passes use (for an evaluation; the optimizer keeps its)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "ds_id"):
                import deepspeed

                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    if dist.get_rank() == 0:
                        parameter.copy_(weights[name])
            else:
                parameter.copy_(weights[name])
        for name, buffer in model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])


def full_optimizer_state(model: nn.Module, optimizer: AdamW) -> dict:
    """All ranks call it: {"step": n, "exp_avg": {name: fp32 tensor}, "exp_avg_sq": {...}} of AdamW, as full_weights."""
    state = next((state for state in optimizer.state.values() if state), None)
    if state is None:
        return {"step": 0, "exp_avg": {}, "exp_avg_sq": {}}

    full = {"step": int(state["step"])}
    for key in MOMENTS:
        full[key] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                full[key][name] = _full_moment(parameter, optimizer, key)
    return full


def _full_moment(parameter: nn.Parameter, optimizer: AdamW, key: str) -> Tensor:
    """All ranks call it: the whole of one of AdamW's moments in fp32."""
    if not belongs_to_engine(parameter):
        return optimizer.state[parameter][key].detach().float()

    from deepspeed.utils import safe_get_full_optimizer_state

    value = safe_get_full_optimizer_state(parameter, key)
    return value.detach().float().cpu().clone()


# --- and back into one ------------------------------------------------------------------------------------------------


def restore_optimizer(model: nn.Module, optimizer: AdamW, engine, weights: dict, saved: dict) -> None:
    """Put what full_weights and full_optimizer_state gave into a plain AdamW, or into the partitions of an engine.

    engine: None for DDP, whose module was given `weights` before.
    """
    if engine is not None:
        _restore_partitions(model, optimizer, engine, weights, saved)
    elif saved["step"]:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                optimizer.state[parameter] = _plain_state(parameter, name, saved)


def _plain_state(parameter: nn.Parameter, name: str, saved: dict) -> dict[str, Tensor]:
    """AdamW's state of one parameter, in its memory format."""
    step = float(saved["step"])
    state = {"step": torch.tensor(step, device=parameter.device)}
    for key in MOMENTS:
        moment = torch.empty_like(parameter, dtype=torch.float32)
        state[key] = moment.copy_(saved[key][name])
    return state


def _restore_partitions(model: nn.Module, optimizer: AdamW, engine, weights: dict[str, Tensor], saved: dict) -> None:
    """Put master weights and moments into this rank's partitions."""
    zero = engine.optimizer
    partitions = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups

    # DeepSpeed makes the state in its first step; what is put into it must be there before.
    if saved["step"]:
        for partition in partitions:
            state = {key: torch.zeros_like(partition) for key in MOMENTS}
            step = float(saved["step"])
            state["step"] = torch.tensor(step, device=partition.device)
            optimizer.state[partition] = state
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._lazy_init_hp_params_optimizer_state()

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _put(parameter, weights[name], None)
            if saved["step"]:
                for key in MOMENTS:
                    _put(parameter, saved[key][name], key)


def _put(parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
    """This rank's part of a whole fp32 tensor, into DeepSpeed's master weights (key None) or optimizer state."""
    from deepspeed import utils as deepspeed

    # ZeRO-1 and 2 take the part by themselves.
    if not hasattr(parameter, "ds_id"):
        value = value.to(parameter.device)
        if key:
            deepspeed.safe_set_full_optimizer_state(parameter, value, key)
        else:
            deepspeed.safe_set_full_fp32_param(parameter, value)
        return

    # ZeRO-3 cuts a flat tensor into equal parts, and pads the last rank's.
    length = parameter.ds_tensor.numel()
    flat = torch.zeros(length * dist.get_world_size(), dtype=torch.float32)
    flat[: value.numel()] = value.flatten()
    part = flat.narrow(0, length * dist.get_rank(), length)
    part = part.to(parameter.ds_tensor.device)
    if key:
        deepspeed.safe_set_local_optimizer_state(parameter, part, key)
    else:
        deepspeed.safe_set_local_fp32_param(parameter, part)


SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def scaler_state(engine) -> dict:
    """DeepSpeed's loss scaler (fp16) as numbers."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {name: getattr(scaler, name) for name in SCALER_FIELDS if hasattr(scaler, name)}


def restore_scaler(engine, saved: dict) -> None:
    """Put what scaler_state gave into an engine."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    for name, value in saved.items():
        if name in SCALER_FIELDS and hasattr(scaler, name):
            setattr(scaler, name, value)


def describe(config: dict) -> str:
    """`ZeRO-2, optimizer on the CPU` for the banner."""
    zero = config.get("zero_optimization", {})
    parts = [f"ZeRO-{zero.get('stage', 0)}"]
    offloaded = {"offload_optimizer": "optimizer", "offload_param": "parameters"}
    for key, name in offloaded.items():
        device = zero.get(key, {}).get("device")
        if device not in (None, "none"):
            parts.append(f"{name} on the {device.upper()}")
    return ", ".join(parts)
