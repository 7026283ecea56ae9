"""The project's contract, tested by starting the scripts as a user does: with python and with torchrun on 2 to 5 ranks.

The number of processes changes how long a run takes, never its result, and a run killed at any moment resumes as if
nothing had happened. With --deterministic both hold to the bit, so most comparisons here have no tolerance. What all
scripts share is tested on `examples/minimal.py`. To test a new script, add an entry to SCRIPTS.
"""

import contextlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Script:
    """A script, with flags for a short run with dropout, an uneven last step and several micro-batches per rank."""

    path: str
    flags: str
    steps_before_kill: int
    # commands that make the sample data in the folder {0}, and the flags for it
    data: tuple[str, ...] = ()
    data_flags: str = ""

    def __str__(self) -> str:
        return Path(self.path).stem


MINIMAL = Script(
    "examples/minimal.py",
    "--effective_batch_size 23 --batch_size 4 --num_epochs 4 --image_size 16 --dropout 0.3",
    steps_before_kill=7,
)
PRS_MED = Script(
    "train_prs_med.py",
    "--effective_batch_size 7 --batch_size 2 --num_epochs 2 --lora_dropout 0.05 --max_new_tokens 4 --augmentation "
    "--unet_steps 2 --absent 0.2",
    steps_before_kill=3,
    # one validation batch, so fewer than processes
    data=("sample_data prs_med {0} --num_train 9 --num_val 1 --num_test 3 --image_size 48",),
    data_flags="--data_root {0}",
)
SURVIVAL = Script(
    "train_survival_distributed.py",
    "--effective_batch_size 9 --batch_size 2 --num_epochs 3 --resnet resnet10 --base_channels 8 --image_size 16 14 10 "
    "--clinical_columns Age Sex --freeze_epochs 1 --lr 3e-3 --hu_window -200 600 --eval_years 1 3 --cache_dir= "
    "--use_smart_cache --cache_rate 0.6 --replace_rate 0.4",
    steps_before_kill=3,
    data=("sample_data survival {0} --num_patients 40 --matrix 16",),
    data_flags="--csv_path {0}/dataset.csv",
)
MIMIC_CXR = Script(
    "train_mimic_cxr.py",
    "--effective_batch_size 23 --batch_size 4 --num_epochs 2 --dropout 0.1 --augmentation --use_ddp --lr 1e-3 "
    "--warmup_steps 2 --max_samples 170",
    steps_before_kill=5,
    data=(
        "sample_data mimic_cxr {0} --num_train 40 --num_val 6 --num_test 10",
        "prepare_data mimic_cxr {0}/mimic-cxr-jpg {0}/mimic-ext-cxr-qba {0}/prepared --image_size 32 --workers 1",
    ),
    data_flags="--data_path {0}/prepared --image_encoder {0}/convnext_tiny --text_encoder {0}/bert_tiny",
)
CASCADE = Script(
    "train_accelerate.py",
    "--img_size 32 --encoder_dim 16 --ddim_steps 2 --num_samples 2 --ema_decay 0.9 --lr 2e-3 --split_seed 0 "
    '--stage_configs {"volume_size":[8,8,8],"voxel_dim":16,"vit_depth":1,"num_heads":2,"token_grid":4,"batch_size":2,'
    '"effective_batch_size":5,"num_epochs":2} {"volume_size":[16,16,16],"voxel_dim":16,"vit_depth":1,"num_heads":2,'
    '"token_grid":4,"batch_size":1,"effective_batch_size":3,"num_epochs":1}',
    steps_before_kill=7,
    data=("sample_data cascade {0} --num_patients 14 --matrix 16",),
    data_flags="--dataset_path {0} --cache_dir {0}_cache",
)
COMPRESSED_AD = Script(
    "train.py",
    "--effective_batch_size 7 --batch_size 2 --tf_n_embd 16 --tf_n_layer 1 --tf_n_head 2 --tf_dim_feedforward 16 "
    "--encoder_n_layer 1 --n_transit 16 --n_latent 4 --train_timesteps 20 --num_warmup_steps 2 --lr 3e-3 "
    "--eval_interval 9 --val_episodes 3 --eval_episodes 4 --eval_seeds 2 --from_start 0.5 --shift 2 --objective search",
    steps_before_kill=6,
    data=("sample_data compressed_ad {0} --env darkroom:3 --streams 2 --steps 96",),
    data_flags="--data {0}",
)
SCRIPTS = [MINIMAL, PRS_MED, SURVIVAL, MIMIC_CXR, CASCADE, COMPRESSED_AD]
# so that torchrun, deepspeed and accelerate are the ones installed beside this Python
PATH = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix}
# part of the line printed after a step
STEP = "| loss "
# suffixes of values that may differ between runs with the same result
DIFFERENT = ("samples_per_s", "data_wait", "peak_memory_gb", "seconds", "world_size")


