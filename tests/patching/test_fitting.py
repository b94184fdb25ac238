"""What a site runs within its plan's memory: a smaller batch by the same profile."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.choices import Mode, Policy
from mucudnn.division import Division, buffer_bytes, own_bytes
from mucudnn.errors import BackendError, InfeasibleError
from mucudnn.execution import workspace
from mucudnn.execution.workspace import Owner, release_workspaces, workspace_of
from mucudnn.patching import applying, fitting
from mucudnn.patching.fitting import Memory, divided, division_for, is_unpatched
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate
from mucudnn.solvers import ReuseTable, solve_reuse
from mucudnn.solvers.exhaustive import fastest_division
from tests.breadth import examples
from tests.devices import Device
from tests.examples import a_problem
from tests.operands import a_convolution, operands_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("batch", range(1, 8))
def test_a_smaller_batch_gets_the_best_division_within_the_workspace(batch: int) -> None:
    candidates = tuple(
        Candidate(name, size, time_s * size + 1, workspace_bytes * size)
        for name, time_s, workspace_bytes in (
            ("cpu:aten", 1.0, 0),
            ("cpu:im2col", 0.5, 100),
            ("cpu:fft16", 0.1, 500),
        )
        for size in (1, 2, 4, 8)
    )
    division = Division((Candidate("cpu:im2col", 4, 3.0, 400),) * 2)
    assigned = Assignment(ConvSite("conv", ConvOp.FPROP), a_problem(batch=8), division, candidates)

    found = division_for(assigned, batch, share_bytes=400)

    assert found == fastest_division(candidates, batch, limit_bytes=400)


def test_equal_sites_have_the_table_of_smaller_batches_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def noted(candidates: tuple[Candidate, ...], batch: int) -> ReuseTable:
        made.append(batch)
        return ReuseTable(candidates, batch)

    monkeypatch.setattr(fitting, "ReuseTable", noted)
    fitting._table.cache_clear()
    sites = [_divided_as_it_comes(Candidate("cpu:im2col", 1, 0.1, 90)) for _ in range(2)]

    keys = [[division_for(site, batch, 100, 90).key for batch in (3, 5, 7)] for site in sites]

    assert keys[0] == keys[1] == [f"cpu:im2col@1*{batch}" for batch in (3, 5, 7)]
    assert made == [4, 8]


def test_tables_of_very_many_samples_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting._table.cache_clear()
    monkeypatch.setattr(fitting, "_MOST_COVERED", 4)
    site = _divided_as_it_comes(Candidate("cpu:im2col", 1, 0.1, 90))

    assert division_for(site, 5, 100, 90).key == "cpu:im2col@1*5"
    assert fitting._table.cache_info().currsize == 0


def test_where_pytorchs_own_has_won_undivided_it_serves_smaller_batches_undivided() -> None:
    won = Division((Candidate("cpu:aten", 8, 1.0, 0),))
    rival = Candidate("cpu:im2col", 4, 0.1, 0)
    assigned = Assignment(ConvSite("conv", ConvOp.FPROP), a_problem(batch=8), won, (rival, *won.parts))

    assert division_for(assigned, 4, share_bytes=0).key == "cpu:aten@4*1"


@pytest.mark.parametrize("won", ["cpu:aten", "cpu:im2col"])
def test_a_single_volume_is_pytorchs_own_only_if_that_was_weighed_and_fits(won: str) -> None:
    own, other = Candidate("cpu:aten", 2, 1.0, 20), Candidate("cpu:im2col", 2, 1.0, 40)
    chosen = {each.algorithm: each for each in (own, other)}[won]
    single, own_single = Candidate("cpu:im2col", 1, 0.9, 30), Candidate("cpu:aten", 1, 0.5, 10)

    def runs(size: tuple[int, ...], *singles: Candidate) -> str:
        taps = (3,) * len(size)
        problem = a_convolution(batch=2, input_size=size, kernel_size=taps, **_unit_steps(len(size)))
        candidates = tuple(sorted((own, other, *singles)))
        assigned = Assignment(ConvSite("conv", ConvOp.FPROP), problem, Division((chosen,)), candidates)
        return division_for(assigned, 1, share_bytes=40).key

    assert runs((9, 9, 9), single) == "cpu:im2col@1*1"
    assert runs((9, 9, 9), single, own_single) == "cpu:aten@1*1"
    assert runs((9, 9), single) == "cpu:aten@1*1"  # of images fewer samples need no more
    assert runs((9, 9, 9)) == "cpu:aten@1*1"  # nothing is known of a single one


@pytest.mark.parametrize("rank", [2, 3])
def test_a_single_sample_is_not_pytorchs_own_where_two_fit_as_a_part_and_one_does_not(rank: int) -> None:
    problem = a_convolution(batch=8, input_size=(9,) * rank, kernel_size=(3,) * rank, **_unit_steps(rank))
    pair, single = Candidate("cpu:aten", 2, 1.0, 20), Candidate("cpu:im2col", 1, 0.9, 30)

    def runs(*candidates: Candidate) -> str:
        site = ConvSite("conv", ConvOp.FPROP)
        assigned = Assignment(site, problem, Division((pair,) * 4), tuple(sorted(candidates)))
        return division_for(assigned, 1, share_bytes=40).key

    assert runs(pair, single) == "cpu:im2col@1*1"
    assert runs(pair, single, Candidate("cpu:aten", 1, 0.5, 40)) == "cpu:aten@1*1"
    with pytest.raises(BackendError, match=r"PyTorch's own does not fit, and nothing .* fits into 20 B"):
        runs(pair)


def _unit_steps(rank: int) -> dict[str, tuple[int, ...]]:
    return {"stride": (1,) * rank, "padding": (1,) * rank, "dilation": (1,) * rank}


def _assigned(*candidates: Candidate, chosen: int = 0, times: int = 1) -> Assignment:
    """A site that is profiled, with one of the candidates chosen so many times."""
    division = Division((candidates[chosen],) * times)
    return Assignment(
        ConvSite("conv", ConvOp.FPROP), a_problem(batch=division.batch), division, tuple(sorted(candidates))
    )


@pytest.mark.parametrize(
    ("own_s", "share_bytes", "expected"),
    [
        pytest.param(3.0, 900, "cpu:im2col@4*1+cpu:im2col@1*3", id="own takes 2.6 s, parts 2.5 s"),
        pytest.param(2.8, 900, "cpu:aten@7*1", id="own takes 2.45 s"),
        pytest.param(2.8, 899, "cpu:im2col@4*1+cpu:im2col@1*3", id="own does not fit"),
    ],
)
def test_a_smaller_batch_is_divided_only_where_that_should_be_faster_than_pytorchs_own(
    own_s: float, share_bytes: int, expected: str
) -> None:
    assigned = _assigned(
        Candidate("cpu:im2col", 8, 1.0, 8),
        Candidate("cpu:im2col", 4, 1.0, 4),
        Candidate("cpu:im2col", 1, 0.5, 1),
        Candidate("cpu:aten", 8, own_s, 900),
    )

    assert division_for(assigned, 7, share_bytes).key == expected


def test_no_algorithm_but_pytorchs_own_runs_at_a_size_that_was_never_checked() -> None:
    parts = Candidate("cpu:im2col", 4, 1.0, 0), Candidate("cpu:aten", 8, 9.0, 900)
    assigned = _assigned(*parts, times=2)

    assert division_for(assigned, 5, share_bytes=900).key == "cpu:aten@5*1"
    with pytest.raises(
        BackendError, match="5 samples cannot be made of the sizes that were measured and fit: 4"
    ):
        division_for(assigned, 5, share_bytes=899)


def test_pytorchs_own_serves_a_smaller_batch_that_was_measured_though_it_takes_more_than_was_chosen() -> None:
    assigned = _assigned(
        Candidate("cpu:im2col", 8, 1.0, 8),
        Candidate("cpu:im2col", 4, 0.5, 4),
        Candidate("cpu:aten", 4, 0.1, 90),
        Candidate("cpu:aten", 8, 2.0, 900),
    )

    assert division_for(assigned, 4, share_bytes=100).key == "cpu:aten@4*1"


def _divided_as_it_comes(*singles: Candidate) -> Assignment:
    """A site of 8 samples that runs PyTorch's own in pairs, beside what computes one sample."""
    return _assigned(Candidate("cpu:aten", 2, 1.0, 60), *singles, times=4)


