"""A clean run has nothing on its error stream, and no library speaks between its lines."""

import csv
import subprocess
import sys

import pytest
from conftest import ROOT
from test_survival import TINY


@pytest.mark.parametrize(
    "task",
    [["prs_med", "--image_size", "32"], pytest.param(["mimic_cxr", "--image_size", "64"], marks=pytest.mark.soak)],
)
def test_sample_data_says_one_line(tmp_path, task):
    """In a process of its own: DeepSpeed, which speaks when it is imported, is not."""
    name, *sizes = task
    sizes += ["--num_train", "2", "--num_val", "1", "--num_test", "1"]
    command = [sys.executable, str(ROOT / "sample_data.py"), name, str(tmp_path / "set"), *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{tmp_path}/set: ")
    assert done.stdout.count("\n") == 1


def odd_names(scans, tmp_path) -> list:
    """Flags of a table whose patients have names that matplotlib's font lacks, or takes for a formula."""
    with open(scans / "dataset.csv", newline="") as file:
        header, *rows = csv.reader(file)
    with open(tmp_path / "odd.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *([f"\u60a3\u8005 $_{row[0]}$ {{", *row[1:]] for row in rows)])
    return ["--csv_path", tmp_path / "odd.csv", "--data_dir", scans, "--cache_dir", tmp_path / "cache", *TINY]


@pytest.mark.parametrize("script", ["train_survival_distributed", "train_accelerate", "train"])
def test_a_clean_run_of_two_processes_has_no_warning(request, zygote, tmp_path, script):
    out = tmp_path / "run"
    if script == "train_survival_distributed":
        words = [*odd_names(request.getfixturevalue("scans"), tmp_path), "--log_dir", out]
    elif script == "train_accelerate":
        words = request.getfixturevalue("cascade")(out)
    else:
        words = request.getfixturevalue("in_context")(out)
    done = zygote(ROOT / f"{script}.py", *words, "--max_steps", 2, ranks=2)
    assert done.code == 0, done.stderr[-2000:]
    assert done.stderr == ""
    assert "Warning" not in done.stdout
