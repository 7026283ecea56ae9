"""The project's promise, held by starting the scripts as a user does: with python, and with torchrun on 2 to 5 ranks.

The number of processes changes how long a run takes, never what it computes; a run killed anywhere resumes as if
nothing had happened. Under --deterministic both hold to the bit, so nothing here has a tolerance. A script is added by
one entry in SCRIPTS; `examples/minimal.py` stands for what the foundation does, the others for what each can break.
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
from pathlib import Path

import psutil
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Script:
    """A script and flags for some short steps with dropout, an uneven last one, several micro-batches a rank."""

    path: str
    flags: str
    steps_before_kill: int
    data: tuple[str, ...] = ()
    data_flag: str = "--data_root {0}"
    prepare: str = ""

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
    # fewer validation batches than processes
    data=("prs_med", "--num_train", "9", "--num_val", "1", "--num_test", "3", "--image_size", "48"),
)
SURVIVAL = Script(
    "train_survival_distributed.py",
    "--effective_batch_size 9 --batch_size 2 --num_epochs 3 --resnet resnet10 --base_channels 8 --image_size 16 14 10 "
    "--clinical_columns Age Sex --freeze_epochs 1 --lr 3e-3 --hu_window -200 600 --eval_years 1 3 --cache_dir= "
    "--use_smart_cache --cache_rate 0.6 --replace_rate 0.4",
    steps_before_kill=3,
    data=("survival", "--num_patients", "40", "--matrix", "16"),
    data_flag="--csv_path {0}/dataset.csv",
)
MIMIC_CXR = Script(
    "train_mimic_cxr.py",
    "--effective_batch_size 23 --batch_size 4 --num_epochs 2 --dropout 0.1 --augmentation --use_ddp --lr 1e-3 "
    "--warmup_steps 2 --max_samples 170",
    steps_before_kill=5,
    data=("mimic_cxr", "--num_train", "40", "--num_val", "6", "--num_test", "10"),
    data_flag="--data_path {0}/prepared --image_encoder {0}/convnext_tiny --text_encoder {0}/bert_tiny",
    prepare="{0}/mimic-cxr-jpg {0}/mimic-ext-cxr-qba {0}/prepared --image_size 32 --workers 1",
)
CASCADE = Script(
    "train_accelerate.py",
    "--img_size 32 --encoder_dim 16 --ddim_steps 2 --num_samples 2 --ema_decay 0.9 --lr 2e-3 --split_seed 0 "
    '--stage_configs {"volume_size":[8,8,8],"voxel_dim":16,"vit_depth":1,"num_heads":2,"token_grid":4,"batch_size":2,'
    '"effective_batch_size":5,"num_epochs":2} {"volume_size":[16,16,16],"voxel_dim":16,"vit_depth":1,"num_heads":2,'
    '"token_grid":4,"batch_size":1,"effective_batch_size":3,"num_epochs":1}',
    steps_before_kill=7,
    data=("cascade", "--num_patients", "14", "--matrix", "16"),
    data_flag="--dataset_path {0} --cache_dir {0}_cache",
)
COMPRESSED_AD = Script(
    "train.py",
    "--effective_batch_size 7 --batch_size 2 --tf_n_embd 16 --tf_n_layer 1 --tf_n_head 2 --tf_dim_feedforward 16 "
    "--encoder_n_layer 1 --n_transit 16 --n_latent 4 --train_timesteps 20 --num_warmup_steps 2 --lr 3e-3 "
    "--eval_interval 9 --val_episodes 3 --eval_episodes 4 --eval_seeds 2 --from_start 0.5 --shift 2 --objective search",
    steps_before_kill=6,
    data=("compressed_ad", "--env", "darkroom:3", "--streams", "2", "--steps", "96"),
    data_flag="--data {0}",
)
SCRIPTS = [MINIMAL, PRS_MED, SURVIVAL, MIMIC_CXR, CASCADE, COMPRESSED_AD]
# torchrun, deepspeed and accelerate are those beside this python
PATH = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix}
# a number of these is another at each run
TIMES = ("samples_per_s", "data_wait", "peak_memory_gb", "seconds")


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    """The sample data of a script's task, made once."""
    made = {}

    def make(script: Script) -> str:
        if not script.data:
            return ""
        if script.data not in made:
            folder = made[script.data] = tmp_path_factory.mktemp("data") / script.data[0]
            commands = [["sample_data", script.data[0], str(folder), *script.data[1:]]]
            if script.prepare:
                commands.append(["prepare_data", script.data[0], *script.prepare.format(folder).split()])
            for tool, *words in commands:
                command = [sys.executable, "-m", f"tools.{tool}", *words]
                subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return script.data_flag.format(made[script.data])

    return make


