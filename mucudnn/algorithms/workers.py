"""Worker threads of this process: calls that run at the same time, each computing with one intra-op thread.

PyTorch's own threads meet once in every operation. Where a convolution is many short operations on a part
of the batch, threads that each compute parts of their own meet once per mini-batch instead.
"""

import collections
import contextlib
import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import torch

from mucudnn.algorithms.team import Team, team_of_torch

Result = TypeVar("Result")
Scheme = Literal["team", "pool"]

_LEAST_NORMAL = sys.float_info.min
"""Half of it is a denormal number."""


def run_on_workers(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run calls at the same time, each on a thread of its own, and return their results in order.

    The threads are a team of PyTorch's own OpenMP, which the caller is one of, or else a pool of this module
    (`worker_scheme` tells which). The same holds for both:

    * A call computes with one intra-op thread, whatever the caller's number is, without gradients and without
      autocast. It is in inference mode if the caller is, so that it may write wherever the caller may, and
      what it makes is what the caller would have made; it flushes denormal numbers if the caller does. What
      else is a thread's own, such as modes, default device and profiler of the caller, reaches calls that run
      in the caller's thread, and no others.
    * Afterwards the threads are as before, and nothing of a call is kept.
    * An exception that a signal handler raises in the caller, such as KeyboardInterrupt, is raised when all
      calls have ended, since they may write to the caller's tensors; a call that runs in the caller's thread
      ends with it.
    * A second caller, of another thread, waits until the first has its results. One of the calls, or a signal
      handler that interrupts it, may use this function too: its calls run in turn, in its own thread.

    Args:
        calls: any number; none of them may wait for another, nor for another caller of this function.

    Raises:
        BaseException: the first in the order of `calls` that one of them has raised, after all have ended.
    """
    return _workers.run(calls)


def worker_scheme() -> Scheme:
    """Return on which threads `run_on_workers` would run calls of this thread: times depend on it.

    "team" where PyTorch computes with GNU's OpenMP, or one that offers its interface. "pool" elsewhere, in a
    forked child, where OpenMP's threads do not exist but are waited for, and inside of a parallel region.
    """
    return _workers.scheme


class Workers:
    """The workers of one process: a team where it can have one, and else a pool."""

    def __init__(self, find_team: Callable[[], Team | None]) -> None:
        self._begin(find_team)

    def begin_without_team(self) -> None:
        """Begin anew in a forked child, which has the threads of its parent by name only."""
        self._begin(lambda: None)

    @property
    def scheme(self) -> Scheme:
        """On which threads calls of this thread would run."""
        return "pool" if self._free_team() is None else "team"

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run calls as `run_on_workers` does."""
        caller = _State.of_this_thread()
        tasks = [_Task(call, caller) for call in calls]
        if _this_thread.is_worker:
            _run_in_turn(tasks)
        elif tasks:
            self._run_at_once(tasks)
        return [task.take() for task in tasks]

    def _begin(self, find_team: Callable[[], Team | None]) -> None:
        self._find_team = find_team
        self._pool = _Pool()
        # Whoever interrupts the caller in its own thread, such as a signal handler, may run calls as well.
        self._turn = threading.RLock()

    def _free_team(self) -> Team | None:
        team = self._find_team()
        return team if team is not None and team.is_free else None

    def _run_at_once(self, tasks: "Sequence[_Task[Result]]") -> None:
        with self._turn:
            team = self._free_team()
            if team is None:
                self._pool.run(tasks)
            else:
                team.run([task.run for task in tasks])


class _State(NamedTuple):
    """What of a thread a call changes, or takes over from its caller."""

    is_worker: bool
    is_inference: bool
    has_gradients: bool
    is_autocast: bool
    flushes_denormals: bool

    @classmethod
    def of_this_thread(cls) -> "_State":
        """Return the settings that this thread has now."""
        return cls(
            _this_thread.is_worker,
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            _flushes_denormals(),
        )

    def of_a_worker(self) -> "_State":
        """Return the state in which this thread's calls run."""
        return self._replace(is_worker=True, has_gradients=False, is_autocast=False)

    def set(self) -> None:
        """Set this thread to it, all but inference mode, which PyTorch sets for a context only."""
        _this_thread.is_worker = self.is_worker
        torch.set_grad_enabled(self.has_gradients)
        torch.set_autocast_enabled("cpu", self.is_autocast)
        if self.flushes_denormals != _flushes_denormals():
            torch.set_flush_denormal(self.flushes_denormals)

    def inference(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in inference mode if this state is; inference mode within itself costs nothing."""
        return torch.inference_mode() if self.is_inference else contextlib.nullcontext()


class _ThisThread(threading.local):
    """What each thread knows of itself."""

    is_worker = False
    """Whether it runs a call."""


_this_thread = _ThisThread()


def _flushes_denormals() -> bool:
    """Return this thread's setting, which torch sets and does not tell; Python's arithmetic obeys it too."""
    return _LEAST_NORMAL / 2 == 0


class _Task(Generic[Result]):
    """A call and what came of it.

    Attributes:
        is_over: whether the call has ended.
    """

    def __init__(self, call: Callable[[], Result], caller: _State) -> None:
        self.is_over = False
        self._call = call
        self._state = caller.of_a_worker()
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the call in the state of a worker, and leave this thread in its own."""
        before = _State.of_this_thread()
        try:
            self._state.set()
            with self._state.inference():
                self._results.append(self._call())
        except BaseException as error:  # noqa: BLE001  # raised where the result is taken
            self._error = error
        finally:
            try:
                before.set()
            except BaseException:  # a signal's, on the way: what it has interrupted must be done all the same
                before.set()
                raise
            finally:
                self.is_over = True

    def take(self) -> Result:
        """Return what the call has returned, or raise what it has raised."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a cycle would keep the caller's tensors
        return self._results.pop()


def _run_in_turn(tasks: Sequence[_Task[Result]]) -> None:
    for task in tasks:
        task.run()


class _PoolThread(threading.Thread):
    """A thread that runs what is put into its inbox."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"mucudnn-worker-{number}", daemon=True)
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            self.inbox.get()()  # without a name, which would keep the call and its tensors till the next


class _Pool:
    """Threads of our own, as many as were ever asked for at once: task i runs on thread i."""

    def __init__(self) -> None:
        self._threads: list[_PoolThread] = []

    def run(self, tasks: Sequence[_Task[Result]]) -> None:
        while len(self._threads) < len(tasks):
            self._threads.append(_started(len(self._threads)))
        _run_on(self._threads, tasks)


def _run_on(threads: Sequence[_PoolThread], tasks: Sequence[_Task[Result]]) -> None:
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()
    errands: list[Callable[[], None]] = [functools.partial(_run_and_tell, task, ended) for task in tasks]
    handing_over = map(queue.SimpleQueue.put, [thread.inbox for thread in threads], errands)
    try:
        collections.deque(handing_over, maxlen=0)  # a loop in C, in which no signal is handled: all or none
        _wait(tasks, ended)
    except BaseException:
        _wait(tasks, ended)
        raise


def _run_and_tell(task: _Task[Result], ended: "queue.SimpleQueue[None]") -> None:
    task.run()
    ended.put(None)


def _wait(tasks: Sequence[_Task[Result]], ended: "queue.SimpleQueue[None]") -> None:
    """Return when all tasks are over. Each puts its token after that, so none is waited for in vain."""
    for task in tasks:
        while not task.is_over:
            ended.get()


def _started(number: int) -> _PoolThread:
    thread = _PoolThread(number)
    thread.start()
    beginning = _Task(_compute_with_one_thread, _State.of_this_thread())
    _run_on([thread], [beginning])
    beginning.take()
    return thread


def _compute_with_one_thread() -> None:
    """Set this thread's number of intra-op threads to one, and no other thread's.

    `torch.set_num_threads` sets this thread's number, and also the one that every thread that has not yet
    computed begins with. Therefore this thread begins before it is set, and a thread that ends at once puts
    back what others begin with. It is done once per thread, since it also drops oneDNN's cached primitives.
    """
    others = torch.get_num_threads()
    torch.set_num_threads(1)
    putting_back = threading.Thread(target=torch.set_num_threads, args=(others,))
    putting_back.start()
    putting_back.join()


_workers = Workers(team_of_torch)
if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_workers.begin_without_team)
