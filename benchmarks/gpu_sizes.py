"""What benchmarks/gpu.py runs: each script at its published size ("full") and as small as can be ("tiny").

The data is as large as the real one in shape, but few in number: rows and patients are repeated by name, so that it is
written in a minute. Models of full size are a config.json, from which gpu_process.py builds random weights.
"""

import bisect
import csv
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SCRIPTS = {
    "prs_med": "train_prs_med.py",
    "mimic_cxr": "train_mimic_cxr.py",
    "survival": "train_survival_distributed.py",
    "cascade": "train_accelerate.py",
    "compressed_ad": "train.py",
}
OUT_FLAG = {
    "prs_med": "--checkpoint_dir",
    "mimic_cxr": "--output_dir",
    "survival": "--log_dir",
    "cascade": "--checkpoint_dir",
    "compressed_ad": "--output_dir",
}

# Optimizer steps of a run, and those between two log lines; what precedes the first log line warms up.
STEPS = {"full": (30, 10), "tiny": (4, 2)}

# Epochs of each stage of the cascade at full size, of 32 training patients, with 16, 8 and 2 x 2 of them a step.
STAGE_EPOCHS = (15, 8, 4)

# Share of the matmul rate that a script should reach at full size; CompressedAD's small layers are bound by launches.
LEAST_MFU = {"prs_med": 0.2, "mimic_cxr": 0.1, "survival": 0.2, "cascade": 0.1, "compressed_ad": None}

# Samples of a step at tiny size, on all processes together.
BATCH = {"prs_med": 4, "mimic_cxr": 8, "survival": 8, "cascade": 4, "compressed_ad": 8}

TINY_STAGE = {
    "name": "stage1",
    "volume_size": [8, 8, 8],
    "voxel_dim": 16,
    "vit_depth": 1,
    "num_heads": 2,
    "token_grid": 4,
}

# The flags of a run, as words of one line: {data} and {stage} are filled in by filled_flags.
# The batch of the published size is each script's own choice, fitted to the memory.
FLAGS = {
    # The tiny models' checkpoints lie with the sample data, those of the published size are config.json alone.
    "prs_med": {
        "tiny": """
            --data_root {data} --batch_size 4 --num_workers 0
            --lora_dropout 0 --lr_scaling none --max_new_tokens 2
        """,
        "full": """
            --data_root {data} --max_new_tokens 2
            --vlm_path configs/models/llava_med_v1.5_mistral_7b --sam_path configs/models/sam_vit_base
        """,
    },
    # By --no_auto_optimize several processes train by DDP; the part "deepspeed" tries ZeRO.
    "mimic_cxr": {
        "tiny": """
            --data_path {data}/prepared --image_encoder {data}/convnext_tiny --text_encoder {data}/bert_tiny
            --batch_size 8 --num_workers 0 --dropout 0 --no_auto_optimize --warmup_steps 2
        """,
        "full": """
            --data_path {data}/prepared --image_encoder {data}/convnext_full --text_encoder {data}/bert_full
        """,
    },
    # The batch is that of all processes.
    "survival": {
        "tiny": """
            --csv_path {data}/dataset.csv --cache_dir {data}/cache --batch_size 8 --num_workers 0
            --resnet resnet10 --base_channels 8 --image_size 16 16 8
        """,
        "full": """
            --csv_path {data}/dataset.csv --cache_dir {data}/cache --batch_size 6
        """,
    },
    # The cache lies beside the patients' folders, not among them.
    "cascade": {
        "tiny": """
            --dataset_path {data} --cache_dir {data}_cache --batch_size 4 --num_workers 0
            --img_size 32 --encoder_dim 16 --num_timesteps 20 --ddim_steps 2
            --num_epochs_per_stage 4 --stage_configs {stage}
        """,
        "full": """
            --config {data}_config.json --dataset_path {data} --cache_dir {data}_cache
            --ddim_steps 2 --skip_alignment_check
        """,
    },
    # Evaluations in the middle of a run are left out.
    "compressed_ad": {
        "tiny": """
            --data {data} --batch_size 8 --num_warmup_steps 2 --train_timesteps 8
            --tf_n_embd 16 --tf_n_layer 2 --tf_n_head 2 --encoder_n_layer 1 --tf_dim_feedforward 32
            --n_transit 20 --n_latent 4
            --eval_interval 0 --eval_episodes 2 --val_episodes 2 --eval_seeds 1
        """,
        "full": """
            --data {data} --mixed_precision fp16
            --eval_interval 0 --eval_episodes 20 --val_episodes 20 --eval_seeds 2
        """,
    },
}

# What tools.sample_data is asked for, as words of one line.
SAMPLES = {
    "prs_med": {
        "tiny": "--num_train 8 --num_val 1 --num_test 1 --image_size 48",
        "full": "--num_train 12 --num_val 1 --num_test 1 --image_size 1024",
    },
    "mimic_cxr": {
        "tiny": "--num_train 6 --num_val 2 --num_test 2 --image_size 80",
        "full": "--num_train 60 --num_val 2 --num_test 2 --image_size 512",
    },
    # The smallest set that it makes has 20 patients.
    "survival": {
        "tiny": "--num_patients 20 --matrix 14 --event_rate 0.5",
        "full": "--num_patients 20 --matrix 128 --event_rate 0.5",
    },
    "cascade": {
        "tiny": "--num_patients 4 --matrix 16",
        "full": "--num_patients 4 --matrix 256",
    },
    "compressed_ad": {
        "tiny": "--streams 2 --steps 100",
        "full": "--streams 10 --steps 1000",
    },
}

