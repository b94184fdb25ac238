"""libcudnn, loaded once per process; what would make it fail or abort is met by a sentence before."""

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

from mucudnn.backends.cudnn.constants import Status
from mucudnn.backends.cudnn.discovery import System, cublaslt_is_loaded, mapped_path, opened_cudnn
from mucudnn.errors import BackendError
from mucudnn.locks import ForkSafeLock

LEAST_VERSION = 90800
"""Device descriptions came with cuDNN 9.8."""

REMEDY = "Install it with pip install nvidia-cudnn-cu13 nvidia-cublas, or install a CUDA build of torch."

_HINTS = {
    Status.NOT_INITIALIZED: "There is no device, or it could not be initialised.",
    Status.SUBLIBRARY_VERSION_MISMATCH: (
        "Sub-libraries of two versions of cuDNN are mixed: another copy of cuDNN is found beside the one "
        "that was opened, by LD_LIBRARY_PATH or in the system's directories; remove one of them."
    ),
    Status.SUBLIBRARY_LOADING_FAILED: (
        "A sub-library of cuDNN could not be loaded; the driver that it needs (libcuda.so.1) may be missing."
    ),
}
_LACK_OF_MEMORY = (Status.HOST_ALLOCATION_FAILED, Status.DEVICE_ALLOCATION_FAILED)
_ERROR_TEXT_BYTES = 1024

# Only a C type says what such a function returns: a status, a number or a text.
_Function = Callable[..., Any]


class CudnnError(BackendError):
    """cuDNN refused a call.

    Attributes:
        status: cuDNN's status; its thousands are the class of the failure.
        what: the call, as a noun.
        name: cuDNN's own name of the status.
        detail: cuDNN's text on its last error; often empty.
    """

    def __init__(self, status: int, what: str, name: str, detail: str) -> None:
        self.status = status
        self.what = what
        self.name = name
        self.detail = detail
        super().__init__(status, what, name, detail)

    def __str__(self) -> str:
        told = f": {self.detail}" if self.detail else ""
        text = f"{self.what} must succeed, but cuDNN gave {self.name} ({self.status}){told}."
        hint = next((hint for status, hint in _HINTS.items() if status == self.status), None)
        return f"{text} {hint}" if hint else text

    @property
    def is_not_supported(self) -> bool:
        """Whether the status means "not here": not supported, or an engine that fails of itself.

        Not where the set-up is broken, the caller is mistaken, memory is lacking, or the device fails.
        """
        is_of_engine = Status.NOT_SUPPORTED <= self.status < Status.EXECUTION_FAILED
        return is_of_engine and not self.is_for_lack_of_memory

    @property
    def is_for_lack_of_memory(self) -> bool:
        """Whether the host or the device had no memory left."""
        return self.status in _LACK_OF_MEMORY


@dataclasses.dataclass(frozen=True, eq=False)
class Library:
    """A loaded libcudnn, its functions at hand; all but the last two return a status, 0 for success.

    Addresses and pointers are passed as ints; None is the null pointer.

    Attributes:
        version: as cuDNN counts: 91900 is 9.19.0.
        path: the file that is loaded.
        create_descriptor: (kind, address of a slot for the descriptor).
        destroy_descriptor: (descriptor).
        finalize: (descriptor).
        set_attribute: (descriptor, attribute, type, count, address of the values).
        get_attribute: (descriptor, attribute, type, requested count, address of the count, address of the
            values).
        execute: (handle, execution plan, variant pack).
        create_handle: (address of a slot for the handle).
        set_stream: (handle, stream).
        error_string: (status), gives cuDNN's name of it.
        last_error_string: (buffer, its size in bytes), fills the buffer.
        retired: addresses of plans that nobody has any more, with what they refer to, until the next one is
            made: see `Descriptor`.
    """

    version: int
    path: str
    create_descriptor: Callable[[int, int], int]
    destroy_descriptor: Callable[[int], int]
    finalize: Callable[[int], int]
    set_attribute: Callable[[int, int, int, int, int | None], int]
    get_attribute: Callable[[int, int, int, int, int | None, int | None], int]
    execute: Callable[[int | None, int, int], int]
    create_handle: Callable[[int], int]
    set_stream: Callable[[int | None, int | None], int]
    error_string: Callable[[int], bytes]
    last_error_string: Callable[["ctypes.Array[ctypes.c_char]", int], None]
    retired: list[tuple[int, object]] = dataclasses.field(default_factory=list, init=False)

    def destroy_retired(self) -> None:
        """Destroy the plans that nobody has any more; no CUDA graph may be captured meanwhile."""
        while self.retired:
            try:
                pointer, _children = self.retired.pop()
            except IndexError:  # another thread took the last one
                return
            self.destroy_descriptor(pointer)

    def check(self, status: int, what: str) -> None:
        """Return if `status` is that of success.

        Args:
            status: what a function of the library returned.
            what: the call, as the first words of a sentence.

        Raises:
            CudnnError: the status is any other.
        """
        if status:
            raise self._error(status, what)

    def _error(self, status: int, what: str) -> CudnnError:
        buffer = ctypes.create_string_buffer(_ERROR_TEXT_BYTES)
        self.last_error_string(buffer, _ERROR_TEXT_BYTES)
        name = self.error_string(status).decode(errors="replace")
        return CudnnError(status, what, name, buffer.value.decode(errors="replace").strip().rstrip("."))


