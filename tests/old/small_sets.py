"""Prints the metrics of test sets of 1 to 10 samples as JSON lines, at the world size that it is launched with."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from old.distributed_utils import setup_distributed
from tasks.prs_med.data import PositionData, evaluation_loader, read_annotations
from train_prs_med import batch_loss, build_model, evaluate, load_weights, parse_args


def main() -> None:
    data_root, weights = sys.argv[1:]
    flags = ["--data_root", data_root, "--lora_dropout", "0", "--max_new_tokens", "8", "--batch_size", "2"]
    args = parse_args(flags)
    with setup_distributed() as ranks:
        model = build_model(args, "no", ranks.device)
        load_weights(model, torch.load(weights, weights_only=True))
        rows = read_annotations(Path(data_root), None, False)
        rows = [row for row in rows if row.split == "test"]
        for size in range(1, 11):
            data = PositionData(rows[:size], model.reader, True)
            loader = evaluation_loader(data, args.batch_size, args.num_workers)
            metrics = evaluate(model, loader, "test", args).metrics
            if ranks.world_size == 1:
                metrics |= reference(model, data, args)
            if ranks.is_main:
                print(json.dumps(metrics), flush=True)


@torch.no_grad()
def reference(model, data, args) -> dict[str, float]:
    """Dice and IoU by MONAI, one sample after the other; the losses as training computes them for one batch of all."""
    from monai.metrics import compute_dice, compute_iou

    # each image by itself
    dice = []
    iou = []
    samples = [data[i] for i in range(len(data))]
    for sample in samples:
        batch = model.reader.collate([sample])
        logits, *_ = model(batch)
        predicted = (logits > 0)[None].float()
        mask = batch["mask"][None].float()
        dice.append(compute_dice(predicted, mask, ignore_empty=False))
        iou.append(compute_iou(predicted, mask, ignore_empty=False))
    metrics = {"monai/dice": torch.cat(dice).mean(), "monai/iou": torch.cat(iou).mean()}

    # all in one batch
    batch = model.reader.collate(samples)
    tokens = float((batch["answer"] >= 0).sum())
    loss, loss_seg, loss_txt = batch_loss(model, batch, len(data), tokens, args)
    metrics |= {"train/loss": loss, "train/loss_seg": loss_seg, "train/loss_txt": loss_txt}
    return {name: float(value) for name, value in metrics.items()}


if __name__ == "__main__":
    main()
