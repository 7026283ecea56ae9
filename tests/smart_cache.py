"""Prints, as JSON lines, what each rank sees of a SmartCache in some epochs: one line per configuration.

argv: table, then configurations "cases,cache_rate,replace_rate,workers,epochs[,first epoch]".
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import distributed_utils as du
from tasks.survival.data import MultiGPUSurvivalDataset, read_cohort


def main() -> None:
    cohort = read_cohort(sys.argv[1])
    with du.setup_distributed():
        for text in sys.argv[2:]:
            cases, cache_rate, replace_rate, workers, epochs, *first = map(float, text.split(","))
            dataset = MultiGPUSurvivalDataset(
                cohort, rows=np.arange(int(cases)), image_size=(4, 4, 4), use_smart_cache=True,
                cache_rate=cache_rate, replace_rate=replace_rate,
            )  # fmt: skip
            loader = du.create_distributed_dataloader(dataset, 2, num_workers=int(workers), drop_last=False)
            seen = []
            for epoch in range(int(first[0]) if first else 0, int(epochs)):
                loader.batch_sampler.set_position(epoch)
                seen.append([i for batch in loader for i in batch["index"].tolist()])
            cache = dataset.smart_cache
            facts = {"seen": seen, "part": cache.rows, "cached": cache.cached, "replaced": cache.replaced}
            facts["all_seen_after"] = cache.epochs_until_all_seen()
            dataset.shutdown()
            if (every := du.gather_objects(facts)) and du.world()[0] == 0:
                print(json.dumps(every), flush=True)


if __name__ == "__main__":
    main()
