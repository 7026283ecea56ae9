"""Training engines, which sum gradients over the ranks and update the weights.

The DeepSpeed engine is in tasks/mimic_cxr/zero.py.
"""

import contextlib
import gc
import math
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from distributed_utils import SHIFT, world
from utils import checkpoint


class Engine:
    """Trains a model with a fused optimizer, AMP loss scaling and, on several ranks, DDP.

    model: the model without the DDP wrapper. wrapped: the module to call during training.
    """

    # whether every rank must run the same number of forward passes in an optimizer step
    equal_passes = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: str,
        args: Namespace,
        device: torch.device,
        saved: dict | None = None,
        frozen: set[str] | None = None,
    ):
        """All ranks: create the engine. saved: contents of the checkpoint to restore, if any.

        frozen: names of parameters to leave out of checkpoints (default: those with requires_grad=False at this point).
        """
        if not optimizer.defaults.get("fused"):
            raise ValueError("the optimizer needs fused=True, which skips a non-finite step without a wait for the GPU")
        self.model, self.optimizer, self.device = model, optimizer, device
        self.grad_clip = args.grad_clip or math.inf
        self.frozen = checkpoint.frozen_names(model) if frozen is None else frozen
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**14, enabled=precision == "fp16")
        self.wrapped = model
        if saved:
            checkpoint.load_trained(model, saved["model"])
        if args.compile:
            # compile in place, which keeps the names of the weights
            model.compile()
        self.start(saved)

    def start(self, saved: dict | None) -> None:
        if saved:
            checkpoint.restore_optimizer(self.optimizer, saved["optimizer"])
            if self.scaler.is_enabled() and saved["scaler"]:
                self.scaler.load_state_dict(saved["scaler"])
        self.wrap()

    def wrap(self) -> None:
        """All ranks: set up gradient reduction across ranks. Call again after freezing or unfreezing parameters."""
        self.close()
        self.wrapped = wrap_in_ddp(self.model, self.device)

    def close(self) -> None:
        """Remove the DDP wrapper, because two wrappers around one model would both all-reduce its gradients."""
        if self.wrapped is not self.model:
            self.wrapped = self.model
            gc.collect()

    @contextlib.contextmanager
    def around_micro_batch(self, last: bool) -> Iterator[None]:
        """Context manager for the passes of one micro-batch. last: whether to all-reduce the step's gradients."""
        quiet = isinstance(self.wrapped, DistributedDataParallel) and not last
        with self.wrapped.no_sync() if quiet else contextlib.nullcontext():
            yield

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        """Run the backward pass of this rank's loss.

        gradient: derivative of the total loss over all ranks with respect to `loss`.
        """
        # undo DDP's averaging over the ranks
        loss.backward(self.scaler.scale(gradient * world()[1]))

    def update(self, lr: float) -> Tensor:
        """Clip the gradients and, if their norm is finite, update the weights. Returns the norm before clipping."""
        optimizer = self.optimizer
        self.scaler.unscale_(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grad_norm = nn.utils.clip_grad_norm_(parameters, self.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if self.scaler.is_enabled():
            self.scaler.step(optimizer)
            self.scaler.update()
        elif self.device.type == "cpu":
            # on a CPU, reading the norm is faster than using found_inf
            if math.isfinite(grad_norm):
                optimizer.step()
        else:
            # if found_inf is 1, a fused optimizer skips the step without host-device sync
            optimizer.grad_scale, optimizer.found_inf = None, 1.0 - grad_norm.isfinite().float()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def weights(self) -> dict[str, Tensor]:
        """All ranks: return the weights to save."""
        return checkpoint.trained_state(self.model, self.frozen)

    def state(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def put_weights(self, weights: dict[str, Tensor]) -> None:
        """All ranks: replace the model's weights. Training must not continue afterwards."""
        checkpoint.load_trained(self.model, weights)


def wrap_in_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    if world()[1] == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    # depthwise convolutions trigger DDP's harmless warning about gradient strides
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    on_cpu = device.type == "cpu"
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(checkpoint.frozen_names(model)))
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if on_cpu else [device],
        gradient_as_bucket_view=True,
        # Keep DDP from rebuilding its buckets after the first step. With gloo on 3 or more ranks, the sums depend on
        # the buckets, so a resumed run would not be bit-identical.
        find_unused_parameters=on_cpu and world()[1] > 2,
    )
    # set as an attribute, because torch 2.13 renamed the constructor's argument
    wrapped.broadcast_buffers = False
    return wrapped


class ExactEngine(Engine):
    """Engine for --deterministic, with gradient sums that do not depend on the order of addition.

    Each micro-batch's gradient is rounded to multiples of 2**-40 in float64 (_take()). Sums of such numbers are exact
    below 2**13, so they do not depend on how ranks share the micro-batches. During the last backward pass of a step,
    each gradient bucket is all-reduced as soon as it is ready.
    """

    bucket_bytes = 50 * 2**20
    hooks: Sequence[RemovableHandle] = ()

    def wrap(self) -> None:
        self.close()
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad][::-1]
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64, device=self.device)
        self.views = dict(zip(parameters, self.flat.split(sizes), strict=True))
        self.buckets, self.bucket_of, begin = [], {}, 0
        for parameter, end in zip(parameters, accumulate(sizes), strict=True):
            self.bucket_of[parameter] = len(self.buckets)
            if 8 * (end - begin) >= self.bucket_bytes or end == len(self.flat):
                self.buckets.append(self.flat[begin:end])
                begin = end
        self.hooks = [parameter.register_post_accumulate_grad_hook(self._take) for parameter in parameters]
        self.works: list[dist.Work | None] = []
        self.last, self.missing, self.shift = False, Counter(), torch.tensor(SHIFT)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()

    @contextlib.contextmanager
    def around_micro_batch(self, last: bool) -> Iterator[None]:
        self.last = last
        self.missing = Counter(self.bucket_of.values())
        # with fp16, gradients are multiplied by the loss scale, so multiply the rounding constant SHIFT by it too
        self.shift = self.scaler.scale(torch.full((), SHIFT, dtype=torch.float64, device=self.device))
        yield

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        loss.backward(self.scaler.scale(gradient))

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        self.views[parameter] += parameter.grad.reshape(-1).double().add_(self.shift).sub_(self.shift)
        parameter.grad = None
        self.missing[self.bucket_of[parameter]] -= 1
        # all ranks must start their all-reduces in the same order
        while self.last and len(self.works) < len(self.buckets) and not self.missing[len(self.works)]:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self.works)]
        self.works.append(dist.all_reduce(bucket, async_op=True) if world()[1] > 1 else None)

    def update(self, lr: float) -> Tensor:
        self.finish_sum()
        return super().update(lr)

    @torch.no_grad()
    def finish_sum(self) -> None:
        """All ranks: set each parameter's grad to the sum over the micro-batches of all ranks."""
        while len(self.works) < len(self.buckets):
            self._send()
        for work in filter(None, self.works):
            work.wait()
        for parameter, view in self.views.items():
            # fused optimizers need each gradient to have the strides of its parameter
            parameter.grad = torch.empty_like(parameter).copy_(view.view_as(parameter))
        self.flat.zero_()
        self.works = []


def make_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, args: Namespace, device: torch.device, **options
) -> Engine:
    kind = ExactEngine if args.deterministic else Engine
    return kind(model, optimizer, precision, args, device, **options)
