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

from old.cli_utils import InputError

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
LIBRARY: list[ctypes.CDLL] = []


def has_gpu() -> bool:
    """Whether a CUDA driver with a device answers."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if driver.cuInit(0) != 0:
            return False
        count = ctypes.c_int(0)
        answered = driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except (OSError, AttributeError):
        return False
    return answered and count.value > 0


def load_before_torch() -> None:
    """Compile fake_cuda.cpp once for this torch, and load it. Does nothing where there is a GPU.

    Raises InputError without a C++ compiler, or when torch is imported already.
    """
    if LIBRARY or has_gpu():
        return
    if "torch" in sys.modules:
        raise InputError("--rehearse: torch is imported already; start the script by itself")
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    library = _compiled(torch_folder)
    LIBRARY.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))


def use_guard() -> None:
    """After torch is imported: let its autograd engine run on the device that is not there."""
    if LIBRARY:
        LIBRARY[0].use_idle_guard()


def find_compiler() -> str | None:
    """The path of a C++ compiler: $CXX, g++, clang++ or c++."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


def _compiled(torch_folder: Path) -> Path:
    """The compiled library, kept in the user's cache folder for this source and this torch."""
    version = (torch_folder / "version.py").read_bytes()
    key = hashlib.sha256(SOURCE.read_bytes() + version + str(torch_folder).encode())
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    library = Path(cache) / "medical-multi-gpu" / f"fake_cuda_{key.hexdigest()[:16]}.so"
    if not library.is_file():
        _compile(torch_folder, library)
    return library


def _compile(torch_folder: Path, library: Path) -> None:
    """Make the library. Raises InputError without a compiler, for its errors, and for a folder one may not write to."""
    compiler = find_compiler()
    if compiler is None or sys.platform == "win32":
        reason = "needs a GPU, or a C++ compiler (g++ or clang++) on Linux or macOS"
        raise InputError(f"--rehearse: {reason}; install one, or rehearse on another machine")

    # It is compiled under a name of this process, as others may do the same now.
    libraries = torch_folder / "lib"
    temporary = library.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20"]
    command += [f"-I{torch_folder / 'include'}", str(SOURCE), "-o", str(temporary)]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(temporary, library)
    except OSError as error:
        reason = f"cannot write here ({error.strerror})"
        raise InputError(f"{library.parent}: {reason}; set XDG_CACHE_HOME") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        reason = f"failed on fake_cuda.cpp ({lines[0][:200]})"
        raise InputError(f"--rehearse: {compiler} {reason}; try another with CXX=") from None
