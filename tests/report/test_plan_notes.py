"""What is noted below a plan."""

import dataclasses
import math
from typing import Any

import pytest

from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.intervals import Estimate, Verdict
from mucudnn.problem import ConvOp, Layout
from mucudnn.profile import Candidate
from mucudnn.report import plan_as_json, render_plan
from tests.examples import a_plan, an_environment
from tests.report.plans import (
    FASTER,
    KEPT,
    MIB,
    OVER_LIMIT,
    OWN,
    PREDICTED,
    WINOGRAD,
    a_mixed_plan,
    a_plan_of_a_recording,
    a_plan_with_calls,
    a_plan_with_frozen,
    assigned,
    note,
    seconds,
    within_the_limit,
)


def test_the_notes_add_up_whole_calls_and_count_what_was_not_kept() -> None:
    text = render_plan(a_plan_with_calls(assignments=within_the_limit()))

    assert note(text, "whole calls") == (
        "2 convolutions timed as the model calls them, with the gradients it needs: 40.00 ms before, "
        "30.00 ms now, 1.33 times as fast (1.32 if each call is at the lower end of its interval, "
        "1.35 if at the upper); 1 tried, but not kept."
    )
    assert note(text, "calls").endswith("Calls compared: 2.")
    assert "\ncalls " not in render_plan(a_mixed_plan())


def test_no_speedup_is_added_up_of_calls_that_pytorchs_own_may_not_run() -> None:
    plan = a_plan_with_calls()
    over = [each for each in plan.assignments if each.evidence == OVER_LIMIT]
    mixed = note(render_plan(plan), "whole calls")
    alone = render_plan(a_plan(assignments=tuple(over), limit_bytes=8 * MIB, calls=plan.calls[:1]))

    assert mixed.startswith(
        "1 convolution timed as the model calls it, with the gradients it needs: 10.00 ms"
    )
    for text in (mixed, note(alone, "whole calls")):
        assert "1 convolution of which PyTorch's own may not run every op" in text
        assert "30.00 ms" not in text
    assert "times as fast" not in alone


def test_a_convolution_that_was_not_timed_as_a_whole_call_is_counted() -> None:
    text = render_plan(a_mixed_plan())

    assert note(text, "whole calls").startswith("Not timed for 1 convolution, whose sites are chosen by")
    assert "Not timed for" not in render_plan(a_plan_with_calls())
    kept = assigned("conv", ConvOp.FPROP, OWN, KEPT)
    assert "Not timed for" not in render_plan(a_plan(assignments=(kept,)))


def test_one_in_parts_counts_too_where_something_undivided_may_run_in_place_of_pytorchs_own() -> None:
    rival = dataclasses.replace(OVER_LIMIT, rejected=(("cpu:im2col@32*1", seconds(0.007)),))
    parts = dataclasses.replace(OVER_LIMIT, rejected=(("cpu:im2col@16*2", seconds(0.007)),))
    texts = [
        render_plan(
            a_plan(assignments=(assigned("conv", ConvOp.FPROP, WINOGRAD, seen),), limit_bytes=8 * MIB)
        )
        for seen in (rival, parts, OVER_LIMIT)
    ]

    assert ["Not timed for 1 convolution, whose" in text for text in texts] == [True, False, False]


def test_equal_calls_count_as_one_comparison() -> None:
    (call, _) = a_plan_with_calls().calls
    plan = a_mixed_plan(calls=(call, dataclasses.replace(call, path="conv2")))

    assert note(render_plan(plan), "calls").endswith("Calls compared: 1.")


def test_pytorchs_own_that_is_wrong_is_told_of_instead_of_its_error() -> None:
    rows = (
        assigned("conv1", ConvOp.FPROP, OWN, dataclasses.replace(KEPT, error=2e-7)),
        assigned("conv1", ConvOp.WGRAD, OWN, dataclasses.replace(KEPT, error=1e33)),
    )
    plan = a_mixed_plan(assignments=rows)
    text = render_plan(plan)

    assert note(text, "error").startswith(
        "At most 2.0e-07 relative to float64 where PyTorch's own runs (conv1 f"
    )
    assert note(text, "wrong").startswith("At 1 of 2 sites, the first of them conv1 wgrad, PyTorch's own con")
    assert "by more than 10%" in note(text, "wrong")
    assert note(render_plan(plan, brief=True), "wrong") == note(text, "wrong")
    assert "\nwrong " not in render_plan(a_mixed_plan())


