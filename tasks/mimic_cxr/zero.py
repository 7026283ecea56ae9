"""DeepSpeed ZeRO as the engine of a run, with the same AdamW and the same checkpoints as torch's own.

A checkpoint holds full fp32 tensors by name, gathered from whatever stage: any engine resumes it, at any number of
processes, and no pickle of DeepSpeed's is ever loaded.
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

# what the command line owns
OWNED = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "scheduler",
)  # fmt: skip
# what AdamW keeps of each parameter, beside the step
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def is_installed() -> bool:
    """Whether DeepSpeed is there; found, not imported, which takes seconds."""
    return importlib.util.find_spec("deepspeed") is not None


def is_split(model: nn.Module) -> bool:
    """Whether the model's weights are shared out over the ranks (ZeRO-3), so that all make equally many passes."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def read_zero_config(path: str) -> dict:
    """A JSON for DeepSpeed as a dict. Raises InputError where it says what the flags say, or has no ZeRO stage.

    DeepSpeed's own checks follow when it starts.
    """
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    config = read_config(path)
    for key in OWNED:
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
    """An engine that shares out gradients, optimizer state and, in stage 3, weights over the ranks."""

    # each pass exchanges something, so all ranks make equally many
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
        """config: of read_zero_config(). micro_batch_size: samples of one forward pass. The rest as of Engine."""
        self.precision, self.config, self.micro_batch_size = precision, config, micro_batch_size
        self.groups = optimizer.state_dict()["param_groups"]
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.parameters = [
            (names[parameter], parameter) for group in optimizer.param_groups for parameter in group["params"]
        ]
        # weights that replace those of the training in the model, see put_weights
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
        # its shared-memory collectives on a CPU want a C++ compiler at the first start; gloo does the same
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

        # DeepSpeed rounds the weights to half precision before it copies them to its fp32 masters
        weights = {name: parameter.detach().float().cpu().clone() for name, parameter in self.parameters}
        self.wrapped, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=self.filled_config(), dist_init_required=False
        )
        self._fill(weights, saved["optimizer"]["state"] if saved else {})
        scaler = getattr(self.wrapped.optimizer, "loss_scaler", None)
        scales = saved["scaler"] if saved else {}
        for name in SCALER:
            # torch's own has a scale alone
            value = scales.get(name, scales.get("scale") if name == "cur_scale" else None)
            if value is not None and hasattr(scaler, name):
                setattr(scaler, name, value)

    def filled_config(self) -> dict:
        """The config with what DeepSpeed wants to be told beside it."""
        config = {key: value for key, value in self.config.items() if key not in ("fp16", "bf16")}
        # a step ends where around_micro_batch() says so
        config |= {"train_micro_batch_size_per_gpu": self.micro_batch_size, "gradient_accumulation_steps": 1}
        config |= {"gradient_clipping": 0.0 if self.grad_clip == math.inf else self.grad_clip}
        # torch's AdamW resumes bit for bit, DeepSpeed's own does not
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        config |= {"steps_per_print": 1 << 40}
        if self.precision != "no":
            block = self.config.get(self.precision, {})
            config[self.precision] = {key: value for key, value in block.items() if value != "auto"}
            config[self.precision] |= {"enabled": True}
            if self.precision == "bf16":
                config["bf16"]["check_grad_overflow"] = True
        # the script recomputes its activations itself
        config.pop("activation_checkpointing", None)
        return config

    def close(self) -> None:
        if self.wrapped is not self.model:
            # its hooks hold the model in cycles
            self.wrapped.destroy()
            self.wrapped = self.model

    @contextlib.contextmanager
    def around_micro_batch(self, last: bool) -> Iterator[None]:
        self.wrapped.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        # DeepSpeed averages over the ranks, so undo the division
        self.wrapped.backward(loss * (gradient * du.world()[1]), scale_wrt_gas=False)

    def update(self, lr: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.wrapped.step()
        return torch.as_tensor(self.wrapped.get_global_grad_norm(), device=self.device).float()

    # --- whole tensors out of the parts, and back into them -----------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        if self.replaced is not None:
            return self.replaced
        from deepspeed.utils import safe_get_full_fp32_param

        buffers = {name: value for name, value in self.model.named_buffers() if name in self.model.state_dict()}
        full = {name: safe_get_full_fp32_param(parameter) for name, parameter in self.parameters}
        return buffers | {name: value.detach().float().cpu() for name, value in full.items()}

    def state(self) -> dict:
        """What torch.optim.AdamW.state_dict() would say, on rank 0; the others get None for each tensor."""
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
            # in torch's words, beside DeepSpeed's own
            scale |= {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)}
            scale["scale"] = float(scaler.cur_scale)
        return {"optimizer": {"state": state, "param_groups": self.groups}, "scaler": scale}

    def _fill(self, weights: dict[str, Tensor], state: dict) -> None:
        """Put full weights and AdamW's state, {} of a new one, into this rank's parts."""
        zero = self.wrapped.optimizer
        step = state[0]["step"] if state else torch.tensor(0.0)
        # DeepSpeed links parameters and state after the first group's first step, when the second group has none yet
        for part in getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups:
            moments = {key: torch.zeros_like(part) for key in MOMENTS}
            self.optimizer.state[part] = moments | {"step": step.clone().to(part.device)}
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._lazy_init_hp_params_optimizer_state()
        for number, (name, parameter) in enumerate(self.parameters):
            _put(parameter, weights[name], None)
            for key in MOMENTS if state else ():
                _put(parameter, state[number][key], key)

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


def _put(parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
    """This rank's part of a whole fp32 tensor, into DeepSpeed's master weights (key None) or its optimizer state."""
    from deepspeed import utils as deepspeed

    if not hasattr(parameter, "ds_id"):
        # stages 1 and 2 take the part by themselves
        value = value.to(parameter.device)
        if key:
            deepspeed.safe_set_full_optimizer_state(parameter, value, key)
        else:
            deepspeed.safe_set_full_fp32_param(parameter, value)
        return
    # stage 3 cuts a flat tensor into equal parts, and pads the last rank's
    length = parameter.ds_tensor.numel()
    flat = torch.zeros(length * dist.get_world_size(), dtype=torch.float32)
    flat[: value.numel()] = value.flatten()
    part = flat.narrow(0, length * dist.get_rank(), length).to(parameter.ds_tensor.device)
    if key:
        deepspeed.safe_set_local_optimizer_state(parameter, part, key)
    else:
        deepspeed.safe_set_local_fp32_param(parameter, part)
