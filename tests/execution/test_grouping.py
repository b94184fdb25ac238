"""What the parts of one algorithm take beside the buffer, for which others may have to make room."""

import pytest

from mucudnn.backends import backend_of
from mucudnn.division import Division
from mucudnn.execution.grouping import groups_of
from mucudnn.profile import Candidate
from tests.operands import a_convolution

OWN = "cpu:aten"


@pytest.mark.parametrize(
    ("workspaces", "sum_bytes", "expected"),
    [((0, 0), 0, 0), ((100, 300), 0, 300), ((100, 300), 200, 100), ((100, 100), 200, 0)],
)
def test_pytorchs_own_takes_elsewhere_what_its_largest_part_does_beside_the_running_sum(
    workspaces: tuple[int, ...], sum_bytes: int, expected: int
) -> None:
    division = Division(tuple(Candidate(OWN, 4, 1.0, n_bytes) for n_bytes in workspaces))

    (group,) = groups_of(backend_of(OWN), a_convolution(batch=8), division, sum_bytes)

    assert group.elsewhere_bytes == expected


def test_what_tells_beforehand_what_it_needs_takes_nothing_elsewhere() -> None:
    division = Division((Candidate("cpu:im2col", 8, 1.0, 2**30),))

    (group,) = groups_of(backend_of(OWN), a_convolution(batch=8), division, 0)

    assert group.elsewhere_bytes == 0
