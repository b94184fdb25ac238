"""Whether the filter whose transform lies in a workspace is still the one that is given.

In inference a filter stays, and its transform can stay with it, wherever nobody else writes to the workspace:
in sharing mode, or if one site runs again and again. Writes through `weight.data` raise no version, so the
filter's bits are compared as well, by a sum that costs about as much as reading them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mucudnn.workspace import Workspace

_WORD_BYTES = 4


class _Key(NamedTuple):
    """What tells one filter from another.

    Attributes:
        address: of its memory.
        version: counts the writes that PyTorch knows of.
        bits: the sum of its 32-bit words, each times an odd number drawn for its place, modulo 2**32. A
            changed word changes it; of unknown writes to several words, one in 2**32 does not.
    """

    address: int
    version: int
    bits: int


class KeptFilter:
    """Knows of one user of workspaces what filter it has left there."""

    def __init__(self) -> None:
        self._mark = object()
        self._key: _Key | None = None
        self._numbers: _Numbers | None = None

    def is_in(self, workspace: Workspace, weight: Tensor) -> bool:
        """Return whether `workspace` holds what this user has made of `weight`; its lock is held."""
        key = self._key_of(weight)
        stays = key is not None and key == self._key and workspace.holder is self._mark
        workspace.holder = None  # until it is certain that the transform is whole
        self._key = key
        return stays

    def stays_in(self, workspace: Workspace) -> None:
        """Note that what was made of the weight that was asked for lies in `workspace` now."""
        if self._key is not None:
            workspace.holder = self._mark

    def _key_of(self, weight: Tensor) -> _Key | None:
        """Return the key, or None for filters that do not fill their memory, or not with whole words."""
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(weight) and weight.numel() > 0
        if not is_dense or weight.is_neg() or weight.element_size() % _WORD_BYTES:
            return None
        if self._numbers is None or self._numbers.words != _words(weight).shape:
            self._numbers = _Numbers(_words(weight).shape)
        version = 0 if weight.is_inference() else weight._version
        return _Key(weight.data_ptr(), version, self._numbers.sum_of(_words(weight)))


class _Numbers:
    """Odd numbers for the places of a filter's words: one for its row times one for its column.

    Attributes:
        words: rows and columns of words.
    """

    def __init__(self, words: torch.Size) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randint(2**31, (size,), generator=generator, dtype=torch.int32) for size in words]
        self.words = words
        self._of_rows, self._of_columns = (numbers | 1 for numbers in drawn)
        self._sums = torch.empty_like(self._of_rows)

    def sum_of(self, words: Tensor) -> int:
        """Return the sum of the words times their numbers, modulo 2**32."""
        torch.mv(words, self._of_columns, out=self._sums)
        return int(torch.dot(self._sums, self._of_rows))


def _words(weight: Tensor) -> Tensor:
    """View a dense filter's memory as words, shape (k, words of one of k parts)."""
    flat = weight.as_strided((weight.numel(),), (1,)).view(torch.int32)
    return flat.view(weight.size(0), -1)
