"""Results that tests compute from tensors, kept for the next that has equal ones."""

import collections
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class KeptResults(Generic[Result]):
    """The last results of each kind, each with copies of the tensors from which it was computed.

    Whoever takes one leaves it as it is. Threads may share this.

    Args:
        most_kinds: those asked for last are kept.
        most_results: of a kind, those computed last.
    """

    def __init__(self, most_kinds: int, most_results: int) -> None:
        self._most_kinds, self._most_results = most_kinds, most_results
        self._kinds: collections.OrderedDict[Hashable, collections.deque[tuple[Sequence[Tensor], Result]]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def of(self, kind: Hashable, operands: Sequence[Tensor], compute: Callable[[], Result]) -> Result:
        """Return what `compute` gives, or gave for operands of equal values and of this kind.

        Args:
            kind: all that the result depends on, but for the operands' values.
            operands: of the same number and shapes for one kind.
            compute: is called where nothing is kept.
        """
        with self._lock:
            known = list(self._kinds.get(kind, ()))
            if known:
                self._kinds.move_to_end(kind)
        for others, result in known:
            if all(map(torch.equal, others, operands)):
                return result
        result = compute()
        copies = [operand.clone() for operand in operands]
        with self._lock:
            self._kinds.setdefault(kind, collections.deque(maxlen=self._most_results)).append(
                (copies, result)
            )
            self._kinds.move_to_end(kind)
            if len(self._kinds) > self._most_kinds:
                self._kinds.popitem(last=False)
        return result
