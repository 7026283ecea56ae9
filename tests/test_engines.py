"""train_mimic_cxr.py: the same answer from every engine, and from a run that was killed."""

import json
import random
import signal
from pathlib import Path

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


@pytest.fixture(scope="session")
def flags(chest, tmp_path_factory):
    """flags(engine, out, *more): the arguments of a run in fp32 without dropout that logs every step."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(config))

    def make(engine: str, out: Path, *more) -> list[str]:
        chosen = (
            ["--use_ddp"] if engine == "ddp" else ["--use_deepspeed", "--deepspeed_config", folder / f"{engine}.json"]
        )
        fixed = [
            "--dropout",
            "0",
            "--log_every",
            "1",
            "--learning_rate",
            "1e-3",
            "--warmup_steps",
            "3",
            "--epochs",
            "9",
        ]
        fixed += ["--lr_schedule", "constant"]
        return [str(word) for word in (*chest, *fixed, *chosen, "--output_dir", out, *more)]

    return make


def curve(out: Path) -> list[tuple]:
    """(step, loss, grad norm) of each training line, (step, accuracy, AUROC) of each evaluation, in file order."""
    names = [("train/loss", "train/grad_norm"), ("val/vqa_accuracy", "val/chexpert_auroc")]
    names.append(("test/vqa_accuracy", "test/chexpert_auroc"))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], *(line[n] for n in pair)) for line in lines for pair in names if pair[0] in line]


def training(out: Path) -> list[tuple]:
    """(step, loss, grad norm) of the training lines."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train/loss"], line["train/grad_norm"]) for line in lines if "train/loss" in line]


def off(a: list[tuple], b: list[tuple]) -> float:
    """Largest relative difference of the training losses of two curves."""
    assert len(a) == len(b)
    return max(abs(x[1] - y[1]) / abs(y[1]) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="session")
def one_process(flags, zygote, tmp_path_factory) -> list[tuple]:
    """The training lines of 6 steps in one process: effective batch 16 as 8 x 2; 45 questions: uneven epochs' ends."""
    out = tmp_path_factory.mktemp("one") / "run"
    sizes = ["--batch_size", "8", "--gradient_accumulation_steps", "2", "--max_steps", "6", "--max_samples", "45"]
    done = zygote(MIMIC, *flags("ddp", out, *sizes))
    assert done.code == 0, done.stderr
    return training(out)


SHARED = ["--batch_size", "4", "--gradient_accumulation_steps", "2", "--max_steps", "6", "--max_samples", "45"]


SLOW = [pytest.mark.soak]


@pytest.mark.parametrize(
    "engine",
    [
        "ddp",
        *(pytest.param(n, marks=SLOW if n in ("zero1", "zero2_offload", "zero3_offload") else []) for n in CONFIGS),
    ],
)
def test_every_engine_gives_one_curve(flags, zygote, one_process, engine, tmp_path):
    done = zygote(MIMIC, *flags(engine, tmp_path / "run", *SHARED), ranks=2)
    assert done.code == 0, done.stderr
    largest = off(training(tmp_path / "run"), one_process)
    print(f"{engine}: {largest:.1e}")
    assert largest < 1e-5
    assert {path.name for path in (tmp_path / "run").glob("model*.safetensors")} == {
        "model.safetensors",
        "model_last.safetensors",
    }


@pytest.mark.soak
def test_three_processes(flags, zygote, one_process, tmp_path):
    """16 does not divide by 3: 2 x 3 x 3 = 18 against one process with 18; a rank without a share counts nothing."""
    for ranks, batch in ((1, 6), (3, 2)):
        more = ["--batch_size", batch, "--gradient_accumulation_steps", "3", "--max_steps", "7", "--max_samples", "37"]
        engine = "ddp" if ranks == 1 else "zero3"
        done = zygote(MIMIC, *flags(engine, tmp_path / f"{ranks}", *more), ranks=ranks)
        assert done.code == 0, done.stderr
    assert off(training(tmp_path / "3"), training(tmp_path / "1")) < 1e-5


def test_metrics_are_the_same_at_any_world_size(flags, zygote, tmp_path):
    """--eval_only of one checkpoint: to 1e-6 at 1, 2 and 3 processes, also with fewer questions than processes."""
    run = tmp_path / "run"
    assert zygote(MIMIC, *flags("ddp", run, *SHARED[:4], "--max_steps", "2")).code == 0
    for samples, sizes in (("2", (1, 3)), ("0", (1, 2, 3))):
        seen = []
        for ranks in sizes:
            more = ["--eval_only", "--max_samples", samples, "--batch_size", "5"]
            done = zygote(MIMIC, *flags("ddp", run, *more), ranks=ranks)
            assert done.code == 0, done.stderr
            seen.append(json.loads((run / "eval_test.json").read_text()))
        for other in seen[1:]:
            assert other.keys() == seen[0].keys()
            assert all(other[k] == (v if v is None else pytest.approx(v, abs=1e-6)) for k, v in seen[0].items())


