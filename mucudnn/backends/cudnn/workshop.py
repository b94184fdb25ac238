"""cuDNN's engines at work on one card: lists, plans that are built once, and kernels that launch them."""

import functools

from torch import Tensor

from mucudnn.backends.cudnn.card import Card, check_not_capturing
from mucudnn.backends.cudnn.configurations import EngineConfiguration, Knobs, Rules, parse_id
from mucudnn.backends.cudnn.devices import DeviceDescription
from mucudnn.backends.cudnn.engines import Enumerator
from mucudnn.backends.cudnn.handles import Handles
from mucudnn.backends.cudnn.kernels import EngineKernel, EngineSumKernel, Place
from mucudnn.backends.cudnn.launch import Launch, Packs
from mucudnn.backends.cudnn.library import Library
from mucudnn.choices import Search
from mucudnn.errors import BackendError
from mucudnn.problem import ConvProblem
from mucudnn.sizes import format_exactly

_MOST_LAUNCHES = 2048
"""Built plans that are kept: 30 KiB of the host's memory each, and a model of 200 sites has some hundreds."""

_MOST_CONFIGURATIONS = 16384

_WHATEVER = Rules(allow_tf32=True, deterministic=False)
"""Of what is bound already: flags that change decide what is chosen next, and break nothing that runs."""


class Workshop:
    """The engines of cuDNN on one card, under whatever flags PyTorch has at the time.

    Args:
        library: cuDNN.
        card: where kernels run.
        device: what the card is described as; without it, cuDNN asks the card itself.
    """

    def __init__(self, library: Library, card: Card, device: DeviceDescription | None = None) -> None:
        self._library = library
        self._card = card
        self._device = device
        self._handles = Handles(library, card.stream, card.handle)
        self._packs = Packs(library)
        self._enumerator = functools.cache(self._enumerator_under)
        self._launch = functools.lru_cache(_MOST_LAUNCHES)(self._launch_of)
        self._configuration = functools.lru_cache(_MOST_CONFIGURATIONS)(self._configuration_of)

    @property
    def version(self) -> int:
        """cuDNN's version: 91900 is 9.19.0."""
        return self._library.version

    def candidates(self, problem: ConvProblem, search: Search) -> tuple[EngineConfiguration, ...]:
        """Return what is worth measuring for `problem`, in cuDNN's order."""
        with self._card.current():
            return self._enumerator(self._card.rules).candidates(problem, search)

    def listed(self, problem: ConvProblem) -> tuple[EngineConfiguration, ...]:
        """Return cuDNN's list."""
        with self._card.current():
            return self._enumerator(self._card.rules).listed(problem, Search.HEURISTIC)

    def configuration(self, problem: ConvProblem, algorithm: str) -> EngineConfiguration | None:
        """Return the engine that an id names, whatever the flags; None if it does not compute `problem`.

        Raises:
            BackendError: the id names no engine.
        """
        return self._configuration(problem, *parse_id(algorithm))

    def get_ready(self, problem: ConvProblem, found: EngineConfiguration) -> None:
        """Build the plans that a kernel launches: with beta 1 too, where parts add up in dw itself.

        Raises:
            BackendError: cuDNN refuses to, or a plan takes more than its configuration declares.
        """
        self._launches(problem, found)

    def kernel(self, problem: ConvProblem, found: EngineConfiguration, buffer: Tensor) -> EngineKernel:
        """Return a kernel for fprop or dgrad."""
        launch = self._fitting(problem, found, accumulate=False)
        return EngineKernel(problem, launch, self._place(found, buffer))

    def sum_kernel(self, problem: ConvProblem, found: EngineConfiguration, buffer: Tensor) -> EngineSumKernel:
        """Return a kernel for wgrad."""
        return EngineSumKernel(problem, *self._launches(problem, found), self._place(found, buffer))

    def _launches(self, problem: ConvProblem, found: EngineConfiguration) -> tuple[Launch, Launch | None]:
        """Return the launches with beta 0 and, where parts add up by it, with beta 1."""
        overwriting = self._fitting(problem, found, accumulate=False)
        if found.accumulating_bytes is None:
            return overwriting, None
        return overwriting, self._fitting(problem, found, accumulate=True)

    def _fitting(self, problem: ConvProblem, found: EngineConfiguration, accumulate: bool) -> Launch:
        """Return the launch of an engine, whose plan takes no more than was declared when it was found.

        Raises:
            BackendError: it takes more; what was declared is what the workspace has.
        """
        launch = self._launch(problem, found.engine, found.knobs, accumulate=accumulate)
        if launch.workspace_bytes > found.workspace_bytes:
            declared, needed = format_exactly(found.workspace_bytes), format_exactly(launch.workspace_bytes)
            raise BackendError(
                f"The plan of {found.id} must take at most what its configuration declares, {declared}, "
                f"but takes {needed}."
            )
        return launch

    def _place(self, found: EngineConfiguration, buffer: Tensor) -> Place:
        return Place(self._handles.here, buffer, found.workspace_bytes)

    def _enumerator_under(self, rules: Rules) -> Enumerator:
        if self._device is not None:
            return Enumerator(self._library, self._device, rules)
        return Enumerator(self._library, self._handles.here, rules)

    def _configuration_of(
        self, problem: ConvProblem, engine: int, knobs: Knobs
    ) -> EngineConfiguration | None:
        with self._card.current():
            return self._enumerator(_WHATEVER).configuration(problem, engine, knobs)

    def _launch_of(self, problem: ConvProblem, engine: int, knobs: Knobs, accumulate: bool) -> Launch:
        check_not_capturing(self._card, "Building a plan of cuDNN")
        with self._card.current():
            plan = self._enumerator(_WHATEVER).plan(problem, engine, knobs, accumulate)
        not_captured = functools.partial(check_not_capturing, self._card, "The first run of a plan of cuDNN")
        return Launch(self._library, plan, problem.alignment_bytes, self._packs, not_captured)
