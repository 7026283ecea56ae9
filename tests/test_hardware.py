"""hardware_utils: guide 1's table, what a machine is found to have, numerics, and the command."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import hardware_utils as hw
from utils import hardware_utils as machine
from utils.cli import InputError

ROOT = Path(__file__).resolve().parents[1]


def settings(processes, memory, compute=8.0, cores=64, ram=128.0, deepspeed=True, **more) -> dict:
    return machine.settings_for(processes, memory, compute, cores, ram, deepspeed, **more)


def batches(*args, **more) -> tuple:
    """Batch size per GPU, accumulation and effective batch size."""
    return tuple(settings(*args, **more).values())[:3]


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_guides_example():
    assert list(settings(4, 24, 8.9).values()) == [16, 4, 256, 12, 4, "bf16", False, 2, False, "deepspeed"]
    assert list(settings(2, None, None, 2, 16).values()) == [8, 16, 256, 1, 2, "no", False, 2, True, "deepspeed"]


# batch, accumulation and effective batch on 4 GPUs: two rows of ours, then guide 1's; GiB as cards report them
ROWS = {
    # H200, H100, A100; A100 of 40 GB, L40S
    (64, 1, 256): [139.72, 79.11, 80],
    (32, 2, 256): [39.25, 44.4],
    # L4 with error correction, a 20 GB slice, V100; T4 and another 16 GB card
    (16, 4, 256): [22.03, 19.5, 31.74],
    (12, 5, 240): [14.56, 15.78],
    # RTX 2080 Ti, a 10 GB slice; P4, RTX 2060; a 5 GB slice
    (8, 8, 256): [10.75, 9.5],
    (4, 16, 256): [7.43, 5.79],
    (2, 32, 256): [4.75],
}


@pytest.mark.parametrize(("expected", "memory"), [(row, gib) for row, cards in ROWS.items() for gib in cards])
def test_every_row(expected, memory):
    assert batches(4, memory) == expected
    row = settings(4, memory)
    assert row["zero_stage"] == (3 if memory < 5 else 2)
    # below 16 GB activations are recomputed and the optimizer is on the CPU
    assert row["gradient_checkpointing"] is row["offload_optimizer"] is (memory < 14)


def test_other_numbers_of_gpus():
    assert batches(1, 16) == (12, 20, 240)
    assert batches(8, 16) == (12, 3, 288)
    assert batches(3, 80) == (40, 2, 240)
    assert batches(4, 24, batch_size=5) == (5, 13, 260)
    # a larger GPU never changes the effective batch
    for processes in range(1, 130):
        assert {batches(processes, memory)[2] for memory in (24, 40, 80, 141)} == {batches(processes, 24)[2]}


def test_what_else_the_settings_follow():
    # of one node, with two cores left to the training
    workers = [settings(8, 24, cores=cores, processes_per_node=4)["dataloader_num_workers"] for cores in (64, 13, 1)]
    assert workers == [12, 11, 1]
    assert [settings(4, 24, ram=ram)["prefetch_factor"] for ram in (32, 33, 65)] == [2, 3, 4]
    assert settings(4, 24, 7.5)["mixed_precision"] == "fp16"
    assert settings(1, 24)["engine"] == "python"
    assert settings(2, 24, deepspeed=False)["engine"] == "torchrun"


# --- detection --------------------------------------------------------------------------------------------------------

V1 = "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n"
MEMORY_V1 = """memory/job/memory.limit_in_bytes=17179869184
memory/job/memory.usage_in_bytes=4294967296
memory/job/memory.stat=inactive_file 0 total_inactive_file 1073741824"""


@pytest.mark.parametrize(
    ("groups", "files", "cores", "gib"),
    [
        ("0::/\n", "cpu.max=max 100000\nmemory.max=max\nmemory.current=5", 16, 100),
        ("0::/\n", "cpu.max=50000 100000\nmemory.max=17179869184\nmemory.current=4294967296", 1, 12),
        # the group above has the lower limit; a container that sees the host's path
        ("0::/job/step\n", "job/step/cpu.max=800000 100000\njob/cpu.max=450000 100000", 4, 100),
        ("0::/docker/abc\n", "cpu.max=200000 100000", 2, 100),
        # cached files are given back
        (V1, "cpu/job/cpu.cfs_quota_us=600000\ncpu/job/cpu.cfs_period_us=100000\n" + MEMORY_V1, 6, 13),
        (V1, "cpu/job/cpu.cfs_quota_us=-1\ncpu/job/cpu.cfs_period_us=100000", 16, 100),
    ],
)
def test_limits_of_a_container(tmp_path, monkeypatch, groups, files, cores, gib):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * 2**30))
    files = dict(line.split("=") for line in files.splitlines())
    for name, text in {"../../../proc/self/cgroup": groups, **files}.items():
        path = (tmp_path / "sys/fs/cgroup" / name).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert (machine.usable_cores(tmp_path), machine.available_ram_gb(tmp_path)) == (cores, gib)


def test_gpus(tmp_path, monkeypatch):
    """nvidia-smi lists three GPUs, of which torch can use two, in another order."""
    stub = tmp_path / "nvidia-smi"
    stub.write_text("#!/bin/sh\necho 'GPU-0, 20480\nGPU-1, 21504\nGPU-2, [N/A]'\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    facts = {"name": "NVIDIA L4", "total_memory": 22.5 * 2**30, "major": 8, "minor": 9}
    # some versions of torch leave out "GPU-"
    cards = [SimpleNamespace(uuid=uuid, **facts) for uuid in ("GPU-2", "1")]
    for name, answer in {"device_count": 2, "is_available": True}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    gpus, notes = machine.detect_gpus()
    facts = {"name": "NVIDIA L4", "memory_total_gb": 22.5, "compute": 8.9}
    assert gpus == [facts | {"memory_free_gb": None}, facts | {"memory_free_gb": 21.0}]
    told = "torch can use 2 of the 3 GPUs that nvidia-smi lists: "
    assert notes == [f"{told}is the driver new enough for CUDA 12.9?"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert machine.detect_gpus()[1] == [f"{told}CUDA_VISIBLE_DEVICES='2,1'"]
    # CUDA does not start
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.detect_gpus()[0] == []


# --- numerics and memory ----------------------------------------------------------------------------------------------


def test_precision(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [hw.choose_precision(wanted, cpu)[0] for wanted in ("auto", "bf16", "no")] == ["no", "bf16", "no"]
    with pytest.raises(InputError, match="needs a GPU"):
        hw.choose_precision("fp16", cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert hw.choose_precision("auto", gpu) == ("fp16", "compute capability 7.5")
    with pytest.raises(InputError, match="does not support it"):
        hw.choose_precision("bf16", gpu)


def test_what_accelerate_launch_may_not_ask_for(monkeypatch):
    hw.check_accelerate(1)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    hw.check_accelerate(2)
    with pytest.raises(InputError, match="give --gradient_accumulation_steps 2 to the script"):
        hw.check_accelerate(1)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(InputError, match="DEEPSPEED is not supported here"):
        hw.check_accelerate(2)


NUMERICS = """
import os, sys, torch, hardware_utils as hw
assert "psutil" not in sys.modules
cudnn = torch.backends.cudnn
assert hw.set_numerics(torch.device("cuda"), "bf16", False) == ""
assert (cudnn.benchmark, cudnn.allow_tf32) == (True, True)
assert hw.set_numerics(torch.device("cuda"), "no", False) == "TF32 off"
assert (cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == (False, False)
assert hw.set_numerics(torch.device("cpu"), "no", True) == "deterministic"
assert (cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()) == (False, True, True)
torch.manual_seed(0)
layer = torch.nn.Conv2d(3, 32, 3)
with hw.autocast(torch.device("cpu"), "no"):
    layer(torch.randn(16, 3, 64, 64)).square().mean().backward()
print(layer.weight.grad.sum(dtype=torch.float64).item().hex())
"""


def test_deterministic_gives_the_same_bits_at_any_number_of_threads():
    answers = set()
    for threads in ("1", "2"):
        env = os.environ | {"OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", NUMERICS]
        answers.add(subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True).stdout)
    assert len(answers) == 1


DRAWING = {"Generator", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "bernoulli"}


def draws_on_a_device(call: ast.Call) -> bool:
    """Whether a call may make a torch.Generator of a device, or a random tensor on one."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in DRAWING:
        return False
    if ast.unparse(function.value) != "torch":
        return False
    if function.attr.endswith("_like") or (function.attr == "Generator" and call.args):
        return True
    return any(keyword.arg == "device" for keyword in call.keywords)


def test_nothing_is_drawn_by_a_gpus_generator():
    """Whose numbers depend on the model of the GPU: no torch.Generator but the CPU's, no random tensor on a device."""
    assert draws_on_a_device(ast.parse("torch.randn(3, device=x.device)").body[0].value)
    drawn = []
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("utils/*.py"), *ROOT.glob("tasks/**/*.py")]):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        drawn += [f"{path.name}: {ast.unparse(call)}" for call in calls if draws_on_a_device(call)]
    assert drawn == []