_lock = ForkSafeLock()


def load_library() -> Library:
    """Return cuDNN as this process has it: one copy, whoever asks and from whichever thread.

    Raises:
        BackendError: there is none that can be used here; the sentence has the remedy.
    """
    with _lock:
        return _loaded()


@functools.cache
def _loaded() -> Library:
    return library_of(System())


def library_of(system: System) -> Library:
    """Return the cuDNN that `system` offers, after a look at all that would make it fail or end the process.

    Raises:
        BackendError: not Linux, no library, a version that is none of 9.8 and later, or no cublasLt.
    """
    if system.platform != "linux":
        raise BackendError(f"cuDNN can be used on Linux only, but this system is {system.platform!r}.")
    # A CUDA build of torch brings its own cuDNN; one that is opened before it would mix with it.
    system.import_torch()
    opened = opened_cudnn(system)
    if opened is None:
        raise BackendError(f"The library libcudnn.so.9 must be installed, but it is not found. {REMEDY}")
    path = mapped_path(opened)
    version = _checked_version(opened, path)
    _check_cublaslt(system, opened)
    return _declared(opened, version, path)


def _checked_version(opened: ctypes.CDLL, path: str) -> int:
    version = int(_function(opened, "cudnnGetVersion", ctypes.c_size_t)())
    if not LEAST_VERSION <= version < 100000:
        raise BackendError(
            f"cuDNN must be of version 9, and 9.8 or later, but {path} is {_version_text(version)}. {REMEDY}"
        )
    return version


def _check_cublaslt(system: System, opened: ctypes.CDLL) -> None:
    """Return once the cublasLt is loaded without which cuDNN's first query aborts the process."""
    cuda_major = int(_function(opened, "cudnnGetCudartVersion", ctypes.c_size_t)()) // 1000
    if not cublaslt_is_loaded(system, f"libcublasLt.so.{cuda_major}"):
        raise BackendError(
            f"The library libcublasLt.so.{cuda_major}, without which cuDNN aborts the process, must be "
            f"installed, but it is not found. {REMEDY}"
        )


def _version_text(version: int) -> str:
    """Return 9.19.0 for 91900, and 8.9.2 for 8902, as cuDNN counted before version 9."""
    thousand, hundred = (10000, 100) if version >= 90000 else (1000, 100)
    return f"{version // thousand}.{version % thousand // hundred}.{version % hundred}"


def _declared(opened: ctypes.CDLL, version: int, path: str) -> Library:
    pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64

    def function(name: str, *arguments: object, result: object = number) -> _Function:
        return _function(opened, name, result, *arguments)

    return Library(
        version=version,
        path=path,
        create_descriptor=function("cudnnBackendCreateDescriptor", number, pointer),
        destroy_descriptor=function("cudnnBackendDestroyDescriptor", pointer),
        finalize=function("cudnnBackendFinalize", pointer),
        set_attribute=function("cudnnBackendSetAttribute", pointer, number, number, count, pointer),
        get_attribute=function("cudnnBackendGetAttribute", pointer, number, number, count, pointer, pointer),
        execute=function("cudnnBackendExecute", pointer, pointer, pointer),
        create_handle=function("cudnnCreate", pointer),
        set_stream=function("cudnnSetStream", pointer, pointer),
        error_string=function("cudnnGetErrorString", number, result=ctypes.c_char_p),
        last_error_string=function("cudnnGetLastErrorString", ctypes.c_char_p, ctypes.c_size_t, result=None),
    )


def _function(opened: ctypes.CDLL, name: str, result: object, *arguments: object) -> _Function:
    """Return a function with its types declared; undeclared, ctypes would cut a pointer to 32 bits."""
    try:
        function = getattr(opened, name)
    except AttributeError as error:
        raise BackendError(
            f"cuDNN must have the function {name}, but {mapped_path(opened)} lacks it."
        ) from error
    function.argtypes, function.restype = arguments, result
    return cast(_Function, function)
