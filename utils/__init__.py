"""Helpers shared by all scripts. If torch is not installed, importing this package exits with an installation hint."""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    print(f"error: {sys.executable} has no torch; run `make setup`, then `source .venv/bin/activate`", file=sys.stderr)
    sys.exit(2)