OUT_OF_MEMORY = """CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB
CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
GET was unable to find an engine to execute this computation
ncclUnhandledCudaError: Call to CUDA function failed. Last error: Failed to CUDA calloc 6291456 bytes
DefaultCPUAllocator: can't allocate memory: you tried to allocate 132426121216 bytes.
std::bad_alloc"""
OTHER_ERRORS = """CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa, opb, m, n, k)`
It is possible that dataloader's workers are out of shared memory.
Call to ibv_create_cq failed with error Cannot allocate memory
CUDA error: device-side assert triggered"""


def test_out_of_memory():
    assert all(hw.out_of_memory(RuntimeError(text)) for text in OUT_OF_MEMORY.splitlines())
    assert not any(hw.out_of_memory(RuntimeError(text)) for text in OTHER_ERRORS.splitlines())
    assert hw.out_of_memory(torch.OutOfMemoryError("in other words"))
    assert hw.peak_memory_gb(torch.device("cpu")) >= 0.9 * psutil.Process().memory_info().rss / 2**30


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def four_l4(monkeypatch):
    """The guide's machine, with a note that a shell must not run."""
    gpu = {"name": "NVIDIA L4", "memory_total_gb": 24.0, "memory_free_gb": 23.5, "compute": 8.9}
    facts = {"gpu_count": 4, "gpus": [gpu] * 4, "cpu_cores": 14, "ram_available_gb": 128.0, "deepspeed_installed": True}
    monkeypatch.setattr(machine, "detect_hardware", lambda: facts | {"notes": ["it's $(id) and `id`"]})
    return gpu