def test_times_that_others_may_have_moved_are_told_of() -> None:
    rows = (
        assigned("conv1", ConvOp.FPROP, WINOGRAD, dataclasses.replace(FASTER, others=0.42)),
        assigned("conv2", ConvOp.FPROP, WINOGRAD, dataclasses.replace(FASTER, others=0.42)),  # the same
        assigned("conv1", ConvOp.DGRAD, OWN, KEPT),
    )
    plan = a_mixed_plan(assignments=rows)

    assert note(render_plan(plan), "disturbed").startswith(
        "While 1 of the plan's 2 times were measured, others took up to 0.4 processors, so these times and "
    )
    assert "disturbed" in render_plan(plan, brief=True)  # what the figures are worth is no legend
    assert [each["others"] for each in plan_as_json(plan)["sites"]] == [0.42, 0.42, 0]
    assert "disturbed" not in render_plan(a_mixed_plan())


def test_a_note_tells_what_frozen_graphs_run() -> None:
    assert note(render_plan(a_plan_with_frozen()), "frozen") == (
        "In graphs that torch.compile freezes for inference, PyTorch's own has its filters packed "
        "beforehand. 1 of 2 convolutions are faster than that; the others run PyTorch's own there: "
        "40.00 ms before, 30.00 ms now."
    )
    untimed = a_mixed_plan(frozen=a_plan_with_frozen().frozen[2:])
    assert not any("frozen" in render_plan(plan) for plan in (a_mixed_plan(), untimed))


def test_the_note_on_totals_names_sites_times_and_base() -> None:
    text = render_plan(a_mixed_plan())

    assert note(text, "total") == (
        "2 of 4 sites have a time before and now: 20.00 ms before, 15.00 ms now, 1.33 times as fast."
    )
    assert note(text, "over limit").startswith("1 of 4 sites, 4.000 ms now. PyTorch's own needs more")
    assert "over limit  " not in render_plan(a_mixed_plan(assignments=a_mixed_plan().assignments[:2]))


def test_a_plan_that_is_slower_says_so() -> None:
    slower = dataclasses.replace(FASTER, chosen=seconds(0.025), verdict=Verdict.SLOWER)
    plan = a_plan(mode=Mode.SHARING, assignments=(assigned("conv", ConvOp.FPROP, WINOGRAD, slower),))

    assert note(render_plan(plan), "slower").startswith(
        "These convolutions take 2.50 times as long as before"
    )
    assert "slower  " not in render_plan(a_mixed_plan())


