"""--deterministic and TF32: what the README promises of them."""

import ast
import os

import pytest
from conftest import ROOT

from old.cli_utils import Parser, add_common_arguments, parse_arguments

SETTINGS = """
import os, sys, warnings
warnings.simplefilter("error")
os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)

from old.cli_utils import Parser, add_common_arguments, parse_arguments

parser = Parser("")
add_common_arguments(parser)
args = parse_arguments(parser, sys.argv[3:])

import torch
from old.hardware_utils import set_numerics
reason = set_numerics(torch.device(sys.argv[1]), sys.argv[2], "as asked", args.deterministic)

backends = torch.backends
print(reason)
print(os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("NCCL_NVLS_ENABLE"))
print(backends.cudnn.allow_tf32, backends.cudnn.conv.fp32_precision == "tf32", backends.cuda.matmul.allow_tf32)
print(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
print(backends.cudnn.deterministic, backends.cudnn.benchmark, backends.cuda.cudnn_sdp_enabled())
"""

# What SETTINGS prints on a GPU in fp32, in half precision and there with --deterministic, and on a CPU: the reason; the
# workspace of cuBLAS and NCCL's NVLS; whether TF32 is allowed in cuDNN, in its convolutions and in products; whether
# operations are deterministic and only warn; cuDNN's determinism, its benchmark and its attention.
FP32 = ["as asked; fp32 (TF32 off)", "None None", "False False False", "False False", "False False True"]
HALF = ["as asked", "None None", "True True False", "False False", "False False True"]
DETERMINISTIC = ["as asked; deterministic", ":4096:8 0", "True True False", "True False", "True False False"]


@pytest.fixture
def run_code(zygote, tmp_path):
    """run_code(code, arguments) -> the lines that a process of its own prints: torch's settings stay until its end."""

    def run(code: str, arguments: list[str]) -> list[str]:
        (tmp_path / "code.py").write_text(code)
        done = zygote(tmp_path / "code.py", *arguments)
        assert done.code == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("cuda no", FP32),
        ("cuda bf16", HALF),
        ("cpu no", HALF),
        ("cuda bf16 --deterministic", DETERMINISTIC),
    ],
)
def test_settings(arguments, expected, run_code):
    assert run_code(SETTINGS, arguments.split()) == expected


@pytest.mark.parametrize(("given", "kept"), [(":16:8", ":16:8"), (":0:0", ":4096:8")])
def test_a_workspace_that_torch_refuses_is_replaced(monkeypatch, given, kept):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    parser = Parser("")
    add_common_arguments(parser)
    parse_arguments(parser, ["--deterministic"])
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == kept
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"


# --- gradients of more than two processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", ["kept", "laid out anew"])
def test_gradients_of_three_processes_before_and_after_ddp_lays_out_its_buckets(buckets, zygote):
    """A resumed run's first step stands for another step of the uninterrupted run: the same bits in kept buckets."""
    done = zygote(str(ROOT / "tests/old/ddp_buckets.py"), buckets, ranks=3)
    assert done.code == 0, done.stderr[-2000:]
    assert done.stdout.split() == (["same"] if buckets == "kept" else ["different"])


# --- noise -----------------------------------------------------------------------------------------------------------


DRAWING = {"Generator", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "bernoulli"}


def draws_on_a_device(call: ast.Call) -> bool:
    """Whether a call may make a torch.Generator of a device, or a random tensor on one."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in DRAWING:
        return False
    if ast.unparse(function.value) != "torch":
        return False
    if function.attr.endswith("_like"):
        return True
    if function.attr == "Generator" and call.args:
        return True
    return any(keyword.arg == "device" for keyword in call.keywords)


def test_nothing_is_drawn_by_a_gpus_generator():
    """No torch.Generator of another device than the CPU, and no random tensor made on a device, but to fill memory."""
    assert draws_on_a_device(ast.parse("torch.randn(3, device=x.device)").body[0].value)
    drawn = []
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("old/*.py"), *ROOT.glob("tasks/**/*.py")]):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        drawn += [f"{path.name}: {ast.unparse(call)}" for call in calls if draws_on_a_device(call)]
    assert drawn == []
