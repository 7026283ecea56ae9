"""A script as it is, with random weights where a model has no file of them; what is watched in it is named first.

    python benchmarks/watched.py [share_gpu] [speed | waits | repeats] train_prs_med.py FLAGS ...

    share_gpu  all processes use the first GPU, over gloo, as NCCL refuses two ranks on one
    speed      measures a matrix product before the script starts, and counts the FLOPs of the first two steps
    waits      counts where the host waits for the GPU, from the third step on in the steps and apart from them
    repeats    makes each operation of the steps three times on the same tensors and names those whose results differ

The last line is a JSON object of what was found.
"""

import contextlib
import json
import os
import runpy
import sys
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# reads of a tensor by the host; on a CPU they stand for the waits of a GPU
READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "is_nonzero"}
# not set by what goes in, or not made to be called again
NOT_REPEATED = ("empty", "set_", "resize_", "record_stream", "_local_scalar_dense")


def seconds(call: Callable[[], object], repeats: int = 10) -> float:
    """The mean time of a call, after one that warms up."""
    call()
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - begun) / repeats


def product() -> float:
    """TFLOP/s of a bf16 matrix product on this process's GPU, of a small fp32 one on a CPU."""
    on_gpu = torch.cuda.is_available()
    side = 8192 if on_gpu else 512
    values = torch.rand(side, side, dtype=torch.bfloat16 if on_gpu else torch.float32)
    values = values.cuda() if on_gpu else values
    return 2 * side**3 / seconds(lambda: values @ values) / 1e12


