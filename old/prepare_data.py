"""`python -m tools.prepare_data mimic_cxr xrays.csv`: looks at a table that train_mimic_cxr.py --table reads."""

import argparse

from old.cli_utils import Parser, run_main
from tasks.mimic_cxr.prepare import add_arguments, prepare


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("task", choices=("mimic_cxr",))
    add_arguments(parser)
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    flags = vars(args)
    del flags["task"]
    prepare(**flags)


if __name__ == "__main__":
    run_main(main, parse_args())
