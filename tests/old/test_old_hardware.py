"""hardware_utils: what a machine is found to have, and what running out of memory looks like."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from old import hardware_utils
from old.hardware_utils import available_ram_gb, detect_gpus, usable_cores


# --- detection --------------------------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> Path:
    """Write files of these texts below a folder, which takes the place of /."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "4:memory:/job/step\n2:cpu,cpuacct:/job/step\n0::/\n"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        # the folder above has the lower limit
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/cpu.max": "800000 100000",
          "sys/fs/cgroup/job/cpu.max": "400000 100000"}, 4),
        # a container that sees the host's path, but its own folder at the top
        ({"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/cpu/job/step/cpu.cfs_quota_us": "600000\n",
          "sys/fs/cgroup/cpu/job/step/cpu.cfs_period_us": "100000\n"}, 6),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)  # fmt: skip
def test_cores_of_a_container(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert usable_cores(write(tmp_path, files)) == cores


def test_cores_follow_the_affinity(tmp_path):
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)


GIB = 2**30


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 100),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"}, 100),
        ({"proc/self/cgroup": "0::/j\n", "sys/fs/cgroup/j/memory.max": f"{32 * GIB}",
          "sys/fs/cgroup/j/memory.current": f"{20 * GIB}"}, 12),
        # cached files are given back
        ({"proc/self/cgroup": "0::/j\n", "sys/fs/cgroup/j/memory.max": f"{32 * GIB}",
          "sys/fs/cgroup/j/memory.current": f"{20 * GIB}",
          "sys/fs/cgroup/j/memory.stat": f"anon 5\ninactive_file {8 * GIB}\n"}, 20),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{16 * GIB}",
          "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{4 * GIB}",
          "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n"}, 13),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 * GIB}"}, 100),
    ],
)  # fmt: skip
def test_memory_of_a_container(tmp_path, monkeypatch, files, gib):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB))
    assert available_ram_gb(write(tmp_path, files)) == gib


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(listed, seen, ...): a driver that lists so many cards, of which torch sees those in `seen`.

    cuda: torch's version of it. visible: CUDA_VISIBLE_DEVICES. broken: nvidia-smi fails.
    starts: False, and torch counts them but CUDA does not start on any, as under an old driver.
    """

    def make(
        listed: int,
        seen: list[int],
        cuda: str | None = "12.9",
        visible: str | None = None,
        broken: bool = False,
        starts: bool = True,
    ):
        # the driver
        lines = "".join(f"echo 'GPU-0000-{i}, {1024 * (20 + i)}'\n" for i in range(listed))
        stub = tmp_path / "nvidia-smi"
        stub.write_text("#!/bin/sh\nexit 9\n" if broken else f"#!/bin/sh\n{lines}")
        stub.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

        # torch, whose identifiers of cards begin with GPU- in some versions only
        cards = []
        for index in seen:
            uuid = "GPU-" * (index % 2) + f"0000-{index}"
            facts = {"name": "NVIDIA L4", "total_memory": int(22.5 * GIB), "major": 8, "minor": 9, "uuid": uuid}
            cards.append(SimpleNamespace(**facts))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: starts and bool(cards))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
        return detect_gpus()

    return make


def test_gpus(machine):
    gpus, notes = machine(2, [0, 1])
    facts = {"name": "NVIDIA L4", "memory_total_gb": 22.5, "compute": 8.9}
    assert gpus == [facts | {"memory_free_gb": 20.0}, facts | {"memory_free_gb": 21.0}]
    assert notes == []


@pytest.mark.parametrize(
    ("seen", "visible", "free"),
    [([3, 1], "3,1", [23.0, 21.0]), ([2], "GPU-0000-2", [22.0]), ([], "", []), ([], "-1", [])],
)
def test_visible_devices(machine, seen, visible, free):
    """Free memory is that of the very cards that are visible, in torch's order; a note says what is hidden."""
    gpus, notes = machine(4, seen, visible=visible)
    assert [gpu["memory_free_gb"] for gpu in gpus] == free
    assert notes == [f"nvidia-smi lists 4 GPUs, of which CUDA_VISIBLE_DEVICES='{visible}' leaves {len(seen)}"]


