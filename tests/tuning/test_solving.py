"""Divisions for all sites from profiles, or why there are none."""

from collections.abc import Sequence

import pytest

from mucudnn.choices import Mode
from mucudnn.errors import InfeasibleError
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate, Profile
from mucudnn.tuning.solving import solve
from tests.examples import a_problem, an_environment

FIRST, SECOND = (ConvSite(path, ConvOp.FPROP) for path in "ab")
PROBLEMS = {FIRST: a_problem(batch=4), SECOND: a_problem(batch=8)}


def _of_four_samples(problem: ConvProblem) -> Sequence[Candidate]:
    return [Candidate("cpu:im2col", 4, 0.0, 10)] if problem.batch == 4 else []


@pytest.mark.parametrize("mode", Mode)
def test_no_limit_is_named_where_nobody_knows_what_a_site_needs(mode: Mode) -> None:
    profiles = {problem: Profile(problem, an_environment(), ()) for problem in PROBLEMS.values()}

    with pytest.raises(InfeasibleError) as raised:
        solve(PROBLEMS, profiles, 100, mode, _of_four_samples)

    error = raised.value
    assert (error.least_bytes, error.site) == (None, str(SECOND))
    assert error.problem == str(PROBLEMS[SECOND])
