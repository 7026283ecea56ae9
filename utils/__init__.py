"""Helpers shared by all scripts. Importing this package without torch exits with a hint to set up the environment."""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    print(f"error: {sys.executable} has no torch; run `make setup`, then `source .venv/bin/activate`", file=sys.stderr)
    sys.exit(2)
