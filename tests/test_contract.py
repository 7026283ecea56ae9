"""What the five scripts share, tested by one test over the five, so that none of them drifts away from the others."""

import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT, at_step, tree
from test_run_folder import damage

import checkpoint_utils
from cli_utils import InputError

TASKS = ("prs_med", "mimic_cxr", "survival", "cascade", "compressed_ad")
# a run stops here: within an epoch, and within an interval of --log_every 3
STOP = {"prs_med": 4, "mimic_cxr": 4, "survival": 4, "cascade": 5, "compressed_ad": 5}
# what depends on the clock or the machine
SPEED = ("train/samples_per_s", "train/tflops", "train/mfu")
TIMES = (*SPEED, "train/data_wait", "train/peak_memory_gb", "seconds", "train_seconds")


@pytest.fixture(scope="session")
def small_run(data, chest, scans, cascade, in_context, tmp_path_factory):
    """small_run(task, out, *more) -> script and flags of a run of 8 to 12 steps in 2 epochs."""
    cache = tmp_path_factory.mktemp("cache")
    image_size = ["--image_size", "12", "12", "8"]
    flags = {
        "prs_med": ["--data_root", data, "--batch_size", "7", "--num_epochs", "2", "--max_new_tokens", "2"],
        "mimic_cxr": [*chest, "--batch_size", "8", "--max_samples", "36", "--epochs", "2", "--warmup_steps", "2"],
        "survival": ["--csv_path", scans / "dataset.csv", "--cache_dir", cache, "--resnet", "resnet10", *image_size],
        "cascade": cascade(Path("out")),
        "compressed_ad": in_context(Path("out")),
    }
    flags["prs_med"] += ["--lr_schedule", "cosine", "--learning_rate", "1e-3"]
    flags["survival"] += ["--base_channels", "8", "--batch_size", "7", "--epochs", "2", "--eval_years", "1", "3"]
    flags["cascade"] += ["--scheduler", "cosine"]
    folder_flag = {"prs_med": "checkpoint_dir", "survival": "log_dir", "cascade": "checkpoint_dir"}
    scripts = {"prs_med": "train_prs_med.py", "mimic_cxr": "train_mimic_cxr.py", "cascade": "train_accelerate.py"}
    scripts |= {"survival": "train_survival_distributed.py", "compressed_ad": "train.py"}

    def make(task: str, out: Path, *more) -> list[str]:
        common = ["--num_workers", "0", "--log_every", "3", f"--{folder_flag.get(task, 'output_dir')}", out]
        return [str(word) for word in (ROOT / scripts[task], *flags[task], *common, *more)]

    return make


@pytest.fixture(scope="session")
def finished(small_run, zygote, tmp_path_factory):
    """finished(task) -> the folder of an uninterrupted run, made once. Copy it before changing anything."""
    made: dict[str, Path] = {}

    def make(task: str) -> Path:
        if task not in made:
            out = tmp_path_factory.mktemp("finished") / task
            done = zygote(*small_run(task, out))
            assert done.code == 0, done.stdout[-2000:] + done.stderr[-2000:]
            made[task] = out
        return made[task]

    return make