@pytest.fixture(scope="module")
def data_flags(tmp_path_factory):
    """data_flags(script): flags for the script's sample data, which are generated once."""

    @cache
    def make(commands: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("data") / "sample"
        for command in commands:
            words = f"-m tools.{command.format(folder)}".split()
            subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
        return folder

    return lambda script: script.data_flags.format(make(script.data))


@pytest.fixture
def folder(tmp_path) -> Path:
    """The run folder of a test. The output of its last start is in run.txt beside it, see output_of()."""
    return tmp_path / "run"


@pytest.fixture(scope="module")
def start(data_flags):
    """start(script, folder, flags, processes, fault): start a run in the background, with a fault of with_fault.py.

    exact: with --deterministic. save: the flag --save_every, or "" for the default.
    """

    def begin(
        script, folder, flags="", processes=1, fault="", exact=True, save="--save_every 3", launcher="", **options
    ) -> subprocess.Popen:
        command = [sys.executable]
        if launcher:
            command = shlex.split(launcher)
        elif processes > 1:
            command += [str(ROOT / "utils/torchrun.py"), "--standalone", f"--nproc_per_node={processes}"]
        if fault:
            command += [str(ROOT / "tests/with_fault.py"), fault]
        words = f"--num_workers 0 --log_every 1 --dist_timeout 60 {save} {'--deterministic' * exact}"
        words += f" {script.flags} {data_flags(script)} {flags}"
        command += [str(ROOT / script.path), "--output_dir", str(folder), *words.split()]
        with open(f"{folder}.txt", "w") as output:
            options |= {"env": os.environ | PATH, "stdout": output, "stderr": output}
            return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options)

    return begin


@pytest.fixture(scope="module")
def run(start):
    """run(script, folder, ..., code): run to the end, check the exit code and return the output."""

    def wait(script, folder, *args, code=0, **options) -> str:
        ended = start(script, folder, *args, **options).wait(timeout=300)
        assert ended == code, output_of(folder)
        return output_of(folder)

    return wait


@pytest.fixture(scope="module")
def run_and_kill(start):
    """run_and_kill(script, folder, steps, flags, processes): start a slow run, kill all its processes after `steps`."""

    def kill(script, folder, steps, flags="", processes=2, fault="slow", **options) -> None:
        process = start(script, folder, f"--save_every 1 {flags}", processes, fault, **options)
        wait_for(folder, STEP, steps)
        kill_all(process)

    return kill


@pytest.fixture(scope="module")
def uninterrupted(run, tmp_path_factory):
    """uninterrupted(script): run folder of the script's uninterrupted run on one process, shared by all tests."""

    @cache
    def make(script: Script) -> Path:
        folder = tmp_path_factory.mktemp("uninterrupted") / str(script)
        run(script, folder)
        return folder

    return make


@pytest.fixture(scope="module")
def resume_exactly(run, uninterrupted):
    """resume_exactly(script, folder, processes): resume to the end; the result must be the uninterrupted run's."""

    def resume(script, folder, processes=1) -> None:
        run(script, folder, "--resume_from auto", processes)
        assert_same(folder, uninterrupted(script))

    return resume


@pytest.fixture(scope="module")
def eight_steps(run, tmp_path_factory):
    """The run folder of examples/minimal.py after --max_steps 8, with checkpoints of steps 6 and 8."""
    folder = tmp_path_factory.mktemp("eight") / "run"
    run(MINIMAL, folder, "--max_steps 8")
    return folder


