"""What cuDNN offers for one operation graph: its lists, a scan of its engines, one engine with its knobs."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence

from mucudnn.backends.cudnn.configurations import Knobs, Source
from mucudnn.backends.cudnn.constants import (
    MOST_KNOBS,
    Attribute,
    AttributeType,
    BehaviourNote,
    HeuristicMode,
    Kind,
    NumericalNote,
    Status,
)
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.library import CudnnError, Library
from mucudnn.errors import BackendError

_LISTS = ((HeuristicMode.A, Source.A), (HeuristicMode.FALLBACK, Source.FALLBACK))
_NUMERICAL_NOTES = {int(note): note.name for note in NumericalNote}
_BEHAVIOUR_NOTES = {int(note): note.name for note in BehaviourNote}


@dataclasses.dataclass(frozen=True)
class Offer:
    """An engine with knobs, for one graph and so for one beta."""

    engine: int
    knobs: Knobs
    notes: tuple[str, ...]
    workspace_bytes: int
    source: Source


class Offers:
    """What cuDNN offers for one graph on one device; to be used by one thread.

    Args:
        library: cuDNN.
        device: the finalised descriptor of the device, or its handle, with which `graph` was made too.
        graph: a finalised operation graph.
    """

    def __init__(self, library: Library, device: Descriptor | int | None, graph: Descriptor) -> None:
        self._library = library
        self._device = device
        self._graph = graph

    def listed(self) -> tuple[Offer, ...]:
        """Return cuDNN's list in the order of predicted time, then its fallbacks, each pair only once.

        Raises:
            BackendError: the device did not reach cuDNN, and the list is empty for that reason.
        """
        configurations: list[tuple[Descriptor, Source]] = []
        for mode, source in _LISTS:
            with _nothing_if_not_supported():
                configurations += [(configuration, source) for configuration in self._configurations(mode)]
        return self._offers(configurations)

    def scanned(self, known: Collection[int], noted: frozenset[str] = frozenset()) -> tuple[Offer, ...]:
        """Return every engine that runs with its default knobs, but for the known numbers.

        One that fails by itself is left out, in whatever way it does: nobody has recommended it.

        Args:
            known: numbers of engines.
            noted: notes of which an engine must have one; empty for any engine.

        Raises:
            CudnnError: the set-up is broken, or memory is lacking.
        """
        engines = range(self._graph.int_value(Attribute.GRAPH_ENGINES))
        offers = (self._scanned(engine, noted) for engine in engines if engine not in known)
        return tuple(offer for offer in offers if offer is not None)

    def _scanned(self, engine: int, noted: frozenset[str]) -> Offer | None:
        try:
            if noted and noted.isdisjoint(_notes(self._engine(engine))):
                return None
            return self.rebuilt(engine, (), Source.SCAN)
        except CudnnError as error:
            if error.status < Status.BAD_PARAM or error.is_for_lack_of_memory:
                raise
            return None

    def rebuilt(self, engine: int, knobs: Knobs, source: Source = Source.REBUILT) -> Offer | None:
        """Return what an engine with these knobs declares, or None if it does not compute the graph here."""
        with _nothing_if_not_supported():
            configuration = self.configuration(engine, knobs)
            return self._offer(configuration, source, self._empty(Kind.KNOB_CHOICE, MOST_KNOBS))
        return None

    def configuration(self, engine: int, knobs: Knobs) -> Descriptor:
        """Return the finalised configuration of an engine with these knobs.

        Raises:
            CudnnError: cuDNN refuses it.
        """
        configuration = Descriptor(self._library, Kind.ENGINE_CONFIGURATION)
        configuration.set_descriptors(Attribute.CONFIGURATION_ENGINE, self._engine(engine))
        if knobs:
            choices = [self._knob_choice(knob, value) for knob, value in knobs]
            configuration.set_descriptors(Attribute.CONFIGURATION_KNOBS, *choices)
        return configuration.finalized()

    def _engine(self, number: int) -> Descriptor:
        descriptor = (
            Descriptor(self._library, Kind.ENGINE)
            .set_descriptors(Attribute.ENGINE_GRAPH, self._graph)
            .set_ints(Attribute.ENGINE_NUMBER, number)
        )
        if isinstance(self._device, Descriptor):
            descriptor.set_descriptors(Attribute.ENGINE_DEVICE, self._device)
        return descriptor.finalized()

    def plan(self, engine: int, knobs: Knobs) -> Descriptor:
        """Return the finalised execution plan of an engine with these knobs.

        Raises:
            CudnnError: cuDNN refuses it.
        """
        plan = Descriptor(self._library, Kind.EXECUTION_PLAN)
        plan.set_descriptors(Attribute.PLAN_CONFIGURATION, self.configuration(engine, knobs))
        if isinstance(self._device, Descriptor):
            plan.set_descriptors(Attribute.PLAN_DEVICE, self._device)
        elif self._device is not None:
            plan.set_handle(Attribute.PLAN_HANDLE, self._device)
        return plan.finalized()

    def _configurations(self, mode: HeuristicMode) -> tuple[Descriptor, ...]:
        heuristics = (
            Descriptor(self._library, Kind.HEURISTICS)
            .set_descriptors(Attribute.HEURISTICS_GRAPH, self._graph)
            .set_enum(Attribute.HEURISTICS_MODE, AttributeType.HEURISTICS_MODE, mode)
        )
        if isinstance(self._device, Descriptor):
            heuristics.set_descriptors(Attribute.HEURISTICS_DEVICE, self._device)
        heuristics.finalized()
        announced = heuristics.count(Attribute.HEURISTICS_RESULTS)
        empty = self._empty(Kind.ENGINE_CONFIGURATION, announced)
        configurations = heuristics.filled(Attribute.HEURISTICS_RESULTS, empty)
        if announced and not configurations:
            self._check_device(heuristics)
        return configurations

    def _check_device(self, heuristics: Descriptor) -> None:
        """Return if the heuristics know a device; without one they announce configurations and give none."""
        if isinstance(self._device, int):
            return  # cuDNN has asked the device itself
        try:
            heuristics.filled(Attribute.HEURISTICS_DEVICE, self._empty(Kind.DEVICE_PROPERTIES, 1))
        except CudnnError as error:
            raise BackendError(
                "cuDNN must know the device for which it lists engines, but got none."
            ) from error

    def _offers(self, configurations: Sequence[tuple[Descriptor, Source]]) -> tuple[Offer, ...]:
        # Filled anew for every configuration: to make 44 for each would take longer than all the rest.
        knob_choices = self._empty(Kind.KNOB_CHOICE, MOST_KNOBS)
        found: dict[tuple[int, Knobs], Offer] = {}
        for configuration, source in configurations:
            with _nothing_if_not_supported():
                offer = self._offer(configuration, source, knob_choices)
                found.setdefault((offer.engine, offer.knobs), offer)
        return tuple(found.values())

    def _offer(self, configuration: Descriptor, source: Source, knob_choices: Sequence[Descriptor]) -> Offer:
        (engine,) = configuration.filled(Attribute.CONFIGURATION_ENGINE, self._empty(Kind.ENGINE, 1))
        # The query for the number of choices answers 0: as many as there are types are handed over.
        choices = configuration.filled(Attribute.CONFIGURATION_KNOBS, knob_choices)
        return Offer(
            engine=engine.int_value(Attribute.ENGINE_NUMBER),
            knobs=tuple(_knob(choice) for choice in choices),
            notes=_notes(engine),
            workspace_bytes=configuration.int_value(Attribute.CONFIGURATION_WORKSPACE),
            source=source,
        )

    def _empty(self, kind: Kind, count: int) -> list[Descriptor]:
        return [Descriptor(self._library, kind) for _ in range(count)]

    def _knob_choice(self, knob: int, value: int) -> Descriptor:
        return (
            Descriptor(self._library, Kind.KNOB_CHOICE)
            .set_enum(Attribute.KNOB_TYPE, AttributeType.KNOB_TYPE, knob)
            .set_ints(Attribute.KNOB_VALUE, value)
            .finalized()
        )


@contextlib.contextmanager
def _nothing_if_not_supported() -> Iterator[None]:
    """Leave the block in silence where cuDNN says "not here"; every other failure goes on."""
    try:
        yield
    except CudnnError as error:
        if not error.is_not_supported:
            raise


def _knob(choice: Descriptor) -> tuple[int, int]:
    (knob,) = choice.enum_values(Attribute.KNOB_TYPE, AttributeType.KNOB_TYPE, 1)
    return knob, choice.int_value(Attribute.KNOB_VALUE)


def _notes(engine: Descriptor) -> tuple[str, ...]:
    """Return the names of an engine's notes; a note that only a later cuDNN knows is named by its number."""
    numerical = engine.enum_values(Attribute.ENGINE_NUMERICAL_NOTES, AttributeType.NUMERICAL_NOTE)
    behaviour = engine.enum_values(Attribute.ENGINE_BEHAVIOUR_NOTES, AttributeType.BEHAVIOUR_NOTE)
    return (
        *(_NUMERICAL_NOTES.get(note, f"NUMERICAL_NOTE_{note}") for note in numerical),
        *(_BEHAVIOUR_NOTES.get(note, f"BEHAVIOUR_NOTE_{note}") for note in behaviour),
    )
