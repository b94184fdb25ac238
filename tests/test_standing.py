"""Where PyTorch's own convolution might have run, as far as a plan tells."""

import pytest

from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.evidence import Evidence
from mucudnn.intervals import Estimate
from mucudnn.plan import Assignment, ConvSite
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from mucudnn.standing import may_stay
from tests.examples import a_plan, a_problem

SLOW, FAST = Estimate(2.0, 1.9, 2.1, 9), Estimate(1.0, 0.9, 1.1, 9)

DIVISION = Division((Candidate("cpu:fast", 32, 1.0, 1000),))


def assigned(*evidence: Evidence) -> Assignment:
    return Assignment(ConvSite("conv", ConvOp.FPROP), a_problem(), DIVISION, DIVISION.parts, *evidence)


def might_stay(seen: Assignment, mode: Mode, limit_bytes: int = 1 << 20) -> bool:
    return may_stay(seen, a_plan(mode=mode, limit_bytes=limit_bytes, assignments=(seen,)))


@pytest.mark.parametrize(
    ("evidence", "in_reuse", "in_sharing"),
    [
        (Evidence(None, FAST), False, False),
        (Evidence(SLOW, FAST, reference_workspace_bytes=1000), True, True),
        (Evidence(SLOW, FAST, reference_workspace_bytes=1001), True, False),
        (Evidence(SLOW, FAST), True, True),
        (Evidence(FAST, FAST, reference_workspace_bytes=1001), True, True),  # it is what runs
    ],
)
def test_pytorchs_own_might_have_run_within_what_its_site_has(
    evidence: Evidence, in_reuse: bool, in_sharing: bool
) -> None:
    assert might_stay(assigned(evidence), Mode.REUSE) is in_reuse
    assert might_stay(assigned(evidence), Mode.SHARING) is in_sharing


def test_pytorchs_own_that_was_timed_to_compare_alone_might_not_have_run() -> None:
    seen = assigned(Evidence(SLOW, FAST, reference_workspace_bytes=1 << 20))

    assert not might_stay(seen, Mode.REUSE, limit_bytes=1 << 19)
    assert might_stay(seen, Mode.REUSE, limit_bytes=1 << 20)


def test_what_was_not_timed_is_not_known_to_be_kept() -> None:
    assert not assigned().is_kept
    assert not might_stay(assigned(), Mode.REUSE)