def output_of(folder: Path) -> str:
    return Path(f"{folder}.txt").read_text()


def results_in(text: str) -> dict:
    """The values of a JSON object without timings and memory."""
    return {name: value for name, value in json.loads(text).items() if not name.endswith(DIFFERENT)}


def read_log(folder: Path) -> list[dict]:
    return list(map(results_in, (folder / "metrics.jsonl").read_text().splitlines()))


def skipped_steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_log(folder) if line.get("train/skipped")]


def saved_steps(folder: Path) -> set[int]:
    return {int(path.stem[5:]) for path in folder.glob("step_*.pt")}


def assert_same(folder: Path, other: Path) -> None:
    """Every logged number, every weight and the summary are the same to the bit."""
    assert read_log(folder) == read_log(other)
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert results_in((folder / "summary.json").read_text()) == results_in((other / "summary.json").read_text())


def assert_close(folder: Path, other: list[dict], rel: float = 1e-6) -> None:
    """Every logged number is the same up to rounding: to `rel`, or to 2e-6 where it is small."""
    for line, expected in zip(read_log(folder), other, strict=True):
        assert line == pytest.approx(expected, rel=rel, abs=2e-6)


def assert_tensorboard_has_the_log(folder: Path) -> None:
    """TensorBoard shows each line of the log once, although some steps were repeated; no intervals and no details."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown, lines = EventAccumulator(str(folder / "logs"), {"scalars": 0}).Reload(), read_log(folder)
    assert not [name for name in shown.Tags()["scalars"] if name.count("/") > 1 or name.endswith("_low")]
    for name in ("train/loss", next(name for line in lines for name in line if name.startswith("val/"))):
        expected = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        assert [(event.step, event.value) for event in shown.Scalars(name)] == list(map(pytest.approx, expected))


def wait_for(folder: Path, text: str, times: int = 1) -> None:
    """Wait until the latest start has printed a text this many times."""
    deadline = time.monotonic() + 120
    while output_of(folder).count(text) < times:
        assert time.monotonic() < deadline, output_of(folder)
        time.sleep(0.02)


def kill_all(process: subprocess.Popen) -> None:
    """Send SIGKILL to a launcher and its ranks, which are in sessions of their own under torchrun."""
    parent = psutil.Process(process.pid)
    for victim in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait()


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


# --- every script: any number of processes, killed at any moment ------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_three_processes_give_the_bits_of_one(script, run, resume_exactly, uninterrupted, folder):
    """In an epoch's last step, which is smaller, the ranks have unequal numbers of micro-batches.

    Deleting summary.json simulates a kill in the final test, which a resumed run repeats.
    """
    run(script, folder, "", 3)
    assert_same(folder, uninterrupted(script))
    (folder / "summary.json").unlink()
    resume_exactly(script, folder)


KILLED = [*((script, script.steps_before_kill) for script in SCRIPTS), (SURVIVAL, 7)]


@pytest.mark.parametrize(("script", "steps"), KILLED, ids=str)
def test_killed_run_resumes_on_other_number_of_processes(
    script, steps, start, run, run_and_kill, uninterrupted, folder
):
    """2 processes are killed, 1 is stopped by SIGTERM, its newest checkpoint is damaged, and 2 run to the end.

    Resuming needs no batch flags. After 7 steps survival is in an inner fold.
    """
    run_and_kill(script, folder, steps)

    later = replace(script, flags=re.sub(r"--(effective_)?batch_size \d+ ", "", script.flags))
    resume = "--resume_from auto --save_every 1"
    process = start(later, folder, resume, fault="slow")
    wait_for(folder, STEP, 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143, output_of(folder)
    assert "signal: saved at step" in output_of(folder)

    newest = max(folder.glob("step_*.pt"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    text = run(later, folder, resume, 2)
    assert f"{newest.name}: its bytes are not those that were written; passed over" in text
    assert_same(folder, uninterrupted(script))
    assert_tensorboard_has_the_log(folder)


# --- every launcher ---------------------------------------------------------------------------------------------------

# commands that start two processes; srun is tested in test_slurm.py, accelerate below
LAUNCHERS = {
    "deepspeed": "deepspeed --num_gpus=2 --master_port {port}",
    "module": "python -m torch.distributed.launch --nproc_per_node=2 --master_port={port}",
    "two nodes": "env NNODES=2 MASTER_ADDR=localhost MASTER_PORT={port} bash -c 'for rank in 0 1; do NODE_RANK=$rank "
    './launch_distributed_training.sh --script "$@" --num_gpus 1 & done; wait\' nodes',
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_the_same_run(launcher, run, uninterrupted, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert "2 by " in run(MINIMAL, folder, launcher=LAUNCHERS[launcher].format(port=port))
    assert_same(folder, uninterrupted(MINIMAL))


def test_accelerate_command_of_guide_4_starts_the_same_run(run, uninterrupted, folder):
    text = run(COMPRESSED_AD, folder, launcher="accelerate launch --config_file accelerate_config.yaml")
    assert "Distributed training: MULTI_CPU\nNumber of processes: 2\nMixed precision: no\n" in text
    assert_same(folder, uninterrupted(COMPRESSED_AD))


def test_torchrun_restarts_a_killed_process(start, uninterrupted, folder):
    """torchrun restarts both processes, and they resume from the newest checkpoint."""
    # without this variable the new processes may try to join the old ones
    launcher = f"env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 python {ROOT}/utils/torchrun.py --nnodes=1:1"
    launcher += " --nproc_per_node=2 --max_restarts=1 --rdzv_backend=c10d"
    process = start(MINIMAL, folder, "--resume_from auto", fault="slow", launcher=launcher)
    wait_for(folder, STEP, 5)
    next(child for child in psutil.Process(process.pid).children() if "minimal.py" in " ".join(child.cmdline())).kill()
    assert process.wait(timeout=120) == 0, output_of(folder)
    assert_same(folder, uninterrupted(MINIMAL))


# --- DeepSpeed: the same up to rounding -------------------------------------------------------------------------------

DEEPSPEED = replace(MIMIC_CXR, flags=MIMIC_CXR.flags.replace("--use_ddp ", ""))


@pytest.fixture(scope="module")
def plain(run, tmp_path_factory):
    """The log of MIMIC-CXR on one process with torch's engine, without --deterministic."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    run(MIMIC_CXR, folder, exact=False)
    return read_log(folder)


