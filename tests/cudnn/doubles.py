"""A libcudnn that only answers, and a machine on which one is found or not."""

import ctypes
import dataclasses
import os
from collections.abc import Callable

from mucudnn.backends.cudnn.discovery import System
from mucudnn.backends.cudnn.library import Library

CUDNN = "libcudnn.so.9"
CUBLASLT = "libcublasLt.so.13"
_FUNCTIONS = (
    "cudnnBackendCreateDescriptor",
    "cudnnBackendDestroyDescriptor",
    "cudnnBackendFinalize",
    "cudnnBackendSetAttribute",
    "cudnnBackendGetAttribute",
    "cudnnBackendExecute",
    "cudnnCreate",
    "cudnnSetStream",
    "cudnnGetErrorString",
    "cudnnGetLastErrorString",
)


class OpenedCudnn:
    """What opening a libcudnn gives: its functions, of which only the two of the versions are ever called."""

    def __init__(self, version: int = 91900, cuda: int = 13010, path: str = "/double/libcudnn.so.9") -> None:
        answer = ctypes.CFUNCTYPE(ctypes.c_size_t)
        self._name = path
        self.cudnnGetVersion = answer(lambda: version)
        self.cudnnGetCudartVersion = answer(lambda: cuda)
        for name in _FUNCTIONS:
            setattr(self, name, answer(lambda: 0))


class Machine:
    """A machine with some library files, and a process that has mapped some of them.

    Attributes:
        events: "torch", and "open PATH" for every library that was opened, in order.
        flags: the flags with which each path was opened.
    """

    def __init__(self, files: dict[str, object], mapped: dict[str, object] | None = None) -> None:
        self.events: list[str] = []
        self.flags: dict[str, int] = {}
        self._files = files
        self._mapped = mapped or {}

    def system(self, **changes: object) -> System:
        system = System(
            platform="linux",
            override=None,
            import_torch=lambda: self.events.append("torch"),
            open_library=self._open,
            wheel_files=lambda name: [path for path in self._files if path == f"/wheel/{name}"],
        )
        return dataclasses.replace(system, **changes)

    def _open(self, path: str, flags: int) -> object:
        found = (self._mapped if flags & os.RTLD_NOLOAD else self._files).get(path)
        if found is None:
            raise OSError(f"{path}: cannot open shared object file")
        if not flags & os.RTLD_NOLOAD:
            self.events.append(f"open {path}")
            self.flags[path] = flags
        return found


@dataclasses.dataclass
class Calls:
    """How many descriptors a double has created, and those that it has destroyed."""

    created: int = 0
    destroyed: list[int] = dataclasses.field(default_factory=list)


def library_double(
    calls: Calls | None = None, last_error: bytes = b"", **functions: Callable[..., object]
) -> Library:
    """Return a library whose calls succeed and do nothing but count descriptors, numbered from 1."""
    calls = calls or Calls()

    def create_descriptor(kind: int, address: int) -> int:
        calls.created += 1
        ctypes.c_void_p.from_address(address).value = calls.created
        return 0

    def last_error_string(buffer: "ctypes.Array[ctypes.c_char]", size: int) -> None:
        buffer.value = last_error

    def succeed(*arguments: object) -> int:
        return 0

    double = Library(
        version=91900,
        path="/double/libcudnn.so.9",
        create_descriptor=create_descriptor,
        destroy_descriptor=lambda pointer: calls.destroyed.append(pointer) or 0,
        finalize=succeed,
        set_attribute=succeed,
        get_attribute=succeed,
        execute=succeed,
        create_handle=succeed,
        set_stream=succeed,
        error_string=lambda _: b"CUDNN_STATUS_DOUBLE",
        last_error_string=last_error_string,
    )
    return dataclasses.replace(double, **functions)
