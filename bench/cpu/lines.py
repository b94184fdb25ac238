"""What was measured, as lines of JSON: each is written at once, and tables are made of nothing else."""

import dataclasses
import functools
import gzip
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import get_args

from bench.cpu.rounds import Rounds
from bench.cpu.step_lines import StepCase, StepFailed, StepMeasured
from bench.cpu.way_cases import WayCase
from bench.cpu.way_lines import WayFailed, WayMeasured
from mucudnn.errors import MucudnnError
from mucudnn.files import write_whole
from mucudnn.intervals import Estimate, estimate, ratio
from mucudnn.plan_file import decode, encode
from mucudnn.problem import OPTIONAL, ConvOp, ConvProblem, Layout
from mucudnn.profile import Environment

BENCHMARK = "benchmark"
"""What PyTorch's own is called in rounds of what it found with `torch.backends.cudnn.benchmark`."""


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """One op of a layer in one layout and setting.

    Attributes:
        setting: name of the thread setting; on a card that of type, layout and precision.
        layer: its name.
        layout: of x, w and y.
        op: which of the three.
    """

    setting: str
    layer: str
    layout: Layout
    op: ConvOp

    def __str__(self) -> str:
        return f"{self.setting} {self.layer} {self.layout} {self.op}"


@dataclasses.dataclass(frozen=True)
class Rival:
    """A finished division that was timed beside PyTorch's own convolution.

    Attributes:
        key: what runs.
        declared_bytes: workspace of its largest part.
        predicted_s: seconds that its parts' times add up to.
        seen_bytes: what it was seen to take; None if it was not weighed, since it was not chosen.
    """

    key: str
    declared_bytes: int
    predicted_s: float
    seen_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs under one limit.

    Attributes:
        limit_bytes: the limit, inclusive.
        key: of the fastest division, where PyTorch's own convolution is a candidate whatever it takes.
        strict_key: of the fastest division of which nothing exceeds the limit; None if nothing fits.
        best: by the name of a family, the key of the fastest division of it of which nothing exceeds the
            limit, if any fits; None where no families were asked for.
    """

    limit_bytes: int
    key: str
    strict_key: str | None
    best: Mapping[str, str] | None = dataclasses.field(default=None, metadata=OPTIONAL)

    def of_family(self, name: str) -> str | None:
        """Return the key of the fastest that fits of a family; None if nothing of it does."""
        return (self.best or {}).get(name)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of a case.

    Attributes:
        case: which.
        problem: of the whole mini-batch.
        own: key of PyTorch's own convolution, undivided.
        own_bytes: what that takes beside its operands and its result.
        candidates: how many there were within the largest limit.
        refused: algorithms that were wrong or failed, with the reason.
        errors: of PyTorch's own and of all algorithms in the rivals, the largest 2-norm of the difference to
            a float64 reference, relative to the reference's.
        rivals: the divisions that the solver found, without PyTorch's own undivided.
        undivided: key of the best undivided candidate within the largest limit; None if there is none.
        choices: one for each limit.
        deciding: the rounds in which all competed.
        proving: fresh rounds of PyTorch's own and of what was chosen.
        seconds: that all of it took.
        benchmark: rounds of PyTorch's own with `torch.backends.cudnn.benchmark`, called `BENCHMARK`, and of
            what was chosen strictly, but for PyTorch's own as it comes; None where there is no such flag.
        conditions: clocks, temperature and power right after; None where nobody tells.
    """

    case: Case
    problem: ConvProblem
    own: str
    own_bytes: int
    candidates: int
    refused: tuple[str, ...]
    errors: Mapping[str, float]
    rivals: tuple[Rival, ...]
    undivided: str | None
    choices: tuple[Choice, ...]
    deciding: Rounds
    proving: Rounds
    seconds: float
    benchmark: Rounds | None = dataclasses.field(default=None, metadata=OPTIONAL)
    conditions: Mapping[str, str] | None = dataclasses.field(default=None, metadata=OPTIONAL)

    def choice(self, limit_bytes: int) -> Choice | None:
        """Return what was chosen under a limit; None if it was not asked for."""
        return next((each for each in self.choices if each.limit_bytes == limit_bytes), None)

    def rival(self, key: str) -> Rival | None:
        """Return the rival with that key; None for PyTorch's own."""
        return next((each for each in self.rivals if each.key == key), None)

    def seconds_of(self, key: str) -> Estimate:
        """Return the median of the proving rounds, with its interval."""
        return estimate(self.proving.samples_s(key))

    def speedup(self, key: str) -> Estimate:
        """Return the time of PyTorch's own over that of a division: the median of the rounds' quotients."""
        return ratio(self.proving.samples_s(key), self.proving.samples_s(self.own))

    def bytes_of(self, key: str) -> int:
        """Return what was seen to be taken beside operands and result; where unseen, what is declared."""
        rival = self.rival(key)
        if rival is None:
            return self.own_bytes
        return rival.declared_bytes if rival.seen_bytes is None else rival.seen_bytes


@dataclasses.dataclass(frozen=True)
class Failed:
    """A case that could not be measured.

    Attributes:
        case: which.
        reason: in a sentence.
    """

    case: Case
    reason: str


@dataclasses.dataclass(frozen=True)
class Started:
    """What a process found when it started.

    Attributes:
        setting: its name.
        environment: all that a time measured then depends on.
        run: date, version, command and so on, where they stand nowhere else; None else.
    """

    setting: str
    environment: Environment
    run: Mapping[str, str] | None = dataclasses.field(default=None, metadata=OPTIONAL)


