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
from torch import nn

from cli_utils import InputError, read_config

OWNED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
KNOWN = (
    *OWNED, "zero_optimization", "fp16", "bf16", "activation_checkpointing", "communication_data_type", "data_types",
    "prescale_gradients", "gradient_predivide_factor", "wall_clock_breakdown", "steps_per_print", "comms_logger",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "flops_profiler", "aio",
)  # fmt: skip


def available() -> bool:
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
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (1, 2, 3):
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
            where = ".".join(map(str, (name, *first["loc"])))
            raise InputError(f"{path}: {where}: {first['msg']}; correct the file") from None


def fill_config(config: dict, path: str, micro_batch: int, accumulation: int, grad_clip: float, precision: str) -> dict:
    """`config` with what the command line owns filled in: the micro batch and the accumulation, never their product.

    A value in the file may be "auto" or the same; another one is an InputError, as no one could tell which was meant.
    """
    own = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation}
    own["gradient_clipping"] = grad_clip
    for key, value in own.items():
        if config.get(key, "auto") not in ("auto", value):
            raise InputError(f'{path}: {key}: {config[key]}, but the run has {value:g}; write "auto" there')
    if config.get("train_batch_size", "auto") != "auto":
        raise InputError(f'{path}: train_batch_size: follows from the flags; write "auto" there or remove it')
    for name in ("fp16", "bf16"):
        enabled = config.get(name, {}).get("enabled", "auto")
        if enabled != "auto" and enabled != (precision == name):
            text = f"{str(enabled).lower()}, but --mixed_precision is {precision}"
            raise InputError(f'{path}: {name}.enabled: {text}; write "auto" there, or give --mixed_precision')
    filled = {k: v for k, v in config.items() if k not in (*OWNED, "fp16", "bf16", "activation_checkpointing")} | own
    # torch's AdamW resumes bit for bit, DeepSpeed's own does not
    filled |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 1 << 40}
    if precision != "no":
        block = {k: v for k, v in config.get(precision, {}).items() if v != "auto"} | {"enabled": True}
        filled[precision] = block | ({"check_grad_overflow": True} if precision == "bf16" else {})
    return filled


def start_engine(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict):
    """deepspeed.initialize in the process group that is there already."""
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it; plain python and srun do not set it
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # its shared-memory collectives on CPU want a C++ compiler at the first start; gloo does the same
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All ranks call it: fp32 tensors of all parameters and buffers, masters where the weights are half precision.

    Collects from DDP's or DeepSpeed's module alike; every rank gets the whole. What DeepSpeed holds in parts is put
    together on the CPU; the others are the module's own tensors, which training goes on to change.
    """
    from_engine = [hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in model.parameters()]
    weights = {name: value.detach() for name, value in model.named_buffers()}
    persistent = model.state_dict().keys()
    for (name, parameter), special in zip(model.named_parameters(), from_engine, strict=True):
        if special:
            weights[name] = _full(parameter).float().cpu().clone()
        else:
            weights[name] = parameter.detach().float()
    return {name: value for name, value in weights.items() if name in persistent}


def _full(parameter: nn.Parameter) -> torch.Tensor:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if (value := safe_get_full_fp32_param(parameter)) is not None:
        return value
    with deepspeed.zero.GatheredParameters([parameter]):  # frozen, in ZeRO-3
        return parameter.detach().clone()


def put_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
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


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.AdamW) -> dict:
    """All ranks call it: {"step": n, "exp_avg": {name: fp32 tensor}, "exp_avg_sq": {...}} of AdamW, as full_weights."""
    state = next((s for s in optimizer.state.values() if s), None)
    if state is None:
        return {"step": 0, "exp_avg": {}, "exp_avg_sq": {}}
    full = {"step": int(state["step"])}
    for key in ("exp_avg", "exp_avg_sq"):
        full[key] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
                    from deepspeed.utils import safe_get_full_optimizer_state

                    value = safe_get_full_optimizer_state(parameter, key).detach().float().cpu().clone()
                else:
                    value = optimizer.state[parameter][key].detach().float()
                full[key][name] = value
    return full


def restore_optimizer(model: nn.Module, optimizer: torch.optim.AdamW, engine, weights: dict, saved: dict) -> None:
    """Put what full_weights and full_optimizer_state gave into a plain AdamW, or into the partitions of an engine.

    engine: None for DDP, whose module was given `weights` before.
    """
    if engine is None:
        if saved["step"]:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    like = torch.empty_like(parameter, dtype=torch.float32)  # also its memory format
                    state = {key: like.clone().copy_(saved[key][name]) for key in ("exp_avg", "exp_avg_sq")}
                    step = torch.tensor(float(saved["step"]), device=parameter.device)
                    optimizer.state[parameter] = state | {"step": step}
        return
    zero = engine.optimizer
    partitions = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
    if saved["step"]:
        for partition in partitions:
            state = {key: torch.zeros_like(partition) for key in ("exp_avg", "exp_avg_sq")}
            step = torch.tensor(float(saved["step"]), device=partition.device)
            optimizer.state[partition] = state | {"step": step}
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._lazy_init_hp_params_optimizer_state()  # else done by its first step
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _put(parameter, weights[name], None)
            for key in ("exp_avg", "exp_avg_sq") if saved["step"] else ():
                _put(parameter, saved[key][name], key)


def _put(parameter: nn.Parameter, value: torch.Tensor, key: str | None) -> None:
    """This rank's part of a whole fp32 tensor, into DeepSpeed's master weights (key None) or optimizer state."""
    from deepspeed import utils as ds

    if not hasattr(parameter, "ds_id"):
        value = value.to(parameter.device)
        if key:
            ds.safe_set_full_optimizer_state(parameter, value, key)
        else:
            ds.safe_set_full_fp32_param(parameter, value)
        return
    own = parameter.ds_tensor.numel()  # ZeRO-3 pads the last rank's part
    flat = torch.zeros(own * dist.get_world_size(), dtype=torch.float32)
    flat[: value.numel()] = value.flatten()
    part = flat[own * dist.get_rank() : own * (dist.get_rank() + 1)].to(parameter.ds_tensor.device)
    if key:
        ds.safe_set_local_optimizer_state(parameter, part, key)
    else:
        ds.safe_set_local_fp32_param(parameter, part)


SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def scaler_state(engine) -> dict:
    """DeepSpeed's loss scaler (fp16) as numbers."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {name: getattr(scaler, name) for name in SCALER_FIELDS if hasattr(scaler, name)}


def restore_scaler(engine, saved: dict) -> None:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    for name, value in saved.items():
        if name in SCALER_FIELDS and hasattr(scaler, name):
            setattr(scaler, name, value)


def describe(config: dict) -> str:
    """`ZeRO-2, optimizer on the CPU` for the banner."""
    zero = config.get("zero_optimization", {})
    parts = [f"ZeRO-{zero.get('stage', 0)}"]
    for key, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        if zero.get(key, {}).get("device") not in (None, "none"):
            parts.append(f"{what} on the {zero[key]['device'].upper()}")
    return ", ".join(parts)