def test_a_single_sample_of_pytorchs_own_takes_what_it_was_weighed_to_take() -> None:
    assigned = _assigned(Candidate("cpu:aten", 8, 1.0, 60), Candidate("cpu:aten", 1, 0.5, 90))

    assert [division_for(assigned, batch, 100).workspace_bytes for batch in (8, 2, 1)] == [60, 60, 90]


def test_single_samples_may_take_more_than_the_pairs_that_were_chosen() -> None:
    assigned = _divided_as_it_comes(Candidate("cpu:im2col", 1, 1.0, 90), Candidate("cpu:fft16", 1, 0.1, 101))

    assert division_for(assigned, 3, 100, 90).key == "cpu:aten@2*1+cpu:im2col@1*1"


def test_smaller_batches_take_no_more_of_the_buffer_than_others_reckon_with() -> None:
    small, large = Candidate("cpu:im2col", 1, 1.0, 40), Candidate("cpu:winograd2", 1, 0.1, 50)
    assigned = _divided_as_it_comes(small, large)

    assert division_for(assigned, 3, 100, 49).key == "cpu:aten@2*1+cpu:im2col@1*1"
    assert division_for(assigned, 3, 100, 50).key == "cpu:winograd2@1*3"


@pytest.mark.parametrize(
    ("fast", "slow", "expected"),
    [
        (("cpu:aten", 90), ("cpu:im2col", 70), "cpu:aten@1*3"),
        (("cpu:fft16", 90), ("cpu:im2col", 70), "cpu:aten@2*1+cpu:im2col@1*1"),
        (("cpu:aten", 101), ("cpu:im2col", 90), "cpu:aten@2*1+cpu:im2col@1*1"),
    ],
    ids=["PyTorch's own", "what takes least", "PyTorch's own is over the share"],
)
def test_single_samples_may_take_what_pytorchs_own_does_else_the_least(
    fast: tuple[str, int], slow: tuple[str, int], expected: str
) -> None:
    singles = (Candidate(name, 1, time_s, n_bytes) for (name, n_bytes), time_s in ((fast, 0.1), (slow, 1.0)))

    assert division_for(_divided_as_it_comes(*singles), 3, 100).key == expected