def lines(out: Path) -> list[dict]:
    """metrics.jsonl without what the clock decides."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def same_tensors(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tensors(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same_tensors(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def one_error_line(done, code: int = 2) -> str:
    assert done.code == code, done.stdout[-2000:] + done.stderr[-2000:]
    found = [line for line in done.stderr.splitlines() if not line.startswith("warning:")]
    assert len(found) == 1, done.stderr
    assert found[0].startswith("error: ")
    return found[0]


@pytest.mark.parametrize("task", TASKS)
def test_deterministic_changes_no_bit_on_a_cpu(task, small_run, finished, zygote, tmp_path):
    out = tmp_path / "run"
    done = zygote(*small_run(task, out, "--deterministic", "--max_steps", "3"))
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "(fp32 on CPU; deterministic)" in done.stdout
    assert lines(out)[0] == lines(finished(task))[0]
    assert lines(out)[0]["step"] == 3


@pytest.mark.parametrize("task", TASKS)
def test_stopping_by_max_steps_and_going_on_is_the_uninterrupted_run(task, small_run, finished, zygote, tmp_path):
    """Losses, metrics, learning rates and weights to the bit; and the steps after the last interval are logged."""
    out, whole = tmp_path / "run", finished(task)
    done = zygote(*small_run(task, out, "--max_steps", STOP[task]))
    assert done.code == 0, done.stderr[-2000:]
    trained = [line for line in lines(out) if "train/loss" in line]
    assert trained[-1]["step"] == STOP[task]
    assert trained[-1]["train/lr"] is not None
    assert (out / "best.pt").exists()

    done = zygote(*small_run(task, out, "--resume_from", "auto"))
    assert done.code == 0, done.stderr[-2000:]
    assert lines(out) == lines(whole)
    ours, theirs = (torch.load(folder / "last.pt", weights_only=True) for folder in (out, whole))
    weights = "net" if "net" in ours else "model"
    assert same_tensors(ours[weights], theirs[weights])
    assert same_tensors(ours["optimizer"], theirs["optimizer"])
    best = [torch.load(folder / "best.pt", weights_only=True)["step"] for folder in (out, whole)]
    assert best[0] == best[1]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (out, whole)]
    summaries = [{name: value for name, value in s.items() if not name.startswith(TIMES)} for s in summaries]
    assert summaries[0] == summaries[1]


# checkpoints after which training goes on at once, without an evaluation, which waits for the file at its end
KILLS = [(task, step) for task in TASKS for step in (2, 6 if task == "compressed_ad" else 4)]


@pytest.mark.parametrize(
    ("task", "step"), [pytest.param(*kill, marks=() if kill == KILLS[2] else pytest.mark.soak) for kill in KILLS]
)
def test_killed_while_a_checkpoint_is_written(task, step, small_run, finished, zygote, tmp_path):
    """Training has gone on meanwhile; resumed from the checkpoint before, or afresh, it is the uninterrupted run."""
    out = tmp_path / "run"
    words = small_run(task, out, "--save_every", "2")
    assert zygote(ROOT / "tests" / "kill_in_save.py", step, *words).code == -signal.SIGKILL
    assert [path.name for path in out.glob(".*.tmp")] == [f".step_{step:08d}.pt.tmp"]
    assert not (out / f"step_{step:08d}.pt").exists()
    done = zygote(*words, "--resume_from", "auto")
    assert done.code == 0, done.stderr[-2000:]
    assert lines(out) == lines(finished(task))
    ours, theirs = (torch.load(folder / "last.pt", weights_only=True) for folder in (out, finished(task)))
    assert same_tensors(ours["optimizer"], theirs["optimizer"])


@pytest.mark.parametrize("task", TASKS)
def test_the_share_of_the_peak(task, small_run, finished, zygote, tmp_path):
    """In every training line; the FLOPs of a sample are what torch counts, for any processes and accumulation."""

    def flops_a_sample(out: Path, ranks: int) -> list[float]:
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        trained = [record for record in records if "train/loss" in record]
        assert all(0 < record["train/mfu"] < 10 for record in trained)
        return [record["train/tflops"] * 1e12 * ranks / record["train/samples_per_s"] for record in trained]

    # survival's batch size is that of all processes, and with accumulation it makes a forward pass more
    sizes = ["--batch_size", "8"]
    if task != "survival":
        sizes = ["--batch_size", "2", "--gradient_accumulation_steps", "2"]
    # the samples of its two runs must be the same, as histories differ in length
    if task == "compressed_ad":
        sizes = ["--train_batch_size", "3", "--gradient_accumulation_steps", "2"]
    flags = [*small_run(task, tmp_path / "run", *sizes), "--max_steps", "1"]
    done = zygote(ROOT / "tests" / "count_twice.py", *flags, ranks=2)
    assert done.code == 0, done.stderr[-2000:]
    pairs = re.findall(r"counted (\d+), by torch (\d+)", done.stdout)
    assert len(pairs) == 2 * (1 if task == "survival" else 2)
    assert all(ours == theirs for ours, theirs in pairs)
    # MIMIC's questions are padded to the longest of a micro-batch
    exact = 0.1 if task == "mimic_cxr" else 1e-6
    assert flops_a_sample(tmp_path / "run", 2)[0] == pytest.approx(flops_a_sample(finished(task), 1)[0], rel=exact)


def moments(value) -> list[torch.Tensor]:
    """AdamW's first moments, wherever they stand in an optimizer's state."""
    if isinstance(value, torch.Tensor):
        return [value]
    if "exp_avg" in value:
        return moments(value["exp_avg"])
    parts = [part for part in value.values() if isinstance(part, dict | torch.Tensor)]
    return [moment for part in parts for moment in moments(part)]


@pytest.mark.parametrize("task", TASKS)
def test_gradients_are_clipped(task, small_run, zygote, tmp_path):
    """After one step, AdamW's first moments are a tenth of the clipped gradient; the log has the norm before."""
    out = tmp_path / "run"
    done = zygote(*small_run(task, out, "--max_steps", "1", "--grad_clip", "0.001"))
    assert done.code == 0, done.stderr
    checkpoint = torch.load(out / "step_00000001.pt", weights_only=True)
    norm = torch.cat([moment.flatten() for moment in moments(checkpoint["optimizer"])]).norm()
    assert float(norm) == pytest.approx(0.1 * 0.001, rel=1e-3)
    assert lines(out)[0]["train/grad_norm"] > 0.01


