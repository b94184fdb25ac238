"""Whether the filter whose transform lies in a workspace is still the one that is given.

In inference a filter stays the same, and its transform can be kept where nobody else writes to the
workspace: in sharing mode, or if one site runs again and again. An equal address and version do not prove
that a filter is the same: writes through `weight.data` do not raise the version, and freed memory is used
again. So its bits are compared as well, by a checksum.
"""

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from mucudnn.execution.workspace import Workspace


class _Place(NamedTuple):
    """Where a filter lies; if it lies elsewhere it is taken for another one, which costs two transforms."""

    address: int
    version: int
    strides: tuple[int, ...]


class _Held(NamedTuple):
    """Whose transform lies in a workspace, and of which filter.

    The checksum is None until the filter was seen in the same place twice.
    """

    user: object
    place: _Place
    checksum: int | None


class KeptFilter:
    """One user of workspaces, who leaves a transformed filter there. Threads may share it."""

    def look(self, workspace: Workspace, weight: Tensor) -> tuple[bool, _Held | None]:
        """Return whether `workspace`, whose lock is held, holds the transform of `weight`.

        The second value is the holder to be named there once the transform lies in it, whole; None for a
        filter that is never kept.
        """
        held = workspace.holder
        if not _is_whole(weight):
            return False, None
        # Inference tensors count no versions.
        version = 0 if weight.is_inference() else weight._version
        place = _Place(weight.data_ptr(), version, weight.stride())
        if not isinstance(held, _Held) or held.user is not self or held.place != place:
            # As in training, where reading the filter would be in vain.
            return False, _Held(self, place, None)
        checksum = _checksum(weight)
        return checksum == held.checksum, _Held(self, place, checksum)


def _is_whole(weight: Tensor) -> bool:
    """Whether a filter fills its memory, with bits that are what they stand for."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(weight)
    return is_dense and not (weight.is_neg() or weight._is_zerotensor())


def _checksum(weight: Tensor) -> int:
    """Return the CRC-32 of a filter's bits, in the order in which they lie in memory.

    It always shows a change of one bit, of two (of up to 512 MiB), or of any within four bytes; any other
    goes unseen with a probability of 2**-32, whatever values the filter has beside. Sums of words, or of
    values, take half the time, but the former do not show an even number of signs that change, nor the latter
    what changes beside much larger values.
    """
    memory = weight.detach().as_strided((weight.numel(),), (1,)).view(torch.uint8)
    return zlib.crc32(memory.numpy().data)
