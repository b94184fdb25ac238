"""Between a filter and its planes: transforms of a whole filter, or of some channels at a time.

A filter that is one product of its forms is the right operand as it lies, read transposed, if contiguous;
else a copy is. Its planes are (k, c) whether y has k channels or c, and what multiplies with them reads them
transposed or not. That takes longer for few tiles, of which forms of long filters have few; so these filters
are copied tap by tap, to the order in which their planes are read.
"""

import torch
from torch import Tensor

from mucudnn.algorithms.scripts import Script
from mucudnn.algorithms.tile_views import Taps
from mucudnn.algorithms.transposition import transpose

_COLUMNS_AT_ONCE = 2048
"""Columns of a product that are computed at once, so that operands and results fit a second-level cache."""

_MANY_COLUMNS = 2**16
"""Columns from which this is quicker; fewer are shared better among threads.

On one thread of an AMD EPYC (family 25, model 1) 36 x 9 by 9 x 512² took 16 to 25 ms, in parts 11 to 15.
"""


def lay(weight: Tensor, taps: Taps) -> None:
    """Transform a filter (k, c, taps_d, r, s), or some of its channels, to planes."""
    k, c, deep, high, wide = weight.size(0), weight.size(1), weight.size(2), weight.size(3), weight.size(4)
    if taps.both.numel() == 0:
        order = [2, 3, 4, 1, 0] if taps.is_turned else [2, 3, 4, 0, 1]
        source = weight.permute(order)
        taps.rows.view(source.size()).copy_(source)
        _lay_by_axes(taps)
    elif weight.is_contiguous():
        _lay_at_once(weight.view(k * c, deep * high * wide).t(), 0, taps)
    else:
        some = taps.rows.numel() // (deep * high * wide * c)
        for start in range(0, k, some):
            _lay_at_once(_copied(weight[start : start + some], taps.rows), start * c, taps)


def _copied(weight: Tensor, room: Tensor) -> Tensor:
    """Copy filters, with channels innermost if they were, else taps; view them as (taps, k · c)."""
    k, c, deep, high, wide = weight.size(0), weight.size(1), weight.size(2), weight.size(3), weight.size(4)
    flat = room.view(-1)[: k * c * deep * high * wide]
    if weight.stride(1) == 1:
        flat.view(deep, high, wide, k, c).copy_(weight.permute(2, 3, 4, 0, 1))
        return flat.view(-1, k * c)
    flat.view(k, c, deep, high, wide).copy_(weight)
    return flat.view(k * c, -1).t()


def _lay_at_once(source: Tensor, first: int, taps: Taps) -> None:
    """Transform (taps_d · r · s, elements) to the elements of planes from the `first` on."""
    per_slice = taps.both.size(1)
    for q in range(taps.planes.size(0)):
        planes = taps.planes[q][:, first : first + source.size(1)]
        multiply_in_parts(taps.both, source[q * per_slice : (q + 1) * per_slice], planes)


def _lay_by_axes(taps: Taps) -> None:
    """Transform the filter in `rows` along w, then along h, some elements at a time."""
    (rank_h, high), (rank_w, wide) = taps.left.size(), taps.right.size()
    left, right = taps.left.expand(rank_w, rank_h, high), taps.right.expand(high, rank_w, wide)
    for q in range(taps.planes.size(0)):
        rows = taps.rows.view(-1, high, wide, taps.rows.size(1))[q]
        planes = taps.planes[q].view(rank_h, rank_w, -1).transpose(0, 1)
        for start in range(0, rows.size(2), taps.middle.size(2)):
            some = min(taps.middle.size(2), rows.size(2) - start)
            middle = taps.middle[:, :, :some]
            torch.bmm(right, rows[:, :, start : start + some], out=middle)
            torch.bmm(left, middle.transpose(0, 1), out=planes[:, :, start : start + some])


def multiply_in_parts(
    matrix: Tensor,
    source: Tensor,
    target: Tensor,
    at_once: int = _COLUMNS_AT_ONCE,  # constants of a module are hidden from scripts
    many: int = _MANY_COLUMNS,
) -> None:
    """target = matrix · source, some columns at a time if there are many."""
    total, start = source.size(1), 0
    if total >= many:
        parts = total // at_once
        start = parts * at_once
        sources = source.as_strided(
            [parts, source.size(0), at_once],
            [at_once * source.stride(1), source.stride(0), source.stride(1)],
            source.storage_offset(),
        )
        targets = target.as_strided(
            [parts, target.size(0), at_once], [at_once, target.stride(0), 1], target.storage_offset()
        )
        torch.bmm(matrix.expand(parts, matrix.size(0), matrix.size(1)), sources, out=targets)
    if start < total:
        torch.mm(matrix, source[:, start:], out=target[:, start:])


def _from_planes(taps: Taps) -> None:
    """The taps to which the planes of a gradient add up: the transpose of `lay`.

    That is no quicker in parts: its operand, and not its result, is the larger one.
    """
    for q in range(taps.planes.size(0)):
        if taps.both.numel() > 0:
            per_slice = taps.both.size(1)
            torch.mm(taps.both.t(), taps.planes[q], out=taps.rows[q * per_slice : (q + 1) * per_slice])
        else:
            _from_planes_by_axes(q, taps)


def _from_planes_by_axes(q: int, taps: Taps) -> None:
    """The transpose of `_lay_by_axes`."""
    (rank_h, high), (rank_w, wide) = taps.left.size(), taps.right.size()
    planes = taps.planes[q].view(rank_h, rank_w, -1).transpose(0, 1)
    rows = taps.rows.view(-1, high, wide, taps.rows.size(1))[q]
    left = taps.left.t().expand(rank_w, high, rank_h)
    right = taps.right.t().expand(high, wide, rank_w)
    for start in range(0, rows.size(2), taps.middle.size(2)):
        some = min(taps.middle.size(2), rows.size(2) - start)
        middle = taps.middle[:, :, :some]
        torch.bmm(left, planes[:, :, start : start + some], out=middle.transpose(0, 1))
        torch.bmm(right, middle, out=rows[:, :, start : start + some])


@Script
def filter_loop(weight: Tensor, taps: Taps) -> None:
    """See `lay`."""
    lay(weight, taps)


def undo_filter(taps: Taps, into: Tensor, adds: bool) -> float:
    """Write the taps to which the planes add up to `into` (k, c, taps_d, r, s), or add them.

    Returns their sum; if that is not finite, `into` is left as it is.
    """
    _from_planes(taps)
    total = float(taps.rows.sum())
    if total - total != 0.0:
        return total
    k, c, deep, high, wide = into.size(0), into.size(1), into.size(2), into.size(3), into.size(4)
    if adds:
        into.add_(taps.rows.view(deep, high, wide, k, c).permute(3, 4, 0, 1, 2))
    elif into.is_contiguous():
        transpose(taps.rows.view(1, deep * high * wide, k * c), into.view(1, k * c, deep * high * wide))
    else:
        into.copy_(taps.rows.view(deep, high, wide, k, c).permute(3, 4, 0, 1, 2))
    return total


@Script
def finish_loop(taps: Taps, into: Tensor, adds: bool) -> float:
    """See `undo_filter`."""
    return undo_filter(taps, into, adds)
