"""GPUs that come and go: agents that are killed and come back, and ends that are final."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

# the fixtures of a small run
from test_contract import TASKS, ended_well, train_losses
from test_contract import run_script, run_task, small_run  # noqa: F401

from old.elastic_utils import Agents

ELASTIC = ROOT / "old/elastic_utils.py"
WORKER = ROOT / "tests/old/elastic_worker.py"


class Elastic:
    """An elastic training in the background."""

    def __init__(self, agents: int, words: list, folder: Path, *flags: str):
        command = [sys.executable, ELASTIC, f"--agents={agents}", f"--ranks=1:{agents}", *flags, *words]
        self.log = folder / "log"
        with open(self.log, "a") as log:
            self.launcher = psutil.Popen([str(word) for word in command], cwd=ROOT, stdout=log, stderr=log)

    def __enter__(self) -> "Elastic":
        return self

    def __exit__(self, *_) -> None:
        """Whatever a test has found, no process is left."""
        if self.launcher.poll() is None:
            everyone = [self.launcher, *self.launcher.children(recursive=True)]
            for process in everyone:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def agents(self) -> list[psutil.Process]:
        """The agents that run, in the order of their start."""
        return sorted(self.launcher.children(), key=lambda agent: agent.create_time())

    def lose(self, number: int, how: str = "with its worker") -> None:
        """Kill an agent and its worker, as when a machine is switched off; or it "alone"; or "its worker alone"."""
        agent = self.agents()[number]
        struck = [] if how == "alone" else agent.children(recursive=True)
        if how != "its worker alone":
            struck.append(agent)
        for process in struck:
            process.kill()

    def wait_until(self, happened, seconds: float = 120) -> None:
        """Wait for a condition; fails with the log where it does not come, or the training ends before."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.launcher.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def end(self, seconds: float = 120) -> int:
        """The exit code of the launcher, which has left no process behind."""
        everyone = self.launcher.children(recursive=True)
        code = self.launcher.wait(timeout=seconds)
        _, alive = psutil.wait_procs(everyone, timeout=10)
        assert not alive, alive
        return code


def steps_in(folder: Path) -> list[tuple[int, int, int]]:
    """(step, world size, sum over the ranks) of each step that was made, repeated ones included."""
    path = folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(int(word) for word in line.split()[:3]) for line in lines if len(line.split()) == 4]


def changes(sizes: list[int]) -> list[int]:
    """The first number of ranks, and each that differs from the one before it."""
    return [size for before, size in zip([0, *sizes], sizes, strict=False) if size != before]


