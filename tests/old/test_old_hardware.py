"""hardware_utils: the guide's table, what a machine is found to have, and the command."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT

from old import hardware_utils
from old.hardware_utils import available_ram_gb, detect_gpus, settings_for, usable_cores

ENOUGH = {"cores": 64, "ram_gb": 128.0, "deepspeed": True}
KEYS = ["batch_size_per_gpu", "gradient_accumulation_steps", "effective_batch_size", "dataloader_num_workers"]
KEYS += ["prefetch_factor", "mixed_precision", "gradient_checkpointing", "zero_stage", "offload_optimizer", "engine"]


def batches(settings: dict) -> tuple[int, int, int]:
    """Batch size of a GPU, accumulation and effective batch size."""
    return tuple(settings[key] for key in KEYS[:3])


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "batch", "accumulation", "effective", "stage"),
    [(24, 16, 4, 256, 2), (16, 12, 5, 240, 2), (12, 8, 8, 256, 2), (8, 4, 16, 256, 2), (4, 2, 32, 256, 3)],
)
def test_every_row_of_the_guide(memory, batch, accumulation, effective, stage):
    settings = settings_for(4, memory, 8.9, **ENOUGH)
    assert batches(settings) == (batch, accumulation, effective)
    assert settings["zero_stage"] == stage


def test_the_guides_example():
    settings = settings_for(4, 24.0, 8.9, **ENOUGH)
    assert list(settings) == KEYS
    assert list(settings.values()) == [16, 4, 256, 12, 4, "bf16", False, 2, False, "deepspeed"]


# Batch size, and the GiB that cards of this row report.
REPORTED = {
    # H200
    128: [139.72, 139.8, 141],
    # H100 and A100 of 80 GB, GH200
    64: [79.11, 79.25, 80, 94.5],
    # A100 of 40 GB or a slice of this size, L40S, A6000
    32: [39.25, 39.38, 39.56, 40, 44.4, 47.5],
    # L4 with error correction, RTX 3090, a 20 GB slice, V100
    16: [22.03, 23.69, 19.5, 31.74],
    # T4, V100, 16 GB cards
    12: [14.56, 15.78, 16.0, 19, 14],
    # RTX 2080 Ti, a 10 GB slice
    8: [13, 12.0, 10.75, 9.5, 10],
    # P4, RTX 2060
    4: [9, 7.43, 8.0, 5.79, 6],
    # a 5 GB slice
    2: [5, 4.75, 2],
}


@pytest.mark.parametrize(("batch", "reported"), [(batch, gib) for batch in REPORTED for gib in REPORTED[batch]])
def test_memory_as_real_cards_report_it(batch, reported):
    assert settings_for(2, reported, 8.0, **ENOUGH)["batch_size_per_gpu"] == batch


@pytest.mark.parametrize(
    ("processes", "memory", "expected"),
    [
        (1, 16, (12, 20, 240)),
        (2, 16, (12, 10, 240)),
        (4, 16, (12, 5, 240)),
        (1, 24, (16, 16, 256)),
        (2, 24, (16, 8, 256)),
        (8, 24, (16, 2, 256)),
        (16, 24, (16, 1, 256)),
        # 192 and 288 are equally near
        (8, 16, (12, 3, 288)),
        # never below one batch
        (64, 24, (16, 1, 1024)),
    ],
)
def test_effective_batch_is_the_same_for_any_number_of_gpus(processes, memory, expected):
    assert batches(settings_for(processes, memory, 8.0, **ENOUGH)) == expected


@pytest.mark.parametrize(
    ("memory", "processes", "expected"),
    [
        (80, 1, (64, 4, 256)), (80, 2, (64, 2, 256)), (80, 4, (64, 1, 256)), (80, 8, (32, 1, 256)),
        (80, 16, (16, 1, 256)), (80, 64, (16, 1, 1024)), (80, 3, (40, 2, 240)), (80, 6, (48, 1, 288)),
        (40, 1, (32, 8, 256)), (40, 4, (32, 2, 256)), (40, 8, (32, 1, 256)), (40, 5, (24, 2, 240)),
        (141, 1, (128, 2, 256)), (141, 2, (128, 1, 256)), (141, 4, (64, 1, 256)),
    ],
)  # fmt: skip
def test_rows_above_the_guides(memory, processes, expected):
    assert batches(settings_for(processes, memory, 9.0, **ENOUGH)) == expected


def test_large_gpus_keep_the_effective_batch_of_the_guides_largest():
    """For any number of GPUs, and never with a smaller batch than 16 on each."""
    for processes in range(1, 130):
        guide = settings_for(processes, 24, 9.0, **ENOUGH)
        for memory in (40, 80, 141):
            large = settings_for(processes, memory, 9.0, **ENOUGH)
            assert large["effective_batch_size"] == guide["effective_batch_size"]
            assert large["batch_size_per_gpu"] >= guide["batch_size_per_gpu"] == 16


@pytest.mark.parametrize(
    ("memory", "recomputed"), [(None, False), (8, True), (12, True), (14.56, False), (15.78, False), (24, False)]
)
def test_recomputation_and_offload_below_16_gb_only(memory, recomputed):
    """A T4 reports 14.56 GiB. Without a GPU nothing is recomputed, and our DeepSpeed file is taken as it is."""
    settings = settings_for(2, memory, 8.0, **ENOUGH)
    assert settings["gradient_checkpointing"] is recomputed
    assert settings["offload_optimizer"] is (recomputed or memory is None)
    assert settings_for(1, memory, 8.0, **ENOUGH)["offload_optimizer"] is False


def test_given_batch_size():
    assert batches(settings_for(4, 24, 8, **ENOUGH, batch_size=8)) == (8, 8, 256)
    assert batches(settings_for(4, 24, 8, **ENOUGH, batch_size=5)) == (5, 13, 260)


def test_without_gpu():
    settings = settings_for(2, None, None, 2, 16.0, True)
    assert list(settings.values()) == [8, 16, 256, 1, 2, "no", False, 2, True, "deepspeed"]


def test_several_nodes():
    settings = settings_for(8, 24, 8, **ENOUGH, processes_per_node=4)
    assert batches(settings) == (16, 2, 256)

    # of a node, not of the job
    assert settings["dataloader_num_workers"] == 12


@pytest.mark.parametrize(("cores", "workers"), [(64, 12), (14, 12), (13, 11), (8, 6), (3, 1), (1, 1)])
def test_loading_workers(cores, workers):
    assert settings_for(4, 24, 8, cores, 128, True)["dataloader_num_workers"] == workers


@pytest.mark.parametrize(("ram", "prefetch"), [(65, 4), (64, 3), (33, 3), (32, 2), (8, 2)])
def test_prefetch(ram, prefetch):
    assert settings_for(4, 24, 8, 64, ram, True)["prefetch_factor"] == prefetch


@pytest.mark.parametrize(("compute", "precision"), [(8.0, "bf16"), (12.0, "bf16"), (7.5, "fp16"), (6.1, "fp16")])
def test_precision(compute, precision):
    assert settings_for(4, 24, compute, **ENOUGH)["mixed_precision"] == precision


@pytest.mark.parametrize(
    ("processes", "deepspeed", "engine", "stage"),
    [(1, True, "python", 0), (1, False, "python", 0), (2, True, "deepspeed", 2), (8, False, "torchrun", 0)],
)
def test_diagram(processes, deepspeed, engine, stage):
    settings = settings_for(processes, 24, 8, 64, 128, deepspeed)
    assert (settings["engine"], settings["zero_stage"]) == (engine, stage)


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


@pytest.mark.parametrize("installed", [True, False])
def test_deepspeed_is_found_and_not_imported(monkeypatch, installed):
    real = importlib.util.find_spec
    answers = {"deepspeed": object() if installed else None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: answers[name] if name in answers else real(name))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    facts = hardware_utils.detect_hardware()
    assert facts["deepspeed_installed"] is installed
    assert "deepspeed" not in sys.modules
    assert hardware_utils.settings_on(facts, 2)["engine"] == ("deepspeed" if installed else "torchrun")
    assert hardware_utils.settings_on(facts, 2, deepspeed=False)["engine"] == "torchrun"


def test_settings_follow_the_smallest_gpu():
    facts = hardware_utils.imagine_hardware(2, 24, 8.9)
    facts["gpus"][1] |= {"memory_total_gb": 15.0, "compute": 7.5}
    settings = hardware_utils.settings_on(facts, 2)
    assert (settings["batch_size_per_gpu"], settings["mixed_precision"]) == (12, "fp16")


# --- the command ------------------------------------------------------------------------------------------------------


def command(capsys, words: str = "") -> str:
    """What the command prints with these arguments."""
    hardware_utils.main(words.split())
    return capsys.readouterr().out


def test_report_of_the_guides_machine(capsys):
    text = command(capsys, "--plan --gpus 4 --gpu_memory 24 --compute 8.9")
    lines = text.splitlines()
    assert lines[:3] == ["=" * 70, "HARDWARE DETECTION RESULTS", "=" * 70]

    # the GPUs
    first = lines.index("  Number of GPUs:        4")
    assert lines[first + 1 : first + 3] == ["  Total GPU Memory:      96.0 GB", "  Min GPU Memory:        24.0 GB"]
    assert "       Memory: 24.0 GB (Free: 24.0 GB)\n       Compute: 8.9" in text

    # the settings
    first = lines.index("  Batch size per GPU:    16")
    assert lines[first : first + 8] == [
        "  Batch size per GPU:    16",
        "  Gradient accumulation: 4",
        "  Effective batch size:  256",
        "  DataLoader workers:    12",
        "  Mixed precision (BF16): Enabled",
        "  Gradient checkpointing: Disabled",
        "  DeepSpeed ZeRO stage:  2",
        "  Optimizer on the CPU:  Disabled",
    ]
    assert text.isascii()


def test_plan_flags(capsys):
    words = "--plan --json --gpus 4 --gpu_memory 15 --compute 7.5 --nodes 2 --cores 8 --ram 48 --no_deepspeed"
    settings = json.loads(command(capsys, words))["settings"]
    assert list(settings.values()) == [12, 3, 288, 6, 3, "fp16", False, 0, False, "torchrun"]
    report = words.replace("--json", "")
    assert "Mixed precision (FP16): Enabled" in command(capsys, report)

    # a small GPU, and DeepSpeed
    small = command(capsys, report.replace("15", "8").replace("--no_deepspeed", ""))
    assert "Gradient checkpointing: Enabled\n" in small
    assert "Optimizer on the CPU:  Enabled\n" in small

    # the workers are those of one node
    words = words.replace("--cores 8", "--cores 64")
    settings = json.loads(command(capsys, words))["settings"]
    assert settings["dataloader_num_workers"] == 12

    # without memory of a GPU, the plan is for CPUs
    cpu = json.loads(command(capsys, "--plan --json --gpus 2"))
    assert cpu["gpu_count"] == 0
    assert cpu["settings"]["mixed_precision"] == "no"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--plan", "--plan needs --gpus"),
        ("--gpu_memory 24", "--gpu_memory goes with --plan only"),
        ("--gpus 0", "at least 1, not '0'"),
        ("--plan --gpus 2 --gpu_memory -1", "above 0, not '-1'"),
        ("--jsn", "nearest is --json"),
    ],
)
def test_mistakes(capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        hardware_utils.main(words.split())
    text = capsys.readouterr().err
    assert caught.value.code == 2
    assert message in text
    assert len(text.splitlines()) == 1


def test_this_machine(capsys):
    """`python -m old.hardware_utils`: one JSON object, and the report."""
    run = [sys.executable, "-m", "old.hardware_utils", "--json", "--gpus", "3"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)

    # the object
    assert facts["gpu_count"] == len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["cpu_cores"] == usable_cores()
    assert 0 < facts["ram_available_gb"] <= psutil.virtual_memory().total / GIB
    assert facts["disk_free_gb"] > 0
    assert facts["processes_per_node"] == 3
    assert list(facts["settings"]) == KEYS

    # the report
    report = command(capsys)
    expected = str(facts["gpu_count"] or "none; CPU only")
    assert f"  Number of GPUs:        {expected}\n" in report
    assert f"  CPU cores:             {facts['cpu_cores']}\n" in report
    assert "  RAM available: " in report
    assert "  Disk free here: " in report


def test_shell_assignments():
    """A shell gets each value back as it was, whatever is in it."""
    facts = hardware_utils.imagine_hardware(2, 24)
    facts["notes"] = ["it's `id` of $(id)", 'a "line"\nand another']
    settings = hardware_utils.settings_on(facts, 2)
    facts |= {"processes_per_node": 2, "settings": settings, "summary": hardware_utils.summary(facts, settings)}
    text = hardware_utils.shell_assignments(facts)

    # a shell that prints what it took
    names = ["gpu_count", "cpu_cores", "processes_per_node", "engine", "deepspeed_installed", "detected", "settings"]
    code = 'source "$0" && answer=$1 && shift && take_assignments "$answer" "$@" && '
    code += 'for name in "$@"; do printf "%s\\0" "${!name}"; done'
    words = ["bash", "-euc", code, ROOT / "launch_functions.sh", text, *names]
    values = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    *detected, last = facts["summary"]
    assert values == ["2", "8", "2", "deepspeed", "true", "\n".join(detected), last, ""]


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
