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

ROOT = Path(__file__).resolve().parent.parent
PRS_MED = str(ROOT / "train_prs_med.py")
SAMPLE_DATA = str(ROOT / "sample_data.py")
sys.path.insert(0, str(ROOT))
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}
os.environ["PATH"] = (
    f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # torchrun, deepspeed, accelerate of this one
)
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

# fp32, no dropout, no scaling with the world size: the settings under which every world size must give the same answer
SAME = [
    "--lr_scaling",
    "none",
    "--lora_dropout",
    "0",
    "--log_every",
    "1",
    "--max_new_tokens",
    "3",
    "--learning_rate",
    "1e-3",
]


def pytest_configure(config):
    config.addinivalue_line("markers", "soak: long sweeps, run by `make soak`")


LONGEST_FILES = (
    "test_cascade",
    "test_contract",
    "test_mimic_cxr_engines",
    "test_fake_gpu",
    "test_survival",
    "test_compressed_ad",
)


def pytest_collection_modifyitems(items):
    """The longest files come first, so that neither of two processes is left with one of them at the end."""
    items.sort(key=lambda item: item.path.stem not in LONGEST_FILES)


def made(done) -> None:
    """Of sample_data.py: the files are there."""
    assert done.code == 0, done.stderr


@pytest.fixture(scope="session")
def prs_med_data(zygote, tmp_path_factory) -> Path:
    """34 training, 10 validation and 10 test rows of 32 x 32 pixels, with tiny checkpoints."""
    out = tmp_path_factory.mktemp("data") / "prs_med"
    sizes = ["--num_train", "17", "--num_val", "5", "--num_test", "5", "--image_size", "32"]
    made(zygote(SAMPLE_DATA, "prs_med", out, *sizes))
    return out


@pytest.fixture(scope="session")
def mimic_cxr_flags(zygote, tmp_path_factory) -> list[str]:
    """Flags of train_mimic_cxr.py for a small MIMIC-CXR (about 700 training questions) with tiny checkpoints."""
    out = tmp_path_factory.mktemp("data") / "mimic_cxr"
    sizes = ["--num_train", "24", "--num_val", "6", "--num_test", "6", "--image_size", "80"]
    made(zygote(SAMPLE_DATA, "mimic_cxr", out, *sizes))
    words = ["--mimic_cxr_path", out / "mimic-cxr-jpg", "--mimic_qa_path", out / "mimic-ext-cxr-qba"]
    words += ["--image_encoder", out / "convnext_tiny", "--text_encoder", out / "bert_tiny", "--image_size", "64"]
    words += ["--index_dir", out / "index", "--no_auto_optimize", "--num_workers", "0"]
    return [str(word) for word in words]


@pytest.fixture(scope="session")
def survival_data(zygote, tmp_path_factory) -> Path:
    """44 patients with a chest CT of 14 x 11 x 5 voxels or so, 17 with an event; 34 train in Fold_1, 10 validate."""
    out = tmp_path_factory.mktemp("data") / "survival"
    sizes = ["--num_patients", "44", "--matrix", "14", "--event_rate", "0.4"]
    made(zygote(SAMPLE_DATA, "survival", out, *sizes))
    return out


# two stages, 8^3 and 16^3, of a net as small as can be; 11 training, 1 validation and 1 test patients of 13
SMALL_STAGES = [
    {"name": "stage1", "volume_size": [8, 8, 8], "voxel_dim": 16, "vit_depth": 1, "num_heads": 2, "token_grid": 4},
    {"name": "stage2", "volume_size": [16, 16, 16], "voxel_dim": 16, "vit_depth": 1, "num_heads": 2, "token_grid": 4},
]


@pytest.fixture(scope="session")
def cascade_data(zygote, tmp_path_factory) -> Path:
    """13 patients with a CT of 16 x 13 x 14 voxels or so and two X-rays each."""
    out = tmp_path_factory.mktemp("data") / "cascade"
    words = ["cascade", str(out), "--num_patients", "13", "--matrix", "16"]
    made(zygote(SAMPLE_DATA, *words))
    return out


@pytest.fixture(scope="session")
def cascade_flags(cascade_data, tmp_path_factory):
    """flags(out, *more): the arguments of a small run of train_accelerate.py that logs every step: 2 stages of 2 epochs
    of 3 steps with batch 4."""
    cache = tmp_path_factory.mktemp("cache")
    words = [
        "--stage_configs",
        json.dumps(SMALL_STAGES),
        "--img_size",
        "32",
        "--encoder_dim",
        "16",
        "--batch_size",
        "4",
    ]
    words += ["--num_timesteps", "20", "--ddim_steps", "2", "--num_epochs_per_stage", "2", "--learning_rate", "1e-3"]
    words += ["--log_every", "1", "--num_workers", "0", "--cache_dir", str(cache), "--dataset_path", str(cascade_data)]

    def make(out: Path, *more) -> list[str]:
        return [*words, "--checkpoint_dir", str(out), *map(str, more)]

    return make