LIMIT_BYTES = 100
SUM_BYTES = 2**16


def _memory_of(*assigned: Assignment, mode: Mode = Mode.REUSE, **how: bool) -> Memory:
    environment = CpuBackend().environment()
    plan = Plan(mode, Policy.POWER_OF_TWO, LIMIT_BYTES, environment, assigned, (), "0")
    return Memory.of(plan, **{"is_growing": False, "by_pages": True, **how})


def test_where_more_is_tuned_later_the_buffer_may_come_to_the_limit() -> None:
    known = _memory_of(_assigned(Candidate("cpu:im2col", 8, 1.0, 40)), is_growing=True)

    assert (known.buffer_bytes, known.capacity_bytes) == (LIMIT_BYTES, 40)
    assert known.room.bound(Division((Candidate("cpu:aten", 8, 1.0, 60),))) == LIMIT_BYTES


def test_smaller_batches_do_not_enlarge_the_buffer_that_tuning_reckoned_with() -> None:
    singles = Candidate("cpu:aten", 1, 1.0, 70), Candidate("cpu:im2col", 1, 1.0, 90)

    known = _memory_of(_divided_as_it_comes(*singles))

    assert (known.buffer_bytes, known.capacity_bytes) == (0, 0)


@pytest.mark.parametrize(("by_pages", "single_bytes"), [(True, 90), (False, 0)])
def test_the_buffer_may_come_to_what_a_single_sample_takes_of_which_pytorchs_own_does_not_fit(
    *, by_pages: bool, single_bytes: int
) -> None:
    """Only processors compute that by another algorithm than several, which needs more."""
    site = _divided_as_it_comes(Candidate("cpu:im2col", 1, 1.0, 90), Candidate("cpu:fft16", 1, 1.0, 101))

    known = _memory_of(site, by_pages=by_pages)

    assert (known.buffer_bytes, known.single_bytes) == (0, single_bytes)
    assert known.room.bound(Division((Candidate("cpu:aten", 2, 1.0, 60),) * 4)) == (100 if by_pages else None)


