"""One total workspace shared out among sites, as a 0-1 programme: sharing mode, the paper's WD.

    k in K      the sites
    c in D_k    the divisions in the front of site k
    T_kc        time of division c
    M_kc        workspace of division c, less the least workspace of site k
    W           the limit, less the least workspaces of all sites
    x_kc        1 if site k runs division c, else 0

    minimise    sum over k, c of  T_kc x_kc              the time of all sites
    subject to  sum over c of  x_kc = 1,  for every k    every site runs exactly one division
                sum over k, c of  M_kc x_kc <= W         all workspaces together are within the limit

Source: Oyama et al. 2018, WD: a multiple-choice knapsack. A solver works in floating point and accepts a
row that is violated by a millionth, so the programme is only the first of two steps.

1.  Both rows are scaled to coefficients of at most 1 and solved with gap 0. The answer is checked in exact
    integers. If it is over the limit it is forbidden, and with it every selection that takes at least as
    much at every site; then the rest is solved again:

                sum over k, and c with M_kc >= M_kc', of  x_kc  <=  |K| - 1,    c' the answer at site k

2.  The answer bounds the time from above. Below that bound the fronts are merged exactly (`merging`), which
    settles what the solver left open, by its tolerance or because it ran out of time, ties included. What
    is settled depends neither on the solver nor on the load of the machine.

Step 2 is bounded in memory: it gives up where times and workspaces lie nearly on one line at all sites, so
that very many selections are almost equally good. Step 1 is bounded in time: of 161 sites with 10 different
fronts, CBC had not proved the best within 20 s, and merging took a tenth of a second.
"""

import importlib.util
import logging
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from typing import TypeAlias, TypeVar

import numpy as np
import pulp

from mucudnn.division import Division
from mucudnn.errors import InfeasibleError, SolverWarning, warn_user
from mucudnn.interruptions import pass_on_interruption
from mucudnn.solvers.front import pareto
from mucudnn.solvers.merging import Choices, Prices, Selection, TooManySumsError, best_selection
from mucudnn.solvers.ticks import FloatArray

Key = TypeVar("Key", bound=Hashable)


class SolverError(Exception):
    """A solver cannot be run, or its answer is none; sharing goes on without it."""


class Status(Enum):
    """What a solver says of its answer."""

    OPTIMAL = "nothing is better"
    FEASIBLE = "something may be better: a limit stopped the search"
    INFEASIBLE = "there is no answer"
    ERROR = "the solver stopped without an answer"


Solver: TypeAlias = Callable[[pulp.LpProblem], Status]
"""Solves a programme, leaves the values in its variables, and tells what they are."""

STATUSES = {
    pulp.LpSolutionOptimal: Status.OPTIMAL,
    pulp.LpSolutionIntegerFeasible: Status.FEASIBLE,
    pulp.LpSolutionInfeasible: Status.INFEASIBLE,
    pulp.LpSolutionUnbounded: Status.ERROR,
    pulp.LpSolutionNoSolutionFound: Status.ERROR,
}
"""What PuLP's solution statuses mean here."""

MAX_ROUNDS = 100
"""How often an answer over the limit is forbidden before the solver is given up."""

SOLVER_LIMIT_S = 1.0
"""How long a solver may take in one round, in seconds: more of it makes step 2 hardly easier."""

_log = logging.getLogger(__name__)


def _let_go_of_importers() -> None:
    """Forget who has imported PuLP.

    PuLP keeps the error of every solver that it could not load, and with its traceback the frames of all
    callers. This module is imported by the first call of `optimize`: the model and data of whoever called
    that would never be freed.
    """
    for solver in vars(pulp).values():
        failure = getattr(solver, "err", None)
        if isinstance(failure, BaseException):
            failure.__traceback__ = failure.__context__ = failure.__cause__ = None


_let_go_of_importers()