@pytest.mark.parametrize("task", TASKS)
def test_ctrl_c_saves_and_the_rest_is_the_uninterrupted_run(task, small_run, finished, zygote, tmp_path):
    """SIGINT: exit code 130, a checkpoint of the step reached, and the same lines after a resume."""
    out = tmp_path / "run"
    command = small_run(task, out, "--resume_from", "auto", "--save_every", "1")
    stopped = zygote(*command, interrupt=at_step(out, 2, "all", signal.SIGINT))
    assert stopped.code == 130, stopped.stderr
    assert "signal: saved at step" in stopped.stdout
    assert zygote(*command).code == 0
    assert lines(out) == lines(finished(task))


@pytest.mark.parametrize("task", TASKS)
def test_weight_decay_changed_on_resume_is_taken(task, small_run, finished, zygote, tmp_path):
    """From the checkpoint in the middle on, with a large weight decay: smaller weights at the end."""
    middle = sorted(finished(task).glob("step_*.pt"))[0]
    out = tmp_path / "run"
    done = zygote(*small_run(task, out, "--resume_from", middle, "--weight_decay", "10"))
    assert done.code == 0, done.stderr[-2000:]
    norms = []
    for folder in (out, finished(task)):
        contents = torch.load(folder / "last.pt", weights_only=True)
        weights = contents["net"] if "net" in contents else contents["model"]
        norms.append(sum(float(w.double().square().sum()) for w in weights.values() if w.is_floating_point()))
    assert norms[0] < 0.9999 * norms[1]


@pytest.mark.parametrize("task", TASKS)
def test_run_folders_that_must_not_be_touched(task, small_run, finished, zygote, tmp_path):
    """Four of test_run_folder.py's states by the real scripts: refused in one line, every byte as it was."""
    out = tmp_path / "run"
    steps = sorted(finished(task).glob("step_*.pt"))
    other = tmp_path / "other_run.pt"
    shutil.copy(steps[0], other)
    contents = torch.load(other, weights_only=True) | {"run_id": "0123456789abcdef"}
    torch.save(contents, other)
    # only checkpoints, and no flag
    out.mkdir()
    shutil.copy(steps[-1], out)
    before = tree(out)
    assert "holds a run already" in one_error_line(zygote(*small_run(task, out)))
    assert "no manifest.sha256 or args.yaml" in one_error_line(zygote(*small_run(task, out, "--overwrite")))
    assert tree(out) == before
    # another run's checkpoint into a finished run
    shutil.rmtree(out)
    shutil.copytree(finished(task), out)
    before = tree(out)
    assert "holds another run" in one_error_line(zygote(*small_run(task, out, "--resume_from", other)))
    assert tree(out) == before