@pytest.fixture
def zero_flags(tmp_path):
    """zero_flags(stage): flags for DeepSpeed; stage 3 keeps the optimizer on the CPU."""

    def make(stage: int) -> str:
        # a threshold of 0 makes stage 3 partition even the small weights of this test
        stage_3 = {"offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
        zero = {"stage": stage} | (stage_3 if stage == 3 else {})
        path = tmp_path / f"zero{stage}.json"
        path.write_text(json.dumps({"zero_optimization": zero}))
        return f"--use_deepspeed --deepspeed_config {path}"

    return make


def test_any_engine_resumes_any_other(run, run_and_kill, plain, zero_flags, folder):
    """DDP on 2 processes is killed; then ZeRO-3 on 3, ZeRO-1 on 2, and torch on 1 to the end.

    With 3 processes, some ranks make extra passes with weight 0.
    """
    run_and_kill(MIMIC_CXR, folder, 4, exact=False)
    resumed = replace(DEEPSPEED, flags=re.sub(r"--(effective_)?batch_size \d+ ", "", DEEPSPEED.flags))
    run(resumed, folder, f"{zero_flags(3)} --resume_from auto --max_steps 8", 3, exact=False)
    run(resumed, folder, f"{zero_flags(1)} --resume_from auto --max_steps 11", 2, exact=False)
    run(resumed, folder, "--resume_from auto", exact=False)
    assert_close(folder, plain)


def test_deepspeed_killed_and_resumed_gives_the_same_bits(run, run_and_kill, plain, zero_flags, folder, tmp_path):
    """Up to rounding they are also the results of torch on one process."""
    assert "DeepSpeed ZeRO-2" in run(DEEPSPEED, tmp_path / "whole", zero_flags(2), 2, exact=False)
    assert_close(tmp_path / "whole", plain)
    run_and_kill(DEEPSPEED, folder, 6, zero_flags(2), exact=False)
    run(DEEPSPEED, folder, f"{zero_flags(2)} --resume_from auto", 2, exact=False)
    assert_same(folder, tmp_path / "whole")


def test_deepspeed_skips_a_step_with_nan_on_one_rank(run, zero_flags, folder):
    run(DEEPSPEED, folder, zero_flags(2), 2, fault="nan@2@1", exact=False)
    assert skipped_steps(folder) == [2]


# --- what all scripts share, tested on examples/minimal.py ------------------------------------------------------------


def test_gpu_shares_give_the_same_bits_and_verify_repeats_them(run, uninterrupted, folder):
    """tools.verify repeats the steps on the run's number of processes, with its shares."""
    run(MINIMAL, folder, "--gpu_shares 2,1 --max_steps 6", 2)
    assert read_log(folder)[:6] == read_log(uninterrupted(MINIMAL))[:6]
    command = [sys.executable, "-m", "tools.verify", folder, "--steps", "1:4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_deterministic_results_agree_up_to_rounding(run, run_and_kill, folder, tmp_path):
    """DDP's order of summation depends on the number of processes; resuming on the same number gives the same bits."""
    run(MINIMAL, tmp_path / "one", exact=False)
    run(MINIMAL, tmp_path / "three", "", 3, exact=False)
    assert_close(tmp_path / "three", read_log(tmp_path / "one"), rel=2e-6)
    run_and_kill(MINIMAL, folder, 9, processes=3, exact=False)
    run(MINIMAL, folder, "--resume_from auto", 3, exact=False)
    assert_same(folder, tmp_path / "three")


@pytest.mark.parametrize(("exact", "killed_on"), [(True, 1), (False, 2)])
def test_fp16_run_resumes_with_its_loss_scale(run, run_and_kill, uninterrupted, folder, tmp_path, exact, killed_on):
    """Gradient norms are fp32's up to fp16's rounding. A skipped step halves the loss scale."""
    import torch

    options = {"fault": "fp16@4@0", "exact": exact}
    run(MINIMAL, tmp_path / "whole", "", 2, **options)
    assert skipped_steps(tmp_path / "whole") == [4]
    logs = read_log(tmp_path / "whole"), read_log(uninterrupted(MINIMAL))
    fp16, fp32 = ([line["train/grad_norm"] for line in log[:3]] for log in logs)
    assert fp16 == pytest.approx(fp32, rel=0.02)
    assert fp16 != pytest.approx(fp32, rel=1e-6)

    run_and_kill(MINIMAL, folder, 6, "", killed_on, **options)
    run(MINIMAL, folder, "--resume_from auto", 2, **options)
    assert_same(folder, tmp_path / "whole")
    ends = [torch.load(path / "step_00000036.pt")["scaler"] for path in (folder, tmp_path / "whole")]
    assert ends[0] == ends[1]
    assert (ends[0]["scale"], ends[0]["_growth_tracker"]) == (2.0**13, 32)


@pytest.mark.soak
@pytest.mark.parametrize("chain", range(20))
def test_run_killed_five_times_gives_the_same_bits(start, resume_exactly, folder, chain):
    """On 1 to 5 processes, at random times: during the start, steps, evaluations and saves."""
    script, chance = SCRIPTS[chain % len(SCRIPTS)], random.Random(chain)
    for kill in range(5):
        process = start(script, folder, "--resume_from auto --save_every 1", 1 + (chain + kill) % 5, fault="slow")
        time.sleep(chance.uniform(0, 15) if kill == 0 else chance.uniform(6, 25))
        kill_all(process)
    resume_exactly(script, folder)


@pytest.fixture(scope="module")
def evaluated(run, tmp_path_factory):
    """The run folder of examples/minimal.py with evaluations in the middle of epochs."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    run(MINIMAL, folder, "--eval_every_steps 6")
    return folder


def test_run_killed_in_an_evaluation_logs_it_once(run, evaluated, folder):
    """Killed in the evaluation at the end of an epoch."""
    run(MINIMAL, folder, "--eval_every_steps 6", 2, code=137, fault="kill_eval1@9@1")
    run(MINIMAL, folder, "--resume_from auto --eval_every_steps 6", 2)
    assert_same(folder, evaluated)


def test_loader_workers_change_no_bits(run, evaluated, folder):
    """An evaluation in the middle of an epoch does not make the workers start the epoch again.

    A batch that takes longer than --dist_timeout does not end a single process, as no other rank waits for it.
    """
    run(MINIMAL, folder, "--eval_every_steps 6 --num_workers 2 --dist_timeout 1", fault="slow_loader@7@0")
    assert_same(folder, evaluated)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param("kill_eval2@6@0", -9, marks=pytest.mark.soak, id="between stages"),
        pytest.param("int_eval3@10@0", 130, id="Ctrl-C in sampling"),
    ],
)
def test_cascade_resumes_between_stages_and_in_the_final_test(run, resume_exactly, folder, fault, code):
    """Killed while the previous stages' error is measured; interrupted while the test set's volumes are sampled."""
    text = run(CASCADE, folder, code=code, fault=fault)
    assert ("signal: the final test is broken off" in text) == (code == 130)
    resume_exactly(CASCADE, folder, 2)


def test_ctrl_c_to_the_launcher_saves(start, resume_exactly, folder):
    process = start(MINIMAL, folder, "--save_every 0", 2, fault="slow")
    wait_for(folder, STEP, 5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    resume_exactly(MINIMAL, folder, 2)


def test_run_paused_by_max_steps_resumes_to_the_same_log(run, folder, tmp_path):
    """The pause adds an evaluation and cuts a log interval short; resuming removes both from the log."""
    run(MINIMAL, folder, "--max_steps 5 --log_every 2")
    run(MINIMAL, folder, "--resume_from auto --log_every 2")
    run(MINIMAL, tmp_path / "whole", "--log_every 2")
    assert_same(folder, tmp_path / "whole")


def test_save_every_saves_its_multiples_and_after_every_evaluation(run, folder):
    """Including evaluations that are not the best."""
    run(MINIMAL, folder, "--eval_every_steps 2 --max_steps 8 --keep_last 99 --lr 0.03")
    assert saved_steps(folder) == {2, 3, 4, 6, 8}
    scores = [line["val/accuracy"] for line in read_log(folder) if "val/accuracy" in line]
    assert scores != sorted(scores)


def test_default_saves_at_most_once_a_minute(run, folder):
    """After the evaluations of the epochs of 203 steps and of --eval_every_steps, and at step 500, 61 s after 490."""
    flags = "--effective_batch_size 1 --batch_size 1 --image_size 8 --eval_every_steps 490 --max_steps 502"
    run(MINIMAL, folder, f"{flags} --keep_last 99", fault="minutes", save="")
    assert saved_steps(folder) == {203, 406, 490, 500, 502}


def test_default_saves_only_the_best_and_the_last_in_the_first_minute(run, folder):
    run(MINIMAL, folder, "--eval_every_steps 1 --keep_last 99", save="")
    scores = [line["val/accuracy"] for line in read_log(folder) if "val/accuracy" in line]
    best = {step for step, score in enumerate(scores, start=1) if score == max(scores[:step])}
    assert saved_steps(folder) == best | {36} < {*range(1, 37)}


def test_run_resumed_from_best_ends_the_same(run, resume_exactly, uninterrupted, folder):
    """Also if it stops again before its next checkpoint."""
    shutil.copytree(uninterrupted(MINIMAL), folder)
    run(MINIMAL, folder, f"--resume_from {folder}/best.pt --max_steps 1")
    resume_exactly(MINIMAL, folder)
    # after that, --overwrite deletes the run
    run(MINIMAL, folder, "--overwrite --max_steps 1")
    assert saved_steps(folder) == {1}


def test_interrupted_copy_of_a_run_folder_resumes_with_warnings(run, uninterrupted, eight_steps, folder):
    """The log is cut within a line, args.yaml too, run_id is empty, and a directory has a checkpoint's name."""
    shutil.copytree(eight_steps, folder)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines = [line for line in lines if json.loads(line)["step"] <= 6]
    (folder / "metrics.jsonl").write_bytes(b"".join(lines)[:-20])
    (folder / "args.yaml").write_text("seed: [")
    (folder / "run_id").write_text("")
    (folder / "step_00000500.pt").mkdir()
    text = run(MINIMAL, folder, "--resume_from auto")
    assert text.count("metrics.jsonl: cut short; ") == 1
    assert text.count("step_00000500.pt: cannot be read") == 1
    expected = read_log(uninterrupted(MINIMAL))
    assert read_log(folder) == expected[: len(lines) - 1] + [line for line in expected if line["step"] > 8]
    # the run has its id again and is still protected from being overwritten
    assert (folder / "run_id").read_text()
    assert "--resume_from auto or --overwrite" in error_lines(run(MINIMAL, folder, code=2))[0]


def test_run_resumes_after_a_full_disk(run, resume_exactly, uninterrupted, eight_steps, folder):
    """A log line or figure that does not fit is lost with a warning; a checkpoint that does not fit ends the run."""
    shutil.copytree(eight_steps, folder)

    def resume_on_full_disk(largest: int, **options) -> str:
        """Resume where no file may grow beyond `largest` bytes."""
        limit = (resource.RLIMIT_FSIZE, (largest, largest))
        return run(MINIMAL, folder, "--resume_from auto", preexec_fn=lambda: resource.setrlimit(*limit), **options)

    text = resume_on_full_disk((folder / "metrics.jsonl").stat().st_size + 100, code=1)
    (line,) = error_lines(text)
    assert "checkpoint not written" in line
    assert not list(folder.glob(".*.tmp"))
    # steps 9 to 12 and the evaluation after step 9; the next save reports the error of the one at step 9
    assert text.count(f"warning: {folder}: log not written (File too large)\n") == 5
    assert "Traceback" not in text
    resume_exactly(MINIMAL, folder)
    text = resume_on_full_disk((folder / "figures/curves.png").stat().st_size - 1)
    assert text.count(f"warning: {folder}: figure not written ([Errno 27] File too large") == 1
    assert_same(folder, uninterrupted(MINIMAL))


# --- failures on one rank ---------------------------------------------------------------------------------------------


def test_ten_bad_steps_in_a_row_end_the_run(run, folder, tmp_path):
    """Even if a good step follows before the next log line. Nine are skipped on all ranks, and the run continues."""
    (line,) = error_lines(run(MINIMAL, folder, "--log_every 10", 2, code=1, fault="nan@3-19@1"))
    assert "10 steps in a row" in line
    run(MINIMAL, tmp_path / "nine", "--num_epochs 2", 2, fault="nan@3-11@1")
    assert skipped_steps(tmp_path / "nine") == [*range(3, 12)]


def test_rank_with_other_weights_is_named(run, folder):
    """A weight of rank 1 changes at step 5, so the checkpoint of step 6 is not written."""
    text = run(MINIMAL, folder, "", 3, code=1, fault="drift@5@1")
    assert "rank 1 holds other weights than rank 0" in error_lines(text)[0]
    assert saved_steps(folder) == {3}


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("die@7@1", 137, "error: rank 1 was ended by SIGKILL (by the system, if its memory was full)"),
        # the stack of a crash in C, which hits all ranks at once like a bad kernel
        ("segv@7@all", 139, "with_fault.py"),
        ("oom@3@1", 1, "error: rank 1: out of memory; lower --image_size"),
    ],
)
def test_cause_of_a_crash_is_printed(run, folder, fault, code, cause):
    assert cause in run(MINIMAL, folder, "", 2, code=code, fault=fault)


