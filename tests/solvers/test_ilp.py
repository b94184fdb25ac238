"""Sharing one total workspace, against tables by hand, against trying every selection, and bad solvers."""

import random
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pulp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mucudnn.division import Division
from mucudnn.errors import InfeasibleError, SolverWarning
from mucudnn.solvers import ilp, merging, solve_sharing
from mucudnn.solvers.exhaustive import fastest_selection
from mucudnn.solvers.ilp import (
    STATUSES,
    Solver,
    SolverError,
    Status,
    default_solver,
    solve_with_cbc,
    solve_with_highs,
)
from tests.solvers.cases import fronts, whole

SetValues = Callable[[pulp.LpProblem], None]

SOLVERS = pytest.mark.parametrize("solver", [solve_with_highs, solve_with_cbc])

GIGA = 10**9
TWO_SITES = {
    "a": [whole(10, 0), whole(1, GIGA // 2 + 1)],
    "b": [whole(10, 0), whole(2, GIGA // 2)],
}
"""Both fast divisions together take 1,000,000,001 bytes."""


def _solved(
    offers: dict[str, list[Division]], limit_bytes: int, solver: Solver | None = None
) -> dict[str, Division] | None:
    try:
        return solve_sharing(offers, limit_bytes, solver)
    except InfeasibleError:
        return None


def _taking(place: int) -> SetValues:
    """Return what sets the variables to the division at `place`, 0 or -1, of every site."""

    def set_values(problem: pulp.LpProblem) -> None:
        sites: dict[int, list[tuple[int, Any]]] = {}
        for variable in problem.variables():
            _, k, c = variable.name.split("_")
            sites.setdefault(int(k), []).append((int(c), variable))
            variable.varValue = 0.0
        for offers in sites.values():
            sorted(offers, key=lambda each: each[0])[place][1].varValue = 1.0

    return set_values


class Scripted:
    """A solver that answers as it is told, and then as HiGHS does."""

    def __init__(self, *answers: tuple[SetValues, Status]) -> None:
        self._answers = list(answers)
        self.rows: list[int] = []

    def __call__(self, problem: pulp.LpProblem) -> Status:
        self.rows.append(problem.numConstraints())
        if not self._answers:
            return solve_with_highs(problem)
        set_values, status = self._answers.pop(0)
        set_values(problem)
        return status


def _leaving(problem: pulp.LpProblem) -> None:
    """Set nothing."""


def _workspaces(selection: dict[str, Division]) -> list[int]:
    return [division.workspace_bytes for division in selection.values()]


@SOLVERS
@settings(max_examples=200)
@given(offers=fronts(), limit_bytes=st.integers(0, 30))
def test_sharing_is_what_trying_every_selection_finds(
    solver: Solver, offers: dict[str, list[Division]], limit_bytes: int
) -> None:
    assert _solved(offers, limit_bytes, solver) == fastest_selection(offers, limit_bytes)


@settings(max_examples=100)
@given(fronts(), st.integers(0, 30), st.randoms(use_true_random=False))
def test_time_and_total_workspace_do_not_depend_on_the_order_of_the_sites(
    offers: dict[str, list[Division]], limit_bytes: int, dice: random.Random
) -> None:
    shuffled = {key: offers[key] for key in dice.sample(sorted(offers), len(offers))}

    one, other = _solved(offers, limit_bytes), _solved(shuffled, limit_bytes)

    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert sum(each.time_s for each in one.values()) == sum(each.time_s for each in other.values())
        assert sum(_workspaces(one)) == sum(_workspaces(other))


@settings(max_examples=100)
@given(fronts())
def test_the_least_total_of_an_infeasible_case_is_exact(offers: dict[str, list[Division]]) -> None:
    least_bytes = sum(min(each.workspace_bytes for each in offer) for offer in offers.values())

    assert sum(_workspaces(solve_sharing(offers, least_bytes))) == least_bytes
    assume(least_bytes > 0)
    with pytest.raises(InfeasibleError, match=r"all convolutions together .* may be enough") as caught:
        solve_sharing(offers, least_bytes - 1)
    leasts = {key: min(each.workspace_bytes for each in offer) for key, offer in offers.items()}
    assert (caught.value.least_bytes, caught.value.is_total) == (least_bytes, True)
    assert leasts[str(caught.value.site)] == max(leasts.values())


@SOLVERS
@pytest.mark.parametrize(
    ("limit_bytes", "time_s", "workspaces"),
    [
        (0, 40, [0, 0, 0]),
        (2, 40, [0, 0, 0]),
        (3, 36, [3, 0, 0]),
        (4, 35, [0, 4, 0]),
        (7, 31, [3, 4, 0]),
        (11, 31, [3, 4, 0]),
        (12, 28, [0, 0, 12]),
        (15, 24, [3, 0, 12]),
        (16, 23, [0, 4, 12]),
        (18, 23, [0, 4, 12]),
        (19, 19, [3, 4, 12]),
        (10**12, 19, [3, 4, 12]),
    ],
)
def test_a_table_by_hand(solver: Solver, limit_bytes: int, time_s: float, workspaces: list[int]) -> None:
    offers = {
        "a": [whole(10, 0), whole(6, 3)],
        "b": [whole(10, 0), whole(5, 4)],
        "c": [whole(20, 0), whole(8, 12)],
    }

    selection = solve_sharing(offers, limit_bytes, solver)

    assert _workspaces(selection) == workspaces
    assert sum(division.time_s for division in selection.values()) == time_s


def test_of_equally_fast_selections_the_one_with_less_workspace_is_taken() -> None:
    offers = {"a": [whole(4, 0), whole(2, 3)], "b": [whole(4, 0), whole(2, 2)]}

    assert _workspaces(solve_sharing(offers, 4)) == [0, 2]


def test_of_equally_large_ones_the_first_site_takes_less() -> None:
    offers = {key: [whole(4, 0), whole(2, 2)] for key in "abc"}

    assert _workspaces(solve_sharing(offers, 4)) == [0, 2, 2]


def test_divisions_that_others_beat_are_never_chosen() -> None:
    offers = {"a": [whole(9, 5), whole(4, 3), whole(4, 4)]}

    assert _workspaces(solve_sharing(offers, 9)) == [3]


@SOLVERS
def test_the_limit_holds_to_the_byte(solver: Solver) -> None:
    assert _workspaces(solve_sharing(TWO_SITES, GIGA, solver)) == [GIGA // 2 + 1, 0]
    assert _workspaces(solve_sharing(TWO_SITES, GIGA + 1, solver)) == [GIGA // 2 + 1, GIGA // 2]


def test_an_answer_that_is_one_byte_over_the_limit_is_forbidden_and_solved_again() -> None:
    solver = Scripted((_taking(-1), Status.OPTIMAL))

    selection = solve_sharing(TWO_SITES, GIGA, solver)

    assert _workspaces(selection) == [GIGA // 2 + 1, 0]
    assert solver.rows == [3, 4]


def test_no_coefficient_of_the_programme_is_above_one() -> None:
    seen: list[float] = []

    def noting(problem: pulp.LpProblem) -> Status:
        for row in (problem.objective, *problem.constraints()):
            seen.extend(row.values())
        return solve_with_highs(problem)

    solve_sharing(TWO_SITES, GIGA, noting)

    assert max(seen) == 1


def test_a_solver_that_stays_over_the_limit_is_given_up() -> None:
    solver = Scripted(*[(_taking(-1), Status.OPTIMAL)] * ilp.MAX_ROUNDS)

    assert _workspaces(solve_sharing(TWO_SITES, GIGA, solver)) == [GIGA // 2 + 1, 0]
    assert len(solver.rows) == ilp.MAX_ROUNDS


@pytest.mark.parametrize("status", [Status.OPTIMAL, Status.FEASIBLE])
def test_a_worse_answer_than_the_best_is_improved(status: Status) -> None:
    selection = solve_sharing(TWO_SITES, GIGA, Scripted((_taking(0), status)))

    assert _workspaces(selection) == [GIGA // 2 + 1, 0]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.ERROR, "the solver stopped without an answer"),
        (Status.INFEASIBLE, "there is no answer"),
        (Status.OPTIMAL, "must choose 1 division for each site, but chose 0"),
    ],
)
def test_a_solver_that_gives_no_answer_is_not_missed(status: Status, reason: str) -> None:
    with unittest.TestCase().assertLogs(ilp.__name__) as logged:
        selection = solve_sharing(TWO_SITES, GIGA, Scripted((_leaving, status)))

    assert _workspaces(selection) == [GIGA // 2 + 1, 0]
    assert reason in logged.output[0]


def test_where_merging_gives_up_the_answer_of_the_solver_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MOST_SUMS", 1)
    offers = {"a": [whole(10, 0), whole(6, 3)], "b": [whole(10, 0), whole(5, 4)]}

    selection = solve_sharing(offers, 4, Scripted())  # and nobody is warned

    assert _workspaces(selection) == [0, 4]  # of the cheapest at one price it is [3, 0]


@SOLVERS
def test_a_solver_finds_the_least_time_by_itself(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(10)
    offers = {
        str(k): [
            whole(time_s, n_bytes)
            for time_s, n_bytes in zip(
                sorted(dice.sample(range(1, 90), 6), reverse=True),
                [0, *sorted(dice.sample(range(1, 60), 5))],
                strict=True,
            )
        ]
        for k in range(12)
    }
    best = solve_sharing(offers, 140, solver)
    monkeypatch.setattr(ilp, "SOLVER_LIMIT_S", 60.0)  # however busy the machine is
    monkeypatch.setattr(merging, "MOST_SUMS", 1)

    alone = solve_sharing(offers, 140, solver)

    assert sum(each.time_s for each in alone.values()) == sum(each.time_s for each in best.values())


def test_of_what_is_within_the_limit_nothing_is_forbidden_with_an_answer_that_is_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merging, "MOST_SUMS", 1)
    offers = {"a": [whole(10, 0), whole(6, 3)], "b": [whole(10, 0), whole(5, 4)]}

    selection = solve_sharing(offers, 4, Scripted((_taking(-1), Status.OPTIMAL)))

    assert _workspaces(selection) == [0, 4]


def test_an_answer_that_is_slower_than_the_cheapest_selection_does_not_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merging, "MOST_SUMS", 1)

    selection = solve_sharing(TWO_SITES, GIGA, Scripted((_taking(0), Status.OPTIMAL)))

    assert _workspaces(selection) == [GIGA // 2 + 1, 0]


@pytest.mark.parametrize(
    ("step", "status", "reason"),
    [
        (_taking(0), Status.FEASIBLE, "was stopped before it had proved"),
        (_leaving, Status.INFEASIBLE, "there is no answer"),
    ],
)
def test_where_both_steps_leave_something_open_a_warning_bounds_what_is_lost_and_says_why(
    monkeypatch: pytest.MonkeyPatch, step: SetValues, status: Status, reason: str
) -> None:
    monkeypatch.setattr(merging, "MOST_SUMS", 1)

    # No answer takes less than 3, as if the fast divisions, which are one byte too many, fitted: 1 - 3 / 11.
    with pytest.warns(SolverWarning, match=rf"may save time, at most 72\.7 %. .*{reason}"):
        selection = solve_sharing(TWO_SITES, GIGA, Scripted((step, status)))

    assert _workspaces(selection) == [GIGA // 2 + 1, 0]


def test_every_solution_status_of_pulp_has_a_meaning() -> None:
    assert STATUSES.keys() == pulp.LpSolution.keys()
    assert STATUSES[pulp.LpSolutionIntegerFeasible] is Status.FEASIBLE


@SOLVERS
def test_a_programme_without_an_answer_is_infeasible(solver: Solver) -> None:
    problem = pulp.LpProblem("impossible", pulp.LpMinimize)
    x = problem.add_variable("x", cat=pulp.LpBinary)
    problem.setObjective(pulp.LpAffineExpression([(x, 1.0)]))
    problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression([(x, 1.0)]), pulp.LpConstraintGE, rhs=2))

    assert solver(problem) is Status.INFEASIBLE


@pytest.fixture(params=["missing", "of another machine"])
def cbc_that_cannot_run(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "cbc"
    if request.param != "missing":
        path.write_bytes(b"\x7fELF")
        path.chmod(0o755)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(path))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # PuLP leaves a file open
@pytest.mark.usefixtures("cbc_that_cannot_run")
def test_a_solver_that_cannot_run_is_told() -> None:
    with pytest.raises(SolverError, match="COIN_CMD must be able to run, but it failed"):
        solve_with_cbc(pulp.LpProblem("nothing", pulp.LpMinimize))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # PuLP leaves a file open
@pytest.mark.usefixtures("cbc_that_cannot_run")
def test_a_solver_that_cannot_run_leaves_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    for name in ("TEMP", "TMP", "TMPDIR"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    solve_sharing(TWO_SITES, GIGA, solve_with_cbc)

    assert [*folder.iterdir()] == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # PuLP leaves a file open
@pytest.mark.usefixtures("cbc_that_cannot_run")
def test_a_solver_that_cannot_run_is_not_missed() -> None:
    assert _workspaces(solve_sharing(TWO_SITES, GIGA, solve_with_cbc)) == [GIGA // 2 + 1, 0]


@pytest.mark.parametrize(("found", "solver"), [(object(), solve_with_highs), (None, solve_with_cbc)])
def test_highs_is_preferred_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, found: object, solver: Solver
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: found)

    assert default_solver() is solver


@SOLVERS
def test_a_solver_says_nothing(solver: Solver, capfd: pytest.CaptureFixture[str]) -> None:
    solve_sharing(TWO_SITES, GIGA, solver)

    assert capfd.readouterr() == ("", "")


def test_pulp_keeps_nobody_who_has_imported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        try:
            raise OSError("no licence")
        except OSError as cause:
            raise ImportError("no such solver") from cause
    except ImportError as failure:
        kept = failure
    monkeypatch.setattr(pulp, "ABSENT", SimpleNamespace(err=kept), raising=False)

    ilp._let_go_of_importers()

    assert kept.__traceback__ is kept.__cause__ is kept.__context__ is None


def test_no_sites_need_nothing() -> None:
    assert solve_sharing({}, 0) == {}


@pytest.mark.parametrize("offers", [{}, TWO_SITES])
def test_a_negative_limit_is_refused(offers: dict[str, list[Division]]) -> None:
    with pytest.raises(ValueError, match="limit_bytes must not be negative, but got -1"):
        solve_sharing(offers, -1)


def test_a_site_without_divisions_is_named() -> None:
    with pytest.raises(InfeasibleError, match="layer4 fprop") as caught:
        solve_sharing({"layer1 fprop": [whole(1, 0)], "layer4 fprop": []}, 5)

    assert (caught.value.limit_bytes, caught.value.least_bytes) == (5, None)


def test_what_is_larger_than_the_limit_by_itself_is_left_out_however_large() -> None:
    offers = {name: [whole(2, 0), whole(1, 2**63)] for name in "abcd"}

    assert solve_sharing(offers, 1000) == {name: whole(2, 0) for name in "abcd"}