def solve_sharing(
    fronts: Mapping[Key, Sequence[Division]], limit_bytes: int, solver: Solver | None = None
) -> dict[Key, Division]:
    """Return one division for each site, whose workspaces add up to at most `limit_bytes`, in the least time.

    Of equally fast selections it is the one with the least workspace in total; of those, the one that
    gives less to the first site, in the order of `fronts`, in which they differ. Determinism has
    been decided within each front. Times are compared in ticks, of at most 2**-51 of what the slowest
    divisions take together.

    Where step 2 gives up, the best answer of the solver stands. Then the time is the least to within the
    solver's tolerance and ties are the solver's; if it ran out of time or failed as well, a `SolverWarning`
    bounds what is lost. The limit is kept always.

    Args:
        fronts: for each site the divisions to choose from; a front by `division_front`, or any others.
        limit_bytes: of all sites together, inclusive.
        solver: of the programme; None takes HiGHS where highspy is installed, else the CBC of PuLP.

    Raises:
        InfeasibleError: even the least workspaces exceed the limit, and the error holds their sum; or a
            site, which it names, has no division at all.
        ValueError: `limit_bytes` is negative; the slowest divisions of all sites together take no finite
            time; or the largest workspaces of all sites, each within the limit by itself, add up to 2**63
            bytes or more.
    """
    if limit_bytes < 0:
        raise ValueError(f"limit_bytes must not be negative, but got {limit_bytes}.")
    offers = {key: pareto(front) for key, front in fronts.items()}
    _check_feasible(offers, limit_bytes)
    if not offers:
        return {}
    fitting = [[each for each in offer if each.workspace_bytes <= limit_bytes] for offer in offers.values()]
    choices = Choices.of(fitting, limit_bytes)
    prices = Prices.of(choices)
    answer, doubt = _answer(choices, prices, solver or default_solver())
    try:
        selection = best_selection(choices, prices, choices.time_of(answer))
        if doubt:
            _log.info("%s Merging has settled it.", doubt)
    except TooManySumsError:
        selection = answer
        if doubt:
            loss = 1 - prices.lower / choices.time_of(answer)
            warn_user(
                "Sharing mode: another way to share out the workspace may save time, at most "
                f"{100 * loss:.3g} %. {doubt}",
                SolverWarning,
            )
    return {key: offer[c] for key, offer, c in zip(offers, fitting, selection, strict=True)}


def _check_feasible(offers: Mapping[Key, Sequence[Division]], limit_bytes: int) -> None:
    for key, offer in offers.items():
        if not offer:
            raise InfeasibleError(limit_bytes, None, site=str(key))
    leasts = {key: offer[0].workspace_bytes for key, offer in offers.items()}
    if sum(leasts.values()) > limit_bytes:
        neediest = max(leasts, key=leasts.__getitem__)
        raise InfeasibleError(limit_bytes, sum(leasts.values()), str(neediest), is_total=True)


def _answer(choices: Choices, prices: Prices, solver: Solver) -> tuple[Selection, str]:
    """Return an answer within the limit, checked in exact integers, and why a better one may exist.

    The reason is empty where the solver calls its answer the best. If it finds nothing faster, the answer
    is the cheapest selection at the least price.
    """
    try:
        answer, status = _answer_of(solver, _Programme(choices, prices), choices)
    except SolverError as error:
        return prices.cheapest, str(error)
    doubt = "" if status is Status.OPTIMAL else "The solver was stopped before it had proved its answer."
    return min(answer, prices.cheapest, key=choices.time_of), doubt


def _answer_of(solver: Solver, programme: "_Programme", choices: Choices) -> tuple[Selection, Status]:
    """Return the solver's answer, which is within the limit in exact integers, and its status.

    Raises:
        SolverError: the solver cannot be run, gives no answer, or `MAX_ROUNDS` that are over the limit.
    """
    for _ in range(MAX_ROUNDS):
        status = solver(programme.problem)
        if status not in (Status.OPTIMAL, Status.FEASIBLE):
            raise SolverError(
                f"The solver must find a selection, for there is one, but said: {status.value}."
            )
        answer = programme.selection()
        if choices.fits(answer):
            return answer, status
        programme.forbid(answer)
    raise SolverError(f"The solver must keep to the limit, but {MAX_ROUNDS} answers were over it.")


