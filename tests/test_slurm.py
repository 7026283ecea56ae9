"""configs/slurm/train.sbatch under a real SLURM of two nodes on this machine.

Each node has its own network, host name and slurmd. All processes share a PID namespace, which ends with the tests.
Needs root and Debian's slurm-wlm, munge and iproute2, which .ci/run installs.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_promise import MINIMAL, PATH, ROOT, assert_same, error_lines

NEEDED = "slurmctld slurmd munged sbatch setpriv unshare nsenter ip".split()
pytestmark = pytest.mark.skipif(
    os.name == "nt" or os.geteuid() != 0 or not all(map(shutil.which, NEEDED)),
    reason=f"needs root and {', '.join(NEEDED)}",
)

CONF = """
ClusterName=tests
SlurmctldHost=head(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
GresTypes=gpu
NodeName=n1 NodeAddr=10.77.0.1 CPUs=16 RealMemory=8000 Gres=gpu:8
NodeName=n2 NodeAddr=10.77.0.2 CPUs=16 RealMemory=8000 Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES
"""
# starts a node; it waits for its network device
NODE = """
set -e
node=$1
hostname n$node
mount --bind hosts_n$node /etc/hosts
echo $$ >node$node
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip link set lo up
ip address add 10.77.0.$node/24 dev eth0
ip link set eth0 up
# only node 1 has IPv6
echo $((node - 1)) >/proc/sys/net/ipv6/conf/all/disable_ipv6
exec slurmd -D -N n$node
"""
HEAD = """
set -e
mount --make-rprivate /
mount --bind /dev/null /etc/resolv.conf
mount --bind hosts_head /etc/hosts
hostname head
ip link set lo up
ip link add switch type bridge
ip address add 10.77.0.254/24 dev switch
ip link set switch up
munged --force --socket=$PWD/munge --key-file=key --pid-file=$PWD/munge.pid --log-file=$PWD/munge.log \
    --seed-file=$PWD/munge.seed
slurmctld
for node in 1 2; do
  unshare --mount --uts --net bash node.sh $node &
  until [ -s node$node ]; do sleep 0.02; done
  ip link add port$node type veth peer name eth0 netns $(cat node$node)
  ip link set port$node master switch up
done
wait
"""
FLAGS = f"--deterministic --num_workers 0 --log_every 1 --save_every 3 --dist_timeout 60 {MINIMAL.flags}"
# examples/minimal.py with slow steps until the job is requeued
SLOW = """
import os, runpy, sys, time
sys.path[:0] = ["{root}", "{root}/examples"]
from utils import loop
print("cores", os.environ["SLURM_CPUS_PER_TASK"], "threads", os.environ["OMP_NUM_THREADS"])
def heartbeat(run, place, real=loop.Run.heartbeat):
    real(run, place)
    time.sleep(0 if os.environ.get("SLURM_RESTART_COUNT") else float(os.environ.get("PAUSE", 0.3)))
loop.Run.heartbeat = heartbeat
runpy.run_path("{root}/examples/minimal.py", run_name="__main__")
"""


class Cluster:
    """SLURM's daemons, and the folder from which jobs are submitted and where <job>.log holds a job's output."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        (folder / "key").write_bytes(os.urandom(64))
        (folder / "key").chmod(0o400)
        (folder / "node.sh").write_text(NODE)
        known = {"head": "10.77.0.254", "n1": "10.77.0.1", "n2": "10.77.0.2"}
        for name in known:
            # as on Debian, a node's own name resolves to 127.0.1.1
            seen = known | ({name: "127.0.1.1"} if name != "head" else {}) | {"localhost": "127.0.0.1"}
            lines = [f"{address} {host}\n" for host, address in seen.items()]
            (folder / f"hosts_{name}").write_text("".join(lines))
        for name in ("state", "n1", "n2", ".venv/bin"):
            (folder / name).mkdir(parents=True)
        for number in range(8):
            (folder / f"gpu{number}").touch()
        (folder / ".venv/bin/activate").write_text(f"PATH={PATH['PATH']}\n")
        (folder / "slow.py").write_text(SLOW.format(root=ROOT))
        self.environment = os.environ | PATH | {"SLURM_CONF": f"{folder}/slurm.conf"}
        # unshare ends with this process and ends all processes in its namespace
        start = "setpriv --pdeathsig KILL unshare --mount --uts --net --pid --fork --kill-child --mount-proc bash -c"
        with open(folder / "daemons.txt", "w") as output:
            self.daemons = subprocess.Popen(
                [*start.split(), HEAD], cwd=folder, env=self.environment, stdout=output, stderr=output
            )
        deadline = time.monotonic() + 60
        while self.run("sinfo --noheader --format=%T", check=False) != "idle\n":
            assert time.monotonic() < deadline, (folder / "daemons.txt").read_text()
            time.sleep(0.1)

    def run(self, command: str, check: bool = True) -> str:
        """Return the output of a command on the head node."""
        first = psutil.Process(self.daemons.pid).children()
        where = ["nsenter", "-t", str(first[0].pid if first else 0), "-m", "-u", "-n", "-p"]
        done = subprocess.run(
            [*where, "--wd=" + str(self.folder), *shlex.split(command)], env=self.environment, capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
        assert not check or not done.returncode, done.stderr
        return done.stdout

    def submit(self, options: str, script: str, flags: str, job: Path = ROOT / "configs/slurm/train.sbatch") -> str:
        """Submit a job with one task on each of two nodes, unless the options differ; return its number."""
        command = f"sbatch --parsable --output=%j.log --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 {options}"
        return self.run(f"{command} {job} {script} {flags}").strip()

    def minimal(self, folder: Path, options: str = "", flags: str = "", slow: bool = False) -> str:
        script = f"{self.folder}/slow.py" if slow else f"{ROOT}/examples/minimal.py"
        return self.submit(options, script, f"{FLAGS} --output_dir {folder} {flags}")

    def about(self, job: str, name: str) -> str:
        """Return a job's JobState, ExitCode, Restarts, ... from scontrol."""
        return re.search(rf"\b{name}=(\S+)", self.run(f"scontrol show job {job}"))[1]

    def log(self, job: str) -> str:
        path = self.folder / f"{job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job: str, text: str) -> None:
        deadline = time.monotonic() + 180
        while text not in self.log(job):
            assert time.monotonic() < deadline, self.log(job)
            time.sleep(0.1)

    def end(self, job: str, state: str) -> str:
        """Wait until a job has ended, check its state and exit code, and return its output."""
        deadline = time.monotonic() + 240
        while (now := self.about(job, "JobState")) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < deadline, self.log(job)
            if self.about(job, "Reason") == "BeginTime":
                # SLURM would delay the requeued job by two minutes. A job that starts in the second of its requeue is
                # killed, because its credential was just revoked.
                time.sleep(2)
                self.run(f"scontrol update jobid={job} starttime=now")
            time.sleep(0.2)
        assert f"{now} {self.about(job, 'ExitCode')}" == state, self.log(job)
        return self.log(job)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    if subprocess.run(["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "true"]).returncode:
        pytest.skip("needs namespaces, which this machine does not allow")
    running = Cluster(folder)
    yield running
    running.daemons.kill()
    running.daemons.wait()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run folder of the same training in one process without SLURM."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    words = f"{ROOT}/examples/minimal.py {FLAGS} --output_dir {folder}".split()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def at_its_limit(cluster, tmp_path_factory):
    """(job, run folder) of a job that exceeds its time limit; started first, because SLURM checks every 30 s."""
    folder = tmp_path_factory.mktemp("limit") / "run"
    return cluster.minimal(folder, "--time=2 --export=ALL,PAUSE=1", slow=True), folder


def test_two_nodes_match_one_process(cluster, alone, tmp_path):
    """Three tasks on two nodes give the same bits, and the log has only the run's own lines."""
    job = cluster.minimal(tmp_path / "run", "--ntasks=3 --ntasks-per-node=2")
    text = cluster.end(job, "COMPLETED 0:0")
    assert_same(tmp_path / "run", alone)
    assert "processes          3 by srun, cpu" in text
    others = [line for line in text.splitlines() if not re.match("  |==|val/|epoch |done;", line)]
    # printed by SLURM 22.05 if the nodes have different numbers of tasks
    assert all("can't honor --ntasks-per-node" in line for line in others), others


@pytest.mark.parametrize(("flag", "state"), [("", "CANCELLED 0:15"), ("--signal=TERM", "FAILED 143:0")])
def test_cancelled_job(cluster, flag, state, tmp_path):
    """The run saves a checkpoint, and the job is not requeued."""
    job = cluster.minimal(tmp_path / "run", "--cpus-per-task=2", slow=True)
    cluster.wait_for(job, "step 2/36")
    cluster.run(f"scancel {flag} {job}")
    text = cluster.end(job, state)
    assert "signal: saved at step" in text
    assert "cores 2 threads 2" in text
    assert ("not requeued: stopped before the time limit was near" in text) == bool(flag)
    assert cluster.about(job, "Restarts") == "0"


def test_killed_task(cluster, alone, tmp_path):
    """The job ends and names the task; submitted again, it resumes."""
    job = cluster.minimal(tmp_path / "run", slow=True)
    cluster.wait_for(job, "step 4/36")
    tasks = [process for process in psutil.process_iter() if str(tmp_path / "run") in process.cmdline()]
    next(process for process in tasks if process.environ().get("SLURM_PROCID") == "1").kill()
    assert "n2: task 1: Killed" in cluster.end(job, "FAILED 137:0")
    cluster.end(cluster.minimal(tmp_path / "run"), "COMPLETED 0:0")
    assert_same(tmp_path / "run", alone)


def test_invalid_input(cluster, tmp_path):
    job = cluster.minimal(tmp_path / "run", flags="--batch_size 0")
    text = cluster.end(job, "FAILED 2:0")
    assert error_lines(text) == [text.splitlines()[0]]
    assert "requeue" not in text
    assert cluster.about(job, "Restarts") == "0"


def test_array_of_two_seeds(cluster, tmp_path):
    """%a in the flags becomes the number of the array's job."""
    first = cluster.minimal(tmp_path / "seed_%a", "--array=0-1 --nodes=1", "--seed %a")
    for seed in (0, 1):
        cluster.end(f"{first}_{seed}", "COMPLETED 0:0")
        assert f"\nseed: {seed}\n" in (tmp_path / f"seed_{seed}" / "args.yaml").read_text()


def test_two_scripts_in_one_job(cluster, alone, tmp_path):
    """Each srun of a job uses another port."""
    job = tmp_path / "both.sbatch"
    begin = "srun --exact --ntasks=2 --gpus-per-node=1 --cpus-per-task=1"
    runs = [f"{begin} python $1 {FLAGS} --output_dir {tmp_path}/{name} &" for name in "ab"]
    job.write_text("\n".join(["#!/bin/bash", "source .venv/bin/activate", *runs, "wait\n"]))
    options = "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2"
    cluster.end(cluster.submit(options, f"{ROOT}/examples/minimal.py", "", job), "COMPLETED 0:0")
    for name in "ab":
        assert_same(tmp_path / name, alone)


def test_time_limit(cluster, alone, at_its_limit):
    """On SIGTERM before the limit, the run saves; the job is requeued, resumes and gives the same bits."""
    job, folder = at_its_limit
    text = cluster.end(job, "COMPLETED 0:0")
    # SLURM may stop the second start too, also before it trains
    assert 1 <= text.count("signal: saved at step") <= int(cluster.about(job, "Restarts"))
    assert_same(folder, alone)
