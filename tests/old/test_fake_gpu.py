"""One training step of each script on a GPU that is not there.

At the published size in both half precisions, and tiny in fp32.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from old.fake_cuda_utils import find_compiler, has_gpu

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30

pytestmark = pytest.mark.skipif(not find_compiler() and not has_gpu(), reason="needs a C++ compiler, or a GPU")


class Most(NamedTuple):
    """What a micro-batch in half precision may take: GiB of tensors at once, and GB of copies.

    layout_gb: into another memory format; casts_gb: into another dtype.
    """

    peak_gib: float
    layout_gb: float
    casts_gb: float


# Each is a little above what was traced on 2026-11-22; the figures before are in benchmarks/RESULTS.md.
MOST = {
    "compressed_ad": Most(2.3, 0.7, 2.8),
}

# script and flags at the published sizes
FULL_SIZE = {
    "compressed_ad": ["train.py"],
}


# as small as can be, in fp32
TINY = {
    "compressed_ad": "train.py --tf_n_embd 16 --tf_n_head 2 --n_transit 20 --n_latent 4 --batch_size 4".split(),
}


@pytest.fixture(scope="module")
def steps() -> dict[str, dict]:
    """{"<name>, <precision>": exit code, output and traced steps}, all by one process."""
    commands = {}
    for name, flags in FULL_SIZE.items():
        for precision in ("bf16", "fp16"):
            commands[f"{name}, {precision}"] = [*flags, "--mixed_precision", precision]
    for name, flags in TINY.items():
        commands[f"{name}, tiny"] = [*flags, "--mixed_precision", "no"]

    script = [sys.executable, str(Path(__file__).with_name("fake_gpu_steps.py"))]
    done = subprocess.run(script, input=json.dumps(commands), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def the_step(steps: dict[str, dict], name: str) -> dict:
    """The traced step of a run that went well."""
    run = steps[name]
    assert run["code"] == 0, run["said"]
    (step,) = run["steps"]
    return step


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MOST)
def test_full_size(steps, name, precision):
    """No device or dtype error, no wait of the host, and no more memory and useless traffic than what is known."""
    step = the_step(steps, f"{name}, {precision}")
    most = MOST[name]
    assert step["waits"] == {}
    assert step["peak"] / GIB < most.peak_gib
    assert sum(step["layout_copies"].values()) / 1e9 < most.layout_gb
    assert sum(step["casts"].values()) / 1e9 < most.casts_gb


@pytest.mark.parametrize("name", MOST)
def test_tiny_in_fp32(steps, name):
    """The same code in fp32, where autocast does nothing and attention takes other kernels: no error, no wait."""
    step = the_step(steps, f"{name}, tiny")
    assert step["waits"] == {}
    assert step["flops"] > 0


def last_object(run: dict) -> dict:
    """The JSON object that a rehearsal ends with."""
    return json.loads(run["said"].splitlines()[-1])


def test_the_rehearsal_says_what_was_traced(steps):
    """The last line is one JSON object with the tracer's numbers, and says whether they fit."""
    run = steps["compressed_ad, bf16"]
    reported = last_object(run)
    names = ["peak_gib", "state_gib", "activations_gib", "tflop_per_step", "fits", "advice"]
    assert list(reported) == names
    (step,) = run["steps"]
    assert reported["peak_gib"] == pytest.approx(step["peak"] / GIB, abs=1e-3)
    parts = reported["state_gib"] + reported["activations_gib"]
    assert reported["peak_gib"] == pytest.approx(parts, abs=1e-3)
    assert reported["tflop_per_step"] == pytest.approx(step["flops"] / 1e12, abs=1e-3)

    assert reported["fits"]


def test_without_a_compiler_it_says_so(tmp_path):
    """One line and code 2, before torch is imported."""
    command = [sys.executable, str(ROOT / "train.py"), "--rehearse"]
    environment = {"PATH": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: --rehearse: needs a GPU, or a C++ compiler")
    assert done.stderr.count("\n") == 1
