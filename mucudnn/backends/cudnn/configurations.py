"""An engine of cuDNN with its knobs, as it is kept, named and read from its name."""

import dataclasses
import re
from collections.abc import Collection
from enum import StrEnum

from mucudnn.errors import BackendError

_PREFIX = "cudnn:eng"
_PATTERN = re.compile(rf"{_PREFIX}(\d+)((?:_k\d+=-?\d+)*)", re.ASCII)
_KNOB_PATTERN = re.compile(r"_k(\d+)=(-?\d+)", re.ASCII)

_NONDETERMINISTIC = "NONDETERMINISTIC"
"""Name of a note of cuDNN: sums are added up in an order that may differ from run to run."""

Knobs = tuple[tuple[int, int], ...]
"""Pairs of a knob's type and its value, in cuDNN's order."""


class Source(StrEnum):
    """How a configuration was found."""

    A = "A"
    """By cuDNN's heuristics, in the order of predicted time."""
    FALLBACK = "FALLBACK"
    """By cuDNN's list of what is likely to run."""
    SCAN = "SCAN"
    """By trying every engine with its default knobs."""
    REBUILT = "REBUILT"
    """From its engine and knobs, without a list."""


@dataclasses.dataclass(frozen=True)
class EngineConfiguration:
    """One way in which cuDNN can compute a problem, and what it declares of it.

    Attributes:
        engine: its number, per op and cuDNN version.
        knobs: its choices, in cuDNN's order; empty for the engine's defaults.
        notes: names of cuDNN's notes on numerics and behaviour.
        overwriting_bytes: workspace that it declares with beta 0.
        accumulating_bytes: workspace that it declares with beta 1; None where parts do not add up that way,
            or where beta 1 does not offer it.
        source: how it was found.
        rank: place in the list in which it was found, after what the rules forbid is dropped; -1 if rebuilt.
    """

    engine: int
    knobs: Knobs
    notes: tuple[str, ...]
    overwriting_bytes: int
    accumulating_bytes: int | None
    source: Source
    rank: int

    @property
    def workspace_bytes(self) -> int:
        """What a division with several parts of it needs: the larger of both."""
        return max(self.overwriting_bytes, self.accumulating_bytes or 0)

    @property
    def is_deterministic(self) -> bool:
        """Whether cuDNN says of it that equal operands give equal bits in every run."""
        return _NONDETERMINISTIC not in self.notes

    @property
    def id(self) -> str:
        """Its name as an algorithm: "cudnn:eng65_k2=5_k13=1"."""
        return id_of(self.engine, self.knobs)


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the user's flags permit; inputs are never rounded to a smaller type, whatever the flags.

    Attributes:
        allow_tf32: whether float32 may be multiplied on tensor cores, which round it to 10 bits.
        deterministic: whether the same operands must give the same bits.
    """

    allow_tf32: bool = True
    deterministic: bool = False

    def permits(self, notes: Collection[str], dtype: str) -> bool:
        """Return whether an engine with these notes may compute a problem of `dtype`."""
        return not (
            "DOWN_CONVERT_INPUTS" in notes
            or ("TENSOR_CORE" in notes and dtype == "float32" and not self.allow_tf32)
            or (_NONDETERMINISTIC in notes and self.deterministic)
        )


def id_of(engine: int, knobs: Knobs) -> str:
    """Return the algorithm id of an engine with these knobs."""
    return f"{_PREFIX}{engine}" + "".join(f"_k{knob}={value}" for knob, value in knobs)


def is_id(text: str) -> bool:
    """Return whether `id_of` may have given `text`."""
    return _PATTERN.fullmatch(text) is not None


def parse_id(text: str) -> tuple[int, Knobs]:
    """Return the engine and the knobs of which `id_of` gave `text`.

    Raises:
        BackendError: it is no such id.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise BackendError(f"An engine's id must look like 'cudnn:eng65_k2=5_k13=1', but got {text!r}.")
    knobs = _KNOB_PATTERN.findall(match[2])
    return int(match[1]), tuple((int(knob), int(value)) for knob, value in knobs)
