"""Guide 0 where an image cannot be used when its turn comes, and where results cannot be written: one line each."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import PRS_MED
from PIL import Image

from tasks.prs_med import data as prs_med_data

FLAGS = ["--batch_size", "4", "--max_steps", "1", "--max_new_tokens", "2", "--log_every", "1"]
# what the check before training would find is met where it is decoded, as a file that changed during the run is
LATE = [*FLAGS, "--skip_data_check", "--num_epochs", "1", "--max_steps", "0"]


@pytest.fixture(scope="module")
def trained(prs_med_data, tmp_path_factory, zygote):
    out = tmp_path_factory.mktemp("faults") / "run"
    done = zygote(PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", out, *FLAGS)
    assert done.code == 0, done.stderr
    return out


def cut(row: prs_med_data.Row) -> None:
    content = Path(row.image).read_bytes()
    Path(row.image).write_bytes(content[: len(content) // 2])


def reshape(row: prs_med_data.Row) -> None:
    Image.open(row.mask).resize((32, 48)).save(row.mask)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("split", "damage", "ranks", "flags", "message"),
    [
        ("train", cut, 1, ["--num_workers", "0", "--cache_gb", "0"], "is not a readable image"),
        ("train", cut, 2, ["--num_workers", "1", "--cache_gb", "0"], "is not a readable image"),
        ("train", reshape, 2, [], "mask of 32 x 48 pixels does not fit its image of 32 x 32; replace"),
        ("val", cut, 2, ["--num_workers", "1", "--cache_gb", "0"], "is not a readable image"),
        ("test", cut, 1, ["--eval_only"], "is not a readable image"),
        ("test", cut, 2, ["--eval_only"], "is not a readable image"),
    ],
)
def test_an_image_that_cannot_be_used(prs_med_data, trained, zygote, tmp_path, split, damage, ranks, flags, message):
    root = tmp_path / "data"
    shutil.copytree(prs_med_data, root)
    row = [row for row in prs_med_data.read_annotations(root, None, False) if row.split == split][-1]
    damage(row)
    flags = [*LATE, *flags, "--resume_from", trained] if "--eval_only" in flags else [*LATE, *flags]
    done = zygote(PRS_MED, "--data_root", root, "--checkpoint_dir", tmp_path / "run", *flags, ranks=ranks)
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert message in errors[0]
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
def test_evaluation_on_a_closed_disk(prs_med_data, trained, closed_disk, zygote):
    """The table is printed, each file that is not there is named, and the evaluation has not failed."""
    flags = ["--eval_only", "--resume_from", trained, "--max_new_tokens", "2", "--annotations", "lung_CT"]
    done = zygote(PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", closed_disk, *flags, ranks=2)
    assert done.code == 0, done.stderr
    assert re.search(r"^test\s.*\bdice\b", done.stdout, re.MULTILINE)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert [re.sub(r".*/", "", line.split(": not written")[0]) for line in lines] == [
        "eval_test.json",
        "test_predictions.png",
    ]
    assert all(re.fullmatch(r"warning: \S+: not written \((No space|Read-only).*\)", line) for line in lines)


def test_prediction_on_a_closed_disk(prs_med_data, trained, closed_disk, zygote):
    """The answer is printed all the same; that its files are not there is an error."""
    image = next(iter((prs_med_data / "skin_rgbimage" / "test_images").iterdir()))
    flags = ["--predict", image, "--question", "Where is it?", "--resume_from", trained, "--max_new_tokens", "2"]
    done = zygote(PRS_MED, "--data_root", prs_med_data, "--checkpoint_dir", closed_disk, *flags, ranks=2)
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert re.fullmatch(
        r"error: \S+: not written \((No space|Read-only).*\); choose another --checkpoint_dir", lines[0]
    )
    assert "mask: " in done.stdout
