"""Numbers and config files that are out of all proportion, in train.py."""

import json

import pytest
from conftest import ROOT

from old.distributed_utils import create_distributed_dataloader
from old.hardware_utils import usable_cores


def nested(opening: str, closing: str) -> str:
    """Brackets in brackets, ten thousand deep."""
    return opening * 10_000 + closing * 10_000


def laughs(key: str) -> str:
    """Ten lines of YAML that stand for 10^10 values, as lists of lists or by merged keys."""
    merged = key == "<<"
    lines = ["a0: &a0 {x: 1}"] if merged else ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for k in range(1, 10):
        ten = "[" + ", ".join([f"*a{k - 1}"] * 10) + "]"
        lines.append(f"a{k}: &a{k} {{<<: {ten}}}" if merged else f"a{k}: &a{k} {ten}")
    return "\n".join(lines)


CONFIGS = {
    "deep.json": ('{"seed": ' + nested("[", "]") + "}", "nested too deeply for a config"),
    "deep.yaml": ("seed: " + nested("[", "]"), "nested too deeply for a config"),
    "maps.yaml": (nested("{a: ", "}"), "nested too deeply for a config"),
    "laughs.yaml": (laughs("list"), "its aliases stand for more than 100000 values"),
    "merged.yaml": (laughs("<<"), "its aliases stand for more than 100000 values"),
    "circle.yaml": ("seed: &a [*a]", "its aliases stand for more than 100000 values"),
    "digits.json": ('{"seed": ' + "9" * 5000 + "}", "not valid JSON"),
    "digits.yaml": ("seed: " + "9" * 5000, "not valid YAML"),
    "date.yaml": ("seed: 2001-99-99", "not valid YAML"),
    # YAML takes it for a number of sixties
    "profile.yaml": ("profile: 20:25", "profile: must be the first and the last of at most 100 steps"),
    "seed.yaml": (f"seed: {2**70}", r"seed: must be a whole number from -2^63 to 2^64 - 1"),
}


def test_configs_that_explode_and_seeds_of_70_bits(zygote, tmp_path):
    for name, (text, message) in CONFIGS.items():
        (tmp_path / name).write_text(text)
        done = zygote(ROOT / "train.py", "--config", tmp_path / name)
        assert done.code == 2, (name, done.stderr[-500:])
        assert done.stderr.count("\n") == 1, (name, done.stderr[-500:])
        assert done.stderr.startswith(f"error: {tmp_path / name}: {message}"), (name, done.stderr[:300])
    for seed in (2**70, -(2**70), "9" * 5000):
        done = zygote(ROOT / "train.py", "--seed", seed)
        assert done.code == 2, done.stderr[-500:]
        assert done.stderr.count("\n") == 1, done.stderr[-500:]
        assert "--seed: must be a whole number from -2^63 to 2^64 - 1, not" in done.stderr


@pytest.fixture
def one_step(compressed_ad_flags, zygote, tmp_path):
    """one_step(seed, num_workers): one optimizer step; returns its output and its training losses."""

    def run(seed: int, num_workers: int) -> tuple[str, list]:
        flags = ["--max_steps", 1, "--log_every", 1, "--overwrite", "--seed", seed, "--num_workers", num_workers]
        done = zygote(ROOT / "train.py", *compressed_ad_flags(tmp_path / "run"), *flags)
        assert done.code == 0, done.stdout[-2000:] + done.stderr[-3000:]
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        return done.stdout, [line["train/loss"] for line in lines if "train/loss" in line]

    return run


def test_the_largest_seed_and_ten_thousand_workers(one_step):
    """Both are taken: the seed as it is, of the workers as many as there are cores; the result is that of none."""
    cores = usable_cores()
    output, losses = one_step(seed=2**64 - 1, num_workers=10_000)
    assert output.count("--num_workers 10000: this machine has ") == 1
    assert f"so {cores} are started per process" in output
    assert len(losses) == 1

    output, without_workers = one_step(seed=2**64 - 1, num_workers=0)
    assert "--num_workers" not in output
    assert without_workers == losses


def test_the_shared_loader_is_limited_by_the_cores():
    for wanted in (0, 1, 10_000):
        loader = create_distributed_dataloader(list(range(64)), 4, num_workers=wanted)
        assert loader.num_workers == min(wanted, usable_cores())
