"""distributed_utils.py, mostly with real processes: collectives, exact sums, clean exits, launchers, schedules."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distributed_utils as du
from utils.cli import InputError

ROOT = Path(__file__).resolve().parents[1]
# beginning of the programs below
HEAD = """
import copy, hashlib, multiprocessing, os, signal, time, torch
import distributed_utils as du
from torch import nn
from utils.cli import InputError, run_main

def main(args):
    with du.setup_distributed(timeout=60) as ranks:
        work(ranks)

def show(*values):
    du.print_main("result", *values)
"""


@pytest.fixture
def launch(tmp_path):
    """launch(processes, code): run a program in which `code` defines work(ranks); return show()'s lines and stderr."""

    def start(processes: int, code: str, returns: int = 0) -> tuple[list[str], str]:
        path = tmp_path / "program.py"
        path.write_text(HEAD + code + "\nrun_main(main, None)\n")
        launcher = [str(ROOT / "utils/torchrun.py"), "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *launcher * (processes > 1), str(path)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
        assert ended.returncode == returns, ended.stderr
        return re.findall("^result (.*)", ended.stdout, re.M), ended.stderr

    return start


def test_collectives_on_five_ranks(launch):
    """The reduction tree of five ranks is not full. A background sum runs beside messages of more than one part."""
    shown, errors = launch(
        5,
        """
def work(ranks):
    waits = du.begin_sum([1, ranks.rank])
    parts = du.gather_objects("x" * 700 * ranks.rank)
    show(waits(), [len(part) for part in parts])
    show(du.reduce_sum([ranks.rank, 0.5]).tolist())
    show(du.reduce_max([ranks.rank, -ranks.rank]))
    show(du.gather_objects(ranks.rank), du.gather_to_main(ranks.rank))
    show(du.broadcast_object({"rank": ranks.rank}))
    shared = du.share_bytes(50)
    shared[10 * ranks.rank : 10 * ranks.rank + 10] = ranks.rank + 1
    du.gather_objects(None)
    show(shared.tolist())
    du.check_same_weights({"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.bfloat16)})
    try:
        du.check_same_weights({"a": torch.ones(3), "b": torch.full((2,), 1e-30 * (ranks.rank == 2))})
    except du.RunError as error:
        show(error)
    with du.agree_on_errors():
        if ranks.rank == 1:
            raise InputError("only rank 1 met this")
""",
        returns=2,
    )
    assert shown[:2] == ["[5, 10] [0, 700, 1400, 2100, 2800]", "[10.0, 2.5]"]
    assert shown[2:5] == ["[4, 0]", "[0, 1, 2, 3, 4] [0, 1, 2, 3, 4]", "{'rank': 0}"]
    assert shown[5] == str([1] * 10 + [2] * 10 + [3] * 10 + [4] * 10 + [5] * 10)
    assert shown[6].startswith("rank 2 holds other weights than rank 0 (b)")
    assert errors.splitlines()[-1] == "error: only rank 1 met this"


def test_error_of_rank_0_is_printed_even_if_other_ranks_exit_first(launch):
    code = """
def main(args):
    try:
        with du.setup_distributed(timeout=60) as ranks:
            raise InputError("no such folder")
    finally:
        time.sleep(2 * (ranks.rank == 0))
"""
    assert launch(2, code, returns=2)[1] == "error: no such folder\n"


EXACT = """
from argparse import Namespace
from utils.engine import ExactEngine

def work(ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 36, 50), nn.Tanh(), nn.Linear(50, 1))
    model[4].bias.requires_grad_(False)
    double = copy.deepcopy(model).double()
    ExactEngine.bucket_bytes = 4096
    flags = Namespace(grad_clip=0, compile=False)
    exact = ExactEngine(model, torch.optim.SGD(model.parameters(), fused=True), "no", flags, torch.device("cpu"))
    for step in range(2):
        model.zero_grad()
        images = torch.randn(7, 4, 3, 8, 8)
        own = range(7 * ranks.rank // ranks.world_size, 7 * (ranks.rank + 1) // ranks.world_size)
        for number in own:
            with exact.around_micro_batch(last=number == own[-1]):
                exact.backward(model(images[number]).sum(), torch.tensor(10.0 ** (number - 5)))
        unrounded = (exact.flat * 2.0**40 % 1).any()
        exact.finish_sum()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    show(hashlib.sha256(b"".join(g.numpy().tobytes() for g in gradients)).hexdigest())
    # compare with a model in float64
    sum(double(images[number].double()).sum() * 10.0 ** (number - 5) for number in range(7)).backward()
    pairs = zip(gradients, (p.grad for p in double.parameters() if p.requires_grad))
    show(max(((a - b).norm() / b.norm()).item() for a, b in pairs) < 3e-6 and not unrounded)
"""


def test_exact_gradient_sum_does_not_depend_on_the_number_of_processes(launch):
    """The seven micro-batches' gradients differ by a factor of a million, and one of eight ranks has none of them."""
    one, eight = (launch(processes, EXACT)[0] for processes in (1, 8))
    assert one == eight
    assert one[1] == "True"


def test_worker_that_ignores_sigterm_does_not_outlive_the_run(launch):
    """At exit, Python sends SIGTERM to daemon processes and waits for them."""
    begun = time.monotonic()
    launch(
        1,
        """
def worker():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)

def work(ranks):
    multiprocessing.Process(target=worker, daemon=True).start()
    time.sleep(1)
""",
    )
    assert time.monotonic() - begun < 60


def test_successful_run_writes_nothing_to_stderr(tmp_path):
    """DDP on two ranks with DataLoader workers, and a user's own loop that keeps its loader alive until exit."""
    loop = """
import torch
from distributed_utils import create_distributed_dataloader
loader = create_distributed_dataloader(torch.utils.data.TensorDataset(torch.zeros(20)), 4, num_workers=2)
for batch in loader: pass
"""
    words = ["examples/minimal.py", "--output_dir", tmp_path / "run", "--max_steps", "2", "--num_workers", "1"]
    for command in (["-c", loop], ["utils/torchrun.py", "--standalone", "--nproc_per_node=2", *words]):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(("nodes", "first"), [("n07,m[08-09]", "n07"), ("rack[1-2]n[07-09,12]-ib,x", "rack1n07-ib")])
def test_srun_tasks_meet_on_the_first_node(monkeypatch, nodes, first):
    """The port is computed from the numbers of the job and the step."""
    environment = {"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": nodes}
    environment |= {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    monkeypatch.setattr(os, "environ", environment)
    assert du.read_environment() == (5, 1, 8, "srun")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == (first, "25474")


def test_python_in_a_batch_script_is_one_process(monkeypatch):
    monkeypatch.setattr(os, "environ", {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"})
    assert du.read_environment() == (0, 0, 1, "python")


def test_rank_that_cannot_join_prints_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}
        code = "import distributed_utils as du\nwith du.setup_distributed(2): pass"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.match(rf"error: rank 0 on \S+ cannot join the others at 127.0.0.1:{port}; .*address already in use", line)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(InputError, match="3 processes on a machine with 2 GPUs"), du.setup_distributed():
        pass


def test_learning_rate_schedule_and_scaling():
    """Linear warm-up, then a cosine to 0 or a constant; guide 0's scaling by the batch size."""
    assert [du.schedule(step, 10, 4, "constant") for step in (0, 1, 3, 4, 9)] == [0.25, 0.5, 1, 1, 1]
    assert [du.schedule(step, 10, 4, "cosine") for step in (3, 4, 7, 10)] == pytest.approx([1, 1, 0.5, 0])
    assert [du.scale_learning_rate(2.0, 4, rule) for rule in ("linear", "sqrt", "none")] == [8, 4, 2]


def test_rank_that_crashed_is_not_named_as_hanging(capsys):
    """It has printed its own error."""
    store = dist.HashStore()
    waiting, crashed = (du.Ranks(rank, 2, torch.device("cpu"), "torchrun", store) for rank in range(2))
    for rank in range(2):
        store.set(f"place of {rank}", "step 7")
    du.name_silent_ranks(crashed, ValueError("a mistake"), wait=0)
    du.name_silent_ranks(waiting, RuntimeError("gloo: timed out"), wait=0)
    assert capsys.readouterr().err == ""
