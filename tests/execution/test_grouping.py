"""What the parts of one algorithm take beside the buffer, for which others may have to make room."""

import pytest

from mucudnn.backends import backend_of
from mucudnn.backends.cpu.backend import CpuBackend
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


def test_what_uses_pytorchs_own_takes_elsewhere_what_its_buffer_does_not_hold() -> None:
    backend, algorithm, problem = backend_of(OWN), "cpu:onednn_nhwc", a_convolution(batch=8)
    needed = backend.buffer_bytes(problem, algorithm)
    division = Division((Candidate(algorithm, 8, 1.0, needed + 300),))

    (group,) = groups_of(backend, problem, division, 0)

    assert needed > 0
    assert group.elsewhere_bytes == 300


class Aligned(CpuBackend):
    """The processor, as if operands had to start at multiples of 16 bytes."""

    alignment_bytes = 16


@pytest.mark.parametrize(
    ("backend", "expected"),
    [(CpuBackend(), [(0, 1), (1, 4), (4, 5), (5, 9)]), (Aligned(), [(0, 4), (4, 5), (5, 8), (8, 9)])],
    ids=["anywhere", "aligned"],
)
def test_parts_of_odd_sizes_go_last_where_operands_must_be_aligned_and_else_stay_where_they_are(
    backend: CpuBackend, expected: list[tuple[int, int]]
) -> None:
    problem = a_convolution(batch=9, out_channels=3, input_size=(5, 5))
    division = Division(tuple(Candidate("cpu:im2col", batch, 1.0, 0) for batch in (1, 3, 1, 4)))

    groups = groups_of(backend, problem, division, 0)

    assert [(part.here.start, part.here.stop) for group in groups for part in group.parts] == expected
