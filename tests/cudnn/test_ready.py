"""What would fail or take seconds at a first call is done before: plans are built, and kernels compiled."""

import copy
import dataclasses
import types

import pytest
import torch
from torch import nn

from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.backends.cudnn.engines import Enumerator
from mucudnn.backends.cudnn.library import Library
from mucudnn.convolutions.notices import Notice
from mucudnn.division import Division
from mucudnn.errors import BackendError, PlanMismatchError, UntunedWarning
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.patching import suiting
from mucudnn.patching.applying import apply, patched_modules
from mucudnn.patching.fitting import Memory
from mucudnn.patching.shapes import TunedShapes, Variant
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate
from tests.cudnn.paper import PaperCard, PaperLibrary, paper_backend
from tests.operands import a_convolution, operands_of, reference, relative_error
from tests.plans import a_plan_for

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("one_thread")]

PARTS = (5, 2)
AN_ENGINE = "an engine"


@pytest.fixture
def card() -> PaperCard:
    return PaperCard(Rules(allow_tf32=False))


@pytest.fixture
def backend(library: Library, card: PaperCard) -> CudnnBackend:
    return paper_backend(PaperLibrary(library), card)


def conv(op: ConvOp = ConvOp.FPROP, **changes: object) -> ConvProblem:
    shape = {"batch": sum(PARTS), "in_channels": 8, "out_channels": 8, "input_size": (8, 8)}
    return a_convolution(**{"op": op, **shape, **changes})


def algorithm_of(backend: CudnnBackend, problem: ConvProblem, kind: str) -> str:
    """The algorithm of that id, or an engine that computes all parts."""
    if kind != AN_ENGINE:
        return kind
    engines = (name for name in backend.algorithms(problem) if name.startswith("cudnn:eng"))
    return next(name for name in engines if all(backend.computes(problem.part(size), name) for size in PARTS))


def in_parts(algorithm: str) -> Division:
    return Division(tuple(Candidate(algorithm, size, 0.0, 2**30) for size in PARTS))


def run(backend: CudnnBackend, problem: ConvProblem, algorithm: str) -> float:
    """The error of a division's first run."""
    operands = operands_of(problem)
    result = Runner(backend, problem, in_parts(algorithm))(Workspace(backend.device), *operands)
    return relative_error(result, reference(problem, *operands))


READY = [
    *((op, AN_ENGINE) for op in ConvOp),
    *((op, "cuda:winograd4") for op in ConvOp),
    (ConvOp.WGRAD, "cuda:winograd4_sums2"),
    (ConvOp.FPROP, "cuda:fft16"),
]


@pytest.mark.parametrize(("op", "kind"), READY)
def test_what_is_ready_is_neither_built_nor_compiled_at_its_first_call(
    backend: CudnnBackend, card: PaperCard, op: ConvOp, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = conv(op, kernel_size=(9, 9), padding=(4, 4)) if kind == "cuda:fft16" else conv(op)
    algorithm = algorithm_of(backend, problem, kind)

    for size in PARTS:
        backend.get_ready(problem.part(size), algorithm)

    monkeypatch.setattr(Enumerator, "plan", fail)
    monkeypatch.setattr(card, "compiled", fail)
    assert run(backend, problem, algorithm) <= backend.error_bound(problem, algorithm)


@pytest.mark.parametrize("kind", [AN_ENGINE, "cuda:winograd4"])
def test_in_a_capture_the_first_call_says_what_must_happen_before_and_another_one_does_it(
    backend: CudnnBackend, card: PaperCard, kind: str
) -> None:
    problem = conv()
    algorithm = algorithm_of(backend, problem, kind)
    card.is_capturing = True

    runner = Runner(backend, problem, in_parts(algorithm))
    with pytest.raises(BackendError, match="must happen before"):
        runner(Workspace(backend.device), *operands_of(problem))

    card.is_capturing = False
    runner(Workspace(backend.device), *operands_of(problem))


def test_a_plan_that_is_ready_runs_once_before_it_is_captured(backend: CudnnBackend, card: PaperCard) -> None:
    problem = conv()
    algorithm = algorithm_of(backend, problem, AN_ENGINE)
    runner, operands = Runner(backend, problem, in_parts(algorithm)), operands_of(problem)
    card.is_capturing = True

    with pytest.raises(BackendError, match=r"^The first run of a plan of cuDNN must happen before"):
        runner(Workspace(backend.device), *operands)

    card.is_capturing = False
    runner(Workspace(backend.device), *operands)
    card.is_capturing = True
    runner(Workspace(backend.device), *operands)


def too_large(*_: object, **__: object) -> object:
    """A launch of a plan that takes more than any was declared to take."""
    return types.SimpleNamespace(workspace_bytes=2**40)


def fail(*_: object) -> object:
    raise BackendError("CuPy 14.0 could not compile a kernel: libnvrtc is missing.")


def a_model_and_its_plan(backend: CudnnBackend, kind: str) -> tuple[nn.Module, Plan]:
    """A convolution whose forward pass is divided."""
    model = nn.Conv2d(8, 8, 3, padding=1, bias=False)
    plan = a_plan_for(model, torch.zeros(sum(PARTS), 8, 8, 8))
    problem = next(each.problem for each in plan.assignments if each.site.op is ConvOp.FPROP)
    assigned = Assignment(ConvSite("", ConvOp.FPROP), problem, in_parts(algorithm_of(backend, problem, kind)))
    environment, limit_bytes = backend.environment(), 2**30
    return model, dataclasses.replace(
        plan, environment=environment, assignments=(assigned,), limit_bytes=limit_bytes
    )


@pytest.fixture
def at_home(backend: CudnnBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models lie on that card."""
    monkeypatch.setattr(suiting, "backend_for", lambda *_: backend)


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize("kind", [AN_ENGINE, "cuda:winograd4"])
def test_a_plan_whose_algorithms_get_ready_is_applied(backend: CudnnBackend, kind: str) -> None:
    model, plan = a_model_and_its_plan(backend, kind)

    assert [*patched_modules(apply(model, plan))] == [""]


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (AN_ENGINE, "must take at most what its configuration declares"),
        ("cuda:winograd4", "libnvrtc is missing"),
    ],
)
def test_a_plan_whose_algorithms_cannot_be_made_ready_is_not_applied(
    backend: CudnnBackend, card: PaperCard, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str
) -> None:
    model, plan = a_model_and_its_plan(backend, kind)
    before = copy.copy(model.__dict__)
    monkeypatch.setattr(backend._engines._workshop, "_launch", too_large)
    monkeypatch.setattr(card, "compiled", fail)

    with pytest.raises(PlanMismatchError, match=rf"which cannot be done here: .*{reason}"):
        apply(model, plan)
    assert model.__dict__ == before


@pytest.mark.parametrize("kind", [AN_ENGINE, "cuda:winograd4"])
def test_what_cannot_be_made_ready_when_a_call_comes_is_told_of_and_pytorchs_own(
    backend: CudnnBackend, card: PaperCard, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _, plan = a_model_and_its_plan(backend, kind)
    (assigned,) = plan.assignments
    monkeypatch.setattr(backend._engines._workshop, "_launch", too_large)
    monkeypatch.setattr(card, "compiled", fail)
    memory = Memory.of(plan, is_growing=False, by_pages=False)
    variant = Variant(assigned.problem, {ConvOp.FPROP: assigned})
    shapes = TunedShapes("conv", (variant,), memory, Notice(), backend.flags())

    with pytest.warns(UntunedWarning, match="'conv' cannot be divided here"):
        assert shapes.convolution(backend, assigned.problem) is None
