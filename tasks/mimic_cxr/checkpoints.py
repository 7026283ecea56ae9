"""Guide 1's checkpoints: the one that a run begins with, and the weights that are left at its end."""

from pathlib import Path

from old.checkpoint_utils import export_weights, load_checkpoint
from old.cli_utils import InputError
from old.distributed_utils import agree_on_errors


def open_checkpoint(run_folder: Path, resume_from: str | None, eval_only: bool, format: str) -> dict | None:
    """All ranks: the checkpoint to resume or to evaluate, None for a fresh start. Raises InputError."""
    if not eval_only:
        return load_checkpoint(resume_from, run_folder, format, resume=True)
    best = run_folder / "best.pt"
    with agree_on_errors():
        if not resume_from and not best.exists():
            advice = "check --output_dir, or give a checkpoint with --resume_from"
            raise InputError(f"{run_folder}: holds no best.pt; {advice}")
    checkpoint = load_checkpoint(resume_from or str(best), run_folder, format, resume=False)
    if checkpoint is None:
        raise InputError(f"{run_folder}: no checkpoint to use; give one with --resume_from")
    return checkpoint


def export_run(run_folder: Path, chosen: str, format: str) -> None:
    """All ranks: model.safetensors (the chosen weights) and model_last.safetensors, whole from any engine."""
    for name, source in (("model", chosen), ("model_last", "last.pt")):
        weights = load_checkpoint(str(run_folder / source), run_folder, format)["model"]
        export_weights(weights, run_folder / f"{name}.safetensors")
