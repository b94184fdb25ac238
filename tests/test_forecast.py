"""What a library's plans come to, by micro-batch size, site and limit."""

import pytest

from mucudnn.choices import Policy
from mucudnn.forecast import Fit, Need, ProblemForecast, Total, forecast
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvOp
from tests.examples import a_problem
from tests.forecasts import MIB, ScriptedLister, ScriptedPlan, at_sizes, forecast_of, occurrence, plans_of
from tests.models import Listener


def the_only(rule: object, op: ConvOp = ConvOp.FPROP, **changes: object) -> ProblemForecast:
    """The forecast of a model of one op."""
    (site,) = forecast_of([occurrence("conv", op, **changes)], rule).sites  # type: ignore[arg-type]
    return site.forecast


def needs(*first_and_least: tuple[int, int, int]) -> ProblemForecast:
    """A problem of 16 samples with given first-ranked and least bytes at sizes."""
    return ProblemForecast(
        a_problem(batch=16), tuple(Need(size, 2, *rest) for size, *rest in first_and_least)
    )


def test_a_problem_is_looked_at_at_every_size_of_the_policy() -> None:
    assert [need.batch for need in the_only(plans_of(1)).needs] == [1, 2, 4, 8, 16]


def test_a_need_has_the_first_ranked_plan_and_the_least_of_all() -> None:
    rule = at_sizes(
        {16: (ScriptedPlan(500, ("TENSOR_CORE", "WINOGRAD")), ScriptedPlan(70), ScriptedPlan(90))}
    )

    assert the_only(rule).needs == (
        Need(batch=16, plans=3, first_bytes=500, least_bytes=70, on_tensor_cores=True),
    )


@pytest.mark.parametrize(("notes", "expected"), [(("TENSOR_CORE",), True), (("FFT",), False)])
def test_the_least_is_on_tensor_cores_if_one_of_several_least_plans_is(
    notes: tuple[str, ...], expected: bool
) -> None:
    rule = at_sizes({16: (ScriptedPlan(500), ScriptedPlan(70), ScriptedPlan(70, notes))})

    assert the_only(rule).needs[0].least_on_tensor_cores is expected


@pytest.mark.parametrize(
    ("op", "dtype", "sum_bytes"),
    [
        (ConvOp.WGRAD, "bfloat16", 4 * 24 * 16 * 3 * 5),
        (ConvOp.WGRAD, "float32", 0),
        (ConvOp.FPROP, "bfloat16", 0),
        (ConvOp.DGRAD, "float16", 0),
    ],
)
def test_a_part_of_a_16_bit_weight_gradient_counts_the_float32_sum(
    op: ConvOp, dtype: str, sum_bytes: int
) -> None:
    found = the_only(lambda _: (ScriptedPlan(1000), ScriptedPlan(10)), op, dtype=dtype)

    bytes_at = {need.batch: (need.first_bytes, need.least_bytes) for need in found.needs}
    assert bytes_at[8] == (1000 + sum_bytes, 10 + sum_bytes)
    assert bytes_at[16] == (1000, 10)


def test_a_part_is_asked_for_with_the_alignment_that_its_slices_have() -> None:
    lister = ScriptedLister(plans_of(1))

    forecast([occurrence("conv", in_channels=3, input_size=(15, 15))], lister, device="", library="")

    assert [(each.batch, each.alignment_bytes) for each in lister.asked] == [
        (1, 2), (2, 4), (4, 8), (8, 16), (16, 16)
    ]  # fmt: skip


def test_equal_problems_are_looked_at_once_whether_a_bias_is_added_or_not() -> None:
    lister = ScriptedLister(plans_of(1))

    made = forecast([occurrence("first", bias=True), occurrence("second")], lister, device="", library="")

    assert len(lister.asked) == 5
    assert made.sites[0].forecast is made.sites[1].forecast
    assert made.sites[0].occurrence.problem.bias is True


def test_a_size_without_any_plan_is_left_out() -> None:
    found = the_only(at_sizes({16: (ScriptedPlan(5),), 4: (ScriptedPlan(3),)}))

    assert [need.batch for need in found.needs] == [4, 16]


def test_a_problem_without_a_plan_for_the_whole_batch_has_no_undivided_need() -> None:
    found = the_only(at_sizes({4: (ScriptedPlan(3),)}))

    assert (found.undivided, found.undivided_bytes, found.best_bytes) == (None, None, 3)


def test_a_problem_without_any_plan_is_told_apart_from_one_that_is_too_large() -> None:
    found = the_only(at_sizes({}))

    assert (found.best, found.least, found.best_bytes, found.least_bytes) == (None, None, None, None)
    assert found.fit(2**60) is Fit.NO_PLAN


