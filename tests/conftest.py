"""Settings of all tests: one CPU thread per process, the `soak` marker, and the distribution of tests by xdist."""

import os
import re

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "soak: takes minutes, run by `make soak`")


def pytest_collection_modifyitems(items: list) -> None:
    """Run test_promise.py first, because it takes longest."""
    items.sort(key=lambda item: item.path.stem != "test_promise")


def pytest_xdist_make_scheduler(config, log):
    """Keep a file's tests in one xdist worker, so that module fixtures are made once; split test_promise.py by script.

    `--dist loadgroup` would do this, but xdist 3.8's group marks do not work with pytest 9.2.
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
