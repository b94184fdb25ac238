"""Plans made by hand: every convolution in uneven parts, by different algorithms, with nothing measured.

They show that dividing changes nothing, whatever a tuner would choose.
"""

import dataclasses
import itertools
from collections.abc import Mapping

import torch
from torch import nn

from mucudnn.backends import Backend, backend_for
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.constants import BehaviourNote
from mucudnn.choices import Mode, Policy, Search
from mucudnn.division import Division
from mucudnn.examining.extraction import extract
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate
from mucudnn.version import __version__

LIMIT_BYTES = 2**33

_CPU = backend_for("cpu", torch.device("cpu"))

_NAMES = (
    _CPU.own,
    *(f"cpu:{name}" for name in ("gemm", "im2col", "winograd2", "cc_winograd4", "winograd4", "fft16")),
)
"""Algorithms of the processor that compute parts of any size."""


def a_plan_for(model: nn.Module, sample: object, mode: Mode = Mode.REUSE, backend: Backend = _CPU) -> Plan:
    """Divide all that the model computes on `sample`; nothing is measured, so the times are made up.

    Of 8 samples, 3 and 2 run by the first algorithm that the problem has, 2 by the next, 1 by the one after
    that; PyTorch's own comes last. A site starts with another algorithm than the one before it of its op.
    """
    extraction = extract(model, sample)
    return a_plan_of(extraction.problems, mode, extraction.untouched, backend)


def a_plan_of(
    problems: Mapping[ConvSite, ConvProblem],
    mode: Mode = Mode.REUSE,
    untouched: tuple[tuple[str, str], ...] = (),
    backend: Backend = _CPU,
) -> Plan:
    """Divide these problems, each starting with another algorithm than the one before it of its op."""
    starts = dict(zip(ConvOp, itertools.count()))
    assignments = []
    for site, problem in problems.items():
        division = _division(backend, problem, starts[site.op])
        starts[site.op] += 1
        assignments.append(Assignment(site, problem, division, _candidates(backend, problem)))
    environment = dataclasses.replace(backend.environment(), soft={})
    return Plan(mode, Policy.ALL, LIMIT_BYTES, environment, tuple(assignments), untouched, __version__)


def _algorithms(backend: Backend, problem: ConvProblem) -> list[str]:
    """Return algorithms that compute parts of any size, PyTorch's own first, slow compilers last."""
    names = _NAMES if backend.own == _CPU.own else backend.algorithms(problem, Search.HEURISTIC, whole=False)
    parts = [problem.part(size) for size in range(1, problem.batch + 1)]
    able = [name for name in names if all(backend.computes(part, name) for part in parts)]
    return sorted(able, key=lambda name: is_compiled_when_run(backend, problem, name))


def is_compiled_when_run(backend: Backend, problem: ConvProblem, algorithm: str) -> bool:
    """Return whether cuDNN compiles an engine when it is first run, which takes a second for each size."""
    found = backend.engine(problem, algorithm) if isinstance(backend, CudnnBackend) else None
    return found is not None and BehaviourNote.RUNTIME_COMPILATION.name in found.notes


def _division(backend: Backend, problem: ConvProblem, start: int) -> Division:
    own, *others = algorithms = _algorithms(backend, problem)
    names = [*others, own]
    shares = _shares(problem.batch)
    parts = [
        [
            _candidate(backend, problem, algorithms, names[(start + place) % len(names)], size)
            for size in sizes
        ]
        for place, sizes in enumerate(shares[: len(names)])
    ]
    rest = list(itertools.chain.from_iterable(shares[len(names) :]))
    parts[-1] += [_candidate(backend, problem, algorithms, parts[-1][0].algorithm, size) for size in rest]
    return Division(tuple(itertools.chain.from_iterable(parts)))


def _shares(batch: int) -> list[list[int]]:
    """Cut a batch into uneven parts, of which the first two are one algorithm's."""
    shares: list[list[int]] = []
    left = batch
    for wanted in ([3, 2], [2], [1]):
        share = []
        for size in wanted:
            if left > 0:
                share.append(min(size, left))
                left -= share[-1]
        if share:
            shares.append(share)
    return [*shares, [left]] if left else shares


def _candidates(backend: Backend, problem: ConvProblem) -> tuple[Candidate, ...]:
    """One of every algorithm at every size, the large ones cheaper by the sample."""
    algorithms = _algorithms(backend, problem)
    return tuple(
        _candidate(backend, problem, algorithms, name, size)
        for name, size in itertools.product(algorithms, range(1, problem.batch + 1))
    )


def _candidate(
    backend: Backend, problem: ConvProblem, algorithms: list[str], algorithm: str, size: int
) -> Candidate:
    """Made-up times favour whichever algorithm comes last."""
    place = algorithms.index(algorithm)
    time_s = (1 + size) / (1 + place)
    # What PyTorch's own takes is not known here, and does not matter.
    declared = 0 if algorithm == backend.own else backend.buffer_bytes(problem.part(size), algorithm)
    return Candidate(algorithm, size, time_s, declared)
