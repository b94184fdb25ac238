"""cuDNN's engines on one card, by their ids; none where the library cannot be used."""

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from mucudnn.backends.base import PartKernel, PartSumKernel
from mucudnn.backends.cudnn.card import Card
from mucudnn.backends.cudnn.configurations import EngineConfiguration, is_id
from mucudnn.backends.cudnn.engines import accumulates_by_beta
from mucudnn.backends.cudnn.workshop import Workshop
from mucudnn.choices import Search
from mucudnn.errors import BackendError
from mucudnn.problem import ConvProblem, cudnn_layout


class Engines:
    """All engines on one card.

    Args:
        card: whose flags say what is permitted.
        workshop: that lists and builds them; None where the library cannot be used, and there are none.
        offered: returns all ids to try for a problem, PyTorch's own first, for who asks for one that is none.
    """

    def __init__(
        self, card: Card, workshop: Workshop | None, offered: Callable[[ConvProblem], Sequence[str]]
    ) -> None:
        self._card = card
        self._workshop = workshop
        self._offered = offered

    @property
    def version(self) -> int | None:
        """cuDNN's version, such as 91900; None where the library cannot be used."""
        return None if self._workshop is None else self._workshop.version

    def candidates(self, problem: ConvProblem, search: Search) -> tuple[str, ...]:
        """Return the ids of the engines to try for `problem`, in cuDNN's order."""
        if self._workshop is None or not self._card.uses_cudnn:
            return ()
        found = self._workshop.candidates(problem, search)
        return tuple(each.id for each in found if _divides(problem, each))

    def computes(self, problem: ConvProblem, algorithm: str) -> bool:
        """Return whether `algorithm` is one of these, computes `problem`, and the present flags permit it."""
        found = self.named(problem, algorithm)
        permitted = found is not None and self._card.rules.permits(found.notes, problem.dtype)
        return permitted and self._card.uses_cudnn

    def refusal(self, problem: ConvProblem, algorithm: str) -> None:
        """Return None: cuDNN gives no reason."""

    def is_deterministic(self, problem: ConvProblem, algorithm: str) -> bool:
        """Return whether cuDNN says of the engine that equal operands give equal bits in every run."""
        found, _ = self._needed(problem, algorithm)
        return found.is_deterministic

    def workspace_bytes(self, problem: ConvProblem, algorithm: str) -> int:
        """Return the bytes of buffer that a kernel for this micro-batch needs."""
        found, _ = self._needed(problem, algorithm)
        return found.workspace_bytes

    def get_ready(self, problem: ConvProblem, algorithm: str) -> None:
        """Build the plans of an engine; nothing if that was done.

        Raises:
            BackendError: cuDNN refuses to, or one takes more than it declares.
        """
        found, workshop = self._needed(problem, algorithm)
        workshop.get_ready(problem, found)

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        """Return a kernel for fprop or dgrad of this micro-batch."""
        found, workshop = self._needed(problem, algorithm)
        return workshop.kernel(problem, found, buffer)

    def sum_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartSumKernel:
        """Return a kernel for wgrad of this micro-batch."""
        found, workshop = self._needed(problem, algorithm)
        return workshop.sum_kernel(problem, found, buffer)

    def named(self, problem: ConvProblem, algorithm: str) -> EngineConfiguration | None:
        """Return the engine that an id names, if it computes `problem`, whatever the flags permit."""
        if self._workshop is None or not is_id(algorithm):
            return None
        found = self._workshop.configuration(problem, algorithm)
        return found if found is not None and _divides(problem, found) else None

    def foreseen(self, problem: ConvProblem) -> tuple[EngineConfiguration, ...]:
        """Return the engines of which PyTorch's own will take one; none where it takes none of cuDNN's.

        It takes the first of cuDNN's list, as the library has it here; with `torch.backends.cudnn.benchmark`
        it tries as many as its limit says.
        """
        return self._listed_for_own(problem)[: self._card.plans_tried]

    def asked_bytes(self, problem: ConvProblem) -> int:
        """Return the most workspace that PyTorch's own asks for, as far as it is foreseen.

        With `torch.backends.cudnn.benchmark` it makes room for the largest of the whole list before it tries
        any, and for half of that where it is refused.
        """
        listed = self._listed_for_own(problem)
        asking = listed if self._card.tries_plans else listed[:1]
        return max((each.overwriting_bytes for each in asking), default=0)

    def _listed_for_own(self, problem: ConvProblem) -> tuple[EngineConfiguration, ...]:
        """Return cuDNN's list for what PyTorch's own asks of it; nothing where it does not ask."""
        if self._workshop is None or not self._card.runs_cudnn(problem):
            return ()
        layout = cudnn_layout(problem.layout, problem.dtype)  # PyTorch copies operands so
        return self._workshop.listed(dataclasses.replace(problem, layout=layout, filter_layout=layout))

    def _needed(self, problem: ConvProblem, algorithm: str) -> tuple[EngineConfiguration, Workshop]:
        found = self.named(problem, algorithm)
        if found is None or self._workshop is None:
            own, *others = self._offered(problem)[:4]
            some = ", ".join(others) or "an engine's id"
            raise BackendError(
                f"An algorithm must be one of {own}, {some} and so on for {problem}, but got {algorithm!r}."
            )
        return found, self._workshop


def _divides(problem: ConvProblem, found: EngineConfiguration) -> bool:
    """Return whether an engine can run the parts of a division: those of wgrad must add up somewhere."""
    return not accumulates_by_beta(problem) or found.accumulating_bytes is not None