@pytest.mark.parametrize(
    ("single", "is_as_it_comes"),
    [
        (Candidate("cpu:aten", 1, 0.1, 40), True),
        (Candidate("cpu:aten", 1, 0.1, 41), False),  # does not fit beside the buffer
        (Candidate("cpu:im2col", 1, 0.1, 10), False),  # PyTorch's own does not fit at all
    ],
)
def test_what_runs_pytorchs_own_is_unpatched_only_if_a_single_sample_has_room_as_well(
    single: Candidate, *, is_as_it_comes: bool
) -> None:
    own = Candidate("cpu:aten", 8, 1.0, 30), Candidate("cpu:aten", 2, 1.0, 30)
    site, other = _assigned(*own, single), _assigned(Candidate("cpu:im2col", 8, 1.0, 60))

    memory = _memory_of(site, other)

    assert is_unpatched(site, memory) == is_as_it_comes
    assert memory.room_as_tuned.is_unpatched(site.division)


def test_tuning_knows_of_no_single_samples_so_nor_does_what_it_has_found_of_frozen_graphs() -> None:
    own = Candidate("cpu:aten", 8, 1.0, 30), Candidate("cpu:aten", 2, 1.0, 30)
    site = _assigned(*own, Candidate("cpu:im2col", 1, 0.1, 90))

    memory = _memory_of(site)

    assert not memory.room.is_unpatched(site.division)  # beside a buffer of 90
    assert memory.room_as_tuned.is_unpatched(site.division)
    assert applying._own_when_frozen(site.problem, site, None, memory) == 8


@pytest.mark.parametrize(
    ("own_bytes", "by_pages", "mode", "capacity_bytes"),
    [
        (90, False, Mode.REUSE, 90),
        (60, False, Mode.REUSE, 40),  # both fit at once
        (90, True, Mode.REUSE, 40),  # what goes back goes to the system
        (90, False, Mode.SHARING, 0),
    ],
)
def test_in_blocks_the_buffer_gets_one_that_pytorchs_own_fits_in_meanwhile(
    own_bytes: int, by_pages: bool, mode: Mode, capacity_bytes: int
) -> None:
    sites = (
        _assigned(Candidate("cpu:im2col", 2, 1.0, 40), times=4),
        _assigned(Candidate("cpu:aten", 8, 1.0, own_bytes)),
    )

    known = _memory_of(*sites, mode=mode, by_pages=by_pages)

    assert (known.buffer_bytes, known.capacity_bytes) == (40, capacity_bytes)


def test_what_fits_beside_the_buffer_and_not_beside_the_block_has_it_given_back() -> None:
    buffer, large, small = (
        _assigned(Candidate(name, 8, 1.0, n_bytes))
        for name, n_bytes in (("cpu:im2col", 40), ("cpu:aten", 90), ("cpu:aten", 55))
    )

    known = [_memory_of(*sites, by_pages=False) for sites in ((buffer, small), (buffer, large, small))]

    assert [each.capacity_bytes for each in known] == [40, 90]
    assert [each.room.bound(small.division) for each in known] == [None, LIMIT_BYTES]


@pytest.mark.parametrize(
    ("single_s", "share_bytes", "at_once", "expected"),
    [
        (0.8, 100, False, "cpu:aten@4*1+cpu:winograd4@2*1"),
        (0.8, 100, True, "cpu:winograd4@2*3"),
        (0.8, 115, True, "cpu:aten@4*1+cpu:winograd4@2*1"),
        (0.6, 100, True, "cpu:aten@4*1+cpu:aten@1*2"),
    ],
    ids=["one after the other", "too much at once", "just enough at once", "all by PyTorch's own"],
)
def test_a_smaller_batch_takes_no_more_at_once_than_its_share(
    single_s: float, share_bytes: int, *, at_once: bool, expected: str
) -> None:
    """Parts of PyTorch's own take 60 beside the whole buffer, of which others take 55."""
    assigned = _assigned(
        Candidate("cpu:aten", 4, 0.1, 60),
        Candidate("cpu:aten", 1, single_s, 60),
        Candidate("cpu:im2col", 3, 0.8, 30),
        Candidate("cpu:winograd4", 2, 0.5, 55),
        Candidate("cpu:im2col", 7, 1.0, 60),
        chosen=4,
    )

    assert division_for(assigned, 6, share_bytes, 90, at_once=at_once).key == expected


