"""What the processor takes for a footprint."""

import pytest

from mucudnn.backends.base import Job
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.backends.cpu.footprint import Footprint

LIMIT_BYTES = 10


class Scales:
    """A meter that sees what it is told to see, one after the other."""

    def __init__(self, *seen: int | None) -> None:
        self.left = [*seen]

    def measure(self, job: Job, limit_bytes: int | None) -> Footprint:
        assert limit_bytes == LIMIT_BYTES
        n_bytes = self.left.pop(0)
        return Footprint(n_bytes, n_bytes, "as it was told")


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
