"""Rounds of layers on a card as a store keeps them, so that what won there wins in a replay too."""

from collections.abc import Iterator

from bench.cpu.lines import Measured
from mucudnn.profile import Comparison, Measurement


def comparisons(line: Measured) -> Iterator[Comparison]:
    """Yield the rounds that prove what was chosen, then those in which all rivals competed.

    A replay takes those of fewer divisions where they have all that it asks for, of equals the first.
    """
    seen = {rival.key: rival.seen_bytes for rival in line.rivals if rival.seen_bytes is not None}
    workspaces = {line.own: line.own_bytes, **seen}
    for rounds in (line.proving, line.deciding):
        times = {
            key: Measurement(spans, rounds.calls, converged=False) for key, spans in rounds.spans_ns.items()
        }
        known = {key: workspaces[key] for key in times if key in workspaces}
        yield Comparison(line.problem, times, known)