def test_profile_traces_the_steps_of_its_window(run, folder):
    """Also if the run ends inside the window or resumes inside it."""

    def traced_steps() -> int:
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        return sum(event.get("name", "").startswith("Optimizer.step#") for event in events)

    run(MINIMAL, folder, "--max_steps 5 --profile 3:100", 2)
    assert traced_steps() == 3
    run(MINIMAL, folder, "--max_steps 9 --profile 4:7 --resume_from auto")
    assert traced_steps() == 2


HANGS = ["hang", *(pytest.param(fault, marks=pytest.mark.soak) for fault in ("hang_inside", "stop", "slow_loader"))]


@pytest.mark.parametrize("fault", HANGS)
def test_hanging_rank_is_named_with_its_step_and_stack(start, folder, fault):
    """One of the two ranks that wait prints its name. A stopped process cannot write its stack.

    At the end the test kills rank 1, because torchrun would give it 30 s to exit.
    """
    process = start(MINIMAL, folder, "--dist_timeout 8", 3, fault=f"{fault}@7@1")
    wait_for(folder, "error: ")
    # the others exit by themselves
    time.sleep(1)
    for rank in psutil.Process(process.pid).children():
        rank.kill()
    assert process.wait(timeout=20) == 1
    (line,) = error_lines(output_of(folder))
    assert line.startswith("error: rank 1 (step 7) hangs or was killed, the others waited in vain")
    assert fault == "stop" or "with_fault.py" in (folder / "hang_rank1.txt").read_text()


