"""Guide 0 where an image cannot be used when its turn comes, and where results cannot be written: one line each."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from conftest import PRS_MED
from PIL import Image

from tasks.prs_med.data import Row, read_annotations

FLAGS = ["--batch_size", "4", "--max_steps", "1", "--max_new_tokens", "2", "--log_every", "1"]
# what the check before training would find is met where it is decoded, as a file that changed during the run is
LATE = [*FLAGS, "--skip_data_check", "--num_epochs", "1", "--max_steps", "0"]


@pytest.fixture(scope="module")
def run_prs_med(zygote):
    """run_prs_med(data, run_folder, flags, ranks=..., ...): what the script ends with."""

    def run(data: Path, run_folder: Path, flags: list, **options) -> SimpleNamespace:
        return zygote(PRS_MED, "--data_root", data, "--checkpoint_dir", run_folder, *flags, **options)

    return run


@pytest.fixture(scope="module")
def trained(prs_med_data, tmp_path_factory, run_prs_med):
    out = tmp_path_factory.mktemp("faults") / "run"
    done = run_prs_med(prs_med_data, out, FLAGS)
    assert done.code == 0, done.stderr
    return out


def cut(row: Row) -> None:
    content = Path(row.image).read_bytes()
    Path(row.image).write_bytes(content[: len(content) // 2])


def reshape(row: Row) -> None:
    Image.open(row.mask).resize((32, 48)).save(row.mask)


class Case(NamedTuple):
    """What becomes of the last image of a split, the run that meets it, and the line that it ends with."""

    split: str
    damage: Callable
    ranks: int
    flags: list[str]
    message: str


UNREADABLE = "is not a readable image"
WORKER = ["--num_workers", "1", "--cache_gb", "0"]
CASES = [
    Case("train", cut, 1, ["--num_workers", "0", "--cache_gb", "0"], UNREADABLE),
    Case("train", cut, 2, WORKER, UNREADABLE),
    Case("train", reshape, 2, [], "mask of 32 x 48 pixels does not fit its image of 32 x 32; replace"),
    Case("val", cut, 2, WORKER, UNREADABLE),
    Case("test", cut, 1, ["--eval_only"], UNREADABLE),
    Case("test", cut, 2, ["--eval_only"], UNREADABLE),
]


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_an_image_that_cannot_be_used(prs_med_data, trained, run_prs_med, tmp_path, case):
    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    row = [row for row in read_annotations(root, None, False) if row.split == case.split][-1]
    case.damage(row)

    flags = [*LATE, *case.flags]
    if "--eval_only" in flags:
        flags += ["--resume_from", trained]
    done = run_prs_med(root, tmp_path / "run", flags, ranks=case.ranks)
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert case.message in errors[0]
    assert errors[0].startswith(f"error: {row.source}: ")


@pytest.fixture(params=["full", "read-only"])
def closed_disk(request, tmp_path):
    """A disk that takes nothing more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    if request.param == "full":
        (folder / "filler").write_bytes(b"x" * 4096)
    else:
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.soak
def test_evaluation_on_a_closed_disk(prs_med_data, trained, closed_disk, run_prs_med):
    """The table is printed, each file that is not there is named, and the evaluation has not failed."""
    flags = ["--eval_only", "--resume_from", trained, "--max_new_tokens", "2", "--annotations", "lung_CT"]
    done = run_prs_med(prs_med_data, closed_disk, flags, ranks=2)
    assert done.code == 0, done.stderr
    assert re.search(r"^test\s.*\bdice\b", done.stdout, re.MULTILINE)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    names = [re.sub(r".*/", "", line.split(": not written")[0]) for line in lines]
    assert names == ["eval_test.json", "eval_test_cases.csv", "test_predictions.png"]
    assert all(re.fullmatch(r"warning: \S+: not written \((No space|Read-only).*\)", line) for line in lines)


def test_prediction_on_a_closed_disk(prs_med_data, trained, closed_disk, run_prs_med):
    """That its files cannot be written is an error, in one line."""
    image = next(iter((prs_med_data / "skin_rgbimage" / "test_images").iterdir()))
    flags = ["--predict", image, "--question", "Where is it?", "--resume_from", trained, "--max_new_tokens", "2"]
    done = run_prs_med(prs_med_data, closed_disk, flags, ranks=2)
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    line = r"error: \S+: not written \((No space|Read-only).*\); free space, or name another run folder .*"
    assert re.fullmatch(line, lines[0])
