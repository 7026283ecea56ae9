"""--deterministic, TF32, and noise that is a function of its key: what the README promises of them."""

import ast
import os

import pytest
import torch
from conftest import ROOT
from torch.nn import functional as F

import fixed_order_utils
from cli_utils import Parser, add_common_arguments, parse_arguments
from tasks.cascade import data as xd

SETTINGS = """
import os, sys, warnings
warnings.simplefilter("error")
os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
from cli_utils import Parser, add_common_arguments, parse_arguments
parser = Parser("")
add_common_arguments(parser)
args = parse_arguments(parser, sys.argv[3:])
import torch
from hardware_utils import set_numerics
why = set_numerics(torch.device(sys.argv[1]), sys.argv[2], "as asked", args.deterministic)
backends = torch.backends
print(why, os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("NCCL_NVLS_ENABLE"), backends.cudnn.allow_tf32,
      backends.cudnn.conv.fp32_precision == "tf32", backends.cuda.matmul.allow_tf32,
      torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
      backends.cudnn.deterministic, backends.cudnn.benchmark, backends.cuda.cudnn_sdp_enabled(), sep="|")
"""


@pytest.fixture
def run_code(zygote, tmp_path):
    """run_code(text, *argv) -> what a process of its own prints, as torch's settings stay until its end."""

    def run(text: str, *argv: str) -> str:
        (tmp_path / "code.py").write_text(text)
        done = zygote(tmp_path / "code.py", *argv)
        assert done.code == 0, done.stderr[-2000:]
        return done.stdout.strip()

    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cuda no", "as asked; fp32 (TF32 off)|None|None|False|False|False|False|False|False|False|True"),
        ("cuda bf16", "as asked|None|None|True|True|False|False|False|False|False|True"),
        ("cpu no", "as asked|None|None|True|True|False|False|False|False|False|True"),
        ("cuda bf16 --deterministic", "as asked; deterministic|:4096:8|0|True|True|False|True|False|True|False|False"),
    ],
)
def test_settings(words, expected, run_code):
    assert run_code(SETTINGS, *words.split()) == expected


def test_a_workspace_that_torch_refuses_is_replaced(monkeypatch):
    parser = Parser("")
    add_common_arguments(parser)
    for given, kept in ((":16:8", ":16:8"), (":0:0", ":4096:8")):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
        monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
        parse_arguments(parser, ["--deterministic"])

        assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_NVLS_ENABLE"]) == (kept, "0")


# --- gradients of more than two processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", ["kept", "laid out anew"])
def test_gradients_of_three_processes_before_and_after_ddp_lays_out_its_buckets(buckets, zygote):
    """A resumed run's first step stands for another step of the uninterrupted run: the same bits in kept buckets."""
    done = zygote(str(ROOT / "tests" / "ddp_buckets.py"), buckets, ranks=3)
    assert done.code == 0, done.stderr[-2000:]
    assert done.stdout.split() == (["same"] if buckets == "kept" else ["different"])


# --- operations in a fixed order -------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """fixed_order_utils' own formulations, on CPU tensors."""
    monkeypatch.setattr(fixed_order_utils, "in_fixed_order", lambda x: True)


def both(operation, own, x: torch.Tensor, seed: int = 0) -> tuple:
    """(output, gradient) of torch's operation and of ours."""
    results = []
    for function in (operation, own):
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        out = function(leaf)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype))
        results.append((out.detach(), leaf.grad))
    return results


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 8, 9, 5), (1, 2, 2, 2, 2), (1, 1, 7, 1, 3)])
def test_max_pooling_is_torchs_to_the_bit(shape, dtype, layout, as_on_a_gpu):
    """With few different values, so that most windows hold the largest more than once."""
    x = (
        torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(1))
        .to(dtype)
        .contiguous(memory_format=layout)
    )
    pool = fixed_order_utils.MaxPool3d(kernel_size=3, stride=2, padding=1)
    (out, grad), (own, own_grad) = both(lambda x: F.max_pool3d(x, 3, 2, 1), pool, x)
    assert torch.equal(out, own)
    assert torch.equal(grad, own_grad)


def test_gradients_by_finite_differences(as_on_a_gpu):
    x = torch.randn(1, 2, 5, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    assert torch.autograd.gradcheck(fixed_order_utils.MaxPool3d(3, 2, 1), x)


@pytest.mark.parametrize("size", [(64, 16), (40, 16), (5, 3), (16, 16)])
def test_adaptive_pooling_is_torchs(size, as_on_a_gpu):
    before, after = size
    x = torch.randn(2, 3, before, before, generator=torch.Generator().manual_seed(3))
    results = both(
        lambda x: F.adaptive_avg_pool2d(x, after), lambda x: fixed_order_utils.adaptive_avg_pool2d(x, after), x
    )
    for value, own in zip(*results, strict=True):
        torch.testing.assert_close(own, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shapes", [((1, 4, 27), (31,)), ((2, 1, 8, 8), (32, 32)), ((2, 1, 9, 7), (5, 20))])
def test_interpolation_is_torchs(shapes, as_on_a_gpu):
    shape, size = shapes
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    mode = "linear" if len(size) == 1 else "bilinear"
    results = both(lambda x: F.interpolate(x, size, mode=mode), lambda x: fixed_order_utils.interpolate(x, size), x)
    for value, own in zip(*results, strict=True):
        torch.testing.assert_close(own, value, rtol=1e-5, atol=1e-5)


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 3, 5, 2), (2, 40, 51), (1, 64, 64, 65)])
def test_noise_is_torchs_of_each_seed(shape):
    """Small parts, and large ones that are drawn in threads; whoever else is in the batch."""
    seeds = [5, 2**62 - 1, 0, 77, 9]
    noise = xd.draw_noise(shape, torch.device("cpu"), seeds)
    for part, seed in zip(noise, seeds, strict=True):
        assert torch.equal(part, torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    assert torch.equal(xd.draw_noise(shape, torch.device("cpu"), seeds[3:4])[0], noise[3])


def test_nothing_is_drawn_by_a_gpus_generator():
    """No torch.Generator of another device than the CPU, and no random tensor made on a device, but to fill memory."""
    drawn = {"Generator", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "bernoulli"}
    found = []
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("tasks/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in drawn and ast.unparse(node.func.value) == "torch":
                device = node.func.attr == "Generator" and node.args
                if device or node.func.attr.endswith("_like") or any(word.arg == "device" for word in node.keywords):
                    found.append(f"{path.name}: {ast.unparse(node)}")
    assert found == []
