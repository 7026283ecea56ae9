"""What all tests share: one CPU thread a process, the marker of the long ones, and who runs what under xdist."""

import os
import re

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "soak: takes minutes; `make soak`")


def pytest_collection_modifyitems(items: list) -> None:
    """The longest file begins."""
    items.sort(key=lambda item: item.path.stem != "test_promise")


def pytest_xdist_make_scheduler(config, log):
    """One process takes a file, so that its fixtures are made once; of test_promise.py what is about one script.

    That is what --dist loadgroup is for, but xdist 3.8 cannot mark tests of pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByScript(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if not file.endswith("test_promise.py"):
                return file
            about = re.search(r"\[(train\w*)", test) or re.match("test_(deepspeed|any_engine|cascade|accelerate)", test)
            names = {None: "minimal", "any_engine": "deepspeed", "cascade": "train_accelerate", "accelerate": "train"}
            name = about and about[1]
            return names.get(name, name)

    return ByScript(config, log)
