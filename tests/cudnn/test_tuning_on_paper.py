"""From a problem to a division on cuDNN, with all that lies between, on a card on paper."""

import dataclasses
from typing import Any

import pytest
import torch

from mucudnn.algorithms import own
from mucudnn.algorithms.own import own_convolution
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.backends.cudnn.footprint import check_counts
from mucudnn.backends.cudnn.library import Library
from mucudnn.backends.cudnn.tiles import is_id as is_tiles
from mucudnn.choices import Policy, Search
from mucudnn.division import Division
from mucudnn.errors import UnmeasuredError
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate, RefusalKind, Trial
from mucudnn.profiling.profiler import Profiler
from mucudnn.solvers import solve_reuse
from mucudnn.store.memory import MemoryStore
from mucudnn.timing import SamplingRule
from tests.breadth import in_turn
from tests.cudnn.ledgers import Blind
from tests.cudnn.paper import PaperCard, PaperLibrary, paper_backend
from tests.operands import a_convolution, operands_of, reference, relative_error

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("one_thread")]

ONCE = SamplingRule(looks=(1,), precision=1.0, min_span_ns=0, warmups=1)
"""Times on paper say nothing: one sample of each is enough."""

TENSOR_CORES = {
    "in_channels": 64,
    "out_channels": 64,
    "input_size": (14, 14),
    "batch": 8,
    "dtype": "bfloat16",
}
"""Contiguous, so that the plans for tensor cores want copies of x and y: 392 KiB of this."""


@pytest.fixture
def paper(library: Library) -> PaperLibrary:
    return PaperLibrary(library)


@pytest.fixture
def card() -> PaperCard:
    return PaperCard(Rules(allow_tf32=False))


@pytest.fixture
def backend(paper: PaperLibrary, card: PaperCard) -> CudnnBackend:
    return paper_backend(paper, card)


def profiler(backend: CudnnBackend, limit_bytes: int) -> Profiler:
    measurer = LiveMeasurer(backend, ONCE, ONCE)
    return Profiler(measurer, MemoryStore(), limit_bytes, Policy.POWER_OF_TWO)


def conv(op: ConvOp, **changes: object) -> ConvProblem:
    return a_convolution(**{"op": op, **TENSOR_CORES, **changes})


@pytest.mark.parametrize("op", ConvOp)
def test_nothing_above_the_limit_is_ever_launched(
    backend: CudnnBackend, paper: PaperLibrary, op: ConvOp
) -> None:
    limit_bytes = 2**18
    wants = [backend.buffer_bytes(conv(op), name) for name in backend.algorithms(conv(op))[1:]]
    assert max(wants) > limit_bytes

    found = profiler(backend, limit_bytes).profile(conv(op))

    assert max(each.workspace_bytes for each in paper.executions) <= limit_bytes
    assert {each.kind for each in found.refusals} == {RefusalKind.OVER_LIMIT}
    assert max(each.workspace_bytes for each in found.candidates) <= limit_bytes


@in_turn("dtype", ["float32", "bfloat16"], op=ConvOp, layout=Layout)
def test_what_the_solver_makes_of_a_profile_runs_and_is_right(
    backend: CudnnBackend, paper: PaperLibrary, op: ConvOp, dtype: str, layout: Layout
) -> None:
    problem = conv(op, dtype=dtype, layout=layout, filter_layout=layout, batch=7)
    limit_bytes = 2**19
    found = profiler(backend, limit_bytes).profile(problem)
    engines = [each for each in found.candidates if each.algorithm != backend.own]
    division = solve_reuse(engines, problem.batch, limit_bytes)
    operands, where = operands_of(problem), Workspace(backend.device)
    paper.executions.clear()

    result = Runner(backend, problem, division)(where, *operands)

    bound = {"float32": 1e-6, "bfloat16": 8e-3}[dtype]
    assert relative_error(result, reference(problem, *operands)) <= bound
    assert len(paper.executions) == len(division.parts)
    assert where.n_bytes <= division.workspace_bytes <= limit_bytes


