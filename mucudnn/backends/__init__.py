"""The kinds of device on which convolutions are measured and run."""

import functools

import torch

from mucudnn.backends.base import Backend, Job, PartKernel, PartSumKernel, Queue
from mucudnn.errors import BackendError, OptionError

__all__ = ["BACKENDS", "Backend", "Job", "PartKernel", "PartSumKernel", "Queue", "backend_for", "backend_of"]

BACKENDS = ("cpu",)
"""Names of the backends; also the prefixes of their algorithms' ids."""


@functools.cache
def _backend(name: str) -> Backend:
    from mucudnn.backends.cpu.backend import CpuBackend  # not loaded before it is needed

    if name != "cpu":
        raise OptionError(
            f"backend must be one of 'auto', {', '.join(map(repr, BACKENDS))}, but got {name!r}."
        )
    return CpuBackend()


def backend_of(algorithm: str) -> Backend:
    """Return the backend that runs `algorithm`, one for the whole process.

    Raises:
        OptionError: the id's prefix names no backend.
    """
    return _backend(algorithm.partition(":")[0])


def backend_for(name: str, device: torch.device) -> Backend:
    """Return the backend called `name`, or with "auto" the one for tensors on `device`.

    Raises:
        OptionError: there is no backend of that name.
        BackendError: no backend serves the device.
    """
    if name != "auto":
        return _backend(name)
    if device.type not in BACKENDS:
        raise BackendError(
            f"Convolutions can be tuned on {', '.join(BACKENDS)}, but the model lies on {device}."
        )
    return _backend(device.type)