class Card(Device):
    """A card that knows what candidates take, and notes the most that is taken while PyTorch's own runs."""

    def __init__(self, sites: Iterable[Assignment]) -> None:
        super().__init__()
        self._known = {site.problem.out_channels: site.candidates for site in sites}
        self.most_bytes = 0

    def declares(self, algorithm: str) -> bool:
        return algorithm != self.own

    def buffer_bytes(self, problem: ConvProblem, algorithm: str) -> int:
        return 0 if algorithm == self.own else self._taken(problem, algorithm)

    def own_convolution(self, problem: ConvProblem, *operands: Tensor | None) -> Tensor:
        taken_bytes = workspace_of(self).held_bytes + self._taken(problem, self.own)
        self.most_bytes = max(self.most_bytes, taken_bytes)
        return super().own_convolution(problem, *operands)  # type: ignore[arg-type]

    def _taken(self, problem: ConvProblem, algorithm: str) -> int:
        """Of a size that was never measured PyTorch's own takes no more than of the next larger one."""
        able = [
            each
            for each in self._known[problem.out_channels]
            if each.algorithm == algorithm and each.batch >= problem.batch
        ]
        return min(able, key=lambda each: each.batch).workspace_bytes


class _Noting(Card):
    """Notes what it gets ready for a run."""

    def __init__(self, *sites: Assignment) -> None:
        super().__init__(sites)
        self.ready: list[tuple[str, int]] = []

    def get_ready(self, problem: ConvProblem, algorithm: str) -> None:
        self.ready.append((algorithm, problem.batch))
        super().get_ready(problem, algorithm)


class _ByPages(_Noting):
    takes_memory_by_pages = True


def _ready(assigned: Assignment, batch: int, mode: Mode, *, by_pages: bool = True) -> list[tuple[str, int]]:
    """What is made ready for so many samples of the only site of a plan: algorithms, and of what size."""
    site = dataclasses.replace(assigned, problem=a_convolution(batch=assigned.division.batch))
    card = _ByPages(site) if by_pages else _Noting(site)
    memory_of_it = _memory_of(site, mode=mode, by_pages=by_pages)
    divided(card, site.problem.with_batch(batch), {ConvOp.FPROP: site}, memory_of_it)
    return [each for each in card.ready if each != ("cpu:aten", batch)]  # as which the gradients run


def test_in_sharing_mode_a_smaller_batch_may_take_all_that_its_site_owns_and_no_more() -> None:
    fits, does_not = (_divided_as_it_comes(Candidate("cpu:im2col", 1, 1.0, n_bytes)) for n_bytes in (60, 61))

    assert _ready(fits, 3, Mode.SHARING) == [("cpu:aten", 2), ("cpu:im2col", 1)]
    with pytest.raises(BackendError, match=r"3 samples cannot be made of the sizes .* and fit: 2"):
        _ready(does_not, 3, Mode.SHARING)


@pytest.mark.parametrize(
    ("by_pages", "expected"),
    [(True, [("cpu:aten", 4), ("cpu:winograd4", 2)]), (False, [("cpu:winograd4", 2)])],
)
def test_where_pages_go_back_parts_of_pytorchs_own_may_take_what_others_took(
    by_pages: bool, expected: list[tuple[str, int]]
) -> None:
    assigned = _assigned(
        Candidate("cpu:aten", 4, 0.1, 60),
        Candidate("cpu:winograd4", 2, 0.5, 55),
        Candidate("cpu:im2col", 7, 1.0, 60),
        chosen=2,
    )

    assert _ready(assigned, 6, Mode.REUSE, by_pages=by_pages) == expected


UNIT_BYTES = 2**16
"""More than im2col of four samples works in."""


def _tuned(number: int, batch: int, profile: list[Candidate], limit_bytes: int) -> Iterator[Assignment]:
    """A site that is tuned, unless that cannot be, or is refused when it is weighed as a whole."""
    with contextlib.suppress(InfeasibleError):
        division = solve_reuse(profile, batch, limit_bytes)
        if own_bytes(division) + buffer_bytes(division) <= limit_bytes:
            problem = a_convolution(batch=batch, out_channels=number + 1)
            yield Assignment(ConvSite("conv", ConvOp.FPROP), problem, division, tuple(sorted(profile)))


