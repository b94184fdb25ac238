"""What a time measured on this processor depends on."""

import contextlib
import functools
import os
import platform
import re
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mucudnn.algorithms import REVISION
from mucudnn.algorithms.compiled import description
from mucudnn.algorithms.processor import processor_facts
from mucudnn.algorithms.scripts import interpreter
from mucudnn.algorithms.workers import worker_scheme
from mucudnn.backends.cpu.spinning import ordinary_operation
from mucudnn.interruptions import pass_on_interruption
from mucudnn.profile import Environment

_PINNING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
"""With which OpenMP is told to keep each thread on processors of its own, the caller's too."""
_THREAD_VARIABLES = (
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "KMP_BLOCKTIME",
    "OMP_DYNAMIC",
    *_PINNING_VARIABLES,
)
_ALLOCATOR_VARIABLES = (
    "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE", "GLIBC_TUNABLES",
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_",
)  # fmt: skip
_LIBRARY_VARIABLES = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
)  # fmt: skip
"""With which oneDNN and MKL are told which instructions, and how many digits, they may use."""
_VARIABLES = (*_THREAD_VARIABLES, *_ALLOCATOR_VARIABLES, *_LIBRARY_VARIABLES)
_threads = torch.get_num_threads
_is_mkldnn_enabled = torch._C._get_mkldnn_enabled
_is_mkldnn_deterministic = torch._C._get_mkldnn_deterministic
_is_deterministic = torch._C._get_deterministic_algorithms
_precision = torch._C._get_fp32_precision_getter
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def present_environment() -> Environment:
    """Return the processor, the libraries and the settings of this process, as they are now."""
    return Environment("cpu", _device(), _software(), _policy(), _soft())


def present_flags() -> tuple[int | bool | str, ...]:
    """Return what a user may change at any time of the policy, in less than a microsecond.

    Whether denormals are flushed is not among it: PyTorch does not tell, and the environment finds out by
    computing. PyTorch's own attributes ask the same functions, six times as slowly.
    """
    return (
        _threads(),
        _is_mkldnn_enabled(),
        _is_mkldnn_deterministic(),
        _is_deterministic(),
        _precision("mkldnn", "conv"),
        _precision("mkldnn", "matmul"),
    )


def _device() -> dict[str, str]:
    facts = processor_facts()
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size")
    return {
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processors": str(len(usable_processors())),
        **_quota(),
        **{name: facts[name] for name in names if name in facts},
    }


def usable_processors() -> frozenset[int]:
    """Return the kernel's numbers of the processors that this process may use.

    They are those of the thread that asks; where OpenMP pins threads, that one too, to processors of their
    own, those of all threads.
    """
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    found = set(os.sched_getaffinity(0))
    if not any(name in os.environ for name in _PINNING_VARIABLES):
        return frozenset(found)
    _have_threads_begin(os.getpid(), torch.get_num_threads())
    for thread in _threads_of_this_process():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found |= os.sched_getaffinity(thread)
    return frozenset(found)


@functools.cache
def _have_threads_begin(process: int, threads: int) -> None:  # noqa: ARG001  # each process has its own
    """Have OpenMP begin its threads, once: it may pin them and the caller when it first has work for them."""
    with _disable_current_modes():
        ordinary_operation()()


def _threads_of_this_process() -> list[int]:
    try:
        return [int(path.name) for path in Path("/proc/self/task").iterdir()]
    except OSError as error:
        pass_on_interruption(error)
        return []


def _quota() -> dict[str, str]:
    """Microseconds of processors that a container may take in each period, and the period, if it is bound."""
    try:
        text = _QUOTA.read_text(encoding="ascii").strip()
    except OSError as error:
        pass_on_interruption(error)
        return {}
    return {} if text.startswith("max") else {"processor quota": text}


def _software() -> dict[str, str]:
    return {
        "algorithms": str(REVISION),
        "torch": torch.__version__,
        "oneDNN": _version_of("MKL-DNN"),
        "MKL": _version_of("Math Kernel Library Version"),
        "C compiler": description(),
    }


def _version_of(library: str) -> str:
    found = re.search(rf"{library} v?([\d.]+(?:-\w+)?)", torch.__config__.show())
    return found.group(1) if found else "none"


def _policy() -> dict[str, str]:
    backends, threads = torch.backends, torch.get_num_threads()
    return {
        "threads": str(threads),
        "loops": interpreter(),
        **({"workers": worker_scheme()} if threads > 1 else {}),
        "oneDNN": str(backends.mkldnn.enabled),
        "deterministic": str(torch.are_deterministic_algorithms_enabled() or backends.mkldnn.deterministic),
        "fp32 convolution": fp32_precision("conv"),
        "fp32 product": fp32_precision("matmul"),
        "flush denormals": str(_flushes_denormals()),
        **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def fp32_precision(kind: str) -> str:
    """Return how oneDNN may compute float32: "none" exactly, "bf16" or "tf32" with fewer digits.

    "ieee" is the same as "none", which stands in plans and stores: nobody has asked for fewer digits.

    Args:
        kind: "conv" or "matmul".
    """
    precision = str(getattr(torch.backends.mkldnn, kind).fp32_precision)
    return "none" if precision == "ieee" else precision


def _flushes_denormals() -> bool:
    return (torch.tensor([1e-310], dtype=torch.float64, device="cpu") * 1).item() == 0


def _soft() -> dict[str, str]:
    return {
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown",
    }
