"""hardware_utils.py and utils/hardware_utils.py: guide 1's settings, detection, precision, determinism, the report."""

import os
import re
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


def settings(processes, memory, compute=8.0, cores=64, ram=128.0, deepspeed=True, **more) -> list:
    return list(machine.settings_for(processes, memory, compute, cores, ram, deepspeed, **more).values())


# --- the table --------------------------------------------------------------------------------------------------------


def test_settings_of_the_guides_example():
    """Batch per GPU, accumulation, global batch, workers, prefetch, precision, checkpointing, ZeRO, offload, engine."""
    assert settings(4, 24, 8.9) == [16, 4, 256, 12, 4, "bf16", False, 2, False, "deepspeed"]
    assert settings(2, None, None, 2, 16) == [8, 16, 256, 1, 2, "no", False, 2, True, "deepspeed"]
    assert settings(1, 24, 7.5, 13, 33) == [16, 16, 256, 3, 3, "fp16", False, 0, False, "python"]
    # a T4 of 16 GB and a slice of 5 GB report less
    assert settings(4, 14.56) == [12, 5, 240, 12, 4, "bf16", False, 2, False, "deepspeed"]
    assert settings(4, 4.75) == [2, 32, 256, 12, 4, "bf16", True, 3, True, "deepspeed"]
    assert settings(2, 24, deepspeed=False)[-1] == "torchrun"
    # workers of one node, with two cores left for training
    assert [settings(8, 24, cores=cores, processes_per_node=4)[3] for cores in (64, 13, 1)] == [12, 11, 1]


def test_larger_gpus_keep_the_global_batch():
    assert settings(4, 24, batch_size=5)[:3] == [5, 13, 260]
    for processes in range(1, 130):
        assert len({settings(processes, memory)[2] for memory in (24, 40, 80, 141)}) == 1


# --- detection --------------------------------------------------------------------------------------------------------

V1 = """memory/job/memory.limit_in_bytes=17179869184
memory/job/memory.usage_in_bytes=4294967296
memory/job/memory.stat=inactive_file 0 total_inactive_file 1073741824"""


def limit_of(group: str) -> str:
    """The files of a cgroup that may use 16 GiB and uses 4."""
    return f"{group}/memory.max=17179869184\n{group}/memory.current=4294967296"


@pytest.mark.parametrize(
    ("groups", "files", "gib"),
    [
        ("0::/\n", "memory.max=max\nmemory.current=5", 100),
        # the parent has the lower limit; a container that sees the host's path
        ("0::/job/step\n", f"job/step/memory.max=max\n{limit_of('job')}", 12),
        ("0::/pods/cri:abc\n", limit_of("."), 12),
        # the page cache is free memory
        ("4:memory:/job\n2:cpu,cpuacct:/\n0::/\n", V1, 13),
    ],
)
def test_memory_limit_of_a_container(tmp_path, monkeypatch, groups, files, gib):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * 2**30))
    files = dict(line.split("=") for line in files.splitlines())
    for name, text in {"../../../proc/self/cgroup": groups, **files}.items():
        path = (tmp_path / "sys/fs/cgroup" / name).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine.available_ram_gb(tmp_path) == gib


