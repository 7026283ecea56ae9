"""What all tests share: one CPU thread a process, the marker of the long ones, and which file comes first."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "soak: takes minutes; `make soak`")


def pytest_collection_modifyitems(items: list) -> None:
    """The longest file begins, so that neither of two processes is left with it at the end."""
    items.sort(key=lambda item: item.path.stem != "test_promise")
