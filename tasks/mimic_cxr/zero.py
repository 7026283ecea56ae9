"""Training engine for DeepSpeed ZeRO.

Checkpoints contain full fp32 tensors, so a run can resume with any engine, ZeRO stage and number of processes.
"""

import contextlib
import importlib.util
import logging
import math
import os
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import distributed_utils as du
from utils.cli import InputError, read_config
from utils.engine import Engine

FLAG_KEYS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "scheduler",
)  # fmt: skip
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def is_installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def is_sharded(model: nn.Module) -> bool:
    """Return whether ZeRO-3 shards the weights; if it does, a forward pass is a collective operation."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def read_zero_config(path: str) -> dict:
    """Read a DeepSpeed config file and check its blocks zero_optimization, fp16 and bf16.

    Raises InputError if the file or one of these blocks is invalid, or if it sets a value that a script flag controls.
    """
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    config = read_config(path)
    for key in FLAG_KEYS:
        if config.pop(key, "auto") != "auto":
            raise InputError(f'{path}: {key}: is set by the script\'s flags; remove it, or write "auto"')
    blocks = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}
    for name, block in blocks.items():
        given = config.get(name, {})
        if not isinstance(given, dict):
            raise InputError(f"{path}: {name}: must be a block {{...}}; correct the file")
        try:
            block(**{key: value for key, value in given.items() if value != "auto"})
        except ValidationError as error:
            reason = error.errors()[0]
            key = ".".join([name, *map(str, reason["loc"])])
            raise InputError(f"{path}: {key}: {reason['msg']}; correct the file") from None
    if config.get("zero_optimization", {}).get("stage") not in (1, 2, 3):
        raise InputError(f"{path}: zero_optimization.stage: must be 1, 2 or 3; correct the file")
    return config


class ZeroEngine(Engine):
    # DeepSpeed's forward and backward passes contain collectives
    equal_passes = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: str,
        *args,
        config: dict,
        micro_batch_size: int,
        **options,
    ):
        self.precision, self.config, self.micro_batch_size = precision, config, micro_batch_size
        self.groups = optimizer.state_dict()["param_groups"]
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.parameters = [
            (names[parameter], parameter) for group in optimizer.param_groups for parameter in group["params"]
        ]
        # weights swapped in by put_weights(), or None
        self.replaced: dict[str, Tensor] | None = None
        super().__init__(model, optimizer, precision, *args, **options)

    def start(self, saved: dict | None) -> None:
        os.environ.setdefault("LOCAL_RANK", "0")
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        import deepspeed

        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # use gloo instead of DeepSpeed's shared-memory collectives, which need a C++ compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

        # copy the fp32 weights, because DeepSpeed rounds them before it creates its fp32 master weights
        weights = {name: parameter.detach().float().cpu().clone() for name, parameter in self.parameters}
        self.wrapped, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=self.filled_config(), dist_init_required=False
        )
        self._load(weights, saved["optimizer"]["state"] if saved else {})
        scaler = getattr(self.wrapped.optimizer, "loss_scaler", None)
        scales = saved["scaler"] if saved else {}
        for name in SCALER:
            # torch's GradScaler saves the loss scale as "scale", and none of DeepSpeed's other values
            value = scales.get(name, scales.get("scale") if name == "cur_scale" else None)
            if value is not None and hasattr(scaler, name):
                setattr(scaler, name, value)

    def filled_config(self) -> dict:
        # fp16 and bf16 are set below, and the script implements activation checkpointing itself
        replaced = ("fp16", "bf16", "activation_checkpointing")
        config = {key: value for key, value in self.config.items() if key not in replaced}
        config |= {
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            # no accumulation in DeepSpeed: around_micro_batch() marks the last micro-batch of a step
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0 if self.grad_clip == math.inf else self.grad_clip,
            # use torch's AdamW, because DeepSpeed's AdamW does not resume bit for bit
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 40,
        }
        if self.precision != "no":
            block = self.config.get(self.precision, {})
            config[self.precision] = {key: value for key, value in block.items() if value != "auto"}
            config[self.precision]["enabled"] = True
            if self.precision == "bf16":
                config["bf16"]["check_grad_overflow"] = True
        return config

    def close(self) -> None:
        if self.wrapped is not self.model:
            # without destroy(), DeepSpeed's hooks would keep the model in memory
            self.wrapped.destroy()
            self.wrapped = self.model

    @contextlib.contextmanager
    def around_micro_batch(self, last: bool) -> Iterator[None]:
        self.wrapped.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        # undo DeepSpeed's averaging over the ranks
        self.wrapped.backward(loss * (gradient * du.world()[1]), scale_wrt_gas=False)

    def update(self, lr: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.wrapped.step()
        return torch.as_tensor(self.wrapped.get_global_grad_norm(), device=self.device).float()

    def weights(self) -> dict[str, Tensor]:
        if self.replaced is not None:
            return self.replaced
        from deepspeed.utils import safe_get_full_fp32_param

        buffers = {name: value for name, value in self.model.named_buffers() if name in self.model.state_dict()}
        full = {name: safe_get_full_fp32_param(parameter) for name, parameter in self.parameters}
        return buffers | {name: value.detach().float().cpu() for name, value in full.items()}

    def state(self) -> dict:
        """Return the optimizer state in the format of torch's AdamW, and the state of the loss scaler.

        Call on all ranks. On ranks other than 0, AdamW's moments are None.
        """
        from deepspeed.utils import safe_get_full_optimizer_state

        step = float(next(iter(self.optimizer.state.values()))["step"])
        state = {}
        for number, (_, parameter) in enumerate(self.parameters):
            state[number] = {"step": torch.tensor(step)}
            for key in MOMENTS:
                value = safe_get_full_optimizer_state(parameter, key)
                state[number][key] = value.detach().float().cpu() if du.world()[0] == 0 else None
        scaler, scale = getattr(self.wrapped.optimizer, "loss_scaler", None), self.scaler.state_dict()
        if scale:
            scale |= {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)}
            scale["scale"] = float(scaler.cur_scale)
        return {"optimizer": {"state": state, "param_groups": self.groups}, "scaler": scale}

    def _load(self, weights: dict[str, Tensor], state: dict) -> None:
        zero = self.wrapped.optimizer
        step = state[0]["step"] if state else torch.tensor(0.0)
        # the optimizer state of every parameter group must exist before DeepSpeed links it to the parameters
        for part in getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups:
            moments = {key: torch.zeros_like(part) for key in MOMENTS}
            self.optimizer.state[part] = moments | {"step": step.clone().to(part.device)}
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._lazy_init_hp_params_optimizer_state()
        for number, (name, parameter) in enumerate(self.parameters):
            _write_shard(parameter, weights[name], None)
            for key in MOMENTS if state else ():
                _write_shard(parameter, state[number][key], key)

    def put_weights(self, weights: dict[str, Tensor]) -> None:
        import deepspeed

        self.replaced = weights
        with torch.no_grad():
            for name, parameter in self.parameters:
                split = hasattr(parameter, "ds_id")
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=split):
                    if not split or du.world()[0] == 0:
                        parameter.copy_(weights[name])
            for name, buffer in self.model.named_buffers():
                if name in weights:
                    buffer.copy_(weights[name])


def _write_shard(parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
    from deepspeed import utils as deepspeed

    if not hasattr(parameter, "ds_id"):
        # in ZeRO stages 1 and 2, DeepSpeed selects this rank's shard itself
        value = value.to(parameter.device)
        if key:
            deepspeed.safe_set_full_optimizer_state(parameter, value, key)
        else:
            deepspeed.safe_set_full_fp32_param(parameter, value)
        return
    # ZeRO stage 3 splits the flattened tensor into equal shards and pads the last shard
    length = parameter.ds_tensor.numel()
    flat = torch.zeros(length * dist.get_world_size(), dtype=torch.float32)
    flat[: value.numel()] = value.flatten()
    part = flat.narrow(0, length * dist.get_rank(), length).to(parameter.ds_tensor.device)
    if key:
        deepspeed.safe_set_local_optimizer_state(parameter, part, key)
    else:
        deepspeed.safe_set_local_fp32_param(parameter, part)
