"""tools/verify.py: compares runs, repeats steps, and executes nothing from an untrusted run folder."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools import verify
from utils.cli import InputError

ROOT = Path(__file__).resolve().parents[1]


def check(*words) -> int:
    """Return the command's exit code."""
    try:
        return verify.main(verify.parse_args([str(word) for word in words]))
    except InputError as error:
        print(error)
        return 2
    except SystemExit as end:
        return end.code


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of about 24 steps with two evaluations."""
    folder = tmp_path_factory.mktemp("verify") / "run"
    flags = "--num_epochs 2 --image_size 8 --save_every 3 --log_every 2 --keep_last 99 --num_workers 0 --deterministic"
    command = [sys.executable, ROOT / "examples/minimal.py", "--output_dir", folder, *flags.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "copy")


def edit_log(folder: Path, change) -> None:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_compare_runs(trained, copy, capsys):
    edit_log(copy, lambda log: log[0].update({"train/samples_per_s": 1.0}))
    assert check(trained, copy) == 0
    assert capsys.readouterr().out.count("equal to the bit") == 2
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert check(trained, copy) == 1
    assert "model.safetensors: different bits" in capsys.readouterr().out
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | {"val/accuracy": 0.123}))
    assert check(trained, copy) == 1
    assert "summary.json: val/accuracy is " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "line", "code_with_tolerance"),
    [
        (lambda log: log[2].update({"train/lr": math.nextafter(log[2]["train/lr"], 1)}), "line 3, step 6: train/lr", 0),
        (lambda log: log[2].update({"train/loss": log[2]["train/loss"] * 1.01}), "relative difference: 9.90e-03", 1),
        (lambda log: log.pop(), "one log is longer", 1),
    ],
)  # fmt: skip
def test_different_logs(trained, copy, capsys, change, line, code_with_tolerance):
    edit_log(copy, change)
    assert check(trained, copy) == 1
    assert line in capsys.readouterr().out
    assert check(trained, copy, "--tolerance", 1e-6) == code_with_tolerance


def test_repeated_steps(copy, capfd):
    """Start from step 3, because newer checkpoints are damaged or a link, find an edited line, and change no file."""
    (copy / "best.pt").unlink()
    (copy / "step_00000009.pt").rename(copy / "moved")
    (copy / "step_00000009.pt").symlink_to(copy / "moved")
    damaged = bytearray((copy / "step_00000006.pt").read_bytes())
    damaged[100] ^= 1
    (copy / "step_00000006.pt").write_bytes(damaged)
    edit_log(copy, lambda log: [line.update({"train/loss": 0.5}) for line in log if line["step"] == 14])
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert check(copy, "--steps", "11:15") == 1
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    text = capfd.readouterr().out
    assert "(step 3)" in text
    # the lines before it are equal
    assert re.search(r"first difference: line \d, step 14: train/loss is 0.5 and ", text)


@pytest.mark.parametrize(
    ("planted", "line"),
    [
        ({"environment": {"LD_PRELOAD": "evil.so"}}, "environment"),
        ({"script": "{folder}/evil.py"}, "evil.py' in this project"),
        ("!!python/object/apply:os.system ['touch {folder}/executed']", "not valid YAML"),
    ],
)
def test_nothing_from_a_run_folder_is_executed(copy, capfd, planted, line):
    for name in ("evil.py", "sitecustomize.py", "utils.py"):
        (copy / name).write_text(f"open({str(copy / 'executed')!r}, 'w')")
    text = planted
    if isinstance(planted, dict):
        text = yaml.safe_dump(yaml.safe_load((copy / "args.yaml").read_text()) | planted)
    (copy / "args.yaml").write_text(text.replace("{folder}", str(copy)))
    assert check(copy, "--steps", "1:2") == 2
    assert line in "".join(capfd.readouterr())
    assert not (copy / "executed").exists()


def test_invalid_input(trained, copy):
    (copy / "metrics.jsonl").unlink()
    (copy / "metrics.jsonl").symlink_to(trained / "metrics.jsonl")
    for words in ([copy, trained], [trained], [trained, trained, "--steps", "1:2"], [trained, "--steps", "99:101"]):
        assert check(*words) == 2
