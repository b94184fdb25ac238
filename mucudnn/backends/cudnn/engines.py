"""Which of cuDNN's engines compute a problem, with which knobs and workspace; no device need be there."""

import dataclasses
import functools
from collections.abc import Callable

from mucudnn.backends.cudnn.configurations import (
    EngineConfiguration,
    Knobs,
    Rules,
    Source,
)
from mucudnn.backends.cudnn.constants import BehaviourNote, NumericalNote
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.devices import DeviceDescription
from mucudnn.backends.cudnn.graph import operation_graph, unsupported
from mucudnn.backends.cudnn.library import Library
from mucudnn.backends.cudnn.offers import Offer, Offers
from mucudnn.backends.cudnn.pruning import prune
from mucudnn.choices import Search
from mucudnn.problem import ConvOp, ConvProblem

_MOST_PROBLEMS = 4096

_FOURIER = frozenset({NumericalNote.FFT.name})
_TRANSFORMS = _FOURIER | {NumericalNote.WINOGRAD.name}
"""Notes of engines that are worth trying in float32 though no list has them: on an H200 an FFT took 230 us
forward for 5x5 filters where the fastest of strict float32 on cuDNN's list took 527, and of TF32 261. In
16-bit types tensor cores were faster."""

_MOST_WINOGRAD_TAPS = 3
"""Up to which Winograd's are tried so: for 5x5 they were slow, and off by 9e-4."""


class Enumerator:
    """Lists and plans what computes a problem on one device; threads may share it.

    Lists are kept, without descriptors, for the 4096 problems last asked for.

    Args:
        library: cuDNN.
        device: what it runs on: a description, with which it need not be there, or what returns the calling
            thread's handle of a device that is there.
        rules: what the user's flags permit.
    """

    def __init__(
        self,
        library: Library,
        device: DeviceDescription | Callable[[], int | None],
        rules: Rules | None = None,
    ) -> None:
        self._library = library
        self._device = device
        self._rules = rules or Rules()
        self._kept = functools.lru_cache(_MOST_PROBLEMS)(self._enumerated)
        self._kept_unlisted = functools.lru_cache(_MOST_PROBLEMS)(self._unlisted_transforms)

    def listed(
        self, problem: ConvProblem, search: Search = Search.HEURISTIC
    ) -> tuple[EngineConfiguration, ...]:
        """Return all that computes `problem` within the rules, in cuDNN's order; nothing if unsupported.

        Raises:
            BackendError: cuDNN fails for another reason than that it does not support something here.
        """
        return self._kept(_as_asked(problem), search)

    def candidates(
        self, problem: ConvProblem, search: Search = Search.HEURISTIC
    ) -> tuple[EngineConfiguration, ...]:
        """Return what is worth measuring: at most 16 of the list and some more, all in an exhaustive search.

        An engine that is compiled at run time, which takes a second for each size, is worth it where cuDNN
        recommends it, and not as a fallback beside others. In float32 FFT engines that cuDNN does not list
        are tried too, and Winograd engines for at most 3 taps.

        Raises:
            BackendError: as for `listed`.
        """
        listed = self.listed(problem, search)
        if search is Search.EXHAUSTIVE:
            return listed
        tried = prune([each for each in listed if not _is_compiled_fallback(each)] or listed)
        if problem.dtype != "float32":
            return tried
        return tried + self._kept_unlisted(_as_asked(problem))

    def configuration(self, problem: ConvProblem, engine: int, knobs: Knobs) -> EngineConfiguration | None:
        """Return an engine with these knobs, without a list; None if it is not supported or permitted here.

        Raises:
            BackendError: as for `listed`.
        """
        if unsupported(problem) is not None:
            return None
        offer = self._offers(problem, accumulate=False).rebuilt(engine, knobs)
        if offer is None or not self._rules.permits(offer.notes, problem.dtype):
            return None
        accumulating = None
        if accumulates_by_beta(problem):
            accumulating = self._offers(problem, accumulate=True).rebuilt(engine, knobs)
        return _configuration(offer, accumulating.workspace_bytes if accumulating else None, rank=-1)

    def plan(self, problem: ConvProblem, engine: int, knobs: Knobs, accumulate: bool) -> Descriptor:
        """Return a finalised execution plan, ready to be executed.

        Args:
            problem: what it computes.
            engine: the engine's number.
            knobs: the engine's knobs.
            accumulate: whether the result is added to what the output holds (beta 1) or overwrites it.

        Raises:
            BackendError: the problem is unsupported.
            CudnnError: the engine does not compute it with these knobs.
        """
        return self._offers(problem, accumulate).plan(engine, knobs)

    def _enumerated(self, problem: ConvProblem, search: Search) -> tuple[EngineConfiguration, ...]:
        return self._permitted(problem, lambda offers: _found(offers, search))

    def _unlisted_transforms(self, problem: ConvProblem) -> tuple[EngineConfiguration, ...]:
        listed = self.listed(problem)
        known = {each.engine for each in listed}
        noted = _TRANSFORMS if max(problem.kernel_size) <= _MOST_WINOGRAD_TAPS else _FOURIER
        return self._permitted(problem, lambda offers: offers.scanned(known, noted), len(listed))

    def _offers(self, problem: ConvProblem, accumulate: bool) -> Offers:
        library, device = self._library, self._device
        if isinstance(device, DeviceDescription):
            return Offers(library, device.descriptor(library), operation_graph(library, problem, accumulate))
        handle = device()
        return Offers(library, handle, operation_graph(library, problem, accumulate, handle))

    def _permitted(
        self, problem: ConvProblem, find: Callable[[Offers], tuple[Offer, ...]], first_rank: int = 0
    ) -> tuple[EngineConfiguration, ...]:
        """Return what `find` finds and the rules permit, in its order; nothing if unsupported."""
        if unsupported(problem) is not None:
            return ()
        overwriting = find(self._offers(problem, accumulate=False))
        accumulating = find(self._offers(problem, accumulate=True)) if accumulates_by_beta(problem) else ()
        with_beta = {(offer.engine, offer.knobs): offer.workspace_bytes for offer in accumulating}
        permitted = (offer for offer in overwriting if self._rules.permits(offer.notes, problem.dtype))
        return tuple(
            _configuration(offer, with_beta.get((offer.engine, offer.knobs)), rank)
            for rank, offer in enumerate(permitted, first_rank)
        )


def accumulates_by_beta(problem: ConvProblem) -> bool:
    """Return whether parts of a division add up in dw itself, by beta 1.

    A 16-bit dw does not: it would be rounded at every part.
    """
    return problem.op is ConvOp.WGRAD and problem.dtype in ("float32", "float64")


def _as_asked(problem: ConvProblem) -> ConvProblem:
    """Return a problem without what cuDNN does not hear of."""
    return dataclasses.replace(problem, bias=False, is_apart=False)


def _is_compiled_fallback(configuration: EngineConfiguration) -> bool:
    is_compiled = BehaviourNote.RUNTIME_COMPILATION.name in configuration.notes
    return is_compiled and configuration.source is Source.FALLBACK


def _found(offers: Offers, search: Search) -> tuple[Offer, ...]:
    listed = offers.listed()
    if search is Search.HEURISTIC:
        return listed
    return listed + offers.scanned({offer.engine for offer in listed})


def _configuration(offer: Offer, accumulating_bytes: int | None, rank: int) -> EngineConfiguration:
    return EngineConfiguration(
        engine=offer.engine,
        knobs=offer.knobs,
        notes=offer.notes,
        overwriting_bytes=offer.workspace_bytes,
        accumulating_bytes=accumulating_bytes,
        source=offer.source,
        rank=rank,
    )
