"""One training step on a GPU that need not be there: its memory, FLOPs and waits, traced on torch's fake tensors.

A fake tensor has a shape, a dtype and a device but no memory, so a step at full size takes seconds on a laptop. What is
not seen: kernels' own workspaces, NCCL, fragmentation and time. --rehearse and
tests/old/test_fake_gpu.py use this file.
"""

import contextlib
import functools
import json
import math
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from old import fake_cuda_utils, flops_utils
from old.distributed_utils import Ranks, read_environment
from old.memory_utils import MARGIN_BYTES, MARGIN_SHARE
from old.phase_utils import doing

GIB = 2**30
# What the allocator rounds each tensor up to, bytes.
BLOCK = 512
# Files whose frames are the tracer's own.
OWN_FILES = (__file__, flops_utils.__file__, mock.__file__, contextlib.__file__)
# A library's registrations last as long as it does.
KEPT: list[torch.library.Library] = []
# Operations that launch nothing on a GPU: they make a view, or memory that nothing is written to.
NO_LAUNCH = {
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
}
# Operations whose CUDA kernels add in an order that varies from run to run, unless torch is told otherwise.
UNORDERED = (
    # Pooling, and changes of size.
    "adaptive_avg_pool2d_backward",
    "adaptive_avg_pool3d_backward",
    "adaptive_max_pool",
    "avg_pool3d_backward",
    "max_pool3d_with_indices_backward",
    "upsample_linear1d_backward",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward",
    "grid_sampler",
    "reflection_pad",
    "replication_pad",
    # Places by index.
    "scatter_add",
    "scatter_reduce",
    "index_add",
    "index_put",
    "_unsafe_index_put",
    "put_",
    "embedding_dense_backward",
    "_embedding_bag",
    # Counts, sums and orders.
    "nll_loss2d",
    "histc",
    "bincount",
    "cumsum",
    "kthvalue",
    "median",
    # Attention and convolution.
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_cudnn_convolution_backward",
)