def test_the_note_on_sites_counts_what_became_of_them() -> None:
    assert note(render_plan(a_mixed_plan()), "sites") == (
        "2 in micro-batches, 0 undivided with another algorithm, PyTorch's own at 1, 1 undivided and not "
        "timed."
    )


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (Mode.REUSE, "The largest site is allotted 3 MiB; the limit for each is 8 MiB."),
        (Mode.SHARING, "All sites together are allotted 8 MiB; the limit for their sum is 8 MiB."),
    ],
)
def test_the_note_on_workspace_says_whose_the_limit_is(mode: Mode, text: str) -> None:
    assert note(render_plan(a_mixed_plan(mode=mode)), "workspace") == text


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (
            Mode.REUSE,
            "The largest site is allotted 1 MiB, and 1.5 MiB were seen; the limit for each is 8 MiB.",
        ),
        (Mode.SHARING, "are allotted 2 MiB, and 3 MiB were seen; the limit for their sum is 8 MiB."),
    ],
)
def test_the_note_on_workspace_says_what_was_seen_where_that_is_more(mode: Mode, text: str) -> None:
    more = dataclasses.replace(FASTER, workspace_bytes=3 * MIB // 2)
    rows = (assigned("a", ConvOp.FPROP, WINOGRAD, more), assigned("b", ConvOp.FPROP, WINOGRAD, more))

    assert note(render_plan(a_mixed_plan(mode=mode, assignments=rows)), "workspace").endswith(text)


def test_a_sum_that_was_seen_above_the_limit_is_told_to_be_noise_of_weighing() -> None:
    more = dataclasses.replace(FASTER, workspace_bytes=4 * MIB + 1024)
    rows = tuple(assigned(path, ConvOp.FPROP, WINOGRAD, more) for path in "ab")

    plan = a_mixed_plan(mode=Mode.SHARING, assignments=rows, limit_bytes=8 * MIB)

    assert note(render_plan(plan), "workspace").endswith("is 8 MiB. (Each is weighed to 64 KiB.)")


def test_the_notes_tell_mode_policy_and_environment() -> None:
    text = render_plan(a_mixed_plan())

    assert note(text, "chosen in") == "mode reuse, policy power_of_two, mucudnn 0.1.0"
    assert note(render_plan(a_mixed_plan(max_error=2e-6)), "chosen in") == (
        "mode reuse, policy power_of_two, max_error 2e-06 (but for PyTorch's own), mucudnn 0.1.0"
    )
    assert note(text, "device") == "cpu: caches 32K 1M 16M, name Example 9000"
    assert note(text, "software") == "onednn 3.7, torch 2.11.0"
    assert note(text, "settings") == "deterministic no, threads 8"


def test_the_notes_advise_a_compiler_where_there_was_none() -> None:
    def told(backend: str, compiler: str) -> str:
        environment = an_environment(backend=backend, software={"C compiler": compiler})
        return render_plan(a_mixed_plan(environment=environment))

    advice = "There was none when this was tuned, so the algorithms in C, mostly the fastest, were not"
    assert note(told("cpu", "none"), "C compiler").startswith(advice)
    assert all("There was none" not in told(*others) for others in (("cpu", "gcc 12.2.0"), ("cudnn", "none")))


@pytest.mark.parametrize("workers", [{}, {"workers": "pool"}])
def test_the_notes_say_that_idle_threads_can_be_told_to_sleep_sooner(workers: dict[str, str]) -> None:
    plan = a_mixed_plan(environment=an_environment(policy={"threads": "8", **workers}))

    assert note(render_plan(plan), "idle threads") == (
        "After an operation OpenMP's idle threads spin for a while, on cores that worker threads need. "
        "Setting GOMP_SPINCOUNT in the environment shortens that; mucudnn info measures what it costs here."
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": {"threads": "1"}},
        {"policy": {}},
        {"policy": {"threads": "8", "GOMP_SPINCOUNT": "10000"}},
        {"policy": {"threads": "8", "OMP_WAIT_POLICY": "PASSIVE"}},
        {"policy": {"threads": "8", "workers": "pool", "GOMP_SPINCOUNT": "10000"}},
        {"policy": {"threads": "8", "workers": "team"}},
        {"backend": "cudnn"},
    ],
)
def test_the_notes_say_nothing_of_idle_threads_that_are_none_or_workers_or_were_told_how_to_wait(
    changes: dict[str, Any],
) -> None:
    plan = a_mixed_plan(environment=an_environment(**changes))

    assert "idle threads" not in render_plan(plan)


def test_the_notes_advise_channels_last_for_contiguous_images_on_processors() -> None:
    last = assigned("last", ConvOp.FPROP, OWN, None, layout=Layout.CHANNELS_LAST)
    plan = a_mixed_plan(assignments=(*a_mixed_plan().assignments, last))

    assert note(render_plan(plan), "layout").startswith(
        "Images are contiguous at 4 of 5 sites. On processors, most patched training steps measured so far"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.WGRAD])
def test_the_notes_advise_channels_last_for_contiguous_images_of_few_bits_on_a_card(
    op: ConvOp, dtype: str
) -> None:
    only = assigned("only", op, OWN, None, dtype=dtype)
    card = an_environment(backend="cudnn", policy={"TF32": "True"})

    told = note(render_plan(a_mixed_plan(assignments=(only,), environment=card)), "layout")

    assert told.startswith(
        "Images are contiguous at 1 of 1 sites of 16 bits or TF32. There cuDNN copies them"
    )


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("cudnn", {}),
        ("cudnn", {"dtype": "float64"}),
        ("cudnn", {"dtype": "bfloat16", "layout": Layout.CHANNELS_LAST}),
        ("scripted", {"dtype": "bfloat16"}),
        ("cpu", {"layout": Layout.CHANNELS_LAST}),
        ("cpu", {"op": ConvOp.FPROP}),
        ("cpu", dict.fromkeys(("input_size", "kernel_size", "padding", "stride", "dilation"), (1, 1, 1))),
    ],
)
def test_the_notes_advise_no_layout_where_none_was_found_faster(
    backend: str, problem: dict[str, Any]
) -> None:
    only = assigned("only", **{"op": ConvOp.WGRAD, "division": OWN, "evidence": None, **problem})
    plan = a_mixed_plan(assignments=(only,), environment=an_environment(backend=backend))

    assert "memory_format" not in render_plan(plan)


