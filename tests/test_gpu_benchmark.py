"""benchmarks/gpu.py as a trial on the CPU, and the table of benchmarks/scaling.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
import scaling


def trial(folder: Path, *flags: str) -> dict:
    command = [sys.executable, ROOT / "benchmarks/gpu.py", "--folder", folder, "--tiny", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(folder.glob("*.json")).read_text())


def test_failed_part_is_measured_again_and_others_are_kept(tmp_path, monkeypatch):
    kept = [gpu.row("torch", "as it was")]
    crashed = [gpu.row("whole part", "exit code 1", equal="to end well")]
    assert [line["ok"] for line in kept + crashed] == [True, False]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "cpu.json").write_text(json.dumps({"machine": kept, "same_answer": crashed}))
    results = trial(tmp_path, "--parts", "machine,same_answer")
    assert results["machine"] == kept
    (line,) = results["same_answer"]
    assert (line["value"], line["ok"]) == ("none", True)

    # the runs that it compared had three steps; a bit of the weights or of a loss would have been seen
    alone, together = (tmp_path / "runs" / f"compressed_ad_{name}" for name in ("alone", "together"))
    assert [step["step"] for step in gpu.training_lines(together)] == [1, 2, 3]
    weights = bytearray((together / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (together / "model.safetensors").write_bytes(weights)
    assert gpu.difference(alone, together) == "final weights"
    steps = gpu.training_lines(together)
    steps[2]["train/loss"] += 1e-9
    (together / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert gpu.difference(alone, together).startswith("[3, ")

    # the table replaces what stands between its marks, and only that
    page = tmp_path / "RESULTS.md"
    text = (ROOT / "benchmarks/RESULTS.md").read_text()
    page.write_text(text)
    gpu.write_table(page, results | {"survival": [gpu.row("MFU", 0.1, least=0.2, note="a | b")]})
    gpu.write_table(page, results | {"survival": [gpu.row("MFU", 0.1, least=0.2, note="a | b")]})
    before, after = text.split(gpu.BEGIN)[0], text.split(gpu.END)[1]
    table = page.read_text().removeprefix(before).removesuffix(after).splitlines()
    assert "torch as it was" in table[1]
    assert table[-2:] == ["| survival | MFU | 0.1 | >= 0.2 | FAILED a / b |", gpu.END]


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
    assert tuple(trial(tmp_path)) == gpu.PARTS
