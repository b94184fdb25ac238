"""The process that weighs jobs for `FootprintMeter`, and the method.

**What is measured** is the growth of the process's address space: the peak of a run (VmPeak) less what was
mapped before it (VmSize), less the result. The peak of resident memory (VmHWM) would seem nearer the truth,
but the kernel counts it loosely: six runs of one convolution scattered over 150 KiB with two processors,
and the error grows with their number (32 pages and more for each). Addresses are counted to the page: the
same runs agreed within 20 KiB, and with arithmetic. They tell memory because the allocator is told to map
every block of a page or more for itself and unmap it when it is freed (`footprint`), so that no block is
cut unseen from what is free.
Whatever is reserved counts, touched or not; huge pages change nothing. VmPeak cannot be reset, so before a
run a region of no access fills the distance between VmSize and VmPeak: any further page raises the peak.

**What a run keeps** counts too: an arena that lives on from the first run to the next is missing in the
growth of the second. What the libraries keep for all that come later does not count: machine code compiled
for the shape (executable memory: 0.25 to 3 MiB a convolution, seen) and MKL's pool of packing buffers, which
every matrix product shares (8 MiB for each thread reserved, 1 MiB touched, seen).

**The cap** is on data (RLIMIT_DATA: private writable memory): what there is before the run, the result, the
limit, and an allowance for code. An allocation beyond it fails, which PyTorch reports as an exception; MKL
falls back to a product without packing; a compiler of code may crash. RLIMIT_AS would also count libraries,
files and reserved regions that nobody can write to. A library that has failed so may fail ever after: once
oneDNN could not execute the weight gradient of 15x15 taps within 16 MiB, it executed nothing of 15x15 taps
with any limit. So a process in which any allocator but PyTorch's has failed says that it is spent, and gets
no more jobs.
"""

import collections
import contextlib
import ctypes
import dataclasses
import gc
import itertools
import json
import mmap
import os
import re
import resource
import select
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO, cast

import torch

from mucudnn.algorithms import GradientSum, named
from mucudnn.algorithms.libraries import library_of_torch
from mucudnn.algorithms.own import operands
from mucudnn.algorithms.workers import run_on_workers
from mucudnn.backends.base import Job, Prepared
from mucudnn.backends.cpu.footprint import adopt_settings
from mucudnn.errors import CompilationError
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.sizes import format_bytes

NOISE_BYTES = 64 * 2**10
"""What a run grows by, at most, without taking anything: small objects of Python and oneDNN (40 KiB seen)."""

REMEMBERED_BYTES = 2**20
"""What libraries remember of a new problem at most, on the heap (0.2 MiB an op seen)."""

ALLOWANCE_BYTES = 4 * 2**20
"""By how much a run may pass its limit before it fails: room for compiled code, up to 3 MiB for an op."""

_NO_CAP = 2**63 - 1
"""The largest cap that the kernel takes."""

_RUNS_TO_COMPILE = 3
"""Of a loop: TorchScript watches the first one and compiles at the second."""

_ATTEMPTS = 4
"""First runs that may fail before a job is over its limit, if libraries kept some of its room each time."""

_STEADY_RUNS = 3
"""Further runs at most until one passes in which the libraries keep nothing new."""

_WRITABLE = re.compile("^([0-9a-f]+)-([0-9a-f]+) (rw.p)", re.MULTILINE)
"""Lines of the kernel's list of what is mapped: of a thousand, most are parts of libraries."""

_LACK_OF_MEMORY = re.compile("alloc|memory|primitive|new thread", re.IGNORECASE)
"""In messages for want of memory: "can't allocate memory", "bad_alloc", "could not create a primitive"."""


_OF_PYTORCH = "DefaultCPUAllocator"
"""In messages of PyTorch's allocator, whose failures leave nothing behind."""


class _OverLimitError(Exception):
    """A run failed under its cap for want of memory; `is_clean` says whether all still works."""

    def __init__(self, is_clean: bool) -> None:
        self.is_clean = is_clean
        super().__init__(is_clean)


def main() -> None:
    """Answer requests from standard input, one JSON text a line, until it ends or none comes for a while.

    The one argument of the program says how many seconds that is.
    """
    idle_s = float(sys.argv[1])
    replies = _own_output()
    meter = _Scales()
    gc.disable()  # what a collection frees during a run would hide what the run takes
    _say(replies, {"failed": fault} if (fault := meter.fault()) else {"ready": True})
    asked = select.poll()
    asked.register(sys.stdin, select.POLLIN)
    while asked.poll(idle_s * 1000) and (line := sys.stdin.readline()):
        _say(replies, _answer(meter, json.loads(line), replies))


