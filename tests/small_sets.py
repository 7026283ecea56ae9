"""Prints the metrics of test sets of 1 to 10 samples as JSON lines, at the world size that it is launched with."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import train_prs_med as prs


def main() -> None:
    args = prs.parse_args(
        ["--data_root", sys.argv[1], "--lora_dropout", "0", "--max_new_tokens", "8", "--batch_size", "2"]
    )
    with prs.setup_distributed() as ranks:
        model = prs.build_model(args, "no", ranks.device)
        prs.load_weights(model, torch.load(sys.argv[2], weights_only=True))
        rows = [row for row in prs.read_annotations(Path(sys.argv[1]), None, False) if row.split == "test"]
        for size in range(1, 11):
            data = prs.PositionData(rows[:size], model.reader, True)
            loader = prs.evaluation_loader(data, args.batch_size, args.num_workers)
            metrics, _ = prs.evaluate(model, loader, "test", args)
            if ranks.world_size == 1:
                metrics |= reference(model, data, args)
            if ranks.is_main:
                print(json.dumps(metrics), flush=True)


@torch.no_grad()
def reference(model, data, args) -> dict[str, float]:
    """Dice and IoU by MONAI, one sample after the other; the losses as training computes them for one batch of all."""
    from monai.metrics import compute_dice, compute_iou

    batches = [model.reader.collate([data[i]]) for i in range(len(data))]
    pairs = [((model(batch)[0] > 0)[None].float(), batch["mask"][None].float()) for batch in batches]
    dice = torch.cat([compute_dice(a, b, ignore_empty=False) for a, b in pairs]).mean()
    iou = torch.cat([compute_iou(a, b, ignore_empty=False) for a, b in pairs]).mean()
    batch = model.reader.collate([data[i] for i in range(len(data))])
    tokens = float((batch["answer"] >= 0).sum())
    losses = prs.batch_loss(model, batch, len(data), tokens, args).tolist()
    losses = dict(zip(("train/loss", "train/loss_seg", "train/loss_txt"), losses, strict=True))
    return {"monai/dice": float(dice), "monai/iou": float(iou), **losses}


if __name__ == "__main__":
    main()