@pytest.fixture(scope="module")
def start(data_root):
    """start(script, folder, flags, processes, fault): a run begun; its output goes to <folder>.txt."""

    def begin(
        script, folder, flags="", processes=1, fault="", exact=True, env=None, launcher="", **options
    ) -> subprocess.Popen:
        command = [sys.executable]
        if launcher:
            command = shlex.split(launcher)
        elif processes > 1:
            command += [str(ROOT / "utils/torchrun.py"), "--standalone", f"--nproc_per_node={processes}"]
        if fault:
            command += [str(ROOT / "tests/with_fault.py"), fault]
        words = f"--num_workers 0 --log_every 1 --save_every 3 --dist_timeout 60 {'--deterministic' * exact}"
        words += f" {script.flags} {data_root(script)} {flags}"
        command += [str(ROOT / script.path), "--output_dir", str(folder), *words.split()]
        with open(f"{folder}.txt", "w") as output:
            return subprocess.Popen(
                command, cwd=ROOT, env=os.environ | PATH | (env or {}), stdout=output, stderr=output,
                start_new_session=True, **options,
            )  # fmt: skip

    return begin


@pytest.fixture(scope="module")
def run(start):
    """run(script, folder, ...): a run from start to end; returns its output."""

    def wait(script, folder, *args, code=0, **options) -> str:
        ended = start(script, folder, *args, **options).wait(timeout=300)
        text = Path(f"{folder}.txt").read_text()
        assert ended == code, text
        return text

    return wait


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """The run folder of a script on one process, uninterrupted."""
    made = {}

    def make(script: Script) -> Path:
        if script not in made:
            made[script] = tmp_path_factory.mktemp("whole") / str(script)
            run(script, made[script])
        return made[script]

    return make


def read_log(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl, without what is measured by the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith(TIMES)} for line in lines]


def assert_same(folder: Path, other: Path) -> None:
    """Every logged number and every weight is the same to the bit, and so is what the run ends with."""
    assert read_log(folder) == read_log(other)
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    ends = [json.loads((path / "summary.json").read_text()).items() for path in (folder, other)]
    one, two = ({name: value for name, value in end if not name.endswith((*TIMES, "world_size"))} for end in ends)
    assert one == two


def assert_tensorboard_has_the_log(folder: Path) -> None:
    """Each line of the log once, whatever was killed and made again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown, lines = EventAccumulator(str(folder / "logs"), {"scalars": 0}).Reload(), read_log(folder)
    for name in ("train/loss", next(name for line in lines for name in line if name.startswith("val/"))):
        expected = [line for line in lines if line.get(name) is not None]
        assert [event.step for event in shown.Scalars(name)] == [line["step"] for line in expected]
        assert [event.value for event in shown.Scalars(name)] == pytest.approx([line[name] for line in expected])


def wait_for_steps(folder: Path, steps: int) -> None:
    """Until the run that was started last has made so many steps."""
    output, deadline = Path(f"{folder}.txt"), time.monotonic() + 120
    while output.read_text().count("| loss ") < steps:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL to a launcher and all its ranks, which torchrun puts into sessions of their own."""
    parent = psutil.Process(process.pid)
    for victim in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait()


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# --- any number of processes, killed anywhere: every script -----------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_three_processes_are_one(script, run, whole, tmp_path):
    """Dropout, augmentation, an uneven last step, unequal numbers of micro-batches: the same bits, scores included.

    And where it is killed in what follows the last step, the final test.
    """
    folder = tmp_path / "run"
    run(script, folder, "", 3)
    assert_same(folder, whole(script))
    (folder / "summary.json").unlink()
    run(script, folder, "--resume_from auto")
    assert_same(folder, whole(script))


KILLED = [*((script, script.steps_before_kill) for script in SCRIPTS), (SURVIVAL, 7)]