@pytest.mark.parametrize("task", TASKS)
def test_auto_without_a_manifest_and_with_nothing_left_to_train(task, small_run, finished, zygote, tmp_path):
    """It was a start at step 0 that deleted the old checkpoints; now the end of the run is repeated, and it says so."""
    out = tmp_path / "run"
    shutil.copytree(finished(task), out)
    (out / "manifest.sha256").write_text("")
    done = zygote(*small_run(task, out, "--resume_from", "auto"))
    assert done.code == 0, done.stderr[-2000:]
    assert "no readable manifest.sha256" in done.stderr
    assert "nothing left to train: step" in done.stdout
    assert lines(out) == lines(finished(task))


@pytest.mark.parametrize("which", ["state", pytest.param("all", marks=pytest.mark.soak)])
@pytest.mark.parametrize("task", TASKS)
def test_a_checkpoint_that_lacks_a_part(task, which, small_run, finished, zygote, tmp_path):
    """Another version of the code wrote it: one line, nothing changed; in the soak for each part."""
    contents = torch.load(finished(task) / "last.pt", weights_only=True)
    # what checkpoints of earlier versions lack, and may lack
    optional = {"precision", "extent", "trained_patients", "trained_cases", "run_id", "split"}
    for name in sorted(contents.keys() - optional) if which == "all" else [which]:
        path = tmp_path / "changed.pt"
        torch.save({key: value for key, value in contents.items() if key != name}, path)
        done = zygote(*small_run(task, tmp_path / "run", "--resume_from", path))
        line = one_error_line(done)
        assert str(path) in line or "--resume_from" in line
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.soak
@pytest.mark.parametrize("task", TASKS)
def test_two_hundred_damaged_checkpoints_of_each_script(task, finished, tmp_path):
    """As test_run_folder.py's thousand, on real checkpoints: 0 wrong loads."""
    names = sorted(path.name for path in finished(task).glob("*.pt"))
    whole = {name: torch.load(finished(task) / name, weights_only=True) for name in names}
    format, chance, counts = whole["last.pt"]["format"], random.Random(task), {"refused": 0, "loaded": 0}
    for trial in range(200):
        folder = tmp_path / "run"
        folder.mkdir()
        for name in (*names, "manifest.sha256"):
            shutil.copy(finished(task) / name, folder)
        name = chance.choice(names)
        path = folder / name
        if copied := chance.random() < 0.4:
            path = Path(shutil.copy(path, tmp_path / name))
        damage(path, ("flip", "flip", "truncation", "zero page")[trial % 4], chance)
        resume = "auto" if not copied and chance.random() < 0.4 else str(path)
        try:
            contents = checkpoint_utils.load_checkpoint(resume, folder, format)
        except InputError:
            counts["refused"] += 1
        else:
            counts["loaded"] += 1
            same = [n for n in names if whole[n]["step"] == contents["step"]]
            assert same_tensors(contents, whole[same[0]])
            assert resume == "auto" or contents["step"] == whole[name]["step"]
        shutil.rmtree(folder)
        path.unlink(missing_ok=True)
    print(f"{task}: {counts}")


