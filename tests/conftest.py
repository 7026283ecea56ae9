"""What all tests share: one CPU thread a process, the marker of the long ones, and who runs what under xdist."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "soak: takes minutes; `make soak`")


def pytest_collection_modifyitems(items: list) -> None:
    """One worker takes a whole file, so that its fixtures are made once; of test_promise.py, which begins, a script."""
    items.sort(key=lambda item: item.path.stem != "test_promise")
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            script = item.callspec.params.get("script") if hasattr(item, "callspec") else None
            item.add_marker(pytest.mark.xdist_group(str(script or item.path.stem)))