@pytest.mark.parametrize(("script", "steps"), KILLED, ids=str)
def test_killed_anywhere_and_resumed_on_others(script, steps, start, run, whole, tmp_path):
    """2 processes killed, 1 stopped by SIGTERM, its newest checkpoint damaged, 2 to the end: as if nothing happened.

    No batch flag is needed on the way: the step belongs to the run. After 7 steps survival is in an inner fold.
    """
    folder = tmp_path / "run"
    process = start(script, folder, "--save_every 1", 2, fault="slow")
    wait_for_steps(folder, steps)
    kill_all(process)

    later = replace(script, flags=re.sub(r"--(effective_)?batch_size \d+ ", "", script.flags))
    resume = "--resume_from auto --save_every 1"
    process = start(later, folder, resume, fault="slow")
    wait_for_steps(folder, 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143, Path(f"{folder}.txt").read_text()
    assert "signal: saved at step" in Path(f"{folder}.txt").read_text()

    newest = max(folder.glob("step_*.pt"))
    flip_byte(newest)
    text = run(later, folder, resume, 2)
    assert f"{newest.name}: its bytes are not those that were written; passed over" in text
    assert_same(folder, whole(script))
    assert_tensorboard_has_the_log(folder)


@pytest.mark.parametrize("script", [MINIMAL, CASCADE], ids=str)
def test_nan_on_one_rank(script, run, tmp_path):
    """All ranks skip the step together (their weights are compared at each save); the run goes on."""
    run(script, tmp_path / "run", "", 2, fault="nan@2@1")
    lines = [line for line in read_log(tmp_path / "run") if "train/loss" in line]
    assert [line["step"] for line in lines if line["train/skipped"]] == [2]
    assert lines[-1]["train/loss"] is not None


@pytest.mark.parametrize(("script", "processes"), [*((script, 1) for script in SCRIPTS), (MINIMAL, 2)], ids=str)
def test_bad_flag(script, run, tmp_path, processes):
    text = run(script, tmp_path / "run", "--batch_size 0", processes, code=2)
    assert text.splitlines() == [
        "error: argument --batch_size/--train_batch_size: must be a whole number of at least 1, not '0'; see --help"
    ]
    assert not (tmp_path / "run").exists()


# --- every launcher ---------------------------------------------------------------------------------------------------

# how each starts two processes of a script, at a port of their own; srun is in test_slurm.py
LAUNCHERS = {
    "deepspeed": "deepspeed --num_gpus=2 --master_port PORT",
    "module": "python -m torch.distributed.launch --nproc_per_node=2 --master_port=PORT",
    "accelerate": "accelerate launch --multi_gpu --num_processes=2 --main_process_port PORT",
    "two nodes": 'bash -c \'for rank in 0 1; do NODE_RANK=$rank ./launch_distributed_training.sh --script "$@" '
    "--num_gpus 1 & done; wait' nodes",
}
VARIABLES = {
    "two nodes": {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "PORT"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_the_same_run(launcher, run, whole, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {name: value.replace("PORT", port) for name, value in VARIABLES.get(launcher, {}).items()}
    text = run(MINIMAL, tmp_path / "run", launcher=LAUNCHERS[launcher].replace("PORT", port), env=variables)
    assert "2 by " in text
    assert_same(tmp_path / "run", whole(MINIMAL))


def test_accelerate_launch_word_for_word(run, whole, tmp_path):
    """Guide 4's first command: two processes by its config."""
    text = run(COMPRESSED_AD, tmp_path / "run", launcher="accelerate launch --config_file accelerate_config.yaml")
    assert "Distributed training: MULTI_CPU\nNumber of processes: 2\nMixed precision: no\n" in text
    assert_same(tmp_path / "run", whole(COMPRESSED_AD))


def test_a_killed_process_begins_again(start, whole, tmp_path):
    """By torchrun's own elasticity: both start again from the newest checkpoint, and the run is the same."""
    launcher = f"python {ROOT}/utils/torchrun.py --nnodes=1:1 --nproc_per_node=2 --max_restarts=1 --rdzv_backend=c10d"
    # without it the processes may look for those of the start before
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = start(MINIMAL, tmp_path / "run", "--resume_from auto", fault="slow", launcher=launcher, env=env)
    wait_for_steps(tmp_path / "run", 5)
    next(child for child in psutil.Process(process.pid).children() if "minimal.py" in " ".join(child.cmdline())).kill()
    assert process.wait(timeout=120) == 0, Path(f"{tmp_path}/run.txt").read_text()
    assert_same(tmp_path / "run", whole(MINIMAL))


# --- DeepSpeed: the same to rounding ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(run, tmp_path_factory):
    """MIMIC-CXR on one process by torch, without --deterministic: the log of all its steps."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    run(MIMIC_CXR, folder, exact=False)
    return read_log(folder)


@pytest.fixture
def zero_flags(tmp_path):
    """zero_flags(stage): flags of a run by DeepSpeed, with the optimizer on the CPU in stage 3."""

    def make(stage: int) -> str:
        # or the small weights of a test would never be gathered
        gathers = {"offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
        zero = {"stage": stage} | (gathers if stage == 3 else {})
        path = tmp_path / f"zero{stage}.json"
        path.write_text(json.dumps({"zero_optimization": zero}))
        return f"--use_deepspeed --deepspeed_config {path}"

    return make


DEEPSPEED = replace(MIMIC_CXR, flags=MIMIC_CXR.flags.replace("--use_ddp ", ""))


def assert_close(folder: Path, other: list[dict]) -> None:
    """Every logged number is the same to 1e-6, or to 2e-6 of 1 where it is small."""
    lines = read_log(folder)
    assert [line.keys() for line in lines] == [line.keys() for line in other]
    for one, two in zip(lines, other, strict=True):
        for name in one:
            assert one[name] == pytest.approx(two[name], rel=1e-6, abs=2e-6), (one["step"], name)


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "processes"), [(1, 2), (2, 3), (3, 2)])
def test_deepspeed_changes_nothing(run, plain, zero_flags, tmp_path, stage, processes):
    """At 3 processes the last leaves are spare passes."""
    run(DEEPSPEED, tmp_path / "run", zero_flags(stage), processes, exact=False)
    assert_close(tmp_path / "run", plain)
    assert f"DeepSpeed ZeRO-{stage}" in (tmp_path / "run.txt").read_text()


def test_any_engine_resumes_any_other(start, run, plain, zero_flags, tmp_path):
    """DDP on 2, killed; ZeRO-3 on 3; ZeRO-2 on 1; torch on 1: as if nothing had happened."""
    folder = tmp_path / "run"
    process = start(MIMIC_CXR, folder, "--save_every 1", 2, fault="slow", exact=False)
    wait_for_steps(folder, 4)
    kill_all(process)
    resumed = replace(DEEPSPEED, flags=re.sub(r"--(effective_)?batch_size \d+ ", "", DEEPSPEED.flags))
    run(resumed, folder, f"{zero_flags(3)} --resume_from auto --max_steps 8", 3, exact=False)
    run(resumed, folder, f"{zero_flags(2)} --resume_from auto --max_steps 11", exact=False)
    run(resumed, folder, "--resume_from auto", exact=False)
    assert_close(folder, plain)


def test_deepspeed_killed_and_resumed_is_the_same_to_the_bit(start, run, plain, zero_flags, tmp_path):
    """And the same as torch on one process to rounding."""
    run(DEEPSPEED, tmp_path / "whole", zero_flags(2), 2, exact=False)
    assert_close(tmp_path / "whole", plain)
    assert "DeepSpeed ZeRO-2" in (tmp_path / "whole.txt").read_text()
    folder = tmp_path / "run"
    process = start(DEEPSPEED, folder, f"{zero_flags(2)} --save_every 1", 2, fault="slow", exact=False)
    wait_for_steps(folder, 6)
    kill_all(process)
    run(DEEPSPEED, folder, f"{zero_flags(2)} --resume_from auto", 2, exact=False)
    assert_same(folder, tmp_path / "whole")


def test_deepspeed_skips_a_step_on_all_ranks(run, zero_flags, tmp_path):
    run(DEEPSPEED, tmp_path / "run", zero_flags(2), 2, fault="nan@2@1", exact=False)
    lines = [line for line in read_log(tmp_path / "run") if "train/loss" in line]
    assert [line["step"] for line in lines if line["train/skipped"]] == [2]
    assert lines[-1]["train/loss"] is not None


# --- the foundation, by the smallest script ---------------------------------------------------------------------------


@pytest.mark.parametrize(("shares", "processes"), [("7,3,2", 3), ("auto", 2)])
def test_shares_change_nothing(run, whole, tmp_path, shares, processes):
    run(MINIMAL, tmp_path / "run", f"--gpu_shares {shares}", processes)
    assert_same(tmp_path / "run", whole(MINIMAL))


def test_without_the_flag(start, run, tmp_path):
    """DDP adds in an order of its own: the same up to rounding, dropout included, and killed and resumed to the bit."""
    run(MINIMAL, tmp_path / "one", exact=False)
    run(MINIMAL, tmp_path / "three", "", 3, exact=False)
    one, three = read_log(tmp_path / "one"), read_log(tmp_path / "three")
    assert [line.keys() for line in one] == [line.keys() for line in three]
    for a, b in zip(one, three, strict=True):
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=2e-6, abs=2e-6), (a["step"], name)
    folder = tmp_path / "run"
    process = start(MINIMAL, folder, "--save_every 1", 3, fault="slow", exact=False)
    wait_for_steps(folder, 9)
    kill_all(process)
    run(MINIMAL, folder, "--resume_from auto", 3, exact=False)
    assert_same(folder, tmp_path / "three")


@pytest.mark.parametrize(
    ("exact", "killed_on", "processes"),
    [(True, 1, 2), (False, 2, 2), pytest.param(False, 1, 1, marks=pytest.mark.soak)],
)
def test_fp16(start, run, whole, tmp_path, exact, killed_on, processes):
    """Gradients are those of fp32 but for rounding. A skipped step halves the loss scale, also for what is resumed."""
    import torch

    folder, options = tmp_path / "run", {"fault": "fp16@4@0", "exact": exact}
    run(MINIMAL, tmp_path / "whole", "", processes, **options)
    lines = [line for line in read_log(tmp_path / "whole") if "train/loss" in line]
    assert [line["step"] for line in lines if line["train/skipped"]] == [4]
    for line, fp32 in zip(lines[:3], read_log(whole(MINIMAL)), strict=False):
        assert line["train/grad_norm"] == pytest.approx(fp32["train/grad_norm"], rel=0.02)
        assert line["train/grad_norm"] != pytest.approx(fp32["train/grad_norm"], rel=1e-6)

    process = start(MINIMAL, folder, "--save_every 1", killed_on, **options)
    wait_for_steps(folder, 6)
    kill_all(process)
    run(MINIMAL, folder, "--resume_from auto", processes, **options)
    assert_same(folder, tmp_path / "whole")
    ends = [torch.load(path / "step_00000036.pt")["scaler"] for path in (folder, tmp_path / "whole")]
    assert ends[0] == ends[1]
    assert (ends[0]["scale"], ends[0]["_growth_tracker"]) == (2.0**13, 32)


@pytest.mark.soak
@pytest.mark.parametrize("script", SCRIPTS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_hundred_steps(script, run, tmp_path, seed):
    """1, 2, 3 and 5 processes, shares 2:1 and 7:3:2, and 3 -> 1 -> 2 by resume: the same bits after 100 steps."""
    length = "--train_timesteps 100" if script == COMPRESSED_AD else "--num_epochs 99"
    flags = f"{length} --max_steps 100 --save_every 50 --seed {seed}"
    run(script, tmp_path / "whole", flags)
    ways = [(2, ""), (3, ""), (5, ""), (2, "--gpu_shares 2,1"), (3, "--gpu_shares 7,3,2")]
    for number, (processes, shares) in enumerate(ways):
        run(script, tmp_path / str(number), f"{flags} {shares}", processes)
        assert_same(tmp_path / str(number), tmp_path / "whole")
    for processes, last in ((3, 33), (1, 66), (2, 100)):
        run(script, tmp_path / "resumed", f"{flags} --max_steps {last} --resume_from auto", processes)
    assert_same(tmp_path / "resumed", tmp_path / "whole")


@pytest.mark.soak
@pytest.mark.parametrize("chain", range(20))
def test_a_hundred_kills(start, run, whole, tmp_path, chain):
    """Real runs of all scripts on 1 to 3 processes, each killed 5 times: at the start, in steps, evaluations, saves."""
    script, folder, chance = SCRIPTS[chain % len(SCRIPTS)], tmp_path / "run", random.Random(chain)
    for kill in range(5):
        process = start(script, folder, "--resume_from auto --save_every 1", 1 + (chain + kill) % 3, fault="slow")
        time.sleep(chance.uniform(0, 15) if kill == 0 else chance.uniform(6, 25))
        kill_all(process)
    run(script, folder, "--resume_from auto")
    assert_same(folder, whole(script))


@pytest.fixture(scope="module")
def evaluated(run, tmp_path_factory):
    """The smallest script's run with evaluations in mid-epoch."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    run(MINIMAL, folder, "--eval_every_steps 6")
    return folder


def test_killed_in_an_evaluation(run, evaluated, tmp_path):
    """The evaluation of an epoch's end is made again, and logged once."""
    folder = tmp_path / "run"
    run(MINIMAL, folder, "--eval_every_steps 6", 2, code=137, fault="kill_eval1@9@1")
    run(MINIMAL, folder, "--resume_from auto --eval_every_steps 6", 2)
    assert_same(folder, evaluated)


def test_loader_workers(run, evaluated, tmp_path):
    """Workers live as long as the run; an evaluation in mid-epoch does not make them begin the epoch anew."""
    run(MINIMAL, tmp_path / "run", "--eval_every_steps 6 --num_workers 2")
    assert_same(tmp_path / "run", evaluated)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param("kill_eval2@6@0", -9, marks=pytest.mark.soak, id="between stages"),
        pytest.param("int_eval3@10@0", 130, id="Ctrl-C in sampling"),
    ],
)
def test_cascade_ended_in_what_only_it_has(run, whole, tmp_path, fault, code):
    """While a stage's start is measured on the stages before; while the samples of the test are drawn: at once."""
    folder = tmp_path / "run"
    text = run(CASCADE, folder, "", 1, code=code, fault=fault)
    assert ("signal: the final test is broken off" in text) == (code == 130)
    run(CASCADE, folder, "--resume_from auto", 2)
    assert_same(folder, whole(CASCADE))


def test_ctrl_c(start, run, whole, tmp_path):
    """Ctrl-C to the launcher of 2 ranks, nothing saved before: saved, exit code 130, resumed."""
    folder = tmp_path / "run"
    process = start(MINIMAL, folder, "--save_every 0", 2, fault="slow")
    wait_for_steps(folder, 5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    run(MINIMAL, folder, "--resume_from auto", 2)
    assert_same(folder, whole(MINIMAL))


def test_pause_by_max_steps(run, tmp_path):
    """What --max_steps alone brings, an evaluation in the middle of an epoch, is not in the log of the resumed run."""
    run(MINIMAL, tmp_path / "run", "--max_steps 5 --log_every 2")
    run(MINIMAL, tmp_path / "run", "--resume_from auto --log_every 2")
    run(MINIMAL, tmp_path / "whole", "--log_every 2")
    assert_same(tmp_path / "run", tmp_path / "whole")


def saved_steps(folder: Path) -> set[int]:
    return {int(path.stem[5:]) for path in folder.glob("step_*.pt")}


@pytest.mark.parametrize(("every", "evaluated", "expected"), [(3, 4, {3, 4, 6, 8}), (0, 1, {*range(1, 9)})])
def test_save_every(run, tmp_path, every, evaluated, expected):
    """And after each evaluation, of those that are not the best, too."""
    flags = f"--save_every {every} --eval_every_steps {evaluated} --max_steps 8 --keep_last 99 --lr 0.03"
    run(MINIMAL, tmp_path / "run", flags, exact=False)
    assert saved_steps(tmp_path / "run") == expected
    scores = [line["val/accuracy"] for line in read_log(tmp_path / "run") if "val/accuracy" in line]
    assert every or scores != sorted(scores)


def test_without_save_every_a_checkpoint_a_minute(tmp_path):
    """After evaluations, of which each epoch of 203 steps has one, and after 500 steps, 61 s after the one before."""
    words = (
        f"tests/with_fault.py minutes {MINIMAL.path} --output_dir {tmp_path}/run --effective_batch_size 1 --batch_size "
        "1 --image_size 8 --eval_every_steps 490 --max_steps 502 --keep_last 99 --num_workers 0 --dist_timeout 6000"
    )
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True)
    assert saved_steps(tmp_path / "run") == {203, 406, 490, 500, 502}


def test_without_save_every_only_the_best_and_the_end_are_saved_in_the_first_minute(tmp_path):
    folder = tmp_path / "run"
    words = f"{MINIMAL.path} --output_dir {folder} {MINIMAL.flags} --eval_every_steps 1 --num_workers 0 --keep_last 99"
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True)
    best, kept = 0.0, set()
    lines = [line for line in read_log(folder) if "val/accuracy" in line]
    for line in lines:
        if line["val/accuracy"] >= best or line is lines[-1]:
            kept.add(line["step"])
        best = max(best, line["val/accuracy"])
    assert len(kept) < len(lines)
    assert saved_steps(folder) == kept


def test_best_is_resumed(run, whole, tmp_path):
    """Back to best.pt, stopped before the next checkpoint: the run is still there, and ends as it did."""
    folder = tmp_path / "run"
    shutil.copytree(whole(MINIMAL), folder)
    run(MINIMAL, folder, f"--resume_from {folder}/best.pt --max_steps 1")
    run(MINIMAL, folder, "--resume_from auto")
    assert_same(folder, whole(MINIMAL))


def test_power_cut(run, whole, tmp_path):
    """What was not flushed is gone or zeros: the log behind the newest checkpoint, and that checkpoint's own end."""
    folder = tmp_path / "run"
    run(MINIMAL, folder, "--max_steps 8")
    # flushed with the checkpoint of step 6, which the log of step 7 follows
    newest = max(folder.glob("step_*.pt"))
    newest.write_bytes(newest.read_bytes()[:-1000] + bytes(1000))
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    counted = b"".join(line for line in lines if json.loads(line)["step"] <= 6)
    (folder / "metrics.jsonl").write_bytes(counted + bytes(40))
    run(MINIMAL, folder, "--resume_from auto")
    assert_same(folder, whole(MINIMAL))


def test_a_copy_that_broke_off(run, whole, tmp_path):
    """The log ends within a line, run_id is empty, a folder has a checkpoint's name: the run goes on, and says so."""
    folder = tmp_path / "run"
    run(MINIMAL, folder, "--max_steps 8")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines = [line for line in lines if json.loads(line)["step"] <= 6]
    (folder / "metrics.jsonl").write_bytes(b"".join(lines)[:-20])
    (folder / "run_id").write_text("")
    (folder / "step_00000500.pt").mkdir()
    text = run(MINIMAL, folder, "--resume_from auto")
    assert text.count("metrics.jsonl: cut short; ") == 1
    assert text.count("step_00000500.pt: cannot be read") == 1
    expected = read_log(whole(MINIMAL))
    assert read_log(folder) == expected[: len(lines) - 1] + [line for line in expected if line["step"] > 8]
    assert (folder / "model.safetensors").read_bytes() == (whole(MINIMAL) / "model.safetensors").read_bytes()
    # it has its name again, and is still a run that nothing is written over unasked
    assert (folder / "run_id").read_text()
    assert "--resume_from auto or --overwrite" in error_lines(run(MINIMAL, folder, code=2))[0]


def test_full_disk(run, whole, tmp_path):
    """Lines of the log are lost with a warning, a checkpoint ends the run with one line, and the one before is intact.

    The run resumes once there is room. A figure of its results is left out with a warning.
    """
    folder = tmp_path / "run"

    def resume(largest: int, **options) -> str:
        """With a disk on which no file may have more bytes."""
        limit = (resource.RLIMIT_FSIZE, (largest, largest))
        return run(MINIMAL, folder, "--resume_from auto", preexec_fn=lambda: resource.setrlimit(*limit), **options)

    run(MINIMAL, folder, "--max_steps 9")
    text = resume((folder / "metrics.jsonl").stat().st_size + 100, code=1)
    assert len(error_lines(text)) == 1
    assert "checkpoint not written" in error_lines(text)[0]
    assert text.count(f"warning: {folder}: log not written (File too large)\n") == text.count("| loss ") >= 3
    assert "Traceback" not in text
    run(MINIMAL, folder, "--resume_from auto")
    assert_same(folder, whole(MINIMAL))
    text = resume((folder / "figures/curves.png").stat().st_size - 1)
    assert text.count(f"warning: {folder}: figure not written ([Errno 27] File too large") == 1
    assert_same(folder, whole(MINIMAL))


# --- what goes wrong on one rank --------------------------------------------------------------------------------------


def test_too_many_bad_steps(run, tmp_path):
    """17 in a row are too many, though a good step follows before the next log line; 9 are not."""
    text = run(MINIMAL, tmp_path / "run", "--log_every 10", 2, code=1, fault="nan@3-19@1")
    assert len(error_lines(text)) == 1
    assert "10 steps in a row" in error_lines(text)[0]
    run(MINIMAL, tmp_path / "fewer", "--log_every 10 --num_epochs 2", 2, fault="nan@3-11@1")


def test_drift_is_named(run, tmp_path):
    text = run(MINIMAL, tmp_path / "run", "", 3, code=1, fault="drift@5@1")
    assert "rank 1 holds other weights than rank 0" in error_lines(text)[0]
    assert [path.name for path in (tmp_path / "run").glob("step_*.pt")] == ["step_00000003.pt"]


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("die@7@1", 137, "error: rank 1 was ended by SIGKILL (by the system, if its memory was full)"),
        # on all ranks at once, as the same bad kernel does it
        ("segv@7@all", 139, "with_fault.py"),
    ],
)
def test_crash(run, tmp_path, fault, code, said):
    """A killed rank is named; a crash in C leaves its stack."""
    assert said in run(MINIMAL, tmp_path / "run", "", 2, code=code, fault=fault)


