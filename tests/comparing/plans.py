"""Plans made by hand, of which some may be taken back."""

import dataclasses

from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.evidence import CallEvidence, CallTimes, Evidence, FrozenEvidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from tests.examples import a_plan, a_problem

OWN = "cpu:aten"
WHOLE = Candidate(OWN, 32, 0.010, 3000)
OWN_HALF = Candidate(OWN, 16, 0.006, 1500)
HALF = Candidate("cpu:winograd4", 16, 0.002, 1000)
SLOW, FAST = Estimate(0.010, 0.009, 0.011, 10), Estimate(0.005, 0.004, 0.006, 10)
TIMES = CallTimes(SLOW, FAST, FAST, Verdict.FASTER)


def assigned(path: str, op: ConvOp = ConvOp.FPROP, **changes: object) -> Assignment:
    """A site that runs in two parts, faster than PyTorch's own."""
    evidence = dataclasses.replace(
        Evidence(SLOW, FAST, Verdict.FASTER, 3000, 1000, error=2e-6, rejected=(("cpu:z@32*1", SLOW),)),
        **changes,
    )
    problem = a_problem(op=op, batch=32)
    return Assignment(ConvSite(path, op), problem, Division((HALF, HALF)), (OWN_HALF, WHOLE, HALF), evidence)


def planned(*assignments: Assignment, mode: Mode = Mode.REUSE) -> Plan:
    calls = tuple(CallEvidence(**vars(TIMES), path=path, variant=0) for path in ("one", "two"))
    frozen = tuple(FrozenEvidence(path, 0, 100, TIMES) for path in ("one", "two"))
    return dataclasses.replace(
        a_plan(), mode=mode, limit_bytes=10000, assignments=assignments, calls=calls, frozen=frozen
    )
