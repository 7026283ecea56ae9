"""distributed_utils.py by real processes: what ranks tell each other, exact sums, a clean end; launchers, schedules."""

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
# what the programs below begin with
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
    """launch(processes, code): what rank 0 shows of a program whose work(ranks) is this code, and its errors."""

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


def test_what_ranks_tell_each_other(launch):
    """Five of them: a tree that is not full. A sum may go on beside other messages, some of more than one part."""
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


def test_the_first_process_says_why_though_others_leave_before_it(launch):
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
        for leaf in own:
            with exact.around_micro_batch(last=leaf == own[-1]):
                exact.backward(model(images[leaf]).sum(), torch.tensor(10.0 ** (leaf - 5)))
        off_grid = (exact.flat * 2.0**40 % 1).any()
        exact.finish_sum()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    show(hashlib.sha256(b"".join(g.numpy().tobytes() for g in gradients)).hexdigest())
    # against float64 throughout
    sum(double(images[leaf].double()).sum() * 10.0 ** (leaf - 5) for leaf in range(7)).backward()
    pairs = zip(gradients, (p.grad for p in double.parameters() if p.requires_grad))
    show(max(((a - b).norm() / b.norm()).item() for a, b in pairs) < 3e-6 and not off_grid)
"""


def test_exact_sum_is_the_same_at_any_number_of_processes(launch):
    """Also where a rank has no leaf, of micro-batches that differ by a factor of a million, and it is their sum."""
    one, eight = (launch(processes, EXACT)[0] for processes in (1, 8))
    assert one == eight
    assert one[1] == "True"


def test_on_grid_adds_without_rounding():
    # partial sums stay far below 2**13
    values = du.round_for_exact_sum(torch.randn(10_000) * 10.0 ** torch.randint(-6, 2, (10_000,)))
    assert len({values[torch.randperm(10_000)].cumsum(0)[-1].item() for _ in range(20)}) == 1
    assert du.round_for_exact_sum(torch.tensor([float("nan"), float("inf"), 0.1])).tolist()[1] == float("inf")
    assert abs(du.round_for_exact_sum(torch.tensor(0.1)).item() - torch.tensor(0.1).item()) < 2.0**-40


def test_a_loading_process_that_ignores_sigterm_does_not_outlive_the_run(launch):
    """At its exit Python sends SIGTERM to daemons and waits for them."""
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


def test_a_clean_run_writes_no_errors(tmp_path):
    """DDP on two ranks with loading processes; a loop of one's own that keeps its loader to the end."""
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


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 0, 1, "python")),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}, (3, 1, 4, "torchrun")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 0, 2, "deepspeed or torch.distributed")),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, (0, 0, 1, "python")),
        ({"SLURM_STEP_NODELIST": "n[07-09,12]", "SLURM_STEP_ID": "2"}, (5, 1, 8, "srun")),
        *(({"SLURM_STEP_NODELIST": nodes}, (5, 1, 8, "srun")) for nodes in ("n07,n08", "n07", "n07,m[08-09]")),
        ({"SLURM_STEP_NODELIST": "rack[1-2]n[07-09]-ib,x"}, (5, 1, 8, "srun")),
    ],
)
def test_launchers(monkeypatch, variables, expected):
    """srun's tasks meet on the first node of the step, at a port that follows from the numbers of job and step."""
    for name in [*os.environ, "MASTER_ADDR", "MASTER_PORT"]:
        if re.match("RANK|WORLD_SIZE|LOCAL_RANK|TORCHELASTIC|SLURM|MASTER", name):
            # set first, so that what the call sets is undone as well
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
    if "SLURM_STEP_NODELIST" in variables:
        tasks = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}
        variables = variables | tasks
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert du.read_environment() == expected
    if expected[3] == "srun":
        address = "rack1n07-ib" if "rack" in variables["SLURM_STEP_NODELIST"] else "n07"
        port = "25474" if "SLURM_STEP_ID" in variables else "23456"
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (address, port)


def test_a_rank_that_cannot_join_says_so():
    """One line from each such rank, whatever its number: the others may wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        variables = place | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        code = "import distributed_utils as du\nwith du.setup_distributed(2): pass"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.match(rf"error: rank 0 on \S+ cannot join the others at {':'.join(place.values())}; ", line)
    assert "address already in use" in line


def test_what_a_launcher_may_not_ask_for(monkeypatch):
    """A rank that is no number; more processes than GPUs."""
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="RANK must be a whole number, not 'x'"):
        du.read_environment()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="3 processes on a machine with 2 GPUs"), du.setup_distributed():
        pass


def test_schedule():
    """Linear warm-up, then a cosine to 0 or a constant; the guide's scaling of the rate."""
    assert [du.schedule(step, 10, 4, "constant") for step in (0, 1, 3, 4, 9)] == [0.25, 0.5, 1, 1, 1]
    assert [round(du.schedule(step, 10, 4, "cosine"), 4) for step in (3, 4, 7, 10)] == [1, 1, 0.5, 0]
    assert [du.scale_learning_rate(2.0, 4, rule) for rule in ("linear", "sqrt", "none")] == [8, 4, 2]


@pytest.mark.parametrize("crashed", [True, False])
def test_silent_ranks_are_named_once(crashed, capsys):
    """By the first of the ranks that gave up waiting; a rank that crashed has said why itself."""
    store = dist.HashStore()
    ranks = [du.Ranks(rank, 3, torch.device("cpu"), "torchrun", store) for rank in range(3)]
    store.set("place of 2", "step 7")
    store.set("rank 1 has ended", "")
    if crashed:
        du.name_silent_ranks(ranks[2], ValueError("a mistake"), wait=0)
    told = []
    for rank in ranks[:2]:
        du.name_silent_ranks(rank, RuntimeError("gloo: timed out"), wait=0)
        told.append(capsys.readouterr().err)
    line = "error: rank 2 (step 7) hangs or was killed, the others waited in vain; "
    assert told == ["" if crashed else f"{line}stacks: hang_rank*.txt in the run folder\n", ""]