def test_one_process_may_take_its_time(run, whole, tmp_path):
    """A batch longer than --dist_timeout in one process, for which nobody waits, ends nothing."""
    run(MINIMAL, tmp_path / "run", "--dist_timeout 1 --num_epochs 1 --num_workers 1", fault="slow")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_trace_of_the_steps_that_were_made(run, tmp_path, processes):
    """Where the run ends within --profile's window, or begins within it; one line says why there is none."""
    folder = tmp_path / "run"
    flags = "--max_steps {} --profile {} --resume_from auto"

    def steps() -> int:
        """How often the optimizer has updated the weights."""
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        return sum(event.get("name", "").startswith("Optimizer.step#") for event in events)

    run(MINIMAL, folder, flags.format(5, "3:100"), processes)
    assert steps() == 3
    run(MINIMAL, folder, flags.format(9, "4:7"), processes)
    assert steps() == 2
    (folder / "trace.json").unlink()
    text = run(MINIMAL, folder, flags.format(10, "3:9"), processes)
    assert "warning: --profile 3:9: no trace, as this start makes steps 10 to 10\n" in text
    assert not (folder / "trace.json").exists()


def test_hang_is_named(start, tmp_path):
    """The rank, its last step and its stack are told. The test then kills it, which spares the grace of torchrun."""
    process = start(MINIMAL, tmp_path / "run", "--dist_timeout 8", 2, fault="hang@7@1")
    output, deadline = Path(f"{tmp_path}/run.txt"), time.monotonic() + 100
    while not (told := error_lines(output.read_text())):
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)
    assert told[0].startswith("error: rank 1 (step 7) hangs or was killed, the others waited in vain")
    assert "with_fault.py" in (tmp_path / "run/hang_rank1.txt").read_text()
    # rank 0 has gone by itself
    time.sleep(1)
    for rank in psutil.Process(process.pid).children():
        rank.kill()
    assert process.wait(timeout=20) == 1


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["hang", "hang_inside", "stop", "loop", "slow_loader"])
def test_hang_ends_the_job(start, tmp_path, fault):
    """Within the timeout and torchrun's grace; the rank, its last step and its stack are told."""
    begun = time.monotonic()
    process = start(MINIMAL, tmp_path / "run", "--dist_timeout 10", 2, fault=f"{fault}@7@1")
    assert process.wait(timeout=120) == 1
    assert time.monotonic() - begun < 10 + 40 + 10
    text = Path(f"{tmp_path}/run.txt").read_text()
    assert any("rank 1 (step 7) hangs or was killed" in line for line in error_lines(text)), text
    stack = tmp_path / "run/hang_rank1.txt"
    assert fault == "stop" or "with_fault.py" in stack.read_text()


