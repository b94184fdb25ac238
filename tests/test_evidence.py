"""What timing and weighing has shown."""

import pytest

from mucudnn.evidence import fits_as_seen

KIB = 2**10


@pytest.mark.parametrize(
    ("seen_bytes", "expected"), [(0, True), (132 * KIB, True), (132 * KIB + 1, False), (None, False)]
)
def test_eight_pages_more_than_the_limit_are_noise(seen_bytes: int | None, expected: bool) -> None:
    assert fits_as_seen(seen_bytes, 100 * KIB) is expected
