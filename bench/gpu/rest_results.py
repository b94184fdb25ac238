"""What the lines of a folder hold already of an errand, and how those of another folder are taken up."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.cpu.lines import Case, Line, Started, read_packed_too, to_text, write_lines
from bench.gpu.layer_cases import cases, layers
from bench.gpu.layer_child import known_cases
from bench.gpu.layer_options import parser, stem_of
from bench.gpu.step_lines import LINES, Key, environments, known
from bench.gpu.step_rows import network_of
from bench.workloads import NETWORKS, SETTINGS, chosen
from mucudnn.files import write_whole
from mucudnn.profile import Environment
from mucudnn.sizes import parse_bytes


def take_up(others: Path, folder: Path) -> None:
    """Add to the lines of layers and steps in a folder, which is made, those that only another one has.

    Raises:
        OSError: a file cannot be read or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _of_layers(others):
        own, found = read_packed_too(folder / name), read_packed_too(others / name)
        if own[: len(found)] == found:  # they were taken up before
            continue
        held = set(map(to_text, own))
        more = [line for line in found if to_text(line) not in held]
        if more:
            write_lines(folder / name, [*own, *more])
    texts = _texts(folder / LINES)
    known_texts = set(texts)
    new = [text for text in _texts(others / LINES) if text not in known_texts]
    if new:
        write_whole(folder / LINES, "".join(f"{text}\n" for text in (*texts, *new)).encode())


def differences(folder: Path, present: Environment) -> list[str]:
    """Return in what the environments of a folder's lines differ from the present one, TF32 aside.

    Each program of settings has that as it is asked to.
    """
    found: set[str] = set()
    for environment in _environments(folder):
        policy = {**environment.policy, "TF32": present.policy["TF32"]}
        found.update(dataclasses.replace(environment, policy=policy).differences(present))
    return sorted(found)


def _environments(folder: Path) -> Iterator[Environment]:
    for name in _of_layers(folder):
        lines = read_packed_too(folder / name)
        yield from (line.environment for line in lines if isinstance(line, Started))
    yield from environments(folder)


def _of_layers(folder: Path) -> list[str]:
    """Return the names of a folder's files of layers, packed or not."""
    return sorted({path.name.removesuffix(".gz") for path in folder.glob("layers*.jsonl*")})


def _texts(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


class Held:
    """What the lines of a folder held when they were first asked for.

    Args:
        folder: of results.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self, networks: Sequence[str], settings: Sequence[str], limits: Sequence[str]) -> bool:
        """Return whether all training steps are known to their end; `bench.gpu.steps` has these options."""
        asked = itertools.product(chosen(networks, NETWORKS), chosen(settings, SETTINGS), limits)
        return self._trials() >= {
            (network_of(workload), setting.name, parse_bytes(limit)) for workload, setting, limit in asked
        }

    def layers(self, arguments: Sequence[str]) -> bool:
        """Return whether all cases are known; `bench.gpu.layer_run` has these arguments."""
        options = parser().parse_args(arguments)
        limits = frozenset(map(parse_bytes, options.limit))
        asked = cases(layers(), chosen(options.settings, SETTINGS), options.layers)
        return {each.case for each in asked} <= self._cases(stem_of(options.policy), limits)

    @functools.cache  # noqa: B019  # it lives as long as its process
    def _trials(self) -> set[Key]:
        return known(self._folder)

    @functools.cache  # noqa: B019  # it lives as long as its process
    def _cases(self, stem: str, limits: frozenset[int]) -> set[Case]:
        return known_cases(self._lines(stem), limits)

    @functools.cache  # noqa: B019  # it lives as long as its process
    def _lines(self, stem: str) -> list[Line]:
        return read_packed_too(self._folder / f"{stem}.jsonl")
