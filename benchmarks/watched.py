"""Run a script of this project with random weights for model folders that contain a config.json but no weights.

    python benchmarks/watched.py [share_gpu] [speed] train_prs_med.py FLAGS ...
    python benchmarks/watched.py machine

    share_gpu  all processes use the first GPU and communicate over gloo, because NCCL rejects two ranks on one device
    speed      also time a matrix product, and count the FLOPs of one optimizer step
    machine    no script: report package versions and the speed of a matrix product

The last line printed is a JSON object with the measurements.
"""

import json
import os
import runpy
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

ON_GPU = torch.cuda.is_available()


def matrix_product() -> float:
    side, dtype = (8192, torch.bfloat16) if ON_GPU else (512, torch.float32)
    values = torch.rand(side, side, dtype=dtype, device="cuda" if ON_GPU else "cpu")
    for _ in range(2):
        # the first run is warmup
        begun = time.perf_counter()
        for _ in range(10):
            values @ values
        if ON_GPU:
            torch.cuda.synchronize()
    return 10 * 2 * side**3 / (time.perf_counter() - begun) / 1e12


def measure_machine() -> dict[str, str | float]:
    results = {"device": "cpu", "GPUs": torch.cuda.device_count(), "matrix product TFLOP/s": matrix_product()}
    packages = ("torch", "transformers", "accelerate", "deepspeed", "monai")
    results |= {package.name: package.version for package in distributions() if package.name in packages}
    if ON_GPU:
        card = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
        results |= {"device": card.name, "memory GiB": card.total_memory / 2**30, "driver": driver}
    return results


def use_random_weights() -> None:
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


class StepFlops(TorchDispatchMode):
    """Counts the FLOPs of one optimizer step, from one AdamW update to the next.

    The cascade creates one optimizer per stage, so the count restarts with each new optimizer.
    """

    def __init__(self):
        from tools.rehearse import FLOPS

        super().__init__()
        self.formulas, self.optimizer, self.counting, self.flops = FLOPS, None, False, 0
        register_optimizer_step_post_hook(self.after_update)

    def after_update(self, optimizer: torch.optim.Optimizer, *_) -> None:
        # ignore the LBFGS optimizer, which the survival script uses to fit Cox models
        if isinstance(optimizer, torch.optim.AdamW):
            if self.counting:
                self.__exit__(None, None, None)
            self.counting = optimizer is not self.optimizer
            if self.counting:
                self.optimizer, self.flops = optimizer, 0
                self.__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        formula = self.formulas.get(function.overloadpacket)
        self.flops += formula(*args, **kwargs, out_val=out) if formula else 0
        return out


def main(words: list[str]) -> None:
    results, counter = {}, None
    while not words[0].endswith(".py"):
        word = words.pop(0)
        if word == "machine":
            print(json.dumps(measure_machine()))
            return
        if word == "share_gpu":
            # each process acts as the only process on its machine, so it uses the first GPU
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            dist.is_nccl_available = lambda: False
        if word == "speed":
            results, counter = {"product": matrix_product()}, StepFlops()
            # the matrix product must not count towards the script's peak memory
            torch.cuda.empty_cache()
    use_random_weights()
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    if counter:
        results["tflop"] = counter.flops / 1e12
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
