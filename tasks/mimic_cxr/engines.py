"""Guide 1's two engines behind one face, torch (DDP, or one process) and DeepSpeed ZeRO, and which of them trains."""

import contextlib
import warnings

import torch
import torch.distributed as dist
from torch import nn

from old import deepspeed_utils
from old.checkpoint_utils import restore_scaler
from old.cli_utils import InputError
from old.distributed_utils import Ranks, world, wrap_in_ddp
from old.hardware_utils import choose_precision
from old.loop_utils import LossScaler, clip_and_step, sync_gradients
from old.memory_utils import BatchSize, copies_held
from tasks.mimic_cxr.flags import CONFIGS, ZERO_FILES


class TorchEngine:
    """One process, or DDP around the model. A step with a non-finite gradient is skipped without a GPU sync.

    `model` is what trains, and `module` the plain module inside.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        device: torch.device,
        precision: str,
        grad_clip: float,
    ):
        self.module = model
        self.model = model
        self.device = device
        self.optimizer = optimizer
        self.grad_clip = grad_clip
        self.scaler = LossScaler(device, precision)
        if world()[1] > 1:
            # depthwise kernels have two layouts at once
            warnings.filterwarnings("ignore", message="Grad strides do not match")
            self.model = wrap_in_ddp(model, device)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        """Around the forward and backward pass of one micro-batch: gradients are exchanged after the last only."""
        return sync_gradients(self.model, now=last)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self, lr: float) -> torch.Tensor:
        """Clip, step, clear; returns the gradient norm before clipping (non-finite: the step was skipped)."""
        return clip_and_step(self.optimizer, self.scaler, self.grad_clip, lr)

    def scaler_state(self) -> dict:
        return self.scaler.state_dict()

    def restore(self, checkpoint: dict) -> None:
        """Go on with a checkpoint's optimizer and loss scale; the module has its weights already."""
        weights = checkpoint["model"]
        deepspeed_utils.restore_optimizer(self.module, self.optimizer, None, weights, checkpoint["optimizer"])
        restore_scaler(self.scaler, checkpoint["scaler"], self.scaler.precision)

    def close(self) -> None:
        self.model = None
        self.module = None


class DeepSpeedEngine:
    """DeepSpeed ZeRO-1/2/3 with the same AdamW; it skips a step with a non-finite gradient by itself."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW, config: dict):
        self.module = model
        self.model = deepspeed_utils.start_engine(model, optimizer, config)
        self.device = self.model.device
        self.optimizer = optimizer

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        """Around the forward and backward pass of one micro-batch: gradients are exchanged after the last only."""
        self.model.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=False)

    def update(self, lr: float) -> torch.Tensor:
        """Clip, step, clear; returns the gradient norm before clipping (non-finite: the step was skipped)."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.step()
        return torch.as_tensor(self.model.get_global_grad_norm(), device=self.model.device).float()

    def scaler_state(self) -> dict:
        return deepspeed_utils.scaler_state(self.model)

    def restore(self, checkpoint: dict) -> None:
        """Go on with a checkpoint's weights, optimizer and loss scale."""
        weights = checkpoint["model"]
        deepspeed_utils.restore_optimizer(self.module, self.optimizer, self.model, weights, checkpoint["optimizer"])
        deepspeed_utils.restore_scaler(self.model, checkpoint["scaler"])

    def close(self) -> None:
        # its hooks hold the model in cycles
        self.model.destroy()
        self.model = None
        self.module = None


Engine = TorchEngine | DeepSpeedEngine


# --- which one, and how -----------------------------------------------------------------------------------------------


def choose_engine(
    use_ddp: bool, use_deepspeed: bool, file_named: bool, auto_optimize: bool, world_size: int
) -> tuple[bool, str]:
    """(whether DeepSpeed trains, the reason), as the guide's diagram has it.

    file_named: whether --deepspeed_config is on the command line. Raises InputError where DeepSpeed is lacking.
    """
    if use_ddp:
        return False, "--use_ddp"
    flag = "--use_deepspeed" if use_deepspeed else "--deepspeed_config"
    if use_deepspeed or file_named:
        if not deepspeed_utils.available():
            raise InputError(f"{flag}: DeepSpeed is not installed; pip install deepspeed, or use --use_ddp")
        return True, flag

    # nothing was asked for
    if world_size == 1:
        return False, "one process"
    if not auto_optimize:
        return False, "--no_auto_optimize"
    if not deepspeed_utils.available():
        return False, "DeepSpeed is not installed"
    return True, "2 or more processes"


def config_file(stage: int) -> str:
    """The JSON of configs/ for a ZeRO stage."""
    return str(CONFIGS / ZERO_FILES[stage])


def choose_precision_with(config: dict | None, wanted: str, device: torch.device) -> tuple[str, str]:
    """(precision, reason): `auto` heeds what the DeepSpeed file enables or disables, where the device can.

    These words are then taken out of the config, so that fill_config finds nothing wrong with the choice.
    """
    if config is None or wanted != "auto":
        return choose_precision(wanted, device)
    enabled = {name: config.get(name, {}).pop("enabled", "auto") for name in ("bf16", "fp16")}
    named = next((name for name, value in enabled.items() if value is True and device.type == "cuda"), None)
    chosen, reason = choose_precision(named or wanted, device)
    if enabled.get(chosen) is False:
        return "no", f"{chosen} is disabled in the DeepSpeed file"
    return chosen, "the DeepSpeed file" if named else reason


def fill_batch(config: dict, path: str, batch: BatchSize, grad_clip: float, precision: str) -> dict:
    """The config for the batch that fits into memory; the file was compared with the flags before."""
    open_config = {name: value for name, value in config.items() if name not in deepspeed_utils.OWNED}
    return deepspeed_utils.fill_config(open_config, path, batch.size, batch.accumulation, grad_clip, precision)


def engine_copies(config: dict | None) -> float:
    """Copies of the trained parameters that a GPU holds beside them and their gradients: see copies_held.

    config: DeepSpeed's, None where torch trains. DeepSpeed shares the moments and the masters out over the processes,
    or keeps them on the CPU.
    """
    if config is None:
        return copies_held()
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    on_cpu = offload.get("device", "none") != "none"
    return 1 if on_cpu else 1 + 3 / world()[1]


def prepare_deepspeed(ranks: Ranks) -> None:
    """The process group that DeepSpeed wants, for one process too."""
    if ranks.world_size == 1:
        backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
