"""Simulate one optimizer step of a training script on a GPU; report the step's memory, FLOPs and host-device syncs.

python -m tools.rehearse train_prs_med.py --gpu_memory 80
python -m tools.rehearse train_prs_med.py --gpu_memory 24 --batch_size 2 --gradient_checkpointing --world_size 4

All other flags are those of the training script. The simulation uses torch's fake tensors, which need no memory; a
machine without a GPU needs a C++ compiler. Kernel workspaces, NCCL buffers, fragmentation and time are not simulated.

A training script must define these functions; fill_settings() is optional:

    parse_args(words), build_model(args, precision, device), make_optimizer(model, args)
    largest_batch(model, size)        returns the `size` samples that need the most memory
    trial_step(model, batch, args)    runs the forward and backward pass of one micro-batch
    fill_settings(args, world_size, memory, compute, node)    derives settings from the hardware
"""
# ruff: noqa: E402

import ctypes
import hashlib
import importlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import traceback
import warnings
import weakref
from argparse import Namespace
from collections import Counter
from pathlib import Path
from unittest import mock

from utils.cli import InputError, Parser, RunError, print_error, real, run_main, with_flags

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
# folders in configs/models: DEFAULT_MODELS for model flags that are not set, ON_THE_HUB for hub names
DEFAULT_MODELS = {"vlm_path": "llava_med_v1.5_mistral_7b", "sam_path": "sam_vit_base"}
ON_THE_HUB = {
    "facebook/convnext-base-224": "convnext_base",
    "facebook/dinov3-convnext-base-pretrain-lvd1689m": "dinov3_convnext_base",
    "emilyalsentzer/Bio_ClinicalBERT": "bio_clinicalbert",
}
# GPU memory besides tensors: fragmentation as a fraction of tensor memory, plus bytes for NCCL, cuDNN and cuBLAS
MARGIN_SHARE, MARGIN_BYTES = 0.05, 1.5e9


def parse_args() -> tuple[Namespace, list[str]]:
    parser = Parser(__doc__)
    parser.add_argument("script", metavar="SCRIPT", help="training script, such as train_prs_med.py")
    parser.add_argument("--gpu_memory", type=real(0, above=True), default=80.0, help="memory of the GPU in GiB")
    args, words = parser.parse_known_args()
    path = Path(args.script)
    if not path.is_file():
        raise InputError(f"{path}: no such script; check its name")
    if "def largest_batch(" not in path.read_text(encoding="utf-8"):
        raise InputError(f"{path}: has no largest_batch(); --help says what a script must have")
    return args, words + (["--config", args.config] if args.config else [])


def load_fake_cuda() -> ctypes.CDLL | None:
    """Load tools/fake_cuda.cpp, a CUDA device that does nothing; return None if the machine has a GPU.

    Call this function before torch is imported, because torch looks up its CUDA hooks during the import. Raises
    InputError if the file cannot be compiled.
    """
    try:
        count = ctypes.c_int(0)
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if driver.cuInit(0) == driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value:
            return None
    except OSError:
        pass

    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    source = Path(__file__).with_name("fake_cuda.cpp")
    version = (torch_folder / "version.py").read_bytes()
    key = hashlib.sha256(source.read_bytes() + version + str(torch_folder).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medical-multi-gpu"
    library = cache / f"fake_cuda_{key}.so"
    if not library.is_file():
        names = filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++"))
        compiler = next(filter(None, map(shutil.which, names)), None)
        if compiler is None or sys.platform == "win32":
            raise InputError("needs a GPU, or a C++ compiler (g++ or clang++) on Linux or macOS; install one")
        temporary = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder}/include", str(source)]
        command += ["-o", str(temporary), f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib", "-lc10"]
        try:
            cache.mkdir(parents=True, exist_ok=True)
            subprocess.run([*command, "-ltorch_cpu"], check=True, capture_output=True, text=True)
            temporary.replace(library)
        except OSError as error:
            raise InputError(f"{cache}: cannot write here ({error.strerror}); set XDG_CACHE_HOME") from None
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.splitlines() or ["no message"])[0][:200]
            raise InputError(f"{source}: {compiler} failed ({reason}); try another with CXX=") from None
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    try:
        ARGS, WORDS = parse_args()
        FAKE_CUDA = load_fake_cuda()
    except InputError as error:
        sys.exit(print_error(error))

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hardware_utils import set_precision
from utils.engine import make_engine

# --- memory and FLOP counters -----------------------------------------------------------------------------------------


