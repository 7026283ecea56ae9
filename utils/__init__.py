"""Helpers shared by the scripts. Every command imports this package first, so it reports a missing environment."""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    print(f"error: {sys.executable} has no torch; run `make setup`, then `source .venv/bin/activate`", file=sys.stderr)
    sys.exit(2)
