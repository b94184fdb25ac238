"""The kinds of device on which convolutions are measured and run."""

import functools

import torch

from mucudnn.backends.base import Backend, Job, PartKernel, PartSumKernel, Queue
from mucudnn.errors import BackendError, OptionError
from mucudnn.locks import ForkSafeLock

__all__ = [
    "BACKENDS",
    "Backend",
    "Job",
    "PartKernel",
    "PartSumKernel",
    "Queue",
    "backend_for",
    "backend_name",
    "backend_named_by",
    "backend_of",
]

BACKENDS = ("cpu", "cudnn")
"""Names of the backends; also the prefixes of their algorithms' ids, but for `_OTHER_PREFIXES`."""

_OTHER_PREFIXES = {"cuda": "cudnn"}
"""Backends by the prefixes of ids that are not their own names: on a card not all is cuDNN's."""

_NO_CARD = "The backend 'cudnn' needs a CUDA build of torch and an NVIDIA GPU, but torch sees none."

_OF_DEVICES = {"cpu": "cpu", "cuda": "cudnn"}


def backend_name(device: torch.device) -> str | None:
    """Return the name of the backend for tensors on `device`, or None if there is none."""
    return _OF_DEVICES.get(device.type)


def backend_named_by(algorithm: str) -> str:
    """Return the name of the backend to which an id belongs, if there is such a backend."""
    prefix = algorithm.partition(":")[0]
    return _OTHER_PREFIXES.get(prefix, prefix)


_making = ForkSafeLock()


@functools.cache
def _backend(name: str, index: int) -> Backend:
    """Return the one backend of this process for a device; it is not loaded before it is needed."""
    with _making:  # two threads would otherwise make two, with a queue each for one stream
        return _made(name, index)


@functools.cache
def _made(name: str, index: int) -> Backend:
    if name == "cpu":
        from mucudnn.backends.cpu.backend import CpuBackend

        return CpuBackend()
    if not torch.cuda.is_available():
        raise BackendError(_NO_CARD)
    from mucudnn.backends.cudnn.backend import CudnnBackend

    return CudnnBackend.on(index)


def backend_of(algorithm: str, device: torch.device | None = None) -> Backend:
    """Return the backend that runs `algorithm` on `device`, one for the whole process.

    Without a device it is that of the current card.

    Raises:
        OptionError: the id's prefix names no backend.
        BackendError: the backend cannot be used on this machine.
    """
    return _backend_named(backend_named_by(algorithm), device)


def backend_for(name: str, device: torch.device) -> Backend:
    """Return the backend called `name`, or with "auto" the one for tensors on `device`.

    Raises:
        OptionError: there is no backend of that name.
        BackendError: no backend serves the device.
    """
    if name != "auto":
        return _backend_named(name, device)
    served = backend_name(device)
    if served is None:
        kinds = ", ".join(_OF_DEVICES)
        raise BackendError(f"Convolutions can be tuned on {kinds}, but the model lies on {device}.")
    return _backend_named(served, device)


def _backend_named(name: str, device: torch.device | None) -> Backend:
    if name not in BACKENDS:
        raise OptionError(
            f"backend must be one of 'auto', {', '.join(map(repr, BACKENDS))}, but got {name!r}."
        )
    return _backend(name, _index(device) if name == "cudnn" else 0)


def _index(device: torch.device | None) -> int:
    """Return the number of a card, the current one if none is named.

    Raises:
        BackendError: there is none.
    """
    if device is not None and device.type == "cuda" and device.index is not None:
        return device.index
    if not torch.cuda.is_available():
        raise BackendError(_NO_CARD)
    return torch.cuda.current_device()
