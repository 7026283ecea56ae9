"""tools/rehearse.py: a step counted by hand, and scripts' steps on a GPU that is not there; the host must not wait."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "configs" / "models"
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
    # weights, two moments, gradient; then input, output and the second leaf's gradient
    assert step["state_gib"] == pytest.approx(1, abs=1e-3)
    assert step["peak_gib"] == pytest.approx(1.75, abs=1e-3)
    assert step["tflop_per_step"] == pytest.approx(2 * 2 * 2 * 8192**3 / 1e12, abs=1e-3)
    waits = ["copy cuda -> cpu", "item()", "index by a mask or from the host", "index by a mask or from the host"]
    assert list(step["waits"]) == [f"{wait} in counted.py:{line}" for line, wait in enumerate(waits, start=18)]
    # (3.5 GiB - 1.5 GB) / 1.05 - 1 GiB, of 0.75 GiB per 8192 rows
    assert step["fits"]
    assert step["largest_batch"] == int(((3.5 - 1.5e9 / 2**30) / 1.05 - step["state_gib"]) / 0.75 * 8192)


@needs_compiler
@pytest.mark.parametrize(
    ("flags", "peak_gib"),
    [
        ("--mixed_precision bf16 --gpu_memory 80", 63.7),
        ("--mixed_precision fp16 --gpu_memory 80", 63.7),
        ("--batch_size 2 --gradient_checkpointing --gpu_memory 24", 16.8),
    ],
)
def test_prs_med_at_published_size(flags, peak_gib):
    step = last_object(rehearse("train_prs_med.py", *flags.split()))
    assert step["waits"] == {}
    assert step["fits"]
    # 63.16 and 63.70 have been seen
    assert step["peak_gib"] == pytest.approx(peak_gib, rel=0.01)


@needs_compiler
def test_survival_at_published_size():
    """6 of 24 volumes on each of 4 GPUs; a ResNet-50 has 46 M parameters, at 16 bytes each with AdamW and DDP."""
    step = last_object(rehearse("train_survival_distributed.py", "--batch_size", "6", "--world_size", "4"))
    assert step["waits"] == {}
    assert step["fits"]
    assert step["state_gib"] == pytest.approx(46.2e6 * 16 / 2**30, rel=0.01)
    # 32.47 have been seen
    assert step["peak_gib"] == pytest.approx(32.5, rel=0.01)


@needs_compiler
def test_cascade_at_published_size():
    """The last stage, of 256^3 voxels, with its own batch; tables that stay are copied once, in the first step."""
    done = rehearse("train_accelerate.py", "--config", "configs/multi_view_config.json")
    step = last_object(done)
    assert "2 samples per GPU x 2 accumulation" in done.stdout
    assert all("cpu -> cuda in geometry.py" in wait for wait in step["waits"])
    assert step["fits"]
    # 11.49 have been seen
    assert step["peak_gib"] == pytest.approx(11.5, rel=0.1)


@needs_compiler
@pytest.mark.parametrize(("precision", "peak_gib"), [("bf16", 2.18), ("no", 3.67)])
def test_compressed_ad_at_published_size(precision, peak_gib):
    step = last_object(rehearse("train.py", "--mixed_precision", precision))
    assert step["waits"] == {}
    assert step["fits"]
    # the values that have been seen
    assert step["peak_gib"] == pytest.approx(peak_gib, rel=0.01)


@needs_compiler
def test_prs_med_tiny_in_fp32(tmp_path):
    tiny = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    sizes = {
        "llava_med_v1.5_mistral_7b": {
            "text_config": {"num_key_value_heads": 2},
            "vision_config": {"image_size": 56},
        },
        "sam_vit_base": {"vision_config": {"image_size": 128}},
    }
    for name, parts in sizes.items():
        shutil.copytree(MODELS / name, tmp_path / name)
        config = json.loads((MODELS / name / "config.json").read_text())
        for part, changes in parts.items():
            config[part] |= tiny | changes
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    vlm, sam = (str(tmp_path / name) for name in sizes)
    flags = ["--vlm_path", vlm, "--sam_path", sam, "--mixed_precision", "no"]
    step = last_object(rehearse("train_prs_med.py", *flags))
    assert step["waits"] == {}
    assert 0 < step["peak_gib"] < 1


@pytest.mark.parametrize(
    ("script", "said"),
    [("train_prs_med.py", "needs a GPU, or a C++ compiler"), ("examples/minimal.py", "has no largest_batch()")],
)
def test_one_line_where_it_cannot(script, said, tmp_path):
    """Without a compiler; a script without what is needed."""
    done = rehearse(script, PATH="/nonexistent", XDG_CACHE_HOME=str(tmp_path), CXX="")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
