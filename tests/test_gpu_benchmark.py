"""benchmarks/gpu.py and benchmarks/scaling.py, by their own commands on the CPU."""

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
import gpu_process
import gpu_sizes
import scaling

KEYS = ["part", "name", "value", "low", "high", "result", "reason"]


def run_benchmark(script: str, flags: list) -> subprocess.CompletedProcess:
    """Run a script of benchmarks/ on a machine without a GPU; asserts exit code 0."""
    command = [str(word) for word in (sys.executable, ROOT / "benchmarks" / script, *flags)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def read_lines(path: Path) -> list[dict]:
    """The lines of a report."""
    return json.loads(path.read_text())


def test_failed_part_is_run_again_and_others_are_kept(tmp_path):
    results = (ROOT / "benchmarks/RESULTS.md").read_bytes()
    kept = {"part": "versions", **gpu.measured("torch", "as it was")}
    broken = {"part": "compressed_ad", **gpu.failed("whole part", "took more than 300 s and was killed")}
    gpu.write_report(tmp_path / "cpu.json", [broken, kept])
    run_benchmark("gpu.py", ["--folder", tmp_path, "--parts", "versions,compressed_ad"])

    # the result that was there stays, the failure is replaced by a run's lines
    lines = read_lines(tmp_path / "cpu.json")
    assert all(list(line) == KEYS for line in lines)
    assert lines[0] == kept
    by_name = {line["name"]: line for line in lines[1:]}
    assert by_name["samples/s"]["value"] > 0
    assert by_name["host waits a step"]["result"] == "skipped"
    assert "whole part" not in by_name
    assert {line["result"] for line in lines} == {"pass", "skipped"}
    assert all(line["reason"] for line in lines if line["result"] == "skipped")
    assert (ROOT / "benchmarks/RESULTS.md").read_bytes() == results


def test_part_that_crashes_or_hangs_is_a_line(tmp_path):
    line = json.dumps(gpu.measured("first", 1.0))
    write = f"open({str(tmp_path / 'lines')!r}, 'w').write({line!r} + chr(10))"

    def run(code: str, limit: float) -> list[dict]:
        command = [sys.executable, "-c", code]
        return gpu.run_part(command, tmp_path / "lines", tmp_path / "log", limit)

    # what it has measured before it crashes is kept
    first, crash = run(f"{write}; raise ValueError('no such thing')", 60)
    assert first["result"] == "pass"
    assert crash["result"] == "fail"
    assert crash["reason"] == "exit code 1: ValueError: no such thing"

    (late,) = run("import time; time.sleep(60)", 0.5)
    assert late["result"] == "fail"
    assert late["reason"] == "took more than 0 s and was killed"

    (silent,) = run("pass", 60)
    assert silent["reason"] == "ended without a result"


# A process that starts another one, and writes that one's id into the file it is given.
PARENT = """
import subprocess, sys

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open(sys.argv[1], "w") as file:
    file.write(str(child.pid))
child.wait()
"""


def test_processes_of_a_killed_part_are_gone(tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path / "pid")]
    with pytest.raises(TimeoutError):
        gpu.run_process(command, tmp_path / "log", 1.5, dict(os.environ))
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

    # a second time changes nothing
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

    # four steps with so many waits each, of which the first has none to compare with
    waits = gpu_process.HostWaits()
    with warnings.catch_warnings():
        waits.start()
        for count in (0, 2, 0, 1):
            for _ in range(count):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            waits.at_step.append(waits.count)
    assert waits.of_each_step() == [2, 0, 1]

    # most steps have none
    facts = {"host_waits": [9, 9, 0, 0, 0, 9, 0, 0], "places": {"train.py:7": 3}}
    run = gpu.Run([], facts, 0, 1.0, 0)
    setting = gpu.Setting("full", 1, Path())
    line = gpu.host_wait_line(setting, run, 3)
    assert line["value"] == 0
    assert line["result"] == "pass"
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
    flags = ["--batch_size", "6"]
    assert scaling.total_batch("train_survival_distributed.py", flags, 4) == ["--batch_size", "24"]
    assert scaling.total_batch("train.py", flags, 4) == ["--batch_size", "6"]


@pytest.mark.soak
def test_scaling_on_cpu_processes(tmp_path):
    setting = gpu.Setting("tiny", 0, tmp_path)
    flags = gpu.flags_of(setting, "compressed_ad", "tiny")
    asked = ["--gpus", "1,2", "--script", "train.py", "--steps", "8", "--warm_up", "4"]
    run_benchmark("scaling.py", [*asked, "--json", tmp_path / "out.json", *flags])
    rows = read_lines(tmp_path / "out.json")
    assert [row["gpus"] for row in rows] == [1, 2]
    assert all(row["samples_per_s"] > 0 for row in rows)


@pytest.mark.soak
def test_all_parts_on_the_cpu(tmp_path):
    run_benchmark("gpu.py", ["--folder", tmp_path])
    lines = read_lines(tmp_path / "cpu.json")
    assert list(dict.fromkeys(line["part"] for line in lines)) == list(gpu.PARTS)