def test_three_then_two_then_three(tmp_path):
    """A rank is lost with its agent: two go on from the newest checkpoint; it joins again, and nothing is redone."""
    with Elastic(3, [WORKER, tmp_path, "300"], tmp_path, "--rejoin=8") as training:
        training.wait_until(lambda: len(steps_in(tmp_path)) >= 15)
        training.lose(2)
        training.wait_until(lambda: steps_in(tmp_path)[-1][1] == 2)
        training.wait_until(lambda: steps_in(tmp_path)[-1][1] == 3)
        assert training.end() == 0, training.log.read_text()

    # every step was made, by three, by two and by three again
    steps = steps_in(tmp_path)
    assert {step for step, _, _ in steps} == set(range(1, 301))
    assert changes([size for _, size, _ in steps]) == [3, 2, 3]
    assert all(total == size * (size - 1) // 2 for _, size, total in steps)

    # at most the steps since the last save were made twice, and none when the rank came back
    assert len(steps) - 300 <= 10
    assert "ended by signal 9; the others go on, it joins again in 8 s" in training.log.read_text()


# Flags that make the small runs long enough for what follows.
LONG = {
    "compressed_ad": ["--train_timesteps", "300", "--eval_interval", "300"],
}
SAVE_EVERY = 5


def world_sizes(log: str) -> list[int]:
    """The number of ranks of each start, as the banners tell it."""
    return [int(size) for size in re.findall(r"launcher .* world size (\d+)", log)]


# What a round does to its three agents before all are called back: which is struck, and how.
ROUNDS = {
    "the last, then the first": [("with its worker", 2), ("with its worker", 0)],
    "the first, then the first": [("with its worker", 0), ("with its worker", 0)],
    "agents alone": [("alone", 1), ("alone", 0)],
    "a worker, then agents": [("its worker alone", 1), ("with its worker", 1), ("with its worker", 1)],
}


@pytest.fixture(scope="module")
def undisturbed(small_run, run_task, tmp_path_factory):  # noqa: F811
    """undisturbed(task) -> flags of a long run, and its losses by three ranks that nothing happens to; made once."""
    made = {}

    def make(task: str) -> tuple[list, dict[int, float]]:
        if task not in made:
            flags = ["--effective_batch_size", "6", "--batch_size", "2"]
            flags += ["--save_every", SAVE_EVERY, *LONG[task], "--log_every", "1"]
            # Adam makes steps of gradients that are rounding alone
            flags += ["--lr" if task == "compressed_ad" else "--learning_rate", "1e-5"]
            run_folder = tmp_path_factory.mktemp("undisturbed") / task
            ended_well(run_task(task, run_folder, flags, ranks=3))
            made[task] = flags, dict(train_losses(run_folder))
        return made[task]

    return make


@pytest.mark.soak
@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("task", TASKS)
def test_three_two_one_three_over_the_scripts(task, name, small_run, undisturbed, tmp_path):  # noqa: F811
    """By kill -9 and by joining: few steps are made again, and the losses are those of the undisturbed run."""
    flags, expected = undisturbed(task)
    run_folder = tmp_path / "run"
    training = Elastic(3, small_run(task, run_folder, flags), tmp_path, "--rejoin=10000")
    same_size = None

    def trained() -> int:
        path = run_folder / "metrics.jsonl"
        found = re.findall(r'"step": (\d+).*"train/loss"', path.read_text()) if path.exists() else []
        return int(found[-1]) if found else 0

    def starts() -> list[int]:
        return [int(step) for step in re.findall(r"start +step (\d+)", training.log.read_text())]

    def strike(how: str, number: int) -> None:
        """Kill an agent, its worker, or both; then wait for two steps that are new."""
        begun = len(starts())
        training.lose(number, how)
        reached, struck = trained(), time.monotonic()

        # at most the steps since the last save are made twice
        training.wait_until(lambda: len(starts()) > begun)
        assert reached - SAVE_EVERY <= starts()[begun]
        training.wait_until(lambda: trained() > reached + 1)
        ranks = world_sizes(training.log.read_text())[-1]
        print(f"{task}: {ranks} ranks train {time.monotonic() - struck:.1f} s after {how} {number} at step {reached}")

    with training:
        training.wait_until(lambda: trained() >= 8)
        for how, number in ROUNDS[name]:
            strike(how, number)
            if how != "its worker alone" and same_size is None:
                # the first step that fewer ranks may have made
                same_size = starts()[-1]
        training.launcher.send_signal(signal.SIGUSR2)
        training.wait_until(lambda: world_sizes(training.log.read_text())[-1] == 3)
        assert training.end() == 0, training.log.read_text()

    # the ranks became fewer and came back
    sizes = changes(world_sizes(training.log.read_text()))
    assert [size for size in sizes if size != 2] == [3, 1, 3]

    # equal to the bit as long as there were three, and then within 1e-5
    found = dict(train_losses(run_folder))
    assert sorted(found) == sorted(expected)
    first = range(1, same_size + 1)
    assert [found[step] for step in first] == [expected[step] for step in first]
    assert list(found.values()) == pytest.approx([expected[step] for step in found], rel=1e-5)


def test_an_input_error_ends_all_at_once(tmp_path):
    with Elastic(2, [WORKER, tmp_path, "0"], tmp_path) as training:
        assert training.end() == 2
    assert training.log.read_text() == "error: nothing to do; give a last step\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "the batch must not change with the GPUs; give --effective_batch_size N"),
        (["--effective_batch_size", "8", "--overwrite"], "would delete the run at each restart"),
        (["--effective_batch_size", "8", "--resume_from", "run/last.pt"], "with --ranks only auto"),
    ],
)
def test_flags_of_a_script(zygote, tmp_path, flags, message):
    command = [ROOT / "train.py", "--output_dir", tmp_path / "run", *flags]
    done = zygote(*command, ELASTIC_RANKS="1:2")
    assert done.code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_too_few_agents_wait(capsys):
    agents = Agents([], [], rejoin=30, tries=3, least=2)
    agents.running = {0: None}
    agents.lose(1, -9)
    line = "elastic: process 1 ended by signal 9; fewer than 2 are left and wait, it joins again in 30 s\n"
    assert capsys.readouterr().err == line


def test_more_processes_than_the_range(tmp_path):
    command = [sys.executable, ELASTIC, "--agents=4", "--ranks=1:2", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: --ranks: 1:2 with 4 processes on this machine; raise MAX\n"
