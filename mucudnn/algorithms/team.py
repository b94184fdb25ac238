"""Calls on a team of OpenMP's threads: the very ones on which PyTorch's own operations run.

After an operation these threads stay awake for milliseconds. A parallel region of the same OpenMP finds them
awake and in their places, where any other thread would have to share the cores with them.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

from mucudnn.algorithms.libraries import library_of_torch

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""A thread's share of a region, called with the GIL held."""


class Team:
    """The OpenMP that PyTorch computes with, through GNU's interface; others offer that too.

    Functions that wait for other threads release the GIL, which those need. All others keep it: they take
    less time than to get it back.
    """

    def __init__(self, library: ctypes.CDLL, mkl: ctypes.CDLL) -> None:
        """Look up all that a team needs.

        Args:
            library: that has OpenMP's functions.
            mkl: that has MKL's, if PyTorch has one.

        Raises:
            AttributeError: it lacks one of them.
        """
        parallel = ctypes.CFUNCTYPE(None, _Body, ctypes.c_void_p, ctypes.c_uint)
        self._start = parallel(("GOMP_parallel_start", library))
        self._end = ctypes.CFUNCTYPE(None)(("GOMP_parallel_end", library))
        number = ctypes.PYFUNCTYPE(ctypes.c_int)
        self._thread_number = number(("omp_get_thread_num", library))
        self._size = number(("omp_get_num_threads", library))
        self._in_parallel = number(("omp_in_parallel", library))
        self._set_threads = ctypes.PYFUNCTYPE(None, ctypes.c_int)(("omp_set_num_threads", library))
        self._set_mkl_threads = _mkl_setter(mkl)

    @property
    def is_free(self) -> bool:
        """Whether this thread is outside of any parallel region, so that it can have a team."""
        return not self._in_parallel()

    @property
    def is_that_of_torch(self) -> bool:
        """Whether PyTorch obeys this OpenMP; a process may have loaded several."""
        threads = torch.get_num_threads()
        other = 1 if threads > 1 else 2
        try:
            self._set_threads(other)  # of this thread only
            return torch.get_num_threads() == other
        finally:
            self._set_threads(threads)

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run call i on thread i of a team, the caller being thread 0, each with one intra-op thread.

        A team that OpenMP's settings make smaller runs all of them nevertheless, some in turn. What a signal
        handler raises in the caller is raised when all other calls have ended.

        Args:
            calls: they raise nothing.
        """

        def share(_: object = None) -> None:
            self._run_in_turn(calls[self._thread_number() :: self._size()])

        body, size = _Body(share), _team_size(len(calls))
        start, end = self._start, self._end
        # A region begun by GNU's older pair of functions leaves the caller in Python, where signals raise.
        try:
            start(body, None, size)  # the first call inside: no signal is handled before it
            share()
        finally:
            end()

    def _run_in_turn(self, calls: Sequence[Callable[[], None]]) -> None:
        torch.get_num_threads()  # PyTorch sets a thread's number when it first asks; that must be behind us
        self._set_threads(1)  # in this region only
        before = self._set_mkl_threads(1)  # of this thread, for good
        try:
            for call in calls:
                call()
        finally:
            self._set_mkl_threads(before)


@functools.cache
def team_of_torch() -> Team | None:
    """Return the team of PyTorch's OpenMP; None where it has none, or one that does not speak GNU's language.

    Names are looked up as the linker does: first among what was loaded for all, such as a library that
    LD_PRELOAD puts in the place of PyTorch's own, then among what PyTorch depends on.
    """
    own = library_of_torch()
    if own is None:
        return None
    for library in (ctypes.CDLL(None), own):
        try:
            team = Team(library, mkl=own)
        except AttributeError:
            continue
        if team.is_that_of_torch:
            return team
    return None


def _team_size(calls: int) -> int:
    """Return the number of threads for so many calls.

    At least PyTorch's own number: GNU's OpenMP ends the threads that a smaller team has no use for, and the
    next operation would have to start them again. A team of one, which is the caller, leaves them alone.
    """
    return calls if calls <= 1 else max(calls, torch.get_num_threads())


def _mkl_setter(library: ctypes.CDLL) -> Callable[[int], int]:
    """Return the function that sets this thread's number in MKL and returns that before (0: the process's).

    `torch.set_num_threads` sets it, and MKL then prefers it to OpenMP's.
    """
    try:
        return ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int)(("MKL_Set_Num_Threads_Local", library))
    except AttributeError:
        return lambda _: 0