@dataclasses.dataclass(frozen=True)
class GemmRate:
    """Times of torch.mm of two square matrices.

    Attributes:
        setting: its name.
        size: rows of each matrix.
        spans_ns: of one product each.
    """

    setting: str
    size: int
    spans_ns: tuple[int, ...]

    @property
    def rates(self) -> list[float]:
        """Operations per second, two per multiply-add, one number a product."""
        return [2 * self.size**3 / (span * 1e-9) for span in self.spans_ns]


Line = Measured | Failed | StepMeasured | StepFailed | WayMeasured | WayFailed | Started | GemmRate

_LARGEST_BYTES = 2**20
"""Lines beyond this are compressed: a repository keeps every version of a file."""

_KINDS: Mapping[str, type[Line]] = {kind.__name__: kind for kind in get_args(Line)}


@dataclasses.dataclass(frozen=True)
class Recording:
    """All lines together, the last one of each case.

    Attributes:
        measured: by case.
        failed: cases that failed, and were not measured after that.
        steps: training steps, by case.
        failed_steps: those that failed, and were not measured after that.
        ways: networks in all ways, by case.
        failed_ways: those that failed, and were not measured after that.
        started: the last start in each setting.
        rates: of each setting, operations per second of all products.
        starts: all starts, in their order.
    """

    measured: Mapping[Case, Measured]
    failed: Mapping[Case, Failed]
    steps: Mapping[StepCase, StepMeasured]
    failed_steps: Mapping[StepCase, StepFailed]
    ways: Mapping[WayCase, WayMeasured]
    failed_ways: Mapping[WayCase, WayFailed]
    started: Mapping[str, Started]
    rates: Mapping[str, tuple[float, ...]]
    starts: tuple[Started, ...] = ()

    @classmethod
    def of(cls, lines: Iterable[Line]) -> "Recording":
        """Return what `lines` say together."""
        measured: dict[Case, Measured] = {}
        failed: dict[Case, Failed] = {}
        steps: dict[StepCase, StepMeasured] = {}
        failed_steps: dict[StepCase, StepFailed] = {}
        ways: dict[WayCase, WayMeasured] = {}
        failed_ways: dict[WayCase, WayFailed] = {}
        started: dict[str, Started] = {}
        rates: dict[str, tuple[float, ...]] = {}
        starts: list[Started] = []
        for line in lines:
            match line:
                case Measured():
                    measured[line.case] = line
                    failed.pop(line.case, None)
                case Failed():
                    failed[line.case] = line
                case StepMeasured():
                    steps[line.case] = line
                    failed_steps.pop(line.case, None)
                case StepFailed():
                    failed_steps[line.case] = line
                case WayMeasured():
                    ways[line.case] = line
                    failed_ways.pop(line.case, None)
                case WayFailed():
                    failed_ways[line.case] = line
                case Started():
                    started[line.setting] = line
                    starts.append(line)
                case GemmRate():
                    rates[line.setting] = (*rates.get(line.setting, ()), *line.rates)
        return cls(measured, failed, steps, failed_steps, ways, failed_ways, started, rates, tuple(starts))


def append(path: Path, line: Line) -> None:
    """Write one more line, so that it is there whatever happens next; one that was cut off stays alone."""
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        is_cut = file.read(1) not in (b"", b"\n")
        file.write(("\n" * is_cut + to_text(line) + "\n").encode())


def to_text(line: Line) -> str:
    """Return a line's JSON, with its kind."""
    return json.dumps({"kind": type(line).__name__, **encode(line)}, separators=(",", ":"), allow_nan=False)


def read(path: Path) -> list[Line]:
    """Return the lines of a file, packed if its name ends in .gz; no file has none.

    A line that was cut off is left out.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    unpacked = gzip.decompress(content) if path.suffix == ".gz" else content
    read_lines = (_from_text(text) for text in unpacked.decode("utf-8").splitlines())
    return [line for line in read_lines if line is not None]


def write_lines(plain: Path, lines: Iterable[Line]) -> None:
    """Write the lines in place of all that there were, compressed if they are many; the other form goes.

    Whenever this is ended, all lines are there, some of them perhaps twice.
    """
    packed = _packed(plain)
    content = "".join(to_text(line) + "\n" for line in lines).encode()
    if len(content) > _LARGEST_BYTES:
        write_whole(packed, gzip.compress(content, mtime=0))  # the same lines give the same bytes
        plain.unlink(missing_ok=True)
    else:
        write_whole(plain, content)
        packed.unlink(missing_ok=True)


def read_packed_too(plain: Path) -> list[Line]:
    """Return the lines that `write_lines` wrote, in whatever form, and those that were appended later.

    What `write_lines` had packed when it was ended, and had no time to remove, is not read twice. Packed
    lines, of which there are many, are parsed once in a process, as long as their file is not replaced.
    """
    path, appended = _packed(plain), read(plain)
    packed = _packed_lines(path, _version(path))
    lengths = range(min(len(packed), len(appended)), 0, -1)
    twice = next((length for length in lengths if packed[-length:] == tuple(appended[:length])), 0)
    return [*packed, *appended[twice:]]


@functools.lru_cache(maxsize=4)
def _packed_lines(path: Path, version: object) -> tuple[Line, ...]:  # noqa: ARG001  # told apart by it
    return tuple(read(path))


def _version(path: Path) -> tuple[int, int, int] | None:
    """Return what differs once a file is replaced; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _packed(plain: Path) -> Path:
    return plain.with_name(f"{plain.name}.gz")


def _from_text(text: str) -> Line | None:
    """Return the line that a text says; None where a process died in the middle of it."""
    try:
        fields = json.loads(text)
        kind = _KINDS[fields.pop("kind")]
        line: Line = decode(kind, fields)
    except (ValueError, KeyError, AttributeError, MucudnnError):
        return None
    return line