def share_gpu() -> None:
    """From here on this process takes itself for the only one of its machine."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    dist.is_nccl_available = lambda: False


def use_random_weights() -> None:
    """Models of which there is no file of weights are built from their config.json, on the device that they go to."""
    import transformers

    load = transformers.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls, path, *args, **options):
        if any(Path(path).glob("*.safetensors")):
            return load(cls, path, *args, **options)
        torch.manual_seed(0)
        config = options.get("config") or cls.config_class.from_pretrained(path)
        with torch.device((options.get("device_map") or {}).get("", "cpu")):
            model = cls._from_config(config, dtype=options.get("dtype") or torch.float32).eval()
        return (model, {"missing_keys": []}) if options.get("output_loading_info") else model

    transformers.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def place() -> str:
    """`file:line` of the innermost frame that is the script's or the project's and not of this file."""
    for frame, line in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        own = path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != Path(__file__)
        if own or path == Path(sys.argv[0]):
            return f"{path.name}:{line}"
    return "the backward pass"


def around_steps(before: Callable[[object], contextlib.AbstractContextManager], after: Callable[[], None]) -> None:
    """From here on the passes and the update of each step of a run are made in the context before(run)."""
    from utils.loop import Run

    original = Run.steps

    def steps(run, *args, **options):
        for step in original(run, *args, **options):
            with before(run):
                yield step
        after()

    Run.steps = steps


class Waits(TorchDispatchMode):
    """Where the host waits for the GPU: `in_steps` from the third optimizer step on, `apart` in all else.

    On a GPU torch warns of each wait. On a CPU what would lie on a GPU is marked, from the weights and batches on
    through all operations of a step's passes, and each read of a marked tensor by the host counts as a wait.
    """

    def __init__(self):
        import distributed_utils as du

        super().__init__()
        self.steps, self.now, self.in_steps, self.apart = 0, "apart", Counter(), Counter()
        self.marked: set[int] = set()
        around_steps(self.before_step, self.after_steps)
        if torch.cuda.is_available():
            self.show, warnings.showwarning = warnings.showwarning, self.note
            warnings.filterwarnings("always", message=".*synchronizing CUDA")
            torch.cuda.set_sync_debug_mode("warn")
            return
        to_device, one_hot = du.to_device, functional.one_hot
        du.to_device = lambda batch, device: self.mark(to_device(batch, device))
        # with a number of classes it reads its input on a CPU alone, to check it
        functional.one_hot = lambda index, classes=-1: (
            one_hot(index) if classes < 0 else (index[..., None] == torch.arange(classes)).long()
        )

    def before_step(self, run) -> contextlib.AbstractContextManager:
        self.now = "in_steps" if run.position.step > 1 else "apart"
        self.steps += self.now == "in_steps"
        if torch.cuda.is_available():
            return contextlib.nullcontext()
        self.mark(list(run.model.parameters()))
        return self

    def after_steps(self) -> None:
        self.now = "apart"

    def note(self, message, *args, **options) -> None:
        if "synchronizing CUDA" in str(message):
            self.count("wait")
        else:
            self.show(message, *args, **options)

    def count(self, what: str) -> None:
        getattr(self, self.now)[f"{what} in {place()}"] += 1

    def mark(self, values):
        for storage in storages(values):
            if storage._cdata not in self.marked:
                self.marked.add(storage._cdata)
                weakref.finalize(storage, self.marked.discard, storage._cdata)
        return values

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        out = function(*args, **kwargs or {})
        if any(storage._cdata in self.marked for storage in storages((args, kwargs))):
            # an operation in place marks what it writes to
            self.mark((out, args[0] if function._schema.is_mutable else None))
            if name in READS:
                self.count(name)
        return out

    def found(self) -> dict:
        return {"steps": self.steps, "in_steps": self.in_steps, "apart": self.apart}


def storages(values) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class Flops(TorchDispatchMode):
    """Counts the FLOPs of the first two steps that an optimizer makes; the cascade has one a stage."""

    def __init__(self):
        from tools.rehearse import FLOPS

        super().__init__()
        self.formulas, self.optimizer, self.stages = FLOPS, None, []
        around_steps(self.before_step, lambda: None)

    def before_step(self, run) -> contextlib.AbstractContextManager:
        if run.optimizer is not self.optimizer:
            self.optimizer = run.optimizer
            self.stages.append({"steps": 0, "flops": 0})
        if self.stages[-1]["steps"] == 2:
            return contextlib.nullcontext()
        self.stages[-1]["steps"] += 1
        return self

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if function.overloadpacket in self.formulas:
            self.stages[-1]["flops"] += self.formulas[function.overloadpacket](*args, **kwargs, out_val=out)
        return out

    def found(self) -> dict:
        return {"tflop": [stage["flops"] / stage["steps"] / 1e12 for stage in self.stages]}


class Repeats(TorchDispatchMode):
    """Makes each operation three times and counts those that gave other bits, by name."""

    def __init__(self):
        super().__init__()
        self.operations, self.differ = 0, Counter()
        around_steps(lambda run: self, lambda: None)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        repeated = function.namespace == "aten" and torch.Tag.nondeterministic_seeded not in function.tags
        if not repeated or any(word in name for word in NOT_REPEATED):
            return function(*args, **kwargs)

        def copy(x):
            return x.clone() if function._schema.is_mutable and isinstance(x, torch.Tensor) else x

        copies = [tree_map(copy, (args, kwargs)) for _ in range(2)]
        out = function(*args, **kwargs)
        self.operations += 1
        for own_args, own_kwargs in copies:
            again = function(*own_args, **own_kwargs)
            # an operation in place may return nothing
            pairs = zip(tree_leaves((out, args, kwargs)), tree_leaves((again, own_args, own_kwargs)), strict=True)
            if not all(same_bits(*pair) for pair in pairs):
                self.differ[name] += 1
                break
        return out

    def found(self) -> dict:
        return {"operations": self.operations, "differ": self.differ}


def same_bits(one, other) -> bool:
    """Whether two results are the same; anything but two tensors of numbers is."""
    if not isinstance(one, torch.Tensor) or one is other or not one.is_floating_point():
        return True
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def main(words: list[str]) -> None:
    options = words[: next(place for place, word in enumerate(words) if word.endswith(".py"))]
    sys.argv = [str(Path(words[len(options)]).resolve()), *words[len(options) + 1 :]]
    if "share_gpu" in options:
        share_gpu()
    facts = {"product": product()} if "speed" in options else {}
    use_random_weights()
    watches = {"speed": Flops, "waits": Waits, "repeats": Repeats}
    watch = next((watches[name]() for name in options if name in watches), None)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    print(json.dumps(facts | (watch.found() if watch else {})), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
