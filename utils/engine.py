"""The engine of a training: how gradients are summed over the ranks, and how they update the weights.

`make_engine` gives DDP, or exact sums with --deterministic; tasks/mimic_cxr/zero.py holds the one of DeepSpeed.
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
    """torch's own: DDP around the model where there are several processes, AMP's loss scale, a fused optimizer.

    model is the plain model and `wrapped` the one to call in training.
    """

    # whether all ranks must make equally many passes in a step
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
        """All ranks. saved: the checkpoint whose weights and optimizer state to go on with.

        frozen: parameters that checkpoints leave out; default: those that are not trained now.
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
            # in place, so that the names of the weights stay
            model.compile()
        self.start(saved)

    def start(self, saved: dict | None) -> None:
        """All ranks: restore the optimizer and the loss scale, and wrap the model."""
        if saved:
            checkpoint.restore_optimizer(self.optimizer, saved["optimizer"])
            if self.scaler.is_enabled() and saved["scaler"]:
                self.scaler.load_state_dict(saved["scaler"])
        self.wrap()

    def wrap(self) -> None:
        """All ranks: sum the gradients of what requires them now; call it again when that has changed."""
        self.close()
        self.wrapped = wrap_in_ddp(self.model, self.device)

    def close(self) -> None:
        """Let go of the wrapper: two DDP wrappers around one model would both all-reduce its gradients."""
        if self.wrapped is not self.model:
            self.wrapped = self.model
            gc.collect()

    @contextlib.contextmanager
    def around_micro_batch(self, last: bool) -> Iterator[None]:
        """Around the passes of a micro-batch; last: of this rank in the step, after which gradients are exchanged."""
        quiet = isinstance(self.wrapped, DistributedDataParallel) and not last
        with self.wrapped.no_sync() if quiet else contextlib.nullcontext():
            yield

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        """Add the gradients of this rank's part of a sum over the ranks; gradient: that of the sum by `loss`."""
        # DDP averages over the ranks, so undo the division
        loss.backward(self.scaler.scale(gradient * world()[1]))

    def update(self, lr: float) -> Tensor:
        """Clip the gradients and, if their norm is finite, update the weights; returns the norm before clipping."""
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
            # reading the norm makes nobody wait, and found_inf would cost an operation for each parameter
            if math.isfinite(grad_norm):
                optimizer.step()
        else:
            # what GradScaler hands to a fused optimizer, which then skips on the device
            optimizer.grad_scale, optimizer.found_inf = None, 1.0 - grad_norm.isfinite().float()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def weights(self) -> dict[str, Tensor]:
        """All ranks: what a checkpoint holds of the model, see checkpoint.trained_state."""
        return checkpoint.trained_state(self.model, self.frozen)

    def state(self) -> dict:
        """All ranks: what a checkpoint holds of the optimizer and the loss scale."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def put_weights(self, weights: dict[str, Tensor]) -> None:
        """All ranks: overwrite the weights of the plain model; the training does not go on from them."""
        checkpoint.load_trained(self.model, weights)


def wrap_in_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    """DDP around a model where there are several processes; it leaves frozen weights alone.

    find_unused_parameters keeps the layout of the gradient buckets, which DDP otherwise changes after the first step
    of each start: the sum of three ranks and more depends on it, so a resumed run would differ in the last bits.
    """
    if world()[1] == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    # depthwise convolutions trigger this warning; it is harmless
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    on_cpu = device.type == "cpu"
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(checkpoint.frozen_names(model)))
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if on_cpu else [device],
        gradient_as_bucket_view=True,
        find_unused_parameters=on_cpu and world()[1] > 2,
    )
    # the argument has another name from torch 2.13 on
    wrapped.broadcast_buffers = False
    return wrapped


class ExactEngine(Engine):
    """--deterministic: gradients summed over the micro-batches of a step without rounding, in place of DDP.

    Any division of the micro-batches among any number of processes, one included, gives the same bits. Each gradient
    moves
    into one flat float64 buffer as soon as the backward pass has it; in a rank's last micro-batch, finished parts of
    the buffer are sent while the backward pass goes on. Costs twice the bytes of DDP, and the memory of two gradients.
    """

    bucket_bytes = 50 * 2**20
    hooks: Sequence[RemovableHandle] = ()

    def wrap(self) -> None:
        self.close()
        # backward passes finish the last parameters first
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
        # of the micro-batch under way, see around_micro_batch
        self.last, self.missing, self.shift = False, Counter(), torch.tensor(SHIFT)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()

    @contextlib.contextmanager
    def around_micro_batch(self, last: bool) -> Iterator[None]:
        self.last = last
        self.missing = Counter(self.bucket_of.values())
        # times the loss scale of fp16, so that the grid is as fine as without
        self.shift = self.scaler.scale(torch.full((), SHIFT, dtype=torch.float64, device=self.device))
        yield

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        loss.backward(self.scaler.scale(gradient))

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        # round_for_exact_sum, in place
        self.views[parameter] += parameter.grad.reshape(-1).double().add_(self.shift).sub_(self.shift)
        parameter.grad = None
        self.missing[self.bucket_of[parameter]] -= 1
        # all ranks send the buckets in the same order
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
        """All ranks, after the last micro-batch: the sum over all micro-batches is in `grad`."""
        while len(self.works) < len(self.buckets):
            self._send()
        for work in filter(None, self.works):
            work.wait()
        for parameter, view in self.views.items():
            # with the strides of its parameter, as fused optimizers want it
            parameter.grad = torch.empty_like(parameter).copy_(view.view_as(parameter))
        self.flat.zero_()
        self.works = []


def make_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, args: Namespace, device: torch.device, **options
) -> Engine:
    """All ranks: the engine that the flags want; options as of Engine."""
    kind = ExactEngine if args.deterministic else Engine
    return kind(model, optimizer, precision, args, device, **options)
