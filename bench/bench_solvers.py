"""How long the solvers take, on invented problems as large as real ones become."""

import random
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from mucudnn.choices import Policy
from mucudnn.division import Division
from mucudnn.profile import Candidate
from mucudnn.solvers import division_front, solve_reuse, solve_sharing
from mucudnn.solvers.ilp import solve_with_cbc, solve_with_highs

MIB = 2**20
ALGORITHMS = 30
SITES = 161
POINTS = 60


def candidates(policy: Policy, batch: int) -> list[Candidate]:
    """Return `ALGORITHMS` candidates for each size: a launch and a rate, 5 % of noise, a set-up each."""
    dice = random.Random(0)
    offered = []
    for a in range(ALGORITHMS):
        launch_s, sample_s = dice.uniform(1e-6, 1e-4), dice.uniform(1e-6, 1e-5)
        sample_bytes, setup_s = dice.uniform(0, MIB), dice.uniform(0, 1e-4)
        for size in policy.sizes(batch):
            time_s = (launch_s + size * sample_s) * dice.uniform(0.95, 1.05)
            offered.append(Candidate(f"bench:{a}", size, time_s, int(size * sample_bytes), setup_s))
    return offered


def fronts(problems: int) -> dict[int, list[Division]]:
    """Return `SITES` fronts of `POINTS` divisions, of so many problems in turn: a whole in 1 ... 60 parts."""
    dice = random.Random(0)
    kinds = []
    for _ in range(problems):
        whole_s, part_s, whole_bytes = (
            dice.uniform(1e-4, 1e-2),
            dice.uniform(1e-6, 1e-4),
            dice.uniform(1, 256),
        )
        kinds.append(
            [
                Division((Candidate("bench", 1, whole_s + n * part_s, int(whole_bytes * MIB / n)),))
                for n in range(1, POINTS + 1)
            ]
        )
    return {site: kinds[site % problems] for site in range(SITES)}


@pytest.mark.parametrize(
    ("policy", "batch"),
    [(Policy.ALL, 1024), (Policy.POWER_OF_TWO, 1024), (Policy.ALL, 256), (Policy.POWER_OF_TWO, 256)],
)
def test_reuse(benchmark: BenchmarkFixture, policy: Policy, batch: int) -> None:
    """One division under 64 MiB."""
    division = benchmark(solve_reuse, candidates(policy, batch), batch, 64 * MIB)

    assert division.batch == batch


@pytest.mark.parametrize(("policy", "batch"), [(Policy.ALL, 256), (Policy.POWER_OF_TWO, 256)])
def test_front(benchmark: BenchmarkFixture, policy: Policy, batch: int) -> None:
    """All divisions worth having, without a limit."""
    front = benchmark(division_front, candidates(policy, batch), batch)

    benchmark.extra_info["points"] = len(front)
    assert len(front) > 1


@pytest.mark.parametrize("solver", [solve_with_cbc, solve_with_highs])
@pytest.mark.parametrize("problems", [SITES, 10])
@pytest.mark.parametrize("percent", [2, 30])
def test_sharing(
    benchmark: BenchmarkFixture, solver: Callable[..., object], problems: int, percent: int
) -> None:
    """Every site its part of a limit that lies so far between what is needed and what is wanted."""
    offers = fronts(problems)
    least = sum(min(each.workspace_bytes for each in offer) for offer in offers.values())
    most = sum(max(each.workspace_bytes for each in offer) for offer in offers.values())
    limit_bytes = least + (most - least) * percent // 100

    selection = benchmark(solve_sharing, offers, limit_bytes, solver)

    assert sum(division.workspace_bytes for division in selection.values()) <= limit_bytes
