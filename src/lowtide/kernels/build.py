"""Compiles the native passes on first use, once per user and machine set-up.

The library lies in `cache_folder()` under a key made of the sources, the flags, torch's version and the compiler.
It holds the code of every instruction set, and the processor is asked when it runs: a home directory may be shared by
unlike machines.

Processes that come at once wait for one another on a file lock, which the kernel drops when its holder dies. The build
happens in a temporary folder and its result is moved into place: a build that was killed leaves nothing that could be
taken for a library, and its leftovers go when the next process builds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

CACHE_VARIABLE = "LOWTIDE_CACHE_DIR"
_NAME = "lowtide_passes"
_SOURCES = Path(__file__).parent / "native_src"
_FLAGS = ("-O3", "-fopenmp")
_log = logging.getLogger(__name__)


class BuildError(Exception):
    """The native passes cannot be built or loaded here; the message says why and what to do."""


def load_library() -> ctypes.CDLL:
    """The compiled passes, built if this user has not built them yet.

    Raises:
        BuildError: no compiler, no ninja, another system, or the compiler failed.
    """
    if sys.platform != "linux":
        raise BuildError(f"the native passes are built on Linux only, this is {sys.platform}")
    compiler = _find_tools()
    folder = cache_folder() / _key(compiler)
    library = folder / f"{_NAME}.so"
    if (loaded := _load(library)) is not None:
        return loaded
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        warnings.warn(
            f"{folder} cannot be written ({error.strerror}): the native passes are built again by each process; "
            f"set {CACHE_VARIABLE} to a folder of yours",
            RuntimeWarning,
            stacklevel=2,
        )
        with tempfile.TemporaryDirectory(prefix="lowtide-") as temporary:
            return ctypes.CDLL(str(_build(Path(temporary))))
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # another process may have built it meanwhile
        if (loaded := _load(library)) is not None:
            return loaded
        for leftover in folder.glob("build-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=folder, ignore_cleanup_errors=True) as temporary:
            built = _build(Path(temporary))
            _digest_file(library).write_text(hashlib.sha256(built.read_bytes()).hexdigest())
            os.replace(built, library)
        return ctypes.CDLL(str(library))


def _load(library: Path) -> ctypes.CDLL | None:
    """The library if it is there and whole; a truncated one would crash the process that loads it."""
    try:
        whole = hashlib.sha256(library.read_bytes()).hexdigest() == _digest_file(library).read_text()
        return ctypes.CDLL(str(library)) if whole else None
    except OSError:
        return None


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def cache_folder() -> Path:
    """Where the compiled passes are kept: `LOWTIDE_CACHE_DIR`, else `lowtide` in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide"


def _find_tools() -> str:
    """The compiler's path, once it is known that it and ninja can be run."""
    named = os.environ.get("CXX", "c++")  # as torch's loader chooses
    compiler = shutil.which(named)
    missing = []
    if compiler is None:
        missing.append(f"a C++ compiler ({named!r} is not on PATH; install g++ or set CXX)")
    if _ninja_folder() is None:
        missing.append("ninja (pip install ninja)")
    if compiler is None or missing:
        raise BuildError(f"missing: {' and '.join(missing)}")
    return compiler


def _ninja_folder() -> Path | None:
    """The folder that holds ninja: on PATH, or beside this Python, where pip puts it."""
    beside = Path(sys.executable).parent
    found = shutil.which("ninja") or shutil.which("ninja", path=str(beside))
    return Path(found).parent if found else None


def _key(compiler: str) -> str:
    # the version is asked for by running the compiler: an update keeps the path
    try:
        version = subprocess.run([compiler, "-v"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"the compiler {compiler} does not run ({error})") from error
    if "gcc version" not in version:
        # another compiler's OpenMP brings a second thread pool, which would compete with torch's
        raise BuildError(f"the compiler {compiler} is not GCC; set CXX=g++")
    key = hashlib.sha256()
    for part in (version, torch.__version__, str(torch.__file__), platform.machine(), *_FLAGS):
        key.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    return key.hexdigest()[:20]


def _build(folder: Path) -> Path:
    """Compile into `folder`; returns the library's path."""
    start = time.perf_counter()
    with _ninja_on_path(), _silence("torch.utils.cpp_extension"):
        from torch.utils import cpp_extension  # takes a while to import, and is needed for a build alone

        try:
            cpp_extension.load(
                _NAME,
                [str(source) for source in sorted(_SOURCES.glob("*.cpp"))],
                extra_cflags=list(_FLAGS),
                extra_ldflags=[str(_torch_openmp())],
                build_directory=str(folder),
                is_python_module=False,
            )
        except (RuntimeError, OSError) as error:
            raise BuildError(f"the compiler failed: {_first_error(str(error))}") from error
    _log.info("built the native passes in %.1f s", time.perf_counter() - start)
    return folder / f"{_NAME}.so"


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """torch's loader runs `ninja` from PATH; in an environment that is not activated it lies beside Python only."""
    before = os.environ.get("PATH", "")
    if shutil.which("ninja") is None:
        os.environ["PATH"] = f"{before}{os.pathsep}{_ninja_folder()}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


@contextlib.contextmanager
def _silence(logger_name: str) -> Iterator[None]:
    """torch's loader warns about a missing GPU when it is imported."""
    logger = logging.getLogger(logger_name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _torch_openmp() -> Path:
    """The OpenMP runtime that torch itself runs on; linking it by path keeps a second one out of the process."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"))
    if bundled:
        return bundled[0]
    loaded = re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)\S*\.so\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if not loaded:
        raise BuildError("this build of torch runs without OpenMP")
    return Path(loaded[0])


def _first_error(output: str) -> str:
    """The compiler's first line that names an error, else the last line it wrote."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[-1] if lines else "no message")