def convolution_backward_flops(gradient, images, weight, *options, **_) -> int:
    """Return a convolution's backward FLOPs: its forward FLOPs times the number of gradients needed.

    torch's own formula overcounts grouped convolutions.
    """
    transposed, wanted = options[4], options[7]
    positions = math.prod((images if transposed else gradient).shape[2:])
    return 2 * len(images) * positions * weight.numel() * (wanted[0] + wanted[1])


def attention_flops(query, key, value, *_, **__) -> int:
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (width + value.shape[3])


def attention_backward_flops(_, query, key, value, *__, **___) -> int:
    """Return the FLOPs of five matrix products: the recomputed scores and four gradients."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (3 * width + 2 * value.shape[3])


FLOPS = flop_registry | {torch.ops.aten.convolution_backward: convolution_backward_flops}
for kernel in ("flash", "efficient", "cudnn"):
    # torch 2.11's own FLOP formula for attention rejects keys with fewer heads than the queries
    name = f"_scaled_dot_product_{kernel}_attention"
    FLOPS[getattr(torch.ops.aten, name)] = attention_flops
    FLOPS[getattr(torch.ops.aten, f"{name}_backward")] = attention_backward_flops


class Trace(TorchDispatchMode):
    """Records the memory, FLOPs and host-device syncs of GPU operations inside a FakeTensorMode.

    flops: a multiply-add counts as 2. syncs: {cause and source line: count}. Raises RunError for an operation whose
    output size depends on values on the GPU.
    """

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = self.flops = 0
        self.syncs = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.prim.device.default:
            # shortcut, because torch's C++ code calls prim.device very often
            return args[0].device
        name = function.overloadpacket.__name__
        inputs = find_tensors((*args, *kwargs.values()))
        if not any(isinstance(x, FakeTensor) for x in inputs) and "cuda" not in str(kwargs.get("device")):
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        # fake tensors have no values, so return a plausible constant
        if name in ("_local_scalar_dense", "equal"):
            self.syncs[f"item() in {caller_line()}"] += 1
            return name == "equal" or {torch.bool: False}.get(inputs[0].dtype, 1)
        unknown_size = name in ("nonzero", "masked_select", "_unique2")
        if name in ("index", "index_put", "index_put_", "_unsafe_index_put"):
            indices = find_tensors(args[1])
            masks = [index for index in indices if index.dtype == torch.bool]
            unknown_size = masks and name == "index"
            if masks or any(index.device.type == "cpu" for index in indices):
                self.syncs[f"index by a mask or from the host in {caller_line()}"] += 1
        if unknown_size:
            reason = f"{name} waits for the GPU to learn the size of its result"
            raise RunError(f"{caller_line()}: {reason}; use a fixed size")

        out = function(*args, **kwargs)
        outputs = find_tensors((out,))
        moved = name in ("_to_copy", "copy_") and len({x.device.type for x in inputs + outputs}) == 2
        if moved and not kwargs.get("non_blocking", len(args) > 2 and args[2]):
            self.syncs[f"copy {inputs[-1].device.type} -> {outputs[0].device.type} in {caller_line()}"] += 1
        if function.overloadpacket in FLOPS:
            self.flops += FLOPS[function.overloadpacket](*args, **kwargs, out_val=out)
        for tensor in outputs:
            if tensor.device.type == "cuda":
                self.hold(tensor.untyped_storage())
        return out

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a tensor storage, in torch's 512-byte blocks, until the storage is freed."""
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = math.ceil(storage.nbytes() / 512) * 512
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.free, key)

    def free(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def find_tensors(values) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += find_tensors(value)
    return found


def caller_line() -> str:
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in path and path != __file__ and not path.startswith("<"):
            return f"{Path(path).name}:{line}"
    return "the backward pass"


# --- simulated step ---------------------------------------------------------------------------------------------------


def convert(module: nn.Module, function, recurse: bool = True) -> nn.Module:
    """Replacement for nn.Module._apply that creates new parameters: fake tensors cannot be swapped in place."""
    for child in module.children() if recurse else ():
        convert(child, function)
    for name, parameter in module._parameters.items():
        with torch.no_grad():
            changed = None if parameter is None else function(parameter)
        if changed is not parameter:
            module._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
    module._buffers |= {name: function(buffer) for name, buffer in module._buffers.items() if buffer is not None}
    return module


def random_model(cls, path, dtype=None, **_):
    return cls._from_config(cls.config_class.from_pretrained(path), dtype=dtype or torch.float32).eval()


def enable_fake_gpu() -> torch.device:
    if FAKE_CUDA:
        FAKE_CUDA.use_fake_cuda()
    else:
        # the autograd engine requires CUDA to be initialized
        torch.empty(1, device="cuda")
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    patches = {
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.is_bf16_supported": lambda *_, **__: True,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.nn.Module._apply": convert,
        "transformers.PreTrainedModel.from_pretrained": classmethod(random_model),
    }
    for name, replacement in patches.items():
        mock.patch(name, replacement).start()
    return torch.device("cuda", 0)


def main(args: Namespace) -> None:
    path = Path(args.script)
    sys.path.insert(0, str(path.parent))
    script = importlib.import_module(path.stem)
    settings = script.parse_args(WORDS)
    for flag, value in vars(settings).items():
        folder = DEFAULT_MODELS.get(flag) if value is None else ON_THE_HUB.get(str(value))
        if folder:
            setattr(settings, flag, str(ROOT / "configs" / "models" / folder))
    if hasattr(script, "fill_settings"):
        # assume compute capability 9.0 and a large node: 64 CPU cores, 256 GiB of RAM and 8 processes
        filled = script.fill_settings(settings, settings.world_size or 1, args.gpu_memory, 9.0, (64, 256.0, 8))
        settings = with_flags(settings, **filled)
    device = enable_fake_gpu()
    precision, _ = set_precision(settings.mixed_precision, device, settings.deterministic)
    world_size, size, accumulation = settings.world_size or 1, settings.batch_size, settings.gradient_accumulation_steps
    if settings.effective_batch_size:
        accumulation = math.ceil(settings.effective_batch_size / size / world_size)

    trace = Trace()
    with FakeTensorMode(allow_non_fake_inputs=True), trace:
        with device:
            model = script.build_model(settings, precision, device)
        optimizer = script.make_optimizer(model, settings)
        batch = script.largest_batch(model, size)
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = sum(parameter.nbytes for parameter in trained)

        # create the optimizer state and the gradients; gradient accumulation and DDP keep gradients allocated
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        engine = make_engine(model, optimizer, precision, with_flags(settings, compile=False), device)
        engine.scaler.scale(torch.zeros((), device=device))
        if settings.deterministic or accumulation == world_size == 1:
            optimizer.zero_grad(set_to_none=True)
        persistent = trace.peak = trace.now
        trace.flops = 0
        trace.syncs.clear()

        with engine.around_micro_batch(last=True):
            script.trial_step(model, batch, settings)
        engine.update(0.0)

    activations = trace.peak - persistent
    margin = MARGIN_SHARE * trace.peak + MARGIN_BYTES
    available = (args.gpu_memory * GIB - MARGIN_BYTES) / (1 + MARGIN_SHARE) - persistent
    fits = activations <= available
    # a smaller micro-batch would require gradient accumulation, which keeps gradients allocated
    if accumulation == world_size == 1:
        available -= gradients
    largest = max(math.floor(available * size / activations), size * fits, 0)

    rows = {
        "state": f"{persistent / GIB:8.2f} GiB  weights, optimizer state, persistent gradients",
        "activations": f"{activations / GIB:8.2f} GiB  including gradients, at the peak",
        "margin": f"{margin / GIB:8.2f} GiB  5 % and 1.4 GiB for memory outside torch's tensors",
        "in all": f"{(trace.peak + margin) / GIB:8.2f} GiB",
        "arithmetic": f"{trace.flops * accumulation / 1e12:8.2f} TFLOP per step and GPU",
        "host waits": "; ".join(f"{count} x {what}" for what, count in trace.syncs.items()) or "none",
    }
    print(f"{args.script}: {size} samples per GPU x {accumulation} accumulation, {precision}")
    for name, row in rows.items():
        print(f"  {name:<12} {row}")
    print(f"{'fits' if fits else 'does not fit'} a GPU of {args.gpu_memory:g} GiB; largest --batch_size: {largest}")
    result = {
        "peak_gib": round(trace.peak / GIB, 4),
        "state_gib": round(persistent / GIB, 4),
        "activations_gib": round(activations / GIB, 4),
        "tflop_per_step": round(trace.flops * accumulation / 1e12, 4),
        "waits": trace.syncs,
        "fits": fits,
        "largest_batch": largest,
    }
    print(json.dumps(result), flush=True)
    # skip Python's shutdown, because torch's threads for the fake GPU would abort the process
    os._exit(0)


if __name__ == "__main__":
    run_main(main, ARGS)
