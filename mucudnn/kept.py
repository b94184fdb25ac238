"""Whether the filter whose transform lies in a workspace is still the one that is given.

In inference a filter stays, and its transform can stay with it, wherever nobody else writes to the
workspace: in sharing mode, or if one site runs again and again. Writes through `weight.data` raise no
version, and memory is used again, so a filter that lies where it lay is compared by its bits as well.
"""

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from mucudnn.workspace import Workspace

_WORD_BYTES = 4


class _Place(NamedTuple):
    """Where a filter lies; another place is another filter, or it would not matter if it were not."""

    address: int
    version: int
    strides: tuple[int, ...]


class _Bits(NamedTuple):
    """Two sums over a filter, which tell one content from another.

    Attributes:
        words: of its 32-bit words as integers, each times an odd number drawn for its place, modulo 2**32. A
            change of one word always shows, and of several unless it is in their highest bits alone.
        values: of its values, each times a number drawn for its place: signs and exponents show.
    """

    words: int
    values: float


class _Held(NamedTuple):
    """What lies in a workspace: whose, of which filter; `bits` only once the same place was seen twice."""

    user: object
    place: _Place
    bits: _Bits | None


class KeptFilter:
    """One user of workspaces, who leaves a transformed filter there. Threads may share it."""

    def __init__(self) -> None:
        self._numbers: _Numbers | None = None
        self._turn = threading.Lock()

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
        bits = self._bits_of(weight)
        return bits == held.bits, _Held(self, place, bits)

    def _bits_of(self, weight: Tensor) -> _Bits:
        columns = weight.numel() // weight.size(0)
        values = weight.as_strided((weight.size(0), columns), (columns, 1))
        with self._turn:
            if self._numbers is None or not self._numbers.fit(values):
                self._numbers = _Numbers(values)
            return self._numbers.bits_of(values)


def _is_whole(weight: Tensor) -> bool:
    """Whether a filter fills its memory, with whole words that are what they stand for."""
    is_dense = weight.numel() > 0 and torch.ops.aten.is_non_overlapping_and_dense(weight)
    return is_dense and not weight.is_neg() and weight.element_size() % _WORD_BYTES == 0


class _Numbers:
    """Numbers for the places in a matrix: one for the row times one for the column."""

    def __init__(self, like: Tensor) -> None:
        generator = torch.Generator("cpu").manual_seed(0)
        with torch.inference_mode(mode=False):
            words, values = (
                [
                    torch.randint(2**31, (size,), generator=generator, dtype=torch.int32, device="cpu") | 1
                    for size in matrix.shape
                ]
                for matrix in (like.view(torch.int32), like)
            )
            self._of_words = words
            self._of_values = [number.to(like.dtype) / 2**31 for number in values]
            self._rows = torch.empty_like(words[0]), torch.empty_like(self._of_values[0])
        self._shape, self._dtype = like.shape, like.dtype

    def fit(self, values: Tensor) -> bool:
        """Whether they are for such a matrix."""
        return values.shape == self._shape and values.dtype == self._dtype

    def bits_of(self, values: Tensor) -> _Bits:
        """Return the sums of this matrix."""
        words = _sum(values.view(torch.int32), self._of_words, self._rows[0])
        return _Bits(int(words), _sum(values, self._of_values, self._rows[1]))


def _sum(matrix: Tensor, numbers: list[Tensor], of_rows: Tensor) -> float:
    rows, columns = numbers
    torch.mv(matrix, columns, out=of_rows)
    return float(torch.dot(of_rows, rows))