def _growing(profile: list[Candidate]) -> list[Candidate]:
    """The candidates, of which PyTorch's own take no less the larger they are, as is taken for granted."""
    own = sorted((each for each in profile if each.algorithm == "cpu:aten"), key=lambda each: each.batch)
    taken = sorted(each.workspace_bytes for each in own)
    grown = [
        dataclasses.replace(each, workspace_bytes=n_bytes) for each, n_bytes in zip(own, taken, strict=True)
    ]
    return [each for each in profile if each not in own] + grown


PROFILES = st.lists(
    st.builds(
        Candidate,
        st.sampled_from(["cpu:aten", "cpu:im2col"]),
        st.sampled_from([1, 2, 3, 4]),
        st.floats(0.1, 1.0),
        st.integers(1, 12).map(lambda units: units * UNIT_BYTES),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda each: (each.algorithm, each.batch),
).map(_growing)


@examples(750)  # of one in a hundred a reckoning that is wrong can be seen
@given(
    st.lists(st.tuples(st.integers(1, 9), PROFILES), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8),
)
def test_whatever_runs_in_whatever_order_keeps_to_the_limit_on_a_card(
    tuned: list[tuple[int, list[Candidate]]], calls: list[tuple[int, int]]
) -> None:
    """Calls are of a site, and of a number of samples."""
    limit_bytes = 10 * UNIT_BYTES
    sites = [site for number, each in enumerate(tuned) for site in _tuned(number, *each, limit_bytes)]
    assume(sites)
    environment = CpuBackend().environment()
    plan = Plan(Mode.REUSE, Policy.POWER_OF_TWO, limit_bytes, environment, tuple(sites), (), "0")
    card = Card(sites)
    memory = Memory.of(plan, is_growing=False, by_pages=False)
    release_workspaces()

    for number, batch in calls:
        site = sites[number % len(sites)]
        problem = site.problem.with_batch(min(batch, site.problem.batch))
        try:
            convolution = divided(card, problem, {ConvOp.FPROP: site}, memory)
        except BackendError:  # no sizes add up to so many samples
            continue
        convolution.run(ConvOp.FPROP, *operands_of(problem)[:2])

    assert card.most_bytes <= limit_bytes


class Processor(Card):
    """A processor, which gives back pages, and knows what a single sample takes by PyTorch's own."""

    takes_memory_by_pages = True

    def release(self, tail: Tensor) -> None:
        """Workspaces know what they have touched."""

    def own_convolution(self, problem: ConvProblem, *operands: Tensor | None) -> Tensor:
        self.note(self._taken(problem, self.own))
        return CpuBackend.own_convolution(problem, *operands)  # type: ignore[arg-type]

    def note(self, besides: int = 0) -> None:
        """Note what all buffers have touched, and what is taken besides."""
        there = workspace._workspaces.get(self.queue())
        buffers = [] if there is None else [there.common, *there.owned.values()]
        self.most_bytes = max(self.most_bytes, besides + sum(each._touched_bytes for each in buffers))

    def _taken(self, problem: ConvProblem, algorithm: str) -> int:
        sizes = {each.batch for each in self._known[problem.out_channels] if each.algorithm == self.own}
        if algorithm == self.own and problem.batch == 1 not in sizes:
            return TOO_MUCH
        return super()._taken(problem, algorithm)


TOO_MUCH = 100 * UNIT_BYTES


def _with_singles(profile: list[Candidate], single_units: int, largest: int) -> list[Candidate]:
    """The profile with a pair of PyTorch's own, and a single sample of it that takes so much, if that fits.

    Else the size of the pair tells that a single sample was tried.
    """
    others = [each for each in profile if each.algorithm != "cpu:aten" or each.batch > 2]
    least = min((each.workspace_bytes for each in others if each.is_own), default=UNIT_BYTES)
    own = [(2, least), *([(1, single_units * UNIT_BYTES)] if single_units <= largest else [])]
    return [*others, *(Candidate("cpu:aten", batch, 0.5, n_bytes) for batch, n_bytes in own)]


@examples(750)
@given(
    st.sampled_from(Mode),
    st.lists(st.tuples(st.integers(3, 9), PROFILES, st.integers(1, 14)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8),
)
def test_whatever_runs_in_whatever_order_keeps_to_the_limit_on_a_processor(
    mode: Mode, tuned: list[tuple[int, list[Candidate], int]], calls: list[tuple[int, int]]
) -> None:
    """There a single sample may take more than several. Calls are of a site, and of a number of samples."""
    each_bytes = 10 * UNIT_BYTES
    profiles = [(batch, _with_singles(profile, units, 10)) for batch, profile, units in tuned]
    sites = [site for number, each in enumerate(profiles) for site in _tuned(number, *each, each_bytes)]
    assume(sites)
    shares = sum(site.division.workspace_bytes for site in sites)
    limit_bytes = each_bytes if mode is Mode.REUSE else shares
    plan = Plan(mode, Policy.POWER_OF_TWO, limit_bytes, CpuBackend().environment(), tuple(sites), (), "0")
    processor, owners = Processor(sites), [{ConvOp.FPROP: Owner()} for _ in sites]
    memory = Memory.of(plan, is_growing=False, by_pages=True)
    release_workspaces()

    for number, batch in calls:
        site = sites[number % len(sites)]
        problem = site.problem.with_batch(min(batch, site.problem.batch))
        operands = operands_of(problem)[:2]
        if is_unpatched(site, memory):
            processor.own_convolution(problem, *operands)
            continue
        of_its_own = owners[number % len(sites)] if mode is Mode.SHARING else None
        try:
            convolution = divided(processor, problem, {ConvOp.FPROP: site}, memory, of_its_own)
        except BackendError:  # as where a single sample fits by nothing
            continue
        convolution.run(ConvOp.FPROP, *operands)
        processor.note()

    assert processor.most_bytes <= limit_bytes


def _gradients_in_16_bits(division: Division, *singles: Candidate) -> Assignment:
    """A site that sums weight gradients of bfloat16 in 64 KiB of float32, if in parts."""
    problem = a_convolution(
        op=ConvOp.WGRAD, batch=8, in_channels=64, out_channels=64, input_size=(4, 4), kernel_size=(2, 2),
        padding=(0, 0), dtype="bfloat16",
    )  # fmt: skip
    assert problem.running_sum_bytes == SUM_BYTES
    return Assignment(ConvSite("conv", ConvOp.WGRAD), problem, division, (*division.parts[:1], *singles))


def test_sums_of_16_bit_gradients_lie_in_the_buffer_whoever_computes_the_parts() -> None:
    pairs = Division((Candidate("cpu:aten", 2, 1.0, SUM_BYTES + 10),) * 4)

    assert _memory_of(_gradients_in_16_bits(pairs)).buffer_bytes == SUM_BYTES


def test_a_smaller_batch_has_no_parts_whose_sum_the_buffer_has_no_room_for() -> None:
    whole = Division((Candidate("cpu:onednn_nhwc", 8, 1.0, 10),))
    assigned = _gradients_in_16_bits(whole, Candidate("cpu:aten", 1, 1.0, SUM_BYTES + 10))

    assert division_for(assigned, 3, 2 * SUM_BYTES, SUM_BYTES).key == "cpu:aten@1*3"
    with pytest.raises(BackendError, match="measured and fit: none"):
        division_for(assigned, 3, 2 * SUM_BYTES, SUM_BYTES - 1)


@pytest.mark.parametrize(("batch", "expected"), [(5, "cpu:im2col@4*1+cpu:im2col@1*1"), (4, "cpu:im2col@4*1")])
def test_a_division_that_comes_without_a_profile_is_cut_off(batch: int, expected: str) -> None:
    parts = (Candidate("cpu:im2col", 4, 1.0, 0),) * 2
    assigned = Assignment(ConvSite("conv", ConvOp.FPROP), a_problem(batch=8), Division(parts))

    assert division_for(assigned, batch, share_bytes=0).key == expected


@pytest.mark.parametrize("is_told", [False, True])
def test_pytorchs_own_runs_as_the_plan_has_weighed_it(*, is_told: bool) -> None:
    """A plan may be older, or of more samples, than what tells that PyTorch computes otherwise."""
    planned, met = (
        a_convolution(op=ConvOp.DGRAD, batch=batch, is_apart=each)
        for batch, each in ((4, is_told), (1, not is_told))
    )
    own = Candidate("cpu:aten", 4, 1.0, 0)
    assignments = {ConvOp.DGRAD: Assignment(ConvSite("conv", ConvOp.DGRAD), planned, Division((own,)))}
    backend = CpuBackend()
    memory = Memory(backend.environment(), False, 2**30, 2**20, 0)  # noqa: FBT003  # not in sharing mode

    assert divided(backend, met, assignments, memory).problem == planned.with_batch(1)
