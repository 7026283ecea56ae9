"""What train.py promises, the one script on old/; tests/test_promise.py has those that moved."""

import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT, at_step, tree
from slurm_stub import Cluster, warn
from test_run_folder import damage

from old import checkpoint_utils
from old.cli_utils import InputError
from old.manifest_utils import read_manifest, write_checkpoint, write_manifest

TASKS = ("compressed_ad",)
SCRIPTS = {
    "compressed_ad": ROOT / "train.py",
}
RUN_FOLDER_FLAGS = {
    "compressed_ad": "--output_dir",
}

# A run stops here: within an epoch, and within an interval of --log_every 3.
STOP = {"compressed_ad": 5}

# What depends on the clock or the machine.
SPEED = ("train/samples_per_s", "train/tflops", "train/mfu")
TIMES = (*SPEED, "train/data_wait", "train/peak_memory_gb", "seconds", "train_seconds")


@pytest.fixture(scope="session")
def small_run(compressed_ad_flags):
    """small_run(task, run_folder, more) -> script and flags of a run of 8 steps."""
    flags = {
        "compressed_ad": compressed_ad_flags(Path("out")),
    }

    def make(task: str, run_folder: Path, more: list | tuple = ()) -> list[str]:
        common = ["--num_workers", "0", "--log_every", "3", RUN_FOLDER_FLAGS[task], run_folder]
        return [str(word) for word in (SCRIPTS[task], *flags[task], *common, *more)]

    return make


@pytest.fixture(scope="session")
def run_script(zygote):
    """run_script(command, **options): run a script and its flags by the zygote, whatever becomes of it."""

    def run(command: list, **options):
        return zygote(*command, **options)

    return run


@pytest.fixture(scope="session")
def run_task(small_run, run_script):
    """run_task(task, run_folder, flags, **options): a small run of a task, whatever becomes of it."""

    def run(task: str, run_folder: Path, flags: list | tuple = (), **options):
        return run_script(small_run(task, run_folder, flags), **options)

    return run


@pytest.fixture(scope="session")
def finished(run_task, tmp_path_factory):
    """finished(task) -> the folder of an uninterrupted run, made once. Copy it before changing anything."""
    made: dict[str, Path] = {}

    def make(task: str) -> Path:
        if task not in made:
            run_folder = tmp_path_factory.mktemp("finished") / task
            ended_well(run_task(task, run_folder))
            made[task] = run_folder
        return made[task]

    return make


