"""Small problems for the solvers, by hand and by chance; all times are dyadic, so that every sum is exact."""

from hypothesis import strategies as st

from mucudnn.division import Division
from mucudnn.profile import Candidate

MIB = 2**20
IDS = ("x", "y", "z")


@st.composite
def candidates(draw: st.DrawFn, most: int = 7) -> list[Candidate]:
    """Up to `most` candidates with many ties, equal sizes and workspaces, and some not deterministic."""
    setups = {name: draw(st.integers(0, 6)) / 4 for name in IDS}
    count = draw(st.integers(0, most))
    return [
        Candidate(
            name := draw(st.sampled_from(IDS)),
            draw(st.integers(1, 5)),
            draw(st.integers(0, 12)) / 4,
            draw(st.integers(0, 5)),
            setups[name],
            draw(st.booleans()),
        )
        for _ in range(count)
    ]


@st.composite
def fronts(draw: st.DrawFn, sites: int = 4, points: int = 5) -> dict[str, list[Division]]:
    """For up to `sites` sites up to `points` divisions each, in any order, beaten ones among them."""
    return {
        f"site {k}": [
            whole(draw(st.integers(0, 12)) / 4, draw(st.integers(0, 9)))
            for _ in range(draw(st.integers(1, points)))
        ]
        for k in range(draw(st.integers(1, sites)))
    }


def whole(time_s: float, workspace_bytes: int) -> Division:
    """A division in one part."""
    return Division((Candidate("x", 1, time_s, workspace_bytes),))


def known(sizes: range | tuple[int, ...]) -> list[Candidate]:
    """The case with a known answer, in hundredths of a second: x takes b MiB at size b, y takes b bytes."""
    quick = [Candidate("x", b, 10 * b + 1, b * MIB) for b in sizes]
    return quick + [Candidate("y", b, 1000 * b + 10, b) for b in sizes]
