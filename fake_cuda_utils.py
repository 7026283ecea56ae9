"""Compiles and loads fake_cuda.cpp, which lets torch trace CUDA tensors where there is no GPU. Imports no torch itself.

torch asks for its CUDA library while it is imported, so `load_before_torch` must come first.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cli_utils import InputError

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
LIBRARY: list[ctypes.CDLL] = []


def has_gpu() -> bool:
    """Whether a CUDA driver with a device answers."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        count = ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False


def load_before_torch() -> None:
    """Compile fake_cuda.cpp once for this torch, and load it. Does nothing where there is a GPU.

    Raises InputError without a C++ compiler, or when torch is imported already.
    """
    if LIBRARY or has_gpu():
        return
    if "torch" in sys.modules:
        raise InputError("--rehearse: torch is imported already; start the script by itself")
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    LIBRARY.append(ctypes.CDLL(str(_compile(torch_folder)), mode=ctypes.RTLD_GLOBAL))


def use_guard() -> None:
    """After torch is imported: let its autograd engine run on the device that is not there."""
    if LIBRARY:
        LIBRARY[0].use_idle_guard()


def find_compiler() -> str | None:
    """The path of a C++ compiler: $CXX, g++, clang++ or c++."""
    names = (os.environ.get("CXX") or "", "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compile(torch_folder: Path) -> Path:
    """The compiled library, kept in the user's cache folder for this source and this torch."""
    version = (torch_folder / "version.py").read_bytes()
    key = hashlib.sha256(SOURCE.read_bytes() + version + str(torch_folder).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medical-multi-gpu"
    library = cache / f"fake_cuda_{key}.so"
    if library.is_file():
        return library

    compiler = find_compiler()
    if compiler is None or sys.platform == "win32":
        text = "needs a GPU, or a C++ compiler (g++ or clang++) on Linux or macOS"
        raise InputError(f"--rehearse: {text}; install one, or rehearse on another machine")
    libraries = torch_folder / "lib"
    temporary = library.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder / 'include'}", str(SOURCE)]
    command += ["-o", str(temporary), f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(temporary, library)
    except OSError as error:
        raise InputError(f"{cache}: cannot write here ({error.strerror}); set XDG_CACHE_HOME") from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[0][:200]
        raise InputError(f"--rehearse: {compiler} failed on fake_cuda.cpp ({reason}); try another with CXX=") from None
    return library