def _own_output() -> TextIO:
    """Return standard output for the replies alone; whatever else is printed goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _say(replies: TextIO, message: Mapping[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _answer(meter: "_Scales", request: Mapping[str, object], replies: TextIO) -> Mapping[str, object]:
    limit_bytes = cast("int | None", request["limit_bytes"])
    try:
        meter.adopt(cast("Mapping[str, object]", request["settings"]))
        job = Job(str(request["function"]), cast("Mapping[str, object]", request["payload"]))
        prepared = job.prepare()
        meter.freeze_modules()
        if limit_bytes is not None:
            _say(replies, {"capped": True})
        seen = meter.weigh(prepared, limit_bytes)
        if meter.has_kept_more:  # a library may have, once in a while (1.1 MiB seen); the job would again
            prepared = job.prepare()
            seen = min(seen, meter.weigh(prepared, limit_bytes))
    except _OverLimitError:
        return {"n_bytes": None, "seen_bytes": None, "spent": meter.is_spent}
    except Exception as error:  # noqa: BLE001  # whatever a job raises is its owner's to judge
        is_for_now = isinstance(error, CompilationError)
        return {"failed": f"{type(error).__name__}: {error}", "for_now": is_for_now, "spent": meter.is_spent}
    return {"n_bytes": _at_least(NOISE_BYTES, seen), "seen_bytes": seen, "spent": meter.is_spent}


class _Scales:
    """Weighs prepared jobs in this process; holds nothing but handles of libraries.

    Attributes:
        has_kept_more: whether the last job's libraries kept more than they remember of a problem.
        is_spent: whether a library has failed in this process for want of memory.
    """

    def __init__(self) -> None:
        self.has_kept_more = False
        self.is_spent = False
        self._libc = ctypes.CDLL(None)
        self._mkl = _MklPool()
        self._n_modules = 0
        _wake_libraries()
        self.freeze_modules()

    def fault(self) -> str | None:
        """Return what is wrong if a known amount is not weighed right, in a sentence; None if nothing is."""
        try:
            seen = self.weigh(_KnownAmount(2**24), None)
        except (KeyError, OSError) as error:
            return f"the kernel does not tell a process's memory: {error!r}."
        if abs(seen - 2**24) > NOISE_BYTES:
            return f"16 MiB are seen as {format_bytes(seen)}; the allocator must be glibc's, as set here."
        return None

    def adopt(self, settings: Mapping[str, object]) -> None:
        """Compute as the process does that has these settings; its threads exist afterwards."""
        threads = torch.get_num_threads()
        adopt_settings(settings)
        if threads != torch.get_num_threads():
            _wake_libraries()

    def freeze_modules(self) -> None:
        """Keep collections from visiting what was imported, which may be a million objects and a second."""
        if len(sys.modules) != self._n_modules:
            self._n_modules = len(sys.modules)
            gc.freeze()

    def weigh(self, prepared: Prepared, limit_bytes: int | None) -> int:
        """Return the bytes that a run of `prepared` takes beside its operands and its result.

        Raises:
            _OverLimitError: it failed for want of memory.
        """
        before = self._mapped()
        run = self._first_run(prepared, limit_bytes, before)
        for _ in range(_STEADY_RUNS):
            run = self._run(prepared, limit_bytes, run.after)
            if run.shared_bytes == 0:
                break
        kept = run.after.held_bytes - before.held_bytes
        self.has_kept_more = kept > REMEMBERED_BYTES
        return max(0, run.grown_bytes) + _at_least(REMEMBERED_BYTES, kept)

    def _first_run(
        self, prepared: Prepared, limit_bytes: int | None, before: "_Mapped", attempts: int = _ATTEMPTS
    ) -> "_Run":
        """Run once, and again if libraries took for good the room in which the run failed."""
        try:
            return self._run(prepared, limit_bytes, before)
        except _OverLimitError:
            now = self._mapped()
            if attempts == 1 or now.shared_bytes <= before.shared_bytes:
                raise
        return self._first_run(prepared, limit_bytes, now, attempts - 1)

    def _run(self, prepared: Prepared, limit_bytes: int | None, mapped: "_Mapped") -> "_Run":
        """Run once under the cap, with so much mapped before."""
        with _peak_at_size():
            before = _status()["VmSize"]
            try:
                with _capped(limit_bytes, prepared.result_bytes), torch.no_grad():
                    result = prepared.run()
            except _OverLimitError as error:
                self.is_spent = self.is_spent or not error.is_clean
                raise
            grown = _status()["VmPeak"] - before - prepared.result_bytes
        del result
        after = self._mapped()
        shared = after.shared_bytes - mapped.shared_bytes
        return _Run(grown - max(0, shared), shared, after)

    def _mapped(self) -> "_Mapped":
        gc.collect()
        self._libc.malloc_trim(0)
        pool = self._mkl.n_bytes()
        mapped = _mapped_bytes()
        return _Mapped(mapped.get("rw-p", 0) - pool, mapped.get("rwxp", 0) + pool)


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """What is mapped between runs.

    Attributes:
        held_bytes: writable memory that is neither code nor MKL's.
        shared_bytes: what libraries keep for whatever comes later, compiled code and MKL's pool.
    """

    held_bytes: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class _Run:
    """What one run did to the address space.

    Attributes:
        grown_bytes: by how much it grew at most, less the result and what libraries took for good.
        shared_bytes: what they took for good, or gave back if negative.
        after: what is mapped then.
    """

    grown_bytes: int
    shared_bytes: int
    after: _Mapped


class _KnownAmount:
    """A job that takes a known number of bytes."""

    result_bytes = 0

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes

    def run(self) -> None:
        """Take them, touch them, and give them back."""
        torch.zeros(self._n_bytes, dtype=torch.uint8)


class _MklPool:
    """The memory that MKL keeps from one matrix product to the next; none if torch is built without MKL."""

    def __init__(self) -> None:
        library = library_of_torch()
        names = ("mkl_serv_mem_stat", "MKL_Mem_Stat")  # linked into torch, or a library beside it
        self._query = next((getattr(library, name) for name in names if hasattr(library, name)), None)
        if self._query is not None:
            self._query.restype = ctypes.c_int64

    def n_bytes(self) -> int:
        """Return its size."""
        n_buffers = ctypes.c_int()
        return 0 if self._query is None else int(self._query(ctypes.byref(n_buffers)))


@contextlib.contextmanager
def _peak_at_size() -> Iterator[None]:
    """Raise the process's size to its peak, by a region that nothing can touch."""
    status = _status()
    missing = status["VmPeak"] - status["VmSize"]
    if missing == 0:
        yield
        return
    with mmap.mmap(-1, missing, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0):
        yield