@pytest.mark.parametrize(
    ("backend", "part_ms", "is_told"),
    [("cudnn", 0.09, True), ("cudnn", 0.11, False), ("cpu", 0.09, False)],
)
def test_the_notes_say_where_a_cards_parts_are_so_short_that_the_host_may_decide(
    backend: str, part_ms: float, is_told: bool
) -> None:
    parts = Division((Candidate("cudnn:eng1", 16, part_ms * 1e-3, 0),) * 2)
    kept = Division((Candidate("cudnn:aten", 32, 1e-6, 0),))
    rows = (assigned("a", ConvOp.WGRAD, parts, None), assigned("a", ConvOp.FPROP, kept, None))

    told = render_plan(a_plan(assignments=rows, environment=an_environment(backend=backend)))

    assert ("1 of 2 sites run parts of less than 0.1 ms" in told) == is_told


def test_the_notes_take_what_a_whole_division_was_seen_to_take_for_the_time_of_its_parts() -> None:
    """Of 5 ms, and not of what the profile says."""
    parts = Division((Candidate("cudnn:eng1", 16, 1e-5, 0),) * 2)
    card = an_environment(backend="cudnn")
    plan = a_plan(assignments=(assigned("a", ConvOp.FPROP, parts, FASTER),), environment=card)

    assert "the host took" not in render_plan(plan)


def test_the_notes_count_sites_whose_results_may_differ_from_run_to_run() -> None:
    varying = Division((Candidate("cudnn:eng1", 32, 0.01, 0, is_deterministic=False),))
    plan = a_mixed_plan(assignments=(assigned("a", ConvOp.WGRAD, varying, None), *a_mixed_plan().assignments))

    assert note(render_plan(plan), "repeating").startswith(
        "1 of 5 sites run an algorithm that cuDNN calls nondeterministic"
    )
    assert [site["now"]["is_deterministic"] for site in plan_as_json(plan)["sites"]] == [False, *4 * [True]]
    assert "repeating" not in render_plan(a_mixed_plan())


def test_untouched_convolutions_are_listed_with_their_reasons() -> None:
    plan = a_mixed_plan(untouched=(("stem", "Conv3d is not divided"), ("", "it has a batch of none")))

    assert note(render_plan(plan), "not tuned") == (
        "stem: Conv3d is not divided. the model itself: it has a batch of none."
    )
    assert note(render_plan(a_mixed_plan()), "not tuned") == "Nothing: every convolution was tuned."


def test_a_plan_of_forward_passes_alone_says_that_gradients_are_not_tuned() -> None:
    forward = assigned("conv1", ConvOp.FPROP, WINOGRAD, FASTER)
    of_transposed = assigned("up", ConvOp.DGRAD, WINOGRAD, FASTER)
    told = "Gradients: the model was tuned for inference, or none were needed or asked for."

    inference = a_plan(assignments=(forward, of_transposed), transposed=("up",))
    assert note(render_plan(inference), "not tuned") == told
    assert told not in render_plan(a_plan(assignments=(forward, of_transposed)))


def test_the_notes_say_how_many_rounds_and_comparisons_there_were() -> None:
    text = render_plan(a_mixed_plan())

    assert note(text, "times").startswith("Medians of 10 to 45 rounds.")
    assert note(text, "verdicts").count("Comparisons made: 2;") == 1  # the chosen, and one more
    assert note(text, "error") == "At most 2.0e-06 relative to float64."


def test_the_note_on_the_error_tells_the_largest_of_all_sites() -> None:
    rows = [
        assigned(f"conv{n}", ConvOp.FPROP, WINOGRAD, dataclasses.replace(FASTER, error=error), in_channels=n)
        for n, error in enumerate((1e-7, 2e-6, None), 16)
    ]
    text = render_plan(a_mixed_plan(assignments=tuple(rows)))

    assert note(text, "measured once").startswith("Measurements: 3,")
    assert note(text, "error") == "At most 2.0e-06 relative to float64."


def test_the_note_on_the_error_counts_sites_whose_times_are_predicted() -> None:
    larger = dataclasses.replace(PREDICTED, error=7e-6)
    predicted = assigned("conv2", ConvOp.FPROP, WINOGRAD, larger, in_channels=16)
    both = a_mixed_plan(assignments=(assigned("conv1", ConvOp.FPROP, WINOGRAD, FASTER), predicted))

    for plan in (both, a_mixed_plan(assignments=(predicted,))):
        assert note(render_plan(plan), "error") == "At most 7.0e-06 relative to float64."


