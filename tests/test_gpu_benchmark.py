"""benchmarks/gpu.py as a trial on the CPU: what it measures again, what it calls a difference, and its table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu


def run(*command) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout


def test_only_parts_without_a_good_result_are_measured(tmp_path):
    kept = {"commit": "abc", "lines": [gpu.row("torch", "as it was")], "complete": True}
    interrupted = {"commit": "abc", "lines": [gpu.row("samples/s", 1.0)]}
    failed = {"commit": "abc", "lines": [gpu.row("the whole part", "no", ok=False)], "complete": True}
    before = {"machine": kept, "compressed_ad": interrupted, "resume": failed}
    (tmp_path / "cpu.json").write_text(json.dumps(before))
    flags = ["--tiny", "--folder", tmp_path, "--parts"]
    assert run("benchmarks/gpu.py", *flags, "resume", "--minutes", "0") == "== resume\n"
    assert "machine: has a good result" in run("benchmarks/gpu.py", *flags, "machine", "compressed_ad")
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert results["machine"] == kept
    lines = {line["what"]: line["value"] for line in results["compressed_ad"]["lines"]}
    assert 0 < lines["MFU"] < 1
    assert {"samples/s", "peak GiB", "peak over the rehearsed one"} < set(lines)


def test_a_bit_of_a_loss_or_of_the_weights_is_a_difference(tmp_path):
    runs = {"one": (0.5, b"w"), "two": (0.5, b"w"), "three": (0.5, b"v"), "four": (0.5000000001, b"w")}
    for name, (loss, weights) in runs.items():
        (tmp_path / name).mkdir()
        line = {"step": 1, "train/loss": loss, "train/grad_norm": 1.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line))
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    found = [gpu.difference(tmp_path / "one", tmp_path / name) for name in runs]
    assert found == ["none", "none", "final weights", "[1, 0.5, 1.0] and [1, 0.5000000001, 1.0]"]


def test_table_replaces_what_stands_between_the_marks(tmp_path):
    page, text = tmp_path / "RESULTS.md", (ROOT / "benchmarks/RESULTS.md").read_text()
    page.write_text(text)
    for _ in range(2):
        gpu.write_table(page, {"cascade": {"lines": [gpu.row("samples/s", 9.87654, "a | b", ok=False)]}})
    before, after = text.split(gpu.BEGIN)[0], text.split(gpu.END)[1]
    table = page.read_text().removeprefix(before).removesuffix(after).splitlines()
    assert table[-2] == "| cascade | samples/s | 9.877 | FAILED a / b |"
    assert len(table) == 5


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
    # forward, and the gradient of the weights; the input needs none
    assert json.loads(out.splitlines()[-1])["tflop"] == 2 * (2 * 2 * 4 * 3) / 1e12


@pytest.mark.soak
def test_all_parts(tmp_path):
    run("benchmarks/gpu.py", "--tiny", "--folder", tmp_path)
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert set(results) == set(gpu.PARTS)
    assert all(line["ok"] for part in results.values() for line in part["lines"])