def test_a_part_declares_plan_and_sum_and_the_whole_its_plan_alone(backend: CudnnBackend) -> None:
    problem = conv(ConvOp.WGRAD)

    found = profiler(backend, 2**30).profile(problem)

    sum_bytes = 4 * 64 * 64 * 3 * 3
    for each in found.candidates:
        if each.algorithm != backend.own:
            plan_bytes = backend.buffer_bytes(problem.part(each.batch), each.algorithm)
            assert each.workspace_bytes == plan_bytes + (sum_bytes if each.batch < problem.batch else 0)


@dataclasses.dataclass
class WrongPlan:
    """A library one engine of which computes too little."""

    paper: PaperLibrary
    engine: int

    def execute(self, handle: int | None, plan: int, pack: int) -> int:
        (configuration,) = self.paper._attributes[plan][401]
        (engine,) = self.paper._attributes[configuration][300]
        status = PaperLibrary._execute(self.paper, handle, plan, pack)
        if self.paper._attributes[engine][1301] == [self.engine]:
            self._lose_a_value()
        return status

    def _lose_a_value(self) -> None:
        import ctypes

        ctypes.memset(self.paper.executions[-1].addresses[3], 0, 512)


def test_a_plan_that_computes_wrongly_is_quarantined_with_its_evidence(paper: PaperLibrary) -> None:
    problem = conv(ConvOp.FPROP)
    honest = paper_backend(paper, PaperCard(Rules(allow_tf32=False)))
    engine = int(honest.algorithms(problem)[1].removeprefix("cudnn:eng").split("_")[0])
    paper._execute = WrongPlan(paper, engine).execute  # type: ignore[method-assign]
    backend = paper_backend(paper, PaperCard(Rules(allow_tf32=False)))

    found = profiler(backend, 2**30).profile(problem)

    wrong = [each for each in found.refusals if each.kind is RefusalKind.WRONG]
    assert wrong
    assert all(each.algorithm.startswith(f"cudnn:eng{engine}_") for each in wrong)
    assert all("its relative error is" in each.reason for each in wrong)
    assert not any(each.algorithm.startswith(f"cudnn:eng{engine}_") for each in found.candidates)
    assert {each.batch for each in wrong} == {1, 2, 4, 8}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ConvOp)
def test_plans_that_write_nothing_are_all_found_out(paper: PaperLibrary, op: ConvOp, dtype: str) -> None:
    paper._execute = lambda *_: 0  # type: ignore[method-assign]
    backend = paper_backend(paper, PaperCard(Rules(allow_tf32=False)))

    found = profiler(backend, 2**30).profile(conv(op, dtype=dtype))

    right = {each.algorithm for each in found.candidates} - {backend.own}
    assert all(map(is_tiles, right))  # which are none of these plans
    assert bool(right) == (dtype in ("float32", "float64"))
    assert {each.kind for each in found.refusals} == {RefusalKind.WRONG}


def test_pytorchs_own_is_not_even_tried_where_its_plan_wants_more_than_the_limit(
    backend: CudnnBackend,
) -> None:
    problem = conv(ConvOp.FPROP)

    found = profiler(backend, 2**18).profile(problem)

    refused = {each.batch for each in found.refusals if each.algorithm == backend.own}
    assert 8 in refused
    assert all(each.batch < 8 for each in found.candidates if each.algorithm == backend.own)


