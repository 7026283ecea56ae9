"""What --rehearse predicts for a step, against the bytes of real tensors that the same step makes on a CPU.

    python benchmarks/rehearsal_check.py              # 12 settings of the five scripts, about 5 minutes on 2 cores

The prediction is the script's own command on fake CUDA tensors, in fp32. The count runs the same functions on real
tensors of the CPU, and adds up what is alive. Exits with 1 when one is further than 10 % from the other, or when a
rehearsal takes longer than 30 s.
"""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STAGES = [
    {"name": "stage1", "volume_size": [32] * 3, "voxel_dim": 64, "vit_depth": 2, "num_heads": 4, "token_grid": 8},
    {"name": "stage2", "volume_size": [64] * 3, "voxel_dim": 64, "vit_depth": 2, "num_heads": 4, "token_grid": 8},
]
SURVIVAL = ["train_survival_distributed.py", "--resnet"]
CASCADE = ["train_accelerate.py", "--img_size", "64", "--encoder_dim", "64", "--stage_configs", json.dumps(STAGES)]
# Dropout has other kernels on a CPU: they keep masks in fp32, and attention with dropout keeps its weights.
WITHOUT_DROPOUT = {"train_prs_med.py": ["--lora_dropout", "0"], "train_mimic_cxr.py": ["--dropout", "0"]}
# {prs_med} and {mimic_cxr} are the folders of sample_data.py, with small checkpoints
SETTINGS = {
    "PRS-Med, small models, 64 pixels, batch 4": ["train_prs_med.py", "--data_root", "{prs_med}", "--batch_size", "4"],
    "PRS-Med, batch 2 x 2": ["train_prs_med.py", "--data_root", "{prs_med}", "--batch_size", "2",
                             "--gradient_accumulation_steps", "2"],
    "PRS-Med, batch 8, recomputed": ["train_prs_med.py", "--data_root", "{prs_med}", "--batch_size", "8",
                                     "--gradient_checkpointing"],
    "MIMIC-CXR, small models, batch 8": ["{mimic_cxr}", "--image_size", "64", "--batch_size", "8"],
    "MIMIC-CXR, 128 pixels, batch 16": ["{mimic_cxr}", "--image_size", "128", "--batch_size", "16"],
    "survival, resnet18, 64 x 64 x 32, 2 cases": [*SURVIVAL, "resnet18", "--image_size", "64", "64", "32",
                                                  "--batch_size", "2"],
    "survival, resnet50, 96 x 96 x 32, 2 cases": [*SURVIVAL, "resnet50", "--image_size", "96", "96", "32",
                                                  "--batch_size", "2"],
    "survival, resnet10 of 32 channels, 4 cases x 2": [*SURVIVAL, "resnet10", "--base_channels", "32", "--image_size",
                                                       "64", "64", "32", "--batch_size", "4",
                                                       "--gradient_accumulation_steps", "2"],
    "cascade, 32^3, batch 2": [*CASCADE, "--stage", "1", "--batch_size", "2"],
    "cascade, 64^3, batch 1": [*CASCADE, "--stage", "2", "--batch_size", "1"],
    "CompressedAD, batch 16": ["train.py", "--train_batch_size", "16"],
    "AD, batch 32": ["train.py", "--model", "ad", "--train_batch_size", "32"],
}  # fmt: skip


@contextlib.contextmanager
def real_cpu(trace) -> Iterator:
    """In place of rehearsal_utils.imaginary_gpu: the same step on real tensors of the CPU."""
    import torch

    from distributed_utils import Ranks

    trace.device_type = "cpu"
    yield Ranks(0, 0, 1, torch.device("cpu"), "rehearsal")


def count(words: list[str]) -> None:
    """Run a script's rehearsal on real tensors; its last line is what they took."""
    import fake_cuda_utils
    import rehearsal_utils

    fake_cuda_utils.load_before_torch = lambda: None
    rehearsal_utils.imaginary_gpu = real_cpu
    sys.argv = [str(ROOT / words[0]), *words[1:], "--rehearse"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def last_line(words: list[str]) -> tuple[dict, float]:
    """(the JSON object that a command ends with, its seconds)."""
    begun = time.time()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]), time.time() - begun


def main() -> int:
    if sys.argv[1:2] == ["--count"]:
        count(sys.argv[2:])
        return 0

    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        folders = {task: Path(folder) / task for task in ("prs_med", "mimic_cxr")}
        for task, path in folders.items():
            sizes = ["--num_train", "12", "--num_val", "4", "--num_test", "4", "--image_size", "64"]
            words = [sys.executable, "sample_data.py", task, str(path), *sizes]
            subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
        chest = ["train_mimic_cxr.py", "--no_auto_optimize", "--image_encoder", f"{folders['mimic_cxr']}/convnext_tiny"]
        chest += ["--text_encoder", f"{folders['mimic_cxr']}/bert_tiny", "--max_question_length", "64"]

        print(f"{'setting':<48} {'predicted':>10} {'counted':>10} {'ratio':>7} {'seconds':>8}")
        for name, words in SETTINGS.items():
            words = chest + words[1:] if words[0] == "{mimic_cxr}" else words
            words = [word.format(**folders) if word == "{prs_med}" else word for word in words]
            words += ["--mixed_precision", "no", *WITHOUT_DROPOUT.get(words[0], [])]
            predicted, seconds = last_line([*words, "--rehearse", "--gpu_memory", "80"])
            counted, _ = last_line([__file__, "--count", *words])
            ratio = predicted["peak_gib"] / counted["peak_gib"]
            wrong += not 0.9 <= ratio <= 1.1 or seconds > 30
            shown = [f"{1024 * found['peak_gib']:>6.1f} MiB" for found in (predicted, counted)]
            print(f"{name:<48} {shown[0]:>10} {shown[1]:>10} {ratio:>7.3f} {seconds:>8.1f}", flush=True)
    print(f"{wrong} of {len(SETTINGS)} off by more than 10 %, or slower than 30 s")
    return bool(wrong)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
