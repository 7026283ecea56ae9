"""benchmarks/gpu.py and benchmarks/scaling.py, by their own commands on the CPU."""

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
import gpu_process
import gpu_sizes
import scaling

KEYS = ["part", "name", "value", "low", "high", "result", "reason"]


def command(script: str, *flags, **environment) -> subprocess.CompletedProcess:
    """A script of benchmarks/ on a machine without a GPU."""
    words = [sys.executable, ROOT / "benchmarks" / script, *flags]
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([str(word) for word in words], cwd=ROOT, env=variables, capture_output=True, text=True)


def test_failed_part_is_run_again_and_others_are_kept(tmp_path):
    results = (ROOT / "benchmarks/RESULTS.md").read_bytes()
    kept = {"part": "versions", **gpu.measured("torch", "as it was")}
    broken = {"part": "compressed_ad", **gpu.failed("whole part", "took more than 300 s and was killed")}
    gpu.write_report(tmp_path / "cpu.json", [broken, kept])
    done = command("gpu.py", "--folder", tmp_path, "--parts", "versions,compressed_ad")
    assert done.returncode == 0, done.stdout + done.stderr

    # the result that was there stays, the failure is replaced by a run's lines
    lines = json.loads((tmp_path / "cpu.json").read_text())
    assert all(list(line) == KEYS for line in lines)
    assert lines[0] == kept
    found = {line["name"]: line for line in lines[1:]}
    assert found["samples/s"]["value"] > 0
    assert found["host waits a step"]["result"] == "skipped"
    assert "whole part" not in found
    assert {line["result"] for line in lines} == {"pass", "skipped"}
    assert all(line["reason"] for line in lines if line["result"] == "skipped")
    assert (ROOT / "benchmarks/RESULTS.md").read_bytes() == results


def test_part_that_crashes_or_hangs_is_a_line(tmp_path):
    line = json.dumps(gpu.measured("first", 1.0))
    write = f"open({str(tmp_path / 'lines')!r}, 'w').write({line!r} + chr(10))"

    def run(code: str, limit: float) -> list[dict]:
        return gpu.run_part([sys.executable, "-c", code], tmp_path / "lines", tmp_path / "log", limit)

    first, crash = run(f"{write}; raise ValueError('no such thing')", 60)
    assert first["result"] == "pass"
    assert (crash["result"], crash["reason"]) == ("fail", "exit code 1: ValueError: no such thing")
    (late,) = run("import time; time.sleep(60)", 0.5)
    assert (late["result"], late["reason"]) == ("fail", "took more than 0 s and was killed")
    (silent,) = run("pass", 60)
    assert silent["reason"] == "ended without a result"


def test_processes_of_a_killed_part_are_gone(tmp_path):
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    child += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); p.wait()"
    with pytest.raises(TimeoutError):
        gpu.run_process([sys.executable, "-c", child], tmp_path / "log", 1.5, dict(os.environ))
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")

    # on a busy machine a killed process takes a moment to go
    deadline = time.monotonic() + 10
    while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_value_outside_its_range_fails():
    assert gpu.measured("ratio", 0.96, 0.97)["result"] == "fail"
    assert gpu.measured("ratio", float("nan"), 0.97)["result"] == "fail"
    assert gpu.measured("waits", 0, None, 0)["result"] == "pass"
    assert gpu.measured("nothing", None)["result"] == "fail"


def test_results_table_replaces_only_its_own_section(tmp_path):
    path = tmp_path / "RESULTS.md"
    text = (ROOT / "benchmarks/RESULTS.md").read_text()
    path.write_text(text)
    lines = [{"part": "versions", **gpu.measured("device", "1 x a GPU")}]
    lines.append({"part": "survival", **gpu.measured("MFU", 0.31, 0.2, reason="a | b")})
    gpu.write_results(path, lines)
    once = path.read_text()
    assert "| survival | MFU | 0.31 | >= 0.2 | pass | a / b |" in once
    gpu.write_results(path, lines)
    assert path.read_text() == once
    assert once.startswith(text[: text.index(gpu.BEGIN)])
    assert once.endswith(text[text.index(gpu.END) :])


def test_host_waits_are_counted_between_steps(monkeypatch):
    import torch

    # the interpreter's own hook comes back after the test
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    waits = gpu_process.HostWaits()
    with warnings.catch_warnings():
        waits.start()
        for count in (0, 2, 0, 1):
            for _ in range(count):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            waits.at_step.append(waits.count)
    assert waits.of_each_step() == [2, 0, 1]
    run = gpu.Run([], {"host_waits": [9, 9, 0, 0, 0, 9, 0, 0], "places": {"train.py:7": 3}}, 0, 1.0, 0)
    line = gpu.host_wait_line(gpu.Setting("full", 1, Path()), run, 3)
    assert (line["value"], line["result"]) == (0, "pass")
    assert "train.py:7 3" in line["reason"]


def test_every_script_has_its_sizes():
    for table in (gpu_sizes.OUT_FLAG, gpu_sizes.FLAGS, gpu_sizes.SAMPLES, gpu_sizes.BATCH, gpu_sizes.LEAST_MFU):
        assert table.keys() == gpu_sizes.SCRIPTS.keys()
    assert all(limit <= 600 for _, limit in gpu.PARTS.values())


def test_scaling_table_beside_the_guide():
    rows = scaling.speed_ups({1: 10.0, 2: 19.0, 4: 34.0}, "train_mimic_cxr.py")
    assert [row["speed_up"] for row in rows] == [1.0, 1.9, 3.4]
    assert [row["efficiency"] for row in rows] == [1.0, 0.95, 0.85]
    assert [row["guide_speed_up"] for row in rows] == [1.0, 1.9, 3.5]
    assert scaling.table(rows, "GPUs").splitlines()[2].split() == ["2", "19.00", "1.90", "95%", "1.90"]

    # survival's batch is that of all GPUs, the others' that of one
    assert scaling.total_batch("train_survival_distributed.py", ["--batch_size", "6"], 4) == ["--batch_size", "24"]
    assert scaling.total_batch("train.py", ["--batch_size", "6"], 4) == ["--batch_size", "6"]


@pytest.mark.soak
def test_scaling_on_cpu_processes(tmp_path):
    setting = gpu.Setting("tiny", 0, tmp_path)
    flags = gpu.flags_of(setting, "compressed_ad", "tiny")
    words = ["--gpus", "1,2", "--script", "train.py", "--steps", "8", "--warm_up", "4", "--json", tmp_path / "out.json"]
    done = command("scaling.py", *words, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["gpus"] for row in rows] == [1, 2]
    assert all(row["samples_per_s"] > 0 for row in rows)


@pytest.mark.soak
def test_all_parts_on_the_cpu(tmp_path):
    done = command("gpu.py", "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "cpu.json").read_text())
    assert list(dict.fromkeys(line["part"] for line in lines)) == list(gpu.PARTS)
