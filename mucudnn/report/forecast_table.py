"""The table of a forecast: for each convolution its ops, and their workspaces at each size."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mucudnn.forecast import Fit, Forecast, ProblemForecast, SiteForecast, Total
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.report.table import Row, table
from mucudnn.report.words import and_more, describe_shape

_MIB = 2**20
_MOST_SIZES = 12
_FIT_WORDS = {
    Fit.UNDIVIDED: "whole",
    Fit.LOWER_RANKED: "other plan",
    Fit.NEVER: "never",
    Fit.NO_PLAN: "no plan",
}
_FORWARD_FIRST = {
    False: (ConvOp.FPROP, ConvOp.DGRAD, ConvOp.WGRAD),
    True: (ConvOp.DGRAD, ConvOp.FPROP, ConvOp.WGRAD),
}

_Group = tuple[ConvProblem, bool]
"""A convolution, whatever its op, and whether it is transposed."""


class ForecastTable(NamedTuple):
    """A table, and what it has no room for.

    Attributes:
        lines: of the table.
        left_out: how many micro-batch sizes have no column.
    """

    lines: list[str]
    left_out: int


def forecast_table(
    forecast: Forecast, limit_bytes: int | None, width: int, names_sites: bool
) -> ForecastTable:
    """Return the table, with a column for as many sizes as fit into `width`."""
    groups = _groups(forecast)
    titles = [_title(group, sites, width, names_sites) for group, sites in groups.items()]
    sizes = _sizes(forecast)
    for step in range(max(1, math.ceil(len(sizes) / _MOST_SIZES)), len(sizes) + 2):
        chosen = sizes[::-1][::step][::-1]  # from the smallest on, which needs least
        rows = [_rows(group, sites, chosen, limit_bytes) for group, sites in groups.items()]
        totals = ("", _total_rows(forecast, chosen, limit_bytes))
        lines = table(
            _headings(chosen, limit_bytes),
            "<" + ">" * (len(chosen) + 5 + (limit_bytes is not None)),
            [*zip(titles, rows, strict=True), totals],
        )
        if len(lines[1]) <= width:
            break
    return ForecastTable(lines, len(sizes) - len(chosen))


def _groups(forecast: Forecast) -> dict[_Group, list[SiteForecast]]:
    """Return the sites of each distinct convolution, in the order in which the model computes them first."""
    groups: dict[_Group, list[SiteForecast]] = {}
    for site in forecast.sites:
        key = (site.forecast.problem.with_op(ConvOp.FPROP), site.occurrence.is_transposed)
        groups.setdefault(key, []).append(site)
    return groups


def _title(group: _Group, sites: Iterable[SiteForecast], width: int, names_sites: bool) -> str:
    first, *others = dict.fromkeys(site.occurrence.site.place for site in sites)
    names = ", ".join([first, *others]) if names_sites else and_more(first, len(others))
    text = f"{names}  {describe_shape(*group)}"
    if not names_sites:
        return text
    return textwrap.fill(
        text, width, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )


def _sizes(forecast: Forecast) -> list[int]:
    """Return the micro-batch sizes below the largest mini-batch, falling."""
    largest = max((each.problem.batch for each in forecast.forecasts), default=0)
    sizes = {need.batch for each in forecast.forecasts for need in each.needs}
    return sorted(sizes - {largest}, reverse=True)


def _headings(sizes: Sequence[int], limit_bytes: int | None) -> Row:
    fits = () if limit_bytes is None else ("fits",)
    return ("", "sites", "undivided", *map(str, sizes), "least", "at", *fits, "plans")


def _rows(
    group: _Group, sites: Sequence[SiteForecast], sizes: Sequence[int], limit_bytes: int | None
) -> list[Row]:
    by_op: dict[ConvOp, list[SiteForecast]] = {}
    for site in sites:
        by_op.setdefault(site.forecast.problem.op, []).append(site)
    return [
        _row(op, len(by_op[op]), by_op[op][0].forecast, sizes, limit_bytes)
        for op in _FORWARD_FIRST[group[1]]
        if op in by_op
    ]


def _row(op: ConvOp, sites: int, each: ProblemForecast, sizes: Sequence[int], limit_bytes: int | None) -> Row:
    least = each.least
    parts = [each.by_size.get(size) if size < each.problem.batch else None for size in sizes]
    undivided = each.undivided
    return (
        f"  {op}",
        str(sites),
        _mib(each.undivided_bytes),
        *(_mib(need.first_bytes if need else None) for need in parts),
        _mib(each.least_bytes),
        "-" if least is None else str(least.batch),
        *(() if limit_bytes is None else (_fit(each, limit_bytes),)),
        "none" if undivided is None else str(undivided.plans),
    )


def _fit(each: ProblemForecast, limit_bytes: int) -> str:
    """Return the largest micro-batch whose first-ranked plan fits, or in a word what else does."""
    fit, largest = each.fit(limit_bytes), each.largest_within(limit_bytes)
    return _FIT_WORDS.get(fit) or (str(largest.batch) if largest else "-")


def _total_rows(forecast: Forecast, sizes: Sequence[int], limit_bytes: int | None) -> list[Row]:
    """All together, and the largest; where a site's batch is smaller than a size, it counts undivided."""
    totals = [forecast.undivided, *(forecast.at_most(size) for size in sizes), forecast.least]
    empty = ("",) * (2 if limit_bytes is None else 3)
    sums = (_known(total, total.sum_bytes) for total in totals)
    largest = (_known(total, total.largest_bytes) for total in totals)
    return [("all together", str(len(forecast.sites)), *sums, *empty), ("the largest", "", *largest, *empty)]


def _known(total: Total, n_bytes: int) -> str:
    """Return mebibytes, or a dash where no site has a plan."""
    return _mib(None if total.unknown and total.largest is None else n_bytes)


def _mib(n_bytes: int | None) -> str:
    """Return mebibytes in at least three digits, none of them below a tenth."""
    if n_bytes is None:
        return "-"
    if 0 < n_bytes < _MIB / 20:
        return "<0.1"
    return f"{n_bytes / _MIB:.{0 if n_bytes == 0 or n_bytes >= 99.95 * _MIB else 1}f}"