@pytest.fixture
def disk(tmp_path):
    """disk(kilobytes) -> a folder that is a small disk of its own; disk.read_only() makes it so."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options: str) -> Path:
        if subprocess.run(["mount", *options, "tmpfs", folder], capture_output=True).returncode:
            pytest.skip("mounting a tmpfs needs root")
        return folder

    yield SimpleNamespace(
        make=lambda kilobytes: mount("-t", "tmpfs", "-o", f"size={kilobytes}k"),
        read_only=lambda: mount("-o", "remount,ro"),
    )
    subprocess.run(["umount", folder], capture_output=True)


QUICK = {"cascade": ["--ddim_steps", "2"], "compressed_ad": ["--eval_episodes", "3", "--eval_seeds", "2"]}


@pytest.mark.parametrize("trouble", ["full", "read-only"])
@pytest.mark.parametrize("task", TASKS)
def test_eval_only_on_a_disk_that_takes_nothing(task, trouble, small_run, finished, zygote, disk):
    """The table is printed, each file that could not be written is a warning, and the exit code is 0."""
    last = finished(task) / "last.pt"
    folder = disk.make(2 * last.stat().st_size // 1024 + 400)
    for name in ("best.pt", "manifest.sha256", "args.yaml"):
        shutil.copy(finished(task) / name, folder)
    if trouble == "full":
        with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
    else:
        disk.read_only()
    before = tree(folder)
    script, *flags = small_run(task, folder)
    done = zygote(script, *flags, *QUICK.get(task, []), "--eval_only")
    assert done.code == 0, done.stderr[-2000:]
    said = done.stderr.splitlines()
    assert said
    assert all(line.startswith("warning: ") and " not written (" in line for line in said), done.stderr
    assert re.search(r"\d\.\d{4}", done.stdout)
    after = tree(folder)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("task", TASKS)
def test_training_on_a_disk_that_takes_nothing(task, small_run, finished, zygote, disk):
    """Full after the first checkpoints: one line, and the last of them is intact. Read-only: one line at the start."""
    last = finished(task) / "last.pt"
    folder = disk.make(last.stat().st_size * 17 // 10 // 1024 + 100)
    done = zygote(*small_run(task, folder, "--save_every", "1"))
    assert "No space left on device" in one_error_line(done, code=1)
    format = torch.load(last, weights_only=True)["format"]
    assert checkpoint_utils.load_checkpoint("auto", folder, format)["step"] >= 1
    disk.read_only()
    done = zygote(*small_run(task, folder, "--resume_from", "auto"))
    assert "cannot write here (Read-only file system)" in one_error_line(done)


# what each script reads while it trains, and the flag that keeps it from caching all of that
IMAGES = {
    "prs_med": ("*/train_images/*", ["--cache_gb", "0"]),
    "mimic_cxr": ("mimic-cxr-jpg/files/**/*.jpg", ["--cache_gb", "0"]),
    "survival": ("**/*.nii.gz", ["--cache", "none"]),
    "cascade": ("**/*.nii.gz", []),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("task", IMAGES)
def test_an_image_that_becomes_unreadable(task, ranks, small_run, data, chest, scans, torsos, zygote, tmp_path):
    """In the middle of a run, with loading processes and without: all ranks end with one line that names it."""
    source = {"prs_med": data, "survival": scans, "cascade": torsos, "mimic_cxr": Path(chest[1]).parent}[task]
    root = tmp_path / "data"
    shutil.copytree(source, root)
    pattern, uncached = IMAGES[task]
    script, *flags = small_run(task, tmp_path / "run", *uncached, "--save_every", "1")
    flags = [flag.replace(str(source), str(root)) for flag in flags]
    if task == "survival":
        # the batch size is that of all processes
        flags += ["--batch_size", "8"]
    if ranks == 2:
        flags += ["--num_workers", "1"]
    done = zygote(ROOT / "tests" / "break_data.py", root, pattern, script, *flags, ranks=ranks)
    assert str(root) in one_error_line(done)


@pytest.mark.parametrize("task", TASKS)
def test_the_run_folder_is_removed_while_training(task, small_run, zygote, tmp_path):
    """One line at the next checkpoint, not a traceback at the end."""
    out = tmp_path / "run"
    done = zygote(ROOT / "tests" / "break_data.py", out, ".", *small_run(task, out, "--save_every", "1"))
    assert "was removed while the run was writing there" in one_error_line(done, code=1)


@pytest.mark.parametrize("task", TASKS)
def test_eval_only_knows_the_paths_of_its_run(task, small_run, finished, zygote, tmp_path):
    """Data, models and the like come from the run's args.yaml, those that were found by themselves included."""
    out = tmp_path / "run"
    shutil.copytree(finished(task), out)
    script, *flags = small_run(task, out)
    folder_flag = flags[flags.index(str(out)) - 1]
    done = zygote(script, "--eval_only", folder_flag, out, "--num_workers", "0", *QUICK.get(task, []))
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert task == "compressed_ad" or f"from {out}/args.yaml: --" in done.stdout
    found = json.loads(next(out.glob("eval_*.json")).read_text())
    headline = {"prs_med": "test/dice", "mimic_cxr": "test/vqa_accuracy", "survival": "val/c_index"}
    headline |= {"cascade": "test/psnr", "compressed_ad": "test/return_last"}
    summary = json.loads((out / "summary.json").read_text())
    assert found[headline[task]] == pytest.approx(summary[headline[task]], rel=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_help_and_other_names(task, small_run, zygote, tmp_path):
    """The help ends with examples; --lr and --learning_rate are the same; a config's near name is named."""
    script, *flags = small_run(task, tmp_path / "run")
    done = zygote(script, "--help")
    assert done.code == 0
    assert "\nexamples:\n" in done.stdout
    assert f"{Path(script).name} " in done.stdout.split("\nexamples:\n")[1]
    assert (
        "no_auto_optimize" not in done.stdout
        or "(default: True)" not in done.stdout.split("--no_auto_optimize")[1][:90]
    )
    for name in ("--lr", "--learning_rate"):
        line = one_error_line(zygote(script, *flags, name, "-1"))
        assert "must be a number above 0, not '-1'" in line
    # a variable that a job script never set
    for name in ("--resume_from", "--config"):
        assert f"{name}: must not be empty" in one_error_line(zygote(script, *flags, name, ""))
    line = one_error_line(zygote(script, *flags, "--config", "config/prs_med_demo.yml"))
    assert line.endswith("there is configs/prs_med_demo.yaml")


def test_the_next_stage_from_the_best_checkpoint_of_the_one_before(small_run, zygote, tmp_path):
    """Guide 3: what stage 1 logged stays, and stage 2 is what `auto` goes on with, from its first step on."""
    out = tmp_path / "run"
    done = zygote(*small_run("cascade", out, "--stage", "1"))
    assert done.code == 0, done.stderr[-2000:]
    step = torch.load(out / "stage1_best.pt", weights_only=True)["step"]
    logged = [line for line in lines(out) if line["step"] <= step]
    words = ["--stage", "2", "--resume_from", out / "stage1_best.pt"]
    done = zygote(*small_run("cascade", out, *words, "--max_steps", str(step + 1)))
    assert done.code == 0, done.stderr[-2000:]
    assert lines(out)[: len(logged)] == logged
    assert [line["step"] for line in lines(out) if "train/loss" in line][-1] == step + 1
    # the first checkpoint of stage 2 was written before its first step
    for path in out.glob("*.pt"):
        if torch.load(path, weights_only=True)["step"] > step:
            path.unlink()
    done = zygote(*small_run("cascade", out, "--stage", "2", "--resume_from", "auto", "--max_steps", str(step + 1)))
    assert done.code == 0, done.stderr[-2000:]
    assert f"start          step {step}, stage2, epoch 1" in done.stdout


# --- memory -----------------------------------------------------------------------------------------------------------

# memory for so many samples a step, and for so many with recomputation (see little_memory.py): the batch that fits
LITTLE = {
    "prs_med": ("0+4", "4 per GPU x 2 accumulation"),
    "mimic_cxr": ("0+2", "2 per GPU (fitted: 8 did not fit into memory) x 4 accumulation (fitted)"),
    "survival": ("3+3", "1 in all (fitted: 7 per process did not fit into memory)"),
    "cascade": ("0+4", "2 per GPU x 2 accumulation"),
    "compressed_ad": ("4+4", "3 per GPU x 4 accumulation"),
}
# dropout draws once a micro-batch: without it, the answer does not depend on how a batch is split
NO_DROPOUT = {"prs_med": ["--lora_dropout", "0", "--batch_size", "8"], "mimic_cxr": ["--dropout", "0"]}


def little(small_run, zygote, task: str, memory: str, out: Path, *more, **options):
    """A run of `task` with little memory that fits its batch by itself."""
    words = small_run(task, out, "--auto_batch", *NO_DROPOUT.get(task, []), *more)
    done = zygote(ROOT / "tests" / "little_memory.py", memory, *words, **options)
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def train_losses(out: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["train/loss"]) for line in lines(out) if "train/loss" in line]