@contextlib.contextmanager
def _capped(limit_bytes: int | None, result_bytes: int) -> Iterator[None]:
    """Hold this process to the present memory, a result, a limit and the allowance.

    Raises:
        _OverLimitError: the body failed for want of memory, and there is a limit.
    """
    if limit_bytes is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    cap = _status()["VmData"] + result_bytes + limit_bytes + ALLOWANCE_BYTES
    cap = min([cap, _NO_CAP, *(end for end in (soft, hard) if end != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (cap, hard))
    try:
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    except (MemoryError, OSError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, MemoryError) or _LACK_OF_MEMORY.search(text):
            raise _OverLimitError(is_clean=_OF_PYTORCH in text.partition("\n")[0]) from None
        raise


def _status() -> dict[str, int]:
    """Return what the kernel tells of this process's memory, in bytes, by the kernel's names."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 2**10 for line in lines if line.startswith("Vm")}


def _mapped_bytes() -> Mapping[str, int]:
    """Return the bytes mapped in this process that can be written to, by their access, as in "rw-p"."""
    totals: dict[str, int] = collections.defaultdict(int)
    for start, end, access in _WRITABLE.findall(Path("/proc/self/maps").read_text()):
        totals[access] += int(end, 16) - int(start, 16)
    return totals


def _at_least(floor_bytes: int, n_bytes: int) -> int:
    return n_bytes if n_bytes > floor_bytes else 0


def _wake_loops() -> None:
    """Run each loop of the tiled algorithms, whose compiler works for the first runs of all."""
    for name, op in itertools.product(("winograd4", "winograd4_k1"), ConvOp):
        problem = ConvProblem(op, 1, 2, 2, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1))
        algorithm, (first, second, _) = named(name), operands(problem, torch.Generator())
        assert algorithm is not None
        buffer = torch.zeros(algorithm.workspace_bytes(problem), dtype=torch.uint8)
        for _ in range(_RUNS_TO_COMPILE):
            if op is ConvOp.WGRAD:
                sums, into = algorithm.sum_kernel(problem, buffer), GradientSum(torch.zeros(2, 2, 3, 3))
                sums.add(first, second, into, first=True)
                sums.finish(into)
            else:
                slices = algorithm.slice_kernel(problem, buffer)
                slices.prepare(second)
                slices.run(first, second, torch.zeros(1, 2, 4, 4), None)


def _wake_libraries() -> None:
    """Have every library start its threads and take what it keeps once, so that no job pays for it."""

    def multiply() -> None:
        for dtype in (torch.float32, torch.float64):
            square = torch.ones(320, 320, dtype=dtype)
            torch.mm(square, square)

    torch.ones(2**18).add_(1)
    for images in (4, 1):  # oneDNN, and what PyTorch takes for one small image
        torch.conv2d(torch.ones(images, 16, 16, 16), torch.ones(16, 16, 3, 3))
    _wake_loops()
    multiply()
    run_on_workers([multiply] * torch.get_num_threads())


if __name__ == "__main__":
    main()