def test_auto_batch_fits_the_rank_with_the_least_memory(run, uninterrupted, folder, tmp_path):
    """16 samples do not fit on one of two ranks, so both take 4, also when resumed where 16 would fit.

    Neither that nor measured --gpu_shares change the bits.
    """
    large = replace(MINIMAL, flags=MINIMAL.flags.replace("--batch_size 4", "--batch_size 16"))
    text = run(large, folder, "--auto_batch --max_steps 5", 2, fault="small@7@1")
    assert "memory: 16 samples at once do not fit, 4 do" in text
    run(large, folder, "--gpu_shares auto --resume_from auto", 2)
    assert read_log(folder) == read_log(uninterrupted(MINIMAL))
    text = run(MINIMAL, tmp_path / "other", "--auto_batch", fault="small@0@all", code=1)
    assert error_lines(text) == ["error: out of memory at one sample per GPU; lower --image_size"]


# --- refused starts, --eval_only and unreadable data ------------------------------------------------------------------


def test_refused_start_leaves_the_run_unchanged(run, uninterrupted, eight_steps):
    """Without --resume_from or --overwrite, with another global batch size, or from another run's checkpoint."""
    folder = uninterrupted(MINIMAL)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    refused = {
        "": f"{folder}: holds metrics.jsonl already; --resume_from auto or --overwrite",
        "--resume_from auto --effective_batch_size 24": "--effective_batch_size 24: this run has 23",
        f"--resume_from {eight_steps}": f"{folder}: holds another run",
    }
    for flags, reason in refused.items():
        assert error_lines(run(MINIMAL, folder, flags, code=2))[0].startswith(f"error: {reason}")
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_eval_only_leaves_the_run_unchanged(run, uninterrupted, folder, tmp_path):
    """It takes the model's flags from the checkpoint, and repeats the metrics of the summary."""
    shutil.copytree(uninterrupted(MINIMAL), folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    text = run(MINIMAL, folder, "--eval_only --image_size 24", 2)
    assert "--image_size: 16, as in the checkpoint" in text
    assert {path: path.read_bytes() for path in before} == before
    run(MINIMAL, tmp_path / "elsewhere", f"--eval_only --resume_from {folder}/best.pt")
    summary, again = (json.loads((folder / name).read_text()) for name in ("summary.json", "eval_val.json"))
    assert again == {name: summary[name] for name in again}
    assert len(again) == 2


def test_unreadable_image_of_an_evaluation_is_one_line_for_all_ranks(run, folder, tmp_path):
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "photos" / place).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (20, 16)).save(tmp_path / "photos" / place / f"{number}.png")
    bad = tmp_path / "photos/val/b/3.png"
    bad.write_bytes(bad.read_bytes()[:50])
    text = run(MINIMAL, folder, f"--data_root {tmp_path}/photos", 2, code=2)
    (line,) = error_lines(text)
    assert line.startswith(f"error: {bad}: cannot be read")
    assert "Traceback" not in text