def ended_well(done):
    """Assert that a run ended with exit code 0, and hand it on."""
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def one_error_line(done, code: int = 2) -> str:
    """Assert that a run ended with this code and one error line, and return that line."""
    assert done.code == code, done.stdout[-2000:] + done.stderr[-2000:]
    errors = [line for line in done.stderr.splitlines() if not line.startswith("warning:")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    return errors[0]


def read_metrics(run_folder: Path) -> list[dict]:
    """Every line of metrics.jsonl."""
    text = (run_folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def read_summary(run_folder: Path) -> dict:
    """What stands in summary.json."""
    return json.loads((run_folder / "summary.json").read_text())


def lines(run_folder: Path) -> list[dict]:
    """metrics.jsonl without what the clock decides."""
    records = read_metrics(run_folder)
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def train_losses(run_folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of each training line."""
    return [(line["step"], line["train/loss"]) for line in lines(run_folder) if "train/loss" in line]


def load_checkpoint(path: Path) -> dict:
    """What a checkpoint holds."""
    return torch.load(path, weights_only=True)


def weights_of(checkpoint: dict) -> dict:
    """A checkpoint's weights, under whichever name its script keeps them."""
    return checkpoint["net"] if "net" in checkpoint else checkpoint["model"]


def same_tensors(a, b) -> bool:
    """Whether two nested structures of tensors and plain values are the same to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tensors(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same_tensors(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# --- one run and its interruptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_deterministic_changes_no_bit_on_a_cpu(task, run_task, finished, tmp_path):
    run_folder = tmp_path / "run"
    done = ended_well(run_task(task, run_folder, ["--deterministic", "--max_steps", "3"]))
    assert "(fp32 on CPU; deterministic)" in done.stdout
    assert lines(run_folder)[0] == lines(finished(task))[0]
    assert lines(run_folder)[0]["step"] == 3


@pytest.mark.parametrize("task", TASKS)
def test_stopping_by_max_steps_and_resuming_is_the_uninterrupted_run(task, run_task, finished, tmp_path):
    """Losses, metrics, learning rates and weights to the bit; and the steps after the last interval are logged."""
    run_folder = tmp_path / "run"
    uninterrupted = finished(task)

    # the run stops between two lines of the log, and logs the steps up to there
    ended_well(run_task(task, run_folder, ["--max_steps", STOP[task]]))
    trained = [line for line in lines(run_folder) if "train/loss" in line]
    assert trained[-1]["step"] == STOP[task]
    assert trained[-1]["train/lr"] is not None
    assert (run_folder / "best.pt").exists()

    # the same lines after a resume
    ended_well(run_task(task, run_folder, ["--resume_from", "auto"]))
    assert lines(run_folder) == lines(uninterrupted)

    # the same last and best checkpoints
    last = load_checkpoint(run_folder / "last.pt")
    expected = load_checkpoint(uninterrupted / "last.pt")
    assert same_tensors(weights_of(last), weights_of(expected))
    assert same_tensors(last["optimizer"], expected["optimizer"])
    best_step = load_checkpoint(run_folder / "best.pt")["step"]
    assert best_step == load_checkpoint(uninterrupted / "best.pt")["step"]

    # the same summary, but for the times
    summaries = []
    for folder in (run_folder, uninterrupted):
        summary = read_summary(folder)
        summaries.append({name: value for name, value in summary.items() if not name.startswith(TIMES)})
    assert summaries[0] == summaries[1]


# More steps, so that a run is still under way when it is told to leave.
MANY_STEPS = {
    "compressed_ad": ["--train_timesteps", "100", "--eval_interval", "50"],
}


@pytest.mark.parametrize("task", TASKS)
def test_a_slurm_job_whose_time_is_up_is_requeued(task, small_run, run_script, tmp_path):
    """configs/slurm/<task>.sbatch on stubs of SLURM: told to leave, and run again, it is the uninterrupted run."""
    run_folder = tmp_path / "run"
    cluster = Cluster(tmp_path / "slurm")
    script, *flags = small_run(task, run_folder, [*MANY_STEPS[task], "--save_every", "4"])
    words = ["--num_gpus", 1, *flags]

    code = warn(cluster.start(task, words), lambda: any(run_folder.glob("step_*.pt")))
    assert code == 143, cluster.log()
    assert "signal: saved at step" in cluster.log()
    assert [call[0] for call in cluster.calls()] == ["srun", "scancel", "scontrol"]

    # SLURM starts the same file again
    code = cluster.start(task, words, SLURM_RESTART_COUNT="1").wait(timeout=240)
    assert code == 0, cluster.log()
    assert [call[0] for call in cluster.calls()[3:]] == ["srun"]

    undisturbed = [script, *flags, RUN_FOLDER_FLAGS[task], tmp_path / "undisturbed"]
    ended_well(run_script(undisturbed))
    assert lines(run_folder) == lines(tmp_path / "undisturbed")


# Checkpoints after which training resumes at once, without an evaluation, which waits for the file at its end.
KILLS = [(task, step) for task in TASKS for step in (2, 6)]
KILL_CASES = [pytest.param(*kill, marks=() if kill == KILLS[0] else pytest.mark.soak) for kill in KILLS]


@pytest.mark.parametrize(("task", "step"), KILL_CASES)
def test_killed_while_a_checkpoint_is_written(task, step, small_run, run_script, finished, tmp_path):
    """Training has gone on meanwhile; resumed from the checkpoint before, or afresh, it is the uninterrupted run."""
    run_folder = tmp_path / "run"
    command = small_run(task, run_folder, ["--save_every", "2"])

    killed = run_script([ROOT / "tests/old/kill_in_save.py", step, *command])
    assert killed.code == -signal.SIGKILL
    assert [path.name for path in run_folder.glob(".*.tmp")] == [f".step_{step:08d}.pt.tmp"]
    assert not (run_folder / f"step_{step:08d}.pt").exists()

    ended_well(run_script([*command, "--resume_from", "auto"]))
    assert lines(run_folder) == lines(finished(task))
    last = load_checkpoint(run_folder / "last.pt")
    expected = load_checkpoint(finished(task) / "last.pt")
    assert same_tensors(last["optimizer"], expected["optimizer"])


@pytest.mark.parametrize("task", TASKS)
def test_ctrl_c_saves_and_the_rest_is_the_uninterrupted_run(task, run_task, finished, tmp_path):
    """SIGINT: exit code 130, a checkpoint of the step reached, and the same lines after a resume."""
    run_folder = tmp_path / "run"
    flags = ["--resume_from", "auto", "--save_every", "1"]

    interrupt = at_step(run_folder, 2, "all", signal.SIGINT)
    stopped = run_task(task, run_folder, flags, interrupt=interrupt)
    assert stopped.code == 130, stopped.stderr
    assert "signal: saved at step" in stopped.stdout

    ended_well(run_task(task, run_folder, flags))
    assert lines(run_folder) == lines(finished(task))


# A stop signal in a phase that does not come to its end: how it begins, how it is struck, in which ranks of how many.
STRIKES = {
    "first-step": ("step 1", "hangs", "0"),
    "a-step": ("step 3", "hangs", "0"),
    "evaluation": ("evaluating", "hangs", "0"),
    "both-ranks": ("evaluating", "hangs", "0,1"),
    "one-rank": ("evaluating", "hangs", "1"),
    "save": ("saving", "lasts", "0"),
    "write": ("writing", "lasts", "0"),
    "lock": ("waiting for another run", "hangs", "0"),
}
# Before the training the system ends a process at once.
AT_ONCE = ("lock",)
QUICK = [
    "compressed_ad both-ranks",
    "compressed_ad one-rank",
    "compressed_ad a-step",
    "compressed_ad save",
]
STOP_CASES = []
for task in TASKS:
    for strike in STRIKES:
        marks = () if f"{task} {strike}" in QUICK else pytest.mark.soak
        STOP_CASES.append(pytest.param(task, strike, marks=marks))


@pytest.mark.parametrize(("task", "strike"), STOP_CASES)
def test_a_stop_signal_is_served_in_every_phase(task, strike, small_run, run_script, finished, tmp_path):
    """SIGTERM: exit code 143, no traceback, no process left; a save is completed, and the rest is the unbroken run."""
    run_folder = tmp_path / "run"
    phase, how, ranks = STRIKES[strike]
    count = 1 if ranks == "0" else 2
    command = small_run(task, run_folder, ["--save_every", "2"])
    struck = [ROOT / "tests/old/slow_phase.py", phase, how, ranks, *command]

    # the soak waits as long as a user does
    short = {"SHORT_PATIENCE": "1"} if f"{task} {strike}" in QUICK else {}
    stopped = run_script(struck, ranks=count, **short)
    told = re.search(rf"^struck: {phase}.* at (\S+)$", stopped.stdout, re.MULTILINE)
    seconds = time.time() - float(told[1])
    print(f"{task}, {strike}: {seconds:.1f} s from SIGTERM to the end")
    code = -signal.SIGTERM if strike in AT_ONCE else 143
    assert stopped.code == code, stopped.stdout[-2000:] + stopped.stderr[-2000:]
    assert "Traceback" not in stopped.stderr, stopped.stderr
    assert seconds < 10

    # it says where it goes on, and has saved what it was about to
    said = re.search(r"signal: (saved at|ended while .*goes on from) step (\d+)", stopped.stdout)
    assert said or strike in ("one-rank", *AT_ONCE)
    saved = [int(path.stem[5:]) for path in run_folder.glob("step_*.pt")]
    assert said is None or int(said[2]) == max(saved, default=0)
    assert max(saved, default=0) >= 2 or how == "hangs"

    # the rest is the unbroken run's, which has one process
    if count == 1:
        ended_well(run_script([*command, "--resume_from", "auto"]))
        assert lines(run_folder) == lines(finished(task))


# --- what is measured and computed ------------------------------------------------------------------------------------


def flops_a_sample(run_folder: Path, ranks: int) -> float:
    """The FLOPs of a sample by a run's first training line; each line must have a share of the peak."""
    trained = [record for record in read_metrics(run_folder) if "train/loss" in record]
    assert all(0 < record["train/mfu"] < 10 for record in trained)
    first = trained[0]
    return first["train/tflops"] * 1e12 * ranks / first["train/samples_per_s"]


@pytest.mark.parametrize("task", TASKS)
def test_the_share_of_the_peak(task, small_run, run_script, finished, tmp_path):
    """In every training line; the FLOPs of a sample are what torch counts, for any processes and accumulation."""
    flags = ["--batch_size", "2", "--gradient_accumulation_steps", "2", "--max_steps", "1"]
    # the samples of its two runs must be the same, as histories differ in length
    if task == "compressed_ad":
        flags = ["--train_batch_size", "3", "--gradient_accumulation_steps", "2", "--max_steps", "1"]

    command = [ROOT / "tests/old/count_twice.py", *small_run(task, tmp_path / "run", flags)]
    done = ended_well(run_script(command, ranks=2))
    pairs = re.findall(r"counted (\d+), by torch (\d+)", done.stdout)
    assert len(pairs) == 4
    assert all(counted == by_torch for counted, by_torch in pairs)

    expected = flops_a_sample(finished(task), ranks=1)
    assert flops_a_sample(tmp_path / "run", ranks=2) == pytest.approx(expected, rel=1e-6)


def first_moments(value) -> list[torch.Tensor]:
    """AdamW's first moments, wherever they stand in an optimizer's state."""
    if isinstance(value, torch.Tensor):
        return [value]
    if "exp_avg" in value:
        return first_moments(value["exp_avg"])
    parts = [part for part in value.values() if isinstance(part, dict | torch.Tensor)]
    return [moment for part in parts for moment in first_moments(part)]


@pytest.mark.parametrize("task", TASKS)
def test_gradients_are_clipped(task, run_task, tmp_path):
    """After one step, AdamW's first moments are a tenth of the clipped gradient; the log has the norm before."""
    run_folder = tmp_path / "run"
    ended_well(run_task(task, run_folder, ["--max_steps", "1", "--grad_clip", "0.001"]))
    optimizer = load_checkpoint(run_folder / "step_00000001.pt")["optimizer"]
    norm = torch.cat([moment.flatten() for moment in first_moments(optimizer)]).norm()
    assert float(norm) == pytest.approx(0.1 * 0.001, rel=1e-3)
    assert lines(run_folder)[0]["train/grad_norm"] > 0.01


def squared_norm(path: Path) -> float:
    """The sum of the squares of a checkpoint's weights."""
    weights = weights_of(load_checkpoint(path)).values()
    return sum(float(weight.double().square().sum()) for weight in weights if weight.is_floating_point())


@pytest.mark.parametrize("task", TASKS)
def test_weight_decay_changed_on_resume_is_taken(task, run_task, finished, tmp_path):
    """From the checkpoint in the middle on, with a large weight decay: smaller weights at the end."""
    middle = sorted(finished(task).glob("step_*.pt"))[0]
    run_folder = tmp_path / "run"
    ended_well(run_task(task, run_folder, ["--resume_from", middle, "--weight_decay", "10"]))
    assert squared_norm(run_folder / "last.pt") < 0.9999 * squared_norm(finished(task) / "last.pt")


@pytest.mark.parametrize("task", TASKS)
def test_a_profile_of_some_steps(task, run_task, finished, tmp_path):
    """A trace of these steps that can be read, the table, and the same losses to the bit."""
    run_folder = tmp_path / "run"
    done = ended_well(run_task(task, run_folder, ["--profile", "2:3", "--max_steps", "3"]))
    assert lines(run_folder)[0] == lines(finished(task))[0]

    table = (run_folder / "profile" / "steps_2-3.txt").read_text()
    assert table in done.stdout
    assert re.search(r"^data wait +\d", table, re.MULTILINE)
    assert re.search(r"^aten::\w+ +\d", table, re.MULTILINE)
    assert "USDT" not in done.stdout + done.stderr

    trace = json.loads((run_folder / "profile" / "steps_2-3_rank0.json").read_text())
    names = [event["name"] for event in trace["traceEvents"]]
    assert [name for name in names if name.startswith("ProfilerStep")] == ["ProfilerStep#2", "ProfilerStep#3"]
    assert names.count("data wait") == 2


def test_a_profile_of_a_run_that_is_resumed_between_its_steps(run_task, finished, tmp_path):
    """The rest of the steps, cut where an evaluation is; they are the run's own files, which --overwrite deletes."""
    run_folder = tmp_path / "run"
    flags = ["--profile", "2:5"]
    ended_well(run_task("compressed_ad", run_folder, [*flags, "--max_steps", "3"]))
    ended_well(run_task("compressed_ad", run_folder, [*flags, "--resume_from", "auto"]))
    assert lines(run_folder) == lines(finished("compressed_ad"))
    profiled = sorted(path.stem for path in (run_folder / "profile").glob("*.txt"))
    assert profiled == ["steps_2-3", "steps_4-4", "steps_5-5"]

    flags = ["--profile", "7:9", "--max_steps", "1", "--overwrite"]
    done = ended_well(run_task("compressed_ad", run_folder, flags))
    assert "warning: --profile: the run makes steps 1 to 1, none of steps 7 to 9" in done.stdout
    assert not list((run_folder / "profile").iterdir())


# --- a run that is repeated -------------------------------------------------------------------------------------------


def edit_checkpoint(path: Path, change) -> None:
    """Change the contents of a checkpoint, and let its seal and the manifest say that it is what the run wrote."""
    contents = torch.load(path, weights_only=True)
    change(contents)
    old = read_manifest(path.parent)
    before = old.checkpoints[path.name]
    digest = write_checkpoint(path, contents)

    # its other names are the same file no more
    for name, other in list(old.checkpoints.items()):
        if other == before:
            shutil.copy(path, path.with_name(f".{name}.new"))
            path.with_name(f".{name}.new").replace(path.with_name(name))
            old.checkpoints[name] = digest
    write_manifest(path.parent, old)


def scale_weights(contents: dict) -> None:
    """Another last bit or two in every trained weight."""
    for weight in weights_of(contents).values():
        if weight.is_floating_point():
            weight.mul_(1 + 2**-22)


@pytest.mark.parametrize("task", TASKS)
def test_verify_repeats_a_run_and_finds_an_edited_checkpoint(task, run_script, finished, tmp_path):
    """From the middle checkpoint to the end: equal to the bit; with other last bits in it, the next numbers differ."""
    verify = ROOT / "tests/old/verify_in_fork.py"
    run_folder = tmp_path / "run"
    shutil.copytree(finished(task), run_folder)
    before = tree(run_folder)
    first, last = sorted(run_folder.glob("step_*.pt"))[-2:]
    middle = load_checkpoint(first)["step"]
    end = load_checkpoint(last)["step"]

    done = ended_well(run_script([verify, run_folder]))
    assert f"repeating steps {middle + 1} to {end} of {run_folder} from {first.name}" in done.stdout
    assert f"compared: {end - middle} steps" in done.stdout
    assert f"weights at step {end}: equal to the bit" in done.stdout
    assert done.stdout.splitlines()[-1] == "equal to the bit"
    assert tree(run_folder) == before

    # an evaluation after the checkpoint is repeated, too
    edit_checkpoint(first, scale_weights)
    evaluated = any(line["step"] == middle and "val/loss" in line for line in lines(run_folder))
    wrong = middle if evaluated else middle + 1
    done = run_script([verify, run_folder])
    assert done.code == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"differs: step {wrong}: ")


def test_verify_calls_no_log_equal_that_lacks_a_step(run_script, finished, tmp_path):
    """Of two runs, of which one has lost a line: neither equal nor different."""
    run_folder = finished("compressed_ad")
    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    log = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    lost = next(place for place, line in enumerate(log) if "train/loss" in line)
    (copy / "metrics.jsonl").write_text("".join(log[:lost] + log[lost + 1 :]))

    done = run_script([ROOT / "old/verify.py", run_folder, copy])
    assert done.code == 2
    assert "a log lacks step" in done.stderr
    equal = ended_well(run_script([ROOT / "old/verify.py", run_folder, run_folder]))
    assert equal.stdout.splitlines()[-1] == "equal to the bit"


# --- run folders and checkpoints that must not be taken ---------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_run_folders_that_must_not_be_touched(task, run_task, finished, tmp_path):
    """Four of test_run_folder.py's states by the real scripts: refused in one line, every byte as it was."""
    run_folder = tmp_path / "run"
    steps = sorted(finished(task).glob("step_*.pt"))

    # only checkpoints, and no flag
    run_folder.mkdir()
    shutil.copy(steps[-1], run_folder)
    before = tree(run_folder)
    assert "holds a run already" in one_error_line(run_task(task, run_folder))
    assert "no manifest.sha256 or args.yaml" in one_error_line(run_task(task, run_folder, ["--overwrite"]))
    assert tree(run_folder) == before

    # another run's checkpoint into a finished run
    other = tmp_path / "other_run.pt"
    torch.save(load_checkpoint(steps[0]) | {"run_id": "0123456789abcdef"}, other)
    shutil.rmtree(run_folder)
    shutil.copytree(finished(task), run_folder)
    before = tree(run_folder)
    assert "holds another run" in one_error_line(run_task(task, run_folder, ["--resume_from", other]))
    assert tree(run_folder) == before


@pytest.mark.parametrize("task", TASKS)
def test_auto_without_a_manifest_and_with_nothing_left_to_train(task, run_task, finished, tmp_path):
    """It was a start at step 0 that deleted the old checkpoints; now the end of the run is repeated, and it says so."""
    run_folder = tmp_path / "run"
    shutil.copytree(finished(task), run_folder)
    (run_folder / "manifest.sha256").write_text("")
    done = ended_well(run_task(task, run_folder, ["--resume_from", "auto"]))
    assert "no readable manifest.sha256" in done.stderr
    assert "nothing left to train: step" in done.stdout
    assert lines(run_folder) == lines(finished(task))


@pytest.mark.parametrize("which", ["state", pytest.param("all", marks=pytest.mark.soak)])
@pytest.mark.parametrize("task", TASKS)
def test_a_checkpoint_that_lacks_a_part(task, which, run_task, finished, tmp_path):
    """Another version of the code wrote it: one line, nothing changed; in the soak for each part."""
    checkpoint = load_checkpoint(finished(task) / "last.pt")

    # what checkpoints of earlier versions lack, and may lack
    optional = {"precision", "extent", "trained_patients", "run_id", "split"}
    required = sorted(checkpoint.keys() - optional)

    for name in required if which == "all" else [which]:
        path = tmp_path / "changed.pt"
        torch.save({key: value for key, value in checkpoint.items() if key != name}, path)
        error = one_error_line(run_task(task, tmp_path / "run", ["--resume_from", path]))
        assert str(path) in error or "--resume_from" in error
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.soak
@pytest.mark.parametrize("task", TASKS)
def test_two_hundred_damaged_checkpoints_of_each_script(task, finished, tmp_path):
    """As test_run_folder.py's thousand, on real checkpoints: 0 wrong loads."""
    names = sorted(path.name for path in finished(task).glob("*.pt"))
    intact = {name: load_checkpoint(finished(task) / name) for name in names}
    format = intact["last.pt"]["format"]
    chance = random.Random(task)
    refused = loaded = 0

    for trial in range(200):
        run_folder = tmp_path / "run"
        run_folder.mkdir()
        for name in (*names, "manifest.sha256"):
            shutil.copy(finished(task) / name, run_folder)

        # damage a checkpoint, in the run folder or copied out of it
        name = chance.choice(names)
        path = run_folder / name
        if copied := chance.random() < 0.4:
            path = Path(shutil.copy(path, tmp_path / name))
        damage(path, ("flip", "flip", "truncation", "zero page")[trial % 4], chance)

        # it is refused, or what is loaded is one of the intact ones
        resume_from = "auto" if not copied and chance.random() < 0.4 else str(path)
        try:
            checkpoint = checkpoint_utils.load_checkpoint(resume_from, run_folder, format)
        except InputError:
            refused += 1
        else:
            loaded += 1
            same_step = [other for other in names if intact[other]["step"] == checkpoint["step"]]
            assert same_tensors(checkpoint, intact[same_step[0]])
            assert resume_from == "auto" or checkpoint["step"] == intact[name]["step"]

        shutil.rmtree(run_folder)
        path.unlink(missing_ok=True)
    print(f"{task}: {refused} refused, {loaded} loaded")


@pytest.mark.parametrize("task", TASKS)
def test_a_rank_whose_weights_are_no_longer_those_of_the_others(task, small_run, run_script, tmp_path):
    """The next check ends the run, and names the tensor, the ranks and the checkpoint before."""
    run_folder = tmp_path / "run"
    flags = ["--save_every", "2", "--check_every", "3"]
    command = small_run(task, run_folder, flags)
    done = run_script([ROOT / "tests/old/flip_bit.py", 2, 1, task, *command], ranks=2)
    check_drift_line(done)
    assert [path.name for path in run_folder.glob("step_*.pt")] == ["step_00000002.pt"]


def check_drift_line(done) -> None:
    """Assert that a run which was spoiled after step 2 ended at step 3, and says where."""
    name = re.search(r"^spoiled (\S+)$", done.stdout, re.MULTILINE)[1]
    error = one_error_line(done, code=1)
    assert re.match(rf"error: step 3: the ranks' weights differ in {re.escape(name)}( and 1 more)?: ", error), error
    assert re.search(r": rank 0 \(\S+\), rank 1 \(\S+\) do not agree, .*; --resume_from auto .* step 2,", error), error


def test_drift_is_named_before_the_bad_steps_that_it_causes(small_run, run_script, tmp_path):
    command = small_run("compressed_ad", tmp_path / "run", ["--max_bad_steps", "1"])
    done = run_script([ROOT / "tests/old/flip_bit.py", 1, 1, "nan", *command], ranks=2)
    assert "step 2: the ranks' weights differ in " in one_error_line(done, code=1)


@pytest.mark.soak
@pytest.mark.parametrize("task", TASKS)
def test_twenty_flipped_bits_and_ten_clean_runs(task, small_run, run_script, tmp_path):
    """Of each script: 20 found at the next check, the right tensor named; 0 false alarms at checks of each step."""
    for trial in range(20):
        flags = ["--save_every", "2", "--check_every", "3"]
        command = small_run(task, tmp_path / f"spoiled{trial}", flags)
        check_drift_line(run_script([ROOT / "tests/old/flip_bit.py", 2, trial % 2, trial, *command], ranks=2))
    for seed in range(10):
        flags = ["--check_every", "1", "--seed", seed]
        ended_well(run_script(small_run(task, tmp_path / f"clean{seed}", flags), ranks=2))


# --- disks, images and folders that fail ------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """disk.make(kilobytes) -> a folder that is a small disk of its own; disk.read_only() makes it so."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: list[str]) -> Path:
        if subprocess.run(["mount", *options, "tmpfs", folder], capture_output=True).returncode:
            pytest.skip("mounting a tmpfs needs root")
        return folder

    yield SimpleNamespace(
        make=lambda kilobytes: mount(["-t", "tmpfs", "-o", f"size={kilobytes}k"]),
        read_only=lambda: mount(["-o", "remount,ro"]),
    )
    subprocess.run(["umount", folder], capture_output=True)


def fill(folder: Path) -> None:
    """Leave no byte free on the disk of a folder."""
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


# What makes an evaluation short.
QUICK = {
    "compressed_ad": ["--eval_episodes", "3", "--eval_seeds", "2"],
}


@pytest.mark.parametrize("trouble", ["full", "read-only"])
@pytest.mark.parametrize("task", TASKS)
def test_eval_only_on_a_disk_that_takes_nothing(task, trouble, run_task, finished, disk):
    """The table is printed, each file that could not be written is a warning, and the exit code is 0."""
    size = (finished(task) / "last.pt").stat().st_size
    run_folder = disk.make(2 * size // 1024 + 400)
    for name in ("best.pt", "manifest.sha256", "args.yaml"):
        shutil.copy(finished(task) / name, run_folder)
    if trouble == "full":
        fill(run_folder)
    else:
        disk.read_only()
    before = tree(run_folder)

    done = ended_well(run_task(task, run_folder, [*QUICK[task], "--eval_only"]))
    warnings = done.stderr.splitlines()
    assert warnings
    assert all(line.startswith("warning: ") and " not written (" in line for line in warnings), done.stderr
    assert re.search(r"\d\.\d{4}", done.stdout)

    after = tree(run_folder)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("task", TASKS)
def test_training_on_a_disk_that_takes_nothing(task, run_task, finished, disk):
    """Full after the first checkpoints: one line, and the last of them is intact. Read-only: one line at the start."""
    last = finished(task) / "last.pt"
    run_folder = disk.make(last.stat().st_size * 17 // 10 // 1024 + 100)
    done = run_task(task, run_folder, ["--save_every", "1"])
    assert "No space left on device" in one_error_line(done, code=1)
    format = load_checkpoint(last)["format"]
    assert checkpoint_utils.load_checkpoint("auto", run_folder, format)["step"] >= 1

    disk.read_only()
    done = run_task(task, run_folder, ["--resume_from", "auto"])
    assert "cannot write here (Read-only file system)" in one_error_line(done)


@pytest.mark.parametrize("task", TASKS)
def test_the_run_folder_is_removed_while_training(task, small_run, run_script, tmp_path):
    """One line at the next checkpoint, not a traceback at the end."""
    run_folder = tmp_path / "run"
    command = small_run(task, run_folder, ["--save_every", "1"])
    done = run_script([ROOT / "tests/old/remove_run.py", run_folder, *command])
    assert "was removed while the run was writing there" in one_error_line(done, code=1)


# --- flags ------------------------------------------------------------------------------------------------------------

HEADLINES = {
    "compressed_ad": "test/return_last",
}


@pytest.mark.parametrize("task", TASKS)
def test_eval_only_knows_the_paths_of_its_run(task, run_script, finished, tmp_path):
    """Data, models and the like come from the run's args.yaml, those that were found by themselves included."""
    run_folder = tmp_path / "run"
    shutil.copytree(finished(task), run_folder)
    command = [SCRIPTS[task], "--eval_only", RUN_FOLDER_FLAGS[task], run_folder, "--num_workers", "0", *QUICK[task]]
    ended_well(run_script(command))

    results = json.loads(next(run_folder.glob("eval_*.json")).read_text())
    expected = read_summary(run_folder)[HEADLINES[task]]
    assert results[HEADLINES[task]] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_help_and_other_names(task, run_script, run_task, tmp_path):
    """The help ends with examples; --lr and --learning_rate are the same; a config's near name is named."""
    usage = run_script([SCRIPTS[task], "--help"])
    assert usage.code == 0
    assert "\nexamples:\n" in usage.stdout
    assert f"{SCRIPTS[task].name} " in usage.stdout.split("\nexamples:\n")[1]

    run_folder = tmp_path / "run"
    for name in ("--lr", "--learning_rate"):
        error = one_error_line(run_task(task, run_folder, [name, "-1"]))
        assert "must be a number above 0, not '-1'" in error

    # a variable that a job script never set
    for name in ("--resume_from", "--config"):
        assert f"{name}: must not be empty" in one_error_line(run_task(task, run_folder, [name, ""]))

    error = one_error_line(run_task(task, run_folder, ["--config", "config/compressed_ad_demo.yml"]))
    assert error.endswith("there is configs/compressed_ad_demo.yaml")


# --- memory -----------------------------------------------------------------------------------------------------------

# Memory for so many samples a step (see little_memory.py), and the batch that fits.
LITTLE = {
    "compressed_ad": ("4+", "3 per GPU x 4 accumulation"),
}


@pytest.fixture
def run_little(small_run, run_script):
    """run_little(task, memory, run_folder, flags, **options): a run with little memory that fits its batch to it."""

    def run(task: str, memory: str, run_folder: Path, flags: list, **options):
        command = small_run(task, run_folder, ["--auto_batch", *flags])
        return ended_well(run_script([ROOT / "tests/old/little_memory.py", memory, *command], **options))

    return run


@pytest.mark.parametrize("task", TASKS)
def test_a_run_out_of_memory_fits_its_batch_and_computes_the_same(task, run_little, finished, tmp_path):
    """Halved: the same losses; args.yaml keeps what was asked for."""
    run_folder = tmp_path / "run"
    memory, batch = LITTLE[task]
    done = run_little(task, memory, run_folder, ["--max_steps", "3"])
    assert batch in done.stdout
    assert "did not fit into memory" in done.stdout

    # a run with enough memory
    unlimited = finished(task)
    step, loss = train_losses(unlimited)[0]
    assert train_losses(run_folder) == [(step, pytest.approx(loss, rel=1e-5))]

    asked = yaml.safe_load((run_folder / "args.yaml").read_text())
    expected = yaml.safe_load((unlimited / "args.yaml").read_text())
    assert asked.pop("auto_batch") is True
    assert expected.pop("auto_batch") is None
    different = {name for name in asked if asked[name] != expected[name]}
    assert different <= {"checkpoint_dir", "output_dir", "log_dir", "max_steps"}


@pytest.mark.parametrize(
    ("task", "split"), [("compressed_ad", "3 per GPU x 4 accumulation x 1 = 12 (as the run was begun)")]
)
def test_a_resumed_run_keeps_its_split(task, split, run_little, tmp_path):
    """With more memory too: another split adds up in another order, and the last bits would differ."""
    memory = LITTLE[task][0]
    uninterrupted = tmp_path / "uninterrupted"
    run_folder = tmp_path / "run"
    run_little(task, memory, uninterrupted, ["--max_steps", "6"])
    run_little(task, memory, run_folder, ["--max_steps", "3"])
    done = run_little(task, "99", run_folder, ["--max_steps", "6", "--resume_from", "auto"])
    assert split in done.stdout, done.stdout
    assert train_losses(run_folder) == train_losses(uninterrupted)


def test_all_ranks_fit_to_the_one_with_the_least_memory(run_little, finished, tmp_path):
    run_folder = tmp_path / "run"
    flags = ["--train_batch_size", "6", "--max_steps", "3"]
    done = run_little("compressed_ad", "4+", run_folder, flags, ranks=2, LITTLE_MEMORY_RANK="1")
    assert "3 per GPU x 2 accumulation x 2 = 12 (fitted: 6 did not fit into memory)" in done.stdout

    step, loss = train_losses(run_folder)[0]
    expected_step, expected = train_losses(finished("compressed_ad"))[0]
    assert step == expected_step
    assert loss == pytest.approx(expected, rel=1e-5)


# Of a run of 20 steps that logs each: its flags, and five limits as in LITTLE.
FIVE_LIMITS = {
    "compressed_ad": (["--train_timesteps", "24", "--train_batch_size", "16"], "12 8 4 2 1"),
}


def largest_error(losses: list[tuple[int, float]], expected: list[tuple[int, float]]) -> float:
    """The largest relative difference between the losses of two runs."""
    pairs = zip(losses, expected, strict=True)
    return max(abs(loss - reference) / max(1e-3, abs(reference)) for (_, loss), (_, reference) in pairs)


@pytest.mark.soak
@pytest.mark.parametrize("task", TASKS)
def test_twenty_steps_at_five_limits(task, run_little, run_task, tmp_path):
    """Forced out of memory at five limits, the first 20 steps have the losses of a run without a limit."""
    more, limits = FIVE_LIMITS[task]
    flags = [*more, "--max_steps", "20", "--log_every", "1"]
    unlimited = tmp_path / "unlimited"
    ended_well(run_task(task, unlimited, flags))
    expected = train_losses(unlimited)
    assert [step for step, _ in expected] == list(range(1, 21))

    for limit in limits.split():
        run_folder = tmp_path / limit
        done = run_little(task, f"{limit}+", run_folder, flags)

        error = largest_error(train_losses(run_folder), expected)
        chosen = [" ".join(line.split()) for line in done.stdout.splitlines() if "did not fit" in line]
        print(f"{task}, memory for {limit}: {'; '.join(chosen)}; off by {error:.1e}")
        assert error < 1e-5


# --- any number of processes ------------------------------------------------------------------------------------------

# uneven over 2 and 3 processes, of which those of 3 make 1, 1 and 2 passes
EFFECTIVE = ["--effective_batch_size", "7", "--batch_size", "2"]


@pytest.mark.parametrize("task", TASKS)
def test_an_effective_batch_is_kept_by_any_number_of_processes(task, run_task, tmp_path):
    """Begun by 3 processes, resumed by 2 and by 1, which do not name it: the losses of one process and one batch."""
    same = ["--log_every", "1", "--max_steps"]
    ended_well(run_task(task, tmp_path / "one", ["--batch_size", "7", *same, "4"]))
    expected = train_losses(tmp_path / "one")
    assert len(expected) == 4

    run_folder = tmp_path / "run"
    begun = ended_well(run_task(task, run_folder, [*EFFECTIVE, *same, "2"], ranks=3))
    assert "7 (--effective_batch_size) over 3 processes: 2 or 3 each, 2 passes of up to 2" in begun.stdout
    resumed = ended_well(run_task(task, run_folder, [*same, "3", "--resume_from", "auto"], ranks=2))
    assert "7 (--effective_batch_size) over 2 processes: 3 or 4 each" in resumed.stdout
    ended_well(run_task(task, run_folder, [*same, "4", "--resume_from", "auto"]))

    losses = train_losses(run_folder)
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in expected], rel=1e-5)
    assert read_summary(run_folder)["effective_batch_size"] == 7
