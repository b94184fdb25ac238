"""What the processor takes for a footprint, and for an error."""

from collections.abc import Iterator

import pytest
import torch

from mucudnn.backends.base import Job
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.backends.cpu.footprint import Footprint
from tests.operands import a_convolution

LIMIT_BYTES = 10


class Scales:
    """A meter that sees what it is told to see, one after the other."""

    def __init__(self, *seen: int | None) -> None:
        self.left = [*seen]

    def measure(self, job: Job, limit_bytes: int | None) -> Footprint:
        assert limit_bytes == LIMIT_BYTES
        n_bytes = self.left.pop(0)
        return Footprint(n_bytes, n_bytes)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param((5,), 5, id="within the limit is taken at its word"),
        pytest.param((10,), 10, id="at the limit too"),
        pytest.param((None, 5), 5, id="failed, and fits the second time"),
        pytest.param((20, 5), 5, id="above the limit, and fits the second time"),
        pytest.param((20, 15), 15, id="above the limit both times"),
        pytest.param((15, 20), 15, id="above the limit both times, the second time more"),
        pytest.param((15, None), 15, id="above the limit, then failed"),
        pytest.param((None, None), None, id="failed both times"),
    ],
)
def test_what_is_not_seen_to_fit_is_weighed_once_more_and_the_less_counts(
    seen: tuple[int | None, ...], expected: int | None
) -> None:
    backend, scales = CpuBackend(), Scales(*seen)
    backend._meter = scales

    assert backend.footprint(Job("any:job", {}), LIMIT_BYTES) == expected
    assert scales.left == []


@pytest.fixture
def may_round(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where float32 may lose digits for a while: in convolutions, in products."""
    flags = [getattr(torch.backends.mkldnn, kind) for kind in request.param]
    before = [flag.fp32_precision for flag in flags]
    for flag in flags:
        flag.fp32_precision = "tf32"
    yield
    for flag, precision in zip(flags, before, strict=True):
        flag.fp32_precision = precision


CONVOLVED = ("cpu:aten", "cpu:onednn_nchw", "cpu:aten_rows8")
MULTIPLIED = ("cpu:im2col", "cpu:gemm", "cpu:winograd4", "cpu:fft16")
IN_C = ("cpu:cc_winograd4", "cpu:cc_depthwise", "cpu:cc_gemm", "cpu:bf16x3_rows8", "cpu:bf16x2")


@pytest.mark.parametrize(
    ("may_round", "rounded"),
    [(["matmul"], ()), (["conv"], CONVOLVED), (["conv", "matmul"], (*CONVOLVED, *MULTIPLIED))],
    indirect=["may_round"],
)
def test_only_what_may_lose_digits_where_convolutions_may_has_a_wide_bound(
    may_round: None, rounded: tuple[str, ...]
) -> None:
    problem, backend = a_convolution(), CpuBackend()

    wide = [name for name in (*CONVOLVED, *MULTIPLIED, *IN_C) if backend.error_bound(problem, name) > 1e-2]

    assert wide == list(rounded)