class Trace(TorchDispatchMode):
    """Watches what a piece of code does on one kind of device, on fake tensors or on real ones.

    Attributes, all of the device: `now` and `peak` (bytes of live tensors), `launches`, `traffic` (bytes read and
    written), `waits` (where the host waits for the GPU), `casts` and `layout_copies` (bytes, by place), `unordered`
    (operations whose order of summation varies), `attention` (kernels chosen, by name).
    """

    def __init__(self, device_type: str = "cuda"):
        super().__init__()
        self.device_type = device_type
        self.sizes: dict[int, int] = {}
        self.now = 0
        self.peak = 0
        self.launches = 0
        self.traffic = 0
        self.waits = Counter()
        self.casts = Counter()
        self.layout_copies = Counter()
        self.unordered = Counter()
        self.attention = Counter()

    # --- memory

    def hold(self, tensor) -> None:
        """Count a tensor's memory until it is freed."""
        if not isinstance(tensor, Tensor) or tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes:
            return
        blocks = math.ceil(storage.nbytes() / BLOCK)
        self.sizes[key] = blocks * BLOCK
        self.now += self.sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def forget_operations(self) -> None:
        """Count operations from here on; memory that is held stays counted."""
        self.launches = 0
        self.traffic = 0
        self.peak = self.now
        for counter in (self.waits, self.casts, self.layout_copies, self.unordered, self.attention):
            counter.clear()

    def hold_all(self, module: nn.Module) -> None:
        """Count the parameters and buffers that are there already."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.hold(tensor)

    def _free(self, key: int) -> None:
        """Count a tensor's memory no longer."""
        self.now -= self.sizes.pop(key, 0)

    # --- operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[1]
        inputs = find_tensors((args, kwargs))
        on_device = self._on_device(inputs)
        if name == "_local_scalar_dense" and on_device:
            self.waits[f"item() in {_place()}"] += 1

        out = function(*args, **kwargs)
        outputs = find_tensors(out)
        made = self._on_device(outputs)
        if on_device:
            self._note_reading(name, args)
        if name in ("_to_copy", "copy_"):
            self._note_copy(name, args, kwargs, outputs[0])

        if made and not function.is_view and name not in NO_LAUNCH:
            self.launches += 1
            self.traffic += sum(_bytes(tensor) for tensor in (*on_device, *made))
            if name == "clone":
                self._note_layout(inputs[0], made[0])
            if name.startswith(UNORDERED):
                self.unordered[name] += 1
        for tensor in made:
            self.hold(tensor)
        return out

    def _on_device(self, tensors: list[Tensor]) -> list[Tensor]:
        """Those of the tensors that are on the device watched."""
        return [tensor for tensor in tensors if tensor.device.type == self.device_type]

    def _note_reading(self, name: str, args: tuple) -> None:
        """Operations whose result has a size that the host must read from the GPU."""
        if name in ("nonzero", "masked_select", "_unique2"):
            self.waits[f"{name} in {_place()}"] += 1
        if name in ("index", "index_put", "index_put_", "_unsafe_index_put"):
            indices = [index for index in args[1] if index is not None]
            if any(index.device.type != self.device_type for index in indices):
                self.waits[f"index on the CPU in {_place()}"] += 1
            if any(index.dtype == torch.bool for index in indices):
                self.waits[f"index by a mask in {_place()}"] += 1

    def _note_copy(self, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
        """Copies for which the host waits, and those on the GPU to another dtype, which compute nothing."""
        source = args[1] if name == "copy_" else args[0]
        target = args[0] if name == "copy_" else out
        kinds = {source.device.type, target.device.type}
        if self.device_type not in kinds:
            return

        if len(kinds) == 2:
            positional = len(args) > 2 and args[2]
            if not kwargs.get("non_blocking", positional):
                self.waits[f"copy {source.device.type} -> {target.device.type} in {_place()}"] += 1
        elif source.dtype != out.dtype:
            kind = f"{source.dtype} -> {out.dtype} in {_place()}".replace("torch.", "")
            self.casts[kind] += _bytes(source) + _bytes(out)

    def _note_layout(self, source: Tensor, out: Tensor) -> None:
        """Large copies to another memory format, which compute nothing."""
        if source.numel() > 2**16 and source.stride() != out.stride():
            self.layout_copies[f"{tuple(source.shape)} in {_place()}"] += 2 * _bytes(out)


def find_tensors(tree) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return [value for value in tree_leaves(tree) if isinstance(value, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _place() -> str:
    """`file:line` of the innermost frame that is neither torch's nor the tracer's; `backward` where there is none."""
    frame = sys._getframe(1)
    while frame:
        path = frame.f_code.co_filename
        inside = f"{os.sep}torch{os.sep}" in path or path in OWN_FILES
        if not inside and not path.startswith("<"):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"


# --- a GPU that is not there ------------------------------------------------------------------------------------------


class HostForReal(TorchDispatchMode):
    """Above a FakeTensorMode: what the host does by itself is done for real, so that its numbers can be read."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        fakes = [value for value in tree_leaves((args, kwargs)) if isinstance(value, FakeTensor)]

        # Something is read back from the GPU: there is nothing, so any plausible answer is given.
        if function is torch.ops.aten.equal.default and fakes:
            return True
        if function is torch.ops.aten._local_scalar_dense.default and fakes:
            return plausible_number(fakes[0].dtype)

        # Without a driver no host memory can be pinned.
        device = torch.device(kwargs.get("device") or "cpu")
        by_host = not fakes and device.type != "cuda"
        if by_host and kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        with unset_fake_temporarily() if by_host else contextlib.nullcontext():
            return function(*args, **kwargs)


def plausible_number(dtype: torch.dtype) -> bool | int | float:
    """What a tensor of one number might hold."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


@contextlib.contextmanager
def imaginary_gpu(trace: Trace) -> Iterator[Ranks]:
    """Inside, CUDA tensors can be made, all of them fake, and `trace` is told of the attention kernels.

    Yields the ranks of one process on that GPU; `with ranks.device:` makes a model there. Tensors of the host are real.
    fake_cuda_utils.load_before_torch must have been called.
    """
    fake_cuda_utils.use_guard()
    if torch.cuda.is_available():
        # The autograd engine wants a device that has been used.
        torch.empty(1, device="cuda")
    keep_whole("silu_backward", "mish_backward")

    # torch asks the driver in these places; the last one swaps storages, which a fake tensor does not allow.
    patches = {
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.nn.functional.scaled_dot_product_attention": traced_attention(trace, F.scaled_dot_product_attention),
        "torch.Tensor.pin_memory": lambda tensor, *_: tensor,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.is_bf16_supported": lambda *_, **__: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.nn.Module._apply": apply_to_module,
    }
    with contextlib.ExitStack() as stack:
        for name, replacement in patches.items():
            stack.enter_context(mock.patch(name, replacement))

        # Inside, all that is made on the GPU is fake.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(HostForReal())
        yield Ranks(0, 0, 1, torch.device("cuda", 0), "rehearsal")


@functools.cache
def keep_whole(*names: str) -> None:
    """Operations that torch takes apart where it has no CUDA kernel for them: let a CPU build seem to have one."""
    if torch.version.cuda is None:
        library = torch.library.Library("aten", "IMPL", "CUDA")
        for name in names:
            library.impl(name, lambda *_: None)
        KEPT.append(library)


def apply_to_module(module: nn.Module, function, recurse: bool = True) -> nn.Module:
    """nn.Module._apply by new parameters instead of swapped storages."""
    for child in module.children() if recurse else ():
        apply_to_module(child, function)

    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                changed = function(parameter)
            if changed is not parameter:
                module._parameters[name] = nn.Parameter(changed.detach(), parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def traced_attention(trace: Trace, real: Callable) -> Callable:
    """scaled_dot_product_attention by the kernel that torch takes on GPUs from Ampere on, which `trace` is told.

    real: torch's own, for what is not on a GPU.
    """

    def attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ) -> Tensor:
        if query.device.type != "cuda":
            return real(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (_lowered(tensor, dtype) for tensor in (query, key, value))
            attn_mask = attn_mask if attn_mask is None else _lowered(attn_mask, dtype)

        # Several heads of the queries share one of the keys.
        if enable_gqa:
            copies = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))

        # The flash kernel takes half precision, one width for all, which 8 divides, and no mask.
        width = query.shape[-1]
        half = query.dtype in (torch.float16, torch.bfloat16)
        if attn_mask is None and half and width <= 256 and value.shape[-1] == width:
            trace.attention[f"flash, width {width}"] += 1
            if width % 8:
                query, key, value = (F.pad(tensor, (0, -width % 8)) for tensor in (query, key, value))
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            scale = scale or 1 / math.sqrt(width)
            out, *_ = flash(query, key, value, dropout_p, is_causal, False, scale=scale)
            return out[..., :width] if width % 8 else out

        # The memory-efficient kernel takes any.
        kind = "no mask" if attn_mask is None else f"{attn_mask.dtype} mask".removeprefix("torch.")
        trace.attention[f"memory-efficient, {kind}"] += 1
        if attn_mask is not None:
            attn_mask = _mask_to_add(attn_mask, query, key)
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, learns, dropout_p, is_causal, scale=scale)[0]

    return attention


def _mask_to_add(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the memory-efficient kernel takes it: to be added, its rows a multiple of 8 long in memory."""
    if mask.dtype == torch.bool:
        zeros = torch.zeros_like(mask, dtype=query.dtype)
        mask = zeros.masked_fill_(mask.logical_not(), -math.inf)

    columns = mask.shape[-1]
    padding = -columns % 8
    if padding:
        mask = F.pad(mask, (0, padding))[..., :columns]
    batch, heads, queries, _ = query.shape
    return mask.expand(batch, heads, queries, key.shape[2])


def _lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """An fp32 tensor in autocast's dtype, others as they are."""
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


# --- the rehearsal ----------------------------------------------------------------------------------------------------


class Rehearsed(NamedTuple):
    """What one optimizer step of one process takes.

    state: bytes of weights, optimizer state and DDP's buckets, which are there all the time. peak: bytes at most.
    flops: of all its micro-batches.
    """

    state: int
    peak: int
    flops: int


@doing("rehearsing a step")
def rehearse_step(
    trace: Trace, model: nn.Module, optimizer: torch.optim.Optimizer, trial: Callable[[], None],
    accumulation: int = 1, processes: int = 1,
) -> Rehearsed:  # fmt: skip
    """Trace one optimizer step inside imaginary_gpu: `trial` (a micro-batch, forward and backward), clip, update.

    As in a real run from the second step on, the optimizer has its state, and from the second micro-batch on there are
    gradients. The counters of `trace` are those of one micro-batch and one update.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in trained if parameter.requires_grad]
    device = trained[0].device
    trace.hold_all(model)

    # What is there before a step: the optimizer's state, and the buckets in which DDP exchanges gradients.
    with trace:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        buckets = [torch.empty_like(parameter) for parameter in trained] if processes > 1 else []
        state = trace.now

        # From the second micro-batch on there are gradients.
        gradients = [torch.zeros_like(parameter) for parameter in trained] if accumulation > 1 else []
        for parameter, gradient in zip(trained, gradients, strict=False):
            parameter.grad = gradient
    del gradients
    trace.forget_operations()

    # One micro-batch and one update are counted.
    with trace, flops_utils.FlopCount() as count:
        trial()
        scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
        scaler.scale(torch.zeros((), device=device))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update(1.0)
        optimizer.zero_grad(set_to_none=True)
    del buckets
    return Rehearsed(state, trace.peak, count.total * accumulation)


def largest_fitting_batch(step: Rehearsed, batch_size: int, memory_gb: float) -> int:
    """The most samples a micro-batch may have, as activations grow with them; 0 where not even one fits."""
    room = (memory_gb * GIB - MARGIN_BYTES) / (1 + MARGIN_SHARE) - step.state
    return max(0, math.floor(room * batch_size / (step.peak - step.state)))


def report_rehearsal(
    title: str, step: Rehearsed, batch_size: int, memory_gb: float, words: Callable[[int], str] | None, otherwise: str
) -> None:
    """Print what a step takes, whether it fits into a GPU of memory_gb, and last the same as one JSON object.

    batch_size: samples of a micro-batch. words(samples): the flags that ask for so many, None where that would change
    the result. otherwise: what to do when not even one sample fits.
    """
    margin = MARGIN_SHARE * step.peak + MARGIN_BYTES
    fits = step.peak + margin <= memory_gb * GIB
    spare = memory_gb - (step.peak + margin) / GIB
    most = largest_fitting_batch(step, batch_size, memory_gb) if words else 0
    if fits:
        advice = f"fits a GPU of {memory_gb:g} GiB with {spare:.1f} GiB to spare"
    else:
        change = f"{words(most)} (the same result), or {otherwise}" if most else otherwise
        advice = f"does not fit a GPU of {memory_gb:g} GiB ({-spare:.1f} GiB too much): {change}"

    activations = step.peak - step.state
    lines = {
        "state": f"{step.state / GIB:8.2f} GiB  weights, optimizer state, gradient buckets",
        "activations": f"{activations / GIB:8.2f} GiB  and gradients, at the peak",
        "margin": f"{margin / GIB:8.2f} GiB  5 % and 1.4 GiB, for what torch does not see",
        "in all": f"{(step.peak + margin) / GIB:8.2f} GiB",
        "arithmetic": f"{step.flops / 1e12:8.2f} TFLOP per step and GPU",
    }
    print(f"== rehearsal: {title} ".ljust(100, "="))
    for name, value in lines.items():
        print(f"  {name:<12} {value}")
    print(f"{advice}\n")

    result = {
        "peak_gib": round(step.peak / GIB, 4),
        "state_gib": round(step.state / GIB, 4),
        "activations_gib": round(activations / GIB, 4),
        "tflop_per_step": round(step.flops / 1e12, 4),
        "fits": fits,
        "advice": advice,
    }
    print(json.dumps(result), flush=True)


def processes_to_plan_for(world_size: int | None) -> int:
    """The processes of --world_size, or those of the launcher."""
    if world_size:
        return world_size
    _, _, launched, _ = read_environment()
    return launched


def memory_to_plan_for(gpu_memory_gb: float | None) -> float:
    """--gpu_memory, or what this machine's GPU has, or 80; GiB."""
    if gpu_memory_gb is not None:
        return gpu_memory_gb
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / GIB
    return 80.0


def end_rehearsal() -> None:
    """Leave at once: torch's threads for a device that is not there would abort a regular exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
