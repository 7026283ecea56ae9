"""count_twice.py SCRIPT FLAGS: runs the script; torch's own counter counts the same step, and both totals are printed.

It is given this project's formula of a convolution's gradients, and that of the CPU's attention.
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch.utils.flop_counter import FlopCounterMode, flop_registry

from old import flops_utils, logging_utils

DIFFERENT = {name: formula for name, formula in flops_utils.FORMULAS.items() if flop_registry.get(name) is not formula}
for formula in DIFFERENT.values():
    # they are given tensors, not shapes
    formula._get_raw = True


class CountTwice(flops_utils.FlopCount):
    """Enters torch's counter around its own."""

    depth = 0
    by_torch = 0

    def __enter__(self):
        # it enters itself again for a composite operation
        self.depth += 1
        if self.depth == 1:
            self.other = FlopCounterMode(display=False, custom_mapping=DIFFERENT)
            self.other.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.depth -= 1
        if self.depth == 0:
            self.other.__exit__(*error)
            self.by_torch += self.other.get_total_flops()
            print(f"counted {self.total}, by torch {self.by_torch}", flush=True)


if __name__ == "__main__":
    logging_utils.FlopCount = CountTwice
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