def test_pytorchs_own_that_tries_plans_is_not_tried_where_any_of_the_list_wants_more(
    backend: CudnnBackend, card: PaperCard
) -> None:
    problem = conv(ConvOp.FPROP, layout=Layout.CHANNELS_LAST)
    wanted = [each.overwriting_bytes for each in backend._engines._listed_for_own(problem)]
    most = max(wanted)
    assert wanted[0] < most
    trial = Trial(problem, backend.own, whole=True)

    assert backend.workspace_bytes(trial, most - 1) is not None
    card.tries_plans = True  # if only the first: room is made for the largest all the same
    assert backend.workspace_bytes(trial, most - 1) is None
    assert backend.workspace_bytes(trial, most) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"groups": 4},
        {
            "input_size": (5, 6, 7),
            "kernel_size": (3,) * 3,
            "stride": (2,) * 3,
            "padding": (1,) * 3,
            "dilation": (1,) * 3,
        },
    ],
    ids=["plain", "groups", "3-D"],
)
def test_pytorchs_own_makes_no_image_in_the_place_of_one_that_it_does_not_read(
    backend: CudnnBackend, card: PaperCard, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    problem = conv(ConvOp.DGRAD, **{"dtype": "float32", "stride": (2, 2), **changes})
    operands = operands_of(problem)
    expected = own_convolution(problem, *operands)
    asked: list[ConvProblem] = []
    monkeypatch.setattr(own, "unread_operand", None)
    monkeypatch.setattr(card, "runs_cudnn", lambda problem: asked.append(problem) or True)

    results = [backend.own_convolution(problem, *operands) for _ in range(2)]

    assert all(relative_error(each, expected) < 1e-6 for each in results)
    assert not any(each.requires_grad for each in results)
    assert asked == [problem]


def test_an_image_is_made_where_pytorchs_own_is_not_cudnns(
    backend: CudnnBackend, card: PaperCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = conv(ConvOp.DGRAD, dtype="float32")
    operands = operands_of(problem)
    monkeypatch.setattr(card, "runs_cudnn", lambda _: False)

    result = backend.own_convolution(problem, *operands)

    assert torch.equal(result, own_convolution(problem, *operands))


@pytest.mark.parametrize("op", ConvOp)
def test_what_pytorchs_own_needs_in_float64_is_asked_in_the_layout_in_which_it_computes(
    backend: CudnnBackend, op: ConvOp
) -> None:
    # That is the contiguous one, in which the first plan needs nothing; in channels_last it would.
    trial = Trial(conv(op, dtype="float64", layout=Layout.CHANNELS_LAST), backend.own, whole=True)

    assert backend.workspace_bytes(trial, 0) is not None


def test_what_nobody_can_weigh_stays_unmeasured_and_counts_as_no_failure(
    paper: PaperLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, store = PaperCard(Rules(allow_tf32=False)), MemoryStore()
    backend, problem = paper_backend(paper, card), conv(ConvOp.FPROP)
    monkeypatch.setattr(card, "weigh", lambda *_: check_counts(Blind()))
    engine = next(name for name in backend.algorithms(problem) if name.startswith("cudnn:eng"))
    several = [Division((Candidate(engine, 8 // parts, 0.0, 0),) * parts) for parts in (1, 2)]
    tuner = Profiler(LiveMeasurer(backend, ONCE, ONCE), store, 2**30, Policy.POWER_OF_TWO)

    with pytest.raises(UnmeasuredError, match=r"^PyTorch's allocator must count"):
        tuner.profile(problem)
    with pytest.raises(UnmeasuredError, match=r"^PyTorch's allocator must count"):
        tuner.compare(problem, several)
    assert store.count() == 0
    assert not paper.executions


def test_an_exhaustive_search_finds_engines_that_heuristics_leave_out(backend: CudnnBackend) -> None:
    from mucudnn.choices import Search

    problem = conv(ConvOp.FPROP, dtype="float32")

    heuristic, exhaustive = (set(backend.algorithms(problem, search)) for search in Search)

    assert heuristic < exhaustive
    assert all(backend.computes(problem, name) for name in exhaustive)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_algorithms_are_deterministic_but_for_those_that_a_user_may_forbid_as_such(
    library: Library, dtype: str
) -> None:
    problem = conv(ConvOp.WGRAD, dtype=dtype)
    lax, strict = (
        paper_backend(PaperLibrary(library), PaperCard(Rules(deterministic=flag))) for flag in (False, True)
    )

    offered = lax.algorithms(problem, Search.EXHAUSTIVE)
    steady = {name for name in offered if lax.is_deterministic(problem, name)}

    assert steady < set(offered)
    assert steady | {strict.own} == set(strict.algorithms(problem, Search.EXHAUSTIVE))
    assert strict.is_deterministic(problem, strict.own)


@pytest.mark.parametrize("is_forbidden", [True, False])
def test_what_pytorchs_own_runs_is_deterministic_only_if_that_is_known(is_forbidden: bool) -> None:
    backend = CudnnBackend(PaperCard(Rules(deterministic=is_forbidden)), None)

    assert backend.is_deterministic(conv(ConvOp.WGRAD), backend.own) is is_forbidden
