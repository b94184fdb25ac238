"""Where libcudnn and the cublasLt that it needs are found; a second copy is never opened beside a first."""

import ctypes
import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mucudnn.errors import BackendError
from mucudnn.interruptions import pass_on_interruption

OVERRIDE = "MUCUDNN_CUDNN_LIBRARY"
"""The environment variable that names a libcudnn to be opened; what is in the process already goes first."""

_CUDNN = "libcudnn.so.9"


def _import_torch() -> object:
    return importlib.import_module("torch")


def _wheel_files(name: str) -> tuple[str, ...]:
    """Return the files called `name` in the folders of NVIDIA's wheels, newest CUDA first."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations if spec else None) or ()
    files = [str(file) for folder in folders for file in Path(folder).glob(f"*/lib/{name}")]
    return tuple(sorted(files, reverse=True))


@dataclasses.dataclass(frozen=True)
class System:
    """What the search for cuDNN asks of the process and the machine; as they are, if nothing is given.

    Attributes:
        platform: Python's name of the operating system.
        override: path of the libcudnn to be opened; None if the user named none.
        import_torch: loads torch, and with it the cuDNN that a CUDA build of torch brings.
        open_library: opens a library by path or name with the flags of dlopen; OSError if it cannot.
        wheel_files: paths of the files of a name that NVIDIA's wheels have installed.
    """

    platform: str = sys.platform
    override: str | None = dataclasses.field(default_factory=lambda: os.environ.get(OVERRIDE) or None)
    import_torch: Callable[[], object] = _import_torch
    open_library: Callable[[str, int], ctypes.CDLL] = ctypes.CDLL
    wheel_files: Callable[[str], Sequence[str]] = _wheel_files


def opened_cudnn(system: System) -> ctypes.CDLL | None:
    """Return libcudnn: the process's own, the user's, a wheel's or the system's; None if there is none.

    Raises:
        BackendError: the one that the user named cannot be opened.
    """
    mapped = _opened(system, _CUDNN, os.RTLD_NOLOAD | os.RTLD_NOW)
    if mapped is not None:
        return mapped
    if system.override is not None:
        return _opened_override(system, system.override)
    return _first_opened(system, [*system.wheel_files(_CUDNN), _CUDNN], os.RTLD_NOW)


def cublaslt_is_loaded(system: System, name: str) -> bool:
    """Return whether cuDNN's sub-libraries will find cublasLt; it is opened for them if it is not there yet.

    Args:
        system: where it is looked for.
        name: the file name with the major version that this cuDNN asks for.
    """
    if _opened(system, name, os.RTLD_NOLOAD | os.RTLD_NOW) is not None:
        return True
    return _first_opened(system, [*system.wheel_files(name), name], os.RTLD_NOW | os.RTLD_GLOBAL) is not None


def mapped_path(opened: ctypes.CDLL) -> str:
    """Return the file from which a libcudnn was loaded, or the name by which it was opened."""
    address = ctypes.cast(opened.cudnnGetVersion, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        start, _, end = line.partition(" ")[0].partition("-")
        if int(start, 16) <= address < int(end, 16) and "/" in line:
            return line[line.index("/") :]
    return opened._name


def _opened(system: System, name: str, mode: int) -> ctypes.CDLL | None:
    try:
        return system.open_library(name, mode)
    except OSError as error:
        pass_on_interruption(error)
        return None


def _first_opened(system: System, names: Sequence[str], mode: int) -> ctypes.CDLL | None:
    return next((opened for name in names if (opened := _opened(system, name, mode)) is not None), None)


def _opened_override(system: System, path: str) -> ctypes.CDLL:
    try:
        return system.open_library(path, os.RTLD_NOW)
    except OSError as error:
        pass_on_interruption(error)
        raise BackendError(
            f"{OVERRIDE} must be the path of a libcudnn that can be opened, but got {path!r}: {error}."
        ) from error
