"""--deterministic, TF32, and noise that is a function of its key: what the README promises of them."""

import ast
import os
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT
from torch.nn import functional as F

from old import fixed_order_utils
from old.cli_utils import Parser, add_common_arguments, parse_arguments
from tasks.cascade.diffusion import draw_noise

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


# --- operations in a fixed order -------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """fixed_order_utils' own formulations, on CPU tensors."""
    monkeypatch.setattr(fixed_order_utils, "in_fixed_order", lambda x: True)


def random_tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal noise of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


class Result(NamedTuple):
    """What an operation gives in both directions."""

    output: torch.Tensor
    gradient: torch.Tensor


def run_both_ways(operation, x: torch.Tensor) -> Result:
    """An operation's output, and the gradient of its input for a random gradient of the output."""
    leaf = x.detach().clone(memory_format=torch.preserve_format)
    leaf.requires_grad_()
    output = operation(leaf)
    gradient = random_tensor(output.shape, seed=0)
    output.backward(gradient.to(output.dtype))
    return Result(output.detach(), leaf.grad)


@pytest.mark.parametrize(("before", "after"), [(64, 16), (40, 16), (5, 3), (16, 16)])
def test_adaptive_pooling_is_torchs(before, after, as_on_a_gpu):
    x = random_tensor((2, 3, before, before), seed=3)
    expected = run_both_ways(lambda x: F.adaptive_avg_pool2d(x, after), x)
    own = run_both_ways(lambda x: fixed_order_utils.adaptive_avg_pool2d(x, after), x)
    torch.testing.assert_close(own.output, expected.output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own.gradient, expected.gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "size", "mode"),
    [
        ((1, 4, 27), (31,), "linear"),
        ((2, 1, 8, 8), (32, 32), "bilinear"),
        ((2, 1, 9, 7), (5, 20), "bilinear"),
    ],
)
def test_interpolation_is_torchs(shape, size, mode, as_on_a_gpu):
    x = random_tensor(shape, seed=4)
    expected = run_both_ways(lambda x: F.interpolate(x, size, mode=mode), x)
    own = run_both_ways(lambda x: fixed_order_utils.interpolate(x, size), x)
    torch.testing.assert_close(own.output, expected.output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.gradient, expected.gradient, rtol=1e-5, atol=1e-5)


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 3, 5, 2), (2, 40, 51), (1, 64, 64, 65)])
def test_noise_is_torchs_of_each_seed(shape):
    """Small parts, and large ones that are drawn in threads; whoever else is in the batch."""
    seeds = [5, 2**62 - 1, 0, 77, 9]
    noise = draw_noise(shape, torch.device("cpu"), seeds)
    for part, seed in zip(noise, seeds, strict=True):
        assert torch.equal(part, random_tensor(shape, seed))
    alone = draw_noise(shape, torch.device("cpu"), seeds[3:4])
    assert torch.equal(alone[0], noise[3])


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
