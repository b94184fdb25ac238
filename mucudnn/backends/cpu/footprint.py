"""How much memory a piece of work takes beside its operands and its result, seen from another process."""

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import IO, cast

import torch

from mucudnn.backends.base import Job
from mucudnn.errors import BackendError, CompilationError, UnmeasuredError, UnweighableError
from mucudnn.interruptions import pass_on_interruption
from mucudnn.locks import ForkSafeLock, unforked_lock

CHILD_MODULE = "mucudnn.backends.cpu.footprint_child"

_ALLOCATOR_SETTINGS = ":".join(
    (
        "glibc.malloc.mmap_threshold=4096",  # blocks from a page on are mapped singly, unmapped when freed
        "glibc.malloc.trim_threshold=0",
        "glibc.malloc.top_pad=0",
        "glibc.malloc.arena_max=1",
        f"glibc.pthread.stack_cache_size={2**40}",  # OpenMP ends and starts threads at will
    )
)
"""glibc's, so that its free lists hold nothing large (0.1 MiB seen) and addresses tell memory."""

_FLAGS = (
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "utils.deterministic.fill_uninitialized_memory",
)
"""Attributes of torch that decide which code computes."""

_IDLE_S = 60.0
"""Seconds without a job after which a child, which holds some 0.3 GB, ends."""

_START_TIMEOUT_S = 120.0
"""Seconds after which a child that has not greeted is taken for stuck; it takes two to four."""

_starting = unforked_lock()
"""Held while a child starts: a process forked meanwhile would keep pipes open whose end is waited for."""

_DEATHS_BY_LACK_OF_MEMORY = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What a job takes beside its operands and its result.

    Attributes:
        n_bytes: the most bytes that it holds at once, less its result's, or 0 if that is no more than a run
            without workspace is seen to take; it may lie above the limit by the allowance. None if it failed
            for want of memory under the limit.
        seen_bytes: the same as it was seen, for sums with what else is taken.
    """

    n_bytes: int | None
    seen_bytes: int | None


class FootprintMeter:
    """Weighs jobs one at a time in a child process, in which the kernel holds them to a limit.

    The child starts with the first job (two to four seconds), and ends when it has had none for a minute;
    once it has had none for half of that, the next job has a new one.
    What is measured, and how, stands in `footprint_child`. All methods may be called from any thread. A
    process forked from this one gets a child of its own. Nothing is left behind when the meter is closed,
    collected or the interpreter ends.

    Args:
        timeout_s: seconds after which a job is taken for stuck, and its child killed.
        idle_s: seconds without a job after which the child ends.

    Raises:
        UnweighableError: the system is not Linux: nothing else here caps memory and tells its peak.
    """

    def __init__(self, timeout_s: float = 600.0, idle_s: float = _IDLE_S) -> None:
        if not sys.platform.startswith("linux"):
            raise UnweighableError(
                f"Workspaces can be measured on Linux only, but this is {sys.platform}: its kernel neither "
                "caps a process's memory nor tells the peak of it."
            )
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._lock = ForkSafeLock()
        self._child: _Child | None = None

    def measure(self, job: Job, limit_bytes: int | None) -> Footprint:
        """Return what `job` takes; it runs under a cap of `limit_bytes`, or none if that is None.

        Raises:
            BackendError: the job cannot be prepared, fails for a reason other than memory, or is stuck.
            UnweighableError: nothing can be measured here.
        """
        request = {
            "function": job.function,
            "payload": dict(job.payload),
            "limit_bytes": limit_bytes,
            "settings": present_settings(),
        }
        with self._lock:
            return self._ask(job, request)

    def close(self) -> None:
        """End the child; a later `measure` starts another."""
        with self._lock:
            self._drop_child()

    def __enter__(self) -> "FootprintMeter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, job: Job, request: Mapping[str, object]) -> Footprint:
        child = self._taken_child()
        try:
            reply = child.ask(request, self._timeout_s)
        except _ChildDiedError as death:
            child.end()
            if death.under_cap:
                return Footprint(None, None)
            text = f"{job.function} could not be weighed: its process died: {death}."
            raise UnmeasuredError(text) from death
        except BaseException:
            child.end()  # a reply may be on its way, which is not the next job's
            raise
        self._drop_child()
        if reply["spent"]:
            child.end()
        else:
            self._child = child
        if "failed" in reply:
            kind = CompilationError if reply["for_now"] else BackendError
            raise kind(f"{job.function} could not be weighed: {reply['failed']}")
        n_bytes, seen_bytes = (cast("int | None", reply[name]) for name in ("n_bytes", "seen_bytes"))
        return Footprint(n_bytes, seen_bytes)

    def _taken_child(self) -> "_Child":
        """Return a child that is ready, and nobody else's: a signal handler gets another meanwhile."""
        child, self._child = self._child, None
        if child is not None and child.is_ours and child.is_ready:
            return child
        if child is not None:
            child.end()
        return _Child(self._idle_s)

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def present_settings() -> dict[str, object]:
    """Return the settings of torch in this process that decide how much memory a convolution takes."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "nnpack": torch._C._get_nnpack_enabled(),
        "flags": {path: attrgetter(path)(torch) for path in _FLAGS},
    }


def adopt_settings(settings: Mapping[str, object]) -> None:
    """Make the settings of this process those that `present_settings` gave in another."""
    torch.set_num_threads(cast("int", settings["threads"]))
    torch.set_deterministic_debug_mode(cast("int", settings["deterministic"]))
    torch._C._set_nnpack_enabled(cast("bool", settings["nnpack"]))
    for path, value in cast("Mapping[str, object]", settings["flags"]).items():
        owner, _, name = path.rpartition(".")
        setattr(attrgetter(owner)(torch), name, value)


class _ChildDiedError(Exception):
    """The child ended without a reply; `under_cap` says whether a lack of memory may be why."""

    def __init__(self, how: str, under_cap: bool) -> None:
        self.under_cap = under_cap
        super().__init__(how)


class _Child:
    """The process that runs the jobs, and the two pipes to it: a JSON text a line, each way."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._process, self._errors = _started(idle_s)
        self.end = weakref.finalize(self, _end, self._process, self._errors, os.getpid())
        self._owner = os.getpid()
        self._unread = b""
        self._errors_before_job = 0
        try:
            greeting = self._read(_START_TIMEOUT_S)
        except (_ChildDiedError, UnmeasuredError) as error:
            self.end()
            raise _unweighable(error) from error
        except BaseException:
            self.end()
            raise
        if "failed" in greeting:
            self.end()
            raise _unweighable(greeting["failed"])

    @property
    def is_ours(self) -> bool:
        """Whether this process started it, and not one from which this one was forked."""
        return self._owner == os.getpid()

    @property
    def is_ready(self) -> bool:
        """Whether it has not ended since the last job, and is not about to for want of one."""
        return self._process.poll() is None and time.monotonic() - self._heard_s < self._idle_s / 2

    def ask(self, request: Mapping[str, object], timeout_s: float) -> Mapping[str, object]:
        """Return the reply to `request`.

        Raises:
            _ChildDiedError: the child ended first.
            BackendError: there is none within `timeout_s` seconds.
        """
        self._errors_before_job = os.fstat(self._errors.fileno()).st_size
        try:
            _pipe(self._process.stdin).write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._death(under_cap=False) from None
        reply = self._read(timeout_s)
        return self._read(timeout_s, under_cap=True) if "capped" in reply else reply

    def _read(self, timeout_s: float, under_cap: bool = False) -> Mapping[str, object]:
        """Return the next message; a pipe's end or silence is an error, as in `ask`."""
        deadline = time.monotonic() + timeout_s
        pipe = _pipe(self._process.stdout).fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise UnmeasuredError(f"A job must end within {timeout_s:g} seconds, but this one did not.")
            received = os.read(pipe, 65536)
            if not received:
                raise self._death(under_cap)
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        self._heard_s = time.monotonic()
        return cast("Mapping[str, object]", json.loads(line))

    def _death(self, under_cap: bool) -> _ChildDiedError:
        """Return the error that says how the child died, which it did or is about to."""
        code = self._process.wait()
        how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        self._errors.seek(self._errors_before_job)
        last_words = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        by_lack = code >= 0 or -code in _DEATHS_BY_LACK_OF_MEMORY
        return _ChildDiedError(": ".join([how, *last_words]), under_cap and by_lack)


