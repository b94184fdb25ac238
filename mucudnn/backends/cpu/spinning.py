"""What an operation costs the workers that come after it: PyTorch's idle threads spin before they sleep.

OpenMP's threads wait for the next operation by spinning, for milliseconds unless its settings say otherwise.
That is cheap for what runs on those threads next, an operation or a team of workers, and takes the cores of
whatever else runs meanwhile, such as a pool of workers.
"""

import functools
import time
from collections.abc import Callable

import torch

from mucudnn.algorithms.workers import run_on_workers
from mucudnn.intervals import Estimate, ratio
from mucudnn.timing import Clock

_ELEMENTS_OF_A_THREAD = 2**15
"""Elements for each thread that a simple operation runs on (ATen's grain size)."""

_MOST_ELEMENTS = 2**20
"""Of the ordinary operation, 4 MiB: what ran before it stays in the larger caches."""

_SIDE = 512
"""Of the matrices that a worker multiplies: 2^28 operations, some 2 ms."""

_REST_S = 0.05
"""Long after the milliseconds for which idle threads spin."""

_PAIRS = 10
"""The interval of their median leaves out the least and the greatest."""


def ordinary_operation() -> Callable[[], None]:
    """Return a call that runs an operation on all threads, as one that precedes a convolution in a model.

    It takes the number of threads that the caller has now, and writes to memory of its own.
    """
    elements = min(torch.get_num_threads() * _ELEMENTS_OF_A_THREAD, _MOST_ELEMENTS)
    scratch = torch.ones(elements, dtype=torch.float32, device="cpu")

    def call() -> None:
        scratch.mul_(1)

    return call


def spinning_cost(
    clock: Clock = time.perf_counter_ns, sleep: Callable[[float], None] = time.sleep
) -> Estimate:
    """Return how many times as long workers take right after an operation as after a rest.

    As many workers as PyTorch has threads each multiply two matrices, in turn after 50 ms of rest and after
    an operation of all threads; the ratio is that of such pairs. After the rest they run once untimed, since
    cores and caches have rested as well. It takes about 0.7 s.

    Args:
        clock: nanoseconds.
        sleep: rests for so many seconds.
    """
    products = _products(torch.get_num_threads())
    operation = ordinary_operation()

    def span_ns(before: Callable[[], None]) -> int:
        before()
        start = clock()
        run_on_workers(products)
        return clock() - start

    def rest() -> None:
        sleep(_REST_S)
        run_on_workers(products)

    pairs = [(span_ns(rest), span_ns(operation)) for _ in range(_PAIRS)]
    quiet, spinning = zip(*pairs, strict=True)
    return ratio(quiet, spinning)


def _products(count: int) -> list[Callable[[], torch.Tensor]]:
    """Return matrix products that read the same matrix; each writes a result of its own."""
    factor = torch.ones(_SIDE, _SIDE)
    results = [torch.empty(_SIDE, _SIDE) for _ in range(count)]
    return [functools.partial(torch.mm, factor, factor, out=result) for result in results]
