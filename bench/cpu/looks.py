"""How unpatched and patched models are drawn."""

from collections.abc import Mapping

from mucudnn.intervals import Verdict
from mucudnn.report.drawing import BLUE, GREY, ORANGE, RED, Look

UNPATCHED = Look("unpatched", GREY, is_hollow=True)

PATCHED: Mapping[Verdict, Look] = {
    Verdict.FASTER: Look("patched, FASTER", BLUE),
    Verdict.SLOWER: Look("patched, SLOWER", RED),
    Verdict.SAME: Look("patched, SAME", GREY),
    Verdict.AMBIGUOUS: Look("patched, AMBIGUOUS", ORANGE),
}
"""By what is said of the patched model against the unpatched one."""
