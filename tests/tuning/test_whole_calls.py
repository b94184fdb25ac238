"""What other layers take before a call, for which the buffer that all have in common gives its end back."""

from mucudnn.division import Division
from mucudnn.examining.extraction import SiteCall
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate
from mucudnn.tuning.whole_calls import taken_before
from tests.examples import a_problem

PROBLEM = a_problem(op=ConvOp.FPROP)


def running(**workspaces: tuple[str, int]) -> dict[ConvSite, tuple[ConvProblem, Division]]:
    """Sites by their paths, with the algorithm and the bytes of workspace of each."""
    return {
        ConvSite(path, ConvOp.FPROP): (PROBLEM, Division((Candidate(name, PROBLEM.batch, 1.0, n_bytes),)))
        for path, (name, n_bytes) in workspaces.items()
    }


def taken(path: str, sites: dict[ConvSite, tuple[ConvProblem, Division]]) -> int:
    call = SiteCall(path, 0, PROBLEM, (ConvOp.FPROP,))
    return taken_before(call, sites, own="own", limit_bytes=100)


def test_it_is_the_most_that_does_not_fit_beside_the_buffer() -> None:
    sites = running(here=("fast", 70), small=("own", 30), large=("own", 31), larger=("own", 40))

    assert taken("here", sites) == 40


def test_what_fits_beside_the_buffer_takes_none_of_it() -> None:
    assert taken("here", running(here=("fast", 70), small=("own", 30))) == 0


def test_a_layer_makes_no_room_for_itself() -> None:
    sites = running(here=("own", 90), other=("fast", 70))

    assert taken("here", sites) == 0
    assert taken("other", sites) == 90