# --- the user's mistakes, and strangers -------------------------------------------------------------------------------


def test_two_runs_in_one_folder(start, run, tmp_path):
    folder = tmp_path / "run"
    first = start(MINIMAL, folder, "--num_epochs 400", fault="slow")
    wait_for_steps(folder, 2)
    shutil.move(f"{folder}.txt", f"{folder}.first.txt")
    text = run(MINIMAL, folder, code=2)
    assert error_lines(text) == [f"error: {folder}: another run is writing here; stop it or choose another folder"]
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 143


def test_a_run_is_kept(run, whole):
    """Without --resume_from or --overwrite, and from another batch."""
    folder = whole(MINIMAL)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("*.pt"))
    assert "--resume_from auto or --overwrite" in error_lines(run(MINIMAL, folder, code=2))[0]
    text = run(MINIMAL, folder, "--resume_from auto --effective_batch_size 24", code=2)
    assert error_lines(text)[0].startswith("error: --effective_batch_size 24: this run has 23")
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("*.pt"))


def test_another_run_is_not_replaced(run, whole, tmp_path):
    """A checkpoint of another run begins a new one, but not over a run without being told to."""
    folder = tmp_path / "run"
    run(MINIMAL, folder, "--seed 1 --max_steps 3")
    best = whole(MINIMAL) / "best.pt"
    before = (folder / "metrics.jsonl").read_bytes()
    text = run(MINIMAL, folder, f"--resume_from {best}", code=2)
    assert error_lines(text)[0].startswith(f"error: {folder}: holds another run")
    assert (folder / "metrics.jsonl").read_bytes() == before
    run(MINIMAL, folder, f"--resume_from {best} --overwrite --max_steps 1")
    assert (folder / "metrics.jsonl").read_bytes() != before