def test_of_sizes_that_need_the_same_the_largest_is_best() -> None:
    found = needs((1, 7, 5), (4, 3, 2), (8, 3, 2), (16, 9, 4))

    assert found.best is not None
    assert found.least is not None
    assert (found.best.batch, found.least.batch) == (8, 8)


@pytest.mark.parametrize(
    ("limit_bytes", "fit", "largest"),
    [
        (900, Fit.UNDIVIDED, 16),
        (899, Fit.DIVIDED, 8),
        (99, Fit.DIVIDED, 1),
        (49, Fit.LOWER_RANKED, None),
        (10, Fit.LOWER_RANKED, None),
        (9, Fit.NEVER, None),
    ],
)
def test_a_limit_is_inclusive_and_prefers_the_largest_micro_batch(
    limit_bytes: int, fit: Fit, largest: int | None
) -> None:
    # Two samples need more than eight here: workspaces need not rise with the size.
    found = needs((1, 50, 10), (2, 200, 10), (8, 100, 10), (16, 900, 500))

    assert found.fit(limit_bytes) is fit
    within = found.largest_within(limit_bytes)
    assert (None if within is None else within.batch) == largest


def test_at_most_so_many_samples_the_largest_size_counts() -> None:
    found = needs((1, 50, 10), (8, 100, 10), (16, 900, 500))

    assert [found.bytes_at_most(size) for size in (0, 1, 7, 8, 256)] == [None, 50, 50, 100, 900]


def test_totals_are_the_sum_and_the_largest_over_sites() -> None:
    small, large = occurrence("small"), occurrence("large", out_channels=48)
    made = forecast_of(
        [small, large, occurrence("again")],
        lambda problem: plans_of(3 if problem.out_channels == 48 else 2)(problem),
    )

    assert made.undivided == Total(112 * MIB, 48 * MIB, large.site)
    assert made.best == Total(7 * MIB, 3 * MIB, large.site)
    assert made.least == Total(3 * 1024, 1024, small.site)
    assert made.at_most(4) == Total(28 * MIB, 12 * MIB, large.site)


def test_totals_leave_out_what_has_no_plan() -> None:
    made = forecast_of([occurrence("conv")], at_sizes({4: (ScriptedPlan(3),)}))

    assert made.undivided == Total(0, 0, None, unknown=1)
    assert made.best == Total(3, 3, ConvSite("conv", ConvOp.FPROP))


def test_progress_is_told_of_each_distinct_problem() -> None:
    listener = Listener()

    forecast_of(
        [occurrence("a"), occurrence("b"), occurrence("c", out_channels=48)], plans_of(1), progress=listener
    )

    assert (listener.work, listener.measured) == (2, 2)
    assert [done for _, done in listener.steps] == [0, 1]
    assert listener.steps[0][0].startswith("fprop 16x16x14x12 -> 24")


def test_the_policy_decides_which_sizes_are_looked_at() -> None:
    made = forecast_of([occurrence("conv", batch=3)], plans_of(1), policy=Policy.ALL)

    assert [need.batch for need in made.sites[0].forecast.needs] == [1, 2, 3]


def test_only_parts_need_what_adding_to_the_gradient_takes_more() -> None:
    plan = ScriptedPlan(MIB, accumulating_bytes=3 * MIB)

    found = forecast_of([occurrence("conv", ConvOp.WGRAD, dtype="float32")], lambda _: (plan,))

    first_bytes = {need.batch: need.first_bytes for need in found.sites[0].forecast.needs}
    assert first_bytes == {16: MIB, **dict.fromkeys((1, 2, 4, 8), 3 * MIB)}


def test_sizes_that_do_not_add_up_to_the_mini_batch_fit_nothing() -> None:
    # Workspaces need not rise with the batch: of 10 samples, 8 alone leave 2 that need more.
    found = ProblemForecast(
        a_problem(batch=10), (Need(1, 2, 9, 9), Need(2, 2, 7, 6), Need(4, 2, 8, 8), Need(8, 2, 3, 3))
    )

    assert found.fit(6) is Fit.LOWER_RANKED
    assert found.fit(5) is Fit.NEVER
    assert found.fit(7) is Fit.DIVIDED
    assert found.largest_within(7) == Need(8, 2, 3, 3)
    assert (found.best_bytes, found.least_bytes) == (7, 6)


def test_the_neediest_size_is_one_of_a_division_that_adds_up() -> None:
    # Of 6 samples, 5 leave one that needs more; 3 and 3 need little.
    found = ProblemForecast(
        a_problem(batch=6), tuple(Need(size, 1, 100 if 3 <= size <= 5 else 1000, 7) for size in range(1, 7))
    )

    assert found.best == found.by_size[3]
    assert found.largest_within(100) == found.best
    assert found.least == found.by_size[6]


def test_sizes_that_never_add_up_to_the_batch_never_fit() -> None:
    assert needs((3, 10, 5)).fit(2**60) is Fit.NEVER
