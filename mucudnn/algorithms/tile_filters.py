"""Between a filter and its planes: transforms of a whole filter, or of some channels at a time."""

import torch
from torch import Tensor

from mucudnn.algorithms.scripts import Script
from mucudnn.algorithms.tile_views import Taps
from mucudnn.algorithms.transposition import transpose


def _lay_plain(weight: Tensor, taps: Taps) -> None:
    """Transform a filter, or some of its channels, to planes.

    Args:
        weight: (b, a, taps_d, r, s), channels of y first. Parts of both dense layouts are transposed.
        taps: where to.
    """
    b, a, n_taps = weight.size(0), weight.size(1), taps.rows.size(0)
    last = weight.movedim(1, -1)
    per_b, per_a, per_tap, start = (
        weight.stride(0),
        weight.stride(1),
        weight.stride(4),
        weight.storage_offset(),
    )
    if last.is_contiguous():
        transpose(last.reshape(1, b, n_taps * a), taps.rows.view(1, n_taps * a, b))
    elif per_a == 1 and _has_even_taps(weight):
        some = weight.as_strided([n_taps, b, a], [per_tap, per_b, 1], start)
        transpose(some, taps.rows.view(n_taps, a, b))
    elif per_a == n_taps and per_tap == 1 and _has_even_taps(weight) and taps.scratch.numel() > 0:
        some = weight.as_strided([1, b, a * n_taps], [0, per_b, 1], start)
        transpose(some, taps.scratch.view(1, a * n_taps, b))
        taps.rows.view(n_taps, a, b).copy_(taps.scratch.view(a, n_taps, b).transpose(0, 1))
    else:
        deep, high, wide = weight.size(2), weight.size(3), weight.size(4)
        taps.rows.view(deep, high, wide, a, b).copy_(weight.permute(2, 3, 4, 1, 0))
    _to_planes(taps)


def _has_even_taps(weight: Tensor) -> bool:
    """Whether the taps of each (taps_d, r, s) lie evenly apart."""
    per_row = weight.size(4) * weight.stride(4)
    return weight.stride(3) == per_row and weight.stride(2) == weight.size(3) * per_row


def _lay_exchanged(weight: Tensor, taps: Taps) -> None:
    """Transform the filter (a, b, taps_d, r, s) of dgrad, whose channels of y come second, to planes."""
    a, b, n_taps = weight.size(0), weight.size(1), taps.rows.size(0)
    if weight.is_contiguous():
        transpose(weight.view(1, a * b, n_taps), taps.rows.view(1, n_taps, a * b))
    else:
        deep, high, wide = weight.size(2), weight.size(3), weight.size(4)
        taps.rows.view(deep, high, wide, a, b).copy_(weight.permute(2, 3, 4, 0, 1))
    _to_planes(taps)


def _to_planes(taps: Taps) -> None:
    per_slice = taps.left.size(1) * taps.right.size(1)
    for q in range(taps.planes.size(0)):
        rows = taps.rows[q * per_slice : (q + 1) * per_slice]
        if taps.both.numel() > 0:
            torch.mm(taps.both, rows, out=taps.planes[q])
            continue
        planes = taps.planes[q].view(taps.left.size(0), taps.right.size(0), -1)
        for start in range(0, rows.size(1), taps.middle.size(2)):
            some = min(taps.middle.size(2), rows.size(1) - start)
            for j in range(taps.right.size(1)):
                part = rows[j :: taps.right.size(1), start : start + some]
                torch.mm(taps.left, part, out=taps.middle[:, j, :some])
            for i in range(taps.left.size(0)):
                torch.mm(taps.right, taps.middle[i, :, :some], out=planes[i, :, start : start + some])


def _from_planes(taps: Taps) -> None:
    """The taps to which the planes of a gradient add up: the transpose of `_to_planes`."""
    per_slice = taps.left.size(1) * taps.right.size(1)
    for q in range(taps.planes.size(0)):
        rows = taps.rows[q * per_slice : (q + 1) * per_slice]
        if taps.both.numel() > 0:
            torch.mm(taps.both.t(), taps.planes[q], out=rows)
            continue
        planes = taps.planes[q].view(taps.left.size(0), taps.right.size(0), -1)
        for start in range(0, rows.size(1), taps.middle.size(2)):
            some = min(taps.middle.size(2), rows.size(1) - start)
            for i in range(taps.left.size(0)):
                part = planes[i, :, start : start + some]
                torch.mm(taps.right.t(), part, out=taps.middle[i, :, :some])
            for j in range(taps.right.size(1)):
                target = rows[j :: taps.right.size(1), start : start + some]
                torch.mm(taps.left.t(), taps.middle[:, j, :some], out=target)


def lay(weight: Tensor, taps: Taps, is_dgrad: bool) -> None:
    """Transform a filter (k, c, taps_d, r, s), or some of its channels, to planes."""
    if is_dgrad:
        _lay_exchanged(weight, taps)
    else:
        _lay_plain(weight, taps)


@Script
def filter_loop(weight: Tensor, taps: Taps, is_dgrad: bool) -> None:
    """See `lay`."""
    lay(weight, taps, is_dgrad)


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
