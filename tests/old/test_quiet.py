"""A clean run has nothing on its error stream, and no library speaks between its lines."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT


def test_sample_data_has_no_warning(tmp_path):
    """In a process of its own."""
    command = [sys.executable, "-m", "tools.sample_data", "compressed_ad", str(tmp_path / "set")]
    command += ["--streams", "2", "--steps", "100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""


# what a script does, its exit code, and its words on the error stream
ENDS = {
    "few lines": ("print(1)", 141, ""),
    "many lines": ("[print(n) for n in range(100_000)]", 141, ""),
    "at once": ("print(1, flush=True)", 141, ""),
    "an error": ("(print(1), fail(InputError('x; y')))", 2, "error: x; y\n"),
}


def end_script(words: str, output: int) -> subprocess.CompletedProcess:
    """A script that does so, writing into this pipe or file."""
    program = f"""
from old.cli_utils import InputError, run_main
def fail(error):
    raise error
run_main(lambda _: {words} and None, None)
"""
    command = [sys.executable, "-c", program]
    buffered = {"PYTHONUNBUFFERED": ""}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | buffered,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", ENDS)
def test_a_script_whose_output_nobody_reads_ends_quietly(name):
    """As behind `| head`, which has gone."""
    words, code, message = ENDS[name]
    reader, writer = os.pipe()
    os.close(reader)
    done = end_script(words, writer)
    os.close(writer)
    assert done.returncode == code
    assert done.stderr == message


def test_another_broken_pipe_is_a_fault():
    done = end_script("fail(BrokenPipeError('of a worker'))", subprocess.DEVNULL)
    assert done.returncode == 1
    assert done.stderr.endswith("BrokenPipeError: of a worker\n")


def test_a_clean_run_of_two_processes_has_no_warning(compressed_ad_flags, zygote, tmp_path):
    done = zygote(ROOT / "train.py", *compressed_ad_flags(tmp_path / "run"), "--max_steps", 2, ranks=2)
    assert done.code == 0, done.stderr[-2000:]
    assert done.stderr == ""
    assert "Warning" not in done.stdout
