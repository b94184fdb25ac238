"""What a call takes from PyTorch's allocator, as its profiler sees it."""

import itertools
from collections.abc import Callable, Iterator

from torch.autograd.profiler import profile

from mucudnn.algorithms import Algorithm
from mucudnn.algorithms.workers import run_on_workers

ALLOCATION_BOUND = 64
"""Bytes that a thread may take from PyTorch's allocator: the scalars of the checks whether all is finite."""


def allocated_bytes(call: Callable[[], object]) -> int:
    """The most bytes that a call holds at once of what this thread takes from PyTorch's allocator."""
    call()  # what is made once only
    with profile(profile_memory=True) as recording:
        call()
    return _most_held(recording)


def allocated_bytes_of_worker(worker: int, call: Callable[[], object]) -> int:
    """The same of what a worker thread takes, which no other thread's recording sees."""
    call()
    recording = profile(profile_memory=True)
    others: list[Callable[[], None]] = [lambda: None] * worker
    run_on_workers([*others, recording.__enter__])
    call()
    run_on_workers([*others, lambda: recording.__exit__(None, None, None)])
    return _most_held(recording)


def allocated_bytes_of_threads(algorithm: Algorithm, call: Callable[[], object]) -> Iterator[int]:
    """Of each thread that takes part: this one, and workers."""
    yield allocated_bytes(call)
    workers = getattr(algorithm, "workers", 1)
    for worker in range(workers if workers > 1 else 0):
        yield allocated_bytes_of_worker(worker, call)


def _most_held(recording: profile) -> int:
    trace = recording.kineto_results  # making Python's events of it takes seconds
    assert trace is not None
    events = [event for event in trace.events() if event.name() == "[memory]"]
    amounts = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(amounts, initial=0))
