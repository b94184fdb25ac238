"""How fast this machine multiplies matrices at the moment: what all other rates are compared with."""

import time

import torch

from bench.cpu.lines import GemmRate

_SIZE = 2048
_SAMPLES = 7
"""Products in a line: each time enough for an interval."""


def gemm_rate(setting: str) -> GemmRate:
    """Time products of two large matrices of normal values, after one that is not timed."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(_SIZE, _SIZE, generator=generator) for _ in range(2))
    out = torch.mm(first, second)
    return GemmRate(setting, _SIZE, tuple(_span_ns(first, second, out) for _ in range(_SAMPLES)))


def _span_ns(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> int:
    start = time.perf_counter_ns()
    torch.mm(first, second, out=out)
    return time.perf_counter_ns() - start