@pytest.fixture(scope="session")
def darkroom_data(zygote, tmp_path_factory) -> Path:
    """Learning histories of Darkroom: 3 streams of 200 steps for each goal."""
    out = tmp_path_factory.mktemp("data") / "compressed_ad"
    words = ["compressed_ad", str(out), "--streams", "3", "--steps", "200"]
    made(zygote(SAMPLE_DATA, *words))
    return out


@pytest.fixture(scope="session")
def compressed_ad_flags(darkroom_data):
    """flags(out, *more): the arguments of a small run of train.py that logs every step: 8 steps of 12 segments with
    contexts of 20 transitions and up to 3 compressions, an evaluation after 4 and after 8."""
    words = [
        "--data",
        str(darkroom_data),
        "--tf_n_embd",
        "16",
        "--tf_n_layer",
        "2",
        "--tf_n_head",
        "2",
        "--encoder_n_layer",
        "1",
    ]
    words += ["--tf_dim_feedforward", "32", "--n_transit", "20", "--train_batch_size", "12", "--lr", "1e-2"]
    words += ["--train_timesteps", "8", "--num_warmup_steps", "2", "--log_every", "1", "--eval_interval", "4"]
    words += ["--val_episodes", "2", "--eval_episodes", "3", "--eval_seeds", "2", "--test_batch_size", "16"]

    def make(out: Path, *more, latents: int = 4) -> list[str]:
        small = ["--n_latent", str(latents)] if latents else ["--model", "ad"]
        return [*words, *small, "--output_dir", str(out), *map(str, more)]

    return make


@pytest.fixture(scope="session")
def zygote():
    """run(script, *flags, address_space=bytes, ranks=n, figures=drawn or not, interrupt=..., NAME=value of the
    environment ...) -> code, stdout, stderr and seconds: see zygote.py."""
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "zygote.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert any("ready" in line for line in server.stdout)  # deepspeed has a word to say first

    def run(*argv, address_space: int = 0, ranks: int = 1, figures: bool = False, interrupt=None, **environment):
        request = {
            "argv": [str(word) for word in argv],
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


def train(data: Path, out: Path, processes: int = 1, *flags, launcher: list[str] | None = None, ok: bool = True):
    """Run train_prs_med.py to its end; asserts exit code 0 unless ok is False."""
    command = [*(launcher or torchrun(processes)), PRS_MED, "--data_root", data, "--checkpoint_dir", out, *flags]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert not ok or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def forked(zygote, data: Path, out: Path, processes: int, *flags):
    """train() by the zygote: as real, but for the launcher and the seconds of importing."""
    done = zygote(PRS_MED, "--data_root", data, "--checkpoint_dir", out, *flags, ranks=processes)
    assert done.code == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def at_step(out: Path, step: int, who: str, number: int = signal.SIGKILL, delay: float = 0.0) -> dict:
    """For zygote(..., interrupt=): a signal to the last rank ("worker") or "all" so many seconds after a checkpoint of
    this step."""
    return {"out": str(out), "step": step, "who": who, "number": int(number), "delay": delay}


def kill_then_stop(zygote, command: list, out: Path, kill_at: int, stop_at: int) -> None:
    """Two processes, of which one is killed; resumed, both are told to stop by SIGTERM, and save."""
    assert zygote(*command, ranks=2, interrupt=at_step(out, kill_at, "worker")).code != 0
    stopped = zygote(*command, ranks=2, interrupt=at_step(out, stop_at, "all", signal.SIGTERM))
    assert "signal: saved at step" in stopped.stdout
    assert stopped.code == 143


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[tuple]:
    """(step, loss, grad norm) of every training line and (step, Dice, text loss) of every evaluation line, in file
    order."""
    values = []
    for record in records(out):
        split = next((s for s in ("val", "test") if f"{s}/dice" in record), None)
        if split:
            values.append((record["step"], record[f"{split}/dice"], record[f"{split}/text_loss"]))
        else:
            values.append((record["step"], record["train/loss"], record["train/grad_norm"]))
    return values


def tree(folder: Path) -> dict[str, str]:
    """{relative path: content hash} of every file but lock files."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): hashlib.md5(path.read_bytes()).hexdigest() for path in files}