@pytest.mark.parametrize("task", TASKS)
def test_a_run_out_of_memory_fits_its_batch_and_computes_the_same(task, small_run, finished, zygote, tmp_path):
    """Halved, then with recomputation where the model can: the same losses; args.yaml keeps what was asked for."""
    out, (memory, batch) = tmp_path / "run", LITTLE[task]
    done = little(small_run, zygote, task, memory, out, "--max_steps", "3")
    assert batch in done.stdout
    assert "did not fit into memory" in done.stdout
    assert ("did not fit without)" in done.stdout) == memory.startswith("0")

    whole = tmp_path / "whole"
    if task in NO_DROPOUT:
        assert zygote(*small_run(task, whole, *NO_DROPOUT[task], "--max_steps", "3")).code == 0
    else:
        whole = finished(task)
    (step, expected), *_ = train_losses(whole)
    assert train_losses(out) == [(step, pytest.approx(expected, rel=1e-5))]
    kept = [yaml.safe_load((folder / "args.yaml").read_text()) for folder in (out, whole)]
    assert [values.pop("auto_batch") for values in kept] == [True, None]
    differ = {name for name in kept[0] if kept[0][name] != kept[1][name]}
    assert differ <= {"checkpoint_dir", "output_dir", "log_dir", "max_steps"}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("cascade", "stage1: 2 per GPU x 2 accumulation x 1 = 4 (as the run was begun)"),
        ("compressed_ad", "3 per GPU x 4 accumulation x 1 = 12 (as the run was begun)"),
    ],
)
def test_a_resumed_run_keeps_its_split(task, said, small_run, zygote, tmp_path):
    """With more memory too: another split adds up in another order, and the last bits would differ."""
    memory = LITTLE[task][0]
    whole, out = tmp_path / "whole", tmp_path / "run"
    little(small_run, zygote, task, memory, whole, "--max_steps", "6")
    little(small_run, zygote, task, memory, out, "--max_steps", "3")
    done = little(small_run, zygote, task, "99", out, "--max_steps", "6", "--resume_from", "auto")
    assert said in done.stdout, done.stdout
    assert train_losses(out) == train_losses(whole)