class _Programme:
    """The programme of this module's docstring, without divisions that the best selection cannot contain."""

    def __init__(self, choices: Choices, prices: Prices) -> None:
        most_regret = prices.most_regret(choices.time_of(prices.cheapest))
        is_useful = (prices.regrets <= most_regret) & (choices.extra_bytes <= choices.spare_bytes)
        ticks = np.where(is_useful, choices.ticks, np.inf)
        T = ticks - ticks.min(axis=1, keepdims=True)
        M = choices.extra_bytes
        W = choices.spare_bytes or 1
        self.problem = pulp.LpProblem("sharing", pulp.LpMinimize)
        self._x: list[dict[int, pulp.LpVariable]] = [
            {
                c: self.problem.add_variable(f"x_{k}_{c}", cat=pulp.LpBinary)
                for c in np.flatnonzero(row).tolist()
            }
            for k, row in enumerate(is_useful)
        ]
        self.problem.setObjective(pulp.LpAffineExpression(self._total(T / (T[is_useful].max() or 1))))
        for x_k in self._x:
            self._require([(x, 1.0) for x in x_k.values()], pulp.LpConstraintEQ, 1)
        self._require(self._total(M / W), pulp.LpConstraintLE, 1)

    def selection(self) -> Selection:
        """Return the selection that the solver has left in the variables.

        Raises:
            SolverError: some site has no division, or several.
        """
        chosen = [[c for c, x in x_k.items() if round(x.varValue or 0) == 1] for x_k in self._x]
        for divisions in chosen:
            if len(divisions) != 1:
                raise SolverError(
                    f"The solver must choose 1 division for each site, but chose {len(divisions)}."
                )
        return tuple(divisions[0] for divisions in chosen)

    def forbid(self, selection: Selection) -> None:
        """Add the row that forbids all selections that take at least as much as `selection` at every site."""
        larger = [
            (x, 1.0)
            for x_k, least in zip(self._x, selection, strict=True)
            for c, x in x_k.items()
            if c >= least
        ]
        self._require(larger, pulp.LpConstraintLE, len(selection) - 1)

    def _total(self, coefficients: FloatArray) -> list[tuple[pulp.LpVariable, float]]:
        """Return the terms of the sum over k, c of coefficients[k, c] x_kc."""
        return [(x, float(coefficients[k, c])) for k, x_k in enumerate(self._x) for c, x in x_k.items()]

    def _require(self, terms: list[tuple[pulp.LpVariable, float]], sense: int, right_side: float) -> None:
        self.problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=right_side))


def default_solver() -> Solver:
    """Return HiGHS where it is installed, else CBC."""
    return solve_with_highs if importlib.util.find_spec("highspy") else solve_with_cbc


def solve_with_highs(problem: pulp.LpProblem) -> Status:
    """Solve `problem` with HiGHS, in this process; the package highspy must be installed.

    Raises:
        SolverError: HiGHS cannot be run.
    """
    return _solved(problem, pulp.HiGHS(msg=False, gapRel=0, gapAbs=0, timeLimit=SOLVER_LIMIT_S))


def solve_with_cbc(problem: pulp.LpProblem) -> Status:
    """Solve `problem` with the CBC that comes with PuLP, in a process of its own.

    Raises:
        SolverError: CBC cannot be run.
    """
    # PuLP removes its files only after a success, so they go to a folder that is always removed. Its class
    # PULP_CBC_CMD warns of its end in PuLP 4; the same program is reached through COIN_CMD.
    path = pulp.PULP_CBC_CMD.pulp_cbc_path
    cbc = pulp.COIN_CMD(path=path, msg=False, gapRel=0, gapAbs=0, timeLimit=SOLVER_LIMIT_S)
    with tempfile.TemporaryDirectory() as folder:
        cbc.tmpDir = folder
        return _solved(problem, cbc)


def _solved(problem: pulp.LpProblem, solver: pulp.LpSolver) -> Status:
    try:
        problem.solve(solver)
    except (pulp.PulpSolverError, OSError) as error:  # a program may be there, and made for another machine
        pass_on_interruption(error)
        raise SolverError(f"{solver.name} must be able to run, but it failed: {error}.") from error
    return STATUSES[problem.sol_status]
