"""benchmarks/gpu.py as a trial on the CPU, what it watches a script for, and the table of benchmarks/scaling.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
import scaling


def run(*command) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout


def test_a_part_that_was_broken_off_is_measured_again(tmp_path):
    kept = {"commit": "abc", "seconds": 1.0, "lines": [gpu.row("torch", "as it was")]}
    begun = {"commit": "new", "lines": [], "before": {"compressed_ad: waits a step": "3 (abc)"}}
    (tmp_path / "cpu.json").write_text(json.dumps({"machine": kept, "waits": begun}))
    flags = "--tiny --parts machine,waits --tasks compressed_ad --folder".split()
    assert "left out" in run("benchmarks/gpu.py", *flags, tmp_path, "--minutes", "0.1")
    run("benchmarks/gpu.py", *flags, tmp_path)
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert results["machine"] == kept
    line = results["waits"]["lines"][0]
    assert (line["value"], line["ok"], line["before"]) == (0, True, "3 (abc)")


def test_a_bit_of_a_loss_or_of_the_weights_is_a_difference(tmp_path):
    runs = {"one": (0.5, b"w"), "two": (0.5, b"w"), "three": (0.5, b"v"), "four": (0.5000000001, b"w")}
    for name, (loss, weights) in runs.items():
        (tmp_path / name).mkdir()
        line = {"step": 1, "train/loss": loss, "train/grad_norm": 1.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line))
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    found = [gpu.difference(tmp_path / "one", tmp_path / name) for name in runs]
    assert found == ["none", "none", "final weights", "[1, 0.5, 1.0] and [1, 0.5000000001, 1.0]"]


def test_tables_replace_what_stands_between_their_marks(tmp_path):
    page, text = tmp_path / "RESULTS.md", (ROOT / "benchmarks/RESULTS.md").read_text()
    page.write_text(text)
    line = gpu.row("stage 3: samples/s", 9.87654, least=20, note="a | b") | {"before": "9 (abc)"}
    for _ in range(2):
        gpu.write_tables(page, {"cascade": {"lines": [line]}})
    before, after = text.split(gpu.BEGIN)[0], text.split(gpu.END)[1]
    tables = page.read_text().removeprefix(before).removesuffix(after).splitlines()
    assert "| cascade | 9.877 | - | - | - | - | 9 (abc) | a / b |" in tables
    assert tables[-2] == "| cascade | stage 3: samples/s | 9.877 | >= 20 | 9 (abc) | FAILED a / b |"


NOISY = """import torch
library = torch.library.Library("aten", "IMPL")
library.impl("relu", lambda x: x.clamp(min=0) + torch.rand(1), "CPU")
"""


@pytest.mark.parametrize(
    ("watch", "before", "after", "found"),
    [
        ("waits", "step.update(", "batch['image'].sum().item(); step.update(", "_local_scalar_dense in minimal.py:150"),
        ("repeats", "import torch\n", NOISY, "relu"),
    ],
)
def test_a_planted_fault_is_found(watch, before, after, found, tmp_path):
    """A wait in each step, seen from the third on; an operation, twice a step, of other bits at each call."""
    script = tmp_path / "minimal.py"
    script.write_text((ROOT / "examples/minimal.py").read_text().replace(before, after, 1))
    out = run("benchmarks/watched.py", watch, script, "--max_steps", "4", "--output_dir", tmp_path / "run")
    seen = json.loads(out.splitlines()[-1])
    assert (seen.get("in_steps") or seen.get("differ")) == {found: 2 if watch == "waits" else 8}


def test_scaling_table_beside_the_guide():
    rows = scaling.speed_ups({1: 10.0, 2: 19.0, 4: 34.0}, "train_survival_distributed.py")
    assert [(row["speed_up"], row["efficiency"], row["guide"]) for row in rows] == [
        (1.0, 1.0, 1.0),
        (1.9, 0.95, 1.8),
        (3.4, 0.85, 3.5),
    ]
    # the last flag counts
    assert scaling.batch_of_all(["--batch_size", "6"], 4)[-1] == "24"


@pytest.mark.soak
def test_all_parts(tmp_path):
    run("benchmarks/gpu.py", "--tiny", "--folder", tmp_path)
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert tuple(results) == tuple(gpu.PARTS)
    assert all(line["ok"] for part in results.values() for line in part["lines"])
