"""Prints, as JSON lines, what each rank sees of a SmartCache in some epochs: one line per configuration.

argv: table, then configurations "cases,cache_rate,replace_rate,workers,epochs[,first epoch]".
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from old.distributed_utils import create_distributed_dataloader, gather_objects, setup_distributed
from tasks.survival.cohort import Cohort, read_cohort
from tasks.survival.data import MultiGPUSurvivalDataset


def look(cohort: Cohort, configuration: str) -> dict:
    """What this rank sees in the epochs of a configuration."""
    cases, cache_rate, replace_rate, workers, epochs, *first = map(float, configuration.split(","))
    dataset = MultiGPUSurvivalDataset(
        cohort,
        rows=np.arange(int(cases)),
        image_size=(4, 4, 4),
        use_smart_cache=True,
        cache_rate=cache_rate,
        replace_rate=replace_rate,
    )
    loader = create_distributed_dataloader(dataset, 2, num_workers=int(workers), drop_last=False)

    # from the first epoch on, or from a later one as after a resume
    seen = []
    begin = int(first[0]) if first else 0
    for epoch in range(begin, int(epochs)):
        loader.batch_sampler.set_position(epoch)
        seen.append([i for batch in loader for i in batch["index"].tolist()])

    cache = dataset.smart_cache
    facts = {
        "seen": seen,
        "part": cache.rows,
        "cached": cache.cached,
        "replaced": cache.replaced,
        "all_seen_after": cache.epochs_until_all_seen(),
    }
    dataset.shutdown()
    return facts


def main() -> None:
    cohort = read_cohort(sys.argv[1])
    with setup_distributed() as ranks:
        for configuration in sys.argv[2:]:
            every = gather_objects(look(cohort, configuration))
            if ranks.is_main:
                print(json.dumps(every), flush=True)


if __name__ == "__main__":
    main()
