"""train_mimic_cxr.py: the same answer from every engine, and from a run that was killed."""

import json
import random
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from background import Run, interrupt
from conftest import ROOT, at_step

MIMIC = str(ROOT / "train_mimic_cxr.py")
CONFIGS = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3}},
    "zero2_offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "zero3_offload": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
}

# fp32 without dropout, and a line of the log for every step.
FIXED = ["--dropout", "0", "--log_every", "1", "--learning_rate", "1e-3", "--warmup_steps", "3"]
FIXED += ["--epochs", "9", "--lr_schedule", "constant"]

# 6 steps of two processes: a global batch of 16 as 4 x 2 on each; with 45 questions the epochs' ends are uneven.
SIZES = ["--batch_size", "4", "--gradient_accumulation_steps", "2"]
SHARED = [*SIZES, "--max_steps", "6", "--max_samples", "45"]


@pytest.fixture(scope="session")
def flags(mimic_cxr_flags, tmp_path_factory):
    """flags(engine, run_folder, more): the arguments of a run with an engine."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(config))

    def make(engine: str, run_folder: Path, more: list) -> list[str]:
        chosen = ["--use_ddp"]
        if engine != "ddp":
            chosen = ["--use_deepspeed", "--deepspeed_config", folder / f"{engine}.json"]
        return [str(word) for word in (*mimic_cxr_flags, *FIXED, *chosen, "--output_dir", run_folder, *more)]

    return make


@pytest.fixture(scope="session")
def run_engine(flags, zygote):
    """run_engine(engine, run_folder, more, ranks, **options): a run with an engine, whatever becomes of it."""

    def run(engine: str, run_folder: Path, more: list, ranks: int = 1, **options):
        return zygote(MIMIC, *flags(engine, run_folder, more), ranks=ranks, **options)

    return run


def ended_well(done):
    """Assert that a run ended with exit code 0, and hand it on."""
    assert done.code == 0, done.stderr
    return done


class TrainLine(NamedTuple):
    """A training line of the log."""

    step: int
    loss: float | None
    grad_norm: float | None


def read_log(run_folder: Path) -> list[dict]:
    """Every line of metrics.jsonl."""
    text = (run_folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def train_lines(run_folder: Path) -> list[TrainLine]:
    """The training lines of a run."""
    lines = [line for line in read_log(run_folder) if "train/loss" in line]
    return [TrainLine(line["step"], line["train/loss"], line["train/grad_norm"]) for line in lines]


def curve(run_folder: Path) -> list[tuple]:
    """(step, loss, grad norm) of each training line, (step, accuracy, AUROC) of each evaluation, in file order."""
    names = [
        ("train/loss", "train/grad_norm"),
        ("val/vqa_accuracy", "val/chexpert_auroc"),
        ("test/vqa_accuracy", "test/chexpert_auroc"),
    ]
    values = []
    for line in read_log(run_folder):
        for first, second in names:
            if first in line:
                values.append((line["step"], line[first], line[second]))
    return values


def largest_error(lines: list[TrainLine], expected: list[TrainLine]) -> float:
    """The largest relative difference between the losses of two runs."""
    pairs = list(zip(lines, expected, strict=True))
    assert all(line.step == reference.step for line, reference in pairs)
    # AdamW would hide a gradient of another size
    for line, reference in pairs:
        assert line.grad_norm == pytest.approx(reference.grad_norm, rel=1e-3)
    return max(abs(line.loss - reference.loss) / abs(reference.loss) for line, reference in pairs)


# --- one answer -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def one_process(run_engine, tmp_path_factory) -> list[TrainLine]:
    """The training lines of 6 steps in one process, whose global batch of 16 is 8 x 2."""
    run_folder = tmp_path_factory.mktemp("one") / "run"
    ended_well(run_engine("ddp", run_folder, [*SHARED, "--batch_size", "8"]))
    return train_lines(run_folder)


SLOW = [pytest.mark.soak]
ENGINES = ["ddp", "zero2", "zero3"]
ENGINES += [pytest.param(name, marks=SLOW) for name in ("zero1", "zero2_offload", "zero3_offload")]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gives_one_curve(run_engine, one_process, engine, tmp_path):
    run_folder = tmp_path / "run"
    ended_well(run_engine(engine, run_folder, SHARED, ranks=2))
    error = largest_error(train_lines(run_folder), one_process)
    print(f"{engine}: {error:.1e}")
    assert error < 1e-5

    weights = {path.name for path in run_folder.glob("model*.safetensors")}
    assert weights == {"model.safetensors", "model_last.safetensors"}


def test_a_rank_with_fewer_passes_repeats_one_that_counts_nothing(run_engine, tmp_path):
    """The last step of an epoch has 13 questions: 3 micro-batches of 2 on one rank, 4 on the other."""
    end_of_epoch = ["--max_steps", "3", "--max_samples", "45"]
    ended_well(run_engine("ddp", tmp_path / "1", [*end_of_epoch, *SIZES, "--batch_size", "8"]))
    small = ["--batch_size", "2", "--gradient_accumulation_steps", "4"]
    ended_well(run_engine("zero2", tmp_path / "2", [*end_of_epoch, *small], ranks=2))
    assert largest_error(train_lines(tmp_path / "2"), train_lines(tmp_path / "1")) < 1e-5


@pytest.mark.soak
def test_three_processes(run_engine, tmp_path):
    """16 does not divide by 3: 2 x 3 x 3 = 18 against one process with 18; a rank without a share counts nothing."""
    sizes = ["--gradient_accumulation_steps", "3", "--max_steps", "7", "--max_samples", "37"]
    ended_well(run_engine("ddp", tmp_path / "1", ["--batch_size", "6", *sizes]))
    ended_well(run_engine("zero3", tmp_path / "3", ["--batch_size", "2", *sizes], ranks=3))
    assert largest_error(train_lines(tmp_path / "3"), train_lines(tmp_path / "1")) < 1e-5


@pytest.fixture(scope="module")
def two_steps(run_engine, tmp_path_factory) -> Path:
    """The folder of a run of two steps."""
    run_folder = tmp_path_factory.mktemp("two_steps") / "run"
    ended_well(run_engine("ddp", run_folder, [*SIZES, "--max_steps", "2"]))
    return run_folder


@pytest.mark.parametrize(("samples", "world_sizes"), [("2", (1, 3)), ("0", (1, 2, 3))])
def test_metrics_are_the_same_at_any_world_size(run_engine, two_steps, samples, world_sizes):
    """--eval_only of one checkpoint: to 1e-6 at 1, 2 and 3 processes, also with fewer questions than processes."""
    results = []
    for ranks in world_sizes:
        more = ["--eval_only", "--max_samples", samples, "--batch_size", "5"]
        ended_well(run_engine("ddp", two_steps, more, ranks=ranks))
        results.append(json.loads((two_steps / "eval_test.json").read_text()))

    first, *others = results
    expected = {name: value if value is None else pytest.approx(value, abs=1e-6) for name, value in first.items()}
    for other in others:
        assert other == expected


def test_any_engine_resumes_a_checkpoint(run_engine, one_process, tmp_path):
    """Optimizer state included: DDP -> ZeRO-3 -> ZeRO-2 on other numbers of processes follows the unbroken curve."""
    run_folder = tmp_path / "run"
    resumed = [*SHARED, "--resume_from", "auto"]
    ended_well(run_engine("ddp", run_folder, [*resumed, "--max_steps", "2"], ranks=2))
    ended_well(run_engine("zero3", run_folder, [*resumed, "--max_steps", "4"], ranks=2))
    ended_well(run_engine("zero2", run_folder, [*resumed, "--batch_size", "8"]))
    assert largest_error(train_lines(run_folder), one_process) < 1e-5


@pytest.mark.soak
def test_exported_weights_start_another_engine_anew(run_engine, tmp_path):
    """--pretrained_weights: the same first loss as resuming has, and a line that the optimizer starts anew."""
    trained = tmp_path / "ddp"
    ended_well(run_engine("ddp", trained, [*SIZES, "--max_steps", "3", "--keep_last", "9"], ranks=2))

    first_losses = []
    for engine in ("zero3", "zero1"):
        more = [*SIZES, "--max_steps", "1", "--pretrained_weights", trained / "model_last.safetensors"]
        done = ended_well(run_engine(engine, tmp_path / engine, more, ranks=2))
        assert "the optimizer starts anew" in done.stdout
        first_losses.append(train_lines(tmp_path / engine)[0].loss)
    assert first_losses[0] == pytest.approx(first_losses[1], rel=1e-6)

    # the same questions, other weights
    assert first_losses[0] != train_lines(trained)[0].loss


def test_nan_steps_are_skipped_by_all_engines(run_engine, tmp_path):
    """A learning rate that overflows: every step is bad, all ranks stop together with one line."""
    overflowing = [*SHARED, "--learning_rate", "1e38", "--warmup_steps", "0", "--grad_clip", "0"]
    for engine in ("ddp", "zero2", "zero3"):
        done = run_engine(engine, tmp_path / engine, [*overflowing, "--max_bad_steps", "3"], ranks=2)
        assert done.code == 1, (engine, done.stdout, done.stderr)
        assert done.stderr.count("error: 3 steps in a row had a non-finite loss") == 1


# --- kills ------------------------------------------------------------------------------------------------------------

# With dropout: the random state of every rank must come back too.
RESUME = [*SIZES, "--save_every", "2", "--resume_from", "auto"]
RESUME += ["--max_samples", "91", "--max_steps", "10", "--dropout", "0.1", "--log_every", "3"]


@pytest.fixture(scope="module", params=[pytest.param("ddp", marks=SLOW), "zero2"])
def uninterrupted(request, run_engine, tmp_path_factory):
    """(engine, run folder) of an uninterrupted run of two processes."""
    run_folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    ended_well(run_engine(request.param, run_folder, RESUME, ranks=2))
    return request.param, run_folder


def test_killed_and_resumed_exactly(run_engine, uninterrupted, tmp_path):
    """A worker killed: the remaining losses and metrics are the unbroken run's to the bit."""
    engine, reference = uninterrupted
    run_folder = tmp_path / "run"
    killed = run_engine(engine, run_folder, RESUME, ranks=2, interrupt=at_step(run_folder, 4, "worker"))
    assert killed.code != 0
    ended_well(run_engine(engine, run_folder, RESUME, ranks=2))
    assert curve(run_folder) == curve(reference)