def test_report(four_l4, capsys):
    machine.main([])
    text = capsys.readouterr().out
    assert "  Number of GPUs:        4\n  Total GPU Memory:      96.0 GB\n  Min GPU Memory:        24.0 GB\n" in text
    assert "  GPU 3: NVIDIA L4\n       Memory: 24.0 GB (Free: 23.5 GB)\n       Compute: 8.9\n" in text
    assert "  Batch size per GPU:    16\n  Gradient accumulation: 4\n  Effective batch size:  256\n" in text
    # settings follow the smallest GPU
    four_l4["memory_total_gb"] = 15.0
    machine.main(["--json", "--nodes", "2", "--no_deepspeed"])
    assert list(json.loads(capsys.readouterr().out)["settings"].values())[:3] == [12, 3, 288]


def test_shell(four_l4, capsys):
    """The launcher gets each value back as it was, whatever is in it."""
    machine.main(["--shell", "--gpus", "2"])
    names = ["gpu_count", "cpu_cores", "processes_per_node", "engine", "deepspeed_installed", "detected", "settings"]
    code = 'source "$0"; take_assignments "$1" "${@:2}"; for name in "${@:2}"; do printf "%s\\0" "${!name}"; done'
    words = ["bash", "-euc", code, ROOT / "launch_functions.sh", capsys.readouterr().out.strip(), *names]
    *values, detected, chosen, _ = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    assert values == ["4", "14", "2", "deepspeed", "true"]
    assert detected.endswith("Note: it's $(id) and `id`")
    assert "DeepSpeed ZeRO stage:  2" in chosen


@pytest.mark.parametrize("module", ["utils.hardware_utils", "hardware_utils"])
def test_this_machine(module):
    """Guide 1's `python -m utils.hardware_utils`, and the shorter name."""
    command = [sys.executable, "-m", module, "--json"]
    facts = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    assert facts["cpu_cores"] == machine.usable_cores()
    assert 0 < facts["ram_available_gb"] <= psutil.virtual_memory().total / 2**30
