"""What the tests share: a tiny data set, and ways to run the real scripts."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRS_MED = str(ROOT / "train_prs_med.py")
SAMPLE_DATA = str(ROOT / "tools/sample_data.py")
sys.path.insert(0, str(ROOT))
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}
# torchrun, deepspeed and accelerate are those beside this python
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)


def pytest_configure(config):
    config.addinivalue_line("markers", "soak: long sweeps, run by `make soak`")


LONGEST_FILES = (
    "test_contract",
    "test_fake_gpu",
    "test_compressed_ad",
)


def pytest_collection_modifyitems(items):
    """The longest files come first, so that neither of two processes is left with one of them at the end."""
    items.sort(key=lambda item: item.path.stem not in LONGEST_FILES)


def make_sample_data(zygote, tmp_path_factory, task: str, sizes: str) -> Path:
    """The folder of a task's sample data, of these sizes."""
    folder = tmp_path_factory.mktemp("data") / task
    done = zygote(SAMPLE_DATA, task, folder, sizes.split())
    assert done.code == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def prs_med_data(zygote, tmp_path_factory) -> Path:
    """A few rows of 48 x 48 pixels, with tiny checkpoints, for the launchers; tests/ has the tests of PRS-Med."""
    sizes = "--num_train 9 --num_val 3 --num_test 3 --image_size 48"
    return make_sample_data(zygote, tmp_path_factory, "prs_med", sizes)


@pytest.fixture(scope="session")
def darkroom_data(zygote, tmp_path_factory) -> Path:
    """Learning histories of Darkroom: 3 streams of 200 steps for each goal."""
    return make_sample_data(zygote, tmp_path_factory, "compressed_ad", "--streams 3 --steps 200")


@pytest.fixture(scope="session")
def compressed_ad_flags(darkroom_data):
    """flags(run_folder, *more) of a small run of train.py that logs every step.

    It has 8 steps of 12 segments with contexts of 20 transitions and up to 3 compressions, and an evaluation after 4
    and after 8.
    """
    flags = "--tf_n_embd 16 --tf_n_layer 2 --tf_n_head 2 --encoder_n_layer 1 --tf_dim_feedforward 32".split()
    flags += "--n_transit 20 --train_batch_size 12 --train_timesteps 8 --lr 1e-2 --num_warmup_steps 2".split()
    flags += "--log_every 1 --eval_interval 4 --val_episodes 2 --eval_episodes 3".split()
    flags += "--eval_seeds 2 --test_batch_size 16".split()
    flags += ["--data", str(darkroom_data)]

    def make(run_folder: Path, *more, latents: int = 4) -> list[str]:
        model = ["--n_latent", str(latents)] if latents else ["--model", "ad"]
        return [*flags, *model, "--output_dir", str(run_folder), *map(str, more)]

    return make


def words_of(argv) -> list[str]:
    """The words of a command line, in which a list stands for its items."""
    words = []
    for part in argv:
        words += [str(word) for word in part] if isinstance(part, list | tuple) else [str(part)]
    return words


@pytest.fixture(scope="session")
def zygote():
    """run(script, flags ...) -> code, stdout, stderr and seconds of a script; see zygote.py.

    A list among the flags stands for its items. Further arguments are those of a request, and the environment's.
    """
    command = [sys.executable, str(ROOT / "tests/old/zygote.py")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    # deepspeed has a word to say first
    assert any("ready" in line for line in server.stdout)

    def run(
        *argv,
        address_space: int = 0,
        ranks: int = 1,
        figures: bool = False,
        interrupt: dict | None = None,
        **environment,
    ):
        # one line of JSON each way
        request = {
            "argv": words_of(argv),
            "cwd": str(ROOT),
            "address_space": address_space,
            "ranks": ranks,
            "figures": figures,
            "interrupt": interrupt,
            "environment": environment,
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return SimpleNamespace(**json.loads(server.stdout.readline()))

    yield run
    server.stdin.close()
    server.wait(timeout=10)


def torchrun(processes: int, *more: str) -> list[str]:
    """The start of a command line that runs a script in so many processes; plain python for one."""
    if processes == 1:
        return [sys.executable]
    return ["torchrun", "--standalone", f"--nproc_per_node={processes}", *more]


def at_step(out: Path, step: int, who: str, number: int = signal.SIGKILL, delay: float = 0.0) -> dict:
    """For zygote(..., interrupt=): a signal so many seconds after a checkpoint of this step.

    who: "worker", the last rank, or "all".
    """
    return {"out": str(out), "step": step, "who": who, "number": int(number), "delay": delay}


def kill_then_stop(zygote, command: list, out: Path, kill_at: int, stop_at: int) -> None:
    """Two processes, of which one is killed; resumed, both are told to stop by SIGTERM, and save."""
    assert zygote(command, ranks=2, interrupt=at_step(out, kill_at, "worker")).code != 0
    stopped = zygote(command, ranks=2, interrupt=at_step(out, stop_at, "all", signal.SIGTERM))
    assert "signal: saved at step" in stopped.stdout
    assert stopped.code == 143


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def tree(folder: Path) -> dict[str, str]:
    """{relative path: content hash} of every file but lock files."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            hashes[str(path.relative_to(folder))] = hashlib.md5(path.read_bytes()).hexdigest()
    return hashes
