"""A comparison of a step, made by hand."""

from mucudnn.comparing.step_comparison import LayerComparison, PairedTimes, StepComparison
from mucudnn.comparing.taking_back import taken_back
from tests.comparing.plans import assigned, planned

MS = 10**6
PLAN = planned(assigned("stem"), assigned("head"))
SLOWER = LayerComparison("head", PairedTimes((10 * MS,) * 10, (12 * MS,) * 10))
SETTLED = taken_back(PLAN, [SLOWER])

FOUND = StepComparison(
    step=PairedTimes((100 * MS, 102 * MS) * 5, (80 * MS,) * 10),
    layers=(
        LayerComparison("stem", PairedTimes((60 * MS,) * 10, (30 * MS,) * 10)),
        SLOWER,
    ),
    unseen=("side.0", "side.1"),
    others=0.25,
    pages=(10.0, 20.0),
    plan=PLAN,
    slower=("head",),
    settled=SETTLED,
)
