"""Divisions made by hand."""

from mucudnn.division import Division
from mucudnn.profile import Candidate


def a_division(
    algorithm: str, *batches: int, n_bytes: int = 0, time_s: float = 0.0, setup_s: float = 0.0
) -> Division:
    """Return a division into parts of one algorithm, each of that memory and time."""
    return Division(tuple(Candidate(algorithm, batch, time_s, n_bytes, setup_s) for batch in batches))


def of_parts(*parts: tuple[str, int]) -> Division:
    """Return a division into parts of an algorithm and a batch each, of no memory and no time."""
    return Division(tuple(Candidate(algorithm, batch, 0.0, 0) for algorithm, batch in parts))
