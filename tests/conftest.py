"""What all tests share: one CPU thread a process, and the marker of the long ones."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "soak: takes minutes; `make soak`")
