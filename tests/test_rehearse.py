"""tools/rehearse.py: a step counted by hand, and the scripts' steps on a simulated GPU without host-device syncs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HAS_COMPILER = any(map(shutil.which, ("g++", "clang++", "c++")))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")

# weights of 8192 x 8192 and a batch of 8192 rows, so that each fp32 matrix is 256 MiB and each product 2 x 8192^3 FLOPs
COUNTED = """
import argparse
import torch
def parse_args(words):
    return argparse.Namespace(
        batch_size=8192, gradient_accumulation_steps=2, effective_batch_size=None, world_size=None, grad_clip=1.0,
        mixed_precision="no", deterministic=False)
def build_model(args, precision, device):
    return torch.nn.Linear(8192, 8192, bias=False)
def make_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), fused=True)
def largest_batch(model, size):
    return torch.zeros(size, 8192)
def trial_step(model, batch, args):
    out = model(batch.to("cuda", non_blocking=True))
    out.sum().backward()
    with torch.no_grad():
        out[0].cpu()
        float(out[0, 0])
        out[torch.tensor([0])]
        out[out[:, 0] > 0] = 0
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    query, key = (torch.zeros(1, heads, 8192, 64, **options) for heads in (8, 2))
    torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True).sum().backward()
"""


def rehearse(script: str, *flags: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.rehearse", script, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400)


def last_object(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_compiler
def test_counted_by_hand(tmp_path):
    (tmp_path / "counted.py").write_text(COUNTED)
    step = last_object(rehearse("counted.py", "--gpu_memory", "3.5", cwd=tmp_path))
    # weights, two moments, gradient; then the input, the output and the second micro-batch's gradient
    assert step["state_gib"] == pytest.approx(1, abs=1e-3)
    assert step["peak_gib"] == pytest.approx(1.75, abs=1e-3)
    # two micro-batches; for 8 attention heads, 2 products forward and 5 backward
    tflop = 2 * (2 * 2 * 8192**3 + 7 * 2 * 8 * 8192**2 * 64) / 1e12
    assert step["tflop_per_step"] == pytest.approx(tflop, abs=1e-3)
    syncs = ["copy cuda -> cpu", "item()", "index by a mask or from the host", "index by a mask or from the host"]
    assert list(step["waits"]) == [f"{sync} in counted.py:{line}" for line, sync in enumerate(syncs, start=18)]
    # the rest of 3.5 GiB after the margin, at 0.75 GiB per 8192 rows
    assert step["fits"]
    assert step["largest_batch"] == int(((3.5 - 1.5e9 / 2**30) / 1.05 - step["state_gib"]) / 0.75 * 8192)


@needs_compiler
@pytest.mark.parametrize(
    ("command", "peak_gib"),
    [
        ("train_prs_med.py --batch_size 2 --gradient_checkpointing --gpu_memory 24 --mixed_precision bf16", 17.0),
        # 6 of 24 volumes on each of 4 GPUs
        ("train_survival_distributed.py --batch_size 6 --world_size 4", 32.5),
        # the last stage, with 256^3 voxels and its own batch
        ("train_accelerate.py --config configs/multi_view_config.json", 11.5),
        ("train.py --mixed_precision bf16", 2.18),
    ],
)
def test_step_at_published_size(command, peak_gib):
    """The peak is that of earlier rehearsals, and nothing synchronizes with the GPU."""
    step = last_object(rehearse(*command.split()))
    # only the first step copies the cascade's constant tables
    assert all("cpu -> cuda in geometry.py" in sync for sync in step["waits"])
    assert step["fits"]
    assert step["peak_gib"] == pytest.approx(peak_gib, rel=0.1 if "multi_view" in command else 0.01)


def test_missing_compiler(tmp_path):
    done = rehearse("train_prs_med.py", PATH="/nonexistent", XDG_CACHE_HOME=str(tmp_path), CXX="")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "needs a GPU, or a C++ compiler" in done.stderr
    assert done.stderr.count("\n") == 1