def test_the_error_of_pytorchs_own_which_no_bound_holds_is_told_apart() -> None:
    exact = assigned("a", ConvOp.FPROP, WINOGRAD, dataclasses.replace(FASTER, error=2e-6))
    rows = [
        assigned(path, ConvOp.WGRAD, OWN, dataclasses.replace(FASTER, error=error), in_channels=n)
        for n, (path, error) in enumerate({"b": 1e-7, "c": 5e-3, "d": 3e-6}.items(), 16)
    ]
    own = (
        "At most 5.0e-03 relative to float64 where PyTorch's own runs (c wgrad), for which there is no bound."
    )

    text = render_plan(a_mixed_plan(assignments=(exact, *rows)))

    assert note(text, "error") == f"At most 2.0e-06 relative to float64. {own}"
    assert note(render_plan(a_mixed_plan(assignments=tuple(rows))), "error") == own


def test_of_parts_by_pytorchs_own_and_by_others_the_error_may_be_pytorchs_own() -> None:
    parts = Division((*WINOGRAD.parts[:1], Candidate("cpu:aten", 16, 0.005, MIB)))
    mixed = assigned("a", ConvOp.WGRAD, parts, dataclasses.replace(FASTER, error=5e-3))

    text = render_plan(a_mixed_plan(assignments=(mixed,)))

    assert note(text, "error") == (
        "At most 5.0e-03 relative to float64 where PyTorch's own runs (a wgrad), for which there is no bound."
    )


def test_sites_that_share_problem_and_division_count_as_one_measurement() -> None:
    rows = tuple(assigned(f"conv{i}", ConvOp.FPROP, WINOGRAD, FASTER) for i in range(5))

    text = render_plan(a_mixed_plan(assignments=rows))

    assert note(text, "measured once").startswith("Measurements: 1, sites: 5;")
    assert note(text, "times").startswith("Medians of 10 rounds.")


def test_the_note_on_prediction_compares_with_the_sum_of_the_parts() -> None:
    assert note(render_plan(a_mixed_plan()), "prediction") == (
        "Whole divisions took 0.67 to 1.00 times (median 0.83) the sum of their parts' measured times."
    )


def test_a_prediction_of_nothing_is_not_compared() -> None:
    free = Division((Candidate("cpu:free", 32, 0.0, 0),))
    plan = a_mixed_plan(assignments=(assigned("conv", ConvOp.FPROP, free, FASTER),))

    assert note(render_plan(plan), "prediction") == "The profiles predict nothing."


def test_a_plan_of_predictions_alone_explains_its_times_and_verdicts() -> None:
    few = dataclasses.replace(PREDICTED, chosen=Estimate(0.01, 0.005, math.inf, 3))
    rows = (
        assigned("conv1", ConvOp.FPROP, WINOGRAD, few),
        assigned("conv2", ConvOp.FPROP, WINOGRAD, dataclasses.replace(OVER_LIMIT, is_predicted=True)),
    )
    text = render_plan(a_plan(assignments=rows, limit_bytes=8 * MIB, mode=Mode.SHARING))

    assert "10.00 (n = 3)" in text
    explained = note(text, "predicted")
    assert all(f"{word}: " in explained for word in ("n", "own", "limit"))
    assert all(verdict in explained for verdict in ("FASTER", "SLOWER", "SAME", "AMBIGUOUS"))
    assert "share: " not in explained


def test_where_all_sites_are_predicted_the_notes_tell_of_calls_and_frozen_graphs_all_the_same() -> None:
    (call, _) = a_plan_with_calls().calls
    plan = a_plan(
        assignments=(assigned("conv1", ConvOp.FPROP, WINOGRAD, PREDICTED),),
        limit_bytes=8 * MIB,
        calls=(dataclasses.replace(call, others=0.42),),
        frozen=a_plan_with_frozen().frozen,
    )
    text = render_plan(plan)

    assert note(text, "calls").endswith("Calls compared: 1.")
    assert "1 of 2 convolutions are faster" in note(text, "frozen")
    assert note(text, "disturbed").startswith("While 1 of the plan's 3 times were measured")


def test_a_predicted_site_is_no_measurement() -> None:
    text = render_plan(a_plan_of_a_recording())

    assert note(text, "measured once").startswith("Measurements: 1, sites: 2;")
    assert note(text, "verdicts").count("Comparisons made: 0;") == 1


def test_a_plan_of_which_everything_was_run_says_nothing_of_predictions() -> None:
    assert "predicted" not in render_plan(a_mixed_plan())


def test_where_nothing_is_gained_that_is_said() -> None:
    kept = a_plan(assignments=(assigned("conv1", ConvOp.FPROP, OWN, KEPT),))

    assert note(render_plan(kept), "sites").endswith(
        "Within this limit nothing is faster than PyTorch's own."
    )
    assert "nothing is faster" not in note(render_plan(a_mixed_plan()), "sites")