def test_a_checkpoint_goes_on_under_any_engine(flags, zygote, one_process, tmp_path):
    """Optimizer state included: DDP -> ZeRO-3 -> ZeRO-2 on other numbers of processes follows the unbroken curve."""
    run = tmp_path / "run"
    legs = [("ddp", 2, 4, 2), ("zero3", 2, 4, 4), ("zero2", 1, 8, 6)]
    for engine, ranks, batch, stop in legs:
        more = ["--batch_size", batch, "--gradient_accumulation_steps", "2", "--max_samples", "45", "--max_steps", stop]
        done = zygote(MIMIC, *flags(engine, run, *more, "--resume_from", "auto"), ranks=ranks)
        assert done.code == 0, done.stderr
    assert off(training(run), one_process) < 1e-5


@pytest.mark.soak
def test_exported_weights_start_another_engine_anew(flags, zygote, tmp_path):
    """--pretrained_weights: the same first loss as resuming has, and a word that the optimizer starts anew."""
    run = tmp_path / "ddp"
    assert zygote(MIMIC, *flags("ddp", run, *SHARED[:4], "--max_steps", "3", "--keep_last", "9"), ranks=2).code == 0
    weights = run / "model_last.safetensors"
    more = [*SHARED[:4], "--max_steps", "1", "--pretrained_weights", weights]
    started = [zygote(MIMIC, *flags(engine, tmp_path / engine, *more), ranks=2) for engine in ("zero3", "zero1")]
    assert all(done.code == 0 and "the optimizer starts anew" in done.stdout for done in started)
    first = [training(tmp_path / engine)[0][1] for engine in ("zero3", "zero1")]
    assert first[0] == pytest.approx(first[1], rel=1e-6)
    assert first[0] != training(run)[0][1]  # the same questions, other weights


# --- kills ------------------------------------------------------------------------------------------------------------

# dropout on: the random state of every rank must come back too
RESUME = ["--batch_size", "4", "--gradient_accumulation_steps", "2", "--save_every", "2", "--resume_from", "auto"]
RESUME += ["--max_samples", "91", "--max_steps", "10", "--dropout", "0.1", "--log_every", "3"]


@pytest.fixture(scope="module", params=[pytest.param("ddp", marks=SLOW), "zero2"])
def whole(request, flags, zygote, tmp_path_factory):
    """(engine, folder) of an uninterrupted 2-process run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = zygote(MIMIC, *flags(request.param, out, *RESUME), ranks=2)
    assert done.code == 0, done.stderr
    return request.param, out


def test_killed_and_resumed_exactly(flags, zygote, whole, tmp_path):
    """A worker killed: the remaining losses and metrics are the unbroken run's to the bit."""
    engine, reference = whole
    out = tmp_path / "run"
    words = flags(engine, out, *RESUME)
    assert zygote(MIMIC, *words, ranks=2, interrupt=at_step(out, 4, "worker")).code != 0
    done = zygote(MIMIC, *flags(engine, out, *RESUME), ranks=2)
    assert done.code == 0, done.stderr
    assert curve(out) == curve(reference)


@pytest.mark.soak
def test_ten_kills(flags, zygote, whole, tmp_path):
    engine, reference = whole
    chance = random.Random(engine)
    for number in range(10):
        out = tmp_path / f"run{number}"
        who, step = ("worker", "rank0", "all", "launcher")[number % 4], chance.randrange(0, 10)
        delay = chance.uniform(0, 0.8) + (6 if step == 0 else 0)
        interrupt([MIMIC, *flags(engine, out, *RESUME)], out, who, step, delay)
        reached = sorted(path.name for path in out.glob("step_*.pt"))[-1:]
        done = zygote(MIMIC, *flags(engine, out, *RESUME), ranks=2)
        assert done.code == 0, done.stderr
        same = curve(out) == curve(reference)
        print(f"{engine}: {who} killed after step {step} + {delay:.2f} s, {reached}: same {same}")
        assert same


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["--deepspeed", "--torchrun"])
def test_signals_to_the_launcher_reach_every_worker(flags, engine, tmp_path):
    """SIGTERM to launch_distributed_training.sh: saved at the step reached, no process left behind."""
    out = tmp_path / "run"
    words = flags("zero2" if engine == "--deepspeed" else "ddp", out, *RESUME, "--max_steps", "500")
    words = [word for word in words if word not in ("--use_ddp", "--use_deepspeed")]
    run = Run([ROOT / "launch_distributed_training.sh", "--num_gpus", "2", engine, *words], MIMIC, out)
    run.wait_for_step(2)
    assert len(run.workers()) == 2
    run.kill("launcher", signal.SIGTERM)
    assert run.end() != 0
    saved = int((tmp_path / "run.log").read_text().split("signal: saved at step ")[-1].split(";")[0])
    assert (out / f"step_{saved:08d}.pt").exists()


def test_nan_steps_are_skipped_by_all_engines(flags, zygote, tmp_path):
    """A learning rate that overflows: every step is bad, all ranks stop together with one line."""
    for engine in ("ddp", "zero2", "zero3"):
        more = [*SHARED, "--learning_rate", "1e38", "--warmup_steps", "0", "--grad_clip", "0", "--max_bad_steps", "3"]
        done = zygote(MIMIC, *flags(engine, tmp_path / engine, *more), ranks=2)
        assert done.code == 1, (engine, done.stdout, done.stderr)
        assert done.stderr.count("error: 3 steps in a row had a non-finite loss") == 1