# What tools.prepare_data makes of the sample data, as words of one line, where the script reads prepared data.
PREPARED = {
    "mimic_cxr": {
        "tiny": "{data}/mimic-cxr-jpg {data}/mimic-ext-cxr-qba {data}/prepared --image_size 64",
        "full": "{data}/mimic-cxr-jpg {data}/mimic-ext-cxr-qba {data}/prepared --image_size 224",
    },
}

# How often each row of a table, or each patient's folder, is there under another name.
COPIES = {
    "tiny": {"prs_med": 2, "survival": 2, "cascade": 10},
    "full": {"prs_med": 20, "survival": 15, "cascade": 40},
}


def make_data(folder: Path, task: str, size: str) -> Path:
    """The folder of the task's made-up data, which is written unless it is there. Raises RuntimeError."""
    out = folder / task
    made = folder / f"{task}.made"
    if made.exists():
        return out
    shutil.rmtree(out, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    tools = {"sample_data": [str(out), *SAMPLES[task][size].split()]}
    if task in PREPARED:
        tools["prepare_data"] = PREPARED[task][size].format(data=out).split()
    for tool, words in tools.items():
        command = [sys.executable, "-m", f"tools.{tool}", task, *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{tool} {task}: {done.stderr.strip().splitlines()[-1]}")

    # The few samples are repeated by name, and models of full size get their config.json.
    copies = COPIES[size].get(task, 1)
    if task == "prs_med":
        for table in (out / "annotations").glob("*.csv"):
            repeat_training_rows(table, copies)
    if task == "survival":
        repeat_cases(out / "dataset.csv", copies)
    if task == "cascade":
        repeat_patients(out, copies)
    if size == "full":
        write_full_models(out, task)
    made.touch()
    return out


def read_table(table: Path) -> list[list[str]]:
    """The lines of a CSV file, the header first."""
    lines = table.read_text(encoding="utf-8").splitlines()
    return list(csv.reader(lines))


def repeat_training_rows(table: Path, copies: int) -> None:
    """Write each row of PRS-Med's training split several times, and the others once."""
    header, *rows = read_table(table)
    split = header.index("split")
    repeated = []
    for row in rows:
        times = copies if row[split] == "train" else 1
        repeated += [row] * times
    with open(table, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *repeated])


def repeat_cases(table: Path, copies: int) -> None:
    """Write each case several times under another number, in the same fold; its CT is a hard link to the same file."""
    header, *rows = read_table(table)
    path = header.index("NIFTI Path")
    repeated = []
    for row in rows:
        for copy in range(copies):
            name = row[path]
            if copy:
                name = name.replace("case_", f"copy{copy}_")
                os.link(table.parent / row[path], table.parent / name)
            number = str(len(repeated) + 1)
            repeated.append([number, *row[1:path], name, *row[path + 1 :]])
    with open(table, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *repeated])


def repeat_patients(folder: Path, copies: int) -> None:
    """Make this many patients in all, as hard links to the few that are there."""
    patients = sorted(path for path in folder.iterdir() if path.is_dir())
    for number in range(len(patients), copies):
        source = patients[number % len(patients)]
        name = f"patient_{number + 1:04d}"
        (folder / name).mkdir()
        for file in source.iterdir():
            copy = file.name.replace(source.name, name)
            os.link(file, folder / name / copy)


def filled_flags(task: str, size: str, data: Path) -> list[str]:
    """The task's flags for its published or its tiny size, with this folder of data."""
    words = FLAGS[task][size].split()
    stage = json.dumps(TINY_STAGE)
    return [word.replace("{data}", str(data)).replace("{stage}", stage) for word in words]


def stage_of(task: str, size: str, epoch: int) -> int:
    """Which stage of the cascade, from 1, an epoch of the whole run belongs to at full size; else 0."""
    if task != "cascade" or size == "tiny":
        return 0
    return 1 + bisect.bisect_left(list(itertools.accumulate(STAGE_EPOCHS)), epoch)


def write_full_models(out: Path, task: str) -> None:
    """Write config.json of the published sizes, beside the tiny checkpoints' tokenizers and image processors."""
    if task == "mimic_cxr":
        convnext = {
            "model_type": "convnext",
            "depths": [3, 3, 27, 3],
            "hidden_sizes": [128, 256, 512, 1024],
            "image_size": 224,
        }
        bert = {"model_type": "bert", "vocab_size": 28996}
        write_model(out / "convnext_full", out / "convnext_tiny", convnext)
        write_model(out / "bert_full", out / "bert_tiny", bert)
    if task == "cascade":
        write_stages(out)


def write_stages(out: Path) -> None:
    """Write the published config of the cascade with each stage's own number of epochs."""
    from utils.cli import read_config

    config = read_config(str(ROOT / "configs/multi_view_config.json"))
    for stage, epochs in zip(config["stage_configs"], STAGE_EPOCHS, strict=True):
        stage["num_epochs"] = epochs
    out.with_name(f"{out.name}_config.json").write_text(json.dumps(config))


def write_model(path: Path, tiny: Path, config: dict) -> None:
    """Copy a tiny checkpoint's folder without its weights, and with another config.json."""
    left_out = shutil.ignore_patterns("*.safetensors", "*.bin", "config.json")
    shutil.copytree(tiny, path, ignore=left_out)
    (path / "config.json").write_text(json.dumps(config))