def test_all_ranks_fit_to_the_one_with_the_least_memory(small_run, finished, zygote, tmp_path):
    out = tmp_path / "run"
    words = ["--train_batch_size", "6", "--max_steps", "3"]
    done = little(small_run, zygote, "compressed_ad", "4+4", out, *words, ranks=2, LITTLE_MEMORY_RANK="1")
    assert "3 per GPU x 2 accumulation x 2 = 12 (fitted: 6 did not fit into memory)" in done.stdout
    assert train_losses(out)[0][1] == pytest.approx(train_losses(finished("compressed_ad"))[0][1], rel=1e-5)


# of a run of 20 steps that logs each: its flags, and five limits as in LITTLE
FIVE = {
    "prs_med": (["--num_epochs", "9"], "4 2 1 0+8 0+2"),
    "mimic_cxr": (["--epochs", "9"], "4 2 1 0+8 0+2"),
    "survival": (["--epochs", "9", "--batch_size", "16"], "12 8 4 2 1"),
    "cascade": (["--num_epochs_per_stage", "9"], "4 2 0+8 0+4 0+2"),
    "compressed_ad": (["--train_timesteps", "24", "--train_batch_size", "16"], "12 8 4 2 1"),
}


@pytest.mark.soak
@pytest.mark.parametrize("task", TASKS)
def test_twenty_steps_at_five_limits(task, small_run, zygote, tmp_path):
    """Forced out of memory at five limits, the first 20 steps have the losses of a run without a limit."""
    whole, (more, limits) = tmp_path / "whole", FIVE[task]
    words = [*more, "--max_steps", "20", "--log_every", "1"]
    done = zygote(*small_run(task, whole, *NO_DROPOUT.get(task, []), *words))
    assert done.code == 0, done.stderr[-2000:]
    expected = train_losses(whole)
    assert [step for step, _ in expected] == list(range(1, 21))

    for memory in limits.split():
        out = tmp_path / memory
        done = little(small_run, zygote, task, memory if "+" in memory else f"{memory}+{memory}", out, *words)
        pairs = zip(train_losses(out), expected, strict=True)
        off = max(abs(a - b) / max(1e-3, abs(b)) for (_, a), (_, b) in pairs)
        chosen = [" ".join(line.split()) for line in done.stdout.splitlines() if "did not fit" in line]
        print(f"{task}, memory for {memory}: {'; '.join(chosen)}; off by {off:.1e}")
        assert off < 1e-5
