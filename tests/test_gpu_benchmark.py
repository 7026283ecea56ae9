"""benchmarks/gpu.py on the CPU: which parts it measures again, and which bits it compares."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu


def run(*command) -> str:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True).stdout


def test_only_parts_without_a_good_result_are_measured(tmp_path):
    good = {"lines": [gpu.row("torch", "2.11")], "complete": True}
    failed = {"lines": [gpu.row("the whole part", "no", ok=False)], "complete": True}
    interrupted = {"lines": [gpu.row("samples/s", 1.0)]}
    flags = ["benchmarks/gpu.py", "--tiny", "--folder", tmp_path, "--parts", "machine", "compressed_ad"]
    (tmp_path / "cpu.json").write_text(json.dumps({"machine": good, "compressed_ad": failed}))
    assert run(*flags, "--minutes", "0") == "== machine: has a good result already\n== compressed_ad\n"
    (tmp_path / "cpu.json").write_text(json.dumps({"machine": good, "compressed_ad": interrupted}))
    run(*flags)
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert results["machine"] == good
    lines = {line["what"]: line["value"] for line in results["compressed_ad"]["lines"]}
    assert 0 < lines["MFU"] < 1
    assert {"samples/s", "peak GiB", "peak over the rehearsed one"} < set(lines)


def test_difference_finds_one_bit_of_a_loss_or_of_the_weights(tmp_path):
    runs = {"one": (0.5, b"w"), "two": (0.5, b"v"), "three": (0.5000000001, b"w")}
    for name, (loss, weights) in runs.items():
        (tmp_path / name).mkdir()
        line = {"step": 1, "train/loss": loss, "train/grad_norm": 1.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line))
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    found = [gpu.difference(tmp_path / "one", tmp_path / name) for name in runs]
    assert found == ["none", "final weights", "[1, 0.5, 1.0] and [1, 0.5000000001, 1.0]"]


FLOPS = """
import torch
weights = torch.nn.Linear(4, 3, bias=False)
optimizer = torch.optim.AdamW(weights.parameters())
for _ in range(4):
    weights(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_flops_of_one_step_are_counted(tmp_path):
    (tmp_path / "script.py").write_text(FLOPS)
    out = run("benchmarks/watched.py", "speed", tmp_path / "script.py")
    # the forward pass and the gradient of the weights; the input has no gradient
    assert json.loads(out.splitlines()[-1])["tflop"] == 2 * (2 * 2 * 4 * 3) / 1e12
