"""Plans made by hand, and how to find a note in a report of one."""

import dataclasses
from typing import Any

from mucudnn.division import Division
from mucudnn.evidence import CallEvidence, CallTimes, Evidence, FrozenEvidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from tests.examples import a_plan, a_problem

MIB = 2**20

OWN = Division((Candidate("cpu:aten", 32, 0.010, 3 * MIB),))
WINOGRAD = Division((Candidate("cpu:winograd4", 16, 0.003, MIB),) * 2)


def seconds(median: float, samples: int = 10) -> Estimate:
    """An interval of 1 % below and 2 % above the median."""
    return Estimate(median, 0.99 * median, 1.02 * median, samples)


FASTER = Evidence(
    reference=seconds(0.010),
    chosen=seconds(0.005),
    verdict=Verdict.FASTER,
    reference_workspace_bytes=3 * MIB,
    workspace_bytes=MIB,
    error=2e-6,
    rejected=(("cpu:im2col@32*1", seconds(0.007)),),
)
PREDICTED = dataclasses.replace(FASTER, is_predicted=True)
KEPT = Evidence(seconds(0.010, 45), seconds(0.010, 45), Verdict.SAME, 3 * MIB, 3 * MIB)
OVER_LIMIT = Evidence(chosen=seconds(0.004), workspace_bytes=MIB)


def assigned(
    path: str, op: ConvOp, division: Division, evidence: Evidence | None, variant: int = 0, **problem: Any
) -> Assignment:
    return Assignment(ConvSite(path, op, variant), a_problem(op=op, **problem), division, (), evidence)


def a_mixed_plan(**changes: Any) -> Plan:
    """Four sites: one twice as fast, one left as before, one that the limit forbids, one not timed."""
    rows = (
        assigned("conv1", ConvOp.FPROP, WINOGRAD, FASTER),
        assigned("conv1", ConvOp.DGRAD, OWN, KEPT),
        assigned("conv1", ConvOp.WGRAD, WINOGRAD, OVER_LIMIT),
        assigned("conv2", ConvOp.FPROP, OWN, None),
    )
    return a_plan(**{"assignments": rows, "limit_bytes": 8 * MIB, **changes})


def note(text: str, label: str) -> str:
    """Return the text beside a label, its lines joined."""
    lines = iter(text.splitlines())
    first = next(line for line in lines if line.startswith(f"{label} "))
    rest = []
    for line in lines:
        if not line.startswith(" "):
            break
        rest.append(line.strip())
    return " ".join([first.removeprefix(label).strip(), *rest])


def a_plan_with_calls(**changes: Any) -> Plan:
    """The mixed plan, of which one convolution is 1.5 times as fast in whole calls, and one no faster."""
    calls = (
        CallEvidence(seconds(0.030), seconds(0.020), seconds(1.49), Verdict.FASTER, "conv1", 0),
        CallEvidence(seconds(0.010), seconds(0.011), seconds(0.91), Verdict.AMBIGUOUS, "conv2", 0),
    )
    return a_mixed_plan(calls=calls, **changes)


def within_the_limit() -> tuple[Assignment, ...]:
    """Those sites of the mixed plan at which PyTorch's own may run."""
    return tuple(each for each in a_mixed_plan().assignments if each.evidence != OVER_LIMIT)


def a_plan_with_frozen() -> Plan:
    """The mixed plan, of whose convolutions frozen graphs run one as planned, one not, and one is its own."""
    frozen = (
        FrozenEvidence(
            "conv1", 0, 0, CallTimes(seconds(0.030), seconds(0.020), seconds(1.49), Verdict.FASTER)
        ),
        FrozenEvidence(
            "conv2", 0, 64, CallTimes(seconds(0.010), seconds(0.011), seconds(0.91), Verdict.SLOWER)
        ),
        FrozenEvidence("conv3", 0, 64),
    )
    return a_mixed_plan(frozen=frozen)


def a_plan_of_a_recording() -> Plan:
    """Two sites, of which one was run when it was recorded."""
    rows = (
        assigned("conv1", ConvOp.FPROP, WINOGRAD, PREDICTED),
        assigned("conv2", ConvOp.DGRAD, OWN, KEPT),
    )
    return a_plan(assignments=rows, limit_bytes=8 * MIB)