def test_detected_gpus(tmp_path, monkeypatch):
    """nvidia-smi lists three GPUs; torch can use two of them, in another order."""
    stub = tmp_path / "nvidia-smi"
    stub.write_text("#!/bin/sh\necho 'GPU-0, 20480\nGPU-1, 21504\nGPU-2, [N/A]'\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    card = {"name": "NVIDIA L4", "total_memory": 22.5 * 2**30, "major": 8, "minor": 9}
    # some torch versions omit "GPU-"
    cards = [SimpleNamespace(uuid=uuid, **card) for uuid in ("GPU-2", "1")]
    seen = {"device_count": lambda: 2, "is_available": lambda: True, "get_device_properties": cards.__getitem__}
    for name, value in seen.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    gpus, notes = machine.detect_gpus()
    gpu = {"name": "NVIDIA L4", "memory_total_gb": 22.5, "compute": 8.9}
    assert gpus == [gpu | {"memory_free_gb": None}, gpu | {"memory_free_gb": 21.0}]
    assert notes == ["torch can use 2 of the 3 GPUs that nvidia-smi lists: CUDA_VISIBLE_DEVICES='2,1'"]
    # CUDA fails to initialize
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.detect_gpus()[0] == []


# --- numerics and memory ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_freed_memory_is_reused():
    program = """
import contextlib, ctypes, resource, sys
import distributed_utils as du
libc, size = ctypes.CDLL(None), 30 * 2**20
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
with du.setup_distributed() if sys.argv[1:] else contextlib.nullcontext():
    for step in range(20):
        if step == 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [libc.malloc(size) for _ in range(3)]
        for block in blocks:
            ctypes.memset(block, 1, size)
        for block in blocks:
            libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    default, reused = (
        int(subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, check=True).stdout)
        for words in ([], ["setup_distributed"])
    )
    # page faults
    assert reused < 0.05 * default


def test_precision(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [hw.choose_precision(wanted, cpu)[0] for wanted in ("auto", "bf16", "no")] == ["no", "bf16", "no"]
    with pytest.raises(InputError, match="needs a GPU"):
        hw.choose_precision("fp16", cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert hw.choose_precision("auto", gpu) == ("fp16", "compute capability 7.5")
    with pytest.raises(InputError, match="does not support it"):
        hw.choose_precision("bf16", gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert [hw.choose_precision(wanted, gpu)[0] for wanted in ("auto", "fp16")] == ["bf16", "fp16"]
    # with auto, `accelerate launch --mixed_precision` decides
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert [hw.choose_precision("auto", device)[0] for device in (gpu, cpu)] == ["fp16", "no"]
    assert hw.choose_precision("no", gpu)[0] == "no"
    for precision, dtype in (("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with hw.autocast(cpu, precision):
            assert torch.eye(2).mm(torch.eye(2)).dtype == dtype


def test_unsupported_settings_of_accelerate_launch(monkeypatch):
    hw.check_accelerate(1)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    hw.check_accelerate(2)
    with pytest.raises(InputError, match="give --gradient_accumulation_steps 2 to the script"):
        hw.check_accelerate(1)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(InputError, match="DEEPSPEED is not supported here"):
        hw.check_accelerate(2)


def test_numerics():
    """In a process of its own, because the settings are global."""
    code = """
import torch, hardware_utils as hw
cudnn = torch.backends.cudnn
torch.cuda.get_device_capability = lambda _: (8, 0)
assert hw.set_precision("auto", torch.device("cuda"), False) == ("bf16", "bf16 (compute capability 8.0)")
assert (cudnn.benchmark, cudnn.allow_tf32) == (True, True)
assert hw.set_precision("no", torch.device("cuda"), False) == ("no", "no (as asked) TF32 off")
assert (cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == (False, False)
torch.set_num_threads(2)
assert hw.set_precision("auto", torch.device("cpu"), True) == ("no", "no (fp32 on CPU) deterministic")
assert (cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()) == (False, True, True)
assert torch.get_num_threads() == 1
assert not torch.backends.cuda.cudnn_sdp_enabled()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


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


def test_report(monkeypatch, capsys):
    """On the guide's machine, then on one with a smaller GPU, which decides."""
    gpu = {"name": "NVIDIA L4", "memory_total_gb": 24.0, "memory_free_gb": 23.5, "compute": 8.9}
    hardware = {"gpus": [gpu] * 4, "cpu_cores": 14, "ram_available_gb": 128.0, "deepspeed_installed": True}
    monkeypatch.setattr(machine, "detect_hardware", lambda: hardware | {"notes": ["something"]})
    machine.main([])
    text = capsys.readouterr().out
    assert "  Number of GPUs:        4\n  Total GPU Memory:      96.0 GB\n  Min GPU Memory:        24.0 GB\n" in text
    assert "  GPU 3: NVIDIA L4\n       Memory: 24.0 GB (Free: 23.5 GB)\n       Compute: 8.9\n" in text
    assert "  Batch size per GPU:    16\n  Gradient accumulation: 4\n  Effective batch size:  256\n" in text
    assert text.count("  Note: something\n") == 1
    hardware["gpus"] = [gpu] * 3 + [gpu | {"memory_total_gb": 15.0}]
    machine.main(["--nodes", "2", "--no_deepspeed"])
    text = capsys.readouterr().out
    assert "  Batch size per GPU:    12\n  Gradient accumulation: 3\n  Effective batch size:  288\n" in text
    assert text.endswith(f"  Engine:                torchrun\n{'=' * 70}\n")


def test_report_of_this_machine():
    """Run on one core, as a cluster's job may be."""
    command = ["taskset", "-c", f"{min(os.sched_getaffinity(0))}", sys.executable, "-m", "utils.hardware_utils"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    assert "  CPU cores:             1\n" in text
    ram = float(re.search(r"RAM available: +(\S+) GB", text)[1])
    assert 0 < ram <= psutil.virtual_memory().total / 2**30