@pytest.mark.soak
def test_ten_kills(flags, run_engine, uninterrupted, tmp_path):
    engine, reference = uninterrupted
    chance = random.Random(engine)
    for number in range(10):
        # who is killed, and when
        run_folder = tmp_path / f"run{number}"
        who = ("worker", "rank0", "all", "launcher")[number % 4]
        step = chance.randrange(0, 10)
        delay = chance.uniform(0, 0.8) + (6 if step == 0 else 0)

        interrupt([MIMIC, *flags(engine, run_folder, RESUME)], run_folder, who, step, delay)
        reached = sorted(path.name for path in run_folder.glob("step_*.pt"))[-1:]
        ended_well(run_engine(engine, run_folder, RESUME, ranks=2))

        same = curve(run_folder) == curve(reference)
        print(f"{engine}: {who} killed after step {step} + {delay:.2f} s, {reached}: same {same}")
        assert same


@pytest.mark.soak
@pytest.mark.parametrize(("flag", "engine"), [("--deepspeed", "zero2"), ("--torchrun", "ddp")])
def test_signals_to_the_launcher_reach_every_worker(flags, flag, engine, tmp_path):
    """SIGTERM to launch_distributed_training.sh: saved at the step reached, no process left behind."""
    run_folder = tmp_path / "run"
    launcher = [ROOT / "launch_distributed_training.sh", "--num_gpus", "2", flag]
    given = flags(engine, run_folder, [*RESUME, "--max_steps", "500"])

    # the launcher itself says which engine it is
    given = [word for word in given if word not in ("--use_ddp", "--use_deepspeed")]

    run = Run([*launcher, *given], MIMIC, run_folder)
    run.wait_for_step(2)
    assert len(run.workers()) == 2
    run.kill("launcher", signal.SIGTERM)
    assert run.end() != 0

    text = (tmp_path / "run.log").read_text()
    saved = int(text.split("signal: saved at step ")[-1].split(";")[0])
    assert (run_folder / f"step_{saved:08d}.pt").exists()