def test_eval_only_changes_nothing(run, whole, tmp_path):
    """The model's flags come from the checkpoint, and the run's files stay as they are."""
    folder = tmp_path / "run"
    shutil.copytree(whole(MINIMAL), folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    text = run(MINIMAL, folder, "--eval_only --image_size 24", 2)
    assert "--image_size: 16, as in the checkpoint" in text
    assert {path: path.read_bytes() for path in before} == before
    run(MINIMAL, tmp_path / "elsewhere", f"--eval_only --resume_from {folder}/best.pt")
    summary, again = (json.loads((folder / name).read_text()) for name in ("summary.json", "eval_val.json"))
    assert again == {name: summary[name] for name in again}
    assert len(again) == 2


def test_metrics_may_be_numpys(run, whole, tmp_path):
    run(MINIMAL, tmp_path / "run", "--max_steps 20", fault="numpy@0")
    run(MINIMAL, tmp_path / "run", "--resume_from auto")
    assert_same(tmp_path / "run", whole(MINIMAL))


def test_a_leaf_is_fitted_to_the_smallest_memory(run, whole, tmp_path):
    """16 samples at once do not fit one of two ranks: both take 4, and go on with them where all would fit."""
    folder, large = tmp_path / "run", replace(MINIMAL, flags=MINIMAL.flags.replace("--batch_size 4", "--batch_size 16"))
    text = run(large, folder, "--auto_batch --max_steps 5", 2, fault="small@7@1")
    assert "memory: 16 samples at once do not fit, 4 do" in text
    run(large, folder, "--auto_batch --resume_from auto", 2)
    assert read_log(folder) == read_log(whole(MINIMAL))
    assert (folder / "model.safetensors").read_bytes() == (whole(MINIMAL) / "model.safetensors").read_bytes()
    text = run(MINIMAL, tmp_path / "other", "--auto_batch", fault="small@0@all", code=1)
    assert error_lines(text) == ["error: out of memory at one sample per GPU; lower --image_size"]


def test_out_of_memory_is_one_line(run, tmp_path):
    """Also where it is the last rank alone."""
    text = run(MINIMAL, tmp_path / "run", "", 2, fault="oom@3@1", code=1)
    (line,) = [line for line in error_lines(text) if "out of memory" in line]
    assert "lower --image_size" in line


def test_steps_of_several_processes_are_repeated(run, tmp_path):
    """By tools.verify, at the number of processes and with the shares that they had."""
    run(MINIMAL, tmp_path / "run", "--gpu_shares 2,1 --max_steps 6", 2)
    command = [sys.executable, "-m", "tools.verify", tmp_path / "run", "--steps", "1:4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_unusable_image(run, tmp_path):
    """Of an evaluation: all ranks end with the same line, which names the file."""
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "photos" / place).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (20, 16), (40 * number, 9, 9)).save(tmp_path / "photos" / place / f"{number}.png")
    bad = tmp_path / "photos/val/b/3.png"
    bad.write_bytes(bad.read_bytes()[:50])
    text = run(MINIMAL, tmp_path / "run", f"--data_root {tmp_path}/photos", 2, code=2)
    assert error_lines(text)[0].startswith(f"error: {bad}: cannot be read")
    assert len(error_lines(text)) == 1
    assert "Traceback" not in text


class Evil:
    def __reduce__(self):
        return Path.touch, (Path(os.environ["EVIL"]),)


def test_run_folder_of_a_stranger(run, whole, tmp_path, monkeypatch):
    """Pickles, environments and links planted in a run folder: nothing is executed, nothing outside is touched."""
    import torch

    folder, evil, victim = tmp_path / "run", tmp_path / "evil", tmp_path / "victim"
    monkeypatch.setenv("EVIL", str(evil))
    shutil.copytree(whole(MINIMAL), folder)
    (folder / "args.yaml").write_text("environment: {LD_PRELOAD: /x/evil.so}\nscript: /x/evil.py\n")
    (folder / "sitecustomize.py").write_text(f"open({str(evil)!r}, 'w')")
    torch.save({"format": Evil()}, folder / "evil.pt")
    text = run(MINIMAL, folder, f"--resume_from {folder}/evil.pt", code=2)
    assert "damaged" in error_lines(text)[0]
    run(MINIMAL, folder, "--resume_from auto")
    victim.write_text("mine")
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to(victim)
    text = run(MINIMAL, folder, "--resume_from auto --overwrite", code=2)
    assert "a link in a run folder" in error_lines(text)[0]
    assert victim.read_text() == "mine"
    assert not evil.exists()