def _started(idle_s: float) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Return a new child, and the file that takes what it writes of its errors, which lives as long.

    Raises:
        UnweighableError: the system gives no file or no process.
    """
    try:
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
    except OSError as error:
        pass_on_interruption(error)
        raise _unweighable(f"no temporary file can be made: {error.strerror or error}") from error
    try:
        with _starting:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD_MODULE, str(idle_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
                bufsize=0,
                start_new_session=True,  # an interrupt from the keyboard is ours alone
            )
    except OSError as error:
        errors.close()
        pass_on_interruption(error)
        raise _unweighable(f"{sys.executable} cannot be run: {error.strerror}") from error
    return process, errors


def _unweighable(reason: object) -> UnweighableError:
    """Return the error that says why there is no child."""
    return UnweighableError(f"Workspaces cannot be measured here: {str(reason).removesuffix('.')}.")


def _end(process: subprocess.Popen[bytes], errors: IO[bytes], owner: int) -> None:
    """Kill the child and wait for it; in a process forked from its owner only let go of it."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # not this process's to wait for
    for file in (process.stdin, process.stdout, errors):
        _pipe(file).close()


def _pipe(file: IO[bytes] | None) -> IO[bytes]:
    return cast("IO[bytes]", file)


def _environment() -> dict[str, str]:
    """Return this process's environment, with its import path, and with glibc's allocator, set as above."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_")  # glibc's older names of the settings above
    }
    preloaded = [
        library
        for library in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
        if "malloc" not in Path(library).name  # jemalloc, tcmalloc, mimalloc: they keep what is freed
    ]
    return {
        **kept,
        "GLIBC_TUNABLES": _ALLOCATOR_SETTINGS,
        "LD_PRELOAD": ":".join(preloaded),
        "THP_MEM_ALLOC_ENABLE": "0",  # torch would reserve up to 2 MiB more for each tensor, to align it
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
    }
