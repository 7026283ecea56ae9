"""What the scripts share. Every command of this project imports it first, so that one without its packages says so."""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    print(f"error: {sys.executable} has no torch; run `make setup`, then `source .venv/bin/activate`", file=sys.stderr)
    sys.exit(2)
