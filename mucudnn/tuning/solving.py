"""A division for every site of a model, from what the solvers make of the profiles; nothing is measured."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.errors import InfeasibleError
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvProblem
from mucudnn.profile import Candidate, Profile
from mucudnn.solvers import division_front, least_workspace_bytes, solve_reuse, solve_sharing

KnownWorkspaces = Callable[[ConvProblem], Sequence[Candidate]]
"""Returns every algorithm at every size with the workspace that it needs, as far as known, untimed."""


class Solution(NamedTuple):
    """What a solver chose for a site, and the candidates that fit into the same workspace."""

    division: Division
    fitting: Sequence[Candidate]


def solve(
    problems: Mapping[ConvSite, ConvProblem],
    profiles: Mapping[ConvProblem, Profile],
    limit_bytes: int,
    mode: Mode,
    known_workspaces: KnownWorkspaces,
) -> dict[ConvSite, Solution]:
    """Return a division for every site, and the candidates that fit where it does.

    Args:
        problems: of all sites.
        profiles: of these problems.
        limit_bytes: of workspace.
        mode: whose the limit is.
        known_workspaces: is asked where nothing fits.

    Raises:
        InfeasibleError: some batch has no division, or all divisions share too little.
    """
    _check_feasible(problems, profiles, limit_bytes, mode, known_workspaces)
    if mode is Mode.SHARING:
        return _shared(problems, profiles, limit_bytes)
    solved = {
        problem: Solution(solve_reuse(profile.candidates, problem.batch, limit_bytes), profile.candidates)
        for problem, profile in profiles.items()
    }
    return {site: solved[problem] for site, problem in problems.items()}


def _shared(
    problems: Mapping[ConvSite, ConvProblem], profiles: Mapping[ConvProblem, Profile], limit_bytes: int
) -> dict[ConvSite, Solution]:
    fronts = {
        problem: division_front(profile.candidates, problem.batch, limit_bytes)
        for problem, profile in profiles.items()
    }
    divisions = solve_sharing({site: fronts[problem] for site, problem in problems.items()}, limit_bytes)
    return {
        site: Solution(division, _within(profiles[problems[site]].candidates, division))
        for site, division in divisions.items()
    }


def _within(candidates: Sequence[Candidate], division: Division) -> list[Candidate]:
    return [each for each in candidates if each.workspace_bytes <= division.workspace_bytes]


def _check_feasible(
    problems: Mapping[ConvSite, ConvProblem],
    profiles: Mapping[ConvProblem, Profile],
    limit_bytes: int,
    mode: Mode,
    known_workspaces: KnownWorkspaces,
) -> None:
    """Raise an InfeasibleError if some batch has no division, or all divisions share too little.

    It names the site that needs most, and a limit with which all sites may do.
    """
    is_sharing = mode is Mode.SHARING
    leasts = {
        problem: least_workspace_bytes(profile.candidates, problem.batch)
        for problem, profile in profiles.items()
    }
    known = [least for problem in problems.values() if (least := leasts[problem]) is not None]
    if len(known) == len(problems) and (not is_sharing or sum(known) <= limit_bytes):
        return
    needs: dict[ConvSite, int] = {}
    for site, problem in problems.items():
        least = least_workspace_bytes(known_workspaces(problem), problem.batch)
        if least is None:
            raise InfeasibleError(limit_bytes, None, str(site), problem=str(problem))
        needs[site] = least
    neediest = max(needs, key=needs.__getitem__)
    least_bytes = sum(needs.values()) if is_sharing else needs[neediest]
    problem = problems[neediest]
    raise InfeasibleError(limit_bytes, least_bytes, str(neediest), is_total=is_sharing, problem=str(problem))