def test_gpus_that_torch_cannot_use(machine):
    gpus, notes = machine(2, [], cuda=None)
    assert gpus == []
    assert notes[0].startswith("nvidia-smi lists 2 GPUs, but this torch")
    assert "built without CUDA" in notes[0]
    gpus, notes = machine(1, [])
    assert gpus == []
    assert notes == ["nvidia-smi lists 1 GPU, but torch sees 0; is the driver new enough for CUDA 12.9?"]
    assert machine(1, [0], starts=False) == (gpus, notes)


def test_gpus_without_nvidia_smi(machine):
    gpus, notes = machine(0, [0], broken=True)
    assert gpus[0]["memory_free_gb"] is None
    assert notes == []


# what libraries say when memory runs out, as recorded in their sources and in issue reports (named beside)
OUT_OF_MEMORY_TEXTS = (
    # pytorch#16417
    "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 11.06 MiB is "
    "free. Including non-PyTorch memory, this process has 23.60 GiB memory in use. Of the allocated memory 22.90 GiB "
    "is allocated by PyTorch, and 194.87 MiB is reserved by PyTorch but unallocated.",
    # pytorch#59778
    "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated)",
    # Wan2GP#1083, torch.AcceleratorError
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    # ComfyUI#12366
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    # llama2.c#279, serve#1993, MiniGPT-4#89
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    # Qwen3-VL#151
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    # pytorch#108645
    "GET was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "NCCL error in: ProcessGroupNCCL.cpp:2020, unhandled cuda error, NCCL version 2.21.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    # nccl#1235 and TensorRT-LLM#1670: NCCL before 2.19 gives no number
    "NCCL error in: ProcessGroupNCCL.cpp:1197, unhandled cuda error, NCCL version 2.18.3\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'",
    "NCCL error: unhandled cuda error\nFailed to CUDA calloc async 608 bytes",
    # nccl#1235
    "NCCL error: unhandled cuda error\nFailed to CUDA calloc 6291456 bytes",
    # DeepSpeed#3860, its optimizer on the CPU
    "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "132426121216 bytes. Error code 12 (Cannot allocate memory)",
    # Papers-in-100-Lines-of-Code#10, Windows
    "[enforce fail at alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1981808640 "
    "bytes.",
    # KeypointFusion#3, as a loading process hands it on
    "Caught _ArrayMemoryError in DataLoader worker process 0.\nnumpy.core._exceptions._ArrayMemoryError: Unable to "
    "allocate 58.0 GiB for an array with shape (176351, 176460) and data type uint16",
    "could not create a primitive",
    "std::bad_alloc",
    "bad allocation",
)
OTHER_TEXTS = (
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: invalid argument",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, lda)`",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
    # pytorch#11065, pytorch#1664: for shapes that cuDNN does not take
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    # nccl#1283
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 1 'invalid argument'",
    # nccl#1191, nccl-tests#206: the limit on locked memory, ulimit -l
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\n"
    "Call to ibv_create_cq failed with error Cannot allocate memory",
    # pytorch#108861: /dev/shm
    "DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit.",
    "unable to write to file </torch_1_2>: No space left on device (28)",
    "[Errno 28] No space left on device",
    "index 30522 is out of range",
    "Expected all tensors to be on the same device",
    "shape '[2]' is invalid for input of size 3",
)


@pytest.mark.parametrize("text", OUT_OF_MEMORY_TEXTS)
def test_out_of_memory_in_the_words_of_each_library(text):
    assert hardware_utils.out_of_memory(RuntimeError(text))


def test_out_of_memory_of_classes_that_say_it_by_themselves():
    assert issubclass(torch.AcceleratorError, RuntimeError)
    assert hardware_utils.out_of_memory(torch.OutOfMemoryError("in words that no one has recorded"))
    with pytest.raises(MemoryError) as caught:
        np.empty((2**31, 2**20), np.float64)
    assert hardware_utils.out_of_memory(caught.value)


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_other_errors_are_not_out_of_memory(text):
    assert not hardware_utils.out_of_memory(RuntimeError(text))
